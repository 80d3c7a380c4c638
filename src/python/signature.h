/*
 * Arguments of functions, bound as their text signature says: the one text makes the
 * parser, __text_signature__ and the messages of TypeErrors.
 */
#ifndef NRM_PYTHON_SIGNATURE_H
#define NRM_PYTHON_SIGNATURE_H

#include <Python.h>

#include <stdatomic.h>

#include "python/compat.h"

enum { SIGNATURE_MAX = 12, SIGNATURE_NAME_MAX = 24 };

/* Statically made with SIGNATURE; what is read from the text is filled at first use. */
struct signature {
    const char *function; /* its name, for messages */
    const char *text;     /* "nbytes, stream=..., *, alignment=None" */
    atomic_bool is_read;
    int n_names;
    int n_positional_only;
    int n_positional; /* may be given by position */
    int n_required;   /* the first ones have no default */
    char names[SIGNATURE_MAX][SIGNATURE_NAME_MAX];
    PyObject *interned[SIGNATURE_MAX]; /* the same; NULL: no memory for it */
};

#define SIGNATURE(function_, text_) {.function = (function_), .text = (text_)}

/* The docstring of a function or method: NumPy-style text behind its signature. */
#define SIGNATURE_DOC(function, self_and, text, doc)                                   \
    PyDoc_STR(function "(" self_and text ")\n--\n\n" doc)

int signature_bind_any(struct signature *self, PyObject *const *args, Py_ssize_t n_args,
                       PyObject *keyword_names, PyObject **values);

/*
 * Binds vectorcall arguments: values[i] is borrowed, NULL where the default holds. -1
 * with a TypeError set.
 */
static inline int
signature_bind(struct signature *self, PyObject *const *args, Py_ssize_t n_args,
               PyObject *keyword_names, PyObject **values)
{
    Py_ssize_t n = PyVectorcall_NARGS(n_args);
    if (!atomic_load_explicit(&self->is_read, memory_order_acquire) ||
        keyword_names != NULL || n < self->n_required || n > self->n_positional) {
        return signature_bind_any(self, args, n, keyword_names, values);
    }
    for (int i = 0; i < self->n_names; i++) {
        values[i] = i < n ? args[i] : NULL;
    }
    return 0;
}

/* The same for tp_init. */
int signature_bind_tuple(struct signature *self, PyObject *args, PyObject *keywords,
                         PyObject **values);

#endif
