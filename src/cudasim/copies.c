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

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* Whether the device reaches it: memory of a pool is for its own device, what is mapped
 * for those that it was opened to, and all else, with unified addresses, for every
 * one. */
static bool
is_reached(const struct sim_span *span, size_t nbytes, int device, bool writes)
{
    const struct sim_range *range = span->range;
    if (range->kind == SIM_VIRTUAL) {
        return sim_virtual_is_open(range, span->address, nbytes, device, writes);
    }
    return range->kind != SIM_DEVICE || range->pool == NULL ||
           range->context->ordinal == device;
}

/* Nothing but what is mapped, and open to the device that copies, can be named. */
static nrm_CUresult
resolve(int device, const struct sim_copy *copy, struct sim_span *span,
        enum sim_side side, bool writes)
{
    size_t nbytes = sim_copy_extent(copy, span);
    span->range = sim_range_find(span->address);
    if (span->range == NULL) {
        bool found = side == SIM_ANY || sim_memory_moves(span->address, nbytes);
        return found && span->address != 0 ? NRM_CUDA_SUCCESS
                                           : NRM_CUDA_ERROR_INVALID_VALUE;
    }
    size_t rest = span->range->nbytes - (span->address - span->range->start);
    span->is_reserved = span->range->kind == SIM_VIRTUAL;
    if (nbytes > rest || span->range->kind == SIM_PHYSICAL ||
        !sim_pool_holds(span->range, span->address, nbytes) ||
        !is_reached(span, nbytes, device, writes)) {
        return NRM_CUDA_ERROR_INVALID_VALUE;
    }
    return NRM_CUDA_SUCCESS;
}

nrm_CUresult
sim_copy_resolve(const struct sim_queue *queue, struct sim_copy *copy,
                 enum sim_side dst, enum sim_side src)
{
    int device = queue->context->ordinal;
    nrm_CUresult result = resolve(device, copy, &copy->dst, dst, true);
    return result == NRM_CUDA_SUCCESS ? resolve(device, copy, &copy->src, src, false)
                                      : result;
}

bool
sim_copy_is_in_place(const struct sim_queue *queue)
{
    const int *attributes = sim.devices[queue->context->ordinal].attributes;
    return attributes[NRM_CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS] != 0;
}

nrm_CUresult
sim_copy_stage(struct sim_op *op)
{
    struct sim_copy *copy = &op->copy;
    size_t n_rows = sim_copy_n_rows(copy);
    op->staged = malloc(copy->width * n_rows);
    if (op->staged == NULL) {
        return NRM_CUDA_ERROR_OUT_OF_MEMORY;
    }
    sim_checker_stage(op);
    sim_unlock(); /* the driver's lock stays: nothing that the copy uses can go away */
    bool complete = true;
    for (size_t row = 0; row < n_rows; row++) {
        complete = complete &&
                   sim_bytes_read(op->staged + row * copy->width,
                                  sim_copy_row(copy, &copy->src, row), copy->width);
    }
    sim_lock();
    if (!complete) {
        sim_fault("%s read 0x%zx, which is not mapped", sim_call_name(op->call),
                  copy->src.address);
        return NRM_CUDA_ERROR_INVALID_VALUE;
    }
    copy->src = (struct sim_span){.address = (uintptr_t)op->staged,
                                  .pitch = copy->width,
                                  .slice = copy->width * copy->height};
    return NRM_CUDA_SUCCESS;
}

nrm_CUresult
sim_copy_wait(struct sim_call *call, struct sim_queue *queue)
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
    bool in_place = sim_copy_is_in_place(queue);
    struct sim_op *op = sim_op_create(SIM_OP_COPY, call->id);
    if (op == NULL) {
        return NRM_CUDA_ERROR_OUT_OF_MEMORY;
    }
    op->copy = *copy;
    if (copy->src.range == NULL && !in_place) {
        nrm_CUresult result = sim_copy_stage(op);
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
    return waits ? sim_copy_wait(call, queue) : NRM_CUDA_SUCCESS;
}

