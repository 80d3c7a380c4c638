/*
 * The methods of StatisticsResourceAdaptor and LimitingResourceAdaptor, as RMM spells
 * them.
 *
 * Counts come as a numpy_rmm.Statistics, which is written in Python so that it is made
 * with keywords and compared by value; its module is imported when counts are asked for.
 */
#include "python/adaptors.h"

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

static PyObject *
counts_object(const nrm_counts *counts)
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
    return status == NRM_OK ? counts_object(&counts) : errors_raise(state, status);
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
