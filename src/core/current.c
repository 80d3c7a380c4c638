/*
 * The current resource of each device.
 *
 * It is looked up for every buffer that is made without naming a resource, while others
 * may set it, and what is found must not die before it is used. A lock and a reference
 * would be three locked instructions for each look-up. Here it is one: a slot has the
 * address of its resource in the lower 48 bits of a word and in the upper 16 how many
 * references were handed out, and the table holds that many in advance. Who looks up
 * adds one to the count and has, in the same instruction, the address and a reference.
 * Who sets a slot exchanges the word and gives back what is left of the old one's
 * references.
 *
 * Whoever finds the count above half of what is held puts a half of it back, so more
 * than that are never handed out, but for one by each thread that is at that very
 * point.
 */
#include "core/current.h"

#include <stdatomic.h>
#include <stdint.h>

#include "base/assert.h"
#include "base/error.h"
#include "core/hooks.h"
#include "core/ops.h"
#include "core/registry.h"
#include "cuda/driver.h"
#include "nrm/options.h"
#include "nrm/registry.h"

#define TAKEN (UINT64_C(1) << 48) /* one reference, in the upper bits */
#define ADDRESS (TAKEN - 1)

enum { HELD = 0x8000, HALF = HELD / 2 };

typedef atomic_uint_least64_t slot;

static slot per_device[NRM__MAX_DEVICES]; /* 0: the default */
static slot defaults[NRM__MAX_DEVICES];   /* 0: made when asked for */
static nrm_status (*make_default)(int device, nrm_resource **out);

/* ---- slots ---- */

static nrm_resource *
resource_in(uint64_t word)
{
    return (nrm_resource *)(uintptr_t)(word & ADDRESS);
}

static uint64_t
word_of(nrm_resource *mr)
{
    uint64_t word = (uint64_t)(uintptr_t)mr;
    NRM_ASSERT((word & ~ADDRESS) == 0);
    return word;
}

/* The table holds a half more and takes it off the count, unless another thread did. */
__attribute__((noinline)) static void
refill(slot *self, nrm_resource *mr)
{
    nrm__resource_retain_many(mr, HALF);
    uint64_t word = atomic_load_explicit(self, memory_order_relaxed);
    while (resource_in(word) == mr && word / TAKEN >= HALF) {
        if (atomic_compare_exchange_weak_explicit(self, &word, word - HALF * TAKEN,
                                                  memory_order_release,
                                                  memory_order_relaxed)) {
            return;
        }
    }
    nrm__resource_release_many(mr, HALF);
}

/* A new reference, or NULL. What a slot counts while it is empty means nothing. */
static nrm_resource *
take(slot *self)
{
    if (resource_in(atomic_load_explicit(self, memory_order_relaxed)) == NULL) {
        return NULL;
    }
    uint64_t word =
        atomic_fetch_add_explicit(self, TAKEN, memory_order_acquire) + TAKEN;
    nrm_resource *mr = resource_in(word);
    if (__builtin_expect(word / TAKEN >= HALF, 0) && mr != NULL) {
        refill(self, mr);
    }
    return mr;
}

/* Retains `mr`; NULL empties the slot. */
static void
put(slot *self, nrm_resource *mr)
{
    if (mr != NULL) {
        nrm__resource_retain_many(mr, HELD);
    }
    uint64_t word = atomic_exchange_explicit(self, word_of(mr), memory_order_acq_rel);
    nrm_resource *old = resource_in(word);
    if (old != NULL) {
        nrm__resource_release_many(old, HELD - word / TAKEN);
    }
}

/* Retains `mr` and puts it there, unless the slot is no longer empty. */
static void
put_first(slot *self, nrm_resource *mr)
{
    nrm__resource_retain_many(mr, HELD);
    uint64_t word = atomic_load_explicit(self, memory_order_relaxed);
    while (resource_in(word) == NULL) {
        if (atomic_compare_exchange_weak_explicit(
                self, &word, word_of(mr), memory_order_release, memory_order_relaxed)) {
            return;
        }
    }
    nrm__resource_release_many(mr, HELD);
}

/* ---- defaults ---- */

