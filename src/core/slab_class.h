/*
 * A size class of a set of slabs. A slab and its cells (slab.c), how slabs and sets
 * come and go (slab_make.c), and the batches of cells that wait in a class
 * (slab_batch.c) are told apart by what they do under the lock of the class: the first
 * work on the free bits and lists of slabs that there are, the second hold it for the
 * list of spare descriptions only, and the last do without it.
 */
#ifndef NRM_CORE_SLAB_CLASS_H
#define NRM_CORE_SLAB_CLASS_H

#include "core/slab.h"

/* Batches that wait in a class, at most. */
#define NRM__SLAB_N_BATCHES 16u

struct nrm__slab_batch;

struct nrm__slab_class {
    struct nrm__lock lock;
    struct nrm__slabs *set;
    size_t cell_nbytes;
    uint32_t n_cells;
    uint32_t reciprocal;
    uint32_t index;
    struct nrm__link all;
    struct nrm__link available; /* empty ones last */
    struct nrm__slab *spare;
    size_t n_empty;
    _Alignas(64) atomic_uint unused_batches; /* bits */
    atomic_uint full_batches;
    struct nrm__slab_batch *batches[NRM__SLAB_N_BATCHES]; /* NULL: not yet filled */
};

/* ---- slab_make.c; the lock is not held ---- */

/* A new chunk of the owner, as an empty slab in no list. */
nrm_status nrm__slab_create(struct nrm__slab_class *class, struct nrm__slab **out);

/* Gives the chunk of such a slab back. */
void nrm__slab_destroy(struct nrm__slab *slab);

/* ---- slab_batch.c ---- */

void nrm__slab_batches_init(struct nrm__slab_class *class);

/* None is full. */
void nrm__slab_batches_finish(struct nrm__slab_class *class);

void nrm__slab_batches_fork_child(struct nrm__slab_class *class);

#endif
