/* Copies where there are several devices: by which calls they are made, that each byte
   arrives and comes after what it should, and what becomes of calls that a driver
   refuses. Memory is that of pools, which is open to its own device alone. */
#include <string.h>

#include "base/error.h"
#include "core/transfer.h"
#include "fixtures.h"
#include "nrm/pools.h"
#include "streams.h"

enum { SPACE = 6 << 20, N_DEVICES = 3, ROWS = 12, PITCH = 512, PLANE = 4096 };

static unsigned char bytes[SPACE], seen[SPACE];
static nrm_resource *pools[N_DEVICES];
static char *memory[N_DEVICES];
static nrm_CUstream streams[N_DEVICES];
static uint64_t n_events; /* of the pools, and not of copies */

/* ---- a machine of three devices ---- */

static void
begin_with(nrm_segments segments)
{
    struct nrm_cudasim_config config = simulator_checked();
    config.devices = N_DEVICES;
    simulator_start(&config);
    CHECK_OK(nrm__cuda_init(NULL));
    for (size_t i = 0; i < SPACE; i++) {
        bytes[i] = (unsigned char)(i * 31 % 251);
    }
    for (int i = N_DEVICES - 1; i >= 0; i--) {
        nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
        nrm_device_options device = NRM_OPTIONS(nrm_device_options);
        nrm_resource *source = NULL;
        void *ptr = NULL;
        make_current(i);
        device.set_device = true;
        device.device = i;
        options.segments = segments;
        REQUIRE_OK(nrm_device_create(&device, &source));
        REQUIRE_OK(nrm_pool_create(source, &options, &pools[i]));
        nrm_resource_release(source);
        REQUIRE_OK(nrm_resource_allocate(pools[i], SPACE, 0, NULL, &ptr));
        memory[i] = ptr;
        streams[i] = new_handle();
        CHECK_EQ(cuda.cuMemsetD8((nrm_CUdeviceptr)(uintptr_t)ptr, 255, SPACE),
                 NRM_CUDA_SUCCESS);
        CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    }
    n_events = simulator_count(NRM_CUDASIM_EVENTS);
}

static void
begin(void)
{
    begin_with(NRM_SEGMENTS_VMM);
}

static void
end(void)
{
    CHECK_EQ(simulator_count(NRM_CUDASIM_EVENTS), n_events);
    for (int i = 0; i < N_DEVICES; i++) {
        make_current(i);
        CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
        CHECK_EQ(cuda.cuStreamDestroy(streams[i]), NRM_CUDA_SUCCESS);
        CHECK_OK(nrm_resource_deallocate(pools[i], memory[i], SPACE, NULL));
        nrm_resource_release(pools[i]);
    }
    make_current(0);
    CHECK_EQ(simulator_count(NRM_CUDASIM_STREAMS), 0u);
    CHECK_EQ(simulator_count(NRM_CUDASIM_REGISTRATIONS), 0u);
    CHECK_EQ(simulator_tell_races(), 0u);
    simulator_check_faults();
}

static void
put(int device, const void *from, size_t nbytes)
{
    make_current(device);
    CHECK_EQ(cuda.cuMemcpyHtoD((nrm_CUdeviceptr)(uintptr_t)memory[device], from,
                               nbytes),
             NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    make_current(0);
}

static const unsigned char *
get(int device)
{
    make_current(device);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemcpyDtoH(seen, (nrm_CUdeviceptr)(uintptr_t)memory[device], SPACE),
             NRM_CUDA_SUCCESS);
    make_current(0);
    return seen;
}

/* ---- copies ---- */

static struct nrm__transfer
flat(int dst, int src, size_t nbytes)
{
    return (struct nrm__transfer){.dst = memory[dst],
                                  .src = memory[src],
                                  .direction = NRM__WITHIN,
                                  .itemsize = nbytes};
}

/* Planes of rows of 64 B that lie apart, and stand more densely afterwards. */
static struct nrm__transfer
boxes(int dst, int src)
{
    struct nrm__transfer t = flat(dst, src, 64);
    t.n_dims = 2;
    t.shape[0] = 3;
    t.shape[1] = ROWS - 4;
    t.dst_strides[0] = ROWS * 128;
    t.dst_strides[1] = 128;
    t.src_strides[0] = ROWS * PITCH;
    t.src_strides[1] = PITCH;
    return t;
}

