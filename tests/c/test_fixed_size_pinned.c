/* Blocks of one size in memory that a GPU may touch, with copies pending on a simulated
   one. */
#include "base/bits.h"
#include "copies.h"
#include "fixed_size.h"
#include "nrm/options.h"

#define BLOCK (256 * NRM__KIB)

static nrm_resource *
fixed_of(struct copies *copies, size_t n_blocks)
{
    nrm_resource_retain(copies->source);
    return fixed_over(copies->source, BLOCK, n_blocks);
}

TEST_EACH(a_block_with_a_copy_in_flight_is_not_handed_out, copies_kinds)
{
    struct copies copies = copies_begin(row);
    nrm_resource *mr = fixed_of(&copies, 4);
    copies_check_held(&copies, mr, BLOCK, 9, 12);
    copies_end(&copies, mr);
}

TEST_EACH(the_same_with_immediate_reuse_shows_wrong_bytes, copies_kinds)
{
    struct copies copies = copies_begin(row);
    nrm_fixed_size_options options = NRM_OPTIONS(nrm_fixed_size_options);
    nrm_resource *mr = NULL;
    options.block_nbytes = BLOCK;
    options.reuse = NRM_REUSE_IMMEDIATE;
    REQUIRE_OK(nrm_fixed_size_create(copies.source, &options, &mr));
    void *first = allocate(mr, BLOCK);
    memset(first, 1, BLOCK);
    copies_hold(&copies);
    copies_to_device(&copies, first, BLOCK);
    CHECK_OK(nrm_resource_deallocate(mr, first, 0, NULL));
    CHECK(allocate(mr, BLOCK) == first);
    memset(first, 2, BLOCK);
    copies_let_go(&copies);
    CHECK(copies_arrived(&copies, 2, BLOCK));
    CHECK_OK(nrm_resource_deallocate(mr, first, 0, NULL));
    copies_end(&copies, mr);
}

TEST_EACH(an_idle_gpu_gives_the_same_block_back, copies_kinds)
{
    struct copies copies = copies_begin(row);
    nrm_resource *mr = fixed_of(&copies, 1);
    int64_t before = reserved_nbytes(mr);
    void *first = allocate(mr, BLOCK);
    for (int i = 0; i < 50; i++) {
        CHECK_OK(nrm_resource_deallocate(mr, first, 0, NULL));
        CHECK(allocate(mr, BLOCK) == first);
    }
    CHECK_EQ(reserved_nbytes(mr), before);
    CHECK_OK(nrm_resource_deallocate(mr, first, 0, NULL));
    copies_end(&copies, mr);
}

TEST_EACH(giving_back_never_calls_the_driver, copies_kinds)
{
    struct copies copies = copies_begin(row);
    nrm_resource *mr = fixed_of(&copies, 8);
    void *ptr = allocate(mr, BLOCK);
    copies_hold(&copies);
    copies_to_device(&copies, ptr, BLOCK);
    uint64_t before = sim.call_count(NULL), queries = sim.call_count("cuEventQuery");
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    nrm_statistics statistics;
    CHECK_OK(nrm_resource_statistics(mr, &statistics));
    CHECK_EQ(statistics.parked_bytes, (int64_t)BLOCK);
    /* The background thread may query, and does nothing else. */
    CHECK_LE(sim.call_count(NULL) - before,
             3 * (1 + sim.call_count("cuEventQuery") - queries));
    CHECK_EQ(sim.call_count("cuCtxRecordEvent"), 0u);
    copies_let_go(&copies);
    copies_end(&copies, mr);
}

TEST_EACH(one_that_dies_unmaps_nothing_that_is_in_use, copies_kinds)
{
    struct copies copies = copies_begin(row);
    nrm_resource *mr = fixed_of(&copies, 2);
    void *ptr = allocate(mr, BLOCK);
    memset(ptr, 7, BLOCK);
    copies_hold(&copies);
    copies_to_device(&copies, ptr, BLOCK);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    nrm_resource_release(mr);
    CHECK_EQ(nrm__retired_drain(1000000), 0u);
    CHECK(!nrm__retired_is_empty());
    copies_let_go(&copies);
    CHECK(copies_arrived(&copies, 7, BLOCK));
    copies_end(&copies, fixed_of(&copies, 1));
}

TEST_EACH(trim_gives_nothing_back_that_is_in_use, copies_kinds)
{
    struct copies copies = copies_begin(row);
    nrm_resource *mr = fixed_of(&copies, 2);
    size_t given = 1;
    void *ptr = allocate(mr, BLOCK);
    memset(ptr, 7, BLOCK);
    copies_hold(&copies);
    copies_to_device(&copies, ptr, BLOCK);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    CHECK_OK(nrm_resource_trim(mr, 0, &given));
    CHECK_EQ(given, 0u);
    copies_let_go(&copies);
    CHECK(copies_arrived(&copies, 7, BLOCK));
    CHECK_OK(nrm_resource_trim(mr, 0, &given));
    CHECK_EQ(given, 2 * BLOCK);
    CHECK_EQ(reserved_nbytes(mr), 0);
    copies_end(&copies, mr);
}

