/*
 * The common half of the adaptors with one upstream.
 *
 * An adaptor owns no blocks, so find, claim and trim need nothing of it: the dispatcher
 * goes to the owner of a block, and down the chain of upstreams. What a pool asks of
 * its upstream directly has to be passed on.
 */
#include "adaptors/forward.h"

#include "base/error.h"

nrm_status
nrm__forward_create(const struct nrm__ops *ops, nrm_resource *upstream,
                    size_t struct_nbytes, nrm_resource **out)
{
    if (upstream == NULL) {
        return nrm__error(NRM_INVALID_VALUE, "a %s needs an upstream", ops->class_name);
    }
    nrm_resource *mr;
    NRM_TRY(nrm__resource_create(ops, upstream->kind, upstream, struct_nbytes, &mr));
    mr->flags |= upstream->flags & NRM__OPS_PASSED_ON;
    *out = mr;
    return NRM_OK;
}

nrm_status
nrm__forward_allocate(nrm_resource *mr, const struct nrm__request *request,
                      struct nrm__block *out)
{
    return nrm__allocate(mr->upstream, request, out);
}

void
nrm__forward_deallocate(nrm_resource *mr, const struct nrm__block *block,
                        nrm_stream *stream)
{
    nrm__deallocate(mr->upstream, block, stream);
}

bool
nrm__forward_front(nrm_resource *mr, struct nrm__account *account,
                   struct nrm__front *out)
{
    nrm_resource *upstream = mr->upstream;
    if (upstream->ops->front == NULL || !upstream->ops->front(upstream, out) ||
        (account != NULL && out->account != NULL)) {
        return false; /* one account is booked in on the way, no more */
    }
    out->behind = upstream;
    if (account != NULL) {
        out->account = account;
    }
    return true;
}

nrm_status
nrm__forward_renew_block(nrm_resource *mr, struct nrm__block *block)
{
    nrm_resource *upstream = mr->upstream;
    if (upstream->ops->renew_block == NULL) {
        return NRM_OK;
    }
    return upstream->ops->renew_block(upstream, block);
}

void
nrm__forward_statistics(nrm_resource *mr, nrm_statistics *out)
{
    nrm_statistics upstream;
    if (nrm_resource_statistics(mr->upstream, &upstream) == NRM_OK) {
        out->reserved_bytes += upstream.reserved_bytes;
        out->parked_bytes += upstream.parked_bytes;
        out->epochs += upstream.epochs;
        out->waits += upstream.waits;
        out->fallbacks += upstream.fallbacks;
        out->segments_ahead += upstream.segments_ahead;
        out->failures_ahead += upstream.failures_ahead;
    }
}
