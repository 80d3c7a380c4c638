/*
 * Methods of DeviceBuffer that copy: arguments in, one byte copy, a result out.
 */
#include "python/byte_copy.h"
#include "python/errors.h"
#include "python/numpy_api.h"
#include "python/signature.h"
#include "python/stream.h"

#define TO_DEVICE_TEXT "b, stream=..., mr=None"
#define TO_HOST_TEXT "ary=None, stream=..."
#define FROM_HOST_TEXT "ary, stream=..."
#define FROM_DEVICE_TEXT "cuda_ary, stream=..."
#define TOBYTES_TEXT "stream=..."

/* Runs a copy on the stream of an argument. */
static int
run_on(struct module_state *state, struct byte_copy *copy, PyObject *stream)
{
    copy->stream = stream_get(state, stream);
    if (copy->stream == NULL) {
        return -1;
    }
    int result = byte_copy_run(state, copy);
    nrm_stream_release(copy->stream);
    return result;
}

/* ---- with the host ---- */

static int
fill(struct module_state *state, struct device_buffer *self, const Py_buffer *host,
     PyObject *stream)
{
    struct byte_copy copy = {
        .dst = self->memory.ptr,
        .src = host->buf,
        .nbytes = (size_t)host->len,
        .direction = NRM__TO_DEVICE,
        .device = self->memory.device,
        .dst_buffer = self,
    };
    return run_on(state, &copy, stream);
}

static int
fetch(struct module_state *state, struct device_buffer *self, void *target,
      PyObject *stream)
{
    struct byte_copy copy = {
        .dst = target,
        .src = self->memory.ptr,
        .nbytes = self->nbytes,
        .direction = NRM__TO_HOST,
        .device = self->memory.device,
        .src_buffer = self,
    };
    return run_on(state, &copy, stream);
}

PyObject *
device_buffer_of_host(struct module_state *state, PyTypeObject *type, PyObject *host,
                      PyObject *stream, PyObject *mr)
{
    Py_buffer view;
    if (byte_copy_host(host, "b", 0, &view) < 0) {
        return NULL;
    }
    PyObject *self = device_buffer_make(state, type, (size_t)view.len, stream, mr);
    if (self != NULL && fill(state, device_buffer_from(self), &view, stream) < 0) {
        Py_CLEAR(self);
    }
    PyBuffer_Release(&view);
    return self;
}

/* A static method has no class; that of an argument would be the caller's. */
static PyObject *
to_device(PyObject *type, PyObject *const *args, Py_ssize_t n_args, PyObject *names)
{
    static struct signature signature = SIGNATURE("to_device", TO_DEVICE_TEXT);
    struct module_state *state = type_state((PyTypeObject *)type);
    PyObject *values[3];
    if (state == NULL || errors_begin_call() < 0 ||
        signature_bind(&signature, args, n_args, names, values) < 0) {
        return NULL;
    }
    return device_buffer_of_host(state, state->device_buffer_type, values[0], values[1],
                                 values[2]);
}

PyObject *
device_buffer_to_array(struct module_state *state, struct device_buffer *self,
                       PyObject *stream)
{
    npy_intp length = (npy_intp)self->nbytes;
    PyObject *array = PyArray_SimpleNew(1, &length, NPY_UINT8);
    if (array != NULL &&
        fetch(state, self, PyArray_DATA((PyArrayObject *)array), stream) < 0) {
        Py_CLEAR(array);
    }
    return array;
}

static PyObject *
copy_to_host(PyObject *object, PyTypeObject *type, PyObject *const *args,
             Py_ssize_t n_args, PyObject *names)
{
    static struct signature signature = SIGNATURE("copy_to_host", TO_HOST_TEXT);
    struct module_state *state = PyType_GetModuleState(type);
    struct device_buffer *self = device_buffer_from(object);
    PyObject *values[2];
    Py_buffer host;
    if (errors_begin_call() < 0 ||
        signature_bind(&signature, args, n_args, names, values) < 0) {
        return NULL;
    }
    if (values[0] == NULL || values[0] == Py_None) {
        return device_buffer_to_array(state, self, values[1]);
    }
    if (byte_copy_host(values[0], "ary", PyBUF_WRITABLE, &host) < 0) {
        return NULL;
    }
    int result =
        byte_copy_check_room("the buffer", self->nbytes, "ary", (size_t)host.len);
    if (result == 0) {
        result = fetch(state, self, host.buf, values[1]);
    }
    PyBuffer_Release(&host);
    return result < 0 ? NULL : Py_NewRef(values[0]);
}

