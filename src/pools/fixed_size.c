/*
 * FixedSizeMemoryResource: blocks of one size, cut out of chunks of its upstream.
 *
 * What is known of a block stands in a cell of an array beside its chunk, never in the
 * block: that may be device memory. The free blocks of a chunk form a stack, so that the
 * one given back last, which is still in the cache, goes out first; the chunks that have
 * free blocks stand in a list, the last one used first. Blocks that were never handed out
 * are in no stack but behind a mark, so a new chunk costs no walk over its cells, and they
 * still read as zero when the upstream's memory did.
 *
 * Memory that a GPU may touch is parked when it is given back, with the stamp of its epoch
 * (core/uses.h), and goes onto its stack when that epoch is done.
 *
 * One lock guards all of it and is held for a few steps, whatever the number of blocks:
 * an allocation pops, a deallocation pushes. Only a claim goes through a tree, of the
 * chunks. The lock is never held while the upstream, the driver or the epochs are asked.
 */
#include <string.h>

#include "base/assert.h"
#include "base/bits.h"
#include "base/error.h"
#include "base/lock.h"
#include "core/nodes.h"
#include "core/uses.h"
#include "nrm/options.h"
#include "nrm/pools.h"
#include "os/memory.h"
#include "pools/upstream.h"

#define DEFAULT_BLOCK_NBYTES NRM__MIB
#define DEFAULT_N_BLOCKS 128
#define WAIT_MIN_NBYTES NRM__MIB /* requests of fewer bytes never wait for the GPU */

enum cell_state { CELL_FREE, CELL_LIVE, CELL_CLAIMED, CELL_PARKED };

/* One block that was handed out before. */
struct cell {
    struct cell *next; /* free: given back before it; parked: given back after it */
    struct chunk *chunk;
    union {
        size_t nbytes;  /* requested; of a live or claimed one */
        uint64_t stamp; /* of a parked one */
    } as;
    enum cell_state state;
};

struct chunk {
    struct nrm__tree_node node; /* where its blocks lie */
    struct nrm__link link; /* among the chunks with free blocks, or those without */
    struct nrm__segment *segment;
    struct cell *cells; /* a mapping */
    struct cell *free;  /* those given back, the last one first */
    size_t n_free;      /* these, and the untouched ones */
    size_t n_touched;   /* the blocks before it were handed out before */
    size_t n_blocks;
    bool is_zero; /* untouched blocks read as zero */
};

struct fixed_size {
    nrm_resource base;
    size_t granule;
    size_t block_nbytes;      /* a multiple of the granule; of every block */
    unsigned block_shift;     /* the logarithm of it; 0: it is no power of two */
    size_t n_wanted;          /* blocks of a chunk at least */
    size_t alignment;         /* of every block */
    size_t segment_alignment; /* that the upstream is asked for */
    bool tracked;             /* freed memory waits for its epoch */
    size_t epoch_nbytes, parked_limit;
    uint64_t wait_limit_ns;
    bool waits_when_full;

    struct nrm__lock lock; /* guards what follows */
    struct nrm__tree chunks;
    struct nrm__link
        usable; /* chunks with free blocks: where the next one comes from */
    struct nrm__link full;
    struct cell *parked_first, *parked_last; /* oldest first */
    size_t n_blocks, n_free, n_parked, reserved_nbytes;
    uint64_t newest_stamp; /* of a parked block */
    size_t n_unclosed;     /* parked since an epoch was closed */
    int64_t n_epochs, n_waits;
};

static const struct nrm__ops fixed_size_ops;

static struct fixed_size *
fixed_from(nrm_resource *mr)
{
    NRM_ASSERT(mr->ops == &fixed_size_ops);
    return (struct fixed_size *)mr;
}

static struct chunk *
chunk_of(struct nrm__tree_node *node)
{
    return node != NULL ? NRM__CONTAINER(node, struct chunk, node) : NULL;
}

