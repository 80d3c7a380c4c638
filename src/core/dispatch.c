/*
 * Allocation and deallocation: what every resource has in common.
 *
 * The public calls validate (core/request.c), find the block and claim it, so that an
 * address is given back once and only to the resource it came through (those of them
 * that threads can serve from what they keep begin in core/pair.c). The inner calls,
 * which adaptors and pools use for their upstreams, map and count. A block that is
 * claimed belongs to the caller alone until it is given back or unclaimed. Reallocation
 * is made of these (core/reallocate.c).
 */
#include <string.h>

#include "base/assert.h"
#include "base/bits.h"
#include "base/error.h"
#include "core/cache.h"
#include "core/hooks.h"
#include "core/known_uses.h"
#include "core/logged.h"
#include "core/pair.h"
#include "core/request.h"
#include "core/scoped.h"
#include "core/short_give.h"
#include "core/uses.h"
#include "core/watch.h"
#include "nrm/options.h"
#include "os/memory.h"
#include "os/numa.h"

/* From this size on memory is zeroed detached from the interpreter. */
#define ZERO_DETACHED_NBYTES NRM__MIB

/* ---- counting ---- */

static void
add(atomic_int_least64_t *current, atomic_int_least64_t *peak, int64_t n)
{
    int64_t now = atomic_fetch_add_explicit(current, n, memory_order_relaxed) + n;
    if (n > 0) {
        nrm__raise_peak(peak, now);
    }
}

/* The counters of this thread, where it has any of the resource. */
static struct nrm__shard *
enter_shard(nrm_resource *mr, struct nrm__cache **out)
{
    struct nrm__slot *slot = mr->ops->front != NULL ? nrm__cache_enter_slot(mr, out)
                                                    : NULL;
    return slot != NULL ? slot->front : NULL;
}

static void
count_allocation(nrm_resource *mr, size_t nbytes)
{
    struct nrm__cache *cache;
    struct nrm__shard *shard = enter_shard(mr, &cache);
    if (shard != NULL) {
        if (nrm__shard_count_in(shard, nbytes)) {
            nrm__shard_raise(shard);
        }
        nrm__cache_leave(cache);
        return;
    }
    struct nrm__counters *c = &mr->counters;
    add(&c->current_bytes, &c->peak_bytes, (int64_t)nbytes);
    add(&c->current_count, &c->peak_count, 1);
    atomic_fetch_add_explicit(&c->total_bytes, (int64_t)nbytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&c->total_count, 1, memory_order_relaxed);
}

static void
count_deallocation(nrm_resource *mr, size_t nbytes)
{
    struct nrm__cache *cache;
    struct nrm__shard *shard = enter_shard(mr, &cache);
    if (shard != NULL) {
        if (nrm__shard_count_out(shard, nbytes)) {
            nrm__shard_raise(shard);
        }
        nrm__cache_leave(cache);
        return;
    }
    struct nrm__counters *c = &mr->counters;
    add(&c->current_bytes, &c->peak_bytes, -(int64_t)nbytes);
    add(&c->current_count, &c->peak_count, -1);
}

/* A block that changed its size in place: what it grew by counts as allocated. */
void
nrm__count_resize(nrm_resource *mr, size_t old_nbytes, size_t nbytes)
{
    struct nrm__cache *cache;
    struct nrm__shard *shard = enter_shard(mr, &cache);
    struct nrm__counters *c = &mr->counters;
    int64_t grown = (int64_t)nbytes - (int64_t)old_nbytes;
    if (shard != NULL) {
        nrm__shard_publish(shard);
    }
    add(&c->current_bytes, &c->peak_bytes, grown);
    if (grown > 0) {
        atomic_fetch_add_explicit(&c->total_bytes, grown, memory_order_relaxed);
    }
    if (shard != NULL) {
        nrm__cache_leave(cache);
    }
}

/* ---- the short way ---- */

