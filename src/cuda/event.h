/*
 * Events for context epochs and stream order: pooled by context, never timed.
 */
#ifndef NRM_CUDA_EVENT_H
#define NRM_CUDA_EVENT_H

#include "cuda/context.h"

/* As many events of a context can be waiting to be used again. Who keeps events for
   long keeps fewer, for those that come back to a full pool are lost. */
#define NRM__CUDA_EVENTS_POOLED 1024

struct nrm__cuda_event {
    nrm_CUevent handle; /* NULL: what it was recorded for is done */
    int device;
    uint64_t generation; /* in which it was made */
};

enum nrm__record {
    NRM__RECORDED,
    NRM__RECORD_IDLE,        /* the device has no active context: nothing to wait for */
    NRM__RECORD_CAPTURE,     /* forbidden now, by a capture; nothing was recorded */
    NRM__RECORD_INVALIDATED, /* the same, and the attempt has just broken a capture: the
                                one that is answered so in the time until a lift */
    NRM__RECORD_LOST,        /* sticky error, recorded as this thread's last */
};

/*
 * Records everything submitted so far to the primary context of `device`: one
 * cuCtxRecordEvent, or cuCtxSynchronize where the driver has none (before 12.5).
 * Detached, no lock held. Looks for captures on blocking streams first; after
 * STREAM_CAPTURE_UNSUPPORTED it answers RECORD_CAPTURE for that device until
 * nrm__cuda_capture_lift. RECORD_CAPTURE also stands for whatever else keeps a record
 * from being made here and now, as in a host function: park, and try again later.
 */
enum nrm__record nrm__cuda_record(int device, struct nrm__cuda_event *out);

/* The same by a recorder that may have a mark (cuda/capture.h), with an event that it
   has of that device to spare, or has none of, without a handle: it comes back
   recorded. Asks at once whether it is done, unless `out_done` is NULL. */
enum nrm__record nrm__cuda_record_with(int device, struct nrm__cuda_event *event,
                                       int mark, bool *out_done);

/* Whether a device is not recorded on now, since a capture has forbidden it. */
bool nrm__cuda_has_seen_capture(void);

/* Lets a device be recorded on again, -1: all of them. */
void nrm__cuda_capture_lift(int device);

/* NRM_OK done (also when its context was reset since), NRM_NOT_FOUND not yet,
   NRM_DEVICE_LOST sticky error (recorded). cuEventQuery only, in relaxed capture mode;
   calls that never block beside it when the driver does not know the event any more. */
nrm_status nrm__cuda_event_query(const struct nrm__cuda_event *event);

/* An event of the pool of a device and one life of its context; NULL: none is left. */
nrm_CUevent nrm__cuda_event_take(int device, uint64_t generation);

/* Back to the pool of its context; dropped when that was reset. No driver call. */
void nrm__cuda_event_recycle(struct nrm__cuda_event *event);

#endif
