/* What threads keep for themselves, while others are at it: wrong frees at the same
   moment, trims under hot loops, forks, and the end of threads and of pools. */
#include <sched.h>

#include "base/bits.h"
#include "core/uses.h"
#include "os/system.h"
#include "pools/pool.h"
#include "raced_pool.h"
#include "workers.h"

static const struct size_case {
    const char *name;
    size_t nbytes;
} size_cases[] = {
    {"a cell of 64 B", 64},
    {"a cell of 8000 B", 8000},
    {"a block of 9000 B", 9000},
    {"a block of 300 kB", 300000},
};

/* ---- two at one block ---- */

/* Two threads meet here, spinning, so that they go on within a few instructions. */
struct meeting {
    atomic_uint n_arrived;
};

static void
meet(struct meeting *meeting)
{
    unsigned turn = atomic_fetch_add(&meeting->n_arrived, 1) / 2;
    while (atomic_load(&meeting->n_arrived) / 2 == turn) {
        sched_yield();
    }
}

static struct meeting before_free, after_free;

static void *_Atomic contested;

static atomic_uint n_freed, n_refused;

static int n_contests;

static void
free_contested(void *unused)
{
    (void)unused;
    for (int i = 0; i < n_contests; i++) {
        meet(&before_free);
        nrm_status status =
            nrm_resource_deallocate(pool, atomic_load(&contested), 0, NULL);
        CHECK(status == NRM_OK || status == NRM_NOT_OWNED);
        atomic_fetch_add(status == NRM_OK ? &n_freed : &n_refused, 1);
        meet(&after_free);
    }
}

TEST_EACH(of_two_frees_at_the_same_time_one_wins, size_cases)
{
    struct worker worker;
    begin();
    fill_cache(pool);
    worker_start(&worker);
    worker_run(&worker, fill_cache, pool);
    n_contests = 4000 / SLOW;
    atomic_store(&n_freed, 0);
    atomic_store(&n_refused, 0);
    worker_ask(&worker, free_contested, NULL);
    for (int i = 0; i < n_contests; i++) {
        atomic_store(&contested, allocate(pool, row->nbytes));
        meet(&before_free);
        nrm_status status =
            nrm_resource_deallocate(pool, atomic_load(&contested), 0, NULL);
        CHECK(status == NRM_OK || status == NRM_NOT_OWNED);
        atomic_fetch_add(status == NRM_OK ? &n_freed : &n_refused, 1);
        meet(&after_free);
        CHECK_EQ(live_nbytes(pool), 0);
    }
    worker_wait(&worker);
    CHECK_EQ(atomic_load(&n_freed), (unsigned)n_contests);
    CHECK_EQ(atomic_load(&n_refused), (unsigned)n_contests);
    worker_end(&worker);
    end();
}

/* ---- counts ---- */

static atomic_bool publishes;

/* Blocks of more than a thread counts for itself alone: it publishes at each step.
   Between pairs it leaves time for a look. */
static void
publish_all_the_time(void *unused)
{
    (void)unused;
    while (atomic_load(&publishes)) {
        void *ptr = allocate(pool, 2 * NRM__MIB);
        CHECK_OK(nrm_resource_deallocate(pool, ptr, 0, NULL));
        nrm__sleep_ns(20000);
    }
}

TEST(counts_are_of_one_moment_while_threads_publish)
{
    struct worker worker;
    nrm_statistics statistics = {0};
    int64_t before = 0;
    begin();
    worker_start(&worker);
    atomic_store(&publishes, true);
    worker_ask(&worker, publish_all_the_time, NULL);
    for (int i = 0; i < 20000 / SLOW; i++) {
        CHECK_OK(nrm_resource_statistics(pool, &statistics));
        CHECK(statistics.current_count == 0 || statistics.current_count == 1);
        CHECK(statistics.current_bytes >= 0 &&
              statistics.current_bytes <= (int64_t)(2 * NRM__MIB));
        CHECK(statistics.total_count >= before);
        before = statistics.total_count;
    }
    atomic_store(&publishes, false);
    worker_wait(&worker);
    worker_end(&worker);
    end();
}

/* Blocks of the size that was there before and of the one that is there now: whatever a
   thread took for one of them, they do not overlap. */
