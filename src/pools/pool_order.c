/*
 * Stream order in a pool of device memory: which free block an allocation on a stream may
 * have, and what it does when there is none.
 *
 * A block that is freed bears a tag (core/order.h). Until that is known to be done the
 * block stands in a list of its own stream, which has it back without a wait or a call of the
 * driver; what the host frees, and what is freed on a bare handle, stands in one list
 * with the rest. What is done stands in the bins of the pool and is anybody's.
 *
 * So neighbours merge only when they bear one stream's tags, or when both are done. One
 * that is done does not join one that is not, though it could: a stream that has used a
 * little of a large segment would then keep all of it from the others. They are put
 * together for that stream alone, when it would find nothing otherwise.
 *
 * An allocation takes what is its stream's own, what is done, what is done when the driver
 * is asked; then it grows the pool; and only then it makes its stream wait for another.
 * Waiting takes the piece that is needed, and the rest of the block keeps its tag: the stream
 * that freed it goes on without a wait, also when the one that waits is stuck. So nothing
 * is left of a block after a wait that had to be stamped anew. What was freed on the same
 * stream through another object, or on a bare handle, which is another one each time, is
 * waited for before the pool grows: where the handle still means that stream, this is no wait.
 *
 * The driver is called with no lock held; a block that somebody waits for is claimed.
 */
#include "base/assert.h"
#include "base/error.h"
#include "core/hooks.h"
#include "core/nodes.h"
#include "core/stream.h"
#include "core/uses.h"
#include "cuda/context.h"
#include "os/memory.h"
#include "os/system.h"
#include "pools/pool_internal.h"

enum {
    N_LISTS = NRM__POOL_N_STREAMS + 1, /* the last one: others */
    LOOKS = 64,       /* blocks that a search beside the bins looks at */
    OTHERS_ASKED = 8, /* blocks of others that the driver is asked about, in turn */
    MAX_REFUSED = 8,  /* blocks that could not be waited for */
};

#define PAUSE_FIRST_NS UINT64_C(20000) /* between two looks; doubled up to ... */
#define PAUSE_LAST_NS UINT64_C(500000)

/* What an allocation looks for. */
struct search {
    struct nrm__pool *pool;
    size_t nbytes, alignment;
    nrm_stream *stream; /* NULL: the host */
    int device;
    bool has_slot; /* something may be its own */
    struct nrm__order_tag slot;
    uintptr_t origin;
};

/* ---- lists ---- */

static size_t
list_nbytes(void)
{
    return nrm__align_up(sizeof(struct nrm__pool_list), nrm__page_size());
}

/* NULL: no memory. */
static struct nrm__pool_list *
create_list(void)
{
    void *memory;
    if (nrm__map(list_nbytes(), nrm__page_size(), &memory) != 0) {
        return NULL;
    }
    struct nrm__pool_list *list = memory;
    for (unsigned class = 0; class < NRM__POOL_N_CLASSES; class++) {
        nrm__list_init(&list->bins.heads[class]);
    }
    nrm__list_init(&list->pending);
    return list;
}

nrm_status
nrm__pool_order_create(struct nrm__pool *pool)
{
    struct nrm__pool_order *order = nrm__node_allocate(sizeof *order);
    if (order != NULL) {
        order->others = create_list();
    }
    if (order == NULL || order->others == NULL) {
        nrm__node_deallocate(order, sizeof *order);
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe a pool");
    }
    pool->order = order;
    pool->block_nbytes = sizeof(struct nrm__pool_ordered_block);
    return NRM_OK;
}

/* NULL: not there yet. */
static struct nrm__pool_list *
list_at(struct nrm__pool_order *order, unsigned i)
{
    return i == NRM__POOL_N_STREAMS
               ? order->others
               : atomic_load_explicit(&order->streams[i], memory_order_acquire);
}

