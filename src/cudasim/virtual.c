/* Virtual memory: address reservations, physical memory, and what is mapped where.
 *
 * A reservation is a range like any other, of addresses that hold nothing. Physical
 * memory is taken from the device that it belongs to, under addresses that nobody is
 * told; a mapping leads from the ones to the others. So a copy looks its bytes up when
 * it runs: memory that was unmapped meanwhile, which nothing waits for, is not touched
 * and recorded as a fault, where a real device would end the context.
 *
 * Belongs to the process: no call here needs a context, and a reset ends none of it. */
#include "sim.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static const size_t GRANULARITY = (size_t)2 << 20;

struct sim_physical {
    struct sim_handle handle;
    struct sim_range *range; /* owned: the bytes, on their device */
    size_t n_uses;           /* the handle, mappings, and copies at this moment */
    bool released;           /* the program may not name it any more */
};

struct sim_mapping {
    struct sim_mapping *next; /* in order of address */
    uintptr_t start;
    size_t nbytes;
    struct sim_physical *physical;         /* used */
    unsigned char access[SIM_MAX_DEVICES]; /* by physical device */
};

static struct sim_handles physicals = {.object_nbytes = sizeof(struct sim_physical)};

/* ---- finding --------------------------------------------------------------------- */

static bool
is_granular(uint64_t number)
{
    return number % GRANULARITY == 0;
}

/* The mapping of a reservation that holds the address, or NULL. */
static struct sim_mapping *
find_mapping(const struct sim_range *range, uintptr_t address)
{
    struct sim_mapping *mapping = range->mappings;
    while (mapping != NULL && mapping->start + mapping->nbytes <= address) {
        mapping = mapping->next;
    }
    return mapping != NULL && mapping->start <= address ? mapping : NULL;
}

/* The reservation that holds all of it, or NULL. */
static struct sim_range *
find_reservation(uintptr_t start, size_t nbytes)
{
    struct sim_range *range = sim_range_find(start);
    if (range == NULL || range->kind != SIM_VIRTUAL ||
        nbytes > range->nbytes - (start - range->start)) {
        return NULL;
    }
    return range;
}

static struct sim_physical *
find_physical(nrm_CUmemGenericAllocationHandle handle)
{
    struct sim_physical *physical = (void *)(uintptr_t)handle;
    return sim_handle_is_live(&physicals, physical) && !physical->released ? physical
                                                                           : NULL;
}

static int
device_of(const struct sim_mapping *mapping)
{
    return mapping->physical->range->context->ordinal;
}

/* The physical device behind a location; -1: there is none. */
static int
find_device(const nrm_CUmemLocation *location)
{
    if (location->type != NRM_CU_MEM_LOCATION_TYPE_DEVICE || location->id < 0 ||
        location->id >= sim.n_visible) {
        return -1;
    }
    return sim.visible[location->id];
}

/* ---- reservations ---------------------------------------------------------------- */

static uintptr_t
reserve(size_t nbytes, size_t alignment)
{
    char *base = mmap(NULL, nbytes + alignment, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        return 0;
    }
    size_t before = (alignment - (uintptr_t)base % alignment) % alignment;
    if (before != 0) {
        munmap(base, before);
    }
    munmap(base + before + nbytes, alignment - before);
    return (uintptr_t)base + before;
}

