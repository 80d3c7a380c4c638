/*
 * PoolMemoryResource: takes segments from its upstream and hands them out in blocks.
 *
 * Every block, live or free, has a description outside the memory, linked to its
 * neighbours in the segment (so that free ones merge; never across segments, as a copy
 * across two registrations fails). The segment has an entry for each granule in which a
 * block starts: a block is found, and claimed by a change of its key, without a lock;
 * only interior look-ups take it. Free blocks stand in bins by size class; an
 * allocation takes the newest block of its class if that fits, else the first of the
 * smallest class that surely does.
 *
 * Small host blocks come from slabs, whose chunks are blocks of the pool. In front of
 * both, each thread keeps cells and blocks for itself (core/cache.h); they count as
 * claimed.
 *
 * Memory that a GPU may touch is not free when it is given back. It is parked with the
 * stamp of its epoch (core/uses.h), keeps its borders, and becomes free when that epoch
 * is done. An allocation that needs memory closes epochs, and waits for a bounded time
 * when the program runs ahead of the GPU.
 *
 * Ordinary pages know whether they are zero: a large request for zeros takes pages that
 * nobody used, drops those of a used block, or leaves them to be filled, by what the
 * program did with the zeros it got before (pool_zeros.c). A block that grows and has a
 * segment of its own moves by its pages.
 *
 * One lock guards all of it. It is never held while the upstream, the driver or the
 * epochs are asked.
 */
#include "base/bits.h"
#include "base/error.h"
#include "core/capture.h"
#include "core/nodes.h"
#include "core/slab.h"
#include "core/uses.h"
#include "cuda/context.h"
#include "nrm/pools.h"
#include "os/memory.h"
#include "pools/pool.h"
#include "pools/pool_ops.h"
#include "pools/pool_vmm.h"
#include "pools/upstream.h"

_Static_assert(NRM__MAGAZINE_CELLS / 2 <= NRM__SLAB_BATCH,
               "half a magazine is a batch");

/* Of blocks that are no cells a thread keeps so much at least, or so much of the limit;
   of device memory less, as what is kept is in the way of what would merge. */
#define KEPT_NBYTES (64 * NRM__MIB)
#define KEPT_DEVICE_NBYTES (16 * NRM__MIB)
#define KEPT_FRACTION 16
#define IDLE_SHARE 4 /* of what may lie idle, for one large block of plain memory */

/* ---- allocation ---- */

/* Where a block starts for the user: large ones that have a segment of their own, not
   all at the same place of a page. */
static uintptr_t
address_in(const struct nrm__pool *pool, const struct nrm__pool_block *block,
           const struct nrm__request *request)
{
    const struct nrm__starts *starts = block->live.segment->extra;
    size_t room = block->size - request->nbytes;
    bool shifted = pool->has_slabs && starts->colour <= room &&
                   block->start == block->live.segment->start &&
                   request->alignment <= NRM__SLAB_ALIGNMENT;
    return shifted ? block->start + starts->colour : block->start;
}

/* Takes a claimed block back that was not handed out. */
static void
untake(struct nrm__pool *pool, struct nrm__pool_block *block)
{
    nrm__lock_acquire(&pool->lock);
    pool->live_nbytes -= block->size;
    nrm__pool_free_locked(pool, block, block->is_zero);
    nrm__lock_release(&pool->lock);
}

static nrm_status
prepare(struct nrm__pool *pool)
{
    nrm__pool_notice_resets(&pool->base);
    if (pool->tracked) {
        nrm__pool_close_full_epoch(pool);
        nrm__pool_reclaim_idle(pool);
    }
    else if (pool->base.flags & NRM__OPS_RECORDED) {
        nrm__retired_ask_about(pool->epoch_nbytes);
    }
    return nrm__pool_check_usable(&pool->base);
}

/* Whether it belongs to a graph: then no thread may keep it when it is freed. */
static bool
is_captured(const struct nrm__pool *pool, struct nrm__pool_block *block)
{
    return pool->order != NULL &&
           nrm__pool_ordered(block)->then.stream != NRM__ORDER_DONE.stream;
}

/* A block that this thread freed and the GPU is done with, of the same size: it is
   still in the cache. */
