/*
 * pin: the whole buffer that an array is a part of, page-locked where it is.
 *
 * The owner is kept from moving its memory as well as alive: a memoryview keeps a
 * bytearray or mmap from being resized or closed, and a weak reference keeps an array
 * from being resized, also with refcheck=False. Both stay until the memory is unlocked,
 * which may be later than close(). The owner stands in the core, owned by the nrm_pin;
 * while the pin is open, only this object's traversal can reach it, so cycles through
 * it are found.
 */
#include "python/pin.h"

#include "core/pin.h"
#include "nrm/options.h"
#include "nrm/sources.h"
#include "python/errors.h"
#include "python/interpreter.h"
#include "python/numpy_api.h"
#include "python/whole_buffer.h"

struct item {
    char *ptr;
    size_t nbytes;
    PyObject *owner; /* borrowed from the pin */
    nrm_pin *pin;
};

struct pin_object {
    PyObject ob_base; /* as PyObject_HEAD */
    PyObject *weakrefs;
    struct item *items; /* NULL: closed */
    Py_ssize_t n_items;
};

static struct pin_object *
pin_of(PyObject *object)
{
    return (struct pin_object *)object;
}

static int
check_type(PyObject *object)
{
    if (!PyArray_CheckExact(object) &&
        PyObject_HasAttrString(object, "__cuda_array_interface__")) {
        PyErr_Format(PyExc_TypeError,
                     "%.100s has memory that a device uses already: pin() is for host "
                     "memory",
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    if (PyArray_Check(object) || PyObject_CheckBuffer(object)) {
        return 0;
    }
    PyErr_Format(PyExc_TypeError,
                 "pin() takes numpy.ndarrays and objects with the buffer protocol, not "
                 "%.100s",
                 Py_TYPE(object)->tp_name);
    return -1;
}

/* ---- locking ---- */

/* Called by the core when the memory is unlocked. */
static void
drop_owner(void *owner)
{
    if (interpreter_is_usable()) {
        Py_DECREF((PyObject *)owner);
    }
    else {
        interpreter_drop_later(owner);
    }
}

/* Without effect on a buffer that this object has locked already. */
static int
lock(struct module_state *state, struct pin_object *self,
     const struct whole_buffer *buffer)
{
    for (Py_ssize_t i = 0; i < self->n_items; i++) {
        if (self->items[i].ptr == buffer->ptr &&
            self->items[i].nbytes == buffer->nbytes) {
            return 0;
        }
    }
    struct item *item = &self->items[self->n_items];
    nrm_pin_options options = NRM_OPTIONS(nrm_pin_options);
    options.read_only = buffer->read_only;
    options.is_private = buffer->is_private;
    options.keepalive = Py_NewRef(buffer->owner);
    options.drop = drop_owner;
    nrm_pin *pin = NULL;
    nrm_status status = nrm_pin_create(buffer->ptr, buffer->nbytes, &options, &pin);
    if (status != NRM_OK) {
        Py_DECREF(buffer->owner);
        (void)errors_raise(state, status);
        return -1;
    }
    *item = (struct item){buffer->ptr, buffer->nbytes, buffer->owner, pin};
    self->n_items++;
    return 0;
}

static int
lock_all(struct module_state *state, struct pin_object *self, PyObject *objects)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(objects); i++) {
        struct whole_buffer buffer;
        PyObject *object = PyTuple_GET_ITEM(objects, i);
        if (check_type(object) < 0 || whole_buffer_of(object, &buffer) < 0) {
            return -1;
        }
        int result = lock(state, self, &buffer);
        Py_DECREF(buffer.owner);
        if (result < 0) {
            return -1;
        }
    }
    return 0;
}

/* Ctrl-C, and what else a handler of a signal raises, ends a wait. */
static bool
is_uninterrupted(void)
{
    return !PyErr_Occurred() && PyErr_CheckSignals() == 0;
}

/* Without effect the second time. Other threads run meanwhile. */
static void
unlock_all(struct pin_object *self, bool (*ask)(void))
{
    struct item *items;
    Py_ssize_t n_items;
    COMPAT_BEGIN_CRITICAL_SECTION((PyObject *)self);
    items = self->items;
    n_items = self->n_items;
    self->items = NULL;
    self->n_items = 0;
    COMPAT_END_CRITICAL_SECTION();
    for (Py_ssize_t i = 0; i < n_items; i++) {
        nrm__pin_destroy_while(items[i].pin, ask);
    }
    PyMem_Free(items);
}

