/*
 * Calls on one stream. stream.h says whose context they are in.
 *
 * The special handles need their context current, which costs a few calls more; created
 * streams are recorded on as they are, with an event of the pool of their context.
 */
#include "cuda/stream.h"

#include "base/error.h"
#include "base/planted.h"
#include "cuda/capture.h"
#include "cuda/place.h"

enum { N_SPECIAL_HANDLES = 3 };

/* Where the calls on a stream are made. */
struct place {
    struct nrm__cuda_scope
        scope; /* entered for special handles; else driver and mode */
    bool entered;
};

static nrm_CUstream
stream_of(uintptr_t handle)
{
    return (nrm_CUstream)handle; /* that of the driver, as its owner gave it */
}

static void
leave(struct place *place)
{
    if (place->entered) {
        nrm__cuda_leave(&place->scope);
    }
    else {
        nrm__cuda_unrelax(place->scope.driver, place->scope.mode);
    }
}

/* NRM_NOT_FOUND: there is no driver or no context. */
static nrm_status
enter(int device, uintptr_t handle, struct place *place)
{
    *place = (struct place){.entered = handle < N_SPECIAL_HANDLES};
    if (place->entered) {
        return nrm__cuda_enter_existing(device, &place->scope);
    }
    const struct nrm__driver *driver = nrm__cuda_driver();
    if (driver == NULL || nrm__cuda_is_exiting()) {
        return NRM_NOT_FOUND;
    }
    place->scope.driver = driver;
    place->scope.device = -1;
    place->scope.mode = nrm__cuda_relax(driver);
    return NRM_OK;
}

/* Finds the context that a created stream belongs to. */
static nrm_CUresult
locate(struct place *place, uintptr_t handle)
{
    if (!place->entered) {
        nrm_CUresult code = place->scope.driver->cuStreamGetCtx(stream_of(handle),
                                                                &place->scope.context);
        if (code != NRM_CUDA_SUCCESS) {
            return code;
        }
        place->scope.device = nrm__cuda_find_device(place->scope.context);
        place->scope.generation = nrm__cuda_generation_noticed(place->scope.device);
    }
    return NRM_CUDA_SUCCESS;
}

static bool
is_capturing(const struct place *place, uintptr_t handle)
{
    return nrm__cuda_sees_capture(place->scope.driver, handle);
}

/* ---- whose stream it is ---- */

/* To ask a stream that is being captured for its number would end the capture. */
bool
nrm__cuda_stream_id(uintptr_t handle, uint64_t *out)
{
    nrm_CUstreamCaptureStatus status;
    unsigned long long id;
    const struct nrm__driver *driver = nrm__cuda_driver();
    if (driver == NULL || nrm__cuda_is_exiting() ||
        driver->cuStreamIsCapturing(stream_of(handle), &status) != NRM_CUDA_SUCCESS ||
        status != NRM_CU_STREAM_CAPTURE_STATUS_NONE ||
        driver->cuStreamGetId(stream_of(handle), &id) != NRM_CUDA_SUCCESS) {
        return false;
    }
    *out = NRM_PLANTED(REUSED_HANDLE) ? handle : id;
    return true;
}

int
nrm__cuda_stream_device(uintptr_t handle)
{
    struct place place;
    if (enter(-1, handle, &place) != NRM_OK) {
        return -1;
    }
    int device = locate(&place, handle) == NRM_CUDA_SUCCESS ? place.scope.device : -1;
    leave(&place);
    return device;
}

/* ---- making and ending ---- */

nrm_status
nrm__cuda_stream_create(int device, unsigned int flags, struct nrm__cuda_stream *out)
{
    struct nrm__cuda_scope scope;
    NRM_TRY(nrm__cuda_enter(device, &scope));
    nrm_CUresult code = scope.driver->cuStreamCreate(&out->handle, flags);
    out->device = scope.device;
    out->generation = scope.generation;
    nrm__cuda_leave(&scope);
    return code == NRM_CUDA_SUCCESS
               ? NRM_OK
               : nrm__cuda_error(code, "cuStreamCreate on device %d", out->device);
}

void
nrm__cuda_stream_destroy(const struct nrm__cuda_stream *stream)
{
    struct nrm__cuda_scope scope;
    if (nrm__cuda_enter_existing(stream->device, &scope) != NRM_OK) {
        return;
    }
    if (scope.generation == stream->generation) {
        (void)scope.driver->cuStreamDestroy(stream->handle); /* an error of old work */
    }
    nrm__cuda_leave(&scope);
}

/* ---- recording ---- */

/* What an error means for a record; with a context that is over its work is, too. */
static nrm_status
failed(nrm_CUresult code)
{
    if (nrm__cuda_is_sticky(code)) {
        return nrm__cuda_error(code, "recording an event on a stream");
    }
    return nrm__cuda_is_destroyed(code) ? NRM_OK : NRM_NOT_SUPPORTED;
}

