/*
 * The sizes of a fixed-size resource, whoever keeps its blocks: pools/fixed_size.c, or
 * in device memory pools/pool.c.
 */
#ifndef NRM_POOLS_FIXED_SIZE_SHAPE_H
#define NRM_POOLS_FIXED_SIZE_SHAPE_H

#include "core/block_map.h"
#include "nrm/pools.h"

struct nrm__fixed_shape {
    size_t block_nbytes;    /* of every block: a multiple of the kind's alignment */
    size_t natural;         /* the largest power of two that divides it */
    size_t alignment;       /* of every block */
    size_t chunk_nbytes;    /* of the blocks that are taken at a time, at least */
    size_t chunk_alignment; /* that the upstream is asked for */
};

/* Of a resource over `upstream`. NRM_OUT_OF_MEMORY: no address space holds a chunk. */
nrm_status nrm__fixed_shape_init(struct nrm__fixed_shape *shape,
                                 const nrm_resource *upstream,
                                 const nrm_fixed_size_options *options);

/* For an upstream that cannot align chunks beyond what its kind needs; false: it was
   asked for no more. */
bool nrm__fixed_shape_relax(struct nrm__fixed_shape *shape,
                            const nrm_resource *upstream);

/* A chunk in whole pages of the block map, whose look-ups take no lock, where it is
   aligned to them. */
size_t nrm__fixed_chunk_rounded(const struct nrm__fixed_shape *shape);

/* Whether a block serves a request. */
nrm_status nrm__fixed_check(const struct nrm__fixed_shape *shape,
                            const struct nrm__request *request);

#endif
