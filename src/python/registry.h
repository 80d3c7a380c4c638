/* The registry of named resources, and the current resource of each device. */
#ifndef NRM_PYTHON_REGISTRY_H
#define NRM_PYTHON_REGISTRY_H

#include <Python.h>

#include "python/state.h"

int registry_init(PyObject *module);

/* The current resource of the current device: a new reference, or NULL with an error
   set. */
PyObject *registry_current(struct module_state *state);

/* Lets go of objects whose name or device stands for something else by now. */
int registry_prune(struct module_state *state);

/* Lets go of the objects of all devices: before another driver takes over, as a pool
   that ends after that would wait for work that nobody can ask about. */
void registry_forget_devices(struct module_state *state);

/* What numpy_rmm/_registry.py is made of, and the functions on devices. */
extern PyMethodDef registry_methods[];

#endif
