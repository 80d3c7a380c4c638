/*
 * Making handlers, and setting them.
 *
 * Handlers over one resource with the same threshold and fallback share one capsule,
 * which the resource's Python object keeps: entering a scope a second time makes
 * nothing.
 */
#include "python/handler_functions.h"

#include "core/ops.h"
#include "nrm/options.h"
#include "python/args.h"
#include "python/errors.h"
#include "python/handler_type.h"
#include "python/memory_resource.h"
#include "python/signature.h"

/* ---- making handlers ---- */

/* NumPy 1.26 and 2.0 take any capsule, and then fail in every later allocation. */
static int
check_capsule(PyObject *object)
{
    if (!PyCapsule_CheckExact(object)) {
        PyErr_Format(
            PyExc_TypeError,
            "handler must be a name, a Handler, a MemoryResource, a capsule named "
            "'" HANDLER_CAPSULE_NAME "' or None, not %.100s",
            Py_TYPE(object)->tp_name);
        return -1;
    }
    if (!PyCapsule_IsValid(object, HANDLER_CAPSULE_NAME)) {
        const char *name = PyCapsule_GetName(object);
        PyErr_Format(PyExc_ValueError,
                     "a handler's capsule is named '" HANDLER_CAPSULE_NAME
                     "', not %s%s%s",
                     name != NULL ? "'" : "", name != NULL ? name : "NULL",
                     name != NULL ? "'" : "");
        return -1;
    }
    return 0;
}

static PyObject *
handler_from_capsule(PyObject *module, PyObject *capsule)
{
    return check_capsule(capsule) < 0
               ? NULL
               : handler_type_wrap(module_state(module), capsule);
}

static PyObject *
default_handler(PyObject *module, PyObject *Py_UNUSED(unused))
{
    return handler_type_wrap(module_state(module), PyDataMem_DefaultHandler);
}

/* The threshold of a handler over `mr`: given, or the option's for pinned memory. */
static int
threshold_argument(nrm_resource *mr, PyObject *value, size_t *out)
{
    if (nrm_resource_kind(mr) == NRM_KIND_PINNED) {
        *out = (size_t)nrm_option_get(NRM_OPT_PINNED_THRESHOLD);
        return arg_is_none(value) ? 0 : arg_nbytes(value, "threshold", out);
    }
    *out = 0;
    if (arg_is_none(value)) {
        return 0;
    }
    PyErr_Format(
        PyExc_ValueError,
        "threshold is for pinned handlers: below it arrays get ordinary memory; "
        "%s has %s memory",
        nrm_resource_class_name(mr), nrm_kind_name(nrm_resource_kind(mr)));
    return -1;
}

static PyObject *
cache_key(const struct handler_options *options)
{
    return Py_BuildValue("(nNO)", (Py_ssize_t)options->threshold,
                         PyLong_FromVoidPtr(options->fallback),
                         options->is_immortal ? Py_True : Py_False);
}

static PyObject *
create(struct module_state *state, const struct handler_options *options)
{
    PyObject *capsule = handler_create(state, options);
    if (capsule == NULL) {
        return NULL;
    }
    PyObject *handler = handler_type_wrap(state, capsule);
    Py_DECREF(capsule);
    return handler;
}

/* The handler that `owner` keeps for these options; when two threads make one at the
   same time, the first to enter it wins. */
static PyObject *
cached(struct module_state *state, struct resource_object *owner,
       const struct handler_options *options)
{
    PyObject *handler = NULL, *made = NULL;
    PyObject *key = cache_key(options);
    if (key == NULL) {
        return NULL;
    }
    int found = compat_dict_get(owner->handlers, key, &handler);
    if (found == 0) {
        made = create(state, options);
    }
    if (made != NULL) {
        handler = compat_dict_set_default(owner->handlers, key, made);
        Py_DECREF(made);
    }
    Py_DECREF(key);
    return handler;
}

#define MAKE_TEXT "resource, threshold=None, fallback=None, for_process=False"

