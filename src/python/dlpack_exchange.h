/* DLPack between C libraries: the functions that DeviceArray and DeviceBuffer show. */
#ifndef NRM_PYTHON_DLPACK_EXCHANGE_H
#define NRM_PYTHON_DLPACK_EXCHANGE_H

#include <Python.h>

/* After the types are made. */
int dlpack_exchange_init(PyObject *module);

#endif
