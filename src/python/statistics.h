/* Counters of resources and handlers. */
#ifndef NRM_PYTHON_STATISTICS_H
#define NRM_PYTHON_STATISTICS_H

#include <Python.h>

#include "nrm/resource.h"
#include "python/state.h"

int statistics_init(PyObject *module);

/* A ResourceStatistics of a C resource, or NULL with an error set. */
PyObject *statistics_of(struct module_state *state, nrm_resource *mr);

#endif
