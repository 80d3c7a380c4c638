/* What lies free in a pool goes back to the system after a while, by the background
   thread, which sleeps when there is nothing to do. */
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/bits.h"
#include "core/background.h"
#include "core/cache.h"
#include "core/uses.h"
#include "fixtures.h"
#include "nrm/options.h"
#include "os/memory.h"
#include "os/system.h"
#include "pools/pool.h"
#include "pools/pool_internal.h"

#define N_PTRS 40
#define FIRST_NBYTES (8 * (int64_t)NRM__MIB)

static nrm_resource *
pool_with_decay(const char *decay)
{
    CHECK_OK(nrm_option_set(NRM_OPT_DECAY, decay));
    return pool_over(host_source(), 0);
}

static void
fill_and_free(nrm_resource *mr, size_t nbytes)
{
    void *ptrs[N_PTRS];
    for (int i = 0; i < N_PTRS; i++) {
        ptrs[i] = allocate(mr, nbytes);
    }
    for (int i = 0; i < N_PTRS; i++) {
        CHECK_OK(nrm_resource_deallocate(mr, ptrs[i], 0, NULL));
    }
}

/* Until it reserves that much only; false: not in five seconds. */
static bool
decays_to(nrm_resource *mr, int64_t nbytes)
{
    for (int i = 0; i < 500 && reserved_nbytes(mr) != nbytes; i++) {
        nrm__sleep_ns(10000000);
    }
    return CHECK_EQ(reserved_nbytes(mr), nbytes);
}

static void
expect_sleep(void)
{
    nrm__sleep_ns(600000000); /* for what it has begun, and another look or two */
    uint64_t n = nrm__background_n_turns();
    nrm__sleep_ns(400000000);
    CHECK_EQ(nrm__background_n_turns(), n);
}

/* The first test, as the thread never ends. */
TEST(what_does_not_decay_starts_no_thread)
{
    struct counting counting = {0};
    nrm_resource *first = pool_with_decay("20 ms"), *never = pool_with_decay("0");
    CHECK_OK(nrm_option_set(NRM_OPT_DECAY, "20 ms"));
    nrm_resource *foreign = pool_over(counting_source(&counting), 0);
    fill_and_free(first, 100000); /* fits into the first segment */
    fill_and_free(never, NRM__MIB);
    fill_and_free(foreign, NRM__MIB);
    int64_t reserved = reserved_nbytes(never);
    CHECK_GT(reserved, FIRST_NBYTES);
    nrm__sleep_ns(100000000);
    CHECK(!nrm__background_is_running());
    CHECK_EQ(reserved_nbytes(first), FIRST_NBYTES);
    CHECK_EQ(reserved_nbytes(never), reserved);
    nrm_resource_release(first);
    nrm_resource_release(never);
    nrm_resource_release(foreign);
}

static const struct size {
    const char *name;
    size_t nbytes;
    int64_t left;
} sizes[] = {
    {"cells", 8000, FIRST_NBYTES},
    {"what threads keep", 500000, FIRST_NBYTES},
    {"blocks", 3 * NRM__MIB, FIRST_NBYTES},
    {"a segment each", 70 * NRM__MIB, 0},
};

TEST_EACH(free_segments_go_back_and_the_first_stays, sizes)
{
    nrm_resource *mr = pool_with_decay("50 ms");
    fill_and_free(mr, row->nbytes);
    if (row->nbytes > 8192) {
        CHECK_GT(reserved_nbytes(mr), FIRST_NBYTES);
    }
    CHECK(row->nbytes <= 8192 || decays_to(mr, row->left));
    nrm__pool_check(mr);
    expect_sleep();
    fill_and_free(mr, row->nbytes); /* and once more */
    CHECK(row->nbytes <= 8192 || decays_to(mr, row->left));
    nrm__pool_check(mr);
    nrm_resource_release(mr);
}

