/*
 * The calls of the driver that a planned copy becomes.
 *
 * Most of what a small copy costs is its call, so pieces that are one row each go to
 * the driver as batches where it takes them. Those have no order among themselves: a
 * destination that may overlap itself gets its pieces one by one. A batch says when its
 * sources are read: of pageable memory during the call, as single copies do it, of all
 * other memory in the order of the stream.
 *
 * What a driver refuses in batches it may still take piece by piece (managed memory,
 * other devices: the rules are nowhere written in full). As the same bytes go to the
 * same places, all pieces are simply copied again then, and the error that counts is
 * that of a piece.
 */
#include "core/transfer_run.h"

#include "base/error.h"
#include "cuda/error.h"

enum {
    BATCH_LEAST = 4,  /* copies for which a batch is worth its own call */
    BATCH_MOST = 256, /* copies: their addresses are 6 KiB on the stack */
};

struct run {
    const struct nrm__driver *driver;
    const struct nrm__transfer *transfer;
    const struct nrm__transfer_plan *plan;
    nrm_CUstream stream;
    struct nrm__transfer_peers *peers; /* NULL: the device reaches both sides */
};

static nrm_CUdeviceptr
device_address(const void *ptr)
{
    return (nrm_CUdeviceptr)(uintptr_t)ptr;
}

/* Where the n-th call begins on both sides. */
static void
locate(const struct nrm__transfer *t, size_t n, char **dst, const char **src)
{
    *dst = t->dst;
    *src = t->src;
    for (int i = t->n_dims - 1; i >= 0; i--) {
        ptrdiff_t index = (ptrdiff_t)(n % t->shape[i]);
        n /= t->shape[i];
        *dst += index * t->dst_strides[i];
        *src += index * t->src_strides[i];
    }
}

/* ---- one call ---- */

static nrm_CUmemorytype
type_of(const struct run *run, enum nrm__direction if_host)
{
    return run->transfer->direction == if_host ? NRM_CU_MEMORYTYPE_HOST
                                               : NRM_CU_MEMORYTYPE_UNIFIED;
}

static nrm_CUresult
copy_run(const struct run *run, char *dst, const char *src)
{
    const struct nrm__driver *driver = run->driver;
    size_t nbytes = run->plan->width;
    switch (run->transfer->direction) {
    case NRM__TO_DEVICE:
        return driver->cuMemcpyHtoDAsync(device_address(dst), src, nbytes, run->stream);
    case NRM__TO_HOST:
        return driver->cuMemcpyDtoHAsync(dst, device_address(src), nbytes, run->stream);
    default:
        return driver->cuMemcpyAsync(device_address(dst), device_address(src), nbytes,
                                     run->stream);
    }
}

/* Of host and device address the driver reads the one that the type names. */
static nrm_CUresult
copy_rows(const struct run *run, char *dst, const char *src)
{
    const struct nrm__transfer_plan *plan = run->plan;
    nrm_CUDA_MEMCPY2D copy = {
        .srcMemoryType = type_of(run, NRM__TO_DEVICE),
        .srcHost = src,
        .srcDevice = device_address(src),
        .srcPitch = (size_t)plan->src_pitch,
        .dstMemoryType = type_of(run, NRM__TO_HOST),
        .dstHost = dst,
        .dstDevice = device_address(dst),
        .dstPitch = (size_t)plan->dst_pitch,
        .WidthInBytes = plan->width,
        .Height = plan->n_rows,
    };
    return run->driver->cuMemcpy2DAsync(&copy, run->stream);
}

static nrm_CUresult
copy_planes(const struct run *run, char *dst, const char *src)
{
    const struct nrm__transfer_plan *plan = run->plan;
    nrm_CUDA_MEMCPY3D copy = {
        .srcMemoryType = type_of(run, NRM__TO_DEVICE),
        .srcHost = src,
        .srcDevice = device_address(src),
        .srcPitch = (size_t)plan->src_pitch,
        .srcHeight = plan->src_height,
        .dstMemoryType = type_of(run, NRM__TO_HOST),
        .dstHost = dst,
        .dstDevice = device_address(dst),
        .dstPitch = (size_t)plan->dst_pitch,
        .dstHeight = plan->dst_height,
        .WidthInBytes = plan->width,
        .Height = plan->n_rows,
        .Depth = plan->n_planes,
    };
    return run->driver->cuMemcpy3DAsync(&copy, run->stream);
}

static nrm_CUresult
copy_to_peer(const struct run *run, char *dst, const char *src)
{
    return nrm__transfer_peers_copy(run->peers, run->driver, run->plan, dst, src,
                                    run->stream);
}

static nrm_status
copy_one_by_one(const struct run *run)
{
    const struct nrm__transfer_plan *plan = run->plan;
    nrm_CUresult code = NRM_CUDA_SUCCESS;
    for (size_t n = 0; n < plan->n_calls && code == NRM_CUDA_SUCCESS; n++) {
        char *dst;
        const char *src;
        locate(run->transfer, n, &dst, &src);
        code = run->peers != NULL   ? copy_to_peer(run, dst, src)
               : plan->n_planes > 1 ? copy_planes(run, dst, src)
               : plan->n_rows > 1   ? copy_rows(run, dst, src)
                                    : copy_run(run, dst, src);
    }
    return code == NRM_CUDA_SUCCESS
               ? NRM_OK
               : nrm__cuda_error(code, "a copy of %zu B",
                                 plan->n_planes * plan->n_rows * plan->width);
}

/* ---- batches ---- */

struct batch {
    size_t n;
    nrm_CUmemcpySrcAccessOrder order; /* of all of them */
    nrm_CUdeviceptr dsts[BATCH_MOST];
    nrm_CUdeviceptr srcs[BATCH_MOST];
    size_t sizes[BATCH_MOST];
};

