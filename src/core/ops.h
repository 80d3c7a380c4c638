/*
 * How a resource is built: an ops table, and the struct that every concrete resource
 * starts with.
 *
 * The dispatcher (core/dispatch.c) validates, handles zero bytes, maps the block,
 * counts, zeroes and records errors. An op may assume valid arguments, holds no lock of
 * ours when it is called, and holds none when it calls an upstream or the outside
 * world.
 */
#ifndef NRM_CORE_OPS_H
#define NRM_CORE_OPS_H

#include <stdatomic.h>

#include "base/list.h"
#include "base/tree.h"
#include "nrm/resource.h"

struct nrm__segment;
struct nrm__magazines;

enum {
    NRM__REQUEST_ZEROED = 1u << 0,  /* the memory shall read as zero */
    NRM__REQUEST_GROWING = 1u << 1, /* of a reallocation: room to grow is welcome */
};

struct nrm__request {
    size_t nbytes;      /* > 0, at most SIZE_MAX / 2 */
    size_t alignment;   /* a power of two */
    nrm_stream *stream; /* borrowed; NULL: the host */
    unsigned flags;
};

enum {
    NRM__BLOCK_IS_ZERO = 1u << 0, /* on allocation: known to read as zero */
    NRM__BLOCK_FELL_BACK = 1u << 1,
    NRM__BLOCK_IN_SLAB = 1u << 2,    /* a cell of a slab (core/slab.h) */
    NRM__BLOCK_IS_PRESENT = 1u << 3, /* on allocation: all its pages are, and stay */
    NRM__BLOCK_IS_REGISTERED = 1u
        << 4, /* of a source: a mapping that the driver holds (core/left_out.h) */
    NRM__BLOCK_IS_COUNTED = 1u << 5, /* of a claimed cell: it was marked so */
};

/* A live block by value: found, or just made. What stands behind `record` is the
   owner's. */
struct nrm__block {
    void *ptr;
    size_t nbytes;   /* as requested */
    size_t capacity; /* usable */
    nrm_resource *owner;
    struct nrm__segment *segment; /* of a pool or slab; NULL: an entry of the map */
    void *record;                 /* the owner's description of it */
    uint64_t tag;                 /* the owner's own; kept by an entry of the map */
    unsigned flags;
    const char *reason; /* static; see nrm_block_info */
};

enum {
    NRM__OPS_MAPPED = 1u << 0,    /* the dispatcher keeps its blocks in the block map */
    NRM__OPS_USER_CODE = 1u << 1, /* calls code that may need an interpreter */
    NRM__OPS_ADAPTOR = 1u << 2,   /* owns no blocks: forwards to upstreams */
    NRM__OPS_OVERLAY = 1u << 3, /* its blocks may lie inside blocks of resources that it
                                     does not know as its upstream (callbacks) */
    NRM__OPS_HOLDS = 1u << 4, /* holds itself while it has blocks (nrm__resource_hold):
                                     the dispatcher takes no reference for each */
    NRM__OPS_MAPPABLE = 1u
        << 6, /* of a source: device memory, in whose place a pool may
                                     map memory of the same device (cuda/vmm.h) */
    NRM__OPS_LOCAL = 1u
        << 7, /* of a source, set by its constructor: pages come from the
                                     NUMA node of the thread that touches them first */
    NRM__OPS_PLAIN = 1u
        << 5, /* of a source: ordinary private pages, which may be dropped
                                     and moved */
    NRM__OPS_RECORDED = 1u
        << 8, /* of a pool's flags: blocks wait for known uses only */
    NRM__OPS_IMMEDIATE = 1u
        << 9,                   /* of a pool's flags: for nothing (core/known_uses.h) */
    NRM__OPS_STACKS = 1u << 10, /* of an adaptor, and of those over it: wants to know
                                      where in the program a request comes from */
    NRM__OPS_ASKS = 1u << 11,   /* the same: decides itself what is done about a request
                                     that finds no memory, so nobody else does */
    NRM__OPS_IN_ORDER = 1u
        << 12, /* of a source: what was asked for with a stream is only
                                     that stream's, also where the host could use it */
    NRM__OPS_OWN_SIZES = 1u
        << 13, /* has blocks of its own sizes: it may refuse a greater
                                      alignment than its kind has, also of a segment */
    NRM__OPS_HOST_WHEN_FULL = 1u
        << 14, /* of a pool's flags: handlers over it fall back to host memory ... */
    NRM__OPS_NO_FALLBACK = 1u
        << 15,                 /* ... or to none; without either the option says so */
    NRM__OPS_WAITS = 1u << 16, /* of a source: its release_block waits for all that goes
                                     on in the context, inside the driver */
    /* What holds for those that hand out the blocks of their upstream, too. */
    NRM__OPS_PASSED_ON = NRM__OPS_OVERLAY | NRM__OPS_STACKS | NRM__OPS_ASKS |
        NRM__OPS_OWN_SIZES,
};

