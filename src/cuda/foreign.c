/*
 * See foreign.h. Nobody tells us that such a context has been made, or has ended: so
 * they are noted where memory comes to them, and asked for their id before they are
 * named. That number is never given out again, while the handle is the next one's.
 *
 * An event belongs to its context. There is no pool of them here, since what is left in
 * one would have to be asked for its life each time: each is made for one record.
 */
#include "cuda/foreign.h"

#include "base/lock.h"
#include "cuda/capture.h"
#include "os/fork.h"

enum { MAX_FOREIGN = 256, N_SPECIAL_HANDLES = 3 };

struct entry {
    struct nrm__cuda_foreign foreign; /* no context: of none */
    bool has_captured;                /* an event of all of it has broken a capture */
};

atomic_uint nrm__cuda_n_foreign;

static struct nrm__lock lock = NRM__LOCK_INIT(NRM__RANK_CUDA);
static struct entry entries[MAX_FOREIGN];
static unsigned n_entries; /* that were ever used */
static atomic_bool is_full;

static const struct nrm__fork_hook fork_hook = {.rank = NRM__RANK_CUDA, .lock = &lock};

__attribute__((constructor)) static void
add_fork_hook(void)
{
    nrm__fork_hook_add(&fork_hook);
}

static const struct nrm__driver *
driver_now(void)
{
    return nrm__cuda_is_exiting() ? NULL : nrm__cuda_driver();
}

static bool
is_over(nrm_CUresult code)
{
    return nrm__cuda_is_destroyed(code) || code == NRM_CUDA_ERROR_INVALID_CONTEXT ||
           code == NRM_CUDA_ERROR_INVALID_HANDLE;
}

static bool
is_same(const struct nrm__cuda_foreign *a, const struct nrm__cuda_foreign *b)
{
    return a->context == b->context && a->id == b->id && a->driver == b->driver;
}

bool
nrm__cuda_foreign_lives(const struct nrm__cuda_foreign *foreign)
{
    const struct nrm__driver *driver = driver_now();
    struct nrm__cuda_lone_event of_it = {.context = foreign->context,
                                         .id = foreign->id};
    return driver == foreign->driver && nrm__cuda_lone_lives(driver, &of_it);
}

/* ---- which there are ---- */

static struct entry *
find_locked(const struct nrm__cuda_foreign *foreign)
{
    for (unsigned i = 0; i < n_entries; i++) {
        if (is_same(&entries[i].foreign, foreign)) {
            return &entries[i];
        }
    }
    return NULL;
}

/* A place of none, or NULL. */
static struct entry *
take_locked(void)
{
    for (unsigned i = 0; i < n_entries; i++) {
        if (entries[i].foreign.context == NULL) {
            return &entries[i];
        }
    }
    return n_entries < MAX_FOREIGN ? &entries[n_entries++] : NULL;
}

static void
enter(const struct nrm__cuda_foreign *foreign)
{
    nrm__lock_acquire(&lock);
    struct entry *entry = find_locked(foreign) == NULL ? take_locked() : NULL;
    if (entry != NULL) {
        *entry = (struct entry){.foreign = *foreign};
        atomic_fetch_add(&nrm__cuda_n_foreign, 1);
    }
    else if (find_locked(foreign) == NULL) {
        atomic_store(&is_full, true);
    }
    nrm__lock_release(&lock);
}

static void
forget(const struct nrm__cuda_foreign *foreign)
{
    nrm__lock_acquire(&lock);
    struct entry *entry = find_locked(foreign);
    if (entry != NULL) {
        *entry = (struct entry){0};
        atomic_fetch_sub(&nrm__cuda_n_foreign, 1);
    }
    nrm__lock_release(&lock);
}

/* The first from *place on. */
static bool
copy_next(unsigned *place, struct nrm__cuda_foreign *out)
{
    bool found = false;
    nrm__lock_acquire(&lock);
    for (; *place < n_entries && !found; ++*place) {
        *out = entries[*place].foreign;
        found = out->context != NULL;
    }
    nrm__lock_release(&lock);
    return found;
}

bool
nrm__cuda_foreign_next(int device, unsigned *place, struct nrm__cuda_foreign *out)
{
    struct nrm__cuda_foreign next;
    const struct nrm__driver *driver = driver_now();
    while (nrm__cuda_has_foreign() && copy_next(place, &next)) {
        /* A driver that was exchanged took its contexts along. */
        if (driver != NULL && !nrm__cuda_foreign_lives(&next)) {
            forget(&next);
        }
        else if (device < 0 || next.device == device) {
            *out = next;
            return true;
        }
    }
    return false;
}

