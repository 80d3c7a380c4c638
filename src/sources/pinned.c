/*
 * PinnedHostMemoryResource: page-locked host memory, the fast way.
 *
 * cuMemHostAlloc zeroes and locks page by page in one thread. Mapping the range
 * ourselves, in huge pages, touched by several threads and registered in one piece
 * gives the same memory many times faster; where a device or a driver does not register
 * host memory, cuMemHostAlloc is what remains. A copy must not cross two registrations,
 * so a block is always one.
 *
 * Touching more than is free gets a process killed, so it is compared first. Registered
 * memory outlives a reset of its context, as ordinary memory that must be registered
 * again; that of cuMemHostAlloc does not. Giving back never calls the driver: it
 * retires.
 */
#include "sources/pinned.h"

#include <errno.h>
#include <stdio.h>

#include "base/bits.h"
#include "base/error.h"
#include "core/hooks.h"
#include "core/left_out.h"
#include "core/nodes.h"
#include "core/uses.h"
#include "cuda/context.h"
#include "cuda/page_lock.h"
#include "nrm/options.h"
#include "os/memory.h"
#include "os/system.h"
#include "os/touch.h"
#include "sources/on_device.h"

enum { MAX_SET_ASIDE = 8 }; /* ranges that one allocation finds registered already */

#define DRIVER_ALIGNMENT ((size_t)256) /* of everything the driver allocates */

/* How a block is page-locked; what block->tag points to. */
struct locked {
    void *base;      /* of the mapping, or what cuMemHostAlloc returned */
    size_t nbytes;   /* from there */
    bool registered; /* by cuMemHostRegister */
    const struct nrm__driver *driver;
    int device;                       /* whose context it was locked in */
    atomic_uint_least64_t generation; /* of the device, then */
};

/* Why cuMemHostRegister is not used: of the device, and of the driver that refused. */
enum { REASON_NONE, REASON_ATTRIBUTE, REASON_NOT_SUPPORTED, REASON_NOT_PERMITTED };
static atomic_int last_reason;
static atomic_bool was_used;
static _Atomic(const struct nrm__driver *) refusing; /* it does not register at all */

static struct locked *
locked_of(const struct nrm__block *block)
{
    return (struct locked *)(uintptr_t)block->tag;
}

/* ---- for info ---- */

void
nrm__pinned_method(char *out, size_t size)
{
    static const char *const texts[] = {
        "cuMemHostRegister",
        "cuMemHostAlloc: the device has HOST_REGISTER_SUPPORTED 0",
        "cuMemHostAlloc: cuMemHostRegister answered CUDA_ERROR_NOT_SUPPORTED",
        "cuMemHostAlloc: cuMemHostRegister answered CUDA_ERROR_NOT_PERMITTED",
    };
    snprintf(out, size, "%s",
             atomic_load(&was_used) ? texts[atomic_load(&last_reason)] : "");
}

size_t
nrm__pinned_nbytes(void)
{
    return nrm__page_locked_nbytes();
}

static void
note_locked(struct locked *locked, const struct nrm__cuda_scope *scope, int reason)
{
    locked->driver = scope->driver;
    locked->device = scope->device;
    /* Asked after locking: of a reset in between, the later number is the safe one. */
    atomic_store(&locked->generation, nrm__cuda_generation(scope->device));
    nrm__page_locked_add(locked->nbytes);
    nrm__registered_add(locked->registered ? locked->nbytes : 0);
    atomic_store(&last_reason, reason);
    atomic_store(&was_used, true);
}

/* ---- what the machine can give ---- */

/* Reading what is free takes longer than registering a small block. One reading vouches
   for an eighth of it, for a twentieth of a second. */
#define VOUCH_DIVISOR 8
#define VOUCH_NS UINT64_C(50000000)

static atomic_uint_least64_t vouched_until;
static atomic_int_least64_t vouched_nbytes;

static bool
is_vouched_for(size_t nbytes)
{
    return nrm__clock_ns() <
               atomic_load_explicit(&vouched_until, memory_order_relaxed) &&
           atomic_fetch_sub_explicit(&vouched_nbytes, (int64_t)nbytes,
                                     memory_order_relaxed) >= (int64_t)nbytes;
}

static void
vouch(size_t free_nbytes)
{
    size_t nbytes = nrm__min(free_nbytes, SIZE_MAX / 2) / VOUCH_DIVISOR;
    atomic_store_explicit(&vouched_nbytes, (int64_t)nbytes, memory_order_relaxed);
    atomic_store_explicit(&vouched_until, nrm__clock_ns() + VOUCH_NS,
                          memory_order_relaxed);
}

