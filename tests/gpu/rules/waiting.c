/* Which calls wait for running work, and which calls a waiting one blocks: the driver's
 * lock. A stream is held; nothing here takes longer than a fraction of a second. */
#include "rule.h"

static nrm_CUstream stream; /* the held one */
static nrm_CUstream other;
static nrm_CUevent event;
static nrm_CUevent other_event;
static nrm_CUdeviceptr on_device;
static unsigned char *page_locked;

static nrm_CUresult
free_device(void *arg)
{
    return cu.cuMemFree(*(nrm_CUdeviceptr *)arg);
}

static nrm_CUresult
free_host(void *arg)
{
    return cu.cuMemFreeHost(arg);
}

static nrm_CUresult
unregister(void *arg)
{
    return cu.cuMemHostUnregister(arg);
}

static nrm_CUresult
allocate_device(void *arg)
{
    (void)arg;
    nrm_CUdeviceptr ptr;
    nrm_CUresult result = cu.cuMemAlloc(&ptr, MIB);
    return result;
}

static nrm_CUresult
allocate_host(void *arg)
{
    (void)arg;
    void *ptr;
    return cu.cuMemHostAlloc(&ptr, MIB, 1);
}

static nrm_CUresult
allocate_managed(void *arg)
{
    (void)arg;
    nrm_CUdeviceptr ptr;
    return cu.cuMemAllocManaged(&ptr, MIB, 1);
}

static nrm_CUresult
register_pages(void *arg)
{
    (void)arg;
    return cu.cuMemHostRegister(pages(MIB, 1), MIB, 1);
}

static nrm_CUresult
create_event(void *arg)
{
    (void)arg;
    nrm_CUevent created;
    return cu.cuEventCreate(&created, NRM_CU_EVENT_DISABLE_TIMING);
}

static nrm_CUresult
destroy_stream(void *arg)
{
    (void)arg;
    nrm_CUstream created;
    MUST(cu.cuStreamCreate(&created, NRM_CU_STREAM_NON_BLOCKING));
    return cu.cuStreamDestroy(created);
}

static nrm_CUresult
record(void *arg)
{
    (void)arg;
    return cu.cuEventRecord(other_event, other);
}

static nrm_CUresult
record_context(void *arg)
{
    (void)arg;
    return cu.cuCtxRecordEvent(context, other_event);
}

static nrm_CUresult
query(void *arg)
{
    (void)arg;
    return cu.cuEventQuery(event);
}

static nrm_CUresult
copy_elsewhere(void *arg)
{
    (void)arg;
    return cu.cuMemcpyHtoDAsync(on_device + MIB, page_locked + MIB, 4096, other);
}

static nrm_CUresult
synchronize_stream(void *arg)
{
    (void)arg;
    return cu.cuStreamSynchronize(stream);
}

static nrm_CUresult
synchronize_event(void *arg)
{
    (void)arg;
    return cu.cuEventSynchronize(event);
}

static nrm_CUresult
synchronize_context(void *arg)
{
    (void)arg;
    return cu.cuCtxSynchronize();
}

static nrm_CUresult
synchronize_other_stream(void *arg)
{
    (void)arg;
    return cu.cuStreamSynchronize(other);
}

/* Holds the stream with a copy behind it that uses both memories. */
static void
hold_copy(nrm_CUdeviceptr dst, const void *src)
{
    hold(stream);
    MUST(cu.cuMemcpyHtoDAsync(dst, src, MIB, stream));
    MUST(cu.cuEventRecord(event, stream));
}

static bool
blocks_behind_copy(nrm_CUresult (*call)(void *arg), void *arg)
{
    struct probe probe;
    probe_start(&probe, call, arg);
    bool blocks = probe_blocks(&probe);
    let_go();
    MUST(probe_join(&probe));
    MUST(cu.cuCtxSynchronize());
    return blocks;
}

static void
what_waits(void)
{
    nrm_CUdeviceptr ptr;
    void *host;
    unsigned char *registered = pages(MIB, 1);
    MUST(cu.cuMemAlloc(&ptr, MIB));
    hold_copy(ptr, page_locked);
    expect_yes("cuMemFree waits for a copy to that memory",
               blocks_behind_copy(free_device, &ptr));
    MUST(cu.cuMemHostAlloc(&host, MIB, 1));
    hold_copy(on_device, host);
    expect_yes("cuMemFreeHost waits for a copy from that memory",
               blocks_behind_copy(free_host, host));
    MUST(cu.cuMemHostRegister(registered, MIB, 1));
    hold_copy(on_device, registered);
    expect_yes("cuMemHostUnregister waits for a copy from that memory",
               blocks_behind_copy(unregister, registered));
    static const struct {
        const char *rule;
        nrm_CUresult (*call)(void *arg);
    } calls[] = {
        {"cuMemAlloc waits for work", allocate_device},
        {"cuMemHostAlloc waits for work", allocate_host},
        {"cuMemAllocManaged waits for work", allocate_managed},
        {"cuMemHostRegister waits for work", register_pages},
        {"cuEventCreate waits for work", create_event},
        {"cuStreamDestroy of an idle stream waits for work", destroy_stream},
        {"cuCtxRecordEvent waits for work", record_context},
    };
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        hold_copy(on_device, page_locked);
        expect_no(calls[i].rule, blocks_behind_copy(calls[i].call, NULL));
    }
}

static nrm_CUresult
free_managed(void *arg)
{
    return cu.cuMemFree(*(nrm_CUdeviceptr *)arg);
}