static nrm_CUresult
submit(const struct run *run, struct batch *batch)
{
    nrm_CUmemcpyAttributes attributes = {.srcAccessOrder = batch->order};
    size_t first = 0, failed = 0, n = batch->n;
    batch->n = 0;
    return n == 0 ? NRM_CUDA_SUCCESS
                  : run->driver->cuMemcpyBatchAsync(batch->dsts, batch->srcs,
                                                    batch->sizes, n, &attributes,
                                                    &first, 1, &failed, run->stream);
}

static bool
is_known(const struct run *run, const char *ptr)
{
    nrm_CUmemorytype type;
    return run->driver->cuPointerGetAttribute(&type,
                                              NRM_CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                              device_address(ptr)) == NRM_CUDA_SUCCESS;
}

/* A batch takes what it does not know for host memory, on either side, where a single
   copy that names its direction fails. So both ends of the device's side are looked
   up. */
static bool
is_on_device(const struct run *run)
{
    const struct nrm__transfer *t = run->transfer;
    bool is_dst = t->direction == NRM__TO_DEVICE;
    const ptrdiff_t *strides = is_dst ? t->dst_strides : t->src_strides;
    const char *first = is_dst ? t->dst : t->src;
    const char *last = first + run->plan->width - 1;
    for (int i = 0; i < t->n_dims; i++) {
        ptrdiff_t reach = ((ptrdiff_t)t->shape[i] - 1) * strides[i];
        first += reach < 0 ? reach : 0;
        last += reach > 0 ? reach : 0;
    }
    return t->direction == NRM__WITHIN || (is_known(run, first) && is_known(run, last));
}

/* Part of an array may be page-locked. */
static nrm_CUmemcpySrcAccessOrder
order_of(const struct run *run, const char *src)
{
    return run->transfer->direction != NRM__TO_DEVICE || is_known(run, src)
               ? NRM_CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
               : NRM_CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
}

static nrm_CUresult
copy_in_batches(const struct run *run)
{
    struct batch batch;
    nrm_CUresult code = NRM_CUDA_SUCCESS;
    batch.n = 0;
    for (size_t n = 0; n < run->plan->n_calls && code == NRM_CUDA_SUCCESS; n++) {
        char *dst;
        const char *src;
        locate(run->transfer, n, &dst, &src);
        nrm_CUmemcpySrcAccessOrder order = order_of(run, src);
        if (batch.n == BATCH_MOST || (batch.n > 0 && order != batch.order)) {
            code = submit(run, &batch);
        }
        batch.order = order;
        batch.dsts[batch.n] = device_address(dst);
        batch.srcs[batch.n] = device_address(src);
        batch.sizes[batch.n++] = run->plan->width;
    }
    return code == NRM_CUDA_SUCCESS ? submit(run, &batch) : code;
}

static bool
is_refusal(nrm_CUresult code)
{
    return code == NRM_CUDA_ERROR_INVALID_VALUE ||
           code == NRM_CUDA_ERROR_NOT_SUPPORTED ||
           code == NRM_CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

/* ---- all of them ---- */

/* The driver takes no batches on the legacy stream, nor while a stream is captured; and
   where devices know registered memory under another address, it has been seen to use
   the host's in them. */
bool
nrm__transfer_takes_batches(const struct nrm__cuda_scope *scope, uintptr_t handle,
                            enum nrm__direction direction)
{
    bool is_legacy = handle == NRM_STREAM_HANDLE_DEFAULT ||
                     handle == NRM_STREAM_HANDLE_LEGACY;
    nrm_CUdevice_attribute needed =
        NRM_CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM;
    return scope->driver->cuMemcpyBatchAsync != NULL && !is_legacy &&
           (direction == NRM__WITHIN ||
            nrm__cuda_attribute(scope->device, needed) == 1);
}

static nrm_status
run_plan(const struct run *run, bool takes_batches)
{
    const struct nrm__transfer_plan *plan = run->plan;
    if (!takes_batches || plan->n_calls < BATCH_LEAST || plan->n_rows > 1 ||
        plan->has_order || !is_on_device(run)) {
        return copy_one_by_one(run);
    }
    nrm_CUresult code = copy_in_batches(run);
    if (is_refusal(code)) {
        return copy_one_by_one(run);
    }
    return code == NRM_CUDA_SUCCESS
               ? NRM_OK
               : nrm__cuda_error(code, "a batch of %zu copies of %zu B", plan->n_calls,
                                 plan->width);
}

/* A plan moves the axes about. There is room for more than most copies have. */
static void
take_axes(struct nrm__transfer *axes, const struct nrm__transfer *t)
{
    axes->dst = t->dst;
    axes->src = t->src;
    axes->direction = t->direction;
    axes->itemsize = t->itemsize;
    axes->n_dims = t->n_dims;
    for (int i = 0; i < t->n_dims; i++) {
        axes->shape[i] = t->shape[i];
        axes->dst_strides[i] = t->dst_strides[i];
        axes->src_strides[i] = t->src_strides[i];
    }
}

nrm_status
nrm__transfer_run(const struct nrm__cuda_scope *scope,
                  const struct nrm__transfer *transfer, uintptr_t handle,
                  bool is_captured, struct nrm__transfer_peers *peers)
{
    struct nrm__transfer axes;
    struct nrm__transfer_plan plan;
    take_axes(&axes, transfer);
    nrm__transfer_plan(&axes, &plan);
    struct run run = {scope->driver, &axes, &plan, (nrm_CUstream)handle, peers};
    return run_plan(&run, peers == NULL && !is_captured &&
                              nrm__transfer_takes_batches(scope, handle,
                                                          transfer->direction));
}
