/*
 * What core/dispatch.c and core/reallocate.c share: the request of a caller, in
 * core/request.c, and the way of a block through adaptors.
 */
#ifndef NRM_CORE_REQUEST_H
#define NRM_CORE_REQUEST_H

#include "core/block_map.h"

struct nrm__scopes;

/* Fills `out` with a valid request, or says what is wrong with it. */
nrm_status nrm__request_make(nrm_resource *mr, size_t nbytes, size_t alignment,
                             nrm_stream *stream, struct nrm__request *out);

/* Adds to the error of this thread who was asked for how much; returns `status`. */
nrm_status nrm__request_failed(nrm_status status, const nrm_resource *mr,
                               size_t nbytes);

/* NRM_NOT_OWNED, counted, with what is at `ptr` instead: `found`, or NULL: nothing
   live. */
nrm_status nrm__not_owned(nrm_resource *mr, const void *ptr,
                          const struct nrm__block *found);

/* Finds the live block that starts at `ptr` and came through `mr`; its owner is
   retained and for the caller to release. */
nrm_status nrm__find_own(nrm_resource *mr, const void *ptr, struct nrm__block *out);

static inline bool
nrm__is_adaptor(const nrm_resource *mr)
{
    return (mr->ops->flags & NRM__OPS_ADAPTOR) != 0;
}

/* In core/dispatch.c: the upstream of an adaptor that `block` came through, or NULL. */
nrm_resource *nrm__branch_of(nrm_resource *mr, const struct nrm__block *block);

/* The same: gives back what starts at an address, not NULL. `scopes`: this thread's,
   which count it; or NULL. */
nrm_status nrm__deallocate_found(nrm_resource *mr, void *ptr, nrm_stream *stream,
                                 struct nrm__scopes *scopes);

/* The same: counts a block that changed its size in place. */
void nrm__count_resize(nrm_resource *mr, size_t old_nbytes, size_t nbytes);

#endif
