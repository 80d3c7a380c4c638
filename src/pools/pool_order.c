/*
 * Stream order in a pool of device memory: which free block an allocation on a stream
 * may have, and what it does when there is none.
 *
 * A block that is freed bears a tag (core/order.h). Until that is known to be done the
 * block stands in a list of its own stream, which has it back without a wait or a call
 * of the driver (of others only what it is, nrm__cuda_stream_id); what the host frees
 * stands in one list with the rest. What is done stands in the bins of the pool and is
 * anybody's.
 *
 * So neighbours merge only when they bear one stream's tags, or when both are done. One
 * that is done does not join one that is not, though it could: a stream that has used a
 * little of a large segment would then keep all of it from the others. They are put
 * together for that stream alone, when it would find nothing otherwise.
 *
 * An allocation takes what is its stream's own or what is done, whichever fits better,
 * what its thread keeps of other sizes and streams, what is done when the driver is
 * asked; then it grows the pool; and only then it makes its stream wait for another.
 * Before it cuts a large block it asks the driver too, when much was freed since the
 * last time: what is done merges, and what is not lies about in pieces that fit nobody.
 * Waiting takes the piece that is needed, and the rest of the block keeps its tag: the
 * stream that freed it goes on without a wait, also when the one that waits is stuck.
 * So nothing is left of a block after a wait that had to be stamped anew. What was
 * freed on the same stream through another object, or on the same handle, is waited for
 * before the pool grows: where the handle still means that stream, this is no wait.
 *
 * The driver is called with no lock held; a block that somebody waits for is claimed.
 *
 * On a stream that is being captured (core/capture.h) an allocation takes what the
 * capture has freed on the stream, what is done, or new memory, and never what the
 * stream itself freed before: that is in the order of the stream, and the graph will
 * run anywhere. What it gets is the graph's from then on. Streams that stay are asked
 * about only when there is no memory at hand.
 */
#include "pools/pool_order.h"

#include "base/error.h"
#include "core/capture.h"
#include "core/stream.h"
#include "cuda/capture.h"

enum {
    LOOKS = 64,      /* blocks that a search beside the bins looks at */
    MAX_REFUSED = 8, /* blocks that could not be waited for */
    LOOK_SHIFT = 4,  /* freed since the driver was asked: this fraction of the pool */
};

#define LOOK_MIN_NBYTES NRM__MIB /* requests of fewer bytes ask only when they must */
#define LOOK_AFTER_NBYTES (64 * NRM__MIB) /* freed meanwhile, at least */

/* What an allocation looks for. */
struct search {
    struct nrm__pool *pool;
    size_t nbytes, alignment;
    nrm_stream *stream; /* NULL: the host */
    nrm_stream *given;  /* as it was asked for, also where it counts as the host */
    int device;
    bool has_slot; /* something may be its own */
    bool drained;  /* of what other threads keep, once */
    struct nrm__order_tag slot;
    uintptr_t origin;
    bool is_asked; /* whether the stream is being captured */
    bool is_captured;
    struct nrm__order_tag held; /* captured: what a block bears while it is live */
};

/* ---- without a wait ---- */

static bool
is_usable(struct nrm__pool_block *block, const void *context)
{
    const struct search *search = context;
    const struct nrm__pool_ordered_block *own = nrm__pool_ordered(block);
    bool is_own = search->has_slot && own->tag.stream == search->slot.stream &&
                  own->tag.generation == search->slot.generation;
    return !own->is_held && (is_own || nrm__order_is_done(own->tag));
}

/* What the stream freed itself. */
static struct nrm__pool_block *
take_own_locked(const struct search *search)
{
    struct nrm__pool *pool = search->pool;
    if (!search->has_slot) {
        return NULL;
    }
    struct nrm__pool_list *list =
        nrm__pool_list_at(pool->order, search->slot.stream % NRM__POOL_N_STREAMS);
    if (list != NULL && list->nbytes != 0 && nrm__pool_is_of_list(list, search->slot)) {
        return nrm__pool_take_from_locked(pool, &list->bins, search->nbytes,
                                          search->alignment);
    }
    return nrm__pool_take_wanted_locked(pool, &pool->order->others->bins,
                                        search->nbytes, search->alignment, LOOKS,
                                        is_usable, search);
}

/* What is done fits better than what the stream freed itself. */
static bool
done_fits_better_locked(const struct search *search)
{
    struct nrm__pool *pool = search->pool;
    if (!search->has_slot) {
        return false; /* its own are looked at one by one */
    }
    const struct nrm__pool_list *list =
        nrm__pool_list_at(pool->order, search->slot.stream % NRM__POOL_N_STREAMS);
    if (list == NULL || list->nbytes == 0 ||
        !nrm__pool_is_of_list(list, search->slot)) {
        return false;
    }
    unsigned class = nrm__pool_class_of(search->nbytes);
    return nrm__pool_next_class_locked(pool->bins, class) <
           nrm__pool_next_class_locked(&list->bins, class);
}

