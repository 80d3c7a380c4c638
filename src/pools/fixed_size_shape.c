/*
 * How large the blocks and chunks of a fixed-size resource are, how they are aligned,
 * and which requests they serve. Chunks that fill whole pages of the block map are
 * found without a lock; those of host memory are aligned to huge pages. Callbacks are
 * asked for no more than the kind needs: they may not know how.
 */
#include "pools/fixed_size_shape.h"

#include "base/bits.h"
#include "base/error.h"
#include "nrm/options.h"

#define DEFAULT_BLOCK_NBYTES NRM__MIB
#define DEFAULT_N_BLOCKS 128

static size_t
wanted_alignment(const struct nrm__fixed_shape *shape, const nrm_resource *upstream)
{
    bool maps = upstream->kind == NRM_KIND_HOST || upstream->kind == NRM_KIND_PINNED;
    if (upstream->flags & NRM__OPS_OVERLAY) {
        return nrm__kind_alignment(upstream->kind);
    }
    return maps && shape->chunk_nbytes >= NRM__HUGE_PAGE ? NRM__HUGE_PAGE
                                                         : NRM__MAP_PAGE;
}

nrm_status
nrm__fixed_shape_init(struct nrm__fixed_shape *shape, const nrm_resource *upstream,
                      const nrm_fixed_size_options *options)
{
    size_t nbytes = options->block_nbytes != 0 ? options->block_nbytes
                                               : DEFAULT_BLOCK_NBYTES;
    size_t n_blocks = options->n_blocks != 0 ? options->n_blocks : DEFAULT_N_BLOCKS;
    size_t granule = nrm__kind_alignment(upstream->kind);
    shape->block_nbytes = nrm__align_up(nrm__min(nbytes, SIZE_MAX / 2), granule);
    if (n_blocks > (SIZE_MAX / 2 - NRM__MAP_PAGE) / shape->block_nbytes) {
        return nrm__error(NRM_OUT_OF_MEMORY,
                          "%zu blocks of %zu B are more than an address space holds",
                          n_blocks, nbytes);
    }
    shape->natural = shape->block_nbytes & (~shape->block_nbytes + 1);
    shape->chunk_nbytes = n_blocks * shape->block_nbytes;
    shape->chunk_alignment = wanted_alignment(shape, upstream);
    shape->alignment = nrm__min(shape->natural, shape->chunk_alignment);
    return NRM_OK;
}

bool
nrm__fixed_shape_relax(struct nrm__fixed_shape *shape, const nrm_resource *upstream)
{
    size_t granule = nrm__kind_alignment(upstream->kind);
    bool was_more = shape->chunk_alignment > granule;
    shape->chunk_alignment = granule;
    shape->alignment = nrm__min(shape->natural, granule);
    return was_more;
}

size_t
nrm__fixed_chunk_rounded(const struct nrm__fixed_shape *shape)
{
    return shape->chunk_alignment >= NRM__MAP_PAGE
               ? nrm__align_up(shape->chunk_nbytes, NRM__MAP_PAGE)
               : shape->chunk_nbytes;
}

nrm_status
nrm__fixed_check(const struct nrm__fixed_shape *shape,
                 const struct nrm__request *request)
{
    char asked[32], block[32];
    if (request->nbytes <= shape->block_nbytes &&
        request->alignment <= shape->alignment) {
        return NRM_OK;
    }
    nrm_format_nbytes(shape->block_nbytes, block, sizeof block);
    if (request->nbytes > shape->block_nbytes) {
        nrm_format_nbytes(request->nbytes, asked, sizeof asked);
        return nrm__error(NRM_OUT_OF_MEMORY,
                          "%s asked of a resource whose blocks have %s each", asked,
                          block);
    }
    return nrm__error(NRM_NOT_SUPPORTED,
                      "an alignment of %zu B asked of a resource whose blocks of %s "
                      "are aligned to %zu B",
                      request->alignment, block, shape->alignment);
}
