/*
 * Submitting a copy, and the object that stands for it.
 *
 * A copy that nobody waits for must not lose what it reads and writes. Memory of ours is
 * safe by the use that is noted of it; all other memory lives as long as its object. So a
 * Pending that dies too early leaves its objects on a list, from which the next copy takes
 * those that are done.
 */
#include "python/pending.h"

#include <stdatomic.h>

#include "base/error.h"
#include "base/lock.h"
#include "core/hooks.h"
#include "core/transfer.h"
#include "nrm/options.h"
#include "nrm/resource.h"
#include "nrm/uses.h"
#include "os/fork.h"
#include "python/device_array.h"
#include "python/errors.h"
#include "python/stream.h"

enum {
    N_KEPT = 3
}; /* the destination, the source, and what stood between them or None */

struct pending_object {
    PyObject ob_base; /* as PyObject_HEAD */
    PyObject *kept[N_KEPT];
    nrm_CUevent event; /* NULL: it was done when it was made, or captured */
    bool is_captured;
    atomic_bool is_done;
};

/* A copy whose Pending is gone. */
struct orphan {
    struct orphan *next;
    PyObject *kept[N_KEPT];
    nrm_CUevent event;
};

static struct nrm__lock orphans_lock = NRM__LOCK_INIT(NRM__RANK_LEAF);
static struct orphan *orphans;

static const struct nrm__fork_hook orphans_hook = {.rank = NRM__RANK_LEAF,
                                                   .lock = &orphans_lock};

__attribute__((constructor)) static void
add_fork_hook(void)
{
    nrm__fork_hook_add(&orphans_hook);
}

/* ---- orphans ---- */

static void
put_orphan(struct orphan *orphan)
{
    nrm__lock_acquire(&orphans_lock);
    orphan->next = orphans;
    orphans = orphan;
    nrm__lock_release(&orphans_lock);
}

static void
end_orphan(struct orphan *orphan)
{
    nrm__transfer_drop(orphan->event);
    for (int i = 0; i < N_KEPT; i++) {
        Py_XDECREF(orphan->kept[i]);
    }
    PyMem_Free(orphan);
}

/* Lets go of what is done, and of what failed: nothing touches its memory any more. */
static void
reap_orphans(void)
{
    nrm__lock_acquire(&orphans_lock);
    struct orphan *all = orphans;
    orphans = NULL;
    nrm__lock_release(&orphans_lock);
    while (all != NULL) {
        struct orphan *next = all->next;
        if (nrm__transfer_query(all->event, false) == NRM_NOT_FOUND) {
            put_orphan(all);
        }
        else {
            end_orphan(all);
        }
        all = next;
    }
}

static bool
keeps_something(const struct pending_object *self)
{
    bool keeps = false;
    for (int i = 0; i < N_KEPT; i++) {
        keeps = keeps || (self->kept[i] != NULL && self->kept[i] != Py_None);
    }
    return keeps;
}

/* What the copy still needs outlives its Pending; without memory for that, for ever. */
static void
orphan(struct pending_object *self)
{
    struct orphan *left = PyMem_Malloc(sizeof *left);
    if (left != NULL) {
        left->event = self->event;
        for (int i = 0; i < N_KEPT; i++) {
            left->kept[i] = self->kept[i];
        }
        put_orphan(left);
    }
    for (int i = 0; i < N_KEPT; i++) {
        self->kept[i] = NULL;
    }
    self->event = NULL;
}

/* ---- the type ---- */

static struct pending_object *
pending_from(PyObject *object)
{
    return (struct pending_object *)object;
}

static int
pending_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    for (int i = 0; i < N_KEPT; i++) {
        Py_VISIT(pending_from(object)->kept[i]);
    }
    return 0;
}

static bool
is_running(struct pending_object *self)
{
    return self->event != NULL && !atomic_load(&self->is_done) &&
           nrm__transfer_query(self->event, false) == NRM_NOT_FOUND;
}

static int
pending_clear(PyObject *object)
{
    struct pending_object *self = pending_from(object);
    if (keeps_something(self) && is_running(self)) {
        orphan(self);
    }
    for (int i = 0; i < N_KEPT; i++) {
        Py_CLEAR(self->kept[i]);
    }
    return 0;
}

static void
pending_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    (void)pending_clear(object);
    nrm__transfer_drop(pending_from(object)->event);
    type->tp_free(object);
    Py_DECREF(type);
}

