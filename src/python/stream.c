/*
 * Stream: a stream of our own, or a handle and what keeps the stream behind it alive.
 *
 * A handle means nothing once its stream is destroyed: the driver gives it to the next
 * one. So a Stream made from another library's object holds that object. The handle of
 * the per-thread default stream means another stream in each thread: Stream(2) belongs
 * to the thread that makes it, while the constant means the thread that uses it.
 *
 * That object may lead back to the Stream, or to memory that is used in its order. Such
 * a circle the garbage collector does not see: it would end the object, and with it the
 * stream, before the memory that is given back on it.
 */
#include "python/stream_object.h"

#include <string.h>

#include "core/stream.h"
#include "python/args.h"
#include "python/errors.h"
#include "python/event.h"
#include "python/foreign_stream.h"
#include "python/pending.h"
#include "python/signature.h"

#define STREAM_TEXT "obj=None, flags=None"
#define RECORD_TEXT "event=None"

/* ---- the type ---- */

/* The memory of one that died, as of buffers (python/device_buffer.c), or new. */
static struct stream_object *
make_empty(struct module_state *state)
{
    PyTypeObject *type = state->stream_type;
#ifndef Py_GIL_DISABLED
    if (state->spare_streams.n > 0) {
        PyObject *object = state->spare_streams.objects[--state->spare_streams.n];
        memset((char *)object + sizeof(PyObject), 0,
               sizeof(struct stream_object) - sizeof(PyObject));
        return (struct stream_object *)PyObject_Init(object, type);
    }
#endif
    return (struct stream_object *)type->tp_alloc(type, 0);
}

static void
unmake(PyTypeObject *type, PyObject *object)
{
#ifndef Py_GIL_DISABLED
    struct module_state *state = PyType_GetModuleState(type);
    if (state != NULL && type == state->stream_type &&
        state->spare_streams.n < N_SPARE_STREAMS) {
        state->spare_streams.objects[state->spare_streams.n++] = object;
        return;
    }
#endif
    type->tp_free(object);
}

void
stream_forget_spares(struct module_state *state)
{
    while (state->spare_streams.n > 0) {
        PyObject_Free(state->spare_streams.objects[--state->spare_streams.n]);
    }
}

static PyObject *
make(struct module_state *state, nrm_stream *stream)
{
    struct stream_object *self = make_empty(state);
    if (self == NULL) {
        nrm_stream_release(stream);
        return NULL;
    }
    self->stream = stream;
    self->handle = stream != NULL ? nrm_stream_handle(stream)
                                  : NRM_STREAM_HANDLE_PER_THREAD;
    return (PyObject *)self;
}

PyObject *
stream_wrap(struct module_state *state, nrm_stream *stream)
{
    if (stream == NULL || stream == nrm_stream_default()) {
        return Py_NewRef(state->default_stream);
    }
    if (stream == nrm_stream_legacy()) {
        return Py_NewRef(state->legacy_default_stream);
    }
    nrm_stream_retain(stream);
    return make(state, stream);
}

/* A stream of our own. */
static nrm_stream *
create(struct module_state *state, PyObject *flags)
{
    long value = NRM_STREAM_BLOCKING;
    nrm_stream *stream = NULL;
    if (!arg_is_none(flags) && arg_integer(flags, "flags", NRM_STREAM_BLOCKING,
                                           NRM_STREAM_NON_BLOCKING, &value) < 0) {
        return NULL;
    }
    nrm_status status = nrm_stream_create(-1, (unsigned int)value, &stream);
    return status == NRM_OK ? stream : (nrm_stream *)errors_raise(state, status);
}

#define ALLOWED(name)                                                                  \
    name " must be a handle (int), a Stream or an object with __cuda_stream__"

static nrm_stream *
stream_from(struct module_state *state, PyObject *object, const char *name,
            const char *allowed)
{
    uintptr_t handle;
    if (!PyIndex_Check(object)) {
        return stream_of_object(state, object, allowed);
    }
    return arg_address(object, name, &handle) < 0
               ? NULL
               : stream_of_handle(state, handle, NULL);
}

PyObject *
stream_from_argument(struct module_state *state, PyObject *object)
{
    nrm_stream *stream = stream_from(state, object, "stream", ALLOWED("stream"));
    return stream == NULL ? NULL : make(state, stream);
}

int
stream_handle_of_argument(struct module_state *state, PyObject *object, uintptr_t *out)
{
    return PyIndex_Check(object)
               ? arg_address(object, "stream", out)
               : foreign_stream_handle(state, object, ALLOWED("stream"), out);
}

static PyObject *
stream_vectorcall(PyObject *object, PyObject *const *args, size_t n_args,
                  PyObject *names)
{
    static struct signature signature = SIGNATURE("Stream", STREAM_TEXT);
    PyObject *values[2] = {NULL, NULL};
    struct module_state *state = PyType_GetModuleState((PyTypeObject *)object);
    if (errors_begin_call() < 0) {
        return NULL;
    }
    if (names == NULL && PyVectorcall_NARGS(n_args) == 1) {
        values[0] = args[0];
    }
    else if (signature_bind(&signature, args, (Py_ssize_t)n_args, names, values) < 0) {
        return NULL;
    }
    bool is_new = arg_is_none(values[0]);
    if (!is_new && !arg_is_none(values[1])) {
        PyErr_SetString(PyExc_ValueError,
                        "flags may only be specified when obj is None: they are of a "
                        "new stream");
        return NULL;
    }
    nrm_stream *stream = is_new ? create(state, values[1])
                                : stream_from(state, values[0], "obj", ALLOWED("obj"));
    return stream == NULL ? NULL : make(state, stream);
}

