/* What threads keep for streams of others, which are known by the driver's number of
   them: device pools on the simulated driver, which counts a fault for every call on a
   handle that is none any more.

   Where a test compares bytes, work on the stream waits for `aside`, which is held when
   the block is freed, and what it reads when it goes on must be what was there. */
#include "core/order_slots.h"
#include "device_pool.h"
#include "handle_pool.h"
#include "workers.h"

/* ---- the pair ---- */

struct calls {
    uint64_t all, captures, ids;
};

static struct calls
count_calls(void)
{
    return (struct calls){sim.call_count(NULL), sim.call_count("cuStreamIsCapturing"),
                          sim.call_count("cuStreamGetId")};
}

static const struct size {
    const char *name;
    size_t nbytes;
} sizes[] = {{"small", 256}, {"page", 4096}, {"medium", 65536}, {"large", 3000000}};

TEST_EACH(a_pair_on_one_handle_asks_what_it_is_and_nothing_else, sizes)
{
    start(0);
    nrm_CUstream handle = new_handle();
    give_by(take_by(row->nbytes, handle), handle);
    void *ptr = take_by(row->nbytes, handle);
    give_by(ptr, handle);
    for (int i = 0; i < 20; i++) {
        struct calls before = count_calls();
        CHECK(take_by(row->nbytes, handle) == ptr);
        give_by(ptr, handle);
        struct calls after = count_calls();
        CHECK_EQ(after.captures, before.captures + 2);
        CHECK_EQ(after.ids, before.ids + 2);
        CHECK_EQ(after.all, before.all + 4);
        CHECK_EQ(n_kept(pool), 1u);
    }
    destroy(handle);
    finish();
}

TEST(each_stream_gets_its_own_blocks_back)
{
    start(0);
    nrm_CUstream a = new_handle(), b = new_handle();
    know(a);
    know(b);
    void *of_a = take_by(BLOCK, a), *of_b = take_by(BLOCK, b);
    give_by(of_a, a);
    give_by(of_b, b);
    for (int i = 0; i < 10; i++) {
        CHECK(take_by(BLOCK, a) == of_a);
        CHECK(take_by(BLOCK, b) == of_b);
        give_by(of_b, b);
        give_by(of_a, a);
    }
    CHECK_EQ(sim.call_count("cuStreamWaitEvent"), 0u);
    destroy(a);
    destroy(b);
    finish();
}

/* ---- other streams ---- */

TEST(another_stream_waits_for_what_a_thread_kept)
{
    start(N_BLOCKS);
    struct part part = {.handle = new_handle(), .aside = new_stream()};
    nrm_CUstream b = new_handle();
    void *rest = take_by((N_BLOCKS - 1) * BLOCK, NULL);
    keep_used_there(&part);
    make_current(0);
    CHECK_EQ(part.n_kept, 1u);
    check_waits(part.ptr, b, part.aside);
    give_by(rest, NULL);
    destroy(part.handle);
    destroy(b);
    nrm_stream_release(part.aside);
    finish();
}

static const struct ending {
    const char *name;
    bool in_other_thread, trims, thread_ends;
} endings[] = {
    {"kept by this thread", false, false, false},
    {"kept by another", true, false, false},
    {"kept by this thread, trimmed", false, true, false},
    {"kept by another, trimmed", true, true, false},
    {"kept by another that ends", true, false, true},
    {"kept by another that ends, trimmed", true, true, true},
};

