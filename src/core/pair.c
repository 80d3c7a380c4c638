/*
 * Allocation and deallocation as programs call them: the short way where there is one.
 *
 * Each function here handles one case and hands every other on as the last thing it does, so
 * the usual ones call nobody and save no registers: cells without a stream, then blocks
 * without a stream, blocks with one, and what is left. A function that is called "inside"
 * (core/cache.h) leaves.
 */
#include "core/pair.h"

#include "base/bits.h"
#include "base/error.h"
#include "core/short.h"

/* From this size on their owner decides how zeros come about. */
#define ZERO_LONG_NBYTES (4 * NRM__MIB)

/* ---- allocation ---- */

__attribute__((noinline)) static nrm_status
raise_and_leave(struct nrm__cache *cache, const struct nrm__slot *slot)
{
    nrm__short_raise(slot);
    nrm__cache_leave(cache);
    return NRM_OK;
}

__attribute__((always_inline)) static inline nrm_status
count_and_leave(struct nrm__cache *cache, const struct nrm__slot *slot, size_t nbytes,
                bool in)
{
    if (nrm__short_count(slot, nbytes, in)) {
        return raise_and_leave(cache, slot);
    }
    nrm__cache_leave(cache);
    return NRM_OK;
}

/* What is none of the usual cells and blocks; inside. */
__attribute__((noinline)) static nrm_status
allocate_rest(nrm_resource *mr, size_t nbytes, size_t alignment, void **out,
              struct nrm__cache *cache, struct nrm__slot *slot)
{
    void *ptr = nrm__short_allocate(slot, nbytes, alignment, NULL, NULL);
    if (ptr == NULL) {
        nrm__cache_leave(cache);
        return nrm__allocate_long(mr, nbytes, alignment, NULL, 0, out);
    }
    *out = ptr;
    return count_and_leave(cache, slot, nbytes, true);
}

__attribute__((noinline)) static nrm_status
allocate_block(nrm_resource *mr, size_t nbytes, size_t alignment, void **out,
               struct nrm__cache *cache, struct nrm__slot *slot)
{
    if (!nrm__short_is_block(slot, nbytes, alignment, NULL)) {
        return allocate_rest(mr, nbytes, alignment, out, cache, slot);
    }
    void *ptr = nrm__short_take_block(slot->magazines, nbytes, NULL, NULL);
    if (ptr == NULL) {
        nrm__cache_leave(cache);
        return nrm__allocate_long(mr, nbytes, alignment, NULL, 0, out);
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
    if (!nrm__short_is_block(slot, nbytes, alignment, stream)) {
        nrm__cache_leave(cache);
        return allocate_rest_on(mr, nbytes, alignment, stream, out);
    }
    void *ptr = nrm__short_take_block(slot->magazines, nbytes, stream, NULL);
    if (ptr == NULL) {
        nrm__cache_leave(cache);
        return nrm__allocate_long(mr, nbytes, alignment, stream, 0, out);
    }
    *out = ptr;
    return count_and_leave(cache, slot, nbytes, true);
}

/* Small requests without a stream. All else ends the call with another function, so that
   this one saves no registers. */
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

nrm_status
nrm_resource_allocate_zeroed(nrm_resource *mr, size_t nbytes, size_t alignment,
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

/* ---- deallocation ---- */

/* As the functions of the same names above; the segment may be NULL. */
__attribute__((noinline)) static nrm_status
deallocate_rest(nrm_resource *mr, void *ptr, nrm_stream *stream,
                struct nrm__cache *cache, struct nrm__slot *slot,
                const struct nrm__segment *segment)
{
    size_t nbytes = segment != NULL ? nrm__short_claim(slot, segment, ptr, stream) : 0;
    if (nbytes == 0) {
        nrm__cache_leave(cache);
        return nrm__deallocate_long(mr, ptr, stream);
    }
    nrm__short_book_out(slot, nbytes);
    return count_and_leave(cache, slot, nbytes, false);
}

__attribute__((noinline)) static nrm_status
deallocate_block(nrm_resource *mr, void *ptr, struct nrm__cache *cache,
                 struct nrm__slot *slot, const struct nrm__segment *segment)
{
    if (slot->block_limit == 0 || nrm__segment_is_slab(segment)) {
        return deallocate_rest(mr, ptr, NULL, cache, slot, segment);
    }
    size_t nbytes = nrm__short_claim_start(slot, segment, ptr, NULL);
    if (nbytes == 0) {
        nrm__cache_leave(cache);
        return nrm__deallocate_long(mr, ptr, NULL);
    }
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
    const struct nrm__segment *segment = nrm__short_find(slot, ptr);
    size_t nbytes = segment != NULL ? nrm__short_claim(slot, segment, ptr, named) : 0;
    if (nbytes == 0) {
        nrm__cache_leave(cache);
        return nrm__deallocate_long(mr, ptr, stream);
    }
    nrm__short_book_out(slot, nbytes);
    return count_and_leave(cache, slot, nbytes, false);
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
    const struct nrm__segment *segment = nrm__short_find(slot, ptr);
    if (segment == NULL || slot->account != NULL || slot->magazines == NULL ||
        nrm__segment_is_slab(segment)) {
        return deallocate_rest(mr, ptr, stream, cache, slot, segment);
    }
    size_t nbytes = nrm__short_claim_start(slot, segment, ptr, stream);
    if (nbytes == 0) {
        nrm__cache_leave(cache);
        return nrm__deallocate_long(mr, ptr, stream);
    }
    return count_and_leave(cache, slot, nbytes, false);
}

/* As nrm_resource_allocate. */
nrm_status
nrm_resource_deallocate(nrm_resource *mr, void *ptr, size_t nbytes, nrm_stream *stream)
{
    (void)nbytes; /* a hint: what NumPy passes is not always what it asked for */
    struct nrm__cache *cache;
    if (ptr == NULL) {
        return NRM_OK;
    }
    if (stream != NULL) {
        return deallocate_on(mr, ptr, stream);
    }
    struct nrm__slot *slot = nrm__cache_enter_slot(mr, &cache);
    if (slot == NULL) {
        return nrm__deallocate_long(mr, ptr, NULL);
    }
    const struct nrm__segment *segment = nrm__short_find(slot, ptr);
    if (segment == NULL) {
        nrm__cache_leave(cache);
        return nrm__deallocate_long(mr, ptr, NULL);
    }
    bool is_cell = slot->cell_limit != 0 && nrm__segment_is_slab(segment);
    size_t freed = is_cell ? nrm__short_claim_cell(slot->magazines,
                                                   nrm__slab_of_segment(segment), ptr)
                           : 0;
    return freed != 0 ? count_and_leave(cache, slot, freed, false)
                      : deallocate_block(mr, ptr, cache, slot, segment);
}
