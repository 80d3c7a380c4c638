/*
 * Attributes and methods of DeviceArray. Shapes and strides are those of its view;
 * copies are calls of copyto(), which plans them.
 */
#include "python/numpy_api.h"

#include "python/device_array.h"

#include "python/array_interface.h"
#include "python/byte_copy.h"
#include "python/dlpack_array.h"
#include "python/errors.h"
#include "python/numba_argument.h"
#include "python/prefetch.h"
#include "python/signature.h"

#define STREAM_TEXT "stream=..."
#define TO_HOST_TEXT "ary=None, stream=..."
#define FROM_TEXT "ary, stream=..."

static PyArrayObject *
view_of(PyObject *object)
{
    return (PyArrayObject *)device_array_from(object)->view;
}

static struct device_buffer *
buffer_of(PyObject *object)
{
    return device_buffer_from(device_array_from(object)->base);
}

static char *
address_of(PyObject *object)
{
    PyArrayObject *view = view_of(object);
    return PyArray_SIZE(view) != 0 ? PyArray_BYTES(view) : NULL;
}

/* ---- attributes ---- */

static PyObject *
tuple_of(const npy_intp *numbers, int n)
{
    PyObject *tuple = PyTuple_New(n);
    for (int i = 0; tuple != NULL && i < n; i++) {
        PyObject *number = PyLong_FromSsize_t(numbers[i]);
        if (number == NULL) {
            Py_CLEAR(tuple);
            break;
        }
        PyTuple_SET_ITEM(tuple, i, number);
    }
    return tuple;
}

static PyObject *
shape_get(PyObject *object, void *Py_UNUSED(closure))
{
    return tuple_of(PyArray_DIMS(view_of(object)), PyArray_NDIM(view_of(object)));
}

static PyObject *
strides_get(PyObject *object, void *Py_UNUSED(closure))
{
    return tuple_of(PyArray_STRIDES(view_of(object)), PyArray_NDIM(view_of(object)));
}

static PyObject *
dtype_get(PyObject *object, void *Py_UNUSED(closure))
{
    return Py_NewRef((PyObject *)PyArray_DESCR(view_of(object)));
}

static PyObject *
ndim_get(PyObject *object, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(PyArray_NDIM(view_of(object)));
}

static PyObject *
size_get(PyObject *object, void *Py_UNUSED(closure))
{
    return PyLong_FromSsize_t(PyArray_SIZE(view_of(object)));
}

static PyObject *
itemsize_get(PyObject *object, void *Py_UNUSED(closure))
{
    return PyLong_FromSsize_t(PyArray_ITEMSIZE(view_of(object)));
}

static PyObject *
nbytes_get(PyObject *object, void *Py_UNUSED(closure))
{
    return PyLong_FromSsize_t(PyArray_NBYTES(view_of(object)));
}

/* Numba's name for contiguous memory in one of the two orders: `closure` is a flag. */
static PyObject *
is_contiguous_get(PyObject *object, void *closure)
{
    return PyBool_FromLong(PyArray_CHKFLAGS(view_of(object), (int)(intptr_t)closure));
}

/* `closure` is the name of the buffer's. */
static PyObject *
base_attribute(PyObject *object, void *closure)
{
    return PyObject_GetAttrString(device_array_from(object)->base, closure);
}

static PyObject *
base_get(PyObject *object, void *Py_UNUSED(closure))
{
    return Py_NewRef(device_array_from(object)->base);
}

static PyObject *
ptr_get(PyObject *object, void *Py_UNUSED(closure))
{
    return PyLong_FromVoidPtr(address_of(object));
}

/* ---- other views ---- */

static PyObject *
view_by(PyObject *object, const char *method)
{
    struct module_state *state = type_state(Py_TYPE(object));
    struct device_array *self = device_array_from(object);
    PyObject *view = state == NULL ? NULL
                                   : PyObject_CallMethod(self->view, method, NULL);
    return view == NULL ? NULL : device_array_of_view(state, self, view);
}

static PyObject *
transposed_get(PyObject *object, void *Py_UNUSED(closure))
{
    return view_by(object, "transpose");
}

