/*
 * A pool over a fork. Its locks are held meanwhile, so that it is whole on both sides.
 *
 * What lies free or parked in registered segments is left out of the child
 * (core/left_out.h), and so is what threads keep and have parked themselves: nobody
 * needs it there, as a child hands out no page-locked memory. Neighbours go as one
 * range, whoever has them. In the child such blocks are still described, and can be
 * neither read nor written: so no block grows into them.
 */
#include "core/left_out.h"

#include "base/assert.h"
#include "pools/pool_ops.h"

/* The stamp of a claimed block that a thread has, until the walk has passed it. Nobody
   else reads the stamp of a block that is not parked. */
#define WITH_A_THREAD UINT64_MAX

static void
mark_kept(nrm_resource *pool, const struct nrm__cell *cell)
{
    struct nrm__pool_block *block = nrm__pool_block_of(cell->record);
    (void)pool;
    NRM_DEBUG_ASSERT(nrm__pool_state_of(block) == NRM__POOL_CLAIMED);
    if (nrm__block_is_registered(&block->live.segment->upstream)) {
        block->stamp = WITH_A_THREAD;
    }
}

static bool
is_idle_unmarked(struct nrm__pool_block *block)
{
    uintptr_t state = nrm__pool_state_of(block);
    bool is_kept = state == NRM__POOL_CLAIMED && block->stamp == WITH_A_THREAD;
    if (is_kept) {
        block->stamp = 0;
    }
    return state == NRM__POOL_FREE || state == NRM__POOL_PARKED || is_kept;
}

/* What lies between the blocks that are in use. */
static void
offer_segment_locked(const struct nrm__segment *segment)
{
    uintptr_t idle = segment->start;
    struct nrm__pool_block *block = nrm__pool_floor_locked(segment, idle);
    for (; block != NULL; block = block->next) {
        if (!is_idle_unmarked(block)) {
            nrm__left_out_offer(idle, block->start - idle);
            idle = block->start + block->size;
        }
    }
    nrm__left_out_offer(idle, segment->start + segment->nbytes - idle);
}

static void
leave_out_locked(struct nrm__pool *pool)
{
    if (pool->base.kind != NRM_KIND_PINNED ||
        nrm__left_out_scope() != NRM__LEFT_OUT_IDLE) {
        return; /* or all of every segment is left out */
    }
    nrm__cache_fork_each_kept(&pool->base, mark_kept);
    for (struct nrm__link *link = pool->segments.next; link != &pool->segments;
         link = link->next) {
        const struct nrm__segment *segment =
            NRM__CONTAINER(link, struct nrm__segment, link);
        if (nrm__block_is_registered(&segment->upstream)) {
            offer_segment_locked(segment);
        }
    }
}

void
nrm__pool_fork_prepare(nrm_resource *mr)
{
    struct nrm__pool *pool = nrm__pool_from(mr);
    if (pool->has_slabs) {
        nrm__slabs_fork_prepare(&pool->slabs);
    }
    nrm__lock_fork_prepare(&pool->lock);
    leave_out_locked(pool);
}

void
nrm__pool_fork_parent(nrm_resource *mr)
{
    struct nrm__pool *pool = nrm__pool_from(mr);
    nrm__lock_fork_parent(&pool->lock);
    if (pool->has_slabs) {
        nrm__slabs_fork_parent(&pool->slabs);
    }
}

void
nrm__pool_fork_child(nrm_resource *mr)
{
    struct nrm__pool *pool = nrm__pool_from(mr);
    nrm__lock_fork_child(&pool->lock);
    if (pool->has_slabs) {
        nrm__slabs_fork_child(&pool->slabs);
    }
    pool->lacks_idle |= nrm__left_out_scope() != NRM__LEFT_OUT_NOTHING &&
                        mr->kind == NRM_KIND_PINNED;
    pool->growing_nbytes = 0; /* other threads' growth does not go on in the child */
    pool->n_hungry = 0;
    pool->is_watched = false; /* nor does anybody watch */
    nrm__pool_ahead_forget_locked(pool);
    nrm__pool_forget_pages_locked(pool);
}