static bool
take_ripe(struct nrm__pool *pool, const struct nrm__request *request,
          struct nrm__cell *out)
{
    size_t nbytes = nrm__pool_block_nbytes(pool, request);
    if (!pool->tracked || request->alignment > pool->alignment ||
        nrm__cuda_is_forked() || nrm__epoch_is_lost()) {
        return false;
    }
    return nrm__cache_take_ripe(&pool->base, nbytes, out) ||
           (nrm__cache_end_epoch_of(&pool->base) &&
            nrm__cache_take_ripe(&pool->base, nbytes, out));
}

static bool
close_epoch(nrm_resource *mr, uint64_t n_blocks)
{
    return nrm__pool_close_epoch_of(nrm__pool_from(mr), n_blocks);
}

static nrm_status
allocate_block(struct nrm__pool *pool, const struct nrm__request *request,
               uintptr_t state, struct nrm__block *out)
{
    struct nrm__pool_block *block;
    struct nrm__cell ripe;
    bool is_ripe = state == NRM__POOL_LIVE && take_ripe(pool, request, &ripe);
    if (is_ripe) {
        block = nrm__pool_block_of(ripe.record);
        nrm__resource_unhold(&pool->base, 1); /* who asked holds it too */
    }
    else {
        NRM_TRY(prepare(pool));
        NRM_TRY(nrm__pool_find_memory(pool, request, &block));
    }
    nrm_status status = NRM_OK;
    if (!nrm__segment_is_current(block->live.segment)) {
        status = nrm__segment_renew(block->live.segment);
    }
    if (status != NRM_OK) {
        untake(pool, block);
        return status;
    }
    uintptr_t address = is_ripe ? (uintptr_t)ripe.ptr
                                : address_in(pool, block, request);
    bool is_lazy = nrm__pool_is_lazy_zero(pool, request);
    bool is_zero = is_lazy ? nrm__pool_make_zero(pool, block)
                           : !is_ripe && block->is_zero;
    atomic_store_explicit(&block->live.goes_long, is_lazy || is_captured(pool, block),
                          memory_order_relaxed);
    nrm__pool_set_taken(block, address, request->nbytes, state);
    nrm__pool_fill(block, address, out);
    out->flags = is_zero ? NRM__BLOCK_IS_ZERO : 0;
    return NRM_OK;
}

/* For this thread to keep. */
static void
keep_cells(struct nrm__pool *pool, size_t class, const struct nrm__cell *cells,
           size_t n)
{
    if (n != 0) {
        n -= nrm__cache_keep_cells(&pool->base, class, cells, n);
    }
    if (n != 0) {
        nrm__slabs_put(&pool->slabs, cells, n);
    }
}

/* Of slabs that there are, the one of this thread's new cell first of all. */
static void
get_more_cells(struct nrm__pool *pool, size_t class)
{
    struct nrm__cell cells[NRM__MAGAZINE_CELLS / 2];
    size_t n = nrm__cache_wanted(&pool->base, class);
    n = n != 0 ? nrm__slabs_take(&pool->slabs, class, cells, n) : 0;
    keep_cells(pool, class, cells, n);
}

/* What another thread had too many of, and the others of it for this thread. */
static bool
allocate_from_batch(struct nrm__pool *pool, size_t nbytes, struct nrm__block *out)
{
    struct nrm__cell cells[NRM__SLAB_BATCH];
    size_t class = nrm__slab_class_index(nbytes);
    size_t n = nrm__cache_wanted(&pool->base, class);
    n = n != 0 ? nrm__slabs_take_batch(&pool->slabs, class, cells) : 0;
    if (n == 0) {
        return false;
    }
    nrm__slabs_make_live(&cells[n - 1], nbytes, out);
    keep_cells(pool, class, cells, n - 1);
    return true;
}

static nrm_status
allocate_cell(struct nrm__pool *pool, const struct nrm__request *request,
              struct nrm__block *out)
{
    if (allocate_from_batch(pool, request->nbytes, out)) {
        return NRM_OK;
    }
    nrm_status status = nrm__slabs_allocate(&pool->slabs, request->nbytes, out);
    if (status ==
        NRM_OUT_OF_MEMORY) { /* threads have given up cells meanwhile: gather */
        status = nrm__slabs_allocate(&pool->slabs, request->nbytes, out);
    }
    if (status == NRM_OK) {
        get_more_cells(pool, nrm__slab_class_index(request->nbytes));
    }
    return status;
}

/* A block of the host went the long way: gives this thread some more of the size at
   once. They are described as what they are, claimed, and held like blocks that it kept
   itself. */
