/*
 * How a pool takes blocks back: from whoever frees them, and from the thread that has
 * kept or parked them. What a GPU may still use is parked with the stamp of its epoch.
 */
#include "pools/pool_internal.h"

#include "base/assert.h"
#include "base/bits.h"
#include "core/uses.h"

#define SPARE_FRACTION 8 /* of the free memory a thread gets for later at once */

/* Whether it was a part of a large segment. The stamp is that of its epoch; 0: nobody
   uses it. */
static bool
free_claimed_locked(struct nrm__pool *pool, struct nrm__pool_block *block,
                    uint64_t stamp, bool is_zero)
{
    bool is_large = block->live.segment->nbytes > pool->segment_nbytes;
    NRM_ASSERT(nrm__pool_state_of(block) == NRM__POOL_CLAIMED);
    pool->live_nbytes -= block->size;
    if (stamp != 0) {
        nrm__pool_park_locked(pool, block, stamp);
    }
    else {
        nrm__pool_free_locked(pool, block, is_zero);
    }
    return is_large;
}

/* Lets go of the lock, and looks after what may be too much now. */
static void
end_freeing(struct nrm__pool *pool, bool is_large)
{
    bool is_idle = is_large && pool->free_nbytes > pool->idle_nbytes;
    bool decays = nrm__pool_begins_decay_locked(pool);
    nrm__lock_release(&pool->lock);
    if (decays) {
        nrm__background_watch(&pool->watched);
    }
    if (is_idle) {
        nrm__pool_give_idle_back(pool);
    }
}

/* Takes claimed blocks back that nobody uses, under one hold of the lock. */
static void
free_unused(struct nrm__pool *pool, const struct nrm__cell *cells, size_t n)
{
    bool is_large = false;
    nrm__lock_acquire(&pool->lock);
    for (size_t i = 0; i < n; i++) {
        is_large |=
            free_claimed_locked(pool, nrm__pool_block_of(cells[i].record), 0, false);
    }
    end_freeing(pool, is_large);
}

void
nrm__pool_free_parked(struct nrm__pool *pool, const struct nrm__parked *parked,
                      size_t n)
{
    bool is_large = false;
    if (n == 0) {
        return;
    }
    nrm__lock_acquire(&pool->lock);
    for (size_t i = 0; i < n; i++) {
        is_large |= free_claimed_locked(pool, nrm__pool_block_of(parked[i].cell.record),
                                        parked[i].stamp, false);
    }
    end_freeing(pool, is_large);
}

bool
nrm__pool_take_parked(struct nrm__pool *pool)
{
    struct nrm__parked parked[NRM__CACHE_PARKED];
    size_t n = nrm__cache_give_up_parked(&pool->base, parked);
    nrm__pool_free_parked(pool, parked, n);
    if (n != 0) {
        nrm__resource_unhold(&pool->base, n); /* the caller holds it too */
    }
    return n != 0;
}

/* Takes a claimed block back. */
void
nrm__pool_free_block(struct nrm__pool *pool, struct nrm__pool_block *block)
{
    NRM_ASSERT(nrm__pool_state_of(block) == NRM__POOL_CLAIMED);
    bool is_zero = false;
    if (atomic_load_explicit(&block->live.goes_long, memory_order_relaxed)) {
        is_zero = pool->is_plain && nrm__pool_learn_zero(pool, block);
        atomic_store_explicit(&block->live.goes_long, false, memory_order_relaxed);
    }
    nrm__lock_acquire(&pool->lock);
    uint64_t stamp = pool->tracked ? nrm__epoch_stamp() : 0;
    end_freeing(pool, free_claimed_locked(pool, block, stamp, is_zero));
}

size_t
nrm__pool_free_kept(struct nrm__pool *pool, struct nrm__cache_set *set)
{
    size_t n = set->n;
    if (n != 0 && pool->order != NULL) {
        nrm__pool_stamp_kept(pool, set);
    }
    if (n != 0) { /* none of them goes the long way: threads keep no such blocks */
        free_unused(pool, set->cells, n);
    }
    set->n = 0;
    return n;
}

bool
nrm__pool_take_from_thread(struct nrm__pool *pool)
{
    struct nrm__cache_set set;
    size_t n = 0;
    while (nrm__cache_give_up_set(&pool->base, &set)) {
        n += nrm__pool_free_kept(pool, &set);
    }
    if (n != 0) {
        nrm__resource_unhold(&pool->base, n); /* who allocates holds it too */
    }
    return n != 0;
}

size_t
nrm__pool_take_more(struct nrm__pool *pool, size_t nbytes, struct nrm__cell *out,
                    size_t n)
{
    struct nrm__pool_bins *bins = &pool->bins[nrm__pool_node_here(pool)];
    size_t n_taken = 0;
    nrm__lock_acquire(&pool->lock);
    n = nrm__min(n, pool->free_nbytes / SPARE_FRACTION / nbytes);
    while (n_taken < n) {
        struct nrm__pool_block *block =
            nrm__pool_take_from_locked(pool, bins, nbytes, pool->alignment);
        if (block == NULL) {
            break;
        }
        out[n_taken++] = (struct nrm__cell){(void *)block->start, &block->live};
    }
    nrm__lock_release(&pool->lock);
    return n_taken;
}

void
nrm__pool_put_more(struct nrm__pool *pool, const struct nrm__cell *cells, size_t n)
{
    free_unused(pool, cells, n);
}
