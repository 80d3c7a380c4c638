/* For tests: see nrm/pools.h for the pool itself. */
#ifndef NRM_POOLS_POOL_H
#define NRM_POOLS_POOL_H

#include "nrm/pools.h"

/* Walks the whole pool and aborts at the first thing that does not hold. */
void nrm__pool_check(nrm_resource *mr);

#endif
