/*
 * The blocks of a fixed-size resource: stacks, parking, look-ups, and the check of all
 * of it. Nothing here asks the upstream or the driver, and everything runs under the
 * resource's lock.
 */
#include "pools/fixed_size_internal.h"

#include "base/assert.h"
#include "core/uses.h"

/* ---- blocks ---- */

struct nrm__fixed_cell *
nrm__fixed_take_locked(struct nrm__fixed_size *fixed, bool *out_is_zero)
{
    if (nrm__list_is_empty(&fixed->usable)) {
        return NULL;
    }
    struct nrm__fixed_chunk *chunk =
        NRM__CONTAINER(fixed->usable.next, struct nrm__fixed_chunk, link);
    struct nrm__fixed_cell *cell = chunk->free;
    *out_is_zero = cell == NULL && chunk->is_zero;
    if (cell != NULL) {
        chunk->free = cell->next;
    }
    else {
        cell = &chunk->cells[chunk->n_touched++];
        cell->chunk = chunk;
    }
    chunk->n_free--;
    fixed->n_free--;
    if (chunk->n_free == 0) {
        nrm__list_remove(&chunk->link);
        nrm__list_insert_after(&fixed->full, &chunk->link);
    }
    cell->state = NRM__FIXED_CLAIMED;
    return cell;
}

void
nrm__fixed_free_locked(struct nrm__fixed_size *fixed, struct nrm__fixed_cell *cell)
{
    struct nrm__fixed_chunk *chunk = cell->chunk;
    cell->state = NRM__FIXED_FREE;
    cell->next = chunk->free;
    chunk->free = cell;
    chunk->n_free++;
    fixed->n_free++;
    if (fixed->usable.next != &chunk->link) {
        nrm__list_remove(&chunk->link);
        nrm__list_insert_after(&fixed->usable, &chunk->link);
    }
}

void
nrm__fixed_park_locked(struct nrm__fixed_size *fixed, struct nrm__fixed_cell *cell)
{
    cell->state = NRM__FIXED_PARKED;
    cell->as.stamp = nrm__epoch_stamp();
    cell->next = NULL;
    if (fixed->newest_stamp <= nrm__epoch_newest_recorded()) {
        fixed->n_unclosed = 0;
    }
    if (cell->as.stamp > fixed->newest_stamp) {
        fixed->newest_stamp = cell->as.stamp;
    }
    fixed->n_unclosed++;
    fixed->n_parked++;
    if (fixed->parked_last != NULL) {
        fixed->parked_last->next = cell;
    }
    else {
        fixed->parked_first = cell;
    }
    fixed->parked_last = cell;
}

void
nrm__fixed_reclaim_locked(struct nrm__fixed_size *fixed)
{
    while (fixed->parked_first != NULL) {
        struct nrm__fixed_cell *cell = fixed->parked_first;
        if (!nrm__epoch_is_done(cell->as.stamp)) {
            return;
        }
        fixed->parked_first = cell->next;
        if (cell->next == NULL) {
            fixed->parked_last = NULL;
        }
        fixed->n_parked--;
        nrm__fixed_free_locked(fixed, cell);
    }
}

size_t
nrm__fixed_unclosed_locked(const struct nrm__fixed_size *fixed)
{
    return fixed->newest_stamp > nrm__epoch_newest_recorded() ? fixed->n_unclosed : 0;
}

struct nrm__fixed_cell *
nrm__fixed_find_in_chunk_locked(const struct nrm__fixed_size *fixed,
                                struct nrm__fixed_chunk *chunk, const void *ptr)
{
    size_t index = nrm__fixed_index_of(fixed, chunk, ptr);
    return index < chunk->n_touched ? &chunk->cells[index] : NULL;
}

struct nrm__fixed_cell *
nrm__fixed_find_locked(const struct nrm__fixed_size *fixed, const void *ptr)
{
    struct nrm__fixed_chunk *chunk =
        nrm__fixed_chunk_of(nrm__tree_find(&fixed->chunks, (uintptr_t)ptr));
    return chunk != NULL ? nrm__fixed_find_in_chunk_locked(fixed, chunk, ptr) : NULL;
}

