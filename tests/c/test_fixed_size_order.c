/* Who gets a block of device memory of one size that a stream has freed, and when. */
#include "fixed_blocks.h"

enum { N_WORKERS = 3 };

/* ---- who gets a block ---- */

TEST_EACH(a_stream_gets_its_block_back_at_once_without_a_call, overs)
{
    start(row, N_BLOCKS);
    void *ptr = take_last_and_read();
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
    give_rest(a);
    stop();
}

TEST_EACH(another_stream_gets_another_block, overs)
{
    start(row, N_BLOCKS);
    void *ptr = take_and_read(a), *others[N_BLOCKS - 1];
    give(ptr, a);
    take_all(others, N_BLOCKS - 1, b);
    for (int i = 0; i < N_BLOCKS - 1; i++) {
        CHECK(others[i] != ptr);
    }
    CHECK_EQ(sim.call_count("cuStreamWaitEvent"), 0u);
    let_go(a);
    give_all(others, N_BLOCKS - 1, b);
    stop();
}

TEST_EACH(the_next_chunk_is_taken_before_a_stream_waits, overs)
{
    void *first[128], *others[N_BLOCKS];
    start(row, MANY);
    void *ptr = take_and_read(a);
    int64_t nbytes = reserved_nbytes(mr);
    int n_first = (int)((size_t)nbytes / block_nbytes) - 1; /* whole pages have more */
    take_all(first, n_first, a);
    give(ptr, a);
    take_all(others, N_BLOCKS, b);
    for (int i = 0; i < N_BLOCKS; i++) {
        CHECK(others[i] != ptr);
    }
    CHECK_EQ(reserved_nbytes(mr), 2 * nbytes);
    CHECK_EQ(sim.call_count("cuStreamWaitEvent"), 0u);
    let_go(a);
    give_all(others, N_BLOCKS, b);
    give_all(first, n_first, a);
    stop();
}

TEST_EACH(another_stream_waits_when_there_is_no_more, overs)
{
    start(row, N_BLOCKS);
    void *ptr = take_last_and_read();
    give(ptr, a);
    CHECK(take(b) == ptr);
    CHECK_EQ(sim.call_count("cuStreamWaitEvent"), 1u);
    write_on(b, ptr, 9);
    let_run();
    let_go(a);
    CHECK(has_seen(7));
    give(ptr, b);
    give_rest(a);
    stop();
}

TEST_EACH(what_is_done_is_anybodys, overs)
{
    start(row, N_BLOCKS);
    void *ptr = take_last_and_read();
    give(ptr, a);
    let_go(a);
    CHECK(has_seen(7));
    CHECK(take(b) == ptr);
    CHECK_EQ(sim.call_count("cuStreamWaitEvent"), 0u);
    give(ptr, b);
    give_rest(b);
    stop();
}

TEST_EACH(the_host_gets_only_what_is_done, overs)
{
    start(row, N_BLOCKS);
    void *blocks[N_BLOCKS];
    take_all(blocks, N_BLOCKS - 1, a);
    blocks[N_BLOCKS - 1] = take_and_read(a);
    give_all(blocks, N_BLOCKS, a);
    CHECK_EQ(live_nbytes(mr), 0);
    check_full(NULL);
    CHECK_STR_HAS(nrm_last_error()->message, "freed but not done on the GPU");
    CHECK_EQ(parked_nbytes(mr), N_BLOCKS * (int64_t)block_nbytes);
    let_go(a);
    CHECK(has_seen(7));
    take_all(blocks, N_BLOCKS, NULL);
    give_all(blocks, N_BLOCKS, NULL);
    stop();
}

TEST_EACH(what_the_host_frees_is_behind_every_stream, overs)
{
    start(row, N_BLOCKS);
    void *ptr = take_last_and_read();
    give(ptr, NULL);
    check_full(NULL);
    CHECK(take(b) == ptr);
    write_on(b, ptr, 9);
    let_run();
    let_go(a);
    CHECK(has_seen(7));
    give(ptr, b);
    give_rest(NULL);
    stop();
}

/* The next stream has the handle of the one that is gone, whose work goes on. */
TEST_EACH(blocks_of_a_stream_that_is_gone_are_behind_its_work, overs)
{
    start(row, N_BLOCKS);
    nrm_CUstream handle = handle_of(a);
    take_all(rest, N_BLOCKS - 1, a);
    void *ptr = take(a);
    write_on(a, ptr, 7);
    CHECK_EQ(cuda.cuStreamSynchronize(handle), NRM_CUDA_SUCCESS);
    hold(b);
    CHECK_EQ(cuda.cuMemsetD8Async(seen, 0, 1, handle_of(b)), NRM_CUDA_SUCCESS);
    let_wait_for(handle, handle_of(b));
    read_on(a, ptr);
    give(ptr, a);
    nrm_stream_release(a);
    a = new_stream();
    CHECK(handle_of(a) == handle);
    CHECK(take(a) == ptr);
    write_on(a, ptr, 9);
    let_run();
    let_go(b);
    CHECK(has_seen(7));
    give(ptr, a);
    give_rest(a);
    stop();
}

TEST_EACH(a_block_is_given_back_once, overs)
{
    start(row, N_BLOCKS);
    know(a);
    char *ptr = take(a);
    CHECK_STATUS(nrm_resource_deallocate(mr, ptr + 256, 0, a), NRM_NOT_OWNED);
    give(ptr, a);
    CHECK_STATUS(nrm_resource_deallocate(mr, ptr, 0, a), NRM_NOT_OWNED);
    CHECK_STATUS(nrm_resource_deallocate(mr, ptr, 0, b), NRM_NOT_OWNED);
    CHECK_STATUS(nrm_resource_deallocate(mr, ptr, 0, NULL), NRM_NOT_OWNED);
    CHECK_EQ(live_nbytes(mr), 0);
    check();
    stop();
}

TEST_EACH(a_block_is_found_with_the_size_that_was_asked_for, overs)
{
    start(row, N_BLOCKS);
    nrm_block_info info;
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
    know(a);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    CHECK_OK(nrm_resource_trim(mr, NRM__GIB, NULL)); /* all of it is anybody's */
    begin_capture(a);
    void *ptr = take(a);
    give(ptr, a);
    CHECK(take(a) == ptr);
    give(ptr, a);
    nrm_CUgraph graph = end_capture(a);
    CHECK_EQ(parked_nbytes(mr), (int64_t)block_nbytes);
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
    void *ptr = take(a);
    CHECK_EQ(live_nbytes(mr), (int64_t)block_nbytes);
    CHECK_OK(nrm_resource_trim(mr, 0, NULL));
    CHECK_EQ(reserved_nbytes(mr), chunk_nbytes); /* the one that it lies in */
    give(ptr, a);
    CHECK_OK(nrm_resource_trim(mr, 0, NULL));
    CHECK_EQ(reserved_nbytes(mr), 0);
    for (int i = 0; i < N_WORKERS; i++) { /* and again */
        worker_run(&workers[i], keep_there, &parts[i]);
        worker_end(&workers[i]);
        nrm_stream_release(parts[i].stream);
    }
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
    take_all(blocks, N_BLOCKS, a);
    check_full(a);
    give_all(blocks, N_BLOCKS, a);
    worker_end(&worker);
    nrm_stream_release(part.stream);
    stop();
}

CHECK_MAIN
