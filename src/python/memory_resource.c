/*
 * MemoryResource: a Python object over a C resource.
 *
 * There is at most one object for each live C resource, so `registry["host"]` is one
 * object, and `pool.upstream` is the one the pool was made with. A weak table leads
 * from the C resource to its object. The object keeps its resource, the objects of its
 * upstreams, and the handlers made over it; the C resource keeps none of these.
 */
#include "python/memory_resource.h"

#include <string.h>

#include "base/bits.h"
#include "core/enclosed.h"
#include "python/adaptors.h"
#include "python/binning.h"
#include "python/constructors.h"
#include "python/cuda_async.h"
#include "python/errors.h"
#include "python/pool.h"
#include "python/resource_methods.h"

/* ---- the table of objects ---- */

/* The object of `mr` if it has one: 1 and a new reference, 0, or -1 with an error. */
static int
find_wrapper(PyObject *wrappers, PyObject *key, PyObject **out)
{
    PyObject *weakref;
    *out = NULL;
    int found = compat_dict_get(wrappers, key, &weakref);
    if (found <= 0) {
        return found;
    }
    *out = compat_weakref_get(weakref);
    Py_DECREF(weakref);
    return *out != NULL;
}

/*
 * Enters `self` into the table, unless another thread was faster: the object that is in
 * it, a new reference. NULL with an error set fails.
 */
static PyObject *
enter(PyObject *wrappers, struct resource_object *self)
{
    PyObject *key = PyLong_FromVoidPtr(self->mr);
    PyObject *weakref = PyWeakref_NewRef((PyObject *)self, NULL);
    PyObject *result = NULL;
    if (key != NULL && weakref != NULL) {
        COMPAT_BEGIN_CRITICAL_SECTION(wrappers);
        int found = find_wrapper(wrappers, key, &result);
        if (found == 0 && PyDict_SetItem(wrappers, key, weakref) == 0) {
            result = Py_NewRef((PyObject *)self);
        }
        COMPAT_END_CRITICAL_SECTION();
    }
    Py_XDECREF(key);
    Py_XDECREF(weakref);
    return result;
}

/* Takes a dying object out of the table, unless another one has its place by now. */
static void
leave(PyObject *wrappers, nrm_resource *mr)
{
    PyObject *key = PyLong_FromVoidPtr(mr);
    PyObject *other = NULL;
    if (key != NULL) {
        COMPAT_BEGIN_CRITICAL_SECTION(wrappers);
        if (find_wrapper(wrappers, key, &other) == 0 &&
            PyDict_DelItem(wrappers, key) < 0) {
            PyErr_Clear();
        }
        COMPAT_END_CRITICAL_SECTION();
    }
    PyErr_Clear();
    Py_XDECREF(other);
    Py_XDECREF(key);
}

/* ---- those that call Python functions ---- */

/* Guarded by the critical section of the table of objects. */
static struct nrm__link user_code = {&user_code, &user_code};

static void
list(struct resource_object *self)
{
    if (nrm_resource_calls_user_code(self->mr)) {
        COMPAT_BEGIN_CRITICAL_SECTION(self->wrappers);
        nrm__list_append(&user_code, &self->user_code);
        COMPAT_END_CRITICAL_SECTION();
    }
}

static void
unlist(struct resource_object *self)
{
    if (self->user_code.next != NULL) {
        COMPAT_BEGIN_CRITICAL_SECTION(self->wrappers);
        nrm__list_remove(&self->user_code);
        self->user_code.next = NULL;
        COMPAT_END_CRITICAL_SECTION();
    }
}

/* A new list, or NULL with an error set. */
static PyObject *
find_over(PyObject *wrappers, nrm_resource *mr)
{
    PyObject *found = PyList_New(0);
    COMPAT_BEGIN_CRITICAL_SECTION(wrappers);
    for (struct nrm__link *link = user_code.next; link != &user_code && found != NULL;
         link = link->next) {
        struct resource_object *self =
            NRM__CONTAINER(link, struct resource_object, user_code);
        if (nrm__resource_is_under(mr, self->mr) &&
            PyList_Append(found, (PyObject *)self) < 0) {
            Py_CLEAR(found);
        }
    }
    COMPAT_END_CRITICAL_SECTION();
    return found;
}

