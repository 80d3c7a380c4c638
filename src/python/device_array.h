/* DeviceArray: a typed, strided view of a DeviceBuffer. */
#ifndef NRM_PYTHON_DEVICE_ARRAY_H
#define NRM_PYTHON_DEVICE_ARRAY_H

#include <Python.h>

#include "python/device_buffer.h"
#include "python/dlpack.h"
#include "python/state.h"

struct device_array {
    PyObject ob_base; /* as PyObject_HEAD */
    PyObject
        *view; /* a NumPy array of that shape at the device's address, never read */
    PyObject *base; /* the DeviceBuffer, of whose exports it is one */
    struct array_interface interface;
    _Atomic(PyObject *) numba_type;  /* owned; NULL: not asked for yet */
    _Atomic(int64_t *) item_strides; /* for DLPack; NULL: made when asked for */
    PyObject *weakrefs;
};

int device_array_init(PyObject *module);

/* Of device_array_methods.c. */
extern PyMethodDef device_array_methods[];
extern PyGetSetDef device_array_getset[];

/* Of device_array_functions.c: to_device() and what pickle calls. */
extern PyMethodDef device_array_functions[];

/*
 * A new one of unknown content, of `type`: `dtype` what numpy.dtype takes (NULL:
 * float64); `stream` and `mr` as device_memory_init takes them.
 */
PyObject *device_array_of_shape(struct module_state *state, PyTypeObject *type,
                                int n_dims, const Py_ssize_t *shape, PyObject *dtype,
                                bool is_fortran, PyObject *stream, PyObject *mr);

/* The same memory in another shape: `view` is a view of the array's own (stolen, may be
   NULL). */
PyObject *device_array_of_view(struct module_state *state, struct device_array *self,
                               PyObject *view);

/* Another view of the memory of a DeviceBuffer (both stolen; `view` may be NULL). */
PyObject *device_array_over(struct module_state *state, PyObject *view, PyObject *base);

/* The memory of a DeviceBuffer as an array of its bytes. */
PyObject *device_array_of_bytes(struct module_state *state, PyObject *buffer);

/* What a structure's dtype has in `descr`; None: it is none, or its fields overlap or
   lie out of order, for which there are no words. */
PyObject *device_array_fields(PyObject *object);

/* Its strides in items, borrowed as long as it lives. NULL with a BufferError: one is
   no whole number of them. */
int64_t *device_array_item_strides(struct device_array *self);

/* What DLPack is told of it. -1 with a BufferError. */
int device_array_describe(PyObject *object, struct dlpack_source *out);

/* The memory of a DeviceBuffer or DeviceArray, borrowed; NULL: it is something else. */
struct device_memory *device_memory_of(struct module_state *state, PyObject *object);

/* Calls copyto(dst, src, stream=stream), which waits. `stream` NULL: DEFAULT_STREAM. */
int device_array_copyto(PyObject *dst, PyObject *src, PyObject *stream);

/* Its elements as a new NumPy array. */
PyObject *device_array_to_host(struct device_array *self, PyObject *stream);

static inline struct device_array *
device_array_from(PyObject *object)
{
    return (struct device_array *)object;
}

#endif
