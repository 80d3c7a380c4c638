/* Safe reuse on the simulated driver: what the GPU may still touch is not handed out
   again, not unmapped and not unregistered; what it is done with comes back. */
#include <string.h>

#include "base/bits.h"
#include "copies.h"
#include "core/exchange.h"
#include "core/hooks.h"
#include "nrm/options.h"
#include "os/system.h"
#include "pools/pool.h"

#define BLOCK COPIES_MOST

/* ---- a program that copies from and into blocks of a pool ---- */

struct program {
    struct copies copies;
    nrm_resource *pool;
};

static struct program
begin(const struct nrm_cudasim_config *config, const struct copies_kind *kind,
      const nrm_pool_options *options)
{
    struct program program = {.copies = copies_begin_with(config, kind)};
    nrm__warnings_rearm();
    CHECK_OK(nrm_pool_create(program.copies.source, options, &program.pool));
    return program;
}

static void
end(struct program *program)
{
    copies_end(&program->copies, program->pool);
}

static void
copy_from_device(struct program *program, void *ptr)
{
    CHECK_EQ(cuda.cuMemcpyDtoHAsync(ptr, program->copies.device, BLOCK,
                                    program->copies.stream),
             NRM_CUDA_SUCCESS);
}

/* ---- the promise ---- */

TEST_EACH(a_block_with_a_copy_in_flight_is_not_handed_out, copies_kinds)
{
    struct program program = begin(NULL, row, NULL);
    void *first = allocate(program.pool, BLOCK), *others[6];
    memset(first, 1, BLOCK);
    copies_hold(&program.copies);
    copies_to_device(&program.copies, first, BLOCK);
    deallocate(program.pool, first);
    for (int i = 0; i < 6; i++) {
        others[i] = allocate(program.pool, BLOCK);
        CHECK(others[i] != first);
        memset(others[i], 2, BLOCK);
    }
    copies_let_go(&program.copies);
    CHECK(copies_arrived(&program.copies, 1, BLOCK));
    for (int i = 0; i < 6; i++) {
        deallocate(program.pool, others[i]);
    }
    /* With the GPU done it comes back: one of the blocks that fill what is reserved. */
    void *refill[16];
    bool again = false;
    for (int i = 0; i < 16; i++) {
        refill[i] = allocate(program.pool, BLOCK);
        again = again || refill[i] == first;
    }
    CHECK(again);
    for (int i = 0; i < 16; i++) {
        deallocate(program.pool, refill[i]);
    }
    end(&program);
}

TEST_EACH(the_same_program_with_immediate_reuse_shows_wrong_bytes, copies_kinds)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    options.reuse = NRM_REUSE_IMMEDIATE;
    struct program program = begin(NULL, row, &options);
    void *first = allocate(program.pool, BLOCK);
    memset(first, 1, BLOCK);
    copies_hold(&program.copies);
    copies_to_device(&program.copies, first, BLOCK);
    deallocate(program.pool, first);
    void *second = allocate(program.pool, BLOCK);
    CHECK(second == first);
    memset(second, 2, BLOCK);
    copies_let_go(&program.copies);
    CHECK(!copies_arrived(&program.copies, 1, BLOCK));
    deallocate(program.pool, second);
    end(&program);
}

TEST_EACH(a_copy_to_the_host_does_not_write_over_a_later_block, copies_kinds)
{
    struct program program = begin(NULL, row, NULL);
    void *first = allocate(program.pool, BLOCK);
    copies_hold(&program.copies);
    copy_from_device(&program, first);
    deallocate(program.pool, first);
    unsigned char *second = allocate(program.pool, BLOCK);
    memset(second, 9, BLOCK);
    copies_let_go(&program.copies);
    CHECK(second[0] == 9 && memcmp(second, second + 1, BLOCK - 1) == 0);
    deallocate(program.pool, second);
    end(&program);
}

TEST_EACH(an_idle_gpu_gives_the_same_block_back, copies_kinds)
{
    struct program program = begin(NULL, row, NULL);
    void *first = allocate(program.pool, BLOCK);
    deallocate(program.pool, first);
    for (int i = 0; i < 100; i++) {
        void *ptr = allocate(program.pool, BLOCK);
        CHECK(ptr == first);
        deallocate(program.pool, ptr);
    }
    end(&program);
}

