/* Copies and fills: what they accept, and how they relate to the caller's time.
 *
 * Page-locked memory is copied asynchronously, when the stream gets there. Pageable
 * sources are staged before the call returns; a call with a pageable destination
 * returns when the bytes are there. Where the device reads pageable memory itself (the
 * attribute PAGEABLE_MEMORY_ACCESS) such copies are asynchronous as well.
 *
 * A copy must stay inside the memory that it starts in: one that begins in a
 * registration and runs out of it fails, one that begins in pageable memory and runs
 * into one works. */
#include "checker.h"

#include <stdlib.h>

enum side {
    DRIVERS, /* must be memory that the driver knows */
    ANY,     /* may be pageable */
};

static size_t
extent(size_t pitch, size_t width, size_t height)
{
    return (height - 1) * pitch + width;
}

/* Nothing but what is mapped, and open to the device that copies, can be named. */
static nrm_CUresult
resolve(const struct sim_queue *queue, struct sim_span *span, size_t width,
        size_t height, enum side side, bool writes)
{
    size_t nbytes = extent(span->pitch, width, height);
    span->range = sim_range_find(span->address);
    if (span->range == NULL) {
        return side == ANY && span->address != 0 ? NRM_CUDA_SUCCESS
                                                 : NRM_CUDA_ERROR_INVALID_VALUE;
    }
    size_t rest = span->range->nbytes - (span->address - span->range->start);
    span->is_reserved = span->range->kind == SIM_VIRTUAL;
    if (nbytes > rest || span->range->kind == SIM_PHYSICAL ||
        (span->is_reserved && !sim_virtual_is_open(span->range, span->address, nbytes,
                                                   queue->context->ordinal, writes))) {
        return NRM_CUDA_ERROR_INVALID_VALUE;
    }
    return NRM_CUDA_SUCCESS;
}

/* Takes the pageable source as it is now, rows side by side. */
static nrm_CUresult
stage(struct sim_op *op)
{
    struct sim_copy *copy = &op->copy;
    op->staged = malloc(copy->width * copy->height);
    if (op->staged == NULL) {
        return NRM_CUDA_ERROR_OUT_OF_MEMORY;
    }
    sim_checker_stage(op);
    sim_unlock(); /* the driver's lock stays: nothing that the copy uses can go away */
    bool complete = true;
    for (size_t row = 0; row < copy->height; row++) {
        complete = complete && sim_bytes_read(op->staged + row * copy->width,
                                              copy->src.address + row * copy->src.pitch,
                                              copy->width);
    }
    sim_lock();
    if (!complete) {
        sim_fault("%s read 0x%zx, which is not mapped", sim_call_name(op->call),
                  copy->src.address);
        return NRM_CUDA_ERROR_INVALID_VALUE;
    }
    copy->src.address = (uintptr_t)op->staged;
    copy->src.pitch = copy->width;
    return NRM_CUDA_SUCCESS;
}

/* The rest of the call has no part in the driver's lock. */
static nrm_CUresult
wait_for_queue(struct sim_call *call, struct sim_queue *queue)
{
    struct sim_marker *marker = sim_marker_of_queue(queue);
    if (call->has_driver_lock) {
        pthread_mutex_unlock(&sim.driver_lock);
        call->has_driver_lock = false;
    }
    return sim_marker_wait(marker);
}

static nrm_CUresult
submit_copy(struct sim_call *call, struct sim_queue *queue, const struct sim_copy *copy,
            bool synchronous)
{
    const int *attributes = sim.devices[queue->context->ordinal].attributes;
    bool in_place = attributes[NRM_CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS] != 0;
    struct sim_op *op = sim_op_create(SIM_OP_COPY, call->id);
    if (op == NULL) {
        return NRM_CUDA_ERROR_OUT_OF_MEMORY;
    }
    op->copy = *copy;
    if (copy->src.range == NULL && !in_place) {
        nrm_CUresult result = stage(op);
        if (result != NRM_CUDA_SUCCESS) {
            sim_op_destroy(op);
            return result;
        }
    }
    bool captured = queue->capture != NULL;
    nrm_CUresult result = sim_submit(queue, op);
    if (result != NRM_CUDA_SUCCESS || captured) {
        return result;
    }
    bool waits = synchronous || (copy->dst.range == NULL && !in_place);
    return waits ? wait_for_queue(call, queue) : NRM_CUDA_SUCCESS;
}

