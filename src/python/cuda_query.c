/*
 * Questions about CUDA: none of them makes a context, and only those that say so
 * initialise the driver.
 */
#include "python/cuda_query.h"

#include "core/copy.h"
#include "core/current.h"
#include "core/exchange.h"
#include "core/hooks.h"
#include "cuda/context.h"
#include "cuda/vmm.h"
#include "nrm/options.h"
#include "python/args.h"
#include "python/errors.h"
#include "python/numpy_api.h"
#include "python/registry.h"

/* ---- for the other files ---- */

int
cuda_current_device(void)
{
    return nrm__current_device();
}

int
cuda_memory_info(struct module_state *state, int device, size_t *out_free,
                 size_t *out_total)
{
    struct nrm__cuda_scope scope;
    void *token = nrm__detach();
    nrm_status status = nrm__cuda_enter(device, &scope);
    if (status == NRM_OK) {
        nrm_CUresult code = scope.driver->cuMemGetInfo(out_free, out_total);
        if (code != NRM_CUDA_SUCCESS) {
            status = nrm__cuda_error(code, "cuMemGetInfo of device %d", scope.device);
        }
        nrm__cuda_leave(&scope);
    }
    nrm__attach(token);
    if (status != NRM_OK) {
        (void)errors_raise(state, status);
        return -1;
    }
    return 0;
}

static unsigned
pointer_attribute(const struct nrm__driver *driver, nrm_CUpointer_attribute attribute,
                  const void *ptr)
{
    unsigned value = 0;
    nrm_CUresult code = driver->cuPointerGetAttribute(&value, attribute,
                                                      (nrm_CUdeviceptr)(uintptr_t)ptr);
    return code == NRM_CUDA_SUCCESS ? value : 0;
}

/* What the driver says memory is; false: nobody can be asked. */
static bool
find_memory_type(const void *ptr, unsigned *out_type, bool *out_is_managed)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    if (driver == NULL || nrm__cuda_is_forked()) {
        return false;
    }
    nrm_CUstreamCaptureMode mode = nrm__cuda_relax(driver);
    *out_type = pointer_attribute(driver, NRM_CU_POINTER_ATTRIBUTE_MEMORY_TYPE, ptr);
    *out_is_managed =
        pointer_attribute(driver, NRM_CU_POINTER_ATTRIBUTE_IS_MANAGED, ptr) != 0;
    nrm__cuda_unrelax(driver, mode);
    return true;
}

bool
cuda_is_registered(const void *ptr)
{
    unsigned type;
    bool is_managed;
    return find_memory_type(ptr, &type, &is_managed) &&
           type == NRM_CU_MEMORYTYPE_HOST && !is_managed;
}

bool
cuda_is_unknown(const void *ptr)
{
    unsigned type;
    const struct nrm__driver *driver = nrm__cuda_driver();
    if (driver == NULL || nrm__cuda_is_forked()) {
        return false;
    }
    nrm_CUstreamCaptureMode mode = nrm__cuda_relax(driver);
    nrm_CUresult code = driver->cuPointerGetAttribute(
        &type, NRM_CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (nrm_CUdeviceptr)(uintptr_t)ptr);
    nrm__cuda_unrelax(driver, mode);
    return code == NRM_CUDA_ERROR_INVALID_VALUE; /* others say nothing about it */
}

bool
cuda_is_device_memory(const void *ptr)
{
    unsigned type;
    bool is_managed;
    return find_memory_type(ptr, &type, &is_managed) &&
           (type == NRM_CU_MEMORYTYPE_DEVICE || is_managed);
}

/* ---- Python functions ---- */

static PyObject *
available_device_memory(PyObject *module, PyObject *Py_UNUSED(unused))
{
    size_t free_nbytes, total_nbytes;
    if (errors_begin_call() < 0 ||
        cuda_memory_info(module_state(module), -1, &free_nbytes, &total_nbytes) < 0) {
        return NULL;
    }
    return Py_BuildValue("nn", (Py_ssize_t)free_nbytes, (Py_ssize_t)total_nbytes);
}

/* Raises unless a device can be expected here. */
static PyObject *
cuda_expect(PyObject *module, PyObject *Py_UNUSED(unused))
{
    nrm_status status = nrm__cuda_expect();
    if (status != NRM_OK) {
        return errors_raise(module_state(module), status);
    }
    Py_RETURN_NONE;
}

static PyObject *
cuda_initialize(PyObject *module, PyObject *Py_UNUSED(unused))
{
    void *token = nrm__detach();
    nrm_status status = nrm__cuda_init(NULL);
    nrm__attach(token);
    if (status != NRM_OK) {
        return errors_raise(module_state(module), status);
    }
    Py_RETURN_NONE;
}

