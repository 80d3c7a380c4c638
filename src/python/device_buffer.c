/*
 * DeviceBuffer: how one is made and what becomes of it.
 *
 * Made and dropped millions of times, so the type is called by vectorcall, the current
 * resource is found by one look-up in a dictionary, and nothing is made that is not
 * asked for: neither the Stream nor the dictionary of the array interface.
 *
 * The collector clears no more than that dictionary. The resource must be there when
 * the memory goes back, and whatever could lead from it back to the buffer (an
 * instance's dictionary, a list) has a clear of its own.
 */
#include "python/device_buffer.h"

#include <string.h>

#include "base/assert.h"
#include "base/bits.h"
#include "core/enclosed.h"
#include "python/args.h"
#include "python/byte_copy.h"
#include "python/errors.h"
#include "python/memory_resource.h"
#include "python/pending.h"
#include "python/signature.h"

#define BUFFER_TEXT "*, ptr=0, size=0, stream=..., mr=None"

/* ---- the objects of buffers that died ---- */

/*
 * A few are kept for the next ones, which saves the interpreter's allocation and half
 * of the collector's book-keeping. Without the GIL each thread of the interpreter has
 * its own store of memory, and this would be one for all.
 */
static PyObject *
take_spare(struct module_state *state, PyTypeObject *type)
{
    PyObject *object = NULL;
#ifndef Py_GIL_DISABLED
    if (type == state->device_buffer_type && state->spare_buffers.n > 0) {
        object = state->spare_buffers.objects[--state->spare_buffers.n];
        memset((char *)object + sizeof(PyObject), 0,
               sizeof(struct device_buffer) - sizeof(PyObject));
        (void)PyObject_Init(object, type);
        PyObject_GC_Track(object);
    }
#endif
    return object;
}

/* True: the memory of a dead object is kept. Of subclasses, whose types die, none
   is. */
static bool
keep_spare(PyTypeObject *type, PyObject *object)
{
#ifndef Py_GIL_DISABLED
    struct module_state *state = PyType_HasFeature(type, Py_TPFLAGS_IMMUTABLETYPE)
                                     ? PyType_GetModuleState(type)
                                     : NULL;
    if (state != NULL && type == state->device_buffer_type &&
        state->spare_buffers.n < N_SPARE_BUFFERS) {
        state->spare_buffers.objects[state->spare_buffers.n++] = object;
        return true;
    }
#endif
    return false;
}

void
device_buffer_forget_spares(struct module_state *state)
{
    while (state->spare_buffers.n > 0) {
        PyObject_GC_Del(state->spare_buffers.objects[--state->spare_buffers.n]);
    }
}

/* ---- those whose resource calls Python functions ---- */

/* Guarded by the critical section of the table of resources. */
static struct nrm__link user_code = {&user_code, &user_code};

static PyObject *
table_of(const struct device_buffer *self)
{
    return ((struct resource_object *)self->memory.mr_object)->wrappers;
}

static void
list(struct device_buffer *self)
{
    COMPAT_BEGIN_CRITICAL_SECTION(table_of(self));
    nrm__list_append(&user_code, &self->user_code);
    COMPAT_END_CRITICAL_SECTION();
}

static void
unlist(struct device_buffer *self)
{
    COMPAT_BEGIN_CRITICAL_SECTION(table_of(self));
    nrm__list_remove(&self->user_code);
    self->user_code.next = NULL;
    COMPAT_END_CRITICAL_SECTION();
    nrm__block_remove_object(self->owner);
    self->owner = NULL;
}

void
device_buffer_has_memory(struct device_buffer *self)
{
    if (!nrm_resource_calls_user_code(self->memory.mr)) {
        return;
    }
    if (self->user_code.next == NULL) {
        list(self);
    }
    nrm__block_remove_object(self->owner);
    bool is_own = self->memory.ptr != NULL && self->memory.tensor == NULL;
    self->owner = is_own ? nrm__block_add_object(self->memory.ptr) : NULL;
}

static bool
is_of(const struct device_buffer *self, const nrm_resource *mr)
{
    return self->memory.mr == mr || nrm__resource_is_under(mr, self->memory.mr);
}

/* A new list, or NULL with an error set. */
static PyObject *
find_over(PyObject *wrappers, nrm_resource *mr)
{
    PyObject *found = PyList_New(0);
    COMPAT_BEGIN_CRITICAL_SECTION(wrappers);
    for (struct nrm__link *link = user_code.next; link != &user_code && found != NULL;
         link = link->next) {
        struct device_buffer *self =
            NRM__CONTAINER(link, struct device_buffer, user_code);
        if (is_of(self, mr) && PyList_Append(found, (PyObject *)self) < 0) {
            Py_CLEAR(found);
        }
    }
    COMPAT_END_CRITICAL_SECTION();
    return found;
}

