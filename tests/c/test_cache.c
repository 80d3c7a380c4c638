/* What threads keep for themselves, one thing at a time: what a trim, the end of a thread and
   the end of a pool make of it, what is counted, and what the short way refuses. What happens
   at the same time is in test_cache_races.c. */
#include <limits.h>
#include <string.h>

#include "base/bits.h"
#include "core/uses.h"
#include "nrm/options.h"
#include "pools/pool.h"
#include "simulator.h"
#include "workers.h"
#include "os/system.h"

#define N_WORKERS 8

/* A pool over a source that stays when the pool is gone. */
struct pooled {
    nrm_resource *source, *pool;
};

static struct pooled
make_pool(size_t maximum_nbytes)
{
    struct pooled pooled = {.source = host_source()};
    nrm_resource_retain(pooled.source);
    pooled.pool = pool_over(pooled.source, maximum_nbytes);
    return pooled;
}

/* Of a pool that is gone, or goes now: 0, a moment later where the background thread is
   looking at it. */
static int64_t
left_nbytes(nrm_resource *source)
{
    for (int i = 0; i < 1000 && live_nbytes(source) != 0; i++) {
        (void)nrm__retired_drain(0);
        nrm__sleep_ns(1000000);
    }
    return live_nbytes(source);
}

static void
check_gone(struct pooled *pooled)
{
    CHECK_EQ(left_nbytes(pooled->source), 0);
    nrm_resource_release(pooled->source);
}

static void
release(struct pooled *pooled)
{
    nrm__pool_check(pooled->pool);
    nrm_resource_release(pooled->pool);
    check_gone(pooled);
}

static void
start_workers(struct worker *workers, int n)
{
    for (int i = 0; i < n; i++) {
        worker_start(&workers[i]);
    }
}

static void
end_workers(struct worker *workers, int n)
{
    for (int i = 0; i < n; i++) {
        worker_end(&workers[i]);
    }
}

/* ---- trim ---- */

TEST(a_trim_takes_what_idle_threads_keep)
{
    struct worker workers[N_WORKERS];
    struct pooled pooled = make_pool(0);
    start_workers(workers, N_WORKERS);
    for (int i = 0; i < N_WORKERS; i++) {
        worker_run(&workers[i], fill_cache, pooled.pool);
    }
    CHECK_EQ(live_nbytes(pooled.pool), 0);
    CHECK_GT(reserved_nbytes(pooled.pool), 0);
    CHECK_OK(nrm_resource_trim(pooled.pool, 0, NULL));
    CHECK_EQ(reserved_nbytes(pooled.pool), 0);
    nrm__pool_check(pooled.pool);
    end_workers(workers, N_WORKERS);
    release(&pooled);
}

TEST(a_trim_leaves_what_lives)
{
    struct worker worker;
    struct pooled pooled = make_pool(0);
    worker_start(&worker);
    unsigned char *large = allocate(pooled.pool, 100 * NRM__MIB);
    write_pattern(large, 100 * NRM__MIB, 3);
    worker_run(&worker, fill_cache, pooled.pool);
    fill_cache(pooled.pool);
    CHECK_OK(nrm_resource_trim(pooled.pool, 0, NULL));
    CHECK_EQ(n_kept(pooled.pool), 0u);
    CHECK_GE(reserved_nbytes(pooled.pool), live_nbytes(pooled.pool));
    CHECK_LT(reserved_nbytes(pooled.pool), live_nbytes(pooled.pool) + 128 * 1024);
    CHECK(has_pattern(large, 100 * NRM__MIB, 3, 100 * NRM__MIB));
    worker_run(&worker, fill_cache, pooled.pool); /* and again */
    CHECK_OK(nrm_resource_deallocate(pooled.pool, large, 0, NULL));
    CHECK_OK(nrm_resource_trim(pooled.pool, 0, NULL));
    CHECK_EQ(reserved_nbytes(pooled.pool), 0);
    worker_end(&worker);
    release(&pooled);
}

/* Threads keep up to 8 MiB each, which count as taken. */
TEST(what_threads_keep_does_not_fill_a_pool_with_a_limit)
{
    struct worker worker;
    struct pooled pooled = make_pool(24 * NRM__MIB);
    worker_start(&worker);
    worker_run(&worker, fill_cache, pooled.pool);
    fill_cache(pooled.pool);
    void *ptr = NULL;
    CHECK_OK(nrm_resource_allocate(pooled.pool, 23 * NRM__MIB, 0, NULL, &ptr));
    CHECK_OK(nrm_resource_deallocate(pooled.pool, ptr, 0, NULL));
    worker_end(&worker);
    release(&pooled);
}

/* Cells of 64 B in one chunk. */
#define CELLS_OF_CHUNK 1024

