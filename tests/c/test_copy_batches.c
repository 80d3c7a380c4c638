/* Copies in many pieces: when they go to the driver as batches, what that orders, and
   what becomes of batches that are refused or fail. The pieces are rows in reverse. */
#include <string.h>

#include "base/error.h"
#include "core/transfer.h"
#include "fixtures.h"
#include "streams.h"

enum { PIECE = 64, N_MOST = 600, PAGE = 4096 };

static unsigned char host[N_MOST * PIECE] __attribute__((aligned(PAGE)));
static unsigned char seen[N_MOST * PIECE];
static nrm_CUdeviceptr first, second; /* as large */

static void
begin_with(const struct nrm_cudasim_config *config)
{
    simulator_start(config);
    CHECK_OK(nrm__cuda_init(NULL));
    make_current(0);
    CHECK_EQ(cuda.cuMemAlloc(&first, sizeof host), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemAlloc(&second, sizeof host), NRM_CUDA_SUCCESS);
    for (size_t i = 0; i < sizeof host; i++) {
        host[i] = (unsigned char)(i / PIECE);
    }
    CHECK_EQ(cuda.cuMemcpyHtoD(first, host, sizeof host), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemsetD8(second, 255, sizeof host), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
}

static void
begin(void)
{
    struct nrm_cudasim_config config = simulator_checked();
    begin_with(&config);
}

static void
end(void)
{
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemFree(first), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemFree(second), NRM_CUDA_SUCCESS);
    CHECK_EQ(simulator_count(NRM_CUDASIM_EVENTS), 0u);
    CHECK_EQ(simulator_tell_races(), 0u);
    simulator_check_faults();
}

/* The rows of the source, the last one first. */
static struct nrm__transfer
reversed(enum nrm__direction direction, const void *src, nrm_CUdeviceptr dst, size_t n)
{
    return (struct nrm__transfer){.dst = (char *)(uintptr_t)dst,
                                  .src = (const char *)src + (n - 1) * PIECE,
                                  .direction = direction,
                                  .itemsize = PIECE,
                                  .n_dims = 1,
                                  .shape = {n},
                                  .dst_strides = {PIECE},
                                  .src_strides = {-PIECE}};
}

static nrm_status
submit(const struct nrm__transfer *transfer, uintptr_t stream)
{
    struct nrm__cuda_lone_event event = {0};
    bool is_captured = false;
    NRM_TRY(nrm__transfer_submit(-1, transfer, stream, &event, &is_captured));
    CHECK_EQ(event.handle == NULL, is_captured);
    nrm__cuda_lone_drop(&event);
    return NRM_OK;
}

static bool
is_reversed(size_t n)
{
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemcpyDtoH(seen, second, sizeof seen), NRM_CUDA_SUCCESS);
    for (size_t i = 0; i < sizeof seen; i++) {
        size_t piece = i / PIECE;
        unsigned char expected = piece < n ? (unsigned char)(n - 1 - piece)
                                           : (unsigned char)255;
        if (seen[i] != expected) {
            NOTE("byte %zu is %d, not %d", i, seen[i], expected);
            return false;
        }
    }
    return true;
}

static uint64_t
n_batches(void)
{
    return sim.call_count("cuMemcpyBatchAsync");
}

/* ---- when there are any ---- */

static const struct {
    const char *name;
    size_t n_pieces;
    uint64_t n_batches;
} numbers[] = {
    {"three", 3, 0},      {"four", 4, 1},      {"as many as there can be", 256, 1},
    {"one more", 257, 2}, {"many", N_MOST, 3},
};

TEST_EACH(pieces_go_in_batches, numbers)
{
    begin();
    nrm_stream *stream = new_stream();
    struct nrm__transfer transfer =
        reversed(NRM__WITHIN, (void *)(uintptr_t)first, second, row->n_pieces);
    CHECK_OK(submit(&transfer, nrm_stream_handle(stream)));
    CHECK(is_reversed(row->n_pieces));
    CHECK_EQ(n_batches(), row->n_batches);
    CHECK_EQ(sim.call_count("cuMemcpyAsync"), row->n_batches == 0 ? row->n_pieces : 0);
    nrm_stream_release(stream);
    end();
}

TEST(host_memory_goes_in_batches_both_ways)
{
    begin();
    nrm_stream *stream = new_stream();
    uintptr_t handle = nrm_stream_handle(stream);
    struct nrm__transfer in = reversed(NRM__TO_DEVICE, host, second, 10);
    CHECK_OK(submit(&in, handle));
    CHECK(is_reversed(10));
    struct nrm__transfer out = reversed(NRM__TO_HOST, (void *)(uintptr_t)second,
                                        (nrm_CUdeviceptr)(uintptr_t)seen, 10);
    CHECK_OK(submit(&out, handle));
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    CHECK(memcmp(seen, host, (size_t)10 * PIECE) == 0);
    CHECK_EQ(n_batches(), 2u);
    nrm_stream_release(stream);
    end();
}

