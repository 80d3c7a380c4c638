/* A resource of blocks of one size, over any other. */
#ifndef NRM_TESTS_FIXED_SIZE_H
#define NRM_TESTS_FIXED_SIZE_H

#include "fixtures.h"

static inline nrm_resource *
fixed_over(nrm_resource *upstream, size_t block_nbytes, size_t n_blocks)
{
    nrm_fixed_size_options options = NRM_OPTIONS(nrm_fixed_size_options);
    nrm_resource *mr = NULL;
    options.block_nbytes = block_nbytes;
    options.n_blocks = n_blocks;
    CHECK_OK(nrm_fixed_size_create(upstream, &options, &mr));
    nrm_resource_release(upstream);
    return mr;
}

#endif
