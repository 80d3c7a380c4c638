/*
 * The blocks of a pool: bins, splitting and merging, parking, and resizing in place.
 * Nothing here asks the upstream or the driver, and everything runs under the pool's
 * lock.
 */
#include <stddef.h>
#include <string.h>

#include "core/nodes.h"
#include "core/uses.h"
#include "pools/pool_internal.h"
#include "pools/pool_vmm.h"

/* ---- bins ---- */

/* The class of the free blocks of this size: none of its blocks is smaller than the
   smallest size of the class. */
unsigned
nrm__pool_class_of(size_t nbytes)
{
    unsigned log = 63u - (unsigned)__builtin_clzll(nbytes);
    unsigned sub = log >= NRM__POOL_SUBCLASS_BITS
                       ? (unsigned)(nbytes >> (log - NRM__POOL_SUBCLASS_BITS)) &
                             (NRM__POOL_N_SUBCLASSES - 1)
                       : 0;
    return log * NRM__POOL_N_SUBCLASSES + sub;
}

static size_t
smallest_of_class(unsigned class)
{
    unsigned log = class / NRM__POOL_N_SUBCLASSES, sub = class % NRM__POOL_N_SUBCLASSES;
    size_t base = (size_t)1 << log;
    return log >= NRM__POOL_SUBCLASS_BITS
               ? base + ((size_t)sub << (log - NRM__POOL_SUBCLASS_BITS))
               : base;
}

/* A free block is where its segment's node looks first, whoever freed it. */
static struct nrm__pool_bins *
bins_of(const struct nrm__pool *pool, const struct nrm__pool_block *block)
{
    return &pool->bins[block->live.segment->node];
}

void
nrm__pool_bin_insert_locked(struct nrm__pool *pool, struct nrm__pool_block *block)
{
    unsigned class = nrm__pool_class_of(block->size);
    struct nrm__pool_bins *bins = pool->order != NULL
                                      ? nrm__pool_enter_list_locked(pool, block)
                                      : bins_of(pool, block);
    nrm__pool_set_state(block, NRM__POOL_FREE);
    /* At the front: what was used last is still in the cache. */
    nrm__list_insert_after(&bins->heads[class], &block->link);
    bins->bits[class / 64] |= UINT64_C(1) << (class % 64);
    bins->words |= UINT64_C(1) << (class / 64);
    pool->free_nbytes += block->size;
    pool->n_whole += nrm__pool_is_whole(block);
    pool->n_used += nrm__pool_is_used(block);
    block->seen_ns = 0;
}

void
nrm__pool_bin_remove_locked(struct nrm__pool *pool, struct nrm__pool_block *block)
{
    unsigned class = nrm__pool_class_of(block->size);
    struct nrm__pool_bins *bins = pool->order != NULL
                                      ? nrm__pool_leave_list_locked(pool, block)
                                      : bins_of(pool, block);
    nrm__list_remove(&block->link);
    if (nrm__list_is_empty(&bins->heads[class])) {
        bins->bits[class / 64] &= ~(UINT64_C(1) << (class % 64));
        if (bins->bits[class / 64] == 0) {
            bins->words &= ~(UINT64_C(1) << (class / 64));
        }
    }
    pool->free_nbytes -= block->size;
    pool->n_whole -= nrm__pool_is_whole(block);
    pool->n_used -= nrm__pool_is_used(block);
}

/* The first class from `class` on that has a block; NRM__POOL_N_CLASSES: none. */
unsigned
nrm__pool_next_class_locked(const struct nrm__pool_bins *bins, unsigned class)
{
    unsigned word = class / 64;
    if (word >= NRM__POOL_N_WORDS) {
        return NRM__POOL_N_CLASSES;
    }
    uint64_t bits = bins->bits[word] & ~UINT64_C(0) << (class % 64);
    if (bits == 0) {
        uint64_t words = word + 1 < 64 ? bins->words & ~UINT64_C(0) << (word + 1) : 0;
        if (words == 0) {
            return NRM__POOL_N_CLASSES;
        }
        word = (unsigned)__builtin_ctzll(words);
        bits = bins->bits[word];
    }
    return word * 64 + (unsigned)__builtin_ctzll(bits);
}

/* ---- descriptions ---- */

/* A look-up that took no lock may read the key of a description that describes nothing:
   so that, and what it reads next, change by atomic stores. It finds no live block. */
static void
clear(struct nrm__pool_block *block)
{
    atomic_store_explicit(&block->live.key, 0, memory_order_relaxed);
    atomic_store_explicit(&block->live.nbytes, 0, memory_order_relaxed);
    atomic_store_explicit(&block->live.capacity, 0, memory_order_relaxed);
    atomic_store_explicit(&block->live.goes_long, false, memory_order_relaxed);
    block->live.segment = NULL;
    memset(&block->start, 0, sizeof *block - offsetof(struct nrm__pool_block, start));
}

