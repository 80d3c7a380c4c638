/*
 * Allocation and deallocation as programs call them: the short way where there is one.
 *
 * Each function here handles one case and hands every other on as the last thing it
 * does, so the usual ones call nobody and save no registers: cells without a stream,
 * then blocks without a stream, blocks with one, and what is left. A function that is
 * called "inside" (core/cache.h) leaves.
 */
#include "core/pair.h"

#include "base/bits.h"
#include "base/error.h"
#include "core/cells.h"

/* From this size on their owner decides how zeros come about. */
#define ZERO_LONG_NBYTES (4 * NRM__MIB)

/* ---- allocation ---- */

/* Raises a shard, and counts in those behind it. */
__attribute__((noinline)) static nrm_status
raise_and_leave(struct nrm__cache *cache, struct nrm__shard *shard, size_t nbytes,
                bool in)
{
    nrm__shard_raise(shard);
    nrm__short_count(shard->behind, nbytes, in);
    nrm__cache_leave(cache);
    return NRM_OK;
}

void *
nrm__cells_raise(struct nrm__cache *cache, struct nrm__shard *shard, size_t nbytes,
                 void *ptr)
{
    (void)raise_and_leave(cache, shard, nbytes, true);
    return ptr;
}

__attribute__((always_inline)) static inline nrm_status
count_cell_out_and_leave(struct nrm__cache *cache, const struct nrm__slot *slot,
                         size_t nbytes)
{
    struct nrm__shard *shard = slot->front;
    do {
        nrm__shard_count_cell_out(shard, nbytes);
        shard = shard->behind;
    } while (shard != NULL);
    nrm__cache_leave(cache);
    return NRM_OK;
}

/* In the shards of all resources on the way. */
__attribute__((always_inline)) static inline nrm_status
count_and_leave(struct nrm__cache *cache, const struct nrm__slot *slot, size_t nbytes,
                bool in)
{
    struct nrm__shard *shard = slot->front;
    do {
        bool raises = in ? nrm__shard_count_in(shard, nbytes)
                         : nrm__shard_count_out(shard, nbytes);
        if (__builtin_expect(raises, 0)) {
            return raise_and_leave(cache, shard, nbytes, in);
        }
        shard = shard->behind;
    } while (shard != NULL);
    nrm__cache_leave(cache);
    return NRM_OK;
}

/* In a shard of its own, and in those on the way from where it was too large for. */
__attribute__((noinline)) static nrm_status
count_large_and_leave(struct nrm__cache *cache, const struct nrm__slot *slot,
                      const struct nrm__slot *large, size_t nbytes, bool in)
{
    bool raises = in ? nrm__shard_count_in(slot->front, nbytes)
                     : nrm__shard_count_out(slot->front, nbytes);
    if (raises) {
        nrm__shard_raise(slot->front);
    }
    return count_and_leave(cache, large, nbytes, in);
}

/* The slot that serves a request: this one, or that of what is too large for it. */
__attribute__((always_inline)) static inline struct nrm__slot *
slot_for(struct nrm__cache *cache, struct nrm__slot *slot, size_t nbytes)
{
    bool is_large = slot->large != NULL && nbytes > slot->limit;
    return is_large ? nrm__short_large(cache, slot) : slot;
}

/* Whether the thread has parked enough of an epoch for such a request. */
__attribute__((always_inline)) static inline bool
has_enough(const struct nrm__slot *slot, size_t nbytes)
{
    return slot->magazines->parked_nbytes >= nrm__cache_enough_for(slot, nbytes);
}

/* The same of any slot. */
static inline bool
may_end_epoch(const struct nrm__slot *slot, size_t nbytes)
{
    return nbytes <= slot->limit && nrm__short_is_open(slot) &&
           slot->magazines->epoch_nbytes != 0 && has_enough(slot, nbytes);
}

/* What is none of the usual cells and blocks; inside. NULL: none is at hand. */
__attribute__((always_inline)) static inline void *
take_rest(struct nrm__slot *serving, size_t nbytes, size_t alignment)
{
    if (nrm__short_is_parked(serving, nbytes, alignment)) {
        void *ptr = nrm__short_take_parked(serving->magazines, nbytes, NULL);
        if (ptr != NULL) {
            return ptr;
        }
        if (!nrm__cache_is_ripe(serving->magazines)) {
            return nrm__short_take_block(serving->magazines, nbytes, NULL, NULL);
        }
    }
    return nrm__short_allocate(serving, nbytes, alignment, NULL, NULL);
}

