/* Known uses on the simulated driver: a block goes with the uses that were noted of it,
   whoever gives it back; under "recorded" they decide alone, by default they add to the
   context epochs, and under "immediate" nothing is noted. */
#include <string.h>

#include "base/bits.h"
#include "copies.h"
#include "core/capture.h"
#include "core/known_uses.h"
#include "noted_pool.h"
#include "nrm/adaptors.h"
#include "nrm/options.h"
#include "nrm/uses.h"
#include "streams.h"

/* ---- known uses decide alone ---- */

TEST_EACH(under_recorded_a_block_waits_for_its_uses, copies_kinds)
{
    struct scene scene = scene_begin(row, NRM_REUSE_RECORDED);
    copy_held(&scene);
    CHECK_OK(nrm_record_use(scene.ptr, scene.stream));
    uint64_t before = sim.call_count(NULL);
    deallocate(scene.pool, scene.ptr);
    CHECK_EQ(sim.call_count(NULL), before);
    check_waits(&scene, handle_of(scene.stream));
    CHECK_EQ(sim.call_count("cuCtxRecordEvent"), 0u);
    scene_end(&scene);
}

TEST_EACH(under_recorded_what_nobody_noted_is_handed_out_at_once, copies_kinds)
{
    struct scene scene = scene_begin(row, NRM_REUSE_RECORDED);
    copy_held(&scene);
    deallocate(scene.pool, scene.ptr);
    CHECK(is_among_next(scene.pool, scene.ptr, 1));
    finish(scene.stream);
    CHECK(!copies_arrived(&scene.copies, 1, BLOCK)); /* so the tests here can fail */
    scene_end(&scene);
}

TEST_EACH(under_immediate_nothing_is_noted, copies_kinds)
{
    struct scene scene = scene_begin(row, NRM_REUSE_IMMEDIATE);
    copy_held(&scene);
    CHECK_OK(nrm_record_use(scene.ptr, scene.stream));
    CHECK_EQ(n_uses(scene.ptr), 0u);
    deallocate(scene.pool, scene.ptr);
    CHECK(is_among_next(scene.pool, scene.ptr, 1));
    finish(scene.stream);
    scene_end(&scene);
}

/* Work on `stream` waits behind the held stream of the program, which the end of
   `stream` does not let go. */
static void
put_behind(struct copies *copies, nrm_CUstream stream)
{
    copies_hold(copies);
    CHECK_EQ(cuda.cuMemsetD8Async(copies->device, 9, 1, copies->stream),
             NRM_CUDA_SUCCESS);
    let_wait_for(stream, copies->stream);
}

TEST_EACH(a_use_of_a_bare_handle_outlives_the_handle, copies_kinds)
{
    struct scene scene = scene_begin(row, NRM_REUSE_RECORDED);
    nrm_CUstream first = new_handle();
    put_behind(&scene.copies, first);
    copy_on_handle(&scene, first);
    uint64_t before = sim.call_count("cuEventRecord");
    CHECK_OK(nrm_record_use_on_handle(scene.ptr, (uintptr_t)first));
    CHECK_EQ(sim.call_count("cuEventRecord"), before + 1);
    deallocate(scene.pool, scene.ptr);
    CHECK_EQ(cuda.cuStreamDestroy(first), NRM_CUDA_SUCCESS);
    nrm_CUstream second = new_handle();
    CHECK(second == first); /* the handle again, with nothing on it */
    check_waits(&scene, scene.copies.stream);
    CHECK_EQ(cuda.cuStreamDestroy(second), NRM_CUDA_SUCCESS);
    scene_end(&scene);
}

TEST_EACH(a_use_outlives_its_stream, copies_kinds)
{
    struct scene scene = scene_begin(row, NRM_REUSE_RECORDED);
    put_behind(&scene.copies, handle_of(scene.stream));
    copy_on(&scene.copies, scene.stream, scene.ptr);
    CHECK_OK(nrm_record_use(scene.ptr, scene.stream));
    nrm_stream_release(scene.stream); /* destroyed, with its work pending */
    deallocate(scene.pool, scene.ptr);
    check_waits(&scene, scene.copies.stream);
    copies_end(&scene.copies, scene.pool);
}

