/*
 * Names and devices to resources.
 *
 * The tables live in the core. What is looked up or bound here is also kept as a Python
 * object, so that a name gives the same object, subclass and all, as long as it is
 * bound.
 */
#include "python/registry.h"

#include "core/current.h"
#include "core/registry.h"
#include "cuda/driver.h"
#include "nrm/registry.h"
#include "python/args.h"
#include "python/errors.h"
#include "python/memory_resource.h"
#include "python/signature.h"

int
registry_init(PyObject *module)
{
    struct module_state *state = module_state(module);
    state->registered = PyDict_New();
    return state->registered == NULL ? -1 : 0;
}

/* ---- keeping objects ---- */

/* The object of `mr`, kept under `key` from now on. Steals the reference to `mr`. */
static PyObject *
keep(struct module_state *state, PyObject *key, nrm_resource *mr)
{
    PyObject *object = memory_resource_wrap(state, mr);
    nrm_resource_release(mr);
    if (object != NULL && PyDict_SetItem(state->registered, key, object) < 0) {
        Py_CLEAR(object);
    }
    return object;
}

static int
forget(struct module_state *state, PyObject *key)
{
    PyObject *kept = NULL;
    int found = compat_dict_get(state->registered, key, &kept);
    if (found > 0 && PyDict_DelItem(state->registered, key) < 0) {
        PyErr_Clear(); /* another thread was faster */
    }
    Py_XDECREF(kept);
    return found < 0 ? -1 : 0;
}

static bool
is_bound(PyObject *key, PyObject *object)
{
    const char *name = PyUnicode_AsUTF8(key);
    nrm_resource *mr = name != NULL ? nrm_registry_peek(name) : NULL;
    nrm_resource_release(mr);
    return mr != NULL && mr == ((struct resource_object *)object)->mr;
}

/* Devices are looked up again: their objects are made anew when asked for. */
int
registry_prune(struct module_state *state)
{
    registry_forget_devices(state);
    PyObject *items = PyDict_Items(state->registered);
    for (Py_ssize_t i = 0; items != NULL && i < PyList_GET_SIZE(items); i++) {
        PyObject *pair = PyList_GET_ITEM(items, i);
        PyObject *key = PyTuple_GET_ITEM(pair, 0);
        if (!is_bound(key, PyTuple_GET_ITEM(pair, 1)) && forget(state, key) < 0) {
            Py_CLEAR(items);
        }
    }
    Py_XDECREF(items);
    return PyErr_Occurred() ? -1 : 0;
}

/* Keeps the object of a device (a new reference), or with NULL none. */
static void
keep_for_device(struct module_state *state, int device, PyObject *object)
{
    PyObject *old;
    COMPAT_BEGIN_CRITICAL_SECTION(state->registered);
    old = state->current[device];
    state->current[device] = Py_XNewRef(object);
    COMPAT_END_CRITICAL_SECTION();
    Py_XDECREF(old);
}

void
registry_forget_devices(struct module_state *state)
{
    for (int device = 0; device < NRM__MAX_DEVICES; device++) {
        keep_for_device(state, device, NULL);
    }
}

/* ---- names ---- */

static PyObject *
registry_get(PyObject *module, PyObject *name)
{
    struct module_state *state = module_state(module);
    const char *text = arg_text(name, "name");
    nrm_resource *mr;
    if (text == NULL || errors_begin_call() < 0) {
        return NULL;
    }
    nrm_status status = nrm_registry_get(text, &mr);
    return status == NRM_OK ? keep(state, name, mr) : errors_raise(state, status);
}

