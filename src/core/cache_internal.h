/* What core/cache.c and core/shard.c share. */
#ifndef NRM_CORE_CACHE_INTERNAL_H
#define NRM_CORE_CACHE_INTERNAL_H

#include "core/cache.h"

/* Guards the list of caches, every slot against all but its owner, and the list of shards. */
extern struct nrm__lock nrm__cache_lock;

/* An empty shard of the calling thread, in the list; NULL: no memory. */
struct nrm__shard *nrm__shard_create_locked(nrm_resource *mr);

/* Publishes the totals too, which sums have to take from the shards otherwise. */
void nrm__shard_publish_all(struct nrm__shard *shard);

/* Publishes all of it, and ends it. */
void nrm__shard_fold_locked(struct nrm__shard *shard);

#endif
