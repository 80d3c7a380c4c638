/*
 * Python functions as a source of memory, and one that is asked when there is none.
 *
 * The core calls the trampolines from wherever a request comes from, attached or not.
 * An exception stays set in its thread, so that the method that made the request raises
 * it as it is; in a thread that has no Python code to return to, it is printed. The
 * core can drop the functions where no Python code may run, so they are released later.
 * What the garbage collector sees of them is in callbacks.c.
 */
#include "python/callback.h"

#include "base/error.h"
#include "core/hooks.h"
#include "nrm/adaptors.h"
#include "nrm/sources.h"
#include "python/args.h"
#include "python/callbacks.h"
#include "python/errors.h"
#include "python/stream.h"

/* ---- calls from the core ---- */

struct call {
    PyGILState_STATE gil;
    bool has_frames; /* Python code of this thread waits for our return */
};

static struct call
call_begin(void)
{
    struct call call;
    call.has_frames = PyGILState_GetThisThreadState() != NULL;
    call.gil = PyGILState_Ensure();
    return call;
}

static void
call_end(struct call call)
{
    if (!call.has_frames && PyErr_Occurred()) {
        PyErr_WriteUnraisable(NULL);
    }
    PyGILState_Release(call.gil);
}

static nrm_status
ended(void)
{
    return nrm__error(NRM_CALLBACK_FAILED, "the interpreter has ended");
}

static nrm_status
collected(void)
{
    return nrm__error(NRM_CALLBACK_FAILED,
                      "the functions were garbage and have been collected");
}

static nrm_status
allocate_attached(struct callbacks *self, size_t nbytes, nrm_stream *stream, void **out)
{
    if (self->allocate == NULL) {
        return collected();
    }
    struct module_state *state = module_state(self->module);
    PyObject *stream_object = stream_wrap(state, stream);
    PyObject *result = NULL;
    uintptr_t ptr = 0;
    if (stream_object != NULL) {
        PyObject *size = PyLong_FromSize_t(nbytes);
        PyObject *args[] = {size, stream_object};
        result = size == NULL ? NULL
                              : PyObject_Vectorcall(self->allocate, args, 2, NULL);
        Py_XDECREF(size);
        Py_DECREF(stream_object);
    }
    if (result == NULL || arg_address(result, "what allocate_func returns", &ptr) < 0) {
        Py_XDECREF(result);
        /* After this one a pool asks for less. */
        bool is_memory = PyErr_ExceptionMatches(PyExc_MemoryError);
        return nrm__error(is_memory ? NRM_OUT_OF_MEMORY : NRM_CALLBACK_FAILED,
                          "allocate_func raised an exception");
    }
    Py_DECREF(result);
    if (ptr == 0) {
        return nrm__error(NRM_OUT_OF_MEMORY, "allocate_func returned 0 for %zu B",
                          nbytes);
    }
    *out = (void *)ptr;
    return NRM_OK;
}

static nrm_status
allocate_call(void *context, size_t nbytes, size_t alignment, nrm_stream *stream,
              void **out)
{
    if (nrm__is_exiting()) {
        return ended();
    }
    struct call call = call_begin();
    PyErr_Clear(); /* of an attempt before this one */
    nrm_status status = allocate_attached(context, nbytes, stream, out);
    call_end(call);
    return status;
}

static void
deallocate_attached(struct callbacks *self, void *ptr, size_t nbytes,
                    nrm_stream *stream)
{
    PyObject *stream_object = stream_wrap(module_state(self->module), stream);
    if (stream_object == NULL) {
        return;
    }
    PyObject *result = PyObject_CallFunction(self->deallocate, "NnN",
                                             PyLong_FromVoidPtr(ptr),
                                             (Py_ssize_t)nbytes, stream_object);
    Py_XDECREF(result);
}

static nrm_status
deallocate_call(void *context, void *ptr, size_t nbytes, nrm_stream *stream)
{
    if (nrm__is_exiting()) {
        return ended();
    }
    struct call call = call_begin();
    PyObject *pending = compat_take_error();
    struct callbacks *self = context;
    nrm_status status = self->deallocate != NULL ? NRM_OK : collected();
    if (status == NRM_OK) {
        deallocate_attached(self, ptr, nbytes, stream);
    }
    if (PyErr_Occurred()) {
        status = nrm__error(NRM_CALLBACK_FAILED, "deallocate_func raised an exception");
    }
    if (pending != NULL && PyErr_Occurred()) {
        PyErr_WriteUnraisable(self->deallocate);
    }
    if (pending != NULL) {
        compat_restore_error(pending);
    }
    call_end(call);
    return status;
}

