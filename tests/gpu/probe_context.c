/*
 * What a CUDA driver answers about contexts: which calls stand behind another thread's
 * waiting free, what a capture survives, what the calls cost. src/cuda is written by
 * these answers; run it again on a new driver and compare.
 *
 *     cc -pthread -I src tests/gpu/probe_context.c -ldl -o probe && ./probe [letters]
 */
#define _GNU_SOURCE
#include "probe.h"

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
    const char *wanted = argc > 1 ? argv[1] : "adeghi";
    load();
    tell_version();
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
    return 0;
}
