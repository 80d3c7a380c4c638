/* Growth ahead of demand: when the background thread grows a pool, how far, and what
   ends it. */
#include <semaphore.h>
#include <string.h>

#include "base/bits.h"
#include "core/background.h"
#include "core/hooks.h"
#include "cuda/event.h"
#include "fixtures.h"
#include "nrm/adaptors.h"
#include "nrm/options.h"
#include "os/memory.h"
#include "os/system.h"
#include "pools/pool.h"
#include "pools/pool_internal.h"
#include "streams.h"

#define BLOCK ((size_t)NRM__MIB)
#define FIRST (8 * (int64_t)NRM__MIB)
#define MANY 200

static void *ptrs[MANY];
static size_t n_ptrs;

/* A pool over the upstream, whose reference it takes. */
static nrm_resource *
ahead_over(nrm_resource *upstream, size_t maximum_nbytes)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    nrm_resource *mr = NULL;
    options.grow_ahead = true;
    options.maximum_nbytes = maximum_nbytes;
    CHECK_OK(nrm_pool_create(upstream, &options, &mr));
    nrm_resource_release(upstream);
    return mr;
}

/* Blocks that stay, a MiB each. */
static void
take(nrm_resource *mr, size_t n)
{
    while (n-- != 0) {
        ptrs[n_ptrs++] = allocate(mr, BLOCK);
    }
}

static void
free_all(nrm_resource *mr)
{
    while (n_ptrs != 0) {
        CHECK_OK(nrm_resource_deallocate(mr, ptrs[--n_ptrs], 0, NULL));
    }
}

/* Until so many segments have come ahead and no more do. */
static bool
comes_to(nrm_resource *mr, int64_t n)
{
    for (int i = 0; i < 500 && statistics_of(mr).segments_ahead < n; i++) {
        nrm__sleep_ns(10000000);
    }
    nrm__sleep_ns(50000000);
    return CHECK_EQ(statistics_of(mr).segments_ahead, n);
}

static void
expect_sleep(void)
{
    nrm__sleep_ns(600000000); /* for what it has begun, and another look or two */
    uint64_t n = nrm__background_n_turns();
    nrm__sleep_ns(300000000);
    CHECK_EQ(nrm__background_n_turns(), n);
}

/* The first test, as the thread never ends. */
TEST(a_pool_that_was_not_asked_to_grows_on_demand_only)
{
    nrm_resource *mr = pool_over(host_source(), 0);
    take(mr, 7);
    nrm__sleep_ns(50000000);
    CHECK(!nrm__background_is_running());
    CHECK_EQ(reserved_nbytes(mr), FIRST);
    CHECK_EQ(statistics_of(mr).segments_ahead, 0);
    free_all(mr);
    nrm_resource_release(mr);
}

TEST(what_is_asked_next_is_there_before)
{
    nrm_resource *mr = ahead_over(host_source(), 0);
    CHECK_EQ(reserved_nbytes(mr), 0); /* nothing before the first request */
    take(mr, 3);
    nrm__sleep_ns(50000000);
    CHECK_EQ(reserved_nbytes(mr), FIRST);
    take(mr, 3); /* more than half of it: 8 MiB more, so that 8 are free */
    comes_to(mr, 1);
    CHECK_EQ(reserved_nbytes(mr), 2 * FIRST);
    take(mr, 8); /* 2 of 16 are free */
    comes_to(mr, 2);
    CHECK_EQ(reserved_nbytes(mr), 4 * FIRST);
    CHECK_EQ(statistics_of(mr).failures_ahead, 0);
    expect_sleep();
    nrm__pool_check(mr);
    free_all(mr);
    nrm_resource_release(mr);
}