/* Gives the free neighbours of a block that are done the block's own tag. */
static void
join_done_locked(struct nrm__pool *pool, struct nrm__pool_ordered_block *own,
                 struct nrm__pool_block *neighbour)
{
    if (neighbour == NULL || nrm__pool_state_of(neighbour) != NRM__POOL_FREE ||
        nrm__pool_ordered(neighbour)->list != NULL) {
        return;
    }
    nrm__pool_bin_remove_locked(pool, neighbour);
    nrm__pool_ordered(neighbour)->tag = own->tag;
    nrm__pool_ordered(neighbour)->origin = own->origin;
    nrm__pool_free_locked(pool, neighbour, false);
}

static size_t
done_nbytes(struct nrm__pool_block *block)
{
    bool is_done = block != NULL && nrm__pool_state_of(block) == NRM__POOL_FREE &&
                   nrm__pool_ordered(block)->list == NULL;
    return is_done ? block->size : 0;
}

/* What the stream freed itself, together with what is done beside it. */
static struct nrm__pool_block *
take_joined_locked(const struct search *search)
{
    struct nrm__pool *pool = search->pool;
    struct nrm__pool_list *list =
        search->has_slot
            ? nrm__pool_list_at(pool->order, search->slot.stream % NRM__POOL_N_STREAMS)
            : NULL;
    if (list == NULL || !nrm__pool_is_of_list(list, search->slot)) {
        return NULL;
    }
    struct nrm__link *link = list->pending.previous;
    for (unsigned i = 0; i < LOOKS && link != &list->pending; i++) {
        struct nrm__pool_ordered_block *own =
            NRM__CONTAINER(link, struct nrm__pool_ordered_block, pending);
        struct nrm__pool_block *previous = own->block.previous, *next = own->block.next;
        size_t nbytes = own->block.size + done_nbytes(previous) + done_nbytes(next);
        if (nbytes >= search->nbytes + (search->alignment - pool->alignment)) {
            join_done_locked(pool, own, next);
            join_done_locked(pool, own, previous);
            return take_own_locked(search);
        }
        link = link->previous;
    }
    return NULL;
}

/* A block that the stream may use as it is, claimed, or NULL. */
static struct nrm__pool_block *
take_usable(const struct search *search)
{
    struct nrm__pool *pool = search->pool;
    struct nrm__pool_block *block = NULL;
    nrm__lock_acquire(&pool->lock);
    if (done_fits_better_locked(search)) {
        block = nrm__pool_take_locked(pool, search->nbytes, search->alignment);
    }
    if (block == NULL) {
        block = take_own_locked(search);
    }
    if (block == NULL) {
        block = nrm__pool_take_locked(pool, search->nbytes, search->alignment);
    }
    if (block == NULL && nrm__pool_promote_locked(pool)) {
        block = nrm__pool_take_locked(pool, search->nbytes, search->alignment);
    }
    if (block == NULL) {
        block = take_joined_locked(search);
    }
    nrm__lock_release(&pool->lock);
    return block;
}

/* ---- with a wait of the stream ---- */

/* Claimed blocks that are not handed out, with the tags that they had. */
static void
put_back(struct nrm__pool *pool, struct nrm__pool_block **blocks, unsigned n)
{
    nrm__lock_acquire(&pool->lock);
    for (unsigned i = 0; i < n; i++) {
        pool->live_nbytes -= blocks[i]->size;
        nrm__pool_free_locked(pool, blocks[i], false);
    }
    nrm__lock_release(&pool->lock);
}

static bool
has_origin(struct nrm__pool_block *block, const void *context)
{
    return nrm__pool_ordered(block)->origin == ((const struct search *)context)->origin;
}

static struct nrm__pool_block *
take_same_origin_locked(const struct search *search)
{
    struct nrm__pool *pool = search->pool;
    struct nrm__pool_block *block =
        nrm__pool_take_wanted_locked(pool, &pool->order->others->bins, search->nbytes,
                                     search->alignment, LOOKS, has_origin, search);
    for (unsigned i = 0; i < NRM__POOL_N_STREAMS && block == NULL; i++) {
        struct nrm__pool_list *list = nrm__pool_list_at(pool->order, i);
        if (list != NULL && list->nbytes != 0 && list->origin == search->origin) {
            block = nrm__pool_take_from_locked(pool, &list->bins, search->nbytes,
                                               search->alignment);
        }
    }
    return block;
}

