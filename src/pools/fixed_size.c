/*
 * FixedSizeMemoryResource: blocks of one size, cut out of chunks of its upstream.
 *
 * What is known of a block stands in a cell of an array beside its chunk, never in the
 * block: that may be device memory. The free blocks of a chunk form a stack, so that
 * the one given back last, which is still in the cache, goes out first; the chunks that
 * have free blocks stand in a list, the last one used first. Blocks that were never
 * handed out are in no stack but behind a mark, so a new chunk costs no walk over its
 * cells, and they still read as zero when the upstream's memory did.
 *
 * Memory that a GPU may touch is parked when it is given back, with the stamp of its
 * epoch (core/uses.h), and goes onto its stack when that epoch is done. Device memory
 * goes back in the order of streams instead, which is what a pool is for: there this is
 * a pool whose blocks have one size (pools/pool.c), and nothing below here has a part
 * in it.
 *
 * One lock guards all of it and is held for a few steps, whatever the number of blocks:
 * an allocation pops, a deallocation pushes. Only a claim goes through a tree, of the
 * chunks. The lock is never held while the upstream, the driver or the epochs are
 * asked.
 */

#include "base/assert.h"
#include "base/bits.h"
#include "base/error.h"
#include "core/known_uses.h"
#include "core/nodes.h"
#include "core/uses.h"
#include "nrm/options.h"
#include "nrm/pools.h"
#include "base/given.h"
#include "os/memory.h"
#include "pools/fixed_size_internal.h"
#include "pools/pool.h"
#include "pools/upstream.h"

#define WAIT_MIN_NBYTES NRM__MIB /* requests of fewer bytes never wait for the GPU */

static const struct nrm__ops fixed_size_ops;

static struct nrm__fixed_size *
fixed_from(nrm_resource *mr)
{
    NRM_ASSERT(mr->ops == &fixed_size_ops);
    return (struct nrm__fixed_size *)mr;
}

static void
fill(const struct nrm__fixed_size *fixed, const struct nrm__fixed_cell *cell,
     struct nrm__block *out)
{
    out->ptr = (void *)nrm__fixed_start_of(fixed, cell);
    out->nbytes = cell->as.nbytes;
    out->capacity = fixed->shape.block_nbytes;
    out->segment = cell->chunk->segment;
    out->record = NULL;
}

/* ---- chunks ---- */

static size_t
cells_nbytes(size_t n_blocks)
{
    return nrm__align_up(n_blocks * sizeof(struct nrm__fixed_cell), nrm__page_size());
}

static nrm_status
describe_chunk(struct nrm__fixed_size *fixed, struct nrm__segment *segment,
               struct nrm__fixed_chunk **out)
{
    struct nrm__fixed_chunk *chunk = nrm__node_allocate(sizeof *chunk);
    void *cells;
    if (chunk == NULL) {
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe a chunk");
    }
    chunk->n_blocks = chunk->n_free = segment->nbytes / fixed->shape.block_nbytes;
    if (nrm__map(cells_nbytes(chunk->n_blocks), nrm__page_size(), &cells) != 0) {
        nrm__node_deallocate(chunk, sizeof *chunk);
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe %zu blocks",
                          segment->nbytes / fixed->shape.block_nbytes);
    }
    chunk->cells = cells;
    chunk->node.start = segment->start;
    chunk->node.nbytes = chunk->n_blocks * fixed->shape.block_nbytes;
    chunk->segment = segment;
    chunk->is_zero = (segment->upstream.flags & NRM__BLOCK_IS_ZERO) != 0;
    nrm__list_init(&chunk->link);
    *out = chunk;
    return NRM_OK;
}

static void
forget_chunk(struct nrm__fixed_chunk *chunk)
{
    nrm__unmap(chunk->cells, cells_nbytes(chunk->n_blocks));
    nrm__node_deallocate(chunk, sizeof *chunk);
}

