/*
 * Whether all that keeps a resource alive is known.
 *
 * A garbage collector sees its own objects, and what these hold of each other. A
 * resource that calls functions of such a program holds them, and they may hold what
 * leads to the resource again: a pool on top of it, a buffer of that. For the collector
 * to find such a circle it must be told which references to the resource come from its
 * own objects, and that there are none besides. So they are counted: references of
 * objects, references of resources on top of it, and live blocks that are held by an
 * object, or by a pool as a segment. What is left over (a name of the registry, a
 * current resource, the handler of an array, memory of a bare allocate(), another
 * thread's or extension's reference) is somebody whom the collector does not know.
 */
#ifndef NRM_CORE_ENCLOSED_H
#define NRM_CORE_ENCLOSED_H

#include "core/ops.h"

/* `by` holds `of`, besides the reference that it takes; until it lets go of it. A
   resource does so for its upstream by itself. */
void nrm__drawer_add(struct nrm__drawer *drawer, nrm_resource *by, nrm_resource *of);
void nrm__drawer_remove(struct nrm__drawer *drawer);

/* One reference of the caller's is that of an object, through which the objects of what
   the resource draws on can be reached. No longer, before it is given up. */
void nrm__resource_add_object(nrm_resource *mr);
void nrm__resource_remove_object(nrm_resource *mr);

/* The live block at `ptr` is an object's, which can reach that of the resource that it
   came through: its owner, borrowed as long as the block is live. NULL: nothing was
   noted. Undone before it is given back. */
nrm_resource *nrm__block_add_object(const void *ptr);
void nrm__block_remove_object(nrm_resource *owner);

/*
 * True when one object holds `*mr`, and everything else that does is reached only by
 * objects that can reach that one. When others are at work meanwhile it may be false
 * for nothing, and true of what they take hold of or let go at the very moment: who
 * acts on it looks at the references once more. False where nothing is.
 */
bool nrm__resource_is_enclosed(nrm_resource *const *mr);

/* The same, and that there is nothing else that holds it. */
bool nrm__resource_is_alone(nrm_resource *const *mr);

/* The resource in a place that is emptied when it dies, retained; NULL: it is empty. */
nrm_resource *nrm__resource_in(nrm_resource *const *mr);

/* Empties such a place, from the end of the resource. */
void nrm__resource_forget(nrm_resource **mr);

/* Whether requests to `other` can come to `mr`, which is another one. */
bool nrm__resource_is_under(const nrm_resource *mr, const nrm_resource *other);

/* Of the above, for who holds the lock of the list of resources. */
bool nrm__is_enclosed_locked(nrm_resource *mr, int depth);
bool nrm__is_under_locked(const nrm_resource *mr, const nrm_resource *other, int depth);

#endif
