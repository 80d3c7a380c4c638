/* A memory pool, for the two files that have it: pools.c makes pools and tells of them,
 * pieces.c is what they do with memory. Everything here is called with the state lock
 * held. */
#ifndef NRM_CUDASIM_POOLS_H
#define NRM_CUDASIM_POOLS_H

#include "checker.h"

struct nrm_CUmemPoolHandle_st {
    struct sim_handle handle;
    struct nrm_CUctx_st *context; /* of its device, borrowed */
    bool is_managed;
    bool is_default;
    bool is_doomed; /* destroyed by the program: goes with its last piece */
    int reuse[3];   /* the attributes that allow it, in the order of their numbers */
    uint64_t threshold;
    uint64_t reserved, reserved_high;
    uint64_t used, used_high;
};

extern struct sim_handles sim_pools;

static inline bool
sim_is_pool(nrm_CUmemoryPool pool)
{
    return sim_handle_is_live(&sim_pools, pool) && !pool->is_doomed;
}

/* A pool that the program has destroyed goes as soon as nothing of it is in use. */
void sim_pool_bury(nrm_CUmemoryPool pool);

#endif
