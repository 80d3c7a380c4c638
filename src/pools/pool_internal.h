/*
 * What pools/pool.c (the resource) and pools/pool_blocks.c (its blocks) share. Functions
 * named ..._locked: the caller holds the pool's lock.
 */
#ifndef NRM_POOLS_POOL_INTERNAL_H
#define NRM_POOLS_POOL_INTERNAL_H

#include "base/bits.h"
#include "core/slab.h"

/* Size classes: eight for each power of two. */
#define NRM__POOL_SUBCLASS_BITS 3
#define NRM__POOL_N_SUBCLASSES (1u << NRM__POOL_SUBCLASS_BITS)
#define NRM__POOL_N_CLASSES (64 * NRM__POOL_N_SUBCLASSES)

enum nrm__pool_state {
    NRM__POOL_FREE,
    NRM__POOL_LIVE,
    NRM__POOL_CLAIMED,
    NRM__POOL_PARKED
};

struct nrm__pool_block {
    struct nrm__tree_node node; /* start and capacity */
    struct nrm__link link;      /* of a bin (free) or of the parked list (parked) */
    struct nrm__pool_block *previous, *next; /* neighbours in the segment, or NULL */
    struct nrm__segment *segment;
    size_t nbytes;  /* requested; of a live one */
    uint64_t stamp; /* of a parked one */
    enum nrm__pool_state state;
    bool is_zero; /* of a free one: never used since the upstream zeroed it */
};

struct nrm__pool_bins {
    struct nrm__link heads[NRM__POOL_N_CLASSES];
    uint64_t bits[NRM__POOL_N_CLASSES / 64]; /* one for each bin that is not empty */
};

struct nrm__pool {
    nrm_resource base;
    size_t granule;        /* block sizes are multiples of it, starts aligned to it */
    size_t maximum_nbytes; /* of all segments */
    size_t segment_nbytes; /* largest segment taken ahead of demand */
    size_t idle_nbytes;    /* free bytes beyond which large free segments go back */
    bool tracked;          /* freed memory waits for its epoch */
    size_t epoch_nbytes, parked_limit;
    uint64_t wait_limit_ns;
    bool waits_when_full;
    bool has_slabs;
    struct nrm__slabs slabs;

    struct nrm__lock lock; /* guards what follows */
    struct nrm__tree tree;
    struct nrm__pool_bins *bins; /* of the free blocks; a mapping */
    struct nrm__link parked;     /* oldest first */
    struct nrm__link segments;
    size_t reserved_nbytes, live_nbytes, parked_nbytes, free_nbytes;
    size_t growing_nbytes;  /* asked of the upstream right now */
    uint64_t newest_stamp;  /* of a parked block */
    size_t parked_in_vain;  /* when a wait for the GPU brought nothing; 0: it did */
    size_t unclosed_nbytes; /* parked since an epoch was closed */
    int64_t n_epochs, n_waits;
};

static inline struct nrm__pool_block *
nrm__pool_block_of(struct nrm__tree_node *node)
{
    return node != NULL ? NRM__CONTAINER(node, struct nrm__pool_block, node) : NULL;
}

static inline size_t
nrm__pool_size_of(const struct nrm__pool_block *block)
{
    return block->node.nbytes;
}

/* A free block, in no bin yet, goes into its bin; and out of it. */
void nrm__pool_bin_insert_locked(struct nrm__pool *pool, struct nrm__pool_block *block);
void nrm__pool_bin_remove_locked(struct nrm__pool *pool, struct nrm__pool_block *block);

/* Cuts a block of at least `nbytes` out of the free memory: live. NULL: there is none. */
struct nrm__pool_block *nrm__pool_take_locked(struct nrm__pool *pool, size_t nbytes,
                                              size_t alignment);

/* Makes a block, which is in no bin, free, merged with its free neighbours. */
void nrm__pool_free_locked(struct nrm__pool *pool, struct nrm__pool_block *block,
                           bool is_zero);

/* Stamps a block that a GPU may still touch and puts it aside. */
void nrm__pool_park_locked(struct nrm__pool *pool, struct nrm__pool_block *block);

/* Frees the parked blocks whose epoch is done. */
void nrm__pool_reclaim_locked(struct nrm__pool *pool);

/* Parked bytes that no recorded epoch covers. */
size_t nrm__pool_unclosed_locked(const struct nrm__pool *pool);

/* Cuts the tail off a claimed block and gives it back like any block. */
void nrm__pool_cut_tail_locked(struct nrm__pool *pool, struct nrm__pool_block *block,
                               size_t nbytes);

/* Takes what is missing for `nbytes`, and up to `wanted`, from the free right neighbour. */
bool nrm__pool_extend_locked(struct nrm__pool *pool, struct nrm__pool_block *block,
                             size_t nbytes, size_t wanted);

/* Aborts unless everything agrees. */
void nrm__pool_check_locked(struct nrm__pool *pool);

/* ---- segments: the lock is not held ---- */

/* Takes a segment of `nbytes` of the upstream; the request that needs it asked `asked`. */
nrm_status nrm__pool_grow_by(struct nrm__pool *pool, size_t nbytes, size_t asked);

/* Grows so that a block of `nbytes` fits. Segments that were made for one large block and
   are free now go back first: what they held does not fit, and would only pile up. */
nrm_status nrm__pool_grow(struct nrm__pool *pool, size_t nbytes, size_t alignment);

/* Gives segments that are free as a whole, and of more than `min_nbytes`, back to the
   upstream while more than `keep_nbytes` stay free. Returns bytes. */
size_t nrm__pool_give_segments_back(struct nrm__pool *pool, size_t min_nbytes,
                                    size_t keep_nbytes);

/* While more than idle_nbytes are free: gives segments that were made for one large block
   and are free as a whole back. */
void nrm__pool_give_idle_back(struct nrm__pool *pool);

/* A segment that is out of the pool goes back to the upstream; see nrm__give_back. */
size_t nrm__pool_drop_segment(struct nrm__pool *pool, struct nrm__segment *segment,
                              bool later);

#endif
