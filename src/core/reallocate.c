/*
 * Reallocation: in place if the owner can, else a new block, a copy, and the old one
 * back.
 *
 * While its owner tries the block is claimed, so that nobody else gives it back under
 * him; before the copy it is live again, as it stays whole when there is no memory for
 * a new one. Whoever frees it in between, which is a fault of the program, is noticed
 * when it is claimed again.
 */
#include <string.h>

#include "base/bits.h"
#include "base/error.h"
#include "core/known_uses.h"
#include "core/request.h"
#include "core/scope_tags.h"
#include "core/scoped.h"
#include "core/watch.h"

nrm_status
nrm__reallocate_in_place(nrm_resource *mr, struct nrm__block *block,
                         const struct nrm__request *request)
{
    size_t old_nbytes = block->nbytes;
    nrm_status status = NRM_NOT_SUPPORTED;
    if (request->nbytes < old_nbytes && nrm__known_uses_has(block)) {
        return status; /* the tail would not wait for them */
    }
    if (mr->ops->reallocate != NULL) {
        status = mr->ops->reallocate(mr, block, request);
    }
    else if (nrm__is_adaptor(mr)) {
        nrm_resource *next = nrm__branch_of(mr, block);
        status = nrm__reallocate_in_place(next, block, request);
    }
    if (status == NRM_OK) {
        block->nbytes = request->nbytes;
        nrm__count_resize(mr, old_nbytes, request->nbytes);
    }
    return status;
}

/* A new block, a copy, and the old one back: the old one stays whole on failure. */
static nrm_status
move_by_copy(nrm_resource *mr, const struct nrm__block *old,
             const struct nrm__request *request, struct nrm__scopes *scopes, void **out)
{
    struct nrm__block block;
    struct nrm__block again = *old;
    NRM_TRY(nrm__allocate(mr, request, &block));
    memcpy(block.ptr, old->ptr, nrm__min(old->nbytes, request->nbytes));
    if (!nrm__block_map_claim(&again)) {
        nrm_status status = nrm__not_owned(mr, old->ptr, NULL);
        if (nrm__block_map_claim(&block)) {
            nrm__deallocate(mr, &block, request->stream);
        }
        return status;
    }
    if (nrm__is_watched()) {
        nrm__watch_taken(&block, 0, request->nbytes, request->stream);
        nrm__watch_given(&again, 0, again.nbytes);
    }
    if (scopes != NULL) {
        nrm__scoped_take(scopes, mr, block.ptr, request->nbytes);
    }
    nrm__scoped_give(scopes, mr, &again);
    nrm__deallocate(mr, &again, request->stream);
    *out = block.ptr;
    return NRM_OK;
}

/* Of a claimed block, which is live again afterwards, with its tag, wherever it is. */
static nrm_status
resize_claimed(nrm_resource *mr, struct nrm__block *block,
               const struct nrm__request *request, struct nrm__scopes *scopes)
{
    size_t old_nbytes = block->nbytes;
    uint64_t tag = nrm__scopes_are_known() ? nrm__scope_tag_take(block->ptr) : 0;
    nrm_status status = NRM_NOT_SUPPORTED;
    if (nrm__is_aligned(block->ptr, request->alignment)) {
        status = nrm__reallocate_in_place(mr, block, request);
    }
    nrm__block_map_unclaim(block);
    if (scopes != NULL || tag != 0) {
        nrm__scoped_resize(scopes, mr, block, tag, old_nbytes);
    }
    return status;
}

static nrm_status
reallocate(nrm_resource *mr, struct nrm__block *block,
           const struct nrm__request *request, struct nrm__scopes *scopes, void **out)
{
    void *ptr = block->ptr;
    size_t old_nbytes = block->nbytes;
    if (!nrm__block_map_claim(block)) {
        return nrm__not_owned(mr, ptr, NULL);
    }
    if (nrm__is_watched() && request->nbytes < old_nbytes) {
        nrm__watch_given(block, request->nbytes, old_nbytes - request->nbytes);
    }
    nrm_status status = resize_claimed(mr, block, request, scopes);
    if (status == NRM_OK && nrm__is_watched() && request->nbytes > old_nbytes) {
        nrm__watch_taken(block, old_nbytes, request->nbytes - old_nbytes, NULL);
    }
    if (status == NRM_NOT_SUPPORTED) {
        return move_by_copy(mr, block, request, scopes, out);
    }
    if (status == NRM_OK) {
        *out = block->ptr;
    }
    return status;
}

/* What lives at an address, to a valid size that is not 0. */
static nrm_status
reallocate_found(nrm_resource *mr, void *ptr, struct nrm__request *request,
                 struct nrm__scopes *scopes, void **out)
{
    struct nrm__block block;
    NRM_TRY(nrm__find_own(mr, ptr, &block));
    nrm_resource *owner = block.owner;
    if (request->nbytes > block.nbytes) {
        request->flags |= NRM__REQUEST_GROWING;
    }
    nrm_status status = reallocate(mr, &block, request, scopes, out);
    nrm_resource_release(owner);
    return status == NRM_OK ? status : nrm__request_failed(status, mr, request->nbytes);
}

nrm_status
nrm_resource_reallocate(nrm_resource *mr, void *ptr, size_t nbytes, size_t alignment,
                        nrm_stream *stream, void **out)
{
    struct nrm__request request;
    if (ptr == NULL) {
        return nrm_resource_allocate(mr, nbytes, alignment, stream, out);
    }
    if (!nrm_kind_is_host_accessible(mr->kind)) {
        return nrm__error(NRM_NOT_SUPPORTED,
                          "%s memory cannot be resized from the host",
                          nrm_kind_name(mr->kind));
    }
    nrm_status status = nrm__request_make(mr, nbytes, alignment, stream, &request);
    if (status != NRM_OK) {
        return nrm__request_failed(status, mr, nbytes);
    }
    if (nbytes == 0) {
        NRM_TRY(nrm_resource_deallocate(mr, ptr, 0, stream));
        *out = NULL;
        return NRM_OK;
    }
    struct nrm__scopes *scopes = nrm__scopes_enter();
    status = reallocate_found(mr, ptr, &request, scopes, out);
    if (scopes != NULL) {
        nrm__scopes_leave(scopes);
    }
    return status;
}
