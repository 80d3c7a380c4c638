/* Blocks of one size in device memory, by themselves, as bins and under adaptors, on the
   simulated driver: who gets a block that a stream has freed, and when.

   A stream that reads a block is held when the block is freed; whoever has the block next
   overwrites it. What the stream reads when it goes on must be what was there. A resource
   that is full has an upstream with room for its blocks and for nothing else. */
#include <string.h>

#include "base/bits.h"
#include "core/capture.h"
#include "cuda/context.h"
#include "nrm/adaptors.h"
#include "nrm/options.h"
#include "pools/pool.h"
#include "streams.h"
#include "workers.h"

enum { N_BLOCKS = 4, N_WORKERS = 3, MANY = 1 << 20 };

static nrm_resource *mr;
static size_t block_nbytes;
static nrm_CUdeviceptr seen; /* what kernels have read */

/* ---- resources ---- */

static nrm_resource *
device_source(void)
{
    nrm_resource *source = NULL;
    CHECK_OK(nrm_device_create(NULL, &source));
    return source;
}

/* Each of these takes the reference to its upstream. */
static nrm_resource *
limited(nrm_resource *upstream, size_t nbytes)
{
    nrm_limiting_options options = NRM_OPTIONS(nrm_limiting_options);
    nrm_resource *limiting = NULL;
    options.allocation_limit = nbytes;
    CHECK_OK(nrm_limiting_create(upstream, &options, &limiting));
    nrm_resource_release(upstream);
    return limiting;
}

static nrm_resource *
counted(nrm_resource *upstream)
{
    nrm_resource *statistics = NULL;
    CHECK_OK(nrm_statistics_create(upstream, &statistics));
    nrm_resource_release(upstream);
    return statistics;
}

static nrm_resource *
fixed_over(nrm_resource *upstream)
{
    nrm_fixed_size_options options = NRM_OPTIONS(nrm_fixed_size_options);
    nrm_resource *fixed = NULL;
    options.block_nbytes = block_nbytes;
    options.n_blocks = N_BLOCKS;
    CHECK_OK(nrm_fixed_size_create(upstream, &options, &fixed));
    nrm_resource_release(upstream);
    return fixed;
}

/* With one bin, over the same upstream. */
static nrm_resource *
bins_over(nrm_resource *upstream)
{
    nrm_resource *binning = NULL;
    CHECK_OK(nrm_binning_create(upstream, NULL, &binning));
    nrm_resource *fixed = fixed_over(upstream);
    CHECK_OK(nrm_binning_add_bin(binning, block_nbytes, fixed));
    nrm_resource_release(fixed);
    return binning;
}

/* With room for so many blocks. */
static nrm_resource *
source_of(size_t n_blocks)
{
    return limited(device_source(), n_blocks * block_nbytes);
}

/* The chunk is aligned to a page of the block map, which a pool has to make room for. */
static nrm_resource *
pool_of(size_t n_blocks)
{
    return pool_over(device_source(), n_blocks * block_nbytes + NRM__MAP_PAGE);
}

static nrm_resource *
make_fixed(size_t n_blocks)
{
    return fixed_over(source_of(n_blocks));
}

static nrm_resource *
make_fixed_over_pool(size_t n_blocks)
{
    return fixed_over(pool_of(n_blocks));
}

static nrm_resource *
make_bins(size_t n_blocks)
{
    return bins_over(pool_of(n_blocks));
}

static nrm_resource *
make_under_adaptors(size_t n_blocks)
{
    return counted(limited(make_fixed(n_blocks), MANY * block_nbytes));
}

static nrm_resource *
make_bins_under_adaptors(size_t n_blocks)
{
    return limited(counted(make_bins(n_blocks)), MANY * block_nbytes);
}

