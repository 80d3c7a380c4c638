/*
 * What a CUDA driver answers about contexts: which calls stand behind another thread's
 * waiting free, what a reset leaves behind, what a capture survives, what the calls
 * cost. src/cuda is written by these answers; run it again on a new driver and compare.
 *
 *     cc -pthread -I src tests/gpu/probe_context.c -ldl -o probe && ./probe [letters]
 *
 * Every probe runs in a process of its own, forked before anybody called cuInit, so one
 * may end by a signal and the others still answer. One line an answer. PROBE_LIBRARY
 * names another library than libcuda.so.1.
 */
#define _GNU_SOURCE
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

static double
now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static void
sleep_ms(long ms)
{
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL);
}

static const char *
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

static void
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

/* The primary context of device 0, current. */
static void
start(void)
{
    MUST(cu.cuInit(0));
    MUST(cu.cuDeviceGet(&device, 0));
    MUST(cu.cuDevicePrimaryCtxRetain(&context, device));
    MUST(cu.cuCtxSetCurrent(context));
}

static char *
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
static void
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

/* ---- the calls that are looked at in (a), (d) and (i) ---- */

static nrm_CUevent done_event;
static char *registered;
static char *ordinary;

static nrm_CUresult
call_get_id(void)
{
    unsigned long long id;
    return cu.cuCtxGetId(context, &id);
}

static nrm_CUresult
call_get_state(void)
{
    unsigned flags;
    int active;
    return cu.cuDevicePrimaryCtxGetState(device, &flags, &active);
}

static nrm_CUresult
call_get_current(void)
{
    nrm_CUcontext current;
    return cu.cuCtxGetCurrent(&current);
}

static nrm_CUresult
call_get_device(void)
{
    nrm_CUdevice current;
    return cu.cuCtxGetDevice(&current);
}

static nrm_CUresult
memory_type(void *ptr)
{
    nrm_CUmemorytype type;
    return cu.cuPointerGetAttribute(&type, NRM_CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                    (nrm_CUdeviceptr)(uintptr_t)ptr);
}

static nrm_CUresult
call_attribute_registered(void)
{
    return memory_type(registered);
}

static nrm_CUresult
call_attribute_ordinary(void)
{
    nrm_CUresult code = memory_type(ordinary);
    return code == NRM_CUDA_ERROR_INVALID_VALUE ? NRM_CUDA_SUCCESS : code;
}

static nrm_CUresult
call_push_pop(void)
{
    nrm_CUcontext popped;
    nrm_CUresult code = cu.cuCtxPushCurrent(context);
    return code != NRM_CUDA_SUCCESS ? code : cu.cuCtxPopCurrent(&popped);
}

static nrm_CUresult
call_device_attribute(void)
{
    int value;
    return cu.cuDeviceGetAttribute(&value, NRM_CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY,
                                   device);
}

static nrm_CUresult
call_exchange_mode_twice(void)
{
    nrm_CUstreamCaptureMode mode = NRM_CU_STREAM_CAPTURE_MODE_RELAXED;
    nrm_CUresult code = cu.cuThreadExchangeStreamCaptureMode(&mode);
    return code != NRM_CUDA_SUCCESS ? code
                                    : cu.cuThreadExchangeStreamCaptureMode(&mode);
}

static nrm_CUresult
call_is_capturing(void)
{
    nrm_CUstreamCaptureStatus status;
    return cu.cuStreamIsCapturing(NRM_CU_STREAM_LEGACY, &status);
}

static nrm_CUresult
call_stream_id(void)
{
    unsigned long long id;
    return cu.cuStreamGetId(NRM_CU_STREAM_LEGACY, &id);
}

static nrm_CUresult
call_event_query(void)
{
    return cu.cuEventQuery(done_event);
}

static nrm_CUresult
call_event_create(void)
{
    nrm_CUevent event;
    nrm_CUresult code = cu.cuEventCreate(&event, NRM_CU_EVENT_DISABLE_TIMING);
    return code != NRM_CUDA_SUCCESS ? code : cu.cuEventDestroy(event);
}

static nrm_CUresult
call_record(void)
{
    return cu.cuCtxRecordEvent != NULL ? cu.cuCtxRecordEvent(context, done_event)
                                       : NRM_CUDA_ERROR_NOT_FOUND;
}

