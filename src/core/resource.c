/*
 * What all resources share: their life, their names, the list of those that live.
 *
 * A reference is held by whoever uses a resource and by every live block of it, so a
 * pool outlives its last array. A pool whose free blocks threads keep holds itself
 * instead, while it has blocks that are not free: when its last user has gone, threads
 * let go of what they kept. The list of live resources exists for trim, for statistics
 * and for the fork hooks, which take the locks of all of them.
 */
#include "core/ops.h"

#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/bits.h"
#include "base/error.h"
#include "base/lock.h"
#include "core/cache.h"
#include "core/enclosed.h"
#include "core/nodes.h"
#include "os/fork.h"

#define HOLD (UINT64_C(1) << 32)

static struct nrm__lock resources_lock = NRM__LOCK_INIT(NRM__RANK_RESOURCES);
static struct nrm__link resources = {&resources, &resources};

/* ---- life ---- */

nrm_status
nrm__resource_create(const struct nrm__ops *ops, nrm_kind kind, nrm_resource *upstream,
                     size_t struct_nbytes, nrm_resource **out)
{
    nrm_resource *mr = nrm__node_allocate(struct_nbytes);
    if (mr == NULL) {
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory for a %s of %zu B",
                          ops->class_name, struct_nbytes);
    }
    mr->ops = ops;
    mr->kind = kind;
    mr->flags = ops->flags;
    mr->struct_nbytes = struct_nbytes;
    mr->upstream = upstream;
    static atomic_uint n_fronts;
    nrm__list_init(&mr->all);
    nrm__list_init(&mr->drawers);
    nrm__list_init(&mr->drawer.link);
    if (ops->front != NULL) {
        unsigned number = atomic_fetch_add_explicit(&n_fronts, 1, memory_order_relaxed);
        mr->slot = nrm__cache_offset_of(ops, number);
    }
    atomic_init(&mr->refcount, 1);
    atomic_init(&mr->device, NRM_DEVICE_NONE);
    if (upstream != NULL) {
        nrm_resource_retain(upstream);
        nrm__drawer_add(&mr->drawer, mr, upstream);
        mr->flags |= upstream->flags & NRM__OPS_USER_CODE;
        atomic_init(&mr->device, nrm_resource_device(upstream));
    }
    *out = mr;
    return NRM_OK;
}

void
nrm__resource_publish(nrm_resource *mr)
{
    nrm__lock_acquire(&resources_lock);
    nrm__list_append(&resources, &mr->all);
    nrm__lock_release(&resources_lock);
}

void
nrm__resource_abandon(nrm_resource *mr)
{
    nrm_resource *upstream = mr->upstream;
    nrm__drawer_remove(&mr->drawer);
    nrm__node_deallocate(mr, mr->struct_nbytes);
    nrm_resource_release(upstream);
}

void
nrm_resource_retain(nrm_resource *mr)
{
    atomic_fetch_add_explicit(&mr->refcount, 1, memory_order_relaxed);
}

void
nrm__resource_retain_many(nrm_resource *mr, size_t n)
{
    atomic_fetch_add_explicit(&mr->refcount, n, memory_order_relaxed);
}

bool
nrm__resource_try_retain(nrm_resource *mr)
{
    uint64_t count = atomic_load_explicit(&mr->refcount, memory_order_relaxed);
    while (count != 0) {
        if (atomic_compare_exchange_weak_explicit(&mr->refcount, &count, count + 1,
                                                  memory_order_acquire,
                                                  memory_order_relaxed)) {
            return true;
        }
    }
    return false;
}

void
nrm__resource_hold(nrm_resource *mr, size_t n)
{
    atomic_fetch_add_explicit(&mr->refcount, n * HOLD, memory_order_relaxed);
}

/* The last reference is gone. Returns what it drew on, whose reference is the
   caller's. */
static nrm_resource *
end(nrm_resource *mr)
{
    nrm__lock_acquire(&resources_lock);
    nrm__list_remove(&mr->all);
    nrm__list_remove(&mr->drawer.link);
    nrm__lock_release(&resources_lock);
    if (atomic_load(&mr->is_cached)) {
        nrm__cache_forget(mr);
    }
    if (mr->ops->finish != NULL) {
        mr->ops->finish(mr);
    }
    nrm_resource *upstream = mr->upstream;
    nrm__node_deallocate(mr, mr->struct_nbytes);
    return upstream;
}

