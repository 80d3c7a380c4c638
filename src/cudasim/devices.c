/* The machine's devices: cuInit, which of them are visible, and what they say of
 * themselves. The defaults are those of a current data-centre card. */
#include "sim.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    nrm_CUdevice_attribute attribute;
    int value;
} defaults[] = {
    {NRM_CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
    {NRM_CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
    {NRM_CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
    {NRM_CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
    {NRM_CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
    {NRM_CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
    {NRM_CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
    {NRM_CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 1},
    {NRM_CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
    {NRM_CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
    {NRM_CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
    {NRM_CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED, 1},
    {NRM_CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
    {NRM_CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES,
     NRM_CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR},
};

void
sim_device_defaults(struct sim_device *device, int ordinal)
{
    memset(device->attributes, 0, sizeof device->attributes);
    for (size_t i = 0; i < sizeof defaults / sizeof defaults[0]; i++) {
        device->attributes[defaults[i].attribute] = defaults[i].value;
    }
    device->attributes[NRM_CU_DEVICE_ATTRIBUTE_PCI_BUS_ID] = 1 + ordinal;
    device->context.ordinal = ordinal;
    device->context.index = ordinal;
    device->sticky = NRM_CUDA_SUCCESS;
    device->total_nbytes = sim.config.memory_nbytes;
    device->used_nbytes = 0;
    device->base = 0;
    device->reserved_nbytes = 0;
    device->fd = -1;
}

/* CUDA_VISIBLE_DEVICES: ordinals in the order wanted, cut off at the first entry that
 * names no device; identifiers of the form GPU-… name none here. */
static void
find_visible(void)
{
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    sim.n_visible = 0;
    if (text == NULL) {
        for (int i = 0; i < sim.config.devices; i++) {
            sim.visible[sim.n_visible++] = i;
        }
        return;
    }
    while (sim.n_visible < SIM_MAX_DEVICES) {
        char *end;
        errno = 0;
        long ordinal = strtol(text, &end, 10);
        if (end == text || errno != 0 || (*end != '\0' && *end != ',') || ordinal < 0 ||
            ordinal >= sim.config.devices) {
            return;
        }
        sim.visible[sim.n_visible++] = (int)ordinal;
        if (*end == '\0') {
            return;
        }
        text = end + 1;
    }
}

nrm_CUresult
cuInit(unsigned int flags)
{
    SIM_BEGIN(call, cuInit, flags);
    if (flags != 0) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    if (sim.config.init_result != 0) {
        return sim_call_end(&call, (nrm_CUresult)sim.config.init_result);
    }
    if (!sim.initialized) {
        find_visible();
        sim.initialized = sim.n_visible > 0;
    }
    return sim_call_end(&call,
                        sim.initialized ? NRM_CUDA_SUCCESS : NRM_CUDA_ERROR_NO_DEVICE);
}

static bool
is_visible(nrm_CUdevice device)
{
    return device >= 0 && device < sim.n_visible;
}

nrm_CUresult
sim_context_visible(nrm_CUdevice device, struct nrm_CUctx_st **out)
{
    if (!is_visible(device)) {
        return NRM_CUDA_ERROR_INVALID_DEVICE;
    }
    *out = &sim.devices[sim.visible[device]].context;
    return NRM_CUDA_SUCCESS;
}

nrm_CUresult
cuDeviceGetCount(int *count)
{
    SIM_BEGIN(call, cuDeviceGetCount, SIM_PTR(count));
    if (count == NULL) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    *count = sim.n_visible;
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

/* All of them are linked. */
nrm_CUresult
cuDeviceCanAccessPeer(int *can, nrm_CUdevice device, nrm_CUdevice peer)
{
    SIM_BEGIN(call, cuDeviceCanAccessPeer, SIM_PTR(can), (uint64_t)device,
              (uint64_t)peer);
    if (can == NULL) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    if (!is_visible(device) || !is_visible(peer)) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_DEVICE);
    }
    *can = device != peer;
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

nrm_CUresult
cuDeviceGet(nrm_CUdevice *device, int ordinal)
{
    SIM_BEGIN(call, cuDeviceGet, SIM_PTR(device), (uint64_t)ordinal);
    if (device == NULL) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    if (!is_visible(ordinal)) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_DEVICE);
    }
    *device = ordinal;
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

nrm_CUresult
cuDeviceGetName(char *name, int size, nrm_CUdevice device)
{
    SIM_BEGIN(call, cuDeviceGetName, SIM_PTR(name), (uint64_t)size, (uint64_t)device);
    if (!is_visible(device)) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_DEVICE);
    }
    if (name == NULL || size <= 0) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    snprintf(name, (size_t)size, "Simulated CUDA device");
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

nrm_CUresult
cuDeviceGetPCIBusId(char *id, int size, nrm_CUdevice device)
{
    SIM_BEGIN(call, cuDeviceGetPCIBusId, SIM_PTR(id), (uint64_t)size, (uint64_t)device);
    if (!is_visible(device)) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_DEVICE);
    }
    if (id == NULL || size < 13) { /* "0000:00:00.0" and its end */
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    const int *attributes = sim.devices[sim.visible[device]].attributes;
    snprintf(id, (size_t)size, "%04X:%02X:%02X.0",
             (unsigned int)attributes[NRM_CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID],
             (unsigned int)attributes[NRM_CU_DEVICE_ATTRIBUTE_PCI_BUS_ID],
             (unsigned int)attributes[NRM_CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID]);
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

nrm_CUresult
cuDeviceGetAttribute(int *value, nrm_CUdevice_attribute attribute, nrm_CUdevice device)
{
    SIM_BEGIN(call, cuDeviceGetAttribute, SIM_PTR(value), (uint64_t)attribute,
              (uint64_t)device);
    if (!is_visible(device)) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_DEVICE);
    }
    if (value == NULL || attribute < 1 || (int)attribute >= SIM_MAX_ATTRIBUTES) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    *value = sim.devices[sim.visible[device]].attributes[attribute];
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

nrm_CUresult
cuDeviceTotalMem_v2(size_t *nbytes, nrm_CUdevice device)
{
    SIM_BEGIN(call, cuDeviceTotalMem, SIM_PTR(nbytes), (uint64_t)device);
    if (!is_visible(device)) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_DEVICE);
    }
    if (nbytes == NULL) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    *nbytes = sim.devices[sim.visible[device]].total_nbytes;
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}
