/*
 * Copies on streams: entering the context of a stream, what is recorded behind a copy,
 * and who waits for whom. transfer.h says how they are used; transfer_way.c chooses
 * among devices, transfer_plan.c cuts them, and transfer_run.c makes the calls.
 */
#include "core/transfer.h"

#include "base/error.h"
#include "core/hooks.h"
#include "core/stream.h"
#include "core/transfer_run.h"
#include "core/transfer_way.h"
#include "cuda/place.h"
#include "nrm/resource.h"

/* ---- streams ---- */

/* Whether the handle means another stream where another context is current. */
static bool
is_special(uintptr_t handle)
{
    return handle <= NRM_STREAM_HANDLE_PER_THREAD;
}

/* Makes the context of a stream current. */
static nrm_status
enter(int device, uintptr_t handle, struct nrm__cuda_scope *out)
{
    struct nrm__cuda_place at;
    if (device >= 0 && is_special(handle)) {
        return nrm__cuda_enter(device, out);
    }
    NRM_TRY(nrm__cuda_init(NULL));
    NRM_TRY(nrm__cuda_stream_place(handle, &at));
    if (at.context == NULL) { /* no context is current */
        return nrm__cuda_enter(NRM_DEVICE_NONE, out);
    }
    const struct nrm__driver *driver = nrm__cuda_driver();
    struct nrm__cuda_scope scope = {.driver = driver,
                                    .context = at.context,
                                    .device = at.device,
                                    .pushed = true,
                                    .mode = nrm__cuda_relax(driver)};
    nrm_CUresult code = driver->cuCtxPushCurrent(at.context);
    if (code != NRM_CUDA_SUCCESS) {
        nrm__cuda_unrelax(driver, scope.mode);
        return nrm__cuda_error(code, "entering a stream's context");
    }
    *out = scope;
    return NRM_OK;
}

/* ---- submitting ---- */

static nrm_status
submit(const struct nrm__cuda_scope *scope, const struct nrm__transfer *t,
       uintptr_t handle, bool is_captured)
{
    return scope->driver->n_devices > 1
               ? nrm__transfer_go(scope, t, handle, is_captured)
               : nrm__transfer_run(scope, t, handle, is_captured, NULL);
}

/* What the driver would refuse is not tried: the call would end the capture. */
static nrm_status
check_capture(const struct nrm__cuda_scope *scope, const struct nrm__transfer *t,
              uintptr_t handle)
{
    nrm_CUstreamCaptureStatus status = NRM_CU_STREAM_CAPTURE_STATUS_NONE;
    nrm_CUresult code =
        scope->driver->cuStreamIsCapturing((nrm_CUstream)handle, &status);
    if (status == NRM_CU_STREAM_CAPTURE_STATUS_INVALIDATED) {
        code = NRM_CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    if (code != NRM_CUDA_SUCCESS) {
        return nrm__cuda_error(code, "a copy on stream 0x%zx", (size_t)handle);
    }
    return !t->is_waited_for
               ? NRM_OK
               : nrm__error(NRM_NOT_SUPPORTED,
                            "stream 0x%zx is being captured into a graph: a copy that "
                            "is waited for cannot be a part of that",
                            (size_t)handle);
}

/* In the context of the stream, which is current. What was submitted before a failure
   is waited for: nothing else knows of it. While it is captured nothing runs, and a
   wait would end the capture. */
static nrm_status
submit_here(const struct nrm__cuda_scope *scope, const struct nrm__transfer *t,
            uintptr_t handle, struct nrm__cuda_lone_event *out_event,
            bool *out_captured)
{
    struct nrm__cuda_place at = {scope->context, scope->device};
    bool is_captured = nrm__cuda_stream_is_capturing(scope->device, handle);
    struct nrm__cuda_lone_event event = {0};
    if (is_captured) {
        NRM_TRY(check_capture(scope, t, handle));
    }
    nrm_status status = submit(scope, t, handle, is_captured);
    if (status == NRM_OK && !is_captured) {
        status = nrm__cuda_lone_record(&at, handle, &event);
    }
    if (status == NRM_OK) {
        *out_event = event;
        *out_captured = is_captured;
        return NRM_OK;
    }
    nrm_error error = *nrm_last_error();
    if (!is_captured) { /* the first error is told */
        (void)scope->driver->cuStreamSynchronize((nrm_CUstream)handle);
    }
    return nrm__error_native(error.status, error.native_code, error.native_name, "%s",
                             error.message);
}

nrm_status
nrm__transfer_submit(int device, const struct nrm__transfer *t, uintptr_t handle,
                     struct nrm__cuda_lone_event *out_event, bool *out_captured)
{
    struct nrm__cuda_scope scope;
    NRM_TRY(enter(device, handle, &scope));
    nrm_status status = submit_here(&scope, t, handle, out_event, out_captured);
    nrm__cuda_leave(&scope);
    return status;
}

nrm_status
nrm__transfer_ways_of(int device, uintptr_t handle, const void *host,
                      struct nrm__transfer_ways *out)
{
    struct nrm__cuda_scope scope;
    nrm_CUmemorytype type;
    NRM_TRY(enter(device, handle, &scope));
    out->is_captured = nrm__cuda_stream_is_capturing(scope.device, handle);
    out->takes_batches = !out->is_captured &&
                         nrm__transfer_takes_batches(&scope, handle, NRM__TO_DEVICE) &&
                         scope.driver->cuPointerGetAttribute(
                             &type, NRM_CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                             (nrm_CUdeviceptr)(uintptr_t)host) == NRM_CUDA_SUCCESS;
    nrm__cuda_leave(&scope);
    return NRM_OK;
}

/* ---- waiting ---- */

/* Whether events order the work of the two: not if only one of them is being captured.
   To wait for it would end the capture. */
static bool
runs_with(int device, uintptr_t handle, int other_device, uintptr_t other)
{
    return nrm__cuda_stream_is_capturing(device, handle) ==
           nrm__cuda_stream_is_capturing(other_device, other);
}

/* An event behind what a stream has been given; none: nothing is to be waited for, as
   nothing was submitted to a default stream of no context. */
static nrm_status
record_here(uintptr_t producer, struct nrm__cuda_lone_event *out)
{
    struct nrm__cuda_place at;
    *out = (struct nrm__cuda_lone_event){0};
    NRM_TRY(nrm__cuda_stream_place(producer, &at));
    return at.context != NULL ? nrm__cuda_lone_record(&at, producer, out) : NRM_OK;
}

static nrm_status
wait_here(const struct nrm__driver *driver, uintptr_t handle, nrm_CUevent event)
{
    nrm_CUresult code = driver->cuStreamWaitEvent((nrm_CUstream)handle, event,
                                                  NRM_CU_EVENT_WAIT_DEFAULT);
    return code == NRM_CUDA_SUCCESS
               ? NRM_OK
               : nrm__cuda_error(code, "cuStreamWaitEvent of stream 0x%zx",
                                 (size_t)handle);
}

nrm_status
nrm__transfer_wait_for(uintptr_t handle, uintptr_t producer)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    struct nrm__cuda_lone_event event;
    if (handle == producer || driver == NULL ||
        !runs_with(NRM_DEVICE_NONE, handle, NRM_DEVICE_NONE, producer)) {
        return NRM_OK;
    }
    NRM_TRY(record_here(producer, &event));
    nrm_status status = event.handle != NULL ? wait_here(driver, handle, event.handle)
                                             : NRM_OK;
    nrm__cuda_lone_drop(&event); /* destroyed when nobody waits for it any more */
    return status;
}

