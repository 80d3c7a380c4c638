/* pin: page-locks the memory of arrays and buffers in place. */
#ifndef NRM_PYTHON_PIN_H
#define NRM_PYTHON_PIN_H

#include <Python.h>

#include "python/state.h"

int pin_init(PyObject *module);

#endif
