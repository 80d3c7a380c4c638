/* PoolMemoryResource over several upstreams: what every pool must hold, checked whole
   after every step. */
#include <string.h>

#include "base/bits.h"
#include "core/uses.h"
#include "fixtures.h"
#include "host_pool.h"
#include "nrm/options.h"
#include "pools/pool.h"

#define N_SLOTS 200
#define N_STEPS 6000

struct slot {
    unsigned char *ptr;
    size_t nbytes;
    unsigned key;
};

static struct counting even, odd;

static nrm_resource *
over_callback(void)
{
    return pool_over(counting_source(&even), 0);
}

/* Segments that neither start nor end at a page of the block map. */
static nrm_resource *
over_odd_callback(void)
{
    odd.offset = 192;
    return pool_over(counting_source(&odd), 0);
}

static nrm_resource *
over_pool(void)
{
    return pool_over(pool_over(host_source(), 0), 0);
}

static const struct upstream {
    const char *name;
    nrm_resource *(*create)(void);
} upstreams[] = {
    {"host", host_pool},
    {"callback", over_callback},
    {"odd callback", over_odd_callback},
    {"pool", over_pool},
};

static size_t
random_nbytes(uint64_t *state)
{
    uint64_t r = next_random(state);
    switch (r % 8) {
    case 0:
        return 1;
    case 1:
        return 1 + (size_t)(r >> 8) % (256 * NRM__KIB);
    case 2:
        return 1 + (size_t)(r >> 8) % (4 * NRM__MIB);
    default:
        return 1 + (size_t)(r >> 8) % 9000;
    }
}

static void
fill_slot(nrm_resource *mr, struct slot *slot, uint64_t *state)
{
    static const size_t alignments[] = {0, 0, 0, 64, 256, 4096, 65536};
    void *ptr = NULL;
    size_t alignment = alignments[next_random(state) % 7];
    slot->nbytes = random_nbytes(state);
    slot->key = (unsigned)next_random(state);
    CHECK_OK(nrm_resource_allocate(mr, slot->nbytes, alignment, NULL, &ptr));
    CHECK_ALIGNED(ptr, alignment != 0 ? alignment : 64);
    slot->ptr = ptr;
    write_pattern(ptr, slot->nbytes, slot->key);
}

static void
resize_slot(nrm_resource *mr, struct slot *slot, uint64_t *state)
{
    void *ptr = NULL;
    size_t nbytes = random_nbytes(state);
    CHECK_OK(nrm_resource_reallocate(mr, slot->ptr, nbytes, 0, NULL, &ptr));
    CHECK_ALIGNED(ptr, 64);
    CHECK(has_pattern(ptr, nrm__min(nbytes, slot->nbytes), slot->key, slot->nbytes));
    slot->ptr = ptr;
    slot->nbytes = nbytes;
    write_pattern(ptr, nbytes, slot->key);
}

static void
empty_slot(nrm_resource *mr, struct slot *slot)
{
    CHECK(has_pattern(slot->ptr, slot->nbytes, slot->key, slot->nbytes));
    CHECK_OK(nrm_resource_deallocate(mr, slot->ptr, 12345, NULL));
    slot->ptr = NULL;
}

static int64_t
sum_of(const struct slot *slots)
{
    int64_t sum = 0;
    for (int i = 0; i < N_SLOTS; i++) {
        sum += slots[i].ptr != NULL ? (int64_t)slots[i].nbytes : 0;
    }
    return sum;
}

TEST_EACH(a_random_mix_keeps_every_byte_and_every_count, upstreams)
{
    static struct slot slots[N_SLOTS];
    uint64_t state = 88172645463325252u;
    nrm_resource *mr = row->create();
    memset(slots, 0, sizeof slots);
    for (int step = 0; step < N_STEPS; step++) {
        struct slot *slot = &slots[next_random(&state) % N_SLOTS];
        if (slot->ptr == NULL) {
            fill_slot(mr, slot, &state);
        }
        else if (next_random(&state) % 4 == 0) {
            resize_slot(mr, slot, &state);
        }
        else {
            empty_slot(mr, slot);
        }
        if (step % 16 == 0) {
            nrm__pool_check(mr);
            CHECK_EQ(live_nbytes(mr), sum_of(slots));
        }
    }
    for (int i = 0; i < N_SLOTS; i++) {
        if (slots[i].ptr != NULL) {
            empty_slot(mr, &slots[i]);
        }
    }
    nrm__pool_check(mr);
    CHECK_EQ(live_nbytes(mr), 0);
    size_t given = 0;
    CHECK_OK(nrm_resource_trim(mr, 0, &given));
    CHECK_GT(given, 0);
    CHECK_EQ(reserved_nbytes(mr), 0);
    nrm__pool_check(mr);
    nrm_resource_release(mr);
    nrm__retired_drain(0);
    CHECK_EQ(atomic_load(&even.n_live), 0);
    CHECK_EQ(atomic_load(&odd.n_live), 0);
}

