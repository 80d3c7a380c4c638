/*
 * The short way of a request: from the resource that was asked straight to the cells
 * and blocks that this thread keeps (core/cache.h), without a lock, a driver call or a
 * wait. Whatever does not fit goes the long way, in core/dispatch.c. The way back is in
 * core/short_give.h.
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
 * As nrm__cache_enter_slot, for a stream that may be of others: where blocks are kept
 * by stream the driver is asked for its number, outside, and *stream becomes `room`,
 * which stands for it until the cache is left. Without a number, or a slot, it stays
 * what it was, and has no key.
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

/* Whose block this is going to be, or was: see nrm__cache_set. False: it must be
   ordered with work that has no key. Inside, so the thread has a state. */
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

/* Whether a block can be handed out as it is, with no context reset since it was
   made. */
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

/* In the account of a limit on the way; false: it does not fit, and the long way says
   so. */
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
