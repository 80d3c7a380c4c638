/* What threads keep of memory that streams order, and of memory that nobody orders: device
   pools, and page-locked and managed ones with immediate reuse, on the simulated driver.

   A block is "kept" when it was freed on the short way. Where a test compares bytes, a
   stream that works on the block is held when it is freed, and what it reads when it goes
   on must be what was there. */
#include <string.h>

#include "base/bits.h"
#include "core/hooks.h"
#include "core/order.h"
#include "core/uses.h"
#include "device_pool.h"
#include "nrm/adaptors.h"
#include "nrm/options.h"
#include "workers.h"

/* Of a pool that has so many of them and gets no more, a thread keeps up to four. */
enum { N_BLOCKS = 64, N_WORKERS = 8 };

/* ---- the program ---- */

static nrm_resource *
pool_of(nrm_resource *upstream, size_t nbytes, nrm_reuse reuse)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    nrm_resource *mr = NULL;
    options.initial_nbytes = options.maximum_nbytes = nbytes;
    options.reuse = reuse;
    options.wait_limit_ns = 5 * 1000 * 1000;
    CHECK_OK(nrm_pool_create(upstream, &options, &mr));
    nrm_resource_release(upstream);
    return mr;
}

static nrm_resource *
source_of(nrm_kind kind)
{
    nrm_resource *mr = NULL;
    switch (kind) {
    case NRM_KIND_PINNED:
        CHECK_OK(nrm_pinned_create(NULL, &mr));
        break;
    case NRM_KIND_MANAGED:
        CHECK_OK(nrm_managed_create(NULL, &mr));
        break;
    default:
        CHECK_OK(nrm_device_create(NULL, &mr));
    }
    return mr;
}

/* Of device memory; 0 blocks: it grows. */
static void
start(size_t n_blocks)
{
    start_device(NULL, 1);
    pool = pool_of(source_of(NRM_KIND_DEVICE), n_blocks * BLOCK, NRM_REUSE_DEFAULT);
}

/* From here on the stream has a slot, so that what is freed on it is kept. */
static void
know(nrm_stream *stream)
{
    give(take(BLOCK, stream), stream);
}

/* A block of 7s, which work on the stream that waits for `aside` is going to read. */
static void *
put_in_use(nrm_stream *stream, const nrm_stream *aside)
{
    void *ptr = take(BLOCK, stream);
    use_behind(handle_of(stream), ptr, aside);
    return ptr;
}

/* The only block that is free was freed before it was read: whoever has it now overwrites it
   on a stream that must wait for `aside` (which `lets` the reader go). */
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

/* ---- the pair ---- */

static nrm_stream *
get_default(void)
{
    return nrm_stream_default();
}

static nrm_stream *
get_legacy(void)
{
    return nrm_stream_legacy();
}

static nrm_stream *
get_per_thread(void)
{
    nrm_stream *stream = NULL;
    CHECK_OK(nrm_stream_per_thread(&stream));
    return stream;
}

static const struct kind_of_stream {
    const char *name;
    nrm_stream *(*get)(void);
} streams[] = {
    {"created", new_stream},
    {"default", get_default},
    {"legacy", get_legacy},
    {"of the thread", get_per_thread},
};

TEST_EACH(a_stream_has_back_what_its_thread_kept_without_a_call, streams)
{
    start(0);
    nrm_stream *stream = row->get();
    know(stream);
    void *ptr = take(BLOCK, stream);
    uint64_t before = sim.call_count(NULL);
    for (int i = 0; i < 100; i++) {
        give(ptr, stream);
        CHECK_EQ(n_kept(pool), 1u);
        CHECK(take(BLOCK, stream) == ptr);
        CHECK_EQ(n_kept(pool), 0u);
    }
    CHECK_EQ(sim.call_count(NULL), before);
    give(ptr, stream);
    CHECK_STATUS(nrm_resource_deallocate(pool, ptr, 0, stream), NRM_NOT_OWNED);
    nrm_stream_release(stream);
    stop();
}

