/*
 * A tensor of another library as a DeviceArray.
 *
 * A buffer over its memory keeps the tensor, and lets go of it in place of giving the
 * memory back. Nothing of it is in the block map: another tensor may stand for the same
 * memory, and it may be ours in the end. What else is asked of the buffer, a copy or
 * more room, is of the resource that new memory of its kind would be of.
 */
#include "python/numpy_api.h"

#include "python/dlpack_import.h"

#include "base/error.h"
#include "nrm/registry.h"
#include "nrm/sources.h"
#include "python/device_array.h"
#include "python/dlpack_array.h"
#include "python/errors.h"
#include "python/memory_resource.h"

/* One that cannot be used: an error is set, and stays. */
static void
refuse(struct dlpack_versioned *tensor)
{
    PyObject *error = compat_take_error();
    dlpack_drop(tensor);
    compat_restore_error(error);
}

/* ---- its buffer ---- */

static nrm_status
find_resource(const struct dlpack_tensor *like, nrm_resource **out)
{
    nrm_device_options options = NRM_OPTIONS(nrm_device_options);
    switch (like->device_type) {
    case DLPACK_PAGE_LOCKED:
        return nrm_registry_get("pinned", out);
    case DLPACK_MANAGED:
        return nrm_registry_get("managed", out);
    default:
        break;
    }
    NRM_TRY(nrm_get_per_device_resource(like->device_id, out));
    if (nrm_resource_kind(*out) == NRM_KIND_DEVICE) {
        return NRM_OK;
    }
    nrm_resource_release(
        *out); /* it would be shown as another kind than was asked for */
    options.set_device = true;
    options.device = like->device_id;
    return nrm_device_create(&options, out);
}

PyObject *
dlpack_resource_for(struct module_state *state, const struct dlpack_tensor *like)
{
    nrm_resource *mr;
    if (like->device_type != DLPACK_ON_DEVICE &&
        like->device_type != DLPACK_PAGE_LOCKED &&
        like->device_type != DLPACK_MANAGED) {
        PyErr_Format(PyExc_BufferError,
                     "memory of DLPack device (%d, %d) is none that a CUDA device can "
                     "use",
                     (int)like->device_type, (int)like->device_id);
        return NULL;
    }
    nrm_status status = find_resource(like, &mr);
    if (status != NRM_OK) {
        return errors_raise(state, status);
    }
    PyObject *object = memory_resource_wrap(state, mr);
    nrm_resource_release(mr);
    return object;
}

/* Owns the tensor from success on. */
static PyObject *
make_base(struct module_state *state, struct dlpack_versioned *tensor, size_t nbytes)
{
    const struct dlpack_tensor *place = &tensor->tensor;
    PyTypeObject *type = state->device_buffer_type;
    PyObject *mr = dlpack_resource_for(state, place);
    struct device_buffer *self =
        mr == NULL ? NULL : device_buffer_from(type->tp_alloc(type, 0));
    if (self != NULL && device_memory_init(state, &self->memory, NULL, mr) < 0) {
        Py_CLEAR(self);
    }
    Py_XDECREF(mr);
    if (self == NULL) {
        return NULL;
    }
    bool is_on_device = place->device_type == DLPACK_ON_DEVICE;
    self->memory.device = is_on_device ? place->device_id : NRM_DEVICE_NONE;
    if (nbytes == 0) {
        dlpack_drop(tensor); /* there is nothing to keep */
        device_buffer_has_memory(self);
        return (PyObject *)self;
    }
    self->memory.ptr = (char *)place->data + place->byte_offset;
    self->memory.nbytes = nbytes;
    self->memory.tensor = tensor;
    self->nbytes = nbytes;
    device_buffer_has_memory(self);
    return (PyObject *)self;
}

/* ---- its shape ---- */

static int
check(const struct dlpack_versioned *tensor)
{
    if ((tensor->flags & DLPACK_IS_READ_ONLY) != 0) {
        PyErr_SetString(PyExc_BufferError, "a DeviceArray cannot be read-only");
        return -1;
    }
    if (tensor->tensor.n_dims > DLPACK_MAX_DIMS) {
        PyErr_Format(PyExc_BufferError, "%d dimensions are too many",
                     (int)tensor->tensor.n_dims);
        return -1;
    }
    return 0;
}

