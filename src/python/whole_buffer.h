/* The whole buffer that an array, or another object with the buffer protocol, is a part
   of. */
#ifndef NRM_PYTHON_WHOLE_BUFFER_H
#define NRM_PYTHON_WHOLE_BUFFER_H

#include <Python.h>

#include <stdbool.h>
#include <stddef.h>

struct whole_buffer {
    char *ptr;
    size_t nbytes;
    bool read_only;  /* its owner never lets it be written */
    bool is_private; /* plain memory of NumPy's or ours */
    PyObject *owner; /* what keeps it alive and in place: a new reference */
};

/* -1 with an error set: of Python objects, of several pieces, or of memory that is
   gone. */
int whole_buffer_of(PyObject *object, struct whole_buffer *out);

/* The array behind an object that stands between two: a memoryview, or what has it in
   `base`, as the objects of numpy.lib.stride_tricks. NULL, without an error: there is
   none. New. */
PyObject *whole_buffer_array_behind(PyObject *object);

#endif
