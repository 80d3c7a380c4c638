/*
 * Address, also interior → innermost live block.
 *
 * Two tables behind one call. A page table with one entry for 64 KiB leads to the
 * segment of a resource that owns whole pages (a pool, a slab); it is read without a
 * lock and the owner finds the block in its own description. Blocks of sources, and
 * segments that do not fill whole pages, stand in ordered tables: small blocks in
 * shards by page, the others in one. A segment shadows the upstream's block that it
 * lies in.
 */
#ifndef NRM_CORE_BLOCK_MAP_H
#define NRM_CORE_BLOCK_MAP_H

#include "base/hidden.h"
#include "core/ops.h"

#define NRM__MAP_PAGE ((size_t)64 * 1024)
#define NRM__MAP_PAGE_SHIFT 16
#define NRM__MAP_LEAF_BITS 16
#define NRM__MAP_LEAF_PAGES ((size_t)1 << NRM__MAP_LEAF_BITS)
#define NRM__MAP_N_LEAVES ((size_t)1 << (48 - NRM__MAP_PAGE_SHIFT - NRM__MAP_LEAF_BITS))

/* What stands first in a pool's description of a block. */
struct nrm__live {
    atomic_uintptr_t key; /* address of the block | NRM__LIVE or another state */
    atomic_size_t nbytes; /* as requested, of a live one */
    atomic_size_t capacity;
    struct nrm__segment *segment;
    /* Not 0: back to its owner, never kept by a thread. Either of the next two. */
    atomic_uint_least8_t goes_long;
    /* The set of a thread that it was kept in last (core/cache.h): a guess, where it
       may be kept again. */
    atomic_uint_least8_t set;
};

enum {
    NRM__GOES_LONG_OWNER = 1,   /* as its owner wants it: true */
    NRM__GOES_LONG_COUNTED = 2, /* a scope counts it: core/scopes.h */
};

/* Of the key: the block may be found and claimed, by changing it. Other states are the
   owner's. Addresses are multiples of 64. */
#define NRM__LIVE ((uintptr_t)1)
#define NRM__STATE_MASK ((uintptr_t)63)

/* Where the blocks of a segment start: one entry for each of its granules. */
struct nrm__starts {
    unsigned shift;  /* of a granule */
    unsigned colour; /* bytes by which the owner may shift a block that fills it all */
    size_t n;
    _Atomic(struct nrm__live *) blocks[];
};

/*
 * A contiguous range that `owner` hands out in blocks. Segments come from and go back
 * to a free list and are never unmapped, so a look-up that races with a removal reads a
 * segment, if perhaps another one.
 */
struct nrm__segment {
    /* All that the short way reads, in one line (core/short.h). */
    _Alignas(64) uintptr_t start;
    nrm_resource *owner; /* borrowed: it outlives its segments */
    void *extra; /* a slab's, with the lowest bit set; else a nrm__starts, or NULL */
    nrm_resource *blocks_of; /* the owner, if `extra` is a nrm__starts; else NULL */
    nrm_resource *cells_of;  /* the owner of a slab's; else NULL, as the next four */
    atomic_uint_least16_t *sizes; /* as those of the slab */
    uint32_t cell_nbytes, reciprocal;
    uint32_t magazine; /* offset of the cells' in nrm__magazines */
    unsigned node;     /* a pool's: whose threads have it first */
    size_t nbytes;
    struct nrm__block upstream;   /* the block of the upstream that it lies in */
    struct nrm__segment *shadows; /* the segment that it lies in, or NULL */
    atomic_uint_least64_t
        generation;           /* of contexts, in which the upstream registered it */
    struct nrm__entry *entry; /* in the ordered table; NULL: in the page table */
    struct nrm__link link;    /* in the owner's list */
    unsigned fork_depth;      /* of the process that made it */
    atomic_uint readers;      /* look-ups in progress */
};

/* A segment that describes a range of its owner; not in the map yet. */
nrm_status nrm__segment_create(nrm_resource *owner, void *ptr, size_t nbytes,
                               struct nrm__segment **out);
void nrm__segment_destroy(struct nrm__segment *segment);

/* From now on look-ups in the range lead to the segment's owner. */
nrm_status nrm__block_map_add_segment(struct nrm__segment *segment);

/* Waits for look-ups in progress. Must not be called from find_block or claim_block. */
void nrm__block_map_remove_segment(struct nrm__segment *segment);

/* The segment of a page, unless it is known to lie elsewhere only; NULL: none. Whoever
   reads more of it than its address sees to it that it stays: nrm__cache_enter. */
typedef _Atomic(struct nrm__segment *) nrm__page_entry;
extern _Atomic(nrm__page_entry *) nrm__map_leaves[NRM__MAP_N_LEAVES] NRM__HIDDEN;
extern struct nrm__map_overlay {
    _Alignas(64) atomic_size_t n; /* ranges that no page names; read all the time */
} nrm__map_overlay NRM__HIDDEN;

static inline struct nrm__segment *
nrm__block_map_peek(uintptr_t address)
{
    size_t page = address >> NRM__MAP_PAGE_SHIFT;
    /* Of more than 48 bits: that of another address, which the caller sees by its
       start. */
    size_t i = page >> NRM__MAP_LEAF_BITS & (NRM__MAP_N_LEAVES - 1);
    nrm__page_entry *leaf =
        atomic_load_explicit(&nrm__map_leaves[i], memory_order_acquire);
    return leaf != NULL ? atomic_load_explicit(&leaf[page & (NRM__MAP_LEAF_PAGES - 1)],
                                               memory_order_acquire)
                        : NULL;
}

/* The block that starts in the granule of an address; NULL: none does. */
static inline struct nrm__live *
nrm__starts_find(const struct nrm__segment *segment, uintptr_t address)
{
    const struct nrm__starts *starts = segment->extra;
    size_t granule = (address - segment->start) >> starts->shift;
    return granule < starts->n
               ? atomic_load_explicit(&starts->blocks[granule], memory_order_acquire)
               : NULL;
}

/* What the ordered tables hold: a block of a source, or a segment. The entry of a block
   that is retired goes on to the retired list (core/uses.c). */
struct nrm__entry {
    struct nrm__tree_node node;
    struct nrm__entry *below; /* an older one with the same start */
    struct nrm__entry *outer; /* in the overlay: what it lies in, that starts before */
    struct nrm__segment *segment; /* a segment; NULL: a block */
    struct nrm__block block;
    struct nrm__link link; /* in the retired list */
    uint64_t stamp;        /* there */
    struct nrm__use *uses; /* there: what it also waits for, owned; or NULL */
};

nrm_status nrm__entry_create(struct nrm__entry **out);
void nrm__entry_destroy(struct nrm__entry *entry);

/* Puts a block of a source into the map; steals `entry` (block->record from then
   on). */
void nrm__block_map_insert(struct nrm__entry *entry, struct nrm__block *block);

/*
 * The innermost live block around `ptr`. Its owner is retained: the caller releases it.
 */
bool nrm__block_map_find(const void *ptr, struct nrm__block *out);

/* Claims a block found before: true for one caller only. It leaves the map. */
bool nrm__block_map_claim(struct nrm__block *block);

/* Puts a claimed block back, with its new ptr, nbytes and capacity. */
void nrm__block_map_unclaim(struct nrm__block *block);

/* The block is gone for good (after claim): frees its entry. */
void nrm__block_map_forget(const struct nrm__block *block);

#endif