struct nrm__pool_block *
nrm__pool_create_block_locked(struct nrm__pool *pool)
{
    struct nrm__pool_block *block = pool->spare;
    if (block != NULL) {
        pool->spare = block->next;
        clear(block);
        if (pool->order != NULL) {
            *nrm__pool_ordered(block) = (struct nrm__pool_ordered_block){0};
        }
    }
    else {
        block = nrm__node_allocate(pool->block_nbytes);
    }
    if (block != NULL) {
        nrm__list_init(&block->link);
        pool->n_blocks++;
    }
    return block;
}

/* A look-up that took no lock may still read it: it describes blocks for ever. */
void
nrm__pool_destroy_block_locked(struct nrm__pool *pool, struct nrm__pool_block *block)
{
    atomic_store_explicit(&block->live.key, NRM__POOL_FREE, memory_order_relaxed);
    block->next = pool->spare;
    pool->spare = block;
    pool->n_blocks--;
}

static uint64_t *
bits_of(const struct nrm__starts *starts)
{
    return (uint64_t *)(void *)&starts->blocks[starts->n];
}

static size_t
granule_index(const struct nrm__segment *segment, uintptr_t address)
{
    const struct nrm__starts *starts = segment->extra;
    return (address - segment->start) >> starts->shift;
}

void
nrm__pool_set_start_locked(struct nrm__pool_block *block)
{
    struct nrm__starts *starts = block->live.segment->extra;
    size_t i = granule_index(block->live.segment, block->start);
    bits_of(starts)[i / 64] |= UINT64_C(1) << (i % 64);
    atomic_store_explicit(&starts->blocks[i], &block->live, memory_order_release);
}

void
nrm__pool_clear_start_locked(const struct nrm__pool_block *block)
{
    struct nrm__starts *starts = block->live.segment->extra;
    size_t i = granule_index(block->live.segment, block->start);
    bits_of(starts)[i / 64] &= ~(UINT64_C(1) << (i % 64));
    atomic_store_explicit(&starts->blocks[i], NULL, memory_order_relaxed);
}

/* The last block that starts in a granule of the segment, up to one; NULL: none
   does. */
static struct nrm__live *
last_start_locked(const struct nrm__segment *segment, size_t i)
{
    struct nrm__starts *starts = segment->extra;
    size_t word = i / 64;
    uint64_t bits = bits_of(starts)[word] & ~UINT64_C(0) >> (63 - i % 64);
    while (bits == 0) {
        if (word == 0) {
            return NULL;
        }
        bits = bits_of(starts)[--word];
    }
    i = word * 64 + 63 - (size_t)__builtin_clzll(bits);
    return atomic_load_explicit(&starts->blocks[i], memory_order_relaxed);
}

struct nrm__pool_block *
nrm__pool_floor_locked(const struct nrm__segment *segment, uintptr_t address)
{
    struct nrm__live *live =
        last_start_locked(segment, granule_index(segment, address));
    while (live == NULL) { /* a block starts with the first segment */
        segment = nrm__pool_left_locked(segment);
        live =
            last_start_locked(segment, ((struct nrm__starts *)segment->extra)->n - 1);
    }
    return nrm__pool_block_of(live);
}

/* ---- splitting and merging ---- */

/* Whether an aligned piece of `nbytes` lies in the block, and where it starts. */
static bool
fits(const struct nrm__pool_block *block, size_t nbytes, size_t alignment,
     uintptr_t *out_start)
{
    uintptr_t start = nrm__align_up(block->start, alignment);
    if (start < block->start) {
        return false;
    }
    size_t skipped = start - block->start;
    size_t granule = nrm__pool_granule_of(block->live.segment);
    if ((skipped & (granule - 1)) != 0) {
        return false;
    }
    if (skipped > block->size || block->size - skipped < nbytes) {
        return false;
    }
    *out_start = start;
    return true;
}

struct nrm__pool_block *
nrm__pool_split_locked(struct nrm__pool *pool, struct nrm__pool_block *block,
                       size_t first_nbytes)
{
    struct nrm__pool_block *rest = nrm__pool_create_block_locked(pool);
    if (rest == NULL) {
        return NULL;
    }
    rest->start = block->start + first_nbytes;
    rest->size = block->size - first_nbytes;
    block->size = first_nbytes;
    rest->live.segment = nrm__pool_segment_of_locked(block->live.segment, rest->start);
    rest->is_zero = block->is_zero;
    if (pool->order != NULL) {
        nrm__pool_ordered(rest)->tag = nrm__pool_ordered(block)->tag;
        nrm__pool_ordered(rest)->origin = nrm__pool_ordered(block)->origin;
    }
    nrm__pool_set_state(rest, nrm__pool_state_of(block));
    rest->previous = block;
    rest->next = block->next;
    if (rest->next != NULL) {
        rest->next->previous = rest;
    }
    block->next = rest;
    nrm__pool_set_start_locked(rest);
    return rest;
}

