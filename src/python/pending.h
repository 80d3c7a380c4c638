/* Pending: a copy that was submitted, and what keeps both of its ends alive. */
#ifndef NRM_PYTHON_PENDING_H
#define NRM_PYTHON_PENDING_H

#include <Python.h>

#include "core/transfer.h"
#include "nrm/stream.h"
#include "python/state.h"

int pending_init(PyObject *module);

/*
 * Submits a copy; 0, 1 and 2 mean streams of `device` (-1: of the current context).
 * What is left of `dst`, `src` and `between`, objects or None, lives until it is done.
 * A new reference to its Pending, or NULL with an error set.
 */
PyObject *pending_submit(struct module_state *state,
                         const struct nrm__transfer *transfer, int device,
                         nrm_stream *stream, PyObject *dst, PyObject *src,
                         PyObject *between);

/* Lets go of what copies without a Pending kept that are done, or failed: nothing
   touches its memory any more. Runs destructors. */
void pending_reap(void);

/* Waits for it. -1 with an error set: it, or work before it, failed; or it was
   captured. */
int pending_finish(PyObject *pending);

/* Whether it is neither done nor captured nor failed. Does not wait. */
bool pending_is_running(PyObject *pending);

/* One that is done: of a copy that has been made. A new reference, or NULL with an
   error. */
PyObject *pending_make(struct module_state *state, PyObject *dst, PyObject *src);

#endif
