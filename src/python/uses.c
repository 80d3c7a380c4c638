/*
 * record_use: an array or an address, and a stream.
 *
 * An array is walked to the owner of its data, whose address is the start of a block:
 * that is found without a lock. The kinds of streams differ in what is kept of them: a
 * Stream of ours is asked later, when its use matters; any other handle only here and
 * now, while the caller vouches for it.
 */
#include "python/uses.h"

#include "python/numpy_api.h"

#include "core/known_uses.h"
#include "nrm/uses.h"
#include "python/args.h"
#include "python/array_info.h"
#include "python/cuda_query.h"
#include "python/errors.h"
#include "python/signature.h"
#include "python/stream.h"

#define RECORD_USE_TEXT "array_or_pointer, stream"

enum { MAX_NAMED = 64 };

/* What the first argument means: an address, and for messages what lies there. */
static int
address_argument(PyObject *object, const void **out)
{
    uintptr_t address;
    if (PyArray_Check(object)) {
        *out = array_info_address(object);
        return 0;
    }
    if (!PyIndex_Check(object)) {
        PyErr_Format(
            PyExc_TypeError,
            "array_or_pointer must be a numpy.ndarray or an address (int), not "
            "%.100s",
            Py_TYPE(object)->tp_name);
        return -1;
    }
    if (arg_address(object, "array_or_pointer", &address) < 0) {
        return -1;
    }
    *out = (const void *)address;
    return 0;
}

static PyObject *
raise_not_ours(PyObject *object, const void *ptr)
{
    char address[24]; /* %p shows NULL as (nil) */
    const char *kind = PyArray_Check(object)     ? array_info_kind(object)
                       : cuda_is_registered(ptr) ? "registered"
                                                 : "unknown";
    (void)snprintf(address, sizeof address, "0x%zx", (size_t)(uintptr_t)ptr);
    return PyErr_Format(
        PyExc_ValueError,
        "%s is '%s' memory that is no live block of numpy_rmm: nothing can "
        "keep it when its owner lets it go",
        address, kind);
}

static PyObject *
raise_failed(struct module_state *state, PyObject *object, const void *ptr,
             nrm_status status)
{
    if (status == NRM_NOT_OWNED) {
        return raise_not_ours(object, ptr);
    }
    if (status == NRM_NOT_SUPPORTED) {
        return PyErr_Format(PyExc_ValueError, "%s", nrm_last_error()->message);
    }
    return errors_raise(state, status);
}

/* A handle, or a stream that we know. */
static PyObject *
record_on(struct module_state *state, PyObject *object, const void *ptr,
          PyObject *stream_object)
{
    nrm_status status;
    const nrm_stream *borrowed = stream_borrow(state, stream_object);
    if (borrowed != NULL && nrm__record_use_quickly(ptr, borrowed)) {
        Py_RETURN_NONE;
    }
    if (!Py_IS_TYPE(stream_object, state->stream_type)) {
        uintptr_t handle;
        if (stream_handle_of_argument(state, stream_object, &handle) < 0) {
            return NULL;
        }
        status = nrm_record_use_on_handle(ptr, handle);
    }
    else {
        nrm_stream *stream = stream_get(state, stream_object);
        if (stream == NULL) {
            return NULL;
        }
        status = nrm_record_use(ptr, stream);
        nrm_stream_release(stream);
    }
    if (status != NRM_OK) {
        return raise_failed(state, object, ptr, status);
    }
    Py_RETURN_NONE;
}

static PyObject *
record_use(PyObject *module, PyObject *const *args, Py_ssize_t n_args, PyObject *names)
{
    static struct signature signature = SIGNATURE("record_use", RECORD_USE_TEXT);
    PyObject *values[2] = {NULL, NULL};
    const void *ptr;
    if (errors_begin_call() < 0) {
        return NULL;
    }
    if (n_args == 2 && names == NULL) {
        values[0] = args[0];
        values[1] = args[1];
    }
    else if (signature_bind(&signature, args, n_args, names, values) < 0) {
        return NULL;
    }
    if (address_argument(values[0], &ptr) < 0) {
        return NULL;
    }
    return record_on(module_state(module), values[0], ptr, values[1]);
}