TEST(small_blocks_rotate_through_about_an_epoch_of_memory)
{
    struct program program = begin(NULL, &copies_kinds[0], NULL);
    uintptr_t lowest = UINTPTR_MAX, highest = 0;
    uint64_t before = sim.call_count("cuCtxRecordEvent");
    for (int i = 0; i < 1000; i++) {
        void *ptr = allocate(program.pool, 65536);
        lowest = nrm__min(lowest, (uintptr_t)ptr);
        highest = nrm__max(highest, (uintptr_t)ptr);
        deallocate(program.pool, ptr);
    }
    CHECK_LE(highest - lowest, 2 * NRM__MIB);
    uint64_t records = sim.call_count("cuCtxRecordEvent") - before;
    CHECK_GE(records, 30u);
    CHECK_LE(records, 80u);
    end(&program);
}

TEST_EACH(freeing_calls_the_driver_never, copies_kinds)
{
    struct program program = begin(NULL, row, NULL);
    void *pooled = allocate(program.pool, BLOCK),
         *bare = allocate(program.copies.source, BLOCK);
    copies_hold(&program.copies);
    copies_to_device(&program.copies, pooled, BLOCK);
    copy_from_device(&program, bare);
    uint64_t before = sim.call_count(NULL);
    deallocate(program.pool, pooled);
    CHECK_OK(nrm_resource_deallocate(program.copies.source, bare, BLOCK, NULL));
    /* The background thread may query, and does nothing else. */
    uint64_t queries = sim.call_count("cuEventQuery");
    nrm__sleep_ns(30000000);
    CHECK_LE(sim.call_count(NULL) - before,
             3 * (1 + sim.call_count("cuEventQuery") - queries));
    CHECK_EQ(sim.call_count("cuMemHostUnregister"), 0u);
    CHECK_EQ(sim.call_count("cuMemFree"), 0u);
    CHECK_EQ(sim.call_count("cuCtxRecordEvent"), 0u);
    copies_let_go(&program.copies);
    end(&program);
}

TEST_EACH(a_pool_that_dies_unmaps_nothing_that_is_in_use, copies_kinds)
{
    struct program program = begin(NULL, row, NULL);
    void *ptr = allocate(program.pool, BLOCK);
    memset(ptr, 7, BLOCK);
    copies_hold(&program.copies);
    copies_to_device(&program.copies, ptr, BLOCK);
    deallocate(program.pool, ptr);
    nrm_resource_release(program.pool);
    CHECK_EQ(nrm__retired_drain(1000000), 0u);
    CHECK(!nrm__retired_is_empty());
    copies_let_go(&program.copies);
    CHECK(copies_arrived(&program.copies, 7, BLOCK));
    CHECK_OK(nrm_pool_create(program.copies.source, NULL, &program.pool));
    end(&program);
}

TEST_EACH(trim_gives_nothing_back_that_is_in_use, copies_kinds)
{
    struct program program = begin(NULL, row, NULL);
    size_t given = 1;
    void *ptr = allocate(program.pool, BLOCK);
    memset(ptr, 7, BLOCK);
    copies_hold(&program.copies);
    copies_to_device(&program.copies, ptr, BLOCK);
    deallocate(program.pool, ptr);
    CHECK_OK(nrm_resource_trim(program.pool, 0, &given));
    CHECK_EQ(given, 0u);
    copies_let_go(&program.copies);
    CHECK(copies_arrived(&program.copies, 7, BLOCK));
    CHECK_OK(nrm_resource_trim(program.pool, 0, &given));
    CHECK_GT(given, 0u);
    CHECK_EQ(reserved_nbytes(program.pool), 0);
    end(&program);
}

TEST_EACH(a_large_block_that_lies_idle_goes_back_when_the_gpu_is_done, copies_kinds)
{
    REQUIRE_OK(nrm_option_set(NRM_OPT_IDLE_LIMIT, "50 MiB"));
    struct program program = begin(NULL, row, NULL);
    void *large = allocate(program.pool, 100 * NRM__MIB);
    copies_hold(&program.copies);
    copies_to_device(&program.copies, large, BLOCK);
    deallocate(program.pool, large);
    deallocate(program.pool, allocate(program.pool, BLOCK));
    CHECK_GE(reserved_nbytes(program.pool), 100 * (int64_t)NRM__MIB);
    copies_let_go(&program.copies);
    deallocate(program.pool, allocate(program.pool, BLOCK));
    deallocate(program.pool, allocate(program.pool, BLOCK));
    CHECK_LT(reserved_nbytes(program.pool), 100 * (int64_t)NRM__MIB);
    CHECK(nrm__retired_is_empty());
    end(&program);
    REQUIRE_OK(nrm_option_set(NRM_OPT_IDLE_LIMIT, "0 B"));
}