TEST(a_thread_keeps_blocks_of_several_sizes_and_streams_apart)
{
    start(0);
    nrm_stream *a = new_stream(), *b = new_stream();
    know(a);
    know(b);
    static const size_t sizes[] = {1, 256, 257, 1024, 65536, 300000};
    enum { N = sizeof sizes / sizeof *sizes };
    void *ptrs[2][N];
    for (int i = 0; i < N; i++) {
        ptrs[0][i] = take(sizes[i], a);
        ptrs[1][i] = take(sizes[i], b);
    }
    for (int i = 0; i < N; i++) {
        give(ptrs[0][i], a);
        give(ptrs[1][i], b);
    }
    CHECK_GT(n_kept(pool), (size_t)N);
    for (int i = N - 1; i >= 0; i--) {
        void *mine = take(sizes[i], a), *yours = take(sizes[i], b);
        for (int k = 0; k < N; k++) {
            CHECK(mine != ptrs[1][k]);
            CHECK(yours != ptrs[0][k]);
        }
        CHECK_ALIGNED(mine, 256);
        give(mine, a);
        give(yours, b);
    }
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

/* The host's frees are behind every stream, and it waits for none. */
/* Requests of about a size share blocks, in a pool that need not hold what exactly fits. */
TEST(a_block_serves_the_next_request_of_about_its_size)
{
    static const size_t sizes[] = {2100, 9000, 20000, 63000};
    start(0);
    nrm_stream *a = new_stream();
    know(a);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        void *ptr = take(sizes[i], a);
        give(ptr, a);
        CHECK(take(sizes[i] + sizes[i] / 100, a) == ptr);
        give(ptr, a);
    }
    nrm_stream_release(a);
    stop();
}

static const struct kept_size {
    const char *name;
    size_t nbytes;
} kept_sizes[] = {
    {"4 KiB", 4096}, {"9000 B", 9000}, {"20000 B", 20000}, {"64 KiB", 65536}};

/* Whoever of them comes first, and when the other has taken all of its own. */
TEST_EACH(blocks_of_one_size_are_kept_for_two_streams, kept_sizes)
{
    void *ptrs[2][2];
    start(0);
    nrm_stream *both[2] = {new_stream(), new_stream()};
    for (int s = 0; s < 2; s++) {
        know(both[s]);
        for (int i = 0; i < 2; i++) {
            ptrs[s][i] = take(row->nbytes, both[s]);
        }
    }
    for (int s = 0; s < 2; s++) {
        for (int i = 0; i < 2; i++) {
            give(ptrs[s][i], both[s]);
        }
    }
    CHECK_EQ(n_kept(pool), 4u);
    uint64_t before = sim.call_count(NULL);
    for (int round = 0; round < 4; round++) {
        nrm_stream *stream = both[round % 2];
        void *ptr = take(row->nbytes, stream);
        CHECK(ptr == ptrs[round % 2][1]);
        give(ptr, stream);
    }
    CHECK_EQ(sim.call_count(NULL), before);
    CHECK_EQ(n_kept(pool), 4u);
    for (int s = 0; s < 2; s++) {
        for (int i = 1; i >= 0; i--) {
            CHECK(take(row->nbytes, both[s]) == ptrs[s][i]);
        }
    }
    for (int s = 0; s < 2; s++) {
        give(ptrs[s][0], both[s]);
        give(ptrs[s][1], both[s]);
        nrm_stream_release(both[s]);
    }
    stop();
}

/* As when the driver has begun to check: what threads keep it would not be told of. */
TEST(nothing_is_kept_or_handed_out_while_it_is_forbidden)
{
    start(0);
    nrm_stream *stream = new_stream();
    know(stream);
    void *first = take(BLOCK, stream), *second = take(BLOCK, stream);
    give(first, stream);
    size_t kept = n_kept(pool);
    CHECK(kept != 0);
    atomic_store(&nrm__epoch_forbids, true);
    give(second, stream);
    CHECK_EQ(n_kept(pool), kept);
    CHECK(take(BLOCK, stream) == second);
    CHECK_EQ(n_kept(pool), kept);
    atomic_store(&nrm__epoch_forbids, false);
    give(second, stream);
    CHECK_EQ(n_kept(pool), kept + 1);
    nrm_stream_release(stream);
    stop();
}

TEST(nothing_is_kept_for_the_host)
{
    start(0);
    nrm_stream *a = new_stream();
    know(a);
    void *ptr = take(BLOCK, a);
    give(ptr, a);
    CHECK_EQ(n_kept(pool), 1u);
    void *other = take(BLOCK, NULL);
    CHECK(other != ptr);
    give(other, NULL);
    CHECK_EQ(n_kept(pool), 1u);
    nrm_stream_release(a);
    stop();
}

