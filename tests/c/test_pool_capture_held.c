/* Until when the memory of a graph is held: programs that allocate and free inside a
   capture, launch the graph when the memory's owners have long let go of it, and
   compare bytes. */
#include "captured_pool.h"
#include "core/capture.h"
#include "cuda/event.h"
#include "device_pool.h"

/* ---- graphs that are launched when the owners of their memory have gone ---- */

TEST_EACH(a_graph_keeps_what_was_freed_inside_its_capture, kinds)
{
    start(N_BLOCKS * BLOCK);
    nrm_stream *stream = row->create();
    nrm_CUgraphExec exec = capture_program(row, stream, true);
    CHECK_EQ(launch_among_others(exec, stream, N_LAUNCHES), 0);
    CHECK_EQ(cuda.cuGraphExecDestroy(exec), NRM_CUDA_SUCCESS);
    drop_stream(stream);
    finish();
}

TEST_EACH(a_graph_keeps_what_was_freed_after_its_capture, kinds)
{
    start(N_BLOCKS * BLOCK);
    nrm_stream *stream = row->create();
    nrm_CUgraphExec exec = capture_program(row, stream, false);
    CHECK_EQ(launch_among_others(exec, stream, N_LAUNCHES), 0);
    CHECK_EQ(cuda.cuGraphExecDestroy(exec), NRM_CUDA_SUCCESS);
    drop_stream(stream);
    finish();
}

/* What the two above prove: the same program finds wrong bytes where nobody knows of
   the capture, as on a stream that stays and was not announced. */
TEST(without_a_word_the_memory_of_a_graph_is_handed_out)
{
    static const struct kind unknown = {"unknown", per_thread_stream, false, RELAXED};
    start(N_BLOCKS * BLOCK);
    nrm_stream *stream = unknown.create();
    nrm_CUgraphExec exec = capture_program(&unknown, stream, true);
    CHECK_GT(launch_among_others(exec, stream, 3), 0);
    CHECK_EQ(cuda.cuGraphExecDestroy(exec), NRM_CUDA_SUCCESS);
    drop_stream(stream);
    finish();
}

/* ---- until when the memory is held ---- */

TEST_EACH(what_was_allocated_before_and_freed_inside_is_the_graphs, kinds)
{
    start(BLOCK);
    nrm_stream *stream = row->create(), *other = new_stream();
    void *ptr = take(BLOCK, stream);
    begin(row, stream);
    write_on(stream, ptr, VALUE);
    give(ptr, stream);
    CHECK_STATUS(try_take(BLOCK, stream), NRM_OUT_OF_MEMORY);
    nrm_CUgraph graph = end(row, stream);
    CHECK_STATUS(try_take(BLOCK, stream), NRM_OUT_OF_MEMORY);
    CHECK_STATUS(try_take(BLOCK, other), NRM_OUT_OF_MEMORY);
    CHECK_STATUS(try_take(BLOCK, NULL), NRM_OUT_OF_MEMORY);
    CHECK_STR_HAS(nrm_last_error()->message, "4 KiB freed but held by captured graphs");
    CHECK_EQ(parked_nbytes(pool), (int64_t)BLOCK);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    CHECK_OK(try_take(BLOCK, other));
    nrm_stream_release(other);
    drop_stream(stream);
    finish();
}

/* The graph is gone, but the stream that freed its memory still reads there. */
TEST(after_the_graph_the_stream_that_freed_counts)
{
    start(BLOCK);
    nrm_stream *stream = others_stream(), *reader = new_stream();
    begin_capture(stream, GLOBAL);
    void *ptr = take(BLOCK, stream);
    write_on(stream, ptr, VALUE);
    nrm_CUgraphExec exec = instantiate(end_capture(stream));
    launch(exec, stream);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(stream)), NRM_CUDA_SUCCESS);
    hold(reader);
    read_on(reader, ptr, 0);
    give(ptr, reader);
    CHECK_EQ(cuda.cuGraphExecDestroy(exec), NRM_CUDA_SUCCESS);
    CHECK_STATUS(try_take(BLOCK, NULL), NRM_OUT_OF_MEMORY);
    let_go(reader);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    CHECK(have_seen(0, VALUE));
    CHECK_OK(try_take(BLOCK, NULL));
    nrm_stream_release(reader);
    drop_stream(stream);
    finish();
}