void
nrm__cuda_foreign_forget_all(void)
{
    nrm__lock_acquire(&lock);
    n_entries = 0;
    atomic_store(&nrm__cuda_n_foreign, 0);
    atomic_store(&is_full, false);
    nrm__lock_release(&lock);
}

bool
nrm__cuda_foreign_is_full(void)
{
    return atomic_load(&is_full);
}

/* ---- noting ---- */

static int
device_of_current(const struct nrm__driver *driver)
{
    nrm_CUdevice handle;
    if (driver->cuCtxGetDevice(&handle) == NRM_CUDA_SUCCESS) {
        for (int i = 0; i < driver->n_devices; i++) {
            if (driver->devices[i] == handle) {
                return i;
            }
        }
    }
    return -1;
}

/* Of one that is none of the primary ones; false: it is, or has ended. */
static bool
describe(const struct nrm__driver *driver, nrm_CUcontext context,
         struct nrm__cuda_foreign *out)
{
    struct nrm__cuda_foreign found = {.context = context, .driver = driver};
    nrm_CUcontext popped;
    if (context == NULL || nrm__cuda_find_device(context) >= 0 ||
        driver->cuCtxGetId(context, &found.id) != NRM_CUDA_SUCCESS ||
        driver->cuCtxPushCurrent(context) != NRM_CUDA_SUCCESS) {
        return false;
    }
    found.device = device_of_current(driver);
    (void)driver->cuCtxPopCurrent(&popped); /* what was pushed is there */
    *out = found;
    return found.device >= 0;
}

static nrm_CUcontext
current_of(const struct nrm__driver *driver)
{
    nrm_CUcontext current = NULL;
    return driver->cuCtxGetCurrent(&current) == NRM_CUDA_SUCCESS ? current : NULL;
}

/* Whether the context, by its handle, is among those that are known. */
static bool
is_known(const struct nrm__driver *driver, nrm_CUcontext context)
{
    struct nrm__cuda_foreign foreign = {.context = context, .driver = driver};
    if (!nrm__cuda_has_foreign() ||
        driver->cuCtxGetId(context, &foreign.id) != NRM_CUDA_SUCCESS) {
        return false;
    }
    nrm__lock_acquire(&lock);
    bool known = find_locked(&foreign) != NULL;
    nrm__lock_release(&lock);
    return known;
}

static void
note(const struct nrm__driver *driver, nrm_CUcontext context)
{
    struct nrm__cuda_foreign foreign;
    if (context != NULL && nrm__cuda_device_of(context) < 0 &&
        !is_known(driver, context) && describe(driver, context, &foreign)) {
        enter(&foreign);
    }
}

void
nrm__cuda_foreign_note_current(void)
{
    const struct nrm__driver *driver = driver_now();
    if (driver != NULL) {
        note(driver, current_of(driver));
    }
}

void
nrm__cuda_foreign_note_stream(uintptr_t handle)
{
    const struct nrm__driver *driver = driver_now();
    nrm_CUcontext context = NULL;
    if (driver != NULL && handle >= N_SPECIAL_HANDLES &&
        driver->cuStreamGetCtx((nrm_CUstream)handle, &context) == NRM_CUDA_SUCCESS) {
        note(driver, context);
    }
}

bool
nrm__cuda_foreign_find(uintptr_t handle, struct nrm__cuda_foreign *out)
{
    const struct nrm__driver *driver = driver_now();
    nrm_CUcontext context = NULL;
    return driver != NULL &&
           driver->cuStreamGetCtx((nrm_CUstream)handle, &context) == NRM_CUDA_SUCCESS &&
           describe(driver, context, out);
}

void
nrm__cuda_foreign_destroy_stream(const struct nrm__cuda_foreign *foreign,
                                 nrm_CUstream stream)
{
    const struct nrm__driver *driver = foreign->driver;
    nrm_CUcontext popped;
    if (!nrm__cuda_foreign_lives(foreign)) {
        return; /* it went with its context */
    }
    nrm_CUstreamCaptureMode mode = nrm__cuda_relax(driver);
    if (driver->cuCtxPushCurrent(foreign->context) == NRM_CUDA_SUCCESS) {
        (void)driver->cuStreamDestroy(stream);  /* an error of old work */
        (void)driver->cuCtxPopCurrent(&popped); /* what was pushed is there */
    }
    nrm__cuda_unrelax(driver, mode);
}

