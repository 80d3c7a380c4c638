/*
 * Address, also interior → innermost live block.
 *
 * Two tables behind one call. A page table with one entry for 64 KiB leads to the segment
 * of a resource that owns whole pages (a pool, a slab); it is read without a lock and the
 * owner finds the block in its own description. Blocks of sources, and segments that do
 * not fill whole pages, stand in ordered tables: small blocks in shards by page, the
 * others in one. A segment shadows the upstream's block that it lies in.
 */
#ifndef NRM_CORE_BLOCK_MAP_H
#define NRM_CORE_BLOCK_MAP_H

#include "core/ops.h"

#define NRM__MAP_PAGE ((size_t)64 * 1024)

/*
 * A contiguous range that `owner` hands out in blocks. Segments come from and go back to
 * a free list and are never unmapped, so a look-up that races with a removal reads a
 * segment, if perhaps another one.
 */
struct nrm__segment {
    uintptr_t start;
    size_t nbytes;
    nrm_resource *owner;          /* borrowed: it outlives its segments */
    struct nrm__block upstream;   /* the block of the upstream that it lies in */
    struct nrm__segment *shadows; /* the segment that it lies in, or NULL */
    void *extra;                  /* the owner's own; the lowest bit marks a slab's */
    atomic_uint_least64_t
        generation;           /* of contexts, in which the upstream registered it */
    struct nrm__entry *entry; /* in the ordered table; NULL: in the page table */
    struct nrm__link link;    /* in the owner's list */
    atomic_uint readers;      /* look-ups in progress */
    unsigned fork_depth;      /* of the process that made it */
};

/* A segment that describes a range of its owner; not in the map yet. */
nrm_status nrm__segment_create(nrm_resource *owner, void *ptr, size_t nbytes,
                               struct nrm__segment **out);
void nrm__segment_destroy(struct nrm__segment *segment);

/* From now on look-ups in the range lead to the segment's owner. */
nrm_status nrm__block_map_add_segment(struct nrm__segment *segment);

/* Waits for look-ups in progress. Must not be called from find_block or claim_block. */
void nrm__block_map_remove_segment(struct nrm__segment *segment);

/* What the ordered tables hold: a block of a source, or a segment. The entry of a block
   that is retired goes on to the retired list (core/uses.c). */
struct nrm__entry {
    struct nrm__tree_node node;
    struct nrm__entry *below;     /* an older one with the same start */
    struct nrm__segment *segment; /* a segment; NULL: a block */
    struct nrm__block block;
    struct nrm__link link; /* in the retired list */
    uint64_t stamp;        /* there */
};

nrm_status nrm__entry_create(struct nrm__entry **out);
void nrm__entry_destroy(struct nrm__entry *entry);

/* Puts a block of a source into the map; steals `entry` (block->record from then on). */
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