/* The bytes that a limit lets through at a time: see core/account.h. */
struct nrm__account {
    size_t limit;
    size_t alignment;        /* blocks count as multiples of it */
    atomic_size_t allocated; /* booked bytes, at most `limit` */
};

/* The short way of a request: see core/cache.h. */
struct nrm__front {
    nrm_resource *pool;   /* that serves it, through nothing that must know */
    nrm_resource *behind; /* the next one on the way there, which counts; NULL: none */
    /* That serves requests above `limit`, if any does, and for whom it does so: those
       that lead there count and book them too, and have no short way for them. */
    nrm_resource *large, *large_for;
    struct nrm__account *account; /* that it is booked in, or NULL */
    size_t limit;                 /* requests of more bytes go the long way */
    size_t stream_limit;          /* the same of those with a stream */
    size_t cell_limit;            /* requests of more bytes are blocks; 0: all are */
    size_t granule, shift;        /* see nrm__cached_nbytes */
    size_t rounded_max;           /* the same */
    size_t kept;         /* bytes of blocks larger than cells that a thread keeps */
    size_t epoch_nbytes; /* see nrm__magazines; 0: the pool does not wait for GPUs */
    bool is_ordered;     /* a block is for the stream that freed it: `limit` is 0 */
    const atomic_bool *forbidden; /* while it is true, all do; or NULL */
};

struct nrm__ops {
    const char *class_name; /* as in Python */
    unsigned flags;

    /* Fills ptr, capacity, flags, and what the owner needs (tag, record, segment). */
    nrm_status (*allocate)(nrm_resource *self, const struct nrm__request *request,
                           struct nrm__block *out);

    /* Takes a claimed block back; cannot fail. Array deallocation runs through here:
       an owner never calls the driver in it, it parks or retires. */
    void (*deallocate)(nrm_resource *self, const struct nrm__block *block,
                       nrm_stream *stream);

    /* Optional: in place, or by moving pages. NRM_NOT_SUPPORTED (not recorded): the
       dispatcher copies. `block` is updated (ptr, capacity) on success. */
    nrm_status (*reallocate)(nrm_resource *self, struct nrm__block *block,
                             const struct nrm__request *request);

    /* Owners of segments: the live block that contains `ptr` (fills all but owner and
       segment), false: none. Takes the owner's own lock only. */
    bool (*find_block)(nrm_resource *self, struct nrm__segment *segment,
                       const void *ptr, struct nrm__block *out);

    /* Owners of segments: claims a block found before for the caller alone, once;
       false: it is not live any more. */
    bool (*claim_block)(nrm_resource *self, struct nrm__block *block);

    /* Owners of segments: a claimed block whose size the caller changed in place. */
    void (*unclaim_block)(nrm_resource *self, const struct nrm__block *block);

    /* Sources whose memory cannot go back at once: gives a block back for good, with
       its epoch done, detached, no lock held. See core/uses.h. */
    void (*release_block)(nrm_resource *self, const struct nrm__block *block);

