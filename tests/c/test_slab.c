/* Slabs: which cells there are, what look-ups find, when chunks come and go. */
#include "slab_owner.h"

/* ---- classes and look-ups ---- */

TEST(every_small_size_fits_its_cell_with_little_waste)
{
    struct owner *owner = create_owner();
    struct nrm__block block;
    for (size_t nbytes = 1; nbytes <= NRM__SLAB_MAX; nbytes++) {
        CHECK_ALIGNED(allocate(owner, nbytes, &block), 64);
        CHECK_EQ(block.nbytes, nbytes);
        CHECK_GE(block.capacity, nbytes);
        size_t units = (nbytes + 63) / 64 * 64;
        CHECK_LE(block.capacity - units, nbytes / 4);
        CHECK(release(owner, block.ptr));
    }
    nrm__slabs_check(&owner->slabs);
    nrm_resource_release(&owner->base);
}

TEST(slabs_take_what_is_small_and_not_aligned_further)
{
    CHECK(nrm__slabs_takes(1, 1));
    CHECK(nrm__slabs_takes(NRM__SLAB_MAX, 64));
    CHECK(!nrm__slabs_takes(NRM__SLAB_MAX + 1, 64));
    CHECK(!nrm__slabs_takes(64, 128));
}

static const struct {
    const char *name;
    size_t nbytes;
} sizes[] = {
    {"1", 1},       {"64", 64},     {"65", 65},     {"300", 300},   {"576", 576},
    {"640", 640},   {"1000", 1000}, {"1536", 1536}, {"1792", 1792}, {"3000", 3000},
    {"3584", 3584}, {"5120", 5120}, {"7168", 7168}, {"8192", 8192},
};

#define MAX_CELLS 1024

TEST_EACH(every_address_in_a_chunk_leads_to_its_cell, sizes)
{
    struct owner *owner = create_owner();
    struct nrm__block blocks[MAX_CELLS];
    allocate(owner, row->nbytes, &blocks[0]);
    size_t cell = blocks[0].capacity;
    size_t n_cells = NRM__SLAB_CHUNK / cell;
    char *chunk = (char *)((uintptr_t)blocks[0].ptr & ~(NRM__SLAB_CHUNK - 1));
    for (size_t i = 1; i < n_cells; i++) {
        allocate(owner, row->nbytes, &blocks[i]);
    }
    CHECK_EQ(atomic_load(&owner->n_chunks), 1u);
    for (size_t i = 0; i < n_cells; i++) {
        char *start = chunk + i * cell;
        CHECK_EQ(found_nbytes(start, start), row->nbytes);
        CHECK_EQ(found_nbytes(start + 1, start), row->nbytes);
        CHECK_EQ(found_nbytes(start + cell - 1, start), row->nbytes);
    }
    if (n_cells * cell != NRM__SLAB_CHUNK) {
        CHECK_EQ(found_nbytes(chunk + n_cells * cell, NULL), 0u);
        CHECK_EQ(found_nbytes(chunk + NRM__SLAB_CHUNK - 1, NULL), 0u);
    }
    for (size_t i = 0; i < n_cells; i++) {
        CHECK(release(owner, blocks[i].ptr));
        CHECK_EQ(found_nbytes(blocks[i].ptr, NULL), 0u);
    }
    nrm__slabs_check(&owner->slabs);
    nrm_resource_release(&owner->base);
}

/* ---- giving back ---- */

TEST(a_cell_is_given_back_once)
{
    struct owner *owner = create_owner();
    struct nrm__block block, other;
    allocate(owner, 100, &block);
    allocate(owner, 100, &other);
    CHECK(!release(owner, (char *)block.ptr + 1));
    CHECK(release(owner, block.ptr));
    CHECK(!release(owner, block.ptr));
    nrm__slabs_check(&owner->slabs);
    CHECK(release(owner, other.ptr));
    nrm_resource_release(&owner->base);
}

