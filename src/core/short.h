/*
 * The short way of a request: from the resource that was asked straight to the cells and blocks
 * that this thread keeps (core/cache.h), without a lock, a driver call or a wait. Whatever
 * does not fit goes the long way, in core/dispatch.c. That and core/pair.c include this.
 */
#ifndef NRM_CORE_SHORT_H
#define NRM_CORE_SHORT_H

#include <string.h>

#include "core/account.h"
#include "core/cache.h"
#include "core/capture.h"
#include "core/order_slots.h"

static inline bool
nrm__short_is_open(const struct nrm__slot *slot)
{
    return slot->magazines != NULL &&
           !atomic_load_explicit(slot->forbidden, memory_order_acquire);
}

/* Makes a cell that this thread keeps live; NULL: it has none of that size. */
__attribute__((always_inline)) static inline void *
nrm__short_take_cell(struct nrm__magazines *magazines, size_t nbytes,
                     struct nrm__block *out)
{
    struct nrm__magazine *magazine = nrm__magazine_at(
        magazines, nrm__magazine_offsets[(nbytes - 1) / NRM__SLAB_ALIGNMENT]);
    uint32_t n = magazine->n;
    if (n == 0) {
        return NULL;
    }
    magazine->n = n - 1;
    struct nrm__cell cell = magazine->cells[n - 1];
    if (cell.ptr == NULL) {
        __builtin_unreachable(); /* so nobody need ask again */
    }
    atomic_store_explicit((atomic_uint_least16_t *)cell.record, (uint_least16_t)nbytes,
                          memory_order_release);
    if (out != NULL) {
        const struct nrm__slab *slab = nrm__slab_of_cell(&cell);
        *out = (struct nrm__block){
            .ptr = cell.ptr,
            .nbytes = nbytes,
            .capacity = slab->cell_nbytes,
            .owner = slab->owner,
            .segment = slab->segment,
            .record = (void *)(uintptr_t)slab,
            .tag = slab->generation,
            .flags = NRM__BLOCK_IN_SLAB,
        };
    }
    return cell.ptr;
}

/*
 * As nrm__cache_enter_slot, for a stream that may be of others: where blocks are kept by stream
 * the driver is asked for its number, outside, and *stream becomes `room`, which stands for
 * it until the cache is left. Without a number, or a slot, it stays what it was, and has no
 * key.
 */
static inline struct nrm__slot *
nrm__short_enter(nrm_resource *mr, const nrm_stream **stream, nrm_stream *room,
                 struct nrm__cache **out)
{
    uint64_t id;
    struct nrm__slot *slot = nrm__cache_enter_slot(mr, out);
    if (slot == NULL || *stream == NULL || nrm__stream_stays(*stream) ||
        slot->magazines == NULL || !slot->magazines->is_ordered) {
        return slot;
    }
    nrm__cache_leave(*out);
    bool has_id = nrm__cuda_stream_id((*stream)->handle, &id);
    slot = nrm__cache_enter_slot(mr, out);
    uint64_t key = has_id && slot != NULL ? nrm__order_key_of_id(id) : 0;
    if (key != 0) {
        room->handle = (*stream)->handle;
        room->thread = 0;
        atomic_init(&room->orders, nrm__order_at((uint32_t)(key >> 32)));
        *stream = room;
    }
    return slot;
}

/* Whose block this is going to be, or was: see nrm__cache_set. False: it must be ordered
   with work that has no key. Inside, so the thread has a state. */
static inline bool
nrm__short_key(const struct nrm__magazines *magazines, const nrm_stream *stream,
               uint64_t *out)
{
    *out = 0;
    if (stream == NULL) {
        return true; /* of those that are ordered the limit is 0 */
    }
    uint64_t thread = nrm__thread_state_now()->id;
    if (magazines->is_ordered) {
        *out = nrm__order_key_of(stream, magazines->device, thread);
        return *out != 0 && !nrm__stream_in_known_capture(stream);
    }
    return stream->thread == 0 || stream->thread == thread;
}

/* Whether a block can be handed out as it is, with no context reset since it was made. */
static inline bool
nrm__short_is_current(const struct nrm__magazines *magazines,
                      const struct nrm__live *block)
{
    return !magazines->sees_contexts ||
           atomic_load_explicit(&block->segment->generation, memory_order_relaxed) ==
               nrm__cuda_generations();
}

