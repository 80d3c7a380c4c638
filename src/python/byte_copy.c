/*
 * The three steps of a copy between contiguous bytes: wait for the owners' streams,
 * submit, and wait or make the owners' streams wait. byte_copy.h says when which.
 */
#include "python/byte_copy.h"

#include "base/error.h"
#include "core/hooks.h"
#include "nrm/options.h"
#include "python/args.h"
#include "python/cuda_query.h"
#include "python/errors.h"
#include "python/pending.h"
#include "python/signature.h"
#include "python/stream.h"

/* ---- order ---- */

static nrm_status
wait_for_producer(const struct byte_copy *copy)
{
    nrm_stream *producer;
    int device = nrm__transfer_device_of(copy->src);
    NRM_TRY(nrm_stream_wrap(copy->producer, NULL, NULL, &producer));
    nrm_status status =
        nrm__transfer_join(copy->device, copy->stream,
                           device != NRM_DEVICE_NONE ? device : copy->device, producer);
    nrm_stream_release(producer);
    return status;
}

/* The copy comes after what both ends have been given so far. Detached. */
static nrm_status
join_before(const struct byte_copy *copy)
{
    for (int i = 0; i < N_ENDS; i++) {
        if (copy->owners[i] != NULL) {
            NRM_TRY(nrm__transfer_join(copy->device, copy->stream,
                                       copy->owner_devices[i], copy->owners[i]));
        }
    }
    return copy->producer != 0 ? wait_for_producer(copy) : NRM_OK;
}

/* What both ends are given from now on comes after the copy. Detached. */
static nrm_status
join_after(const struct byte_copy *copy)
{
    for (int i = 0; i < N_ENDS; i++) {
        if (copy->owners[i] != NULL) {
            NRM_TRY(nrm__transfer_join(copy->owner_devices[i], copy->owners[i],
                                       copy->device, copy->stream));
        }
    }
    return NRM_OK;
}

static int
join(struct module_state *state, const struct byte_copy *copy,
     nrm_status (*step)(const struct byte_copy *copy))
{
    void *token = nrm__detach();
    nrm_status status = step(copy);
    nrm__attach(token);
    if (status != NRM_OK) {
        (void)errors_raise(state, status);
        return -1;
    }
    return 0;
}

/* ---- a copy ---- */

static bool
waits(const struct byte_copy *copy)
{
    if (copy->never_waits) {
        return false;
    }
    return copy->direction != NRM__WITHIN ||
           nrm_stream_handle(copy->stream) == NRM_STREAM_HANDLE_DEFAULT;
}

static PyObject *
submit(struct module_state *state, const struct byte_copy *copy)
{
    struct nrm__transfer transfer;
    transfer.dst = copy->dst;
    transfer.src = copy->src;
    transfer.direction = copy->direction;
    transfer.itemsize = copy->nbytes;
    transfer.n_dims = 0;
    transfer.is_waited_for = waits(copy);
    PyObject *kept = copy->src_object != NULL ? copy->src_object : Py_None;
    return pending_submit(state, &transfer, copy->device, copy->stream, Py_None, kept,
                          Py_None);
}

/* Steals `pending`. */
static int
leave_running(struct module_state *state, const struct byte_copy *copy,
              PyObject *pending)
{
    if (join(state, copy, join_after) < 0) { /* then nobody would know of it */
        PyObject *error = compat_take_error();
        if (pending_finish(pending) < 0) {
            PyErr_Clear(); /* the first error is told */
        }
        compat_restore_error(error);
        Py_DECREF(pending);
        return -1;
    }
    if (copy->dst_buffer != NULL) {
        device_buffer_set_pending(copy->dst_buffer, pending);
    }
    else {
        Py_DECREF(pending);
    }
    return 0;
}

static int
run(struct module_state *state, const struct byte_copy *copy)
{
    if (join(state, copy, join_before) < 0) {
        return -1;
    }
    PyObject *pending = submit(state, copy);
    if (pending == NULL) {
        return -1;
    }
    if (!waits(copy)) {
        return leave_running(state, copy, pending);
    }
    int result = pending_finish(pending);
    Py_DECREF(pending);
    return result;
}

static void
note_owner(struct byte_copy *copy, int end, const struct device_buffer *buffer)
{
    copy->owners[end] = NULL;
    if (buffer != NULL) {
        copy->owners[end] = buffer->memory.stream;
        copy->owner_devices[end] = buffer->memory.device;
        nrm_stream_retain(copy->owners[end]);
    }
}