TEST(a_claim_sees_what_a_resize_in_place_changed)
{
    struct owner *owner = create_owner();
    struct nrm__block made, found, again;
    allocate(owner, 100, &made);
    REQUIRE(nrm__block_map_find(made.ptr, &found));
    REQUIRE(nrm__block_map_find(made.ptr, &again));
    REQUIRE(nrm__slabs_claim(&found));
    CHECK(!nrm__slabs_claim(&again)); /* claimed cells are not live */
    CHECK_EQ(found_nbytes(made.ptr, NULL), 0u);
    found.nbytes = 120;
    nrm__slabs_unclaim(&found);
    CHECK_EQ(found_nbytes(made.ptr, made.ptr), 120u);
    CHECK(nrm__slabs_claim(&again));
    CHECK_EQ(again.nbytes, 120u);
    nrm__slabs_unclaim(&again);
    CHECK(release(owner, made.ptr));
    nrm_resource_release(&owner->base);
    nrm_resource_release(&owner->base);
    nrm_resource_release(&owner->base);
}

/* Fills `n` chunks of the largest class; 8 cells each. */
static void
fill_chunks(struct owner *owner, size_t n, struct nrm__block *out)
{
    for (size_t i = 0; i < 8 * n; i++) {
        allocate(owner, NRM__SLAB_MAX, &out[i]);
    }
}

TEST(a_stale_block_of_a_chunk_that_left_is_not_claimed)
{
    struct owner *owner = create_owner();
    struct nrm__block blocks[8], stale;
    size_t nbytes = 0;
    fill_chunks(owner, 1, blocks);
    REQUIRE(nrm__block_map_find(blocks[3].ptr, &stale));
    for (int i = 0; i < 8; i++) {
        CHECK(release(owner, blocks[i].ptr));
    }
    nrm__slabs_trim(&owner->slabs, 0, &nbytes);
    CHECK_EQ(nbytes, NRM__SLAB_CHUNK);
    CHECK(!nrm__slabs_claim(&stale));
    fill_chunks(owner, 1, blocks); /* with the same description */
    CHECK_EQ(blocks[3].record, stale.record);
    CHECK(!nrm__slabs_claim(&stale));
    for (int i = 0; i < 8; i++) {
        CHECK(release(owner, blocks[i].ptr));
    }
    nrm_resource_release(stale.owner);
    nrm_resource_release(&owner->base);
}

/* ---- what is known about the memory ---- */

TEST(a_cell_that_was_never_used_is_known_to_be_zero)
{
    struct owner *owner = create_owner();
    struct nrm__block first, second, again;
    allocate(owner, 500, &first);
    CHECK(first.flags & NRM__BLOCK_IS_ZERO);
    memset(first.ptr, 1, 500);
    CHECK(release(owner, first.ptr));
    allocate(owner, 500, &again);
    CHECK_EQ(again.ptr, first.ptr); /* the lowest, and warm */
    CHECK(!(again.flags & NRM__BLOCK_IS_ZERO));
    allocate(owner, 500, &second);
    CHECK(second.flags & NRM__BLOCK_IS_ZERO);
    CHECK(release(owner, again.ptr));
    CHECK(release(owner, second.ptr));
    nrm_resource_release(&owner->base);
}

/* ---- chunks ---- */

TEST(a_few_empty_chunks_are_kept_and_trim_gives_them_back)
{
    struct owner *owner = create_owner();
    struct nrm__block blocks[8 * 20];
    size_t nbytes = 0;
    fill_chunks(owner, 20, blocks);
    CHECK_EQ(atomic_load(&owner->n_chunks), 20u);
    CHECK_EQ(atomic_load(&owner->slabs.reserved_nbytes), 20 * NRM__SLAB_CHUNK);
    for (int i = 0; i < 8 * 20; i++) {
        CHECK(release(owner, blocks[i].ptr));
        nrm__slabs_check(&owner->slabs);
    }
    size_t n_kept = atomic_load(&owner->n_chunks);
    CHECK_GE(n_kept, 2u);
    CHECK_LE(n_kept, 8u);
    nrm__slabs_trim(&owner->slabs, NRM__SLAB_CHUNK, &nbytes);
    CHECK_EQ(atomic_load(&owner->n_chunks), 1u);
    nrm__slabs_trim(&owner->slabs, 0, &nbytes);
    CHECK_EQ(atomic_load(&owner->n_chunks), 0u);
    CHECK_EQ(nbytes, n_kept * NRM__SLAB_CHUNK);
    CHECK_EQ(atomic_load(&owner->slabs.reserved_nbytes), 0u);
    nrm_resource_release(&owner->base);
}

