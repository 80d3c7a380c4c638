/* The simulated driver, for C tests: its controls, found by name in the library that
   the core opens, and a start that gives a test a machine of its own.

       #include "simulator.h"

       TEST(a_thing)
       {
           struct nrm_cudasim_config config = simulator_config();
           config.devices = 2;
           simulator_start(&config);           // NULL: one device of 8 GiB, driver 13.0
           sim.fail("cuMemAlloc", 1, NRM_CUDA_ERROR_OUT_OF_MEMORY, 1);
           …
           CHECK_EQ(sim.fault_count(), 0);
       }

   `cuda` is a table of the driver's own entry points, those that only tests call among
   them: what another library in the same process would call. */

#ifndef SIMULATOR_H
#define SIMULATOR_H

#include <dlfcn.h>
#include <unistd.h>

#include "check.h"
#include "core/order.h"
#include "core/uses.h"
#include "cuda/driver.h"
#include "cudasim.h"
#include "os/system.h"

static struct {
    __typeof__(nrm_cudasim_default_config) *default_config;
    __typeof__(nrm_cudasim_reset) *reset;
    __typeof__(nrm_cudasim_set_attribute) *set_attribute;
    __typeof__(nrm_cudasim_set_sticky) *set_sticky;
    __typeof__(nrm_cudasim_fail) *fail;
    __typeof__(nrm_cudasim_hold_stream) *hold_stream;
    __typeof__(nrm_cudasim_release_stream) *release_stream;
    __typeof__(nrm_cudasim_call_count) *call_count;
    __typeof__(nrm_cudasim_fault_count) *fault_count;
    __typeof__(nrm_cudasim_fault_text) *fault_text;
    __typeof__(nrm_cudasim_outstanding) *outstanding;
    __typeof__(nrm_cudasim_log_read) *log_read;
    __typeof__(nrm_cudasim_log_clear) *log_clear;
    __typeof__(nrm_cudasim_set_chooser) *set_chooser;
    __typeof__(nrm_cudasim_launch) *launch;
    __typeof__(nrm_cudasim_race_count) *race_count;
    __typeof__(nrm_cudasim_race_text) *race_text;
    __typeof__(nrm_cudasim_host_access) *host_access;
    __typeof__(nrm_cudasim_block_taken) *block_taken;
    __typeof__(nrm_cudasim_block_given) *block_given;
} sim;

static struct {
#define X(name, symbol, version, required, result, arguments) nrm_##name##_fn *name;
    NRM_CUDA_ALL_CALLS(X)
#undef X
} cuda;

static inline void
simulator__load(void)
{
    void *library = dlopen(NRM_TEST_CUDASIM, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        printf("Bail out! %s\n", dlerror());
        exit(1);
    }
#define CONTROL(name) *(void **)&sim.name = dlsym(library, "nrm_cudasim_" #name)
    CONTROL(default_config);
    CONTROL(reset);
    CONTROL(set_attribute);
    CONTROL(set_sticky);
    CONTROL(fail);
    CONTROL(hold_stream);
    CONTROL(release_stream);
    CONTROL(call_count);
    CONTROL(fault_count);
    CONTROL(fault_text);
    CONTROL(outstanding);
    CONTROL(log_read);
    CONTROL(log_clear);
    CONTROL(set_chooser);
    CONTROL(launch);
    CONTROL(race_count);
    CONTROL(race_text);
    CONTROL(host_access);
    CONTROL(block_taken);
    CONTROL(block_given);
#undef CONTROL
#define X(name, symbol, version, required, result, arguments)                          \
    *(void **)&cuda.name = dlsym(library, #symbol);
    NRM_CUDA_ALL_CALLS(X)
#undef X
    setenv("NUMPY_RMM_CUDASIM_PATH", NRM_TEST_CUDASIM, 1);
    unsetenv("CUDA_VISIBLE_DEVICES");
}

static inline struct nrm_cudasim_config
simulator_config(void)
{
    struct nrm_cudasim_config config = {.size = sizeof config};
    if (sim.reset == NULL) {
        simulator__load();
    }
    sim.default_config(&config);
    return config;
}

/* A new machine, and the core looks for its driver again. */
static inline void
simulator_start(const struct nrm_cudasim_config *config)
{
    if (sim.reset == NULL) {
        simulator__load();
    }
    CHECK_EQ(sim.reset(config), 0);
    CHECK_OK(nrm__cuda_set_library("simulator"));
    nrm__epoch_forget_contexts();
    nrm__order_forget_contexts();
}

/* How many of `what` live. */
static inline uint64_t
simulator_count(int what)
{
    uint64_t count = 0;
    uint64_t nbytes = 0;
    sim.outstanding(what, &count, &nbytes);
    return count;
}

static inline void
simulator_check_faults(void)
{
    char text[256];
    for (uint64_t i = 0; i < sim.fault_count() && i < 5; i++) {
        sim.fault_text(i, text, sizeof text);
        NOTE("fault: %s", text);
    }
    CHECK_EQ(sim.fault_count(), 0u);
}

/* A stream that is captured from the beginning. */
static inline nrm_CUstream
simulator_begin_capture(unsigned flags, int mode)
{
    nrm_CUstream stream = NULL;
    CHECK_EQ(cuda.cuStreamCreate(&stream, flags), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamBeginCapture(stream, (nrm_CUstreamCaptureMode)mode),
             NRM_CUDA_SUCCESS);
    return stream;
}

/* Ends a capture, and its graph. */
static inline nrm_CUresult
simulator_end_capture(nrm_CUstream stream)
{
    nrm_CUgraph graph = NULL;
    nrm_CUresult code = cuda.cuStreamEndCapture(stream, &graph);
    if (graph != NULL) {
        cuda.cuGraphDestroy(graph);
    }
    return code;
}

/* A thread that lets a held stream go a while later. */
static inline void *
simulator_release_later(void *stream)
{
    nrm__sleep_ns(60000000);
    CHECK_EQ(sim.release_stream(stream), 0);
    return NULL;
}

/* Work of the host in a stream: it takes so many nanoseconds, and does nothing. */
static inline void
simulator_sleep(void *ns)
{
    nrm__sleep_ns((uintptr_t)ns);
}

/* A machine that looks for races. */
static inline struct nrm_cudasim_config
simulator_checked(void)
{
    struct nrm_cudasim_config config = simulator_config();
    config.check = NRM_CUDASIM_CHECK_ON;
    return config;
}

static inline uint64_t
simulator_tell_races(void)
{
    char text[NRM_CUDASIM_RACE_NBYTES];
    uint64_t n = sim.race_count();
    for (uint64_t i = 0; i < n && sim.race_text(i, text, sizeof text) == 0; i++) {
        NOTE("race: %s", text);
    }
    return n;
}

/* Runs a test's part in a child; its checks are ours. 0: all held. */
static inline int
in_child(void (*part)(void))
{
    return check__fork_status(part, false);
}

/* Whether the driver knows an address as page-locked host memory. */
static inline bool
is_page_locked(const void *ptr)
{
    nrm_CUmemorytype type = 0;
    nrm_CUresult code = cuda.cuPointerGetAttribute(
        &type, NRM_CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (nrm_CUdeviceptr)(uintptr_t)ptr);
    return code == NRM_CUDA_SUCCESS && type == NRM_CU_MEMORYTYPE_HOST;
}

#endif
