/* Device memory in a process that has contexts of its own making, and no primary one: what
   was freed becomes done when the work in those contexts is, on whatever stream it was
   freed; nothing waits for work that there cannot be; and a context may end at any time. */
#include "device_pool.h"

#include <pthread.h>

#include "core/hooks.h"
#include "nrm/sources.h"

#define SHORT_NS UINT64_C(2000000000) /* far below the wait at the end of a pool */

static nrm_CUcontext own;  /* the program's */
static nrm_CUstream aside; /* of it: what work waits for */

static nrm_CUcontext
new_context(void)
{
    nrm_CUcontext context = NULL;
    CHECK_EQ(cuda.cuCtxCreate(&context, 0, 0), NRM_CUDA_SUCCESS);
    return context;
}

static bool
has_primary(void)
{
    unsigned flags;
    int active = 0;
    CHECK_EQ(cuda.cuDevicePrimaryCtxGetState(0, &flags, &active), NRM_CUDA_SUCCESS);
    return active != 0;
}

/* A pool in the only context, of so many blocks; 0: it begins with none, or ends nowhere. */
static void
start_on(const struct nrm_cudasim_config *config, size_t n_first, size_t n_last)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    simulator_start(config);
    CHECK_OK(nrm__cuda_init(NULL));
    own = new_context();
    CHECK_EQ(cuda.cuMemAlloc(&seen, 2 * BLOCK), NRM_CUDA_SUCCESS);
    options.initial_nbytes = n_first * BLOCK;
    options.maximum_nbytes = n_last * BLOCK;
    options.wait_limit_ns = 5 * 1000 * 1000;
    nrm_resource *upstream = device_source();
    CHECK_OK(nrm_pool_create(upstream, &options, &pool));
    nrm_resource_release(upstream);
}

static void
start(size_t n_first, size_t n_last)
{
    start_on(NULL, n_first, n_last);
}

/* The pool ends, and nobody waits longer than the work there is. */
static void
finish(void)
{
    uint64_t before = nrm__clock_ns();
    nrm_resource_release(pool);
    CHECK_LE(nrm__clock_ns() - before, SHORT_NS);
    simulator_check_faults();
    CHECK_EQ(simulator_count(NRM_CUDASIM_PHYSICAL), 0u);
    CHECK_EQ(simulator_count(NRM_CUDASIM_RESERVATIONS), 0u);
}

static void
end_context(void)
{
    CHECK_EQ(cuda.cuCtxDestroy(own), NRM_CUDA_SUCCESS);
    simulator_check_faults();
}

/* ---- on what it is freed ---- */

/* A stream of the program's context, or what stands for one, with a way to free on it. */
enum freed_on { ON_DEFAULT, ON_LEGACY, ON_PER_THREAD, ON_THEIRS, ON_OURS, BY_HOST };

static const struct {
    const char *name;
    enum freed_on on;
} ways[] = {
    {"on_the_default_stream", ON_DEFAULT},     {"on_the_legacy_stream", ON_LEGACY},
    {"on_a_per_thread_stream", ON_PER_THREAD}, {"on_a_stream_of_theirs", ON_THEIRS},
    {"on_a_stream_of_ours", ON_OURS},          {"by_the_host", BY_HOST},
};

static nrm_stream *
stream_for(enum freed_on on)
{
    nrm_stream *stream = NULL;
    switch (on) {
    case ON_DEFAULT:
        return nrm_stream_default();
    case ON_LEGACY:
        return nrm_stream_legacy();
    case ON_PER_THREAD:
        CHECK_OK(nrm_stream_per_thread(&stream));
        return stream;
    case ON_THEIRS:
        return bare_stream(new_handle());
    case ON_OURS:
        return new_stream();
    default:
        return NULL;
    }
}

/* Where work is submitted that the way of freeing covers. */
static nrm_CUstream
worker_of(const nrm_stream *stream)
{
    return stream != NULL ? handle_of(stream) : NRM_CU_STREAM_LEGACY;
}

/* Makes a block one of 7s, which work on the stream is going to read. That waits for another
   stream, which is held: any thread can let it go. */
static void
use_behind_aside(void *ptr, nrm_stream *stream)
{
    nrm_CUstream worker = worker_of(stream);
    write_on_handle(worker, ptr, 7);
    CHECK_EQ(cuda.cuMemsetD8(seen, 0, BLOCK), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    aside = new_handle();
    CHECK_EQ(sim.hold_stream(aside), 0);
    CHECK_EQ(cuda.cuMemsetD8Async(seen + BLOCK, 0, 1, aside), NRM_CUDA_SUCCESS);
    let_wait_for(worker, aside);
    read_on_handle(worker, ptr, 0);
}

static void *
free_in_use(nrm_stream *stream)
{
    void *ptr = take(BLOCK, stream);
    use_behind_aside(ptr, stream);
    give(ptr, stream);
    return ptr;
}

static void
let_finish(void)
{
    CHECK_EQ(sim.release_stream(aside), 0);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
}

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
    nrm_CUevent theirs = NULL;
    CHECK_EQ(cuda.cuEventCreate(&theirs, NRM_CU_EVENT_DISABLE_TIMING),
             NRM_CUDA_SUCCESS);
    finish();
    nrm_stream_release(stream);
    CHECK_EQ(cuda.cuEventQuery(theirs), NRM_CUDA_SUCCESS);
    end_context();
}

/* ---- beside other contexts ---- */

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
