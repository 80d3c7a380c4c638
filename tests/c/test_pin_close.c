/* How page-locking in place ends: when the work that may use the memory is done, by
   whoever lets go of it last, and whatever has become of driver, context and
   process. */
#include "pins.h"

#include "core/hooks.h"
#include "nrm/stream.h"

static void
await_unlocked(const char *memory)
{
    for (int i = 0; i < 200 && is_page_locked(memory); i++) {
        (void)nrm__retired_drain(UINT64_MAX);
        usleep(1000);
    }
    CHECK(!is_page_locked(memory));
}

/* ---- letting go ---- */

static void *
destroy_in_thread(void *argument)
{
    nrm_pin_destroy(argument);
    return NULL;
}

/* A thread closes a pin of `MIB` bytes while a copy from them stands still. */
struct closing {
    pthread_t thread;
    nrm_CUstream stream; /* of the copy */
    nrm_CUdeviceptr target;
};

static struct closing
closing_begin(char *memory)
{
    struct closing closing = {0};
    nrm_pin *one = pin(memory, MIB);
    CHECK_EQ(cuda.cuMemAlloc(&closing.target, MIB), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamCreate(&closing.stream, NRM_CU_STREAM_NON_BLOCKING),
             NRM_CUDA_SUCCESS);
    CHECK_EQ(sim.hold_stream(closing.stream), 0);
    CHECK_EQ(cuda.cuMemcpyHtoDAsync(closing.target, memory, MIB, closing.stream),
             NRM_CUDA_SUCCESS);
    pthread_create(&closing.thread, NULL, destroy_in_thread, one);
    usleep(20000);
    return closing;
}

/* The copy runs, and the thread is through. Nothing is freed, which would wait for the
   copies of others. */
static void
closing_end(struct closing *closing)
{
    CHECK_EQ(sim.release_stream(closing->stream), 0);
    pthread_join(closing->thread, NULL);
    CHECK_EQ(cuda.cuStreamSynchronize(closing->stream), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamDestroy(closing->stream), NRM_CUDA_SUCCESS);
}

static void
closing_free(const struct closing *closing)
{
    CHECK_EQ(cuda.cuMemFree(closing->target), NRM_CUDA_SUCCESS);
}

TEST(the_last_pin_waits_for_work_of_others_and_blocks_nobody)
{
    char *memory = start(NULL, MIB);
    struct nrm__cuda_scope scope;
    REQUIRE_OK(nrm__cuda_enter(0, &scope));
    struct closing closing = closing_begin(memory);
    CHECK_EQ(atomic_load(&n_dropped), 0);
    CHECK_EQ(sim.call_count("cuMemHostUnregister"), 0u);
    /* The driver is free meanwhile. */
    nrm_CUdeviceptr other;
    CHECK_EQ(cuda.cuMemAlloc(&other, 100), NRM_CUDA_SUCCESS);
    closing_end(&closing);
    CHECK_EQ(atomic_load(&n_dropped), 1);
    CHECK(!is_page_locked(memory));
    CHECK_EQ(cuda.cuMemFree(other), NRM_CUDA_SUCCESS);
    closing_free(&closing);
    nrm__cuda_leave(&scope);
    stop(memory, MIB);
}

TEST(memory_that_waits_to_be_unlocked_can_be_pinned_again)
{
    char *memory = start(NULL, MIB);
    struct nrm__cuda_scope scope;
    REQUIRE_OK(nrm__cuda_enter(0, &scope));
    struct closing closing = closing_begin(memory);
    nrm_pin *two = pin(memory, MIB);
    closing_end(&closing);
    CHECK(is_page_locked(memory));
    CHECK_EQ(sim.call_count("cuMemHostRegister"), 1u);
    CHECK_EQ(sim.call_count("cuMemHostUnregister"), 0u);
    nrm_pin_destroy(two);
    CHECK(!is_page_locked(memory));
    CHECK_EQ(atomic_load(&n_dropped), 2);
    closing_free(&closing);
    nrm__cuda_leave(&scope);
    stop(memory, MIB);
}

/* The events of the first one do not cover what was submitted while it was pinned
   again. */
TEST(who_closed_first_does_not_unlock_for_who_closed_last)
{
    char *memory = start(NULL, MIB);
    struct nrm__cuda_scope scope;
    REQUIRE_OK(nrm__cuda_enter(0, &scope));
    struct closing first = closing_begin(memory), last = closing_begin(memory);
    closing_end(&first);
    usleep(20000);
    CHECK(is_page_locked(memory));
    CHECK_EQ(sim.call_count("cuMemHostUnregister"), 0u);
    closing_end(&last);
    CHECK(!is_page_locked(memory));
    CHECK_EQ(atomic_load(&n_dropped), 2);
    closing_free(&first);
    closing_free(&last);
    nrm__cuda_leave(&scope);
    stop(memory, MIB);
}

