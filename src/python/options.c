/*
 * Options as Python values: sizes as int, times as float seconds, choices as str. They
 * are set from the same text as the environment variables are, so both are checked
 * alike.
 */
#include "python/options.h"

#include <stdio.h>

#include "nrm/options.h"
#include "python/args.h"
#include "python/errors.h"
#include "python/signature.h"

/* Raises a KeyError that lists the options there are. */
static void
unknown_option(PyObject *name)
{
    char known[512] = "";
    size_t length = 0;
    for (int i = 0; i < NRM_OPT_COUNT && length < sizeof known; i++) {
        nrm_option_info info;
        nrm_option_info_get((nrm_option)i, &info);
        length += (size_t)snprintf(known + length, sizeof known - length, "%s%s",
                                   i == 0 ? "" : ", ", info.name);
    }
    PyErr_Format(PyExc_KeyError, "no option is named %R; known: %s", name, known);
}

static int
find(PyObject *name, nrm_option *out)
{
    const char *text = arg_text(name, "the name of an option");
    if (text == NULL) {
        return -1;
    }
    if (nrm_option_find(text, out) != NRM_OK) {
        unknown_option(name);
        return -1;
    }
    return 0;
}

static PyObject *
choice_text(const nrm_option_info *info)
{
    return PyUnicode_FromString(info->text);
}

static PyObject *
value_of(nrm_option option)
{
    nrm_option_info info;
    nrm_option_info_get(option, &info);
    switch (info.type) {
    case NRM_OPTION_SIZE:
    case NRM_OPTION_INT:
        return PyLong_FromLongLong(nrm_option_get(option));
    case NRM_OPTION_TIME:
        return PyFloat_FromDouble((double)nrm_option_get(option) / 1e9);
    case NRM_OPTION_BOOL:
        return PyBool_FromLong(nrm_option_get(option) != 0);
    default:
        return choice_text(&info);
    }
}

static PyObject *
option_get(PyObject *Py_UNUSED(module), PyObject *name)
{
    nrm_option option;
    return find(name, &option) < 0 ? NULL : value_of(option);
}

/* A value as the text that the table reads: a new str. */
static PyObject *
text_of(nrm_option_type type, PyObject *name, PyObject *value)
{
    if (PyUnicode_Check(value)) {
        return Py_NewRef(value);
    }
    if (type == NRM_OPTION_TIME && PyNumber_Check(value) && !PyBool_Check(value)) {
        uint64_t ns;
        return arg_duration(value, "the value", &ns) < 0
                   ? NULL
                   : PyUnicode_FromFormat("%llu ns", (unsigned long long)ns);
    }
    if (type == NRM_OPTION_BOOL && PyBool_Check(value)) {
        return PyUnicode_FromString(value == Py_True ? "1" : "0");
    }
    if ((type == NRM_OPTION_SIZE || type == NRM_OPTION_INT) && PyIndex_Check(value)) {
        PyObject *index = PyNumber_Index(value);
        PyObject *text = index == NULL ? NULL : PyObject_Str(index);
        Py_XDECREF(index);
        return text;
    }
    static const char *const allowed[] = {
        [NRM_OPTION_SIZE] = "an int or text such as '64 KiB'",
        [NRM_OPTION_TIME] = "a number of seconds or text such as '20 ms'",
        [NRM_OPTION_INT] = "an int",
        [NRM_OPTION_BOOL] = "True or False",
        [NRM_OPTION_CHOICE] = "a str",
        [NRM_OPTION_TEXT] = "a str",
    };
    PyErr_Format(PyExc_TypeError, "option %R takes %s, not %.100s", name, allowed[type],
                 Py_TYPE(value)->tp_name);
    return NULL;
}

static PyObject *
option_set(PyObject *module, PyObject *const *args, Py_ssize_t n_args, PyObject *names)
{
    static struct signature signature = SIGNATURE("_option_set", "name, value");
    PyObject *values[2];
    nrm_option option;
    nrm_option_info info;
    if (signature_bind(&signature, args, n_args, names, values) < 0 ||
        find(values[0], &option) < 0) {
        return NULL;
    }
    nrm_option_info_get(option, &info);
    PyObject *text = text_of(info.type, values[0], values[1]);
    const char *utf8 = text == NULL ? NULL : arg_text(text, "the value");
    nrm_status status = utf8 == NULL ? NRM_OK : nrm_option_set(option, utf8);
    Py_XDECREF(text);
    if (utf8 == NULL) {
        return NULL;
    }
    if (status != NRM_OK) {
        return errors_raise(module_state(module), status);
    }
    Py_RETURN_NONE;
}

static PyObject *
option_names(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    PyObject *tuple = PyTuple_New(NRM_OPT_COUNT);
    for (int i = 0; tuple != NULL && i < NRM_OPT_COUNT; i++) {
        nrm_option_info info;
        nrm_option_info_get((nrm_option)i, &info);
        PyObject *name = PyUnicode_FromString(info.name);
        if (name == NULL) {
            Py_CLEAR(tuple);
            break;
        }
        PyTuple_SET_ITEM(tuple, i, name);
    }
    return tuple;
}

/* (environment variable, value as text, default as text, source, choices, meaning) */
static PyObject *
option_row(PyObject *Py_UNUSED(module), PyObject *name)
{
    static const char *const sources[] = {
        [NRM_OPTION_DEFAULT] = "default",
        [NRM_OPTION_ENVIRONMENT] = "environment",
        [NRM_OPTION_PROGRAM] = "program",
        [NRM_OPTION_INVALID] = "invalid",
    };
    nrm_option option;
    nrm_option_info info;
    if (find(name, &option) < 0) {
        return NULL;
    }
    nrm_option_info_get(option, &info);
    return Py_BuildValue("(ssssss)", info.environment, info.text, info.default_text,
                         sources[info.source], info.choices, info.doc);
}

static PyObject *
format_nbytes(PyObject *Py_UNUSED(module), PyObject *value)
{
    size_t nbytes;
    char text[32];
    if (arg_nbytes(value, "nbytes", &nbytes) < 0) {
        return NULL;
    }
    nrm_format_nbytes(nbytes, text, sizeof text);
    return PyUnicode_FromString(text);
}

static PyObject *
parse_nbytes(PyObject *Py_UNUSED(module), PyObject *value)
{
    size_t nbytes;
    return arg_nbytes(value, "nbytes", &nbytes) < 0 ? NULL : PyLong_FromSize_t(nbytes);
}

PyMethodDef options_methods[] = {
    {"_option_get", option_get, METH_O,
     PyDoc_STR("_option_get($module, name, /)\n--\n\nThe value of an option.")},
    {"_option_set", (PyCFunction)(void (*)(void))option_set,
     METH_FASTCALL | METH_KEYWORDS,
     PyDoc_STR("_option_set($module, name, value)\n--\n\nSet an option.")},
    {"_option_names", option_names, METH_NOARGS,
     PyDoc_STR("_option_names($module)\n--\n\nThe names of all options.")},
    {"_option_row", option_row, METH_O,
     PyDoc_STR("_option_row($module, name, /)\n--\n\n"
               "(environment variable, value, default, source, choices, meaning)")},
    {"_format_nbytes", format_nbytes, METH_O,
     PyDoc_STR(
         "_format_nbytes($module, nbytes, /)\n--\n\n'64 KiB', '1.5 GiB', '123 B'.")},
    {"_parse_nbytes", parse_nbytes, METH_O,
     PyDoc_STR("_parse_nbytes($module, nbytes, /)\n--\n\n"
               "Bytes of an int or of text such as '1.5 GiB'.")},
    {NULL, NULL, 0, NULL},
};
