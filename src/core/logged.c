/*
 * Requests through an adaptor that logs.
 *
 * They go on to its upstream, which serves them as if it had been asked itself. Where
 * that has a short way the whole of it is here, and the record is written before the
 * thread leaves its cache: until then nobody else can have the block that it gives
 * back, so nothing has to be pending meanwhile. All others are public calls of the
 * upstream, with a look at the block before it goes, as a record has its size.
 */
#include "core/logged.h"

#include "core/log_note.h"
#include "core/pair.h"
#include "core/request.h"
#include "core/short_give.h"

/* ---- the size of a block that goes another way ---- */

static size_t
cell_nbytes(const struct nrm__segment *segment, const void *ptr)
{
    uint32_t offset = (uint32_t)((uintptr_t)ptr - segment->start);
    uint32_t unit = offset / (uint32_t)NRM__SLAB_ALIGNMENT;
    uint32_t cell = unit * segment->reciprocal >> NRM__SLAB_RECIPROCAL_BITS;
    return cell * segment->cell_nbytes == offset
               ? atomic_load_explicit(&segment->sizes[cell], memory_order_acquire) &
                     ~NRM__SLAB_COUNTED
               : 0;
}

static size_t
block_nbytes(const struct nrm__segment *segment, const void *ptr)
{
    const struct nrm__live *block = nrm__starts_find(segment, (uintptr_t)ptr);
    uintptr_t live = (uintptr_t)ptr | NRM__LIVE;
    return block != NULL &&
                   atomic_load_explicit(&block->key, memory_order_acquire) == live
               ? atomic_load_explicit(&block->nbytes, memory_order_relaxed)
               : 0;
}

static size_t
look_up_nbytes(const void *ptr)
{
    struct nrm__block block;
    if (!nrm__block_map_find(ptr, &block)) {
        return 0;
    }
    nrm_resource_release(block.owner);
    return block.nbytes;
}

/* Of the live block that starts at an address, mostly without a lock or a reference; 0:
   none does. */
static size_t
live_nbytes(const void *ptr)
{
    size_t nbytes = 0;
    struct nrm__thread_state *state = nrm__thread_state_now();
    struct nrm__cache *cache = state != NULL ? state->cache : NULL;
    if (cache != NULL && nrm__cache_enter(cache)) {
        const struct nrm__segment *segment = nrm__short_peek(ptr);
        if (segment != NULL && segment->cells_of != NULL) {
            nbytes = cell_nbytes(segment, ptr);
        }
        else if (segment != NULL && segment->blocks_of != NULL) {
            nbytes = block_nbytes(segment, ptr);
        }
        nrm__cache_leave(cache);
    }
    return nbytes != 0 ? nbytes : look_up_nbytes(ptr);
}

/* ---- by the public calls of the upstream ---- */

__attribute__((noinline)) static nrm_status
allocate_past(nrm_resource *mr, size_t nbytes, size_t alignment, nrm_stream *stream,
              unsigned flags, void **out)
{
    void *ptr = NULL;
    nrm_status status =
        (flags & NRM__REQUEST_ZEROED) != 0
            ? nrm_resource_allocate_zeroed(mr->upstream, nbytes, alignment, stream,
                                           &ptr)
            : nrm_resource_allocate(mr->upstream, nbytes, alignment, stream, &ptr);
    if (status == NRM_OK) {
        *out = ptr;
    }
    else {
        (void)nrm__request_failed(status, mr, nbytes);
    }
    nrm__log_note_allocation(nrm__log_of(mr), ptr, nbytes, stream, true, true);
    return status;
}

__attribute__((noinline)) static nrm_status
deallocate_past(nrm_resource *mr, void *ptr, nrm_stream *stream)
{
    size_t nbytes = live_nbytes(ptr);
    uint64_t ticks = nrm__log_begin_free();
    nrm_status status = nrm_resource_deallocate(mr->upstream, ptr, nbytes, stream);
    if (status != NRM_OK) {
        atomic_fetch_add_explicit(&mr->counters.errors, 1, memory_order_relaxed);
        nbytes = 0;
    }
    if (nbytes != 0) {
        nrm__log_note(nrm__log_of(mr), NRM__LOG_FREE, ticks, ptr, nbytes, stream, true,
                      stream != NULL);
    }
    else {
        nrm__log_cancel_free(ticks);
    }
    return status;
}

/* ---- the short way ---- */

__attribute__((noinline)) static nrm_status
press(struct nrm__log_ring *ring, bool in)
{
    nrm__log_pressed(ring, in);
    return NRM_OK;
}

/* Raises a shard, counts in those behind it, and leaves. */
__attribute__((noinline)) static nrm_status
raise_and_leave(struct nrm__cache *cache, struct nrm__shard *shard, size_t nbytes,
                bool in, struct nrm__log_ring *ring, bool is_pressed)
{
    nrm__shard_raise(shard);
    nrm__short_count(shard->behind, nbytes, in);
    nrm__cache_leave(cache);
    return is_pressed ? press(ring, in) : NRM_OK;
}

