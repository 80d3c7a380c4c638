/* What a MemoryResource can be asked and told: its methods and attributes. */
#ifndef NRM_PYTHON_RESOURCE_METHODS_H
#define NRM_PYTHON_RESOURCE_METHODS_H

#include <Python.h>

#include "nrm/resource.h"
#include "python/state.h"

extern PyMethodDef resource_methods[];
extern PyGetSetDef resource_getset[];
PyObject *resource_repr(PyObject *object);

/* Bytes given back, as an int. `keep` is a size or NULL. */
PyObject *resource_trim_to(struct module_state *state, nrm_resource *mr,
                           PyObject *keep);

/* trim() */
extern PyMethodDef resource_functions[];

#endif