TEST(its_pages_are_present)
{
    nrm_resource *mr = ahead_over(host_source(), 0);
    take(mr, 6);
    comes_to(mr, 1);
    size_t n_present = 0;
    take(mr, 8);
    for (size_t i = 6; i < 14; i++) {
        n_present += nrm__is_resident(
            (void *)nrm__align_down((uintptr_t)ptrs[i] + BLOCK / 2, nrm__page_size()));
    }
    CHECK_GE(n_present, 7u);
    free_all(mr);
    nrm_resource_release(mr);
}

TEST(use_that_goes_up_and_down_grows_nothing)
{
    nrm_resource *mr = ahead_over(host_source(), 0);
    take(mr, 7);
    comes_to(mr, 1);
    free_all(mr);
    uint64_t before = nrm__background_n_turns();
    for (int i = 0; i < 100; i++) {
        take(mr, 7);
        free_all(mr);
    }
    nrm__sleep_ns(50000000);
    CHECK_EQ(statistics_of(mr).segments_ahead, 1);
    CHECK_LE(nrm__background_n_turns() - before, 3u); /* of decay */
    nrm_resource_release(mr);
}

TEST(one_large_array_grows_nothing_ahead)
{
    nrm_resource *mr = ahead_over(host_source(), 0);
    void *large = allocate(mr, 300 * NRM__MIB);
    nrm__sleep_ns(50000000);
    CHECK_EQ(statistics_of(mr).segments_ahead, 0);
    CHECK_OK(nrm_resource_deallocate(mr, large, 0, NULL));
    nrm_resource_release(mr);
}

TEST(the_limit_holds_and_is_no_failure)
{
    nrm_resource *mr = ahead_over(host_source(), 12 * NRM__MIB);
    take(mr, 6);
    comes_to(mr, 1);
    CHECK_EQ(reserved_nbytes(mr), 12 * (int64_t)NRM__MIB);
    take(mr, 5);
    expect_sleep();
    CHECK_EQ(reserved_nbytes(mr), 12 * (int64_t)NRM__MIB);
    CHECK_EQ(statistics_of(mr).failures_ahead, 0);
    free_all(mr);
    nrm_resource_release(mr);
}

TEST(a_failure_is_counted_and_the_next_try_waits)
{
    nrm_limiting_options limit = NRM_OPTIONS(nrm_limiting_options);
    nrm_resource *host = host_source(), *limiting = NULL;
    limit.allocation_limit = 12 * NRM__MIB;
    REQUIRE_OK(nrm_limiting_create(host, &limit, &limiting));
    nrm_resource_release(host);
    nrm_resource *mr = ahead_over(limiting, 0);
    take(mr, 6);
    nrm__sleep_ns(400000000); /* tries after 50 and 150 ms, unless nothing was taken */
    int64_t n = statistics_of(mr).failures_ahead;
    CHECK_GE(n, 1);
    CHECK_LE(n, 4);
    CHECK_EQ(statistics_of(mr).segments_ahead, 0);
    CHECK_EQ(reserved_nbytes(mr), FIRST);
    take(mr, 1); /* the program goes on */
    nrm__pool_check(mr);
    free_all(mr);
    nrm_resource_release(mr);
}

/* ---- an upstream that keeps the background thread waiting ---- */

static struct {
    struct counting counting;
    sem_t begun, go_on;
    atomic_bool is_slow;
    atomic_int n_giving; /* who gives back just now */
} slow;

static nrm_status
slow_allocate(void *context, size_t nbytes, size_t alignment, nrm_stream *stream,
              void **out)
{
    (void)context;
    if (nrm__background_is_here() && atomic_load(&slow.is_slow)) {
        sem_post(&slow.begun);
        sem_wait(&slow.go_on);
    }
    return counting_allocate(&slow.counting, nbytes, nrm__min(alignment, 4096), stream,
                             out);
}

static nrm_status
slow_deallocate(void *context, void *ptr, size_t nbytes, nrm_stream *stream)
{
    (void)context;
    atomic_fetch_add(&slow.n_giving, 1);
    nrm_status status = counting_deallocate(&slow.counting, ptr, nbytes, stream);
    atomic_fetch_sub(&slow.n_giving, 1);
    return status;
}

