/*
 * What only a pool can do, from Python.
 */
#include "python/pool.h"

#include "nrm/pools.h"
#include "cuda/context.h"
#include "python/args.h"
#include "python/errors.h"
#include "python/memory_resource.h"
#include "python/signature.h"

#define ADD_PEER_TEXT "device"

static PyObject *
add_peer(PyObject *object, PyTypeObject *type, PyObject *const *args, Py_ssize_t n_args,
         PyObject *names)
{
    static struct signature signature = SIGNATURE("add_peer", ADD_PEER_TEXT);
    struct module_state *state = PyType_GetModuleState(type);
    PyObject *values[1];
    long device;
    if (errors_begin_call() < 0) {
        return NULL;
    }
    nrm_resource *mr = memory_resource_get(state, object, "self");
    if (mr == NULL || signature_bind(&signature, args, n_args, names, values) < 0 ||
        arg_integer(values[0], "device", 0, NRM__MAX_DEVICES - 1, &device) < 0) {
        return NULL;
    }
    nrm_status status = nrm_pool_add_peer(mr, (int)device);
    if (status != NRM_OK) {
        return errors_raise(state, status);
    }
    Py_RETURN_NONE;
}

static PyObject *
pool_size(PyObject *object, PyObject *Py_UNUSED(unused))
{
    struct module_state *state = type_state(Py_TYPE(object));
    nrm_statistics statistics;
    nrm_resource *mr = state == NULL || errors_begin_call() < 0
                           ? NULL
                           : memory_resource_get(state, object, "self");
    if (mr == NULL) {
        return NULL;
    }
    nrm_status status = nrm_resource_statistics(mr, &statistics);
    return status == NRM_OK ? PyLong_FromLongLong(statistics.reserved_bytes)
                            : errors_raise(state, status);
}

PyMethodDef pool_methods[] = {
    {"pool_size", pool_size, METH_NOARGS,
     PyDoc_STR(
         "pool_size($self)\n--\n\n"
         "Bytes that the pool has of its upstream, used and free: RMM's name for\n"
         "``statistics().reserved_bytes``.\n\n"
         "Examples\n--------\n"
         ">>> from numpy_rmm import mr\n"
         ">>> mr.PoolMemoryResource(mr.HostMemoryResource(), '4 MiB').pool_size()\n"
         "4194304\n")},
    {"add_peer", (PyCFunction)(void (*)(void))add_peer,
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS,
     SIGNATURE_DOC(
         "add_peer", "$self, ", ADD_PEER_TEXT,
         "Open the pool's device memory to another device.\n\n"
         "Its kernels may use all that the pool has and will have, for as long as the\n"
         "pool lives. `copyto` and the methods of buffers need no such thing.\n\n"
         "Parameters\n----------\n"
         "device : int\n"
         "    Ordinal of the device that is to reach the memory.\n\n"
         "Raises\n------\n"
         "ValueError\n"
         "    For a device that does not exist.\n"
         "NotImplementedError\n"
         "    For a pool that does not map its memory (``segments``): there peer access\n"
         "    is enabled between contexts.\n"
         "CudaError\n"
         "    When the devices cannot reach each other.\n")},
    {NULL, NULL, 0, NULL},
};
