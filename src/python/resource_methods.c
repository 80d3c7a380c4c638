/*
 * Methods and attributes of MemoryResource: arguments in, a call of the core, a result
 * or an exception out.
 */
#include "python/resource_methods.h"

#include <string.h>

#include "core/hooks.h"
#include "core/ops.h"
#include "core/uses.h"
#include "nrm/options.h"
#include "python/args.h"
#include "python/errors.h"
#include "python/memory_resource.h"
#include "python/pending.h"
#include "python/signature.h"
#include "python/stack_text.h"
#include "python/statistics.h"
#include "python/stream.h"

/* inspect.signature reads literals only: the stream's default is DEFAULT_STREAM */
#define ALLOCATE_TEXT "nbytes, stream=..., alignment=None"
#define DEALLOCATE_TEXT "ptr, nbytes, stream=..."
#define TRIM_TEXT "keep=0"

/* What every method starts with: the state and the resource, or an error. */
static inline nrm_resource *
begin(PyObject *object, PyTypeObject *type, struct module_state **out_state)
{
    *out_state = PyType_GetModuleState(type);
    if (errors_begin_call() < 0) {
        return NULL;
    }
    nrm_resource *mr = ((struct resource_object *)object)->mr;
    return mr != NULL ? mr : memory_resource_get(*out_state, object, "self");
}

nrm_status
resource_allocate_or_collect(nrm_resource *mr, size_t nbytes, size_t alignment,
                             nrm_stream *stream, void **out)
{
    nrm_status status = nrm_resource_allocate(mr, nbytes, alignment, stream, out);
    if (status == NRM_OUT_OF_MEMORY && (mr->flags & NRM__OPS_ASKS) == 0 &&
        nrm__collect()) {
        status = nrm_resource_allocate(mr, nbytes, alignment, stream, out);
    }
    if (status == NRM_OK && (mr->flags & NRM__OPS_STACKS) != 0 && nbytes != 0) {
        stack_text_annotate(mr, *out);
    }
    return status;
}

static PyObject *
resource_allocate(PyObject *object, PyTypeObject *type, PyObject *const *args,
                  Py_ssize_t n_args, PyObject *names)
{
    static struct signature signature = SIGNATURE("allocate", ALLOCATE_TEXT);
    struct module_state *state;
    PyObject *values[3];
    size_t nbytes, alignment = 0;
    void *ptr;
    nrm_resource *mr = begin(object, type, &state);
    if (mr == NULL || signature_bind(&signature, args, n_args, names, values) < 0 ||
        arg_nbytes(values[0], "nbytes", &nbytes) < 0 ||
        (values[2] != NULL && arg_alignment(values[2], "alignment", &alignment) < 0)) {
        return NULL;
    }
    nrm_stream *stream = stream_get(state, values[1]);
    if (stream == NULL) {
        return NULL;
    }
    nrm_status status =
        resource_allocate_or_collect(mr, nbytes, alignment, stream, &ptr);
    stream_drop(stream);
    if (status != NRM_OK) {
        return errors_raise(state, status);
    }
    if (PyErr_Occurred()) {
        PyErr_Clear(); /* of a callback that a pool asked again, for less */
    }
    return PyLong_FromVoidPtr(ptr);
}

static PyObject *
resource_deallocate(PyObject *object, PyTypeObject *type, PyObject *const *args,
                    Py_ssize_t n_args, PyObject *names)
{
    static struct signature signature = SIGNATURE("deallocate", DEALLOCATE_TEXT);
    struct module_state *state;
    PyObject *values[3];
    uintptr_t ptr;
    size_t nbytes;
    nrm_resource *mr = begin(object, type, &state);
    if (mr == NULL || signature_bind(&signature, args, n_args, names, values) < 0 ||
        arg_address(values[0], "ptr", &ptr) < 0 ||
        arg_nbytes(values[1], "nbytes", &nbytes) < 0) {
        return NULL;
    }
    nrm_stream *stream = stream_get(state, values[2]);
    if (stream == NULL) {
        return NULL;
    }
    nrm_status status = nrm_resource_deallocate(mr, (void *)ptr, nbytes, stream);
    stream_drop(stream);
    if (status != NRM_OK) {
        return errors_raise(state, status);
    }
    if (PyErr_Occurred()) {
        return NULL; /* from a callback: the block is gone all the same */
    }
    Py_RETURN_NONE;
}

