/* Copies and prefetches of memory of a device, on streams of that device whichever is
   current, and streams that wait for each other. */
#include <pthread.h>
#include <string.h>

#include "core/prefetch.h"
#include "core/transfer.h"
#include "fixtures.h"
#include "streams.h"

enum { NBYTES = 4096, FAR_DEVICE = 1 };

static void
begin(int n_devices)
{
    struct nrm_cudasim_config config = simulator_config();
    config.devices = n_devices;
    simulator_start(&config);
    CHECK_OK(nrm__cuda_init(NULL));
    make_current(0);
}

static nrm_CUdeviceptr
allocate_on(int device)
{
    nrm_CUdeviceptr ptr = 0;
    make_current(device);
    CHECK_EQ(cuda.cuMemAlloc(&ptr, NBYTES), NRM_CUDA_SUCCESS);
    make_current(0);
    return ptr;
}

static struct nrm__transfer
transfer_to(nrm_CUdeviceptr dst, const void *src)
{
    return (struct nrm__transfer){
        .dst = (char *)(uintptr_t)dst,
        .src = src,
        .direction = NRM__TO_DEVICE,
        .itemsize = NBYTES,
    };
}

/* ---- the device's own streams ---- */

static const struct special {
    const char *name;
    uintptr_t handle;
} specials[] = {
    {"the default stream", NRM_STREAM_HANDLE_DEFAULT},
    {"the legacy stream", NRM_STREAM_HANDLE_LEGACY},
    {"the per-thread stream", NRM_STREAM_HANDLE_PER_THREAD},
};

/* Held is the stream of the other device: the copy on this one's is done. */
TEST_EACH(a_handle_means_a_stream_of_the_memorys_device, specials)
{
    static unsigned char host[NBYTES], seen[NBYTES];
    begin(2);
    nrm_CUdeviceptr far = allocate_on(FAR_DEVICE);
    nrm_CUcontext context, current;
    struct nrm__cuda_lone_event event = {0};
    bool is_captured = true;
    memset(host, 7, NBYTES);
    CHECK_EQ(cuda.cuCtxGetCurrent(&current), NRM_CUDA_SUCCESS);
    CHECK_EQ(sim.hold_stream((nrm_CUstream)row->handle), 0);
    struct nrm__transfer transfer = transfer_to(far, host);
    CHECK_OK(
        nrm__transfer_submit(FAR_DEVICE, &transfer, row->handle, &event, &is_captured));
    CHECK_OK(nrm__transfer_query(&event, true));
    nrm__cuda_lone_drop(&event);
    CHECK(!is_captured);
    CHECK_EQ(cuda.cuCtxGetCurrent(&context), NRM_CUDA_SUCCESS);
    CHECK(context == current);
    CHECK_EQ(sim.release_stream((nrm_CUstream)row->handle), 0);
    make_current(FAR_DEVICE);
    CHECK_EQ(cuda.cuMemcpyDtoH(seen, far, NBYTES), NRM_CUDA_SUCCESS);
    CHECK(memcmp(seen, host, NBYTES) == 0);
    CHECK_EQ(cuda.cuMemFree(far), NRM_CUDA_SUCCESS);
    CHECK_EQ(simulator_count(NRM_CUDASIM_EVENTS), 0u);
    simulator_check_faults();
}

/* ---- joins ---- */

static bool
is_idle(const nrm_stream *stream)
{
    let_run();
    return cuda.cuStreamQuery(handle_of(stream)) == NRM_CUDA_SUCCESS;
}