/* The one that is large, if most of it is for the request. */
static inline struct nrm__cache_set *
nrm__short_large_set(struct nrm__magazines *magazines, size_t nbytes,
                     size_t *out_capacity)
{
    struct nrm__cache_set *set = &magazines->sets[NRM__CACHE_LARGE];
    if (set->nbytes - nbytes <= nbytes / NRM__LARGE_FIT) {
        *out_capacity = set->nbytes;
    }
    return set;
}

/* What is cut for a request, and the set that it is kept in. */
static inline struct nrm__cache_set *
nrm__short_set_of(struct nrm__magazines *magazines, size_t nbytes, uint64_t key,
                  size_t *out_capacity)
{
    size_t last = nbytes - 1;
    if (last - NRM__SLAB_MAX < magazines->sized_requests) {
        unsigned shift = 60 - (unsigned)__builtin_clzll(last);
        struct nrm__cache_set *set = nrm__cache_sized_set(magazines, last, shift);
        *out_capacity = ((last >> shift) + 1) << shift;
        return nrm__cache_set_or_hashed(magazines, set, *out_capacity, key);
    }
    *out_capacity = nrm__cached_nbytes(nbytes, magazines->granule,
                                       magazines->rounded_max, magazines->shift);
    return nbytes > NRM__LARGE_MIN
               ? nrm__short_large_set(magazines, nbytes, out_capacity)
               : nrm__cache_hashed_set(magazines, *out_capacity, key);
}

/* Makes a block live that this thread has kept. */
__attribute__((always_inline)) static inline void *
nrm__short_hand_out(const struct nrm__magazines *magazines, struct nrm__cell cell,
                    size_t nbytes, size_t capacity, struct nrm__block *out)
{
    struct nrm__live *block = cell.record;
    if (cell.ptr == NULL) {
        __builtin_unreachable(); /* so nobody need ask again */
    }
    atomic_store_explicit(&block->nbytes, nbytes, memory_order_relaxed);
    atomic_store_explicit(&block->key, (uintptr_t)cell.ptr | NRM__LIVE,
                          memory_order_release);
    if (out != NULL) {
        *out = (struct nrm__block){
            .ptr = cell.ptr,
            .nbytes = nbytes,
            .capacity = capacity,
            .owner = magazines->pool,
            .segment = block->segment,
        };
    }
    return cell.ptr;
}

__attribute__((always_inline)) static inline void *
nrm__short_take_block(struct nrm__magazines *magazines, size_t nbytes,
                      const nrm_stream *stream, struct nrm__block *out)
{
    uint64_t key;
    size_t capacity;
    if (!nrm__short_key(magazines, stream, &key)) {
        return NULL;
    }
    struct nrm__cache_set *set = nrm__short_set_of(magazines, nbytes, key, &capacity);
    uint32_t n = set->n;
    if (n == 0 || set->nbytes != capacity || (stream != NULL && set->stream != key)) {
        return NULL;
    }
    struct nrm__cell cell = set->cells[n - 1];
    if (!nrm__short_is_current(magazines, cell.record)) {
        return NULL;
    }
    set->n = n - 1;
    magazines->recent = set;
    magazines->set_nbytes -= capacity;
    return nrm__short_hand_out(magazines, cell, nbytes, capacity, out);
}

/* The one that was parked first, if it is done and of the right size. */
__attribute__((always_inline)) static inline void *
nrm__short_take_parked(struct nrm__magazines *magazines, size_t nbytes,
                       struct nrm__block *out)
{
    const struct nrm__parked *oldest = nrm__cache_parked_at(magazines, 0);
    size_t capacity = nrm__cached_nbytes(nbytes, magazines->granule,
                                         magazines->rounded_max, magazines->shift);
    if (magazines->n_parked == 0 || oldest->capacity != capacity ||
        !nrm__epoch_is_done(oldest->stamp) ||
        !nrm__short_is_current(magazines, oldest->cell.record)) {
        return NULL;
    }
    struct nrm__cell cell = oldest->cell;
    nrm__cache_unpark_oldest(magazines, 1, capacity);
    return nrm__short_hand_out(magazines, cell, nbytes, capacity, out);
}

/* Counts a block in a shard and in those behind it. */
static inline void
nrm__short_count(struct nrm__shard *shard, size_t nbytes, bool in)
{
    for (; shard != NULL; shard = shard->behind) {
        bool raises = in ? nrm__shard_count_in(shard, nbytes)
                         : nrm__shard_count_out(shard, nbytes);
        if (raises) {
            nrm__shard_raise(shard);
        }
    }
}