/* Makes the short way for the next time. */
static void
prepare_short(nrm_resource *mr)
{
    struct nrm__cache *cache;
    if (mr->ops->front == NULL || (nrm__is_watched() && mr->kind != NRM_KIND_HOST)) {
        return;
    }
    struct nrm__slot *slot = nrm__cache_enter_slot(mr, &cache);
    bool ready = false;
    if (slot != NULL) {
        for (struct nrm__shard *each = slot->front; each != NULL; each = each->behind) {
            nrm__shard_publish(each);
        }
        ready = slot->magazines != NULL || atomic_load(&slot->pool->is_closed);
        if (slot->magazines != NULL && slot->magazines->device == NRM_DEVICE_NONE) {
            slot->magazines->device = nrm_resource_device(slot->pool);
        }
        nrm__cache_leave(cache);
    }
    if (!ready && nrm__cache_make_slot(mr, &cache) != NULL) {
        nrm__cache_leave(cache);
    }
}

/* Ends a short way, counted. */
static inline void
leave(struct nrm__cache *cache, const struct nrm__slot *slot, size_t nbytes, bool in)
{
    nrm__short_count(slot->front, nbytes, in);
    nrm__cache_leave(cache);
}

/* For a pool itself. */
static bool
take_short(nrm_resource *pool, const struct nrm__request *request,
           struct nrm__block *out)
{
    nrm_stream room;
    struct nrm__cache *cache;
    const nrm_stream *named = request->stream;
    struct nrm__slot *slot = nrm__short_enter(pool, &named, &room, &cache);
    if (slot == NULL) {
        return false;
    }
    if (nrm__short_allocate(slot, request->nbytes, request->alignment, named, out) !=
        NULL) {
        leave(cache, slot, request->nbytes, true);
        return true;
    }
    nrm__cache_leave(cache);
    return false;
}

/* ---- the inner calls ---- */

/* The upstream of an adaptor that `block` came through, or NULL. */
nrm_resource *
nrm__branch_of(nrm_resource *mr, const struct nrm__block *block)
{
    if (!nrm__is_adaptor(mr)) {
        return NULL;
    }
    return mr->ops->branch != NULL ? mr->ops->branch(mr, block) : mr->upstream;
}

bool
nrm__leads_to(nrm_resource *mr, const struct nrm__block *block)
{
    while (mr != NULL && mr != block->owner) {
        mr = nrm__branch_of(mr, block);
    }
    return mr != NULL;
}

static bool
holds_itself(const nrm_resource *mr)
{
    return (mr->ops->flags & NRM__OPS_HOLDS) != 0;
}

/* Maps a block that a leaf has just made; on failure it goes back. */
static nrm_status
adopt(nrm_resource *mr, const struct nrm__request *request, struct nrm__block *block)
{
    block->owner = mr;
    block->nbytes = request->nbytes;
    NRM_DEBUG_ASSERT(nrm__is_aligned(block->ptr, request->alignment));
    NRM_DEBUG_ASSERT(block->capacity >= request->nbytes);
    if (block->segment != NULL) {
        return NRM_OK;
    }
    struct nrm__entry *entry;
    nrm_status status = nrm__entry_create(&entry);
    if (status == NRM_OK) {
        nrm__block_map_insert(entry, block);
        return NRM_OK;
    }
    mr->ops->deallocate(mr, block, request->stream);
    return status;
}

/* The long way, from here on. */
static nrm_status
allocate_op(nrm_resource *mr, const struct nrm__request *request,
            struct nrm__block *out)
{
    struct nrm__block block = {0};
    bool owns = !nrm__is_adaptor(mr);
    bool retains = owns && !holds_itself(mr);
    if (retains) {
        nrm_resource_retain(mr); /* for the block, before anybody can find it */
    }
    nrm_status status = mr->ops->allocate(mr, request, &block);
    if (status == NRM_OK && owns) {
        status = adopt(mr, request, &block);
    }
    if (status != NRM_OK) {
        if (retains) {
            nrm_resource_release(mr);
        }
        return status;
    }
    count_allocation(mr, request->nbytes);
    *out = block;
    return NRM_OK;
}

nrm_status
nrm__allocate(nrm_resource *mr, const struct nrm__request *request,
              struct nrm__block *out)
{
    if (mr->ops->take_back != NULL) {
        if (request->flags == 0 && take_short(mr, request, out)) {
            return NRM_OK;
        }
        prepare_short(mr);
    }
    return allocate_op(mr, request, out);
}

