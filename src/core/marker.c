/*
 * Events that a program records itself. Queries and waits are those of copies
 * (core/transfer.h), which are told by an event as well.
 *
 * The special handles mean a stream of the context that is current, as they do in the
 * driver; where none is, of the one that a request would choose.
 */
#include "core/marker.h"

#include "base/error.h"
#include "core/hooks.h"
#include "core/stream.h"
#include "cuda/place.h"
#include "nrm/resource.h"

static nrm_status
check_here(const nrm_stream *stream)
{
    return nrm__stream_is_here(stream)
               ? NRM_OK
               : nrm__error(NRM_INVALID_VALUE,
                            "the stream is the per-thread default stream of another "
                            "thread");
}

struct nrm__cuda_lone_event
nrm__marker_event(const struct nrm__marker *marker)
{
    return (struct nrm__cuda_lone_event){
        .handle = atomic_load(&marker->event),
        .context = atomic_load(&marker->context),
        .id = atomic_load(&marker->id),
    };
}

/* An event whose context has ended is none any more, and its handle perhaps
   another's. */
static void
forget_ended(const struct nrm__driver *driver, struct nrm__marker *marker)
{
    struct nrm__cuda_lone_event event = nrm__marker_event(marker);
    if (event.handle != NULL && !nrm__cuda_lone_lives(driver, &event)) {
        (void)atomic_compare_exchange_strong(&marker->event, &event.handle, NULL);
    }
}

static nrm_CUresult
record_first(const struct nrm__driver *driver, nrm_CUcontext context,
             struct nrm__marker *marker, uintptr_t handle)
{
    nrm_CUevent event = NULL, other = NULL;
    unsigned long long id = 0;
    nrm_CUresult code = driver->cuCtxGetId(context, &id);
    if (code == NRM_CUDA_SUCCESS) {
        code = driver->cuEventCreate(&event, NRM_CU_EVENT_DISABLE_TIMING);
    }
    if (code != NRM_CUDA_SUCCESS) {
        return code;
    }
    code = driver->cuEventRecord(event, (nrm_CUstream)handle);
    if (code == NRM_CUDA_SUCCESS) {
        atomic_store(&marker->context, context);
        atomic_store(&marker->id, id);
        if (atomic_compare_exchange_strong(&marker->event, &other, event)) {
            return code;
        }
        /* another thread was faster: its event stays */
        code = driver->cuEventRecord(other, (nrm_CUstream)handle);
    }
    (void)driver->cuEventDestroy(event); /* the record's error is told */
    return code;
}

static nrm_status
record_in(const struct nrm__driver *driver, nrm_CUcontext context,
          struct nrm__marker *marker, uintptr_t handle)
{
    forget_ended(driver, marker);
    nrm_CUevent event = atomic_load(&marker->event);
    if (event != NULL && atomic_load(&marker->context) != context) {
        return nrm__error(NRM_INVALID_VALUE,
                          "the event belongs to the context that it was first recorded "
                          "in, and stream 0x%zx is of another one",
                          (size_t)handle);
    }
    nrm_CUresult code = event != NULL
                            ? driver->cuEventRecord(event, (nrm_CUstream)handle)
                            : record_first(driver, context, marker, handle);
    return code == NRM_CUDA_SUCCESS
               ? NRM_OK
               : nrm__cuda_error(code, "cuEventRecord on stream 0x%zx", (size_t)handle);
}

static nrm_status
record_pushed(nrm_CUcontext context, struct nrm__marker *marker, uintptr_t handle)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    nrm_CUcontext popped;
    nrm_CUresult code = driver->cuCtxPushCurrent(context);
    if (code != NRM_CUDA_SUCCESS) {
        return nrm__cuda_error(code, "entering the context of stream 0x%zx",
                               (size_t)handle);
    }
    nrm_status status = record_in(driver, context, marker, handle);
    (void)driver->cuCtxPopCurrent(&popped); /* what was pushed is there */
    return status;
}

nrm_status
nrm__marker_record(struct nrm__marker *marker, nrm_stream *stream)
{
    struct nrm__cuda_scope scope;
    struct nrm__cuda_place at;
    uintptr_t handle = nrm_stream_handle(stream);
    NRM_TRY(check_here(stream));
    NRM_TRY(nrm__cuda_init(NULL));
    NRM_TRY(nrm__cuda_stream_place(handle, &at));
    if (at.context != NULL) {
        return record_pushed(at.context, marker, handle);
    }
    NRM_TRY(nrm__cuda_enter(NRM_DEVICE_NONE, &scope));
    nrm_status status = record_in(scope.driver, scope.context, marker, handle);
    nrm__cuda_leave(&scope);
    return status;
}

nrm_status
nrm__marker_hold(const struct nrm__marker *marker, nrm_stream *stream)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    uintptr_t handle = nrm_stream_handle(stream);
    NRM_TRY(check_here(stream));
    struct nrm__cuda_lone_event event = nrm__marker_event(marker);
    if (event.handle == NULL || driver == NULL ||
        !nrm__cuda_lone_lives(driver, &event)) {
        return NRM_OK; /* with its context its work is over */
    }
    struct nrm__cuda_scope scope;
    NRM_TRY(nrm__cuda_enter(NRM_DEVICE_NONE, &scope));
    nrm_CUresult code = driver->cuStreamWaitEvent((nrm_CUstream)handle, event.handle,
                                                  NRM_CU_EVENT_WAIT_DEFAULT);
    nrm__cuda_leave(&scope);
    return code == NRM_CUDA_SUCCESS
               ? NRM_OK
               : nrm__cuda_error(code, "cuStreamWaitEvent of stream 0x%zx",
                                 (size_t)handle);
}

void
nrm__marker_finish(struct nrm__marker *marker)
{
    struct nrm__cuda_lone_event event = nrm__marker_event(marker);
    atomic_store(&marker->event, NULL);
    nrm__cuda_lone_drop(&event);
}