TEST(trim_keeps_about_what_it_is_told_in_all_classes_together)
{
    struct owner *owner = create_owner();
    struct nrm__block block;
    size_t nbytes = 0;
    for (size_t size = 64; size <= NRM__SLAB_MAX; size *= 2) {
        allocate(owner, size, &block);
        CHECK(release(owner, block.ptr));
    }
    CHECK_EQ(atomic_load(&owner->n_chunks), 8u);
    nrm__slabs_trim(&owner->slabs, 3 * NRM__SLAB_CHUNK, &nbytes);
    CHECK_EQ(atomic_load(&owner->n_chunks), 3u);
    CHECK_EQ(nbytes, 5 * NRM__SLAB_CHUNK);
    nrm__slabs_check(&owner->slabs);
    nrm_resource_release(&owner->base);
}

TEST(cells_come_from_chunks_that_are_in_use_anyway)
{
    struct owner *owner = create_owner();
    struct nrm__block blocks[8 * 3], block;
    fill_chunks(owner, 3, blocks);
    for (int i = 0; i < 8; i++) {
        CHECK(release(owner, blocks[i].ptr)); /* the first is empty */
    }
    CHECK(release(owner, blocks[20].ptr)); /* the last has room */
    allocate(owner, NRM__SLAB_MAX, &block);
    CHECK_EQ(block.ptr, blocks[20].ptr);
    for (int i = 8; i < 24; i++) {
        CHECK(release(owner, blocks[i].ptr));
    }
    nrm_resource_release(&owner->base);
}

TEST(a_refused_chunk_is_an_error_and_nothing_else)
{
    struct owner *owner = create_owner();
    struct nrm__block blocks[8], block = {0};
    fill_chunks(owner, 1, blocks);
    atomic_store(&owner->refuses, true);
    CHECK_STATUS(nrm__slabs_allocate(&owner->slabs, NRM__SLAB_MAX, &block),
                 NRM_OUT_OF_MEMORY);
    CHECK_STR_EQ(nrm_last_error()->message, "no chunk today");
    CHECK_EQ(atomic_load(&owner->n_refused), 1u);
    nrm__slabs_check(&owner->slabs);
    CHECK(release(owner, blocks[5].ptr));
    allocate(owner, NRM__SLAB_MAX, &blocks[5]); /* what there is serves on */
    for (int i = 0; i < 8; i++) {
        CHECK(release(owner, blocks[i].ptr));
    }
    nrm_resource_release(&owner->base);
}

/* ---- a walk ---- */

#define N_SLOTS 400

TEST(a_random_walk_keeps_every_byte)
{
    static struct slot slots[N_SLOTS];
    struct owner *owner = create_owner();
    uint64_t seed = 11;
    size_t trimmed = 0;
    for (int step = 0; step < 30000; step++) {
        size_t i = check_random(&seed) % N_SLOTS;
        if (slots[i].ptr != NULL) {
            empty_slot(owner, &slots[i], (unsigned char)i);
        }
        else {
            fill_slot(owner, &slots[i], random_nbytes(&seed) % NRM__SLAB_MAX + 1,
                      (unsigned char)i);
        }
        if (step % 50 == 0) {
            nrm__slabs_check(&owner->slabs);
        }
        if (step % 1000 == 0) {
            nrm__slabs_trim(&owner->slabs, 0, &trimmed);
        }
    }
    for (size_t i = 0; i < N_SLOTS; i++) {
        if (slots[i].ptr != NULL) {
            empty_slot(owner, &slots[i], (unsigned char)i);
        }
    }
    CHECK_GT(trimmed, 0u);
    nrm_resource_release(&owner->base);
}

CHECK_MAIN
