/*
 * The free blocks of device memory that are not known to be done: in which list they
 * stand, what their tags say, and how they become done. pool_order.c says who gets
 * them.
 *
 * There is a list for each stream, chosen by the slot of its tags, and one for the
 * rest: what the host freed, and blocks of streams whose place is taken by another. In
 * the first kind the oldest block says enough, for the counts of a stream become done
 * in turn. In the last each block stands for itself, and is asked about in turn, so
 * that none which is stuck hides the others.
 *
 * What a graph may use (core/capture.h) becomes done with the graph. Memory that was
 * allocated in its capture and freed there stands in a list as that of a stream does,
 * for the capture alone. All else is held: it stands in a list that nobody takes from,
 * and afterwards bears the tag of the stream that freed it.
 */
#include "pools/pool_order.h"

#include "base/assert.h"
#include "base/error.h"
#include "core/capture.h"
#include "core/hooks.h"
#include "core/nodes.h"
#include "core/stream.h"
#include "core/uses.h"
#include "cuda/context.h"
#include "os/memory.h"
#include "os/system.h"

enum {
    LOOKS = 64,       /* blocks of others that are looked at */
    OTHERS_ASKED = 8, /* of them the driver is asked about, in turn */
};

#define PAUSE_FIRST_NS UINT64_C(20000) /* between two looks; doubled up to ... */
#define PAUSE_LAST_NS UINT64_C(500000)

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
struct nrm__pool_list *
nrm__pool_list_at(struct nrm__pool_order *order, unsigned i)
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
    for (unsigned i = 0; i < NRM__POOL_N_LISTS; i++) {
        if (nrm__pool_list_at(pool->order, i) != NULL) {
            nrm__unmap(nrm__pool_list_at(pool->order, i), list_nbytes());
        }
    }
    if (pool->order->held != NULL) {
        nrm__unmap(pool->order->held, list_nbytes());
    }
    nrm__node_deallocate(pool->order, sizeof *pool->order);
    pool->order = NULL;
}

static bool
is_slot(struct nrm__order_tag tag)
{
    return tag.stream > 1;
}

bool
nrm__pool_is_of_list(const struct nrm__pool_list *list, struct nrm__order_tag tag)
{
    return list->stream == tag.stream && list->generation == tag.generation;
}

