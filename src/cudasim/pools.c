/* Memory pools: of a device's memory or of managed memory, made by programs or there by
 * default, and what they tell of themselves. What they do with memory is in
 * pieces.c. */
#include "pools.h"

struct sim_handles sim_pools = {.object_nbytes = sizeof(struct nrm_CUmemPoolHandle_st)};

/* ---- pools ----------------------------------------------------------------------- */

static struct nrm_CUmemPoolHandle_st *
create(struct nrm_CUctx_st *context, bool is_managed)
{
    struct nrm_CUmemPoolHandle_st *pool = sim_handle_create(&sim_pools);
    if (pool != NULL) {
        pool->context = context;
        pool->is_managed = is_managed;
        for (int i = 0; i < 3; i++) {
            pool->reuse[i] = 1;
        }
    }
    return pool;
}

static nrm_CUresult
check_support(const struct nrm_CUctx_st *context, nrm_CUmemAllocationType type,
              nrm_CUmemAllocationHandleType handles)
{
    const int *attributes = sim.devices[context->ordinal].attributes;
    bool is_managed = type == NRM_CU_MEM_ALLOCATION_TYPE_MANAGED;
    int exported = attributes[NRM_CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES];
    if (!is_managed && type != NRM_CU_MEM_ALLOCATION_TYPE_PINNED) {
        return NRM_CUDA_ERROR_INVALID_VALUE;
    }
    if (attributes[NRM_CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED] == 0 ||
        ((int)handles & ~exported) != 0 ||
        (is_managed &&
         (sim.config.driver < 13000 ||
          attributes[NRM_CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS] == 0))) {
        return NRM_CUDA_ERROR_NOT_SUPPORTED;
    }
    return is_managed && handles != 0 ? NRM_CUDA_ERROR_INVALID_VALUE : NRM_CUDA_SUCCESS;
}

nrm_CUresult
cuMemPoolCreate(nrm_CUmemoryPool *pool, const nrm_CUmemPoolProps *props)
{
    SIM_BEGIN(call, cuMemPoolCreate, SIM_PTR(pool), SIM_PTR(props));
    struct nrm_CUctx_st *context;
    if (pool == NULL || props == NULL ||
        props->location.type != NRM_CU_MEM_LOCATION_TYPE_DEVICE) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    nrm_CUresult result = sim_context_visible(props->location.id, &context);
    if (result == NRM_CUDA_SUCCESS) {
        result = check_support(context, props->allocType, props->handleTypes);
    }
    if (result == NRM_CUDA_SUCCESS) {
        nrm_CUmemoryPool made =
            create(context, props->allocType == NRM_CU_MEM_ALLOCATION_TYPE_MANAGED);
        if (made == NULL) {
            return sim_call_end(&call, NRM_CUDA_ERROR_OUT_OF_MEMORY);
        }
        *pool = made;
    }
    return sim_call_end(&call, result);
}

