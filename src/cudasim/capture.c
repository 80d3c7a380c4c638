/* Stream capture: work goes into a graph instead of running, until the capture ends or
 * something spoils it.
 *
 * What spoils a capture is the point of modelling it. A call that may synchronise does,
 * unless the mode of the calling thread allows it; a record over the whole context
 * always does, and so does work on the legacy stream while a blocking stream captures.
 * The call answers an error, and the capture is invalidated until cuStreamEndCapture
 * clears it.
 *
 * A captured operation keeps what an executed one has; graphs.c launches copies of
 * them. Their order among streams is kept only as the order of capture. */
#include "sim.h"

#include <stdlib.h>

struct sim_capture {
    struct sim_capture *next;
    struct nrm_CUctx_st *context;
    struct sim_queue *origin; /* where it began; borrowed */
    nrm_CUstreamCaptureMode mode;
    uint64_t owner; /* serial of the thread that began it */
    nrm_CUstreamCaptureStatus status;
    uint64_t id;
    struct nrm_CUgraph_st *graph;
};

static struct sim_capture *captures;

static void
invalidate(struct sim_capture *capture)
{
    capture->status = NRM_CU_STREAM_CAPTURE_STATUS_INVALIDATED;
}

static bool
is_active(const struct sim_capture *capture)
{
    return capture->status == NRM_CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

static void
forget_capture(void *handle, void *capture)
{
    struct nrm_CUevent_st *event = handle;
    if (event->capture == capture) {
        event->capture = NULL;
        event->fork = NULL;
    }
}

/* Its streams and events are ordinary again; the graph is left to the caller. */
static void
capture_destroy(struct sim_capture *capture)
{
    struct nrm_CUctx_st *context = NULL;
    while ((context = sim_context_next(context)) != NULL) {
        struct sim_queue *queue = context->queues;
        for (; queue != NULL; queue = queue->next) {
            if (queue->capture == capture) {
                queue->capture = NULL;
                queue->unjoined = false;
                queue->n_captured = 0;
            }
        }
    }
    sim_handles_each(&sim_events, forget_capture, capture);
    struct sim_capture **link = &captures;
    while (*link != capture) {
        link = &(*link)->next;
    }
    *link = capture->next;
    free(capture);
}

/* ---- what spoils a capture ------------------------------------------------------- */

/* Whether a thread in its mode may not make an unsafe call while this capture goes
 * on. */
static bool
forbids(const struct sim_capture *capture, const struct sim_thread *thread)
{
    bool own = capture->owner == thread->serial;
    switch (thread->capture_mode) {
    case NRM_CU_STREAM_CAPTURE_MODE_RELAXED:
        return false;
    case NRM_CU_STREAM_CAPTURE_MODE_THREAD_LOCAL:
        return own && capture->mode != NRM_CU_STREAM_CAPTURE_MODE_RELAXED;
    default:
        return own ? capture->mode != NRM_CU_STREAM_CAPTURE_MODE_RELAXED
                   : capture->mode == NRM_CU_STREAM_CAPTURE_MODE_GLOBAL;
    }
}

nrm_CUresult
sim_capture_check_unsafe(const struct sim_thread *thread)
{
    nrm_CUresult result = NRM_CUDA_SUCCESS;
    for (struct sim_capture *capture = captures; capture; capture = capture->next) {
        if (is_active(capture) && forbids(capture, thread)) {
            invalidate(capture);
            result = NRM_CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    return result;
}

nrm_CUresult
sim_capture_check_context(const struct nrm_CUctx_st *context)
{
    nrm_CUresult result = NRM_CUDA_SUCCESS;
    for (struct sim_capture *capture = captures; capture; capture = capture->next) {
        if (capture->context == context) {
            invalidate(capture);
            result = NRM_CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    return result;
}

nrm_CUresult
sim_capture_spoil(struct sim_queue *queue)
{
    invalidate(queue->capture);
    return NRM_CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

/* Whether the legacy stream would have to order itself with work that does not run. */
static bool
is_implicit(const struct sim_queue *legacy, bool spoil)
{
    bool found = false;
    struct sim_queue *queue = legacy->legacy ? legacy->context->queues : NULL;
    for (; queue != NULL; queue = queue->next) {
        if (queue->blocking && queue->capture != NULL && is_active(queue->capture)) {
            found = true;
            if (spoil) {
                invalidate(queue->capture);
            }
        }
    }
    return found;
}

nrm_CUresult
sim_capture_check_submit(struct sim_queue *queue)
{
    if (is_implicit(queue, true)) {
        return NRM_CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    return queue->capture != NULL && !is_active(queue->capture)
               ? NRM_CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
               : NRM_CUDA_SUCCESS;
}

void
sim_capture_leave(struct sim_queue *queue)
{
    struct sim_capture *capture = queue->capture;
    if (capture == NULL) {
        return;
    }
    if (capture->origin == queue) {
        sim_graph_destroy(capture->graph);
        capture_destroy(capture);
    }
    else {
        invalidate(capture);
        queue->capture = NULL;
    }
}

/* ---- what a capture takes in ----------------------------------------------------- */

void
sim_capture_add(struct sim_queue *queue, struct sim_op *op)
{
    sim_ops_append(&queue->capture->graph->ops, op);
    queue->n_captured++;
    queue->unjoined = queue != queue->capture->origin;
}

void
sim_capture_record(struct sim_queue *queue, struct nrm_CUevent_st *event)
{
    event->capture = queue->capture;
    event->fork = queue;
    event->fork_length = queue->n_captured;
}

nrm_CUresult
sim_capture_join(struct sim_queue *queue, const struct nrm_CUevent_st *event)
{
    struct sim_capture *capture = event->capture;
    if (capture == NULL) { /* a captured stream cannot await work that does run */
        invalidate(queue->capture);
        return NRM_CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (!is_active(capture)) {
        return NRM_CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    if (queue->legacy) {
        invalidate(capture);
        return NRM_CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    if (queue->capture == NULL) {
        queue->capture = capture;
        queue->unjoined = true;
        queue->n_captured = 0;
        return NRM_CUDA_SUCCESS;
    }
    if (queue->capture != capture) {
        invalidate(queue->capture);
        invalidate(capture);
        return NRM_CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    if (event->fork->n_captured == event->fork_length) {
        event->fork->unjoined = false;
    }
    return NRM_CUDA_SUCCESS;
}

/* ---- entry points ---------------------------------------------------------------- */

static nrm_CUresult
begin(const struct sim_call *call, struct sim_queue *queue,
      nrm_CUstreamCaptureMode mode)
{
    struct sim_capture *capture = calloc(1, sizeof *capture);
    struct nrm_CUgraph_st *graph = sim_handle_create(&sim_graphs);
    if (capture == NULL || graph == NULL) {
        free(capture);
        if (graph != NULL) {
            sim_handle_destroy(&sim_graphs, graph);
        }
        return NRM_CUDA_ERROR_OUT_OF_MEMORY;
    }
    *capture = (struct sim_capture){.next = captures,
                                    .context = queue->context,
                                    .origin = queue,
                                    .mode = mode,
                                    .owner = call->thread->serial,
                                    .status = NRM_CU_STREAM_CAPTURE_STATUS_ACTIVE,
                                    .id = ++sim.next_id,
                                    .graph = graph};
    captures = capture;
    queue->capture = capture;
    queue->n_captured = 0;
    return NRM_CUDA_SUCCESS;
}

nrm_CUresult
cuStreamBeginCapture_v2(nrm_CUstream stream, nrm_CUstreamCaptureMode mode)
{
    SIM_BEGIN(call, cuStreamBeginCapture, SIM_PTR(stream), mode);
    struct sim_queue *queue;
    nrm_CUresult result = sim_stream_find(&call, stream, &queue);
    if (result == NRM_CUDA_SUCCESS) {
        if (mode > NRM_CU_STREAM_CAPTURE_MODE_RELAXED) {
            result = NRM_CUDA_ERROR_INVALID_VALUE;
        }
        else if (queue->legacy) {
            result = NRM_CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
        else if (queue->capture != NULL) {
            result = NRM_CUDA_ERROR_ILLEGAL_STATE;
        }
        else {
            result = begin(&call, queue, mode);
        }
    }
    return sim_call_end(&call, result);
}

static bool
has_unjoined(const struct sim_capture *capture)
{
    struct nrm_CUctx_st *context = NULL;
    while ((context = sim_context_next(context)) != NULL) {
        const struct sim_queue *queue = context->queues;
        for (; queue != NULL; queue = queue->next) {
            if (queue->capture == capture && queue->unjoined) {
                return true;
            }
        }
    }
    return false;
}

/* The capture is over whatever the answer, except for the wrong thread or stream. */
static nrm_CUresult
end(const struct sim_call *call, struct sim_queue *queue, nrm_CUgraph *out)
{
    struct sim_capture *capture = queue->capture;
    nrm_CUresult result = NRM_CUDA_SUCCESS;
    if (capture == NULL) {
        return NRM_CUDA_ERROR_ILLEGAL_STATE;
    }
    if (capture->origin != queue) {
        invalidate(capture);
        return NRM_CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    }
    if (capture->owner != call->thread->serial &&
        capture->mode != NRM_CU_STREAM_CAPTURE_MODE_RELAXED) {
        return NRM_CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    }
    if (!is_active(capture)) {
        result = NRM_CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    else if (has_unjoined(capture)) {
        result = NRM_CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    }
    if (result == NRM_CUDA_SUCCESS) {
        *out = capture->graph;
    }
    else {
        sim_graph_destroy(capture->graph);
        *out = NULL;
    }
    capture_destroy(capture);
    return result;
}

nrm_CUresult
cuStreamEndCapture(nrm_CUstream stream, nrm_CUgraph *graph)
{
    SIM_BEGIN(call, cuStreamEndCapture, SIM_PTR(stream), SIM_PTR(graph));
    struct sim_queue *queue;
    nrm_CUresult result = sim_stream_find(&call, stream, &queue);
    if (result == NRM_CUDA_SUCCESS) {
        result = graph == NULL ? NRM_CUDA_ERROR_INVALID_VALUE
                               : end(&call, queue, graph);
    }
    return sim_call_end(&call, result);
}

nrm_CUresult
cuStreamIsCapturing(nrm_CUstream stream, nrm_CUstreamCaptureStatus *status)
{
    SIM_BEGIN(call, cuStreamIsCapturing, SIM_PTR(stream), SIM_PTR(status));
    struct sim_queue *queue;
    nrm_CUresult result = sim_stream_find(&call, stream, &queue);
    if (result == NRM_CUDA_SUCCESS && status == NULL) {
        result = NRM_CUDA_ERROR_INVALID_VALUE;
    }
    if (result == NRM_CUDA_SUCCESS && is_implicit(queue, false)) {
        result = NRM_CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    if (result == NRM_CUDA_SUCCESS) {
        *status = queue->capture == NULL ? (unsigned)NRM_CU_STREAM_CAPTURE_STATUS_NONE
                                         : queue->capture->status;
    }
    return sim_call_end(&call, result);
}

/* Of an invalidated capture the number and the graph are not told any more. */
nrm_CUresult
cuStreamGetCaptureInfo_v3(nrm_CUstream stream, nrm_CUstreamCaptureStatus *status,
                          uint64_t *id, nrm_CUgraph *graph,
                          const nrm_CUgraphNode **dependencies,
                          const nrm_CUgraphEdgeData **edges, size_t *n_dependencies)
{
    SIM_BEGIN(call, cuStreamGetCaptureInfo, SIM_PTR(stream), SIM_PTR(status),
              SIM_PTR(id), SIM_PTR(graph));
    struct sim_queue *queue;
    nrm_CUresult result = sim_stream_find(&call, stream, &queue);
    /* Which operations a stream goes on from is not modelled. */
    if (result == NRM_CUDA_SUCCESS && (status == NULL || dependencies != NULL ||
                                       edges != NULL || n_dependencies != NULL)) {
        result = NRM_CUDA_ERROR_INVALID_VALUE;
    }
    if (result == NRM_CUDA_SUCCESS && is_implicit(queue, false)) {
        result = NRM_CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    if (result != NRM_CUDA_SUCCESS) {
        return sim_call_end(&call, result);
    }
    const struct sim_capture *capture = queue->capture;
    bool active = capture != NULL && is_active(capture);
    *status = capture == NULL ? (unsigned)NRM_CU_STREAM_CAPTURE_STATUS_NONE
                              : capture->status;
    /* Of a capture that was invalidated it is not told, and what stood there stays. */
    if (id != NULL && active) {
        *id = capture->id;
    }
    if (graph != NULL && active) {
        *graph = capture->graph;
    }
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

nrm_CUresult
cuThreadExchangeStreamCaptureMode(nrm_CUstreamCaptureMode *mode)
{
    SIM_BEGIN(call, cuThreadExchangeStreamCaptureMode, SIM_PTR(mode));
    if (mode == NULL || *mode > NRM_CU_STREAM_CAPTURE_MODE_RELAXED) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    nrm_CUstreamCaptureMode before = call.thread->capture_mode;
    call.thread->capture_mode = *mode;
    *mode = before;
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}
