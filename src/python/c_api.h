/* The capsule that other extensions get the C API from. */
#ifndef NRM_PYTHON_C_API_H
#define NRM_PYTHON_C_API_H

#include <Python.h>

#include "python/state.h"

int c_api_init(PyObject *module);

/* What the module owns, for callers in C, who have no module at hand. NULL with an
   error set. */
struct module_state *c_api_state(void);

#endif
