/*
 * Scopes of the calling thread (core/scopes.h): what numpy_rmm.statistics is made of.
 *
 * A scope is known by its number, an int. Nothing here gives the interpreter up: a push
 * or pop waits for nobody.
 */
#include "python/scopes.h"

#include "core/scopes.h"
#include "python/adaptors.h"
#include "python/errors.h"
#include "python/memory_resource.h"
#include "python/state.h"

/* A resource, or for None a NULL; false: an error is set. */
static bool
through_of(struct module_state *state, PyObject *object, nrm_resource **out)
{
    *out = NULL;
    if (object == Py_None) {
        return true;
    }
    *out = memory_resource_get(state, object, "through");
    return *out != NULL;
}

static PyObject *
scope_push(PyObject *module, PyObject *through)
{
    uint64_t scope;
    nrm_resource *mr;
    struct module_state *state = module_state(module);
    if (!through_of(state, through, &mr)) {
        return NULL;
    }
    nrm_status status = nrm__scope_push(mr, &scope);
    return status == NRM_OK ? PyLong_FromUnsignedLongLong(scope)
                            : errors_raise(state, status);
}

/* LookupError: this thread has no such scope. */
static PyObject *
call_counts(PyObject *module, PyObject *number,
            nrm_status (*function)(uint64_t scope, nrm_counts *out))
{
    nrm_counts counts;
    uint64_t scope = PyLong_AsUnsignedLongLong(number);
    if (scope == (uint64_t)-1 && PyErr_Occurred()) {
        return NULL;
    }
    nrm_status status = function(scope, &counts);
    if (status == NRM_NOT_FOUND) {
        PyErr_SetString(PyExc_LookupError, nrm_last_error()->message);
        return NULL;
    }
    return status == NRM_OK ? adaptors_counts(&counts)
                            : errors_raise(module_state(module), status);
}

static PyObject *
scope_pop(PyObject *module, PyObject *number)
{
    return call_counts(module, number, nrm__scope_pop);
}

static PyObject *
scope_counts(PyObject *module, PyObject *number)
{
    return call_counts(module, number, nrm__scope_counts);
}

static PyObject *
scope_innermost(PyObject *module, PyObject *through)
{
    nrm_resource *mr;
    return through_of(module_state(module), through, &mr)
               ? PyLong_FromUnsignedLongLong(nrm__scope_innermost(mr))
               : NULL;
}

PyMethodDef scopes_functions[] = {
    {"_scope_push", scope_push, METH_O,
     PyDoc_STR("_scope_push($module, through, /)\n--\n\n"
               "Begin a scope of this thread, of what goes through a resource, or of\n"
               "everything; what names it.")},
    {"_scope_pop", scope_pop, METH_O,
     PyDoc_STR(
         "_scope_pop($module, scope, /)\n--\n\n"
         "End a scope of this thread; its counts. LookupError: it has none such.")},
    {"_scope_counts", scope_counts, METH_O,
     PyDoc_STR("_scope_counts($module, scope, /)\n--\n\n"
               "What an open scope of this thread has counted.")},
    {"_scope_innermost", scope_innermost, METH_O,
     PyDoc_STR(
         "_scope_innermost($module, through, /)\n--\n\n"
         "The innermost scope of this thread of a resource, or of everything; 0:\n"
         "there is none.")},
    {NULL, NULL, 0, NULL},
};