/* Whether the entry of a claimed block lives on in the retired list. */
static bool
is_retired_by_owner(const nrm_resource *mr)
{
    return mr->ops->release_block != NULL;
}

void
nrm__deallocate(nrm_resource *mr, const struct nrm__block *block, nrm_stream *stream)
{
    if (nrm__short_keep_claimed(mr, block, stream)) {
        return;
    }
    count_deallocation(mr, block->nbytes);
    if (nrm__is_adaptor(mr)) {
        mr->ops->deallocate(mr, block, stream);
        return;
    }
    bool retains = !holds_itself(mr);
    struct nrm__block gone = *block;
    if (block->segment == NULL || !nrm__retire_used(block)) {
        mr->ops->deallocate(mr, block, stream);
    }
    if (!retains) {
        return;
    }
    if (gone.segment == NULL && !is_retired_by_owner(mr)) {
        nrm__block_map_forget(&gone);
    }
    nrm_resource_release(mr);
}

void
nrm__deallocate_later(nrm_resource *mr, const struct nrm__block *block)
{
    /* Adaptors on the way count now; the owner gets the block when its epoch is
       done. */
    while (mr != block->owner) {
        nrm_resource *next = nrm__branch_of(mr, block);
        count_deallocation(mr, block->nbytes);
        if (mr->ops->forget_block != NULL) {
            mr->ops->forget_block(mr, block);
        }
        mr = next;
    }
    count_deallocation(mr, block->nbytes);
    nrm__retire(block, nrm__epoch_stamp());
    if (!holds_itself(mr)) {
        nrm_resource_release(mr);
    }
}

nrm_status
nrm__take(nrm_resource *upstream, const struct nrm__request *request,
          struct nrm__block *out)
{
    NRM_TRY(nrm__allocate(upstream, request, out));
    atomic_fetch_add_explicit(&out->owner->n_held, 1, memory_order_relaxed);
    return NRM_OK;
}

void
nrm__give_back(nrm_resource *upstream, struct nrm__block *block, bool later)
{
    bool claimed = nrm__block_map_claim(block);
    NRM_ASSERT(claimed);
    atomic_fetch_sub_explicit(&block->owner->n_held, 1, memory_order_relaxed);
    bool plain_source = block->owner == upstream && upstream->upstream == NULL &&
                        !is_retired_by_owner(upstream) &&
                        !(upstream->ops->flags & NRM__OPS_OVERLAY) &&
                        nrm_kind_is_host_accessible(upstream->kind);
    if (!later || !plain_source) {
        nrm__deallocate(upstream, block, NULL);
        return;
    }
    count_deallocation(upstream, block->nbytes);
    nrm__retire(block, 0);
    nrm_resource_release(upstream);
}

/* ---- the public calls ---- */

static void
zero(const struct nrm__block *block)
{
    void *token = block->nbytes >= ZERO_DETACHED_NBYTES ? nrm__detach() : NULL;
    memset(block->ptr, 0, block->nbytes);
    nrm__attach(token);
}

__attribute__((noinline)) static nrm_status
allocate_asked(nrm_resource *mr, size_t nbytes, size_t alignment, nrm_stream *stream,
               unsigned flags, void **out)
{
    struct nrm__request request;
    struct nrm__block block;
    nrm_status status = nrm__request_make(mr, nbytes, alignment, stream, &request);
    if (status != NRM_OK) {
        return nrm__request_failed(status, mr, nbytes);
    }
    if (nbytes == 0) {
        *out = NULL;
        return NRM_OK;
    }
    prepare_short(mr);
    request.flags = flags;
    status = allocate_op(mr, &request, &block);
    if (status != NRM_OK) {
        return nrm__request_failed(status, mr, nbytes);
    }
    if (nrm__is_watched()) {
        nrm__watch_taken(&block, 0, nbytes, stream);
    }
    if ((flags & NRM__REQUEST_ZEROED) && !(block.flags & NRM__BLOCK_IS_ZERO)) {
        zero(&block);
    }
    *out = block.ptr;
    return NRM_OK;
}