/* Pieces from the last to the first. */
static struct nrm__transfer
reversed(int dst, int src, size_t n)
{
    struct nrm__transfer t = flat(dst, src, 64);
    t.src += (ptrdiff_t)(n - 1) * 64;
    t.n_dims = 1;
    t.shape[0] = n;
    t.dst_strides[0] = 64;
    t.src_strides[0] = -64;
    return t;
}

static nrm_status
submit(const struct nrm__transfer *t, nrm_CUstream stream)
{
    struct nrm__cuda_lone_event event = {0};
    bool is_captured;
    NRM_TRY(nrm__transfer_submit(-1, t, (uintptr_t)stream, &event, &is_captured));
    nrm_status status = event.handle == NULL ? NRM_OK
                                             : nrm__transfer_query(&event, true);
    nrm__cuda_lone_drop(&event);
    return status;
}

static size_t
n_rows(const struct nrm__transfer *t)
{
    return t->n_dims == 0 ? 1 : t->shape[0] * (t->n_dims > 1 ? t->shape[1] : 1);
}

/* Whether the bytes of the transfer arrived, and no other changed. */
static bool
has_arrived(const struct nrm__transfer *t, int dst, int src)
{
    static unsigned char expected[SPACE];
    memset(expected, 255, SPACE);
    for (size_t n = 0; n < n_rows(t); n++) {
        ptrdiff_t i = t->n_dims > 1 ? (ptrdiff_t)(n / t->shape[1]) : (ptrdiff_t)n;
        ptrdiff_t j = t->n_dims > 1 ? (ptrdiff_t)(n % t->shape[1]) : 0;
        memcpy(expected + (t->dst - memory[dst]) + i * t->dst_strides[0] +
                   j * t->dst_strides[1],
               bytes + (t->src - memory[src]) + i * t->src_strides[0] +
                   j * t->src_strides[1],
               t->itemsize);
    }
    return memcmp(get(dst), expected, SPACE) == 0;
}

static const struct way {
    const char *name;
    int dst, src, on;
    const char *flat, *box; /* the calls that do it */
} ways[] = {
    {"on one device", 1, 1, 1, "cuMemcpyAsync", "cuMemcpy3DAsync"},
    {"on the destination's stream", 0, 1, 0, "cuMemcpyPeerAsync",
     "cuMemcpy3DPeerAsync"},
    {"on the source's stream", 0, 1, 1, "cuMemcpyPeerAsync", "cuMemcpy3DPeerAsync"},
    {"on a third device's stream", 0, 1, 2, "cuMemcpyPeerAsync", "cuMemcpy3DPeerAsync"},
    {"on one device, and another one's stream", 1, 1, 0, "cuMemcpyAsync",
     "cuMemcpy3DAsync"},
};

static char *
other_half(int device)
{
    return memory[device] + SPACE / 2;
}

TEST_EACH(the_call_fits_the_memory_and_the_stream, ways)
{
    begin();
    put(row->src, bytes, SPACE / 2);
    struct nrm__transfer t = flat(row->dst, row->src, 100000);
    struct nrm__transfer box = boxes(row->dst, row->src);
    t.dst = other_half(row->dst);
    box.dst = other_half(row->dst) + 200000;
    uint64_t n_streams = sim.call_count("cuStreamCreate");
    CHECK_OK(submit(&t, streams[row->on]));
    CHECK_EQ(sim.call_count(row->flat), 1u);
    CHECK_OK(submit(&box, streams[row->on]));
    CHECK_EQ(sim.call_count(row->box), 1u);
    bool is_aside = row->on != row->dst && row->on != row->src;
    CHECK_EQ(sim.call_count("cuStreamCreate") - n_streams, is_aside ? 2u : 0u);
    const unsigned char *found = get(row->dst) + SPACE / 2;
    CHECK(memcmp(found, bytes, 100000) == 0);
    for (int plane = 0; plane < 3; plane++) {
        for (int line = 0; line < ROWS - 4; line++) {
            CHECK(memcmp(found + 200000 + (plane * ROWS + line) * 128,
                         bytes + (plane * ROWS + line) * PITCH, 64) == 0);
        }
    }
    end();
}