TEST(when_the_upstream_is_exhausted_it_fails_or_waits_as_the_option_says)
{
    static const char *const words[] = {"error", "wait"};
    for (int i = 0; i < 2; i++) {
        struct copies copies = copies_begin(&copies_kinds[0]);
        REQUIRE_OK(nrm_option_set(NRM_OPT_ON_EXHAUSTED, words[i]));
        nrm_resource_retain(copies.source);
        nrm_resource *pool = pool_over(copies.source, 2 * NRM__MIB);
        nrm_resource *mr = fixed_over(pool, BLOCK, 8);
        REQUIRE_OK(nrm_option_set(NRM_OPT_ON_EXHAUSTED, "error"));
        void *blocks[8], *ninth = NULL;
        pthread_t thread;
        for (int j = 0; j < 8; j++) {
            blocks[j] = allocate(mr, BLOCK);
        }
        copies_hold(&copies);
        copies_to_device(&copies, blocks[3], BLOCK);
        CHECK_OK(nrm_resource_deallocate(mr, blocks[3], 0, NULL));
        pthread_create(&thread, NULL, simulator_release_later, copies.stream);
        nrm_status status = nrm_resource_allocate(mr, BLOCK, 0, NULL, &ninth);
        CHECK_EQ(status, i == 0 ? NRM_OUT_OF_MEMORY : NRM_OK);
        pthread_join(thread, NULL);
        CHECK_EQ(cuda.cuStreamSynchronize(copies.stream), NRM_CUDA_SUCCESS);
        blocks[3] = i == 0 ? allocate(mr, BLOCK) : ninth;
        for (int j = 0; j < 8; j++) {
            CHECK_OK(nrm_resource_deallocate(mr, blocks[j], 0, NULL));
        }
        copies_end(&copies, mr);
    }
}

/* Also below: the chunk of a fixed-size resource that lies in a block of another. */
TEST(after_a_reset_memory_is_page_locked_anew_and_live_bytes_are_kept)
{
    struct copies copies = copies_begin(&copies_kinds[0]);
    nrm_resource *mr = fixed_over(fixed_of(&copies, 4), BLOCK / 4, 4);
    nrm_CUdevice device;
    void *live = allocate(mr, BLOCK / 4), *freed = allocate(mr, BLOCK / 4);
    memset(live, 42, BLOCK / 4);
    copies_hold(&copies);
    copies_to_device(&copies, freed, BLOCK / 4);
    CHECK_OK(nrm_resource_deallocate(mr, freed, 0, NULL));
    CHECK_EQ(cuda.cuDeviceGet(&device, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuDevicePrimaryCtxReset(device), NRM_CUDA_SUCCESS);
    CHECK(!is_page_locked(live));
    void *ptr = allocate(mr, BLOCK / 4);
    CHECK(is_page_locked(ptr));
    CHECK(is_page_locked(live));
    CHECK_EQ(((unsigned char *)live)[BLOCK / 4 - 1], 42);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    CHECK_OK(nrm_resource_deallocate(mr, live, 0, NULL));
    copies_enter(&copies, 0);
    copies_end(&copies, mr);
}

static nrm_resource *shared;

static void
allocate_in_gpu_child(void)
{
    void *ptr = NULL;
    uint64_t before = sim.call_count(NULL);
    CHECK_STATUS(nrm_resource_allocate(shared, BLOCK, 0, NULL, &ptr),
                 NRM_CUDA_UNAVAILABLE);
    CHECK_STR_HAS(nrm_last_error()->message, "fork");
    CHECK_OK(nrm_resource_trim(shared, 0, NULL));
    CHECK_EQ(sim.call_count(NULL), before);
}

TEST(a_forked_child_never_calls_the_driver)
{
    struct copies copies = copies_begin(&copies_kinds[0]);
    shared = fixed_of(&copies, 4);
    CHECK_IN_CHILD(allocate_in_gpu_child);
    copies_end(&copies, shared);
}

TEST(blocks_of_device_memory_are_described_elsewhere)
{
    struct copies copies = copies_begin(&copies_kinds[0]);
    nrm_resource *device = NULL;
    nrm_block_info info;
    REQUIRE_OK(nrm_device_create(NULL, &device));
    nrm_resource *mr = fixed_over(device, 1000, 64);
    for (int i = 0; i < 3; i++) {
        void *blocks[200];
        for (int j = 0; j < 200; j++) {
            blocks[j] = allocate(mr, 1000);
            CHECK_ALIGNED(blocks[j], 256);
        }
        REQUIRE_OK(nrm_block_find((char *)blocks[77] + 999, &info));
        CHECK(info.ptr == blocks[77]);
        nrm_resource_release(info.resource);
        for (int j = 0; j < 200; j++) {
            CHECK_OK(nrm_resource_deallocate(mr, blocks[j], 0, NULL));
        }
        mr->ops->check(mr);
    }
    copies_end(&copies, mr);
}

CHECK_MAIN
