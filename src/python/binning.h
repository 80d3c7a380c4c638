/* What a BinningMemoryResource has beyond a MemoryResource: add_bin and bin_mrs. */
#ifndef NRM_PYTHON_BINNING_H
#define NRM_PYTHON_BINNING_H

#include <Python.h>

extern PyMethodDef binning_methods[];
extern PyGetSetDef binning_getset[];

#endif
