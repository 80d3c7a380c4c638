/*
 * The primary contexts we know of, and entering one.
 *
 * Once we use a device's primary context we retain it, once for each of its lives, and
 * never release it. Somebody may reset it all the same (cudaDeviceReset): then its id
 * changes when it is retained again, and until then the driver calls it inactive or
 * destroyed. Either ends a generation: what belonged to the context (events, device and
 * managed memory, registrations) is gone, and must not be named to the driver any more.
 *
 * A slot is changed under the lock, which is never held across a driver call; a thread
 * that retained a context in vain, because another one was faster, releases it.
 */
#include "cuda/context.h"

#include <stdio.h>

#include "base/assert.h"
#include "base/error.h"
#include "base/lock.h"
#include "nrm/options.h"
#include "os/fork.h"

struct slot {
    _Atomic(nrm_CUcontext)
        context;                 /* that we retain; NULL: none, or its life is over */
    _Atomic(nrm_CUcontext) last; /* its handle, also after its life */
    atomic_ullong id;            /* of this life */
    atomic_ullong n_resets;
};

static struct slot slots[NRM__MAX_DEVICES];
atomic_uint_least64_t nrm__cuda_n_resets;
static struct nrm__lock lock = NRM__LOCK_INIT(NRM__RANK_CUDA);

static const struct nrm__fork_hook fork_hook = {.rank = NRM__RANK_CUDA, .lock = &lock};

__attribute__((constructor)) static void
add_fork_hook(void)
{
    nrm__fork_hook_add(&fork_hook);
}

/* ---- generations ---- */

static void
end_life_locked(struct slot *slot)
{
    atomic_store_explicit(&slot->context, NULL, memory_order_release);
    atomic_fetch_add_explicit(&slot->n_resets, 1, memory_order_release);
    atomic_fetch_add_explicit(&nrm__cuda_n_resets, 1, memory_order_release);
}

/* Ends this life, unless somebody has done so already. Handle and id were not read at
   once: the handle may be that of the life before, whose end says nothing about this
   one. */
static void
end_life(struct slot *slot, nrm_CUcontext context, unsigned long long id)
{
    nrm__lock_acquire(&lock);
    if (atomic_load(&slot->context) == context && atomic_load(&slot->id) == id) {
        end_life_locked(slot);
    }
    nrm__lock_release(&lock);
}

/* That the handle means no living context. Other errors say nothing about its life. */
static bool
says_dead(nrm_CUresult code)
{
    return code == NRM_CUDA_ERROR_CONTEXT_IS_DESTROYED ||
           code == NRM_CUDA_ERROR_INVALID_CONTEXT;
}

static bool
is_active(const struct nrm__driver *driver, int device)
{
    unsigned int flags;
    int active = 0;
    return driver->cuDevicePrimaryCtxGetState(driver->devices[device], &flags,
                                              &active) == NRM_CUDA_SUCCESS &&
           active != 0;
}

/* The context we knew if it still lives, else NULL, and its life is noted as over. */
static nrm_CUcontext
known_living(const struct nrm__driver *driver, int device)
{
    struct slot *slot = &slots[device];
    nrm_CUcontext context = atomic_load_explicit(&slot->context, memory_order_acquire);
    if (context == NULL) {
        return NULL;
    }
    unsigned long long known = atomic_load_explicit(&slot->id, memory_order_acquire);
    unsigned long long id = 0;
    unsigned int flags;
    int active = 0;
    nrm_CUresult code =
        driver->cuDevicePrimaryCtxGetState(driver->devices[device], &flags, &active);
    if (code == NRM_CUDA_ERROR_DEINITIALIZED) {
        return NULL;
    }
    bool over = code == NRM_CUDA_SUCCESS && active == 0;
    if (!over) {
        code = driver->cuCtxGetId(context, &id);
        over = code == NRM_CUDA_SUCCESS ? id != known : says_dead(code);
    }
    if (!over) {
        return context;
    }
    end_life(slot, context, known);
    return NULL;
}

