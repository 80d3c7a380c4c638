/* Stream capture: which calls it bears, and which invalidate it. */
#include "rule.h"

static nrm_CUstream capturing;
static nrm_CUevent event;
static nrm_CUdeviceptr on_device;
static nrm_CUdeviceptr to_free;
static unsigned char *host;
static unsigned char *page_locked;

static nrm_CUresult
record_context(void)
{
    return cu.cuCtxRecordEvent(context, event);
}

static nrm_CUresult
record_legacy(void)
{
    return cu.cuEventRecord(event, NULL);
}

static nrm_CUresult
record_other(void)
{
    nrm_CUstream other;
    MUST(cu.cuStreamCreate(&other, NRM_CU_STREAM_NON_BLOCKING));
    nrm_CUresult result = cu.cuEventRecord(event, other);
    MUST(cu.cuStreamDestroy(other));
    return result;
}

static nrm_CUresult
query(void)
{
    return cu.cuEventQuery(event);
}

static nrm_CUresult
synchronize(void)
{
    return cu.cuEventSynchronize(event);
}

static nrm_CUresult
create_event(void)
{
    nrm_CUevent created;
    return cu.cuEventCreate(&created, NRM_CU_EVENT_DISABLE_TIMING);
}

static nrm_CUresult
get_state(void)
{
    unsigned int flags;
    int active;
    return cu.cuDevicePrimaryCtxGetState(device, &flags, &active);
}

static nrm_CUresult
get_attribute(void)
{
    unsigned int type;
    return cu.cuPointerGetAttribute(&type, NRM_CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                    address_of(page_locked));
}

static nrm_CUresult
get_id(void)
{
    unsigned long long id;
    return cu.cuStreamGetId(capturing, &id);
}

static nrm_CUresult
get_other_id(void)
{
    unsigned long long id;
    nrm_CUstream other;
    MUST(cu.cuStreamCreate(&other, NRM_CU_STREAM_NON_BLOCKING));
    nrm_CUresult result = cu.cuStreamGetId(other, &id);
    MUST(cu.cuStreamDestroy(other));
    return result;
}

static nrm_CUresult
allocate(void)
{
    nrm_CUdeviceptr ptr;
    return cu.cuMemAlloc(&ptr, MIB);
}

static nrm_CUresult
free_device(void)
{
    return cu.cuMemFree(to_free);
}

static nrm_CUresult
allocate_managed(void)
{
    nrm_CUdeviceptr ptr;
    return cu.cuMemAllocManaged(&ptr, MIB, 1);
}

static nrm_CUresult
allocate_host(void)
{
    void *ptr;
    return cu.cuMemHostAlloc(&ptr, MIB, 1);
}

static nrm_CUresult
register_host(void)
{
    return cu.cuMemHostRegister(host, MIB, 1);
}

static nrm_CUresult
unregister_host(void)
{
    return cu.cuMemHostUnregister(host);
}

static nrm_CUresult
is_capturing(void)
{
    nrm_CUstreamCaptureStatus status;
    return cu.cuStreamIsCapturing(capturing, &status);
}

enum when { ALWAYS, RELAXED, NEVER, NOT_IF_BLOCKING };

/* How a call goes during a capture: always, only by a thread of relaxed mode, never, or
 * only when the capturing stream is a non-blocking one. */
static const struct {
    const char *name;
    nrm_CUresult (*call)(void);
    enum when when;
} calls[] = {
    {"cuCtxRecordEvent", record_context, NEVER},
    {"cuEventRecord on the legacy stream", record_legacy, NOT_IF_BLOCKING},
    {"cuEventRecord on another stream", record_other, ALWAYS},
    {"cuEventQuery", query, RELAXED},
    {"cuEventSynchronize", synchronize, RELAXED},
    {"cuEventCreate", create_event, ALWAYS},
    {"cuDevicePrimaryCtxGetState", get_state, ALWAYS},
    {"cuPointerGetAttribute", get_attribute, ALWAYS},
    {"cuStreamIsCapturing", is_capturing, ALWAYS},
    {"cuStreamGetId of the capturing stream", get_id, NEVER},
    {"cuStreamGetId of another stream", get_other_id, ALWAYS},
    {"cuMemAlloc", allocate, RELAXED},
    {"cuMemFree", free_device, RELAXED},
    {"cuMemAllocManaged", allocate_managed, RELAXED},
    {"cuMemHostAlloc", allocate_host, RELAXED},
    {"cuMemHostRegister", register_host, RELAXED},
    {"cuMemHostUnregister", unregister_host, RELAXED},
};

static bool
is_borne(enum when when, bool blocking, bool relaxed)
{
    switch (when) {
    case ALWAYS:
        return true;
    case RELAXED:
        return relaxed;
    case NOT_IF_BLOCKING:
        return !blocking;
    default:
        return false;
    }
}