static nrm_CUresult
call_retain_release(void)
{
    nrm_CUcontext again;
    nrm_CUresult code = cu.cuDevicePrimaryCtxRetain(&again, device);
    return code != NRM_CUDA_SUCCESS ? code : cu.cuDevicePrimaryCtxRelease(device);
}

static nrm_CUresult
call_memory_info(void)
{
    size_t free_nbytes, total_nbytes;
    return cu.cuMemGetInfo(&free_nbytes, &total_nbytes);
}

static nrm_CUresult
call_total_memory(void)
{
    size_t nbytes;
    return cu.cuDeviceTotalMem(&nbytes, device);
}

static nrm_CUresult
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

static void
prepare_calls(void)
{
    registered = map_touched(MIB);
    ordinary = map_touched(MIB);
    MUST(cu.cuMemHostRegister(registered, MIB, NRM_CU_MEMHOSTREGISTER_PORTABLE));
    MUST(cu.cuEventCreate(&done_event, NRM_CU_EVENT_DISABLE_TIMING));
    MUST(cu.cuEventRecord(done_event, NRM_CU_STREAM_LEGACY));
    MUST(cu.cuCtxSynchronize());
}

/* ---- (a) behind a waiting free ---- */

static const char *const blockers[] = {"cuMemFree", "cuMemHostUnregister",
                                       "cuMemFreeHost"};
enum { N_BLOCKERS = 3, HOLD_MS = 250 };

static atomic_int waiting;
static int blocker;
static nrm_CUdeviceptr victim_device;
static void *victim_host;

static void
hold(void *unused)
{
    (void)unused;
    sleep_ms(HOLD_MS);
}

static void *
wait_in_free(void *unused)
{
    (void)unused;
    MUST(cu.cuCtxSetCurrent(context));
    atomic_store(&waiting, 1);
    switch (blocker) {
    case 0:
        MUST(cu.cuMemFree(victim_device));
        break;
    case 1:
        MUST(cu.cuMemHostUnregister(victim_host));
        break;
    default:
        MUST(cu.cuMemFreeHost(victim_host));
    }
    return NULL;
}

/* Queues work on the memory that thread A then gives back, behind a held stream. */
static void
hold_victim(nrm_CUstream stream, nrm_CUdeviceptr target, char *range)
{
    if (blocker == 0) {
        MUST(cu.cuMemAlloc(&victim_device, MIB));
    }
    else if (blocker == 1) {
        victim_host = range;
        MUST(cu.cuMemHostRegister(range, MIB, NRM_CU_MEMHOSTREGISTER_PORTABLE));
    }
    else {
        MUST(cu.cuMemHostAlloc(&victim_host, MIB, NRM_CU_MEMHOSTALLOC_PORTABLE));
    }
    MUST(cu.cuLaunchHostFunc(stream, hold, NULL));
    if (blocker == 0) {
        MUST(cu.cuMemsetD8Async(victim_device, 1, MIB, stream));
    }
    else {
        MUST(cu.cuMemcpyHtoDAsync(target, victim_host, MIB, stream));
    }
}

static void
probe_blocking(int which, int unused)
{
    (void)unused;
    start();
    prepare_calls();
    blocker = which;
    nrm_CUstream stream;
    nrm_CUdeviceptr target;
    MUST(cu.cuStreamCreate(&stream, NRM_CU_STREAM_NON_BLOCKING));
    MUST(cu.cuMemAlloc(&target, MIB));
    char *range = map_touched(MIB);
    for (int i = 0; i < N_CALLS; i++) {
        atomic_store(&waiting, 0);
        hold_victim(stream, target, range);
        double held = now_ms();
        pthread_t thread;
        pthread_create(&thread, NULL, wait_in_free, NULL);
        while (!atomic_load(&waiting)) {
            sleep_ms(1);
        }
        sleep_ms(30);
        double begin = now_ms();
        nrm_CUresult code = calls[i].call();
        double took = now_ms() - begin;
        pthread_join(thread, NULL);
        printf("(a) thread A in %s for %.0f ms; %s in thread B: %.3f ms, %s%s\n",
               blockers[which], now_ms() - held, calls[i].name, took, name_of(code),
               took > 50 ? "  BLOCKED" : "");
        MUST(cu.cuCtxSynchronize());
    }
}

