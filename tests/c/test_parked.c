/* What a thread has freed of memory that GPUs see: it comes back when its epoch is
   done, to the thread without a lock and to all others when they need it; not
   sooner. */
#include <string.h>

#include "core/uses.h"
#include "copies.h"
#include "nrm/uses.h"
#include "pools/pool.h"
#include "streams.h"
#include "workers.h"

#define SMALL (64 * NRM__KIB)
#define N_SMALL 16 /* of these an epoch is closed */

struct scene {
    struct copies copies;
    nrm_resource *pool;
    nrm_stream *stream;
};

static struct scene
scene_begin_with(const struct copies_kind *kind, const nrm_pool_options *options)
{
    struct scene scene = {.copies = copies_begin(kind)};
    CHECK_OK(nrm_pool_create(scene.copies.source, options, &scene.pool));
    scene.stream = new_stream();
    return scene;
}

static struct scene
scene_begin(const struct copies_kind *kind, size_t maximum_nbytes)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    options.maximum_nbytes = maximum_nbytes;
    options.on_exhausted = NRM_ON_EXHAUSTED_ERROR;
    return scene_begin_with(kind, &options);
}

static void
scene_end(struct scene *scene)
{
    nrm__pool_check(scene->pool);
    nrm_stream_release(scene->stream);

    copies_end(&scene->copies, scene->pool);
}

static void
copy(struct scene *scene, const void *ptr, size_t nbytes)
{
    CHECK_EQ(cuda.cuMemcpyHtoDAsync(scene->copies.device, ptr, nbytes,
                                    handle_of(scene->stream)),
             NRM_CUDA_SUCCESS);
}

static void
finish(struct scene *scene)
{
    let_go(scene->stream);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(scene->stream)), NRM_CUDA_SUCCESS);
}

static nrm_statistics
counts(nrm_resource *mr)
{
    nrm_statistics statistics;
    CHECK_OK(nrm_resource_statistics(mr, &statistics));
    return statistics;
}

static void
pairs(nrm_resource *mr, size_t nbytes, int n)
{
    for (int i = 0; i < n; i++) {
        deallocate(mr, allocate(mr, nbytes));
    }
}

static uint64_t
n_closed(void)
{
    struct nrm__epoch_counts counts;
    nrm__epoch_counts(&counts);
    return counts.closed;
}

/* ---- one thread ---- */

TEST_EACH(an_idle_gpu_costs_one_epoch_for_each_mebibyte, copies_kinds)
{
    struct scene scene = scene_begin(row, 0);
    pairs(scene.pool, SMALL, 4 * N_SMALL);
    uint64_t before = n_closed();
    pairs(scene.pool, SMALL, 10 * N_SMALL);
    CHECK_EQ(n_closed() - before, 10u);
    before = n_closed();
    pairs(scene.pool, 4 * NRM__MIB, 10);
    CHECK_EQ(n_closed() - before, 10u); /* the first one for what was parked before */
    scene_end(&scene);
}

TEST_EACH(the_same_few_blocks_take_turns, copies_kinds)
{
    struct scene scene = scene_begin(row, 0);
    uintptr_t least = UINTPTR_MAX, most = 0;
    for (int i = 0; i < 20 * N_SMALL; i++) {
        void *ptr = allocate(scene.pool, SMALL);
        least = nrm__min(least, (uintptr_t)ptr);
        most = nrm__max(most, (uintptr_t)ptr);
        deallocate(scene.pool, ptr);
    }
    CHECK(most - least <= 2 * N_SMALL * (SMALL + NRM__SHIFTED_MIN));
    scene_end(&scene);
}

/* Notes an address, unless it is noted; returns how many are. */
static size_t
note(void **noted, size_t n, void *ptr)
{
    for (size_t i = 0; i < n; i++) {
        if (noted[i] == ptr) {
            return n;
        }
    }
    noted[n] = ptr;
    return n + 1;
}

static const struct chain_case {
    const char *name;
    int n_operands;    /* that live all the while, each a quarter of an epoch */
    size_t n_blocks;   /* for temporaries, two of them at a time */
    uint64_t n_epochs; /* for 40 of them */
} chain_cases[] = {
    {"of nothing", 0, 4, 10},
    {"of two arrays", 2, 2, 20},
};

