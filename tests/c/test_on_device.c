/* The sources whose addresses the driver chooses: device and managed; and the copy. */
#include "simulator.h"

#include "core/copy.h"
#include "core/hooks.h"
#include "cuda/context.h"
#include "nrm/options.h"
#include "nrm/sources.h"

#define KIB ((size_t)1024)
#define MIB (1024 * KIB)

typedef nrm_status create_fn(const nrm_device_options *options, nrm_resource **out);

static const struct kind {
    const char *name;
    create_fn *create;
    nrm_kind kind;
    const char *call;
    int outstanding;
} kinds[] = {
    {"device", nrm_device_create, NRM_KIND_DEVICE, "cuMemAlloc",
     NRM_CUDASIM_DEVICE_ALLOCATIONS},
    {"managed", nrm_managed_create, NRM_KIND_MANAGED, "cuMemAllocManaged",
     NRM_CUDASIM_MANAGED_ALLOCATIONS},
};

static nrm_resource *
start(const struct kind *kind, int devices)
{
    nrm_resource *mr = NULL;
    struct nrm_cudasim_config config = simulator_config();
    config.devices = devices;
    simulator_start(&config);
    CHECK_OK(kind->create(NULL, &mr));
    return mr;
}

static void
stop(const struct kind *kind, nrm_resource *mr)
{
    (void)nrm__retired_drain(UINT64_MAX);
    for (int i = 0; i < 200 && simulator_count(kind->outstanding) != 0; i++) {
        usleep(1000); /* the background thread may hold the last one */
    }
    CHECK_EQ(simulator_count(kind->outstanding), 0u);
    nrm_resource_release(mr);
    simulator_check_faults();
}

TEST_EACH(the_first_request_decides_the_device, kinds)
{
    void *ptr;
    nrm_CUcontext one;
    nrm_resource *mr = start(row, 2);
    CHECK_EQ(sim.call_count("cuInit"), 0u);
    CHECK_EQ(nrm_resource_kind(mr), row->kind);
    CHECK_EQ(nrm_resource_device(mr), NRM_DEVICE_NONE);
    CHECK_OK(nrm__cuda_init(NULL));
    cuda.cuDevicePrimaryCtxRetain(&one, 1);
    cuda.cuCtxSetCurrent(one);
    REQUIRE_OK(nrm_resource_allocate(mr, MIB, 0, NULL, &ptr));
    cuda.cuCtxSetCurrent(NULL);
    CHECK_EQ(nrm_resource_device(mr), 1);
    int ordinal = -1;
    cuda.cuPointerGetAttribute(&ordinal, NRM_CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                               (nrm_CUdeviceptr)(uintptr_t)ptr);
    CHECK_EQ(ordinal, 1);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    stop(row, mr);
}

TEST_EACH(alignments_are_honoured, kinds)
{
    static const size_t alignments[] = {1, 64, 256, 512, 4096, 64 * 1024, 2 << 20};
    void *ptr[7];
    nrm_resource *mr = start(row, 1);
    for (int i = 0; i < 7; i++) {
        REQUIRE_OK(nrm_resource_allocate(mr, 100 + i, alignments[i], NULL, &ptr[i]));
        CHECK_ALIGNED(ptr[i], alignments[i]);
    }
    for (int i = 0; i < 7; i++) {
        CHECK_OK(nrm_resource_deallocate(mr, ptr[i], 0, NULL));
        CHECK_STATUS(nrm_resource_deallocate(mr, ptr[i], 0, NULL), NRM_NOT_OWNED);
    }
    stop(row, mr);
}

TEST_EACH(running_out_is_told_with_what_is_free, kinds)
{
    void *ptr;
    nrm_resource *mr = start(row, 1);
    sim.fail(row->call, 1, NRM_CUDA_ERROR_OUT_OF_MEMORY, 1);
    CHECK_STATUS(nrm_resource_allocate(mr, 3 * MIB, 0, NULL, &ptr), NRM_OUT_OF_MEMORY);
    CHECK_STR_EQ(nrm_last_error()->native_name, "CUDA_ERROR_OUT_OF_MEMORY");
    CHECK_STR_HAS(nrm_last_error()->message, row->call);
    CHECK_STR_HAS(nrm_last_error()->message,
                  "of 3 MiB on device 0 (8 GiB free of 8 GiB)");
    CHECK_EQ(nrm_last_error()->requested_nbytes, 3 * MIB);
    stop(row, mr);
}

TEST_EACH(a_reset_loses_the_memory_and_nothing_is_freed_twice, kinds)
{
    struct nrm__block block = {0};
    struct nrm__request request = {.nbytes = MIB, .alignment = 256};
    nrm_resource *mr = start(row, 1);
    REQUIRE_OK(nrm__allocate(mr, &request, &block));
    CHECK_OK(mr->ops->renew_block(mr, &block));
    CHECK_EQ(cuda.cuDevicePrimaryCtxReset(0), NRM_CUDA_SUCCESS);
    CHECK_STATUS(mr->ops->renew_block(mr, &block), NRM_DEVICE_LOST);
    CHECK_STR_HAS(nrm_last_error()->message, row->name);
    CHECK_OK(nrm_resource_deallocate(mr, block.ptr, 0, NULL));
    stop(row, mr);
    CHECK_EQ(sim.call_count("cuMemFree"), 0u);
}