/* ---- (d) what the calls cost ---- */

static int
by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void
probe_costs(int unused_a, int unused_b)
{
    (void)unused_a;
    (void)unused_b;
    start();
    prepare_calls();
    enum { ROUNDS = 101, LOOPS = 500 };
    for (int i = 0; i < N_CALLS; i++) {
        double times[ROUNDS];
        for (int round = 0; round < ROUNDS; round++) {
            double begin = now_ms();
            for (int k = 0; k < LOOPS; k++) {
                calls[i].call();
            }
            times[round] = (now_ms() - begin) * 1e6 / LOOPS;
        }
        qsort(times, ROUNDS, sizeof times[0], by_value);
        printf("(d) %s: %.0f ns\n", calls[i].name, times[ROUNDS / 2]);
    }
}

/* ---- (b) and (c) after cuDevicePrimaryCtxReset by somebody else ---- */

static nrm_CUdeviceptr device_block, managed_block;
static void *host_alloc_block;
static unsigned long long first_id;
static char answer[256];

static nrm_CUresult
answer_of(nrm_CUresult code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(answer, sizeof answer, format, args);
    va_end(args);
    return code;
}

static nrm_CUresult
after_get_state(void)
{
    unsigned flags = 99;
    int active = 99;
    nrm_CUresult code = cu.cuDevicePrimaryCtxGetState(device, &flags, &active);
    return answer_of(code, "active %d, flags %u", active, flags);
}

static nrm_CUresult
after_get_id(void)
{
    unsigned long long id = 0;
    nrm_CUresult code = cu.cuCtxGetId(context, &id);
    return answer_of(code, "id %llu, was %llu", id, first_id);
}

static nrm_CUresult
after_get_current(void)
{
    nrm_CUcontext current = NULL;
    nrm_CUresult code = cu.cuCtxGetCurrent(&current);
    return answer_of(code, "%s",
                     current == NULL      ? "none"
                     : current == context ? "the old handle"
                                          : "another handle");
}

static nrm_CUresult
after_query(void)
{
    return cu.cuEventQuery(done_event);
}

static nrm_CUresult
after_destroy_event(void)
{
    return cu.cuEventDestroy(done_event);
}

static nrm_CUresult
after_new_event(void)
{
    nrm_CUevent event;
    nrm_CUresult code = cu.cuEventCreate(&event, NRM_CU_EVENT_DISABLE_TIMING);
    if (code != NRM_CUDA_SUCCESS) {
        return answer_of(code, "cuEventCreate");
    }
    code = cu.cuCtxRecordEvent(context, event);
    return answer_of(code, "created; cuCtxRecordEvent; same handle as the old: %d",
                     event == done_event);
}

static nrm_CUresult
after_register_new(void)
{
    return cu.cuMemHostRegister(ordinary, MIB, NRM_CU_MEMHOSTREGISTER_PORTABLE);
}

static nrm_CUresult
after_register_old(void)
{
    return cu.cuMemHostRegister(registered, MIB, NRM_CU_MEMHOSTREGISTER_PORTABLE);
}

static nrm_CUresult
after_unregister_old(void)
{
    return cu.cuMemHostUnregister(registered);
}

static nrm_CUresult
after_unregister_twice(void)
{
    nrm_CUresult first = cu.cuMemHostUnregister(registered);
    nrm_CUresult second =
        cu.cuMemHostRegister(registered, MIB, NRM_CU_MEMHOSTREGISTER_PORTABLE);
    return answer_of(second, "unregister said %s, then register", name_of(first));
}

static nrm_CUresult
after_memory_type(void)
{
    nrm_CUmemorytype type = 0;
    nrm_CUresult code =
        cu.cuPointerGetAttribute(&type, NRM_CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                 (nrm_CUdeviceptr)(uintptr_t)registered);
    return answer_of(code, "type %u (1: still registered)", type);
}

static nrm_CUresult
after_read_registered(void)
{
    volatile char *ptr = registered;
    return answer_of(NRM_CUDA_SUCCESS, "byte %d (7)", ptr[4097]);
}

