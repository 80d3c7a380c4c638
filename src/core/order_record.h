/*
 * Events of stream order: what is recorded for a slot, and asked and waited for
 * afterwards.
 *
 * Mostly that is one event, of a stream or of a primary context. What was submitted to
 * a default stream, or by nobody knows whom, may be in contexts of the program's own
 * (cuda/foreign.h) besides: then it is one for each of them, and done when all are.
 */
#ifndef NRM_CORE_ORDER_RECORD_H
#define NRM_CORE_ORDER_RECORD_H

#include "core/order_slots.h"
#include "cuda/foreign.h"

/* One event more: of the pool, or where that has no handle, of a context of the
   program's. */
struct nrm__order_part {
    struct nrm__order_part *next;
    struct nrm__cuda_event event;
    struct nrm__cuda_lone_event lone;
    const struct nrm__driver *driver; /* of the latter */
};

struct nrm__order_event {
    atomic_uint refs;
    struct nrm__cuda_event event; /* without a handle: done */
    struct nrm__order_part *parts;
};

/* Records what was submitted to the stream, or for a per-thread stream of another
   thread, and for NULL, to its context, for NULL also to all that there are
   (order->of_all): on success everything that was stamped before comes before *out,
   retained, or is done (NULL). The caller holds the stream, or was given a handle for
   this call, holds the slot in its life or owns none of it (of_all), and is detached.
   NRM_NOT_FOUND: a capture, or something else, keeps it from being made here and now.
   NRM_NOT_SUPPORTED: there is none to be had. */
nrm_status nrm__order_record(struct nrm__order *order, const nrm_stream *stream,
                             struct nrm__order_event **out);

/* Makes what is submitted to the stream from now on come after all that was submitted
   to any context. Detached. */
nrm_status nrm__order_wait_for_all(const nrm_stream *stream, int device);

/* The same of one event. NULL: done. */
nrm_status nrm__order_event_wait(const struct nrm__order_event *event,
                                 const nrm_stream *stream, int device);

/* Asks the driver. */
bool nrm__order_event_is_done(const struct nrm__order_event *event);

void nrm__order_event_release(struct nrm__order_event *event); /* NULL is fine */

/* How many there are. */
uint64_t nrm__order_n_events(void);

#endif
