/* The simulated driver by itself, opened as a program opens a driver, with its
   controls. */
#ifndef NRM_TESTS_CUDASIM_MACHINE_H
#define NRM_TESTS_CUDASIM_MACHINE_H

#include "check.h"

#include "cuda/abi.h"
#include "cudasim.h"

#include <dlfcn.h>
#include <sys/mman.h>

enum { KIB = 1024, MIB = 1024 * 1024 };

static struct {
#define X(name, symbol, version, required, result, arguments) nrm_##name##_fn *name;
    NRM_CUDA_ALL_CALLS(X)
#undef X
} cu;

#define CONTROLS(X)                                                                    \
    X(nrm_cudasim_default_config)                                                      \
    X(nrm_cudasim_reset)                                                               \
    X(nrm_cudasim_set_attribute)                                                       \
    X(nrm_cudasim_set_sticky)                                                          \
    X(nrm_cudasim_fail)                                                                \
    X(nrm_cudasim_hold_stream)                                                         \
    X(nrm_cudasim_release_stream)                                                      \
    X(nrm_cudasim_step)                                                                \
    X(nrm_cudasim_call_count)                                                          \
    X(nrm_cudasim_log_read)                                                            \
    X(nrm_cudasim_log_clear)                                                           \
    X(nrm_cudasim_fault_count)                                                         \
    X(nrm_cudasim_fault_text)                                                          \
    X(nrm_cudasim_outstanding)

static struct {
#define X(name) __typeof__(name) *name;
    CONTROLS(X)
#undef X
} sim;

static inline bool
load(void)
{
    static bool loaded;
    void *library;
    void *address;
    if (loaded) {
        return true;
    }
    library = dlopen(NRM_TEST_CUDASIM, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        NOTE("%s", dlerror());
        return false;
    }
#define X(name)                                                                        \
    address = dlsym(library, #name);                                                   \
    memcpy(&sim.name, &address, sizeof address);
    CONTROLS(X)
#undef X
#define X(name, symbol, version, required, result, arguments)                          \
    address = dlsym(library, #symbol);                                                 \
    memcpy(&cu.name, &address, sizeof address);
    NRM_CUDA_ALL_CALLS(X)
#undef X
    loaded = true;
    return true;
}

static inline struct nrm_cudasim_config
machine(void)
{
    return (struct nrm_cudasim_config){.size = sizeof(struct nrm_cudasim_config),
                                       .devices = 2,
                                       .driver = 13000,
                                       .memory_nbytes = (uint64_t)8 << 30};
}

static nrm_CUcontext context;

/* A new machine whose first device's primary context is current. */
static inline bool
start_with(const struct nrm_cudasim_config *config)
{
    return CHECK(load()) && CHECK_EQ(sim.nrm_cudasim_reset(config), 0) &&
           CHECK_EQ(cu.cuInit(0), 0) &&
           CHECK_EQ(cu.cuDevicePrimaryCtxRetain(&context, 0), 0) &&
           CHECK_EQ(cu.cuCtxSetCurrent(context), 0);
}

static inline bool
start(void)
{
    struct nrm_cudasim_config config = machine();
    return start_with(&config);
}

static inline uint64_t
outstanding(enum nrm_cudasim_what what)
{
    uint64_t count = UINT64_MAX;
    uint64_t nbytes;
    CHECK_EQ(sim.nrm_cudasim_outstanding(what, &count, &nbytes), 0);
    return count;
}

static inline unsigned char *
pages(size_t nbytes, int value)
{
    void *ptr =
        mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(ptr != MAP_FAILED);
    return memset(ptr, value, nbytes);
}

#endif
