/*
 * The CUDA stream protocol, and what libraries had before it.
 *
 * The protocol is called as a method by an interned name, so that a Stream over another
 * library's costs little more than that library's own answer. Objects without it are
 * told by the package that their class, or a base of it, comes from: "ptr" and "handle"
 * are names that many other things have. They count of a class too that is called a
 * stream, as those that wrap or imitate such a library's are. As an AttributeError and
 * a walk along the bases take some microseconds, the types that were met last are known
 * by their version.
 */
#include "python/foreign_stream.h"

#include <stddef.h>
#include <string.h>

#include "python/args.h"

/* What libraries call the handle; Numba's is a ctypes pointer, whose value may be
   None. */
static const struct library {
    const char
        *package; /* NULL: any other; all but the first need a class called a stream */
    const char *attribute;
    size_t name; /* where the module's state has the attribute's */
} libraries[] = {
    {"cupy", "ptr", offsetof(struct module_state, ptr_name)},
    {"numba", "handle", offsetof(struct module_state, handle_name)},
    {"numba_cuda", "handle", offsetof(struct module_state, handle_name)},
    {"torch", "cuda_stream", offsetof(struct module_state, torch_stream_name)},
    {NULL, "cuda_stream", offsetof(struct module_state, torch_stream_name)},
    {NULL, "ptr", offsetof(struct module_state, ptr_name)},
    {NULL, "handle", offsetof(struct module_state, handle_name)},
};

#define N_LIBRARIES (sizeof libraries / sizeof libraries[0])
#define N_PACKAGES (N_LIBRARIES - 3)

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

/* "theirs.ExternalStream" */
static bool
is_called_stream(const PyTypeObject *type)
{
    static const char wanted[] = "Stream";
    size_t length = strlen(type->tp_name);
    return length >= strlen(wanted) &&
           strcmp(type->tp_name + length - strlen(wanted), wanted) == 0;
}

static bool
has_base_called_stream(PyObject *object)
{
    PyObject *bases = Py_TYPE(object)->tp_mro;
    for (Py_ssize_t i = 0; bases != NULL && i < PyTuple_GET_SIZE(bases); i++) {
        if (is_called_stream((PyTypeObject *)PyTuple_GET_ITEM(bases, i))) {
            return true;
        }
    }
    return false;
}

static const struct library *
find_alike(PyObject *object)
{
    size_t end = has_base_called_stream(object) ? N_LIBRARIES : N_PACKAGES + 1;
    for (size_t i = N_PACKAGES; i < end; i++) {
        if (PyObject_HasAttrString(object, libraries[i].attribute)) {
            return &libraries[i];
        }
    }
    return NULL;
}

static const struct library *
find_library(PyObject *object)
{
    PyObject *bases = Py_TYPE(object)->tp_mro;
    for (Py_ssize_t i = 0; bases != NULL && i < PyTuple_GET_SIZE(bases); i++) {
        PyTypeObject *base = (PyTypeObject *)PyTuple_GET_ITEM(bases, i);
        for (size_t j = 0; j < N_PACKAGES; j++) {
            if (is_of_package(base, libraries[j].package)) {
                return &libraries[j];
            }
        }
    }
    return find_alike(object);
}

/* Steals `value`; an int, None, or a ctypes pointer. */
static int
read_handle(struct module_state *state, PyObject *value, const char *name,
            uintptr_t *out)
{
    PyObject *number = value;
    if (value != Py_None && !PyIndex_Check(value)) {
        number = PyObject_GetAttr(value, state->value_name);
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

/* 1: the object has no handle. */
static int
from_library(struct module_state *state, PyObject *object,
             const struct library *library, uintptr_t *out)
{
    PyObject *name = *(PyObject **)(void *)((char *)state + library->name);
    PyObject *value;
    int found = compat_get_attribute(object, name, &value);
    return found > 0 ? read_handle(state, value, library->attribute, out) : found + 1;
}

/* ---- types that were met ---- */

/* One that a type, as it is now, was found to be of; NULL: it was not looked at. */
static const struct library *
recall_library(struct module_state *state, PyTypeObject *type)
{
#ifndef Py_GIL_DISABLED
    for (int i = 0; i < N_FOREIGN_TYPES; i++) {
        const struct foreign_type *met = &state->foreign_types[i];
        if (met->type == type && met->version == type->tp_version_tag) {
            return &libraries[met->library];
        }
    }
#else
    (void)state;
    (void)type;
#endif
    return NULL;
}

/* Types that are changed all the time have no version. */
static void
remember_library(struct module_state *state, PyTypeObject *type,
                 const struct library *library)
{
#ifndef Py_GIL_DISABLED
    if (type->tp_version_tag != 0) {
        int next = state->next_foreign_type++ % N_FOREIGN_TYPES;
        state->foreign_types[next] =
            (struct foreign_type){.type = type,
                                  .version = type->tp_version_tag,
                                  .library = (int)(library - libraries)};
    }
#else
    (void)state;
    (void)type;
    (void)library;
#endif
}

/* The usual case: of a type whose objects had no protocol so far. 1: none of those. */
static int
from_met_type(struct module_state *state, PyObject *object, uintptr_t *out)
{
    PyObject *method;
    const struct library *library = recall_library(state, Py_TYPE(object));
    if (library == NULL) {
        return 1;
    }
    int found = compat_get_attribute(object, state->cuda_stream_name, &method);
    if (found != 0) {
        Py_XDECREF(method);
        return found > 0 ? 1 : -1;
    }
    return from_library(state, object, library, out);
}

int
foreign_stream_handle(struct module_state *state, PyObject *object, const char *allowed,
                      uintptr_t *out)
{
    int result = from_met_type(state, object, out);
    if (result > 0) {
        result = from_protocol(state, object, out);
    }
    if (result <= 0) {
        return result;
    }
    PyTypeObject *type = Py_TYPE(object);
    const struct library *library = find_library(object);
    result = library != NULL ? from_library(state, object, library, out) : 1;
    if (result == 0) {
        remember_library(state, type, library);
    }
    if (result > 0) {
        PyErr_Format(PyExc_TypeError, "%s, not %.100s", allowed, type->tp_name);
    }
    return result == 0 ? 0 : -1;
}

int
foreign_stream_init(struct module_state *state)
{
    state->ptr_name = PyUnicode_InternFromString("ptr");
    state->handle_name = PyUnicode_InternFromString("handle");
    state->torch_stream_name = PyUnicode_InternFromString("cuda_stream");
    state->value_name = PyUnicode_InternFromString("value");
    return state->ptr_name == NULL || state->handle_name == NULL ||
                   state->torch_stream_name == NULL || state->value_name == NULL
               ? -1
               : 0;
}
