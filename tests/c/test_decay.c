/* What lies free in a pool goes back to the system after a while, by the background
   thread, which sleeps when there is nothing to do. */
#include <string.h>

#include "base/bits.h"
#include "core/background.h"
#include "core/uses.h"
#include "fixtures.h"
#include "nrm/options.h"
#include "os/system.h"
#include "pools/pool.h"

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
    nrm__sleep_ns(150000000); /* what it has begun it may end */
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

/* ---- fork ---- */

static void
decay_in_child(void)
{
    CHECK(!nrm__background_is_running());
    int64_t reserved = reserved_nbytes(shared);
    void *ptr = allocate(shared, 70 * NRM__MIB);
    CHECK_OK(nrm_resource_deallocate(shared, ptr, 0, NULL));
    CHECK(nrm__background_is_running());
    CHECK_GE(reserved_nbytes(shared), reserved);
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

CHECK_MAIN
