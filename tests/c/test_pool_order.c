/* A pool of device memory on the simulated driver: programs that free on one stream and
   allocate on another, through the public calls, and compare bytes.

   In most of them a stream that works on a block is held, the block is freed, and somebody
   else gets it and overwrites it. What the first stream reads when it goes on must be what
   was there. A pool that is full has one segment, so that the same memory has to be used. */
#include <pthread.h>
#include <string.h>

#include "base/bits.h"
#include "core/hooks.h"
#include "device_pool.h"
#include "nrm/options.h"

#define FOREVER NRM_ON_EXHAUSTED_WAIT

enum { N_SEEN = 8, N_STREAMS = 3, N_THREADS = 3 };

/* ---- the program ---- */

static nrm_resource *
pool_of(nrm_resource *upstream, size_t nbytes, nrm_reuse reuse,
        nrm_on_exhausted on_exhausted)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    nrm_resource *mr = NULL;
    options.initial_nbytes = options.maximum_nbytes = nbytes;
    options.reuse = reuse;
    options.on_exhausted = on_exhausted;
    options.wait_limit_ns = 5 * 1000 * 1000;
    CHECK_OK(nrm_pool_create(upstream, &options, &mr));
    nrm_resource_release(upstream);
    return mr;
}

static nrm_resource *
device_source(void)
{
    nrm_resource *mr = NULL;
    CHECK_OK(nrm_device_create(NULL, &mr));
    return mr;
}

/* A pool that has `nbytes` and gets no more; 0: it grows. */
static void
start(size_t nbytes)
{
    start_device(NULL, N_SEEN);
    pool = pool_of(device_source(), nbytes, NRM_REUSE_DEFAULT, NRM_ON_EXHAUSTED_ERROR);
}

/* A block of 7s that the stream, held, is about to read when it is freed on `freed_on`. */
static void *
use_and_free(nrm_stream *stream, int i, nrm_stream *freed_on)
{
    void *ptr = take(BLOCK, stream);
    write_on(stream, ptr, 7);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(stream)), NRM_CUDA_SUCCESS);
    hold(stream);
    read_on(stream, ptr, i);
    give(ptr, freed_on);
    return ptr;
}

static int64_t
pending_nbytes(void)
{
    nrm_statistics statistics = {0};
    CHECK_OK(nrm_resource_statistics(pool, &statistics));
    return statistics.parked_bytes;
}

/* ---- who gets a block, and how ---- */

TEST(a_stream_gets_its_own_block_back_without_a_call)
{
    start(BLOCK);
    nrm_stream *a = new_stream();
    void *ptr = use_and_free(a, 0, a);
    uint64_t before = sim.call_count(NULL);
    void *again = take(BLOCK, a);
    CHECK_EQ(sim.call_count(NULL), before);
    CHECK(again == ptr);
    write_on(a, again, 9);
    before = sim.call_count(NULL);
    give(again, a);
    CHECK_EQ(sim.call_count(NULL), before);
    let_go(a);
    CHECK(has_seen(0, 7));
    nrm_stream_release(a);
    stop();
}

