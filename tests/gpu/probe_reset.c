/*
 * What a reset of a context by somebody else leaves behind: which of the old handles,
 * blocks and ranges are still good, (b) in general and (c) of managed memory.
 *
 *     cc -pthread -I src tests/gpu/probe_reset.c -ldl -o probe && ./probe
 */
#define _GNU_SOURCE
#include "probe.h"

static nrm_CUdeviceptr managed_block;
static unsigned long long first_id;

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

int
main(void)
{
    load();
    tell_version();
    for (int situation = 0; situation < N_SITUATIONS; situation++) {
        for (int i = 0; i < N_AFTERS; i++) {
            in_child(probe_reset, i, situation);
        }
    }
    in_child(probe_reset_copy, 0, 0);
    in_child(probe_reset_copy, 1, 0);
    return 0;
}
