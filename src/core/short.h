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
static inline void *
nrm__short_take_cell(struct nrm__magazines *magazines, size_t nbytes,
                     struct nrm__block *out)
{
    size_t class = nrm__slab_class_index(nbytes);
    uint32_t n = magazines->classes[class].n;
    if (n == 0) {
        return NULL;
    }
    magazines->classes[class].n = n - 1;
    struct nrm__cell cell = magazines->cells[class][n - 1];
    struct nrm__slab *slab = cell.record;
    nrm__slab_set_live(slab, nrm__slab_cell_of(slab, (uintptr_t)cell.ptr), nbytes);
    if (out != NULL) {
        *out = (struct nrm__block){
            .ptr = cell.ptr,
            .nbytes = nbytes,
            .capacity = slab->cell_nbytes,
            .owner = slab->owner,
            .segment = slab->segment,
            .record = slab,
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

static inline void *
nrm__short_take_block(struct nrm__magazines *magazines, size_t nbytes,
                      const nrm_stream *stream, struct nrm__block *out)
{
    uint64_t key;
    if (!nrm__short_key(magazines, stream, &key)) {
        return NULL;
    }
    size_t capacity = nrm__cached_nbytes(nbytes, magazines->granule, magazines->shift);
    struct nrm__cache_set *set = nrm__cache_set_of(magazines, capacity, key);
    if (set->n == 0 || !nrm__cache_set_is_for(set, capacity, key)) {
        return NULL;
    }
    struct nrm__cell cell = set->cells[set->n - 1];
    struct nrm__live *block = cell.record;
    if (!nrm__short_is_current(magazines, block)) {
        return NULL;
    }
    set->n--;
    magazines->set_nbytes -= capacity;
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

/* Counts a block in the shards of all resources on the way; true: nrm__short_raise is called
   next. */
__attribute__((always_inline)) static inline bool
nrm__short_count(const struct nrm__slot *slot, size_t nbytes, bool in)
{
    struct nrm__shard *shard = slot->front;
    bool raises = false;
    do {
        raises |= in ? nrm__shard_count_in(shard, nbytes)
                     : nrm__shard_count_out(shard, nbytes);
        shard = shard->behind;
    } while (shard != NULL);
    return __builtin_expect(raises, 0);
}

static inline void
nrm__short_raise(const struct nrm__slot *slot)
{
    for (struct nrm__shard *each = slot->front; each != NULL; each = each->behind) {
        nrm__shard_raise(each);
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
    return nbytes - 1 < slot->cell_limit &&
           nrm__short_aligns(slot, alignment, NRM__SLAB_ALIGNMENT) &&
           !atomic_load_explicit(slot->forbidden, memory_order_acquire);
}

/* In the account of a limit on the way; false: it does not fit, and the long way says so. */
static inline bool
nrm__short_book(const struct nrm__slot *slot, size_t nbytes)
{
    size_t allocated;
    struct nrm__account *account = slot->account;
    return account == NULL ||
           nrm__account_book(account, nrm__account_counted(account, nbytes),
                             &allocated);
}

static inline void
nrm__short_book_out(const struct nrm__slot *slot, size_t nbytes)
{
    struct nrm__account *account = slot->account;
    if (account != NULL) {
        nrm__account_book_out(account, nrm__account_counted(account, nbytes));
    }
}

static inline void *
nrm__short_take(struct nrm__magazines *magazines, size_t nbytes,
                const nrm_stream *stream, struct nrm__block *out)
{
    return nbytes <= magazines->cell_limit
               ? nrm__short_take_cell(magazines, nbytes, out)
               : nrm__short_take_block(magazines, nbytes, stream, out);
}

/* Whether it is one for a block that is booked nowhere. */
__attribute__((always_inline)) static inline bool
nrm__short_is_block(const struct nrm__slot *slot, size_t nbytes, size_t alignment,
                    const nrm_stream *stream)
{
    bool fits = stream == NULL
                    ? nbytes <= slot->block_limit
                    : slot->account == NULL && nbytes <= slot->stream_limit &&
                          slot->magazines != NULL;
    return fits && nbytes > slot->cell_limit &&
           nrm__short_aligns(slot, alignment, slot->magazines->alignment) &&
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
    magazines->cells[slab->class_index][n] = (struct nrm__cell){ptr, slab};
    magazine->n = n + 1;
    return true;
}

/* Claims what starts at an address for this thread to keep; its requested size, or 0: not
   so. */
static inline size_t
nrm__short_claim_cell(struct nrm__magazines *magazines, struct nrm__slab *slab,
                      void *ptr)
{
    uint32_t cell = nrm__slab_cell_of(slab, (uintptr_t)ptr);
    struct nrm__magazine *magazine = &magazines->classes[slab->class_index];
    uint32_t n = magazine->n;
    bool starts_here = cell < slab->n_cells &&
                       (uintptr_t)ptr == slab->start + (size_t)cell * slab->cell_nbytes;
    if (!starts_here || n >= magazine->capacity) {
        return 0;
    }
    bool alone =
        atomic_load_explicit(&nrm__cache_common.is_alone, memory_order_acquire);
    size_t nbytes = alone ? nrm__slab_claim_cell_alone(slab, cell)
                          : nrm__slab_claim_cell(slab, cell);
    if (nbytes != 0) {
        magazines->cells[slab->class_index][n] = (struct nrm__cell){ptr, slab};
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

static inline size_t
nrm__short_claim_block(struct nrm__slot *slot, struct nrm__live *block, void *ptr,
                       const nrm_stream *stream)
{
    uint64_t key;
    size_t capacity = atomic_load_explicit(&block->capacity, memory_order_relaxed);
    uintptr_t live = (uintptr_t)ptr | NRM__LIVE;
    struct nrm__cache_set *set =
        nrm__short_set_for(slot, block, capacity, stream, &key);
    if (((uintptr_t)ptr & NRM__STATE_MASK) != 0 || set == NULL) {
        return 0;
    }
    if (atomic_load_explicit(&nrm__cache_common.is_alone, memory_order_acquire)) {
        if (atomic_load_explicit(&block->key, memory_order_acquire) != live) {
            return 0;
        }
        atomic_store_explicit(&block->key, (uintptr_t)ptr, memory_order_relaxed);
    }
    else if (!atomic_compare_exchange_strong_explicit(
                 &block->key, &live, (uintptr_t)ptr, memory_order_acq_rel,
                 memory_order_relaxed)) {
        return 0;
    }
    /* It may have been resized since its capacity was read. */
    if (atomic_load_explicit(&block->capacity, memory_order_relaxed) != capacity) {
        atomic_store_explicit(&block->key, live, memory_order_release);
        return 0;
    }
    size_t nbytes = atomic_load_explicit(&block->nbytes, memory_order_relaxed);
    nrm__cache_put_block(slot->magazines, set, capacity, key,
                         (struct nrm__cell){ptr, block});
    return nbytes;
}

static inline size_t
nrm__short_claim_start(struct nrm__slot *slot, const struct nrm__segment *segment,
                       void *ptr, const nrm_stream *stream)
{
    struct nrm__live *block =
        segment->extra != NULL ? nrm__starts_find(segment, (uintptr_t)ptr) : NULL;
    return block != NULL ? nrm__short_claim_block(slot, block, ptr, stream) : 0;
}

/* The segment of the slot's pool that an address lies in, inside; NULL: the long way has to
   look. */
static inline struct nrm__segment *
nrm__short_find(const struct nrm__slot *slot, const void *ptr)
{
    if (atomic_load_explicit(slot->forbidden, memory_order_acquire) ||
        atomic_load_explicit(&nrm__map_overlay.n, memory_order_acquire) != 0) {
        return NULL;
    }
    struct nrm__segment *segment = nrm__block_map_peek((uintptr_t)ptr);
    return segment != NULL && segment->owner == slot->pool ? segment : NULL;
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
               ? nrm__short_claim_cell(slot->magazines, nrm__slab_of_segment(segment),
                                       ptr)
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
    if (kept && nrm__short_count(slot, block->nbytes, false)) {
        nrm__short_raise(slot);
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
