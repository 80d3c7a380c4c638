/*
 * CudaAsyncViewMemoryResource: the same of a memory pool that somebody else made, and
 * destroys when the last memory of it is back.
 *
 * Nothing of the pool is changed, its release threshold included, but by a trim.
 */
#include "sources/in_order.h"


#include "base/error.h"
#include "base/given.h"
#include "nrm/sources.h"
#include "sources/on_device.h"

struct cuda_async_view {
    struct nrm__in_order in_order;
    nrm_CUmemoryPool pool;
};

static nrm_status
find_pool(struct nrm__in_order *base, const struct nrm__cuda_scope *scope,
          nrm_CUmemoryPool *out)
{
    NRM_TRY(nrm__in_order_check(scope));
    *out = ((const struct cuda_async_view *)base)->pool;
    return NRM_OK;
}

static const struct nrm__ops cuda_async_view_ops = {
    .class_name = "CudaAsyncViewMemoryResource",
    NRM__IN_ORDER_OPS,
};

nrm_status
nrm_cuda_async_view_create(const nrm_cuda_async_view_options *options,
                           nrm_resource **out)
{
    nrm_cuda_async_view_options given = {0};
    nrm_resource *mr;
    NRM__COPY_GIVEN(given, options);
    if (given.pool_handle == 0) {
        return nrm__error(NRM_INVALID_VALUE,
                          "a pool handle of 0 is no memory pool of the driver");
    }
    nrm_device_options where = NRM_OPTIONS(nrm_device_options);
    where.set_device = given.set_device;
    where.device = given.device;
    NRM_TRY(nrm__driver_source_create(&cuda_async_view_ops, NRM_KIND_DEVICE, &where,
                                      sizeof(struct cuda_async_view), &mr));
    struct cuda_async_view *self = (struct cuda_async_view *)mr;
    self->in_order.find_pool = find_pool;
    self->pool = (nrm_CUmemoryPool)given.pool_handle;
    nrm__resource_publish(mr);
    *out = mr;
    return NRM_OK;
}
