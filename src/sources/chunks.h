/*
 * Chunks of 64 KiB for slabs, cut from regions of 2 MiB: what the host resource takes
 * from the system for its small blocks. A region whose chunks are all free goes back,
 * but for a few.
 */
#ifndef NRM_SOURCES_CHUNKS_H
#define NRM_SOURCES_CHUNKS_H

#include "base/lock.h"
#include "core/ops.h"

#define NRM__REGION_NBYTES ((size_t)2 * 1024 * 1024)

struct nrm__chunks {
    nrm_resource *owner; /* borrowed */
    /* Maps a zeroed region, aligned to its size; called with no lock held. It goes
       back by nrm__unmap. */
    nrm_status (*map)(nrm_resource *owner, void **out);
    struct nrm__lock lock;
    struct nrm__link regions; /* those without a free chunk at the end */
    size_t n_empty;           /* regions with free chunks only */
    atomic_size_t reserved_nbytes;
};

void nrm__chunks_init(struct nrm__chunks *chunks, nrm_resource *owner,
                      nrm_status (*map)(nrm_resource *owner, void **out));

/* Every chunk is free. */
void nrm__chunks_finish(struct nrm__chunks *chunks);

/* Fills ptr, nbytes, capacity, record and flags, as nrm__slabs wants its chunks. */
nrm_status nrm__chunks_get(struct nrm__chunks *chunks, struct nrm__block *out);
void nrm__chunks_put(struct nrm__chunks *chunks, const struct nrm__block *chunk);

/* Unmaps empty regions beyond `keep_nbytes`; with none to keep drops the pages of
   all free chunks. Adds to *out_nbytes what the system got back. */
void nrm__chunks_trim(struct nrm__chunks *chunks, size_t keep_nbytes,
                      size_t *out_nbytes);

/* Aborts unless every bit, count and list agrees. */
void nrm__chunks_check(struct nrm__chunks *chunks);

#endif
