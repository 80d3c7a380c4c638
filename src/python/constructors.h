/* The constructors behind the rows of resources.def. */
#ifndef NRM_PYTHON_CONSTRUCTORS_H
#define NRM_PYTHON_CONSTRUCTORS_H

#include <Python.h>

#include "nrm/resource.h"
#include "python/state.h"

/* A new reference, or NULL with an error set. `out_callbacks`: see callback.h. */
nrm_resource *constructor_call(struct module_state *state, enum resource_class row,
                               PyObject *args, PyObject *keywords,
                               void **out_callbacks);

#endif