static void
close_buffer(struct device_buffer *self)
{
    if (self->user_code.next != NULL) {
        unlist(self);
        self->nbytes = 0;
        array_interface_forget(&self->interface);
        device_memory_close(&self->memory);
    }
}

int
device_buffers_close(struct module_state *state, nrm_resource *mr)
{
    PyObject *found = find_over(state->wrappers, mr);
    for (Py_ssize_t i = 0; found != NULL && i < PyList_GET_SIZE(found); i++) {
        close_buffer(device_buffer_from(PyList_GET_ITEM(found, i)));
    }
    Py_XDECREF(found);
    return found != NULL ? 0 : -1;
}

/* ---- making one ---- */

static struct device_buffer *
make_empty(struct module_state *state, PyTypeObject *type)
{
    PyObject *object = take_spare(state, type);
    return device_buffer_from(object != NULL ? object : type->tp_alloc(type, 0));
}

static PyObject *
with_memory(struct module_state *state, struct device_buffer *self, size_t nbytes)
{
    if (device_memory_allocate(state, &self->memory, nbytes) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    self->nbytes = nbytes;
    device_buffer_has_memory(self);
    return (PyObject *)self;
}

PyObject *
device_buffer_make(struct module_state *state, PyTypeObject *type, size_t nbytes,
                   PyObject *stream, PyObject *mr)
{
    struct device_buffer *self = make_empty(state, type);
    if (self == NULL) {
        return NULL;
    }
    if (device_memory_init(state, &self->memory, stream, mr) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return with_memory(state, self, nbytes);
}

PyObject *
device_buffer_make_like(struct module_state *state, const struct device_buffer *other,
                        size_t nbytes)
{
    struct device_buffer *self = make_empty(state, state->device_buffer_type);
    if (self == NULL) {
        return NULL;
    }
    device_memory_init_like(&self->memory, &other->memory);
    return with_memory(state, self, nbytes);
}

/* `values` as BUFFER_TEXT names them. */
static PyObject *
make_of_arguments(struct module_state *state, PyTypeObject *type, PyObject **values)
{
    uintptr_t ptr = 0;
    size_t nbytes = 0;
    if ((values[0] != NULL && arg_address(values[0], "ptr", &ptr) < 0) ||
        (values[1] != NULL && arg_nbytes(values[1], "size", &nbytes) < 0)) {
        return NULL;
    }
    PyObject *self = device_buffer_make(state, type, nbytes, values[2], values[3]);
    if (self != NULL && ptr != 0 && nbytes != 0 &&
        byte_copy_from_address(state, device_buffer_from(self), ptr) < 0) {
        Py_CLEAR(self);
    }
    return self;
}

static struct signature buffer_signature = SIGNATURE("DeviceBuffer", BUFFER_TEXT);

static PyObject *
buffer_vectorcall(PyObject *type, PyObject *const *args, size_t n_args, PyObject *names)
{
    struct module_state *state = PyType_GetModuleState((PyTypeObject *)type);
    PyObject *values[4];
    if (errors_begin_call() < 0 ||
        signature_bind(&buffer_signature, args, (Py_ssize_t)n_args, names, values) <
            0) {
        return NULL;
    }
    return make_of_arguments(state, (PyTypeObject *)type, values);
}

/* For subclasses: vectorcall is not inherited. */
static PyObject *
buffer_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    struct module_state *state = type_state(type);
    PyObject *values[4];
    if (state == NULL || errors_begin_call() < 0 ||
        signature_bind_tuple(&buffer_signature, args, keywords, values) < 0) {
        return NULL;
    }
    return make_of_arguments(state, type, values);
}

/* ---- life ---- */

static int
buffer_traverse(PyObject *object, visitproc visit, void *arg)
{
    struct device_buffer *self = device_buffer_from(object);
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->interface.dict);
    Py_VISIT(self->interface.entries);
    Py_VISIT(self->pending);
    return device_memory_traverse(&self->memory, visit, arg);
}

static int
buffer_clear(PyObject *object)
{
    array_interface_forget(&device_buffer_from(object)->interface);
    return 0;
}

static void
buffer_dealloc(PyObject *object)
{
    struct device_buffer *self = device_buffer_from(object);
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(object);
    }
    if (self->user_code.next != NULL) {
        unlist(self);
    }
    device_memory_finish(&self->memory);
    array_interface_forget(&self->interface);
    Py_XDECREF(self->pending);
    if (!keep_spare(type, object)) {
        type->tp_free(object);
    }
    Py_DECREF(type);
}

/* ---- for the other files ---- */

void
device_buffer_changed(struct device_buffer *self)
{
    array_interface_forget(&self->interface);
}