/* Another thread may give a buffer another stream meanwhile. */
int
byte_copy_run(struct module_state *state, struct byte_copy *copy)
{
    if (copy->nbytes == 0) {
        return 0;
    }
    note_owner(copy, 0, copy->dst_buffer);
    note_owner(copy, 1, copy->src_buffer);
    int result = run(state, copy);
    nrm_stream_release(copy->owners[0]);
    nrm_stream_release(copy->owners[1]);
    return result;
}

int
byte_copy_from_address(struct module_state *state, struct device_buffer *buffer,
                       uintptr_t ptr)
{
    struct byte_copy copy = {
        .dst = buffer->memory.ptr,
        .src = (const char *)ptr,
        .nbytes = buffer->nbytes,
        .direction = cuda_is_device_memory((const void *)ptr) ? NRM__WITHIN
                                                              : NRM__TO_DEVICE,
        .stream = buffer->memory.stream,
        .device = buffer->memory.device,
        .dst_buffer = buffer,
    };
    return byte_copy_run(state, &copy);
}

/* ---- arguments ---- */

int
byte_copy_host(PyObject *object, const char *name, int flags, Py_buffer *out)
{
    if (PyObject_GetBuffer(object, out, PyBUF_STRIDES | PyBUF_FORMAT | flags) < 0) {
        return -1;
    }
    if (out->ndim == 1 && out->itemsize == 1 && PyBuffer_IsContiguous(out, 'C')) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "%s must be one-dimensional and contiguous, with items of 1 B: it has "
                 "%d dimensions, items of %zd B, and is %scontiguous",
                 name, out->ndim, out->itemsize,
                 PyBuffer_IsContiguous(out, 'C') ? "" : "not ");
    PyBuffer_Release(out);
    return -1;
}

int
byte_copy_check_room(const char *name, size_t nbytes, const char *into, size_t room)
{
    char has[32], fits[32];
    if (nbytes <= room) {
        return 0;
    }
    nrm_format_nbytes(nbytes, has, sizeof has);
    nrm_format_nbytes(room, fits, sizeof fits);
    PyErr_Format(PyExc_ValueError, "%s: %s do not fit into %s, which has %s", name, has,
                 into, fits);
    return -1;
}

/* An address says no size: in a block of ours the copy must not leave that. The device
   that the block is on; -1 with an error set fails, NRM_DEVICE_NONE is not it. */
static int
check_address(const char *name, uintptr_t address, size_t nbytes, int *out_device)
{
    nrm_block_info block;
    *out_device = NRM_DEVICE_NONE;
    if (nrm_block_find((const void *)address, &block) != NRM_OK) {
        return 0;
    }
    nrm_resource_release(block.resource);
    *out_device = block.device;
    size_t left = block.nbytes - (size_t)(address - (uintptr_t)block.ptr);
    return byte_copy_check_room(name, nbytes, "the block at its address", left);
}

/* ---- functions ---- */

#define PTR_TO_HOST_TEXT "db, hb, stream=..."
#define HOST_TO_PTR_TEXT "hb, db, stream=..."
#define DEVICE_TO_PTR_TEXT "d_src, d_dst, count, stream=..."

