/* Blocks that die while a capture goes on belong to its graph: they come back when that
   is gone, whoever frees them, and not before. */
#include <pthread.h>
#include <string.h>

#include "copies.h"
#include "core/capture.h"
#include "core/capture_frees.h"
#include "nrm/pools.h"
#include "streams.h"

#define BLOCK COPIES_NBYTES
#define MAX_OWNERS 16

struct scene {
    struct copies copies;
    nrm_resource *pool;
    nrm_CUstream stream; /* that is captured */
};

static struct scene
scene_begin(const struct copies_kind *kind, nrm_reuse reuse)
{
    struct scene scene = {.copies = copies_begin(kind)};
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    options.reuse = reuse;
    CHECK_OK(nrm_pool_create(scene.copies.source, &options, &scene.pool));
    scene.stream = new_handle();
    return scene;
}

static void
scene_end(struct scene *scene)
{
    cuda.cuStreamDestroy(scene->stream);
    copies_end(&scene->copies, scene->pool);
    CHECK_EQ(nrm__captures_n_alive(), 0u);
    CHECK(!nrm__capture_owns_frees());
    CHECK(!atomic_load(&nrm__epoch_forbids));
}

static void
begin_capture(nrm_CUstream stream)
{
    nrm_capture_begin();
    CHECK_EQ(cuda.cuStreamBeginCapture(stream, NRM_CU_STREAM_CAPTURE_MODE_RELAXED),
             NRM_CUDA_SUCCESS);
    CHECK_OK(nrm_capture_own_frees((uintptr_t)stream));
}

