/*
 * Stream capture, as the driver tells of it, and who must keep still meanwhile.
 *
 * The driver says of a stream whether it is being captured (about 20 ns, and no capture
 * minds), and lets a graph hold an object whose destructor is called when the graph,
 * every executable made of it and their last launch are gone.
 *
 * cuCtxRecordEvent invalidates every capture of its context, in all modes, and nobody
 * can find out beforehand whether a non-blocking stream is captured. So who knows of a
 * capture announces it, and while one is announced no context is recorded on
 * (cuda/event.c).
 */
#ifndef NRM_CUDA_CAPTURE_H
#define NRM_CUDA_CAPTURE_H

#include "cuda/driver.h"

struct nrm__cuda_capture {
    uint64_t id; /* never given to another one; 0: the driver cannot tell (< 12.3) */
    nrm_CUgraph graph; /* that is being made; NULL: the same */
    int device;     /* whose primary context the stream is in; -1: of none, unknown */
    bool is_broken; /* it was invalidated, and nobody has ended it yet */
};

/* Whether the stream is being captured, and what for. False also for a capture that was
   invalidated already, of which *out says so, where it cannot be known, and for the
   legacy stream, which never is. Handle 2 means the calling thread's on `device`, or in
   the current context (-1). Detached for that, no lock held. */
bool nrm__cuda_capture_find(int device, uintptr_t handle,
                            struct nrm__cuda_capture *out);

enum nrm__cuda_retained {
    NRM__CAPTURE_RETAINED,
    NRM__CAPTURE_UNRETAINED, /* `gone` is never called */
    NRM__CAPTURE_REFUSED,    /* by the graph: `gone` is called all the same */
};

/* Whether graphs can hold an object here. */
bool nrm__cuda_can_retain(void);

/* Lets the graph hold `data`: when nothing can be launched any more and all launches
   are done, a thread of the driver calls `gone(data)`, which may not call the driver.
   Not when the context is reset. */
enum nrm__cuda_retained nrm__cuda_capture_retain(nrm_CUgraph graph, void *data,
                                                 nrm_CUhostFn gone);

/* From the return of the one to the other (they nest, in any thread) nrm__cuda_record
   records nothing. Waits for a record in progress: detached, no lock held. */
void nrm__cuda_capture_announce(void);
void nrm__cuda_capture_withdraw(void);

/* The same for a thread that is inside a capture: what others have begun has hurt it
   already, and is not waited for. */
void nrm__cuda_capture_shield(void);

/* Whether a stream of the current context, or one that was created, is being captured,
   or is the legacy one while a blocking stream of its context is. */
static inline bool
nrm__cuda_sees_capture(const struct nrm__driver *driver, uintptr_t handle)
{
    nrm_CUstreamCaptureStatus status = NRM_CU_STREAM_CAPTURE_STATUS_NONE;
    nrm_CUresult code = driver->cuStreamIsCapturing((nrm_CUstream)handle, &status);
    return code == NRM_CUDA_ERROR_STREAM_CAPTURE_IMPLICIT ||
           (code == NRM_CUDA_SUCCESS && status != NRM_CU_STREAM_CAPTURE_STATUS_NONE);
}

static inline bool
nrm__cuda_is_capture_error(nrm_CUresult code)
{
    return code >= NRM_CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED &&
           code <= NRM_CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
}

/* A few recorders, each with a number that nobody else uses at the time, mark
   themselves without being counted; all others are NRM__CUDA_COUNTED. */
enum { NRM__CUDA_MARKS = 8, NRM__CUDA_COUNTED = -1 };

/* Around a record of a context; false: a capture is announced, and there must be
   none. */
bool nrm__cuda_record_begin(int mark);
void nrm__cuda_record_end(int mark);

#endif