static uintptr_t
start_of(const struct fixed_size *fixed, const struct cell *cell)
{
    size_t index = (size_t)(cell - cell->chunk->cells);
    return cell->chunk->node.start + index * fixed->block_nbytes;
}

/* ---- blocks ---- */

/* A block that nobody finds yet; NULL: none is free. */
static struct cell *
take_locked(struct fixed_size *fixed, bool *out_is_zero)
{
    if (nrm__list_is_empty(&fixed->usable)) {
        return NULL;
    }
    struct chunk *chunk = NRM__CONTAINER(fixed->usable.next, struct chunk, link);
    struct cell *cell = chunk->free;
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
    cell->state = CELL_CLAIMED;
    return cell;
}

static void
free_locked(struct fixed_size *fixed, struct cell *cell)
{
    struct chunk *chunk = cell->chunk;
    cell->state = CELL_FREE;
    cell->next = chunk->free;
    chunk->free = cell;
    chunk->n_free++;
    fixed->n_free++;
    if (fixed->usable.next != &chunk->link) {
        nrm__list_remove(&chunk->link);
        nrm__list_insert_after(&fixed->usable, &chunk->link);
    }
}

/* Stamps a block that a GPU may still touch and puts it aside. */
static void
park_locked(struct fixed_size *fixed, struct cell *cell)
{
    cell->state = CELL_PARKED;
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

/* Frees the parked blocks whose epoch is done. */
static void
reclaim_locked(struct fixed_size *fixed)
{
    while (fixed->parked_first != NULL) {
        struct cell *cell = fixed->parked_first;
        if (!nrm__epoch_is_done(cell->as.stamp)) {
            return;
        }
        fixed->parked_first = cell->next;
        if (cell->next == NULL) {
            fixed->parked_last = NULL;
        }
        fixed->n_parked--;
        free_locked(fixed, cell);
    }
}

/* Parked blocks that no recorded epoch covers. */
static size_t
unclosed_locked(const struct fixed_size *fixed)
{
    return fixed->newest_stamp > nrm__epoch_newest_recorded() ? fixed->n_unclosed : 0;
}

/* The number of the block around `ptr`, which lies in the chunk's segment. */
static size_t
index_of(const struct fixed_size *fixed, const struct chunk *chunk, const void *ptr)
{
    size_t offset = (uintptr_t)ptr - chunk->node.start;
    return fixed->block_shift != 0 ? offset >> fixed->block_shift
                                   : offset / fixed->block_nbytes;
}

/* The block around `ptr` in a chunk if it was ever handed out, or NULL. */
static struct cell *
find_in_chunk_locked(const struct fixed_size *fixed, struct chunk *chunk,
                     const void *ptr)
{
    size_t index = index_of(fixed, chunk, ptr);
    return index < chunk->n_touched ? &chunk->cells[index] : NULL;
}

/* The same in whatever chunk it lies. */
static struct cell *
find_locked(struct fixed_size *fixed, const void *ptr)
{
    struct chunk *chunk = chunk_of(nrm__tree_find(&fixed->chunks, (uintptr_t)ptr));
    return chunk != NULL ? find_in_chunk_locked(fixed, chunk, ptr) : NULL;
}

static void
fill(const struct fixed_size *fixed, const struct cell *cell, struct nrm__block *out)
{
    out->ptr = (void *)start_of(fixed, cell);
    out->nbytes = cell->as.nbytes;
    out->capacity = fixed->block_nbytes;
    out->segment = cell->chunk->segment;
    out->record = NULL;
}

/* ---- chunks ---- */

static size_t
cells_nbytes(size_t n_blocks)
{
    return nrm__align_up(n_blocks * sizeof(struct cell), nrm__page_size());
}

static nrm_status
describe_chunk(struct fixed_size *fixed, struct nrm__segment *segment,
               struct chunk **out)
{
    struct chunk *chunk = nrm__node_allocate(sizeof *chunk);
    void *cells;
    if (chunk == NULL) {
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe a chunk");
    }
    chunk->n_blocks = chunk->n_free = segment->nbytes / fixed->block_nbytes;
    if (nrm__map(cells_nbytes(chunk->n_blocks), nrm__page_size(), &cells) != 0) {
        nrm__node_deallocate(chunk, sizeof *chunk);
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe %zu blocks",
                          segment->nbytes / fixed->block_nbytes);
    }
    chunk->cells = cells;
    chunk->node.start = segment->start;
    chunk->node.nbytes = chunk->n_blocks * fixed->block_nbytes;
    chunk->segment = segment;
    chunk->is_zero = (segment->upstream.flags & NRM__BLOCK_IS_ZERO) != 0;
    nrm__list_init(&chunk->link);
    *out = chunk;
    return NRM_OK;
}