TEST(an_initial_segment_stays)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    nrm_resource *host = host_source(), *mr = NULL;
    CHECK_OK(nrm_option_set(NRM_OPT_DECAY, "20 ms"));
    options.initial_nbytes = 32 * NRM__MIB;
    REQUIRE_OK(nrm_pool_create(host, &options, &mr));
    nrm_resource_release(host);
    fill_and_free(mr, 3 * NRM__MIB);
    CHECK_GT(reserved_nbytes(mr), 100 * (int64_t)NRM__MIB);
    decays_to(mr, 32 * NRM__MIB);
    expect_sleep();
    CHECK_EQ(reserved_nbytes(mr), 32 * (int64_t)NRM__MIB);
    nrm_resource_release(mr);
}

TEST(what_was_free_for_a_short_time_stays)
{
    nrm_resource *mr = pool_with_decay("60 min");
    fill_and_free(mr, 70 * NRM__MIB);
    int64_t reserved = reserved_nbytes(mr);
    nrm__sleep_ns(100000000);
    CHECK_EQ(reserved_nbytes(mr), reserved);
    expect_sleep(); /* until then */
    nrm_resource_release(mr);
}

TEST(a_segment_that_is_used_again_and_again_stays)
{
    nrm_resource *mr = pool_with_decay("600 ms");
    char *first = allocate(mr, 100 * NRM__MIB);
    first[0] = 1;
    uint64_t before = nrm__background_n_turns();
    CHECK_OK(nrm_resource_deallocate(mr, first, 0, NULL));
    for (int i = 0; i < 200; i++) {
        char *ptr = allocate(mr, 100 * NRM__MIB);
        CHECK(ptr == first);
        CHECK_EQ(ptr[0], 1);
        CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
        nrm__sleep_ns(10000000);
    }
    CHECK_LE(nrm__background_n_turns() - before, 12u); /* not one for each free */
    decays_to(mr, 0);
    nrm_resource_release(mr);
}

TEST(what_is_in_use_keeps_its_segment)
{
    nrm_resource *mr = pool_with_decay("20 ms");
    void *ptrs[N_PTRS];
    for (int i = 0; i < N_PTRS; i++) {
        ptrs[i] = allocate(mr, 3 * NRM__MIB);
        write_pattern(ptrs[i], 3 * NRM__MIB, (unsigned)i);
    }
    int64_t reserved = reserved_nbytes(mr);
    for (int i = 0; i < N_PTRS - 1; i++) {
        CHECK_OK(nrm_resource_deallocate(mr, ptrs[i], 0, NULL));
    }
    nrm__sleep_ns(300000000);
    CHECK_LT(reserved_nbytes(mr), reserved);
    CHECK_GT(reserved_nbytes(mr), 0);
    CHECK(has_pattern(ptrs[N_PTRS - 1], 3 * NRM__MIB, N_PTRS - 1, 3 * NRM__MIB));
    CHECK_OK(nrm_resource_deallocate(mr, ptrs[N_PTRS - 1], 0, NULL));
    nrm_resource_release(mr);
}

TEST(zeros_are_zeros_before_and_after)
{
    nrm_resource *mr = pool_with_decay("30 ms");
    for (int round = 0; round < 40; round++) {
        void *ptr = NULL;
        REQUIRE_OK(nrm_resource_allocate_zeroed(mr, 20 * NRM__MIB, 0, NULL, &ptr));
        const char *bytes = ptr;
        CHECK(bytes[0] == 0 && memcmp(bytes, bytes + 1, 20 * NRM__MIB - 1) == 0);
        memset(ptr, 0xff, 20 * NRM__MIB);
        CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
        nrm__sleep_ns(round % 4 * UINT64_C(20000000));
    }
    nrm_resource_release(mr);
}

