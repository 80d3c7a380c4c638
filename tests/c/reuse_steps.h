/* What small programs have whose schedules are explored (explore.h): a pool of some
   kind, streams, and steps that take blocks, work on them and give them back. */
#ifndef NRM_TESTS_REUSE_STEPS_H
#define NRM_TESTS_REUSE_STEPS_H

#include "base/bits.h"
#include "core/hooks.h"
#include "explore.h"
#include "fixtures.h"
#include "nrm/options.h"
#include "nrm/uses.h"

#define PINNED_BLOCK (128 * NRM__KIB)
#define DEVICE_BLOCK ((size_t)4096)
#define WORK ((size_t)64) /* bytes that a copy or fill touches */

enum { N_BLOCKS = 6, N_WORKS = 64, N_GIVEN = 16 };

/* What a program has. */
static struct {
    nrm_resource *pool;
    size_t nbytes; /* of a block */
    nrm_stream *a, *b, *c;
    nrm_CUstream raw;
    nrm_CUdeviceptr scratch; /* a place of its own for each copy */
    atomic_uint n_works;
    void *blocks[N_BLOCKS];
    void *given[N_GIVEN]; /* all that was given back */
    atomic_uint n_given;
    nrm_CUgraphExec exec;
} it;

static uint64_t n_reuses; /* memory that was handed out again, in all schedules */

/* ---- steps ---- */

/* NULL where the pool is full of what may be in use. */
static inline void
take(int i, nrm_stream *stream)
{
    explore_step();
    it.blocks[i] = NULL;
    nrm_status status =
        nrm_resource_allocate(it.pool, it.nbytes, 0, stream, &it.blocks[i]);
    CHECK(status == NRM_OK || status == NRM_OUT_OF_MEMORY);
    for (int k = 0; k < N_GIVEN && it.blocks[i] != NULL; k++) {
        n_reuses += it.given[k] == it.blocks[i];
    }
}

static inline void
give(int i, nrm_stream *stream)
{
    explore_step();
    it.given[atomic_fetch_add(&it.n_given, 1) % N_GIVEN] = it.blocks[i];
    CHECK_OK(nrm_resource_deallocate(it.pool, it.blocks[i], 0, stream));
    it.blocks[i] = NULL;
}

static inline nrm_CUdeviceptr
next_place(void)
{
    unsigned n =
        atomic_fetch_add(&it.n_works, 1) + 1; /* the first one is for reading */
    CHECK_LT(n, N_WORKS);
    return it.scratch + n % N_WORKS * WORK;
}

static inline void
read_on_raw(nrm_CUstream stream, int i)
{
    if (it.blocks[i] != NULL) {
        explore_submit(stream);
        CHECK_EQ(cuda.cuMemcpyAsync(next_place(), (uintptr_t)it.blocks[i], WORK,
                                    stream),
                 NRM_CUDA_SUCCESS);
    }
}

static inline void
write_on_raw(nrm_CUstream stream, int i)
{
    if (it.blocks[i] != NULL) {
        explore_submit(stream);
        CHECK_EQ(cuda.cuMemcpyAsync((uintptr_t)it.blocks[i], it.scratch, WORK, stream),
                 NRM_CUDA_SUCCESS);
    }
}

static inline void
read_on(const nrm_stream *stream, int i)
{
    read_on_raw(handle_of(stream), i);
}

static inline void
write_on(const nrm_stream *stream, int i)
{
    write_on_raw(handle_of(stream), i);
}

static inline void
note(int i, nrm_stream *stream)
{
    explore_step();
    if (it.blocks[i] != NULL) {
        CHECK_OK(nrm_record_use(it.blocks[i], stream));
    }
}

static inline void
synchronise(const nrm_stream *stream)
{
    explore_step();
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(stream)), NRM_CUDA_SUCCESS);
}

static inline void
destroy_raw(void)
{
    explore_step();
    CHECK_EQ(cuda.cuStreamDestroy(it.raw), NRM_CUDA_SUCCESS);
    it.raw = NULL;
}

/* ---- beginnings ---- */

static inline nrm_resource *
pool_of(nrm_resource *source, nrm_reuse reuse, size_t n_blocks, nrm_segments segments)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    nrm_resource *mr = NULL;
    options.initial_nbytes = options.maximum_nbytes = n_blocks * it.nbytes;
    options.reuse = reuse;
    options.segments = segments;
    options.on_exhausted = NRM_ON_EXHAUSTED_ERROR;
    CHECK_OK(nrm_pool_create(source, &options, &mr));
    nrm_resource_release(source);
    return mr;
}

