/*
 * Planning and submitting copies. transfer.h says how they are used.
 *
 * The order of axes is free, as each element has its own place on both sides. So they are
 * sorted by the destination's strides, the innermost last, and neighbours are merged where
 * the outer one continues the inner one on both sides. Then the innermost axis is a run of
 * bytes if it is contiguous on both sides; of the others, the longest whose strides can be
 * pitches becomes the rows of a two-dimensional copy, and what is left is looped over.
 */
#include "core/transfer.h"

#include "base/error.h"
#include "core/hooks.h"
#include "core/stream.h"
#include "cuda/place.h"
#include "nrm/resource.h"

#define PITCH_MAX INT32_MAX /* the least that devices allow is a little more */

/* ---- planning ---- */

static void
swap_axes(struct nrm__transfer *t, int i, int j)
{
    size_t n = t->shape[i];
    ptrdiff_t dst = t->dst_strides[i], src = t->src_strides[i];
    t->shape[i] = t->shape[j];
    t->dst_strides[i] = t->dst_strides[j];
    t->src_strides[i] = t->src_strides[j];
    t->shape[j] = n;
    t->dst_strides[j] = dst;
    t->src_strides[j] = src;
}

static void
remove_axis(struct nrm__transfer *t, int axis)
{
    for (int i = axis; i + 1 < t->n_dims; i++) {
        swap_axes(t, i, i + 1);
    }
    t->n_dims--;
}

/* An axis that runs backwards on both sides runs forwards from its other end. */
static void
flip_axes(struct nrm__transfer *t)
{
    for (int i = 0; i < t->n_dims; i++) {
        if (t->dst_strides[i] < 0 && t->src_strides[i] < 0) {
            ptrdiff_t last = (ptrdiff_t)t->shape[i] - 1;
            t->dst += last * t->dst_strides[i];
            t->src += last * t->src_strides[i];
            t->dst_strides[i] = -t->dst_strides[i];
            t->src_strides[i] = -t->src_strides[i];
        }
    }
}

static size_t
magnitude(ptrdiff_t stride)
{
    return stride < 0 ? (size_t)-stride : (size_t)stride;
}

static void
sort_axes(struct nrm__transfer *t)
{
    for (int i = 1; i < t->n_dims; i++) {
        for (int j = i;
             j > 0 && magnitude(t->dst_strides[j - 1]) < magnitude(t->dst_strides[j]);
             j--) {
            swap_axes(t, j - 1, j);
        }
    }
}

static void
merge_axes(struct nrm__transfer *t)
{
    for (int i = t->n_dims - 1; i > 0; i--) {
        ptrdiff_t n = (ptrdiff_t)t->shape[i];
        if (t->dst_strides[i - 1] == n * t->dst_strides[i] &&
            t->src_strides[i - 1] == n * t->src_strides[i]) {
            t->shape[i] *= t->shape[i - 1];
            remove_axis(t, i - 1);
        }
    }
}

static bool
is_pitch(ptrdiff_t stride, size_t width)
{
    return stride > 0 && (size_t)stride >= width && stride <= PITCH_MAX;
}

/* The longest axis that can be rows; -1: none. */
static int
find_rows(const struct nrm__transfer *t, size_t width)
{
    int found = -1;
    for (int i = 0; i < t->n_dims; i++) {
        if (is_pitch(t->dst_strides[i], width) && is_pitch(t->src_strides[i], width) &&
            (found < 0 || t->shape[i] > t->shape[found])) {
            found = i;
        }
    }
    return found;
}

static bool
is_empty(const struct nrm__transfer *t)
{
    bool empty = t->itemsize == 0;
    for (int i = 0; i < t->n_dims; i++) {
        empty = empty || t->shape[i] == 0;
    }
    return empty;
}