/* The next stream has the handle of the one that is gone, and another number. */
TEST_EACH(a_handle_that_comes_back_is_another_stream, endings)
{
    struct worker worker;
    start(N_BLOCKS);
    struct part part = {.handle = new_handle(), .aside = new_stream()};
    worker_start(&worker);
    void *rest = take_by((N_BLOCKS - 1) * BLOCK, NULL);
    if (row->in_other_thread) {
        worker_run(&worker, keep_used_there, &part);
    }
    else {
        keep_used_there(&part);
    }
    CHECK_EQ(part.n_kept, 1u);
    make_current(0);
    destroy(part.handle);
    if (row->thread_ends) {
        worker_end(&worker);
    }
    if (row->trims) {
        CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    }
    simulator_check_faults();
    nrm_CUstream next = new_handle();
    CHECK(next == part.handle);
    check_waits(part.ptr, next, part.aside);
    give_by(rest, NULL);
    destroy(next);
    nrm_stream_release(part.aside);
    if (!row->thread_ends) {
        worker_end(&worker);
    }
    finish();
}

/* Nothing that waits for the dead stream's work may hold for ever. */
TEST(what_was_kept_for_a_stream_that_is_gone_becomes_free_with_its_work)
{
    start(N_BLOCKS);
    struct part part = {.handle = new_handle(), .aside = new_stream()};
    keep_used_there(&part);
    make_current(0);
    destroy(part.handle);
    CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    CHECK_EQ(reserved_nbytes(pool), (int64_t)(N_BLOCKS * BLOCK));
    let_go(part.aside);
    CHECK(has_seen(0, 7));
    CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    CHECK_EQ(reserved_nbytes(pool), 0);
    nrm_stream_release(part.aside);
    finish();
}

/* ---- one record for many ---- */

TEST(what_is_in_the_way_on_the_same_stream_is_recorded_with_one_event)
{
    start(N_BLOCKS);
    nrm_CUstream a = new_handle(), b = new_handle();
    void *ptrs[10];
    know(a);
    nrm_CUstream held = a;
    for (int i = 0; i < 5; i++) {
        ptrs[i] = take_by(BLOCK, a);
    }
    CHECK_EQ(sim.hold_stream(held), 0);
    write_on_handle(a, ptrs[0], 7);
    for (int i = 0; i < 4; i++) {
        give_by(ptrs[i], a);
    }
    CHECK_EQ(n_kept(pool), 4u);
    uint64_t records = sim.call_count("cuEventRecord");
    give_by(ptrs[4], a);
    CHECK_EQ(sim.call_count("cuEventRecord"), records + 1);
    CHECK_EQ(n_kept(pool), 2u);
    /* All of it is for somebody else behind that one. */
    void *all = take_by(N_BLOCKS * BLOCK - 2 * LARGE, NULL);
    for (int i = 0; i < 10; i++) {
        ptrs[i] = take_by(2 * BLOCK, b);
    }
    CHECK_EQ(sim.call_count("cuEventRecord"), records + 1);
    CHECK_EQ(sim.call_count("cuCtxRecordEvent"), 0u);
    CHECK_EQ(sim.release_stream(held), 0);
    for (int i = 0; i < 10; i++) {
        give_by(ptrs[i], b);
    }
    give_by(all, NULL);
    destroy(a);
    destroy(b);
    finish();
}

/* It is the stream's own, and the handle is an argument. */
TEST(what_a_search_takes_from_its_thread_is_recorded_there)
{
    start(N_BLOCKS);
    nrm_CUstream a = new_handle();
    nrm_stream *b = new_stream();
    know(a);
    void *ptr = take_by(BLOCK, a);
    CHECK_EQ(sim.hold_stream(a), 0);
    write_on_handle(a, ptr, 7);
    give_by(ptr, a);
    CHECK_EQ(n_kept(pool), 1u);
    uint64_t records = sim.call_count("cuEventRecord");
    void *all = take_by(N_BLOCKS * BLOCK, a);
    CHECK_EQ(sim.call_count("cuEventRecord"), records + 1);
    CHECK_EQ(sim.call_count("cuCtxRecordEvent"), 0u);
    CHECK_EQ(sim.release_stream(a), 0);
    give_by(all, a);
    nrm_stream_release(b);
    destroy(a);
    finish();
}

/* ---- captures ---- */

/* The block is the graph's, the capture is not broken, and nothing that was kept before
   goes into it. */
