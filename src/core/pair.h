/* The long way of a request, for core/pair.c: everything is looked at
   (core/dispatch.c). */
#ifndef NRM_CORE_PAIR_H
#define NRM_CORE_PAIR_H

#include "core/ops.h"

nrm_status nrm__allocate_long(nrm_resource *mr, size_t nbytes, size_t alignment,
                              nrm_stream *stream, unsigned flags, void **out);
nrm_status nrm__deallocate_long(nrm_resource *mr, void *ptr, nrm_stream *stream);

#endif