/* Finishes every entry point that makes one copy. */
static nrm_CUresult
copy(struct sim_call *call, struct sim_copy copy, enum sim_side dst, enum sim_side src,
     nrm_CUstream stream, bool synchronous)
{
    struct sim_queue *queue;
    nrm_CUresult result = sim_stream_find(call, stream, &queue);
    if (result == NRM_CUDA_SUCCESS && copy.width > 0 && sim_copy_n_rows(&copy) > 0) {
        result = sim_copy_resolve(queue, &copy, dst, src);
        if (result == NRM_CUDA_SUCCESS) {
            result = submit_copy(call, queue, &copy, synchronous);
        }
    }
    return sim_call_end(call, result);
}

nrm_CUresult
cuMemcpyHtoDAsync_v2(nrm_CUdeviceptr dst, const void *src, size_t nbytes,
                     nrm_CUstream stream)
{
    SIM_BEGIN(call, cuMemcpyHtoDAsync, dst, SIM_PTR(src), nbytes, SIM_PTR(stream));
    return copy(&call, sim_copy_flat(dst, (uintptr_t)src, nbytes), SIM_DRIVERS, SIM_ANY,
                stream, false);
}

nrm_CUresult
cuMemcpyDtoHAsync_v2(void *dst, nrm_CUdeviceptr src, size_t nbytes, nrm_CUstream stream)
{
    SIM_BEGIN(call, cuMemcpyDtoHAsync, SIM_PTR(dst), src, nbytes, SIM_PTR(stream));
    return copy(&call, sim_copy_flat((uintptr_t)dst, src, nbytes), SIM_ANY, SIM_DRIVERS,
                stream, false);
}

nrm_CUresult
cuMemcpyAsync(nrm_CUdeviceptr dst, nrm_CUdeviceptr src, size_t nbytes,
              nrm_CUstream stream)
{
    SIM_BEGIN(call, cuMemcpyAsync, dst, src, nbytes, SIM_PTR(stream));
    return copy(&call, sim_copy_flat(dst, src, nbytes), SIM_ANY, SIM_ANY, stream,
                false);
}

nrm_CUresult
cuMemcpyHtoD_v2(nrm_CUdeviceptr dst, const void *src, size_t nbytes)
{
    SIM_BEGIN(call, cuMemcpyHtoD, dst, SIM_PTR(src), nbytes);
    return copy(&call, sim_copy_flat(dst, (uintptr_t)src, nbytes), SIM_DRIVERS, SIM_ANY,
                NULL, true);
}

nrm_CUresult
cuMemcpyDtoH_v2(void *dst, nrm_CUdeviceptr src, size_t nbytes)
{
    SIM_BEGIN(call, cuMemcpyDtoH, SIM_PTR(dst), src, nbytes);
    return copy(&call, sim_copy_flat((uintptr_t)dst, src, nbytes), SIM_ANY, SIM_DRIVERS,
                NULL, true);
}

nrm_CUresult
cuMemcpyDtoD_v2(nrm_CUdeviceptr dst, nrm_CUdeviceptr src, size_t nbytes)
{
    SIM_BEGIN(call, cuMemcpyDtoD, dst, src, nbytes);
    return copy(&call, sim_copy_flat(dst, src, nbytes), SIM_DRIVERS, SIM_DRIVERS, NULL,
                false);
}

nrm_CUresult
cuMemcpy(nrm_CUdeviceptr dst, nrm_CUdeviceptr src, size_t nbytes)
{
    SIM_BEGIN(call, cuMemcpy, dst, src, nbytes);
    return copy(&call, sim_copy_flat(dst, src, nbytes), SIM_ANY, SIM_ANY, NULL, true);
}

/* ---- in two and three dimensions ------------------------------------------------- */

/* One side as the requests describe it. */
struct face {
    nrm_CUmemorytype type;
    const void *host;
    nrm_CUdeviceptr device;
    size_t pitch, height;      /* 0: the rows, or the planes, lie side by side */
    size_t column, row, plane; /* where the copy begins */
};

