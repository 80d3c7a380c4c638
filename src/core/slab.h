/*
 * Small host blocks: chunks of 64 KiB cut into equal cells of one size class, a bitmap
 * of live cells and the requested sizes outside the memory. An address that is not a
 * live cell is known as such, so a double or foreign free does no harm.
 */
#ifndef NRM_CORE_SLAB_H
#define NRM_CORE_SLAB_H

#include "base/lock.h"
#include "core/block_map.h"

struct nrm__cell;

#define NRM__SLAB_CHUNK NRM__MAP_PAGE /* bytes, and its alignment */
#define NRM__SLAB_MAX ((size_t)8192)  /* largest cell */
#define NRM__SLAB_ALIGNMENT ((size_t)64)
#define NRM__SLAB_N_CLASSES 24 /* 64, 128, ... 512, then four for each doubling */

/* Of the size of a live cell: a scope counts it (core/scopes.h). */
#define NRM__SLAB_COUNTED 0x8000u

#define NRM__SLAB_MAX_CELLS (NRM__SLAB_CHUNK / NRM__SLAB_ALIGNMENT)
#define NRM__SLAB_RECIPROCAL_BITS 20
#define NRM__SLAB_BATCH 32u

struct nrm__slab_class;

/* One chunk. What a look-up needs stands first, and does not change while it describes
   the chunk. */
struct nrm__slab {
    struct nrm__slab_class *class; /* for ever */
    nrm_resource *owner;           /* borrowed; for ever */
    uintptr_t start;
    uint32_t cell_nbytes, n_cells; /* for ever, as the next two */
    uint32_t reciprocal; /* of the cell, in units: exact for every offset in a chunk */
    uint32_t class_index;
    uint32_t generation; /* counts the chunks it has described */
    bool chunk_is_zero;  /* was, when it came */
    struct nrm__segment *segment;
    struct nrm__block chunk; /* for put_chunk */
    /* The rest belongs to the lock of the class. Threads write to it that have nothing
       to do with those that only use cells of the slab. */
    _Alignas(64) uint64_t user; /* the thread that had cells of it last, see slab.c */
    uint32_t n_free;
    uint32_t first_free;          /* no word of free bits before this one has a bit */
    uint32_t high_water;          /* cells from here on have never been handed out */
    struct nrm__link all;         /* in the class */
    struct nrm__link available;   /* in the class, while a cell is free */
    struct nrm__slab *next_spare; /* while it describes no chunk */
    uint64_t free[NRM__SLAB_MAX_CELLS / 64];
    /* As requested, of a live cell, or that and NRM__SLAB_COUNTED; 0: it is not live.
       One more for what is left behind the last one. */
    _Alignas(64) atomic_uint_least16_t sizes[];
};

/* A set of slabs that belongs to one resource. */
struct nrm__slabs {
    nrm_resource *owner; /* borrowed */
    /* Where chunks come from and go to: NRM__SLAB_CHUNK bytes, aligned to that. Called
       with no lock of the set held. The flags may say NRM__BLOCK_IS_ZERO; they do not
       any more when a chunk comes back used. */
    nrm_status (*get_chunk)(nrm_resource *owner, struct nrm__block *out);
    void (*put_chunk)(nrm_resource *owner, const struct nrm__block *chunk);
    bool
        spreads; /* threads that keep cells have slabs of their own, if that is cheap */
    struct nrm__slab_class *classes[NRM__SLAB_N_CLASSES];
    atomic_size_t reserved_nbytes; /* in chunks */
};

nrm_status nrm__slabs_init(struct nrm__slabs *slabs, nrm_resource *owner,
                           nrm_status (*get_chunk)(nrm_resource *, struct nrm__block *),
                           void (*put_chunk)(nrm_resource *,
                                             const struct nrm__block *));

/* No cell is live. Gives all chunks back. */
void nrm__slabs_finish(struct nrm__slabs *slabs);

/* Whether a request is for a slab. */
bool nrm__slabs_takes(size_t nbytes, size_t alignment);

/* Fills ptr, nbytes, capacity, segment, record and flags. */
nrm_status nrm__slabs_allocate(struct nrm__slabs *slabs, size_t nbytes,
                               struct nrm__block *out);

/* `block` was claimed. */
void nrm__slabs_deallocate(struct nrm__slabs *slabs, const struct nrm__block *block);

/* Takes up to `n` cells of a class, neither free nor live, from slabs that there are;
   returns how many. */