/* Fills a new object; steals `mr`, also on failure. */
static int
adopt(struct module_state *state, struct resource_object *self, nrm_resource *mr)
{
    nrm_resource *upstream = nrm_resource_upstream(mr);
    self->wrappers = Py_NewRef(state->wrappers);
    self->mr = mr;
    nrm__resource_add_object(mr);
    list(self);
    self->handlers = PyDict_New();
    if (self->handlers == NULL) {
        return -1;
    }
    if (upstream != NULL) {
        self->upstream = memory_resource_wrap(state, upstream);
        if (self->upstream == NULL) {
            return -1;
        }
    }
    return 0;
}

static PyTypeObject *
type_of(struct module_state *state, nrm_resource *mr)
{
    static const char *const names[] = {
#define RESOURCE(c_name, python_name, kind, signature, doc) #python_name,
#include "resources.def"
#undef RESOURCE
    };
    for (int i = 0; i < RESOURCE_N_CLASSES; i++) {
        if (strcmp(names[i], nrm_resource_class_name(mr)) == 0) {
            return state->resource_types[i];
        }
    }
    return state->resource_type;
}

PyObject *
memory_resource_wrap(struct module_state *state, nrm_resource *mr)
{
    PyObject *key = PyLong_FromVoidPtr(mr);
    PyObject *found = NULL;
    if (key == NULL || find_wrapper(state->wrappers, key, &found) != 0) {
        Py_XDECREF(key);
        return found;
    }
    Py_DECREF(key);
    PyTypeObject *type = type_of(state, mr);
    struct resource_object *self = (struct resource_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    nrm_resource_retain(mr);
    PyObject *result = adopt(state, self, mr) == 0 ? enter(state->wrappers, self)
                                                   : NULL;
    Py_DECREF(self);
    return result;
}

int
memory_resource_keep(struct resource_object *self, PyObject *other)
{
    int result = 0;
    COMPAT_BEGIN_CRITICAL_SECTION((PyObject *)self);
    if (self->kept == NULL) {
        self->kept = PyList_New(0);
    }
    if (self->kept == NULL || PyList_Append(self->kept, other) < 0) {
        result = -1;
    }
    COMPAT_END_CRITICAL_SECTION();
    return result;
}

nrm_resource *
memory_resource_get(struct module_state *state, PyObject *object, const char *name)
{
    if (!PyObject_TypeCheck(object, state->resource_type)) {
        PyErr_Format(PyExc_TypeError, "%s must be a MemoryResource, not %.100s", name,
                     Py_TYPE(object)->tp_name);
        return NULL;
    }
    struct resource_object *self = (struct resource_object *)object;
    if (self->mr == NULL) {
        PyErr_Format(PyExc_RuntimeError, "the %.100s is %s", Py_TYPE(object)->tp_name,
                     self->wrappers == NULL
                         ? "not initialised: its __init__ was not called"
                         : "closed: it was garbage, and the functions that its memory "
                           "came from have been collected");
    }
    return self->mr;
}

/* ---- life of an object ---- */

static PyObject *
base_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(keywords))
{
    PyErr_Format(
        PyExc_TypeError,
        "%.100s has no constructor: make one of the resources of numpy_rmm.mr, "
        "such as PoolMemoryResource",
        type->tp_name);
    return NULL;
}

static int
row_of(struct module_state *state, PyTypeObject *type)
{
    int row = 0;
    while (!PyType_IsSubtype(type, state->resource_types[row])) {
        row++;
    }
    return row;
}

