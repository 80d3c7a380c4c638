/*
 * Memory that one object has, from allocation to deallocation.
 *
 * The object of the resource is held, not the C resource: that is one reference less to
 * count for each buffer, and the object has its resource as long as it lives. It is
 * never let go of before the memory, not by the garbage collector either.
 */
#include "python/device_memory.h"

#include "base/error.h"
#include "core/hooks.h"
#include "core/stream.h"
#include "core/transfer.h"
#include "python/cuda_query.h"
#include "python/errors.h"
#include "python/memory_resource.h"
#include "python/registry.h"
#include "python/resource_methods.h"
#include "python/stream.h"

/* A new reference to a resource that devices can use, or NULL with an error set. What
   is current is one, or could not have been set. */
static PyObject *
find_resource(struct module_state *state, PyObject *mr, nrm_resource **out)
{
    if (mr == NULL || mr == Py_None) {
        PyObject *current = registry_current(state);
        *out = current != NULL ? ((struct resource_object *)current)->mr : NULL;
        return current;
    }
    *out = memory_resource_get(state, mr, "mr");
    if (*out != NULL && nrm_resource_kind(*out) == NRM_KIND_HOST) {
        PyErr_Format(PyExc_ValueError,
                     "mr has host memory, which a device cannot use: %R", mr);
        *out = NULL;
    }
    return *out != NULL ? Py_NewRef(mr) : NULL;
}

/* `stream` is Stream, or something that a Stream can be made of. */
static PyObject *
object_to_keep(struct module_state *state, PyObject *stream)
{
    bool is_stream = stream != NULL && Py_IS_TYPE(stream, state->stream_type);
    return is_stream ? Py_NewRef(stream) : NULL;
}

int
device_memory_init(struct module_state *state, struct device_memory *self,
                   PyObject *stream, PyObject *mr)
{
    nrm_resource *resource;
    nrm_stream *found = stream_get(state, stream);
    if (found == NULL) {
        return -1;
    }
    PyObject *mr_object = find_resource(state, mr, &resource);
    if (mr_object == NULL) {
        nrm_stream_release(found);
        return -1;
    }
    *self = (struct device_memory){
        .mr = resource,
        .mr_object = mr_object,
        .stream = found,
        .stream_object = object_to_keep(state, stream),
        .device = NRM_DEVICE_NONE,
    };
    return 0;
}

void
device_memory_init_like(struct device_memory *self, const struct device_memory *other)
{
    nrm_stream_retain(other->stream);
    *self = (struct device_memory){
        .mr = other->mr,
        .mr_object = Py_NewRef(other->mr_object),
        .stream = other->stream,
        .stream_object = Py_XNewRef(other->stream_object),
        .device = other->device,
    };
}

int
device_memory_allocate(struct module_state *state, struct device_memory *self,
                       size_t nbytes)
{
    void *ptr;
    if (self->mr == NULL && memory_resource_get(state, self->mr_object, "mr") == NULL) {
        return -1; /* it was closed */
    }
    nrm_status status =
        resource_allocate_or_collect(self->mr, nbytes, 0, self->stream, &ptr);
    if (status != NRM_OK) {
        (void)errors_raise(state, status);
        return -1;
    }
    if (PyErr_Occurred()) {
        PyErr_Clear(); /* of a callback that a pool asked again, for less */
    }
    self->ptr = ptr;
    self->nbytes = nbytes;
    self->device = nrm_resource_device(self->mr);
    return 0;
}

int
device_memory_set_stream(struct module_state *state, struct device_memory *self,
                         nrm_stream *stream, PyObject *object)
{
    nrm_status status = NRM_OK;
    if (self->ptr != NULL && stream != self->stream) {
        void *token = nrm__detach();
        status = nrm__transfer_join(self->device, stream, self->device, self->stream);
        nrm__attach(token);
    }
    if (status != NRM_OK) {
        (void)errors_raise(state, status);
        return -1;
    }
    nrm_stream_retain(stream);
    nrm_stream_release(self->stream);
    self->stream = stream;
    PyObject *kept = object_to_keep(state, object);
    Py_XSETREF(self->stream_object, kept);
    return 0;
}

nrm_status
device_memory_let_wait(const struct device_memory *self, uintptr_t handle)
{
    nrm_stream *consumer;
    if (self->ptr == NULL) {
        return NRM_OK;
    }
    NRM_TRY(nrm_stream_wrap(handle != 0 ? handle : NRM_STREAM_HANDLE_LEGACY, NULL, NULL,
                            &consumer));
    void *token = nrm__detach();
    nrm_status status =
        nrm__transfer_join(self->device, consumer, self->device, self->stream);
    nrm__attach(token);
    nrm_stream_release(consumer);
    return status;
}

/* A callback resource runs Python code here, and so may another library: what that
   raises has nowhere to go. */
static void
deallocate(struct device_memory *self)
{
    PyObject *pending = PyErr_Occurred() ? compat_take_error() : NULL;
    nrm_status status = NRM_OK;
    if (self->tensor != NULL) {
        dlpack_drop(self->tensor);
        self->tensor = NULL;
    }
    else {
        status =
            nrm_resource_deallocate(self->mr, self->ptr, self->nbytes, self->stream);
    }
    if (PyErr_Occurred()) {
        PyErr_WriteUnraisable(NULL);
    }
    else if (status != NRM_OK && !nrm__is_exiting()) {
        nrm__lost_error_note(nrm_last_error());
    }
    if (pending != NULL) {
        compat_restore_error(pending);
    }
}

void
device_memory_close(struct device_memory *self)
{
    if (self->ptr != NULL) {
        deallocate(self);
        self->ptr = NULL;
    }
    self->nbytes = 0;
    self->mr = NULL;
}

void
device_memory_finish(struct device_memory *self)
{
    device_memory_close(self);
    nrm_stream *stream = self->stream;
    self->stream = NULL;
    stream_drop(stream);
    Py_CLEAR(self->stream_object);
    Py_CLEAR(self->mr_object);
}

int
device_memory_traverse(struct device_memory *self, visitproc visit, void *arg)
{
    Py_VISIT(self->mr_object);
    Py_VISIT(self->stream_object);
    return 0;
}

PyObject *
device_memory_stream(struct module_state *state, struct device_memory *self)
{
    if (self->stream_object == NULL) {
        self->stream_object = stream_wrap(state, self->stream);
    }
    return Py_XNewRef(self->stream_object);
}
