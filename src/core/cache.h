/*
 * What each thread keeps for itself: free cells and blocks of the pools that it uses,
 * so that most allocations take no lock, and its share of the counters, so that none is
 * shared by all threads. Of a pool in stream order it keeps each block for the stream
 * that freed it, without a tag until it lets go of it (core/order.h).
 *
 * A cache belongs to one thread. Its owner works on it between nrm__cache_enter and
 * nrm__cache_leave (core/short.h), which cost no fence: whoever else wants something of
 * it (to drain it, to look after a fork, to see that nobody reads a segment any more)
 * makes the kernel run a barrier in every thread of the process (membarrier), or, where
 * the kernel has none, owners pay for the fence. What the owner finds in the block map
 * while it is inside stays there until it has left.
 */
#ifndef NRM_CORE_CACHE_H
#define NRM_CORE_CACHE_H

#include "base/bits.h"
#include "base/fence.h"
#include "base/hidden.h"
#include "base/owned.h"
#include "base/thread_state.h"
#include "core/slab.h"
#include "core/uses.h"

#define NRM__CACHE_SLOTS 46u
#define NRM__MAGAZINE_CELLS 64u
#define NRM__CACHE_SIZES 80u  /* of blocks up to 8 MiB: a set of its own each */
#define NRM__CACHE_HASHED 64u /* as many as hashes: sets of other blocks above cells */
#define NRM__CACHE_LARGE (NRM__CACHE_HASHED + NRM__CACHE_SIZES) /* the set of those */
#define NRM__CACHE_SETS (NRM__CACHE_LARGE + 1)
#define NRM__CACHE_WAYS 29u            /* room for blocks of one size */
#define NRM__LARGE_MIN (32 * NRM__MIB) /* blocks of more bytes are kept one at a time */
#define NRM__LARGE_FIT 8 /* and are not larger than a request by more than this share */
#define NRM__CACHED_MAX (2 * NRM__GIB) /* largest block that a thread keeps */
#define NRM__CACHE_PARKED 128u         /* blocks that wait for GPUs */
#define NRM__CACHE_PARKED_ALWAYS 4u    /* so many whatever their size */
#define NRM__CACHE_PARKED_EPOCHS 16u /* and else not more than so many epochs of them */
#define NRM__EPOCH_LARGE 4u /* blocks of this share of an epoch make a shorter one do */

/* A free cell or block on its way: neither free for others nor live. */
struct nrm__cell {
    void *ptr;
    void *record; /* its size in the slab, or the pool's description of a block */
};

/* The counts of one thread at one resource, written by the thread alone: what it
   allocated since it began, and how far what it has of that, `now`, is below the most
   that it was. What the short way writes stands in one line. */
struct nrm__shard {
    _Alignas(64) struct nrm__shard
        *behind; /* of the same thread, at the next resource on the way */
    atomic_int_least64_t in_bytes, in_count;     /* allocated */
    atomic_int_least64_t left_bytes, left_count; /* top - now */
    atomic_int_least64_t most_left; /* bytes: then publish what was given back */
    nrm_resource *mr;
    /* With `left`, as of one moment while it is even and stays so. */
    atomic_uint version;
    atomic_int_least64_t top_bytes, top_count;   /* most of `now` since publishing */
    atomic_int_least64_t base_bytes, base_count; /* of `now`: published */
    atomic_int_least64_t all_bytes, all_count;   /* of `in`: published */
    int64_t slack_bytes;                         /* so much may stay unpublished */
    struct nrm__link link;                       /* in the list of all shards */
};

/* The cells of a class. */
struct nrm__magazine {
    _Alignas(16) uint32_t n;
    uint32_t capacity;
    struct nrm__cell cells[NRM__MAGAZINE_CELLS];
};

/* Blocks of one size, and of pools in stream order, of one stream. A set with a size of
   its own keeps it when it is empty. */
struct nrm__cache_set {
    _Alignas(64) uint64_t
        stream; /* that freed them: its nrm__order_key; 0: anybody may have them */
    size_t nbytes;
    uint32_t n;
    uint16_t capacity; /* so many may be kept */
    bool is_sized;     /* the size is its own */
    struct nrm__cell cells[NRM__CACHE_WAYS];
};
_Static_assert(sizeof(struct nrm__cache_set) == 512, "found with a shift");

