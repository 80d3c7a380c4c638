/*
 * The whole buffer that an array is a part of, and its owner.
 *
 * A copy must not begin inside what is registered and end outside, so views,
 * memoryviews and arrays over buffers are walked to whoever has the memory: an array
 * that owns its data, or an object with the buffer protocol, also through those that
 * numpy.lib.stride_tricks puts between two arrays. Where the owner cannot tell its size
 * (a capsule, a tensor), the last array on the way is taken for the whole.
 */
#include "python/whole_buffer.h"

#include "python/handler.h"
#include "python/numpy_api.h"

/* ---- where the memory of an array ends ---- */

/* From the first to the last byte, of any strides; no bytes without elements. */
static void
array_extent(PyArrayObject *array, char **out_ptr, size_t *out_nbytes)
{
    char *first = PyArray_BYTES(array), *last = first;
    *out_ptr = first;
    *out_nbytes = 0;
    if (PyArray_SIZE(array) == 0 || PyArray_ITEMSIZE(array) == 0) {
        return;
    }
    for (int i = 0; i < PyArray_NDIM(array); i++) {
        npy_intp reach = (PyArray_DIM(array, i) - 1) * PyArray_STRIDE(array, i);
        *(reach < 0 ? &first : &last) += reach;
    }
    *out_ptr = first;
    *out_nbytes = (size_t)(last - first) + (size_t)PyArray_ITEMSIZE(array);
}

/* The same of what an object exports. -1 with an error set. */
static int
view_extent(const Py_buffer *view, char **out_ptr, size_t *out_nbytes)
{
    char *first = view->buf, *last = first;
    if (view->suboffsets != NULL) {
        PyErr_SetString(PyExc_TypeError,
                        "a buffer with suboffsets is not one piece of memory");
        return -1;
    }
    *out_ptr = first;
    *out_nbytes = (size_t)view->len;
    if (view->len == 0 || view->strides == NULL) {
        return 0;
    }
    for (int i = 0; i < view->ndim; i++) {
        Py_ssize_t reach = (view->shape[i] - 1) * view->strides[i];
        *(reach < 0 ? &first : &last) += reach;
    }
    *out_ptr = first;
    *out_nbytes = (size_t)(last - first) + (size_t)view->itemsize;
    return 0;
}

static bool
contains(const struct whole_buffer *buffer, PyArrayObject *array)
{
    char *ptr;
    size_t nbytes;
    array_extent(array, &ptr, &nbytes);
    return nbytes == 0 ||
           (ptr >= buffer->ptr && ptr + nbytes <= buffer->ptr + buffer->nbytes);
}

/* ---- the owner ---- */

/* NumPy's default, and ours: none of them maps files. */
static bool
is_private(PyArrayObject *array)
{
    PyObject *capsule =
        PyArray_CHKFLAGS(array, NPY_ARRAY_OWNDATA) ? PyArray_HANDLER(array) : NULL;
    return capsule != NULL &&
           (capsule == PyDataMem_DefaultHandler || handler_of_capsule(capsule) != NULL);
}

static int
buffer_of_array(PyArrayObject *array, struct whole_buffer *out)
{
    PyObject *object = (PyObject *)array;
    PyObject *anchor = PyWeakref_NewRef(object, NULL);
    if (anchor == NULL) {
        return -1;
    }
    *out = (struct whole_buffer){.is_private = is_private(array),
                                 .owner = PyTuple_Pack(2, object, anchor)};
    Py_DECREF(anchor);
    array_extent(array, &out->ptr, &out->nbytes);
    return out->owner == NULL ? -1 : 0;
}

static int
check_items(PyArrayObject *array)
{
    if (!PyDataType_REFCHK(PyArray_DESCR(array))) {
        return 0;
    }
    PyErr_Format(PyExc_TypeError,
                 "an array of %R holds references to Python objects, which no device "
                 "can follow",
                 PyArray_DESCR(array));
    return -1;
}

