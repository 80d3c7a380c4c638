/* Tracking: the blocks that live through it, and where they were asked for. */
#include <string.h>

#include "adaptors/tracking.h"
#include "base/bits.h"
#include "log_rows.h"
#include "simulator.h"
#include "workers.h"

#ifdef __GLIBC__
#define HAS_STACKS 1
#else
#define HAS_STACKS 0
#endif

/* A tracker over `upstream`, whose reference it takes. */
static nrm_resource *
track(nrm_resource *upstream, bool capture_stacks)
{
    nrm_tracking_options options = NRM_OPTIONS(nrm_tracking_options);
    nrm_resource *mr = NULL;
    options.capture_stacks = capture_stacks;
    CHECK_OK(nrm_tracking_create(upstream, &options, &mr));
    nrm_resource_release(upstream);
    return mr;
}

static size_t
tracked(nrm_resource *mr)
{
    size_t nbytes = 99;
    CHECK_OK(nrm_tracking_get_allocated(mr, &nbytes));
    mr->ops->check(mr);
    return nbytes;
}

static char *
describe(nrm_resource *mr)
{
    static char text[100000];
    size_t size = 0;
    CHECK_OK(nrm_tracking_describe(mr, text, sizeof text, &size));
    CHECK_EQ(size, strlen(text) + 1);
    return text;
}

TEST(live_blocks_are_known_by_address_and_size)
{
    char line[64];
    nrm_resource *mr = track(host_pool(), false);
    CHECK_STR_EQ(describe(mr), "");
    void *a = allocate(mr, 1000), *b = allocate(mr, 100000);
    CHECK_EQ(tracked(mr), 101000);
    sprintf(line, "%p: 1000 B\n", a);
    CHECK_STR_HAS(describe(mr), line);
    sprintf(line, "%p: 100000 B\n", b);
    CHECK_STR_HAS(describe(mr), line);
    CHECK(strstr(describe(mr), "callstack") == NULL);
    deallocate(mr, a);
    CHECK_STR_EQ(describe(mr), line);
    deallocate(mr, b);
    CHECK_EQ(tracked(mr), 0);
    CHECK_STR_EQ(describe(mr), "");
    nrm_resource_release(mr);
}

TEST(what_does_not_fit_is_cut_and_the_size_says_how_much_there_is)
{
    char text[8];
    size_t size = 0, whole = 0;
    nrm_resource *mr = track(host_pool(), false);
    void *ptr = allocate(mr, 1000);
    CHECK_OK(nrm_tracking_describe(mr, NULL, 0, &whole));
    CHECK_EQ(whole, strlen(describe(mr)) + 1);
    CHECK_OK(nrm_tracking_describe(mr, text, sizeof text, &size));
    CHECK_EQ(size, whole);
    CHECK_EQ(strlen(text), sizeof text - 1);
    CHECK_EQ(strncmp(describe(mr), text, sizeof text - 1), 0);
    deallocate(mr, ptr);
    nrm_resource_release(mr);
}

TEST(the_stack_of_a_block_is_that_of_its_allocation)
{
    nrm_resource *mr = track(host_pool(), true);
    void *ptr = allocate(mr, 1000);
    if (HAS_STACKS) {
        CHECK_STR_HAS(describe(mr), ": 1000 B : callstack:\n#0 in 0x");
        CHECK_STR_HAS(describe(mr), "test_tracking");
    }
    nrm__tracking_annotate(mr, ptr, "in the program\n");
    nrm__tracking_annotate(mr, ptr, "said already\n");
    CHECK_STR_HAS(describe(mr), ": callstack:\nin the program\n");
    CHECK(strstr(describe(mr), "said already") == NULL);
    nrm__tracking_annotate(mr, (char *)ptr + 64, "nowhere\n");
    REQUIRE_OK(nrm_resource_reallocate(mr, ptr, 1010, 0, NULL, &ptr));
    CHECK_EQ(tracked(mr), 1010);
    deallocate(mr, ptr);
    nrm_resource_release(mr);
}

TEST(a_program_is_told_to_all_trackers_that_capture_and_to_no_other)
{
    nrm_resource *low = track(host_pool(), true);
    nrm_resource *mr = NULL;
    CHECK_OK(nrm_statistics_create(low, &mr));
    nrm_resource_release(low);
    nrm_resource *top = mr = track(mr, false);
    void *ptr = allocate(top, 100);
    CHECK((top->flags & NRM__OPS_STACKS) != 0);
    nrm__tracking_annotate(top, ptr, "here\n");
    CHECK_STR_HAS(describe(low), "here\n");
    CHECK(strstr(describe(top), "here\n") == NULL);
    CHECK((low->upstream->flags & NRM__OPS_STACKS) == 0);
    deallocate(top, ptr);
    nrm_resource_release(top);
}

