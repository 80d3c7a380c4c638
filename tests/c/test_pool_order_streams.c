/* What becomes of the blocks of a device pool when streams go away, are stuck, captured
   or those of threads, when memory was handed out too early once, and when the pool is
   full or the driver fails. The programs are as in test_pool_order.c. */
#include <pthread.h>

#include "device_pool.h"
#include "ordered_pool.h"

#define FOREVER NRM_ON_EXHAUSTED_WAIT

/* ---- schedules by which memory was handed out too early ---- */

/* RMM 2489: B has recorded before, takes over what A has freed, and C looks at B's
   event. */
TEST(what_was_merged_into_a_list_after_its_event_is_not_covered_by_it)
{
    start(2 * BLOCK);
    nrm_stream *a = new_stream(), *b = new_stream(), *c = new_stream();
    void *first = take(BLOCK, b), *second = take(BLOCK, b);
    hold(b);
    write_on(b, second, 1);
    give(second, b);
    void *third = take(BLOCK, c); /* B's event; C has the second block */
    CHECK(third == second);
    let_go(b);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    give(first, b);
    first = use_and_free(a, 0, a);
    void *again = take(BLOCK, b); /* B waits for A ... */
    CHECK(again == first);
    give(again, b); /* ... and the block joins B's list */
    again = take(BLOCK, c);
    CHECK(again == first);
    write_on(c, again, 9);
    let_run();
    let_go(a);
    CHECK(has_seen(0, 7));
    give(again, c);
    give(third, c);
    nrm_stream_release(a);
    nrm_stream_release(b);
    nrm_stream_release(c);
    stop();
}

TEST(what_comes_back_after_a_wait_starts_a_new_count)
{
    start(BLOCK);
    nrm_stream *a = new_stream(), *b = new_stream(), *c = new_stream();
    hold(a);
    void *ptr = take(BLOCK, a);
    write_on(a, ptr, 1);
    give(ptr, a);
    ptr = take(BLOCK, b); /* records on A */
    let_go(a);
    write_on(b, ptr, 7);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(b)), NRM_CUDA_SUCCESS);
    hold(b);
    read_on(b, ptr, 0);
    give(ptr, b);
    ptr = take(BLOCK, a); /* A waits for B */
    give(ptr, a);
    ptr = take(BLOCK, c); /* A's first event says nothing about it */
    write_on(c, ptr, 9);
    let_run();
    let_go(b);
    CHECK(has_seen(0, 7));
    give(ptr, c);
    nrm_stream_release(a);
    nrm_stream_release(b);
    nrm_stream_release(c);
    stop();
}

