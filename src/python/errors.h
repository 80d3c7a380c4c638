/* Statuses of the core as Python exceptions. */
#ifndef NRM_PYTHON_ERRORS_H
#define NRM_PYTHON_ERRORS_H

#include <Python.h>

#include "nrm/status.h"
#include "python/state.h"

int errors_init(PyObject *module);

/* Sets the exception for `status` from the last-error record of this thread. An
   exception that is set already (a Python callback's) stays. Returns NULL. */
PyObject *errors_raise(struct module_state *state, nrm_status status);

/*
 * To be called on entry of our Python functions: drops what the core let go, and shows
 * its warnings. -1: a warning was turned into an exception.
 */
int errors_begin_call(void);

/* An ErrorInfo, or None where the record is empty. */
PyObject *errors_info(struct module_state *state, const nrm_error *error);

/* last_error(), _lost_error() and _show_warnings(). */
extern PyMethodDef errors_methods[];

#endif
