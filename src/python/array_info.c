/*
 * Whose memory an array has.
 *
 * Views are walked to the array that owns the data, whose capsule names the handler.
 * What kind of memory it is, is decided by address: first the core's own map, then,
 * only where CUDA is initialised already, the driver. Both ends of the array's bytes
 * must lie in one live block: a registration can cover a part, and the view of an array
 * that was resized points to where the array was.
 */
#include "python/array_info.h"

#include "core/block_map.h"
#include "core/pin.h"
#include "cuda/driver.h"
#include "nrm/pools.h"
#include "python/cuda_query.h"
#include "python/errors.h"
#include "python/handler.h"
#include "python/memory_resource.h"
#include "python/uses.h"
#include "python/whole_buffer.h"

/* An object between two arrays can lead back to the first. */
enum { MAX_VIEWS = 1000 };

/* What the walk from a view to its owner found. */
struct owner {
    PyArrayObject *array; /* borrowed; owns its data. NULL: NumPy does not own them */
    PyObject *capsule;    /* its handler, borrowed; NULL: none (OWNDATA set by hand) */
    struct handler *handler; /* in the capsule; NULL: not ours */
    int n_views;             /* walked over */
};

/* What the bytes of an array lie in. */
struct place {
    const char *kind;
    bool has_block;
    struct nrm__block block; /* its owner is retained */
};

/* ---- the bytes ---- */

/* First and last byte of an array, of any strides. An array without elements counts as
   one byte: that is what NumPy allocates for it. */
static void
byte_bounds(PyArrayObject *array, const char **out_first, const char **out_last)
{
    const char *first = PyArray_BYTES(array);
    const char *last = first;
    if (PyArray_SIZE(array) != 0) {
        for (int i = 0; i < PyArray_NDIM(array); i++) {
            npy_intp reach = (PyArray_DIM(array, i) - 1) * PyArray_STRIDE(array, i);
            *(reach < 0 ? &first : &last) += reach;
        }
        last += PyArray_ITEMSIZE(array) > 0 ? PyArray_ITEMSIZE(array) - 1 : 0;
    }
    *out_first = first;
    *out_last = last;
}

/* ---- the owner ---- */

static bool
lies_in(PyArrayObject *array, PyArrayObject *other)
{
    const char *first, *last, *other_first, *other_last;
    byte_bounds(array, &first, &last);
    byte_bounds(other, &other_first, &other_last);
    return first >= other_first && last <= other_last;
}

/* What an array is a view of, if that is an array, be it behind an object between the
   two, which keeps it alive. Borrowed. */
static PyArrayObject *
viewed(PyArrayObject *array)
{
    PyObject *base = PyArray_BASE(array);
    if (base == NULL || PyArray_Check(base)) {
        return (PyArrayObject *)base;
    }
    PyArrayObject *behind = (PyArrayObject *)whole_buffer_array_behind(base);
    Py_XDECREF(behind);
    return behind != NULL && lies_in(array, behind) ? behind : NULL;
}

static struct owner
find_owner(PyArrayObject *array)
{
    struct owner owner = {NULL};
    for (; array != NULL && owner.n_views < MAX_VIEWS; array = viewed(array)) {
        if (PyArray_CHKFLAGS(array, NPY_ARRAY_OWNDATA)) {
            owner.array = array;
            owner.capsule = PyArray_HANDLER(array);
            owner.handler = owner.capsule != NULL ? handler_of_capsule(owner.capsule)
                                                  : NULL;
            return owner;
        }
        owner.n_views++;
    }
    return owner;
}

static bool
is_default(PyObject *capsule)
{
    return capsule == PyDataMem_DefaultHandler;
}

/* ---- the memory ---- */

/* The one live block that has both bytes; its owner is retained. */
static bool
find_block(const char *first, const char *last, struct nrm__block *out)
{
    if (!nrm__block_map_find(first, out)) {
        return false;
    }
    const char *end = (const char *)out->ptr + out->capacity;
    if (last < end) {
        return true;
    }
    nrm_resource_release(out->owner);
    return false;
}

/* Where it is not a block of ours: by the handler, and by the driver. */
static const char *
kind_elsewhere(const struct owner *owner, const char *first, const char *last)
{
    if (cuda_is_registered(first) && (last == first || cuda_is_registered(last))) {
        return "registered";
    }
    if (owner->array == NULL) {
        return "external";
    }
    return owner->capsule == NULL || is_default(owner->capsule) ? "host" : "unknown";
}

