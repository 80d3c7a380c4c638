/*
 * What pools/fixed_size.c (the resource), fixed_size_blocks.c (its blocks) and
 * fixed_size_fork.c share.
 * Functions named ..._locked: the caller holds the resource's lock.
 */
#ifndef NRM_POOLS_FIXED_SIZE_INTERNAL_H
#define NRM_POOLS_FIXED_SIZE_INTERNAL_H

#include "base/bits.h"
#include "base/lock.h"
#include "pools/fixed_size_shape.h"

enum nrm__fixed_cell_state {
    NRM__FIXED_FREE,
    NRM__FIXED_LIVE,
    NRM__FIXED_CLAIMED,
    NRM__FIXED_PARKED
};

/* One block that was handed out before. */
struct nrm__fixed_cell {
    struct nrm__fixed_cell *next; /* free: given back before; parked: after it */
    struct nrm__fixed_chunk *chunk;
    union {
        size_t nbytes;  /* requested; of a live or claimed one */
        uint64_t stamp; /* of a parked one */
    } as;
    enum nrm__fixed_cell_state state;
};

struct nrm__fixed_chunk {
    struct nrm__tree_node node; /* where its blocks lie */
    struct nrm__link link; /* among the chunks with free blocks, or those without */
    struct nrm__segment *segment;
    struct nrm__fixed_cell *cells; /* a mapping */
    struct nrm__fixed_cell *free;  /* those given back, the last one first */
    size_t n_free;                 /* these, and the untouched ones */
    size_t n_touched;              /* the blocks before it were handed out before */
    size_t n_blocks;
    bool is_zero; /* untouched blocks read as zero */
};

struct nrm__fixed_size {
    nrm_resource base;
    struct nrm__fixed_shape shape;
    unsigned
        block_shift; /* the logarithm of a block's size; 0: it is no power of two */
    bool tracked;    /* freed memory waits for its epoch */
    size_t epoch_nbytes, parked_limit;
    uint64_t wait_limit_ns;
    bool waits_when_full;

    struct nrm__lock lock; /* guards what follows */
    struct nrm__tree chunks;
    struct nrm__link usable; /* chunks with free blocks; the first serves next */
    struct nrm__link full;   /* the others */
    struct nrm__fixed_cell *parked_first, *parked_last; /* oldest first */
    size_t n_blocks, n_free, n_parked, reserved_nbytes;
    uint64_t newest_stamp; /* of a parked block */
    size_t n_unclosed;     /* parked since an epoch was closed */
    int64_t n_epochs, n_waits;
};

static inline struct nrm__fixed_chunk *
nrm__fixed_chunk_of(struct nrm__tree_node *node)
{
    return node != NULL ? NRM__CONTAINER(node, struct nrm__fixed_chunk, node) : NULL;
}

static inline uintptr_t
nrm__fixed_start_of(const struct nrm__fixed_size *fixed,
                    const struct nrm__fixed_cell *cell)
{
    size_t index = (size_t)(cell - cell->chunk->cells);
    return cell->chunk->node.start + index * fixed->shape.block_nbytes;
}

/* The number of the block around `ptr`, which lies in the chunk's segment. */
static inline size_t
nrm__fixed_index_of(const struct nrm__fixed_size *fixed,
                    const struct nrm__fixed_chunk *chunk, const void *ptr)
{
    size_t offset = (uintptr_t)ptr - chunk->node.start;
    return fixed->block_shift != 0 ? offset >> fixed->block_shift
                                   : offset / fixed->shape.block_nbytes;
}

/* A block that nobody finds yet: claimed. NULL: none is free. `out_is_zero`: it reads
   as zero. */
struct nrm__fixed_cell *nrm__fixed_take_locked(struct nrm__fixed_size *fixed,
                                               bool *out_is_zero);

/* A block that is in use no more goes onto the stack of its chunk. */
void nrm__fixed_free_locked(struct nrm__fixed_size *fixed,
                            struct nrm__fixed_cell *cell);

/* Stamps a block that a GPU may still touch and puts it aside. */
void nrm__fixed_park_locked(struct nrm__fixed_size *fixed,
                            struct nrm__fixed_cell *cell);

/* Frees the parked blocks whose epoch is done. */
void nrm__fixed_reclaim_locked(struct nrm__fixed_size *fixed);

/* Parked blocks that no recorded epoch covers. */
size_t nrm__fixed_unclosed_locked(const struct nrm__fixed_size *fixed);

/* The block around `ptr` in a chunk if it was ever handed out, or NULL. */
struct nrm__fixed_cell *
nrm__fixed_find_in_chunk_locked(const struct nrm__fixed_size *fixed,
                                struct nrm__fixed_chunk *chunk, const void *ptr);

/* The same in whatever chunk it lies. */
struct nrm__fixed_cell *nrm__fixed_find_locked(const struct nrm__fixed_size *fixed,
                                               const void *ptr);

/* Aborts unless everything agrees. */
void nrm__fixed_check_locked(struct nrm__fixed_size *fixed);

/* ---- over a fork: pools/fixed_size_fork.c ---- */

/* Its lock is held. */
void nrm__fixed_fork_prepare(nrm_resource *mr);

#endif