TEST_EACH(every_byte_arrives_and_no_other_changes, ways)
{
    if (row->dst == row->src) {
        SKIP("of two devices");
    }
    for (int kind = 0; kind < 3; kind++) {
        begin();
        put(row->src, bytes, SPACE);
        struct nrm__transfer t = kind == 0   ? flat(row->dst, row->src, SPACE)
                                 : kind == 1 ? boxes(row->dst, row->src)
                                             : reversed(row->dst, row->src, 300);
        CHECK_OK(submit(&t, streams[row->on]));
        CHECK(has_arrived(&t, row->dst, row->src));
        CHECK_EQ(sim.call_count("cuMemcpyBatchAsync"), 0u);
        end();
    }
}

/* ---- order ---- */

static void
set_on(int device, unsigned char value)
{
    make_current(device);
    CHECK_EQ(cuda.cuMemsetD8Async((nrm_CUdeviceptr)(uintptr_t)memory[device], value, 64,
                                  streams[device]),
             NRM_CUDA_SUCCESS);
    make_current(0);
}

/* Also where a stream of another device makes the copy. */
TEST_EACH(a_copy_comes_after_its_stream_and_before_what_follows, ways)
{
    begin();
    int device = row->on == row->src ? row->src : row->on == row->dst ? row->dst : -1;
    struct nrm__transfer t = flat(row->dst, row->src, 64);
    struct nrm__cuda_lone_event event = {0};
    bool is_captured;
    t.dst = other_half(row->dst);
    put(row->src, bytes, 64);
    CHECK_EQ(sim.hold_stream(streams[row->on]), 0);
    /* Something that is held: behind nothing at all an event is done. */
    CHECK_EQ(cuda.cuLaunchHostFunc(streams[row->on], simulator_sleep, NULL),
             NRM_CUDA_SUCCESS);
    if (device >= 0 && device == row->src) {
        set_on(device, 9);
    }
    CHECK_OK(nrm__transfer_submit(-1, &t, (uintptr_t)streams[row->on], &event,
                                  &is_captured));
    let_run();
    CHECK_STATUS(nrm__transfer_query(&event, false), NRM_NOT_FOUND);
    if (device >= 0 && device == row->src) {
        set_on(device, 8); /* after it */
    }
    CHECK_EQ(sim.release_stream(streams[row->on]), 0);
    CHECK_OK(nrm__transfer_query(&event, true));
    nrm__cuda_lone_drop(&event);
    CHECK_EQ(get(row->dst)[SPACE / 2], device == row->src ? 9 : bytes[0]);
    end();
}

/* ---- host memory ---- */

TEST(host_memory_on_a_stream_of_another_device)
{
    begin();
    struct nrm__transfer in = flat(1, 1, SPACE), out = in;
    in.direction = NRM__TO_DEVICE;
    in.src = (const char *)bytes;
    out.direction = NRM__TO_HOST;
    out.dst = (char *)seen;
    memset(seen, 0, SPACE);
    CHECK_OK(submit(&in, streams[0]));
    CHECK_OK(submit(&out, streams[2]));
    CHECK(memcmp(seen, bytes, SPACE) == 0);
    CHECK_EQ(sim.call_count("cuMemcpyHtoDAsync"), 1u);
    CHECK_EQ(sim.call_count("cuMemcpyDtoHAsync"), 1u);
    end();
}

/* ---- memory that the stream's device reaches ---- */

TEST(what_is_open_to_the_device_is_copied_as_its_own)
{
    begin();
    CHECK_OK(nrm_pool_add_peer(pools[1], 0));
    put(1, bytes, SPACE);
    struct nrm__transfer t = reversed(0, 1, 300);
    CHECK_OK(submit(&t, streams[0]));
    CHECK(has_arrived(&t, 0, 1));
    CHECK_EQ(sim.call_count("cuMemcpyPeerAsync"), 0u);
    CHECK_EQ(sim.call_count("cuMemcpyBatchAsync"), 2u);
    struct nrm__transfer back = flat(1, 0, 64); /* 0 is not open to 1 */
    CHECK_OK(submit(&back, streams[1]));
    CHECK_EQ(sim.call_count("cuMemcpyPeerAsync"), 1u);
    end();
}

TEST(with_one_device_nothing_is_asked)
{
    nrm_CUdeviceptr ptr;
    simulator_start(NULL);
    CHECK_OK(nrm__cuda_init(NULL));
    make_current(0);
    CHECK_EQ(cuda.cuMemAlloc(&ptr, 8192), NRM_CUDA_SUCCESS);
    struct nrm__transfer t = {.dst = (char *)(uintptr_t)ptr,
                              .src = (char *)(uintptr_t)ptr + 4096,
                              .direction = NRM__WITHIN,
                              .itemsize = 4096};
    CHECK_OK(submit(&t, NULL));
    CHECK_EQ(sim.call_count("cuPointerGetAttribute"), 0u);
    CHECK_EQ(sim.call_count("cuMemGetAccess"), 0u);
    CHECK_EQ(nrm__transfer_device_of(t.dst), NRM_DEVICE_NONE);
    CHECK_EQ(cuda.cuMemFree(ptr), NRM_CUDA_SUCCESS);
    simulator_check_faults();
}