/* A block that a GPU may still touch, and the epoch that it was freed in
   (core/uses.h). */
struct nrm__parked {
    struct nrm__cell cell;
    size_t capacity;
    uint64_t stamp;
};

/* What a thread keeps of one pool. */
struct nrm__magazines {
    nrm_resource *pool;
    struct nrm__magazines *next_free;
    size_t granule, shift; /* see nrm__cached_nbytes */
    size_t rounded_max;    /* the same */
    /* Of blocks above cells for which sets have a size, and of requests for such
       blocks: how many there are; or 0. */
    size_t sized_limit, sized_requests;
    size_t alignment;              /* of everything that is kept */
    size_t cell_limit;             /* requests of more bytes are blocks */
    bool is_ordered;               /* each block is for the stream that freed it */
    bool sees_contexts;            /* not for use once a context was reset */
    int device;                    /* of an ordered pool, NRM_DEVICE_NONE until known */
    unsigned next_victim;          /* the set that makes room for others */
    size_t set_nbytes, set_limit;  /* in all sets: now, and at most */
    struct nrm__cache_set *recent; /* that a block was taken from last */
    /* Of a pool that waits for GPUs, what this thread freed, oldest first: it comes
       into the sets when its epoch is done. So many bytes are enough to close one; 0:
       what is freed comes into the sets at once. */
    size_t epoch_nbytes, parked_nbytes;
    uint32_t n_parked, first_parked; /* which of a ring are */
    struct nrm__parked parked[NRM__CACHE_PARKED];
    struct nrm__magazine classes[NRM__SLAB_N_CLASSES];
    struct nrm__cache_set sets[NRM__CACHE_SETS];
};

static inline uint32_t
nrm__magazine_offset(size_t class_index)
{
    return (uint32_t)(offsetof(struct nrm__magazines, classes) +
                      class_index * sizeof(struct nrm__magazine));
}

static inline struct nrm__magazine *
nrm__magazine_at(struct nrm__magazines *magazines, uint32_t offset)
{
    return (struct nrm__magazine *)(void *)((char *)magazines + offset);
}

/* Of the classes of requests, by their units of NRM__SLAB_ALIGNMENT bytes, counted from
   0. */
extern const uint16_t
    nrm__magazine_offsets[NRM__SLAB_MAX / NRM__SLAB_ALIGNMENT] NRM__HIDDEN;

/* The short way from a resource to the pool that serves its small requests. Its limits
   are at most NRM__CACHED_MAX. */
struct nrm__slot {
    _Atomic(nrm_resource *) mr;       /* NULL: free */
    struct nrm__magazines *magazines; /* NULL: not yet, or any more */
    struct nrm__shard *front;         /* of mr; those behind it lead to the pool's */
    nrm_resource *pool;
    /* The pool while `cell_limit` is not 0; else something that has no cells. */
    const void *cells_of;
    /* Requests of no more bytes are cells, if nothing has to be asked for them: they
       are booked nowhere, and neither forbidden at times nor aligned more than all
       are. */
    uint16_t cell_limit;
    bool parks;              /* such blocks are parked when they are freed, see below */
    uint8_t least_alignment; /* 1: the kind's, for which 0 stands, is too much */
    /* Requests of so many bytes and more, and fewer than `block_sizes` above that, are
       blocks, if they are booked nowhere. `block_sizes` is 0 where they are parked. */
    uint32_t least_block, block_sizes;
    uint32_t stream_sizes;        /* the same of those with a stream */
    uint32_t limit;               /* requests of more bytes go the long way */
    uint32_t stream_limit;        /* the same of those with a stream */
    const atomic_bool *forbidden; /* while it is true, all go the long way */
    struct nrm__account *account; /* that requests are booked in, or NULL */
    /* Where requests above `limit` go, and only they, with a slot and counters of its
       own; or NULL: the long way. */
    nrm_resource *large;
};

enum {
    NRM__CACHE_STOPS = 1u << 0, /* somebody else is at it: the owner stays out */
    NRM__CACHE_FENCES = 1u << 1 /* its owner fences, as the kernel has no membarrier */
};

struct nrm__cache {
    atomic_bool inside; /* the owner is */
    atomic_uint gate;   /* 0, mostly */
    struct nrm__link link;
    struct nrm__slot slots[NRM__CACHE_SLOTS];
};

