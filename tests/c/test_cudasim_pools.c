/* Memory pools of the simulated driver: what tests/gpu/rules cannot ask of one device,
   and what a real driver lets pass or crashes of. */
#include "cudasim_machine.h"

static nrm_CUmemoryPool
create_pool(int device)
{
    nrm_CUmemPoolProps props = {
        .allocType = NRM_CU_MEM_ALLOCATION_TYPE_PINNED,
        .location = {.type = NRM_CU_MEM_LOCATION_TYPE_DEVICE, .id = device},
    };
    uint64_t all = UINT64_MAX;
    nrm_CUmemoryPool pool = NULL;
    CHECK_EQ(cu.cuMemPoolCreate(&pool, &props), 0);
    CHECK_EQ(
        cu.cuMemPoolSetAttribute(pool, NRM_CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all), 0);
    return pool;
}

static nrm_CUstream
create_stream(void)
{
    nrm_CUstream stream = NULL;
    CHECK_EQ(cu.cuStreamCreate(&stream, NRM_CU_STREAM_NON_BLOCKING), 0);
    return stream;
}

static nrm_CUdeviceptr
take(nrm_CUmemoryPool pool, size_t nbytes, nrm_CUstream stream)
{
    nrm_CUdeviceptr ptr = 0;
    CHECK_EQ(cu.cuMemAllocFromPoolAsync(&ptr, nbytes, pool, stream), 0);
    return ptr;
}

static uint64_t
reserved(nrm_CUmemoryPool pool)
{
    uint64_t value = UINT64_MAX;
    CHECK_EQ(cu.cuMemPoolGetAttribute(pool, NRM_CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
                                      &value),
             0);
    return value;
}

TEST(a_pool_of_another_device_serves_a_stream_of_this_one)
{
    nrm_CUcontext other;
    REQUIRE(start());
    CHECK_EQ(cu.cuDevicePrimaryCtxRetain(&other, 1), 0);
    nrm_CUstream stream = create_stream();
    nrm_CUmemoryPool pool = create_pool(1);
    nrm_CUdeviceptr ptr = take(pool, MIB, stream);
    int ordinal = -1;
    CHECK_EQ(cu.cuPointerGetAttribute(&ordinal, NRM_CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                      ptr),
             0);
    CHECK_EQ(ordinal, 1);
    CHECK_EQ(cu.cuMemFreeAsync(ptr, stream), 0);
    CHECK_EQ(cu.cuStreamSynchronize(stream), 0);
    nrm_CUmemoryPool first = NULL, second = NULL;
    CHECK_EQ(cu.cuDeviceGetDefaultMemPool(&first, 0), 0);
    CHECK_EQ(cu.cuDeviceGetDefaultMemPool(&second, 1), 0);
    CHECK_NE(first, second);
    CHECK_EQ(cu.cuMemPoolDestroy(pool), 0);
    CHECK_EQ(outstanding(NRM_CUDASIM_POOLS), 0u);
}