nrm_CUresult
cuMemPoolDestroy(nrm_CUmemoryPool pool)
{
    SIM_BEGIN(call, cuMemPoolDestroy, SIM_PTR(pool));
    if (!sim_is_pool(pool) || pool->is_default) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    pool->is_doomed = true;
    sim_pool_bury(pool);
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

/* The one that a device has of a kind, made at first use. */
static nrm_CUresult
find_default(nrm_CUdevice device, nrm_CUmemAllocationType type, nrm_CUmemoryPool *out)
{
    struct nrm_CUctx_st *context;
    bool is_managed = type == NRM_CU_MEM_ALLOCATION_TYPE_MANAGED;
    if (out == NULL) {
        return NRM_CUDA_ERROR_INVALID_VALUE;
    }
    nrm_CUresult result = sim_context_visible(device, &context);
    if (result == NRM_CUDA_SUCCESS) {
        result = check_support(context, type, NRM_CU_MEM_HANDLE_TYPE_NONE);
    }
    if (result == NRM_CUDA_SUCCESS) {
        nrm_CUmemoryPool *pool = &sim.devices[context->ordinal].pools[is_managed];
        if (*pool == NULL) {
            *pool = create(context, is_managed);
        }
        if (*pool == NULL) {
            return NRM_CUDA_ERROR_OUT_OF_MEMORY;
        }
        (*pool)->is_default = true;
        *out = *pool;
    }
    return result;
}

nrm_CUresult
cuDeviceGetDefaultMemPool(nrm_CUmemoryPool *pool, nrm_CUdevice device)
{
    SIM_BEGIN(call, cuDeviceGetDefaultMemPool, SIM_PTR(pool), (uint64_t)device);
    return sim_call_end(&call,
                        find_default(device, NRM_CU_MEM_ALLOCATION_TYPE_PINNED, pool));
}

nrm_CUresult
cuMemGetDefaultMemPool(nrm_CUmemoryPool *pool, nrm_CUmemLocation *location,
                       nrm_CUmemAllocationType type)
{
    SIM_BEGIN(call, cuMemGetDefaultMemPool, SIM_PTR(pool), SIM_PTR(location), type);
    if (location == NULL || location->type != NRM_CU_MEM_LOCATION_TYPE_DEVICE) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    return sim_call_end(&call, find_default(location->id, type, pool));
}

/* ---- attributes ------------------------------------------------------------------ */

static int *
find_switch(nrm_CUmemoryPool pool, nrm_CUmemPool_attribute attribute)
{
    unsigned int i = attribute - NRM_CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES;
    return i < 3 ? &pool->reuse[i] : NULL;
}

static uint64_t *
find_number(nrm_CUmemoryPool pool, nrm_CUmemPool_attribute attribute)
{
    switch (attribute) {
    case NRM_CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        return &pool->threshold;
    case NRM_CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
        return &pool->reserved;
    case NRM_CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        return &pool->reserved_high;
    case NRM_CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
        return &pool->used;
    case NRM_CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        return &pool->used_high;
    default:
        return NULL;
    }
}

nrm_CUresult
cuMemPoolGetAttribute(nrm_CUmemoryPool pool, nrm_CUmemPool_attribute attribute,
                      void *value)
{
    SIM_BEGIN(call, cuMemPoolGetAttribute, SIM_PTR(pool), attribute, SIM_PTR(value));
    bool usable = sim_is_pool(pool) && value != NULL;
    const int *flag = usable ? find_switch(pool, attribute) : NULL;
    const uint64_t *number = usable ? find_number(pool, attribute) : NULL;
    if (flag != NULL) {
        *(int *)value = *flag;
    }
    else if (number != NULL) {
        *(uint64_t *)value = *number;
    }
    bool found = flag != NULL || number != NULL;
    return sim_call_end(&call, found ? NRM_CUDA_SUCCESS : NRM_CUDA_ERROR_INVALID_VALUE);
}

/* What is in use cannot be set; the high marks begin anew, with 0 only. */
static bool
set_number(nrm_CUmemoryPool pool, nrm_CUmemPool_attribute attribute, uint64_t value)
{
    switch (attribute) {
    case NRM_CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        pool->threshold = value;
        return true;
    case NRM_CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        pool->reserved_high = value == 0 ? pool->reserved : pool->reserved_high;
        return value == 0;
    case NRM_CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        pool->used_high = value == 0 ? pool->used : pool->used_high;
        return value == 0;
    default:
        return false;
    }
}

nrm_CUresult
cuMemPoolSetAttribute(nrm_CUmemoryPool pool, nrm_CUmemPool_attribute attribute,
                      void *value)
{
    SIM_BEGIN(call, cuMemPoolSetAttribute, SIM_PTR(pool), attribute, SIM_PTR(value));
    bool usable = sim_is_pool(pool) && value != NULL;
    int *flag = usable ? find_switch(pool, attribute) : NULL;
    bool done = flag != NULL;
    if (done) {
        *flag = *(const int *)value;
    }
    else if (usable) {
        done = set_number(pool, attribute, *(const uint64_t *)value);
    }
    return sim_call_end(&call, done ? NRM_CUDA_SUCCESS : NRM_CUDA_ERROR_INVALID_VALUE);
}

/* ---- controls -------------------------------------------------------------------- */

static void
destroy(void *handle, void *unused)
{
    (void)unused;
    sim_handle_destroy(&sim_pools, handle);
}

void
sim_pools_forget(void)
{
    sim_handles_each(&sim_pools, destroy, NULL);
}

static void
count_doomed(void *handle, void *count)
{
    const struct nrm_CUmemPoolHandle_st *pool = handle;
    *(uint64_t *)count += !pool->is_default;
}

void
sim_pools_count(uint64_t *count)
{
    sim_handles_each(&sim_pools, count_doomed, count);
}