/* Appends the right neighbour, which is in no bin, to the block. */
static void
absorb_next_locked(struct nrm__pool *pool, struct nrm__pool_block *block)
{
    struct nrm__pool_block *next = block->next;
    nrm__pool_clear_start_locked(next);
    block->size += next->size;
    block->next = next->next;
    if (block->next != NULL) {
        block->next->previous = block;
    }
    nrm__pool_destroy_block_locked(pool, next);
}

/* A block, which is in no bin, and its right neighbour, which is in none any more. */
static void
merge_locked(struct nrm__pool *pool, struct nrm__pool_block *block)
{
    block->is_zero = block->is_zero && block->next->is_zero;
    if (pool->order != NULL) {
        nrm__pool_join_tags_locked(block, block->next);
    }
    absorb_next_locked(pool, block);
}

/* Makes a block, which is in no bin, free, merged with its free neighbours. */
struct nrm__pool_block *
nrm__pool_free_locked(struct nrm__pool *pool, struct nrm__pool_block *block,
                      bool is_zero)
{
    struct nrm__pool_block *previous = block->previous;
    block->is_zero = is_zero;
    if (nrm__pool_merges_locked(pool, block, block->next)) {
        nrm__pool_bin_remove_locked(pool, block->next);
        merge_locked(pool, block);
    }
    if (nrm__pool_merges_locked(pool, block, previous)) {
        nrm__pool_bin_remove_locked(pool, previous);
        merge_locked(pool, previous);
        block = previous;
    }
    nrm__pool_bin_insert_locked(pool, block);
    return block;
}

void
nrm__pool_postpone_locked(struct nrm__pool *pool, struct nrm__pool_block *block)
{
    nrm__list_remove(&block->link);
    nrm__list_append(&bins_of(pool, block)->heads[nrm__pool_class_of(block->size)],
                     &block->link);
}

/* Cuts the piece at `start` out of a free block, claimed; the rest stays free. */
static struct nrm__pool_block *
carve_locked(struct nrm__pool *pool, struct nrm__pool_block *block, uintptr_t start,
             size_t nbytes)
{
    nrm__pool_bin_remove_locked(pool, block);
    if (start > block->start) {
        struct nrm__pool_block *piece =
            nrm__pool_split_locked(pool, block, start - block->start);
        nrm__pool_bin_insert_locked(pool, block);
        if (piece == NULL) {
            return NULL;
        }
        block = piece;
    }
    nbytes = nrm__align_up(nbytes, nrm__pool_granule_of(block->live.segment));
    size_t least_rest = nbytes > pool->segment_nbytes ? NRM__MAP_PAGE : 1;
    if (block->size - nbytes >= least_rest) {
        struct nrm__pool_block *rest = nrm__pool_split_locked(pool, block, nbytes);
        if (rest != NULL) {
            nrm__pool_bin_insert_locked(pool, rest);
        }
    }
    nrm__pool_set_state(block, NRM__POOL_CLAIMED);
    pool->live_nbytes += block->size;
    if (atomic_load_explicit(&pool->ahead.is_wanted, memory_order_relaxed)) {
        nrm__pool_look_ahead_locked(pool, block->size);
    }
    return block;
}

static struct nrm__pool_block *
first_of_class_locked(const struct nrm__pool_bins *bins, unsigned class)
{
    const struct nrm__link *head = &bins->heads[class];
    return head->next != head ? NRM__CONTAINER(head->next, struct nrm__pool_block, link)
                              : NULL;
}

/* Each block that fits and is wanted, of the class of the size or a larger one, in
   turn. */
struct nrm__pool_block *
nrm__pool_take_wanted_locked(struct nrm__pool *pool, struct nrm__pool_bins *bins,
                             size_t nbytes, size_t alignment, size_t limit,
                             bool (*is_wanted)(struct nrm__pool_block *block,
                                               const void *context),
                             const void *context)
{
    uintptr_t start;
    for (unsigned class = nrm__pool_next_class_locked(bins, nrm__pool_class_of(nbytes));
         class < NRM__POOL_N_CLASSES;
         class = nrm__pool_next_class_locked(bins, class + 1)) {
        for (struct nrm__link *link = bins->heads[class].next;
             link != &bins->heads[class]; link = link->next) {
            struct nrm__pool_block *block =
                NRM__CONTAINER(link, struct nrm__pool_block, link);
            if (limit-- == 0) {
                return NULL;
            }
            if (fits(block, nbytes, alignment, &start) &&
                (is_wanted == NULL || is_wanted(block, context))) {
                return carve_locked(pool, block, start, nbytes);
            }
        }
    }
    return NULL;
}