void
nrm__pool_order_destroy(struct nrm__pool *pool)
{
    if (pool->order == NULL) {
        return;
    }
    for (unsigned i = 0; i < N_LISTS; i++) {
        if (list_at(pool->order, i) != NULL) {
            nrm__unmap(list_at(pool->order, i), list_nbytes());
        }
    }
    nrm__node_deallocate(pool->order, sizeof *pool->order);
    pool->order = NULL;
}

static bool
is_slot(struct nrm__order_tag tag)
{
    return tag.stream > 1;
}

static bool
is_of_list(const struct nrm__pool_list *list, struct nrm__order_tag tag)
{
    return list->stream == tag.stream && list->generation == tag.generation;
}

/* Sees to it that there is a list for the slot; without one its blocks are others. */
static void
prepare_list(struct nrm__pool_order *order, struct nrm__order_tag tag)
{
    _Atomic(struct nrm__pool_list *) *place =
        &order->streams[tag.stream % NRM__POOL_N_STREAMS];
    struct nrm__pool_list *none = NULL;
    if (!is_slot(tag) || atomic_load_explicit(place, memory_order_acquire) != NULL) {
        return;
    }
    struct nrm__pool_list *list = create_list();
    if (list != NULL && !atomic_compare_exchange_strong(place, &none, list)) {
        nrm__unmap(list, list_nbytes());
    }
}

/* Where a free block belongs; NULL: it is done. */
static struct nrm__pool_list *
list_for_locked(struct nrm__pool_order *order,
                const struct nrm__pool_ordered_block *own)
{
    if (own->tag.stream == NRM__ORDER_DONE.stream) {
        return NULL;
    }
    struct nrm__pool_list *list =
        is_slot(own->tag) && !own->is_lone
            ? list_at(order, own->tag.stream % NRM__POOL_N_STREAMS)
            : NULL;
    if (list != NULL && list->nbytes == 0) {
        list->stream = own->tag.stream;
        list->generation = own->tag.generation;
        list->origin = own->origin;
    }
    return list != NULL && is_of_list(list, own->tag) ? list : order->others;
}

struct nrm__pool_bins *
nrm__pool_enter_list_locked(struct nrm__pool *pool, struct nrm__pool_block *block)
{
    struct nrm__pool_ordered_block *own = nrm__pool_ordered(block);
    own->list = list_for_locked(pool->order, own);
    if (own->list == NULL) {
        return pool->bins;
    }
    nrm__list_append(&own->list->pending, &own->pending);
    own->list->nbytes += block->size;
    pool->order->pending_nbytes += block->size;
    return &own->list->bins;
}

struct nrm__pool_bins *
nrm__pool_leave_list_locked(struct nrm__pool *pool, struct nrm__pool_block *block)
{
    struct nrm__pool_ordered_block *own = nrm__pool_ordered(block);
    struct nrm__pool_list *list = own->list;
    own->list = NULL;
    if (list == NULL) {
        return pool->bins;
    }
    nrm__list_remove(&own->pending);
    list->nbytes -= block->size;
    pool->order->pending_nbytes -= block->size;
    return &list->bins;
}

size_t
nrm__pool_pending_locked(const struct nrm__pool *pool)
{
    return pool->order != NULL ? pool->order->pending_nbytes : 0;
}

/* ---- tags ---- */

/* By the tags alone, so that it does not depend on what the GPU does meanwhile. */
bool
nrm__pool_is_one_locked(const struct nrm__pool *pool, struct nrm__pool_block *a,
                        struct nrm__pool_block *b)
{
    (void)pool;
    struct nrm__order_tag x = nrm__pool_ordered(a)->tag, y = nrm__pool_ordered(b)->tag;
    return x.stream == y.stream && x.generation == y.generation;
}

/* The later count of one stream. That it is done meanwhile is found out later: now there may
   be a neighbour that it would have to merge with. */
void
nrm__pool_join_tags_locked(struct nrm__pool_block *a, struct nrm__pool_block *b)
{
    struct nrm__order_tag *tag = &nrm__pool_ordered(a)->tag;
    tag->count = nrm__max(tag->count, nrm__pool_ordered(b)->tag.count);
}