/* Of the slot of a resource, in every cache. Pools and those that lead to them do not
   displace each other. */
static inline unsigned
nrm__cache_offset_of(const struct nrm__ops *ops, unsigned number)
{
    unsigned half = NRM__CACHE_SLOTS / 2;
    unsigned i = number % half + (ops->take_back != NULL ? half : 0);
    return (unsigned)(offsetof(struct nrm__cache, slots) +
                      i * sizeof(struct nrm__slot));
}

static inline struct nrm__slot *
nrm__cache_slot_of(struct nrm__cache *cache, const nrm_resource *mr)
{
    return (struct nrm__slot *)(void *)((char *)cache + mr->slot);
}

/* What every owner reads all the time, in a line of its own. */
extern struct nrm__cache_common {
    /* True: all caches have NRM__CACHE_FENCES. Set once, when the library is loaded. */
    _Alignas(64) bool fences;
    /* True while one thread has a cache: what it claims inside, nobody else can claim.
       Others make a cache, or announce themselves (nrm__cache_announce), before they
       claim. */
    atomic_bool is_alone;
} nrm__cache_common NRM__HIDDEN;

/* ---- for owners ---- */

/* False: stay out. The caller allocates nothing, takes no lock and calls nobody until
   it has left. */
static inline bool
nrm__cache_enter(struct nrm__cache *cache)
{
    atomic_store_explicit(&cache->inside, true, memory_order_relaxed);
    atomic_signal_fence(memory_order_seq_cst);
    unsigned gate = atomic_load_explicit(&cache->gate, memory_order_acquire);
    if (__builtin_expect(gate != 0, 0)) {
        if (gate == NRM__CACHE_FENCES) {
            (void)atomic_exchange_explicit(&cache->inside, true, memory_order_seq_cst);
            nrm__full_fence();
            gate = atomic_load_explicit(&cache->gate, memory_order_acquire);
        }
        if ((gate & NRM__CACHE_STOPS) != 0) {
            atomic_store_explicit(&cache->inside, false, memory_order_release);
            return false;
        }
    }
    return true;
}

static inline void
nrm__cache_leave(struct nrm__cache *cache)
{
    atomic_store_explicit(&cache->inside, false, memory_order_release);
}

/* The cache of this thread, entered, with the slot of a resource; NULL: it has none
   yet, or must stay out. Nobody clears the slot of a resource that is in use. */
static inline struct nrm__slot *
nrm__cache_enter_slot(nrm_resource *mr, struct nrm__cache **out)
{
    struct nrm__thread_state *state = nrm__thread_state_now();
    struct nrm__cache *cache = state != NULL ? state->cache : NULL;
    if (cache == NULL) {
        return NULL;
    }
    struct nrm__slot *slot = nrm__cache_slot_of(cache, mr);
    bool is_its = atomic_load_explicit(&slot->mr, memory_order_relaxed) == mr;
    if (__builtin_expect(!is_its, 0) || !nrm__cache_enter(cache)) {
        return NULL;
    }
    *out = cache;
    return slot;
}

/* The slot of a resource that has a short way, made if need be; see enter_slot. */
struct nrm__slot *nrm__cache_make_slot(nrm_resource *mr, struct nrm__cache **out);

/* ---- cells and blocks, inside ---- */

/* The step between sizes of which there are eight for each doubling, where granules are
   not larger than that. */
static inline size_t
nrm__sized_step(size_t nbytes, size_t granule)
{
    size_t step = (size_t)1 << (60 - __builtin_clzll((nbytes - 1) | 8));
    return nrm__max(step, granule);
}

#define NRM__SHIFTED_MIN (64 * NRM__KIB)

/* What a pool cuts for a request that is too large for a cell. One that may be a little
   more generous has few sizes up to `rounded_max`, so that a block that one request
   leaves mostly serves the next one. Where arithmetic is done on it (`shift` is not 0)
   starts of blocks of one size, from 64 KiB up, differ within a page: equal ones make
   that slower, as their lines fall into the same sets. Nothing is both rounded and
   shifted. */
