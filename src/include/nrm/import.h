/*
 * The C API for other extension modules, without linking to anything.
 *
 * A process has one registry, so there is one copy of the core, inside numpy_rmm; this
 * header fetches its functions from a capsule:
 *
 *     const struct nrm_functions *nrm = nrm_import();
 *     if (nrm == NULL)
 *         return NULL;                        // ImportError is set
 *     nrm_resource *mr;
 *     if (nrm->registry_get("host", &mr) != NRM_OK)
 *         return PyErr_Format(PyExc_RuntimeError, "%s", nrm->last_error()->message);
 *
 * The table is append-only: a newer numpy_rmm has all that an older one had, in the
 * same order. nrm_import fails when the installed numpy_rmm is older than this header.
 * Compile with -I`python -c "import numpy_rmm; print(numpy_rmm.get_include())"`.
 */
#ifndef NRM_IMPORT_H
#define NRM_IMPORT_H

#include <Python.h>

#include "nrm/adaptors.h"
#include "nrm/options.h"
#include "nrm/pin.h"
#include "nrm/pools.h"
#include "nrm/registry.h"
#include "nrm/resource.h"
#include "nrm/sources.h"
#include "nrm/stream.h"
#include "nrm/uses.h"

#define NRM_C_API_CAPSULE "numpy_rmm._core._C_API"

