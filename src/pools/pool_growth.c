/*
 * How a pool grows: how much it asks of its upstream next, and of what alignment, what
 * goes back before, and what it says when nothing more can be had.
 *
 * Segments double what there is, within bounds, so that a pool asks seldom and a small
 * program stays small; one for a large block has room for nothing else, so that it is
 * free again as a whole when the block is. What a growth will take is booked against
 * the limit before the upstream is asked, as the pool's lock is not held while that
 * works.
 */
#include "base/error.h"
#include "base/units.h"
#include "os/system.h"
#include "os/touch.h"
#include "pools/pool_internal.h"
#include "pools/pool_vmm.h"

#define PINNED_STEP_NBYTES (64 * NRM__MIB)
#define STUCK_STEP_NBYTES (16 * NRM__MIB) /* while waits for the GPU are in vain */
#define AHEAD_FRACTION 16 /* of the memory left that a segment ahead may take at once */

/* ---- what is asked of the upstream ---- */

/* What an upstream is asked to align segments to: whole huge pages where it maps memory
   itself, and the page of the block map where it can. */
static size_t
segment_alignment(const struct nrm__pool *pool)
{
    const nrm_resource *upstream = pool->base.upstream;
    bool maps = upstream->kind == NRM_KIND_HOST || upstream->kind == NRM_KIND_PINNED;
    if (pool->fixed.block_nbytes != 0) {
        return pool->fixed.chunk_alignment;
    }
    if (!maps || (upstream->flags & (NRM__OPS_OVERLAY | NRM__OPS_OWN_SIZES))) {
        return pool->alignment;
    }
    return NRM__HUGE_PAGE;
}

bool
nrm__pool_book_growth(struct nrm__pool *pool, size_t nbytes)
{
    nrm__lock_acquire(&pool->lock);
    size_t taken = pool->reserved_nbytes + pool->growing_nbytes;
    bool fits_limit = taken <= pool->maximum_nbytes &&
                      nbytes <= pool->maximum_nbytes - taken;
    if (fits_limit) {
        pool->growing_nbytes += nbytes;
    }
    nrm__lock_release(&pool->lock);
    return fits_limit;
}

void
nrm__pool_unbook_growth(struct nrm__pool *pool, size_t nbytes)
{
    nrm__lock_acquire(&pool->lock);
    pool->growing_nbytes -= nbytes;
    nrm__lock_release(&pool->lock);
}

/* While page-locked memory is registered the driver lets nobody else in: so much takes
   it a millisecond or two, a GiB 26. A program that the GPU holds up is not held up by
   that too. */
static size_t
largest_step_locked(const struct nrm__pool *pool)
{
    if (pool->base.kind != NRM_KIND_PINNED) {
        return pool->segment_nbytes;
    }
    return nrm__min(pool->segment_nbytes,
                    pool->parked_in_vain != 0 ? STUCK_STEP_NBYTES : PINNED_STEP_NBYTES);
}

/* What is free serves before a program is held back: where little may be parked, there
   is little at first. */
static size_t
first_segment(const struct nrm__pool *pool)
{
    size_t limit = pool->tracked ? nrm__max(pool->parked_limit, NRM__HUGE_PAGE)
                                 : SIZE_MAX;
    return nrm__min(limit, NRM__POOL_FIRST_SEGMENT_NBYTES);
}

size_t
nrm__pool_next_segment(struct nrm__pool *pool, size_t nbytes)
{
    if (pool->fixed.block_nbytes != 0) {
        return nrm__fixed_chunk_rounded(&pool->fixed);
    }
    nrm__lock_acquire(&pool->lock);
    size_t ahead = nrm__max(pool->reserved_nbytes, first_segment(pool));
    ahead = nrm__min(ahead, largest_step_locked(pool));
    nrm__lock_release(&pool->lock);
    /* A segment for one large block has room for nothing else, so that it is free again
       as a whole when the block is. */
    return nbytes > ahead ? nrm__align_up(nbytes, NRM__MAP_PAGE)
                          : nrm__align_up(ahead, NRM__HUGE_PAGE);
}

