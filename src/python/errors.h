/* Statuses of the core as Python exceptions. */
#ifndef NRM_PYTHON_ERRORS_H
#define NRM_PYTHON_ERRORS_H

#include <Python.h>

#include "core/hooks.h"
#include "nrm/status.h"
#include "python/interpreter.h"
#include "python/state.h"

int errors_init(PyObject *module);

/* Sets the exception for `status` from the last-error record of this thread. An
   exception that is set already (a Python callback's) stays. Returns NULL. */
PyObject *errors_raise(struct module_state *state, nrm_status status);

int errors_begin_busy_call(void);

/*
 * To be called on entry of our Python functions: drops what the core let go, and shows
 * its warnings. -1: a warning was turned into an exception.
 */
static inline int
errors_begin_call(void)
{
    bool is_quiet = atomic_load_explicit(&interpreter_dropped, memory_order_relaxed) ==
                        NULL &&
                    atomic_load_explicit(&nrm__n_warnings, memory_order_relaxed) == 0;
    return __builtin_expect(is_quiet, 1) ? 0 : errors_begin_busy_call();
}

/* last_error(), _lost_error() and _show_warnings(). */
extern PyMethodDef errors_methods[];

#endif
