/* Pools of managed memory, which drivers have since CUDA 13.0. */
#include "rule.h"

int
main(int argc, char **argv)
{
    nrm_CUmemLocation place = {.type = NRM_CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};
    nrm_CUmemoryPool pool = NULL, other = NULL;
    nrm_CUdeviceptr ptr;
    nrm_CUstream stream;
    unsigned int managed = 0;
    start(argc, argv);
    expect_yes("the driver has them", cu.cuMemGetDefaultMemPool != NULL);
    if (cu.cuMemGetDefaultMemPool == NULL) {
        return finish();
    }
    MUST(cu.cuStreamCreate(&stream, NRM_CU_STREAM_NON_BLOCKING));
    expect("a device has one for managed memory",
           cu.cuMemGetDefaultMemPool(&pool, &place, NRM_CU_MEM_ALLOCATION_TYPE_MANAGED),
           NRM_CUDA_SUCCESS);
    MUST(cu.cuMemGetDefaultMemPool(&other, &place, NRM_CU_MEM_ALLOCATION_TYPE_PINNED));
    expect_yes("and another for its own", pool != other);
    nrm_CUmemoryPool again = NULL;
    MUST(cu.cuDeviceGetDefaultMemPool(&again, device));
    expect_yes("which is its default pool", again == other);
    expect("managed memory comes in order",
           cu.cuMemAllocFromPoolAsync(&ptr, MIB, pool, stream), NRM_CUDA_SUCCESS);
    MUST(cu.cuStreamSynchronize(stream));
    MUST(cu.cuPointerGetAttribute(&managed, NRM_CU_POINTER_ATTRIBUTE_IS_MANAGED, ptr));
    expect_number("and is managed", managed, 1);
    memset((void *)(uintptr_t)ptr, 3, MIB);
    expect_number("the host writes, the device reads", device_byte(ptr + MIB - 1), 3);
    expect("it is freed in order", cu.cuMemFreeAsync(ptr, stream), NRM_CUDA_SUCCESS);
    MUST(cu.cuStreamSynchronize(stream));
    return finish();
}
