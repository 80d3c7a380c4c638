/*
 * The bins of a BinningMemoryResource from Python. The C resource keeps the C resources
 * of its bins; the objects that were given are kept by its object, so that they come
 * back as what they are.
 */
#include "python/binning.h"

#include "nrm/pools.h"
#include "python/args.h"
#include "python/errors.h"
#include "python/memory_resource.h"
#include "python/signature.h"

#define ADD_BIN_TEXT "allocation_size, bin_resource=None"

static PyObject *
add_bin(PyObject *object, PyTypeObject *type, PyObject *const *args, Py_ssize_t n_args,
        PyObject *names)
{
    static struct signature signature = SIGNATURE("add_bin", ADD_BIN_TEXT);
    struct module_state *state = PyType_GetModuleState(type);
    PyObject *values[2];
    size_t nbytes;
    nrm_resource *bin = NULL;
    if (errors_begin_call() < 0) {
        return NULL;
    }
    nrm_resource *mr = memory_resource_get(state, object, "self");
    if (mr == NULL || signature_bind(&signature, args, n_args, names, values) < 0 ||
        arg_nbytes(values[0], "allocation_size", &nbytes) < 0) {
        return NULL;
    }
    if (!arg_is_none(values[1])) {
        bin = memory_resource_get(state, values[1], "bin_resource");
        if (bin == NULL) {
            return NULL;
        }
    }
    nrm_status status = nrm_binning_add_bin(mr, nbytes, bin);
    if (status != NRM_OK) {
        return errors_raise(state, status);
    }
    PyErr_Clear(); /* of a callback that was asked again, for less */
    if (bin != NULL &&
        memory_resource_keep((struct resource_object *)object, values[1]) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
wrap_bins(struct module_state *state, const nrm_bin *bins, size_t n)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < n; i++) {
        PyObject *bin = memory_resource_wrap(state, bins[i].resource);
        if (bin == NULL || PyList_Append(list, bin) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(bin);
    }
    return list;
}

static PyObject *
bin_mrs_get(PyObject *object, void *Py_UNUSED(closure))
{
    struct module_state *state = type_state(Py_TYPE(object));
    nrm_resource *mr = state == NULL ? NULL
                                     : memory_resource_get(state, object, "self");
    if (mr == NULL) {
        return NULL;
    }
    size_t n = nrm_binning_get_bins(mr, NULL, 0);
    nrm_bin *bins = PyMem_Calloc(n + 1, sizeof *bins);
    if (bins == NULL) {
        return PyErr_NoMemory();
    }
    size_t now = nrm_binning_get_bins(mr, bins, n); /* more, if others add */
    PyObject *list = wrap_bins(state, bins, now < n ? now : n);
    PyMem_Free(bins);
    return list;
}

PyMethodDef binning_methods[] = {
    {"add_bin", (PyCFunction)(void (*)(void))add_bin,
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS,
     SIGNATURE_DOC(
         "add_bin", "$self, ", ADD_BIN_TEXT,
         "Add a bin. Other threads may allocate meanwhile.\n\n"
         "Parameters\n----------\n"
         "allocation_size : int or str\n"
         "    Bytes of the largest request that the bin serves. Where there is a\n"
         "    bin of this size already nothing changes.\n"
         "bin_resource : MemoryResource, optional\n"
         "    What serves it: of the same kind of memory as the upstream, or of a\n"
         "    device beside managed memory, which makes the whole one of device\n"
         "    memory. None: a FixedSizeMemoryResource over the upstream.\n\n"
         "Raises\n------\n"
         "ValueError\n    For a size of 0, a resource with another kind of memory, or\n"
         "    of a device when others use this one as managed already, and for\n"
         "    one that leads back to this one.\n"
         "OutOfMemoryError\n    When the upstream has no memory for its blocks.\n\n"
         "Examples\n--------\n"
         ">>> import numpy_rmm\n"
         ">>> host = numpy_rmm.mr.HostMemoryResource()\n"
         ">>> mr = numpy_rmm.mr.BinningMemoryResource(host)\n"
         ">>> mr.add_bin('4 KiB')\n"
         ">>> mr.add_bin('1 MiB', numpy_rmm.mr.PoolMemoryResource(host))\n"
         ">>> [type(bin).__name__ for bin in mr.bin_mrs]\n"
         "['FixedSizeMemoryResource', 'PoolMemoryResource']\n")},
    {NULL, NULL, 0, NULL},
};

PyGetSetDef binning_getset[] = {
    {"bin_mrs", bin_mrs_get, NULL,
     PyDoc_STR("The resources of the bins, a list, that of the smallest first."), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
