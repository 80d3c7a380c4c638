/*
 * Conversions of arguments. Python's own messages for out-of-range integers speak of C
 * types, and come as OverflowError; ours speak of bytes, and come as ValueError.
 */
#include "python/args.h"

#include <math.h>
#include <string.h>

#include "base/bits.h"
#include "base/units.h"
#include "nrm/options.h"

#define SIZE_TEXT "an int or text such as '64 KiB' or '1.5 GiB'"

static int
type_error(PyObject *value, const char *name, const char *allowed)
{
    PyErr_Format(PyExc_TypeError, "%s must be %s, not %.100s", name, allowed,
                 Py_TYPE(value)->tp_name);
    return -1;
}

/* `index` is an int. */
static int
size_from_int(PyObject *index, const char *name, size_t *out)
{
    size_t size = PyLong_AsSize_t(index);
    if (size != (size_t)-1 || !PyErr_Occurred()) {
        *out = size;
        return 0;
    }
    if (!PyErr_ExceptionMatches(PyExc_OverflowError)) {
        return -1;
    }
    PyErr_Clear();
    int overflow;
    (void)PyLong_AsLongAndOverflow(index, &overflow);
    if (overflow > 0) {
        PyErr_Format(PyExc_ValueError, "%s must be less than 2**64, not %S", name,
                     index);
    }
    else {
        PyErr_Format(PyExc_ValueError, "%s must not be negative, not %S", name, index);
    }
    return -1;
}

static int
size_from_text(PyObject *value, const char *name, size_t *out, double *out_percent)
{
    const char *text = arg_text(value, name);
    if (text == NULL) {
        return -1;
    }
    if (nrm_parse_nbytes(text, out, out_percent) != NRM_OK) {
        PyErr_Format(PyExc_ValueError, "%s: %s", name, nrm_last_error()->message);
        return -1;
    }
    return 0;
}

static int
size_from_object(PyObject *value, const char *name, size_t *out, double *out_percent)
{
    if (PyLong_Check(value)) {
        return size_from_int(value, name, out);
    }
    if (PyUnicode_Check(value)) {
        return size_from_text(value, name, out, out_percent);
    }
    if (!PyIndex_Check(value)) {
        return type_error(value, name,
                          out_percent == NULL
                              ? SIZE_TEXT
                              : "an int or text such as '1.5 GiB' or '50%'");
    }
    PyObject *index = PyNumber_Index(value);
    if (index == NULL) {
        return -1;
    }
    int result = size_from_int(index, name, out);
    Py_DECREF(index);
    return result;
}

int
arg_any_nbytes(PyObject *value, const char *name, size_t *out)
{
    return size_from_object(value, name, out, NULL);
}

int
arg_nbytes_or_percent(PyObject *value, const char *name, size_t *out,
                      double *out_percent)
{
    *out_percent = -1;
    return size_from_object(value, name, out, out_percent);
}

int
arg_integer(PyObject *value, const char *name, long low, long high, long *out)
{
    if (!PyIndex_Check(value)) {
        return type_error(value, name, "an int");
    }
    PyObject *index = PyNumber_Index(value);
    if (index == NULL) {
        return -1;
    }
    int overflow;
    long number = PyLong_AsLongAndOverflow(index, &overflow);
    int result = 0;
    if (overflow != 0 || number < low || number > high) {
        PyErr_Format(PyExc_ValueError, "%s must be between %ld and %ld, not %S", name,
                     low, high, index);
        result = -1;
    }
    Py_DECREF(index);
    if (result == 0) {
        *out = number;
    }
    return result;
}

int
arg_any_address(PyObject *value, const char *name, uintptr_t *out)
{
    if (!PyIndex_Check(value)) {
        return type_error(value, name, "an int");
    }
    size_t address;
    if (size_from_object(value, name, &address, NULL) < 0) {
        return -1;
    }
    *out = address;
    return 0;
}

int
arg_driver_handle(PyObject *value, const char *name, uintptr_t *out)
{
    PyNumberMethods *number = Py_TYPE(value)->tp_as_number;
    bool is_handle = number != NULL && number->nb_int != NULL &&
                     !PyFloat_Check(value) && !PyBool_Check(value);
    if (!is_handle) {
        PyErr_Format(PyExc_ValueError,
                     "%s must be a handle of the driver, as int or as an object of "
                     "cuda.bindings, not %.100s",
                     name, Py_TYPE(value)->tp_name);
        return -1;
    }
    PyObject *integer = PyNumber_Long(value);
    size_t address;
    if (integer == NULL || size_from_int(integer, name, &address) < 0) {
        Py_XDECREF(integer);
        return -1;
    }
    Py_DECREF(integer);
    *out = address;
    return 0;
}

int
arg_alignment(PyObject *value, const char *name, size_t *out)
{
    if (arg_is_none(value)) {
        *out = 0;
        return 0;
    }
    if (!PyIndex_Check(value)) {
        return type_error(value, name, "an int that is a power of two, or None");
    }
    size_t alignment;
    if (size_from_object(value, name, &alignment, NULL) < 0) {
        return -1;
    }
    if (!nrm__is_power_of_two(alignment)) {
        PyErr_Format(PyExc_ValueError, "%s must be a power of two, not %zu", name,
                     alignment);
        return -1;
    }
    *out = alignment;
    return 0;
}

static int
duration_from_text(PyObject *value, const char *name, uint64_t *out_ns)
{
    const char *text = arg_text(value, name);
    if (text == NULL) {
        return -1;
    }
    const char *wrong = nrm__quantity_parse(text, nrm__time_units, true, out_ns);
    if (wrong != NULL) {
        PyErr_Format(PyExc_ValueError, "%s: %R %s", name, value, wrong);
        return -1;
    }
    return 0;
}

int
arg_duration(PyObject *value, const char *name, uint64_t *out_ns)
{
    if (PyUnicode_Check(value)) {
        return duration_from_text(value, name, out_ns);
    }
    if (!PyNumber_Check(value)) {
        return type_error(value, name, "a number of seconds or text such as '20 ms'");
    }
    double seconds = PyFloat_AsDouble(value);
    if (seconds == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (!(seconds >= 0) || seconds > 1e9) {
        PyErr_Format(PyExc_ValueError, "%s must be between 0 and 1e9 seconds, not %R",
                     name, value);
        return -1;
    }
    *out_ns = (uint64_t)llround(seconds * 1e9);
    return 0;
}

int
arg_choice(PyObject *value, const char *name, const char *const *words, int *out)
{
    const char *text = arg_text(value, name);
    if (text == NULL) {
        return -1;
    }
    char list[256] = "";
    for (int i = 0; words[i] != NULL; i++) {
        if (strcmp(text, words[i]) == 0) {
            *out = i;
            return 0;
        }
        size_t n = strlen(list);
        snprintf(list + n, sizeof list - n, "%s'%s'", i == 0 ? "" : ", ", words[i]);
    }
    PyErr_Format(PyExc_ValueError, "%s must be one of %s, not %R", name, list, value);
    return -1;
}

const char *
arg_text(PyObject *value, const char *name)
{
    if (!PyUnicode_Check(value)) {
        (void)type_error(value, name, "a str");
        return NULL;
    }
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(value, &length);
    if (text == NULL) {
        return NULL;
    }
    if (strlen(text) != (size_t)length) {
        PyErr_Format(PyExc_ValueError, "%s must not contain a NUL character: %R", name,
                     value);
        return NULL;
    }
    return text;
}
