/* MemoryResource and its subclasses: Python objects over C resources. */
#ifndef NRM_PYTHON_MEMORY_RESOURCE_H
#define NRM_PYTHON_MEMORY_RESOURCE_H

#include <Python.h>

#include "base/list.h"
#include "nrm/resource.h"
#include "python/state.h"

struct resource_object {
    PyObject ob_base;    /* as PyObject_HEAD */
    nrm_resource *mr;    /* owned; NULL before __init__ */
    PyObject *upstream;  /* its MemoryResource; NULL: a source */
    PyObject *handlers;  /* (threshold, fallback, immortal) -> Handler */
    PyObject *kept;      /* a list of other objects that it draws on; NULL: none */
    PyObject *wrappers;  /* the table of module_state, which this object leaves */
    PyObject *callbacks; /* of a callback resource, see callbacks.h; else NULL */
    struct nrm__link user_code; /* in a list of those that call Python functions */
    PyObject *weakrefs;
};

int memory_resource_init(PyObject *module);

/*
 * The one object of a C resource; made if there is none. Borrows `mr`; a new reference,
 * or NULL with an error set.
 */
PyObject *memory_resource_wrap(struct module_state *state, nrm_resource *mr);

/* Borrowed from `object`; NULL with a TypeError: it is no MemoryResource. */
nrm_resource *memory_resource_get(struct module_state *state, PyObject *object,
                                  const char *name);

/* Keeps `other`, which `self` draws on besides its upstream, as long as `self`. -1 with
   an error set fails. */
int memory_resource_keep(struct resource_object *self, PyObject *other);

/* Gives up the C resources of all objects over `mr`, whose functions are garbage. -1
   with an error set: nothing has happened. */
int memory_resources_close(struct module_state *state, nrm_resource *mr);

/* _resource_rows() */
extern PyMethodDef memory_resource_functions[];

#endif
