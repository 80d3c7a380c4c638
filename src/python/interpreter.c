/*
 * The interpreter as the core sees it.
 *
 * The core gives the interpreter up around whatever may block. It is called from
 * threads that hold it, from threads that do not (NumPy's text parser reallocates
 * without a thread state) and during finalization, when taking it back may never
 * return. So: detach only when attached, and not at all once our exit hook has run.
 */
#include "python/interpreter.h"

#include <stdatomic.h>

#include "core/background.h"
#include "core/hooks.h"
#include "cuda/driver.h"
#include "python/callbacks.h"
#include "python/pending.h"

#define EXIT_SETTLE_NS UINT64_C(200000000) /* for a driver call of ours in progress */

/* ---- detach and attach ---- */

bool
interpreter_is_usable(void)
{
    return !nrm__is_exiting() && compat_is_attached();
}

static void *
detach(void)
{
    return interpreter_is_usable() ? PyEval_SaveThread() : NULL;
}

static void
attach(void *token)
{
    if (token != NULL) {
        PyEval_RestoreThread(token);
    }
}

/* Not PyGC_Collect, which does nothing where the program has turned automatic
   collection off. A pending exception stays pending, and what goes wrong here is shown
   and forgotten. */
static bool
collect(void)
{
    if (!interpreter_is_usable()) {
        return false;
    }
    PyObject *pending = compat_take_error();
    PyObject *gc = PyImport_ImportModule("gc");
    PyObject *n_found = gc == NULL ? NULL : PyObject_CallMethod(gc, "collect", NULL);
    bool collected = n_found != NULL;
    if (!collected) {
        PyErr_WriteUnraisable(gc);
    }
    Py_XDECREF(n_found);
    Py_XDECREF(gc);
    callbacks_collect_again();
    pending_reap();
    interpreter_drop_now();
    compat_restore_error(pending);
    return collected;
}

static const struct nrm__hooks hooks = {
    .detach = detach, .attach = attach, .collect = collect};

/* ---- references that the core drops ---- */

struct interpreter_dropped {
    struct interpreter_dropped *next;
    PyObject *object;
};

_Atomic(struct interpreter_dropped *) interpreter_dropped;

void
interpreter_drop_now(void)
{
    if (atomic_load_explicit(&interpreter_dropped, memory_order_relaxed) == NULL) {
        return;
    }
    struct interpreter_dropped *item = atomic_exchange(&interpreter_dropped, NULL);
    while (item != NULL) {
        struct interpreter_dropped *next = item->next;
        Py_DECREF(item->object);
        PyMem_RawFree(item);
        item = next;
    }
}

static atomic_bool is_drop_pending;

static int
drop_pending(void *Py_UNUSED(unused))
{
    atomic_store(&is_drop_pending, false);
    interpreter_drop_now();
    return 0;
}

void
interpreter_drop_later(PyObject *object)
{
    if (object == NULL || nrm__is_exiting()) {
        return; /* nothing is given back any more */
    }
    struct interpreter_dropped *item = PyMem_RawMalloc(sizeof *item);
    if (item == NULL) {
        return; /* lost: better than Python code in the middle of the core */
    }
    item->object = object;
    item->next = atomic_load(&interpreter_dropped);
    while (!atomic_compare_exchange_weak(&interpreter_dropped, &item->next, item)) {
    }
    /* The queue is short, and for all: one for what waits. */
    if (!atomic_exchange(&is_drop_pending, true) &&
        Py_AddPendingCall(drop_pending, NULL) < 0) {
        atomic_store(&is_drop_pending, false); /* full: the next call of ours */
    }
}

/* ---- exit ---- */

static PyObject *
exit_begin(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    nrm__exit_begin();
    nrm__cuda_exit_begin();
    nrm__background_settle(EXIT_SETTLE_NS);
    Py_RETURN_NONE;
}

static PyMethodDef exit_method = {
    "_exit_begin",
    exit_begin,
    METH_NOARGS,
    PyDoc_STR("The process has begun to end; frees after it are normal."),
};

int
interpreter_init(PyObject *module)
{
    nrm__hooks_set(&hooks);
    PyObject *function = PyCFunction_New(&exit_method, module);
    PyObject *atexit = PyImport_ImportModule("atexit");
    PyObject *result = NULL;
    if (function != NULL && atexit != NULL) {
        result = PyObject_CallMethod(atexit, "register", "O", function);
    }
    Py_XDECREF(function);
    Py_XDECREF(atexit);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}