static const struct over {
    const char *name;
    nrm_resource *(*make)(size_t n_blocks);
    size_t block_nbytes;
} overs[] = {
    {"64 KiB", make_fixed, 64 * NRM__KIB},
    {"1 KiB", make_fixed, NRM__KIB},
    {"768 B, no power of two", make_fixed, 768},
    {"1 MiB", make_fixed, NRM__MIB},
    {"64 KiB over a pool", make_fixed_over_pool, 64 * NRM__KIB},
    {"320 KiB over a pool", make_fixed_over_pool, 320 * NRM__KIB},
    {"a bin", make_bins, 64 * NRM__KIB},
    {"under adaptors", make_under_adaptors, 64 * NRM__KIB},
    {"a bin under adaptors", make_bins_under_adaptors, 64 * NRM__KIB},
};

/* ---- the program ---- */

static void
start_machine(void)
{
    simulator_start(NULL);
    nrm__cuda_capture_lift(-1);
    CHECK_OK(nrm__cuda_init(NULL));
    make_current(0);
    CHECK_EQ(cuda.cuMemAlloc(&seen, block_nbytes), NRM_CUDA_SUCCESS);
}

/* A resource with room for so many blocks. */
static void
start(const struct over *over, size_t n_blocks)
{
    block_nbytes = over->block_nbytes;
    start_machine();
    mr = over->make(n_blocks);
}

static void
check(void)
{
    for (nrm_resource *each = mr; each != NULL; each = each->upstream) {
        if (each->ops->check != NULL) {
            each->ops->check(each);
        }
    }
}

static void
stop(void)
{
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    check();
    CHECK_EQ(live_nbytes(mr), 0);
    CHECK_OK(nrm_resource_trim(mr, 0, NULL));
    CHECK_EQ(reserved_nbytes(mr), 0);
    nrm_resource_release(mr);
    CHECK_EQ(cuda.cuMemFree(seen), NRM_CUDA_SUCCESS);
    CHECK_EQ(simulator_count(NRM_CUDASIM_DEVICE_ALLOCATIONS), 0u);
    CHECK_EQ(simulator_count(NRM_CUDASIM_PHYSICAL), 0u);
    cuda.cuCtxSetCurrent(NULL);
    simulator_check_faults();
}

static void *
take_some(size_t nbytes, nrm_stream *stream)
{
    void *ptr = NULL;
    CHECK_OK(nrm_resource_allocate(mr, nbytes, 0, stream, &ptr));
    check();
    return ptr;
}

static void *
take(nrm_stream *stream)
{
    return take_some(block_nbytes, stream);
}

static void
give(void *ptr, nrm_stream *stream)
{
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, stream));
    check();
}

static void
check_full(nrm_stream *stream)
{
    void *ptr = NULL;
    CHECK_STATUS(nrm_resource_allocate(mr, block_nbytes, 0, stream, &ptr),
                 NRM_OUT_OF_MEMORY);
    check();
}

static void
take_all(void **out, int n, nrm_stream *stream)
{
    for (int i = 0; i < n; i++) {
        out[i] = take(stream);
    }
}

static void
give_all(void **blocks, int n, nrm_stream *stream)
{
    for (int i = 0; i < n; i++) {
        give(blocks[i], stream);
    }
}

static int64_t
parked_nbytes(void)
{
    nrm_statistics statistics = {0};
    CHECK_OK(nrm_resource_statistics(mr, &statistics));
    return statistics.parked_bytes;
}

static nrm_CUdeviceptr
address(const void *ptr)
{
    return (nrm_CUdeviceptr)(uintptr_t)ptr;
}

static void
write_on(const nrm_stream *stream, void *ptr, unsigned char value)
{
    CHECK_EQ(cuda.cuMemsetD8Async(address(ptr), value, block_nbytes, handle_of(stream)),
             NRM_CUDA_SUCCESS);
}

static void
read_on(const nrm_stream *stream, const void *ptr)
{
    CHECK_EQ(cuda.cuMemcpyAsync(seen, address(ptr), block_nbytes, handle_of(stream)),
             NRM_CUDA_SUCCESS);
}