static void
get_more(struct nrm__pool *pool, size_t nbytes)
{
    struct nrm__cell cells[NRM__CACHE_WAYS];
    size_t n =
        nbytes <= NRM__SHIFTED_MIN ? nrm__cache_wanted_blocks(&pool->base, nbytes) : 0;
    n = n != 0 ? nrm__pool_take_more(pool, nbytes, cells, n) : 0;
    for (size_t i = 0; i < n; i++) {
        struct nrm__pool_block *block = nrm__pool_block_of(cells[i].record);
        atomic_store_explicit(&block->live.goes_long, false, memory_order_relaxed);
        nrm__pool_set_taken(block, block->start, nbytes, NRM__POOL_CLAIMED);
    }
    if (n != 0) {
        nrm__resource_hold(&pool->base, n); /* before they may be given back */
        size_t n_left = n - nrm__cache_keep_blocks(&pool->base, nbytes, cells, n);
        if (n_left != 0) {
            nrm__pool_put_more(pool, cells, n_left);
            nrm__resource_unhold(&pool->base, n_left); /* who asked holds it too */
        }
    }
}

static nrm_status
pool_allocate(nrm_resource *mr, const struct nrm__request *request,
              struct nrm__block *out)
{
    struct nrm__pool *pool = nrm__pool_from(mr);
    if (pool->has_slabs && nrm__slabs_takes(request->nbytes, request->alignment)) {
        return allocate_cell(pool, request, out);
    }
    nrm__resource_hold(mr, 1); /* before anybody can find the block */
    nrm_status status = allocate_block(pool, request, NRM__POOL_LIVE, out);
    if (status != NRM_OK) {
        nrm__resource_unhold(mr, 1);
    }
    else if (pool->has_slabs) {
        get_more(pool, out->capacity);
    }
    return status;
}

static nrm_status
fixed_allocate(nrm_resource *mr, const struct nrm__request *request,
               struct nrm__block *out)
{
    NRM_TRY(nrm__fixed_check(&nrm__pool_from(mr)->fixed, request));
    return pool_allocate(mr, request, out);
}

/* ---- deallocation ---- */

static void
deallocate_cell(struct nrm__pool *pool, const struct nrm__block *block)
{
    struct nrm__cell cells[NRM__MAGAZINE_CELLS / 2 + 1];
    const struct nrm__slab *slab = block->record;
    size_t class = slab->class_index;
    size_t n = nrm__cache_give_up_cells(&pool->base, class, cells);
    struct nrm__cell own = {block->ptr, nrm__slab_record_of(block->record, block->ptr)};
    if (nrm__slabs_put_batch(&pool->slabs, class, cells, n)) {
        keep_cells(pool, class, &own, 1);
        return;
    }
    cells[n] = own;
    nrm__slabs_put(&pool->slabs, cells, n + 1);
}

/* Blocks that a thread keeps, in bytes. */
static size_t
kept_nbytes(const struct nrm__pool *pool)
{
    return nrm__min(pool->order != NULL ? KEPT_DEVICE_NBYTES : KEPT_NBYTES,
                    pool->maximum_nbytes / KEPT_FRACTION);
}

/* The same and one more that could be kept otherwise: of ordinary memory if the pool
   would have left it idle too. */
static size_t
kept_limit(struct nrm__pool *pool, size_t nbytes)
{
    size_t limit = kept_nbytes(pool);
    if (pool->order != NULL) {
        return nrm__min(limit + nrm__min(nbytes, KEPT_DEVICE_NBYTES),
                        pool->maximum_nbytes / KEPT_FRACTION);
    }
    if (nbytes <= NRM__LARGE_MIN || nbytes > NRM__CACHED_MAX || !pool->is_plain) {
        return limit;
    }
    nrm__lock_acquire(&pool->lock);
    size_t free_nbytes = pool->free_nbytes;
    nrm__lock_release(&pool->lock);
    size_t idle = pool->idle_nbytes - nrm__min(free_nbytes, pool->idle_nbytes);
    return nbytes <= idle / IDLE_SHARE ? limit + nbytes : limit;
}

/* Under what this thread keeps blocks for a stream; false: not at all. */
static bool
find_key(struct nrm__pool *pool, nrm_stream *stream, uint64_t *out)
{
    struct nrm__order_tag slot = {0};
    bool has_key = pool->order == NULL ||
                   nrm__order_slot_of(stream, nrm_resource_device(&pool->base), &slot);
    *out = nrm__order_key(slot);
    return has_key;
}

