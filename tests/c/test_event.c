/* Recording what was submitted to a context, and what captures, resets and errors do to
   it. */
#include "simulator.h"

#include "cuda/event.h"

/* The primary context of device 0, current, as another library would have it. */
static void
start(const struct nrm_cudasim_config *config)
{
    nrm_CUcontext context;
    simulator_start(config);
    CHECK_OK(nrm__cuda_init(NULL));
    CHECK_EQ(cuda.cuDevicePrimaryCtxRetain(&context, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuCtxSetCurrent(context), NRM_CUDA_SUCCESS);
}

static void
stop(void)
{
    cuda.cuCtxSetCurrent(NULL);
    simulator_check_faults();
}

/* A stream with a fill that does not finish before sim.release_stream. */
static nrm_CUstream
held_stream(unsigned flags)
{
    nrm_CUstream stream = NULL;
    nrm_CUdeviceptr target = 0;
    CHECK_EQ(cuda.cuStreamCreate(&stream, flags), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemAlloc(&target, 4096), NRM_CUDA_SUCCESS);
    CHECK_EQ(sim.hold_stream(stream), 0);
    CHECK_EQ(cuda.cuMemsetD8Async(target, 1, 4096, stream), NRM_CUDA_SUCCESS);
    return stream;
}

TEST(on_an_idle_context_a_record_is_done_at_once)
{
    struct nrm__cuda_event event;
    start(NULL);
    REQUIRE_EQ(nrm__cuda_record(0, &event), NRM__RECORDED);
    CHECK_EQ(nrm__cuda_event_query(&event), NRM_OK);
    nrm__cuda_event_recycle(&event);
    stop();
}

TEST(a_device_without_a_context_has_nothing_to_wait_for)
{
    struct nrm__cuda_event event;
    struct nrm_cudasim_config config = simulator_config();
    config.devices = 2;
    start(&config);
    CHECK_EQ(nrm__cuda_record(1, &event), NRM__RECORD_IDLE);
    CHECK_EQ(nrm__cuda_record(7, &event), NRM__RECORD_IDLE);
    int devices[NRM__MAX_DEVICES];
    CHECK_EQ(nrm__cuda_active_devices(devices), 1);
    stop();
}

TEST(before_cuinit_there_is_nothing_to_wait_for)
{
    struct nrm__cuda_event event;
    simulator_start(NULL);
    CHECK_EQ(nrm__cuda_record(0, &event), NRM__RECORD_IDLE);
    CHECK_EQ(sim.call_count("cuInit"), 0u);
}

TEST(a_record_covers_a_non_blocking_stream)
{
    struct nrm__cuda_event event;
    start(NULL);
    nrm_CUstream stream = held_stream(NRM_CU_STREAM_NON_BLOCKING);
    REQUIRE_EQ(nrm__cuda_record(0, &event), NRM__RECORDED);
    CHECK_EQ(nrm__cuda_event_query(&event), NRM_NOT_FOUND);
    CHECK_EQ(sim.release_stream(stream), 0);
    CHECK_EQ(cuda.cuStreamSynchronize(stream), NRM_CUDA_SUCCESS);
    CHECK_EQ(nrm__cuda_event_query(&event), NRM_OK);
    nrm__cuda_event_recycle(&event);
    stop();
}

TEST(events_are_used_again)
{
    start(NULL);
    for (int i = 0; i < 100; i++) {
        struct nrm__cuda_event event;
        REQUIRE_EQ(nrm__cuda_record(0, &event), NRM__RECORDED);
        nrm__cuda_event_recycle(&event);
    }
    CHECK_EQ(sim.call_count("cuEventCreate"), 1u);
    stop();
}

TEST(an_event_is_done_when_its_context_was_reset)
{
    struct nrm__cuda_event event;
    struct nrm__cuda_event next;
    nrm_CUcontext context;
    start(NULL);
    (void)held_stream(NRM_CU_STREAM_NON_BLOCKING);
    REQUIRE_EQ(nrm__cuda_record(0, &event), NRM__RECORDED);
    CHECK_EQ(nrm__cuda_event_query(&event), NRM_NOT_FOUND);
    CHECK_EQ(cuda.cuDevicePrimaryCtxReset(0), NRM_CUDA_SUCCESS);
    CHECK_EQ(nrm__cuda_event_query(&event), NRM_OK);
    CHECK_EQ(nrm__cuda_record(0, &next), NRM__RECORD_IDLE);
    CHECK_EQ(cuda.cuDevicePrimaryCtxRetain(&context, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(nrm__cuda_event_query(&event), NRM_OK);
    nrm__cuda_event_recycle(&event);
    REQUIRE_EQ(nrm__cuda_record(0, &next), NRM__RECORDED);
    CHECK_NE(next.generation, event.generation);
    CHECK_EQ(nrm__cuda_event_query(&next), NRM_OK);
    nrm__cuda_event_recycle(&next);
    stop();
}

/* ---- captures ---- */

static nrm_CUresult
end_capture(nrm_CUstream stream)
{
    nrm_CUresult code = simulator_end_capture(stream);
    cuda.cuStreamDestroy(stream);
    return code;
}

TEST(a_capture_on_a_blocking_stream_is_seen_beforehand)
{
    struct nrm__cuda_event event;
    start(NULL);
    nrm_CUstream stream = simulator_begin_capture(NRM_CU_STREAM_DEFAULT,
                                                  NRM_CU_STREAM_CAPTURE_MODE_GLOBAL);
    CHECK_EQ(nrm__cuda_record(0, &event), NRM__RECORD_CAPTURE);
    CHECK_EQ(nrm__cuda_record(0, &event), NRM__RECORD_CAPTURE);
    CHECK_EQ(end_capture(stream), NRM_CUDA_SUCCESS);
    REQUIRE_EQ(nrm__cuda_record(0, &event), NRM__RECORDED);
    nrm__cuda_event_recycle(&event);
    stop();
}

TEST(a_capture_on_a_non_blocking_stream_is_broken_once)
{
    struct nrm__cuda_event event;
    start(NULL);
    nrm_CUstream stream = simulator_begin_capture(NRM_CU_STREAM_NON_BLOCKING,
                                                  NRM_CU_STREAM_CAPTURE_MODE_GLOBAL);
    CHECK_EQ(nrm__cuda_record(0, &event), NRM__RECORD_INVALIDATED);
    CHECK_EQ(nrm__cuda_record(0, &event), NRM__RECORD_CAPTURE);
    CHECK_NE(end_capture(stream), NRM_CUDA_SUCCESS);
    CHECK_EQ(nrm__cuda_record(0, &event), NRM__RECORD_CAPTURE);
    stream = simulator_begin_capture(NRM_CU_STREAM_NON_BLOCKING,
                                     NRM_CU_STREAM_CAPTURE_MODE_GLOBAL);
    CHECK_EQ(nrm__cuda_record(0, &event), NRM__RECORD_CAPTURE);
    CHECK_EQ(end_capture(stream), NRM_CUDA_SUCCESS);
    nrm__cuda_capture_lift(1);
    CHECK_EQ(nrm__cuda_record(0, &event), NRM__RECORD_CAPTURE);
    nrm__cuda_capture_lift(0);
    REQUIRE_EQ(nrm__cuda_record(0, &event), NRM__RECORDED);
    nrm__cuda_event_recycle(&event);
    stop();
}

TEST(asking_leaves_a_capture_intact)
{
    struct nrm__cuda_event event;
    start(NULL);
    REQUIRE_EQ(nrm__cuda_record(0, &event), NRM__RECORDED);
    nrm_CUstream stream = simulator_begin_capture(NRM_CU_STREAM_NON_BLOCKING,
                                                  NRM_CU_STREAM_CAPTURE_MODE_GLOBAL);
    CHECK_EQ(nrm__cuda_event_query(&event), NRM_OK);
    nrm__cuda_check_generations();
    CHECK_EQ(end_capture(stream), NRM_CUDA_SUCCESS);
    nrm__cuda_event_recycle(&event);
    stop();
}

/* ---- without cuCtxRecordEvent, and errors ---- */

static void *
release_later(void *stream)
{
    usleep(20000);
    CHECK_EQ(sim.release_stream(stream), 0);
    return NULL;
}

TEST(an_old_driver_synchronises)
{
    struct nrm__cuda_event event;
    struct nrm_cudasim_config config = simulator_config();
    pthread_t thread;
    config.driver = 12040;
    start(&config);
    nrm_CUstream stream = held_stream(NRM_CU_STREAM_NON_BLOCKING);
    pthread_create(&thread, NULL, release_later, stream);
    REQUIRE_EQ(nrm__cuda_record(0, &event), NRM__RECORDED);
    CHECK_EQ(cuda.cuStreamQuery(stream), NRM_CUDA_SUCCESS);
    CHECK(event.handle == NULL);
    CHECK_EQ(nrm__cuda_event_query(&event), NRM_OK);
    nrm__cuda_event_recycle(&event);
    pthread_join(thread, NULL);
    stop();
}

TEST(a_sticky_error_is_told_apart)
{
    struct nrm__cuda_event event;
    struct nrm__cuda_event other;
    start(NULL);
    REQUIRE_EQ(nrm__cuda_record(0, &event), NRM__RECORDED);
    CHECK_EQ(sim.set_sticky(0, NRM_CUDA_ERROR_ILLEGAL_ADDRESS), 0);
    CHECK_EQ(nrm__cuda_event_query(&event), NRM_DEVICE_LOST);
    CHECK_STR_EQ(nrm_last_error()->native_name, "CUDA_ERROR_ILLEGAL_ADDRESS");
    nrm_clear_last_error();
    CHECK_EQ(nrm__cuda_record(0, &other), NRM__RECORD_LOST);
    CHECK_STR_EQ(nrm_last_error()->native_name, "CUDA_ERROR_ILLEGAL_ADDRESS");
    stop();
}

static const struct {
    const char *name;
    const char *call;
    nrm_CUresult code;
    enum nrm__record expected;
} failures[] = {
    {"no_event", "cuEventCreate", NRM_CUDA_ERROR_OUT_OF_MEMORY, NRM__RECORD_CAPTURE},
    {"host_function", "cuCtxRecordEvent", NRM_CUDA_ERROR_NOT_PERMITTED,
     NRM__RECORD_CAPTURE},
    {"reset_meanwhile", "cuCtxRecordEvent", NRM_CUDA_ERROR_CONTEXT_IS_DESTROYED,
     NRM__RECORD_IDLE},
    {"sticky", "cuCtxRecordEvent", NRM_CUDA_ERROR_LAUNCH_FAILED, NRM__RECORD_LOST},
};

TEST_EACH(a_failed_record_leaves_nothing_behind, failures)
{
    struct nrm__cuda_event event;
    start(NULL);
    sim.fail(row->call, 1, row->code, 1);
    CHECK_EQ(nrm__cuda_record(0, &event), row->expected);
    REQUIRE_EQ(nrm__cuda_record(0, &event), NRM__RECORDED);
    nrm__cuda_event_recycle(&event);
    CHECK_EQ(simulator_count(NRM_CUDASIM_EVENTS), 1u);
    stop();
}

static void *
record_often(void *unused)
{
    (void)unused;
    for (int i = 0; i < 300; i++) {
        struct nrm__cuda_event event;
        if (nrm__cuda_record(0, &event) == NRM__RECORDED) {
            while (nrm__cuda_event_query(&event) == NRM_NOT_FOUND) {
                usleep(10);
            }
            nrm__cuda_event_recycle(&event);
        }
    }
    return NULL;
}

TEST(many_threads_record_while_the_context_is_reset)
{
    enum { N = 4 };
    pthread_t threads[N];
    nrm_CUcontext context;
    start(NULL);
    cuda.cuCtxSetCurrent(NULL);
    for (int i = 0; i < N; i++) {
        pthread_create(&threads[i], NULL, record_often, NULL);
    }
    for (int i = 0; i < 20; i++) {
        cuda.cuDevicePrimaryCtxReset(0);
        cuda.cuDevicePrimaryCtxRetain(&context, 0);
        usleep(500);
    }
    for (int i = 0; i < N; i++) {
        pthread_join(threads[i], NULL);
    }
    stop();
}

CHECK_MAIN