/* Every other case is the last call, so that this one saves no registers. */
nrm_status
nrm__allocate_long(nrm_resource *mr, size_t nbytes, size_t alignment,
                   nrm_stream *stream, unsigned flags, void **out)
{
    struct nrm__scopes *scopes = nrm__scopes_enter();
    if (scopes != NULL) {
        return nrm__scoped_allocate(scopes, mr, nbytes, alignment, stream, flags, out);
    }
    return mr->ops->log != 0 && nbytes != 0
               ? nrm__logged_allocate(mr, nbytes, alignment, stream, flags, out)
               : allocate_asked(mr, nbytes, alignment, stream, flags, out);
}

nrm_status
nrm__deallocate_found(nrm_resource *mr, void *ptr, nrm_stream *stream,
                      struct nrm__scopes *scopes)
{
    struct nrm__block block;
    if (mr->ops->log != 0) {
        return nrm__logged_deallocate(mr, ptr, stream);
    }
    prepare_short(mr);
    NRM_TRY(nrm__find_own(mr, ptr, &block));
    nrm_resource *owner = block.owner;
    nrm_status status = NRM_OK;
    if (nrm__block_map_claim(&block)) {
        if (nrm__is_watched()) {
            nrm__watch_given(&block, 0, block.nbytes);
        }
        nrm__scoped_give(scopes, mr, &block);
        nrm__deallocate(mr, &block, stream);
    }
    else {
        status = nrm__not_owned(mr, ptr, NULL);
    }
    nrm_resource_release(owner);
    return status;
}

nrm_status
nrm__deallocate_long(nrm_resource *mr, void *ptr, nrm_stream *stream)
{
    if (ptr == NULL) {
        return NRM_OK;
    }
    struct nrm__scopes *scopes = nrm__scopes_enter();
    if (scopes != NULL) {
        return nrm__scoped_deallocate(scopes, mr, ptr, stream);
    }
    return mr->ops->log != 0 ? nrm__logged_deallocate(mr, ptr, stream)
                             : nrm__deallocate_found(mr, ptr, stream, NULL);
}

nrm_status
nrm_resource_trim(nrm_resource *mr, size_t keep_nbytes, size_t *out_nbytes)
{
    size_t nbytes = 0;
    for (nrm_resource *each = mr; each != NULL; each = each->upstream) {
        if (each->ops->trim != NULL) {
            NRM_TRY(each->ops->trim(each, keep_nbytes, &nbytes));
        }
    }
    /* What a pool gave back to a source waits in the retired list; it was counted. */
    (void)nrm__retired_drain((uint64_t)nrm_option_get(NRM_OPT_WAIT_LIMIT));
    if (out_nbytes != NULL) {
        *out_nbytes = nbytes;
    }
    return NRM_OK;
}

nrm_status
nrm_resource_statistics(nrm_resource *mr, nrm_statistics *out)
{
    nrm_statistics statistics = {.errors = atomic_load(&mr->counters.errors)};
    nrm__cache_count(mr, &statistics);
    if (mr->ops->statistics != NULL) {
        mr->ops->statistics(mr, &statistics);
    }
    *out = statistics;
    return NRM_OK;
}

nrm_status
nrm_block_find(const void *ptr, nrm_block_info *out)
{
    struct nrm__block block;
    if (!nrm__block_map_find(ptr, &block)) {
        return NRM_NOT_FOUND;
    }
    *out = (nrm_block_info){
        .resource = block.owner,
        .kind = block.owner->kind,
        .device = nrm_resource_device(block.owner),
        .ptr = block.ptr,
        .nbytes = block.nbytes,
        .capacity = block.capacity,
        .reason = block.reason,
        .uses = nrm__known_uses_count(block.ptr),
    };
    return NRM_OK;
}

void
nrm_page_info(const void *ptr, size_t *out_page_nbytes, int *out_numa_node)
{
    *out_page_nbytes = nrm__mapping_page_size(ptr);
    *out_numa_node = nrm__numa_node_of(ptr);
}