static int
resource_init(PyObject *object, PyObject *args, PyObject *keywords)
{
    struct resource_object *self = (struct resource_object *)object;
    struct module_state *state = type_state(Py_TYPE(object));
    if (state == NULL || errors_begin_call() < 0) {
        return -1;
    }
    if (self->wrappers != NULL) {
        PyErr_Format(PyExc_RuntimeError, "the %.100s is initialised already",
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    int row = row_of(state, Py_TYPE(object));
    void *callbacks = NULL;
    nrm_resource *mr = constructor_call(state, row, args, keywords, &callbacks);
    if (mr == NULL) {
        return -1;
    }
    self->callbacks = Py_XNewRef((PyObject *)callbacks);
    PyObject *entered = adopt(state, self, mr) == 0 ? enter(state->wrappers, self)
                                                    : NULL;
    Py_XDECREF(entered);
    return entered == NULL ? -1 : 0;
}

/*
 * Gives up the C resource. It may die here, and with it give memory back to the Python
 * functions of a callback resource: what they raise has nowhere to go.
 */
static void
release(struct resource_object *self)
{
    nrm_resource *mr = self->mr;
    if (mr == NULL) {
        return;
    }
    PyObject *pending = compat_take_error();
    unlist(self);
    self->mr = NULL;
    leave(self->wrappers, mr);
    nrm__resource_remove_object(mr);
    nrm_resource_release(mr);
    if (PyErr_Occurred()) {
        PyErr_WriteUnraisable(NULL);
    }
    compat_restore_error(pending);
}

static int
resource_traverse(PyObject *object, visitproc visit, void *arg)
{
    struct resource_object *self = (struct resource_object *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->upstream);
    Py_VISIT(self->handlers);
    Py_VISIT(self->kept);
    Py_VISIT(self->callbacks);
    Py_VISIT(self->wrappers);
    return 0;
}

/* The upstream stays as long as this one: no circle is of resources alone, and what
   leads back to one (functions, a dictionary, a list) has a clear of its own. */
static int
resource_clear(PyObject *object)
{
    struct resource_object *self = (struct resource_object *)object;
    Py_CLEAR(self->handlers);
    return 0;
}

int
memory_resources_close(struct module_state *state, nrm_resource *mr)
{
    PyObject *found = find_over(state->wrappers, mr);
    for (Py_ssize_t i = 0; found != NULL && i < PyList_GET_SIZE(found); i++) {
        release((struct resource_object *)PyList_GET_ITEM(found, i));
    }
    Py_XDECREF(found);
    return found != NULL ? 0 : -1;
}

static void
resource_dealloc(PyObject *object)
{
    struct resource_object *self = (struct resource_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(object);
    }
    Py_CLEAR(self->handlers);
    release(self);
    Py_CLEAR(self->kept);
    Py_CLEAR(self->callbacks);
    Py_CLEAR(self->upstream);
    Py_CLEAR(self->wrappers);
    interpreter_drop_now();
    type->tp_free(object);
    Py_DECREF(type);
}

/* ---- types ---- */

static PyMemberDef resource_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(struct resource_object, weakrefs),
     READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

#define BASE_DOC                                                                       \
    "Anything that allocates and deallocates: a source, a pool or an adaptor.\n\n"     \
    "The base class of the resources of :mod:`numpy_rmm.mr`; it has no constructor.\n" \
    "Resources are thread-safe, and live as long as any block of theirs."

static PyType_Slot base_slots[] = {
    {Py_tp_doc, (void *)BASE_DOC},     {Py_tp_new, base_new},
    {Py_tp_dealloc, resource_dealloc}, {Py_tp_traverse, resource_traverse},
    {Py_tp_clear, resource_clear},     {Py_tp_repr, resource_repr},
    {Py_tp_methods, resource_methods}, {Py_tp_getset, resource_getset},
    {Py_tp_members, resource_members}, {0, NULL},
};

static PyType_Spec base_spec = {
    .name = "numpy_rmm.mr.MemoryResource",
    .basicsize = sizeof(struct resource_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = base_slots,
};

/* What draws on another resource has a class in common, as in RMM. */
#define UPSTREAM_DOC                                                                   \
    "A resource that draws on another one: a pool or an adaptor.\n\n"                  \
    "The base class of these, for isinstance; it has no constructor."

static PyType_Slot upstream_slots[] = {
    {Py_tp_doc, (void *)UPSTREAM_DOC},
    {Py_tp_new, base_new},
    {0, NULL},
};

static PyType_Spec upstream_spec = {
    .name = "numpy_rmm.mr.UpstreamResourceAdaptor",
    .basicsize = sizeof(struct resource_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = upstream_slots,
};

#define RESOURCE(c_name, python_name, kind, signature, doc)                            \
    {"numpy_rmm.mr." #python_name, #python_name "(" signature ")\n--\n\n" doc, kind,   \
     #c_name, signature},

static const struct row {
    const char *full_name;
    const char *doc;
    const char *kind;
    const char *c_name;
    const char *signature;
} rows[RESOURCE_N_CLASSES] = {
#include "resources.def"
};
#undef RESOURCE

/* What some classes have besides the methods of all resources. */
static const struct own {
    PyMethodDef *methods;
    PyGetSetDef *getset;
} own[RESOURCE_N_CLASSES] = {
    [RESOURCE_statistics] = {statistics_adaptor_methods, statistics_adaptor_getset},
    [RESOURCE_limiting] = {limiting_adaptor_methods, NULL},
    [RESOURCE_tracking] = {tracking_adaptor_methods, NULL},
    [RESOURCE_logging] = {logging_adaptor_methods, NULL},
    [RESOURCE_binning] = {binning_methods, binning_getset},
    [RESOURCE_pool] = {pool_methods, NULL},
    [RESOURCE_cuda_async] = {cuda_async_methods, NULL},
    [RESOURCE_cuda_async_view] = {cuda_async_methods, NULL},
    [RESOURCE_cuda_async_managed] = {cuda_async_methods, NULL},
};

static PyTypeObject *
base_of(const struct module_state *state, int row)
{
    static const char first[] = "upstream_mr";
    bool has_upstream = strncmp(rows[row].signature, first, strlen(first)) == 0;
    return has_upstream ? state->upstream_type : state->resource_type;
}

static PyTypeObject *
make_type(PyObject *module, PyTypeObject *base, int row)
{
    PyType_Slot slots[6] = {
        {Py_tp_doc, (void *)rows[row].doc},
        {Py_tp_new, PyType_GenericNew},
        {Py_tp_init, resource_init},
    };
    int n = 3;
    if (own[row].methods != NULL) {
        slots[n++] = (PyType_Slot){Py_tp_methods, own[row].methods};
    }
    if (own[row].getset != NULL) {
        slots[n++] = (PyType_Slot){Py_tp_getset, own[row].getset};
    }
    PyType_Spec spec = {
        .name = rows[row].full_name,
        .basicsize = sizeof(struct resource_object),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
        .slots = slots,
    };
    PyObject *type = PyType_FromModuleAndSpec(module, &spec, (PyObject *)base);
    if (type != NULL && PyModule_AddType(module, (PyTypeObject *)type) < 0) {
        Py_CLEAR(type);
    }
    return (PyTypeObject *)type;
}

int
memory_resource_init(PyObject *module)
{
    struct module_state *state = module_state(module);
    state->wrappers = PyDict_New();
    state->resource_type =
        (PyTypeObject *)PyType_FromModuleAndSpec(module, &base_spec, NULL);
    if (state->wrappers == NULL || state->resource_type == NULL ||
        PyModule_AddType(module, state->resource_type) < 0) {
        return -1;
    }
    state->upstream_type = (PyTypeObject *)PyType_FromModuleAndSpec(
        module, &upstream_spec, (PyObject *)state->resource_type);
    if (state->upstream_type == NULL ||
        PyModule_AddType(module, state->upstream_type) < 0) {
        return -1;
    }
    for (int i = 0; i < RESOURCE_N_CLASSES; i++) {
        state->resource_types[i] = make_type(module, base_of(state, i), i);
        if (state->resource_types[i] == NULL) {
            return -1;
        }
    }
    return 0;
}

/* ---- the rows, for tests and documentation ---- */

static PyObject *
resource_rows(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    PyObject *list = PyList_New(0);
    for (int i = 0; list != NULL && i < RESOURCE_N_CLASSES; i++) {
        PyObject *item = Py_BuildValue("(ssss)", rows[i].c_name,
                                       strrchr(rows[i].full_name, '.') + 1,
                                       rows[i].kind, rows[i].signature);
        if (item == NULL || PyList_Append(list, item) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(item);
    }
    return list;
}

PyMethodDef memory_resource_functions[] = {
    {"_resource_rows", resource_rows, METH_NOARGS,
     PyDoc_STR("_resource_rows($module)\n--\n\n"
               "The rows of resources.def: (C name, Python name, kind, signature).")},
    {NULL, NULL, 0, NULL},
};
