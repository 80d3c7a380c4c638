/* A pool of device memory and streams that are captured into graphs, on the simulated driver:
   programs that allocate and free inside a capture, launch the graph when the memory's
   owners have long let go of it, and compare bytes. */
#include <pthread.h>
#include <string.h>

#include "core/capture.h"
#include "cuda/event.h"
#include "device_pool.h"

#define GLOBAL NRM_CU_STREAM_CAPTURE_MODE_GLOBAL
#define THREAD_LOCAL NRM_CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
#define RELAXED NRM_CU_STREAM_CAPTURE_MODE_RELAXED

enum { N_SEEN = 8, N_BLOCKS = 8, N_LAUNCHES = 100, VALUE = 7 };

/* ---- the program ---- */

static nrm_resource *
pool_of(size_t nbytes)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    nrm_resource *source = NULL, *mr = NULL;
    options.initial_nbytes = options.maximum_nbytes = nbytes;
    options.on_exhausted = NRM_ON_EXHAUSTED_ERROR;
    options.wait_limit_ns = 5 * 1000 * 1000;
    CHECK_OK(nrm_device_create(NULL, &source));
    CHECK_OK(nrm_pool_create(source, &options, &mr));
    nrm_resource_release(source);
    return mr;
}

static void
start_machine(const struct nrm_cudasim_config *config, size_t nbytes)
{
    start_device(config, N_SEEN);
    nrm__cuda_capture_lift(-1);
    pool = pool_of(nbytes);
}

/* A pool that has `nbytes` and gets no more; 0: it grows. */
static void
start(size_t nbytes)
{
    start_machine(NULL, nbytes);
}

/* Everything went back, whatever graphs there were. */
static void
finish(void)
{
    empty_pool();
    CHECK_EQ(nrm__captures_n_alive(), 0u);
    CHECK_EQ(atomic_load(&nrm__captures_known), 0u);
    stop();
    CHECK_EQ(simulator_count(NRM_CUDASIM_GRAPHS), 0u);
}

static nrm_CUdeviceptr
address(const void *ptr)
{
    return (nrm_CUdeviceptr)(uintptr_t)ptr;
}

static void
copy_on(const nrm_stream *stream, void *to, const void *from)
{
    CHECK_EQ(cuda.cuMemcpyAsync(address(to), address(from), BLOCK, handle_of(stream)),
             NRM_CUDA_SUCCESS);
}

static bool
is_all(nrm_CUdeviceptr ptr, unsigned char value)
{
    unsigned char bytes[BLOCK];
    CHECK_EQ(cuda.cuMemcpyDtoH(bytes, ptr, BLOCK), NRM_CUDA_SUCCESS);
    return bytes[0] == value && memcmp(bytes, bytes + 1, BLOCK - 1) == 0;
}

/* What graphs have read; without a synchronisation, which a capture elsewhere would not
   survive. */
static bool
have_seen(int i, unsigned char value)
{
    return is_all(seen + (size_t)i * BLOCK, value);
}

static void
begin_capture(const nrm_stream *stream, int mode)
{
    CHECK_EQ(cuda.cuStreamBeginCapture(handle_of(stream),
                                       (nrm_CUstreamCaptureMode)mode),
             NRM_CUDA_SUCCESS);
}

static nrm_CUgraph
end_capture(const nrm_stream *stream)
{
    nrm_CUgraph graph = NULL;
    CHECK_EQ(cuda.cuStreamEndCapture(handle_of(stream), &graph), NRM_CUDA_SUCCESS);
    return graph;
}

