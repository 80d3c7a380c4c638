/* The C stream of what a program passes: a Stream, or another library's object. */
#include "python/stream_object.h"

#include "core/stream.h"
#include "cuda/error.h"
#include "python/errors.h"
#include "python/foreign_stream.h"
#include "python/interpreter.h"

int
stream_object_check_open(struct module_state *state, PyObject *object)
{
    if (!stream_object_is_closed(object)) {
        return 0;
    }
    (void)errors_raise(state, nrm__cuda_error(NRM_CUDA_ERROR_INVALID_HANDLE,
                                              "Stream %p, which is closed",
                                              (void *)stream_object_handle(object)));
    return -1;
}

void
stream_object_drop(void *keepalive)
{
    interpreter_drop_later(keepalive);
}

void
stream_drop(nrm_stream *stream)
{
    PyObject *kept = nrm__stream_release_kept(stream, stream_object_drop);
    Py_XDECREF(kept);
}

nrm_stream *
stream_of_handle(struct module_state *state, uintptr_t handle, PyObject *keepalive)
{
    nrm_stream *stream = NULL;
    nrm_status status = NRM_OK;
    if (handle == NRM_STREAM_HANDLE_DEFAULT) {
        return nrm_stream_default();
    }
    if (handle == NRM_STREAM_HANDLE_LEGACY) {
        return nrm_stream_legacy();
    }
    if (handle == NRM_STREAM_HANDLE_PER_THREAD) {
        status = nrm_stream_per_thread(&stream);
    }
    else {
        Py_XINCREF(keepalive);
        status = nrm_stream_wrap(
            handle, keepalive, keepalive != NULL ? stream_object_drop : NULL, &stream);
        if (status != NRM_OK) {
            Py_XDECREF(keepalive);
        }
    }
    return status == NRM_OK ? stream : (nrm_stream *)errors_raise(state, status);
}

#define ARGUMENT_TEXT                                                                  \
    "stream must be a Stream or an object with __cuda_stream__ (a handle becomes one " \
    "by Stream(handle))"

nrm_stream *
stream_of_object(struct module_state *state, PyObject *object, const char *allowed)
{
    uintptr_t handle;
    if (Py_IS_TYPE(object, state->stream_type)) { /* it has no subclasses */
        nrm_stream *stream = ((struct stream_object *)object)->stream;
        if (stream_object_check_open(state, object) < 0) {
            return NULL;
        }
        if (stream == NULL) {
            return stream_of_handle(state, NRM_STREAM_HANDLE_PER_THREAD, NULL);
        }
        nrm_stream_retain(stream);
        return stream;
    }
    return foreign_stream_handle(state, object, allowed, &handle) < 0
               ? NULL
               : stream_of_handle(state, handle, object);
}

nrm_stream *
stream_of_argument(struct module_state *state, PyObject *object)
{
    if (object == Py_None) {
        PyErr_SetString(PyExc_TypeError,
                        "stream argument cannot be None: leave it out for "
                        "DEFAULT_STREAM");
        return NULL;
    }
    return stream_of_object(state, object, ARGUMENT_TEXT);
}

const nrm_stream *
stream_borrow(struct module_state *state, PyObject *object)
{
#ifdef Py_GIL_DISABLED
    (void)state;
    (void)object;
    return NULL;
#else
    bool is_open = Py_IS_TYPE(object, state->stream_type) &&
                   !stream_object_is_closed(object);
    return is_open ? ((struct stream_object *)object)->stream : NULL;
#endif
}
