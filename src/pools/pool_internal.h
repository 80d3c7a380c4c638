/*
 * What pools/pool.c (the resource; pool_ops.h says where its other operations are),
 * pool_create.c (how it is made), pool_blocks.c (its blocks), pool_check.c,
 * pool_segments.c, pool_growth.c, pool_ahead.c (growth ahead of demand), pool_order.c,
 * pool_pending.c and pool_vmm.c (blocks and segments of device memory) share. Functions
 * named ..._locked: the caller holds the pool's lock.
 */
#ifndef NRM_POOLS_POOL_INTERNAL_H
#define NRM_POOLS_POOL_INTERNAL_H

#include "base/bits.h"
#include "core/background.h"
#include "core/cache.h"
#include "core/order.h"
#include "core/slab.h"
#include "os/numa.h"
#include "pools/fixed_size_shape.h"

/* Size classes: 32 for each power of two. */
#define NRM__POOL_SUBCLASS_BITS 5
#define NRM__POOL_N_SUBCLASSES (1u << NRM__POOL_SUBCLASS_BITS)
#define NRM__POOL_N_CLASSES (64 * NRM__POOL_N_SUBCLASSES)
#define NRM__POOL_N_WORDS (NRM__POOL_N_CLASSES / 64)

#define NRM__POOL_FIRST_SEGMENT_NBYTES (8 * NRM__MIB)

/* The states of a block, in its key. A claimed one belongs to whoever gives it back or
   resizes it, or is kept by a thread (core/cache.h). */
#define NRM__POOL_LIVE NRM__LIVE
#define NRM__POOL_CLAIMED ((uintptr_t)0)
#define NRM__POOL_FREE ((uintptr_t)2)
#define NRM__POOL_PARKED ((uintptr_t)4)

struct nrm__pool_block {
    struct nrm__live live; /* its address is the start, or a little behind it: colour */
    uintptr_t start;
    size_t size;
    struct nrm__link link; /* of a bin (free) or of the parked list (parked) */
    struct nrm__pool_block *previous, *next; /* neighbours in the segment, or NULL */
    uint64_t stamp;                          /* of a parked one */
    uint64_t seen_ns; /* of a free one: when it was first seen to be; 0: not yet */
    bool is_zero;     /* of a free one: not used since it was zeroed, without pages */
    bool is_written;  /* of a live one that was asked for as zeros: they were written */
};

/* Of a device pool: behind whose work a free block may be used. */
struct nrm__pool_ordered_block {
    struct nrm__pool_block block;
    struct nrm__order_tag tag;
    uintptr_t origin; /* of the tag: a hint, see nrm__pool_stamp */
    bool is_held; /* of a free one: a graph may use it, and `then` counts after `tag` */
    /* Live: of the graph in whose capture it was allocated; NRM__ORDER_DONE: of
       none. */
    struct nrm__order_tag then;
    struct nrm__pool_list *list; /* that a free one stands in; NULL: it is done */
    struct nrm__link pending;    /* there */
};

struct nrm__pool_bins {
    struct nrm__link heads[NRM__POOL_N_CLASSES];
    uint64_t bits[NRM__POOL_N_WORDS]; /* one for each bin that is not empty */
    uint64_t words;                   /* one for each word of `bits` that is not 0 */
};

/* Free blocks that are not known to be done: of one stream, or of everybody else. */
struct nrm__pool_list {
    struct nrm__pool_bins bins;
    struct nrm__link pending;    /* oldest first */
    uint32_t stream, generation; /* as in the tags of its blocks; 0: they differ */
    uintptr_t origin;            /* as of its blocks */
    size_t nbytes;
};

