/* record_use(): what a program says about GPU work on an array. */
#ifndef NRM_PYTHON_USES_H
#define NRM_PYTHON_USES_H

#include <Python.h>

#include "python/state.h"

extern PyMethodDef uses_functions[];

/* Names of the streams whose known uses of the block around `ptr` are pending: a
   tuple. */
PyObject *uses_names(const void *ptr);

#endif
