/*
 * How a pool finds the memory of a request.
 *
 * What is free serves first, of the NUMA node of this thread where a pool has several.
 * When nothing fits, a ladder of steps is climbed, each once: what the GPU is done
 * with, what this thread keeps, a bounded wait, growth, what other nodes have, what
 * other threads keep, an exchange of segments, a last wait. No lock is held across any
 * of them.
 */
#include "pools/pool_internal.h"

#include "base/assert.h"
#include "base/bits.h"
#include "base/error.h"
#include "core/known_uses.h"
#include "core/uses.h"
#include "os/memory.h"
#include "os/system.h"

#define WAIT_MIN_NBYTES NRM__MIB /* requests of fewer bytes never wait for the GPU */
#define PARKED_BLOCKS 4          /* parked blocks of the size asked that are let be */
#define AGAIN_FRACTION 4 /* of the limit of a wait, for one after it was in vain */
#define GROW_TRIES 16    /* of a growth that others took the fruit of */
#define SLACK_SHIFT 3    /* a block that moves to grow gets an eighth more */
#define SLACK_MIN_NBYTES (4 * NRM__KIB)
#define OWN_MIN_NBYTES NRM__MIB /* from here on a growing block has pages of its own */
#define OWN_FRACTION 512        /* and of what is reserved */
#define OWN_LOOKS 64 /* free blocks looked at for a segment that it may have */

/* ---- memory ---- */

/* What the pool takes for a request: whole granules, and room for a block that
   grows. */
size_t
nrm__pool_block_nbytes(const struct nrm__pool *pool, const struct nrm__request *request)
{
    size_t nbytes = request->nbytes;
    if (pool->fixed.block_nbytes != 0) {
        return pool->fixed.block_nbytes;
    }
    if ((request->flags & NRM__REQUEST_GROWING) && nbytes >= SLACK_MIN_NBYTES &&
        nbytes <= pool->maximum_nbytes / 2) {
        nbytes += nbytes >> SLACK_SHIFT;
    }
    return nrm__cached_nbytes(nbytes, pool->granule, pool->rounded_max, pool->shift);
}

bool
nrm__pool_close_epoch_of(struct nrm__pool *pool, uint64_t n_blocks)
{
    bool closed = nrm__epoch_close_of(n_blocks);
    if (closed) {
        atomic_fetch_add_explicit(&pool->n_epochs, 1, memory_order_relaxed);
    }
    return closed;
}

bool
nrm__pool_close_epoch(struct nrm__pool *pool)
{
    return nrm__pool_close_epoch_of(pool, 0);
}

/* Waits for the GPU: once for the oldest epoch, as long again as the GPU has lately
   needed, and each time that twice as much is parked as when a wait was in vain, for a
   part of the limit. So a program that has just begun to run ahead is held back too,
   and an endless kernel costs one wait and a few short ones in all while the pool grows
   by powers of two, which takes its time too. */
bool
nrm__pool_wait_for_epoch(struct nrm__pool *pool, uint64_t limit_ns)
{
    nrm__lock_acquire(&pool->lock);
    size_t parked = pool->parked_nbytes;
    bool insists = parked >= 2 * pool->parked_in_vain;
    bool is_again = insists && pool->parked_in_vain != 0 && limit_ns != UINT64_MAX;
    pool->n_waits++;
    nrm__lock_release(&pool->lock);
    bool more =
        nrm__epoch_wait(is_again ? limit_ns / AGAIN_FRACTION : limit_ns, insists);
    nrm__lock_acquire(&pool->lock);
    if (more) {
        pool->parked_in_vain = 0;
    }
    else if (insists) {
        pool->parked_in_vain = parked;
    }
    nrm__lock_release(&pool->lock);
    return more;
}

/* ---- the search for memory ---- */

/* The search for the memory of one request, once nothing that is free fits. */
struct search {
    struct nrm__pool *pool;
    const struct nrm__request *request;
    size_t alignment;
    unsigned node;           /* whose memory it should be */
    bool anywhere;           /* it may be that of any */
    size_t nbytes;           /* wanted: with room to grow, and for a shift */
    size_t exact;            /* enough */
    size_t unclosed, parked; /* when the pool was looked at last */
    bool is_decaying;        /* and that the background thread had some of it */
    struct nrm__pool_block *found;
    nrm_status status; /* of the last growth */
    nrm_error said;    /* the upstream's words when that failed; empty: the limit's */
};