static nrm_CUresult
after_read_host_alloc(void)
{
    volatile char *ptr = host_alloc_block;
    return answer_of(NRM_CUDA_SUCCESS, "byte %d (7)", ptr[4097]);
}

static nrm_CUresult
after_free_host_alloc(void)
{
    return cu.cuMemFreeHost(host_alloc_block);
}

static nrm_CUresult
after_free_device(void)
{
    return cu.cuMemFree(device_block);
}

static nrm_CUresult
after_free_managed(void)
{
    return cu.cuMemFree(managed_block);
}

static nrm_CUresult
after_managed_type(void)
{
    unsigned managed = 9;
    nrm_CUresult code = cu.cuPointerGetAttribute(
        &managed, NRM_CU_POINTER_ATTRIBUTE_IS_MANAGED, managed_block);
    return answer_of(code, "is_managed %u", managed);
}

static nrm_CUresult
after_read_managed(void)
{
    volatile char *ptr = (char *)(uintptr_t)managed_block;
    return answer_of(NRM_CUDA_SUCCESS, "byte %d (7)", ptr[4097]);
}

static nrm_CUresult
after_release_ours(void)
{
    nrm_CUresult code = cu.cuDevicePrimaryCtxRelease(device);
    unsigned flags;
    int active = 99;
    cu.cuDevicePrimaryCtxGetState(device, &flags, &active);
    return answer_of(code, "then active %d", active);
}

static nrm_CUresult
after_pop(void)
{
    nrm_CUcontext popped = NULL;
    nrm_CUresult code = cu.cuCtxPopCurrent(&popped);
    return answer_of(code, "the old handle: %d", popped == context);
}

static nrm_CUresult
after_push(void)
{
    return cu.cuCtxPushCurrent(context);
}

static nrm_CUresult
after_synchronize(void)
{
    return cu.cuCtxSynchronize();
}

static const struct {
    const char *name;
    nrm_CUresult (*call)(void);
} afters[] = {
    {"cuDevicePrimaryCtxGetState", after_get_state},
    {"cuCtxGetId(old handle)", after_get_id},
    {"cuCtxGetCurrent", after_get_current},
    {"cuCtxPopCurrent", after_pop},
    {"cuCtxPushCurrent(old handle)", after_push},
    {"cuCtxSynchronize", after_synchronize},
    {"cuStreamIsCapturing(legacy)", call_is_capturing},
    {"cuCtxRecordEvent(old handle, old event)", call_record},
    {"cuEventQuery(old event)", after_query},
    {"cuEventDestroy(old event)", after_destroy_event},
    {"cuEventCreate, cuCtxRecordEvent", after_new_event},
    {"cuMemHostRegister(new range)", after_register_new},
    {"cuMemHostRegister(old range)", after_register_old},
    {"cuMemHostUnregister(old range)", after_unregister_old},
    {"cuMemHostUnregister + Register(old range)", after_unregister_twice},
    {"cuPointerGetAttribute(old range)", after_memory_type},
    {"host reads the old range", after_read_registered},
    {"host reads cuMemHostAlloc memory", after_read_host_alloc},
    {"cuMemFreeHost(old)", after_free_host_alloc},
    {"cuMemFree(old device block)", after_free_device},
    {"(c) cuMemFree(old managed block)", after_free_managed},
    {"(c) cuPointerGetAttribute(old managed block)", after_managed_type},
    {"(c) host reads the old managed block", after_read_managed},
    {"cuDevicePrimaryCtxRelease of our retain", after_release_ours},
};
enum { N_AFTERS = sizeof afters / sizeof afters[0] };

static const char *const situations[] = {
    "reset, old context current",
    "reset, nothing current",
    "reset, retained again, old context current all the time",
    "reset, retained again, pushed afterwards",
    "reset, retained again, nothing current",
    "released to zero, retained again, current",
};
enum { N_SITUATIONS = 6 };

