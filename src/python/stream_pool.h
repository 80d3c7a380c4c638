/* StreamPool: streams that are made once and handed out in turn. */
#ifndef NRM_PYTHON_STREAM_POOL_H
#define NRM_PYTHON_STREAM_POOL_H

#include <Python.h>

#include "python/state.h"

int stream_pool_init(PyObject *module);

#endif