/* X(name, result, arguments): nrm_<name> of the headers above. Only ever append. */
#define NRM_C_API_FUNCTIONS(X)                                                         \
    X(status_name, const char *, (nrm_status status))                                  \
    X(last_error, const nrm_error *, (void))                                           \
    X(clear_last_error, void, (void))                                                  \
    X(resource_allocate, nrm_status,                                                   \
      (nrm_resource * mr, size_t nbytes, size_t alignment, nrm_stream *stream,         \
       void **out))                                                                    \
    X(resource_allocate_zeroed, nrm_status,                                            \
      (nrm_resource * mr, size_t nbytes, size_t alignment, nrm_stream *stream,         \
       void **out))                                                                    \
    X(resource_deallocate, nrm_status,                                                 \
      (nrm_resource * mr, void *ptr, size_t nbytes, nrm_stream *stream))               \
    X(resource_reallocate, nrm_status,                                                 \
      (nrm_resource * mr, void *ptr, size_t nbytes, size_t alignment,                  \
       nrm_stream *stream, void **out))                                                \
    X(resource_trim, nrm_status,                                                       \
      (nrm_resource * mr, size_t keep_nbytes, size_t *out_nbytes))                     \
    X(resource_statistics, nrm_status, (nrm_resource * mr, nrm_statistics * out))      \
    X(resource_kind, nrm_kind, (const nrm_resource *mr))                               \
    X(resource_device, int, (const nrm_resource *mr))                                  \
    X(resource_upstream, nrm_resource *, (const nrm_resource *mr))                     \
    X(resource_retain, void, (nrm_resource * mr))                                      \
    X(resource_release, void, (nrm_resource * mr))                                     \
    X(block_find, nrm_status, (const void *ptr, nrm_block_info *out))                  \
    X(stream_wrap, nrm_status,                                                         \
      (uintptr_t handle, void *keepalive, void (*drop)(void *keepalive),               \
       nrm_stream **out))                                                              \
    X(stream_default, nrm_stream *, (void))                                            \
    X(stream_release, void, (nrm_stream * stream))                                     \
    X(registry_get, nrm_status, (const char *name, nrm_resource **out))                \
    X(registry_set, nrm_status, (const char *name, nrm_resource *mr))                  \
    X(get_per_device_resource, nrm_status, (int device, nrm_resource **out))           \
    X(set_per_device_resource, nrm_status, (int device, nrm_resource *mr))             \
    X(host_create, nrm_status, (const nrm_host_options *options, nrm_resource **out))  \
    X(pinned_create, nrm_status,                                                       \
      (const nrm_device_options *options, nrm_resource **out))                         \
    X(managed_create, nrm_status,                                                      \
      (const nrm_device_options *options, nrm_resource **out))                         \
    X(device_create, nrm_status,                                                       \
      (const nrm_device_options *options, nrm_resource **out))                         \
    X(callback_create, nrm_status,                                                     \
      (const nrm_callback_options *options, nrm_resource **out))                       \
    X(pool_create, nrm_status,                                                         \
      (nrm_resource * upstream, const nrm_pool_options *options, nrm_resource **out))  \
    X(statistics_create, nrm_status, (nrm_resource * upstream, nrm_resource * *out))   \
    X(statistics_counts, nrm_status, (nrm_resource * mr, nrm_counts * out))            \
    X(statistics_push, nrm_status, (nrm_resource * mr, nrm_counts * out))              \
    X(statistics_pop, nrm_status, (nrm_resource * mr, nrm_counts * out))               \
    X(limiting_create, nrm_status,                                                     \
      (nrm_resource * upstream, const nrm_limiting_options *options,                   \
       nrm_resource **out))                                                            \
    X(limiting_get, nrm_status,                                                        \
      (nrm_resource * mr, size_t *out_allocated_nbytes, size_t *out_limit_nbytes))     \
    X(fixed_size_create, nrm_status,                                                   \
      (nrm_resource * upstream, const nrm_fixed_size_options *options,                 \
       nrm_resource **out))                                                            \
    X(binning_create, nrm_status,                                                      \
      (nrm_resource * upstream, const nrm_binning_options *options,                    \
       nrm_resource **out))                                                            \
    X(binning_add_bin, nrm_status,                                                     \
      (nrm_resource * mr, size_t nbytes, nrm_resource *resource))                      \
    X(binning_get_bins, size_t, (nrm_resource * mr, nrm_bin * out, size_t n))          \
    X(arena_create, nrm_status,                                                        \
      (nrm_resource * upstream, const nrm_arena_options *options, nrm_resource **out)) \
    X(pool_add_peer, nrm_status, (nrm_resource * mr, int device))                      \
    X(pin_create, nrm_status,                                                          \
      (void *ptr, size_t nbytes, const nrm_pin_options *options, nrm_pin **out))       \
    X(pin_destroy, void, (nrm_pin * pin))                                              \
    X(block_uses, nrm_status,                                                          \
      (const void *ptr, nrm_use *out, size_t capacity, size_t *out_n))                 \
    X(record_use, nrm_status, (const void *ptr, nrm_stream *stream))                   \
    X(record_use_on_handle, nrm_status, (const void *ptr, uintptr_t handle))           \
    X(get_current_device_resource, nrm_status, (nrm_resource * *out))                  \
    X(set_current_device_resource, nrm_status, (nrm_resource * mr))                    \
    X(cuda_async_create, nrm_status,                                                   \
      (const nrm_cuda_async_options *options, nrm_resource **out))                     \
    X(cuda_async_view_create, nrm_status,                                              \
      (const nrm_cuda_async_view_options *options, nrm_resource **out))                \
    X(cuda_async_managed_create, nrm_status,                                           \
      (const nrm_device_options *options, nrm_resource **out))                         \
    X(cuda_async_pool_handle, nrm_status, (nrm_resource * mr, uintptr_t *out))         \
    X(system_create, nrm_status,                                                       \
      (const nrm_device_options *options, nrm_resource **out))                         \
    X(sam_headroom_create, nrm_status,                                                 \
      (const nrm_sam_headroom_options *options, nrm_resource **out))                   \
    X(aligned_create, nrm_status,                                                      \
      (nrm_resource * upstream, const nrm_aligned_options *options,                    \
       nrm_resource **out))                                                            \
    X(prefetch_create, nrm_status, (nrm_resource * upstream, nrm_resource * *out))     \
    X(failure_callback_create, nrm_status,                                             \
      (nrm_resource * upstream, const nrm_failure_callback_options *options,           \
       nrm_resource **out))                                                            \
    X(tracking_create, nrm_status,                                                     \
      (nrm_resource * upstream, const nrm_tracking_options *options,                   \
       nrm_resource **out))                                                            \
    X(tracking_get_allocated, nrm_status, (nrm_resource * mr, size_t *out_nbytes))     \
    X(tracking_describe, nrm_status,                                                   \
      (nrm_resource * mr, char *out, size_t size, size_t *out_size))                   \
    X(logging_create, nrm_status,                                                      \
      (nrm_resource * upstream, const nrm_logging_options *options,                    \
       nrm_resource **out))                                                            \
    X(logging_flush, nrm_status, (nrm_resource * mr))                                  \
    X(logging_get_path, nrm_status, (nrm_resource * mr, char *out, size_t size))

struct nrm_functions {
    size_t size; /* of the table in the installed numpy_rmm */

    /* Borrowed from a MemoryResource, whose object keeps it; NULL with a TypeError. */
    nrm_resource *(*resource_from_object)(PyObject *object);
    /* The MemoryResource of a resource: a new reference, or NULL with an error set. */
    PyObject *(*resource_to_object)(nrm_resource *mr);

#define NRM_C_API_FIELD(name, result, arguments) result(*name) arguments;
    NRM_C_API_FUNCTIONS(NRM_C_API_FIELD)
#undef NRM_C_API_FIELD
};

/* NULL with ImportError set: numpy_rmm is not installed, or older than this header. */
static inline const struct nrm_functions *
nrm_import(void)
{
    const struct nrm_functions *functions =
        (const struct nrm_functions *)PyCapsule_Import(NRM_C_API_CAPSULE, 0);
    if (functions == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_ImportError)) {
            PyErr_SetString(PyExc_ImportError, "numpy_rmm has no C API here");
        }
        return NULL;
    }
    if (functions->size < sizeof *functions) {
        PyErr_SetString(PyExc_ImportError,
                        "this module was built with a newer numpy_rmm than the one "
                        "that is installed");
        return NULL;
    }
    return functions;
}

#endif