static nrm_status
check_touchable(size_t nbytes)
{
    char asked[32], available[32], limit[32];
    struct nrm__memory_state state;
    if (is_vouched_for(nbytes)) {
        return NRM_OK;
    }
    size_t touchable = nrm__touchable_nbytes();
    if (nbytes <= touchable) {
        vouch(touchable - nbytes);
        return NRM_OK;
    }
    nrm__memory_state(&state);
    bool by_group = state.cgroup_available_nbytes <= state.available_nbytes;
    nrm_format_nbytes(nbytes, asked, sizeof asked);
    nrm_format_nbytes(touchable, available, sizeof available);
    nrm_format_nbytes(by_group ? state.cgroup_limit_nbytes : state.total_nbytes, limit,
                      sizeof limit);
    return nrm__error(NRM_OUT_OF_MEMORY,
                      "%s of page-locked memory were asked for and %s can be touched "
                      "without the process being killed: %s %s",
                      asked, available,
                      by_group ? "its control group is limited to" : "this machine has",
                      limit);
}

/* ---- cuMemHostRegister ---- */

/* REASON_NONE: try it. */
static int
reason_against_registering(const struct nrm__cuda_scope *scope)
{
    if (nrm__cuda_attribute(scope->device,
                            NRM_CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED) == 0) {
        return REASON_ATTRIBUTE;
    }
    if (atomic_load_explicit(&refusing, memory_order_relaxed) == scope->driver) {
        return REASON_NOT_SUPPORTED;
    }
    return REASON_NONE;
}

/* Maps and touches `nbytes`, a multiple of the page size. */
static nrm_status
map_touched(size_t nbytes, size_t alignment, void **out)
{
    char asked[32];
    void *ptr;
    if (nbytes >= NRM__HUGE_PAGE) {
        alignment = nrm__max(alignment, NRM__HUGE_PAGE);
    }
    alignment = nrm__max(alignment, nrm__page_size());
    nrm_format_nbytes(nbytes, asked, sizeof asked);
    int code = nrm__map(nbytes, alignment, &ptr);
    if (code != 0) {
        return nrm__error_errno(NRM_OUT_OF_MEMORY, code, "no addresses for %s", asked);
    }
    if (nbytes >= NRM__HUGE_PAGE) {
        nrm__advise_huge_pages(ptr, nbytes, true);
    }
    code = nrm__touch(ptr, nbytes, (int)nrm_option_get(NRM_OPT_TOUCH_THREADS));
    if (code != 0) {
        nrm__unmap(ptr, nbytes);
        return nrm__error_errno(code == ENOMEM ? NRM_OUT_OF_MEMORY : NRM_OS_ERROR, code,
                                "%s of memory could not be touched", asked);
    }
    *out = ptr;
    return NRM_OK;
}

/*
 * Maps and registers. The driver remembers what somebody unmapped without unregistering
 * it, and refuses addresses that we got in its place: these are set aside for good, as
 * copies of theirs would go to the old pages.
 */
static nrm_status
map_registered(const struct nrm__cuda_scope *scope, size_t nbytes, size_t alignment,
               void **out, nrm_CUresult *out_code)
{
    nrm_CUresult code = NRM_CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    for (int i = 0; i < MAX_SET_ASIDE; i++) {
        struct nrm__in_hand in_hand;
        NRM_TRY(map_touched(nbytes, alignment, out));
        nrm__in_hand_begin(&in_hand, *out, nbytes);
        code = scope->driver->cuMemHostRegister(*out, nbytes,
                                                NRM_CU_MEMHOSTREGISTER_PORTABLE);
        nrm__in_hand_end(&in_hand);
        if (code != NRM_CUDA_SUCCESS) {
            nrm__unmap(*out, nbytes);
        }
        if (code != NRM_CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED) {
            break;
        }
        nrm__reserve(*out, nbytes);
    }
    *out_code = code;
    return NRM_OK;
}

/* NRM_NOT_SUPPORTED (not recorded), with the reason: cuMemHostAlloc is to be tried. */
static nrm_status
lock_by_registering(const struct nrm__cuda_scope *scope,
                    const struct nrm__request *request, struct locked *locked,
                    int *out_reason)
{
    size_t nbytes = nrm__align_up(request->nbytes, nrm__page_size());
    *out_reason = reason_against_registering(scope);
    if (*out_reason != REASON_NONE) {
        return NRM_NOT_SUPPORTED;
    }
    nrm_CUresult code;
    NRM_TRY(map_registered(scope, nbytes, request->alignment, &locked->base, &code));
    if (code == NRM_CUDA_SUCCESS) {
        locked->nbytes = nbytes;
        locked->registered = true;
        note_locked(locked, scope, REASON_NONE);
        return NRM_OK;
    }
    if (code == NRM_CUDA_ERROR_NOT_SUPPORTED) {
        atomic_store_explicit(&refusing, scope->driver, memory_order_relaxed);
        *out_reason = REASON_NOT_SUPPORTED;
        return NRM_NOT_SUPPORTED;
    }
    if (code == NRM_CUDA_ERROR_NOT_PERMITTED) {
        *out_reason = REASON_NOT_PERMITTED;
        return NRM_NOT_SUPPORTED;
    }
    return nrm__page_lock_refused(code, "cuMemHostRegister", nbytes);
}

