/*
 * Handler: a capsule named "mem_handler", ours, NumPy's own or anybody's.
 */
#include "python/handler_type.h"

#include <string.h>

#include "core/ops.h"
#include "python/errors.h"
#include "python/memory_resource.h"
#include "python/resource_methods.h"
#include "python/signature.h"
#include "python/statistics.h"

PyObject *
handler_type_wrap(struct module_state *state, PyObject *capsule)
{
    PyTypeObject *type = state->handler_type;
    struct handler_object *self = (struct handler_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->capsule = Py_NewRef(capsule);
    self->handler = handler_of_capsule(capsule);
    return (PyObject *)self;
}

static void
handler_dealloc(PyObject *object)
{
    struct handler_object *self = (struct handler_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(object);
    }
    Py_CLEAR(self->capsule);
    type->tp_free(object);
    Py_DECREF(type);
}

static const char *
name_of(PyObject *object)
{
    PyObject *capsule = ((struct handler_object *)object)->capsule;
    PyDataMem_Handler *handler = PyCapsule_GetPointer(capsule, HANDLER_CAPSULE_NAME);
    return handler->name;
}

static PyObject *
name_get(PyObject *object, void *Py_UNUSED(closure))
{
    const char *name = name_of(object);
    return PyUnicode_DecodeUTF8(name, (Py_ssize_t)strnlen(name, 127), "replace");
}

static struct handler *
ours(PyObject *object)
{
    return ((struct handler_object *)object)->handler;
}

static PyObject *
wrap_or_none(PyObject *object, nrm_resource *mr)
{
    struct module_state *state = type_state(Py_TYPE(object));
    if (state == NULL) {
        return NULL;
    }
    return mr != NULL ? memory_resource_wrap(state, mr) : Py_NewRef(Py_None);
}

static PyObject *
resource_get(PyObject *object, void *Py_UNUSED(closure))
{
    struct handler *handler = ours(object);
    return wrap_or_none(object, handler != NULL ? handler->resource : NULL);
}

static PyObject *
fallback_get(PyObject *object, void *Py_UNUSED(closure))
{
    struct handler *handler = ours(object);
    return wrap_or_none(object, handler != NULL ? handler->fallback : NULL);
}

static PyObject *
threshold_get(PyObject *object, void *Py_UNUSED(closure))
{
    struct handler *handler = ours(object);
    if (handler == NULL || nrm_resource_kind(handler->resource) != NRM_KIND_PINNED) {
        Py_RETURN_NONE;
    }
    return PyLong_FromSize_t(handler->threshold);
}

static PyObject *
capsule_get(PyObject *object, void *Py_UNUSED(closure))
{
    return Py_NewRef(((struct handler_object *)object)->capsule);
}

static PyObject *
failures_get(PyObject *object, void *Py_UNUSED(closure))
{
    struct handler *handler = ours(object);
    return PyLong_FromUnsignedLongLong(
        handler != NULL ? atomic_load(&handler->n_failures) : 0);
}

static PyObject *
statistics(PyObject *object, PyObject *Py_UNUSED(unused))
{
    struct handler *handler = ours(object);
    struct module_state *state = type_state(Py_TYPE(object));
    if (state == NULL || errors_begin_call() < 0) {
        return NULL;
    }
    if (handler == NULL) {
        Py_RETURN_NONE;
    }
    return statistics_of(state, handler->route);
}

#define TRIM_TEXT "keep=0"

static PyObject *
trim(PyObject *object, PyTypeObject *type, PyObject *const *args, Py_ssize_t n_args,
     PyObject *names)
{
    static struct signature signature = SIGNATURE("trim", TRIM_TEXT);
    struct handler *handler = ours(object);
    PyObject *values[1];
    if (signature_bind(&signature, args, n_args, names, values) < 0 ||
        errors_begin_call() < 0) {
        return NULL;
    }
    if (handler == NULL) {
        return PyLong_FromLong(0);
    }
    return resource_trim_to(PyType_GetModuleState(type), handler->route, values[0]);
}

/* Calls args[0] with the rest, in a copy of the current context with the handler
   set. */
static PyObject *
run(PyObject *object, PyObject *const *args, Py_ssize_t n_args, PyObject *names)
{
    if (n_args < 1) {
        PyErr_SetString(PyExc_TypeError,
                        "run() needs a function: run(fn, *args, **kwargs)");
        return NULL;
    }
    PyObject *context = PyContext_CopyCurrent();
    if (context == NULL || PyContext_Enter(context) < 0) {
        Py_XDECREF(context);
        return NULL;
    }
    PyObject *result = NULL;
    PyObject *previous =
        PyDataMem_SetHandler(((struct handler_object *)object)->capsule);
    if (previous != NULL) {
        result = PyObject_Vectorcall(args[0], args + 1, (size_t)(n_args - 1), names);
        Py_DECREF(previous);
    }
    PyObject *error = compat_take_error();
    if (PyContext_Exit(context) < 0) {
        Py_CLEAR(result);
        Py_XDECREF(error);
    }
    else {
        compat_restore_error(error);
    }
    Py_DECREF(context);
    return result;
}

static PyObject *
handler_repr(PyObject *object)
{
    return PyUnicode_FromFormat("<Handler '%.127s'>", name_of(object));
}

static PyObject *
handler_compare(PyObject *object, PyObject *other, int op)
{
    if ((op != Py_EQ && op != Py_NE) || Py_TYPE(object) != Py_TYPE(other)) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    bool equal = ((struct handler_object *)object)->capsule ==
                 ((struct handler_object *)other)->capsule;
    return PyBool_FromLong(op == Py_EQ ? equal : !equal);
}

static Py_hash_t
handler_hash(PyObject *object)
{
    Py_hash_t hash =
        (Py_hash_t)((uintptr_t)((struct handler_object *)object)->capsule >> 4);
    return hash == -1 ? -2 : hash;
}

static PyObject *
handler_reduce(PyObject *Py_UNUSED(object), PyObject *Py_UNUSED(unused))
{
    PyErr_SetString(
        PyExc_TypeError,
        "a Handler cannot be pickled or copied: it belongs to this process");
    return NULL;
}

static PyMethodDef handler_methods[] = {
    {"statistics", statistics, METH_NOARGS,
     PyDoc_STR(
         "statistics($self)\n--\n\n"
         "Counters of what this handler served.\n\n"
         "Returns\n-------\nResourceStatistics or None\n"
         "    Sizes in requested bytes. None for NumPy's default and for handlers of\n"
         "    other libraries.\n\n"
         "Examples\n--------\n"
         ">>> import numpy as np, numpy_rmm\n"
         ">>> resource = numpy_rmm.mr.HostMemoryResource()\n"
         ">>> with numpy_rmm.use_handler(resource) as handler:\n"
         "...     x = np.zeros(1000)\n"
         ">>> handler.statistics().current_bytes\n"
         "8000\n")},
    {"trim", (PyCFunction)(void (*)(void))trim,
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS,
     SIGNATURE_DOC("trim", "$self, ", TRIM_TEXT,
                   "Give unused memory of the resource back.\n\n"
                   "Parameters\n----------\n"
                   "keep : int or str\n    Bytes to keep in reserve, about.\n\n"
                   "Returns\n-------\nint\n    The bytes given back.\n")},
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL | METH_KEYWORDS,
     PyDoc_STR(
         "run($self, fn, /, *args, **kwargs)\n--\n\n"
         "Call a function with this handler, in a copy of the current context.\n\n"
         "Nothing that the function sets leaks out, however it ends.\n\n"
         "Parameters\n----------\n"
         "fn : callable\n    Called as ``fn(*args, **kwargs)``.\n\n"
         "Returns\n-------\nobject\n    What fn returned.\n\n"
         "Examples\n--------\n"
         ">>> import numpy as np, numpy_rmm\n"
         ">>> with numpy_rmm.use_handler('host') as handler:\n"
         "...     pass\n"
         ">>> x = handler.run(np.zeros, 1000)\n"
         ">>> numpy_rmm.get_handler_name(x) == handler.name\n"
         "True\n")},
    {"__reduce__", handler_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef handler_getset[] = {
    {"name", name_get, NULL, PyDoc_STR("'numpy_rmm:<resource>#<number>' for ours."),
     NULL},
    {"resource", resource_get, NULL,
     PyDoc_STR("The resource behind it; None for handlers that are not ours."), NULL},
    {"threshold", threshold_get, NULL,
     PyDoc_STR("Bytes: smaller arrays get ordinary memory. None: it has none."), NULL},
    {"fallback", fallback_get, NULL,
     PyDoc_STR("The resource that serves when the first is exhausted, or None."), NULL},
    {"capsule", capsule_get, NULL, PyDoc_STR("The capsule 'mem_handler' of NEP 49."),
     NULL},
    {"_failures", failures_get, NULL, PyDoc_STR("Requests that failed so far."), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef handler_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(struct handler_object, weakrefs),
     READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot handler_slots[] = {
    {Py_tp_doc,
     (void *)PyDoc_STR("Where the memory of NumPy arrays comes from.\n\n"
                       "Made by :func:`set_handler` and :func:`use_handler`; two "
                       "are equal when\nthey stand for the same capsule.")},
    {Py_tp_dealloc, handler_dealloc},
    {Py_tp_repr, handler_repr},
    {Py_tp_richcompare, handler_compare},
    {Py_tp_hash, handler_hash},
    {Py_tp_methods, handler_methods},
    {Py_tp_getset, handler_getset},
    {Py_tp_members, handler_members},
    {0, NULL},
};

static PyType_Spec handler_spec = {
    .name = "numpy_rmm.Handler",
    .basicsize = sizeof(struct handler_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = handler_slots,
};

int
handler_type_init(PyObject *module)
{
    struct module_state *state = module_state(module);
    state->handler_type =
        (PyTypeObject *)PyType_FromModuleAndSpec(module, &handler_spec, NULL);
    return state->handler_type == NULL ? -1
                                       : PyModule_AddType(module, state->handler_type);
}
