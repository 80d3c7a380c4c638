/*
 * Differences between CPython 3.11 and 3.14, with and without the GIL, in one place.
 */
#ifndef NRM_PYTHON_COMPAT_H
#define NRM_PYTHON_COMPAT_H

#include <Python.h>
#include <stdbool.h>
#include <structmember.h>

/* The dictionary or list `object` is ours alone in between, also without the GIL. */
#if PY_VERSION_HEX >= 0x030d0000
#define COMPAT_BEGIN_CRITICAL_SECTION(object) Py_BEGIN_CRITICAL_SECTION(object)
#define COMPAT_END_CRITICAL_SECTION() Py_END_CRITICAL_SECTION()
#else
#define COMPAT_BEGIN_CRITICAL_SECTION(object)                                          \
    {                                                                                  \
        (void)(object);
#define COMPAT_END_CRITICAL_SECTION() }
#endif

/* The referent of a weak reference as a new reference, or NULL without an error. */
static inline PyObject *
compat_weakref_get(PyObject *weakref)
{
#if PY_VERSION_HEX >= 0x030d0000
    PyObject *object = NULL;
    if (PyWeakref_GetRef(weakref, &object) < 0) {
        PyErr_Clear();
    }
    return object;
#else
    PyObject *object = PyWeakref_GET_OBJECT(weakref);
    return object == Py_None ? NULL : Py_NewRef(object);
#endif
}

/* Looks `key` up: 1 and a new reference, 0 and NULL, or -1 with an error set. */
static inline int
compat_dict_get(PyObject *dict, PyObject *key, PyObject **out)
{
#if PY_VERSION_HEX >= 0x030d0000
    return PyDict_GetItemRef(dict, key, out);
#else
    *out = PyDict_GetItemWithError(dict, key);
    if (*out == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_INCREF(*out);
    return 1;
#endif
}

/* An attribute: 1 and a new reference, 0 and NULL where there is none, or -1 with an
   error set. */
static inline int
compat_get_attribute(PyObject *object, PyObject *name, PyObject **out)
{
#if PY_VERSION_HEX >= 0x030d0000
    return PyObject_GetOptionalAttr(object, name, out);
#else
    return _PyObject_LookupAttr(object, name, out);
#endif
}

/* What `dict` has under `key`, which is `value` if it had nothing: a new reference. */
static inline PyObject *
compat_dict_set_default(PyObject *dict, PyObject *key, PyObject *value)
{
#if PY_VERSION_HEX >= 0x030d0000
    PyObject *result = NULL;
    return PyDict_SetDefaultRef(dict, key, value, &result) < 0 ? NULL : result;
#else
    return Py_XNewRef(PyDict_SetDefault(dict, key, value));
#endif
}

/* A number that changes with each change of `dict`; 0: this interpreter has none. */
static inline uint64_t
compat_dict_version(PyObject *dict)
{
#if PY_VERSION_HEX < 0x030e0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    return ((PyDictObject *)dict)->ma_version_tag; /* PEP 509 */
#pragma GCC diagnostic pop
#else
    (void)dict;
    return 0;
#endif
}

/* The exception that is pending, put aside; NULL: none. */
static inline PyObject *
compat_take_error(void)
{
#if PY_VERSION_HEX >= 0x030c0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (type == NULL) {
        return NULL;
    }
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(value, traceback);
    }
    Py_DECREF(type);
    Py_XDECREF(traceback);
    return value;
#endif
}

/* Steals what compat_take_error returned. */
static inline void
compat_restore_error(PyObject *error)
{
#if PY_VERSION_HEX >= 0x030c0000
    PyErr_SetRaisedException(error);
#else
    if (error != NULL) {
        PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(error)), error,
                      PyException_GetTraceback(error));
    }
#endif
}

/*
 * Takes the reference counting of an object out of play, where that is what threads
 * would contend for. `object` was just made and nobody else has seen it.
 */
static inline void
compat_set_immortal(PyObject *object)
{
#if defined(Py_GIL_DISABLED) && PY_VERSION_HEX >= 0x030f0000
    (void)PyUnstable_SetImmortal(object);
#elif defined(Py_GIL_DISABLED)
    object->ob_tid = _Py_UNOWNED_TID;
    object->ob_ref_local = _Py_IMMORTAL_REFCNT_LOCAL;
    object->ob_ref_shared = 0;
#else
    (void)
        object; /* one lock guards all counts anyway: it may die with its last array */
#endif
}

/*
 * Whether the calling thread holds the interpreter: never an error, never a side
 * effect, callable from any thread. PyGILState_Check answers 1 in detached threads once
 * a subinterpreter has existed.
 */
static inline bool
compat_is_attached(void)
{
#if PY_VERSION_HEX >= 0x030d0000
    return PyThreadState_GetUnchecked() != NULL;
#elif PY_VERSION_HEX >= 0x030c0000
    return _PyThreadState_UncheckedGet() != NULL;
#else
    /* 3.11 answers with the thread state of whoever holds the GIL, in every thread; the
       one stored for this thread tells whether that is us. */
    PyThreadState *holder = _PyThreadState_UncheckedGet();
    return holder != NULL && holder == PyGILState_GetThisThreadState();
#endif
}

#endif
