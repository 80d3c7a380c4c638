/*
 * What the probes of a CUDA driver share: the driver's calls by their names, a child
 * for each probe, and the calls that several of them look at.
 *
 * Every probe runs in a process of its own, forked before anybody called cuInit, so one
 * may end by a signal and the others still answer. One line an answer. PROBE_LIBRARY
 * names another library than libcuda.so.1.
 */
#ifndef NRM_TESTS_GPU_PROBE_H
#define NRM_TESTS_GPU_PROBE_H

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cuda/abi.h"

#define MIB ((size_t)1 << 20)

static struct {
#define X(name, symbol, version, required, result, arguments) nrm_##name##_fn *name;
    NRM_CUDA_ALL_CALLS(X)
#undef X
} cu;

static nrm_CUdevice device;
static nrm_CUcontext context;
static nrm_CUdeviceptr device_block;
static void *host_alloc_block;

static inline double
now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static inline void
sleep_ms(long ms)
{
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL);
}

static inline const char *
name_of(nrm_CUresult code)
{
    const char *name = NULL;
    if (cu.cuGetErrorName(code, &name) != NRM_CUDA_SUCCESS || name == NULL) {
        return "(no name)";
    }
    return strncmp(name, "CUDA_ERROR_", 11) == 0 ? name + 11 : name + 5;
}

