/*
 * What the two sources share that give ordinary memory to devices which read and write
 * that in place.
 */
#ifndef NRM_SOURCES_PAGEABLE_H
#define NRM_SOURCES_PAGEABLE_H

#include "core/ops.h"
#include "cuda/context.h"
#include "nrm/sources.h"

/* Makes one, not published yet. NRM_CUDA_UNAVAILABLE also where it is known by now that
   the device cannot. */
nrm_status nrm__pageable_create(const struct nrm__ops *ops,
                                const nrm_device_options *options, size_t struct_nbytes,
                                nrm_resource **out);

/* Enters the device, which the first request decides, and says whether it can. */
nrm_status nrm__pageable_enter(nrm_resource *mr, struct nrm__cuda_scope *out);

/* Ops. */
nrm_status nrm__pageable_allocate(nrm_resource *mr, const struct nrm__request *request,
                                  struct nrm__block *out);
void nrm__pageable_deallocate(nrm_resource *mr, const struct nrm__block *block,
                              nrm_stream *stream);
void nrm__pageable_release(nrm_resource *mr, const struct nrm__block *block);

#endif