nrm_CUcontext
nrm__cuda_foreign_current(void)
{
    const struct nrm__driver *driver = driver_now();
    nrm_CUcontext current = NULL;
    if (driver != NULL && nrm__cuda_has_foreign()) {
        current = current_of(driver);
    }
    return current != NULL && is_known(driver, current) ? current : NULL;
}

bool
nrm__cuda_is_asleep(int device)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    if (nrm__cuda_is_exiting() || nrm__cuda_is_forked()) {
        return false;
    }
    return driver == NULL || (device >= 0 && device < driver->n_devices &&
                              !nrm__cuda_may_be_active(device));
}

/* ---- recording ---- */

static void
set_captured(const struct nrm__cuda_foreign *foreign)
{
    nrm__lock_acquire(&lock);
    struct entry *entry = find_locked(foreign);
    if (entry != NULL) {
        entry->has_captured = true;
    }
    nrm__lock_release(&lock);
}

static bool
has_captured(const struct nrm__cuda_foreign *foreign)
{
    nrm__lock_acquire(&lock);
    const struct entry *entry = find_locked(foreign);
    bool has = entry != NULL && entry->has_captured;
    nrm__lock_release(&lock);
    return has;
}

void
nrm__cuda_foreign_lift(void)
{
    nrm__lock_acquire(&lock);
    for (unsigned i = 0; i < n_entries; i++) {
        entries[i].has_captured = false;
    }
    nrm__lock_release(&lock);
}

static enum nrm__record
failed(const struct nrm__cuda_foreign *foreign, nrm_CUresult code)
{
    if (nrm__cuda_is_capture_error(code)) {
        set_captured(foreign);
        return NRM__RECORD_INVALIDATED;
    }
    if (nrm__cuda_is_sticky(code)) {
        (void)nrm__cuda_error(code, "recording an event in a context of device %d",
                              foreign->device);
        return NRM__RECORD_LOST;
    }
    return is_over(code) && !nrm__cuda_foreign_lives(foreign) ? NRM__RECORD_IDLE
                                                              : NRM__RECORD_CAPTURE;
}

/* Nothing says that a context of this kind (there are others than those of cuCtxCreate)
   cannot be recorded on as a whole but the driver's answer: then it is waited for. */
static nrm_CUresult
record_all(const struct nrm__cuda_foreign *foreign, nrm_CUevent *event)
{
    const struct nrm__driver *driver = foreign->driver;
    nrm_CUresult code = driver->cuCtxRecordEvent(foreign->context, *event);
    if (code != NRM_CUDA_ERROR_INVALID_HANDLE &&
        code != NRM_CUDA_ERROR_INVALID_CONTEXT &&
        code != NRM_CUDA_ERROR_NOT_SUPPORTED) {
        return code;
    }
    (void)driver->cuEventDestroy(*event); /* the other's result is told */
    *event = NULL;
    return driver->cuCtxSynchronize();
}

/* In the context, which is current. */
static nrm_CUresult
record_event(const struct nrm__cuda_foreign *foreign, uintptr_t handle,
             nrm_CUevent *out)
{
    const struct nrm__driver *driver = foreign->driver;
    bool is_all = handle == NRM__CUDA_ALL_STREAMS;
    nrm_CUevent event = NULL;
    if (is_all && driver->cuCtxRecordEvent == NULL) {
        return driver->cuCtxSynchronize();
    }
    nrm_CUresult code = driver->cuEventCreate(&event, NRM_CU_EVENT_DISABLE_TIMING);
    if (code == NRM_CUDA_SUCCESS) {
        code = is_all ? record_all(foreign, &event)
                      : driver->cuEventRecord(event, (nrm_CUstream)handle);
    }
    if (code == NRM_CUDA_SUCCESS) {
        *out = event;
    }
    else if (event != NULL) {
        (void)driver->cuEventDestroy(event); /* the record's error is told */
    }
    return code;
}