/* Takes a chunk of `nbytes` of the upstream. */
static nrm_status
take_chunk(struct nrm__fixed_size *fixed, size_t nbytes)
{
    struct nrm__segment *segment;
    struct nrm__fixed_chunk *chunk = NULL;
    NRM_TRY(nrm__segment_take(&fixed->base, nbytes, fixed->shape.chunk_alignment,
                              &segment));
    nrm_status status = describe_chunk(fixed, segment, &chunk);
    if (status != NRM_OK) {
        goto fail_chunk;
    }
    segment->extra = chunk;
    status = nrm__block_map_add_segment(segment);
    if (status != NRM_OK) {
        goto fail_map;
    }
    nrm__lock_acquire(&fixed->lock);
    nrm__tree_insert(&fixed->chunks, &chunk->node);
    nrm__list_append(&fixed->usable, &chunk->link);
    fixed->n_blocks += chunk->n_blocks;
    fixed->n_free += chunk->n_blocks;
    fixed->reserved_nbytes += segment->nbytes;
    nrm__lock_release(&fixed->lock);
    return NRM_OK;

fail_map:
    forget_chunk(chunk);
fail_chunk:
    nrm__segment_return(segment, false);
    return status;
}

/* Where the upstream has no room for whole pages, exactly what is wanted. */
static nrm_status
grow(struct nrm__fixed_size *fixed)
{
    size_t exact = fixed->shape.chunk_nbytes;
    size_t rounded = nrm__fixed_chunk_rounded(&fixed->shape);
    nrm_status status = take_chunk(fixed, rounded);
    if (status == NRM_OUT_OF_MEMORY && exact < rounded) {
        status = take_chunk(fixed, exact);
    }
    return status;
}

/* Takes a chunk out whose blocks are all free, the one that served last at last; NULL:
   there is none, or less than `keep_nbytes` would stay free. */
static struct nrm__fixed_chunk *
detach_locked(struct nrm__fixed_size *fixed, size_t keep_nbytes)
{
    for (struct nrm__link *link = fixed->usable.previous; link != &fixed->usable;
         link = link->previous) {
        struct nrm__fixed_chunk *chunk =
            NRM__CONTAINER(link, struct nrm__fixed_chunk, link);
        size_t n_left = fixed->n_free - chunk->n_free;
        if (chunk->n_free == chunk->n_blocks &&
            n_left * fixed->shape.block_nbytes >= keep_nbytes) {
            nrm__list_remove(&chunk->link);
            nrm__tree_remove(&fixed->chunks, &chunk->node);
            fixed->n_blocks -= chunk->n_blocks;
            fixed->n_free = n_left;
            fixed->reserved_nbytes -= chunk->segment->nbytes;
            return chunk;
        }
    }
    return NULL;
}

/* Of a chunk that is out of the pool. */
static size_t
give_chunk_back(struct nrm__fixed_chunk *chunk, bool later)
{
    struct nrm__segment *segment = chunk->segment;
    size_t nbytes = segment->nbytes;
    nrm__block_map_remove_segment(segment); /* waits for those who read the cells */
    forget_chunk(chunk);
    nrm__segment_return(segment, later);
    return nbytes;
}

/* ---- allocation ---- */

/* False: none is free. `out_stale`: the block when its chunk must be renewed first. */
static bool
try_take(struct nrm__fixed_size *fixed, const struct nrm__request *request,
         struct nrm__block *out, struct nrm__fixed_cell **out_stale,
         size_t *out_unclosed, size_t *out_parked)
{
    bool is_zero = false;
    nrm__lock_acquire(&fixed->lock);
    if (fixed->tracked) {
        nrm__fixed_reclaim_locked(fixed);
    }
    struct nrm__fixed_cell *cell = nrm__fixed_take_locked(fixed, &is_zero);
    if (cell != NULL) {
        cell->as.nbytes = request->nbytes;
        fill(fixed, cell, out);
        out->flags |= is_zero ? NRM__BLOCK_IS_ZERO : 0;
        bool is_current = nrm__segment_is_current(out->segment);
        cell->state = is_current ? NRM__FIXED_LIVE : NRM__FIXED_CLAIMED;
        *out_stale = is_current ? NULL : cell;
    }
    *out_unclosed = nrm__fixed_unclosed_locked(fixed);
    *out_parked = fixed->n_parked;
    nrm__lock_release(&fixed->lock);
    return cell != NULL;
}

static bool
close_epoch(struct nrm__fixed_size *fixed)
{
    bool closed = nrm__epoch_close();
    if (closed) {
        nrm__lock_acquire(&fixed->lock);
        fixed->n_epochs++;
        nrm__lock_release(&fixed->lock);
    }
    return closed;
}

static bool
wait_for_epoch(struct nrm__fixed_size *fixed, uint64_t limit_ns)
{
    nrm__lock_acquire(&fixed->lock);
    fixed->n_waits++;
    nrm__lock_release(&fixed->lock);
    return nrm__epoch_wait(limit_ns, limit_ns == UINT64_MAX);
}