TEST_EACH(a_cut_off_tail_waits_for_the_gpu_too, copies_kinds)
{
    struct program program = begin(NULL, row, NULL);
    void *ptr = allocate(program.pool, BLOCK), *other;
    memset(ptr, 3, BLOCK);
    copies_hold(&program.copies);
    copies_to_device(&program.copies, ptr, BLOCK);
    REQUIRE_OK(nrm_resource_reallocate(program.pool, ptr, BLOCK / 4, 0, NULL, &ptr));
    other = allocate(program.pool, BLOCK / 2);
    memset(other, 4, BLOCK / 2);
    copies_let_go(&program.copies);
    CHECK(copies_arrived(&program.copies, 3, BLOCK));
    deallocate(program.pool, ptr);
    deallocate(program.pool, other);
    end(&program);
}

/* ---- devices ---- */

TEST_EACH(every_active_device_is_asked, copies_kinds)
{
    struct nrm_cudasim_config config = simulator_config();
    config.devices = 2;
    struct program program = begin(&config, row, NULL), second = program;
    void *ptr = allocate(program.pool, BLOCK), *other;
    memset(ptr, 5, BLOCK);
    copies_start_on(&second.copies, 1); /* activated after the pool has grown */
    copies_hold(&second.copies);
    copies_to_device(&second.copies, ptr, BLOCK);
    CHECK_EQ(cuda.cuCtxSetCurrent(program.copies.context), NRM_CUDA_SUCCESS);
    deallocate(program.pool, ptr);
    for (int i = 0; i < 4; i++) {
        other = allocate(program.pool, BLOCK);
        CHECK(other != ptr);
        memset(other, 6, BLOCK);
        deallocate(program.pool, other);
    }
    CHECK_EQ(cuda.cuCtxSetCurrent(second.copies.context), NRM_CUDA_SUCCESS);
    copies_let_go(&second.copies);
    CHECK(copies_arrived(&second.copies, 5, BLOCK));
    CHECK_EQ(cuda.cuCtxSetCurrent(program.copies.context), NRM_CUDA_SUCCESS);
    end(&program);
}

TEST(the_callers_context_is_left_as_it_was)
{
    struct nrm_cudasim_config config = simulator_config();
    config.devices = 2;
    struct program program = begin(&config, &copies_kinds[0], NULL), second = program;
    nrm_CUcontext current;
    copies_start_on(&second.copies, 1);
    for (int i = 0; i < 20; i++) {
        deallocate(program.pool, allocate(program.pool, BLOCK));
    }
    CHECK_EQ(cuda.cuCtxGetCurrent(&current), NRM_CUDA_SUCCESS);
    CHECK(current == second.copies.context);
    CHECK_EQ(cuda.cuCtxSetCurrent(NULL), NRM_CUDA_SUCCESS);
    deallocate(program.pool, allocate(program.pool, 100 * NRM__MIB));
    CHECK_EQ(cuda.cuCtxGetCurrent(&current), NRM_CUDA_SUCCESS);
    CHECK(current == NULL);
    end(&program);
}

/* ---- limits ---- */

TEST(a_full_pool_says_what_it_waits_for)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    options.maximum_nbytes = 2 * BLOCK;
    struct program program = begin(NULL, &copies_kinds[0], &options);
    void *first = allocate(program.pool, BLOCK),
         *second = allocate(program.pool, BLOCK);
    void *third = NULL;
    copies_hold(&program.copies);
    copies_to_device(&program.copies, first, BLOCK);
    deallocate(program.pool, first);
    CHECK_STATUS(nrm_resource_allocate(program.pool, BLOCK, 0, NULL, &third),
                 NRM_OUT_OF_MEMORY);
    CHECK_STR_HAS(nrm_last_error()->message, "2 MiB freed but not done on the GPU");
    copies_let_go(&program.copies);
    REQUIRE_OK(nrm_resource_allocate(program.pool, BLOCK, 0, NULL, &third));
    CHECK(third == first);
    deallocate(program.pool, second);
    deallocate(program.pool, third);
    end(&program);
}