static nrm_CUgraphExec
instantiate(nrm_CUgraph graph)
{
    nrm_CUgraphExec exec = NULL;
    CHECK_EQ(cuda.cuGraphInstantiateWithFlags(&exec, graph, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    return exec;
}

static void
launch(nrm_CUgraphExec exec, const nrm_stream *stream)
{
    CHECK_EQ(cuda.cuGraphLaunch(exec, handle_of(stream)), NRM_CUDA_SUCCESS);
}

static int64_t
parked_nbytes(void)
{
    nrm_statistics statistics = {0};
    CHECK_OK(nrm_resource_statistics(pool, &statistics));
    return statistics.parked_bytes;
}

/* ---- the streams ---- */

static nrm_stream *
others_stream(void)
{
    return bare_stream(new_handle());
}

static nrm_stream *
per_thread_stream(void)
{
    nrm_stream *stream = NULL;
    CHECK_OK(nrm_stream_per_thread(&stream));
    return stream;
}

static void
drop_stream(nrm_stream *stream)
{
    nrm_CUstream handle = handle_of(stream);
    bool is_bare = !nrm__stream_stays(stream);
    nrm_stream_release(stream);
    if (is_bare) {
        CHECK_EQ(cuda.cuStreamDestroy(handle), NRM_CUDA_SUCCESS);
    }
}

static const struct kind {
    const char *name;
    nrm_stream *(*create)(void);
    bool is_announced;
    int mode;
} kinds[] = {
    {"others_global", others_stream, false, GLOBAL},
    {"others_thread_local", others_stream, false, THREAD_LOCAL},
    {"others_relaxed", others_stream, false, RELAXED},
    {"others_announced", others_stream, true, GLOBAL},
    {"kept_global", new_stream, true, GLOBAL},
    {"kept_thread_local", new_stream, true, THREAD_LOCAL},
    {"kept_relaxed", new_stream, true, RELAXED},
    {"per_thread_global", per_thread_stream, true, GLOBAL},
    {"per_thread_thread_local", per_thread_stream, true, THREAD_LOCAL},
    {"per_thread_relaxed", per_thread_stream, true, RELAXED},
};

static void
begin(const struct kind *kind, const nrm_stream *stream)
{
    if (kind->is_announced) {
        nrm_capture_begin();
    }
    begin_capture(stream, kind->mode);
}

static nrm_CUgraph
end(const struct kind *kind, const nrm_stream *stream)
{
    nrm_CUgraph graph = end_capture(stream);
    if (kind->is_announced) {
        nrm_capture_end();
    }
    return graph;
}

/* ---- graphs that are launched when the owners of their memory have gone ---- */

/* A graph that fills a block, copies it to another one and that to a place of `seen`. The
   blocks are freed inside the capture, or after it. */
static nrm_CUgraphExec
capture_program(const struct kind *kind, nrm_stream *stream, bool frees_inside)
{
    begin(kind, stream);
    void *first = take(BLOCK, stream), *second = take(BLOCK, stream);
    write_on(stream, first, VALUE);
    copy_on(stream, second, first);
    read_on(stream, second, 0);
    if (frees_inside) {
        give(first, stream);
        give(second, stream);
    }
    nrm_CUgraphExec exec = instantiate(end(kind, stream));
    if (!frees_inside) {
        give(first, stream);
        give(second, stream);
    }
    return exec;
}

/* Launches it while others take whatever memory they get, write to it behind a hold, and
   find their own bytes there. Returns how often there were wrong ones. */
static int
launch_among_others(nrm_CUgraphExec exec, nrm_stream *stream, int n)
{
    int n_wrong = 0;
    nrm_stream *other = others_stream();
    for (int i = 0; i < n; i++) {
        unsigned char value = (unsigned char)(10 + i);
        void *blocks[N_BLOCKS] = {NULL};
        int n_blocks = 0;
        while (n_blocks < N_BLOCKS &&
               nrm_resource_allocate(pool, BLOCK, 0, other, &blocks[n_blocks]) ==
                   NRM_OK) {
            write_on(other, blocks[n_blocks++], value);
        }
        CHECK_EQ(cuda.cuStreamSynchronize(handle_of(other)), NRM_CUDA_SUCCESS);
        CHECK_EQ(cuda.cuMemsetD8(seen, 0, BLOCK), NRM_CUDA_SUCCESS);
        launch(exec, stream);
        CHECK_EQ(cuda.cuStreamSynchronize(handle_of(stream)), NRM_CUDA_SUCCESS);
        bool is_right = have_seen(0, VALUE);
        for (int k = 0; k < n_blocks; k++) {
            is_right = is_all(address(blocks[k]), value) && is_right;
            give(blocks[k], other);
        }
        n_wrong += !is_right;
    }
    drop_stream(other);
    return n_wrong;
}

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

/* What the two above prove: the same program finds wrong bytes where nobody knows of the
   capture, as on a stream that stays and was not announced. */
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

/* ---- inside a capture ---- */

TEST_EACH(a_capture_uses_its_own_memory_again_on_the_same_stream, kinds)
{
    start(0);
    nrm_stream *stream = row->create(), *other = others_stream();
    begin(row, stream);
    void *ptr = take(BLOCK, stream);
    give(ptr, stream);
    CHECK(take(BLOCK, stream) == ptr);
    give(ptr, stream);
    void *elsewhere = take(BLOCK, other);
    CHECK(elsewhere != ptr);
    nrm_CUgraph graph = end(row, stream);
    CHECK_EQ(parked_nbytes(), (int64_t)BLOCK);
    void *again = take(BLOCK, stream);
    CHECK(again != ptr);
    give(again, stream);
    give(elsewhere, other);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    drop_stream(stream);
    drop_stream(other);
    finish();
}

/* Two of its blocks become one, and a part of that goes out again. */
TEST(what_a_capture_has_freed_merges_and_is_cut)
{
    start(0);
    nrm_stream *stream = others_stream();
    begin_capture(stream, GLOBAL);
    char *first = take(BLOCK, stream), *second = take(BLOCK, stream);
    CHECK(second == first + BLOCK);
    give(first, stream);
    give(second, stream);
    CHECK(take(2 * BLOCK, stream) == first);
    give(first, stream);
    CHECK(take(BLOCK / 2, stream) == first);
    give(first, stream);
    nrm_CUgraph graph = end_capture(stream);
    CHECK_EQ(parked_nbytes(), (int64_t)(2 * BLOCK));
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    drop_stream(stream);
    finish();
}

/* A stream that was forked into the capture. */
TEST(two_streams_of_a_capture_do_not_share)
{
    start(0);
    nrm_stream *a = others_stream(), *b = others_stream();
    nrm_CUevent event = NULL;
    CHECK_EQ(cuda.cuEventCreate(&event, 0), NRM_CUDA_SUCCESS);
    begin_capture(a, GLOBAL);
    void *ptr = take(BLOCK, a);
    give(ptr, a);
    CHECK_EQ(cuda.cuEventRecord(event, handle_of(a)), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamWaitEvent(handle_of(b), event, 0), NRM_CUDA_SUCCESS);
    void *of_b = take(BLOCK, b);
    CHECK(of_b != ptr);
    write_on(b, of_b, 1);
    give(of_b, b);
    CHECK(take(BLOCK, a) == ptr);
    give(ptr, a);
    CHECK_EQ(cuda.cuEventRecord(event, handle_of(b)), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamWaitEvent(handle_of(a), event, 0), NRM_CUDA_SUCCESS);
    nrm_CUgraph graph = end_capture(a);
    CHECK_EQ(parked_nbytes(), (int64_t)(2 * BLOCK));
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuEventDestroy(event), NRM_CUDA_SUCCESS);
    drop_stream(a);
    drop_stream(b);
    finish();
}

/* Work of the stream from before the capture is not before the launch of the graph. */
TEST_EACH(what_the_stream_freed_before_is_not_the_captures, kinds)
{
    start(0);
    nrm_stream *stream = row->create();
    void *ptr = take(BLOCK, stream);
    hold(stream);
    read_on(stream, ptr, 0);
    give(ptr, stream);
    begin(row, stream);
    void *other = take(BLOCK, stream);
    CHECK(other != ptr);
    give(other, stream);
    nrm_CUgraph graph = end(row, stream);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    let_go(stream);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    drop_stream(stream);
    finish();
}

/* ---- nothing breaks a capture ---- */

TEST_EACH(a_capture_survives_growth_and_what_others_wait_for, kinds)
{
    start(0);
    nrm_stream *stream = row->create(), *a = new_stream(), *b = others_stream();
    void *of_a = take(BLOCK, a), *of_b = take(BLOCK, b), *of_host = take(BLOCK, NULL);
    size_t nbytes = (size_t)reserved_nbytes(pool);
    hold(a);
    read_on(a, of_a, 1);
    begin(row, stream);
    give(of_a, a);
    give(of_b, b);
    give(of_host, NULL);
    void *ptr = take(nbytes, stream); /* more than is free */
    write_on(stream, ptr, VALUE);
    give(ptr, stream);
    nrm_CUgraph graph = end(row, stream);
    CHECK_EQ(sim.call_count("cuCtxRecordEvent"), 0u);
    let_go(a);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    nrm_stream_release(a);
    drop_stream(b);
    drop_stream(stream);
    finish();
}

/* The pool is full, of what the host has freed and another stream: the driver is asked,
   but no context is recorded on. */
TEST_EACH(a_capture_survives_an_allocation_that_fails, kinds)
{
    start(2 * BLOCK);
    nrm_stream *stream = row->create(), *a = new_stream();
    void *of_a = take(BLOCK, a), *of_host = take(BLOCK, NULL);
    hold(a);
    read_on(a, of_a, 1);
    begin(row, stream);
    give(of_a, a);
    give(of_host, NULL);
    CHECK_STATUS(try_take(2 * BLOCK, stream), NRM_OUT_OF_MEMORY);
    CHECK_STR_HAS(nrm_last_error()->message, "the pool is full");
    nrm_CUgraph graph = end(row, stream);
    CHECK_EQ(sim.call_count("cuCtxRecordEvent"), 0u);
    let_go(a);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    nrm_stream_release(a);
    drop_stream(stream);
    finish();
}

TEST(what_is_done_is_found_before_an_allocation_fails)
{
    start(2 * BLOCK);
    nrm_stream *stream = others_stream(), *a = new_stream();
    void *first = take(BLOCK, a), *second = take(BLOCK, a);
    begin_capture(stream, GLOBAL);
    give(first, a);
    give(second, a);
    void *ptr = take(BLOCK, stream);
    give(ptr, stream);
    nrm_CUgraph graph = end_capture(stream);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    nrm_stream_release(a);
    drop_stream(stream);
    finish();
}

TEST(nothing_is_recorded_on_a_context_while_a_capture_is_announced)
{
    struct nrm__cuda_event event;
    start(0);
    nrm_capture_begin();
    CHECK_EQ(nrm__cuda_record(0, &event), NRM__RECORD_CAPTURE);
    nrm_capture_begin();
    nrm_capture_end();
    CHECK_EQ(nrm__cuda_record(0, &event), NRM__RECORD_CAPTURE);
    nrm_capture_end();
    CHECK_EQ(nrm__cuda_record(0, &event), NRM__RECORDED);
    nrm__cuda_event_recycle(&event);
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
    CHECK_EQ(parked_nbytes(), (int64_t)BLOCK);
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
    CHECK_EQ(parked_nbytes(), (int64_t)BLOCK);
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
    CHECK_EQ(parked_nbytes(), 0);
    nrm_resource_release(pool);
    cuda.cuCtxSetCurrent(NULL);
    simulator_check_faults();
}

/* ---- who asks the driver ---- */

TEST(a_stream_that_stays_is_not_asked_about)
{
    start(0);
    nrm_stream *stream = per_thread_stream();
    void *ptr = take(BLOCK, stream);
    give(ptr, stream);
    uint64_t before = sim.call_count(NULL);
    CHECK(take(BLOCK, stream) == ptr);
    give(ptr, stream);
    CHECK_EQ(sim.call_count(NULL), before);
    nrm_stream_release(stream);
    finish();
}

TEST(a_stream_of_others_is_asked_about_each_time)
{
    start(0);
    nrm_stream *stream = others_stream();
    give(take(BLOCK, stream), stream);
    give(take(BLOCK, stream), stream);
    uint64_t before = sim.call_count("cuStreamIsCapturing");
    void *ptr = take(BLOCK, stream);
    CHECK_EQ(sim.call_count("cuStreamIsCapturing"), before + 1);
    give(ptr, stream);
    CHECK_EQ(sim.call_count("cuStreamIsCapturing"), before + 2);
    CHECK_EQ(sim.call_count("cuStreamGetCaptureInfo"), 0u);
    drop_stream(stream);
    finish();
}

/* Nobody has announced it, but there was no memory at hand. */
TEST(a_capture_is_found_out_where_memory_is_searched)
{
    start(0);
    nrm_stream *stream = per_thread_stream();
    begin_capture(stream, THREAD_LOCAL);
    void *ptr = take((size_t)reserved_nbytes(pool) + 1, stream);
    CHECK_EQ(nrm__captures_n_alive(), 1u);
    CHECK(nrm__stream_may_capture(stream));
    give(ptr, stream);
    void *second = take(BLOCK, stream);
    give(second, stream);
    nrm_CUgraph graph = end_capture(stream);
    void *third = take(BLOCK, stream);
    CHECK(third != second);
    CHECK(!nrm__stream_may_capture(stream));
    give(third, stream);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    nrm_stream_release(stream);
    finish();
}

/* ---- drivers that cannot do it ---- */

static const struct lack {
    const char *name;
    const char *call; /* that fails; NULL: the driver is older */
    bool comes_back;
} lacks[] = {
    {"no_info", NULL, false},
    {"no_user_object", "cuUserObjectCreate", false},
    {"no_retain", "cuGraphRetainUserObject", false},
};

TEST_EACH(without_user_objects_the_memory_stays_with_the_pool, lacks)
{
    static const struct kind kind = {"", others_stream, false, GLOBAL};
    struct nrm_cudasim_config config = simulator_config();
    config.driver = row->call == NULL ? 12020 : config.driver;
    start_machine(&config, N_BLOCKS * BLOCK);
    if (row->call != NULL) {
        CHECK_EQ(sim.fail(row->call, 1, NRM_CUDA_ERROR_NOT_SUPPORTED, 0), 0);
    }
    nrm_stream *stream = others_stream();
    nrm_CUgraphExec exec = capture_program(&kind, stream, true);
    CHECK_EQ(launch_among_others(exec, stream, 3), 0);
    CHECK_EQ(cuda.cuGraphExecDestroy(exec), NRM_CUDA_SUCCESS);
    CHECK_STATUS(try_take(N_BLOCKS * BLOCK, NULL), NRM_OUT_OF_MEMORY);
    CHECK_EQ(parked_nbytes(), (int64_t)(2 * BLOCK));
    nrm_resource_release(pool);
    CHECK_EQ(nrm__captures_n_alive(), 0u);
    drop_stream(stream);
    leave_device();
}

/* ---- two captures at once ---- */

static void *
capture_and_launch(void *argument)
{
    static const struct kind kind = {"", others_stream, false, THREAD_LOCAL};
    int number = *(int *)argument;
    make_current(0);
    nrm_stream *stream = others_stream();
    for (int round = 0; round < 20; round++) {
        begin(&kind, stream);
        void *first = take(BLOCK, stream), *second = take(BLOCK, stream);
        write_on(stream, first, (unsigned char)(number + 1));
        copy_on(stream, second, first);
        read_on(stream, second, number);
        give(first, stream);
        give(second, stream);
        give(take(BLOCK, stream), stream);
        nrm_CUgraphExec exec = instantiate(end(&kind, stream));
        for (int i = 0; i < 3; i++) {
            launch(exec, stream);
            CHECK_EQ(cuda.cuStreamSynchronize(handle_of(stream)), NRM_CUDA_SUCCESS);
            CHECK(have_seen(number, (unsigned char)(number + 1)));
        }
        CHECK_EQ(cuda.cuGraphExecDestroy(exec), NRM_CUDA_SUCCESS);
    }
    drop_stream(stream);
    cuda.cuCtxSetCurrent(NULL);
    return NULL;
}

TEST(two_threads_capture_at_once)
{
    pthread_t threads[2];
    int numbers[2] = {1, 2};
    start(0);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, capture_and_launch, &numbers[i]), 0);
    }
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
    }
    finish();
}

CHECK_MAIN
