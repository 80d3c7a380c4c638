/* Memory that the driver allocates: on the device, page-locked on the host, managed.
 *
 * Device memory is a sparse file without a name, one a device; its addresses are
 * reserved and never mapped, so a host that follows a device pointer crashes as it
 * would with a real driver, and devices may be larger than the machine. Host and
 * managed memory are ordinary private mappings; managed ones do not reach a forked
 * child, which would crash reading them on a real driver too. */
#include "sim.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { DEVICE_GRANULE = 512 };

static const size_t PAGE_NBYTES = 4096;

static size_t
round_up(size_t nbytes, size_t granule)
{
    return (nbytes + granule - 1) / granule * granule;
}

struct sim_range *
sim_range_create(enum sim_range_kind kind, uintptr_t start, size_t nbytes,
                 unsigned int flags, struct nrm_CUctx_st *context)
{
    struct sim_range *range = malloc(sizeof *range);
    if (range != NULL) {
        *range = (struct sim_range){.start = start,
                                    .nbytes = nbytes,
                                    .kind = kind,
                                    .flags = flags,
                                    .context = context};
        if (!sim_range_add(range)) {
            free(range);
            range = NULL;
        }
    }
    return range;
}

/* ---- device memory --------------------------------------------------------------- */

/* Twice the device's memory in addresses, so that free memory is never unusable only
 * because it is in pieces: a real driver maps pages. */