static PyObject *
registry_set(PyObject *module, PyObject *const *args, Py_ssize_t n_args,
             PyObject *names)
{
    static struct signature signature = SIGNATURE("_registry_set", "name, resource");
    struct module_state *state = module_state(module);
    PyObject *values[2];
    if (signature_bind(&signature, args, n_args, names, values) < 0) {
        return NULL;
    }
    const char *text = arg_text(values[0], "name");
    nrm_resource *mr = text == NULL ? NULL
                                    : memory_resource_get(state, values[1], "resource");
    if (mr == NULL || errors_begin_call() < 0) {
        return NULL;
    }
    nrm_status status = nrm_registry_set(text, mr);
    if (status != NRM_OK) {
        return errors_raise(state, status);
    }
    if (PyDict_SetItem(state->registered, values[0], values[1]) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
registry_delete(PyObject *module, PyObject *name)
{
    struct module_state *state = module_state(module);
    const char *text = arg_text(name, "name");
    if (text == NULL || errors_begin_call() < 0) {
        return NULL;
    }
    nrm_status status = nrm_registry_delete(text);
    if (status != NRM_OK) {
        return errors_raise(state, status);
    }
    if (forget(state, name) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
registry_names(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    char name[65];
    PyObject *list = PyList_New(0);
    for (size_t i = 0;
         list != NULL && nrm_registry_name(i, name, sizeof name) == NRM_OK; i++) {
        PyObject *item = PyUnicode_FromString(name);
        if (item == NULL || PyList_Append(list, item) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(item);
    }
    return list;
}

static PyObject *
registry_contains(PyObject *Py_UNUSED(module), PyObject *name)
{
    if (!PyUnicode_Check(name)) {
        Py_RETURN_FALSE;
    }
    const char *text = PyUnicode_AsUTF8(name);
    return text == NULL ? NULL : PyBool_FromLong(nrm_registry_contains(text));
}

static PyObject *
registry_needs_cuda(PyObject *Py_UNUSED(module), PyObject *name)
{
    const char *text = arg_text(name, "name");
    return text == NULL ? NULL : PyBool_FromLong(nrm_registry_needs_cuda(text));
}

/* The resource under a name if it was made already, else None. */
static PyObject *
registry_peek(PyObject *module, PyObject *name)
{
    const char *text = arg_text(name, "name");
    if (text == NULL) {
        return NULL;
    }
    nrm_resource *mr = nrm_registry_peek(text);
    if (mr == NULL) {
        Py_RETURN_NONE;
    }
    return keep(module_state(module), name, mr);
}

/* ---- devices ---- */

/* Made anew, and kept. */
static PyObject *
find_for_device(struct module_state *state, int device)
{
    nrm_resource *mr;
    nrm_status status = nrm_get_per_device_resource(device, &mr);
    if (status != NRM_OK) {
        return errors_raise(state, status);
    }
    PyObject *object = memory_resource_wrap(state, mr);
    nrm_resource_release(mr);
    if (object != NULL) {
        keep_for_device(state, device, object);
    }
    return object;
}

/* What is kept of the device holds its resource, so an address that is equal is not
   that of another one. */
static PyObject *
get_for_device(struct module_state *state, int device)
{
    PyObject *kept;
    COMPAT_BEGIN_CRITICAL_SECTION(state->registered);
    kept = Py_XNewRef(state->current[device]);
    COMPAT_END_CRITICAL_SECTION();
    if (kept != NULL &&
        ((struct resource_object *)kept)->mr == nrm__registry_peek_device(device)) {
        return kept;
    }
    Py_XDECREF(kept);
    return find_for_device(state, device);
}

PyObject *
registry_current(struct module_state *state)
{
    return get_for_device(state, nrm__current_device_asked());
}

/* `object` None restores the default. */
static PyObject *
set_for_device(struct module_state *state, int device, PyObject *object)
{
    nrm_resource *mr = NULL;
    if (object != Py_None) {
        mr = memory_resource_get(state, object, "mr");
        if (mr == NULL) {
            return NULL;
        }
    }
    nrm_status status;
    PyObject *old = NULL;
    COMPAT_BEGIN_CRITICAL_SECTION(state->registered);
    status = nrm_set_per_device_resource(device, mr);
    if (status == NRM_OK) {
        old = state->current[device];
        state->current[device] = mr != NULL ? Py_NewRef(object) : NULL;
    }
    COMPAT_END_CRITICAL_SECTION();
    Py_XDECREF(old); /* which held the old resource, so that none ended in between */
    return status == NRM_OK ? Py_NewRef(Py_None) : errors_raise(state, status);
}

static int
device_argument(PyObject *value, int *out)
{
    long device;
    if (arg_integer(value, "device", 0, NRM__MAX_DEVICES - 1, &device) < 0) {
        return -1;
    }
    *out = (int)device;
    return 0;
}

#define GET_DEVICE_TEXT "device"
#define SET_DEVICE_TEXT "device, mr"
#define SET_CURRENT_TEXT "mr"

static PyObject *
get_per_device_resource(PyObject *module, PyObject *const *args, Py_ssize_t n_args,
                        PyObject *names)
{
    static struct signature signature =
        SIGNATURE("get_per_device_resource", GET_DEVICE_TEXT);
    PyObject *values[1];
    int device;
    if (errors_begin_call() < 0 ||
        signature_bind(&signature, args, n_args, names, values) < 0 ||
        device_argument(values[0], &device) < 0) {
        return NULL;
    }
    return get_for_device(module_state(module), device);
}

static PyObject *
set_per_device_resource(PyObject *module, PyObject *const *args, Py_ssize_t n_args,
                        PyObject *names)
{
    static struct signature signature =
        SIGNATURE("set_per_device_resource", SET_DEVICE_TEXT);
    PyObject *values[2];
    int device;
    if (errors_begin_call() < 0 ||
        signature_bind(&signature, args, n_args, names, values) < 0 ||
        device_argument(values[0], &device) < 0) {
        return NULL;
    }
    return set_for_device(module_state(module), device, values[1]);
}

static PyObject *
get_current_device_resource(PyObject *module, PyObject *Py_UNUSED(unused))
{
    return errors_begin_call() < 0 ? NULL : registry_current(module_state(module));
}

static PyObject *
set_current_device_resource(PyObject *module, PyObject *const *args, Py_ssize_t n_args,
                            PyObject *names)
{
    static struct signature signature =
        SIGNATURE("set_current_device_resource", SET_CURRENT_TEXT);
    PyObject *values[1];
    if (errors_begin_call() < 0 ||
        signature_bind(&signature, args, n_args, names, values) < 0) {
        return NULL;
    }
    return set_for_device(module_state(module), nrm__current_device_asked(), values[0]);
}

/* Every device has its default again; what was current goes if nobody else has it. */
static PyObject *
reset_device_resources(PyObject *module, PyObject *Py_UNUSED(unused))
{
    struct module_state *state = module_state(module);
    nrm_status status = NRM_OK;
    if (errors_begin_call() < 0) {
        return NULL;
    }
    for (int device = 0; device < NRM__MAX_DEVICES && status == NRM_OK; device++) {
        status = nrm_set_per_device_resource(device, NULL);
    }
    if (status != NRM_OK) {
        return errors_raise(state, status);
    }
    registry_forget_devices(state);
    Py_RETURN_NONE;
}

PyMethodDef registry_methods[] = {
    {"_registry_get", registry_get, METH_O,
     PyDoc_STR(
         "_registry_get($module, name, /)\n--\n\nThe resource; made if need be.")},
    {"_registry_set", (PyCFunction)(void (*)(void))registry_set,
     METH_FASTCALL | METH_KEYWORDS,
     PyDoc_STR("_registry_set($module, name, resource)\n--\n\nBind a name.")},
    {"_registry_delete", registry_delete, METH_O,
     PyDoc_STR("_registry_delete($module, name, /)\n--\n\nUnbind a name.")},
    {"_registry_names", registry_names, METH_NOARGS,
     PyDoc_STR("_registry_names($module)\n--\n\nAll names, in order of registration.")},
    {"_registry_contains", registry_contains, METH_O,
     PyDoc_STR("_registry_contains($module, name, /)\n--\n\nWhether it is a name.")},
    {"_registry_needs_cuda", registry_needs_cuda, METH_O,
     PyDoc_STR("_registry_needs_cuda($module, name, /)\n--\n\nWhether it needs CUDA.")},
    {"_registry_peek", registry_peek, METH_O,
     PyDoc_STR("_registry_peek($module, name, /)\n--\n\n"
               "The resource if it was made already, else None.")},
    {"get_per_device_resource", (PyCFunction)(void (*)(void))get_per_device_resource,
     METH_FASTCALL | METH_KEYWORDS,
     SIGNATURE_DOC(
         "get_per_device_resource", "$module, ", GET_DEVICE_TEXT,
         "The current resource of a device.\n\n"
         "Parameters\n----------\ndevice : int\n    Ordinal.\n\n"
         "Returns\n-------\nMemoryResource\n"
         "    The pool named 'device', unless another one was set. (RMM's default is\n"
         "    the bare source, which calls the driver for each allocation.)\n\n"
         "Raises\n------\n"
         "CudaUnavailableError\n    When no CUDA device can be expected here.\n")},
    {"set_per_device_resource", (PyCFunction)(void (*)(void))set_per_device_resource,
     METH_FASTCALL | METH_KEYWORDS,
     SIGNATURE_DOC(
         "set_per_device_resource", "$module, ", SET_DEVICE_TEXT,
         "Set the current resource of a device.\n\n"
         "Parameters\n----------\n"
         "device : int\n    Ordinal.\n"
         "mr : MemoryResource or None\n"
         "    Of memory that the device can use; None restores the default.\n\n"
         "Raises\n------\n"
         "ValueError\n    For a resource of ordinary host memory, or of another device.\n\n"
         "Notes\n-----\n"
         "Others may allocate meanwhile: each block goes back to the resource that it\n"
         "came from.\n\n"
         "Examples\n--------\n"
         ">>> from numpy_rmm import mr\n"
         ">>> from numpy_rmm.testing import simulate_cuda\n"
         ">>> with simulate_cuda():  # in place of a GPU\n"
         "...     mr.set_per_device_resource(0, mr.CudaMemoryResource())\n"
         "...     mr.get_per_device_resource(0)\n"
         "...     mr.set_per_device_resource(0, None)\n"
         "<CudaMemoryResource>\n")},
    {"get_current_device_resource", get_current_device_resource, METH_NOARGS,
     PyDoc_STR("get_current_device_resource($module)\n--\n\n"
               "The current resource of the current device; see\n"
               ":func:`get_per_device_resource`.")},
    {"set_current_device_resource",
     (PyCFunction)(void (*)(void))set_current_device_resource,
     METH_FASTCALL | METH_KEYWORDS,
     SIGNATURE_DOC("set_current_device_resource", "$module, ", SET_CURRENT_TEXT,
                   "Set the current resource of the current device; see\n"
                   ":func:`set_per_device_resource`.\n\n"
                   "Parameters\n----------\n"
                   "mr : MemoryResource or None\n    None restores the default.\n")},
    {"_reset_device_resources", reset_device_resources, METH_NOARGS,
     PyDoc_STR("_reset_device_resources($module)\n--\n\n"
               "Restore the default of every device.")},
    {NULL, NULL, 0, NULL},
};
