/* Which context is entered, what is left behind, and how a reset is noticed. */
#include "simulator.h"

#include "cuda/context.h"
#include "nrm/options.h"

static void
start(int devices)
{
    struct nrm_cudasim_config config = simulator_config();
    config.devices = devices;
    simulator_start(&config);
    CHECK_OK(nrm__cuda_init(NULL));
}

static bool
is_active(int device)
{
    unsigned int flags;
    int active = 0;
    CHECK_EQ(cuda.cuDevicePrimaryCtxGetState(device, &flags, &active),
             NRM_CUDA_SUCCESS);
    return active != 0;
}

static nrm_CUcontext
current(void)
{
    nrm_CUcontext context = NULL;
    CHECK_EQ(cuda.cuCtxGetCurrent(&context), NRM_CUDA_SUCCESS);
    return context;
}

/* ---- which one ---- */

TEST(without_any_context_that_of_the_option_is_made)
{
    struct nrm__cuda_scope scope;
    start(2);
    CHECK_OK(nrm_option_set(NRM_OPT_DEVICE, "1"));
    REQUIRE_OK(nrm__cuda_enter(-1, &scope));
    CHECK_EQ(scope.device, 1);
    CHECK(current() == scope.context);
    nrm__cuda_leave(&scope);
    CHECK(current() == NULL);
    CHECK(is_active(1));
    CHECK(!is_active(0));
    CHECK_OK(nrm_option_set(NRM_OPT_DEVICE, "0"));
}

TEST(an_active_context_is_preferred_to_a_new_one)
{
    struct nrm__cuda_scope scope;
    nrm_CUcontext other;
    start(3);
    CHECK_EQ(cuda.cuDevicePrimaryCtxRetain(&other, 2), NRM_CUDA_SUCCESS);
    REQUIRE_OK(nrm__cuda_enter(-1, &scope));
    CHECK_EQ(scope.device, 2);
    CHECK(scope.context == other);
    nrm__cuda_leave(&scope);
    CHECK(!is_active(0));
}