TEST_EACH(a_failing_free_is_noted, kinds)
{
    void *ptr;
    nrm_error error;
    uint64_t before;
    uint64_t after;
    nrm_resource *mr = start(row, 1);
    REQUIRE_OK(nrm_resource_allocate(mr, MIB, 0, NULL, &ptr));
    nrm__lost_error_get(&error, &before);
    sim.fail("cuMemFree", 1, NRM_CUDA_ERROR_INVALID_VALUE, 1);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    (void)nrm__retired_drain(UINT64_MAX);
    for (int i = 0; i < 200; i++) {
        nrm__lost_error_get(&error, &after);
        if (after != before) {
            break;
        }
        usleep(1000);
    }
    CHECK_EQ(after, before + 1);
    cuda.cuMemFree((nrm_CUdeviceptr)(uintptr_t)ptr);
    stop(row, mr);
}

TEST_EACH(a_device_that_is_not_there_is_named, kinds)
{
    nrm_resource *mr;
    void *ptr;
    simulator_start(NULL);
    nrm_device_options options = NRM_OPTIONS(nrm_device_options);
    options.set_device = true;
    options.device = 64;
    CHECK_STATUS(row->create(&options, &mr), NRM_INVALID_VALUE);
    options.device = 3;
    REQUIRE_OK(row->create(&options, &mr));
    CHECK_EQ(nrm_resource_device(mr), 3);
    CHECK_STATUS(nrm_resource_allocate(mr, 1, 0, NULL, &ptr), NRM_INVALID_VALUE);
    CHECK_STR_HAS(nrm_last_error()->message, "no device 3: 1 visible");
    stop(row, mr);
}

static void *
allocate_often(void *mr)
{
    for (int i = 0; i < 100; i++) {
        void *ptr;
        if (CHECK_OK(nrm_resource_allocate(mr, 64 * KIB, 0, NULL, &ptr))) {
            CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
        }
    }
    return NULL;
}

TEST_EACH(many_threads_share_it, kinds)
{
    enum { N = 4 };
    pthread_t threads[N];
    nrm_resource *mr = start(row, 2);
    for (int i = 0; i < N; i++) {
        pthread_create(&threads[i], NULL, allocate_often, mr);
    }
    for (int i = 0; i < N; i++) {
        pthread_join(threads[i], NULL);
    }
    stop(row, mr);
}

/* ---- managed ---- */

TEST(managed_memory_is_for_both_sides_and_freed_late)
{
    char *ptr;
    nrm_resource *mr = start(&kinds[1], 1);
    REQUIRE_OK(nrm_resource_allocate_zeroed(mr, MIB, 0, NULL, (void **)&ptr));
    CHECK_EQ(ptr[MIB - 1], 0);
    memset(ptr, 1, MIB);
    unsigned managed = 0;
    cuda.cuPointerGetAttribute(&managed, NRM_CU_POINTER_ATTRIBUTE_IS_MANAGED,
                               (nrm_CUdeviceptr)(uintptr_t)ptr);
    CHECK_EQ(managed, 1u);
    uint64_t calls = sim.call_count("cuMemFree");
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    (void)calls;
    stop(&kinds[1], mr);
    CHECK_EQ(sim.call_count("cuMemFree"), 1u);
}

TEST(a_device_without_concurrent_access_is_refused_unless_asked_for)
{
    void *ptr;
    nrm_resource *mr = start(&kinds[1], 1);
    sim.set_attribute(0, NRM_CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 0);
    CHECK_STATUS(nrm_resource_allocate(mr, MIB, 0, NULL, &ptr), NRM_NOT_SUPPORTED);
    CHECK_STR_HAS(nrm_last_error()->message, "concurrentManagedAccess 0");
    CHECK_EQ(sim.call_count("cuMemAllocManaged"), 0u);
    nrm_resource_release(mr);
    nrm_device_options options = NRM_OPTIONS(nrm_device_options);
    options.allow_nonconcurrent = true;
    REQUIRE_OK(nrm_managed_create(&options, &mr));
    REQUIRE_OK(nrm_resource_allocate(mr, MIB, 0, NULL, &ptr));
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    stop(&kinds[1], mr);
}

TEST(an_options_struct_of_an_older_header_has_the_defaults)
{
    void *ptr;
    nrm_resource *mr;
    simulator_start(NULL);
    nrm_device_options options = NRM_OPTIONS(nrm_device_options);
    options.allow_nonconcurrent = true; /* behind what the caller knows of */
    options.size = offsetof(nrm_device_options, allow_nonconcurrent);
    REQUIRE_OK(nrm_managed_create(&options, &mr));
    sim.set_attribute(0, NRM_CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 0);
    CHECK_STATUS(nrm_resource_allocate(mr, MIB, 0, NULL, &ptr), NRM_NOT_SUPPORTED);
    stop(&kinds[1], mr);
}

/* ---- the copy ---- */

TEST(a_copy_is_timed_and_leaves_nothing)
{
    static char bytes[256 * 1024];
    double seconds = -1;
    simulator_start(NULL);
    CHECK_OK(nrm__copy_to_device_seconds(bytes, sizeof bytes, &seconds));
    CHECK_GE(seconds, 0.0);
    CHECK_LT(seconds, 10.0);
    CHECK_EQ(simulator_count(NRM_CUDASIM_DEVICE_ALLOCATIONS), 0u);
    CHECK_EQ(simulator_count(NRM_CUDASIM_STREAMS), 0u);
    CHECK_STATUS(nrm__copy_to_device_seconds(bytes, 0, &seconds), NRM_INVALID_VALUE);
    sim.fail("cuMemcpyHtoDAsync", 1, NRM_CUDA_ERROR_INVALID_VALUE, 1);
    CHECK_STATUS(nrm__copy_to_device_seconds(bytes, sizeof bytes, &seconds),
                 NRM_CUDA_ERROR);
    CHECK_EQ(simulator_count(NRM_CUDASIM_DEVICE_ALLOCATIONS), 0u);
    CHECK_EQ(simulator_count(NRM_CUDASIM_STREAMS), 0u);
    simulator_check_faults();
}

CHECK_MAIN
