/*
 * What core/cache.c (the caches, their slots and magazines), cache_keep.c (what pools
 * put into them and take out), cache_drain.c (others at a cache), cache_fork.c and
 * shard.c share.
 */
#ifndef NRM_CORE_CACHE_INTERNAL_H
#define NRM_CORE_CACHE_INTERNAL_H

#include "base/list.h"
#include "core/cache.h"
#include "os/fork.h"

/* Guards the list of caches, every slot against all but its owner, and the list of
   shards. */
extern struct nrm__lock nrm__cache_lock;

/* The list of caches, by their links. */
extern struct nrm__link nrm__caches;

extern const struct nrm__fork_hook nrm__cache_fork_hook;

static inline struct nrm__cache *
nrm__cache_from(struct nrm__link *link)
{
    return NRM__CONTAINER(link, struct nrm__cache, link);
}

/* That of this thread; NULL: it has none yet. */
static inline struct nrm__cache *
nrm__cache_own(void)
{
    struct nrm__thread_state *state = nrm__thread_state_now();
    struct nrm__cache *cache = state != NULL ? state->cache : NULL;
    return cache != NULL || state == NULL ? cache : state->put_away;
}

/* ---- others at a cache: cache_drain.c ---- */

/* Keeps the owner out until `let_in`; waits until it is out. */
void nrm__cache_shut_out_locked(struct nrm__cache *cache);
void nrm__cache_let_in_locked(struct nrm__cache *cache);

/* The same of every cache, with one barrier. */
void nrm__cache_shut_all_out_locked(void);

/* ---- slots: the owner is out ---- */

static inline bool
nrm__slot_is_of(const struct nrm__slot *slot, const nrm_resource *mr)
{
    return atomic_load_explicit(&slot->mr, memory_order_relaxed) == mr;
}

/* Gives a slot magazines, or none (NULL), and sets its limits by them. */
void nrm__slot_equip(struct nrm__slot *slot, struct nrm__magazines *magazines);

/* The same for the slots of a pool and of all that lead to it. */
void nrm__cache_set_magazines_locked(struct nrm__cache *cache, nrm_resource *pool,
                                     struct nrm__magazines *magazines);

/* Forgets a slot, and those that lead to it. Returns magazines to give back, or
   NULL. */
struct nrm__magazines *nrm__cache_clear_slot_locked(struct nrm__cache *cache,
                                                    struct nrm__slot *slot);

/* ---- magazines: no lock is held; NULL is ignored ---- */

/* Recycles empty ones. */
void nrm__magazines_destroy(struct nrm__magazines *magazines);

/* Empties magazines that were taken away, and recycles them. The pool lives at least as
   long as they have something of it, and may be gone when they have nothing. */
void nrm__magazines_give_back(struct nrm__magazines *magazines);

/* ---- shards: shard.c ---- */

/* An empty shard of the calling thread, in the list; NULL: no memory. */
struct nrm__shard *nrm__shard_create_locked(nrm_resource *mr);

/* Publishes the totals too, which sums have to take from the shards otherwise. */
void nrm__shard_publish_all(struct nrm__shard *shard);

/* Publishes all of it, and ends it. */
void nrm__shard_fold_locked(struct nrm__shard *shard);

#endif