TEST(whose_memory_it_is)
{
    static char ordinary[64];
    nrm_CUdeviceptr foreign, shared;
    void *host;
    begin();
    make_current(2);
    CHECK_EQ(cuda.cuMemAlloc(&foreign, 64), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemAllocManaged(&shared, 64, 1), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemHostAlloc(&host, 64, 0), NRM_CUDA_SUCCESS);
    make_current(0);
    for (int i = 0; i < N_DEVICES; i++) {
        CHECK_EQ(nrm__transfer_device_of(memory[i] + 100), i);
    }
    CHECK_EQ(nrm__transfer_device_of((void *)(uintptr_t)foreign), 2);
    CHECK_EQ(nrm__transfer_device_of((void *)(uintptr_t)shared), NRM_DEVICE_NONE);
    CHECK_EQ(nrm__transfer_device_of(host), NRM_DEVICE_NONE);
    CHECK_EQ(nrm__transfer_device_of(ordinary), NRM_DEVICE_NONE);
    CHECK_EQ(cuda.cuMemFree(foreign), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemFree(shared), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemFreeHost(host), NRM_CUDA_SUCCESS);
    end();
}

/* ---- refusals ---- */

static const struct refusal {
    const char *name;
    const char *calls[2]; /* that are refused */
    size_t n_rows;        /* peer calls of one row each that are made */
    bool over_host;
} refusals[] = {
    {"planes", {"cuMemcpy3DPeerAsync", NULL}, 3 * (ROWS - 4), false},
    {"planes and rows", {"cuMemcpy3DPeerAsync", "cuMemcpyPeerAsync"}, 1, true},
};

/* Of the calls that fail one is enough: the way is not tried again. */
TEST_EACH(what_a_driver_refuses_goes_another_way, refusals)
{
    static const int codes[] = {NRM_CUDA_ERROR_INVALID_VALUE,
                                NRM_CUDA_ERROR_INVALID_CONTEXT,
                                NRM_CUDA_ERROR_NOT_SUPPORTED,
                                NRM_CUDA_ERROR_PEER_ACCESS_UNSUPPORTED};
    for (size_t n = 0; n < sizeof codes / sizeof codes[0]; n++) {
        begin();
        put(1, bytes, SPACE);
        struct nrm__transfer t = boxes(0, 1);
        for (int i = 0; i < 2 && row->calls[i] != NULL; i++) {
            sim.fail(row->calls[i], 1, codes[n], 1);
        }
        CHECK_OK(submit(&t, streams[0]));
        CHECK(has_arrived(&t, 0, 1));
        CHECK_EQ(sim.call_count("cuMemcpy3DPeerAsync"), 1u);
        CHECK_EQ(sim.call_count("cuMemcpyPeerAsync"), row->n_rows);
        CHECK_EQ(sim.call_count("cuMemHostAlloc"), row->over_host ? 1u : 0u);
        end();
    }
}

/* More than goes between at once, and behind what the stream has still to do. */
TEST(a_large_copy_over_the_host)
{
    begin();
    put(1, bytes, SPACE);
    struct nrm__transfer t = flat(0, 1, SPACE);
    sim.fail("cuMemcpyPeerAsync", 1, NRM_CUDA_ERROR_INVALID_VALUE, 1);
    CHECK_OK(submit(&t, streams[1]));
    CHECK(has_arrived(&t, 0, 1));
    CHECK_EQ(sim.call_count("cuMemcpyDtoHAsync"), 2u);
    end();
}

TEST(what_fails_on_every_way_is_told)
{
    begin();
    struct nrm__transfer t = flat(0, 1, 1000);
    sim.fail("cuMemcpyPeerAsync", 1, NRM_CUDA_ERROR_INVALID_VALUE, 1);
    sim.fail("cuMemcpyHtoDAsync", 1, NRM_CUDA_ERROR_INVALID_VALUE, 1);
    CHECK_STATUS(submit(&t, streams[0]), NRM_CUDA_ERROR);
    CHECK_STR_HAS(nrm_last_error()->message, "a copy of 1000 B");
    sim.fail("cuMemcpyPeerAsync", 1, NRM_CUDA_ERROR_OPERATING_SYSTEM, 1);
    CHECK_STATUS(submit(&t, streams[0]), NRM_CUDA_ERROR);
    CHECK_STR_EQ(nrm_last_error()->native_name, "CUDA_ERROR_OPERATING_SYSTEM");
    end();
}

