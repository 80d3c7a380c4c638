/*
 * What adaptors for statistics, limits, tracking and logs can be asked, as RMM spells
 * it.
 *
 * Counts come as a numpy_rmm.Statistics, which is written in Python so that it is made
 * with keywords and compared by value; its module is imported when counts are asked
 * for.
 */
#include "python/adaptors.h"

#include "core/hooks.h"
#include "core/log.h"
#include "nrm/adaptors.h"
#include "python/errors.h"
#include "python/memory_resource.h"
#include "python/state.h"

/* What every method starts with: the state and the resource, or an error. */
static nrm_resource *
begin(PyObject *object, struct module_state **out_state)
{
    *out_state = type_state(Py_TYPE(object));
    if (*out_state == NULL || errors_begin_call() < 0) {
        return NULL;
    }
    return memory_resource_get(*out_state, object, "self");
}

/* ---- statistics ---- */

PyObject *
adaptors_counts(const nrm_counts *counts)
{
    PyObject *module = PyImport_ImportModule("numpy_rmm._statistics");
    if (module == NULL) {
        return NULL;
    }
    PyObject *result = PyObject_CallMethod(
        module, "Statistics", "LLLLLL", (long long)counts->current_bytes,
        (long long)counts->current_count, (long long)counts->peak_bytes,
        (long long)counts->peak_count, (long long)counts->total_bytes,
        (long long)counts->total_count);
    Py_DECREF(module);
    return result;
}

static PyObject *
call_counts(PyObject *object, nrm_status (*function)(nrm_resource *, nrm_counts *))
{
    struct module_state *state;
    nrm_counts counts;
    nrm_resource *mr = begin(object, &state);
    if (mr == NULL) {
        return NULL;
    }
    nrm_status status = function(mr, &counts);
    if (status == NRM_NOT_FOUND) {
        PyErr_SetString(PyExc_IndexError, nrm_last_error()->message);
        return NULL;
    }
    return status == NRM_OK ? adaptors_counts(&counts) : errors_raise(state, status);
}

static PyObject *
allocation_counts_get(PyObject *object, void *Py_UNUSED(closure))
{
    return call_counts(object, nrm_statistics_counts);
}

static PyObject *
push_counters(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return call_counts(object, nrm_statistics_push);
}

static PyObject *
pop_counters(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return call_counts(object, nrm_statistics_pop);
}