/* The streams 0, 1 and 2 are those of a device. Where that is not known, as over memory of
   other people's, they are ordered as the host is. */
static nrm_stream *
stream_on(int device, nrm_stream *stream)
{
    bool is_known = stream == NULL || device != NRM_DEVICE_NONE ||
                    !nrm__stream_is_special(stream);
    return is_known ? stream : NULL;
}

/* Of a stream: its handle, and of a per-thread one the thread. 0: that of no other. */
static uintptr_t
origin_of(const nrm_stream *stream)
{
    if (stream == NULL || stream->handle < NRM_STREAM_HANDLE_PER_THREAD) {
        return 0;
    }
    return stream->handle ^ (uintptr_t)stream->thread << 32;
}

void
nrm__pool_stamp(struct nrm__pool *pool, struct nrm__pool_block *block,
                nrm_stream *stream)
{
    struct nrm__pool_ordered_block *own = nrm__pool_ordered(block);
    int device = nrm_resource_device(&pool->base);
    stream = stream_on(device, stream);
    own->origin = origin_of(stream);
    own->is_lone = stream != NULL && !nrm__stream_stays(stream);
    own->tag = nrm__order_stamp(stream, device);
    if (!own->is_lone) {
        prepare_list(pool->order, own->tag);
    }
}

/* ---- what is done ---- */

static struct nrm__pool_ordered_block *
oldest_of(struct nrm__pool_list *list)
{
    return list->pending.next != &list->pending
               ? NRM__CONTAINER(list->pending.next, struct nrm__pool_ordered_block,
                                pending)
               : NULL;
}

static void
set_done_locked(struct nrm__pool *pool, struct nrm__pool_ordered_block *own)
{
    nrm__pool_bin_remove_locked(pool, &own->block);
    own->tag = NRM__ORDER_DONE;
    nrm__pool_free_locked(pool, &own->block, false);
}

/* Of one stream, from the oldest on. */
static bool
promote_stream_locked(struct nrm__pool *pool, struct nrm__pool_list *list)
{
    struct nrm__pool_ordered_block *own;
    bool more = false;
    while ((own = oldest_of(list)) != NULL && nrm__order_is_done(own->tag)) {
        set_done_locked(pool, own);
        more = true;
    }
    return more;
}

/* Of several: none that is not done hides those behind it. */
static bool
promote_others_locked(struct nrm__pool *pool, struct nrm__pool_list *list)
{
    struct nrm__link *link = list->pending.next;
    bool more = false;
    for (unsigned i = 0; i < LOOKS && link != &list->pending; i++) {
        struct nrm__pool_ordered_block *own =
            NRM__CONTAINER(link, struct nrm__pool_ordered_block, pending);
        link = link->next; /* stays: only what is done merges */
        if (nrm__order_is_done(own->tag)) {
            set_done_locked(pool, own);
            more = true;
        }
    }
    return more;
}

/* What is known to be done, of all lists; calls nobody. */
static bool
promote_locked(struct nrm__pool *pool)
{
    bool more = false;
    for (unsigned i = 0; i < NRM__POOL_N_STREAMS && nrm__pool_pending_locked(pool) != 0;
         i++) {
        struct nrm__pool_list *list = list_at(pool->order, i);
        if (list != NULL) {
            more |= promote_stream_locked(pool, list);
        }
    }
    return promote_others_locked(pool, pool->order->others) || more;
}

/* The tags that the driver is asked about: the oldest of each stream, and a few others. */
static unsigned
collect_locked(struct nrm__pool *pool, struct nrm__order_tag *out)
{
    const struct nrm__link *head = &pool->order->others->pending;
    const struct nrm__link *link = head->next;
    unsigned n = 0;
    for (; n < OTHERS_ASKED && link != head; link = link->next) {
        out[n++] = NRM__CONTAINER(link, struct nrm__pool_ordered_block, pending)->tag;
    }
    for (unsigned i = 0; i < NRM__POOL_N_STREAMS; i++) {
        struct nrm__pool_list *list = list_at(pool->order, i);
        struct nrm__pool_ordered_block *own = list != NULL ? oldest_of(list) : NULL;
        if (own != NULL) {
            out[n++] = own->tag;
        }
    }
    return n;
}