/* What a core's cache has room for is for the operands too. */
TEST_EACH(temporaries_leave_room_for_what_they_are_made_of, chain_cases)
{
    enum { NBYTES = NRM__MIB / 4, N = 40 };
    struct scene scene = scene_begin(&copies_kinds[0], 0);
    void *operands[2], *noted[2 * N];
    size_t n = 0;
    for (int i = 0; i < row->n_operands; i++) {
        operands[i] = allocate(scene.pool, NBYTES);
    }
    pairs(scene.pool, NBYTES, 20);
    uint64_t before = n_closed();
    for (int i = 0; i < N / 2; i++) {
        void *sum = allocate(scene.pool, NBYTES);
        void *product = allocate(scene.pool, NBYTES);
        n = note(noted, note(noted, n, sum), product);
        deallocate(scene.pool, product);
        deallocate(scene.pool, sum);
    }
    CHECK_EQ(n, row->n_blocks);
    CHECK_EQ(n_closed() - before, row->n_epochs);
    for (int i = 0; i < row->n_operands; i++) {
        deallocate(scene.pool, operands[i]);
    }
    scene_end(&scene);
}

static const struct context_case {
    const char *name;
    bool is_current;
    uint64_t n_calls; /* for an epoch on an idle GPU */
} context_cases[] = {
    {"current", true, 6},
    {"not current", false, 9},
};

/* A record, a query, the capture mode and back; whether somebody captures, and which
   life of the current context this is. One that is not current is asked for too, and
   made so. */
TEST_EACH(an_epoch_takes_few_calls_of_the_driver, context_cases)
{
    struct scene scene = scene_begin(&copies_kinds[0], 0);
    if (!row->is_current) {
        CHECK_EQ(cuda.cuCtxSetCurrent(NULL), NRM_CUDA_SUCCESS);
    }
    pairs(scene.pool, NRM__MIB, 20);
    uint64_t before = sim.call_count(NULL);
    pairs(scene.pool, NRM__MIB, 10);
    CHECK_EQ(sim.call_count(NULL) - before, 10 * row->n_calls);
    CHECK_EQ(cuda.cuCtxSetCurrent(scene.copies.context), NRM_CUDA_SUCCESS);
    scene_end(&scene);
}

static const struct moment {
    const char *name;
    const char *call;
    enum nrm_cudasim_moment moment;
} resets[] = {
    {"before it is known whether somebody captures", "cuStreamIsCapturing",
     NRM_CUDASIM_CALL_BEGINS},
    {"before the record", "cuCtxRecordEvent", NRM_CUDASIM_CALL_BEGINS},
    {"after the record", "cuCtxRecordEvent", NRM_CUDASIM_CALL_ENDS},
    {"before the query", "cuEventQuery", NRM_CUDASIM_CALL_BEGINS},
    {"after the query", "cuEventQuery", NRM_CUDASIM_CALL_ENDS},
};

/* What another thread may do, once. */
static int
reset_there(void *arg, int moment, const char *call)
{
    const struct moment **at = arg;
    nrm_CUcontext context;
    if (*at != NULL && moment == (int)(*at)->moment && strcmp(call, (*at)->call) == 0) {
        *at = NULL;
        CHECK_EQ(cuda.cuDevicePrimaryCtxReset(0), NRM_CUDA_SUCCESS);
        CHECK_EQ(cuda.cuDevicePrimaryCtxRetain(&context, 0), NRM_CUDA_SUCCESS);
        CHECK_EQ(cuda.cuCtxSetCurrent(context), NRM_CUDA_SUCCESS);
    }
    return 1;
}

