/*
 * The blocks of a pool: bins, splitting and merging, parking, resizing in place, and the
 * check of all of it. Nothing here asks the upstream or the driver, and everything runs
 * under the pool's lock.
 */
#include "pools/pool_internal.h"

#include "base/assert.h"
#include "core/nodes.h"
#include "core/uses.h"

/* ---- bins ---- */

/* The class of the free blocks of this size: none of its blocks is smaller than the
   smallest size of the class. */
static unsigned
class_of(size_t nbytes)
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

void
nrm__pool_bin_insert_locked(struct nrm__pool *pool, struct nrm__pool_block *block)
{
    unsigned class = class_of(nrm__pool_size_of(block));
    block->state = NRM__POOL_FREE;
    /* At the front: what was used last is still in the cache. */
    nrm__list_insert_after(&pool->bins->heads[class], &block->link);
    pool->bins->bits[class / 64] |= UINT64_C(1) << (class % 64);
    pool->free_nbytes += nrm__pool_size_of(block);
}

void
nrm__pool_bin_remove_locked(struct nrm__pool *pool, struct nrm__pool_block *block)
{
    unsigned class = class_of(nrm__pool_size_of(block));
    nrm__list_remove(&block->link);
    if (nrm__list_is_empty(&pool->bins->heads[class])) {
        pool->bins->bits[class / 64] &= ~(UINT64_C(1) << (class % 64));
    }
    pool->free_nbytes -= nrm__pool_size_of(block);
}

/* The first class from `class` on that has a block; NRM__POOL_N_CLASSES: none. */
static unsigned
next_class_locked(const struct nrm__pool *pool, unsigned class)
{
    for (unsigned word = class / 64; word < NRM__POOL_N_CLASSES / 64; word++) {
        uint64_t bits = pool->bins->bits[word];
        if (word == class / 64) {
            bits &= ~UINT64_C(0) << (class % 64);
        }
        if (bits != 0) {
            return word * 64 + (unsigned)__builtin_ctzll(bits);
        }
    }
    return NRM__POOL_N_CLASSES;
}

/* ---- splitting and merging ---- */

/* Whether an aligned piece of `nbytes` lies in the block, and where it starts. */
static bool
fits(const struct nrm__pool_block *block, size_t nbytes, size_t alignment,
     uintptr_t *out_start)
{
    uintptr_t start = nrm__align_up(block->node.start, alignment);
    if (start < block->node.start) {
        return false;
    }
    size_t skipped = start - block->node.start;
    if (skipped > nrm__pool_size_of(block) ||
        nrm__pool_size_of(block) - skipped < nbytes) {
        return false;
    }
    *out_start = start;
    return true;
}

/* Cuts a block, which is in no bin, in two; returns the second part, in no bin either.
   NULL: no memory for its description. */
static struct nrm__pool_block *
split_locked(struct nrm__pool *pool, struct nrm__pool_block *block, size_t first_nbytes)
{
    struct nrm__pool_block *rest = nrm__node_allocate(sizeof *rest);
    if (rest == NULL) {
        return NULL;
    }
    rest->node.start = block->node.start + first_nbytes;
    rest->node.nbytes = nrm__pool_size_of(block) - first_nbytes;
    block->node.nbytes = first_nbytes;
    rest->segment = block->segment;
    rest->is_zero = block->is_zero;
    rest->state = block->state;
    nrm__list_init(&rest->link);
    rest->previous = block;
    rest->next = block->next;
    if (rest->next != NULL) {
        rest->next->previous = rest;
    }
    block->next = rest;
    nrm__tree_insert(&pool->tree, &rest->node);
    return rest;
}

/* Appends the right neighbour, which is in no bin, to the block. */
static void
absorb_next_locked(struct nrm__pool *pool, struct nrm__pool_block *block)
{
    struct nrm__pool_block *next = block->next;
    nrm__tree_remove(&pool->tree, &next->node);
    block->node.nbytes += next->node.nbytes;
    block->next = next->next;
    if (block->next != NULL) {
        block->next->previous = block;
    }
    nrm__node_deallocate(next, sizeof *next);
}