/* ---- cuMemHostAlloc ---- */

static nrm_status
lock_by_driver(const struct nrm__cuda_scope *scope, const struct nrm__request *request,
               struct locked *locked, int reason)
{
    size_t slack = request->alignment > DRIVER_ALIGNMENT
                       ? request->alignment - DRIVER_ALIGNMENT
                       : 0;
    size_t nbytes = request->nbytes + slack;
    if (nbytes < slack) {
        return nrm__page_lock_refused(NRM_CUDA_ERROR_OUT_OF_MEMORY, "cuMemHostAlloc",
                                      SIZE_MAX);
    }
    nrm_CUresult code = scope->driver->cuMemHostAlloc(&locked->base, nbytes,
                                                      NRM_CU_MEMHOSTALLOC_PORTABLE);
    if (code != NRM_CUDA_SUCCESS) {
        return nrm__page_lock_refused(code, "cuMemHostAlloc", nbytes);
    }
    locked->nbytes = nbytes;
    locked->registered = false;
    note_locked(locked, scope, reason);
    return NRM_OK;
}

/* ---- allocation ---- */

static nrm_status
lock_entered(const struct nrm__cuda_scope *scope, const struct nrm__request *request,
             struct locked *locked)
{
    int reason;
    NRM_TRY(check_touchable(request->nbytes));
    nrm_status status = lock_by_registering(scope, request, locked, &reason);
    if (status == NRM_NOT_SUPPORTED) {
        status = lock_by_driver(scope, request, locked, reason);
    }
    return status;
}

static nrm_status
lock_detached(nrm_resource *self, const struct nrm__request *request,
              struct locked *locked)
{
    /* The second time for a context that was reset since it was entered. */
    for (int attempt = 0;; attempt++) {
        struct nrm__cuda_scope scope;
        NRM_TRY(nrm__cuda_enter(atomic_load(&self->device), &scope));
        nrm_status status = lock_entered(&scope, request, locked);
        bool was_reset = nrm__cuda_generation(scope.device) != scope.generation;
        nrm__cuda_leave(&scope);
        if (status != NRM_DEVICE_LOST || !was_reset || attempt == 1) {
            return status;
        }
    }
}

static nrm_status
pinned_allocate(nrm_resource *self, const struct nrm__request *request,
                struct nrm__block *out)
{
    (void)nrm__retired_drain(0); /* so that a loop of temporaries does not grow */
    struct locked *locked = nrm__node_allocate(sizeof *locked);
    if (locked == NULL) {
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe a block");
    }
    void *token = nrm__detach();
    nrm_status status = lock_detached(self, request, locked);
    nrm__attach(token);
    if (status != NRM_OK) {
        nrm__node_deallocate(locked, sizeof *locked);
        return status;
    }
    size_t start = (size_t)(uintptr_t)locked->base;
    size_t address = nrm__align_up(start, request->alignment);
    out->ptr = (void *)(uintptr_t)address;
    out->capacity = locked->nbytes - (address - start);
    out->flags = locked->registered ? NRM__BLOCK_IS_ZERO | NRM__BLOCK_IS_REGISTERED : 0;
    out->tag = (uint64_t)(uintptr_t)locked;
    return NRM_OK;
}

static void
pinned_deallocate(nrm_resource *self, const struct nrm__block *block,
                  nrm_stream *stream)
{
    nrm__retire(block, nrm__epoch_stamp());
}

/* ---- release ---- */

static nrm_CUresult
unlock_entered(const struct nrm__cuda_scope *scope, const struct locked *locked)
{
    if (!locked->registered) {
        return scope->driver->cuMemFreeHost(locked->base);
    }
    struct nrm__in_hand in_hand;
    nrm__in_hand_begin(&in_hand, locked->base, locked->nbytes);
    nrm_CUresult code = scope->driver->cuMemHostUnregister(locked->base);
    nrm__in_hand_end(&in_hand);
    return code;
}

