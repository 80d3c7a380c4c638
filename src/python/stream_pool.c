/*
 * StreamPool: a tuple of Streams and a counter, which threads share without a lock.
 *
 * The streams are made at once, since making one may wait for other calls of the
 * driver: who keeps a pool does not want that later.
 */
#include "python/stream_pool.h"

#include <stdatomic.h>

#include "python/args.h"
#include "python/errors.h"
#include "python/signature.h"
#include "python/stream.h"

#define POOL_TEXT "pool_size=16, flags=0"
#define GET_TEXT "stream_id=None"

enum { DEFAULT_POOL_SIZE = 16, MAX_POOL_SIZE = 1 << 16 };

struct stream_pool {
    PyObject ob_base;  /* as PyObject_HEAD */
    PyObject *streams; /* a tuple */
    atomic_size_t next;
    PyObject *weakrefs;
};

static struct stream_pool *
pool_from(PyObject *object)
{
    return (struct stream_pool *)object;
}

/* ---- life ---- */

static PyObject *
make_streams(struct module_state *state, long n_streams, PyObject *flags)
{
    PyObject *streams = PyTuple_New(n_streams);
    PyObject *args[] = {Py_None, flags != NULL ? flags : Py_None};
    for (long i = 0; streams != NULL && i < n_streams; i++) {
        PyObject *stream =
            PyObject_Vectorcall((PyObject *)state->stream_type, args, 2, NULL);
        if (stream == NULL) {
            Py_CLEAR(streams);
            break;
        }
        PyTuple_SET_ITEM(streams, i, stream);
    }
    return streams;
}

static PyObject *
pool_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static struct signature signature = SIGNATURE("StreamPool", POOL_TEXT);
    struct module_state *state = type_state(type);
    PyObject *values[2];
    long n_streams = DEFAULT_POOL_SIZE;
    if (state == NULL || errors_begin_call() < 0 ||
        signature_bind_tuple(&signature, args, keywords, values) < 0 ||
        (values[0] != NULL &&
         arg_integer(values[0], "pool_size", 1, MAX_POOL_SIZE, &n_streams) < 0)) {
        return NULL;
    }
    PyObject *streams = make_streams(state, n_streams, values[1]);
    struct stream_pool *self = streams == NULL ? NULL
                                               : pool_from(type->tp_alloc(type, 0));
    if (self == NULL) {
        Py_XDECREF(streams);
        return NULL;
    }
    self->streams = streams;
    return (PyObject *)self;
}

static void
pool_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    if (pool_from(object)->weakrefs != NULL) {
        PyObject_ClearWeakRefs(object);
    }
    Py_XDECREF(pool_from(object)->streams);
    type->tp_free(object);
    Py_DECREF(type);
}

/* ---- methods ---- */

static size_t
n_streams_of(struct stream_pool *self)
{
    return (size_t)PyTuple_GET_SIZE(self->streams);
}

static PyObject *
stream_at(struct stream_pool *self, size_t index)
{
    size_t n = n_streams_of(self);
    return Py_NewRef(PyTuple_GET_ITEM(self->streams, (Py_ssize_t)(index % n)));
}

static PyObject *
get_stream(PyObject *object, PyTypeObject *Py_UNUSED(type), PyObject *const *args,
           Py_ssize_t n_args, PyObject *names)
{
    static struct signature signature = SIGNATURE("get_stream", GET_TEXT);
    struct stream_pool *self = pool_from(object);
    PyObject *values[1];
    size_t index;
    if (signature_bind(&signature, args, n_args, names, values) < 0) {
        return NULL;
    }
    if (arg_is_none(values[0])) {
        return stream_at(self, atomic_fetch_add_explicit(&self->next, 1,
                                                         memory_order_relaxed));
    }
    return arg_address(values[0], "stream_id", &index) < 0 ? NULL
                                                           : stream_at(self, index);
}

static PyObject *
get_pool_size(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return PyLong_FromSize_t(n_streams_of(pool_from(object)));
}

static Py_ssize_t
pool_length(PyObject *object)
{
    return PyTuple_GET_SIZE(pool_from(object)->streams);
}

static PyObject *
pool_repr(PyObject *object)
{
    return PyUnicode_FromFormat("<StreamPool of %zd streams>", pool_length(object));
}

static PyMethodDef pool_methods_table[] = {
    {"get_stream", (PyCFunction)(void (*)(void))get_stream,
     METH_METHOD | METH_FASTCALL | METH_KEYWORDS,
     SIGNATURE_DOC(
         "get_stream", "$self, ", GET_TEXT,
         "A stream of the pool.\n\n"
         "Parameters\n----------\n"
         "stream_id : int, optional\n    The same stream for the same number,\n"
         "    modulo the size. None: the next one in turn.\n\n"
         "Returns\n-------\nStream\n")},
    {"get_pool_size", get_pool_size, METH_NOARGS,
     PyDoc_STR("get_pool_size($self)\n--\n\nHow many streams it has.")},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef pool_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(struct stream_pool, weakrefs), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot pool_slots[] = {
    {Py_tp_doc,
     (void *)PyDoc_STR("StreamPool(" POOL_TEXT ")\n--\n\n"
                       "Streams that are made once and handed out in turn.\n\n"
                       "Parameters\n----------\n"
                       "pool_size : int\n    Streams, 1 or more.\n"
                       "flags : CudaStreamFlags or int\n    Of all of them, as for\n"
                       "    :class:`Stream`.\n\n"
                       "Raises\n------\n"
                       "CudaUnavailableError\n    When there is no CUDA device.\n\n"
                       "Examples\n--------\n"
                       ">>> import numpy_rmm\n"
                       ">>> from numpy_rmm.testing import simulate_cuda\n"
                       ">>> with simulate_cuda():  # in place of a GPU\n"
                       "...     pool = numpy_rmm.StreamPool(2)\n"
                       "...     pool.get_stream(1) == pool.get_stream(3)\n"
                       "True\n")},
    {Py_tp_new, pool_new},
    {Py_tp_dealloc, pool_dealloc},
    {Py_tp_repr, pool_repr},
    {Py_sq_length, pool_length},
    {Py_tp_methods, pool_methods_table},
    {Py_tp_members, pool_members},
    {0, NULL},
};

static PyType_Spec pool_spec = {
    .name = "numpy_rmm.StreamPool",
    .basicsize = sizeof(struct stream_pool),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = pool_slots,
};

int
stream_pool_init(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &pool_spec, NULL);
    if (type == NULL) {
        return -1;
    }
    int result = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return result;
}
