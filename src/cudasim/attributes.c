/* What the driver says of a pointer. Memory that it does not know, every pageable byte
 * beside a registration included, is INVALID_VALUE. */
#include "sim.h"

#include <string.h>

static int
visible_ordinal(int device)
{
    int ordinal = 0;
    while (sim.visible[ordinal] != device) {
        ordinal++;
    }
    return ordinal;
}

/* The memory around an address: a range, or a piece of a pool. */
struct place {
    int device; /* -1: reserved, and nothing is there */
    uintptr_t start;
    size_t nbytes;
};

/* False: there is none that a pointer may name. */
static bool
find_place(const struct sim_range *range, uintptr_t ptr, struct place *out)
{
    *out = (struct place){
        .device = range->kind == SIM_VIRTUAL ? sim_virtual_device(range, ptr)
                                             : range->context->ordinal,
        .start = range->start,
        .nbytes = range->nbytes,
    };
    return range->kind != SIM_PHYSICAL &&
           (range->pool == NULL ||
            sim_pool_piece(range, ptr, &out->start, &out->nbytes));
}

static nrm_CUresult
get_attribute(const struct sim_range *range, nrm_CUpointer_attribute attribute,
              uintptr_t ptr, void *value)
{
    bool on_host = range->kind == SIM_HOST || range->kind == SIM_REGISTERED;
    bool names_range = attribute == NRM_CU_POINTER_ATTRIBUTE_RANGE_START_ADDR ||
                       attribute == NRM_CU_POINTER_ATTRIBUTE_RANGE_SIZE;
    struct place place;
    if (!find_place(range, ptr, &place) || (place.device < 0 && !names_range)) {
        return NRM_CUDA_ERROR_INVALID_VALUE;
    }
    switch (attribute) {
    case NRM_CU_POINTER_ATTRIBUTE_CONTEXT:
        memcpy(value, &range->context, sizeof range->context);
        return NRM_CUDA_SUCCESS;
    case NRM_CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned int *)value = on_host ? NRM_CU_MEMORYTYPE_HOST
                                         : NRM_CU_MEMORYTYPE_DEVICE;
        return NRM_CUDA_SUCCESS;
    case NRM_CU_POINTER_ATTRIBUTE_HOST_POINTER:
        if (range->kind == SIM_DEVICE || range->kind == SIM_VIRTUAL) {
            return NRM_CUDA_ERROR_INVALID_VALUE;
        }
        memcpy(value, &ptr, sizeof ptr);
        return NRM_CUDA_SUCCESS;
    case NRM_CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        memcpy(value, &ptr, sizeof ptr);
        return NRM_CUDA_SUCCESS;
    case NRM_CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(unsigned int *)value = range->kind == SIM_MANAGED;
        return NRM_CUDA_SUCCESS;
    case NRM_CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)value = visible_ordinal(place.device);
        return NRM_CUDA_SUCCESS;
    case NRM_CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        memcpy(value, &place.start, sizeof place.start);
        return NRM_CUDA_SUCCESS;
    case NRM_CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        memcpy(value, &place.nbytes, sizeof place.nbytes);
        return NRM_CUDA_SUCCESS;
    }
    return NRM_CUDA_ERROR_NOT_SUPPORTED;
}

nrm_CUresult
cuPointerGetAttribute(void *value, nrm_CUpointer_attribute attribute,
                      nrm_CUdeviceptr ptr)
{
    SIM_BEGIN(call, cuPointerGetAttribute, SIM_PTR(value), (uint64_t)attribute, ptr);
    const struct sim_range *range = sim_range_find(ptr);
    nrm_CUresult result = NRM_CUDA_ERROR_INVALID_VALUE;
    if (range != NULL && value != NULL) {
        result = get_attribute(range, attribute, ptr, value);
    }
    return sim_call_end(&call, result);
}

/* Page-locked memory that holds the pointer, or NULL. */
static const struct sim_range *
find_page_locked(const void *ptr)
{
    const struct sim_range *range = sim_range_find((uintptr_t)ptr);
    return range != NULL && (range->kind == SIM_HOST || range->kind == SIM_REGISTERED)
               ? range
               : NULL;
}

nrm_CUresult
cuMemHostGetDevicePointer_v2(nrm_CUdeviceptr *device_ptr, void *ptr, unsigned int flags)
{
    SIM_BEGIN(call, cuMemHostGetDevicePointer, SIM_PTR(device_ptr), SIM_PTR(ptr),
              flags);
    if (device_ptr == NULL || flags != 0 || find_page_locked(ptr) == NULL) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    *device_ptr = (uintptr_t)ptr;
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

nrm_CUresult
cuMemHostGetFlags(unsigned int *flags, void *ptr)
{
    SIM_BEGIN(call, cuMemHostGetFlags, SIM_PTR(flags), SIM_PTR(ptr));
    const struct sim_range *range = find_page_locked(ptr);
    if (flags == NULL || range == NULL) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    /* unified addressing maps all page-locked memory for the device */
    *flags = range->flags | NRM_CU_MEMHOSTALLOC_DEVICEMAP;
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}