static struct nrm__pool_block *
try_take(struct search *search, size_t nbytes)
{
    struct nrm__pool *pool = search->pool;
    nrm__lock_acquire(&pool->lock);
    if (pool->tracked) {
        nrm__pool_reclaim_locked(pool);
    }
    struct nrm__pool_block *block = nrm__pool_take_from_locked(
        pool, &pool->bins[search->node], nbytes, search->alignment);
    for (unsigned i = 0; search->anywhere && block == NULL && i < pool->n_nodes; i++) {
        block =
            nrm__pool_take_from_locked(pool, &pool->bins[i], nbytes, search->alignment);
    }
    search->unclosed = nrm__pool_unclosed_locked(pool);
    search->parked = pool->parked_nbytes;
    search->is_decaying = nrm__pool_is_decaying_locked(pool);
    nrm__lock_release(&pool->lock);
    return block;
}

static bool
look(struct search *search)
{
    search->found = try_take(search, search->nbytes);
    if (search->found == NULL && search->exact < search->nbytes) {
        search->found = try_take(search, search->exact);
    }
    return search->found != NULL;
}

static bool
promote(struct search *search)
{
    return search->parked != 0 && nrm__epoch_poll() && look(search);
}

static bool
promote_unclosed(struct search *search)
{
    return search->unclosed != 0 && nrm__pool_close_epoch(search->pool) && look(search);
}

/* What this thread has parked, so that what follows decides over it too. */
static bool
take_parked(struct search *search)
{
    return search->pool->tracked && nrm__pool_take_parked(search->pool) && look(search);
}

/* What this thread keeps comes first: that of others only when nothing else helps. */
static bool
take_own(struct search *search)
{
    return nrm__pool_take_from_thread(search->pool) && look(search);
}

/* What loses its pages just now, or comes from other threads, is free in a moment. */
static bool
await_decay(struct search *search)
{
    while (search->is_decaying) {
        nrm__pool_await_decay(search->pool);
        if (look(search)) {
            return true;
        }
    }
    return false;
}

static bool
may_wait(const struct search *search)
{
    return search->nbytes >= WAIT_MIN_NBYTES;
}

/* Waits before the pool grows beside much that is parked. */
static bool
hold_back(struct search *search)
{
    struct nrm__pool *pool = search->pool;
    uint64_t last = nrm__epoch_stamp();
    size_t limit = nrm__max(pool->parked_limit,
                            PARKED_BLOCKS * nrm__min(search->nbytes, NRM__GIB));
    while (search->parked >= limit && may_wait(search) && !nrm__epoch_is_done(last) &&
           nrm__pool_wait_for_epoch(pool, pool->wait_limit_ns)) {
        if (look(search) || promote_unclosed(search)) {
            return true;
        }
    }
    return false;
}

/* What waited for its known uses alone (core/known_uses.h). */
static bool
take_used(struct search *search)
{
    struct nrm__pool *pool = search->pool;
    size_t limit = nrm__max(pool->parked_limit,
                            PARKED_BLOCKS * nrm__min(search->nbytes, NRM__GIB));
    if (!(pool->base.flags & NRM__OPS_RECORDED)) {
        return false;
    }
    if (nrm__retired_return_used(0, false) && look(search)) {
        return true;
    }
    return may_wait(search) && nrm__retired_nbytes(&pool->base) > limit &&
           nrm__retired_return_used(pool->wait_limit_ns, false) && look(search);
}

static nrm_status
grow_once(struct search *search)
{
    nrm_status status = nrm__pool_grow(search->pool, search->nbytes, search->alignment);
    if (status == NRM_OUT_OF_MEMORY && search->exact < search->nbytes) {
        search->nbytes = search->exact; /* without room for more, and for a shift */
        status = nrm__pool_grow(search->pool, search->nbytes, search->alignment);
    }
    return status;
}

/* Memory of other nodes: when the pool cannot grow, or has grown while this thread went
   over to another node. */
static bool
look_anywhere(struct search *search)
{
    search->anywhere = search->pool->n_nodes > 1;
    return search->anywhere && look(search);
}

static void
add_hungry(struct nrm__pool *pool, int n)
{
    nrm__lock_acquire(&pool->lock);
    pool->n_hungry += (unsigned)n;
    nrm__lock_release(&pool->lock);
}