static PyObject *
reshape(PyObject *object, PyObject *args)
{
    struct module_state *state = type_state(Py_TYPE(object));
    struct device_array *self = device_array_from(object);
    if (state == NULL) {
        return NULL;
    }
    if (!PyArray_IS_C_CONTIGUOUS(view_of(object))) {
        PyErr_SetString(PyExc_ValueError,
                        "only a C-contiguous array can be reshaped without a copy: "
                        "copy() it first");
        return NULL;
    }
    PyObject *method = PyObject_GetAttrString(self->view, "reshape");
    PyObject *view = method == NULL ? NULL : PyObject_Call(method, args, NULL);
    Py_XDECREF(method);
    return view == NULL ? NULL : device_array_of_view(state, self, view);
}

static PyObject *
view(PyObject *object, PyObject *dtype)
{
    struct module_state *state = type_state(Py_TYPE(object));
    struct device_array *self = device_array_from(object);
    PyArray_Descr *found = NULL;
    if (state == NULL || PyArray_DescrConverter(dtype, &found) != NPY_SUCCEED) {
        return NULL;
    }
    PyObject *other = NULL;
    if (PyDataType_REFCHK(found) || PyDataType_HASSUBARRAY(found)) {
        PyErr_Format(PyExc_TypeError, "memory of a device cannot have elements of %R",
                     found);
    }
    else {
        other = PyObject_CallMethod(self->view, "view", "O", found);
    }
    Py_DECREF(found);
    return other == NULL ? NULL : device_array_of_view(state, self, other);
}

/* ---- copies ---- */

