/* What the sources share whose addresses come from the driver: device, managed and
 * those in the order of streams. */
#ifndef NRM_SOURCES_ON_DEVICE_H
#define NRM_SOURCES_ON_DEVICE_H

#include "core/ops.h"
#include "cuda/context.h"
#include "nrm/sources.h"

/* How a source allocates. */
struct nrm__driver_way {
    const char *name; /* of the call */
    /* In the context of the device; `more` is the caller's. */
    nrm_CUresult (*call)(const struct nrm__cuda_scope *scope, void *more, size_t nbytes,
                         nrm_CUdeviceptr *out);
    /* Whether the device can serve it; may be NULL. */
    nrm_status (*check)(nrm_resource *mr, const struct nrm__cuda_scope *scope);
};

/* Makes a source, not published yet, and sets its device if the options have one. */
nrm_status nrm__driver_source_create(const struct nrm__ops *ops, nrm_kind kind,
                                     const nrm_device_options *options,
                                     size_t struct_nbytes, nrm_resource **out);

/* The ops `allocate` (the first request decides the device) and `renew_block`. */
nrm_status nrm__driver_block_allocate(nrm_resource *mr,
                                      const struct nrm__driver_way *way, void *more,
                                      const struct nrm__request *request,
                                      struct nrm__block *out);
nrm_status nrm__driver_block_renew(nrm_resource *mr, struct nrm__block *block);

/* Enters the source's device; the first request decides which that is. */
nrm_status nrm__driver_source_enter(nrm_resource *mr, struct nrm__cuda_scope *out);

/* cuMemFree, unless the context that the block was made in is gone. Detached; may wait
   for the device. Errors are noted. */
void nrm__driver_block_free(const struct nrm__block *block);

/* The same by another call. */
void nrm__driver_block_free_by(const struct nrm__block *block, const char *name,
                               nrm_CUresult (*call)(const struct nrm__cuda_scope *scope,
                                                    void *more, nrm_CUdeviceptr ptr),
                               void *more);

#endif