static PyObject *
cuda_driver(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    return Py_BuildValue("{s:s,s:i,s:s,s:N,s:N,s:N,s:i}", "library",
                         nrm__cuda_library_path(), "version", nrm__cuda_version(),
                         "missing", nrm__cuda_missing_symbols(), "simulated",
                         PyBool_FromLong(nrm__cuda_is_simulated()), "forked",
                         PyBool_FromLong(nrm__cuda_is_forked()), "initialized",
                         PyBool_FromLong(nrm__cuda_driver() != NULL), "n_devices",
                         nrm__cuda_n_devices());
}

static PyObject *
device_attributes(int device)
{
    nrm_CUdevice_attribute attribute;
    const char *name;
    PyObject *dict = PyDict_New();
    for (int i = 0; dict != NULL; i++) {
        name = nrm__cuda_attribute_name(i, &attribute);
        if (name == NULL) {
            break;
        }
        PyObject *value = PyLong_FromLong(nrm__cuda_attribute(device, attribute));
        if (value == NULL || PyDict_SetItemString(dict, name, value) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(value);
    }
    return dict;
}

/* A dict, or None: CUDA is not initialised, or there is no such device. */
static PyObject *
cuda_device(PyObject *Py_UNUSED(module), PyObject *value)
{
    struct nrm__cuda_device_info info;
    long device;
    if (arg_integer(value, "device", 0, NRM__MAX_DEVICES - 1, &device) < 0) {
        return NULL;
    }
    if (nrm__cuda_device_info((int)device, &info) != NRM_OK) {
        Py_RETURN_NONE;
    }
    PyObject *free_nbytes = info.free_nbytes == SIZE_MAX
                                ? Py_NewRef(Py_None)
                                : PyLong_FromSize_t(info.free_nbytes);
    const char *reason = nrm__vmm_reason((int)device);
    return Py_BuildValue("{s:s,s:s,s:(ii),s:N,s:N,s:N,s:s,s:N}", "name", info.name,
                         "pci_id", info.pci_id, "capability", info.capability_major,
                         info.capability_minor, "total_nbytes",
                         PyLong_FromSize_t(info.total_nbytes), "free_nbytes",
                         free_nbytes, "active", PyBool_FromLong(info.is_active),
                         "virtual_memory", reason == NULL ? "available" : reason,
                         "attributes", device_attributes((int)device));
}

static PyObject *
set_driver(PyObject *module, PyObject *path)
{
    const char *text = NULL;
    if (path != Py_None) {
        text = arg_text(path, "path");
        if (text == NULL) {
            return NULL;
        }
    }
    struct module_state *state = module_state(module);
    registry_forget_devices(state);
    nrm_status status = nrm__driver_exchange(text);
    if (status != NRM_OK) {
        return errors_raise(state, status);
    }
    if (registry_prune(state) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
copy_to_device_seconds(PyObject *module, PyObject *object)
{
    double seconds;
    if (!PyArray_Check(object) || !PyArray_IS_C_CONTIGUOUS((PyArrayObject *)object)) {
        PyErr_SetString(PyExc_TypeError, "array must be a C-contiguous numpy.ndarray");
        return NULL;
    }
    PyArrayObject *array = (PyArrayObject *)object;
    nrm_status status = nrm__copy_to_device_seconds(
        PyArray_DATA(array), (size_t)PyArray_NBYTES(array), &seconds);
    if (status != NRM_OK) {
        return errors_raise(module_state(module), status);
    }
    return PyFloat_FromDouble(seconds);
}

PyMethodDef cuda_query_methods[] = {
    {"available_device_memory", available_device_memory, METH_NOARGS,
     PyDoc_STR("available_device_memory($module)\n--\n\n"
               "Memory of the current device.\n\n"
               "Returns\n-------\n(int, int)\n    Free and total bytes.\n\n"
               "Raises\n------\n"
               "CudaUnavailableError\n    When there is no CUDA device.\n")},
    {"_cuda_expect", cuda_expect, METH_NOARGS,
     PyDoc_STR("_cuda_expect($module)\n--\n\n"
               "Raise CudaUnavailableError unless a device can be expected here.")},
    {"_cuda_initialize", cuda_initialize, METH_NOARGS,
     PyDoc_STR("_cuda_initialize($module)\n--\n\nLoad the driver and call cuInit.")},
    {"_cuda_driver", cuda_driver, METH_NOARGS,
     PyDoc_STR("_cuda_driver($module)\n--\n\nWhat is known of the driver, as a dict.")},
    {"_cuda_device", cuda_device, METH_O,
     PyDoc_STR("_cuda_device($module, device, /)\n--\n\n"
               "What is known of a device, as a dict; None before cuInit.")},
    {"_set_driver", set_driver, METH_O,
     PyDoc_STR("_set_driver($module, path, /)\n--\n\n"
               "Use another driver library from now on; None: the usual one.")},
    {"_copy_to_device_seconds", copy_to_device_seconds, METH_O,
     PyDoc_STR("_copy_to_device_seconds($module, array, /)\n--\n\n"
               "Seconds of one blocking copy of an array to the current device.")},
    {NULL, NULL, 0, NULL},
};