static void
keep_some_cells(void *mr)
{
    void *ptrs[100];
    for (int i = 0; i < 100; i++) {
        ptrs[i] = allocate(mr, 64);
    }
    for (int i = 0; i < 60; i++) { /* the others live as long as the pool */
        CHECK_OK(nrm_resource_deallocate(mr, ptrs[i], 0, NULL));
    }
    CHECK_GT(n_kept(mr), 30u);
}

TEST(a_full_pool_hands_out_the_cells_that_threads_keep)
{
    struct worker worker;
    struct pooled pooled = make_pool(4 * NRM__MIB);
    void *ptr;
    worker_start(&worker);
    worker_run(&worker, keep_some_cells, pooled.pool);
    size_t n_cells = 40;
    while (nrm_resource_allocate(pooled.pool, 65536, 0, NULL, &ptr) == NRM_OK) {
    }
    while (nrm_resource_allocate(pooled.pool, 64, 0, NULL, &ptr) == NRM_OK) {
        n_cells++;
    }
    CHECK_EQ(n_cells % CELLS_OF_CHUNK, 0u);
    nrm__pool_check(pooled.pool);
    worker_end(&worker);
    nrm_resource_release(pooled.pool);
    nrm_resource_release(pooled.source);
}

/* ---- the end of a thread ---- */

struct left {
    nrm_resource *pool;
    void *ptrs[N_KEPT_SIZES];
};

static void
leave_blocks(void *argument)
{
    struct left *left = argument;
    fill_cache(left->pool);
    for (size_t i = 0; i < N_KEPT_SIZES; i++) {
        left->ptrs[i] = allocate(left->pool, kept_nbytes[i]);
        write_pattern(left->ptrs[i], kept_nbytes[i], (unsigned)i);
    }
}

static void
free_left(void *argument)
{
    struct left *left = argument;
    for (size_t i = 0; i < N_KEPT_SIZES; i++) {
        CHECK(has_pattern(left->ptrs[i], kept_nbytes[i], (unsigned)i, kept_nbytes[i]));
        CHECK_OK(nrm_resource_deallocate(left->pool, left->ptrs[i], 0, NULL));
    }
}

TEST(a_thread_that_ends_gives_back_what_it_kept)
{
    struct worker worker;
    struct pooled pooled = make_pool(0);
    for (int i = 0; i < 20; i++) {
        worker_start(&worker);
        worker_run(&worker, fill_cache, pooled.pool);
        worker_end(&worker);
        nrm__pool_check(pooled.pool);
    }
    CHECK_LT(reserved_nbytes(pooled.pool), 40 * (int64_t)NRM__MIB);
    CHECK_OK(nrm_resource_trim(pooled.pool, 0, NULL));
    CHECK_EQ(reserved_nbytes(pooled.pool), 0);
    release(&pooled);
}

TEST(the_blocks_of_a_thread_that_ended_can_be_freed_by_others)
{
    struct worker worker;
    struct pooled pooled = make_pool(0);
    struct left left = {.pool = pooled.pool};
    nrm_statistics before, after;
    worker_start(&worker);
    worker_run(&worker, leave_blocks, &left);
    REQUIRE_OK(nrm_resource_statistics(pooled.pool, &before));
    worker_end(&worker);
    REQUIRE_OK(nrm_resource_statistics(pooled.pool, &after));
    CHECK_EQ(after.current_bytes, before.current_bytes);
    CHECK_EQ(after.current_count, (int64_t)N_KEPT_SIZES);
    CHECK_EQ(after.total_bytes, before.total_bytes);
    CHECK_EQ(after.total_count, before.total_count);
    CHECK_EQ(after.peak_bytes, before.peak_bytes);
    CHECK_EQ(after.peak_count, before.peak_count);
    free_left(&left);
    CHECK_EQ(live_nbytes(pooled.pool), 0);
    CHECK_OK(nrm_resource_trim(pooled.pool, 0, NULL));
    CHECK_EQ(reserved_nbytes(pooled.pool), 0);
    release(&pooled);
}

/* ---- the end of a pool ---- */

static void
in_order_user_first(struct pooled *pooled, struct left *left)
{
    leave_blocks(left);
    nrm_resource_release(pooled->pool);
    free_left(left);
}

static void
in_order_block_first(struct pooled *pooled, struct left *left)
{
    leave_blocks(left);
    free_left(left);
    nrm_resource_release(pooled->pool);
}

static void
by_another_thread(struct pooled *pooled, struct left *left)
{
    struct worker worker;
    worker_start(&worker);
    leave_blocks(left);
    worker_run(&worker, fill_cache, pooled->pool);
    nrm_resource_release(pooled->pool);
    worker_run(&worker, free_left, left);
    worker_end(&worker);
}

/* The thread that has the blocks ends in between. */
static void
after_its_thread(struct pooled *pooled, struct left *left)
{
    struct worker worker;
    worker_start(&worker);
    worker_run(&worker, leave_blocks, left);
    nrm_resource_release(pooled->pool);
    worker_end(&worker);
    free_left(left);
}

/* Frees a few blocks in every round of destructors that there is, but for the last one where
   ThreadSanitizer has forgotten the thread by then. The state of the thread goes before. */
