/*
 * What only a resource over a memory pool of the driver can tell, from Python.
 */
#include "python/cuda_async.h"

#include "nrm/sources.h"
#include "python/errors.h"
#include "python/memory_resource.h"

static PyObject *
pool_handle(PyObject *object, PyTypeObject *type, PyObject *const *Py_UNUSED(args),
            Py_ssize_t n_args, PyObject *names)
{
    struct module_state *state = PyType_GetModuleState(type);
    uintptr_t handle;
    if (n_args != 0 || (names != NULL && PyTuple_GET_SIZE(names) != 0)) {
        PyErr_SetString(PyExc_TypeError, "pool_handle() takes no arguments");
        return NULL;
    }
    if (errors_begin_call() < 0) {
        return NULL;
    }
    nrm_resource *mr = memory_resource_get(state, object, "self");
    if (mr == NULL) {
        return NULL;
    }
    nrm_status status = nrm_cuda_async_pool_handle(mr, &handle);
    if (status != NRM_OK) {
        return errors_raise(state, status);
    }
    return PyLong_FromSize_t(handle);
}

PyMethodDef cuda_async_methods[] = {
    {"pool_handle", (PyCFunction)(void (*)(void))pool_handle,
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS,
     PyDoc_STR("pool_handle($self)\n--\n\n"
               "The driver's handle of the memory pool, as int: a cudaMemPool_t or\n"
               "CUmemoryPool, borrowed from the resource.\n\n"
               "Makes the pool, and with it a context of the device, if there is none "
               "yet.\n\n"
               "Raises\n------\n"
               "CudaUnavailableError\n"
               "    When the device or its driver has no memory pools.")},
    {NULL, NULL, 0, NULL},
};