/* Two neighbours, each with a stream of its own to wait for after the graph. */
TEST(blocks_of_a_graph_do_not_share_what_comes_after_it)
{
    start(2 * BLOCK);
    nrm_stream *stream = others_stream(), *a = new_stream(), *b = new_stream();
    begin_capture(stream, GLOBAL);
    void *first = take(BLOCK, stream), *second = take(BLOCK, stream);
    write_on(stream, second, VALUE);
    nrm_CUgraphExec exec = instantiate(end_capture(stream));
    launch(exec, stream);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(stream)), NRM_CUDA_SUCCESS);
    hold(b);
    read_on(b, second, 0);
    give(second, b);
    give(first, a);
    CHECK_EQ(cuda.cuGraphExecDestroy(exec), NRM_CUDA_SUCCESS);
    CHECK(take(BLOCK, NULL) == first);
    CHECK_STATUS(try_take(BLOCK, NULL), NRM_OUT_OF_MEMORY);
    give(first, NULL);
    let_go(b);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    CHECK(have_seen(0, VALUE));
    CHECK_OK(try_take(2 * BLOCK, NULL));
    nrm_stream_release(a);
    nrm_stream_release(b);
    drop_stream(stream);
    finish();
}

TEST(a_launch_that_is_pending_holds_what_its_graph_did)
{
    start(BLOCK);
    nrm_stream *stream = others_stream();
    begin_capture(stream, GLOBAL);
    void *ptr = take(BLOCK, stream);
    write_on(stream, ptr, VALUE);
    read_on(stream, ptr, 0);
    give(ptr, stream);
    nrm_CUgraphExec exec = instantiate(end_capture(stream));
    hold(stream);
    launch(exec, stream);
    CHECK_EQ(cuda.cuGraphExecDestroy(exec), NRM_CUDA_SUCCESS);
    CHECK_STATUS(try_take(BLOCK, NULL), NRM_OUT_OF_MEMORY);
    let_go(stream);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(stream)), NRM_CUDA_SUCCESS);
    CHECK(have_seen(0, VALUE));
    let_run(); /* the destructor is called behind the last operation */
    CHECK_OK(try_take(BLOCK, NULL));
    drop_stream(stream);
    finish();
}

/* Allocated in one capture and freed in another. */
TEST(a_block_of_two_graphs_is_held_by_both)
{
    start(BLOCK);
    nrm_stream *a = others_stream(), *b = others_stream();
    begin_capture(a, GLOBAL);
    void *ptr = take(BLOCK, a);
    write_on(a, ptr, VALUE);
    nrm_CUgraph first = end_capture(a);
    begin_capture(b, GLOBAL);
    read_on(b, ptr, 0);
    give(ptr, b);
    nrm_CUgraph second = end_capture(b);
    CHECK_EQ(cuda.cuGraphDestroy(first), NRM_CUDA_SUCCESS);
    CHECK_STATUS(try_take(BLOCK, NULL), NRM_OUT_OF_MEMORY);
    CHECK_EQ(parked_nbytes(pool), (int64_t)BLOCK);
    CHECK_EQ(cuda.cuGraphDestroy(second), NRM_CUDA_SUCCESS);
    CHECK_OK(try_take(BLOCK, NULL));
    drop_stream(a);
    drop_stream(b);
    finish();
}

