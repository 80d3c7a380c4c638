/* FixedSizeMemoryResource over several upstreams: against a model, with upstreams that
   fail, with threads, and after a fork. */
#include <sched.h>

#include "core/uses.h"
#include "fixed_size.h"
#include "model.h"

static struct counting even, odd;

static nrm_resource *
even_callback(void)
{
    return counting_source(&even);
}

/* Chunks that neither start nor end at a page of the block map. */
static nrm_resource *
odd_callback(void)
{
    odd.offset = 192;
    return counting_source(&odd);
}

static nrm_resource *
fixed_size_of_chunks(void)
{
    return fixed_over(host_source(), 64 * NRM__KIB, 8);
}

static const struct over {
    const char *name;
    nrm_resource *(*create)(void);
    size_t block_nbytes, n_blocks;
} overs[] = {
    {"host, 1 B", host_source, 1, 7},
    {"host, 1000 B", host_source, 1000, 100},
    {"host, 4097 B", host_source, 4097, 3},
    {"host, 100 kB", host_source, 100000, 30},
    {"callback, 4 KiB", even_callback, 4096, 10},
    {"odd callback, 5000 B", odd_callback, 5000, 5},
    {"odd callback, one at a time", odd_callback, 70000, 1},
    {"pool, 20 kB", host_pool, 20000, 16},
    {"fixed size, 4 KiB", fixed_size_of_chunks, 4096, 16},
};

static nrm_resource *
create(const struct over *over)
{
    even = odd = (struct counting){0};
    return fixed_over(over->create(), over->block_nbytes, over->n_blocks);
}

static void
finish(nrm_resource *mr)
{
    nrm_resource_release(mr);
    nrm__retired_drain(0);
    CHECK_EQ(atomic_load(&even.n_live), 0);
    CHECK_EQ(atomic_load(&odd.n_live), 0);
}

static const uint64_t seeds[] = {88172645463325252u, 1, 2026};

TEST_EACH(a_random_walk_agrees_with_the_model, overs)
{
    static struct model model;
    for (size_t i = 0; i < sizeof seeds / sizeof *seeds; i++) {
        size_t given = 0;
        model = (struct model){
            .mr = create(row), .largest_nbytes = row->block_nbytes, .state = seeds[i]};
        model_walk(&model, 2500);
        CHECK_EQ(model.n_moved, 0); /* every size has its place */
        CHECK_OK(nrm_resource_trim(model.mr, 0, &given));
        CHECK_EQ(reserved_nbytes(model.mr), 0);
        finish(model.mr);
    }
}

TEST_EACH(threads_free_each_others_blocks, overs)
{
    nrm_resource *mr = create(row);
    model_exchange_blocks(mr, row->block_nbytes, 1500);
    finish(mr);
}

TEST_EACH(all_blocks_of_a_chunk_are_handed_out_before_the_next_is_taken, overs)
{
    void *blocks[128];
    nrm_resource *mr = create(row);
    int64_t before = reserved_nbytes(mr);
    size_t n = row->n_blocks;
    for (size_t i = 0; i < n; i++) {
        blocks[i] = allocate(mr, row->block_nbytes);
        memset(blocks[i], (int)i, row->block_nbytes);
        CHECK_EQ(reserved_nbytes(mr), before);
    }
    for (size_t i = 0; i < n; i++) {
        CHECK_EQ(*(unsigned char *)blocks[i], i);
        CHECK_OK(nrm_resource_deallocate(mr, blocks[i], 0, NULL));
    }
    CHECK_GE(before, (int64_t)(n * row->block_nbytes));
    finish(mr);
}

TEST_EACH(the_block_given_back_last_goes_out_first, overs)
{
    nrm_resource *mr = create(row);
    void *first = allocate(mr, 1), *second = allocate(mr, 1), *third = allocate(mr, 1);
    CHECK_OK(nrm_resource_deallocate(mr, first, 0, NULL));
    CHECK_OK(nrm_resource_deallocate(mr, third, 0, NULL));
    CHECK(allocate(mr, 1) == third);
    CHECK_OK(nrm_resource_deallocate(mr, second, 0, NULL));
    CHECK(allocate(mr, 1) == second);
    CHECK(allocate(mr, 1) == first);
    nrm_resource_release(mr); /* its blocks keep it: it goes with the last of them */
    void *const blocks[] = {first, second, third};
    for (int i = 0; i < 3; i++) {
        CHECK_OK(nrm_resource_deallocate(mr, blocks[i], 0, NULL));
    }
    nrm__retired_drain(0);
    CHECK_EQ(atomic_load(&even.n_live), 0);
    CHECK_EQ(atomic_load(&odd.n_live), 0);
}

/* ---- requests it refuses ---- */