void
nrm__transfer_plan(struct nrm__transfer *t, struct nrm__transfer_plan *out)
{
    *out = (struct nrm__transfer_plan){0};
    if (is_empty(t)) {
        return;
    }
    for (int i = t->n_dims - 1; i >= 0; i--) {
        if (t->shape[i] == 1) {
            remove_axis(t, i);
        }
    }
    flip_axes(t);
    sort_axes(t);
    merge_axes(t);
    *out = (struct nrm__transfer_plan){.n_calls = 1, .n_rows = 1, .width = t->itemsize};
    int last = t->n_dims - 1;
    if (last >= 0 && t->dst_strides[last] == (ptrdiff_t)t->itemsize &&
        t->src_strides[last] == (ptrdiff_t)t->itemsize) {
        out->width *= t->shape[last];
        remove_axis(t, last);
    }
    int rows = find_rows(t, out->width);
    if (rows >= 0) {
        out->n_rows = t->shape[rows];
        out->dst_pitch = t->dst_strides[rows];
        out->src_pitch = t->src_strides[rows];
        remove_axis(t, rows);
    }
    for (int i = 0; i < t->n_dims; i++) {
        out->n_calls *= t->shape[i];
    }
}

/* ---- one call ---- */

static nrm_CUdeviceptr
device_address(const void *ptr)
{
    return (nrm_CUdeviceptr)(uintptr_t)ptr;
}

static nrm_CUresult
copy_run(const struct nrm__driver *driver, const struct nrm__transfer *t, char *dst,
         const char *src, size_t nbytes, nrm_CUstream stream)
{
    switch (t->direction) {
    case NRM__TO_DEVICE:
        return driver->cuMemcpyHtoDAsync(device_address(dst), src, nbytes, stream);
    case NRM__TO_HOST:
        return driver->cuMemcpyDtoHAsync(dst, device_address(src), nbytes, stream);
    default:
        return driver->cuMemcpyAsync(device_address(dst), device_address(src), nbytes,
                                     stream);
    }
}

static nrm_CUresult
copy_rows(const struct nrm__driver *driver, const struct nrm__transfer *t,
          const struct nrm__transfer_plan *plan, char *dst, const char *src,
          nrm_CUstream stream)
{
    nrm_CUDA_MEMCPY2D copy = {
        .srcMemoryType = NRM_CU_MEMORYTYPE_UNIFIED,
        .srcDevice = device_address(src),
        .srcPitch = (size_t)plan->src_pitch,
        .dstMemoryType = NRM_CU_MEMORYTYPE_UNIFIED,
        .dstDevice = device_address(dst),
        .dstPitch = (size_t)plan->dst_pitch,
        .WidthInBytes = plan->width,
        .Height = plan->n_rows,
    };
    if (t->direction == NRM__TO_DEVICE) {
        copy.srcMemoryType = NRM_CU_MEMORYTYPE_HOST;
        copy.srcHost = src;
    }
    if (t->direction == NRM__TO_HOST) {
        copy.dstMemoryType = NRM_CU_MEMORYTYPE_HOST;
        copy.dstHost = dst;
    }
    return driver->cuMemcpy2DAsync(&copy, stream);
}

/* ---- all of them ---- */

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

static nrm_status
submit_all(const struct nrm__driver *driver, const struct nrm__transfer *t,
           const struct nrm__transfer_plan *plan, nrm_CUstream stream)
{
    nrm_CUresult code = NRM_CUDA_SUCCESS;
    for (size_t n = 0; n < plan->n_calls && code == NRM_CUDA_SUCCESS; n++) {
        char *dst;
        const char *src;
        locate(t, n, &dst, &src);
        code = plan->n_rows == 1 ? copy_run(driver, t, dst, src, plan->width, stream)
                                 : copy_rows(driver, t, plan, dst, src, stream);
    }
    return code == NRM_CUDA_SUCCESS
               ? NRM_OK
               : nrm__cuda_error(code, "a copy of %zu B", plan->n_rows * plan->width);
}