static void
check_apart(size_t first, size_t second)
{
    enum { N = 6 };
    void *ptrs[N];
    for (unsigned i = 0; i < N; i++) {
        size_t nbytes = i % 2 ? first : second;
        ptrs[i] = allocate(pool, nbytes);
        write_pattern(ptrs[i], nbytes, i);
    }
    for (unsigned i = 0; i < N; i++) {
        size_t nbytes = i % 2 ? first : second;
        CHECK(has_pattern(ptrs[i], nbytes, i, nbytes));
        CHECK_OK(nrm_resource_deallocate(pool, ptrs[i], 0, NULL));
    }
}

TEST(a_free_that_races_with_a_resize_tears_nothing)
{
    struct worker worker;
    begin();
    fill_cache(pool);
    worker_start(&worker);
    worker_run(&worker, fill_cache, pool);
    n_contests = 6000 / SLOW;
    worker_ask(&worker, free_contested, NULL);
    for (int i = 0; i < n_contests; i++) {
        size_t large = 200000 + (size_t)(i % 7) * 1024, small = 20000;
        void *ptr = allocate(pool, large), *moved = ptr;
        atomic_store(&contested, ptr);
        meet(&before_free);
        nrm_status status = nrm_resource_reallocate(pool, ptr, small, 0, NULL, &moved);
        meet(&after_free);
        CHECK(status == NRM_OK || status == NRM_NOT_OWNED);
        nrm_block_info info;
        if (status == NRM_OK && nrm_block_find(moved, &info) == NRM_OK) {
            nrm_resource_release(info.resource);
            CHECK_OK(nrm_resource_deallocate(pool, moved, 0, NULL));
        }
        CHECK_EQ(live_nbytes(pool), 0);
        check_apart(large, small);
    }
    worker_wait(&worker);
    worker_end(&worker);
    end();
}

/* ---- trims ---- */

static atomic_bool loops_stop;

static atomic_size_t n_loops;

static void
loop(void *unused)
{
    (void)unused;
    uint64_t state = nrm__thread_id();
    while (!atomic_load(&loops_stop)) {
        size_t nbytes = kept_nbytes[next_random(&state) % N_KEPT_SIZES];
        unsigned char *ptr = allocate(pool, nbytes);
        ptr[0] = ptr[nbytes - 1] = 7;
        CHECK_OK(nrm_resource_deallocate(pool, ptr, 0, NULL));
        atomic_fetch_add_explicit(&n_loops, 1, memory_order_relaxed);
    }
}

static void
start_loops(struct worker *workers, int n)
{
    atomic_store(&loops_stop, false);
    atomic_store(&n_loops, 0);
    for (int i = 0; i < n; i++) {
        worker_start(&workers[i]);
        worker_ask(&workers[i], loop, NULL);
    }
    while (atomic_load(&n_loops) < 1000) {
        sched_yield();
    }
}

static void
end_loops(struct worker *workers, int n)
{
    atomic_store(&loops_stop, true);
    for (int i = 0; i < n; i++) {
        worker_wait(&workers[i]);
        worker_end(&workers[i]);
    }
}

/* They have something to keep again as soon as it was taken from them. */
TEST(a_trim_ends_though_other_threads_do_not)
{
    struct worker workers[3];
    begin();
    start_loops(workers, 3);
    for (int i = 0; i < 50; i++) {
        CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    }
    end_loops(workers, 3);
    end();
}

static void
trim_in_loop(void *unused)
{
    (void)unused;
    while (!atomic_load(&loops_stop)) {
        CHECK_OK(nrm_resource_trim(pool, 0, NULL));
        atomic_fetch_add(&n_loops, 1);
    }
}

/* The segment that it gets for a block is free, and a trim takes it, before the block
   does. */
TEST(a_request_finds_memory_though_others_trim_all_the_time)
{
    enum { N_TRIMMERS = 4 };
    struct worker workers[N_TRIMMERS];
    begin();
    atomic_store(&loops_stop, false);
    atomic_store(&n_loops, 0);
    for (int i = 0; i < N_TRIMMERS; i++) {
        worker_start(&workers[i]);
        worker_ask(&workers[i], trim_in_loop, NULL);
    }
    while (atomic_load(&n_loops) < 100) {
        sched_yield();
    }
    for (int i = 0; i < 20000 / SLOW; i++) {
        void *ptr = NULL;
        REQUIRE_OK(nrm_resource_allocate(pool, 300000, 0, NULL, &ptr));
        CHECK_OK(nrm_resource_deallocate(pool, ptr, 0, NULL));
    }
    end_loops(workers, N_TRIMMERS);
    end();
}

