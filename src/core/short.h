/*
 * The short way of a request: from the resource that was asked straight to the cells and blocks
 * that this thread keeps (core/cache.h), without a lock, a driver call or a wait. Whatever
 * does not fit goes the long way, in core/dispatch.c, the only one that includes this.
 */
#ifndef NRM_CORE_SHORT_H
#define NRM_CORE_SHORT_H

#include <string.h>

#include "core/cache.h"

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
    struct nrm__magazine *magazine = &magazines->classes[nrm__slab_class_index(nbytes)];
    if (magazine->n == 0) {
        return NULL;
    }
    struct nrm__cell cell = magazine->cells[--magazine->n];
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

static inline void *
nrm__short_take_block(struct nrm__slot *slot, size_t nbytes, struct nrm__block *out)
{
    struct nrm__cell cell;
    size_t capacity = nrm__cached_nbytes(nbytes, slot->granule, slot->shift);
    if (!nrm__cache_take_block(slot->magazines, capacity, &cell)) {
        return NULL;
    }
    struct nrm__live *block = cell.record;
    atomic_store_explicit(&block->nbytes, nbytes, memory_order_relaxed);
    atomic_store_explicit(&block->key, (uintptr_t)cell.ptr | NRM__LIVE,
                          memory_order_release);
    if (out != NULL) {
        *out = (struct nrm__block){
            .ptr = cell.ptr,
            .nbytes = nbytes,
            .capacity = capacity,
            .owner = slot->pool,
            .segment = block->segment,
        };
    }
    return cell.ptr;
}

static inline void
nrm__short_count(const struct nrm__slot *slot, size_t nbytes, bool in)
{
    void (*count)(struct nrm__shard *, size_t) = in ? nrm__shard_count_in
                                                    : nrm__shard_count_out;
    count(slot->own, nbytes);
    if (slot->front != slot->own) {
        count(slot->front, nbytes);
    }
}

/* A block without a lock, a driver call or a wait; NULL: not so. */
__attribute__((always_inline)) static inline void *
nrm__short_allocate(nrm_resource *mr, size_t nbytes, struct nrm__block *out)
{
    struct nrm__cache *cache;
    struct nrm__slot *slot = nrm__cache_enter_slot(mr, &cache);
    if (slot == NULL) {
        return NULL;
    }
    void *ptr = NULL;
    if (nbytes <= slot->limit && nrm__short_is_open(slot)) {
        ptr = nbytes <= NRM__SLAB_MAX
                  ? nrm__short_take_cell(slot->magazines, nbytes, out)
                  : nrm__short_take_block(slot, nbytes, out);
    }
    if (ptr != NULL) {
        nrm__short_count(slot, nbytes, true);
    }
    nrm__cache_leave(cache);
    return ptr;
}

static inline bool
nrm__short_has_room_for_cell(const struct nrm__magazines *magazines,
                             const struct nrm__slab *slab)
{
    const struct nrm__magazine *magazine = &magazines->classes[slab->class_index];
    return magazine->n < magazine->capacity;
}

static inline void
nrm__short_keep_cell(struct nrm__magazines *magazines, struct nrm__slab *slab,
                     void *ptr)
{
    struct nrm__magazine *magazine = &magazines->classes[slab->class_index];
    magazine->cells[magazine->n++] = (struct nrm__cell){ptr, slab};
}

/* Claims what starts at an address for this thread to keep; its requested size, or 0: not
   so. */
static inline size_t
nrm__short_claim_cell(struct nrm__magazines *magazines, struct nrm__slab *slab,
                      void *ptr)
{
    uint32_t cell = nrm__slab_cell_of(slab, (uintptr_t)ptr);
    bool starts_here = cell < slab->n_cells &&
                       (uintptr_t)ptr == slab->start + (size_t)cell * slab->cell_nbytes;
    if (!starts_here || !nrm__short_has_room_for_cell(magazines, slab)) {
        return 0;
    }
    bool alone = atomic_load_explicit(&nrm__cache_is_alone, memory_order_acquire);
    size_t nbytes = alone ? nrm__slab_claim_cell_alone(slab, cell)
                          : nrm__slab_claim_cell(slab, cell);
    if (nbytes != 0) {
        nrm__short_keep_cell(magazines, slab, ptr);
    }
    return nbytes;
}

static inline size_t
nrm__short_claim_block(struct nrm__slot *slot, struct nrm__live *block, void *ptr)
{
    size_t capacity = atomic_load_explicit(&block->capacity, memory_order_relaxed);
    uintptr_t live = (uintptr_t)ptr | NRM__LIVE;
    if (((uintptr_t)ptr & NRM__STATE_MASK) != 0 || capacity > slot->limit ||
        atomic_load_explicit(&block->goes_long, memory_order_relaxed) ||
        !nrm__cache_has_room(slot->magazines, capacity)) {
        return 0;
    }
    if (atomic_load_explicit(&nrm__cache_is_alone, memory_order_acquire)) {
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
    nrm__cache_put_block(slot->magazines, capacity, (struct nrm__cell){ptr, block});
    return nbytes;
}

static inline size_t
nrm__short_claim(struct nrm__slot *slot, void *ptr)
{
    struct nrm__segment *segment = nrm__block_map_peek((uintptr_t)ptr);
    if (segment == NULL || segment->owner != slot->pool) {
        return 0;
    }
    if (nrm__segment_is_slab(segment)) {
        return nrm__short_claim_cell(slot->magazines, nrm__slab_of_segment(segment),
                                     ptr);
    }
    struct nrm__live *block =
        segment->extra != NULL ? nrm__starts_find(segment, (uintptr_t)ptr) : NULL;
    return block != NULL ? nrm__short_claim_block(slot, block, ptr) : 0;
}

/* Gives a block back without a lock; false: not so. */
__attribute__((always_inline)) static inline bool
nrm__short_deallocate(nrm_resource *mr, void *ptr)
{
    struct nrm__cache *cache;
    struct nrm__slot *slot = nrm__cache_enter_slot(mr, &cache);
    if (slot == NULL) {
        return false;
    }
    size_t nbytes = 0;
    if (nrm__short_is_open(slot) &&
        atomic_load_explicit(&nrm__map_n_overlay, memory_order_acquire) == 0) {
        nbytes = nrm__short_claim(slot, ptr);
    }
    if (nbytes != 0) {
        nrm__short_count(slot, nbytes, false);
    }
    nrm__cache_leave(cache);
    return nbytes != 0;
}

/* The same for a block that is claimed already, through a pool itself. */
static inline bool
nrm__short_keep_claimed(nrm_resource *pool, const struct nrm__block *block)
{
    struct nrm__cache *cache;
    struct nrm__slot *slot =
        pool->ops->take_back != NULL ? nrm__cache_enter_slot(pool, &cache) : NULL;
    if (slot == NULL) {
        return false;
    }
    bool kept = false;
    if (nrm__short_is_open(slot) && (block->flags & NRM__BLOCK_IN_SLAB)) {
        kept = nrm__short_has_room_for_cell(slot->magazines, block->record);
        if (kept) {
            nrm__short_keep_cell(slot->magazines, block->record, block->ptr);
        }
    }
    if (kept) {
        nrm__shard_count_out(slot->own, block->nbytes);
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