    /* Optional: makes a block usable again after a context was reset. */
    nrm_status (*renew_block)(nrm_resource *self, struct nrm__block *block);

    /* Optional. Adds to *out_nbytes what it gave back. */
    nrm_status (*trim)(nrm_resource *self, size_t keep_nbytes, size_t *out_nbytes);

    /* Optional: adds reserved, parked, epochs, waits, fallbacks, and what was ahead. */
    void (*statistics)(nrm_resource *self, nrm_statistics *out);

    /* Optional: false when no request may take a short way. */
    bool (*front)(nrm_resource *self, struct nrm__front *out);

    /* Pools with a front: all that a thread kept comes back; empties `magazines`. NULL:
       what is on the way from one thread to another does. The caller holds the pool. */
    void (*take_back)(nrm_resource *self, struct nrm__magazines *magazines);

    /* Those of them that wait for GPUs: closes an epoch, in which a thread has parked
       so many blocks. False: not now. */
    bool (*close_epoch)(nrm_resource *self, uint64_t n_blocks);

    /* Adaptors: the upstream that a live block must be given back to, or NULL. */
    nrm_resource *(*branch)(nrm_resource *self, const struct nrm__block *block);

    /* Of an adaptor that logs, and has no front: where in its struct its nrm__log
       stands. The public calls go on to those of the upstream, short way and all, and
       are noted (core/logged.c); blocks that come another way it sees in the ops above.
       0: of others. */
    size_t log;

    /* Adaptors, optional: a block goes back past this one (nrm__deallocate_later),
       which does what its deallocate does besides passing it on. */
    void (*forget_block)(nrm_resource *self, const struct nrm__block *block);

    /* Optional: checks every invariant, aborts on the first that fails (tests). */
    void (*check)(nrm_resource *self);

    /* Optional: where the resource's struct has its lock, which is then held around a
       fork, the three functions below included. */
    size_t lock_offset;

    /* Optional: what else is to be done around a fork, such as taking further locks. */
    void (*fork_prepare)(nrm_resource *self);
    void (*fork_parent)(nrm_resource *self);
    void (*fork_child)(nrm_resource *self);

    /* No reference and no block is left. Frees nothing in place that belongs to the
       GPU. The struct itself is freed by the caller (core/resource.c). */
    void (*finish)(nrm_resource *self);
};

struct nrm__counters {
    atomic_int_least64_t current_bytes, current_count;
    atomic_int_least64_t peak_bytes, peak_count;
    atomic_int_least64_t total_bytes, total_count;
    atomic_int_least64_t errors;
};

/* Puts all but the errors into the first fields of `out`: core/shard.c. */
void nrm__counters_read(const struct nrm__counters *counters, nrm_statistics *out);

static inline void
nrm__raise_peak(atomic_int_least64_t *peak, int64_t value)
{
    int64_t seen = atomic_load_explicit(peak, memory_order_relaxed);
    while (value > seen && !atomic_compare_exchange_weak_explicit(peak, &seen, value,
                                                                  memory_order_relaxed,
                                                                  memory_order_relaxed))
        ;
}

/* One resource that holds another one, in the list of that: core/enclosed.h. */
struct nrm__drawer {
    struct nrm__link link;
    nrm_resource *by;
};

/* The first line is read by every thread all the time; what threads write to while
   others read there stands in lines of its own. */
struct nrm_resource {
    const struct nrm__ops *ops;
    nrm_kind kind;
    unsigned flags; /* of the ops, and inherited NRM__OPS_USER_CODE */
    size_t struct_nbytes;
    unsigned slot;          /* where in a thread's cache it stands: core/cache.h */
    atomic_bool is_cached;  /* a thread keeps something of it: core/cache.h */
    atomic_bool is_closed;  /* no thread keeps anything of it any more */
    atomic_int device;      /* NRM_DEVICE_NONE until known */
    nrm_resource *upstream; /* retained; NULL: a source */
    /* References, of users and of live blocks; holds stand in the upper half. */
    _Alignas(64) atomic_uint_least64_t refcount;
    struct nrm__counters counters;
    _Alignas(64) struct nrm__link all; /* in the list of live resources */
    struct nrm__link drawers;          /* who holds it, of resources */
    struct nrm__drawer drawer;         /* of its upstream */
    atomic_uint n_objects;             /* references of objects: core/enclosed.h */
    atomic_size_t n_held;              /* live blocks of resources and objects */
    atomic_int naming; /* 0: no name, 1: being written, 2: `name` holds */
    char name[65];     /* in the registry when it was first bound */
};

