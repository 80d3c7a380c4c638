/*
 * Blocks of one size in device memory on the simulated driver, by themselves, as bins
 * and under adaptors.
 *
 * A stream that reads a block is held when the block is freed; whoever has the block
 * next overwrites it. What the stream reads when it goes on must be what was there. A
 * resource that is full has an upstream with room for its blocks and for nothing else.
 */
#ifndef NRM_TESTS_FIXED_BLOCKS_H
#define NRM_TESTS_FIXED_BLOCKS_H

#include <string.h>

#include "base/bits.h"
#include "cuda/context.h"
#include "cuda/event.h"
#include "nrm/adaptors.h"
#include "streams.h"
#include "workers.h"

enum { N_BLOCKS = 4, MANY = 1 << 20 };

static nrm_resource *mr;
static size_t block_nbytes;
static nrm_CUdeviceptr seen; /* what kernels have read */
static nrm_stream *a, *b;
static void *rest[N_BLOCKS - 1]; /* see take_last_and_read */

/* ---- resources ---- */

/* Each of these takes the reference to its upstream. */
static inline nrm_resource *
fixed_over(nrm_resource *upstream)
{
    nrm_fixed_size_options options = NRM_OPTIONS(nrm_fixed_size_options);
    nrm_resource *fixed = NULL;
    options.block_nbytes = block_nbytes;
    options.n_blocks = N_BLOCKS;
    CHECK_OK(nrm_fixed_size_create(upstream, &options, &fixed));
    nrm_resource_release(upstream);
    return fixed;
}

/* With one bin, over the same upstream. */
static inline nrm_resource *
bins_over(nrm_resource *upstream)
{
    nrm_resource *binning = NULL;
    CHECK_OK(nrm_binning_create(upstream, NULL, &binning));
    nrm_resource *fixed = fixed_over(upstream);
    CHECK_OK(nrm_binning_add_bin(binning, block_nbytes, fixed));
    nrm_resource_release(fixed);
    return binning;
}

/* With room for so many blocks. */
static inline nrm_resource *
source_of(size_t n_blocks)
{
    return limiting_over(device_source(), n_blocks * block_nbytes);
}

/* The chunk is aligned to a page of the block map, which a pool has to make room
   for. */
static inline nrm_resource *
pool_of(size_t n_blocks)
{
    return pool_over(device_source(), n_blocks * block_nbytes + NRM__MAP_PAGE);
}

static inline nrm_resource *
make_fixed(size_t n_blocks)
{
    return fixed_over(source_of(n_blocks));
}

static inline nrm_resource *
make_fixed_over_pool(size_t n_blocks)
{
    return fixed_over(pool_of(n_blocks));
}

static inline nrm_resource *
make_bins(size_t n_blocks)
{
    return bins_over(pool_of(n_blocks));
}

static inline nrm_resource *
make_under_adaptors(size_t n_blocks)
{
    return statistics_over(limiting_over(make_fixed(n_blocks), MANY * block_nbytes));
}

static inline nrm_resource *
make_bins_under_adaptors(size_t n_blocks)
{
    return limiting_over(statistics_over(make_bins(n_blocks)), MANY * block_nbytes);
}

static const struct over {
    const char *name;
    nrm_resource *(*make)(size_t n_blocks);
    size_t block_nbytes;
} overs[] = {
    {"64 KiB", make_fixed, 64 * NRM__KIB},
    {"1 KiB", make_fixed, NRM__KIB},
    {"768 B, no power of two", make_fixed, 768},
    {"1 MiB", make_fixed, NRM__MIB},
    {"64 KiB over a pool", make_fixed_over_pool, 64 * NRM__KIB},
    {"320 KiB over a pool", make_fixed_over_pool, 320 * NRM__KIB},
    {"a bin", make_bins, 64 * NRM__KIB},
    {"under adaptors", make_under_adaptors, 64 * NRM__KIB},
    {"a bin under adaptors", make_bins_under_adaptors, 64 * NRM__KIB},
};

/* ---- the program ---- */

