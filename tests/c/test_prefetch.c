/* Prefetching: new managed memory goes to the current device, and nothing else
   changes. */
#include "base/bits.h"
#include "core/hooks.h"
#include "core/ops.h"
#include "fixtures.h"
#include "nrm/adaptors.h"
#include "simulator.h"

static nrm_resource *
prefetch_over(nrm_resource *upstream)
{
    nrm_resource *mr = NULL;
    CHECK_OK(nrm_prefetch_create(upstream, &mr));
    nrm_resource_release(upstream);
    return mr;
}

static nrm_resource *
managed(void)
{
    nrm_resource *mr = NULL;
    CHECK_OK(nrm_managed_create(NULL, &mr));
    return pool_over(mr, 0);
}

static uint64_t
n_prefetches(void)
{
    return sim.call_count("cuMemPrefetchAsync");
}

/* The device of the last one; -1: there was none. */
static int
prefetched_to(void)
{
    char text[256];
    uint64_t cursor = 0;
    int device = -1;
    while (sim.log_read(&cursor, text, sizeof text) == 1) {
        (void)sscanf(text, "cuMemPrefetchAsync(%*[^,], %*[^,], %i", &device);
    }
    return device;
}

TEST(each_managed_block_is_moved)
{
    struct nrm_cudasim_config config = simulator_config();
    simulator_start(&config);
    nrm_resource *mr = prefetch_over(managed());
    uint64_t before = n_prefetches();
    for (int i = 0; i < 3; i++) {
        void *ptr = allocate(mr, 100000);
        CHECK_EQ(n_prefetches(), before + (uint64_t)i + 1);
        CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    }
    CHECK_EQ(live_nbytes(mr), 0);
    nrm_resource_release(mr);
    simulator_check_faults();
}

TEST(other_memory_is_left_alone)
{
    simulator_start(NULL);
    nrm_resource *device = NULL;
    REQUIRE_OK(nrm_device_create(NULL, &device));
    nrm_resource *mrs[] = {prefetch_over(pool_over(host_source(), 0)),
                           prefetch_over(pool_over(device, 0))};
    uint64_t before = n_prefetches();
    for (size_t i = 0; i < 2; i++) {
        void *ptr = NULL;
        REQUIRE_OK(
            nrm_resource_allocate(mrs[i], 100000, 0, nrm_stream_default(), &ptr));
        CHECK_OK(nrm_resource_deallocate(mrs[i], ptr, 0, nrm_stream_default()));
        nrm_resource_release(mrs[i]);
    }
    CHECK_EQ(n_prefetches(), before);
    simulator_check_faults();
}

TEST(a_driver_that_fails_fails_no_request)
{
    nrm_statistics statistics;
    nrm_error lost;
    uint64_t n_lost = 0;
    simulator_start(NULL);
    nrm_resource *mr = prefetch_over(managed());
    sim.fail("cuMemPrefetchAsync", 1, NRM_CUDA_ERROR_INVALID_VALUE, 1);
    void *ptr = allocate(mr, 100000);
    REQUIRE_OK(nrm_resource_statistics(mr, &statistics));
    CHECK_EQ(statistics.errors, 1);
    nrm__lost_error_get(&lost, &n_lost);
    CHECK_EQ(n_lost, 1);
    CHECK_STR_HAS(lost.message, "cuMemPrefetchAsync");
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    nrm_resource_release(mr);
    simulator_check_faults();
}

TEST(the_device_is_the_current_one)
{
    struct nrm_cudasim_config config = simulator_config();
    nrm_CUcontext context;
    config.devices = 2;
    simulator_start(&config);
    CHECK_EQ(cuda.cuInit(0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuDevicePrimaryCtxRetain(&context, 1), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuCtxSetCurrent(context), NRM_CUDA_SUCCESS);
    nrm_resource *mr = prefetch_over(managed());
    void *ptr = allocate(mr, 100000);
    CHECK_EQ(prefetched_to(), 1);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    nrm_resource_release(mr);
    simulator_check_faults();
}

CHECK_MAIN
