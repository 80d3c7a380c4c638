/* Slabs, in a resource that has nothing else: each chunk is a mapping of its own. */

#include <pthread.h>
#include <string.h>

#include "check.h"

#include "base/error.h"
#include "core/cache.h"
#include "core/nodes.h"
#include "core/slab.h"
#include "os/memory.h"

struct owner {
    nrm_resource base;
    struct nrm__slabs slabs;
    atomic_size_t n_chunks;
    atomic_size_t n_refused;
    atomic_bool refuses;
};

static struct owner *
owner_of(nrm_resource *mr)
{
    return (struct owner *)mr;
}

static nrm_status
get_chunk(nrm_resource *mr, struct nrm__block *out)
{
    struct owner *owner = owner_of(mr);
    if (atomic_load(&owner->refuses)) {
        atomic_fetch_add(&owner->n_refused, 1);
        return nrm__error(NRM_OUT_OF_MEMORY, "no chunk today");
    }
    nrm__assert_no_locks();
    CHECK_EQ(nrm__map(NRM__SLAB_CHUNK, NRM__SLAB_CHUNK, &out->ptr), 0);
    out->capacity = out->nbytes = NRM__SLAB_CHUNK;
    out->flags = NRM__BLOCK_IS_ZERO;
    atomic_fetch_add(&owner->n_chunks, 1);
    return NRM_OK;
}

static void
put_chunk(nrm_resource *mr, const struct nrm__block *chunk)
{
    nrm__assert_no_locks();
    nrm__unmap(chunk->ptr, NRM__SLAB_CHUNK);
    atomic_fetch_sub(&owner_of(mr)->n_chunks, 1);
}

static nrm_status
owner_allocate(nrm_resource *mr, const struct nrm__request *request,
               struct nrm__block *out)
{
    return nrm__slabs_allocate(&owner_of(mr)->slabs, request->nbytes, out);
}

static void
owner_deallocate(nrm_resource *mr, const struct nrm__block *block, nrm_stream *stream)
{
    (void)stream;
    nrm__slabs_deallocate(&owner_of(mr)->slabs, block);
}

static bool
owner_find(nrm_resource *mr, struct nrm__segment *segment, const void *ptr,
           struct nrm__block *out)
{
    (void)mr;
    CHECK(nrm__segment_is_slab(segment));
    return nrm__slabs_find(segment, ptr, out);
}

static bool
owner_claim(nrm_resource *mr, struct nrm__block *block)
{
    (void)mr;
    return nrm__slabs_claim(block);
}

static void
owner_unclaim(nrm_resource *mr, const struct nrm__block *block)
{
    (void)mr;
    nrm__slabs_unclaim(block);
}

static void
owner_fork_prepare(nrm_resource *mr)
{
    nrm__slabs_fork_prepare(&owner_of(mr)->slabs);
}

static void
owner_fork_parent(nrm_resource *mr)
{
    nrm__slabs_fork_parent(&owner_of(mr)->slabs);
}

static void
owner_fork_child(nrm_resource *mr)
{
    nrm__slabs_fork_child(&owner_of(mr)->slabs);
}

static void
owner_finish(nrm_resource *mr)
{
    nrm__slabs_finish(&owner_of(mr)->slabs);
    CHECK_EQ(atomic_load(&owner_of(mr)->n_chunks), 0u);
}

static const struct nrm__ops owner_ops = {
    .class_name = "SlabsOnly",
    .flags = NRM__OPS_MAPPED,
    .allocate = owner_allocate,
    .deallocate = owner_deallocate,
    .find_block = owner_find,
    .claim_block = owner_claim,
    .unclaim_block = owner_unclaim,
    .fork_prepare = owner_fork_prepare,
    .fork_parent = owner_fork_parent,
    .fork_child = owner_fork_child,
    .finish = owner_finish,
};

static struct owner *
create_owner(void)
{
    nrm_resource *mr = NULL;
    CHECK_OK(nrm__resource_create(&owner_ops, NRM_KIND_HOST, NULL, sizeof(struct owner),
                                  &mr));
    CHECK_OK(nrm__slabs_init(&owner_of(mr)->slabs, mr, get_chunk, put_chunk));
    nrm__resource_publish(mr);
    return owner_of(mr);
}

static void *
allocate(struct owner *owner, size_t nbytes, struct nrm__block *out)
{
    *out = (struct nrm__block){0};
    CHECK_OK(
        nrm__allocate(&owner->base, &(struct nrm__request){nbytes, 64, NULL, 0}, out));
    return out->ptr;
}

