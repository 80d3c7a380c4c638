/*
 * The functions of a resource as objects that the garbage collector knows.
 *
 * A function may lead to the resource that calls it: to its object, a pool on top, a
 * buffer of that. The way back runs through the core, where the collector sees nothing.
 * So the functions are held by an object of their own, which has two references: that
 * of the resource's object is an ordinary one, and for that of the core there is the
 * warden. It visits the functions as if they were its own while everything that holds
 * the resource is known and reached by Python objects that lead to the resource's
 * object (core/enclosed.h); else it does not, and to the collector they are held from
 * outside. That the warden is asked and not the resource's object makes it safe that
 * the answer changes in the middle of a collection: then a reference too many is left
 * over, never one too few.
 *
 * What a circle has of memory must go back through these functions before the collector
 * takes them apart, and the last moment for that is a finalizer, when finalizers of
 * others may still be to come that use the memory. So it takes two collections. In the
 * first the warden's finalizer only puts another warden in its place, which is too new
 * to be asked in this one: so the functions, and what they lead to, survive it, and
 * everything else dies by the usual way, with working functions. What is found again in
 * a later collection is a circle indeed, whose finalizers have all run. Then the
 * buffers are emptied and the resources over this one closed, and it is taken apart
 * when no reference is left but the object's. After a collection of everything the
 * other one follows at once.
 */
#include "python/callbacks.h"

#include <stdatomic.h>
#include <string.h>

#include "core/enclosed.h"
#include "core/hooks.h"
#include "python/device_buffer.h"
#include "python/interpreter.h"
#include "python/memory_resource.h"

struct warden {
    PyObject ob_base;     /* as PyObject_HEAD */
    struct callbacks *of; /* borrowed; NULL: it is done */
    bool is_second;
};

/* ---- once more ---- */

static atomic_bool is_told; /* stands in gc.callbacks */
static atomic_bool is_again_wanted;
static atomic_bool is_pending; /* collect_pending will run */

static void
tell_gc(struct module_state *state, const char *method)
{
    PyObject *gc = PyImport_ImportModule("gc");
    PyObject *list = gc == NULL ? NULL : PyObject_GetAttrString(gc, "callbacks");
    PyObject *result =
        list == NULL ? NULL
                     : PyObject_CallMethod(list, method, "O", state->after_collection);
    if (result == NULL) {
        PyErr_Clear(); /* somebody else tidied up there; the next collection will do */
    }
    Py_XDECREF(result);
    Py_XDECREF(list);
    Py_XDECREF(gc);
}

static void
collect_all(void)
{
    PyObject *gc = PyImport_ImportModule("gc");
    PyObject *n_found = gc == NULL ? NULL : PyObject_CallMethod(gc, "collect", NULL);
    if (n_found == NULL) {
        PyErr_WriteUnraisable(gc);
    }
    Py_XDECREF(n_found);
    Py_XDECREF(gc);
}

void
callbacks_collect_again(void)
{
    if (atomic_load(&is_again_wanted)) {
        collect_all();
        atomic_store(&is_again_wanted, false);
    }
}

static int
collect_pending(void *module)
{
    atomic_store(&is_pending, false);
    tell_gc(module_state(module), "remove");
    atomic_store(&is_told, false);
    callbacks_collect_again();
    Py_DECREF((PyObject *)module);
    return 0;
}

/* The program may be about to look for what its gc.collect() has set free. */
static PyObject *
after_collection(PyObject *module, PyObject *args)
{
    const char *phase;
    PyObject *info;
    if (!PyArg_ParseTuple(args, "sO!", &phase, &PyDict_Type, &info)) {
        return NULL;
    }
    if (strcmp(phase, "stop") != 0) {
        Py_RETURN_NONE;
    }
    PyObject *generation = PyDict_GetItemString(info, "generation"); /* borrowed */
    if (generation != NULL && PyLong_AsLong(generation) == 2) {
        atomic_store(&is_again_wanted, true);
    }
    if (!atomic_exchange(&is_pending, true)) {
        Py_INCREF(module);
        if (Py_AddPendingCall(collect_pending, module) < 0) {
            atomic_store(&is_pending, false); /* a full queue: the next collection */
            Py_DECREF(module);
        }
    }
    Py_RETURN_NONE;
}

PyMethodDef callbacks_after_collection = {
    "_after_collection", after_collection, METH_VARARGS,
    PyDoc_STR("Collects once more what the first time was only prepared.")};

/* ---- the warden ---- */

static bool
is_garbage_with_its_object(const struct callbacks *self)
{
    return self->is_closed ? nrm__resource_is_alone(&self->mr)
                           : nrm__resource_is_enclosed(&self->mr);
}

static int
warden_traverse(PyObject *object, visitproc visit, void *arg)
{
    struct callbacks *of = ((struct warden *)object)->of;
    Py_VISIT(Py_TYPE(object));
    if (of != NULL && is_garbage_with_its_object(of)) {
        Py_VISIT(of);
    }
    return 0;
}

