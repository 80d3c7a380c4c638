/* What a Stream consists of: for python/stream.c and stream_argument.c. */
#ifndef NRM_PYTHON_STREAM_OBJECT_H
#define NRM_PYTHON_STREAM_OBJECT_H

#include <Python.h>

#include "python/stream.h"

struct stream_object {
    PyObject ob_base;   /* as PyObject_HEAD */
    nrm_stream *stream; /* owned; NULL: closed, or by its handle the thread's own */
    uintptr_t handle;   /* for its name, also when it is closed */
    PyObject *weakrefs;
};

static inline uintptr_t
stream_object_handle(PyObject *object)
{
    return ((struct stream_object *)object)->handle;
}

static inline bool
stream_object_is_closed(PyObject *object)
{
    return ((struct stream_object *)object)->stream == NULL &&
           stream_object_handle(object) != NRM_STREAM_HANDLE_PER_THREAD;
}

/* 0, or -1 with the error set that it is closed. */
int stream_object_check_open(struct module_state *state, PyObject *object);

/* How a C stream lets go of the object that it keeps, in any thread. */
void stream_object_drop(void *keepalive);

/* The C stream of a handle, which keeps an object alive, borrowed, or NULL for none. */
nrm_stream *stream_of_handle(struct module_state *state, uintptr_t handle,
                             PyObject *keepalive);

/* The same of an object that has one; `allowed` says in the error what would do. */
nrm_stream *stream_of_object(struct module_state *state, PyObject *object,
                             const char *allowed);

#endif