TEST(a_capture_that_begins_between_a_pair_keeps_the_block)
{
    nrm_CUgraph graph = NULL;
    start(0);
    nrm_CUstream handle = new_handle();
    know(handle);
    void *kept = take_by(BLOCK, handle), *ptr = take_by(BLOCK, handle);
    give_by(kept, handle);
    uint64_t ids = sim.call_count("cuStreamGetId");
    CHECK_EQ(cuda.cuStreamBeginCapture(handle, NRM_CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
             NRM_CUDA_SUCCESS);
    write_on_handle(handle, ptr, 9);
    give_by(ptr, handle);
    CHECK_EQ(n_kept(pool), 1u);
    void *inside = take_by(BLOCK, handle);
    CHECK(inside != kept && inside != ptr);
    write_on_handle(handle, inside, 9);
    CHECK_EQ(sim.call_count("cuStreamGetId"), ids);
    CHECK_EQ(cuda.cuStreamEndCapture(handle, &graph), NRM_CUDA_SUCCESS);
    CHECK(graph != NULL);
    give_by(inside, handle);
    CHECK_EQ(n_kept(pool), 1u);
    CHECK(take_by(BLOCK, handle) == kept);
    void *more = take_by(BLOCK, handle);
    CHECK(more != ptr && more != inside);
    give_by(more, handle);
    give_by(kept, handle);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    destroy(handle);
    finish();
}

/* ---- more streams than numbers ---- */

static uint64_t
n_slots_in_use(void)
{
    struct nrm__order_counts counts;
    nrm__order_counts(&counts);
    return counts.in_use;
}

TEST(numbers_of_streams_that_nobody_uses_make_room)
{
    start(0);
    for (int i = 0; i < 4 * N_NUMBERS; i++) {
        nrm_CUstream handle = new_handle();
        know(handle);
        know(handle);
        destroy(handle);
        CHECK_LE(n_slots_in_use(), (uint64_t)N_NUMBERS);
    }
    CHECK_GT(n_slots_in_use(), (uint64_t)N_NUMBERS / 2);
    finish();
}

TEST(a_stream_that_is_used_keeps_its_number)
{
    start(0);
    nrm_CUstream handle = new_handle();
    know(handle);
    void *ptr = take_by(LARGE, handle);
    give_by(ptr, handle);
    for (int i = 0; i < 2 * N_NUMBERS; i++) {
        nrm_CUstream other = new_handle();
        know(other);
        destroy(other);
        uint64_t before = sim.call_count(NULL);
        give_by(take_by(LARGE, handle), handle);
        CHECK_EQ(sim.call_count(NULL), before + 4);
    }
    destroy(handle);
    finish();
}

static const struct crowd {
    const char *name;
    bool
        takes_itself; /* the stream that freed the block has it back, or else another */
} crowds[] = {{"taken by another", false}, {"taken by itself", true}};

/* Its number has made room for others, and later comes in again. */
TEST_EACH(a_stream_whose_number_made_room_is_waited_for, crowds)
{
    start(N_BLOCKS);
    struct part part = {.handle = new_handle(), .aside = new_stream()};
    nrm_CUstream b = new_handle();
    void *rest = take_by((N_BLOCKS - 2) * BLOCK, NULL);
    keep_used_there(&part);
    make_current(0);
    for (int i = 0; i < 2 * N_NUMBERS; i++) {
        nrm_CUstream other = new_handle();
        know(other);
        destroy(other);
    }
    void *spare = take_by(BLOCK, NULL);
    CHECK(spare != part.ptr);
    check_waits(part.ptr, row->takes_itself ? part.handle : b, part.aside);
    give_by(rest, NULL);
    give_by(spare, NULL);
    destroy(part.handle);
    destroy(b);
    nrm_stream_release(part.aside);
    finish();
}

/* ---- threads ---- */

enum { N_ROUNDS = 1200 / SLOW, N_OWNED = 64 };

static nrm_CUstream shared;

static _Atomic(void *) owned[N_OWNED]; /* blocks that somebody has now */

static atomic_bool is_over;

/* Two threads have never the same block. */
static size_t
own(void *ptr)
{
    for (size_t i = 0; i < N_OWNED; i++) {
        CHECK(atomic_load(&owned[i]) != ptr);
    }
    for (size_t i = 0;; i = (i + 1) % N_OWNED) {
        void *none = NULL;
        if (atomic_compare_exchange_strong(&owned[i], &none, ptr)) {
            return i;
        }
    }
}

/* Nothing that a stream which is gone left behind runs into the block now. */
static void
check_bytes(void *ptr, unsigned char value)
{
    unsigned char bytes[BLOCK];
    write_on_handle(shared, ptr, value);
    CHECK_EQ(cuda.cuMemcpyDtoHAsync(bytes, (nrm_CUdeviceptr)(uintptr_t)ptr, BLOCK,
                                    shared),
             NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamSynchronize(shared), NRM_CUDA_SUCCESS);
    for (size_t i = 0; i < BLOCK; i++) {
        if (bytes[i] != value) {
            CHECK_EQ(bytes[i], value);
            return;
        }
    }
}

static void
share_there(void *argument)
{
    size_t at[4], nbytes = *(size_t *)argument;
    make_current(0);
    for (int i = 0; i < N_ROUNDS; i++) {
        int n = 1 + i % 4;
        for (int k = 0; k < n; k++) {
            void *ptr = take_by(nbytes * (size_t)(1 + i % 3), shared);
            at[k] = own(ptr);
            if (i % 16 == 0) {
                check_bytes(ptr, (unsigned char)(2 + i % 200));
            }
        }
        for (int k = 0; k < n; k++) {
            give_by(atomic_exchange(&owned[at[k]], NULL), shared);
        }
    }
    cuda.cuCtxSetCurrent(NULL);
}

enum { N_CROWD = 16, N_EACH = 3 };

struct crowd_work {
    nrm_CUstream slow;
    nrm_CUevent event;
    nrm_CUdeviceptr results; /* what each piece of work found, a BLOCK each */
};

static unsigned char
value_of(int k)
{
    return (unsigned char)(1 + k);
}

/* A stream whose work waits for the slow one, and is pending when it is gone: it writes
   a block, and reads what is there then. */
static void
live_shortly(const struct crowd_work *work, int i)
{
    nrm_CUstream handle = new_handle();
    CHECK_EQ(cuda.cuStreamWaitEvent(handle, work->event, 0), NRM_CUDA_SUCCESS);
    for (int k = i * N_EACH; k < (i + 1) * N_EACH; k++) {
        void *ptr = take_by(BLOCK, handle);
        write_on_handle(handle, ptr, value_of(k));
        CHECK_EQ(cuda.cuMemcpyAsync(work->results + (size_t)k * BLOCK,
                                    (nrm_CUdeviceptr)(uintptr_t)ptr, BLOCK, handle),
                 NRM_CUDA_SUCCESS);
        give_by(ptr, handle);
    }
    destroy(handle);
}

static void
check_results(const struct crowd_work *work)
{
    static _Thread_local unsigned char bytes[N_CROWD * N_EACH * BLOCK];
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemcpyDtoH(bytes, work->results, sizeof bytes), NRM_CUDA_SUCCESS);
    size_t n_wrong = 0;
    for (size_t i = 0; i < sizeof bytes; i++) {
        n_wrong += bytes[i] != value_of((int)(i / BLOCK));
    }
    CHECK_EQ(n_wrong, 0u);
}

