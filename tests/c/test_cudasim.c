/* The controls of the simulated driver. Its rules are those of the real one and stand
 * in tests/gpu/rules; here is what only a simulator can do: be configured, fail on
 * demand, count and remember. How it runs work is in test_cudasim_work.c. */
#include "addresses.h"
#include "cudasim_machine.h"

#include <time.h>

/* ---- configuration --------------------------------------------------------------- */

TEST(loading_and_initialising_start_no_thread)
{
    REQUIRE(start());
    char line[256];
    long threads = 0;
    FILE *status = fopen("/proc/self/status", "re");
    REQUIRE(status != NULL);
    while (fgets(line, sizeof line, status) != NULL) {
        if (strncmp(line, "Threads:", 8) == 0) {
            threads = strtol(line + 8, NULL, 10);
        }
    }
    fclose(status);
    CHECK_EQ(threads, 1);
}

TEST(a_wrong_configuration_is_refused)
{
    REQUIRE(load());
    struct nrm_cudasim_config config = machine();
    config.devices = 17;
    CHECK_EQ(sim.nrm_cudasim_reset(&config), NRM_CUDA_ERROR_INVALID_VALUE);
    config = machine();
    config.size = 4;
    CHECK_EQ(sim.nrm_cudasim_reset(&config), NRM_CUDA_ERROR_INVALID_VALUE);
}

static const struct {
    const char *name;
    const char *devices, *memory, *driver;
    int result, n_devices, version;
    uint64_t nbytes;
    const char *check;
    int checks;
} environments[] = {
    {"none", NULL, NULL, NULL, 0, 1, 13000, (uint64_t)8 << 30, NULL, 0},
    {"all", "3", "1.5 GiB", "12040", 0, 3, 12040, (uint64_t)3 << 29, NULL, 0},
    {"bytes", "0", "4096", NULL, 0, 0, 13000, 4096, NULL, 0},
    {"no number", "two", NULL, NULL, 1, 1, 13000, (uint64_t)8 << 30, NULL, 0},
    {"unknown unit", NULL, "8 parsecs", NULL, 1, 1, 13000, (uint64_t)8 << 30, NULL, 0},
    {"negative", NULL, "-1", NULL, 1, 1, 13000, (uint64_t)8 << 30, NULL, 0},
    {"checked", NULL, NULL, NULL, 0, 1, 13000, (uint64_t)8 << 30, "1", 2},
    {"no check", NULL, NULL, NULL, 0, 1, 13000, (uint64_t)8 << 30, "0", 0},
    {"odd check", NULL, NULL, NULL, 1, 1, 13000, (uint64_t)8 << 30, "yes", 0},
};

static void
set(const char *name, const char *value)
{
    if (value == NULL) {
        unsetenv(name);
    }
    else {
        setenv(name, value, 1);
    }
}

TEST_EACH(the_environment_is_the_default_configuration, environments)
{
    REQUIRE(load());
    struct nrm_cudasim_config config;
    set("NUMPY_RMM_SIMULATED_DEVICES", row->devices);
    set("NUMPY_RMM_SIMULATED_MEMORY", row->memory);
    set("NUMPY_RMM_SIMULATED_DRIVER", row->driver);
    set("NUMPY_RMM_SIMULATED_CHECK", row->check);
    CHECK_EQ(sim.nrm_cudasim_default_config(&config), row->result);
    CHECK_EQ(config.devices, row->n_devices);
    CHECK_EQ(config.driver, row->version);
    CHECK_EQ(config.memory_nbytes, row->nbytes);
    CHECK_EQ(config.check, row->checks);
    set("NUMPY_RMM_SIMULATED_DEVICES", NULL);
    set("NUMPY_RMM_SIMULATED_MEMORY", NULL);
    set("NUMPY_RMM_SIMULATED_DRIVER", NULL);
    set("NUMPY_RMM_SIMULATED_CHECK", NULL);
}