/* A power of two, or 0: that of the kind. */
static inline bool
nrm__short_aligns(const struct nrm__slot *slot, size_t alignment, size_t most)
{
    return (alignment & (alignment - 1)) == 0 &&
           alignment - slot->least_alignment <= most;
}

/* Whether a request is one of the most, for a cell that is booked nowhere. */
static inline bool
nrm__short_is_cell(const struct nrm__slot *slot, size_t nbytes, size_t alignment)
{
    return nbytes - 1 < slot->cell_limit && (alignment & ~NRM__SLAB_ALIGNMENT) == 0;
}

/* Whether it is one for a cell or block that is booked in an account. */
__attribute__((always_inline)) static inline bool
nrm__short_is_booked(const struct nrm__slot *slot, size_t nbytes, size_t alignment)
{
    return slot->magazines != NULL && nbytes - 1 < slot->limit &&
           slot->least_alignment == 0 && (alignment & ~NRM__SLAB_ALIGNMENT) == 0 &&
           !atomic_load_explicit(slot->forbidden, memory_order_acquire);
}

/* In the account of a limit on the way; false: it does not fit, and the long way says so. */
static inline bool
nrm__short_book(const struct nrm__slot *slot, size_t nbytes)
{
    size_t allocated;
    struct nrm__account *account = slot->account;
    return account == NULL ||
           nrm__account_book_inside(account, nrm__account_counted(account, nbytes),
                                    &allocated);
}

static inline void
nrm__short_book_out(const struct nrm__slot *slot, size_t nbytes)
{
    struct nrm__account *account = slot->account;
    if (account != NULL) {
        nrm__account_book_out_inside(account, nrm__account_counted(account, nbytes));
    }
}

static inline void *
nrm__short_take(struct nrm__magazines *magazines, size_t nbytes,
                const nrm_stream *stream, struct nrm__block *out)
{
    void *ptr = NULL;
    if (nbytes <= magazines->cell_limit) {
        return nrm__short_take_cell(magazines, nbytes, out);
    }
    if (magazines->n_parked != 0 && stream == NULL) {
        ptr = nrm__short_take_parked(magazines, nbytes, out);
    }
    return ptr != NULL ? ptr : nrm__short_take_block(magazines, nbytes, stream, out);
}

/* Where requests go that are too large for a slot, inside; NULL: they have no slot. */
static inline struct nrm__slot *
nrm__short_large(struct nrm__cache *cache, const struct nrm__slot *slot)
{
    if (slot->large == NULL) {
        return NULL;
    }
    struct nrm__slot *large = nrm__cache_slot_of(cache, slot->large);
    nrm_resource *mr = atomic_load_explicit(&large->mr, memory_order_relaxed);
    return mr == slot->large ? large : NULL;
}

/* Whether it is one for a block that is booked nowhere. */
__attribute__((always_inline)) static inline bool
nrm__short_is_block(const struct nrm__slot *slot, size_t nbytes, size_t alignment)
{
    return nbytes - slot->least_block < slot->block_sizes &&
           (alignment & ~slot->magazines->alignment) == 0 &&
           !atomic_load_explicit(slot->forbidden, memory_order_acquire);
}

/* The same of a pool that parks what is freed. */
__attribute__((always_inline)) static inline bool
nrm__short_is_parked(const struct nrm__slot *slot, size_t nbytes, size_t alignment)
{
    return slot->parks && nbytes >= slot->least_block && nbytes <= slot->limit &&
           (alignment & ~slot->magazines->alignment) == 0 &&
           !atomic_load_explicit(slot->forbidden, memory_order_acquire);
}

/* The same with a stream. */
__attribute__((always_inline)) static inline bool
nrm__short_is_block_on(const struct nrm__slot *slot, size_t nbytes, size_t alignment)
{
    return nbytes - slot->least_block < slot->stream_sizes &&
           (alignment & ~slot->magazines->alignment) == 0 &&
           !atomic_load_explicit(slot->forbidden, memory_order_acquire);
}