/* NRM_OK also when the context went meanwhile, and the lock with it. */
static nrm_status
unlock(const struct locked *locked, bool *out_can_unmap)
{
    struct nrm__cuda_scope scope;
    nrm_CUresult code = NRM_CUDA_SUCCESS;
    NRM_TRY(nrm__cuda_enter_to_free(locked->device, &scope));
    if (scope.generation == atomic_load(&locked->generation)) {
        code = unlock_entered(&scope, locked);
    }
    nrm__cuda_leave(&scope);
    *out_can_unmap = code == NRM_CUDA_SUCCESS || nrm__cuda_is_destroyed(code) ||
                     nrm__cuda_is_sticky(code) ||
                     code == NRM_CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    if (code == NRM_CUDA_SUCCESS || nrm__cuda_is_destroyed(code)) {
        return NRM_OK;
    }
    return nrm__cuda_error(code, locked->registered ? "cuMemHostUnregister"
                                                    : "cuMemFreeHost");
}

static void
pinned_release(nrm_resource *self, const struct nrm__block *block)
{
    struct locked *locked = locked_of(block);
    bool can_unmap = true;
    if (nrm__is_exiting()) {
        return;
    }
    if (nrm__cuda_is_forked()) {
        /* The lock is the parent's. The pages are left alone too: some may have been
           kept from this process, and their addresses may be in use again. */
        nrm__node_deallocate(locked, sizeof *locked);
        return;
    }
    if (nrm__cuda_driver() != locked->driver) {
        can_unmap = locked->driver->simulated; /* a real one still has it registered */
    }
    else if (nrm__cuda_generation(locked->device) == atomic_load(&locked->generation)) {
        can_unmap = false;
        if (unlock(locked, &can_unmap) != NRM_OK) {
            nrm__lost_error_note(nrm_last_error());
        }
    }
    /* What the driver may still hold stays mapped: unmapped, its address would lead the
       copies of a later owner to the old pages. */
    if (locked->registered && can_unmap) {
        nrm__unmap(locked->base, locked->nbytes);
    }
    nrm__page_locked_subtract(locked->nbytes);
    nrm__registered_subtract(locked->registered ? locked->nbytes : 0);
    nrm__node_deallocate(locked, sizeof *locked);
}

/* ---- after a reset ---- */

static nrm_status
register_again(struct locked *locked)
{
    struct nrm__cuda_scope scope;
    nrm_CUresult code = NRM_CUDA_SUCCESS;
    NRM_TRY(nrm__cuda_enter(locked->device, &scope));
    if (scope.generation != atomic_load(&locked->generation)) {
        code = scope.driver->cuMemHostRegister(locked->base, locked->nbytes,
                                               NRM_CU_MEMHOSTREGISTER_PORTABLE);
        if (code == NRM_CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED) {
            code = NRM_CUDA_SUCCESS; /* by another thread, for the same block */
        }
        if (code == NRM_CUDA_SUCCESS) {
            atomic_store(&locked->generation, nrm__cuda_generation(locked->device));
        }
    }
    nrm__cuda_leave(&scope);
    return code == NRM_CUDA_SUCCESS
               ? NRM_OK
               : nrm__page_lock_refused(code, "cuMemHostRegister after a reset",
                                        locked->nbytes);
}

static nrm_status
renew_detached(struct locked *locked)
{
    if (nrm__cuda_generation(locked->device) == atomic_load(&locked->generation)) {
        return NRM_OK;
    }
    if (!locked->registered) {
        return nrm__error(
            NRM_DEVICE_LOST,
            "the context of device %d was reset: memory of cuMemHostAlloc "
            "from before is gone and must not be touched",
            locked->device);
    }
    return register_again(locked);
}

static nrm_status
pinned_renew(nrm_resource *self, struct nrm__block *block)
{
    void *token = nrm__detach();
    nrm_status status = renew_detached(locked_of(block));
    nrm__attach(token);
    return status;
}

static const struct nrm__ops pinned_ops = {
    .class_name = "PinnedHostMemoryResource",
    .flags = NRM__OPS_MAPPED | NRM__OPS_WAITS,
    .allocate = pinned_allocate,
    .deallocate = pinned_deallocate,
    .release_block = pinned_release,
    .renew_block = pinned_renew,
};

nrm_status
nrm_pinned_create(const nrm_device_options *options, nrm_resource **out)
{
    nrm_resource *mr;
    NRM_TRY(nrm__driver_source_create(&pinned_ops, NRM_KIND_PINNED, options, sizeof *mr,
                                      &mr));
    nrm__resource_publish(mr);
    *out = mr;
    return NRM_OK;
}
