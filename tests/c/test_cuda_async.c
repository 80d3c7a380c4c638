/* The sources over a memory pool of the driver: their own, somebody else's, and the one
   of managed memory. */
#include "streams.h"

#include "core/hooks.h"
#include "core/ops.h"
#include "core/uses.h"
#include "cuda/context.h"
#include "nrm/options.h"
#include "nrm/pools.h"
#include "nrm/sources.h"

#define MIB ((size_t)1 << 20)

static nrm_CUmemoryPool others; /* of "view" */

static nrm_status
create_async(int device, nrm_resource **out)
{
    nrm_cuda_async_options options = NRM_OPTIONS(nrm_cuda_async_options);
    options.set_device = device >= 0;
    options.device = device;
    return nrm_cuda_async_create(&options, out);
}

static nrm_status
create_view(int device, nrm_resource **out)
{
    nrm_CUmemPoolProps props = {
        .allocType = NRM_CU_MEM_ALLOCATION_TYPE_PINNED,
        .location = {.type = NRM_CU_MEM_LOCATION_TYPE_DEVICE,
                     .id = device < 0 ? 0 : device},
    };
    uint64_t all = UINT64_MAX;
    CHECK_OK(nrm__cuda_init(NULL));
    CHECK_EQ(cuda.cuMemPoolCreate(&others, &props), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemPoolSetAttribute(others, NRM_CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                                        &all),
             NRM_CUDA_SUCCESS);
    nrm_cuda_async_view_options options = NRM_OPTIONS(nrm_cuda_async_view_options);
    options.set_device = device >= 0;
    options.device = device;
    options.pool_handle = (uintptr_t)others;
    return nrm_cuda_async_view_create(&options, out);
}

static nrm_status
create_managed(int device, nrm_resource **out)
{
    nrm_device_options options = NRM_OPTIONS(nrm_device_options);
    options.set_device = device >= 0;
    options.device = device;
    return nrm_cuda_async_managed_create(&options, out);
}

static const struct kind {
    const char *name;
    nrm_status (*create)(int device, nrm_resource **out);
    nrm_kind kind;
} kinds[] = {
    {"own", create_async, NRM_KIND_DEVICE},
    {"view", create_view, NRM_KIND_DEVICE},
    {"managed", create_managed, NRM_KIND_MANAGED},
};

static nrm_resource *
start_on(const struct kind *kind, const struct nrm_cudasim_config *config, int device)
{
    nrm_resource *mr = NULL;
    simulator_start(config);
    CHECK_OK(kind->create(device, &mr));
    return mr;
}

static nrm_resource *
start(const struct kind *kind)
{
    struct nrm_cudasim_config config = simulator_config();
    config.devices = 2;
    return start_on(kind, &config, -1);
}

static void
synchronize_all(void)
{
    int active[NRM__MAX_DEVICES];
    int n = nrm__cuda_active_devices(active);
    for (int i = 0; i < n; i++) {
        make_current(active[i]);
        CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
        cuda.cuCtxSetCurrent(NULL);
    }
}

static void
stop(nrm_resource *mr)
{
    for (int i = 0; i < 2000 && simulator_count(NRM_CUDASIM_POOL_ALLOCATIONS) != 0;
         i++) {
        (void)nrm__retired_drain(UINT64_MAX);
        usleep(1000); /* the background thread may hold the last one */
    }
    CHECK_EQ(simulator_count(NRM_CUDASIM_POOL_ALLOCATIONS), 0u);
    nrm_resource_release(mr);
    if (others != NULL) {
        CHECK_EQ(cuda.cuMemPoolDestroy(others), NRM_CUDA_SUCCESS);
        others = NULL;
    }
    synchronize_all();
    CHECK_EQ(simulator_count(NRM_CUDASIM_POOLS), 0u);
    simulator_check_faults();
}

static nrm_CUdeviceptr
allocate(nrm_resource *mr, size_t nbytes, nrm_stream *stream)
{
    void *ptr = NULL;
    CHECK_OK(nrm_resource_allocate(mr, nbytes, 0, stream, &ptr));
    return (nrm_CUdeviceptr)(uintptr_t)ptr;
}

static void
give_back(nrm_resource *mr, nrm_CUdeviceptr ptr, nrm_stream *stream)
{
    CHECK_OK(nrm_resource_deallocate(mr, (void *)(uintptr_t)ptr, 0, stream));
}