/* The same, where no capture forbids it. */
static enum nrm__record
record_inside(const struct nrm__cuda_foreign *foreign, uintptr_t handle,
              nrm_CUevent *out)
{
    bool is_all = handle == NRM__CUDA_ALL_STREAMS;
    uintptr_t asked = is_all ? (uintptr_t)NRM_CU_STREAM_LEGACY : handle;
    if (is_all &&
        (has_captured(foreign) || !nrm__cuda_record_begin(NRM__CUDA_COUNTED))) {
        return NRM__RECORD_CAPTURE;
    }
    enum nrm__record result = NRM__RECORD_CAPTURE;
    if (!nrm__cuda_sees_capture(foreign->driver, asked)) {
        nrm_CUresult code = record_event(foreign, handle, out);
        result = code == NRM_CUDA_SUCCESS ? NRM__RECORDED : failed(foreign, code);
    }
    if (is_all) {
        nrm__cuda_record_end(NRM__CUDA_COUNTED);
    }
    return result;
}

enum nrm__record
nrm__cuda_foreign_record(const struct nrm__cuda_foreign *foreign, uintptr_t handle,
                         struct nrm__cuda_lone_event *out)
{
    const struct nrm__driver *driver = foreign->driver;
    nrm_CUcontext popped;
    nrm_CUevent event = NULL;
    nrm__assert_no_locks();
    if (driver_now() != driver || !nrm__cuda_foreign_lives(foreign)) {
        return nrm__cuda_is_exiting() || nrm__cuda_is_forked() ? NRM__RECORD_CAPTURE
                                                               : NRM__RECORD_IDLE;
    }
    nrm_CUstreamCaptureMode mode = nrm__cuda_relax(driver);
    nrm_CUresult code = driver->cuCtxPushCurrent(foreign->context);
    enum nrm__record result = NRM__RECORD_CAPTURE;
    if (code == NRM_CUDA_SUCCESS) {
        result = record_inside(foreign, handle, &event);
        (void)driver->cuCtxPopCurrent(&popped); /* what was pushed is there */
    }
    nrm__cuda_unrelax(driver, mode);
    if (!nrm__cuda_foreign_lives(foreign)) {
        return NRM__RECORD_IDLE; /* its event has gone with it */
    }
    if (result == NRM__RECORDED) {
        *out = (struct nrm__cuda_lone_event){event, foreign->context, foreign->id};
    }
    return result;
}

/* ---- asking and waiting ---- */

bool
nrm__cuda_foreign_is_named(const struct nrm__driver *driver,
                           const struct nrm__cuda_lone_event *event)
{
    return event->handle != NULL && driver == driver_now() &&
           nrm__cuda_lone_lives(driver, event);
}

nrm_status
nrm__cuda_foreign_query(const struct nrm__driver *driver,
                        const struct nrm__cuda_lone_event *event)
{
    if (!nrm__cuda_foreign_is_named(driver, event)) {
        return nrm__cuda_is_exiting() || nrm__cuda_is_forked() ? NRM_NOT_FOUND : NRM_OK;
    }
    nrm_CUstreamCaptureMode mode = nrm__cuda_relax(driver);
    nrm_CUresult code = driver->cuEventQuery(event->handle);
    nrm__cuda_unrelax(driver, mode);
    if (nrm__cuda_is_sticky(code)) {
        return nrm__cuda_error(code, "cuEventQuery of an event of a context of the "
                                     "program's own");
    }
    return code == NRM_CUDA_SUCCESS || is_over(code) ? NRM_OK : NRM_NOT_FOUND;
}

void
nrm__cuda_foreign_drop(const struct nrm__driver *driver,
                       const struct nrm__cuda_lone_event *event)
{
    if (nrm__cuda_foreign_is_named(driver, event)) {
        nrm__cuda_lone_drop(event);
    }
}

nrm_status
nrm__cuda_foreign_wait(uintptr_t handle, nrm_CUevent event)
{
    const struct nrm__driver *driver = driver_now();
    nrm_CUresult code = NRM_CUDA_SUCCESS;
    if (driver == NULL) {
        return NRM_NOT_FOUND;
    }
    nrm_CUstreamCaptureMode mode = nrm__cuda_relax(driver);
    bool captures = nrm__cuda_sees_capture(driver, handle);
    if (!captures) {
        code = driver->cuStreamWaitEvent((nrm_CUstream)handle, event,
                                         NRM_CU_EVENT_WAIT_DEFAULT);
    }
    nrm__cuda_unrelax(driver, mode);
    if (code != NRM_CUDA_SUCCESS) {
        return nrm__cuda_error(code, "cuStreamWaitEvent of stream 0x%zx",
                               (size_t)handle);
    }
    return captures ? NRM_NOT_FOUND : NRM_OK;
}
