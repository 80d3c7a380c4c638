/*
 * What stream order asks of the driver: record on a stream, look whether it is idle,
 * make it wait. Detached, no lock held; all of them may block behind other calls of the
 * driver.
 *
 * A stream that was created belongs to the context it was created in, whichever is
 * current and whatever memory is used on it, so its events come from that context's
 * pool. The handles 0, 1 and 2 mean a stream of a context: of the primary one of
 * `device`, which for the others is not looked at. Handle 2 means the calling thread's.
 *
 * A stream that is being captured is never asked and never recorded on: that would make
 * the event part of the graph, or break the capture.
 */
#ifndef NRM_CUDA_STREAM_H
#define NRM_CUDA_STREAM_H

#include "cuda/event.h"

/* A stream that we made. */
struct nrm__cuda_stream {
    nrm_CUstream handle;
    int device;
    uint64_t generation; /* of the device: a reset ends the stream */
};

/* A stream of the primary context of `device` (-1: as nrm__cuda_enter chooses), which
   is made if it is not there. `flags` are those of nrm/stream.h. */
nrm_status nrm__cuda_stream_create(int device, unsigned int flags,
                                   struct nrm__cuda_stream *out);

/* Does not wait for the work of the stream. Nothing is to be done when its context is
   over. */
void nrm__cuda_stream_destroy(const struct nrm__cuda_stream *stream);

/* Records everything submitted to the stream so far; an event without a handle: it is
   done. NRM_NOT_FOUND (not recorded as an error): the stream is being captured.
   NRM_NOT_SUPPORTED (neither): it cannot be, for instance in a context that is not
   primary. NRM_DEVICE_LOST. */
nrm_status nrm__cuda_stream_record(int device, uintptr_t handle,
                                   struct nrm__cuda_event *out);

/* The driver's number of a stream of others (no special handle), which no other stream
   had or will have, while its handle is the next one's as soon as it is destroyed. Two
   calls that do not block, in any capture mode. False: it is being captured, or has no
   number. The caller of ours who gave the handle vouches for it. */
bool nrm__cuda_stream_id(uintptr_t handle, uint64_t *out);

/* The device whose primary context the stream of such a handle belongs to; -1: none. */
int nrm__cuda_stream_device(uintptr_t handle);

/* False also where it cannot be known. Breaks no capture. */
bool nrm__cuda_stream_is_capturing(int device, uintptr_t handle);

/* NRM_OK: everything submitted so far is done, also when the context is over.
   NRM_NOT_FOUND (not recorded): not yet, or it cannot be known. NRM_DEVICE_LOST. */
nrm_status nrm__cuda_stream_query(int device, uintptr_t handle);

/* What is submitted to the stream from now on comes after the event. NRM_NOT_FOUND (not
   recorded): the stream is being captured. */
nrm_status nrm__cuda_stream_wait(int device, uintptr_t handle,
                                 const struct nrm__cuda_event *event);

#endif