static int64_t
reserved(nrm_resource *mr)
{
    nrm_statistics statistics;
    CHECK_OK(nrm_resource_statistics(mr, &statistics));
    return statistics.reserved_bytes;
}

/* ---- what all have in common ----------------------------------------------------- */

TEST_EACH(nothing_is_done_before_the_first_request, kinds)
{
    if (row->create == create_view) {
        SKIP("a pool of others has a driver that was initialised");
    }
    nrm_resource *mr = start(row);
    CHECK_EQ(sim.call_count("cuInit"), 0u);
    CHECK_EQ(nrm_resource_kind(mr), row->kind);
    CHECK_EQ(nrm_resource_device(mr), NRM_DEVICE_NONE);
    CHECK_EQ(reserved(mr), 0);
    stop(mr);
    CHECK_EQ(sim.call_count("cuMemPoolCreate"), 0u);
}

TEST_EACH(memory_follows_the_stream, kinds)
{
    nrm_resource *mr = start(row);
    nrm_CUdeviceptr first = allocate(mr, MIB, NULL);
    make_current(0);
    nrm_stream *a = new_stream(), *b = new_stream();
    give_back(mr, first, a);
    hold(a);
    nrm_CUdeviceptr mine = allocate(mr, MIB, a);
    CHECK_EQ(cuda.cuMemsetD8Async(mine, 7, MIB, handle_of(a)), NRM_CUDA_SUCCESS);
    give_back(mr, mine, a);
    CHECK_EQ(allocate(mr, MIB, a), mine); /* at once, on the same stream */
    give_back(mr, mine, a);
    nrm_CUdeviceptr other = allocate(mr, MIB, b);
    CHECK_NE(other, mine);
    CHECK_EQ(cuda.cuMemsetD8Async(other, 8, MIB, handle_of(b)), NRM_CUDA_SUCCESS);
    let_go(a);
    CHECK(has_all(other, MIB, 8));
    give_back(mr, other, b);
    nrm_stream_release(a);
    nrm_stream_release(b);
    CHECK_EQ(sim.call_count("cuMemFree"), 0u);
    cuda.cuCtxSetCurrent(NULL);
    stop(mr);
}

/* Without a stream the memory is anybody's, and goes back behind all work there is. */
TEST_EACH(a_caller_without_a_stream_waits_for_nobody_and_is_waited_for, kinds)
{
    nrm_resource *mr = start(row);
    nrm_CUdeviceptr ptr = allocate(mr, MIB, NULL);
    make_current(0);
    nrm_stream *busy = new_stream();
    hold(busy);
    CHECK_EQ(cuda.cuMemsetD8Async(ptr, 5, MIB, handle_of(busy)), NRM_CUDA_SUCCESS);
    give_back(mr, ptr, NULL);
    nrm_CUdeviceptr next = allocate(mr, MIB, NULL);
    CHECK_NE(next, ptr);
    CHECK_EQ(cuda.cuMemsetD8Async(next, 6, MIB, 0), NRM_CUDA_SUCCESS);
    nrm_statistics statistics;
    CHECK_OK(nrm_resource_statistics(mr, &statistics));
    CHECK_EQ(statistics.current_count, 1);
    CHECK_EQ(statistics.parked_bytes, (int64_t)MIB);
    let_go(busy);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    CHECK(has_all(next, MIB, 6));
    give_back(mr, next, NULL);
    nrm_stream_release(busy);
    cuda.cuCtxSetCurrent(NULL);
    stop(mr);
}

/* Also when the driver had to make our stream wait for another one's free. */
TEST_EACH(what_comes_without_a_stream_is_anybodys, kinds)
{
    struct nrm_cudasim_config config = simulator_checked();
    config.memory_nbytes = 64 * MIB;
    nrm_resource *mr = start_on(row, &config, 0);
    CHECK_OK(nrm__cuda_init(NULL));
    make_current(0);
    nrm_stream *a = new_stream(), *b = new_stream();
    for (int i = 0; i < 8; i++) {
        nrm_CUdeviceptr ptr = allocate(mr, 40 * MIB, a);
        CHECK_EQ(cuda.cuMemsetD8Async(ptr, 1, 40 * MIB, handle_of(a)),
                 NRM_CUDA_SUCCESS);
        give_back(mr, ptr, a);
        ptr = allocate(mr, 40 * MIB, NULL);
        CHECK_EQ(cuda.cuMemsetD8Async(ptr, 2, 40 * MIB, handle_of(b)),
                 NRM_CUDA_SUCCESS);
        give_back(mr, ptr, b);
    }
    CHECK_EQ(simulator_tell_races(), 0u);
    nrm_stream_release(a);
    nrm_stream_release(b);
    cuda.cuCtxSetCurrent(NULL);
    stop(mr);
}

