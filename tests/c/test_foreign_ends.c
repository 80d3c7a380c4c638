/* Device memory in contexts that are not primary when something ends: such a context,
   which may at any time, a stream, a pool of the driver, the driver. */
#include "foreign_pool.h"

/* ---- the end of a context ---- */

TEST_EACH(work_ends_with_its_context, ways)
{
    start(0, 0);
    nrm_stream *stream = stream_for(row->on);
    (void)free_in_use(stream);
    CHECK_OK(nrm_resource_trim(pool, 0, NULL)); /* asks, and is told: not yet */
    end_context();
    CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    CHECK_EQ(reserved_nbytes(pool), 0);
    finish();
    nrm_stream_release(stream);
    simulator_check_faults();
}

TEST_EACH(a_context_with_the_same_handle_is_another_one, ways)
{
    start(0, 0);
    nrm_stream *stream = stream_for(row->on);
    (void)free_in_use(stream);
    CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    nrm_CUcontext before = own;
    end_context();
    own = new_context();
    CHECK(own == before);
    nrm_CUstream busy = new_handle(); /* and has events of the same handles */
    nrm_CUdeviceptr other = 0;
    CHECK_EQ(cuda.cuMemAlloc(&other, BLOCK), NRM_CUDA_SUCCESS);
    CHECK_EQ(sim.hold_stream(busy), 0);
    CHECK_EQ(cuda.cuMemsetD8Async(other, 0, 1, busy), NRM_CUDA_SUCCESS);
    nrm_CUevent theirs[8];
    for (int i = 0; i < 8; i++) {
        CHECK_EQ(cuda.cuEventCreate(&theirs[i], NRM_CU_EVENT_DISABLE_TIMING),
                 NRM_CUDA_SUCCESS);
        CHECK_EQ(cuda.cuEventRecord(theirs[i], busy), NRM_CUDA_SUCCESS);
    }
    finish();
    nrm_stream_release(stream);
    CHECK_EQ(sim.release_stream(busy), 0);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    for (int i = 0; i < 8; i++) {
        CHECK_EQ(cuda.cuEventQuery(theirs[i]), NRM_CUDA_SUCCESS);
    }
    end_context();
}

/* That ends streams of ours, as far as is known without asking. */
TEST_EACH(the_reset_of_another_device_says_nothing_about_it, ways)
{
    struct nrm_cudasim_config config = simulator_config();
    config.devices = 2;
    start_on(&config, 1, 2);
    nrm_stream *stream = stream_for(row->on), *other = bare_stream(new_handle());
    void *ptr = free_in_use(stream);
    make_current(1);
    nrm_stream *elsewhere = new_stream(); /* so that the reset is noticed */
    CHECK_EQ(cuda.cuDevicePrimaryCtxReset(1), NRM_CUDA_SUCCESS);
    nrm__cuda_check_generations();
    CHECK_EQ(cuda.cuCtxSetCurrent(own), NRM_CUDA_SUCCESS);
    void *meanwhile = take(BLOCK, other);
    CHECK(meanwhile != ptr);
    write_on(other, meanwhile, 9);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(other)), NRM_CUDA_SUCCESS);
    let_finish();
    CHECK(has_seen(0, 7));
    void *later = take(BLOCK, other);
    CHECK(later == ptr);
    give(later, other);
    give(meanwhile, other);
    nrm_stream_release(stream);
    nrm_stream_release(other);
    nrm_stream_release(elsewhere);
    finish();
    end_context();
}

/* Each with contexts of its own, one after the other, which it ends with work
   pending. */
static void *
come_and_go(void *unused)
{
    static const enum freed_on on[] = {ON_DEFAULT, ON_PER_THREAD, ON_THEIRS, BY_HOST};
    for (int i = 0; i < 24; i++) {
        nrm_CUcontext context = new_context();
        nrm_stream *stream = stream_for(on[i % 4]);
        for (int k = 0; k < 4; k++) {
            void *ptr = NULL;
            CHECK_OK(nrm_resource_allocate(pool, BLOCK, 0, stream, &ptr));
            write_on_handle(worker_of(stream), ptr, 1);
            CHECK_OK(nrm_resource_deallocate(pool, ptr, 0, stream));
        }
        CHECK_EQ(cuda.cuCtxDestroy(context), NRM_CUDA_SUCCESS);
        nrm_stream_release(stream);
    }
    return unused;
}

TEST(contexts_that_come_and_go_in_threads)
{
    enum { N_THREADS = 3 };
    pthread_t threads[N_THREADS];
    start(1, 0);
    for (int i = 0; i < N_THREADS; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, come_and_go, NULL), 0);
    }
    for (int i = 0; i < N_THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    nrm__pool_check(pool);
    CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    CHECK_EQ(reserved_nbytes(pool), 0);
    finish();
    end_context();
}

/* ---- the end of a stream ---- */

static void *
release_stream(void *stream)
{
    nrm_stream_release(stream);
    return NULL;
}

static const struct {
    const char *name;
    enum freed_on on;
    bool elsewhere; /* where a per-thread one is not known by its handle */
    const char *failing;
} ends[] = {
    {"ours", ON_OURS, false, NULL},
    {"ours_elsewhere", ON_OURS, true, NULL},
    {"per_thread", ON_PER_THREAD, false, NULL},
    {"per_thread_elsewhere", ON_PER_THREAD, true, NULL},
    {"ours_without_an_event", ON_OURS, false, "cuEventCreate"},
    {"per_thread_without_an_event", ON_PER_THREAD, false, "cuEventCreate"},
};