static void
probe_reset(int which, int situation)
{
    start();
    prepare_calls();
    nrm_CUcontext again = NULL;
    MUST(cu.cuMemAlloc(&device_block, MIB));
    MUST(cu.cuMemAllocManaged(&managed_block, MIB, NRM_CU_MEM_ATTACH_GLOBAL));
    memset((void *)(uintptr_t)managed_block, 7, MIB);
    MUST(cu.cuMemHostAlloc(&host_alloc_block, MIB, NRM_CU_MEMHOSTALLOC_PORTABLE));
    memset(host_alloc_block, 7, MIB);
    MUST(cu.cuCtxGetId(context, &first_id));
    if (situation != 0 && situation != 2) {
        MUST(cu.cuCtxSetCurrent(NULL));
    }
    MUST(situation == 5 ? cu.cuDevicePrimaryCtxRelease(device)
                        : cu.cuDevicePrimaryCtxReset(device));
    if (situation >= 2) {
        MUST(cu.cuDevicePrimaryCtxRetain(&again, device));
    }
    if (situation == 3) {
        MUST(cu.cuCtxPushCurrent(again));
    }
    if (situation == 5) {
        MUST(cu.cuCtxSetCurrent(again));
    }
    printf("(b) %s%s: %s:", situations[situation],
           situation < 2 || again == context ? "" : " (ANOTHER HANDLE)",
           afters[which].name);
    fflush(stdout);
    answer[0] = '\0';
    nrm_CUresult code = afters[which].call();
    printf(" %s%s%s\n", name_of(code), answer[0] != '\0' ? "; " : "", answer);
}

/* Does a registration made before a reset still make copies fast: is it one to the new
   context? Copies from it and checks the bytes. */
static void
probe_reset_copy(int register_again, int unused)
{
    (void)unused;
    start();
    prepare_calls();
    nrm_CUcontext again;
    nrm_CUdeviceptr target;
    char back[16];
    MUST(cu.cuCtxSetCurrent(NULL));
    MUST(cu.cuDevicePrimaryCtxReset(device));
    MUST(cu.cuDevicePrimaryCtxRetain(&again, device));
    MUST(cu.cuCtxSetCurrent(again));
    nrm_CUresult code = NRM_CUDA_SUCCESS;
    if (register_again) {
        code = cu.cuMemHostRegister(registered, MIB, NRM_CU_MEMHOSTREGISTER_PORTABLE);
    }
    MUST(cu.cuMemAlloc(&target, MIB));
    nrm_CUresult copy = cu.cuMemcpyHtoD(target, registered, MIB);
    memset(back, 0, sizeof back);
    nrm_CUresult read = cu.cuMemcpyDtoH(back, target + 5000, sizeof back);
    printf(
        "(b) copy from the old range after a reset%s (%s): %s, back %s, byte %d (7)\n",
        register_again ? ", registered again" : "", name_of(code), name_of(copy),
        name_of(read), back[3]);
}

/* ---- (e) during a stream capture ---- */

static nrm_CUstream other_stream;
static nrm_CUdeviceptr copy_target;

static nrm_CUresult
call_synchronize(void)
{
    return cu.cuCtxSynchronize();
}

static nrm_CUresult
call_stream_create(void)
{
    nrm_CUstream stream;
    nrm_CUresult code = cu.cuStreamCreate(&stream, NRM_CU_STREAM_NON_BLOCKING);
    return code != NRM_CUDA_SUCCESS ? code : cu.cuStreamDestroy(stream);
}

static nrm_CUresult
call_stream_synchronize(void)
{
    return cu.cuStreamSynchronize(other_stream);
}

static nrm_CUresult
call_copy_other(void)
{
    nrm_CUresult code =
        cu.cuMemcpyHtoDAsync(copy_target, registered, MIB, other_stream);
    return code != NRM_CUDA_SUCCESS ? code : cu.cuStreamSynchronize(other_stream);
}

static nrm_CUresult
call_copy_blocking(void)
{
    return cu.cuMemcpyHtoD(copy_target, registered, MIB);
}

static nrm_CUresult
call_status_legacy(void)
{
    nrm_CUstreamCaptureStatus status = 9;
    nrm_CUresult code = cu.cuStreamIsCapturing(NRM_CU_STREAM_LEGACY, &status);
    return answer_of(code, " status %u", status);
}

