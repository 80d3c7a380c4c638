/* Batches of copies: where they are taken, what is wrong with one, and when its sources
 * are read. */
#include "rule.h"

enum { N = 3, NBYTES = 4 * KIB };

static nrm_CUstream stream;
static nrm_CUdeviceptr on_device; /* N pieces, each with as many bytes behind it */
static unsigned char *page_locked;

/* A batch of N copies to the device, as the rules change it. */
struct batch {
    nrm_CUdeviceptr dsts[N];
    nrm_CUdeviceptr srcs[N];
    size_t sizes[N];
    size_t n;
    nrm_CUmemcpyAttributes attributes[N];
    size_t first_copies[N];
    size_t n_attributes;
    size_t failed;
    nrm_CUstream stream;
};

static struct batch
batch_from(unsigned char *host, unsigned int order)
{
    struct batch batch = {.n = N, .n_attributes = 1, .failed = 4711, .stream = stream};
    for (size_t i = 0; i < N; i++) {
        batch.dsts[i] = on_device + 2 * i * NBYTES;
        batch.srcs[i] = address_of(host + i * NBYTES);
        batch.sizes[i] = NBYTES;
        batch.attributes[i].srcAccessOrder = order;
    }
    return batch;
}

static struct batch
ordinary(void)
{
    return batch_from(page_locked, NRM_CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
}

static nrm_CUresult
copy(void *arg)
{
    struct batch *batch = arg;
    return cu.cuMemcpyBatchAsync(batch->dsts, batch->srcs, batch->sizes, batch->n,
                                 batch->attributes, batch->first_copies,
                                 batch->n_attributes, &batch->failed, batch->stream);
}

static int
byte_of_piece(size_t piece)
{
    return device_byte(on_device + 2 * piece * NBYTES + NBYTES - 1);
}

/* ---- what arrives ---------------------------------------------------------------- */

static void
pieces(void)
{
    struct batch batch = ordinary();
    memset(page_locked, 1, NBYTES);
    memset(page_locked + NBYTES, 2, NBYTES);
    memset(page_locked + 2 * NBYTES, 3, NBYTES);
    expect("three copies to the device", copy(&batch), NRM_CUDA_SUCCESS);
    MUST(cu.cuStreamSynchronize(stream));
    expect_number("the first one", byte_of_piece(0), 1);
    expect_number("the last one", byte_of_piece(2), 3);

    memset(page_locked, 0, (size_t)N * NBYTES);
    for (size_t i = 0; i < N; i++) {
        batch.srcs[i] = on_device + 2 * i * NBYTES;
        batch.dsts[i] = address_of(page_locked + (N - 1 - i) * NBYTES);
    }
    expect("to the host", copy(&batch), NRM_CUDA_SUCCESS);
    MUST(cu.cuStreamSynchronize(stream));
    expect_number("in the order of their addresses", page_locked[0], 3);

    for (size_t i = 0; i < N; i++) {
        batch.srcs[i] = on_device;
        batch.dsts[i] = on_device + (2 * i + 1) * NBYTES;
    }
    expect("from one place of the device to three", copy(&batch), NRM_CUDA_SUCCESS);
    MUST(cu.cuStreamSynchronize(stream));
    expect_number("the last of them", device_byte(on_device + 5 * NBYTES), 1);
}

static void
streams(void)
{
    struct batch batch = ordinary();
    batch.stream = NULL;
    expect("on the default stream", copy(&batch), NRM_CUDA_ERROR_INVALID_VALUE);
    batch.stream = NRM_CU_STREAM_LEGACY;
    expect("on the legacy stream", copy(&batch), NRM_CUDA_ERROR_INVALID_VALUE);
    batch.stream = NRM_CU_STREAM_PER_THREAD;
    expect("on the per-thread stream", copy(&batch), NRM_CUDA_SUCCESS);
    MUST(cu.cuStreamCreate(&batch.stream, NRM_CU_STREAM_DEFAULT));
    expect("on a blocking stream", copy(&batch), NRM_CUDA_SUCCESS);
    MUST(cu.cuCtxSynchronize());
}

/* ---- what is wrong with it ------------------------------------------------------- */

static void
attributes(void)
{
    struct batch batch = ordinary();
    batch.n_attributes = 2;
    batch.first_copies[1] = 1;
    expect("attributes of the first copy, and of the others", copy(&batch),
           NRM_CUDA_SUCCESS);
    batch = ordinary();
    batch.attributes[0].srcAccessOrder = NRM_CU_MEMCPY_SRC_ACCESS_ORDER_INVALID;
    expect("no order of the sources", copy(&batch), NRM_CUDA_ERROR_INVALID_VALUE);
    batch = ordinary();
    batch.n_attributes = 0;
    expect("no attributes", copy(&batch), NRM_CUDA_ERROR_INVALID_VALUE);
    batch = ordinary();
    batch.first_copies[0] = 1;
    expect("attributes from the second copy on", copy(&batch),
           NRM_CUDA_ERROR_INVALID_VALUE);
    batch = ordinary();
    batch.n = 1;
    batch.n_attributes = 2;
    batch.first_copies[1] = 1;
    expect("more attributes than copies", copy(&batch), NRM_CUDA_ERROR_INVALID_VALUE);
}

static void
addresses(void)
{
    struct batch batch = ordinary();
    batch.sizes[1] = 0;
    expect("a copy of zero bytes", copy(&batch), NRM_CUDA_ERROR_INVALID_VALUE);
    batch = ordinary();
    batch.dsts[1] = 0;
    expect("a copy to no address", copy(&batch), NRM_CUDA_ERROR_INVALID_VALUE);
    batch = ordinary();
    batch.sizes[2] = 8 * MIB;
    expect("a copy that runs out of its memory", copy(&batch),
           NRM_CUDA_ERROR_INVALID_VALUE);
    batch = ordinary();
    expect("and after all that", copy(&batch), NRM_CUDA_SUCCESS);
    MUST(cu.cuStreamSynchronize(stream));
}

static void
captures(void)
{
    nrm_CUstreamCaptureStatus status = NRM_CU_STREAM_CAPTURE_STATUS_NONE;
    nrm_CUgraph graph = NULL;
    struct batch batch = ordinary();
    MUST(cu.cuStreamBeginCapture(stream, NRM_CU_STREAM_CAPTURE_MODE_RELAXED));
    expect("while its stream is captured", copy(&batch),
           NRM_CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    expect("its capture", cu.cuStreamIsCapturing(stream, &status), NRM_CUDA_SUCCESS);
    expect_number("goes on", status, NRM_CU_STREAM_CAPTURE_STATUS_ACTIVE);
    expect("and ends well", cu.cuStreamEndCapture(stream, &graph), NRM_CUDA_SUCCESS);
    MUST(cu.cuGraphDestroy(graph));
}

/* ---- when sources are read ------------------------------------------------------- */

/* Submits one behind a held stream; its sources become `later` when the call has
 * returned, or could not before the stream went on. */
static void
behind_a_held_stream(struct batch *batch, unsigned char *host, int later)
{
    struct probe probe;
    hold(stream);
    probe_start(&probe, copy, batch);
    bool blocks = probe_blocks(&probe);
    if (!blocks) {
        memset(host, later, (size_t)N * NBYTES);
    }
    let_go();
    MUST(probe_join(&probe));
    MUST(cu.cuStreamSynchronize(stream));
}

static void
sources(void)
{
    unsigned char *pageable = pages((size_t)N * NBYTES, 7);
    struct batch batch = ordinary();
    struct probe probe;
    memset(page_locked, 5, (size_t)N * NBYTES);
    hold(stream);
    probe_start(&probe, copy, &batch);
    expect_no("from page-locked memory behind a held stream, in its order, it blocks",
              probe_blocks(&probe));
    memset(page_locked, 6, (size_t)N * NBYTES);
    let_go();
    MUST(probe_join(&probe));
    MUST(cu.cuStreamSynchronize(stream));
    expect_number("it reads what stands there when it runs", byte_of_piece(1), 6);

    batch = batch_from(page_locked, NRM_CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL);
    behind_a_held_stream(&batch, page_locked, 9);
    expect_number("during the call it reads what stands there then", byte_of_piece(1),
                  6);

    batch = batch_from(pageable, NRM_CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL);
    behind_a_held_stream(&batch, pageable, 8);
    expect_number("of pageable memory, too", byte_of_piece(1), 7);
}

static void
destinations(void)
{
    unsigned char *pageable = pages((size_t)N * NBYTES, 0);
    struct batch batch = ordinary();
    for (size_t i = 0; i < N; i++) {
        batch.srcs[i] = on_device + 2 * i * NBYTES;
        batch.dsts[i] = address_of(pageable + i * NBYTES);
    }
    expect("to pageable memory", copy(&batch), NRM_CUDA_SUCCESS);
    MUST(cu.cuStreamSynchronize(stream));
    expect_number("the bytes are there", pageable[N * NBYTES - 1], 7);
}

int
main(int argc, char **argv)
{
    void *ptr = NULL;
    int version = 0;
    start(argc, argv);
    MUST(cu.cuDriverGetVersion(&version));
    expect_yes("drivers since CUDA 12.8 have batches",
               (cu.cuMemcpyBatchAsync != NULL) == (version >= 12080));
    if (cu.cuMemcpyBatchAsync == NULL) {
        return finish();
    }
    MUST(cu.cuStreamCreate(&stream, NRM_CU_STREAM_NON_BLOCKING));
    MUST(cu.cuMemAlloc(&on_device, MIB));
    MUST(cu.cuMemHostAlloc(&ptr, MIB, NRM_CU_MEMHOSTALLOC_PORTABLE));
    page_locked = ptr;
    pieces();
    streams();
    attributes();
    addresses();
    captures();
    sources();
    destinations();
    return finish();
}
