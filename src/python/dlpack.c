/*
 * Tensors for other libraries, as the DLPack specification (1.0, and 0.8 without versions)
 * lays them out.
 *
 * One piece of memory has the tensor, its shape and its strides. A consumer lets go of it from
 * any thread, with the interpreter or without, and perhaps when that has ended: then nothing is
 * done any more. The byte offset is always 0, since some consumers do not look at it.
 */
#include "python/dlpack.h"

#include "base/error.h"
#include "core/hooks.h"
#include "core/transfer.h"
#include "python/args.h"
#include "python/cuda_query.h"
#include "python/errors.h"
#include "python/signature.h"

enum { MAJOR_VERSION = 1, MINOR_VERSION = 0 };

enum device_type { ON_HOST = 1, ON_DEVICE = 2, PAGE_LOCKED = 3, MANAGED = 13 };

enum { FLAG_IS_COPIED = 1u << 1 };

struct tensor {
    void *data;
    int32_t device_type;
    int32_t device_id;
    int32_t n_dims;
    struct dlpack_type type;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
};

/* With and without a version; both end in what is ours. */
struct plain {
    struct tensor tensor;
    void *context;
    void (*deleter)(struct plain *self);
};

struct versioned {
    uint32_t major, minor;
    void *context;
    void (*deleter)(struct versioned *self);
    uint64_t flags;
    struct tensor tensor;
};

struct exported {
    union {
        struct plain plain;
        struct versioned versioned;
    } as;
    PyObject *owner; /* owned */
    atomic_size_t *n_exports;
    int64_t axes[]; /* shape, then strides */
};

static const char plain_name[] = "dltensor";
static const char versioned_name[] = "dltensor_versioned";

/* ---- the end of a tensor ---- */

static void
let_go(struct exported *self)
{
    atomic_fetch_sub(self->n_exports, 1);
    PyObject *error = compat_take_error();
    Py_DECREF(self->owner);
    compat_restore_error(error);
    PyMem_RawFree(self);
}

static void
delete_exported(struct exported *self)
{
    if (nrm__is_exiting() || !Py_IsInitialized()) {
        return;
    }
    if (compat_is_attached()) {
        let_go(self);
        return;
    }
    PyGILState_STATE held = PyGILState_Ensure();
    let_go(self);
    PyGILState_Release(held);
}

static void
delete_plain(struct plain *self)
{
    delete_exported(self->context);
}

static void
delete_versioned(struct versioned *self)
{
    delete_exported(self->context);
}

/* A consumer renames the capsule that it has taken the tensor of. */
static void
capsule_end(PyObject *capsule)
{
    const char *name = PyCapsule_GetName(capsule);
    if (name == plain_name) {
        delete_plain(PyCapsule_GetPointer(capsule, plain_name));
    }
    else if (name == versioned_name) {
        delete_versioned(PyCapsule_GetPointer(capsule, versioned_name));
    }
}

/* ---- devices ---- */

static int
default_type(nrm_kind kind)
{
    return kind == NRM_KIND_PINNED ? PAGE_LOCKED : ON_DEVICE;
}

static int
ordinal_of(const struct device_memory *memory)
{
    return memory->device != NRM_DEVICE_NONE ? memory->device : cuda_current_device();
}

/* The host's memory is that of no device, by the specification. */
static int
id_of(int type, const struct device_memory *memory)
{
    return type == ON_DEVICE ? ordinal_of(memory) : 0;
}

PyObject *
dlpack_device_of(const struct device_memory *memory)
{
    int type = default_type(nrm_resource_kind(memory->mr));
    return Py_BuildValue("(ii)", type, id_of(type, memory));
}

static bool
can_be_shown_as(nrm_kind kind, int type)
{
    switch (type) {
    case ON_DEVICE:
        return true;
    case ON_HOST:
        return nrm_kind_is_host_accessible(kind);
    case PAGE_LOCKED:
        return kind == NRM_KIND_PINNED;
    case MANAGED:
        return kind == NRM_KIND_MANAGED;
    default:
        return false;
    }
}

static int
choose_device(const struct device_memory *memory, const struct dlpack_request *request,
              struct tensor *out)
{
    nrm_kind kind = nrm_resource_kind(memory->mr);
    out->device_type = default_type(kind);
    out->device_id = id_of(out->device_type, memory);
    if (!request->has_device) {
        return 0;
    }
    if (!can_be_shown_as(kind, request->device_type) ||
        request->device_id != id_of(request->device_type, memory)) {
        PyErr_Format(PyExc_BufferError,
                     "%s memory of device %d cannot be shown as DLPack device (%d, %d)",
                     nrm_kind_name(kind), ordinal_of(memory), request->device_type,
                     request->device_id);
        return -1;
    }
    out->device_type = request->device_type;
    out->device_id = request->device_id;
    return 0;
}

/* ---- order ---- */

static nrm_status
wait_on_host(const struct device_memory *memory)
{
    return memory->ptr == NULL ? NRM_OK : nrm_stream_synchronize(memory->stream);
}

static nrm_status
wait_on_stream(const struct device_memory *memory, uintptr_t handle)
{
    nrm_stream *consumer;
    if (memory->ptr == NULL) {
        return NRM_OK;
    }
    NRM_TRY(nrm_stream_wrap(handle, NULL, NULL, &consumer));
    void *token = nrm__detach();
    nrm_status status =
        nrm__transfer_join(memory->device, consumer, memory->device, memory->stream);
    nrm__attach(token);
    nrm_stream_release(consumer);
    return status;
}

