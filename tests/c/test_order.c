/* Stream order on the simulated driver: the schedules by which memory was handed out too
   early, in pools before this one and in the model of this one, as programs that compare
   bytes.

   In each a stream that works on a block is held, the block is freed, and another stream
   takes it and overwrites it. What the first stream reads when it goes on must be what was
   there. */
#include "core/order.h"

#include <pthread.h>
#include <sched.h>

#include "core/hooks.h"
#include "cuda/context.h"
#include "streams.h"

#define BLOCK ((size_t)4096)

enum { N_BLOCKS = 8, N_THREADS = 3, N_STREAMS = 3 };

/* A block of device memory as a pool sees it. */
struct block {
    nrm_CUdeviceptr ptr;
    struct nrm__order_tag tag;
};

static struct block blocks[N_BLOCKS];
static nrm_CUdeviceptr seen; /* what a kernel has read, a BLOCK for each */

/* ---- the program ---- */

/* The blocks hold the value 7 and are done. */
static void
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
static void
read_on(const nrm_stream *stream, int i)
{
    CHECK_EQ(cuda.cuMemcpyAsync(seen + (size_t)i * BLOCK, blocks[i].ptr, BLOCK,
                                handle_of(stream)),
             NRM_CUDA_SUCCESS);
}

/* What the next owner does with it. */
static void
overwrite_on(const nrm_stream *stream, int i)
{
    CHECK_EQ(cuda.cuMemsetD8Async(blocks[i].ptr, 9, BLOCK, handle_of(stream)),
             NRM_CUDA_SUCCESS);
}

static void
free_on(nrm_stream *stream, int i)
{
    blocks[i].tag = nrm__order_stamp(stream, 0);
}

/* As a pool takes a block for a stream: without a wait if it may. */
static void
take(int i, nrm_stream *stream)
{
    if (!nrm__order_is_free(blocks[i].tag, stream, 0)) {
        CHECK_OK(nrm__order_adopt(blocks[i].tag, stream, 0));
    }
}

static bool
is_done(int i)
{
    return nrm__order_is_done(blocks[i].tag);
}

static bool
poll(int i)
{
    return nrm__order_poll(blocks[i].tag);
}

/* Whether the kernel that read block i saw `value` in all of it. */
static bool
has_seen(int i, unsigned char value)
{
    unsigned char bytes[BLOCK];
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemcpyDtoH(bytes, seen + (size_t)i * BLOCK, BLOCK),
             NRM_CUDA_SUCCESS);
    for (size_t k = 0; k < BLOCK; k++) {
        if (bytes[k] != value) {
            NOTE("byte %zu of block %d is %d", k, i, bytes[k]);
            return false;
        }
    }
    return true;
}

static void
stop(void)
{
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    cuda.cuCtxSetCurrent(NULL);
    simulator_check_faults();
}

/* ---- one stream and another ---- */

TEST(a_stream_takes_its_own_block_without_a_call)
{
    start(NULL);
    nrm_stream *a = new_stream();
    hold(a);
    read_on(a, 0);
    uint64_t before = sim.call_count(NULL);
    free_on(a, 0);
    CHECK(!is_done(0));
    CHECK(nrm__order_is_free(blocks[0].tag, a, 0));
    take(0, a);
    CHECK_EQ(sim.call_count(NULL), before);
    overwrite_on(a, 0);
    let_go(a);
    CHECK(has_seen(0, 7));
    nrm_stream_release(a);
    stop();
}