/* Growth ahead of demand: see pools/pool_ahead.c. */
struct nrm__pool_ahead {
    atomic_bool is_wanted;
    atomic_bool is_due; /* the background thread is to be told */
    struct nrm__watched watched;
    /* Under the pool's lock: */
    bool is_watched; /* it is told, or will be */
    size_t high;     /* most that was in use, of what is reserved now */
    size_t risen;    /* by how much, of late */
    size_t target;   /* so much should be free while it rises */
    uint64_t n_shrinks,
        n_begun; /* trims so far and segments gone; when a rise was seen */
    int64_t n_segments, n_failures;
    /* Of the background thread: */
    uint64_t pause_ns, retry_ns; /* after a failure */
};

/* How to grow. */
enum {
    NRM__GROW_EXACT = 1u << 0, /* mapped: what is missing only, no whole pieces */
    NRM__GROW_AHEAD = 1u << 1, /* in the background; a trim meanwhile ends it */
};

#define NRM__POOL_N_STREAMS 32u /* that have a list of their own at a time */

struct nrm__pool_order {
    struct nrm__pool_list *others; /* epochs, streams without a list */
    _Atomic(struct nrm__pool_list *) streams[NRM__POOL_N_STREAMS]; /* NULL: not yet */
    _Atomic(struct nrm__pool_list *) held; /* of graphs; nobody takes them; or NULL */
    /* Under the pool's lock: */
    uint64_t n_ended;      /* graphs, when the held blocks were looked at */
    size_t pending_nbytes; /* in all lists */
    size_t looked_nbytes;  /* of them, when the driver was asked last */
    unsigned turn;         /* the list that is looked at first for a block to adopt */
};

struct nrm__pool {
    nrm_resource base;
    size_t alignment;      /* of every block, at least: the kind's */
    size_t granule;        /* block sizes are multiples of it */
    size_t shift;          /* see nrm__cached_nbytes */
    size_t rounded_max;    /* the same */
    size_t maximum_nbytes; /* of all segments */
    size_t segment_nbytes; /* largest segment taken ahead of demand */
    size_t idle_nbytes;    /* free bytes beyond which large free segments go back */
    bool tracked;          /* freed memory waits for its epoch */
    size_t epoch_nbytes, parked_limit;
    uint64_t wait_limit_ns;
    bool waits_when_full;
    bool has_slabs;
    struct nrm__slabs slabs;
    struct nrm__pool_order *order; /* device memory; NULL: what is free is anybody's */
    size_t block_nbytes;           /* of a description */
    atomic_bool maps;              /* segments are mapped, see pool_vmm.c */
    _Atomic(struct nrm__pool_vmm *) vmm; /* NULL: none was mapped yet */

    struct nrm__fixed_shape fixed; /* all blocks are of one size; 0: of what is asked */

    unsigned n_nodes; /* NUMA nodes that have bins of their own; 1: no matter */

    bool is_plain; /* its memory is ordinary pages: they may be dropped or moved */
    atomic_uchar zero_habits[64]; /* of each power of two of sizes: see pool_zeros.c */
    atomic_uint colour;           /* of the next segment for one large block */
    uint64_t decay_ns;       /* after so long free segments go back; 0: they do not */
    size_t kept_nbytes;      /* and so much stays: the first segment */
    atomic_bool keeps_pages; /* the system does not take them: do not ask again */
    struct nrm__watched watched;
    struct nrm__pool_ahead ahead;

    struct nrm__lock lock; /* guards what follows */
    struct nrm__pool_block
        *spare; /* descriptions, linked by `next`; never anything else */
    size_t n_blocks;
    struct nrm__pool_bins *bins; /* of the free blocks, of each node; a mapping */
    struct nrm__link parked;     /* oldest first */
    struct nrm__link segments;
    size_t reserved_nbytes, live_nbytes, parked_nbytes, free_nbytes;
    size_t n_whole; /* segments that are free as a whole */
    size_t n_used;  /* free blocks with pages to give back, see nrm__pool_is_used */
    struct nrm__pool_block *dropping; /* whose pages go back now: claimed; or NULL */
    bool is_draining;      /* the background thread brings back what threads keep */
    unsigned n_trimming;   /* trims in progress: nobody's pages go back meanwhile */
    bool is_watched;       /* the background thread knows of them */
    bool lacks_idle;       /* a child's: what was idle before the fork is not mapped */
    int64_t n_seen;        /* allocations until it looked last */
    size_t growing_nbytes; /* asked of the upstream right now */
    unsigned n_hungry;     /* growths whose fruit was taken: trims leave the next one */
    uint64_t newest_stamp; /* of a parked block */
    size_t parked_in_vain; /* when a wait for the GPU brought nothing; 0: it did */
    size_t unclosed_nbytes; /* parked since an epoch was closed */
    atomic_int_least64_t n_epochs;
    int64_t n_waits;
};