nrm_CUresult
cuMemAddressReserve(nrm_CUdeviceptr *ptr, size_t nbytes, size_t alignment,
                    nrm_CUdeviceptr hint, unsigned long long flags)
{
    SIM_BEGIN(call, cuMemAddressReserve, SIM_PTR(ptr), nbytes, alignment, hint);
    if (ptr == NULL || nbytes == 0 || !is_granular(nbytes) || flags != 0 ||
        (alignment & (alignment - 1)) != 0 || nbytes > SIZE_MAX / 2) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    uintptr_t start =
        reserve(nbytes, alignment > GRANULARITY ? alignment : GRANULARITY);
    if (start == 0) {
        return sim_call_end(&call, NRM_CUDA_ERROR_OUT_OF_MEMORY);
    }
    if (sim_range_create(SIM_VIRTUAL, start, nbytes, 0, NULL) == NULL) {
        munmap((void *)start, nbytes);
        return sim_call_end(&call, NRM_CUDA_ERROR_OUT_OF_MEMORY);
    }
    *ptr = start;
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

nrm_CUresult
cuMemAddressFree(nrm_CUdeviceptr ptr, size_t nbytes)
{
    SIM_BEGIN(call, cuMemAddressFree, ptr, nbytes);
    struct sim_range *range = find_reservation(ptr, nbytes);
    if (range == NULL || range->start != ptr || range->nbytes != nbytes ||
        range->mappings != NULL) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    munmap((void *)range->start, range->nbytes);
    sim_range_remove(range);
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

/* ---- physical memory ------------------------------------------------------------- */

static void
physical_release(struct sim_physical *physical)
{
    if (--physical->n_uses == 0) {
        sim_device_memory_give(physical->range);
        sim_handle_destroy(&physicals, physical);
    }
}

/* NULL: not of a kind that exists here. */
static nrm_CUresult
check_prop(const nrm_CUmemAllocationProp *prop, int *device)
{
    if (prop == NULL || prop->type != NRM_CU_MEM_ALLOCATION_TYPE_PINNED ||
        prop->location.type != NRM_CU_MEM_LOCATION_TYPE_DEVICE) {
        return NRM_CUDA_ERROR_INVALID_VALUE;
    }
    *device = find_device(&prop->location);
    if (*device < 0) {
        return NRM_CUDA_ERROR_INVALID_DEVICE;
    }
    const int *attributes = sim.devices[*device].attributes;
    return attributes[NRM_CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED] != 0
               ? sim.devices[*device].sticky
               : NRM_CUDA_ERROR_NOT_SUPPORTED;
}

nrm_CUresult
cuMemGetAllocationGranularity(size_t *granularity, const nrm_CUmemAllocationProp *prop,
                              nrm_CUmemAllocationGranularity_flags option)
{
    SIM_BEGIN(call, cuMemGetAllocationGranularity, SIM_PTR(granularity), SIM_PTR(prop),
              option);
    int device;
    nrm_CUresult result = check_prop(prop, &device);
    if (granularity == NULL || option > NRM_CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) {
        result = NRM_CUDA_ERROR_INVALID_VALUE;
    }
    if (result == NRM_CUDA_SUCCESS) {
        *granularity = GRANULARITY;
    }
    return sim_call_end(&call, result);
}

nrm_CUresult
cuMemCreate(nrm_CUmemGenericAllocationHandle *handle, size_t nbytes,
            const nrm_CUmemAllocationProp *prop, unsigned long long flags)
{
    SIM_BEGIN(call, cuMemCreate, SIM_PTR(handle), nbytes, SIM_PTR(prop), flags);
    int device;
    nrm_CUresult result = check_prop(prop, &device);
    if (handle == NULL || nbytes == 0 || !is_granular(nbytes) || flags != 0) {
        result = NRM_CUDA_ERROR_INVALID_VALUE;
    }
    if (result != NRM_CUDA_SUCCESS) {
        return sim_call_end(&call, result);
    }
    struct sim_physical *physical = sim_handle_create(&physicals);
    if (physical == NULL) {
        return sim_call_end(&call, NRM_CUDA_ERROR_OUT_OF_MEMORY);
    }
    result = sim_device_memory_take(&sim.devices[device].context, SIM_PHYSICAL, nbytes,
                                    &physical->range);
    if (result != NRM_CUDA_SUCCESS) {
        sim_handle_destroy(&physicals, physical);
        return sim_call_end(&call, result);
    }
    physical->n_uses = 1;
    *handle = SIM_PTR(physical);
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

nrm_CUresult
cuMemRelease(nrm_CUmemGenericAllocationHandle handle)
{
    SIM_BEGIN(call, cuMemRelease, handle);
    struct sim_physical *physical = find_physical(handle);
    if (physical == NULL) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    physical->released = true;
    physical_release(physical);
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

/* ---- mappings -------------------------------------------------------------------- */

/* The link in which a mapping from `start` on has its place; NULL: something is
   there. */
static struct sim_mapping **
find_place(struct sim_range *range, uintptr_t start, size_t nbytes)
{
    struct sim_mapping **link = &range->mappings;
    while (*link != NULL && (*link)->start + (*link)->nbytes <= start) {
        link = &(*link)->next;
    }
    return *link == NULL || start + nbytes <= (*link)->start ? link : NULL;
}

nrm_CUresult
cuMemMap(nrm_CUdeviceptr ptr, size_t nbytes, size_t offset,
         nrm_CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    SIM_BEGIN(call, cuMemMap, ptr, nbytes, offset, handle);
    struct sim_physical *physical = find_physical(handle);
    struct sim_range *range = find_reservation(ptr, nbytes);
    if (physical == NULL || range == NULL || nbytes == 0 || flags != 0 || offset != 0 ||
        !is_granular(ptr) || !is_granular(nbytes)) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    if (nbytes > physical->range->nbytes) {
        return sim_call_end(&call, NRM_CUDA_ERROR_NOT_SUPPORTED);
    }
    struct sim_mapping **place = find_place(range, ptr, nbytes);
    if (place == NULL) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    struct sim_mapping *mapping = calloc(1, sizeof *mapping);
    if (mapping == NULL) {
        return sim_call_end(&call, NRM_CUDA_ERROR_OUT_OF_MEMORY);
    }
    mapping->start = ptr;
    mapping->nbytes = nbytes;
    mapping->physical = physical;
    mapping->next = *place;
    *place = mapping;
    physical->n_uses++;
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

/* The first of the whole mappings, side by side, that the bytes consist of, or NULL. */
static struct sim_mapping *
find_whole(uintptr_t start, size_t nbytes)
{
    struct sim_range *range = find_reservation(start, nbytes);
    struct sim_mapping *first = range == NULL ? NULL : find_mapping(range, start);
    uintptr_t at = start;
    const struct sim_mapping *mapping = first;
    while (mapping != NULL && mapping->start == at && at < start + nbytes) {
        at += mapping->nbytes;
        mapping = mapping->next;
    }
    return nbytes != 0 && at == start + nbytes ? first : NULL;
}

/* Waits for nothing, and has nothing against a range in which nothing is mapped. */
nrm_CUresult
cuMemUnmap(nrm_CUdeviceptr ptr, size_t nbytes)
{
    SIM_BEGIN(call, cuMemUnmap, ptr, nbytes);
    struct sim_mapping *mapping = find_whole(ptr, nbytes);
    if (mapping == NULL) {
        struct sim_range *range = find_reservation(ptr, nbytes);
        bool is_empty = range != NULL && find_place(range, ptr, nbytes) != NULL;
        return sim_call_end(&call,
                            is_empty ? NRM_CUDA_SUCCESS : NRM_CUDA_ERROR_INVALID_VALUE);
    }
    struct sim_mapping **link = &sim_range_find(ptr)->mappings;
    while (*link != mapping) {
        link = &(*link)->next;
    }
    while ((mapping = *link) != NULL && mapping->start < ptr + nbytes) {
        *link = mapping->next;
        physical_release(mapping->physical);
        free(mapping);
    }
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

static nrm_CUresult
check_access(const nrm_CUmemAccessDesc *access, size_t n_access)
{
    if (access == NULL || n_access == 0) {
        return NRM_CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t i = 0; i < n_access; i++) {
        int device = find_device(&access[i].location);
        if (access[i].flags != NRM_CU_MEM_ACCESS_FLAGS_PROT_NONE &&
            access[i].flags != NRM_CU_MEM_ACCESS_FLAGS_PROT_READ &&
            access[i].flags != NRM_CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
            return NRM_CUDA_ERROR_INVALID_VALUE;
        }
        if (device < 0) {
            return NRM_CUDA_ERROR_INVALID_DEVICE;
        }
        if (sim.devices[device].sticky != NRM_CUDA_SUCCESS) {
            return sim.devices[device].sticky;
        }
    }
    return NRM_CUDA_SUCCESS;
}

nrm_CUresult
cuMemSetAccess(nrm_CUdeviceptr ptr, size_t nbytes, const nrm_CUmemAccessDesc *access,
               size_t n_access)
{
    SIM_BEGIN(call, cuMemSetAccess, ptr, nbytes, SIM_PTR(access), n_access);
    nrm_CUresult result = check_access(access, n_access);
    struct sim_mapping *mapping = find_whole(ptr, nbytes);
    if (result == NRM_CUDA_SUCCESS && mapping == NULL) {
        result = NRM_CUDA_ERROR_INVALID_VALUE;
    }
    for (;
         result == NRM_CUDA_SUCCESS && mapping != NULL && mapping->start < ptr + nbytes;
         mapping = mapping->next) {
        for (size_t i = 0; i < n_access; i++) {
            mapping->access[find_device(&access[i].location)] =
                (unsigned char)access[i].flags;
        }
    }
    return sim_call_end(&call, result);
}

/* Says nothing of memory that no mapping leads to. */
nrm_CUresult
cuMemGetAccess(unsigned long long *flags, const nrm_CUmemLocation *location,
               nrm_CUdeviceptr ptr)
{
    SIM_BEGIN(call, cuMemGetAccess, SIM_PTR(flags), SIM_PTR(location), ptr);
    const struct sim_range *range = sim_range_find(ptr);
    const struct sim_mapping *mapping =
        range != NULL && range->kind == SIM_VIRTUAL ? find_mapping(range, ptr) : NULL;
    bool is_allocated = range != NULL && range->kind == SIM_DEVICE &&
                        range->pool == NULL;
    if (flags == NULL || location == NULL || (mapping == NULL && !is_allocated)) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    int device = find_device(location);
    if (device < 0) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_DEVICE);
    }
    *flags = is_allocated ? NRM_CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                          : mapping->access[device];
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

/* ---- for copies and attributes --------------------------------------------------- */

static bool
may_touch(const struct sim_mapping *mapping, int device, bool writes)
{
    unsigned char wanted = writes ? NRM_CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                                  : NRM_CU_MEM_ACCESS_FLAGS_PROT_READ;
    return (mapping->access[device] & wanted) == wanted;
}

bool
sim_virtual_is_open(const struct sim_range *range, uintptr_t start, size_t nbytes,
                    int device, bool writes)
{
    uintptr_t at = start;
    const struct sim_mapping *mapping = find_mapping(range, start);
    while (mapping != NULL && mapping->start <= at && at < start + nbytes &&
           may_touch(mapping, device, writes)) {
        at = mapping->start + mapping->nbytes;
        mapping = mapping->next;
    }
    return at >= start + nbytes;
}

int
sim_virtual_device(const struct sim_range *range, uintptr_t address)
{
    const struct sim_mapping *mapping = find_mapping(range, address);
    return mapping == NULL ? -1 : device_of(mapping);
}

struct sim_physical *
sim_virtual_use(struct sim_span *span, size_t *nbytes)
{
    const struct sim_range *range = find_reservation(span->address, 1);
    const struct sim_mapping *mapping =
        range == NULL ? NULL : find_mapping(range, span->address);
    size_t rest = mapping == NULL ? GRANULARITY - span->address % GRANULARITY
                                  : mapping->start + mapping->nbytes - span->address;
    *nbytes = rest < *nbytes ? rest : *nbytes;
    if (mapping == NULL) {
        return NULL;
    }
    struct sim_range *bytes = mapping->physical->range;
    span->address = bytes->start + (span->address - mapping->start);
    span->range = bytes;
    span->is_reserved = false;
    mapping->physical->n_uses++;
    return mapping->physical;
}

void
sim_virtual_unuse(struct sim_physical *physical)
{
    if (physical != NULL) {
        physical_release(physical);
    }
}

/* ---- controls -------------------------------------------------------------------- */

void
sim_virtual_count_mappings(uint64_t *count, uint64_t *nbytes)
{
    const struct sim_range *range;
    for (size_t i = 0; (range = sim_range_at(i)) != NULL; i++) {
        const struct sim_mapping *mapping = range->mappings;
        for (; mapping != NULL; mapping = mapping->next) {
            *count += 1;
            *nbytes += mapping->nbytes;
        }
    }
}

static void
forget_physical(void *handle, void *unused)
{
    (void)unused;
    struct sim_physical *physical = handle;
    sim_device_memory_give(physical->range);
    sim_handle_destroy(&physicals, physical);
}

void
sim_virtual_forget(void)
{
    struct sim_range *range;
    size_t i = 0;
    while ((range = sim_range_at(i)) != NULL) {
        if (range->kind != SIM_VIRTUAL) {
            i++;
            continue;
        }
        while (range->mappings != NULL) {
            struct sim_mapping *mapping = range->mappings;
            range->mappings = mapping->next;
            free(mapping);
        }
        munmap((void *)range->start, range->nbytes);
        sim_range_remove(range);
    }
    sim_handles_each(&physicals, forget_physical, NULL);
}
