/*
 * A tensor of another library as a DeviceArray.
 *
 * Its memory is a resource of its own, which has it to give once: so it goes back, and the
 * library is told, by the ordinary way of a buffer, and a buffer over it knows its resource,
 * its stream and its device as every other. What else is asked of that resource, a copy of the
 * array or a larger buffer, is the current resource's to give.
 */
#include "python/numpy_api.h"

#include "python/dlpack_import.h"

#include "base/error.h"
#include "core/nodes.h"
#include "nrm/registry.h"
#include "nrm/sources.h"
#include "python/device_array.h"
#include "python/dlpack_array.h"
#include "python/errors.h"
#include "python/memory_resource.h"

/* ---- the resource ---- */

struct foreign {
    struct dlpack_versioned *tensor; /* owned; NULL: gone */
    void *data;
    nrm_resource *behind; /* owned: for everything else */
    bool is_given;
};

static nrm_status
foreign_allocate(void *context, size_t nbytes, size_t alignment, nrm_stream *stream,
                 void **out)
{
    struct foreign *self = context;
    if (self->is_given) {
        return nrm_resource_allocate(self->behind, nbytes, alignment, stream, out);
    }
    self->is_given = true;
    *out = self->data;
    return NRM_OK;
}

static void
delete_tensor(struct foreign *self)
{
    struct dlpack_versioned *tensor = self->tensor;
    self->tensor = NULL;
    if (tensor != NULL) {
        dlpack_drop(tensor);
    }
}

static nrm_status
foreign_deallocate(void *context, void *ptr, size_t nbytes, nrm_stream *stream)
{
    struct foreign *self = context;
    if (self->tensor == NULL || ptr != self->data) {
        return nrm_resource_deallocate(self->behind, ptr, nbytes, stream);
    }
    delete_tensor(self);
    return NRM_OK;
}

static void
foreign_destroy(void *context)
{
    struct foreign *self = context;
    delete_tensor(self);
    nrm_resource_release(self->behind);
    nrm__node_deallocate(self, sizeof *self);
}

static nrm_kind
kind_of(int32_t device_type)
{
    return device_type == DLPACK_PAGE_LOCKED ? NRM_KIND_PINNED
           : device_type == DLPACK_MANAGED   ? NRM_KIND_MANAGED
                                             : NRM_KIND_DEVICE;
}

/* Owns the tensor from success on. */
static nrm_status
make_resource(struct dlpack_versioned *tensor, nrm_resource **out)
{
    struct foreign *self = nrm__node_allocate(sizeof *self);
    if (self == NULL) {
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe a tensor");
    }
    self->tensor = tensor;
    self->data = (char *)tensor->tensor.data + tensor->tensor.byte_offset;
    nrm_callback_options options = NRM_OPTIONS(nrm_callback_options);
    options.kind = kind_of(tensor->tensor.device_type);
    options.allocate = foreign_allocate;
    options.deallocate = foreign_deallocate;
    options.destroy = foreign_destroy;
    options.context = self;
    options.calls_user_code = true; /* a deleter may */
    nrm_status status =
        nrm_get_per_device_resource(tensor->tensor.device_id, &self->behind);
    if (status == NRM_OK) {
        status = nrm_callback_create(&options, out);
    }
    if (status != NRM_OK) {
        nrm_resource_release(self->behind);
        nrm__node_deallocate(self, sizeof *self);
    }
    return status;
}

/* One that cannot be used: an error is set, and stays. */
static void
refuse(struct dlpack_versioned *tensor)
{
    PyObject *error = compat_take_error();
    dlpack_drop(tensor);
    compat_restore_error(error);
}

/* ---- its buffer ---- */

static PyObject *
make_buffer(struct module_state *state, PyObject *mr, size_t nbytes, int device)
{
    PyTypeObject *type = state->device_buffer_type;
    struct device_buffer *self = device_buffer_from(type->tp_alloc(type, 0));
    void *ptr;
    if (self == NULL || device_memory_init(state, &self->memory, NULL, mr) < 0) {
        Py_XDECREF(self);
        return NULL;
    }
    nrm_status status =
        nrm_resource_allocate(self->memory.mr, nbytes, 1, self->memory.stream, &ptr);
    if (status != NRM_OK) {
        Py_DECREF(self);
        return errors_raise(state, status);
    }
    self->memory.ptr = ptr;
    self->memory.nbytes = nbytes;
    self->memory.device = device;
    self->nbytes = nbytes;
    return (PyObject *)self;
}

static PyObject *
make_base(struct module_state *state, struct dlpack_versioned *tensor, size_t nbytes)
{
    nrm_resource *resource;
    bool is_shared = tensor->tensor.device_type != DLPACK_ON_DEVICE;
    int device = is_shared ? NRM_DEVICE_NONE : tensor->tensor.device_id;
    nrm_status status = make_resource(tensor, &resource);
    if (status != NRM_OK) {
        (void)errors_raise(state, status);
        refuse(tensor);
        return NULL;
    }
    PyObject *mr = memory_resource_wrap(state, resource);
    nrm_resource_release(resource);
    PyObject *base = mr == NULL ? NULL : make_buffer(state, mr, nbytes, device);
    Py_XDECREF(mr);
    return base;
}

/* ---- its shape ---- */

static int
check(const struct dlpack_versioned *tensor)
{
    const struct dlpack_tensor *place = &tensor->tensor;
    if (place->device_type != DLPACK_ON_DEVICE &&
        place->device_type != DLPACK_PAGE_LOCKED &&
        place->device_type != DLPACK_MANAGED) {
        PyErr_Format(PyExc_BufferError,
                     "memory of DLPack device (%d, %d) is none that a CUDA device can "
                     "use",
                     (int)place->device_type, (int)place->device_id);
        return -1;
    }
    if ((tensor->flags & DLPACK_IS_READ_ONLY) != 0) {
        PyErr_SetString(PyExc_BufferError, "a DeviceArray cannot be read-only");
        return -1;
    }
    if (place->n_dims > DLPACK_MAX_DIMS) {
        PyErr_Format(PyExc_BufferError, "%d dimensions are too many",
                     (int)place->n_dims);
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

/* The buffer of a tensor that came from here; NULL without an error: of one that did not. */
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

/* Steals the tensor. */
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