TEST(another_stream_waits_when_the_pool_is_full)
{
    start(BLOCK);
    nrm_stream *a = new_stream(), *b = new_stream();
    void *ptr = use_and_free(a, 0, a);
    void *other = take(BLOCK, b);
    CHECK(other == ptr);
    CHECK_EQ(sim.call_count("cuStreamWaitEvent"), 1u);
    write_on(b, other, 9);
    let_run();
    let_go(a);
    CHECK(has_seen(0, 7));
    CHECK_EQ(sim.call_count("cuCtxRecordEvent"), 0u);
    give(other, b);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

TEST(the_pool_grows_before_a_stream_waits)
{
    start(0);
    nrm_stream *a = new_stream(), *b = new_stream();
    void *ptr = use_and_free(a, 0, a);
    size_t nbytes = (size_t)reserved_nbytes(pool);
    void *rest = take(nbytes - BLOCK, a); /* so that only A's block is free */
    void *other = take(BLOCK, b);
    CHECK(other != ptr);
    CHECK_GT(reserved_nbytes(pool), (int64_t)nbytes);
    CHECK_EQ(sim.call_count("cuStreamWaitEvent"), 0u);
    let_go(a);
    give(rest, a);
    give(other, b);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

TEST(what_is_done_is_found_before_the_pool_grows)
{
    start(0);
    nrm_stream *a = new_stream(), *b = new_stream();
    void *ptr = use_and_free(a, 0, a);
    size_t nbytes = (size_t)reserved_nbytes(pool);
    void *rest = take(nbytes - BLOCK, a);
    let_go(a);
    CHECK(has_seen(0, 7));
    void *other = take(BLOCK, b);
    CHECK(other == ptr);
    CHECK_EQ(reserved_nbytes(pool), (int64_t)nbytes);
    CHECK_EQ(sim.call_count("cuStreamWaitEvent"), 0u);
    give(rest, a);
    give(other, b);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

TEST(the_host_gets_only_what_is_done)
{
    start(BLOCK);
    nrm_stream *a = new_stream();
    (void)use_and_free(a, 0, a);
    CHECK_EQ(pending_nbytes(), (int64_t)BLOCK);
    CHECK_STATUS(try_take(BLOCK, NULL), NRM_OUT_OF_MEMORY);
    CHECK_STR_HAS(nrm_last_error()->message, "4 KiB freed but not done on the GPU");
    let_go(a);
    CHECK(has_seen(0, 7));
    CHECK_OK(try_take(BLOCK, NULL));
    nrm_stream_release(a);
    stop();
}

TEST(what_the_host_frees_is_ordered_behind_every_stream)
{
    start(BLOCK);
    nrm_stream *a = new_stream(), *b = new_stream();
    (void)use_and_free(a, 0, NULL);
    CHECK_STATUS(try_take(BLOCK, NULL), NRM_OUT_OF_MEMORY);
    void *ptr = take(BLOCK, b);
    write_on(b, ptr, 9);
    let_run();
    let_go(a);
    CHECK(has_seen(0, 7));
    give(ptr, b);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

static const struct special {
    const char *name;
    nrm_stream *(*get)(void);
} specials[] = {
    {"default", nrm_stream_default},
    {"legacy", nrm_stream_legacy},
};

TEST_EACH(streams_that_nobody_created_have_their_own_blocks_too, specials)
{
    start(BLOCK);
    nrm_stream *special = row->get(), *b = new_stream();
    (void)use_and_free(special, 0, special);
    uint64_t before = sim.call_count(NULL);
    void *ptr = take(BLOCK, special);
    give(ptr, special);
    CHECK_EQ(sim.call_count(NULL), before);
    ptr = take(BLOCK, b);
    write_on(b, ptr, 9);
    let_run();
    let_go(special);
    CHECK(has_seen(0, 7));
    give(ptr, b);
    nrm_stream_release(b);
    stop();
}

TEST(immediate_reuse_asks_nobody)
{
    start_device(NULL, N_SEEN);
    pool = pool_of(device_source(), BLOCK, NRM_REUSE_IMMEDIATE, NRM_ON_EXHAUSTED_ERROR);
    nrm_stream *a = new_stream();
    void *ptr = use_and_free(a, 0, a);
    uint64_t before = sim.call_count(NULL);
    CHECK(take(BLOCK, NULL) == ptr);
    CHECK_EQ(sim.call_count(NULL), before);
    let_go(a);
    give(ptr, NULL);
    nrm_stream_release(a);
    stop();
}

/* ---- schedules by which memory was handed out too early ---- */

/* RMM 2489: B has recorded before, takes over what A has freed, and C looks at B's event. */
TEST(what_was_merged_into_a_list_after_its_event_is_not_covered_by_it)
{
    start(2 * BLOCK);
    nrm_stream *a = new_stream(), *b = new_stream(), *c = new_stream();
    void *first = take(BLOCK, b), *second = take(BLOCK, b);
    hold(b);
    write_on(b, second, 1);
    give(second, b);
    void *third = take(BLOCK, c); /* B's event; C has the second block */
    CHECK(third == second);
    let_go(b);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    give(first, b);
    first = use_and_free(a, 0, a);
    void *again = take(BLOCK, b); /* B waits for A ... */
    CHECK(again == first);
    give(again, b); /* ... and the block joins B's list */
    again = take(BLOCK, c);
    CHECK(again == first);
    write_on(c, again, 9);
    let_run();
    let_go(a);
    CHECK(has_seen(0, 7));
    give(again, c);
    give(third, c);
    nrm_stream_release(a);
    nrm_stream_release(b);
    nrm_stream_release(c);
    stop();
}

TEST(what_comes_back_after_a_wait_starts_a_new_count)
{
    start(BLOCK);
    nrm_stream *a = new_stream(), *b = new_stream(), *c = new_stream();
    hold(a);
    void *ptr = take(BLOCK, a);
    write_on(a, ptr, 1);
    give(ptr, a);
    ptr = take(BLOCK, b); /* records on A */
    let_go(a);
    write_on(b, ptr, 7);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(b)), NRM_CUDA_SUCCESS);
    hold(b);
    read_on(b, ptr, 0);
    give(ptr, b);
    ptr = take(BLOCK, a); /* A waits for B */
    give(ptr, a);
    ptr = take(BLOCK, c); /* A's first event says nothing about it */
    write_on(c, ptr, 9);
    let_run();
    let_go(b);
    CHECK(has_seen(0, 7));
    give(ptr, c);
    nrm_stream_release(a);
    nrm_stream_release(b);
    nrm_stream_release(c);
    stop();
}

TEST(what_is_freed_after_a_record_is_not_covered_by_it)
{
    start(2 * BLOCK);
    nrm_stream *a = new_stream(), *b = new_stream();
    void *first = take(BLOCK, a), *second = take(BLOCK, a);
    write_on(a, second, 7);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    hold(a);
    write_on(a, first, 1);
    give(first, a);
    first = take(BLOCK, b); /* records on A */
    read_on(a, second, 0);
    give(second, a);
    second = take(BLOCK, b);
    write_on(b, second, 9);
    let_run();
    let_go(a);
    CHECK(has_seen(0, 7));
    give(first, b);
    give(second, b);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

/* ---- streams that go away ---- */

/* Work on `handle` that does not begin before `aside` is let go; that is held. */
static nrm_CUevent
put_behind(nrm_CUstream handle, const nrm_stream *aside)
{
    nrm_CUevent event = NULL;
    hold(aside);
    CHECK_EQ(cuda.cuMemsetD8Async(seen + BLOCK, 0, BLOCK, handle_of(aside)),
             NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuEventCreate(&event, NRM_CU_EVENT_DISABLE_TIMING), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuEventRecord(event, handle_of(aside)), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamWaitEvent(handle, event, 0), NRM_CUDA_SUCCESS);
    return event;
}

static const struct reused {
    const char *name;
    bool is_bare;
} reused[] = {{"stream object", false}, {"bare handle", true}};

/* RMM 510: its handle is given to the next stream at once, with work pending. */
TEST_EACH(a_destroyed_streams_handle_is_another_stream, reused)
{
    start(BLOCK);
    nrm_stream *a = row->is_bare ? bare_stream(new_handle()) : new_stream();
    nrm_stream *aside = new_stream();
    nrm_CUstream handle = handle_of(a);
    void *ptr = take(BLOCK, a);
    write_on(a, ptr, 7);
    CHECK_EQ(cuda.cuStreamSynchronize(handle), NRM_CUDA_SUCCESS);
    nrm_CUevent event = put_behind(handle, aside);
    read_on(a, ptr, 0);
    give(ptr, a);
    nrm_stream_release(a);
    if (row->is_bare) {
        CHECK_EQ(cuda.cuStreamDestroy(handle), NRM_CUDA_SUCCESS);
    }
    nrm_stream *next = row->is_bare ? bare_stream(new_handle()) : new_stream();
    CHECK_EQ(handle_of(next), handle);
    ptr = take(BLOCK, next);
    write_on(next, ptr, 9);
    let_run();
    let_go(aside);
    CHECK(has_seen(0, 7));
    give(ptr, next);
    CHECK_EQ(sim.call_count("cuCtxRecordEvent"), 0u);
    CHECK_EQ(cuda.cuEventDestroy(event), NRM_CUDA_SUCCESS);
    nrm_stream_release(next);
    if (row->is_bare) {
        CHECK_EQ(cuda.cuStreamDestroy(handle), NRM_CUDA_SUCCESS);
    }
    nrm_stream_release(aside);
    stop();
}

/* A program that uses handles only must not grow with every kernel that it starts. */
TEST(a_bare_handle_gets_its_own_block_back_while_it_is_busy)
{
    start(0);
    nrm_stream *bare = bare_stream(new_handle());
    void *ptr = use_and_free(bare, 0, bare);
    int64_t nbytes = reserved_nbytes(pool);
    void *rest = take((size_t)nbytes - BLOCK, NULL);
    uint64_t records = sim.call_count("cuEventRecord");
    for (int i = 0; i < 20; i++) {
        void *again = take(BLOCK, bare);
        CHECK(again == ptr);
        write_on(bare, again, 9);
        give(again, bare);
    }
    CHECK_EQ(sim.call_count("cuEventRecord"), records);
    CHECK_EQ(reserved_nbytes(pool), nbytes);
    let_go(bare);
    CHECK(has_seen(0, 7));
    give(rest, NULL);
    CHECK_EQ(cuda.cuStreamDestroy(handle_of(bare)), NRM_CUDA_SUCCESS);
    nrm_stream_release(bare);
    stop();
}

/* As a binding makes them that knows streams of other libraries only by their handles. */
static nrm_stream *
object_for(nrm_CUstream handle)
{
    static int kept;
    nrm_stream *stream = NULL;
    CHECK_OK(nrm_stream_wrap((uintptr_t)handle, &kept, NULL, &stream));
    return stream;
}

static nrm_stream *
object_for_per_thread(nrm_CUstream unused)
{
    nrm_stream *stream = NULL;
    (void)unused;
    CHECK_OK(nrm_stream_per_thread(&stream));
    return stream;
}

static const struct object {
    const char *name;
    nrm_stream *(*make)(nrm_CUstream handle);
} objects[] = {
    {"of a handle", object_for},
    {"of the thread", object_for_per_thread},
};

TEST_EACH(a_new_object_for_each_call_gets_the_streams_blocks_while_it_is_busy, objects)
{
    start(0);
    nrm_CUstream handle = new_handle();
    nrm_stream *stream = row->make(handle);
    void *ptr = use_and_free(stream, 0, stream);
    int64_t nbytes = reserved_nbytes(pool);
    void *rest = take((size_t)nbytes - BLOCK, NULL);
    for (int i = 0; i < 20; i++) {
        nrm_stream *again = row->make(handle);
        CHECK(take(BLOCK, again) == ptr);
        nrm_stream_release(again);
        again = row->make(handle);
        write_on(again, ptr, 9);
        give(ptr, again);
        nrm_stream_release(again);
    }
    CHECK_EQ(reserved_nbytes(pool), nbytes);
    let_go(stream);
    CHECK(has_seen(0, 7));
    give(rest, NULL);
    nrm_stream_release(stream);
    CHECK_EQ(cuda.cuStreamDestroy(handle), NRM_CUDA_SUCCESS);
    stop();
}

/* ---- per-thread streams ---- */

static nrm_stream *others; /* of the other thread */
static void *others_ptr;
static pthread_barrier_t stage;

static void *
per_thread_main(void *unused)
{
    (void)unused;
    make_current(0);
    CHECK_OK(nrm_stream_per_thread(&others));
    others_ptr = take(BLOCK, others);
    write_on(others, others_ptr, 7);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(others)), NRM_CUDA_SUCCESS);
    hold(others);
    read_on(others, others_ptr, 0);
    pthread_barrier_wait(&stage);
    pthread_barrier_wait(&stage);
    let_go(others);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(others)), NRM_CUDA_SUCCESS);
    pthread_barrier_wait(&stage);
    return NULL;
}

