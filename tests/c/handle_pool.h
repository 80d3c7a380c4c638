/*
 * A pool of device memory whose users name streams by bare handles, each call through
 * an object of its own: the base of test_cache_others.c.
 */
#ifndef NRM_TESTS_HANDLE_POOL_H
#define NRM_TESTS_HANDLE_POOL_H

#include "core/order_slots.h"
#include "device_pool.h"
#include "nrm/pools.h"
#include "workers.h"

#define LARGE (16 * BLOCK)

enum {
    N_BLOCKS = 64, /* of a pool that gets no more: a thread keeps up to four */
    N_WORKERS = 4,
    N_NUMBERS = NRM__ORDER_OTHER_SETS * NRM__ORDER_OTHER_WAYS,
};

/* 0 blocks: the pool grows. */
static inline void
start_machine(size_t n_blocks, uint64_t seed)
{
    struct nrm_cudasim_config config = simulator_config();
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    nrm_resource *source = NULL;
    config.seed = seed;
    start_device(&config, 1);
    options.initial_nbytes = options.maximum_nbytes = n_blocks * BLOCK;
    options.wait_limit_ns = 5 * 1000 * 1000;
    CHECK_OK(nrm_device_create(NULL, &source));
    CHECK_OK(nrm_pool_create(source, &options, &pool));
    nrm_resource_release(source);
}

static inline void
start(size_t n_blocks)
{
    start_machine(n_blocks, 0);
}

/* No stream of ours is left either. */
static inline void
finish(void)
{
    stop();
    CHECK_EQ(simulator_count(NRM_CUDASIM_STREAMS), 0u);
}

/* Each call through an object of its own, as a binding makes them. */
static inline void *
take_by(size_t nbytes, nrm_CUstream handle)
{
    void *ptr = NULL;
    nrm_stream *stream = handle != NULL ? bare_stream(handle) : NULL;
    CHECK_OK(nrm_resource_allocate(pool, nbytes, 0, stream, &ptr));
    nrm_stream_release(stream);
    return ptr;
}

static inline void
give_by(void *ptr, nrm_CUstream handle)
{
    nrm_stream *stream = handle != NULL ? bare_stream(handle) : NULL;
    CHECK_OK(nrm_resource_deallocate(pool, ptr, 0, stream));
    nrm_stream_release(stream);
}

static inline void
destroy(nrm_CUstream handle)
{
    CHECK_EQ(cuda.cuStreamDestroy(handle), NRM_CUDA_SUCCESS);
}

/* From here on the stream has a slot, so that what is freed on it is kept. */
static inline void
know(nrm_CUstream handle)
{
    give_by(take_by(BLOCK, handle), handle);
}

/* A block of 7s, which work on the stream that waits for `aside` is going to read. */
static inline void *
put_in_use(nrm_CUstream handle, const nrm_stream *aside)
{
    void *ptr = take_by(BLOCK, handle);
    use_behind(handle, ptr, aside);
    return ptr;
}

/* The only block that is free was freed before it was read: whoever has it now
   overwrites it on a stream that must wait for `aside` (which lets the reader go). */
static inline void
check_waits(void *used, nrm_CUstream handle, const nrm_stream *aside)
{
    void *ptr = take_by(BLOCK, handle);
    CHECK(ptr == used);
    write_on_handle(handle, ptr, 9);
    let_run();
    let_go(aside);
    CHECK(has_seen(0, 7));
    give_by(ptr, handle);
}

struct part {
    nrm_CUstream handle;
    nrm_stream *aside;
    void *ptr;
    size_t n_kept;
};

/* Frees a block that is in use, and keeps it. */
static inline void
keep_used_there(void *argument)
{
    struct part *part = argument;
    make_current(0);
    know(part->handle);
    know(part->handle);
    part->ptr = put_in_use(part->handle, part->aside);
    give_by(part->ptr, part->handle);
    part->n_kept = n_kept(pool);
    cuda.cuCtxSetCurrent(NULL);
}

#endif