TEST(another_stream_waits)
{
    start(NULL);
    nrm_stream *a = new_stream(), *b = new_stream();
    hold(a);
    read_on(a, 0);
    free_on(a, 0);
    CHECK(!nrm__order_is_free(blocks[0].tag, b, 0));
    take(0, b);
    overwrite_on(b, 0);
    let_run();
    let_go(a);
    CHECK(has_seen(0, 7));
    CHECK_EQ(sim.call_count("cuEventRecord"), 1u);
    CHECK_EQ(sim.call_count("cuCtxRecordEvent"), 0u);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

TEST(the_host_takes_only_what_is_done)
{
    start(NULL);
    nrm_stream *a = new_stream();
    hold(a);
    read_on(a, 0);
    free_on(a, 0);
    CHECK(!nrm__order_is_free(blocks[0].tag, NULL, 0));
    CHECK_EQ(nrm__order_adopt(blocks[0].tag, NULL, 0), NRM_INVALID_VALUE);
    CHECK(!poll(0));
    let_go(a);
    CHECK(has_seen(0, 7));
    CHECK(poll(0));
    CHECK(nrm__order_is_free(blocks[0].tag, NULL, 0));
    CHECK_OK(nrm__order_adopt(blocks[0].tag, NULL, 0));
    nrm_stream_release(a);
    stop();
}

TEST(what_the_host_frees_is_ordered_by_the_contexts)
{
    start(NULL);
    nrm_stream *a = new_stream(), *b = new_stream();
    hold(a);
    read_on(a, 0);
    blocks[0].tag = nrm__order_stamp(NULL, 0);
    CHECK(!nrm__order_is_free(blocks[0].tag, a, 0));
    CHECK(!poll(0));
    take(0, b);
    overwrite_on(b, 0);
    let_run();
    let_go(a);
    CHECK(has_seen(0, 7));
    CHECK(poll(0));
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

/* ---- the schedules of the model ---- */

/* RMM 2489: B has recorded before, takes over what A has freed, and C looks at B's event. */
TEST(what_was_merged_into_a_list_after_its_event_is_not_covered_by_it)
{
    start(NULL);
    nrm_stream *a = new_stream(), *b = new_stream(), *c = new_stream();
    read_on(b, 1);
    free_on(b, 1);
    take(1, c); /* B's event */
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    hold(a);
    read_on(a, 0);
    free_on(a, 0);
    take(0, b);    /* B waits for A ... */
    free_on(b, 0); /* ... and the block joins B's list */
    (void)poll(1);
    CHECK(is_done(1));
    CHECK(!is_done(0));
    take(0, c);
    overwrite_on(c, 0);
    let_run();
    let_go(a);
    CHECK(has_seen(0, 7));
    nrm_stream_release(a);
    nrm_stream_release(b);
    nrm_stream_release(c);
    stop();
}

/* The shortest schedule that the model finds for it: A's own event is the old one. */
TEST(what_comes_back_after_a_wait_starts_a_new_count)
{
    start(NULL);
    nrm_stream *a = new_stream(), *b = new_stream(), *c = new_stream();
    free_on(a, 0);
    take(0, b); /* records on A */
    hold(b);
    read_on(b, 0);
    free_on(b, 0);
    take(0, a);    /* records on B, A waits */
    free_on(a, 0); /* joins A's list */
    (void)poll(0);
    CHECK(!is_done(0));
    take(0, c);
    overwrite_on(c, 0);
    let_run();
    let_go(b);
    CHECK(has_seen(0, 7));
    nrm_stream_release(a);
    nrm_stream_release(b);
    nrm_stream_release(c);
    stop();
}

TEST(what_is_freed_after_a_record_is_not_covered_by_it)
{
    start(NULL);
    nrm_stream *a = new_stream(), *b = new_stream();
    free_on(a, 0);
    take(0, b); /* records on A, which is idle */
    hold(a);
    read_on(a, 1);
    free_on(a, 1);
    (void)poll(0);
    CHECK(!is_done(1));
    take(1, b);
    overwrite_on(b, 1);
    let_run();
    let_go(a);
    CHECK(has_seen(1, 7));
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

/* ---- between a call of the driver and what is made of its answer ---- */

/* The driver's table is filled once and read by everybody; here one entry is changed. */
static nrm_cuStreamQuery_fn *real_query;
static nrm_cuEventRecord_fn *real_record;
static void (*meanwhile)(void);

static void
run_meanwhile(void)
{
    void (*once)(void) = meanwhile;
    meanwhile = NULL;
    if (once != NULL) {
        once();
    }
}

static nrm_CUresult
query_then(nrm_CUstream stream)
{
    nrm_CUresult code = real_query(stream);
    run_meanwhile();
    return code;
}

static nrm_CUresult
record_then(nrm_CUevent event, nrm_CUstream stream)
{
    nrm_CUresult code = real_record(event, stream);
    run_meanwhile();
    return code;
}

/* Lets another thread do `what` right after the next query or record. */
static void
interleave(void (*what)(void))
{
    struct nrm__driver *driver = (struct nrm__driver *)nrm__cuda_driver();
    real_query = driver->cuStreamQuery;
    real_record = driver->cuEventRecord;
    driver->cuStreamQuery = query_then;
    driver->cuEventRecord = record_then;
    meanwhile = what;
}

static void
interleave_no_more(void)
{
    struct nrm__driver *driver = (struct nrm__driver *)nrm__cuda_driver();
    driver->cuStreamQuery = real_query;
    driver->cuEventRecord = real_record;
    CHECK(meanwhile == NULL);
}

static nrm_stream *late_stream;

static void
use_and_free_late(void)
{
    hold(late_stream);
    read_on(late_stream, 1);
    free_on(late_stream, 1);
}

static void
check_late_block(void)
{
    nrm_stream *b = new_stream();
    (void)poll(0);
    CHECK(!is_done(1));
    take(1, b);
    overwrite_on(b, 1);
    let_run();
    let_go(late_stream);
    CHECK(has_seen(1, 7));
    nrm_stream_release(b);
    nrm_stream_release(late_stream);
    stop();
}

TEST(what_is_freed_between_a_query_and_its_result_is_not_done)
{
    start(NULL);
    late_stream = new_stream();
    free_on(late_stream, 0);
    interleave(use_and_free_late);
    CHECK(poll(0)); /* the stream was idle when it was asked */
    interleave_no_more();
    check_late_block();
}

TEST(what_is_freed_between_a_record_and_its_result_is_not_covered)
{
    start(NULL);
    late_stream = new_stream();
    nrm_stream *b = new_stream();
    free_on(late_stream, 0);
    interleave(use_and_free_late);
    take(0, b);
    interleave_no_more();
    nrm_stream_release(b);
    check_late_block();
}

/* The event of an earlier record arrives after that of a later one. */
static void
record_again(void)
{
    nrm_stream *c = new_stream();
    read_on(late_stream, 1);
    free_on(late_stream, 1);
    take(1, c);
    nrm_stream_release(c);
}

TEST(a_record_that_is_stored_late_does_not_replace_a_later_one)
{
    start(NULL);
    late_stream = new_stream();
    nrm_stream *b = new_stream();
    hold(late_stream);
    free_on(late_stream, 0);
    interleave(record_again);
    take(0, b);
    interleave_no_more();
    uint64_t records = sim.call_count("cuEventRecord");
    take(1, b);
    CHECK_EQ(sim.call_count("cuEventRecord"), records); /* it is still there */
    overwrite_on(b, 1);
    let_run();
    let_go(late_stream);
    CHECK(has_seen(1, 7));
    CHECK(poll(0));
    CHECK(poll(1));
    nrm_stream_release(b);
    nrm_stream_release(late_stream);
    stop();
}

/* ---- merging ---- */

TEST(neighbours_of_one_stream_merge_under_the_later_count)
{
    struct nrm__order_tag merged;
    start(NULL);
    nrm_stream *a = new_stream(), *b = new_stream();
    free_on(a, 0);
    take(0, b); /* A's event: a new count */
    free_on(b, 2);
    hold(a);
    read_on(a, 1);
    free_on(a, 1);
    blocks[0].tag = nrm__order_stamp(a, 0);
    CHECK_OK(nrm__order_adopt(blocks[0].tag, b, 0)); /* another one */
    struct nrm__order_tag late = nrm__order_stamp(a, 0);
    CHECK_GT(late.count, blocks[1].tag.count);
    CHECK(nrm__order_merge(blocks[1].tag, late, &merged));
    CHECK_EQ(merged.count, late.count);
    CHECK(nrm__order_merge(late, blocks[1].tag, &merged));
    CHECK_EQ(merged.count, late.count);
    CHECK(nrm__order_is_free(merged, a, 0));
    let_go(a);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

/* The earlier count is done, the later one is not. */
TEST(a_merged_block_is_not_done_with_its_older_half)
{
    struct nrm__order_tag merged;
    start(NULL);
    nrm_stream *a = new_stream(), *b = new_stream();
    hold(a);
    read_on(a, 0);
    free_on(a, 0);
    CHECK(!poll(0)); /* recorded */
    read_on(a, 1);
    free_on(a, 1);
    CHECK(nrm__order_merge(blocks[0].tag, blocks[1].tag, &merged));
    let_go(a);
    CHECK(has_seen(0, 7));
    hold(a);
    read_on(a, 1);
    struct nrm__order_tag late = nrm__order_stamp(a, 0);
    CHECK(nrm__order_merge(merged, late, &merged));
    (void)poll(0);
    CHECK(is_done(0));
    blocks[1].tag = merged;
    take(1, b);
    overwrite_on(b, 1);
    let_run();
    let_go(a);
    CHECK(has_seen(1, 7));
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

TEST(neighbours_of_two_streams_do_not_merge_until_one_is_done)
{
    struct nrm__order_tag merged;
    start(NULL);
    nrm_stream *a = new_stream(), *b = new_stream();
    free_on(a, 0);
    hold(b);
    read_on(b, 1);
    free_on(b, 1);
    CHECK(!nrm__order_merge(blocks[0].tag, blocks[1].tag, &merged));
    CHECK(!nrm__order_merge(blocks[1].tag, blocks[0].tag, &merged));
    CHECK(poll(0));
    CHECK(nrm__order_merge(blocks[0].tag, blocks[1].tag, &merged));
    CHECK(!nrm__order_is_free(merged, a, 0));
    CHECK(nrm__order_is_free(merged, b, 0));
    CHECK(nrm__order_merge(blocks[1].tag, blocks[0].tag, &merged));
    CHECK(!nrm__order_is_free(merged, a, 0));
    let_go(b);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    CHECK(poll(1));
    CHECK(nrm__order_merge(blocks[0].tag, blocks[1].tag, &merged));
    CHECK_EQ(merged.stream, 0u);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

/* ---- streams that go away ---- */

/* RMM 510. */
TEST(a_destroyed_stream_leaves_its_order_behind)
{
    start(NULL);
    nrm_stream *a = new_stream();
    nrm_CUstream handle = handle_of(a);
    nrm_stream *aside = new_stream();
    hold(aside);
    read_on(aside, 1);
    nrm_CUevent event = NULL;
    CHECK_EQ(cuda.cuEventCreate(&event, NRM_CU_EVENT_DISABLE_TIMING), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuEventRecord(event, handle_of(aside)), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamWaitEvent(handle, event, 0), NRM_CUDA_SUCCESS);
    read_on(a, 0);
    free_on(a, 0);
    nrm_stream_release(a); /* destroys it, with work pending behind `aside` */
    nrm_stream *next = new_stream();
    CHECK_EQ(handle_of(next), handle);
    CHECK(!nrm__order_is_free(blocks[0].tag, next, 0));
    CHECK(!poll(0));
    take(0, next);
    overwrite_on(next, 0);
    let_run();
    let_go(aside);
    CHECK(has_seen(0, 7));
    CHECK(poll(0));
    CHECK_EQ(sim.call_count("cuCtxRecordEvent"), 0u);
    CHECK_EQ(cuda.cuEventDestroy(event), NRM_CUDA_SUCCESS);
    nrm_stream_release(next);
    nrm_stream_release(aside);
    stop();
}

TEST(a_slot_is_used_again_only_when_it_is_done)
{
    struct nrm__order_counts before, counts;
    start(NULL);
    nrm_stream *a = new_stream();
    nrm__order_counts(&before);
    for (int i = 0; i < 200; i++) {
        nrm_stream *b = new_stream();
        free_on(b, 0);
        struct nrm__order_tag old = blocks[0].tag;
        nrm_stream_release(b);
        CHECK(nrm__order_poll(old));
    }
    nrm__order_counts(&counts);
    CHECK_LE(counts.slots, before.slots + 32);
    CHECK_EQ(counts.in_use, before.in_use);
    CHECK_EQ(counts.retired, before.retired);
    CHECK_EQ(counts.events, before.events);
    nrm_stream_release(a);
    stop();
}

TEST(slots_of_streams_that_nobody_asks_about_come_back_too)
{
    struct nrm__order_counts before, counts;
    start(NULL);
    nrm__order_counts(&before);
    for (int i = 0; i < 500; i++) {
        nrm_stream *b = new_stream();
        free_on(b, 0);
        nrm_stream_release(b);
    }
    nrm__order_counts(&counts);
    CHECK_LE(counts.retired, before.retired + 4);
    CHECK_LE(counts.slots, before.slots + 32);
    stop();
}

/* ---- bare handles ---- */

TEST(a_bare_handle_is_recorded_on_in_the_free_and_never_later)
{
    start(NULL);
    nrm_CUstream handle = new_handle();
    nrm_stream *bare = bare_stream(handle);
    nrm_stream *aside = new_stream();
    nrm_CUevent event = NULL;
    hold(aside);
    read_on(aside, 1);
    CHECK_EQ(cuda.cuEventCreate(&event, NRM_CU_EVENT_DISABLE_TIMING), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuEventRecord(event, handle_of(aside)), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamWaitEvent(handle, event, 0), NRM_CUDA_SUCCESS);
    read_on(bare, 0);
    uint64_t records = sim.call_count("cuEventRecord");
    free_on(bare, 0);
    CHECK_EQ(sim.call_count("cuEventRecord"), records + 1);
    nrm_stream_release(bare);
    CHECK_EQ(cuda.cuStreamDestroy(handle), NRM_CUDA_SUCCESS);
    nrm_CUstream next_handle = new_handle();
    CHECK_EQ(next_handle, handle);
    nrm_stream *next = bare_stream(next_handle);
    CHECK(!nrm__order_is_free(blocks[0].tag, next, 0));
    CHECK(!poll(0));
    take(0, next);
    CHECK_EQ(sim.call_count("cuEventRecord"), records + 1);
    overwrite_on(next, 0);
    let_run();
    let_go(aside);
    CHECK(has_seen(0, 7));
    CHECK(poll(0));
    nrm_stream_release(next);
    CHECK_EQ(cuda.cuStreamDestroy(next_handle), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuEventDestroy(event), NRM_CUDA_SUCCESS);
    nrm_stream_release(aside);
    stop();
}

/* As a thread keeps it, and lets go of it when the handle is no argument. */
static void
free_late(nrm_stream *bare, int i)
{
    struct nrm__order_tag slot;
    uintptr_t origin = 0;
    CHECK(nrm__order_slot_of(bare, 0, &slot));
    blocks[i].tag = nrm__order_stamp_key(nrm__order_key(slot), &origin);
    CHECK_EQ(origin, (uintptr_t)handle_of(bare));
}

static const struct late {
    const char *name;
    bool is_destroyed, is_polled;
} lates[] = {
    {"waited for", false, false},
    {"asked about", false, true},
    {"destroyed, waited for", true, false},
    {"destroyed, asked about", true, true},
};

TEST_EACH(what_is_let_go_of_without_the_handle_is_behind_the_context, lates)
{
    start(NULL);
    nrm_CUstream handle = new_handle();
    nrm_stream *bare = bare_stream(handle), *aside = new_stream(), *b = new_stream();
    nrm_CUevent event = NULL;
    free_on(bare, 1);
    CHECK_EQ(cuda.cuStreamSynchronize(handle), NRM_CUDA_SUCCESS);
    CHECK(poll(1));
    hold(aside);
    read_on(aside, 1);
    CHECK_EQ(cuda.cuEventCreate(&event, NRM_CU_EVENT_DISABLE_TIMING), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuEventRecord(event, handle_of(aside)), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamWaitEvent(handle, event, 0), NRM_CUDA_SUCCESS);
    read_on(bare, 0);
    free_late(bare, 0);
    uint64_t records = sim.call_count("cuEventRecord");
    nrm_stream_release(bare);
    if (row->is_destroyed) {
        CHECK_EQ(cuda.cuStreamDestroy(handle), NRM_CUDA_SUCCESS);
    }
    CHECK(!is_done(0));
    CHECK(!row->is_polled || !poll(0));
    take(0, b);
    CHECK_EQ(sim.call_count("cuEventRecord"), records);
    CHECK_EQ(sim.call_count("cuCtxRecordEvent"), 1u);
    overwrite_on(b, 0);
    let_run();
    let_go(aside);
    CHECK(has_seen(0, 7));
    CHECK(poll(0));
    if (!row->is_destroyed) {
        CHECK_EQ(cuda.cuStreamDestroy(handle), NRM_CUDA_SUCCESS);
    }
    CHECK_EQ(cuda.cuEventDestroy(event), NRM_CUDA_SUCCESS);
    nrm_stream_release(aside);
    nrm_stream_release(b);
    stop();
}

/* The event of the context says nothing about what is freed on the stream afterwards. */
TEST(a_stream_of_others_goes_on_after_an_event_of_its_context)
{
    start(NULL);
    nrm_CUstream handle = new_handle();
    nrm_stream *bare = bare_stream(handle);
    free_on(bare, 0);
    free_late(bare, 1);
    poll(1);
    let_run();
    CHECK(poll(1));
    hold(bare);
    read_on(bare, 2);
    free_late(bare, 2);
    CHECK(!is_done(2));
    CHECK(!poll(2));
    let_run();
    CHECK(!poll(2));
    let_go(bare);
    CHECK(has_seen(2, 7));
    CHECK(poll(2));
    nrm_stream_release(bare);
    CHECK_EQ(cuda.cuStreamDestroy(handle), NRM_CUDA_SUCCESS);
    stop();
}

TEST(more_frees_on_bare_handles_than_events_are_ordered_all_the_same)
{
    enum { MANY = 1500 };
    static struct nrm__order_tag tags[MANY];
    struct nrm__order_counts counts;
    start(NULL);
    nrm_CUstream handle = new_handle();
    nrm_stream *bare = bare_stream(handle);
    hold(bare);
    read_on(bare, 0);
    for (int i = 0; i < MANY; i++) {
        tags[i] = nrm__order_stamp(bare, 0);
        CHECK(!nrm__order_is_done(tags[i]));
    }
    nrm__order_counts(&counts);
    CHECK_LE(counts.events, 1024u);
    CHECK(!nrm__order_poll(tags[0]));
    CHECK(!nrm__order_poll(tags[MANY - 1]));
    let_go(bare);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    for (int i = 0; i < MANY; i++) {
        CHECK(nrm__order_poll(tags[i]));
    }
    nrm__order_counts(&counts);
    CHECK_EQ(counts.events, 0u);
    CHECK_LE(simulator_count(NRM_CUDASIM_EVENTS), 1024u);
    nrm_stream_release(bare);
    CHECK_EQ(cuda.cuStreamDestroy(handle), NRM_CUDA_SUCCESS);
    stop();
}

/* ---- per-thread streams ---- */

static nrm_stream *others; /* of the other thread */
static atomic_int stage;

static void
wait_for_stage(int wanted)
{
    while (atomic_load(&stage) < wanted) {
        sched_yield();
    }
}

/* Works on its per-thread stream; frees the block itself, or leaves that to others. */
static void *
per_thread_main(void *arg)
{
    const bool *frees = arg;
    make_current(0);
    CHECK_OK(nrm_stream_per_thread(&others));
    hold(others);
    read_on(others, 0);
    if (*frees) {
        free_on(others, 0);
    }
    atomic_store(&stage, 1);
    wait_for_stage(2);
    let_go(others);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(others)), NRM_CUDA_SUCCESS);
    atomic_store(&stage, 3);
    wait_for_stage(4);
    return NULL;
}

static pthread_t
start_per_thread(const bool *frees)
{
    pthread_t thread;
    atomic_store(&stage, 0);
    CHECK_EQ(pthread_create(&thread, NULL, per_thread_main, (void *)frees), 0);
    wait_for_stage(1);
    return thread;
}

static void
take_and_compare(nrm_stream *own, pthread_t thread)
{
    take(0, own);
    overwrite_on(own, 0);
    let_run();
    atomic_store(&stage, 2);
    wait_for_stage(3);
    CHECK(has_seen(0, 7));
    CHECK(poll(0));
    atomic_store(&stage, 4);
    pthread_join(thread, NULL);
    nrm_stream_release(others);
    nrm_stream_release(own);
    stop();
}

TEST(a_free_on_the_per_thread_stream_of_another_thread_joins_the_epoch)
{
    static const bool frees = false;
    nrm_stream *own = NULL;
    start(NULL);
    pthread_t thread = start_per_thread(&frees);
    CHECK_OK(nrm_stream_per_thread(&own));
    uint64_t before = sim.call_count(NULL);
    free_on(others, 0);
    CHECK_EQ(sim.call_count(NULL), before);
    CHECK_EQ(blocks[0].tag.stream, 1u); /* an epoch's stamp */
    CHECK(!nrm__order_is_free(blocks[0].tag, own, 0));
    CHECK(!poll(0));
    take_and_compare(own, thread);
}

TEST(the_per_thread_stream_of_another_thread_is_never_named_to_the_driver)
{
    static const bool frees = true;
    nrm_stream *own = NULL;
    start(NULL);
    pthread_t thread = start_per_thread(&frees);
    CHECK_OK(nrm_stream_per_thread(&own));
    CHECK(!nrm__order_is_free(blocks[0].tag, own, 0));
    CHECK(!poll(0));
    CHECK_EQ(sim.call_count("cuEventRecord"), 0u);
    CHECK_EQ(sim.call_count("cuStreamQuery"), 0u);
    CHECK_GE(sim.call_count("cuCtxRecordEvent"), 1u);
    take_and_compare(own, thread);
}

TEST(nobody_adopts_for_the_per_thread_stream_of_another_thread)
{
    static const bool frees = true;
    nrm_stream *own = NULL;
    start(NULL);
    pthread_t thread = start_per_thread(&frees);
    CHECK_OK(nrm_stream_per_thread(&own));
    nrm_stream *a = new_stream();
    hold(a);
    read_on(a, 1);
    free_on(a, 1);
    CHECK_EQ(nrm__order_adopt(blocks[1].tag, others, 0), NRM_INVALID_VALUE);
    CHECK(!nrm__order_is_free(blocks[0].tag, others, 0)); /* not from here */
    let_go(a);
    nrm_stream_release(a);
    take_and_compare(own, thread);
}

/* ---- several devices ---- */

/* RMM 1333: the event belongs to the stream's device, not to the memory's, nor to the one
   that happens to be current. */
static const struct where {
    const char *name;
    int stream, current;
    bool is_bare;
} wheres[] = {
    {"stream of the other device", 1, 0, false},
    {"the other device is current", 0, 1, false},
    {"both", 1, 1, false},
    {"bare handle of the other device", 1, 0, true},
    {"bare handle, the other device is current", 0, 1, true},
};

TEST_EACH(an_event_is_made_on_the_device_of_the_stream, wheres)
{
    const struct where *where = row;
    struct nrm_cudasim_config config = simulator_config();
    config.devices = 2;
    start(&config);
    make_current(where->stream);
    nrm_stream *a = where->is_bare ? bare_stream(new_handle()) : new_stream();
    nrm_CUstream handle = handle_of(a);
    make_current(0);
    nrm_stream *b = new_stream();
    make_current(where->current);
    hold(a);
    read_on(a, 0);
    free_on(a, 0);
    CHECK(!poll(0));
    take(0, b);
    overwrite_on(b, 0);
    let_run();
    let_go(a);
    make_current(where->stream);
    CHECK_EQ(cuda.cuStreamSynchronize(handle), NRM_CUDA_SUCCESS);
    make_current(0);
    CHECK(has_seen(0, 7));
    CHECK(poll(0));
    CHECK_EQ(sim.call_count("cuCtxRecordEvent"), 0u);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

TEST(the_default_stream_is_one_a_device)
{
    struct nrm_cudasim_config config = simulator_config();
    config.devices = 2;
    start(&config);
    nrm_stream *legacy = nrm_stream_default();
    make_current(1); /* whatever is current: the memory is of device 0 */
    make_current(0);
    hold(legacy);
    read_on(legacy, 0);
    make_current(1);
    free_on(legacy, 0);
    CHECK(nrm__order_is_free(blocks[0].tag, legacy, 0));
    CHECK(!nrm__order_is_free(blocks[0].tag, legacy, 1));
    CHECK(!poll(0));
    nrm_stream *b = new_stream(); /* of device 1 */
    take(0, b);
    overwrite_on(b, 0);
    let_run();
    make_current(0);
    let_go(legacy);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    make_current(1);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    make_current(0);
    CHECK(has_seen(0, 7));
    CHECK(poll(0));
    make_current(1);
    nrm_stream_release(b);
    stop();
}

/* ---- streams that are never idle, stuck or captured ---- */

TEST(a_stream_that_is_never_idle_gives_its_blocks_back)
{
    start(NULL);
    nrm_stream *a = new_stream();
    nrm_CUevent event = NULL;
    CHECK_EQ(cuda.cuEventCreate(&event, NRM_CU_EVENT_DISABLE_TIMING), NRM_CUDA_SUCCESS);
    for (int i = 0; i < 50; i++) {
        hold(a);
        read_on(a, 0);
        free_on(a, 0);
        CHECK(!poll(0));
        CHECK_EQ(cuda.cuEventRecord(event, handle_of(a)), NRM_CUDA_SUCCESS);
        let_go(a);
        CHECK_EQ(cuda.cuEventSynchronize(event), NRM_CUDA_SUCCESS);
        hold(a);
        read_on(a, 1);
        CHECK(poll(0));
    }
    let_go(a);
    CHECK_EQ(cuda.cuEventDestroy(event), NRM_CUDA_SUCCESS);
    nrm_stream_release(a);
    stop();
}

TEST(looking_at_ever_newer_blocks_does_not_hide_the_older_ones)
{
    start(NULL);
    nrm_stream *a = new_stream();
    nrm_CUevent first = NULL;
    CHECK_EQ(cuda.cuEventCreate(&first, NRM_CU_EVENT_DISABLE_TIMING), NRM_CUDA_SUCCESS);
    hold(a);
    read_on(a, 0);
    free_on(a, 0);
    CHECK(!poll(0));
    CHECK_EQ(cuda.cuEventRecord(first, handle_of(a)), NRM_CUDA_SUCCESS);
    nrm_stream *stuck = new_stream();
    hold(stuck);
    read_on(stuck, 2);
    nrm_CUevent never = NULL;
    CHECK_EQ(cuda.cuEventCreate(&never, NRM_CU_EVENT_DISABLE_TIMING), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuEventRecord(never, handle_of(stuck)), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamWaitEvent(handle_of(a), never, 0), NRM_CUDA_SUCCESS);
    for (int i = 0; i < 40; i++) {
        read_on(a, 1);
        free_on(a, 1);
        CHECK(!poll(1));
    }
    let_go(a);
    CHECK_EQ(cuda.cuEventSynchronize(first), NRM_CUDA_SUCCESS);
    CHECK(poll(0));
    CHECK(!poll(1));
    let_go(stuck);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    CHECK(poll(1));
    CHECK_EQ(cuda.cuEventDestroy(first), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuEventDestroy(never), NRM_CUDA_SUCCESS);
    nrm_stream_release(a);
    nrm_stream_release(stuck);
    stop();
}

TEST(one_stuck_stream_stalls_no_other)
{
    start(NULL);
    nrm_stream *stuck = new_stream(), *a = new_stream(), *b = new_stream();
    hold(stuck);
    read_on(stuck, 0);
    free_on(stuck, 0);
    for (int i = 0; i < 20; i++) {
        free_on(a, 1);
        CHECK(!poll(0));
        take(1, b);
        overwrite_on(b, 1);
        CHECK_EQ(cuda.cuStreamSynchronize(handle_of(b)), NRM_CUDA_SUCCESS);
        free_on(b, 1);
        CHECK(poll(1));
    }
    let_go(stuck);
    nrm_stream_release(stuck);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

/* What is done with a stream while it is captured, and ends in NOT_FOUND or nothing. */
TEST(a_capturing_stream_is_neither_asked_nor_recorded_on)
{
    nrm_CUgraph graph = NULL;
    start(NULL);
    nrm_stream *a = new_stream(), *b = new_stream();
    hold(b);
    read_on(b, 1);
    free_on(b, 1);
    CHECK_EQ(cuda.cuStreamBeginCapture(handle_of(a), NRM_CU_STREAM_CAPTURE_MODE_GLOBAL),
             NRM_CUDA_SUCCESS);
    free_on(a, 0);
    CHECK(!poll(0));
    CHECK_EQ(nrm__order_adopt(blocks[0].tag, b, 0), NRM_NOT_FOUND);
    CHECK_EQ(nrm__order_adopt(blocks[1].tag, a, 0), NRM_NOT_FOUND);
    nrm_stream *bare = bare_stream(handle_of(a));
    struct nrm__order_tag tag = nrm__order_stamp(bare, 0);
    CHECK(!nrm__order_is_done(tag));
    CHECK_EQ(sim.call_count("cuCtxRecordEvent"), 0u);
    CHECK_EQ(cuda.cuStreamEndCapture(handle_of(a), &graph), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    let_go(b);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    CHECK(poll(0));
    CHECK(poll(1));
    nrm_stream_release(bare);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

/* ---- resets and failing calls ---- */

TEST(after_a_reset_old_tags_are_done_and_old_handles_are_not_named)
{
    struct nrm__order_counts before, counts;
    start(NULL);
    nrm__order_counts(&before);
    nrm_stream *a = new_stream(), *legacy = nrm_stream_legacy();
    hold(a);
    read_on(a, 0);
    free_on(a, 0);
    free_on(legacy, 1);
    CHECK(!poll(0)); /* recorded */
    read_on(a, 2);
    free_on(a, 2); /* not recorded */
    CHECK_EQ(cuda.cuDevicePrimaryCtxReset(0), NRM_CUDA_SUCCESS);
    make_current(0);
    (void)nrm__cuda_generation(0);
    uint64_t named = sim.call_count("cuStreamGetCtx") + sim.call_count("cuStreamQuery");
    CHECK(poll(0));
    CHECK(poll(2));
    nrm_stream_release(a);
    CHECK_EQ(sim.call_count("cuStreamGetCtx") + sim.call_count("cuStreamQuery"), named);
    CHECK(poll(1));
    nrm__order_counts(&counts);
    CHECK_LE(counts.events, before.events);
    stop();
}

static const struct failing {
    const char *name;
    bool is_refused; /* or another way is found */
} failing[] = {
    {"cuEventCreate", false},
    {"cuEventRecord", false},
    {"cuStreamGetCtx", false},
    {"cuStreamWaitEvent", true},
};

TEST_EACH(an_adoption_whose_call_fails_is_refused_or_goes_another_way, failing)
{
    const struct failing *failing_call = row;
    struct nrm__order_counts before, counts;
    start(NULL);
    nrm__order_counts(&before);
    nrm_stream *a = new_stream(), *b = new_stream();
    hold(a);
    read_on(a, 0);
    free_on(a, 0);
    CHECK_EQ(sim.fail(failing_call->name, 1, NRM_CUDA_ERROR_OPERATING_SYSTEM, 1), 0);
    nrm_status status = nrm__order_adopt(blocks[0].tag, b, 0);
    if (failing_call->is_refused) {
        CHECK_EQ(status, NRM_CUDA_ERROR);
        CHECK_STR_EQ(nrm_last_error()->native_name, "CUDA_ERROR_OPERATING_SYSTEM");
        CHECK_OK(nrm__order_adopt(blocks[0].tag, b, 0));
    }
    else {
        CHECK_OK(status);
    }
    overwrite_on(b, 0);
    let_run();
    let_go(a);
    CHECK(has_seen(0, 7));
    CHECK(poll(0));
    nrm__order_counts(&counts);
    CHECK_LE(counts.events, before.events);
    nrm_stream_release(a);
    nrm_stream_release(b);
    stop();
}

static const struct failing failing_frees[] = {
    {"cuStreamIsCapturing", false}, {"cuStreamGetId", false}, {"cuStreamGetCtx", false},
    {"cuEventCreate", false},       {"cuEventRecord", false},
};

TEST_EACH(a_free_on_a_bare_handle_whose_call_fails_is_behind_its_context, failing_frees)
{
    const struct failing *failing_call = row;
    start(NULL);
    nrm_CUstream handle = new_handle();
    nrm_stream *bare = bare_stream(handle), *b = new_stream();
    hold(bare);
    read_on(bare, 0);
    CHECK_EQ(sim.fail(failing_call->name, 1, NRM_CUDA_ERROR_OPERATING_SYSTEM, 1), 0);
    free_on(bare, 0);
    CHECK_EQ(sim.fail(failing_call->name, 1, 0, 1), 0);
    CHECK(!poll(0));
    take(0, b);
    overwrite_on(b, 0);
    let_run();
    let_go(bare);
    CHECK(has_seen(0, 7));
    CHECK(poll(0));
    nrm_stream_release(bare);
    nrm_stream_release(b);
    CHECK_EQ(cuda.cuStreamDestroy(handle), NRM_CUDA_SUCCESS);
    stop();
}

/* ---- threads ---- */

/* A pool without anything but order: free blocks under a lock. */
static struct {
    pthread_mutex_t lock;
    bool is_taken[N_BLOCKS];
    nrm_stream *streams[N_STREAMS];
    nrm_CUdeviceptr results;
    unsigned char values[4096];
    atomic_uint n_results;
} shared = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int
take_any(nrm_stream *stream, uint64_t *random)
{
    struct nrm__order_tag tag;
    int i = (int)(check_random(random) % N_BLOCKS);
    pthread_mutex_lock(&shared.lock);
    bool taken = !shared.is_taken[i];
    shared.is_taken[i] = true;
    tag = blocks[i].tag;
    pthread_mutex_unlock(&shared.lock);
    if (!taken) {
        return -1;
    }
    if (!nrm__order_is_free(tag, stream, 0) &&
        (check_random(random) % 2 == 0 || !nrm__order_poll(tag))) {
        CHECK_OK(nrm__order_adopt(tag, stream, 0));
    }
    return i;
}

static void
give_back(int i, struct nrm__order_tag tag)
{
    pthread_mutex_lock(&shared.lock);
    blocks[i].tag = tag;
    shared.is_taken[i] = false;
    pthread_mutex_unlock(&shared.lock);
}

/* Fills a block and copies it out; both must be of one owner. */
static void
use(int i, const nrm_stream *stream)
{
    unsigned n = atomic_fetch_add(&shared.n_results, 1) % sizeof shared.values;
    unsigned char value = (unsigned char)(n % 251 + 1);
    shared.values[n] = value;
    CHECK_EQ(cuda.cuMemsetD8Async(blocks[i].ptr, value, BLOCK, handle_of(stream)),
             NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemcpyAsync(shared.results + n, blocks[i].ptr + n % BLOCK, 1,
                                handle_of(stream)),
             NRM_CUDA_SUCCESS);
}

static void
work(unsigned index, void *arg)
{
    uint64_t random = 77 + index + *(const uint64_t *)arg;
    nrm_stream *own = NULL;
    make_current(0);
    CHECK_OK(nrm_stream_per_thread(&own));
    for (int turn = 0; turn < 300; turn++) {
        uint64_t which = check_random(&random) % 6;
        nrm_stream *stream = which < N_STREAMS ? shared.streams[which] : own;
        if (which == 5) { /* one that dies with its block */
            stream = new_stream();
        }
        int i = take_any(stream, &random);
        if (i >= 0) {
            use(i, stream);
            give_back(i, nrm__order_stamp(which == 4 ? NULL : stream, 0));
        }
        if (which == 5) {
            nrm_stream_release(stream);
        }
    }
    nrm_stream_release(own);
}

TEST(threads_streams_and_deaths_in_any_order)
{
    unsigned char bytes[sizeof shared.values];
    for (uint64_t seed = 1; seed <= 5; seed++) {
        struct nrm_cudasim_config config = simulator_config();
        config.seed = seed;
        start(&config);
        atomic_store(&shared.n_results, 0);
        CHECK_EQ(cuda.cuMemAlloc(&shared.results, sizeof bytes), NRM_CUDA_SUCCESS);
        for (int i = 0; i < N_STREAMS; i++) {
            shared.streams[i] = new_stream();
        }
        check_threads(N_THREADS, work, &seed);
        CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
        unsigned n = atomic_load(&shared.n_results);
        CHECK_GT(n, 300u);
        CHECK_LE(n, sizeof bytes);
        CHECK_EQ(cuda.cuMemcpyDtoH(bytes, shared.results, sizeof bytes),
                 NRM_CUDA_SUCCESS);
        CHECK_MEM_EQ(bytes, shared.values, n);
        for (int i = 0; i < N_STREAMS; i++) {
            nrm_stream_release(shared.streams[i]);
        }
        stop();
    }
}

CHECK_MAIN