/* The array that owns the memory, or the last one on the way: `*next` is then what it
   refers to, and NULL otherwise. Borrowed. */
static PyArrayObject *
last_array(PyArrayObject *array, PyObject **next)
{
    PyObject *base = PyArray_BASE(array);
    while (!PyArray_CHKFLAGS(array, NPY_ARRAY_OWNDATA) && base != NULL &&
           PyArray_Check(base)) {
        array = (PyArrayObject *)base;
        base = PyArray_BASE(array);
    }
    *next = PyArray_CHKFLAGS(array, NPY_ARRAY_OWNDATA) ? NULL : base;
    return array;
}

PyObject *
whole_buffer_array_behind(PyObject *object)
{
    PyObject *array = PyMemoryView_Check(object)
                          ? Py_XNewRef(PyMemoryView_GET_BASE(object))
                          : PyObject_GetAttrString(object, "base");
    if (array == NULL) {
        PyErr_Clear(); /* whatever it is, it is no array */
    }
    else if (!PyArray_Check(array)) {
        Py_CLEAR(array);
    }
    return array;
}

/* 1: found, 0: `object` does not say, or its buffer is another one. */
static int
buffer_behind(PyArrayObject *array, PyObject *object, struct whole_buffer *out)
{
    PyObject *whole = PyObject_CheckBuffer(object) ? Py_NewRef(object)
                                                   : whole_buffer_array_behind(object);
    if (whole == NULL) {
        return 0;
    }
    int result = whole_buffer_of(whole, out) < 0 ? -1 : contains(out, array);
    if (result == 0) {
        Py_CLEAR(out->owner);
    }
    Py_DECREF(whole);
    return result;
}

static int
buffer_of_arrays(PyArrayObject *array, struct whole_buffer *out)
{
    PyObject *next;
    PyArrayObject *last = last_array(array, &next);
    if (check_items(array) < 0 || check_items(last) < 0) {
        return -1;
    }
    int found = next != NULL ? buffer_behind(array, next, out) : 0;
    if (found != 0) {
        return found < 0 ? -1 : 0;
    }
    if (buffer_of_array(last, out) < 0) {
        return -1;
    }
    if (contains(out, array)) {
        return 0;
    }
    Py_CLEAR(out->owner);
    PyErr_SetString(PyExc_ValueError,
                    "the array does not lie in the memory of the array that it is a "
                    "view of: that was resized since");
    return -1;
}

/* `view` is a memoryview of anything; its reference is stolen. */
static int
buffer_of_view(PyObject *view, struct whole_buffer *out)
{
    const Py_buffer *exported = PyMemoryView_GET_BUFFER(view);
    *out = (struct whole_buffer){.read_only = exported->readonly != 0, .owner = view};
    if (view_extent(exported, &out->ptr, &out->nbytes) == 0) {
        return 0;
    }
    Py_CLEAR(out->owner);
    return -1;
}

static int
buffer_of_exporter(PyObject *object, struct whole_buffer *out)
{
    PyObject *view = PyMemoryView_FromObject(object); /* not of one that is released */
    if (view == NULL) {
        return -1;
    }
    PyObject *exporter = PyMemoryView_GET_BASE(view);
    if (exporter == NULL || exporter == object) {
        return buffer_of_view(view, out);
    }
    /* A view of a part, perhaps. */
    Py_INCREF(exporter);
    int result = whole_buffer_of(exporter, out);
    Py_DECREF(exporter);
    Py_DECREF(view);
    return result;
}

int
whole_buffer_of(PyObject *object, struct whole_buffer *out)
{
    if (Py_EnterRecursiveCall(" to find the owner of a buffer")) {
        return -1;
    }
    int result = PyArray_Check(object) ? buffer_of_arrays((PyArrayObject *)object, out)
                                       : buffer_of_exporter(object, out);
    Py_LeaveRecursiveCall();
    return result;
}