TEST(a_free_on_the_per_thread_stream_of_another_thread_is_behind_its_context)
{
    pthread_t thread;
    nrm_stream *own = NULL;
    start(BLOCK);
    CHECK_OK(nrm_stream_per_thread(&own));
    pthread_barrier_init(&stage, NULL, 2);
    CHECK_EQ(pthread_create(&thread, NULL, per_thread_main, NULL), 0);
    pthread_barrier_wait(&stage);
    uint64_t before = sim.call_count(NULL);
    give(others_ptr, others);
    CHECK_EQ(sim.call_count(NULL), before);
    void *ptr = take(BLOCK, own);
    CHECK(ptr == others_ptr);
    CHECK_EQ(sim.call_count("cuEventRecord"), 0u);
    write_on(own, ptr, 9);
    let_run();
    pthread_barrier_wait(&stage);
    pthread_barrier_wait(&stage);
    CHECK(has_seen(0, 7));
    give(ptr, own);
    pthread_join(thread, NULL);
    pthread_barrier_destroy(&stage);
    nrm_stream_release(others);
    nrm_stream_release(own);
    stop();
}

/* ---- merging ---- */

TEST(neighbours_of_two_streams_become_one_when_they_are_done)
{
    start(2 * BLOCK);
    nrm_stream *a = new_stream(), *b = new_stream();
    void *first = take(BLOCK, a), *second = take(BLOCK, b);
    hold(a);
    hold(b);
    write_on(a, first, 1);
    write_on(b, second, 2);
    give(first, a);
    give(second, b);
    CHECK_STATUS(try_take(2 * BLOCK, a), NRM_OUT_OF_MEMORY);
    CHECK_STATUS(try_take(2 * BLOCK, NULL), NRM_OUT_OF_MEMORY);
    let_go(b);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(b)), NRM_CUDA_SUCCESS);
    uint64_t waits = sim.call_count("cuStreamWaitEvent");
    CHECK_OK(try_take(2 * BLOCK, a)); /* its own, with what is done beside it */
    CHECK_EQ(sim.call_count("cuStreamWaitEvent"), waits);
    let_go(a);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    CHECK_OK(try_take(2 * BLOCK, NULL));
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

