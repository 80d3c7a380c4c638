/*
 * The descriptions of segments (core/block_map.h). Look-ups read them without a lock,
 * also those of a segment that has just been removed, so one that is done with goes to
 * a list from which the next one comes, and its memory stays a segment's for ever. A
 * reader may have counted itself into it meanwhile, so a new one takes the count over
 * as it stands: but in a forked child, where those who would count themselves out do
 * not exist.
 */
#include <stdatomic.h>

#include "base/error.h"
#include "base/lock.h"
#include "core/block_map.h"
#include "core/nodes.h"
#include "os/fork.h"

static struct nrm__lock lock = NRM__LOCK_INIT(NRM__RANK_NODES);
static struct nrm__segment *unused; /* linked by `shadows` */

nrm_status
nrm__segment_create(nrm_resource *owner, void *ptr, size_t nbytes,
                    struct nrm__segment **out)
{
    nrm__lock_acquire(&lock);
    struct nrm__segment *segment = unused;
    if (segment != NULL) {
        unused = segment->shadows;
    }
    nrm__lock_release(&lock);
    if (segment == NULL) {
        segment = nrm__node_allocate(sizeof *segment);
    }
    if (segment == NULL) {
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe a segment");
    }
    segment->start = (uintptr_t)ptr;
    segment->nbytes = nbytes;
    segment->owner = owner;
    segment->node = 0;
    segment->upstream = (struct nrm__block){0};
    segment->shadows = NULL;
    segment->extra = NULL;
    segment->blocks_of = segment->cells_of = NULL;
    segment->sizes = NULL;
    segment->cell_nbytes = segment->reciprocal = segment->magazine = 0;
    segment->generation = 0;
    segment->entry = NULL;
    if (segment->fork_depth != nrm__fork_depth()) {
        segment->fork_depth = nrm__fork_depth();
        atomic_store(&segment->readers, 0);
    }
    nrm__list_init(&segment->link);
    *out = segment;
    return NRM_OK;
}

void
nrm__segment_destroy(struct nrm__segment *segment)
{
    if (segment == NULL) {
        return;
    }
    nrm__lock_acquire(&lock);
    segment->shadows = unused;
    unused = segment;
    nrm__lock_release(&lock);
}

static const struct nrm__fork_hook hook = {
    .rank = NRM__RANK_NODES,
    .lock = &lock,
};

__attribute__((constructor)) static void
start(void)
{
    nrm__fork_hook_add(&hook);
}
