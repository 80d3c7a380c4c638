/* The checker of the simulated driver: small programs, as other libraries would write them,
   and whether what they do with memory is in order. Nothing here depends on what the GPU
   does first. */
#include <string.h>

#include "streams.h"

#define N ((size_t)4096)

/* ---- the machine ---- */

/* Two streams that nothing orders but a program, and memory of each kind. */
static struct {
    nrm_CUstream a, b, blocking;
    nrm_CUdeviceptr device, other;
    void *pinned;
    nrm_CUevent event;
} machine;

static void
start(int n_devices)
{
    struct nrm_cudasim_config config = simulator_checked();
    config.devices = n_devices;
    simulator_start(&config);
    CHECK_EQ(cuda.cuInit(0), NRM_CUDA_SUCCESS);
    make_current(0);
    machine.a = new_handle();
    machine.b = new_handle();
    CHECK_EQ(cuda.cuStreamCreate(&machine.blocking, NRM_CU_STREAM_DEFAULT), 0);
    CHECK_EQ(cuda.cuMemAlloc(&machine.device, N), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemAlloc(&machine.other, N), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemHostAlloc(&machine.pinned, N, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuEventCreate(&machine.event, NRM_CU_EVENT_DISABLE_TIMING), 0);
}

/* The bytes come out right or wrong, but no call of the driver fails. */
static void
to_device(nrm_CUstream stream, nrm_CUdeviceptr device)
{
    CHECK_EQ(cuda.cuMemcpyHtoDAsync(device, machine.pinned, N, stream), 0);
}

static void
to_host(nrm_CUstream stream, nrm_CUdeviceptr device)
{
    CHECK_EQ(cuda.cuMemcpyDtoHAsync(machine.pinned, device, N, stream), 0);
}

static void
fill(nrm_CUstream stream, nrm_CUdeviceptr device)
{
    CHECK_EQ(cuda.cuMemsetD8Async(device, 1, N, stream), NRM_CUDA_SUCCESS);
}

static void
record(nrm_CUstream stream)
{
    CHECK_EQ(cuda.cuEventRecord(machine.event, stream), NRM_CUDA_SUCCESS);
}

static void
wait_on(nrm_CUstream stream)
{
    CHECK_EQ(cuda.cuStreamWaitEvent(stream, machine.event, 0), NRM_CUDA_SUCCESS);
}

static void
host_writes(void)
{
    CHECK_EQ(sim.host_access(machine.pinned, N, 1), 0);
}

static void
host_reads(void)
{
    CHECK_EQ(sim.host_access(machine.pinned, N, 0), 0);
}

static void
take(nrm_CUdeviceptr ptr, nrm_CUstream stream)
{
    sim.block_taken((uintptr_t)ptr, N, 0, (uintptr_t)stream);
}

static void
take_for_host(void)
{
    sim.block_taken((uintptr_t)machine.pinned, N, -1, NRM_CUDA_WATCH_NO_STREAM);
}

static void
give(nrm_CUdeviceptr ptr)
{
    sim.block_given((uintptr_t)ptr, N);
}

/* ---- the host and a stream ---- */

static void
write_during_a_copy_to_the_device(void)
{
    to_device(machine.a, machine.device);
    host_writes();
}

static void
read_during_a_copy_to_the_device(void)
{
    to_device(machine.a, machine.device);
    host_reads();
}

static void
write_during_a_copy_to_the_host(void)
{
    to_host(machine.a, machine.device);
    host_writes();
}

static void
read_during_a_copy_to_the_host(void)
{
    to_host(machine.a, machine.device);
    host_reads();
}

static void
write_before_the_copy(void)
{
    host_writes();
    to_device(machine.a, machine.device);
}

static void
synchronise_the_stream(void)
{
    to_host(machine.a, machine.device);
    CHECK_EQ(cuda.cuStreamSynchronize(machine.a), NRM_CUDA_SUCCESS);
    host_writes();
}

static void
synchronise_another_stream(void)
{
    to_host(machine.a, machine.device);
    CHECK_EQ(cuda.cuStreamSynchronize(machine.b), NRM_CUDA_SUCCESS);
    host_writes();
}

static void
synchronise_the_context(void)
{
    to_host(machine.a, machine.device);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    host_writes();
}

static void
synchronise_an_event(void)
{
    to_host(machine.a, machine.device);
    record(machine.a);
    CHECK_EQ(cuda.cuEventSynchronize(machine.event), NRM_CUDA_SUCCESS);
    host_writes();
}

static void
synchronise_an_event_from_before(void)
{
    record(machine.a);
    to_host(machine.a, machine.device);
    CHECK_EQ(cuda.cuEventSynchronize(machine.event), NRM_CUDA_SUCCESS);
    host_writes();
}

static void
synchronise_an_event_that_was_never_recorded(void)
{
    to_host(machine.a, machine.device);
    CHECK_EQ(cuda.cuEventSynchronize(machine.event), NRM_CUDA_SUCCESS);
    host_writes();
}

static void
ask_until_an_event_is_done(void)
{
    to_host(machine.a, machine.device);
    record(machine.a);
    while (cuda.cuEventQuery(machine.event) == NRM_CUDA_ERROR_NOT_READY)
        ;
    host_writes();
}

static void
ask_until_a_stream_is_idle(void)
{
    to_host(machine.a, machine.device);
    while (cuda.cuStreamQuery(machine.a) == NRM_CUDA_ERROR_NOT_READY)
        ;
    host_writes();
}

static void
copy_in_the_call(void)
{
    CHECK_EQ(cuda.cuMemcpyDtoH(machine.pinned, machine.device, N), NRM_CUDA_SUCCESS);
    host_writes();
}

static void
record_the_context(void)
{
    nrm_CUcontext context;
    to_host(machine.a, machine.device);
    CHECK_EQ(cuda.cuStreamDestroy(machine.a), NRM_CUDA_SUCCESS);
    let_run();
    CHECK_EQ(cuda.cuCtxGetCurrent(&context), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuCtxRecordEvent(context, machine.event), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuEventSynchronize(machine.event), NRM_CUDA_SUCCESS);
    host_writes();
}

static void
destroy_the_stream(void)
{
    to_host(machine.a, machine.device);
    CHECK_EQ(cuda.cuStreamDestroy(machine.a), NRM_CUDA_SUCCESS);
    let_run(); /* it is done by now, but nobody has asked */
    host_writes();
}

static void
pageable_memory_is_staged(void)
{
    static char bytes[N];
    CHECK_EQ(cuda.cuMemcpyHtoDAsync(machine.device, bytes, N, machine.a), 0);
    CHECK_EQ(sim.host_access(bytes, N, 1), 0);
}

static void
pageable_memory_is_read_in_place(void)
{
    static char bytes[N];
    sim.set_attribute(0, NRM_CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, 1);
    CHECK_EQ(cuda.cuMemcpyHtoDAsync(machine.device, bytes, N, machine.a), 0);
    CHECK_EQ(sim.host_access(bytes, N, 1), 0);
}

static void
other_bytes(void)
{
    CHECK_EQ(cuda.cuMemcpyHtoDAsync(machine.device, machine.pinned, N / 2, machine.a),
             0);
    CHECK_EQ(sim.host_access((char *)machine.pinned + N / 2, N / 2, 1), 0);
}

static void
columns_between_those_that_are_copied(void)
{
    nrm_CUDA_MEMCPY2D copy = {.srcMemoryType = NRM_CU_MEMORYTYPE_HOST,
                              .srcHost = machine.pinned,
                              .srcPitch = 64,
                              .dstMemoryType = NRM_CU_MEMORYTYPE_DEVICE,
                              .dstDevice = machine.device,
                              .dstPitch = 32,
                              .WidthInBytes = 32,
                              .Height = N / 64};
    CHECK_EQ(cuda.cuMemcpy2DAsync(&copy, machine.a), NRM_CUDA_SUCCESS);
    CHECK_EQ(sim.host_access((char *)machine.pinned + 96, 32, 1), 0);
}

static void
a_column_that_is_copied(void)
{
    columns_between_those_that_are_copied();
    CHECK_EQ(sim.host_access((char *)machine.pinned + 128, 1, 1), 0);
}

/* ---- two streams ---- */

static void
two_streams_write(void)
{
    fill(machine.a, machine.device);
    fill(machine.b, machine.device);
}

static void
two_streams_read(void)
{
    to_device(machine.a, machine.device);
    to_device(machine.b, machine.other);
}

static void
the_other_stream_waits(void)
{
    fill(machine.a, machine.device);
    record(machine.a);
    wait_on(machine.b);
    fill(machine.b, machine.device);
}

static void
the_other_stream_waits_for_what_is_done(void)
{
    fill(machine.a, machine.device);
    record(machine.a);
    let_run();
    wait_on(machine.b);
    fill(machine.b, machine.device);
}

static void
the_other_stream_waits_too_early(void)
{
    record(machine.a);
    wait_on(machine.b);
    fill(machine.a, machine.device);
    fill(machine.b, machine.device);
}

static void
the_event_is_recorded_again(void)
{
    fill(machine.a, machine.device);
    record(machine.a);
    wait_on(machine.b);
    record(machine.b); /* what b waits for stays what it was */
    fill(machine.b, machine.device);
}

static void
the_host_synchronises_between(void)
{
    fill(machine.a, machine.device);
    CHECK_EQ(cuda.cuStreamSynchronize(machine.a), NRM_CUDA_SUCCESS);
    fill(machine.b, machine.device);
}

static void
a_blocking_stream_and_the_legacy_one(void)
{
    fill(machine.blocking, machine.device);
    fill(NULL, machine.device);
    fill(machine.blocking, machine.device);
}

static void
a_non_blocking_stream_and_the_legacy_one(void)
{
    fill(NULL, machine.device);
    fill(machine.a, machine.device);
}

static void
two_blocking_streams_through_the_legacy_one(void)
{
    nrm_CUstream second;
    CHECK_EQ(cuda.cuStreamCreate(&second, NRM_CU_STREAM_DEFAULT), NRM_CUDA_SUCCESS);
    fill(machine.blocking, machine.device);
    fill(NULL, machine.other);
    fill(second, machine.device);
}

static void
a_blocking_and_the_per_thread_stream(void)
{
    fill(machine.blocking, machine.device);
    fill(NRM_CU_STREAM_PER_THREAD, machine.device);
}

static void
a_stream_of_another_context(void)
{
    to_host(machine.a, machine.device);
    make_current(1);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    host_writes();
}

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

static const struct program {
    const char *name;
    void (*run)(void);
    uint64_t n_races;
} programs[] = {
#define RIGHT(name) {#name, name, 0}
#define WRONG(name) {#name, name, 1}
    WRONG(write_during_a_copy_to_the_device),
    RIGHT(read_during_a_copy_to_the_device),
    WRONG(write_during_a_copy_to_the_host),
    WRONG(read_during_a_copy_to_the_host),
    RIGHT(write_before_the_copy),
    RIGHT(synchronise_the_stream),
    WRONG(synchronise_another_stream),
    RIGHT(synchronise_the_context),
    RIGHT(synchronise_an_event),
    WRONG(synchronise_an_event_from_before),
    WRONG(synchronise_an_event_that_was_never_recorded),
    RIGHT(ask_until_an_event_is_done),
    RIGHT(ask_until_a_stream_is_idle),
    RIGHT(copy_in_the_call),
    RIGHT(record_the_context),
    WRONG(destroy_the_stream),
    RIGHT(pageable_memory_is_staged),
    WRONG(pageable_memory_is_read_in_place),
    RIGHT(other_bytes),
    RIGHT(columns_between_those_that_are_copied),
    WRONG(a_column_that_is_copied),
    WRONG(two_streams_write),
    RIGHT(two_streams_read),
    RIGHT(the_other_stream_waits),
    RIGHT(the_other_stream_waits_for_what_is_done),
    WRONG(the_other_stream_waits_too_early),
    RIGHT(the_event_is_recorded_again),
    RIGHT(the_host_synchronises_between),
    RIGHT(a_blocking_stream_and_the_legacy_one),
    WRONG(a_non_blocking_stream_and_the_legacy_one),
    RIGHT(two_blocking_streams_through_the_legacy_one),
    WRONG(a_blocking_and_the_per_thread_stream),
    WRONG(a_stream_of_another_context),
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
    start(2);
    row->run();
    if (!CHECK_EQ(sim.race_count(), row->n_races)) {
        simulator_tell_races();
    }
    simulator_check_faults();
}

/* The order in which the GPU happens to work does not matter. */
TEST_EACH(a_program_is_judged_alike_when_the_gpu_is_fast, programs)
{
    start(2);
    CHECK_EQ(cuda.cuMemcpyHtoD(machine.device, machine.pinned, N), NRM_CUDA_SUCCESS);
    row->run();
    let_run();
    CHECK_EQ(sim.race_count(), row->n_races);
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

TEST(nothing_is_looked_for_unless_it_is_asked_for)
{
    struct nrm_cudasim_config config = simulator_config();
    nrm_cuGetProcAddress_fn *get = cuda.cuGetProcAddress;
    nrm_CUdriverProcAddressQueryResult found;
    void *function;
    CHECK_EQ(config.check, NRM_CUDASIM_CHECK_OFF);
    simulator_start(&config);
    CHECK_OK(nrm__cuda_init(NULL));
    CHECK(nrm__cuda_watcher == NULL);
    CHECK_EQ(sim.host_access(&config, 1, 1), NRM_CUDA_ERROR_NOT_SUPPORTED);
    CHECK_EQ(get("nrm_cudasim_block_taken", &function, NRM_CUDA_WATCH_VERSION, 0,
                 &found),
             NRM_CUDA_SUCCESS);
    CHECK_EQ(found, NRM_CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
}

TEST(the_core_tells_a_checker)
{
    struct nrm_cudasim_config config = simulator_checked();
    simulator_start(&config);
    CHECK_OK(nrm__cuda_init(NULL));
    CHECK(nrm__cuda_watcher != NULL);
    CHECK_OK(nrm__cuda_set_library(NULL));
    CHECK(nrm__cuda_watcher == NULL);
}

CHECK_MAIN
