/*
 * Event: an event of the driver, made when it is first recorded, in the context of its
 * stream.
 *
 * Waiting detaches from the interpreter, so another thread may record meanwhile: the
 * driver allows that, and the event is never replaced, so nobody's handle goes away.
 */
#include "python/event.h"

#include "core/hooks.h"
#include "core/marker.h"
#include "core/transfer.h"
#include "python/errors.h"
#include "python/pending.h"
#include "python/signature.h"
#include "python/stream.h"

struct event_object {
    PyObject ob_base; /* as PyObject_HEAD */
    struct nrm__marker marker;
    PyObject *weakrefs;
};

#define RECORD_TEXT "stream=..."

static struct event_object *
event_from(PyObject *object)
{
    return (struct event_object *)object;
}

static PyObject *
event_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static struct signature signature = SIGNATURE("Event", "");
    PyObject *values[1];
    return signature_bind_tuple(&signature, args, keywords, values) < 0
               ? NULL
               : type->tp_alloc(type, 0);
}

static void
event_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    if (event_from(object)->weakrefs != NULL) {
        PyObject_ClearWeakRefs(object);
    }
    void *token = nrm__detach();
    nrm__marker_finish(&event_from(object)->marker);
    nrm__attach(token);
    type->tp_free(object);
    Py_DECREF(type);
}

/* ---- records and waits ---- */

/* Calls `step` detached, with the stream of an argument. */
static int
with_stream(struct module_state *state, PyObject *object, PyObject *stream_object,
            nrm_status (*step)(struct nrm__marker *marker, nrm_stream *stream))
{
    nrm_stream *stream = stream_get(state, stream_object);
    if (stream == NULL) {
        return -1;
    }
    void *token = nrm__detach();
    nrm_status status = step(&event_from(object)->marker, stream);
    nrm__attach(token);
    nrm_stream_release(stream);
    if (status != NRM_OK) {
        (void)errors_raise(state, status);
        return -1;
    }
    return 0;
}

static nrm_status
hold(struct nrm__marker *marker, nrm_stream *stream)
{
    return nrm__marker_hold(marker, stream);
}

static int
check_event(struct module_state *state, PyObject *event)
{
    if (Py_IS_TYPE(event, state->event_type)) {
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "event must be an Event, not %.100s",
                 Py_TYPE(event)->tp_name);
    return -1;
}

PyObject *
event_record_on(struct module_state *state, PyObject *event, PyObject *stream)
{
    PyObject *result = event != NULL && event != Py_None
                           ? Py_NewRef(event)
                           : state->event_type->tp_alloc(state->event_type, 0);
    if (result == NULL || check_event(state, result) < 0 ||
        with_stream(state, result, stream, nrm__marker_record) < 0) {
        Py_CLEAR(result);
    }
    return result;
}

PyObject *
event_hold(struct module_state *state, PyObject *event, PyObject *stream)
{
    return check_event(state, event) < 0 || with_stream(state, event, stream, hold) < 0
               ? NULL
               : Py_NewRef(Py_None);
}

