/* cuDevicePrimaryCtxReset: what is gone, what stays, and how one goes on. */
#include "rule.h"

static int
read_byte(void *ptr)
{
    return *(volatile unsigned char *)ptr;
}

static unsigned char *registered;
static void *allocated;
static unsigned long long id_before;

static void
while_it_is_gone(void)
{
    nrm_CUcontext current = NULL;
    nrm_CUevent event;
    unsigned long long id;
    unsigned int flags;
    int active = -1;
    size_t available;
    size_t total;
    MUST(cu.cuEventCreate(&event, NRM_CU_EVENT_DISABLE_TIMING));

    expect("reset", cu.cuDevicePrimaryCtxReset(device), NRM_CUDA_SUCCESS);
    MUST(cu.cuDevicePrimaryCtxGetState(device, &flags, &active));
    expect_number("the context is active", active, 0);
    expect("cuCtxGetCurrent", cu.cuCtxGetCurrent(&current), NRM_CUDA_SUCCESS);
    expect("cuCtxSynchronize", cu.cuCtxSynchronize(),
           NRM_CUDA_ERROR_CONTEXT_IS_DESTROYED);
    expect("cuCtxGetId", cu.cuCtxGetId(context, &id),
           NRM_CUDA_ERROR_CONTEXT_IS_DESTROYED);
    expect("cuCtxGetId of the current one", cu.cuCtxGetId(NULL, &id),
           NRM_CUDA_ERROR_CONTEXT_IS_DESTROYED);
    expect("cuMemGetInfo", cu.cuMemGetInfo(&available, &total),
           NRM_CUDA_ERROR_CONTEXT_IS_DESTROYED);
    expect("cuMemHostRegister", cu.cuMemHostRegister(pages(4096, 1), 4096, 1),
           NRM_CUDA_ERROR_CONTEXT_IS_DESTROYED);
    expect("cuCtxRecordEvent", cu.cuCtxRecordEvent(context, event),
           NRM_CUDA_ERROR_CONTEXT_IS_DESTROYED);
    expect("cuCtxSetCurrent", cu.cuCtxSetCurrent(context), NRM_CUDA_SUCCESS);
    expect_number("registered memory reads as before", registered[5], 5);
    expect_number("a child that reads memory of cuMemHostAlloc dies of",
                  in_child(read_byte, allocated), -SIGSEGV);
}

static void
when_it_is_retained_again(void)
{
    nrm_CUcontext again = NULL;
    nrm_CUdeviceptr on_device;
    unsigned long long id = 0, id_of_current = 0;
    unsigned int type;
    expect("retain", cu.cuDevicePrimaryCtxRetain(&again, device), NRM_CUDA_SUCCESS);
    expect_yes("the handle is the same", again == context);
    expect("cuCtxSetCurrent", cu.cuCtxSetCurrent(again), NRM_CUDA_SUCCESS);
    MUST(cu.cuCtxGetId(again, &id));
    expect_no("the id is the same", id == id_before);
    MUST(cu.cuCtxGetId(NULL, &id_of_current));
    expect_yes("the current one has it", id_of_current == id);
    expect("the registration is forgotten",
           cu.cuPointerGetAttribute(&type, NRM_CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                    address_of(registered)),
           NRM_CUDA_ERROR_INVALID_VALUE);
    expect("register the same memory again", cu.cuMemHostRegister(registered, MIB, 1),
           NRM_CUDA_SUCCESS);
    MUST(cu.cuMemAlloc(&on_device, MIB));
    expect("copy from it", cu.cuMemcpyHtoD(on_device, registered, 4096),
           NRM_CUDA_SUCCESS);
    expect_number("its bytes", device_byte(on_device), 5);
}

int
main(int argc, char **argv)
{
    start(argc, argv);
    registered = pages(MIB, 5);
    MUST(cu.cuMemHostRegister(registered, MIB, 1));
    MUST(cu.cuMemHostAlloc(&allocated, MIB, 1));
    memset(allocated, 6, MIB);
    MUST(cu.cuCtxGetId(context, &id_before));
    while_it_is_gone();
    when_it_is_retained_again();
    return finish();
}
