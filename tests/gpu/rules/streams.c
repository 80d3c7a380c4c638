/* What the order of streams rests on: whose stream a handle means, and what a wait for
 * an event waits for. */
#include "rule.h"

static nrm_CUdeviceptr on_device;
static unsigned char *page_locked;
static nrm_CUevent event;

static void
busy(nrm_CUstream stream)
{
    hold(stream);
    MUST(cu.cuMemcpyHtoDAsync(on_device, page_locked, 4096, stream));
}

static nrm_CUstream
new_stream(void)
{
    nrm_CUstream stream;
    MUST(cu.cuStreamCreate(&stream, NRM_CU_STREAM_NON_BLOCKING));
    return stream;
}

/* ---- the per-thread stream ---- */

static atomic_int stage;

/* Holds its own per-thread stream, records on it, and lives until the stage is 2. */
static nrm_CUresult
other_thread(void *arg)
{
    (void)arg;
    busy(NRM_CU_STREAM_PER_THREAD);
    nrm_CUresult result = cu.cuEventRecord(event, NRM_CU_STREAM_PER_THREAD);
    atomic_store(&stage, 1);
    while (atomic_load(&stage) != 2) {
        sleep_ms(1);
    }
    return result;
}

static void
per_thread(void)
{
    struct probe probe;
    nrm_CUevent own;
    nrm_CUstream waits = new_stream();
    MUST(cu.cuEventCreate(&own, NRM_CU_EVENT_DISABLE_TIMING));
    probe_start(&probe, other_thread, NULL);
    while (atomic_load(&stage) != 1) {
        sleep_ms(1);
    }
    expect("the per-thread stream of this thread, beside a busy one of another",
           cu.cuStreamQuery(NRM_CU_STREAM_PER_THREAD), NRM_CUDA_SUCCESS);
    MUST(cu.cuEventRecord(own, NRM_CU_STREAM_PER_THREAD));
    expect("an event on it", cu.cuEventQuery(own), NRM_CUDA_SUCCESS);
    expect("an event on the other thread's", cu.cuEventQuery(event),
           NRM_CUDA_ERROR_NOT_READY);
    MUST(cu.cuStreamWaitEvent(waits, event, 0));
    expect("a stream that waits for that event", cu.cuStreamQuery(waits),
           NRM_CUDA_ERROR_NOT_READY);
    atomic_store(&stage, 2);
    expect("its record in the other thread", probe_join(&probe), NRM_CUDA_SUCCESS);
    expect("the event when that thread has ended", cu.cuEventQuery(event),
           NRM_CUDA_ERROR_NOT_READY);
    let_go();
    expect("waiting for the stream", cu.cuStreamSynchronize(waits), NRM_CUDA_SUCCESS);
    expect("the event then", cu.cuEventQuery(event), NRM_CUDA_SUCCESS);
    MUST(cu.cuEventDestroy(own));
}

/* ---- events that are recorded again ---- */

static void
recorded_again(void)
{
    nrm_CUstream first = new_stream();
    nrm_CUstream idle = new_stream();
    nrm_CUstream waits = new_stream();
    busy(first);
    MUST(cu.cuEventRecord(event, first));
    MUST(cu.cuStreamWaitEvent(waits, event, 0));
    MUST(cu.cuEventRecord(event, idle));
    expect("the event, recorded again on an idle stream", cu.cuEventQuery(event),
           NRM_CUDA_SUCCESS);
    expect("a stream that waited for it before", cu.cuStreamQuery(waits),
           NRM_CUDA_ERROR_NOT_READY);
    let_go();
    MUST(cu.cuStreamSynchronize(waits));
    MUST(cu.cuStreamDestroy(first));
    MUST(cu.cuStreamDestroy(idle));
    MUST(cu.cuStreamDestroy(waits));
}

/* ---- streams that are gone ---- */

static unsigned long long
id_of(nrm_CUstream stream)
{
    unsigned long long id = 0;
    MUST(cu.cuStreamGetId(stream, &id));
    return id;
}

static void
destroyed(void)
{
    nrm_CUstream gone = new_stream();
    unsigned long long id = id_of(gone);
    busy(gone);
    expect_yes("a stream keeps its number while it works", id_of(gone) == id);
    MUST(cu.cuEventRecord(event, gone));
    MUST(cu.cuStreamDestroy(gone));
    nrm_CUstream next = new_stream();
    expect_yes("the next stream has the handle of the destroyed one", next == gone);
    expect_yes("and another number", id_of(next) != id);
    expect("it is idle", cu.cuStreamQuery(next), NRM_CUDA_SUCCESS);
    expect("the last event of the destroyed one", cu.cuEventQuery(event),
           NRM_CUDA_ERROR_NOT_READY);
    MUST(cu.cuStreamWaitEvent(next, event, 0));
    expect("the next one when it waits for that", cu.cuStreamQuery(next),
           NRM_CUDA_ERROR_NOT_READY);
    let_go();
    MUST(cu.cuStreamSynchronize(next));
    expect("the event then", cu.cuEventQuery(event), NRM_CUDA_SUCCESS);
    MUST(cu.cuStreamDestroy(next));
}

/* Each has the handle of the one before. */
static void
numbers(void)
{
    enum { N_STREAMS = 1000 };
    static unsigned long long ids[N_STREAMS];
    int n_equal = 0, n_handles = 0;
    nrm_CUstream last = NULL;
    for (int i = 0; i < N_STREAMS; i++) {
        nrm_CUstream stream = new_stream();
        n_handles += stream == last;
        ids[i] = id_of(stream);
        MUST(cu.cuStreamDestroy(stream));
        for (int k = 0; k < i; k++) {
            n_equal += ids[k] == ids[i];
        }
        last = stream;
    }
    expect_yes(
        "most of a thousand streams, one after the other, have the last one's handle",
        n_handles > N_STREAMS / 2);
    expect_yes("none has the number of an earlier one", n_equal == 0);
}

int
main(int argc, char **argv)
{
    void *ptr = NULL;
    start(argc, argv);
    MUST(cu.cuMemAlloc(&on_device, 4096));
    MUST(cu.cuMemHostAlloc(&ptr, 4096, NRM_CU_MEMHOSTALLOC_PORTABLE));
    MUST(cu.cuEventCreate(&event, NRM_CU_EVENT_DISABLE_TIMING));
    page_locked = ptr;
    per_thread();
    recorded_again();
    destroyed();
    numbers();
    return finish();
}