static inline void
start_machine(void)
{
    simulator_start(NULL);
    nrm__cuda_capture_lift(-1);
    CHECK_OK(nrm__cuda_init(NULL));
    make_current(0);
    CHECK_EQ(cuda.cuMemAlloc(&seen, block_nbytes), NRM_CUDA_SUCCESS);
    a = new_stream();
    b = new_stream();
}

/* A resource with room for so many blocks. */
static inline void
start(const struct over *over, size_t n_blocks)
{
    block_nbytes = over->block_nbytes;
    start_machine();
    mr = over->make(n_blocks);
}

/* One with blocks of this size, and as much room as there is. */
static inline void
start_bare(size_t nbytes)
{
    block_nbytes = nbytes;
    start_machine();
    mr = fixed_over(device_source());
}

static inline void
check(void)
{
    for (nrm_resource *each = mr; each != NULL; each = each->upstream) {
        if (each->ops->check != NULL) {
            each->ops->check(each);
        }
    }
}

static inline void
stop(void)
{
    nrm_stream_release(a);
    nrm_stream_release(b);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    check();
    CHECK_EQ(live_nbytes(mr), 0);
    CHECK_OK(nrm_resource_trim(mr, 0, NULL));
    CHECK_EQ(reserved_nbytes(mr), 0);
    nrm_resource_release(mr);
    CHECK_EQ(cuda.cuMemFree(seen), NRM_CUDA_SUCCESS);
    CHECK_EQ(simulator_count(NRM_CUDASIM_DEVICE_ALLOCATIONS), 0u);
    CHECK_EQ(simulator_count(NRM_CUDASIM_PHYSICAL), 0u);
    cuda.cuCtxSetCurrent(NULL);
    simulator_check_faults();
}

static inline void *
take_some(size_t nbytes, nrm_stream *stream)
{
    void *ptr = NULL;
    CHECK_OK(nrm_resource_allocate(mr, nbytes, 0, stream, &ptr));
    check();
    return ptr;
}

static inline void *
take(nrm_stream *stream)
{
    return take_some(block_nbytes, stream);
}

static inline void
give(void *ptr, nrm_stream *stream)
{
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, stream));
    check();
}

static inline void
check_full(nrm_stream *stream)
{
    void *ptr = NULL;
    CHECK_STATUS(nrm_resource_allocate(mr, block_nbytes, 0, stream, &ptr),
                 NRM_OUT_OF_MEMORY);
    check();
}

static inline void
take_all(void **out, int n, nrm_stream *stream)
{
    for (int i = 0; i < n; i++) {
        out[i] = take(stream);
    }
}

static inline void
give_all(void **blocks, int n, nrm_stream *stream)
{
    for (int i = 0; i < n; i++) {
        give(blocks[i], stream);
    }
}

static inline nrm_CUdeviceptr
address(const void *ptr)
{
    return (nrm_CUdeviceptr)(uintptr_t)ptr;
}

static inline void
write_on(const nrm_stream *stream, void *ptr, unsigned char value)
{
    CHECK_EQ(cuda.cuMemsetD8Async(address(ptr), value, block_nbytes, handle_of(stream)),
             NRM_CUDA_SUCCESS);
}

static inline void
read_on(const nrm_stream *stream, const void *ptr)
{
    CHECK_EQ(cuda.cuMemcpyAsync(seen, address(ptr), block_nbytes, handle_of(stream)),
             NRM_CUDA_SUCCESS);
}

static inline bool
has_seen(unsigned char value)
{
    return has_all(seen, block_nbytes, value);
}

/* From here on a thread may keep what is freed on the stream. */
static inline void
know(nrm_stream *stream)
{
    give(take(stream), stream);
}

/* A block of 7s that the stream, held, is about to read. */
static inline void *
take_and_read(nrm_stream *stream)
{
    void *ptr = take(stream);
    write_on(stream, ptr, 7);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(stream)), NRM_CUDA_SUCCESS);
    hold(stream);
    read_on(stream, ptr);
    return ptr;
}

/* All others are the first stream's, too. */
static inline void *
take_last_and_read(void)
{
    take_all(rest, N_BLOCKS - 1, a);
    return take_and_read(a);
}

static inline void
give_rest(nrm_stream *stream)
{
    give_all(rest, N_BLOCKS - 1, stream);
}

#endif
