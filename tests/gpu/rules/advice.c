/* Advice about where managed memory should be. */
#include "rule.h"

static nrm_CUmemLocation on_device = {.type = NRM_CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};
static nrm_CUmemLocation on_host = {.type = NRM_CU_MEM_LOCATION_TYPE_HOST};

static int
attribute(nrm_CUmem_range_attribute which, nrm_CUdeviceptr ptr, size_t nbytes)
{
    int value = -9;
    MUST(cu.cuMemRangeGetAttribute(&value, sizeof value, which, ptr, nbytes));
    return value;
}

static int
preferred(nrm_CUdeviceptr ptr, size_t nbytes)
{
    return attribute(NRM_CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, ptr, nbytes);
}

static int
read_mostly(nrm_CUdeviceptr ptr, size_t nbytes)
{
    return attribute(NRM_CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, ptr, nbytes);
}

int
main(int argc, char **argv)
{
    const size_t half = 2 * (size_t)MIB;
    const size_t nbytes = 2 * half;
    nrm_CUdeviceptr ptr, plain;
    start(argc, argv);
    MUST(cu.cuMemAllocManaged(&ptr, nbytes, NRM_CU_MEM_ATTACH_GLOBAL));
    expect_number("new memory prefers no place", preferred(ptr, nbytes), -2);
    expect("it can be advised to a device",
           cu.cuMemAdvise(ptr, half, NRM_CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
                          on_device),
           NRM_CUDA_SUCCESS);
    expect_number("which is then told", preferred(ptr, half), 0);
    expect_number("of all of a range or not at all", preferred(ptr, nbytes), -2);
    expect("and to the host",
           cu.cuMemAdvise(ptr, nbytes, NRM_CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
                          on_host),
           NRM_CUDA_SUCCESS);
    expect_number("the later advice holds", preferred(ptr, nbytes), -1);
    MUST(cu.cuMemAdvise(ptr, nbytes, NRM_CU_MEM_ADVISE_SET_READ_MOSTLY, on_device));
    expect_number("kinds of advice are apart", preferred(ptr, nbytes), -1);
    expect_number("and all told", read_mostly(ptr, nbytes), 1);
    MUST(cu.cuMemAdvise(ptr, nbytes, NRM_CU_MEM_ADVISE_UNSET_READ_MOSTLY, on_device));
    expect_number("it can be taken back", read_mostly(ptr, nbytes), 0);
    expect("whatever the place is called",
           cu.cuMemAdvise(ptr, nbytes, NRM_CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION,
                          on_device),
           NRM_CUDA_SUCCESS);
    expect_number("as if it had not been given", preferred(ptr, nbytes), -2);
    MUST(cu.cuMemAlloc(&plain, nbytes));
    expect("device memory is not advised about",
           cu.cuMemAdvise(plain, nbytes, NRM_CU_MEM_ADVISE_SET_READ_MOSTLY, on_device),
           NRM_CUDA_ERROR_INVALID_VALUE);
    expect("there are six kinds", cu.cuMemAdvise(ptr, nbytes, 99, on_device),
           NRM_CUDA_ERROR_INVALID_VALUE);
    MUST(cu.cuMemFree(plain));
    MUST(cu.cuMemFree(ptr));
    return finish();
}