TEST(a_stream_waits_for_another_one)
{
    begin(1);
    nrm_CUdeviceptr ptr = allocate_on(0);
    nrm_stream *first = new_stream(), *second = new_stream();
    hold(first);
    CHECK_EQ(cuda.cuMemsetD8Async(ptr, 1, NBYTES, handle_of(first)), NRM_CUDA_SUCCESS);
    CHECK(is_idle(second));
    CHECK_OK(nrm__transfer_join(0, second, 0, first));
    CHECK(!is_idle(second));
    let_go(first);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(second)), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemFree(ptr), NRM_CUDA_SUCCESS);
    nrm_stream_release(first);
    nrm_stream_release(second);
    CHECK_EQ(simulator_count(NRM_CUDASIM_EVENTS), 0u);
    simulator_check_faults();
}

TEST(a_stream_need_not_wait_for_itself)
{
    begin(1);
    nrm_stream *stream = new_stream();
    nrm_stream *again = bare_stream(handle_of(stream));
    CHECK_OK(nrm__transfer_join(0, stream, 0, stream));
    CHECK_OK(nrm__transfer_join(0, stream, 0, again));
    CHECK_OK(nrm__transfer_join(0, nrm_stream_default(), 0, nrm_stream_legacy()));
    CHECK_EQ(sim.call_count("cuStreamWaitEvent"), 0u);
    nrm_stream_release(again);
    nrm_stream_release(stream);
}

static void *
fill_on_own_stream(void *argument)
{
    nrm_stream **out = argument;
    make_current(0);
    CHECK_OK(nrm_stream_per_thread(out));
    return NULL;
}

/* Its handle means another stream here. */
TEST(a_per_thread_stream_of_another_thread_is_waited_for)
{
    begin(1);
    nrm_stream *theirs = NULL, *mine = new_stream();
    pthread_t thread;
    nrm_CUstream blocking = NULL;
    REQUIRE(pthread_create(&thread, NULL, fill_on_own_stream, &theirs) == 0);
    pthread_join(thread, NULL);
    REQUIRE(!nrm_stream_is_usable_here(theirs));
    /* The legacy stream waits for streams that block, as theirs does. */
    CHECK_EQ(cuda.cuStreamCreate(&blocking, 0), NRM_CUDA_SUCCESS);
    nrm_CUdeviceptr ptr = allocate_on(0);
    CHECK_EQ(sim.hold_stream(blocking), 0);
    CHECK_EQ(cuda.cuMemsetD8Async(ptr, 1, NBYTES, blocking), NRM_CUDA_SUCCESS);
    CHECK_OK(nrm__transfer_join(0, mine, 0, theirs));
    CHECK(!is_idle(mine));
    CHECK_EQ(sim.release_stream(blocking), 0);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(mine)), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamDestroy(blocking), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemFree(ptr), NRM_CUDA_SUCCESS);
    nrm_stream_release(theirs);
    nrm_stream_release(mine);
    simulator_check_faults();
}

TEST(a_capture_is_not_broken)
{
    begin(1);
    nrm_stream *captured = new_stream(), *other = new_stream();
    nrm_CUgraph graph = NULL;
    CHECK_EQ(cuda.cuStreamBeginCapture(handle_of(captured),
                                       NRM_CU_STREAM_CAPTURE_MODE_GLOBAL),
             NRM_CUDA_SUCCESS);
    CHECK_OK(nrm__transfer_join(0, captured, 0, other));
    CHECK_OK(nrm__transfer_join(0, other, 0, captured));
    CHECK_EQ(cuda.cuStreamEndCapture(handle_of(captured), &graph), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    nrm_stream_release(captured);
    nrm_stream_release(other);
    simulator_check_faults();
}

TEST(streams_of_two_devices_are_joined)
{
    begin(2);
    nrm_CUdeviceptr ptr = allocate_on(0);
    nrm_stream *near = new_stream();
    make_current(FAR_DEVICE);
    nrm_stream *far = new_stream();
    make_current(0);
    hold(near);
    CHECK_EQ(cuda.cuMemsetD8Async(ptr, 1, NBYTES, handle_of(near)), NRM_CUDA_SUCCESS);
    CHECK_OK(nrm__transfer_join(FAR_DEVICE, far, 0, near));
    CHECK(!is_idle(far));
    let_go(near);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(far)), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemFree(ptr), NRM_CUDA_SUCCESS);
    nrm_stream_release(near);
    nrm_stream_release(far);
    simulator_check_faults();
}