/* Pushes the numbers of other streams out all the time. */
static void
crowd_there(void *argument)
{
    struct crowd_work work;
    (void)argument;
    make_current(0);
    work.slow = new_handle();
    CHECK_EQ(cuda.cuMemAlloc(&work.results, N_CROWD * N_EACH * BLOCK),
             NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuEventCreate(&work.event, NRM_CU_EVENT_DISABLE_TIMING),
             NRM_CUDA_SUCCESS);
    while (!atomic_load(&is_over)) {
        CHECK_EQ(sim.hold_stream(work.slow), 0);
        CHECK_EQ(cuda.cuMemsetD8Async(work.results, 0, 1, work.slow), NRM_CUDA_SUCCESS);
        CHECK_EQ(cuda.cuEventRecord(work.event, work.slow), NRM_CUDA_SUCCESS);
        for (int i = 0; i < N_CROWD; i++) {
            live_shortly(&work, i);
        }
        CHECK_EQ(sim.release_stream(work.slow), 0);
        check_results(&work);
    }
    destroy(work.slow);
    CHECK_EQ(cuda.cuEventDestroy(work.event), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemFree(work.results), NRM_CUDA_SUCCESS);
    cuda.cuCtxSetCurrent(NULL);
}

static void
trim_there(void *argument)
{
    (void)argument;
    make_current(0);
    while (!atomic_load(&is_over)) {
        CHECK_OK(nrm_resource_trim(pool, 0, NULL));
        let_run();
    }
    cuda.cuCtxSetCurrent(NULL);
}