/* True when these were the last. */
static bool
drop_holds(nrm_resource *mr, size_t n)
{
    uint64_t before =
        atomic_fetch_sub_explicit(&mr->refcount, n * HOLD, memory_order_acq_rel);
    NRM_ASSERT(before >= n * HOLD);
    return before == n * HOLD;
}

/* The last user of a pool that threads keep something of lets go of that too, under a
   hold of its own meanwhile. One exchange decides who is the last: two that go at the
   same moment must not both leave it to the other. True when nothing is left. */
static bool
drop_user(nrm_resource *mr)
{
    uint64_t count = atomic_load_explicit(&mr->refcount, memory_order_relaxed);
    bool closes;
    do {
        NRM_ASSERT((uint32_t)count != 0);
        closes = (uint32_t)count == 1 && count != 1 && atomic_load(&mr->is_cached) &&
                 !atomic_load(&mr->is_closed);
    } while (!atomic_compare_exchange_weak_explicit(
        &mr->refcount, &count, closes ? count + HOLD - 1 : count - 1,
        memory_order_acq_rel, memory_order_relaxed));
    if (closes) {
        nrm__cache_close(mr);
        return drop_holds(mr, 1);
    }
    return count == 1;
}

/* A chain of adaptors and pools dies in a loop, not in a recursion. */
void
nrm_resource_release(nrm_resource *mr)
{
    while (mr != NULL && drop_user(mr)) {
        mr = end(mr);
    }
}

void
nrm__resource_release_many(nrm_resource *mr, size_t n)
{
    atomic_fetch_sub_explicit(&mr->refcount, n - 1, memory_order_release);
    nrm_resource_release(mr);
}

void
nrm__resource_unhold(nrm_resource *mr, size_t n)
{
    if (drop_holds(mr, n)) {
        nrm_resource_release(end(mr));
    }
}

void
nrm__resource_for_each(void (*visit)(nrm_resource *mr, void *context), void *context)
{
    nrm_resource *previous = NULL;
    nrm__lock_acquire(&resources_lock);
    /* A retained resource stays in the list, so its link leads on after the visit. */
    for (struct nrm__link *link = resources.next; link != &resources;
         link = link->next) {
        nrm_resource *mr = NRM__CONTAINER(link, nrm_resource, all);
        if (!nrm__resource_try_retain(mr)) {
            continue;
        }
        nrm__lock_release(&resources_lock);
        nrm_resource_release(previous);
        visit(mr, context);
        previous = mr;
        nrm__lock_acquire(&resources_lock);
    }
    nrm__lock_release(&resources_lock);
    nrm_resource_release(previous);
}

/* ---- who holds it ---- */

void
nrm__drawer_add(struct nrm__drawer *drawer, nrm_resource *by, nrm_resource *of)
{
    drawer->by = by;
    nrm__lock_acquire(&resources_lock);
    nrm__list_append(&of->drawers, &drawer->link);
    nrm__lock_release(&resources_lock);
}

void
nrm__drawer_remove(struct nrm__drawer *drawer)
{
    nrm__lock_acquire(&resources_lock);
    nrm__list_remove(&drawer->link);
    nrm__lock_release(&resources_lock);
}

bool
nrm__resource_is_enclosed(nrm_resource *const *mr)
{
    nrm__lock_acquire(&resources_lock);
    bool is_enclosed = *mr != NULL && atomic_load(&(*mr)->n_objects) == 1 &&
                       nrm__is_enclosed_locked(*mr, 0);
    nrm__lock_release(&resources_lock);
    return is_enclosed;
}

bool
nrm__resource_is_alone(nrm_resource *const *mr)
{
    nrm__lock_acquire(&resources_lock);
    bool is_alone = *mr != NULL && atomic_load(&(*mr)->n_objects) == 1 &&
                    atomic_load(&(*mr)->refcount) == 1;
    nrm__lock_release(&resources_lock);
    return is_alone;
}

nrm_resource *
nrm__resource_in(nrm_resource *const *mr)
{
    nrm__lock_acquire(&resources_lock);
    nrm_resource *found = *mr != NULL && nrm__resource_try_retain(*mr) ? *mr : NULL;
    nrm__lock_release(&resources_lock);
    return found;
}

void
nrm__resource_forget(nrm_resource **mr)
{
    nrm__lock_acquire(&resources_lock);
    *mr = NULL;
    nrm__lock_release(&resources_lock);
}

