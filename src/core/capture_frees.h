/*
 * Memory that dies inside a capture, and may live on in the graph.
 *
 * What is submitted to a stream that is being captured does not run: the graph does it,
 * as often as it is launched. An array that a captured copy reads, and that dies before
 * the capture ends, is read by every launch. No event covers that. So while whoever
 * captures has named the stream (nrm_capture_own_frees), host-accessible blocks that
 * are given back become uses of its graph and wait for that (core/known_uses.h): all of
 * them, as nobody says which of them the captured work touches.
 */
#ifndef NRM_CORE_CAPTURE_FREES_H
#define NRM_CORE_CAPTURE_FREES_H

#include <stdatomic.h>

#include "core/ops.h"

struct nrm__use;

/* How many graphs there are that own what dies. */
extern atomic_uint nrm__capture_n_owners;

/* One load. */
static inline bool
nrm__capture_owns_frees(void)
{
    return atomic_load_explicit(&nrm__capture_n_owners, memory_order_relaxed) != 0;
}

/* Whether a block that is given back now belongs to a graph. */
bool nrm__capture_owns(const struct nrm__block *block);

/* Adds the uses of all graphs that own it to the list of a claimed block. Calls no
   driver. */
void nrm__capture_add_uses(const struct nrm__block *block, struct nrm__use **list);

#endif
