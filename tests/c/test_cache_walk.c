/* A random walk of four threads that allocate, resize, free and hand blocks to each
   other, against a model of what lives. */
#include "base/bits.h"
#include "pools/pool.h"
#include "raced_pool.h"
#include "workers.h"

#define N_WALKERS 4
#define N_OWN 80
#define N_POSTED 32

struct walk_block {
    unsigned char *ptr; /* NULL: none */
    size_t nbytes;
    unsigned key;
};

struct walker {
    uint64_t state;
    struct walk_block blocks[N_OWN];
    int64_t total_bytes, total_count; /* what it asked for in new blocks */
};

static struct walker walkers[N_WALKERS];

static nrm_resource *route;

/* Blocks on their way from thread to thread. */
static struct {
    pthread_mutex_t lock;
    struct walk_block blocks[N_POSTED];
} post = {.lock = PTHREAD_MUTEX_INITIALIZER};

static size_t
walk_nbytes(uint64_t *state)
{
    uint64_t r = next_random(state);
    switch (r % 8) {
    case 0:
        return 1 + (r >> 8) % (1200 * NRM__KIB);
    case 1:
    case 2:
        return 1 + (r >> 8) % (64 * NRM__KIB);
    default:
        return 1 + (r >> 8) % 2000;
    }
}

static bool
is_whole(const struct walk_block *block)
{
    return has_pattern(block->ptr, block->nbytes, block->key, block->nbytes);
}

static void
walk_allocate(struct walker *walker, struct walk_block *block)
{
    nrm_resource *mr = next_random(&walker->state) % 2 ? pool : route;
    bool zeroed = next_random(&walker->state) % 4 == 0;
    void *ptr = NULL;
    block->nbytes = walk_nbytes(&walker->state);
    block->key = (unsigned)next_random(&walker->state);
    CHECK_OK(zeroed ? nrm_resource_allocate_zeroed(mr, block->nbytes, 0, NULL, &ptr)
                    : nrm_resource_allocate(mr, block->nbytes, 0, NULL, &ptr));
    block->ptr = ptr;
    CHECK_ALIGNED(ptr, 64);
    for (size_t i = 0; zeroed && i < block->nbytes; i++) {
        if (!CHECK_EQ(block->ptr[i], 0)) {
            break;
        }
    }
    write_pattern(ptr, block->nbytes, block->key);
    walker->total_bytes += (int64_t)block->nbytes;
    walker->total_count++;
}

static void
walk_resize(struct walker *walker, struct walk_block *block)
{
    nrm_resource *mr = next_random(&walker->state) % 2 ? pool : route;
    size_t nbytes = walk_nbytes(&walker->state);
    void *ptr = NULL;
    CHECK(is_whole(block));
    REQUIRE_OK(nrm_resource_reallocate(mr, block->ptr, nbytes, 0, NULL, &ptr));
    CHECK(has_pattern(ptr, nrm__min(nbytes, block->nbytes), block->key, block->nbytes));
    block->ptr = ptr;
    block->nbytes = nbytes;
    write_pattern(ptr, nbytes, block->key);
}

static void
walk_free(struct walker *walker, struct walk_block *block)
{
    nrm_resource *mr = next_random(&walker->state) % 2 ? pool : route;
    CHECK(is_whole(block));
    CHECK_STATUS(nrm_resource_deallocate(mr, block->ptr + 1 + block->nbytes / 2, 0,
                                         NULL),
                 NRM_NOT_OWNED);
    CHECK_OK(nrm_resource_deallocate(mr, block->ptr, 0, NULL));
    block->ptr = NULL;
}

static void
walk_exchange(struct walker *walker, struct walk_block *block)
{
    struct walk_block *other = &post.blocks[next_random(&walker->state) % N_POSTED];
    pthread_mutex_lock(&post.lock);
    struct walk_block mine = *block;
    *block = *other;
    *other = mine;
    pthread_mutex_unlock(&post.lock);
}

