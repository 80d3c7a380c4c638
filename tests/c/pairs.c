/* What tests/test_instructions.py counts the instructions of: pairs of an allocation and a
   free, after a few of them to warm up. One function a case, each called once from main.

       pairs N        does N pairs of every case */
#include <stdio.h>
#include <stdlib.h>

#include "base/bits.h"
#include "nrm/pools.h"

#define N_WARM 100

static void
require(nrm_status status)
{
    if (status != NRM_OK) {
        fprintf(stderr, "pairs: %s\n", nrm_last_error()->message);
        exit(1);
    }
}

static inline void
do_pairs(nrm_resource *mr, size_t nbytes, long n)
{
    for (long i = 0; i < n; i++) {
        void *ptr = NULL;
        require(nrm_resource_allocate(mr, nbytes, 64, NULL, &ptr));
        require(nrm_resource_deallocate(mr, ptr, nbytes, NULL));
    }
}

#define CASE(name, nbytes)                                                             \
    __attribute__((noinline, noclone)) static void name(nrm_resource *mr, long n)      \
    {                                                                                  \
        __asm__ volatile("/* " #name " */"); /* or equal functions become one */       \
        do_pairs(mr, nbytes, n);                                                       \
    }

CASE(pool_64_B, 64)
CASE(pool_64_KiB, 64 * NRM__KIB)
CASE(pool_4_MiB, 4 * NRM__MIB)
CASE(route_64_B, 64)
CASE(route_64_KiB, 64 * NRM__KIB)
CASE(warm_64_B, 64)
CASE(warm_64_KiB, 64 * NRM__KIB)
CASE(warm_4_MiB, 4 * NRM__MIB)

static nrm_resource *
make_pool(void)
{
    nrm_resource *host = NULL, *pool = NULL;
    require(nrm_host_create(NULL, &host));
    require(nrm_pool_create(host, NULL, &pool));
    nrm_resource_release(host);
    return pool;
}

/* As a handler over the pool has it. */
static nrm_resource *
make_route(nrm_resource *pool)
{
    nrm_resource *route = NULL;
    nrm_route_options options = NRM_OPTIONS(nrm_route_options);
    options.large = options.rescue = pool;
    require(nrm_route_create(&options, &route));
    return route;
}

int
main(int argc, char **argv)
{
    long n = argc == 2 ? strtol(argv[1], NULL, 10) : 0;
    if (n <= 0) {
        fprintf(stderr, "usage: pairs N\n");
        return 2;
    }
    nrm_resource *pool = make_pool(), *route = make_route(pool);
    warm_64_B(route, N_WARM);
    warm_64_KiB(route, N_WARM);
    warm_4_MiB(pool, N_WARM);
    pool_64_B(pool, n);
    pool_64_KiB(pool, n);
    pool_4_MiB(pool, n);
    route_64_B(route, n);
    route_64_KiB(route, n);
    nrm_resource_release(route);
    nrm_resource_release(pool);
    return 0;
}
