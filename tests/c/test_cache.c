/* What threads keep for themselves, one thing at a time: what a trim makes of it, how
   it gets from thread to thread, and what the short way refuses. The end of threads and
   pools, and what is counted, are in test_cache_ends.c, what happens at the same time
   in test_cache_races.c. */
#include <limits.h>
#include <string.h>

#include "base/bits.h"
#include "cached_pool.h"
#include "core/uses.h"
#include "os/system.h"
#include "pools/pool.h"
#include "simulator.h"
#include "workers.h"

#define N_WORKERS 8

/* ---- trim ---- */

TEST(a_trim_takes_what_idle_threads_keep)
{
    struct worker workers[N_WORKERS];
    struct pooled pooled = make_pool(0);
    start_workers(workers, N_WORKERS);
    for (int i = 0; i < N_WORKERS; i++) {
        worker_run(&workers[i], fill_cache, pooled.pool);
    }
    CHECK_EQ(live_nbytes(pooled.pool), 0);
    CHECK_GT(reserved_nbytes(pooled.pool), 0);
    CHECK_OK(nrm_resource_trim(pooled.pool, 0, NULL));
    CHECK_EQ(reserved_nbytes(pooled.pool), 0);
    nrm__pool_check(pooled.pool);
    end_workers(workers, N_WORKERS);
    release(&pooled);
}

TEST(a_trim_leaves_what_lives)
{
    struct worker worker;
    struct pooled pooled = make_pool(0);
    worker_start(&worker);
    unsigned char *large = allocate(pooled.pool, 100 * NRM__MIB);
    write_pattern(large, 100 * NRM__MIB, 3);
    worker_run(&worker, fill_cache, pooled.pool);
    fill_cache(pooled.pool);
    CHECK_OK(nrm_resource_trim(pooled.pool, 0, NULL));
    CHECK_EQ(n_kept(pooled.pool), 0u);
    CHECK_GE(reserved_nbytes(pooled.pool), live_nbytes(pooled.pool));
    CHECK_LT(reserved_nbytes(pooled.pool), live_nbytes(pooled.pool) + 128 * 1024);
    CHECK(has_pattern(large, 100 * NRM__MIB, 3, 100 * NRM__MIB));
    worker_run(&worker, fill_cache, pooled.pool); /* and again */
    CHECK_OK(nrm_resource_deallocate(pooled.pool, large, 0, NULL));
    CHECK_OK(nrm_resource_trim(pooled.pool, 0, NULL));
    CHECK_EQ(reserved_nbytes(pooled.pool), 0);
    worker_end(&worker);
    release(&pooled);
}

/* Threads keep up to 8 MiB each, which count as taken. */
TEST(what_threads_keep_does_not_fill_a_pool_with_a_limit)
{
    struct worker worker;
    struct pooled pooled = make_pool(24 * NRM__MIB);
    worker_start(&worker);
    worker_run(&worker, fill_cache, pooled.pool);
    fill_cache(pooled.pool);
    void *ptr = NULL;
    CHECK_OK(nrm_resource_allocate(pooled.pool, 23 * NRM__MIB, 0, NULL, &ptr));
    CHECK_OK(nrm_resource_deallocate(pooled.pool, ptr, 0, NULL));
    worker_end(&worker);
    release(&pooled);
}

/* Cells of 64 B in one chunk. */
#define CELLS_OF_CHUNK 1024

static void
keep_some_cells(void *mr)
{
    void *ptrs[100];
    for (int i = 0; i < 100; i++) {
        ptrs[i] = allocate(mr, 64);
    }
    for (int i = 0; i < 60; i++) { /* the others live as long as the pool */
        CHECK_OK(nrm_resource_deallocate(mr, ptrs[i], 0, NULL));
    }
    CHECK_GT(n_kept(mr), 30u);
}

TEST(a_full_pool_hands_out_the_cells_that_threads_keep)
{
    struct worker worker;
    struct pooled pooled = make_pool(4 * NRM__MIB);
    void *ptr;
    worker_start(&worker);
    worker_run(&worker, keep_some_cells, pooled.pool);
    size_t n_cells = 40;
    while (nrm_resource_allocate(pooled.pool, 65536, 0, NULL, &ptr) == NRM_OK) {
    }
    while (nrm_resource_allocate(pooled.pool, 64, 0, NULL, &ptr) == NRM_OK) {
        n_cells++;
    }
    CHECK_EQ(n_cells % CELLS_OF_CHUNK, 0u);
    nrm__pool_check(pooled.pool);
    worker_end(&worker);
    nrm_resource_release(pooled.pool);
    nrm_resource_release(pooled.source);
}

