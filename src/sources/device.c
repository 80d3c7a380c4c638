/*
 * CudaMemoryResource: device memory straight from cuMemAlloc.
 *
 * Plain and slow (tens of microseconds, and cuMemFree waits for the device): what a
 * pool stands on. Giving back happens in place, detached, since no array's memory is
 * device memory; the wait orders the block behind all work, so the stream need not be
 * looked at.
 */
#include "base/error.h"
#include "core/hooks.h"
#include "sources/on_device.h"

static nrm_CUresult
call_driver(const struct nrm__cuda_scope *scope, void *more, size_t nbytes,
            nrm_CUdeviceptr *out)
{
    return scope->driver->cuMemAlloc(out, nbytes);
}

static const struct nrm__driver_way way = {.name = "cuMemAlloc", .call = call_driver};

static nrm_status
device_allocate(nrm_resource *self, const struct nrm__request *request,
                struct nrm__block *out)
{
    return nrm__driver_block_allocate(self, &way, NULL, request, out);
}

static void
device_deallocate(nrm_resource *self, const struct nrm__block *block,
                  nrm_stream *stream)
{
    if (nrm__is_exiting()) {
        return;
    }
    void *token = nrm__detach();
    nrm__driver_block_free(block);
    nrm__attach(token);
}

static const struct nrm__ops device_ops = {
    .class_name = "CudaMemoryResource",
    .flags = NRM__OPS_MAPPED | NRM__OPS_MAPPABLE,
    .allocate = device_allocate,
    .deallocate = device_deallocate,
    .renew_block = nrm__driver_block_renew,
};

nrm_status
nrm_device_create(const nrm_device_options *options, nrm_resource **out)
{
    nrm_resource *mr;
    NRM_TRY(nrm__driver_source_create(&device_ops, NRM_KIND_DEVICE, options, sizeof *mr,
                                      &mr));
    nrm__resource_publish(mr);
    *out = mr;
    return NRM_OK;
}
