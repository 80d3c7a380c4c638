/*
 * What stands behind the tags of core/order.h: a slot for each stream on each device,
 * with its counts and the events that were recorded.
 *
 * For core/order.c and core/order_others.c, and the key of a stream for core/short.h.
 * Nothing here calls the driver but nrm__order_records_query, and the lock is held by
 * nobody who does.
 */
#ifndef NRM_CORE_ORDER_SLOTS_H
#define NRM_CORE_ORDER_SLOTS_H

#include <stdatomic.h>

#include "base/list.h"
#include "core/stream.h"
#include "cuda/context.h"
#include "cuda/event.h"
#include "nrm/resource.h"

enum {
    NRM__ORDER_FIRST_SLOT = 2,  /* smaller numbers in a tag name no slot */
    NRM__ORDER_MAX_RECORDS = 8, /* events that a slot keeps */
};

struct nrm__order_event; /* core/order_record.h */

struct nrm__order_record {
    uint64_t number; /* everything stamped with it, or less, comes before the event */
    struct nrm__order_event *event;
};

struct nrm__order {
    atomic_uint generation;
    uint32_t index;
    atomic_uint_least64_t count;  /* what a free is stamped with */
    atomic_uint_least64_t done;   /* everything up to here is */
    atomic_uint_least64_t epoch;  /* whose end is that of everything here; 0: none */
    atomic_uint_least64_t resets; /* of all contexts when it was taken */
    int device;                   /* of special handles, and of streams of others */
    atomic_bool is_captured;      /* of a graph: see nrm__order_open */
    atomic_bool of_all;           /* of work in whatever context */
    atomic_bool is_used;     /* of others: asked for since it was last passed over */
    atomic_uint refs;        /* of others: see nrm__order_hold_key; 0: of none */
    uintptr_t origin;        /* of its stream */
    struct nrm__order *next; /* of the same stream */
    /* Under the lock: */
    nrm_stream *stream;    /* borrowed; NULL: gone, or of others */
    struct nrm__link link; /* unused or retired */
    bool is_retired;
    unsigned n_records; /* by number, ascending */
    struct nrm__order_record records[NRM__ORDER_MAX_RECORDS];
};

void nrm__order_raise(atomic_uint_least64_t *number, uint64_t value);

enum { NRM__ORDER_CHUNK = 16, NRM__ORDER_MAX_CHUNKS = 4096 };

extern _Atomic(struct nrm__order *) nrm__order_chunks[NRM__ORDER_MAX_CHUNKS];

static inline struct nrm__order *
nrm__order_at(uint32_t index)
{
    uint32_t i = index - NRM__ORDER_FIRST_SLOT;
    struct nrm__order *chunk = atomic_load_explicit(
        &nrm__order_chunks[i / NRM__ORDER_CHUNK], memory_order_acquire);
    return &chunk[i % NRM__ORDER_CHUNK];
}

/* The slot of a stream on a device; NULL: it has none (yet). */
static inline struct nrm__order *
nrm__order_find(const nrm_stream *stream, int device)
{
    struct nrm__order *order =
        atomic_load_explicit(&stream->orders, memory_order_acquire);
    while (order != NULL && order->device != device && nrm__stream_is_special(stream)) {
        order = order->next;
    }
    return order;
}

static inline bool
nrm__order_is_current(const struct nrm__order *order)
{
    return atomic_load_explicit(&order->resets, memory_order_relaxed) ==
           nrm__cuda_generations();
}

/* Whether a default stream means one stream alone: each context has its own. */
static inline bool
nrm__order_is_one(int device)
{
    return device != NRM_DEVICE_NONE && !nrm__cuda_has_foreign();
}

/* The key of a stream that this thread may use; 0: it has none (yet), the stream is
   another thread's or of a context that is over, or one of many, or the memory's device
   is not known. One that does not stay (nrm__stream_stays) has none here, but see
   nrm__order_key_of_id. */
static inline uint64_t
nrm__order_key_of(const nrm_stream *stream, int device, uint64_t thread)
{
    const struct nrm__order *order = nrm__order_find(stream, device);
    if (order == NULL || (stream->thread != 0 && stream->thread != thread)) {
        return 0;
    }
    bool fits = nrm__stream_is_special(stream) ? nrm__order_is_one(device)
                                               : nrm__order_is_current(order);
    return fits ? (uint64_t)order->index << 32 |
                      atomic_load_explicit(&order->generation, memory_order_relaxed)
                : 0;
}

/* What stamps of a slot's stream say now, or where it has ended, said at last, and its
   origin; false: that life of the slot is over, and everything it counted is done. */
