/* Work on the simulated driver: streams that are held, one operation at a time, in any
 * order that a seed gives; captures and the graphs that they make. */
#include "cudasim_machine.h"

/* ---- time ------------------------------------------------------------------------ */

TEST(a_held_stream_waits)
{
    REQUIRE(start());
    nrm_CUdeviceptr ptr;
    nrm_CUstream stream;
    void *host;
    unsigned char byte = 0;
    CHECK_EQ(cu.cuMemAlloc(&ptr, 64 * KIB), 0);
    CHECK_EQ(cu.cuMemHostAlloc(&host, 64 * KIB, 1), 0);
    CHECK_EQ(cu.cuStreamCreate(&stream, 1), 0);
    memset(host, 1, 64 * KIB);
    CHECK_EQ(sim.nrm_cudasim_hold_stream(stream), 0);
    CHECK_EQ(cu.cuMemcpyHtoDAsync(ptr, host, 64 * KIB, stream), 0);
    CHECK_EQ(cu.cuStreamQuery(stream), NRM_CUDA_ERROR_NOT_READY);
    CHECK_EQ(outstanding(NRM_CUDASIM_OPERATIONS), 1);
    memset(host, 2, 64 * KIB); /* reused too early: wrong bytes, as on a device */
    CHECK_EQ(sim.nrm_cudasim_release_stream(stream), 0);
    CHECK_EQ(cu.cuStreamSynchronize(stream), 0);
    CHECK_EQ(cu.cuMemcpyDtoH(&byte, ptr + 1000, 1), 0);
    CHECK_EQ(byte, 2);
}

TEST(in_manual_mode_work_runs_when_asked)
{
    REQUIRE(load());
    struct nrm_cudasim_config config = machine();
    config.manual = 1;
    REQUIRE(start_with(&config));
    nrm_CUdeviceptr ptr;
    nrm_CUstream a;
    nrm_CUstream b;
    nrm_CUevent event;
    CHECK_EQ(cu.cuMemAlloc(&ptr, 64), 0);
    CHECK_EQ(cu.cuStreamCreate(&a, 1), 0);
    CHECK_EQ(cu.cuStreamCreate(&b, 1), 0);
    CHECK_EQ(cu.cuEventCreate(&event, 2), 0);
    CHECK_EQ(cu.cuMemsetD8Async(ptr, 1, 1, a), 0);
    CHECK_EQ(cu.cuEventRecord(event, a), 0);
    CHECK_EQ(cu.cuStreamWaitEvent(b, event, 0), 0);
    CHECK_EQ(cu.cuMemsetD8Async(ptr, 2, 1, b), 0);
    CHECK_EQ(sim.nrm_cudasim_step(b), 0); /* waits for the event */
    CHECK_EQ(cu.cuEventQuery(event), NRM_CUDA_ERROR_NOT_READY);
    CHECK_EQ(sim.nrm_cudasim_step(a), 1);
    CHECK_EQ(cu.cuEventQuery(event), 0);
    CHECK_EQ(sim.nrm_cudasim_step(a), 0);
    CHECK_EQ(cu.cuStreamSynchronize(b), 0); /* who waits does the work himself */
    CHECK_EQ(outstanding(NRM_CUDASIM_OPERATIONS), 0);
}

TEST(ready_work_can_be_taken_in_any_order)
{
    REQUIRE(load());
    bool seen[2] = {false, false};
    for (uint64_t seed = 1; seed <= 20; seed++) {
        struct nrm_cudasim_config config = machine();
        config.manual = 1;
        config.seed = seed * 0x9e3779b97f4a7c15u;
        REQUIRE(start_with(&config));
        nrm_CUdeviceptr ptr;
        nrm_CUstream streams[2];
        unsigned char last = 0;
        CHECK_EQ(cu.cuMemAlloc(&ptr, 64), 0);
        for (unsigned char i = 0; i < 2; i++) {
            CHECK_EQ(cu.cuStreamCreate(&streams[i], 1), 0);
            CHECK_EQ(cu.cuMemsetD8Async(ptr, i, 1, streams[i]), 0);
        }
        CHECK_EQ(cu.cuCtxSynchronize(), 0);
        CHECK_EQ(cu.cuMemcpyDtoH(&last, ptr, 1), 0);
        seen[last] = true;
    }
    CHECK(seen[0] && seen[1]);
}