TEST(the_callers_context_comes_first)
{
    struct nrm__cuda_scope scope;
    nrm_CUcontext zero;
    nrm_CUcontext one;
    start(2);
    CHECK_EQ(cuda.cuDevicePrimaryCtxRetain(&zero, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuDevicePrimaryCtxRetain(&one, 1), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuCtxSetCurrent(one), NRM_CUDA_SUCCESS);
    REQUIRE_OK(nrm__cuda_enter(-1, &scope));
    CHECK_EQ(scope.device, 1);
    CHECK(!scope.pushed);
    nrm__cuda_leave(&scope);
    REQUIRE_OK(nrm__cuda_enter(0, &scope));
    CHECK(current() == zero);
    nrm__cuda_leave(&scope);
    CHECK(current() == one);
    cuda.cuCtxSetCurrent(NULL);
}

TEST(a_device_that_is_not_there_is_named)
{
    struct nrm__cuda_scope scope;
    start(2);
    CHECK_STATUS(nrm__cuda_enter(2, &scope), NRM_INVALID_VALUE);
    CHECK_STR_HAS(nrm_last_error()->message, "no device 2: 2 visible");
    CHECK(current() == NULL);
}

TEST(looking_makes_no_context)
{
    struct nrm__cuda_scope scope;
    int devices[NRM__MAX_DEVICES];
    start(2);
    CHECK_EQ(nrm__cuda_active_devices(devices), 0);
    CHECK_EQ(nrm__cuda_enter_existing(0, &scope), NRM_NOT_FOUND);
    CHECK_EQ(nrm__cuda_generation(0), nrm__cuda_generation_noticed(0));
    nrm__cuda_check_generations();
    CHECK_EQ(nrm__cuda_attribute(1, NRM_CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY), 1);
    CHECK(!is_active(0) && !is_active(1));
    REQUIRE_OK(nrm__cuda_enter(1, &scope));
    nrm__cuda_leave(&scope);
    CHECK_EQ(nrm__cuda_active_devices(devices), 1);
    CHECK_EQ(devices[0], 1);
}

TEST(the_capture_mode_is_relaxed_inside_and_restored)
{
    struct nrm__cuda_scope scope;
    nrm_CUstreamCaptureMode mode = NRM_CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    start(1);
    cuda.cuThreadExchangeStreamCaptureMode(&mode);
    REQUIRE_OK(nrm__cuda_enter(-1, &scope));
    nrm_CUstreamCaptureMode inside = NRM_CU_STREAM_CAPTURE_MODE_RELAXED;
    cuda.cuThreadExchangeStreamCaptureMode(&inside);
    CHECK_EQ(inside, (unsigned)NRM_CU_STREAM_CAPTURE_MODE_RELAXED);
    nrm__cuda_leave(&scope);
    cuda.cuThreadExchangeStreamCaptureMode(&mode);
    CHECK_EQ(mode, (unsigned)NRM_CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    CHECK_STATUS(nrm__cuda_enter(7, &scope), NRM_INVALID_VALUE);
    mode = NRM_CU_STREAM_CAPTURE_MODE_GLOBAL;
    cuda.cuThreadExchangeStreamCaptureMode(&mode);
    CHECK_EQ(mode, (unsigned)NRM_CU_STREAM_CAPTURE_MODE_GLOBAL);
}

/* ---- lives ---- */

TEST(a_reset_ends_a_generation_once)
{
    struct nrm__cuda_scope scope;
    start(2);
    REQUIRE_OK(nrm__cuda_enter(0, &scope));
    nrm__cuda_leave(&scope);
    REQUIRE_OK(nrm__cuda_enter(1, &scope));
    nrm__cuda_leave(&scope);
    uint64_t zero = nrm__cuda_generation(0);
    uint64_t one = nrm__cuda_generation(1);
    uint64_t all = nrm__cuda_generations();
    CHECK_EQ(cuda.cuDevicePrimaryCtxReset(1), NRM_CUDA_SUCCESS);
    CHECK_EQ(nrm__cuda_generation_noticed(1), one);
    nrm__cuda_check_generations();
    CHECK_EQ(nrm__cuda_generation(1), one + 1);
    CHECK_EQ(nrm__cuda_generation(1), one + 1);
    CHECK(!is_active(1));
    REQUIRE_OK(nrm__cuda_enter(1, &scope));
    CHECK_EQ(scope.generation, one + 1);
    nrm__cuda_leave(&scope);
    CHECK_EQ(nrm__cuda_generation(1), one + 1);
    CHECK_EQ(nrm__cuda_generation(0), zero);
    CHECK_EQ(nrm__cuda_generations(), all + 1);
}

TEST(a_reset_that_others_have_mended_is_noticed_by_the_id)
{
    struct nrm__cuda_scope scope;
    nrm_CUcontext again;
    start(1);
    REQUIRE_OK(nrm__cuda_enter(0, &scope));
    nrm__cuda_leave(&scope);
    uint64_t before = nrm__cuda_generation(0);
    CHECK_EQ(cuda.cuDevicePrimaryCtxReset(0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuDevicePrimaryCtxRetain(&again, 0), NRM_CUDA_SUCCESS);
    CHECK(again == scope.context);
    CHECK_EQ(nrm__cuda_generation(0), before + 1);
}

TEST(a_current_context_that_was_reset_is_made_anew)
{
    struct nrm__cuda_scope scope;
    start(2);
    REQUIRE_OK(nrm__cuda_enter(1, &scope));
    nrm__cuda_leave(&scope);
    CHECK_EQ(cuda.cuCtxSetCurrent(scope.context), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuDevicePrimaryCtxReset(1), NRM_CUDA_SUCCESS);
    REQUIRE_OK(nrm__cuda_enter(-1, &scope));
    CHECK_EQ(scope.device, 1);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    nrm__cuda_leave(&scope);
    CHECK(!is_active(0));
    cuda.cuCtxSetCurrent(NULL);
}

TEST(the_primary_context_survives_its_other_users)
{
    struct nrm__cuda_scope scope;
    nrm_CUcontext theirs;
    start(1);
    CHECK_EQ(cuda.cuDevicePrimaryCtxRetain(&theirs, 0), NRM_CUDA_SUCCESS);
    REQUIRE_OK(nrm__cuda_enter(-1, &scope));
    nrm__cuda_leave(&scope);
    CHECK_EQ(cuda.cuDevicePrimaryCtxRelease(0), NRM_CUDA_SUCCESS);
    CHECK(is_active(0));
}

static void *
enter_often(void *unused)
{
    (void)unused;
    for (int i = 0; i < 200; i++) {
        struct nrm__cuda_scope scope;
        nrm_status status = nrm__cuda_enter(-1, &scope);
        if (status == NRM_OK) {
            nrm__cuda_leave(&scope);
        }
        else {
            CHECK_EQ(status, NRM_DEVICE_LOST);
        }
        nrm__cuda_check_generations();
    }
    CHECK(current() == NULL);
    return NULL;
}

static void
run_threads(void *(*body)(void *), bool resetting)
{
    enum { N = 6 };
    pthread_t threads[N];
    for (int i = 0; i < N; i++) {
        pthread_create(&threads[i], NULL, body, NULL);
    }
    for (int i = 0; resetting && i < 50; i++) {
        cuda.cuDevicePrimaryCtxReset(0);
        usleep(200);
    }
    for (int i = 0; i < N; i++) {
        pthread_join(threads[i], NULL);
    }
}

TEST(a_context_is_retained_once_by_many_threads)
{
    start(1);
    run_threads(enter_often, false);
    CHECK_EQ(cuda.cuDevicePrimaryCtxRelease(0), NRM_CUDA_SUCCESS);
    CHECK(!is_active(0));
}

TEST(resets_and_entries_may_meet)
{
    struct nrm__cuda_scope scope;
    start(1);
    uint64_t before = nrm__cuda_generation(0);
    run_threads(enter_often, true);
    REQUIRE_OK(nrm__cuda_enter(-1, &scope));
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    nrm__cuda_leave(&scope);
    CHECK_LE(nrm__cuda_generation(0), before + 50);
}

/* ---- devices ---- */

TEST(an_attribute_is_asked_once)
{
    start(1);
    int first = nrm__cuda_attribute(0, NRM_CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED);
    uint64_t calls = sim.call_count("cuDeviceGetAttribute");
    CHECK_EQ(first, 1);
    CHECK_EQ(nrm__cuda_attribute(0, NRM_CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED),
             1);
    CHECK_EQ(sim.call_count("cuDeviceGetAttribute"), calls);
    CHECK_EQ(nrm__cuda_attribute(1, NRM_CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED),
             -1);
    CHECK_EQ(nrm__cuda_attribute(-1, NRM_CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED),
             -1);
}

TEST(attributes_of_a_new_driver_are_asked_anew)
{
    start(1);
    CHECK(!nrm__cuda_reads_pageable());
    simulator_start(NULL);
    CHECK_EQ(nrm__cuda_attribute(0, NRM_CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS),
             -1);
    CHECK(!nrm__cuda_reads_pageable());
    sim.set_attribute(0, NRM_CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, 1);
    CHECK_OK(nrm__cuda_init(NULL));
    CHECK(nrm__cuda_reads_pageable());
}

TEST(device_info_makes_no_context)
{
    struct nrm__cuda_device_info info;
    struct nrm__cuda_scope scope;
    nrm_CUdevice_attribute attribute;
    simulator_start(NULL);
    CHECK_EQ(nrm__cuda_device_info(0, &info), NRM_NOT_FOUND);
    CHECK_EQ(sim.call_count("cuInit"), 0u);
    start(1);
    REQUIRE_OK(nrm__cuda_device_info(0, &info));
    CHECK(!info.is_active);
    CHECK_EQ(info.free_nbytes, SIZE_MAX);
    CHECK_EQ(info.total_nbytes, (size_t)8 << 30);
    CHECK(info.name[0] != '\0');
    CHECK(info.pci_id[0] != '\0');
    CHECK(!is_active(0));
    REQUIRE_OK(nrm__cuda_enter(0, &scope));
    nrm__cuda_leave(&scope);
    REQUIRE_OK(nrm__cuda_device_info(0, &info));
    CHECK(info.is_active);
    CHECK_EQ(info.free_nbytes, (size_t)8 << 30);
    CHECK_EQ(nrm__cuda_device_info(1, &info), NRM_NOT_FOUND);
    int n = 0;
    while (nrm__cuda_attribute_name(n, &attribute) != NULL) {
        n++;
    }
    CHECK_EQ(n, (int)NRM__N_ATTRIBUTES);
}

CHECK_MAIN