TEST(on_exhausted_wait_waits_as_long_as_it_takes)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    pthread_t thread;
    options.maximum_nbytes = BLOCK;
    options.on_exhausted = NRM_ON_EXHAUSTED_WAIT;
    struct program program = begin(NULL, &copies_kinds[0], &options);
    void *first = allocate(program.pool, BLOCK), *second = NULL;
    copies_hold(&program.copies);
    copies_to_device(&program.copies, first, BLOCK);
    deallocate(program.pool, first);
    pthread_create(&thread, NULL, simulator_release_later, program.copies.stream);
    CHECK_OK(nrm_resource_allocate(program.pool, BLOCK, 0, NULL, &second));
    CHECK(second == first);
    pthread_join(thread, NULL);
    deallocate(program.pool, second);
    end(&program);
}

TEST(an_endless_kernel_makes_one_allocation_wait)
{
    struct program program = begin(NULL, &copies_kinds[0], NULL);
    uint64_t longest = 0, total = nrm__clock_ns();
    copies_hold(&program.copies);
    void *ptr = allocate(program.pool, BLOCK);
    copies_to_device(&program.copies, ptr, BLOCK);
    deallocate(program.pool, ptr);
    for (int i = 0; i < 60; i++) {
        uint64_t start = nrm__clock_ns();
        ptr = allocate(program.pool, BLOCK);
        longest = nrm__max(longest, nrm__clock_ns() - start);
        deallocate(program.pool, ptr);
    }
    total = nrm__clock_ns() - total;
    struct nrm__epoch_counts counts;
    nrm__epoch_counts(&counts);
    CHECK_LE(counts.pending, 8u);
    CHECK_MSG(total < 2000000000, "60 allocations took %.0f ms, the longest %.0f",
              (double)total / 1e6, (double)longest / 1e6);
    copies_let_go(&program.copies);
    end(&program);
}

/* A wait takes half of what one turn takes the GPU, to which Valgrind adds the copy. */
#ifdef NRM_VALGRIND
enum { TURN_NS = 10000000, WAIT_NS = TURN_NS };
#else
enum { TURN_NS = 10000000, WAIT_NS = TURN_NS / 2 };
#endif

TEST(a_gpu_slower_than_the_program_makes_it_wait_and_memory_stays_bounded)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    options.wait_limit_ns = WAIT_NS;
    struct program program = begin(NULL, &copies_kinds[0], &options);
    for (int i = 0; i < 150; i++) {
        void *ptr = allocate(program.pool, BLOCK);
        CHECK_EQ(cuda.cuLaunchHostFunc(program.copies.stream, simulator_sleep,
                                       (void *)(uintptr_t)TURN_NS),
                 NRM_CUDA_SUCCESS);
        copies_to_device(&program.copies, ptr, BLOCK);
        deallocate(program.pool, ptr);
    }
    CHECK_LE(reserved_nbytes(program.pool), 192 * (int64_t)NRM__MIB);
    CHECK_EQ(cuda.cuStreamSynchronize(program.copies.stream), NRM_CUDA_SUCCESS);
    end(&program);
}

/* ---- drivers without a record, captures, failures ---- */

TEST(without_cuCtxRecordEvent_an_epoch_closes_by_a_synchronisation)
{
    struct nrm_cudasim_config config = simulator_config();
    config.driver = 12040;
    struct program program = begin(&config, &copies_kinds[0], NULL);
    CHECK_STR_HAS(nrm__cuda_missing_symbols(), "cuCtxRecordEvent");
    void *first = allocate(program.pool, BLOCK);
    memset(first, 1, BLOCK);
    copies_to_device(&program.copies, first, BLOCK);
    deallocate(program.pool, first);
    void *second = allocate(program.pool, BLOCK);
    memset(second, 2, BLOCK);
    CHECK(copies_arrived(&program.copies, 1, BLOCK));
    CHECK_GE(sim.call_count("cuCtxSynchronize"), 1u);
    deallocate(program.pool, second);
    end(&program);
}

static const struct mode_case {
    const char *name;
    int mode;
} modes[] = {{"global", 0}, {"thread-local", 1}, {"relaxed", 2}};