static nrm_status
record(uintptr_t handle, const struct nrm__cuda_place *at, nrm_CUevent *out_event,
       bool *out_captured)
{
    *out_event = NULL;
    *out_captured = nrm__cuda_stream_is_capturing(at->device, handle);
    return *out_captured ? NRM_OK : nrm__cuda_foreign_record(at, handle, out_event);
}

/* In the context of the stream, which is current. What was submitted before a failure is
   waited for: nothing else knows of it. */
static nrm_status
submit_here(const struct nrm__driver *driver, const struct nrm__transfer *t,
            uintptr_t handle, const struct nrm__cuda_place *at, nrm_CUevent *out_event,
            bool *out_captured)
{
    struct nrm__transfer axes = *t;
    struct nrm__transfer_plan plan;
    nrm_CUstream stream = (nrm_CUstream)handle;
    nrm__transfer_plan(&axes, &plan);
    nrm_status status = submit_all(driver, &axes, &plan, stream);
    if (status == NRM_OK) {
        status = record(handle, at, out_event, out_captured);
    }
    if (status != NRM_OK) {
        nrm_error error = *nrm_last_error();
        (void)driver->cuStreamSynchronize(stream); /* the first error is told */
        status = nrm__error_native(error.status, error.native_code, error.native_name,
                                   "%s", error.message);
    }
    return status;
}

nrm_status
nrm__transfer_submit(const struct nrm__transfer *t, uintptr_t handle,
                     nrm_CUevent *out_event, bool *out_captured)
{
    struct nrm__cuda_scope scope;
    struct nrm__cuda_place at;
    NRM_TRY(nrm__cuda_init(NULL));
    NRM_TRY(nrm__cuda_stream_place(handle, &at));
    if (at.context == NULL) { /* no context is current */
        NRM_TRY(nrm__cuda_enter(NRM_DEVICE_NONE, &scope));
        at = (struct nrm__cuda_place){scope.context, scope.device};
        nrm_status status =
            submit_here(scope.driver, t, handle, &at, out_event, out_captured);
        nrm__cuda_leave(&scope);
        return status;
    }
    const struct nrm__driver *driver = nrm__cuda_driver();
    nrm_CUcontext popped;
    nrm_CUstreamCaptureMode mode = nrm__cuda_relax(driver);
    nrm_CUresult code = driver->cuCtxPushCurrent(at.context);
    nrm_status status =
        code != NRM_CUDA_SUCCESS
            ? nrm__cuda_error(code, "entering a stream's context")
            : submit_here(driver, t, handle, &at, out_event, out_captured);
    if (code == NRM_CUDA_SUCCESS) {
        (void)driver->cuCtxPopCurrent(&popped); /* what was pushed is there */
    }
    nrm__cuda_unrelax(driver, mode);
    return status;
}

/* Whether the handle means another stream where another context is current. */
static bool
is_special(uintptr_t handle)
{
    return handle <= NRM_STREAM_HANDLE_PER_THREAD;
}

nrm_status
nrm__transfer_submit_on(int device, const struct nrm__transfer *t, uintptr_t handle,
                        nrm_CUevent *out_event, bool *out_captured)
{
    struct nrm__cuda_scope scope;
    if (device < 0 || !is_special(handle)) {
        return nrm__transfer_submit(t, handle, out_event, out_captured);
    }
    NRM_TRY(nrm__cuda_enter(device, &scope));
    nrm_status status = nrm__transfer_submit(t, handle, out_event, out_captured);
    nrm__cuda_leave(&scope);
    return status;
}

/* ---- waiting ---- */

nrm_status
nrm__transfer_wait_for(uintptr_t handle, uintptr_t producer)
{
    struct nrm__cuda_place at;
    nrm_CUevent event;
    if (handle == producer || nrm__cuda_driver() == NULL) {
        return NRM_OK;
    }
    NRM_TRY(nrm__cuda_stream_place(producer, &at));
    if (at.context == NULL) {
        return NRM_OK; /* nothing was submitted to a default stream of no context */
    }
    NRM_TRY(nrm__cuda_foreign_record(&at, producer, &event));
    const struct nrm__driver *driver = nrm__cuda_driver();
    nrm_CUresult code = driver->cuStreamWaitEvent((nrm_CUstream)handle, event,
                                                  NRM_CU_EVENT_WAIT_DEFAULT);
    (void)driver->cuEventDestroy(event); /* when nobody waits for it any more */
    return code == NRM_CUDA_SUCCESS
               ? NRM_OK
               : nrm__cuda_error(code, "cuStreamWaitEvent of stream 0x%zx",
                                 (size_t)handle);
}

