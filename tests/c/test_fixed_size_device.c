/* Blocks of one size in device memory: which sizes and alignments there are, what a
   thread keeps of them, and what is done without the driver. */
#include "fixed_blocks.h"

static const struct {
    const char *name;
    size_t block_nbytes;
    bool keeps;
} kept[] = {
    {"256 B", 256, true},
    {"64 KiB", 64 * NRM__KIB, true},
    {"32 MiB", 32 * NRM__MIB, true},
    {"64 MiB", 64 * NRM__MIB, false},
    {"no power of two", 3 * 256, false},
};

/* A block whose size a thread finds by rounding is kept whatever was asked of it. */
TEST_EACH(a_thread_keeps_blocks_for_every_size_or_none, kept)
{
    start_bare(row->block_nbytes);
    know(a);
    void *ptr = take_some(1, a);
    give(ptr, a);
    CHECK_EQ(n_kept(mr), (size_t)row->keeps);
    CHECK(take(a) == ptr);
    CHECK_EQ(n_kept(mr), 0u);
    give(ptr, a);
    CHECK_EQ(n_kept(mr), (size_t)row->keeps);
    stop();
}

/* More than a thread keeps, and so much that a pool would look what is done. */
TEST(a_stream_gets_all_of_many_blocks_back_without_a_call)
{
    enum { N = 128 };
    nrm_fixed_size_options options = NRM_OPTIONS(nrm_fixed_size_options);
    void *blocks[N];
    block_nbytes = NRM__MIB;
    start_machine();
    nrm_resource *source = device_source();
    CHECK_OK(nrm_fixed_size_create(source, &options, &mr));
    nrm_resource_release(source);
    CHECK_EQ(reserved_nbytes(mr), N * (int64_t)NRM__MIB);
    blocks[0] = take_and_read(a);
    take_all(blocks + 1, N - 1, a);
    uint64_t before = sim.call_count(NULL);
    for (int round = 0; round < 3; round++) {
        give_all(blocks, N, a);
        take_all(blocks, N, a);
    }
    CHECK_EQ(sim.call_count(NULL), before);
    CHECK_EQ(reserved_nbytes(mr), N * (int64_t)NRM__MIB);
    let_go(a);
    give_all(blocks, N, a);
    stop();
}

static const struct {
    const char *name;
    size_t block_nbytes, alignment;
    nrm_status expected;
} alignments[] = {
    {"the kind's", 3 * 256, 256, NRM_OK},
    {"no factor of the size", 3 * 256, 512, NRM_NOT_SUPPORTED},
    {"the size", 4096, 4096, NRM_OK},
    {"more than the size", 4096, 8192, NRM_NOT_SUPPORTED},
    {"a page of the map", NRM__MIB, NRM__MAP_PAGE, NRM_OK},
    {"more than that", NRM__MIB, 2 * NRM__MAP_PAGE, NRM_NOT_SUPPORTED},
};

TEST_EACH(an_alignment_is_honoured_for_every_block_or_refused, alignments)
{
    enum { N = 2 * N_BLOCKS + 1 };
    void *blocks[N];
    start_bare(row->block_nbytes);
    for (int i = 0; i < N; i++) {
        blocks[i] = NULL;
        CHECK_EQ(nrm_resource_allocate(mr, 1, row->alignment, a, &blocks[i]),
                 row->expected);
        CHECK_ALIGNED(blocks[i], row->alignment);
    }
    if (row->expected != NRM_OK) {
        CHECK_STR_HAS(nrm_last_error()->message, "aligned to");
    }
    for (int i = 0; i < N; i++) {
        CHECK_OK(nrm_resource_deallocate(mr, blocks[i], 0, a));
    }
    stop();
}

TEST_EACH(a_request_larger_than_a_block_is_out_of_memory_and_changes_nothing, overs)
{
    start(row, N_BLOCKS);
    void *ptr = NULL;
    know(a);
    int64_t before = reserved_nbytes(mr);
    CHECK_STATUS(nrm_resource_allocate(mr, block_nbytes + 1, 0, a, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK(ptr == NULL);
    CHECK_EQ(reserved_nbytes(mr), before);
    CHECK_EQ(live_nbytes(mr), 0);
    stop();
}

/* Its chunks are no whole pages, and what is behind them is not aligned to any. */
TEST(blocks_of_one_size_are_cut_out_of_blocks_of_another)
{
    void *blocks[3 * N_BLOCKS];
    block_nbytes = 4096;
    start_machine();
    nrm_resource *large = fixed_over(device_source());
    block_nbytes = 512;
    mr = fixed_over(large);
    CHECK_EQ(reserved_nbytes(mr), N_BLOCKS * 512);
    for (int round = 0; round < 2; round++) {
        take_all(blocks, 3 * N_BLOCKS, a);
        for (int i = 0; i < 3 * N_BLOCKS; i++) {
            CHECK_ALIGNED(blocks[i], 256);
        }
        give_all(blocks, 3 * N_BLOCKS, a);
    }
    CHECK_EQ(reserved_nbytes(mr), 3 * N_BLOCKS * 512);
    stop();
}

TEST(immediate_reuse_asks_nobody)
{
    nrm_fixed_size_options options = NRM_OPTIONS(nrm_fixed_size_options);
    block_nbytes = 4096;
    start_machine();
    nrm_resource *source = device_source();
    options.block_nbytes = 3 * 256;
    options.reuse = NRM_REUSE_IMMEDIATE;
    CHECK_OK(nrm_fixed_size_create(source, &options, &mr));
    nrm_resource_release(source);
    hold(a);
    void *ptr = take_some(3, a);
    give(ptr, a);
    uint64_t before = sim.call_count(NULL);
    CHECK(take_some(700, b) == ptr);
    CHECK_EQ(sim.call_count(NULL), before);
    give(ptr, NULL);
    let_go(a);
    stop();
}

static void
allocate_in_child(void)
{
    void *ptr = NULL;
    uint64_t before = sim.call_count(NULL);
    CHECK_STATUS(nrm_resource_trim(mr, 0, NULL), NRM_OK);
    CHECK(nrm_resource_allocate(mr, 1, 0, NULL, &ptr) != NRM_OK || ptr != NULL);
    mr->ops->check(mr);
    CHECK_EQ(sim.call_count(NULL), before);
}

TEST(a_forked_child_never_calls_the_driver)
{
    start_bare(4096);
    know(a);
    CHECK_IN_CHILD(allocate_in_child);
    stop();
}

CHECK_MAIN