static inline struct nrm__pool_block *
nrm__pool_block_of(struct nrm__live *live)
{
    return live != NULL ? NRM__CONTAINER(live, struct nrm__pool_block, live) : NULL;
}

static inline struct nrm__pool_ordered_block *
nrm__pool_ordered(struct nrm__pool_block *block)
{
    return NRM__CONTAINER(block, struct nrm__pool_ordered_block, block);
}

static inline uintptr_t
nrm__pool_state_of(const struct nrm__pool_block *block)
{
    return atomic_load_explicit(&block->live.key, memory_order_relaxed) &
           NRM__STATE_MASK;
}

static inline void
nrm__pool_set_state(struct nrm__pool_block *block, uintptr_t state)
{
    atomic_store_explicit(&block->live.key, block->start | state, memory_order_release);
}

/* Sizes and offsets of blocks in a segment are multiples of it. */
static inline size_t
nrm__pool_granule_of(const struct nrm__segment *segment)
{
    return (size_t)1 << ((const struct nrm__starts *)segment->extra)->shift;
}

/* Whether a free block may hold pages that somebody has written to, enough of them that
   the system should have them back after a while. */
static inline bool
nrm__pool_is_used(const struct nrm__pool_block *block)
{
    return !block->is_zero && block->size >= NRM__HUGE_PAGE;
}

/* Whether a block is all of its segment. */
static inline bool
nrm__pool_is_whole(const struct nrm__pool_block *block)
{
    return block->size == block->live.segment->nbytes;
}

/* The node whose memory this thread should have. */
static inline unsigned
nrm__pool_node_here(const struct nrm__pool *pool)
{
    return pool->n_nodes > 1 ? (unsigned)nrm__numa_here() % pool->n_nodes : 0;
}

/* The block that an address of a segment lies in. It may start in a segment before. */
struct nrm__pool_block *nrm__pool_floor_locked(const struct nrm__segment *segment,
                                               uintptr_t address);

/* A description; NULL: no memory. And back. */
struct nrm__pool_block *nrm__pool_create_block_locked(struct nrm__pool *pool);
void nrm__pool_destroy_block_locked(struct nrm__pool *pool,
                                    struct nrm__pool_block *block);

/* Enters a block of a segment into its starts, and removes it. */
void nrm__pool_set_start_locked(struct nrm__pool_block *block);
void nrm__pool_clear_start_locked(const struct nrm__pool_block *block);

/* Cuts a block, which is in no bin, in two; returns the second part, in no bin either.
   NULL: no memory for its description. */
struct nrm__pool_block *nrm__pool_split_locked(struct nrm__pool *pool,
                                               struct nrm__pool_block *block,
                                               size_t first_nbytes);

/* A free block, in no bin yet, goes into its bin; and out of it. */
void nrm__pool_bin_insert_locked(struct nrm__pool *pool, struct nrm__pool_block *block);
void nrm__pool_bin_remove_locked(struct nrm__pool *pool, struct nrm__pool_block *block);

/* Cuts a block of at least `nbytes` out of the free memory: claimed. NULL: there is
   none. */
struct nrm__pool_block *nrm__pool_take_locked(struct nrm__pool *pool, size_t nbytes,
                                              size_t alignment);