/* Who calls __new__ by itself; the type has no subclasses. */
static PyObject *
stream_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    return PyVectorcall_Call((PyObject *)type, args, keywords);
}

static void
stream_dealloc(PyObject *object)
{
    struct stream_object *self = (struct stream_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(object);
    }
    stream_drop(self->stream);
    unmake(type, object);
    Py_DECREF(type);
}

/* NULL with CudaError set: closed. */
static PyObject *
handle_get(PyObject *object, void *Py_UNUSED(closure))
{
    struct module_state *state = type_state(Py_TYPE(object));
    if (state == NULL || stream_object_check_open(state, object) < 0) {
        return NULL;
    }
    return PyLong_FromVoidPtr((void *)stream_object_handle(object));
}

static PyObject *
close_stream(PyObject *object, PyObject *Py_UNUSED(unused))
{
    struct stream_object *self = (struct stream_object *)object;
    struct module_state *state = type_state(Py_TYPE(object));
    if (state == NULL || errors_begin_call() < 0) {
        return NULL;
    }
    if (stream_object_handle(object) <= NRM_STREAM_HANDLE_PER_THREAD) {
        PyErr_Format(PyExc_ValueError, "%R cannot be closed: it always is", object);
        return NULL;
    }
    nrm_stream *stream = self->stream;
    self->stream = NULL;
    stream_drop(stream);
    Py_RETURN_NONE;
}

static PyObject *
cuda_stream(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return Py_BuildValue("iN", 0, handle_get(object, NULL));
}

static PyObject *
is_default(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return PyBool_FromLong(stream_object_handle(object) == NRM_STREAM_HANDLE_DEFAULT);
}

static PyObject *
synchronize(PyObject *object, PyObject *Py_UNUSED(unused))
{
    struct module_state *state = type_state(Py_TYPE(object));
    if (state == NULL || errors_begin_call() < 0) {
        return NULL;
    }
    nrm_stream *stream = stream_get(state, object);
    if (stream == NULL) {
        return NULL;
    }
    nrm_status status = nrm_stream_synchronize(stream);
    nrm_stream_release(stream);
    if (status != NRM_OK) {
        return errors_raise(state, status);
    }
    pending_reap();
    Py_RETURN_NONE;
}

static PyObject *
record(PyObject *object, PyTypeObject *type, PyObject *const *args, Py_ssize_t n_args,
       PyObject *names)
{
    static struct signature signature = SIGNATURE("record", RECORD_TEXT);
    PyObject *values[1];
    if (errors_begin_call() < 0 ||
        signature_bind(&signature, args, n_args, names, values) < 0) {
        return NULL;
    }
    return event_record_on(PyType_GetModuleState(type), values[0], object);
}

static PyObject *
wait_event(PyObject *object, PyObject *event)
{
    struct module_state *state = type_state(Py_TYPE(object));
    return state == NULL || errors_begin_call() < 0 ? NULL
                                                    : event_hold(state, event, object);
}

static PyObject *
stream_repr(PyObject *object)
{
    static const char *const constants[] = {"DEFAULT_STREAM", "LEGACY_DEFAULT_STREAM",
                                            "PER_THREAD_DEFAULT_STREAM"};
    uintptr_t handle = stream_object_handle(object);
    if (handle <= NRM_STREAM_HANDLE_PER_THREAD) {
        return PyUnicode_FromFormat("<Stream %s>", constants[handle]);
    }
    return PyUnicode_FromFormat(stream_object_is_closed(object) ? "<Stream %p, closed>"
                                                                : "<Stream %p>",
                                (void *)handle);
}

static PyObject *
stream_compare(PyObject *object, PyObject *other, int op)
{
    if ((op != Py_EQ && op != Py_NE) || Py_TYPE(object) != Py_TYPE(other)) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    bool equal = stream_object_handle(object) == stream_object_handle(other);
    return PyBool_FromLong(op == Py_EQ ? equal : !equal);
}

static Py_hash_t
stream_hash(PyObject *object)
{
    Py_hash_t hash =
        (Py_hash_t)(stream_object_handle(object) >> 4 ^ stream_object_handle(object));
    return hash == -1 ? -2 : hash;
}

static PyObject *
stream_reduce(PyObject *Py_UNUSED(object), PyObject *Py_UNUSED(unused))
{
    PyErr_SetString(PyExc_TypeError,
                    "a Stream cannot be pickled or copied: it belongs to this process");
    return NULL;
}

/* ---- methods ---- */

