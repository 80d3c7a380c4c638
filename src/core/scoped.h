/*
 * Requests of a thread that has scopes, and blocks that were allocated so
 * (core/scopes.h).
 */
#ifndef NRM_CORE_SCOPED_H
#define NRM_CORE_SCOPED_H

#include "core/scopes.h"

/* The public calls once more, counted. They leave what nrm__scopes_enter entered. */
nrm_status nrm__scoped_allocate(struct nrm__scopes *scopes, nrm_resource *mr,
                                size_t nbytes, size_t alignment, nrm_stream *stream,
                                unsigned flags, void **out);
nrm_status nrm__scoped_deallocate(struct nrm__scopes *scopes, nrm_resource *mr,
                                  void *ptr, nrm_stream *stream);

/* Counts, tags and marks a block that was allocated now. */
void nrm__scoped_take(struct nrm__scopes *scopes, const nrm_resource *mr, void *ptr,
                      size_t nbytes);

/* Counts a block that the caller has claimed and gives back, and takes tag and mark
   off. The thread's own scopes, or NULL. */
void nrm__scoped_give(struct nrm__scopes *scopes, const nrm_resource *mr,
                      const struct nrm__block *block);

/* A claimed block that changed its size, and perhaps its place, has its tag there again
   and is live. `old_nbytes`: before, or its size if it stayed. */
void nrm__scoped_resize(struct nrm__scopes *scopes, const nrm_resource *mr,
                        const struct nrm__block *block, uint64_t tag,
                        size_t old_nbytes);

#endif