TEST(only_what_came_through_it_counts)
{
    nrm_resource *pool = host_pool();
    nrm_resource_retain(pool);
    nrm_resource *mr = track(pool, false);
    void *before = allocate(pool, 1000), *through = allocate(mr, 500);
    deallocate(mr, before); /* of the pool all the same */
    CHECK_EQ(tracked(mr), 500);
    deallocate(pool, through); /* it does not hear of this */
    CHECK_EQ(tracked(mr), 500);
    CHECK_STATUS(nrm_resource_deallocate(mr, through, 0, NULL), NRM_NOT_OWNED);
    CHECK_STATUS(nrm_tracking_get_allocated(pool, &(size_t){0}), NRM_INVALID_VALUE);
    CHECK_STR_HAS(nrm_last_error()->message, "PoolMemoryResource");
    nrm_resource_release(mr);
    nrm_resource_release(pool);
}

TEST(a_request_that_is_refused_leaves_nothing)
{
    void *ptr = NULL;
    nrm_resource *mr = track(pool_over(host_source(), 4 * NRM__MIB), true);
    CHECK_STATUS(nrm_resource_allocate(mr, 8 * NRM__MIB, 0, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK_EQ(tracked(mr), 0);
    ptr = allocate(mr, 1000);
    CHECK_STATUS(nrm_resource_reallocate(mr, ptr, 8 * NRM__MIB, 0, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK_EQ(tracked(mr), 1000);
    deallocate(mr, ptr);
    nrm_resource_release(mr);
}

#define N_WORKERS 4

static void
come_and_go(void *argument)
{
    void *ptrs[16] = {NULL};
    for (size_t i = 0; i < 4000 / SLOW; i++) {
        void **place = &ptrs[i * 7 % 16];
        if (*place != NULL) {
            deallocate(argument, *place);
        }
        *place = allocate(argument, 64 + i % 9 * 1000);
    }
    for (size_t i = 0; i < 16; i++) {
        if (ptrs[i] != NULL) {
            deallocate(argument, ptrs[i]);
        }
    }
}

TEST(threads_share_it)
{
    struct worker workers[N_WORKERS];
    nrm_resource *mr = track(host_pool(), true);
    for (int i = 0; i < N_WORKERS; i++) {
        worker_start(&workers[i]);
        worker_ask(&workers[i], come_and_go, mr);
    }
    for (int i = 0; i < 10; i++) {
        size_t size = 0;
        CHECK_OK(nrm_tracking_describe(mr, NULL, 0, &size));
        CHECK_GT(size, 0);
    }
    for (int i = 0; i < N_WORKERS; i++) {
        worker_wait(&workers[i]);
        worker_end(&workers[i]);
    }
    CHECK_EQ(tracked(mr), 0);
    nrm_resource_release(mr);
}

/* ---- blocks that go back later ---- */

/* What a device may still read in place goes back past the adaptors on its way: all of
   them hear of it at once. */
TEST(adaptors_hear_of_a_block_that_goes_back_later)
{
    char path[64];
    size_t booked = 99, limit_nbytes;
    nrm_CUcontext context;
    nrm_resource *pinned = NULL, *limiting = NULL, *route = NULL;
    nrm_limiting_options limit = NRM_OPTIONS(nrm_limiting_options);
    nrm_route_options options = NRM_OPTIONS(nrm_route_options);
    simulator_start(NULL);
    sim.set_attribute(0, NRM_CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, 1);
    CHECK_EQ(cuda.cuInit(0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuDevicePrimaryCtxRetain(&context, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuCtxSetCurrent(context), NRM_CUDA_SUCCESS);
    limit.allocation_limit = NRM__MIB;
    nrm_resource *pool = host_pool();
    REQUIRE_OK(nrm_limiting_create(pool, &limit, &limiting));
    nrm_resource *tracking = track(limiting, false);
    nrm_resource *small = log_over(tracking, log_path(path, "later"));
    REQUIRE_OK(nrm_pinned_create(NULL, &pinned));
    options.large = pinned = pool_over(pinned, 0);
    options.small = options.rescue = small;
    options.threshold = 65536;
    REQUIRE_OK(nrm_route_create(&options, &route));
    void *large = allocate(route, 100000), *ptr = allocate(route, 1000);
    CHECK_EQ(tracked(tracking), 1000);
    deallocate(route, ptr);
    CHECK_EQ(tracked(tracking), 0);
    CHECK_OK(nrm_limiting_get(limiting, &booked, &limit_nbytes));
    CHECK_EQ(booked, 0);
    CHECK_EQ(live_nbytes(limiting), 0);
    CHECK_OK(nrm_logging_flush(small));
    struct rows rows = read_rows(path);
    CHECK_EQ(rows.n, 2);
    CHECK_STR_EQ(rows.rows[1].action, "free");
    deallocate(route, large);
    CHECK_OK(nrm_resource_trim(route, 0, NULL));
    free(rows.rows);
    unlink(path);
    nrm_resource_release(route);
    nrm_resource_release(pinned);
    nrm_resource_release(small);
    nrm_resource_release(pool);
    simulator_check_faults();
}

CHECK_MAIN
