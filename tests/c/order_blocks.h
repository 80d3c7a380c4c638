/*
 * Stream order on the simulated driver, for programs that compare bytes.
 *
 * A stream that works on a block is held, the block is freed, and another stream takes
 * it and overwrites it. What the first stream reads when it goes on must be what was
 * there.
 */
#ifndef NRM_TESTS_ORDER_BLOCKS_H
#define NRM_TESTS_ORDER_BLOCKS_H

#include "core/order.h"
#include "cuda/context.h"
#include "streams.h"

#define BLOCK ((size_t)4096)

enum { N_BLOCKS = 8 };

/* A block of device memory as a pool sees it. */
struct block {
    nrm_CUdeviceptr ptr;
    struct nrm__order_tag tag;
};

static struct block blocks[N_BLOCKS];
static nrm_CUdeviceptr seen; /* what a kernel has read, a BLOCK for each */

/* The blocks hold the value 7 and are done. */
static inline void
start(const struct nrm_cudasim_config *config)
{
    simulator_start(config);
    CHECK_OK(nrm__cuda_init(NULL));
    make_current(0);
    CHECK_EQ(cuda.cuMemAlloc(&seen, N_BLOCKS * BLOCK), NRM_CUDA_SUCCESS);
    for (int i = 0; i < N_BLOCKS; i++) {
        CHECK_EQ(cuda.cuMemAlloc(&blocks[i].ptr, BLOCK), NRM_CUDA_SUCCESS);
        CHECK_EQ(cuda.cuMemsetD8(blocks[i].ptr, 7, BLOCK), NRM_CUDA_SUCCESS);
        blocks[i].tag = NRM__ORDER_DONE;
    }
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
}

/* A kernel that reads a block. */
static inline void
read_on(const nrm_stream *stream, int i)
{
    CHECK_EQ(cuda.cuMemcpyAsync(seen + (size_t)i * BLOCK, blocks[i].ptr, BLOCK,
                                handle_of(stream)),
             NRM_CUDA_SUCCESS);
}

/* What the next owner does with it. */
static inline void
overwrite_on(const nrm_stream *stream, int i)
{
    CHECK_EQ(cuda.cuMemsetD8Async(blocks[i].ptr, 9, BLOCK, handle_of(stream)),
             NRM_CUDA_SUCCESS);
}

static inline void
free_on(nrm_stream *stream, int i)
{
    blocks[i].tag = nrm__order_stamp(stream, 0);
}

/* As a pool takes a block for a stream: without a wait if it may. */
static inline void
take(int i, nrm_stream *stream)
{
    if (!nrm__order_is_free(blocks[i].tag, stream, 0)) {
        CHECK_OK(nrm__order_adopt(blocks[i].tag, stream, 0));
    }
}

static inline bool
is_done(int i)
{
    return nrm__order_is_done(blocks[i].tag);
}

static inline bool
poll(int i)
{
    return nrm__order_poll(blocks[i].tag);
}

/* Whether the kernel that read block i saw `value` in all of it. */
static inline bool
has_seen(int i, unsigned char value)
{
    return has_all(seen + (size_t)i * BLOCK, BLOCK, value);
}

static inline void
stop(void)
{
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    cuda.cuCtxSetCurrent(NULL);
    simulator_check_faults();
}

#endif