#define N_LATE_ROUNDS (PTHREAD_DESTRUCTOR_ITERATIONS - IS_TSAN)

static pthread_key_t late_key;
static int n_late_rounds;

static void
free_late(void *argument)
{
    struct left *left = argument;
    for (size_t i = 0; i < N_KEPT_SIZES; i++) {
        if (i % N_LATE_ROUNDS == (size_t)n_late_rounds) {
            CHECK(has_pattern(left->ptrs[i], kept_nbytes[i], (unsigned)i,
                              kept_nbytes[i]));
            CHECK_OK(nrm_resource_deallocate(left->pool, left->ptrs[i], 0, NULL));
        }
    }
    if (++n_late_rounds < N_LATE_ROUNDS) {
        pthread_setspecific(late_key, left);
    }
}

static void
leave_to_destructor(void *left)
{
    leave_blocks(left);
    pthread_setspecific(late_key, left);
}

static void
in_a_destructor(struct pooled *pooled, struct left *left)
{
    struct worker worker;
    n_late_rounds = 0;
    CHECK_EQ(pthread_key_create(&late_key, free_late), 0);
    worker_start(&worker);
    worker_run(&worker, leave_to_destructor, left);
    nrm_resource_release(pooled->pool);
    worker_end(&worker);
    CHECK_EQ(n_late_rounds, N_LATE_ROUNDS);
    pthread_key_delete(late_key);
}

static const struct ending {
    const char *name;
    void (*run)(struct pooled *pooled, struct left *left);
} endings[] = {
    {"user first", in_order_user_first},
    {"block first", in_order_block_first},
    {"freed by another thread", by_another_thread},
    {"after the thread that allocated", after_its_thread},
    {"in the destructor of another key", in_a_destructor},
};

TEST_EACH(a_pool_dies_although_threads_keep_cells_of_it, endings)
{
    struct worker workers[3];
    struct pooled pooled = make_pool(0);
    struct left left = {.pool = pooled.pool};
    start_workers(workers, 3);
    for (int i = 0; i < 3; i++) {
        worker_run(&workers[i], fill_cache, pooled.pool);
    }
    CHECK_GT(live_nbytes(pooled.source), 0);
    row->run(&pooled, &left);
    check_gone(&pooled);
    end_workers(workers, 3);
}

static struct pooled in_fork;
static struct left left_in_fork;

static void
free_in_child(void)
{
    struct worker worker;
    free_left(&left_in_fork);
    CHECK_EQ(left_nbytes(in_fork.source), 0);
    struct pooled other = make_pool(0);
    if (CHILD_HAS_THREADS) {
        worker_start(&worker);
        worker_run(&worker, fill_cache, other.pool);
        worker_end(&worker);
    }
    release(&other);
}

TEST(a_pool_dies_in_a_child_although_threads_of_the_parent_kept_cells)
{
    struct worker workers[3];
    in_fork = make_pool(0);
    left_in_fork.pool = in_fork.pool;
    start_workers(workers, 3);
    for (int i = 0; i < 3; i++) {
        worker_run(&workers[i], fill_cache, in_fork.pool);
    }
    leave_blocks(&left_in_fork);
    nrm_resource_release(in_fork.pool);
    CHECK_IN_CHILD(free_in_child);
    free_left(&left_in_fork);
    check_gone(&in_fork);
    end_workers(workers, 3);
}

static void
release_in_child(void)
{
    CHECK_OK(nrm_resource_trim(in_fork.pool, 0, NULL));
    CHECK_EQ(reserved_nbytes(in_fork.pool), 0);
    fill_cache(in_fork.pool);
    release(&in_fork);
}

TEST(a_child_trims_what_threads_of_the_parent_kept)
{
    struct worker workers[3];
    in_fork = make_pool(0);
    start_workers(workers, 3);
    for (int i = 0; i < 3; i++) {
        worker_run(&workers[i], fill_cache, in_fork.pool);
    }
    fill_cache(in_fork.pool);
    CHECK_IN_CHILD(release_in_child);
    end_workers(workers, 3);
    release(&in_fork);
}

/* ---- what is counted ---- */

struct routed {
    struct pooled small;
    nrm_resource *large, *route;
};

static struct routed
make_route(nrm_resource *large, size_t threshold)
{
    struct routed routed = {.small = make_pool(0), .large = large};
    nrm_route_options options = NRM_OPTIONS(nrm_route_options);
    options.large = large;
    options.small = options.rescue = routed.small.pool;
    options.threshold = threshold;
    CHECK_OK(nrm_route_create(&options, &routed.route));
    return routed;
}

static void
release_route(struct routed *routed)
{
    CHECK_EQ(live_nbytes(routed->route), 0);
    nrm_resource_release(routed->route);
    nrm_resource_release(routed->large);
    release(&routed->small);
}

/* Counters kept by hand. */
struct expected {
    int64_t bytes, count, peak_bytes, peak_count, total_bytes, total_count;
};