/* A block without a lock, a driver call or a wait, inside; NULL: not so. */
static inline void *
nrm__short_allocate(struct nrm__slot *slot, size_t nbytes, size_t alignment,
                    const nrm_stream *stream, struct nrm__block *out)
{
    size_t limit = stream == NULL ? slot->limit : slot->stream_limit;
    if (nbytes != 0 && nbytes <= limit && nrm__short_is_open(slot) &&
        nrm__short_aligns(slot, alignment, slot->magazines->alignment) &&
        nrm__short_book(slot, nbytes)) {
        void *ptr = nrm__short_take(slot->magazines, nbytes, stream, out);
        if (ptr == NULL && nrm__cache_is_ripe(slot->magazines) &&
            nrm__cache_ripen(slot->magazines)) {
            ptr = nrm__short_take(slot->magazines, nbytes, stream, out);
        }
        if (ptr != NULL) {
            return ptr;
        }
        nrm__short_book_out(slot, nbytes);
    }
    return NULL;
}

static inline bool
nrm__short_keep_cell(struct nrm__magazines *magazines, struct nrm__slab *slab,
                     void *ptr)
{
    struct nrm__magazine *magazine = &magazines->classes[slab->class_index];
    uint32_t n = magazine->n;
    if (n >= magazine->capacity) {
        return false;
    }
    magazine->cells[n] = (struct nrm__cell){ptr, nrm__slab_record_of(slab, ptr)};
    magazine->n = n + 1;
    return true;
}

/* Claims what starts at an address of a slab's segment for this thread to keep; its
   requested size, or 0: not so. What is left behind the last cell is never live. */
__attribute__((always_inline)) static inline size_t
nrm__short_claim_cell(struct nrm__magazines *magazines,
                      const struct nrm__segment *segment, void *ptr)
{
    uintptr_t offset = (uintptr_t)ptr - segment->start;
    uint32_t unit = (uint32_t)offset / (uint32_t)NRM__SLAB_ALIGNMENT;
    uint32_t cell = unit * segment->reciprocal >> NRM__SLAB_RECIPROCAL_BITS;
    if ((uintptr_t)cell * segment->cell_nbytes != offset) {
        return 0;
    }
    struct nrm__magazine *magazine = nrm__magazine_at(magazines, segment->magazine);
    uint32_t n = magazine->n;
    if (n >= magazine->capacity) {
        return 0;
    }
    atomic_uint_least16_t *size = &segment->sizes[cell];
    size_t nbytes = atomic_load_explicit(size, memory_order_acquire);
    if (__builtin_expect(nbytes > NRM__SLAB_MAX, 0)) {
        return 0; /* a scope counts it: core/scopes.h */
    }
    if (atomic_load_explicit(&nrm__cache_common.is_alone, memory_order_acquire)) {
        atomic_store_explicit(size, 0, memory_order_relaxed);
    }
    else {
        nbytes = atomic_exchange_explicit(size, 0, memory_order_acq_rel);
    }
    if (nbytes != 0) {
        magazine->cells[n] = (struct nrm__cell){ptr, size};
        magazine->n = n + 1;
    }
    return nbytes;
}

/* The set that has room for a block; NULL: none, or it must not be kept. */
static inline struct nrm__cache_set *
nrm__short_set_for(const struct nrm__slot *slot, const struct nrm__live *block,
                   size_t capacity, const nrm_stream *stream, uint64_t *out_key)
{
    size_t limit = stream == NULL ? slot->limit : slot->stream_limit;
    if (capacity > limit || !nrm__short_key(slot->magazines, stream, out_key) ||
        atomic_load_explicit(&block->goes_long, memory_order_relaxed)) {
        return NULL;
    }
    struct nrm__cache_set *set = nrm__cache_set_of(slot->magazines, capacity, *out_key);
    return nrm__cache_has_room(slot->magazines, set, capacity, *out_key) ? set : NULL;
}

/* Claims a block whose capacity was read before; false: it is not live, or has been resized
   since. */
__attribute__((always_inline)) static inline bool
nrm__short_claim_live(struct nrm__live *block, void *ptr, size_t capacity)
{
    uintptr_t live = (uintptr_t)ptr | NRM__LIVE;
    if (((uintptr_t)ptr & NRM__STATE_MASK) != 0) {
        return false;
    }
    if (atomic_load_explicit(&nrm__cache_common.is_alone, memory_order_acquire)) {
        if (atomic_load_explicit(&block->key, memory_order_acquire) != live) {
            return false;
        }
        atomic_store_explicit(&block->key, (uintptr_t)ptr, memory_order_relaxed);
        return true;
    }
    if (!atomic_compare_exchange_strong_explicit(&block->key, &live, (uintptr_t)ptr,
                                                 memory_order_acq_rel,
                                                 memory_order_relaxed)) {
        return false;
    }
    if (atomic_load_explicit(&block->capacity, memory_order_relaxed) != capacity) {
        atomic_store_explicit(&block->key, live, memory_order_release);
        return false;
    }
    return true;
}