/* The bytes from the first element to the end of the last; -1 with an error set. */
static int
measure(const struct dlpack_tensor *tensor, npy_intp itemsize, npy_intp *shape,
        npy_intp *strides, size_t *out_nbytes)
{
    size_t dense = (size_t)itemsize, nbytes = dense;
    for (int i = tensor->n_dims - 1; i >= 0; i--) {
        int64_t stride = tensor->strides != NULL ? tensor->strides[i]
                                                 : (int64_t)(dense / (size_t)itemsize);
        if (tensor->shape[i] < 0 || stride < 0) {
            PyErr_SetString(
                PyExc_BufferError,
                "a tensor of negative lengths or strides is no DeviceArray");
            return -1;
        }
        shape[i] = (npy_intp)tensor->shape[i];
        strides[i] = (npy_intp)stride * itemsize;
        nbytes = shape[i] == 0 || nbytes == 0
                     ? 0
                     : nbytes + (size_t)(shape[i] - 1) * (size_t)strides[i];
        dense *= (size_t)(shape[i] != 0 ? shape[i] : 1);
    }
    *out_nbytes = nbytes;
    return 0;
}

static PyObject *
make_view(PyArray_Descr *dtype, int n_dims, npy_intp *shape, npy_intp *strides,
          char *data)
{
    static char nothing;
    Py_INCREF(dtype);
    return PyArray_NewFromDescr(&PyArray_Type, dtype, n_dims, shape, strides,
                                data != NULL ? data : &nothing, NPY_ARRAY_WRITEABLE,
                                NULL);
}

/* The buffer of a tensor that came from here; NULL without an error: of one that did
   not. */
static PyObject *
find_own_base(struct module_state *state, const struct dlpack_versioned *tensor)
{
    PyObject *owner = dlpack_owner_of(tensor);
    PyObject *base = owner;
    if (owner != NULL && PyObject_TypeCheck(owner, state->device_array_type)) {
        base = device_array_from(owner)->base;
    }
    bool is_buffer = base != NULL &&
                     PyObject_TypeCheck(base, state->device_buffer_type);
    base = is_buffer ? Py_NewRef(base) : NULL;
    Py_XDECREF(owner);
    return base;
}

/* Owns the tensor from success on. */
static PyObject *
find_base(struct module_state *state, struct dlpack_versioned *tensor, size_t nbytes)
{
    PyObject *base = find_own_base(state, tensor);
    if (base == NULL) {
        return make_base(state, tensor, nbytes);
    }
    dlpack_drop(tensor);
    return base;
}

static PyObject *
import_as(struct module_state *state, struct dlpack_versioned *tensor,
          PyArray_Descr *dtype)
{
    npy_intp shape[DLPACK_MAX_DIMS], strides[DLPACK_MAX_DIMS];
    size_t nbytes;
    char *data = (char *)tensor->tensor.data + tensor->tensor.byte_offset;
    int n_dims = tensor->tensor.n_dims;
    if (measure(&tensor->tensor, PyDataType_ELSIZE(dtype), shape, strides, &nbytes) <
        0) {
        refuse(tensor);
        return NULL;
    }
    PyObject *view =
        make_view(dtype, n_dims, shape, strides, nbytes != 0 ? data : NULL);
    if (view == NULL) {
        refuse(tensor);
        return NULL;
    }
    PyObject *base = find_base(state, tensor, nbytes);
    if (base == NULL) {
        Py_DECREF(view);
        refuse(tensor);
        return NULL;
    }
    return device_array_over(state, view, base);
}

PyObject *
dlpack_import(struct module_state *state, struct dlpack_versioned *tensor)
{
    PyArray_Descr *dtype = NULL;
    if (tensor->version.major != DLPACK_MAJOR) {
        PyErr_Format(PyExc_BufferError, "a tensor of DLPack %u cannot be read here",
                     (unsigned)tensor->version.major);
    }
    else if (check(tensor) == 0) {
        dtype = dlpack_dtype_of(tensor->tensor.type);
    }
    if (dtype == NULL) {
        refuse(tensor);
        return NULL;
    }
    PyObject *array = import_as(state, tensor, dtype);
    Py_DECREF(dtype);
    return array;
}
