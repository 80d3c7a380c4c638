/*
 * AlignedResourceAdaptor: blocks at a greater alignment than their kind has.
 *
 * Every resource of ours honours the alignment of a request or refuses it, so nothing
 * is allocated in excess here, and no table leads from aligned addresses to others: the
 * request is changed, and the block is the upstream's own. Where the default is as much
 * anyway, requests take the short way.
 */

#include "adaptors/forward.h"
#include "base/assert.h"
#include "base/bits.h"
#include "base/error.h"
#include "base/given.h"
#include "nrm/adaptors.h"

#define DEFAULT_ALIGNMENT 256

struct aligned {
    nrm_resource base;
    size_t alignment, threshold;
};

static const struct nrm__ops aligned_ops;

static struct aligned *
aligned_from(nrm_resource *mr)
{
    NRM_ASSERT(mr->ops == &aligned_ops);
    return (struct aligned *)mr;
}

static struct nrm__request
changed(nrm_resource *mr, const struct nrm__request *request)
{
    const struct aligned *self = aligned_from(mr);
    struct nrm__request result = *request;
    if (request->nbytes >= self->threshold) {
        result.alignment = nrm__max(request->alignment, self->alignment);
    }
    return result;
}

static nrm_status
aligned_allocate(nrm_resource *mr, const struct nrm__request *request,
                 struct nrm__block *out)
{
    struct nrm__request aligned = changed(mr, request);
    return nrm__allocate(mr->upstream, &aligned, out);
}

/* Of a block that is not where it has to be by its new size the dispatcher makes
   another. */
static nrm_status
aligned_reallocate(nrm_resource *mr, struct nrm__block *block,
                   const struct nrm__request *request)
{
    struct nrm__request aligned = changed(mr, request);
    return nrm__is_aligned(block->ptr, aligned.alignment)
               ? nrm__reallocate_in_place(mr->upstream, block, &aligned)
               : NRM_NOT_SUPPORTED;
}

static bool
aligned_front(nrm_resource *mr, struct nrm__front *out)
{
    return aligned_from(mr)->alignment <= nrm__kind_alignment(mr->kind) &&
           nrm__forward_front(mr, NULL, out);
}

static const struct nrm__ops aligned_ops = {
    .class_name = "AlignedResourceAdaptor",
    .flags = NRM__OPS_ADAPTOR,
    .allocate = aligned_allocate,
    .deallocate = nrm__forward_deallocate,
    .reallocate = aligned_reallocate,
    .renew_block = nrm__forward_renew_block,
    .front = aligned_front,
    .statistics = nrm__forward_statistics,
};

nrm_status
nrm_aligned_create(nrm_resource *upstream, const nrm_aligned_options *options,
                   nrm_resource **out)
{
    nrm_aligned_options given = {.size = sizeof given};
    nrm_resource *mr;
    NRM__COPY_GIVEN(given, options);
    if (given.alignment == 0) {
        given.alignment = DEFAULT_ALIGNMENT;
    }
    NRM_TRY(nrm__alignment_check(given.alignment));
    NRM_TRY(nrm__forward_create(&aligned_ops, upstream, sizeof(struct aligned), &mr));
    struct aligned *self = aligned_from(mr);
    self->alignment = given.alignment;
    self->threshold = given.alignment_threshold;
    nrm__resource_publish(mr);
    *out = mr;
    return NRM_OK;
}
