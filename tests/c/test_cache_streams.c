/* What threads keep of memory that streams order, and of memory that nobody orders:
   device pools, and page-locked and managed ones with immediate reuse, on the simulated
   driver. What other streams and threads get of it is in test_cache_streams_shared.c.

   A block is "kept" when it was freed on the short way. Where a test compares bytes, a
   stream that works on the block is held when it is freed, and what it reads when it
   goes on must be what was there. */
#include "base/bits.h"
#include "core/order.h"
#include "core/uses.h"
#include "device_pool.h"
#include "nrm/adaptors.h"
#include "stream_pool.h"
#include "workers.h"

/* ---- the pair ---- */

static inline nrm_stream *
get_default(void)
{
    return nrm_stream_default();
}

static inline nrm_stream *
get_legacy(void)
{
    return nrm_stream_legacy();
}

static inline nrm_stream *
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
/* Requests of about a size share blocks, in a pool that need not hold what exactly
   fits. */
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

/* ---- counters ---- */

struct streamed {
    void *ptr;
    size_t nbytes;
    nrm_stream *stream;
};

static void
take_counted(struct streamed *block, nrm_statistics *expected)
{
    REQUIRE_OK(
        nrm_resource_allocate(pool, block->nbytes, 0, block->stream, &block->ptr));
    expected->current_bytes += (int64_t)block->nbytes;
    expected->total_bytes += (int64_t)block->nbytes;
    expected->current_count++;
    expected->total_count++;
    if (expected->current_bytes > expected->peak_bytes) {
        expected->peak_bytes = expected->current_bytes;
    }
}

static void
give_counted(struct streamed *block, nrm_statistics *expected)
{
    CHECK_OK(nrm_resource_deallocate(pool, block->ptr, 0, block->stream));
    block->ptr = NULL;
    expected->current_bytes -= (int64_t)block->nbytes;
    expected->current_count--;
}

static void
check_counted(const nrm_statistics *expected)
{
    nrm_statistics statistics = {0};
    CHECK_OK(nrm_resource_statistics(pool, &statistics));
    CHECK_EQ(statistics.current_bytes, expected->current_bytes);
    CHECK_EQ(statistics.current_count, expected->current_count);
    CHECK_EQ(statistics.peak_bytes, expected->peak_bytes);
    CHECK_EQ(statistics.total_bytes, expected->total_bytes);
    CHECK_EQ(statistics.total_count, expected->total_count);
}

TEST(kept_blocks_of_streams_are_counted_exactly)
{
    enum { N = 48, N_STEPS = 6000 };
    struct streamed blocks[N] = {0};
    nrm_statistics expected = {0};
    start(0);
    nrm_stream *own[] = {new_stream(), nrm_stream_default(), new_stream(), NULL};
    uint64_t random = 3;
    for (int step = 0; step < N_STEPS; step++) {
        struct streamed *block = &blocks[next_random(&random) % N];
        if (block->ptr != NULL) {
            give_counted(block, &expected);
        }
        else {
            block->nbytes = 1 + next_random(&random) % 8 * 700;
            block->stream = own[next_random(&random) % 4];
            take_counted(block, &expected);
        }
        if (step % 500 == 250) {
            CHECK_OK(nrm_resource_trim(pool, 0, NULL));
        }
        check_counted(&expected);
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
