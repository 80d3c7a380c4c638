/*
 * The operations of a pool (core/ops.h), which stand in several files: pool.c has their
 * table, and allocates and deallocates; pool_find.c, pool_resize.c, pool_trim.c,
 * pool_check.c and pool_fork.c have the others. And what these share of a block that is
 * in somebody's hands.
 */
#ifndef NRM_POOLS_POOL_OPS_H
#define NRM_POOLS_POOL_OPS_H

#include "base/assert.h"
#include "pools/pool_internal.h"

static inline struct nrm__pool *
nrm__pool_from(nrm_resource *mr)
{
    NRM_ASSERT(mr->ops == &nrm__pool_ops || mr->ops == &nrm__pool_fixed_ops);
    return (struct nrm__pool *)mr;
}

/* The block that starts at an address, or a little before it: colour; NULL: none
   does. */
static inline struct nrm__pool_block *
nrm__pool_block_at(const struct nrm__segment *segment, const void *ptr)
{
    return nrm__pool_block_of(nrm__starts_find(segment, (uintptr_t)ptr));
}


/* What users know of a block that starts, for them, at `address`; the flags stay. */
static inline void
nrm__pool_fill(const struct nrm__pool_block *block, uintptr_t address,
               struct nrm__block *out)
{
    out->ptr = (void *)address;
    out->nbytes = atomic_load_explicit(&block->live.nbytes, memory_order_relaxed);
    out->capacity = atomic_load_explicit(&block->live.capacity, memory_order_relaxed);
    out->segment = block->live.segment;
    out->record = NULL;
}


/* Describes a block that was taken. From here on look-ups find it if it is live. */
static inline void
nrm__pool_set_taken(struct nrm__pool_block *block, uintptr_t address, size_t nbytes,
                    uintptr_t state)
{
    size_t capacity = block->size - (address - block->start);
    NRM_DEBUG_ASSERT(nbytes <= capacity);
    atomic_store_explicit(&block->live.nbytes, nbytes, memory_order_relaxed);
    atomic_store_explicit(&block->live.capacity, capacity, memory_order_relaxed);
    atomic_store_explicit(&block->live.key, address | state, memory_order_release);
}


/* ---- look-ups: pool_find.c ---- */

bool nrm__pool_find_block(nrm_resource *mr, struct nrm__segment *segment,
                          const void *ptr, struct nrm__block *out);
bool nrm__pool_claim_block(nrm_resource *mr, struct nrm__block *block);
void nrm__pool_unclaim_block(nrm_resource *mr, const struct nrm__block *block);

/* For a pool that has its segments of this one. */
nrm_status nrm__pool_renew_block(nrm_resource *mr, struct nrm__block *block);

/* ---- resizing in place: pool_resize.c ---- */

nrm_status nrm__pool_reallocate(nrm_resource *mr, struct nrm__block *block,
                                const struct nrm__request *request);

/* ---- pool_trim.c ---- */

nrm_status nrm__pool_trim(nrm_resource *mr, size_t keep_nbytes, size_t *out_nbytes);
void nrm__pool_statistics(nrm_resource *mr, nrm_statistics *out);

#endif
