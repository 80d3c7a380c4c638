/*
 * Tensors for other libraries, as the DLPack specification (1.0, and 0.8 without
 * versions) lays them out.
 *
 * One piece of memory has the tensor, its shape and its strides. A consumer lets go of
 * it from any thread, with the interpreter or without, and perhaps when that has ended:
 * then nothing is done any more. The byte offset is always 0, since some consumers do
 * not look at it.
 */
#include "python/dlpack.h"

#include "base/error.h"
#include "core/hooks.h"
#include "core/transfer.h"
#include "python/args.h"
#include "python/cuda_query.h"
#include "python/errors.h"
#include "python/signature.h"

/* What the consumer wants; arguments as DLPACK_TEXT names them. */
struct request {
    PyObject *stream; /* borrowed; NULL or None: the legacy one */
    bool is_versioned;
    bool has_device;
    int device_type, device_id;
    bool copies; /* of a copy, which the caller makes */
};

struct exported {
    union {
        struct dlpack_plain plain;
        struct dlpack_versioned versioned;
    } as;
    PyObject *owner;          /* owned */
    atomic_size_t *n_exports; /* may be NULL */
    int64_t axes[];           /* shape, then strides */
};

static const char plain_name[] = "dltensor";
static const char versioned_name[] = "dltensor_versioned";

/* ---- the end of a tensor ---- */