TEST_EACH(a_reset_amid_an_epoch_costs_no_more_than_that_epoch, resets)
{
    struct scene scene = scene_begin(&copies_kinds[0], 0);
    const struct moment *at = row;
    pairs(scene.pool, NRM__MIB, 20);
    char *live = allocate(scene.pool, NRM__MIB);
    memset(live, 7, NRM__MIB);
    sim.set_chooser(reset_there, &at);
    pairs(scene.pool, NRM__MIB, 3);
    sim.set_chooser(NULL, NULL);
    CHECK(at == NULL);
    pairs(scene.pool, NRM__MIB, 3);
    uint64_t before = n_closed();
    pairs(scene.pool, NRM__MIB, 10);
    CHECK_EQ(n_closed() - before, 10u);
    CHECK(live[0] == 7 && live[NRM__MIB - 1] == 7);
    deallocate(scene.pool, live);
    simulator_check_faults();
    scene_end(&scene);
}

static const struct limit_case {
    const char *name;
    size_t parked_limit; /* 0: the option's */
    size_t reserved_nbytes;
} limit_cases[] = {
    {"of 4 MiB", 4 * NRM__MIB, 4 * NRM__MIB},
    {"of 8 MiB", 8 * NRM__MIB, 8 * NRM__MIB},
    {"as usual", 0, 16 * NRM__MIB},
};

/* A program that copies what it drops, faster than the GPU does. */
TEST_EACH(the_parked_limit_is_all_that_a_loop_of_copies_has, limit_cases)
{
    struct scene scene = scene_begin_with(
        &copies_kinds[0], &(nrm_pool_options){.size = sizeof(nrm_pool_options),
                                              .parked_limit = row->parked_limit,
                                              .wait_limit_ns = UINT64_C(
                                                  10000000000)}); /* of a busy host */
    for (int i = 0; i < 100; i++) {
        void *ptr = allocate(scene.pool, NRM__MIB);
        CHECK_EQ(cuda.cuLaunchHostFunc(handle_of(scene.stream), simulator_sleep,
                                       (void *)(uintptr_t)500000),
                 NRM_CUDA_SUCCESS);
        copy(&scene, ptr, NRM__MIB);
        deallocate(scene.pool, ptr);
    }
    CHECK_EQ(counts(scene.pool).reserved_bytes, (int64_t)row->reserved_nbytes);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(scene.stream)), NRM_CUDA_SUCCESS);
    scene_end(&scene);
}

/* An allocation does not pay for much more than it takes. */
TEST(beside_an_endless_kernel_a_pool_grows_by_small_steps)
{
    struct scene scene = scene_begin(&copies_kinds[0], 0);
    int64_t largest = 0;
    hold(scene.stream);
    for (int i = 0; i < 100; i++) {
        int64_t before = counts(scene.pool).reserved_bytes;
        void *ptr = allocate(scene.pool, NRM__MIB);
        largest = nrm__max(largest, counts(scene.pool).reserved_bytes - before);
        copy(&scene, ptr, NRM__MIB);
        deallocate(scene.pool, ptr);
    }
    CHECK_LE(largest, 16 * (int64_t)NRM__MIB);
    finish(&scene);
    scene_end(&scene);
}

/* Each of more blocks than a thread parks is read by a copy that has not begun. */
TEST_EACH(nothing_is_reused_before_its_copy, copies_kinds)
{
    enum { N = 150 };
    struct scene scene = scene_begin(row, 0);
    static void *blocks[N], *others[N];
    for (int i = 0; i < N; i++) {
        blocks[i] = allocate(scene.pool, SMALL);
    }
    hold(scene.stream);
    for (int i = 0; i < N; i++) {
        memset(blocks[i], 1, SMALL);
        copy(&scene, blocks[i], SMALL);
        deallocate(scene.pool, blocks[i]);
        void *other = allocate(scene.pool, SMALL);
        for (int k = 0; k <= i; k++) {
            CHECK(other != blocks[k]);
        }
        memset(other, 2, SMALL);
        others[i] = other;
    }
    CHECK_EQ(counts(scene.pool).parked_bytes, (int64_t)N * SMALL);
    finish(&scene);
    static unsigned char seen[SMALL];
    CHECK_EQ(cuda.cuMemcpyDtoH(seen, scene.copies.device, SMALL), NRM_CUDA_SUCCESS);
    CHECK(seen[0] == 1 && memcmp(seen, seen + 1, SMALL - 1) == 0);
    for (int i = 0; i < N; i++) {
        deallocate(scene.pool, others[i]);
    }
    size_t nbytes = 0;
    CHECK_OK(nrm_resource_trim(scene.pool, 0, &nbytes));
    CHECK_EQ(counts(scene.pool).parked_bytes, 0);
    scene_end(&scene);
}

