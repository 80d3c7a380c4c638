/* The method prefetch() of objects that have memory of a device. */
#ifndef NRM_PYTHON_PREFETCH_H
#define NRM_PYTHON_PREFETCH_H

#include <Python.h>

#include "python/device_memory.h"
#include "python/state.h"

#define PREFETCH_TEXT "device=None, stream=None"

/* For `nbytes` bytes at `ptr` in `memory`; the arguments as PREFETCH_TEXT names
   them. */
PyObject *prefetch_method(struct module_state *state, struct device_memory *memory,
                          const char *ptr, size_t nbytes, PyObject *const *args,
                          Py_ssize_t n_args, PyObject *names);

#endif
