/*
 * What pools/pool_order.c and pools/pool_pending.c share. Functions named ..._locked:
 * the caller holds the pool's lock; the others but the tests of values: nobody does.
 */
#ifndef NRM_POOLS_POOL_ORDER_H
#define NRM_POOLS_POOL_ORDER_H

#include "pools/pool_internal.h"

enum { NRM__POOL_N_LISTS = NRM__POOL_N_STREAMS + 1 }; /* the last one: others */

/* NULL: not there yet. */
struct nrm__pool_list *nrm__pool_list_at(struct nrm__pool_order *order, unsigned i);

bool nrm__pool_is_of_list(const struct nrm__pool_list *list, struct nrm__order_tag tag);

/* Frees what is known to be done, of all lists, and calls nobody; true: something
   was. */
bool nrm__pool_promote_locked(struct nrm__pool *pool);

/* Whether the list is of memory that a graph holds, and may use again in its
   capture. */
static inline bool
nrm__pool_is_captured_list(const struct nrm__pool_list *list)
{
    return nrm__order_is_captured(list->stream);
}

/* Asks the driver; true: more is done than before. */
bool nrm__pool_poll(struct nrm__pool *pool);

/* Looks again and again, detached, for `limit_ns` at most (UINT64_MAX: as long as it
   takes), until more is done. */
bool nrm__pool_wait_for_more(struct nrm__pool *pool, uint64_t limit_ns);

/* The stream that the work is ordered by, NULL: as the host's. The handles 0, 1 and 2
   mean streams of a device; where that is not known, as over memory of other people's,
   nobody can ask about them. */
nrm_stream *nrm__pool_stream_on(int device, nrm_stream *stream);

#endif
