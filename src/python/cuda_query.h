/* What Python asks about CUDA. */
#ifndef NRM_PYTHON_CUDA_QUERY_H
#define NRM_PYTHON_CUDA_QUERY_H

#include <Python.h>

#include "python/state.h"

/* The ordinal of the device of the caller's current context, else the option
   `device`'s. Never initialises CUDA. */
int cuda_current_device(void);

/* Free and total bytes of a device; -1: the current one. Initialises CUDA. */
int cuda_memory_info(struct module_state *state, int device, size_t *out_free,
                     size_t *out_total);

/* Whether the driver knows the byte at `ptr` as page-locked host memory. False where
   CUDA is not initialised: asking must not do that. */
bool cuda_is_registered(const void *ptr);

/* Whether the byte at `ptr` is memory of a device or managed; false for all that the
   driver does not know. */
bool cuda_is_device_memory(const void *ptr);

/* Whether the driver was asked about the byte at `ptr` and does not know it: copies
   between devices would read it as the host's. */
bool cuda_is_unknown(const void *ptr);

/* available_device_memory(), and what numpy_rmm/_info.py and the tests ask. */
extern PyMethodDef cuda_query_methods[];

#endif
