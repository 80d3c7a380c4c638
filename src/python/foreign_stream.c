/*
 * The CUDA stream protocol, and what libraries had before it.
 *
 * The protocol is called as a method by an interned name, so that a Stream over another
 * library's costs little more than that library's own answer. Objects without it are told by
 * the package that their class, or a base of it, comes from: "ptr" and "handle" are names
 * that many other things have.
 */
#include "python/foreign_stream.h"

#include <string.h>

#include "python/args.h"

/* What libraries call the handle; Numba's is a ctypes pointer, whose value may be None. */
static const struct library {
    const char *package;
    const char *attribute;
} libraries[] = {
    {"cupy", "ptr"},
    {"numba", "handle"},
    {"numba_cuda", "handle"},
    {"torch", "cuda_stream"},
};

/* ---- the protocol ---- */

static int
read_pair(PyObject *object, PyObject *pair, uintptr_t *out)
{
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
        PyErr_Format(
            PyExc_TypeError,
            "__cuda_stream__() of %.100s must return (version, handle), not %R",
            Py_TYPE(object)->tp_name, pair);
        return -1;
    }
    PyObject *number = PyTuple_GET_ITEM(pair, 0);
    size_t plain;
    long version = 0;
    if (!(arg_is_plain(number, &plain) && plain == 0) &&
        arg_integer(number, "the version of __cuda_stream__", 0, INT32_MAX, &version) <
            0) {
        return -1;
    }
    if (version != 0) {
        PyErr_Format(PyExc_NotImplementedError,
                     "__cuda_stream__() of %.100s has version: '%ld', and only '0' is "
                     "known here",
                     Py_TYPE(object)->tp_name, version);
        return -1;
    }
    return arg_address(PyTuple_GET_ITEM(pair, 1), "the handle of __cuda_stream__", out);
}

/* 1: it has none. */
static int
from_protocol(struct module_state *state, PyObject *object, uintptr_t *out)
{
    PyObject *pair = PyObject_CallMethodNoArgs(object, state->cuda_stream_name);
    if (pair != NULL) {
        int result = read_pair(object, pair, out);
        Py_DECREF(pair);
        return result;
    }
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
        return -1;
    }
    PyObject *error = compat_take_error();
    bool has_it = PyObject_HasAttr(object, state->cuda_stream_name);
    if (has_it) {
        compat_restore_error(error); /* the method raised it */
        return -1;
    }
    Py_XDECREF(error);
    return 1;
}

/* ---- without it ---- */

/* Whether "cupy.cuda.stream" is of "cupy". */
static bool
is_of_package(PyTypeObject *type, const char *package)
{
    PyObject *module = PyObject_GetAttrString((PyObject *)type, "__module__");
    const char *text =
        module != NULL && PyUnicode_Check(module) ? PyUnicode_AsUTF8(module) : NULL;
    size_t length = strlen(package);
    bool is = text != NULL && strncmp(text, package, length) == 0 &&
              (text[length] == '\0' || text[length] == '.');
    Py_XDECREF(module);
    PyErr_Clear();
    return is;
}

static const struct library *
find_library(PyObject *object)
{
    PyObject *bases = Py_TYPE(object)->tp_mro;
    for (Py_ssize_t i = 0; bases != NULL && i < PyTuple_GET_SIZE(bases); i++) {
        PyTypeObject *base = (PyTypeObject *)PyTuple_GET_ITEM(bases, i);
        for (size_t j = 0; j < sizeof libraries / sizeof libraries[0]; j++) {
            if (is_of_package(base, libraries[j].package)) {
                return &libraries[j];
            }
        }
    }
    return NULL;
}

/* Steals `value`; an int, None, or a ctypes pointer. */
static int
read_handle(PyObject *value, const char *name, uintptr_t *out)
{
    PyObject *number = value;
    if (value != NULL && value != Py_None && !PyIndex_Check(value)) {
        number = PyObject_GetAttrString(value, "value");
        Py_DECREF(value);
    }
    if (number == NULL) {
        return -1;
    }
    *out = 0;
    int result = number == Py_None ? 0 : arg_address(number, name, out);
    Py_DECREF(number);
    return result;
}

int
foreign_stream_handle(struct module_state *state, PyObject *object, const char *allowed,
                      uintptr_t *out)
{
    int result = from_protocol(state, object, out);
    if (result <= 0) {
        return result;
    }
    const struct library *library = find_library(object);
    if (library != NULL && PyObject_HasAttrString(object, library->attribute)) {
        return read_handle(PyObject_GetAttrString(object, library->attribute),
                           library->attribute, out);
    }
    PyErr_Format(PyExc_TypeError, "%s, not %.100s", allowed, Py_TYPE(object)->tp_name);
    return -1;
}
