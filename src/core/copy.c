/*
 * A private copy, on a stream of its own: it must not wait for the work of others, nor
 * be seen by captures of the legacy stream.
 */
#include "core/copy.h"

#include "base/error.h"
#include "core/hooks.h"
#include "cuda/context.h"
#include "nrm/resource.h"
#include "os/system.h"

static nrm_CUresult
copy_timed(const struct nrm__driver *driver, nrm_CUdeviceptr target, const void *host,
           size_t nbytes, double *out_seconds)
{
    nrm_CUstream stream;
    nrm_CUresult code = driver->cuStreamCreate(&stream, NRM_CU_STREAM_NON_BLOCKING);
    if (code != NRM_CUDA_SUCCESS) {
        return code;
    }
    uint64_t start = nrm__clock_ns();
    code = driver->cuMemcpyHtoDAsync(target, host, nbytes, stream);
    if (code == NRM_CUDA_SUCCESS) {
        code = driver->cuStreamSynchronize(stream);
    }
    *out_seconds = (double)(nrm__clock_ns() - start) * 1e-9;
    (void)driver->cuStreamDestroy(stream);
    return code;
}

static nrm_status
copy_detached(const void *host, size_t nbytes, double *out_seconds)
{
    struct nrm__cuda_scope scope;
    nrm_CUdeviceptr target;
    double seconds;
    NRM_TRY(nrm__cuda_enter(NRM_DEVICE_NONE, &scope));
    nrm_CUresult code = scope.driver->cuMemAlloc(&target, nbytes);
    if (code == NRM_CUDA_SUCCESS) {
        code = copy_timed(scope.driver, target, host, nbytes, &seconds);
        (void)scope.driver->cuMemFree(target);
    }
    nrm__cuda_leave(&scope);
    if (code != NRM_CUDA_SUCCESS) {
        return nrm__cuda_error(code, "a copy of %zu B to device %d", nbytes,
                               scope.device);
    }
    *out_seconds = seconds;
    return NRM_OK;
}

nrm_status
nrm__copy_to_device_seconds(const void *host, size_t nbytes, double *out_seconds)
{
    if (host == NULL || nbytes == 0) {
        return nrm__error(NRM_INVALID_VALUE, "nothing to copy");
    }
    void *token = nrm__detach();
    nrm_status status = copy_detached(host, nbytes, out_seconds);
    nrm__attach(token);
    return status;
}
