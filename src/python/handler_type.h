/* Handler: a NEP 49 capsule as a Python object. */
#ifndef NRM_PYTHON_HANDLER_TYPE_H
#define NRM_PYTHON_HANDLER_TYPE_H

#include <Python.h>

#include "python/handler.h"

struct handler_object {
    PyObject ob_base; /* as PyObject_HEAD */
    PyObject *capsule;
    struct handler *handler; /* in the capsule; NULL: not one of ours */
    PyObject *weakrefs;
};

int handler_type_init(PyObject *module);

/* A Handler over a capsule named "mem_handler". */
PyObject *handler_type_wrap(struct module_state *state, PyObject *capsule);

#endif
