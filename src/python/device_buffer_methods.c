/*
 * Attributes of DeviceBuffer, its size, and what it is for other libraries and pickle.
 */
#include "python/device_buffer.h"

#include "core/hooks.h"
#include "python/args.h"
#include "python/byte_copy.h"
#include "python/dlpack.h"
#include "python/errors.h"
#include "python/numba_argument.h"
#include "python/prefetch.h"
#include "python/signature.h"
#include "python/stream.h"

#define RESERVE_TEXT "new_capacity, stream=..."
#define RESIZE_TEXT "new_size, stream=..."

/* ---- attributes ---- */

static PyObject *
ptr_get(PyObject *object, void *Py_UNUSED(closure))
{
    return PyLong_FromVoidPtr(device_buffer_from(object)->memory.ptr);
}

static PyObject *
size_get(PyObject *object, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(device_buffer_from(object)->nbytes);
}

static PyObject *
capacity(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return PyLong_FromSize_t(device_buffer_from(object)->memory.nbytes);
}

static PyObject *
stream_attribute(PyObject *object, void *Py_UNUSED(closure))
{
    struct module_state *state = type_state(Py_TYPE(object));
    return state == NULL
               ? NULL
               : device_memory_stream(state, &device_buffer_from(object)->memory);
}

static PyObject *
mr_get(PyObject *object, void *Py_UNUSED(closure))
{
    return Py_NewRef(device_buffer_from(object)->memory.mr_object);
}

/* ---- for other libraries ---- */

static PyObject *
make_interface(struct module_state *state, struct device_buffer *self,
               const nrm_stream *stream)
{
    PyObject *shape = Py_BuildValue("(n)", (Py_ssize_t)self->nbytes);
    PyObject *dict = shape == NULL
                         ? NULL
                         : array_interface_make(self->memory.ptr, shape, NULL,
                                                state->byte_typestr, NULL, stream);
    Py_XDECREF(shape);
    return dict;
}

/* While a copy runs another one, which names the stream. */
static PyObject *
interface_get(PyObject *object, void *Py_UNUSED(closure))
{
    struct device_buffer *self = device_buffer_from(object);
    PyObject *kept = self->pending == NULL ? array_interface_again(&self->interface)
                                           : NULL;
    if (kept != NULL) {
        return kept;
    }
    struct module_state *state = type_state(Py_TYPE(object));
    if (state == NULL) {
        return NULL;
    }
    if (device_buffer_is_pending(self)) {
        return make_interface(state, self, self->memory.stream);
    }
    return array_interface_keep(&self->interface, make_interface(state, self, NULL));
}

int
device_buffer_describe(PyObject *object, struct dlpack_source *out)
{
    struct device_buffer *self = device_buffer_from(object);
    *out = (struct dlpack_source){
        .owner = object,
        .n_exports = &self->n_exports,
        .memory = &self->memory,
        .ptr = self->memory.ptr,
        .type = {.code = DLPACK_UINT, .bits = 8, .lanes = 1},
        .n_dims = 1,
        .shape = {(int64_t)self->nbytes},
        .strides = {1},
    };
    return 0;
}

static PyObject *
copy_for_dlpack(struct module_state *state, PyObject *object)
{
    return device_buffer_copy(state, device_buffer_from(object));
}

static PyObject *
dlpack(PyObject *object, PyTypeObject *type, PyObject *const *args, Py_ssize_t n_args,
       PyObject *names)
{
    static const struct dlpack_exporter exporter = {copy_for_dlpack,
                                                    device_buffer_describe};
    return dlpack_call(PyType_GetModuleState(type), &exporter, object, args, n_args,
                       names);
}

static PyObject *
dlpack_device(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return dlpack_device_of(&device_buffer_from(object)->memory);
}

/* ---- size ---- */

/* One thread at a time changes the size or the stream of a buffer. */
static int
begin_change(struct device_buffer *self)
{
    bool is_busy;
    COMPAT_BEGIN_CRITICAL_SECTION((PyObject *)self);
    is_busy = self->is_changing;
    self->is_changing = true;
    COMPAT_END_CRITICAL_SECTION();
    if (is_busy) {
        PyErr_SetString(PyExc_RuntimeError,
                        "another thread is about to change the size of this buffer");
        return -1;
    }
    return 0;
}

static int
check_exports(struct device_buffer *self)
{
    size_t n_exports = atomic_load(&self->n_exports);
    if (n_exports == 0) {
        return 0;
    }
    PyErr_Format(PyExc_BufferError,
                 "the buffer cannot move: %zu arrays and DLPack tensors stand for its "
                 "memory",
                 n_exports);
    return -1;
}

/* Other memory of the same resource, on the buffer's stream, behind what that was
   given. */