/* Its own block would have to be cut for what fits exactly in one that is done. */
TEST(the_better_fit_is_taken_of_its_own_and_what_is_done)
{
    size_t small = NRM__MIB, large = 4 * NRM__MIB, all = 8 * NRM__MIB;
    start(all);
    nrm_stream *a = new_stream();
    void *fit = take(small, a), *before = take(BLOCK, a), *own = take(large, a);
    void *rest = take(all - small - large - BLOCK, a);
    give(fit, a);
    CHECK_STATUS(try_take(all, NULL), NRM_OUT_OF_MEMORY); /* finds that it is done */
    hold(a);
    write_on(a, own, 1);
    give(own, a);
    CHECK_STATUS(try_take(all, NULL), NRM_OUT_OF_MEMORY); /* the thread keeps nothing */
    CHECK_EQ(pending_nbytes(), (int64_t)large);
    CHECK(take(small, a) == fit);
    CHECK(take(large, a) == own);
    let_go(a);
    give(fit, a);
    give(own, a);
    give(before, a);
    give(rest, a);
    nrm_stream_release(a);
    stop();
}

/* What two streams have freed side by side fits exactly once it is known to be done. */
TEST(a_large_block_is_not_cut_before_the_driver_was_asked)
{
    size_t half = 48 * NRM__MIB;
    start(512 * NRM__MIB);
    nrm_stream *a = new_stream(), *b = new_stream();
    void *first = take(half, a), *second = take(half, b), *after = take(BLOCK, a);
    give(first, a);
    give(second, b);
    void *both = take(2 * half, NULL);
    CHECK(both == first);
    uint64_t before = sim.call_count(NULL);
    void *more = take(NRM__MIB, NULL); /* not again before as much is freed */
    CHECK_EQ(sim.call_count(NULL), before);
    give(both, NULL);
    give(more, NULL);
    give(after, a);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

TEST(a_stream_that_used_a_little_leaves_the_rest_to_others)
{
    start(16 * BLOCK);
    nrm_stream *a = new_stream(), *b = new_stream();
    (void)use_and_free(a, 0, a);
    uint64_t before = sim.call_count(NULL);
    void *ptr = take(15 * BLOCK, b);
    CHECK_EQ(sim.call_count(NULL), before);
    let_go(a);
    give(ptr, b);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

TEST(the_later_of_two_halves_says_when_both_are_done)
{
    start(2 * BLOCK);
    nrm_stream *a = new_stream(), *b = new_stream();
    void *first = take(BLOCK, a), *second = take(BLOCK, a);
    write_on(a, second, 7);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    hold(a);
    write_on(a, first, 1);
    give(first, a);
    CHECK_STATUS(try_take(BLOCK, NULL), NRM_OUT_OF_MEMORY); /* recorded */
    read_on(a, second, 0);
    give(second, a); /* one block with the first */
    void *both = take(2 * BLOCK, b);
    write_on(b, (char *)both + BLOCK, 9);
    let_run();
    let_go(a);
    CHECK(has_seen(0, 7));
    give(both, b);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

/* ---- streams that are stuck, or captured ---- */

TEST(one_stuck_stream_stalls_no_other)
{
    start(4 * BLOCK);
    nrm_stream *stuck = new_stream(), *a = new_stream(), *b = new_stream();
    (void)use_and_free(stuck, 0, stuck);
    for (int i = 0; i < 20; i++) {
        nrm_stream *stream = i % 2 == 0 ? a : b;
        void *ptr = take(3 * BLOCK, stream);
        write_on(stream, ptr, 9);
        give(ptr, stream);
        CHECK_EQ(cuda.cuStreamSynchronize(handle_of(stream)), NRM_CUDA_SUCCESS);
    }
    CHECK_EQ(sim.call_count("cuStreamWaitEvent"), 0u);
    let_go(stuck);
    CHECK(has_seen(0, 7));
    nrm_stream_release(stuck);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

/* What a stream needs of another's block leaves the rest of that to the other. */
TEST(a_stuck_stream_that_waited_holds_up_only_its_own_piece)
{
    start(8 * BLOCK);
    nrm_stream *a = new_stream(), *stuck = new_stream();
    void *all = take(8 * BLOCK, a);
    hold(a);
    write_on(a, all, 1);
    give(all, a);
    hold(stuck);
    void *piece = take(BLOCK, stuck);
    write_on(stuck, piece, 2);
    give(piece, stuck);
    let_go(a);
    void *rest = take(7 * BLOCK, a);
    write_on(a, rest, 3);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(a)), NRM_CUDA_SUCCESS);
    give(rest, a);
    let_go(stuck);
    nrm_stream_release(a);
    nrm_stream_release(stuck);
    stop();
}

TEST(more_stuck_streams_than_lists_hide_nothing_that_is_done)
{
    enum { MANY = 80 };
    static nrm_stream *stuck[MANY];
    void *ptrs[MANY];
    start(((size_t)MANY + 1) * BLOCK);
    nrm_stream *a = new_stream();
    for (int i = 0; i < MANY; i++) {
        stuck[i] = new_stream();
        ptrs[i] = take(BLOCK, stuck[i]);
        hold(stuck[i]);
        write_on(stuck[i], ptrs[i], 1);
    }
    for (int i = 0; i < MANY; i++) {
        give(ptrs[i], stuck[i]);
    }
    void *last = take(BLOCK, NULL);
    give(last, NULL); /* joins the others, behind all of them */
    let_go(stuck[MANY - 1]);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(stuck[MANY - 1])), NRM_CUDA_SUCCESS);
    nrm_status status = NRM_OUT_OF_MEMORY;
    for (int i = 0; i < 20 && status != NRM_OK; i++) {
        status = try_take(BLOCK, NULL);
    }
    CHECK_OK(status);
    for (int i = 0; i < MANY - 1; i++) { /* each has its own without a wait */
        uint64_t before = sim.call_count(NULL);
        void *ptr = take(BLOCK, stuck[i]);
        CHECK_EQ(sim.call_count(NULL), before);
        give(ptr, stuck[i]);
    }
    for (int i = 0; i < MANY; i++) {
        if (i != MANY - 1) {
            let_go(stuck[i]);
        }
        nrm_stream_release(stuck[i]);
    }
    nrm_stream_release(a);
    stop();
}