/* A block of at least `nbytes`, claimed, or NULL: the newest of the size's own class,
   which is warm, else one of the smallest class that surely has room, else any. */
struct nrm__pool_block *
nrm__pool_take_from_locked(struct nrm__pool *pool, struct nrm__pool_bins *bins,
                           size_t nbytes, size_t alignment)
{
    uintptr_t start;
    struct nrm__pool_block *block =
        first_of_class_locked(bins, nrm__pool_class_of(nbytes));
    if (block != NULL && fits(block, nbytes, alignment, &start)) {
        return carve_locked(pool, block, start, nbytes);
    }
    size_t sure = nbytes + (alignment - pool->alignment);
    unsigned class = nrm__pool_class_of(sure);
    class = nrm__pool_next_class_locked(
        bins, smallest_of_class(class) < sure ? class + 1 : class);
    if (class < NRM__POOL_N_CLASSES) {
        block = first_of_class_locked(bins, class);
        if (fits(block, nbytes, alignment, &start)) {
            return carve_locked(pool, block, start, nbytes);
        }
    }
    return nrm__pool_take_wanted_locked(pool, bins, nbytes, alignment, SIZE_MAX, NULL,
                                        NULL);
}

struct nrm__pool_block *
nrm__pool_take_locked(struct nrm__pool *pool, size_t nbytes, size_t alignment)
{
    return nrm__pool_take_from_locked(pool, pool->bins, nbytes, alignment);
}

/* ---- parking ---- */

void
nrm__pool_park_locked(struct nrm__pool *pool, struct nrm__pool_block *block,
                      uint64_t stamp)
{
    uint64_t recorded = nrm__epoch_newest_recorded();
    nrm__pool_set_state(block, NRM__POOL_PARKED);
    block->stamp = stamp;
    block->is_zero = false;
    if (pool->newest_stamp <= recorded) {
        pool->unclosed_nbytes = 0;
    }
    if (stamp > pool->newest_stamp) {
        pool->newest_stamp = stamp;
    }
    if (stamp > recorded) {
        pool->unclosed_nbytes += block->size;
    }
    pool->parked_nbytes += block->size;
    nrm__list_append(&pool->parked, &block->link);
}

/* Frees the parked blocks whose epoch is done. A thread that was slow between its stamp
   and the list may stand behind a newer one: it is only freed a little later. */
void
nrm__pool_reclaim_locked(struct nrm__pool *pool)
{
    while (!nrm__list_is_empty(&pool->parked)) {
        struct nrm__pool_block *block =
            NRM__CONTAINER(pool->parked.next, struct nrm__pool_block, link);
        if (!nrm__epoch_is_done(block->stamp)) {
            break;
        }
        nrm__list_remove(&block->link);
        pool->parked_nbytes -= block->size;
        nrm__pool_free_locked(pool, block, false);
    }
}

/* Parked bytes that no recorded epoch covers. */
size_t
nrm__pool_unclosed_locked(const struct nrm__pool *pool)
{
    return pool->newest_stamp > nrm__epoch_newest_recorded() ? pool->unclosed_nbytes
                                                             : 0;
}

/* ---- resizing in place ---- */

/* Cuts the tail off a claimed block and gives it back like any block. */
void
nrm__pool_cut_tail_locked(struct nrm__pool *pool, struct nrm__pool_block *block,
                          size_t nbytes)
{
    struct nrm__pool_block *tail = nrm__pool_split_locked(pool, block, nbytes);
    if (tail == NULL) {
        return;
    }
    pool->live_nbytes -= tail->size;
    if (pool->tracked) {
        nrm__pool_park_locked(pool, tail, nrm__epoch_stamp());
    }
    else {
        nrm__pool_free_locked(pool, tail, false);
    }
}

/* Takes what is missing from the free right neighbour, a little more if it can; not in
   a child that was made without it. */
bool
nrm__pool_extend_locked(struct nrm__pool *pool, struct nrm__pool_block *block,
                        size_t nbytes, size_t wanted)
{
    struct nrm__pool_block *next = block->next;
    if (next == NULL || nrm__pool_state_of(next) != NRM__POOL_FREE ||
        pool->lacks_idle || block->size + next->size < nbytes) {
        return false;
    }
    size_t before = block->size;
    nrm__pool_bin_remove_locked(pool, next);
    size_t take = nrm__min(nrm__max(wanted, nbytes) - before, next->size);
    if (next->size > take) {
        struct nrm__pool_block *rest = nrm__pool_split_locked(pool, next, take);
        if (rest != NULL) {
            nrm__pool_bin_insert_locked(pool, rest);
        }
    }
    absorb_next_locked(pool, block);
    pool->live_nbytes += block->size - before;
    return true;
}