static void
expect_in(struct expected *expected, size_t nbytes)
{
    expected->bytes += (int64_t)nbytes;
    expected->count++;
    expected->total_bytes += (int64_t)nbytes;
    expected->total_count++;
    expected->peak_bytes =
        expected->bytes > expected->peak_bytes ? expected->bytes : expected->peak_bytes;
    expected->peak_count =
        expected->count > expected->peak_count ? expected->count : expected->peak_count;
}

static void
expect_out(struct expected *expected, size_t nbytes)
{
    expected->bytes -= (int64_t)nbytes;
    expected->count--;
}

/* In place what it grows by counts as allocated; a copy is a second block for a moment. */
static void
expect_resize(struct expected *expected, size_t old_nbytes, size_t nbytes, bool moved)
{
    if (moved) {
        expect_in(expected, nbytes);
        expect_out(expected, old_nbytes);
        return;
    }
    expect_in(expected, nbytes > old_nbytes ? nbytes - old_nbytes : 0);
    expected->count--;
    expected->total_count--;
    if (nbytes < old_nbytes) {
        expected->bytes -= (int64_t)(old_nbytes - nbytes);
    }
}

static void
check_counters(nrm_resource *mr, const struct expected *expected)
{
    nrm_statistics statistics = {0};
    CHECK_OK(nrm_resource_statistics(mr, &statistics));
    CHECK_EQ(statistics.current_bytes, expected->bytes);
    CHECK_EQ(statistics.current_count, expected->count);
    CHECK_EQ(statistics.peak_bytes, expected->peak_bytes);
    CHECK_EQ(statistics.total_bytes, expected->total_bytes);
    CHECK_EQ(statistics.total_count, expected->total_count);
}

#define N_COUNTED 64

/* A walk of one thread through the route and, at times, past it through the pool. */
static void
walk_and_count(nrm_resource *route, nrm_resource *pool, uint64_t seed)
{
    struct {
        void *ptr;
        size_t nbytes;
        bool routed;
    } blocks[N_COUNTED] = {0};
    struct expected of_route = {0}, of_pool = {0};
    for (int step = 0; step < 4000; step++) {
        size_t i = next_random(&seed) % N_COUNTED;
        size_t nbytes =
            1 + next_random(&seed) % (next_random(&seed) % 4 ? 3000 : 900000);
        if (blocks[i].ptr == NULL) {
            blocks[i].routed = next_random(&seed) % 4 != 0;
            blocks[i].nbytes = nbytes;
            blocks[i].ptr = allocate(blocks[i].routed ? route : pool, nbytes);
            expect_in(&of_pool, nbytes);
            if (blocks[i].routed) {
                expect_in(&of_route, nbytes);
            }
            continue;
        }
        nrm_resource *mr = blocks[i].routed ? route : pool;
        if (next_random(&seed) % 3 == 0) {
            void *before = blocks[i].ptr;
            CHECK_OK(
                nrm_resource_reallocate(mr, before, nbytes, 0, NULL, &blocks[i].ptr));
            bool moved = before != blocks[i].ptr;
            expect_resize(&of_pool, blocks[i].nbytes, nbytes, moved);
            if (blocks[i].routed) {
                expect_resize(&of_route, blocks[i].nbytes, nbytes, moved);
            }
            blocks[i].nbytes = nbytes;
            continue;
        }
        CHECK_OK(nrm_resource_deallocate(mr, blocks[i].ptr, 0, NULL));
        expect_out(&of_pool, blocks[i].nbytes);
        if (blocks[i].routed) {
            expect_out(&of_route, blocks[i].nbytes);
        }
        blocks[i].ptr = NULL;
        if (step % 16 == 0) {
            check_counters(route, &of_route);
            check_counters(pool, &of_pool);
        }
    }
    for (size_t i = 0; i < N_COUNTED; i++) {
        CHECK_OK(nrm_resource_deallocate(blocks[i].routed ? route : pool, blocks[i].ptr,
                                         0, NULL));
    }
}

TEST(what_one_thread_does_is_counted_exactly)
{
    struct routed routed = make_route(host_source(), NRM__MIB);
    walk_and_count(routed.route, routed.small.pool, 17);
    release_route(&routed);
}

/* Threads in turn: what each holds back of the counters is bounded in both of them. */
struct turn {
    nrm_resource *mr;
    void **ptrs;
    size_t n, nbytes;
};

static void
allocate_all(void *argument)
{
    struct turn *turn = argument;
    for (size_t i = 0; i < turn->n; i++) {
        turn->ptrs[i] = allocate(turn->mr, turn->nbytes);
    }
}

static void
free_all(void *argument)
{
    struct turn *turn = argument;
    for (size_t i = 0; i < turn->n; i++) {
        CHECK_OK(nrm_resource_deallocate(turn->mr, turn->ptrs[i], 0, NULL));
    }
}

