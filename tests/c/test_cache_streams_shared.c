/* What a thread keeps of memory that streams order, when others want it: other streams,
   other threads, a trim, a full pool. Blocks and bytes are as in
   test_cache_streams.c. */
#include "base/bits.h"
#include "core/order.h"
#include "device_pool.h"
#include "nrm/options.h"
#include "stream_pool.h"
#include "workers.h"

/* Of a pool that has so many of them and gets no more, a thread keeps up to four. */
enum { N_BLOCKS = 64, N_WORKERS = 8 };

/* ---- a block in use ---- */

/* A block of 7s, which work on the stream that waits for `aside` is going to read. */
static void *
put_in_use(nrm_stream *stream, const nrm_stream *aside)
{
    void *ptr = take(BLOCK, stream);
    use_behind(handle_of(stream), ptr, aside);
    return ptr;
}

/* The only block that is free was freed before it was read: whoever has it now
   overwrites it on a stream that must wait for `aside` (which `lets` the reader go). */
static void
check_waits(void *used, nrm_stream *stream, const nrm_stream *aside)
{
    void *ptr = take(BLOCK, stream);
    CHECK(ptr == used);
    write_on(stream, ptr, 9);
    let_run();
    let_go(aside);
    CHECK(has_seen(0, 7));
    give(ptr, stream);
}

/* ---- others ---- */

TEST(another_stream_waits_for_what_a_thread_kept)
{
    start(N_BLOCKS);
    nrm_stream *a = new_stream(), *b = new_stream(), *aside = new_stream();
    know(a);
    void *rest = take((N_BLOCKS - 1) * BLOCK, a);
    void *ptr = put_in_use(a, aside);
    give(ptr, a);
    CHECK_EQ(n_kept(pool), 1u);
    check_waits(ptr, b, aside);
    CHECK_EQ(sim.call_count("cuStreamWaitEvent"), 2u); /* one is the test's own */
    give(rest, a);
    nrm_stream_release(a);
    nrm_stream_release(b);
    nrm_stream_release(aside);
    stop();
}