/* ---- whoever gives it back ---- */

static nrm_resource *
make_fixed_size(nrm_resource *source)
{
    nrm_fixed_size_options options = NRM_OPTIONS(nrm_fixed_size_options);
    nrm_resource *mr = NULL;
    options.block_nbytes = BLOCK;
    options.n_blocks = 8;
    options.reuse = NRM_REUSE_RECORDED;
    CHECK_OK(nrm_fixed_size_create(source, &options, &mr));
    return mr;
}

static nrm_resource *
make_pool(nrm_resource *source)
{
    return pool_with(source, NRM_REUSE_RECORDED, 0);
}

static nrm_resource *
make_counted_pool(nrm_resource *source)
{
    nrm_resource *inner = make_pool(source), *mr = NULL;
    CHECK_OK(nrm_statistics_create(inner, &mr));
    nrm_resource_release(inner);
    return mr;
}

static nrm_resource *
make_default_pool(nrm_resource *source)
{
    return pool_with(source, NRM_REUSE_CONTEXT, 0);
}

static nrm_resource *
make_bare(nrm_resource *source)
{
    nrm_resource_retain(source);
    return source;
}

static const struct owner_case {
    const char *name;
    nrm_resource *(*make)(nrm_resource *source);
} owners[] = {
    {"pool", make_pool},
    {"fixed size", make_fixed_size},
    {"statistics over a pool", make_counted_pool},
    {"pool by default", make_default_pool},
    {"bare source", make_bare},
};

TEST_EACH(whoever_gives_it_back_it_waits_for_its_uses, owners)
{
    for (size_t i = 0; i < 2; i++) {
        struct copies copies = copies_begin(&copies_kinds[i]);
        nrm_resource *mr = row->make(copies.source);
        nrm_stream *stream = new_stream();
        void *ptr = allocate(mr, BLOCK);
        memset(ptr, 1, BLOCK);
        hold(stream);
        copy_on(&copies, stream, ptr);
        CHECK_OK(nrm_record_use((char *)ptr + BLOCK / 2, stream)); /* interior */
        CHECK_EQ(n_uses(ptr), 1u);
        deallocate(mr, ptr);
        CHECK_EQ(live_nbytes(mr), 0);
        CHECK(!is_among_next(mr, ptr, 4));
        finish(stream);
        CHECK(copies_arrived(&copies, 1, BLOCK));
        (void)nrm__retired_drain(0);
        nrm_stream_release(stream);
        nrm_resource_release(mr);
        for (int j = 0; j < 200 && !nrm__retired_is_empty(); j++) {
            (void)nrm__retired_drain(20000000);
            nrm__sleep_ns(1000000);
        }
        nrm_resource_release(copies.source);
        CHECK_EQ(simulator_count(NRM_CUDASIM_REGISTRATIONS), 0u);
        CHECK_EQ(simulator_count(NRM_CUDASIM_MANAGED_ALLOCATIONS), 0u);
        simulator_check_faults();
    }
}

TEST_EACH(a_pool_that_dies_keeps_what_is_in_use, copies_kinds)
{
    struct scene scene = scene_begin(row, NRM_REUSE_RECORDED);
    copy_held(&scene);
    CHECK_OK(nrm_record_use(scene.ptr, scene.stream));
    deallocate(scene.pool, scene.ptr);
    nrm_resource_release(scene.pool);
    (void)nrm__retired_drain(1000000);
    CHECK(!nrm__retired_is_empty());
    finish(scene.stream);
    CHECK(copies_arrived(&scene.copies, 1, BLOCK));
    scene.pool = pool_with(scene.copies.source, NRM_REUSE_CONTEXT, 0);
    scene_end(&scene);
}

