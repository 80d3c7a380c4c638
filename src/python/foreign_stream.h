/* Streams of other libraries: which handle an object stands for. */
#ifndef NRM_PYTHON_FOREIGN_STREAM_H
#define NRM_PYTHON_FOREIGN_STREAM_H

#include <Python.h>

#include <stdint.h>

#include "python/state.h"

int foreign_stream_init(struct module_state *state);

/*
 * The handle of an object with __cuda_stream__, or a stream of CuPy, Numba or PyTorch
 * without it. -1 with an error set: TypeError "<allowed>, not <type>" for all else.
 */
int foreign_stream_handle(struct module_state *state, PyObject *object,
                          const char *allowed, uintptr_t *out);

#endif