/* The same of other bins than those of memory that is done; they may be NULL. */
struct nrm__pool_block *nrm__pool_take_from_locked(struct nrm__pool *pool,
                                                   struct nrm__pool_bins *bins,
                                                   size_t nbytes, size_t alignment);

/* The same, of those blocks only that are wanted; looks at `limit` of them at most. */
struct nrm__pool_block *nrm__pool_take_wanted_locked(
    struct nrm__pool *pool, struct nrm__pool_bins *bins, size_t nbytes,
    size_t alignment, size_t limit,
    bool (*is_wanted)(struct nrm__pool_block *block, const void *context),
    const void *context);

/* Makes a block, which is in no bin, free, merged with its free neighbours: returns
   that. */
struct nrm__pool_block *nrm__pool_free_locked(struct nrm__pool *pool,
                                              struct nrm__pool_block *block,
                                              bool is_zero);

/* Makes a free block the last of its bin to be taken. */
void nrm__pool_postpone_locked(struct nrm__pool *pool, struct nrm__pool_block *block);

/* Puts a block that a GPU may still touch aside: until the epoch of its stamp is
   done. */
void nrm__pool_park_locked(struct nrm__pool *pool, struct nrm__pool_block *block,
                           uint64_t stamp);

/* Frees the parked blocks whose epoch is done. */
void nrm__pool_reclaim_locked(struct nrm__pool *pool);

/* Parked bytes that no recorded epoch covers. */
size_t nrm__pool_unclosed_locked(const struct nrm__pool *pool);

/* Cuts the tail off a claimed block and gives it back like any block. */
void nrm__pool_cut_tail_locked(struct nrm__pool *pool, struct nrm__pool_block *block,
                               size_t nbytes);

/* Takes what is missing for `nbytes`, and up to `wanted`, from the free right
   neighbour. */
bool nrm__pool_extend_locked(struct nrm__pool *pool, struct nrm__pool_block *block,
                             size_t nbytes, size_t wanted);

/* Aborts unless everything agrees (pools/pool_check.c). */
void nrm__pool_check_locked(struct nrm__pool *pool);
/* The bytes of their blocks. */
size_t nrm__pool_check_bins_locked(const struct nrm__pool_bins *bins);

/* ---- stream order: pools/pool_order.c, pool_pending.c; the pool has an order ---- */

nrm_status nrm__pool_order_create(struct nrm__pool *pool);
void nrm__pool_order_destroy(struct nrm__pool *pool);

/* Stamps a claimed block that is freed on `stream`; no lock is held. Its origin tells
   blocks apart that were freed on the same stream through several objects, which may be
   wrong: a handle may have been given to another stream since. */
void nrm__pool_stamp(struct nrm__pool *pool, struct nrm__pool_block *block,
                     nrm_stream *stream);

/* The same for blocks that a thread has kept. */
void nrm__pool_stamp_kept(struct nrm__pool *pool, const struct nrm__cache_set *set);

/* The bins that a free block goes to, by its tag; and those that it leaves. */
struct nrm__pool_bins *nrm__pool_enter_list_locked(struct nrm__pool *pool,
                                                   struct nrm__pool_block *block);
struct nrm__pool_bins *nrm__pool_leave_list_locked(struct nrm__pool *pool,
                                                   struct nrm__pool_block *block);

/* Whether two free neighbours are one block; false: they stay two for now. */
bool nrm__pool_is_one_locked(const struct nrm__pool *pool, struct nrm__pool_block *a,
                             struct nrm__pool_block *b);

/* Whether a block becomes one with a neighbour, which may be NULL. */
static inline bool
nrm__pool_merges_locked(const struct nrm__pool *pool, struct nrm__pool_block *block,
                        struct nrm__pool_block *neighbour)
{
    return neighbour != NULL && nrm__pool_state_of(neighbour) == NRM__POOL_FREE &&
           (pool->order == NULL || nrm__pool_is_one_locked(pool, block, neighbour));
}