TEST(a_request_larger_than_a_block_is_out_of_memory_and_changes_nothing)
{
    nrm_resource *mr = fixed_over(host_source(), 1000, 16);
    int64_t before = reserved_nbytes(mr);
    void *ptr = mr;
    CHECK_STATUS(nrm_resource_allocate(mr, 1025, 0, NULL, &ptr), NRM_OUT_OF_MEMORY);
    CHECK(ptr == mr);
    CHECK_STR_HAS(nrm_last_error()->message, "1025 B asked");
    CHECK_STR_HAS(nrm_last_error()->message, "blocks have 1 KiB each");
    CHECK_EQ(nrm_last_error()->requested_nbytes, 1025u);
    CHECK_EQ(reserved_nbytes(mr), before);
    CHECK_EQ(live_nbytes(mr), 0);
    /* 1000 was rounded up to 1024: all of a block can be used. */
    ptr = allocate(mr, 1024);
    memset(ptr, 1, 1024);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    finish(mr);
}

TEST(a_block_that_cannot_grow_keeps_its_bytes)
{
    nrm_resource *mr = fixed_over(host_source(), 4096, 4);
    void *ptr = allocate(mr, 100), *before = ptr;
    write_pattern(ptr, 100, 3);
    REQUIRE_OK(nrm_resource_reallocate(mr, ptr, 4096, 0, NULL, &ptr));
    CHECK(ptr == before);
    CHECK_STATUS(nrm_resource_reallocate(mr, ptr, 4097, 0, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK(ptr == before);
    CHECK(has_pattern(ptr, 100, 3, 100));
    CHECK_EQ(live_nbytes(mr), 4096);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    mr->ops->check(mr);
    finish(mr);
}

static const struct {
    const char *name;
    nrm_resource *(*create)(void);
    size_t block_nbytes;
    size_t alignment;
    nrm_status expected;
} alignments[] = {
    {"the block's own", host_source, 4096, 4096, NRM_OK},
    {"more than the block's", host_source, 4096, 8192, NRM_NOT_SUPPORTED},
    {"a factor of the size", host_source, 3 * 512, 512, NRM_OK},
    {"no factor of the size", host_source, 3 * 512, 1024, NRM_NOT_SUPPORTED},
    {"a huge page", host_source, 2 * NRM__MIB, 2 * NRM__MIB, NRM_OK},
    {"more than a huge page", host_source, 8 * NRM__MIB, 4 * NRM__MIB,
     NRM_NOT_SUPPORTED},
    {"of a callback", even_callback, 4096, 64, NRM_OK},
    {"a callback is not asked for more", even_callback, 4096, 128, NRM_NOT_SUPPORTED},
    {"over small blocks", fixed_size_of_chunks, 4096, 4096, NRM_OK},
};

TEST_EACH(an_alignment_is_honoured_for_every_block_or_refused, alignments)
{
    void *blocks[9];
    nrm_resource *mr = fixed_over(row->create(), row->block_nbytes, 4);
    for (int i = 0; i < 9; i++) {
        blocks[i] = NULL;
        CHECK_EQ(nrm_resource_allocate(mr, 1, row->alignment, NULL, &blocks[i]),
                 row->expected);
        CHECK_ALIGNED(blocks[i], row->alignment);
    }
    if (row->expected != NRM_OK) {
        CHECK_STR_HAS(nrm_last_error()->message, "aligned to");
    }
    for (int i = 0; i < 9; i++) {
        CHECK_OK(nrm_resource_deallocate(mr, blocks[i], 0, NULL));
    }
    finish(mr);
}

TEST(sizes_that_no_address_space_holds_are_refused)
{
    nrm_fixed_size_options options = NRM_OPTIONS(nrm_fixed_size_options);
    nrm_resource *host = host_source(), *mr = NULL;
    static const size_t sizes[] = {SIZE_MAX, SIZE_MAX / 2, (size_t)1 << 60};
    for (size_t i = 0; i < 3; i++) {
        options.block_nbytes = sizes[i];
        options.n_blocks = 0;
        CHECK_STATUS(nrm_fixed_size_create(host, &options, &mr), NRM_OUT_OF_MEMORY);
        options.block_nbytes = 64;
        options.n_blocks = sizes[i];
        CHECK_STATUS(nrm_fixed_size_create(host, &options, &mr), NRM_OUT_OF_MEMORY);
    }
    CHECK(mr == NULL);
    CHECK_EQ(live_nbytes(host), 0);
    nrm_resource_release(host);
}

/* ---- upstreams that fail ---- */

TEST(the_first_chunk_is_taken_at_once_or_there_is_no_resource)
{
    struct model_failing failing = {.fail_at = 1};
    nrm_resource *source = model_failing_source(&failing), *mr = NULL;
    CHECK_STATUS(nrm_fixed_size_create(source, NULL, &mr), NRM_OUT_OF_MEMORY);
    CHECK(mr == NULL);
    REQUIRE_OK(nrm_fixed_size_create(source, NULL, &mr)); /* once it has memory */
    CHECK_EQ(reserved_nbytes(mr), 128 * (int64_t)NRM__MIB);
    nrm_resource_release(mr);
    nrm_resource_release(source);
    CHECK_EQ(atomic_load(&failing.counting.n_live), 0);
}

static const struct {
    const char *name;
    bool for_good;
} failures[] = {{"once", false}, {"for good", true}};

TEST_EACH(an_upstream_that_fails_at_its_nth_call_leaves_everything_usable, failures)
{
    for (unsigned nth = 2; nth < 12; nth++) {
        struct model_failing failing = {.fail_at = nth, .for_good = row->for_good};
        nrm_resource *mr = fixed_over(model_failing_source(&failing), 5000, 4);
        void *blocks[48];
        int n = 0, n_failed = 0;
        for (int i = 0; i < 48; i++) {
            nrm_status status = nrm_resource_allocate(mr, 5000, 0, NULL, &blocks[n]);
            mr->ops->check(mr);
            if (status == NRM_OK) {
                write_pattern(blocks[n], 5000, (unsigned)n);
                n++;
            }
            else {
                CHECK_EQ(status, NRM_OUT_OF_MEMORY);
                n_failed++;
                CHECK_EQ(live_nbytes(mr), n * 5000);
            }
        }
        CHECK_EQ(n_failed, row->for_good ? 48 - 4 * (int)(nth - 1) : 1);
        for (int i = 0; i < n; i++) {
            CHECK(has_pattern(blocks[i], 5000, (unsigned)i, 5000));
            CHECK_OK(nrm_resource_deallocate(mr, blocks[i], 0, NULL));
        }
        nrm_resource_release(mr);
        CHECK_EQ(atomic_load(&failing.counting.n_live), 0);
    }
}

TEST(an_upstream_without_room_for_whole_pages_is_asked_for_the_blocks_alone)
{
    nrm_resource *pool = pool_over(host_source(), 2 * NRM__MIB);
    void *rest = allocate(pool, 2 * NRM__MIB - 30000);
    nrm_resource *mr = fixed_over(pool, 1000, 20);
    void *ptr = allocate(mr, 1000);
    nrm_block_info info;
    REQUIRE_OK(nrm_block_find((char *)ptr + 999, &info));
    CHECK(info.resource == mr);
    nrm_resource_release(info.resource);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    nrm_resource *upstream = nrm_resource_upstream(mr);
    CHECK_OK(nrm_resource_deallocate(upstream, rest, 0, NULL));
    finish(mr);
}

/* ---- trim, zeros, life ---- */

TEST(trim_keeps_what_lives_and_what_it_is_asked_to_keep)
{
    nrm_resource *mr = fixed_over(host_source(), NRM__MIB, 4);
    void *blocks[16];
    size_t given = 0;
    for (int i = 0; i < 16; i++) {
        blocks[i] = allocate(mr, NRM__MIB);
    }
    CHECK_EQ(reserved_nbytes(mr), 16 * (int64_t)NRM__MIB);
    for (int i = 0; i < 15; i++) {
        CHECK_OK(nrm_resource_deallocate(mr, blocks[i], 0, NULL));
    }
    CHECK_OK(nrm_resource_trim(mr, 9 * NRM__MIB, &given));
    CHECK_EQ(given, 4 * NRM__MIB);
    CHECK_OK(nrm_resource_trim(mr, 0, &given));
    CHECK_EQ(given, 8 * NRM__MIB);
    CHECK_EQ(reserved_nbytes(mr), 4 * (int64_t)NRM__MIB);
    CHECK_OK(nrm_resource_deallocate(mr, blocks[15], 0, NULL));
    CHECK_OK(nrm_resource_trim(mr, 0, &given));
    CHECK_EQ(reserved_nbytes(mr), 0);
    void *again = allocate(mr, NRM__MIB);
    CHECK_OK(nrm_resource_deallocate(mr, again, 0, NULL));
    mr->ops->check(mr);
    finish(mr);
}

TEST(zeroed_memory_is_zero_also_when_it_was_used_before)
{
    nrm_resource *mr = fixed_over(host_source(), 8000, 8);
    for (int round = 0; round < 3; round++) {
        void *blocks[12];
        for (int i = 0; i < 12; i++) {
            REQUIRE_OK(nrm_resource_allocate_zeroed(mr, 8000, 0, NULL, &blocks[i]));
            const char *bytes = blocks[i];
            CHECK(bytes[0] == 0 && memcmp(bytes, bytes + 1, 7999) == 0);
            memset(blocks[i], 0xff, 8000);
        }
        for (int i = 0; i < 12; i++) {
            CHECK_OK(nrm_resource_deallocate(mr, blocks[i], 0, NULL));
        }
    }
    finish(mr);
}

TEST(a_wrong_free_changes_nothing)
{
    nrm_resource *mr = fixed_over(host_source(), 1000, 8), *other = host_source();
    char *ptr = allocate(mr, 1000), *foreign = allocate(other, 100);
    CHECK_STATUS(nrm_resource_deallocate(mr, ptr + 1023, 0, NULL), NRM_NOT_OWNED);
    CHECK_STATUS(nrm_resource_deallocate(mr, ptr + 1024, 0, NULL), NRM_NOT_OWNED);
    CHECK_STATUS(nrm_resource_deallocate(mr, foreign, 0, NULL), NRM_NOT_OWNED);
    CHECK_STATUS(nrm_resource_deallocate(other, ptr, 0, NULL), NRM_NOT_OWNED);
    CHECK_EQ(live_nbytes(mr), 1000);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 7, NULL)); /* the size is a hint */
    CHECK_STATUS(nrm_resource_deallocate(mr, ptr, 1000, NULL), NRM_NOT_OWNED);
    CHECK_OK(nrm_resource_deallocate(other, foreign, 0, NULL));
    mr->ops->check(mr);
    nrm_resource_release(other);
    finish(mr);
}

