/* Stream order of streams that are not simply there: that go away, are known by a
   handle only, belong to a thread, or are on several devices. */
#include "order_blocks.h"

#include <sched.h>

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

/* The event of the context says nothing about what is freed on the stream
   afterwards. */
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

/* RMM 1333: the event belongs to the stream's device, not to the memory's, nor to the
   one that happens to be current. */
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

CHECK_MAIN
