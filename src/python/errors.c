/*
 * What went wrong, in Python's words.
 *
 * The exceptions have one argument, the message, and keep the numbers as attributes in
 * their __dict__: so they print plainly and pickle with all they have.
 */
#include "python/errors.h"

#include "core/hooks.h"
#include "python/interpreter.h"
#include "python/signature.h"

/* ---- types ---- */

static PyStructSequence_Field error_info_fields[] = {
    {"status", "what kind of failure: 'OUT_OF_MEMORY', 'NOT_OWNED', 'CUDA_ERROR', ..."},
    {"native_code", "number of the driver's or the system's own error; 0: none"},
    {"native_name",
     "its name, such as 'CUDA_ERROR_OUT_OF_MEMORY' or 'ENOMEM'; may be ''"},
    {"message", "one sentence with numbers and units"},
    {"requested_nbytes", "bytes asked for, of an allocation; else 0"},
    {"resource", "name of the resource that was asked; may be ''"},
    {NULL, NULL},
};

static PyStructSequence_Desc error_info_desc = {
    .name = "numpy_rmm.ErrorInfo",
    .doc = "A failed allocation or free, as :func:`last_error` tells it.",
    .fields = error_info_fields,
    .n_in_sequence = 6,
};

/* `defaults` is stolen; NULL with an error set fails. */
static PyObject *
make_exception(PyObject *module, const char *name, const char *doc, PyObject *base,
               PyObject *defaults)
{
    if (defaults == NULL) {
        return NULL;
    }
    char full_name[64];
    snprintf(full_name, sizeof full_name, "numpy_rmm.%s", name);
    PyObject *type = PyErr_NewExceptionWithDoc(full_name, doc, base, defaults);
    Py_DECREF(defaults);
    if (type != NULL && PyModule_AddObjectRef(module, name, type) < 0) {
        Py_CLEAR(type);
    }
    return type;
}

int
errors_init(PyObject *module)
{
    struct module_state *state = module_state(module);
    state->error_info_type = PyStructSequence_NewType(&error_info_desc);
    if (state->error_info_type == NULL ||
        PyModule_AddType(module, state->error_info_type) < 0) {
        return -1;
    }
    state->out_of_memory_error = make_exception(
        module, "OutOfMemoryError",
        "Memory of a resource is exhausted: the message tells what was asked for, what is\n"
        "in use and what the limit is.\n\n"
        "Attributes\n----------\n"
        "requested_nbytes : int\n    Bytes asked for.\n"
        "resource : str\n    Name of the resource that was asked.\n"
        "code, name : int, str\n    The driver's or the system's own error; 0 and ''\n"
        "    where there was none.",
        PyExc_MemoryError,
        Py_BuildValue("{s:i,s:s,s:i,s:s}", "requested_nbytes", 0, "resource", "",
                      "code", 0, "name", ""));
    state->cuda_error = make_exception(
        module, "CudaError",
        "The CUDA driver answered with an error.\n\n"
        "Attributes\n----------\n"
        "code : int\n    Its number.\n"
        "name : str\n    Its name, such as 'CUDA_ERROR_ILLEGAL_ADDRESS'.",
        PyExc_RuntimeError, Py_BuildValue("{s:i,s:s}", "code", 0, "name", ""));
    if (state->out_of_memory_error == NULL || state->cuda_error == NULL) {
        return -1;
    }
    state->cuda_unavailable_error = make_exception(
        module, "CudaUnavailableError",
        "CUDA cannot be used here: the message tells what was looked for, and where.",
        state->cuda_error, PyDict_New());
    return state->cuda_unavailable_error == NULL ? -1 : 0;
}

/* ---- raising ---- */

static PyObject *
exception_type(struct module_state *state, nrm_status status)
{
    switch (status) {
    case NRM_OUT_OF_MEMORY:
        return state->out_of_memory_error;
    case NRM_CUDA_UNAVAILABLE:
        return state->cuda_unavailable_error;
    case NRM_CUDA_ERROR:
    case NRM_DEVICE_LOST:
        return state->cuda_error;
    case NRM_NOT_SUPPORTED:
        return PyExc_NotImplementedError;
    case NRM_NOT_FOUND:
        return PyExc_KeyError;
    case NRM_OS_ERROR:
        return PyExc_OSError;
    case NRM_CALLBACK_FAILED:
        return PyExc_RuntimeError;
    default:
        return PyExc_ValueError;
    }
}

static int
set_attribute(PyObject *exception, const char *name, PyObject *value)
{
    int result = value == NULL ? -1 : PyObject_SetAttrString(exception, name, value);
    Py_XDECREF(value);
    return result;
}

/* The numbers of the record as attributes of one of our own exceptions. */
static int
set_attributes(struct module_state *state, PyObject *exception, const nrm_error *error)
{
    if (set_attribute(exception, "code", PyLong_FromLong(error->native_code)) < 0 ||
        set_attribute(exception, "name", PyUnicode_FromString(error->native_name)) <
            0) {
        return -1;
    }
    if ((PyObject *)Py_TYPE(exception) != state->out_of_memory_error) {
        return 0;
    }
    PyObject *nbytes = PyLong_FromSize_t(error->requested_nbytes);
    PyObject *resource =
        PyUnicode_DecodeUTF8(error->resource, strlen(error->resource), "replace");
    if (set_attribute(exception, "requested_nbytes", nbytes) < 0) {
        Py_XDECREF(resource);
        return -1;
    }
    return set_attribute(exception, "resource", resource);
}