TEST(pageable_memory_is_read_in_place_where_the_device_can)
{
    REQUIRE(start());
    nrm_CUdeviceptr ptr;
    nrm_CUstream stream;
    unsigned char *host = pages(4096, 1);
    unsigned char byte = 0;
    CHECK_EQ(sim.nrm_cudasim_set_attribute(
                 0, NRM_CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, 1),
             0);
    CHECK_EQ(cu.cuMemAlloc(&ptr, 4096), 0);
    CHECK_EQ(cu.cuStreamCreate(&stream, 1), 0);
    CHECK_EQ(sim.nrm_cudasim_hold_stream(stream), 0);
    CHECK_EQ(cu.cuMemcpyHtoDAsync(ptr, host, 4096, stream), 0);
    memset(host, 2, 4096);
    CHECK_EQ(sim.nrm_cudasim_release_stream(stream), 0);
    CHECK_EQ(cu.cuStreamSynchronize(stream), 0);
    CHECK_EQ(cu.cuMemcpyDtoH(&byte, ptr, 1), 0);
    CHECK_EQ(byte, 2);
    munmap(host, 4096);
}

/* ---- captures that fork and join ------------------------------------------------- */

TEST(a_capture_spreads_over_events)
{
    REQUIRE(start());
    nrm_CUstream origin;
    nrm_CUstream fork_stream;
    nrm_CUevent event;
    nrm_CUdeviceptr ptr;
    nrm_CUgraph graph = NULL;
    unsigned int status = 0;
    CHECK_EQ(cu.cuMemAlloc(&ptr, 64), 0);
    CHECK_EQ(cu.cuStreamCreate(&origin, 1), 0);
    CHECK_EQ(cu.cuStreamCreate(&fork_stream, 1), 0);
    CHECK_EQ(cu.cuEventCreate(&event, 2), 0);
    CHECK_EQ(cu.cuStreamBeginCapture(origin, NRM_CU_STREAM_CAPTURE_MODE_RELAXED), 0);
    CHECK_EQ(cu.cuEventRecord(event, origin), 0);
    CHECK_EQ(cu.cuEventQuery(event), NRM_CUDA_ERROR_CAPTURED_EVENT);
    CHECK_EQ(cu.cuStreamWaitEvent(fork_stream, event, 0), 0);
    CHECK_EQ(cu.cuStreamIsCapturing(fork_stream, &status), 0);
    CHECK_EQ(status, NRM_CU_STREAM_CAPTURE_STATUS_ACTIVE);
    CHECK_EQ(cu.cuMemsetD8Async(ptr, 1, 64, fork_stream), 0);
    CHECK_EQ(cu.cuStreamEndCapture(fork_stream, &graph),
             NRM_CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    CHECK_EQ(cu.cuStreamEndCapture(origin, &graph),
             NRM_CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

    CHECK_EQ(cu.cuStreamBeginCapture(origin, NRM_CU_STREAM_CAPTURE_MODE_RELAXED), 0);
    CHECK_EQ(cu.cuEventRecord(event, origin), 0);
    CHECK_EQ(cu.cuStreamWaitEvent(fork_stream, event, 0), 0);
    CHECK_EQ(cu.cuMemsetD8Async(ptr, 1, 64, fork_stream), 0);
    CHECK_EQ(cu.cuStreamEndCapture(origin, &graph),
             NRM_CUDA_ERROR_STREAM_CAPTURE_UNJOINED);

    CHECK_EQ(cu.cuStreamBeginCapture(origin, NRM_CU_STREAM_CAPTURE_MODE_RELAXED), 0);
    CHECK_EQ(cu.cuEventRecord(event, origin), 0);
    CHECK_EQ(cu.cuStreamWaitEvent(fork_stream, event, 0), 0);
    CHECK_EQ(cu.cuMemsetD8Async(ptr, 1, 64, fork_stream), 0);
    CHECK_EQ(cu.cuEventRecord(event, fork_stream), 0);
    CHECK_EQ(cu.cuStreamWaitEvent(origin, event, 0), 0);
    CHECK_EQ(cu.cuStreamEndCapture(origin, &graph), 0);
    CHECK_EQ(cu.cuStreamIsCapturing(fork_stream, &status), 0);
    CHECK_EQ(status, NRM_CU_STREAM_CAPTURE_STATUS_NONE);
    CHECK_EQ(outstanding(NRM_CUDASIM_GRAPHS), 1);
    CHECK_EQ(cu.cuGraphDestroy(graph), 0);
}

TEST(a_capture_of_another_thread_counts_by_its_mode)
{
    REQUIRE(start());
    nrm_CUstream stream;
    nrm_CUgraph graph;
    nrm_CUevent event;
    unsigned int mode = NRM_CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    CHECK_EQ(cu.cuStreamCreate(&stream, 1), 0);
    CHECK_EQ(cu.cuEventCreate(&event, 2), 0);
    CHECK_EQ(cu.cuStreamBeginCapture(stream, NRM_CU_STREAM_CAPTURE_MODE_RELAXED), 0);
    CHECK_EQ(cu.cuEventQuery(event), 0); /* a relaxed capture bears it */
    CHECK_EQ(cu.cuStreamEndCapture(stream, &graph), 0);
    CHECK_EQ(cu.cuGraphDestroy(graph), 0);
    CHECK_EQ(cu.cuThreadExchangeStreamCaptureMode(&mode), 0);
    CHECK_EQ(mode, NRM_CU_STREAM_CAPTURE_MODE_GLOBAL);
    CHECK_EQ(cu.cuStreamBeginCapture(stream, NRM_CU_STREAM_CAPTURE_MODE_GLOBAL), 0);
    CHECK_EQ(cu.cuEventQuery(event), NRM_CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK_EQ(cu.cuStreamEndCapture(stream, &graph),
             NRM_CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    CHECK_EQ(cu.cuThreadExchangeStreamCaptureMode(&mode), 0);
}

/* ---- graphs ---------------------------------------------------------------------- */

static atomic_int n_gone;

static void
count_gone(void *data)
{
    int version;
    CHECK_EQ(cu.cuInit(0), NRM_CUDA_ERROR_NOT_PERMITTED); /* as in a host function */
    CHECK_EQ(cu.cuDriverGetVersion(&version), 0);
    atomic_fetch_add(&n_gone, *(int *)data);
}

/* A graph that fills 64 bytes with 1 and copies them on, and holds an object. */
static nrm_CUgraph
capture_copy(nrm_CUstream stream, nrm_CUdeviceptr from, nrm_CUdeviceptr to)
{
    static int one = 1;
    nrm_CUgraph graph = NULL, captured = NULL;
    nrm_CUuserObject object;
    unsigned int status;
    uint64_t id = 0;
    atomic_store(&n_gone, 0);
    CHECK_EQ(cu.cuStreamBeginCapture(stream, NRM_CU_STREAM_CAPTURE_MODE_GLOBAL), 0);
    CHECK_EQ(cu.cuStreamGetCaptureInfo(stream, &status, &id, &captured, NULL, NULL,
                                       NULL),
             0);
    CHECK_EQ(status, NRM_CU_STREAM_CAPTURE_STATUS_ACTIVE);
    CHECK_NE(id, 0);
    CHECK_EQ(cu.cuUserObjectCreate(&object, &one, count_gone, 1,
                                   NRM_CU_USER_OBJECT_NO_DESTRUCTOR_SYNC),
             0);
    CHECK_EQ(cu.cuGraphRetainUserObject(captured, object, 1,
                                        NRM_CU_GRAPH_USER_OBJECT_MOVE),
             0);
    CHECK_EQ(cu.cuMemsetD8Async(from, 1, 64, stream), 0);
    CHECK_EQ(cu.cuMemcpyAsync(to, from, 64, stream), 0);
    CHECK_EQ(cu.cuStreamEndCapture(stream, &graph), 0);
    CHECK(graph == captured);
    return graph;
}

TEST(a_graph_runs_when_it_is_launched_and_each_time_anew)
{
    REQUIRE(start());
    nrm_CUstream stream;
    nrm_CUdeviceptr ptr;
    nrm_CUgraphExec exec;
    unsigned char bytes[128];
    CHECK_EQ(cu.cuMemAlloc(&ptr, 128), 0);
    CHECK_EQ(cu.cuStreamCreate(&stream, 1), 0);
    CHECK_EQ(cu.cuMemsetD8(ptr, 5, 128), 0);
    nrm_CUgraph graph = capture_copy(stream, ptr, ptr + 64);
    CHECK_EQ(cu.cuGraphInstantiateWithFlags(&exec, graph, 0), 0);
    CHECK_EQ(cu.cuGraphDestroy(graph), 0);
    CHECK_EQ(cu.cuMemcpyDtoH(bytes, ptr, 128), 0);
    CHECK_EQ(bytes[0], 5); /* nothing has run yet */
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(cu.cuMemsetD8(ptr, 5, 128), 0);
        CHECK_EQ(cu.cuGraphLaunch(exec, stream), 0);
        CHECK_EQ(cu.cuStreamSynchronize(stream), 0);
        CHECK_EQ(cu.cuMemcpyDtoH(bytes, ptr, 128), 0);
        CHECK_EQ(bytes[0], 1);
        CHECK_EQ(bytes[127], 1);
    }
    CHECK_EQ(cu.cuMemFree(ptr), 0);
    CHECK_EQ(cu.cuGraphLaunch(exec, stream), NRM_CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(sim.nrm_cudasim_fault_count(), 1); /* its memory is gone */
    CHECK_EQ(cu.cuGraphExecDestroy(exec), 0);
    CHECK_EQ(cu.cuGraphExecDestroy(exec), NRM_CUDA_ERROR_INVALID_VALUE);
}

TEST(an_object_goes_with_the_last_that_can_run)
{
    REQUIRE(start());
    nrm_CUstream stream;
    nrm_CUdeviceptr ptr;
    nrm_CUgraphExec exec;
    CHECK_EQ(cu.cuMemAlloc(&ptr, 128), 0);
    CHECK_EQ(cu.cuStreamCreate(&stream, 1), 0);
    nrm_CUgraph graph = capture_copy(stream, ptr, ptr + 64);
    CHECK_EQ(cu.cuGraphInstantiateWithFlags(&exec, graph, 0), 0);
    CHECK_EQ(cu.cuGraphDestroy(graph), 0);
    CHECK_EQ(atomic_load(&n_gone), 0);
    CHECK_EQ(sim.nrm_cudasim_hold_stream(stream), 0);
    CHECK_EQ(cu.cuGraphLaunch(exec, stream), 0);
    CHECK_EQ(cu.cuGraphExecDestroy(exec), 0);
    CHECK_EQ(atomic_load(&n_gone), 0); /* a launch is pending */
    CHECK_EQ(sim.nrm_cudasim_release_stream(stream), 0);
    CHECK_EQ(cu.cuStreamSynchronize(stream), 0);
    for (int i = 0; i < 1000 && atomic_load(&n_gone) == 0; i++) {
        usleep(1000);
    }
    CHECK_EQ(atomic_load(&n_gone), 1);
    CHECK_EQ(cu.cuGraphDestroy(capture_copy(stream, ptr, ptr + 64)), 0);
    CHECK_EQ(atomic_load(&n_gone), 1);
}

TEST(an_object_goes_with_a_capture_that_fails)
{
    REQUIRE(start());
    static int one = 1;
    nrm_CUstream stream;
    nrm_CUevent event;
    nrm_CUgraph graph = NULL;
    nrm_CUuserObject object;
    unsigned int status;
    uint64_t id = 12345;
    atomic_store(&n_gone, 0);
    CHECK_EQ(cu.cuStreamCreate(&stream, 1), 0);
    CHECK_EQ(cu.cuEventCreate(&event, 2), 0);
    CHECK_EQ(cu.cuStreamBeginCapture(stream, NRM_CU_STREAM_CAPTURE_MODE_RELAXED), 0);
    CHECK_EQ(cu.cuStreamGetCaptureInfo(stream, &status, NULL, &graph, NULL, NULL, NULL),
             0);
    CHECK_EQ(cu.cuUserObjectCreate(&object, &one, count_gone, 2,
                                   NRM_CU_USER_OBJECT_NO_DESTRUCTOR_SYNC),
             0);
    CHECK_EQ(cu.cuGraphRetainUserObject(graph, object, 1, 0), 0);
    CHECK_EQ(cu.cuUserObjectRelease(object, 2), 0);
    CHECK_EQ(cu.cuCtxRecordEvent(context, event),
             NRM_CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK_EQ(cu.cuStreamGetCaptureInfo(stream, &status, &id, NULL, NULL, NULL, NULL),
             0);
    CHECK_EQ(status, NRM_CU_STREAM_CAPTURE_STATUS_INVALIDATED);
    CHECK_EQ(id, 12345); /* it is not told */
    CHECK_EQ(atomic_load(&n_gone), 0);
    CHECK_EQ(cu.cuStreamEndCapture(stream, &graph),
             NRM_CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    CHECK_EQ(atomic_load(&n_gone), 1);
}

CHECK_MAIN