uint64_t
nrm__cuda_generation_noticed(int device)
{
    if (device < 0 || device >= NRM__MAX_DEVICES) {
        return 0;
    }
    return 1 + atomic_load_explicit(&slots[device].n_resets, memory_order_acquire);
}

uint64_t
nrm__cuda_generation(int device)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    if (driver != NULL && device >= 0 && device < driver->n_devices) {
        (void)known_living(driver, device);
    }
    return nrm__cuda_generation_noticed(device);
}

void
nrm__cuda_check_generations(void)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    for (int i = 0; driver != NULL && i < driver->n_devices; i++) {
        (void)known_living(driver, i);
    }
}

int
nrm__cuda_active_devices(int *out)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    int n = 0;
    for (int i = 0; driver != NULL && i < driver->n_devices; i++) {
        if (is_active(driver, i)) {
            out[n++] = i;
        }
    }
    return n;
}

bool
nrm__cuda_may_be_active(int device)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    return driver != NULL && device >= 0 && device < driver->n_devices &&
           (atomic_load_explicit(&slots[device].context, memory_order_acquire) !=
                NULL ||
            is_active(driver, device));
}

int
nrm__cuda_device_of(nrm_CUcontext context)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    for (int i = 0; driver != NULL && context != NULL && i < driver->n_devices; i++) {
        if (atomic_load_explicit(&slots[i].context, memory_order_acquire) == context) {
            return i;
        }
    }
    return -1;
}

void
nrm__cuda_contexts_forget(void)
{
    nrm__lock_acquire(&lock);
    for (int i = 0; i < NRM__MAX_DEVICES; i++) {
        end_life_locked(&slots[i]);
        atomic_store(&slots[i].last, NULL);
    }
    nrm__lock_release(&lock);
}

/* ---- retaining ---- */

/* Notes a context that we have just retained. False: it is retained already. */
static bool
note_retained(struct slot *slot, nrm_CUcontext context, unsigned long long id)
{
    nrm__lock_acquire(&lock);
    bool known = atomic_load(&slot->context) != NULL;
    bool same = known && atomic_load(&slot->id) == id;
    if (known && !same) {
        end_life_locked(slot); /* reset and retained anew since it was looked at */
    }
    if (!same) {
        atomic_store(&slot->id, id);
        atomic_store(&slot->last, context);
        atomic_store_explicit(&slot->context, context, memory_order_release);
    }
    nrm__lock_release(&lock);
    return !same;
}

static nrm_status
retain(const struct nrm__driver *driver, int device, nrm_CUcontext *out)
{
    nrm_CUdevice handle = driver->devices[device];
    nrm_CUcontext context;
    unsigned long long id;
    nrm_CUresult code = driver->cuDevicePrimaryCtxRetain(&context, handle);
    if (code != NRM_CUDA_SUCCESS) {
        return nrm__cuda_error(code, "the primary context of device %d", device);
    }
    code = driver->cuCtxGetId(context, &id);
    if (code != NRM_CUDA_SUCCESS) {
        driver->cuDevicePrimaryCtxRelease(handle);
        return nrm__cuda_error(code, "cuCtxGetId of device %d", device);
    }
    if (!note_retained(&slots[device], context, id)) {
        driver->cuDevicePrimaryCtxRelease(handle);
    }
    *out = context;
    return NRM_OK;
}

/* The primary context, retained: NRM_NOT_FOUND when it is not active and may not be
 * made. */
static nrm_status
primary_of(const struct nrm__driver *driver, int device, bool may_make,
           nrm_CUcontext *out)
{
    nrm_CUcontext context = known_living(driver, device);
    if (context == NULL) {
        if (!may_make && !is_active(driver, device)) {
            return NRM_NOT_FOUND;
        }
        return retain(driver, device, out);
    }
    *out = context;
    return NRM_OK;
}

/* ---- which device ---- */

