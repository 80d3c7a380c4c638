/* Ordinary memory for devices: SystemMemoryResource and SamHeadroomMemoryResource. */
#include "streams.h"

#include "core/hooks.h"
#include "core/ops.h"
#include "core/uses.h"
#include "nrm/options.h"
#include "nrm/pools.h"
#include "nrm/sources.h"

#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)

static nrm_status
create_system(nrm_resource **out)
{
    return nrm_system_create(NULL, out);
}

static nrm_status
create_headroom(nrm_resource **out)
{
    nrm_sam_headroom_options options = NRM_OPTIONS(nrm_sam_headroom_options);
    options.headroom = GIB;
    return nrm_sam_headroom_create(&options, out);
}

static const struct kind {
    const char *name;
    nrm_status (*create)(nrm_resource **out);
} kinds[] = {
    {"system", create_system},
    {"headroom", create_headroom},
};

static nrm_resource *
start(const struct kind *kind, int reads_pageable)
{
    nrm_resource *mr = NULL;
    struct nrm_cudasim_config config = simulator_config();
    config.memory_nbytes = 2 * GIB;
    simulator_start(&config);
    sim.set_attribute(0, NRM_CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS,
                      reads_pageable);
    CHECK_OK(kind->create(&mr));
    return mr;
}

static uint64_t
advised_nbytes(void)
{
    uint64_t count = 0, nbytes = 0;
    sim.outstanding(NRM_CUDASIM_ADVICE, &count, &nbytes);
    return nbytes;
}

static void
wait_for_retired(void)
{
    for (int i = 0; i < 2000 && !nrm__retired_is_empty(); i++) {
        (void)nrm__retired_drain(UINT64_MAX);
        usleep(1000); /* the background thread may hold the last one */
    }
    CHECK(nrm__retired_is_empty());
}

static void
stop(nrm_resource *mr)
{
    wait_for_retired();
    CHECK_EQ(advised_nbytes(), 0u);
    nrm_resource_release(mr);
    cuda.cuCtxSetCurrent(NULL);
    simulator_check_faults();
}

static int
preferred(const char *ptr, size_t nbytes)
{
    int place = -9;
    CHECK_EQ(cuda.cuMemRangeGetAttribute(&place, sizeof place,
                                         NRM_CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION,
                                         (uintptr_t)ptr, nbytes),
             NRM_CUDA_SUCCESS);
    return place;
}

TEST_EACH(both_sides_use_the_memory_in_place, kinds)
{
    char *ptr;
    nrm_resource *mr = start(row, 1);
    CHECK_EQ(sim.call_count("cuInit"), 0u);
    CHECK_EQ(nrm_resource_kind(mr), NRM_KIND_MANAGED);
    REQUIRE_OK(nrm_resource_allocate(mr, 3 * MIB, 0, NULL, (void **)&ptr));
    CHECK_EQ(nrm_resource_device(mr), 0);
    for (size_t i = 0; i < 3 * MIB; i += 4096) {
        CHECK_EQ(ptr[i], 0);
    }
    memset(ptr, 4, 3 * MIB);
    make_current(0);
    nrm_CUdeviceptr plain;
    CHECK_EQ(cuda.cuMemAlloc(&plain, 3 * MIB), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemcpyHtoD(plain, ptr, 3 * MIB), NRM_CUDA_SUCCESS);
    CHECK(has_all(plain, 3 * MIB, 4));
    CHECK_EQ(cuda.cuMemFree(plain), NRM_CUDA_SUCCESS);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    stop(mr);
}

TEST_EACH(it_goes_back_when_the_device_is_done, kinds)
{
    char *ptr;
    nrm_resource *mr = start(row, 1);
    REQUIRE_OK(nrm_resource_allocate(mr, MIB, 0, NULL, (void **)&ptr));
    make_current(0);
    nrm_stream *stream = new_stream();
    nrm_CUdeviceptr plain;
    CHECK_EQ(cuda.cuMemAlloc(&plain, MIB), NRM_CUDA_SUCCESS);
    memset(ptr, 6, MIB);
    hold(stream);
    CHECK_EQ(cuda.cuMemcpyHtoDAsync(plain, ptr, MIB, handle_of(stream)),
             NRM_CUDA_SUCCESS);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, stream));
    (void)nrm__retired_drain(0);
    CHECK(!nrm__retired_is_empty());
    let_go(stream);
    CHECK(has_all(plain, MIB, 6));
    CHECK_EQ(cuda.cuMemFree(plain), NRM_CUDA_SUCCESS);
    nrm_stream_release(stream);
    stop(mr);
}

