/* Two devices: what reaches the memory of the other one, and what a peer call copies.
 * No peer access is enabled between the contexts. With one device there is nothing to
 * ask. */
#include "rule.h"

enum { N_KINDS = 3, MAPPED = 0, POOLED = 1, ALLOCATED = 2 };

static const size_t PIECE = 4 * (size_t)MIB;
static const size_t NBYTES = 64 * (size_t)KIB;
static const char *const kinds[N_KINDS] = {"mapped", "pooled", "allocated"};

static nrm_CUcontext contexts[2];
static nrm_CUstream streams[2]; /* of each device */
static nrm_CUdeviceptr memory[N_KINDS][2];

static void
enter(int ordinal)
{
    MUST(cu.cuCtxSetCurrent(contexts[ordinal]));
}

/* ---- memory of each kind, which nobody opened to the other device ---- */

static nrm_CUmemLocation
location_of(int ordinal)
{
    return (nrm_CUmemLocation){.type = NRM_CU_MEM_LOCATION_TYPE_DEVICE, .id = ordinal};
}

static void
open_to(nrm_CUdeviceptr ptr, int ordinal)
{
    nrm_CUmemAccessDesc access = {.location = location_of(ordinal),
                                  .flags = NRM_CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    MUST(cu.cuMemSetAccess(ptr, PIECE, &access, 1));
}

static nrm_CUdeviceptr
map(int ordinal)
{
    nrm_CUmemAllocationProp prop = {.type = NRM_CU_MEM_ALLOCATION_TYPE_PINNED,
                                    .location = location_of(ordinal)};
    nrm_CUmemGenericAllocationHandle handle;
    nrm_CUdeviceptr ptr;
    MUST(cu.cuMemAddressReserve(&ptr, PIECE, 0, 0, 0));
    MUST(cu.cuMemCreate(&handle, PIECE, &prop, 0));
    MUST(cu.cuMemMap(ptr, PIECE, 0, handle, 0));
    MUST(cu.cuMemRelease(handle));
    open_to(ptr, ordinal);
    return ptr;
}

static void
start_device(int ordinal)
{
    nrm_CUdevice found;
    nrm_CUmemoryPool pool;
    MUST(cu.cuDeviceGet(&found, ordinal));
    MUST(cu.cuDevicePrimaryCtxRetain(&contexts[ordinal], found));
    enter(ordinal);
    MUST(cu.cuStreamCreate(&streams[ordinal], NRM_CU_STREAM_NON_BLOCKING));
    memory[MAPPED][ordinal] = map(ordinal);
    MUST(cu.cuDeviceGetDefaultMemPool(&pool, found));
    MUST(cu.cuMemAllocFromPoolAsync(&memory[POOLED][ordinal], PIECE, pool,
                                    streams[ordinal]));
    MUST(cu.cuStreamSynchronize(streams[ordinal]));
    MUST(cu.cuMemAlloc(&memory[ALLOCATED][ordinal], PIECE));
}

/* A byte of a kind of memory of a device, by its own context. */
static int
byte_at(nrm_CUdeviceptr ptr, int ordinal, size_t offset)
{
    enter(ordinal);
    int byte = device_byte(ptr + offset);
    enter(0);
    return byte;
}

static void
fill(nrm_CUdeviceptr ptr, int ordinal, int value)
{
    enter(ordinal);
    MUST(cu.cuMemsetD8Async(ptr, (unsigned char)value, NBYTES, streams[ordinal]));
    MUST(cu.cuStreamSynchronize(streams[ordinal]));
    enter(0);
}

/* ---- rules ---- */

static const char *
text(const char *format, const char *a, const char *b, int ordinal)
{
    static char line[160];
    snprintf(line, sizeof line, format, a, b, ordinal);
    return line;
}

static void
attributes(void)
{
    for (int kind = 0; kind < N_KINDS; kind++) {
        nrm_CUmemorytype type = 0;
        unsigned int is_managed = 1;
        int ordinal = -1;
        MUST(cu.cuPointerGetAttribute(&type, NRM_CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                      memory[kind][1]));
        MUST(cu.cuPointerGetAttribute(&is_managed, NRM_CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                      memory[kind][1]));
        MUST(cu.cuPointerGetAttribute(&ordinal, NRM_CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                      memory[kind][1]));
        expect_yes(text("%s memory of device 1 is a device's%s", kinds[kind], "", 0),
                   type == NRM_CU_MEMORYTYPE_DEVICE && is_managed == 0);
        expect_number(text("the device of %s memory%s", kinds[kind], "", 0), ordinal,
                      1);
    }
}

static void
access_flags(void)
{
    unsigned long long flags = 99;
    nrm_CUmemLocation own = location_of(1), other = location_of(0);
    expect("the access of its own device to mapped memory",
           cu.cuMemGetAccess(&flags, &own, memory[MAPPED][1] + 4096), NRM_CUDA_SUCCESS);
    expect_number("is to read and to write", (long long)flags, 3);
    expect("that of another one", cu.cuMemGetAccess(&flags, &other, memory[MAPPED][1]),
           NRM_CUDA_SUCCESS);
    expect_number("is none", (long long)flags, 0);
    expect("the access of another device to allocated memory",
           cu.cuMemGetAccess(&flags, &other, memory[ALLOCATED][1]), NRM_CUDA_SUCCESS);
    expect_number("is to read and to write", (long long)flags, 3);
}

/* On a stream of device 0. What allocated memory can, no other can. */
static void
ordinary_copies(void)
{
    void *host = NULL;
    MUST(cu.cuMemHostAlloc(&host, NBYTES, NRM_CU_MEMHOSTALLOC_PORTABLE));
    for (int kind = 0; kind < N_KINDS; kind++) {
        nrm_CUresult expected = kind == ALLOCATED ? NRM_CUDA_SUCCESS
                                                  : NRM_CUDA_ERROR_INVALID_VALUE;
        fill(memory[kind][1], 1, 40 + kind);
        expect(text("copy from %s memory of the other device%s", kinds[kind], "", 0),
               cu.cuMemcpyAsync(memory[ALLOCATED][0], memory[kind][1], NBYTES,
                                streams[0]),
               expected);
        expect(text("copy to %s memory of the other device%s", kinds[kind], "", 0),
               cu.cuMemcpyAsync(memory[kind][1], memory[ALLOCATED][0], NBYTES,
                                streams[0]),
               expected);
        expect(text("copy from it to the host%s%s", "", "", 0),
               cu.cuMemcpyDtoHAsync(host, memory[kind][1], NBYTES, streams[0]),
               expected);
        MUST(cu.cuStreamSynchronize(streams[0]));
    }
    expect_number("its bytes", byte_at(memory[ALLOCATED][0], 0, NBYTES - 1), 42);
    expect_number("on the host, too", ((unsigned char *)host)[NBYTES - 1], 42);
    MUST(cu.cuMemFreeHost(host));
}

/* From each kind to each kind, on a stream of the source's device and of the other
   one. */
static void
peer_copies(void)
{
    int value = 100;
    for (int from = 0; from < N_KINDS; from++) {
        for (int to = 0; to < N_KINDS; to++) {
            for (int on = 0; on < 2; on++) {
                fill(memory[from][1], 1, ++value);
                enter(on);
                expect(text("peer copy from %s to %s memory, on a stream of device %d",
                            kinds[from], kinds[to], on),
                       cu.cuMemcpyPeerAsync(memory[to][0], contexts[0], memory[from][1],
                                            contexts[1], NBYTES, streams[on]),
                       NRM_CUDA_SUCCESS);
                MUST(cu.cuStreamSynchronize(streams[on]));
                expect_number("its last byte", byte_at(memory[to][0], 0, NBYTES - 1),
                              value);
            }
        }
    }
}

/* Three planes of two rows of 16 B, out of planes of four rows of 64 B. */
static nrm_CUDA_MEMCPY3D_PEER
box(void)
{
    return (nrm_CUDA_MEMCPY3D_PEER){.srcMemoryType = NRM_CU_MEMORYTYPE_DEVICE,
                                    .srcDevice = memory[MAPPED][1] + 8,
                                    .srcContext = contexts[1],
                                    .srcPitch = 64,
                                    .srcHeight = 4,
                                    .dstMemoryType = NRM_CU_MEMORYTYPE_DEVICE,
                                    .dstDevice = memory[MAPPED][0],
                                    .dstContext = contexts[0],
                                    .dstPitch = 32,
                                    .dstHeight = 3,
                                    .WidthInBytes = 16,
                                    .Height = 2,
                                    .Depth = 3};
}

static void
peer_boxes(void)
{
    for (int on = 0; on < 2; on++) {
        nrm_CUDA_MEMCPY3D_PEER copy = box();
        fill(memory[MAPPED][0], 0, 255);
        fill(memory[MAPPED][1], 1, 60 + on);
        enter(on);
        expect(text("peer copy of planes of mapped memory, on a stream of device%s%s "
                    "%d",
                    "", "", on),
               cu.cuMemcpy3DPeerAsync(&copy, streams[on]), NRM_CUDA_SUCCESS);
        MUST(cu.cuStreamSynchronize(streams[on]));
        expect_number("the last byte of the last plane",
                      byte_at(memory[MAPPED][0], 0, (2 * 3 + 1) * 32 + 15), 60 + on);
        expect_number("behind a row", byte_at(memory[MAPPED][0], 0, 16), 255);
        expect_number("between two planes", byte_at(memory[MAPPED][0], 0, 2 * 32), 255);
    }
}

static nrm_CUresult
copy_from_peer(void *arg)
{
    (void)arg;
    return cu.cuMemcpyPeerAsync(memory[MAPPED][0], contexts[0], memory[MAPPED][1],
                                contexts[1], NBYTES, streams[0]);
}

/* Behind work of the other device's stream, which an event tells. */
static void
order(void)
{
    nrm_CUevent event;
    struct probe probe;
    fill(memory[MAPPED][1], 1, 1);
    enter(1);
    MUST(cu.cuEventCreate(&event, NRM_CU_EVENT_DISABLE_TIMING));
    hold(streams[1]);
    MUST(cu.cuMemsetD8Async(memory[MAPPED][1], 2, NBYTES, streams[1]));
    MUST(cu.cuEventRecord(event, streams[1]));
    enter(0);
    expect("a stream waits for an event of the other device",
           cu.cuStreamWaitEvent(streams[0], event, NRM_CU_EVENT_WAIT_DEFAULT),
           NRM_CUDA_SUCCESS);
    context = contexts[0];
    probe_start(&probe, copy_from_peer, NULL);
    expect_no("a peer copy behind that blocks", probe_blocks(&probe));
    let_go();
    MUST(probe_join(&probe));
    MUST(cu.cuStreamSynchronize(streams[0]));
    expect_number("it copied what stood there then", byte_at(memory[MAPPED][0], 0, 0),
                  2);
    MUST(cu.cuEventDestroy(event));
}

static void
graph_of(const char *what, bool is_box)
{
    nrm_CUgraph graph = NULL;
    nrm_CUDA_MEMCPY3D_PEER copy = box();
    MUST(cu.cuStreamBeginCapture(streams[0], NRM_CU_STREAM_CAPTURE_MODE_RELAXED));
    expect(what, is_box ? cu.cuMemcpy3DPeerAsync(&copy, streams[0]) : copy_from_peer(0),
           NRM_CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    expect("the end of the capture that it broke",
           cu.cuStreamEndCapture(streams[0], &graph),
           NRM_CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    expect_yes("there is no graph", graph == NULL);
}

static void
opened(void)
{
    unsigned long long flags = 99;
    nrm_CUmemLocation other = location_of(0);
    int can = 0;
    MUST(cu.cuDeviceCanAccessPeer(&can, 0, 1));
    expect_yes("device 0 can reach the memory of device 1", can != 0);
    if (can == 0) {
        return;
    }
    open_to(memory[MAPPED][1], 0);
    expect("the access of another device to mapped memory that was opened to it",
           cu.cuMemGetAccess(&flags, &other, memory[MAPPED][1]), NRM_CUDA_SUCCESS);
    expect_number("is to read and to write", (long long)flags, 3);
    fill(memory[MAPPED][1], 1, 77);
    expect("copy from it",
           cu.cuMemcpyAsync(memory[MAPPED][0], memory[MAPPED][1], NBYTES, streams[0]),
           NRM_CUDA_SUCCESS);
    MUST(cu.cuStreamSynchronize(streams[0]));
    expect_number("its bytes", byte_at(memory[MAPPED][0], 0, 0), 77);
}

int
main(int argc, char **argv)
{
    int n_devices = 0;
    start(argc, argv);
    MUST(cu.cuDeviceGetCount(&n_devices));
    if (n_devices < 2 || cu.cuMemMap == NULL) {
        expect_no("there are two devices that map memory # SKIP", n_devices > 1);
        return finish();
    }
    start_device(1);
    start_device(0);
    attributes();
    access_flags();
    ordinary_copies();
    peer_copies();
    peer_boxes();
    order();
    graph_of("peer copy on a stream that is captured", false);
    graph_of("peer copy of planes on a stream that is captured", true);
    opened();
    return finish();
}
