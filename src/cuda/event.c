/*
 * Recording and asking.
 *
 * An event belongs to the context it was made in and dies with it, so pools are by
 * device and hold events of one generation. Few are ever made: as many as epochs can be
 * pending and closers in progress. Recycling makes no driver call, as it may happen
 * attached.
 *
 * cuCtxRecordEvent during any capture of the context invalidates it, in every capture
 * mode. Captures on blocking streams can be seen beforehand; of others the driver tells
 * only by its answer, when it is too late. That happens once: from then on the device
 * is not recorded on until somebody who knows lifts it. While a capture is announced
 * (cuda/capture.h) there is no record at all.
 */
#include "cuda/event.h"

#include "base/lock.h"
#include "cuda/capture.h"
#include "os/fork.h"

enum { MAX_POOLED = NRM__CUDA_EVENTS_POOLED };

struct pool {
    nrm_CUevent events[MAX_POOLED];
    unsigned n;
    uint64_t generation; /* of all of them */
};

static struct pool pools[NRM__MAX_DEVICES];
static struct nrm__lock lock = NRM__LOCK_INIT(NRM__RANK_CUDA);
static atomic_bool has_captured[NRM__MAX_DEVICES];

static const struct nrm__fork_hook fork_hook = {.rank = NRM__RANK_CUDA, .lock = &lock};

__attribute__((constructor)) static void
add_fork_hook(void)
{
    nrm__fork_hook_add(&fork_hook);
}

/* ---- the pools ---- */

nrm_CUevent
nrm__cuda_event_take(int device, uint64_t generation)
{
    struct pool *pool = &pools[device];
    nrm_CUevent event = NULL;
    nrm__lock_acquire(&lock);
    if (pool->generation == generation && pool->n != 0) {
        event = pool->events[--pool->n];
    }
    nrm__lock_release(&lock);
    return event;
}

void
nrm__cuda_event_recycle(struct nrm__cuda_event *event)
{
    struct pool *pool = &pools[event->device];
    if (event->handle == NULL) {
        return;
    }
    nrm__lock_acquire(&lock);
    if (pool->generation < event->generation) {
        pool->generation = event->generation; /* the others died with their context */
        pool->n = 0;
    }
    /* A full pool has no room for what then ends with the context. */
    if (pool->generation == event->generation && pool->n < MAX_POOLED) {
        pool->events[pool->n++] = event->handle;
    }
    nrm__lock_release(&lock);
    event->handle = NULL;
}

/* ---- recording ---- */

void
nrm__cuda_capture_lift(int device)
{
    for (int i = 0; i < NRM__MAX_DEVICES; i++) {
        if (device < 0 || device == i) {
            atomic_store_explicit(&has_captured[i], false, memory_order_relaxed);
        }
    }
}

bool
nrm__cuda_has_seen_capture(void)
{
    bool has = false;
    for (int i = 0; i < NRM__MAX_DEVICES; i++) {
        has = has || atomic_load_explicit(&has_captured[i], memory_order_relaxed);
    }
    return has;
}

/* What an error of the driver means for a record. A sticky one is recorded. */
static enum nrm__record
failed(int device, nrm_CUresult code)
{
    if (nrm__cuda_is_capture_error(code)) {
        return atomic_exchange(&has_captured[device], true) ? NRM__RECORD_CAPTURE
                                                            : NRM__RECORD_INVALIDATED;
    }
    if (nrm__cuda_is_sticky(code)) {
        (void)nrm__cuda_error(code, "recording an event on device %d", device);
        return NRM__RECORD_LOST;
    }
    if (nrm__cuda_is_destroyed(code)) {
        return NRM__RECORD_IDLE; /* and its work with it */
    }
    return NRM__RECORD_CAPTURE;
}

/* One that is to spare, if it is of this life of the context, or of the pool, or
   new. */
static nrm_CUresult
find_event(const struct nrm__cuda_scope *scope, struct nrm__cuda_event *event)
{
    if (event->handle != NULL && event->generation != scope->generation) {
        nrm__cuda_event_recycle(event);
    }
    if (event->handle == NULL) {
        event->handle = nrm__cuda_event_take(scope->device, scope->generation);
    }
    event->device = scope->device;
    event->generation = scope->generation;
    if (event->handle != NULL) {
        return NRM_CUDA_SUCCESS;
    }
    nrm_CUresult code =
        scope->driver->cuEventCreate(&event->handle, NRM_CU_EVENT_DISABLE_TIMING);
    if (code != NRM_CUDA_SUCCESS) {
        event->handle = NULL;
    }
    return code;
}

static enum nrm__record
record_event(const struct nrm__cuda_scope *scope, struct nrm__cuda_event *event)
{
    nrm_CUresult code = find_event(scope, event);
    if (code != NRM_CUDA_SUCCESS) {
        return failed(scope->device, code);
    }
    code = scope->driver->cuCtxRecordEvent(scope->context, event->handle);
    if (code == NRM_CUDA_SUCCESS) {
        return NRM__RECORDED;
    }
    nrm__cuda_event_recycle(event);
    return failed(scope->device, code);
}