/* ---- the check ---- */

/* Returns how many of the chunk's blocks are parked. */
static size_t
check_chunk_locked(const struct nrm__fixed_size *fixed,
                   const struct nrm__fixed_chunk *chunk)
{
    size_t n_free = chunk->n_blocks - chunk->n_touched, n_parked = 0;
    NRM_ASSERT(chunk->n_touched <= chunk->n_blocks);
    for (size_t i = 0; i < chunk->n_touched; i++) {
        const struct nrm__fixed_cell *cell = &chunk->cells[i];
        NRM_ASSERT(cell->chunk == chunk);
        NRM_ASSERT(nrm__fixed_start_of(fixed, cell) + fixed->shape.block_nbytes <=
                   chunk->segment->start + chunk->segment->nbytes);
        bool is_used = cell->state == NRM__FIXED_LIVE ||
                       cell->state == NRM__FIXED_CLAIMED;
        NRM_ASSERT(!is_used || cell->as.nbytes <= fixed->shape.block_nbytes);
        n_free += cell->state == NRM__FIXED_FREE;
        n_parked += cell->state == NRM__FIXED_PARKED;
    }
    NRM_ASSERT(n_free == chunk->n_free);
    size_t n_stacked = chunk->n_blocks - chunk->n_touched;
    for (const struct nrm__fixed_cell *cell = chunk->free; cell != NULL;
         cell = cell->next) {
        NRM_ASSERT(cell->state == NRM__FIXED_FREE && cell->chunk == chunk);
        n_stacked++;
        NRM_ASSERT(n_stacked <= n_free); /* not a ring */
    }
    NRM_ASSERT(n_stacked == n_free);
    return n_parked;
}

struct sums {
    size_t n_chunks, n_blocks, n_free, n_parked, nbytes;
};

static void
check_list_locked(struct nrm__fixed_size *fixed, const struct nrm__link *head,
                  bool has_free, struct sums *sums)
{
    for (const struct nrm__link *link = head->next; link != head; link = link->next) {
        struct nrm__fixed_chunk *chunk =
            NRM__CONTAINER(link, struct nrm__fixed_chunk, link);
        NRM_ASSERT((chunk->n_free != 0) == has_free);
        NRM_ASSERT(chunk->segment->extra == chunk);
        NRM_ASSERT(nrm__fixed_chunk_of(
                       nrm__tree_find(&fixed->chunks, chunk->node.start)) == chunk);
        sums->n_chunks++;
        sums->n_blocks += chunk->n_blocks;
        sums->n_free += chunk->n_free;
        sums->n_parked += check_chunk_locked(fixed, chunk);
        sums->nbytes += chunk->segment->nbytes;
    }
}

void
nrm__fixed_check_locked(struct nrm__fixed_size *fixed)
{
    struct sums sums = {0};
    size_t n_queued = 0;
    check_list_locked(fixed, &fixed->usable, true, &sums);
    check_list_locked(fixed, &fixed->full, false, &sums);
    NRM_ASSERT(sums.n_chunks == fixed->chunks.n_nodes);
    NRM_ASSERT(sums.n_blocks == fixed->n_blocks);
    NRM_ASSERT(sums.n_free == fixed->n_free);
    NRM_ASSERT(sums.n_parked == fixed->n_parked);
    NRM_ASSERT(sums.nbytes == fixed->reserved_nbytes);
    for (struct nrm__fixed_cell *cell = fixed->parked_first; cell != NULL;
         cell = cell->next) {
        NRM_ASSERT(cell->state == NRM__FIXED_PARKED);
        NRM_ASSERT((cell->next == NULL) == (cell == fixed->parked_last));
        n_queued++;
        NRM_ASSERT(n_queued <= sums.n_parked);
    }
    NRM_ASSERT(n_queued == sums.n_parked);
}
