/* What threads keep for themselves: what the end of a thread and the end of a pool make
   of it, and that all of it is counted. */
#include <limits.h>

#include "base/bits.h"
#include "cached_pool.h"
#include "pools/pool.h"
#include "workers.h"

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

/* Frees a few blocks in every round of destructors that there is, but for the last one
   where ThreadSanitizer has forgotten the thread by then. The state of the thread goes
   before. */
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

/* In place what it grows by counts as allocated; a copy is a second block for a
   moment. */
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

struct walk {
    nrm_resource *route, *pool;
    struct expected of_route, of_pool;
    uint64_t seed;
};

struct walked {
    void *ptr;
    size_t nbytes;
    bool routed;
};

static nrm_resource *
through(const struct walk *walk, const struct walked *block)
{
    return block->routed ? walk->route : walk->pool;
}

static void
walk_in(struct walk *walk, struct walked *block, size_t nbytes)
{
    block->routed = next_random(&walk->seed) % 4 != 0;
    block->nbytes = nbytes;
    block->ptr = allocate(through(walk, block), nbytes);
    expect_in(&walk->of_pool, nbytes);
    if (block->routed) {
        expect_in(&walk->of_route, nbytes);
    }
}

static void
walk_resize(struct walk *walk, struct walked *block, size_t nbytes)
{
    void *before = block->ptr;
    CHECK_OK(nrm_resource_reallocate(through(walk, block), before, nbytes, 0, NULL,
                                     &block->ptr));
    bool moved = before != block->ptr;
    expect_resize(&walk->of_pool, block->nbytes, nbytes, moved);
    if (block->routed) {
        expect_resize(&walk->of_route, block->nbytes, nbytes, moved);
    }
    block->nbytes = nbytes;
}

static void
walk_out(struct walk *walk, struct walked *block)
{
    deallocate(through(walk, block), block->ptr);
    expect_out(&walk->of_pool, block->nbytes);
    if (block->routed) {
        expect_out(&walk->of_route, block->nbytes);
    }
    block->ptr = NULL;
}

/* A walk of one thread through the route and, at times, past it through the pool. */
static void
walk_and_count(nrm_resource *route, nrm_resource *pool, uint64_t seed)
{
    struct walk walk = {.route = route, .pool = pool, .seed = seed};
    struct walked blocks[N_COUNTED] = {0};
    for (int step = 0; step < 4000; step++) {
        struct walked *block = &blocks[next_random(&walk.seed) % N_COUNTED];
        size_t nbytes =
            1 + next_random(&walk.seed) % (next_random(&walk.seed) % 4 ? 3000 : 900000);
        if (block->ptr == NULL) {
            walk_in(&walk, block, nbytes);
        }
        else if (next_random(&walk.seed) % 3 == 0) {
            walk_resize(&walk, block, nbytes);
        }
        else {
            walk_out(&walk, block);
            if (step % 16 == 0) {
                check_counters(route, &walk.of_route);
                check_counters(pool, &walk.of_pool);
            }
        }
    }
    for (size_t i = 0; i < N_COUNTED; i++) {
        deallocate(through(&walk, &blocks[i]), blocks[i].ptr);
    }
}

TEST(what_one_thread_does_is_counted_exactly)
{
    struct routed routed = make_route(host_source(), NRM__MIB);
    walk_and_count(routed.route, routed.small.pool, 17);
    release_route(&routed);
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

CHECK_MAIN