TEST(what_is_freed_after_a_record_is_not_covered_by_it)
{
    start(2 * BLOCK);
    nrm_stream *a = new_stream(), *b = new_stream();
    void *first = take(BLOCK, a), *second = take(BLOCK, a);
    write_on(a, second, 7);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    hold(a);
    write_on(a, first, 1);
    give(first, a);
    first = take(BLOCK, b); /* records on A */
    read_on(a, second, 0);
    give(second, a);
    second = take(BLOCK, b);
    write_on(b, second, 9);
    let_run();
    let_go(a);
    CHECK(has_seen(0, 7));
    give(first, b);
    give(second, b);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

/* ---- streams that go away ---- */

/* Work on `handle` that does not begin before `aside` is let go; that is held. */
static nrm_CUevent
put_behind(nrm_CUstream handle, const nrm_stream *aside)
{
    nrm_CUevent event = NULL;
    hold(aside);
    CHECK_EQ(cuda.cuMemsetD8Async(seen + BLOCK, 0, BLOCK, handle_of(aside)),
             NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuEventCreate(&event, NRM_CU_EVENT_DISABLE_TIMING), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuEventRecord(event, handle_of(aside)), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamWaitEvent(handle, event, 0), NRM_CUDA_SUCCESS);
    return event;
}

static const struct reused {
    const char *name;
    bool is_bare;
} reused[] = {{"stream object", false}, {"bare handle", true}};

/* RMM 510: its handle is given to the next stream at once, with work pending. */
TEST_EACH(a_destroyed_streams_handle_is_another_stream, reused)
{
    start(BLOCK);
    nrm_stream *a = row->is_bare ? bare_stream(new_handle()) : new_stream();
    nrm_stream *aside = new_stream();
    nrm_CUstream handle = handle_of(a);
    void *ptr = take(BLOCK, a);
    write_on(a, ptr, 7);
    CHECK_EQ(cuda.cuStreamSynchronize(handle), NRM_CUDA_SUCCESS);
    nrm_CUevent event = put_behind(handle, aside);
    read_on(a, ptr, 0);
    give(ptr, a);
    nrm_stream_release(a);
    if (row->is_bare) {
        CHECK_EQ(cuda.cuStreamDestroy(handle), NRM_CUDA_SUCCESS);
    }
    nrm_stream *next = row->is_bare ? bare_stream(new_handle()) : new_stream();
    CHECK_EQ(handle_of(next), handle);
    ptr = take(BLOCK, next);
    write_on(next, ptr, 9);
    let_run();
    let_go(aside);
    CHECK(has_seen(0, 7));
    give(ptr, next);
    CHECK_EQ(sim.call_count("cuCtxRecordEvent"), 0u);
    CHECK_EQ(cuda.cuEventDestroy(event), NRM_CUDA_SUCCESS);
    nrm_stream_release(next);
    if (row->is_bare) {
        CHECK_EQ(cuda.cuStreamDestroy(handle), NRM_CUDA_SUCCESS);
    }
    nrm_stream_release(aside);
    stop();
}

/* A program that uses handles only must not grow with every kernel that it starts. */
TEST(a_bare_handle_gets_its_own_block_back_while_it_is_busy)
{
    start(0);
    nrm_stream *bare = bare_stream(new_handle());
    void *ptr = use_and_free(bare, 0, bare);
    int64_t nbytes = reserved_nbytes(pool);
    void *rest = take((size_t)nbytes - BLOCK, NULL);
    uint64_t records = sim.call_count("cuEventRecord");
    for (int i = 0; i < 20; i++) {
        void *again = take(BLOCK, bare);
        CHECK(again == ptr);
        write_on(bare, again, 9);
        give(again, bare);
    }
    CHECK_EQ(sim.call_count("cuEventRecord"), records);
    CHECK_EQ(reserved_nbytes(pool), nbytes);
    let_go(bare);
    CHECK(has_seen(0, 7));
    give(rest, NULL);
    CHECK_EQ(cuda.cuStreamDestroy(handle_of(bare)), NRM_CUDA_SUCCESS);
    nrm_stream_release(bare);
    stop();
}

/* As a binding makes them that knows streams of other libraries only by their
   handles. */
static nrm_stream *
object_for(nrm_CUstream handle)
{
    static int kept;
    nrm_stream *stream = NULL;
    CHECK_OK(nrm_stream_wrap((uintptr_t)handle, &kept, NULL, &stream));
    return stream;
}

static nrm_stream *
object_for_per_thread(nrm_CUstream unused)
{
    nrm_stream *stream = NULL;
    (void)unused;
    CHECK_OK(nrm_stream_per_thread(&stream));
    return stream;
}

static const struct object {
    const char *name;
    nrm_stream *(*make)(nrm_CUstream handle);
} objects[] = {
    {"of a handle", object_for},
    {"of the thread", object_for_per_thread},
};

TEST_EACH(a_new_object_for_each_call_gets_the_streams_blocks_while_it_is_busy, objects)
{
    start(0);
    nrm_CUstream handle = new_handle();
    nrm_stream *stream = row->make(handle);
    void *ptr = use_and_free(stream, 0, stream);
    int64_t nbytes = reserved_nbytes(pool);
    void *rest = take((size_t)nbytes - BLOCK, NULL);
    for (int i = 0; i < 20; i++) {
        nrm_stream *again = row->make(handle);
        CHECK(take(BLOCK, again) == ptr);
        nrm_stream_release(again);
        again = row->make(handle);
        write_on(again, ptr, 9);
        give(ptr, again);
        nrm_stream_release(again);
    }
    CHECK_EQ(reserved_nbytes(pool), nbytes);
    let_go(stream);
    CHECK(has_seen(0, 7));
    give(rest, NULL);
    nrm_stream_release(stream);
    CHECK_EQ(cuda.cuStreamDestroy(handle), NRM_CUDA_SUCCESS);
    stop();
}

/* ---- per-thread streams ---- */

static nrm_stream *others; /* of the other thread */

static void *others_ptr;

static pthread_barrier_t stage;

static void *
per_thread_main(void *unused)
{
    (void)unused;
    make_current(0);
    CHECK_OK(nrm_stream_per_thread(&others));
    others_ptr = take(BLOCK, others);
    write_on(others, others_ptr, 7);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(others)), NRM_CUDA_SUCCESS);
    hold(others);
    read_on(others, others_ptr, 0);
    pthread_barrier_wait(&stage);
    pthread_barrier_wait(&stage);
    let_go(others);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(others)), NRM_CUDA_SUCCESS);
    pthread_barrier_wait(&stage);
    return NULL;
}

