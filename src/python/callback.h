/* Callback resources, and adaptors that ask, whose functions are Python's. */
#ifndef NRM_PYTHON_CALLBACK_H
#define NRM_PYTHON_CALLBACK_H

#include <Python.h>

#include "nrm/resource.h"
#include "python/state.h"

/*
 * A resource that calls two Python functions; `out_callbacks` is what holds these
 * (python/callbacks.h), borrowed from the resource: its object holds it too.
 */
nrm_resource *callback_create(struct module_state *state, PyObject *allocate,
                              PyObject *deallocate, nrm_kind kind,
                              void **out_callbacks);

/* The same for an adaptor that asks `callback` when there is no memory. */
nrm_resource *callback_create_failure(struct module_state *state,
                                      nrm_resource *upstream, PyObject *callback,
                                      void **out_callbacks);

#endif
