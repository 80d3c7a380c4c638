/* Streams: handles of queues. A destroyed stream's queue finishes its work without one,
 * and its handle is the next to be given out. */
#include "checker.h"

struct sim_handles sim_streams = {.object_nbytes = sizeof(struct nrm_CUstream_st)};

/* The calling thread's own stream of its current context, made at first use. */
static nrm_CUresult
find_per_thread(const struct sim_call *call, struct sim_queue **out)
{
    struct sim_queue **mine = &call->thread->queues[call->context->index];
    if (*mine != NULL && (*mine)->context == NULL) { /* of a life that has ended */
        sim_queue_close(*mine);
        *mine = NULL;
    }
    if (*mine == NULL) {
        *mine = sim_queue_create(call->context);
        if (*mine == NULL) {
            return NRM_CUDA_ERROR_OUT_OF_MEMORY;
        }
        (*mine)->blocking = true;
    }
    *out = *mine;
    return NRM_CUDA_SUCCESS;
}

nrm_CUresult
sim_stream_find(const struct sim_call *call, nrm_CUstream stream,
                struct sim_queue **out)
{
    bool legacy = stream == NULL || stream == NRM_CU_STREAM_LEGACY;
    if (legacy || stream == NRM_CU_STREAM_PER_THREAD) {
        if (call->context == NULL) {
            return NRM_CUDA_ERROR_INVALID_CONTEXT;
        }
        if (!legacy) {
            return find_per_thread(call, out);
        }
        *out = call->context->legacy;
        return NRM_CUDA_SUCCESS;
    }
    if (!sim_handle_is_live(&sim_streams, stream)) {
        sim_fault("%s of 0x%zx, which is no stream (any more): a driver may crash",
                  sim_call_name(call->id), (size_t)stream);
        return NRM_CUDA_ERROR_INVALID_HANDLE;
    }
    *out = stream->queue;
    return sim_context_check(stream->queue->context);
}

nrm_CUresult
cuStreamCreate(nrm_CUstream *stream, unsigned int flags)
{
    SIM_BEGIN(call, cuStreamCreate, SIM_PTR(stream), flags);
    if (stream == NULL || (flags & ~(unsigned int)NRM_CU_STREAM_NON_BLOCKING) != 0) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    struct nrm_CUstream_st *created = sim_handle_create(&sim_streams);
    if (created == NULL) {
        return sim_call_end(&call, NRM_CUDA_ERROR_OUT_OF_MEMORY);
    }
    created->queue = sim_queue_create(call.context);
    if (created->queue == NULL) {
        sim_handle_destroy(&sim_streams, created);
        return sim_call_end(&call, NRM_CUDA_ERROR_OUT_OF_MEMORY);
    }
    created->queue->blocking = flags == NRM_CU_STREAM_DEFAULT;
    *stream = created;
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

nrm_CUresult
cuStreamDestroy_v2(nrm_CUstream stream)
{
    SIM_BEGIN(call, cuStreamDestroy, SIM_PTR(stream));
    if (!sim_handle_is_live(&sim_streams, stream)) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_HANDLE);
    }
    sim_capture_leave(stream->queue);
    stream->queue->held = false;
    sim_queue_close(stream->queue);
    sim_handle_destroy(&sim_streams, stream);
    sim_engine_wake();
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

/* Of a stream to be queried or waited for. */
static nrm_CUresult
find_quiet(const struct sim_call *call, nrm_CUstream stream, struct sim_queue **queue)
{
    nrm_CUresult result = sim_stream_find(call, stream, queue);
    if (result == NRM_CUDA_SUCCESS) {
        result = sim_capture_check_submit(*queue);
    }
    if (result == NRM_CUDA_SUCCESS && (*queue)->capture != NULL) {
        result = sim_capture_spoil(*queue);
    }
    return result;
}

nrm_CUresult
cuStreamQuery(nrm_CUstream stream)
{
    SIM_BEGIN(call, cuStreamQuery, SIM_PTR(stream));
    struct sim_queue *queue;
    nrm_CUresult result = find_quiet(&call, stream, &queue);
    if (result == NRM_CUDA_SUCCESS) {
        struct sim_marker *marker = sim_marker_of_queue(queue);
        result = marker == NULL                    ? NRM_CUDA_ERROR_OUT_OF_MEMORY
                 : sim_marker_ask(marker, call.id) ? NRM_CUDA_SUCCESS
                                                   : NRM_CUDA_ERROR_NOT_READY;
        sim_marker_release(marker);
    }
    return sim_call_end(&call, result);
}