/* A block: a free one, a parked one that is done, one of a new chunk, or a parked one
   after a wait: in this order, each tried once more after it made progress. */
static nrm_status
find_memory(struct nrm__fixed_size *fixed, const struct nrm__request *request,
            struct nrm__block *out, struct nrm__fixed_cell **out_stale)
{
    size_t unclosed, parked;
    bool may_wait = request->nbytes >= WAIT_MIN_NBYTES;
    for (;;) {
        if (try_take(fixed, request, out, out_stale, &unclosed, &parked)) {
            return NRM_OK;
        }
        if (parked != 0 && nrm__epoch_poll()) {
            continue;
        }
        if (unclosed != 0 && close_epoch(fixed)) {
            continue;
        }
        if (may_wait && parked * fixed->shape.block_nbytes > fixed->parked_limit &&
            wait_for_epoch(fixed, fixed->wait_limit_ns)) {
            continue;
        }
        if (nrm__retired_return_used(0, false)) {
            continue;
        }
        nrm_status status = grow(fixed);
        if (status == NRM_OK) {
            continue;
        }
        uint64_t wait_ns = fixed->waits_when_full ? UINT64_MAX
                           : may_wait             ? fixed->wait_limit_ns
                                                  : 0;
        if (status != NRM_OUT_OF_MEMORY || parked == 0 || wait_ns == 0 ||
            !wait_for_epoch(fixed, wait_ns)) {
            return status;
        }
    }
}

/* Keeps the epochs short, as in the pool: about epoch_nbytes of freed memory rotate and
   stay in the cache. */
static void
close_full_epoch(struct nrm__fixed_size *fixed)
{
    nrm__lock_acquire(&fixed->lock);
    size_t unclosed = nrm__fixed_unclosed_locked(fixed);
    nrm__lock_release(&fixed->lock);
    if (unclosed * fixed->shape.block_nbytes >= fixed->epoch_nbytes) {
        (void)close_epoch(fixed);
    }
}

/* A block of a chunk that was made before a context was reset. It is not live before
   the upstream has made the chunk usable again, so nobody can give it back
   meanwhile. */
static nrm_status
renew(struct nrm__fixed_size *fixed, struct nrm__fixed_cell *cell)
{
    nrm_status status = nrm__segment_renew(cell->chunk->segment);
    nrm__lock_acquire(&fixed->lock);
    if (status == NRM_OK) {
        cell->state = NRM__FIXED_LIVE;
    }
    else {
        nrm__fixed_free_locked(fixed, cell);
    }
    nrm__lock_release(&fixed->lock);
    return status;
}

static nrm_status
fixed_size_allocate(nrm_resource *mr, const struct nrm__request *request,
                    struct nrm__block *out)
{
    struct nrm__fixed_size *fixed = fixed_from(mr);
    struct nrm__fixed_cell *stale;
    NRM_TRY(nrm__fixed_check(&fixed->shape, request));
    if (fixed->tracked) {
        close_full_epoch(fixed);
    }
    NRM_TRY(nrm__pool_begin(mr));
    NRM_TRY(find_memory(fixed, request, out, &stale));
    return stale != NULL ? renew(fixed, stale) : NRM_OK;
}

/* ---- deallocation and look-ups ---- */

static void
fixed_size_deallocate(nrm_resource *mr, const struct nrm__block *block,
                      nrm_stream *stream)
{
    struct nrm__fixed_size *fixed = fixed_from(mr);
    /* A claimed block keeps its chunk. */
    struct nrm__fixed_chunk *chunk = block->segment->extra;
    struct nrm__fixed_cell *cell =
        &chunk->cells[nrm__fixed_index_of(fixed, chunk, block->ptr)];
    nrm__lock_acquire(&fixed->lock);
    NRM_ASSERT(cell->state == NRM__FIXED_CLAIMED);
    if (fixed->tracked) {
        nrm__fixed_park_locked(fixed, cell);
    }
    else {
        nrm__fixed_free_locked(fixed, cell);
    }
    nrm__lock_release(&fixed->lock);
}

/* The segment is being looked up in, so its chunk is there, if perhaps out of the pool
   by now: then no block of it lives. */
