/* Stream order: the schedules by which memory was handed out too early, in pools before
   this one and in the model of this one. */
#include "order_blocks.h"

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

/* RMM 2489: B has recorded before, takes over what A has freed, and C looks at B's
   event. */
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

/* The driver's table is filled once and read by everybody; here one entry is
   changed. */
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

CHECK_MAIN