static nrm_CUresult
call_unregister_register(void)
{
    nrm_CUresult code = cu.cuMemHostUnregister(registered);
    return code != NRM_CUDA_SUCCESS
               ? code
               : cu.cuMemHostRegister(registered, MIB, NRM_CU_MEMHOSTREGISTER_PORTABLE);
}

static const struct {
    const char *name;
    nrm_CUresult (*call)(void);
} capture_calls[] = {
    {"cuCtxSynchronize", call_synchronize},
    {"cuStreamIsCapturing(legacy)", call_status_legacy},
    {"cuStreamCreate + Destroy", call_stream_create},
    {"cuStreamSynchronize(other)", call_stream_synchronize},
    {"cuMemcpyHtoDAsync(other) + synchronize", call_copy_other},
    {"cuMemcpyHtoD", call_copy_blocking},
    {"cuMemHostUnregister + Register", call_unregister_register},
    {"cuMemGetInfo", call_memory_info},
    {"cuCtxPushCurrent + Pop", call_push_pop},
    {"cuDevicePrimaryCtxRetain + Release", call_retain_release},
    {"cuCtxGetId", call_get_id},
};
enum { N_CAPTURE_CALLS = sizeof capture_calls / sizeof capture_calls[0] };

static void
probe_capture(int which, int unused)
{
    (void)unused;
    static const char *const modes[] = {"global", "thread", "relaxed"};
    start();
    prepare_calls();
    MUST(cu.cuStreamCreate(&other_stream, NRM_CU_STREAM_NON_BLOCKING));
    MUST(cu.cuMemAlloc(&copy_target, MIB));
    printf("(e) %s during a capture:", capture_calls[which].name);
    for (int blocking = 0; blocking < 2; blocking++) {
        for (unsigned mode = 0; mode < 3; mode++) {
            for (int relaxed = 0; relaxed < 2; relaxed++) {
                nrm_CUstream stream;
                nrm_CUgraph graph = NULL;
                nrm_CUstreamCaptureMode own = NRM_CU_STREAM_CAPTURE_MODE_RELAXED;
                MUST(cu.cuStreamCreate(&stream,
                                       blocking ? 0 : NRM_CU_STREAM_NON_BLOCKING));
                MUST(cu.cuStreamBeginCapture(stream, mode));
                if (relaxed) {
                    MUST(cu.cuThreadExchangeStreamCaptureMode(&own));
                }
                answer[0] = '\0';
                nrm_CUresult code = capture_calls[which].call();
                if (relaxed) {
                    cu.cuThreadExchangeStreamCaptureMode(&own);
                }
                nrm_CUresult end = cu.cuStreamEndCapture(stream, &graph);
                printf(" [%s %s%s: %s%s%s%s]", blocking ? "blocking" : "non-blocking",
                       modes[mode], relaxed ? ", relaxed thread" : "", name_of(code),
                       answer, end != NRM_CUDA_SUCCESS ? " INVALIDATED " : "",
                       end != NRM_CUDA_SUCCESS ? name_of(end) : "");
                if (graph != NULL) {
                    cu.cuGraphDestroy(graph);
                }
                cu.cuStreamDestroy(stream);
            }
        }
    }
    printf("\n");
}

/* ---- (g) alignment ---- */

static void
probe_alignment(int managed, int unused)
{
    (void)unused;
    static const size_t sizes[] = {1, 100, 5000, 300000, 3000000};
    start();
    for (int s = 0; s < 5; s++) {
        unsigned long long common = ~0ull;
        printf("(g) %s of %zu bytes, address mod 4096:",
               managed ? "cuMemAllocManaged" : "cuMemAlloc", sizes[s]);
        for (int i = 0; i < 20; i++) {
            nrm_CUdeviceptr ptr;
            MUST(managed
                     ? cu.cuMemAllocManaged(&ptr, sizes[s], NRM_CU_MEM_ATTACH_GLOBAL)
                     : cu.cuMemAlloc(&ptr, sizes[s]));
            unsigned long long alignment = ptr & (~ptr + 1);
            common = alignment < common ? alignment : common;
            printf(" %llu", (unsigned long long)ptr % 4096);
        }
        printf("; all aligned to %llu\n", common);
    }
}

/* ---- (h) no device visible ---- */