static int
order(struct module_state *state, const struct device_memory *memory,
      const struct tensor *tensor, PyObject *stream)
{
    bool is_none = stream == NULL || stream == Py_None;
    bool is_host = tensor->device_type == ON_HOST || tensor->device_type == PAGE_LOCKED;
    long word = 0;
    uintptr_t handle = NRM_STREAM_HANDLE_LEGACY;
    if (!is_none && PyLong_Check(stream)) {
        int overflow;
        word = PyLong_AsLongAndOverflow(stream, &overflow);
    }
    if (word == -1) {
        return 0; /* the consumer sees to it */
    }
    if (!is_none && is_host) {
        PyErr_SetString(PyExc_ValueError,
                        "stream must be None for memory that is shown as the host's");
        return -1;
    }
    if (!is_none && arg_address(stream, "stream", &handle) < 0) {
        return -1;
    }
    if (handle == 0) {
        handle = NRM_STREAM_HANDLE_LEGACY;
    }
    nrm_status status = is_host ? wait_on_host(memory) : wait_on_stream(memory, handle);
    if (status != NRM_OK) {
        (void)errors_raise(state, status);
        return -1;
    }
    return 0;
}

/* ---- making one ---- */

static struct tensor *
tensor_of(struct exported *self, bool is_versioned)
{
    return is_versioned ? &self->as.versioned.tensor : &self->as.plain.tensor;
}

static struct exported *
make(const struct dlpack_source *source, const struct dlpack_request *request,
     const struct tensor *place)
{
    size_t axes_nbytes = 2 * (size_t)source->n_dims * sizeof(int64_t);
    struct exported *self = PyMem_RawCalloc(1, sizeof *self + axes_nbytes);
    if (self == NULL) {
        return (struct exported *)PyErr_NoMemory();
    }
    struct tensor *tensor = tensor_of(self, request->is_versioned);
    *tensor = (struct tensor){
        .data = (void *)source->ptr,
        .device_type = place->device_type,
        .device_id = place->device_id,
        .n_dims = source->n_dims,
        .type = source->type,
        .shape = self->axes,
        .strides = self->axes + source->n_dims,
    };
    memcpy(tensor->shape, source->shape, axes_nbytes / 2);
    memcpy(tensor->strides, source->strides, axes_nbytes / 2);
    if (request->is_versioned) {
        self->as.versioned.major = MAJOR_VERSION;
        self->as.versioned.minor = MINOR_VERSION;
        self->as.versioned.context = self;
        self->as.versioned.deleter = delete_versioned;
        self->as.versioned.flags = request->copies ? FLAG_IS_COPIED : 0;
    }
    else {
        self->as.plain.context = self;
        self->as.plain.deleter = delete_plain;
    }
    self->owner = Py_NewRef(source->owner);
    self->n_exports = source->n_exports;
    atomic_fetch_add(self->n_exports, 1);
    return self;
}

PyObject *
dlpack_export(struct module_state *state, struct dlpack_source *source,
              const struct dlpack_request *request)
{
    struct tensor place;
    if (choose_device(source->memory, request, &place) < 0 ||
        order(state, source->memory, &place, request->stream) < 0) {
        return NULL;
    }
    struct exported *self = make(source, request, &place);
    if (self == NULL) {
        return NULL;
    }
    PyObject *capsule = PyCapsule_New(
        self, request->is_versioned ? versioned_name : plain_name, capsule_end);
    if (capsule == NULL) {
        let_go(self);
    }
    return capsule;
}

/* ---- arguments ---- */

static int
read_pair(PyObject *value, const char *name, int *first, int *second)
{
    if (!PyTuple_Check(value) || PyTuple_GET_SIZE(value) != 2) {
        PyErr_Format(PyExc_TypeError, "%s must be a tuple of two ints, not %R", name,
                     value);
        return -1;
    }
    long numbers[2];
    for (int i = 0; i < 2; i++) {
        /* an enumeration of ints is one, too */
        if (arg_integer(PyTuple_GET_ITEM(value, i), name, 0, INT32_MAX, &numbers[i]) <
            0) {
            return -1;
        }
    }
    *first = (int)numbers[0];
    *second = (int)numbers[1];
    return 0;
}

int
dlpack_read_arguments(PyObject *const *args, Py_ssize_t n_args, PyObject *names,
                      struct dlpack_request *out)
{
    static struct signature signature = SIGNATURE("__dlpack__", DLPACK_TEXT);
    PyObject *values[4];
    int major = 0, minor = 0;
    if (signature_bind(&signature, args, n_args, names, values) < 0 ||
        (!arg_is_none(values[1]) &&
         read_pair(values[1], "max_version", &major, &minor) < 0)) {
        return -1;
    }
    *out = (struct dlpack_request){
        .stream = values[0],
        .is_versioned = major >= MAJOR_VERSION,
        .has_device = !arg_is_none(values[2]),
    };
    if (out->has_device &&
        read_pair(values[2], "dl_device", &out->device_type, &out->device_id) < 0) {
        return -1;
    }
    int copies = arg_is_none(values[3]) ? 0 : PyObject_IsTrue(values[3]);
    out->copies = copies > 0;
    return copies < 0 ? -1 : 0;
}