/* The view of an array of ours that has moved since points to memory that is not
   its. */
static bool
is_stale(const struct owner *owner, const struct nrm__block *block)
{
    return owner->handler != NULL && block->ptr != PyArray_DATA(owner->array);
}

static struct place
find_place(PyArrayObject *array, const struct owner *owner)
{
    struct place place = {NULL};
    const char *first, *last;
    byte_bounds(array, &first, &last);
    if (PyArray_SIZE(array) == 0 && owner->array != NULL) {
        first = last = PyArray_BYTES(owner->array);
    }
    place.has_block = find_block(first, last, &place.block);
    if (place.has_block && is_stale(owner, &place.block)) {
        nrm_resource_release(place.block.owner);
        place.has_block = false;
    }
    if (place.has_block) {
        nrm_kind kind = nrm_resource_kind(place.block.owner);
        place.kind = kind == NRM_KIND_HOST && nrm__pins_cover(first, last)
                         ? "registered"
                         : nrm_kind_name(kind);
    }
    else {
        place.kind = owner->handler != NULL ? "unknown"
                                            : kind_elsewhere(owner, first, last);
    }
    return place;
}

static void
leave_place(struct place *place)
{
    if (place->has_block) {
        nrm_resource_release(place->block.owner);
    }
}

static int
array_argument(PyObject *object)
{
    if (errors_begin_call() < 0) {
        return -1;
    }
    if (PyArray_Check(object)) {
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "array must be a numpy.ndarray, not %.100s",
                 Py_TYPE(object)->tp_name);
    return -1;
}

/* ---- the short answers ---- */

static PyObject *
capsule_name(PyObject *capsule)
{
    PyDataMem_Handler *handler = PyCapsule_GetPointer(capsule, HANDLER_CAPSULE_NAME);
    return handler == NULL
               ? NULL
               : PyUnicode_DecodeUTF8(
                     handler->name, (Py_ssize_t)strnlen(handler->name, 127), "replace");
}

static PyObject *
get_handler_name(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n_args)
{
    if (n_args > 1) {
        PyErr_SetString(PyExc_TypeError, "get_handler_name() takes at most one array");
        return NULL;
    }
    if (n_args == 1 && args[0] != Py_None) {
        if (array_argument(args[0]) < 0) {
            return NULL;
        }
        struct owner owner = find_owner((PyArrayObject *)args[0]);
        return owner.capsule != NULL ? capsule_name(owner.capsule) : Py_NewRef(Py_None);
    }
    PyObject *capsule = PyDataMem_GetHandler();
    PyObject *name = capsule == NULL ? NULL : capsule_name(capsule);
    Py_XDECREF(capsule);
    return name;
}

static const char *
kind_of(PyObject *object)
{
    PyArrayObject *array = (PyArrayObject *)object;
    struct owner owner = find_owner(array);
    struct place place = find_place(array, &owner);
    leave_place(&place);
    return place.kind;
}

const char *
array_info_kind(PyObject *array)
{
    return kind_of(array);
}

const void *
array_info_address(PyObject *array)
{
    PyObject *object = array;
    while (object != NULL && PyArray_Check(object)) {
        if (PyArray_CHKFLAGS((PyArrayObject *)object, NPY_ARRAY_OWNDATA)) {
            return PyArray_DATA((PyArrayObject *)object);
        }
        object = PyArray_BASE((PyArrayObject *)object);
    }
    return PyArray_DATA((PyArrayObject *)array);
}

static PyObject *
memory_kind(PyObject *Py_UNUSED(module), PyObject *object)
{
    return array_argument(object) < 0 ? NULL : PyUnicode_FromString(kind_of(object));
}

static PyObject *
is_pinned(PyObject *Py_UNUSED(module), PyObject *object)
{
    if (array_argument(object) < 0) {
        return NULL;
    }
    const char *kind = kind_of(object);
    return PyBool_FromLong(strcmp(kind, "pinned") == 0 ||
                           strcmp(kind, "registered") == 0);
}

/* ---- the long answer ---- */

