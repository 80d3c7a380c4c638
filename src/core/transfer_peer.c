/*
 * Copies from one device's memory to another's.
 *
 * Memory that is mapped, or of a memory pool, is open to its own device alone unless
 * somebody opened it to others: an ordinary copy on a stream of the other device is an
 * invalid value there. The peer calls name a context for each side, so that the driver
 * finds the memory whoever it is open to, and itself decides whether the bytes go
 * straight from device to device or over the host.
 *
 * They are documented for any two contexts, but not what they make of all memory. So
 * what is refused as a box is tried by rows, and what is refused as a row goes over
 * page-locked memory: then the call waits for the stream and for the bytes. The same
 * bytes go to the same places every time. In a capture none of it is possible: a peer
 * call breaks it.
 */
#include "core/transfer_peer.h"

enum { BETWEEN_NBYTES = 1 << 22 };

void
nrm__transfer_peers_init(struct nrm__transfer_peers *peers, nrm_CUcontext dst,
                         nrm_CUcontext src)
{
    *peers = (struct nrm__transfer_peers){.dst = dst, .src = src};
}

void
nrm__transfer_peers_finish(struct nrm__transfer_peers *peers,
                           const struct nrm__driver *driver)
{
    if (peers->between != NULL) {
        (void)driver->cuMemFreeHost(peers->between); /* nothing is pending on it */
        peers->between = NULL;
    }
}

static nrm_CUdeviceptr
device_address(const void *ptr)
{
    return (nrm_CUdeviceptr)(uintptr_t)ptr;
}

/* What another way may still do. */
static bool
is_refusal(nrm_CUresult code)
{
    return code == NRM_CUDA_ERROR_INVALID_VALUE ||
           code == NRM_CUDA_ERROR_INVALID_CONTEXT ||
           code == NRM_CUDA_ERROR_PEER_ACCESS_UNSUPPORTED ||
           code == NRM_CUDA_ERROR_PEER_ACCESS_NOT_ENABLED ||
           code == NRM_CUDA_ERROR_NOT_SUPPORTED;
}

static nrm_CUresult
copy_box(const struct nrm__transfer_peers *peers, const struct nrm__driver *driver,
         const struct nrm__transfer_plan *plan, char *dst, const char *src,
         nrm_CUstream stream)
{
    bool has_planes = plan->n_planes > 1;
    nrm_CUDA_MEMCPY3D_PEER copy = {
        .srcMemoryType = NRM_CU_MEMORYTYPE_DEVICE,
        .srcDevice = device_address(src),
        .srcContext = peers->src,
        .srcPitch = (size_t)plan->src_pitch,
        .srcHeight = has_planes ? plan->src_height : plan->n_rows,
        .dstMemoryType = NRM_CU_MEMORYTYPE_DEVICE,
        .dstDevice = device_address(dst),
        .dstContext = peers->dst,
        .dstPitch = (size_t)plan->dst_pitch,
        .dstHeight = has_planes ? plan->dst_height : plan->n_rows,
        .WidthInBytes = plan->width,
        .Height = plan->n_rows,
        .Depth = plan->n_planes,
    };
    return driver->cuMemcpy3DPeerAsync(&copy, stream);
}

/* ---- over the host ---- */

/* Between the memory of a context and the host; it is done when this returns. The
   calling thread's stream, so that nothing of others is waited for. */
static nrm_CUresult
copy_half(const struct nrm__transfer_peers *peers, const struct nrm__driver *driver,
          char *dst, const char *src, size_t nbytes)
{
    nrm_CUstream stream = (nrm_CUstream)NRM_STREAM_HANDLE_PER_THREAD;
    nrm_CUcontext popped;
    nrm_CUresult code = driver->cuCtxPushCurrent(dst == NULL ? peers->src : peers->dst);
    if (code != NRM_CUDA_SUCCESS) {
        return code;
    }
    code = dst == NULL ? driver->cuMemcpyDtoHAsync(peers->between, device_address(src),
                                                   nbytes, stream)
                       : driver->cuMemcpyHtoDAsync(device_address(dst), peers->between,
                                                   nbytes, stream);
    nrm_CUresult waited = driver->cuStreamSynchronize(stream);
    (void)driver->cuCtxPopCurrent(&popped); /* what was pushed is there */
    return code == NRM_CUDA_SUCCESS ? waited : code;
}