/* Counts a block that has its record, and leaves. */
__attribute__((always_inline)) static inline nrm_status
count_and_leave(struct nrm__cache *cache, const struct nrm__slot *slot, size_t nbytes,
                bool in, struct nrm__log_ring *ring, bool is_pressed)
{
    struct nrm__shard *shard = slot->front;
    do {
        bool raises = in ? nrm__shard_count_in(shard, nbytes)
                         : nrm__shard_count_out(shard, nbytes);
        if (__builtin_expect(raises, 0)) {
            return raise_and_leave(cache, shard, nbytes, in, ring, is_pressed);
        }
        shard = shard->behind;
    } while (shard != NULL);
    nrm__cache_leave(cache);
    return __builtin_expect(is_pressed, 0) ? press(ring, in) : NRM_OK;
}

/* Writes the record of a block, counts it and leaves. The bytes of a free are booked
   out behind the record, as others may have them then. */
__attribute__((always_inline)) static inline nrm_status
record_and_leave(nrm_resource *mr, struct nrm__cache *cache, struct nrm__slot *slot,
                 struct nrm__log_ring *ring, enum nrm__log_action action,
                 uint64_t ticks, void *ptr, size_t nbytes, const nrm_stream *stream)
{
    bool in = action == NRM__LOG_ALLOCATE;
    nrm__log_write(nrm__log_next(ring), nrm__log_of(mr), action, ticks, ptr, nbytes,
                   stream, true);
    bool is_pressed = nrm__log_put(ring);
    if (!in) {
        nrm__short_book_out(slot, nbytes);
    }
    return count_and_leave(cache, slot, nbytes, in, ring, is_pressed);
}

/* The cache of this thread, with the slot of the upstream, entered; NULL: there is no
   short way. On a stream of others the driver has to be asked first, from outside. */
static inline struct nrm__slot *
enter(nrm_resource *mr, const nrm_stream *stream, struct nrm__cache **out)
{
    if (nrm__log_ring_now() == NULL || (stream != NULL && !nrm__stream_stays(stream))) {
        return NULL;
    }
    return nrm__cache_enter_slot(mr->upstream, out);
}

__attribute__((noinline)) static nrm_status
allocate_rest(nrm_resource *mr, size_t nbytes, size_t alignment, nrm_stream *stream,
              unsigned flags, void **out)
{
    struct nrm__cache *cache;
    struct nrm__slot *slot = flags == 0 ? enter(mr, stream, &cache) : NULL;
    if (slot == NULL) {
        return allocate_past(mr, nbytes, alignment, stream, flags, out);
    }
    void *ptr = nrm__short_allocate(slot, nbytes, alignment, stream, NULL);
    if (ptr == NULL) {
        nrm__cache_leave(cache);
        return allocate_past(mr, nbytes, alignment, stream, flags, out);
    }
    *out = ptr;
    return record_and_leave(mr, cache, slot, nrm__log_ring_now(), NRM__LOG_ALLOCATE,
                            nrm__ticks(), ptr, nbytes, stream);
}

__attribute__((noinline)) static nrm_status
deallocate_rest(nrm_resource *mr, void *ptr, nrm_stream *stream)
{
    struct nrm__cache *cache;
    struct nrm__slot *slot = enter(mr, stream, &cache);
    if (slot == NULL) {
        return deallocate_past(mr, ptr, stream);
    }
    uint64_t ticks = nrm__ticks();
    const struct nrm__segment *segment = nrm__short_peek(ptr);
    size_t nbytes = nrm__short_is_of(slot, segment)
                        ? nrm__short_claim(slot, segment, ptr, stream)
                        : 0;
    if (nbytes == 0) {
        nrm__cache_leave(cache);
        return deallocate_past(mr, ptr, stream);
    }
    return record_and_leave(mr, cache, slot, nrm__log_ring_now(), NRM__LOG_FREE, ticks,
                            ptr, nbytes, stream);
}

/* ---- the usual cells and blocks ---- */

/* Inside, where processors count ticks. While this thread has the only cache no other
   one can have handed it the block, whose row a time that is read too soon could come
   before. */
static inline uint64_t
ticks_now(void)
{
    return __builtin_expect(nrm__account_is_alone(), 1) ? nrm__cycles_early()
                                                        : nrm__cycles();
}

static inline bool
is_usual(const struct nrm__slot *slot, size_t nbytes, size_t alignment,
         const nrm_stream *stream)
{
    if (stream == NULL) {
        return nrm__short_is_booked(slot, nbytes, alignment);
    }
    return nbytes <= slot->stream_limit && nrm__short_is_open(slot) &&
           nbytes > slot->magazines->cell_limit &&
           nrm__short_aligns(slot, alignment, slot->magazines->alignment);
}

/* The requested size of a block of a stream that stays, or of a cell or block of the
   host; 0: it is none of those. */
