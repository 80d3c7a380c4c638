/* cuGetProcAddress and the first calls: what answers before cuInit, and by version. */
#include "rule.h"

static void
lookup(const char *rule, const char *name, int version, unsigned int expected)
{
    void *address = NULL;
    nrm_CUdriverProcAddressQueryResult found = 9;
    nrm_CUresult result = cu.cuGetProcAddress(name, &address, version, 0, &found);
    if (result != NRM_CUDA_SUCCESS) {
        expect(rule, result, NRM_CUDA_SUCCESS);
        return;
    }
    expect_number(rule, found, expected);
    expect_yes("  with an address",
               (address != NULL) == (expected == NRM_CU_GET_PROC_ADDRESS_SUCCESS));
}

int
main(int argc, char **argv)
{
    int version = 0;
    int count = -1;
    const char *text = NULL;
    void *address;
    open_driver(argc, argv);
    expect("cuDriverGetVersion before cuInit", cu.cuDriverGetVersion(&version),
           NRM_CUDA_SUCCESS);
    expect_yes("it is 12.0 or newer", version >= 12000);
    expect("cuDeviceGetCount before cuInit", cu.cuDeviceGetCount(&count),
           NRM_CUDA_ERROR_NOT_INITIALIZED);
    expect("cuGetErrorName before cuInit",
           cu.cuGetErrorName(NRM_CUDA_ERROR_NOT_READY, &text), NRM_CUDA_SUCCESS);
    expect_yes("it names the error",
               text != NULL && strcmp(text, "CUDA_ERROR_NOT_READY") == 0);
    expect("cuGetErrorName of no error", cu.cuGetErrorName((nrm_CUresult)4711, &text),
           NRM_CUDA_ERROR_INVALID_VALUE);
    lookup("a symbol by the version of its prototype", "cuMemAlloc", 3020,
           NRM_CU_GET_PROC_ADDRESS_SUCCESS);
    lookup("a symbol by a later version", "cuMemAlloc", 12000,
           NRM_CU_GET_PROC_ADDRESS_SUCCESS);
    lookup("a symbol by an earlier version", "cuCtxGetId", 11000,
           NRM_CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
    lookup("no symbol", "cuNoSuchFunction", 12000,
           NRM_CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
    expect("a version newer than the driver",
           cu.cuGetProcAddress("cuMemAlloc", &address, 99990, 0, NULL),
           NRM_CUDA_ERROR_INVALID_VALUE);
    expect("cuInit with flags", cu.cuInit(1), NRM_CUDA_ERROR_INVALID_VALUE);
    start(argc, argv);
    expect("cuInit again", cu.cuInit(0), NRM_CUDA_SUCCESS);
    expect("cuDeviceGet of no device", cu.cuDeviceGet(&device, 4711),
           NRM_CUDA_ERROR_INVALID_DEVICE);
    return finish();
}
