/* Requests through an adaptor that logs (ops->log): the public calls once more, for
   core/dispatch.c. */
#ifndef NRM_CORE_LOGGED_H
#define NRM_CORE_LOGGED_H

#include "core/ops.h"

/* `nbytes` > 0. */
nrm_status nrm__logged_allocate(nrm_resource *mr, size_t nbytes, size_t alignment,
                                nrm_stream *stream, unsigned flags, void **out);
nrm_status nrm__logged_deallocate(nrm_resource *mr, void *ptr, nrm_stream *stream);

#endif