TEST(memory_that_was_freed_is_not_touched)
{
    REQUIRE(start());
    nrm_CUstream stream = create_stream();
    nrm_CUmemoryPool pool = create_pool(0);
    nrm_CUdeviceptr ptr = take(pool, 1000, stream);
    CHECK_EQ(cu.cuMemsetD8Async(ptr, 0, 1000, stream), 0);
    CHECK_EQ(cu.cuMemsetD8Async(ptr, 0, 1001, stream), NRM_CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFreeAsync(ptr + 512, stream), NRM_CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFreeAsync(ptr, stream), 0);
    CHECK_EQ(cu.cuMemsetD8Async(ptr, 0, 1000, stream), NRM_CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(outstanding(NRM_CUDASIM_POOL_ALLOCATIONS), 0u);
    CHECK_EQ(outstanding(NRM_CUDASIM_DEVICE_ALLOCATIONS), 0u);
}

TEST(a_stream_waits_for_memory_of_another_one_only_when_there_is_no_other)
{
    struct nrm_cudasim_config config = machine();
    config.memory_nbytes = 64 * MIB;
    REQUIRE(start_with(&config));
    nrm_CUstream a = create_stream(), b = create_stream();
    nrm_CUmemoryPool pool = create_pool(0);
    nrm_CUdeviceptr ptr = take(pool, 60 * MIB, a);
    CHECK_EQ(sim.nrm_cudasim_hold_stream(a), 0);
    CHECK_EQ(cu.cuMemsetD8Async(ptr, 1, 60 * MIB, a), 0);
    CHECK_EQ(cu.cuMemFreeAsync(ptr, a), 0);
    CHECK_EQ(take(pool, 60 * MIB, b), ptr); /* there is no other: it waits */
    CHECK_EQ(cu.cuMemsetD8Async(ptr, 2, 60 * MIB, b), 0);
    CHECK_EQ(cu.cuStreamQuery(b), NRM_CUDA_ERROR_NOT_READY);
    CHECK_EQ(sim.nrm_cudasim_release_stream(a), 0);
    CHECK_EQ(cu.cuStreamSynchronize(b), 0);
    unsigned char byte = 0;
    CHECK_EQ(cu.cuMemcpyDtoH(&byte, ptr, 1), 0);
    CHECK_EQ(byte, 2);
    nrm_CUdeviceptr more = 0;
    CHECK_EQ(cu.cuMemAllocFromPoolAsync(&more, 60 * MIB, pool, a),
             NRM_CUDA_ERROR_OUT_OF_MEMORY);
}

TEST(pieces_merge_and_chunks_go_back)
{
    nrm_CUdeviceptr ptr[64];
    REQUIRE(start());
    nrm_CUstream stream = create_stream();
    nrm_CUmemoryPool pool = create_pool(0);
    for (int i = 0; i < 64; i++) {
        ptr[i] = take(pool, MIB, stream);
    }
    CHECK_EQ(reserved(pool), 64u * MIB);
    for (int i = 0; i < 64; i++) {
        CHECK_EQ(cu.cuMemFreeAsync(ptr[i * 37 % 64], stream), 0);
    }
    CHECK_EQ(cu.cuStreamSynchronize(stream), 0);
    nrm_CUdeviceptr whole = take(pool, 32 * MIB, stream);
    CHECK_EQ(reserved(pool), 64u * MIB);
    CHECK_EQ(cu.cuMemPoolTrimTo(pool, 0), 0);
    CHECK_EQ(reserved(pool), 32u * MIB);
    CHECK_EQ(cu.cuMemFreeAsync(whole, stream), 0);
    CHECK_EQ(cu.cuMemPoolTrimTo(pool, 0), 0);
    CHECK_EQ(cu.cuStreamSynchronize(stream), 0);
    CHECK_EQ(cu.cuMemPoolTrimTo(pool, 0), 0);
    CHECK_EQ(reserved(pool), 0u);
}

TEST(a_reset_takes_the_memory_and_leaves_the_pool)
{
    REQUIRE(start());
    nrm_CUmemoryPool pool = create_pool(0);
    nrm_CUdeviceptr ptr = take(pool, MIB, NULL);
    CHECK_EQ(cu.cuDevicePrimaryCtxReset(0), 0);
    CHECK_EQ(cu.cuDevicePrimaryCtxRetain(&context, 0), 0);
    CHECK_EQ(cu.cuCtxSetCurrent(context), 0);
    CHECK_EQ(reserved(pool), 0u);
    CHECK_EQ(cu.cuMemFreeAsync(ptr, NULL), NRM_CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFreeAsync(take(pool, MIB, NULL), NULL), 0);
}

TEST(what_is_not_supported_says_so)
{
    nrm_CUmemoryPool pool;
    nrm_CUmemLocation place = {.type = NRM_CU_MEM_LOCATION_TYPE_DEVICE};
    nrm_CUmemPoolProps props = {
        .allocType = NRM_CU_MEM_ALLOCATION_TYPE_PINNED,
        .handleTypes = NRM_CU_MEM_HANDLE_TYPE_FABRIC,
        .location = place,
    };
    REQUIRE(start());
    CHECK_EQ(cu.cuMemPoolCreate(&pool, &props), NRM_CUDA_ERROR_NOT_SUPPORTED);
    props.handleTypes = NRM_CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CHECK_EQ(cu.cuMemPoolCreate(&pool, &props), 0);
    props.location.id = 7;
    CHECK_EQ(cu.cuMemPoolCreate(&pool, &props), NRM_CUDA_ERROR_INVALID_DEVICE);
    CHECK_EQ(sim.nrm_cudasim_set_attribute(
                 0, NRM_CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 0),
             0);
    CHECK_EQ(cu.cuMemGetDefaultMemPool(&pool, &place,
                                       NRM_CU_MEM_ALLOCATION_TYPE_MANAGED),
             NRM_CUDA_ERROR_NOT_SUPPORTED);
}

CHECK_MAIN