/* Whether a block was taken, which then is counted; inside, and outside if it was. */
__attribute__((always_inline)) static inline bool
try_rest(size_t nbytes, size_t alignment, void **out, struct nrm__cache *cache,
         const struct nrm__slot *slot, struct nrm__slot *serving)
{
    void *ptr = serving != NULL ? take_rest(serving, nbytes, alignment) : NULL;
    if (ptr == NULL) {
        return false;
    }
    *out = ptr;
    (void)(serving == slot ? count_and_leave(cache, slot, nbytes, true)
                           : count_large_and_leave(cache, slot, serving, nbytes, true));
    return true;
}

/* With one more epoch closed what this thread has parked may be done. */
__attribute__((noinline)) static nrm_status
allocate_after_epoch(nrm_resource *mr, size_t nbytes, size_t alignment, void **out,
                     struct nrm__cache *cache, const struct nrm__slot *parking)
{
    bool more = nrm__cache_end_epoch(cache, parking->magazines,
                                     nrm__cache_enough_for(parking, nbytes));
    struct nrm__slot *slot = more ? nrm__cache_enter_slot(mr, &cache) : NULL;
    if (slot != NULL) {
        struct nrm__slot *serving = slot_for(cache, slot, nbytes);
        if (try_rest(nbytes, alignment, out, cache, slot, serving)) {
            return NRM_OK;
        }
        nrm__cache_leave(cache);
    }
    return nrm__allocate_long(mr, nbytes, alignment, NULL, 0, out);
}

__attribute__((noinline)) static nrm_status
allocate_rest(nrm_resource *mr, size_t nbytes, size_t alignment, void **out,
              struct nrm__cache *cache, struct nrm__slot *slot)
{
    struct nrm__slot *serving = slot_for(cache, slot, nbytes);
    if (try_rest(nbytes, alignment, out, cache, slot, serving)) {
        return NRM_OK;
    }
    if (serving != NULL && may_end_epoch(serving, nbytes)) {
        return allocate_after_epoch(mr, nbytes, alignment, out, cache, serving);
    }
    nrm__cache_leave(cache);
    return nrm__allocate_long(mr, nbytes, alignment, NULL, 0, out);
}

/* What is parked first of all. */
__attribute__((noinline)) static void *
take_parked_or_kept(struct nrm__magazines *magazines, size_t nbytes)
{
    return nrm__short_take(magazines, nbytes, NULL, NULL);
}

/* Mostly of a pool that parks what is freed. */
__attribute__((noinline)) static nrm_status
allocate_large(nrm_resource *mr, size_t nbytes, size_t alignment, void **out,
               struct nrm__cache *cache, struct nrm__slot *slot)
{
    struct nrm__slot *large = nrm__short_large(cache, slot);
    void *ptr = large != NULL && nrm__short_is_parked(large, nbytes, alignment)
                    ? nrm__short_take_parked(large->magazines, nbytes, NULL)
                    : NULL;
    if (ptr == NULL) {
        return allocate_rest(mr, nbytes, alignment, out, cache, slot);
    }
    *out = ptr;
    return count_large_and_leave(cache, slot, large, nbytes, true);
}

/* Booked in an account: blocks, and cells. */
__attribute__((noinline)) static nrm_status
allocate_booked_block(nrm_resource *mr, size_t nbytes, size_t alignment, void **out,
                      struct nrm__cache *cache, struct nrm__slot *slot)
{
    if (!nrm__short_is_booked(slot, nbytes, alignment) ||
        nbytes <= slot->magazines->cell_limit || !nrm__short_book(slot, nbytes)) {
        return allocate_rest(mr, nbytes, alignment, out, cache, slot);
    }
    void *ptr = __builtin_expect(slot->magazines->n_parked != 0, 0)
                    ? take_parked_or_kept(slot->magazines, nbytes)
                    : nrm__short_take_block(slot->magazines, nbytes, NULL, NULL);
    if (ptr == NULL) {
        nrm__short_book_out(slot, nbytes);
        nrm__cache_leave(cache);
        return nrm__allocate_long(mr, nbytes, alignment, NULL, 0, out);
    }
    *out = ptr;
    return count_and_leave(cache, slot, nbytes, true);
}

