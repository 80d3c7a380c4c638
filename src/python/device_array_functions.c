/*
 * DeviceArrays of what is on the host: to_device(), and what pickle calls.
 */
#include "python/numpy_api.h"

#include "python/device_array.h"

#include "python/errors.h"
#include "python/signature.h"

#define TO_DEVICE_TEXT "array, stream=..., mr=None"

static PyObject *
of_host(struct module_state *state, PyTypeObject *type, PyArrayObject *host,
        PyObject *stream, PyObject *mr)
{
    PyObject *self = device_array_of_shape(state, type, PyArray_NDIM(host),
                                           PyArray_DIMS(host),
                                           (PyObject *)PyArray_DESCR(host),
                                           PyArray_ISFORTRAN(host), stream, mr);
    if (self != NULL && device_array_copyto(self, (PyObject *)host, stream) < 0) {
        Py_CLEAR(self);
    }
    return self;
}

static PyObject *
to_device(PyObject *module, PyObject *const *args, Py_ssize_t n_args, PyObject *names)
{
    static struct signature signature = SIGNATURE("to_device", TO_DEVICE_TEXT);
    struct module_state *state = module_state(module);
    PyObject *values[3];
    if (errors_begin_call() < 0 ||
        signature_bind(&signature, args, n_args, names, values) < 0) {
        return NULL;
    }
    PyObject *host = PyArray_FromAny(values[0], NULL, 0, 0, 0, NULL);
    PyObject *self = host == NULL
                         ? NULL
                         : of_host(state, state->device_array_type,
                                   (PyArrayObject *)host, values[1], values[2]);
    Py_XDECREF(host);
    return self;
}

static PyObject *
rebuild_device_array(PyObject *module, PyObject *args)
{
    struct module_state *state = module_state(module);
    PyObject *type, *host;
    if (!PyArg_ParseTuple(args, "O!O!:_rebuild_device_array", &PyType_Type, &type,
                          &PyArray_Type, &host) ||
        errors_begin_call() < 0) {
        return NULL;
    }
    if (!PyType_IsSubtype((PyTypeObject *)type, state->device_array_type)) {
        PyErr_Format(PyExc_TypeError, "%R is no DeviceArray", type);
        return NULL;
    }
    return of_host(state, (PyTypeObject *)type, (PyArrayObject *)host, NULL, NULL);
}

static PyObject *
bytes_of_buffer(PyObject *module, PyObject *object)
{
    struct module_state *state = module_state(module);
    if (!PyObject_TypeCheck(object, state->device_buffer_type)) {
        PyErr_Format(PyExc_TypeError, "%.100s is no DeviceBuffer",
                     Py_TYPE(object)->tp_name);
        return NULL;
    }
    return device_array_of_bytes(state, object);
}

PyMethodDef device_array_functions[] = {
    {"to_device", (PyCFunction)(void (*)(void))to_device, METH_FASTCALL | METH_KEYWORDS,
     SIGNATURE_DOC(
         "to_device", "$module, ", TO_DEVICE_TEXT,
         "A new array in memory of a device with the elements of another.\n\n"
         "Parameters\n----------\n"
         "array : array_like\n    Of any shape; a Fortran-contiguous one stays\n"
         "    so.\n"
         "stream : Stream\n    Of the new array, and of the copy, which is\n"
         "    waited for.\n"
         "mr : MemoryResource, optional\n    None: the current one.\n\n"
         "Returns\n-------\nDeviceArray\n\n"
         "Raises\n------\n"
         "OutOfMemoryError\n    When the memory cannot be had.\n"
         "TypeError\n    For Python objects as elements.\n"
         "ValueError\n    For a resource of host memory.\n\n"
         "Examples\n--------\n"
         ">>> import numpy as np, numpy_rmm\n"
         ">>> from numpy_rmm.testing import simulate_cuda\n"
         ">>> with simulate_cuda():  # in place of a GPU\n"
         "...     array = numpy_rmm.to_device(np.arange(6.0).reshape(2, 3))\n"
         "...     array.shape, array.dtype\n"
         "...     array[:, ::2].copy_to_host()\n"
         "((2, 3), dtype('float64'))\n"
         "array([[0., 2.],\n"
         "       [3., 5.]])\n")},
    {"_rebuild_device_array", rebuild_device_array, METH_VARARGS,
     PyDoc_STR("_rebuild_device_array($module, type, host, /)\n--\n\n"
               "What a pickled DeviceArray becomes.")},
    {"_bytes_of_buffer", bytes_of_buffer, METH_O,
     PyDoc_STR("_bytes_of_buffer($module, buffer, /)\n--\n\n"
               "The memory of a DeviceBuffer as an array of bytes.")},
    {NULL, NULL, 0, NULL},
};
