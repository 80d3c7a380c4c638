/*
 * Small host blocks: chunks of 64 KiB cut into equal cells of one size class, a bitmap
 * of live cells and the requested sizes outside the memory. An address that is not a
 * live cell is known as such, so a double or foreign free does no harm.
 */
#ifndef NRM_CORE_SLAB_H
#define NRM_CORE_SLAB_H

#include "base/lock.h"
#include "core/block_map.h"

#define NRM__SLAB_CHUNK NRM__MAP_PAGE /* bytes, and its alignment */
#define NRM__SLAB_MAX ((size_t)8192)  /* largest cell */
#define NRM__SLAB_ALIGNMENT ((size_t)64)
#define NRM__SLAB_N_CLASSES 24 /* 64, 128, ... 512, then four for each doubling */

struct nrm__slab_class;

/* A set of slabs that belongs to one resource. */
struct nrm__slabs {
    nrm_resource *owner; /* borrowed */
    /* Where chunks come from and go to: NRM__SLAB_CHUNK bytes, aligned to that. Called
       with no lock of the set held. The flags may say NRM__BLOCK_IS_ZERO; they do not
       any more when a chunk comes back used. */
    nrm_status (*get_chunk)(nrm_resource *owner, struct nrm__block *out);
    void (*put_chunk)(nrm_resource *owner, const struct nrm__block *chunk);
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

/* The three ops of owners of segments, for segments for which nrm__segment_is_slab. */
bool nrm__segment_is_slab(const struct nrm__segment *segment);
bool nrm__slabs_find(struct nrm__segment *segment, const void *ptr,
                     struct nrm__block *out);
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