__attribute__((noinline)) static nrm_status
allocate_booked(nrm_resource *mr, size_t nbytes, size_t alignment, void **out,
                struct nrm__cache *cache, struct nrm__slot *slot)
{
    if (!nrm__short_is_booked(slot, nbytes, alignment) ||
        nbytes > slot->magazines->cell_limit || !nrm__short_book(slot, nbytes)) {
        return allocate_booked_block(mr, nbytes, alignment, out, cache, slot);
    }
    void *ptr = nrm__short_take_cell(slot->magazines, nbytes, NULL);
    if (ptr == NULL) {
        nrm__short_book_out(slot, nbytes);
        nrm__cache_leave(cache);
        return nrm__allocate_long(mr, nbytes, alignment, NULL, 0, out);
    }
    *out = ptr;
    return count_and_leave(cache, slot, nbytes, true);
}

/* Of a pool that parks what is freed. */
__attribute__((noinline)) static nrm_status
allocate_parked(nrm_resource *mr, size_t nbytes, size_t alignment, void **out,
                struct nrm__cache *cache, struct nrm__slot *slot)
{
    if (!nrm__short_is_parked(slot, nbytes, alignment)) {
        return allocate_rest(mr, nbytes, alignment, out, cache, slot);
    }
    void *ptr = nrm__short_take_parked(slot->magazines, nbytes, NULL);
    if (ptr == NULL) {
        return allocate_rest(mr, nbytes, alignment, out, cache, slot);
    }
    *out = ptr;
    return count_and_leave(cache, slot, nbytes, true);
}

__attribute__((noinline)) static nrm_status
allocate_block(nrm_resource *mr, size_t nbytes, size_t alignment, void **out,
               struct nrm__cache *cache, struct nrm__slot *slot)
{
    if (slot->account != NULL) {
        return allocate_booked(mr, nbytes, alignment, out, cache, slot);
    }
    void *ptr = nrm__short_is_block(slot, nbytes, alignment)
                    ? nrm__short_take_block(slot->magazines, nbytes, NULL, NULL)
                    : NULL;
    if (ptr == NULL && slot->parks) {
        return allocate_parked(mr, nbytes, alignment, out, cache, slot);
    }
    if (ptr == NULL) {
        return slot->large != NULL && nbytes > slot->limit
                   ? allocate_large(mr, nbytes, alignment, out, cache, slot)
                   : allocate_rest(mr, nbytes, alignment, out, cache, slot);
    }
    *out = ptr;
    return count_and_leave(cache, slot, nbytes, true);
}

/* The same with a stream. */
__attribute__((noinline)) static nrm_status
allocate_rest_on(nrm_resource *mr, size_t nbytes, size_t alignment, nrm_stream *stream,
                 void **out)
{
    struct nrm__cache *cache;
    struct nrm__slot *slot = nrm__cache_enter_slot(mr, &cache);
    if (slot == NULL) {
        return nrm__allocate_long(mr, nbytes, alignment, stream, 0, out);
    }
    void *ptr = nrm__short_allocate(slot, nbytes, alignment, stream, NULL);
    if (ptr == NULL) {
        nrm__cache_leave(cache);
        return nrm__allocate_long(mr, nbytes, alignment, stream, 0, out);
    }
    *out = ptr;
    return count_and_leave(cache, slot, nbytes, true);
}

/* On a stream of others, which the driver is asked about first. */
__attribute__((noinline)) static nrm_status
allocate_on_other(nrm_resource *mr, size_t nbytes, size_t alignment, nrm_stream *stream,
                  void **out)
{
    nrm_stream room;
    struct nrm__cache *cache;
    const nrm_stream *named = stream;
    struct nrm__slot *slot = nrm__short_enter(mr, &named, &room, &cache);
    if (slot == NULL) {
        return nrm__allocate_long(mr, nbytes, alignment, stream, 0, out);
    }
    void *ptr = nrm__short_allocate(slot, nbytes, alignment, named, NULL);
    if (ptr == NULL) {
        nrm__cache_leave(cache);
        return nrm__allocate_long(mr, nbytes, alignment, stream, 0, out);
    }
    *out = ptr;
    return count_and_leave(cache, slot, nbytes, true);
}

