/*
 * Noting a use: whose block it is, and by what the stream's work is covered.
 *
 * Context epochs cover work in the primary context of a device that is not part of a
 * graph. A stream of our own is asked about its context once in a life of its slot. A
 * graph's use is the graph's tag (core/capture.h), and one in another context an event
 * of that (core/foreign_uses.c).
 */
#include "base/bits.h"
#include "base/error.h"
#include "core/block_map.h"
#include "core/cache.h"
#include "core/capture.h"
#include "core/hooks.h"
#include "core/known_uses.h"
#include "core/order_slots.h"
#include "core/stream.h"
#include "core/uses.h"
#include "os/memory.h"

enum {
    N_PRIMARY = 64, /* slots of streams that are known to be in a primary context */
    TAG_EPOCH = 1,  /* see struct nrm__order_tag */
    MAX_LISTED = 64,
};

static atomic_uint_least64_t primary_keys[N_PRIMARY];

/* ---- the block of an address ---- */

struct place {
    uintptr_t start;
    nrm_kind kind;
    unsigned flags;      /* of the owner */
    nrm_resource *owner; /* retained; NULL: not looked up */
};

/* A block that a thread could keep, or park, must come to its owner when it is
   freed. */
static void
mark(const struct nrm__segment *segment, uintptr_t start, unsigned flags)
{
    if (!(flags & NRM__OPS_IMMEDIATE)) {
        struct nrm__live *live = nrm__starts_find(segment, start);
        if (live != NULL) {
            atomic_store_explicit(&live->goes_long, true, memory_order_relaxed);
        }
    }
}

/* Whether blocks of the segment are found by where they start. */
static bool
has_starts(const struct nrm__segment *segment)
{
    return segment->owner->ops->take_back != NULL && segment->extra != NULL &&
           !nrm__segment_is_slab(segment);
}

/* The start of a block of a pool, in a thread that has a cache: no lock and no
   reference. */
static inline bool
find_start(uintptr_t address, struct place *out)
{
    struct nrm__thread_state *state = nrm__thread_state_now();
    struct nrm__cache *cache = state != NULL ? state->cache : NULL;
    if (cache == NULL ||
        atomic_load_explicit(&nrm__map_overlay.n, memory_order_acquire) != 0 ||
        !nrm__cache_enter(cache)) {
        return false;
    }
    bool found = false;
    const struct nrm__segment *segment = nrm__block_map_peek(address);
    if (segment != NULL && has_starts(segment)) {
        const struct nrm__live *live = nrm__starts_find(segment, address);
        found = live != NULL &&
                atomic_load_explicit(&live->key, memory_order_acquire) ==
                    (address | NRM__LIVE);
        if (found) {
            *out = (struct place){.start = address,
                                  .kind = segment->owner->kind,
                                  .flags = segment->owner->flags};
            mark(segment, address, out->flags);
        }
    }
    nrm__cache_leave(cache);
    return found;
}

static nrm_status
find_around(const void *ptr, struct place *out)
{
    struct nrm__block block;
    if (!nrm__block_map_find(ptr, &block)) {
        return nrm__error(NRM_NOT_OWNED,
                          "%p lies in no live block of numpy_rmm: its use cannot be "
                          "noted",
                          ptr);
    }
    *out = (struct place){.start = (uintptr_t)block.ptr,
                          .kind = block.owner->kind,
                          .flags = block.owner->flags,
                          .owner = block.owner};
    if (block.segment != NULL && has_starts(block.segment)) {
        mark(block.segment, out->start, out->flags);
    }
    return NRM_OK;
}

static nrm_status
find_place(const void *ptr, struct place *out)
{
    return find_start((uintptr_t)ptr, out) ? NRM_OK : find_around(ptr, out);
}

static void
leave_place(const struct place *place)
{
    if (place->owner != NULL) {
        nrm_resource_release(place->owner);
    }
}

/* NRM_NOT_FOUND (not recorded): nothing is noted of such memory. */
static nrm_status
check_place(const struct place *place, const void *ptr)
{
    if (place->kind == NRM_KIND_DEVICE) {
        return nrm__error(NRM_NOT_SUPPORTED,
                          "%p is device memory, which is ordered by the stream that it "
                          "is freed on: uses are noted of pinned and managed memory",
                          ptr);
    }
    bool tracks = place->kind != NRM_KIND_HOST &&
                  !(place->flags & NRM__OPS_IMMEDIATE) && nrm__cuda_driver() != NULL &&
                  !nrm__is_exiting();
    return tracks ? NRM_OK : NRM_NOT_FOUND;
}

