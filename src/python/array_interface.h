/* __cuda_array_interface__, version 3: that of our objects, and what that of others
   says. */
#ifndef NRM_PYTHON_ARRAY_INTERFACE_H
#define NRM_PYTHON_ARRAY_INTERFACE_H

#include <Python.h>

#include "nrm/stream.h"
#include "python/state.h"

/* A new dict; `strides` NULL: C-contiguous; `descr` NULL: none; `stream` NULL: nothing
   is pending. All are borrowed. NULL with an error set fails. */
PyObject *array_interface_make(const void *ptr, PyObject *shape, PyObject *strides,
                               PyObject *typestr, PyObject *descr,
                               const nrm_stream *stream);

/*
 * What an object keeps of its interface, all NULL: nothing. Whoever asks has a dict of
 * his own, as if it were made for him: the one before is handed out again where nobody
 * has it any more and nobody has changed it.
 */
struct array_interface {
    PyObject *dict;    /* handed out last */
    PyObject *entries; /* its keys and values by turns, a tuple */
    uint64_t version;  /* of it (compat_dict_version) */
};

/* A new reference to a dict as the kept one was, or NULL without an error: make it. */
PyObject *array_interface_again(struct array_interface *self);

/* Keeps what was made, of values that do not change. Returns `dict`, which may be
   NULL. */
PyObject *array_interface_keep(struct array_interface *self, PyObject *dict);

/* Nothing is kept. */
void array_interface_forget(struct array_interface *self);

/* Contiguous memory that an object offers. */
struct array_bytes {
    char *ptr;
    size_t nbytes;
    uintptr_t producer; /* the handle of a stream to wait for; 0: none */
};

/* Reads the interface of `object`, `name` in messages. -1 with a TypeError: there is
   none; ValueError: it is not C-contiguous, or makes no sense. */
int array_interface_read(PyObject *object, const char *name, struct array_bytes *out);

#endif