TEST_EACH(an_interior_address_leads_to_its_block, upstreams)
{
    static const size_t sizes[] = {1, 64, 100, 5000, 70000, 3 * NRM__MIB};
    nrm_resource *mr = row->create();
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        char *ptr = allocate(mr, sizes[i]);
        for (size_t at = 0; at < sizes[i]; at += 1 + sizes[i] / 7) {
            nrm_block_info info;
            REQUIRE_OK(nrm_block_find(ptr + at, &info));
            CHECK(info.ptr == ptr);
            CHECK_EQ(info.nbytes, sizes[i]);
            CHECK(info.resource == mr);
            CHECK_GE(info.capacity, sizes[i]);
            nrm_resource_release(info.resource);
        }
        CHECK_OK(nrm_resource_deallocate(mr, ptr, sizes[i], NULL));
        nrm_block_info info;
        CHECK_EQ(nrm_block_find(ptr, &info), NRM_NOT_FOUND);
    }
    nrm_resource_release(mr);
}

TEST_EACH(a_wrong_free_changes_nothing, upstreams)
{
    nrm_resource *mr = row->create();
    nrm_resource *other = pool_over(host_source(), 0);
    char *ptr = allocate(mr, 100000), *small = allocate(mr, 100);
    char *foreign = allocate(other, 100);
    char on_stack[64];
    int64_t before = live_nbytes(mr);
    CHECK_STATUS(nrm_resource_deallocate(mr, ptr + 8, 0, NULL), NRM_NOT_OWNED);
    CHECK_STR_HAS(nrm_last_error()->message, "8 B inside");
    CHECK_STATUS(nrm_resource_deallocate(mr, small + 64, 0, NULL), NRM_NOT_OWNED);
    CHECK_STATUS(nrm_resource_deallocate(mr, foreign, 0, NULL), NRM_NOT_OWNED);
    CHECK_STR_HAS(nrm_last_error()->message, "another resource");
    CHECK_STATUS(nrm_resource_deallocate(mr, on_stack, 0, NULL), NRM_NOT_OWNED);
    CHECK_STATUS(nrm_resource_deallocate(mr, (void *)64, 0, NULL), NRM_NOT_OWNED);
    CHECK_STATUS(nrm_resource_deallocate(mr, (void *)~(uintptr_t)63, 0, NULL),
                 NRM_NOT_OWNED);
    CHECK_EQ(live_nbytes(mr), before);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    CHECK_STATUS(nrm_resource_deallocate(mr, ptr, 0, NULL), NRM_NOT_OWNED);
    CHECK_OK(nrm_resource_deallocate(mr, small, 0, NULL));
    CHECK_STATUS(nrm_resource_deallocate(mr, small, 0, NULL), NRM_NOT_OWNED);
    CHECK_OK(nrm_resource_deallocate(other, foreign, 0, NULL));
    nrm__pool_check(mr);
    nrm_resource_release(mr);
    nrm_resource_release(other);
}

