/* Making handlers, and the handler of the current context. */
#ifndef NRM_PYTHON_HANDLER_FUNCTIONS_H
#define NRM_PYTHON_HANDLER_FUNCTIONS_H

#include <Python.h>

#include "python/state.h"

/* get_handler(), and what numpy_rmm/_handlers.py is made of. */
extern PyMethodDef handler_functions[];

#endif
