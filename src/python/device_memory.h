/*
 * Memory of a resource that one object has: what DeviceBuffer is made over. Nothing
 * here depends on the caller's current device, but for the choice of the current
 * resource.
 */
#ifndef NRM_PYTHON_DEVICE_MEMORY_H
#define NRM_PYTHON_DEVICE_MEMORY_H

#include <Python.h>

#include "nrm/resource.h"
#include "nrm/stream.h"
#include "python/dlpack_layout.h"
#include "python/state.h"

struct device_memory {
    char *ptr;               /* owned; NULL: no bytes */
    size_t nbytes;           /* all that may be used */
    nrm_resource *mr;        /* of mr_object; NULL: that was closed */
    PyObject *mr_object;     /* its MemoryResource, owned */
    nrm_stream *stream;      /* owned: it is given back behind the work of this one */
    PyObject *stream_object; /* its Stream, owned; NULL: made when it is asked for */
    int device;              /* ordinal; NRM_DEVICE_NONE: not known */
    struct dlpack_versioned
        *tensor; /* owned: another library's, whose memory it is; NULL: of mr */
};

/*
 * Fills `self` (all zero), without memory: NULL or None for `mr` stand for the current
 * resource of the current device, NULL for `stream` for DEFAULT_STREAM. -1 with an
 * error set: it is still all zero.
 */
int device_memory_init(struct module_state *state, struct device_memory *self,
                       PyObject *stream, PyObject *mr);

/* The same, with the resource and the stream of another one. */
void device_memory_init_like(struct device_memory *self,
                             const struct device_memory *other);

/* Gets `nbytes` for `self`, which has none. -1 with an error set. */
int device_memory_allocate(struct module_state *state, struct device_memory *self,
                           size_t nbytes);

/* From now on it belongs to another stream: `stream` is one (borrowed), `object` what
   it came from. What was submitted to the old one so far comes before. */
int device_memory_set_stream(struct module_state *state, struct device_memory *self,
                             nrm_stream *stream, PyObject *object);

/* Work that the stream of a handle is given from now on comes behind what the memory's
   has been given; 0 is the legacy one. */
nrm_status device_memory_let_wait(const struct device_memory *self, uintptr_t handle);

/* Gives the memory back, which its resource is to be closed for. */
void device_memory_close(struct device_memory *self);

/* Gives everything back; no error is raised, none that is set is lost. All zero
   again. */
void device_memory_finish(struct device_memory *self);

int device_memory_traverse(struct device_memory *self, visitproc visit, void *arg);

/* The Stream: a new reference. */
PyObject *device_memory_stream(struct module_state *state, struct device_memory *self);

#endif
