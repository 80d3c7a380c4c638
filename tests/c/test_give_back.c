/* Memory that is done goes back to the driver only when nothing is under way: the call
   waits for all work of the context, and holds the driver's lock meanwhile. */
#include <pthread.h>

#include "base/bits.h"
#include "core/uses.h"
#include "cuda/foreign.h"
#include "copies.h"
#include "streams.h"

struct scene {
    struct copies copies;
    nrm_resource *pool; /* a second one, over the same source */
    nrm_stream *other;  /* busy with work that uses none of the memory */
    nrm_CUdeviceptr target;
    void *bytes;
};

static void
make_busy(struct scene *scene)
{
    hold(scene->other);
    CHECK_EQ(cuda.cuMemcpyHtoDAsync(scene->target, scene->bytes, COPIES_NBYTES,
                                    handle_of(scene->other)),
             NRM_CUDA_SUCCESS);
}

static void
make_idle(const struct scene *scene)
{
    let_go(scene->other);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(scene->other)), NRM_CUDA_SUCCESS);
}

static size_t
n_locked(void)
{
    return simulator_count(NRM_CUDASIM_REGISTRATIONS) +
           simulator_count(NRM_CUDASIM_MANAGED_ALLOCATIONS);
}

/* A pool has ended while a stream was busy. Its memory is done by now, as the driver
   knows, and another stream's work has begun. */
static struct scene
begin(const struct copies_kind *kind)
{
    struct scene scene = {.copies = copies_begin(kind)};
    nrm_resource *first = NULL;
    CHECK_OK(nrm_pool_create(scene.copies.source, NULL, &scene.pool));
    CHECK_OK(nrm_pool_create(scene.copies.source, NULL, &first));
    CHECK_EQ(cuda.cuMemAlloc(&scene.target, COPIES_NBYTES), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemHostAlloc(&scene.bytes, COPIES_NBYTES, 1), NRM_CUDA_SUCCESS);
    scene.other = new_stream();
    void *ptr = allocate(first, COPIES_NBYTES);
    make_busy(&scene);
    deallocate(first, ptr);
    nrm_resource_release(first);
    CHECK_EQ(n_locked(), 1u);
    make_idle(&scene);
    (void)nrm__epoch_close();
    CHECK(nrm__epoch_poll() || nrm__epoch_is_done(nrm__epoch_newest_recorded()));
    make_busy(&scene);
    return scene;
}

static void
end(struct scene *scene)
{
    CHECK_EQ(cuda.cuMemFree(scene->target), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemFreeHost(scene->bytes), NRM_CUDA_SUCCESS);
    nrm_stream_release(scene->other);
    copies_end(&scene->copies, scene->pool);
}

/* Whether a call that takes the driver's lock returns. */
static void *
call_driver(void *argument)
{
    struct scene *scene = argument;
    nrm_CUevent event = NULL;
    CHECK_EQ(cuda.cuCtxSetCurrent(scene->copies.context), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuEventCreate(&event, NRM_CU_EVENT_DISABLE_TIMING), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuEventDestroy(event), NRM_CUDA_SUCCESS);
    return NULL;
}

TEST_EACH(an_allocation_beside_work_elsewhere_does_not_wait_for_it, copies_kinds)
{
    struct scene scene = begin(row);
    void *ptr = allocate(scene.pool, COPIES_NBYTES); /* a segment of its own */
    CHECK_EQ(n_locked(), 2u);
    make_idle(&scene);
    deallocate(scene.pool, ptr);
    end(&scene);
}

TEST_EACH(the_background_thread_leaves_the_driver_alone, copies_kinds)
{
    pthread_t thread;
    struct scene scene = begin(row);
    for (int i = 0; i < 5; i++) {
        let_run();
        pthread_create(&thread, NULL, call_driver, &scene);
        pthread_join(thread, NULL);
    }
    CHECK_EQ(n_locked(), 1u);
    make_idle(&scene);
    end(&scene);
}

/* No epoch tells of that one, but it does of the others. */
TEST_EACH(nor_does_one_where_a_context_of_the_program_is_known, copies_kinds)
{
    struct scene scene = begin(row);
    nrm_CUcontext own = NULL;
    CHECK_EQ(cuda.cuCtxCreate(&own, 0, 0), NRM_CUDA_SUCCESS);
    nrm__cuda_foreign_note_current();
    CHECK(nrm__cuda_has_foreign());
    CHECK_EQ(cuda.cuCtxSetCurrent(scene.copies.context), NRM_CUDA_SUCCESS);
    void *ptr = allocate(scene.pool, COPIES_NBYTES);
    let_run();
    CHECK_EQ(n_locked(), 2u);
    make_idle(&scene);
    deallocate(scene.pool, ptr);
    (void)nrm__retired_drain(0);
    CHECK_EQ(n_locked(), 1u); /* contexts of both kinds are idle */
    CHECK_EQ(cuda.cuCtxDestroy(own), NRM_CUDA_SUCCESS);
    end(&scene);
}

TEST_EACH(on_an_idle_gpu_the_next_allocation_gives_it_back, copies_kinds)
{
    struct scene scene = begin(row);
    make_idle(&scene);
    void *ptr = allocate(scene.pool, COPIES_NBYTES);
    CHECK_EQ(n_locked(), 1u);
    deallocate(scene.pool, ptr);
    end(&scene);
}

TEST_EACH(a_trim_waits_a_while_for_an_idle_gpu, copies_kinds)
{
    struct scene scene = begin(row);
    size_t trimmed = 0;
    uint64_t start = nrm__clock_ns();
    CHECK_OK(nrm_resource_trim(scene.pool, 0, &trimmed));
    CHECK_LE(nrm__clock_ns() - start, UINT64_C(1500000000));
    CHECK_EQ(n_locked(), 1u);
    make_idle(&scene);
    CHECK_OK(nrm_resource_trim(scene.pool, 0, &trimmed));
    CHECK_EQ(n_locked(), 0u);
    end(&scene);
}

/* Of a source without a pool each block is registered and given back by itself. */
TEST_EACH(temporaries_beside_a_gpu_that_always_works_do_not_pile_up, copies_kinds)
{
    enum { N = 40, NBYTES = 2 * NRM__MIB, TURN_NS = 2000000 };
    struct copies copies = copies_begin(row);
    size_t most = 0;
    for (int i = 0; i < N; i++) {
        void *ptr = allocate(copies.source, NBYTES);
        CHECK_EQ(cuda.cuLaunchHostFunc(copies.stream, simulator_sleep,
                                       (void *)(uintptr_t)TURN_NS),
                 NRM_CUDA_SUCCESS);
        if (row == &copies_kinds[0]) {
            copies_to_device(&copies, ptr, NBYTES);
        }
        deallocate(copies.source, ptr);
        most = nrm__max(most, n_locked());
    }
    CHECK_LE(most, 12u); /* 16 MiB and a little */
    CHECK_EQ(cuda.cuStreamSynchronize(copies.stream), NRM_CUDA_SUCCESS);
    nrm_resource *pool = NULL;
    CHECK_OK(nrm_pool_create(copies.source, NULL, &pool));
    copies_end(&copies, pool);
}

CHECK_MAIN