TEST_EACH(a_capture_on_a_blocking_stream_survives_allocations, modes)
{
    struct program program = begin(NULL, &copies_kinds[0], NULL);
    void *ptr = allocate(program.pool, BLOCK);
    deallocate(program.pool, ptr);
    nrm_CUstream stream = simulator_begin_capture(0, row->mode);
    uint64_t before = sim.call_count("cuCtxRecordEvent");
    for (int i = 0; i < 5; i++) {
        ptr = allocate(program.pool,
                       40 * NRM__MIB); /* grows: parks, but records nothing */
        deallocate(program.pool, ptr);
    }
    CHECK_EQ(sim.call_count("cuCtxRecordEvent"), before);
    CHECK_EQ(simulator_end_capture(stream), NRM_CUDA_SUCCESS);
    ptr = allocate(program.pool, BLOCK);
    CHECK_GT(sim.call_count("cuCtxRecordEvent"), before);
    deallocate(program.pool, ptr);
    end(&program);
}

TEST(a_capture_that_cannot_be_seen_costs_one_warning_and_ends_the_records)
{
    char text[400];
    struct program program = begin(NULL, &copies_kinds[0], NULL);
    void *ptr = allocate(program.pool, BLOCK);
    deallocate(program.pool, ptr);
    nrm_CUstream stream = simulator_begin_capture(1, 0); /* non-blocking */
    deallocate(program.pool, allocate(program.pool, BLOCK));
    CHECK_NE(simulator_end_capture(stream), NRM_CUDA_SUCCESS);
    REQUIRE(nrm__warning_take(text, sizeof text));
    CHECK_STR_HAS(text, "capture");
    uint64_t before = sim.call_count("cuCtxRecordEvent");
    stream = simulator_begin_capture(1, 0);
    deallocate(program.pool, allocate(program.pool, BLOCK));
    CHECK_EQ(simulator_end_capture(stream), NRM_CUDA_SUCCESS);
    CHECK_EQ(sim.call_count("cuCtxRecordEvent"), before);
    CHECK(!nrm__warning_take(text, sizeof text));
    /* What is parked comes back with the context. */
    nrm_CUdevice device;
    CHECK_EQ(cuda.cuDeviceGet(&device, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuDevicePrimaryCtxReset(device), NRM_CUDA_SUCCESS);
    nrm_resource_release(program.pool);
    nrm_resource_release(program.copies.source);
    CHECK_OK(nrm__driver_exchange("simulator"));
}

TEST(a_failing_record_hands_nothing_out)
{
    struct program program = begin(NULL, &copies_kinds[0], NULL);
    void *first = allocate(program.pool, BLOCK);
    copies_hold(&program.copies);
    copies_to_device(&program.copies, first, BLOCK);
    deallocate(program.pool, first);
    CHECK_EQ(sim.fail("cuCtxRecordEvent", 1, NRM_CUDA_ERROR_OUT_OF_MEMORY, 3), 0);
    for (int i = 0; i < 6; i++) {
        void *ptr = allocate(program.pool, BLOCK);
        CHECK(ptr != first);
        deallocate(program.pool, ptr);
    }
    copies_let_go(&program.copies);
    end(&program);
}

TEST(a_sticky_error_ends_the_reuse_until_a_reset)
{
    char text[400];
    void *ptr = NULL;
    struct program program = begin(NULL, &copies_kinds[0], NULL);
    nrm_CUdevice device;
    void *first = allocate(program.pool, BLOCK);
    deallocate(program.pool, first);
    CHECK_EQ(sim.set_sticky(0, NRM_CUDA_ERROR_ILLEGAL_ADDRESS), 0);
    CHECK_STATUS(nrm_resource_allocate(program.pool, BLOCK, 0, NULL, &ptr),
                 NRM_DEVICE_LOST);
    CHECK_STATUS(nrm_resource_allocate(program.pool, BLOCK, 0, NULL, &ptr),
                 NRM_DEVICE_LOST);
    REQUIRE(nrm__warning_take(text, sizeof text));
    CHECK_STR_HAS(text, "ILLEGAL_ADDRESS");
    CHECK(!nrm__warning_take(text, sizeof text));
    CHECK_EQ(cuda.cuDeviceGet(&device, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuDevicePrimaryCtxReset(device), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuDevicePrimaryCtxRetain(&program.copies.context, device),
             NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuCtxSetCurrent(program.copies.context), NRM_CUDA_SUCCESS);
    REQUIRE_OK(nrm_resource_allocate(program.pool, BLOCK, 0, NULL, &ptr));
    deallocate(program.pool, ptr);
    end(&program);
}

TEST(after_a_reset_memory_is_page_locked_anew_and_live_bytes_are_kept)
{
    struct program program = begin(NULL, &copies_kinds[0], NULL);
    nrm_CUdevice device;
    void *live = allocate(program.pool, BLOCK), *freed = allocate(program.pool, BLOCK);
    memset(live, 42, BLOCK);
    copies_hold(&program.copies);
    copies_to_device(&program.copies, freed, BLOCK);
    deallocate(program.pool, freed);
    CHECK(is_page_locked(live));
    CHECK_EQ(cuda.cuDeviceGet(&device, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuDevicePrimaryCtxReset(device), NRM_CUDA_SUCCESS);
    void *ptr = allocate(program.pool, BLOCK);
    CHECK(is_page_locked(ptr));
    CHECK(is_page_locked(live));
    CHECK_EQ(((unsigned char *)live)[BLOCK - 1], 42);
    deallocate(program.pool, ptr);
    deallocate(program.pool, live);
    CHECK_EQ(cuda.cuDevicePrimaryCtxRetain(&program.copies.context, device),
             NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuCtxSetCurrent(program.copies.context), NRM_CUDA_SUCCESS);
    end(&program);
}

/* ---- threads ---- */

#define N_THREADS 4

static struct program shared;

static void *
churn_and_copy(void *seed)
{
    uint64_t state = (uintptr_t)seed;
    nrm_CUstream stream;
    nrm_CUdeviceptr device;
    static unsigned char copies[N_THREADS + 1][65536];
    unsigned char *copy = copies[(uintptr_t)seed];
    CHECK_EQ(cuda.cuCtxSetCurrent(shared.copies.context), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamCreate(&stream, 1), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemAlloc(&device, 65536), NRM_CUDA_SUCCESS);
    for (int i = 0; i < 400; i++) {
        unsigned char byte = (unsigned char)next_random(&state);
        void *ptr = allocate(shared.pool, 65536);
        memset(ptr, byte, 65536);
        CHECK_EQ(cuda.cuMemcpyHtoDAsync(device, ptr, 65536, stream), NRM_CUDA_SUCCESS);
        CHECK_OK(nrm_resource_deallocate(shared.pool, ptr, 0, NULL));
        if (i % 8 == 0) {
            CHECK_EQ(cuda.cuStreamSynchronize(stream), NRM_CUDA_SUCCESS);
            CHECK_EQ(cuda.cuMemcpyDtoH(copy, device, 65536), NRM_CUDA_SUCCESS);
            CHECK(copy[0] == byte && memcmp(copy, copy + 1, 65535) == 0);
        }
    }
    CHECK_EQ(cuda.cuStreamSynchronize(stream), NRM_CUDA_SUCCESS);
    return NULL;
}

TEST_EACH(threads_that_copy_and_free_see_their_own_bytes, copies_kinds)
{
    pthread_t threads[N_THREADS];
    shared = begin(NULL, row, NULL);
    for (uintptr_t i = 0; i < N_THREADS; i++) {
        pthread_create(&threads[i], NULL, churn_and_copy, (void *)(i + 1));
    }
    for (int i = 0; i < N_THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    end(&shared);
}

/* ---- fork ---- */

static void *inherited;

static void
allocate_in_child(void)
{
    void *ptr = NULL;
    uint64_t before = sim.call_count(NULL);
    CHECK_EQ(((unsigned char *)inherited)[7], 11);
    CHECK_STATUS(nrm_resource_allocate(shared.pool, BLOCK, 0, NULL, &ptr),
                 NRM_CUDA_UNAVAILABLE);
    CHECK_STR_HAS(nrm_last_error()->message, "fork");
    CHECK_STATUS(nrm_resource_allocate(shared.copies.source, BLOCK, 0, NULL, &ptr),
                 NRM_CUDA_UNAVAILABLE);
    CHECK_OK(nrm_resource_deallocate(shared.pool, inherited, 0, NULL));
    CHECK_OK(nrm_resource_trim(shared.pool, 0, NULL));
    CHECK_EQ(sim.call_count(NULL), before);
}

TEST(a_forked_child_reads_what_it_inherits_and_never_calls_the_driver)
{
    shared = begin(NULL, &copies_kinds[0], NULL);
    inherited = allocate(shared.pool, BLOCK);
    memset(inherited, 11, BLOCK);
    CHECK_IN_CHILD(allocate_in_child);
    CHECK(is_page_locked(inherited));
    deallocate(shared.pool, inherited);
    end(&shared);
}

CHECK_MAIN