/* 1, 0, or -1 with an exception set. */
static int
ask_attached(PyObject *callback, size_t nbytes)
{
    PyObject *size = PyLong_FromSize_t(nbytes);
    PyObject *result = size == NULL ? NULL : PyObject_CallOneArg(callback, size);
    int retry = result == NULL ? -1 : PyObject_IsTrue(result);
    Py_XDECREF(size);
    Py_XDECREF(result);
    return retry;
}

/* The exception that is set was raised while another one was handled; steals that. */
static void
set_context(PyObject *pending)
{
    if (pending != NULL) {
        PyObject *raised = compat_take_error();
        PyException_SetContext(raised, pending);
        compat_restore_error(raised);
    }
}

/* What refused the request may have been a Python function: what it raised stays
   pending when no other attempt is made. */
static nrm_status
failure_call(void *context, size_t nbytes, bool *out_retry)
{
    struct callbacks *self = context;
    nrm_status status = NRM_OK;
    if (nrm__is_exiting()) {
        return ended();
    }
    struct call call = call_begin();
    PyObject *pending = compat_take_error();
    int retry = self->allocate != NULL ? ask_attached(self->allocate, nbytes) : 0;
    if (retry < 0) {
        bool is_memory = PyErr_ExceptionMatches(PyExc_MemoryError);
        status = nrm__error(is_memory ? NRM_OUT_OF_MEMORY : NRM_CALLBACK_FAILED,
                            "the callback raised an exception");
        set_context(pending);
    }
    else if (retry == 0) {
        compat_restore_error(pending);
    }
    else {
        Py_XDECREF(pending);
    }
    *out_retry = retry > 0;
    call_end(call);
    return status;
}

static void
destroy(void *context)
{
    callbacks_drop(context);
}

/* ---- making one ---- */

static int
check_callable(PyObject *object, const char *name)
{
    if (PyCallable_Check(object)) {
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "%s must be callable, not %.100s", name,
                 Py_TYPE(object)->tp_name);
    return -1;
}

/* Ends both constructors: what was made has the callbacks, or they go. */
static nrm_resource *
made(struct module_state *state, struct callbacks *self, nrm_status status,
     nrm_resource *mr, void **out_callbacks)
{
    if (status != NRM_OK) {
        Py_DECREF(self);
        return (nrm_resource *)errors_raise(state, status);
    }
    self->mr = mr;
    *out_callbacks = self;
    return mr;
}

nrm_resource *
callback_create(struct module_state *state, PyObject *allocate, PyObject *deallocate,
                nrm_kind kind, void **out_callbacks)
{
    if (check_callable(allocate, "allocate_func") < 0 ||
        check_callable(deallocate, "deallocate_func") < 0) {
        return NULL;
    }
    struct callbacks *self = callbacks_make(state, allocate, deallocate);
    if (self == NULL) {
        return NULL;
    }
    nrm_callback_options options = NRM_OPTIONS(nrm_callback_options);
    options.kind = kind;
    options.allocate = allocate_call;
    options.deallocate = deallocate_call;
    options.destroy = destroy;
    options.context = self;
    options.calls_user_code = true;
    nrm_resource *mr = NULL;
    nrm_status status = nrm_callback_create(&options, &mr);
    return made(state, self, status, mr, out_callbacks);
}

nrm_resource *
callback_create_failure(struct module_state *state, nrm_resource *upstream,
                        PyObject *callback, void **out_callbacks)
{
    if (check_callable(callback, "callback") < 0) {
        return NULL;
    }
    struct callbacks *self = callbacks_make(state, callback, NULL);
    if (self == NULL) {
        return NULL;
    }
    nrm_failure_callback_options options = NRM_OPTIONS(nrm_failure_callback_options);
    options.callback = failure_call;
    options.destroy = destroy;
    options.context = self;
    options.calls_user_code = true;
    nrm_resource *mr = NULL;
    nrm_status status = nrm_failure_callback_create(upstream, &options, &mr);
    return made(state, self, status, mr, out_callbacks);
}