/* The next time the driver is asked about those behind them. */
static void
turn_others_locked(struct nrm__pool_list *list)
{
    for (unsigned i = 0; i < OTHERS_ASKED && oldest_of(list) != NULL; i++) {
        struct nrm__link *link = list->pending.next;
        nrm__list_remove(link);
        nrm__list_append(&list->pending, link);
    }
}

/* Asks the driver; true: more is done than before. */
static bool
poll(struct nrm__pool *pool)
{
    struct nrm__order_tag tags[NRM__POOL_N_STREAMS + OTHERS_ASKED];
    nrm__lock_acquire(&pool->lock);
    unsigned n = nrm__pool_pending_locked(pool) != 0 ? collect_locked(pool, tags) : 0;
    nrm__lock_release(&pool->lock);
    if (n == 0) {
        return false;
    }
    for (unsigned i = 0; i < n; i++) {
        (void)nrm__order_poll(tags[i]);
    }
    nrm__lock_acquire(&pool->lock);
    bool more = promote_locked(pool);
    turn_others_locked(pool->order->others);
    nrm__lock_release(&pool->lock);
    return more;
}

/* Looks again and again, detached, for `limit_ns` at most (UINT64_MAX: as long as it takes),
   until more is done. */
static bool
wait_for_more(struct nrm__pool *pool, uint64_t limit_ns)
{
    uint64_t start = nrm__clock_ns(), pause = PAUSE_FIRST_NS;
    bool more = poll(pool);
    if (more || limit_ns == 0) {
        return more;
    }
    nrm__lock_acquire(&pool->lock);
    bool waits = nrm__pool_pending_locked(pool) != 0;
    pool->n_waits += waits;
    nrm__lock_release(&pool->lock);
    void *token = waits ? nrm__detach() : NULL;
    while (waits && !more && !nrm__is_exiting() && !nrm__cuda_is_forked() &&
           !nrm__epoch_is_lost() && nrm__clock_ns() - start < limit_ns) {
        nrm__sleep_ns(pause);
        pause = pause < PAUSE_LAST_NS ? 2 * pause : pause;
        more = poll(pool);
    }
    nrm__attach(token);
    return more;
}

void
nrm__pool_settle(struct nrm__pool *pool, uint64_t wait_ns)
{
    bool more = true;
    while (more) {
        more = wait_for_more(pool, wait_ns);
    }
}

/* ---- without a wait ---- */