/* Of another stream, and of another size: it need not fit to be a part of what does. */
TEST(what_a_thread_keeps_is_looked_at_before_the_pool_grows)
{
    start(0);
    nrm_stream *a = new_stream(), *b = new_stream();
    know(a);
    void *ptrs[] = {take(BLOCK, a), take(BLOCK, a)};
    int64_t nbytes = reserved_nbytes(pool);
    void *rest = take((size_t)nbytes - 2 * BLOCK, a);
    give(ptrs[0], a);
    give(ptrs[1], a);
    CHECK_EQ(n_kept(pool), 2u);
    void *ptr = take(2 * BLOCK, b);
    CHECK_EQ(reserved_nbytes(pool), nbytes);
    CHECK_EQ(n_kept(pool), 0u);
    give(ptr, b);
    give(rest, a);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

/* What a thread does with a stream. */
struct part {
    nrm_stream *stream, *aside;
    void *ptr;
    size_t n_kept;
};

static void
take_there(void *argument)
{
    struct part *part = argument;
    part->ptr = take(BLOCK, part->stream);
}

static void
give_there(void *argument)
{
    struct part *part = argument;
    give(part->ptr, part->stream);
    part->n_kept = n_kept(pool);
}

/* Frees a block that is in use, and keeps it. */
static void
keep_used_there(void *argument)
{
    struct part *part = argument;
    make_current(0);
    know(part->stream);
    know(part->stream);
    part->ptr = put_in_use(part->stream, part->aside);
    give_there(part);
    cuda.cuCtxSetCurrent(NULL);
}

static void
run(struct worker *worker, bool in_other_thread, void (*part)(void *), void *argument)
{
    if (in_other_thread) {
        worker_run(worker, part, argument);
    }
    else {
        part(argument);
    }
}

/* Needs no wait: it is the stream that freed it. */
TEST(another_thread_gets_it_on_the_same_stream_when_the_pool_is_full)
{
    struct worker worker;
    start(N_BLOCKS);
    struct part part = {.stream = new_stream()};
    nrm_stream *aside = new_stream();
    worker_start(&worker);
    know(part.stream);
    void *rest = take((N_BLOCKS - 1) * BLOCK, part.stream);
    void *ptr = put_in_use(part.stream, aside);
    give(ptr, part.stream);
    CHECK_EQ(n_kept(pool), 1u);
    worker_run(&worker, take_there, &part);
    CHECK(part.ptr == ptr);
    write_on(part.stream, ptr, 9);
    CHECK_EQ(sim.call_count("cuStreamWaitEvent"), 1u); /* the test's own */
    let_go(aside);
    CHECK(has_seen(0, 7));
    worker_run(&worker, give_there, &part);
    give(rest, part.stream);
    worker_end(&worker);
    nrm_stream_release(part.stream);
    nrm_stream_release(aside);
    stop();
}

static const struct ending {
    const char *name;
    bool in_other_thread, trims;
} endings[] = {
    {"kept by this thread", false, false},
    {"kept by another", true, false},
    {"kept by this thread, trimmed", false, true},
    {"kept by another, trimmed", true, true},
};

/* The next stream has the address of the object and the handle of the one that is
   gone. */
TEST_EACH(a_stream_that_ends_leaves_its_kept_blocks_behind_its_last_event, endings)
{
    struct worker worker;
    start(N_BLOCKS);
    struct part part = {.stream = new_stream(), .aside = new_stream()};
    nrm_CUstream handle = handle_of(part.stream);
    uintptr_t address = (uintptr_t)part.stream;
    worker_start(&worker);
    void *rest = take((N_BLOCKS - 1) * BLOCK, NULL);
    run(&worker, row->in_other_thread, keep_used_there, &part);
    CHECK_EQ(part.n_kept, 1u);
    make_current(0);
    nrm_stream_release(part.stream);
    nrm_stream *next = new_stream();
    CHECK_EQ((uintptr_t)next, address);
    CHECK(handle_of(next) == handle);
    if (row->trims) {
        CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    }
    check_waits(part.ptr, next, part.aside);
    CHECK_EQ(sim.call_count("cuCtxRecordEvent"), 0u); /* its own event says enough */
    give(rest, next);
    worker_end(&worker);
    nrm_stream_release(next);
    nrm_stream_release(part.aside);
    stop();
}

TEST(more_streams_than_sets_leave_room_for_the_next)
{
    enum { N = 200 };
    start(0);
    give(take(512 * NRM__MIB, NULL),
         NULL); /* or a pool that grows would make the room */
    for (int i = 0; i < N; i++) {
        nrm_stream *stream = new_stream();
        for (int k = 0; k < 3; k++) {
            give(take(NRM__MIB, stream), stream);
        }
        void *ptr = take(NRM__MIB, stream);
        size_t n = n_kept(pool);
        give(ptr, stream);
        CHECK_EQ(n_kept(pool), n + 1);
        CHECK(take(NRM__MIB, stream) == ptr);
        give(ptr, stream);
        nrm_stream_release(stream);
    }
    CHECK_LE(reserved_nbytes(pool), 512 * (int64_t)NRM__MIB);
    stop();
}

/* ---- threads ---- */

static void
keep_many_there(void *argument)
{
    static const size_t sizes[] = {256, 4096, 65536, 1000000};
    nrm_stream *stream = argument;
    void *ptrs[4][4];
    know(stream);
    for (int i = 0; i < 16; i++) {
        ptrs[i / 4][i % 4] = take(sizes[i / 4], stream);
    }
    for (int i = 0; i < 16; i++) {
        give(ptrs[i / 4][i % 4], stream);
    }
    CHECK_GT(n_kept(pool), 10u);
}

struct crew {
    struct worker workers[N_WORKERS];
    nrm_stream *streams[N_WORKERS];
};

static void
start_crew(struct crew *crew)
{
    for (int i = 0; i < N_WORKERS; i++) {
        crew->streams[i] = new_stream();
        worker_start(&crew->workers[i]);
        worker_run(&crew->workers[i], keep_many_there, crew->streams[i]);
    }
}

static void
end_crew(struct crew *crew)
{
    for (int i = 0; i < N_WORKERS; i++) {
        worker_end(&crew->workers[i]);
        nrm_stream_release(crew->streams[i]);
    }
}

TEST(a_trim_takes_what_idle_threads_keep_for_their_streams)
{
    struct crew crew;
    CHECK_OK(nrm_option_set(NRM_OPT_SEGMENT_NBYTES, "2 MiB"));
    start(0);
    CHECK_OK(nrm_option_set(NRM_OPT_SEGMENT_NBYTES, "64 MiB"));
    start_crew(&crew);
    nrm_stream *own = new_stream();
    void *ptr = take(3 * NRM__MIB, own);
    CHECK_GT(reserved_nbytes(pool), 20 * (int64_t)NRM__MIB);
    CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    CHECK_GE(reserved_nbytes(pool), live_nbytes(pool));
    CHECK_LT(reserved_nbytes(pool), live_nbytes(pool) + 2 * (int64_t)NRM__MIB);
    give(ptr, own);
    CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    CHECK_EQ(reserved_nbytes(pool), 0);
    for (int i = 0; i < N_WORKERS; i++) { /* and again */
        worker_run(&crew.workers[i], keep_many_there, crew.streams[i]);
    }
    end_crew(&crew);
    nrm_stream_release(own);
    stop();
}

TEST(a_trim_waits_for_what_a_busy_stream_freed_in_another_thread)
{
    struct worker worker;
    start(N_BLOCKS);
    struct part part = {.stream = new_stream(), .aside = new_stream()};
    worker_start(&worker);
    void *rest = take((N_BLOCKS - 1) * BLOCK, NULL);
    worker_run(&worker, keep_used_there, &part);
    CHECK_EQ(part.n_kept, 1u);
    give(rest, NULL);
    CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    CHECK_EQ(reserved_nbytes(pool), (int64_t)(N_BLOCKS * BLOCK));
    let_go(part.aside);
    CHECK(has_seen(0, 7));
    CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    CHECK_EQ(reserved_nbytes(pool), 0);
    worker_end(&worker);
    nrm_stream_release(part.stream);
    nrm_stream_release(part.aside);
    stop();
}

TEST(a_full_pool_hands_out_what_all_threads_keep)
{
    struct crew crew;
    start(0);
    nrm_resource_release(pool);
    pool = pool_of(source_of(NRM_KIND_DEVICE), 64 * NRM__MIB, NRM_REUSE_DEFAULT);
    start_crew(&crew);
    nrm_stream *own = new_stream();
    void *ptr = take(64 * NRM__MIB, own);
    CHECK(ptr != NULL);
    give(ptr, own);
    end_crew(&crew);
    nrm_stream_release(own);
    stop();
}

TEST(a_thread_that_ends_leaves_its_blocks_behind_the_stream)
{
    struct worker worker;
    start(N_BLOCKS);
    struct part part = {.stream = new_stream(), .aside = new_stream()};
    nrm_stream *b = new_stream();
    void *rest = take((N_BLOCKS - 1) * BLOCK, NULL);
    worker_start(&worker);
    worker_run(&worker, keep_used_there, &part);
    CHECK_EQ(part.n_kept, 1u);
    worker_end(&worker);
    check_waits(part.ptr, b, part.aside);
    CHECK_EQ(sim.call_count("cuCtxRecordEvent"), 0u);
    give(rest, b);
    nrm_stream_release(part.stream);
    nrm_stream_release(part.aside);
    nrm_stream_release(b);
    stop();
}

static void
keep_on_own_there(void *argument)
{
    struct part *part = argument;
    CHECK_OK(nrm_stream_per_thread(&part->stream));
    keep_used_there(part);
}

static const struct drain {
    const char *name;
    bool ends_stream, trims, ends_thread;
} drains[] = {
    {"found by a full pool", false, false, false},
    {"trimmed", false, true, false},
    {"its object gone", true, false, false},
    {"its object gone, trimmed", true, true, false},
    {"its thread gone", false, false, true},
    {"both gone", true, true, true},
};

/* The handle means another stream here: the driver is never asked about it. */
TEST_EACH(what_is_kept_for_a_threads_own_stream_is_behind_its_context_for_others,
          drains)
{
    struct worker worker;
    start(N_BLOCKS);
    struct part part = {.aside = new_stream()};
    nrm_stream *b = new_stream();
    void *rest = take((N_BLOCKS - 1) * BLOCK, NULL);
    worker_start(&worker);
    worker_run(&worker, keep_on_own_there, &part);
    CHECK_EQ(part.n_kept, 1u);
    if (row->ends_thread) {
        worker_end(&worker);
    }
    if (row->ends_stream) {
        nrm_stream_release(part.stream);
    }
    uint64_t before = sim.call_count("cuEventRecord");
    if (row->trims) {
        CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    }
    CHECK_EQ(sim.call_count("cuEventRecord"), before);
    for (int i = 0; i < 4;
         i++) { /* streams that end look after those that did before */
        nrm_stream *other = new_stream();
        CHECK(nrm__order_stamp(other, 0).stream != 0);
        nrm_stream_release(other);
    }
    before = sim.call_count("cuEventRecord");
    check_waits(part.ptr, b, part.aside);
    CHECK_EQ(sim.call_count("cuEventRecord"), before);
    give(rest, b);
    if (!row->ends_thread) {
        worker_end(&worker);
    }
    if (!row->ends_stream) {
        nrm_stream_release(part.stream);
    }
    nrm_stream_release(part.aside);
    nrm_stream_release(b);
    stop();
}

CHECK_MAIN
