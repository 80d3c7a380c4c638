/* Stream: a CUDA stream that somebody made, kept alive. */
#ifndef NRM_PYTHON_STREAM_H
#define NRM_PYTHON_STREAM_H

#include <Python.h>

#include "nrm/stream.h"
#include "python/state.h"

extern PyMethodDef stream_functions[];

int stream_init(PyObject *module);

/*
 * The C stream of an argument: a Stream, or anything with __cuda_stream__; NULL stands
 * for DEFAULT_STREAM. A new reference, or NULL with an error set.
 */
nrm_stream *stream_get(struct module_state *state, PyObject *object);

/* That of an open Stream for as long as the interpreter's lock is held; NULL, without an
   error: it is none, or there is no such lock. */
const nrm_stream *stream_borrow(struct module_state *state, PyObject *object);

/* A Stream over a C stream, which is retained; NULL stands for the default stream. */
PyObject *stream_wrap(struct module_state *state, nrm_stream *stream);

#endif
