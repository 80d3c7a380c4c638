/*
 * Segments that are mapped into one range: for pools/pool*.c alone. Functions named
 * ..._locked: the caller holds the pool's lock; the others: nobody does.
 */
#ifndef NRM_POOLS_POOL_VMM_H
#define NRM_POOLS_POOL_VMM_H

#include "cuda/vmm.h"
#include "pools/pool_internal.h"

/* Maps memory so that a block of `needed` bytes fits. NRM_NOT_SUPPORTED (not recorded):
   not here; NRM_OUT_OF_MEMORY, not recorded when it is the pool's limit, or there is no
   hole: the upstream may have what is needed. */
nrm_status nrm__pool_vmm_grow(struct nrm__pool *pool, size_t needed, unsigned how);

/* Opens what is and will be mapped to another device. NRM_NOT_SUPPORTED: see above. */
nrm_status nrm__pool_vmm_add_peer(struct nrm__pool *pool, int device);

/* No segment is left. */
void nrm__pool_vmm_destroy(struct nrm__pool *pool);

/* Any segment of a pool, also one of the upstream, which has no neighbours. */
bool nrm__pool_is_mapped(const struct nrm__segment *segment);
struct nrm__segment *nrm__pool_left_locked(const struct nrm__segment *segment);
struct nrm__segment *nrm__pool_right_locked(const struct nrm__segment *segment);

/* The segment of an address in a block that lies in the segment `near` too. */
struct nrm__segment *nrm__pool_segment_of_locked(struct nrm__segment *near,
                                                 uintptr_t address);

/* Makes the block of a new segment the neighbour of those beside it. */
void nrm__pool_vmm_link_locked(struct nrm__pool *pool, struct nrm__pool_block *block);

/* Of a free block, done, in which the segment lies: the part that is the segment, in no
   bin and nobody's neighbour. NULL: no memory for a description; nothing has
   changed. */
struct nrm__pool_block *nrm__pool_vmm_isolate_locked(struct nrm__pool *pool,
                                                     struct nrm__segment *segment,
                                                     struct nrm__pool_block *block);

/* Unmaps what was isolated. What the driver does not unmap stays, and is used no
   more. */
void nrm__pool_vmm_give_back(struct nrm__pool *pool,
                             const struct nrm__segment *segment);

void nrm__pool_vmm_check_locked(struct nrm__pool *pool);

#endif
