/* Event: a point in the work of a stream. */
#ifndef NRM_PYTHON_EVENT_H
#define NRM_PYTHON_EVENT_H

#include <Python.h>

#include "nrm/stream.h"
#include "python/state.h"

int event_init(PyObject *module);

/* Stream.record(event=None): a new reference to the event. */
PyObject *event_record_on(struct module_state *state, PyObject *event,
                          PyObject *stream);

/* Stream.wait_event(event) */
PyObject *event_hold(struct module_state *state, PyObject *event, PyObject *stream);

#endif