static const struct peak_case {
    const char *name;
    size_t nbytes, n;
    int n_rounds;
} peak_cases[] = {
    {"many blocks of a byte", 1, 100, 400},
    {"blocks of a page", 4096, 50, 100},
    {"large blocks", 500000, 4, 50},
};

TEST_EACH(the_peak_of_several_threads_is_near, peak_cases)
{
    void *ptrs[100];
    struct worker makes, frees;
    struct pooled pooled = make_pool(0);
    struct turn turn = {pooled.pool, ptrs, row->n, row->nbytes};
    nrm_statistics statistics = {0};
    worker_start(&makes);
    worker_start(&frees);
    for (int round = 0; round < row->n_rounds; round++) {
        worker_run(&makes, allocate_all, &turn);
        worker_run(&frees, free_all, &turn);
    }
    REQUIRE_OK(nrm_resource_statistics(pooled.pool, &statistics));
    int64_t bytes = (int64_t)(row->n * row->nbytes), count = (int64_t)row->n;
    CHECK_EQ(statistics.current_bytes, 0);
    CHECK_EQ(statistics.current_count, 0);
    CHECK_EQ(statistics.total_bytes, bytes * row->n_rounds);
    CHECK_EQ(statistics.total_count, count * row->n_rounds);
    /* Each of the two keeps a little less than a block more than this to itself. */
    int64_t bytes_bound = 2 * (NRM__SHARD_BYTES + (int64_t)row->nbytes);
    CHECK_GE(statistics.peak_bytes, bytes - bytes_bound);
    CHECK_LE(statistics.peak_bytes, bytes + bytes_bound);
    CHECK_GE(statistics.peak_count, count - 2 * (NRM__SHARD_COUNT + 1));
    CHECK_LE(statistics.peak_count, count + 2 * (NRM__SHARD_COUNT + 1));
    worker_end(&makes);
    worker_end(&frees);
    release(&pooled);
}

/* ---- blocks below 64 KiB ---- */

TEST(a_block_below_64_KiB_serves_the_next_request_of_about_its_size)
{
    struct pooled pooled = make_pool(0);
    static const size_t pairs[][2] = {
        {8193, 9216}, {16300, 15361}, {20000, 18433}, {40000, 36865}, {65535, 61441}};
    void *first = allocate(pooled.pool, 64); /* makes the short way */
    CHECK_OK(nrm_resource_deallocate(pooled.pool, first, 0, NULL));
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        void *ptr = allocate(pooled.pool, pairs[i][0]);
        CHECK_OK(nrm_resource_deallocate(pooled.pool, ptr, 0, NULL));
        CHECK_EQ(allocate(pooled.pool, pairs[i][1]), ptr);
        CHECK_EQ(live_nbytes(pooled.pool), (int64_t)pairs[i][1]);
        CHECK_OK(nrm_resource_deallocate(pooled.pool, ptr, 0, NULL));
    }
    release(&pooled);
}

TEST(a_pool_with_a_limit_cuts_such_blocks_to_measure)
{
    struct pooled pooled = make_pool(64 * NRM__MIB);
    void *ptrs[4];
    for (int i = 0; i < 4; i++) {
        ptrs[i] = allocate(pooled.pool, 33 * 1024);
    }
    nrm_block_info info;
    REQUIRE_OK(nrm_block_find(ptrs[0], &info));
    CHECK_EQ(info.capacity, 33u * 1024);
    nrm_resource_release(info.resource);
    for (int i = 0; i < 4; i++) {
        CHECK_OK(nrm_resource_deallocate(pooled.pool, ptrs[i], 0, NULL));
    }
    release(&pooled);
}

/* How many blocks of a size this thread keeps. */
static size_t
n_kept_of(nrm_resource *pool, size_t nbytes)
{
    struct nrm__cache *cache;
    struct nrm__slot *slot = nrm__cache_enter_slot(pool, &cache);
    if (!CHECK(slot != NULL)) {
        return 0;
    }
    size_t n = nrm__cache_set_of(slot->magazines, nbytes, 0)->n;
    nrm__cache_leave(cache);
    return n;
}

TEST(blocks_of_a_size_come_and_go_by_halves)
{
    struct pooled pooled = make_pool(0);
    enum { N = 200, NBYTES = 32 * 1024, ALL = NRM__CACHE_WAYS, HALF = ALL / 2 };
    void *ptrs[N];
    void *first = allocate(pooled.pool, 64);
    ptrs[0] = allocate(pooled.pool, NBYTES);
    CHECK_EQ(n_kept_of(pooled.pool, NBYTES), (size_t)HALF);
    for (int i = 1; i < N; i++) {
        ptrs[i] = allocate(pooled.pool, NBYTES);
        CHECK_LE(n_kept_of(pooled.pool, NBYTES), (size_t)HALF);
        CHECK_EQ(live_nbytes(pooled.pool), 64 + (int64_t)(i + 1) * NBYTES);
    }
    nrm__pool_check(pooled.pool);
    for (int i = 0; i < N; i++) {
        size_t before = n_kept_of(pooled.pool, NBYTES);
        CHECK_OK(nrm_resource_deallocate(pooled.pool, ptrs[i], 0, NULL));
        size_t now = n_kept_of(pooled.pool, NBYTES);
        CHECK_EQ(now, before == ALL ? (size_t)(ALL - HALF) : before + 1);
    }
    nrm__pool_check(pooled.pool);
    CHECK_OK(nrm_resource_deallocate(pooled.pool, first, 0, NULL));
    CHECK_EQ(live_nbytes(pooled.pool), 0);
    CHECK_OK(nrm_resource_trim(pooled.pool, 0, NULL));
    CHECK_EQ(reserved_nbytes(pooled.pool), 0);
    release(&pooled);
}

