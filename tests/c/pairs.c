/* What tests/test_instructions.py counts the instructions of: pairs of an allocation
   and a free, after a few of them to warm up, and a few other calls. One function a
   case, each called once from main. Memory of the driver is that of the simulated one.

       pairs N        does N pairs of every case */
#include <stdio.h>
#include <stdlib.h>

#include "base/bits.h"
#include "core/scopes.h"
#include "cuda/context.h"
#include "cuda/driver.h"
#include "nrm/adaptors.h"
#include "nrm/pools.h"
#include "nrm/registry.h"
#include "nrm/stream.h"
#include "nrm/uses.h"

#define N_WARM 100

/* A function of its own, called as it stands. */
#ifdef __clang__
#define CALLED __attribute__((noinline))
#else
#define CALLED __attribute__((noinline, noclone))
#endif

static void
require(nrm_status status)
{
    if (status != NRM_OK) {
        fprintf(stderr, "pairs: %s\n", nrm_last_error()->message);
        exit(1);
    }
}

__attribute__((always_inline)) static inline void
do_pairs(nrm_resource *mr, size_t nbytes, size_t alignment, nrm_stream *stream, long n)
{
    for (long i = 0; i < n; i++) {
        void *ptr = NULL;
        require(nrm_resource_allocate(mr, nbytes, alignment, stream, &ptr));
        require(nrm_resource_deallocate(mr, ptr, nbytes, stream));
    }
}

