/*
 * A CUDA stream as the resources see it: a handle, and whatever keeps it alive.
 *
 * Streams are reference-counted and immutable. The special handle of the per-thread
 * default stream means another stream in each thread, so the thread is noted when the
 * object is made. NULL in place of a stream means "no stream": the caller is the host.
 */
#ifndef NRM_STREAM_H
#define NRM_STREAM_H

#include <stdbool.h>
#include <stdint.h>

#include "nrm/status.h"

typedef struct nrm_stream nrm_stream;

/* Handles that the driver understands without a stream having been created. */
#define NRM_STREAM_HANDLE_DEFAULT ((uintptr_t)0)
#define NRM_STREAM_HANDLE_LEGACY ((uintptr_t)1)
#define NRM_STREAM_HANDLE_PER_THREAD ((uintptr_t)2)

#define NRM_STREAM_BLOCKING 0u     /* ordered with the legacy default stream */
#define NRM_STREAM_NON_BLOCKING 1u /* not */

/*
 * Makes a stream on `device` (-1: that of the current context, else of the option
 * `device`). It is destroyed with its last reference, when its work need not be done.
 * Memory freed on it needs no call of the driver. NRM_INVALID_VALUE,
 * NRM_CUDA_UNAVAILABLE, NRM_CUDA_ERROR.
 */
NRM_API NRM_NODISCARD nrm_status nrm_stream_create(int device, unsigned int flags,
                                                   nrm_stream **out);

/*
 * Wraps an existing handle. The stream owns `keepalive` and calls `drop(keepalive)`
 * when it dies (from any thread); `drop` may be NULL. The driver is not called. As the
 * owner may destroy the stream at any time, the handle is used only in calls that are
 * given it.
 */
NRM_API NRM_NODISCARD nrm_status nrm_stream_wrap(uintptr_t handle, void *keepalive,
                                                 void (*drop)(void *keepalive),
                                                 nrm_stream **out);

/* Borrowed, never NULL, immortal. */
NRM_API nrm_stream *nrm_stream_default(void);
NRM_API nrm_stream *nrm_stream_legacy(void);
/* Of the calling thread: a new reference. */
NRM_API NRM_NODISCARD nrm_status nrm_stream_per_thread(nrm_stream **out);

NRM_API uintptr_t nrm_stream_handle(const nrm_stream *stream);

/* True unless `stream` is the per-thread default stream of another thread. */
NRM_API bool nrm_stream_is_usable_here(const nrm_stream *stream);

/* Waits until the work submitted to `stream` is done. May block. */
NRM_API NRM_NODISCARD nrm_status nrm_stream_synchronize(nrm_stream *stream);

/*
 * Around the capture of a stream into a graph: tells that one is about to begin, and
 * that it has ended. They nest, and may be called in different threads. Meanwhile no
 * event is recorded on a context, which would invalidate the capture, and what is
 * allocated and freed on the captured stream is kept for the graph until that is
 * destroyed. Streams that numpy_rmm has not made are found to be captured without it.
 * nrm_capture_begin waits for a record in progress; it may block. An end while none
 * has begun does nothing.
 */
NRM_API void nrm_capture_begin(void);
NRM_API void nrm_capture_end(void);

/*
 * Between the two, once the capture of the stream has begun: page-locked and managed
 * memory that any thread gives back from now on belongs to the graph, which may replay
 * a copy that reads it. It comes back when the graph, and all that was instantiated of
 * it, is destroyed. The handle must be that of a stream that lives; here it is the
 * driver's, and later only a name. NRM_NOT_FOUND: it is not captured, or the driver
 * (before CUDA 12.3) cannot tell when a graph ends. NRM_CUDA_UNAVAILABLE.
 * nrm_capture_disown_frees, before nrm_capture_end, takes a handle that owns nothing
 * too.
 */
NRM_API NRM_NODISCARD nrm_status nrm_capture_own_frees(uintptr_t handle);
NRM_API void nrm_capture_disown_frees(uintptr_t handle);

/* Whether a stream is being captured, and the capture was not invalidated. Of a handle
   that the caller vouches for; asks the driver, which is loaded for it, and no capture
   minds. */
NRM_API bool nrm_stream_is_captured(uintptr_t handle);

NRM_API void nrm_stream_retain(nrm_stream *stream);
NRM_API void nrm_stream_release(nrm_stream *stream);

#endif
