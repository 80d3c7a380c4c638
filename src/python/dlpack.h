/* DLPack: memory of ours as a tensor that any array library takes without a copy. */
#ifndef NRM_PYTHON_DLPACK_H
#define NRM_PYTHON_DLPACK_H

#include <Python.h>

#include <stdatomic.h>
#include <stdint.h>

#include "python/device_memory.h"
#include "python/state.h"

enum { DLPACK_MAX_DIMS = 64 };

enum dlpack_type_code {
    DLPACK_INT = 0,
    DLPACK_UINT = 1,
    DLPACK_FLOAT = 2,
    DLPACK_BFLOAT = 4,
    DLPACK_COMPLEX = 5,
    DLPACK_BOOL = 6,
};

struct dlpack_type {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};

struct dlpack_source {
    PyObject *owner;          /* borrowed: kept as long as the tensor */
    atomic_size_t *n_exports; /* in the owner: tensors that are alive */
    struct device_memory *memory;
    const char *ptr;
    struct dlpack_type type;
    int n_dims;
    int64_t shape[DLPACK_MAX_DIMS];
    int64_t strides[DLPACK_MAX_DIMS]; /* in items */
};

#define DLPACK_TEXT "*, stream=None, max_version=None, dl_device=None, copy=None"

#define DLPACK_DOC                                                                       \
    "A DLPack capsule of the memory, without a copy.\n\n"                                \
    "Parameters\n----------\n"                                                           \
    "stream : int, optional\n"                                                           \
    "    The consumer's stream, which is made to wait for what the buffer's has been\n"  \
    "    given: a handle, 1 the legacy default stream (as None and 0), 2 the\n"          \
    "    per-thread one; -1: it waits for nothing.\n"                                    \
    "max_version : (int, int), optional\n"                                               \
    "    (1, 0) or more: a versioned capsule.\n"                                         \
    "dl_device : (int, int), optional\n"                                                 \
    "    Managed memory is shown as memory of the device, as of type 2, which all\n"     \
    "    libraries take, and as type 13 if that is asked for here; page-locked memory\n" \
    "    as type 3, or 2 or 1.\n"                                                        \
    "copy : bool, optional\n"                                                            \
    "    True: of a copy.\n\n"                                                           \
    "Raises\n------\n"                                                                   \
    "BufferError\n    When the memory is not on `dl_device`.\n"                          \
    "ValueError\n    For a stream with memory that is shown as the host's.\n"

/* What the consumer wants; arguments as DLPACK_TEXT names them. */
struct dlpack_request {
    PyObject *stream; /* borrowed; NULL or None: the legacy one */
    bool is_versioned;
    bool has_device;
    int device_type, device_id;
    bool copies; /* of a copy, which the caller makes */
};

int dlpack_read_arguments(PyObject *const *args, Py_ssize_t n_args, PyObject *names,
                          struct dlpack_request *out);

/* A capsule, or NULL with an error set. */
PyObject *dlpack_export(struct module_state *state, struct dlpack_source *source,
                        const struct dlpack_request *request);

/* (type, ordinal) */
PyObject *dlpack_device_of(const struct device_memory *memory);

#endif