/* A block goes the long way: takes what this thread keeps in its place, so that the
   next one like it need not. */
static bool
make_room(struct nrm__pool *pool, size_t nbytes, nrm_stream *stream,
          struct nrm__cache_set *out)
{
    uint64_t key;
    if (!atomic_load(&pool->base.is_cached) || !find_key(pool, stream, &key)) {
        return false;
    }
    if (pool->tracked) {
        return false; /* it is parked first */
    }
    nrm__cache_set_limit(&pool->base, kept_limit(pool, nbytes));
    bool is_crowded = pool->has_slabs && nbytes > pool->rounded_max;
    return !is_crowded && nrm__cache_make_room(&pool->base, nbytes, key, out);
}

static void
pool_deallocate(nrm_resource *mr, const struct nrm__block *block, nrm_stream *stream)
{
    struct nrm__pool *pool = nrm__pool_from(mr);
    if (block->flags & NRM__BLOCK_IN_SLAB) {
        deallocate_cell(pool, block);
        return;
    }
    struct nrm__pool_block *own = nrm__pool_block_at(block->segment, block->ptr);
    struct nrm__cache_set kept = {0};
    if (pool->tracked) {
        (void)nrm__pool_take_parked(pool); /* so that the next ones can be parked */
    }
    size_t n_kept = make_room(pool, block->capacity, stream, &kept)
                        ? nrm__pool_free_kept(pool, &kept)
                        : 0;
    if (pool->order != NULL) {
        nrm__pool_stamp(pool, own, stream);
    }
    nrm__pool_free_block(pool, own);
    nrm__resource_unhold(mr, 1 + n_kept);
}

static void
pool_take_back(nrm_resource *mr, struct nrm__magazines *magazines)
{
    struct nrm__pool *pool = nrm__pool_from(mr);
    struct nrm__parked parked[NRM__CACHE_PARKED];
    size_t n_blocks = 0;
    if (magazines == NULL) {
        if (pool->has_slabs) {
            nrm__slabs_break_batches(&pool->slabs);
        }
        return;
    }
    for (size_t i = 0; i < NRM__CACHE_SETS; i++) {
        n_blocks += nrm__pool_free_kept(pool, &magazines->sets[i]);
    }
    magazines->set_nbytes = 0;
    size_t n_parked = nrm__cache_unpark(magazines, parked);
    nrm__pool_free_parked(pool, parked, n_parked);
    n_blocks += n_parked;
    /* The cells hold the pool while the blocks are let go of, and the other way
       round. */
    nrm__resource_hold(mr, 1);
    for (size_t i = 0; i < NRM__SLAB_N_CLASSES; i++) {
        struct nrm__magazine *magazine = &magazines->classes[i];
        if (magazine->n != 0) {
            nrm__slabs_put(&pool->slabs, magazine->cells, magazine->n);
            magazine->n = 0;
        }
    }
    nrm__resource_unhold(mr, n_blocks + 1);
}

/* Of a pool that tracks what the GPU does with its blocks threads park what they free
   on no stream. A reset of a context, which the long way asks for, the short one learns
   from others. */
static bool
pool_front(nrm_resource *mr, struct nrm__front *out)
{
    struct nrm__pool *pool = nrm__pool_from(mr);
    bool is_seen_by_gpus = mr->kind != NRM_KIND_HOST;
    size_t most = pool->is_plain ? NRM__CACHED_MAX : NRM__LARGE_MIN;
    size_t limit = nrm__min(most, pool->maximum_nbytes / 64);
    *out = (struct nrm__front){
        .pool = mr,
        .limit = pool->order != NULL ? 0 : limit,
        .stream_limit = pool->tracked ? 0 : limit,
        .cell_limit = pool->has_slabs ? NRM__SLAB_MAX : 0,
        .granule = pool->granule,
        .shift = pool->shift,
        .rounded_max = pool->rounded_max,
        .kept = kept_limit(pool, NRM__LARGE_MIN),
        .epoch_nbytes = pool->tracked ? nrm__max(pool->epoch_nbytes, 1) : 0,
        .is_ordered = pool->order != NULL,
        .forbidden = is_seen_by_gpus ? &nrm__epoch_forbids : NULL,
    };
    return pool->has_slabs || !nrm__cuda_is_forked();
}

