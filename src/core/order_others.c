/*
 * Streams of others, which their handles do not name: a handle is the next stream's as
 * soon as its own is destroyed, with the work still pending, and one that is nobody's
 * crashes the driver. The driver's number of a stream is never given out again, and to
 * ask for it costs little. So such a stream has a slot (order_slots.h) by its number,
 * and a thread keeps blocks for it as for any other (core/cache.h).
 *
 * Nobody tells us that one of these streams has ended, so the table is bounded: a
 * number that was not asked for since the last round makes room for a new one. That
 * ends its slot, as the end of a stream ends that of others, with an epoch in place of
 * a last event, since the handle is good only in the calls that are given it. What
 * threads still keep under its key is behind that epoch. Two kinds of users must be out
 * before: owners of caches found the key inside, and nrm__cache_synchronize waits for
 * them; whoever else stamps or records holds the slot, and the last of them ends it.
 *
 * Two threads may make a slot each for one stream. Both are right: the first found is
 * used.
 */
#include "core/cache.h"
#include "core/hooks.h"
#include "core/order.h"
#include "core/order_slots.h"
#include "core/uses.h"
#include "cuda/stream.h"

enum {
    KEY_NONE = 0,
    KEY_RESERVED = 1, /* somebody is about to write it */
    MAX_ATTEMPTS = 8, /* to find room while others are at it, too */
};

struct nrm__order_other_set nrm__order_others[NRM__ORDER_OTHER_SETS];

/* ---- lives ---- */

struct nrm__order *
nrm__order_hold_key(uint64_t key)
{
    struct nrm__order *order = nrm__order_at((uint32_t)(key >> 32));
    unsigned refs = atomic_load(&order->refs);
    while (refs != 0 && !atomic_compare_exchange_weak(&order->refs, &refs, refs + 1))
        ;
    if (refs == 0) {
        return NULL;
    }
    if (atomic_load(&order->generation) != (uint32_t)key) {
        nrm__order_drop(order); /* of the stream that has the slot now */
        return NULL;
    }
    return order;
}

void
nrm__order_drop(struct nrm__order *order)
{
    if (atomic_fetch_sub(&order->refs, 1) == 1) {
        /* What bears the present count is not done when the one before is. */
        atomic_fetch_add(&order->count, 1);
        atomic_store(&order->epoch, nrm__epoch_stamp());
        nrm__order_end(order);
    }
}

static void
evict(struct nrm__order_other *other, uint64_t key)
{
    if (key > KEY_RESERVED &&
        atomic_compare_exchange_strong(&other->key, &key, KEY_NONE)) {
        nrm__cache_synchronize();
        nrm__order_drop(nrm__order_at((uint32_t)(key >> 32)));
    }
}

void
nrm__order_forget_others(void)
{
    for (unsigned i = 0; i < NRM__ORDER_OTHER_SETS; i++) {
        for (unsigned k = 0; k < NRM__ORDER_OTHER_WAYS; k++) {
            struct nrm__order_other *other = &nrm__order_others[i].ways[k];
            evict(other, atomic_load(&other->key));
        }
    }
}

/* ---- the table ---- */

/* Steals a reference. False: there is no room. */
static bool
enter(struct nrm__order_other_set *set, uint64_t id, uint64_t key)
{
    for (unsigned i = 0; i < NRM__ORDER_OTHER_WAYS; i++) {
        struct nrm__order_other *other = &set->ways[i];
        uint64_t none = KEY_NONE;
        if (atomic_compare_exchange_strong(&other->key, &none, KEY_RESERVED)) {
            atomic_store(&other->id, id);
            atomic_store(&other->key, key);
            return true;
        }
    }
    return false;
}

/* The first that nobody has asked for since the last round, and whose context lives. */
static void
make_room(struct nrm__order_other_set *set)
{
    static atomic_uint hand;
    unsigned first = atomic_fetch_add_explicit(&hand, 1, memory_order_relaxed);
    for (unsigned i = 0; i <= NRM__ORDER_OTHER_WAYS; i++) {
        struct nrm__order_other *other =
            &set->ways[(first + i) % NRM__ORDER_OTHER_WAYS];
        uint64_t key = atomic_load(&other->key);
        if (key <= KEY_RESERVED) {
            continue;
        }
        struct nrm__order *order = nrm__order_at((uint32_t)(key >> 32));
        if (!atomic_exchange(&order->is_used, false) || !nrm__order_is_current(order)) {
            evict(other, key);
            return;
        }
    }
}

/* Of one that has a slot from before a reset. */
static void
remove_stale(struct nrm__order_other_set *set, uint64_t id)
{
    for (unsigned i = 0; i < NRM__ORDER_OTHER_WAYS; i++) {
        uint64_t key = atomic_load(&set->ways[i].key);
        if (key > KEY_RESERVED && atomic_load(&set->ways[i].id) == id &&
            !nrm__order_is_current(nrm__order_at((uint32_t)(key >> 32)))) {
            evict(&set->ways[i], key);
        }
    }
}

/* ---- the slot of a stream ---- */

static struct nrm__order *
hold_id(uint64_t id)
{
    uint64_t key = nrm__order_key_of_id(id);
    struct nrm__order *order = key != 0 ? nrm__order_hold_key(key) : NULL;
    if (order != NULL && !nrm__order_is_current(order)) {
        nrm__order_drop(order); /* a context was reset since */
        return NULL;
    }
    return order;
}

struct nrm__order *
nrm__order_hold_other(const nrm_stream *stream)
{
    uint64_t id;
    return nrm__cuda_stream_id(stream->handle, &id) ? hold_id(id) : NULL;
}

/* One that finds no room is the caller's alone, and ends with the call. */
static struct nrm__order *
create(const nrm_stream *stream, uint64_t id)
{
    struct nrm__order_other_set *set = nrm__order_other_set_of(id);
    int device = nrm__cuda_stream_device(stream->handle);
    struct nrm__order *order =
        device >= 0 ? nrm__order_take(NULL, device, nrm__stream_origin(stream)) : NULL;
    if (order == NULL) {
        return NULL;
    }
    uint64_t key = (uint64_t)order->index << 32 | atomic_load(&order->generation);
    atomic_store(&order->is_used, false); /* until somebody asks for it again */
    atomic_store(&order->refs, 2);
    bool is_in = false;
    remove_stale(set, id);
    for (int i = 0; i < MAX_ATTEMPTS && !is_in; i++) {
        is_in = enter(set, id, key);
        if (!is_in) {
            make_room(set);
        }
    }
    if (!is_in) {
        nrm__order_drop(order);
    }
    return order;
}

struct nrm__order *
nrm__order_make_other(const nrm_stream *stream)
{
    uint64_t id;
    if (!nrm__cuda_stream_id(stream->handle, &id)) {
        return NULL;
    }
    struct nrm__order *order = hold_id(id);
    if (order == NULL) {
        void *token = nrm__detach();
        order = create(stream, id);
        nrm__attach(token);
    }
    return order;
}