/* ---- what a stream's work is covered by ---- */

static nrm_status
place_of(uintptr_t handle, struct nrm__cuda_place *out)
{
    void *token = nrm__detach();
    nrm_status status = nrm__cuda_stream_place(handle, out);
    nrm__attach(token);
    return status;
}

/* NRM_NOT_FOUND (not recorded): it is not captured. */
static nrm_status
note_captured(const void *ptr, nrm_stream *stream, int device, struct nrm__use *use)
{
    struct nrm__capture_tags tags;
    struct place place;
    if (!nrm__stream_may_capture(stream) &&
        nrm_stream_handle(stream) != NRM_STREAM_HANDLE_PER_THREAD) {
        return NRM_NOT_FOUND;
    }
    NRM_TRY(find_around(ptr, &place)); /* the graph keeps the owner */
    nrm_status status = nrm__capture_find(stream, device, place.owner, &tags);
    leave_place(&place);
    if (status == NRM_NOT_FOUND && tags.is_broken) {
        return nrm__cuda_error(NRM_CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
                               "a use of %p by stream 0x%zx", ptr,
                               (size_t)stream->handle);
    }
    use->tag = tags.held;
    use->is_covered = false;
    return status;
}

static struct nrm__order_tag
epoch_tag(void)
{
    return (struct nrm__order_tag){.stream = TAG_EPOCH, .count = nrm__epoch_stamp()};
}

/* In the slot's life: its stream is in a primary context. */
static bool
is_known_primary(struct nrm__order_tag tag)
{
    return tag.stream >= NRM__ORDER_FIRST_SLOT &&
           atomic_load_explicit(&primary_keys[tag.stream % N_PRIMARY],
                                memory_order_relaxed) == nrm__order_key(tag);
}

/* A stream that stays. */
static nrm_status
classify_own(nrm_stream *stream, struct nrm__use *use)
{
    struct nrm__cuda_place at;
    use->is_covered = true;
    if (!nrm__stream_is_special(stream)) {
        use->tag = nrm__order_stamp(stream, NRM_DEVICE_NONE);
        if (is_known_primary(use->tag)) {
            return NRM_OK;
        }
    }
    NRM_TRY(place_of(use->handle, &at));
    if (at.context != NULL && at.device < 0) {
        use->is_covered = false;
        use->is_foreign = true;
        return nrm__foreign_use_note(&at, use->handle, &use->tag);
    }
    if (nrm__stream_is_special(stream)) {
        use->tag = at.context != NULL ? nrm__order_stamp(stream, at.device)
                                      : epoch_tag();
    }
    else if (at.context != NULL && use->tag.stream >= NRM__ORDER_FIRST_SLOT) {
        atomic_store_explicit(&primary_keys[use->tag.stream % N_PRIMARY],
                              nrm__order_key(use->tag), memory_order_relaxed);
    }
    return NRM_OK;
}

/* One that others may destroy: the driver is asked now, and never again. */
static nrm_status
classify_bare(nrm_stream *stream, unsigned flags, struct nrm__use *use)
{
    struct nrm__cuda_place at;
    NRM_TRY(place_of(use->handle, &at));
    use->is_covered = at.context == NULL || at.device >= 0;
    if (!use->is_covered) {
        use->is_foreign = true;
        return nrm__foreign_use_note(&at, use->handle, &use->tag);
    }
    /* By default its block has that stamp, or a later one, when it is freed. */
    use->tag = flags & NRM__OPS_RECORDED ? nrm__order_stamp(stream, at.device)
                                         : epoch_tag();
    return NRM_OK;
}

/* A driver follows a handle. Where nothing is mapped it would end the process, so pages
   of handles are looked at when they are first seen. */
static nrm_status
check_bare(uintptr_t handle)
{
    static atomic_uintptr_t seen[16];
    uintptr_t page = handle / 4096 + 1; /* 0: none was seen */
    atomic_uintptr_t *known = &seen[page % 16];
    if (atomic_load_explicit(known, memory_order_relaxed) == page) {
        return NRM_OK;
    }
    if (!nrm__is_mapped(handle)) {
        return nrm__cuda_error(NRM_CUDA_ERROR_INVALID_HANDLE,
                               "stream 0x%zx, where there is nothing", (size_t)handle);
    }
    atomic_store_explicit(known, page, memory_order_relaxed);
    return NRM_OK;
}