__attribute__((noinline)) static nrm_status
allocate_on(nrm_resource *mr, size_t nbytes, size_t alignment, nrm_stream *stream,
            void **out)
{
    struct nrm__cache *cache;
    if (!nrm__stream_stays(stream)) {
        return allocate_on_other(mr, nbytes, alignment, stream, out);
    }
    struct nrm__slot *slot = nrm__cache_enter_slot(mr, &cache);
    if (slot == NULL) {
        return nrm__allocate_long(mr, nbytes, alignment, stream, 0, out);
    }
    void *ptr = nrm__short_is_block_on(slot, nbytes, alignment)
                    ? nrm__short_take_block(slot->magazines, nbytes, stream, NULL)
                    : NULL;
    if (ptr == NULL) {
        nrm__cache_leave(cache);
        return allocate_rest_on(mr, nbytes, alignment, stream, out);
    }
    *out = ptr;
    return count_and_leave(cache, slot, nbytes, true);
}

/* Small requests without a stream. All else ends the call with another function, so
   that this one saves no registers. */
nrm_status
nrm_resource_allocate(nrm_resource *mr, size_t nbytes, size_t alignment,
                      nrm_stream *stream, void **out)
{
    struct nrm__cache *cache;
    if (stream != NULL) {
        return allocate_on(mr, nbytes, alignment, stream, out);
    }
    struct nrm__slot *slot = nrm__cache_enter_slot(mr, &cache);
    if (slot == NULL) {
        return nrm__allocate_long(mr, nbytes, alignment, NULL, 0, out);
    }
    void *ptr = nrm__short_is_cell(slot, nbytes, alignment)
                    ? nrm__short_take_cell(slot->magazines, nbytes, NULL)
                    : NULL;
    if (ptr == NULL) {
        return allocate_block(mr, nbytes, alignment, out, cache, slot);
    }
    *out = ptr;
    return count_and_leave(cache, slot, nbytes, true);
}

/* False: there is no short way for this one. */
static bool
allocate_short_zeroed(nrm_resource *mr, size_t nbytes, size_t alignment,
                      nrm_stream *stream, void **out)
{
    struct nrm__cache *cache;
    struct nrm__slot *slot =
        nbytes < ZERO_LONG_NBYTES ? nrm__cache_enter_slot(mr, &cache) : NULL;
    if (slot == NULL) {
        return false;
    }
    if (stream == NULL) {
        struct nrm__slot *serving = slot_for(cache, slot, nbytes);
        if (!try_rest(nbytes, alignment, out, cache, slot, serving)) {
            nrm__cache_leave(cache);
            return false;
        }
        nrm__short_zero(*out, nbytes);
        return true;
    }
    void *ptr = nrm__short_allocate(slot, nbytes, alignment, stream, NULL);
    if (ptr == NULL) {
        nrm__cache_leave(cache);
        return false;
    }
    (void)count_and_leave(cache, slot, nbytes, true);
    nrm__short_zero(ptr, nbytes);
    *out = ptr;
    return true;
}

/* What is none of the usual cells, from outside. */
__attribute__((noinline)) static nrm_status
allocate_zeroed_rest(nrm_resource *mr, size_t nbytes, size_t alignment,
                     nrm_stream *stream, void **out)
{
    if (!nrm_kind_is_host_accessible(mr->kind)) {
        return nrm__error(NRM_NOT_SUPPORTED, "%s memory cannot be zeroed from the host",
                          nrm_kind_name(mr->kind));
    }
    return allocate_short_zeroed(mr, nbytes, alignment, stream, out)
               ? NRM_OK
               : nrm__allocate_long(mr, nbytes, alignment, stream, NRM__REQUEST_ZEROED,
                                    out);
}