static PyObject *
decode(const char *text)
{
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

PyObject *
errors_raise(struct module_state *state, nrm_status status)
{
    if (PyErr_Occurred()) {
        return NULL;
    }
    nrm_error error = *nrm_last_error();
    bool is_recorded = error.status == status;
    PyObject *type = exception_type(state, status);
    PyObject *message = decode(is_recorded ? error.message : nrm_status_text(status));
    PyObject *exception = NULL;
    if (message != NULL && type == PyExc_OSError && is_recorded) {
        exception = PyObject_CallFunction(type, "iO", error.native_code, message);
    }
    else if (message != NULL) {
        exception = PyObject_CallOneArg(type, message);
    }
    Py_XDECREF(message);
    if (exception == NULL) {
        return NULL;
    }
    bool is_ours = type == state->out_of_memory_error || type == state->cuda_error ||
                   type == state->cuda_unavailable_error;
    if (!is_ours || !is_recorded || set_attributes(state, exception, &error) == 0) {
        PyErr_SetObject((PyObject *)Py_TYPE(exception), exception);
    }
    Py_DECREF(exception);
    return NULL;
}

/* ---- telling ---- */

/* An ErrorInfo, or None where the record is empty. */
static PyObject *
info_of(struct module_state *state, const nrm_error *error)
{
    if (error->status == NRM_OK) {
        Py_RETURN_NONE;
    }
    PyObject *info = PyStructSequence_New(state->error_info_type);
    if (info == NULL) {
        return NULL;
    }
    PyStructSequence_SetItem(info, 0, decode(nrm_status_name(error->status)));
    PyStructSequence_SetItem(info, 1, PyLong_FromLong(error->native_code));
    PyStructSequence_SetItem(info, 2, decode(error->native_name));
    PyStructSequence_SetItem(info, 3, decode(error->message));
    PyStructSequence_SetItem(info, 4, PyLong_FromSize_t(error->requested_nbytes));
    PyStructSequence_SetItem(info, 5, decode(error->resource));
    if (PyErr_Occurred()) {
        Py_CLEAR(info);
    }
    return info;
}

static int
show_warnings(Py_ssize_t stack_level)
{
    char text[512];
    while (nrm__warning_take(text, sizeof text)) {
        if (PyErr_WarnEx(PyExc_RuntimeWarning, text, stack_level) < 0) {
            return -1;
        }
    }
    return 0;
}

int
errors_begin_busy_call(void)
{
    interpreter_drop_now();
    return show_warnings(1);
}

static PyObject *
last_error(PyObject *module, PyObject *Py_UNUSED(unused))
{
    nrm_error error = *nrm_last_error();
    return info_of(module_state(module), &error);
}

static PyObject *
lost_error(PyObject *module, PyObject *Py_UNUSED(unused))
{
    nrm_error error;
    uint64_t count;
    nrm__lost_error_get(&error, &count);
    PyObject *info = info_of(module_state(module), &error);
    return info == NULL ? NULL : Py_BuildValue("NK", info, (unsigned long long)count);
}

static PyObject *
show_warnings_for(PyObject *Py_UNUSED(module), PyObject *stack_level)
{
    Py_ssize_t level = PyNumber_AsSsize_t(stack_level, NULL);
    if (level == -1 && PyErr_Occurred()) {
        return NULL;
    }
    interpreter_drop_now();
    if (show_warnings(level) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyMethodDef errors_methods[] = {
    {"last_error", last_error, METH_NOARGS,
     PyDoc_STR(
         "last_error($module)\n--\n\n"
         "The last failed allocation or free of this thread.\n\n"
         "NumPy can only say that memory was missing; this says why.\n\n"
         "Returns\n-------\nErrorInfo or None\n"
         "    The record, with the fields ``status``, ``native_code``, ``native_name``,\n"
         "    ``message``, ``requested_nbytes`` (bytes) and ``resource``. None when\n"
         "    nothing has failed in this thread.\n\n"
         "Examples\n--------\n"
         ">>> import numpy as np, numpy_rmm\n"
         ">>> small = numpy_rmm.mr.LimitingResourceAdaptor(\n"
         "...     numpy_rmm.mr.HostMemoryResource(), '1 MiB')\n"
         ">>> with numpy_rmm.use_handler(small):\n"
         "...     x = np.empty(1_000_000)\n"
         "Traceback (most recent call last):\n"
         "numpy...MemoryError: Unable to allocate 7.63 MiB ...\n"
         ">>> numpy_rmm.last_error().requested_nbytes\n"
         "8000000\n")},
    {"_lost_error", lost_error, METH_NOARGS,
     PyDoc_STR("_lost_error($module)\n--\n\n"
               "The first error of a free, or None, and how many there were.")},
    {"_show_warnings", show_warnings_for, METH_O,
     PyDoc_STR("_show_warnings($module, stacklevel, /)\n--\n\n"
               "Show the warnings that the core has posted since the last call.")},
    {NULL, NULL, 0, NULL},
};
