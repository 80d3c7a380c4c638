/* Pending: a copy that was submitted, and what keeps both of its ends alive. */
#ifndef NRM_PYTHON_PENDING_H
#define NRM_PYTHON_PENDING_H

#include <Python.h>

#include "python/state.h"

int pending_init(PyObject *module);

/* _copy_submit(), _copy_plan(), _copy_wait_for() and _copy_done(), of numpy_rmm/_copy.py. */
extern PyMethodDef pending_functions[];

#endif
