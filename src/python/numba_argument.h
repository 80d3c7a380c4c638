/*
 * What numba-cuda asks of an argument of a kernel: its type in Numba, and an object
 * with address, shape and strides. Methods and attributes of DeviceArray, and of
 * DeviceBuffer.
 */
#ifndef NRM_PYTHON_NUMBA_ARGUMENT_H
#define NRM_PYTHON_NUMBA_ARGUMENT_H

#include <Python.h>

#define NUMBA_ARGUMENT_TEXT "retr, stream=0"

/* _numba_type_ */
PyObject *numba_type_of_array(PyObject *object, void *closure);
PyObject *numba_type_of_buffer(PyObject *object, void *closure);

/* to_device(retr, stream): the array, behind which the stream of the launch comes. */
PyObject *numba_argument(PyObject *object, PyTypeObject *type, PyObject *const *args,
                         Py_ssize_t n_args, PyObject *names);

/* The array itself, which has what is asked of its _layout. */
PyObject *numba_layout(PyObject *object, void *closure);

#endif