static enum nrm__record
record(const struct nrm__cuda_scope *scope, struct nrm__cuda_event *event)
{
    if (nrm__cuda_sees_capture(scope->driver, (uintptr_t)NRM_CU_STREAM_LEGACY)) {
        return NRM__RECORD_CAPTURE;
    }
    if (scope->driver->cuCtxRecordEvent != NULL) {
        return record_event(scope, event);
    }
    nrm_CUresult code = scope->driver->cuCtxSynchronize();
    return code == NRM_CUDA_SUCCESS ? NRM__RECORDED : failed(scope->device, code);
}

/* Whether it is done already: then nobody need ask about it later. */
static enum nrm__record
ask_at_once(const struct nrm__cuda_scope *scope, struct nrm__cuda_event *event,
            bool *out_done)
{
    nrm_CUresult code = scope->driver->cuEventQuery(event->handle);
    *out_done = code == NRM_CUDA_SUCCESS;
    if (!nrm__cuda_is_sticky(code)) {
        return NRM__RECORDED;
    }
    (void)nrm__cuda_error(code, "cuEventQuery on device %d", scope->device);
    return NRM__RECORD_LOST;
}

/* In a context that was entered. What a synchronisation has waited for is done. */
static enum nrm__record
record_inside(const struct nrm__cuda_scope *scope, struct nrm__cuda_event *event,
              int mark, bool *out_done)
{
    if (!nrm__cuda_record_begin(mark)) {
        return NRM__RECORD_CAPTURE;
    }
    enum nrm__record result = record(scope, event);
    nrm__cuda_record_end(mark);
    if (result != NRM__RECORDED || out_done == NULL) {
        return result;
    }
    *out_done = true;
    return event->handle != NULL ? ask_at_once(scope, event, out_done) : result;
}

/* In a context that we retain, and whose life was asked for after the caller had
   published its number. NRM__RECORD_IDLE: it lives no more, if we retain one. A reset
   meanwhile ends all work that the number covers: whatever the event then tells, and
   whosever it is, that is done, and its generation is noticed to be over before it is
   used again. */
static enum nrm__record
record_retained(int device, struct nrm__cuda_event *event, int mark, bool *out_done)
{
    struct nrm__cuda_scope scope;
    if (!nrm__cuda_enter_retained(device, &scope)) {
        return NRM__RECORD_IDLE;
    }
    enum nrm__record result = record_inside(&scope, event, mark, out_done);
    nrm__cuda_leave(&scope);
    return result;
}

/* In one that has to be looked for: a reset meanwhile, and nobody knows to which life
   the event belongs. */
static enum nrm__record
record_existing(int device, struct nrm__cuda_event *event, int mark, bool *out_done)
{
    struct nrm__cuda_scope scope;
    nrm_status status = nrm__cuda_enter_existing(device, &scope);
    if (status == NRM_NOT_FOUND) {
        return NRM__RECORD_IDLE;
    }
    if (status != NRM_OK) {
        return status == NRM_DEVICE_LOST ? NRM__RECORD_LOST : NRM__RECORD_CAPTURE;
    }
    enum nrm__record result = record_inside(&scope, event, mark, out_done);
    nrm__cuda_leave(&scope);
    bool is_same = nrm__cuda_generation(device) == scope.generation;
    return result == NRM__RECORDED && !is_same ? NRM__RECORD_CAPTURE : result;
}

enum nrm__record
nrm__cuda_record_with(int device, struct nrm__cuda_event *event, int mark,
                      bool *out_done)
{
    if (device < 0 || device >= NRM__MAX_DEVICES) {
        return NRM__RECORD_IDLE;
    }
    bool forbidden = atomic_load_explicit(&has_captured[device], memory_order_relaxed);
    enum nrm__record result =
        forbidden ? NRM__RECORD_IDLE : record_retained(device, event, mark, out_done);
    if (result != NRM__RECORD_IDLE || !nrm__cuda_may_be_active(device)) {
        return result;
    }
    return forbidden ? NRM__RECORD_CAPTURE
                     : record_existing(device, event, mark, out_done);
}

enum nrm__record
nrm__cuda_record(int device, struct nrm__cuda_event *out)
{
    struct nrm__cuda_event event = {.device = device};
    enum nrm__record result =
        nrm__cuda_record_with(device, &event, NRM__CUDA_COUNTED, NULL);
    if (result == NRM__RECORDED) {
        *out = event;
    }
    return result;
}

/* ---- asking ---- */

nrm_status
nrm__cuda_event_query(const struct nrm__cuda_event *event)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    if (event->handle == NULL || driver == NULL ||
        nrm__cuda_generation_noticed(event->device) != event->generation) {
        return NRM_OK;
    }
    nrm_CUstreamCaptureMode mode = nrm__cuda_relax(driver);
    nrm_CUresult code = driver->cuEventQuery(event->handle);
    nrm__cuda_unrelax(driver, mode);
    if (code == NRM_CUDA_SUCCESS) {
        return NRM_OK;
    }
    if (code == NRM_CUDA_ERROR_NOT_READY) {
        return NRM_NOT_FOUND;
    }
    if (nrm__cuda_is_sticky(code)) {
        return nrm__cuda_error(code, "cuEventQuery on device %d", event->device);
    }
    /* Done if its context is over; anything else says nothing, so it is not done. */
    bool over = nrm__cuda_generation(event->device) != event->generation;
    return over || nrm__cuda_is_destroyed(code) ? NRM_OK : NRM_NOT_FOUND;
}