/* Finds, claims and gives back, as the dispatcher does. */
static bool
release(struct owner *owner, void *ptr)
{
    struct nrm__block block;
    if (!nrm__block_map_find(ptr, &block)) {
        return false;
    }
    nrm_resource *found_owner = block.owner;
    bool claimed = block.ptr == ptr && nrm__block_map_claim(&block);
    if (claimed) {
        nrm__deallocate(&owner->base, &block, NULL);
    }
    nrm_resource_release(found_owner);
    return claimed;
}

/* The size that a look-up gives for an address; 0: it is in no live block. */
static size_t
found_nbytes(const void *ptr, const void *start)
{
    struct nrm__block block;
    if (!nrm__block_map_find(ptr, &block)) {
        return 0;
    }
    CHECK_EQ(block.ptr, start);
    nrm_resource_release(block.owner);
    return block.nbytes;
}

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

/* ---- walks ---- */

#define N_SLOTS 400

struct slot {
    unsigned char *ptr;
    size_t nbytes;
};

static size_t
random_nbytes(uint64_t *seed)
{
    return 1 + check_random(seed) % ((size_t)1 << (6 + check_random(seed) % 8));
}

static void
fill_slot(struct owner *owner, struct slot *slot, size_t nbytes, unsigned char key)
{
    struct nrm__block block;
    slot->ptr = allocate(owner, nbytes, &block);
    slot->nbytes = nbytes;
    if (block.flags & NRM__BLOCK_IS_ZERO) {
        CHECK_EQ(slot->ptr[0], 0);
        CHECK_EQ(slot->ptr[nbytes - 1], 0);
    }
    memset(slot->ptr, key, nbytes);
}

static void
empty_slot(struct owner *owner, struct slot *slot, unsigned char key)
{
    CHECK_EQ(slot->ptr[0], key);
    CHECK_EQ(slot->ptr[slot->nbytes / 2], key);
    CHECK_EQ(slot->ptr[slot->nbytes - 1], key);
    CHECK_EQ(found_nbytes(slot->ptr + slot->nbytes - 1, slot->ptr), slot->nbytes);
    CHECK(release(owner, slot->ptr));
    slot->ptr = NULL;
}

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

/* ---- threads ---- */

static void
walks(unsigned index, void *arg)
{
    struct owner *owner = arg;
    struct slot slots[40] = {{NULL, 0}};
    uint64_t seed = index + 1;
    size_t trimmed = 0;
    for (int step = 0; step < 6000; step++) {
        size_t i = check_random(&seed) % 40;
        unsigned char key = (unsigned char)(index * 40 + i);
        if (slots[i].ptr != NULL) {
            empty_slot(owner, &slots[i], key);
        }
        else {
            fill_slot(owner, &slots[i], random_nbytes(&seed) % NRM__SLAB_MAX + 1, key);
        }
        if (step % 500 == 0) {
            nrm__slabs_trim(&owner->slabs, 0, &trimmed);
            nrm__slabs_check(&owner->slabs);
        }
    }
    for (size_t i = 0; i < 40; i++) {
        if (slots[i].ptr != NULL) {
            empty_slot(owner, &slots[i], (unsigned char)(index * 40 + i));
        }
    }
}

TEST(threads_walk_side_by_side)
{
    struct owner *owner = create_owner();
    check_threads(4, walks, owner);
    nrm__slabs_check(&owner->slabs);
    nrm_resource_release(&owner->base);
}

struct race {
    struct owner *owner;
    _Atomic(void *) target;
    atomic_uint n_wins;
    pthread_barrier_t start, end;
};

#define N_RACES 2000

static void
frees_the_same(unsigned index, void *arg)
{
    struct race *race = arg;
    struct nrm__block block;
    for (int i = 0; i < N_RACES; i++) {
        if (index == 0) {
            atomic_store(&race->target, allocate(race->owner, NRM__SLAB_MAX, &block));
        }
        pthread_barrier_wait(&race->start);
        if (release(race->owner, atomic_load(&race->target))) {
            atomic_fetch_add(&race->n_wins, 1);
        }
        if (index == 1 && i % 7 == 0) { /* the chunk may leave while others look */
            size_t trimmed = 0;
            nrm__slabs_trim(&race->owner->slabs, 0, &trimmed);
        }
        pthread_barrier_wait(&race->end);
    }
}

TEST(of_threads_that_free_one_cell_exactly_one_wins)
{
    struct race race = {.owner = create_owner()};
    pthread_barrier_init(&race.start, NULL, 4);
    pthread_barrier_init(&race.end, NULL, 4);
    check_threads(4, frees_the_same, &race);
    CHECK_EQ(atomic_load(&race.n_wins), (unsigned)N_RACES);
    nrm__slabs_check(&race.owner->slabs);
    nrm_resource_release(&race.owner->base);
    pthread_barrier_destroy(&race.start);
    pthread_barrier_destroy(&race.end);
}