/* It is live when its graph goes, and then an ordinary block. */
TEST(a_block_outlives_its_graph)
{
    start(BLOCK);
    nrm_stream *stream = others_stream(), *other = new_stream();
    begin_capture(stream, GLOBAL);
    void *ptr = take(BLOCK, stream);
    CHECK_EQ(cuda.cuGraphDestroy(end_capture(stream)), NRM_CUDA_SUCCESS);
    nrm__captures_reap();
    give(ptr, other);
    CHECK(take(BLOCK, other) == ptr);
    give(ptr, other);
    nrm_stream_release(other);
    drop_stream(stream);
    finish();
}

static void
break_capture(const nrm_stream *stream)
{
    nrm_CUevent event = NULL;
    nrm_CUcontext context = NULL;
    nrm_CUgraph graph = NULL;
    CHECK_EQ(cuda.cuCtxGetCurrent(&context), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuEventCreate(&event, 0), NRM_CUDA_SUCCESS);
    CHECK_NE(cuda.cuCtxRecordEvent(context, event), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuEventDestroy(event), NRM_CUDA_SUCCESS);
    CHECK_OK(try_take(BLOCK, stream == NULL ? NULL : (nrm_stream *)stream));
    CHECK_NE(cuda.cuStreamEndCapture(handle_of(stream), &graph), NRM_CUDA_SUCCESS);
    CHECK(graph == NULL);
}

TEST_EACH(a_capture_that_fails_gives_everything_back, kinds)
{
    start(3 * BLOCK);
    nrm_stream *stream = row->create();
    void *before = take(BLOCK, stream);
    begin(row, stream);
    void *inside = take(BLOCK, stream);
    write_on(stream, inside, VALUE);
    give(inside, stream);
    give(before, stream);
    break_capture(stream);
    if (row->is_announced) {
        nrm_capture_end();
    }
    CHECK_OK(try_take(3 * BLOCK, NULL));
    drop_stream(stream);
    finish();
}

TEST(a_stream_destroyed_in_its_capture_gives_everything_back)
{
    start(BLOCK);
    nrm_stream *stream = others_stream();
    begin_capture(stream, GLOBAL);
    void *ptr = take(BLOCK, stream);
    give(ptr, stream);
    drop_stream(stream);
    CHECK_OK(try_take(BLOCK, NULL));
    finish();
}

TEST(a_pool_lives_as_long_as_a_graph_uses_its_memory)
{
    static const struct kind kind = {"", others_stream, false, GLOBAL};
    start(N_BLOCKS * BLOCK);
    nrm_stream *stream = others_stream();
    nrm_CUgraphExec exec = capture_program(&kind, stream, true);
    nrm_resource_release(pool);
    CHECK_EQ(simulator_count(NRM_CUDASIM_DEVICE_ALLOCATIONS), 2u); /* and `seen` */
    launch(exec, stream);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(stream)), NRM_CUDA_SUCCESS);
    CHECK(have_seen(0, VALUE));
    CHECK_EQ(cuda.cuGraphExecDestroy(exec), NRM_CUDA_SUCCESS);
    nrm__captures_reap();
    CHECK_EQ(simulator_count(NRM_CUDASIM_DEVICE_ALLOCATIONS), 1u);
    drop_stream(stream);
    leave_device();
}

TEST(the_reset_of_a_context_ends_its_graphs)
{
    start(BLOCK);
    nrm_stream *stream = others_stream();
    begin_capture(stream, GLOBAL);
    void *ptr = take(BLOCK, stream);
    give(ptr, stream);
    (void)end_capture(stream);
    nrm_stream_release(stream);
    CHECK_EQ(cuda.cuDevicePrimaryCtxReset(0), NRM_CUDA_SUCCESS);
    make_current(0);
    (void)nrm__cuda_generation(0);
    nrm__captures_reap();
    CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    CHECK_EQ(parked_nbytes(pool), 0);
    nrm_resource_release(pool);
    cuda.cuCtxSetCurrent(NULL);
    simulator_check_faults();
}

CHECK_MAIN
