/* What adaptors with one upstream share: the ops that only pass a call on. */
#ifndef NRM_ADAPTORS_FORWARD_H
#define NRM_ADAPTORS_FORWARD_H

#include "core/ops.h"

/* As nrm__resource_create, with the kind of `upstream` and what follows from it. */
nrm_status nrm__forward_create(const struct nrm__ops *ops, nrm_resource *upstream,
                               size_t struct_nbytes, nrm_resource **out);

nrm_status nrm__forward_allocate(nrm_resource *mr, const struct nrm__request *request,
                                 struct nrm__block *out);
void nrm__forward_deallocate(nrm_resource *mr, const struct nrm__block *block,
                             nrm_stream *stream);

/* The short way past an adaptor that needs to see no request, but for what its counters
   and perhaps `account` say. */
bool nrm__forward_front(nrm_resource *mr, struct nrm__account *account,
                        struct nrm__front *out);

/* For pools over an adaptor: their segments belong to what is behind it. */
nrm_status nrm__forward_renew_block(nrm_resource *mr, struct nrm__block *block);

/* Adds what the upstream reports beyond the counters, which each resource has
   itself. */
void nrm__forward_statistics(nrm_resource *mr, nrm_statistics *out);

#endif
