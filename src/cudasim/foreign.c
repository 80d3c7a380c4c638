/* Contexts that a program makes for itself, beside the primary one of the device.
 *
 * A destroyed one is gone at once, whoever has it current: its streams, events and
 * memory go with it, what is pending is dropped, and what was registered in it is
 * registered no more. Its handle is given to the next one that is made. A thread that
 * still has it current is told so; whoever names it otherwise may crash a driver, which
 * is a fault. */
#include "checker.h"

/* NULL: there are too many. */
static struct nrm_CUctx_st *
find_place(void)
{
    int i = 0;
    while (i < sim.n_foreign && sim.foreign[i].alive) {
        i++;
    }
    if (i == SIM_MAX_FOREIGN) {
        return NULL;
    }
    if (i == sim.n_foreign) {
        sim.foreign[i] = (struct nrm_CUctx_st){.index = SIM_MAX_DEVICES + i};
        sim.n_foreign++;
    }
    return &sim.foreign[i];
}

nrm_CUresult
cuCtxCreate_v2(nrm_CUcontext *context, unsigned int flags, nrm_CUdevice device)
{
    SIM_BEGIN(call, cuCtxCreate, SIM_PTR(context), flags, (uint64_t)device);
    struct nrm_CUctx_st *primary;
    nrm_CUresult result = sim_context_visible(device, &primary);
    if (result == NRM_CUDA_SUCCESS && context == NULL) {
        result = NRM_CUDA_ERROR_INVALID_VALUE;
    }
    if (result != NRM_CUDA_SUCCESS) {
        return sim_call_end(&call, result);
    }
    struct nrm_CUctx_st *made = find_place();
    if (made == NULL || call.thread->depth == SIM_MAX_CONTEXT_STACK) {
        return sim_call_end(&call, NRM_CUDA_ERROR_OUT_OF_MEMORY);
    }
    made->ordinal = primary->ordinal;
    result = sim_context_begin(made);
    if (result == NRM_CUDA_SUCCESS) {
        result = sim_context_push(call.thread, made);
        *context = made;
    }
    return sim_call_end(&call, result);
}

/* One that is current to the caller is popped. */
nrm_CUresult
cuCtxDestroy_v2(nrm_CUcontext context)
{
    SIM_BEGIN(call, cuCtxDestroy, SIM_PTR(context));
    struct sim_thread *thread = call.thread;
    if (context == NULL || !sim_context_is_handle(context) || !context->alive ||
        sim_context_is_primary(context)) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_CONTEXT);
    }
    sim_context_end(context);
    if (thread->depth > 0 && thread->stack[thread->depth - 1] == context) {
        thread->depth--;
    }
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}