/* What was freed on the same handle. NRM_NOT_FOUND: nothing was. */
static nrm_status
adopt_same_origin(const struct search *search, struct nrm__pool_block **out)
{
    struct nrm__pool *pool = search->pool;
    if (search->origin == 0) {
        return NRM_NOT_FOUND;
    }
    nrm__lock_acquire(&pool->lock);
    struct nrm__pool_block *block = take_same_origin_locked(search);
    nrm__lock_release(&pool->lock);
    if (block == NULL) {
        return NRM_NOT_FOUND;
    }
    nrm_status status =
        nrm__order_adopt(nrm__pool_ordered(block)->tag, search->stream, search->device);
    if (status != NRM_OK) {
        put_back(pool, &block, 1);
        return status;
    }
    *out = block;
    return NRM_OK;
}

/* A block of the list, claimed, that is not done; NULL: there is none. */
static struct nrm__pool_block *
take_pending(const struct search *search, unsigned i)
{
    struct nrm__pool *pool = search->pool;
    struct nrm__pool_list *list = nrm__pool_list_at(pool->order, i);
    struct nrm__pool_block *block = NULL;
    nrm__lock_acquire(&pool->lock);
    if (list != NULL && list->nbytes != 0 && !nrm__pool_is_captured_list(list)) {
        block = nrm__pool_take_from_locked(pool, &list->bins, search->nbytes,
                                           search->alignment);
    }
    nrm__lock_release(&pool->lock);
    return block;
}

/* Makes the stream wait for one of the blocks that others freed. NRM_NOT_FOUND: there
   is none that fits and can be waited for. */
static nrm_status
adopt_any(const struct search *search, struct nrm__pool_block **out)
{
    struct nrm__pool *pool = search->pool;
    struct nrm__pool_block *refused[MAX_REFUSED], *block = NULL;
    unsigned n_refused = 0;
    nrm_status status = NRM_NOT_FOUND;
    if (search->stream == NULL) {
        return NRM_NOT_FOUND; /* the host waits for nothing */
    }
    nrm__lock_acquire(&pool->lock);
    unsigned turn = pool->order->turn++;
    nrm__lock_release(&pool->lock);
    for (unsigned i = 0; i < NRM__POOL_N_LISTS && n_refused < MAX_REFUSED;) {
        unsigned at = i < NRM__POOL_N_STREAMS ? (turn + i) % NRM__POOL_N_STREAMS : i;
        block = take_pending(search, at);
        if (block != NULL) {
            status = nrm__order_adopt(nrm__pool_ordered(block)->tag, search->stream,
                                      search->device);
            if (status == NRM_OK) {
                break;
            }
            refused[n_refused++] = block;
            if (status != NRM_NOT_FOUND) {
                break;
            }
        }
        /* Of one stream the others cannot be waited for either. */
        i += block == NULL || i < NRM__POOL_N_STREAMS;
    }
    put_back(pool, refused, n_refused);
    if (status == NRM_OK) {
        *out = block;
    }
    return status;
}

/* ---- for a graph ---- */

/* Asks whether the stream is being captured; then its own memory is the graph's. */
static nrm_status
ask_for_capture(struct search *search)
{
    struct nrm__capture_tags tags;
    search->is_asked = true;
    nrm_status status =
        nrm__capture_find(search->given, search->device, &search->pool->base, &tags);
    if (status == NRM_NOT_FOUND) {
        return NRM_OK;
    }
    NRM_TRY(status);
    search->is_captured = true;
    search->held = tags.held;
    search->slot = tags.own;
    search->has_slot = nrm__order_is_captured(tags.own.stream);
    return NRM_OK;
}

/* Asks the driver what is done only when it has no more memory: whatever is called
   inside a capture may hurt it. */
static nrm_status
find_captured(const struct search *search, struct nrm__pool_block **out)
{
    for (;;) {
        *out = take_usable(search);
        if (*out != NULL) {
            return NRM_OK;
        }
        nrm_status status =
            nrm__pool_grow(search->pool, search->nbytes, search->alignment);
        if (status == NRM_OUT_OF_MEMORY && nrm__pool_poll(search->pool)) {
            continue;
        }
        NRM_TRY(status);
    }
}

/* With no record on a context meanwhile, which would invalidate the capture. */
static nrm_status
find_shielded(const struct search *search, struct nrm__pool_block **out)
{
    nrm__captures_reap();
    nrm__cuda_capture_shield();
    nrm_status status = find_captured(search, out);
    nrm__cuda_capture_withdraw();
    return status;
}

/* ---- all of it ---- */

