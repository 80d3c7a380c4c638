/* DeviceScalar: one element in memory of a device. */
#ifndef NRM_PYTHON_DEVICE_SCALAR_H
#define NRM_PYTHON_DEVICE_SCALAR_H

#include <Python.h>

#include "python/state.h"

int device_scalar_init(PyObject *module);

#endif
