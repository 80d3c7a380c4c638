/* DLPack: memory of ours as a tensor that any array library takes without a copy. */
#ifndef NRM_PYTHON_DLPACK_H
#define NRM_PYTHON_DLPACK_H

#include <Python.h>

#include <stdatomic.h>
#include <stdint.h>

#include "python/device_memory.h"
#include "python/dlpack_layout.h"
#include "python/state.h"

enum { DLPACK_MAX_DIMS = 64 };

struct dlpack_source {
    PyObject *owner;          /* borrowed: kept as long as the tensor */
    atomic_size_t *n_exports; /* in the owner: tensors that are alive; may be NULL */
    struct device_memory *memory; /* NULL: page-locked memory of a NumPy array */
    const char *ptr;
    bool is_read_only;
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

/* What a type does for __dlpack__. */
struct dlpack_exporter {
    /* A new object like it; NULL: none can be made. */
    PyObject *(*copy)(struct module_state *state, PyObject *object);
    int (*describe)(PyObject *object, struct dlpack_source *out);
};

/* The method. */
PyObject *dlpack_call(struct module_state *state,
                      const struct dlpack_exporter *exporter, PyObject *object,
                      PyObject *const *args, Py_ssize_t n_args, PyObject *names);

/* The same as a tensor alone, behind which nothing is ordered. NULL with an error
   set. */
struct dlpack_versioned *dlpack_export_unordered(const struct dlpack_source *source);

/* Writes the device where memory is shown unless another one is asked for. */
void dlpack_set_device(const struct device_memory *memory, struct dlpack_tensor *out);

/* The same as (type, ordinal). */
PyObject *dlpack_device_of(const struct device_memory *memory);

/* Whether a tensor was exported here: then its owner, a new reference, else NULL. */
PyObject *dlpack_owner_of(const struct dlpack_versioned *tensor);

#endif