/* Ordinary pages that come ahead of demand are made present too, or the program would
   wait for them all the same; unless that would take much of what is left of the
   machine, or this thread is not on the node that they are for. */
static void
populate_ahead(const struct nrm__pool *pool, const struct nrm__block *block)
{
    if (pool->is_plain && pool->n_nodes == 1 &&
        block->nbytes <= nrm__touchable_nbytes() / AHEAD_FRACTION) {
        (void)nrm__populate(block->ptr, block->nbytes, 1); /* else they come later */
    }
}

/* Takes a segment of `nbytes` of the upstream and makes it one free block. */
static nrm_status
take_segment(struct nrm__pool *pool, size_t nbytes, size_t alignment, unsigned how)
{
    struct nrm__request request = {.nbytes = nbytes, .alignment = alignment};
    nrm_resource *upstream = pool->base.upstream;
    struct nrm__block block;
    NRM_TRY(nrm__take(upstream, &request, &block));
    if (how & NRM__GROW_AHEAD) {
        populate_ahead(pool, &block);
    }
    size_t usable = nrm__align_down(nbytes, pool->granule);
    nrm_status status = nrm__pool_enter_segment(pool, &block, usable, how);
    if (status != NRM_OK) {
        nrm__give_back(upstream, &block, false);
    }
    return status;
}

static nrm_status
grow_by(struct nrm__pool *pool, size_t nbytes, unsigned how)
{
    if (!nrm__pool_book_growth(pool, nbytes)) {
        return nrm__error(NRM_OUT_OF_MEMORY, "%s", "");
    }
    nrm_status status = take_segment(pool, nbytes, segment_alignment(pool), how);
    nrm__pool_unbook_growth(pool, nbytes);
    return status;
}

nrm_status
nrm__pool_grow_by(struct nrm__pool *pool, size_t nbytes)
{
    return grow_by(pool, nbytes, 0);
}

nrm_status
nrm__pool_grow_ahead(struct nrm__pool *pool, size_t nbytes)
{
    nrm_status status = nrm__pool_vmm_grow(pool, nbytes, NRM__GROW_AHEAD);
    return status == NRM_NOT_SUPPORTED ? grow_by(pool, nbytes, NRM__GROW_AHEAD)
                                       : status;
}

/* ---- for a request ---- */

nrm_status
nrm__pool_grow_at_first(struct nrm__pool *pool, size_t nbytes)
{
    nrm_status status = nrm__pool_vmm_grow(pool, nbytes, NRM__GROW_EXACT);
    return status == NRM_OUT_OF_MEMORY || status == NRM_NOT_SUPPORTED
               ? nrm__pool_grow_by(pool, nbytes)
               : status;
}

/* Maps what is missing: beside what is free, so that no segment is in the way. */
static nrm_status
grow_mapped(struct nrm__pool *pool, size_t needed)
{
    nrm_status status = nrm__pool_vmm_grow(pool, needed, 0);
    if (status == NRM_OUT_OF_MEMORY && needed > pool->maximum_nbytes) {
        return status; /* nothing that went back would help */
    }
    if (status == NRM_OUT_OF_MEMORY) {
        status = nrm__pool_vmm_grow(pool, needed, NRM__GROW_EXACT);
    }
    if (status == NRM_OUT_OF_MEMORY && nrm__pool_give_segments_back(pool, 0, 0) != 0) {
        status = nrm__pool_vmm_grow(pool, needed, NRM__GROW_EXACT);
    }
    return status;
}

/* Segments that were made for one large block and are free now go back first: what they
   held does not fit, and would only pile up. */
