/*
 * What numpy_rmm/_copy.py asks of the core: how a copy would be cut, how its stream
 * takes the pieces, and to submit it.
 */
#include "python/array_copy.h"

#include "base/error.h"
#include "core/hooks.h"
#include "core/transfer.h"
#include "nrm/options.h"
#include "cuda/driver.h"
#include "nrm/resource.h"
#include "python/args.h"
#include "python/cuda_query.h"
#include "python/device_array.h"
#include "python/errors.h"
#include "python/pending.h"
#include "python/stream.h"

/* ---- arguments ---- */

static int
read_axes(struct nrm__transfer *transfer, PyObject *shape, PyObject *dst_strides,
          PyObject *src_strides)
{
    Py_ssize_t n = PyTuple_GET_SIZE(shape);
    if (n > NRM__TRANSFER_MAX_DIMS || PyTuple_GET_SIZE(dst_strides) != n ||
        PyTuple_GET_SIZE(src_strides) != n) {
        PyErr_SetString(PyExc_ValueError, "shape and strides do not fit together");
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        transfer->shape[i] = PyLong_AsSize_t(PyTuple_GET_ITEM(shape, i));
        transfer->dst_strides[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(dst_strides, i));
        transfer->src_strides[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(src_strides, i));
    }
    transfer->n_dims = (int)n;
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *
copy_plan(PyObject *Py_UNUSED(module), PyObject *args)
{
    struct nrm__transfer transfer = {.direction = NRM__WITHIN};
    struct nrm__transfer_plan plan;
    PyObject *shape, *dst_strides, *src_strides;
    Py_ssize_t itemsize;
    if (!PyArg_ParseTuple(args, "nO!O!O!:_copy_plan", &itemsize, &PyTuple_Type, &shape,
                          &PyTuple_Type, &dst_strides, &PyTuple_Type, &src_strides) ||
        read_axes(&transfer, shape, dst_strides, src_strides) < 0) {
        return NULL;
    }
    transfer.itemsize = (size_t)itemsize;
    nrm__transfer_plan(&transfer, &plan);
    return Py_BuildValue("nnn", (Py_ssize_t)plan.n_calls,
                         (Py_ssize_t)(plan.n_planes * plan.n_rows),
                         (Py_ssize_t)plan.width);
}

/* Whose default streams are meant: that of an end of ours, else of the current
   context. */
static int
device_of(struct module_state *state, PyObject *dst, PyObject *src)
{
    struct device_memory *memory = device_memory_of(state, dst);
    if (memory == NULL) {
        memory = device_memory_of(state, src);
    }
    return memory != NULL ? memory->device : NRM_DEVICE_NONE;
}

static PyObject *
copy_submit(PyObject *module, PyObject *args)
{
    struct module_state *state = module_state(module);
    struct nrm__transfer transfer = {NULL};
    PyObject *dst, *src, *between, *shape, *dst_strides, *src_strides, *stream_object;
    unsigned long long dst_address, src_address;
    int direction, is_waited_for;
    Py_ssize_t itemsize;
    if (!PyArg_ParseTuple(args, "OOOKKinO!O!O!Op:_copy_submit", &dst, &src, &between,
                          &dst_address, &src_address, &direction, &itemsize,
                          &PyTuple_Type, &shape, &PyTuple_Type, &dst_strides,
                          &PyTuple_Type, &src_strides, &stream_object,
                          &is_waited_for) ||
        read_axes(&transfer, shape, dst_strides, src_strides) < 0) {
        return NULL;
    }
    transfer.dst = (char *)(uintptr_t)dst_address;
    transfer.src = (const char *)(uintptr_t)src_address;
    transfer.direction = (enum nrm__direction)direction;
    transfer.is_waited_for = is_waited_for != 0;
    transfer.itemsize = (size_t)itemsize;
    nrm_stream *stream = stream_get(state, stream_object);
    if (stream == NULL) {
        return NULL;
    }
    PyObject *pending = pending_submit(state, &transfer, device_of(state, dst, src),
                                       stream, dst, src, between);
    nrm_stream_release(stream);
    return pending;
}

static PyObject *
copy_ways(PyObject *module, PyObject *args)
{
    struct module_state *state = module_state(module);
    struct nrm__transfer_ways ways;
    PyObject *dst, *src, *stream_object;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "OOKO:_copy_ways", &dst, &src, &address,
                          &stream_object)) {
        return NULL;
    }
    nrm_stream *stream = stream_get(state, stream_object);
    if (stream == NULL) {
        return NULL;
    }
    void *token = nrm__detach();
    nrm_status status = nrm__transfer_ways_of(device_of(state, dst, src),
                                              nrm_stream_handle(stream),
                                              (const void *)(uintptr_t)address, &ways);
    nrm__attach(token);
    nrm_stream_release(stream);
    return status == NRM_OK ? Py_BuildValue("NN", PyBool_FromLong(ways.is_captured),
                                            PyBool_FromLong(ways.takes_batches))
                            : errors_raise(state, status);
}

static PyObject *
copy_stream(PyObject *module, PyObject *object)
{
    return stream_from_argument(module_state(module), object);
}

static PyObject *
copy_done(PyObject *module, PyObject *args)
{
    PyObject *dst, *src;
    return PyArg_ParseTuple(args, "OO:_copy_done", &dst, &src)
               ? pending_make(module_state(module), dst, src)
               : NULL;
}

/* Of the stream of a handle, which is used on the memory at the address. Where there
   are several devices 1 and 2 mean streams of that which the memory is on. */
