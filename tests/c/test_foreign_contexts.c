/* Device memory in contexts that are not primary: what was freed becomes done when the
   work there is, on whatever stream it was freed, and nothing waits for work that there
   cannot be. */
#include "foreign_pool.h"

TEST_EACH(what_is_freed_becomes_done_without_a_wait, ways)
{
    start(0, 0);
    nrm_stream *stream = stream_for(row->on);
    give(take(BLOCK, stream), stream);
    uint64_t before = nrm__clock_ns();
    CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    CHECK_LE(nrm__clock_ns() - before, SHORT_NS);
    CHECK_EQ(reserved_nbytes(pool), 0);
    give(take(BLOCK, stream), stream);
    nrm_stream_release(stream);
    finish();
    CHECK(!has_primary());
    end_context();
}

TEST_EACH(another_stream_gets_it_when_the_work_is_done, ways)
{
    start(1, 2);
    nrm_stream *stream = stream_for(row->on), *other = bare_stream(new_handle());
    void *ptr = free_in_use(stream);
    void *meanwhile = take(BLOCK, other);
    CHECK(meanwhile != ptr);
    write_on(other, meanwhile, 9);
    let_run();
    let_finish();
    CHECK(has_seen(0, 7));
    void *later = take(BLOCK, other);
    CHECK(later == ptr);
    give(later, other);
    give(meanwhile, other);
    nrm_stream_release(stream);
    nrm_stream_release(other);
    finish();
    CHECK(!has_primary());
    end_context();
}

/* The pool is full: either it is refused, or the stream waits. */
TEST_EACH(nobody_gets_it_before_without_a_wait, ways)
{
    start(1, 1);
    nrm_stream *stream = stream_for(row->on), *other = bare_stream(new_handle());
    void *ptr = free_in_use(stream), *again = NULL;
    nrm_status status = nrm_resource_allocate(pool, BLOCK, 0, other, &again);
    if (status == NRM_OK) {
        CHECK(again == ptr);
        write_on(other, again, 9);
    }
    else {
        CHECK_EQ(status, NRM_OUT_OF_MEMORY);
    }
    let_run();
    let_finish();
    CHECK(has_seen(0, 7));
    if (status == NRM_OK) {
        give(again, other);
    }
    nrm_stream_release(stream);
    nrm_stream_release(other);
    finish();
    end_context();
}

/* The driver does not wait when a piece is unmapped. */
TEST_EACH(the_end_of_a_pool_waits_for_the_work, ways)
{
    pthread_t thread;
    start(0, 0);
    nrm_stream *stream = stream_for(row->on);
    (void)free_in_use(stream);
    CHECK_EQ(pthread_create(&thread, NULL, simulator_release_later, aside), 0);
    finish();
    pthread_join(thread, NULL);
    CHECK(has_seen(0, 7));
    nrm_stream_release(stream);
    end_context();
}

/* ---- beside other contexts ---- */

/* Nothing was ever allocated there. */
TEST(memory_that_goes_back_on_a_stream_of_another_context)
{
    start(0, 0);
    nrm_resource_release(pool);
    nrm_stream *stream = stream_for(ON_THEIRS);
    make_current(0);
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    options.initial_nbytes = BLOCK;
    options.maximum_nbytes = 2 * BLOCK;
    nrm_resource *upstream = device_source();
    CHECK_OK(nrm_pool_create(upstream, &options, &pool));
    nrm_resource_release(upstream);
    nrm_stream *other = new_stream();
    void *ptr = take(BLOCK, other);
    CHECK_EQ(cuda.cuCtxSetCurrent(own), NRM_CUDA_SUCCESS);
    use_behind_aside(ptr, stream);
    make_current(0);
    give(ptr, stream);
    void *meanwhile = take(BLOCK, other);
    CHECK(meanwhile != ptr);
    CHECK_EQ(sim.release_stream(aside), 0);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(stream)), NRM_CUDA_SUCCESS);
    void *later = take(BLOCK, other);
    CHECK(later == ptr);
    give(later, other);
    give(meanwhile, other);
    nrm_stream_release(stream);
    nrm_stream_release(other);
    finish();
    end_context();
}