/* What it brings, others may take first, and then it tries again; a trim only once. */
static bool
grow(struct search *search)
{
    bool found = false;
    int n_tries = 0;
    search->status = NRM_OK;
    while (!found && search->status == NRM_OK && n_tries < GROW_TRIES) {
        if (n_tries++ == 1) {
            add_hungry(search->pool, 1);
        }
        search->status = grow_once(search);
        found = search->status == NRM_OK && (look(search) || look_anywhere(search));
    }
    if (search->status != NRM_OK) {
        search->said = *nrm_last_error();
    }
    else if (!found) {
        search->status = NRM_OUT_OF_MEMORY;
        search->said = (nrm_error){.status = NRM_OUT_OF_MEMORY};
    }
    if (n_tries > 1) {
        add_hungry(search->pool, -1);
    }
    return found;
}

/* What threads keep, and chunks in which no cell is live, become free blocks. */
static bool
drain(struct search *search)
{
    struct nrm__pool *pool = search->pool;
    size_t nbytes = 0;
    nrm__cache_drain(&pool->base);
    if (pool->has_slabs) {
        nrm__slabs_trim(&pool->slabs, 0, &nbytes);
    }
    return look(search);
}

/* Memory of the wrong sizes goes back, for a segment of the right one. */
static bool
exchange(struct search *search)
{
    size_t nbytes = nrm__pool_give_segments_back(search->pool, 0, 0);
    nbytes += nrm__retired_drain(0);
    return nbytes != 0 && grow(search);
}

/* Whether memory may come when the GPU goes on: to the pool, or to an upstream that has
   no more. */
static bool
is_awaited(const struct search *search)
{
    bool upstream_waits = search->pool->base.kind != NRM_KIND_HOST &&
                          search->said.message[0] != '\0' && !nrm__retired_is_empty();
    return search->parked != 0 || upstream_waits;
}

static bool
wait_when_full(struct search *search)
{
    struct nrm__pool *pool = search->pool;
    uint64_t last = nrm__epoch_stamp();
    uint64_t wait_ns = pool->waits_when_full ? UINT64_MAX
                       : may_wait(search)    ? pool->wait_limit_ns
                                             : 0;
    while (search->status == NRM_OUT_OF_MEMORY && is_awaited(search) && wait_ns != 0 &&
           !nrm__epoch_is_done(last) && nrm__pool_wait_for_epoch(pool, wait_ns)) {
        if (look(search) || promote_unclosed(search) || exchange(search)) {
            return true;
        }
    }
    return false;
}

static bool
wait_for_used(struct search *search)
{
    struct nrm__pool *pool = search->pool;
    bool insists = pool->waits_when_full;
    uint64_t wait_ns = insists            ? UINT64_MAX
                       : may_wait(search) ? pool->wait_limit_ns
                                          : 0;
    while (search->status == NRM_OUT_OF_MEMORY && wait_ns != 0 &&
           nrm__retired_nbytes(&pool->base) != 0 &&
           nrm__retired_return_used(wait_ns, insists)) {
        if (look(search)) {
            return true;
        }
    }
    return false;
}

/*
 * Takes one step after the other, each once. It ends: `grow` has a bound, and the two
 * that wait go on only when an epoch more is done than before, and until the one is
 * that was open when they began. So they wait for no more epochs than were pending
 * then, whatever others park meanwhile. A failure other than a lack of memory ends it
 * at once.
 */
static nrm_status
climb(struct search *search)
{
    static bool (*const steps[])(struct search *) = {
        take_parked,   promote,        promote_unclosed, take_own,
        await_decay,   hold_back,      take_used,        grow,
        look_anywhere, drain,          promote,          promote_unclosed,
        exchange,      wait_when_full, wait_for_used,    await_decay,
    };
    search->status = NRM_OUT_OF_MEMORY;
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        if (steps[i](search)) {
            return NRM_OK;
        }
        if (search->status != NRM_OUT_OF_MEMORY) {
            return nrm__error_native(search->status, search->said.native_code,
                                     search->said.native_name, "%s",
                                     search->said.message);
        }
    }
    return nrm__pool_explain(search->pool, &search->said, search->request->nbytes);
}

static nrm_status
find_ordered(struct nrm__pool *pool, const struct nrm__request *request,
             struct nrm__pool_block **out)
{
    nrm_status status = nrm__pool_find_ordered(
        pool, request, nrm__pool_block_nbytes(pool, request), out);
    return status != NRM_OUT_OF_MEMORY
               ? status
               : nrm__pool_explain(pool, nrm_last_error(), request->nbytes);
}

/* ---- pages of a block's own ---- */

static bool
is_whole_segment(struct nrm__pool_block *block, const void *context)
{
    (void)context;
    return block->size == block->live.segment->nbytes;
}