/* The default stream is the legacy one. */
static uintptr_t
handle_here(const nrm_stream *stream)
{
    bool is_default = stream->handle == NRM_STREAM_HANDLE_DEFAULT;
    return is_default || !nrm__stream_is_here(stream) ? NRM_STREAM_HANDLE_LEGACY
                                                      : stream->handle;
}

static nrm_status
record_producer(int device, uintptr_t handle, struct nrm__cuda_lone_event *out)
{
    struct nrm__cuda_scope scope;
    NRM_TRY(nrm__cuda_enter(device, &scope));
    nrm_status status = record_here(handle, out);
    nrm__cuda_leave(&scope);
    return status;
}

static nrm_status
wait_for_event(int device, uintptr_t handle, nrm_CUevent event)
{
    struct nrm__cuda_scope scope;
    NRM_TRY(nrm__cuda_enter(device, &scope));
    nrm_status status = wait_here(scope.driver, handle, event);
    nrm__cuda_leave(&scope);
    return status;
}

nrm_status
nrm__transfer_join(int device, const nrm_stream *stream, int producer_device,
                   const nrm_stream *producer)
{
    uintptr_t handle = handle_here(stream), other = handle_here(producer);
    bool is_same_place = device == producer_device || !is_special(handle);
    struct nrm__cuda_lone_event event;
    if (handle == other && is_same_place) {
        return NRM_OK;
    }
    NRM_TRY(nrm__cuda_init(NULL));
    if (!runs_with(device, handle, producer_device, other)) {
        return NRM_OK;
    }
    NRM_TRY(record_producer(producer_device, other, &event));
    if (event.handle == NULL) {
        return NRM_OK;
    }
    nrm_status status = wait_for_event(device, handle, event.handle);
    nrm__cuda_lone_drop(&event);
    return status;
}

nrm_status
nrm__transfer_query(const struct nrm__cuda_lone_event *event, bool waits)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    if (nrm__cuda_is_forked()) {
        return nrm__cuda_init(NULL); /* says so: the copy is the parent's */
    }
    if (driver == NULL || nrm__cuda_is_exiting()) {
        return NRM_OK;
    }
    if (!nrm__cuda_lone_lives(driver, event)) {
        return nrm__cuda_error(NRM_CUDA_ERROR_CONTEXT_IS_DESTROYED, "a copy");
    }
    void *token = waits ? nrm__detach() : NULL;
    nrm_CUstreamCaptureMode mode = nrm__cuda_relax(driver);
    nrm_CUresult code = waits ? driver->cuEventSynchronize(event->handle)
                              : driver->cuEventQuery(event->handle);
    nrm__cuda_unrelax(driver, mode);
    nrm__attach(token);
    if (code == NRM_CUDA_SUCCESS) {
        return NRM_OK;
    }
    return code == NRM_CUDA_ERROR_NOT_READY ? NRM_NOT_FOUND
                                            : nrm__cuda_error(code, "a copy");
}
