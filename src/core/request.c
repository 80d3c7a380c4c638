/*
 * What a caller asks, looked at before anything is done: whether there can be such a
 * request, whose the block is that an address names, and the words for it when the
 * answer is no. The words are for people, so they say what was asked, what is there
 * instead, and of which resource.
 */
#include "core/request.h"

#include <stdint.h>

#include "base/bits.h"
#include "base/error.h"
#include "core/block_map.h"

#define REQUEST_MAX (SIZE_MAX / 2)

nrm_status
nrm__alignment_check(size_t alignment)
{
    return nrm__is_power_of_two(alignment)
               ? NRM_OK
               : nrm__error(NRM_INVALID_VALUE,
                            "the alignment must be a power of two, not %zu B",
                            alignment);
}

nrm_status
nrm__request_make(nrm_resource *mr, size_t nbytes, size_t alignment, nrm_stream *stream,
                  struct nrm__request *out)
{
    if (alignment == 0) {
        alignment = nrm__kind_alignment(mr->kind);
    }
    NRM_TRY(nrm__alignment_check(alignment));
    if (nbytes > REQUEST_MAX || alignment > REQUEST_MAX - nbytes) {
        return nrm__error(
            NRM_OUT_OF_MEMORY,
            "%zu B at an alignment of %zu B is more than an address space "
            "holds",
            nbytes, alignment);
    }
    if (stream != NULL && !nrm_stream_is_usable_here(stream)) {
        return nrm__error(
            NRM_INVALID_VALUE,
            "the stream is the per-thread default stream of another thread");
    }
    *out = (struct nrm__request){
        .nbytes = nbytes, .alignment = alignment, .stream = stream};
    return NRM_OK;
}

/* Of adaptors that nobody named it is the resource behind them. */
nrm_status
nrm__request_failed(nrm_status status, const nrm_resource *mr, size_t nbytes)
{
    char name[65];
    nrm_resource_name(mr, name, sizeof name);
    while (name[0] == '\0' && nrm__is_adaptor(mr) && mr->upstream != NULL) {
        mr = mr->upstream;
        nrm_resource_name(mr, name, sizeof name);
    }
    nrm__error_request(nbytes, name[0] != '\0' ? name : mr->ops->class_name);
    return status;
}

nrm_status
nrm__not_owned(nrm_resource *mr, const void *ptr, const struct nrm__block *found)
{
    atomic_fetch_add_explicit(&mr->counters.errors, 1, memory_order_relaxed);
    if (found == NULL) {
        return nrm__error(
            NRM_NOT_OWNED,
            "%p is no live block of this resource: it was freed already, or "
            "comes from elsewhere",
            ptr);
    }
    if (found->ptr != ptr) {
        return nrm__error(
            NRM_NOT_OWNED,
            "%p lies %zu B inside the live block of %zu B at %p: only its "
            "start can be given back",
            ptr, (size_t)((const char *)ptr - (const char *)found->ptr), found->nbytes,
            found->ptr);
    }
    char name[65];
    nrm_resource_name(found->owner, name, sizeof name);
    return nrm__error(NRM_NOT_OWNED,
                      "%p is a live block of %zu B of another resource (%s%s%s)", ptr,
                      found->nbytes, found->owner->ops->class_name,
                      name[0] != '\0' ? " " : "", name);
}

nrm_status
nrm__find_own(nrm_resource *mr, const void *ptr, struct nrm__block *out)
{
    if (!nrm__block_map_find(ptr, out)) {
        return nrm__not_owned(mr, ptr, NULL);
    }
    if (out->ptr == ptr && nrm__leads_to(mr, out)) {
        return NRM_OK;
    }
    nrm_status status = nrm__not_owned(mr, ptr, out);
    nrm_resource_release(out->owner);
    return status;
}
