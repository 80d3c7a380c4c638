/* Memory of other libraries, as tensors that they hand us. */
#ifndef NRM_PYTHON_DLPACK_IMPORT_H
#define NRM_PYTHON_DLPACK_IMPORT_H

#include <Python.h>

#include "python/dlpack_layout.h"
#include "python/state.h"

/* A DeviceArray over the tensor's memory, which it owns from now on (stolen, also when
   NULL is returned with an error set). */
PyObject *dlpack_import(struct module_state *state, struct dlpack_versioned *tensor);

/* The resource that new memory at the place of `like` is of: a new reference, or NULL
   with an error set. */
PyObject *dlpack_resource_for(struct module_state *state,
                              const struct dlpack_tensor *like);

#endif