/* Makes a block, which is in no bin, free, merged with its free neighbours. */
void
nrm__pool_free_locked(struct nrm__pool *pool, struct nrm__pool_block *block,
                      bool is_zero)
{
    struct nrm__pool_block *previous = block->previous;
    block->is_zero = is_zero;
    if (block->next != NULL && block->next->state == NRM__POOL_FREE) {
        nrm__pool_bin_remove_locked(pool, block->next);
        block->is_zero = block->is_zero && block->next->is_zero;
        absorb_next_locked(pool, block);
    }
    if (previous != NULL && previous->state == NRM__POOL_FREE) {
        nrm__pool_bin_remove_locked(pool, previous);
        previous->is_zero = previous->is_zero && block->is_zero;
        absorb_next_locked(pool, previous);
        block = previous;
    }
    nrm__pool_bin_insert_locked(pool, block);
}

/* Cuts the piece at `start` out of a free block: the rest stays free. */
static struct nrm__pool_block *
carve_locked(struct nrm__pool *pool, struct nrm__pool_block *block, uintptr_t start,
             size_t nbytes)
{
    nrm__pool_bin_remove_locked(pool, block);
    if (start > block->node.start) {
        struct nrm__pool_block *piece =
            split_locked(pool, block, start - block->node.start);
        nrm__pool_bin_insert_locked(pool, block);
        if (piece == NULL) {
            return NULL;
        }
        block = piece;
    }
    size_t least_rest = nbytes > pool->segment_nbytes ? NRM__MAP_PAGE : pool->granule;
    if (nrm__pool_size_of(block) - nbytes >= least_rest) {
        struct nrm__pool_block *rest = split_locked(pool, block, nbytes);
        if (rest != NULL) {
            nrm__pool_bin_insert_locked(pool, rest);
        }
    }
    block->state = NRM__POOL_LIVE;
    pool->live_nbytes += nrm__pool_size_of(block);
    return block;
}

/* A free block of at least `nbytes`, or NULL. */
struct nrm__pool_block *
nrm__pool_take_locked(struct nrm__pool *pool, size_t nbytes, size_t alignment)
{
    size_t sure = nbytes + (alignment - pool->granule);
    unsigned first = class_of(nbytes);
    unsigned class = class_of(sure);
    uintptr_t start;
    if (smallest_of_class(class) < sure) {
        class++;
    }
    class = next_class_locked(pool, class);
    if (class < NRM__POOL_N_CLASSES) {
        struct nrm__link *link = pool->bins->heads[class].next;
        struct nrm__pool_block *block =
            NRM__CONTAINER(link, struct nrm__pool_block, link);
        bool fit = fits(block, nbytes, alignment, &start);
        NRM_ASSERT(fit);
        return carve_locked(pool, block, start, nbytes);
    }
    for (class = next_class_locked(pool, first); class < NRM__POOL_N_CLASSES;
         class = next_class_locked(pool, class + 1)) {
        for (struct nrm__link *link = pool->bins->heads[class].next;
             link != &pool->bins->heads[class]; link = link->next) {
            struct nrm__pool_block *block =
                NRM__CONTAINER(link, struct nrm__pool_block, link);
            if (fits(block, nbytes, alignment, &start)) {
                return carve_locked(pool, block, start, nbytes);
            }
        }
    }
    return NULL;
}

/* ---- parking ---- */

void
nrm__pool_park_locked(struct nrm__pool *pool, struct nrm__pool_block *block)
{
    block->state = NRM__POOL_PARKED;
    block->stamp = nrm__epoch_stamp();
    block->is_zero = false;
    if (pool->newest_stamp <= nrm__epoch_newest_recorded()) {
        pool->unclosed_nbytes = 0;
    }
    if (block->stamp > pool->newest_stamp) {
        pool->newest_stamp = block->stamp;
    }
    pool->unclosed_nbytes += nrm__pool_size_of(block);
    pool->parked_nbytes += nrm__pool_size_of(block);
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
        pool->parked_nbytes -= nrm__pool_size_of(block);
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
    struct nrm__pool_block *tail = split_locked(pool, block, nbytes);
    if (tail == NULL) {
        return;
    }
    pool->live_nbytes -= nrm__pool_size_of(tail);
    if (pool->tracked) {
        nrm__pool_park_locked(pool, tail);
    }
    else {
        nrm__pool_free_locked(pool, tail, false);
    }
}

