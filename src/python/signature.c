/*
 * Binding by text signature. A signature is read once, under a lock, into names and
 * counts; binding then compares a handful of short ASCII names, by their addresses
 * where these are interned, as those in the text of a program are.
 */
#include "python/signature.h"

#include <pthread.h>
#include <string.h>

#include "base/assert.h"

static pthread_mutex_t read_lock = PTHREAD_MUTEX_INITIALIZER;

/* Adds the parameter in `item`, e.g. "alignment=None", of `length` characters. */
static void
read_parameter(struct signature *self, const char *item, size_t length, bool *by_name)
{
    if (length == 1 && *item == '*') {
        *by_name = true;
        return;
    }
    if (length == 1 && *item == '/') {
        self->n_positional_only = self->n_names;
        return;
    }
    const char *equals = memchr(item, '=', length);
    size_t n = equals != NULL ? (size_t)(equals - item) : length;
    NRM_ASSERT(self->n_names < SIGNATURE_MAX && n < SIGNATURE_NAME_MAX);
    memcpy(self->names[self->n_names], item, n);
    self->names[self->n_names][n] = '\0';
    self->interned[self->n_names] =
        PyUnicode_InternFromString(self->names[self->n_names]);
    if (self->interned[self->n_names] == NULL) {
        PyErr_Clear(); /* names are compared by their text then */
    }
    self->n_names++;
    if (!*by_name) {
        self->n_positional++;
    }
    if (equals == NULL) {
        self->n_required++;
    }
}

static void
read_text(struct signature *self)
{
    bool by_name = false;
    const char *item = self->text;
    while (*item != '\0') {
        size_t length = strcspn(item, ",");
        read_parameter(self, item, length, &by_name);
        item += length;
        item += strspn(item, ", ");
    }
}

static void
ensure_read(struct signature *self)
{
    if (atomic_load_explicit(&self->is_read, memory_order_acquire)) {
        return;
    }
    pthread_mutex_lock(&read_lock);
    if (!atomic_load_explicit(&self->is_read, memory_order_relaxed)) {
        read_text(self);
        atomic_store_explicit(&self->is_read, true, memory_order_release);
    }
    pthread_mutex_unlock(&read_lock);
}

static int
bind_positional(struct signature *self, PyObject *const *args, Py_ssize_t n_args,
                PyObject **values)
{
    ensure_read(self);
    if (n_args > self->n_positional) {
        PyErr_Format(
            PyExc_TypeError,
            "%s() takes at most %d positional arguments, %zd were given: %s(%s)",
            self->function, self->n_positional, n_args, self->function, self->text);
        return -1;
    }
    for (int i = 0; i < self->n_names; i++) {
        values[i] = i < n_args ? args[i] : NULL;
    }
    return 0;
}

/* The index of a name; n_names: there is none. */
static int
find_name(const struct signature *self, PyObject *name)
{
    int i = self->n_positional_only;
    while (i < self->n_names && name != self->interned[i]) {
        i++;
    }
    if (i < self->n_names) {
        return i;
    }
    i = self->n_positional_only;
    while (i < self->n_names &&
           PyUnicode_CompareWithASCIIString(name, self->names[i]) != 0) {
        i++;
    }
    return i;
}

static int
bind_keyword(struct signature *self, PyObject *name, PyObject *value, PyObject **values)
{
    int i = find_name(self, name);
    if (i < self->n_names && values[i] == NULL) {
        values[i] = value;
        return 0;
    }
    if (i < self->n_names) {
        PyErr_Format(PyExc_TypeError, "%s() got two values for argument '%U'",
                     self->function, name);
        return -1;
    }
    PyErr_Format(PyExc_TypeError, "%s() has no argument '%U': %s(%s)", self->function,
                 name, self->function, self->text);
    return -1;
}

static int
check_required(struct signature *self, PyObject **values)
{
    for (int i = 0; i < self->n_required; i++) {
        if (values[i] == NULL) {
            PyErr_Format(PyExc_TypeError, "%s() needs the argument '%s': %s(%s)",
                         self->function, self->names[i], self->function, self->text);
            return -1;
        }
    }
    return 0;
}

int
signature_bind_any(struct signature *self, PyObject *const *args, Py_ssize_t n_args,
                   PyObject *keyword_names, PyObject **values)
{
    if (bind_positional(self, args, n_args, values) < 0) {
        return -1;
    }
    Py_ssize_t n_keywords = keyword_names != NULL ? PyTuple_GET_SIZE(keyword_names) : 0;
    for (Py_ssize_t i = 0; i < n_keywords; i++) {
        PyObject *name = PyTuple_GET_ITEM(keyword_names, i);
        if (bind_keyword(self, name, args[n_args + i], values) < 0) {
            return -1;
        }
    }
    return check_required(self, values);
}

int
signature_bind_tuple(struct signature *self, PyObject *args, PyObject *keywords,
                     PyObject **values)
{
    PyObject *const *items = ((PyTupleObject *)args)->ob_item;
    if (bind_positional(self, items, PyTuple_GET_SIZE(args), values) < 0) {
        return -1;
    }
    PyObject *name, *value;
    Py_ssize_t position = 0;
    while (keywords != NULL && PyDict_Next(keywords, &position, &name, &value)) {
        if (bind_keyword(self, name, value, values) < 0) {
            return -1;
        }
    }
    return check_required(self, values);
}