static void
one_call(size_t i, bool blocking, nrm_CUstreamCaptureMode mode, bool relaxed)
{
    char rule[128];
    char ends[160];
    nrm_CUgraph graph = NULL;
    nrm_CUstreamCaptureMode thread_mode = NRM_CU_STREAM_CAPTURE_MODE_RELAXED;
    MUST(cu.cuStreamCreate(&capturing, blocking ? NRM_CU_STREAM_DEFAULT
                                                : NRM_CU_STREAM_NON_BLOCKING));
    MUST(cu.cuMemAlloc(&to_free, MIB));
    bool registers = calls[i].call == unregister_host;
    if (registers) {
        MUST(cu.cuMemHostRegister(host, MIB, 1));
    }
    MUST(cu.cuStreamBeginCapture(capturing, mode));
    if (relaxed) {
        MUST(cu.cuThreadExchangeStreamCaptureMode(&thread_mode));
    }
    nrm_CUresult result = calls[i].call();
    if (relaxed) {
        MUST(cu.cuThreadExchangeStreamCaptureMode(&thread_mode));
    }
    nrm_CUresult ended = cu.cuStreamEndCapture(capturing, &graph);

    bool borne = is_borne(calls[i].when, blocking, relaxed);
    snprintf(rule, sizeof rule, "%s, %s stream, %s capture%s", calls[i].name,
             blocking ? "blocking" : "non-blocking",
             mode == NRM_CU_STREAM_CAPTURE_MODE_GLOBAL ? "global" : "thread-local",
             relaxed ? ", relaxed thread" : "");
    expect_yes(rule, (result == NRM_CUDA_SUCCESS) == borne);
    snprintf(ends, sizeof ends, "  cuStreamEndCapture after it");
    expect(ends, ended,
           borne ? NRM_CUDA_SUCCESS : NRM_CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    if (graph != NULL) {
        MUST(cu.cuGraphDestroy(graph));
    }
    MUST(cu.cuStreamDestroy(capturing));
    if (calls[i].call == register_host || registers) {
        (void)cu.cuMemHostUnregister(host);
    }
    if (calls[i].call != free_device || !borne) {
        MUST(cu.cuMemFree(to_free));
    }
}

static void
errors(void)
{
    nrm_CUgraph graph = NULL;
    nrm_CUstreamCaptureStatus status = 9;
    MUST(cu.cuStreamCreate(&capturing, NRM_CU_STREAM_DEFAULT));
    expect("begin to capture the legacy stream", cu.cuStreamBeginCapture(NULL, 0),
           NRM_CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    expect("end what was not begun", cu.cuStreamEndCapture(capturing, &graph),
           NRM_CUDA_ERROR_ILLEGAL_STATE);
    MUST(cu.cuStreamBeginCapture(capturing, NRM_CU_STREAM_CAPTURE_MODE_GLOBAL));
    expect("begin twice", cu.cuStreamBeginCapture(capturing, 0),
           NRM_CUDA_ERROR_ILLEGAL_STATE);
    expect("cuStreamIsCapturing of the legacy stream while a blocking one captures",
           cu.cuStreamIsCapturing(NULL, &status),
           NRM_CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    MUST(cu.cuStreamIsCapturing(capturing, &status));
    expect_number("status of the capturing stream", status, 1);
    expect("cuEventRecord on the legacy stream while a blocking one captures",
           cu.cuEventRecord(event, NULL), NRM_CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    MUST(cu.cuStreamIsCapturing(capturing, &status));
    expect_number("status of the invalidated stream", status, 2);
    expect("copy on the invalidated stream",
           cu.cuMemcpyHtoDAsync(on_device, page_locked, 64, capturing),
           NRM_CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    expect("cuStreamEndCapture of it", cu.cuStreamEndCapture(capturing, &graph),
           NRM_CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    expect_yes("it gives no graph", graph == NULL);
    MUST(cu.cuStreamBeginCapture(capturing, NRM_CU_STREAM_CAPTURE_MODE_GLOBAL));
    expect("cuCtxRecordEvent", cu.cuCtxRecordEvent(context, event),
           NRM_CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    (void)cu.cuStreamEndCapture(capturing, &graph);
    MUST(cu.cuStreamBeginCapture(capturing, NRM_CU_STREAM_CAPTURE_MODE_GLOBAL));
    expect("cuMemHostAlloc", allocate_host(),
           NRM_CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    (void)cu.cuStreamEndCapture(capturing, &graph);
    MUST(cu.cuStreamDestroy(capturing));
}

static void
captured_work(void)
{
    nrm_CUgraph graph = NULL;
    memset(page_locked, 9, 64);
    MUST(cu.cuMemsetD8(on_device, 3, 64));
    MUST(cu.cuCtxSynchronize());
    MUST(cu.cuStreamCreate(&capturing, NRM_CU_STREAM_NON_BLOCKING));
    MUST(cu.cuStreamBeginCapture(capturing, NRM_CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    expect("capture a copy",
           cu.cuMemcpyHtoDAsync(on_device, page_locked, 64, capturing),
           NRM_CUDA_SUCCESS);
    expect("end the capture", cu.cuStreamEndCapture(capturing, &graph),
           NRM_CUDA_SUCCESS);
    MUST(cu.cuCtxSynchronize());
    expect_number("a captured copy does not run", device_byte(on_device), 3);
    expect("destroy the graph", cu.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    MUST(cu.cuStreamDestroy(capturing));
}

int
main(int argc, char **argv)
{
    void *ptr = NULL;
    start(argc, argv);
    MUST(cu.cuMemHostAlloc(&ptr, MIB, 1));
    page_locked = ptr;
    host = pages(MIB, 1);
    MUST(cu.cuMemAlloc(&on_device, MIB));
    MUST(cu.cuEventCreate(&event, NRM_CU_EVENT_DISABLE_TIMING));
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        for (int blocking = 0; blocking < 2; blocking++) {
            for (unsigned int mode = 0; mode < 2; mode++) {
                one_call(i, blocking, mode, false);
                one_call(i, blocking, mode, true);
            }
        }
    }
    errors();
    captured_work();
    return finish();
}