bool nrm__order_last_count(const struct nrm__order *order, uint32_t generation,
                           uint64_t *out_count, uintptr_t *out_origin);

/* For a stream that stays, or NULL: for anything else. NULL: there is no memory. */
struct nrm__order *nrm__order_take(nrm_stream *stream, int device, uintptr_t origin);

/* No stamp is given out any more: the slot ends when its last event or its epoch
   does. */
void nrm__order_end(struct nrm__order *order);

/* Gives a retired slot to the next stream when everything it counted is done. */
void nrm__order_try_recycle(struct nrm__order *order);

/* The longest retired, which then counts as the latest; NULL: there are not more than
   `from`. */
struct nrm__order *nrm__order_next_retired(uint64_t from);

/* Keeps an event under its number. Retains it. */
void nrm__order_records_add(struct nrm__order *order, uint64_t number,
                            struct nrm__order_event *event);

/* The first event that covers the number, retained; false: nobody has recorded it. */
bool nrm__order_records_find(struct nrm__order *order, uint64_t number,
                             struct nrm__order_record *out);

/* Asks about the events, from the oldest on, until one is not done. */
void nrm__order_records_query(struct nrm__order *order);

/* A context was reset since: the handle may mean nothing any more, or another
   stream. */
bool nrm__order_is_stale(const struct nrm__order *order, const nrm_stream *stream);

/* The stream of a slot in this life of it, retained; NULL: it is gone, stale, or of
   others. */
nrm_stream *nrm__order_hold_stream(struct nrm__order *order, uint32_t generation);

/* Nobody takes the handle from here on. */
void nrm__order_forget_stream(struct nrm__order *order);

/* Lets the end of an epoch stand for everything here, in this life of the slot; for one
   that nothing is stamped with any more. 0: that life is over. */
uint64_t nrm__order_set_epoch(struct nrm__order *order, uint32_t generation);

/* ---- streams of others (core/order_others.c) ---- */

enum { NRM__ORDER_OTHER_SETS = 64, NRM__ORDER_OTHER_WAYS = 4 };

/* Read id, key, id; written key 0, id, key. An id is never used again. */
struct nrm__order_other {
    atomic_uint_least64_t id;
    atomic_uint_least64_t
        key; /* smaller than that of the first slot: not there (yet) */
};

struct nrm__order_other_set {
    _Alignas(64) struct nrm__order_other ways[NRM__ORDER_OTHER_WAYS];
};

extern struct nrm__order_other_set nrm__order_others[NRM__ORDER_OTHER_SETS];

static inline struct nrm__order_other_set *
nrm__order_other_set_of(uint64_t id)
{
    return &nrm__order_others[id * UINT64_C(0x9E3779B97F4A7C15) >> 58];
}

/* The key of the stream of others that has this number; 0: it has none (yet). It is
   good for as long as the caller stays inside its cache; elsewhere nrm__order_hold_key
   says whether it still is. */
static inline uint64_t
nrm__order_key_of_id(uint64_t id)
{
    struct nrm__order_other_set *set = nrm__order_other_set_of(id);
    for (unsigned i = 0; i < NRM__ORDER_OTHER_WAYS; i++) {
        const struct nrm__order_other *other = &set->ways[i];
        if (atomic_load_explicit(&other->id, memory_order_acquire) != id) {
            continue;
        }
        uint64_t key = atomic_load_explicit(&other->key, memory_order_acquire);
        if (key >> 32 < NRM__ORDER_FIRST_SLOT ||
            atomic_load_explicit(&other->id, memory_order_relaxed) != id) {
            continue;
        }
        struct nrm__order *order = nrm__order_at((uint32_t)(key >> 32));
        if (!atomic_load_explicit(&order->is_used, memory_order_relaxed)) {
            atomic_store_explicit(&order->is_used, true, memory_order_relaxed);
        }
        return key;
    }
    return 0;
}

/* The slot of a stream of others, in the life that the key names, which does not end
   before nrm__order_drop; NULL: it has ended, or the key is of no such stream. */
struct nrm__order *nrm__order_hold_key(uint64_t key);
void
nrm__order_drop(struct nrm__order *order); /* no lock of rank ORDER or above is held */

/* The same for the stream itself, which is asked for its number. NULL: it has no slot,
   or is being captured. nrm__order_make_other makes one: NULL: there is no memory, or
   the stream is of a context that is not primary. No lock held; it detaches. */
struct nrm__order *nrm__order_hold_other(const nrm_stream *stream);
struct nrm__order *nrm__order_make_other(const nrm_stream *stream);

/* Every number means another stream from here on. No lock held. */
void nrm__order_forget_others(void);

#endif
