/*
 * Before os.fork: what it will cost, and that children write their logs.
 *
 * Idle memory is left out of a child (core/left_out.c), live page-locked arrays are
 * copied into it, all at once. Of more than a GiB that is said, while there is still a
 * Python program that can be told: a hook of os.register_at_fork, which forks of C code
 * do not run. Where warnings are errors, os.fork prints the error and forks all the
 * same.
 */
#include "python/fork.h"

#include <stdio.h>

#include "base/bits.h"
#include "core/left_out.h"
#include "core/log.h"
#include "cuda/page_lock.h"
#include "nrm/options.h"

#define WARN_NBYTES NRM__GIB

/* Measured on one machine: 4 GiB that were registered, 2.6 s. */
#define SECONDS_PER_GIB 0.65

static PyObject *
warn(size_t nbytes)
{
    char size[32], seconds[64];
    double expected = (double)nbytes / (double)NRM__GIB * SECONDS_PER_GIB;
    bool leaves_out = nrm_option_get(NRM_OPT_FORK) != 0;
    nrm_format_nbytes(nbytes, size, sizeof size);
    snprintf(seconds, sizeof seconds, "%.1f s (%.2f s for a GiB were measured)",
             expected, SECONDS_PER_GIB);
    int result = PyErr_WarnFormat(
        PyExc_RuntimeWarning, 1,
        "os.fork copies %s of page-locked memory into the child at once: expect %s "
        "and as much memory, for each child. %s",
        size, seconds,
        leaves_out
            ? "It is memory that pin() has locked: close the pins, or pin shared memory"
            : "numpy_rmm.options[\"fork\"] = \"dontfork\" leaves the arrays out of "
              "children; processes that are spawned copy nothing");
    if (result < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Children of multiprocessing end without the end of a process. */
static int
watch_children(void)
{
    PyObject *module = PyImport_ImportModule("numpy_rmm._logging");
    PyObject *result =
        module == NULL ? NULL : PyObject_CallMethod(module, "_watch_children", NULL);
    Py_XDECREF(module);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

static PyObject *
before_fork(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    if (nrm__log_is_used() && watch_children() < 0) {
        return NULL;
    }
    if (nrm__page_locked_nbytes() > WARN_NBYTES) {
        size_t nbytes = nrm__left_out_copied_nbytes();
        if (nbytes > WARN_NBYTES) {
            return warn(nbytes);
        }
    }
    Py_RETURN_NONE;
}

static PyMethodDef before_method = {
    "_before_fork",
    before_fork,
    METH_NOARGS,
    PyDoc_STR("Warns of a fork that copies much page-locked memory."),
};

int
fork_init(PyObject *module)
{
    PyObject *function = PyCFunction_New(&before_method, module);
    PyObject *os = PyImport_ImportModule("os");
    PyObject *registers = os == NULL ? NULL
                                     : PyObject_GetAttrString(os, "register_at_fork");
    PyObject *none = PyTuple_New(0);
    PyObject *hooks = function == NULL ? NULL
                                       : Py_BuildValue("{s:O}", "before", function);
    PyObject *result = registers == NULL || none == NULL || hooks == NULL
                           ? NULL
                           : PyObject_Call(registers, none, hooks);
    Py_XDECREF(function);
    Py_XDECREF(os);
    Py_XDECREF(registers);
    Py_XDECREF(none);
    Py_XDECREF(hooks);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}
