/* A pool of device memory that would map its segments: where nothing is mapped, what is
   left of calls that fail, and threads, resets and forks. */
#include <string.h>

#include "base/bits.h"
#include "core/hooks.h"
#include "fixtures.h"
#include "mapped_pool.h"
#include "nrm/adaptors.h"
#include "nrm/options.h"
#include "pools/pool.h"
#include "streams.h"

/* ---- where nothing is mapped ---- */

static void
without_the_device(nrm_pool_options *options)
{
    (void)options;
    sim.set_attribute(0, NRM_CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                      0);
}

static void
without_the_wish(nrm_pool_options *options)
{
    options->segments = NRM_SEGMENTS_ALLOC;
}

static void
without_order(nrm_pool_options *options)
{
    options->reuse = NRM_REUSE_IMMEDIATE;
}

static void
without_addresses(nrm_pool_options *options)
{
    (void)options;
    CHECK_EQ(sim.fail("cuMemAddressReserve", 1, NRM_CUDA_ERROR_OUT_OF_MEMORY, 1), 0);
}

static const struct other_way {
    const char *name;
    void (*set)(nrm_pool_options *options);
} other_ways[] = {
    {"the device cannot", without_the_device},
    {"segments=alloc", without_the_wish},
    {"reuse=immediate", without_order},
    {"no addresses", without_addresses},
};

TEST_EACH(otherwise_segments_come_of_the_upstream, other_ways)
{
    nrm_pool_options options = options_of(0, 0);
    start_machine();
    row->set(&options);
    pool = pool_with(device_source(), &options);
    char *ptr = take(5 * NRM__MIB);
    CHECK_EQ(n_pieces(), 0u);
    CHECK_EQ(simulator_count(NRM_CUDASIM_DEVICE_ALLOCATIONS), 1u);
    give(ptr);
    stop();
}

TEST(the_option_holds_for_pools_that_do_not_say)
{
    nrm_pool_options options = options_of(0, 0);
    start_machine();
    CHECK_OK(nrm_option_set(NRM_OPT_SEGMENTS, "alloc"));
    pool = pool_with(device_source(), &options);
    CHECK_OK(nrm_option_set(NRM_OPT_SEGMENTS, "vmm"));
    char *ptr = take(1000);
    CHECK_EQ(n_pieces(), 0u);
    give(ptr);
    stop();
}