TEST(while_a_capture_is_announced_it_is_done_later)
{
    char *memory = start(NULL, MIB);
    nrm_pin *one = pin(memory, MIB);
    nrm_capture_begin();
    nrm_pin_destroy(one);
    CHECK_EQ(sim.call_count("cuCtxRecordEvent"), 0u);
    CHECK(is_page_locked(memory));
    CHECK_EQ(atomic_load(&n_dropped), 0);
    nrm_pin *two = pin(memory, MIB); /* while it waits */
    CHECK_EQ(sim.call_count("cuMemHostRegister"), 1u);
    nrm_pin_destroy(two);
    CHECK(is_page_locked(memory));
    nrm_capture_end();
    await_unlocked(memory);
    CHECK_EQ(atomic_load(&n_dropped), 2);
    CHECK_EQ(sim.call_count("cuMemHostUnregister"), 1u);
    stop(memory, MIB);
}

static void
destroy_in_host_function(void *argument)
{
    nrm_pin_destroy(argument);
}

TEST(in_a_host_function_it_is_done_later)
{
    char *memory = start(NULL, MIB);
    struct nrm__cuda_scope scope;
    nrm_pin *one = pin(memory, MIB);
    REQUIRE_OK(nrm__cuda_enter(0, &scope));
    CHECK_EQ(cuda.cuLaunchHostFunc(NULL, destroy_in_host_function, one),
             NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    CHECK_EQ(sim.call_count("cuMemHostUnregister"), 0u);
    nrm__cuda_leave(&scope);
    await_unlocked(memory);
    CHECK_EQ(atomic_load(&n_dropped), 1);
    stop(memory, MIB);
}

TEST(an_old_driver_synchronises_the_context)
{
    struct nrm_cudasim_config config = simulator_config();
    config.driver = 12040;
    char *memory = start(&config, MIB);
    nrm_pin_destroy(pin(memory, MIB));
    CHECK_EQ(sim.call_count("cuCtxSynchronize"), 1u);
    CHECK_EQ(atomic_load(&n_dropped), 1);
    stop(memory, MIB);
}

/* ---- failures ---- */

static const char *const calls[] = {
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxGetState",
    "cuCtxGetId",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuThreadExchangeStreamCaptureMode",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuEventCreate",
    "cuCtxRecordEvent",
    "cuEventQuery",
    "cuStreamIsCapturing",
    "cuPointerGetAttribute",
};

static const struct {
    const char *name;
    int error;
} errors[] = {
    {"out_of_memory", NRM_CUDA_ERROR_OUT_OF_MEMORY},
    {"invalid_value", NRM_CUDA_ERROR_INVALID_VALUE},
    {"not_permitted", NRM_CUDA_ERROR_NOT_PERMITTED},
    {"operating_system", NRM_CUDA_ERROR_OPERATING_SYSTEM},
    {"unknown", NRM_CUDA_ERROR_UNKNOWN},
};

TEST_EACH(each_call_that_fails_once_leaves_nothing_behind, errors)
{
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        for (uint64_t nth = 1; nth <= 3; nth++) {
            nrm_pin *one = NULL;
            char *memory = start(NULL, MIB);
            sim.fail(calls[i], nth, row->error, 1);
            nrm_status status = try_pin(memory, MIB, false, &one);
            if (status == NRM_CUDA_UNAVAILABLE) {
                /* It is not tried again: this driver is lost to the process. */
                CHECK_EQ(munmap(memory, MIB), 0);
                continue;
            }
            CHECK(status == NRM_OK || one == NULL);
            CHECK_EQ(nrm__pins_nbytes(), (status == NRM_OK ? MIB : 0));
            nrm_pin_destroy(one);
            (void)nrm__retired_drain(UINT64_MAX);
            sim.fail(calls[i], 1, 0, 1);
            nrm_pin_destroy(pin(memory, MIB));
            await_nothing(nrm__pins_nbytes);
            if (!CHECK_EQ(atomic_load(&n_dropped), (status == NRM_OK ? 2 : 1))) {
                NOTE("%s, call %d", calls[i], (int)nth);
            }
            stop(memory, MIB);
        }
    }
}

TEST(a_driver_that_never_unlocks_is_asked_a_few_times)
{
    char *memory = start(NULL, MIB);
    nrm_pin *one = pin(memory, MIB);
    sim.fail("cuMemHostUnregister", 1, NRM_CUDA_ERROR_UNKNOWN, 0);
    nrm_pin_destroy(one);
    for (int i = 0; i < 50; i++) {
        (void)nrm__retired_drain(UINT64_MAX);
        usleep(1000);
    }
    CHECK_EQ(sim.call_count("cuMemHostUnregister"), 8u);
    CHECK_EQ(atomic_load(&n_dropped), 0); /* kept alive: the driver may go there */
    CHECK(is_page_locked(memory));
    /* It can be pinned again, and then it works. */
    sim.fail("cuMemHostUnregister", 1, 0, 1);
    nrm_pin_destroy(pin(memory, MIB));
    CHECK_EQ(atomic_load(&n_dropped), 2);
    stop(memory, MIB);
}

