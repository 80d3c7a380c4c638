/*
 * The shortest way, inline: cells that this thread keeps, for host memory without a
 * stream. Whatever does not fit goes on in core/pair.c, which has what is common to
 * all; NumPy's calls begin here too (python/handler.c), as a call more is a tenth of
 * what they cost.
 */
#ifndef NRM_CORE_CELLS_H
#define NRM_CORE_CELLS_H

#include "core/pair.h"
#include "core/short_give.h"

/* In core/pair.c, inside: raises a shard, counts in those behind it, and leaves.
   Returns what was allocated. */
__attribute__((returns_nonnull)) void *nrm__cells_raise(struct nrm__cache *cache,
                                                        struct nrm__shard *shard,
                                                        size_t nbytes, void *ptr);

/* The same: deallocates what is no such cell. `segment`: that it lies in, or NULL. */
nrm_status nrm__cells_deallocate_other(nrm_resource *mr, void *ptr,
                                       struct nrm__cache *cache, struct nrm__slot *slot,
                                       const struct nrm__segment *segment);

/* Counts one in all shards on the way, and leaves. Returns it. */
__attribute__((always_inline)) static inline void *
nrm__cells_count(struct nrm__cache *cache, const struct nrm__slot *slot, size_t nbytes,
                 void *ptr)
{
    struct nrm__shard *shard = slot->front;
    do {
        if (__builtin_expect(nrm__shard_count_in(shard, nbytes), 0)) {
            return nrm__cells_raise(cache, shard, nbytes, ptr);
        }
        shard = shard->behind;
    } while (shard != NULL);
    nrm__cache_leave(cache);
    return ptr;
}

/* A cell, of any alignment that cells have; NULL: not so, ask for it as usual. */
__attribute__((always_inline)) static inline void *
nrm__cells_allocate(nrm_resource *mr, size_t nbytes)
{
    struct nrm__cache *cache;
    struct nrm__slot *slot =
        nbytes - 1 < NRM__SLAB_MAX ? nrm__cache_enter_slot(mr, &cache) : NULL;
    if (slot == NULL) {
        return NULL;
    }
    void *ptr = nrm__short_is_cell(slot, nbytes, 0)
                    ? nrm__short_take_cell(slot->magazines, nbytes, NULL)
                    : NULL;
    if (ptr == NULL) {
        nrm__cache_leave(cache);
        return NULL;
    }
    return nrm__cells_count(cache, slot, nbytes, ptr);
}

/* As nrm_resource_deallocate without a stream. */
__attribute__((always_inline)) static inline nrm_status
nrm__cells_deallocate(nrm_resource *mr, void *ptr)
{
    struct nrm__cache *cache;
    struct nrm__slot *slot = nrm__cache_enter_slot(mr, &cache);
    if (slot == NULL) {
        return nrm__deallocate_long(mr, ptr, NULL);
    }
    const struct nrm__segment *segment = nrm__short_peek(ptr);
    size_t nbytes = segment != NULL && segment->cells_of == slot->cells_of
                        ? nrm__short_claim_cell(slot->magazines, segment, ptr)
                        : 0;
    if (nbytes == 0) {
        return nrm__cells_deallocate_other(mr, ptr, cache, slot, segment);
    }
    struct nrm__shard *shard = slot->front;
    do {
        nrm__shard_count_cell_out(shard, nbytes);
        shard = shard->behind;
    } while (shard != NULL);
    nrm__cache_leave(cache);
    return NRM_OK;
}

#endif
