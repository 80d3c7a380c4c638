/* Contexts, primary ones above all, and the stack of current ones.
 *
 * A primary context is one object a device for ever: its handle stays the same over a
 * reset, its id does not. Between a reset and the next retain every call that uses it
 * answers CONTEXT_IS_DESTROYED. Those that programs make are in foreign.c. */
#include "checker.h"

#include <stdlib.h>

bool
sim_context_is_primary(const struct nrm_CUctx_st *context)
{
    return context->index < SIM_MAX_DEVICES;
}

struct nrm_CUctx_st *
sim_context_next(const struct nrm_CUctx_st *context)
{
    int index = context == NULL ? 0 : context->index + 1;
    if (index >= sim.config.devices && index < SIM_MAX_DEVICES) {
        index = SIM_MAX_DEVICES;
    }
    if (index < SIM_MAX_DEVICES) {
        return &sim.devices[index].context;
    }
    index -= SIM_MAX_DEVICES;
    return index < sim.n_foreign ? &sim.foreign[index] : NULL;
}

bool
sim_context_is_handle(nrm_CUcontext context)
{
    for (int i = 0; i < sim.config.devices; i++) {
        if (context == &sim.devices[i].context) {
            return context->id != 0; /* it has been retained at some time */
        }
    }
    for (int i = 0; i < sim.n_foreign; i++) {
        if (context == &sim.foreign[i]) {
            return true;
        }
    }
    return false;
}

nrm_CUresult
sim_context_check(const struct nrm_CUctx_st *context)
{
    if (!context->alive) {
        return NRM_CUDA_ERROR_CONTEXT_IS_DESTROYED;
    }
    return sim.devices[context->ordinal].sticky;
}

/* ---- a context's life ------------------------------------------------------------ */

nrm_CUresult
sim_context_begin(struct nrm_CUctx_st *context)
{
    context->legacy = sim_queue_create(context);
    if (context->legacy == NULL) {
        return NRM_CUDA_ERROR_OUT_OF_MEMORY;
    }
    context->legacy->legacy = true;
    context->id = ++sim.next_id;
    context->alive = true;
    return NRM_CUDA_SUCCESS;
}

static void
destroy_stream_of(void *handle, void *context)
{
    struct nrm_CUstream_st *stream = handle;
    if (stream->queue->context == context) {
        sim_queue_close(stream->queue);
        sim_handle_destroy(&sim_streams, stream);
    }
}

static void
destroy_event_of(void *handle, void *context)
{
    struct nrm_CUevent_st *event = handle;
    if (event->context == context) {
        sim_marker_release(event->marker);
        sim_handle_destroy(&sim_events, event);
    }
}

/* Pending work is dropped, what executes is waited for. */
void
sim_context_stop(struct nrm_CUctx_st *context)
{
    context->alive = false; /* nothing of it starts any more */
    for (struct sim_queue *queue = context->queues; queue; queue = queue->next) {
        sim_capture_leave(queue);
    }
    sim_engine_stop_work(context);
    sim_checker_end_context(context);
    for (struct sim_queue *queue = context->queues; queue; queue = queue->next) {
        sim_queue_drop(queue);
    }
    pthread_cond_broadcast(&sim.progress);
}

/* Host memory that was registered stays with its owner; what the driver allocated goes.
 * A thread finds out by itself that its per-thread stream is gone. */
void
sim_context_end(struct nrm_CUctx_st *context)
{
    sim_context_stop(context);
    sim_handles_each(&sim_events, destroy_event_of, context);
    sim_handles_each(&sim_streams, destroy_stream_of, context);
    while (context->queues != NULL) { /* the legacy one and those of threads */
        struct sim_queue *queue = context->queues;
        context->queues = queue->next;
        queue->context = NULL;
        sim_queue_release(queue);
    }
    if (context->legacy != NULL) {
        sim_queue_release(context->legacy);
        context->legacy = NULL;
    }
    sim_checker_end_context(context);
    sim_memory_forget(context);
    if (sim_context_is_primary(context)) {
        sim.devices[context->ordinal].sticky = NRM_CUDA_SUCCESS;
    }
}

nrm_CUresult
cuDevicePrimaryCtxRetain(nrm_CUcontext *context, nrm_CUdevice device)
{
    SIM_BEGIN(call, cuDevicePrimaryCtxRetain, SIM_PTR(context), (uint64_t)device);
    struct nrm_CUctx_st *primary;
    nrm_CUresult result = sim_context_visible(device, &primary);
    if (result == NRM_CUDA_SUCCESS && context == NULL) {
        result = NRM_CUDA_ERROR_INVALID_VALUE;
    }
    if (result == NRM_CUDA_SUCCESS) {
        result = primary->alive ? sim_context_check(primary)
                                : sim_context_begin(primary);
    }
    if (result == NRM_CUDA_SUCCESS) {
        primary->refs++;
        *context = primary;
    }
    return sim_call_end(&call, result);
}

nrm_CUresult
cuDevicePrimaryCtxRelease_v2(nrm_CUdevice device)
{
    SIM_BEGIN(call, cuDevicePrimaryCtxRelease, (uint64_t)device);
    struct nrm_CUctx_st *primary;
    nrm_CUresult result = sim_context_visible(device, &primary);
    if (result == NRM_CUDA_SUCCESS && primary->refs == 0) {
        result = NRM_CUDA_ERROR_INVALID_CONTEXT;
    }
    if (result == NRM_CUDA_SUCCESS && --primary->refs == 0 && primary->alive) {
        sim_context_end(primary);
    }
    return sim_call_end(&call, result);
}

