/*
 * See page_lock.h. A registration holds to the byte and may share its pages, but not
 * one byte, with another. Who has the bytes that are in the way is asked only when the
 * driver has refused: it tells the range around an address, so addresses are tried, the
 * ends first and then one on each page.
 */
#include "cuda/page_lock.h"

#include <stdatomic.h>

#include "base/error.h"
#include "nrm/options.h"
#include "os/memory.h"
#include "os/system.h"

/* ---- counts ---- */

static atomic_size_t n_page_locked;

void
nrm__page_locked_add(size_t nbytes)
{
    atomic_fetch_add_explicit(&n_page_locked, nbytes, memory_order_relaxed);
}

void
nrm__page_locked_subtract(size_t nbytes)
{
    atomic_fetch_sub_explicit(&n_page_locked, nbytes, memory_order_relaxed);
}

size_t
nrm__page_locked_nbytes(void)
{
    return nrm__cuda_is_forked()
               ? 0
               : atomic_load_explicit(&n_page_locked, memory_order_relaxed);
}

/* ---- refusals ---- */

nrm_status
nrm__page_lock_refused(nrm_CUresult code, const char *call, size_t nbytes)
{
    char asked[32], ours[32], limit[32] = "unlimited";
    struct nrm__memory_state state;
    nrm_format_nbytes(nbytes, asked, sizeof asked);
    if (code != NRM_CUDA_ERROR_OUT_OF_MEMORY &&
        code != NRM_CUDA_ERROR_OPERATING_SYSTEM) {
        return nrm__cuda_error(code, "%s of %s", call, asked);
    }
    nrm__memory_state(&state);
    if (state.memlock_limit_nbytes != SIZE_MAX) {
        nrm_format_nbytes(state.memlock_limit_nbytes, limit, sizeof limit);
    }
    nrm_format_nbytes(nrm__page_locked_nbytes(), ours, sizeof ours);
    return nrm__cuda_error(code, "%s of %s (%s page-locked by us, RLIMIT_MEMLOCK %s)",
                           call, asked, ours, limit);
}

static bool
ask(const struct nrm__driver *driver, nrm_CUpointer_attribute attribute,
    uintptr_t address, void *out)
{
    return driver->cuPointerGetAttribute(out, attribute, address) == NRM_CUDA_SUCCESS;
}

/* The range of the driver around an address, if that is one that the host can read. */
static bool
find_range(const struct nrm__driver *driver, uintptr_t address, uintptr_t *out_start,
           size_t *out_nbytes)
{
    unsigned type = 0;
    nrm_CUdeviceptr start = 0;
    size_t nbytes = 0;
    if (!ask(driver, NRM_CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address, &type) ||
        type != NRM_CU_MEMORYTYPE_HOST ||
        !ask(driver, NRM_CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address, &start) ||
        !ask(driver, NRM_CU_POINTER_ATTRIBUTE_RANGE_SIZE, address, &nbytes)) {
        return false;
    }
    *out_start = (uintptr_t)start;
    *out_nbytes = nbytes;
    return true;
}

/* The first range that overlaps ours and has its start, its end or the start of a page
   in common with it. */
static bool
find_overlap(const struct nrm__driver *driver, uintptr_t start, size_t nbytes,
             uintptr_t *out_start, size_t *out_nbytes)
{
    size_t page = nrm__page_size();
    if (find_range(driver, start, out_start, out_nbytes) ||
        find_range(driver, start + nbytes - 1, out_start, out_nbytes)) {
        return true;
    }
    for (uintptr_t at = (start | (page - 1)) + 1; at < start + nbytes; at += page) {
        if (find_range(driver, at, out_start, out_nbytes)) {
            return true;
        }
    }
    return false;
}

static nrm_status
refused(const struct nrm__driver *driver, nrm_CUresult code, uintptr_t start,
        size_t nbytes)
{
    uintptr_t other;
    size_t other_nbytes;
    bool is_taken = code == NRM_CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    if ((is_taken || code == NRM_CUDA_ERROR_INVALID_VALUE) &&
        find_overlap(driver, start, nbytes, &other, &other_nbytes)) {
        return nrm__error_native(
            NRM_INVALID_VALUE, code, nrm__cuda_error_name(code),
            "%zu B at 0x%zx cannot be page-locked: %zu B at 0x%zx have been, by "
            "somebody else",
            nbytes, (size_t)start, other_nbytes, (size_t)other);
    }
    if (is_taken) {
        return nrm__error_native(
            NRM_INVALID_VALUE, code, nrm__cuda_error_name(code),
            "%zu B at 0x%zx cannot be page-locked: a part has been, by somebody else, "
            "or was unmapped before it was unlocked",
            nbytes, (size_t)start);
    }
    return nrm__page_lock_refused(code, "cuMemHostRegister", nbytes);
}

