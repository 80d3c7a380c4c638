/*
 * Reallocation: in place if the owner can, else a new block, a copy, and the old one back.
 *
 * While its owner tries the block is claimed, so that nobody else gives it back under him;
 * before the copy it is live again, as it stays whole when there is no memory for a new
 * one. Whoever frees it in between, which is a fault of the program, is noticed when it is
 * claimed again.
 */
#include <string.h>

#include "base/bits.h"
#include "base/error.h"
#include "core/known_uses.h"
#include "core/request.h"
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
             const struct nrm__request *request, void **out)
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
    nrm__deallocate(mr, &again, request->stream);
    *out = block.ptr;
    return NRM_OK;
}

static nrm_status
reallocate(nrm_resource *mr, struct nrm__block *block,
           const struct nrm__request *request, void **out)
{
    void *ptr = block->ptr;
    size_t old_nbytes = block->nbytes;
    if (!nrm__block_map_claim(block)) {
        return nrm__not_owned(mr, ptr, NULL);
    }
    if (nrm__is_watched() && request->nbytes < old_nbytes) {
        nrm__watch_given(block, request->nbytes, old_nbytes - request->nbytes);
    }
    nrm_status status = NRM_NOT_SUPPORTED;
    if (nrm__is_aligned(ptr, request->alignment)) {
        status = nrm__reallocate_in_place(mr, block, request);
    }
    nrm__block_map_unclaim(block);
    if (status == NRM_OK && nrm__is_watched() && request->nbytes > old_nbytes) {
        nrm__watch_taken(block, old_nbytes, request->nbytes - old_nbytes, NULL);
    }
    if (status == NRM_NOT_SUPPORTED) {
        return move_by_copy(mr, block, request, out);
    }
    if (status == NRM_OK) {
        *out = block->ptr;
    }
    return status;
}

nrm_status
nrm_resource_reallocate(nrm_resource *mr, void *ptr, size_t nbytes, size_t alignment,
                        nrm_stream *stream, void **out)
{
    struct nrm__request request;
    struct nrm__block block;
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
    NRM_TRY(nrm__find_own(mr, ptr, &block));
    nrm_resource *owner = block.owner;
    if (nbytes > block.nbytes) {
        request.flags |= NRM__REQUEST_GROWING;
    }
    status = reallocate(mr, &block, &request, out);
    nrm_resource_release(owner);
    return status == NRM_OK ? status : nrm__request_failed(status, mr, nbytes);
}