static bool
has_seen(unsigned char value)
{
    static unsigned char bytes[NRM__MIB];
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemcpyDtoH(bytes, seen, block_nbytes), NRM_CUDA_SUCCESS);
    return bytes[0] == value && memcmp(bytes, bytes + 1, block_nbytes - 1) == 0;
}

/* From here on a thread may keep what is freed on the stream. */
static void
know(nrm_stream *stream)
{
    give(take(stream), stream);
}

/* A block of 7s that the stream, held, is about to read. */
static void *
take_and_read(nrm_stream *stream)
{
    void *ptr = take(stream);
    write_on(stream, ptr, 7);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(stream)), NRM_CUDA_SUCCESS);
    hold(stream);
    read_on(stream, ptr);
    return ptr;
}

/* ---- who gets a block ---- */

TEST_EACH(a_stream_gets_its_block_back_at_once_without_a_call, overs)
{
    start(row, N_BLOCKS);
    void *rest[N_BLOCKS - 1];
    nrm_stream *a = new_stream();
    take_all(rest, N_BLOCKS - 1, a);
    void *ptr = take_and_read(a);
    const size_t sizes[] = {block_nbytes, 1, block_nbytes / 2, block_nbytes};
    uint64_t before = sim.call_count(NULL);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        give(ptr, a);
        CHECK(take_some(sizes[i], a) == ptr);
    }
    CHECK_EQ(sim.call_count(NULL), before);
    write_on(a, ptr, 9);
    let_go(a);
    CHECK(has_seen(7));
    give(ptr, a);
    give_all(rest, N_BLOCKS - 1, a);
    nrm_stream_release(a);
    stop();
}