PyGetSetDef statistics_adaptor_getset[] = {
    {"allocation_counts", allocation_counts_get, NULL,
     PyDoc_STR("The counts of the innermost scope so far, a Statistics."), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyMethodDef statistics_adaptor_methods[] = {
    {"push_counters", push_counters, METH_NOARGS,
     PyDoc_STR("push_counters($self)\n--\n\n"
               "Begin a scope, which counts from zero.\n\n"
               "Returns\n-------\nStatistics\n"
               "    What the scope around it has counted until now.\n")},
    {"pop_counters", pop_counters, METH_NOARGS,
     PyDoc_STR("pop_counters($self)\n--\n\n"
               "End the innermost scope; it becomes part of the one around it.\n\n"
               "Returns\n-------\nStatistics\n"
               "    What it has counted. Blocks from before it that were freed in it\n"
               "    make ``current_bytes`` and ``current_count`` negative.\n\n"
               "Raises\n------\nIndexError\n"
               "    When no push is left to undo.\n")},
    {NULL, NULL, 0, NULL},
};

/* ---- limiting ---- */

static PyObject *
limiting_number(PyObject *object, bool is_limit)
{
    struct module_state *state;
    size_t allocated, limit;
    nrm_resource *mr = begin(object, &state);
    if (mr == NULL) {
        return NULL;
    }
    nrm_status status = nrm_limiting_get(mr, &allocated, &limit);
    if (status != NRM_OK) {
        return errors_raise(state, status);
    }
    return PyLong_FromSize_t(is_limit ? limit : allocated);
}

static PyObject *
get_allocated_bytes(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return limiting_number(object, false);
}

static PyObject *
get_allocation_limit(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return limiting_number(object, true);
}

PyMethodDef limiting_adaptor_methods[] = {
    {"get_allocated_bytes", get_allocated_bytes, METH_NOARGS,
     PyDoc_STR("get_allocated_bytes($self)\n--\n\n"
               "Bytes that count against the limit now: of each block its size,\n"
               "rounded up to the alignment.")},
    {"get_allocation_limit", get_allocation_limit, METH_NOARGS,
     PyDoc_STR("get_allocation_limit($self)\n--\n\n"
               "Bytes that may be in use at most.")},
    {NULL, NULL, 0, NULL},
};

/* ---- tracking ---- */

static PyObject *
get_tracked_bytes(PyObject *object, PyObject *Py_UNUSED(unused))
{
    struct module_state *state;
    size_t nbytes;
    nrm_resource *mr = begin(object, &state);
    if (mr == NULL) {
        return NULL;
    }
    nrm_status status = nrm_tracking_get_allocated(mr, &nbytes);
    return status == NRM_OK ? PyLong_FromSize_t(nbytes) : errors_raise(state, status);
}

/* A string that the caller frees with PyMem_RawFree. Others may allocate meanwhile:
   then once more. */
static nrm_status
describe(nrm_resource *mr, char **out)
{
    size_t size = 0, needed = 1;
    char *text = NULL;
    nrm_status status = NRM_OK;
    while (status == NRM_OK && needed > size) {
        PyMem_RawFree(text);
        size = needed + needed / 8;
        text = PyMem_RawMalloc(size);
        status = text == NULL ? NRM_OUT_OF_MEMORY
                              : nrm_tracking_describe(mr, text, size, &needed);
    }
    if (status != NRM_OK) {
        PyMem_RawFree(text);
        return status;
    }
    *out = text;
    return NRM_OK;
}

static PyObject *
get_outstanding_allocations_str(PyObject *object, PyObject *Py_UNUSED(unused))
{
    struct module_state *state;
    char *text;
    nrm_resource *mr = begin(object, &state);
    if (mr == NULL) {
        return NULL;
    }
    nrm_status status = describe(mr, &text);
    if (status != NRM_OK) {
        return errors_raise(state, status);
    }
    PyObject *result =
        PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "backslashreplace");
    PyMem_RawFree(text);
    return result;
}

static PyObject *
log_outstanding_allocations(PyObject *object, PyObject *unused)
{
    PyObject *text = get_outstanding_allocations_str(object, unused);
    PyObject *module = text == NULL ? NULL
                                    : PyImport_ImportModule("numpy_rmm._logging");
    PyObject *result = module == NULL
                           ? NULL
                           : PyObject_CallMethod(module, "_log_outstanding", "O", text);
    Py_XDECREF(module);
    Py_XDECREF(text);
    return result;
}

PyMethodDef tracking_adaptor_methods[] = {
    {"get_allocated_bytes", get_tracked_bytes, METH_NOARGS,
     PyDoc_STR("get_allocated_bytes($self)\n--\n\n"
               "Bytes of the blocks that live through it.")},
    {"get_outstanding_allocations_str", get_outstanding_allocations_str, METH_NOARGS,
     PyDoc_STR(
         "get_outstanding_allocations_str($self)\n--\n\n"
         "The blocks that live through it.\n\n"
         "Returns\n-------\nstr\n"
         "    A line for each, with its address and bytes, and with\n"
         "    ``capture_stacks`` the lines of the Python program that asked for\n"
         "    it and the functions of the C stack below. '' when there is none.\n")},
    {"log_outstanding_allocations", log_outstanding_allocations, METH_NOARGS,
     PyDoc_STR("log_outstanding_allocations($self)\n--\n\n"
               "Give the same text to the logger 'numpy_rmm', at level DEBUG.")},
    {NULL, NULL, 0, NULL},
};

/* ---- logging ---- */

static PyObject *
logging_flush(PyObject *object, PyObject *Py_UNUSED(unused))
{
    struct module_state *state;
    nrm_resource *mr = begin(object, &state);
    if (mr == NULL) {
        return NULL;
    }
    void *token = nrm__detach();
    nrm_status status = nrm_logging_flush(mr);
    nrm__attach(token);
    if (status != NRM_OK) {
        return errors_raise(state, status);
    }
    Py_RETURN_NONE;
}

static PyObject *
get_file_name(PyObject *object, PyObject *Py_UNUSED(unused))
{
    struct module_state *state;
    char path[4096];
    nrm_resource *mr = begin(object, &state);
    if (mr == NULL) {
        return NULL;
    }
    nrm_status status = nrm_logging_get_path(mr, path, sizeof path);
    return status == NRM_OK ? PyUnicode_DecodeFSDefault(path)
                            : errors_raise(state, status);
}

PyMethodDef logging_adaptor_methods[] = {
    {"flush", logging_flush, METH_NOARGS,
     PyDoc_STR("flush($self)\n--\n\n"
               "Write the rows of all that was done before.\n\n"
               "Raises\n------\nOSError\n"
               "    When rows were lost since the last call that said so: they are\n"
               "    counted in ``statistics().errors`` too.\n")},
    {"get_file_name", get_file_name, METH_NOARGS,
     PyDoc_STR("get_file_name($self)\n--\n\n"
               "Name of the file, with that of the device in it.")},
    {NULL, NULL, 0, NULL},
};

static PyObject *
log_drain(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    void *token = nrm__detach();
    nrm__log_drain();
    nrm__attach(token);
    Py_RETURN_NONE;
}

PyMethodDef adaptor_functions[] = {
    {"_log_drain", log_drain, METH_NOARGS,
     PyDoc_STR("_log_drain($module)\n--\n\nWrite the rows of all logs.")},
    {NULL, NULL, 0, NULL},
};
