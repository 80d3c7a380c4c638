/* What `info` tells of the machine. */
#ifndef NRM_PYTHON_SYSTEM_INFO_H
#define NRM_PYTHON_SYSTEM_INFO_H

#include <Python.h>

#include "python/state.h"

/* _system_info() */
extern PyMethodDef system_info_methods[];

#endif