/* The same handle means two streams there. */
TEST(default_streams_of_two_devices_are_joined)
{
    begin(2);
    nrm_CUdeviceptr ptr = allocate_on(0);
    nrm_stream *stream = nrm_stream_default();
    CHECK_EQ(sim.hold_stream(NULL), 0);
    CHECK_EQ(cuda.cuMemsetD8Async(ptr, 1, NBYTES, NULL), NRM_CUDA_SUCCESS);
    CHECK_OK(nrm__transfer_join(FAR_DEVICE, stream, 0, stream));
    make_current(FAR_DEVICE);
    CHECK(!is_idle(stream));
    make_current(0);
    CHECK_EQ(sim.release_stream(NULL), 0);
    make_current(FAR_DEVICE);
    CHECK_EQ(cuda.cuStreamSynchronize(NULL), NRM_CUDA_SUCCESS);
    CHECK(is_idle(stream));
    make_current(0);
    CHECK_EQ(cuda.cuMemFree(ptr), NRM_CUDA_SUCCESS);
    CHECK_EQ(simulator_count(NRM_CUDASIM_EVENTS), 0u);
    simulator_check_faults();
}

/* ---- prefetches ---- */

static size_t
n_prefetches(void)
{
    return sim.call_count("cuMemPrefetchAsync");
}

TEST(managed_memory_is_prefetched_to_where_it_is_wanted)
{
    begin(2);
    nrm_CUdeviceptr ptr = 0;
    CHECK_EQ(cuda.cuMemAllocManaged(&ptr, NBYTES, NRM_CU_MEM_ATTACH_GLOBAL),
             NRM_CUDA_SUCCESS);
    const void *memory = (const void *)(uintptr_t)ptr;
    nrm_stream *stream = new_stream();
    CHECK_OK(nrm__prefetch(memory, NBYTES, FAR_DEVICE, 0, stream));
    CHECK_OK(nrm__prefetch(memory, NBYTES, NRM__PREFETCH_TO_HOST, 0, stream));
    CHECK_OK(nrm__prefetch(memory, NBYTES, 0, -1, nrm_stream_default()));
    CHECK_EQ(n_prefetches(), 3u);
    CHECK_OK(nrm__prefetch(memory, 0, 0, 0, stream));
    CHECK_STATUS(nrm__prefetch(memory, NBYTES, 2, 0, stream), NRM_INVALID_VALUE);
    CHECK_EQ(n_prefetches(), 3u);
    CHECK_STATUS(nrm__prefetch(memory, NBYTES + 1, 0, 0, stream), NRM_CUDA_ERROR);
    CHECK_STR_HAS(nrm_last_error()->message, "cuMemPrefetchAsync of 4097 B");
    CHECK_EQ(cuda.cuMemFree(ptr), NRM_CUDA_SUCCESS);
    nrm_stream_release(stream);
    simulator_check_faults();
}

TEST(a_device_that_cannot_share_managed_memory_gets_none)
{
    begin(1);
    nrm_CUdeviceptr ptr = 0;
    CHECK_EQ(sim.set_attribute(0, NRM_CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 0),
             0);
    CHECK_EQ(cuda.cuMemAllocManaged(&ptr, NBYTES, NRM_CU_MEM_ATTACH_GLOBAL),
             NRM_CUDA_SUCCESS);
    CHECK_OK(nrm__prefetch((const void *)(uintptr_t)ptr, NBYTES, 0, 0,
                           nrm_stream_default()));
    CHECK_EQ(n_prefetches(), 0u);
    CHECK_EQ(cuda.cuMemFree(ptr), NRM_CUDA_SUCCESS);
}

CHECK_MAIN