TEST_EACH(impossible_sizes_fail_and_leave_the_pool_usable, upstreams)
{
    static const size_t sizes[] = {SIZE_MAX,         SIZE_MAX - 3,     SIZE_MAX / 2 + 1,
                                   SIZE_MAX / 2,     SIZE_MAX / 2 - 1, (size_t)1 << 50,
                                   SIZE_MAX - 65535, SIZE_MAX / 2 - 63};
    nrm_resource *mr = row->create();
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        void *ptr = mr;
        CHECK_STATUS(nrm_resource_allocate(mr, sizes[i], 0, NULL, &ptr),
                     NRM_OUT_OF_MEMORY);
        CHECK(ptr == mr);
        CHECK_EQ(nrm_last_error()->requested_nbytes, sizes[i]);
        CHECK_OK(nrm_resource_deallocate(mr, allocate(mr, 64), 0, NULL));
        nrm__pool_check(mr);
    }
    void *ptr = NULL;
    CHECK_STATUS(nrm_resource_allocate(mr, 64, 48, NULL, &ptr), NRM_INVALID_VALUE);
    CHECK_STATUS(nrm_resource_allocate(mr, 64, SIZE_MAX / 2 + 1, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK_EQ(live_nbytes(mr), 0);
    nrm_resource_release(mr);
}

TEST(zero_bytes_are_null_and_no_error)
{
    nrm_resource *mr = host_pool();
    void *ptr = mr;
    CHECK_OK(nrm_resource_allocate(mr, 0, 0, NULL, &ptr));
    CHECK(ptr == NULL);
    CHECK_OK(nrm_resource_deallocate(mr, NULL, 100, NULL));
    CHECK_EQ(live_nbytes(mr), 0);
    nrm_resource_release(mr);
}

/* ---- zeros where memory was used before ---- */

TEST(the_limit_is_kept_and_named)
{
    nrm_resource *mr = pool_over(host_source(), 16 * NRM__MIB);
    void *first = allocate(mr, 10 * NRM__MIB), *second = NULL;
    CHECK_STATUS(nrm_resource_allocate(mr, 10 * NRM__MIB, 0, NULL, &second),
                 NRM_OUT_OF_MEMORY);
    CHECK_STR_HAS(nrm_last_error()->message, "limit 16 MiB");
    CHECK_STR_HAS(nrm_last_error()->message, "10 MiB asked");
    CHECK_LE(reserved_nbytes(mr), 16 * (int64_t)NRM__MIB);
    CHECK_OK(nrm_resource_deallocate(mr, first, 0, NULL));
    CHECK_OK(nrm_resource_allocate(mr, 10 * NRM__MIB, 0, NULL, &second));
    CHECK_OK(nrm_resource_deallocate(mr, second, 0, NULL));
    nrm_resource_release(mr);
}

TEST(a_freed_large_block_serves_the_next_one_of_its_size)
{
    nrm_resource *mr = host_pool();
    void *first = allocate(mr, 200 * NRM__MIB);
    CHECK_OK(nrm_resource_deallocate(mr, first, 0, NULL));
    void *second = allocate(mr, 200 * NRM__MIB);
    CHECK(first == second);
    CHECK_OK(nrm_resource_deallocate(mr, second, 0, NULL));
    nrm_resource_release(mr);
}

TEST(sizes_that_grow_do_not_pile_up)
{
    nrm_resource *mr = host_pool();
    for (size_t mib = 100; mib < 160; mib++) {
        void *ptr = allocate(mr, mib * NRM__MIB);
        CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    }
    CHECK_LT(reserved_nbytes(mr), 400 * (int64_t)NRM__MIB);
    nrm_resource_release(mr);
}

TEST(free_memory_beyond_the_idle_limit_goes_back_without_a_trim)
{
    REQUIRE_OK(nrm_option_set(NRM_OPT_IDLE_LIMIT, "150 MiB"));
    nrm_resource *mr = host_pool();
    void *ptrs[4];
    for (int i = 0; i < 4; i++) {
        ptrs[i] = allocate(mr, 100 * NRM__MIB + 1000);
    }
    void *small = allocate(mr, 100); /* lies in none of their segments */
    for (int i = 0; i < 4; i++) {
        CHECK_OK(nrm_resource_deallocate(mr, ptrs[i], 0, NULL));
        nrm__pool_check(mr);
    }
    CHECK_LT(reserved_nbytes(mr), 150 * (int64_t)NRM__MIB);
    CHECK_OK(nrm_resource_deallocate(mr, small, 0, NULL));
    nrm_resource_release(mr);
    REQUIRE_OK(nrm_option_set(NRM_OPT_IDLE_LIMIT, "0 B"));
}

TEST(trim_keeps_what_it_is_asked_to_keep)
{
    nrm_resource *mr = host_pool();
    void *ptrs[4];
    for (int i = 0; i < 4; i++) {
        ptrs[i] = allocate(mr, 100 * NRM__MIB);
    }
    for (int i = 0; i < 4; i++) {
        CHECK_OK(nrm_resource_deallocate(mr, ptrs[i], 0, NULL));
    }
    size_t given = 0;
    CHECK_OK(nrm_resource_trim(mr, 150 * NRM__MIB, &given));
    CHECK_GE(reserved_nbytes(mr), 150 * (int64_t)NRM__MIB);
    CHECK_LE(reserved_nbytes(mr), 300 * (int64_t)NRM__MIB);
    CHECK_OK(nrm_resource_trim(mr, 0, &given));
    CHECK_EQ(reserved_nbytes(mr), 0);
    nrm_resource_release(mr);
}

/* Text readers grow by a constant: the copying must not be quadratic. */
TEST(linear_growth_moves_a_block_a_few_times_only)
{
    nrm_resource *mr = host_pool();
    void *ptr = allocate(mr, 4096), *blocker = NULL;
    int n_moves = 0;
    for (size_t nbytes = 8192; nbytes <= 16 * NRM__MIB; nbytes += 4096) {
        void *before = ptr;
        REQUIRE_OK(nrm_resource_reallocate(mr, ptr, nbytes, 0, NULL, &ptr));
        n_moves += ptr != before;
        /* Whatever lies to the right must not help. */
        CHECK_OK(nrm_resource_deallocate(mr, blocker, 0, NULL));
        blocker = allocate(mr, 64 * NRM__KIB);
    }
    CHECK_LT(n_moves, 120);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    CHECK_OK(nrm_resource_deallocate(mr, blocker, 0, NULL));
    nrm_resource_release(mr);
}

/* ---- growing by moving pages ---- */

static const struct {
    const char *name;
    size_t first, last, steps;
} growths[] = {
    {"few steps", NRM__MIB, 256 * NRM__MIB, 16},
    {"many steps", 2 * NRM__MIB, 128 * NRM__MIB, 500},
    {"odd sizes", NRM__MIB + 12345, 100 * NRM__MIB + 77, 61},
    {"to a GiB", 3 * NRM__MIB, NRM__GIB, 40},
};

/* What was never touched is not read and written by a copy, whatever lies to the
   right. */
TEST_EACH(a_block_that_grows_touches_no_page, growths)
{
    size_t first = row->first, last = row->last;
    size_t n = row->steps;
    nrm_resource *mr = host_pool();
    void *ptr = allocate(mr, first), *blocker = NULL;
    ((char *)ptr)[1] = 77;
    for (size_t i = 1; i <= n; i++) {
        size_t nbytes = first + (last - first) / n * i;
        REQUIRE_OK(nrm_resource_reallocate(mr, ptr, nbytes, 0, NULL, &ptr));
        CHECK_OK(nrm_resource_deallocate(mr, blocker, 0, NULL));
        blocker = allocate(mr, 70 * NRM__KIB);
        nrm__pool_check(mr);
        CHECK_EQ(((char *)ptr)[1], 77);
    }
    CHECK_EQ(count_present(ptr, last / 20, last / 2), 0u);
    CHECK_LE(reserved_nbytes(mr), (int64_t)(last + last / 6 + 16 * NRM__MIB));
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    CHECK_OK(nrm_resource_deallocate(mr, blocker, 0, NULL));
    nrm_resource_release(mr);
}

/* Its segment is one like others then: small blocks fit into it closely. */
TEST(what_has_grown_and_was_freed_serves_small_blocks)
{
    nrm_resource *mr = host_pool();
    void *ptr = allocate(mr, NRM__MIB), *ptrs[N_SLOTS];
    for (size_t mib = 2; mib <= 60; mib++) {
        REQUIRE_OK(nrm_resource_reallocate(mr, ptr, mib * NRM__MIB, 0, NULL, &ptr));
    }
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    int64_t reserved = reserved_nbytes(mr);
    for (int i = 0; i < N_SLOTS; i++) {
        ptrs[i] = allocate(mr, 250 * NRM__KIB);
        write_pattern(ptrs[i], 250 * NRM__KIB, (unsigned)i);
        nrm__pool_check(mr);
    }
    CHECK_EQ(reserved_nbytes(mr), reserved);
    for (int i = 0; i < N_SLOTS; i++) {
        CHECK(has_pattern(ptrs[i], 250 * NRM__KIB, (unsigned)i, 250 * NRM__KIB));
        CHECK_OK(nrm_resource_deallocate(mr, ptrs[i], 0, NULL));
    }
    nrm_resource_release(mr);
}

TEST(in_a_large_pool_only_large_blocks_have_a_segment_of_their_own)
{
    nrm_resource *host = host_source();
    nrm_resource_retain(host);
    nrm_resource *mr = pool_over(host, 0);
    void *large = allocate(mr, 2 * NRM__GIB), *ptrs[40];
    for (int i = 0; i < 40; i++) {
        ptrs[i] = allocate(mr, NRM__MIB);
        REQUIRE_OK(
            nrm_resource_reallocate(mr, ptrs[i], NRM__MIB * 3 / 2, 0, NULL, &ptrs[i]));
    }
    nrm_statistics statistics = {0};
    CHECK_OK(nrm_resource_statistics(host, &statistics));
    CHECK_LT(statistics.current_count, 6);
    REQUIRE_OK(nrm_resource_reallocate(mr, ptrs[0], 30 * NRM__MIB, 0, NULL, &ptrs[0]));
    nrm__pool_check(mr);
    for (int i = 0; i < 40; i++) {
        CHECK_OK(nrm_resource_deallocate(mr, ptrs[i], 0, NULL));
    }
    CHECK_OK(nrm_resource_deallocate(mr, large, 0, NULL));
    nrm_resource_release(mr);
    nrm_resource_release(host);
}

TEST(blocks_that_grow_at_once_keep_what_is_theirs)
{
    nrm_resource *mr = host_pool();
    void *ptrs[6];
    for (unsigned i = 0; i < 6; i++) {
        ptrs[i] = allocate(mr, NRM__MIB);
        write_pattern(ptrs[i], NRM__MIB, i);
    }
    for (size_t mib = 2; mib < 40; mib++) {
        for (unsigned i = 0; i < 6; i++) {
            size_t nbytes = mib * (NRM__MIB + i * 999);
            REQUIRE_OK(nrm_resource_reallocate(mr, ptrs[i], nbytes, 0, NULL, &ptrs[i]));
            CHECK(has_pattern(ptrs[i], NRM__MIB, i, NRM__MIB));
            nrm__pool_check(mr);
        }
    }
    for (unsigned i = 0; i < 6; i++) {
        CHECK_OK(nrm_resource_deallocate(mr, ptrs[i], 0, NULL));
    }
    nrm_resource_release(mr);
}

TEST(a_block_keeps_its_pool_alive)
{
    struct counting counting = {0};
    nrm_resource *mr = pool_over(counting_source(&counting), 0);
    char *ptr = allocate(mr, 100000);
    nrm_resource_release(mr); /* the last reference but the block's */
    ptr[99999] = 7;
    nrm_block_info info;
    REQUIRE_OK(nrm_block_find(ptr, &info));
    CHECK_EQ(atomic_load(&counting.n_destroyed), 0);
    CHECK_OK(nrm_resource_deallocate(info.resource, ptr, 0, NULL));
    CHECK_EQ(atomic_load(&counting.n_destroyed), 0);
    nrm_resource_release(info.resource);
    CHECK_EQ(atomic_load(&counting.n_destroyed), 1);
    CHECK_EQ(atomic_load(&counting.n_live), 0);
}

TEST(a_failing_upstream_leaves_nothing_behind)
{
    struct counting counting = {.limit_nbytes = 20 * NRM__MIB};
    nrm_resource *mr = pool_over(counting_source(&counting), 0);
    void *first = allocate(mr, NRM__MIB), *second = NULL;
    CHECK_STATUS(nrm_resource_allocate(mr, 100 * NRM__MIB, 0, NULL, &second),
                 NRM_OUT_OF_MEMORY);
    CHECK_EQ(live_nbytes(mr), (int64_t)NRM__MIB);
    nrm__pool_check(mr);
    /* What is left is less than the next segment would be, but enough for the
       request. */
    CHECK_OK(nrm_resource_allocate(mr, 11 * NRM__MIB, 0, NULL, &second));
    CHECK_OK(nrm_resource_deallocate(mr, first, 0, NULL));
    CHECK_OK(nrm_resource_deallocate(mr, second, 0, NULL));
    nrm_resource_release(mr);
    CHECK_EQ(atomic_load(&counting.n_live), 0);
}

TEST(an_initial_size_is_taken_at_once_or_refused)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    nrm_resource *host = host_source(), *mr = NULL;
    options.initial_nbytes = 10 * NRM__MIB;
    REQUIRE_OK(nrm_pool_create(host, &options, &mr));
    CHECK_EQ(reserved_nbytes(mr), 10 * (int64_t)NRM__MIB);
    nrm_resource_release(mr);
    options.maximum_nbytes = NRM__MIB;
    CHECK_STATUS(nrm_pool_create(host, &options, &mr), NRM_INVALID_VALUE);
    options.maximum_nbytes = 0;
    options.initial_nbytes = (size_t)1 << 60;
    CHECK_STATUS(nrm_pool_create(host, &options, &mr), NRM_OUT_OF_MEMORY);
    nrm__retired_drain(0);
    CHECK_EQ(live_nbytes(host), 0);
    nrm_resource_release(host);
}

