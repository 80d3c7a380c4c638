/* Stream order where a stream, a context or the driver does not go on as it should, and
   in many threads at a time. */
#include "order_blocks.h"

enum { N_THREADS = 3, N_STREAMS = 3 };

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