/* ---- locking ---- */

static nrm_status
flags_for(const struct nrm__cuda_scope *scope, bool read_only, unsigned int *out)
{
    *out = NRM_CU_MEMHOSTREGISTER_PORTABLE;
    if (nrm__cuda_attribute(scope->device,
                            NRM_CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED) == 0) {
        return nrm__error(NRM_NOT_SUPPORTED,
                          "device %d cannot page-lock memory where it is "
                          "(HOST_REGISTER_SUPPORTED 0): use a page-locked copy",
                          scope->device);
    }
    if (!read_only) {
        return NRM_OK;
    }
    nrm_CUdevice_attribute by_flag =
        NRM_CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED;
    nrm_CUdevice_attribute as_it_is =
        NRM_CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES;
    if (nrm__cuda_attribute(scope->device, by_flag) > 0) {
        *out |= NRM_CU_MEMHOSTREGISTER_READ_ONLY;
    }
    else if (nrm__cuda_attribute(scope->device, as_it_is) <= 0) {
        return nrm__error(NRM_NOT_SUPPORTED,
                          "device %d cannot page-lock memory that may only be read "
                          "(READ_ONLY_HOST_REGISTER_SUPPORTED 0): use a copy",
                          scope->device);
    }
    return NRM_OK;
}

static nrm_status
lock_entered(const struct nrm__cuda_scope *scope, void *ptr, size_t nbytes,
             bool read_only, struct nrm__page_lock *out)
{
    unsigned int flags;
    NRM_TRY(flags_for(scope, read_only, &flags));
    nrm_CUresult code = scope->driver->cuMemHostRegister(ptr, nbytes, flags);
    if (code != NRM_CUDA_SUCCESS) {
        return refused(scope->driver, code, (uintptr_t)ptr, nbytes);
    }
    nrm__page_locked_add(nbytes);
    *out = (struct nrm__page_lock){
        .driver = scope->driver,
        .device = scope->device,
        /* Asked after locking: of a reset in between, the later number is the safe
           one. */
        .generation = nrm__cuda_generation(scope->device),
    };
    return NRM_OK;
}

nrm_status
nrm__page_lock(void *ptr, size_t nbytes, bool read_only, struct nrm__page_lock *out)
{
    /* The second time for a context that was reset since it was entered. */
    for (int attempt = 0;; attempt++) {
        struct nrm__cuda_scope scope;
        NRM_TRY(nrm__cuda_enter(-1, &scope));
        nrm_status status = lock_entered(&scope, ptr, nbytes, read_only, out);
        bool was_reset = nrm__cuda_generation(scope.device) != scope.generation;
        nrm__cuda_leave(&scope);
        if (status != NRM_DEVICE_LOST || !was_reset || attempt == 1) {
            return status;
        }
    }
}

/* ---- unlocking ---- */

bool
nrm__page_lock_lives(const struct nrm__page_lock *lock)
{
    return lock->driver != NULL && nrm__cuda_driver() == lock->driver &&
           nrm__cuda_generation_noticed(lock->device) == lock->generation;
}

static enum nrm__unlocked
unlock_entered(const struct nrm__cuda_scope *scope, void *ptr,
               const struct nrm__page_lock *lock)
{
    if (scope->generation != lock->generation) {
        return NRM__UNLOCKED; /* by the reset */
    }
    nrm_CUresult code = scope->driver->cuMemHostUnregister(ptr);
    if (code == NRM_CUDA_SUCCESS || nrm__cuda_is_destroyed(code) ||
        nrm__cuda_is_sticky(code) ||
        code == NRM_CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED) {
        return NRM__UNLOCKED;
    }
    (void)nrm__cuda_error(code, "cuMemHostUnregister of 0x%zx", (size_t)(uintptr_t)ptr);
    return NRM__UNLOCK_LATER;
}

enum nrm__unlocked
nrm__page_unlock(void *ptr, size_t nbytes, const struct nrm__page_lock *lock)
{
    struct nrm__cuda_scope scope;
    enum nrm__unlocked result = NRM__UNLOCKED;
    if (nrm__cuda_driver() != lock->driver) {
        result = lock->driver->simulated ? NRM__UNLOCKED : NRM__UNLOCK_NEVER;
    }
    else if (nrm__cuda_generation(lock->device) == lock->generation) {
        nrm_status status = nrm__cuda_enter_to_free(lock->device, &scope);
        if (status == NRM_OK) {
            result = unlock_entered(&scope, ptr, lock);
            nrm__cuda_leave(&scope);
        }
        else if (nrm__cuda_generation(lock->device) == lock->generation) {
            result = NRM__UNLOCK_LATER;
        }
    }
    if (result != NRM__UNLOCK_LATER) {
        nrm__page_locked_subtract(nbytes);
    }
    return result;
}