#define MUST(call)                                                                     \
    do {                                                                               \
        nrm_CUresult code_ = (call);                                                   \
        if (code_ != NRM_CUDA_SUCCESS) {                                               \
            printf("  [line %d: %s: %s]\n", __LINE__, #call, name_of(code_));          \
            fflush(stdout);                                                            \
            _exit(3);                                                                  \
        }                                                                              \
    } while (0)

static inline void
load(void)
{
    const char *path = getenv("PROBE_LIBRARY");
    void *library = dlopen(path != NULL ? path : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        printf("%s\n", dlerror());
        exit(2);
    }
#define X(name, symbol, version, required, result, arguments)                          \
    *(void **)&cu.name = dlsym(library, #symbol);                                      \
    if (cu.name == NULL) {                                                             \
        printf("missing: %s\n", #symbol);                                              \
    }
    NRM_CUDA_ALL_CALLS(X)
#undef X
}

static inline void
tell_version(void)
{
    int version = 0;
    cu.cuDriverGetVersion(&version);
    printf("driver %d\n", version);
}

/* The primary context of device 0, current. */
static inline void
start(void)
{
    MUST(cu.cuInit(0));
    MUST(cu.cuDeviceGet(&device, 0));
    MUST(cu.cuDevicePrimaryCtxRetain(&context, device));
    MUST(cu.cuCtxSetCurrent(context));
}

static inline char *
map_touched(size_t nbytes)
{
    char *ptr =
        mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (ptr == MAP_FAILED) {
        perror("mmap");
        exit(2);
    }
    memset(ptr, 7, nbytes);
    return ptr;
}

/* Runs `probe` in a child; says so when it dies. */
static inline void
in_child(void (*probe)(int, int), int a, int b)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        alarm(60);
        probe(a, b);
        fflush(stdout);
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    if (WIFSIGNALED(status)) {
        printf("  -> the process ended by signal %d (%s)\n", WTERMSIG(status),
               strsignal(WTERMSIG(status)));
    }
}

/* What more a call has to say than its code. */
static char answer[256];

static inline nrm_CUresult
answer_of(nrm_CUresult code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(answer, sizeof answer, format, args);
    va_end(args);
    return code;
}

/* ---- the calls that are looked at in (a), (d) and (i) ---- */

static nrm_CUevent done_event;
static char *registered;
static char *ordinary;

static inline nrm_CUresult
call_get_id(void)
{
    unsigned long long id;
    return cu.cuCtxGetId(context, &id);
}

static inline nrm_CUresult
call_get_state(void)
{
    unsigned flags;
    int active;
    return cu.cuDevicePrimaryCtxGetState(device, &flags, &active);
}

static inline nrm_CUresult
call_get_current(void)
{
    nrm_CUcontext current;
    return cu.cuCtxGetCurrent(&current);
}

static inline nrm_CUresult
call_get_device(void)
{
    nrm_CUdevice current;
    return cu.cuCtxGetDevice(&current);
}

static inline nrm_CUresult
memory_type(void *ptr)
{
    nrm_CUmemorytype type;
    return cu.cuPointerGetAttribute(&type, NRM_CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                    (nrm_CUdeviceptr)(uintptr_t)ptr);
}

static inline nrm_CUresult
call_attribute_registered(void)
{
    return memory_type(registered);
}

static inline nrm_CUresult
call_attribute_ordinary(void)
{
    nrm_CUresult code = memory_type(ordinary);
    return code == NRM_CUDA_ERROR_INVALID_VALUE ? NRM_CUDA_SUCCESS : code;
}

static inline nrm_CUresult
call_push_pop(void)
{
    nrm_CUcontext popped;
    nrm_CUresult code = cu.cuCtxPushCurrent(context);
    return code != NRM_CUDA_SUCCESS ? code : cu.cuCtxPopCurrent(&popped);
}

static inline nrm_CUresult
call_device_attribute(void)
{
    int value;
    return cu.cuDeviceGetAttribute(&value, NRM_CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY,
                                   device);
}

static inline nrm_CUresult
call_exchange_mode_twice(void)
{
    nrm_CUstreamCaptureMode mode = NRM_CU_STREAM_CAPTURE_MODE_RELAXED;
    nrm_CUresult code = cu.cuThreadExchangeStreamCaptureMode(&mode);
    return code != NRM_CUDA_SUCCESS ? code
                                    : cu.cuThreadExchangeStreamCaptureMode(&mode);
}

static inline nrm_CUresult
call_is_capturing(void)
{
    nrm_CUstreamCaptureStatus status;
    return cu.cuStreamIsCapturing(NRM_CU_STREAM_LEGACY, &status);
}

static inline nrm_CUresult
call_stream_id(void)
{
    unsigned long long id;
    return cu.cuStreamGetId(NRM_CU_STREAM_LEGACY, &id);
}

static inline nrm_CUresult
call_event_query(void)
{
    return cu.cuEventQuery(done_event);
}

static inline nrm_CUresult
call_event_create(void)
{
    nrm_CUevent event;
    nrm_CUresult code = cu.cuEventCreate(&event, NRM_CU_EVENT_DISABLE_TIMING);
    return code != NRM_CUDA_SUCCESS ? code : cu.cuEventDestroy(event);
}

static inline nrm_CUresult
call_record(void)
{
    return cu.cuCtxRecordEvent != NULL ? cu.cuCtxRecordEvent(context, done_event)
                                       : NRM_CUDA_ERROR_NOT_FOUND;
}

static inline nrm_CUresult
call_retain_release(void)
{
    nrm_CUcontext again;
    nrm_CUresult code = cu.cuDevicePrimaryCtxRetain(&again, device);
    return code != NRM_CUDA_SUCCESS ? code : cu.cuDevicePrimaryCtxRelease(device);
}

static inline nrm_CUresult
call_memory_info(void)
{
    size_t free_nbytes, total_nbytes;
    return cu.cuMemGetInfo(&free_nbytes, &total_nbytes);
}

static inline nrm_CUresult
call_total_memory(void)
{
    size_t nbytes;
    return cu.cuDeviceTotalMem(&nbytes, device);
}

static inline nrm_CUresult
call_error_name(void)
{
    const char *name;
    return cu.cuGetErrorName(NRM_CUDA_ERROR_NOT_READY, &name);
}

static const struct {
    const char *name;
    nrm_CUresult (*call)(void);
} calls[] = {
    {"cuCtxGetId", call_get_id},
    {"cuDevicePrimaryCtxGetState", call_get_state},
    {"cuCtxGetCurrent", call_get_current},
    {"cuCtxGetDevice", call_get_device},
    {"cuPointerGetAttribute(registered)", call_attribute_registered},
    {"cuPointerGetAttribute(ordinary)", call_attribute_ordinary},
    {"cuCtxPushCurrent + Pop", call_push_pop},
    {"cuDeviceGetAttribute", call_device_attribute},
    {"cuThreadExchangeStreamCaptureMode x2", call_exchange_mode_twice},
    {"cuStreamIsCapturing(legacy)", call_is_capturing},
    {"cuStreamGetId(legacy)", call_stream_id},
    {"cuEventQuery(done)", call_event_query},
    {"cuEventCreate + Destroy", call_event_create},
    {"cuCtxRecordEvent", call_record},
    {"cuDevicePrimaryCtxRetain + Release", call_retain_release},
    {"cuMemGetInfo", call_memory_info},
    {"cuDeviceTotalMem", call_total_memory},
    {"cuGetErrorName", call_error_name},
};
enum { N_CALLS = sizeof calls / sizeof calls[0] };

static inline void
prepare_calls(void)
{
    registered = map_touched(MIB);
    ordinary = map_touched(MIB);
    MUST(cu.cuMemHostRegister(registered, MIB, NRM_CU_MEMHOSTREGISTER_PORTABLE));
    MUST(cu.cuEventCreate(&done_event, NRM_CU_EVENT_DISABLE_TIMING));
    MUST(cu.cuEventRecord(done_event, NRM_CU_STREAM_LEGACY));
    MUST(cu.cuCtxSynchronize());
}

#endif