static inline size_t
nrm__cached_nbytes(size_t nbytes, size_t granule, size_t rounded_max, size_t shift)
{
    if (nbytes <= rounded_max) {
        return nrm__align_up(nbytes, nrm__sized_step(nbytes, granule));
    }
    return nrm__align_up(nbytes, granule) + (nbytes >= NRM__SHIFTED_MIN ? shift : 0);
}

static inline struct nrm__cache_set *
nrm__cache_hashed_set(struct nrm__magazines *magazines, size_t nbytes, uint64_t stream)
{
    uint64_t hash = ((nbytes >> 8) ^ stream) * UINT64_C(0x9E3779B97F4A7C15) >> 58;
    return &magazines->sets[hash];
}

static inline bool
nrm__cache_set_is_for(const struct nrm__cache_set *set, size_t nbytes, uint64_t stream)
{
    return set->nbytes == nbytes && set->stream == stream;
}

/* The set of a size of which `last` is the last byte, and the eighths are 1 <<
   shift. */
static inline struct nrm__cache_set *
nrm__cache_sized_set(struct nrm__magazines *magazines, size_t last, unsigned shift)
{
    size_t size = (size_t)(shift - 10) * 8 + (last >> shift) - 8;
    return &magazines->sets[NRM__CACHE_HASHED + size];
}

/* While blocks of one stream stand in the set of their size, those of others stand
   where their hash says. */
static inline struct nrm__cache_set *
nrm__cache_set_or_hashed(struct nrm__magazines *magazines, struct nrm__cache_set *set,
                         size_t nbytes, uint64_t stream)
{
    if (!magazines->is_ordered || set->stream == stream) {
        return set;
    }
    struct nrm__cache_set *hashed = nrm__cache_hashed_set(magazines, nbytes, stream);
    bool is_hashed = hashed->n != 0 && nrm__cache_set_is_for(hashed, nbytes, stream);
    return set->n != 0 || is_hashed ? hashed : set;
}

/* Where blocks of a size stand that were freed on a stream, if they are kept. */
static inline struct nrm__cache_set *
nrm__cache_set_of(struct nrm__magazines *magazines, size_t nbytes, uint64_t stream)
{
    if (nbytes - NRM__SLAB_MAX - 1 >= magazines->sized_limit) {
        return nbytes > NRM__LARGE_MIN
                   ? &magazines->sets[NRM__CACHE_LARGE]
                   : nrm__cache_hashed_set(magazines, nbytes, stream);
    }
    size_t last = nbytes - 1;
    unsigned shift = 60 - (unsigned)__builtin_clzll(last);
    return nrm__cache_set_or_hashed(
        magazines, nrm__cache_sized_set(magazines, last, shift), nbytes, stream);
}

/* There is room for one more block in a set. */
static inline bool
nrm__cache_has_room(const struct nrm__magazines *magazines,
                    const struct nrm__cache_set *set, size_t nbytes, uint64_t stream)
{
    return (nrm__cache_set_is_for(set, nbytes, stream)
                ? set->n < set->capacity
                : set->n == 0 && (!set->is_sized || set->nbytes == nbytes)) &&
           magazines->set_nbytes + nbytes <= magazines->set_limit;
}

/* There is room for it. */
static inline void
nrm__cache_put_block(struct nrm__magazines *magazines, struct nrm__cache_set *set,
                     size_t nbytes, uint64_t stream, struct nrm__cell cell)
{
    set->stream = stream;
    set->nbytes = nbytes;
    set->cells[set->n++] = cell;
    magazines->set_nbytes += nbytes;
    atomic_store_explicit(&((struct nrm__live *)cell.record)->set,
                          (uint_least8_t)(set - magazines->sets), memory_order_relaxed);
}

/* ---- for pools, from outside ---- */

/* How many cells of a class this thread should get at once; 0: it keeps none. At most
   half of NRM__MAGAZINE_CELLS. */
size_t nrm__cache_wanted(nrm_resource *pool, size_t class_index);

/* Gives them to this thread; returns how many it took, from the end. */
size_t nrm__cache_keep_cells(nrm_resource *pool, size_t class_index,
                             const struct nrm__cell *cells, size_t n);

/* Takes half of a full magazine of this thread, those that it has kept longest. */
size_t nrm__cache_give_up_cells(nrm_resource *pool, size_t class_index,
                                struct nrm__cell *out);