/* Cells are memory of the host. */
nrm_status
nrm_resource_allocate_zeroed(nrm_resource *mr, size_t nbytes, size_t alignment,
                             nrm_stream *stream, void **out)
{
    struct nrm__cache *cache;
    struct nrm__slot *slot = stream == NULL ? nrm__cache_enter_slot(mr, &cache) : NULL;
    if (slot == NULL) {
        return allocate_zeroed_rest(mr, nbytes, alignment, stream, out);
    }
    void *ptr = nrm__short_is_cell(slot, nbytes, alignment)
                    ? nrm__short_take_cell(slot->magazines, nbytes, NULL)
                    : NULL;
    if (ptr == NULL) {
        nrm__cache_leave(cache);
        return allocate_zeroed_rest(mr, nbytes, alignment, stream, out);
    }
    *out = ptr;
    nrm_status status = count_and_leave(cache, slot, nbytes, true);
    nrm__short_zero(ptr, nbytes);
    return status;
}

/* ---- deallocation ---- */

/* As the functions of the same names above; the segment may be NULL. */
__attribute__((noinline)) static nrm_status
deallocate_large_rest(nrm_resource *mr, void *ptr, struct nrm__cache *cache,
                      struct nrm__slot *slot, const struct nrm__segment *segment)
{
    struct nrm__slot *large = nrm__short_large(cache, slot);
    size_t nbytes = large != NULL && nrm__short_is_of(large, segment)
                        ? nrm__short_claim(large, segment, ptr, NULL)
                        : 0;
    if (nbytes == 0) {
        nrm__cache_leave(cache);
        return nrm__deallocate_long(mr, ptr, NULL);
    }
    nrm__short_book_out(large, nbytes);
    return count_large_and_leave(cache, slot, large, nbytes, false);
}

/* Mostly of a pool that parks it. */
__attribute__((noinline)) static nrm_status
deallocate_large(nrm_resource *mr, void *ptr, struct nrm__cache *cache,
                 struct nrm__slot *slot, const struct nrm__segment *segment)
{
    struct nrm__slot *large = nrm__short_large(cache, slot);
    struct nrm__live *block =
        large != NULL && large->parks ? nrm__short_start_of(large, segment, ptr) : NULL;
    size_t nbytes = block != NULL ? nrm__short_claim_parked(large, block, ptr) : 0;
    return nbytes != 0 ? count_large_and_leave(cache, slot, large, nbytes, false)
                       : deallocate_large_rest(mr, ptr, cache, slot, segment);
}

__attribute__((noinline)) static nrm_status
deallocate_rest(nrm_resource *mr, void *ptr, nrm_stream *stream,
                struct nrm__cache *cache, struct nrm__slot *slot,
                const struct nrm__segment *segment)
{
    if (slot->large != NULL && stream == NULL && segment != NULL &&
        segment->owner != slot->pool) {
        return deallocate_large(mr, ptr, cache, slot, segment);
    }
    size_t nbytes = nrm__short_is_of(slot, segment)
                        ? nrm__short_claim(slot, segment, ptr, stream)
                        : 0;
    if (nbytes == 0) {
        nrm__cache_leave(cache);
        return nrm__deallocate_long(mr, ptr, stream);
    }
    nrm__short_book_out(slot, nbytes);
    return count_and_leave(cache, slot, nbytes, false);
}

/* Out of an account. */
__attribute__((noinline)) static nrm_status
deallocate_booked_block(nrm_resource *mr, void *ptr, struct nrm__cache *cache,
                        struct nrm__slot *slot, const struct nrm__segment *segment)
{
    bool keeps = slot->magazines != NULL && slot->limit != 0 &&
                 slot->magazines->epoch_nbytes == 0;
    struct nrm__live *block = keeps ? nrm__short_start_of(slot, segment, ptr) : NULL;
    size_t nbytes = block != NULL
                        ? nrm__short_claim_same(slot->magazines, block, ptr, false, 0)
                        : 0;
    if (nbytes == 0) {
        return deallocate_rest(mr, ptr, NULL, cache, slot, segment);
    }
    nrm__short_book_out(slot, nbytes);
    return count_and_leave(cache, slot, nbytes, false);
}

__attribute__((noinline)) static nrm_status
deallocate_on_other(nrm_resource *mr, void *ptr, nrm_stream *stream)
{
    nrm_stream room;
    struct nrm__cache *cache;
    const nrm_stream *named = stream;
    struct nrm__slot *slot = nrm__short_enter(mr, &named, &room, &cache);
    if (slot == NULL) {
        return nrm__deallocate_long(mr, ptr, stream);
    }
    const struct nrm__segment *segment = nrm__short_peek(ptr);
    size_t nbytes = nrm__short_is_of(slot, segment)
                        ? nrm__short_claim(slot, segment, ptr, named)
                        : 0;
    if (nbytes == 0) {
        nrm__cache_leave(cache);
        return nrm__deallocate_long(mr, ptr, stream);
    }
    nrm__short_book_out(slot, nbytes);
    return count_and_leave(cache, slot, nbytes, false);
}