/* The trim takes the chunk or the segment away, at any moment of the second free. */
TEST_EACH(a_second_free_is_refused_while_a_trim_takes_the_memory_away, size_cases)
{
    struct worker worker;
    begin();
    atomic_store(&loops_stop, false);
    worker_start(&worker);
    worker_ask(&worker, trim_in_loop, NULL);
    for (int i = 0; i < 200 / SLOW; i++) {
        unsigned char *ptr = allocate(pool, row->nbytes);
        ptr[0] = 1;
        size_t end_of_trims = atomic_load(&n_loops) + 2;
        CHECK_OK(nrm_resource_deallocate(pool, ptr, 0, NULL));
        do {
            CHECK_STATUS(nrm_resource_deallocate(pool, ptr, 0, NULL), NRM_NOT_OWNED);
            CHECK_STATUS(nrm_resource_deallocate(pool, ptr + 1, 0, NULL),
                         NRM_NOT_OWNED);
        } while (atomic_load(&n_loops) < end_of_trims);
    }
    atomic_store(&loops_stop, true);
    worker_wait(&worker);
    worker_end(&worker);
    end();
}

/* ---- forks ---- */

static void
use_in_child(void)
{
    struct worker worker;
    void *ptrs[N_KEPT_SIZES];
    for (size_t i = 0; i < N_KEPT_SIZES; i++) {
        ptrs[i] = allocate(pool, kept_nbytes[i]);
        write_pattern(ptrs[i], kept_nbytes[i], (unsigned)i);
    }
    CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    nrm__pool_check(pool);
    if (CHILD_HAS_THREADS) { /* with the thread state of one that is not here */
        worker_start(&worker);
        worker_run(&worker, fill_cache, pool);
        worker_end(&worker);
    }
    for (size_t i = 0; i < N_KEPT_SIZES; i++) {
        CHECK(has_pattern(ptrs[i], kept_nbytes[i], (unsigned)i, kept_nbytes[i]));
        CHECK_OK(nrm_resource_deallocate(pool, ptrs[i], 0, NULL));
    }
    CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    nrm__pool_check(pool);
    nrm_resource_release(pool);
}

TEST(a_child_forked_amid_hot_loops_can_use_and_trim_the_pool)
{
    struct worker workers[3];
    begin();
    start_loops(workers, 3);
    for (int i = 0; i < 40; i++) {
        CHECK_IN_CHILD(use_in_child);
    }
    end_loops(workers, 3);
    end();
}

/* ---- the end of threads and pools ---- */

static void
allocate_contested(void *unused)
{
    (void)unused;
    atomic_store(&contested, allocate(pool, 100000));
}

/* A thread whose magazines are empty holds nothing of the pool. */
/* The background thread may be looking at the pool, and then ends it a little later. */
static void
check_gone(void)
{
    for (int i = 0; i < 1000 && live_nbytes(source) != 0; i++) {
        nrm__sleep_ns(1000000);
    }
    CHECK_EQ(live_nbytes(source), 0);
}

TEST(a_pool_may_die_while_a_thread_that_used_it_ends)
{
    for (int i = 0; i < 1500 / SLOW; i++) {
        struct worker worker;
        begin();
        worker_start(&worker);
        worker_run(&worker, allocate_contested, NULL);
        CHECK_OK(nrm_resource_deallocate(pool, atomic_load(&contested), 0, NULL));
        worker_ask(&worker, NULL, NULL); /* ends, now or a little later */
        for (int k = 0; k < i % 40; k++) {
            sched_yield();
        }
        nrm_resource_release(pool);
        pthread_join(worker.thread, NULL);
        sem_destroy(&worker.asked);
        sem_destroy(&worker.answered);
        (void)nrm__retired_drain(0);
        check_gone();
        nrm_resource_release(source);
    }
}

/* The last user goes while other threads free the last blocks. */
enum { N_LAST = 300 }; /* more than a thread keeps */