/* ---- blocks below 64 KiB ---- */

TEST(a_block_below_64_KiB_serves_the_next_request_of_about_its_size)
{
    struct pooled pooled = make_pool(0);
    static const size_t pairs[][2] = {
        {8193, 9216}, {16300, 15361}, {20000, 18433}, {40000, 36865}, {65535, 61441}};
    void *first = allocate(pooled.pool, 64); /* makes the short way */
    CHECK_OK(nrm_resource_deallocate(pooled.pool, first, 0, NULL));
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        void *ptr = allocate(pooled.pool, pairs[i][0]);
        CHECK_OK(nrm_resource_deallocate(pooled.pool, ptr, 0, NULL));
        CHECK_EQ(allocate(pooled.pool, pairs[i][1]), ptr);
        CHECK_EQ(live_nbytes(pooled.pool), (int64_t)pairs[i][1]);
        CHECK_OK(nrm_resource_deallocate(pooled.pool, ptr, 0, NULL));
    }
    release(&pooled);
}

TEST(a_pool_with_a_limit_cuts_such_blocks_to_measure)
{
    struct pooled pooled = make_pool(64 * NRM__MIB);
    void *ptrs[4];
    for (int i = 0; i < 4; i++) {
        ptrs[i] = allocate(pooled.pool, 33 * 1024);
    }
    nrm_block_info info;
    REQUIRE_OK(nrm_block_find(ptrs[0], &info));
    CHECK_EQ(info.capacity, 33u * 1024);
    nrm_resource_release(info.resource);
    for (int i = 0; i < 4; i++) {
        CHECK_OK(nrm_resource_deallocate(pooled.pool, ptrs[i], 0, NULL));
    }
    release(&pooled);
}

/* How many blocks of a size this thread keeps. */
static size_t
n_kept_of(nrm_resource *pool, size_t nbytes)
{
    struct nrm__cache *cache;
    struct nrm__slot *slot = nrm__cache_enter_slot(pool, &cache);
    if (!CHECK(slot != NULL)) {
        return 0;
    }
    size_t n = nrm__cache_set_of(slot->magazines, nbytes, 0)->n;
    nrm__cache_leave(cache);
    return n;
}

TEST(blocks_of_a_size_come_and_go_by_halves)
{
    struct pooled pooled = make_pool(0);
    enum { N = 200, NBYTES = 32 * 1024, ALL = NRM__CACHE_WAYS, HALF = ALL / 2 };
    void *ptrs[N];
    void *first = allocate(pooled.pool, 64);
    ptrs[0] = allocate(pooled.pool, NBYTES);
    CHECK_EQ(n_kept_of(pooled.pool, NBYTES), (size_t)HALF);
    for (int i = 1; i < N; i++) {
        ptrs[i] = allocate(pooled.pool, NBYTES);
        CHECK_LE(n_kept_of(pooled.pool, NBYTES), (size_t)HALF);
        CHECK_EQ(live_nbytes(pooled.pool), 64 + (int64_t)(i + 1) * NBYTES);
    }
    nrm__pool_check(pooled.pool);
    for (int i = 0; i < N; i++) {
        size_t before = n_kept_of(pooled.pool, NBYTES);
        CHECK_OK(nrm_resource_deallocate(pooled.pool, ptrs[i], 0, NULL));
        size_t now = n_kept_of(pooled.pool, NBYTES);
        CHECK_EQ(now, before == ALL ? (size_t)(ALL - HALF) : before + 1);
    }
    nrm__pool_check(pooled.pool);
    CHECK_OK(nrm_resource_deallocate(pooled.pool, first, 0, NULL));
    CHECK_EQ(live_nbytes(pooled.pool), 0);
    CHECK_OK(nrm_resource_trim(pooled.pool, 0, NULL));
    CHECK_EQ(reserved_nbytes(pooled.pool), 0);
    release(&pooled);
}

TEST(a_block_that_was_cut_in_place_is_kept_among_those_of_its_size)
{
    struct pooled pooled = make_pool(0);
    void *before = allocate(pooled.pool, 60000), *cut;
    nrm_block_info info;
    CHECK_OK(
        nrm_resource_reallocate(pooled.pool, before, 17 * 1024 - 1, 0, NULL, &cut));
    CHECK(cut == before);
    REQUIRE_OK(nrm_block_find(cut, &info));
    nrm_resource_release(info.resource);
    CHECK_EQ(info.capacity, 18u * 1024);
    CHECK_OK(nrm_resource_deallocate(pooled.pool, cut, 0, NULL));
    CHECK_EQ(allocate(pooled.pool, 17 * 1024), cut);
    CHECK_OK(nrm_resource_deallocate(pooled.pool, cut, 0, NULL));
    release(&pooled);
}

