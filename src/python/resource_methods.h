/* What a MemoryResource can be asked and told: its methods and attributes. */
#ifndef NRM_PYTHON_RESOURCE_METHODS_H
#define NRM_PYTHON_RESOURCE_METHODS_H

#include <Python.h>

#include "nrm/resource.h"
#include "python/state.h"

extern PyMethodDef resource_methods[];
extern PyGetSetDef resource_getset[];
PyObject *resource_repr(PyObject *object);

/* Allocates, and once more after the garbage is gone: cycles may own blocks. An
   exception of a callback that refused the first time stays set when the second time
   sets none. Not so where a FailureCallbackResourceAdaptor on the way decides what is
   done. */
nrm_status resource_allocate_or_collect(nrm_resource *mr, size_t nbytes,
                                        size_t alignment, nrm_stream *stream,
                                        void **out);

/* Bytes given back, as an int. `keep` is a size or NULL. */
PyObject *resource_trim_to(struct module_state *state, nrm_resource *mr,
                           PyObject *keep);

/* trim() */
extern PyMethodDef resource_functions[];

#endif
