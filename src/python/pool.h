/* What a PoolMemoryResource has beyond a MemoryResource: add_peer. */
#ifndef NRM_PYTHON_POOL_H
#define NRM_PYTHON_POOL_H

#include <Python.h>

extern PyMethodDef pool_methods[];

#endif
