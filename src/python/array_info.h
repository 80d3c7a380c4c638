/* Questions about an array: whose memory is it, and what kind? */
#ifndef NRM_PYTHON_ARRAY_INFO_H
#define NRM_PYTHON_ARRAY_INFO_H

#include <Python.h>

#include "python/state.h"

int array_info_init(PyObject *module);

/* Of the array that owns the data of `array`, an ndarray; of its own where NumPy does
   not. */
const void *array_info_address(PyObject *array);

/* What memory_kind() says of an ndarray. */
const char *array_info_kind(PyObject *array);

/* get_handler_name(), memory_kind(), is_pinned() and array_info(). */
extern PyMethodDef array_info_methods[];

#endif