/* From a free segment, whose rest it grows into until it has all of it; NULL: there is
   none that is large enough. */
static struct nrm__pool_block *
take_of_segment(struct nrm__pool *pool, const struct nrm__request *request,
                size_t nbytes)
{
    struct nrm__pool_bins *bins = &pool->bins[nrm__pool_node_here(pool)];
    size_t alignment = nrm__max(request->alignment, pool->alignment);
    nrm__lock_acquire(&pool->lock);
    struct nrm__pool_block *block =
        pool->n_whole != 0
            ? nrm__pool_take_wanted_locked(pool, bins, nbytes, alignment, OWN_LOOKS,
                                           is_whole_segment, NULL)
            : NULL;
    nrm__lock_release(&pool->lock);
    return block;
}

/* So many blocks in pages of their own are few, however large the pool is. */
static bool
wants_own_pages(struct nrm__pool *pool, const struct nrm__request *request)
{
    if (!pool->is_plain || !(request->flags & NRM__REQUEST_GROWING) ||
        request->nbytes < OWN_MIN_NBYTES) {
        return false;
    }
    nrm__lock_acquire(&pool->lock);
    bool is_large = request->nbytes >= pool->reserved_nbytes / OWN_FRACTION;
    nrm__lock_release(&pool->lock);
    return is_large;
}

/* A large block that grows and could not do so where it is: once it begins a segment
   that it has to itself, it goes on by moving pages, and nothing is copied any more.
   NULL: this is none, or there is no room for such pages, and any memory will do. */
static nrm_status
find_own_pages(struct nrm__pool *pool, const struct nrm__request *request,
               struct nrm__pool_block **out)
{
    size_t nbytes = nrm__align_up(nrm__pool_block_nbytes(pool, request), NRM__MAP_PAGE);
    *out = NULL;
    if (!wants_own_pages(pool, request)) {
        return NRM_OK;
    }
    *out = take_of_segment(pool, request, nbytes);
    if (*out == NULL && nrm__pool_take_from_thread(pool)) {
        *out = take_of_segment(pool, request, nbytes);
    }
    if (*out != NULL) {
        return NRM_OK;
    }
    /* What they held does not fit, and would only pile up. */
    nrm__pool_give_segments_back(pool, pool->segment_nbytes, 0);
    nrm_status status = nrm__pool_grow_by(pool, nbytes);
    if (status == NRM_OK) {
        *out = take_of_segment(pool, request, nbytes);
    }
    return status == NRM_OUT_OF_MEMORY ? NRM_OK : status;
}

/* Free memory for a block. */
nrm_status
nrm__pool_find_memory(struct nrm__pool *pool, const struct nrm__request *request,
                      struct nrm__pool_block **out)
{
    if (pool->order != NULL) {
        nrm_status status = find_ordered(pool, request, out);
        nrm__pool_begin_ahead(pool);
        return status;
    }
    struct search search;
    search.pool = pool;
    search.request = request;
    search.alignment = nrm__max(request->alignment, pool->alignment);
    search.node = nrm__pool_node_here(pool);
    search.anywhere = false;
    search.nbytes = nrm__pool_block_nbytes(pool, request);
    search.exact = pool->fixed.block_nbytes != 0
                       ? pool->fixed.block_nbytes
                       : nrm__align_up(request->nbytes, pool->granule);
    NRM_TRY(find_own_pages(pool, request, &search.found));
    if (search.found == NULL && !look(&search)) {
        NRM_TRY(climb(&search));
    }
    nrm__pool_begin_ahead(pool);
    *out = search.found;
    return NRM_OK;
}

/* Keeps the epochs short: about epoch_nbytes of freed memory rotate and stay in the
   cache, where otherwise an allocation would walk through all that is free. */
void
nrm__pool_close_full_epoch(struct nrm__pool *pool)
{
    nrm__lock_acquire(&pool->lock);
    size_t unclosed = nrm__pool_unclosed_locked(pool);
    nrm__lock_release(&pool->lock);
    if (unclosed >= pool->epoch_nbytes) {
        (void)nrm__pool_close_epoch(pool);
    }
}

/* What a large array left behind and the GPU is done with. */
void
nrm__pool_reclaim_idle(struct nrm__pool *pool)
{
    nrm__lock_acquire(&pool->lock);
    nrm__pool_reclaim_locked(pool);
    bool is_idle = pool->free_nbytes > pool->idle_nbytes;
    nrm__lock_release(&pool->lock);
    if (is_idle) {
        nrm__pool_give_idle_back(pool);
    }
}
