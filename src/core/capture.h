/*
 * Memory that graphs hold: what was used while a stream was captured belongs to the
 * graph that is being made, and stays its own until the graph, all executables made of
 * it and their last launch are gone.
 *
 * A capture is known by the driver's number of it, and has tags (core/order.h) that are
 * done when the graph is gone: one for what was freed inside it on each of its streams,
 * which may be used again there, and one for everything else that it may use. The graph
 * holds an object of ours whose destructor, in a thread of the driver, only puts the
 * capture on a list; whoever searches for memory next closes its tags.
 *
 * Whether a stream is being captured only the driver knows, and there is no trace of it
 * afterwards. So it is asked in each allocation and free on a stream that belongs to
 * others. On a stream that stays (nrm__stream_stays) that would cost more than the
 * allocation, so there it is asked only while a capture is known of: one that was
 * announced (nrm_capture_begin), or one that was found out, because an allocation has
 * to search further anyway. Who captures a stream that numpy_rmm has made announces it.
 */
#ifndef NRM_CORE_CAPTURE_H
#define NRM_CORE_CAPTURE_H

#include <stdatomic.h>

#include "core/ops.h"
#include "core/order.h"
#include "core/stream.h"

/* How many captures are announced, or were found to go on on a stream that stays. */
extern atomic_uint nrm__captures_known;

/* Whether a capture is known that may go on on the stream. One load. */
static inline bool
nrm__stream_in_known_capture(const nrm_stream *stream)
{
    /* The legacy stream is never captured. */
    return stream->handle > NRM_STREAM_HANDLE_LEGACY &&
           atomic_load_explicit(&nrm__captures_known, memory_order_relaxed) != 0;
}

/*
 * Whether the driver must be asked before memory is taken or freed on the stream: one
 * load for a stream that stays. While it is true, nothing that a thread keeps may be
 * handed out on the stream, and nothing that is freed on it may be kept.
 */
static inline bool
nrm__stream_may_capture(const nrm_stream *stream)
{
    return stream != NULL &&
           (nrm__stream_in_known_capture(stream) || !nrm__stream_stays(stream));
}

struct nrm__capture_tags {
    struct nrm__order_tag own; /* of memory of the graph that is freed on this stream */
    struct nrm__order_tag held; /* of whatever else the graph may use */
    bool is_broken; /* nothing is captured any more, as the capture was invalidated */
};

/*
 * Asks the driver whether the stream is being captured. NRM_NOT_FOUND (not recorded):
 * it is not, and *out says whether that is because the capture was invalidated. NRM_OK:
 * what is used on it now is the graph's, and the pool lives as long as the graph does.
 * Where the driver cannot tell captures apart, or graphs cannot hold an object, the
 * tags are never done, and the pool is not kept. NRM_OUT_OF_MEMORY: it is captured, and
 * there are no tags; *out are NRM__ORDER_NEVER. `device` is that of the memory, for
 * per-thread streams; NRM_DEVICE_NONE: they are of the current context. No lock held.
 */
NRM_NODISCARD nrm_status nrm__capture_find(nrm_stream *stream, int device,
                                           nrm_resource *pool,
                                           struct nrm__capture_tags *out);

/* The tag of whatever the graph may use that the stream is captured for. NRM_NOT_FOUND
   (not recorded): it is not captured, or it cannot be known when the graph is gone. Of
   a bare handle, which the caller vouches for. No lock held. */
NRM_NODISCARD nrm_status nrm__capture_find_held(uintptr_t handle,
                                                struct nrm__order_tag *out);

/* Closes the tags of graphs that are gone. Makes no driver call; one load when there is
   none. Pools that only a graph kept alive end here. No lock held. */
void nrm__captures_reap(void);

/* The pool is about to end: graphs that could not hold an object are forgotten with
   it. */
void nrm__captures_forget(const nrm_resource *pool);

/* Raised after tags were closed. One atomic load. */
uint64_t nrm__captures_n_ended(void);

/* Captures whose graph is not known to be gone. */
size_t nrm__captures_n_alive(void);

#endif
