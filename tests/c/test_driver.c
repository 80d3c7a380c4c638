/* Finding, loading and initialising the driver, and what is said when that fails. */
#include "simulator.h"

#include "base/error.h"
#include "nrm/options.h"
#include "cuda/context.h"

static void
check_unavailable(nrm_status status, const char *words)
{
    CHECK_EQ(status, NRM_CUDA_UNAVAILABLE);
    CHECK_EQ(nrm_last_error()->status, NRM_CUDA_UNAVAILABLE);
    CHECK_STR_HAS(nrm_last_error()->message, words);
}

TEST(expecting_a_device_does_not_initialise_it)
{
    simulator_start(NULL);
    CHECK_OK(nrm__cuda_expect());
    CHECK_EQ(sim.call_count("cuInit"), 0u);
    CHECK(nrm__cuda_driver() == NULL);
    CHECK(nrm__cuda_is_simulated());
    CHECK_EQ(nrm__cuda_version(), 13000);
    CHECK_STR_HAS(nrm__cuda_library_path(), "numpy_rmm_cudasim");
    CHECK_STR_EQ(nrm__cuda_missing_symbols(), "");
}

TEST(init_happens_once)
{
    const struct nrm__driver *first;
    const struct nrm__driver *second;
    simulator_start(NULL);
    REQUIRE_OK(nrm__cuda_init(&first));
    REQUIRE_OK(nrm__cuda_init(&second));
    CHECK(first == second);
    CHECK(nrm__cuda_driver() == first);
    CHECK_EQ(sim.call_count("cuInit"), 1u);
    CHECK_EQ(first->n_devices, 1);
    CHECK_OK(nrm__cuda_expect());
}

static void *
init_in_thread(void *out)
{
    CHECK_OK(nrm__cuda_init(out));
    return NULL;
}

TEST(many_threads_get_one_driver)
{
    enum { N = 8 };
    pthread_t threads[N];
    const struct nrm__driver *drivers[N] = {0};
    simulator_start(NULL);
    for (int i = 0; i < N; i++) {
        pthread_create(&threads[i], NULL, init_in_thread, (void *)&drivers[i]);
    }
    for (int i = 0; i < N; i++) {
        pthread_join(threads[i], NULL);
        CHECK(drivers[i] == drivers[0]);
    }
}

TEST(a_library_that_is_not_there_is_named)
{
    simulator_start(NULL);
    CHECK_OK(nrm__cuda_set_library("/nonexistent/libcuda.so.1"));
    check_unavailable(nrm__cuda_expect(), "/nonexistent/libcuda.so.1");
    check_unavailable(nrm__cuda_init(NULL), "/nonexistent/libcuda.so.1");
    CHECK_EQ(nrm__cuda_version(), 0);
}

TEST(a_library_that_is_no_driver_is_refused)
{
    simulator_start(NULL);
    CHECK_OK(nrm__cuda_set_library("libm.so.6"));
    check_unavailable(nrm__cuda_expect(), "cuDriverGetVersion is missing");
}

TEST(the_option_is_looked_at_again_after_a_failure)
{
    simulator_start(NULL);
    CHECK_OK(nrm__cuda_set_library(NULL));
    CHECK_OK(nrm_option_set(NRM_OPT_CUDA_LIBRARY, "/nonexistent/one"));
    check_unavailable(nrm__cuda_expect(), "/nonexistent/one");
    CHECK_OK(nrm_option_set(NRM_OPT_CUDA_LIBRARY, "simulator"));
    CHECK_OK(nrm__cuda_expect());
    CHECK_OK(nrm_option_set(NRM_OPT_CUDA_LIBRARY, ""));
}

TEST(a_path_that_is_too_long_is_refused)
{
    char path[600];
    memset(path, 'x', sizeof path - 1);
    path[sizeof path - 1] = '\0';
    simulator_start(NULL);
    CHECK_STATUS(nrm__cuda_set_library(path), NRM_INVALID_VALUE);
    CHECK_OK(nrm__cuda_expect());
}

