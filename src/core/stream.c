/*
 * Streams: a handle, what keeps it alive, and for the per-thread default stream the
 * thread it belongs to. The constants are immortal.
 *
 * A binding that knows streams by their handles makes an object for each call. So a
 * thread keeps the memory of the last one that ended there for the next one that it
 * makes, and the last reference of one that nobody else can know of ends without a
 * locked instruction.
 */
#include "core/stream.h"

#include "base/error.h"
#include "base/thread_state.h"
#include "core/hooks.h"
#include "core/nodes.h"
#include "core/order.h"
#include "cuda/context.h"

static nrm_stream default_stream = {.handle = NRM_STREAM_HANDLE_DEFAULT};
static nrm_stream legacy_stream = {.handle = NRM_STREAM_HANDLE_LEGACY};

nrm_stream *
nrm_stream_default(void)
{
    return &default_stream;
}

nrm_stream *
nrm_stream_legacy(void)
{
    return &legacy_stream;
}

/* NULL: no memory. */
static nrm_stream *
make(uintptr_t handle)
{
    struct nrm__thread_state *state = nrm__thread_state_now();
    nrm_stream *stream = state != NULL ? state->spare_stream : NULL;
    if (stream != NULL) {
        state->spare_stream = NULL;
    }
    else {
        stream = nrm__node_allocate(sizeof *stream);
    }
    if (stream == NULL) {
        (void)nrm__error(NRM_OUT_OF_MEMORY, "no memory for a stream");
        return NULL;
    }
    *stream = (nrm_stream){.handle = handle};
    atomic_init(&stream->refcount, 1);
    return stream;
}

static void
unmake(nrm_stream *stream)
{
    struct nrm__thread_state *state = nrm__thread_state();
    if (state->spare_stream == NULL && !nrm__thread_state_is_shared(state)) {
        state->spare_stream = stream;
    }
    else {
        nrm__node_deallocate(stream, sizeof *stream);
    }
}

/* Of a stream that was just made, which goes again if that cannot be noted. */
static nrm_status
find_home(nrm_stream *stream)
{
    struct nrm__cuda_foreign home;
    if (!nrm__cuda_foreign_find((uintptr_t)stream->created.handle, &home)) {
        return NRM_OK;
    }
    stream->home = nrm__node_allocate(sizeof home);
    if (stream->home == NULL) {
        nrm__cuda_foreign_destroy_stream(&home, stream->created.handle);
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory for a stream");
    }
    *stream->home = home;
    return NRM_OK;
}

nrm_status
nrm_stream_create(int device, unsigned int flags, nrm_stream **out)
{
    if (flags > NRM_STREAM_NON_BLOCKING) {
        return nrm__error(NRM_INVALID_VALUE,
                          "flags of a stream must be 0 (blocking) or 1 (non-blocking), "
                          "not 0x%x",
                          flags);
    }
    nrm_stream *stream = make(0);
    if (stream == NULL) {
        return NRM_OUT_OF_MEMORY;
    }
    void *token = nrm__detach();
    nrm_status status = nrm__cuda_stream_create(device, flags, &stream->created);
    if (status == NRM_OK) {
        status = find_home(stream);
    }
    nrm__attach(token);
    if (status != NRM_OK) {
        unmake(stream);
        return status;
    }
    stream->handle = (uintptr_t)stream->created.handle;
    *out = stream;
    return NRM_OK;
}

nrm_status
nrm_stream_wrap(uintptr_t handle, void *keepalive, void (*drop)(void *keepalive),
                nrm_stream **out)
{
    nrm_stream *stream = make(handle);
    if (stream == NULL) {
        return NRM_OUT_OF_MEMORY;
    }
    stream->thread = handle == NRM_STREAM_HANDLE_PER_THREAD ? nrm__thread_state()->id
                                                            : 0;
    stream->keepalive = keepalive;
    stream->drop = drop;
    *out = stream;
    return NRM_OK;
}