static PyObject *
copy_from_host(PyObject *object, PyTypeObject *type, PyObject *const *args,
               Py_ssize_t n_args, PyObject *names)
{
    static struct signature signature = SIGNATURE("copy_from_host", FROM_HOST_TEXT);
    struct module_state *state = PyType_GetModuleState(type);
    struct device_buffer *self = device_buffer_from(object);
    PyObject *values[2];
    Py_buffer host;
    if (errors_begin_call() < 0 ||
        signature_bind(&signature, args, n_args, names, values) < 0 ||
        byte_copy_host(values[0], "ary", 0, &host) < 0) {
        return NULL;
    }
    int result =
        byte_copy_check_room("ary", (size_t)host.len, "the buffer", self->nbytes);
    if (result == 0) {
        result = fill(state, self, &host, values[1]);
    }
    PyBuffer_Release(&host);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
bytes_of(struct module_state *state, struct device_buffer *self, PyObject *stream)
{
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)self->nbytes);
    if (bytes != NULL && fetch(state, self, PyBytes_AS_STRING(bytes), stream) < 0) {
        Py_CLEAR(bytes);
    }
    return bytes;
}

static PyObject *
tobytes(PyObject *object, PyTypeObject *type, PyObject *const *args, Py_ssize_t n_args,
        PyObject *names)
{
    static struct signature signature = SIGNATURE("tobytes", TOBYTES_TEXT);
    PyObject *values[1];
    if (errors_begin_call() < 0 ||
        signature_bind(&signature, args, n_args, names, values) < 0) {
        return NULL;
    }
    return bytes_of(PyType_GetModuleState(type), device_buffer_from(object), values[0]);
}

static PyObject *
to_bytes_protocol(PyObject *object, PyObject *Py_UNUSED(unused))
{
    struct module_state *state = type_state(Py_TYPE(object));
    return state == NULL || errors_begin_call() < 0
               ? NULL
               : bytes_of(state, device_buffer_from(object), NULL);
}

/* ---- within a device ---- */

static PyObject *
copy_from_device(PyObject *object, PyTypeObject *type, PyObject *const *args,
                 Py_ssize_t n_args, PyObject *names)
{
    static struct signature signature = SIGNATURE("copy_from_device", FROM_DEVICE_TEXT);
    struct module_state *state = PyType_GetModuleState(type);
    struct device_buffer *self = device_buffer_from(object);
    struct array_bytes source;
    PyObject *values[2];
    if (errors_begin_call() < 0 ||
        signature_bind(&signature, args, n_args, names, values) < 0 ||
        array_interface_read(values[0], "cuda_ary", &source) < 0 ||
        byte_copy_check_room("cuda_ary", source.nbytes, "the buffer", self->nbytes) <
            0) {
        return NULL;
    }
    bool is_ours = PyObject_TypeCheck(values[0], state->device_buffer_type);
    struct byte_copy copy = {
        .dst = self->memory.ptr,
        .src = source.ptr,
        .nbytes = source.ptr == self->memory.ptr ? 0 : source.nbytes,
        .direction = NRM__WITHIN,
        .device = self->memory.device,
        .dst_buffer = self,
        .src_buffer = is_ours ? device_buffer_from(values[0]) : NULL,
        .src_object = is_ours ? NULL : values[0],
        .producer = is_ours ? 0 : source.producer,
    };
    return run_on(state, &copy, values[1]) < 0 ? NULL : Py_NewRef(Py_None);
}

PyObject *
device_buffer_copy(struct module_state *state, struct device_buffer *self)
{
    PyObject *object = device_buffer_make_like(state, self, self->nbytes);
    if (object == NULL) {
        return NULL;
    }
    struct device_buffer *other = device_buffer_from(object);
    struct byte_copy copy = {
        .dst = other->memory.ptr,
        .src = self->memory.ptr,
        .nbytes = self->nbytes,
        .direction = NRM__WITHIN,
        .stream = self->memory.stream,
        .device = self->memory.device,
        .dst_buffer = other,
        .src_buffer = self,
    };
    if (byte_copy_run(state, &copy) < 0) {
        Py_CLEAR(object);
    }
    return object;
}

