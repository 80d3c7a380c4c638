/* What a stream is made of, for the files that order work by it. */
#ifndef NRM_CORE_STREAM_H
#define NRM_CORE_STREAM_H

#include <stdatomic.h>
#include <stddef.h>

#include "nrm/stream.h"

struct nrm__order;

struct nrm_stream {
    atomic_size_t refcount; /* 0: immortal, or about to die */
    uintptr_t handle;
    uint64_t thread; /* of a per-thread default stream; 0: any */
    void *keepalive; /* owned */
    void (*drop)(void *keepalive);
    _Atomic(struct nrm__order *) orders; /* one a device; see core/order.c */
};

/* The handles 0, 1 and 2 mean a stream of the context they are used in. */
static inline bool
nrm__stream_is_special(const nrm_stream *stream)
{
    return stream->handle <= NRM_STREAM_HANDLE_PER_THREAD;
}

/* False for a handle that its owner may destroy at any time. */
static inline bool
nrm__stream_stays(const nrm_stream *stream)
{
    return stream->keepalive != NULL || nrm__stream_is_special(stream);
}

/* nrm_stream_is_usable_here, without a call for most streams. */
static inline bool
nrm__stream_is_here(const nrm_stream *stream)
{
    return stream->thread == 0 || nrm_stream_is_usable_here(stream);
}

/* False when the last reference is gone. The memory must still be there. */
bool nrm__stream_try_retain(nrm_stream *stream);

#endif