TEST_EACH(sizes_and_alignments_are_honoured, kinds)
{
    static const size_t sizes[] = {1, 4096, 5000, 2 * MIB, 5 * MIB + 1};
    nrm_resource *mr = start(row, 1);
    for (int i = 0; i < 5; i++) {
        char *ptr;
        size_t alignment = (size_t)64 << (3 * i);
        REQUIRE_OK(nrm_resource_allocate(mr, sizes[i], alignment, NULL, (void **)&ptr));
        CHECK_ALIGNED(ptr, alignment);
        memset(ptr, 1, sizes[i]);
        CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
        CHECK_STATUS(nrm_resource_deallocate(mr, ptr, 0, NULL), NRM_NOT_OWNED);
    }
    void *ptr = NULL;
    CHECK_STATUS(nrm_resource_allocate(mr, (size_t)1 << 50, 0, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    stop(mr);
}

TEST_EACH(a_device_that_cannot_read_it_is_named, kinds)
{
    void *ptr;
    nrm_resource *mr = start(row, 0), *late = NULL;
    CHECK_STATUS(nrm_resource_allocate(mr, MIB, 0, NULL, &ptr), NRM_CUDA_UNAVAILABLE);
    CHECK_STR_HAS(nrm_last_error()->message,
                  "device 0 cannot read ordinary memory in place "
                  "(pageableMemoryAccess 0)");
    CHECK_STATUS(nrm_resource_allocate(mr, MIB, 0, NULL, &ptr), NRM_CUDA_UNAVAILABLE);
    stop(mr);
    nrm_device_options options = NRM_OPTIONS(nrm_device_options);
    options.set_device = true;
    CHECK_STATUS(nrm_system_create(&options, &late), NRM_CUDA_UNAVAILABLE);
}

TEST_EACH(a_pool_over_it_waits_for_the_device, kinds)
{
    nrm_resource *mr = start(row, 1), *pool = NULL;
    REQUIRE_OK(nrm_pool_create(mr, NULL, &pool));
    for (int i = 0; i < 100; i++) {
        char *ptr;
        REQUIRE_OK(
            nrm_resource_allocate(pool, 100 << (i % 12), 0, NULL, (void **)&ptr));
        memset(ptr, i, 100);
        CHECK_OK(nrm_resource_deallocate(pool, ptr, 0, NULL));
    }
    nrm_resource_release(pool);
    stop(mr);
}

/* ---- the headroom ---------------------------------------------------------------- */

TEST(so_much_is_advised_to_the_device_as_leaves_the_headroom)
{
    char *small, *large;
    nrm_resource *mr = start(&kinds[1], 1); /* 2 GiB, of which 1 is headroom */
    REQUIRE_OK(nrm_resource_allocate(mr, 5000, 0, NULL, (void **)&small));
    CHECK_EQ(preferred(small, 8192), 0);
    REQUIRE_OK(nrm_resource_allocate(mr, GIB + 4 * MIB, 0, NULL, (void **)&large));
    CHECK_EQ(preferred(large, GIB), 0);
    CHECK_EQ(preferred(large + GIB, 4 * MIB), -1);
    CHECK_OK(nrm_resource_deallocate(mr, large, 0, NULL));
    nrm_CUdeviceptr plain;
    make_current(0);
    CHECK_EQ(cuda.cuMemAlloc(&plain, GIB), NRM_CUDA_SUCCESS);
    REQUIRE_OK(nrm_resource_allocate(mr, MIB, 0, NULL, (void **)&large));
    CHECK_EQ(preferred(large, MIB), -1); /* nothing is free beyond it */
    CHECK_OK(nrm_resource_deallocate(mr, large, 0, NULL));
    CHECK_OK(nrm_resource_deallocate(mr, small, 0, NULL));
    CHECK_EQ(cuda.cuMemFree(plain), NRM_CUDA_SUCCESS);
    stop(mr); /* looks for advice that is left */
}

TEST(advice_that_fails_leaves_nothing)
{
    void *ptr = NULL;
    nrm_resource *mr = start(&kinds[1], 1);
    sim.fail("cuMemAdvise", 1, NRM_CUDA_ERROR_INVALID_VALUE, 1);
    CHECK_STATUS(nrm_resource_allocate(mr, MIB, 0, NULL, &ptr), NRM_CUDA_ERROR);
    CHECK_STR_HAS(nrm_last_error()->message, "cuMemAdvise of 1048576 B on device 0");
    CHECK_EQ(ptr, NULL);
    stop(mr);
}

TEST(an_old_driver_takes_no_advice)
{
    void *ptr;
    nrm_resource *mr = NULL;
    struct nrm_cudasim_config config = simulator_config();
    config.driver = 12010;
    simulator_start(&config);
    sim.set_attribute(0, NRM_CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, 1);
    REQUIRE_OK(create_headroom(&mr));
    CHECK_STATUS(nrm_resource_allocate(mr, MIB, 0, NULL, &ptr), NRM_CUDA_UNAVAILABLE);
    CHECK_STR_HAS(nrm_last_error()->message, "CUDA 12.2 or newer is needed");
    nrm_resource_release(mr);
}

CHECK_MAIN