/* The graph may use what is freed meanwhile for as long as it lives. */
TEST(nothing_is_kept_or_handed_out_while_a_capture_is_announced)
{
    start(0);
    nrm_stream *a = new_stream();
    know(a);
    void *ptr = take(BLOCK, a), *other = take(BLOCK, a);
    give(ptr, a);
    CHECK_EQ(n_kept(pool), 1u);
    nrm_capture_begin();
    give(other, a);
    CHECK_EQ(n_kept(pool), 1u);
    other = take(BLOCK, a);
    CHECK(other != ptr);
    CHECK_EQ(n_kept(pool), 1u);
    nrm_capture_end();
    CHECK(take(BLOCK, a) == ptr);
    give(ptr, a);
    give(other, a);
    nrm_stream_release(a);
    stop();
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

/* The next stream has the address of the object and the handle of the one that is gone. */
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

/* ---- counters ---- */

TEST(kept_blocks_of_streams_are_counted_exactly)
{
    enum { N = 48, N_STEPS = 6000 };
    struct {
        void *ptr;
        size_t nbytes;
        nrm_stream *stream;
    } blocks[N] = {0};
    start(0);
    nrm_stream *own[] = {new_stream(), nrm_stream_default(), new_stream(), NULL};
    int64_t bytes = 0, count = 0, peak = 0, total = 0, n = 0;
    uint64_t random = 3;
    for (int step = 0; step < N_STEPS; step++) {
        size_t i = next_random(&random) % N;
        if (blocks[i].ptr != NULL) {
            CHECK_OK(nrm_resource_deallocate(pool, blocks[i].ptr, 0, blocks[i].stream));
            blocks[i].ptr = NULL;
            bytes -= (int64_t)blocks[i].nbytes;
            count--;
        }
        else {
            blocks[i].nbytes = 1 + next_random(&random) % 8 * 700;
            blocks[i].stream = own[next_random(&random) % 4];
            REQUIRE_OK(nrm_resource_allocate(pool, blocks[i].nbytes, 0,
                                             blocks[i].stream, &blocks[i].ptr));
            bytes += (int64_t)blocks[i].nbytes;
            total += (int64_t)blocks[i].nbytes;
            peak = bytes > peak ? bytes : peak;
            count++;
            n++;
        }
        if (step % 500 == 250) {
            CHECK_OK(nrm_resource_trim(pool, 0, NULL));
        }
        nrm_statistics statistics;
        REQUIRE_OK(nrm_resource_statistics(pool, &statistics));
        CHECK_EQ(statistics.current_bytes, bytes);
        CHECK_EQ(statistics.current_count, count);
        CHECK_EQ(statistics.peak_bytes, peak);
        CHECK_EQ(statistics.total_bytes, total);
        CHECK_EQ(statistics.total_count, n);
    }
    CHECK_GT(n_kept(pool), 0u);
    for (size_t i = 0; i < N; i++) {
        CHECK_OK(nrm_resource_deallocate(pool, blocks[i].ptr, 0, blocks[i].stream));
    }
    nrm_stream_release(own[0]);
    nrm_stream_release(own[2]);
    stop();
}

TEST(a_pool_under_adaptors_keeps_blocks_of_streams_too)
{
    start(0);
    nrm_stream *a = new_stream();
    nrm_resource *statistics = NULL, *limiting = NULL;
    nrm_limiting_options options = NRM_OPTIONS(nrm_limiting_options);
    options.allocation_limit = NRM__MIB;
    CHECK_OK(nrm_statistics_create(pool, &statistics));
    CHECK_OK(nrm_limiting_create(statistics, &options, &limiting));
    void *ptr = NULL, *again = NULL;
    for (int i = 0; i < 2; i++) {
        REQUIRE_OK(nrm_resource_allocate(limiting, BLOCK, 0, a, &ptr));
        CHECK_OK(nrm_resource_deallocate(limiting, ptr, 0, a));
    }
    CHECK_EQ(n_kept(pool), 1u);
    uint64_t before = sim.call_count(NULL);
    REQUIRE_OK(nrm_resource_allocate(limiting, BLOCK, 0, a, &again));
    CHECK(again == ptr);
    CHECK_EQ(live_nbytes(limiting), (int64_t)BLOCK);
    CHECK_EQ(live_nbytes(statistics), (int64_t)BLOCK);
    CHECK_OK(nrm_resource_deallocate(limiting, again, 0, a));
    CHECK_EQ(sim.call_count(NULL), before);
    CHECK_EQ(live_nbytes(limiting), 0);
    CHECK_EQ(live_nbytes(statistics), 0);
    nrm_resource_release(limiting);
    nrm_resource_release(statistics);
    nrm_stream_release(a);
    stop();
}

/* A thread has no room for all of them: some displace others. */
TEST(a_way_over_more_adaptors_than_slots_counts_right)
{
    enum { N = 30, N_PAIRS = 50 };
    nrm_resource *chain[N + 1], *source = host_source();
    chain[0] = pool_over(source, 0);
    for (int i = 0; i < N; i++) {
        CHECK_OK(nrm_statistics_create(chain[i], &chain[i + 1]));
    }
    for (int k = 0; k < N_PAIRS; k++) {
        for (int i = N; i > 0; i -= 7) {
            void *ptr = allocate(chain[i], 1000);
            CHECK_OK(nrm_resource_deallocate(chain[i], ptr, 0, NULL));
        }
    }
    for (int i = 0; i <= N; i++) {
        nrm_statistics statistics = {0};
        CHECK_OK(nrm_resource_statistics(chain[i], &statistics));
        CHECK_EQ(statistics.current_count, 0);
        CHECK_EQ(statistics.total_count,
                 (N - nrm__max((size_t)i, 2)) / 7 * N_PAIRS + N_PAIRS);
    }
    for (int i = N; i >= 0; i--) {
        nrm_resource_release(chain[i]);
    }
}

/* ---- immediate reuse ---- */

static const struct kind_case {
    const char *name;
    nrm_kind kind;
} kinds[] = {
    {"pinned", NRM_KIND_PINNED},
    {"managed", NRM_KIND_MANAGED},
    {"device", NRM_KIND_DEVICE},
};

static void
start_immediate(nrm_kind kind)
{
    start_device(NULL, 1);
    pool = pool_of(source_of(kind), 0, NRM_REUSE_IMMEDIATE);
}

/* With a stream and without one: nobody is ordered behind anybody. */
TEST_EACH(memory_with_immediate_reuse_is_kept_for_everybody, kinds)
{
    start_immediate(row->kind);
    nrm_stream *a = new_stream(), *b = new_stream();
    nrm_stream *const both[] = {a, NULL, b, nrm_stream_default(), NULL};
    give(take(BLOCK, NULL), NULL);
    void *ptr = take(BLOCK, a);
    uint64_t before = sim.call_count(NULL);
    for (int i = 0; i < 4; i++) {
        give(ptr, both[i]);
        CHECK_EQ(n_kept(pool), 1u);
        CHECK(take(BLOCK, both[i + 1]) == ptr);
        CHECK_EQ(n_kept(pool), 0u);
    }
    CHECK_EQ(sim.call_count(NULL), before);
    give(ptr, NULL);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

static const struct kind_case tracked[] = {
    {"pinned", NRM_KIND_PINNED},
    {"managed", NRM_KIND_MANAGED},
};

TEST_EACH(memory_that_is_tracked_is_not_kept, tracked)
{
    start_device(NULL, 1);
    pool = pool_of(source_of(row->kind), 0, NRM_REUSE_CONTEXT);
    for (int i = 0; i < 5; i++) {
        give(take(BLOCK, NULL), NULL);
        CHECK_EQ(n_kept(pool), 0u);
    }
    stop();
}

static nrm_stream *foreign;

static void
keep_on_foreign(void *unused)
{
    (void)unused;
    CHECK_OK(nrm_stream_per_thread(&foreign));
    for (int i = 0; i < 3; i++) {
        know(foreign);
    }
    CHECK_EQ(n_kept(pool), 1u);
}

static const struct pool_case {
    const char *name;
    nrm_kind kind;
    nrm_reuse reuse;
} pools[] = {
    {"pinned, immediate", NRM_KIND_PINNED, NRM_REUSE_IMMEDIATE},
    {"device, immediate", NRM_KIND_DEVICE, NRM_REUSE_IMMEDIATE},
    {"device, in stream order", NRM_KIND_DEVICE, NRM_REUSE_DEFAULT},
};

/* And freed on it here, a block is not kept as if this thread could order it. */
TEST_EACH(the_per_thread_stream_of_another_thread_goes_the_long_way, pools)
{
    struct worker worker;
    start_device(NULL, 1);
    pool = pool_of(source_of(row->kind), 0, row->reuse);
    nrm_stream *own = get_per_thread();
    for (int i = 0; i < 3; i++) {
        know(own);
    }
    worker_start(&worker);
    worker_run(&worker, keep_on_foreign, NULL);
    CHECK_EQ(n_kept(pool), 1u);
    void *ptr = take(2 * BLOCK, own);
    give(ptr, foreign);
    CHECK_EQ(n_kept(pool), 1u);
    CHECK_STATUS(nrm_resource_allocate(pool, 2 * BLOCK, 0, foreign, &ptr),
                 NRM_INVALID_VALUE);
    CHECK_STATUS(nrm_resource_allocate(pool, BLOCK, 0, foreign, &ptr),
                 NRM_INVALID_VALUE);
    worker_end(&worker);
    nrm_stream_release(foreign);
    nrm_stream_release(own);
    stop();
}

/* The pool registers its segment again before it hands out a block of it. */
TEST(what_is_kept_from_before_a_reset_is_locked_again_before_it_is_used)
{
    start_immediate(NRM_KIND_PINNED);
    nrm_CUcontext context;
    give(take(BLOCK, NULL), NULL);
    void *ptr = take(BLOCK, NULL);
    give(ptr, NULL);
    CHECK_EQ(n_kept(pool), 1u);
    CHECK_EQ(cuda.cuMemFree(seen), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuDevicePrimaryCtxReset(0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuDevicePrimaryCtxRetain(&context, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuCtxSetCurrent(context), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemAlloc(&seen, BLOCK), NRM_CUDA_SUCCESS);
    uint64_t before = sim.call_count("cuMemHostRegister");
    nrm__cuda_check_generations(); /* somebody notices the reset */
    void *again = take(BLOCK, NULL);
    unsigned type = 0;
    CHECK_EQ(cuda.cuPointerGetAttribute(&type, NRM_CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                        (nrm_CUdeviceptr)(uintptr_t)again),
             NRM_CUDA_SUCCESS);
    CHECK_EQ(sim.call_count("cuMemHostRegister"), before + 1);
    give(again, NULL);
    stop();
}

static void
allocate_in_child(void)
{
    void *ptr = NULL;
    CHECK_STATUS(nrm_resource_allocate(pool, BLOCK, 0, NULL, &ptr),
                 NRM_CUDA_UNAVAILABLE);
}

TEST(a_child_gets_nothing_of_what_its_parent_kept)
{
    start_immediate(NRM_KIND_PINNED);
    give(take(BLOCK, NULL), NULL);
    give(take(BLOCK, NULL), NULL);
    CHECK_EQ(n_kept(pool), 1u);
    CHECK_EQ(in_child(allocate_in_child), 0);
    stop();
}

TEST(nothing_that_is_kept_is_handed_out_once_a_device_is_lost)
{
    start_immediate(NRM_KIND_PINNED);
    nrm_stream *a = new_stream();
    void *ptr = NULL;
    give(take(BLOCK, NULL), NULL);
    give(take(BLOCK, NULL), NULL);
    CHECK_EQ(n_kept(pool), 1u);
    CHECK_EQ(sim.set_sticky(0, NRM_CUDA_ERROR_ILLEGAL_ADDRESS), 0);
    (void)nrm__epoch_close();
    (void)nrm__epoch_poll();
    CHECK(nrm__epoch_is_lost());
    CHECK_STATUS(nrm_resource_allocate(pool, BLOCK, 0, NULL, &ptr), NRM_DEVICE_LOST);
    CHECK_EQ(sim.set_sticky(0, 0), 0);
    nrm__epoch_forget_contexts();
    give(take(BLOCK, NULL), NULL);
    nrm_stream_release(a);
    stop();
}

CHECK_MAIN