static void
forget_chunk(struct chunk *chunk)
{
    nrm__unmap(chunk->cells, cells_nbytes(chunk->n_blocks));
    nrm__node_deallocate(chunk, sizeof *chunk);
}

/* Takes a chunk of `nbytes` of the upstream. */
static nrm_status
take_chunk(struct fixed_size *fixed, size_t nbytes)
{
    struct nrm__segment *segment;
    struct chunk *chunk = NULL;
    NRM_TRY(
        nrm__segment_take(&fixed->base, nbytes, fixed->segment_alignment, &segment));
    nrm_status status = describe_chunk(fixed, segment, &chunk);
    if (status != NRM_OK) {
        goto fail_chunk;
    }
    segment->extra = chunk;
    status = nrm__block_map_add_segment(segment);
    if (status != NRM_OK) {
        goto fail_map;
    }
    nrm__lock_acquire(&fixed->lock);
    nrm__tree_insert(&fixed->chunks, &chunk->node);
    nrm__list_append(&fixed->usable, &chunk->link);
    fixed->n_blocks += chunk->n_blocks;
    fixed->n_free += chunk->n_blocks;
    fixed->reserved_nbytes += segment->nbytes;
    nrm__lock_release(&fixed->lock);
    return NRM_OK;

fail_map:
    forget_chunk(chunk);
fail_chunk:
    nrm__segment_return(segment, false);
    return status;
}

/* The same in whole pages of the block map, whose look-ups take no lock; where the
   upstream has no room for these, exactly what is wanted. */
static nrm_status
grow(struct fixed_size *fixed)
{
    size_t exact = fixed->n_wanted * fixed->block_nbytes;
    size_t rounded = fixed->segment_alignment >= NRM__MAP_PAGE
                         ? nrm__align_up(exact, NRM__MAP_PAGE)
                         : exact;
    nrm_status status = take_chunk(fixed, rounded);
    if (status == NRM_OUT_OF_MEMORY && exact < rounded) {
        status = take_chunk(fixed, exact);
    }
    return status;
}

/* Takes a chunk out whose blocks are all free, the one that served last at last; NULL:
   there is none, or less than `keep_nbytes` would stay free. */
static struct chunk *
detach_locked(struct fixed_size *fixed, size_t keep_nbytes)
{
    for (struct nrm__link *link = fixed->usable.previous; link != &fixed->usable;
         link = link->previous) {
        struct chunk *chunk = NRM__CONTAINER(link, struct chunk, link);
        size_t n_left = fixed->n_free - chunk->n_free;
        if (chunk->n_free == chunk->n_blocks &&
            n_left * fixed->block_nbytes >= keep_nbytes) {
            nrm__list_remove(&chunk->link);
            nrm__tree_remove(&fixed->chunks, &chunk->node);
            fixed->n_blocks -= chunk->n_blocks;
            fixed->n_free = n_left;
            fixed->reserved_nbytes -= chunk->segment->nbytes;
            return chunk;
        }
    }
    return NULL;
}

/* Of a chunk that is out of the pool. */
static size_t
give_chunk_back(struct chunk *chunk, bool later)
{
    struct nrm__segment *segment = chunk->segment;
    size_t nbytes = segment->nbytes;
    nrm__block_map_remove_segment(segment); /* waits for those who read the cells */
    forget_chunk(chunk);
    nrm__segment_return(segment, later);
    return nbytes;
}

