/*
 * PrefetchResourceAdaptor: managed memory that is on the device before it is used
 * there.
 *
 * A new block is moved to the device whose context is current, in the order of the
 * stream of the request. Where the driver does not do it the block is as good, only
 * slower at first: so an error is counted and noted, and the request succeeds. While a
 * capture may go on the stream nothing is moved, which would become a part of the graph
 * or end the capture.
 */
#include "adaptors/forward.h"
#include "base/error.h"
#include "core/capture.h"
#include "core/hooks.h"
#include "core/prefetch.h"
#include "cuda/context.h"
#include "nrm/adaptors.h"

static nrm_status
move(const struct nrm__block *block, size_t nbytes, nrm_stream *stream)
{
    struct nrm__cuda_scope scope;
    NRM_TRY(nrm__cuda_enter(-1, &scope));
    int device = scope.device;
    nrm__cuda_leave(&scope);
    return nrm__prefetch(block->ptr, nbytes, device, device,
                         stream != NULL ? stream : nrm_stream_default());
}

static nrm_status
prefetch_allocate(nrm_resource *mr, const struct nrm__request *request,
                  struct nrm__block *out)
{
    NRM_TRY(nrm__allocate(mr->upstream, request, out));
    if (mr->kind != NRM_KIND_MANAGED || nrm__stream_may_capture(request->stream)) {
        return NRM_OK;
    }
    if (move(out, request->nbytes, request->stream) != NRM_OK) {
        atomic_fetch_add_explicit(&mr->counters.errors, 1, memory_order_relaxed);
        nrm__lost_error_note(nrm_last_error());
    }
    return NRM_OK;
}

static bool
prefetch_front(nrm_resource *mr, struct nrm__front *out)
{
    return mr->kind != NRM_KIND_MANAGED && nrm__forward_front(mr, NULL, out);
}

static const struct nrm__ops prefetch_ops = {
    .class_name = "PrefetchResourceAdaptor",
    .flags = NRM__OPS_ADAPTOR,
    .allocate = prefetch_allocate,
    .deallocate = nrm__forward_deallocate,
    .renew_block = nrm__forward_renew_block,
    .front = prefetch_front,
    .statistics = nrm__forward_statistics,
};

nrm_status
nrm_prefetch_create(nrm_resource *upstream, nrm_resource **out)
{
    nrm_resource *mr;
    NRM_TRY(nrm__forward_create(&prefetch_ops, upstream, sizeof(nrm_resource), &mr));
    nrm__resource_publish(mr);
    *out = mr;
    return NRM_OK;
}