TEST(a_pool_may_die_at_any_time)
{
    for (int i = 0; i < 200; i++) {
        nrm_resource *mr = pool_with_decay("1 ms");
        fill_and_free(mr, 3 * NRM__MIB);
        nrm__sleep_ns((uint64_t)(i % 5) * 500000);
        nrm_resource_release(mr);
    }
}

/* ---- pages of segments that are used in part ---- */

#define LARGE ((size_t)6 * NRM__MIB)
#define N_LARGE 30

static char *large[N_LARGE];

/* So many blocks, written to; of three in turn one stays. */
static void
leave_holes(nrm_resource *mr)
{
    for (size_t i = 0; i < N_LARGE; i++) {
        large[i] = allocate(mr, LARGE);
        write_pattern(large[i], LARGE, (unsigned)i);
    }
    for (size_t i = 0; i < N_LARGE; i++) {
        if (i % 3 != 0) {
            CHECK_OK(nrm_resource_deallocate(mr, large[i], 0, NULL));
        }
    }
    /* What the thread keeps for itself is no hole. */
    nrm__cache_drain(mr);
}

static size_t
resident_nbytes(const char *ptr, size_t nbytes)
{
    size_t n = 0, page = nrm__page_size();
    uintptr_t first = nrm__align_up((uintptr_t)ptr, page);
    for (uintptr_t at = first; at + page <= (uintptr_t)ptr + nbytes; at += page) {
        n += nrm__is_resident((void *)at) ? page : 0;
    }
    return n;
}

/* Of the holes from block `from` on. */
static size_t
resident_holes(size_t from)
{
    size_t n = 0;
    for (size_t i = from; i < N_LARGE; i++) {
        n += i % 3 != 0 ? resident_nbytes(large[i], LARGE) : 0;
    }
    return n;
}

static bool
holes_empty(size_t from, size_t left_nbytes)
{
    for (int i = 0; i < 500 && resident_holes(from) > left_nbytes; i++) {
        nrm__sleep_ns(10000000);
    }
    return CHECK_LE(resident_holes(from), left_nbytes);
}

static void
expect_survivors(nrm_resource *mr)
{
    for (size_t i = 0; i < N_LARGE; i += 3) {
        CHECK(has_pattern(large[i], LARGE, (unsigned)i, LARGE));
        CHECK_OK(nrm_resource_deallocate(mr, large[i], 0, NULL));
    }
}

TEST(pages_of_free_blocks_go_back_from_between_live_ones)
{
    nrm_resource *mr = pool_with_decay("50 ms");
    leave_holes(mr);
    /* A hole of 12 MiB has up to 2 MiB at each end that belong to a huge page of
       others. */
    holes_empty(3, N_LARGE / 3 * 4 * NRM__MIB);
    CHECK_GE(reserved_nbytes(mr), (int64_t)(N_LARGE * LARGE)); /* addresses stay */
    nrm__pool_check(mr);
    expect_sleep();
    expect_survivors(mr);
    nrm_resource_release(mr);
}

TEST(what_went_back_reads_as_zero)
{
    nrm_resource *mr = pool_with_decay("50 ms");
    leave_holes(mr);
    holes_empty(3, N_LARGE / 3 * 4 * NRM__MIB);
    expect_sleep();
    void *ptrs[8] = {NULL};
    for (int i = 0; i < 8; i++) {
        REQUIRE_OK(nrm_resource_allocate_zeroed(mr, 11 * NRM__MIB, 0, NULL, &ptrs[i]));
        const char *bytes = ptrs[i];
        CHECK(bytes[0] == 0 && memcmp(bytes, bytes + 1, 11 * NRM__MIB - 1) == 0);
    }
    for (int i = 0; i < 8; i++) {
        CHECK_OK(nrm_resource_deallocate(mr, ptrs[i], 0, NULL));
    }
    expect_survivors(mr);
    nrm__pool_check(mr);
    nrm_resource_release(mr);
}

