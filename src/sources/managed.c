/*
 * ManagedMemoryResource: memory that migrates between host and devices.
 *
 * Where a device cannot touch managed memory while the host does
 * (concurrentManagedAccess 0), an array that the host reads during any kernel ends the
 * process, so such devices are refused unless the options ask for it. A block that is
 * given back is retired: a kernel may still use it, and cuMemFree waits for that with a
 * lock of the driver held.
 */

#include "base/error.h"
#include "base/given.h"
#include "core/uses.h"
#include "sources/on_device.h"

struct managed {
    nrm_resource base;
    bool allow_nonconcurrent;
};

static nrm_CUresult
call_driver(const struct nrm__cuda_scope *scope, void *more, size_t nbytes,
            nrm_CUdeviceptr *out)
{
    return scope->driver->cuMemAllocManaged(out, nbytes, NRM_CU_MEM_ATTACH_GLOBAL);
}

static nrm_status
check_device(nrm_resource *self, const struct nrm__cuda_scope *scope)
{
    int device = scope->device;
    const struct managed *managed = (const struct managed *)self;
    if (nrm__cuda_attribute(device, NRM_CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY) == 0) {
        return nrm__error(NRM_NOT_SUPPORTED, "device %d has no managed memory", device);
    }
    if (!managed->allow_nonconcurrent &&
        nrm__cuda_attribute(device,
                            NRM_CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS) == 0) {
        return nrm__error(NRM_NOT_SUPPORTED,
                          "device %d has concurrentManagedAccess 0: touching a managed "
                          "array while any kernel runs would end the process",
                          device);
    }
    return NRM_OK;
}

static const struct nrm__driver_way way = {
    .name = "cuMemAllocManaged",
    .call = call_driver,
    .check = check_device,
};

static nrm_status
managed_allocate(nrm_resource *self, const struct nrm__request *request,
                 struct nrm__block *out)
{
    (void)nrm__retired_drain(0); /* so that a loop of temporaries does not grow */
    return nrm__driver_block_allocate(self, &way, NULL, request, out);
}

static void
managed_deallocate(nrm_resource *self, const struct nrm__block *block,
                   nrm_stream *stream)
{
    nrm__retire(block, nrm__epoch_stamp());
}

static void
managed_release(nrm_resource *self, const struct nrm__block *block)
{
    nrm__driver_block_free(block);
}

static const struct nrm__ops managed_ops = {
    .class_name = "ManagedMemoryResource",
    .flags = NRM__OPS_MAPPED | NRM__OPS_WAITS,
    .allocate = managed_allocate,
    .deallocate = managed_deallocate,
    .release_block = managed_release,
    .renew_block = nrm__driver_block_renew,
};

nrm_status
nrm_managed_create(const nrm_device_options *options, nrm_resource **out)
{
    nrm_device_options given = {0};
    nrm_resource *mr;
    NRM__COPY_GIVEN(given, options);
    NRM_TRY(nrm__driver_source_create(&managed_ops, NRM_KIND_MANAGED, options,
                                      sizeof(struct managed), &mr));
    ((struct managed *)mr)->allow_nonconcurrent = given.allow_nonconcurrent;
    nrm__resource_publish(mr);
    *out = mr;
    return NRM_OK;
}