/* ---- allocation ---- */

static nrm_status
check_request(const struct fixed_size *fixed, const struct nrm__request *request)
{
    char asked[32], block[32];
    if (request->nbytes <= fixed->block_nbytes &&
        request->alignment <= fixed->alignment) {
        return NRM_OK;
    }
    nrm_format_nbytes(fixed->block_nbytes, block, sizeof block);
    if (request->nbytes > fixed->block_nbytes) {
        nrm_format_nbytes(request->nbytes, asked, sizeof asked);
        return nrm__error(NRM_OUT_OF_MEMORY,
                          "%s asked of a resource whose blocks have %s each", asked,
                          block);
    }
    return nrm__error(NRM_NOT_SUPPORTED,
                      "an alignment of %zu B asked of a resource whose blocks of %s "
                      "are aligned to %zu B",
                      request->alignment, block, fixed->alignment);
}

/* False: none is free. `out_stale`: the block when its chunk must be renewed first. */
static bool
try_take(struct fixed_size *fixed, const struct nrm__request *request,
         struct nrm__block *out, struct cell **out_stale, size_t *out_unclosed,
         size_t *out_parked)
{
    bool is_zero = false;
    nrm__lock_acquire(&fixed->lock);
    if (fixed->tracked) {
        reclaim_locked(fixed);
    }
    struct cell *cell = take_locked(fixed, &is_zero);
    if (cell != NULL) {
        cell->as.nbytes = request->nbytes;
        fill(fixed, cell, out);
        out->flags |= is_zero ? NRM__BLOCK_IS_ZERO : 0;
        bool is_current = nrm__segment_is_current(out->segment);
        cell->state = is_current ? CELL_LIVE : CELL_CLAIMED;
        *out_stale = is_current ? NULL : cell;
    }
    *out_unclosed = unclosed_locked(fixed);
    *out_parked = fixed->n_parked;
    nrm__lock_release(&fixed->lock);
    return cell != NULL;
}

static bool
close_epoch(struct fixed_size *fixed)
{
    bool closed = nrm__epoch_close();
    if (closed) {
        nrm__lock_acquire(&fixed->lock);
        fixed->n_epochs++;
        nrm__lock_release(&fixed->lock);
    }
    return closed;
}

static bool
wait_for_epoch(struct fixed_size *fixed, uint64_t limit_ns)
{
    nrm__lock_acquire(&fixed->lock);
    fixed->n_waits++;
    nrm__lock_release(&fixed->lock);
    return nrm__epoch_wait(limit_ns, limit_ns == UINT64_MAX);
}

/* A block: a free one, a parked one that is done, one of a new chunk, or a parked one
   after a wait: in this order, each tried once more after it made progress. */
static nrm_status
find_memory(struct fixed_size *fixed, const struct nrm__request *request,
            struct nrm__block *out, struct cell **out_stale)
{
    size_t unclosed, parked;
    bool may_wait = request->nbytes >= WAIT_MIN_NBYTES;
    for (;;) {
        if (try_take(fixed, request, out, out_stale, &unclosed, &parked)) {
            return NRM_OK;
        }
        if (parked != 0 && nrm__epoch_poll()) {
            continue;
        }
        if (unclosed != 0 && close_epoch(fixed)) {
            continue;
        }
        if (may_wait && parked * fixed->block_nbytes > fixed->parked_limit &&
            wait_for_epoch(fixed, fixed->wait_limit_ns)) {
            continue;
        }
        nrm_status status = grow(fixed);
        if (status == NRM_OK) {
            continue;
        }
        uint64_t wait_ns = fixed->waits_when_full ? UINT64_MAX
                           : may_wait             ? fixed->wait_limit_ns
                                                  : 0;
        if (status != NRM_OUT_OF_MEMORY || parked == 0 || wait_ns == 0 ||
            !wait_for_epoch(fixed, wait_ns)) {
            return status;
        }
    }
}