/* ---- for constructors: src/core/resource.c ---- */

/*
 * A zeroed resource of `struct_nbytes` (of the concrete struct), with one reference.
 * Retains `upstream` (may be NULL). It is not in the list of live resources yet:
 * nrm__resource_publish, when the constructor can no longer fail.
 */
nrm_status nrm__resource_create(const struct nrm__ops *ops, nrm_kind kind,
                                nrm_resource *upstream, size_t struct_nbytes,
                                nrm_resource **out);
void nrm__resource_publish(nrm_resource *mr);
/* Undoes nrm__resource_create for a constructor that failed. */
void nrm__resource_abandon(nrm_resource *mr);

/* `n` references at once; release is by somebody who has them all. */
void nrm__resource_retain_many(nrm_resource *mr, size_t n);
void nrm__resource_release_many(nrm_resource *mr, size_t n);

/* Calls `visit` for every live resource, each retained meanwhile, no lock held. */
void nrm__resource_for_each(void (*visit)(nrm_resource *mr, void *context),
                            void *context);

/* References that a pool holds to itself while it has blocks (NRM__OPS_HOLDS). The last
   one may end it: unhold with no lock held, and touch it no more. */
void nrm__resource_hold(nrm_resource *mr, size_t n);
void nrm__resource_unhold(nrm_resource *mr, size_t n);

/* False when the last reference and the last block are gone already. */
bool nrm__resource_try_retain(nrm_resource *mr);

/* Gives it its name in the registry, unless it has one. */
void nrm__resource_set_name(nrm_resource *mr, const char *name);

/* The default alignment of a kind: 64 for host memory, 256 for every other. */
size_t nrm__kind_alignment(nrm_kind kind);

/* NRM_INVALID_VALUE: it is no power of two. (src/core/request.c) */
nrm_status nrm__alignment_check(size_t alignment);

/* ---- for adaptors and pools: src/core/dispatch.c ---- */

/* Allocates from `mr` with a valid request; counts, maps; no zeroing by hand: see
   NRM__BLOCK_IS_ZERO in out->flags. */
nrm_status nrm__allocate(nrm_resource *mr, const struct nrm__request *request,
                         struct nrm__block *out);

/* Gives back a claimed block that came through `mr`. */
void nrm__deallocate(nrm_resource *mr, const struct nrm__block *block,
                     nrm_stream *stream);

/* The same for a host block that a GPU may still read: it goes back when its epoch is
   done. */
void nrm__deallocate_later(nrm_resource *mr, const struct nrm__block *block);

/* What a resource takes of its upstream for itself: a segment. */
nrm_status nrm__take(nrm_resource *upstream, const struct nrm__request *request,
                     struct nrm__block *out);

/* Claims and gives back a block that a resource holds of its upstream: a segment. With
   `later` nothing is unmapped here and now: a dying pool may be dying inside an array's
   deallocation. Callbacks run at once all the same, in the thread that let go. */
void nrm__give_back(nrm_resource *upstream, struct nrm__block *block, bool later);

/* True when a live block can be given back through `mr`. */
bool nrm__leads_to(nrm_resource *mr, const struct nrm__block *block);

/* In place or by moving pages, never by a copy; NRM_NOT_SUPPORTED: not so. Counts.
   (src/core/reallocate.c) */
nrm_status nrm__reallocate_in_place(nrm_resource *mr, struct nrm__block *block,
                                    const struct nrm__request *request);

#endif
