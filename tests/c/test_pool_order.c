/* A pool of device memory on the simulated driver: programs that free on one stream and
   allocate on another, through the public calls, and compare bytes: who gets a block,
   what becomes one, and programs by chance. What ends or fails is in
   test_pool_order_streams.c.

   In most of them a stream that works on a block is held, the block is freed, and
   somebody else gets it and overwrites it. What the first stream reads when it goes on
   must be what was there. A pool that is full has one segment, so that the same memory
   has to be used. */
#include "base/bits.h"
#include "device_pool.h"
#include "nrm/options.h"
#include "ordered_pool.h"

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
    CHECK_EQ(parked_nbytes(pool), (int64_t)BLOCK);
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
    CHECK_EQ(parked_nbytes(pool), (int64_t)large);
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

/* ---- programs by chance ---- */

enum { N_PIECES = 24, N_STEPS = 1500, N_RESULTS = 8192 };

static struct {
    nrm_stream *streams[N_STREAMS];
    nrm_CUdeviceptr results;
    unsigned char values[N_RESULTS];
    atomic_uint n_results;
} shared;

static size_t largest_nbytes; /* of a block */

struct piece {
    void *ptr;
    size_t nbytes;
    nrm_stream *stream; /* that works on it */
};

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