static const struct {
    const char *name;
} asides[] = {{"cuStreamCreate"}, {"cuStreamWaitEvent"}, {"cuMemcpyPeerAsync"},
              {"cuEventRecord"},  {"cuEventCreate"},     {"cuCtxPushCurrent"}};

/* Each call of a copy on the side may fail: it is told, and nothing is left. */
TEST_EACH(a_copy_aside_that_fails_leaves_nothing, asides)
{
    for (unsigned nth = 1; nth <= 4; nth++) {
        begin();
        struct nrm__transfer t = flat(0, 1, 1000);
        sim.fail(row->name, nth, NRM_CUDA_ERROR_OPERATING_SYSTEM, 1);
        uint64_t before = sim.call_count(row->name);
        nrm_status status = submit(&t, streams[2]);
        CHECK_EQ(status == NRM_OK, sim.call_count(row->name) - before < nth);
        sim.fail(row->name, 1, 0, 1);
        put(1, bytes, 1000);
        CHECK_OK(submit(&t, streams[2]));
        CHECK(memcmp(get(0), bytes, 1000) == 0);
        end();
    }
}

/* ---- graphs ---- */

static const struct capture_case {
    const char *name;
    int on; /* a stream of this device, from memory of 1 to that of 0 */
    bool is_box;
    const char *text;
} capture_cases[] = {
    {"on the destination's stream", 0, false, "memory of device 1"},
    {"boxes", 0, true, "memory of device 1"},
    {"on the source's stream", 1, false, "memory of device 0"},
    {"on that of a third device", 2, false, "memory of device 0"},
};

static nrm_status
submit_captured(const struct nrm__transfer *t, nrm_CUstream stream, nrm_CUgraph *graph)
{
    struct nrm__cuda_lone_event event = {0};
    bool is_captured = false;
    CHECK_EQ(cuda.cuStreamBeginCapture(stream, NRM_CU_STREAM_CAPTURE_MODE_GLOBAL),
             NRM_CUDA_SUCCESS);
    nrm_status status =
        nrm__transfer_submit(-1, t, (uintptr_t)stream, &event, &is_captured);
    CHECK_EQ(is_captured, status == NRM_OK);
    CHECK(event.handle == NULL);
    CHECK_EQ(cuda.cuStreamEndCapture(stream, graph), NRM_CUDA_SUCCESS);
    return status;
}

/* The driver's peer calls break a capture: it is not asked. */
TEST_EACH(a_graph_between_devices_is_refused_and_goes_on, capture_cases)
{
    nrm_CUgraph graph = NULL;
    begin();
    struct nrm__transfer t = row->is_box ? boxes(0, 1) : flat(0, 1, 64);
    CHECK_STATUS(submit_captured(&t, streams[row->on], &graph), NRM_NOT_SUPPORTED);
    CHECK_STR_HAS(nrm_last_error()->message, row->text);
    CHECK_STR_HAS(nrm_last_error()->message, "add_peer");
    CHECK_EQ(sim.call_count("cuMemcpyPeerAsync"), 0u);
    CHECK_EQ(sim.call_count("cuMemcpy3DPeerAsync"), 0u);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    end();
}

TEST(a_graph_copies_between_devices_that_reach_both_sides)
{
    nrm_CUgraph graph = NULL;
    nrm_CUgraphExec exec = NULL;
    begin_with(NRM_SEGMENTS_ALLOC); /* which every device reaches */
    struct nrm__transfer t = boxes(0, 1);
    CHECK_OK(submit_captured(&t, streams[0], &graph));
    put(1, bytes, SPACE);
    CHECK_EQ(cuda.cuGraphInstantiateWithFlags(&exec, graph, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuGraphLaunch(exec, streams[0]), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamSynchronize(streams[0]), NRM_CUDA_SUCCESS);
    CHECK(has_arrived(&t, 0, 1));
    CHECK_EQ(cuda.cuGraphExecDestroy(exec), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    end();
}

CHECK_MAIN