/* -1: a handler of a signal has raised; the memory is unlocked when the GPU is done. */
static int
unlock_until_interrupted(struct pin_object *self)
{
    unlock_all(self, is_uninterrupted);
    return PyErr_Occurred() ? -1 : 0;
}

/* ---- the type ---- */

static int
pin_traverse(PyObject *object, visitproc visit, void *arg)
{
    struct pin_object *self = pin_of(object);
    Py_VISIT(Py_TYPE(object));
    for (Py_ssize_t i = 0; i < self->n_items; i++) {
        Py_VISIT(self->items[i].owner);
    }
    return 0;
}

static int
pin_clear(PyObject *object)
{
    unlock_all(pin_of(object), NULL);
    return 0;
}

static void
pin_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject *pending = compat_take_error();
    PyObject_GC_UnTrack(object);
    if (pin_of(object)->weakrefs != NULL) {
        PyObject_ClearWeakRefs(object);
    }
    unlock_all(pin_of(object), NULL);
    compat_restore_error(pending);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyObject *
pin_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    struct module_state *state = type_state(type);
    Py_ssize_t n = PyTuple_GET_SIZE(args);
    if (state == NULL || errors_begin_call() < 0) {
        return NULL;
    }
    if (n == 0 || (keywords != NULL && PyDict_GET_SIZE(keywords) != 0)) {
        PyErr_SetString(PyExc_TypeError, n == 0 ? "pin() needs an array at least"
                                                : "pin() takes no keyword arguments");
        return NULL;
    }
    PyObject *object = type->tp_alloc(type, 0);
    if (object == NULL) {
        return NULL;
    }
    pin_of(object)->items = PyMem_Calloc((size_t)n, sizeof(struct item));
    if (pin_of(object)->items == NULL) {
        Py_DECREF(object);
        return PyErr_NoMemory();
    }
    if (lock_all(state, pin_of(object), args) < 0) {
        Py_DECREF(object);
        return NULL;
    }
    return object;
}

