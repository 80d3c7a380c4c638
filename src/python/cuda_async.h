/* What the resources over a memory pool of the driver have beyond a MemoryResource:
   pool_handle. */
#ifndef NRM_PYTHON_CUDA_ASYNC_H
#define NRM_PYTHON_CUDA_ASYNC_H

#include <Python.h>

extern PyMethodDef cuda_async_methods[];

#endif
