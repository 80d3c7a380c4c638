/*
 * Resizing of blocks in place: one gives its tail back, takes free memory behind it, or
 * moves by its pages; otherwise the caller copies.
 */
#include "pools/pool_ops.h"

/* Keeps a claimed block where it is: cuts its tail off, or takes free memory behind
   it. */
static bool
resize_locally(struct nrm__pool *pool, struct nrm__pool_block *own, size_t nbytes,
               size_t wanted)
{
    size_t granule = nrm__pool_granule_of(own->live.segment);
    nbytes = nrm__align_up(nbytes, granule);
    wanted = nrm__align_up(wanted, granule);
    nrm__lock_acquire(&pool->lock);
    bool done = nbytes <= own->size;
    if (done && nbytes < own->size / 2 && wanted < own->size) {
        nrm__pool_cut_tail_locked(pool, own, wanted);
    }
    else if (!done) {
        done = nrm__pool_extend_locked(pool, own, nbytes, wanted);
    }
    nrm__lock_release(&pool->lock);
    return done;
}

nrm_status
nrm__pool_reallocate(nrm_resource *mr, struct nrm__block *block,
                     const struct nrm__request *request)
{
    struct nrm__pool *pool = nrm__pool_from(mr);
    if (block->flags & NRM__BLOCK_IN_SLAB) {
        bool stays = request->nbytes <= block->capacity &&
                     request->nbytes >= block->capacity / 2;
        return stays ? NRM_OK : NRM_NOT_SUPPORTED;
    }
    if (pool->order != NULL) {
        return NRM_NOT_SUPPORTED; /* nor can the host copy it */
    }
    struct nrm__pool_block *own = nrm__pool_block_at(block->segment, block->ptr);
    size_t colour = (uintptr_t)block->ptr - own->start;
    size_t wanted = nrm__pool_block_nbytes(pool, request) + colour;
    if (resize_locally(pool, own, request->nbytes + colour, wanted) ||
        nrm__pool_move_pages(pool, own, request->nbytes + colour, wanted) == NRM_OK) {
        block->ptr = (void *)(own->start + colour);
        block->capacity = own->size - colour;
        return NRM_OK;
    }
    return NRM_NOT_SUPPORTED;
}
