/*
 * The segments of a pool: taken of the upstream when nothing that is free fits, and given
 * back when they are free as a whole. The pool's lock is not held here while the upstream
 * works; what a growth will take is booked against the limit before.
 */
#include "pools/pool_internal.h"

#include "base/assert.h"
#include "base/error.h"
#include "core/nodes.h"
#include "core/uses.h"
#include "cuda/context.h"
#include "nrm/options.h"

#define FIRST_SEGMENT_NBYTES (8 * NRM__MIB)

/* ---- segments ---- */

static struct nrm__pool_block *
block_for_segment(struct nrm__segment *segment, bool is_zero)
{
    struct nrm__pool_block *block = nrm__node_allocate(sizeof *block);
    if (block == NULL) {
        return NULL;
    }
    block->node.start = segment->start;
    block->node.nbytes = segment->nbytes;
    block->segment = segment;
    block->is_zero = is_zero;
    nrm__list_init(&block->link);
    return block;
}

/* Takes a segment of `nbytes` of the upstream and makes it one free block. */
static nrm_status
take_segment(struct nrm__pool *pool, size_t nbytes, size_t alignment)
{
    struct nrm__request request = {.nbytes = nbytes, .alignment = alignment};
    nrm_resource *upstream = pool->base.upstream;
    struct nrm__block block;
    struct nrm__segment *segment = NULL;
    struct nrm__pool_block *whole = NULL;
    NRM_TRY(nrm__allocate(upstream, &request, &block));
    size_t usable = nrm__align_down(nbytes, pool->granule);
    nrm_status status = nrm__segment_create(&pool->base, block.ptr, usable, &segment);
    if (status != NRM_OK) {
        goto fail_segment;
    }
    segment->upstream = block;
    segment->generation = nrm__cuda_generations();
    whole = block_for_segment(segment, (block.flags & NRM__BLOCK_IS_ZERO) != 0);
    if (whole == NULL) {
        status = nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe a block");
        goto fail_block;
    }
    status = nrm__block_map_add_segment(segment);
    if (status != NRM_OK) {
        goto fail_map;
    }
    nrm__lock_acquire(&pool->lock);
    nrm__list_append(&pool->segments, &segment->link);
    nrm__tree_insert(&pool->tree, &whole->node);
    nrm__pool_bin_insert_locked(pool, whole);
    pool->reserved_nbytes += usable;
    nrm__lock_release(&pool->lock);
    return NRM_OK;

fail_map:
    nrm__node_deallocate(whole, sizeof *whole);
fail_block:
    nrm__segment_destroy(segment);
fail_segment:
    nrm__give_back(upstream, &block, false);
    return status;
}

/* The block of a segment that is free as a whole, or NULL. */
static struct nrm__pool_block *
whole_locked(struct nrm__pool *pool, struct nrm__segment *segment)
{
    struct nrm__pool_block *block =
        nrm__pool_block_of(nrm__tree_find(&pool->tree, segment->start));
    return block->state == NRM__POOL_FREE && nrm__pool_size_of(block) == segment->nbytes
               ? block
               : NULL;
}

/* Takes a segment that is free as a whole out of the pool. */
static void
detach_locked(struct nrm__pool *pool, struct nrm__segment *segment,
              struct nrm__pool_block *block)
{
    nrm__pool_bin_remove_locked(pool, block);
    nrm__tree_remove(&pool->tree, &block->node);
    nrm__node_deallocate(block, sizeof *block);
    nrm__list_remove(&segment->link);
    pool->reserved_nbytes -= segment->nbytes;
}

/* Takes one segment that is free as a whole, and of more than `min_nbytes`, out of the
   pool; NULL: there is none, or less than `keep_nbytes` would stay free. */
static struct nrm__segment *
detach_segment_locked(struct nrm__pool *pool, size_t min_nbytes, size_t keep_nbytes)
{
    for (struct nrm__link *link = pool->segments.previous; link != &pool->segments;
         link = link->previous) {
        struct nrm__segment *segment = NRM__CONTAINER(link, struct nrm__segment, link);
        struct nrm__pool_block *block = whole_locked(pool, segment);
        if (block == NULL || segment->nbytes <= min_nbytes ||
            pool->free_nbytes - segment->nbytes < keep_nbytes) {
            continue;
        }
        detach_locked(pool, segment, block);
        return segment;
    }
    return NULL;
}

size_t
nrm__pool_drop_segment(struct nrm__pool *pool, struct nrm__segment *segment, bool later)
{
    size_t nbytes = segment->nbytes;
    nrm__block_map_remove_segment(segment);
    nrm__give_back(pool->base.upstream, &segment->upstream, later);
    nrm__segment_destroy(segment);
    return nbytes;
}

/* Gives segments that are free as a whole, and of more than `min_nbytes`, back to the
   upstream while more than `keep_nbytes` stay free. */
size_t
nrm__pool_give_segments_back(struct nrm__pool *pool, size_t min_nbytes,
                             size_t keep_nbytes)
{
    size_t nbytes = 0;
    for (;;) {
        nrm__lock_acquire(&pool->lock);
        struct nrm__segment *segment =
            detach_segment_locked(pool, min_nbytes, keep_nbytes);
        nrm__lock_release(&pool->lock);
        if (segment == NULL) {
            return nbytes;
        }
        nbytes += nrm__pool_drop_segment(pool, segment, false);
    }
}