/* Gives the first of two that are one the tag of both. */
void nrm__pool_join_tags_locked(struct nrm__pool_block *a, struct nrm__pool_block *b);

/* Free memory for a request, which its stream may use from now on. No lock is held. */
nrm_status nrm__pool_find_ordered(struct nrm__pool *pool,
                                  const struct nrm__request *request, size_t nbytes,
                                  struct nrm__pool_block **out);

/* Looks what is done by now, and waits for the rest as long as each wait brings
   something; no lock is held. */
void nrm__pool_settle(struct nrm__pool *pool, uint64_t wait_ns);

size_t nrm__pool_pending_locked(const struct nrm__pool *pool);

/* Of the pending bytes, those that graphs hold. */
size_t nrm__pool_captured_locked(const struct nrm__pool *pool);
void nrm__pool_check_order_locked(struct nrm__pool *pool);

/* ---- memory: the lock is not held (pool_search.c, pool_give.c) ---- */

/* What the pool takes for a request: whole granules, and room for a block that
   grows. */
size_t nrm__pool_block_nbytes(const struct nrm__pool *pool,
                              const struct nrm__request *request);

/* Free memory for a block, claimed; fails when all has been tried. */
nrm_status nrm__pool_find_memory(struct nrm__pool *pool,
                                 const struct nrm__request *request,
                                 struct nrm__pool_block **out);

/* Takes a claimed block back. */
void nrm__pool_free_block(struct nrm__pool *pool, struct nrm__pool_block *block);

/* The same of blocks that a thread has kept; empties the set and returns their number,
   for the caller to let go of their holds. */
size_t nrm__pool_free_kept(struct nrm__pool *pool, struct nrm__cache_set *set);

/* The same of blocks that a thread has parked, without their holds; and of those that
   this thread has, with them: false: it had none. */
void nrm__pool_free_parked(struct nrm__pool *pool, const struct nrm__parked *parked,
                           size_t n);
bool nrm__pool_take_parked(struct nrm__pool *pool);

/* Claims up to `n` blocks at once, without growth, while much more is free than that;
   returns how many. The pool is a host pool. And takes such blocks back. */
size_t nrm__pool_take_more(struct nrm__pool *pool, size_t nbytes, struct nrm__cell *out,
                           size_t n);
void nrm__pool_put_more(struct nrm__pool *pool, const struct nrm__cell *cells,
                        size_t n);

/* Frees the blocks that this thread keeps, before the pool grows; false: it kept
   none. */
bool nrm__pool_take_from_thread(struct nrm__pool *pool);

/* Epochs of a tracked pool: see core/uses.h. */
bool nrm__pool_close_epoch(struct nrm__pool *pool);
bool nrm__pool_close_epoch_of(struct nrm__pool *pool, uint64_t n_blocks);
void nrm__pool_close_full_epoch(struct nrm__pool *pool);
bool nrm__pool_wait_for_epoch(struct nrm__pool *pool, uint64_t limit_ns);

/* What a large array left behind and the GPU is done with. */
void nrm__pool_reclaim_idle(struct nrm__pool *pool);

/* ---- zeros: the lock is not held (pools/pool_zeros.c) ---- */

/* Whether a request is for so many zeros of ordinary pages that they are not just
   written. */
bool nrm__pool_is_lazy_zero(const struct nrm__pool *pool,
                            const struct nrm__request *request);

/* Prepares a claimed block for such a request; false: the caller writes the zeros. */
bool nrm__pool_make_zero(struct nrm__pool *pool, struct nrm__pool_block *block);

/* Such a block is freed: sees what it was used for. Whether it is known to be zero. */
bool nrm__pool_learn_zero(struct nrm__pool *pool, struct nrm__pool_block *block);

/* ---- growth: the lock is not held (pools/pool_growth.c) ---- */

/* Books `nbytes` against the limit, before the upstream is asked; false: they do not
   fit. And back, when what the upstream gave is counted as reserved. */
