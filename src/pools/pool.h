/* What others than its users want of a pool: see nrm/pools.h for the pool itself. */
#ifndef NRM_POOLS_POOL_H
#define NRM_POOLS_POOL_H

#include "pools/fixed_size_shape.h"

/* A FixedSizeMemoryResource of device memory: a pool whose blocks have one size. */
nrm_status nrm__pool_create_fixed(nrm_resource *upstream,
                                  const struct nrm__fixed_shape *shape, nrm_reuse reuse,
                                  nrm_resource **out);

/* For tests: walks the whole pool and aborts at the first thing that does not hold. */
void nrm__pool_check(nrm_resource *mr);

#endif
