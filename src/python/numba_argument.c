/*
 * Arrays as arguments of Numba's kernels.
 *
 * Numba asks each argument for its type at each launch, so the answer is kept. What it
 * then reads of an argument (numpy_rmm/_numba.py sees to it that it reads it of ours as
 * they are) is made of no more than the view: no export, no event, no other object.
 * Only a copy of ours that still runs is put before the launch.
 */
#include "python/numpy_api.h"

#include "python/numba_argument.h"

#include "python/args.h"
#include "python/device_array.h"
#include "python/errors.h"
#include "python/foreign_stream.h"
#include "python/signature.h"

/* C before F; a broadcast axis has a stride that neither of them tells. */
static char
layout_of(PyArrayObject *view)
{
    for (int i = 0; i < PyArray_NDIM(view); i++) {
        if (PyArray_STRIDE(view, i) == 0 && PyArray_DIM(view, i) > 1) {
            return 'A';
        }
    }
    return PyArray_IS_C_CONTIGUOUS(view)   ? 'C'
           : PyArray_IS_F_CONTIGUOUS(view) ? 'F'
                                           : 'A';
}

static PyObject *
find_type(PyObject *dtype, int n_dims, char layout)
{
    PyObject *module = PyImport_ImportModule("numpy_rmm._numba");
    PyObject *type = module == NULL ? NULL
                                    : PyObject_CallMethod(module, "array_type", "OiC",
                                                          dtype, n_dims, layout);
    Py_XDECREF(module);
    return type;
}

PyObject *
numba_type_of_array(PyObject *object, void *Py_UNUSED(closure))
{
    struct device_array *self = device_array_from(object);
    PyArrayObject *view = (PyArrayObject *)self->view;
    PyObject *type = atomic_load(&self->numba_type);
    if (type == NULL) {
        PyObject *found = find_type((PyObject *)PyArray_DESCR(view), PyArray_NDIM(view),
                                    layout_of(view));
        if (found == NULL) {
            return NULL;
        }
        if (!atomic_compare_exchange_strong(&self->numba_type, &type, found)) {
            Py_DECREF(found); /* another thread's is the same one */
        }
        else {
            type = found;
        }
    }
    return Py_NewRef(type);
}

PyObject *
numba_type_of_buffer(PyObject *Py_UNUSED(object), void *Py_UNUSED(closure))
{
    PyArray_Descr *dtype = PyArray_DescrFromType(NPY_UINT8);
    PyObject *type = find_type((PyObject *)dtype, 1, 'C');
    Py_DECREF(dtype);
    return type;
}

static int
read_stream(struct module_state *state, PyObject *stream, uintptr_t *out)
{
    if (PyIndex_Check(stream)) {
        return arg_address(stream, "stream", out);
    }
    return foreign_stream_handle(state, stream, "stream must be a handle or a stream",
                                 out);
}

PyObject *
numba_argument(PyObject *object, PyTypeObject *type, PyObject *const *args,
               Py_ssize_t n_args, PyObject *names)
{
    static struct signature signature = SIGNATURE("to_device", NUMBA_ARGUMENT_TEXT);
    struct module_state *state = PyType_GetModuleState(type);
    struct device_buffer *base = device_buffer_from(device_array_from(object)->base);
    PyObject *values[2];
    uintptr_t handle = NRM_STREAM_HANDLE_LEGACY;
    if (!device_buffer_is_pending(base)) {
        return Py_NewRef(object);
    }
    if (signature_bind(&signature, args, n_args, names, values) < 0 ||
        (values[1] != NULL && read_stream(state, values[1], &handle) < 0)) {
        return NULL;
    }
    nrm_status status = device_memory_let_wait(&base->memory, handle);
    return status == NRM_OK ? Py_NewRef(object) : errors_raise(state, status);
}

PyObject *
numba_layout(PyObject *object, void *Py_UNUSED(closure))
{
    return Py_NewRef(object);
}