static int
move(struct module_state *state, struct device_buffer *self, size_t nbytes)
{
    struct device_memory other;
    device_memory_init_like(&other, &self->memory);
    if (device_memory_allocate(state, &other, nbytes) < 0) {
        device_memory_finish(&other);
        return -1;
    }
    struct byte_copy copy = {
        .dst = other.ptr,
        .src = self->memory.ptr,
        .nbytes = self->nbytes,
        .direction = NRM__WITHIN,
        .stream = self->memory.stream,
        .device = other.device,
        .dst_buffer = self, /* which will have it */
        .never_waits = true,
    };
    if (byte_copy_run(state, &copy) < 0) {
        device_memory_finish(&other);
        return -1;
    }
    struct device_memory old = self->memory;
    self->memory = other;
    device_buffer_has_memory(self);
    device_memory_finish(&old);
    return 0;
}

static int
change(struct module_state *state, struct device_buffer *self, size_t nbytes,
       nrm_stream *stream, PyObject *stream_object)
{
    bool moves = nbytes > self->memory.nbytes;
    if ((moves && check_exports(self) < 0) ||
        device_memory_set_stream(state, &self->memory, stream, stream_object) < 0) {
        return -1;
    }
    if (!moves) {
        return 0;
    }
    int result = move(state, self, nbytes);
    device_buffer_changed(self);
    return result;
}

/* Room for `nbytes`, on the stream of an argument, which is the buffer's from then
   on. */
static int
reserve_bytes(struct module_state *state, struct device_buffer *self, size_t nbytes,
              PyObject *stream_object)
{
    nrm_stream *stream = stream_get(state, stream_object);
    if (stream == NULL) {
        return -1;
    }
    PyObject *kept = stream_object != NULL ? stream_object : state->default_stream;
    int result = begin_change(self);
    if (result == 0) {
        result = change(state, self, nbytes, stream, kept);
        self->is_changing = false;
    }
    nrm_stream_release(stream);
    return result;
}

