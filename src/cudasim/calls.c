/* The frame of every entry point: what a call needs before its own work begins.
 *
 * The table is the rule book: what a call requires, whether it takes the driver's
 * lock, whether it spoils a stream capture, whether a host function may make it. An
 * entry point then only does what is particular to it, under the state lock. */
#include "sim.h"

#include <string.h>

enum {
    PLAIN = 0,             /* works without cuInit */
    INIT = 1,              /* needs cuInit */
    CURRENT = 2 | INIT,    /* looks at the current context, if there is one */
    CONTEXT = 4 | CURRENT, /* needs a current context */
    DRIVER_LOCK = 8,
    UNSAFE = 16,   /* invalidates captures unless the thread's mode is relaxed */
    ANYWHERE = 32, /* in host functions too */
};

static const unsigned int rules[SIM_N_CALLS] = {
    [SIM_CALL_cuInit] = PLAIN,
    [SIM_CALL_cuDriverGetVersion] = PLAIN | ANYWHERE,
    [SIM_CALL_cuGetProcAddress] = PLAIN | ANYWHERE,
    [SIM_CALL_cuGetErrorName] = PLAIN | ANYWHERE,
    [SIM_CALL_cuGetErrorString] = PLAIN | ANYWHERE,
    [SIM_CALL_cuDeviceGet] = INIT,
    [SIM_CALL_cuDeviceGetCount] = INIT,
    [SIM_CALL_cuDeviceCanAccessPeer] = INIT,
    [SIM_CALL_cuDeviceGetName] = INIT,
    [SIM_CALL_cuDeviceGetAttribute] = INIT,
    [SIM_CALL_cuDeviceTotalMem] = INIT,
    [SIM_CALL_cuDeviceGetPCIBusId] = INIT,
    [SIM_CALL_cuDevicePrimaryCtxRetain] = INIT | DRIVER_LOCK,
    [SIM_CALL_cuDevicePrimaryCtxRelease] = INIT | DRIVER_LOCK,
    [SIM_CALL_cuDevicePrimaryCtxGetState] = INIT,
    [SIM_CALL_cuDevicePrimaryCtxReset] = INIT | DRIVER_LOCK,
    [SIM_CALL_cuCtxCreate] = INIT | DRIVER_LOCK,
    [SIM_CALL_cuCtxDestroy] = INIT | DRIVER_LOCK,
    [SIM_CALL_cuCtxGetCurrent] = INIT,
    [SIM_CALL_cuCtxSetCurrent] = INIT,
    [SIM_CALL_cuCtxPushCurrent] = INIT,
    [SIM_CALL_cuCtxPopCurrent] = INIT,
    [SIM_CALL_cuCtxGetDevice] = CONTEXT,
    [SIM_CALL_cuCtxGetId] = INIT,
    [SIM_CALL_cuCtxSynchronize] = CONTEXT,
    [SIM_CALL_cuCtxRecordEvent] = CURRENT | DRIVER_LOCK,
    [SIM_CALL_cuMemGetInfo] = CONTEXT,
    [SIM_CALL_cuMemAlloc] = CONTEXT | DRIVER_LOCK | UNSAFE,
    [SIM_CALL_cuMemFree] = CURRENT | DRIVER_LOCK | UNSAFE,
    [SIM_CALL_cuMemAddressReserve] = INIT | DRIVER_LOCK,
    [SIM_CALL_cuMemAddressFree] = INIT | DRIVER_LOCK,
    [SIM_CALL_cuMemCreate] = INIT | DRIVER_LOCK,
    [SIM_CALL_cuMemRelease] = INIT | DRIVER_LOCK,
    [SIM_CALL_cuMemMap] = INIT | DRIVER_LOCK,
    [SIM_CALL_cuMemUnmap] = INIT | DRIVER_LOCK,
    [SIM_CALL_cuMemSetAccess] = INIT | DRIVER_LOCK,
    [SIM_CALL_cuMemGetAccess] = INIT,
    [SIM_CALL_cuMemGetAllocationGranularity] = INIT,
    [SIM_CALL_cuMemPoolCreate] = INIT | DRIVER_LOCK,
    [SIM_CALL_cuMemPoolDestroy] = INIT | DRIVER_LOCK,
    [SIM_CALL_cuMemPoolSetAttribute] = INIT,
    [SIM_CALL_cuMemPoolGetAttribute] = INIT,
    [SIM_CALL_cuMemPoolTrimTo] = INIT | DRIVER_LOCK,
    [SIM_CALL_cuDeviceGetDefaultMemPool] = INIT,
    [SIM_CALL_cuMemGetDefaultMemPool] = INIT,
    [SIM_CALL_cuMemAllocFromPoolAsync] = CURRENT | DRIVER_LOCK,
    [SIM_CALL_cuMemFreeAsync] = CURRENT | DRIVER_LOCK,
    [SIM_CALL_cuMemAdvise] = CURRENT | DRIVER_LOCK,
    [SIM_CALL_cuMemRangeGetAttribute] = CURRENT,
    [SIM_CALL_cuMemAllocManaged] = CONTEXT | DRIVER_LOCK | UNSAFE,
    [SIM_CALL_cuMemHostAlloc] = CONTEXT | DRIVER_LOCK | UNSAFE,
    [SIM_CALL_cuMemFreeHost] = CURRENT | DRIVER_LOCK | UNSAFE,
    [SIM_CALL_cuMemHostRegister] = CONTEXT | DRIVER_LOCK | UNSAFE,
    [SIM_CALL_cuMemHostUnregister] = CURRENT | DRIVER_LOCK | UNSAFE,
    [SIM_CALL_cuMemHostGetDevicePointer] = CONTEXT,
    [SIM_CALL_cuMemHostGetFlags] = CONTEXT,
    [SIM_CALL_cuPointerGetAttribute] = CURRENT,
    [SIM_CALL_cuMemcpyHtoD] = CONTEXT | DRIVER_LOCK | UNSAFE,
    [SIM_CALL_cuMemcpyDtoH] = CONTEXT | DRIVER_LOCK | UNSAFE,
    [SIM_CALL_cuMemcpyDtoD] = CONTEXT | DRIVER_LOCK | UNSAFE,
    [SIM_CALL_cuMemcpy] = CONTEXT | DRIVER_LOCK | UNSAFE,
    [SIM_CALL_cuMemsetD8] = CONTEXT | DRIVER_LOCK | UNSAFE,
    [SIM_CALL_cuMemcpyHtoDAsync] = CURRENT | DRIVER_LOCK,
    [SIM_CALL_cuMemcpyDtoHAsync] = CURRENT | DRIVER_LOCK,
    [SIM_CALL_cuMemcpyAsync] = CURRENT | DRIVER_LOCK,
    [SIM_CALL_cuMemcpy2DAsync] = CURRENT | DRIVER_LOCK,
    [SIM_CALL_cuMemcpy3DAsync] = CURRENT | DRIVER_LOCK,
    [SIM_CALL_cuMemcpyPeerAsync] = CURRENT | DRIVER_LOCK,
    [SIM_CALL_cuMemcpy3DPeerAsync] = CURRENT | DRIVER_LOCK,
    [SIM_CALL_cuMemcpyBatchAsync] = CURRENT | DRIVER_LOCK,
    [SIM_CALL_cuMemsetD8Async] = CURRENT | DRIVER_LOCK,
    [SIM_CALL_cuMemPrefetchAsync] = CURRENT | DRIVER_LOCK,
    [SIM_CALL_cuStreamCreate] = CONTEXT | DRIVER_LOCK,
    [SIM_CALL_cuStreamDestroy] = CURRENT | DRIVER_LOCK,
    [SIM_CALL_cuStreamQuery] = CURRENT | UNSAFE,
    [SIM_CALL_cuStreamSynchronize] = CURRENT | UNSAFE,
    [SIM_CALL_cuStreamWaitEvent] = CURRENT | DRIVER_LOCK,
    [SIM_CALL_cuStreamWaitValue32] = CURRENT | DRIVER_LOCK,
    [SIM_CALL_cuStreamGetCtx] = CURRENT,
    [SIM_CALL_cuStreamGetId] = CURRENT,
    [SIM_CALL_cuStreamIsCapturing] = CURRENT,
    [SIM_CALL_cuStreamBeginCapture] = CURRENT | DRIVER_LOCK,
    [SIM_CALL_cuStreamEndCapture] = CURRENT | DRIVER_LOCK,
    [SIM_CALL_cuStreamGetCaptureInfo] = CURRENT,
    [SIM_CALL_cuUserObjectCreate] = INIT,
    [SIM_CALL_cuUserObjectRelease] = INIT,
    [SIM_CALL_cuGraphRetainUserObject] = INIT,
    [SIM_CALL_cuGraphInstantiateWithFlags] = INIT | DRIVER_LOCK,
    [SIM_CALL_cuGraphLaunch] = CURRENT | DRIVER_LOCK,
    [SIM_CALL_cuGraphExecDestroy] = INIT,
    [SIM_CALL_cuGraphDestroy] = INIT,
    [SIM_CALL_cuThreadExchangeStreamCaptureMode] = INIT,
    [SIM_CALL_cuEventCreate] = CONTEXT | DRIVER_LOCK,
    [SIM_CALL_cuEventDestroy] = CURRENT | DRIVER_LOCK,
    [SIM_CALL_cuEventQuery] = CURRENT | UNSAFE | ANYWHERE,
    [SIM_CALL_cuEventRecord] = CURRENT | DRIVER_LOCK,
    [SIM_CALL_cuEventSynchronize] = CURRENT | UNSAFE,
    [SIM_CALL_cuLaunchHostFunc] = CURRENT | DRIVER_LOCK,
};