static struct search
search_for(struct nrm__pool *pool, const struct nrm__request *request, size_t nbytes)
{
    struct search search = {
        .pool = pool,
        .nbytes = nbytes,
        .alignment = nrm__max(request->alignment, pool->alignment),
        .given = request->stream,
        .device = nrm_resource_device(&pool->base),
    };
    search.stream = nrm__pool_stream_on(search.device, request->stream);
    search.origin = nrm__stream_origin(search.stream);
    search.has_slot = nrm__order_slot_of(search.stream, search.device, &search.slot);
    return search;
}

/* Nothing is free, and the upstream has no more: another stream's memory, what other
   threads keep, or what becomes done within the time that the pool may wait.
   NRM_NOT_FOUND: it may be there now. */
static nrm_status
find_at_last(struct search *search, nrm_status full, struct nrm__pool_block **out)
{
    struct nrm__pool *pool = search->pool;
    nrm_status status = adopt_any(search, out);
    if (status != NRM_NOT_FOUND) {
        return status;
    }
    if (!search->drained) {
        search->drained = true;
        nrm__cache_drain(&pool->base);
        return NRM_NOT_FOUND;
    }
    uint64_t wait_ns = pool->waits_when_full ? UINT64_MAX : pool->wait_limit_ns;
    bool waits = search->nbytes <= pool->maximum_nbytes;
    return waits && nrm__pool_wait_for_more(pool, wait_ns) ? NRM_NOT_FOUND : full;
}

/* So much was freed since the driver was asked that a large block should not be cut
   before it is asked again. Blocks of one size are never cut too small. */
static bool
is_look_due(const struct search *search)
{
    struct nrm__pool *pool = search->pool;
    if (search->nbytes < LOOK_MIN_NBYTES || pool->fixed.block_nbytes != 0) {
        return false;
    }
    nrm__lock_acquire(&pool->lock);
    size_t pending = nrm__pool_pending_locked(pool);
    size_t *looked = &pool->order->looked_nbytes;
    *looked = nrm__min(*looked, pending); /* streams had theirs back */
    bool is_due = pending - *looked >=
                  nrm__max(pool->reserved_nbytes >> LOOK_SHIFT, LOOK_AFTER_NBYTES);
    nrm__lock_release(&pool->lock);
    return is_due;
}

/* What this thread kept for the stream bears its tag by now: later the handle may be
   bad. */
static void
note(const struct search *search)
{
    if (search->stream != NULL) {
        nrm__order_note(search->stream);
    }
}

/* The search on a stream that is not captured. With NRM_OK and no block it turned out
   that it is. */
static nrm_status
find_streamed(struct search *search, struct nrm__pool_block **out)
{
    if (is_look_due(search)) {
        if (!search->is_asked) {
            NRM_TRY(ask_for_capture(search));
        }
        if (search->is_captured) {
            return NRM_OK;
        }
        (void)nrm__pool_poll(search->pool);
    }
    for (;;) {
        *out = take_usable(search);
        if (*out != NULL) {
            return NRM_OK;
        }
        if (!search->is_asked) {
            NRM_TRY(ask_for_capture(search));
            if (search->is_captured) {
                return NRM_OK;
            }
        }
        if (nrm__pool_take_from_thread(search->pool)) {
            note(search);
            continue;
        }
        if (nrm__pool_poll(search->pool)) {
            continue;
        }
        nrm_status status = adopt_same_origin(search, out);
        if (status != NRM_NOT_FOUND) {
            return status;
        }
        status = nrm__pool_grow(search->pool, search->nbytes, search->alignment);
        if (status == NRM_OUT_OF_MEMORY) {
            status = find_at_last(search, status, out);
            if (status != NRM_NOT_FOUND) {
                return status;
            }
        }
        else if (status != NRM_OK) {
            return status;
        }
    }
}

nrm_status
nrm__pool_find_ordered(struct nrm__pool *pool, const struct nrm__request *request,
                       size_t nbytes, struct nrm__pool_block **out)
{
    struct search search = search_for(pool, request, nbytes);
    nrm_status status = NRM_OK;
    *out = NULL;
    /* The host and the legacy stream are never captured. */
    search.is_asked = search.given == NULL ||
                      search.given->handle <= NRM_STREAM_HANDLE_LEGACY;
    if (nrm__stream_may_capture(search.given)) {
        NRM_TRY(ask_for_capture(&search));
    }
    if (!search.is_captured) {
        status = find_streamed(&search, out);
    }
    if (status == NRM_OK && search.is_captured) {
        status = find_shielded(&search, out);
    }
    if (status == NRM_OK) {
        struct nrm__pool_ordered_block *own = nrm__pool_ordered(*out);
        own->is_held = false;
        own->then = search.is_captured ? search.held : NRM__ORDER_DONE;
    }
    return status;
}