/* The default stream is the legacy one. */
static uintptr_t
handle_here(const nrm_stream *stream)
{
    bool is_default = stream->handle == NRM_STREAM_HANDLE_DEFAULT;
    return is_default || !nrm__stream_is_here(stream) ? NRM_STREAM_HANDLE_LEGACY
                                                      : stream->handle;
}

/* An event behind what the producer has been given; NULL: nothing is to be waited for. */
static nrm_status
record_producer(int device, uintptr_t handle, nrm_CUevent *out)
{
    struct nrm__cuda_scope scope;
    struct nrm__cuda_place at;
    *out = NULL;
    NRM_TRY(nrm__cuda_enter(device, &scope));
    nrm_status status = nrm__cuda_stream_place(handle, &at);
    if (status == NRM_OK && at.context != NULL) {
        status = nrm__cuda_foreign_record(&at, handle, out);
    }
    nrm__cuda_leave(&scope);
    return status;
}

static nrm_status
wait_for_event(int device, uintptr_t handle, nrm_CUevent event)
{
    struct nrm__cuda_scope scope;
    NRM_TRY(nrm__cuda_enter(device, &scope));
    nrm_CUresult code = scope.driver->cuStreamWaitEvent((nrm_CUstream)handle, event,
                                                        NRM_CU_EVENT_WAIT_DEFAULT);
    nrm__cuda_leave(&scope);
    return code == NRM_CUDA_SUCCESS
               ? NRM_OK
               : nrm__cuda_error(code, "cuStreamWaitEvent of stream 0x%zx",
                                 (size_t)handle);
}

nrm_status
nrm__transfer_join(int device, const nrm_stream *stream, int producer_device,
                   const nrm_stream *producer)
{
    uintptr_t handle = handle_here(stream), other = handle_here(producer);
    bool is_same_place = device == producer_device || !is_special(handle);
    nrm_CUevent event;
    if (handle == other && is_same_place) {
        return NRM_OK;
    }
    NRM_TRY(nrm__cuda_init(NULL));
    if (nrm__cuda_stream_is_capturing(device, handle) !=
        nrm__cuda_stream_is_capturing(producer_device, other)) {
        return NRM_OK;
    }
    NRM_TRY(record_producer(producer_device, other, &event));
    if (event == NULL) {
        return NRM_OK;
    }
    nrm_status status = wait_for_event(device, handle, event);
    nrm__transfer_drop(event);
    return status;
}

nrm_status
nrm__transfer_query(nrm_CUevent event, bool waits)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    if (driver == NULL || nrm__cuda_is_exiting()) {
        return NRM_OK;
    }
    void *token = waits ? nrm__detach() : NULL;
    nrm_CUstreamCaptureMode mode = nrm__cuda_relax(driver);
    nrm_CUresult code = waits ? driver->cuEventSynchronize(event)
                              : driver->cuEventQuery(event);
    nrm__cuda_unrelax(driver, mode);
    nrm__attach(token);
    if (code == NRM_CUDA_SUCCESS) {
        return NRM_OK;
    }
    return code == NRM_CUDA_ERROR_NOT_READY ? NRM_NOT_FOUND
                                            : nrm__cuda_error(code, "a copy");
}

void
nrm__transfer_drop(nrm_CUevent event)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    if (event != NULL && driver != NULL && !nrm__cuda_is_exiting()) {
        (void)driver->cuEventDestroy(event); /* it was asked, or nobody wants to know */
    }
}