TEST(a_captured_streams_block_is_passed_over)
{
    nrm_CUgraph graph = NULL;
    start(2 * BLOCK);
    nrm_stream *a = new_stream(), *b = new_stream(), *c = new_stream();
    void *first = take(BLOCK, a), *second = take(BLOCK, b);
    CHECK_EQ(cuda.cuStreamBeginCapture(handle_of(a), NRM_CU_STREAM_CAPTURE_MODE_GLOBAL),
             NRM_CUDA_SUCCESS);
    give(first, a);
    hold(b);
    write_on(b, second, 1);
    give(second, b);
    void *ptr = take(BLOCK, c);
    CHECK(ptr == second);
    CHECK_STATUS(try_take(BLOCK, c), NRM_OUT_OF_MEMORY);
    CHECK_EQ(cuda.cuStreamEndCapture(handle_of(a), &graph), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    CHECK_OK(try_take(BLOCK, c));
    let_go(b);
    give(ptr, c);
    nrm_stream_release(a);
    nrm_stream_release(b);
    nrm_stream_release(c);
    stop();
}

/* ---- full pools, failing calls, giving back ---- */

static void *
let_go_soon(void *stream)
{
    make_current(0);
    let_run();
    let_go(stream);
    return NULL;
}

TEST(a_full_pool_waits_for_the_gpu_if_it_is_told_to)
{
    pthread_t thread;
    start_device(NULL, N_SEEN);
    pool = pool_of(device_source(), BLOCK, NRM_REUSE_DEFAULT, FOREVER);
    nrm_stream *a = new_stream();
    void *ptr = use_and_free(a, 0, a);
    CHECK_EQ(pthread_create(&thread, NULL, let_go_soon, a), 0);
    CHECK(take(BLOCK, NULL) == ptr);
    pthread_join(thread, NULL);
    give(ptr, NULL);
    CHECK_STATUS(try_take(2 * BLOCK, NULL), NRM_OUT_OF_MEMORY); /* at once */
    nrm_stream_release(a);
    stop();
}

TEST(a_wait_that_the_driver_refuses_is_an_error_and_loses_nothing)
{
    start(BLOCK);
    nrm_stream *a = new_stream(), *b = new_stream();
    (void)use_and_free(a, 0, a);
    CHECK_EQ(sim.fail("cuStreamWaitEvent", 1, NRM_CUDA_ERROR_OPERATING_SYSTEM, 1), 0);
    CHECK_STATUS(try_take(BLOCK, b), NRM_CUDA_ERROR);
    CHECK_STR_EQ(nrm_last_error()->native_name, "CUDA_ERROR_OPERATING_SYSTEM");
    CHECK_EQ(live_nbytes(pool), 0);
    void *ptr = take(BLOCK, b);
    write_on(b, ptr, 9);
    let_run();
    let_go(a);
    CHECK(has_seen(0, 7));
    give(ptr, b);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

TEST(trim_gives_back_what_is_done_and_no_more)
{
    start(BLOCK);
    nrm_stream *a = new_stream();
    (void)use_and_free(a, 0, a);
    size_t given = 0;
    CHECK_OK(nrm_resource_trim(pool, 0, &given));
    CHECK_EQ(given, 0u);
    CHECK_EQ(reserved_nbytes(pool), (int64_t)BLOCK);
    let_go(a);
    CHECK(has_seen(0, 7));
    CHECK_OK(nrm_resource_trim(pool, 0, &given));
    CHECK_EQ(given, BLOCK);
    CHECK_EQ(reserved_nbytes(pool), 0);
    nrm_stream_release(a);
    stop();
}

/* An upstream of other people, over memory of the driver, that writes to what comes back. */
static nrm_status
others_allocate(void *context, size_t nbytes, size_t alignment, nrm_stream *stream,
                void **out)
{
    nrm_CUdeviceptr ptr = 0;
    (void)context, (void)alignment, (void)stream;
    CHECK_EQ(cuda.cuMemAlloc(&ptr, nbytes), NRM_CUDA_SUCCESS);
    *out = (void *)(uintptr_t)ptr;
    return NRM_OK;
}

static nrm_status
others_deallocate(void *context, void *ptr, size_t nbytes, nrm_stream *stream)
{
    (void)context, (void)stream;
    nrm_stream *own = new_stream();
    CHECK_EQ(cuda.cuMemsetD8Async((nrm_CUdeviceptr)(uintptr_t)ptr, 9, nbytes,
                                  handle_of(own)),
             NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(own)), NRM_CUDA_SUCCESS);
    nrm_stream_release(own);
    CHECK_EQ(cuda.cuMemFree((nrm_CUdeviceptr)(uintptr_t)ptr), NRM_CUDA_SUCCESS);
    return NRM_OK;
}

TEST(a_pool_that_ends_gives_nothing_back_that_is_in_use)
{
    pthread_t thread;
    nrm_callback_options options = NRM_OPTIONS(nrm_callback_options);
    nrm_resource *upstream = NULL;
    start_device(NULL, N_SEEN);
    options.kind = NRM_KIND_DEVICE;
    options.allocate = others_allocate;
    options.deallocate = others_deallocate;
    CHECK_OK(nrm_callback_create(&options, &upstream));
    pool = pool_of(upstream, BLOCK, NRM_REUSE_DEFAULT, NRM_ON_EXHAUSTED_ERROR);
    nrm_stream *a = new_stream();
    (void)use_and_free(a, 0, a);
    CHECK_EQ(pthread_create(&thread, NULL, let_go_soon, a), 0);
    nrm_resource_release(pool);
    pthread_join(thread, NULL);
    CHECK(has_seen(0, 7));
    CHECK_EQ(cuda.cuMemFree(seen), NRM_CUDA_SUCCESS);
    CHECK_EQ(simulator_count(NRM_CUDASIM_DEVICE_ALLOCATIONS), 0u);
    nrm_stream_release(a);
    cuda.cuCtxSetCurrent(NULL);
    simulator_check_faults();
}

/* Memory that the host can touch: whoever has no stream is another stream. */
static const struct crossing {
    const char *name;
    bool freed_by_host, taken_by_host;
} crossings[] = {
    {"stream to host", false, true},
    {"host to stream", true, false},
    {"stream to stream", false, false},
};

TEST_EACH(pinned_memory_that_crosses_is_done, crossings)
{
    nrm_resource *source = NULL;
    start_device(NULL, N_SEEN);
    CHECK_OK(nrm_pinned_create(NULL, &source));
    pool = pool_of(source, BLOCK, NRM_REUSE_DEFAULT, NRM_ON_EXHAUSTED_ERROR);
    nrm_stream *a = new_stream(), *b = new_stream();
    (void)use_and_free(a, 0, row->freed_by_host ? NULL : a);
    nrm_stream *taker = row->taken_by_host ? NULL : b;
    CHECK_STATUS(try_take(BLOCK, taker), NRM_OUT_OF_MEMORY);
    let_go(a);
    CHECK(has_seen(0, 7));
    CHECK_OK(try_take(BLOCK, taker));
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

/* ---- programs by chance ---- */

enum { N_PIECES = 24, N_STEPS = 1500, N_RESULTS = 8192 };

struct piece {
    void *ptr;
    size_t nbytes;
    nrm_stream *stream; /* that works on it */
};

static struct {
    nrm_stream *streams[N_STREAMS];
    nrm_CUdeviceptr results;
    unsigned char values[N_RESULTS];
    atomic_uint n_results;
} shared;

static size_t largest_nbytes; /* of a block */

/* Fills a block and copies a byte of it out: both must be of one owner. */
static void
use(const struct piece *piece, uint64_t *random)
{
    unsigned n = atomic_fetch_add(&shared.n_results, 1) % N_RESULTS;
    unsigned char value = (unsigned char)(n % 251 + 1);
    nrm_CUdeviceptr ptr = (nrm_CUdeviceptr)(uintptr_t)piece->ptr;
    shared.values[n] = value;
    CHECK_EQ(cuda.cuMemsetD8Async(ptr, value, piece->nbytes, handle_of(piece->stream)),
             NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemcpyAsync(shared.results + n,
                                ptr + check_random(random) % piece->nbytes, 1,
                                handle_of(piece->stream)),
             NRM_CUDA_SUCCESS);
}

/* False: there was no memory, which the GPU may still have. */
static bool
fill_piece(struct piece *piece, nrm_stream *stream, uint64_t *random)
{
    size_t nbytes = 1 + check_random(random) % largest_nbytes;
    nrm_status status = nrm_resource_allocate(pool, nbytes, 0, stream, &piece->ptr);
    if (status != NRM_OK) {
        piece->ptr = NULL;
        return CHECK(status == NRM_OUT_OF_MEMORY) && false;
    }
    piece->nbytes = nbytes;
    piece->stream = stream;
    use(piece, random);
    return true;
}

static void
empty_piece(struct piece *piece, bool by_host)
{
    CHECK_OK(
        nrm_resource_deallocate(pool, piece->ptr, 0, by_host ? NULL : piece->stream));
    piece->ptr = NULL;
}

static const struct program {
    const char *name;
    size_t nbytes; /* of the pool; 0: it grows */
    size_t largest_nbytes;
    const char *segment_nbytes;
    uint64_t seed;
    size_t block_nbytes; /* over it, of a fixed-size resource; 0: there is none */
} programs[] = {
    {"full", 128 * 1024, 16 * 1024, "64 MiB", 1, 0},
    {"full again", 128 * 1024, 16 * 1024, "64 MiB", 2, 0},
    {"tight", 200 * 1024, 16 * 1024, "64 MiB", 3, 0},
    {"grows", 0, 16 * 1024, "64 MiB", 4, 0},
    {"many pieces", 24 * NRM__MIB, 3 * NRM__MIB, "2 MiB", 5, 0},
    {"many pieces, grows", 0, 3 * NRM__MIB, "2 MiB", 6, 0},
    {"one size, full", 256 * 1024, 16 * 1024, "64 MiB", 7, 16 * 1024},
    {"one size, grows", 0, 12000, "64 MiB", 8, 12000},
};

/* A fixed-size resource, whose upstream it takes. */
static nrm_resource *
fixed_over(nrm_resource *upstream, size_t block_nbytes)
{
    nrm_fixed_size_options options = NRM_OPTIONS(nrm_fixed_size_options);
    nrm_resource *mr = NULL;
    options.block_nbytes = block_nbytes;
    options.n_blocks = 4;
    CHECK_OK(nrm_fixed_size_create(upstream, &options, &mr));
    nrm_resource_release(upstream);
    return mr;
}

static void
start_program(const struct program *program)
{
    struct nrm_cudasim_config config = simulator_config();
    config.seed = program->seed;
    start_device(&config, N_SEEN);
    CHECK_OK(nrm_option_set(NRM_OPT_SEGMENT_NBYTES, program->segment_nbytes));
    pool = pool_of(device_source(), program->nbytes, NRM_REUSE_DEFAULT,
                   NRM_ON_EXHAUSTED_ERROR);
    CHECK_OK(nrm_option_set(NRM_OPT_SEGMENT_NBYTES, "64 MiB"));
    if (program->block_nbytes != 0) {
        pool = fixed_over(pool, program->block_nbytes);
    }
    largest_nbytes = program->largest_nbytes;
    atomic_store(&shared.n_results, 0);
    CHECK_EQ(cuda.cuMemAlloc(&shared.results, N_RESULTS), NRM_CUDA_SUCCESS);
    for (int i = 0; i < N_STREAMS; i++) {
        shared.streams[i] = new_stream();
    }
}

static void
end_program(void)
{
    static unsigned char bytes[N_RESULTS];
    unsigned n = atomic_load(&shared.n_results);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    CHECK_LE(n, (unsigned)N_RESULTS);
    CHECK_GT(n, 100u); /* a full pool refuses some */
    CHECK_EQ(cuda.cuMemcpyDtoH(bytes, shared.results, n), NRM_CUDA_SUCCESS);
    CHECK_MEM_EQ(bytes, shared.values, n);
    CHECK_EQ(cuda.cuMemFree(shared.results), NRM_CUDA_SUCCESS);
    for (int i = 0; i < N_STREAMS; i++) {
        nrm_stream_release(shared.streams[i]);
    }
    stop();
}

/* Each of three streams may be held; the pool is checked after every step. */
TEST_EACH(a_random_program_over_three_streams_keeps_every_byte, programs)
{
    struct piece pieces[N_PIECES] = {{0}};
    bool is_held[N_STREAMS] = {false};
    uint64_t random = 1000 + row->seed;
    start_program(row);
    for (int step = 0; step < N_STEPS; step++) {
        struct piece *piece = &pieces[check_random(&random) % N_PIECES];
        unsigned k = (unsigned)(check_random(&random) % N_STREAMS);
        uint64_t what = check_random(&random) % 16;
        if (what == 15) {
            CHECK_OK(nrm_resource_trim(pool, 0, NULL));
        }
        else if (what == 0) {
            is_held[k] ? let_go(shared.streams[k]) : hold(shared.streams[k]);
            is_held[k] = !is_held[k];
        }
        else if (piece->ptr != NULL) {
            empty_piece(piece, what < 3);
        }
        else if (!fill_piece(piece, shared.streams[k], &random)) {
            for (unsigned i = 0; i < N_STREAMS; i++) {
                if (is_held[i]) {
                    let_go(shared.streams[i]);
                    is_held[i] = false;
                }
            }
        }
        nrm__pool_check(pool);
    }
    for (int i = 0; i < N_PIECES; i++) {
        if (pieces[i].ptr != NULL) {
            empty_piece(&pieces[i], false);
        }
    }
    for (unsigned i = 0; i < N_STREAMS; i++) {
        if (is_held[i]) {
            let_go(shared.streams[i]);
        }
    }
    end_program();
}

static void
work(unsigned index, void *arg)
{
    struct piece pieces[4] = {{0}};
    uint64_t random = 77 + index + *(const uint64_t *)arg;
    nrm_stream *own = NULL;
    make_current(0);
    CHECK_OK(nrm_stream_per_thread(&own));
    nrm_stream *bare = bare_stream(new_handle());
    for (int turn = 0; turn < 300; turn++) {
        struct piece *piece = &pieces[check_random(&random) % 4];
        uint64_t which = check_random(&random) % 6;
        if (piece->ptr != NULL) {
            empty_piece(piece, which == 4);
        }
        else if (which == 5) { /* one that dies with its block */
            nrm_stream *brief = new_stream();
            if (fill_piece(piece, brief, &random)) {
                empty_piece(piece, false);
            }
            nrm_stream_release(brief);
        }
        else {
            (void)fill_piece(piece,
                             which < N_STREAMS ? shared.streams[which]
                             : which == 3      ? bare
                                               : own,
                             &random);
        }
        if (turn % 100 == 99) {
            CHECK_OK(nrm_resource_trim(pool, 0, NULL));
        }
    }
    for (int i = 0; i < 4; i++) {
        if (pieces[i].ptr != NULL) {
            empty_piece(&pieces[i], false);
        }
    }
    CHECK_EQ(cuda.cuStreamDestroy(handle_of(bare)), NRM_CUDA_SUCCESS);
    nrm_stream_release(bare);
    nrm_stream_release(own);
}

TEST_EACH(threads_streams_and_deaths_in_any_order, programs)
{
    start_program(row);
    check_threads(N_THREADS, work, (void *)&row->seed);
    end_program();
}

CHECK_MAIN
