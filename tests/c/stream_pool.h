/*
 * A pool whose blocks threads keep for streams, and a block that work on a stream is
 * going to read when it is freed: the base of test_cache_streams.c and
 * test_cache_streams_shared.c.
 */
#ifndef NRM_TESTS_STREAM_POOL_H
#define NRM_TESTS_STREAM_POOL_H

#include "core/order.h"
#include "device_pool.h"

static inline nrm_resource *
pool_of(nrm_resource *upstream, size_t nbytes, nrm_reuse reuse)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    nrm_resource *mr = NULL;
    options.initial_nbytes = options.maximum_nbytes = nbytes;
    options.reuse = reuse;
    options.wait_limit_ns = 5 * 1000 * 1000;
    CHECK_OK(nrm_pool_create(upstream, &options, &mr));
    nrm_resource_release(upstream);
    return mr;
}

static inline nrm_resource *
source_of(nrm_kind kind)
{
    nrm_resource *mr = NULL;
    switch (kind) {
    case NRM_KIND_PINNED:
        CHECK_OK(nrm_pinned_create(NULL, &mr));
        break;
    case NRM_KIND_MANAGED:
        CHECK_OK(nrm_managed_create(NULL, &mr));
        break;
    default:
        CHECK_OK(nrm_device_create(NULL, &mr));
    }
    return mr;
}

/* Of device memory; 0 blocks: it grows. */
static inline void
start(size_t n_blocks)
{
    start_device(NULL, 1);
    pool = pool_of(source_of(NRM_KIND_DEVICE), n_blocks * BLOCK, NRM_REUSE_DEFAULT);
}

/* From here on the stream has a slot, so that what is freed on it is kept. */
static inline void
know(nrm_stream *stream)
{
    give(take(BLOCK, stream), stream);
}

#endif