/* ---- names ---- */

static PyObject *
name_of(const nrm_use *use)
{
    static const char *const constants[] = {"DEFAULT_STREAM", "LEGACY_DEFAULT_STREAM",
                                            "PER_THREAD_DEFAULT_STREAM"};
    const char *suffix = use->is_captured ? " (captured)" : "";
    if (use->stream <= NRM_STREAM_HANDLE_PER_THREAD) {
        return PyUnicode_FromFormat("%s%s", constants[use->stream], suffix);
    }
    return PyUnicode_FromFormat("%p%s", (void *)use->stream, suffix);
}

PyObject *
uses_names(const void *ptr)
{
    nrm_use uses[MAX_NAMED];
    size_t n = 0;
    if (nrm_block_uses(ptr, uses, MAX_NAMED, &n) != NRM_OK) {
        n = 0; /* it is gone */
    }
    n = n < MAX_NAMED ? n : MAX_NAMED;
    PyObject *names = PyTuple_New((Py_ssize_t)n);
    for (size_t i = 0; i < n && names != NULL; i++) {
        PyObject *name = name_of(&uses[i]);
        if (name == NULL) {
            Py_CLEAR(names);
            break;
        }
        PyTuple_SET_ITEM(names, (Py_ssize_t)i, name);
    }
    return names;
}

PyMethodDef uses_functions[] = {
    {"record_use", (PyCFunction)(void (*)(void))record_use,
     METH_FASTCALL | METH_KEYWORDS,
     SIGNATURE_DOC(
         "record_use", "$module, ", RECORD_USE_TEXT,
         "Note that work on a stream uses the memory of an array.\n\n"
         "All work submitted to `stream` so far counts. When the array dies, its memory\n"
         "is not handed out again, unmapped or unregistered before that is done. The\n"
         "default policy waits for everything that was submitted to a device's primary\n"
         "context anyway: there a use adds what that does not cover, which is other\n"
         "contexts, and graphs that are captured and replay the work. With\n"
         "``reuse=\"recorded\"`` known uses are all that memory waits for, and with\n"
         "``reuse=\"immediate\"`` nothing is noted.\n\n"
         "Parameters\n----------\n"
         "array_or_pointer : numpy.ndarray or int\n"
         "    Of any shape; views are walked to the array that owns the data. Or an\n"
         "    address inside its memory. Of ordinary host memory of a resource nothing\n"
         "    is noted.\n"
         "stream : Stream, int or object with ``__cuda_stream__``\n"
         "    A Stream that :class:`Stream` made, or a default stream, costs no call of\n"
         "    the driver and may be closed afterwards. Any other handle must be that of\n"
         "    a stream that lives; it is used in this call only. On a stream that is\n"
         "    being captured the use ends when the graph, and what was instantiated of\n"
         "    it, is destroyed.\n\n"
         "Raises\n------\n"
         "ValueError\n"
         "    For memory that is not ours, naming its kind, and for device memory,\n"
         "    which is ordered by the stream that it is freed on.\n"
         "TypeError\n    For anything that is no array, address or stream.\n"
         "CudaError\n    For a Stream that is closed, and when the driver failed.\n\n"
         "Notes\n-----\n"
         ":func:`array_info` lists the uses that are pending. A second use on the same\n"
         "stream replaces the first.\n\n"
         "Examples\n--------\n"
         ">>> import numpy as np, numpy_rmm\n"
         ">>> with numpy_rmm.use_handler('host'):\n"
         "...     x = np.zeros(1000)\n"
         ">>> numpy_rmm.record_use(x, numpy_rmm.DEFAULT_STREAM)\n"
         ">>> numpy_rmm.array_info(x).uses\n"
         "()\n")},
    {NULL, NULL, 0, NULL},
};
