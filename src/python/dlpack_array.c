/*
 * DLPack and NumPy: shapes and elements of arrays, and page-locked arrays of the host.
 *
 * NumPy shows every array as ordinary memory of the host. Whether it is page-locked
 * decides how JAX and cuda.core use it, so as_dlpack_pinned() gives an object that says
 * so. What a library takes of it keeps the array alive, and so its memory, as long as
 * NumPy does.
 */
#include "python/numpy_api.h"

#include "python/dlpack_array.h"

#include "python/array_info.h"
#include "python/errors.h"
#include "python/signature.h"

/* ---- elements ---- */

/* NumPy's letters, by DLPack's codes. */
static const struct kind {
    char letter;
    uint8_t code;
} kinds[] = {
    {'b', DLPACK_BOOL},  {'i', DLPACK_INT},     {'u', DLPACK_UINT},
    {'f', DLPACK_FLOAT}, {'c', DLPACK_COMPLEX},
};

enum { N_KINDS = sizeof kinds / sizeof *kinds };

int
dlpack_type_of(PyArray_Descr *dtype, struct dlpack_type *out)
{
    for (int i = 0; i < N_KINDS && !PyDataType_ISBYTESWAPPED(dtype); i++) {
        if (kinds[i].letter == dtype->kind) {
            *out = (struct dlpack_type){.code = kinds[i].code,
                                        .bits = (uint8_t)(8 * PyDataType_ELSIZE(dtype)),
                                        .lanes = 1};
            return 0;
        }
    }
    PyErr_Format(PyExc_BufferError, "DLPack has no elements of %R", dtype);
    return -1;
}

PyArray_Descr *
dlpack_dtype_of(struct dlpack_type type)
{
    PyArray_Descr *dtype = NULL;
    for (int i = 0; i < N_KINDS && type.lanes == 1 && type.bits % 8 == 0; i++) {
        if (kinds[i].code != type.code) {
            continue;
        }
        PyObject *text = PyUnicode_FromFormat("%c%d", kinds[i].letter, type.bits / 8);
        if (text == NULL || PyArray_DescrConverter(text, &dtype) != NPY_SUCCEED) {
            PyErr_Clear();
        }
        Py_XDECREF(text);
    }
    if (dtype == NULL) {
        PyErr_Format(PyExc_BufferError,
                     "NumPy has no elements of DLPack type %d with %d bits in %d lanes",
                     (int)type.code, (int)type.bits, (int)type.lanes);
    }
    return dtype;
}

/* ---- shapes ---- */

int
dlpack_strides_of(PyArrayObject *array, int64_t *out)
{
    npy_intp itemsize = PyArray_ITEMSIZE(array);
    for (int i = 0; i < PyArray_NDIM(array); i++) {
        npy_intp stride = PyArray_STRIDE(array, i);
        if (stride % itemsize != 0) {
            PyErr_Format(PyExc_BufferError,
                         "DLPack has no stride of %zd B between elements of %zd B",
                         (Py_ssize_t)stride, (Py_ssize_t)itemsize);
            return -1;
        }
        out[i] = stride / itemsize;
    }
    return 0;
}

int
dlpack_describe(PyArrayObject *array, struct dlpack_source *out)
{
    out->ptr = PyArray_SIZE(array) != 0 ? PyArray_BYTES(array) : NULL;
    out->n_dims = PyArray_NDIM(array);
    for (int i = 0; i < out->n_dims; i++) {
        out->shape[i] = PyArray_DIM(array, i);
    }
    return dlpack_strides_of(array, out->strides) < 0
               ? -1
               : dlpack_type_of(PyArray_DESCR(array), &out->type);
}

/* ---- page-locked arrays ---- */

struct pinned_view {
    PyObject ob_base; /* as PyObject_HEAD */
    PyObject *array;  /* owned */
};

static PyArrayObject *
array_of(PyObject *object)
{
    return (PyArrayObject *)((struct pinned_view *)object)->array;
}

static int
view_describe(PyObject *object, struct dlpack_source *out)
{
    PyArrayObject *array = array_of(object);
    *out = (struct dlpack_source){.owner = (PyObject *)array,
                                  .is_read_only = !PyArray_ISWRITEABLE(array)};
    return dlpack_describe(array, out);
}