nrm_CUresult
cuStreamSynchronize(nrm_CUstream stream)
{
    SIM_BEGIN(call, cuStreamSynchronize, SIM_PTR(stream));
    struct sim_queue *queue;
    nrm_CUresult result = find_quiet(&call, stream, &queue);
    if (result == NRM_CUDA_SUCCESS) {
        result = sim_marker_wait(sim_marker_of_queue(queue));
        sim_pools_synchronized();
    }
    return sim_call_end(&call, result);
}

nrm_CUresult
cuStreamWaitValue32_v2(nrm_CUstream stream, nrm_CUdeviceptr address, uint32_t value,
                       unsigned int flags)
{
    SIM_BEGIN(call, cuStreamWaitValue32, SIM_PTR(stream), address, value, flags);
    struct sim_queue *queue;
    nrm_CUresult result = sim_stream_find(&call, stream, &queue);
    if (result != NRM_CUDA_SUCCESS) {
        return sim_call_end(&call, result);
    }
    struct sim_range *range = sim_range_find(address);
    if (range == NULL || address % sizeof value != 0 ||
        range->start + range->nbytes - address < sizeof value ||
        range->kind == SIM_PHYSICAL ||
        (range->kind == SIM_VIRTUAL &&
         !sim_virtual_is_open(range, address, sizeof value, queue->context->ordinal,
                              false)) ||
        flags > NRM_CU_STREAM_WAIT_VALUE_NOR) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    struct sim_op *op = sim_op_create(SIM_OP_WAIT_VALUE, call.id);
    if (op == NULL) {
        return sim_call_end(&call, NRM_CUDA_ERROR_OUT_OF_MEMORY);
    }
    op->copy.src = (struct sim_span){
        .range = range, .address = address, .is_reserved = range->kind == SIM_VIRTUAL};
    op->value = value;
    op->condition = flags;
    return sim_call_end(&call, sim_submit(queue, op));
}

nrm_CUresult
cuLaunchHostFunc(nrm_CUstream stream, nrm_CUhostFn function, void *user_data)
{
    SIM_BEGIN(call, cuLaunchHostFunc, SIM_PTR(stream), (uint64_t)(uintptr_t)function,
              SIM_PTR(user_data));
    struct sim_queue *queue;
    nrm_CUresult result = sim_stream_find(&call, stream, &queue);
    if (result == NRM_CUDA_SUCCESS && function == NULL) {
        result = NRM_CUDA_ERROR_INVALID_VALUE;
    }
    if (result == NRM_CUDA_SUCCESS) {
        struct sim_op *op = sim_op_create(SIM_OP_HOST_FUNCTION, call.id);
        if (op == NULL) {
            return sim_call_end(&call, NRM_CUDA_ERROR_OUT_OF_MEMORY);
        }
        op->function = function;
        op->user_data = user_data;
        result = sim_submit(queue, op);
    }
    return sim_call_end(&call, result);
}

nrm_CUresult
cuStreamGetCtx(nrm_CUstream stream, nrm_CUcontext *context)
{
    SIM_BEGIN(call, cuStreamGetCtx, SIM_PTR(stream), SIM_PTR(context));
    struct sim_queue *queue;
    nrm_CUresult result = sim_stream_find(&call, stream, &queue);
    if (result == NRM_CUDA_SUCCESS && context == NULL) {
        result = NRM_CUDA_ERROR_INVALID_VALUE;
    }
    if (result == NRM_CUDA_SUCCESS) {
        *context = queue->context;
    }
    return sim_call_end(&call, result);
}

/* Never safe on a capturing stream, in no mode. */
nrm_CUresult
cuStreamGetId(nrm_CUstream stream, unsigned long long *id)
{
    SIM_BEGIN(call, cuStreamGetId, SIM_PTR(stream), SIM_PTR(id));
    struct sim_queue *queue;
    nrm_CUresult result = sim_stream_find(&call, stream, &queue);
    if (result == NRM_CUDA_SUCCESS && id == NULL) {
        result = NRM_CUDA_ERROR_INVALID_VALUE;
    }
    if (result == NRM_CUDA_SUCCESS && queue->capture != NULL) {
        result = sim_capture_spoil(queue);
    }
    if (result == NRM_CUDA_SUCCESS) {
        *id = queue->id;
    }
    return sim_call_end(&call, result);
}