size_t nrm__slabs_take(struct nrm__slabs *slabs, size_t class_index,
                       struct nrm__cell *out, size_t n);
/* Takes such cells back, of any of its classes. */
void nrm__slabs_put(struct nrm__slabs *slabs, const struct nrm__cell *cells, size_t n);

/* The slab of a cell, which is not free in it. */
struct nrm__slab *nrm__slab_of_cell(const struct nrm__cell *cell);

/* Cells of one class on their way from a thread that has too many to one that has none:
   a batch of up to NRM__SLAB_BATCH stays together, and neither takes a lock. False: the
   set keeps no such batch now, and the caller still has them. */
bool nrm__slabs_put_batch(struct nrm__slabs *slabs, size_t class_index,
                          const struct nrm__cell *cells, size_t n);
/* Takes one; returns how many cells it has, 0: there is none. */
size_t nrm__slabs_take_batch(struct nrm__slabs *slabs, size_t class_index,
                             struct nrm__cell *out);
/* Puts the cells of all batches back into their slabs. The caller holds the owner. */
void nrm__slabs_break_batches(struct nrm__slabs *slabs);

/* Makes a cell that is neither free nor live a block. */
void nrm__slabs_make_live(const struct nrm__cell *cell, size_t nbytes,
                          struct nrm__block *out);

/* The class of a size up to NRM__SLAB_MAX, counted from 0. */
static inline size_t
nrm__slab_class_index(size_t nbytes)
{
    size_t last = (nbytes - 1) / NRM__SLAB_ALIGNMENT; /* units, counted from 0 */
    if (last < 8) {
        return last;
    }
    unsigned log2 = 63 - (unsigned)__builtin_clzll(last);
    return 4 + (log2 - 3) * 4 + (last >> (log2 - 2));
}

/* Bytes of its cells. */
size_t nrm__slab_class_nbytes(size_t index);

/* The cell of a chunk that an address lies in; n_cells or more: behind the last one. */
static inline uint32_t
nrm__slab_cell_of(const struct nrm__slab *slab, uintptr_t address)
{
    uint32_t unit = (uint32_t)((address & (NRM__SLAB_CHUNK - 1)) / NRM__SLAB_ALIGNMENT);
    return unit * slab->reciprocal >> NRM__SLAB_RECIPROCAL_BITS;
}

/* From now on look-ups find the cell, which is neither free nor live. */
static inline void
nrm__slab_set_live(struct nrm__slab *slab, uint32_t cell, size_t nbytes)
{
    atomic_store_explicit(&slab->sizes[cell], (uint_least16_t)nbytes,
                          memory_order_release);
}

/* Makes a live cell the caller's alone; its size as it stands there, or 0: it is not
   live. */
static inline size_t
nrm__slab_claim_cell(struct nrm__slab *slab, uint32_t cell)
{
    return atomic_exchange_explicit(&slab->sizes[cell], 0, memory_order_acq_rel);
}

/* How the cell stands in a magazine or batch. */
static inline void *
nrm__slab_record_of(struct nrm__slab *slab, const void *ptr)
{
    return &slab->sizes[nrm__slab_cell_of(slab, (uintptr_t)ptr)];
}

/* The three ops of owners of segments, for segments for which nrm__segment_is_slab. */
static inline bool
nrm__segment_is_slab(const struct nrm__segment *segment)
{
    return ((uintptr_t)segment->extra & 1) != 0;
}

static inline struct nrm__slab *
nrm__slab_of_segment(const struct nrm__segment *segment)
{
    return (struct nrm__slab *)(void *)((char *)segment->extra - 1);
}

bool nrm__slabs_find(struct nrm__segment *segment, const void *ptr,
                     struct nrm__block *out);
/* The segment of the cell is still in the map, and kept there meanwhile. */
bool nrm__slabs_claim(struct nrm__block *block);
/* Puts a claimed cell back as live, with block->nbytes as its requested size. */
void nrm__slabs_unclaim(const struct nrm__block *block);

/* Gives empty chunks back beyond `keep_nbytes`; adds what it gave to *out_nbytes. */
void nrm__slabs_trim(struct nrm__slabs *slabs, size_t keep_nbytes, size_t *out_nbytes);

/* Aborts unless every bitmap, count and list agrees. */
void nrm__slabs_check(struct nrm__slabs *slabs);

void nrm__slabs_fork_prepare(struct nrm__slabs *slabs);
void nrm__slabs_fork_parent(struct nrm__slabs *slabs);
void nrm__slabs_fork_child(struct nrm__slabs *slabs);

#endif