static bool
requires(enum sim_call_id id, unsigned int rule)
{
    return (rules[id] & rule) == rule;
}

/* What stands against the call, with the state lock held. */
static nrm_CUresult
check_state_locked(struct sim_call *call)
{
    call->thread = sim_thread_get();
    if (call->thread == NULL) {
        return NRM_CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (call->thread->in_host_function && !requires(call->id, ANYWHERE)) {
        return NRM_CUDA_ERROR_NOT_PERMITTED;
    }
    if (!requires(call->id, INIT)) {
        return NRM_CUDA_SUCCESS;
    }
    if (!sim.initialized) {
        return NRM_CUDA_ERROR_NOT_INITIALIZED;
    }
    if (requires(call->id, CURRENT) && call->thread->depth > 0) {
        call->context = call->thread->stack[call->thread->depth - 1];
        nrm_CUresult result = sim_context_check(call->context);
        if (result != NRM_CUDA_SUCCESS) {
            return result;
        }
    }
    if (requires(call->id, CONTEXT) && call->context == NULL) {
        return NRM_CUDA_ERROR_INVALID_CONTEXT;
    }
    return requires(call->id, UNSAFE) ? sim_capture_check_unsafe(call->thread)
                                      : NRM_CUDA_SUCCESS;
}

static nrm_CUresult
check_version(enum sim_call_id id)
{
    if (sim_call_version(id) <= sim.config.driver) {
        return NRM_CUDA_SUCCESS;
    }
    sim_fault("%s was called, which a driver %d does not have", sim_call_name(id),
              sim.config.driver);
    return NRM_CUDA_ERROR_NOT_SUPPORTED;
}

bool
sim_call_begin(struct sim_call *call)
{
    if (atomic_load(&sim_is_forked)) {
        call->result = NRM_CUDA_ERROR_NOT_INITIALIZED;
        return false; /* and touches no lock, which a lost thread may hold */
    }
    (void)sim_choose(NRM_CUDASIM_CALL_BEGINS, call->id);
    call->result = sim_trace_count(call->id);
    if (call->result != NRM_CUDA_SUCCESS) {
        sim_trace_log(call, call->result);
        return false;
    }
    if (requires(call->id, DRIVER_LOCK)) {
        /* A host function is refused before it could wait for a lock. */
        sim_lock();
        struct sim_thread *thread = sim_thread_get();
        bool refused = thread == NULL || thread->in_host_function;
        sim_unlock();
        if (!refused) {
            pthread_mutex_lock(&sim.driver_lock);
            call->has_driver_lock = true;
        }
    }
    sim_lock();
    call->result = check_version(call->id);
    if (call->result == NRM_CUDA_SUCCESS && sim.config.manual == NRM_CUDASIM_IN_CALLS) {
        sim_engine_run_some_locked();
    }
    if (call->result == NRM_CUDA_SUCCESS) {
        call->result = check_state_locked(call);
    }
    if (call->result != NRM_CUDA_SUCCESS) {
        (void)sim_call_end(call, call->result);
        return false;
    }
    return true;
}

nrm_CUresult
sim_call_end(struct sim_call *call, nrm_CUresult result)
{
    bool due = sim_objects_are_due();
    sim_unlock();
    if (call->has_driver_lock) {
        pthread_mutex_unlock(&sim.driver_lock);
    }
    if (due) {
        sim_lock();
        sim_objects_run_destructors_locked();
        sim_unlock();
    }
    sim_trace_log(call, result);
    call->result = result;
    (void)sim_choose(NRM_CUDASIM_CALL_ENDS, call->id);
    return result;
}
