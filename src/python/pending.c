/*
 * Submitting a copy, and the object that stands for it.
 *
 * A copy that nobody waits for must not lose what it reads and writes. Memory of ours
 * is safe by the use that is noted of it; all other memory lives as long as its object.
 * So a Pending that dies too early leaves its objects on a list, from which the next
 * copy, wait or trim takes those that are done.
 */
#include "python/pending.h"

#include <stdatomic.h>

#include "base/error.h"
#include "base/lock.h"
#include "core/hooks.h"
#include "core/transfer.h"
#include "nrm/resource.h"
#include "nrm/uses.h"
#include "os/fork.h"
#include "python/errors.h"

enum {
    N_KEPT = 3
}; /* the destination, the source, and what stood between them or None */

struct pending_object {
    PyObject ob_base; /* as PyObject_HEAD */
    PyObject *kept[N_KEPT];
    struct nrm__cuda_lone_event event; /* none: done when it was made, or captured */
    bool is_captured;
    atomic_bool is_done;
    PyObject *weakrefs;
};

/* A copy whose Pending is gone. */
struct orphan {
    struct orphan *next;
    PyObject *kept[N_KEPT];
    struct nrm__cuda_lone_event event;
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
    nrm__cuda_lone_drop(&orphan->event);
    for (int i = 0; i < N_KEPT; i++) {
        Py_XDECREF(orphan->kept[i]);
    }
    PyMem_Free(orphan);
}

void
pending_reap(void)
{
    nrm__lock_acquire(&orphans_lock);
    struct orphan *all = orphans;
    orphans = NULL;
    nrm__lock_release(&orphans_lock);
    while (all != NULL) {
        struct orphan *next = all->next;
        if (nrm__transfer_query(&all->event, false) == NRM_NOT_FOUND) {
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
    self->event = (struct nrm__cuda_lone_event){0};
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
    return self->event.handle != NULL && !atomic_load(&self->is_done) &&
           nrm__transfer_query(&self->event, false) == NRM_NOT_FOUND;
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
    if (pending_from(object)->weakrefs != NULL) {
        PyObject_ClearWeakRefs(object);
    }
    (void)pending_clear(object);
    nrm__cuda_lone_drop(&pending_from(object)->event);
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
    if (self->is_captured || self->event.handle == NULL) {
        return 0;
    }
    nrm_status status = nrm__transfer_query(&self->event, waits);
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
    int done = query(object, true);
    if (done > 0) {
        pending_reap();
    }
    return done;
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

static PyMemberDef pending_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(struct pending_object, weakrefs),
     READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot pending_slots[] = {
    {Py_tp_doc,
     (void *)PyDoc_STR(
         "A copy that :func:`copyto` submitted and did not wait for.\n\n"
         "It keeps both ends alive; when it dies before the copy is done, they live on\n"
         "until then: the next copy, wait, synchronisation or :func:`trim` lets them go.")},
    {Py_tp_dealloc, pending_dealloc},
    {Py_tp_traverse, pending_traverse},
    {Py_tp_clear, pending_clear},
    {Py_tp_repr, pending_repr},
    {Py_tp_methods, pending_methods},
    {Py_tp_getset, pending_getset},
    {Py_tp_members, pending_members},
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

/* It is done, for now. */
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

PyObject *
pending_make(struct module_state *state, PyObject *dst, PyObject *src)
{
    return (PyObject *)make(state, dst, src, Py_None);
}

/* ---- submitting ---- */

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
    struct nrm__cuda_lone_event event = {0};
    void *token = nrm__detach();
    nrm_status status = nrm__transfer_submit(
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
    if (status != NRM_OK && event.handle != NULL) {
        nrm_error error = *nrm_last_error();
        (void)nrm__transfer_query(&event, true); /* nobody else would wait for it */
        status = error.status;
    }
    return status;
}

PyObject *
pending_submit(struct module_state *state, const struct nrm__transfer *transfer,
               int device, nrm_stream *stream, PyObject *dst, PyObject *src,
               PyObject *between)
{
    pending_reap();
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
