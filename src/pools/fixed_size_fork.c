/*
 * A fixed-size resource over a fork: as pools/pool_fork.c, with the blocks of a chunk,
 * of which those behind the mark were never handed out.
 */
#include "core/left_out.h"
#include "pools/fixed_size_internal.h"

static struct nrm__fixed_size *
fixed_from(nrm_resource *mr)
{
    return (struct nrm__fixed_size *)mr;
}

/* What lies between the blocks that are in use. */
static void
offer_chunk_locked(const struct nrm__fixed_size *fixed,
                   const struct nrm__fixed_chunk *chunk)
{
    const struct nrm__segment *segment = chunk->segment;
    uintptr_t idle = segment->start;
    for (size_t i = 0; i < chunk->n_touched; i++) {
        const struct nrm__fixed_cell *cell = &chunk->cells[i];
        if (cell->state == NRM__FIXED_LIVE || cell->state == NRM__FIXED_CLAIMED) {
            uintptr_t start = nrm__fixed_start_of(fixed, cell);
            nrm__left_out_offer(idle, start - idle);
            idle = start + fixed->shape.block_nbytes;
        }
    }
    nrm__left_out_offer(idle, segment->start + segment->nbytes - idle);
}

static void
offer_list_locked(const struct nrm__fixed_size *fixed, const struct nrm__link *head)
{
    for (const struct nrm__link *link = head->next; link != head; link = link->next) {
        const struct nrm__fixed_chunk *chunk =
            NRM__CONTAINER(link, struct nrm__fixed_chunk, link);
        if (nrm__block_is_registered(&chunk->segment->upstream)) {
            offer_chunk_locked(fixed, chunk);
        }
    }
}

void
nrm__fixed_fork_prepare(nrm_resource *mr)
{
    struct nrm__fixed_size *fixed = fixed_from(mr);
    if (mr->kind == NRM_KIND_PINNED && nrm__left_out_scope() == NRM__LEFT_OUT_IDLE) {
        offer_list_locked(fixed, &fixed->usable);
        offer_list_locked(fixed, &fixed->full); /* in which some may be parked */
    }
}