static PyObject *
view_dlpack(PyObject *object, PyTypeObject *type, PyObject *const *args,
            Py_ssize_t n_args, PyObject *names)
{
    static const struct dlpack_exporter exporter = {NULL, view_describe};
    return dlpack_call(PyType_GetModuleState(type), &exporter, object, args, n_args,
                       names);
}

static PyObject *
view_device(PyObject *Py_UNUSED(object), PyObject *Py_UNUSED(unused))
{
    return dlpack_device_of(NULL);
}

static void
view_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(array_of(object));
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef view_methods[] = {
    {"__dlpack__", (PyCFunction)(void (*)(void))view_dlpack,
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS,
     SIGNATURE_DOC("__dlpack__", "$self, ", DLPACK_TEXT, DLPACK_DOC)},
    {"__dlpack_device__", view_device, METH_NOARGS,
     PyDoc_STR("__dlpack_device__($self)\n--\n\n(3, 0): page-locked memory.")},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot view_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("What as_dlpack_pinned() returns.")},
    {Py_tp_dealloc, view_dealloc},
    {Py_tp_methods, view_methods},
    {0, NULL},
};

static PyType_Spec view_spec = {
    .name = "numpy_rmm._core._PinnedView",
    .basicsize = sizeof(struct pinned_view),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = view_slots,
};

int
dlpack_array_init(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &view_spec, NULL);
    module_state(module)->pinned_view_type = (PyTypeObject *)type;
    return type == NULL ? -1 : 0;
}

static int
check_pinned(PyObject *array)
{
    if (!PyArray_Check(array)) {
        PyErr_Format(PyExc_TypeError, "array must be a numpy.ndarray, not %.100s",
                     Py_TYPE(array)->tp_name);
        return -1;
    }
    const char *kind = array_info_kind(array);
    if (strcmp(kind, "pinned") != 0 && strcmp(kind, "registered") != 0) {
        PyErr_Format(PyExc_ValueError,
                     "the array has %s memory, which is not page-locked: make it under "
                     "numpy_rmm.pinned(), or pin() it",
                     kind);
        return -1;
    }
    return 0;
}

static PyObject *
as_dlpack_pinned(PyObject *module, PyObject *array)
{
    PyTypeObject *type = module_state(module)->pinned_view_type;
    if (errors_begin_call() < 0 || check_pinned(array) < 0) {
        return NULL;
    }
    struct pinned_view *self = (struct pinned_view *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->array = Py_NewRef(array);
    }
    return (PyObject *)self;
}

PyMethodDef dlpack_array_functions[] = {
    {"as_dlpack_pinned", as_dlpack_pinned, METH_O,
     PyDoc_STR(
         "as_dlpack_pinned($module, array, /)\n--\n\n"
         "A page-locked array as an object that shows it as such to DLPack.\n\n"
         "NumPy shows every array as ordinary memory of the host. JAX and cuda.core take\n"
         "this object as page-locked memory, without a copy; CuPy takes memory of a\n"
         "device only. What they take keeps the array alive.\n\n"
         "Parameters\n----------\n"
         "array : numpy.ndarray\n    Page-locked, as :func:`is_pinned` tells; also a\n"
         "    view. A read-only one is so for the consumer, too.\n\n"
         "Returns\n-------\n"
         "object\n    With ``__dlpack__`` and ``__dlpack_device__``, which says (3, 0).\n\n"
         "Raises\n------\n"
         "TypeError\n    For what is no array.\n"
         "ValueError\n    For other memory.\n\n"
         "Examples\n--------\n"
         ">>> import numpy_rmm\n"
         ">>> from numpy_rmm.testing import simulate_cuda\n"
         ">>> with simulate_cuda():  # in place of a GPU\n"
         "...     array = numpy_rmm.empty_pinned(10)\n"
         "...     numpy_rmm.as_dlpack_pinned(array).__dlpack_device__()\n"
         "(3, 0)\n")},
    {NULL, NULL, 0, NULL},
};
