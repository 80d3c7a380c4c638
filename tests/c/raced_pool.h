/* A pool whose threads keep something: the base of test_cache_races.c and
   test_cache_walk.c. */
#ifndef NRM_TESTS_RACED_POOL_H
#define NRM_TESTS_RACED_POOL_H

#include "core/uses.h"
#include "pools/pool.h"
#include "workers.h"

static nrm_resource *source, *pool;

static inline void
begin(void)
{
    source = host_source();
    nrm_resource_retain(source);
    pool = pool_over(source, 0);
}

/* Nothing of the pool lives: it and all that it had are gone when this returns. */
static inline void
end(void)
{
    CHECK_EQ(live_nbytes(pool), 0);
    nrm__pool_check(pool);
    CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    CHECK_EQ(reserved_nbytes(pool), 0);
    nrm_resource_release(pool);
    (void)nrm__retired_drain(0);
    CHECK_EQ(live_nbytes(source), 0);
    nrm_resource_release(source);
}

#endif
