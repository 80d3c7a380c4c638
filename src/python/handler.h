/* NEP 49 handlers over resources: the C side. The Python type is in handler_type.c. */
#ifndef NRM_PYTHON_HANDLER_H
#define NRM_PYTHON_HANDLER_H

#include <Python.h>

#include <stdatomic.h>

#include "nrm/resource.h"
#include "python/numpy_api.h"
#include "python/state.h"

#define HANDLER_CAPSULE_NAME "mem_handler" /* NumPy's: nothing else is found */
#define HANDLER_NAME_PREFIX "numpy_rmm:"

/* Lives as long as its capsule, which every array made with it holds. */
struct handler {
    PyDataMem_Handler numpy;  /* first: the capsule points to it */
    nrm_resource *route;      /* serves the requests; owned, like the two below */
    nrm_resource *resource;   /* behind it, for large requests */
    nrm_resource *fallback;   /* NULL: none */
    size_t threshold;         /* bytes; smaller requests get host memory */
    atomic_ullong n_failures; /* requests answered with NULL */
};

struct handler_options {
    nrm_resource *resource; /* borrowed, like the next */
    nrm_resource *fallback; /* NULL: none */
    size_t threshold;
    bool is_immortal; /* for a whole process: see compat_set_immortal */
};

/* A new capsule, or NULL with an error set: the resource cannot back a handler. */
PyObject *handler_create(struct module_state *state,
                         const struct handler_options *options);

/* The handler in one of our capsules; NULL: another one's. Never an error. */
struct handler *handler_of_capsule(PyObject *capsule);

#endif
