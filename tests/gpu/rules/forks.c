/* fork: what a child may read and call. */
#include "rule.h"

static unsigned char *registered;
static unsigned char *allocated;
static nrm_CUdeviceptr managed;

static int
call_init(void *arg)
{
    (void)arg;
    return (int)cu.cuInit(0);
}

static int
call_state(void *arg)
{
    (void)arg;
    unsigned int flags;
    int active;
    return (int)cu.cuDevicePrimaryCtxGetState(device, &flags, &active);
}

static int
call_unregister(void *arg)
{
    (void)arg;
    return (int)cu.cuMemHostUnregister(registered);
}

static int
read_registered(void *arg)
{
    (void)arg;
    int byte = registered[5];
    registered[5] = 9;
    return byte;
}

static int
read_allocated(void *arg)
{
    (void)arg;
    return allocated[5];
}

static int
read_managed(void *arg)
{
    (void)arg;
    return *(volatile unsigned char *)(uintptr_t)managed;
}

int
main(int argc, char **argv)
{
    open_driver(argc, argv);
    expect_number("cuInit in a child forked before cuInit", in_child(call_init, NULL),
                  0);
    start(argc, argv);
    void *ptr;
    nrm_CUdeviceptr on_device;
    registered = pages(MIB, 4);
    MUST(cu.cuMemHostRegister(registered, MIB, 1));
    MUST(cu.cuMemHostAlloc(&ptr, MIB, 1));
    allocated = ptr;
    memset(allocated, 5, MIB);
    MUST(cu.cuMemAllocManaged(&managed, MIB, 1));
    memset((void *)(uintptr_t)managed, 6, MIB);
    MUST(cu.cuMemAlloc(&on_device, MIB));

    expect("cuInit in a child forked after it", (nrm_CUresult)in_child(call_init, NULL),
           NRM_CUDA_ERROR_NOT_INITIALIZED);
    expect("cuDevicePrimaryCtxGetState there", (nrm_CUresult)in_child(call_state, NULL),
           NRM_CUDA_ERROR_NOT_INITIALIZED);
    expect("cuMemHostUnregister there", (nrm_CUresult)in_child(call_unregister, NULL),
           NRM_CUDA_ERROR_NOT_INITIALIZED);
    expect_number("it reads registered memory", in_child(read_registered, NULL), 4);
    expect_number("it reads memory of cuMemHostAlloc", in_child(read_allocated, NULL),
                  5);
    expect_number("it dies of managed memory by", in_child(read_managed, NULL),
                  -SIGSEGV);
    expect_number("what it wrote is its own", registered[5], 4);
    registered[6] = 8;
    MUST(cu.cuMemcpyHtoD(on_device, registered, 4096));
    expect_number("what the parent writes later reaches the device",
                  device_byte(on_device + 6), 8);
    return finish();
}