void
device_buffer_set_pending(struct device_buffer *self, PyObject *pending)
{
    Py_XSETREF(self->pending, pending);
}

bool
device_buffer_is_pending(struct device_buffer *self)
{
    if (self->pending != NULL && !pending_is_running(self->pending)) {
        Py_CLEAR(self->pending);
    }
    return self->pending != NULL;
}

/* ---- the type ---- */

static PyObject *
buffer_repr(PyObject *object)
{
    struct device_buffer *self = device_buffer_from(object);
    char address[24]; /* %p shows NULL as (nil) */
    snprintf(address, sizeof address, "0x%zx", (size_t)self->memory.ptr);
    return PyUnicode_FromFormat("<DeviceBuffer of %zu B at %s, %R>", self->nbytes,
                                address, self->memory.mr_object);
}

static Py_ssize_t
buffer_length(PyObject *object)
{
    return (Py_ssize_t)device_buffer_from(object)->nbytes;
}

static PyMemberDef buffer_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(struct device_buffer, weakrefs),
     READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

enum { MAX_METHODS = 24 };

static PyMethodDef all_methods[MAX_METHODS]; /* of both tables */

static void
add_methods(const PyMethodDef *table)
{
    int n = 0;
    while (all_methods[n].ml_name != NULL) {
        n++;
    }
    for (; table->ml_name != NULL; table++) {
        NRM_ASSERT(n + 1 < MAX_METHODS);
        all_methods[n++] = *table;
    }
}

static PyType_Slot buffer_slots[] = {
    {Py_tp_doc,
     (void *)PyDoc_STR(
         "DeviceBuffer(" BUFFER_TEXT ")\n--\n\n"
         "Bytes that a device can use, of a resource, in the order of a stream.\n\n"
         "Parameters\n----------\n"
         "ptr : int\n"
         "    The address, of the host or of a device, that `size` bytes are copied\n"
         "    from; 0: none are. Bytes of a device are copied in the order of `stream`,\n"
         "    and waited for when that is DEFAULT_STREAM; those of the host always are.\n"
         "size : int or str\n"
         "    Bytes.\n"
         "stream : Stream\n"
         "    The memory may be used behind it, and goes back behind it.\n"
         "mr : MemoryResource, optional\n"
         "    Of memory that a device can use. None: the current one of the current\n"
         "    device. It lives as long as the buffer.\n\n"
         "Raises\n------\n"
         "OutOfMemoryError\n    When the memory cannot be had.\n"
         "ValueError\n    For a negative size, and a resource of host memory.\n"
         "CudaError\n    When the copy failed.\n\n"
         "Notes\n-----\n"
         "The content of new memory is not known. There is no buffer protocol, as the\n"
         "host cannot read memory of a device; ``bytes(buffer)`` copies it.\n\n"
         "Pickling copies the bytes to the host; with protocol 5 they may go out of\n"
         "band. What is unpickled has the current resource and DEFAULT_STREAM.\n\n"
         "Examples\n--------\n"
         ">>> import numpy_rmm\n"
         ">>> from numpy_rmm.testing import simulate_cuda\n"
         ">>> with simulate_cuda():  # in place of a GPU\n"
         "...     buffer = numpy_rmm.DeviceBuffer(size='1 KiB')\n"
         "...     buffer.copy_from_host(b'abc')\n"
         "...     buffer.size, buffer.tobytes()[:3]\n"
         "(1024, b'abc')\n")},
    {Py_tp_new, buffer_new},
    {Py_tp_dealloc, buffer_dealloc},
    {Py_tp_traverse, buffer_traverse},
    {Py_tp_clear, buffer_clear},
    {Py_tp_repr, buffer_repr},
    {Py_sq_length, buffer_length},
    {Py_tp_methods, all_methods},
    {Py_tp_getset, device_buffer_getset},
    {Py_tp_members, buffer_members},
    {0, NULL},
};

static PyType_Spec buffer_spec = {
    .name = "numpy_rmm.DeviceBuffer",
    .basicsize = sizeof(struct device_buffer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = buffer_slots,
};

int
device_buffer_init(PyObject *module)
{
    struct module_state *state = module_state(module);
    if (all_methods[0].ml_name == NULL) {
        add_methods(device_buffer_methods);
        add_methods(device_buffer_copy_methods);
    }
    state->byte_typestr = PyUnicode_InternFromString("|u1");
    PyObject *type = PyType_FromModuleAndSpec(module, &buffer_spec, NULL);
    if (type == NULL || state->byte_typestr == NULL) {
        Py_XDECREF(type);
        return -1;
    }
    state->device_buffer_type = (PyTypeObject *)type;
    state->device_buffer_type->tp_vectorcall = buffer_vectorcall;
    return PyModule_AddType(module, state->device_buffer_type);
}