void
nrm__pool_give_idle_back(struct nrm__pool *pool)
{
    struct nrm__segment *segment;
    do {
        nrm__lock_acquire(&pool->lock);
        segment = pool->free_nbytes > pool->idle_nbytes
                      ? detach_segment_locked(pool, pool->segment_nbytes, 0)
                      : NULL;
        nrm__lock_release(&pool->lock);
        if (segment != NULL) {
            (void)nrm__pool_drop_segment(pool, segment, pool->tracked);
        }
    } while (segment != NULL);
    /* Of a tracked pool an allocation asks, and may call the driver. Plain memory is unmapped
       where an array dies, as NumPy's default does it. */
    if (pool->tracked) {
        (void)nrm__retired_drain(0);
    }
}

/* ---- growth ---- */

/* What an upstream is asked to align segments to: whole huge pages where it maps memory
   itself, and the page of the block map where it can. */
static size_t
segment_alignment(const struct nrm__pool *pool)
{
    const nrm_resource *upstream = pool->base.upstream;
    bool maps = upstream->kind == NRM_KIND_HOST || upstream->kind == NRM_KIND_PINNED;
    if (!maps || (upstream->ops->flags & NRM__OPS_OVERLAY)) {
        return pool->granule;
    }
    return NRM__HUGE_PAGE;
}

/* Books `nbytes` against the limit, before the upstream is asked. */
static bool
book_growth(struct nrm__pool *pool, size_t nbytes)
{
    nrm__lock_acquire(&pool->lock);
    size_t taken = pool->reserved_nbytes + pool->growing_nbytes;
    bool fits_limit = taken <= pool->maximum_nbytes &&
                      nbytes <= pool->maximum_nbytes - taken;
    if (fits_limit) {
        pool->growing_nbytes += nbytes;
    }
    nrm__lock_release(&pool->lock);
    return fits_limit;
}

static void
unbook_growth(struct nrm__pool *pool, size_t nbytes)
{
    nrm__lock_acquire(&pool->lock);
    pool->growing_nbytes -= nbytes;
    nrm__lock_release(&pool->lock);
}

static nrm_status
full(struct nrm__pool *pool, size_t nbytes)
{
    char asked[32], limit[32], reserved[32], live[32], parked[32];
    nrm__lock_acquire(&pool->lock);
    nrm_format_nbytes(pool->maximum_nbytes, limit, sizeof limit);
    nrm_format_nbytes(pool->reserved_nbytes, reserved, sizeof reserved);
    nrm_format_nbytes(pool->live_nbytes, live, sizeof live);
    nrm_format_nbytes(pool->parked_nbytes, parked, sizeof parked);
    nrm__lock_release(&pool->lock);
    nrm_format_nbytes(nbytes, asked, sizeof asked);
    return nrm__error(
        NRM_OUT_OF_MEMORY,
        "the pool is full: %s asked, limit %s, %s reserved, %s in use, %s "
        "freed but not done on the GPU",
        asked, limit, reserved, live, parked);
}

/* Bytes of the next segment for a request of `nbytes`: twice what there is, within
   bounds, and whole huge pages. */
static size_t
next_segment_nbytes(struct nrm__pool *pool, size_t nbytes)
{
    nrm__lock_acquire(&pool->lock);
    size_t ahead = nrm__max(pool->reserved_nbytes, FIRST_SEGMENT_NBYTES);
    nrm__lock_release(&pool->lock);
    ahead = nrm__min(ahead, pool->segment_nbytes);
    /* A segment for one large block has room for nothing else, so that it is free again as
       a whole when the block is. */
    return nbytes > ahead ? nrm__align_up(nbytes, NRM__MAP_PAGE)
                          : nrm__align_up(ahead, NRM__HUGE_PAGE);
}

nrm_status
nrm__pool_grow_by(struct nrm__pool *pool, size_t nbytes, size_t asked)
{
    if (!book_growth(pool, nbytes)) {
        return full(pool, asked);
    }
    nrm_status status = take_segment(pool, nbytes, segment_alignment(pool));
    unbook_growth(pool, nbytes);
    return status;
}

/* Grows so that a block of `nbytes` fits. Segments that were made for one large block and
   are free now go back first: what they held does not fit, and would only pile up. */
nrm_status
nrm__pool_grow(struct nrm__pool *pool, size_t nbytes, size_t alignment)
{
    size_t needed = nbytes;
    size_t have = segment_alignment(pool);
    if (alignment > have) {
        needed += alignment - pool->granule;
    }
    size_t rounded = next_segment_nbytes(pool, needed);
    nrm__pool_give_segments_back(pool, pool->segment_nbytes, 0);
    nrm_status status = nrm__pool_grow_by(pool, rounded, nbytes);
    size_t exact = nrm__align_up(needed, pool->granule);
    if (status == NRM_OUT_OF_MEMORY && exact < rounded) {
        status = nrm__pool_grow_by(pool, exact, nbytes);
    }
    if (status == NRM_OUT_OF_MEMORY && nrm__pool_give_segments_back(pool, 0, 0) != 0) {
        /* The memory that other sizes had kept may be enough. */
        (void)nrm__retired_drain(0);
        status = nrm__pool_grow_by(pool, exact, nbytes);
    }
    return status;
}
