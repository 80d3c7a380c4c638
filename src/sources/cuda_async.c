/*
 * CudaAsyncMemoryResource: device memory in the order of streams, of a memory pool of
 * the driver that belongs to the resource.
 *
 * What was freed stays in the pool at a synchronisation up to the release threshold,
 * which is without a limit unless it is given: the driver's own default of 0 would map
 * and unmap memory all the time.
 */
#include "sources/in_order.h"


#include "base/error.h"
#include "base/given.h"
#include "nrm/sources.h"
#include "sources/on_device.h"

#define DECOMPRESSION_VERSION 12080 /* that knows the flag of the pool's usage */

struct cuda_async {
    struct nrm__in_order in_order;
    uint64_t release_threshold;
    nrm_CUmemAllocationHandleType exported;
};

static nrm_status
check_exported(const struct nrm__cuda_scope *scope, unsigned int wanted)
{
    int known = nrm__cuda_attribute(
        scope->device, NRM_CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES);
    unsigned int missing = known < 0 ? 0 : wanted & ~(unsigned int)known;
    if (missing == 0) {
        return NRM_OK;
    }
    return nrm__error(NRM_CUDA_UNAVAILABLE,
                      "device %d cannot export memory of a pool as a %s", scope->device,
                      missing & NRM_CU_MEM_HANDLE_TYPE_FABRIC ? "fabric handle"
                                                              : "file descriptor");
}

/* Memory that the decompression engine can read, where the driver has one. */
static nrm_CUresult
create_pool(const struct nrm__driver *driver, nrm_CUmemPoolProps *props,
            nrm_CUmemoryPool *out)
{
    if (driver->version >= DECOMPRESSION_VERSION) {
        props->usage = NRM_CU_MEM_POOL_CREATE_USAGE_HW_DECOMPRESS;
        if (driver->cuMemPoolCreate(out, props) == NRM_CUDA_SUCCESS) {
            return NRM_CUDA_SUCCESS;
        }
        props->usage = 0;
    }
    return driver->cuMemPoolCreate(out, props);
}

static nrm_status
find_pool(struct nrm__in_order *base, const struct nrm__cuda_scope *scope,
          nrm_CUmemoryPool *out)
{
    const struct cuda_async *self = (const struct cuda_async *)base;
    uint64_t threshold = self->release_threshold;
    nrm_CUmemPoolProps props = {
        .allocType = NRM_CU_MEM_ALLOCATION_TYPE_PINNED,
        .handleTypes = self->exported,
        .location = {.type = NRM_CU_MEM_LOCATION_TYPE_DEVICE, .id = scope->device},
    };
    nrm_CUmemoryPool pool;
    NRM_TRY(nrm__in_order_check(scope));
    NRM_TRY(check_exported(scope, self->exported));
    nrm_CUresult code = create_pool(scope->driver, &props, &pool);
    if (code != NRM_CUDA_SUCCESS) {
        return nrm__cuda_error(code, "cuMemPoolCreate on device %d", scope->device);
    }
    code = scope->driver->cuMemPoolSetAttribute(
        pool, NRM_CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold);
    if (code != NRM_CUDA_SUCCESS) {
        (void)scope->driver->cuMemPoolDestroy(pool);
        return nrm__cuda_error(code, "the release threshold of a pool on device %d",
                               scope->device);
    }
    *out = pool;
    return NRM_OK;
}

static const struct nrm__ops cuda_async_ops = {
    .class_name = "CudaAsyncMemoryResource",
    NRM__IN_ORDER_OPS,
};

nrm_status
nrm_cuda_async_create(const nrm_cuda_async_options *options, nrm_resource **out)
{
    nrm_cuda_async_options given = {0};
    nrm_resource *mr;
    NRM__COPY_GIVEN(given, options);
    nrm_device_options where = NRM_OPTIONS(nrm_device_options);
    where.set_device = given.set_device;
    where.device = given.device;
    NRM_TRY(nrm__driver_source_create(&cuda_async_ops, NRM_KIND_DEVICE, &where,
                                      sizeof(struct cuda_async), &mr));
    struct cuda_async *self = (struct cuda_async *)mr;
    self->in_order.find_pool = find_pool;
    self->in_order.owns_pool = true;
    self->in_order.initial_nbytes = given.initial_nbytes;
    self->release_threshold = given.set_release_threshold ? given.release_threshold
                                                          : UINT64_MAX;
    self->exported =
        (given.enable_ipc ? NRM_CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0u) |
        (given.enable_fabric ? NRM_CU_MEM_HANDLE_TYPE_FABRIC : 0u);
    nrm_status status =
        given.initial_nbytes != 0 ? nrm__in_order_prepare(&self->in_order) : NRM_OK;
    if (status != NRM_OK) {
        nrm__in_order_finish(mr);
        nrm__resource_abandon(mr);
        return status;
    }
    nrm__resource_publish(mr);
    *out = mr;
    return NRM_OK;
}