/* Keeps the epochs short, as in the pool: about epoch_nbytes of freed memory rotate and
   stay in the cache. */
static void
close_full_epoch(struct fixed_size *fixed)
{
    nrm__lock_acquire(&fixed->lock);
    size_t unclosed = unclosed_locked(fixed);
    nrm__lock_release(&fixed->lock);
    if (unclosed * fixed->block_nbytes >= fixed->epoch_nbytes) {
        (void)close_epoch(fixed);
    }
}

/* A block of a chunk that was made before a context was reset. It is not live before the
   upstream has made the chunk usable again, so nobody can give it back meanwhile. */
static nrm_status
renew(struct fixed_size *fixed, struct cell *cell)
{
    nrm_status status = nrm__segment_renew(cell->chunk->segment);
    nrm__lock_acquire(&fixed->lock);
    if (status == NRM_OK) {
        cell->state = CELL_LIVE;
    }
    else {
        free_locked(fixed, cell);
    }
    nrm__lock_release(&fixed->lock);
    return status;
}

static nrm_status
fixed_size_allocate(nrm_resource *mr, const struct nrm__request *request,
                    struct nrm__block *out)
{
    struct fixed_size *fixed = fixed_from(mr);
    struct cell *stale;
    NRM_TRY(check_request(fixed, request));
    if (fixed->tracked) {
        close_full_epoch(fixed);
    }
    NRM_TRY(nrm__pool_begin(mr));
    NRM_TRY(find_memory(fixed, request, out, &stale));
    return stale != NULL ? renew(fixed, stale) : NRM_OK;
}

/* ---- deallocation and look-ups ---- */

static void
fixed_size_deallocate(nrm_resource *mr, const struct nrm__block *block,
                      nrm_stream *stream)
{
    struct fixed_size *fixed = fixed_from(mr);
    /* A claimed block keeps its chunk. */
    struct chunk *chunk = block->segment->extra;
    struct cell *cell = &chunk->cells[index_of(fixed, chunk, block->ptr)];
    nrm__lock_acquire(&fixed->lock);
    NRM_ASSERT(cell->state == CELL_CLAIMED);
    if (fixed->tracked) {
        park_locked(fixed, cell);
    }
    else {
        free_locked(fixed, cell);
    }
    nrm__lock_release(&fixed->lock);
}

/* The segment is being looked up in, so its chunk is there, if perhaps out of the pool by
   now: then no block of it lives. */
static bool
fixed_size_find_block(nrm_resource *mr, struct nrm__segment *segment, const void *ptr,
                      struct nrm__block *out)
{
    struct fixed_size *fixed = fixed_from(mr);
    nrm__lock_acquire(&fixed->lock);
    struct cell *cell = find_in_chunk_locked(fixed, segment->extra, ptr);
    bool found = cell != NULL && cell->state == CELL_LIVE;
    if (found) {
        fill(fixed, cell, out);
    }
    nrm__lock_release(&fixed->lock);
    return found;
}

/* By the address: the segment that the block was found in may be gone by now, when the
   block was given back twice at once. */
static bool
fixed_size_claim_block(nrm_resource *mr, struct nrm__block *block)
{
    struct fixed_size *fixed = fixed_from(mr);
    nrm__lock_acquire(&fixed->lock);
    struct cell *cell = find_locked(fixed, block->ptr);
    bool claimed = cell != NULL && cell->state == CELL_LIVE &&
                   start_of(fixed, cell) == (uintptr_t)block->ptr;
    if (claimed) {
        cell->state = CELL_CLAIMED;
        block->segment = cell->chunk->segment;
    }
    nrm__lock_release(&fixed->lock);
    return claimed;
}

static void
fixed_size_unclaim_block(nrm_resource *mr, const struct nrm__block *block)
{
    struct fixed_size *fixed = fixed_from(mr);
    nrm__lock_acquire(&fixed->lock);
    struct cell *cell = find_locked(fixed, block->ptr);
    NRM_ASSERT(cell != NULL && cell->state == CELL_CLAIMED);
    cell->state = CELL_LIVE;
    cell->as.nbytes = block->nbytes;
    nrm__lock_release(&fixed->lock);
}

