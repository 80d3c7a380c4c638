/* Copies: where they may begin and end, when they read and write, when the call
 * returns. */
#include "rule.h"

static nrm_CUstream stream;
static nrm_CUdeviceptr on_device;
static unsigned char *page_locked;

struct request {
    void *host;
    size_t nbytes;
};

static nrm_CUresult
copy_in(void *arg)
{
    const struct request *request = arg;
    return cu.cuMemcpyHtoDAsync(on_device, request->host, request->nbytes, stream);
}

static nrm_CUresult
copy_out(void *arg)
{
    const struct request *request = arg;
    return cu.cuMemcpyDtoHAsync(request->host, on_device, request->nbytes, stream);
}

static void
ends(void)
{
    nrm_CUdeviceptr small;
    MUST(cu.cuMemAlloc(&small, 4 * MIB));
    expect("copy that runs out of device memory",
           cu.cuMemcpyHtoDAsync(small, page_locked, 4 * MIB + 1, stream),
           NRM_CUDA_ERROR_INVALID_VALUE);
    expect("fill that runs out of device memory",
           cu.cuMemsetD8Async(small, 1, 4 * MIB + 1, stream),
           NRM_CUDA_ERROR_INVALID_VALUE);
    expect("copy of zero bytes", cu.cuMemcpyHtoDAsync(small, page_locked, 0, stream),
           NRM_CUDA_SUCCESS);
    expect("copy of zero bytes to no address",
           cu.cuMemcpyHtoDAsync(0, page_locked, 0, stream), NRM_CUDA_SUCCESS);
    expect("copy to an address that is no device memory",
           cu.cuMemcpyHtoDAsync(64, page_locked, 64, stream),
           NRM_CUDA_ERROR_INVALID_VALUE);
    MUST(cu.cuStreamSynchronize(stream));
    MUST(cu.cuMemFree(small));
}

static void
page_locked_memory(void)
{
    struct probe probe;
    struct request request = {page_locked, 64 * KIB};
    memset(page_locked, 1, 64 * KIB);
    hold(stream);
    probe_start(&probe, copy_in, &request);
    expect_no("copy from page-locked memory behind a held stream blocks",
              probe_blocks(&probe));
    memset(page_locked, 2, 64 * KIB);
    let_go();
    MUST(probe_join(&probe));
    MUST(cu.cuStreamSynchronize(stream));
    expect_number("it reads what stands there when it runs", device_byte(on_device), 2);
}

static void
pageable_memory(void)
{
    struct probe probe;
    unsigned char *pageable = pages(64 * KIB, 5);
    struct request request = {pageable, 64 * KIB};
    hold(stream);
    probe_start(&probe, copy_in, &request);
    expect_no("copy from pageable memory behind a held stream blocks",
              probe_blocks(&probe));
    memset(pageable, 6, 64 * KIB);
    let_go();
    MUST(probe_join(&probe));
    MUST(cu.cuStreamSynchronize(stream));
    expect_number("it has read what stood there at the call", device_byte(on_device),
                  5);

    hold(stream);
    probe_start(&probe, copy_out, &request);
    expect_yes("copy to pageable memory behind a held stream blocks",
               probe_blocks(&probe));
    let_go();
    MUST(probe_join(&probe));
    expect_number("and the bytes are there when it returns", pageable[64 * KIB - 1], 5);
}

static void
two_dimensions(void)
{
    nrm_CUDA_MEMCPY2D copy = {.srcMemoryType = NRM_CU_MEMORYTYPE_HOST,
                              .srcHost = page_locked,
                              .srcPitch = 256,
                              .srcXInBytes = 16,
                              .srcY = 1,
                              .dstMemoryType = NRM_CU_MEMORYTYPE_DEVICE,
                              .dstDevice = on_device,
                              .dstPitch = 32,
                              .WidthInBytes = 32,
                              .Height = 4};
    for (int i = 0; i < 256 * 5; i++) {
        page_locked[i] = (unsigned char)(i / 256 * 16 + i % 16);
    }
    expect("copy four rows", cu.cuMemcpy2DAsync(&copy, stream), NRM_CUDA_SUCCESS);
    MUST(cu.cuStreamSynchronize(stream));
    expect_number("first byte", device_byte(on_device), 16);
    expect_number("byte 5 of the last row", device_byte(on_device + 3 * 32 + 5), 69);
    copy.srcY = 1024 * 1024;
    expect("rows outside of the memory", cu.cuMemcpy2DAsync(&copy, stream),
           NRM_CUDA_ERROR_INVALID_VALUE);
    copy.srcY = 0;
    copy.srcPitch = 16;
    expect("rows wider than their pitch", cu.cuMemcpy2DAsync(&copy, stream),
           NRM_CUDA_ERROR_INVALID_VALUE);
}

