/* Events: each holds the marker of its latest record, and belongs to one context. */
#include "checker.h"

struct sim_handles sim_events = {.object_nbytes = sizeof(struct nrm_CUevent_st)};

static nrm_CUresult
find(nrm_CUevent event)
{
    if (!sim_handle_is_live(&sim_events, event)) {
        return NRM_CUDA_ERROR_INVALID_HANDLE;
    }
    return sim_context_check(event->context);
}

/* Steals the marker. */
static void
set_marker(struct nrm_CUevent_st *event, struct sim_marker *marker)
{
    sim_marker_release(event->marker);
    event->marker = marker;
    event->capture = NULL;
}

nrm_CUresult
cuEventCreate(nrm_CUevent *event, unsigned int flags)
{
    SIM_BEGIN(call, cuEventCreate, SIM_PTR(event), flags);
    const unsigned int known = NRM_CU_EVENT_BLOCKING_SYNC |
                               NRM_CU_EVENT_DISABLE_TIMING | NRM_CU_EVENT_INTERPROCESS;
    bool shared_and_timed = (flags & NRM_CU_EVENT_INTERPROCESS) != 0 &&
                            (flags & NRM_CU_EVENT_DISABLE_TIMING) == 0;
    if (event == NULL || (flags & ~known) != 0 || shared_and_timed) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    struct nrm_CUevent_st *created = sim_handle_create(&sim_events);
    if (created == NULL) {
        return sim_call_end(&call, NRM_CUDA_ERROR_OUT_OF_MEMORY);
    }
    created->context = call.context;
    created->flags = flags;
    *event = created;
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

nrm_CUresult
cuEventDestroy_v2(nrm_CUevent event)
{
    SIM_BEGIN(call, cuEventDestroy, SIM_PTR(event));
    nrm_CUresult result = find(event);
    if (result == NRM_CUDA_SUCCESS) {
        set_marker(event, NULL);
        sim_handle_destroy(&sim_events, event);
    }
    return sim_call_end(&call, result);
}

static nrm_CUresult
record(nrm_CUevent event, struct sim_queue *queue)
{
    if (event->context != queue->context) {
        return NRM_CUDA_ERROR_INVALID_HANDLE;
    }
    nrm_CUresult result = sim_capture_check_submit(queue);
    if (result != NRM_CUDA_SUCCESS) {
        return result;
    }
    struct sim_marker *marker = sim_marker_of_queue(queue);
    if (marker == NULL) {
        return NRM_CUDA_ERROR_OUT_OF_MEMORY;
    }
    set_marker(event, marker);
    if (queue->capture != NULL) {
        sim_capture_record(queue, event);
    }
    return NRM_CUDA_SUCCESS;
}

nrm_CUresult
cuEventRecord(nrm_CUevent event, nrm_CUstream stream)
{
    SIM_BEGIN(call, cuEventRecord, SIM_PTR(event), SIM_PTR(stream));
    struct sim_queue *queue;
    nrm_CUresult result = find(event);
    if (result == NRM_CUDA_SUCCESS) {
        result = sim_stream_find(&call, stream, &queue);
    }
    if (result == NRM_CUDA_SUCCESS) {
        result = record(event, queue);
    }
    return sim_call_end(&call, result);
}

/* Covers everything in the context, the work of destroyed streams too. */
nrm_CUresult
cuCtxRecordEvent(nrm_CUcontext context, nrm_CUevent event)
{
    SIM_BEGIN(call, cuCtxRecordEvent, SIM_PTR(context), SIM_PTR(event));
    nrm_CUresult result = NRM_CUDA_ERROR_INVALID_CONTEXT;
    if (context != NULL && sim_context_is_handle(context)) {
        result = sim_context_check(context);
    }
    if (result == NRM_CUDA_SUCCESS) {
        result = find(event);
    }
    if (result == NRM_CUDA_SUCCESS && event->context != context) {
        result = NRM_CUDA_ERROR_INVALID_HANDLE;
    }
    if (result == NRM_CUDA_SUCCESS) {
        result = sim_capture_check_context(context);
    }
    if (result == NRM_CUDA_SUCCESS) {
        struct sim_marker *marker = sim_marker_of_context(context);
        if (marker == NULL) {
            result = NRM_CUDA_ERROR_OUT_OF_MEMORY;
        }
        else {
            set_marker(event, marker);
        }
    }
    return sim_call_end(&call, result);
}

/* An event that was never recorded is done. */
nrm_CUresult
cuEventQuery(nrm_CUevent event)
{
    SIM_BEGIN(call, cuEventQuery, SIM_PTR(event));
    nrm_CUresult result = find(event);
    if (result == NRM_CUDA_SUCCESS && event->capture != NULL) {
        result = NRM_CUDA_ERROR_CAPTURED_EVENT;
    }
    if (result == NRM_CUDA_SUCCESS && !sim_marker_ask(event->marker, call.id)) {
        result = NRM_CUDA_ERROR_NOT_READY;
    }
    return sim_call_end(&call, result);
}

nrm_CUresult
cuEventSynchronize(nrm_CUevent event)
{
    SIM_BEGIN(call, cuEventSynchronize, SIM_PTR(event));
    nrm_CUresult result = find(event);
    if (result == NRM_CUDA_SUCCESS && event->capture != NULL) {
        result = NRM_CUDA_ERROR_CAPTURED_EVENT;
    }
    if (result == NRM_CUDA_SUCCESS && event->marker != NULL) {
        sim_marker_retain(event->marker); /* it may be recorded again meanwhile */
        result = sim_marker_wait(event->marker);
        sim_pools_synchronized();
    }
    return sim_call_end(&call, result);
}

static nrm_CUresult
submit_wait(struct sim_call *call, struct sim_queue *queue, nrm_CUevent event)
{
    nrm_CUresult result = sim_capture_check_submit(queue);
    if (result != NRM_CUDA_SUCCESS || event->marker == NULL) {
        return result;
    }
    sim_checker_queue_follows(queue, event->marker->clock);
    if (sim_marker_is_passed(event->marker)) {
        return NRM_CUDA_SUCCESS;
    }
    struct sim_op *op = sim_op_create(SIM_OP_WAIT_MARKER, call->id);
    if (op == NULL) {
        return NRM_CUDA_ERROR_OUT_OF_MEMORY;
    }
    sim_marker_retain(event->marker);
    op->marker = event->marker;
    return sim_submit(queue, op);
}

nrm_CUresult
cuStreamWaitEvent(nrm_CUstream stream, nrm_CUevent event, unsigned int flags)
{
    SIM_BEGIN(call, cuStreamWaitEvent, SIM_PTR(stream), SIM_PTR(event), flags);
    struct sim_queue *queue;
    nrm_CUresult result = find(event);
    if (result == NRM_CUDA_SUCCESS) {
        result = sim_stream_find(&call, stream, &queue);
    }
    if (result == NRM_CUDA_SUCCESS && flags != NRM_CU_EVENT_WAIT_DEFAULT) {
        result = NRM_CUDA_ERROR_INVALID_VALUE;
    }
    if (result == NRM_CUDA_SUCCESS) {
        result = event->capture != NULL || queue->capture != NULL
                     ? sim_capture_join(queue, event)
                     : submit_wait(&call, queue, event);
    }
    return sim_call_end(&call, result);
}