TEST(a_block_that_was_cut_in_place_is_kept_among_those_of_its_size)
{
    struct pooled pooled = make_pool(0);
    void *before = allocate(pooled.pool, 60000), *cut;
    nrm_block_info info;
    CHECK_OK(
        nrm_resource_reallocate(pooled.pool, before, 17 * 1024 - 1, 0, NULL, &cut));
    CHECK(cut == before);
    REQUIRE_OK(nrm_block_find(cut, &info));
    nrm_resource_release(info.resource);
    CHECK_EQ(info.capacity, 18u * 1024);
    CHECK_OK(nrm_resource_deallocate(pooled.pool, cut, 0, NULL));
    CHECK_EQ(allocate(pooled.pool, 17 * 1024), cut);
    CHECK_OK(nrm_resource_deallocate(pooled.pool, cut, 0, NULL));
    release(&pooled);
}

/* ---- from thread to thread ---- */

/* Blocks that one thread makes and another frees: what it has too many of is on the way back
   when the pool ends, or is trimmed. */
static const struct way_end {
    const char *name;
    bool trims;
} way_ends[] = {{"trimmed", true}, {"ended", false}};

TEST_EACH(what_is_on_its_way_to_another_thread_comes_back, way_ends)
{
    static const size_t sizes[] = {64, 1000, 8192, 20000};
    struct pooled pooled = make_pool(0);
    struct worker worker;
    void *ptrs[300];
    struct turn turn = {pooled.pool, ptrs, 300, 0};
    worker_start(&worker);
    for (int round = 0; round < 4; round++) {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            turn.nbytes = sizes[i];
            allocate_all(&turn);
            worker_run(&worker, free_all, &turn);
        }
    }
    nrm__pool_check(pooled.pool);
    CHECK_EQ(live_nbytes(pooled.pool), 0);
    if (row->trims) {
        CHECK_OK(nrm_resource_trim(pooled.pool, 0, NULL));
        CHECK_EQ(reserved_nbytes(pooled.pool), 0);
    }
    release(&pooled);
    worker_end(&worker);
}

/* More of them than a thread has room for: they displace each other all the time. */
TEST(more_pools_and_routes_than_slots_count_right)
{
    enum { N = 60, N_ROUNDS = 40 };
    struct routed routed[N];
    void *ptrs[N][3];
    uint64_t state = 5;
    for (int i = 0; i < N; i++) {
        routed[i] = make_route(host_source(), NRM__MIB);
    }
    for (int round = 0; round < N_ROUNDS; round++) {
        for (int i = 0; i < N; i++) {
            for (int k = 0; k < 3; k++) {
                size_t nbytes = kept_nbytes[next_random(&state) % 8];
                ptrs[i][k] =
                    allocate(k ? routed[i].route : routed[i].small.pool, nbytes);
                write_pattern(ptrs[i][k], 1, (unsigned)i);
            }
            CHECK_EQ(*(unsigned char *)ptrs[i][0], i);
        }
        for (int i = 0; i < N; i++) {
            /* Through the route: it leads to the pool. */
            for (int k = 1; k < 3; k++) {
                CHECK_EQ(*(unsigned char *)ptrs[i][k], i);
                CHECK_OK(nrm_resource_deallocate(routed[i].route, ptrs[i][k], 0, NULL));
            }
            CHECK_OK(
                nrm_resource_deallocate(routed[i].small.pool, ptrs[i][0], 0, NULL));
        }
    }
    for (int i = 0; i < N; i++) {
        nrm_statistics of_route, of_pool;
        REQUIRE_OK(nrm_resource_statistics(routed[i].route, &of_route));
        REQUIRE_OK(nrm_resource_statistics(routed[i].small.pool, &of_pool));
        CHECK_EQ(of_route.current_count, 0);
        CHECK_EQ(of_route.total_count, 2 * N_ROUNDS);
        CHECK_EQ(of_route.peak_count, 2);
        CHECK_EQ(of_pool.total_count, 3 * N_ROUNDS);
        CHECK_EQ(of_pool.peak_count, 3);
        CHECK_OK(nrm_resource_trim(routed[i].small.pool, 0, NULL));
        CHECK_EQ(reserved_nbytes(routed[i].small.pool), 0);
        release_route(&routed[i]);
    }
}