/* ---- threads: allocate here, free there ---- */

#define N_THREADS 4
#define N_SHARED 64
#define N_ROUNDS 2000

static nrm_resource *shared_pool;

static _Atomic(void *) shared_blocks[N_SHARED];

static void *
exchange_blocks(void *seed)
{
    uint64_t state = (uintptr_t)seed;
    for (int round = 0; round < N_ROUNDS; round++) {
        size_t nbytes =
            1 + next_random(&state) % (next_random(&state) % 4 ? 2000 : 200000);
        unsigned char *mine = allocate(shared_pool, nbytes);
        mine[0] = mine[nbytes - 1] = 1;
        void *theirs =
            atomic_exchange(&shared_blocks[next_random(&state) % N_SHARED], mine);
        CHECK_OK(nrm_resource_deallocate(shared_pool, theirs, 0, NULL));
        nrm_block_info info;
        if (nrm_block_find(mine, &info) == NRM_OK) {
            nrm_resource_release(info.resource);
        }
        if (round % 1024 == 0) {
            CHECK_OK(nrm_resource_trim(shared_pool, 0, NULL));
        }
    }
    return NULL;
}

TEST_EACH(threads_free_each_others_blocks, upstreams)
{
    pthread_t threads[N_THREADS];
    shared_pool = row->create();
    for (uintptr_t i = 0; i < N_THREADS; i++) {
        pthread_create(&threads[i], NULL, exchange_blocks, (void *)(i + 1));
    }
    for (int i = 0; i < N_THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    for (int i = 0; i < N_SHARED; i++) {
        CHECK_OK(nrm_resource_deallocate(
            shared_pool, atomic_exchange(&shared_blocks[i], NULL), 0, NULL));
    }
    nrm__pool_check(shared_pool);
    CHECK_EQ(live_nbytes(shared_pool), 0);
    nrm_resource_release(shared_pool);
}

/* ---- fork ---- */

static void
use_pool_in_child(void)
{
    void *ptr = allocate(shared_pool, 100000);
    memset(ptr, 3, 100000);
    CHECK_OK(nrm_resource_deallocate(shared_pool, ptr, 0, NULL));
    CHECK_OK(nrm_resource_trim(shared_pool, 0, NULL));
    nrm__pool_check(shared_pool);
}

static atomic_bool churn_stops;

static void *
churn(void *unused)
{
    (void)unused;
    while (!atomic_load(&churn_stops)) {
        void *ptr = allocate(shared_pool, 3000), *large = allocate(shared_pool, 300000);
        CHECK_OK(nrm_resource_deallocate(shared_pool, ptr, 0, NULL));
        CHECK_OK(nrm_resource_deallocate(shared_pool, large, 0, NULL));
    }
    return NULL;
}

TEST(a_child_forked_while_others_allocate_can_allocate)
{
    pthread_t threads[2];
    shared_pool = host_pool();
    atomic_store(&churn_stops, false);
    for (int i = 0; i < 2; i++) {
        pthread_create(&threads[i], NULL, churn, NULL);
    }
    for (int i = 0; i < 30; i++) {
        CHECK_IN_CHILD(use_pool_in_child);
    }
    atomic_store(&churn_stops, true);
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
    }
    nrm_resource_release(shared_pool);
}

CHECK_MAIN