TEST_EACH(a_primary_context_that_comes_later_says_nothing_about_it, ways)
{
    start(1, 2);
    nrm_stream *stream = stream_for(row->on);
    void *ptr = free_in_use(stream);
    make_current(0);
    nrm_stream *other = new_stream();
    void *meanwhile = take(BLOCK, other);
    CHECK(meanwhile != ptr);
    give(meanwhile, other);
    CHECK_EQ(cuda.cuCtxSetCurrent(own), NRM_CUDA_SUCCESS);
    let_run();
    let_finish();
    CHECK(has_seen(0, 7));
    nrm_stream_release(stream);
    nrm_stream_release(other);
    finish();
    end_context();
    CHECK_EQ(cuda.cuDevicePrimaryCtxRelease(0), NRM_CUDA_SUCCESS);
}

/* Each has a default stream, and one handle for it. */
TEST(a_default_stream_of_another_context_is_another_stream)
{
    for (size_t n_last = 1; n_last <= 2; n_last++) {
        start(1, n_last);
        void *ptr = free_in_use(nrm_stream_default()), *again = NULL;
        nrm_CUcontext second = new_context();
        nrm_status status =
            nrm_resource_allocate(pool, BLOCK, 0, nrm_stream_default(), &again);
        CHECK_EQ(status, NRM_OK);
        CHECK((again == ptr) == (n_last == 1)); /* then it waits on the device */
        write_on_handle(NULL, again, 9);
        let_run();
        CHECK_EQ(sim.release_stream(aside), 0);
        CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
        CHECK_EQ(cuda.cuCtxSetCurrent(own), NRM_CUDA_SUCCESS);
        CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
        CHECK(has_seen(0, 7));
        give(again, nrm_stream_default());
        finish();
        end_context();
        CHECK_EQ(cuda.cuCtxDestroy(second), NRM_CUDA_SUCCESS);
    }
}

static void *
end_pool(void *unused)
{
    (void)unused;
    nrm_resource_release(pool);
    return NULL;
}

/* As garbage may be found anywhere. */
TEST_EACH(a_thread_without_a_context_ends_the_pool, ways)
{
    pthread_t thread;
    start(0, 0);
    nrm_stream *stream = stream_for(row->on);
    give(take(BLOCK, stream), stream);
    uint64_t before = nrm__clock_ns();
    CHECK_EQ(pthread_create(&thread, NULL, end_pool, NULL), 0);
    pthread_join(thread, NULL);
    CHECK_LE(nrm__clock_ns() - before, SHORT_NS);
    CHECK_EQ(simulator_count(NRM_CUDASIM_PHYSICAL), 0u);
    CHECK(!has_primary());
    nrm_stream_release(stream);
    end_context();
}

/* The background thread has no context, and makes none. */
TEST(growth_ahead_of_demand_makes_no_primary_context)
{
    enum { MANY = 40 };
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    void *ptrs[MANY];
    start(0, 0);
    nrm_resource_release(pool);
    nrm_resource *upstream = device_source();
    options.grow_ahead = true;
    CHECK_OK(nrm_pool_create(upstream, &options, &pool));
    nrm_resource_release(upstream);
    for (int i = 0; i < MANY; i++) {
        ptrs[i] = take((size_t)1 << 20, NULL);
    }
    nrm__sleep_ns(150000000);
    CHECK(!has_primary());
    for (int i = 0; i < MANY; i++) {
        give(ptrs[i], NULL);
    }
    finish();
    CHECK(!has_primary());
    end_context();
}

/* ---- captures ---- */

TEST_EACH(a_capture_in_their_context_is_left_alone, ways)
{
    start(1, 2);
    nrm_stream *stream = stream_for(row->on), *other = bare_stream(new_handle());
    give(take(BLOCK, stream), stream);
    nrm_CUstream captured = simulator_begin_capture(0, 0);
    void *ptr = take(BLOCK, other);
    CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    CHECK_EQ(simulator_end_capture(captured), NRM_CUDA_SUCCESS);
    give(ptr, other);
    nrm_stream_release(stream);
    nrm_stream_release(other);
    finish();
    end_context();
}

/* What is freed by the host waits for an event of the whole context, which no stream of
   it may see while it is captured. */