static void
probe_invisible(int which, int unused)
{
    (void)unused;
    static const char *const values[] = {"", "-1", "99"};
    int count = -1;
    int version = -1;
    setenv("CUDA_VISIBLE_DEVICES", values[which], 1);
    nrm_CUresult early = cu.cuDriverGetVersion(&version);
    nrm_CUresult init = cu.cuInit(0);
    nrm_CUresult counted = cu.cuDeviceGetCount(&count);
    printf("(h) CUDA_VISIBLE_DEVICES=\"%s\": cuDriverGetVersion before cuInit %s (%d), "
           "cuInit %s, cuDeviceGetCount %s (%d)\n",
           values[which], name_of(early), version, name_of(init), name_of(counted),
           count);
}

/* ---- (i) what needs a current context ---- */

static nrm_CUresult
bare_unregister(void)
{
    return cu.cuMemHostUnregister(registered);
}

static nrm_CUresult
bare_register(void)
{
    return cu.cuMemHostRegister(ordinary, MIB, NRM_CU_MEMHOSTREGISTER_PORTABLE);
}

static nrm_CUresult
bare_free_host(void)
{
    return cu.cuMemFreeHost(host_alloc_block);
}

static nrm_CUresult
bare_free(void)
{
    return cu.cuMemFree(device_block);
}

static nrm_CUresult
bare_destroy_event(void)
{
    return cu.cuEventDestroy(done_event);
}

static const struct {
    const char *name;
    nrm_CUresult (*call)(void);
} bares[] = {
    {"cuCtxRecordEvent", call_record},
    {"cuEventQuery", call_event_query},
    {"cuStreamIsCapturing(legacy)", call_is_capturing},
    {"cuPointerGetAttribute(registered)", call_attribute_registered},
    {"cuPointerGetAttribute(ordinary)", call_attribute_ordinary},
    {"cuMemHostRegister", bare_register},
    {"cuMemHostUnregister", bare_unregister},
    {"cuMemFreeHost", bare_free_host},
    {"cuMemFree", bare_free},
    {"cuEventDestroy", bare_destroy_event},
};
enum { N_BARES = sizeof bares / sizeof bares[0] };

static void
probe_bare(int unused_a, int unused_b)
{
    (void)unused_a;
    (void)unused_b;
    start();
    prepare_calls();
    MUST(cu.cuMemAlloc(&device_block, MIB));
    MUST(cu.cuMemHostAlloc(&host_alloc_block, MIB, NRM_CU_MEMHOSTALLOC_PORTABLE));
    MUST(cu.cuCtxSetCurrent(NULL));
    for (int i = 0; i < N_BARES; i++) {
        printf("(i) with no context current: %s: %s\n", bares[i].name,
               name_of(bares[i].call()));
    }
}

int
main(int argc, char **argv)
{
    const char *wanted = argc > 1 ? argv[1] : "abdeghi";
    load();
    int version = 0;
    cu.cuDriverGetVersion(&version);
    printf("driver %d\n", version);
    if (strchr(wanted, 'h') != NULL) {
        for (int i = 0; i < 3; i++) {
            in_child(probe_invisible, i, 0);
        }
    }
    if (strchr(wanted, 'g') != NULL) {
        in_child(probe_alignment, 0, 0);
        in_child(probe_alignment, 1, 0);
    }
    if (strchr(wanted, 'i') != NULL) {
        in_child(probe_bare, 0, 0);
    }
    if (strchr(wanted, 'd') != NULL) {
        in_child(probe_costs, 0, 0);
    }
    if (strchr(wanted, 'e') != NULL) {
        for (int i = 0; i < N_CAPTURE_CALLS; i++) {
            in_child(probe_capture, i, 0);
        }
    }
    if (strchr(wanted, 'a') != NULL) {
        for (int i = 0; i < N_BLOCKERS; i++) {
            in_child(probe_blocking, i, 0);
        }
    }
    if (strchr(wanted, 'b') != NULL) {
        for (int situation = 0; situation < N_SITUATIONS; situation++) {
            for (int i = 0; i < N_AFTERS; i++) {
                in_child(probe_reset, i, situation);
            }
        }
        in_child(probe_reset_copy, 0, 0);
        in_child(probe_reset_copy, 1, 0);
    }
    return 0;
}
