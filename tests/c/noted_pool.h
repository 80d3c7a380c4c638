/*
 * A program whose copies are noted as uses of the blocks of a pool, or are not: the
 * base of test_known_uses.c.
 */
#ifndef NRM_TESTS_NOTED_POOL_H
#define NRM_TESTS_NOTED_POOL_H

#include <string.h>

#include "copies.h"
#include "core/capture.h"
#include "core/known_uses.h"
#include "nrm/uses.h"
#include "streams.h"

#define BLOCK COPIES_NBYTES

static inline nrm_resource *
pool_with(nrm_resource *source, nrm_reuse reuse, size_t maximum_nbytes)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    nrm_resource *mr = NULL;
    options.reuse = reuse;
    options.maximum_nbytes = maximum_nbytes;
    options.on_exhausted = NRM_ON_EXHAUSTED_ERROR;
    CHECK_OK(nrm_pool_create(source, &options, &mr));
    return mr;
}

static inline void
copy_on(const struct copies *copies, const nrm_stream *stream, const void *ptr)
{
    CHECK_EQ(cuda.cuMemcpyHtoDAsync(copies->device, ptr, BLOCK, handle_of(stream)),
             NRM_CUDA_SUCCESS);
}

static inline size_t
n_uses(const void *ptr)
{
    nrm_use uses[8];
    size_t n = 99;
    CHECK_OK(nrm_block_uses(ptr, uses, 8, &n));
    return n;
}

static inline void
finish(const nrm_stream *stream)
{
    let_go(stream);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(stream)), NRM_CUDA_SUCCESS);
}

/* The program with a pool, a stream of ours, and a block of ones. */
struct scene {
    struct copies copies;
    nrm_resource *pool;
    nrm_stream *stream;
    void *ptr;
};

static inline struct scene
scene_begin(const struct copies_kind *kind, nrm_reuse reuse)
{
    struct scene scene = {.copies = copies_begin(kind)};
    scene.pool = pool_with(scene.copies.source, reuse, 0);
    scene.stream = new_stream();
    scene.ptr = allocate(scene.pool, BLOCK);
    memset(scene.ptr, 1, BLOCK);
    return scene;
}

static inline void
scene_end(struct scene *scene)
{
    nrm_stream_release(scene->stream);
    copies_end(&scene->copies, scene->pool);
}

/* The block is copied on the stream, later. */
static inline void
copy_held(struct scene *scene)
{
    hold(scene->stream);
    copy_on(&scene->copies, scene->stream, scene->ptr);
}

static inline void
copy_on_handle(struct scene *scene, nrm_CUstream handle)
{
    CHECK_EQ(cuda.cuMemcpyHtoDAsync(scene->copies.device, scene->ptr, BLOCK, handle),
             NRM_CUDA_SUCCESS);
}

/* The freed block does not come back before its copy is done, for which `held` is let
   go, and the copy sees the ones; then it does. */
static inline void
check_waits(struct scene *scene, nrm_CUstream held)
{
    CHECK(!is_among_next(scene->pool, scene->ptr, 6));
    CHECK_EQ(sim.release_stream(held), 0);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    CHECK(copies_arrived(&scene->copies, 1, BLOCK));
    CHECK(is_among_next(scene->pool, scene->ptr, 8));
}

#endif