TEST_EACH(another_stream_gets_another_block, overs)
{
    start(row, N_BLOCKS);
    nrm_stream *a = new_stream(), *b = new_stream();
    void *ptr = take_and_read(a), *others[N_BLOCKS - 1];
    give(ptr, a);
    take_all(others, N_BLOCKS - 1, b);
    for (int i = 0; i < N_BLOCKS - 1; i++) {
        CHECK(others[i] != ptr);
    }
    CHECK_EQ(sim.call_count("cuStreamWaitEvent"), 0u);
    let_go(a);
    give_all(others, N_BLOCKS - 1, b);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

TEST_EACH(the_next_chunk_is_taken_before_a_stream_waits, overs)
{
    void *rest[128], *others[N_BLOCKS];
    start(row, MANY);
    nrm_stream *a = new_stream(), *b = new_stream();
    void *ptr = take_and_read(a);
    int64_t nbytes = reserved_nbytes(mr);
    int n_rest = (int)((size_t)nbytes / block_nbytes) - 1; /* whole pages have more */
    take_all(rest, n_rest, a);
    give(ptr, a);
    take_all(others, N_BLOCKS, b);
    for (int i = 0; i < N_BLOCKS; i++) {
        CHECK(others[i] != ptr);
    }
    CHECK_EQ(reserved_nbytes(mr), 2 * nbytes);
    CHECK_EQ(sim.call_count("cuStreamWaitEvent"), 0u);
    let_go(a);
    give_all(others, N_BLOCKS, b);
    give_all(rest, n_rest, a);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

TEST_EACH(another_stream_waits_when_there_is_no_more, overs)
{
    start(row, N_BLOCKS);
    nrm_stream *a = new_stream(), *b = new_stream();
    void *rest[N_BLOCKS - 1];
    take_all(rest, N_BLOCKS - 1, a);
    void *ptr = take_and_read(a);
    give(ptr, a);
    CHECK(take(b) == ptr);
    CHECK_EQ(sim.call_count("cuStreamWaitEvent"), 1u);
    write_on(b, ptr, 9);
    let_run();
    let_go(a);
    CHECK(has_seen(7));
    give(ptr, b);
    give_all(rest, N_BLOCKS - 1, a);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

TEST_EACH(what_is_done_is_anybodys, overs)
{
    start(row, N_BLOCKS);
    nrm_stream *a = new_stream(), *b = new_stream();
    void *rest[N_BLOCKS - 1];
    take_all(rest, N_BLOCKS - 1, a);
    void *ptr = take_and_read(a);
    give(ptr, a);
    let_go(a);
    CHECK(has_seen(7));
    CHECK(take(b) == ptr);
    CHECK_EQ(sim.call_count("cuStreamWaitEvent"), 0u);
    give(ptr, b);
    give_all(rest, N_BLOCKS - 1, b);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

TEST_EACH(the_host_gets_only_what_is_done, overs)
{
    start(row, N_BLOCKS);
    nrm_stream *a = new_stream();
    void *blocks[N_BLOCKS];
    take_all(blocks, N_BLOCKS - 1, a);
    blocks[N_BLOCKS - 1] = take_and_read(a);
    give_all(blocks, N_BLOCKS, a);
    CHECK_EQ(live_nbytes(mr), 0);
    check_full(NULL);
    CHECK_STR_HAS(nrm_last_error()->message, "freed but not done on the GPU");
    CHECK_EQ(parked_nbytes(), N_BLOCKS * (int64_t)block_nbytes);
    let_go(a);
    CHECK(has_seen(7));
    take_all(blocks, N_BLOCKS, NULL);
    give_all(blocks, N_BLOCKS, NULL);
    nrm_stream_release(a);
    stop();
}

TEST_EACH(what_the_host_frees_is_behind_every_stream, overs)
{
    start(row, N_BLOCKS);
    nrm_stream *a = new_stream(), *b = new_stream();
    void *rest[N_BLOCKS - 1];
    take_all(rest, N_BLOCKS - 1, a);
    void *ptr = take_and_read(a);
    give(ptr, NULL);
    check_full(NULL);
    CHECK(take(b) == ptr);
    write_on(b, ptr, 9);
    let_run();
    let_go(a);
    CHECK(has_seen(7));
    give(ptr, b);
    give_all(rest, N_BLOCKS - 1, NULL);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

/* The next stream has the handle of the one that is gone, whose work goes on. */
TEST_EACH(blocks_of_a_stream_that_is_gone_are_behind_its_work, overs)
{
    start(row, N_BLOCKS);
    nrm_CUevent event = NULL;
    void *rest[N_BLOCKS - 1];
    nrm_stream *a = new_stream(), *aside = new_stream();
    nrm_CUstream handle = handle_of(a);
    take_all(rest, N_BLOCKS - 1, a);
    void *ptr = take(a);
    write_on(a, ptr, 7);
    CHECK_EQ(cuda.cuStreamSynchronize(handle), NRM_CUDA_SUCCESS);
    hold(aside);
    CHECK_EQ(cuda.cuMemsetD8Async(seen, 0, 1, handle_of(aside)), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuEventCreate(&event, NRM_CU_EVENT_DISABLE_TIMING), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuEventRecord(event, handle_of(aside)), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamWaitEvent(handle, event, 0), NRM_CUDA_SUCCESS);
    read_on(a, ptr);
    give(ptr, a);
    nrm_stream_release(a);
    nrm_stream *next = new_stream();
    CHECK(handle_of(next) == handle);
    CHECK(take(next) == ptr);
    write_on(next, ptr, 9);
    let_run();
    let_go(aside);
    CHECK(has_seen(7));
    give(ptr, next);
    give_all(rest, N_BLOCKS - 1, next);
    CHECK_EQ(cuda.cuEventDestroy(event), NRM_CUDA_SUCCESS);
    nrm_stream_release(next);
    nrm_stream_release(aside);
    stop();
}

TEST_EACH(a_block_is_given_back_once, overs)
{
    start(row, N_BLOCKS);
    nrm_stream *a = new_stream(), *b = new_stream();
    know(a);
    char *ptr = take(a);
    CHECK_STATUS(nrm_resource_deallocate(mr, ptr + 256, 0, a), NRM_NOT_OWNED);
    give(ptr, a);
    CHECK_STATUS(nrm_resource_deallocate(mr, ptr, 0, a), NRM_NOT_OWNED);
    CHECK_STATUS(nrm_resource_deallocate(mr, ptr, 0, b), NRM_NOT_OWNED);
    CHECK_STATUS(nrm_resource_deallocate(mr, ptr, 0, NULL), NRM_NOT_OWNED);
    CHECK_EQ(live_nbytes(mr), 0);
    check();
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

TEST_EACH(a_block_is_found_with_the_size_that_was_asked_for, overs)
{
    start(row, N_BLOCKS);
    nrm_block_info info;
    nrm_stream *a = new_stream();
    for (int i = 0; i < 3; i++) {
        char *ptr = take_some(100, a);
        REQUIRE_OK(nrm_block_find(ptr + 99, &info));
        CHECK_STR_EQ(nrm_resource_class_name(info.resource), "FixedSizeMemoryResource");
        CHECK(info.ptr == ptr);
        CHECK_EQ(info.nbytes, 100u);
        CHECK_EQ(info.capacity, block_nbytes);
        CHECK_EQ(live_nbytes(mr), 100);
        nrm_resource_release(info.resource);
        give(ptr, a);
    }
    nrm_stream_release(a);
    stop();
}

/* ---- captures ---- */

static nrm_CUgraph
end_capture(const nrm_stream *stream)
{
    nrm_CUgraph graph = NULL;
    CHECK_EQ(cuda.cuStreamEndCapture(handle_of(stream), &graph), NRM_CUDA_SUCCESS);
    nrm_capture_end();
    return graph;
}

static void
begin_capture(const nrm_stream *stream)
{
    nrm_capture_begin();
    CHECK_EQ(cuda.cuStreamBeginCapture(handle_of(stream),
                                       NRM_CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
             NRM_CUDA_SUCCESS);
}

/* What the capture has freed it has back; nobody else has, while the graph lives. */
TEST_EACH(a_block_of_a_capture_belongs_to_its_graph, overs)
{
    start(row, N_BLOCKS);
    void *others[N_BLOCKS];
    nrm_stream *a = new_stream(), *b = new_stream();
    know(a);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    CHECK_OK(nrm_resource_trim(mr, NRM__GIB, NULL)); /* all of it is anybody's */
    begin_capture(a);
    void *ptr = take(a);
    give(ptr, a);
    CHECK(take(a) == ptr);
    give(ptr, a);
    nrm_CUgraph graph = end_capture(a);
    CHECK_EQ(parked_nbytes(), (int64_t)block_nbytes);
    take_all(others, N_BLOCKS - 1, b);
    for (int i = 0; i < N_BLOCKS - 1; i++) {
        CHECK(others[i] != ptr);
    }
    check_full(b);
    check_full(a);
    check_full(NULL);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    CHECK(take(b) == ptr);
    give(ptr, b);
    give_all(others, N_BLOCKS - 1, b);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

/* ---- threads ---- */

/* What a thread does with its stream. */
struct part {
    nrm_stream *stream;
    void *blocks[2];
};

static void
keep_there(void *argument)
{
    struct part *part = argument;
    know(part->stream);
    take_all(part->blocks, 2, part->stream);
    give_all(part->blocks, 2, part->stream);
}

TEST_EACH(a_trim_takes_what_idle_threads_keep, overs)
{
    struct worker workers[N_WORKERS];
    struct part parts[N_WORKERS];
    start(row, MANY);
    int64_t chunk_nbytes = reserved_nbytes(mr);
    for (int i = 0; i < N_WORKERS; i++) {
        parts[i].stream = new_stream();
        worker_start(&workers[i]);
        worker_run(&workers[i], keep_there, &parts[i]);
    }
    nrm_stream *own = new_stream();
    void *ptr = take(own);
    CHECK_EQ(live_nbytes(mr), (int64_t)block_nbytes);
    CHECK_OK(nrm_resource_trim(mr, 0, NULL));
    CHECK_EQ(reserved_nbytes(mr), chunk_nbytes); /* the one that it lies in */
    give(ptr, own);
    CHECK_OK(nrm_resource_trim(mr, 0, NULL));
    CHECK_EQ(reserved_nbytes(mr), 0);
    for (int i = 0; i < N_WORKERS; i++) { /* and again */
        worker_run(&workers[i], keep_there, &parts[i]);
        worker_end(&workers[i]);
        nrm_stream_release(parts[i].stream);
    }
    nrm_stream_release(own);
    stop();
}

TEST_EACH(a_full_resource_hands_out_what_all_threads_keep, overs)
{
    struct worker worker;
    struct part part = {.stream = NULL};
    void *blocks[N_BLOCKS];
    start(row, N_BLOCKS);
    part.stream = new_stream();
    worker_start(&worker);
    worker_run(&worker, keep_there, &part);
    nrm_stream *own = new_stream();
    take_all(blocks, N_BLOCKS, own);
    check_full(own);
    give_all(blocks, N_BLOCKS, own);
    worker_end(&worker);
    nrm_stream_release(part.stream);
    nrm_stream_release(own);
    stop();
}

/* ---- more of what the resource does ---- */

static const struct {
    const char *name;
    size_t block_nbytes;
    bool keeps;
} kept[] = {
    {"256 B", 256, true},
    {"64 KiB", 64 * NRM__KIB, true},
    {"32 MiB", 32 * NRM__MIB, true},
    {"64 MiB", 64 * NRM__MIB, false},
    {"no power of two", 3 * 256, false},
};

/* A block whose size a thread finds by rounding is kept whatever was asked of it. */
TEST_EACH(a_thread_keeps_blocks_for_every_size_or_none, kept)
{
    block_nbytes = row->block_nbytes;
    start_machine();
    mr = fixed_over(device_source());
    nrm_stream *a = new_stream();
    know(a);
    void *ptr = take_some(1, a);
    give(ptr, a);
    CHECK_EQ(n_kept(mr), (size_t)row->keeps);
    CHECK(take(a) == ptr);
    CHECK_EQ(n_kept(mr), 0u);
    give(ptr, a);
    CHECK_EQ(n_kept(mr), (size_t)row->keeps);
    nrm_stream_release(a);
    stop();
}

/* More than a thread keeps, and so much that a pool would look what is done. */
TEST(a_stream_gets_all_of_many_blocks_back_without_a_call)
{
    enum { N = 128 };
    nrm_fixed_size_options options = NRM_OPTIONS(nrm_fixed_size_options);
    void *blocks[N];
    block_nbytes = NRM__MIB;
    start_machine();
    nrm_resource *source = device_source();
    CHECK_OK(nrm_fixed_size_create(source, &options, &mr));
    nrm_resource_release(source);
    CHECK_EQ(reserved_nbytes(mr), N * (int64_t)NRM__MIB);
    nrm_stream *a = new_stream();
    blocks[0] = take_and_read(a);
    take_all(blocks + 1, N - 1, a);
    uint64_t before = sim.call_count(NULL);
    for (int round = 0; round < 3; round++) {
        give_all(blocks, N, a);
        take_all(blocks, N, a);
    }
    CHECK_EQ(sim.call_count(NULL), before);
    CHECK_EQ(reserved_nbytes(mr), N * (int64_t)NRM__MIB);
    let_go(a);
    give_all(blocks, N, a);
    nrm_stream_release(a);
    stop();
}

static const struct {
    const char *name;
    size_t block_nbytes, alignment;
    nrm_status expected;
} alignments[] = {
    {"the kind's", 3 * 256, 256, NRM_OK},
    {"no factor of the size", 3 * 256, 512, NRM_NOT_SUPPORTED},
    {"the size", 4096, 4096, NRM_OK},
    {"more than the size", 4096, 8192, NRM_NOT_SUPPORTED},
    {"a page of the map", NRM__MIB, NRM__MAP_PAGE, NRM_OK},
    {"more than that", NRM__MIB, 2 * NRM__MAP_PAGE, NRM_NOT_SUPPORTED},
};

TEST_EACH(an_alignment_is_honoured_for_every_block_or_refused, alignments)
{
    enum { N = 2 * N_BLOCKS + 1 };
    void *blocks[N];
    block_nbytes = row->block_nbytes;
    start_machine();
    mr = fixed_over(device_source());
    nrm_stream *a = new_stream();
    for (int i = 0; i < N; i++) {
        blocks[i] = NULL;
        CHECK_EQ(nrm_resource_allocate(mr, 1, row->alignment, a, &blocks[i]),
                 row->expected);
        CHECK_ALIGNED(blocks[i], row->alignment);
    }
    if (row->expected != NRM_OK) {
        CHECK_STR_HAS(nrm_last_error()->message, "aligned to");
    }
    for (int i = 0; i < N; i++) {
        CHECK_OK(nrm_resource_deallocate(mr, blocks[i], 0, a));
    }
    nrm_stream_release(a);
    stop();
}

TEST_EACH(a_request_larger_than_a_block_is_out_of_memory_and_changes_nothing, overs)
{
    start(row, N_BLOCKS);
    nrm_stream *a = new_stream();
    void *ptr = NULL;
    know(a);
    int64_t before = reserved_nbytes(mr);
    CHECK_STATUS(nrm_resource_allocate(mr, block_nbytes + 1, 0, a, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK(ptr == NULL);
    CHECK_EQ(reserved_nbytes(mr), before);
    CHECK_EQ(live_nbytes(mr), 0);
    nrm_stream_release(a);
    stop();
}

/* Its chunks are no whole pages, and what is behind them is not aligned to any. */
TEST(blocks_of_one_size_are_cut_out_of_blocks_of_another)
{
    void *blocks[3 * N_BLOCKS];
    block_nbytes = 4096;
    start_machine();
    nrm_resource *large = fixed_over(device_source());
    block_nbytes = 512;
    mr = fixed_over(large);
    CHECK_EQ(reserved_nbytes(mr), N_BLOCKS * 512);
    nrm_stream *a = new_stream();
    for (int round = 0; round < 2; round++) {
        take_all(blocks, 3 * N_BLOCKS, a);
        for (int i = 0; i < 3 * N_BLOCKS; i++) {
            CHECK_ALIGNED(blocks[i], 256);
        }
        give_all(blocks, 3 * N_BLOCKS, a);
    }
    CHECK_EQ(reserved_nbytes(mr), 3 * N_BLOCKS * 512);
    nrm_stream_release(a);
    stop();
}

TEST(immediate_reuse_asks_nobody)
{
    nrm_fixed_size_options options = NRM_OPTIONS(nrm_fixed_size_options);
    block_nbytes = 4096;
    start_machine();
    nrm_resource *source = device_source();
    options.block_nbytes = 3 * 256;
    options.reuse = NRM_REUSE_IMMEDIATE;
    CHECK_OK(nrm_fixed_size_create(source, &options, &mr));
    nrm_resource_release(source);
    nrm_stream *a = new_stream(), *b = new_stream();
    hold(a);
    void *ptr = take_some(3, a);
    give(ptr, a);
    uint64_t before = sim.call_count(NULL);
    CHECK(take_some(700, b) == ptr);
    CHECK_EQ(sim.call_count(NULL), before);
    give(ptr, NULL);
    let_go(a);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

static void
allocate_in_child(void)
{
    void *ptr = NULL;
    uint64_t before = sim.call_count(NULL);
    CHECK_STATUS(nrm_resource_trim(mr, 0, NULL), NRM_OK);
    CHECK(nrm_resource_allocate(mr, 1, 0, NULL, &ptr) != NRM_OK || ptr != NULL);
    mr->ops->check(mr);
    CHECK_EQ(sim.call_count(NULL), before);
}

TEST(a_forked_child_never_calls_the_driver)
{
    block_nbytes = 4096;
    start_machine();
    mr = fixed_over(device_source());
    nrm_stream *a = new_stream();
    know(a);
    CHECK_IN_CHILD(allocate_in_child);
    nrm_stream_release(a);
    stop();
}

CHECK_MAIN
