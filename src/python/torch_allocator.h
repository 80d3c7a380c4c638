/*
 * What PyTorch calls for its memory, by the names of its CUDAPluggableAllocator: from
 * any thread, with the interpreter or without, and perhaps under a lock of its own. So
 * no Python code runs in here, and the interpreter is never asked for.
 */
#ifndef NRM_PYTHON_TORCH_ALLOCATOR_H
#define NRM_PYTHON_TORCH_ALLOCATOR_H

#include <Python.h>

#include <sys/types.h>

#include "nrm/status.h"

/*
 * Of the current resource of `device`, on the stream of a handle. NULL: no bytes were
 * asked for. When memory cannot be had it leaves by PyTorch's exception, if one was
 * given (_torch_errors), and returns NULL only to PyTorch's own pools, which expect it.
 */
NRM_API void *nrm_torch_allocate(ssize_t nbytes, int device, void *stream);

/* Back to the resource that it came from, behind the stream that it was allocated on,
   and where that is not all behind the work of every stream. */
NRM_API void nrm_torch_deallocate(void *ptr, ssize_t nbytes, int device, void *stream);

/* Another stream uses the allocation that contains `ptr`. */
NRM_API void nrm_torch_record_stream(void *ptr, void *stream);

/* Gives the unused memory of all pools of device memory back. */
NRM_API void nrm_torch_empty_cache(void);

int torch_allocator_init(PyObject *module);

/* _torch_errors() */
extern PyMethodDef torch_allocator_methods[];

#endif