TEST_EACH(a_full_device_waits_for_what_was_freed_without_a_stream, kinds)
{
    struct nrm_cudasim_config config = simulator_config();
    config.memory_nbytes = 64 * MIB;
    nrm_resource *mr = start_on(row, &config, 0);
    for (int i = 0; i < 4; i++) {
        give_back(mr, allocate(mr, 60 * MIB, NULL), NULL);
    }
    stop(mr);
}

TEST_EACH(too_much_is_refused_and_the_rest_still_served, kinds)
{
    void *ptr = NULL;
    nrm_resource *mr = start(row);
    CHECK_STATUS(nrm_resource_allocate(mr, (size_t)1 << 50, 0, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK_STATUS(nrm_resource_allocate(mr, (size_t)1 << 50, 0, nrm_stream_default(),
                                       &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK_STR_HAS(nrm_last_error()->message, "cuMemAllocFromPoolAsync of 1 PiB");
    CHECK_EQ(ptr, NULL);
    give_back(mr, allocate(mr, MIB, NULL), NULL);
    stop(mr);
}

TEST_EACH(a_reset_loses_the_memory_and_the_next_request_has_a_pool, kinds)
{
    if (row->create == create_view) {
        SKIP("whether a pool of others is good after a reset is for them to say");
    }
    nrm_resource *mr = start(row);
    nrm_CUdeviceptr before = allocate(mr, MIB, NULL);
    CHECK_EQ(cuda.cuDevicePrimaryCtxReset(0), NRM_CUDA_SUCCESS);
    uint64_t frees = sim.call_count("cuMemFreeAsync");
    give_back(mr, before, nrm_stream_default());
    CHECK_EQ(sim.call_count("cuMemFreeAsync"), frees);
    CHECK_EQ(reserved(mr), 0);
    nrm_CUdeviceptr after = allocate(mr, MIB, nrm_stream_default());
    give_back(mr, after, nrm_stream_default());
    nrm_resource_release(mr);
    simulator_check_faults();
}

TEST_EACH(a_failing_free_is_noted, kinds)
{
    nrm_error error;
    uint64_t before, after;
    nrm_resource *mr = start(row);
    nrm_CUdeviceptr ptr = allocate(mr, MIB, nrm_stream_default());
    nrm__lost_error_get(&error, &before);
    sim.fail("cuMemFreeAsync", 1, NRM_CUDA_ERROR_INVALID_VALUE, 1);
    give_back(mr, ptr, nrm_stream_default());
    nrm__lost_error_get(&error, &after);
    CHECK_EQ(after, before + 1);
    CHECK_EQ(cuda.cuMemFree(ptr), NRM_CUDA_SUCCESS);
    stop(mr);
}

/* ---- threads --------------------------------------------------------------------- */

static void *
allocate_often(void *argument)
{
    nrm_resource *mr = argument;
    nrm_stream *mine = NULL;
    CHECK_OK(nrm_stream_per_thread(&mine));
    for (int i = 0; i < 100; i++) {
        nrm_stream *streams[] = {NULL, mine, nrm_stream_default()};
        nrm_stream *stream = streams[i % 3];
        nrm_CUdeviceptr ptr = allocate(mr, 4096 + 100 * (size_t)i, stream);
        give_back(mr, ptr, streams[(i / 3) % 3]);
    }
    nrm_stream_release(mine);
    return NULL;
}

TEST_EACH(many_threads_share_it, kinds)
{
    pthread_t threads[4];
    nrm_resource *mr = start(row);
    for (int i = 0; i < 4; i++) {
        pthread_create(&threads[i], NULL, allocate_often, mr);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
    }
    stop(mr);
}

TEST_EACH(the_first_request_decides_the_device, kinds)
{
    struct nrm_cudasim_config config = simulator_config();
    config.devices = 2;
    nrm_resource *mr = start_on(row, &config, 1);
    CHECK_EQ(nrm_resource_device(mr), 1);
    nrm_CUdeviceptr ptr = allocate(mr, MIB, nrm_stream_default());
    int ordinal = -1;
    make_current(0);
    CHECK_EQ(cuda.cuPointerGetAttribute(&ordinal,
                                        NRM_CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, ptr),
             NRM_CUDA_SUCCESS);
    CHECK_EQ(ordinal, 1);
    give_back(mr, ptr, nrm_stream_default()); /* with another device current */
    cuda.cuCtxSetCurrent(NULL);
    stop(mr);
}

/* What the per-thread stream of another thread does is not done because ours is. */
struct visit {
    nrm_resource *mr;
    nrm_CUdeviceptr ptr;
    nrm_stream *stream;
};

static void *
work_on_own_stream(void *argument)
{
    struct visit *visit = argument;
    make_current(0);
    CHECK_OK(nrm_stream_per_thread(&visit->stream));
    visit->ptr = allocate(visit->mr, MIB, visit->stream);
    hold(visit->stream);
    CHECK_EQ(cuda.cuMemsetD8Async(visit->ptr, 1, MIB, handle_of(visit->stream)),
             NRM_CUDA_SUCCESS);
    return NULL;
}

TEST_EACH(memory_of_another_threads_stream_waits_for_that, kinds)
{
    pthread_t thread;
    struct visit visit = {.mr = start(row)};
    give_back(visit.mr, allocate(visit.mr, MIB, NULL), NULL);
    pthread_create(&thread, NULL, work_on_own_stream, &visit);
    pthread_join(thread, NULL);
    make_current(0);
    give_back(visit.mr, visit.ptr, visit.stream);
    nrm_statistics statistics;
    CHECK_OK(nrm_resource_statistics(visit.mr, &statistics));
    CHECK_EQ(statistics.parked_bytes, (int64_t)MIB);
    nrm_stream *here = NULL;
    CHECK_OK(nrm_stream_per_thread(&here));
    nrm_CUdeviceptr next = allocate(visit.mr, MIB, here);
    CHECK_NE(next, visit.ptr);
    give_back(visit.mr, next, here);
    nrm_stream_release(here);
    nrm_stream_release(visit.stream);
    cuda.cuCtxSetCurrent(NULL);
    nrm_resource_release(visit.mr); /* the thread took its held stream along */
    others = NULL;
    simulator_check_faults();
}

/* ---- pools over them ------------------------------------------------------------- */

/* A pool hands the pieces of a segment to any stream, so what it takes must be
   anybody's, and what it gives back nobody's. */
TEST_EACH(a_pool_over_it_keeps_every_order, kinds)
{
    struct nrm_cudasim_config config = simulator_checked();
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    nrm_resource *pool = NULL;
    nrm_resource *mr = start_on(row, &config, -1);
    options.maximum_nbytes = 64 * MIB;
    REQUIRE_OK(nrm_pool_create(mr, &options, &pool));
    nrm_CUdeviceptr first = allocate(pool, MIB, NULL);
    make_current(0);
    nrm_stream *streams[] = {new_stream(), new_stream(), nrm_stream_default()};
    give_back(pool, first, NULL);
    for (int i = 0; i < 60; i++) {
        nrm_stream *stream = streams[i % 3];
        nrm_CUdeviceptr ptr = allocate(pool, MIB << (i % 4), stream);
        CHECK_EQ(cuda.cuMemsetD8Async(ptr, (unsigned char)i, MIB, handle_of(stream)),
                 NRM_CUDA_SUCCESS);
        give_back(pool, ptr, stream);
        if (i % 10 == 9) {
            CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
            CHECK_OK(nrm_resource_trim(pool, 0, NULL));
        }
    }
    CHECK_EQ(simulator_tell_races(), 0u);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    nrm_resource_release(pool);
    nrm_stream_release(streams[0]);
    nrm_stream_release(streams[1]);
    cuda.cuCtxSetCurrent(NULL);
    stop(mr);
}

/* The simulated driver orders a stream behind the free of what it gets, and no more:
   what a program does not order itself is seen. */
TEST(a_use_that_the_free_does_not_follow_is_seen)
{
    struct nrm_cudasim_config config = simulator_checked();
    nrm_resource *mr = start_on(&kinds[0], &config, 0);
    nrm_CUdeviceptr warm = allocate(mr, MIB, NULL);
    make_current(0);
    nrm_stream *a = new_stream(), *b = new_stream(), *c = new_stream();
    give_back(mr, warm, a);
    for (int is_ordered = 1; is_ordered >= 0; is_ordered--) {
        nrm_CUdeviceptr ptr = allocate(mr, MIB, a);
        let_wait_for(handle_of(b), handle_of(a));
        CHECK_EQ(cuda.cuMemsetD8Async(ptr, 1, MIB, handle_of(b)), NRM_CUDA_SUCCESS);
        if (is_ordered) {
            let_wait_for(handle_of(a), handle_of(b));
        }
        give_back(mr, ptr, a);
        ptr = allocate(mr, MIB, is_ordered ? c : a);
        CHECK_EQ(cuda.cuMemsetD8Async(ptr, 2, MIB, handle_of(is_ordered ? c : a)),
                 NRM_CUDA_SUCCESS);
        CHECK_EQ(sim.race_count() != 0, !is_ordered);
        give_back(mr, ptr, is_ordered ? c : a);
    }
    nrm_stream_release(a);
    nrm_stream_release(b);
    nrm_stream_release(c);
    cuda.cuCtxSetCurrent(NULL);
    stop(mr);
}

/* ---- the pool of its own --------------------------------------------------------- */

TEST(the_pool_keeps_what_was_freed_unless_a_threshold_says_otherwise)
{
    for (int i = 0; i < 2; i++) {
        nrm_cuda_async_options options = NRM_OPTIONS(nrm_cuda_async_options);
        nrm_resource *mr;
        simulator_start(NULL);
        options.set_release_threshold = i == 1;
        REQUIRE_OK(nrm_cuda_async_create(&options, &mr));
        give_back(mr, allocate(mr, 16 * MIB, nrm_stream_default()),
                  nrm_stream_default());
        make_current(0);
        CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
        cuda.cuCtxSetCurrent(NULL);
        CHECK_EQ(reserved(mr) != 0, i == 0);
        size_t given = 0;
        CHECK_OK(nrm_resource_trim(mr, 0, &given));
        CHECK_EQ(given != 0, i == 0);
        CHECK_EQ(reserved(mr), 0);
        stop(mr);
    }
}

TEST(an_initial_size_is_taken_at_once_or_refused)
{
    nrm_cuda_async_options options = NRM_OPTIONS(nrm_cuda_async_options);
    nrm_resource *mr = NULL;
    simulator_start(NULL);
    options.initial_nbytes = 100 * MIB;
    REQUIRE_OK(nrm_cuda_async_create(&options, &mr));
    CHECK_GE(reserved(mr), (int64_t)(100 * MIB));
    CHECK_EQ(nrm_resource_device(mr), 0);
    stop(mr);
    options.initial_nbytes = (size_t)1 << 50;
    mr = NULL;
    CHECK_STATUS(nrm_cuda_async_create(&options, &mr), NRM_OUT_OF_MEMORY);
    CHECK_STR_HAS(nrm_last_error()->message, "initial pool size of 1 PiB on device 0");
    CHECK_EQ(mr, NULL);
    CHECK_EQ(simulator_count(NRM_CUDASIM_POOLS), 0u);
    CHECK_EQ(simulator_count(NRM_CUDASIM_STREAMS), 0u);
}

TEST(memory_is_exported_where_the_device_can)
{
    nrm_cuda_async_options options = NRM_OPTIONS(nrm_cuda_async_options);
    nrm_resource *mr;
    void *ptr;
    simulator_start(NULL);
    options.enable_ipc = true;
    REQUIRE_OK(nrm_cuda_async_create(&options, &mr));
    give_back(mr, allocate(mr, MIB, nrm_stream_default()), nrm_stream_default());
    stop(mr);
    options.enable_fabric = true;
    REQUIRE_OK(nrm_cuda_async_create(&options, &mr));
    CHECK_STATUS(nrm_resource_allocate(mr, MIB, 0, NULL, &ptr), NRM_CUDA_UNAVAILABLE);
    CHECK_STR_HAS(nrm_last_error()->message, "as a fabric handle");
    stop(mr);
}

TEST(the_handle_is_that_of_the_pool)
{
    nrm_resource *mr = start(&kinds[1]), *own = NULL, *plain = NULL;
    uintptr_t handle = 0;
    CHECK_OK(nrm_cuda_async_pool_handle(mr, &handle));
    CHECK_EQ(handle, (uintptr_t)others);
    CHECK_OK(create_async(-1, &own));
    CHECK_OK(nrm_cuda_async_pool_handle(own, &handle));
    CHECK_NE(handle, (uintptr_t)others);
    CHECK_OK(nrm_device_create(NULL, &plain));
    CHECK_STATUS(nrm_cuda_async_pool_handle(plain, &handle), NRM_INVALID_VALUE);
    CHECK_STR_HAS(nrm_last_error()->message, "a CudaMemoryResource has no memory pool");
    nrm_resource_release(plain);
    nrm_resource_release(own);
    stop(mr);
    nrm_cuda_async_view_options none = NRM_OPTIONS(nrm_cuda_async_view_options);
    CHECK_STATUS(nrm_cuda_async_view_create(&none, &mr), NRM_INVALID_VALUE);
}

/* ---- where there are no pools ---------------------------------------------------- */

TEST_EACH(a_device_without_pools_is_named, kinds)
{
    void *ptr;
    nrm_resource *mr = start(row);
    sim.set_attribute(0, NRM_CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 0);
    CHECK_STATUS(nrm_resource_allocate(mr, MIB, 0, NULL, &ptr), NRM_CUDA_UNAVAILABLE);
    CHECK_STR_HAS(nrm_last_error()->message, "device 0 has no memory pools");
    stop(mr);
}

TEST(managed_pools_need_a_driver_that_has_them)
{
    void *ptr;
    struct nrm_cudasim_config config = simulator_config();
    config.driver = 12080;
    nrm_resource *mr = start_on(&kinds[2], &config, -1);
    CHECK_STATUS(nrm_resource_allocate(mr, MIB, 0, NULL, &ptr), NRM_CUDA_UNAVAILABLE);
    CHECK_STR_HAS(nrm_last_error()->message, "CUDA 12.8");
    CHECK_STR_HAS(nrm_last_error()->message, "CUDA 13.0 or newer is needed");
    stop(mr);
}

/* ---- capture --------------------------------------------------------------------- */

TEST(what_a_capture_allocates_belongs_to_the_graph)
{
    nrm_resource *mr = start(&kinds[0]);
    give_back(mr, allocate(mr, MIB, NULL), NULL);
    make_current(0);
    nrm_stream *stream = new_stream();
    nrm_CUgraph graph;
    nrm_CUgraphExec exec;
    nrm_CUdeviceptr seen = allocate(mr, MIB, NULL);
    CHECK_EQ(cuda.cuStreamBeginCapture(handle_of(stream),
                                       NRM_CU_STREAM_CAPTURE_MODE_GLOBAL),
             NRM_CUDA_SUCCESS);
    nrm_CUdeviceptr inside = allocate(mr, MIB, stream);
    nrm_CUdeviceptr outside = allocate(mr, MIB, NULL); /* breaks no capture */
    CHECK_NE(inside, outside);
    CHECK_EQ(cuda.cuMemsetD8Async(inside, 9, MIB, handle_of(stream)), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemcpyAsync(seen, inside, MIB, handle_of(stream)),
             NRM_CUDA_SUCCESS);
    give_back(mr, inside, stream);
    CHECK_EQ(cuda.cuStreamEndCapture(handle_of(stream), &graph), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuGraphInstantiateWithFlags(&exec, graph, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuGraphLaunch(exec, handle_of(stream)), NRM_CUDA_SUCCESS);
    CHECK(has_all(seen, MIB, 9));
    CHECK_EQ(cuda.cuGraphExecDestroy(exec), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    give_back(mr, outside, NULL);
    give_back(mr, seen, NULL);
    nrm_stream_release(stream);
    cuda.cuCtxSetCurrent(NULL);
    nrm_resource_release(mr);
    simulator_check_faults();
}

CHECK_MAIN
