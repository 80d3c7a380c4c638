/*
 * What is asked of a pool as a whole: a trim, which gathers what threads keep and what
 * the GPU is done with before segments go back, and the pool's share of the statistics.
 */
#include "core/slab.h"
#include "core/uses.h"
#include "pools/pool_ops.h"

nrm_status
nrm__pool_trim(nrm_resource *mr, size_t keep_nbytes, size_t *out_nbytes)
{
    struct nrm__pool *pool = nrm__pool_from(mr);
    size_t slab_nbytes = 0, unclosed, parked;
    nrm__pool_begin_trim(pool);
    nrm__cache_drain(mr);
    if (pool->has_slabs) {
        nrm__slabs_trim(&pool->slabs, keep_nbytes, &slab_nbytes);
    }
    if (pool->order != NULL) {
        nrm__pool_settle(pool, pool->wait_limit_ns);
    }
    while (nrm__retired_nbytes(mr) != 0 &&
           nrm__retired_return_used(pool->wait_limit_ns, false)) {
        /* what known uses kept */
    }
    for (;;) {
        nrm__lock_acquire(&pool->lock);
        nrm__pool_reclaim_locked(pool);
        unclosed = nrm__pool_unclosed_locked(pool);
        parked = pool->parked_nbytes;
        nrm__lock_release(&pool->lock);
        if (unclosed != 0 && nrm__pool_close_epoch(pool)) {
            continue;
        }
        if (parked == 0 || !nrm__pool_wait_for_epoch(pool, pool->wait_limit_ns)) {
            break;
        }
    }
    *out_nbytes += nrm__pool_trim_segments(pool, keep_nbytes);
    nrm__pool_end_trim(pool);
    return NRM_OK;
}

void
nrm__pool_statistics(nrm_resource *mr, nrm_statistics *out)
{
    struct nrm__pool *pool = nrm__pool_from(mr);
    if (pool->tracked) {
        nrm__cache_drain(mr); /* what threads have parked counts */
    }
    nrm__lock_acquire(&pool->lock);
    out->reserved_bytes += (int64_t)pool->reserved_nbytes;
    out->parked_bytes +=
        (int64_t)(pool->parked_nbytes + nrm__pool_pending_locked(pool));
    out->epochs += atomic_load_explicit(&pool->n_epochs, memory_order_relaxed);
    out->waits += pool->n_waits;
    out->segments_ahead += pool->ahead.n_segments;
    out->failures_ahead += pool->ahead.n_failures;
    nrm__lock_release(&pool->lock);
    out->parked_bytes += (int64_t)nrm__retired_nbytes(mr);
}
