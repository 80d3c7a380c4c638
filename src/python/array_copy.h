/* The functions of the extension that numpy_rmm/_copy.py is made of. */
#ifndef NRM_PYTHON_ARRAY_COPY_H
#define NRM_PYTHON_ARRAY_COPY_H

#include <Python.h>

extern PyMethodDef array_copy_functions[];

#endif
