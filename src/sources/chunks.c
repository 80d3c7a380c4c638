/*
 * Regions and their chunks. A chunk is a bit of its region: free or not, and of the
 * free ones known to read as zero or not. Chunks are taken from the first region of the
 * list that has one, and full regions stand at its end, so nothing is searched for.
 */
#include "sources/chunks.h"

#include <stdint.h>

#include "base/assert.h"
#include "base/bits.h"
#include "base/error.h"
#include "core/nodes.h"
#include "core/slab.h"
#include "os/memory.h"

#define REGION_CHUNKS 32
#define ALL_CHUNKS UINT32_MAX
#define KEPT_EMPTY 4 /* regions */

_Static_assert(REGION_CHUNKS *NRM__SLAB_CHUNK == NRM__REGION_NBYTES, "one bit a chunk");

struct region {
    struct nrm__link link;
    char *start;
    uint32_t free;
    uint32_t zero; /* of the free ones: those known to read as zero */
};

/* ---- regions ---- */

static nrm_status
create_region(struct nrm__chunks *chunks, struct region **out)
{
    void *start;
    struct region *region = nrm__node_allocate(sizeof *region);
    if (region == NULL) {
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe a region");
    }
    nrm_status status = chunks->map(chunks->owner, &start);
    if (status != NRM_OK) {
        nrm__node_deallocate(region, sizeof *region);
        return status;
    }
    nrm__list_init(&region->link);
    region->start = start;
    region->free = region->zero = ALL_CHUNKS;
    atomic_fetch_add_explicit(&chunks->reserved_nbytes, NRM__REGION_NBYTES,
                              memory_order_relaxed);
    *out = region;
    return NRM_OK;
}

/* `region` is in no list. */
static void
destroy_region(struct nrm__chunks *chunks, struct region *region)
{
    nrm__unmap(region->start, NRM__REGION_NBYTES);
    nrm__node_deallocate(region, sizeof *region);
    atomic_fetch_sub_explicit(&chunks->reserved_nbytes, NRM__REGION_NBYTES,
                              memory_order_relaxed);
}

static void
move_locked(struct nrm__chunks *chunks, struct region *region, bool to_front)
{
    nrm__list_remove(&region->link);
    if (to_front) {
        nrm__list_insert_after(&chunks->regions, &region->link);
    }
    else {
        nrm__list_append(&chunks->regions, &region->link);
    }
}

static struct region *
first_region_locked(struct nrm__chunks *chunks)
{
    if (nrm__list_is_empty(&chunks->regions)) {
        return NULL;
    }
    struct region *region = NRM__CONTAINER(chunks->regions.next, struct region, link);
    return region->free != 0 ? region : NULL;
}

static void
take_chunk_locked(struct nrm__chunks *chunks, struct region *region,
                  struct nrm__block *out)
{
    unsigned index = (unsigned)__builtin_ctz(region->free);
    uint32_t bit = UINT32_C(1) << index;
    chunks->n_empty -= region->free == ALL_CHUNKS;
    out->ptr = region->start + index * NRM__SLAB_CHUNK;
    out->nbytes = out->capacity = NRM__SLAB_CHUNK;
    out->record = region;
    out->flags = (region->zero & bit) != 0 ? NRM__BLOCK_IS_ZERO : 0;
    region->free &= ~bit;
    region->zero &= ~bit;
    if (region->free == 0) {
        move_locked(chunks, region, false);
    }
}

/* Makes the chunks of a mask free. Returns the region when it is empty and one too
   many, unlinked. */
static struct region *
put_mask_locked(struct nrm__chunks *chunks, struct region *region, uint32_t mask,
                bool is_zero)
{
    NRM_ASSERT((region->free & mask) == 0);
    if (region->free == 0) {
        move_locked(chunks, region, true);
    }
    region->free |= mask;
    region->zero |= is_zero ? mask : 0;
    if (region->free != ALL_CHUNKS) {
        return NULL;
    }
    if (chunks->n_empty == KEPT_EMPTY) {
        nrm__list_remove(&region->link);
        return region;
    }
    chunks->n_empty++;
    return NULL;
}

static void
put_mask(struct nrm__chunks *chunks, struct region *region, uint32_t mask, bool is_zero)
{
    nrm__lock_acquire(&chunks->lock);
    struct region *leaving = put_mask_locked(chunks, region, mask, is_zero);
    nrm__lock_release(&chunks->lock);
    if (leaving != NULL) {
        destroy_region(chunks, leaving);
    }
}

/* ---- chunks ---- */

nrm_status
nrm__chunks_get(struct nrm__chunks *chunks, struct nrm__block *out)
{
    nrm__lock_acquire(&chunks->lock);
    struct region *region = first_region_locked(chunks);
    if (region != NULL) {
        take_chunk_locked(chunks, region, out);
    }
    nrm__lock_release(&chunks->lock);
    if (region != NULL) {
        return NRM_OK;
    }
    NRM_TRY(create_region(chunks, &region));
    nrm__lock_acquire(&chunks->lock);
    nrm__list_insert_after(&chunks->regions, &region->link);
    chunks->n_empty++;
    take_chunk_locked(chunks, region, out);
    nrm__lock_release(&chunks->lock);
    return NRM_OK;
}