/* ---- contexts that end ---- */

static void
reset_context(void)
{
    CHECK_EQ(cuda.cuDevicePrimaryCtxReset(nrm__cuda_driver()->devices[0]),
             NRM_CUDA_SUCCESS);
    nrm__cuda_check_generations();
}

TEST(a_reset_takes_the_lock_and_pinning_brings_it_back)
{
    char *memory = start(NULL, MIB);
    nrm_pin *one = pin(memory, MIB);
    CHECK_EQ(nrm__pins_nbytes(), MIB);
    reset_context();
    CHECK(!nrm__pins_cover(memory, memory));
    nrm_pin *two = pin(memory, MIB);
    CHECK(is_page_locked(memory));
    CHECK(nrm__pins_cover(memory, memory + MIB - 1));
    CHECK_EQ(nrm__pins_nbytes(), MIB);
    CHECK_EQ(nrm__page_locked_nbytes(), MIB);
    nrm_pin_destroy(one);
    CHECK(is_page_locked(memory));
    nrm_pin_destroy(two);
    stop(memory, MIB);
}

TEST(after_a_reset_there_is_nothing_to_unlock)
{
    char *memory = start(NULL, MIB);
    nrm_pin *one = pin(memory, MIB);
    reset_context();
    nrm_pin_destroy(one);
    CHECK_EQ(sim.call_count("cuMemHostUnregister"), 0u);
    CHECK_EQ(atomic_load(&n_dropped), 1);
    stop(memory, MIB);
}

TEST(a_pin_outlives_its_driver)
{
    char *memory = start(NULL, MIB);
    nrm_pin *one = pin(memory, MIB);
    simulator_start(NULL);
    nrm_pin_destroy(one);
    CHECK_EQ(atomic_load(&n_dropped), 1);
    CHECK_EQ(sim.call_count("cuMemHostUnregister"), 0u);
    nrm_pin_destroy(pin(memory, MIB));
    stop(memory, MIB);
}

/* ---- processes ---- */

static nrm_pin *parents;
static char *parents_memory;

static void
use_in_child(void)
{
    nrm_pin *one = NULL;
    uint64_t before = sim.call_count(NULL);
    CHECK(!nrm__pins_cover(parents_memory, parents_memory));
    CHECK_EQ(nrm__pins_nbytes(), 0u);
    CHECK_STATUS(try_pin(parents_memory, MIB, false, &one), NRM_CUDA_UNAVAILABLE);
    nrm_pin_destroy(parents);
    CHECK_EQ(atomic_load(&n_dropped), 1);
    (void)nrm__retired_drain(UINT64_MAX);
    CHECK_EQ(sim.call_count(NULL), before);
}

TEST(the_pins_of_a_child_are_its_parents)
{
    parents_memory = start(NULL, MIB);
    parents = pin(parents_memory, MIB);
    CHECK_EQ(in_child(use_in_child), 0);
    CHECK(is_page_locked(parents_memory));
    CHECK_EQ(atomic_load(&n_dropped), 0);
    nrm_pin_destroy(parents);
    stop(parents_memory, MIB);
}

static void
drain_in_child(void)
{
    uint64_t before = sim.call_count(NULL);
    (void)nrm__retired_drain(UINT64_MAX);
    CHECK(nrm__retired_is_empty());
    CHECK_EQ(sim.call_count(NULL), before);
}

TEST(what_waits_to_be_unlocked_is_the_parents_too)
{
    char *memory = start(NULL, MIB);
    nrm_pin *one = pin(memory, MIB);
    nrm_capture_begin();
    nrm_pin_destroy(one);
    CHECK_EQ(in_child(drain_in_child), 0);
    CHECK(is_page_locked(memory));
    nrm_capture_end();
    stop(memory, MIB);
}

/* ---- threads ---- */

static char *shared;

static void *
pin_often(void *argument)
{
    uint64_t seed = (uint64_t)(uintptr_t)argument;
    for (int i = 0; i < 300; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        size_t part = (seed >> 33) % 4;
        nrm_pin *one = NULL;
        CHECK_OK(try_pin(shared + part * MIB, MIB, false, &one));
        CHECK(nrm__pins_cover(shared + part * MIB, shared + part * MIB + MIB - 1));
        nrm_pin_destroy(one);
    }
    return NULL;
}

TEST(threads_pin_the_same_buffers)
{
    enum { N_THREADS = 4 };
    pthread_t threads[N_THREADS];
    shared = start(NULL, 4 * MIB);
    for (uintptr_t i = 0; i < N_THREADS; i++) {
        pthread_create(&threads[i], NULL, pin_often, (void *)(i + 1));
    }
    for (int i = 0; i < N_THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK_EQ(atomic_load(&n_dropped), N_THREADS * 300);
    stop(shared, 4 * MIB);
}

CHECK_MAIN
