/* What the programs here share. Each states rules of the CUDA driver as calls with
 * their expected answers and prints one TAP line an answer. The same program must
 * print the same on a real driver and on the simulated one: that is how the simulator
 * is kept honest.
 *
 *     program [library]        libcuda.so.1 when none is named
 *
 * Lines hold names of results and yes or no, never addresses or times, so that outputs
 * can be compared. */
#ifndef RULE_H
#define RULE_H

#include "cuda/abi.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { KIB = 1024, MIB = 1024 * 1024 };

/* Every entry point of the list, under its own name: cu.cuMemAlloc(&ptr, nbytes) */
static struct {
#define X(name, symbol, version, required, result, arguments) nrm_##name##_fn *name;
    NRM_CUDA_ALL_CALLS(X)
#undef X
} cu;

static nrm_CUdevice device;
static nrm_CUcontext context;
static int n_lines;
static int n_failed;

/* ---- results --------------------------------------------------------------------- */

static const char *
result_name(nrm_CUresult result)
{
    switch (result) {
#define X(name, value)                                                                 \
    case NRM_CUDA_##name:                                                              \
        return #name;
        NRM_CUDA_RESULTS(X)
#undef X
    }
    return "an unlisted error";
}

static void
line(bool holds, const char *rule, const char *observed, const char *expected)
{
    n_lines++;
    printf("%sok %d - %s: %s", holds ? "" : "not ", n_lines, rule, observed);
    if (!holds) {
        n_failed++;
        printf(" (expected %s)", expected);
    }
    putchar('\n');
    fflush(stdout);
}

static inline void
expect(const char *rule, nrm_CUresult observed, nrm_CUresult expected)
{
    line(observed == expected, rule, result_name(observed), result_name(expected));
}

static inline void
expect_number(const char *rule, long long observed, long long expected)
{
    char a[32];
    char b[32];
    snprintf(a, sizeof a, "%lld", observed);
    snprintf(b, sizeof b, "%lld", expected);
    line(observed == expected, rule, a, b);
}

static inline void
expect_yes(const char *rule, bool observed)
{
    line(observed, rule, observed ? "yes" : "no", "yes");
}

static inline void
expect_no(const char *rule, bool observed)
{
    line(!observed, rule, observed ? "yes" : "no", "no");
}

/* What a rule stands on: the program ends where it does not hold. */
#define MUST(call)                                                                     \
    do {                                                                               \
        nrm_CUresult must_result = (call);                                             \
        if (must_result != NRM_CUDA_SUCCESS) {                                         \
            printf("Bail out! %s:%d %s: %s\n", __FILE__, __LINE__, #call,              \
                   result_name(must_result));                                          \
            exit(1);                                                                   \
        }                                                                              \
    } while (0)

static inline int
finish(void)
{
    printf("1..%d\n", n_lines);
    fflush(stdout);
    _exit(n_failed == 0 ? 0 : 1); /* whatever a rule left running */
}

/* ---- the driver ------------------------------------------------------------------ */

static inline void
open_driver(int argc, char **argv)
{
    const char *path = argc > 1 ? argv[1] : "libcuda.so.1";
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        printf("1..0 # SKIP %s\n", dlerror());
        exit(0);
    }
    void *address = dlsym(library, "cuGetProcAddress_v2");
    nrm_cuGetProcAddress_fn *get;
    memcpy(&get, &address, sizeof get);
    if (get == NULL) {
        printf("1..0 # SKIP %s has no cuGetProcAddress_v2\n", path);
        exit(0);
    }
#define X(name, symbol, version, required, result, arguments)                          \
    if (get(#name, &address, version, 0, NULL) == NRM_CUDA_SUCCESS) {                  \
        memcpy(&cu.name, &address, sizeof address);                                    \
    }
    NRM_CUDA_ALL_CALLS(X)
#undef X
    alarm(180); /* a rule that hangs must not hang a machine */
}