static int
ordinal_of(const struct nrm__driver *driver, nrm_CUdevice handle)
{
    for (int i = 0; i < driver->n_devices; i++) {
        if (driver->devices[i] == handle) {
            return i;
        }
    }
    return -1;
}

/* The device of the thread's current context, which may have been reset; -1: none. */
static int
device_of_current(const struct nrm__driver *driver, nrm_CUcontext current)
{
    nrm_CUdevice handle;
    if (current == NULL) {
        return -1;
    }
    if (driver->cuCtxGetDevice(&handle) == NRM_CUDA_SUCCESS) {
        return ordinal_of(driver, handle);
    }
    for (int i = 0; i < driver->n_devices; i++) {
        if (atomic_load_explicit(&slots[i].last, memory_order_acquire) == current) {
            return i;
        }
    }
    return -1;
}

/* Where the caller has no context: that of the option if it is active, else any active
   one, else that of the option. */
static int
device_of_process(const struct nrm__driver *driver)
{
    int wanted = (int)nrm_option_get(NRM_OPT_DEVICE);
    if (wanted >= 0 && wanted < driver->n_devices && is_active(driver, wanted)) {
        return wanted;
    }
    for (int i = 0; i < driver->n_devices; i++) {
        if (is_active(driver, i)) {
            return i;
        }
    }
    return wanted;
}

/* ---- entering ---- */

nrm_CUstreamCaptureMode
nrm__cuda_relax(const struct nrm__driver *driver)
{
    nrm_CUstreamCaptureMode mode = NRM_CU_STREAM_CAPTURE_MODE_RELAXED;
    if (driver->cuThreadExchangeStreamCaptureMode(&mode) != NRM_CUDA_SUCCESS) {
        return NRM_CU_STREAM_CAPTURE_MODE_GLOBAL; /* what every thread begins with */
    }
    return mode;
}

void
nrm__cuda_unrelax(const struct nrm__driver *driver, nrm_CUstreamCaptureMode mode)
{
    (void)driver->cuThreadExchangeStreamCaptureMode(&mode);
}

static nrm_status
push(struct nrm__cuda_scope *scope, nrm_CUcontext current)
{
    for (int attempt = 0; scope->context != current; attempt++) {
        nrm_CUresult code = scope->driver->cuCtxPushCurrent(scope->context);
        if (code == NRM_CUDA_SUCCESS) {
            scope->pushed = true;
            break;
        }
        if (attempt == 1 || !says_dead(code)) {
            return nrm__cuda_error(code, "cuCtxPushCurrent of device %d",
                                   scope->device);
        }
        /* reset since it was looked at */
        NRM_TRY(primary_of(scope->driver, scope->device, true, &scope->context));
    }
    return NRM_OK;
}

/* Makes the right context current. `may_make` also says that one which is current, but
   not primary, will do. */
static nrm_status
select_context(struct nrm__cuda_scope *scope, int device, bool may_make)
{
    const struct nrm__driver *driver = scope->driver;
    nrm_CUcontext current = NULL;
    if (driver->cuCtxGetCurrent(&current) != NRM_CUDA_SUCCESS) {
        current = NULL;
    }
    int current_device = device_of_current(driver, current);
    if (device < 0) {
        device = current_device >= 0 ? current_device : device_of_process(driver);
    }
    if (device < 0 || device >= driver->n_devices) {
        return nrm__error(NRM_INVALID_VALUE, "there is no device %d: %d visible",
                          device, driver->n_devices);
    }
    scope->device = device;
    bool has_other = current_device == device &&
                     atomic_load(&slots[device].last) != current;
    nrm_status status =
        primary_of(driver, device, may_make && !has_other, &scope->context);
    scope->generation = nrm__cuda_generation_noticed(device);
    if (status == NRM_NOT_FOUND && may_make) {
        unsigned long long id;
        if (!says_dead(driver->cuCtxGetId(current, &id))) {
            scope->context = current; /* the user's own, and the primary sleeps */
            return NRM_OK;
        }
        status = primary_of(driver, device, true, &scope->context);
    }
    NRM_TRY(status);
    NRM_TRY(push(scope, current));
    scope->generation = nrm__cuda_generation_noticed(device);
    return NRM_OK;
}