/* A graph may copy from it again and again: no epoch covers that. */
TEST_EACH(a_block_with_a_known_use_is_not_parked, copies_kinds)
{
    struct scene scene = scene_begin(row, 0);
    nrm_CUstream handle = handle_of(scene.stream);
    nrm_CUgraph graph;
    pairs(scene.pool, SMALL, 4 * N_SMALL);
    void *ptr = allocate(scene.pool, SMALL);
    CHECK_EQ(cuda.cuStreamBeginCapture(handle, NRM_CU_STREAM_CAPTURE_MODE_RELAXED),
             NRM_CUDA_SUCCESS);
    copy(&scene, ptr, SMALL);
    CHECK_OK(nrm_record_use_on_handle(ptr, (uintptr_t)handle));
    CHECK_EQ(cuda.cuStreamEndCapture(handle, &graph), NRM_CUDA_SUCCESS);
    deallocate(scene.pool, ptr);
    CHECK_EQ(nrm__retired_nbytes(scene.pool), SMALL);
    for (int i = 0; i < 4 * N_SMALL; i++) {
        void *other = allocate(scene.pool, SMALL);
        CHECK(other != ptr);
        deallocate(scene.pool, other);
    }
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    (void)nrm__retired_drain(0);
    CHECK(nrm__retired_is_empty());
    scene_end(&scene);
}

/* Zeros are asked for on the long way, which finds a block that was written
   meanwhile. */
TEST_EACH(zeros_are_zeros, copies_kinds)
{
    struct scene scene = scene_begin(row, 0);
    const size_t nbytes = 5 * NRM__MIB;
    for (int i = 0; i < 6; i++) {
        unsigned char *ptr = NULL;
        CHECK_OK(
            nrm_resource_allocate_zeroed(scene.pool, nbytes, 0, NULL, (void **)&ptr));
        CHECK(ptr[0] == 0 && memcmp(ptr, ptr + 1, nbytes - 1) == 0);
        memset(ptr, 7, nbytes);
        deallocate(scene.pool, ptr);
    }
    scene_end(&scene);
}

TEST_EACH(a_second_free_is_refused, copies_kinds)
{
    struct scene scene = scene_begin(row, 0);
    pairs(scene.pool, SMALL, 4);
    void *ptr = allocate(scene.pool, SMALL);
    deallocate(scene.pool, ptr);
    CHECK_EQ(nrm_resource_deallocate(scene.pool, ptr, SMALL, NULL), NRM_NOT_OWNED);
    pairs(scene.pool, SMALL, 2 * N_SMALL);
    CHECK_EQ(counts(scene.pool).current_count, 0);
    scene_end(&scene);
}

/* A free on a stream is for the pool, as what a thread parks is of no stream. */
TEST_EACH(streams_go_the_long_way, copies_kinds)
{
    struct scene scene = scene_begin(row, 0);
    pairs(scene.pool, SMALL, 4 * N_SMALL);
    for (int i = 0; i < 4 * N_SMALL; i++) {
        void *ptr = NULL;
        CHECK_OK(nrm_resource_allocate(scene.pool, SMALL, 0, scene.stream, &ptr));
        memset(ptr, 3, SMALL);
        CHECK_OK(nrm_resource_deallocate(scene.pool, ptr, SMALL, scene.stream));
    }
    CHECK_EQ(counts(scene.pool).current_count, 0);
    scene_end(&scene);
}

/* ---- several threads ---- */

static void
do_pairs(void *argument)
{
    pairs(argument, SMALL, 3 * N_SMALL + 5);
}

