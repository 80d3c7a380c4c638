/*
 * Address of a block → by whom and when it was allocated, for blocks that were
 * allocated while a scope counted (core/scopes.h); 0: none did. Kept apart from the
 * blocks, so that it is the same for every resource, and those that nobody counts cost
 * nothing. Who allocates a block, or has claimed it, reads and writes its tag. Blocks
 * start at multiples of 64; of two nearer ones, which a callback may hand out, the
 * later tag holds for both.
 */
#ifndef NRM_CORE_SCOPE_TAGS_H
#define NRM_CORE_SCOPE_TAGS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/hidden.h"

#define NRM__TAG_SHIFT 6        /* one tag for so many bytes */
#define NRM__TAG_LEAF_SHIFT 20  /* a leaf for so many */
#define NRM__TAG_TABLE_SHIFT 32 /* a table of leaves */
#define NRM__TAG_ADDRESS_BITS 48
#define NRM__TAG_LEAF_TAGS ((size_t)1 << (NRM__TAG_LEAF_SHIFT - NRM__TAG_SHIFT))
#define NRM__TAG_TABLE_LEAVES                                                          \
    ((size_t)1 << (NRM__TAG_TABLE_SHIFT - NRM__TAG_LEAF_SHIFT))
#define NRM__TAG_TABLES ((size_t)1 << (NRM__TAG_ADDRESS_BITS - NRM__TAG_TABLE_SHIFT))

struct nrm__tag_leaf {
    atomic_uint_least64_t tags[NRM__TAG_LEAF_TAGS];
};

struct nrm__tag_table {
    _Atomic(struct nrm__tag_leaf *) leaves[NRM__TAG_TABLE_LEAVES];
};

extern _Atomic(struct nrm__tag_table *) nrm__tag_tables[NRM__TAG_TABLES] NRM__HIDDEN;

/* The tag of an address; NULL: no block near it ever had one. */
static inline atomic_uint_least64_t *
nrm__scope_tag_at(uintptr_t address)
{
    if (address >> NRM__TAG_ADDRESS_BITS != 0) {
        return NULL;
    }
    struct nrm__tag_table *table = atomic_load_explicit(
        &nrm__tag_tables[address >> NRM__TAG_TABLE_SHIFT], memory_order_acquire);
    if (table == NULL) {
        return NULL;
    }
    struct nrm__tag_leaf *leaf = atomic_load_explicit(
        &table->leaves[address >> NRM__TAG_LEAF_SHIFT & (NRM__TAG_TABLE_LEAVES - 1)],
        memory_order_acquire);
    return leaf != NULL
               ? &leaf->tags[address >> NRM__TAG_SHIFT & (NRM__TAG_LEAF_TAGS - 1)]
               : NULL;
}

/* False: no memory for it, or no such address. */
bool nrm__scope_tag_set(const void *ptr, uint64_t tag);

/* Takes it off. */
static inline uint64_t
nrm__scope_tag_take(const void *ptr)
{
    atomic_uint_least64_t *at = nrm__scope_tag_at((uintptr_t)ptr);
    uint64_t tag = at != NULL ? atomic_load_explicit(at, memory_order_relaxed) : 0;
    if (tag != 0) {
        atomic_store_explicit(at, 0, memory_order_relaxed);
    }
    return tag;
}

#endif
