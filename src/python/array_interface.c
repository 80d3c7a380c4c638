/*
 * The dictionary by which libraries pass device memory to each other.
 *
 * `stream` tells a consumer what to wait for, and most of them wait on the host, so it
 * is None unless something of ours is known to run. 0 is not allowed there: the legacy
 * stream is 1.
 *
 * Such a dict is asked for with each call of another library, read and dropped. To make
 * it, or to copy it, takes several times as long as to see that it is as it was.
 * (Interpreters from 3.14 on have no number for that, and each entry is looked at.)
 */
#include "python/array_interface.h"

#include <stdio.h>

#include "core/transfer.h"
#include "python/args.h"
#include "python/compat.h"

/* ---- ours ---- */

static PyObject *
stream_entry(const nrm_stream *stream)
{
    if (stream == NULL) {
        Py_RETURN_NONE;
    }
    uintptr_t handle = nrm_stream_handle(stream);
    bool is_default = handle == NRM_STREAM_HANDLE_DEFAULT;
    return PyLong_FromSize_t(is_default ? NRM_STREAM_HANDLE_LEGACY : handle);
}

PyObject *
array_interface_make(const void *ptr, PyObject *shape, PyObject *strides,
                     PyObject *typestr, PyObject *descr, const nrm_stream *stream)
{
    PyObject *dict = Py_BuildValue("{s:O,s:O,s:(NO),s:O,s:i,s:N}", "shape", shape,
                                   "typestr", typestr, "data",
                                   PyLong_FromVoidPtr((void *)ptr), Py_False, "strides",
                                   strides != NULL ? strides : Py_None, "version", 3,
                                   "stream", stream_entry(stream));
    if (dict != NULL && descr != NULL &&
        PyDict_SetItemString(dict, "descr", descr) < 0) {
        Py_CLEAR(dict);
    }
    return dict;
}

/* ---- kept ---- */

#ifndef Py_GIL_DISABLED

static bool
has_entries(PyObject *dict, PyObject *entries)
{
    PyObject *key, *value;
    Py_ssize_t position = 0, i = 0;
    if (PyDict_GET_SIZE(dict) * 2 != PyTuple_GET_SIZE(entries)) {
        return false;
    }
    while (PyDict_Next(dict, &position, &key, &value)) {
        if (PyTuple_GET_ITEM(entries, i) != key ||
            PyTuple_GET_ITEM(entries, i + 1) != value) {
            return false;
        }
        i += 2;
    }
    return true;
}

static bool
is_untouched(const struct array_interface *self)
{
    return self->version != 0 ? self->version == compat_dict_version(self->dict)
                              : has_entries(self->dict, self->entries);
}

static PyObject *
dict_of(PyObject *entries)
{
    PyObject *dict = PyDict_New();
    for (Py_ssize_t i = 0; dict != NULL && i < PyTuple_GET_SIZE(entries); i += 2) {
        if (PyDict_SetItem(dict, PyTuple_GET_ITEM(entries, i),
                           PyTuple_GET_ITEM(entries, i + 1)) < 0) {
            Py_CLEAR(dict);
        }
    }
    return dict;
}

static PyObject *
entries_of(PyObject *dict)
{
    PyObject *key, *value;
    Py_ssize_t position = 0, i = 0;
    PyObject *entries = PyTuple_New(PyDict_GET_SIZE(dict) * 2);
    while (entries != NULL && PyDict_Next(dict, &position, &key, &value)) {
        PyTuple_SET_ITEM(entries, i++, Py_NewRef(key));
        PyTuple_SET_ITEM(entries, i++, Py_NewRef(value));
    }
    return entries;
}

PyObject *
array_interface_again(struct array_interface *self)
{
    if (self->entries == NULL) {
        return NULL;
    }
    if (self->dict == NULL || Py_REFCNT(self->dict) != 1 || !is_untouched(self)) {
        PyObject *dict = dict_of(self->entries);
        if (dict == NULL) {
            PyErr_Clear();
            return NULL;
        }
        Py_XSETREF(self->dict, dict);
        self->version = compat_dict_version(dict);
    }
    return Py_NewRef(self->dict);
}

PyObject *
array_interface_keep(struct array_interface *self, PyObject *dict)
{
    PyObject *entries = dict != NULL ? entries_of(dict) : NULL;
    if (entries != NULL) {
        Py_XSETREF(self->entries, entries);
        Py_XSETREF(self->dict, Py_NewRef(dict));
        self->version = compat_dict_version(dict);
    }
    else if (dict != NULL) {
        PyErr_Clear(); /* the next one is made anew */
    }
    return dict;
}

#else /* what is kept would be for one thread at a time */

PyObject *
array_interface_again(struct array_interface *Py_UNUSED(self))
{
    return NULL;
}

PyObject *
array_interface_keep(struct array_interface *Py_UNUSED(self), PyObject *dict)
{
    return dict;
}

#endif

void
array_interface_forget(struct array_interface *self)
{
    Py_CLEAR(self->dict);
    Py_CLEAR(self->entries);
}

/* ---- of others ---- */

/* Borrowed; NULL without an error: it has no such entry, or it is None. */
static PyObject *
entry(PyObject *dict, const char *key)
{
    PyObject *value = PyDict_GetItemString(dict, key);
    return value == Py_None ? NULL : value;
}

static int
wrong_entry(const char *name, const char *key, PyObject *value)
{
    PyErr_Format(PyExc_ValueError,
                 "%s: %s of its __cuda_array_interface__ cannot be %R", name, key,
                 value);
    return -1;
}