TEST(a_free_on_the_per_thread_stream_of_another_thread_is_behind_its_context)
{
    pthread_t thread;
    nrm_stream *own = NULL;
    start(BLOCK);
    CHECK_OK(nrm_stream_per_thread(&own));
    pthread_barrier_init(&stage, NULL, 2);
    CHECK_EQ(pthread_create(&thread, NULL, per_thread_main, NULL), 0);
    pthread_barrier_wait(&stage);
    uint64_t before = sim.call_count(NULL);
    give(others_ptr, others);
    CHECK_EQ(sim.call_count(NULL), before);
    void *ptr = take(BLOCK, own);
    CHECK(ptr == others_ptr);
    CHECK_EQ(sim.call_count("cuEventRecord"), 0u);
    write_on(own, ptr, 9);
    let_run();
    pthread_barrier_wait(&stage);
    pthread_barrier_wait(&stage);
    CHECK(has_seen(0, 7));
    give(ptr, own);
    pthread_join(thread, NULL);
    pthread_barrier_destroy(&stage);
    nrm_stream_release(others);
    nrm_stream_release(own);
    stop();
}

/* ---- streams that are stuck, or captured ---- */

TEST(one_stuck_stream_stalls_no_other)
{
    start(4 * BLOCK);
    nrm_stream *stuck = new_stream(), *a = new_stream(), *b = new_stream();
    (void)use_and_free(stuck, 0, stuck);
    for (int i = 0; i < 20; i++) {
        nrm_stream *stream = i % 2 == 0 ? a : b;
        void *ptr = take(3 * BLOCK, stream);
        write_on(stream, ptr, 9);
        give(ptr, stream);
        CHECK_EQ(cuda.cuStreamSynchronize(handle_of(stream)), NRM_CUDA_SUCCESS);
    }
    CHECK_EQ(sim.call_count("cuStreamWaitEvent"), 0u);
    let_go(stuck);
    CHECK(has_seen(0, 7));
    nrm_stream_release(stuck);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

/* What a stream needs of another's block leaves the rest of that to the other. */
TEST(a_stuck_stream_that_waited_holds_up_only_its_own_piece)
{
    start(8 * BLOCK);
    nrm_stream *a = new_stream(), *stuck = new_stream();
    void *all = take(8 * BLOCK, a);
    hold(a);
    write_on(a, all, 1);
    give(all, a);
    hold(stuck);
    void *piece = take(BLOCK, stuck);
    write_on(stuck, piece, 2);
    give(piece, stuck);
    let_go(a);
    void *rest = take(7 * BLOCK, a);
    write_on(a, rest, 3);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(a)), NRM_CUDA_SUCCESS);
    give(rest, a);
    let_go(stuck);
    nrm_stream_release(a);
    nrm_stream_release(stuck);
    stop();
}