/* Takes what is missing from the free right neighbour, a little more if it can. */
bool
nrm__pool_extend_locked(struct nrm__pool *pool, struct nrm__pool_block *block,
                        size_t nbytes, size_t wanted)
{
    struct nrm__pool_block *next = block->next;
    if (next == NULL || next->state != NRM__POOL_FREE ||
        nrm__pool_size_of(block) + nrm__pool_size_of(next) < nbytes) {
        return false;
    }
    size_t before = nrm__pool_size_of(block);
    nrm__pool_bin_remove_locked(pool, next);
    size_t take = nrm__min(nrm__max(wanted, nbytes) - before, nrm__pool_size_of(next));
    if (nrm__pool_size_of(next) > take) {
        struct nrm__pool_block *rest = split_locked(pool, next, take);
        if (rest != NULL) {
            nrm__pool_bin_insert_locked(pool, rest);
        }
    }
    absorb_next_locked(pool, block);
    pool->live_nbytes += nrm__pool_size_of(block) - before;
    return true;
}

/* ---- the check ---- */

static void
check_segment_locked(struct nrm__pool *pool, const struct nrm__segment *segment,
                     size_t *sums, size_t *n_blocks)
{
    uintptr_t at = segment->start;
    struct nrm__pool_block *previous = NULL;
    struct nrm__pool_block *block = nrm__pool_block_of(nrm__tree_find(&pool->tree, at));
    for (; block != NULL; previous = block, block = block->next) {
        NRM_ASSERT(block->node.start == at);
        NRM_ASSERT(nrm__pool_size_of(block) != 0 &&
                   nrm__pool_size_of(block) % pool->granule == 0);
        NRM_ASSERT(block->segment == segment);
        NRM_ASSERT(block->previous == previous);
        NRM_ASSERT(nrm__pool_block_of(nrm__tree_find(&pool->tree, at)) == block);
        bool merged = block->state != NRM__POOL_FREE || previous == NULL ||
                      previous->state != NRM__POOL_FREE;
        NRM_ASSERT(merged);
        NRM_ASSERT(block->state == NRM__POOL_FREE || block->state == NRM__POOL_PARKED ||
                   block->nbytes <= nrm__pool_size_of(block));
        sums[block->state] += nrm__pool_size_of(block);
        *n_blocks += 1;
        at += nrm__pool_size_of(block);
    }
    NRM_ASSERT(at == segment->start + segment->nbytes);
}

static void
check_bins_locked(struct nrm__pool *pool)
{
    size_t nbytes = 0;
    for (unsigned class = 0; class < NRM__POOL_N_CLASSES; class++) {
        bool bit = (pool->bins->bits[class / 64] >> (class % 64)) & 1;
        NRM_ASSERT(bit == !nrm__list_is_empty(&pool->bins->heads[class]));
        for (struct nrm__link *link = pool->bins->heads[class].next;
             link != &pool->bins->heads[class]; link = link->next) {
            struct nrm__pool_block *block =
                NRM__CONTAINER(link, struct nrm__pool_block, link);
            NRM_ASSERT(block->state == NRM__POOL_FREE &&
                       class_of(nrm__pool_size_of(block)) == class);
            nbytes += nrm__pool_size_of(block);
        }
    }
    NRM_ASSERT(nbytes == pool->free_nbytes);
}

void
nrm__pool_check_locked(struct nrm__pool *pool)
{
    size_t sums[4] = {0}, n_blocks = 0, reserved = 0;
    for (struct nrm__link *link = pool->segments.next; link != &pool->segments;
         link = link->next) {
        struct nrm__segment *segment = NRM__CONTAINER(link, struct nrm__segment, link);
        check_segment_locked(pool, segment, sums, &n_blocks);
        reserved += segment->nbytes;
    }
    NRM_ASSERT(n_blocks == pool->tree.n_nodes);
    NRM_ASSERT(reserved == pool->reserved_nbytes);
    NRM_ASSERT(reserved <= pool->maximum_nbytes);
    NRM_ASSERT(sums[NRM__POOL_FREE] == pool->free_nbytes);
    NRM_ASSERT(sums[NRM__POOL_LIVE] + sums[NRM__POOL_CLAIMED] == pool->live_nbytes);
    NRM_ASSERT(sums[NRM__POOL_PARKED] == pool->parked_nbytes);
    check_bins_locked(pool);
}
