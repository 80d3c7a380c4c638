/* Graphs that were captured: what a capture says of itself, and how long a graph keeps
 * the objects that it holds. */
#include "rule.h"

enum { UNTOLD = 12345 }; /* what stands where nothing is written */

static nrm_CUstream stream;
static nrm_CUstream other;
static nrm_CUevent event;
static nrm_CUdeviceptr on_device;
static atomic_int n_gone;

/* In a thread of the driver: no call of it. */
static void
count_gone(void *data)
{
    (void)data;
    atomic_fetch_add(&n_gone, 1);
}

/* The driver calls destructors a little later. */
static bool
has_gone(void)
{
    struct timespec pause = {.tv_nsec = 10 * 1000 * 1000};
    for (int i = 0; i < 30 && atomic_load(&n_gone) == 0; i++) {
        nanosleep(&pause, NULL);
    }
    return atomic_load(&n_gone) != 0;
}

static nrm_CUresult
get_info(nrm_CUstream of, unsigned int *status, uint64_t *id, nrm_CUgraph *graph)
{
    return cu.cuStreamGetCaptureInfo(of, status, id, graph, NULL, NULL, NULL);
}

/* Begins a capture whose graph holds an object. */
static nrm_CUgraph
begin(nrm_CUstream on, nrm_CUstreamCaptureMode mode, const char *name)
{
    char rule[128];
    unsigned int status = 0;
    uint64_t id = 0;
    nrm_CUgraph graph = NULL;
    nrm_CUuserObject object = NULL;
    atomic_store(&n_gone, 0);
    MUST(cu.cuStreamBeginCapture(on, mode));
    snprintf(rule, sizeof rule, "cuStreamGetCaptureInfo in a %s capture", name);
    expect(rule, get_info(on, &status, &id, &graph), NRM_CUDA_SUCCESS);
    expect_yes("it has a number and a graph", id != 0 && graph != NULL);
    snprintf(rule, sizeof rule, "cuUserObjectCreate in a %s capture", name);
    expect(rule,
           cu.cuUserObjectCreate(&object, NULL, count_gone, 1,
                                 NRM_CU_USER_OBJECT_NO_DESTRUCTOR_SYNC),
           NRM_CUDA_SUCCESS);
    snprintf(rule, sizeof rule, "cuGraphRetainUserObject in a %s capture", name);
    expect(rule,
           cu.cuGraphRetainUserObject(graph, object, 1, NRM_CU_GRAPH_USER_OBJECT_MOVE),
           NRM_CUDA_SUCCESS);
    MUST(cu.cuMemsetD8Async(on_device, 1, 64, on));
    MUST(cu.cuStreamIsCapturing(on, &status));
    expect_number("the capture goes on", status, NRM_CU_STREAM_CAPTURE_STATUS_ACTIVE);
    return graph;
}

static nrm_CUgraph
end(nrm_CUstream on)
{
    nrm_CUgraph graph = NULL;
    MUST(cu.cuStreamEndCapture(on, &graph));
    return graph;
}