static PyMethodDef stream_methods[] = {
    {"close", close_stream, METH_NOARGS,
     PyDoc_STR(
         "close($self)\n--\n\n"
         "Let the stream go; without effect on one that is closed.\n\n"
         "A stream made by ``Stream()`` is destroyed when nothing else holds it\n"
         "(memory that was allocated on it does); its work need not be done, and\n"
         "is not waited for.\n\n"
         "Raises\n------\n"
         "ValueError\n    For the three constants, which always are.\n")},
    {"synchronize", synchronize, METH_NOARGS,
     PyDoc_STR("synchronize($self)\n--\n\n"
               "Wait until all work submitted to the stream is done.\n\n"
               "Raises\n------\n"
               "CudaError\n    When that work, or the driver, failed.\n")},
    {"record", (PyCFunction)(void (*)(void))record,
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS,
     SIGNATURE_DOC(
         "record", "$self, ", RECORD_TEXT,
         "Record an event behind all that the stream has been given so far.\n\n"
         "Parameters\n----------\n"
         "event : Event, optional\n    None: a new one.\n\n"
         "Returns\n-------\nEvent\n")},
    {"wait_event", wait_event, METH_O,
     PyDoc_STR("wait_event($self, event, /)\n--\n\n"
               "Let what the stream is given from now on wait for an event.\n\n"
               "Parameters\n----------\n"
               "event : Event\n    One that was never recorded is not waited for.\n\n"
               "Raises\n------\n"
               "CudaError\n    When the driver failed.\n")},
    {"is_default", is_default, METH_NOARGS,
     PyDoc_STR("is_default($self)\n--\n\nWhether this is DEFAULT_STREAM.")},
    {"__cuda_stream__", cuda_stream, METH_NOARGS,
     PyDoc_STR("__cuda_stream__($self)\n--\n\n"
               "The CUDA stream protocol: (version 0, handle).")},
    {"__reduce__", stream_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef stream_getset[] = {
    {"handle", handle_get, NULL, PyDoc_STR("The driver's handle, an int."), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef stream_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(struct stream_object, weakrefs),
     READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot stream_slots[] = {
    {Py_tp_doc,
     (void *)PyDoc_STR(
         "Stream(" STREAM_TEXT ")\n--\n\n"
         "A CUDA stream: the order in which memory is used.\n\n"
         "Parameters\n----------\n"
         "obj : int, Stream or object with ``__cuda_stream__``, optional\n"
         "    A handle, whose stream the caller keeps alive; or an object of\n"
         "    another library, which the Stream keeps alive: also a stream of CuPy,\n"
         "    Numba or PyTorch that has no ``__cuda_stream__``. None: a new stream, on\n"
         "    the device of the current context, else that of the option ``device``.\n"
         "    Only on a stream of its own does memory come and go without a call of\n"
         "    the driver: others may be destroyed at any time.\n"
         "flags : CudaStreamFlags or int, optional\n"
         "    Of a new stream: 0 (None), ordered with the legacy default stream, or\n"
         "    1, not.\n\n"
         "Raises\n------\n"
         "TypeError\n    For anything else.\n"
         "ValueError\n    For other flags, and flags of a stream that is there.\n"
         "NotImplementedError\n    For another version of ``__cuda_stream__``.\n"
         "CudaError\n    When the driver failed, and for a Stream that is closed.\n\n"
         "Examples\n--------\n"
         ">>> import numpy_rmm\n"
         ">>> numpy_rmm.Stream(0) == numpy_rmm.DEFAULT_STREAM\n"
         "True\n")},
    {Py_tp_new, stream_new},
    {Py_tp_dealloc, stream_dealloc},
    {Py_tp_members, stream_members},
    {Py_tp_repr, stream_repr},
    {Py_tp_richcompare, stream_compare},
    {Py_tp_hash, stream_hash},
    {Py_tp_methods, stream_methods},
    {Py_tp_getset, stream_getset},
    {0, NULL},
};

static PyType_Spec stream_spec = {
    .name = "numpy_rmm.Stream",
    .basicsize = sizeof(struct stream_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = stream_slots,
};

int
stream_init(PyObject *module)
{
    struct module_state *state = module_state(module);
    state->stream_type =
        (PyTypeObject *)PyType_FromModuleAndSpec(module, &stream_spec, NULL);
    if (state->stream_type == NULL ||
        PyModule_AddType(module, state->stream_type) < 0) {
        return -1;
    }
    state->stream_type->tp_vectorcall = stream_vectorcall;
    state->cuda_stream_name = PyUnicode_InternFromString("__cuda_stream__");
    if (state->cuda_stream_name == NULL || foreign_stream_init(state) < 0) {
        return -1;
    }
    state->default_stream = make(state, nrm_stream_default());
    state->legacy_default_stream = make(state, nrm_stream_legacy());
    state->per_thread_default_stream = make(state, NULL);
    if (PyModule_AddObjectRef(module, "DEFAULT_STREAM", state->default_stream) < 0 ||
        PyModule_AddObjectRef(module, "LEGACY_DEFAULT_STREAM",
                              state->legacy_default_stream) < 0) {
        return -1;
    }
    return PyModule_AddObjectRef(module, "PER_THREAD_DEFAULT_STREAM",
                                 state->per_thread_default_stream);
}