/* Sees to it that there is a list; without one its blocks are others. */
static void
prepare_list(_Atomic(struct nrm__pool_list *) *place)
{
    struct nrm__pool_list *none = NULL;
    if (atomic_load_explicit(place, memory_order_acquire) != NULL) {
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
    if (own->is_held) {
        struct nrm__pool_list *held =
            atomic_load_explicit(&order->held, memory_order_acquire);
        return held != NULL ? held : order->others;
    }
    struct nrm__pool_list *list =
        is_slot(own->tag)
            ? nrm__pool_list_at(order, own->tag.stream % NRM__POOL_N_STREAMS)
            : NULL;
    if (list != NULL && list->nbytes == 0) {
        list->stream = own->tag.stream;
        list->generation = own->tag.generation;
        list->origin = own->origin;
    }
    return list != NULL && nrm__pool_is_of_list(list, own->tag) ? list : order->others;
}

struct nrm__pool_bins *
nrm__pool_enter_list_locked(struct nrm__pool *pool, struct nrm__pool_block *block)
{
    struct nrm__pool_ordered_block *own = nrm__pool_ordered(block);
    if (own->is_held && nrm__order_is_done(own->tag)) {
        pool->order->n_ended = UINT64_MAX; /* its graph went meanwhile: look again */
    }
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

size_t
nrm__pool_captured_locked(const struct nrm__pool *pool)
{
    if (pool->order == NULL) {
        return 0;
    }
    const struct nrm__pool_list *held =
        atomic_load_explicit(&pool->order->held, memory_order_acquire);
    size_t nbytes = held != NULL ? held->nbytes : 0;
    for (unsigned i = 0; i < NRM__POOL_N_STREAMS; i++) {
        const struct nrm__pool_list *list = nrm__pool_list_at(pool->order, i);
        if (list != NULL && list->nbytes != 0 && nrm__pool_is_captured_list(list)) {
            nbytes += list->nbytes;
        }
    }
    return nbytes;
}

/* ---- tags ---- */

/* By the tags alone, so that it does not depend on what the GPU does meanwhile. Of two
   that are held each has another tag for afterwards. */
bool
nrm__pool_is_one_locked(const struct nrm__pool *pool, struct nrm__pool_block *a,
                        struct nrm__pool_block *b)
{
    (void)pool;
    struct nrm__order_tag x = nrm__pool_ordered(a)->tag, y = nrm__pool_ordered(b)->tag;
    return x.stream == y.stream && x.generation == y.generation &&
           !nrm__pool_ordered(a)->is_held && !nrm__pool_ordered(b)->is_held;
}

/* The later count of one stream. That it is done meanwhile is found out later: now
   there may be a neighbour that it would have to merge with. */
void
nrm__pool_join_tags_locked(struct nrm__pool_block *a, struct nrm__pool_block *b)
{
    struct nrm__order_tag *tag = &nrm__pool_ordered(a)->tag;
    tag->count = nrm__max(tag->count, nrm__pool_ordered(b)->tag.count);
}

/* The streams 0, 1 and 2 are those of a device. Where that is not known, as over memory
   of other people's, they are ordered as the host is. */
nrm_stream *
nrm__pool_stream_on(int device, nrm_stream *stream)
{
    bool is_known = stream == NULL || device != NRM_DEVICE_NONE ||
                    !nrm__stream_is_special(stream);
    return is_known ? stream : NULL;
}

static bool
is_same(struct nrm__order_tag a, struct nrm__order_tag b)
{
    return a.stream == b.stream && a.generation == b.generation && a.count == b.count;
}

/* Stamps a block that a graph may use: of `held`, in whose capture it was allocated, or
   of the capture that goes on on the stream. False: of none. */
static bool
stamp_captured(struct nrm__pool *pool, struct nrm__pool_ordered_block *own,
               nrm_stream *stream)
{
    int device = nrm_resource_device(&pool->base);
    struct nrm__capture_tags now = {.own = NRM__ORDER_NEVER, .held = NRM__ORDER_NEVER};
    struct nrm__order_tag held = own->then;
    bool is_held = !nrm__order_is_done(held);
    /* Without memory to describe the capture the tags are never done. */
    bool is_captured = nrm__stream_may_capture(stream) &&
                       nrm__capture_find(stream, device, &pool->base, &now) !=
                           NRM_NOT_FOUND;
    if (!is_held && !is_captured) {
        return false;
    }
    if (is_held && is_captured && is_same(held, now.held) && is_slot(now.own)) {
        own->tag = now.own;
        own->origin = 0;
        prepare_list(&pool->order->streams[own->tag.stream % NRM__POOL_N_STREAMS]);
        return true;
    }
    bool of_two = is_held && is_captured && !is_same(held, now.held);
    own->is_held = true;
    own->tag = is_held ? held : now.held;
    own->then = of_two ? now.held
                       : nrm__order_stamp(nrm__pool_stream_on(device, stream), device);
    prepare_list(&pool->order->held);
    return true;
}

void
nrm__pool_stamp(struct nrm__pool *pool, struct nrm__pool_block *block,
                nrm_stream *stream)
{
    struct nrm__pool_ordered_block *own = nrm__pool_ordered(block);
    int device = nrm_resource_device(&pool->base);
    nrm_stream *given = stream;
    stream = nrm__pool_stream_on(device, given);
    own->origin = nrm__stream_origin(stream);
    bool may_be_captured = own->then.stream != NRM__ORDER_DONE.stream ||
                           nrm__stream_may_capture(given);
    if (may_be_captured && stamp_captured(pool, own, given)) {
        return;
    }
    own->tag = nrm__order_stamp(stream, device);
    if (is_slot(own->tag)) {
        prepare_list(&pool->order->streams[own->tag.stream % NRM__POOL_N_STREAMS]);
    }
}

void
nrm__pool_stamp_kept(struct nrm__pool *pool, const struct nrm__cache_set *set)
{
    uintptr_t origin;
    struct nrm__order_tag tag = nrm__order_stamp_key(set->stream, &origin);
    if (is_slot(tag)) {
        prepare_list(&pool->order->streams[tag.stream % NRM__POOL_N_STREAMS]);
    }
    for (uint32_t i = 0; i < set->n; i++) {
        struct nrm__pool_block *block = nrm__pool_block_of(set->cells[i].record);
        struct nrm__pool_ordered_block *own = nrm__pool_ordered(block);
        own->tag = tag;
        own->origin = origin;
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

/* The graph is gone, and what has used the block besides counts. If that is another
   graph, who else has is not known any more: everybody. */
static void
set_next_tag(struct nrm__pool_ordered_block *own)
{
    own->tag = nrm__order_is_done(own->then) ? NRM__ORDER_DONE : own->then;
    own->is_held = nrm__order_is_captured(own->tag.stream);
    if (own->is_held) {
        own->then = nrm__order_stamp(NULL, NRM_DEVICE_NONE);
    }
}

static void
set_done_locked(struct nrm__pool *pool, struct nrm__pool_ordered_block *own)
{
    nrm__pool_bin_remove_locked(pool, &own->block);
    if (own->is_held) {
        set_next_tag(own);
    }
    else {
        own->tag = NRM__ORDER_DONE;
    }
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

/* Looks at all of them, but only when a graph has gone since the last time. */
static bool
promote_held_locked(struct nrm__pool *pool)
{
    struct nrm__pool_list *held =
        atomic_load_explicit(&pool->order->held, memory_order_acquire);
    uint64_t n_ended = nrm__captures_n_ended();
    bool more = false;
    if (held == NULL || n_ended == pool->order->n_ended) {
        return false;
    }
    pool->order->n_ended = n_ended;
    struct nrm__link *next;
    for (struct nrm__link *link = held->pending.next; link != &held->pending;
         link = next) {
        struct nrm__pool_ordered_block *own =
            NRM__CONTAINER(link, struct nrm__pool_ordered_block, pending);
        next = link->next; /* held blocks do not merge */
        if (nrm__order_is_done(own->tag)) {
            set_done_locked(pool, own);
            more = true;
        }
    }
    return more;
}

/* What is known to be done, of all lists; calls nobody. */
bool
nrm__pool_promote_locked(struct nrm__pool *pool)
{
    bool more = promote_held_locked(pool);
    for (unsigned i = 0; i < NRM__POOL_N_STREAMS && nrm__pool_pending_locked(pool) != 0;
         i++) {
        struct nrm__pool_list *list = nrm__pool_list_at(pool->order, i);
        if (list != NULL) {
            more |= promote_stream_locked(pool, list);
        }
    }
    return promote_others_locked(pool, pool->order->others) || more;
}

/* The tags that the driver is asked about: the oldest of each stream, and a few
   others. */
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
        struct nrm__pool_list *list = nrm__pool_list_at(pool->order, i);
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
bool
nrm__pool_poll(struct nrm__pool *pool)
{
    struct nrm__order_tag tags[NRM__POOL_N_STREAMS + OTHERS_ASKED];
    nrm__captures_reap();
    nrm__lock_acquire(&pool->lock);
    bool came_back = promote_held_locked(pool);
    unsigned n = nrm__pool_pending_locked(pool) != 0 ? collect_locked(pool, tags) : 0;
    nrm__lock_release(&pool->lock);
    if (n == 0) {
        return came_back;
    }
    for (unsigned i = 0; i < n; i++) {
        (void)nrm__order_poll(tags[i]);
    }
    nrm__lock_acquire(&pool->lock);
    bool more = nrm__pool_promote_locked(pool) || came_back;
    turn_others_locked(pool->order->others);
    pool->order->looked_nbytes = pool->order->pending_nbytes;
    nrm__lock_release(&pool->lock);
    return more;
}

/* Looks again and again, detached, for `limit_ns` at most (UINT64_MAX: as long as it
   takes), until more is done. */
bool
nrm__pool_wait_for_more(struct nrm__pool *pool, uint64_t limit_ns)
{
    uint64_t start = nrm__clock_ns(), pause = PAUSE_FIRST_NS;
    bool more = nrm__pool_poll(pool);
    if (more || limit_ns == 0) {
        return more;
    }
    nrm__lock_acquire(&pool->lock);
    /* Nobody waits for a graph to be destroyed. */
    bool waits = nrm__pool_pending_locked(pool) > nrm__pool_captured_locked(pool);
    pool->n_waits += waits;
    nrm__lock_release(&pool->lock);
    void *token = waits ? nrm__detach() : NULL;
    while (waits && !more && !nrm__is_exiting() && !nrm__cuda_is_forked() &&
           !nrm__epoch_is_lost() && nrm__clock_ns() - start < limit_ns) {
        nrm__sleep_ns(pause);
        pause = pause < PAUSE_LAST_NS ? 2 * pause : pause;
        more = nrm__pool_poll(pool);
    }
    nrm__attach(token);
    return more;
}

void
nrm__pool_settle(struct nrm__pool *pool, uint64_t wait_ns)
{
    bool more = true;
    while (more) {
        more = nrm__pool_wait_for_more(pool, wait_ns);
    }
}

/* ---- the check ---- */

enum list_kind { OF_STREAM, OF_OTHERS, OF_GRAPHS };

static void
check_list_locked(struct nrm__pool_list *list, enum list_kind kind)
{
    size_t nbytes = 0;
    for (struct nrm__link *link = list->pending.next; link != &list->pending;
         link = link->next) {
        struct nrm__pool_ordered_block *own =
            NRM__CONTAINER(link, struct nrm__pool_ordered_block, pending);
        NRM_ASSERT(nrm__pool_state_of(&own->block) == NRM__POOL_FREE);
        NRM_ASSERT(own->list == list);
        NRM_ASSERT(own->tag.stream != NRM__ORDER_DONE.stream);
        NRM_ASSERT(kind != OF_STREAM || nrm__pool_is_of_list(list, own->tag));
        NRM_ASSERT(own->is_held ? kind != OF_STREAM : kind != OF_GRAPHS);
        nbytes += own->block.size;
    }
    NRM_ASSERT(nbytes == list->nbytes);
    NRM_ASSERT(nrm__pool_check_bins_locked(&list->bins) == nbytes);
}

void
nrm__pool_check_order_locked(struct nrm__pool *pool)
{
    size_t nbytes = 0;
    for (unsigned i = 0; i < NRM__POOL_N_LISTS; i++) {
        struct nrm__pool_list *list = nrm__pool_list_at(pool->order, i);
        if (list != NULL) {
            check_list_locked(list, i == NRM__POOL_N_STREAMS ? OF_OTHERS : OF_STREAM);
            nbytes += list->nbytes;
        }
    }
    struct nrm__pool_list *held = atomic_load(&pool->order->held);
    if (held != NULL) {
        check_list_locked(held, OF_GRAPHS);
        nbytes += held->nbytes;
    }
    NRM_ASSERT(nbytes == pool->order->pending_nbytes);
}
