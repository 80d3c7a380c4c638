/* Host functions: what they may call, and that only their stream waits for them. */
#include "rule.h"

static nrm_CUevent event;
static nrm_CUresult results[4];
static atomic_bool goes_on;

static void
calls(void *arg)
{
    unsigned int type;
    void *ptr;
    results[0] = cu.cuEventQuery(event);
    results[1] = cu.cuCtxRecordEvent(context, event);
    results[2] = cu.cuPointerGetAttribute(&type, NRM_CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                          address_of(arg));
    results[3] = cu.cuMemHostAlloc(&ptr, 4096, 1);
}

static void
wait_here(void *arg)
{
    (void)arg;
    while (!atomic_load(&goes_on)) {
        sleep_ms(1);
    }
}

int
main(int argc, char **argv)
{
    void *page_locked;
    nrm_CUdeviceptr on_device;
    nrm_CUstream stream;
    nrm_CUstream other;
    start(argc, argv);
    MUST(cu.cuMemHostAlloc(&page_locked, MIB, 1));
    MUST(cu.cuMemAlloc(&on_device, MIB));
    MUST(cu.cuEventCreate(&event, NRM_CU_EVENT_DISABLE_TIMING));
    MUST(cu.cuStreamCreate(&stream, NRM_CU_STREAM_NON_BLOCKING));
    MUST(cu.cuStreamCreate(&other, NRM_CU_STREAM_NON_BLOCKING));

    MUST(cu.cuLaunchHostFunc(stream, calls, page_locked));
    MUST(cu.cuStreamSynchronize(stream));
    expect("cuEventQuery in a host function", results[0], NRM_CUDA_SUCCESS);
    expect("cuCtxRecordEvent in a host function", results[1],
           NRM_CUDA_ERROR_NOT_PERMITTED);
    expect("cuPointerGetAttribute in a host function", results[2],
           NRM_CUDA_ERROR_NOT_PERMITTED);
    expect("cuMemHostAlloc in a host function", results[3],
           NRM_CUDA_ERROR_NOT_PERMITTED);

    MUST(cu.cuLaunchHostFunc(stream, wait_here, NULL));
    MUST(cu.cuMemsetD8Async(on_device, 1, 64, stream));
    MUST(cu.cuMemsetD8Async(on_device + 64, 2, 64, other));
    expect("another stream goes on", cu.cuStreamSynchronize(other), NRM_CUDA_SUCCESS);
    expect("its own stream waits", cu.cuStreamQuery(stream), NRM_CUDA_ERROR_NOT_READY);
    atomic_store(&goes_on, true);
    expect("until it returns", cu.cuStreamSynchronize(stream), NRM_CUDA_SUCCESS);
    return finish();
}