bool nrm__pool_book_growth(struct nrm__pool *pool, size_t nbytes);
void nrm__pool_unbook_growth(struct nrm__pool *pool, size_t nbytes);

/* Takes a segment of `nbytes` of the upstream. NRM_OUT_OF_MEMORY: the record has the
   upstream's words, or none where the limit is reached; nrm__pool_explain says the
   rest. */
nrm_status nrm__pool_grow_by(struct nrm__pool *pool, size_t nbytes);

/* Bytes of the next segment for a request of `nbytes`, 0: for small ones: twice what
   there is, within bounds, and whole huge pages. */
size_t nrm__pool_next_segment(struct nrm__pool *pool, size_t nbytes);

/* One more segment of `nbytes`, ahead of demand. */
nrm_status nrm__pool_grow_ahead(struct nrm__pool *pool, size_t nbytes);

/* What the pool has from the beginning. */
nrm_status nrm__pool_grow_at_first(struct nrm__pool *pool, size_t nbytes);

/* Grows so that a block of `nbytes` fits; fails like the one above. Segments that were
   made for one large block and are free now go back first: what they held does not fit,
   and would only pile up. */
nrm_status nrm__pool_grow(struct nrm__pool *pool, size_t nbytes, size_t alignment);

/* Records that `asked` bytes cannot be had, what the upstream said to it (empty: the
   limit forbade to ask), and where the pool's memory is. Returns NRM_OUT_OF_MEMORY. */
nrm_status nrm__pool_explain(struct nrm__pool *pool, const nrm_error *said,
                             size_t asked);

/* ---- segments: the lock is not held (pools/pool_segments.c) ---- */

/* Makes memory of the upstream, or mapped (no owner), one free block. `how`: the
   growth. */
nrm_status nrm__pool_enter_segment(struct nrm__pool *pool,
                                   const struct nrm__block *upstream, size_t nbytes,
                                   unsigned how);

/* Gives segments that are free as a whole, and of more than `min_nbytes`, back to the
   upstream while more than `keep_nbytes` stay free. Returns bytes. */
size_t nrm__pool_give_segments_back(struct nrm__pool *pool, size_t min_nbytes,
                                    size_t keep_nbytes);

/* The same of all segments, for a trim: not while somebody has grown the pool in
   vain. */
size_t nrm__pool_trim_segments(struct nrm__pool *pool, size_t keep_nbytes);

/* While more than idle_nbytes are free: gives segments that were made for one large
   block and are free as a whole back. */
void nrm__pool_give_idle_back(struct nrm__pool *pool);

/* True: the pool has more than stays for good, and the background thread is to be told
   to look at it (nrm__background_watch); once, until it finds nothing to do any
   more. */
static inline bool
nrm__pool_begins_watch_locked(struct nrm__pool *pool)
{
    bool begins = !pool->is_watched && pool->decay_ns != 0 &&
                  pool->reserved_nbytes > pool->kept_nbytes;
    pool->is_watched |= begins;
    return begins;
}

/* The same when something lies free. */
static inline bool
nrm__pool_begins_decay_locked(struct nrm__pool *pool)
{
    return (pool->n_whole | pool->n_used) != 0 && nrm__pool_begins_watch_locked(pool);
}

/* Whether free memory is in the hands of the background thread just now, and a wait for
   it; no lock is held in the latter (pools/pool_decay.c). */
static inline bool
nrm__pool_is_decaying_locked(const struct nrm__pool *pool)
{
    return pool->dropping != NULL || pool->is_draining;
}

void nrm__pool_await_decay(struct nrm__pool *pool);

/* Around a trim, for which all that is free should be. */
void nrm__pool_begin_trim(struct nrm__pool *pool);
void nrm__pool_end_trim(struct nrm__pool *pool);

/* In a forked child, where nobody brings them back. */
void nrm__pool_forget_pages_locked(struct nrm__pool *pool);