/* Into the set that a block was taken from last, as where it goes is known then before the
   block is, or the one that it was in itself, if that is of its size and stream; its
   requested size, or 0: not so. Sets that have one key for all need not be asked for it. */
__attribute__((always_inline)) static inline size_t
nrm__short_claim_same(struct nrm__magazines *magazines, struct nrm__live *block,
                      void *ptr, bool has_key, uint64_t key)
{
    size_t capacity = atomic_load_explicit(&block->capacity, memory_order_relaxed);
    struct nrm__cache_set *set = magazines->recent;
    if (set->nbytes != capacity || (has_key && set->stream != key)) {
        set = &magazines->sets[atomic_load_explicit(&block->set, memory_order_relaxed)];
    }
    size_t all_nbytes = magazines->set_nbytes + capacity;
    uint32_t n = set->n;
    if (set->nbytes != capacity || (has_key && set->stream != key) ||
        n >= set->capacity || all_nbytes > magazines->set_limit ||
        atomic_load_explicit(&block->goes_long, memory_order_relaxed) ||
        !nrm__short_claim_live(block, ptr, capacity)) {
        return 0;
    }
    set->cells[n] = (struct nrm__cell){ptr, block};
    set->n = n + 1;
    magazines->set_nbytes = all_nbytes;
    size_t nbytes = atomic_load_explicit(&block->nbytes, memory_order_relaxed);
    if (nbytes == 0) {
        __builtin_unreachable(); /* so nobody need ask again */
    }
    return nbytes;
}

/* Whether a block may be parked; what is done makes room. */
static inline bool
nrm__short_may_park(const struct nrm__slot *slot, const struct nrm__live *block,
                    size_t capacity)
{
    struct nrm__magazines *magazines = slot->magazines;
    return capacity <= slot->limit &&
           !atomic_load_explicit(&block->goes_long, memory_order_relaxed) &&
           (nrm__cache_may_park(magazines) ||
            (nrm__cache_ripen(magazines) && nrm__cache_may_park(magazines)));
}

/* Claims it for this thread to park; its requested size, or 0: not so. */
static inline size_t
nrm__short_claim_parked(const struct nrm__slot *slot, struct nrm__live *block,
                        void *ptr)
{
    size_t capacity = atomic_load_explicit(&block->capacity, memory_order_relaxed);
    if (!nrm__short_may_park(slot, block, capacity) ||
        !nrm__short_claim_live(block, ptr, capacity)) {
        return 0;
    }
    size_t nbytes = atomic_load_explicit(&block->nbytes, memory_order_relaxed);
    nrm__cache_park(slot->magazines, block, ptr, capacity); /* it is stamped claimed */
    return nbytes;
}

static inline size_t
nrm__short_claim_block(struct nrm__slot *slot, struct nrm__live *block, void *ptr,
                       const nrm_stream *stream)
{
    uint64_t key;
    if (slot->magazines->epoch_nbytes != 0) {
        return stream == NULL ? nrm__short_claim_parked(slot, block, ptr) : 0;
    }
    size_t capacity = atomic_load_explicit(&block->capacity, memory_order_relaxed);
    struct nrm__cache_set *set =
        nrm__short_set_for(slot, block, capacity, stream, &key);
    if (set == NULL || !nrm__short_claim_live(block, ptr, capacity)) {
        return 0;
    }
    size_t nbytes = atomic_load_explicit(&block->nbytes, memory_order_relaxed);
    nrm__cache_put_block(slot->magazines, set, capacity, key,
                         (struct nrm__cell){ptr, block});
    return nbytes;
}

/* The block that starts in the granule of an address, of a segment that is no slab's. */
static inline struct nrm__live *
nrm__short_start(const struct nrm__segment *segment, void *ptr)
{
    return segment->blocks_of != NULL ? nrm__starts_find(segment, (uintptr_t)ptr)
                                      : NULL;
}