static const struct {
    const char *name;
    int result, count;
} visible[] = {
    {"", NRM_CUDA_ERROR_NO_DEVICE, 0},
    {"-1", NRM_CUDA_ERROR_NO_DEVICE, 0},
    {"1", 0, 1},
    {"1,0", 0, 2},
    {"0,7,1", 0, 1},
    {"GPU-12", NRM_CUDA_ERROR_NO_DEVICE, 0},
};

TEST_EACH(visible_devices_are_honoured, visible)
{
    REQUIRE(load());
    struct nrm_cudasim_config config = machine();
    char id[32] = "";
    int count = 0;
    setenv("CUDA_VISIBLE_DEVICES", row->name, 1);
    CHECK_EQ(sim.nrm_cudasim_reset(&config), 0);
    CHECK_EQ(cu.cuInit(0), row->result);
    unsetenv("CUDA_VISIBLE_DEVICES");
    if (row->count > 0) {
        CHECK_EQ(cu.cuDeviceGetCount(&count), 0);
        CHECK_EQ(count, row->count);
        CHECK_EQ(cu.cuDeviceGetPCIBusId(id, sizeof id, 0), 0);
        CHECK_STR_EQ(id, row->name[0] == '1' ? "0000:02:00.0" : "0000:01:00.0");
    }
}

TEST(init_can_be_made_to_fail)
{
    REQUIRE(load());
    struct nrm_cudasim_config config = machine();
    config.init_result = NRM_CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
    int count;
    CHECK_EQ(sim.nrm_cudasim_reset(&config), 0);
    CHECK_EQ(cu.cuInit(0), NRM_CUDA_ERROR_SYSTEM_DRIVER_MISMATCH);
    CHECK_EQ(cu.cuDeviceGetCount(&count), NRM_CUDA_ERROR_NOT_INITIALIZED);
}