__attribute__((noinline)) static nrm_status
deallocate_booked(nrm_resource *mr, void *ptr, struct nrm__cache *cache,
                  struct nrm__slot *slot, const struct nrm__segment *segment)
{
    bool is_cell = segment != NULL && segment->cells_of == slot->pool &&
                   slot->magazines != NULL &&
                   !atomic_load_explicit(slot->forbidden, memory_order_acquire);
    size_t nbytes = is_cell ? nrm__short_claim_cell(slot->magazines, segment, ptr) : 0;
    if (nbytes == 0) {
        return deallocate_booked_block(mr, ptr, cache, slot, segment);
    }
    nrm__short_book_out(slot, nbytes);
    return count_cell_out_and_leave(cache, slot, nbytes);
}

/* Of a pool that parks it. */
__attribute__((noinline)) static nrm_status
deallocate_parked(nrm_resource *mr, void *ptr, struct nrm__cache *cache,
                  struct nrm__slot *slot, const struct nrm__segment *segment)
{
    struct nrm__live *block = nrm__short_start_of(slot, segment, ptr);
    size_t nbytes = block != NULL ? nrm__short_claim_parked(slot, block, ptr) : 0;
    return nbytes != 0 ? count_and_leave(cache, slot, nbytes, false)
                       : deallocate_rest(mr, ptr, NULL, cache, slot, segment);
}

nrm_status
nrm__cells_deallocate_other(nrm_resource *mr, void *ptr, struct nrm__cache *cache,
                            struct nrm__slot *slot, const struct nrm__segment *segment)
{
    if (slot->account != NULL) {
        return deallocate_booked(mr, ptr, cache, slot, segment);
    }
    if (slot->parks) {
        return deallocate_parked(mr, ptr, cache, slot, segment);
    }
    if (slot->large != NULL && segment != NULL && segment->owner != slot->pool) {
        return deallocate_large(mr, ptr, cache, slot, segment);
    }
    struct nrm__live *block =
        slot->block_sizes != 0 ? nrm__short_start_of(slot, segment, ptr) : NULL;
    size_t nbytes = block != NULL
                        ? nrm__short_claim_same(slot->magazines, block, ptr, false, 0)
                        : 0;
    return nbytes != 0 ? count_and_leave(cache, slot, nbytes, false)
                       : deallocate_rest(mr, ptr, NULL, cache, slot, segment);
}

__attribute__((noinline)) static nrm_status
deallocate_on(nrm_resource *mr, void *ptr, nrm_stream *stream)
{
    struct nrm__cache *cache;
    if (!nrm__stream_stays(stream)) {
        return deallocate_on_other(mr, ptr, stream);
    }
    struct nrm__slot *slot = nrm__cache_enter_slot(mr, &cache);
    if (slot == NULL) {
        return nrm__deallocate_long(mr, ptr, stream);
    }
    const struct nrm__segment *segment = nrm__short_peek(ptr);
    struct nrm__live *block =
        slot->stream_sizes != 0 ? nrm__short_start_of(slot, segment, ptr) : NULL;
    uint64_t key;
    size_t nbytes = block != NULL && nrm__short_key(slot->magazines, stream, &key)
                        ? nrm__short_claim_same(slot->magazines, block, ptr, true, key)
                        : 0;
    return nbytes != 0 ? count_and_leave(cache, slot, nbytes, false)
                       : deallocate_rest(mr, ptr, stream, cache, slot, segment);
}

/* As nrm_resource_allocate. */
nrm_status
nrm_resource_deallocate(nrm_resource *mr, void *ptr, size_t nbytes, nrm_stream *stream)
{
    (void)nbytes; /* a hint: what NumPy passes is not always what it asked for */
    return stream != NULL ? deallocate_on(mr, ptr, stream)
                          : nrm__cells_deallocate(mr, ptr);
}
