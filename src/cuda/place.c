/*
 * A stream that somebody created knows its context; the handles 0, 1 and 2 mean the
 * current one. Contexts are known by what stands for a device among those that we
 * retain; a primary context that others have made is retained to be known.
 *
 * An event belongs to the context that was current when it was made. Those of contexts
 * that are not primary are made for one use and destroyed after it: there is no pool of
 * them, as nobody tells us when such a context ends. Then its events have ended with
 * it, and their handles may be those of others by now: so the context is asked for its
 * id before a lone event is named.
 */
#include "cuda/place.h"

enum { N_SPECIAL_HANDLES = 3 };

int
nrm__cuda_find_device(nrm_CUcontext context)
{
    int devices[NRM__MAX_DEVICES];
    int found = nrm__cuda_device_of(context);
    int n = found < 0 ? nrm__cuda_active_devices(devices) : 0;
    for (int i = 0; i < n && found < 0; i++) {
        struct nrm__cuda_scope scope;
        if (nrm__cuda_enter_existing(devices[i], &scope) == NRM_OK) {
            nrm__cuda_leave(&scope);
            found = nrm__cuda_device_of(context);
        }
    }
    return found;
}

static bool
is_over(nrm_CUresult code)
{
    return nrm__cuda_is_destroyed(code) || code == NRM_CUDA_ERROR_INVALID_HANDLE ||
           code == NRM_CUDA_ERROR_INVALID_CONTEXT;
}

nrm_status
nrm__cuda_stream_place(uintptr_t handle, struct nrm__cuda_place *out)
{
    struct nrm__cuda_place place = {.device = -1};
    const struct nrm__driver *driver = nrm__cuda_driver();
    if (driver == NULL || nrm__cuda_is_exiting()) {
        *out = place;
        return NRM_OK;
    }
    nrm_CUresult code =
        handle < N_SPECIAL_HANDLES
            ? driver->cuCtxGetCurrent(&place.context)
            : driver->cuStreamGetCtx((nrm_CUstream)handle, &place.context);
    if (nrm__cuda_is_destroyed(code)) {
        place.context = NULL; /* and its work with it */
    }
    else if (code != NRM_CUDA_SUCCESS) {
        return nrm__cuda_error(code, "the context of stream 0x%zx", (size_t)handle);
    }
    if (place.context != NULL) {
        place.device = nrm__cuda_find_device(place.context);
    }
    if (place.device < 0 && place.context != NULL) {
        unsigned long long id;
        bool ended = is_over(driver->cuCtxGetId(place.context, &id));
        place.context = ended ? NULL : place.context; /* destroyed by another thread */
    }
    *out = place;
    return NRM_OK;
}

static nrm_CUresult
record(const struct nrm__driver *driver, uintptr_t handle,
       struct nrm__cuda_lone_event *out)
{
    nrm_CUevent event = NULL;
    nrm_CUresult code = driver->cuCtxGetId(out->context, &out->id);
    if (code == NRM_CUDA_SUCCESS) {
        code = driver->cuEventCreate(&event, NRM_CU_EVENT_DISABLE_TIMING);
    }
    if (code != NRM_CUDA_SUCCESS) {
        return code;
    }
    code = driver->cuEventRecord(event, (nrm_CUstream)handle);
    if (code != NRM_CUDA_SUCCESS) {
        (void)driver->cuEventDestroy(event); /* the record's error is told */
        return code;
    }
    out->handle = event;
    return NRM_CUDA_SUCCESS;
}

nrm_status
nrm__cuda_lone_record(const struct nrm__cuda_place *place, uintptr_t handle,
                      struct nrm__cuda_lone_event *out)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    struct nrm__cuda_lone_event event = {.context = place->context};
    nrm_CUcontext popped;
    nrm_CUstreamCaptureMode mode = nrm__cuda_relax(driver);
    nrm_CUresult code = driver->cuCtxPushCurrent(place->context);
    if (code == NRM_CUDA_SUCCESS) {
        code = record(driver, handle, &event);
        (void)driver->cuCtxPopCurrent(&popped); /* what was pushed is there */
    }
    nrm__cuda_unrelax(driver, mode);
    if (code != NRM_CUDA_SUCCESS) {
        return nrm__cuda_error(code, "an event on stream 0x%zx", (size_t)handle);
    }
    *out = event;
    return NRM_OK;
}

bool
nrm__cuda_lone_lives(const struct nrm__driver *driver,
                     const struct nrm__cuda_lone_event *event)
{
    unsigned long long id = 0;
    nrm_CUresult code = driver->cuCtxGetId(event->context, &id);
    return code == NRM_CUDA_SUCCESS ? id == event->id : !is_over(code);
}

bool
nrm__cuda_lone_end(const struct nrm__cuda_lone_event *event)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    if (driver == NULL || nrm__cuda_is_exiting()) {
        return false;
    }
    if (!nrm__cuda_lone_lives(driver, event)) {
        return true;
    }
    nrm_CUstreamCaptureMode mode = nrm__cuda_relax(driver);
    nrm_CUresult code = driver->cuEventQuery(event->handle);
    nrm__cuda_unrelax(driver, mode);
    if (code == NRM_CUDA_SUCCESS) {
        (void)driver->cuEventDestroy(event->handle); /* done: of no use any more */
    }
    return code == NRM_CUDA_SUCCESS || is_over(code);
}

void
nrm__cuda_lone_drop(const struct nrm__cuda_lone_event *event)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    if (event->handle != NULL && driver != NULL && !nrm__cuda_is_exiting() &&
        nrm__cuda_lone_lives(driver, event)) {
        (void)driver->cuEventDestroy(event->handle); /* nobody wants to know */
    }
}