/* ---- a block given back twice at once, and trimmed meanwhile ---- */

#define N_TWICE 300

struct twice {
    nrm_resource *mr;
    _Atomic(void *) block; /* that both give back; NULL: the second has done so */
    atomic_int n_taken;
    atomic_bool stops;
};

static void
try_to_give_back(struct twice *twice, void *ptr)
{
    nrm_status status = nrm_resource_deallocate(twice->mr, ptr, 0, NULL);
    CHECK(status == NRM_OK || status == NRM_NOT_OWNED);
    atomic_fetch_add(&twice->n_taken, status == NRM_OK);
}

static void
give_back_twice(unsigned index, void *arg)
{
    struct twice *twice = arg;
    for (int i = 0; index == 0 && i < N_TWICE; i++) {
        void *ptr = allocate(twice->mr, 100);
        atomic_store(&twice->block, ptr);
        try_to_give_back(twice, ptr);
        while (atomic_load(&twice->block) != NULL) {
            sched_yield();
        }
    }
    if (index == 0) {
        atomic_store(&twice->stops, true);
    }
    while (!atomic_load(&twice->stops)) {
        void *ptr = atomic_load(&twice->block);
        if (index == 2) {
            CHECK_OK(nrm_resource_trim(twice->mr, 0, NULL));
        }
        else if (ptr != NULL) {
            try_to_give_back(twice, ptr);
            atomic_store(&twice->block, NULL);
        }
    }
}