TEST_EACH(a_shrunk_block_leaves_no_tail_to_others, copies_kinds)
{
    struct scene scene = scene_begin(row, NRM_REUSE_RECORDED);
    void *ptr;
    copy_held(&scene);
    CHECK_OK(nrm_record_use(scene.ptr, scene.stream));
    REQUIRE_OK(
        nrm_resource_reallocate(scene.pool, scene.ptr, BLOCK / 4, 0, NULL, &ptr));
    void *other = allocate(scene.pool, BLOCK / 2);
    memset(other, 4, BLOCK / 2);
    memset(ptr, 4, BLOCK / 4);
    finish(scene.stream);
    CHECK(copies_arrived(&scene.copies, 1, BLOCK));
    deallocate(scene.pool, ptr);
    deallocate(scene.pool, other);
    scene_end(&scene);
}

/* ---- by default ---- */

TEST_EACH(by_default_a_known_use_does_not_shorten_the_wait, copies_kinds)
{
    struct scene scene = scene_begin(row, NRM_REUSE_CONTEXT);
    copies_hold(&scene.copies);
    copy_on_handle(&scene, scene.copies.stream); /* of somebody who notes nothing */
    CHECK_OK(nrm_record_use(scene.ptr, scene.stream)); /* ours is done already */
    CHECK_EQ(n_uses(scene.ptr), 0u);
    deallocate(scene.pool, scene.ptr);
    check_waits(&scene, scene.copies.stream);
    scene_end(&scene);
}

TEST_EACH(by_default_uses_that_the_epochs_cover_do_not_hold_memory_back, copies_kinds)
{
    struct scene scene = scene_begin(row, NRM_REUSE_CONTEXT);
    deallocate(scene.pool, scene.ptr);
    for (int i = 0; i < 100; i++) {
        CHECK(allocate(scene.pool, BLOCK) == scene.ptr);
        copy_on(&scene.copies, scene.stream, scene.ptr);
        CHECK_OK(nrm_record_use(scene.ptr, scene.stream));
        CHECK_EQ(cuda.cuStreamSynchronize(handle_of(scene.stream)), NRM_CUDA_SUCCESS);
        deallocate(scene.pool, scene.ptr);
        CHECK(nrm__retired_is_empty());
    }
    scene_end(&scene);
}

static const struct policy_case {
    const char *name;
    nrm_reuse reuse;
} policies[] = {
    {"context", NRM_REUSE_CONTEXT},
    {"recorded", NRM_REUSE_RECORDED},
};

