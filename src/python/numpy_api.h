/*
 * NumPy's C API: the table is imported once by module.c and shared by all files.
 */
#ifndef NRM_PYTHON_NUMPY_API_H
#define NRM_PYTHON_NUMPY_API_H

#include <Python.h>

#include "python/compat.h"

#define PY_ARRAY_UNIQUE_SYMBOL nrm__numpy_api
#ifndef NRM_IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#endif