/* ---- from thread to thread ---- */

/* Blocks that one thread makes and another frees: what it has too many of is on the way
   back when the pool ends, or is trimmed. */
static const struct way_end {
    const char *name;
    bool trims;
} way_ends[] = {{"trimmed", true}, {"ended", false}};

TEST_EACH(what_is_on_its_way_to_another_thread_comes_back, way_ends)
{
    static const size_t sizes[] = {64, 1000, 8192, 20000};
    struct pooled pooled = make_pool(0);
    struct worker worker;
    void *ptrs[300];
    struct turn turn = {pooled.pool, ptrs, 300, 0};
    worker_start(&worker);
    for (int round = 0; round < 4; round++) {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            turn.nbytes = sizes[i];
            allocate_all(&turn);
            worker_run(&worker, free_all, &turn);
        }
    }
    nrm__pool_check(pooled.pool);
    CHECK_EQ(live_nbytes(pooled.pool), 0);
    if (row->trims) {
        CHECK_OK(nrm_resource_trim(pooled.pool, 0, NULL));
        CHECK_EQ(reserved_nbytes(pooled.pool), 0);
    }
    release(&pooled);
    worker_end(&worker);
}

/* More of them than a thread has room for: they displace each other all the time. */
TEST(more_pools_and_routes_than_slots_count_right)
{
    enum { N = 60, N_ROUNDS = 40 };
    struct routed routed[N];
    void *ptrs[N][3];
    uint64_t state = 5;
    for (int i = 0; i < N; i++) {
        routed[i] = make_route(host_source(), NRM__MIB);
    }
    for (int round = 0; round < N_ROUNDS; round++) {
        for (int i = 0; i < N; i++) {
            for (int k = 0; k < 3; k++) {
                size_t nbytes = kept_nbytes[next_random(&state) % 8];
                ptrs[i][k] =
                    allocate(k ? routed[i].route : routed[i].small.pool, nbytes);
                write_pattern(ptrs[i][k], 1, (unsigned)i);
            }
            CHECK_EQ(*(unsigned char *)ptrs[i][0], i);
        }
        for (int i = 0; i < N; i++) {
            /* Through the route: it leads to the pool. */
            for (int k = 1; k < 3; k++) {
                CHECK_EQ(*(unsigned char *)ptrs[i][k], i);
                CHECK_OK(nrm_resource_deallocate(routed[i].route, ptrs[i][k], 0, NULL));
            }
            CHECK_OK(
                nrm_resource_deallocate(routed[i].small.pool, ptrs[i][0], 0, NULL));
        }
    }
    for (int i = 0; i < N; i++) {
        nrm_statistics of_route, of_pool;
        REQUIRE_OK(nrm_resource_statistics(routed[i].route, &of_route));
        REQUIRE_OK(nrm_resource_statistics(routed[i].small.pool, &of_pool));
        CHECK_EQ(of_route.current_count, 0);
        CHECK_EQ(of_route.total_count, 2 * N_ROUNDS);
        CHECK_EQ(of_route.peak_count, 2);
        CHECK_EQ(of_pool.total_count, 3 * N_ROUNDS);
        CHECK_EQ(of_pool.peak_count, 3);
        CHECK_OK(nrm_resource_trim(routed[i].small.pool, 0, NULL));
        CHECK_EQ(reserved_nbytes(routed[i].small.pool), 0);
        release_route(&routed[i]);
    }
}

/* ---- what the short way refuses ---- */

static const struct size_case {
    const char *name;
    size_t nbytes;
} size_cases[] = {
    {"a cell of 64 B", 64},       {"a cell of 1000 B", 1000},
    {"the largest cell", 8192},   {"the smallest block", 8193},
    {"a block of 64 KiB", 65536}, {"a block of 300 kB", 300000},
};

static void
check_refused(nrm_resource *mr, const void *ptr)
{
    nrm_statistics before, after;
    CHECK_OK(nrm_resource_statistics(mr, &before));
    CHECK_STATUS(nrm_resource_deallocate(mr, (void *)(uintptr_t)ptr, 0, NULL),
                 NRM_NOT_OWNED);
    CHECK_OK(nrm_resource_statistics(mr, &after));
    CHECK_EQ(after.errors, before.errors + 1);
    after.errors = before.errors;
    CHECK_MEM_EQ(&after, &before, sizeof before);
}

