/*
 * Segments of an upstream, and whether they can be used: see upstream.h. A segment
 * remembers the generation of contexts in which its upstream made it usable for the
 * GPU; when that is over, the next block of it waits until the upstream has done so
 * anew.
 */
#include "pools/upstream.h"

#include "base/error.h"
#include "core/uses.h"
#include "cuda/context.h"

static bool
is_seen_by_gpus(const nrm_resource *pool)
{
    return pool->kind == NRM_KIND_PINNED || pool->kind == NRM_KIND_MANAGED;
}

void
nrm__pool_notice_resets(const nrm_resource *pool)
{
    if (is_seen_by_gpus(pool)) {
        nrm__cuda_check_generations();
    }
}

nrm_status
nrm__pool_begin(const nrm_resource *pool)
{
    nrm__pool_notice_resets(pool);
    return nrm__pool_check_usable(pool);
}

nrm_status
nrm__pool_check_usable(const nrm_resource *pool)
{
    if (pool->kind == NRM_KIND_HOST) {
        return NRM_OK;
    }
    if (nrm__cuda_is_forked()) {
        return nrm__error(
            NRM_CUDA_UNAVAILABLE,
            "this process was forked after its parent had initialised CUDA: "
            "%s memory cannot be had here; start workers with the spawn "
            "method, or allocate before the fork",
            nrm_kind_name(pool->kind));
    }
    if (is_seen_by_gpus(pool) && nrm__epoch_is_lost()) {
        return nrm__error(
            NRM_DEVICE_LOST,
            "the CUDA device reports an error that it cannot recover from: "
            "memory that it may still use is not handed out");
    }
    return NRM_OK;
}

nrm_status
nrm__segment_take(nrm_resource *pool, size_t nbytes, size_t alignment,
                  struct nrm__segment **out)
{
    struct nrm__request request = {.nbytes = nbytes, .alignment = alignment};
    struct nrm__block block;
    NRM_TRY(nrm__take(pool->upstream, &request, &block));
    nrm_status status = nrm__segment_create(pool, block.ptr, nbytes, out);
    if (status != NRM_OK) {
        nrm__give_back(pool->upstream, &block, false);
        return status;
    }
    (*out)->upstream = block;
    (*out)->generation = nrm__cuda_generations();
    return NRM_OK;
}

void
nrm__segment_return(struct nrm__segment *segment, bool later)
{
    nrm__give_back(segment->owner->upstream, &segment->upstream, later);
    nrm__segment_destroy(segment);
}

bool
nrm__segment_is_current(const struct nrm__segment *segment)
{
    return segment->generation == nrm__cuda_generations();
}

nrm_status
nrm__segment_renew(struct nrm__segment *segment)
{
    nrm_resource *owner = segment->upstream.owner;
    uint64_t now = nrm__cuda_generations();
    /* What is mapped belongs to the process, and no reset ends it. */
    if (owner != NULL && owner->ops->renew_block != NULL) {
        NRM_TRY(owner->ops->renew_block(owner, &segment->upstream));
    }
    segment->generation = now;
    return NRM_OK;
}