TEST(pages_of_the_first_segment_stay)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    nrm_resource *host = host_source(), *mr = NULL;
    CHECK_OK(nrm_option_set(NRM_OPT_DECAY, "30 ms"));
    options.initial_nbytes = 64 * NRM__MIB;
    REQUIRE_OK(nrm_pool_create(host, &options, &mr));
    nrm_resource_release(host);
    leave_holes(mr);
    nrm__sleep_ns(300000000);
    size_t n = 0;
    for (size_t i = 0; i < 9; i++) {
        n += i % 3 != 0 ? resident_nbytes(large[i], LARGE) : 0;
    }
    CHECK_GT(n, 6 * LARGE - 16 * nrm__page_size());
    holes_empty(12, N_LARGE / 3 * 4 * NRM__MIB);
    expect_sleep();
    expect_survivors(mr);
    nrm_resource_release(mr);
}

TEST(pages_that_are_used_again_and_again_stay)
{
    nrm_resource *mr = pool_with_decay("400 ms");
    leave_holes(mr);
    char *ptr = allocate(mr, 11 * NRM__MIB);
    memset(ptr, 1, 11 * NRM__MIB);
    for (int i = 0; i < 100; i++) {
        CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
        nrm__cache_drain(mr);
        nrm__sleep_ns(10000000);
        REQUIRE(allocate(mr, 11 * NRM__MIB) == (void *)ptr); /* not one without pages */
        CHECK_EQ(ptr[5 * NRM__MIB], 1);
    }
    CHECK_LE(resident_holes(12), N_LARGE / 3 * 4 * NRM__MIB);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    expect_survivors(mr);
    nrm_resource_release(mr);
}

TEST(pages_that_the_system_does_not_take_are_let_be)
{
    nrm_resource *mr = pool_with_decay("20 ms");
    leave_holes(mr);
    uintptr_t page = nrm__align_down((uintptr_t)large[10] + LARGE, nrm__page_size());
    if (mlock((void *)page, nrm__page_size()) != 0) {
        SKIP("no page may be locked here");
    }
    expect_sleep();
    nrm__pool_check(mr);
    CHECK_EQ(munlock((void *)page, nrm__page_size()), 0);
    expect_survivors(mr);
    nrm_resource_release(mr);
}

TEST(a_full_pool_waits_for_pages_that_are_going_back)
{
    uint64_t state = 1;
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    nrm_resource *host = host_source(), *mr = NULL;
    CHECK_OK(nrm_option_set(NRM_OPT_DECAY, "1 ms"));
    options.initial_nbytes = 2 * NRM__MIB;
    options.maximum_nbytes = 64 * NRM__MIB;
    REQUIRE_OK(nrm_pool_create(host, &options, &mr));
    nrm_resource_release(host);
    void *most = allocate(mr, 62 * NRM__MIB); /* a segment */
    CHECK_OK(nrm_resource_deallocate(mr, most, 0, NULL));
    void *first = allocate(mr, 5 * NRM__MIB);
    for (int i = 0; i < 400; i++) {
        char *ptr = allocate(mr, 50 * NRM__MIB); /* beside the 5, nowhere else */
        REQUIRE(ptr != NULL);
        memset(ptr, 1, 12 * NRM__MIB);
        CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
        nrm__sleep_ns(1000000 + next_random(&state) % 1500000);
    }
    CHECK_OK(nrm_resource_deallocate(mr, first, 0, NULL));
    nrm__pool_check(mr);
    nrm_resource_release(mr);
}

/* ---- threads ---- */

static nrm_resource *shared;

