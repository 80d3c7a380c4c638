/* Scopes: what a thread allocates between a push and a pop. */
#include "simulator.h"

#include "core/cache.h"
#include "scopes.h"

TEST_EACH(a_scope_counts_what_its_thread_asks_for, resources)
{
    void *before[3], *ptrs[3], *after[3];
    nrm_resource *mr = row->make();
    allocate_three(mr, before);
    uint64_t scope = push(NULL);
    CHECK_COUNTS(counts_of(scope), 0, 0, 0, 0, 0, 0);
    for (int i = 0; i < 3; i++) { /* the first ones are made, later ones kept */
        allocate_three(mr, ptrs);
        CHECK_COUNTS(counts_of(scope), ALL, 3, ALL, 3, (i + 1) * ALL, 3 * (i + 1));
        deallocate_three(mr, ptrs);
        CHECK_COUNTS(counts_of(scope), 0, 0, ALL, 3, (i + 1) * ALL, 3 * (i + 1));
    }
    deallocate_three(mr, before);
    CHECK_COUNTS(pop(scope), -ALL, -3, ALL, 3, 3 * ALL, 9);
    allocate_three(mr, after);
    deallocate_three(mr, after);
    CHECK_EQ(live_nbytes(mr), 0);
    check_pool(mr);
    nrm_resource_release(mr);
}

TEST_EACH(what_lives_on_is_freed_as_ever, resources)
{
    void *ptrs[3];
    nrm_resource *mr = row->make();
    uint64_t scope = push(NULL);
    allocate_three(mr, ptrs);
    CHECK_COUNTS(pop(scope), ALL, 3, ALL, 3, ALL, 3);
    check_pool(mr);
    deallocate_three(mr, ptrs);
    CHECK_STATUS(nrm_resource_deallocate(mr, ptrs[0], 0, NULL), NRM_NOT_OWNED);
    CHECK_STATUS(nrm_resource_deallocate(mr, ptrs[1], 0, NULL), NRM_NOT_OWNED);
    CHECK_EQ(live_nbytes(mr), 0);
    scope = push(NULL); /* nothing is left behind that a later scope would find */
    allocate_three(mr, ptrs);
    deallocate_three(mr, ptrs);
    CHECK_COUNTS(pop(scope), 0, 0, ALL, 3, ALL, 3);
    check_pool(mr);
    nrm_resource_release(mr);
}

TEST_EACH(a_block_that_changes_its_size_is_one_block, resources)
{
    void *ptr;
    nrm_resource *mr = row->make();
    uint64_t scope = push(NULL);
    ptr = allocate(mr, SMALL);
    write_pattern(ptr, SMALL, 3);
    REQUIRE_OK(nrm_resource_reallocate(mr, ptr, SMALL + 1, 0, NULL, &ptr));
    CHECK_EQ(counts_of(scope).current_bytes, SMALL + 1);
    REQUIRE_OK(nrm_resource_reallocate(mr, ptr, LARGE, 0, NULL, &ptr));
    CHECK(has_pattern(ptr, SMALL, 3, 0));
    CHECK_EQ(counts_of(scope).current_bytes, LARGE);
    CHECK_EQ(counts_of(scope).current_count, 1);
    CHECK_GE(counts_of(scope).peak_bytes, LARGE);
    CHECK_GE(counts_of(scope).total_bytes, LARGE);
    REQUIRE_OK(nrm_resource_reallocate(mr, ptr, MEDIUM, 0, NULL, &ptr));
    CHECK_EQ(counts_of(scope).current_bytes, MEDIUM);
    deallocate(mr, ptr);
    CHECK_EQ(counts_of(scope).current_bytes, 0);
    CHECK_EQ(pop(scope).current_count, 0);
    check_pool(mr);
    nrm_resource_release(mr);
}

TEST_EACH(a_resized_block_is_known_to_its_scope, resources)
{
    void *ptr;
    nrm_resource *mr = row->make();
    uint64_t scope = push(NULL);
    ptr = allocate(mr, SMALL);
    uint64_t inner = push(NULL);
    REQUIRE_OK(nrm_resource_reallocate(mr, ptr, SMALL - 10, 0, NULL, &ptr));
    CHECK_EQ(counts_of(inner).current_bytes, -10);
    CHECK_EQ(counts_of(inner).total_bytes + counts_of(inner).peak_bytes >= 0, 1);
    (void)pop(inner);
    deallocate(mr, ptr);
    CHECK_EQ(pop(scope).current_bytes, 0);
    nrm_resource_release(mr);
}

