/* What the adaptors have besides the methods of all resources. */
#ifndef NRM_PYTHON_ADAPTORS_H
#define NRM_PYTHON_ADAPTORS_H

#include <Python.h>

#include "nrm/adaptors.h"

extern PyMethodDef statistics_adaptor_methods[];
extern PyGetSetDef statistics_adaptor_getset[];
extern PyMethodDef limiting_adaptor_methods[];
extern PyMethodDef tracking_adaptor_methods[];
extern PyMethodDef logging_adaptor_methods[];

/* _log_drain() */
extern PyMethodDef adaptor_functions[];

/* A numpy_rmm.Statistics. */
PyObject *adaptors_counts(const nrm_counts *counts);

#endif
