/*
 * Python functions that a resource calls, and what becomes of them when nothing but
 * each other holds them and what is made over the resource.
 */
#ifndef NRM_PYTHON_CALLBACKS_H
#define NRM_PYTHON_CALLBACKS_H

#include <Python.h>

#include <stdbool.h>

#include "nrm/resource.h"
#include "python/state.h"

struct callbacks {
    PyObject ob_base;     /* as PyObject_HEAD */
    PyObject *allocate;   /* or the one that is asked; NULL: collected */
    PyObject *deallocate; /* NULL: collected, or there is none */
    PyObject *module;     /* for the types of arguments */
    PyObject *warden;     /* speaks for the resource to the collector */
    nrm_resource *mr;     /* that calls them, of whose life this is part; NULL: ended */
    bool is_closed;       /* what was made over the resource has been given up */
};

int callbacks_init(PyObject *module);

/* Both are borrowed; `deallocate` may be NULL. A new reference, for the resource, or
   NULL with an error set. Its `mr` is to be set. */
struct callbacks *callbacks_make(struct module_state *state, PyObject *allocate,
                                 PyObject *deallocate);

/* The resource is at its end, in any thread: steals its reference. */
void callbacks_drop(struct callbacks *self);

/* After a collection of all garbage: once more, where that found circles that it only
   could prepare. */
void callbacks_collect_again(void);

/* That function, for gc.callbacks. */
extern PyMethodDef callbacks_after_collection;

#endif
