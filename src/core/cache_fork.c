/*
 * The caches over a fork: every owner but the one that forks is kept out, so that a
 * child finds all of them consistent, and what the child must not use is taken out of
 * its reach. Meanwhile pools look at what threads have of them: nobody needs it in a
 * child (core/left_out.h). It stays where it is, so a fork takes nothing from the
 * threads of the parent, and there is no moment at which they could have taken more.
 */
#include "core/cache_internal.h"

static void
fork_prepare(void)
{
    nrm__cache_shut_all_out_locked();
}

static void
fork_parent(void)
{
    for (struct nrm__link *link = nrm__caches.next; link != &nrm__caches;
         link = link->next) {
        nrm__cache_let_in_locked(nrm__cache_from(link));
    }
}

/* Nobody watches the pools of a child until a block goes the long way, as the next one
   does now. */
static void
keep_no_more(struct nrm__cache *cache)
{
    for (size_t i = 0; i < NRM__CACHE_SLOTS; i++) {
        if (cache->slots[i].magazines != NULL) {
            cache->slots[i].magazines->set_limit = 0;
        }
    }
}

/* Memory of the driver is of no use in a child: the long way says why. */
static void
forbid_driver_memory(struct nrm__cache *cache)
{
    for (size_t i = 0; i < NRM__CACHE_SLOTS; i++) {
        struct nrm__slot *slot = &cache->slots[i];
        if (slot->pool != NULL && slot->pool->kind != NRM_KIND_HOST) {
            slot->limit = slot->stream_limit = 0;
            nrm__slot_equip(slot, slot->magazines);
        }
    }
}

/* What other threads kept stays in their caches until the pool is drained. They may
   have looked in, and turned back, at the moment of the fork: they will not leave any
   more. */
static void
fork_child(void)
{
    struct nrm__cache *own = nrm__cache_own();
    for (struct nrm__link *link = nrm__caches.next; link != &nrm__caches;
         link = link->next) {
        if (nrm__cache_from(link) != own) {
            atomic_store(&nrm__cache_from(link)->inside, false);
        }
        forbid_driver_memory(nrm__cache_from(link));
        keep_no_more(nrm__cache_from(link));
        nrm__cache_let_in_locked(nrm__cache_from(link));
    }
}

/* ---- for pools ---- */

static void
visit_magazines(struct nrm__magazines *magazines, nrm__cell_visit *visit)
{
    for (size_t i = 0; magazines->set_nbytes != 0 && i < NRM__CACHE_SETS; i++) {
        for (uint32_t k = 0; k < magazines->sets[i].n; k++) {
            visit(magazines->pool, &magazines->sets[i].cells[k]);
        }
    }
    for (uint32_t i = 0; i < magazines->n_parked; i++) {
        visit(magazines->pool, &nrm__cache_parked_at(magazines, i)->cell);
    }
}

void
nrm__cache_fork_each_kept(nrm_resource *pool, nrm__cell_visit *visit)
{
    for (struct nrm__link *link = nrm__caches.next; link != &nrm__caches;
         link = link->next) {
        const struct nrm__slot *slot = nrm__cache_slot_of(nrm__cache_from(link), pool);
        if (nrm__slot_is_of(slot, pool) && slot->magazines != NULL) {
            visit_magazines(slot->magazines, visit);
        }
    }
}

const struct nrm__fork_hook nrm__cache_fork_hook = {
    .rank = NRM__RANK_CACHES,
    .lock = &nrm__cache_lock,
    .prepare = fork_prepare,
    .parent = fork_parent,
    .child = fork_child,
};