static void
let_go(struct exported *self)
{
    if (self->n_exports != NULL) {
        atomic_fetch_sub(self->n_exports, 1);
    }
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
delete_plain(struct dlpack_plain *self)
{
    delete_exported(self->context);
}

static void
delete_versioned(struct dlpack_versioned *self)
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

/* Of a NumPy array: somebody page-locked it. */
static nrm_kind
kind_of(const struct device_memory *memory)
{
    if (memory == NULL) {
        return NRM_KIND_PINNED;
    }
    return memory->mr != NULL ? nrm_resource_kind(memory->mr) : NRM_KIND_DEVICE;
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
    return type == DLPACK_ON_DEVICE && memory != NULL ? ordinal_of(memory) : 0;
}

void
dlpack_set_device(const struct device_memory *memory, struct dlpack_tensor *out)
{
    bool is_pinned = kind_of(memory) == NRM_KIND_PINNED;
    out->device_type = is_pinned ? DLPACK_PAGE_LOCKED : DLPACK_ON_DEVICE;
    out->device_id = id_of(out->device_type, memory);
}

PyObject *
dlpack_device_of(const struct device_memory *memory)
{
    struct dlpack_tensor place;
    dlpack_set_device(memory, &place);
    return Py_BuildValue("(ii)", (int)place.device_type, (int)place.device_id);
}

/* NULL stands for an array of the host, which has no device to be shown on. */
static bool
can_be_shown_as(const struct device_memory *memory, int type)
{
    nrm_kind kind = kind_of(memory);
    switch (type) {
    case DLPACK_ON_DEVICE:
        return memory != NULL;
    case DLPACK_ON_HOST:
        return nrm_kind_is_host_accessible(kind);
    case DLPACK_PAGE_LOCKED:
        return kind == NRM_KIND_PINNED;
    case DLPACK_MANAGED:
        return kind == NRM_KIND_MANAGED;
    default:
        return false;
    }
}

static int
choose_device(const struct device_memory *memory, const struct request *request,
              struct dlpack_tensor *out)
{
    dlpack_set_device(memory, out);
    if (!request->has_device) {
        return 0;
    }
    if (!can_be_shown_as(memory, request->device_type) ||
        request->device_id != id_of(request->device_type, memory)) {
        PyErr_Format(PyExc_BufferError,
                     "%s memory of device %d cannot be shown as DLPack device (%d, %d)",
                     nrm_kind_name(kind_of(memory)),
                     memory != NULL ? ordinal_of(memory) : 0, request->device_type,
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
    return memory == NULL || memory->ptr == NULL
               ? NRM_OK
               : nrm_stream_synchronize(memory->stream);
}

static int
order(struct module_state *state, const struct device_memory *memory,
      const struct dlpack_tensor *tensor, PyObject *stream)
{
    bool is_none = stream == NULL || stream == Py_None;
    bool is_host = tensor->device_type == DLPACK_ON_HOST ||
                   tensor->device_type == DLPACK_PAGE_LOCKED;
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
    nrm_status status = is_host ? wait_on_host(memory)
                                : device_memory_let_wait(memory, handle);
    if (status != NRM_OK) {
        (void)errors_raise(state, status);
        return -1;
    }
    return 0;
}

/* ---- making one ---- */

static struct dlpack_tensor *
tensor_of(struct exported *self, bool is_versioned)
{
    return is_versioned ? &self->as.versioned.tensor : &self->as.plain.tensor;
}

static struct exported *
make(const struct dlpack_source *source, const struct request *request,
     const struct dlpack_tensor *place)
{
    size_t axes_nbytes = 2 * (size_t)source->n_dims * sizeof(int64_t);
    struct exported *self = PyMem_RawCalloc(1, sizeof *self + axes_nbytes);
    if (self == NULL) {
        return (struct exported *)PyErr_NoMemory();
    }
    struct dlpack_tensor *tensor = tensor_of(self, request->is_versioned);
    *tensor = (struct dlpack_tensor){
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
        self->as.versioned.version.major = DLPACK_MAJOR;
        self->as.versioned.version.minor = DLPACK_MINOR;
        self->as.versioned.context = self;
        self->as.versioned.deleter = delete_versioned;
        self->as.versioned.flags = (request->copies ? DLPACK_IS_COPIED : 0u) |
                                   (source->is_read_only ? DLPACK_IS_READ_ONLY : 0u);
    }
    else {
        self->as.plain.context = self;
        self->as.plain.deleter = delete_plain;
    }
    self->owner = Py_NewRef(source->owner);
    self->n_exports = source->n_exports;
    if (self->n_exports != NULL) {
        atomic_fetch_add(self->n_exports, 1);
    }
    return self;
}

struct dlpack_versioned *
dlpack_export_unordered(const struct dlpack_source *source)
{
    const struct request request = {.is_versioned = true};
    struct dlpack_tensor place;
    dlpack_set_device(source->memory, &place);
    struct exported *self = make(source, &request, &place);
    return self == NULL ? NULL : &self->as.versioned;
}

PyObject *
dlpack_owner_of(const struct dlpack_versioned *tensor)
{
    bool is_ours = tensor->deleter == delete_versioned;
    return is_ours ? Py_NewRef(((struct exported *)tensor->context)->owner) : NULL;
}

static PyObject *
export(struct module_state *state, const struct dlpack_source *source,
       const struct request *request)
{
    struct dlpack_tensor place;
    if (source->is_read_only && !request->is_versioned) {
        PyErr_SetString(PyExc_BufferError,
                        "only DLPack 1.0 can say that an array is read-only: "
                        "max_version=(1, 0)");
        return NULL;
    }
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

static int
read_arguments(PyObject *const *args, Py_ssize_t n_args, PyObject *names,
               struct request *out)
{
    static struct signature signature = SIGNATURE("__dlpack__", DLPACK_TEXT);
    PyObject *values[4];
    int major = 0, minor = 0;
    if (signature_bind(&signature, args, n_args, names, values) < 0 ||
        (!arg_is_none(values[1]) &&
         read_pair(values[1], "max_version", &major, &minor) < 0)) {
        return -1;
    }
    *out = (struct request){
        .stream = values[0],
        .is_versioned = major >= DLPACK_MAJOR,
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

PyObject *
dlpack_call(struct module_state *state, const struct dlpack_exporter *exporter,
            PyObject *object, PyObject *const *args, Py_ssize_t n_args, PyObject *names)
{
    struct request request;
    struct dlpack_source source;
    if (errors_begin_call() < 0 || read_arguments(args, n_args, names, &request) < 0) {
        return NULL;
    }
    if (request.copies && exporter->copy == NULL) {
        PyErr_SetString(PyExc_BufferError,
                        "a copy would have to be page-locked, too: copy the array");
        return NULL;
    }
    PyObject *shown = request.copies ? exporter->copy(state, object)
                                     : Py_NewRef(object);
    PyObject *capsule = NULL;
    if (shown != NULL && exporter->describe(shown, &source) == 0) {
        capsule = export(state, &source, &request);
    }
    Py_XDECREF(shown);
    return capsule;
}
