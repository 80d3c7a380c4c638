/*
 * Contexts. Nothing here makes a context that the user did not ask for: the caller's
 * current one, else an already active primary one, else that of the option `device`.
 *
 * Every driver call of ours that may block stands between enter and leave, which run
 * detached from the interpreter, put the thread's capture mode to relaxed (otherwise
 * queries, registrations and allocations would invalidate stream captures of others)
 * and restore it and the current context.
 */
#ifndef NRM_CUDA_CONTEXT_H
#define NRM_CUDA_CONTEXT_H

#include <stdatomic.h>

#include "cuda/device.h"
#include "cuda/driver.h"

struct nrm__cuda_scope {
    const struct nrm__driver *driver;
    nrm_CUcontext context; /* that is current between enter and leave */
    int device;            /* its ordinal */
    uint64_t generation;   /* of the device, see below */
    unsigned long long id; /* of the context, after nrm__cuda_enter_retained */
    bool pushed;
    nrm_CUstreamCaptureMode mode; /* to restore */
};

/*
 * `device` -1: chosen as said above; otherwise the primary context of that device. A
 * context that is current but not primary leads to its device's primary one, or is
 * taken itself where that is not active. Initialises CUDA. Nothing is held on failure.
 */
nrm_status nrm__cuda_enter(int device, struct nrm__cuda_scope *out);

/* The primary context of a device if it lives: NRM_NOT_FOUND (not recorded) when it
   does not, or CUDA is not initialised. */
nrm_status nrm__cuda_enter_existing(int device, struct nrm__cuda_scope *out);

/* The same of a context that we retain, with as few calls as that takes. False: we know
   of none that lives, or it cannot be made current, and nothing has been changed. */
bool nrm__cuda_enter_retained(int device, struct nrm__cuda_scope *out);

/* As nrm__cuda_enter_existing, for calls that give memory back, which need no context:
   where there is no primary one, none is made current, `context` is NULL, and the
   memory is that of a context of the program's own, which may have ended. */
nrm_status nrm__cuda_enter_to_free(int device, struct nrm__cuda_scope *out);

void nrm__cuda_leave(struct nrm__cuda_scope *scope);

/* Ends and restores the relaxed capture mode of this thread, for calls that need no
   current context (cuEventQuery). */
nrm_CUstreamCaptureMode nrm__cuda_relax(const struct nrm__driver *driver);
void nrm__cuda_unrelax(const struct nrm__driver *driver, nrm_CUstreamCaptureMode mode);

/*
 * The number of the current life of a device's primary context: 1, and one more for
 * each reset that was noticed. Asks the driver, with calls that do not block, whether
 * the context is still the one we knew; makes and retains nothing.
 */
uint64_t nrm__cuda_generation(int device);

/* The same as last noticed: one atomic load, no driver call. */
uint64_t nrm__cuda_generation_noticed(int device);

/* Changes when any generation does. */
extern atomic_uint_least64_t nrm__cuda_n_resets;

static inline uint64_t
nrm__cuda_generations(void)
{
    return atomic_load_explicit(&nrm__cuda_n_resets, memory_order_acquire);
}

/* Like nrm__cuda_generation for every device whose primary context we know of, with
   calls that never block: for look-ups on the way of an allocation. */
void nrm__cuda_check_generations(void);

/* The device whose primary context this is, as far as it is retained by us; -1: none. A
   few atomic loads. */
int nrm__cuda_device_of(nrm_CUcontext context);

/* Whether the primary context of a device may be active: one that we retain is taken to
   be, of others the driver is asked. */
bool nrm__cuda_may_be_active(int device);

/* Devices whose primary context is active now (asked of the driver, never cached):
   ordinals into `out`, at most NRM__MAX_DEVICES. Does not make contexts. */
int nrm__cuda_active_devices(int *out);

/* Every generation ends; for nrm__cuda_set_library. */
void nrm__cuda_contexts_forget(void);

#endif
