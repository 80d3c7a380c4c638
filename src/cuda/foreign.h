/*
 * Contexts of the program's own (cuCtxCreate), beside the primary ones, in which work
 * may use device memory of ours. Known are those that were current when a pool of such
 * memory grew or asked what is done, and those of streams that memory was freed on.
 */
#ifndef NRM_CUDA_FOREIGN_H
#define NRM_CUDA_FOREIGN_H

#include "cuda/event.h"
#include "cuda/place.h"

#define NRM__CUDA_ALL_STREAMS UINTPTR_MAX /* in place of a handle */

/* One of them in one life of it. */
struct nrm__cuda_foreign {
    nrm_CUcontext context;
    unsigned long long id;
    int device;
    const struct nrm__driver *driver;
};

extern atomic_uint nrm__cuda_n_foreign; /* only to be read */

static inline bool
nrm__cuda_has_foreign(void)
{
    return atomic_load_explicit(&nrm__cuda_n_foreign, memory_order_acquire) != 0;
}

/* What is known of the current context, and of that of a stream that the caller was
   given in this call, if it is none of the primary ones. Detached, no lock held: a
   primary context that is seen for the first time is retained to be known. */
void nrm__cuda_foreign_note_current(void);
void nrm__cuda_foreign_note_stream(uintptr_t handle);

/* The next that lives, of a device (-1: of any), from *place on, which begins with 0.
   False: there is no more. Calls of the driver that never block; forgets those that
   have ended. */
bool nrm__cuda_foreign_next(int device, unsigned *place, struct nrm__cuda_foreign *out);

/* Whether there were more at a time than can be known. */
bool nrm__cuda_foreign_is_full(void);

/*
 * Records what was submitted to one of its streams (0, 1, 2 or one that was made
 * there), or to all of them. An event without a handle: it is done. Detached, no lock
 * held. As in nrm__cuda_record, NRM__RECORD_CAPTURE also stands for whatever else keeps
 * it from being made here and now, and after NRM__RECORD_INVALIDATED the context as a
 * whole is not recorded on until nrm__cuda_foreign_lift. NRM__RECORD_IDLE: the context
 * has ended.
 */
enum nrm__record nrm__cuda_foreign_record(const struct nrm__cuda_foreign *foreign,
                                          uintptr_t handle,
                                          struct nrm__cuda_lone_event *out);

void nrm__cuda_foreign_lift(void);

/* NRM_OK: done, or its context has ended. NRM_NOT_FOUND: not yet. Of a driver that is
   not there any more everything is done. Never blocks. */
nrm_status nrm__cuda_foreign_query(const struct nrm__driver *driver,
                                   const struct nrm__cuda_lone_event *event);

/* Ends an event, done or not. Never blocks. */
void nrm__cuda_foreign_drop(const struct nrm__driver *driver,
                            const struct nrm__cuda_lone_event *event);

/* Whether the event can still be named: false when its context has ended. */
bool nrm__cuda_foreign_is_named(const struct nrm__driver *driver,
                                const struct nrm__cuda_lone_event *event);

/* What is submitted to the stream 0, 1 or 2 of the current context from now on comes
   after the event. NRM_NOT_FOUND (not recorded): it is being captured. */
nrm_status nrm__cuda_foreign_wait(uintptr_t handle, nrm_CUevent event);

/* The context that is current, if it is known to be one of these; NULL: it is not. A
   call that never blocks. */
nrm_CUcontext nrm__cuda_foreign_current(void);

/* Whether no primary context of the device is active, so that nothing that was
   submitted to one is under way. Also when there is no driver any more. */
bool nrm__cuda_is_asleep(int device);

/* The context of a stream that was just made; false: it is a primary one. */
bool nrm__cuda_foreign_find(uintptr_t handle, struct nrm__cuda_foreign *out);

bool nrm__cuda_foreign_lives(const struct nrm__cuda_foreign *foreign);

/* Ends a stream of it, if it lives. */
void nrm__cuda_foreign_destroy_stream(const struct nrm__cuda_foreign *foreign,
                                      nrm_CUstream stream);

/* The driver is another one from here on. */
void nrm__cuda_foreign_forget_all(void);

#endif
