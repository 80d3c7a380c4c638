/*
 * What a pool does with its upstream, whatever its way of handing blocks out: it takes
 * segments and gives them back, and asks whether memory that a GPU sees can be used
 * here and now. No lock is held.
 */
#ifndef NRM_POOLS_UPSTREAM_H
#define NRM_POOLS_UPSTREAM_H

#include "core/block_map.h"

/* What an allocation from GPU-visible memory starts with: resets of contexts are
   noticed, and a lost device is an error; as is a forked child, also for device memory.
   Host memory: nothing. */
nrm_status nrm__pool_begin(const nrm_resource *pool);
/* Its two halves, for a pool that asks the driver about its epochs in between. */
void nrm__pool_notice_resets(const nrm_resource *pool);
nrm_status nrm__pool_check_usable(const nrm_resource *pool);

/* A segment of `nbytes` of the upstream of `pool`; not in the block map yet. */
nrm_status nrm__segment_take(nrm_resource *pool, size_t nbytes, size_t alignment,
                             struct nrm__segment **out);

/* Gives the block of a segment, which is not in the map any more, back to the upstream.
   `later`: see nrm__give_back. */
void nrm__segment_return(struct nrm__segment *segment, bool later);

/* Whether no context was reset since the segment was made usable: two atomic loads. */
bool nrm__segment_is_current(const struct nrm__segment *segment);

/* After a context was reset by somebody else the upstream registers the segment
   anew. */
nrm_status nrm__segment_renew(struct nrm__segment *segment);

#endif
