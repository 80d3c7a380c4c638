/*
 * PoolMemoryResource: takes segments from its upstream and hands them out in blocks.
 *
 * Every block, live or free, has a description outside the memory: a node in a tree by
 * address (which answers interior look-ups), linked to its neighbours in the segment (so
 * that free ones merge; never across segments, as a copy across two registrations fails).
 * Free blocks stand in bins by size class; an allocation takes the first block of the
 * smallest class that surely fits, and only when there is none looks through its own.
 *
 * Memory that a GPU may touch is not free when it is given back. It is parked with the
 * stamp of its epoch (core/uses.h), keeps its borders, and becomes free when that epoch is
 * done. An allocation that needs memory closes epochs, and waits for a bounded time when
 * the program runs ahead of the GPU. Small host blocks come from slabs, whose chunks are
 * blocks of the pool.
 *
 * One lock guards all of it. It is never held while the upstream, the driver or the
 * epochs are asked.
 */
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/bits.h"
#include "base/error.h"
#include "core/hooks.h"
#include "core/nodes.h"
#include "core/slab.h"
#include "core/uses.h"
#include "cuda/context.h"
#include "nrm/options.h"
#include "nrm/pools.h"
#include "os/memory.h"
#include "os/system.h"
#include "pools/pool.h"
#include "pools/pool_internal.h"

#define WAIT_MIN_NBYTES NRM__MIB /* requests of fewer bytes never wait for the GPU */
#define IDLE_FRACTION 16         /* of the memory that may lie idle in a host pool */
#define PARKED_BLOCKS 4          /* parked blocks of the size asked that are let be */
#define SLACK_SHIFT 3            /* a block that moves to grow gets an eighth more */
#define SLACK_MIN_NBYTES (4 * NRM__KIB)

static const struct nrm__ops pool_ops;

static struct nrm__pool *
pool_from(nrm_resource *mr)
{
    NRM_ASSERT(mr->ops == &pool_ops);
    return (struct nrm__pool *)mr;
}

/* ---- allocation ---- */

/* What the pool takes for a request: whole granules, and room for a block that grows. */
static size_t
block_nbytes(const struct nrm__pool *pool, const struct nrm__request *request)
{
    size_t nbytes = request->nbytes;
    if ((request->flags & NRM__REQUEST_GROWING) && nbytes >= SLACK_MIN_NBYTES &&
        nbytes <= pool->maximum_nbytes / 2) {
        nbytes += nbytes >> SLACK_SHIFT;
    }
    return nrm__align_up(nbytes, pool->granule);
}

static struct nrm__pool_block *
try_take(struct nrm__pool *pool, const struct nrm__request *request, size_t nbytes,
         size_t alignment, size_t *out_unclosed, size_t *out_parked)
{
    nrm__lock_acquire(&pool->lock);
    if (pool->tracked) {
        nrm__pool_reclaim_locked(pool);
    }
    struct nrm__pool_block *block = nrm__pool_take_locked(pool, nbytes, alignment);
    if (block != NULL) {
        block->nbytes = request->nbytes; /* a look-up sees the block from here on */
    }
    *out_unclosed = nrm__pool_unclosed_locked(pool);
    *out_parked = pool->parked_nbytes;
    nrm__lock_release(&pool->lock);
    return block;
}

static bool
close_epoch(struct nrm__pool *pool)
{
    bool closed = nrm__epoch_close();
    if (closed) {
        nrm__lock_acquire(&pool->lock);
        pool->n_epochs++;
        nrm__lock_release(&pool->lock);
    }
    return closed;
}

/* Waits for the GPU: once for the oldest epoch, as long again as the GPU has lately needed,
   and each time that twice as much is parked as when a wait was in vain. So a program that
   has just begun to run ahead is held back too, and an endless kernel costs a few waits in
   all while the pool grows by powers of two. */