static const struct {
    const char *name;
    uintptr_t handle;
    uint64_t n_batches;
} streams[] = {
    {"the default stream", NRM_STREAM_HANDLE_DEFAULT, 0},
    {"the legacy stream", NRM_STREAM_HANDLE_LEGACY, 0},
    {"the per-thread stream", NRM_STREAM_HANDLE_PER_THREAD, 1},
};

TEST_EACH(the_legacy_stream_gets_no_batch, streams)
{
    begin();
    struct nrm__transfer transfer = reversed(NRM__TO_DEVICE, host, second, 10);
    CHECK_OK(submit(&transfer, row->handle));
    CHECK(is_reversed(10));
    CHECK_EQ(n_batches(), row->n_batches);
    end();
}

TEST(an_older_driver_gets_the_pieces_one_by_one)
{
    struct nrm_cudasim_config config = simulator_checked();
    config.driver = 12060;
    begin_with(&config);
    nrm_stream *stream = new_stream();
    struct nrm__transfer transfer = reversed(NRM__TO_DEVICE, host, second, 10);
    CHECK_OK(submit(&transfer, nrm_stream_handle(stream)));
    CHECK(is_reversed(10));
    CHECK_EQ(n_batches(), 0u);
    CHECK_EQ(sim.call_count("cuMemcpyHtoDAsync"), 10u);
    CHECK_STR_HAS(nrm__cuda_missing_symbols(), "cuMemcpyBatchAsync");
    nrm_stream_release(stream);
    end();
}

TEST(host_memory_that_has_another_address_there_goes_one_by_one)
{
    begin();
    sim.set_attribute(
        0, NRM_CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 0);
    nrm_stream *stream = new_stream();
    struct nrm__transfer in = reversed(NRM__TO_DEVICE, host, second, 10);
    CHECK_OK(submit(&in, nrm_stream_handle(stream)));
    CHECK(is_reversed(10));
    CHECK_EQ(n_batches(), 0u);
    struct nrm__transfer within =
        reversed(NRM__WITHIN, (void *)(uintptr_t)first, second, 10);
    CHECK_OK(submit(&within, nrm_stream_handle(stream)));
    CHECK_EQ(n_batches(), 1u);
    nrm_stream_release(stream);
    end();
}