static PyObject *
make_warden(struct module_state *state, struct callbacks *of, bool is_second)
{
    PyTypeObject *type = state->warden_type;
    struct warden *self = (struct warden *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->of = of;
        self->is_second = is_second;
    }
    return (PyObject *)self;
}

static void
set_warden(struct callbacks *self, PyObject *warden)
{
    PyObject *old = self->warden;
    if (old != NULL) {
        ((struct warden *)old)->of = NULL;
    }
    self->warden = warden;
    Py_XDECREF(old);
}

/* Without memory for another warden the functions stay. */
static void
prepare(struct callbacks *self)
{
    struct module_state *state = module_state(self->module);
    PyObject *second = make_warden(state, self, true);
    if (second == NULL) {
        PyErr_Clear();
    }
    set_warden(self, second);
    if (!atomic_exchange(&is_told, true)) {
        tell_gc(state, "append");
    }
}

static void
close_over(struct callbacks *self)
{
    nrm_resource *mr = nrm__resource_in(&self->mr);
    if (mr == NULL) {
        return;
    }
    struct module_state *state = module_state(self->module);
    self->is_closed = true;
    if (device_buffers_close(state, mr) < 0 || memory_resources_close(state, mr) < 0) {
        PyErr_Clear(); /* no memory: what is left keeps the functions */
    }
    interpreter_drop_now();
    nrm_resource_release(mr);
}

static void
warden_finalize(PyObject *object)
{
    struct callbacks *of = ((struct warden *)object)->of;
    if (of == NULL || of->deallocate == NULL) {
        return; /* who is only asked is asked no more */
    }
    if (nrm__is_exiting()) {
        set_warden(of, NULL); /* nothing is given back, nothing taken apart */
        return;
    }
    PyObject *pending = compat_take_error();
    Py_INCREF(of);
    if (((struct warden *)object)->is_second) {
        close_over(of);
    }
    else {
        prepare(of);
    }
    Py_DECREF(of);
    compat_restore_error(pending);
}

static void
warden_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyType_Slot warden_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("Speaks for a resource to the garbage collector.")},
    {Py_tp_dealloc, warden_dealloc},
    {Py_tp_traverse, warden_traverse},
    {Py_tp_finalize, warden_finalize},
    {0, NULL},
};

static PyType_Spec warden_spec = {
    .name = "numpy_rmm._core._Warden",
    .basicsize = sizeof(struct warden),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = warden_slots,
};

/* ---- the functions ---- */

static int
callbacks_traverse(PyObject *object, visitproc visit, void *arg)
{
    struct callbacks *self = (struct callbacks *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->allocate);
    Py_VISIT(self->deallocate);
    Py_VISIT(self->module);
    Py_VISIT(self->warden);
    return 0;
}

static int
callbacks_clear(PyObject *object)
{
    struct callbacks *self = (struct callbacks *)object;
    Py_CLEAR(self->allocate);
    Py_CLEAR(self->deallocate);
    return 0;
}

static void
callbacks_dealloc(PyObject *object)
{
    struct callbacks *self = (struct callbacks *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    set_warden(self, NULL);
    (void)callbacks_clear(object);
    Py_CLEAR(self->module);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyType_Slot callbacks_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("The functions that a resource calls.")},
    {Py_tp_dealloc, callbacks_dealloc},
    {Py_tp_traverse, callbacks_traverse},
    {Py_tp_clear, callbacks_clear},
    {0, NULL},
};

static PyType_Spec callbacks_spec = {
    .name = "numpy_rmm._core._Callbacks",
    .basicsize = sizeof(struct callbacks),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = callbacks_slots,
};

int
callbacks_init(PyObject *module)
{
    struct module_state *state = module_state(module);
    state->callbacks_type =
        (PyTypeObject *)PyType_FromModuleAndSpec(module, &callbacks_spec, NULL);
    state->warden_type =
        (PyTypeObject *)PyType_FromModuleAndSpec(module, &warden_spec, NULL);
    state->after_collection = PyCFunction_New(&callbacks_after_collection, module);
    return state->callbacks_type == NULL || state->warden_type == NULL ||
                   state->after_collection == NULL
               ? -1
               : 0;
}

struct callbacks *
callbacks_make(struct module_state *state, PyObject *allocate, PyObject *deallocate)
{
    PyTypeObject *type = state->callbacks_type;
    PyObject *module = PyType_GetModule(type);
    struct callbacks *self = (struct callbacks *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->allocate = Py_NewRef(allocate);
    self->deallocate = Py_XNewRef(deallocate);
    self->module = Py_NewRef(module);
    self->warden = make_warden(state, self, false);
    if (self->warden == NULL) {
        Py_CLEAR(self);
    }
    return self;
}

void
callbacks_drop(struct callbacks *self)
{
    nrm__resource_forget(&self->mr);
    interpreter_drop_later((PyObject *)self);
}
