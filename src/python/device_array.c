/*
 * DeviceArray: how one is made, and what slices and other views of it are.
 *
 * What a shape, a slice or another dtype makes of an address is NumPy's to say, so each
 * array has a NumPy array over the device's address, of which shape, strides and views
 * are taken. Nothing may read through it: an index that would give an element gives an
 * array of no dimensions, one that needs a copy is refused, and it is shown to nobody.
 */
#include "python/numpy_api.h"

#include "python/device_array.h"

#include "python/dlpack_array.h"
#include "python/errors.h"
#include "python/signature.h"

#define ARRAY_TEXT "shape, dtype='float64', order='C', *, stream=..., mr=None"

/* ---- dtypes and shapes ---- */

static PyArray_Descr *
find_dtype(PyObject *value)
{
    PyArray_Descr *dtype = NULL;
    if (value == NULL) {
        return PyArray_DescrFromType(NPY_DOUBLE);
    }
    if (PyArray_DescrConverter(value, &dtype) != NPY_SUCCEED) {
        return NULL;
    }
    if (PyDataType_REFCHK(dtype) || PyDataType_ELSIZE(dtype) == 0 ||
        PyDataType_HASSUBARRAY(dtype)) {
        PyErr_Format(PyExc_TypeError, "memory of a device cannot have elements of %R",
                     dtype);
        Py_CLEAR(dtype);
    }
    return dtype;
}

/* -1 with a ValueError: it has more bytes than an address can say. */
static int
count_bytes(const PyArray_Dims *shape, const PyArray_Descr *dtype, size_t *out)
{
    size_t nbytes = (size_t)PyDataType_ELSIZE(dtype);
    bool is_empty = false;
    for (int i = 0; i < shape->len; i++) {
        if (shape->ptr[i] < 0) {
            PyErr_Format(PyExc_ValueError, "shape: a length of %zd is negative",
                         (Py_ssize_t)shape->ptr[i]);
            return -1;
        }
        size_t n = (size_t)shape->ptr[i];
        is_empty = is_empty || n == 0;
        if (n != 0 && nbytes > PY_SSIZE_T_MAX / n) {
            PyErr_SetString(PyExc_ValueError, "shape: the array is too large");
            return -1;
        }
        nbytes *= n != 0 ? n : 1;
    }
    *out = is_empty ? 0 : nbytes;
    return 0;
}

/* ---- making one ---- */

/* Steals both. */
static PyObject *
make(PyTypeObject *type, PyObject *view, PyObject *base)
{
    struct device_array *self =
        view == NULL ? NULL : device_array_from(type->tp_alloc(type, 0));
    if (self == NULL) {
        Py_XDECREF(view);
        Py_DECREF(base);
        return NULL;
    }
    self->view = view;
    self->base = base;
    atomic_fetch_add(&device_buffer_from(base)->n_exports, 1);
    return (PyObject *)self;
}

/* Steals `dtype`. NumPy would allocate where there is no address. */
static PyObject *
make_view(char *ptr, const PyArray_Dims *shape, PyArray_Descr *dtype, bool is_fortran)
{
    static char nothing;
    int flags = NPY_ARRAY_WRITEABLE | (is_fortran ? NPY_ARRAY_F_CONTIGUOUS : 0);
    return PyArray_NewFromDescr(&PyArray_Type, dtype, shape->len, shape->ptr, NULL,
                                ptr != NULL ? ptr : &nothing, flags, NULL);
}

static PyObject *
make_of_shape(struct module_state *state, PyTypeObject *type, const PyArray_Dims *shape,
              PyArray_Descr *dtype, bool is_fortran, PyObject *stream, PyObject *mr)
{
    size_t nbytes;
    if (count_bytes(shape, dtype, &nbytes) < 0) {
        return NULL;
    }
    PyObject *base =
        device_buffer_make(state, state->device_buffer_type, nbytes, stream, mr);
    if (base == NULL) {
        return NULL;
    }
    Py_INCREF(dtype);
    char *ptr = device_buffer_from(base)->memory.ptr;
    return make(type, make_view(ptr, shape, dtype, is_fortran), base);
}

PyObject *
device_array_of_shape(struct module_state *state, PyTypeObject *type, int n_dims,
                      const Py_ssize_t *shape, PyObject *dtype, bool is_fortran,
                      PyObject *stream, PyObject *mr)
{
    const PyArray_Dims dims = {(npy_intp *)shape, n_dims};
    PyArray_Descr *found = find_dtype(dtype);
    if (found == NULL) {
        return NULL;
    }
    PyObject *self = make_of_shape(state, type, &dims, found, is_fortran, stream, mr);
    Py_DECREF(found);
    return self;
}

/* The same of `shape`, an int or a sequence of them. */
static PyObject *
make_from(struct module_state *state, PyTypeObject *type, PyObject *shape,
          PyObject *dtype, bool is_fortran, PyObject *stream, PyObject *mr)
{
    PyArray_Dims dims = {NULL, 0};
    if (PyArray_IntpConverter(shape, &dims) != NPY_SUCCEED) {
        return NULL;
    }
    PyObject *self = device_array_of_shape(state, type, dims.len, dims.ptr, dtype,
                                           is_fortran, stream, mr);
    PyDimMem_FREE(dims.ptr);
    return self;
}