TEST(a_captured_stream_gets_the_pieces_one_by_one)
{
    begin();
    nrm_stream *stream = new_stream();
    nrm_CUgraph graph = NULL;
    nrm_CUgraphExec exec = NULL;
    struct nrm__transfer transfer =
        reversed(NRM__WITHIN, (void *)(uintptr_t)first, second, 10);
    CHECK_EQ(cuda.cuStreamBeginCapture(handle_of(stream), 2), NRM_CUDA_SUCCESS);
    CHECK_OK(submit(&transfer, nrm_stream_handle(stream)));
    CHECK_EQ(cuda.cuStreamEndCapture(handle_of(stream), &graph), NRM_CUDA_SUCCESS);
    CHECK_EQ(n_batches(), 0u);
    CHECK(is_reversed(0));
    CHECK_EQ(cuda.cuGraphInstantiateWithFlags(&exec, graph, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuGraphLaunch(exec, handle_of(stream)), NRM_CUDA_SUCCESS);
    CHECK(is_reversed(10));
    CHECK_EQ(cuda.cuGraphExecDestroy(exec), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    nrm_stream_release(stream);
    end();
}

/* ---- when sources are read ---- */

TEST(pageable_memory_is_read_in_the_call)
{
    begin();
    nrm_stream *stream = new_stream();
    struct nrm__transfer transfer = reversed(NRM__TO_DEVICE, host, second, 10);
    hold(stream);
    CHECK_OK(submit(&transfer, nrm_stream_handle(stream)));
    memset(host, 99, sizeof host);
    let_go(stream);
    CHECK(is_reversed(10));
    CHECK_EQ(n_batches(), 1u);
    nrm_stream_release(stream);
    end();
}

/* What the stream does before belongs to what is copied. */
TEST(page_locked_memory_is_read_in_the_order_of_the_stream)
{
    begin();
    nrm_stream *stream = new_stream();
    size_t nbytes = (size_t)10 * PIECE;
    void *pinned = NULL;
    CHECK_EQ(cuda.cuMemHostAlloc(&pinned, nbytes, 0), NRM_CUDA_SUCCESS);
    memset(pinned, 99, nbytes);
    hold(stream);
    CHECK_EQ(cuda.cuMemcpyDtoHAsync(pinned, first, nbytes, handle_of(stream)),
             NRM_CUDA_SUCCESS);
    struct nrm__transfer transfer = reversed(NRM__TO_DEVICE, pinned, second, 10);
    CHECK_OK(submit(&transfer, nrm_stream_handle(stream)));
    let_go(stream);
    CHECK(is_reversed(10));
    CHECK_EQ(n_batches(), 1u);
    CHECK_EQ(cuda.cuMemFreeHost(pinned), NRM_CUDA_SUCCESS);
    nrm_stream_release(stream);
    end();
}

TEST(memory_of_which_a_part_is_page_locked_is_read_in_both_ways)
{
    begin();
    nrm_stream *stream = new_stream();
    size_t n = 2 * PAGE / PIECE + 3; /* some of a page, a whole one, and another */
    CHECK_EQ(cuda.cuMemHostRegister(host + PAGE, PAGE, 0), NRM_CUDA_SUCCESS);
    hold(stream);
    struct nrm__transfer transfer = reversed(NRM__TO_DEVICE, host, second, n);
    CHECK_OK(submit(&transfer, nrm_stream_handle(stream)));
    CHECK_EQ(n_batches(), 3u);
    memset(host, 99, PAGE); /* has been read */
    memset(host + 2 * PAGE, 99, 3 * PIECE);
    let_go(stream);
    CHECK(is_reversed(n));
    CHECK_EQ(cuda.cuMemHostUnregister(host + PAGE), NRM_CUDA_SUCCESS);
    nrm_stream_release(stream);
    end();
}

/* ---- what has an order ---- */

TEST(a_destination_that_overlaps_itself_gets_one_after_the_other)
{
    begin();
    nrm_stream *stream = new_stream();
    struct nrm__transfer transfer =
        reversed(NRM__WITHIN, (void *)(uintptr_t)first, second, 10);
    transfer.dst_strides[0] = PIECE / 2;
    CHECK_OK(submit(&transfer, nrm_stream_handle(stream)));
    CHECK_EQ(n_batches(), 0u);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(stream)), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemcpyDtoH(seen, second, sizeof seen), NRM_CUDA_SUCCESS);
    for (size_t i = 0; i < 10; i++) {
        CHECK_EQ(seen[i * PIECE / 2], 9 - i); /* the next one has the second half */
    }
    CHECK_EQ(seen[9 * PIECE / 2 + PIECE - 1], 0);
    nrm_stream_release(stream);
    end();
}

/* ---- what is refused, and what fails ---- */

static const struct {
    const char *name;
    nrm_CUresult code;
    uint64_t nth;
} refusals[] = {
    {"a wrong value", NRM_CUDA_ERROR_INVALID_VALUE, 1},
    {"not supported", NRM_CUDA_ERROR_NOT_SUPPORTED, 1},
    {"a capture", NRM_CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 1},
    {"the second batch", NRM_CUDA_ERROR_NOT_SUPPORTED, 2},
    {"the last batch", NRM_CUDA_ERROR_NOT_SUPPORTED, 3},
};

TEST_EACH(what_is_refused_is_copied_piece_by_piece, refusals)
{
    begin();
    nrm_stream *stream = new_stream();
    struct nrm__transfer transfer =
        reversed(NRM__WITHIN, (void *)(uintptr_t)first, second, N_MOST);
    sim.fail("cuMemcpyBatchAsync", row->nth, (int)row->code, 1);
    CHECK_OK(submit(&transfer, nrm_stream_handle(stream)));
    CHECK(is_reversed(N_MOST));
    CHECK_EQ(n_batches(), row->nth);
    CHECK_EQ(sim.call_count("cuMemcpyAsync"), (uint64_t)N_MOST);
    nrm_stream_release(stream);
    end();
}

static const struct {
    const char *name;
    const char *call;
    uintptr_t handle;
    uint64_t nth;
    const char *message;
} failures[] = {
    {"the first batch", "cuMemcpyBatchAsync", 2, 1, "a batch of 600 copies of 64 B"},
    {"the last batch", "cuMemcpyBatchAsync", 2, 3, "a batch of 600 copies of 64 B"},
    {"a piece", "cuMemcpyAsync", 1, 7, "a copy of 64 B"},
    {"the last piece", "cuMemcpyAsync", 1, N_MOST, "a copy of 64 B"},
};