static PyObject *
copy(PyObject *object, PyObject *Py_UNUSED(unused))
{
    struct module_state *state = type_state(Py_TYPE(object));
    return state == NULL || errors_begin_call() < 0
               ? NULL
               : device_buffer_copy(state, device_buffer_from(object));
}

/* ---- the table ---- */

#define METHOD(name)                                                                   \
    (PyCFunction)(void (*)(void)) name, METH_METHOD | METH_FASTCALL | METH_KEYWORDS

#define STREAM_DOC                                                                      \
    "stream : Stream\n    On which the copy is made, after what the buffer's own has\n" \
    "    been given.\n"

PyMethodDef device_buffer_copy_methods[] = {
    {"to_device", (PyCFunction)(void (*)(void))to_device,
     METH_CLASS | METH_FASTCALL | METH_KEYWORDS,
     SIGNATURE_DOC(
         "to_device", "$type, ", TO_DEVICE_TEXT,
         "A new buffer with the bytes of host memory.\n\n"
         "Parameters\n----------\n"
         "b : buffer\n    One-dimensional, contiguous, of items of 1 B.\n"
         "stream : Stream\n    Of the buffer, and of the copy, which is waited\n"
         "    for.\n"
         "mr : MemoryResource, optional\n    None: the current one.\n\n"
         "Returns\n-------\nDeviceBuffer\n\n"
         "Raises\n------\n"
         "ValueError\n    For an array of other items, dimensions or strides.\n"
         "OutOfMemoryError\n    When the memory cannot be had.\n")},
    {"copy_to_host", METHOD(copy_to_host),
     SIGNATURE_DOC(
         "copy_to_host", "$self, ", TO_HOST_TEXT,
         "Copy the bytes to the host, and wait.\n\n"
         "Parameters\n----------\n"
         "ary : buffer, optional\n    Writable, one-dimensional, of items of\n"
         "    1 B; as large as the buffer, or larger. None: a new array of the\n"
         "    current handler's memory.\n" STREAM_DOC "\n"
         "Returns\n-------\nnumpy.ndarray or `ary`\n\n"
         "Raises\n------\n"
         "ValueError\n    When ary is too small.\n")},
    {"copy_from_host", METHOD(copy_from_host),
     SIGNATURE_DOC(
         "copy_from_host", "$self, ", FROM_HOST_TEXT,
         "Copy host memory to the beginning of the buffer, and wait.\n\n"
         "Parameters\n----------\n"
         "ary : buffer\n    One-dimensional, contiguous, of items of 1 B.\n" STREAM_DOC
         "\n"
         "Raises\n------\n"
         "ValueError\n    When ary is larger than the buffer.\n")},
    {"copy_from_device", METHOD(copy_from_device),
     SIGNATURE_DOC(
         "copy_from_device", "$self, ", FROM_DEVICE_TEXT,
         "Copy memory of a device to the beginning of the buffer.\n\n"
         "It is waited for on DEFAULT_STREAM. On others it is not: both ends\n"
         "may be dropped meanwhile, and the streams of both, if they are\n"
         "buffers, wait for it.\n\n"
         "Parameters\n----------\n"
         "cuda_ary : object with ``__cuda_array_interface__``\n"
         "    C-contiguous.\n" STREAM_DOC "\n"
         "Raises\n------\n"
         "TypeError\n    When there is no such interface.\n"
         "ValueError\n    When it is larger than the buffer, or has strides.\n")},
    {"copy", copy, METH_NOARGS,
     PyDoc_STR("copy($self)\n--\n\n"
               "A buffer with the same bytes, resource and stream.\n\n"
               "The copy is waited for on DEFAULT_STREAM, and only there.")},
    {"__copy__", copy, METH_NOARGS, NULL},
    {"__deepcopy__", copy, METH_O, NULL},
    {"tobytes", METHOD(tobytes),
     SIGNATURE_DOC("tobytes", "$self, ", TOBYTES_TEXT,
                   "The bytes.\n\n"
                   "Parameters\n----------\n" STREAM_DOC "\n"
                   "Returns\n-------\nbytes\n")},
    {"__bytes__", to_bytes_protocol, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