TEST(a_block_is_given_back_once_whoever_tries)
{
    static struct twice twice;
    nrm_statistics statistics;
    twice = (struct twice){.mr = fixed_over(host_source(), 100, 1)};
    check_threads(3, give_back_twice, &twice);
    CHECK_EQ(atomic_load(&twice.n_taken), N_TWICE);
    CHECK_OK(nrm_resource_statistics(twice.mr, &statistics));
    CHECK_EQ(statistics.current_count, 0);
    CHECK_EQ(statistics.total_count, N_TWICE);
    twice.mr->ops->check(twice.mr);
    finish(twice.mr);
}

/* ---- fork ---- */

static nrm_resource *shared;
static atomic_bool churn_stops;

static void
use_in_child(void)
{
    void *ptr = allocate(shared, 100000);
    memset(ptr, 3, 100000);
    CHECK_OK(nrm_resource_deallocate(shared, ptr, 0, NULL));
    CHECK_OK(nrm_resource_trim(shared, 0, NULL));
    shared->ops->check(shared);
}

static void *
churn(void *unused)
{
    (void)unused;
    while (!atomic_load(&churn_stops)) {
        void *ptr = allocate(shared, 3000), *other = allocate(shared, 100000);
        CHECK_OK(nrm_resource_deallocate(shared, ptr, 0, NULL));
        CHECK_OK(nrm_resource_deallocate(shared, other, 0, NULL));
    }
    return NULL;
}

TEST(a_child_forked_while_others_allocate_can_allocate)
{
    pthread_t threads[2];
    shared = fixed_over(host_source(), 100000, 3);
    atomic_store(&churn_stops, false);
    for (int i = 0; i < 2; i++) {
        pthread_create(&threads[i], NULL, churn, NULL);
    }
    for (int i = 0; i < 20; i++) {
        CHECK_IN_CHILD(use_in_child);
    }
    atomic_store(&churn_stops, true);
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
    }
    finish(shared);
}

CHECK_MAIN
