/* cuMemHostRegister: which memory can be page-locked, and to the byte.
 *
 * Registrations may share pages but not bytes. What the mapping behind the bytes must
 * be is read from the kernel's table: all of it mapped, writable unless READ_ONLY is
 * asked for, and not a writable shared mapping of a file. */
#include "sim.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Of registrations up to this size the bytes are kept, for copies after an munmap. */
static const size_t SHADOW_NBYTES = (size_t)1 << 20;

/* A writable shared mapping of a real file; those of shared memory have one as well,
 * but no disk behind it. */
static bool
is_shared_file(const char *permissions, unsigned long long inode, const char *path)
{
    static const char *const memory[] = {"/memfd:", "/dev/shm/", "/dev/zero", "/SYSV",
                                         "/anon_hugepage"};
    if (permissions[1] != 'w' || permissions[3] != 's' || inode == 0) {
        return false;
    }
    for (size_t i = 0; i < sizeof memory / sizeof memory[0]; i++) {
        if (strncmp(path, memory[i], strlen(memory[i])) == 0) {
            return false;
        }
    }
    return true;
}

/* Reads the kernel's table until it has covered the bytes, or met what forbids it. */
static bool
is_registrable(FILE *maps, uintptr_t start, size_t nbytes, bool read_only)
{
    char line[4352]; /* a path and what stands before it */
    uintptr_t at = start;
    while (at < start + nbytes && fgets(line, sizeof line, maps) != NULL) {
        uintptr_t low;
        uintptr_t high;
        char permissions[8];
        unsigned long long inode;
        int path = 0;
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %7s %*s %*s %llu %n", &low, &high,
                   permissions, &inode, &path) < 4 ||
            high <= at) {
            continue;
        }
        if (low > at || permissions[0] != 'r' ||
            (permissions[1] != 'w' && !read_only) ||
            is_shared_file(permissions, inode, line + path)) {
            return false;
        }
        at = high;
    }
    return at >= start + nbytes;
}

/* What stands against it; called without the state lock, since it reads a file. */
static nrm_CUresult
check_mapping(uintptr_t start, size_t nbytes, unsigned int flags)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    if (maps == NULL) {
        return NRM_CUDA_ERROR_OPERATING_SYSTEM;
    }
    bool fits = is_registrable(maps, start, nbytes,
                               (flags & NRM_CU_MEMHOSTREGISTER_READ_ONLY) != 0);
    fclose(maps);
    return fits ? NRM_CUDA_SUCCESS : NRM_CUDA_ERROR_INVALID_VALUE;
}

static nrm_CUresult
check_arguments(const struct sim_call *call, const void *ptr, size_t nbytes,
                unsigned int flags)
{
    const unsigned int known = NRM_CU_MEMHOSTREGISTER_PORTABLE |
                               NRM_CU_MEMHOSTREGISTER_DEVICEMAP |
                               NRM_CU_MEMHOSTREGISTER_READ_ONLY;
    const int *attributes = sim.devices[call->context->ordinal].attributes;
    if (ptr == NULL || nbytes == 0 || (uintptr_t)ptr + nbytes < nbytes) {
        return NRM_CUDA_ERROR_INVALID_VALUE;
    }
    if ((flags & NRM_CU_MEMHOSTREGISTER_IOMEMORY) != 0 ||
        attributes[NRM_CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED] == 0) {
        return NRM_CUDA_ERROR_NOT_SUPPORTED;
    }
    if ((flags & ~known) != 0) {
        return NRM_CUDA_ERROR_INVALID_VALUE;
    }
    if ((flags & NRM_CU_MEMHOSTREGISTER_READ_ONLY) != 0 &&
        attributes[NRM_CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED] == 0) {
        return NRM_CUDA_ERROR_NOT_SUPPORTED;
    }
    const struct sim_range *other = sim_range_find_overlap((uintptr_t)ptr, nbytes);
    if (other == NULL) {
        return NRM_CUDA_SUCCESS;
    }
    return other->kind == SIM_REGISTERED ? NRM_CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
                                         : NRM_CUDA_ERROR_INVALID_VALUE;
}

static struct sim_range *
range_create(const struct sim_call *call, uintptr_t start, size_t nbytes,
             unsigned int flags)
{
    struct sim_range *range = malloc(sizeof *range);
    if (range == NULL) {
        return NULL;
    }
    *range = (struct sim_range){.start = start,
                                .nbytes = nbytes,
                                .kind = SIM_REGISTERED,
                                .flags = flags,
                                .context = call->context};
    if (nbytes <= SHADOW_NBYTES) {
        range->shadow = malloc(nbytes);
        if (range->shadow != NULL && !sim_bytes_read(range->shadow, start, nbytes)) {
            free(range->shadow);
            range->shadow = NULL;
        }
    }
    return range;
}

/* The driver's lock keeps other registrations out while the state lock is let go. */
static nrm_CUresult
register_range(const struct sim_call *call, uintptr_t start, size_t nbytes,
               unsigned int flags)
{
    sim_unlock();
    nrm_CUresult result = check_mapping(start, nbytes, flags);
    struct sim_range *range =
        result == NRM_CUDA_SUCCESS ? range_create(call, start, nbytes, flags) : NULL;
    sim_lock();
    if (result != NRM_CUDA_SUCCESS) {
        return result;
    }
    if (range == NULL || sim_page_lock(nbytes) != NRM_CUDA_SUCCESS) {
        goto fail;
    }
    if (!sim_range_add(range)) {
        sim.page_locked_nbytes -= nbytes;
        goto fail;
    }
    return NRM_CUDA_SUCCESS;

fail:
    if (range != NULL) {
        free(range->shadow);
        free(range);
    }
    return NRM_CUDA_ERROR_OUT_OF_MEMORY;
}

nrm_CUresult
cuMemHostRegister_v2(void *ptr, size_t nbytes, unsigned int flags)
{
    SIM_BEGIN(call, cuMemHostRegister, SIM_PTR(ptr), nbytes, flags);
    nrm_CUresult result = check_arguments(&call, ptr, nbytes, flags);
    if (result == NRM_CUDA_SUCCESS) {
        result = register_range(&call, (uintptr_t)ptr, nbytes, flags);
    }
    return sim_call_end(&call, result);
}

nrm_CUresult
cuMemHostUnregister(void *ptr)
{
    SIM_BEGIN(call, cuMemHostUnregister, SIM_PTR(ptr));
    struct sim_range *range = sim_range_find((uintptr_t)ptr);
    if (range == NULL) {
        return sim_call_end(&call, NRM_CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    }
    if (range->kind != SIM_REGISTERED || range->start != (uintptr_t)ptr) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    unsigned char byte;
    if (!sim_bytes_read(&byte, range->start, 1) ||
        !sim_bytes_read(&byte, range->start + range->nbytes - 1, 1)) {
        sim_fault("cuMemHostUnregister of 0x%zx, %zu bytes, which were unmapped while "
                  "they were registered",
                  range->start, range->nbytes);
    }
    return sim_call_end(&call, sim_range_give_back(range));
}