static PyObject *
record(PyObject *object, PyTypeObject *type, PyObject *const *args, Py_ssize_t n_args,
       PyObject *names)
{
    static struct signature signature = SIGNATURE("record", RECORD_TEXT);
    struct module_state *state = PyType_GetModuleState(type);
    PyObject *values[1];
    if (errors_begin_call() < 0 ||
        signature_bind(&signature, args, n_args, names, values) < 0 ||
        with_stream(state, object, values[0], nrm__marker_record) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* 1: done, 0: not yet, -1 with an error set. */
static int
query(PyObject *object, bool waits)
{
    struct nrm__cuda_lone_event event = nrm__marker_event(&event_from(object)->marker);
    nrm_status status = event.handle == NULL ? NRM_OK
                                             : nrm__transfer_query(&event, waits);
    if (status == NRM_OK || status == NRM_NOT_FOUND) {
        return status == NRM_OK;
    }
    struct module_state *state = type_state(Py_TYPE(object));
    if (state != NULL) {
        (void)errors_raise(state, status);
    }
    return -1;
}

static PyObject *
synchronize(PyObject *object, PyObject *Py_UNUSED(unused))
{
    if (errors_begin_call() < 0 || query(object, true) < 0) {
        return NULL;
    }
    pending_reap();
    Py_RETURN_NONE;
}

static PyObject *
done_get(PyObject *object, void *Py_UNUSED(closure))
{
    int done = query(object, false);
    return done < 0 ? NULL : PyBool_FromLong(done);
}

static PyObject *
handle_get(PyObject *object, void *Py_UNUSED(closure))
{
    return PyLong_FromVoidPtr(event_from(object)->marker.event);
}

static PyObject *
event_repr(PyObject *object)
{
    nrm_CUevent event = atomic_load(&event_from(object)->marker.event);
    return event == NULL ? PyUnicode_FromString("<Event, not recorded>")
                         : PyUnicode_FromFormat("<Event %p>", event);
}

static PyObject *
event_reduce(PyObject *Py_UNUSED(object), PyObject *Py_UNUSED(unused))
{
    PyErr_SetString(PyExc_TypeError,
                    "an Event cannot be pickled or copied: it belongs to this process");
    return NULL;
}

/* ---- the type ---- */

static PyMethodDef event_methods[] = {
    {"record", (PyCFunction)(void (*)(void))record,
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS,
     SIGNATURE_DOC(
         "record", "$self, ", RECORD_TEXT,
         "Stand for all that a stream has been given so far.\n\n"
         "Parameters\n----------\n"
         "stream : Stream\n    By default DEFAULT_STREAM; of the same context\n"
         "    each time.\n\n"
         "Raises\n------\n"
         "ValueError\n    For a stream of another context.\n"
         "CudaError\n    When the driver failed.\n")},
    {"synchronize", synchronize, METH_NOARGS,
     PyDoc_STR("synchronize($self)\n--\n\n"
               "Wait until that is done; others may run meanwhile.\n\n"
               "Raises\n------\n"
               "CudaError\n    When it, or the driver, failed.\n")},
    {"__reduce__", event_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef event_getset[] = {
    {"done", done_get, NULL,
     PyDoc_STR("Whether all of that is done; True before the first record."), NULL},
    {"handle", handle_get, NULL,
     PyDoc_STR("The driver's handle, an int; 0: not recorded."), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef event_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(struct event_object, weakrefs),
     READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot event_slots[] = {
    {Py_tp_doc,
     (void *)PyDoc_STR("Event()\n--\n\n"
                       "A point in the work of a stream, to be waited for.\n\n"
                       "The host waits by :meth:`synchronize`, another stream by\n"
                       ":meth:`Stream.wait_event`. Events measure no time.\n\n"
                       "Examples\n--------\n"
                       ">>> import numpy_rmm\n"
                       ">>> from numpy_rmm.testing import simulate_cuda\n"
                       ">>> with simulate_cuda():  # in place of a GPU\n"
                       "...     event = numpy_rmm.Stream().record()\n"
                       "...     event.synchronize()\n"
                       "...     event.done\n"
                       "True\n")},
    {Py_tp_new, event_new},
    {Py_tp_dealloc, event_dealloc},
    {Py_tp_repr, event_repr},
    {Py_tp_methods, event_methods},
    {Py_tp_getset, event_getset},
    {Py_tp_members, event_members},
    {0, NULL},
};

static PyType_Spec event_spec = {
    .name = "numpy_rmm.Event",
    .basicsize = sizeof(struct event_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = event_slots,
};

int
event_init(PyObject *module)
{
    struct module_state *state = module_state(module);
    PyObject *type = PyType_FromModuleAndSpec(module, &event_spec, NULL);
    state->event_type = (PyTypeObject *)type;
    return type == NULL ? -1 : PyModule_AddType(module, state->event_type);
}
