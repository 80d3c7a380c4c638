/*
 * Look-ups of a pool: what block an address lies in, and the claim of one by a change
 * of its key, before it is given back or resized.
 */
#include "core/slab.h"
#include "pools/pool_ops.h"
#include "pools/upstream.h"

/* A segment that fills no whole pages may have left since it was found. */
static bool
has_segment_locked(const struct nrm__pool *pool, const struct nrm__segment *segment)
{
    const struct nrm__link *link = pool->segments.next;
    while (link != &pool->segments && link != &segment->link) {
        link = link->next;
    }
    return link != &pool->segments;
}

static bool
find_interior_locked(const struct nrm__segment *segment, uintptr_t address,
                     struct nrm__block *out)
{
    const struct nrm__pool_block *block = nrm__pool_floor_locked(segment, address);
    uintptr_t key = atomic_load_explicit(&block->live.key, memory_order_acquire);
    uintptr_t start = key & ~NRM__STATE_MASK;
    if ((key & NRM__STATE_MASK) != NRM__LIVE || address < start) {
        return false;
    }
    nrm__pool_fill(block, start, out);
    return true;
}

bool
nrm__pool_find_block(nrm_resource *mr, struct nrm__segment *segment, const void *ptr,
                     struct nrm__block *out)
{
    struct nrm__pool *pool = nrm__pool_from(mr);
    uintptr_t address = (uintptr_t)ptr;
    if (nrm__segment_is_slab(segment)) {
        return nrm__slabs_find(segment, ptr, out);
    }
    struct nrm__pool_block *block = nrm__pool_block_at(segment, ptr);
    bool may_start = (address & NRM__STATE_MASK) == 0;
    if (may_start && block != NULL &&
        atomic_load_explicit(&block->live.key, memory_order_acquire) ==
            (address | NRM__LIVE)) {
        nrm__pool_fill(block, address, out);
        return true;
    }
    nrm__lock_acquire(&pool->lock);
    bool found = find_interior_locked(segment, address, out);
    nrm__lock_release(&pool->lock);
    return found;
}

static bool
claim_in(const struct nrm__segment *segment, struct nrm__block *block)
{
    struct nrm__pool_block *own = nrm__pool_block_at(segment, block->ptr);
    uintptr_t live = (uintptr_t)block->ptr | NRM__LIVE;
    if (own == NULL ||
        !atomic_compare_exchange_strong_explicit(
            &own->live.key, &live, (uintptr_t)block->ptr | NRM__POOL_CLAIMED,
            memory_order_acq_rel, memory_order_relaxed)) {
        return false;
    }
    /* It may have been resized since it was found. */
    nrm__pool_fill(own, (uintptr_t)block->ptr, block);
    return true;
}

bool
nrm__pool_claim_block(nrm_resource *mr, struct nrm__block *block)
{
    struct nrm__pool *pool = nrm__pool_from(mr);
    if (block->flags & NRM__BLOCK_IN_SLAB) {
        return nrm__slabs_claim(block);
    }
    if (block->segment->entry == NULL) {
        return claim_in(block->segment, block);
    }
    nrm__lock_acquire(&pool->lock);
    bool claimed = has_segment_locked(pool, block->segment) &&
                   claim_in(block->segment, block);
    nrm__lock_release(&pool->lock);
    return claimed;
}

void
nrm__pool_unclaim_block(nrm_resource *mr, const struct nrm__block *block)
{
    if (block->flags & NRM__BLOCK_IN_SLAB) {
        nrm__slabs_unclaim(block);
        return;
    }
    struct nrm__pool_block *own = nrm__pool_block_at(block->segment, block->ptr);
    NRM_ASSERT(own != NULL && nrm__pool_state_of(own) == NRM__POOL_CLAIMED);
    nrm__pool_set_taken(own, (uintptr_t)block->ptr, block->nbytes, NRM__POOL_LIVE);
}

nrm_status
nrm__pool_renew_block(nrm_resource *mr, struct nrm__block *block)
{
    (void)mr;
    return nrm__segment_is_current(block->segment) ? NRM_OK
                                                   : nrm__segment_renew(block->segment);
}
