/* A pool over a source that stays when the pool is gone, and threads that use it: the
   base of test_cache.c and test_cache_ends.c. */
#ifndef NRM_TESTS_CACHED_POOL_H
#define NRM_TESTS_CACHED_POOL_H

#include "core/uses.h"
#include "os/system.h"
#include "pools/pool.h"
#include "workers.h"

/* A pool over a source that stays when the pool is gone. */
struct pooled {
    nrm_resource *source, *pool;
};

static inline struct pooled
make_pool(size_t maximum_nbytes)
{
    struct pooled pooled = {.source = host_source()};
    nrm_resource_retain(pooled.source);
    pooled.pool = pool_over(pooled.source, maximum_nbytes);
    return pooled;
}

/* Of a pool that is gone, or goes now: 0, a moment later where the background thread is
   looking at it. */
static inline int64_t
left_nbytes(nrm_resource *source)
{
    for (int i = 0; i < 1000 && live_nbytes(source) != 0; i++) {
        (void)nrm__retired_drain(0);
        nrm__sleep_ns(1000000);
    }
    return live_nbytes(source);
}

static inline void
check_gone(struct pooled *pooled)
{
    CHECK_EQ(left_nbytes(pooled->source), 0);
    nrm_resource_release(pooled->source);
}

static inline void
release(struct pooled *pooled)
{
    nrm__pool_check(pooled->pool);
    nrm_resource_release(pooled->pool);
    check_gone(pooled);
}

static inline void
start_workers(struct worker *workers, int n)
{
    for (int i = 0; i < n; i++) {
        worker_start(&workers[i]);
    }
}

static inline void
end_workers(struct worker *workers, int n)
{
    for (int i = 0; i < n; i++) {
        worker_end(&workers[i]);
    }
}

struct routed {
    struct pooled small;
    nrm_resource *large, *route;
};

static inline struct routed
make_route(nrm_resource *large, size_t threshold)
{
    struct routed routed = {.small = make_pool(0), .large = large};
    nrm_route_options options = NRM_OPTIONS(nrm_route_options);
    options.large = large;
    options.small = options.rescue = routed.small.pool;
    options.threshold = threshold;
    CHECK_OK(nrm_route_create(&options, &routed.route));
    return routed;
}

static inline void
release_route(struct routed *routed)
{
    CHECK_EQ(live_nbytes(routed->route), 0);
    nrm_resource_release(routed->route);
    nrm_resource_release(routed->large);
    release(&routed->small);
}

/* Threads in turn: what each holds back of the counters is bounded in both of them. */
struct turn {
    nrm_resource *mr;
    void **ptrs;
    size_t n, nbytes;
};

static inline void
allocate_all(void *argument)
{
    struct turn *turn = argument;
    for (size_t i = 0; i < turn->n; i++) {
        turn->ptrs[i] = allocate(turn->mr, turn->nbytes);
    }
}

static inline void
free_all(void *argument)
{
    struct turn *turn = argument;
    for (size_t i = 0; i < turn->n; i++) {
        CHECK_OK(nrm_resource_deallocate(turn->mr, turn->ptrs[i], 0, NULL));
    }
}

#endif
