/* What the sources share whose addresses come from the driver: device and managed. */
#ifndef NRM_SOURCES_ON_DEVICE_H
#define NRM_SOURCES_ON_DEVICE_H

#include "core/ops.h"
#include "cuda/context.h"
#include "nrm/sources.h"

/* How a source allocates. */
struct nrm__driver_way {
    const char *name; /* of the call */
    nrm_CUresult (*call)(const struct nrm__driver *driver, nrm_CUdeviceptr *out,
                         size_t nbytes);
    /* Whether the device can serve it; may be NULL. */
    nrm_status (*check)(nrm_resource *mr, int device);
};

/* Makes a source, not published yet, and sets its device if the options have one. */
nrm_status nrm__driver_source_create(const struct nrm__ops *ops, nrm_kind kind,
                                     const nrm_device_options *options,
                                     size_t struct_nbytes, nrm_resource **out);

/* The ops `allocate` (the first request decides the device) and `renew_block`. */
nrm_status nrm__driver_block_allocate(nrm_resource *mr,
                                      const struct nrm__driver_way *way,
                                      const struct nrm__request *request,
                                      struct nrm__block *out);
nrm_status nrm__driver_block_renew(nrm_resource *mr, struct nrm__block *block);

/* cuMemFree, unless the context that the block was made in is gone. Detached; may wait
   for the device. Errors are noted. */
void nrm__driver_block_free(const struct nrm__block *block);

#endif
