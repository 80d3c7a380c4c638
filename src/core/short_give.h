/*
 * The way back of the short way: what a thread frees is claimed, so that it is given
 * back once, and kept or parked for the next request of its size. core/short.h has the
 * way there.
 */
#ifndef NRM_CORE_SHORT_GIVE_H
#define NRM_CORE_SHORT_GIVE_H

#include "core/short.h"

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

/* Claims a block whose capacity was read before; false: it is not live, or has been
   resized since. */
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

/* Into the set that a block was taken from last, as where it goes is known then before
   the block is, or the one that it was in itself, if that is of its size and stream;
   its requested size, or 0: not so. Sets that have one key for all need not be asked
   for it. */
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

/* Whether a block may be parked, if there is room. */
static inline bool
nrm__short_parks(const struct nrm__slot *slot, const struct nrm__live *block,
                 size_t capacity)
{
    return capacity <= slot->limit &&
           !atomic_load_explicit(&block->goes_long, memory_order_relaxed);
}

/* Whether there is; what is done makes some. */
static inline bool
nrm__short_make_room(struct nrm__magazines *magazines)
{
    return nrm__cache_may_park(magazines) ||
           (nrm__cache_ripen(magazines) && nrm__cache_may_park(magazines));
}

/* Claims it for this thread to park, if there is room; its requested size, or 0: not
   so. */
__attribute__((always_inline)) static inline size_t
nrm__short_claim_parked(const struct nrm__slot *slot, struct nrm__live *block,
                        void *ptr)
{
    size_t capacity = atomic_load_explicit(&block->capacity, memory_order_relaxed);
    if (!nrm__short_parks(slot, block, capacity) ||
        !nrm__cache_may_park(slot->magazines) ||
        !nrm__short_claim_live(block, ptr, capacity)) {
        return 0;
    }
    size_t nbytes = atomic_load_explicit(&block->nbytes, memory_order_relaxed);
    nrm__cache_park(slot->magazines, block, ptr, capacity); /* it is stamped claimed */
    if (nbytes == 0) {
        __builtin_unreachable(); /* so nobody need ask again */
    }
    return nbytes;
}

static inline size_t
nrm__short_claim_block(struct nrm__slot *slot, struct nrm__live *block, void *ptr,
                       const nrm_stream *stream)
{
    uint64_t key;
    if (slot->magazines->epoch_nbytes != 0) {
        return stream == NULL && nrm__short_make_room(slot->magazines)
                   ? nrm__short_claim_parked(slot, block, ptr)
                   : 0;
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

/* The block that starts in the granule of an address, of a segment that is no
   slab's. */
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

/* Takes what starts at an address of the segment back, inside; its requested size, or
   0: not so. */
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
        if (stream != NULL || !nrm__short_parks(slot, live, capacity) ||
            !nrm__short_make_room(slot->magazines)) {
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

#endif