static nrm_CUgraphExec
end_capture(nrm_CUstream stream)
{
    nrm_CUgraph graph = NULL;
    nrm_CUgraphExec exec = NULL;
    CHECK_EQ(cuda.cuStreamEndCapture(stream, &graph), NRM_CUDA_SUCCESS);
    nrm_capture_disown_frees((uintptr_t)stream);
    nrm_capture_end();
    CHECK_EQ(cuda.cuGraphInstantiateWithFlags(&exec, graph, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    return exec;
}

/* The driver says so in a thread of its own. */
static void
destroy(nrm_CUgraphExec exec)
{
    CHECK_EQ(cuda.cuGraphExecDestroy(exec), NRM_CUDA_SUCCESS);
    let_run();
    (void)nrm__retired_drain(0);
}

static void *
new_ones(nrm_resource *mr)
{
    void *ptr = allocate(mr, BLOCK);
    memset(ptr, 1, BLOCK);
    return ptr;
}

static void
copy(const struct scene *scene, nrm_CUstream stream, const void *ptr)
{
    CHECK_EQ(cuda.cuMemcpyHtoDAsync(scene->copies.device, ptr, BLOCK, stream),
             NRM_CUDA_SUCCESS);
}

static bool
stays_away(nrm_resource *mr, const void *ptr)
{
    return !is_among_next(mr, ptr, 6);
}

/* More blocks than were taken before. */
static bool
comes_back(nrm_resource *mr, const void *ptr)
{
    return is_among_next(mr, ptr, 12);
}

static bool
launch_is_right(struct scene *scene, nrm_CUgraphExec exec)
{
    CHECK_EQ(cuda.cuGraphLaunch(exec, scene->stream), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamSynchronize(scene->stream), NRM_CUDA_SUCCESS);
    return copies_arrived(&scene->copies, 1, BLOCK);
}

TEST_EACH(a_block_that_dies_in_a_capture_belongs_to_the_graph, copies_kinds)
{
    struct scene scene = scene_begin(row, NRM_REUSE_CONTEXT);
    void *ptr = new_ones(scene.pool);
    begin_capture(scene.stream);
    copy(&scene, scene.stream, ptr);
    uint64_t before = sim.call_count(NULL);
    deallocate(scene.pool, ptr);
    CHECK_EQ(sim.call_count(NULL), before);
    nrm_CUgraphExec exec = end_capture(scene.stream);
    for (int i = 0; i < 20; i++) {
        CHECK(stays_away(scene.pool, ptr));
        CHECK(launch_is_right(&scene, exec));
    }
    destroy(exec);
    CHECK(comes_back(scene.pool, ptr));
    scene_end(&scene);
}

TEST(under_recorded_it_does_too)
{
    struct scene scene = scene_begin(&copies_kinds[0], NRM_REUSE_RECORDED);
    void *ptr = new_ones(scene.pool);
    begin_capture(scene.stream);
    copy(&scene, scene.stream, ptr);
    deallocate(scene.pool, ptr);
    nrm_CUgraphExec exec = end_capture(scene.stream);
    CHECK(stays_away(scene.pool, ptr));
    CHECK(launch_is_right(&scene, exec));
    destroy(exec);
    CHECK(comes_back(scene.pool, ptr));
    scene_end(&scene);
}

TEST(under_immediate_it_does_not)
{
    struct scene scene = scene_begin(&copies_kinds[0], NRM_REUSE_IMMEDIATE);
    void *ptr = new_ones(scene.pool);
    begin_capture(scene.stream);
    copy(&scene, scene.stream, ptr);
    deallocate(scene.pool, ptr);
    nrm_CUgraphExec exec = end_capture(scene.stream);
    CHECK(comes_back(scene.pool, ptr));
    CHECK(!launch_is_right(&scene, exec));
    destroy(exec);
    scene_end(&scene);
}

TEST(ordinary_memory_does_not)
{
    struct scene scene = scene_begin(&copies_kinds[0], NRM_REUSE_CONTEXT);
    nrm_resource *host = NULL, *pool = NULL;
    CHECK_OK(nrm_host_create(NULL, &host));
    CHECK_OK(nrm_pool_create(host, NULL, &pool));
    void *ptr = new_ones(pool);
    begin_capture(scene.stream);
    deallocate(pool, ptr);
    CHECK(comes_back(pool, ptr));
    CHECK(nrm__retired_is_empty());
    destroy(end_capture(scene.stream));
    nrm_resource_release(pool);
    nrm_resource_release(host);
    scene_end(&scene);
}

TEST(what_dies_in_two_captures_belongs_to_both)
{
    struct scene scene = scene_begin(&copies_kinds[0], NRM_REUSE_CONTEXT);
    nrm_CUstream second = new_handle();
    void *ptr = new_ones(scene.pool);
    begin_capture(scene.stream);
    begin_capture(second);
    copy(&scene, second, ptr);
    deallocate(scene.pool, ptr);
    nrm_CUgraphExec other = end_capture(scene.stream);
    nrm_CUgraphExec exec = end_capture(second);
    destroy(other);
    CHECK(stays_away(scene.pool, ptr));
    CHECK(launch_is_right(&scene, exec));
    destroy(exec);
    CHECK(comes_back(scene.pool, ptr));
    cuda.cuStreamDestroy(second);
    scene_end(&scene);
}

TEST(what_dies_before_and_after_does_not)
{
    struct scene scene = scene_begin(&copies_kinds[0], NRM_REUSE_CONTEXT);
    void *before = new_ones(scene.pool), *after = new_ones(scene.pool);
    deallocate(scene.pool, before);
    begin_capture(scene.stream);
    nrm_CUgraphExec exec = end_capture(scene.stream);
    deallocate(scene.pool, after);
    CHECK(nrm__retired_is_empty());
    CHECK(comes_back(scene.pool, after));
    CHECK(comes_back(scene.pool, before));
    destroy(exec);
    scene_end(&scene);
}

TEST(a_stream_that_is_not_captured_owns_nothing)
{
    struct scene scene = scene_begin(&copies_kinds[0], NRM_REUSE_CONTEXT);
    CHECK_EQ(nrm_capture_own_frees((uintptr_t)scene.stream), NRM_NOT_FOUND);
    CHECK(!nrm_stream_is_captured((uintptr_t)scene.stream));
    CHECK(!nrm__capture_owns_frees());
    nrm_capture_disown_frees((uintptr_t)scene.stream);
    nrm_capture_disown_frees(0);
    scene_end(&scene);
}

TEST(a_stream_that_was_destroyed_in_its_capture_is_replaced_by_name)
{
    struct scene scene = scene_begin(&copies_kinds[0], NRM_REUSE_CONTEXT);
    void *ptr = new_ones(scene.pool);
    begin_capture(scene.stream);
    CHECK(nrm_stream_is_captured((uintptr_t)scene.stream));
    cuda.cuStreamDestroy(scene.stream);
    nrm_CUstream again = new_handle(); /* which gets the handle at once */
    CHECK(again == scene.stream);
    begin_capture(again);
    nrm_capture_end(); /* of the first */
    copy(&scene, again, ptr);
    deallocate(scene.pool, ptr);
    nrm_CUgraphExec exec = end_capture(again);
    CHECK(stays_away(scene.pool, ptr));
    CHECK(launch_is_right(&scene, exec));
    destroy(exec);
    CHECK(comes_back(scene.pool, ptr));
    scene_end(&scene);
}

TEST(more_captures_than_can_be_followed_are_refused)
{
    struct scene scene = scene_begin(&copies_kinds[0], NRM_REUSE_CONTEXT);
    nrm_CUstream streams[MAX_OWNERS];
    nrm_CUgraphExec exec[MAX_OWNERS];
    nrm_CUgraph graph = NULL;
    for (int i = 0; i < MAX_OWNERS; i++) {
        streams[i] = new_handle();
        begin_capture(streams[i]);
    }
    CHECK_EQ(cuda.cuStreamBeginCapture(scene.stream,
                                       NRM_CU_STREAM_CAPTURE_MODE_RELAXED),
             NRM_CUDA_SUCCESS);
    CHECK_EQ(nrm_capture_own_frees((uintptr_t)scene.stream), NRM_NOT_SUPPORTED);
    CHECK_EQ(cuda.cuStreamEndCapture(scene.stream, &graph), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    for (int i = 0; i < MAX_OWNERS; i++) {
        exec[i] = end_capture(streams[i]);
    }
    for (int i = 0; i < MAX_OWNERS; i++) {
        CHECK_EQ(cuda.cuGraphExecDestroy(exec[i]), NRM_CUDA_SUCCESS);
        cuda.cuStreamDestroy(streams[i]);
    }
    let_run();
    nrm__captures_reap();
    scene_end(&scene);
}

/* ---- threads ---- */

struct dying {
    nrm_resource *pool;
    void *ptr;
};

static void *
free_it(void *argument)
{
    const struct dying *dying = argument;
    deallocate(dying->pool, dying->ptr);
    return NULL;
}

TEST(it_does_not_matter_which_thread_frees_it)
{
    struct scene scene = scene_begin(&copies_kinds[0], NRM_REUSE_CONTEXT);
    struct dying dying = {scene.pool, new_ones(scene.pool)};
    pthread_t thread;
    begin_capture(scene.stream);
    copy(&scene, scene.stream, dying.ptr);
    pthread_create(&thread, NULL, free_it, &dying);
    pthread_join(thread, NULL);
    nrm_CUgraphExec exec = end_capture(scene.stream);
    CHECK(stays_away(scene.pool, dying.ptr));
    CHECK(launch_is_right(&scene, exec));
    destroy(exec);
    CHECK(comes_back(scene.pool, dying.ptr));
    scene_end(&scene);
}

CHECK_MAIN