TEST(threads_share_a_handle_while_streams_come_and_go)
{
    struct worker workers[N_WORKERS], crowd[2], trimmer;
    size_t nbytes = BLOCK;
    start_machine(3 * N_BLOCKS, 7);
    shared = new_handle();
    atomic_store(&is_over, false);
    for (int i = 0; i < N_WORKERS; i++) {
        worker_start(&workers[i]);
        worker_ask(&workers[i], share_there, &nbytes);
    }
    for (int i = 0; i < 2; i++) {
        worker_start(&crowd[i]);
        worker_ask(&crowd[i], crowd_there, NULL);
    }
    worker_start(&trimmer);
    worker_ask(&trimmer, trim_there, NULL);
    for (int i = 0; i < N_WORKERS; i++) {
        worker_wait(&workers[i]);
        worker_end(&workers[i]);
    }
    atomic_store(&is_over, true);
    for (int i = 0; i < 2; i++) {
        worker_wait(&crowd[i]);
        worker_end(&crowd[i]);
    }
    worker_wait(&trimmer);
    worker_end(&trimmer);
    CHECK_LE(n_slots_in_use(), (uint64_t)N_NUMBERS);
    destroy(shared);
    finish();
}

/* ---- when the driver does not say ---- */

static const struct silent {
    const char *name;
} silent[] = {{"cuStreamGetId"}, {"cuStreamIsCapturing"}, {"cuStreamGetCtx"}};

TEST_EACH(a_stream_that_has_no_number_is_behind_its_context, silent)
{
    start(N_BLOCKS);
    nrm_CUstream handle = new_handle(), b = new_handle();
    nrm_stream *aside = new_stream();
    void *rest = take_by((N_BLOCKS - 1) * BLOCK, NULL);
    void *ptr = put_in_use(handle, aside);
    CHECK_EQ(sim.fail(row->name, 1, NRM_CUDA_ERROR_OPERATING_SYSTEM, 0), 0);
    give_by(ptr, handle);
    CHECK_EQ(sim.fail(row->name, 1, 0, 1), 0);
    CHECK_EQ(n_kept(pool), 0u);
    check_waits(ptr, b, aside);
    give_by(rest, NULL);
    destroy(handle);
    destroy(b);
    nrm_stream_release(aside);
    finish();
}

/* Its numbers begin anew. */
TEST(a_machine_that_starts_again_has_other_streams)
{
    for (int i = 0; i < 3; i++) {
        start(0);
        nrm_CUstream handle = new_handle();
        know(handle);
        know(handle);
        CHECK_EQ(n_kept(pool), 1u);
        destroy(handle);
        finish();
    }
}

CHECK_MAIN