/* Every size up to the block's is one; a larger one the dispatcher asks for, in vain. */
static nrm_status
fixed_size_reallocate(nrm_resource *mr, struct nrm__block *block,
                      const struct nrm__request *request)
{
    return request->nbytes <= block->capacity ? NRM_OK : NRM_NOT_SUPPORTED;
}

/* Of a pool over this one, whose segment the block is. */
static nrm_status
fixed_size_renew_block(nrm_resource *mr, struct nrm__block *block)
{
    return nrm__segment_renew(block->segment);
}

/* ---- trim, statistics, check ---- */

static nrm_status
fixed_size_trim(nrm_resource *mr, size_t keep_nbytes, size_t *out_nbytes)
{
    struct fixed_size *fixed = fixed_from(mr);
    size_t unclosed, parked;
    for (;;) {
        nrm__lock_acquire(&fixed->lock);
        reclaim_locked(fixed);
        unclosed = unclosed_locked(fixed);
        parked = fixed->n_parked;
        nrm__lock_release(&fixed->lock);
        if (unclosed != 0 && close_epoch(fixed)) {
            continue;
        }
        if (parked == 0 || !wait_for_epoch(fixed, fixed->wait_limit_ns)) {
            break;
        }
    }
    for (;;) {
        nrm__lock_acquire(&fixed->lock);
        struct chunk *chunk = detach_locked(fixed, keep_nbytes);
        nrm__lock_release(&fixed->lock);
        if (chunk == NULL) {
            return NRM_OK;
        }
        *out_nbytes += give_chunk_back(chunk, false);
    }
}

static void
fixed_size_statistics(nrm_resource *mr, nrm_statistics *out)
{
    struct fixed_size *fixed = fixed_from(mr);
    nrm__lock_acquire(&fixed->lock);
    out->reserved_bytes += (int64_t)fixed->reserved_nbytes;
    out->parked_bytes += (int64_t)(fixed->n_parked * fixed->block_nbytes);
    out->epochs += fixed->n_epochs;
    out->waits += fixed->n_waits;
    nrm__lock_release(&fixed->lock);
}