nrm_status
nrm_stream_per_thread(nrm_stream **out)
{
    return nrm_stream_wrap(NRM_STREAM_HANDLE_PER_THREAD, NULL, NULL, out);
}

uintptr_t
nrm_stream_handle(const nrm_stream *stream)
{
    return stream->handle;
}

bool
nrm_stream_is_usable_here(const nrm_stream *stream)
{
    return stream->thread == 0 || stream->thread == nrm__thread_state()->id;
}

nrm_status
nrm_stream_synchronize(nrm_stream *stream)
{
    struct nrm__cuda_scope scope;
    if (!nrm_stream_is_usable_here(stream)) {
        return nrm__error(
            NRM_INVALID_VALUE,
            "the stream is the per-thread default stream of another thread");
    }
    void *token = nrm__detach();
    nrm_status status = nrm__cuda_enter(-1, &scope);
    if (status == NRM_OK) {
        nrm_CUresult code =
            scope.driver->cuStreamSynchronize((nrm_CUstream)stream->handle);
        if (code != NRM_CUDA_SUCCESS) {
            status = nrm__cuda_error(code, "cuStreamSynchronize of stream 0x%zx",
                                     (size_t)stream->handle);
        }
        nrm__cuda_leave(&scope);
    }
    nrm__attach(token);
    return status;
}

/* ---- lives ---- */

static bool
is_immortal(const nrm_stream *stream)
{
    return stream == &default_stream || stream == &legacy_stream;
}

bool
nrm__stream_try_retain(nrm_stream *stream)
{
    size_t seen = atomic_load_explicit(&stream->refcount, memory_order_relaxed);
    while (seen != 0 &&
           !atomic_compare_exchange_weak(&stream->refcount, &seen, seen + 1))
        ;
    return seen != 0 || is_immortal(stream);
}

void
nrm_stream_retain(nrm_stream *stream)
{
    if (stream != NULL &&
        atomic_load_explicit(&stream->refcount, memory_order_relaxed)) {
        atomic_fetch_add_explicit(&stream->refcount, 1, memory_order_relaxed);
    }
}

static void
destroy(const nrm_stream *stream)
{
    if (stream->created.handle == NULL || nrm__is_exiting()) {
        return;
    }
    void *token = nrm__detach();
    if (stream->home != NULL) {
        nrm__cuda_foreign_destroy_stream(stream->home, stream->created.handle);
        nrm__node_deallocate(stream->home, sizeof *stream->home);
    }
    else {
        nrm__cuda_stream_destroy(&stream->created);
    }
    nrm__attach(token);
}

/* Whether the caller's reference is the last one, which is gone then. One that nothing
   was ordered by is known to those alone who have a reference. */
static bool
is_last(nrm_stream *stream)
{
    size_t seen = atomic_load_explicit(&stream->refcount, memory_order_acquire);
    if (seen == 1 &&
        atomic_load_explicit(&stream->orders, memory_order_relaxed) == NULL) {
        return true;
    }
    return seen != 0 &&
           atomic_fetch_sub_explicit(&stream->refcount, 1, memory_order_acq_rel) == 1;
}

/* True: it was the last reference, and the driver's stream has ended. */
static bool
drop_reference(nrm_stream *stream)
{
    if (stream == NULL || !is_last(stream)) {
        return false;
    }
    if (atomic_load_explicit(&stream->orders, memory_order_relaxed) != NULL) {
        nrm__order_retire(stream);
    }
    destroy(stream);
    return true;
}

void
nrm_stream_release(nrm_stream *stream)
{
    if (drop_reference(stream)) {
        if (stream->drop != NULL) {
            stream->drop(stream->keepalive);
        }
        unmake(stream);
    }
}

void *
nrm__stream_release_kept(nrm_stream *stream, void (*drop)(void *keepalive))
{
    void *kept = NULL;
    if (drop_reference(stream)) {
        if (stream->drop == drop) {
            kept = stream->keepalive;
        }
        else if (stream->drop != NULL) {
            stream->drop(stream->keepalive);
        }
        unmake(stream);
    }
    return kept;
}
