/*
 * What the sources share that allocate and free in the order of streams, of a memory
 * pool of the driver: a pool of their own, somebody else's, or the device's for managed
 * memory.
 */
#ifndef NRM_SOURCES_IN_ORDER_H
#define NRM_SOURCES_IN_ORDER_H

#include "core/ops.h"
#include "cuda/context.h"

struct nrm__in_order_place;

/* What such a source begins with. */
struct nrm__in_order {
    nrm_resource base;
    _Atomic(struct nrm__in_order_place *) place; /* the newest; NULL: no request yet */
    size_t initial_nbytes;                       /* taken once by each pool */
    bool owns_pool;                              /* it is destroyed with the source */

    /* Makes or finds the pool, in the device's context; says why not. */
    nrm_status (*find_pool)(struct nrm__in_order *self,
                            const struct nrm__cuda_scope *scope, nrm_CUmemoryPool *out);
};

/* Whether the device and the driver have pools. */
nrm_status nrm__in_order_check(const struct nrm__cuda_scope *scope);

/* Makes the pool now, in place of at the first request. */
nrm_status nrm__in_order_prepare(struct nrm__in_order *self);

/* Ops. */
nrm_status nrm__in_order_allocate(nrm_resource *mr, const struct nrm__request *request,
                                  struct nrm__block *out);
void nrm__in_order_deallocate(nrm_resource *mr, const struct nrm__block *block,
                              nrm_stream *stream);
void nrm__in_order_release(nrm_resource *mr, const struct nrm__block *block);
nrm_status nrm__in_order_trim(nrm_resource *mr, size_t keep_nbytes, size_t *out_nbytes);
void nrm__in_order_statistics(nrm_resource *mr, nrm_statistics *out);
void nrm__in_order_finish(nrm_resource *mr);

#define NRM__IN_ORDER_OPS                                                              \
    .flags = NRM__OPS_MAPPED | NRM__OPS_IN_ORDER, .allocate = nrm__in_order_allocate,  \
    .deallocate = nrm__in_order_deallocate, .release_block = nrm__in_order_release,    \
    .renew_block = nrm__driver_block_renew, .trim = nrm__in_order_trim,                \
    .statistics = nrm__in_order_statistics, .finish = nrm__in_order_finish

#endif