static void
objects_of_graphs(nrm_CUstreamCaptureMode mode, const char *name)
{
    nrm_CUgraphExec exec = NULL;
    nrm_CUgraph captured = begin(stream, mode, name), graph = end(stream);
    expect_yes("the graph is the one that was told", graph == captured);
    MUST(cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    MUST(cu.cuGraphLaunch(exec, other));
    MUST(cu.cuStreamSynchronize(other));
    MUST(cu.cuGraphDestroy(graph));
    expect_no("the object goes with the graph, beside an executable", has_gone());
    MUST(cu.cuGraphExecDestroy(exec));
    expect_yes("it goes with the last executable", has_gone());

    unsigned int status = 0;
    uint64_t id = UNTOLD;
    (void)begin(stream, mode, name);
    expect("cuCtxRecordEvent", cu.cuCtxRecordEvent(context, event),
           NRM_CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    expect("cuStreamGetCaptureInfo of an invalidated capture",
           get_info(stream, &status, &id, NULL), NRM_CUDA_SUCCESS);
    expect_number("its status", status, NRM_CU_STREAM_CAPTURE_STATUS_INVALIDATED);
    expect_yes("its number is not told", id == UNTOLD);
    expect_no("the object goes before the end of the capture", has_gone());
    expect("cuStreamEndCapture", cu.cuStreamEndCapture(stream, &graph),
           NRM_CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    expect_yes("the object goes with a capture that failed", has_gone());
}

static void
object_of_a_pending_launch(void)
{
    void *ptr = NULL;
    nrm_CUdeviceptr word;
    nrm_CUgraphExec exec = NULL;
    MUST(cu.cuMemHostAlloc(&ptr, 64, 3));
    MUST(cu.cuMemHostGetDevicePointer(&word, ptr, 0));
    atomic_uint *flag = ptr;
    atomic_store(flag, 0);
    (void)begin(stream, NRM_CU_STREAM_CAPTURE_MODE_RELAXED, "relaxed");
    nrm_CUgraph graph = end(stream);
    MUST(cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    MUST(cu.cuStreamWaitValue32(other, word, 1, NRM_CU_STREAM_WAIT_VALUE_GEQ));
    MUST(cu.cuGraphLaunch(exec, other));
    MUST(cu.cuGraphExecDestroy(exec));
    MUST(cu.cuGraphDestroy(graph));
    expect_no("the object goes while a launch is pending", has_gone());
    atomic_store(flag, 1);
    MUST(cu.cuStreamSynchronize(other));
    expect_yes("it goes when the launch is done", has_gone());
}

static void
numbers_of_captures(void)
{
    nrm_CUstream destroyed;
    unsigned int status = 0;
    uint64_t a = 0, b = 0;
    MUST(cu.cuStreamBeginCapture(stream, NRM_CU_STREAM_CAPTURE_MODE_RELAXED));
    MUST(cu.cuEventRecord(event, stream));
    MUST(cu.cuStreamWaitEvent(other, event, 0));
    MUST(get_info(stream, &status, &a, NULL));
    MUST(get_info(other, &status, &b, NULL));
    expect_yes("a stream that was forked into a capture has its number", a == b);
    MUST(cu.cuEventRecord(event, other));
    MUST(cu.cuStreamWaitEvent(stream, event, 0));
    MUST(cu.cuGraphDestroy(end(stream)));
    MUST(cu.cuStreamBeginCapture(stream, NRM_CU_STREAM_CAPTURE_MODE_RELAXED));
    MUST(get_info(stream, &status, &b, NULL));
    expect_no("the next capture has the same number", a == b);
    MUST(cu.cuGraphDestroy(end(stream)));
    MUST(cu.cuStreamCreate(&destroyed, NRM_CU_STREAM_NON_BLOCKING));
    (void)begin(destroyed, NRM_CU_STREAM_CAPTURE_MODE_RELAXED, "relaxed");
    MUST(cu.cuStreamDestroy(destroyed));
    expect_yes("the object goes with a stream that is destroyed in its capture",
               has_gone());
    expect("cuStreamBeginCapture of the per-thread stream",
           cu.cuStreamBeginCapture(NRM_CU_STREAM_PER_THREAD,
                                   NRM_CU_STREAM_CAPTURE_MODE_RELAXED),
           NRM_CUDA_SUCCESS);
    MUST(cu.cuGraphDestroy(end(NRM_CU_STREAM_PER_THREAD)));
    expect("cuStreamBeginCapture of the legacy stream",
           cu.cuStreamBeginCapture(NRM_CU_STREAM_LEGACY,
                                   NRM_CU_STREAM_CAPTURE_MODE_RELAXED),
           NRM_CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

int
main(int argc, char **argv)
{
    start(argc, argv);
    MUST(cu.cuStreamCreate(&stream, NRM_CU_STREAM_NON_BLOCKING));
    MUST(cu.cuStreamCreate(&other, NRM_CU_STREAM_NON_BLOCKING));
    MUST(cu.cuEventCreate(&event, NRM_CU_EVENT_DISABLE_TIMING));
    MUST(cu.cuMemAlloc(&on_device, MIB));
    objects_of_graphs(NRM_CU_STREAM_CAPTURE_MODE_GLOBAL, "global");
    objects_of_graphs(NRM_CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, "thread-local");
    objects_of_graphs(NRM_CU_STREAM_CAPTURE_MODE_RELAXED, "relaxed");
    object_of_a_pending_launch();
    numbers_of_captures();
    return finish();
}