static void *
come_and_go(void *seed)
{
    uint64_t state = (uintptr_t)seed;
    for (int round = 0; round < 400; round++) {
        size_t nbytes = 1 + next_random(&state) % (80 * NRM__MIB);
        unsigned key = (unsigned)next_random(&state);
        char *ptr = allocate(shared, nbytes), *small = allocate(shared, 5000);
        ptr[0] = ptr[nbytes - 1] = (char)key;
        small[0] = (char)key;
        nrm__sleep_ns(next_random(&state) % 2000000);
        CHECK(ptr[0] == (char)key && ptr[nbytes - 1] == (char)key);
        CHECK(small[0] == (char)key);
        CHECK_OK(nrm_resource_deallocate(shared, ptr, 0, NULL));
        CHECK_OK(nrm_resource_deallocate(shared, small, 0, NULL));
    }
    return NULL;
}

TEST(memory_goes_back_while_threads_come_and_go)
{
    pthread_t threads[3];
    shared = pool_with_decay("1 ms");
    for (uintptr_t i = 0; i < 3; i++) {
        pthread_create(&threads[i], NULL, come_and_go, (void *)(i + 1));
    }
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
    }
    nrm__pool_check(shared);
    CHECK_EQ(live_nbytes(shared), 0);
    nrm_resource_release(shared);
}

static pthread_barrier_t barrier;

static void *
keep(void *unused)
{
    (void)unused;
    fill_and_free(shared, 700000);
    fill_and_free(shared, 3000);
    pthread_barrier_wait(&barrier);
    pthread_barrier_wait(&barrier);
    return NULL;
}

TEST(what_idle_threads_keep_holds_no_segment_back)
{
    pthread_t threads[3];
    shared = pool_with_decay("50 ms");
    pthread_barrier_init(&barrier, NULL, 4);
    for (int i = 0; i < 3; i++) {
        pthread_create(&threads[i], NULL, keep, NULL);
    }
    pthread_barrier_wait(&barrier);
    decays_to(shared, FIRST_NBYTES);
    nrm__pool_check(shared);
    pthread_barrier_wait(&barrier);
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
    }
    pthread_barrier_destroy(&barrier);
    nrm_resource_release(shared);
}

/* All frees go to what the thread keeps, during and after the looks at the pool. */
TEST(what_a_thread_keeps_of_a_busy_time_goes_back)
{
    /* Longer than a busy machine lets the thread sleep: then it would lie idle. */
    nrm_resource *mr = pool_with_decay("250 ms");
    void *first = allocate(mr, NRM__MIB); /* in the first segment, which stays */
    for (int i = 0; i < 120; i++) {
        void *ptr = allocate(mr, 20 * NRM__MIB);
        nrm__sleep_ns(2500000);
        CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
        nrm__sleep_ns(2500000);
    }
    CHECK_GT(reserved_nbytes(mr), FIRST_NBYTES);
    decays_to(mr, FIRST_NBYTES);
    CHECK_OK(nrm_resource_deallocate(mr, first, 0, NULL));
    expect_sleep();
    nrm_resource_release(mr);
}

/* ---- fork ---- */

static void
decay_in_child(void)
{
    CHECK(!nrm__background_is_running());
    void *ptr = allocate(shared, 70 * NRM__MIB);
    CHECK_OK(nrm_resource_deallocate(shared, ptr, 0, NULL)); /* no thread keeps it */
    CHECK(nrm__background_is_running());
    CHECK_GT(reserved_nbytes(shared), NRM__GIB); /* not in the calls of the program */
    decays_to(shared, 0);
    nrm__pool_check(shared);
    expect_sleep();
}

TEST(a_child_has_a_thread_of_its_own)
{
    shared = pool_with_decay("300 ms");
    fill_and_free(shared, 70 * NRM__MIB); /* watched from now on */
    CHECK_IN_CHILD(decay_in_child);
    decays_to(shared, 0);
    nrm__pool_check(shared);
    nrm_resource_release(shared);
}

static void
use_in_child(void)
{
    fill_and_free(shared, 3 * NRM__MIB);
    nrm__pool_check(shared);
}

