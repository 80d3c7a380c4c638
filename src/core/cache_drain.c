/*
 * Others at the cache of a thread: they keep its owner out, with a flag in its gate and
 * a barrier in every thread, and take away what it keeps of a pool, or what it knows of
 * a resource. The pool is given it when the lock of the caches is dropped and the owner
 * is in again.
 */
#include <sched.h>

#include "base/assert.h"
#include "core/cache_internal.h"
#include "os/barrier.h"

static bool
is_inside(const struct nrm__cache *cache)
{
    return atomic_load_explicit(&cache->inside, memory_order_acquire);
}

static bool
is_alone_locked(void)
{
    struct nrm__cache *own = nrm__cache_own();
    return own != NULL && nrm__caches.next == &own->link &&
           nrm__caches.previous == &own->link;
}

static void
barrier(void)
{
    if (nrm__cache_common.fences) {
        nrm__full_fence();
    }
    else {
        nrm__process_barrier();
    }
}

void
nrm__cache_shut_out_locked(struct nrm__cache *cache)
{
    atomic_fetch_or(&cache->gate, NRM__CACHE_STOPS);
    if (cache == nrm__cache_own()) {
        NRM_DEBUG_ASSERT(!is_inside(cache));
        return;
    }
    barrier();
    while (is_inside(cache)) {
        sched_yield();
    }
}

void
nrm__cache_shut_all_out_locked(void)
{
    struct nrm__cache *own = nrm__cache_own();
    for (struct nrm__link *link = nrm__caches.next; link != &nrm__caches;
         link = link->next) {
        atomic_fetch_or(&nrm__cache_from(link)->gate, NRM__CACHE_STOPS);
    }
    NRM_DEBUG_ASSERT(own == NULL || !is_inside(own));
    if (!nrm__list_is_empty(&nrm__caches) && !is_alone_locked()) {
        barrier();
    }
    for (struct nrm__link *link = nrm__caches.next; link != &nrm__caches;
         link = link->next) {
        while (nrm__cache_from(link) != own && is_inside(nrm__cache_from(link))) {
            sched_yield();
        }
    }
}

void
nrm__cache_let_in_locked(struct nrm__cache *cache)
{
    atomic_fetch_and_explicit(&cache->gate, ~(unsigned)NRM__CACHE_STOPS,
                              memory_order_release);
}

void
nrm__cache_synchronize(void)
{
    nrm__lock_acquire(&nrm__cache_lock);
    if (!nrm__list_is_empty(&nrm__caches) && !is_alone_locked()) {
        struct nrm__cache *own = nrm__cache_own();
        barrier();
        for (struct nrm__link *link = nrm__caches.next; link != &nrm__caches;
             link = link->next) {
            struct nrm__cache *cache = nrm__cache_from(link);
            while (cache != own && is_inside(cache)) {
                sched_yield(); /* it is in and out all the time */
            }
        }
    }
    nrm__lock_release(&nrm__cache_lock);
}

/* ---- draining ---- */

/* Takes the magazines of the pool away from every thread, and from each once: threads
   that go on using it have new ones at once. A list by `next_free`. */
static struct nrm__magazines *
steal(nrm_resource *pool)
{
    struct nrm__magazines *stolen = NULL;
    nrm__lock_acquire(&nrm__cache_lock);
    for (struct nrm__link *link = nrm__caches.next; link != &nrm__caches;
         link = link->next) {
        struct nrm__cache *cache = nrm__cache_from(link);
        struct nrm__slot *slot = nrm__cache_slot_of(cache, pool);
        if (nrm__slot_is_of(slot, pool) && slot->magazines != NULL) {
            nrm__cache_shut_out_locked(cache);
            slot->magazines->next_free = stolen;
            stolen = slot->magazines;
            nrm__cache_set_magazines_locked(cache, pool, NULL);
            nrm__cache_let_in_locked(cache);
        }
    }
    nrm__lock_release(&nrm__cache_lock);
    return stolen;
}

void
nrm__cache_drain(nrm_resource *pool)
{
    if (!atomic_load(&pool->is_cached)) {
        return;
    }
    struct nrm__magazines *stolen = steal(pool);
    pool->ops->take_back(pool, NULL);
    while (stolen != NULL) {
        struct nrm__magazines *next = stolen->next_free;
        nrm__magazines_give_back(stolen);
        stolen = next;
    }
}

void
nrm__cache_publish(nrm_resource *mr)
{
    if (!atomic_load(&mr->is_cached)) {
        return;
    }
    nrm__lock_acquire(&nrm__cache_lock);
    for (struct nrm__link *link = nrm__caches.next; link != &nrm__caches;
         link = link->next) {
        struct nrm__cache *cache = nrm__cache_from(link);
        struct nrm__slot *slot = nrm__cache_slot_of(cache, mr);
        if (nrm__slot_is_of(slot, mr)) {
            nrm__cache_shut_out_locked(cache);
            nrm__shard_publish_all(slot->front);
            nrm__cache_let_in_locked(cache);
        }
    }
    nrm__lock_release(&nrm__cache_lock);
}

void
nrm__cache_close(nrm_resource *pool)
{
    atomic_store(&pool->is_closed, true);
    nrm__cache_synchronize();
    nrm__cache_drain(pool);
}

void
nrm__cache_forget(nrm_resource *mr)
{
    struct nrm__magazines *empty;
    do {
        empty = NULL;
        nrm__lock_acquire(&nrm__cache_lock);
        for (struct nrm__link *link = nrm__caches.next;
             link != &nrm__caches && empty == NULL; link = link->next) {
            struct nrm__cache *cache = nrm__cache_from(link);
            struct nrm__slot *slot = nrm__cache_slot_of(cache, mr);
            if (nrm__slot_is_of(slot, mr)) {
                nrm__cache_shut_out_locked(cache);
                empty = nrm__cache_clear_slot_locked(cache, slot);
                nrm__cache_let_in_locked(cache);
            }
        }
        nrm__lock_release(&nrm__cache_lock);
        nrm__magazines_destroy(empty);
    } while (empty != NULL);
}