/* Takes blocks of any size and stream that this thread keeps; false: it keeps none. */
bool nrm__cache_give_up_set(nrm_resource *pool, struct nrm__cache_set *out);

/* How many blocks more of a size this thread should get at once; 0: none. At most half
   of NRM__CACHE_WAYS. */
size_t nrm__cache_wanted_blocks(nrm_resource *pool, size_t nbytes);

/* Gives it blocks of one size and of no stream; returns how many it took, from the
   end. */
size_t nrm__cache_keep_blocks(nrm_resource *pool, size_t nbytes,
                              const struct nrm__cell *cells, size_t n);

/* A block that could be kept goes the long way: from now on this thread keeps up to
   `limit` bytes of blocks, or a share of what it has live if that is more. */
void nrm__cache_set_limit(nrm_resource *pool, size_t limit);

/* Takes the blocks that are in the way of others of a size and stream, which this
   thread could keep otherwise: those of other sizes, or half of a full set, those that
   it has kept longest; false: there are none such. */
bool nrm__cache_make_room(nrm_resource *pool, size_t nbytes, uint64_t stream,
                          struct nrm__cache_set *out);

/* ---- of pools that wait for GPUs: core/cache_park.c ---- */

/* The one that has been parked `i`th, from 0. */
static inline struct nrm__parked *
nrm__cache_parked_at(struct nrm__magazines *magazines, uint32_t i)
{
    return &magazines->parked[(magazines->first_parked + i) % NRM__CACHE_PARKED];
}

/* The `n` oldest are parked no more; `nbytes` is what they have. */
static inline void
nrm__cache_unpark_oldest(struct nrm__magazines *magazines, uint32_t n, size_t nbytes)
{
    magazines->n_parked -= n;
    magazines->first_parked = (magazines->first_parked + n) % NRM__CACHE_PARKED;
    magazines->parked_nbytes -= nbytes;
}

/* Whether the one that was parked first is done. */
static inline bool
nrm__cache_is_ripe(struct nrm__magazines *magazines)
{
    return magazines->n_parked != 0 &&
           nrm__epoch_is_done(nrm__cache_parked_at(magazines, 0)->stamp);
}

/* Parks a block that is claimed, for which there is room, inside. */
static inline void
nrm__cache_park(struct nrm__magazines *magazines, struct nrm__live *block, void *ptr,
                size_t capacity)
{
    *nrm__cache_parked_at(magazines, magazines->n_parked) = (struct nrm__parked){
        .cell = {ptr, block},
        .capacity = capacity,
        .stamp = nrm__epoch_stamp_uncounted(),
    };
    magazines->n_parked++;
    magazines->parked_nbytes += capacity;
}

/* Whether there is, at once: for several epochs, as many blocks may be freed
   together. */
static inline bool
nrm__cache_may_park(const struct nrm__magazines *magazines)
{
    return magazines->n_parked < NRM__CACHE_PARKED_ALWAYS ||
           (magazines->n_parked < NRM__CACHE_PARKED &&
            magazines->parked_nbytes <
                NRM__CACHE_PARKED_EPOCHS * magazines->epoch_nbytes);
}

/* Puts what is done by now into the sets, inside; false: nothing. */
bool nrm__cache_ripen(struct nrm__magazines *magazines);

/* All that is parked, oldest first, into room for NRM__CACHE_PARKED; none is any more.
   Inside, or of magazines that are nobody's. Returns how many. */
size_t nrm__cache_unpark(struct nrm__magazines *magazines, struct nrm__parked *out);

/* Takes a block of a size that is done and this thread has kept; false: there is
   none. */
bool nrm__cache_take_ripe(nrm_resource *pool, size_t nbytes, struct nrm__cell *out);

/* Closes an epoch if so many bytes are parked in it, or asks about those that are
   closed. True: more is done than before. Detached. The first is called inside, where
   so much is parked, and leaves; the second does nothing otherwise. */
bool nrm__cache_end_epoch(struct nrm__cache *cache, struct nrm__magazines *magazines,
                          size_t enough);
bool nrm__cache_end_epoch_of(nrm_resource *pool);

/* Takes what this thread has parked, room for NRM__CACHE_PARKED; returns how many. */
size_t nrm__cache_give_up_parked(nrm_resource *pool, struct nrm__parked *out);