static nrm_resource *
slow_pool(void)
{
    slow.counting = (struct counting){0};
    sem_init(&slow.begun, 0, 0);
    sem_init(&slow.go_on, 0, 0);
    atomic_store(&slow.is_slow, true);
    return ahead_over(callback_source(slow_allocate, slow_deallocate, NULL), 0);
}

/* The thread may be the last to let go of it. */
static void
end_slow(nrm_resource *mr)
{
    free_all(mr);
    nrm_resource_release(mr);
    for (int i = 0; i < 500 && (atomic_load(&slow.counting.n_live) != 0 ||
                                atomic_load(&slow.n_giving) != 0);
         i++) {
        nrm__sleep_ns(10000000);
    }
    CHECK_EQ(atomic_load(&slow.counting.n_live), 0u);
}

TEST(the_program_goes_on_while_the_pool_grows)
{
    nrm_resource *mr = slow_pool();
    take(mr, 6);
    sem_wait(&slow.begun);
    take(mr, 10); /* grows itself, too */
    CHECK_GE(reserved_nbytes(mr), 2 * FIRST);
    nrm__pool_check(mr);
    atomic_store(&slow.is_slow, false);
    sem_post(&slow.go_on);
    free_all(mr);
    nrm__pool_check(mr);
    end_slow(mr);
}

TEST(what_lies_ahead_is_bounded_however_fast_use_rises)
{
    CHECK_OK(nrm_option_set(NRM_OPT_SEGMENT_NBYTES, "8 MiB"));
    nrm_resource *mr = slow_pool();
    CHECK_OK(nrm_option_set(NRM_OPT_SEGMENT_NBYTES, "64 MiB"));
    take(mr, 6);
    sem_wait(&slow.begun);
    take(mr, 120); /* between two looks */
    atomic_store(&slow.is_slow, false);
    sem_post(&slow.go_on);
    nrm__sleep_ns(200000000);
    int64_t left = reserved_nbytes(mr) - (int64_t)(n_ptrs * BLOCK);
    CHECK_GE(left, 2 * FIRST); /* four halves of a segment, not 120 MiB */
    CHECK_LE(left, 5 * FIRST);
    expect_sleep();
    end_slow(mr);
}

TEST(a_trim_ends_the_growth_that_is_in_progress)
{
    nrm_resource *mr = slow_pool();
    take(mr, 6);
    sem_wait(&slow.begun);
    free_all(mr);
    CHECK_OK(nrm_resource_trim(mr, 0, NULL));
    CHECK_EQ(reserved_nbytes(mr), 0);
    sem_post(&slow.go_on);
    nrm__sleep_ns(100000000);
    CHECK_EQ(reserved_nbytes(mr), 0);
    CHECK_EQ(statistics_of(mr).segments_ahead, 0);
    CHECK_EQ(statistics_of(mr).failures_ahead, 0);
    CHECK_EQ(atomic_load(&slow.counting.n_live), 0u);
    expect_sleep();
    atomic_store(&slow.is_slow, false);
    take(mr, 6); /* what is needed after that comes ahead again */
    comes_to(mr, 1);
    end_slow(mr);
}

TEST(a_trim_before_the_thread_has_looked_ends_what_it_would_do)
{
    nrm_resource *other = slow_pool(); /* keeps the thread busy */
    take(other, 6);
    sem_wait(&slow.begun);
    nrm_resource *mr = ahead_over(host_source(), 0);
    size_t n = n_ptrs;
    take(mr, 6);
    while (n_ptrs != n) {
        CHECK_OK(nrm_resource_deallocate(mr, ptrs[--n_ptrs], 0, NULL));
    }
    CHECK_OK(nrm_resource_trim(mr, 0, NULL));
    atomic_store(&slow.is_slow, false);
    sem_post(&slow.go_on);
    comes_to(other, 1);
    comes_to(mr, 0);
    CHECK_EQ(reserved_nbytes(mr), 0);
    nrm_resource_release(mr);
    end_slow(other);
}

