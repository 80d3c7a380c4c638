/* DeviceScalar: a DeviceArray of no dimensions, whose element can be got and set. */
#include "python/numpy_api.h"

#include "python/device_scalar.h"

#include "python/device_array.h"
#include "python/errors.h"
#include "python/signature.h"

#define SCALAR_TEXT "dtype, value=None, *, stream=..., mr=None"
#define GET_TEXT "stream=..."
#define SET_TEXT "value, stream=..."

/* As an array of its dtype; what does not fit into that is NumPy's error. */
static int
set_value(PyObject *object, PyObject *value, PyObject *stream)
{
    PyArrayObject *view = (PyArrayObject *)device_array_from(object)->view;
    PyArray_Descr *dtype = PyArray_DESCR(view);
    Py_INCREF(dtype);
    PyObject *host = PyArray_FromAny(value, dtype, 0, 0, 0, NULL);
    if (host == NULL) {
        return -1;
    }
    int result = -1;
    if (PyArray_NDIM((PyArrayObject *)host) != 0) {
        PyErr_Format(PyExc_ValueError, "value must be one element, not %d dimensions",
                     PyArray_NDIM((PyArrayObject *)host));
    }
    else {
        result = device_array_copyto(object, host, stream);
    }
    Py_DECREF(host);
    return result;
}

static PyObject *
get_value(PyObject *object, PyObject *stream)
{
    PyObject *host = device_array_to_host(device_array_from(object), stream);
    if (host == NULL) {
        return NULL;
    }
    PyArrayObject *array = (PyArrayObject *)host;
    PyObject *value = PyArray_ToScalar(PyArray_DATA(array), array);
    Py_DECREF(host);
    return value;
}

static PyObject *
scalar_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static struct signature signature = SIGNATURE("DeviceScalar", SCALAR_TEXT);
    struct module_state *state = type_state(type);
    PyObject *values[4];
    if (state == NULL || errors_begin_call() < 0 ||
        signature_bind_tuple(&signature, args, keywords, values) < 0) {
        return NULL;
    }
    PyObject *self = device_array_of_shape(state, type, 0, NULL, values[0], false,
                                           values[2], values[3]);
    if (self != NULL && values[1] != NULL && values[1] != Py_None &&
        set_value(self, values[1], values[2]) < 0) {
        Py_CLEAR(self);
    }
    return self;
}

static PyObject *
get(PyObject *object, PyTypeObject *Py_UNUSED(type), PyObject *const *args,
    Py_ssize_t n_args, PyObject *names)
{
    static struct signature signature = SIGNATURE("get", GET_TEXT);
    PyObject *values[1];
    return signature_bind(&signature, args, n_args, names, values) < 0
               ? NULL
               : get_value(object, values[0]);
}

static PyObject *
set(PyObject *object, PyTypeObject *Py_UNUSED(type), PyObject *const *args,
    Py_ssize_t n_args, PyObject *names)
{
    static struct signature signature = SIGNATURE("set", SET_TEXT);
    PyObject *values[2];
    return signature_bind(&signature, args, n_args, names, values) < 0 ||
                   set_value(object, values[0], values[1]) < 0
               ? NULL
               : Py_NewRef(Py_None);
}

/* On the stream that the memory belongs to. */
static PyObject *
value_get(PyObject *object, void *Py_UNUSED(closure))
{
    PyObject *stream = PyObject_GetAttrString(object, "stream");
    PyObject *value = stream == NULL ? NULL : get_value(object, stream);
    Py_XDECREF(stream);
    return value;
}

static int
value_set(PyObject *object, PyObject *value, void *Py_UNUSED(closure))
{
    if (value == NULL) {
        PyErr_SetString(PyExc_AttributeError, "value cannot be deleted");
        return -1;
    }
    PyObject *stream = PyObject_GetAttrString(object, "stream");
    int result = stream == NULL ? -1 : set_value(object, value, stream);
    Py_XDECREF(stream);
    return result;
}

/* numba-cuda-mlir takes what has `value` and `to_device` for a hint about a host's
   value. */
static PyObject *
no_to_device(PyObject *Py_UNUSED(object), void *Py_UNUSED(closure))
{
    PyErr_SetString(PyExc_AttributeError, "a DeviceScalar has no to_device");
    return NULL;
}

static PyMethodDef scalar_methods[] = {
    {"get", (PyCFunction)(void (*)(void))get,
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS,
     SIGNATURE_DOC("get", "$self, ", GET_TEXT,
                   "Copy the element to the host, and wait.\n\n"
                   "Parameters\n----------\n"
                   "stream : Stream\n    On which the copy is made.\n\n"
                   "Returns\n-------\nnumpy scalar\n\n"
                   "Raises\n------\n"
                   "CudaError\n    When the driver failed.\n")},
    {"set", (PyCFunction)(void (*)(void))set,
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS,
     SIGNATURE_DOC(
         "set", "$self, ", SET_TEXT,
         "Copy an element from the host, and wait.\n\n"
         "Parameters\n----------\n"
         "value : scalar\n    What numpy.asarray makes an element of the dtype.\n"
         "stream : Stream\n    On which the copy is made.\n\n"
         "Raises\n------\n"
         "ValueError, OverflowError\n    For what is no element of the dtype.\n")},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef scalar_getset[] = {
    {"value", value_get, value_set,
     PyDoc_STR("The element, got and set on the stream of the scalar; waits."), NULL},
    {"to_device", no_to_device, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot scalar_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR(
                    "DeviceScalar(" SCALAR_TEXT ")\n--\n\n"
                    "One element in memory of a device: an array of no dimensions.\n\n"
                    "Parameters\n----------\n"
                    "dtype : dtype\n"
                    "value : scalar, optional\n    None: of unknown value.\n"
                    "stream, mr\n    As of :class:`DeviceArray`.\n\n"
                    "Raises\n------\n"
                    "OutOfMemoryError, TypeError\n    As of :class:`DeviceArray`.\n"
                    "ValueError, OverflowError\n    For what is no element.\n\n"
                    "Examples\n--------\n"
                    ">>> import numpy as np, numpy_rmm\n"
                    ">>> from numpy_rmm.testing import simulate_cuda\n"
                    ">>> with simulate_cuda():  # in place of a GPU\n"
                    "...     int(numpy_rmm.DeviceScalar(np.int64, 5).value)\n"
                    "5\n")},
    {Py_tp_new, scalar_new},
    {Py_tp_methods, scalar_methods},
    {Py_tp_getset, scalar_getset},
    {0, NULL},
};

static PyType_Spec scalar_spec = {
    .name = "numpy_rmm.DeviceScalar",
    .basicsize = sizeof(struct device_array),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = scalar_slots,
};

int
device_scalar_init(PyObject *module)
{
    struct module_state *state = module_state(module);
    PyObject *type = PyType_FromModuleAndSpec(module, &scalar_spec,
                                              (PyObject *)state->device_array_type);
    if (type == NULL) {
        return -1;
    }
    int result = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return result;
}