TEST_EACH(wrong_frees_change_nothing, size_cases)
{
    struct routed routed = make_route(host_source(), NRM__MIB);
    struct pooled other = make_pool(0);
    nrm_resource *pool = routed.small.pool;
    fill_cache(pool);
    fill_cache(other.pool);
    unsigned char *ptr = allocate(routed.route, row->nbytes);
    unsigned char *foreign = allocate(other.pool, row->nbytes);
    write_pattern(ptr, row->nbytes, 8);
    nrm_resource *const through[] = {routed.route, pool};
    for (int i = 0; i < 2; i++) {
        for (size_t offset = 1; offset < row->nbytes; offset += 1 + offset / 64) {
            check_refused(through[i], ptr + offset);
        }
        check_refused(through[i], ptr + row->nbytes - 1);
        check_refused(through[i], foreign);
        check_refused(through[i], &routed);
        check_refused(through[i], (void *)64);
        check_refused(through[i], (void *)(UINTPTR_MAX - 63));
    }
    nrm__pool_check(pool);
    CHECK(has_pattern(ptr, row->nbytes, 8, row->nbytes));
    CHECK_OK(nrm_resource_deallocate(routed.route, ptr, 0, NULL));
    for (int i = 0; i < 2; i++) {
        check_refused(through[i], ptr);
        check_refused(through[i], ptr + 1);
        check_refused(through[i], ptr + 2);
        check_refused(through[i], ptr + 3);
        check_refused(through[i], ptr + 4);
    }
    CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    check_refused(pool, ptr); /* its memory is gone too */
    CHECK_OK(nrm_resource_deallocate(other.pool, foreign, 0, NULL));
    release(&other);
    release_route(&routed);
}

TEST_EACH(kept_blocks_read_as_zero_when_zeros_are_asked_for, size_cases)
{
    struct routed routed = make_route(host_source(), NRM__MIB);
    nrm_resource *const through[] = {routed.route, routed.small.pool};
    for (int i = 0; i < 20; i++) {
        nrm_resource *mr = through[i % 2];
        unsigned char *ptr = allocate(mr, row->nbytes);
        memset(ptr, 0xff, row->nbytes);
        CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
        void *zeros = NULL;
        REQUIRE_OK(nrm_resource_allocate_zeroed(mr, row->nbytes, 0, NULL, &zeros));
        for (size_t k = 0; k < row->nbytes; k++) {
            if (!CHECK_EQ(((unsigned char *)zeros)[k], 0)) {
                break;
            }
        }
        memset(zeros, 0xff, row->nbytes);
        CHECK_OK(nrm_resource_deallocate(mr, zeros, 0, NULL));
    }
    release_route(&routed);
}

TEST_EACH(alignments_are_kept_on_the_short_way, size_cases)
{
    static const size_t alignments[] = {1, 2, 64, 128, 256, 4096, 65536};
    struct routed routed = make_route(host_source(), NRM__MIB);
    fill_cache(routed.small.pool);
    for (size_t i = 0; i < sizeof alignments / sizeof *alignments; i++) {
        void *ptrs[8];
        for (int k = 0; k < 8; k++) {
            REQUIRE_OK(nrm_resource_allocate(routed.route, row->nbytes, alignments[i],
                                             NULL, &ptrs[k]));
            CHECK_ALIGNED(ptrs[k], alignments[i]);
        }
        for (int k = 0; k < 8; k++) {
            CHECK_OK(nrm_resource_deallocate(routed.route, ptrs[k], 0, NULL));
        }
    }
    void *ptr = NULL;
    CHECK_STATUS(nrm_resource_allocate(routed.route, row->nbytes, 3, NULL, &ptr),
                 NRM_INVALID_VALUE);
    release_route(&routed);
}

/* ---- a route to page-locked memory ---- */

static nrm_resource *
pinned_pool(void)
{
    nrm_resource *source = NULL;
    CHECK_OK(nrm_pinned_create(NULL, &source));
    return pool_over(source, 0);
}

