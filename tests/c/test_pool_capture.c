/* A pool of device memory and streams that are captured into graphs, on the simulated
   driver: what is allocated and freed inside a capture, and that nothing breaks one.
   What is launched later is in test_pool_capture_held.c. */
#include <pthread.h>

#include "captured_pool.h"
#include "core/capture.h"
#include "cuda/event.h"
#include "device_pool.h"

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
    CHECK_EQ(parked_nbytes(pool), (int64_t)BLOCK);
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
    CHECK_EQ(parked_nbytes(pool), (int64_t)(2 * BLOCK));
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
    CHECK_EQ(parked_nbytes(pool), (int64_t)(2 * BLOCK));
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

TEST(an_end_while_none_has_begun_does_nothing)
{
    struct nrm__cuda_event event;
    start(0);
    nrm_capture_end();
    REQUIRE_EQ(nrm__cuda_record(0, &event), NRM__RECORDED);
    nrm__cuda_event_recycle(&event);
    nrm_capture_begin();
    CHECK_EQ(nrm__cuda_record(0, &event), NRM__RECORD_CAPTURE);
    nrm_capture_end();
    finish();
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
    CHECK_EQ(parked_nbytes(pool), (int64_t)(2 * BLOCK));
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