TEST_EACH(a_trim_takes_what_idle_threads_have, copies_kinds)
{
    enum { N = 8 };
    struct scene scene = scene_begin(row, 0);
    struct worker workers[N];
    void *live = allocate(scene.pool, SMALL);
    for (int i = 0; i < N; i++) {
        worker_start(&workers[i]);
        worker_run(&workers[i], do_pairs, scene.pool);
    }
    size_t nbytes = 0;
    CHECK_OK(nrm_resource_trim(scene.pool, 0, &nbytes));
    CHECK_EQ(counts(scene.pool).parked_bytes, 0);
    deallocate(scene.pool, live);
    CHECK_OK(nrm_resource_trim(scene.pool, 0, &nbytes));
    CHECK_EQ(counts(scene.pool).reserved_bytes, 0);
    for (int i = 0; i < N; i++) {
        worker_end(&workers[i]);
    }
    scene_end(&scene);
}

static void
fill_and_free(void *argument)
{
    void *blocks[12];
    for (int i = 0; i < 12; i++) {
        blocks[i] = allocate(argument, 4 * NRM__MIB);
    }
    for (int i = 0; i < 12; i++) {
        deallocate(argument, blocks[i]);
    }
}

/* Nothing may be left in the pool but what the other thread has parked. */
TEST_EACH(a_full_pool_finds_what_another_thread_parked, copies_kinds)
{
    const size_t maximum = 64 * NRM__MIB, nbytes = 40 * NRM__MIB;
    struct scene scene = scene_begin(row, maximum);
    struct worker worker;
    worker_start(&worker);
    worker_run(&worker, fill_and_free, scene.pool);
    void *ptr = allocate(scene.pool, nbytes);
    CHECK(ptr != NULL);
    deallocate(scene.pool, ptr);
    worker_end(&worker);
    scene_end(&scene);
}

static void
park_one(void *argument)
{
    void **blocks = argument;
    deallocate(blocks[0], blocks[1]);
}

/* The copy holds it although the thread that freed it is gone. */
TEST_EACH(a_thread_ends_with_blocks_parked, copies_kinds)
{
    struct scene scene = scene_begin(row, 0);
    struct worker worker;
    void *blocks[] = {scene.pool, allocate(scene.pool, SMALL)};
    memset(blocks[1], 1, SMALL);
    hold(scene.stream);
    copy(&scene, blocks[1], SMALL);
    worker_start(&worker);
    worker_run(&worker, do_pairs, scene.pool); /* it has magazines */
    worker_run(&worker, park_one, blocks);
    worker_end(&worker);
    for (int i = 0; i < 4 * N_SMALL; i++) {
        void *other = allocate(scene.pool, SMALL);
        CHECK(other != blocks[1]);
        memset(other, 2, SMALL);
        deallocate(scene.pool, other);
    }
    finish(&scene);
    static unsigned char seen[SMALL];
    CHECK_EQ(cuda.cuMemcpyDtoH(seen, scene.copies.device, SMALL), NRM_CUDA_SUCCESS);
    CHECK(seen[0] == 1 && memcmp(seen, seen + 1, SMALL - 1) == 0);
    scene_end(&scene);
}

static void
run_loops(void *argument)
{
    for (int i = 0; i < 60 / SLOW; i++) {
        pairs(argument, SMALL, N_SMALL + 3);
        pairs(argument, 20000, N_SMALL);
        pairs(argument, 2 * NRM__MIB, 3);
    }
}

TEST_EACH(threads_park_while_others_trim_and_ask, copies_kinds)
{
    struct scene scene = scene_begin(row, 0);
    struct worker workers[3];
    for (int i = 0; i < 3; i++) {
        worker_start(&workers[i]);
        worker_ask(&workers[i], run_loops, scene.pool);
    }
    for (int i = 0; i < 40 / SLOW; i++) {
        size_t nbytes = 0;
        CHECK_OK(nrm_resource_trim(scene.pool, 0, &nbytes));
        CHECK(counts(scene.pool).parked_bytes >= 0);
    }
    for (int i = 0; i < 3; i++) {
        worker_wait(&workers[i]);
        worker_end(&workers[i]);
    }
    CHECK_EQ(counts(scene.pool).current_bytes, 0);
    scene_end(&scene);
}

CHECK_MAIN