bool
nrm__resource_is_under(const nrm_resource *mr, const nrm_resource *other)
{
    nrm__lock_acquire(&resources_lock);
    bool is_under = nrm__is_under_locked(mr, other, 0);
    nrm__lock_release(&resources_lock);
    return is_under;
}

/* ---- properties ---- */

const char *
nrm_kind_name(nrm_kind kind)
{
    static const char *const names[] = {"host", "pinned", "managed", "device"};
    return (unsigned)kind < sizeof names / sizeof *names ? names[kind] : "unknown";
}

bool
nrm_kind_is_host_accessible(nrm_kind kind)
{
    return kind != NRM_KIND_DEVICE;
}

size_t
nrm__kind_alignment(nrm_kind kind)
{
    return kind == NRM_KIND_HOST ? 64 : 256;
}

nrm_kind
nrm_resource_kind(const nrm_resource *mr)
{
    return mr->kind;
}

int
nrm_resource_device(const nrm_resource *mr)
{
    for (; mr != NULL; mr = mr->upstream) {
        int device = atomic_load_explicit(&mr->device, memory_order_relaxed);
        if (device != NRM_DEVICE_NONE) {
            return device;
        }
    }
    return NRM_DEVICE_NONE;
}

nrm_resource *
nrm_resource_upstream(const nrm_resource *mr)
{
    return mr->upstream;
}

const char *
nrm_resource_class_name(const nrm_resource *mr)
{
    return mr->ops->class_name;
}

bool
nrm_resource_calls_user_code(const nrm_resource *mr)
{
    return (mr->flags & NRM__OPS_USER_CODE) != 0;
}

void
nrm__resource_set_name(nrm_resource *mr, const char *name)
{
    int none = 0;
    if (!atomic_compare_exchange_strong(&mr->naming, &none, 1)) {
        return;
    }
    snprintf(mr->name, sizeof mr->name, "%s", name);
    atomic_store_explicit(&mr->naming, 2, memory_order_release);
}

void
nrm_resource_name(const nrm_resource *mr, char *out, size_t size)
{
    bool named = atomic_load_explicit(&mr->naming, memory_order_acquire) == 2;
    snprintf(out, size, "%s", named ? mr->name : "");
}

/* ---- fork ---- */

static void
each_for_fork(void (*call)(nrm_resource *mr))
{
    for (struct nrm__link *link = resources.next; link != &resources;
         link = link->next) {
        call(NRM__CONTAINER(link, nrm_resource, all));
    }
}

static struct nrm__lock *
lock_of(nrm_resource *mr)
{
    return (struct nrm__lock *)((char *)mr + mr->ops->lock_offset);
}

static void
prepare_one(nrm_resource *mr)
{
    if (mr->ops->lock_offset != 0) {
        nrm__lock_fork_prepare(lock_of(mr));
    }
    if (mr->ops->fork_prepare != NULL) {
        mr->ops->fork_prepare(mr);
    }
}

static void
parent_one(nrm_resource *mr)
{
    if (mr->ops->fork_parent != NULL) {
        mr->ops->fork_parent(mr);
    }
    if (mr->ops->lock_offset != 0) {
        nrm__lock_fork_parent(lock_of(mr));
    }
}

static void
child_one(nrm_resource *mr)
{
    if (mr->ops->fork_child != NULL) {
        mr->ops->fork_child(mr);
    }
    if (mr->ops->lock_offset != 0) {
        nrm__lock_fork_child(lock_of(mr));
    }
}

static void
fork_prepare_each(void)
{
    each_for_fork(prepare_one);
}

static void
fork_parent_each(void)
{
    each_for_fork(parent_one);
}

static void
fork_child_each(void)
{
    each_for_fork(child_one);
}

/* The list stays locked over the fork, so the same resources are seen on both sides. */
static const struct nrm__fork_hook list_hook = {
    .rank = NRM__RANK_RESOURCES,
    .lock = &resources_lock,
};

static const struct nrm__fork_hook each_hook = {
    .rank = NRM__RANK_POOL,
    .prepare = fork_prepare_each,
    .parent = fork_parent_each,
    .child = fork_child_each,
};

__attribute__((constructor)) static void
add_fork_hooks(void)
{
    nrm__fork_hook_add(&list_hook);
    nrm__fork_hook_add(&each_hook);
}