/* "<f8": 8 */
static int
read_itemsize(PyObject *dict, const char *name, size_t *out)
{
    PyObject *value = entry(dict, "typestr");
    const char *text = value != NULL && PyUnicode_Check(value) ? PyUnicode_AsUTF8(value)
                                                               : NULL;
    char *end = NULL;
    unsigned long itemsize = 0;
    if (text != NULL && strlen(text) >= 3) {
        itemsize = strtoul(text + 2, &end, 10);
    }
    if (end == NULL || end == text + 2 || (*end != '\0' && *end != '[')) {
        PyErr_Format(PyExc_ValueError,
                     "%s: the typestr of its __cuda_array_interface__ is no text such "
                     "as '<f8'",
                     name);
        return -1;
    }
    *out = itemsize;
    return 0;
}

static int
not_contiguous(const char *name, PyObject *shape, PyObject *strides)
{
    PyErr_Format(PyExc_ValueError,
                 "%s must be C-contiguous: it has shape %R and strides %R", name, shape,
                 strides);
    return -1;
}

/* Multiplies `io_nbytes`, an item's size, by the shape. */
static int
read_shape(PyObject *dict, const char *name, size_t *io_nbytes)
{
    PyObject *shape = entry(dict, "shape");
    PyObject *strides = entry(dict, "strides");
    if (shape == NULL || !PyTuple_Check(shape) ||
        (strides != NULL && (!PyTuple_Check(strides) ||
                             PyTuple_GET_SIZE(strides) != PyTuple_GET_SIZE(shape)))) {
        PyErr_Format(PyExc_ValueError,
                     "%s: shape and strides of its __cuda_array_interface__ must be "
                     "tuples of one length",
                     name);
        return -1;
    }
    bool is_contiguous = true;
    size_t dense = *io_nbytes;
    for (Py_ssize_t i = PyTuple_GET_SIZE(shape) - 1; i >= 0; i--) {
        Py_ssize_t length = PyNumber_AsSsize_t(PyTuple_GET_ITEM(shape, i), NULL);
        Py_ssize_t stride =
            strides == NULL ? 0
                            : PyNumber_AsSsize_t(PyTuple_GET_ITEM(strides, i), NULL);
        if (PyErr_Occurred()) {
            return -1;
        }
        if (length < 0) {
            return wrong_entry(name, "shape", shape);
        }
        size_t n = (size_t)length;
        is_contiguous = is_contiguous &&
                        (strides == NULL || n <= 1 || stride == (Py_ssize_t)dense);
        if (n != 0 && dense > SIZE_MAX / 2 / n) {
            PyErr_Format(PyExc_ValueError, "%s has no size: its shape is %R", name,
                         shape);
            return -1;
        }
        dense *= n;
    }
    *io_nbytes = dense;
    return is_contiguous || dense == 0 ? 0 : not_contiguous(name, shape, strides);
}

/* An address or a handle. */
static int
read_number(PyObject *value, const char *name, const char *key, uintptr_t *out)
{
    char text[128];
    snprintf(text, sizeof text, "%s: %s of its __cuda_array_interface__", name, key);
    return arg_address(value, text, out);
}

static int
read_producer(PyObject *stream, const char *name, uintptr_t *out)
{
    if (read_number(stream, name, "stream", out) < 0) {
        return -1;
    }
    if (*out == 0) {
        PyErr_Format(PyExc_ValueError,
                     "%s: stream 0 of __cuda_array_interface__ is ambiguous; 1 is the "
                     "legacy default stream, and 2 the per-thread one",
                     name);
        return -1;
    }
    return 0;
}

static int
read_place(PyObject *dict, const char *name, struct array_bytes *out)
{
    PyObject *data = entry(dict, "data");
    PyObject *stream = entry(dict, "stream");
    uintptr_t ptr = 0;
    out->producer = 0;
    if (data == NULL || !PyTuple_Check(data) || PyTuple_GET_SIZE(data) < 1) {
        PyErr_Format(
            PyExc_ValueError,
            "%s: its __cuda_array_interface__ has no data (address, read-only)", name);
        return -1;
    }
    PyObject *address = PyTuple_GET_ITEM(data, 0);
    if (address != Py_None && read_number(address, name, "data", &ptr) < 0) {
        return -1;
    }
    if (ptr == 0 && out->nbytes != 0) {
        return wrong_entry(name, "data", data);
    }
    out->ptr = (char *)ptr;
    return stream == NULL ? 0 : read_producer(stream, name, &out->producer);
}

int
array_interface_read(PyObject *object, const char *name, struct array_bytes *out)
{
    PyObject *dict = PyObject_GetAttrString(object, "__cuda_array_interface__");
    if (dict == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Format(PyExc_TypeError,
                     "%s must have __cuda_array_interface__, and %.100s has none", name,
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    if (dict == NULL) {
        return -1;
    }
    int result = -1;
    if (!PyDict_Check(dict)) {
        PyErr_Format(PyExc_TypeError, "%s: __cuda_array_interface__ must be a dict",
                     name);
    }
    else if (entry(dict, "mask") != NULL) {
        PyErr_Format(PyExc_ValueError, "%s: an array with a mask cannot be copied",
                     name);
    }
    else if (read_itemsize(dict, name, &out->nbytes) == 0 &&
             read_shape(dict, name, &out->nbytes) == 0) {
        result = read_place(dict, name, out);
    }
    Py_DECREF(dict);
    return result;
}