static void *last_blocks[N_LAST];

static void
free_last_blocks(void *unused)
{
    (void)unused;
    meet(&before_free);
    for (size_t i = 0; i < N_LAST; i++) {
        CHECK_OK(nrm_resource_deallocate(pool, last_blocks[i], 0, NULL));
    }
}

TEST(the_last_user_may_go_while_the_last_blocks_are_freed)
{
    struct worker worker;
    worker_start(&worker);
    for (int i = 0; i < 800 / SLOW; i++) {
        begin();
        worker_run(&worker, fill_cache, pool);
        for (size_t k = 0; k < N_LAST; k++) {
            last_blocks[k] = allocate(pool, k % 8 ? 100 : 20000);
        }
        worker_ask(&worker, free_last_blocks, NULL);
        meet(&before_free);
        for (int k = 0; k < i % 30; k++) {
            sched_yield();
        }
        nrm_resource_release(pool);
        worker_wait(&worker);
        (void)nrm__retired_drain(0);
        check_gone();
        nrm_resource_release(source);
    }
    worker_end(&worker);
}

/* ---- producers and consumers ---- */

#define N_PAIRS 4
#define RING 256

struct ring {
    _Atomic(unsigned char *) blocks[RING];
    uint64_t seed;
    int64_t nbytes, n_blocks;
};

static size_t
nbytes_of(uint64_t random)
{
    return random % 16 == 0 ? 8193 + random / 16 % 300000 : 1 + random / 16 % 2000;
}

static void
produce(void *argument)
{
    struct ring *ring = argument;
    uint64_t state = ring->seed;
    for (int i = 0; i < 40000 / SLOW; i++) {
        size_t nbytes = nbytes_of(next_random(&state));
        unsigned char *block = allocate(pool, nbytes);
        block[0] = block[nbytes - 1] = (unsigned char)i;
        while (atomic_load(&ring->blocks[i % RING]) != NULL) {
            sched_yield();
        }
        atomic_store(&ring->blocks[i % RING], block);
        ring->nbytes += (int64_t)nbytes;
        ring->n_blocks++;
    }
}

static void
consume(void *argument)
{
    struct ring *ring = argument;
    uint64_t state = ring->seed;
    for (int i = 0; i < 40000 / SLOW; i++) {
        size_t nbytes = nbytes_of(next_random(&state));
        unsigned char *block;
        while ((block = atomic_load(&ring->blocks[i % RING])) == NULL) {
            sched_yield();
        }
        atomic_store(&ring->blocks[i % RING], NULL);
        CHECK(block[0] == (unsigned char)i && block[nbytes - 1] == (unsigned char)i);
        CHECK_OK(nrm_resource_deallocate(pool, block, 0, NULL));
    }
}

TEST(what_some_threads_produce_others_consume)
{
    static struct ring rings[N_PAIRS];
    struct worker workers[2 * N_PAIRS];
    nrm_statistics statistics = {0};
    int64_t nbytes = 0, n_blocks = 0;
    begin();
    for (int i = 0; i < N_PAIRS; i++) {
        rings[i].seed = (uint64_t)i + 99;
    }
    for (int i = 0; i < 2 * N_PAIRS; i++) {
        worker_start(&workers[i]);
        worker_ask(&workers[i], i % 2 ? consume : produce, &rings[i / 2]);
    }
    for (int i = 0; i < 2 * N_PAIRS; i++) {
        worker_wait(&workers[i]);
        nbytes += i % 2 ? 0 : rings[i / 2].nbytes;
        n_blocks += i % 2 ? 0 : rings[i / 2].n_blocks;
    }
    REQUIRE_OK(nrm_resource_statistics(pool, &statistics));
    CHECK_EQ(statistics.current_count, 0);
    CHECK_EQ(statistics.total_bytes, nbytes);
    CHECK_EQ(statistics.total_count, n_blocks);
    CHECK_EQ(statistics.errors, 0);
    CHECK_LE(statistics.peak_count,
             N_PAIRS * (RING + 2) + 2 * N_PAIRS * (NRM__SHARD_COUNT + 1));
    for (int i = 0; i < 2 * N_PAIRS; i++) {
        worker_end(&workers[i]);
    }
    end();
}

CHECK_MAIN