TEST(more_stuck_streams_than_lists_hide_nothing_that_is_done)
{
    enum { MANY = 80 };
    static nrm_stream *stuck[MANY];
    void *ptrs[MANY];
    start(((size_t)MANY + 1) * BLOCK);
    nrm_stream *a = new_stream();
    for (int i = 0; i < MANY; i++) {
        stuck[i] = new_stream();
        ptrs[i] = take(BLOCK, stuck[i]);
        hold(stuck[i]);
        write_on(stuck[i], ptrs[i], 1);
    }
    for (int i = 0; i < MANY; i++) {
        give(ptrs[i], stuck[i]);
    }
    void *last = take(BLOCK, NULL);
    give(last, NULL); /* joins the others, behind all of them */
    let_go(stuck[MANY - 1]);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(stuck[MANY - 1])), NRM_CUDA_SUCCESS);
    nrm_status status = NRM_OUT_OF_MEMORY;
    for (int i = 0; i < 20 && status != NRM_OK; i++) {
        status = try_take(BLOCK, NULL);
    }
    CHECK_OK(status);
    for (int i = 0; i < MANY - 1; i++) { /* each has its own without a wait */
        uint64_t before = sim.call_count(NULL);
        void *ptr = take(BLOCK, stuck[i]);
        CHECK_EQ(sim.call_count(NULL), before);
        give(ptr, stuck[i]);
    }
    for (int i = 0; i < MANY; i++) {
        if (i != MANY - 1) {
            let_go(stuck[i]);
        }
        nrm_stream_release(stuck[i]);
    }
    nrm_stream_release(a);
    stop();
}