static PyStructSequence_Field array_info_fields[] = {
    {"handler",
     "name of the handler that made the memory; None: NumPy does not own it"},
    {"resource", "the MemoryResource that the block belongs to, or None"},
    {"kind", "as memory_kind() tells it"},
    {"address", "of the first element"},
    {"nbytes", "of the array"},
    {"block_address", "of the block that it lies in, or None"},
    {"block_nbytes", "usable bytes of that block, or None"},
    {"alignment", "largest power of two that divides the address"},
    {"page_nbytes", "of the memory pages; None: not known"},
    {"numa_node", "of the block's first page; None: not known"},
    {"device", "ordinal of the device, or None"},
    {"uses", "names of the streams whose known uses of the block are pending"},
    {"views", "walked over to the array that owns the data"},
    {"reason", "why the memory is not what the handler is named after, or None"},
    {"simulated", "whether the CUDA driver is the simulated one"},
    {NULL, NULL},
};

static PyStructSequence_Desc array_info_desc = {
    .name = "numpy_rmm.ArrayInfo",
    .doc = "What is known of the memory of an array.",
    .fields = array_info_fields,
    .n_in_sequence = 15,
};

static PyObject *
none(void)
{
    return Py_NewRef(Py_None);
}

/* Fills what is known of the block; items not filled are None afterwards. */
static void
describe_block(struct module_state *state, PyObject *info, const struct owner *owner,
               nrm_block_info *block)
{
    char reason[256] = "";
    if (owner->handler != NULL) {
        nrm_route_explain(owner->handler->route, block, reason, sizeof reason);
    }
    if (reason[0] == '\0' && block->reason != NULL) {
        snprintf(reason, sizeof reason, "%s", block->reason);
    }
    PyStructSequence_SetItem(info, 1, memory_resource_wrap(state, block->resource));
    PyStructSequence_SetItem(info, 5, PyLong_FromVoidPtr(block->ptr));
    PyStructSequence_SetItem(info, 6, PyLong_FromSize_t(block->capacity));
    size_t page_nbytes;
    int numa_node;
    nrm_page_info(block->ptr, &page_nbytes, &numa_node);
    PyStructSequence_SetItem(
        info, 8, page_nbytes != 0 ? PyLong_FromSize_t(page_nbytes) : none());
    PyStructSequence_SetItem(info, 9,
                             numa_node >= 0 ? PyLong_FromLong(numa_node) : none());
    PyStructSequence_SetItem(
        info, 10,
        block->device != NRM_DEVICE_NONE ? PyLong_FromLong(block->device) : none());
    PyStructSequence_SetItem(info, 11, uses_names(block->ptr));
    if (reason[0] != '\0') {
        PyStructSequence_SetItem(
            info, 13,
            PyUnicode_DecodeUTF8(reason, (Py_ssize_t)strlen(reason), "replace"));
    }
}

static PyObject *
make_info(struct module_state *state, PyArrayObject *array, const struct owner *owner,
          const struct place *place)
{
    PyObject *info = PyStructSequence_New(state->array_info_type);
    if (info == NULL) {
        return NULL;
    }
    uintptr_t address = (uintptr_t)PyArray_DATA(array);
    nrm_block_info block = {NULL};
    if (place->has_block && nrm_block_find(place->block.ptr, &block) == NRM_OK) {
        describe_block(state, info, owner, &block);
        nrm_resource_release(block.resource);
    }
    PyStructSequence_SetItem(
        info, 0, owner->capsule != NULL ? capsule_name(owner->capsule) : none());
    PyStructSequence_SetItem(info, 2, PyUnicode_FromString(place->kind));
    PyStructSequence_SetItem(info, 3, PyLong_FromVoidPtr((void *)address));
    PyStructSequence_SetItem(info, 4, PyLong_FromSsize_t(PyArray_NBYTES(array)));
    PyStructSequence_SetItem(info, 7, PyLong_FromSize_t(address & -address));
    PyStructSequence_SetItem(info, 12, PyLong_FromLong(owner->n_views));
    PyStructSequence_SetItem(info, 14, PyBool_FromLong(nrm__cuda_is_simulated()));
    if (!block.resource) {
        PyStructSequence_SetItem(info, 11, PyTuple_New(0));
    }
    if (PyErr_Occurred()) {
        Py_DECREF(info);
        return NULL;
    }
    for (int i = 0; i < 15; i++) {
        if (PyStructSequence_GetItem(info, i) == NULL) {
            PyStructSequence_SetItem(info, i, none());
        }
    }
    return info;
}

