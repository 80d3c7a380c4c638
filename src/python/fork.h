/* A warning before a fork that copies much. */
#ifndef NRM_PYTHON_FORK_H
#define NRM_PYTHON_FORK_H

#include <Python.h>

int fork_init(PyObject *module);

#endif
