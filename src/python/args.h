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

int arg_any_nbytes(PyObject *value, const char *name, size_t *out);
int arg_any_address(PyObject *value, const char *name, uintptr_t *out);

/* True for an int that fits; no error is set. */
static inline bool
arg_is_plain(PyObject *value, size_t *out)
{
    if (!PyLong_CheckExact(value)) {
        return false;
    }
    size_t number = PyLong_AsSize_t(value);
    if (number == (size_t)-1) {
        PyErr_Clear(); /* whoever knows its name says it better */
        return false;
    }
    *out = number;
    return true;
}

/* A size: an int, anything with __index__, or text such as "1.5 GiB". */
static inline int
arg_nbytes(PyObject *value, const char *name, size_t *out)
{
    return arg_is_plain(value, out) ? 0 : arg_any_nbytes(value, name, out);
}

/* The same, and "50%": then `out_percent` is 50; else it is negative. */
int arg_nbytes_or_percent(PyObject *value, const char *name, size_t *out,
                          double *out_percent);

/* An integer in [low, high]. */
int arg_integer(PyObject *value, const char *name, long low, long high, long *out);

/* An address or a handle: an int, or anything with __index__. */
static inline int
arg_address(PyObject *value, const char *name, uintptr_t *out)
{
    size_t address;
    if (!arg_is_plain(value, &address)) {
        return arg_any_address(value, name, out);
    }
    *out = address;
    return 0;
}

/* The same, and the handle objects of other libraries, which int() takes:
   cudaMemPool_t. ValueError for anything else. */
int arg_driver_handle(PyObject *value, const char *name, uintptr_t *out);

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