static nrm_status
wait_for_handle_there(int device, const nrm_stream *stream, uintptr_t handle,
                      const void *address)
{
    int producer_device = nrm__transfer_device_of(address);
    nrm_stream *producer;
    if (producer_device == NRM_DEVICE_NONE) {
        return nrm__transfer_wait_for(nrm_stream_handle(stream), handle);
    }
    NRM_TRY(nrm_stream_wrap(handle, NULL, NULL, &producer));
    nrm_status status = nrm__transfer_join(device, stream, producer_device, producer);
    nrm_stream_release(producer);
    return status;
}

static nrm_status
wait_for_handle(int device, const nrm_stream *stream, uintptr_t handle,
                const void *address)
{
    void *token = nrm__detach();
    nrm_status status = wait_for_handle_there(device, stream, handle, address);
    nrm__attach(token);
    return status;
}

/* Of that which an object of ours is used on. */
static nrm_status
wait_for_memory(int device, nrm_stream *stream, struct device_memory *memory)
{
    nrm_stream *own = memory->stream;
    nrm_stream_retain(own);
    void *token = nrm__detach();
    nrm_status status = nrm__transfer_join(device, stream, memory->device, own);
    nrm__attach(token);
    nrm_stream_release(own);
    return status;
}

static PyObject *
copy_wait_for(PyObject *module, PyObject *args)
{
    struct module_state *state = module_state(module);
    PyObject *dst, *src, *stream_object, *producer;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "OOOOK:_copy_wait_for", &dst, &src, &stream_object,
                          &producer, &address)) {
        return NULL;
    }
    struct device_memory *memory = device_memory_of(state, producer);
    uintptr_t handle = 0;
    if (memory == NULL &&
        arg_address(producer, "the stream of __cuda_array_interface__", &handle) < 0) {
        return NULL;
    }
    nrm_stream *stream = stream_get(state, stream_object);
    if (stream == NULL) {
        return NULL;
    }
    int device = device_of(state, dst, src);
    nrm_status status =
        memory != NULL
            ? wait_for_memory(device, stream, memory)
            : wait_for_handle(device, stream, handle, (const void *)(uintptr_t)address);
    nrm_stream_release(stream);
    return status == NRM_OK ? Py_NewRef(Py_None) : errors_raise(state, status);
}

/* An address alone says no size: in a block of ours the copy must not leave that. One
   that nobody knows is a number that means something else, and a driver may follow
   it. */
static PyObject *
copy_fits(PyObject *module, PyObject *args)
{
    const char *name;
    unsigned long long address;
    Py_ssize_t nbytes;
    nrm_block_info block;
    char wanted[32], had[32];
    if (!PyArg_ParseTuple(args, "sKn:_copy_fits", &name, &address, &nbytes)) {
        return NULL;
    }
    const void *ptr = (const void *)(uintptr_t)address;
    nrm_format_nbytes((size_t)nbytes, wanted, sizeof wanted);
    if (nrm_block_find(ptr, &block) != NRM_OK) {
        if (nbytes == 0 || !cuda_is_unknown(ptr)) {
            Py_RETURN_NONE;
        }
        return errors_raise(module_state(module),
                            nrm__cuda_error(NRM_CUDA_ERROR_INVALID_VALUE,
                                            "%s: a copy of %s at 0x%llx, which is no "
                                            "memory of a device",
                                            name, wanted, address));
    }
    nrm_resource_release(block.resource);
    size_t left = block.nbytes - (size_t)(address - (uintptr_t)block.ptr);
    if ((size_t)nbytes <= left) {
        Py_RETURN_NONE;
    }
    nrm_format_nbytes(left, had, sizeof had);
    return errors_raise(module_state(module),
                        nrm__error(NRM_INVALID_VALUE,
                                   "%s: %s do not fit at 0x%llx, where the block ends "
                                   "after %s",
                                   name, wanted, address, had));
}

PyMethodDef array_copy_functions[] = {
    {"_copy_submit", copy_submit, METH_VARARGS,
     PyDoc_STR(
         "_copy_submit($module, dst, src, between, dst_address, src_address,\n"
         "             direction, itemsize, shape, dst_strides, src_strides,\n"
         "             stream, is_waited_for, /)\n--\n\n"
         "Submit a copy between strided memory; a Pending. Directions: 0 to the\n"
         "device, 1 to the host, 2 neither. Sizes and strides are in bytes. What\n"
         "is waited for is refused where the stream is captured.")},
    {"_copy_plan", copy_plan, METH_VARARGS,
     PyDoc_STR(
         "_copy_plan($module, itemsize, shape, dst_strides, src_strides, /)\n--\n\n"
         "(calls, rows of a call, bytes of a row) that a copy becomes.")},
    {"_copy_ways", copy_ways, METH_VARARGS,
     PyDoc_STR("_copy_ways($module, dst, src, address, stream, /)\n--\n\n"
               "(captured, batches): whether the stream makes a graph of copies, and\n"
               "takes many pieces of the host memory at the address in one call.")},
    {"_copy_fits", copy_fits, METH_VARARGS,
     PyDoc_STR("_copy_fits($module, name, address, nbytes, /)\n--\n\n"
               "Raise ValueError when the bytes go beyond a block of ours.")},
    {"_copy_stream", copy_stream, METH_O,
     PyDoc_STR("_copy_stream($module, stream, /)\n--\n\n"
               "The Stream that an argument means, which may be a handle.")},
    {"_copy_done", copy_done, METH_VARARGS,
     PyDoc_STR("_copy_done($module, dst, src, /)\n--\n\nA Pending that is done.")},
    {"_copy_wait_for", copy_wait_for, METH_VARARGS,
     PyDoc_STR(
         "_copy_wait_for($module, dst, src, stream, producer, address, /)\n--\n\n"
         "Make the stream of a copy wait for what another one has been given: that\n"
         "of a DeviceBuffer or DeviceArray, or that of a handle, which is used on\n"
         "the memory at the address.")},
    {NULL, NULL, 0, NULL},
};