static PyObject *
resource_statistics(PyObject *object, PyTypeObject *type, PyObject *const *args,
                    Py_ssize_t n_args, PyObject *names)
{
    static struct signature signature = SIGNATURE("statistics", "");
    struct module_state *state;
    PyObject *values[1];
    nrm_resource *mr = begin(object, type, &state);
    if (mr == NULL || signature_bind(&signature, args, n_args, names, values) < 0) {
        return NULL;
    }
    return statistics_of(state, mr);
}

PyObject *
resource_trim_to(struct module_state *state, nrm_resource *mr, PyObject *keep)
{
    size_t keep_nbytes = 0, nbytes = 0;
    if (keep != NULL && arg_nbytes(keep, "keep", &keep_nbytes) < 0) {
        return NULL;
    }
    pending_reap();
    nrm_status status = nrm_resource_trim(mr, keep_nbytes, &nbytes);
    if (status != NRM_OK) {
        return errors_raise(state, status);
    }
    return PyErr_Occurred() ? NULL : PyLong_FromSize_t(nbytes);
}

static PyObject *
resource_trim(PyObject *object, PyTypeObject *type, PyObject *const *args,
              Py_ssize_t n_args, PyObject *names)
{
    static struct signature signature = SIGNATURE("trim", TRIM_TEXT);
    struct module_state *state;
    PyObject *values[1];
    nrm_resource *mr = begin(object, type, &state);
    if (mr == NULL || signature_bind(&signature, args, n_args, names, values) < 0) {
        return NULL;
    }
    return resource_trim_to(state, mr, values[0]);
}

static PyObject *
resource_reduce(PyObject *object, PyObject *Py_UNUSED(unused))
{
    PyErr_Format(
        PyExc_TypeError,
        "a %.100s cannot be pickled or copied: its memory belongs to this process",
        Py_TYPE(object)->tp_name);
    return NULL;
}

static PyObject *
get_upstream(PyObject *object, PyObject *Py_UNUSED(unused))
{
    PyObject *upstream = ((struct resource_object *)object)->upstream;
    return Py_NewRef(upstream != NULL ? upstream : Py_None);
}

static PyObject *
upstream_get(PyObject *object, void *Py_UNUSED(closure))
{
    return get_upstream(object, NULL);
}

static nrm_resource *
resource_of(PyObject *object)
{
    struct module_state *state = type_state(Py_TYPE(object));
    return state == NULL ? NULL : memory_resource_get(state, object, "self");
}

static PyObject *
kind_get(PyObject *object, void *Py_UNUSED(closure))
{
    nrm_resource *mr = resource_of(object);
    return mr == NULL ? NULL
                      : PyUnicode_FromString(nrm_kind_name(nrm_resource_kind(mr)));
}

static PyObject *
device_get(PyObject *object, void *Py_UNUSED(closure))
{
    nrm_resource *mr = resource_of(object);
    if (mr == NULL) {
        return NULL;
    }
    int device = nrm_resource_device(mr);
    if (device == NRM_DEVICE_NONE) {
        Py_RETURN_NONE;
    }
    return PyLong_FromLong(device);
}

static PyObject *
name_get(PyObject *object, void *Py_UNUSED(closure))
{
    char name[65];
    nrm_resource *mr = resource_of(object);
    if (mr == NULL) {
        return NULL;
    }
    nrm_resource_name(mr, name, sizeof name);
    if (name[0] == '\0') {
        Py_RETURN_NONE;
    }
    return PyUnicode_FromString(name);
}

