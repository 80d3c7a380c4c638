/* Moving managed memory ahead of its use: checked and logged. Where pages are is not
 * modelled, so nothing moves, and nothing takes time. */
#include "sim.h"

static bool
is_place(nrm_CUmemLocation location)
{
    return location.type == NRM_CU_MEM_LOCATION_TYPE_HOST ||
           (location.type == NRM_CU_MEM_LOCATION_TYPE_DEVICE && location.id >= 0 &&
            location.id < sim.config.devices);
}

nrm_CUresult
cuMemPrefetchAsync_v2(nrm_CUdeviceptr ptr, size_t nbytes, nrm_CUmemLocation location,
                      unsigned int flags, nrm_CUstream stream)
{
    struct sim_queue *queue;
    bool is_device = location.type == NRM_CU_MEM_LOCATION_TYPE_DEVICE;
    uint64_t place = is_device ? (uint64_t)location.id : UINT64_MAX; /* for the log */
    SIM_BEGIN(call, cuMemPrefetchAsync, ptr, nbytes, place, SIM_PTR(stream));
    nrm_CUresult result = sim_stream_find(&call, stream, &queue);
    if (result == NRM_CUDA_SUCCESS && is_device && !is_place(location)) {
        result = NRM_CUDA_ERROR_INVALID_DEVICE;
    }
    if (result == NRM_CUDA_SUCCESS &&
        (flags != 0 || !is_place(location) || !sim_memory_moves(ptr, nbytes))) {
        result = NRM_CUDA_ERROR_INVALID_VALUE;
    }
    return sim_call_end(&call, result);
}