void
nrm__chunks_put(struct nrm__chunks *chunks, const struct nrm__block *chunk)
{
    struct region *region = chunk->record;
    size_t index = (size_t)((char *)chunk->ptr - region->start) / NRM__SLAB_CHUNK;
    put_mask(chunks, region, UINT32_C(1) << index,
             (chunk->flags & NRM__BLOCK_IS_ZERO) != 0);
}

/* ---- giving memory back ---- */

/* An empty region, unlinked, or NULL: no more than `n_kept` are left. */
static struct region *
take_empty_region(struct nrm__chunks *chunks, size_t n_kept)
{
    struct region *region = NULL;
    nrm__lock_acquire(&chunks->lock);
    if (chunks->n_empty > n_kept) {
        struct nrm__link *link = chunks->regions.next;
        while (NRM__CONTAINER(link, struct region, link)->free != ALL_CHUNKS) {
            link = link->next;
        }
        region = NRM__CONTAINER(link, struct region, link);
        nrm__list_remove(link);
        chunks->n_empty--;
    }
    nrm__lock_release(&chunks->lock);
    return region;
}

/* Takes the free chunks of the first partly used region that hold pages, so that nobody
   else gets them meanwhile; NULL: there are none. */
static struct region *
take_used_chunks(struct nrm__chunks *chunks, uint32_t *out_mask)
{
    struct region *found = NULL;
    nrm__lock_acquire(&chunks->lock);
    for (struct nrm__link *link = chunks->regions.next;
         link != &chunks->regions && found == NULL; link = link->next) {
        struct region *region = NRM__CONTAINER(link, struct region, link);
        *out_mask = region->free & ~region->zero;
        if (*out_mask != 0 && region->free != ALL_CHUNKS) {
            found = region;
        }
    }
    if (found != NULL) {
        found->free &= ~*out_mask;
        if (found->free == 0) {
            move_locked(chunks, found, false);
        }
    }
    nrm__lock_release(&chunks->lock);
    return found;
}

/* Drops the pages of these chunks; true: all of them read as zero now. */
static bool
discard_mask(const struct region *region, uint32_t mask)
{
    bool is_zero = true;
    for (size_t i = 0; i < REGION_CHUNKS; i++) {
        char *chunk = region->start + i * NRM__SLAB_CHUNK;
        if ((mask >> i & 1) != 0 && nrm__discard(chunk, NRM__SLAB_CHUNK) != 0) {
            is_zero = false;
        }
    }
    return is_zero;
}

void
nrm__chunks_trim(struct nrm__chunks *chunks, size_t keep_nbytes, size_t *out_nbytes)
{
    struct region *region;
    uint32_t mask;
    while ((region = take_empty_region(chunks, keep_nbytes / NRM__REGION_NBYTES)) !=
           NULL) {
        destroy_region(chunks, region);
        *out_nbytes += NRM__REGION_NBYTES;
    }
    if (keep_nbytes != 0) {
        return;
    }
    while ((region = take_used_chunks(chunks, &mask)) != NULL) {
        bool is_zero = discard_mask(region, mask);
        put_mask(chunks, region, mask, is_zero);
        if (!is_zero) {
            return; /* the kernel refused: it would again */
        }
        *out_nbytes += (size_t)__builtin_popcount(mask) * NRM__SLAB_CHUNK;
    }
}

/* ---- the set ---- */

void
nrm__chunks_init(struct nrm__chunks *chunks, nrm_resource *owner,
                 nrm_status (*map)(nrm_resource *owner, void **out))
{
    chunks->owner = owner;
    chunks->map = map;
    nrm__lock_init(&chunks->lock, NRM__RANK_SLAB);
    nrm__list_init(&chunks->regions);
    chunks->n_empty = 0;
    atomic_init(&chunks->reserved_nbytes, 0);
}

void
nrm__chunks_finish(struct nrm__chunks *chunks)
{
    size_t nbytes = 0;
    nrm__chunks_trim(chunks, 0, &nbytes);
    NRM_ASSERT(nrm__list_is_empty(&chunks->regions));
    NRM_ASSERT(atomic_load(&chunks->reserved_nbytes) == 0);
    nrm__lock_finish(&chunks->lock);
}

void
nrm__chunks_check(struct nrm__chunks *chunks)
{
    size_t n_empty = 0;
    bool was_full = false;
    nrm__lock_acquire(&chunks->lock);
    for (struct nrm__link *link = chunks->regions.next; link != &chunks->regions;
         link = link->next) {
        const struct region *region = NRM__CONTAINER(link, struct region, link);
        NRM_ASSERT((region->zero & ~region->free) == 0);
        NRM_ASSERT(region->free == 0 || !was_full);
        was_full = region->free == 0;
        n_empty += region->free == ALL_CHUNKS;
    }
    NRM_ASSERT(n_empty == chunks->n_empty && n_empty <= KEPT_EMPTY);
    nrm__lock_release(&chunks->lock);
}