__attribute__((always_inline)) static inline size_t
claim_on(struct nrm__slot *slot, void *ptr, const nrm_stream *stream)
{
    uint64_t key;
    const struct nrm__segment *segment = nrm__short_peek(ptr);
    struct nrm__magazines *magazines = slot->magazines;
    struct nrm__live *block = magazines != NULL && slot->stream_limit != 0 &&
                                      magazines->epoch_nbytes == 0
                                  ? nrm__short_start_of(slot, segment, ptr)
                                  : NULL;
    return block != NULL && nrm__short_key(magazines, stream, &key)
               ? nrm__short_claim_same(magazines, block, ptr, true, key)
               : 0;
}

__attribute__((always_inline)) static inline size_t
claim_on_host(struct nrm__slot *slot, void *ptr)
{
    const struct nrm__segment *segment = nrm__short_peek(ptr);
    struct nrm__magazines *magazines = slot->magazines;
    if (segment == NULL || magazines == NULL || slot->limit == 0 ||
        atomic_load_explicit(slot->forbidden, memory_order_acquire)) {
        return 0;
    }
    if (segment->cells_of == slot->pool) {
        return nrm__short_claim_cell(magazines, segment, ptr);
    }
    if (segment->blocks_of != slot->pool || magazines->epoch_nbytes != 0) {
        return 0;
    }
    struct nrm__live *block = nrm__starts_find(segment, (uintptr_t)ptr);
    return block != NULL ? nrm__short_claim_same(magazines, block, ptr, false, 0) : 0;
}

/* The slot of the upstream in the cache of this thread, entered, or NULL. */
static inline struct nrm__slot *
enter_usual(nrm_resource *mr, const struct nrm__log_ring *ring,
            const nrm_stream *stream, struct nrm__cache **out)
{
    bool is_open = ring != NULL && nrm__ticks_are_cycles &&
                   (stream == NULL || nrm__stream_stays(stream));
    return is_open ? nrm__cache_enter_slot(mr->upstream, out) : NULL;
}

/* Each of the next two is compiled twice, for the host and for streams. */
__attribute__((always_inline)) static inline nrm_status
allocate(nrm_resource *mr, size_t nbytes, size_t alignment, nrm_stream *stream,
         unsigned flags, void **out)
{
    struct nrm__cache *cache;
    struct nrm__log_ring *ring = nrm__log_ring_now();
    struct nrm__slot *slot = flags == 0 ? enter_usual(mr, ring, stream, &cache) : NULL;
    if (slot == NULL) {
        return allocate_rest(mr, nbytes, alignment, stream, flags, out);
    }
    void *ptr = NULL;
    if (is_usual(slot, nbytes, alignment, stream) && nrm__short_book(slot, nbytes)) {
        ptr = stream == NULL
                  ? nrm__short_take(slot->magazines, nbytes, NULL, NULL)
                  : nrm__short_take_block(slot->magazines, nbytes, stream, NULL);
        if (ptr == NULL) {
            nrm__short_book_out(slot, nbytes);
        }
    }
    if (ptr == NULL) {
        nrm__cache_leave(cache);
        return allocate_rest(mr, nbytes, alignment, stream, flags, out);
    }
    *out = ptr;
    return record_and_leave(mr, cache, slot, ring, NRM__LOG_ALLOCATE, ticks_now(), ptr,
                            nbytes, stream);
}

__attribute__((always_inline)) static inline nrm_status
deallocate(nrm_resource *mr, void *ptr, nrm_stream *stream)
{
    struct nrm__cache *cache;
    struct nrm__log_ring *ring = nrm__log_ring_now();
    struct nrm__slot *slot = enter_usual(mr, ring, stream, &cache);
    if (slot == NULL) {
        return deallocate_rest(mr, ptr, stream);
    }
    uint64_t ticks = ticks_now();
    size_t nbytes = stream == NULL ? claim_on_host(slot, ptr)
                                   : claim_on(slot, ptr, stream);
    if (nbytes == 0) {
        nrm__cache_leave(cache);
        return deallocate_rest(mr, ptr, stream);
    }
    return record_and_leave(mr, cache, slot, ring, NRM__LOG_FREE, ticks, ptr, nbytes,
                            stream);
}

__attribute__((noinline, flatten, nonnull(4))) static nrm_status
allocate_on(nrm_resource *mr, size_t nbytes, size_t alignment, nrm_stream *stream,
            unsigned flags, void **out)
{
    return allocate(mr, nbytes, alignment, stream, flags, out);
}

__attribute__((noinline, flatten, nonnull(3))) static nrm_status
deallocate_on(nrm_resource *mr, void *ptr, nrm_stream *stream)
{
    return deallocate(mr, ptr, stream);
}

__attribute__((flatten)) nrm_status
nrm__logged_allocate(nrm_resource *mr, size_t nbytes, size_t alignment,
                     nrm_stream *stream, unsigned flags, void **out)
{
    return stream == NULL ? allocate(mr, nbytes, alignment, NULL, flags, out)
                          : allocate_on(mr, nbytes, alignment, stream, flags, out);
}

__attribute__((flatten)) nrm_status
nrm__logged_deallocate(nrm_resource *mr, void *ptr, nrm_stream *stream)
{
    return stream == NULL ? deallocate(mr, ptr, NULL) : deallocate_on(mr, ptr, stream);
}
