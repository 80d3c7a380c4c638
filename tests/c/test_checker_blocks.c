/* The checker of the simulated driver, further: host functions, kernels, blocks of an
   allocator, graphs, and memory that goes. */
#include "checked_machine.h"

/* ---- host functions ---- */

static void
read_in_host_function(void *unused)
{
    (void)unused;
    host_reads();
}

static void
write_in_host_function(void *unused)
{
    (void)unused;
    host_writes();
}

static void
a_host_function_before_a_copy(void)
{
    CHECK_EQ(cuda.cuLaunchHostFunc(machine.a, write_in_host_function, NULL), 0);
    to_device(machine.a, machine.device); /* looked at before the function has run */
    CHECK_EQ(cuda.cuStreamSynchronize(machine.a), NRM_CUDA_SUCCESS);
    host_reads();
}

static void
a_host_function_and_another_stream(void)
{
    CHECK_EQ(sim.hold_stream(machine.a), 0);
    CHECK_EQ(cuda.cuLaunchHostFunc(machine.a, write_in_host_function, NULL), 0);
    to_device(machine.b, machine.device);
    CHECK_EQ(sim.release_stream(machine.a), 0);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
}

static void
a_host_function_and_the_host(void)
{
    CHECK_EQ(sim.hold_stream(machine.a), 0);
    CHECK_EQ(cuda.cuLaunchHostFunc(machine.a, read_in_host_function, NULL), 0);
    host_writes();
    CHECK_EQ(sim.release_stream(machine.a), 0);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
}

/* ---- kernels ---- */

static void
launch(nrm_CUstream stream, const void *reads, nrm_CUdeviceptr writes)
{
    struct nrm_cudasim_area areas[] = {{(uintptr_t)reads, N, 0}, {writes, N, 1}};
    CHECK_EQ(sim.launch(stream, areas, 2), 0);
}

static void
a_kernel_after_another(void)
{
    launch(machine.a, machine.pinned, machine.device);
    launch(machine.a, (const void *)machine.device, machine.other);
}

static void
kernels_that_read_the_same(void)
{
    launch(machine.a, machine.pinned, machine.device);
    launch(machine.b, machine.pinned, machine.other);
}

static void
a_kernel_reads_what_another_writes(void)
{
    launch(machine.a, machine.pinned, machine.device);
    launch(machine.b, (const void *)machine.device, machine.other);
}

static void
the_host_writes_what_a_kernel_reads(void)
{
    launch(machine.a, machine.pinned, machine.device);
    host_writes();
}

static void
memory_of_a_kernel_is_freed(void)
{
    launch(machine.a, machine.pinned, machine.device);
    CHECK_EQ(cuda.cuMemFree(machine.device), NRM_CUDA_SUCCESS); /* and waits */
    host_writes();
}