PyObject *
device_array_over(struct module_state *state, PyObject *view, PyObject *base)
{
    return make(state->device_array_type, view, base);
}

PyObject *
device_array_of_bytes(struct module_state *state, PyObject *buffer)
{
    npy_intp nbytes = (npy_intp)device_buffer_from(buffer)->nbytes;
    PyArray_Dims shape = {&nbytes, 1};
    PyArray_Descr *dtype = PyArray_DescrFromType(NPY_UINT8);
    char *ptr = device_buffer_from(buffer)->memory.ptr;
    return device_array_over(state, make_view(ptr, &shape, dtype, false),
                             Py_NewRef(buffer));
}

PyObject *
device_array_fields(PyObject *object)
{
    PyArray_Descr *dtype =
        PyArray_DESCR((PyArrayObject *)device_array_from(object)->view);
    PyObject *descr = PyDataType_HASFIELDS(dtype)
                          ? PyObject_GetAttrString((PyObject *)dtype, "descr")
                          : Py_NewRef(Py_None);
    if (descr == NULL && PyErr_ExceptionMatches(PyExc_ValueError)) {
        PyErr_Clear();
        descr = Py_NewRef(Py_None);
    }
    return descr;
}

/* Of two threads that make them at once the first one's stay. */
int64_t *
device_array_item_strides(struct device_array *self)
{
    PyArrayObject *view = (PyArrayObject *)self->view;
    int64_t *strides = atomic_load(&self->item_strides);
    if (strides != NULL) {
        return strides;
    }
    int64_t *made = PyMem_RawCalloc((size_t)PyArray_NDIM(view) + 1, sizeof *made);
    if (made == NULL) {
        return (int64_t *)PyErr_NoMemory();
    }
    if (dlpack_strides_of(view, made) < 0) {
        PyMem_RawFree(made);
        return NULL;
    }
    if (atomic_compare_exchange_strong(&self->item_strides, &strides, made)) {
        return made;
    }
    PyMem_RawFree(made);
    return strides;
}

PyObject *
device_array_of_view(struct module_state *state, struct device_array *self,
                     PyObject *view)
{
    return make(state->device_array_type, view, Py_NewRef(self->base));
}

struct device_memory *
device_memory_of(struct module_state *state, PyObject *object)
{
    if (PyObject_TypeCheck(object, state->device_array_type)) {
        object = device_array_from(object)->base;
    }
    return PyObject_TypeCheck(object, state->device_buffer_type)
               ? &device_buffer_from(object)->memory
               : NULL;
}

static int
read_order(PyObject *value, bool *out)
{
    bool is_c = value == NULL || (PyUnicode_Check(value) &&
                                  PyUnicode_CompareWithASCIIString(value, "C") == 0);
    *out = !is_c;
    if (is_c ||
        (PyUnicode_Check(value) && PyUnicode_CompareWithASCIIString(value, "F") == 0)) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "order must be 'C' or 'F', not %R", value);
    return -1;
}

static PyObject *
array_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static struct signature signature = SIGNATURE("DeviceArray", ARRAY_TEXT);
    struct module_state *state = type_state(type);
    PyObject *values[5];
    bool is_fortran;
    if (state == NULL || errors_begin_call() < 0 ||
        signature_bind_tuple(&signature, args, keywords, values) < 0 ||
        read_order(values[2], &is_fortran) < 0) {
        return NULL;
    }
    return make_from(state, type, values[0], values[1], is_fortran, values[3],
                     values[4]);
}

/* ---- life ---- */

static int
array_traverse(PyObject *object, visitproc visit, void *arg)
{
    struct device_array *self = device_array_from(object);
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->base);
    Py_VISIT(self->interface.dict);
    Py_VISIT(self->interface.entries);
    Py_VISIT(atomic_load(&self->numba_type));
    return 0;
}

static int
array_clear(PyObject *object)
{
    array_interface_forget(&device_array_from(object)->interface);
    return 0;
}

static void
array_dealloc(PyObject *object)
{
    struct device_array *self = device_array_from(object);
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(object);
    }
    Py_XDECREF(atomic_load(&self->numba_type));
    PyMem_RawFree(atomic_load(&self->item_strides));
    Py_XDECREF(self->view);
    array_interface_forget(&self->interface);
    if (self->base != NULL) {
        atomic_fetch_sub(&device_buffer_from(self->base)->n_exports, 1);
        Py_DECREF(self->base);
    }
    type->tp_free(object);
    Py_DECREF(type);
}

/* ---- slices ---- */

static bool
is_basic(PyObject *index)
{
    return PySlice_Check(index) || index == Py_Ellipsis || index == Py_None ||
           (PyIndex_Check(index) && !PyBool_Check(index) && !PyArray_Check(index));
}