/* Finishes every copying entry point. */
static nrm_CUresult
copy(struct sim_call *call, struct sim_copy copy, enum side dst, enum side src,
     nrm_CUstream stream, bool synchronous)
{
    struct sim_queue *queue;
    nrm_CUresult result = sim_stream_find(call, stream, &queue);
    if (result == NRM_CUDA_SUCCESS && copy.width > 0 && copy.height > 0) {
        result = resolve(queue, &copy.dst, copy.width, copy.height, dst, true);
        if (result == NRM_CUDA_SUCCESS) {
            result = resolve(queue, &copy.src, copy.width, copy.height, src, false);
        }
        if (result == NRM_CUDA_SUCCESS) {
            result = submit_copy(call, queue, &copy, synchronous);
        }
    }
    return sim_call_end(call, result);
}

static struct sim_copy
flat(uintptr_t dst, uintptr_t src, size_t nbytes)
{
    return (struct sim_copy){.dst = {.address = dst, .pitch = nbytes},
                             .src = {.address = src, .pitch = nbytes},
                             .width = nbytes,
                             .height = 1};
}

nrm_CUresult
cuMemcpyHtoDAsync_v2(nrm_CUdeviceptr dst, const void *src, size_t nbytes,
                     nrm_CUstream stream)
{
    SIM_BEGIN(call, cuMemcpyHtoDAsync, dst, SIM_PTR(src), nbytes, SIM_PTR(stream));
    return copy(&call, flat(dst, (uintptr_t)src, nbytes), DRIVERS, ANY, stream, false);
}

nrm_CUresult
cuMemcpyDtoHAsync_v2(void *dst, nrm_CUdeviceptr src, size_t nbytes, nrm_CUstream stream)
{
    SIM_BEGIN(call, cuMemcpyDtoHAsync, SIM_PTR(dst), src, nbytes, SIM_PTR(stream));
    return copy(&call, flat((uintptr_t)dst, src, nbytes), ANY, DRIVERS, stream, false);
}

nrm_CUresult
cuMemcpyAsync(nrm_CUdeviceptr dst, nrm_CUdeviceptr src, size_t nbytes,
              nrm_CUstream stream)
{
    SIM_BEGIN(call, cuMemcpyAsync, dst, src, nbytes, SIM_PTR(stream));
    return copy(&call, flat(dst, src, nbytes), ANY, ANY, stream, false);
}

nrm_CUresult
cuMemcpyHtoD_v2(nrm_CUdeviceptr dst, const void *src, size_t nbytes)
{
    SIM_BEGIN(call, cuMemcpyHtoD, dst, SIM_PTR(src), nbytes);
    return copy(&call, flat(dst, (uintptr_t)src, nbytes), DRIVERS, ANY, NULL, true);
}

nrm_CUresult
cuMemcpyDtoH_v2(void *dst, nrm_CUdeviceptr src, size_t nbytes)
{
    SIM_BEGIN(call, cuMemcpyDtoH, SIM_PTR(dst), src, nbytes);
    return copy(&call, flat((uintptr_t)dst, src, nbytes), ANY, DRIVERS, NULL, true);
}

nrm_CUresult
cuMemcpyDtoD_v2(nrm_CUdeviceptr dst, nrm_CUdeviceptr src, size_t nbytes)
{
    SIM_BEGIN(call, cuMemcpyDtoD, dst, src, nbytes);
    return copy(&call, flat(dst, src, nbytes), DRIVERS, DRIVERS, NULL, false);
}

