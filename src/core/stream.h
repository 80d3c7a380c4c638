/* What a stream is made of, for the files that order work by it. */
#ifndef NRM_CORE_STREAM_H
#define NRM_CORE_STREAM_H

#include <stdatomic.h>
#include <stddef.h>

#include "cuda/foreign.h"
#include "cuda/stream.h"
#include "nrm/stream.h"

struct nrm__order;

struct nrm_stream {
    atomic_size_t refcount; /* 0: immortal, or about to die */
    uintptr_t handle;
    uint64_t thread;                 /* of a per-thread default stream; 0: any */
    struct nrm__cuda_stream created; /* by us; handle NULL: by others */
    struct nrm__cuda_foreign *home;  /* owned; of it, if that is no primary context */
    void *keepalive;                 /* owned */
    void (*drop)(void *keepalive);
    _Atomic(struct nrm__order *) orders; /* one a device; see core/order.c */
};

/* The handles 0, 1 and 2 mean a stream of the context they are used in. */
static inline bool
nrm__stream_is_special(const nrm_stream *stream)
{
    return stream->handle <= NRM_STREAM_HANDLE_PER_THREAD;
}

/* False for a stream of others: they may destroy it at any time, also below an object
   that we keep alive, and the driver crashes on a handle that is none any more. */
static inline bool
nrm__stream_stays(const nrm_stream *stream)
{
    return stream->created.handle != NULL || nrm__stream_is_special(stream);
}

/* Tells blocks apart that were freed on the same stream through several objects: its
   handle, and of a per-thread one the thread. A hint: a handle may have been given to
   another stream since. 0: that of no other. */
static inline uintptr_t
nrm__stream_origin(const nrm_stream *stream)
{
    if (stream == NULL || stream->handle < NRM_STREAM_HANDLE_PER_THREAD) {
        return 0;
    }
    return stream->handle ^ (uintptr_t)stream->thread << 32;
}

/* nrm_stream_is_usable_here, without a call for most streams. */
static inline bool
nrm__stream_is_here(const nrm_stream *stream)
{
    return stream->thread == 0 || nrm_stream_is_usable_here(stream);
}

/* False when the last reference is gone. The memory must still be there. */
bool nrm__stream_try_retain(nrm_stream *stream);

/* As nrm_stream_release, but if it was the last reference and `drop` is what would let
   go of what kept the stream alive, that is returned instead: the caller's. NULL: there
   is none. */
void *nrm__stream_release_kept(nrm_stream *stream, void (*drop)(void *keepalive));

#endif
