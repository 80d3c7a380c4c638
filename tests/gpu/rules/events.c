/* What an event covers: of a stream, of the legacy stream, of a whole context. */
#include "rule.h"

static nrm_CUdeviceptr on_device;
static unsigned char *page_locked;
static nrm_CUstream plain; /* blocking: ordered with the legacy stream */
static nrm_CUstream aside; /* non-blocking */

static nrm_CUevent
event_create(void)
{
    nrm_CUevent event;
    MUST(cu.cuEventCreate(&event, NRM_CU_EVENT_DISABLE_TIMING));
    return event;
}

/* Query while something is held, then let go. */
static void
context_event(const char *rule)
{
    nrm_CUevent event = event_create();
    MUST(cu.cuCtxRecordEvent(context, event));
    expect(rule, cu.cuEventQuery(event), NRM_CUDA_ERROR_NOT_READY);
    let_go();
    MUST(cu.cuEventSynchronize(event));
    MUST(cu.cuCtxSynchronize());
    MUST(cu.cuEventDestroy(event));
}

static void
stream_event(const char *rule, nrm_CUstream recorded, nrm_CUresult expected)
{
    nrm_CUevent event = event_create();
    MUST(cu.cuEventRecord(event, recorded));
    expect(rule, cu.cuEventQuery(event), expected);
    let_go();
    MUST(cu.cuCtxSynchronize());
    MUST(cu.cuEventDestroy(event));
}

static nrm_CUresult
hold_per_thread(void *arg)
{
    atomic_bool *is_held = arg;
    hold(NRM_CU_STREAM_PER_THREAD);
    MUST(cu.cuMemcpyHtoDAsync(on_device, page_locked, 4096, NRM_CU_STREAM_PER_THREAD));
    atomic_store(is_held, true);
    while (__atomic_load_n(flag, __ATOMIC_ACQUIRE) == 0) {
        sleep_ms(1);
    }
    return NRM_CUDA_SUCCESS;
}

static void
context_events(void)
{
    nrm_CUevent event = event_create();
    expect("query an event that was never recorded", cu.cuEventQuery(event),
           NRM_CUDA_SUCCESS);
    MUST(cu.cuCtxRecordEvent(context, event));
    expect("context event of an idle context", cu.cuEventQuery(event),
           NRM_CUDA_SUCCESS);
    hold(aside);
    context_event("context event while a non-blocking stream is held");
    hold(plain);
    context_event("context event while a blocking stream is held");
    hold(NRM_CU_STREAM_LEGACY);
    context_event("context event while the legacy stream is held");
    hold(NRM_CU_STREAM_PER_THREAD);
    context_event("context event while this thread's stream is held");

    atomic_bool is_held = false;
    struct probe probe;
    probe_start(&probe, hold_per_thread, &is_held);
    while (!atomic_load(&is_held)) {
        sleep_ms(1);
    }
    context_event("context event while another thread's stream is held");
    MUST(probe_join(&probe));

    nrm_CUstream gone;
    nrm_CUstream next;
    MUST(cu.cuStreamCreate(&gone, NRM_CU_STREAM_NON_BLOCKING));
    hold(gone);
    MUST(cu.cuMemcpyHtoDAsync(on_device, page_locked, 4096, gone));
    expect("destroy a stream with work pending", cu.cuStreamDestroy(gone),
           NRM_CUDA_SUCCESS);
    MUST(cu.cuStreamCreate(&next, NRM_CU_STREAM_NON_BLOCKING));
    expect_yes("the next stream gets its handle", next == gone);
    expect("and is idle", cu.cuStreamQuery(next), NRM_CUDA_SUCCESS);
    context_event("context event while a destroyed stream's work is held");
}

static void
legacy_order(void)
{
    hold(aside);
    stream_event("legacy event while a non-blocking stream is held", NULL,
                 NRM_CUDA_SUCCESS);
    hold(plain);
    stream_event("legacy event while a blocking stream is held", NULL,
                 NRM_CUDA_ERROR_NOT_READY);
    hold(plain);
    stream_event("event of a non-blocking stream while a blocking one is held", aside,
                 NRM_CUDA_SUCCESS);
    hold(NULL);
    stream_event("event of a blocking stream while the legacy one is held", plain,
                 NRM_CUDA_ERROR_NOT_READY);
    hold(NULL);
    stream_event("event of this thread's stream while the legacy one is held",
                 NRM_CU_STREAM_PER_THREAD, NRM_CUDA_ERROR_NOT_READY);
    hold(NULL);
    stream_event("event of a non-blocking stream while the legacy one is held", aside,
                 NRM_CUDA_SUCCESS);
    hold(plain);
    MUST(cu.cuMemcpyHtoDAsync(on_device, page_locked, 4096, NULL));
    nrm_CUstream other;
    MUST(cu.cuStreamCreate(&other, NRM_CU_STREAM_DEFAULT));
    MUST(cu.cuMemcpyHtoDAsync(on_device, page_locked, 4096, other));
    expect("a second blocking stream behind legacy work behind a held one",
           cu.cuStreamQuery(other), NRM_CUDA_ERROR_NOT_READY);
    let_go();
    MUST(cu.cuCtxSynchronize());
}

static void
waits(void)
{
    nrm_CUevent event = event_create();
    hold(aside);
    MUST(cu.cuEventRecord(event, aside));
    MUST(cu.cuStreamWaitEvent(plain, event, 0));
    MUST(cu.cuEventDestroy(event));
    expect("a stream that waits for a destroyed event", cu.cuStreamQuery(plain),
           NRM_CUDA_ERROR_NOT_READY);
    let_go();
    expect("it goes on when the work is done", cu.cuStreamSynchronize(plain),
           NRM_CUDA_SUCCESS);
    event = event_create();
    hold(aside);
    MUST(cu.cuEventRecord(event, aside));
    MUST(cu.cuEventRecord(event, plain));
    expect("an event recorded again is asked for its latest record",
           cu.cuEventQuery(event), NRM_CUDA_SUCCESS);
    let_go();
    MUST(cu.cuCtxSynchronize());
}

int
main(int argc, char **argv)
{
    void *ptr = NULL;
    start(argc, argv);
    MUST(cu.cuMemAlloc(&on_device, MIB));
    MUST(cu.cuMemHostAlloc(&ptr, MIB, 1));
    page_locked = ptr;
    MUST(cu.cuStreamCreate(&plain, NRM_CU_STREAM_DEFAULT));
    MUST(cu.cuStreamCreate(&aside, NRM_CU_STREAM_NON_BLOCKING));
    context_events();
    legacy_order();
    waits();
    return finish();
}