TEST(a_fork_while_memory_goes_back)
{
    shared = pool_with_decay("1 ms");
    for (int i = 0; i < 60; i++) {
        fill_and_free(shared, 3 * NRM__MIB);
        nrm__sleep_ns((uint64_t)(i % 6) * 300000);
        CHECK_IN_CHILD(use_in_child);
    }
    nrm__pool_check(shared);
    nrm_resource_release(shared);
}

static void
find_holes_in_child(void)
{
    nrm__pool_check(shared);
    for (size_t i = 0; i < N_LARGE; i += 3) {
        CHECK(has_pattern(large[i], LARGE, (unsigned)i, LARGE));
    }
    void *ptr = NULL;
    REQUIRE_OK(nrm_resource_allocate_zeroed(shared, 11 * NRM__MIB, 0, NULL, &ptr));
    const char *bytes = ptr;
    CHECK(bytes[0] == 0 && memcmp(bytes, bytes + 1, 11 * NRM__MIB - 1) == 0);
    CHECK_OK(nrm_resource_deallocate(shared, ptr, 0, NULL));
    nrm__pool_check(shared);
}

TEST(a_fork_while_pages_go_back)
{
    shared = pool_with_decay("2 ms");
    for (int i = 0; i < 25; i++) {
        leave_holes(shared);
        nrm__sleep_ns(2000000 + (uint64_t)(i % 8) * 300000);
        CHECK_IN_CHILD(find_holes_in_child);
        nrm__pool_check(shared);
        expect_survivors(shared);
    }
    nrm_resource_release(shared);
}

static void
take_all_in_child(void)
{
    alarm(20); /* who waits for pages that nobody brings back waits for ever */
    nrm__pool_check(shared);
    void *ptr = NULL;
    CHECK_OK(nrm_resource_allocate_zeroed(shared, 50 * NRM__MIB, 0, NULL, &ptr));
    REQUIRE(ptr != NULL);
    const char *bytes = ptr;
    CHECK(bytes[0] == 0 && memcmp(bytes, bytes + 1, 50 * NRM__MIB - 1) == 0);
    CHECK_OK(nrm_resource_deallocate(shared, ptr, 0, NULL));
    nrm__pool_check(shared);
}

static bool
waits_for_pages_to_go(struct nrm__pool *pool)
{
    bool goes = false;
    for (int i = 0; i < 1000000 && !goes; i++) {
        nrm__lock_acquire(&pool->lock);
        goes = pool->dropping != NULL;
        nrm__lock_release(&pool->lock);
    }
    return goes;
}

TEST(a_child_has_what_was_losing_its_pages)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    nrm_host_options small_pages = NRM_OPTIONS(nrm_host_options);
    nrm_resource *host = NULL;
    int n_met = 0;
    small_pages.huge_pages = NRM_HUGE_PAGES_NEVER; /* slow to drop */
    CHECK_OK(nrm_host_create(&small_pages, &host));
    CHECK_OK(nrm_option_set(NRM_OPT_DECAY, "2 ms"));
    options.initial_nbytes = 2 * NRM__MIB;
    options.maximum_nbytes = 64 * NRM__MIB;
    REQUIRE_OK(nrm_pool_create(host, &options, &shared));
    nrm_resource_release(host);
    void *most = allocate(shared, 62 * NRM__MIB); /* a segment */
    CHECK_OK(nrm_resource_deallocate(shared, most, 0, NULL));
    void *first = allocate(shared, 5 * NRM__MIB);
    for (int i = 0; i < 10; i++) {
        char *ptr = allocate(shared, 50 * NRM__MIB);
        memset(ptr, 1, 50 * NRM__MIB);
        CHECK_OK(nrm_resource_deallocate(shared, ptr, 0, NULL));
        n_met += waits_for_pages_to_go((struct nrm__pool *)shared);
        CHECK_IN_CHILD(take_all_in_child);
    }
    CHECK_GT(n_met, 0);
    CHECK_OK(nrm_resource_deallocate(shared, first, 0, NULL));
    nrm_resource_release(shared);
}

CHECK_MAIN