static nrm_CUresult
copy_over_host(struct nrm__transfer_peers *peers, const struct nrm__driver *driver,
               char *dst, const char *src, size_t nbytes, nrm_CUstream stream)
{
    nrm_CUresult code = driver->cuStreamSynchronize(stream);
    if (code == NRM_CUDA_SUCCESS && peers->between == NULL) {
        code = driver->cuMemHostAlloc(&peers->between, BETWEEN_NBYTES,
                                      NRM_CU_MEMHOSTALLOC_PORTABLE);
    }
    while (nbytes > 0 && code == NRM_CUDA_SUCCESS) {
        size_t n = nbytes < BETWEEN_NBYTES ? nbytes : BETWEEN_NBYTES;
        code = copy_half(peers, driver, NULL, src, n);
        if (code == NRM_CUDA_SUCCESS) {
            code = copy_half(peers, driver, dst, NULL, n);
        }
        dst += n;
        src += n;
        nbytes -= n;
    }
    return code;
}

/* ---- the way that the driver takes ---- */

static nrm_CUresult
copy_row(struct nrm__transfer_peers *peers, const struct nrm__driver *driver, char *dst,
         const char *src, size_t nbytes, nrm_CUstream stream)
{
    if (peers->step < NRM__TRANSFER_OVER_HOST) {
        nrm_CUresult code = driver->cuMemcpyPeerAsync(device_address(dst), peers->dst,
                                                      device_address(src), peers->src,
                                                      nbytes, stream);
        if (!is_refusal(code)) {
            return code;
        }
        peers->step = NRM__TRANSFER_OVER_HOST;
    }
    return copy_over_host(peers, driver, dst, src, nbytes, stream);
}

static nrm_CUresult
copy_rows(struct nrm__transfer_peers *peers, const struct nrm__driver *driver,
          const struct nrm__transfer_plan *plan, char *dst, const char *src,
          nrm_CUstream stream)
{
    ptrdiff_t dst_slice = (ptrdiff_t)plan->dst_height * plan->dst_pitch;
    ptrdiff_t src_slice = (ptrdiff_t)plan->src_height * plan->src_pitch;
    nrm_CUresult code = NRM_CUDA_SUCCESS;
    for (size_t n = 0; n < plan->n_planes * plan->n_rows && code == NRM_CUDA_SUCCESS;
         n++) {
        ptrdiff_t plane = (ptrdiff_t)(n / plan->n_rows);
        ptrdiff_t row = (ptrdiff_t)(n % plan->n_rows);
        code = copy_row(peers, driver, dst + plane * dst_slice + row * plan->dst_pitch,
                        src + plane * src_slice + row * plan->src_pitch, plan->width,
                        stream);
    }
    return code;
}

nrm_CUresult
nrm__transfer_peers_copy(struct nrm__transfer_peers *peers,
                         const struct nrm__driver *driver,
                         const struct nrm__transfer_plan *plan, char *dst,
                         const char *src, nrm_CUstream stream)
{
    bool is_row = plan->n_planes * plan->n_rows == 1;
    if (peers->step == NRM__TRANSFER_BOXES && !is_row) {
        nrm_CUresult code = copy_box(peers, driver, plan, dst, src, stream);
        if (!is_refusal(code)) {
            return code;
        }
        peers->step = NRM__TRANSFER_ROWS;
    }
    return copy_rows(peers, driver, plan, dst, src, stream);
}