TEST(what_only_blocks_keep_alive_does_not_grow_on)
{
    nrm_resource *mr = slow_pool();
    take(mr, 6);
    sem_wait(&slow.begun);
    take(mr, 50); /* for which another segment would come */
    size_t n = atomic_load(&slow.counting.n_allocated);
    nrm_resource_release(mr);
    atomic_store(&slow.is_slow, false);
    sem_post(&slow.go_on);
    nrm__sleep_ns(100000000);
    CHECK_EQ(atomic_load(&slow.counting.n_allocated), n + 1);
    free_all(mr);
    CHECK_EQ(atomic_load(&slow.counting.n_live), 0u);
}

TEST(a_pool_that_nobody_uses_any_more_ends_with_its_growth)
{
    nrm_resource *mr = slow_pool();
    take(mr, 6);
    sem_wait(&slow.begun);
    free_all(mr);
    nrm_resource_release(mr);
    CHECK_GT(atomic_load(&slow.counting.n_live), 0u); /* the thread holds it */
    sem_post(&slow.go_on);
    for (int i = 0; i < 500 && (atomic_load(&slow.counting.n_live) != 0 ||
                                atomic_load(&slow.n_giving) != 0);
         i++) {
        nrm__sleep_ns(10000000);
    }
    CHECK_EQ(atomic_load(&slow.counting.n_live), 0u);
    CHECK_LE(atomic_load(&slow.counting.n_allocated), 2u);
}

static nrm_resource *shared;

static void
grow_in_child(void)
{
    take(shared, 40);
    nrm__sleep_ns(100000000);
    CHECK_EQ(statistics_of(shared).segments_ahead, 0);
    nrm__pool_check(shared);
    free_all(shared);
    nrm__pool_check(shared);
}

static void
rise_in_child(void)
{
    for (int i = 0; i < 8; i++) {
        take(shared, 3);
        nrm__sleep_ns(10000000);
    }
    CHECK_EQ(statistics_of(shared).segments_ahead, 0);
    nrm__pool_check(shared);
}

TEST(nothing_grows_ahead_in_a_child_of_a_quiet_parent)
{
    shared = ahead_over(host_source(), 0);
    take(shared, 2);
    CHECK_IN_CHILD(rise_in_child);
    free_all(shared);
    nrm_resource_release(shared);
}

TEST(nothing_grows_ahead_in_a_forked_child)
{
    shared = slow_pool();
    take(shared, 6);
    sem_wait(&slow.begun); /* in the middle of it */
    CHECK_IN_CHILD(grow_in_child);
    atomic_store(&slow.is_slow, false);
    sem_post(&slow.go_on);
    comes_to(shared, 1);
    end_slow(shared);
}

/* ---- with decay ---- */

TEST(decay_and_growth_do_not_fight)
{
    CHECK_OK(nrm_option_set(NRM_OPT_DECAY, "500 ms")); /* many looks, however slow */
    nrm_resource *mr = ahead_over(host_source(), 0);
    take(mr, 7);
    comes_to(mr, 1);
    CHECK_EQ(reserved_nbytes(mr), 2 * FIRST); /* not given back at once */
    for (int i = 0; i < 500 && reserved_nbytes(mr) != FIRST; i++) {
        nrm__sleep_ns(10000000); /* but by and by, also when nothing more is asked */
    }
    CHECK_EQ(reserved_nbytes(mr), FIRST);
    for (int i = 0; i < 10; i++) { /* what was in use at a time before */
        CHECK_OK(nrm_resource_deallocate(mr, ptrs[--n_ptrs], 0, NULL));
        take(mr, 1);
    }
    expect_sleep();
    CHECK_EQ(statistics_of(mr).segments_ahead, 1);
    CHECK_EQ(reserved_nbytes(mr), FIRST);
    free_all(mr);
    nrm_resource_release(mr);
    CHECK_OK(nrm_option_set(NRM_OPT_DECAY, "10 s"));
}

