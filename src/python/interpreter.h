/* What the core may ask of the interpreter: see core/hooks.h. */
#ifndef NRM_PYTHON_INTERPRETER_H
#define NRM_PYTHON_INTERPRETER_H

#include <Python.h>

#include <stdatomic.h>

#include "python/compat.h"

/* Installs the hooks of the core, and the exit hook. */
int interpreter_init(PyObject *module);

/* True when this thread may call into the interpreter: attached, and it is not
   ending. */
bool interpreter_is_usable(void);

/*
 * Drops a reference that the core held, from any thread, attached or not: later, in the
 * main thread or in the next call of ours, so that no Python code runs where the core
 * cannot have it. Steals `object`.
 */
void interpreter_drop_later(PyObject *object);

/* Drops what waits; called where arbitrary Python code may run. */
void interpreter_drop_now(void);

/* What waits, to be compared with NULL and nothing else. */
struct interpreter_dropped;
extern _Atomic(struct interpreter_dropped *) interpreter_dropped;

#endif