/* Every allocation that finds nothing closes an epoch, and none waits. */
static inline void
start_with(size_t nbytes)
{
    memset(&it, 0, sizeof it);
    CHECK_OK(nrm_option_set(NRM_OPT_EPOCH_NBYTES, "1"));
    CHECK_OK(nrm_option_set(NRM_OPT_WAIT_LIMIT, "0"));
    CHECK_OK(nrm_option_set(NRM_OPT_DECAY, "0"));
    it.nbytes = nbytes;
    it.a = new_stream();
    it.b = new_stream();
    it.c = new_stream();
    it.raw = new_handle();
    CHECK_EQ(cuda.cuMemAlloc(&it.scratch, N_WORKS * WORK), NRM_CUDA_SUCCESS);
}

static inline void
start_pinned_as(nrm_reuse reuse)
{
    start_with(PINNED_BLOCK);
    it.pool = pool_of(pinned_source(), reuse, 2, NRM_SEGMENTS_DEFAULT);
}

static inline void
start_pinned(void)
{
    start_pinned_as(NRM_REUSE_CONTEXT);
}

/* A block is in use, and one was given back and is not covered by an epoch. */
static inline void
start_with_one_back(void)
{
    start_pinned();
    take(0, NULL);
    take(1, NULL);
    give(1, NULL);
}

static inline void
start_recorded(void)
{
    start_pinned_as(NRM_REUSE_RECORDED);
}

static inline void
start_immediate(void)
{
    start_pinned_as(NRM_REUSE_IMMEDIATE);
}

static inline void
start_managed(void)
{
    nrm_resource *source = NULL;
    start_with(PINNED_BLOCK);
    CHECK_OK(nrm_managed_create(NULL, &source));
    it.pool = pool_of(source, NRM_REUSE_CONTEXT, 2, NRM_SEGMENTS_DEFAULT);
}

static inline void
start_unpooled(void)
{
    start_with(PINNED_BLOCK);
    it.pool = pinned_source();
}

static inline nrm_resource *
fixed_over(nrm_resource *source)
{
    nrm_fixed_size_options options = NRM_OPTIONS(nrm_fixed_size_options);
    nrm_resource *mr = NULL;
    options.block_nbytes = it.nbytes;
    options.n_blocks = 2;
    CHECK_OK(nrm_fixed_size_create(source, &options, &mr));
    nrm_resource_release(source);
    return mr;
}

static inline void
start_pinned_fixed(void)
{
    start_with(PINNED_BLOCK);
    it.pool = fixed_over(pinned_source());
}

static inline void
start_device(size_t nbytes, size_t n_blocks, nrm_segments segments)
{
    start_with(nbytes);
    it.pool = pool_of(device_source(), NRM_REUSE_CONTEXT, n_blocks, segments);
}

static inline void
start_one_block(void)
{
    start_device(DEVICE_BLOCK, 1, NRM_SEGMENTS_ALLOC);
}

static inline void
start_two_blocks(void)
{
    start_device(DEVICE_BLOCK, 2, NRM_SEGMENTS_ALLOC);
}

static inline void
start_mapped(void)
{
    start_device(2 * NRM__MIB, 2, NRM_SEGMENTS_VMM);
}

static inline void
start_device_fixed(void)
{
    start_with(DEVICE_BLOCK);
    it.pool = fixed_over(device_source());
}

/* ---- the end of all of them ---- */

static inline void
finish(void)
{
    int devices[NRM__MAX_DEVICES];
    for (int n = nrm__cuda_active_devices(devices); n > 0; n--) {
        make_current(devices[n - 1]);
        CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    }
    make_current(0);
    for (int i = 0; i < N_BLOCKS; i++) {
        CHECK_OK(nrm_resource_deallocate(it.pool, it.blocks[i], 0, NULL));
    }
    if (it.exec != NULL) {
        CHECK_EQ(cuda.cuGraphExecDestroy(it.exec), NRM_CUDA_SUCCESS);
    }
    nrm_resource_release(it.pool);
    nrm_stream_release(it.a);
    nrm_stream_release(it.b);
    nrm_stream_release(it.c);
    if (it.raw != NULL) {
        CHECK_EQ(cuda.cuStreamDestroy(it.raw), NRM_CUDA_SUCCESS);
    }
    CHECK_EQ(cuda.cuMemFree(it.scratch), NRM_CUDA_SUCCESS);
    for (int i = 0; i < 4 && !nrm__retired_is_empty(); i++) {
        (void)nrm__retired_drain(0);
    }
    CHECK(nrm__retired_is_empty());
}

#endif
