/*
 * See capture.h. A recorder marks itself first and looks then whether a capture is
 * announced; who announces one does it the other way round. So one of the two sees the
 * other, and a record that was under way is over before the capture begins.
 */
#include "cuda/capture.h"

#include "cuda/context.h"
#include "os/system.h"

#define PAUSE_NS UINT64_C(20000)

static atomic_uint n_announced, n_recorders;
static atomic_bool marks[NRM__CUDA_MARKS];

/* ---- asking ---- */

/* What is captured, of a stream that is. */
static bool
get_info(const struct nrm__driver *driver, nrm_CUstream stream,
         struct nrm__cuda_capture *out)
{
    nrm_CUstreamCaptureStatus status = NRM_CU_STREAM_CAPTURE_STATUS_ACTIVE;
    nrm_CUcontext context = NULL;
    if (driver->cuStreamGetCtx(stream, &context) == NRM_CUDA_SUCCESS) {
        out->device = nrm__cuda_device_of(context);
    }
    if (driver->cuStreamGetCaptureInfo == NULL) {
        return true;
    }
    nrm_CUresult code = driver->cuStreamGetCaptureInfo(stream, &status, &out->id,
                                                       &out->graph, NULL, NULL, NULL);
    return code != NRM_CUDA_SUCCESS || status == NRM_CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

static bool
ask(const struct nrm__driver *driver, nrm_CUstream stream,
    struct nrm__cuda_capture *out)
{
    nrm_CUstreamCaptureStatus status = NRM_CU_STREAM_CAPTURE_STATUS_NONE;
    *out = (struct nrm__cuda_capture){.device = -1};
    if (driver->cuStreamIsCapturing(stream, &status) != NRM_CUDA_SUCCESS) {
        return false;
    }
    out->is_broken = status == NRM_CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    return status == NRM_CU_STREAM_CAPTURE_STATUS_ACTIVE &&
           get_info(driver, stream, out);
}

/* No call here minds the capture mode, and those on a created stream not what is
   current. */
bool
nrm__cuda_capture_find(int device, uintptr_t handle, struct nrm__cuda_capture *out)
{
    struct nrm__cuda_scope scope;
    const struct nrm__driver *driver = nrm__cuda_driver();
    if (driver == NULL || nrm__cuda_is_exiting() ||
        handle <= (uintptr_t)NRM_CU_STREAM_LEGACY) {
        return false;
    }
    if (handle != (uintptr_t)NRM_CU_STREAM_PER_THREAD || device < 0) {
        return ask(driver, (nrm_CUstream)handle, out);
    }
    if (nrm__cuda_enter_existing(device, &scope) != NRM_OK) {
        return false;
    }
    bool captures = ask(driver, NRM_CU_STREAM_PER_THREAD, out);
    nrm__cuda_leave(&scope);
    return captures;
}

bool
nrm__cuda_can_retain(void)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    return driver != NULL && driver->cuUserObjectCreate != NULL &&
           driver->cuUserObjectRelease != NULL &&
           driver->cuGraphRetainUserObject != NULL;
}

enum nrm__cuda_retained
nrm__cuda_capture_retain(nrm_CUgraph graph, void *data, nrm_CUhostFn gone)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    nrm_CUuserObject object;
    if (graph == NULL || !nrm__cuda_can_retain() ||
        driver->cuUserObjectCreate(&object, data, gone, 1,
                                   NRM_CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) !=
            NRM_CUDA_SUCCESS) {
        return NRM__CAPTURE_UNRETAINED;
    }
    if (driver->cuGraphRetainUserObject(
            graph, object, 1, NRM_CU_GRAPH_USER_OBJECT_MOVE) != NRM_CUDA_SUCCESS) {
        (void)driver->cuUserObjectRelease(object, 1);
        return NRM__CAPTURE_REFUSED;
    }
    return NRM__CAPTURE_RETAINED;
}

/* ---- announcing ---- */

void
nrm__cuda_capture_shield(void)
{
    atomic_fetch_add(&n_announced, 1);
}

static bool
somebody_records(void)
{
    bool records = atomic_load(&n_recorders) != 0;
    for (int i = 0; i < NRM__CUDA_MARKS && !records; i++) {
        records = atomic_load(&marks[i]);
    }
    return records;
}

void
nrm__cuda_capture_announce(void)
{
    nrm__cuda_capture_shield();
    while (somebody_records() && !nrm__cuda_is_exiting() && !nrm__cuda_is_forked()) {
        nrm__sleep_ns(PAUSE_NS);
    }
}

void
nrm__cuda_capture_withdraw(void)
{
    atomic_fetch_sub(&n_announced, 1);
}

bool
nrm__cuda_record_begin(int mark)
{
    if (mark >= 0) {
        atomic_store(&marks[mark], true);
    }
    else {
        atomic_fetch_add(&n_recorders, 1);
    }
    if (atomic_load(&n_announced) != 0) {
        nrm__cuda_record_end(mark);
        return false;
    }
    return true;
}

void
nrm__cuda_record_end(int mark)
{
    if (mark >= 0) {
        atomic_store_explicit(&marks[mark], false, memory_order_release);
    }
    else {
        atomic_fetch_sub(&n_recorders, 1);
    }
}