/* Between an address and a host buffer, which is released. */
static PyObject *
copy_address(struct module_state *state, enum nrm__direction direction,
             PyObject *address, Py_buffer *host, PyObject *stream_object)
{
    struct byte_copy copy = {.direction = direction, .nbytes = (size_t)host->len};
    uintptr_t ptr;
    int result = -1;
    copy.stream = stream_get(state, stream_object);
    if (copy.stream != NULL && arg_address(address, "db", &ptr) == 0 &&
        check_address("db", ptr, copy.nbytes, &copy.device) == 0) {
        copy.dst = direction == NRM__TO_HOST ? host->buf : (char *)ptr;
        copy.src = direction == NRM__TO_HOST ? (const char *)ptr : host->buf;
        result = byte_copy_run(state, &copy);
    }
    nrm_stream_release(copy.stream);
    PyBuffer_Release(host);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
copy_ptr_to_host(PyObject *module, PyObject *const *args, Py_ssize_t n_args,
                 PyObject *names)
{
    static struct signature signature = SIGNATURE("copy_ptr_to_host", PTR_TO_HOST_TEXT);
    PyObject *values[3];
    Py_buffer host;
    if (errors_begin_call() < 0 ||
        signature_bind(&signature, args, n_args, names, values) < 0 ||
        byte_copy_host(values[1], "hb", PyBUF_WRITABLE, &host) < 0) {
        return NULL;
    }
    return copy_address(module_state(module), NRM__TO_HOST, values[0], &host,
                        values[2]);
}

static PyObject *
copy_host_to_ptr(PyObject *module, PyObject *const *args, Py_ssize_t n_args,
                 PyObject *names)
{
    static struct signature signature = SIGNATURE("copy_host_to_ptr", HOST_TO_PTR_TEXT);
    PyObject *values[3];
    Py_buffer host;
    if (errors_begin_call() < 0 ||
        signature_bind(&signature, args, n_args, names, values) < 0 ||
        byte_copy_host(values[0], "hb", 0, &host) < 0) {
        return NULL;
    }
    return copy_address(module_state(module), NRM__TO_DEVICE, values[1], &host,
                        values[2]);
}

static PyObject *
copy_device_to_ptr(PyObject *module, PyObject *const *args, Py_ssize_t n_args,
                   PyObject *names)
{
    static struct signature signature =
        SIGNATURE("copy_device_to_ptr", DEVICE_TO_PTR_TEXT);
    struct module_state *state = module_state(module);
    struct byte_copy copy = {.direction = NRM__WITHIN, .never_waits = true};
    PyObject *values[4];
    uintptr_t src, dst;
    int src_device;
    if (errors_begin_call() < 0 ||
        signature_bind(&signature, args, n_args, names, values) < 0 ||
        arg_address(values[0], "d_src", &src) < 0 ||
        arg_address(values[1], "d_dst", &dst) < 0 ||
        arg_nbytes(values[2], "count", &copy.nbytes) < 0 ||
        check_address("d_src", src, copy.nbytes, &src_device) < 0 ||
        check_address("d_dst", dst, copy.nbytes, &copy.device) < 0) {
        return NULL;
    }
    copy.stream = stream_get(state, values[3]);
    if (copy.stream == NULL) {
        return NULL;
    }
    copy.src = (const char *)src;
    copy.dst = (char *)dst;
    int result = byte_copy_run(state, &copy);
    nrm_stream_release(copy.stream);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

#define FUNCTION(name) (PyCFunction)(void (*)(void)) name, METH_FASTCALL | METH_KEYWORDS

PyMethodDef byte_copy_functions[] = {
    {"copy_ptr_to_host", FUNCTION(copy_ptr_to_host),
     SIGNATURE_DOC(
         "copy_ptr_to_host", "$module, ", PTR_TO_HOST_TEXT,
         "Fill host memory with bytes from an address, and wait.\n\n"
         "Parameters\n----------\n"
         "db : int\n    The address.\n"
         "hb : buffer\n    Writable, one-dimensional, of items of 1 B; as many\n"
         "    bytes are copied as it has.\n"
         "stream : Stream\n    On which the copy is made.\n\n"
         "Raises\n------\n"
         "ValueError\n    When a block of ours at the address has fewer bytes.\n")},
    {"copy_host_to_ptr", FUNCTION(copy_host_to_ptr),
     SIGNATURE_DOC(
         "copy_host_to_ptr", "$module, ", HOST_TO_PTR_TEXT,
         "Copy host memory to an address, and wait.\n\n"
         "Parameters\n----------\n"
         "hb : buffer\n    One-dimensional, contiguous, of items of 1 B.\n"
         "db : int\n    The address.\n"
         "stream : Stream\n    On which the copy is made.\n\n"
         "Raises\n------\n"
         "ValueError\n    When a block of ours at the address has fewer bytes.\n\n"
         "Examples\n--------\n"
         ">>> import numpy_rmm\n"
         ">>> from numpy_rmm.testing import simulate_cuda\n"
         ">>> with simulate_cuda():  # in place of a GPU\n"
         "...     buffer, host = numpy_rmm.DeviceBuffer(size=3), bytearray(3)\n"
         "...     numpy_rmm.copy_host_to_ptr(b'abc', buffer.ptr)\n"
         "...     numpy_rmm.copy_ptr_to_host(buffer.ptr, host)\n"
         "...     host\n"
         "bytearray(b'abc')\n")},
    {"copy_device_to_ptr", FUNCTION(copy_device_to_ptr),
     SIGNATURE_DOC(
         "copy_device_to_ptr", "$module, ", DEVICE_TO_PTR_TEXT,
         "Copy between two addresses of device memory, without waiting.\n\n"
         "The caller keeps both alive until the stream has come that far.\n\n"
         "Parameters\n----------\n"
         "d_src, d_dst : int\n    Where from, and where to.\n"
         "count : int or str\n    Bytes.\n"
         "stream : Stream\n    On which the copy is made.\n\n"
         "Raises\n------\n"
         "ValueError\n    When a block of ours at an address has fewer bytes.\n")},
    {NULL, NULL, 0, NULL},
};
