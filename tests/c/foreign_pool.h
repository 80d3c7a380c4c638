/*
 * Device memory in a process that has contexts of its own making, and no primary one
 * unless a test makes it: the base of test_foreign_contexts.c and test_foreign_ends.c.
 */
#ifndef NRM_TESTS_FOREIGN_POOL_H
#define NRM_TESTS_FOREIGN_POOL_H

#include "device_pool.h"

#include <pthread.h>

#include "core/capture.h"
#include "core/hooks.h"
#include "nrm/sources.h"

#define SHORT_NS UINT64_C(2000000000) /* far below the wait at the end of a pool */

static nrm_CUcontext own;  /* the program's */
static nrm_CUstream aside; /* of it: what work waits for */

static inline nrm_CUcontext
new_context(void)
{
    nrm_CUcontext context = NULL;
    CHECK_EQ(cuda.cuCtxCreate(&context, 0, 0), NRM_CUDA_SUCCESS);
    return context;
}

static inline bool
has_primary(void)
{
    unsigned flags;
    int active = 0;
    CHECK_EQ(cuda.cuDevicePrimaryCtxGetState(0, &flags, &active), NRM_CUDA_SUCCESS);
    return active != 0;
}

/* A pool in the only context, of so many blocks; 0: it begins with none, or ends
   nowhere. */
static inline void
start_on(const struct nrm_cudasim_config *config, size_t n_first, size_t n_last)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    simulator_start(config);
    CHECK_OK(nrm__cuda_init(NULL));
    own = new_context();
    CHECK_EQ(cuda.cuMemAlloc(&seen, 2 * BLOCK), NRM_CUDA_SUCCESS);
    options.initial_nbytes = n_first * BLOCK;
    options.maximum_nbytes = n_last * BLOCK;
    options.wait_limit_ns = 5 * 1000 * 1000;
    nrm_resource *upstream = device_source();
    CHECK_OK(nrm_pool_create(upstream, &options, &pool));
    nrm_resource_release(upstream);
}

static inline void
start(size_t n_first, size_t n_last)
{
    start_on(NULL, n_first, n_last);
}

/* The pool ends, and nobody waits longer than the work there is. */
static inline void
finish(void)
{
    uint64_t before = nrm__clock_ns();
    nrm_resource_release(pool);
    CHECK_LE(nrm__clock_ns() - before, SHORT_NS);
    simulator_check_faults();
    CHECK_EQ(simulator_count(NRM_CUDASIM_PHYSICAL), 0u);
    CHECK_EQ(simulator_count(NRM_CUDASIM_RESERVATIONS), 0u);
}

static inline void
end_context(void)
{
    CHECK_EQ(cuda.cuCtxDestroy(own), NRM_CUDA_SUCCESS);
    simulator_check_faults();
}

/* ---- on what it is freed ---- */

/* A stream of the program's context, or what stands for one, with a way to free on
   it. */
enum freed_on { ON_DEFAULT, ON_LEGACY, ON_PER_THREAD, ON_THEIRS, ON_OURS, BY_HOST };

static const struct {
    const char *name;
    enum freed_on on;
} ways[] = {
    {"on_the_default_stream", ON_DEFAULT},     {"on_the_legacy_stream", ON_LEGACY},
    {"on_a_per_thread_stream", ON_PER_THREAD}, {"on_a_stream_of_theirs", ON_THEIRS},
    {"on_a_stream_of_ours", ON_OURS},          {"by_the_host", BY_HOST},
};

static inline nrm_stream *
stream_for(enum freed_on on)
{
    nrm_stream *stream = NULL;
    switch (on) {
    case ON_DEFAULT:
        return nrm_stream_default();
    case ON_LEGACY:
        return nrm_stream_legacy();
    case ON_PER_THREAD:
        CHECK_OK(nrm_stream_per_thread(&stream));
        return stream;
    case ON_THEIRS:
        return bare_stream(new_handle());
    case ON_OURS:
        return new_stream();
    default:
        return NULL;
    }
}

/* Where work is submitted that the way of freeing covers. */
static inline nrm_CUstream
worker_of(const nrm_stream *stream)
{
    return stream != NULL ? handle_of(stream) : NRM_CU_STREAM_LEGACY;
}

/* Makes a block one of 7s, which work on the stream is going to read. That waits for
   another stream, which is held: any thread can let it go. */
static inline void
use_behind_aside(void *ptr, nrm_stream *stream)
{
    nrm_CUstream worker = worker_of(stream);
    write_on_handle(worker, ptr, 7);
    CHECK_EQ(cuda.cuMemsetD8(seen, 0, BLOCK), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    aside = new_handle();
    CHECK_EQ(sim.hold_stream(aside), 0);
    CHECK_EQ(cuda.cuMemsetD8Async(seen + BLOCK, 0, 1, aside), NRM_CUDA_SUCCESS);
    let_wait_for(worker, aside);
    read_on_handle(worker, ptr, 0);
}

static inline void *
free_in_use(nrm_stream *stream)
{
    void *ptr = take(BLOCK, stream);
    use_behind_aside(ptr, stream);
    give(ptr, stream);
    return ptr;
}

static inline void
let_finish(void)
{
    CHECK_EQ(sim.release_stream(aside), 0);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
}

#endif
