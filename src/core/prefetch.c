/*
 * One call of the driver, which is an optimisation and no more: where it is not to be
 * had the pages come when they are touched.
 */
#include "core/prefetch.h"

#include <stdint.h>

#include "base/error.h"
#include "cuda/context.h"

static nrm_status
prefetch_here(const struct nrm__cuda_scope *scope, const void *ptr, size_t nbytes,
              nrm_CUmemLocation place, nrm_stream *stream)
{
    nrm_CUresult code = scope->driver->cuMemPrefetchAsync(
        (nrm_CUdeviceptr)(uintptr_t)ptr, nbytes, place, 0,
        (nrm_CUstream)nrm_stream_handle(stream));
    return code == NRM_CUDA_SUCCESS
               ? NRM_OK
               : nrm__cuda_error(code, "cuMemPrefetchAsync of %zu B", nbytes);
}

nrm_status
nrm__prefetch(const void *ptr, size_t nbytes, int target, int device,
              nrm_stream *stream)
{
    struct nrm__cuda_scope scope;
    nrm_CUmemLocation place = {.type = NRM_CU_MEM_LOCATION_TYPE_HOST};
    if (nbytes == 0) {
        return NRM_OK;
    }
    NRM_TRY(nrm__cuda_enter(device, &scope));
    if (target != NRM__PREFETCH_TO_HOST) {
        place.type = NRM_CU_MEM_LOCATION_TYPE_DEVICE;
        place.id = target;
    }
    int asked = target == NRM__PREFETCH_TO_HOST ? scope.device : target;
    nrm_status status = NRM_OK;
    if (asked >= scope.driver->n_devices) {
        status = nrm__error(NRM_INVALID_VALUE, "there is no device %d, only %d of them",
                            asked, scope.driver->n_devices);
    }
    else if (scope.driver->cuMemPrefetchAsync != NULL &&
             nrm__cuda_attribute(
                 asked, NRM_CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS) != 0) {
        status = prefetch_here(&scope, ptr, nbytes, place, stream);
    }
    nrm__cuda_leave(&scope);
    return status;
}