TEST(an_old_driver_lacks_what_is_newer)
{
    REQUIRE(load());
    struct nrm_cudasim_config config = machine();
    config.driver = 12040;
    REQUIRE(start_with(&config));
    void *address = &config;
    unsigned int found;
    nrm_CUevent event;
    CHECK_EQ(cu.cuGetProcAddress("cuCtxRecordEvent", &address, 12040, 0, &found), 0);
    CHECK(address == NULL);
    CHECK_EQ(found, NRM_CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
    CHECK_EQ(cu.cuGetProcAddress("cuCtxRecordEvent", &address, 12050, 0, &found),
             NRM_CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuEventCreate(&event, 2), 0);
    CHECK_EQ(cu.cuCtxRecordEvent(context, event), NRM_CUDA_ERROR_NOT_SUPPORTED);
    CHECK_EQ(sim.nrm_cudasim_fault_count(), 1);
}

TEST(asking_for_a_later_prototype_is_a_fault)
{
    REQUIRE(start());
    void *address = NULL;
    CHECK_EQ(cu.cuGetProcAddress("cuCtxGetDevice", &address, 2000, 0, NULL), 0);
    CHECK(address != NULL);
    CHECK_EQ(sim.nrm_cudasim_fault_count(), 0);
    CHECK_EQ(cu.cuGetProcAddress("cuCtxGetDevice", &address, 13000, 0, NULL), 0);
    CHECK(address == NULL);
    CHECK_EQ(sim.nrm_cudasim_fault_count(), 1);
}

TEST(attributes_can_be_changed)
{
    REQUIRE(start());
    int value = -1;
    nrm_CUdeviceptr ptr;
    CHECK_EQ(
        sim.nrm_cudasim_set_attribute(0, NRM_CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 0), 0);
    CHECK_EQ(cu.cuDeviceGetAttribute(&value, NRM_CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 0),
             0);
    CHECK_EQ(value, 0);
    CHECK_EQ(cu.cuMemAllocManaged(&ptr, MIB, 1), NRM_CUDA_ERROR_NOT_SUPPORTED);
    CHECK_EQ(cu.cuDeviceGetAttribute(&value, NRM_CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1),
             0);
    CHECK_EQ(value, 1);
    CHECK_EQ(sim.nrm_cudasim_set_attribute(2, 83, 0), NRM_CUDA_ERROR_INVALID_DEVICE);
}

/* ---- limits ---------------------------------------------------------------------- */

TEST(device_memory_ends)
{
    REQUIRE(load());
    struct nrm_cudasim_config config = machine();
    config.memory_nbytes = 10 * MIB;
    REQUIRE(start_with(&config));
    nrm_CUdeviceptr ptrs[3];
    size_t available;
    size_t total;
    CHECK_EQ(cu.cuMemAlloc(&ptrs[0], 4 * MIB), 0);
    CHECK_EQ(cu.cuMemAlloc(&ptrs[1], 4 * MIB), 0);
    CHECK_EQ(cu.cuMemAlloc(&ptrs[2], 4 * MIB), NRM_CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQ(cu.cuMemGetInfo(&available, &total), 0);
    CHECK_EQ(available, 2 * MIB);
    CHECK_EQ(total, 10 * MIB);
    CHECK_EQ(cu.cuMemFree(ptrs[0]), 0);
    CHECK_EQ(cu.cuMemAlloc(&ptrs[2], 6 * MIB), 0); /* not in one piece on the card */
    CHECK_EQ(cu.cuMemGetInfo(&available, &total), 0);
    CHECK_EQ(available, 0);
    CHECK_EQ(outstanding(NRM_CUDASIM_DEVICE_ALLOCATIONS), 2);
}

TEST(a_large_device_costs_nothing)
{
    REQUIRE(load());
    struct nrm_cudasim_config config = machine();
    config.memory_nbytes = (uint64_t)80 << 30;
    if (!can_reserve(2 * config.memory_nbytes)) {
        SKIP("there are no 160 GiB of addresses for a device of 80 GiB");
    }
    REQUIRE(start_with(&config));
    nrm_CUdeviceptr ptr;
    unsigned char byte = 0;
    REQUIRE_EQ(cu.cuMemAlloc(&ptr, (size_t)79 << 30), 0);
    CHECK_EQ(cu.cuMemsetD8(ptr + ((size_t)78 << 30), 7, 1), 0);
    CHECK_EQ(cu.cuMemcpyDtoH(&byte, ptr + ((size_t)78 << 30), 1), 0);
    CHECK_EQ(byte, 7);
    CHECK_EQ(cu.cuMemFree(ptr), 0);
}

TEST(page_locked_memory_ends)
{
    REQUIRE(load());
    struct nrm_cudasim_config config = machine();
    config.page_locked_nbytes = 3 * MIB;
    REQUIRE(start_with(&config));
    unsigned char *host = pages(2 * MIB, 1);
    void *ptr;
    CHECK_EQ(cu.cuMemHostAlloc(&ptr, 2 * MIB, 1), 0);
    CHECK_EQ(cu.cuMemHostRegister(host, 2 * MIB, 1), NRM_CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQ(cu.cuMemHostRegister(host, MIB, 1), 0);
    CHECK_EQ(cu.cuMemHostUnregister(host), 0);
    CHECK_EQ(cu.cuMemFreeHost(ptr), 0);
    CHECK_EQ(cu.cuMemHostRegister(host, 2 * MIB, 1), 0);
    CHECK_EQ(cu.cuMemHostUnregister(host), 0);
    munmap(host, 2 * MIB);
}

/* ---- failures -------------------------------------------------------------------- */

TEST(a_call_fails_when_told)
{
    REQUIRE(start());
    nrm_CUdeviceptr ptr;
    CHECK_EQ(sim.nrm_cudasim_fail("cuMemAlloc", 2, NRM_CUDA_ERROR_UNKNOWN, 2), 0);
    CHECK_EQ(cu.cuMemAlloc(&ptr, 1), 0);
    CHECK_EQ(cu.cuMemAlloc(&ptr, 1), NRM_CUDA_ERROR_UNKNOWN);
    CHECK_EQ(cu.cuMemAlloc(&ptr, 1), NRM_CUDA_ERROR_UNKNOWN);
    CHECK_EQ(cu.cuMemAlloc(&ptr, 1), 0);
    CHECK_EQ(sim.nrm_cudasim_call_count("cuMemAlloc"), 4);
    CHECK_EQ(outstanding(NRM_CUDASIM_DEVICE_ALLOCATIONS), 2);
}

TEST(a_call_fails_for_ever_until_told_otherwise)
{
    REQUIRE(start());
    size_t available;
    size_t total;
    CHECK_EQ(sim.nrm_cudasim_fail("cuMemGetInfo", 1, NRM_CUDA_ERROR_UNKNOWN, 0), 0);
    for (int i = 0; i < 5; i++) {
        CHECK_EQ(cu.cuMemGetInfo(&available, &total), NRM_CUDA_ERROR_UNKNOWN);
    }
    CHECK_EQ(sim.nrm_cudasim_fail("cuMemGetInfo", 0, 0, 0), 0);
    CHECK_EQ(cu.cuMemGetInfo(&available, &total), 0);
    CHECK_EQ(sim.nrm_cudasim_fail("cuNoSuchCall", 1, 1, 1),
             NRM_CUDA_ERROR_INVALID_VALUE);
}

TEST(a_sticky_error_is_everywhere)
{
    REQUIRE(start());
    nrm_CUevent event;
    nrm_CUdeviceptr ptr;
    nrm_CUcontext other;
    unsigned int flags;
    int active;
    CHECK_EQ(cu.cuEventCreate(&event, 2), 0);
    CHECK_EQ(sim.nrm_cudasim_set_sticky(0, NRM_CUDA_ERROR_ILLEGAL_ADDRESS), 0);
    CHECK_EQ(cu.cuEventQuery(event), NRM_CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(cu.cuMemAlloc(&ptr, 1), NRM_CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(cu.cuCtxRecordEvent(context, event), NRM_CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(cu.cuCtxSynchronize(), NRM_CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(cu.cuDevicePrimaryCtxGetState(0, &flags, &active), 0);
    CHECK_EQ(cu.cuDevicePrimaryCtxRetain(&other, 1), 0); /* the other device works */
    CHECK_EQ(cu.cuCtxSetCurrent(other), 0);
    CHECK_EQ(cu.cuMemAlloc(&ptr, 1), 0);
    CHECK_EQ(cu.cuEventQuery(event), NRM_CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(sim.nrm_cudasim_set_sticky(0, 0), 0);
    CHECK_EQ(cu.cuEventQuery(event), 0);
}

/* ---- contexts of two devices ----------------------------------------------------- */

TEST(an_event_stays_in_its_context)
{
    REQUIRE(start());
    nrm_CUcontext other;
    nrm_CUevent event;
    nrm_CUstream stream;
    CHECK_EQ(cu.cuEventCreate(&event, 2), 0);
    CHECK_EQ(cu.cuDevicePrimaryCtxRetain(&other, 1), 0);
    CHECK_EQ(cu.cuCtxSetCurrent(other), 0);
    CHECK_EQ(cu.cuStreamCreate(&stream, 1), 0);
    CHECK_EQ(cu.cuEventRecord(event, stream), NRM_CUDA_ERROR_INVALID_HANDLE);
    CHECK_EQ(cu.cuCtxRecordEvent(other, event), NRM_CUDA_ERROR_INVALID_HANDLE);
    CHECK_EQ(cu.cuCtxRecordEvent(context, event), 0);
    CHECK_EQ(cu.cuStreamWaitEvent(stream, event, 0), 0); /* waiting may cross */
}

TEST(a_context_event_does_not_cover_the_other_device)
{
    REQUIRE(start());
    nrm_CUcontext other;
    nrm_CUevent event;
    nrm_CUstream stream;
    nrm_CUdeviceptr ptr;
    CHECK_EQ(cu.cuEventCreate(&event, 2), 0);
    CHECK_EQ(cu.cuDevicePrimaryCtxRetain(&other, 1), 0);
    CHECK_EQ(cu.cuCtxSetCurrent(other), 0);
    CHECK_EQ(cu.cuStreamCreate(&stream, 1), 0);
    CHECK_EQ(cu.cuMemAlloc(&ptr, 64), 0);
    CHECK_EQ(sim.nrm_cudasim_hold_stream(stream), 0);
    CHECK_EQ(cu.cuMemsetD8Async(ptr, 1, 64, stream), 0);
    CHECK_EQ(cu.cuCtxRecordEvent(context, event), 0);
    CHECK_EQ(cu.cuEventQuery(event), 0);
    CHECK_EQ(sim.nrm_cudasim_release_stream(stream), 0);
    CHECK_EQ(cu.cuStreamSynchronize(stream), 0);
}

TEST(stale_handles_are_refused)
{
    REQUIRE(start());
    nrm_CUevent event;
    nrm_CUstream stream;
    CHECK_EQ(cu.cuEventCreate(&event, 2), 0);
    CHECK_EQ(cu.cuStreamCreate(&stream, 0), 0);
    CHECK_EQ(cu.cuEventDestroy(event), 0);
    CHECK_EQ(cu.cuEventQuery(event), NRM_CUDA_ERROR_INVALID_HANDLE);
    CHECK_EQ(cu.cuEventQuery((nrm_CUevent)(uintptr_t)0x1234),
             NRM_CUDA_ERROR_INVALID_HANDLE);
    CHECK_EQ(cu.cuEventQuery(NULL), NRM_CUDA_ERROR_INVALID_HANDLE);
    CHECK_EQ(cu.cuDevicePrimaryCtxReset(0), 0);
    CHECK_EQ(cu.cuDevicePrimaryCtxRetain(&context, 0), 0);
    CHECK_EQ(cu.cuStreamQuery(stream), NRM_CUDA_ERROR_INVALID_HANDLE);
}

/* ---- what it remembers ----------------------------------------------------------- */

TEST(calls_are_logged_with_their_results)
{
    REQUIRE(start());
    char text[200];
    uint64_t cursor = 0;
    nrm_CUdeviceptr ptr;
    sim.nrm_cudasim_log_clear();
    CHECK_EQ(sim.nrm_cudasim_log_read(&cursor, text, sizeof text), 0);
    CHECK_EQ(cu.cuMemAlloc(&ptr, 0x1230), 0);
    CHECK_EQ(cu.cuMemFree(ptr + 1), NRM_CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(sim.nrm_cudasim_log_read(&cursor, text, sizeof text), 1);
    CHECK_STR_HAS(text, "cuMemAlloc(");
    CHECK_STR_HAS(text, "0x1230");
    CHECK_STR_HAS(text, "= CUDA_SUCCESS");
    CHECK_EQ(sim.nrm_cudasim_log_read(&cursor, text, sizeof text), 1);
    CHECK_STR_HAS(text, "cuMemFree(");
    CHECK_STR_HAS(text, "= CUDA_ERROR_INVALID_VALUE");
    CHECK_EQ(sim.nrm_cudasim_log_read(&cursor, text, sizeof text), 0);
}

TEST(the_log_keeps_the_latest_calls)
{
    REQUIRE(start());
    char text[200];
    uint64_t cursor = 0;
    size_t n = 0;
    int version;
    for (int i = 0; i < 10000; i++) {
        (void)cu.cuDriverGetVersion(&version);
    }
    CHECK_EQ(sim.nrm_cudasim_call_count("cuDriverGetVersion"), 10000);
    while (sim.nrm_cudasim_log_read(&cursor, text, sizeof text) == 1) {
        n++;
    }
    CHECK_EQ(n, 4096);
}

TEST(unmapping_registered_memory_is_a_fault)
{
    REQUIRE(start());
    char text[240] = "";
    nrm_CUdeviceptr ptr;
    unsigned char *host = pages(64 * KIB, 4);
    CHECK_EQ(cu.cuMemAlloc(&ptr, 64 * KIB), 0);
    CHECK_EQ(cu.cuMemHostRegister(host, 64 * KIB, 1), 0);
    munmap(host, 64 * KIB);
    CHECK_EQ(cu.cuMemcpyHtoD(ptr, host, 64 * KIB), 0);
    CHECK_EQ(sim.nrm_cudasim_fault_count(), 1);
    CHECK_EQ(sim.nrm_cudasim_fault_text(0, text, sizeof text), 0);
    CHECK_STR_HAS(text, "cuMemcpyHtoD read");
    CHECK_EQ(cu.cuMemcpyDtoH(host, ptr, 64 * KIB), 0); /* no crash either */
    CHECK_EQ(sim.nrm_cudasim_fault_count(), 2);
    CHECK_EQ(cu.cuMemHostUnregister(host), 0);
    CHECK_EQ(sim.nrm_cudasim_fault_count(), 3);
    CHECK_EQ(sim.nrm_cudasim_fault_text(3, text, sizeof text),
             NRM_CUDA_ERROR_NOT_FOUND);
}

TEST(what_is_outstanding_is_counted)
{
    REQUIRE(start());
    nrm_CUdeviceptr ptr;
    void *host;
    unsigned char *registered = pages(3 * KIB, 1);
    uint64_t count;
    uint64_t nbytes;
    nrm_CUstream stream;
    CHECK_EQ(cu.cuMemAlloc(&ptr, 1), 0);
    CHECK_EQ(cu.cuMemAllocManaged(&ptr, 1, 1), 0);
    CHECK_EQ(cu.cuMemHostAlloc(&host, 5 * KIB, 1), 0);
    CHECK_EQ(cu.cuMemHostRegister(registered, 3 * KIB, 1), 0);
    CHECK_EQ(cu.cuStreamCreate(&stream, 0), 0);
    CHECK_EQ(sim.nrm_cudasim_outstanding(NRM_CUDASIM_REGISTRATIONS, &count, &nbytes),
             0);
    CHECK_EQ(count, 1);
    CHECK_EQ(nbytes, 3 * KIB);
    CHECK_EQ(sim.nrm_cudasim_outstanding(NRM_CUDASIM_HOST_ALLOCATIONS, &count, &nbytes),
             0);
    CHECK_EQ(nbytes, 5 * KIB);
    CHECK_EQ(outstanding(NRM_CUDASIM_MANAGED_ALLOCATIONS), 1);
    CHECK_EQ(outstanding(NRM_CUDASIM_STREAMS), 1);
    CHECK_EQ(sim.nrm_cudasim_reset(NULL), 0);
    for (int what = 0; what < NRM_CUDASIM_N_WHATS; what++) {
        CHECK_EQ(outstanding((enum nrm_cudasim_what)what), 0);
    }
    munmap(registered, 3 * KIB);
}

/* ---- fork, threads, reset -------------------------------------------------------- */

static void
child_after_init(void)
{
    int count;
    CHECK_EQ(cu.cuInit(0), NRM_CUDA_ERROR_NOT_INITIALIZED);
    CHECK_EQ(cu.cuDeviceGetCount(&count), NRM_CUDA_ERROR_NOT_INITIALIZED);
    CHECK_EQ(sim.nrm_cudasim_reset(NULL), NRM_CUDA_ERROR_NOT_INITIALIZED);
}

static void
child_before_init(void)
{
    nrm_CUdeviceptr ptr;
    CHECK_EQ(cu.cuInit(0), 0);
    CHECK_EQ(cu.cuDevicePrimaryCtxRetain(&context, 0), 0);
    CHECK_EQ(cu.cuCtxSetCurrent(context), 0);
    CHECK_EQ(cu.cuMemAlloc(&ptr, 64), 0);
    CHECK_EQ(cu.cuMemsetD8(ptr, 1, 64), 0);
    CHECK_EQ(cu.cuCtxSynchronize(), 0);
}

TEST(a_child_has_no_driver_once_it_was_initialised)
{
    struct nrm_cudasim_config config = machine();
    REQUIRE(start());
    CHECK_IN_CHILD(child_after_init);
    config.manual =
        1; /* a thread in the child of a process with threads confuses TSan */
    CHECK_EQ(sim.nrm_cudasim_reset(&config), 0);
    CHECK_IN_CHILD(child_before_init);
}

static void
read_device_memory(void)
{
    nrm_CUdeviceptr ptr = 0;
    (void)cu.cuMemAlloc(&ptr, 64);
    *(volatile char *)(uintptr_t)ptr = 1;
}

static void
follow_device_pointer(void)
{
    struct nrm_cudasim_config config = machine();
    (void)start_with(&config);
    read_device_memory();
}

TEST(a_host_that_follows_a_device_pointer_crashes)
{
    struct nrm_cudasim_config config = machine();
    REQUIRE(load());
    CHECK_EQ(sim.nrm_cudasim_reset(&config), 0);
    CHECK_DIES(follow_device_pointer, SIGSEGV);
}

static void
work(unsigned int index, void *arg)
{
    nrm_CUdeviceptr ptr;
    nrm_CUstream stream;
    nrm_CUevent event;
    (void)arg;
    CHECK_EQ(cu.cuCtxSetCurrent(context), 0);
    CHECK_EQ(cu.cuStreamCreate(&stream, index % 2), 0);
    CHECK_EQ(cu.cuEventCreate(&event, 2), 0);
    for (int i = 0; i < 50; i++) {
        void *host;
        unsigned char value = (unsigned char)(index + (unsigned int)i);
        unsigned char byte = 0;
        CHECK_EQ(cu.cuMemAlloc(&ptr, 8 * KIB), 0);
        CHECK_EQ(cu.cuMemHostAlloc(&host, 8 * KIB, 1), 0);
        memset(host, value, 8 * KIB);
        CHECK_EQ(cu.cuMemcpyHtoDAsync(ptr, host, 8 * KIB, stream), 0);
        CHECK_EQ(cu.cuCtxRecordEvent(context, event), 0);
        CHECK_EQ(cu.cuMemcpyDtoHAsync(&byte, ptr + 4000, 1, NRM_CU_STREAM_PER_THREAD),
                 0);
        CHECK_EQ(cu.cuStreamSynchronize(stream), 0);
        CHECK_EQ(cu.cuMemcpyDtoH(&byte, ptr + 4000, 1), 0);
        CHECK_EQ(byte, value);
        CHECK_EQ(cu.cuEventSynchronize(event), 0);
        CHECK_EQ(cu.cuMemFreeHost(host), 0);
        CHECK_EQ(cu.cuMemFree(ptr), 0);
    }
    CHECK_EQ(cu.cuEventDestroy(event), 0);
    CHECK_EQ(cu.cuStreamDestroy(stream), 0);
}

TEST(many_threads_share_a_device)
{
    REQUIRE(start());
    check_threads(8, work, NULL);
    CHECK_EQ(cu.cuCtxSynchronize(), 0);
    CHECK_EQ(outstanding(NRM_CUDASIM_DEVICE_ALLOCATIONS), 0);
    CHECK_EQ(outstanding(NRM_CUDASIM_HOST_ALLOCATIONS), 0);
    CHECK_EQ(outstanding(NRM_CUDASIM_STREAMS), 0);
    CHECK_EQ(outstanding(NRM_CUDASIM_OPERATIONS), 0);
    CHECK_EQ(sim.nrm_cudasim_fault_count(), 0);
}

static void *
free_held(void *arg)
{
    CHECK_EQ(cu.cuCtxSetCurrent(context), 0);
    nrm_CUresult result = cu.cuMemFree(*(nrm_CUdeviceptr *)arg);
    (void)result; /* the machine goes away meanwhile */
    return NULL;
}

TEST(a_reset_gets_through_to_threads_that_wait)
{
    REQUIRE(start());
    nrm_CUdeviceptr ptr;
    nrm_CUstream stream;
    pthread_t thread;
    struct timespec moment = {.tv_nsec = 20000000};
    CHECK_EQ(cu.cuMemAlloc(&ptr, 64), 0);
    CHECK_EQ(cu.cuStreamCreate(&stream, 1), 0);
    CHECK_EQ(sim.nrm_cudasim_hold_stream(stream), 0);
    CHECK_EQ(cu.cuMemsetD8Async(ptr, 1, 64, stream), 0);
    REQUIRE_EQ(pthread_create(&thread, NULL, free_held, &ptr), 0);
    do {
        nanosleep(&moment, NULL);
    } while (sim.nrm_cudasim_call_count("cuMemFree") == 0);
    CHECK_EQ(sim.nrm_cudasim_reset(NULL), 0);
    pthread_join(thread, NULL);
    CHECK_EQ(cu.cuInit(0), 0);
}

CHECK_MAIN