/* <PoolMemoryResource 'pinned' over <PinnedHostMemoryResource>> */
PyObject *
resource_repr(PyObject *object)
{
    struct resource_object *self = (struct resource_object *)object;
    const char *type_name = Py_TYPE(object)->tp_name;
    const char *dot = strrchr(type_name, '.');
    char name[65] = "";
    type_name = dot != NULL ? dot + 1 : type_name;
    if (self->mr == NULL) {
        return PyUnicode_FromFormat("<%s, %s>", type_name,
                                    self->wrappers == NULL ? "not initialised"
                                                           : "closed");
    }
    nrm_resource_name(self->mr, name, sizeof name);
    const char *quote = name[0] != '\0' ? " '" : "";
    const char *unquote = name[0] != '\0' ? "'" : "";
    if (self->upstream == NULL) {
        return PyUnicode_FromFormat("<%s%s%s%s>", type_name, quote, name, unquote);
    }
    return PyUnicode_FromFormat("<%s%s%s%s over %R>", type_name, quote, name, unquote,
                                self->upstream);
}

PyMethodDef resource_methods[] = {
    {"allocate", (PyCFunction)(void (*)(void))resource_allocate,
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS,
     SIGNATURE_DOC(
         "allocate", "$self, ", ALLOCATE_TEXT,
         "Allocate memory.\n\n"
         "Parameters\n----------\n"
         "nbytes : int or str\n    Bytes; 0 gives the address 0.\n"
         "stream : Stream\n    The memory may be used behind it; by default DEFAULT_STREAM.\n"
         "alignment : int, optional\n"
         "    A power of two, in bytes. None: 64 for host memory, 256 for every\n"
         "    other kind.\n\n"
         "Returns\n-------\nint\n    The address.\n\n"
         "Raises\n------\n"
         "OutOfMemoryError\n    When the memory cannot be had.\n"
         "ValueError\n    For a negative size, or an alignment that is no power\n"
         "    of two.\n"
         "NotImplementedError\n    For an alignment that it cannot give.\n\n"
         "Examples\n--------\n"
         ">>> from numpy_rmm import mr\n"
         ">>> host = mr.HostMemoryResource()\n"
         ">>> ptr = host.allocate('1 KiB', alignment=4096)\n"
         ">>> ptr % 4096, host.statistics().current_bytes\n"
         "(0, 1024)\n"
         ">>> host.deallocate(ptr, '1 KiB')\n"
         ">>> host.statistics().current_bytes\n"
         "0\n")},
    {"deallocate", (PyCFunction)(void (*)(void))resource_deallocate,
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS,
     SIGNATURE_DOC(
         "deallocate", "$self, ", DEALLOCATE_TEXT,
         "Give memory back.\n\n"
         "Parameters\n----------\n"
         "ptr : int\n    What allocate returned; 0 is no error.\n"
         "nbytes : int or str\n    Bytes that were asked for: a hint.\n"
         "stream : Stream\n    The memory is in use until the work submitted to\n"
         "    it so far is done; by default DEFAULT_STREAM.\n\n"
         "Raises\n------\n"
         "ValueError\n    When ptr is not an address of this resource, or was\n"
         "    given back already; nothing changes.\n\n"
         "Examples\n--------\nSee :meth:`allocate`.\n")},
    {"statistics", (PyCFunction)(void (*)(void))resource_statistics,
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS,
     SIGNATURE_DOC(
         "statistics", "$self", "",
         "Counters of this resource.\n\n"
         "Returns\n-------\nResourceStatistics\n"
         "    In requested bytes: ``current_bytes``, ``current_count``,\n"
         "    ``peak_bytes``, ``peak_count``, ``total_bytes``,\n"
         "    ``total_count``; then ``reserved_bytes``, ``parked_bytes``,\n"
         "    ``epochs``, ``waits``, ``fallbacks`` and ``errors``, and of a\n"
         "    pool that grows ahead of demand ``segments_ahead`` and\n"
         "    ``failures_ahead``. ``reserved_bytes`` is memory that can be\n"
         "    used without asking again, whether or not its pages are present.\n\n"
         "Examples\n--------\n"
         ">>> from numpy_rmm import mr\n"
         ">>> pool = mr.PoolMemoryResource(mr.HostMemoryResource(), '1 MiB')\n"
         ">>> ptr = pool.allocate(100)\n"
         ">>> counts = pool.statistics()\n"
         ">>> counts.current_bytes, counts.current_count, counts.reserved_bytes\n"
         "(100, 1, 1048576)\n"
         ">>> pool.deallocate(ptr, 100)\n")},
    {"trim", (PyCFunction)(void (*)(void))resource_trim,
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS,
     SIGNATURE_DOC(
         "trim", "$self, ", TRIM_TEXT,
         "Give unused memory back to the upstream, and that to the system.\n\n"
         "Parameters\n----------\n"
         "keep : int or str\n    Bytes to keep in reserve, about.\n\n"
         "Returns\n-------\nint\n    The bytes given back.\n\n"
         "Examples\n--------\n"
         ">>> from numpy_rmm import mr\n"
         ">>> pool = mr.PoolMemoryResource(mr.HostMemoryResource(), '1 MiB')\n"
         ">>> pool.trim()\n"
         "1048576\n")},
    {"get_upstream", get_upstream, METH_NOARGS,
     PyDoc_STR("get_upstream($self)\n--\n\nThe upstream, as RMM spells it.")},
    {"__reduce__", resource_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

PyGetSetDef resource_getset[] = {
    {"kind", kind_get, NULL, PyDoc_STR("'host', 'pinned', 'managed' or 'device'."),
     NULL},
    {"device", device_get, NULL,
     PyDoc_STR("Ordinal of the device; None: host memory, or none used so far."), NULL},
    {"name", name_get, NULL, PyDoc_STR("Its name in the registry, or None."), NULL},
    {"upstream", upstream_get, NULL,
     PyDoc_STR("The resource that this one draws on; None: a source."), NULL},
    {"upstream_mr", upstream_get, NULL, PyDoc_STR("The same, as RMM spells it."), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* ---- all resources ---- */

struct trim_all {
    size_t keep_nbytes;
    size_t nbytes;
    nrm_status status;
};

static void
trim_one(nrm_resource *mr, void *context)
{
    struct trim_all *all = context;
    size_t nbytes = 0;
    if (all->status == NRM_OK) {
        all->status = nrm_resource_trim(mr, all->keep_nbytes, &nbytes);
        all->nbytes += nbytes;
    }
}

static PyObject *
trim_all(PyObject *module, PyObject *const *args, Py_ssize_t n_args, PyObject *names)
{
    static struct signature signature = SIGNATURE("trim", TRIM_TEXT);
    struct trim_all all = {0};
    PyObject *values[1];
    if (errors_begin_call() < 0 ||
        signature_bind(&signature, args, n_args, names, values) < 0 ||
        (values[0] != NULL && arg_nbytes(values[0], "keep", &all.keep_nbytes) < 0)) {
        return NULL;
    }
    pending_reap();
    nrm__resource_for_each(trim_one, &all);
    /* Also where there is no resource: pins that were closed wait there too. */
    (void)nrm__retired_drain((uint64_t)nrm_option_get(NRM_OPT_WAIT_LIMIT));
    if (all.status != NRM_OK) {
        return errors_raise(module_state(module), all.status);
    }
    return PyErr_Occurred() ? NULL : PyLong_FromSize_t(all.nbytes);
}

PyMethodDef resource_functions[] = {
    {"trim", (PyCFunction)(void (*)(void))trim_all, METH_FASTCALL | METH_KEYWORDS,
     SIGNATURE_DOC(
         "trim", "$module, ", TRIM_TEXT,
         "Give the unused memory of every pool back.\n\n"
         "Parameters\n----------\n"
         "keep : int or str\n    Bytes that each pool keeps in reserve, about.\n\n"
         "Returns\n-------\nint\n    The bytes given back.\n\n"
         "Examples\n--------\n"
         ">>> import numpy_rmm\n"
         ">>> numpy_rmm.trim(keep='1 GiB') >= 0\n"
         "True\n")},
    {NULL, NULL, 0, NULL},
};