/* ---- threads ---- */

static void *
come_and_go(void *seed)
{
    uint64_t state = (uintptr_t)seed;
    void *own[24] = {NULL};
    for (int round = 0; round < 3000; round++) {
        size_t i = next_random(&state) % 24;
        if (own[i] != NULL) {
            CHECK_OK(nrm_resource_deallocate(shared, own[i], 0, NULL));
        }
        own[i] = allocate(shared, 1 + next_random(&state) % (2 * NRM__MIB));
        *(char *)own[i] = 1;
        nrm__sleep_ns(round % 64 == 0 ? 300000 : 0);
        if (next_random(&state) % 300 == 0) {
            CHECK_OK(nrm_resource_trim(shared, 0, NULL));
        }
    }
    for (size_t i = 0; i < 24; i++) {
        CHECK_OK(nrm_resource_deallocate(shared, own[i], 0, NULL));
    }
    return NULL;
}

TEST(growth_while_threads_come_go_and_trim)
{
    pthread_t threads[3];
    CHECK_OK(nrm_option_set(NRM_OPT_DECAY, "1 ms"));
    CHECK_OK(nrm_option_set(NRM_OPT_SEGMENT_NBYTES, "8 MiB"));
    shared = ahead_over(host_source(), 0);
    CHECK_OK(nrm_option_set(NRM_OPT_SEGMENT_NBYTES, "64 MiB"));
    for (uintptr_t i = 0; i < 3; i++) {
        pthread_create(&threads[i], NULL, come_and_go, (void *)(i + 1));
    }
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
    }
    NOTE("%d segments came ahead", (int)statistics_of(shared).segments_ahead);
    nrm__pool_check(shared);
    CHECK_OK(nrm_resource_trim(shared, 0, NULL));
    CHECK_EQ(reserved_nbytes(shared), 0);
    nrm_resource_release(shared);
    CHECK_OK(nrm_option_set(NRM_OPT_DECAY, "10 s"));
}

TEST(a_pool_may_die_while_it_grows)
{
    for (int i = 0; i < 100; i++) {
        nrm_resource *mr = ahead_over(host_source(), 0);
        take(mr, 6);
        nrm__sleep_ns((uint64_t)(i % 5) * 200000);
        free_all(mr);
        nrm_resource_release(mr);
    }
}

/* ---- memory that GPUs use ---- */

static const struct {
    const char *name;
    nrm_resource *(*source)(void);
    int64_t segment; /* the first one */
} kinds[] = {
    {"pinned", pinned_source, FIRST},
    {"managed", managed_source, FIRST},
    {"device", device_source, 64 * (int64_t)NRM__MIB},
};

TEST_EACH(every_kind_grows_ahead, kinds)
{
    simulator_start(NULL);
    nrm_resource *mr = ahead_over(row->source(), 0);
    size_t n = (size_t)row->segment / BLOCK;
    take(mr, n / 2);
    comes_to(mr, 0);
    take(mr, 2);
    comes_to(mr, 1);
    CHECK_EQ(reserved_nbytes(mr), 2 * row->segment);
    CHECK_EQ(simulator_count(NRM_CUDASIM_EVENTS), 0u); /* nothing was recorded */
    nrm__pool_check(mr);
    free_all(mr);
    nrm_resource_release(mr);
    (void)nrm__retired_drain(UINT64_MAX);
    simulator_check_faults();
}