static bool
fixed_size_find_block(nrm_resource *mr, struct nrm__segment *segment, const void *ptr,
                      struct nrm__block *out)
{
    struct nrm__fixed_size *fixed = fixed_from(mr);
    nrm__lock_acquire(&fixed->lock);
    struct nrm__fixed_cell *cell =
        nrm__fixed_find_in_chunk_locked(fixed, segment->extra, ptr);
    bool found = cell != NULL && cell->state == NRM__FIXED_LIVE;
    if (found) {
        fill(fixed, cell, out);
    }
    nrm__lock_release(&fixed->lock);
    return found;
}

/* By the address: the segment that the block was found in may be gone by now, when the
   block was given back twice at once. */
static bool
fixed_size_claim_block(nrm_resource *mr, struct nrm__block *block)
{
    struct nrm__fixed_size *fixed = fixed_from(mr);
    nrm__lock_acquire(&fixed->lock);
    struct nrm__fixed_cell *cell = nrm__fixed_find_locked(fixed, block->ptr);
    bool claimed = cell != NULL && cell->state == NRM__FIXED_LIVE &&
                   nrm__fixed_start_of(fixed, cell) == (uintptr_t)block->ptr;
    if (claimed) {
        cell->state = NRM__FIXED_CLAIMED;
        block->segment = cell->chunk->segment;
    }
    nrm__lock_release(&fixed->lock);
    return claimed;
}

static void
fixed_size_unclaim_block(nrm_resource *mr, const struct nrm__block *block)
{
    struct nrm__fixed_size *fixed = fixed_from(mr);
    nrm__lock_acquire(&fixed->lock);
    struct nrm__fixed_cell *cell = nrm__fixed_find_locked(fixed, block->ptr);
    NRM_ASSERT(cell != NULL && cell->state == NRM__FIXED_CLAIMED);
    cell->state = NRM__FIXED_LIVE;
    cell->as.nbytes = block->nbytes;
    nrm__lock_release(&fixed->lock);
}

/* Every size up to the block's is one; a larger one the dispatcher asks for, in
   vain. */
static nrm_status
fixed_size_reallocate(nrm_resource *mr, struct nrm__block *block,
                      const struct nrm__request *request)
{
    return request->nbytes <= block->capacity ? NRM_OK : NRM_NOT_SUPPORTED;
}

/* Of a pool over this one, whose segment the block is. */
static nrm_status
fixed_size_renew_block(nrm_resource *mr, struct nrm__block *block)
{
    return nrm__segment_renew(block->segment);
}

/* ---- trim, statistics, check ---- */

static nrm_status
fixed_size_trim(nrm_resource *mr, size_t keep_nbytes, size_t *out_nbytes)
{
    struct nrm__fixed_size *fixed = fixed_from(mr);
    size_t unclosed, parked;
    while (nrm__retired_nbytes(mr) != 0 &&
           nrm__retired_return_used(fixed->wait_limit_ns, false)) {
        /* what known uses kept */
    }
    for (;;) {
        nrm__lock_acquire(&fixed->lock);
        nrm__fixed_reclaim_locked(fixed);
        unclosed = nrm__fixed_unclosed_locked(fixed);
        parked = fixed->n_parked;
        nrm__lock_release(&fixed->lock);
        if (unclosed != 0 && close_epoch(fixed)) {
            continue;
        }
        if (parked == 0 || !wait_for_epoch(fixed, fixed->wait_limit_ns)) {
            break;
        }
    }
    for (;;) {
        nrm__lock_acquire(&fixed->lock);
        struct nrm__fixed_chunk *chunk = detach_locked(fixed, keep_nbytes);
        nrm__lock_release(&fixed->lock);
        if (chunk == NULL) {
            return NRM_OK;
        }
        *out_nbytes += give_chunk_back(chunk, false);
    }
}

static void
fixed_size_statistics(nrm_resource *mr, nrm_statistics *out)
{
    struct nrm__fixed_size *fixed = fixed_from(mr);
    nrm__lock_acquire(&fixed->lock);
    out->reserved_bytes += (int64_t)fixed->reserved_nbytes;
    out->parked_bytes += (int64_t)(fixed->n_parked * fixed->shape.block_nbytes +
                                   nrm__retired_nbytes(mr));
    out->epochs += fixed->n_epochs;
    out->waits += fixed->n_waits;
    nrm__lock_release(&fixed->lock);
}

static void
fixed_size_check(nrm_resource *mr)
{
    struct nrm__fixed_size *fixed = fixed_from(mr);
    nrm__lock_acquire(&fixed->lock);
    nrm__fixed_check_locked(fixed);
    nrm__lock_release(&fixed->lock);
}

