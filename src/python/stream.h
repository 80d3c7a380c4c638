/* Stream: a CUDA stream that somebody made, kept alive. */
#ifndef NRM_PYTHON_STREAM_H
#define NRM_PYTHON_STREAM_H

#include <Python.h>

#include "nrm/stream.h"
#include "python/state.h"

/* Of stream_capture.c. */
extern PyMethodDef stream_functions[];

int stream_init(PyObject *module);

/* Lets go of the memory of Streams that died. */
void stream_forget_spares(struct module_state *state);

nrm_stream *stream_of_argument(struct module_state *state, PyObject *object);

/*
 * The C stream of an argument: a Stream, or anything with __cuda_stream__; NULL stands
 * for DEFAULT_STREAM. A new reference, or NULL with an error set.
 */
static inline nrm_stream *
stream_get(struct module_state *state, PyObject *object)
{
    return object == NULL ? nrm_stream_default() : stream_of_argument(state, object);
}

/* A new Stream of an argument that may also be a handle. */
PyObject *stream_from_argument(struct module_state *state, PyObject *object);

/* The handle of such an argument, which is no Stream. -1 with an error set. */
int stream_handle_of_argument(struct module_state *state, PyObject *object,
                              uintptr_t *out);

/* Releases a stream where Python code may run: the object that kept it alive goes at
   once, not with the next call of ours. */
void stream_drop(nrm_stream *stream);

/* That of an open Stream for as long as the interpreter's lock is held; NULL, without
   an error: it is none, or there is no such lock. */
const nrm_stream *stream_borrow(struct module_state *state, PyObject *object);

/* A Stream over a C stream, which is retained; NULL stands for the default stream. */
PyObject *stream_wrap(struct module_state *state, nrm_stream *stream);

#endif
