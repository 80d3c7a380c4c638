/* Managed memory moved to where it is used next. */
#ifndef NRM_CORE_PREFETCH_H
#define NRM_CORE_PREFETCH_H

#include <stddef.h>

#include "nrm/status.h"
#include "nrm/stream.h"

#define NRM__PREFETCH_TO_HOST (-1)

/*
 * Moves the pages of managed memory to a device (ordinal) or to the host, in the order
 * of a stream; 0, 1 and 2 mean streams of the primary context of `device` (-1: as a
 * request would choose). Nothing is done where the driver cannot (before CUDA 12.2),
 * and where the target cannot have managed memory while the host uses it. Detached.
 */
nrm_status nrm__prefetch(const void *ptr, size_t nbytes, int target, int device,
                         nrm_stream *stream);

#endif
