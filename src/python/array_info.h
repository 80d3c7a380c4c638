/* Questions about an array: whose memory is it, and what kind? */
#ifndef NRM_PYTHON_ARRAY_INFO_H
#define NRM_PYTHON_ARRAY_INFO_H

#include <Python.h>

#include "python/state.h"

int array_info_init(PyObject *module);

/* get_handler_name(), memory_kind(), is_pinned() and array_info(). */
extern PyMethodDef array_info_methods[];

#endif