/* -1 with an error set; 1: done; 0: not yet. */
static int
query(PyObject *object, bool waits)
{
    struct pending_object *self = pending_from(object);
    if (atomic_load(&self->is_done)) {
        return 1;
    }
    if (self->is_captured || self->event == NULL) {
        return 0;
    }
    nrm_status status = nrm__transfer_query(self->event, waits);
    if (status == NRM_NOT_FOUND) {
        return 0;
    }
    if (status != NRM_OK) {
        (void)errors_raise(type_state(Py_TYPE(object)), status);
        return -1;
    }
    atomic_store(&self->is_done, true);
    return 1;
}

int
pending_finish(PyObject *object)
{
    if (pending_from(object)->is_captured) {
        PyErr_SetString(PyExc_RuntimeError,
                        "the copy was captured into a graph: it runs when that is "
                        "launched, and cannot be waited for here");
        return -1;
    }
    return query(object, true);
}

bool
pending_is_running(PyObject *object)
{
    return is_running(pending_from(object));
}

static PyObject *
pending_wait(PyObject *object, PyObject *Py_UNUSED(unused))
{
    if (errors_begin_call() < 0 || pending_finish(object) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
pending_result(PyObject *object, PyObject *Py_UNUSED(unused))
{
    if (errors_begin_call() < 0 || pending_finish(object) < 0) {
        return NULL;
    }
    PyObject *dst = pending_from(object)->kept[0];
    return Py_NewRef(dst != NULL ? dst : Py_None);
}

static PyObject *
pending_done(PyObject *object, void *Py_UNUSED(closure))
{
    int done = query(object, false);
    return done < 0 ? NULL : PyBool_FromLong(done);
}

static PyObject *
pending_repr(PyObject *object)
{
    struct pending_object *self = pending_from(object);
    return PyUnicode_FromFormat("<Pending copy, %s>", self->is_captured ? "captured"
                                                      : atomic_load(&self->is_done)
                                                          ? "done"
                                                          : "submitted");
}

static PyMethodDef pending_methods[] = {
    {"wait", pending_wait, METH_NOARGS,
     PyDoc_STR(
         "wait($self)\n--\n\nWait until the copy is done; others may run meanwhile.\n\n"
         "Raises\n------\n"
         "CudaError\n    When it, or work before it on its stream, failed.\n"
         "RuntimeError\n    When it was captured into a graph.\n")},
    {"result", pending_result, METH_NOARGS,
     PyDoc_STR("result($self)\n--\n\n"
               "Wait as :meth:`wait` does, and return the destination.")},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef pending_getset[] = {
    {"done", pending_done, NULL, PyDoc_STR("Whether the copy is done; does not wait."),
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot pending_slots[] = {
    {Py_tp_doc,
     (void *)PyDoc_STR(
         "A copy that :func:`copyto` submitted and did not wait for.\n\n"
         "It keeps both ends alive; when it dies before the copy is done, they live on\n"
         "until then.")},
    {Py_tp_dealloc, pending_dealloc},
    {Py_tp_traverse, pending_traverse},
    {Py_tp_clear, pending_clear},
    {Py_tp_repr, pending_repr},
    {Py_tp_methods, pending_methods},
    {Py_tp_getset, pending_getset},
    {0, NULL},
};

static PyType_Spec pending_spec = {
    .name = "numpy_rmm.Pending",
    .basicsize = sizeof(struct pending_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = pending_slots,
};

int
pending_init(PyObject *module)
{
    struct module_state *state = module_state(module);
    state->pending_type =
        (PyTypeObject *)PyType_FromModuleAndSpec(module, &pending_spec, NULL);
    return state->pending_type == NULL ? -1
                                       : PyModule_AddType(module, state->pending_type);
}

/* A Pending that is done, for now. */
static struct pending_object *
make(struct module_state *state, PyObject *dst, PyObject *src, PyObject *between)
{
    struct pending_object *self =
        pending_from(state->pending_type->tp_alloc(state->pending_type, 0));
    if (self != NULL) {
        self->kept[0] = Py_NewRef(dst);
        self->kept[1] = Py_NewRef(src);
        self->kept[2] = Py_NewRef(between);
        atomic_init(&self->is_done, true);
    }
    return self;
}

/* ---- the transfer of arguments ---- */

static int
read_axes(struct nrm__transfer *transfer, PyObject *shape, PyObject *dst_strides,
          PyObject *src_strides)
{
    Py_ssize_t n = PyTuple_GET_SIZE(shape);
    if (n > NRM__TRANSFER_MAX_DIMS || PyTuple_GET_SIZE(dst_strides) != n ||
        PyTuple_GET_SIZE(src_strides) != n) {
        PyErr_SetString(PyExc_ValueError, "shape and strides do not fit together");
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        transfer->shape[i] = PyLong_AsSize_t(PyTuple_GET_ITEM(shape, i));
        transfer->dst_strides[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(dst_strides, i));
        transfer->src_strides[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(src_strides, i));
    }
    transfer->n_dims = (int)n;
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *
copy_plan(PyObject *Py_UNUSED(module), PyObject *args)
{
    struct nrm__transfer transfer = {.direction = NRM__WITHIN};
    struct nrm__transfer_plan plan;
    PyObject *shape, *dst_strides, *src_strides;
    Py_ssize_t itemsize;
    if (!PyArg_ParseTuple(args, "nO!O!O!:_copy_plan", &itemsize, &PyTuple_Type, &shape,
                          &PyTuple_Type, &dst_strides, &PyTuple_Type, &src_strides) ||
        read_axes(&transfer, shape, dst_strides, src_strides) < 0) {
        return NULL;
    }
    transfer.itemsize = (size_t)itemsize;
    nrm__transfer_plan(&transfer, &plan);
    return Py_BuildValue("nnn", (Py_ssize_t)plan.n_calls, (Py_ssize_t)plan.n_rows,
                         (Py_ssize_t)plan.width);
}

/* Notes the use of an end that is pinned or managed memory of ours. */
static nrm_status
note_use(const void *ptr, nrm_stream *stream)
{
    nrm_block_info block;
    if (nrm_block_find(ptr, &block) != NRM_OK) {
        return NRM_OK;
    }
    nrm_resource_release(block.resource);
    bool is_noted = block.kind == NRM_KIND_PINNED || block.kind == NRM_KIND_MANAGED;
    return is_noted ? nrm_record_use(ptr, stream) : NRM_OK;
}

static nrm_status
submit(const struct nrm__transfer *transfer, int device, nrm_stream *stream,
       struct pending_object *pending)
{
    nrm_CUevent event = NULL;
    void *token = nrm__detach();
    nrm_status status = nrm__transfer_submit_on(
        device, transfer, nrm_stream_handle(stream), &event, &pending->is_captured);
    nrm__attach(token);
    if (status != NRM_OK) {
        return status;
    }
    pending->event = event;
    atomic_store(&pending->is_done, false);
    status = note_use(transfer->dst, stream);
    if (status == NRM_OK) {
        status = note_use(transfer->src, stream);
    }
    if (status != NRM_OK && event != NULL) {
        nrm_error error = *nrm_last_error();
        (void)nrm__transfer_query(event, true); /* nobody else would wait for it */
        status = error.status;
    }
    return status;
}

PyObject *
pending_submit(struct module_state *state, const struct nrm__transfer *transfer,
               int device, nrm_stream *stream, PyObject *dst, PyObject *src,
               PyObject *between)
{
    reap_orphans();
    struct pending_object *pending = make(state, dst, src, between);
    if (pending == NULL) {
        return NULL;
    }
    nrm_status status = submit(transfer, device, stream, pending);
    if (status != NRM_OK) {
        Py_DECREF(pending);
        return errors_raise(state, status);
    }
    return (PyObject *)pending;
}

/* Whose default streams are meant: that of an end of ours, else of the current context. */
static int
device_of(struct module_state *state, PyObject *dst, PyObject *src)
{
    struct device_memory *memory = device_memory_of(state, dst);
    if (memory == NULL) {
        memory = device_memory_of(state, src);
    }
    return memory != NULL ? memory->device : NRM_DEVICE_NONE;
}

static PyObject *
copy_submit(PyObject *module, PyObject *args)
{
    struct module_state *state = module_state(module);
    struct nrm__transfer transfer = {NULL};
    PyObject *dst, *src, *between, *shape, *dst_strides, *src_strides, *stream_object;
    unsigned long long dst_address, src_address;
    int direction;
    Py_ssize_t itemsize;
    if (!PyArg_ParseTuple(args, "OOOKKinO!O!O!O:_copy_submit", &dst, &src, &between,
                          &dst_address, &src_address, &direction, &itemsize,
                          &PyTuple_Type, &shape, &PyTuple_Type, &dst_strides,
                          &PyTuple_Type, &src_strides, &stream_object) ||
        read_axes(&transfer, shape, dst_strides, src_strides) < 0) {
        return NULL;
    }
    transfer.dst = (char *)(uintptr_t)dst_address;
    transfer.src = (const char *)(uintptr_t)src_address;
    transfer.direction = (enum nrm__direction)direction;
    transfer.itemsize = (size_t)itemsize;
    nrm_stream *stream = stream_get(state, stream_object);
    if (stream == NULL) {
        return NULL;
    }
    PyObject *pending = pending_submit(state, &transfer, device_of(state, dst, src),
                                       stream, dst, src, between);
    nrm_stream_release(stream);
    return pending;
}

static PyObject *
copy_done(PyObject *module, PyObject *args)
{
    PyObject *dst, *src;
    return PyArg_ParseTuple(args, "OO:_copy_done", &dst, &src)
               ? (PyObject *)make(module_state(module), dst, src, Py_None)
               : NULL;
}

/* `producer` is an object of ours, or the handle of a stream. */
static nrm_status
wait_for(struct module_state *state, nrm_stream *stream, PyObject *producer)
{
    struct device_memory *memory = device_memory_of(state, producer);
    nrm_status status;
    if (memory == NULL) {
        size_t handle = PyLong_AsSize_t(producer);
        void *token = nrm__detach();
        status = nrm__transfer_wait_for(nrm_stream_handle(stream), handle);
        nrm__attach(token);
        return status;
    }
    nrm_stream *own = memory->stream;
    nrm_stream_retain(own);
    void *token = nrm__detach();
    status = nrm__transfer_join(memory->device, stream, memory->device, own);
    nrm__attach(token);
    nrm_stream_release(own);
    return status;
}

static PyObject *
copy_wait_for(PyObject *module, PyObject *args)
{
    struct module_state *state = module_state(module);
    PyObject *stream_object, *producer;
    if (!PyArg_ParseTuple(args, "OO:_copy_wait_for", &stream_object, &producer)) {
        return NULL;
    }
    nrm_stream *stream = stream_get(state, stream_object);
    if (stream == NULL) {
        return NULL;
    }
    nrm_status status = wait_for(state, stream, producer);
    nrm_stream_release(stream);
    if (PyErr_Occurred()) {
        return NULL; /* it was neither */
    }
    return status == NRM_OK ? Py_NewRef(Py_None) : errors_raise(state, status);
}

/* An address alone says no size: in a block of ours the copy must not leave that. */
static PyObject *
copy_fits(PyObject *module, PyObject *args)
{
    const char *name;
    unsigned long long address;
    Py_ssize_t nbytes;
    nrm_block_info block;
    char wanted[32], had[32];
    if (!PyArg_ParseTuple(args, "sKn:_copy_fits", &name, &address, &nbytes)) {
        return NULL;
    }
    if (nrm_block_find((const void *)(uintptr_t)address, &block) != NRM_OK) {
        Py_RETURN_NONE;
    }
    nrm_resource_release(block.resource);
    size_t left = block.nbytes - (size_t)(address - (uintptr_t)block.ptr);
    if ((size_t)nbytes <= left) {
        Py_RETURN_NONE;
    }
    nrm_format_nbytes((size_t)nbytes, wanted, sizeof wanted);
    nrm_format_nbytes(left, had, sizeof had);
    return errors_raise(module_state(module),
                        nrm__error(NRM_INVALID_VALUE,
                                   "%s: %s do not fit at 0x%llx, where the block ends "
                                   "after %s",
                                   name, wanted, address, had));
}

PyMethodDef pending_functions[] = {
    {"_copy_submit", copy_submit, METH_VARARGS,
     PyDoc_STR("_copy_submit($module, dst, src, between, dst_address, src_address,\n"
               "             direction, itemsize, shape, dst_strides, src_strides,\n"
               "             stream, /)\n--\n\n"
               "Submit a copy between strided memory; a Pending. Directions: 0 to the\n"
               "device, 1 to the host, 2 neither. Sizes and strides are in bytes.")},
    {"_copy_plan", copy_plan, METH_VARARGS,
     PyDoc_STR(
         "_copy_plan($module, itemsize, shape, dst_strides, src_strides, /)\n--\n\n"
         "(calls, rows of a call, bytes of a row) that a copy becomes.")},
    {"_copy_fits", copy_fits, METH_VARARGS,
     PyDoc_STR("_copy_fits($module, name, address, nbytes, /)\n--\n\n"
               "Raise ValueError when the bytes go beyond a block of ours.")},
    {"_copy_done", copy_done, METH_VARARGS,
     PyDoc_STR("_copy_done($module, dst, src, /)\n--\n\nA Pending that is done.")},
    {"_copy_wait_for", copy_wait_for, METH_VARARGS,
     PyDoc_STR("_copy_wait_for($module, stream, producer, /)\n--\n\n"
               "Make the stream wait for what another one has been given: that of a\n"
               "handle, or of a DeviceBuffer or DeviceArray.")},
    {NULL, NULL, 0, NULL},
};