static void
a_kernel_of_a_graph(void)
{
    nrm_CUgraph graph;
    nrm_CUgraphExec exec = NULL;
    CHECK_EQ(cuda.cuStreamBeginCapture(machine.a, NRM_CU_STREAM_CAPTURE_MODE_GLOBAL),
             0);
    launch(machine.a, machine.pinned, machine.device);
    CHECK_EQ(cuda.cuStreamEndCapture(machine.a, &graph), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuGraphInstantiateWithFlags(&exec, graph, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuGraphLaunch(exec, machine.b), NRM_CUDA_SUCCESS);
    host_writes();
}

/* ---- blocks ---- */

static void
a_block_is_handed_out_during_a_copy(void)
{
    take_for_host();
    to_device(machine.a, machine.device);
    give((uintptr_t)machine.pinned);
    take_for_host();
}

static void
a_block_is_handed_out_after_the_copy(void)
{
    take_for_host();
    to_device(machine.a, machine.device);
    give((uintptr_t)machine.pinned);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    take_for_host();
}

static void
a_copy_of_a_block_that_was_given_back(void)
{
    take_for_host();
    give((uintptr_t)machine.pinned);
    to_device(machine.a, machine.device);
}

static void
the_same_stream_has_a_block_again(void)
{
    take(machine.device, machine.a);
    fill(machine.a, machine.device);
    give(machine.device);
    take(machine.device, machine.a);
    fill(machine.a, machine.device);
}

static void
another_stream_has_a_block(void)
{
    take(machine.device, machine.a);
    fill(machine.a, machine.device);
    give(machine.device);
    take(machine.device, machine.b);
}

static void
another_stream_has_a_block_after_a_wait(void)
{
    take(machine.device, machine.a);
    fill(machine.a, machine.device);
    give(machine.device);
    record(machine.a);
    wait_on(machine.b);
    take(machine.device, machine.b);
    fill(machine.b, machine.device);
}

static void
the_host_has_a_block_of_a_stream(void)
{
    take(machine.device, machine.a);
    fill(machine.a, machine.device);
    give(machine.device);
    take(machine.device, (nrm_CUstream)NRM_CUDA_WATCH_NO_STREAM);
}

/* ---- graphs ---- */

static nrm_CUgraphExec
captured_copy(void)
{
    nrm_CUgraph graph;
    nrm_CUgraphExec exec = NULL;
    CHECK_EQ(cuda.cuStreamBeginCapture(machine.a, NRM_CU_STREAM_CAPTURE_MODE_GLOBAL),
             0);
    to_device(machine.a, machine.device);
    CHECK_EQ(cuda.cuStreamEndCapture(machine.a, &graph), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuGraphInstantiateWithFlags(&exec, graph, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    return exec;
}

static void
a_capture_runs_nothing(void)
{
    nrm_CUgraphExec exec = captured_copy();
    host_writes();
    CHECK_EQ(cuda.cuGraphExecDestroy(exec), NRM_CUDA_SUCCESS);
}

static void
a_graph_is_launched(void)
{
    nrm_CUgraphExec exec = captured_copy();
    CHECK_EQ(cuda.cuGraphLaunch(exec, machine.b), NRM_CUDA_SUCCESS);
    host_writes();
}

static void
a_graph_uses_what_was_given_back(void)
{
    take_for_host();
    nrm_CUgraphExec exec = captured_copy();
    give((uintptr_t)machine.pinned); /* the graph may keep it */
    CHECK_EQ(cuda.cuGraphLaunch(exec, machine.b), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
}

static void
a_graph_uses_what_somebody_else_has(void)
{
    take_for_host();
    nrm_CUgraphExec exec = captured_copy();
    give((uintptr_t)machine.pinned);
    take_for_host();
    CHECK_EQ(cuda.cuGraphLaunch(exec, machine.b), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
}

/* ---- the end of memory and contexts ---- */

static void
memory_is_freed_and_comes_again(void)
{
    fill(machine.a, machine.device);
    CHECK_EQ(cuda.cuMemFree(machine.device), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemAlloc(&machine.device, N), NRM_CUDA_SUCCESS);
    fill(machine.b, machine.device);
}

static void
the_context_ends(void)
{
    static char bytes[N];
    CHECK_EQ(cuda.cuMemHostRegister(bytes, N, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemcpyHtoDAsync(machine.device, bytes, N, machine.a), 0);
    CHECK_EQ(cuda.cuDevicePrimaryCtxReset(0), NRM_CUDA_SUCCESS);
    CHECK_EQ(sim.host_access(bytes, N, 1), 0);
}

/* ---- all of them ---- */

static const struct checked_program programs[] = {
    RIGHT(a_host_function_before_a_copy),
    WRONG(a_host_function_and_another_stream),
    WRONG(a_host_function_and_the_host),
    RIGHT(a_kernel_after_another),
    RIGHT(kernels_that_read_the_same),
    WRONG(a_kernel_reads_what_another_writes),
    WRONG(the_host_writes_what_a_kernel_reads),
    RIGHT(memory_of_a_kernel_is_freed),
    WRONG(a_kernel_of_a_graph),
    WRONG(a_block_is_handed_out_during_a_copy),
    RIGHT(a_block_is_handed_out_after_the_copy),
    WRONG(a_copy_of_a_block_that_was_given_back),
    RIGHT(the_same_stream_has_a_block_again),
    WRONG(another_stream_has_a_block),
    RIGHT(another_stream_has_a_block_after_a_wait),
    WRONG(the_host_has_a_block_of_a_stream),
    RIGHT(a_capture_runs_nothing),
    WRONG(a_graph_is_launched),
    RIGHT(a_graph_uses_what_was_given_back),
    WRONG(a_graph_uses_what_somebody_else_has),
    RIGHT(memory_is_freed_and_comes_again),
    RIGHT(the_context_ends),
};

TEST_EACH(a_program_is_judged, programs)
{
    judge(row);
}

TEST_EACH(a_program_is_judged_alike_when_the_gpu_is_fast, programs)
{
    judge_when_the_gpu_is_fast(row);
}

TEST(a_report_names_both_sides)
{
    char text[NRM_CUDASIM_RACE_NBYTES];
    char expected[80];
    start(1);
    a_block_is_handed_out_during_a_copy();
    REQUIRE_EQ(sim.race_text(0, text, sizeof text), 0);
    CHECK_STR_HAS(text, "cuMemcpyHtoDAsync on stream");
    snprintf(expected, sizeof expected, "reads 4096 B at 0x%zx",
             (size_t)machine.pinned);
    CHECK_STR_HAS(text, expected);
    CHECK_STR_HAS(text, "4096 B in common");
    snprintf(expected, sizeof expected, "handed out to thread %d", (int)getpid());
    CHECK_STR_HAS(text, expected);
    CHECK_STR_HAS(text, "given back: #");
    CHECK_NE(sim.race_text(1, text, sizeof text), 0);
}

TEST(a_kernel_must_touch_memory_that_the_driver_knows)
{
    char bytes[16];
    start(1);
    struct nrm_cudasim_area area = {(uintptr_t)bytes, sizeof bytes, 0};
    CHECK_EQ(sim.launch(machine.a, &area, 1), NRM_CUDA_ERROR_INVALID_VALUE);
    area = (struct nrm_cudasim_area){machine.device, N + 1, 0};
    CHECK_EQ(sim.launch(machine.a, &area, 1), NRM_CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(sim.launch(machine.a, NULL, 0), 0);
}

CHECK_MAIN