TEST_EACH(a_use_in_a_capture_ends_with_the_graph, policies)
{
    struct scene scene = scene_begin(&copies_kinds[0], row->reuse);
    nrm_CUstream handle = new_handle();
    nrm_CUgraph graph;
    nrm_CUgraphExec exec;
    CHECK_EQ(cuda.cuStreamBeginCapture(handle, NRM_CU_STREAM_CAPTURE_MODE_RELAXED),
             NRM_CUDA_SUCCESS);
    copy_on_handle(&scene, handle);
    CHECK_OK(nrm_record_use_on_handle(scene.ptr, (uintptr_t)handle));
    CHECK_EQ(cuda.cuStreamEndCapture(handle, &graph), NRM_CUDA_SUCCESS);
    nrm_use uses[2];
    size_t n = 0;
    CHECK_OK(nrm_block_uses(scene.ptr, uses, 2, &n));
    CHECK_EQ(n, 1u);
    CHECK_EQ(uses[0].is_captured, 1);
    CHECK_EQ(cuda.cuGraphInstantiateWithFlags(&exec, graph, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    deallocate(scene.pool, scene.ptr);
    for (int i = 0; i < 20; i++) {
        CHECK(!is_among_next(scene.pool, scene.ptr, 4));
        CHECK_EQ(cuda.cuGraphLaunch(exec, handle), NRM_CUDA_SUCCESS);
        CHECK_EQ(cuda.cuStreamSynchronize(handle), NRM_CUDA_SUCCESS);
        CHECK(copies_arrived(&scene.copies, 1, BLOCK));
    }
    CHECK_EQ(cuda.cuGraphExecDestroy(exec), NRM_CUDA_SUCCESS);
    let_run();
    (void)nrm__retired_drain(0);
    CHECK(nrm__retired_is_empty());
    CHECK(is_among_next(scene.pool, scene.ptr, 8));
    cuda.cuStreamDestroy(handle);
    scene_end(&scene);
    CHECK_EQ(nrm__captures_n_alive(), 0u);
}

/* ---- what is pending ---- */

TEST_EACH(uses_are_listed_once_for_each_stream_and_go_when_done, policies)
{
    struct scene scene = scene_begin(&copies_kinds[0], row->reuse);
    nrm_stream *second = new_stream();
    nrm_use uses[4];
    nrm_block_info info;
    size_t n = 0;
    hold(scene.stream);
    hold(second);
    for (int i = 0; i < 3; i++) {
        copy_on(&scene.copies, scene.stream, scene.ptr);
        CHECK_OK(nrm_record_use(scene.ptr, scene.stream));
    }
    copy_on(&scene.copies, second, scene.ptr);
    CHECK_OK(nrm_record_use(scene.ptr, second));
    CHECK_OK(nrm_block_uses(scene.ptr, uses, 4, &n));
    CHECK_EQ(n, 2u);
    CHECK_EQ(uses[0].stream, nrm_stream_handle(scene.stream));
    CHECK_EQ(uses[1].stream, nrm_stream_handle(second));
    CHECK_OK(nrm_block_find(scene.ptr, &info));
    CHECK_EQ(info.uses, 2u);
    nrm_resource_release(info.resource);
    finish(scene.stream);
    CHECK_OK(nrm_block_uses(scene.ptr, uses, 4, &n));
    CHECK_EQ(n, 1u);
    CHECK_EQ(uses[0].stream, nrm_stream_handle(second));
    finish(second);
    CHECK_EQ(n_uses(scene.ptr), 0u);
    deallocate(scene.pool, scene.ptr);
    nrm_stream_release(second);
    scene_end(&scene);
}

TEST_EACH(many_uses_of_one_block_keep_no_event_each, policies)
{
    struct scene scene = scene_begin(&copies_kinds[0], row->reuse);
    nrm_CUstream handle = new_handle();
    for (int i = 0; i < 1000; i++) {
        CHECK_OK(nrm_record_use_on_handle(scene.ptr, (uintptr_t)handle));
    }
    CHECK_LE(simulator_count(NRM_CUDASIM_EVENTS), 64u);
    deallocate(scene.pool, scene.ptr);
    cuda.cuStreamDestroy(handle);
    scene_end(&scene);
}

TEST_EACH(our_own_streams_cost_no_driver_call, policies)
{
    struct scene scene = scene_begin(&copies_kinds[0], row->reuse);
    CHECK_OK(nrm_record_use(scene.ptr, scene.stream)); /* asks once for its context */
    uint64_t before = sim.call_count(NULL);
    for (int i = 0; i < 100; i++) {
        CHECK_OK(nrm_record_use(scene.ptr, scene.stream));
    }
    CHECK_EQ(sim.call_count(NULL), before);
    deallocate(scene.pool, scene.ptr);
    scene_end(&scene);
}

static const struct special_case {
    const char *name;
    uintptr_t handle;
} specials[] = {{"default", 0}, {"legacy", 1}, {"per-thread", 2}};

TEST_EACH(the_default_streams_are_those_of_the_current_context, specials)
{
    struct scene scene = scene_begin(&copies_kinds[0], NRM_REUSE_RECORDED);
    nrm_CUstream handle = (nrm_CUstream)row->handle;
    CHECK_EQ(sim.hold_stream(handle), 0);
    copy_on_handle(&scene, handle);
    CHECK_OK(nrm_record_use_on_handle(scene.ptr, row->handle));
    CHECK_EQ(n_uses(scene.ptr), 1u);
    deallocate(scene.pool, scene.ptr);
    check_waits(&scene, handle);
    scene_end(&scene);
}

/* ---- limits ---- */

TEST_EACH(a_full_pool_waits_for_known_uses_when_it_may, policies)
{
    struct copies copies = copies_begin(&copies_kinds[0]);
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    nrm_resource *pool = NULL;
    nrm_stream *stream = new_stream();
    pthread_t thread;
    void *second = NULL;
    options.reuse = row->reuse;
    options.maximum_nbytes = 2 * BLOCK;
    options.on_exhausted = NRM_ON_EXHAUSTED_WAIT;
    CHECK_OK(nrm_pool_create(copies.source, &options, &pool));
    void *first = allocate(pool, 2 * BLOCK);
    hold(stream);
    copy_on(&copies, stream, first);
    CHECK_OK(nrm_record_use(first, stream));
    deallocate(pool, first);
    pthread_create(&thread, NULL, simulator_release_later, handle_of(stream));
    CHECK_OK(nrm_resource_allocate(pool, 2 * BLOCK, 0, NULL, &second));
    CHECK(second == first);
    pthread_join(thread, NULL);
    deallocate(pool, second);
    nrm_stream_release(stream);
    copies_end(&copies, pool);
}

TEST_EACH(a_gpu_slower_than_the_program_does_not_make_memory_grow, policies)
{
    /* Longer than a busy machine leaves the driver's thread waiting. */
    CHECK_OK(nrm_option_set(NRM_OPT_WAIT_LIMIT, "1 s"));
    struct scene scene = scene_begin(&copies_kinds[0], row->reuse);
    CHECK_OK(nrm_option_set(NRM_OPT_WAIT_LIMIT, "20 ms"));
    nrm_CUstream handle = handle_of(scene.stream);
    for (int i = 0; i < 200; i++) {
        CHECK_EQ(cuda.cuLaunchHostFunc(handle, simulator_sleep,
                                       (void *)(uintptr_t)2000000),
                 NRM_CUDA_SUCCESS);
        copy_on(&scene.copies, scene.stream, scene.ptr);
        CHECK_OK(nrm_record_use(scene.ptr, scene.stream));
        deallocate(scene.pool, scene.ptr);
        scene.ptr = allocate(scene.pool, BLOCK);
    }
    CHECK_LE(reserved_nbytes(scene.pool), 80 * (int64_t)NRM__MIB);
    CHECK_EQ(cuda.cuStreamSynchronize(handle), NRM_CUDA_SUCCESS);
    deallocate(scene.pool, scene.ptr);
    scene_end(&scene);
}

TEST(an_endless_kernel_makes_one_allocation_wait)
{
    CHECK_OK(nrm_option_set(NRM_OPT_WAIT_LIMIT, "200 ms")); /* each time it is 20 s */
    struct scene scene = scene_begin(&copies_kinds[0], NRM_REUSE_RECORDED);
    CHECK_OK(nrm_option_set(NRM_OPT_WAIT_LIMIT, "20 ms"));
    hold(scene.stream);
    uint64_t start = nrm__clock_ns();
    for (int i = 0; i < 100; i++) {
        CHECK_OK(nrm_record_use(scene.ptr, scene.stream));
        copy_on(&scene.copies, scene.stream, scene.ptr);
        CHECK_OK(nrm_record_use(scene.ptr, scene.stream));
        deallocate(scene.pool, scene.ptr);
        scene.ptr = allocate(scene.pool, BLOCK);
    }
    CHECK_LE(nrm__clock_ns() - start, UINT64_C(8000000000));
    finish(scene.stream);
    deallocate(scene.pool, scene.ptr);
    scene_end(&scene);
}

/* ---- wrong arguments ---- */

TEST(what_cannot_be_noted_is_said)
{
    struct copies copies = copies_begin(&copies_kinds[0]);
    nrm_resource *pool = pool_with(copies.source, NRM_REUSE_CONTEXT, 0);
    nrm_resource *host = pool_over(host_source(), 0), *device = NULL;
    nrm_stream *stream = new_stream();
    CHECK_OK(nrm_device_create(NULL, &device));
    int on_stack = 0;
    void *ptr = allocate(pool, BLOCK), *plain = allocate(host, BLOCK),
         *remote = allocate(device, BLOCK);
    CHECK_OK(nrm_record_use(plain, stream));
    CHECK_EQ(n_uses(plain), 0u);
    CHECK_STATUS(nrm_record_use(&on_stack, stream), NRM_NOT_OWNED);
    CHECK_STATUS(nrm_record_use(NULL, stream), NRM_NOT_OWNED);
    CHECK_STATUS(nrm_record_use(remote, stream), NRM_NOT_SUPPORTED);
    CHECK_STATUS(nrm_record_use_on_handle(ptr, 0x1234560), NRM_CUDA_ERROR);
    CHECK_EQ(n_uses(ptr), 0u);
    deallocate(pool, ptr);
    CHECK_STATUS(nrm_record_use(ptr, stream), NRM_NOT_OWNED);
    deallocate(host, plain);
    CHECK_OK(nrm_resource_deallocate(device, remote, BLOCK, NULL));
    nrm_resource_release(host);
    nrm_resource_release(device);
    nrm_stream_release(stream);
    nrm_resource_release(pool);
    nrm_resource_release(copies.source);
}

static void *
note_on_another_thread(void *arguments)
{
    void **both = arguments;
    CHECK_STATUS(nrm_record_use(both[0], both[1]), NRM_INVALID_VALUE);
    return NULL;
}

TEST(the_per_thread_stream_of_another_thread_is_refused)
{
    struct copies copies = copies_begin(&copies_kinds[0]);
    nrm_resource *pool = pool_with(copies.source, NRM_REUSE_CONTEXT, 0);
    nrm_stream *stream = NULL;
    pthread_t thread;
    CHECK_OK(nrm_stream_per_thread(&stream));
    void *ptr = allocate(pool, BLOCK);
    void *both[] = {ptr, stream};
    pthread_create(&thread, NULL, note_on_another_thread, both);
    pthread_join(thread, NULL);
    deallocate(pool, ptr);
    nrm_stream_release(stream);
    copies_end(&copies, pool);
}

/* ---- threads ---- */

enum { N_THREADS = 4, N_TURNS = 300 };

static struct {
    struct copies copies;
    nrm_resource *pool;
} shared;

static void *
churn(void *seed_of)
{
    uint64_t seed = (uint64_t)(uintptr_t)seed_of;
    CHECK_EQ(cuda.cuCtxSetCurrent(shared.copies.context), NRM_CUDA_SUCCESS);
    nrm_stream *stream = new_stream();
    nrm_CUdeviceptr device = 0;
    static const size_t size = 65536;
    CHECK_EQ(cuda.cuMemAlloc(&device, size), NRM_CUDA_SUCCESS);
    for (int i = 0; i < N_TURNS; i++) {
        void *ptr = allocate(shared.pool, size);
        unsigned char key = (unsigned char)next_random(&seed);
        memset(ptr, key, size);
        CHECK_EQ(cuda.cuMemcpyHtoDAsync(device, ptr, size, handle_of(stream)),
                 NRM_CUDA_SUCCESS);
        CHECK_OK(nrm_record_use(ptr, stream));
        CHECK_OK(nrm_resource_deallocate(shared.pool, ptr, size, NULL));
        if (i % 16 == 0) {
            unsigned char seen[64];
            CHECK_EQ(cuda.cuStreamSynchronize(handle_of(stream)), NRM_CUDA_SUCCESS);
            CHECK_EQ(cuda.cuMemcpyDtoH(seen, device, sizeof seen), NRM_CUDA_SUCCESS);
            CHECK_EQ(seen[0], key);
            CHECK_EQ(seen[63], key);
        }
    }
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(stream)), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemFree(device), NRM_CUDA_SUCCESS);
    nrm_stream_release(stream);
    return NULL;
}

TEST_EACH(threads_that_note_and_free_see_their_own_bytes, policies)
{
    pthread_t threads[N_THREADS];
    shared.copies = copies_begin(&copies_kinds[0]);
    shared.pool = pool_with(shared.copies.source, row->reuse, 0);
    for (uintptr_t i = 0; i < N_THREADS; i++) {
        pthread_create(&threads[i], NULL, churn, (void *)(2 * i + 1));
    }
    for (int i = 0; i < N_THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    copies_end(&shared.copies, shared.pool);
}

CHECK_MAIN