int
device_array_copyto(PyObject *dst, PyObject *src, PyObject *stream)
{
    PyObject *module = PyImport_ImportModule("numpy_rmm._copy");
    PyObject *copyto = module == NULL ? NULL : PyObject_GetAttrString(module, "copyto");
    PyObject *names = copyto == NULL ? NULL : Py_BuildValue("(s)", "stream");
    PyObject *args[] = {dst, src, stream};
    PyObject *result =
        names == NULL
            ? NULL
            : PyObject_Vectorcall(copyto, args, 2, stream != NULL ? names : NULL);
    Py_XDECREF(module);
    Py_XDECREF(copyto);
    Py_XDECREF(names);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

PyObject *
device_array_to_host(struct device_array *self, PyObject *stream)
{
    PyArrayObject *view = (PyArrayObject *)self->view;
    Py_INCREF(PyArray_DESCR(view));
    PyObject *host = PyArray_NewLikeArray(view, NPY_KEEPORDER, PyArray_DESCR(view), 0);
    if (host != NULL && device_array_copyto(host, (PyObject *)self, stream) < 0) {
        Py_CLEAR(host);
    }
    return host;
}

static PyObject *
copy_to_host(PyObject *object, PyTypeObject *Py_UNUSED(type), PyObject *const *args,
             Py_ssize_t n_args, PyObject *names)
{
    static struct signature signature = SIGNATURE("copy_to_host", TO_HOST_TEXT);
    PyObject *values[2];
    if (signature_bind(&signature, args, n_args, names, values) < 0) {
        return NULL;
    }
    if (values[0] == NULL || values[0] == Py_None) {
        return device_array_to_host(device_array_from(object), values[1]);
    }
    return device_array_copyto(values[0], object, values[1]) < 0 ? NULL
                                                                 : Py_NewRef(values[0]);
}

static PyObject *
copy_from(PyObject *object, PyTypeObject *Py_UNUSED(type), PyObject *const *args,
          Py_ssize_t n_args, PyObject *names)
{
    static struct signature signature = SIGNATURE("copy_from", FROM_TEXT);
    PyObject *values[2];
    return signature_bind(&signature, args, n_args, names, values) < 0 ||
                   device_array_copyto(object, values[0], values[1]) < 0
               ? NULL
               : Py_NewRef(Py_None);
}

/* In the order of its own stream where it is contiguous, as a copy of the buffer is. */
static int
copy_elements(struct module_state *state, PyObject *dst, PyObject *src)
{
    struct device_buffer *buffer = buffer_of(src);
    if (!PyArray_ISONESEGMENT(view_of(src))) {
        PyObject *stream = device_memory_stream(state, &buffer->memory);
        int result = stream == NULL ? -1 : device_array_copyto(dst, src, stream);
        Py_XDECREF(stream);
        return result;
    }
    struct byte_copy copy = {
        .dst = address_of(dst),
        .src = address_of(src),
        .nbytes = (size_t)PyArray_NBYTES(view_of(src)),
        .direction = NRM__WITHIN,
        .stream = buffer->memory.stream,
        .device = buffer->memory.device,
        .dst_buffer = buffer_of(dst),
        .src_buffer = buffer,
    };
    return byte_copy_run(state, &copy);
}

/* A scalar's copy is one; of a class of others we do not know what it is made with. */
static PyTypeObject *
type_of_copy(struct module_state *state, PyObject *object)
{
    bool has_subclasses = PyType_HasFeature(Py_TYPE(object), Py_TPFLAGS_BASETYPE);
    return has_subclasses ? state->device_array_type : Py_TYPE(object);
}

static PyObject *
copy(PyObject *object, PyObject *Py_UNUSED(unused))
{
    struct module_state *state = type_state(Py_TYPE(object));
    PyArrayObject *view = view_of(object);
    struct device_memory *memory = &buffer_of(object)->memory;
    PyObject *stream = state == NULL || errors_begin_call() < 0
                           ? NULL
                           : device_memory_stream(state, memory);
    if (stream == NULL) {
        return NULL;
    }
    PyObject *other =
        device_array_of_shape(state, type_of_copy(state, object), PyArray_NDIM(view),
                              PyArray_DIMS(view), (PyObject *)PyArray_DESCR(view),
                              PyArray_ISFORTRAN(view), stream, memory->mr_object);
    Py_DECREF(stream);
    if (other != NULL && copy_elements(state, other, object) < 0) {
        Py_CLEAR(other);
    }
    return other;
}

static PyObject *
prefetch(PyObject *object, PyTypeObject *type, PyObject *const *args, Py_ssize_t n_args,
         PyObject *names)
{
    PyArrayObject *view = view_of(object);
    struct device_memory *memory = &buffer_of(object)->memory;
    if (!PyArray_ISONESEGMENT(view)) {
        PyErr_SetString(PyExc_ValueError, "only contiguous memory can be prefetched");
        return NULL;
    }
    return prefetch_method(PyType_GetModuleState(type), memory, address_of(object),
                           (size_t)PyArray_NBYTES(view), args, n_args, names);
}

/* ---- for other libraries ---- */

static PyObject *
make_interface(PyObject *object, const nrm_stream *stream)
{
    PyArrayObject *view = view_of(object);
    PyObject *dtype = (PyObject *)PyArray_DESCR(view);
    bool is_dense = PyArray_IS_C_CONTIGUOUS(view);
    PyObject *shape = PyObject_GetAttrString((PyObject *)view, "shape");
    PyObject *strides = PyObject_GetAttrString((PyObject *)view, "strides");
    PyObject *typestr = PyObject_GetAttrString(dtype, "str");
    PyObject *descr = device_array_fields(object);
    PyObject *dict = NULL;
    if (shape != NULL && strides != NULL && typestr != NULL && descr != NULL) {
        dict = array_interface_make(address_of(object), shape,
                                    is_dense ? NULL : strides, typestr,
                                    descr != Py_None ? descr : NULL, stream);
    }
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    Py_XDECREF(typestr);
    Py_XDECREF(descr);
    return dict;
}

static PyObject *
interface_get(PyObject *object, void *Py_UNUSED(closure))
{
    struct device_array *self = device_array_from(object);
    if (device_buffer_is_pending(buffer_of(object))) {
        return make_interface(object, buffer_of(object)->memory.stream);
    }
    PyObject *kept = array_interface_again(&self->interface);
    if (kept != NULL) {
        return kept;
    }
    PyObject *dict = make_interface(object, NULL);
    bool has_list = PyDataType_HASFIELDS(PyArray_DESCR(view_of(object)));
    return has_list ? dict : array_interface_keep(&self->interface, dict);
}

int
device_array_describe(PyObject *object, struct dlpack_source *out)
{
    *out = (struct dlpack_source){
        .owner = object,
        .n_exports = &buffer_of(object)->n_exports,
        .memory = &buffer_of(object)->memory,
    };
    return dlpack_describe(view_of(object), out);
}

static PyObject *
copy_for_dlpack(struct module_state *Py_UNUSED(state), PyObject *object)
{
    return copy(object, NULL);
}

static PyObject *
dlpack(PyObject *object, PyTypeObject *type, PyObject *const *args, Py_ssize_t n_args,
       PyObject *names)
{
    static const struct dlpack_exporter exporter = {copy_for_dlpack,
                                                    device_array_describe};
    return dlpack_call(PyType_GetModuleState(type), &exporter, object, args, n_args,
                       names);
}

static PyObject *
dlpack_device(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return dlpack_device_of(&buffer_of(object)->memory);
}

static PyObject *
to_numpy(PyObject *Py_UNUSED(object), PyObject *Py_UNUSED(args),
         PyObject *Py_UNUSED(keywords))
{
    PyErr_SetString(PyExc_TypeError,
                    "the elements are on a device: copy_to_host() brings them");
    return NULL;
}

/* ---- pickle ---- */

/* NumPy pickles the elements, out of band where the protocol can. */
static PyObject *
reduce(PyObject *object, PyObject *Py_UNUSED(unused))
{
    struct module_state *state = type_state(Py_TYPE(object));
    if (state == NULL || errors_begin_call() < 0) {
        return NULL;
    }
    PyObject *host = device_array_to_host(device_array_from(object), NULL);
    PyObject *rebuild =
        host == NULL
            ? NULL
            : PyObject_GetAttrString(PyType_GetModule(state->device_array_type),
                                     "_rebuild_device_array");
    if (rebuild == NULL) {
        Py_XDECREF(host);
        return NULL;
    }
    return Py_BuildValue("N(ON)", rebuild, (PyObject *)Py_TYPE(object), host);
}

/* ---- the tables ---- */

#define METHOD(name)                                                                   \
    (PyCFunction)(void (*)(void)) name, METH_METHOD | METH_FASTCALL | METH_KEYWORDS

PyMethodDef device_array_methods[] = {
    {"reshape", reshape, METH_VARARGS,
     PyDoc_STR("reshape($self, /, *shape)\n--\n\n"
               "The same memory in another shape.\n\n"
               "Parameters\n----------\n"
               "*shape : int\n    The lengths, or a tuple of them; one may be -1.\n\n"
               "Returns\n-------\nDeviceArray\n\n"
               "Raises\n------\n"
               "ValueError\n    Unless it is C-contiguous, and for another size.\n")},
    {"view", view, METH_O,
     PyDoc_STR("view($self, dtype, /)\n--\n\n"
               "The same memory as other elements.\n\n"
               "Parameters\n----------\n"
               "dtype : dtype\n    Of any elements but Python objects.\n\n"
               "Returns\n-------\nDeviceArray\n\n"
               "Raises\n------\n"
               "TypeError, ValueError\n    By the rules of numpy.ndarray.view.\n")},
    {"copy_to_host", METHOD(copy_to_host),
     SIGNATURE_DOC(
         "copy_to_host", "$self, ", TO_HOST_TEXT,
         "Copy the elements to the host, and wait.\n\n"
         "Parameters\n----------\n"
         "ary : numpy.ndarray, optional\n    Of equal shape and dtype. None: a\n"
         "    new one, of the current handler's memory.\n"
         "stream : Stream\n    On which the copy is made, after what the\n"
         "    array's own has been given.\n\n"
         "Returns\n-------\nnumpy.ndarray or `ary`\n\n"
         "Raises\n------\n"
         "TypeError, ValueError, CudaError\n    As :func:`copyto`.\n")},
    {"copy_from", METHOD(copy_from),
     SIGNATURE_DOC("copy_from", "$self, ", FROM_TEXT,
                   "Copy the elements of another array into this one, and wait.\n\n"
                   "Parameters\n----------\n"
                   "ary : numpy.ndarray or object with ``__cuda_array_interface__``\n"
                   "    Of equal shape and dtype.\n"
                   "stream : Stream\n    On which the copy is made.\n\n"
                   "Raises\n------\n"
                   "TypeError, ValueError, CudaError\n    As :func:`copyto`.\n")},
    {"copy", copy, METH_NOARGS,
     PyDoc_STR("copy($self)\n--\n\n"
               "An array of its own, of the same resource and stream, contiguous.\n\n"
               "A copy of a contiguous array is waited for on DEFAULT_STREAM only.\n\n"
               "Returns\n-------\nDeviceArray\n\n"
               "Raises\n------\n"
               "OutOfMemoryError\n    When the memory cannot be had.\n")},
    {"__copy__", copy, METH_NOARGS, NULL},
    {"__deepcopy__", copy, METH_O, NULL},
    {"prefetch", METHOD(prefetch),
     SIGNATURE_DOC("prefetch", "$self, ", PREFETCH_TEXT,
                   "As :meth:`DeviceBuffer.prefetch`.")},
    {"__dlpack__", METHOD(dlpack),
     SIGNATURE_DOC("__dlpack__", "$self, ", DLPACK_TEXT, DLPACK_DOC)},
    {"__dlpack_device__", dlpack_device, METH_NOARGS,
     PyDoc_STR("__dlpack_device__($self)\n--\n\nAs of :class:`DeviceBuffer`.")},
    {"__array__", (PyCFunction)(void (*)(void))to_numpy, METH_VARARGS | METH_KEYWORDS,
     PyDoc_STR("__array__($self, dtype=None, *, copy=None)\n--\n\n"
               "Raise TypeError: nothing is copied unasked.")},
    {"to_device", METHOD(numba_argument),
     SIGNATURE_DOC("to_device", "$self, ", NUMBA_ARGUMENT_TEXT,
                   "The array itself: for Numba, which asks it of arguments of "
                   "kernels.")},
    {"__reduce__", reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

#define OF_VIEW(name, text) {#name, name##_get, NULL, PyDoc_STR(text), NULL}
#define OF_BASE(name, text) {name, base_attribute, NULL, PyDoc_STR(text), (void *)name}

PyGetSetDef device_array_getset[] = {
    OF_VIEW(shape, "Lengths of the axes."),
    OF_VIEW(strides, "Bytes from one element of an axis to the next."),
    OF_VIEW(dtype, "Of the elements."),
    OF_VIEW(ndim, "Axes."),
    OF_VIEW(size, "Elements."),
    OF_VIEW(itemsize, "Bytes of an element."),
    OF_VIEW(nbytes, "Bytes of all elements."),
    OF_BASE("stream", "That of :attr:`base`."),
    OF_BASE("mr", "That of :attr:`base`."),
    {"base", base_get, NULL, PyDoc_STR("The DeviceBuffer that has the memory."), NULL},
    {"ptr", ptr_get, NULL, PyDoc_STR("The address of the first element; 0: none."),
     NULL},
    {"T", transposed_get, NULL, PyDoc_STR("The same memory with its axes reversed."),
     NULL},
    {"__cuda_array_interface__", interface_get, NULL,
     PyDoc_STR("Version 3; as that of :class:`DeviceBuffer`."), NULL},
    {"_numba_type_", numba_type_of_array, NULL,
     PyDoc_STR("The type of such an array, where Numba is loaded."), NULL},
    {"_layout", numba_layout, NULL,
     PyDoc_STR("For Numba: the array, which has what is asked of its layout."), NULL},
    {"strides_in_bytes", strides_get, NULL, PyDoc_STR("For Numba: the strides."), NULL},
    {"is_contiguous_c", is_contiguous_get, NULL, PyDoc_STR("For Numba."),
     (void *)(intptr_t)NPY_ARRAY_C_CONTIGUOUS},
    {"is_contiguous_f", is_contiguous_get, NULL, PyDoc_STR("For Numba."),
     (void *)(intptr_t)NPY_ARRAY_F_CONTIGUOUS},
    {NULL, NULL, NULL, NULL, NULL},
};