/* The same, of the pool of a slot and not forbidden, or NULL: not so. */
__attribute__((always_inline)) static inline struct nrm__live *
nrm__short_start_of(const struct nrm__slot *slot, const struct nrm__segment *segment,
                    void *ptr)
{
    return segment != NULL && segment->blocks_of == slot->pool &&
                   !atomic_load_explicit(slot->forbidden, memory_order_acquire)
               ? nrm__starts_find(segment, (uintptr_t)ptr)
               : NULL;
}

static inline size_t
nrm__short_claim_start(struct nrm__slot *slot, const struct nrm__segment *segment,
                       void *ptr, const nrm_stream *stream)
{
    struct nrm__live *block = nrm__short_start(segment, ptr);
    return block != NULL ? nrm__short_claim_block(slot, block, ptr, stream) : 0;
}

/* The segment that an address lies in, inside; NULL: the long way has to look. */
static inline struct nrm__segment *
nrm__short_peek(const void *ptr)
{
    if (atomic_load_explicit(&nrm__map_overlay.n, memory_order_acquire) != 0) {
        return NULL;
    }
    return nrm__block_map_peek((uintptr_t)ptr);
}

/* Whether what lies in it may be claimed through a slot. */
static inline bool
nrm__short_is_of(const struct nrm__slot *slot, const struct nrm__segment *segment)
{
    return segment != NULL && segment->owner == slot->pool &&
           !atomic_load_explicit(slot->forbidden, memory_order_acquire);
}

/* Takes what starts at an address of the segment back, inside; its requested size, or 0: not
   so. */
static inline size_t
nrm__short_claim(struct nrm__slot *slot, const struct nrm__segment *segment, void *ptr,
                 const nrm_stream *stream)
{
    if (slot->magazines == NULL) {
        return 0;
    }
    return nrm__segment_is_slab(segment)
               ? nrm__short_claim_cell(slot->magazines, segment, ptr)
               : nrm__short_claim_start(slot, segment, ptr, stream);
}

/* A claimed block of its own for this thread to keep; false: not so. */
static inline bool
nrm__short_keep_block(struct nrm__slot *slot, const struct nrm__block *block,
                      const nrm_stream *stream)
{
    uint64_t key;
    struct nrm__live *live = nrm__starts_find(block->segment, (uintptr_t)block->ptr);
    size_t capacity = atomic_load_explicit(&live->capacity, memory_order_relaxed);
    if (slot->magazines->epoch_nbytes != 0) {
        if (stream != NULL || !nrm__short_may_park(slot, live, capacity)) {
            return false;
        }
        nrm__cache_park(slot->magazines, live, block->ptr, capacity);
        return true;
    }
    struct nrm__cache_set *set = nrm__short_set_for(slot, live, capacity, stream, &key);
    if (set != NULL) {
        nrm__cache_put_block(slot->magazines, set, capacity, key,
                             (struct nrm__cell){block->ptr, live});
    }
    return set != NULL;
}

/* The same for a block that is claimed already, through a pool itself. */
static inline bool
nrm__short_keep_claimed(nrm_resource *pool, const struct nrm__block *block,
                        const nrm_stream *stream)
{
    nrm_stream room;
    struct nrm__cache *cache;
    if (pool->ops->take_back == NULL) {
        return false;
    }
    struct nrm__slot *slot = nrm__short_enter(pool, &stream, &room, &cache);
    if (slot == NULL) {
        return false;
    }
    bool kept = false;
    if (!nrm__short_is_open(slot)) {
        kept = false;
    }
    else if (!(block->flags & NRM__BLOCK_IN_SLAB)) {
        kept = nrm__short_keep_block(slot, block, stream);
    }
    else {
        kept = nrm__short_keep_cell(slot->magazines, block->record, block->ptr);
    }
    if (kept) {
        nrm__short_count(slot->front, block->nbytes, false);
    }
    nrm__cache_leave(cache);
    return kept;
}

/* Cells consist of whole units: one or two of them are cleared without a call. */
static inline void
nrm__short_zero(void *ptr, size_t nbytes)
{
    if (nbytes <= NRM__SLAB_ALIGNMENT) {
        memset(ptr, 0, NRM__SLAB_ALIGNMENT);
    }
    else if (nbytes <= 2 * NRM__SLAB_ALIGNMENT) {
        memset(ptr, 0, 2 * NRM__SLAB_ALIGNMENT);
    }
    else {
        memset(ptr, 0, nbytes);
    }
}

#endif
