/*
 * Devices and their attributes. Attributes do not change while a driver is loaded, so
 * each is asked once and kept beside the driver's table: twice the value plus one,
 * which tells it from the zero of a new record.
 */
#include "cuda/device.h"

#include <stdio.h>
#include <string.h>

#include "cuda/context.h"

atomic_bool nrm__cuda_pageable_is_read;

int
nrm__cuda_n_devices(void)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    return driver != NULL ? driver->n_devices : 0;
}

static int
index_of(nrm_CUdevice_attribute attribute)
{
    switch (attribute) {
#define X(name, value)                                                                 \
    case NRM_CU_DEVICE_ATTRIBUTE_##name:                                               \
        return NRM__ATTRIBUTE_INDEX_##name;
        NRM_CU_DEVICE_ATTRIBUTES(X)
#undef X
    }
    return -1;
}

int
nrm__cuda_attribute(int device, nrm_CUdevice_attribute attribute)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    int index = index_of(attribute);
    int value = -1;
    if (driver == NULL || index < 0 || device < 0 || device >= driver->n_devices) {
        return -1;
    }
    atomic_llong *kept = &driver->attributes[device][index];
    long long seen = atomic_load_explicit(kept, memory_order_relaxed);
    if (seen != 0) {
        return (int)((seen - 1) / 2);
    }
    nrm_CUresult code =
        driver->cuDeviceGetAttribute(&value, attribute, driver->devices[device]);
    if (code != NRM_CUDA_SUCCESS && code != NRM_CUDA_ERROR_INVALID_VALUE) {
        return -1;
    }
    if (code != NRM_CUDA_SUCCESS) {
        value = -1; /* a driver older than the attribute */
    }
    atomic_store_explicit(kept, 2 * (long long)value + 1, memory_order_relaxed);
    return value;
}

bool
nrm__cuda_reads_pageable(void)
{
    int n = nrm__cuda_n_devices();
    for (int i = 0; i < n; i++) {
        if (nrm__cuda_attribute(i, NRM_CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS) >
            0) {
            return true;
        }
    }
    return false;
}

void
nrm__cuda_note_devices(void)
{
    atomic_store(&nrm__cuda_pageable_is_read, nrm__cuda_reads_pageable());
}

nrm_status
nrm__cuda_device_info(int device, struct nrm__cuda_device_info *out)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    struct nrm__cuda_device_info info = {.free_nbytes = SIZE_MAX};
    struct nrm__cuda_scope scope;
    if (driver == NULL || device < 0 || device >= driver->n_devices) {
        return NRM_NOT_FOUND;
    }
    nrm_CUdevice handle = driver->devices[device];
    if (driver->cuDeviceGetName(info.name, sizeof info.name, handle) !=
        NRM_CUDA_SUCCESS) {
        snprintf(info.name, sizeof info.name, "device %d", device);
    }
    if (driver->cuDeviceGetPCIBusId(info.pci_id, sizeof info.pci_id, handle) !=
        NRM_CUDA_SUCCESS) {
        info.pci_id[0] = '\0';
    }
    if (driver->cuDeviceTotalMem(&info.total_nbytes, handle) != NRM_CUDA_SUCCESS) {
        info.total_nbytes = 0;
    }
    info.capability_major =
        nrm__cuda_attribute(device, NRM_CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    info.capability_minor =
        nrm__cuda_attribute(device, NRM_CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    if (nrm__cuda_enter_existing(device, &scope) == NRM_OK) {
        size_t total;
        info.is_active = true;
        if (driver->cuMemGetInfo(&info.free_nbytes, &total) != NRM_CUDA_SUCCESS) {
            info.free_nbytes = SIZE_MAX;
        }
        nrm__cuda_leave(&scope);
    }
    *out = info;
    return NRM_OK;
}

const char *
nrm__cuda_attribute_name(int index, nrm_CUdevice_attribute *out)
{
    static const struct {
        const char *name;
        nrm_CUdevice_attribute attribute;
    } known[] = {
#define X(name, value) {#name, NRM_CU_DEVICE_ATTRIBUTE_##name},
        NRM_CU_DEVICE_ATTRIBUTES(X)
#undef X
    };
    if (index < 0 || index >= NRM__N_ATTRIBUTES) {
        return NULL;
    }
    *out = known[index].attribute;
    return known[index].name;
}