TEST(a_driver_that_is_too_old_is_named_with_both_versions)
{
    struct nrm_cudasim_config config = simulator_config();
    config.driver = 11080;
    simulator_start(&config);
    check_unavailable(nrm__cuda_expect(), "CUDA 11.8");
    check_unavailable(nrm__cuda_init(NULL), "12.0 or newer");
    CHECK_EQ(sim.call_count("cuInit"), 0u);
}

TEST(a_driver_without_an_optional_symbol_works)
{
    struct nrm_cudasim_config config = simulator_config();
    const struct nrm__driver *driver;
    config.driver = 12040;
    simulator_start(&config);
    REQUIRE_OK(nrm__cuda_init(&driver));
    CHECK_STR_EQ(nrm__cuda_missing_symbols(),
                 "cuCtxRecordEvent, cuMemGetDefaultMemPool, cuMemcpyBatchAsync");
    CHECK(driver->cuCtxRecordEvent == NULL);
    CHECK(driver->cuMemAlloc != NULL);
}

static const struct {
    const char *name;
    const char *value;
} hidden[] = {{"empty", ""}, {"minus_one", "-1"}};

TEST_EACH(no_visible_device_is_said_before_anything_is_called, hidden)
{
    simulator_start(NULL);
    setenv("CUDA_VISIBLE_DEVICES", row->value, 1);
    check_unavailable(nrm__cuda_expect(), "CUDA_VISIBLE_DEVICES is \"");
    check_unavailable(nrm__cuda_init(NULL), "CUDA_VISIBLE_DEVICES is \"");
    CHECK_EQ(sim.call_count("cuInit"), 0u);
    unsetenv("CUDA_VISIBLE_DEVICES");
    CHECK_OK(nrm__cuda_init(NULL));
}

TEST(what_cuinit_says_is_kept)
{
    simulator_start(NULL);
    setenv("CUDA_VISIBLE_DEVICES", "77", 1);
    check_unavailable(nrm__cuda_init(NULL), "CUDA_VISIBLE_DEVICES=77");
    unsetenv("CUDA_VISIBLE_DEVICES");
    CHECK_STR_EQ(nrm_last_error()->native_name, "CUDA_ERROR_NO_DEVICE");
    CHECK_EQ(nrm_last_error()->native_code, 100);
    check_unavailable(nrm__cuda_expect(), "cuInit");
    check_unavailable(nrm__cuda_init(NULL), "cuInit");
    CHECK_EQ(sim.call_count("cuInit"), 1u);
    CHECK(!nrm__cuda_is_forked());
}

/* ---- forks ---- */

static void
is_forked_child(void)
{
    uint64_t before = sim.call_count(NULL);
    CHECK(nrm__cuda_is_forked());
    CHECK(nrm__cuda_driver() == NULL);
    check_unavailable(nrm__cuda_init(NULL), "spawn");
    check_unavailable(nrm__cuda_expect(), "forked");
    CHECK_EQ(nrm__cuda_n_devices(), 0);
    CHECK_EQ(sim.call_count(NULL), before);
}

TEST(a_child_forked_after_init_never_calls_the_driver)
{
    simulator_start(NULL);
    REQUIRE_OK(nrm__cuda_init(NULL));
    CHECK_EQ(in_child(is_forked_child), 0);
    CHECK(!nrm__cuda_is_forked());
    CHECK_OK(nrm__cuda_init(NULL));
}

static void
may_use_cuda(void)
{
    CHECK(!nrm__cuda_is_forked());
    CHECK_OK(nrm__cuda_init(NULL));
}

TEST(a_child_forked_before_init_may_use_cuda)
{
    simulator_start(NULL);
    CHECK_OK(nrm__cuda_expect());
    CHECK_EQ(in_child(may_use_cuda), 0);
    CHECK_OK(nrm__cuda_init(NULL));
}

static void
learns_from_cuinit(void)
{
    CHECK(!nrm__cuda_is_forked());
    check_unavailable(nrm__cuda_init(NULL), "spawn");
    CHECK(nrm__cuda_is_forked());
}

TEST(a_child_learns_that_somebody_else_had_called_cuinit)
{
    simulator_start(NULL);
    CHECK_OK(nrm__cuda_expect());
    CHECK_EQ(cuda.cuInit(0), NRM_CUDA_SUCCESS);
    CHECK_EQ(in_child(learns_from_cuinit), 0);
}