/* Sizes that are no power of two the short way does not round to that of the blocks. */
static bool
fixed_front(nrm_resource *mr, struct nrm__front *out)
{
    size_t nbytes = nrm__pool_from(mr)->fixed.block_nbytes;
    bool ready = pool_front(mr, out);
    size_t most = nrm__is_power_of_two(nbytes) ? nbytes : 0;
    out->limit = most <= out->limit ? most : 0;
    out->stream_limit = most <= out->stream_limit ? most : 0;
    return ready;
}

/* ---- chunks of the slabs ---- */

/* A chunk is claimed all the time: while the map does not lead to its slab yet, or any
   more, an address of a cell must not be taken for the start of a block. */

nrm_status
nrm__pool_get_chunk(nrm_resource *mr, struct nrm__block *out)
{
    struct nrm__request request = {.nbytes = NRM__SLAB_CHUNK,
                                   .alignment = NRM__SLAB_CHUNK};
    *out = (struct nrm__block){.owner = mr};
    return allocate_block(nrm__pool_from(mr), &request, NRM__POOL_CLAIMED, out);
}

void
nrm__pool_put_chunk(nrm_resource *mr, const struct nrm__block *chunk)
{
    nrm__pool_free_block(nrm__pool_from(mr),
                         nrm__pool_block_at(chunk->segment, chunk->ptr));
}

/* ---- life ---- */

/* No block is live. Segments go upstream, where a source retires what the GPU may still
   touch: the parked blocks in them were freed before this moment. */
static void
pool_finish(nrm_resource *mr)
{
    struct nrm__pool *pool = nrm__pool_from(mr);
    nrm__lock_acquire(&pool->lock);
    pool->is_watched = true; /* not to begin it once more */
    nrm__lock_release(&pool->lock);
    nrm__background_forget(&pool->watched);
    nrm__background_forget(&pool->ahead.watched);
    if (pool->has_slabs) {
        nrm__slabs_finish(&pool->slabs);
    }
    nrm__pool_drop_all(pool);
    if (pool->order != NULL) {
        nrm__captures_forget(mr);
    }
    while (pool->spare != NULL) {
        struct nrm__pool_block *block = pool->spare;
        pool->spare = block->next;
        nrm__node_deallocate(block, pool->block_nbytes);
    }
    nrm__pool_order_destroy(pool);
    nrm__unmap(pool->bins, nrm__pool_bins_nbytes(pool));
    nrm__lock_finish(&pool->lock);
}

#define OPS(name, allocate_op, front_op)                                               \
    {                                                                                  \
        .class_name = name,                                                            \
        .flags = NRM__OPS_HOLDS,                                                       \
        .allocate = allocate_op,                                                       \
        .deallocate = pool_deallocate,                                                 \
        .reallocate = nrm__pool_reallocate,                                            \
        .find_block = nrm__pool_find_block,                                            \
        .claim_block = nrm__pool_claim_block,                                          \
        .unclaim_block = nrm__pool_unclaim_block,                                      \
        .renew_block = nrm__pool_renew_block,                                          \
        .front = front_op,                                                             \
        .take_back = pool_take_back,                                                   \
        .close_epoch = close_epoch,                                                    \
        .trim = nrm__pool_trim,                                                        \
        .statistics = nrm__pool_statistics,                                            \
        .check = nrm__pool_check,                                                      \
        .fork_prepare = nrm__pool_fork_prepare,                                        \
        .fork_parent = nrm__pool_fork_parent,                                          \
        .fork_child = nrm__pool_fork_child,                                            \
        .finish = pool_finish,                                                         \
    }

const struct nrm__ops nrm__pool_ops =
    OPS("PoolMemoryResource", pool_allocate, pool_front);

/* Of device memory: see fixed_size.c. */
const struct nrm__ops nrm__pool_fixed_ops =
    OPS("FixedSizeMemoryResource", fixed_allocate, fixed_front);

/* ---- other devices ---- */

nrm_status
nrm_pool_add_peer(nrm_resource *mr, int device)
{
    if (mr->ops != &nrm__pool_ops) {
        return nrm__error(NRM_INVALID_VALUE, "a %s is not opened to other devices",
                          mr->ops->class_name);
    }
    nrm_status status = nrm__pool_vmm_add_peer(nrm__pool_from(mr), device);
    return status != NRM_NOT_SUPPORTED
               ? status
               : nrm__error(NRM_NOT_SUPPORTED,
                            "the pool does not map its memory: only what is mapped is "
                            "opened to device %d",
                            device);
}