/* ---- what the short way refuses ---- */

static const struct size_case {
    const char *name;
    size_t nbytes;
} size_cases[] = {
    {"a cell of 64 B", 64},       {"a cell of 1000 B", 1000},
    {"the largest cell", 8192},   {"the smallest block", 8193},
    {"a block of 64 KiB", 65536}, {"a block of 300 kB", 300000},
};

static void
check_refused(nrm_resource *mr, const void *ptr)
{
    nrm_statistics before, after;
    CHECK_OK(nrm_resource_statistics(mr, &before));
    CHECK_STATUS(nrm_resource_deallocate(mr, (void *)(uintptr_t)ptr, 0, NULL),
                 NRM_NOT_OWNED);
    CHECK_OK(nrm_resource_statistics(mr, &after));
    CHECK_EQ(after.errors, before.errors + 1);
    after.errors = before.errors;
    CHECK_MEM_EQ(&after, &before, sizeof before);
}

TEST_EACH(wrong_frees_change_nothing, size_cases)
{
    struct routed routed = make_route(host_source(), NRM__MIB);
    struct pooled other = make_pool(0);
    nrm_resource *pool = routed.small.pool;
    fill_cache(pool);
    fill_cache(other.pool);
    unsigned char *ptr = allocate(routed.route, row->nbytes);
    unsigned char *foreign = allocate(other.pool, row->nbytes);
    write_pattern(ptr, row->nbytes, 8);
    nrm_resource *const through[] = {routed.route, pool};
    for (int i = 0; i < 2; i++) {
        for (size_t offset = 1; offset < row->nbytes; offset += 1 + offset / 64) {
            check_refused(through[i], ptr + offset);
        }
        check_refused(through[i], ptr + row->nbytes - 1);
        check_refused(through[i], foreign);
        check_refused(through[i], &routed);
        check_refused(through[i], (void *)64);
        check_refused(through[i], (void *)(UINTPTR_MAX - 63));
    }
    nrm__pool_check(pool);
    CHECK(has_pattern(ptr, row->nbytes, 8, row->nbytes));
    CHECK_OK(nrm_resource_deallocate(routed.route, ptr, 0, NULL));
    for (int i = 0; i < 2; i++) {
        check_refused(through[i], ptr);
        check_refused(through[i], ptr + 1);
        check_refused(through[i], ptr + 2);
        check_refused(through[i], ptr + 3);
        check_refused(through[i], ptr + 4);
    }
    CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    check_refused(pool, ptr); /* its memory is gone too */
    CHECK_OK(nrm_resource_deallocate(other.pool, foreign, 0, NULL));
    release(&other);
    release_route(&routed);
}

TEST_EACH(kept_blocks_read_as_zero_when_zeros_are_asked_for, size_cases)
{
    struct routed routed = make_route(host_source(), NRM__MIB);
    nrm_resource *const through[] = {routed.route, routed.small.pool};
    for (int i = 0; i < 20; i++) {
        nrm_resource *mr = through[i % 2];
        unsigned char *ptr = allocate(mr, row->nbytes);
        memset(ptr, 0xff, row->nbytes);
        CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
        void *zeros = NULL;
        REQUIRE_OK(nrm_resource_allocate_zeroed(mr, row->nbytes, 0, NULL, &zeros));
        for (size_t k = 0; k < row->nbytes; k++) {
            if (!CHECK_EQ(((unsigned char *)zeros)[k], 0)) {
                break;
            }
        }
        memset(zeros, 0xff, row->nbytes);
        CHECK_OK(nrm_resource_deallocate(mr, zeros, 0, NULL));
    }
    release_route(&routed);
}

TEST_EACH(alignments_are_kept_on_the_short_way, size_cases)
{
    static const size_t alignments[] = {1, 2, 64, 128, 256, 4096, 65536};
    struct routed routed = make_route(host_source(), NRM__MIB);
    fill_cache(routed.small.pool);
    for (size_t i = 0; i < sizeof alignments / sizeof *alignments; i++) {
        void *ptrs[8];
        for (int k = 0; k < 8; k++) {
            REQUIRE_OK(nrm_resource_allocate(routed.route, row->nbytes, alignments[i],
                                             NULL, &ptrs[k]));
            CHECK_ALIGNED(ptrs[k], alignments[i]);
        }
        for (int k = 0; k < 8; k++) {
            CHECK_OK(nrm_resource_deallocate(routed.route, ptrs[k], 0, NULL));
        }
    }
    void *ptr = NULL;
    CHECK_STATUS(nrm_resource_allocate(routed.route, row->nbytes, 3, NULL, &ptr),
                 NRM_INVALID_VALUE);
    release_route(&routed);
}

/* ---- a route to page-locked memory ---- */

static nrm_resource *
pinned_pool(void)
{
    nrm_resource *source = NULL;
    CHECK_OK(nrm_pinned_create(NULL, &source));
    return pool_over(source, 0);
}

