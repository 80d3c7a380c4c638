/*
 * Page-locking of memory that somebody else made (cuMemHostRegister), and what is known
 * of all that this process has page-locked through us.
 *
 * The functions that call the driver may block: detached, with no lock of ours held.
 */
#ifndef NRM_CUDA_PAGE_LOCK_H
#define NRM_CUDA_PAGE_LOCK_H

#include "cuda/context.h"

/* A registration, as long as it is the driver's. */
struct nrm__page_lock {
    const struct nrm__driver *driver; /* NULL: there is none */
    int device;                       /* in whose context it was made; valid in all */
    uint64_t generation;              /* of the device, then */
};

/*
 * Registers exactly these bytes, for all devices. `read_only`: they may not be written,
 * so the driver is asked to let the device read them only. NRM_INVALID_VALUE: a part is
 * registered already, by others: the error names both ranges. NRM_NOT_SUPPORTED: the
 * device cannot do this. NRM_OUT_OF_MEMORY, NRM_CUDA_ERROR: the driver refused.
 */
nrm_status nrm__page_lock(void *ptr, size_t nbytes, bool read_only,
                          struct nrm__page_lock *out);

enum nrm__unlocked {
    NRM__UNLOCKED,
    NRM__UNLOCK_LATER, /* not now (a host function, a failure, which is recorded) */
    NRM__UNLOCK_NEVER, /* the driver that has it registered is in use no more */
};

/* Lets the registration go; also when a reset of its context has done so already. The
   driver waits for work that still uses the memory: so wait first, by other means. */
enum nrm__unlocked nrm__page_unlock(void *ptr, size_t nbytes,
                                    const struct nrm__page_lock *lock);

/* False after a reset of its context, as far as it was noticed. Makes no driver
   call. */
bool nrm__page_lock_lives(const struct nrm__page_lock *lock);

/* ---- all that is page-locked through us ---- */

void nrm__page_locked_add(size_t nbytes);
void nrm__page_locked_subtract(size_t nbytes);

/* 0 in a forked child: what it inherits is the parent's. */
size_t nrm__page_locked_nbytes(void);

/* Records why the driver did not page-lock `nbytes`: its code, and, where memory or
   rights may be lacking, what is page-locked already and what the system allows. */
nrm_status nrm__page_lock_refused(nrm_CUresult code, const char *call, size_t nbytes);

#endif