TEST(no_epoch_is_closed_in_the_background)
{
    struct nrm__epoch_counts before, after;
    simulator_start(NULL);
    nrm_resource *source = pinned_source();
    nrm_resource_retain(source);
    nrm_resource *mr = ahead_over(source, 0);
    take(mr, 3);
    void *ptr = allocate(source, BLOCK);
    CHECK_OK(nrm_resource_deallocate(source, ptr, 0, NULL)); /* retired, not recorded */
    nrm__epoch_counts(&before);
    take(mr, 3);
    comes_to(mr, 1);
    nrm__epoch_counts(&after);
    CHECK_EQ(after.closed, before.closed);
    free_all(mr);
    nrm_resource_release(mr);
    nrm_resource_release(source);
    (void)nrm__retired_drain(UINT64_MAX);
    simulator_check_faults();
}

TEST(page_locked_memory_for_small_blocks_comes_in_small_steps)
{
    int64_t before = 0, largest = 0;
    simulator_start(NULL);
    CHECK_OK(nrm_option_set(NRM_OPT_SEGMENT_NBYTES, "1 GiB"));
    nrm_resource *mr = pool_over(pinned_source(), 0);
    while (n_ptrs < MANY) {
        take(mr, 1);
        largest = nrm__max(largest, reserved_nbytes(mr) - before);
        before = reserved_nbytes(mr);
    }
    CHECK_EQ(largest, 64 * (int64_t)NRM__MIB);
    void *large = allocate(mr, 300 * NRM__MIB); /* one registration all the same */
    CHECK_EQ(reserved_nbytes(mr) - before, 300 * (int64_t)NRM__MIB);
    CHECK_OK(nrm_resource_deallocate(mr, large, 0, NULL));
    free_all(mr);
    nrm_resource_release(mr);
    CHECK_OK(nrm_option_set(NRM_OPT_SEGMENT_NBYTES, "64 MiB"));
    (void)nrm__retired_drain(UINT64_MAX);
    simulator_check_faults();
}

/* A record that met a capture (test_uses.c) keeps the thread from the driver. */
TEST(nothing_grows_ahead_after_a_capture_was_seen)
{
    nrm_CUstream stream;
    nrm_CUgraph graph;
    struct nrm__cuda_event event;
    simulator_start(NULL);
    CHECK_OK(nrm__cuda_init(NULL));
    make_current(0);
    nrm_resource *mr = ahead_over(pinned_source(), 0);
    take(mr, 3);
    CHECK_EQ(cuda.cuStreamCreate(&stream, 1), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamBeginCapture(stream, NRM_CU_STREAM_CAPTURE_MODE_RELAXED),
             NRM_CUDA_SUCCESS);
    CHECK_EQ((int)nrm__cuda_record(0, &event), (int)NRM__RECORD_INVALIDATED);
    CHECK(nrm__cuda_has_seen_capture());
    take(mr, 4);
    comes_to(mr, 0);
    (void)cuda.cuStreamEndCapture(stream, &graph);
    nrm__cuda_capture_lift(-1);
    take(mr, 1);
    comes_to(mr, 1);
    free_all(mr);
    nrm_resource_release(mr);
    (void)nrm__retired_drain(UINT64_MAX);
    CHECK_EQ(cuda.cuStreamDestroy(stream), NRM_CUDA_SUCCESS);
    simulator_check_faults();
}

TEST(user_code_is_never_called_in_the_background)
{
    nrm_callback_options callback = NRM_OPTIONS(nrm_callback_options);
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    nrm_resource *source = NULL, *mr = NULL;
    callback.kind = NRM_KIND_HOST;
    callback.allocate = slow_allocate;
    callback.deallocate = slow_deallocate;
    callback.calls_user_code = true;
    REQUIRE_OK(nrm_callback_create(&callback, &source));
    options.grow_ahead = true;
    CHECK_EQ(nrm_pool_create(source, &options, &mr), NRM_INVALID_VALUE);
    CHECK_STR_HAS(nrm_last_error()->message, "grow_ahead");
    nrm_resource_release(source);
}

CHECK_MAIN