#define N_MAILBOXES 64
static _Atomic(void *) mailboxes[N_MAILBOXES];

/* Puts what it allocates where another thread takes it and frees it. */
static void
exchanges(unsigned index, void *arg)
{
    uint64_t seed = index + 99;
    for (int i = 0; i < 10000; i++) {
        struct nrm__block block;
        unsigned char *mine = allocate(arg, random_nbytes(&seed) % 512 + 1, &block);
        mine[0] = 0x77;
        unsigned char *other =
            atomic_exchange(&mailboxes[check_random(&seed) % N_MAILBOXES], mine);
        if (other != NULL) {
            CHECK_EQ(other[0], 0x77);
            CHECK(release(arg, other));
        }
    }
}

TEST(what_one_thread_made_another_frees)
{
    struct owner *owner = create_owner();
    check_threads(4, exchanges, owner);
    for (size_t i = 0; i < N_MAILBOXES; i++) {
        void *ptr = atomic_exchange(&mailboxes[i], NULL);
        CHECK(ptr == NULL || release(owner, ptr));
    }
    nrm__slabs_check(&owner->slabs);
    nrm_resource_release(&owner->base);
}

/* ---- threads side by side ---- */

struct spread {
    struct owner *owner;
    struct nrm__block block;
};

static void *
allocate_there(void *argument)
{
    struct spread *spread = argument;
    allocate(spread->owner, 1000, &spread->block);
    return NULL;
}

/* One thread after the other. */
static void
allocate_in_threads(struct spread *spread, int n)
{
    for (int i = 0; i < n; i++) {
        pthread_t thread;
        REQUIRE_EQ(pthread_create(&thread, NULL, allocate_there, &spread[i]), 0);
        pthread_join(thread, NULL);
    }
}

#define N_SPREAD 20

TEST(threads_have_their_cells_in_chunks_of_their_own_until_there_are_many)
{
    struct owner *owner = create_owner();
    struct spread spread[N_SPREAD];
    struct nrm__block mine, other;
    owner->slabs.spreads = true;
    for (int i = 0; i < N_SPREAD; i++) {
        spread[i].owner = owner;
    }
    allocate(owner, 1000, &mine);
    allocate_in_threads(spread, 4);
    CHECK_EQ(atomic_load(&owner->n_chunks), 5u);
    for (int i = 0; i < 4; i++) {
        CHECK(spread[i].block.record != mine.record);
    }
    allocate(owner, 1000, &other);
    CHECK_EQ(other.record, mine.record);
    allocate_in_threads(&spread[4], N_SPREAD - 4);
    CHECK_EQ(atomic_load(&owner->n_chunks), 16u);
    nrm__slabs_check(&owner->slabs);
    for (int i = 0; i < N_SPREAD; i++) {
        CHECK(release(owner, spread[i].block.ptr));
    }
    CHECK(release(owner, mine.ptr) && release(owner, other.ptr));
    nrm__slabs_check(&owner->slabs);
    nrm_resource_release(&owner->base);
}

TEST(a_chunk_of_another_thread_serves_when_there_are_no_more)
{
    struct owner *owner = create_owner();
    struct spread spread = {.owner = owner};
    struct nrm__block mine, full[64];
    owner->slabs.spreads = true;
    allocate(owner, 1000, &mine);
    atomic_store(&owner->refuses, true);
    allocate_in_threads(&spread, 1);
    CHECK_EQ(spread.block.record, mine.record);
    for (int i = 0; i < 62; i++) {
        allocate(owner, 1000, &full[i]);
    }
    CHECK_STATUS(nrm__slabs_allocate(&owner->slabs, 1000, &full[62]),
                 NRM_OUT_OF_MEMORY);
    for (int i = 0; i < 62; i++) {
        CHECK(release(owner, full[i].ptr));
    }
    CHECK(release(owner, mine.ptr) && release(owner, spread.block.ptr));
    nrm__slabs_check(&owner->slabs);
    nrm_resource_release(&owner->base);
}

/* ---- batches ---- */