/* ---- exchange and errors ---- */

TEST(a_table_stays_valid_after_an_exchange)
{
    const struct nrm__driver *old;
    const struct nrm__driver *new;
    int version = 0;
    simulator_start(NULL);
    REQUIRE_OK(nrm__cuda_init(&old));
    simulator_start(NULL);
    REQUIRE_OK(nrm__cuda_init(&new));
    CHECK(old != new);
    CHECK_EQ(old->cuDriverGetVersion(&version), NRM_CUDA_SUCCESS);
    CHECK_EQ(version, 13000);
}

static const struct {
    const char *name;
    nrm_CUresult code;
    nrm_status status;
    bool sticky;
    bool destroyed;
} codes[] = {
    {"out_of_memory", NRM_CUDA_ERROR_OUT_OF_MEMORY, NRM_OUT_OF_MEMORY, false, false},
    {"illegal_address", NRM_CUDA_ERROR_ILLEGAL_ADDRESS, NRM_DEVICE_LOST, true, false},
    {"launch_failed", NRM_CUDA_ERROR_LAUNCH_FAILED, NRM_DEVICE_LOST, true, false},
    {"ecc", NRM_CUDA_ERROR_ECC_UNCORRECTABLE, NRM_DEVICE_LOST, true, false},
    {"destroyed", NRM_CUDA_ERROR_CONTEXT_IS_DESTROYED, NRM_DEVICE_LOST, false, true},
    {"invalid", NRM_CUDA_ERROR_INVALID_VALUE, NRM_CUDA_ERROR, false, false},
    {"capture", NRM_CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, NRM_CUDA_ERROR, false,
     false},
};

TEST_EACH(errors_have_the_drivers_own_names, codes)
{
    const char *name;
    simulator_start(NULL);
    REQUIRE_OK(nrm__cuda_init(NULL));
    CHECK_STATUS(nrm__cuda_error(row->code, "cuTest of %d B", 42), row->status);
    cuda.cuGetErrorName(row->code, &name);
    CHECK_STR_EQ(nrm_last_error()->native_name, name);
    CHECK_EQ(nrm_last_error()->native_code, (int)row->code);
    CHECK_STR_HAS(nrm_last_error()->message, "cuTest of 42 B");
    CHECK_STR_HAS(nrm_last_error()->message, name);
    CHECK_EQ(nrm__cuda_is_sticky(row->code), row->sticky);
    CHECK_EQ(nrm__cuda_is_destroyed(row->code), row->destroyed);
}

TEST(error_names_need_no_driver)
{
    simulator_start(NULL);
    CHECK_OK(nrm__cuda_set_library("/nonexistent/libcuda.so.1"));
    CHECK_STR_EQ(nrm__cuda_error_name(NRM_CUDA_ERROR_NOT_READY),
                 "CUDA_ERROR_NOT_READY");
    CHECK_STR_EQ(nrm__cuda_error_name((nrm_CUresult)12345), "CUDA_ERROR_WITHOUT_NAME");
}

static void
is_silent_at_exit(void)
{
    struct nrm__cuda_scope scope;
    REQUIRE_OK(nrm__cuda_init(NULL));
    nrm_clear_last_error();
    CHECK_EQ(nrm__cuda_error(NRM_CUDA_ERROR_DEINITIALIZED, "x"), NRM_DEVICE_LOST);
    CHECK_EQ(nrm_last_error()->status, NRM_OK);
    nrm__cuda_exit_begin();
    CHECK_EQ(nrm__cuda_error(NRM_CUDA_ERROR_INVALID_VALUE, "x"), NRM_CUDA_ERROR);
    CHECK_EQ(nrm__cuda_enter(-1, &scope), NRM_DEVICE_LOST);
    CHECK_EQ(nrm__cuda_enter_existing(0, &scope), NRM_NOT_FOUND);
    CHECK_EQ(nrm_last_error()->status, NRM_OK);
}

TEST(nothing_is_said_during_exit)
{
    simulator_start(NULL);
    CHECK_EQ(in_child(is_silent_at_exit), 0);
}

CHECK_MAIN