/* ---- life ---- */

/* No block is live. Chunks go upstream, where a source retires what the GPU may still
   touch: the parked blocks in them were freed before this moment. */
static void
fixed_size_finish(nrm_resource *mr)
{
    struct nrm__fixed_size *fixed = fixed_from(mr);
    struct nrm__fixed_chunk *chunk;
    while ((chunk = nrm__fixed_chunk_of(fixed->chunks.root)) != NULL) {
        nrm__tree_remove(&fixed->chunks, &chunk->node);
        (void)give_chunk_back(chunk, true);
    }
    nrm__lock_finish(&fixed->lock);
}

static const struct nrm__ops fixed_size_ops = {
    .class_name = "FixedSizeMemoryResource",
    .flags = NRM__OPS_OWN_SIZES,
    .allocate = fixed_size_allocate,
    .deallocate = fixed_size_deallocate,
    .reallocate = fixed_size_reallocate,
    .find_block = fixed_size_find_block,
    .claim_block = fixed_size_claim_block,
    .unclaim_block = fixed_size_unclaim_block,
    .renew_block = fixed_size_renew_block,
    .trim = fixed_size_trim,
    .statistics = fixed_size_statistics,
    .check = fixed_size_check,
    .lock_offset = offsetof(struct nrm__fixed_size, lock),
    .fork_prepare = nrm__fixed_fork_prepare,
    .finish = fixed_size_finish,
};

/* ---- construction ---- */

static void
set_policy(struct nrm__fixed_size *fixed, nrm_reuse reuse)
{
    nrm_kind kind = fixed->base.kind;
    fixed->tracked = nrm__reuse_set(&fixed->base, reuse) == NRM_REUSE_CONTEXT &&
                     (kind == NRM_KIND_PINNED || kind == NRM_KIND_MANAGED);
    fixed->epoch_nbytes = (size_t)nrm_option_get(NRM_OPT_EPOCH_NBYTES);
    fixed->parked_limit = (size_t)nrm_option_get(NRM_OPT_PARKED_LIMIT);
    fixed->wait_limit_ns = (uint64_t)nrm_option_get(NRM_OPT_WAIT_LIMIT);
    fixed->waits_when_full = nrm_option_get(NRM_OPT_ON_EXHAUSTED) == 3;
}

/* The first chunk; an upstream that cannot align it shows it here. */
static nrm_status
preallocate(struct nrm__fixed_size *fixed)
{
    nrm_status status = grow(fixed);
    if (status == NRM_NOT_SUPPORTED &&
        nrm__fixed_shape_relax(&fixed->shape, fixed->base.upstream)) {
        status = grow(fixed);
    }
    return status;
}

static nrm_status
create(nrm_resource *upstream, const struct nrm__fixed_shape *shape, nrm_reuse reuse,
       nrm_resource **out)
{
    nrm_resource *mr;
    NRM_TRY(nrm__resource_create(&fixed_size_ops, upstream->kind, upstream,
                                 sizeof(struct nrm__fixed_size), &mr));
    struct nrm__fixed_size *fixed = fixed_from(mr);
    fixed->shape = *shape;
    if (nrm__is_power_of_two(shape->block_nbytes)) {
        fixed->block_shift = (unsigned)__builtin_ctzll(shape->block_nbytes);
    }
    set_policy(fixed, reuse);
    nrm__lock_init(&fixed->lock, NRM__RANK_POOL);
    nrm__list_init(&fixed->usable);
    nrm__list_init(&fixed->full);
    nrm__resource_publish(mr);
    nrm_status status = preallocate(fixed);
    if (status != NRM_OK) {
        nrm_resource_release(mr);
        return status;
    }
    *out = mr;
    return NRM_OK;
}

nrm_status
nrm_fixed_size_create(nrm_resource *upstream, const nrm_fixed_size_options *options,
                      nrm_resource **out)
{
    nrm_fixed_size_options given = {0};
    struct nrm__fixed_shape shape;
    NRM__COPY_GIVEN(given, options);
    NRM_TRY(nrm__fixed_shape_init(&shape, upstream, &given));
    return upstream->kind == NRM_KIND_DEVICE
               ? nrm__pool_create_fixed(upstream, &shape, given.reuse, out)
               : create(upstream, &shape, given.reuse, out);
}