/* False: an array, which is not modelled, or more than the face has room for. */
static bool
find_span(const struct face *face, const struct sim_copy *copy, struct sim_span *span,
          enum sim_side *side)
{
    bool is_host = face->type == NRM_CU_MEMORYTYPE_HOST;
    bool is_array = !is_host && face->type != NRM_CU_MEMORYTYPE_DEVICE &&
                    face->type != NRM_CU_MEMORYTYPE_UNIFIED;
    size_t height = face->height == 0 ? copy->height : face->height;
    if (is_array || (face->pitch != 0 && face->pitch < face->column + copy->width) ||
        (face->height != 0 && face->height < face->row + copy->height)) {
        return false;
    }
    *side = face->type == NRM_CU_MEMORYTYPE_DEVICE ? SIM_DRIVERS : SIM_ANY;
    span->pitch = face->pitch == 0 ? copy->width : face->pitch;
    span->slice = height * span->pitch;
    span->address = (is_host ? (uintptr_t)face->host : (uintptr_t)face->device) +
                    face->plane * span->slice + face->row * span->pitch + face->column;
    return true;
}

static nrm_CUresult
copy_faces(struct sim_call *call, struct sim_copy box, const struct face *dst,
           const struct face *src, nrm_CUstream stream)
{
    enum sim_side to;
    enum sim_side from;
    if (!find_span(dst, &box, &box.dst, &to) ||
        !find_span(src, &box, &box.src, &from)) {
        return sim_call_end(call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    return copy(call, box, to, from, stream, false);
}

nrm_CUresult
cuMemcpy2DAsync_v2(const nrm_CUDA_MEMCPY2D *r, nrm_CUstream stream)
{
    SIM_BEGIN(call, cuMemcpy2DAsync, SIM_PTR(r), SIM_PTR(stream));
    if (r == NULL) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    struct face dst = {.type = r->dstMemoryType,
                       .host = r->dstHost,
                       .device = r->dstDevice,
                       .pitch = r->dstPitch,
                       .column = r->dstXInBytes,
                       .row = r->dstY};
    struct face src = {.type = r->srcMemoryType,
                       .host = r->srcHost,
                       .device = r->srcDevice,
                       .pitch = r->srcPitch,
                       .column = r->srcXInBytes,
                       .row = r->srcY};
    struct sim_copy plane = {.width = r->WidthInBytes, .height = r->Height, .depth = 1};
    return copy_faces(&call, plane, &dst, &src, stream);
}

/* False: it says too little, as a height of 0 does where there are several planes. */
static bool
read_box(const nrm_CUDA_MEMCPY3D *r, struct sim_copy *box, struct face *dst,
         struct face *src)
{
    bool has_heights = r->dstHeight != 0 && r->srcHeight != 0;
    *box = (struct sim_copy){
        .width = r->WidthInBytes, .height = r->Height, .depth = r->Depth};
    *dst = (struct face){.type = r->dstMemoryType,
                         .host = r->dstHost,
                         .device = r->dstDevice,
                         .pitch = r->dstPitch,
                         .height = r->dstHeight,
                         .column = r->dstXInBytes,
                         .row = r->dstY,
                         .plane = r->dstZ};
    *src = (struct face){.type = r->srcMemoryType,
                         .host = r->srcHost,
                         .device = r->srcDevice,
                         .pitch = r->srcPitch,
                         .height = r->srcHeight,
                         .column = r->srcXInBytes,
                         .row = r->srcY,
                         .plane = r->srcZ};
    return (has_heights || r->Depth <= 1) && r->dstLOD == 0 && r->srcLOD == 0;
}

nrm_CUresult
cuMemcpy3DAsync_v2(const nrm_CUDA_MEMCPY3D *r, nrm_CUstream stream)
{
    struct sim_copy box;
    struct face dst;
    struct face src;
    SIM_BEGIN(call, cuMemcpy3DAsync, SIM_PTR(r), SIM_PTR(stream));
    if (r == NULL || !read_box(r, &box, &dst, &src) || r->reserved0 != NULL ||
        r->reserved1 != NULL) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    return copy_faces(&call, box, &dst, &src, stream);
}

/* ---- between devices ------------------------------------------------------------- */

/* What each side's context reaches, whatever the stream's device does: the driver
 * copies itself, over the host where the devices have no way to each other. */
static nrm_CUresult
resolve_between(struct sim_copy *copy, nrm_CUcontext dst, nrm_CUcontext src)
{
    nrm_CUcontext contexts[] = {dst, src};
    struct sim_span *spans[] = {&copy->dst, &copy->src};
    for (int i = 0; i < 2; i++) {
        if (!sim_context_is_handle(contexts[i])) {
            return NRM_CUDA_ERROR_INVALID_CONTEXT;
        }
        nrm_CUresult result = sim_context_check(contexts[i]);
        if (result == NRM_CUDA_SUCCESS) {
            result = resolve(contexts[i]->ordinal, copy, spans[i], SIM_DRIVERS, i == 0);
        }
        if (result != NRM_CUDA_SUCCESS) {
            return result;
        }
    }
    return NRM_CUDA_SUCCESS;
}

static nrm_CUresult
copy_between(struct sim_call *call, struct sim_copy copy, nrm_CUcontext dst,
             nrm_CUcontext src, nrm_CUstream stream)
{
    struct sim_queue *queue;
    nrm_CUresult result = sim_stream_find(call, stream, &queue);
    if (result == NRM_CUDA_SUCCESS && queue->capture != NULL) {
        result = sim_capture_spoil(queue);
    }
    if (result == NRM_CUDA_SUCCESS && copy.width > 0 && sim_copy_n_rows(&copy) > 0) {
        result = resolve_between(&copy, dst, src);
        if (result == NRM_CUDA_SUCCESS) {
            result = submit_copy(call, queue, &copy, false);
        }
    }
    return sim_call_end(call, result);
}

nrm_CUresult
cuMemcpyPeerAsync(nrm_CUdeviceptr dst, nrm_CUcontext dst_context, nrm_CUdeviceptr src,
                  nrm_CUcontext src_context, size_t nbytes, nrm_CUstream stream)
{
    SIM_BEGIN(call, cuMemcpyPeerAsync, dst, src, nbytes, SIM_PTR(stream));
    return copy_between(&call, sim_copy_flat(dst, src, nbytes), dst_context,
                        src_context, stream);
}

/* The request is laid out as that of cuMemcpy3DAsync, with a context of each side where
 * the other has reserved words. */
_Static_assert(sizeof(nrm_CUDA_MEMCPY3D_PEER) == sizeof(nrm_CUDA_MEMCPY3D) &&
                   offsetof(nrm_CUDA_MEMCPY3D_PEER, srcContext) ==
                       offsetof(nrm_CUDA_MEMCPY3D, reserved0) &&
                   offsetof(nrm_CUDA_MEMCPY3D_PEER, dstContext) ==
                       offsetof(nrm_CUDA_MEMCPY3D, reserved1) &&
                   offsetof(nrm_CUDA_MEMCPY3D_PEER, Depth) ==
                       offsetof(nrm_CUDA_MEMCPY3D, Depth),
               "the two requests differ in the contexts only");

nrm_CUresult
cuMemcpy3DPeerAsync(const nrm_CUDA_MEMCPY3D_PEER *r, nrm_CUstream stream)
{
    nrm_CUDA_MEMCPY3D request;
    struct sim_copy box;
    struct face dst;
    struct face src;
    enum sim_side ignored;
    SIM_BEGIN(call, cuMemcpy3DPeerAsync, SIM_PTR(r), SIM_PTR(stream));
    if (r == NULL) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    memcpy(&request, r, sizeof request);
    if (!read_box(&request, &box, &dst, &src) || dst.type == NRM_CU_MEMORYTYPE_HOST ||
        src.type == NRM_CU_MEMORYTYPE_HOST ||
        !find_span(&dst, &box, &box.dst, &ignored) ||
        !find_span(&src, &box, &box.src, &ignored)) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    return copy_between(&call, box, r->dstContext, r->srcContext, stream);
}

/* ---- fills ----------------------------------------------------------------------- */

static nrm_CUresult
fill(struct sim_call *call, uintptr_t dst, unsigned char value, size_t nbytes,
     nrm_CUstream stream)
{
    struct sim_queue *queue;
    struct sim_copy area = sim_copy_flat(dst, 0, nbytes);
    nrm_CUresult result = sim_stream_find(call, stream, &queue);
    if (result == NRM_CUDA_SUCCESS && nbytes > 0) {
        result = resolve(queue->context->ordinal, &area, &area.dst, SIM_DRIVERS, true);
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
