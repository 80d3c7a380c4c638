/* Contexts: the stack of current ones, what works in a thread without one, lifetimes,
 * and objects of another device's context. */
#include "rule.h"

static nrm_CUevent event;
static nrm_CUstream stream;
static nrm_CUdeviceptr on_device;
static unsigned char *page_locked;
static unsigned char *pageable;

#define BARE(name, call)                                                               \
    static nrm_CUresult name(void *arg)                                                \
    {                                                                                  \
        (void)arg;                                                                     \
        return call;                                                                   \
    }

static nrm_CUdeviceptr made;
static void *made_host;
static unsigned int value;
static nrm_CUevent made_event;
static nrm_CUcontext made_context;
static unsigned long long id;

BARE(query, cu.cuEventQuery(event))
BARE(synchronize_event, cu.cuEventSynchronize(event))
BARE(record, cu.cuEventRecord(event, stream))
BARE(record_legacy, cu.cuEventRecord(event, NULL))
BARE(record_context, cu.cuCtxRecordEvent(context, event))
BARE(create_event, cu.cuEventCreate(&made_event, 2))
BARE(query_stream, cu.cuStreamQuery(stream))
BARE(synchronize_stream, cu.cuStreamSynchronize(stream))
BARE(wait_event, cu.cuStreamWaitEvent(stream, event, 0))
BARE(stream_id, cu.cuStreamGetId(stream, &id))
BARE(context_id, cu.cuCtxGetId(NULL, &id))
BARE(stream_context, cu.cuStreamGetCtx(stream, &made_context))
BARE(is_capturing, cu.cuStreamIsCapturing(stream, &value))
BARE(copy, cu.cuMemcpyHtoDAsync(on_device, page_locked, 64, stream))
BARE(fill, cu.cuMemsetD8Async(on_device, 1, 64, stream))
BARE(attribute, cu.cuPointerGetAttribute(&value, NRM_CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                         address_of(page_locked)))
BARE(allocate, cu.cuMemAlloc(&made, MIB))
BARE(allocate_host, cu.cuMemHostAlloc(&made_host, MIB, 1))
BARE(register_host, cu.cuMemHostRegister(pageable, MIB, 1))
BARE(unregister_host, cu.cuMemHostUnregister(pageable))
BARE(free_device, cu.cuMemFree(on_device))
BARE(free_host, cu.cuMemFreeHost(page_locked))
BARE(synchronize, cu.cuCtxSynchronize())

/* Calls that carry their context in a handle need no current one; the others do. */
static const struct {
    const char *name;
    nrm_CUresult (*call)(void *arg);
    nrm_CUresult expected;
} bare[] = {
    {"cuEventQuery", query, NRM_CUDA_SUCCESS},
    {"cuEventSynchronize", synchronize_event, NRM_CUDA_SUCCESS},
    {"cuEventRecord", record, NRM_CUDA_SUCCESS},
    {"cuEventRecord on the legacy stream", record_legacy,
     NRM_CUDA_ERROR_INVALID_CONTEXT},
    {"cuCtxRecordEvent", record_context, NRM_CUDA_SUCCESS},
    {"cuCtxGetId of the current one", context_id, NRM_CUDA_ERROR_INVALID_CONTEXT},
    {"cuEventCreate", create_event, NRM_CUDA_ERROR_INVALID_CONTEXT},
    {"cuStreamQuery", query_stream, NRM_CUDA_SUCCESS},
    {"cuStreamSynchronize", synchronize_stream, NRM_CUDA_SUCCESS},
    {"cuStreamWaitEvent", wait_event, NRM_CUDA_SUCCESS},
    {"cuStreamGetId", stream_id, NRM_CUDA_SUCCESS},
    {"cuStreamGetCtx", stream_context, NRM_CUDA_SUCCESS},
    {"cuStreamIsCapturing", is_capturing, NRM_CUDA_SUCCESS},
    {"cuMemcpyHtoDAsync", copy, NRM_CUDA_SUCCESS},
    {"cuMemsetD8Async", fill, NRM_CUDA_SUCCESS},
    {"cuPointerGetAttribute", attribute, NRM_CUDA_SUCCESS},
    {"cuMemAlloc", allocate, NRM_CUDA_ERROR_INVALID_CONTEXT},
    {"cuMemHostAlloc", allocate_host, NRM_CUDA_ERROR_INVALID_CONTEXT},
    {"cuMemHostRegister", register_host, NRM_CUDA_ERROR_INVALID_CONTEXT},
    {"cuMemHostUnregister", unregister_host, NRM_CUDA_SUCCESS},
    {"cuCtxSynchronize", synchronize, NRM_CUDA_ERROR_INVALID_CONTEXT},
    {"cuMemFree", free_device, NRM_CUDA_SUCCESS},
    {"cuMemFreeHost", free_host, NRM_CUDA_SUCCESS},
};

