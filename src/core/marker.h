/*
 * A point in the work of a stream that a program names: an event of its own, to be
 * waited for by the host and by other streams.
 */
#ifndef NRM_CORE_MARKER_H
#define NRM_CORE_MARKER_H

#include <stdatomic.h>

#include "cuda/place.h"
#include "nrm/status.h"
#include "nrm/stream.h"

/* All zero: nothing was recorded. The first record makes the event, in the context of
   its stream; later ones must be of streams in the same one, while that lives. */
struct nrm__marker {
    _Atomic(nrm_CUevent) event;
    _Atomic(nrm_CUcontext) context; /* of the event */
    atomic_ullong id;               /* of the context */
};

/* Its event, or none. */
struct nrm__cuda_lone_event nrm__marker_event(const struct nrm__marker *marker);

/*
 * All of these run detached, in any thread. Behind a marker lies all that its stream
 * was given before the last record. NRM_INVALID_VALUE: `stream` is of another context
 * than that of the first record, or another thread's per-thread one.
 */
nrm_status nrm__marker_record(struct nrm__marker *marker, nrm_stream *stream);

/* Work submitted to `stream` from now on comes behind the marker. Without a record
   there is nothing to wait for. */
nrm_status nrm__marker_hold(const struct nrm__marker *marker, nrm_stream *stream);

/* Never blocks, and nothing is to be done when the context is over. */
void nrm__marker_finish(struct nrm__marker *marker);

#endif