/* With device 0's primary context current. */
static inline void
start(int argc, char **argv)
{
    open_driver(argc, argv);
    nrm_CUresult result = cu.cuInit(0);
    if (result != NRM_CUDA_SUCCESS) {
        printf("1..0 # SKIP cuInit: %s\n", result_name(result));
        exit(0);
    }
    MUST(cu.cuDeviceGet(&device, 0));
    MUST(cu.cuDevicePrimaryCtxRetain(&context, device));
    MUST(cu.cuCtxSetCurrent(context));
}

/* ---- time: a stream that is held, and calls that block --------------------------- */

static uint32_t *flag; /* page-locked; a held stream waits until it is 1 */

static inline void
hold(nrm_CUstream stream)
{
    void *ptr = NULL;
    nrm_CUdeviceptr device_flag;
    if (flag == NULL) {
        MUST(cu.cuMemHostAlloc(&ptr, 4096, NRM_CU_MEMHOSTALLOC_DEVICEMAP));
        flag = ptr;
    }
    __atomic_store_n(flag, 0, __ATOMIC_RELEASE);
    MUST(cu.cuMemHostGetDevicePointer(&device_flag, flag, 0));
    MUST(cu.cuStreamWaitValue32(stream, device_flag, 1, NRM_CU_STREAM_WAIT_VALUE_GEQ));
}

static inline void
let_go(void)
{
    __atomic_store_n(flag, 1, __ATOMIC_RELEASE);
}

static inline void
sleep_ms(long ms)
{
    struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    nanosleep(&time, NULL);
}

/* A call made by another thread, with the context current there. */
struct probe {
    nrm_CUresult (*call)(void *arg);
    void *arg;
    bool without_context;
    atomic_bool is_done;
    nrm_CUresult result;
    pthread_t thread;
};

static inline void *
probe_main(void *arg)
{
    struct probe *probe = arg;
    if (!probe->without_context) {
        MUST(cu.cuCtxSetCurrent(context));
    }
    probe->result = probe->call(probe->arg);
    atomic_store(&probe->is_done, true);
    return NULL;
}

static inline void
probe_start(struct probe *probe, nrm_CUresult (*call)(void *arg), void *arg)
{
    *probe = (struct probe){.call = call, .arg = arg};
    if (pthread_create(&probe->thread, NULL, probe_main, probe) != 0) {
        abort();
    }
}

static inline nrm_CUresult
probe_join(struct probe *probe)
{
    pthread_join(probe->thread, NULL);
    return probe->result;
}

/* Whether the call is still in the driver after a while. */
static inline bool
probe_blocks(const struct probe *probe)
{
    for (int i = 0; i < 60 && !atomic_load(&probe->is_done); i++) {
        sleep_ms(5);
    }
    return !atomic_load(&probe->is_done);
}

/* The answer of a call in a thread that has no current context. */
static inline nrm_CUresult
in_bare_thread(nrm_CUresult (*call)(void *arg), void *arg)
{
    struct probe probe = {.call = call, .arg = arg, .without_context = true};
    if (pthread_create(&probe.thread, NULL, probe_main, &probe) != 0) {
        abort();
    }
    return probe_join(&probe);
}

/* ---- memory ---------------------------------------------------------------------- */

static inline unsigned char *
pages(size_t nbytes, int value)
{
    void *ptr =
        mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (ptr == MAP_FAILED) {
        abort();
    }
    memset(ptr, value, nbytes);
    return ptr;
}

static inline nrm_CUdeviceptr
address_of(const void *ptr)
{
    return (nrm_CUdeviceptr)(uintptr_t)ptr;
}

/* The byte of device memory, or -1 when it could not be read. */
static inline int
device_byte(nrm_CUdeviceptr ptr)
{
    unsigned char byte = 0;
    return cu.cuMemcpyDtoH(&byte, ptr, 1) == NRM_CUDA_SUCCESS ? byte : -1;
}

/* How a forked child ends that runs the function: its exit status, or minus a
 * signal. */
static inline int
in_child(int (*function)(void *arg), void *arg)
{
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        _exit(function(arg));
    }
    int status = 0;
    waitpid(pid, &status, 0);
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

#endif