static bool
wait_for_epoch(struct nrm__pool *pool, uint64_t limit_ns)
{
    nrm__lock_acquire(&pool->lock);
    size_t parked = pool->parked_nbytes;
    bool insists = parked >= 2 * pool->parked_in_vain;
    pool->n_waits++;
    nrm__lock_release(&pool->lock);
    bool more = nrm__epoch_wait(limit_ns, insists);
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

/* Free memory for a block, taking it from parked memory that is done, from the upstream,
   or from parked memory after a wait: in this order, each tried once more after it made
   progress. */
static nrm_status
find_memory(struct nrm__pool *pool, const struct nrm__request *request,
            struct nrm__pool_block **out)
{
    size_t nbytes = block_nbytes(pool, request);
    size_t alignment = nrm__max(request->alignment, pool->granule);
    size_t unclosed, parked;
    bool may_wait = nbytes >= WAIT_MIN_NBYTES;
    size_t limit =
        nrm__max(pool->parked_limit, PARKED_BLOCKS * nrm__min(nbytes, NRM__GIB));
    for (;;) {
        *out = try_take(pool, request, nbytes, alignment, &unclosed, &parked);
        if (*out != NULL) {
            return NRM_OK;
        }
        if (parked != 0 && nrm__epoch_poll()) {
            continue;
        }
        if (unclosed != 0 && close_epoch(pool)) {
            continue;
        }
        if (parked > limit && may_wait && wait_for_epoch(pool, pool->wait_limit_ns)) {
            continue;
        }
        nrm_status status = nrm__pool_grow(pool, nbytes, alignment);
        if (status == NRM_OK) {
            continue;
        }
        if (status != NRM_OUT_OF_MEMORY || parked == 0) {
            return status;
        }
        uint64_t wait_ns = pool->waits_when_full ? UINT64_MAX
                           : may_wait            ? pool->wait_limit_ns
                                                 : 0;
        if (wait_ns == 0 || !wait_for_epoch(pool, wait_ns)) {
            return status;
        }
    }
}

/* Keeps the epochs short: about epoch_nbytes of freed memory rotate and stay in the
   cache, where otherwise an allocation would walk through all that is free. */
static void
close_full_epoch(struct nrm__pool *pool)
{
    nrm__lock_acquire(&pool->lock);
    size_t unclosed = nrm__pool_unclosed_locked(pool);
    nrm__lock_release(&pool->lock);
    if (unclosed >= pool->epoch_nbytes) {
        (void)close_epoch(pool);
    }
}

/* What a large array left behind and the GPU is done with. */
static void
give_idle_back(struct nrm__pool *pool)
{
    nrm__lock_acquire(&pool->lock);
    nrm__pool_reclaim_locked(pool);
    bool is_idle = pool->free_nbytes > pool->idle_nbytes;
    nrm__lock_release(&pool->lock);
    if (is_idle) {
        nrm__pool_give_idle_back(pool);
    }
}

/* After a context was reset by somebody else the segment is registered anew. */
static nrm_status
renew_segment(struct nrm__pool *pool, struct nrm__segment *segment)
{
    nrm_resource *upstream = pool->base.upstream;
    uint64_t now = nrm__cuda_generations();
    if (segment->generation == now) {
        return NRM_OK;
    }
    if (upstream->ops->renew_block != NULL) {
        NRM_TRY(upstream->ops->renew_block(upstream, &segment->upstream));
    }
    segment->generation = now;
    return NRM_OK;
}

static nrm_status
check_usable(const struct nrm__pool *pool)
{
    if (nrm__cuda_is_forked()) {
        return nrm__error(
            NRM_CUDA_UNAVAILABLE,
            "this process was forked after its parent had initialised CUDA: "
            "%s memory cannot be had here; start workers with the spawn "
            "method, or allocate before the fork",
            nrm_kind_name(pool->base.kind));
    }
    if (nrm__epoch_is_lost()) {
        return nrm__error(
            NRM_DEVICE_LOST,
            "the CUDA device reports an error that it cannot recover from: "
            "memory that it may still use is not handed out");
    }
    return NRM_OK;
}

static void
fill(const struct nrm__pool_block *block, struct nrm__block *out)
{
    out->ptr = (void *)block->node.start;
    out->nbytes = block->nbytes;
    out->capacity = nrm__pool_size_of(block);
    out->segment = block->segment;
    out->record = NULL;
}

/* Takes a NRM__POOL_LIVE block back that was not handed out. */
static void
untake(struct nrm__pool *pool, struct nrm__pool_block *block)
{
    nrm__lock_acquire(&pool->lock);
    pool->live_nbytes -= nrm__pool_size_of(block);
    nrm__pool_free_locked(pool, block, block->is_zero);
    nrm__lock_release(&pool->lock);
}

static nrm_status
allocate_block(struct nrm__pool *pool, const struct nrm__request *request,
               struct nrm__block *out)
{
    struct nrm__pool_block *block;
    bool gpu_visible = pool->base.kind == NRM_KIND_PINNED ||
                       pool->base.kind == NRM_KIND_MANAGED;
    if (gpu_visible) {
        nrm__cuda_check_generations();
    }
    if (pool->tracked) {
        close_full_epoch(pool);
        give_idle_back(pool);
    }
    if (gpu_visible) {
        NRM_TRY(check_usable(pool));
    }
    NRM_TRY(find_memory(pool, request, &block));
    nrm_status status = renew_segment(pool, block->segment);
    if (status != NRM_OK) {
        untake(pool, block);
        return status;
    }
    fill(block, out);
    if (block->is_zero) {
        out->flags |= NRM__BLOCK_IS_ZERO;
    }
    return NRM_OK;
}

static nrm_status
pool_allocate(nrm_resource *mr, const struct nrm__request *request,
              struct nrm__block *out)
{
    struct nrm__pool *pool = pool_from(mr);
    if (pool->has_slabs && nrm__slabs_takes(request->nbytes, request->alignment)) {
        return nrm__slabs_allocate(&pool->slabs, request->nbytes, out);
    }
    return allocate_block(pool, request, out);
}

/* ---- deallocation ---- */

static void
deallocate_block(struct nrm__pool *pool, uintptr_t start)
{
    nrm__lock_acquire(&pool->lock);
    struct nrm__pool_block *block =
        nrm__pool_block_of(nrm__tree_find(&pool->tree, start));
    NRM_ASSERT(block != NULL && block->state == NRM__POOL_CLAIMED);
    bool is_large = block->segment->nbytes > pool->segment_nbytes;
    pool->live_nbytes -= nrm__pool_size_of(block);
    if (pool->tracked) {
        nrm__pool_park_locked(pool, block);
    }
    else {
        nrm__pool_free_locked(pool, block, false);
    }
    bool is_idle = is_large && pool->free_nbytes > pool->idle_nbytes;
    nrm__lock_release(&pool->lock);
    if (is_idle) {
        nrm__pool_give_idle_back(pool);
    }
}

static void
pool_deallocate(nrm_resource *mr, const struct nrm__block *block, nrm_stream *stream)
{
    struct nrm__pool *pool = pool_from(mr);
    if (block->flags & NRM__BLOCK_IN_SLAB) {
        nrm__slabs_deallocate(&pool->slabs, block);
    }
    else {
        deallocate_block(pool, (uintptr_t)block->ptr);
    }
}

/* ---- chunks of the slabs ---- */

static nrm_status
get_chunk(nrm_resource *mr, struct nrm__block *out)
{
    struct nrm__request request = {.nbytes = NRM__SLAB_CHUNK,
                                   .alignment = NRM__SLAB_CHUNK};
    *out = (struct nrm__block){.owner = mr};
    return allocate_block(pool_from(mr), &request, out);
}

static bool
claim_block(struct nrm__pool *pool, const void *ptr)
{
    nrm__lock_acquire(&pool->lock);
    struct nrm__pool_block *block =
        nrm__pool_block_of(nrm__tree_find(&pool->tree, (uintptr_t)ptr));
    bool claimed = block != NULL && block->state == NRM__POOL_LIVE &&
                   block->node.start == (uintptr_t)ptr;
    if (claimed) {
        block->state = NRM__POOL_CLAIMED;
    }
    nrm__lock_release(&pool->lock);
    return claimed;
}

static void
put_chunk(nrm_resource *mr, const struct nrm__block *chunk)
{
    struct nrm__pool *pool = pool_from(mr);
    bool claimed = claim_block(pool, chunk->ptr);
    NRM_ASSERT(claimed);
    deallocate_block(pool, (uintptr_t)chunk->ptr);
}

/* ---- look-ups ---- */

static bool
pool_find_block(nrm_resource *mr, struct nrm__segment *segment, const void *ptr,
                struct nrm__block *out)
{
    struct nrm__pool *pool = pool_from(mr);
    if (nrm__segment_is_slab(segment)) {
        return nrm__slabs_find(segment, ptr, out);
    }
    nrm__lock_acquire(&pool->lock);
    struct nrm__pool_block *block =
        nrm__pool_block_of(nrm__tree_find(&pool->tree, (uintptr_t)ptr));
    bool found = block != NULL && block->state == NRM__POOL_LIVE;
    if (found) {
        fill(block, out);
    }
    nrm__lock_release(&pool->lock);
    return found;
}

static bool
pool_claim_block(nrm_resource *mr, struct nrm__block *block)
{
    if (block->flags & NRM__BLOCK_IN_SLAB) {
        return nrm__slabs_claim(block);
    }
    return claim_block(pool_from(mr), block->ptr);
}

static void
pool_unclaim_block(nrm_resource *mr, const struct nrm__block *block)
{
    struct nrm__pool *pool = pool_from(mr);
    if (block->flags & NRM__BLOCK_IN_SLAB) {
        nrm__slabs_unclaim(block);
        return;
    }
    nrm__lock_acquire(&pool->lock);
    struct nrm__pool_block *own =
        nrm__pool_block_of(nrm__tree_find(&pool->tree, (uintptr_t)block->ptr));
    NRM_ASSERT(own != NULL && own->state == NRM__POOL_CLAIMED);
    own->state = NRM__POOL_LIVE;
    own->nbytes = block->nbytes;
    nrm__lock_release(&pool->lock);
}

/* ---- resizing in place ---- */

static nrm_status
pool_reallocate(nrm_resource *mr, struct nrm__block *block,
                const struct nrm__request *request)
{
    struct nrm__pool *pool = pool_from(mr);
    size_t nbytes = nrm__align_up(request->nbytes, pool->granule);
    if (block->flags & NRM__BLOCK_IN_SLAB) {
        bool stays = request->nbytes <= block->capacity &&
                     request->nbytes >= block->capacity / 2;
        return stays ? NRM_OK : NRM_NOT_SUPPORTED;
    }
    nrm__lock_acquire(&pool->lock);
    struct nrm__pool_block *own =
        nrm__pool_block_of(nrm__tree_find(&pool->tree, (uintptr_t)block->ptr));
    bool done = nbytes <= nrm__pool_size_of(own);
    if (done && nbytes < nrm__pool_size_of(own) / 2) {
        nrm__pool_cut_tail_locked(pool, own, nbytes);
    }
    else if (!done) {
        done = nrm__pool_extend_locked(pool, own, nbytes, block_nbytes(pool, request));
    }
    block->capacity = nrm__pool_size_of(own);
    nrm__lock_release(&pool->lock);
    return done ? NRM_OK : NRM_NOT_SUPPORTED;
}

/* ---- trim, statistics, check ---- */

static nrm_status
pool_trim(nrm_resource *mr, size_t keep_nbytes, size_t *out_nbytes)
{
    struct nrm__pool *pool = pool_from(mr);
    size_t slab_nbytes = 0, unclosed, parked;
    if (pool->has_slabs) {
        nrm__slabs_trim(&pool->slabs, keep_nbytes, &slab_nbytes);
    }
    for (;;) {
        nrm__lock_acquire(&pool->lock);
        nrm__pool_reclaim_locked(pool);
        unclosed = nrm__pool_unclosed_locked(pool);
        parked = pool->parked_nbytes;
        nrm__lock_release(&pool->lock);
        if (unclosed != 0 && close_epoch(pool)) {
            continue;
        }
        if (parked == 0 || !wait_for_epoch(pool, pool->wait_limit_ns)) {
            break;
        }
    }
    *out_nbytes += nrm__pool_give_segments_back(pool, 0, keep_nbytes);
    return NRM_OK;
}

static void
pool_statistics(nrm_resource *mr, nrm_statistics *out)
{
    struct nrm__pool *pool = pool_from(mr);
    nrm__lock_acquire(&pool->lock);
    out->reserved_bytes += (int64_t)pool->reserved_nbytes;
    out->parked_bytes += (int64_t)pool->parked_nbytes;
    out->epochs += pool->n_epochs;
    out->waits += pool->n_waits;
    nrm__lock_release(&pool->lock);
}

static void
pool_check(nrm_resource *mr)
{
    struct nrm__pool *pool = pool_from(mr);
    nrm__lock_acquire(&pool->lock);
    nrm__pool_check_locked(pool);
    nrm__lock_release(&pool->lock);
    if (pool->has_slabs) {
        nrm__slabs_check(&pool->slabs);
    }
}

void
nrm__pool_check(nrm_resource *mr)
{
    pool_check(mr);
}

/* ---- fork ---- */

static void
pool_fork_prepare(nrm_resource *mr)
{
    struct nrm__pool *pool = pool_from(mr);
    if (pool->has_slabs) {
        nrm__slabs_fork_prepare(&pool->slabs);
    }
    nrm__lock_fork_prepare(&pool->lock);
}

static void
pool_fork_parent(nrm_resource *mr)
{
    struct nrm__pool *pool = pool_from(mr);
    nrm__lock_fork_parent(&pool->lock);
    if (pool->has_slabs) {
        nrm__slabs_fork_parent(&pool->slabs);
    }
}

static void
pool_fork_child(nrm_resource *mr)
{
    struct nrm__pool *pool = pool_from(mr);
    nrm__lock_fork_child(&pool->lock);
    if (pool->has_slabs) {
        nrm__slabs_fork_child(&pool->slabs);
    }
    pool->growing_nbytes = 0; /* other threads' growth does not go on in the child */
}

/* ---- life ---- */

static size_t
bins_nbytes(void)
{
    return nrm__align_up(sizeof(struct nrm__pool_bins), nrm__page_size());
}

/* No block is live. Segments go upstream, where a source retires what the GPU may still
   touch: the parked blocks in them were freed before this moment. */
static void
pool_finish(nrm_resource *mr)
{
    struct nrm__pool *pool = pool_from(mr);
    if (pool->has_slabs) {
        nrm__slabs_finish(&pool->slabs);
    }
    struct nrm__pool_block *block;
    while ((block = nrm__pool_block_of(pool->tree.root)) != NULL) {
        nrm__tree_remove(&pool->tree, &block->node);
        nrm__node_deallocate(block, sizeof *block);
    }
    while (!nrm__list_is_empty(&pool->segments)) {
        struct nrm__link *link = pool->segments.next;
        nrm__list_remove(link);
        (void)nrm__pool_drop_segment(
            pool, NRM__CONTAINER(link, struct nrm__segment, link), true);
    }
    nrm__unmap(pool->bins, bins_nbytes());
    nrm__lock_finish(&pool->lock);
}

static const struct nrm__ops pool_ops = {
    .class_name = "PoolMemoryResource",
    .allocate = pool_allocate,
    .deallocate = pool_deallocate,
    .reallocate = pool_reallocate,
    .find_block = pool_find_block,
    .claim_block = pool_claim_block,
    .unclaim_block = pool_unclaim_block,
    .trim = pool_trim,
    .statistics = pool_statistics,
    .check = pool_check,
    .fork_prepare = pool_fork_prepare,
    .fork_parent = pool_fork_parent,
    .fork_child = pool_fork_child,
    .finish = pool_finish,
};

/* ---- construction ---- */

static size_t
default_maximum(nrm_kind kind)
{
    return kind == NRM_KIND_PINNED
               ? nrm__align_down(nrm__host_memory_nbytes() / 2, NRM__HUGE_PAGE)
               : SIZE_MAX / 2;
}

static void
set_policy(struct nrm__pool *pool, const nrm_pool_options *options)
{
    nrm_kind kind = pool->base.kind;
    bool gpu_visible = kind == NRM_KIND_PINNED || kind == NRM_KIND_MANAGED;
    bool by_default = options->reuse == NRM_REUSE_DEFAULT;
    bool immediate = by_default ? nrm_option_get(NRM_OPT_REUSE) == 1
                                : options->reuse == NRM_REUSE_IMMEDIATE;
    pool->tracked = gpu_visible && !immediate;
    pool->granule = nrm__kind_alignment(kind);
    pool->maximum_nbytes = options->maximum_nbytes != 0 ? options->maximum_nbytes
                                                        : default_maximum(kind);
    pool->segment_nbytes =
        nrm__max((size_t)nrm_option_get(NRM_OPT_SEGMENT_NBYTES), NRM__HUGE_PAGE);
    size_t idle_nbytes = (size_t)nrm_option_get(NRM_OPT_IDLE_LIMIT);
    bool keeps_all = kind == NRM_KIND_DEVICE ||
                     nrm_resource_calls_user_code(&pool->base);
    pool->idle_nbytes = keeps_all          ? SIZE_MAX
                        : idle_nbytes != 0 ? idle_nbytes
                                           : nrm__host_memory_nbytes() / IDLE_FRACTION;
    pool->epoch_nbytes = (size_t)nrm_option_get(NRM_OPT_EPOCH_NBYTES);
    pool->parked_limit = options->parked_limit != 0 &&
                                 options->parked_limit != NRM_SIZE_DEFAULT
                             ? options->parked_limit
                             : (size_t)nrm_option_get(NRM_OPT_PARKED_LIMIT);
    pool->wait_limit_ns = options->wait_limit_ns != 0
                              ? options->wait_limit_ns
                              : (uint64_t)nrm_option_get(NRM_OPT_WAIT_LIMIT);
    pool->waits_when_full = options->on_exhausted == NRM_ON_EXHAUSTED_WAIT ||
                            (options->on_exhausted == NRM_ON_EXHAUSTED_DEFAULT &&
                             nrm_option_get(NRM_OPT_ON_EXHAUSTED) == 3);
    pool->has_slabs = kind == NRM_KIND_HOST;
}

static nrm_status
init(struct nrm__pool *pool, const nrm_pool_options *options)
{
    set_policy(pool, options);
    if (options->initial_nbytes > pool->maximum_nbytes) {
        return nrm__error(
            NRM_INVALID_VALUE,
            "the initial pool size (%zu B) is larger than the maximum pool "
            "size (%zu B)",
            options->initial_nbytes, pool->maximum_nbytes);
    }
    nrm__lock_init(&pool->lock, NRM__RANK_POOL);
    nrm__list_init(&pool->parked);
    nrm__list_init(&pool->segments);
    void *bins;
    if (nrm__map(bins_nbytes(), nrm__page_size(), &bins) != 0) {
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe a pool");
    }
    pool->bins = bins;
    for (unsigned class = 0; class < NRM__POOL_N_CLASSES; class++) {
        nrm__list_init(&pool->bins->heads[class]);
    }
    if (pool->has_slabs) {
        NRM_TRY(nrm__slabs_init(&pool->slabs, &pool->base, get_chunk, put_chunk));
    }
    return NRM_OK;
}

nrm_status
nrm_pool_create(nrm_resource *upstream, const nrm_pool_options *options,
                nrm_resource **out)
{
    nrm_pool_options defaults = NRM_OPTIONS(nrm_pool_options);
    nrm_resource *mr;
    if (options == NULL) {
        options = &defaults;
    }
    NRM_TRY(nrm__resource_create(&pool_ops, upstream->kind, upstream,
                                 sizeof(struct nrm__pool), &mr));
    struct nrm__pool *pool = pool_from(mr);
    nrm_status status = init(pool, options);
    if (status != NRM_OK) {
        nrm__resource_abandon(mr);
        return status;
    }
    nrm__resource_publish(mr);
    if (options->initial_nbytes != 0) {
        size_t nbytes = nrm__align_up(options->initial_nbytes, pool->granule);
        status =
            nrm__pool_grow_by(pool, nrm__min(nbytes, pool->maximum_nbytes), nbytes);
    }
    if (status != NRM_OK) {
        nrm_resource_release(mr);
        return status;
    }
    *out = mr;
    return NRM_OK;
}
