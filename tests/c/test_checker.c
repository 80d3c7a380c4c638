/* The checker of the simulated driver: small programs, as other libraries would write
   them, and whether what they do with memory is in order. Nothing here depends on what
   the GPU does first. */
#include "checked_machine.h"

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

/* ---- boxes and batches ---- */

static void
planes_between_those_that_are_copied(void)
{
    nrm_CUDA_MEMCPY3D copy = {.srcMemoryType = NRM_CU_MEMORYTYPE_HOST,
                              .srcHost = machine.pinned,
                              .srcPitch = 64,
                              .srcHeight = 8,
                              .dstMemoryType = NRM_CU_MEMORYTYPE_DEVICE,
                              .dstDevice = machine.device,
                              .dstPitch = 32,
                              .dstHeight = 4,
                              .WidthInBytes = 32,
                              .Height = 4,
                              .Depth = N / 512};
    CHECK_EQ(cuda.cuMemcpy3DAsync(&copy, machine.a), NRM_CUDA_SUCCESS);
    CHECK_EQ(sim.host_access((char *)machine.pinned + 64 * 4, 64 * 4, 1), 0);
    CHECK_EQ(sim.host_access((char *)machine.pinned + 32, 32, 1), 0);
}

static void
a_plane_that_is_copied(void)
{
    planes_between_those_that_are_copied();
    CHECK_EQ(sim.host_access((char *)machine.pinned + 64 * 8, 1, 1), 0);
}

/* Two pieces of the pinned memory to both places of the device. */
static void
batch(unsigned int order, size_t second_src, nrm_CUdeviceptr second_dst)
{
    nrm_CUdeviceptr start = (nrm_CUdeviceptr)(uintptr_t)machine.pinned;
    nrm_CUdeviceptr dsts[] = {machine.device, second_dst};
    nrm_CUdeviceptr srcs[] = {start, start + second_src};
    size_t sizes[] = {N / 4, N / 4}, first = 0, failed;
    nrm_CUmemcpyAttributes attributes = {.srcAccessOrder = order};
    CHECK_EQ(cuda.cuMemcpyBatchAsync(dsts, srcs, sizes, 2, &attributes, &first, 1,
                                     &failed, machine.a),
             NRM_CUDA_SUCCESS);
}

static void
pieces_between_those_of_a_batch(void)
{
    batch(NRM_CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, N / 2, machine.other);
    CHECK_EQ(sim.host_access((char *)machine.pinned + N / 4, N / 4, 1), 0);
}

static void
a_piece_of_a_batch(void)
{
    pieces_between_those_of_a_batch();
    CHECK_EQ(sim.host_access((char *)machine.pinned + N / 2, 1, 1), 0);
}

static void
a_batch_that_reads_in_its_call(void)
{
    batch(NRM_CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL, N / 2, machine.other);
    CHECK_EQ(sim.host_access(machine.pinned, N, 1), 0);
}

static void
a_batch_that_reads_before_the_stream_has_written(void)
{
    to_host(machine.a, machine.device);
    batch(NRM_CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL, N / 2, machine.other);
}

static void
a_batch_that_reads_what_the_stream_has_written(void)
{
    to_host(machine.a, machine.device);
    batch(NRM_CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, N / 2, machine.other);
}

static void
a_batch_that_reads_one_place_twice(void)
{
    batch(NRM_CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, N / 8, machine.other);
}

static void
a_batch_that_writes_one_place_twice(void)
{
    batch(NRM_CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, N / 2, machine.device + N / 8);
}

static void
a_batch_that_reads_what_it_writes(void)
{
    batch(NRM_CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, N / 2,
          (nrm_CUdeviceptr)(uintptr_t)machine.pinned);
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

/* ---- all of them ---- */

static const struct checked_program programs[] = {
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
    RIGHT(planes_between_those_that_are_copied),
    WRONG(a_plane_that_is_copied),
    RIGHT(pieces_between_those_of_a_batch),
    WRONG(a_piece_of_a_batch),
    RIGHT(a_batch_that_reads_in_its_call),
    {"a_batch_that_reads_before_the_stream_has_written, by each of its copies",
     a_batch_that_reads_before_the_stream_has_written, 2},
    RIGHT(a_batch_that_reads_what_the_stream_has_written),
    RIGHT(a_batch_that_reads_one_place_twice),
    WRONG(a_batch_that_writes_one_place_twice),
    WRONG(a_batch_that_reads_what_it_writes),
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
};

TEST_EACH(a_program_is_judged, programs)
{
    judge(row);
}

TEST_EACH(a_program_is_judged_alike_when_the_gpu_is_fast, programs)
{
    judge_when_the_gpu_is_fast(row);
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