/* An event of the stream's context: one of the pool, or a new one. */
static nrm_CUresult
get_event(const struct place *place, struct nrm__cuda_event *event)
{
    struct nrm__cuda_scope scope;
    event->device = place->scope.device;
    event->generation = place->scope.generation;
    event->handle = nrm__cuda_event_take(event->device, event->generation);
    if (event->handle != NULL) {
        return NRM_CUDA_SUCCESS;
    }
    if (nrm__cuda_enter_existing(event->device, &scope) != NRM_OK) {
        return NRM_CUDA_ERROR_INVALID_CONTEXT;
    }
    nrm_CUresult code =
        scope.driver->cuEventCreate(&event->handle, NRM_CU_EVENT_DISABLE_TIMING);
    event->generation = scope.generation;
    nrm__cuda_leave(&scope);
    if (code != NRM_CUDA_SUCCESS) {
        event->handle = NULL;
    }
    return code;
}

static nrm_status
record(struct place *place, uintptr_t handle, struct nrm__cuda_event *event)
{
    if (is_capturing(place, handle)) {
        return NRM_NOT_FOUND;
    }
    nrm_CUresult code = locate(place, handle);
    if (code != NRM_CUDA_SUCCESS) {
        return failed(code);
    }
    if (place->scope.device < 0) {
        return NRM_NOT_SUPPORTED; /* of no primary context */
    }
    code = get_event(place, event);
    if (code != NRM_CUDA_SUCCESS) {
        return failed(code);
    }
    code = place->scope.driver->cuEventRecord(event->handle, stream_of(handle));
    if (code != NRM_CUDA_SUCCESS) {
        nrm__cuda_event_recycle(event);
        return failed(code);
    }
    return NRM_OK;
}

nrm_status
nrm__cuda_stream_record(int device, uintptr_t handle, struct nrm__cuda_event *out)
{
    struct place place;
    struct nrm__cuda_event event = {0};
    nrm_status status = enter(device, handle, &place);
    if (status != NRM_OK) {
        return status == NRM_DEVICE_LOST ? status : NRM_NOT_SUPPORTED;
    }
    status = record(&place, handle, &event);
    leave(&place);
    /* A reset meanwhile: nobody knows to which life the event belongs. */
    if (status == NRM_OK && event.handle != NULL &&
        nrm__cuda_generation_noticed(event.device) != event.generation) {
        return NRM_NOT_SUPPORTED;
    }
    if (status == NRM_OK) {
        *out = event;
    }
    return status;
}

/* ---- asking and waiting ---- */

bool
nrm__cuda_stream_is_capturing(int device, uintptr_t handle)
{
    struct place place;
    if (enter(device, handle, &place) != NRM_OK) {
        return false;
    }
    bool captures = is_capturing(&place, handle);
    leave(&place);
    return captures;
}

/* The driver that had work of ours is gone (nrm__cuda_set_library), and all of it. */
static bool
is_without_driver(void)
{
    return nrm__cuda_driver() == NULL && !nrm__cuda_is_forked() &&
           !nrm__cuda_is_exiting();
}

nrm_status
nrm__cuda_stream_query(int device, uintptr_t handle)
{
    struct place place;
    nrm_CUresult code = NRM_CUDA_ERROR_NOT_READY;
    nrm_status status = enter(device, handle, &place);
    if (status != NRM_OK && status != NRM_DEVICE_LOST) {
        return is_without_driver() ? NRM_OK : NRM_NOT_FOUND;
    }
    NRM_TRY(status);
    if (!is_capturing(&place, handle)) {
        code = place.scope.driver->cuStreamQuery(stream_of(handle));
    }
    leave(&place);
    if (code == NRM_CUDA_SUCCESS || nrm__cuda_is_destroyed(code)) {
        return NRM_OK;
    }
    return nrm__cuda_is_sticky(code) ? nrm__cuda_error(code, "cuStreamQuery")
                                     : NRM_NOT_FOUND;
}

nrm_status
nrm__cuda_stream_wait(int device, uintptr_t handle, const struct nrm__cuda_event *event)
{
    struct place place;
    nrm_CUresult code = NRM_CUDA_SUCCESS;
    if (event->handle == NULL ||
        nrm__cuda_generation_noticed(event->device) != event->generation) {
        return NRM_OK; /* done */
    }
    NRM_TRY(enter(device, handle, &place));
    bool captures = is_capturing(&place, handle);
    if (!captures) {
        code = place.scope.driver->cuStreamWaitEvent(stream_of(handle), event->handle,
                                                     NRM_CU_EVENT_WAIT_DEFAULT);
    }
    leave(&place);
    if (code != NRM_CUDA_SUCCESS) {
        return nrm__cuda_error(code, "cuStreamWaitEvent of stream 0x%zx",
                               (size_t)handle);
    }
    return captures ? NRM_NOT_FOUND : NRM_OK;
}