TEST(zeroed_memory_counts_too_and_nothing_is_nothing)
{
    void *ptr = NULL;
    nrm_resource *mr = host_pool();
    uint64_t scope = push(NULL);
    CHECK_OK(nrm_resource_allocate_zeroed(mr, 64, 0, NULL, &ptr));
    CHECK_MEM_EQ(ptr, (const char[64]){0}, 64);
    deallocate(mr, ptr);
    CHECK_OK(nrm_resource_allocate(mr, 0, 0, NULL, &ptr));
    CHECK(ptr == NULL);
    deallocate(mr, NULL);
    CHECK_STATUS(nrm_resource_allocate(mr, SIZE_MAX / 4, 0, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK_COUNTS(pop(scope), 0, 0, 64, 1, 64, 1);
    nrm_resource_release(mr);
}

TEST(scopes_nest)
{
    nrm_resource *mr = host_pool();
    uint64_t outer = push(NULL);
    void *old = allocate(mr, 100);
    uint64_t inner = push(NULL);
    void *ptr = allocate(mr, 30);
    deallocate(mr, old);
    CHECK_COUNTS(counts_of(inner), -70, 0, 30, 1, 30, 1);
    CHECK_COUNTS(pop(inner), -70, 0, 30, 1, 30, 1);
    CHECK_COUNTS(counts_of(outer), 30, 1, 130, 2, 130, 2);
    deallocate(mr, ptr);
    CHECK_COUNTS(pop(outer), 0, 0, 130, 2, 130, 2);
    nrm_resource_release(mr);
}

TEST(a_scope_may_end_under_another_one)
{
    nrm_counts none = {.total_count = 77};
    nrm_resource *mr = host_pool();
    uint64_t first = push(NULL), second = push(NULL);
    void *ptr = allocate(mr, 100);
    CHECK_EQ(pop(first).current_bytes, 100);
    deallocate(mr, ptr);
    CHECK_COUNTS(pop(second), 0, 0, 100, 1, 100, 1);
    CHECK_STATUS(nrm__scope_pop(first, &none), NRM_NOT_FOUND);
    CHECK_STATUS(nrm__scope_pop(0, &none), NRM_NOT_FOUND);
    CHECK_STATUS(nrm__scope_counts(second, &none), NRM_NOT_FOUND);
    CHECK_EQ(none.total_count, 77);
    nrm_resource_release(mr);
}

TEST(a_scope_of_one_resource_counts_what_goes_through_it)
{
    nrm_resource *pool = host_pool(), *mr = NULL, *other = NULL;
    CHECK_OK(nrm_statistics_create(pool, &mr));
    CHECK_OK(nrm_statistics_create(mr, &other));
    CHECK_EQ(nrm__scope_innermost(mr), 0);
    uint64_t scope = push(mr), all = push(NULL);
    CHECK_EQ(nrm__scope_innermost(mr), scope);
    CHECK_EQ(nrm__scope_innermost(NULL), all);
    CHECK_EQ(nrm__scope_innermost(other), 0);
    void *here = allocate(mr, 1), *above = allocate(other, 20),
         *under = allocate(pool, 300);
    CHECK_EQ(counts_of(scope).current_bytes, 21);
    CHECK_EQ(counts_of(all).current_bytes, 321);
    deallocate(other, above);
    deallocate(pool, under);
    deallocate(mr, here);
    CHECK_COUNTS(pop(all), 0, 0, 321, 3, 321, 3);
    nrm_resource_release(other);
    nrm_resource_release(mr); /* the scope holds it */
    CHECK_COUNTS(pop(scope), 0, 0, 21, 2, 21, 2);
    nrm_resource_release(pool);
}

TEST(a_wrong_free_changes_nothing)
{
    void *ptrs[3];
    nrm_resource *mr = host_pool(), *other = host_pool();
    uint64_t scope = push(NULL);
    allocate_three(mr, ptrs);
    for (int i = 0; i < 3; i++) {
        CHECK_STATUS(nrm_resource_deallocate(other, ptrs[i], 0, NULL), NRM_NOT_OWNED);
        CHECK_STATUS(nrm_resource_deallocate(mr, (char *)ptrs[i] + 64, 0, NULL),
                     NRM_NOT_OWNED);
    }
    CHECK_COUNTS(counts_of(scope), ALL, 3, ALL, 3, ALL, 3);
    deallocate_three(mr, ptrs);
    CHECK_COUNTS(pop(scope), 0, 0, ALL, 3, ALL, 3);
    check_pool(mr);
    nrm_resource_release(other);
    nrm_resource_release(mr);
}

/* A resource that asks another one, as a callback does. */
static uint64_t pushed_inside;

static nrm_status
ask(void *context, size_t nbytes, size_t alignment, nrm_stream *stream, void **out)
{
    pushed_inside = pushed_inside == 1 ? push(NULL) : pushed_inside;
    return nrm_resource_allocate(context, nbytes, alignment, stream, out);
}

static nrm_status
give(void *context, void *ptr, size_t nbytes, nrm_stream *stream)
{
    return nrm_resource_deallocate(context, ptr, nbytes, stream);
}

TEST(a_request_inside_of_one_is_part_of_it)
{
    nrm_resource *pool = host_pool(), *mr = callback_source(ask, give, pool);
    pushed_inside = 0;
    uint64_t scope = push(NULL);
    void *ptr = allocate(mr, 500);
    CHECK_COUNTS(counts_of(scope), 500, 1, 500, 1, 500, 1);
    CHECK_EQ(live_nbytes(pool), 500);
    deallocate(mr, ptr);
    CHECK_COUNTS(pop(scope), 0, 0, 500, 1, 500, 1);
    nrm_resource_release(mr);
    check_pool(pool);
    nrm_resource_release(pool);
}

TEST(a_scope_that_begins_inside_of_a_request_counts_from_the_next_one)
{
    nrm_resource *pool = host_pool(), *mr = callback_source(ask, give, pool);
    pushed_inside = 1;
    uint64_t scope = push(NULL);
    void *ptr = allocate(mr, 500);
    (void)pop(scope);
    void *next = allocate(pool, 20);
    CHECK_EQ(counts_of(pushed_inside).current_bytes, 520); /* it was open at the end */
    deallocate(pool, next);
    deallocate(mr, ptr);
    CHECK_EQ(pop(pushed_inside).current_bytes, 0);
    nrm_resource_release(mr);
    nrm_resource_release(pool);
}

TEST(a_thread_without_scopes_has_its_short_way)
{
    nrm_resource *mr = host_pool();
    deallocate(mr, allocate(mr, 64));
    struct nrm__thread_state *state = nrm__thread_state();
    struct nrm__cache *cache = state->cache;
    bool was_alone = atomic_load(&nrm__cache_common.is_alone);
    CHECK(cache != NULL);
    uint64_t scope = push(NULL);
    CHECK(state->cache == NULL && state->put_away == cache);
    deallocate(mr, allocate(mr, 64));
    deallocate(mr, allocate(mr, LARGE));
    CHECK_OK(nrm_resource_trim(mr, 0, NULL));
    nrm_resource *other = host_pool();
    deallocate(other, allocate(other, 64));
    nrm_resource_release(other);
    CHECK(state->cache == NULL && state->put_away == cache);
    (void)pop(scope);
    CHECK(state->cache == cache && state->put_away == NULL && state->counting == NULL);
    CHECK_EQ(atomic_load(&nrm__cache_common.is_alone), was_alone);
    nrm_resource_release(mr);
}

TEST(a_pool_that_is_made_inside_fills_itself)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    nrm_resource *source = host_source(), *mr = NULL;
    options.initial_nbytes = 4 * NRM__MIB;
    uint64_t scope = push(NULL);
    CHECK_OK(nrm_pool_create(source, &options, &mr));
    CHECK_COUNTS(counts_of(scope), 0, 0, 0, 0, 0, 0);
    deallocate(mr, allocate(mr, NRM__MIB));
    nrm_resource_release(mr);
    nrm_resource_release(source);
    CHECK_COUNTS(pop(scope), 0, 0, NRM__MIB, 1, NRM__MIB, 1);
}

/* ---- devices ---- */

TEST(blocks_of_devices_count_on_any_stream)
{
    nrm_resource *device = NULL, *mr = NULL;
    nrm_stream *stream = NULL;
    void *ptr = NULL;
    simulator_start(NULL);
    REQUIRE_OK(nrm_device_create(NULL, &device));
    REQUIRE_OK(nrm_pool_create(device, NULL, &mr));
    REQUIRE_OK(nrm_stream_create(0, NRM_STREAM_NON_BLOCKING, &stream));
    uint64_t scope = push(NULL);
    for (int i = 1; i <= 3; i++) {
        REQUIRE_OK(nrm_resource_allocate(mr, MEDIUM, 0, stream, &ptr));
        CHECK_COUNTS(counts_of(scope), MEDIUM, 1, MEDIUM, 1, i * MEDIUM, i);
        CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, stream));
        CHECK_COUNTS(counts_of(scope), 0, 0, MEDIUM, 1, i * MEDIUM, i);
    }
    (void)pop(scope);
    nrm_stream_release(stream);
    nrm_resource_release(mr);
    nrm_resource_release(device);
    simulator_check_faults();
}

CHECK_MAIN
