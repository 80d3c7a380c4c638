/*
 * The C exchange of DLPack 1.3: a table of functions in a capsule, which libraries look
 * up in a type once and call from then on, without a Python object for what they are
 * handed.
 *
 * Nothing is waited for here, by the specification: the consumer asks for the stream
 * that our work runs on and submits its own there. That is the legacy default stream,
 * which our constants mean too; but a copy of ours that runs on another stream is put
 * before it. Memory that was made on another stream is the caller's to order, as with
 * everything submitted to it.
 */
#include "python/numpy_api.h"

#include "python/dlpack_exchange.h"

#include "python/c_api.h"
#include "python/device_array.h"
#include "python/dlpack_array.h"
#include "python/dlpack_import.h"
#include "python/errors.h"

static struct module_state *
state_for(PyObject *object, bool *out_is_array)
{
    struct module_state *state = c_api_state();
    if (state == NULL) {
        return NULL;
    }
    *out_is_array = PyObject_TypeCheck(object, state->device_array_type);
    if (!*out_is_array && !PyObject_TypeCheck(object, state->device_buffer_type)) {
        PyErr_Format(PyExc_TypeError, "%.100s is no DeviceArray and no DeviceBuffer",
                     Py_TYPE(object)->tp_name);
        return NULL;
    }
    return state;
}

static int
put_copy_before(struct module_state *state, struct device_buffer *buffer)
{
    if (!device_buffer_is_pending(buffer)) {
        return 0;
    }
    nrm_status status =
        device_memory_let_wait(&buffer->memory, NRM_STREAM_HANDLE_LEGACY);
    if (status != NRM_OK) {
        (void)errors_raise(state, status);
        return -1;
    }
    return 0;
}

/* ---- out of here ---- */

static int
from_object(void *object, struct dlpack_versioned **out)
{
    bool is_array;
    struct dlpack_source source;
    struct module_state *state = state_for(object, &is_array);
    if (state == NULL || (is_array ? device_array_describe(object, &source)
                                   : device_buffer_describe(object, &source)) < 0) {
        return -1;
    }
    PyObject *base = is_array ? device_array_from(object)->base : object;
    if (put_copy_before(state, device_buffer_from(base)) < 0) {
        return -1;
    }
    struct dlpack_versioned *tensor = dlpack_export_unordered(&source);
    if (tensor == NULL) {
        return -1;
    }
    *out = tensor;
    return 0;
}

_Static_assert(sizeof(npy_intp) == sizeof(int64_t) && sizeof(size_t) == sizeof(int64_t),
               "shapes are handed out as they are");

static int
borrow_array(struct device_array *self, struct dlpack_tensor *out)
{
    PyArrayObject *view = (PyArrayObject *)self->view;
    out->strides = device_array_item_strides(self);
    out->data = PyArray_SIZE(view) != 0 ? PyArray_DATA(view) : NULL;
    out->n_dims = PyArray_NDIM(view);
    out->shape = (int64_t *)PyArray_DIMS(view);
    return out->strides == NULL ? -1 : dlpack_type_of(PyArray_DESCR(view), &out->type);
}

static void
borrow_buffer(struct device_buffer *self, struct dlpack_tensor *out)
{
    static int64_t dense = 1;
    out->data = self->memory.ptr;
    out->n_dims = 1;
    out->type = (struct dlpack_type){.code = DLPACK_UINT, .bits = 8, .lanes = 1};
    out->shape = (int64_t *)&self->nbytes;
    out->strides = &dense;
}

static int
borrow(void *object, struct dlpack_tensor *out)
{
    bool is_array;
    struct module_state *state = state_for(object, &is_array);
    if (state == NULL) {
        return -1;
    }
    struct device_buffer *base = device_buffer_from(
        is_array ? device_array_from(object)->base : (PyObject *)object);
    if (put_copy_before(state, base) < 0) {
        return -1;
    }
    struct dlpack_tensor tensor = {0};
    dlpack_set_device(&base->memory, &tensor);
    if (!is_array) {
        borrow_buffer(base, &tensor);
    }
    else if (borrow_array(device_array_from(object), &tensor) < 0) {
        return -1;
    }
    *out = tensor;
    return 0;
}

static int
current_stream(int32_t Py_UNUSED(device_type), int32_t Py_UNUSED(device_id), void **out)
{
    *out = NULL;
    return 0;
}

/* ---- into here ---- */

static int
to_object(struct dlpack_versioned *tensor, void **out)
{
    struct module_state *state = c_api_state();
    if (state == NULL) {
        dlpack_drop(tensor);
        return -1;
    }
    PyObject *array = dlpack_import(state, tensor);
    if (array == NULL) {
        return -1;
    }
    *out = array;
    return 0;
}

/* ---- new ones ---- */

static PyObject *
make_like(struct module_state *state, const struct dlpack_tensor *like)
{
    PyObject *mr = dlpack_resource_for(state, like);
    PyArray_Descr *dtype = mr == NULL ? NULL : dlpack_dtype_of(like->type);
    PyObject *array = dtype == NULL
                          ? NULL
                          : device_array_of_shape(state, state->device_array_type,
                                                  like->n_dims,
                                                  (const Py_ssize_t *)like->shape,
                                                  (PyObject *)dtype, false, NULL, mr);
    Py_XDECREF(dtype);
    Py_XDECREF(mr);
    return array;
}

/* Hands the exception that is set to who has no interpreter. */
static void
tell(void *context,
     void (*set_error)(void *context, const char *kind, const char *message))
{
    PyObject *error = compat_take_error();
    PyObject *text = PyObject_Str(error);
    const char *message = text == NULL ? NULL : PyUnicode_AsUTF8(text);
    const char *name = Py_TYPE(error)->tp_name;
    const char *last = strrchr(name, '.');
    PyErr_Clear();
    set_error(context, last != NULL ? last + 1 : name,
              message != NULL ? message : "the memory cannot be had");
    Py_XDECREF(text);
    Py_DECREF(error);
}

/* The only one that may be called without the interpreter. */
static int
allocate(struct dlpack_tensor *like, struct dlpack_versioned **out, void *context,
         void (*set_error)(void *context, const char *kind, const char *message))
{
    PyGILState_STATE held = PyGILState_Ensure();
    struct module_state *state = c_api_state();
    PyObject *array = state == NULL ? NULL : make_like(state, like);
    int result = array == NULL ? -1 : from_object(array, out);
    Py_XDECREF(array);
    if (result < 0) {
        tell(context, set_error);
    }
    PyGILState_Release(held);
    return result;
}

/* ---- the table ---- */

static const struct dlpack_exchange exchange = {
    .version = {.major = 1, .minor = 3},
    .allocate = allocate,
    .from_object = from_object,
    .to_object = to_object,
    .borrow = borrow,
    .current_stream = current_stream,
};

int
dlpack_exchange_init(PyObject *module)
{
    struct module_state *state = module_state(module);
    PyTypeObject *types[] = {state->device_buffer_type, state->device_array_type};
    PyObject *capsule = PyCapsule_New((void *)&exchange, DLPACK_EXCHANGE_CAPSULE, NULL);
    int result = capsule == NULL ? -1 : 0;
    for (int i = 0; result == 0 && i < 2; i++) {
        /* immutable, but nobody has seen them yet */
        result =
            PyDict_SetItemString(types[i]->tp_dict, DLPACK_EXCHANGE_ATTRIBUTE, capsule);
        PyType_Modified(types[i]);
    }
    Py_XDECREF(capsule);
    return result;
}