TEST(a_batch_comes_back_as_it_was_put)
{
    struct owner *owner = create_owner();
    struct nrm__slabs *slabs = &owner->slabs;
    struct nrm__cell cells[NRM__SLAB_BATCH], again[NRM__SLAB_BATCH];
    struct nrm__block block = {0};
    size_t class = nrm__slab_class_index(100);
    slabs->spreads = true;
    allocate(owner, 100, &block);
    REQUIRE_EQ(nrm__slabs_take(slabs, class, cells, 8), 8u);
    CHECK(nrm__slabs_put_batch(slabs, class, cells, 8));
    nrm__slabs_check(slabs);
    CHECK_EQ(nrm__slabs_take_batch(slabs, class + 1, again), 0u);
    CHECK_EQ(nrm__slabs_take_batch(slabs, class, again), 8u);
    CHECK_EQ(memcmp(cells, again, 8 * sizeof *cells), 0);
    CHECK_EQ(nrm__slabs_take_batch(slabs, class, again), 0u);
    CHECK_EQ(found_nbytes(cells[0].ptr, cells[0].ptr), 0u);
    struct nrm__block live = {.owner = &owner->base};
    nrm_resource_retain(&owner->base); /* for the block */
    nrm__slabs_make_live(&cells[0], 90, &live);
    CHECK_EQ(found_nbytes(cells[0].ptr, cells[0].ptr), 90u);
    CHECK(release(owner, block.ptr));
    CHECK(release(owner, cells[0].ptr));
    nrm__slabs_put(slabs, &cells[1], 7);
    nrm__slabs_check(slabs);
    nrm_resource_release(&owner->base);
}

TEST(batches_are_bounded_and_break_up)
{
    struct owner *owner = create_owner();
    struct nrm__slabs *slabs = &owner->slabs;
    struct nrm__cell cells[NRM__SLAB_BATCH];
    struct nrm__block block;
    size_t class = nrm__slab_class_index(64), n_put = 0, nbytes = 0;
    slabs->spreads = true;
    allocate(owner, 64, &block);
    for (;;) {
        REQUIRE_EQ(nrm__slabs_take(slabs, class, cells, 32), 32u);
        if (!nrm__slabs_put_batch(slabs, class, cells, 32)) {
            break;
        }
        n_put++;
    }
    nrm__slabs_put(slabs, cells, 32);
    CHECK_EQ(n_put, 16u);
    CHECK(release(owner, block.ptr));
    nrm__slabs_trim(slabs, 0, &nbytes);
    CHECK_EQ(nbytes, 0u); /* its cells are on their way */
    nrm__slabs_break_batches(slabs);
    nrm__slabs_check(slabs);
    nrm__slabs_trim(slabs, 0, &nbytes);
    CHECK_EQ(nbytes, NRM__SLAB_CHUNK);
    nrm_resource_release(&owner->base);
}

TEST(an_owner_that_is_closed_keeps_no_batch)
{
    struct owner *owner = create_owner();
    struct nrm__slabs *slabs = &owner->slabs;
    struct nrm__cell cells[8];
    struct nrm__block block;
    size_t class = nrm__slab_class_index(64);
    allocate(owner, 64, &block);
    REQUIRE_EQ(nrm__slabs_take(slabs, class, cells, 8), 8u);
    CHECK(!nrm__slabs_put_batch(slabs, class, cells, 8)); /* as it does not spread */
    slabs->spreads = true;
    CHECK(!nrm__slabs_put_batch(slabs, class, cells, 0));
    atomic_store(&owner->base.is_closed, true);
    CHECK(!nrm__slabs_put_batch(slabs, class, cells, 8));
    nrm__slabs_put(slabs, cells, 8);
    CHECK(release(owner, block.ptr));
    nrm_resource_release(&owner->base);
}

/* ---- fork ---- */

static atomic_bool stop;
static struct owner *forked_owner;

static void *
never_rests(void *arg)
{
    uint64_t seed = 5;
    while (!atomic_load(&stop)) {
        struct nrm__block block;
        allocate(arg, random_nbytes(&seed) % 2048 + 1, &block);
        CHECK(release(arg, block.ptr));
    }
    return NULL;
}

static void
uses_the_slabs(void)
{
    struct nrm__block block;
    nrm__slabs_check(&forked_owner->slabs);
    for (size_t nbytes = 1; nbytes <= NRM__SLAB_MAX; nbytes += 13) {
        allocate(forked_owner, nbytes, &block);
        CHECK(release(forked_owner, block.ptr));
    }
}

TEST(a_child_uses_them_whatever_the_parents_threads_did)
{
    pthread_t thread;
    struct nrm__block kept;
    forked_owner = create_owner();
    allocate(forked_owner, 1000, &kept);
    atomic_store(&stop, false);
    REQUIRE_EQ(pthread_create(&thread, NULL, never_rests, forked_owner), 0);
    for (int i = 0; i < 30; i++) {
        CHECK_IN_CHILD(uses_the_slabs);
    }
    atomic_store(&stop, true);
    pthread_join(thread, NULL);
    CHECK(release(forked_owner, kept.ptr));
    nrm_resource_release(&forked_owner->base);
}

CHECK_MAIN