static bool
device_start(struct sim_device *device)
{
    if (device->base != 0) {
        return true;
    }
    size_t nbytes = 2 * round_up(device->total_nbytes, PAGE_NBYTES);
    int fd = memfd_create("cudasim", MFD_CLOEXEC);
    void *base = mmap(NULL, nbytes, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (fd < 0 || base == MAP_FAILED || ftruncate(fd, (off_t)nbytes) != 0) {
        if (base != MAP_FAILED) {
            munmap(base, nbytes);
        }
        if (fd >= 0) {
            close(fd);
        }
        return false;
    }
    device->fd = fd;
    device->base = (uintptr_t)base;
    device->reserved_nbytes = nbytes;
    return true;
}

void
sim_device_memory_finish(int ordinal)
{
    struct sim_device *device = &sim.devices[ordinal];
    if (device->base != 0) {
        munmap((void *)device->base, device->reserved_nbytes);
        close(device->fd);
        device->base = 0;
        device->fd = -1;
    }
}

/* The first gap that is large enough; 0: none. */
static uintptr_t
device_find_gap(const struct sim_device *device, size_t nbytes)
{
    uintptr_t end = device->base + device->reserved_nbytes;
    uintptr_t at = device->base;
    for (size_t i = sim_range_index(at);; i++) {
        const struct sim_range *next = sim_range_at(i);
        uintptr_t limit = next == NULL || next->start >= end ? end : next->start;
        if (limit - at >= nbytes) {
            return at;
        }
        if (limit == end) {
            return 0;
        }
        at = round_up(next->start + next->nbytes, DEVICE_GRANULE);
    }
}

nrm_CUresult
sim_device_memory_take(struct nrm_CUctx_st *context, enum sim_range_kind kind,
                       size_t nbytes, struct sim_range **out)
{
    struct sim_device *device = &sim.devices[context->ordinal];
    size_t charged = round_up(nbytes, DEVICE_GRANULE);
    if (charged < nbytes || charged > device->total_nbytes - device->used_nbytes ||
        !device_start(device)) {
        return NRM_CUDA_ERROR_OUT_OF_MEMORY;
    }
    uintptr_t address = device_find_gap(device, charged);
    struct sim_range *range = NULL;
    if (address != 0) {
        range = sim_range_create(kind, address, nbytes, 0, context);
    }
    if (range == NULL) {
        return NRM_CUDA_ERROR_OUT_OF_MEMORY;
    }
    device->used_nbytes += charged;
    *out = range;
    return NRM_CUDA_SUCCESS;
}

nrm_CUresult
cuMemAlloc_v2(nrm_CUdeviceptr *ptr, size_t nbytes)
{
    SIM_BEGIN(call, cuMemAlloc, SIM_PTR(ptr), nbytes);
    struct sim_range *range;
    if (ptr == NULL || nbytes == 0) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    nrm_CUresult result =
        sim_device_memory_take(call.context, SIM_DEVICE, nbytes, &range);
    if (result == NRM_CUDA_SUCCESS) {
        *ptr = range->start;
    }
    return sim_call_end(&call, result);
}

nrm_CUresult
cuMemGetInfo_v2(size_t *free_nbytes, size_t *total_nbytes)
{
    SIM_BEGIN(call, cuMemGetInfo, SIM_PTR(free_nbytes), SIM_PTR(total_nbytes));
    const struct sim_device *device = &sim.devices[call.context->ordinal];
    if (free_nbytes == NULL || total_nbytes == NULL) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    *free_nbytes = device->total_nbytes - device->used_nbytes;
    *total_nbytes = device->total_nbytes;
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

/* ---- mapped memory --------------------------------------------------------------- */

/* Where the kernel gives addresses that are still registered, somebody unmapped memory
 * without unregistering it. */
static void
forget_stale(uintptr_t start, size_t nbytes)
{
    struct sim_range *stale;
    while ((stale = sim_range_find_overlap(start, nbytes)) != NULL) {
        sim_fault(
            "registered memory 0x%zx of %zu bytes was unmapped, and its addresses "
            "are in use again",
            stale->start, stale->nbytes);
        sim.page_locked_nbytes -= stale->kind == SIM_REGISTERED ? stale->nbytes : 0;
        sim_range_remove(stale);
    }
}

static nrm_CUresult
map(enum sim_range_kind kind, size_t nbytes, unsigned int flags,
    struct nrm_CUctx_st *context, uintptr_t *out)
{
    size_t mapped = round_up(nbytes, PAGE_NBYTES);
    if (mapped < nbytes) {
        return NRM_CUDA_ERROR_OUT_OF_MEMORY;
    }
    void *address = mmap(NULL, mapped, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) {
        return NRM_CUDA_ERROR_OUT_OF_MEMORY;
    }
    forget_stale((uintptr_t)address, mapped);
    if (kind == SIM_MANAGED) {
        madvise(address, mapped, MADV_DONTFORK);
    }
    if (sim_range_create(kind, (uintptr_t)address, nbytes, flags, context) == NULL) {
        munmap(address, mapped);
        return NRM_CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = (uintptr_t)address;
    return NRM_CUDA_SUCCESS;
}

static bool
exceeds_page_locked_limit(size_t nbytes)
{
    uint64_t limit = sim.config.page_locked_nbytes;
    return limit != 0 &&
           (sim.page_locked_nbytes > limit || nbytes > limit - sim.page_locked_nbytes);
}

nrm_CUresult
sim_page_lock(size_t nbytes)
{
    if (exceeds_page_locked_limit(nbytes)) {
        return NRM_CUDA_ERROR_OUT_OF_MEMORY;
    }
    sim.page_locked_nbytes += nbytes;
    return NRM_CUDA_SUCCESS;
}

nrm_CUresult
cuMemHostAlloc(void **ptr, size_t nbytes, unsigned int flags)
{
    SIM_BEGIN(call, cuMemHostAlloc, SIM_PTR(ptr), nbytes, flags);
    const unsigned int known = NRM_CU_MEMHOSTALLOC_PORTABLE |
                               NRM_CU_MEMHOSTALLOC_DEVICEMAP |
                               NRM_CU_MEMHOSTALLOC_WRITECOMBINED;
    if (ptr == NULL || nbytes == 0 || (flags & ~known) != 0) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    nrm_CUresult result = sim_page_lock(nbytes);
    if (result == NRM_CUDA_SUCCESS) {
        uintptr_t address;
        result = map(SIM_HOST, nbytes, flags, call.context, &address);
        if (result == NRM_CUDA_SUCCESS) {
            *ptr = (void *)address;
        }
        else {
            sim.page_locked_nbytes -= nbytes;
        }
    }
    return sim_call_end(&call, result);
}

nrm_CUresult
sim_managed_memory_take(struct nrm_CUctx_st *context, size_t nbytes,
                        struct sim_range **out)
{
    uintptr_t address;
    nrm_CUresult result =
        map(SIM_MANAGED, nbytes, NRM_CU_MEM_ATTACH_GLOBAL, context, &address);
    if (result == NRM_CUDA_SUCCESS) {
        *out = sim_range_find(address);
    }
    return result;
}

nrm_CUresult
cuMemAllocManaged(nrm_CUdeviceptr *ptr, size_t nbytes, unsigned int flags)
{
    SIM_BEGIN(call, cuMemAllocManaged, SIM_PTR(ptr), nbytes, flags);
    const int *attributes = sim.devices[call.context->ordinal].attributes;
    if (ptr == NULL || nbytes == 0 ||
        (flags != NRM_CU_MEM_ATTACH_GLOBAL && flags != NRM_CU_MEM_ATTACH_HOST)) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    if (attributes[NRM_CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY] == 0) {
        return sim_call_end(&call, NRM_CUDA_ERROR_NOT_SUPPORTED);
    }
    uintptr_t address;
    nrm_CUresult result = map(SIM_MANAGED, nbytes, flags, call.context, &address);
    if (result == NRM_CUDA_SUCCESS) {
        *ptr = address;
    }
    return sim_call_end(&call, result);
}

/* ---- giving back ----------------------------------------------------------------- */

/* With `keeps_addresses` nothing else is mapped there while the process lives: programs
 * hold pointers into memory that a reset took away, and must not meet new memory by
 * them. */
static void
unmap(struct sim_range *range, bool keeps_addresses)
{
    if (range->kind == SIM_DEVICE || range->kind == SIM_PHYSICAL) {
        struct sim_device *device = &sim.devices[range->context->ordinal];
        size_t charged = round_up(range->nbytes, DEVICE_GRANULE);
        device->used_nbytes -= charged;
        if (charged >= PAGE_NBYTES) { /* whole pages inside it go back to the system */
            fallocate(device->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                      (off_t)(range->start - device->base), (off_t)charged);
        }
    }
    else if (range->kind != SIM_REGISTERED) {
        size_t mapped = round_up(range->nbytes, PAGE_NBYTES);
        if (keeps_addresses) {
            mmap((void *)range->start, mapped, PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        }
        else {
            munmap((void *)range->start, mapped);
        }
    }
    if (range->kind == SIM_HOST || range->kind == SIM_REGISTERED) {
        sim.page_locked_nbytes -= range->nbytes;
    }
    sim_range_remove(range);
}

/* Waits for all work of the context, with the driver's lock held, which stalls
 * everybody who wants to submit, register or allocate meanwhile. */
nrm_CUresult
sim_range_give_back(struct sim_range *range)
{
    nrm_CUresult result = sim_marker_wait(sim_marker_of_memory(range));
    if (result == NRM_CUDA_SUCCESS) {
        unmap(range, false);
    }
    return result;
}

void
sim_device_memory_give(struct sim_range *range)
{
    unmap(range, false);
}

void
sim_memory_forget(struct nrm_CUctx_st *context)
{
    size_t i = 0;
    struct sim_range *range;
    while ((range = sim_range_at(i)) != NULL) {
        if (range->context == context && range->kind != SIM_PHYSICAL) {
            unmap(range, true);
        }
        else {
            i++;
        }
    }
}

nrm_CUresult
cuMemFree_v2(nrm_CUdeviceptr ptr)
{
    SIM_BEGIN(call, cuMemFree, ptr);
    if (ptr == 0) {
        return sim_call_end(&call, NRM_CUDA_SUCCESS);
    }
    struct sim_range *range = sim_range_find(ptr);
    if (range != NULL && range->pool != NULL) {
        return sim_call_end(&call, sim_pool_free_now(ptr));
    }
    if (range == NULL || range->start != ptr ||
        (range->kind != SIM_DEVICE && range->kind != SIM_MANAGED)) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    return sim_call_end(&call, sim_range_give_back(range));
}

nrm_CUresult
cuMemFreeHost(void *ptr)
{
    SIM_BEGIN(call, cuMemFreeHost, SIM_PTR(ptr));
    if (ptr == NULL) {
        return sim_call_end(&call, NRM_CUDA_SUCCESS);
    }
    struct sim_range *range = sim_range_find((uintptr_t)ptr);
    if (range == NULL || range->start != (uintptr_t)ptr || range->kind != SIM_HOST) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    return sim_call_end(&call, sim_range_give_back(range));
}