static bool
is_usable(struct nrm__pool_block *block, const void *context)
{
    const struct search *search = context;
    return nrm__order_is_free(nrm__pool_ordered(block)->tag, search->stream,
                              search->device);
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
        list_at(pool->order, search->slot.stream % NRM__POOL_N_STREAMS);
    if (list != NULL && list->nbytes != 0 && is_of_list(list, search->slot)) {
        return nrm__pool_take_from_locked(pool, &list->bins, search->nbytes,
                                          search->alignment);
    }
    return nrm__pool_take_wanted_locked(pool, &pool->order->others->bins,
                                        search->nbytes, search->alignment, LOOKS,
                                        is_usable, search);
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
    nrm__pool_ordered(neighbour)->is_lone = own->is_lone;
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
            ? list_at(pool->order, search->slot.stream % NRM__POOL_N_STREAMS)
            : NULL;
    if (list == NULL || !is_of_list(list, search->slot)) {
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
    nrm__lock_acquire(&pool->lock);
    struct nrm__pool_block *block = take_own_locked(search);
    if (block == NULL) {
        block = nrm__pool_take_locked(pool, search->nbytes, search->alignment);
    }
    if (block == NULL && promote_locked(pool)) {
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
        struct nrm__pool_list *list = list_at(pool->order, i);
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
    struct nrm__pool_list *list = list_at(pool->order, i);
    struct nrm__pool_block *block = NULL;
    nrm__lock_acquire(&pool->lock);
    if (list != NULL && list->nbytes != 0) {
        block = nrm__pool_take_from_locked(pool, &list->bins, search->nbytes,
                                           search->alignment);
    }
    nrm__lock_release(&pool->lock);
    return block;
}

/* Makes the stream wait for one of the blocks that others freed. NRM_NOT_FOUND: there is none
   that fits and can be waited for. */
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
    for (unsigned i = 0; i < N_LISTS && n_refused < MAX_REFUSED;) {
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

/* ---- all of it ---- */

static struct search
search_for(struct nrm__pool *pool, const struct nrm__request *request, size_t nbytes)
{
    struct search search = {
        .pool = pool,
        .nbytes = nbytes,
        .alignment = nrm__max(request->alignment, pool->alignment),
        .device = nrm_resource_device(&pool->base),
    };
    search.stream = stream_on(search.device, request->stream);
    search.origin = origin_of(search.stream);
    search.has_slot = nrm__order_slot_of(search.stream, search.device, &search.slot);
    return search;
}

/* Nothing is free, and the upstream has no more: another stream's memory, or what becomes
   done within the time that the pool may wait. NRM_NOT_FOUND: it may be there now. */
static nrm_status
find_at_last(const struct search *search, nrm_status full, struct nrm__pool_block **out)
{
    struct nrm__pool *pool = search->pool;
    nrm_status status = adopt_any(search, out);
    if (status != NRM_NOT_FOUND) {
        return status;
    }
    uint64_t wait_ns = pool->waits_when_full ? UINT64_MAX : pool->wait_limit_ns;
    bool waits = search->nbytes <= pool->maximum_nbytes;
    return waits && wait_for_more(pool, wait_ns) ? NRM_NOT_FOUND : full;
}

nrm_status
nrm__pool_find_ordered(struct nrm__pool *pool, const struct nrm__request *request,
                       size_t nbytes, struct nrm__pool_block **out)
{
    struct search search = search_for(pool, request, nbytes);
    for (;;) {
        *out = take_usable(&search);
        if (*out != NULL) {
            return NRM_OK;
        }
        if (poll(pool)) {
            continue;
        }
        nrm_status status = adopt_same_origin(&search, out);
        if (status != NRM_NOT_FOUND) {
            return status;
        }
        status = nrm__pool_grow(pool, nbytes, search.alignment);
        if (status == NRM_OUT_OF_MEMORY) {
            status = find_at_last(&search, status, out);
            if (status != NRM_NOT_FOUND) {
                return status;
            }
        }
        else if (status != NRM_OK) {
            return status;
        }
    }
}

/* ---- the check ---- */

static void
check_list_locked(struct nrm__pool_list *list, bool is_others)
{
    size_t nbytes = 0;
    for (struct nrm__link *link = list->pending.next; link != &list->pending;
         link = link->next) {
        struct nrm__pool_ordered_block *own =
            NRM__CONTAINER(link, struct nrm__pool_ordered_block, pending);
        NRM_ASSERT(nrm__pool_state_of(&own->block) == NRM__POOL_FREE);
        NRM_ASSERT(own->list == list);
        NRM_ASSERT(own->tag.stream != NRM__ORDER_DONE.stream);
        NRM_ASSERT(is_others || (is_of_list(list, own->tag) && !own->is_lone));
        nbytes += own->block.size;
    }
    NRM_ASSERT(nbytes == list->nbytes);
    nrm__pool_check_bins_locked(&list->bins, nbytes);
}

void
nrm__pool_check_order_locked(struct nrm__pool *pool)
{
    size_t nbytes = 0;
    for (unsigned i = 0; i < N_LISTS; i++) {
        struct nrm__pool_list *list = list_at(pool->order, i);
        if (list != NULL) {
            check_list_locked(list, i == NRM__POOL_N_STREAMS);
            nbytes += list->nbytes;
        }
    }
    NRM_ASSERT(nbytes == pool->order->pending_nbytes);
}