/* Three planes of two rows, out of planes of four. */
static nrm_CUDA_MEMCPY3D
box(void)
{
    return (nrm_CUDA_MEMCPY3D){.srcMemoryType = NRM_CU_MEMORYTYPE_HOST,
                               .srcHost = page_locked,
                               .srcPitch = 64,
                               .srcHeight = 4,
                               .srcXInBytes = 8,
                               .srcY = 1,
                               .srcZ = 1,
                               .dstMemoryType = NRM_CU_MEMORYTYPE_UNIFIED,
                               .dstDevice = on_device,
                               .dstPitch = 32,
                               .dstHeight = 3,
                               .WidthInBytes = 16,
                               .Height = 2,
                               .Depth = 3};
}

static void
three_dimensions(void)
{
    nrm_CUDA_MEMCPY3D copy = box();
    for (int i = 0; i < 64 * 16; i++) {
        page_locked[i] = (unsigned char)(i / 64 * 16 + i % 64 / 4);
    }
    MUST(cu.cuMemsetD8Async(on_device, 255, 32 * 9, stream));
    expect("copy three planes", cu.cuMemcpy3DAsync(&copy, stream), NRM_CUDA_SUCCESS);
    MUST(cu.cuStreamSynchronize(stream));
    expect_number("first byte", device_byte(on_device), 5 * 16 + 2);
    expect_number("first byte of the second plane", device_byte(on_device + 3 * 32),
                  9 * 16 + 2);
    expect_number("last byte", device_byte(on_device + (2 * 3 + 1) * 32 + 15),
                  14 * 16 + 5);
    expect_number("behind a row", device_byte(on_device + 16), 255);
    expect_number("between two planes", device_byte(on_device + 2 * 32), 255);

    copy.srcPitch = 8;
    expect("rows of planes wider than their pitch", cu.cuMemcpy3DAsync(&copy, stream),
           NRM_CUDA_ERROR_INVALID_VALUE);
    copy = box();
    copy.srcHeight = 2;
    expect("planes higher than what lies between them",
           cu.cuMemcpy3DAsync(&copy, stream), NRM_CUDA_ERROR_INVALID_VALUE);
    copy = box();
    copy.srcZ = 1024 * 1024;
    expect("planes outside of the memory", cu.cuMemcpy3DAsync(&copy, stream),
           NRM_CUDA_ERROR_INVALID_VALUE);
    copy = box();
    copy.Depth = 1;
    copy.srcHeight = copy.dstHeight = 0;
    copy.srcY = copy.srcZ = 0;
    expect("one plane of no known height", cu.cuMemcpy3DAsync(&copy, stream),
           NRM_CUDA_SUCCESS);
    MUST(cu.cuStreamSynchronize(stream));
}

static void
three_dimensions_in_a_graph(void)
{
    nrm_CUDA_MEMCPY3D copy = box();
    nrm_CUgraph graph = NULL;
    nrm_CUgraphExec exec = NULL;
    MUST(cu.cuStreamBeginCapture(stream, NRM_CU_STREAM_CAPTURE_MODE_RELAXED));
    expect("planes copied while the stream is captured",
           cu.cuMemcpy3DAsync(&copy, stream), NRM_CUDA_SUCCESS);
    MUST(cu.cuStreamEndCapture(stream, &graph));
    MUST(cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    memset(page_locked, 77, 64 * 16);
    MUST(cu.cuGraphLaunch(exec, stream));
    MUST(cu.cuStreamSynchronize(stream));
    expect_number("the graph reads what stands there when it runs",
                  device_byte(on_device + 3 * 32), 77);
    MUST(cu.cuGraphExecDestroy(exec));
    MUST(cu.cuGraphDestroy(graph));
}

int
main(int argc, char **argv)
{
    void *ptr = NULL;
    start(argc, argv);
    MUST(cu.cuStreamCreate(&stream, NRM_CU_STREAM_NON_BLOCKING));
    MUST(cu.cuMemAlloc(&on_device, MIB));
    MUST(cu.cuMemHostAlloc(&ptr, 8 * MIB, NRM_CU_MEMHOSTALLOC_PORTABLE));
    page_locked = ptr;
    ends();
    page_locked_memory();
    pageable_memory();
    two_dimensions();
    three_dimensions();
    three_dimensions_in_a_graph();
    return finish();
}