static nrm_status
grow(struct nrm__pool *pool, size_t nbytes, size_t alignment)
{
    size_t needed = nrm__max(nbytes, pool->fixed.chunk_nbytes);
    size_t have = segment_alignment(pool);
    if (alignment > have) {
        needed += alignment - pool->alignment;
    }
    size_t exact = nrm__align_up(needed, pool->granule);
    nrm_status status = grow_mapped(pool, needed);
    if (status != NRM_NOT_SUPPORTED) {
        return status == NRM_OUT_OF_MEMORY ? nrm__pool_grow_by(pool, exact) : status;
    }
    size_t rounded = nrm__pool_next_segment(pool, needed);
    nrm__pool_give_segments_back(pool, pool->segment_nbytes, 0);
    status = nrm__pool_grow_by(pool, rounded);
    if (status == NRM_OUT_OF_MEMORY && exact < rounded) {
        status = nrm__pool_grow_by(pool, exact);
    }
    return status;
}

/* Of more than stays for good somebody looks whether it lies idle: the threads may keep
   all of it when it is freed, and then no free comes here. */
static void
watch_growth(struct nrm__pool *pool)
{
    nrm__lock_acquire(&pool->lock);
    bool begins = nrm__pool_begins_watch_locked(pool);
    nrm__lock_release(&pool->lock);
    if (begins) {
        nrm__background_watch(&pool->watched);
    }
}

/* Grows so that a block of `nbytes` fits. */
nrm_status
nrm__pool_grow(struct nrm__pool *pool, size_t nbytes, size_t alignment)
{
    nrm_status status = grow(pool, nbytes, alignment);
    if (status == NRM_OK) {
        watch_growth(pool);
    }
    return status;
}

/* ---- when nothing more can be had ---- */

static size_t
largest_of_locked(const struct nrm__pool_bins *bins)
{
    size_t largest = 0;
    if (bins->words == 0) {
        return 0;
    }
    unsigned word = 63 - (unsigned)__builtin_clzll(bins->words);
    unsigned class = word * 64 + 63 - (unsigned)__builtin_clzll(bins->bits[word]);
    const struct nrm__link *head = &bins->heads[class];
    for (const struct nrm__link *link = head->next; link != head; link = link->next) {
        largest =
            nrm__max(largest, NRM__CONTAINER(link, struct nrm__pool_block, link)->size);
    }
    return largest;
}

static size_t
largest_free_locked(const struct nrm__pool *pool)
{
    size_t largest = 0;
    for (unsigned node = 0; node < pool->n_nodes; node++) {
        largest = nrm__max(largest, largest_of_locked(&pool->bins[node]));
    }
    return largest;
}

nrm_status
nrm__pool_explain(struct nrm__pool *pool, const nrm_error *said, size_t asked)
{
    nrm__lock_acquire(&pool->lock);
    size_t reserved = pool->reserved_nbytes, live = pool->live_nbytes;
    size_t captured = nrm__pool_captured_locked(pool);
    size_t parked = pool->parked_nbytes + nrm__pool_pending_locked(pool) - captured;
    size_t largest = largest_free_locked(pool);
    nrm__lock_release(&pool->lock);
    bool is_limited = pool->maximum_nbytes < SIZE_MAX / 2;
    bool is_full = said->message[0] == '\0';
    return nrm__error_native(
        NRM_OUT_OF_MEMORY, said->native_code, said->native_name,
        "%s%s: %s asked, %s%s, %s reserved, %s in use, largest free block %s, %s freed "
        "but not done on the GPU%s%s%s",
        is_full ? "the pool is full" : said->message, is_full ? "" : "; the pool",
        nrm__nbytes_text(asked).chars, is_limited ? "limit " : "no limit",
        is_limited ? nrm__nbytes_text(pool->maximum_nbytes).chars : "",
        nrm__nbytes_text(reserved).chars, nrm__nbytes_text(live).chars,
        nrm__nbytes_text(largest).chars, nrm__nbytes_text(parked).chars,
        captured != 0 ? ", " : "",
        captured != 0 ? nrm__nbytes_text(captured).chars : "",
        captured != 0 ? " freed but held by captured graphs" : "");
}
