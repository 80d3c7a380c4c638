/* DeviceBuffer: bytes that a device can use. */
#ifndef NRM_PYTHON_DEVICE_BUFFER_H
#define NRM_PYTHON_DEVICE_BUFFER_H

#include <Python.h>

#include <stdatomic.h>

#include "base/list.h"
#include "python/array_interface.h"
#include "python/device_memory.h"
#include "python/dlpack.h"
#include "python/state.h"

struct device_buffer {
    PyObject ob_base; /* as PyObject_HEAD */
    struct device_memory memory;
    size_t nbytes; /* at most memory.nbytes */
    struct array_interface interface;
    PyObject *pending; /* of the last copy that was not waited for; NULL: none runs */
    atomic_size_t n_exports;    /* DLPack tensors that stand for its address */
    bool is_changing;           /* a thread gives it another size or stream */
    struct nrm__link user_code; /* in a list of those whose resource calls functions of
                                   Python; next NULL: in none */
    nrm_resource *owner; /* that knows its block to be an object's; borrowed, or NULL */
    PyObject *weakrefs;
};

int device_buffer_init(PyObject *module);

/* Lets go of the memory of buffers that died. */
void device_buffer_forget_spares(struct module_state *state);

extern PyMethodDef device_buffer_functions[];

/* Of device_buffer_methods.c and device_buffer_copies.c. */
extern PyMethodDef device_buffer_methods[];
extern PyMethodDef device_buffer_copy_methods[];
extern PyGetSetDef device_buffer_getset[];

/* A new one of `nbytes` bytes of unknown content; `stream` and `mr` as
   device_memory_init takes them. */
PyObject *device_buffer_make(struct module_state *state, PyTypeObject *type,
                             size_t nbytes, PyObject *stream, PyObject *mr);

/* The same with the resource and the stream of another one. */
PyObject *device_buffer_make_like(struct module_state *state,
                                  const struct device_buffer *other, size_t nbytes);

/* The same with its bytes too: copied in the order of its stream, waited for on the
   default one only. */
PyObject *device_buffer_copy(struct module_state *state, struct device_buffer *self);

/* A new one with the bytes of a host buffer. */
PyObject *device_buffer_of_host(struct module_state *state, PyTypeObject *type,
                                PyObject *host, PyObject *stream, PyObject *mr);

/* A new NumPy array of unsigned bytes with what it has. */
PyObject *device_buffer_to_array(struct module_state *state, struct device_buffer *self,
                                 PyObject *stream);

/* What DLPack is told of it: 0. */
int device_buffer_describe(PyObject *object, struct dlpack_source *out);

/* Its memory, or its size, is another one now. */
void device_buffer_changed(struct device_buffer *self);

/* It has memory now where it had none, or had that of `owner`. */
void device_buffer_has_memory(struct device_buffer *self);

/* Takes the memory of all that have some of `mr`, or of what is over it: the functions
   that it must go back through are garbage, and so are the buffers. They are empty
   afterwards. -1 with an error set: nothing has happened. */
int device_buffers_close(struct module_state *state, nrm_resource *mr);

/* Keeps the Pending of a copy that was not waited for (steals it). */
void device_buffer_set_pending(struct device_buffer *self, PyObject *pending);

/* Whether a copy of ours into it runs; forgets one that is done. */
bool device_buffer_is_pending(struct device_buffer *self);

static inline struct device_buffer *
device_buffer_from(PyObject *object)
{
    return (struct device_buffer *)object;
}

#endif