/* The key as a tuple that ends in what keeps NumPy from reading an element. */
static PyObject *
basic_key(PyObject *key)
{
    PyObject *items = PyTuple_Check(key) ? Py_NewRef(key) : PyTuple_Pack(1, key);
    bool has_ellipsis = false;
    for (Py_ssize_t i = 0; items != NULL && i < PyTuple_GET_SIZE(items); i++) {
        PyObject *item = PyTuple_GET_ITEM(items, i);
        has_ellipsis = has_ellipsis || item == Py_Ellipsis;
        if (!is_basic(item)) {
            PyErr_Format(PyExc_TypeError,
                         "an index must be an int, a slice, None or ..., not %.100s: "
                         "others would need a copy",
                         Py_TYPE(item)->tp_name);
            Py_CLEAR(items);
        }
    }
    if (items == NULL || has_ellipsis) {
        return items;
    }
    PyObject *end = PyTuple_Pack(1, Py_Ellipsis);
    PyObject *whole = end == NULL ? NULL : PySequence_Concat(items, end);
    Py_XDECREF(end);
    Py_DECREF(items);
    return whole;
}

static PyObject *
array_subscript(PyObject *object, PyObject *key)
{
    struct device_array *self = device_array_from(object);
    struct module_state *state = type_state(Py_TYPE(object));
    PyObject *items = state == NULL ? NULL : basic_key(key);
    if (items == NULL) {
        return NULL;
    }
    PyObject *view = PyObject_GetItem(self->view, items);
    Py_DECREF(items);
    return view == NULL ? NULL : device_array_of_view(state, self, view);
}

static Py_ssize_t
array_length(PyObject *object)
{
    return PyObject_Length(device_array_from(object)->view);
}

static PyObject *
array_repr(PyObject *object)
{
    struct device_array *self = device_array_from(object);
    PyArrayObject *view = (PyArrayObject *)self->view;
    const char *name = strrchr(Py_TYPE(object)->tp_name, '.');
    name = name != NULL ? name + 1 : Py_TYPE(object)->tp_name;
    PyObject *shape = PyObject_GetAttrString(self->view, "shape");
    PyObject *repr = shape == NULL
                         ? NULL
                         : PyUnicode_FromFormat("<%s of shape %R, %S, in %R>", name,
                                                shape, PyArray_DESCR(view), self->base);
    Py_XDECREF(shape);
    return repr;
}

/* ---- the type ---- */

static PyMemberDef array_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(struct device_array, weakrefs),
     READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot array_slots[] = {
    {Py_tp_doc,
     (void *)PyDoc_STR(
         "DeviceArray(" ARRAY_TEXT ")\n--\n\n"
         "An array in memory of a device: storage and interchange, no arithmetic.\n\n"
         "Slices, :meth:`reshape`, :meth:`view` and :attr:`T` give arrays over the same\n"
         "memory. Elements are on the device: ``copy_to_host`` brings them.\n\n"
         "Parameters\n----------\n"
         "shape : int or sequence of int\n    The lengths, in elements.\n"
         "dtype : dtype\n    Of any elements but Python objects.\n"
         "order : {'C', 'F'}\n    Row-major or column-major.\n"
         "stream : Stream\n    The memory may be used behind it, and goes back behind it.\n"
         "mr : MemoryResource, optional\n"
         "    Of memory that a device can use. None: the current one of the current\n"
         "    device.\n\n"
         "Raises\n------\n"
         "OutOfMemoryError\n    When the memory cannot be had.\n"
         "TypeError\n    For Python objects as elements.\n"
         "ValueError\n    For a negative length, and a resource of host memory.\n\n"
         "Examples\n--------\n"
         ">>> import numpy as np, numpy_rmm\n"
         ">>> from numpy_rmm.testing import simulate_cuda\n"
         ">>> with simulate_cuda():  # in place of a GPU\n"
         "...     array = numpy_rmm.DeviceArray((2, 3), np.float32)\n"
         "...     array.copy_from(np.ones((2, 3), np.float32))\n"
         "...     array.nbytes, array[0, 1:].copy_to_host()\n"
         "(24, array([1., 1.], dtype=float32))\n")},
    {Py_tp_new, array_new},
    {Py_tp_dealloc, array_dealloc},
    {Py_tp_traverse, array_traverse},
    {Py_tp_clear, array_clear},
    {Py_tp_repr, array_repr},
    {Py_mp_length, array_length},
    {Py_mp_subscript, array_subscript},
    {Py_tp_methods, device_array_methods},
    {Py_tp_getset, device_array_getset},
    {Py_tp_members, array_members},
    {0, NULL},
};

static PyType_Spec array_spec = {
    .name = "numpy_rmm.DeviceArray",
    .basicsize = sizeof(struct device_array),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = array_slots,
};

int
device_array_init(PyObject *module)
{
    struct module_state *state = module_state(module);
    PyObject *type = PyType_FromModuleAndSpec(module, &array_spec, NULL);
    state->device_array_type = (PyTypeObject *)type;
    return type == NULL ? -1 : PyModule_AddType(module, state->device_array_type);
}