/* Its pairs, and those before: the first ones find nothing kept yet. */
#define CASE(name, nbytes, alignment)                                                  \
    CALLED static void name(nrm_resource *mr, nrm_stream *stream, long n)              \
    {                                                                                  \
        __asm__ volatile("/* " #name " */"); /* or equal functions become one */       \
        do_pairs(mr, nbytes, alignment, stream, n);                                    \
    }                                                                                  \
    CALLED static void warm_##name(nrm_resource *mr, nrm_stream *stream)               \
    {                                                                                  \
        __asm__ volatile("/* warm " #name " */");                                      \
        do_pairs(mr, nbytes, alignment, stream, N_WARM);                               \
    }

/* The same of zeroed ones. */
CALLED static void
zeroed_64_B(nrm_resource *mr, long n)
{
    for (long i = 0; i < n; i++) {
        void *ptr = NULL;
        require(nrm_resource_allocate_zeroed(mr, 64, 64, NULL, &ptr));
        require(nrm_resource_deallocate(mr, ptr, 64, NULL));
    }
}

CASE(pool_0_B, 0, 64)
CASE(pool_64_B, 64, 64)
CASE(pool_4_KiB, 4 * NRM__KIB, 64)
CASE(pool_64_KiB, 64 * NRM__KIB, 64)
CASE(pool_1_MiB, NRM__MIB, 64)
CASE(pool_4_MiB, 4 * NRM__MIB, 64)
CASE(aligned_64_B, 64, 4096)
CASE(aligned_64_KiB, 64 * NRM__KIB, 4096)
CASE(route_64_B, 64, 64)
CASE(route_64_KiB, 64 * NRM__KIB, 64)
CASE(scoped_64_B, 64, 64)
CASE(scoped_64_KiB, 64 * NRM__KIB, 64)
CASE(adaptors_64_B, 64, 64)
CASE(adaptors_64_KiB, 64 * NRM__KIB, 64)
CASE(logged_64_B, 64, 64)
CASE(logged_64_KiB, 64 * NRM__KIB, 64)
CASE(device_64_KiB, 64 * NRM__KIB, 0)
CASE(device_default_64_KiB, 64 * NRM__KIB, 0)
CASE(device_logged_64_KiB, 64 * NRM__KIB, 0)
CASE(fixed_64_KiB, 64 * NRM__KIB, 0)
CASE(handle_64_KiB, 64 * NRM__KIB, 0)
CASE(pinned_64_KiB, 64 * NRM__KIB, 0)
CASE(parked_64_KiB, 64 * NRM__KIB, 0)
CASE(parked_1_MiB, NRM__MIB, 0)
CASE(routed_64_KiB, 64 * NRM__KIB, 0)
CASE(routed_1_MiB, NRM__MIB, 0)

#define RUN(name, mr, stream)                                                          \
    do {                                                                               \
        warm_##name(mr, stream);                                                       \
        name(mr, stream, n);                                                           \
    } while (0)

static nrm_resource *
pool_over(nrm_resource *source, nrm_reuse reuse)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    nrm_resource *pool = NULL;
    options.reuse = reuse;
    require(nrm_pool_create(source, &options, &pool));
    nrm_resource_release(source);
    return pool;
}

static nrm_resource *
fixed_over(nrm_resource *upstream)
{
    nrm_fixed_size_options options = NRM_OPTIONS(nrm_fixed_size_options);
    nrm_resource *fixed = NULL;
    options.block_nbytes = 64 * NRM__KIB;
    require(nrm_fixed_size_create(upstream, &options, &fixed));
    return fixed;
}

/* As a handler over the pool has it. */
/* What stands behind page-locked arrays. */
static nrm_resource *
make_pinned_route(nrm_resource *pool)
{
    nrm_resource *host = NULL, *route = NULL;
    nrm_route_options options = NRM_OPTIONS(nrm_route_options);
    require(nrm_host_create(NULL, &host));
    options.small = pool_over(host, NRM_REUSE_DEFAULT);
    options.large = pool;
    options.fallback = options.rescue = options.small;
    options.threshold = 64 * NRM__KIB;
    require(nrm_route_create(&options, &route));
    nrm_resource_release(options.small);
    return route;
}

static nrm_resource *
make_route(nrm_resource *pool)
{
    nrm_resource *route = NULL;
    nrm_route_options options = NRM_OPTIONS(nrm_route_options);
    options.large = options.rescue = pool;
    require(nrm_route_create(&options, &route));
    return route;
}

/* A limit over statistics over the pool. */
static nrm_resource *
make_adaptors(nrm_resource *pool)
{
    nrm_resource *statistics = NULL, *limiting = NULL;
    nrm_limiting_options options = NRM_OPTIONS(nrm_limiting_options);
    options.allocation_limit = NRM__GIB;
    require(nrm_statistics_create(pool, &statistics));
    require(nrm_limiting_create(statistics, &options, &limiting));
    nrm_resource_release(statistics);
    return limiting;
}

/* A log over `upstream`. */
static nrm_resource *
make_log(nrm_resource *upstream)
{
    nrm_resource *log = NULL;
    nrm_logging_options options = NRM_OPTIONS(nrm_logging_options);
    options.path = "/dev/null";
    require(nrm_logging_create(upstream, &options, &log));
    return log;
}

/* A log over a limit over statistics. Rows are written before, or in another thread. */
static void
count_logged(nrm_resource *adaptors, long n)
{
    nrm_resource *log = make_log(adaptors);
    warm_logged_64_B(log, NULL);
    require(nrm_logging_flush(log));
    logged_64_B(log, NULL, n);
    warm_logged_64_KiB(log, NULL);
    require(nrm_logging_flush(log));
    logged_64_KiB(log, NULL, n);
    nrm_resource_release(log);
}

static void
count_device_logged(nrm_resource *pool, long n)
{
    nrm_resource *adaptors = make_adaptors(pool), *log = make_log(adaptors);
    warm_device_logged_64_KiB(log, nrm_stream_default());
    require(nrm_logging_flush(log));
    device_logged_64_KiB(log, nrm_stream_default(), n);
    nrm_resource_release(log);
    nrm_resource_release(adaptors);
}

/* A scope that begins, and ends. */
CALLED static void
scope(long n)
{
    for (long i = 0; i < n; i++) {
        uint64_t name = 0;
        nrm_counts counts;
        require(nrm__scope_push(NULL, &name));
        require(nrm__scope_pop(name, &counts));
    }
}

/* While one is open. */
static void
count_scopes(nrm_resource *pool, long n)
{
    uint64_t name = 0;
    nrm_counts counts;
    require(nrm__scope_push(NULL, &name));
    RUN(scoped_64_B, pool, NULL);
    RUN(scoped_64_KiB, pool, NULL);
    require(nrm__scope_pop(name, &counts));
    scope(n);
}

static void
count_host(long n)
{
    nrm_resource *host = NULL;
    require(nrm_host_create(NULL, &host));
    nrm_resource *pool = pool_over(host, NRM_REUSE_DEFAULT);
    nrm_resource *route = make_route(pool), *adaptors = make_adaptors(pool);
    RUN(pool_0_B, pool, NULL);
    RUN(pool_64_B, pool, NULL);
    RUN(pool_4_KiB, pool, NULL);
    RUN(pool_64_KiB, pool, NULL);
    RUN(pool_1_MiB, pool, NULL);
    RUN(pool_4_MiB, pool, NULL);
    RUN(aligned_64_B, pool, NULL);
    RUN(aligned_64_KiB, pool, NULL);
    RUN(route_64_B, route, NULL);
    RUN(route_64_KiB, route, NULL);
    zeroed_64_B(route, n);
    RUN(adaptors_64_B, adaptors, NULL);
    RUN(adaptors_64_KiB, adaptors, NULL);
    count_logged(adaptors, n);
    count_scopes(pool, n);
    nrm_resource_release(adaptors);
    nrm_resource_release(route);
    nrm_resource_release(pool);
}

/* Somebody else's. */
static nrm_stream *
wrap_handle(void)
{
    nrm_CUstream handle = NULL;
    nrm_stream *stream = NULL;
    struct nrm__cuda_scope scope;
    require(nrm__cuda_enter(0, &scope));
    (void)scope.driver->cuStreamCreate(&handle, NRM_CU_STREAM_NON_BLOCKING);
    nrm__cuda_leave(&scope);
    require(nrm_stream_wrap((uintptr_t)handle, NULL, NULL, &stream));
    return stream;
}

/* Looked up, and let go. */
CALLED static void
current_of_device(long n)
{
    for (long i = 0; i < n; i++) {
        nrm_resource *mr = NULL;
        require(nrm_get_per_device_resource(0, &mr));
        nrm_resource_release(mr);
    }
}

CALLED static void
current(long n)
{
    for (long i = 0; i < n; i++) {
        nrm_resource *mr = NULL;
        require(nrm_get_current_device_resource(&mr));
        nrm_resource_release(mr);
    }
}

/* An object for somebody else's stream, made and let go. */
CALLED static void
wrap(long n)
{
    for (long i = 0; i < n; i++) {
        nrm_stream *stream = NULL;
        require(nrm_stream_wrap(0x1000, NULL, NULL, &stream));
        nrm_stream_release(stream);
    }
}

CALLED static void
use(void *ptr, nrm_stream *stream, long n)
{
    for (long i = 0; i < n; i++) {
        require(nrm_record_use(ptr, stream));
    }
}

CALLED static void
use_handle(void *ptr, uintptr_t handle, long n)
{
    for (long i = 0; i < n; i++) {
        require(nrm_record_use_on_handle(ptr, handle));
    }
}

static void
count_uses(nrm_resource *pinned_pool, nrm_stream *owned, uintptr_t handle, long n)
{
    void *ptr = NULL;
    require(nrm_resource_allocate(pinned_pool, 64 * NRM__KIB, 0, NULL, &ptr));
    require(nrm_record_use(ptr, owned)); /* it is asked about once */
    use(ptr, owned, n);
    use_handle(ptr, handle, n);
    require(nrm_resource_deallocate(pinned_pool, ptr, 64 * NRM__KIB, NULL));
}

static void
count_calls(nrm_resource *ordered, nrm_resource *parking, nrm_stream *owned,
            nrm_stream *bare, long n)
{
    count_uses(parking, owned, nrm_stream_handle(bare), n);
    require(nrm_set_per_device_resource(0, ordered));
    current_of_device(n);
    current(n);
    require(nrm_set_per_device_resource(0, NULL));
    wrap(n);
}

static void
count_driver(long n)
{
    nrm_resource *device = NULL, *pinned = NULL;
    nrm_stream *owned = NULL;
    setenv("NUMPY_RMM_CUDASIM_PATH", NRM_TEST_CUDASIM, 1);
    require(nrm__cuda_set_library("simulator"));
    require(nrm_device_create(NULL, &device));
    require(nrm_pinned_create(NULL, &pinned));
    nrm_resource *fixed = fixed_over(device);
    nrm_resource *ordered = pool_over(device, NRM_REUSE_DEFAULT);
    nrm_resource *immediate = pool_over(pinned, NRM_REUSE_IMMEDIATE);
    nrm_resource *parking = pool_over(pinned, NRM_REUSE_CONTEXT);
    require(nrm_stream_create(0, NRM_STREAM_NON_BLOCKING, &owned));
    nrm_stream *bare = wrap_handle();
    RUN(device_64_KiB, ordered, owned);
    RUN(device_default_64_KiB, ordered, nrm_stream_default());
    count_device_logged(ordered, n);
    RUN(fixed_64_KiB, fixed, owned);
    RUN(handle_64_KiB, ordered, bare);
    RUN(pinned_64_KiB, immediate, NULL);
    RUN(parked_64_KiB, parking, NULL);
    RUN(parked_1_MiB, parking, NULL);
    nrm_resource *route = make_pinned_route(parking);
    RUN(routed_64_KiB, route, NULL);
    RUN(routed_1_MiB, route, NULL);
    nrm_resource_release(route);
    count_calls(ordered, parking, owned, bare, n);
    nrm_stream_release(bare);
    nrm_stream_release(owned);
    nrm_resource_release(fixed);
    nrm_resource_release(ordered);
    nrm_resource_release(immediate);
    nrm_resource_release(parking);
}

int
main(int argc, char **argv)
{
    long n = argc == 2 ? strtol(argv[1], NULL, 10) : 0;
    if (n <= 0) {
        fprintf(stderr, "usage: pairs N\n");
        return 2;
    }
    count_host(n);
    count_driver(n);
    return 0;
}
