/* The options table. */
#ifndef NRM_PYTHON_OPTIONS_H
#define NRM_PYTHON_OPTIONS_H

#include <Python.h>

#include "python/state.h"

/* What numpy_rmm/_options.py is made of, and parse_nbytes() and format_nbytes(). */
extern PyMethodDef options_methods[];

#endif
