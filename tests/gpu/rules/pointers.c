/* What the driver says of each kind of memory, and what it refuses to give back. */
#include "rule.h"

static nrm_CUdeviceptr on_device;
static nrm_CUdeviceptr managed;
static unsigned char *allocated;
static unsigned char *registered;
static unsigned char *pageable;

/* The value of an attribute that is an int, or minus the error. */
static long long
number(nrm_CUpointer_attribute attribute, nrm_CUdeviceptr ptr)
{
    int value = 0;
    nrm_CUresult result = cu.cuPointerGetAttribute(&value, attribute, ptr);
    return result == NRM_CUDA_SUCCESS ? value : -(long long)result;
}

/* An address as an offset from the pointer asked for, or minus the error. */
static long long
offset(nrm_CUpointer_attribute attribute, nrm_CUdeviceptr ptr)
{
    nrm_CUdeviceptr value = 0;
    nrm_CUresult result = cu.cuPointerGetAttribute(&value, attribute, ptr);
    return result == NRM_CUDA_SUCCESS ? (long long)(value - ptr) : -(long long)result;
}

static void
describe(const char *what, nrm_CUdeviceptr start, unsigned int type, bool on_host,
         bool is_managed)
{
    char rule[128];
    nrm_CUdeviceptr ptr = start + 5000; /* an interior address */
    size_t size = 0;
    nrm_CUcontext owner = NULL;
    snprintf(rule, sizeof rule, "%s: memory type", what);
    expect_number(rule, number(NRM_CU_POINTER_ATTRIBUTE_MEMORY_TYPE, ptr), type);
    snprintf(rule, sizeof rule, "%s: is managed", what);
    expect_number(rule, number(NRM_CU_POINTER_ATTRIBUTE_IS_MANAGED, ptr), is_managed);
    snprintf(rule, sizeof rule, "%s: device ordinal", what);
    expect_number(rule, number(NRM_CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, ptr), 0);
    snprintf(rule, sizeof rule, "%s: range start", what);
    expect_number(rule, offset(NRM_CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, ptr), -5000);
    MUST(cu.cuPointerGetAttribute(&size, NRM_CU_POINTER_ATTRIBUTE_RANGE_SIZE, ptr));
    snprintf(rule, sizeof rule, "%s: range size", what);
    expect_number(rule, (long long)size, 3 * MIB);
    snprintf(rule, sizeof rule, "%s: device pointer", what);
    expect_number(rule, offset(NRM_CU_POINTER_ATTRIBUTE_DEVICE_POINTER, ptr), 0);
    snprintf(rule, sizeof rule, "%s: host pointer", what);
    expect_number(rule, offset(NRM_CU_POINTER_ATTRIBUTE_HOST_POINTER, ptr),
                  on_host ? 0 : -(long long)NRM_CUDA_ERROR_INVALID_VALUE);
    MUST(cu.cuPointerGetAttribute(&owner, NRM_CU_POINTER_ATTRIBUTE_CONTEXT, ptr));
    snprintf(rule, sizeof rule, "%s: belongs to the primary context", what);
    expect_yes(rule, owner == context);
}

static void
unknown_memory(void)
{
    nrm_CUdeviceptr ptr = address_of(pageable);
    nrm_CUdeviceptr device_ptr;
    unsigned int flags;
    const long long invalid = -(long long)NRM_CUDA_ERROR_INVALID_VALUE;
    expect_number("pageable: memory type",
                  number(NRM_CU_POINTER_ATTRIBUTE_MEMORY_TYPE, ptr), invalid);
    expect_number("pageable: is managed",
                  number(NRM_CU_POINTER_ATTRIBUTE_IS_MANAGED, ptr), invalid);
    expect("pageable: cuMemHostGetDevicePointer",
           cu.cuMemHostGetDevicePointer(&device_ptr, pageable, 0),
           NRM_CUDA_ERROR_INVALID_VALUE);
    expect("pageable: cuMemHostGetFlags", cu.cuMemHostGetFlags(&flags, pageable),
           NRM_CUDA_ERROR_INVALID_VALUE);
}