/* And what was submitted before is done. */
TEST_EACH(what_fails_is_told, failures)
{
    begin();
    struct nrm__transfer transfer =
        reversed(NRM__WITHIN, (void *)(uintptr_t)first, second, N_MOST);
    sim.fail(row->call, row->nth, NRM_CUDA_ERROR_OPERATING_SYSTEM, 1);
    CHECK_STATUS(submit(&transfer, row->handle), NRM_CUDA_ERROR);
    CHECK_STR_HAS(nrm_last_error()->message, row->message);
    CHECK_EQ(nrm_last_error()->native_code, NRM_CUDA_ERROR_OPERATING_SYSTEM);
    CHECK_EQ(simulator_count(NRM_CUDASIM_OPERATIONS), 0u);
    end();
}

static const struct {
    const char *name;
    enum nrm__direction direction;
    size_t offset; /* of the first piece on the device */
    uint64_t n_copied;
} nobodys[] = {
    {"to the device", NRM__TO_DEVICE, sizeof host, 0},
    {"to the host", NRM__TO_HOST, sizeof host, 0},
    {"partly to the device", NRM__TO_DEVICE, sizeof host - (size_t)5 * PIECE, 5},
    {"partly to the host", NRM__TO_HOST, sizeof host - (size_t)5 * PIECE, 5},
};

/* A batch would take it for memory of the host. */
TEST_EACH(memory_that_is_nobodys_is_not_touched, nobodys)
{
    begin();
    nrm_stream *stream = new_stream();
    bool is_in = row->direction == NRM__TO_DEVICE;
    char *device = (char *)(uintptr_t)(second + row->offset);
    char *backwards = (char *)(is_in ? host : seen) + (size_t)9 * PIECE;
    struct nrm__transfer transfer = {.dst = is_in ? device : backwards,
                                     .src = is_in ? backwards : device,
                                     .direction = row->direction,
                                     .itemsize = PIECE,
                                     .n_dims = 1,
                                     .shape = {10},
                                     .dst_strides = {is_in ? PIECE : -PIECE},
                                     .src_strides = {is_in ? -PIECE : PIECE}};
    CHECK_STATUS(submit(&transfer, nrm_stream_handle(stream)), NRM_CUDA_ERROR);
    CHECK_STR_HAS(nrm_last_error()->message, "a copy of 64 B: invalid argument");
    CHECK_EQ(n_batches(), 0u);
    CHECK_EQ(sim.call_count(is_in ? "cuMemcpyHtoDAsync" : "cuMemcpyDtoHAsync"),
             row->n_copied + 1);
    nrm_stream_release(stream);
    end();
}

TEST(a_failure_does_not_end_a_capture)
{
    begin();
    nrm_stream *stream = new_stream();
    nrm_CUgraph graph = NULL;
    struct nrm__transfer transfer = reversed(NRM__TO_DEVICE, host, 0x1000, 10);
    CHECK_EQ(cuda.cuStreamBeginCapture(handle_of(stream), 2), NRM_CUDA_SUCCESS);
    CHECK_STATUS(submit(&transfer, nrm_stream_handle(stream)), NRM_CUDA_ERROR);
    CHECK_EQ(cuda.cuStreamEndCapture(handle_of(stream), &graph), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    nrm_stream_release(stream);
    end();
}

/* ---- what a stream takes ---- */

TEST(ways)
{
    begin();
    nrm_stream *stream = new_stream();
    uintptr_t handle = nrm_stream_handle(stream);
    struct nrm__transfer_ways ways;
    void *pinned = NULL;
    CHECK_EQ(cuda.cuMemHostAlloc(&pinned, PAGE, 0), NRM_CUDA_SUCCESS);
    CHECK_OK(nrm__transfer_ways_of(-1, handle, pinned, &ways));
    CHECK(ways.takes_batches && !ways.is_captured);
    CHECK_OK(nrm__transfer_ways_of(-1, handle, host, &ways));
    CHECK(!ways.takes_batches && !ways.is_captured);
    CHECK_OK(nrm__transfer_ways_of(0, NRM_STREAM_HANDLE_DEFAULT, pinned, &ways));
    CHECK(!ways.takes_batches && !ways.is_captured);
    CHECK_OK(nrm__transfer_ways_of(0, NRM_STREAM_HANDLE_PER_THREAD, pinned, &ways));
    CHECK(ways.takes_batches && !ways.is_captured);
    nrm_CUgraph graph = NULL;
    CHECK_EQ(cuda.cuStreamBeginCapture(handle_of(stream), 2), NRM_CUDA_SUCCESS);
    CHECK_OK(nrm__transfer_ways_of(-1, handle, pinned, &ways));
    CHECK(!ways.takes_batches && ways.is_captured);
    CHECK_EQ(cuda.cuStreamEndCapture(handle_of(stream), &graph), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemFreeHost(pinned), NRM_CUDA_SUCCESS);
    nrm_stream_release(stream);
    end();
}

CHECK_MAIN