/* Returns how many of the chunk's blocks are parked. */
static size_t
check_chunk_locked(const struct fixed_size *fixed, const struct chunk *chunk)
{
    size_t n_free = chunk->n_blocks - chunk->n_touched, n_parked = 0;
    NRM_ASSERT(chunk->n_touched <= chunk->n_blocks);
    for (size_t i = 0; i < chunk->n_touched; i++) {
        const struct cell *cell = &chunk->cells[i];
        NRM_ASSERT(cell->chunk == chunk);
        NRM_ASSERT(start_of(fixed, cell) + fixed->block_nbytes <=
                   chunk->segment->start + chunk->segment->nbytes);
        bool is_used = cell->state == CELL_LIVE || cell->state == CELL_CLAIMED;
        NRM_ASSERT(!is_used || cell->as.nbytes <= fixed->block_nbytes);
        n_free += cell->state == CELL_FREE;
        n_parked += cell->state == CELL_PARKED;
    }
    NRM_ASSERT(n_free == chunk->n_free);
    size_t n_stacked = chunk->n_blocks - chunk->n_touched;
    for (const struct cell *cell = chunk->free; cell != NULL; cell = cell->next) {
        NRM_ASSERT(cell->state == CELL_FREE && cell->chunk == chunk);
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
check_list_locked(struct fixed_size *fixed, const struct nrm__link *head, bool has_free,
                  struct sums *sums)
{
    for (const struct nrm__link *link = head->next; link != head; link = link->next) {
        struct chunk *chunk = NRM__CONTAINER(link, struct chunk, link);
        NRM_ASSERT((chunk->n_free != 0) == has_free);
        NRM_ASSERT(chunk->segment->extra == chunk);
        NRM_ASSERT(chunk_of(nrm__tree_find(&fixed->chunks, chunk->node.start)) ==
                   chunk);
        sums->n_chunks++;
        sums->n_blocks += chunk->n_blocks;
        sums->n_free += chunk->n_free;
        sums->n_parked += check_chunk_locked(fixed, chunk);
        sums->nbytes += chunk->segment->nbytes;
    }
}

static void
fixed_size_check(nrm_resource *mr)
{
    struct fixed_size *fixed = fixed_from(mr);
    struct sums sums = {0};
    size_t n_queued = 0;
    nrm__lock_acquire(&fixed->lock);
    check_list_locked(fixed, &fixed->usable, true, &sums);
    check_list_locked(fixed, &fixed->full, false, &sums);
    NRM_ASSERT(sums.n_chunks == fixed->chunks.n_nodes);
    NRM_ASSERT(sums.n_blocks == fixed->n_blocks);
    NRM_ASSERT(sums.n_free == fixed->n_free);
    NRM_ASSERT(sums.n_parked == fixed->n_parked);
    NRM_ASSERT(sums.nbytes == fixed->reserved_nbytes);
    for (struct cell *cell = fixed->parked_first; cell != NULL; cell = cell->next) {
        NRM_ASSERT(cell->state == CELL_PARKED);
        NRM_ASSERT((cell->next == NULL) == (cell == fixed->parked_last));
        n_queued++;
        NRM_ASSERT(n_queued <= sums.n_parked);
    }
    NRM_ASSERT(n_queued == sums.n_parked);
    nrm__lock_release(&fixed->lock);
}

/* ---- fork ---- */

static void
fixed_size_fork_prepare(nrm_resource *mr)
{
    nrm__lock_fork_prepare(&fixed_from(mr)->lock);
}

static void
fixed_size_fork_parent(nrm_resource *mr)
{
    nrm__lock_fork_parent(&fixed_from(mr)->lock);
}

static void
fixed_size_fork_child(nrm_resource *mr)
{
    nrm__lock_fork_child(&fixed_from(mr)->lock);
}

/* ---- life ---- */

/* No block is live. Chunks go upstream, where a source retires what the GPU may still
   touch: the parked blocks in them were freed before this moment. */
static void
fixed_size_finish(nrm_resource *mr)
{
    struct fixed_size *fixed = fixed_from(mr);
    struct chunk *chunk;
    while ((chunk = chunk_of(fixed->chunks.root)) != NULL) {
        nrm__tree_remove(&fixed->chunks, &chunk->node);
        (void)give_chunk_back(chunk, true);
    }
    nrm__lock_finish(&fixed->lock);
}

static const struct nrm__ops fixed_size_ops = {
    .class_name = "FixedSizeMemoryResource",
    .allocate = fixed_size_allocate,
    .deallocate = fixed_size_deallocate,
    .reallocate = fixed_size_reallocate,
    .find_block = fixed_size_find_block,
    .claim_block = fixed_size_claim_block,
    .unclaim_block = fixed_size_unclaim_block,
    .renew_block = fixed_size_renew_block,
    .trim = fixed_size_trim,
    .statistics = fixed_size_statistics,
    .check = fixed_size_check,
    .fork_prepare = fixed_size_fork_prepare,
    .fork_parent = fixed_size_fork_parent,
    .fork_child = fixed_size_fork_child,
    .finish = fixed_size_finish,
};

/* ---- construction ---- */

/* Chunks that fill whole pages of the block map are found without a lock; those of host
   memory are aligned to huge pages. Callbacks are asked for no more than the kind needs:
   they may not know how. */
static void
set_alignment(struct fixed_size *fixed, bool is_plain)
{
    const nrm_resource *upstream = fixed->base.upstream;
    size_t natural = fixed->block_nbytes & (~fixed->block_nbytes + 1);
    size_t chunk_nbytes = fixed->n_wanted * fixed->block_nbytes;
    bool maps = upstream->kind == NRM_KIND_HOST || upstream->kind == NRM_KIND_PINNED;
    if (is_plain || (upstream->ops->flags & NRM__OPS_OVERLAY)) {
        fixed->segment_alignment = fixed->granule;
    }
    else if (maps && chunk_nbytes >= NRM__HUGE_PAGE) {
        fixed->segment_alignment = NRM__HUGE_PAGE;
    }
    else {
        fixed->segment_alignment = NRM__MAP_PAGE;
    }
    fixed->alignment = nrm__min(natural, fixed->segment_alignment);
}

static nrm_status
set_sizes(struct fixed_size *fixed, const nrm_fixed_size_options *options)
{
    size_t nbytes = options->block_nbytes != 0 ? options->block_nbytes
                                               : DEFAULT_BLOCK_NBYTES;
    fixed->granule = nrm__kind_alignment(fixed->base.kind);
    fixed->n_wanted = options->n_blocks != 0 ? options->n_blocks : DEFAULT_N_BLOCKS;
    fixed->block_nbytes = nrm__align_up(nrm__min(nbytes, SIZE_MAX / 2), fixed->granule);
    if (fixed->n_wanted > (SIZE_MAX / 2 - NRM__MAP_PAGE) / fixed->block_nbytes) {
        return nrm__error(NRM_OUT_OF_MEMORY,
                          "%zu blocks of %zu B are more than an address space holds",
                          fixed->n_wanted, nbytes);
    }
    if (nrm__is_power_of_two(fixed->block_nbytes)) {
        fixed->block_shift = (unsigned)__builtin_ctzll(fixed->block_nbytes);
    }
    set_alignment(fixed, false);
    return NRM_OK;
}

static void
set_policy(struct fixed_size *fixed, nrm_reuse reuse)
{
    nrm_kind kind = fixed->base.kind;
    bool immediate = reuse == NRM_REUSE_DEFAULT ? nrm_option_get(NRM_OPT_REUSE) == 1
                                                : reuse == NRM_REUSE_IMMEDIATE;
    fixed->tracked = (kind == NRM_KIND_PINNED || kind == NRM_KIND_MANAGED) &&
                     !immediate;
    fixed->epoch_nbytes = (size_t)nrm_option_get(NRM_OPT_EPOCH_NBYTES);
    fixed->parked_limit = (size_t)nrm_option_get(NRM_OPT_PARKED_LIMIT);
    fixed->wait_limit_ns = (uint64_t)nrm_option_get(NRM_OPT_WAIT_LIMIT);
    fixed->waits_when_full = nrm_option_get(NRM_OPT_ON_EXHAUSTED) == 3;
}

/* The first chunk; an upstream that cannot align it shows it here. */
static nrm_status
preallocate(struct fixed_size *fixed)
{
    nrm_status status = grow(fixed);
    if (status == NRM_NOT_SUPPORTED && fixed->segment_alignment > fixed->granule) {
        set_alignment(fixed, true);
        status = grow(fixed);
    }
    return status;
}

nrm_status
nrm_fixed_size_create(nrm_resource *upstream, const nrm_fixed_size_options *options,
                      nrm_resource **out)
{
    nrm_fixed_size_options given = {0};
    nrm_resource *mr;
    if (options != NULL) {
        memcpy(&given, options, nrm__min(options->size, sizeof given));
    }
    NRM_TRY(nrm__resource_create(&fixed_size_ops, upstream->kind, upstream,
                                 sizeof(struct fixed_size), &mr));
    struct fixed_size *fixed = fixed_from(mr);
    nrm_status status = set_sizes(fixed, &given);
    if (status != NRM_OK) {
        nrm__resource_abandon(mr);
        return status;
    }
    set_policy(fixed, given.reuse);
    nrm__lock_init(&fixed->lock, NRM__RANK_POOL);
    nrm__list_init(&fixed->usable);
    nrm__list_init(&fixed->full);
    nrm__resource_publish(mr);
    status = preallocate(fixed);
    if (status != NRM_OK) {
        nrm_resource_release(mr);
        return status;
    }
    *out = mr;
    return NRM_OK;
}