/* What an adaptor does must not be got round. */
TEST(an_adaptor_below_the_pool_is_asked)
{
    nrm_limiting_options limit = NRM_OPTIONS(nrm_limiting_options);
    nrm_pool_options options = options_of(0, 0);
    nrm_resource *limited = NULL, *source = NULL;
    void *ptr = NULL;
    start_machine();
    source = device_source();
    limit.allocation_limit = PIECE;
    REQUIRE_OK(nrm_limiting_create(source, &limit, &limited));
    nrm_resource_release(source);
    pool = pool_with(limited, &options);
    CHECK_STATUS(nrm_resource_allocate(pool, 2 * PIECE, 0, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK_EQ(n_pieces(), 0u);
    give(take(1000));
    stop();
}

/* ---- failing calls ---- */

static const struct failing {
    const char *name;
    int nth;
} failing[] = {
    {"cuMemCreate", 1},
    {"cuMemCreate", 2},
    {"cuMemMap", 1},
    {"cuMemMap", 3},
    {"cuMemSetAccess", 1},
    {"cuMemSetAccess", 2},
    {"cuMemAddressReserve", 1},
};

TEST_EACH(memory_that_is_out_for_a_moment_is_got_in_another_way, failing)
{
    start(0);
    CHECK_EQ(sim.fail(row->name, row->nth, NRM_CUDA_ERROR_OUT_OF_MEMORY, 1), 0);
    char *ptr = take(3 * PIECE);
    CHECK(takes_a_copy(ptr, 3 * PIECE));
    give(ptr);
    (void)trim();
    CHECK_EQ(reserved_nbytes(pool), 0);
    CHECK_EQ(n_pieces(), 0u);
    stop();
}

TEST_EACH(a_call_that_fails_leaves_nothing_behind, failing)
{
    void *ptr = NULL;
    start(0);
    bool is_first = strcmp(row->name, "cuMemAddressReserve") == 0;
    char *base = is_first ? NULL : take(PIECE);
    CHECK_OK(nrm_resource_deallocate(pool, base, 0, NULL));
    CHECK_EQ(sim.fail(row->name, row->nth, NRM_CUDA_ERROR_OPERATING_SYSTEM, 1), 0);
    nrm_status status = nrm_resource_allocate(pool, 4 * PIECE, 0, NULL, &ptr);
    nrm__pool_check(pool);
    if (is_first) { /* without addresses there is another way */
        CHECK_OK(status);
        CHECK_EQ(n_pieces(), 0u);
        give(ptr);
    }
    else {
        CHECK_EQ(status, NRM_CUDA_ERROR);
        CHECK_STR_EQ(nrm_last_error()->native_name, "CUDA_ERROR_OPERATING_SYSTEM");
        CHECK_EQ(reserved_nbytes(pool), (int64_t)(n_pieces() * PIECE));
        CHECK((ptr = take(4 * PIECE)) == base); /* its hole is one again */
        give(ptr);
    }
    stop();
}

TEST(without_physical_memory_the_upstream_is_asked_last)
{
    void *ptr = NULL;
    start(0);
    CHECK_EQ(sim.fail("cuMemCreate", 1, NRM_CUDA_ERROR_OUT_OF_MEMORY, 1000), 0);
    char *own = take(PIECE);
    CHECK_EQ(simulator_count(NRM_CUDASIM_DEVICE_ALLOCATIONS), 1u);
    CHECK_EQ(sim.fail("cuMemAlloc", 1, NRM_CUDA_ERROR_OUT_OF_MEMORY, 1000), 0);
    CHECK_STATUS(nrm_resource_allocate(pool, PIECE, 0, NULL, &ptr), NRM_OUT_OF_MEMORY);
    nrm__pool_check(pool);
    CHECK_EQ(sim.fail("cuMemAlloc", 1, 0, 1), 0);
    CHECK_EQ(sim.fail("cuMemCreate", 1, 0, 1), 0);
    give(own);
    give(take(PIECE));
    stop();
}

/* What smaller blocks left behind goes back when the device has no more. */
TEST(a_full_device_has_room_for_one_large_block)
{
    size_t whole, total;
    void *most = NULL;
    machine_nbytes = 64 * NRM__MIB;
    start(0);
    machine_nbytes = 8 * NRM__GIB;
    CHECK_EQ(cuda.cuMemGetInfo(&whole, &total), NRM_CUDA_SUCCESS);
    whole = nrm__align_down(whole, PIECE);
    char *first = take(whole / 2), *between = take(PIECE);
    give(first);
    REQUIRE_OK(nrm_resource_allocate(pool, whole - 2 * PIECE, 0, NULL, &most));
    give(most);
    give(between);
    stop();
}

TEST(what_the_driver_does_not_unmap_is_noted_and_not_used)
{
    nrm_error lost;
    uint64_t before, after;
    start(0);
    char *first = take(PIECE);
    give(first);
    nrm__lost_error_get(&lost, &before);
    CHECK_EQ(sim.fail("cuMemUnmap", 1, NRM_CUDA_ERROR_OPERATING_SYSTEM, 1), 0);
    (void)trim();
    nrm__lost_error_get(&lost, &after);
    CHECK_EQ(after, before + 1);
    CHECK_EQ(reserved_nbytes(pool), 0);
    char *second = take(PIECE);
    CHECK(second == first + PIECE);
    give(second);
    nrm_resource_release(pool);
    CHECK_EQ(n_pieces(), 1u); /* it is lost */
    cuda.cuCtxSetCurrent(NULL);
}

/* ---- threads, resets, forks ---- */

static void
churn(unsigned index, void *unused)
{
    uint64_t random = 99 + index;
    char *ptrs[4] = {NULL};
    (void)unused;
    make_current(0);
    for (int turn = 0; turn < 200; turn++) {
        char **ptr = &ptrs[check_random(&random) % 4];
        if (*ptr != NULL) {
            CHECK_OK(nrm_resource_deallocate(pool, *ptr, 0, NULL));
            *ptr = NULL;
        }
        else {
            size_t nbytes = 1 + check_random(&random) % (2 * PIECE);
            *ptr = allocate(pool, nbytes);
            nrm_block_info info;
            if (CHECK_OK(nrm_block_find(*ptr + nbytes - 1, &info))) {
                CHECK(info.ptr == *ptr);
                nrm_resource_release(info.resource);
            }
        }
        if (turn % 20 == 0) {
            CHECK_OK(nrm_resource_trim(pool, 0, NULL));
        }
    }
    for (int i = 0; i < 4; i++) {
        CHECK_OK(nrm_resource_deallocate(pool, ptrs[i], 0, NULL));
    }
}

TEST(threads_grow_and_shrink_one_pool)
{
    start(0);
    check_threads(3, churn, NULL);
    (void)trim();
    CHECK_EQ(n_pieces(), 0u);
    stop();
}

TEST(what_is_mapped_outlives_a_reset_of_its_context)
{
    start(0);
    char *ptr = take(PIECE);
    give(ptr);
    CHECK_EQ(cuda.cuDevicePrimaryCtxReset(0), NRM_CUDA_SUCCESS);
    make_current(0);
    ptr = take(PIECE);
    CHECK(takes_a_copy(ptr, PIECE));
    give(ptr);
    stop();
}

static void
end_in_child(void)
{
    CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    nrm__pool_check(pool);
    nrm_resource_release(pool);
}

TEST(a_child_leaves_the_parents_memory_alone)
{
    start(0);
    nrm_stream *a = new_stream();
    void *ptr = NULL;
    char *other = take(PIECE);
    REQUIRE_OK(nrm_resource_allocate(pool, PIECE, 0, a, &ptr));
    CHECK_OK(nrm_resource_deallocate(pool, ptr, 0, a));
    give(other);
    CHECK_IN_CHILD(end_in_child);
    CHECK_EQ(n_pieces(), 2u);
    nrm_stream_release(a);
    stop();
}

CHECK_MAIN