nrm_CUresult
cuDevicePrimaryCtxReset_v2(nrm_CUdevice device)
{
    SIM_BEGIN(call, cuDevicePrimaryCtxReset, (uint64_t)device);
    struct nrm_CUctx_st *primary;
    nrm_CUresult result = sim_context_visible(device, &primary);
    if (result == NRM_CUDA_SUCCESS && primary->alive) {
        sim_context_end(primary);
    }
    return sim_call_end(&call, result);
}

nrm_CUresult
cuDevicePrimaryCtxGetState(nrm_CUdevice device, unsigned int *flags, int *active)
{
    SIM_BEGIN(call, cuDevicePrimaryCtxGetState, (uint64_t)device, SIM_PTR(flags),
              SIM_PTR(active));
    struct nrm_CUctx_st *primary;
    nrm_CUresult result = sim_context_visible(device, &primary);
    if (result == NRM_CUDA_SUCCESS && (flags == NULL || active == NULL)) {
        result = NRM_CUDA_ERROR_INVALID_VALUE;
    }
    if (result == NRM_CUDA_SUCCESS) {
        *flags = 0;
        *active = primary->alive;
    }
    return sim_call_end(&call, result);
}

/* ---- the current one ------------------------------------------------------------- */

/* A context that was reset can be made current all the same; calls in it then fail. */
nrm_CUresult
sim_context_push(struct sim_thread *thread, nrm_CUcontext context)
{
    if (!sim_context_is_handle(context) ||
        (!context->alive && !sim_context_is_primary(context))) {
        return NRM_CUDA_ERROR_INVALID_CONTEXT;
    }
    if (thread->depth == SIM_MAX_CONTEXT_STACK) {
        return NRM_CUDA_ERROR_OUT_OF_MEMORY;
    }
    thread->stack[thread->depth++] = context;
    return NRM_CUDA_SUCCESS;
}

nrm_CUresult
cuCtxPushCurrent_v2(nrm_CUcontext context)
{
    SIM_BEGIN(call, cuCtxPushCurrent, SIM_PTR(context));
    return sim_call_end(&call, sim_context_push(call.thread, context));
}

nrm_CUresult
cuCtxPopCurrent_v2(nrm_CUcontext *context)
{
    SIM_BEGIN(call, cuCtxPopCurrent, SIM_PTR(context));
    struct sim_thread *thread = call.thread;
    if (thread->depth == 0) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_CONTEXT);
    }
    thread->depth--;
    if (context != NULL) {
        *context = thread->stack[thread->depth];
    }
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

/* Replaces the top of the stack; NULL takes it away. */
nrm_CUresult
cuCtxSetCurrent(nrm_CUcontext context)
{
    SIM_BEGIN(call, cuCtxSetCurrent, SIM_PTR(context));
    struct sim_thread *thread = call.thread;
    int depth = thread->depth;
    thread->depth = depth > 0 ? depth - 1 : 0;
    nrm_CUresult result = context == NULL ? NRM_CUDA_SUCCESS
                                          : sim_context_push(thread, context);
    if (result != NRM_CUDA_SUCCESS) {
        thread->depth = depth;
    }
    return sim_call_end(&call, result);
}

nrm_CUresult
cuCtxGetCurrent(nrm_CUcontext *context)
{
    SIM_BEGIN(call, cuCtxGetCurrent, SIM_PTR(context));
    if (context == NULL) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    const struct sim_thread *thread = call.thread;
    *context = thread->depth == 0 ? NULL : thread->stack[thread->depth - 1];
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

static int
visible_ordinal(const struct nrm_CUctx_st *context)
{
    int ordinal = 0;
    while (sim.visible[ordinal] != context->ordinal) {
        ordinal++;
    }
    return ordinal;
}

nrm_CUresult
cuCtxGetDevice(nrm_CUdevice *device)
{
    SIM_BEGIN(call, cuCtxGetDevice, SIM_PTR(device));
    if (device == NULL) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    *device = visible_ordinal(call.context);
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

nrm_CUresult
cuCtxGetId(nrm_CUcontext context, unsigned long long *id)
{
    SIM_BEGIN(call, cuCtxGetId, SIM_PTR(context), SIM_PTR(id));
    const struct sim_thread *thread = call.thread;
    if (context == NULL && thread->depth > 0) {
        context = thread->stack[thread->depth - 1];
    }
    nrm_CUresult result = NRM_CUDA_SUCCESS;
    if (context == NULL || !sim_context_is_handle(context)) {
        result = NRM_CUDA_ERROR_INVALID_CONTEXT;
    }
    else if (!context->alive) {
        result = NRM_CUDA_ERROR_CONTEXT_IS_DESTROYED;
    }
    else if (id == NULL) {
        result = NRM_CUDA_ERROR_INVALID_VALUE;
    }
    else {
        *id = context->id;
    }
    return sim_call_end(&call, result);
}

nrm_CUresult
cuCtxSynchronize(void)
{
    SIM_BEGIN(call, cuCtxSynchronize, 0);
    nrm_CUresult result = sim_capture_check_context(call.context);
    if (result == NRM_CUDA_SUCCESS) {
        result = sim_marker_wait(sim_marker_of_context(call.context));
        sim_pools_synchronized();
    }
    return sim_call_end(&call, result);
}