static PyObject *
pin_close(PyObject *object, PyObject *Py_UNUSED(unused))
{
    if (unlock_until_interrupted(pin_of(object)) < 0 || errors_begin_call() < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
pin_enter(PyObject *object, PyObject *Py_UNUSED(unused))
{
    if (pin_of(object)->items == NULL) {
        PyErr_SetString(PyExc_ValueError, "the pin is closed");
        return NULL;
    }
    return Py_NewRef(object);
}

static PyObject *
pin_exit(PyObject *object, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(n))
{
    if (unlock_until_interrupted(pin_of(object)) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* False: closed. */
static bool
count(PyObject *object, Py_ssize_t *out_n, size_t *out_nbytes)
{
    const struct pin_object *self = pin_of(object);
    bool is_open;
    *out_nbytes = 0;
    COMPAT_BEGIN_CRITICAL_SECTION(object);
    is_open = self->items != NULL;
    *out_n = self->n_items;
    for (Py_ssize_t i = 0; i < self->n_items; i++) {
        *out_nbytes += self->items[i].nbytes;
    }
    COMPAT_END_CRITICAL_SECTION();
    return is_open;
}

static PyObject *
closed_get(PyObject *object, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(pin_of(object)->items == NULL);
}

static PyObject *
nbytes_get(PyObject *object, void *Py_UNUSED(closure))
{
    Py_ssize_t n;
    size_t nbytes;
    (void)count(object, &n, &nbytes);
    return PyLong_FromSize_t(nbytes);
}

static PyObject *
pin_repr(PyObject *object)
{
    char text[32];
    Py_ssize_t n;
    size_t nbytes;
    if (!count(object, &n, &nbytes)) {
        return PyUnicode_FromString("<pin, closed>");
    }
    nrm_format_nbytes(nbytes, text, sizeof text);
    return PyUnicode_FromFormat("<pin of %zd buffer%s, %s>", n, n == 1 ? "" : "s",
                                text);
}

static PyObject *
pin_reduce(PyObject *Py_UNUSED(object), PyObject *Py_UNUSED(unused))
{
    PyErr_SetString(PyExc_TypeError,
                    "a pin cannot be pickled or copied: it belongs to this process");
    return NULL;
}

static PyMethodDef pin_methods[] = {
    {"close", pin_close, METH_NOARGS,
     PyDoc_STR(
         "close($self)\n--\n\n"
         "Unlock the memory; without effect on a pin that is closed.\n\n"
         "The last pin of a buffer waits until all work that was submitted to any\n"
         "device before is done; an exception that a handler of a signal raises, as\n"
         "Ctrl-C does, ends the wait. In a stream's host function, and inside\n"
         ":func:`stream_capture`, it does not wait. Then the memory is unlocked later,\n"
         "by the next call that allocates page-locked memory, or by :func:`trim`,\n"
         "and kept alive until then.\n")},
    {"__enter__", pin_enter, METH_NOARGS, PyDoc_STR("__enter__($self)\n--\n\nItself.")},
    {"__exit__", (PyCFunction)(void (*)(void))pin_exit, METH_FASTCALL,
     PyDoc_STR("__exit__($self, /, *exception)\n--\n\nClose; an exception goes on.")},
    {"__reduce__", pin_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef pin_getset[] = {
    {"closed", closed_get, NULL, PyDoc_STR("Whether close() was called."), NULL},
    {"nbytes", nbytes_get, NULL,
     PyDoc_STR("Bytes of the buffers, each counted once; 0 of a closed pin."), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef pin_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(struct pin_object, weakrefs), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot pin_slots[] = {
    {Py_tp_doc,
     (void *)PyDoc_STR(
         "pin(*arrays)\n--\n\n"
         "Page-lock the memory of arrays where it is, until close() or the end of a\n"
         "``with`` block.\n\n"
         "Copies to and from a device then run at full rate and asynchronously, as\n"
         "with arrays of :func:`empty_pinned`, and without a copy of the data on the\n"
         "host. The whole buffer that an array is a part of is locked, to the byte.\n"
         "Pins of one buffer are counted; memory that numpy_rmm has page-locked\n"
         "already, and arrays without bytes, need nothing. Meanwhile the buffer is\n"
         "kept alive, and cannot be resized or closed.\n\n"
         "Parameters\n----------\n"
         "*arrays : numpy.ndarray or object with the buffer protocol\n"
         "    Of any shape, also views, memory maps, ``bytearray``, ``mmap``,\n"
         "    ``memoryview``, the ``buf`` of shared memory. What can only be read is\n"
         "    locked for reading, where the device can do that.\n\n"
         "Attributes\n----------\n"
         "closed : bool\n"
         "nbytes : int\n    Bytes of the buffers.\n\n"
         "Raises\n------\n"
         "TypeError\n    For arrays of objects, memory of a device, and anything else.\n"
         "ValueError\n"
         "    When a part is page-locked already by somebody else (with both ranges,\n"
         "    in bytes), for managed memory, and for a writable mapping of a file:\n"
         "    map it with mode 'r' or 'c', or use a copy.\n"
         "NotImplementedError\n    When the device cannot lock such memory.\n"
         "OutOfMemoryError, CudaError, CudaUnavailableError\n"
         "    When the driver refuses, or there is none.\n\n"
         "Examples\n--------\n"
         ">>> import numpy as np, numpy_rmm\n"
         ">>> from numpy_rmm.testing import simulate_cuda\n"
         ">>> x = np.ones((1000, 1000))\n"
         ">>> with simulate_cuda(), numpy_rmm.pin(x[10:20]) as pinned:\n"
         "...     pinned.nbytes, numpy_rmm.memory_kind(x)\n"
         "(8000000, 'registered')\n")},
    {Py_tp_new, pin_new},
    {Py_tp_dealloc, pin_dealloc},
    {Py_tp_traverse, pin_traverse},
    {Py_tp_clear, pin_clear},
    {Py_tp_repr, pin_repr},
    {Py_tp_methods, pin_methods},
    {Py_tp_getset, pin_getset},
    {Py_tp_members, pin_members},
    {0, NULL},
};

static PyType_Spec pin_spec = {
    .name = "numpy_rmm.pin",
    .basicsize = sizeof(struct pin_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = pin_slots,
};

int
pin_init(PyObject *module)
{
    struct module_state *state = module_state(module);
    state->pin_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &pin_spec, NULL);
    return state->pin_type == NULL ? -1 : PyModule_AddType(module, state->pin_type);
}