static nrm_status
enter(const struct nrm__driver *driver, int device, bool may_make,
      struct nrm__cuda_scope *out)
{
    struct nrm__cuda_scope scope = {.driver = driver};
    nrm__assert_no_locks();
    scope.mode = nrm__cuda_relax(driver);
    nrm_status status = select_context(&scope, device, may_make);
    if (status != NRM_OK) {
        nrm__cuda_unrelax(driver, scope.mode);
        return status;
    }
    *out = scope;
    return NRM_OK;
}

nrm_status
nrm__cuda_enter(int device, struct nrm__cuda_scope *out)
{
    const struct nrm__driver *driver;
    if (nrm__cuda_is_exiting()) {
        return NRM_DEVICE_LOST;
    }
    NRM_TRY(nrm__cuda_init(&driver));
    return enter(driver, device, true, out);
}

nrm_status
nrm__cuda_enter_existing(int device, struct nrm__cuda_scope *out)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    if (driver == NULL || device < 0 || device >= driver->n_devices ||
        nrm__cuda_is_exiting()) {
        return NRM_NOT_FOUND;
    }
    return enter(driver, device, false, out);
}

/* Context, id and generation of one life: a life ends with a step of the generation
   before the id is that of the next. False: none is known, or it has just ended. */
static bool
read_life(int device, struct nrm__cuda_scope *scope)
{
    scope->generation = nrm__cuda_generation_noticed(device);
    scope->context = atomic_load_explicit(&slots[device].context, memory_order_acquire);
    scope->id = atomic_load_explicit(&slots[device].id, memory_order_acquire);
    return scope->context != NULL &&
           nrm__cuda_generation_noticed(device) == scope->generation;
}

/* The id says it all: a context that was reset has none, and then another. NULL asks
   for that of the current one. */
static bool
has_id(const struct nrm__cuda_scope *scope, nrm_CUcontext context)
{
    unsigned long long id = 0;
    return scope->driver->cuCtxGetId(context, &id) == NRM_CUDA_SUCCESS &&
           id == scope->id;
}

static bool
push_retained(struct nrm__cuda_scope *scope)
{
    if (has_id(scope, NULL)) {
        return true;
    }
    scope->pushed = has_id(scope, scope->context) &&
                    scope->driver->cuCtxPushCurrent(scope->context) == NRM_CUDA_SUCCESS;
    return scope->pushed;
}

bool
nrm__cuda_enter_retained(int device, struct nrm__cuda_scope *out)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    struct nrm__cuda_scope scope = {.driver = driver, .device = device};
    if (driver == NULL || device < 0 || device >= driver->n_devices ||
        nrm__cuda_is_exiting() || !read_life(device, &scope)) {
        return false;
    }
    nrm__assert_no_locks();
    scope.mode = nrm__cuda_relax(driver);
    if (!push_retained(&scope)) {
        nrm__cuda_unrelax(driver, scope.mode);
        return false;
    }
    *out = scope;
    return true;
}

nrm_status
nrm__cuda_enter_to_free(int device, struct nrm__cuda_scope *out)
{
    nrm_status status = nrm__cuda_enter_existing(device, out);
    const struct nrm__driver *driver = nrm__cuda_driver();
    if (status != NRM_NOT_FOUND || driver == NULL || nrm__cuda_is_exiting()) {
        return status;
    }
    *out = (struct nrm__cuda_scope){
        .driver = driver,
        .device = device,
        .generation = nrm__cuda_generation_noticed(device),
        .mode = nrm__cuda_relax(driver),
    };
    return NRM_OK;
}

void
nrm__cuda_leave(struct nrm__cuda_scope *scope)
{
    nrm_CUcontext popped;
    if (scope->pushed) {
        (void)scope->driver->cuCtxPopCurrent(&popped);
    }
    nrm__cuda_unrelax(scope->driver, scope->mode);
}