TEST(a_capture_that_was_announced_is_left_alone)
{
    start(1, 1);
    give(take(BLOCK, NULL), NULL);
    nrm_capture_begin();
    nrm_CUstream captured = simulator_begin_capture(NRM_CU_STREAM_NON_BLOCKING, 0);
    CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    CHECK_EQ(simulator_end_capture(captured), NRM_CUDA_SUCCESS);
    nrm_capture_end();
    finish();
    end_context();
}

TEST(one_capture_of_a_context_is_broken_and_no_more)
{
    start(1, 1);
    give(take(BLOCK, NULL), NULL);
    for (int i = 0; i < 3; i++) {
        nrm_CUstream captured = simulator_begin_capture(NRM_CU_STREAM_NON_BLOCKING, 0);
        CHECK_OK(nrm_resource_trim(pool, 0, NULL));
        nrm_CUresult code = simulator_end_capture(captured);
        CHECK_EQ(code,
                 i == 0 ? NRM_CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : NRM_CUDA_SUCCESS);
    }
    CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    CHECK(reserved_nbytes(pool) != 0); /* until somebody says that there are none */
    nrm_capture_begin();
    nrm_capture_end();
    CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    CHECK_EQ(reserved_nbytes(pool), 0);
    finish();
    end_context();
}

/* ---- when it cannot be recorded ---- */

static const struct {
    const char *name;
    const char *call;
    int error;
    int driver;
} failures[] = {
    {"no_event", "cuEventCreate", NRM_CUDA_ERROR_OUT_OF_MEMORY, 13000},
    {"no_record_on_a_stream", "cuEventRecord", NRM_CUDA_ERROR_NOT_PERMITTED, 13000},
    {"no_record_on_a_context", "cuCtxRecordEvent", NRM_CUDA_ERROR_NOT_PERMITTED, 13000},
    {"contexts_that_are_not_recorded_on", "cuCtxRecordEvent",
     NRM_CUDA_ERROR_INVALID_HANDLE, 13000},
    {"a_driver_that_records_on_none", NULL, 0, 12000},
};

TEST_EACH(what_is_not_known_to_be_done_stays, failures)
{
    struct nrm_cudasim_config config = simulator_config();
    config.driver = row->driver;
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        start_on(&config, 1, 1);
        nrm_stream *stream = stream_for(ways[i].on);
        void *ptr = take(BLOCK, stream);
        give(ptr, stream);
        if (row->call != NULL) {
            sim.fail(row->call, 1, row->error, 0);
        }
        CHECK_OK(nrm_resource_trim(pool, 0, NULL)); /* whether it is done or not */
        if (row->call != NULL) {
            sim.fail(row->call, 1, 0, 0);
        }
        CHECK_OK(nrm_resource_trim(pool, 0, NULL));
        CHECK_EQ(reserved_nbytes(pool), 0);
        nrm_stream_release(stream);
        finish();
        CHECK(!has_primary());
        end_context();
    }
}

/* Without a wait of a thread: what is not recorded is not done. */
TEST(work_that_cannot_be_recorded_keeps_its_memory)
{
    static const enum freed_on on[] = {ON_DEFAULT, ON_THEIRS, ON_OURS, BY_HOST};
    for (size_t i = 0; i < sizeof on / sizeof *on; i++) {
        start(1, 2);
        nrm_stream *stream = stream_for(on[i]), *other = bare_stream(new_handle());
        void *ptr = take(BLOCK, stream);
        use_behind_aside(ptr, stream);
        sim.fail("cuEventCreate", 1, NRM_CUDA_ERROR_OUT_OF_MEMORY, 0);
        give(ptr, stream);
        void *meanwhile = take(BLOCK, other);
        CHECK(meanwhile != ptr);
        CHECK_EQ(try_take(BLOCK, other), NRM_OUT_OF_MEMORY);
        sim.fail("cuEventCreate", 1, 0, 0);
        let_finish();
        CHECK_OK(try_take(BLOCK, other));
        give(meanwhile, other);
        nrm_stream_release(stream);
        nrm_stream_release(other);
        finish();
        end_context();
    }
}

CHECK_MAIN