static PyObject *
make_handler(PyObject *module, PyObject *const *args, Py_ssize_t n_args,
             PyObject *names)
{
    static struct signature signature = SIGNATURE("_make_handler", MAKE_TEXT);
    struct module_state *state = module_state(module);
    struct handler_options options = {NULL};
    PyObject *values[4];
    if (signature_bind(&signature, args, n_args, names, values) < 0) {
        return NULL;
    }
    options.resource = memory_resource_get(state, values[0], "resource");
    if (options.resource == NULL ||
        threshold_argument(options.resource, values[1], &options.threshold) < 0) {
        return NULL;
    }
    if (!arg_is_none(values[2])) {
        options.fallback = memory_resource_get(state, values[2], "fallback");
        if (options.fallback == NULL) {
            return NULL;
        }
    }
#ifdef Py_GIL_DISABLED
    options.is_immortal = values[3] == Py_True;
#endif
    return cached(state, (struct resource_object *)values[0], &options);
}

/* True or False where a pool was told what to do when it is full; None: it was not. */
static PyObject *
has_fallback(PyObject *module, PyObject *object)
{
    nrm_resource *mr = memory_resource_get(module_state(module), object, "resource");
    while (mr != NULL && (mr->ops->flags & NRM__OPS_ADAPTOR) && mr->upstream != NULL) {
        mr = mr->upstream;
    }
    if (mr == NULL) {
        return NULL;
    }
    if (mr->flags & (NRM__OPS_HOST_WHEN_FULL | NRM__OPS_NO_FALLBACK)) {
        return PyBool_FromLong((mr->flags & NRM__OPS_HOST_WHEN_FULL) != 0);
    }
    Py_RETURN_NONE;
}

/* ---- the context's handler ---- */

static PyObject *
get_handler(PyObject *module, PyObject *Py_UNUSED(unused))
{
    PyObject *capsule = PyDataMem_GetHandler();
    if (capsule == NULL) {
        return NULL;
    }
    PyObject *handler = handler_type_wrap(module_state(module), capsule);
    Py_DECREF(capsule);
    return handler;
}

static PyObject *
exchange_handler(PyObject *module, PyObject *object)
{
    struct module_state *state = module_state(module);
    PyObject *capsule = NULL; /* NumPy's default */
    if (object != Py_None) {
        if (Py_TYPE(object) != state->handler_type) {
            PyErr_Format(PyExc_TypeError,
                         "handler must be a Handler or None, not %.100s",
                         Py_TYPE(object)->tp_name);
            return NULL;
        }
        capsule = ((struct handler_object *)object)->capsule;
    }
    PyObject *previous = PyDataMem_SetHandler(capsule);
    if (previous == NULL) {
        return NULL;
    }
    PyObject *handler = handler_type_wrap(state, previous);
    Py_DECREF(previous);
    return handler;
}

PyMethodDef handler_functions[] = {
    {"get_handler", get_handler, METH_NOARGS,
     PyDoc_STR(
         "get_handler($module)\n--\n\n"
         "The handler of the current context: it makes the memory of new arrays.\n\n"
         "Returns\n-------\nHandler\n"
         "    Also where it is NumPy's default, or another library's.\n\n"
         "Examples\n--------\n"
         ">>> import numpy_rmm\n"
         ">>> numpy_rmm.get_handler().name\n"
         "'default_allocator'\n")},
    {"_make_handler", (PyCFunction)(void (*)(void))make_handler,
     METH_FASTCALL | METH_KEYWORDS,
     SIGNATURE_DOC("_make_handler", "$module, ", MAKE_TEXT,
                   "The handler over a resource; fallback None: none.")},
    {"_has_fallback", has_fallback, METH_O,
     PyDoc_STR("_has_fallback($module, resource, /)\n--\n\n"
               "Whether a pool was told to fall back to host memory; None: it was not "
               "told.")},
    {"_handler_from_capsule", handler_from_capsule, METH_O,
     PyDoc_STR("_handler_from_capsule($module, capsule, /)\n--\n\n"
               "A Handler over a capsule named 'mem_handler'.")},
    {"_default_handler", default_handler, METH_NOARGS,
     PyDoc_STR("_default_handler($module)\n--\n\nNumPy's own handler.")},
    {"_exchange_handler", exchange_handler, METH_O,
     PyDoc_STR("_exchange_handler($module, handler, /)\n--\n\n"
               "Set the context's handler (None: NumPy's default); the previous one.")},
    {NULL, NULL, 0, NULL},
};