/* 0 means the alignment of the kind, whoever serves the request. */
TEST(a_pinned_route_aligns_small_blocks_as_its_kind)
{
    simulator_start(NULL);
    struct routed routed = make_route(pinned_pool(), 65536);
    void *ptrs[32];
    for (int i = 0; i < 32;
         i++) { /* a cell of 64 B, which most are no multiple of 256 */
        REQUIRE_OK(nrm_resource_allocate(routed.route, 64, 64, NULL, &ptrs[i]));
    }
    for (int i = 0; i < 32; i++) {
        CHECK_OK(nrm_resource_deallocate(routed.route, ptrs[i], 0, NULL));
    }
    for (int i = 0; i < 32; i++) {
        REQUIRE_OK(nrm_resource_allocate(routed.route, 64, 0, NULL, &ptrs[i]));
        CHECK_ALIGNED(ptrs[i], 256);
    }
    for (int i = 0; i < 32; i++) {
        CHECK_OK(nrm_resource_deallocate(routed.route, ptrs[i], 0, NULL));
    }
    release_route(&routed);
    simulator_check_faults();
}

static void
free_in_use(void *argument)
{
    struct turn *turn = argument;
    CHECK_OK(nrm_resource_deallocate(turn->mr, turn->ptrs[0], 0, NULL));
}

/* Where a device reads ordinary memory in place, what it copies from is not handed out
   before the copy is done, though a thread would have kept it. */
TEST(ordinary_memory_that_a_device_reads_is_not_kept)
{
    struct nrm_cudasim_config config = simulator_config();
    simulator_start(&config);
    sim.set_attribute(0, NRM_CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, 1);
    nrm_CUcontext context;
    nrm_CUstream stream;
    nrm_CUdeviceptr device;
    CHECK_EQ(cuda.cuInit(0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuDevicePrimaryCtxRetain(&context, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuCtxSetCurrent(context), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamCreate(&stream, NRM_CU_STREAM_NON_BLOCKING),
             NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemAlloc(&device, 4096), NRM_CUDA_SUCCESS);
    struct routed routed = make_route(pinned_pool(), 65536);
    void *large = allocate(routed.route, 100000); /* the pool knows its context now */
    fill_cache(routed.small.pool);
    void *ptr = NULL;
    REQUIRE_OK(nrm_resource_allocate(routed.route, 1000, 64, NULL, &ptr));
    sim.hold_stream(stream);
    CHECK_EQ(cuda.cuMemcpyHtoDAsync(device, ptr, 1000, stream), NRM_CUDA_SUCCESS);
    struct turn turn = {routed.route, &ptr, 1, 1000};
    free_in_use(&turn);
    CHECK_EQ(live_nbytes(routed.small.pool), 0);
    void *others[200];
    for (int i = 0; i < 200; i++) {
        REQUIRE_OK(nrm_resource_allocate(routed.route, 1000, 64, NULL, &others[i]));
        CHECK_NE(others[i], ptr);
    }
    for (int i = 0; i < 200; i++) {
        CHECK_OK(nrm_resource_deallocate(routed.route, others[i], 0, NULL));
    }
    sim.release_stream(stream);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    CHECK_OK(nrm_resource_deallocate(routed.route, large, 0, NULL));
    CHECK_OK(nrm_resource_trim(routed.route, 0, NULL));
    CHECK_OK(nrm_resource_trim(routed.small.pool, 0, NULL));
    CHECK_EQ(reserved_nbytes(routed.small.pool), 0);
    release_route(&routed);
    CHECK_EQ(cuda.cuMemFree(device), NRM_CUDA_SUCCESS);
    simulator_check_faults();
}

/* The upper pool is the last user of the lower one, of which this thread kept cells. */
TEST(a_pool_under_a_pool_dies_with_it_though_a_thread_kept_cells_of_it)
{
    nrm_resource *source = host_source();
    nrm_resource_retain(source); /* pool_over takes one */
    nrm_resource *lower = pool_over(source, 0);
    nrm_resource_retain(lower);
    nrm_resource *upper = pool_over(lower, 0);
    CHECK_OK(nrm_resource_deallocate(lower, allocate(lower, 100), 0, NULL));
    void *ptr = allocate(upper, 100);
    nrm_resource_release(lower);
    nrm_resource_release(upper);
    nrm_block_info info;
    REQUIRE_OK(nrm_block_find(ptr, &info));
    CHECK_OK(nrm_resource_deallocate(info.resource, ptr, 0, NULL));
    nrm_resource_release(info.resource);
    (void)nrm__retired_drain(0);
    for (int i = 0; i < 1000 && live_nbytes(source) != 0; i++) {
        nrm__sleep_ns(1000000); /* the background thread may be looking at it */
    }
    CHECK_EQ(live_nbytes(source), 0);
    nrm_resource_release(source);
}

CHECK_MAIN
