/*
 * Values of arguments: sizes in bytes, alignments, small integers, words. Each function
 * returns -1 with a TypeError or ValueError set that names what was given and what is
 * allowed.
 */
#ifndef NRM_PYTHON_ARGS_H
#define NRM_PYTHON_ARGS_H

#include <Python.h>

#include <stddef.h>

#include "python/compat.h"

/* A size: an int, anything with __index__, or text such as "1.5 GiB". */
int arg_nbytes(PyObject *value, const char *name, size_t *out);

/* The same, and "50%": then `out_percent` is 50; else it is negative. */
int arg_nbytes_or_percent(PyObject *value, const char *name, size_t *out,
                          double *out_percent);

/* An integer in [low, high]. */
int arg_integer(PyObject *value, const char *name, long low, long high, long *out);

/* An address or a handle: an int, or anything with __index__. */
int arg_address(PyObject *value, const char *name, uintptr_t *out);

/* A power of two; None: 0. */
int arg_alignment(PyObject *value, const char *name, size_t *out);

/* A number of seconds, or text such as "20 ms". */
int arg_duration(PyObject *value, const char *name, uint64_t *out_ns);

/* One of `words`, a list that ends with NULL; its index. */
int arg_choice(PyObject *value, const char *name, const char *const *words, int *out);

/* Borrowed UTF-8 of a str, without NUL inside. NULL with an error set. */
const char *arg_text(PyObject *value, const char *name);

/* value is missing, or None */
static inline bool
arg_is_none(PyObject *value)
{
    return value == NULL || value == Py_None;
}

#endif