/* The block that a segment lies in as a whole if that is free, and done; else NULL. */
struct nrm__pool_block *nrm__pool_whole_locked(const struct nrm__pool *pool,
                                               const struct nrm__segment *segment);

/* Takes a segment that is free as a whole, in that block, out of the pool; false: there
   is no memory for the description of what is beside it. */
bool nrm__pool_detach_locked(struct nrm__pool *pool, struct nrm__segment *segment,
                             struct nrm__pool_block *block);

/* In pool.c, for pool_create.c: the resources, and the chunks of their slabs. */
extern const struct nrm__ops nrm__pool_ops, nrm__pool_fixed_ops;
nrm_status nrm__pool_get_chunk(nrm_resource *mr, struct nrm__block *out);
void nrm__pool_put_chunk(nrm_resource *mr, const struct nrm__block *chunk);

/* The bytes of the mapping of its bins. */
size_t nrm__pool_bins_nbytes(const struct nrm__pool *pool);

unsigned nrm__pool_class_of(size_t nbytes);

/* The class of the smallest free block of at least so many bytes from `class` on;
   NRM__POOL_N_CLASSES: there is none. */
unsigned nrm__pool_next_class_locked(const struct nrm__pool_bins *bins, unsigned class);

/* The background thread's look at a pool: see core/background.h. */
uint64_t nrm__pool_decay(nrm_resource *mr, uint64_t now_ns, bool is_first);

/* ---- ahead of demand: pools/pool_ahead.c ---- */

void nrm__pool_ahead_init(struct nrm__pool *pool, bool is_wanted);

/* A block of `nbytes` was taken: is what is left enough? */
void nrm__pool_look_ahead_locked(struct nrm__pool *pool, size_t nbytes);

/* Wakes the background thread if it is due; no lock is held. */
static inline void
nrm__pool_begin_ahead(struct nrm__pool *pool)
{
    if (__builtin_expect(
            atomic_load_explicit(&pool->ahead.is_due, memory_order_relaxed), 0) &&
        atomic_exchange(&pool->ahead.is_due, false)) {
        nrm__background_watch(&pool->ahead.watched);
    }
}

/* The pool has grown for the first time, by so much. */
void nrm__pool_ahead_begin_locked(struct nrm__pool *pool, size_t first_nbytes);

/* A segment has left the pool. */
static inline void
nrm__pool_ahead_lower_locked(struct nrm__pool *pool)
{
    pool->ahead.high = nrm__min(pool->ahead.high, pool->reserved_nbytes);
    pool->ahead.n_shrinks++;
}

/* In a forked child, where nothing grows ahead. */
void nrm__pool_ahead_forget_locked(struct nrm__pool *pool);

/* ---- over a fork: pools/pool_fork.c ---- */

void nrm__pool_fork_prepare(nrm_resource *mr);
void nrm__pool_fork_parent(nrm_resource *mr);
void nrm__pool_fork_child(nrm_resource *mr);

/* ---- moving pages ---- */

/* Resizes a claimed block that fills a segment of its own by moving the pages of the
   segment. NRM_NOT_SUPPORTED: it does not, or they cannot move. */
nrm_status nrm__pool_move_pages(struct nrm__pool *pool, struct nrm__pool_block *block,
                                size_t nbytes, size_t wanted);

/* The bytes of a mapping that describes a segment. */
size_t nrm__starts_nbytes(size_t n);

/* Gives up the description of a segment that is in no map any more. */
void nrm__pool_destroy_segment(struct nrm__segment *segment);

/* A segment that is out of the pool goes back to the upstream; see nrm__give_back. */
size_t nrm__pool_drop_segment(struct nrm__pool *pool, struct nrm__segment *segment,
                              bool later);

/* Of a pool that ends: every segment goes, and with it the description of its blocks.
   What the GPU may still use is waited for where the upstream does not. */
void nrm__pool_drop_all(struct nrm__pool *pool);

#endif
