/*
 * A pool of device memory and programs whose streams free and allocate its blocks: the
 * base of test_pool_order.c and test_pool_order_streams.c.
 */
#ifndef NRM_TESTS_ORDERED_POOL_H
#define NRM_TESTS_ORDERED_POOL_H

#include "device_pool.h"

enum { N_SEEN = 8, N_STREAMS = 3, N_THREADS = 3 };

static inline nrm_resource *
pool_of(nrm_resource *upstream, size_t nbytes, nrm_reuse reuse,
        nrm_on_exhausted on_exhausted)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    nrm_resource *mr = NULL;
    options.initial_nbytes = options.maximum_nbytes = nbytes;
    options.reuse = reuse;
    options.on_exhausted = on_exhausted;
    options.wait_limit_ns = 5 * 1000 * 1000;
    CHECK_OK(nrm_pool_create(upstream, &options, &mr));
    nrm_resource_release(upstream);
    return mr;
}

/* A pool that has `nbytes` and gets no more; 0: it grows. */
static inline void
start(size_t nbytes)
{
    start_device(NULL, N_SEEN);
    pool = pool_of(device_source(), nbytes, NRM_REUSE_DEFAULT, NRM_ON_EXHAUSTED_ERROR);
}

/* A block of 7s that the stream, held, is about to read when it is freed on
   `freed_on`. */
static inline void *
use_and_free(nrm_stream *stream, int i, nrm_stream *freed_on)
{
    void *ptr = take(BLOCK, stream);
    write_on(stream, ptr, 7);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(stream)), NRM_CUDA_SUCCESS);
    hold(stream);
    read_on(stream, ptr, i);
    give(ptr, freed_on);
    return ptr;
}

#endif
