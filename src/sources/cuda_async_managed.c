/*
 * CudaAsyncManagedMemoryResource: managed memory in the order of streams, of the
 * device's default pool of managed memory, which drivers have since CUDA 13.0.
 *
 * That pool is the whole process's: it is not destroyed, and its release threshold is
 * raised to no limit, since each release and return moves pages. It must not reuse what
 * another stream has still to free, by making ours wait: an array would wait for a GPU
 * that may wait for the host. The host may touch a block when the stream that it was
 * allocated on has been waited for; one that was asked for without a stream, as arrays
 * are, at once.
 */
#include "sources/in_order.h"

#include "base/error.h"
#include "nrm/sources.h"
#include "sources/on_device.h"

static nrm_status
check_managed(const struct nrm__cuda_scope *scope)
{
    NRM_TRY(nrm__in_order_check(scope));
    if (scope->driver->cuMemGetDefaultMemPool == NULL) {
        return nrm__error(
            NRM_CUDA_UNAVAILABLE,
            "the CUDA driver (of CUDA %d.%d) has no pools of managed memory: "
            "CUDA 13.0 or newer is needed",
            scope->driver->version / 1000, scope->driver->version % 1000 / 10);
    }
    if (nrm__cuda_attribute(scope->device,
                            NRM_CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS) == 0) {
        return nrm__error(NRM_CUDA_UNAVAILABLE,
                          "device %d has no pools of managed memory "
                          "(concurrentManagedAccess 0)",
                          scope->device);
    }
    return NRM_OK;
}

static nrm_status
find_pool(struct nrm__in_order *self, const struct nrm__cuda_scope *scope,
          nrm_CUmemoryPool *out)
{
    nrm_CUmemLocation location = {.type = NRM_CU_MEM_LOCATION_TYPE_DEVICE,
                                  .id = scope->device};
    uint64_t threshold = UINT64_MAX;
    int waits = 0;
    nrm_CUmemoryPool pool;
    NRM_TRY(check_managed(scope));
    nrm_CUresult code = scope->driver->cuMemGetDefaultMemPool(
        &pool, &location, NRM_CU_MEM_ALLOCATION_TYPE_MANAGED);
    if (code == NRM_CUDA_SUCCESS) {
        code = scope->driver->cuMemPoolSetAttribute(
            pool, NRM_CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold);
    }
    if (code == NRM_CUDA_SUCCESS) {
        code = scope->driver->cuMemPoolSetAttribute(
            pool, NRM_CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, &waits);
    }
    if (code != NRM_CUDA_SUCCESS) {
        return nrm__cuda_error(code, "the pool of managed memory of device %d",
                               scope->device);
    }
    *out = pool;
    return NRM_OK;
}

static const struct nrm__ops cuda_async_managed_ops = {
    .class_name = "CudaAsyncManagedMemoryResource",
    NRM__IN_ORDER_OPS,
};

nrm_status
nrm_cuda_async_managed_create(const nrm_device_options *options, nrm_resource **out)
{
    nrm_resource *mr;
    NRM_TRY(nrm__driver_source_create(&cuda_async_managed_ops, NRM_KIND_MANAGED,
                                      options, sizeof(struct nrm__in_order), &mr));
    ((struct nrm__in_order *)mr)->find_pool = find_pool;
    nrm__resource_publish(mr);
    *out = mr;
    return NRM_OK;
}