static void
flags(void)
{
    unsigned int value = 0;
    unsigned char narrow[8];
    MUST(cu.cuMemHostGetFlags(&value, allocated));
    expect_number("flags of memory from cuMemHostAlloc(PORTABLE)", value, 3);
    MUST(cu.cuMemHostGetFlags(&value, registered));
    expect_number("flags of memory registered as PORTABLE", value, 3);
    memset(narrow, 0xee, sizeof narrow);
    MUST(
        cu.cuPointerGetAttribute(narrow, NRM_CU_POINTER_ATTRIBUTE_IS_MANAGED, managed));
    int n_bytes = 0;
    while (n_bytes < 8 && narrow[n_bytes] != 0xee) {
        n_bytes++;
    }
    expect_number("bytes that IS_MANAGED writes", n_bytes, 4);
}

static void
refusals(void)
{
    expect("free an interior device address", cu.cuMemFree(on_device + 512),
           NRM_CUDA_ERROR_INVALID_VALUE);
    expect("free no device address", cu.cuMemFree(0), NRM_CUDA_SUCCESS);
    expect("free a pageable address as device memory",
           cu.cuMemFree(address_of(pageable)), NRM_CUDA_ERROR_INVALID_VALUE);
    expect("free no host address", cu.cuMemFreeHost(NULL), NRM_CUDA_SUCCESS);
    expect("free a pageable address as host memory", cu.cuMemFreeHost(pageable),
           NRM_CUDA_ERROR_INVALID_VALUE);
    expect("free registered memory", cu.cuMemFreeHost(registered),
           NRM_CUDA_ERROR_INVALID_VALUE);
    expect("free an interior host address", cu.cuMemFreeHost(allocated + 4096),
           NRM_CUDA_ERROR_INVALID_VALUE);
    expect("unregister memory from cuMemHostAlloc", cu.cuMemHostUnregister(allocated),
           NRM_CUDA_ERROR_INVALID_VALUE);
    expect("unregister pageable memory", cu.cuMemHostUnregister(pageable),
           NRM_CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    expect("register memory from cuMemHostAlloc",
           cu.cuMemHostRegister(allocated, 4096, 1), NRM_CUDA_ERROR_INVALID_VALUE);
}

static void
giving_back(void)
{
    size_t before;
    size_t during;
    size_t after;
    size_t total;
    nrm_CUdeviceptr large;
    MUST(cu.cuMemGetInfo(&before, &total));
    MUST(cu.cuMemAlloc(&large, 64 * MIB));
    MUST(cu.cuMemGetInfo(&during, &total));
    expect_yes("64 MiB are missing while they are allocated",
               before - during == 64 * MIB);
    expect("free device memory", cu.cuMemFree(large), NRM_CUDA_SUCCESS);
    MUST(cu.cuMemGetInfo(&after, &total));
    expect_yes("and there again", after == before);
    expect("free it twice", cu.cuMemFree(large), NRM_CUDA_ERROR_INVALID_VALUE);
    expect("allocate zero bytes", cu.cuMemAlloc(&large, 0),
           NRM_CUDA_ERROR_INVALID_VALUE);
    expect("allocate more than there is", cu.cuMemAlloc(&large, total + 1),
           NRM_CUDA_ERROR_OUT_OF_MEMORY);
    expect("free managed memory", cu.cuMemFree(managed), NRM_CUDA_SUCCESS);
    expect("free host memory", cu.cuMemFreeHost(allocated), NRM_CUDA_SUCCESS);
    expect("unregister", cu.cuMemHostUnregister(registered), NRM_CUDA_SUCCESS);
}

int
main(int argc, char **argv)
{
    void *ptr;
    start(argc, argv);
    MUST(cu.cuMemAlloc(&on_device, 3 * MIB));
    MUST(cu.cuMemAllocManaged(&managed, 3 * MIB, NRM_CU_MEM_ATTACH_GLOBAL));
    MUST(cu.cuMemHostAlloc(&ptr, 3 * MIB, NRM_CU_MEMHOSTALLOC_PORTABLE));
    allocated = ptr;
    registered = pages(3 * MIB, 1);
    pageable = pages(3 * MIB, 1);
    MUST(cu.cuMemHostRegister(registered, 3 * MIB, NRM_CU_MEMHOSTREGISTER_PORTABLE));
    describe("device", on_device, NRM_CU_MEMORYTYPE_DEVICE, false, false);
    describe("managed", managed, NRM_CU_MEMORYTYPE_DEVICE, true, true);
    describe("allocated", address_of(allocated), NRM_CU_MEMORYTYPE_HOST, true, false);
    describe("registered", address_of(registered), NRM_CU_MEMORYTYPE_HOST, true, false);
    unknown_memory();
    flags();
    refusals();
    giving_back();
    return finish();
}