nrm_CUresult
cuMemcpy(nrm_CUdeviceptr dst, nrm_CUdeviceptr src, size_t nbytes)
{
    SIM_BEGIN(call, cuMemcpy, dst, src, nbytes);
    return copy(&call, flat(dst, src, nbytes), ANY, ANY, NULL, true);
}

/* ---- in two dimensions ----------------------------------------------------------- */

/* False: an array, which is not modelled. */
static bool
find_base(nrm_CUmemorytype type, const void *host, nrm_CUdeviceptr device,
          struct sim_span *span, enum side *side)
{
    *side = type == NRM_CU_MEMORYTYPE_DEVICE ? DRIVERS : ANY;
    switch (type) {
    case NRM_CU_MEMORYTYPE_HOST:
        span->address = (uintptr_t)host;
        return true;
    case NRM_CU_MEMORYTYPE_DEVICE:
    case NRM_CU_MEMORYTYPE_UNIFIED:
        span->address = device;
        return true;
    default:
        return false;
    }
}

nrm_CUresult
cuMemcpy2DAsync_v2(const nrm_CUDA_MEMCPY2D *request, nrm_CUstream stream)
{
    SIM_BEGIN(call, cuMemcpy2DAsync, SIM_PTR(request), SIM_PTR(stream));
    const nrm_CUDA_MEMCPY2D *r = request;
    struct sim_copy planar = {0};
    enum side dst;
    enum side src;
    if (r == NULL ||
        !find_base(r->dstMemoryType, r->dstHost, r->dstDevice, &planar.dst, &dst) ||
        !find_base(r->srcMemoryType, r->srcHost, r->srcDevice, &planar.src, &src) ||
        (r->dstPitch != 0 && r->dstPitch < r->dstXInBytes + r->WidthInBytes) ||
        (r->srcPitch != 0 && r->srcPitch < r->srcXInBytes + r->WidthInBytes)) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    planar.width = r->WidthInBytes;
    planar.height = r->Height;
    planar.dst.pitch = r->dstPitch == 0 ? planar.width : r->dstPitch;
    planar.src.pitch = r->srcPitch == 0 ? planar.width : r->srcPitch;
    planar.dst.address += r->dstY * planar.dst.pitch + r->dstXInBytes;
    planar.src.address += r->srcY * planar.src.pitch + r->srcXInBytes;
    return copy(&call, planar, dst, src, stream, false);
}

/* ---- fills ----------------------------------------------------------------------- */

static nrm_CUresult
fill(struct sim_call *call, uintptr_t dst, unsigned char value, size_t nbytes,
     nrm_CUstream stream)
{
    struct sim_queue *queue;
    struct sim_copy area = flat(dst, 0, nbytes);
    nrm_CUresult result = sim_stream_find(call, stream, &queue);
    if (result == NRM_CUDA_SUCCESS && nbytes > 0) {
        result = resolve(queue, &area.dst, nbytes, 1, DRIVERS, true);
        if (result == NRM_CUDA_SUCCESS) {
            struct sim_op *op = sim_op_create(SIM_OP_FILL, call->id);
            if (op == NULL) {
                return sim_call_end(call, NRM_CUDA_ERROR_OUT_OF_MEMORY);
            }
            op->copy = area;
            op->value = value;
            result = sim_submit(queue, op);
        }
    }
    return sim_call_end(call, result);
}

nrm_CUresult
cuMemsetD8Async(nrm_CUdeviceptr dst, unsigned char value, size_t nbytes,
                nrm_CUstream stream)
{
    SIM_BEGIN(call, cuMemsetD8Async, dst, value, nbytes, SIM_PTR(stream));
    return fill(&call, dst, value, nbytes, stream);
}

/* Asynchronous towards the host, like the real one; ordered by the legacy stream. */
nrm_CUresult
cuMemsetD8_v2(nrm_CUdeviceptr dst, unsigned char value, size_t nbytes)
{
    SIM_BEGIN(call, cuMemsetD8, dst, value, nbytes);
    return fill(&call, dst, value, nbytes, NULL);
}
