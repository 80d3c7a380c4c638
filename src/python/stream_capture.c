/*
 * Captures of streams, as what makes them tells of them: functions of the module, for
 * numpy_rmm.stream_capture() and the hooks of other libraries.
 */
#include "python/args.h"
#include "python/errors.h"
#include "python/stream.h"

static PyObject *
capture_begin(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    nrm_capture_begin();
    Py_RETURN_NONE;
}

static PyObject *
capture_end(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    nrm_capture_end();
    Py_RETURN_NONE;
}

static PyObject *
capture_own_frees(PyObject *module, PyObject *argument)
{
    uintptr_t handle;
    if (arg_address(argument, "handle", &handle) < 0) {
        return NULL;
    }
    nrm_status status = nrm_capture_own_frees(handle);
    if (status == NRM_OUT_OF_MEMORY) {
        return errors_raise(module_state(module), status);
    }
    return PyBool_FromLong(status == NRM_OK);
}

static PyObject *
capture_disown_frees(PyObject *Py_UNUSED(module), PyObject *argument)
{
    uintptr_t handle;
    if (arg_address(argument, "handle", &handle) < 0) {
        return NULL;
    }
    nrm_capture_disown_frees(handle);
    Py_RETURN_NONE;
}

static PyObject *
stream_is_captured(PyObject *Py_UNUSED(module), PyObject *argument)
{
    uintptr_t handle;
    if (arg_address(argument, "handle", &handle) < 0) {
        return NULL;
    }
    return PyBool_FromLong(nrm_stream_is_captured(handle));
}

PyMethodDef stream_functions[] = {
    {"_capture_begin", capture_begin, METH_NOARGS,
     PyDoc_STR("_capture_begin($module)\n--\n\nA capture is about to begin.")},
    {"_capture_end", capture_end, METH_NOARGS,
     PyDoc_STR("_capture_end($module)\n--\n\nThe capture has ended.")},
    {"_capture_own_frees", capture_own_frees, METH_O,
     PyDoc_STR(
         "_capture_own_frees($module, handle, /)\n--\n\n"
         "What dies from now on belongs to the capture of the stream; whether it\n"
         "can.")},
    {"_capture_disown_frees", capture_disown_frees, METH_O,
     PyDoc_STR("_capture_disown_frees($module, handle, /)\n--\n\nNo longer.")},
    {"_stream_is_captured", stream_is_captured, METH_O,
     PyDoc_STR("_stream_is_captured($module, handle, /)\n--\n\n"
               "Whether a stream that lives is being captured.")},
    {NULL, NULL, 0, NULL},
};
