/*
 * Adding up what holds a resource: see enclosed.h.
 *
 * The resources on top of it are a tree, mostly of one branch, and each of them must be
 * enclosed itself. Those that draw on it are listed under the lock of the list of
 * resources (core/resource.c), so none of them dies in the middle. Blocks hold their
 * owner by a reference each; a pool that holds itself (NRM__OPS_HOLDS) counts them
 * instead, and what threads keep of it, which is nobody's, is not among its live
 * blocks.
 */
#include "core/enclosed.h"

#include "base/bits.h"
#include "core/cache.h"

/* Who stacks more adaptors than that has to break the circle himself. */
#define MAX_DEPTH 1000

void
nrm__resource_add_object(nrm_resource *mr)
{
    atomic_fetch_add_explicit(&mr->n_objects, 1, memory_order_relaxed);
}

void
nrm__resource_remove_object(nrm_resource *mr)
{
    atomic_fetch_sub_explicit(&mr->n_objects, 1, memory_order_relaxed);
}

nrm_resource *
nrm__block_add_object(const void *ptr)
{
    nrm_block_info block;
    if (nrm_block_find(ptr, &block) != NRM_OK) {
        return NULL;
    }
    bool is_one = block.ptr == ptr && nrm_resource_calls_user_code(block.resource);
    if (is_one) {
        atomic_fetch_add_explicit(&block.resource->n_held, 1, memory_order_relaxed);
    }
    nrm_resource_release(block.resource);
    return is_one ? block.resource : NULL;
}

void
nrm__block_remove_object(nrm_resource *owner)
{
    if (owner != NULL) {
        atomic_fetch_sub_explicit(&owner->n_held, 1, memory_order_relaxed);
    }
}

/* Whether what is counted is all there is. */
static bool
adds_up(nrm_resource *mr, size_t n_drawers)
{
    size_t n_held = atomic_load_explicit(&mr->n_held, memory_order_relaxed);
    size_t n_known = atomic_load_explicit(&mr->n_objects, memory_order_relaxed);
    uint64_t count = atomic_load_explicit(&mr->refcount, memory_order_acquire);
    if (n_known > 1) {
        return false; /* one of them may not lead to the objects of the upstream */
    }
    n_known += n_drawers;
    if ((mr->ops->flags & NRM__OPS_HOLDS) == 0 || count >> 32 == 0) {
        return count == n_known + n_held;
    }
    nrm_statistics statistics = {0};
    if ((uint32_t)count == n_known) {
        nrm__cache_count(mr, &statistics);
    }
    return (uint32_t)count == n_known && statistics.current_count == (int64_t)n_held;
}

bool
nrm__is_enclosed_locked(nrm_resource *mr, int depth)
{
    size_t n_drawers = 0;
    const struct nrm__link *link;
    for (link = mr->drawers.next; link != &mr->drawers; link = link->next) {
        nrm_resource *by = NRM__CONTAINER(link, struct nrm__drawer, link)->by;
        if (depth >= MAX_DEPTH || !nrm__is_enclosed_locked(by, depth + 1)) {
            return false;
        }
        n_drawers++;
    }
    return adds_up(mr, n_drawers);
}

bool
nrm__is_under_locked(const nrm_resource *mr, const nrm_resource *other, int depth)
{
    const struct nrm__link *link;
    for (link = mr->drawers.next; link != &mr->drawers; link = link->next) {
        const nrm_resource *by = NRM__CONTAINER(link, struct nrm__drawer, link)->by;
        if (by == other ||
            (depth < MAX_DEPTH && nrm__is_under_locked(by, other, depth + 1))) {
            return true;
        }
    }
    return false;
}