static nrm_status
record_use(const void *ptr, const struct place *place, nrm_stream *stream)
{
    struct nrm__use use = {.start = place->start, .handle = stream->handle};
    if (!nrm__stream_stays(stream)) {
        NRM_TRY(check_bare(stream->handle));
    }
    if (!nrm__stream_is_here(stream)) {
        return nrm__error(
            NRM_INVALID_VALUE,
            "the stream is the per-thread default stream of another thread");
    }
    if (!atomic_load_explicit(&nrm__known_uses_any, memory_order_relaxed)) {
        atomic_store(&nrm__known_uses_any, true);
    }
    nrm_status status = note_captured(ptr, stream, NRM_DEVICE_NONE, &use);
    if (status == NRM_NOT_FOUND) {
        status = nrm__stream_stays(stream) ? classify_own(stream, &use)
                                           : classify_bare(stream, place->flags, &use);
    }
    return status == NRM_OK ? nrm__known_use_note(&use) : status;
}

/* Whether a block of page-locked or managed memory starts there whose uses count. */
static bool
is_tracked(uintptr_t start)
{
    struct place place;
    return find_start(start, &place) && place.kind != NRM_KIND_HOST &&
           place.kind != NRM_KIND_DEVICE && !(place.flags & NRM__OPS_IMMEDIATE);
}

/* The usual case, of a stream of our own that was noted before, without a call of
   anybody but the table. A use in a child, or while the process ends, does no harm. */
bool
nrm__record_use_quickly(const void *ptr, const nrm_stream *stream)
{
    const struct nrm__order *order =
        atomic_load_explicit(&stream->orders, memory_order_acquire);
    if (stream->created.handle == NULL || order == NULL ||
        order->resets != nrm__cuda_generations() ||
        atomic_load_explicit(&nrm__captures_known, memory_order_relaxed) != 0) {
        return false;
    }
    struct nrm__order_tag tag = {
        .stream = order->index,
        .generation = atomic_load_explicit(&order->generation, memory_order_relaxed)};
    return is_known_primary(tag) &&
           nrm__known_use_note_quickly((uintptr_t)ptr, order, tag, stream->handle,
                                       is_tracked);
}

/* ---- the public calls ---- */

__attribute__((noinline)) static nrm_status
record_use_slowly(const void *ptr, nrm_stream *stream)
{
    struct place place;
    NRM_TRY(find_place(ptr, &place));
    nrm_status status = check_place(&place, ptr);
    if (status == NRM_OK) {
        status = record_use(ptr, &place, stream);
    }
    else if (status == NRM_NOT_FOUND) {
        status = NRM_OK;
    }
    leave_place(&place);
    return status;
}

nrm_status
nrm_record_use(const void *ptr, nrm_stream *stream)
{
    return nrm__record_use_quickly(ptr, stream) ? NRM_OK
                                                : record_use_slowly(ptr, stream);
}

nrm_status
nrm_record_use_on_handle(const void *ptr, uintptr_t handle)
{
    if (handle < NRM_STREAM_HANDLE_PER_THREAD) {
        return nrm_record_use(ptr, handle == NRM_STREAM_HANDLE_LEGACY
                                       ? nrm_stream_legacy()
                                       : nrm_stream_default());
    }
    if (handle == NRM_STREAM_HANDLE_PER_THREAD) { /* a tag names the object */
        nrm_stream *stream;
        NRM_TRY(nrm_stream_per_thread(&stream));
        nrm_status status = nrm_record_use(ptr, stream);
        nrm_stream_release(stream);
        return status;
    }
    nrm_stream stream = {.handle = handle};
    return nrm_record_use(ptr, &stream);
}

nrm_status
nrm_block_uses(const void *ptr, nrm_use *out, size_t capacity, size_t *out_n)
{
    struct nrm__use uses[MAX_LISTED];
    struct place place;
    NRM_TRY(find_place(ptr, &place));
    leave_place(&place);
    *out_n = 0;
    if (!atomic_load(&nrm__known_uses_any)) {
        return NRM_OK;
    }
    size_t n = nrm__min(nrm__known_uses_list(place.start, uses, MAX_LISTED),
                        (size_t)MAX_LISTED);
    for (size_t i = 0; i < n; i++) {
        nrm__use_poll(uses[i].tag);
    }
    *out_n = nrm__known_uses_list(place.start, uses, MAX_LISTED);
    n = nrm__min(*out_n, (size_t)MAX_LISTED);
    for (size_t i = 0; i < n && i < capacity; i++) {
        const struct nrm__use *use = &uses[n - 1 - i];
        out[i] = (nrm_use){.stream = use->handle,
                           .is_captured = !use->is_foreign &&
                                          nrm__order_is_captured(use->tag.stream)};
    }
    return NRM_OK;
}