static nrm_status
check_device(int device)
{
    if (__builtin_expect(device < 0 || device >= NRM__MAX_DEVICES, 0)) {
        return nrm__error(NRM_INVALID_VALUE, "a device ordinal is 0 to %d, not %d",
                          NRM__MAX_DEVICES - 1, device);
    }
    return NRM_OK;
}

void
nrm__current_set_maker(nrm_status (*make)(int device, nrm_resource **out))
{
    make_default = make;
}

void
nrm__current_forget_driver(void)
{
    for (int i = 0; i < NRM__MAX_DEVICES; i++) {
        put(&defaults[i], NULL);
    }
}

/* When two threads make one, the second is dropped. */
nrm_status
nrm__registry_device_default(int device, nrm_resource **out)
{
    NRM_TRY(check_device(device));
    nrm_resource *mr = take(&defaults[device]);
    while (mr == NULL) {
        nrm_resource *made;
        NRM_TRY(make_default(device, &made));
        put_first(&defaults[device], made);
        nrm_resource_release(made);
        mr = take(&defaults[device]);
    }
    *out = mr;
    return NRM_OK;
}

/* ---- devices ---- */

nrm_status
nrm_get_per_device_resource(int device, nrm_resource **out)
{
    NRM_TRY(check_device(device));
    nrm_resource *mr = take(&per_device[device]);
    if (mr == NULL) {
        mr = take(&defaults[device]);
    }
    if (mr == NULL) {
        return nrm__registry_device_default(device, out);
    }
    *out = mr;
    return NRM_OK;
}

nrm_resource *
nrm__registry_peek_device(int device)
{
    nrm_resource *mr =
        resource_in(atomic_load_explicit(&per_device[device], memory_order_relaxed));
    return mr != NULL ? mr
                      : resource_in(atomic_load_explicit(&defaults[device],
                                                         memory_order_relaxed));
}

static nrm_status
check_resource(int device, const nrm_resource *mr)
{
    if (mr->kind == NRM_KIND_HOST) {
        return nrm__error(NRM_INVALID_VALUE,
                          "%s has host memory, which a device cannot use",
                          mr->ops->class_name);
    }
    int own = nrm_resource_device(mr);
    if (mr->kind == NRM_KIND_DEVICE && own != NRM_DEVICE_NONE && own != device) {
        return nrm__error(NRM_INVALID_VALUE,
                          "%s has memory of device %d, and cannot be the current "
                          "resource of device %d",
                          mr->ops->class_name, own, device);
    }
    return NRM_OK;
}

nrm_status
nrm_set_per_device_resource(int device, nrm_resource *mr)
{
    NRM_TRY(check_device(device));
    if (mr != NULL) {
        NRM_TRY(check_resource(device, mr));
    }
    put(&per_device[device], mr);
    return NRM_OK;
}

/* ---- the current device ---- */

/* Where there is one device the driver need not be asked. */
static int
device_by(const struct nrm__driver *driver)
{
    int option = (int)nrm_option_get(NRM_OPT_DEVICE);
    nrm_CUdevice device;
    if (driver == NULL || (driver->n_devices == 1 && option == 0) ||
        driver->cuCtxGetDevice(&device) != NRM_CUDA_SUCCESS) {
        return option;
    }
    for (int i = 0; i < driver->n_devices; i++) {
        if (driver->devices[i] == device) {
            return i;
        }
    }
    return option;
}

int
nrm__current_device(void)
{
    return device_by(nrm__cuda_driver());
}

int
nrm__current_device_asked(void)
{
    const struct nrm__driver *driver = nrm__cuda_driver();
    if (driver == NULL) {
        void *token = nrm__detach();
        (void)nrm__cuda_init(NULL);
        nrm__attach(token);
        driver = nrm__cuda_driver();
    }
    return device_by(driver);
}

nrm_status
nrm_get_current_device_resource(nrm_resource **out)
{
    return nrm_get_per_device_resource(nrm__current_device_asked(), out);
}

nrm_status
nrm_set_current_device_resource(nrm_resource *mr)
{
    return nrm_set_per_device_resource(nrm__current_device_asked(), mr);
}