static PyObject *
reserve(PyObject *object, PyTypeObject *type, PyObject *const *args, Py_ssize_t n_args,
        PyObject *names)
{
    static struct signature signature = SIGNATURE("reserve", RESERVE_TEXT);
    PyObject *values[2];
    size_t nbytes;
    if (errors_begin_call() < 0 ||
        signature_bind(&signature, args, n_args, names, values) < 0 ||
        arg_nbytes(values[0], "new_capacity", &nbytes) < 0 ||
        reserve_bytes(PyType_GetModuleState(type), device_buffer_from(object), nbytes,
                      values[1]) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
resize(PyObject *object, PyTypeObject *type, PyObject *const *args, Py_ssize_t n_args,
       PyObject *names)
{
    static struct signature signature = SIGNATURE("resize", RESIZE_TEXT);
    struct device_buffer *self = device_buffer_from(object);
    PyObject *values[2];
    size_t nbytes;
    if (errors_begin_call() < 0 ||
        signature_bind(&signature, args, n_args, names, values) < 0 ||
        arg_nbytes(values[0], "new_size", &nbytes) < 0 ||
        reserve_bytes(PyType_GetModuleState(type), self, nbytes, values[1]) < 0) {
        return NULL;
    }
    self->nbytes = nbytes;
    device_buffer_changed(self);
    Py_RETURN_NONE;
}

static PyObject *
prefetch(PyObject *object, PyTypeObject *type, PyObject *const *args, Py_ssize_t n_args,
         PyObject *names)
{
    struct device_buffer *self = device_buffer_from(object);
    return prefetch_method(PyType_GetModuleState(type), &self->memory, self->memory.ptr,
                           self->nbytes, args, n_args, names);
}

/* ---- pickle ---- */

/* The bytes out of band where the protocol can do that. */
static PyObject *
reduce_ex(PyObject *object, PyObject *protocol)
{
    struct module_state *state = type_state(Py_TYPE(object));
    long version = PyLong_AsLong(protocol);
    if (state == NULL || (version == -1 && PyErr_Occurred()) ||
        errors_begin_call() < 0) {
        return NULL;
    }
    PyObject *host = device_buffer_to_array(state, device_buffer_from(object), NULL);
    PyObject *bytes = host == NULL   ? NULL
                      : version >= 5 ? PyPickleBuffer_FromObject(host)
                                     : PyBytes_FromObject(host);
    PyObject *rebuild = PyObject_GetAttrString(
        PyType_GetModule(state->device_buffer_type), "_rebuild_device_buffer");
    PyObject *own = PyObject_CallMethod(object, "__getstate__", NULL);
    Py_XDECREF(host);
    if (bytes == NULL || rebuild == NULL || own == NULL) {
        Py_XDECREF(bytes);
        Py_XDECREF(rebuild);
        Py_XDECREF(own);
        return NULL;
    }
    return Py_BuildValue("N(ON)N", rebuild, (PyObject *)Py_TYPE(object), bytes, own);
}

static PyObject *
rebuild_device_buffer(PyObject *module, PyObject *args)
{
    struct module_state *state = module_state(module);
    PyObject *type, *host;
    if (!PyArg_ParseTuple(args, "O!O:_rebuild_device_buffer", &PyType_Type, &type,
                          &host) ||
        errors_begin_call() < 0) {
        return NULL;
    }
    if (!PyType_IsSubtype((PyTypeObject *)type, state->device_buffer_type)) {
        PyErr_Format(PyExc_TypeError, "%R is no DeviceBuffer", type);
        return NULL;
    }
    return device_buffer_of_host(state, (PyTypeObject *)type, host, NULL, NULL);
}

PyMethodDef device_buffer_functions[] = {
    {"_rebuild_device_buffer", rebuild_device_buffer, METH_VARARGS,
     PyDoc_STR("_rebuild_device_buffer($module, type, host, /)\n--\n\n"
               "What a pickled DeviceBuffer becomes.")},
    {NULL, NULL, 0, NULL},
};

/* ---- the tables ---- */

#define METHOD(name)                                                                   \
    (PyCFunction)(void (*)(void)) name, METH_METHOD | METH_FASTCALL | METH_KEYWORDS

PyMethodDef device_buffer_methods[] = {
    {"capacity", capacity, METH_NOARGS,
     PyDoc_STR("capacity($self)\n--\n\nBytes that it may have without moving.")},
    {"reserve", METHOD(reserve),
     SIGNATURE_DOC(
         "reserve", "$self, ", RESERVE_TEXT,
         "Get room for a number of bytes; the content stays.\n\n"
         "Parameters\n----------\n"
         "new_capacity : int or str\n    Bytes; fewer than there are change\n"
         "    nothing.\n"
         "stream : Stream\n    The buffer's from now on, behind what the old one\n"
         "    has been given. Nothing is waited for.\n\n"
         "Raises\n------\n"
         "OutOfMemoryError\n    When the memory cannot be had; the buffer is as\n"
         "    it was.\n"
         "BufferError\n    When it would have to move while DLPack tensors stand\n"
         "    for its memory.\n")},
    {"resize", METHOD(resize),
     SIGNATURE_DOC("resize", "$self, ", RESIZE_TEXT,
                   "Change the size: as much of the content stays as fits.\n\n"
                   "What is added has unknown content. Less room is never taken: a\n"
                   "smaller buffer keeps its capacity.\n\n"
                   "Parameters\n----------\n"
                   "new_size : int or str\n    Bytes.\n"
                   "stream : Stream\n    As of :meth:`reserve`.\n\n"
                   "Raises\n------\n"
                   "OutOfMemoryError, BufferError\n    As :meth:`reserve`.\n")},
    {"prefetch", METHOD(prefetch),
     SIGNATURE_DOC(
         "prefetch", "$self, ", PREFETCH_TEXT,
         "Move managed memory to a device, or to the host, in the order of a\n"
         "stream; without effect on other memory.\n\n"
         "Parameters\n----------\n"
         "device : int, optional\n    Ordinal; -1: the host. None: that of the\n"
         "    buffer.\n"
         "stream : Stream, optional\n    None: that of the buffer.\n")},
    {"__dlpack__", METHOD(dlpack),
     SIGNATURE_DOC("__dlpack__", "$self, ", DLPACK_TEXT, DLPACK_DOC)},
    {"__dlpack_device__", dlpack_device, METH_NOARGS,
     PyDoc_STR(
         "__dlpack_device__($self)\n--\n\n"
         "(type, ordinal) as DLPack counts: 2 for memory of a device and managed\n"
         "memory, 3 for page-locked memory of the host.")},
    {"__reduce_ex__", reduce_ex, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

PyGetSetDef device_buffer_getset[] = {
    {"ptr", ptr_get, NULL, PyDoc_STR("The address, an int; 0: no bytes."), NULL},
    {"size", size_get, NULL, PyDoc_STR("Bytes."), NULL},
    {"nbytes", size_get, NULL, PyDoc_STR("Bytes."), NULL},
    {"stream", stream_attribute, NULL,
     PyDoc_STR("The Stream that the memory belongs to, and goes back behind."), NULL},
    {"mr", mr_get, NULL, PyDoc_STR("The MemoryResource that the memory is of."), NULL},
    {"__cuda_array_interface__", interface_get, NULL,
     PyDoc_STR(
         "Version 3, of unsigned bytes: a dict of the caller's own. ``stream`` is\n"
         "None unless a copy of ours runs."),
     NULL},
    {"_numba_type_", numba_type_of_buffer, NULL,
     PyDoc_STR("The type of an array of bytes, where Numba is loaded."), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
