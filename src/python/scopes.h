/* Scopes of the calling thread, for numpy_rmm.statistics. */
#ifndef NRM_PYTHON_SCOPES_H
#define NRM_PYTHON_SCOPES_H

#include <Python.h>

extern PyMethodDef scopes_functions[];

#endif