/* ---- counting, inside ---- */

/* What a shard keeps to itself at most, about, or this share of what all threads have:
   the error of a peak that several threads make is no more than that for each of them.
   A peak of one thread is exact. */
#define NRM__SHARD_BYTES (1 << 20)
#define NRM__SHARD_SHIFT 8
#define NRM__SHARD_COUNT 4096

/* Adds what is not published to the resource's own counters; also whenever a thread
   goes the long way. */
void nrm__shard_publish(struct nrm__shard *shard);

/* Notes a new top, and publishes when enough has come together. From then on no more
   than `most_left` may be given back before it is called again. */
void nrm__shard_raise(struct nrm__shard *shard);

/* Counts a block; true: nrm__shard_raise has to be called. */
static inline bool
nrm__shard_count_in(struct nrm__shard *shard, size_t nbytes)
{
    nrm__owned_add(&shard->in_bytes, (int64_t)nbytes);
    nrm__owned_add(&shard->in_count, 1);
    if (__builtin_expect(nrm__owned_subtract(&shard->left_bytes, (int64_t)nbytes), 0)) {
        (void)nrm__owned_subtract(&shard->left_count, 1);
        return true;
    }
    return nrm__owned_subtract(&shard->left_count, 1);
}

/* The same for one that goes; of cells no more can be given back before the long way
   than a thread keeps. */
static inline void
nrm__shard_count_cell_out(struct nrm__shard *shard, size_t nbytes)
{
    nrm__owned_add(&shard->left_bytes, (int64_t)nbytes);
    nrm__owned_add(&shard->left_count, 1);
}

__attribute__((always_inline)) static inline bool
nrm__shard_count_out(struct nrm__shard *shard, size_t nbytes)
{
    nrm__shard_count_cell_out(shard, nbytes);
    return nrm__owned_get(&shard->left_bytes) > nrm__owned_get(&shard->most_left);
}

/* What this thread has live of the resource: less than nothing where it frees for
   others. */
static inline int64_t
nrm__shard_live_bytes(const struct nrm__shard *shard)
{
    return nrm__owned_get(&shard->top_bytes) - nrm__owned_get(&shard->left_bytes);
}

/* So many bytes of an epoch, parked, are enough to close it for a request. Large blocks
   that the thread has live share the core's cache with those: a part of the epoch is
   theirs. */
static inline size_t
nrm__cache_enough_for(const struct nrm__slot *slot, size_t nbytes)
{
    size_t enough = slot->magazines->epoch_nbytes;
    if (nbytes < enough / NRM__EPOCH_LARGE) {
        return enough;
    }
    int64_t live = nrm__shard_live_bytes(slot->front);
    return enough - (live > 0 ? nrm__min((size_t)live, enough / 2) : 0);
}

/* Makes every thread publish what it knows of a resource: its own counters then say it
   all. No lock of rank CACHES or above is held. */
void nrm__cache_publish(nrm_resource *mr);

/* Fills in the counts of requests: what is published, and what the shards of all
   threads know besides. */
void nrm__cache_count(nrm_resource *mr, nrm_statistics *out);

/* ---- for others: no lock of rank CACHES or above is held ---- */

/* This thread is about to claim something without being inside a cache: ends
   `is_alone` when another thread has the only one. */
void nrm__cache_announce(void);

/* When it returns, every owner that was inside has left. */
void nrm__cache_synchronize(void);

/* Gives everything that threads keep of a pool, and what is on the way from one to
   another, back to it (ops->take_back). The caller holds it. */
void nrm__cache_drain(nrm_resource *pool);

/* The last user has gone, blocks may live on: from now on nothing of it is kept. */
void nrm__cache_close(nrm_resource *pool);

/* The resource is dying; nothing of it is kept any more. Its slots and shards go. */
void nrm__cache_forget(nrm_resource *mr);

/* ---- for hooks of a fork, of the rank POOL and above: every owner is kept out ---- */

typedef void nrm__cell_visit(nrm_resource *pool, const struct nrm__cell *block);

/* Visits the blocks that threads keep of a pool, and those that they have parked. What
   is on its way from a thread to the pool just then is not among them. */
void nrm__cache_fork_each_kept(nrm_resource *pool, nrm__cell_visit *visit);

#endif
