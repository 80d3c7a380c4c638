/*
 * A pool of device memory on the simulated driver, for programs that compare bytes: a
 * stream that works on a block is held, the block is freed, and somebody else gets it
 * and overwrites it. What the first stream reads when it goes on must be what was
 * there.
 */
#ifndef NRM_TESTS_DEVICE_POOL_H
#define NRM_TESTS_DEVICE_POOL_H

#include "cuda/context.h"
#include "fixtures.h"
#include "pools/pool.h"
#include "streams.h"

#define BLOCK ((size_t)4096)

static nrm_resource *pool;
static nrm_CUdeviceptr seen; /* what kernels have read, a BLOCK for each */

/* ---- the machine ---- */

static inline void
start_device(const struct nrm_cudasim_config *config, size_t n_seen)
{
    simulator_start(config);
    CHECK_OK(nrm__cuda_init(NULL));
    make_current(0);
    CHECK_EQ(cuda.cuMemAlloc(&seen, n_seen * BLOCK), NRM_CUDA_SUCCESS);
}

/* Whatever is left of the pool stays. */
static inline void
leave_device(void)
{
    CHECK_EQ(cuda.cuMemFree(seen), NRM_CUDA_SUCCESS);
    cuda.cuCtxSetCurrent(NULL);
    simulator_check_faults();
}

static inline void
stop_device(void)
{
    leave_device();
    CHECK_EQ(simulator_count(NRM_CUDASIM_DEVICE_ALLOCATIONS), 0u);
    CHECK_EQ(simulator_count(NRM_CUDASIM_PHYSICAL), 0u);
    CHECK_EQ(simulator_count(NRM_CUDASIM_RESERVATIONS), 0u);
}

/* Everything has come back, and goes back. */
static inline void
empty_pool(void)
{
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    nrm__pool_check(pool);
    CHECK_EQ(live_nbytes(pool), 0);
    CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    CHECK_EQ(reserved_nbytes(pool), 0);
}

static inline void
stop(void)
{
    empty_pool();
    nrm_resource_release(pool);
    stop_device();
}

/* ---- blocks ---- */

static inline void *
take(size_t nbytes, nrm_stream *stream)
{
    void *ptr = NULL;
    CHECK_OK(nrm_resource_allocate(pool, nbytes, 0, stream, &ptr));
    nrm__pool_check(pool);
    return ptr;
}

static inline void
give(void *ptr, nrm_stream *stream)
{
    CHECK_OK(nrm_resource_deallocate(pool, ptr, 0, stream));
    nrm__pool_check(pool);
}

static inline nrm_status
try_take(size_t nbytes, nrm_stream *stream)
{
    void *ptr = NULL;
    nrm_status status = nrm_resource_allocate(pool, nbytes, 0, stream, &ptr);
    nrm__pool_check(pool);
    if (status == NRM_OK) {
        give(ptr, stream);
    }
    return status;
}

/* ---- kernels ---- */

static inline void
write_on_handle(nrm_CUstream handle, void *ptr, unsigned char value)
{
    CHECK_EQ(cuda.cuMemsetD8Async((nrm_CUdeviceptr)(uintptr_t)ptr, value, BLOCK,
                                  handle),
             NRM_CUDA_SUCCESS);
}

static inline void
write_on(const nrm_stream *stream, void *ptr, unsigned char value)
{
    write_on_handle(handle_of(stream), ptr, value);
}

/* Reads a block into a place of `seen`. */
static inline void
read_on_handle(nrm_CUstream handle, const void *ptr, int i)
{
    CHECK_EQ(cuda.cuMemcpyAsync(seen + (size_t)i * BLOCK,
                                (nrm_CUdeviceptr)(uintptr_t)ptr, BLOCK, handle),
             NRM_CUDA_SUCCESS);
}

static inline void
read_on(const nrm_stream *stream, const void *ptr, int i)
{
    read_on_handle(handle_of(stream), ptr, i);
}

static inline bool
has_seen(int i, unsigned char value)
{
    return has_all(seen + (size_t)i * BLOCK, BLOCK, value);
}

/* Makes a block one of 7s, which work on the stream that waits for `aside` is going to
   read. */
static inline void
use_behind(nrm_CUstream handle, void *ptr, const nrm_stream *aside)
{
    write_on_handle(handle, ptr, 7);
    CHECK_EQ(cuda.cuStreamSynchronize(handle), NRM_CUDA_SUCCESS);
    hold(aside);
    CHECK_EQ(cuda.cuMemsetD8Async(seen, 0, 1, handle_of(aside)), NRM_CUDA_SUCCESS);
    let_wait_for(handle, handle_of(aside));
    read_on_handle(handle, ptr, 0);
}

#endif