static PyObject *
array_info(PyObject *module, PyObject *object)
{
    if (array_argument(object) < 0) {
        return NULL;
    }
    PyArrayObject *array = (PyArrayObject *)object;
    struct owner owner = find_owner(array);
    struct place place = find_place(array, &owner);
    PyObject *info = make_info(module_state(module), array, &owner, &place);
    leave_place(&place);
    return info;
}

int
array_info_init(PyObject *module)
{
    struct module_state *state = module_state(module);
    state->array_info_type = PyStructSequence_NewType(&array_info_desc);
    return state->array_info_type == NULL
               ? -1
               : PyModule_AddType(module, state->array_info_type);
}

PyMethodDef array_info_methods[] = {
    {"get_handler_name", (PyCFunction)(void (*)(void))get_handler_name, METH_FASTCALL,
     PyDoc_STR(
         "get_handler_name($module, array=None, /)\n--\n\n"
         "Name of the handler that made an array's memory.\n\n"
         "Parameters\n----------\n"
         "array : numpy.ndarray, optional\n"
         "    Of any shape; views are walked to the array that owns the data. None:\n"
         "    the handler of the current context.\n\n"
         "Returns\n-------\nstr or None\n"
         "    'numpy_rmm:<resource>#<number>' for ours; None where NumPy does not own\n"
         "    the data.\n\n"
         "Examples\n--------\n"
         ">>> import numpy as np, numpy_rmm\n"
         ">>> numpy_rmm.get_handler_name(np.zeros(3)[1:])\n"
         "'default_allocator'\n")},
    {"memory_kind", memory_kind, METH_O,
     PyDoc_STR(
         "memory_kind($module, array, /)\n--\n\n"
         "What kind of memory an array has.\n\n"
         "Parameters\n----------\n"
         "array : numpy.ndarray\n    Of any shape; also a view.\n\n"
         "Returns\n-------\nstr\n"
         "    'host', 'pinned' or 'managed' for memory of ours, 'host' also for NumPy's\n"
         "    own; 'registered': page-locked by :func:`pin`, or by others (asked only\n"
         "    where CUDA is initialised); 'external': data that NumPy does not own; 'unknown':\n"
         "    another library's handler, or a view of an array that has moved since.\n\n"
         "Raises\n------\nTypeError\n    For anything but a numpy.ndarray.\n\n"
         "Examples\n--------\n"
         ">>> import numpy as np, numpy_rmm\n"
         ">>> numpy_rmm.memory_kind(np.zeros(3))\n"
         "'host'\n"
         ">>> numpy_rmm.memory_kind(np.frombuffer(bytes(8)))\n"
         "'external'\n")},
    {"is_pinned", is_pinned, METH_O,
     PyDoc_STR(
         "is_pinned($module, array, /)\n--\n\n"
         "Whether an array's memory is page-locked.\n\n"
         "Parameters\n----------\n"
         "array : numpy.ndarray\n    Of any shape; also a view.\n\n"
         "Returns\n-------\nbool\n"
         "    True for the kinds 'pinned' and 'registered' of :func:`memory_kind`.\n\n"
         "Examples\n--------\n"
         ">>> import numpy as np, numpy_rmm\n"
         ">>> numpy_rmm.is_pinned(np.zeros(3))\n"
         "False\n")},
    {"array_info", array_info, METH_O,
     PyDoc_STR(
         "array_info($module, array, /)\n--\n\n"
         "All that is known of an array's memory.\n\n"
         "Parameters\n----------\n"
         "array : numpy.ndarray\n    Of any shape; also a view.\n\n"
         "Returns\n-------\nArrayInfo\n"
         "    A named tuple: handler, resource, kind, address, nbytes, block_address,\n"
         "    block_nbytes, alignment (the last five in bytes), page_nbytes,\n"
         "    numa_node, device, uses, views, reason and simulated.\n\n"
         "Examples\n--------\n"
         ">>> import numpy as np, numpy_rmm\n"
         ">>> with numpy_rmm.use_handler('host'):\n"
         "...     x = np.zeros((100, 100))\n"
         ">>> info = numpy_rmm.array_info(x[10:20])\n"
         ">>> info.kind, info.nbytes, info.views\n"
         "('host', 8000, 1)\n")},
    {NULL, NULL, 0, NULL},
};