static void
without_context(void)
{
    char rule[128];
    for (size_t i = 0; i < sizeof bare / sizeof bare[0]; i++) {
        if (bare[i].call == unregister_host) {
            MUST(cu.cuMemHostRegister(pageable, MIB, 1));
        }
        snprintf(rule, sizeof rule, "%s in a thread without a context", bare[i].name);
        expect(rule, in_bare_thread(bare[i].call, NULL), bare[i].expected);
    }
}

static void
stack(void)
{
    nrm_CUcontext current = NULL;
    nrm_CUdevice found = -1;
    expect("push", cu.cuCtxPushCurrent(context), NRM_CUDA_SUCCESS);
    expect("pop", cu.cuCtxPopCurrent(&current), NRM_CUDA_SUCCESS);
    expect_yes("gives what was pushed", current == context);
    MUST(cu.cuCtxGetDevice(&found));
    expect_number("device of the current one", found, 0);
    expect("set none", cu.cuCtxSetCurrent(NULL), NRM_CUDA_SUCCESS);
    MUST(cu.cuCtxGetCurrent(&current));
    expect_yes("then there is none", current == NULL);
    expect("pop from an empty stack", cu.cuCtxPopCurrent(&current),
           NRM_CUDA_ERROR_INVALID_CONTEXT);
    expect("cuCtxGetDevice without one", cu.cuCtxGetDevice(&found),
           NRM_CUDA_ERROR_INVALID_CONTEXT);
    MUST(cu.cuCtxSetCurrent(context));
}

static void
release(void)
{
    unsigned int flags;
    int active;
    nrm_CUcontext again;
    MUST(cu.cuDevicePrimaryCtxRetain(&again, device));
    expect("release one of two", cu.cuDevicePrimaryCtxRelease(device),
           NRM_CUDA_SUCCESS);
    MUST(cu.cuDevicePrimaryCtxGetState(device, &flags, &active));
    expect_number("it is active", active, 1);
    expect("release the last", cu.cuDevicePrimaryCtxRelease(device), NRM_CUDA_SUCCESS);
    MUST(cu.cuDevicePrimaryCtxGetState(device, &flags, &active));
    expect_number("it is active", active, 0);
    expect("cuCtxSynchronize then", cu.cuCtxSynchronize(),
           NRM_CUDA_ERROR_CONTEXT_IS_DESTROYED);
    expect("release once more", cu.cuDevicePrimaryCtxRelease(device),
           NRM_CUDA_ERROR_INVALID_CONTEXT);
}

int
main(int argc, char **argv)
{
    void *ptr;
    start(argc, argv);
    MUST(cu.cuEventCreate(&event, 2));
    MUST(cu.cuStreamCreate(&stream, 1));
    MUST(cu.cuMemAlloc(&on_device, MIB));
    MUST(cu.cuMemHostAlloc(&ptr, MIB, 1));
    page_locked = ptr;
    pageable = pages(MIB, 1);
    without_context();
    stack();
    release();
    return finish();
}