static void
walk(void *argument)
{
    struct walker *walker = argument;
    for (int step = 0; step < 2000 / SLOW; step++) {
        struct walk_block *block = &walker->blocks[next_random(&walker->state) % N_OWN];
        uint64_t choice = next_random(&walker->state) % 64;
        if (choice == 0) {
            CHECK_OK(nrm_resource_trim(pool, 0, NULL));
        }
        else if (choice < 16) {
            walk_exchange(walker, block);
        }
        else if (block->ptr == NULL) {
            walk_allocate(walker, block);
        }
        else if (choice < 32) {
            walk_resize(walker, block);
        }
        else {
            walk_free(walker, block);
        }
    }
}

static int
by_address(const void *a, const void *b)
{
    const struct walk_block *one = a, *other = b;
    return one->ptr < other->ptr ? -1 : one->ptr > other->ptr;
}

/* All threads stand still: what they have is apart, known by its size, and counted. */
static void
check_walk(void)
{
    static struct walk_block all[N_WALKERS * N_OWN + N_POSTED];
    size_t n = 0;
    int64_t nbytes = 0;
    for (int i = 0; i < N_WALKERS; i++) {
        for (int k = 0; k < N_OWN; k++) {
            all[n] = walkers[i].blocks[k];
            n += all[n].ptr != NULL;
        }
    }
    for (int k = 0; k < N_POSTED; k++) {
        all[n] = post.blocks[k];
        n += all[n].ptr != NULL;
    }
    qsort(all, n, sizeof *all, by_address);
    for (size_t i = 0; i < n; i++) {
        nrm_block_info info = {0};
        CHECK(i + 1 == n || all[i].ptr + all[i].nbytes <= all[i + 1].ptr);
        REQUIRE_OK(nrm_block_find(all[i].ptr + all[i].nbytes - 1, &info));
        nrm_resource_release(info.resource);
        CHECK(info.ptr == all[i].ptr && info.resource == pool);
        CHECK_EQ(info.nbytes, all[i].nbytes);
        CHECK(is_whole(&all[i]));
        nbytes += (int64_t)all[i].nbytes;
    }
    nrm_statistics statistics = {0};
    REQUIRE_OK(nrm_resource_statistics(pool, &statistics));
    CHECK_EQ(statistics.current_bytes, nbytes);
    CHECK_EQ(statistics.current_count, (int64_t)n);
    CHECK_GE(statistics.peak_bytes, nbytes);
    CHECK_GE(statistics.reserved_bytes, nbytes);
    nrm__pool_check(pool);
}

TEST(four_threads_agree_with_a_model)
{
    struct worker workers[N_WALKERS];
    nrm_route_options options = NRM_OPTIONS(nrm_route_options);
    begin();
    options.large = source;
    options.small = options.rescue = pool;
    options.threshold = 2 * NRM__MIB;
    REQUIRE_OK(nrm_route_create(&options, &route));
    for (int i = 0; i < N_WALKERS; i++) {
        worker_start(&workers[i]);
        walkers[i].state = (uint64_t)i + 7;
    }
    for (int round = 0; round < 12; round++) {
        for (int i = 0; i < N_WALKERS; i++) {
            worker_ask(&workers[i], walk, &walkers[i]);
        }
        for (int i = 0; i < N_WALKERS; i++) {
            worker_wait(&workers[i]);
        }
        check_walk();
    }
    for (int i = 0; i < N_WALKERS; i++) {
        worker_end(&workers[i]);
        for (int k = 0; k < N_OWN; k++) {
            if (walkers[i].blocks[k].ptr != NULL) {
                walk_free(&walkers[i], &walkers[i].blocks[k]);
            }
        }
    }
    for (int k = 0; k < N_POSTED; k++) {
        if (post.blocks[k].ptr != NULL) {
            walk_free(&walkers[0], &post.blocks[k]);
        }
    }
    nrm_resource_release(route);
    end();
}

CHECK_MAIN