/* Memory that no pending work uses: never used at all, or by a copy that is done. */
static void
what_waits_for_others(bool was_used)
{
    char rule[128];
    const char *state = was_used ? "used before" : "never used";
    nrm_CUdeviceptr device, managed;
    void *host;
    unsigned char *registered = pages(MIB, 1);
    MUST(cu.cuMemAlloc(&device, MIB));
    MUST(cu.cuMemAllocManaged(&managed, MIB, 1));
    MUST(cu.cuMemHostAlloc(&host, MIB, 1));
    MUST(cu.cuMemHostRegister(registered, MIB, 1));
    if (was_used) {
        MUST(cu.cuMemcpyHtoDAsync(device, host, MIB, other));
        MUST(cu.cuMemcpyHtoDAsync(device, registered, MIB, other));
        MUST(cu.cuMemsetD8Async(managed, 1, MIB, other));
        MUST(cu.cuCtxSynchronize());
    }
    const struct {
        const char *name;
        nrm_CUresult (*call)(void *arg);
        void *arg;
    } calls[] = {
        {"cuMemFree", free_device, &device},
        {"cuMemFree of managed memory", free_managed, &managed},
        {"cuMemFreeHost", free_host, host},
        {"cuMemHostUnregister", unregister, registered},
    };
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        hold_copy(on_device, page_locked);
        snprintf(rule, sizeof rule, "%s waits for work elsewhere, %s", calls[i].name,
                 state);
        expect_yes(rule, blocks_behind_copy(calls[i].call, calls[i].arg));
    }
}

/* While `blocker` sits in the driver, is `call` of another thread let through? */
static bool
is_blocked_by(nrm_CUresult (*blocker)(void *arg), void *arg,
              nrm_CUresult (*call)(void *arg))
{
    struct probe waiting;
    struct probe probe;
    probe_start(&waiting, blocker, arg);
    sleep_ms(100);
    if (atomic_load(&waiting.is_done)) {
        printf("Bail out! the blocker did not block\n");
        exit(1);
    }
    probe_start(&probe, call, NULL);
    bool blocked = probe_blocks(&probe);
    let_go();
    MUST(probe_join(&waiting));
    (void)probe_join(&probe);
    MUST(cu.cuCtxSynchronize());
    return blocked;
}

static const struct {
    const char *name;
    nrm_CUresult (*call)(void *arg);
    bool takes_lock;
} probed[] = {
    {"cuEventQuery", query, false},
    {"cuStreamSynchronize of an idle stream", synchronize_other_stream, false},
    {"cuCtxRecordEvent", record_context, true},
    {"cuEventRecord", record, true},
    {"cuMemcpyHtoDAsync", copy_elsewhere, true},
    {"cuMemAlloc", allocate_device, true},
    {"cuMemHostRegister", register_pages, true},
    {"cuEventCreate", create_event, true},
    {"cuStreamCreate and cuStreamDestroy", destroy_stream, true},
};

static void
lock_of_frees(void)
{
    char rule[128];
    for (int free_kind = 0; free_kind < 3; free_kind++) {
        static const char *const names[] = {"cuMemFree", "cuMemFreeHost",
                                            "cuMemHostUnregister"};
        for (size_t i = 0; i < sizeof probed / sizeof probed[0]; i++) {
            nrm_CUdeviceptr ptr = on_device;
            void *host = page_locked;
            nrm_CUresult (*blocker)(void *arg) = unregister;
            if (free_kind == 0) {
                MUST(cu.cuMemAlloc(&ptr, MIB));
                blocker = free_device;
            }
            else if (free_kind == 1) {
                MUST(cu.cuMemHostAlloc(&host, MIB, 1));
                blocker = free_host;
            }
            else {
                host = pages(MIB, 1);
                MUST(cu.cuMemHostRegister(host, MIB, 1));
            }
            hold_copy(ptr, host);
            bool blocked = is_blocked_by(blocker, free_kind == 0 ? (void *)&ptr : host,
                                         probed[i].call);
            snprintf(rule, sizeof rule, "%s is blocked while %s waits", probed[i].name,
                     names[free_kind]);
            (probed[i].takes_lock ? expect_yes : expect_no)(rule, blocked);
        }
    }
}

static void
no_lock_of_synchronization(void)
{
    static const struct {
        const char *name;
        nrm_CUresult (*call)(void *arg);
    } blockers[] = {
        {"cuStreamSynchronize", synchronize_stream},
        {"cuEventSynchronize", synchronize_event},
        {"cuCtxSynchronize", synchronize_context},
    };
    char rule[128];
    for (size_t b = 0; b < sizeof blockers / sizeof blockers[0]; b++) {
        for (size_t i = 0; i < sizeof probed / sizeof probed[0]; i++) {
            hold_copy(on_device, page_locked);
            bool blocked = is_blocked_by(blockers[b].call, NULL, probed[i].call);
            snprintf(rule, sizeof rule, "%s is blocked while %s waits", probed[i].name,
                     blockers[b].name);
            expect_no(rule, blocked);
        }
    }
}

int
main(int argc, char **argv)
{
    void *ptr = NULL;
    start(argc, argv);
    MUST(cu.cuStreamCreate(&stream, NRM_CU_STREAM_NON_BLOCKING));
    MUST(cu.cuStreamCreate(&other, NRM_CU_STREAM_NON_BLOCKING));
    MUST(cu.cuEventCreate(&event, NRM_CU_EVENT_DISABLE_TIMING));
    MUST(cu.cuEventCreate(&other_event, NRM_CU_EVENT_DISABLE_TIMING));
    MUST(cu.cuMemAlloc(&on_device, 4 * MIB));
    MUST(cu.cuMemHostAlloc(&ptr, 4 * MIB, 1));
    page_locked = ptr;
    what_waits();
    what_waits_for_others(false);
    what_waits_for_others(true);
    lock_of_frees();
    no_lock_of_synchronization();
    return finish();
}