TEST(a_captured_streams_block_is_passed_over)
{
    nrm_CUgraph graph = NULL;
    start(2 * BLOCK);
    nrm_stream *a = new_stream(), *b = new_stream(), *c = new_stream();
    void *first = take(BLOCK, a), *second = take(BLOCK, b);
    CHECK_EQ(cuda.cuStreamBeginCapture(handle_of(a), NRM_CU_STREAM_CAPTURE_MODE_GLOBAL),
             NRM_CUDA_SUCCESS);
    give(first, a);
    hold(b);
    write_on(b, second, 1);
    give(second, b);
    void *ptr = take(BLOCK, c);
    CHECK(ptr == second);
    CHECK_STATUS(try_take(BLOCK, c), NRM_OUT_OF_MEMORY);
    CHECK_EQ(cuda.cuStreamEndCapture(handle_of(a), &graph), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    CHECK_OK(try_take(BLOCK, c));
    let_go(b);
    give(ptr, c);
    nrm_stream_release(a);
    nrm_stream_release(b);
    nrm_stream_release(c);
    stop();
}

/* ---- full pools, failing calls, giving back ---- */

TEST(a_full_pool_waits_for_the_gpu_if_it_is_told_to)
{
    pthread_t thread;
    start_device(NULL, N_SEEN);
    pool = pool_of(device_source(), BLOCK, NRM_REUSE_DEFAULT, FOREVER);
    nrm_stream *a = new_stream();
    void *ptr = use_and_free(a, 0, a);
    CHECK_EQ(pthread_create(&thread, NULL, let_go_soon, a), 0);
    CHECK(take(BLOCK, NULL) == ptr);
    pthread_join(thread, NULL);
    give(ptr, NULL);
    CHECK_STATUS(try_take(2 * BLOCK, NULL), NRM_OUT_OF_MEMORY); /* at once */
    nrm_stream_release(a);
    stop();
}

TEST(a_wait_that_the_driver_refuses_is_an_error_and_loses_nothing)
{
    start(BLOCK);
    nrm_stream *a = new_stream(), *b = new_stream();
    (void)use_and_free(a, 0, a);
    CHECK_EQ(sim.fail("cuStreamWaitEvent", 1, NRM_CUDA_ERROR_OPERATING_SYSTEM, 1), 0);
    CHECK_STATUS(try_take(BLOCK, b), NRM_CUDA_ERROR);
    CHECK_STR_EQ(nrm_last_error()->native_name, "CUDA_ERROR_OPERATING_SYSTEM");
    CHECK_EQ(live_nbytes(pool), 0);
    void *ptr = take(BLOCK, b);
    write_on(b, ptr, 9);
    let_run();
    let_go(a);
    CHECK(has_seen(0, 7));
    give(ptr, b);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

TEST(trim_gives_back_what_is_done_and_no_more)
{
    start(BLOCK);
    nrm_stream *a = new_stream();
    (void)use_and_free(a, 0, a);
    size_t given = 0;
    CHECK_OK(nrm_resource_trim(pool, 0, &given));
    CHECK_EQ(given, 0u);
    CHECK_EQ(reserved_nbytes(pool), (int64_t)BLOCK);
    let_go(a);
    CHECK(has_seen(0, 7));
    CHECK_OK(nrm_resource_trim(pool, 0, &given));
    CHECK_EQ(given, BLOCK);
    CHECK_EQ(reserved_nbytes(pool), 0);
    nrm_stream_release(a);
    stop();
}

/* An upstream of other people, over memory of the driver, that writes to what comes
   back. */
static nrm_status
others_allocate(void *context, size_t nbytes, size_t alignment, nrm_stream *stream,
                void **out)
{
    nrm_CUdeviceptr ptr = 0;
    (void)context, (void)alignment, (void)stream;
    CHECK_EQ(cuda.cuMemAlloc(&ptr, nbytes), NRM_CUDA_SUCCESS);
    *out = (void *)(uintptr_t)ptr;
    return NRM_OK;
}

static nrm_status
others_deallocate(void *context, void *ptr, size_t nbytes, nrm_stream *stream)
{
    (void)context, (void)stream;
    nrm_stream *own = new_stream();
    CHECK_EQ(cuda.cuMemsetD8Async((nrm_CUdeviceptr)(uintptr_t)ptr, 9, nbytes,
                                  handle_of(own)),
             NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(own)), NRM_CUDA_SUCCESS);
    nrm_stream_release(own);
    CHECK_EQ(cuda.cuMemFree((nrm_CUdeviceptr)(uintptr_t)ptr), NRM_CUDA_SUCCESS);
    return NRM_OK;
}

TEST(a_pool_that_ends_gives_nothing_back_that_is_in_use)
{
    pthread_t thread;
    nrm_callback_options options = NRM_OPTIONS(nrm_callback_options);
    nrm_resource *upstream = NULL;
    start_device(NULL, N_SEEN);
    options.kind = NRM_KIND_DEVICE;
    options.allocate = others_allocate;
    options.deallocate = others_deallocate;
    CHECK_OK(nrm_callback_create(&options, &upstream));
    pool = pool_of(upstream, BLOCK, NRM_REUSE_DEFAULT, NRM_ON_EXHAUSTED_ERROR);
    nrm_stream *a = new_stream();
    (void)use_and_free(a, 0, a);
    CHECK_EQ(pthread_create(&thread, NULL, let_go_soon, a), 0);
    nrm_resource_release(pool);
    pthread_join(thread, NULL);
    CHECK(has_seen(0, 7));
    CHECK_EQ(cuda.cuMemFree(seen), NRM_CUDA_SUCCESS);
    CHECK_EQ(simulator_count(NRM_CUDASIM_DEVICE_ALLOCATIONS), 0u);
    nrm_stream_release(a);
    cuda.cuCtxSetCurrent(NULL);
    simulator_check_faults();
}

/* Memory that the host can touch: whoever has no stream is another stream. */
static const struct crossing {
    const char *name;
    bool freed_by_host, taken_by_host;
} crossings[] = {
    {"stream to host", false, true},
    {"host to stream", true, false},
    {"stream to stream", false, false},
};

TEST_EACH(pinned_memory_that_crosses_is_done, crossings)
{
    nrm_resource *source = NULL;
    start_device(NULL, N_SEEN);
    CHECK_OK(nrm_pinned_create(NULL, &source));
    pool = pool_of(source, BLOCK, NRM_REUSE_DEFAULT, NRM_ON_EXHAUSTED_ERROR);
    nrm_stream *a = new_stream(), *b = new_stream();
    (void)use_and_free(a, 0, row->freed_by_host ? NULL : a);
    nrm_stream *taker = row->taken_by_host ? NULL : b;
    CHECK_STATUS(try_take(BLOCK, taker), NRM_OUT_OF_MEMORY);
    let_go(a);
    CHECK(has_seen(0, 7));
    CHECK_OK(try_take(BLOCK, taker));
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

CHECK_MAIN