/* 0 means the alignment of the kind, whoever serves the request. */
TEST(a_pinned_route_aligns_small_blocks_as_its_kind)
{
    simulator_start(NULL);
    struct routed routed = make_route(pinned_pool(), 65536);
    void *ptrs[32];
    for (int i = 0; i < 32;
         i++) { /* a cell of 64 B, which most are no multiple of 256 */
        REQUIRE_OK(nrm_resource_allocate(routed.route, 64, 64, NULL, &ptrs[i]));
    }
    for (int i = 0; i < 32; i++) {
        CHECK_OK(nrm_resource_deallocate(routed.route, ptrs[i], 0, NULL));
    }
    for (int i = 0; i < 32; i++) {
        REQUIRE_OK(nrm_resource_allocate(routed.route, 64, 0, NULL, &ptrs[i]));
        CHECK_ALIGNED(ptrs[i], 256);
    }
    for (int i = 0; i < 32; i++) {
        CHECK_OK(nrm_resource_deallocate(routed.route, ptrs[i], 0, NULL));
    }
    release_route(&routed);
    simulator_check_faults();
}

static void
free_in_use(void *argument)
{
    struct turn *turn = argument;
    CHECK_OK(nrm_resource_deallocate(turn->mr, turn->ptrs[0], 0, NULL));
}

/* Where a device reads ordinary memory in place, what it copies from is not handed out
   before the copy is done, though a thread would have kept it. */
TEST(ordinary_memory_that_a_device_reads_is_not_kept)
{
    struct nrm_cudasim_config config = simulator_config();
    simulator_start(&config);
    sim.set_attribute(0, NRM_CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, 1);
    nrm_CUcontext context;
    nrm_CUstream stream;
    nrm_CUdeviceptr device;
    CHECK_EQ(cuda.cuInit(0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuDevicePrimaryCtxRetain(&context, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuCtxSetCurrent(context), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamCreate(&stream, NRM_CU_STREAM_NON_BLOCKING),
             NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemAlloc(&device, 4096), NRM_CUDA_SUCCESS);
    struct routed routed = make_route(pinned_pool(), 65536);
    void *large = allocate(routed.route, 100000); /* the pool knows its context now */
    fill_cache(routed.small.pool);
    void *ptr = NULL;
    REQUIRE_OK(nrm_resource_allocate(routed.route, 1000, 64, NULL, &ptr));
    sim.hold_stream(stream);
    CHECK_EQ(cuda.cuMemcpyHtoDAsync(device, ptr, 1000, stream), NRM_CUDA_SUCCESS);
    struct turn turn = {routed.route, &ptr, 1, 1000};
    free_in_use(&turn);
    CHECK_EQ(live_nbytes(routed.small.pool), 0);
    void *others[200];
    for (int i = 0; i < 200; i++) {
        REQUIRE_OK(nrm_resource_allocate(routed.route, 1000, 64, NULL, &others[i]));
        CHECK_NE(others[i], ptr);
    }
    for (int i = 0; i < 200; i++) {
        CHECK_OK(nrm_resource_deallocate(routed.route, others[i], 0, NULL));
    }
    sim.release_stream(stream);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    CHECK_OK(nrm_resource_deallocate(routed.route, large, 0, NULL));
    CHECK_OK(nrm_resource_trim(routed.route, 0, NULL));
    CHECK_OK(nrm_resource_trim(routed.small.pool, 0, NULL));
    CHECK_EQ(reserved_nbytes(routed.small.pool), 0);
    release_route(&routed);
    CHECK_EQ(cuda.cuMemFree(device), NRM_CUDA_SUCCESS);
    simulator_check_faults();
}

/* The upper pool is the last user of the lower one, of which this thread kept cells. */
TEST(a_pool_under_a_pool_dies_with_it_though_a_thread_kept_cells_of_it)
{
    nrm_resource *source = host_source();
    nrm_resource_retain(source); /* pool_over takes one */
    nrm_resource *lower = pool_over(source, 0);
    nrm_resource_retain(lower);
    nrm_resource *upper = pool_over(lower, 0);
    CHECK_OK(nrm_resource_deallocate(lower, allocate(lower, 100), 0, NULL));
    void *ptr = allocate(upper, 100);
    nrm_resource_release(lower);
    nrm_resource_release(upper);
    nrm_block_info info;
    REQUIRE_OK(nrm_block_find(ptr, &info));
    CHECK_OK(nrm_resource_deallocate(info.resource, ptr, 0, NULL));
    nrm_resource_release(info.resource);
    (void)nrm__retired_drain(0);
    for (int i = 0; i < 1000 && live_nbytes(source) != 0; i++) {
        nrm__sleep_ns(1000000); /* the background thread may be looking at it */
    }
    CHECK_EQ(live_nbytes(source), 0);
    nrm_resource_release(source);
}

CHECK_MAIN
