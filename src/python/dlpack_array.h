/* Shapes and elements as NumPy has them, in DLPack's terms. */
#ifndef NRM_PYTHON_DLPACK_ARRAY_H
#define NRM_PYTHON_DLPACK_ARRAY_H

#include "python/numpy_api.h"

#include "python/dlpack.h"

/* -1 with a BufferError: DLPack has no such elements. */
int dlpack_type_of(PyArray_Descr *dtype, struct dlpack_type *out);

/* A new reference; NULL with a BufferError: NumPy has none. */
PyArray_Descr *dlpack_dtype_of(struct dlpack_type type);

/* Writes `n_dims` strides in items. -1 with a BufferError: one is no whole number. */
int dlpack_strides_of(PyArrayObject *array, int64_t *out);

/* Fills all but whose memory it is. -1 with a BufferError. */
int dlpack_describe(PyArrayObject *array, struct dlpack_source *out);

/* as_dlpack_pinned() */
extern PyMethodDef dlpack_array_functions[];
int dlpack_array_init(PyObject *module);

#endif