TEST_EACH(a_stream_leaves_its_order_behind, ends)
{
    pthread_t thread;
    start(1, 2);
    nrm_stream *stream = stream_for(row->on), *other = bare_stream(new_handle());
    void *ptr = free_in_use(stream);
    uint64_t n_streams = simulator_count(NRM_CUDASIM_STREAMS);
    if (row->failing != NULL) {
        sim.fail(row->failing, 1, NRM_CUDA_ERROR_OUT_OF_MEMORY, 1);
    }
    if (row->elsewhere) {
        CHECK_EQ(pthread_create(&thread, NULL, release_stream, stream), 0);
        pthread_join(thread, NULL);
    }
    else {
        nrm_stream_release(stream);
    }
    CHECK_EQ(simulator_count(NRM_CUDASIM_STREAMS), n_streams - (row->on == ON_OURS));
    void *meanwhile = take(BLOCK, other);
    CHECK(meanwhile != ptr);
    write_on(other, meanwhile, 9);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(other)), NRM_CUDA_SUCCESS);
    let_finish();
    CHECK(has_seen(0, 7));
    void *later = take(BLOCK, other);
    CHECK(later == ptr);
    give(later, other);
    give(meanwhile, other);
    nrm_stream_release(other);
    finish();
    end_context();
}

/* ---- memory in the order of streams ---- */

static nrm_resource *source; /* of a memory pool of the driver */

/* Such a pool gives nothing while there is no primary context. */
static void
start_source(bool beside_primary)
{
    nrm_cuda_async_options options = NRM_OPTIONS(nrm_cuda_async_options);
    start(0, 0);
    nrm_resource_release(pool);
    if (beside_primary) {
        make_current(0);
        CHECK_EQ(cuda.cuCtxSetCurrent(own), NRM_CUDA_SUCCESS);
    }
    CHECK_OK(nrm_cuda_async_create(&options, &source));
}

static void *
take_of_source(nrm_stream *stream)
{
    void *ptr = NULL;
    CHECK_OK(nrm_resource_allocate(source, BLOCK, 0, stream, &ptr));
    return ptr;
}

static void
finish_source(void)
{
    nrm_error lost;
    uint64_t n_lost = 0;
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    make_current(0);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS); /* frees on streams of ours */
    CHECK_EQ(cuda.cuCtxSetCurrent(own), NRM_CUDA_SUCCESS);
    uint64_t before = nrm__clock_ns();
    nrm_resource_release(source);
    CHECK_LE(nrm__clock_ns() - before, SHORT_NS);
    nrm__lost_error_get(&lost, &n_lost);
    CHECK_EQ(n_lost, 0u);
    CHECK_EQ(simulator_count(NRM_CUDASIM_POOLS), 0u);
    simulator_check_faults();
}

TEST_EACH(a_source_of_the_drivers_pool_comes_and_goes, ways)
{
    start_source(true);
    nrm_stream *stream = stream_for(row->on);
    for (int i = 0; i < 3; i++) {
        CHECK_OK(nrm_resource_deallocate(source, take_of_source(stream), 0, stream));
    }
    CHECK_OK(nrm_resource_trim(source, 0, NULL));
    nrm_stream_release(stream);
    finish_source();
    end_context();
}

TEST_EACH(what_goes_back_to_the_drivers_pool_is_done_with, ways)
{
    start_source(true);
    nrm_stream *stream = stream_for(row->on), *other = bare_stream(new_handle());
    void *ptr = take_of_source(stream);
    use_behind_aside(ptr, stream);
    CHECK_OK(nrm_resource_deallocate(source, ptr, 0, stream));
    CHECK_OK(nrm_resource_trim(source, 0, NULL));
    void *next = take_of_source(other);
    write_on(other, next, 9);
    let_run();
    let_finish();
    CHECK(has_seen(0, 7));
    CHECK_OK(nrm_resource_deallocate(source, next, 0, other));
    nrm_stream_release(other);
    CHECK_OK(nrm_resource_trim(source, 0, NULL));
    nrm_stream_release(stream);
    finish_source();
    end_context();
}

TEST(the_drivers_pool_outlives_the_context_that_it_was_found_in)
{
    void *ptr = NULL;
    start_source(false);
    nrm_status status = nrm_resource_allocate(source, BLOCK, 0, NULL, &ptr);
    CHECK_EQ(status, NRM_OUT_OF_MEMORY);
    end_context();
    make_current(0);
    ptr = take_of_source(NULL);
    CHECK_OK(nrm_resource_deallocate(source, ptr, 0, NULL));
    CHECK_OK(nrm_resource_trim(source, 0, NULL));
    own = new_context();
    finish_source();
    end_context();
}

/* ---- the end of a driver ---- */

/* What was allocated there is gone, and all work with it. */
TEST_EACH(a_pool_may_outlive_its_driver, ways)
{
    start(0, 0);
    nrm_stream *stream = stream_for(row->on);
    void *ptr = take(BLOCK, stream);
    give(take(BLOCK, stream), stream);
    simulator_start(NULL);
    CHECK_OK(nrm__cuda_init(NULL));
    give(ptr, row->on == ON_THEIRS || row->on == ON_OURS ? NULL : stream);
    uint64_t before = nrm__clock_ns();
    nrm_resource_release(pool);
    CHECK_LE(nrm__clock_ns() - before, SHORT_NS);
    CHECK(!has_primary());
    nrm_stream_release(stream);
}

CHECK_MAIN
