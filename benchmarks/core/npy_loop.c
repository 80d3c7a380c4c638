/*
 * NumPy's array constructors from C, without the interpreter between two calls: what an
 * extension pays. Compiled by benchmarks/run.py when it is needed.
 *
 *     empty(nbytes, count), zeros(nbytes, count) -> seconds for each array
 *     grow(first, last, steps) -> seconds for all steps of a block, by the current
 *                                 handler's realloc
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>
#include <time.h>

#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#define NPY_TARGET_VERSION NPY_1_25_API_VERSION
#include <numpy/arrayobject.h>

static double
now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static PyObject *
run(PyObject *args, int is_zeroed)
{
    npy_intp nbytes;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "nn", &nbytes, &count)) {
        return NULL;
    }
    double start = now();
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *array = is_zeroed ? PyArray_ZEROS(1, &nbytes, NPY_UINT8, 0)
                                    : PyArray_EMPTY(1, &nbytes, NPY_UINT8, 0);
        if (array == NULL) {
            return NULL;
        }
        Py_DECREF(array);
    }
    return PyFloat_FromDouble((now() - start) / (double)count);
}

static PyObject *
loop_empty(PyObject *module, PyObject *args)
{
    (void)module;
    return run(args, 0);
}

static PyObject *
loop_zeros(PyObject *module, PyObject *args)
{
    (void)module;
    return run(args, 1);
}

/* Seconds in realloc alone; the new part of the block is written at each step, as a
   reader that fills it would. Negative with an exception set. */
static double
grow(PyDataMemAllocator *allocator, size_t first, size_t last, size_t steps)
{
    size_t nbytes = first;
    char *block = allocator->malloc(allocator->ctx, nbytes);
    double seconds = 0.0;
    for (size_t i = 1; block != NULL && i <= steps; i++) {
        size_t next = first + (last - first) * i / steps;
        memset(block, 1, nbytes);
        double start = now();
        char *moved = allocator->realloc(allocator->ctx, block, next);
        seconds += now() - start;
        if (moved == NULL) {
            allocator->free(allocator->ctx, block, nbytes);
        }
        else if (moved[0] != 1 || moved[nbytes - 1] != 1) {
            PyErr_SetString(PyExc_RuntimeError, "realloc lost what was in the block");
        }
        block = moved;
        nbytes = next;
    }
    if (block == NULL) {
        PyErr_NoMemory();
    }
    else {
        allocator->free(allocator->ctx, block, nbytes);
    }
    return PyErr_Occurred() ? -1.0 : seconds;
}

static PyObject *
loop_grow(PyObject *module, PyObject *args)
{
    Py_ssize_t first, last, steps;
    (void)module;
    if (!PyArg_ParseTuple(args, "nnn", &first, &last, &steps)) {
        return NULL;
    }
    PyObject *capsule = PyDataMem_GetHandler();
    if (capsule == NULL) {
        return NULL;
    }
    PyDataMem_Handler *handler = PyCapsule_GetPointer(capsule, "mem_handler");
    double seconds = -1.0;
    if (handler != NULL) {
        seconds = grow(&handler->allocator, (size_t)first, (size_t)last, (size_t)steps);
    }
    Py_DECREF(capsule);
    return seconds < 0 ? NULL : PyFloat_FromDouble(seconds);
}

static PyMethodDef methods[] = {
    {"empty", loop_empty, METH_VARARGS, NULL},
    {"zeros", loop_zeros, METH_VARARGS, NULL},
    {"grow", loop_grow, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "npy_loop",
                                        .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC
PyInit_npy_loop(void)
{
    import_array();
    return PyModule_Create(&definition);
}
