/*
 * Known uses. known_uses.h says what they are for.
 *
 * They are kept beside the blocks, in a table by start address, so that a use costs nothing
 * where there is none, and so that it does not matter who owns the block and how that
 * describes it. The table is striped, and each stripe has a lock of its own that is held for
 * a few instructions, under which nothing is called: with the fence that a stamp needs, it
 * is most of what a use costs.
 *
 * What is classified when a use is noted is whether the context epochs cover it: work in the
 * primary context of a device that is not part of a graph. Streams of our own are asked
 * about their context once in a life of their slot.
 *
 * A use in a context that is not primary is an event of that context and a tag that is
 * closed when the event is done, as a graph's is when the graph is gone.
 */
#include "core/known_uses.h"

#include <sched.h>

#include "base/bits.h"
#include "base/error.h"
#include "base/lock.h"
#include "core/background.h"
#include "core/block_map.h"
#include "core/cache.h"
#include "core/capture.h"
#include "core/hooks.h"
#include "core/nodes.h"
#include "core/order_slots.h"
#include "core/stream.h"
#include "core/uses.h"
#include "cuda/place.h"
#include "nrm/options.h"
#include "os/fork.h"

enum {
    N_STRIPES = 256,
    N_HEADS = 16,
    N_PRIMARY = 64, /* slots of streams that are known to be in a primary context */
    POLL_FROM = 8,  /* uses of one block: then one is asked about */
    N_SPINS = 200,  /* looks at a lock before the thread lets others run */
    TAG_EPOCH = 1,  /* see struct nrm__order_tag */
};

struct nrm__use {
    struct nrm__use *next;
    uintptr_t start; /* of the block */
    struct nrm__order_tag tag;
    uintptr_t handle;
    bool is_covered; /* by the context epochs */
};

struct stripe {
    _Alignas(64) atomic_bool is_locked;
    struct nrm__use *unused;
    struct nrm__use *heads[N_HEADS]; /* newest first */
};

struct foreign {
    struct foreign *next;
    nrm_CUevent event;
    struct nrm__order_tag tag;
};

atomic_bool nrm__known_uses_any;
static struct stripe stripes[N_STRIPES];
static atomic_uint_least64_t primary_keys[N_PRIMARY];
static struct nrm__lock foreign_lock = NRM__LOCK_INIT(NRM__RANK_LEAF);
static struct foreign *foreigners;
static atomic_uint n_foreigners;

/* ---- stripes ---- */

static uint64_t
hash_of(uintptr_t start)
{
    return ((uint64_t)start * UINT64_C(0x9e3779b97f4a7c15)) >> 48;
}

static struct stripe *
stripe_of(uintptr_t start)
{
    return &stripes[hash_of(start) % N_STRIPES];
}

static struct nrm__use **
head_of(struct stripe *stripe, uintptr_t start)
{
    return &stripe->heads[hash_of(start) / N_STRIPES % N_HEADS];
}

__attribute__((noinline)) static void
stripe_wait(struct stripe *stripe)
{
    unsigned n = 0;
    do {
        while (atomic_load_explicit(&stripe->is_locked, memory_order_relaxed)) {
            if (++n % N_SPINS == 0) {
                (void)sched_yield();
            }
        }
    } while (atomic_exchange_explicit(&stripe->is_locked, true, memory_order_acquire));
}

static inline void
stripe_acquire(struct stripe *stripe)
{
    if (atomic_exchange_explicit(&stripe->is_locked, true, memory_order_acquire)) {
        stripe_wait(stripe);
    }
}

static inline void
stripe_release(struct stripe *stripe)
{
    atomic_store_explicit(&stripe->is_locked, false, memory_order_release);
}

static void
fork_prepare(void)
{
    for (int i = 0; i < N_STRIPES; i++) {
        stripe_acquire(&stripes[i]);
    }
}

static void
fork_done(void)
{
    for (int i = 0; i < N_STRIPES; i++) {
        stripe_release(&stripes[i]);
    }
}

static const struct nrm__fork_hook stripes_hook = {
    .rank = NRM__RANK_LEAF,
    .prepare = fork_prepare,
    .parent = fork_done,
    .child = fork_done,
};

static const struct nrm__fork_hook foreign_hook = {
    .rank = NRM__RANK_LEAF,
    .lock = &foreign_lock,
};

__attribute__((constructor)) static void
add_fork_hooks(void)
{
    nrm__fork_hook_add(&stripes_hook);
    nrm__fork_hook_add(&foreign_hook);
}

/* ---- policies ---- */

nrm_reuse
nrm__reuse_set(nrm_resource *mr, nrm_reuse reuse)
{
    static const nrm_reuse by_option[] = {NRM_REUSE_CONTEXT, NRM_REUSE_IMMEDIATE,
                                          NRM_REUSE_RECORDED};
    if (reuse == NRM_REUSE_DEFAULT) {
        reuse = by_option[nrm_option_get(NRM_OPT_REUSE)];
    }
    if (reuse == NRM_REUSE_RECORDED) {
        mr->flags |= NRM__OPS_RECORDED;
    }
    else if (reuse == NRM_REUSE_IMMEDIATE) {
        mr->flags |= NRM__OPS_IMMEDIATE;
    }
    return reuse;
}

/* ---- the block of an address ---- */

struct place {
    uintptr_t start;
    nrm_kind kind;
    unsigned flags;      /* of the owner */
    nrm_resource *owner; /* retained; NULL: not looked up */
};

/* A block that a thread could keep must come to its owner when it is freed. */
static void
mark(const struct nrm__segment *segment, uintptr_t start, unsigned flags)
{
    if (flags & NRM__OPS_RECORDED) {
        struct nrm__live *live = nrm__starts_find(segment, start);
        if (live != NULL) {
            atomic_store_explicit(&live->goes_long, true, memory_order_relaxed);
        }
    }
}

/* Whether blocks of the segment are found by where they start. */
static bool
has_starts(const struct nrm__segment *segment)
{
    return segment->owner->ops->take_back != NULL && segment->extra != NULL &&
           !nrm__segment_is_slab(segment);
}

/* The start of a block of a pool, in a thread that has a cache: no lock and no reference. */
static bool
find_start(uintptr_t address, struct place *out)
{
    struct nrm__thread_state *state = nrm__thread_state_now();
    struct nrm__cache *cache = state != NULL ? state->cache : NULL;
    if (cache == NULL ||
        atomic_load_explicit(&nrm__map_overlay.n, memory_order_acquire) != 0 ||
        !nrm__cache_enter(cache)) {
        return false;
    }
    bool found = false;
    const struct nrm__segment *segment = nrm__block_map_peek(address);
    if (segment != NULL && has_starts(segment)) {
        const struct nrm__live *live = nrm__starts_find(segment, address);
        found = live != NULL &&
                atomic_load_explicit(&live->key, memory_order_acquire) ==
                    (address | NRM__LIVE);
        if (found) {
            *out = (struct place){.start = address,
                                  .kind = segment->owner->kind,
                                  .flags = segment->owner->flags};
            mark(segment, address, out->flags);
        }
    }
    nrm__cache_leave(cache);
    return found;
}

static nrm_status
find_around(const void *ptr, struct place *out)
{
    struct nrm__block block;
    if (!nrm__block_map_find(ptr, &block)) {
        return nrm__error(NRM_NOT_OWNED,
                          "%p lies in no live block of numpy_rmm: its use cannot be "
                          "noted",
                          ptr);
    }
    *out = (struct place){.start = (uintptr_t)block.ptr,
                          .kind = block.owner->kind,
                          .flags = block.owner->flags,
                          .owner = block.owner};
    if (block.segment != NULL && has_starts(block.segment)) {
        mark(block.segment, out->start, out->flags);
    }
    return NRM_OK;
}

static nrm_status
find_place(const void *ptr, struct place *out)
{
    return find_start((uintptr_t)ptr, out) ? NRM_OK : find_around(ptr, out);
}

static void
leave_place(const struct place *place)
{
    if (place->owner != NULL) {
        nrm_resource_release(place->owner);
    }
}

/* NRM_NOT_FOUND (not recorded): nothing is noted of such memory. */
static nrm_status
check_place(const struct place *place, const void *ptr)
{
    if (place->kind == NRM_KIND_DEVICE) {
        return nrm__error(NRM_NOT_SUPPORTED,
                          "%p is device memory, which is ordered by the stream that it "
                          "is freed on: uses are noted of pinned and managed memory",
                          ptr);
    }
    bool tracks = place->kind != NRM_KIND_HOST &&
                  !(place->flags & NRM__OPS_IMMEDIATE) && nrm__cuda_driver() != NULL &&
                  !nrm__is_exiting();
    return tracks ? NRM_OK : NRM_NOT_FOUND;
}

/* ---- the table ---- */

/* Looks for the same stream's use of the block, and raises it; forgets what is done on the
   way. Counts what is left of the block. */
static bool
raise_locked(struct stripe *stripe, const struct nrm__use *use, unsigned *out_n,
             struct nrm__order_tag *out_oldest)
{
    struct nrm__use **link = head_of(stripe, use->start);
    while (*link != NULL) {
        struct nrm__use *each = *link;
        if (each->start != use->start) {
            link = &each->next;
        }
        else if (each->tag.stream == use->tag.stream &&
                 each->tag.generation == use->tag.generation &&
                 each->handle == use->handle && each->is_covered == use->is_covered) {
            each->tag.count = nrm__max(each->tag.count, use->tag.count);
            return true;
        }
        else if (nrm__order_is_done(each->tag)) {
            *link = each->next;
            each->next = stripe->unused;
            stripe->unused = each;
        }
        else {
            *out_oldest = each->tag;
            ++*out_n;
            link = &each->next;
        }
    }
    return false;
}

static void
insert_locked(struct stripe *stripe, struct nrm__use *node, const struct nrm__use *use)
{
    struct nrm__use **head = head_of(stripe, use->start);
    *node = *use;
    node->next = *head;
    *head = node;
}

static nrm_status
note(const struct nrm__use *use)
{
    unsigned n = 0;
    struct nrm__order_tag oldest;
    struct nrm__use *node = NULL;
    struct stripe *stripe = stripe_of(use->start);
    stripe_acquire(stripe);
    bool is_noted = raise_locked(stripe, use, &n, &oldest);
    if (!is_noted && stripe->unused != NULL) {
        node = stripe->unused;
        stripe->unused = node->next;
        insert_locked(stripe, node, use);
        is_noted = true;
    }
    stripe_release(stripe);
    if (!is_noted) {
        node = nrm__node_allocate(sizeof *node);
        if (node == NULL) {
            return nrm__error(NRM_OUT_OF_MEMORY, "no memory to note a use");
        }
        /* Another thread may have noted the same one meanwhile: two do no harm. */
        stripe_acquire(stripe);
        insert_locked(stripe, node, use);
        stripe_release(stripe);
    }
    if (n >= POLL_FROM) {
        nrm__use_poll(oldest);
    }
    return NRM_OK;
}

/* Whether a block waits for it when it is given back. */
static bool
holds(const struct nrm__use *use, unsigned flags)
{
    return (!use->is_covered || (flags & NRM__OPS_RECORDED)) &&
           !nrm__order_is_done(use->tag);
}

struct nrm__use *
nrm__known_uses_take(const struct nrm__block *block)
{
    uintptr_t start = (uintptr_t)block->ptr;
    struct nrm__use *taken = NULL;
    if (!atomic_load_explicit(&nrm__known_uses_any, memory_order_relaxed)) {
        return NULL;
    }
    struct stripe *stripe = stripe_of(start);
    struct nrm__use **link = head_of(stripe, start);
    bool is_forked =
        nrm__cuda_is_forked(); /* the GPU knows nothing of a child's pages */
    stripe_acquire(stripe);
    while (*link != NULL) {
        struct nrm__use *use = *link;
        if (use->start != start) {
            link = &use->next;
            continue;
        }
        bool is_held = !is_forked && holds(use, block->owner->flags);
        struct nrm__use **list = is_held ? &taken : &stripe->unused;
        *link = use->next;
        use->next = *list;
        *list = use;
    }
    stripe_release(stripe);
    return taken;
}

bool
nrm__known_uses_has(const struct nrm__block *block)
{
    uintptr_t start = (uintptr_t)block->ptr;
    if (!atomic_load_explicit(&nrm__known_uses_any, memory_order_relaxed)) {
        return false;
    }
    struct stripe *stripe = stripe_of(start);
    bool has = false;
    stripe_acquire(stripe);
    for (const struct nrm__use *use = *head_of(stripe, start); use != NULL && !has;
         use = use->next) {
        has = use->start == start && holds(use, block->owner->flags);
    }
    stripe_release(stripe);
    return has;
}

unsigned
nrm__known_uses_count(const void *start)
{
    struct stripe *stripe = stripe_of((uintptr_t)start);
    unsigned n = 0;
    if (!atomic_load_explicit(&nrm__known_uses_any, memory_order_relaxed)) {
        return 0;
    }
    stripe_acquire(stripe);
    for (const struct nrm__use *use = *head_of(stripe, (uintptr_t)start); use != NULL;
         use = use->next) {
        n += use->start == (uintptr_t)start && !nrm__order_is_done(use->tag);
    }
    stripe_release(stripe);
    return n;
}

/* ---- lists ---- */

struct nrm__order_tag
nrm__uses_first_pending(const struct nrm__use *uses)
{
    while (uses != NULL && nrm__order_is_done(uses->tag)) {
        uses = uses->next;
    }
    return uses != NULL ? uses->tag : NRM__ORDER_DONE;
}

bool
nrm__uses_are_done(const struct nrm__use *uses)
{
    return nrm__uses_first_pending(uses).stream == NRM__ORDER_DONE.stream;
}

void
nrm__uses_drop(struct nrm__use *uses)
{
    while (uses != NULL) {
        struct nrm__use *next = uses->next;
        struct stripe *stripe = stripe_of(uses->start);
        stripe_acquire(stripe);
        uses->next = stripe->unused;
        stripe->unused = uses;
        stripe_release(stripe);
        uses = next;
    }
}

/* The background thread must not record on a stream: its owner may begin to capture it. */
void
nrm__use_poll(struct nrm__order_tag tag)
{
    if (nrm__order_is_captured(tag.stream)) {
        nrm__captures_reap();
        nrm__foreign_uses_reap();
    }
    else if (tag.stream >= NRM__ORDER_FIRST_SLOT && nrm__background_is_here()) {
        nrm__order_records_query(nrm__order_at(tag.stream));
    }
    else {
        (void)nrm__order_poll(tag);
    }
}

/* ---- contexts that are not primary ---- */

static nrm_status
note_foreign(const struct nrm__cuda_place *at, uintptr_t handle,
             struct nrm__order_tag *out)
{
    struct foreign *foreign = nrm__node_allocate(sizeof *foreign);
    nrm_status status = NRM_OUT_OF_MEMORY;
    if (foreign != NULL && nrm__order_open(&foreign->tag)) {
        void *token = nrm__detach();
        status = nrm__cuda_foreign_record(at, handle, &foreign->event);
        nrm__attach(token);
        if (status != NRM_OK) {
            nrm__order_close(foreign->tag);
        }
    }
    if (status != NRM_OK) {
        nrm__node_deallocate(foreign, sizeof *foreign);
        return status != NRM_OUT_OF_MEMORY
                   ? status
                   : nrm__error(status, "no memory to note a use");
    }
    *out = foreign->tag;
    nrm__lock_acquire(&foreign_lock);
    foreign->next = foreigners;
    foreigners = foreign;
    nrm__lock_release(&foreign_lock);
    atomic_fetch_add(&n_foreigners, 1);
    return NRM_OK;
}

/* All of them, for this thread alone. */
static struct foreign *
take_foreigners(void)
{
    nrm__lock_acquire(&foreign_lock);
    struct foreign *all = foreigners;
    foreigners = NULL;
    nrm__lock_release(&foreign_lock);
    return all;
}

static void
put_foreigners(struct foreign *first, struct foreign *last)
{
    nrm__lock_acquire(&foreign_lock);
    last->next = foreigners;
    foreigners = first;
    nrm__lock_release(&foreign_lock);
}

void
nrm__foreign_uses_reap(void)
{
    struct foreign *left = NULL, *last = NULL;
    if (atomic_load(&n_foreigners) == 0 || nrm__cuda_is_forked()) {
        return;
    }
    for (struct foreign *each = take_foreigners(), *next; each != NULL; each = next) {
        next = each->next;
        /* When all contexts were forgotten, with the driver, the tag is done already. */
        bool was_forgotten = nrm__order_is_done(each->tag);
        if (was_forgotten || nrm__cuda_foreign_end(each->event)) {
            nrm__order_close(each->tag);
            nrm__node_deallocate(each, sizeof *each);
            atomic_fetch_sub(&n_foreigners, 1);
        }
        else {
            each->next = left;
            left = each;
            last = last != NULL ? last : each;
        }
    }
    if (left != NULL) {
        put_foreigners(left, last);
    }
}

/* ---- what a stream's work is covered by ---- */

static nrm_status
place_of(uintptr_t handle, struct nrm__cuda_place *out)
{
    void *token = nrm__detach();
    nrm_status status = nrm__cuda_stream_place(handle, out);
    nrm__attach(token);
    return status;
}

/* NRM_NOT_FOUND (not recorded): it is not captured. */
static nrm_status
note_captured(const void *ptr, nrm_stream *stream, int device, struct nrm__use *use)
{
    struct nrm__capture_tags tags;
    struct place place;
    if (!nrm__stream_may_capture(stream) &&
        nrm_stream_handle(stream) != NRM_STREAM_HANDLE_PER_THREAD) {
        return NRM_NOT_FOUND;
    }
    NRM_TRY(find_around(ptr, &place)); /* the graph keeps the owner */
    nrm_status status = nrm__capture_find(stream, device, place.owner, &tags);
    leave_place(&place);
    use->tag = tags.held;
    use->is_covered = false;
    return status;
}

static struct nrm__order_tag
epoch_tag(void)
{
    return (struct nrm__order_tag){.stream = TAG_EPOCH, .count = nrm__epoch_stamp()};
}

/* In the slot's life: its stream is in a primary context. */
static bool
is_known_primary(struct nrm__order_tag tag)
{
    return tag.stream >= NRM__ORDER_FIRST_SLOT &&
           atomic_load_explicit(&primary_keys[tag.stream % N_PRIMARY],
                                memory_order_relaxed) == nrm__order_key(tag);
}

/* A stream that stays. */
static nrm_status
classify_own(nrm_stream *stream, struct nrm__use *use)
{
    struct nrm__cuda_place at;
    use->is_covered = true;
    if (!nrm__stream_is_special(stream)) {
        use->tag = nrm__order_stamp(stream, NRM_DEVICE_NONE);
        if (is_known_primary(use->tag)) {
            return NRM_OK;
        }
    }
    NRM_TRY(place_of(use->handle, &at));
    if (at.context != NULL && at.device < 0) {
        use->is_covered = false;
        return note_foreign(&at, use->handle, &use->tag);
    }
    if (nrm__stream_is_special(stream)) {
        use->tag = at.context != NULL ? nrm__order_stamp(stream, at.device)
                                      : epoch_tag();
    }
    else if (at.context != NULL && use->tag.stream >= NRM__ORDER_FIRST_SLOT) {
        atomic_store_explicit(&primary_keys[use->tag.stream % N_PRIMARY],
                              nrm__order_key(use->tag), memory_order_relaxed);
    }
    return NRM_OK;
}

/* One that others may destroy: the driver is asked now, and never again. */
static nrm_status
classify_bare(nrm_stream *stream, unsigned flags, struct nrm__use *use)
{
    struct nrm__cuda_place at;
    NRM_TRY(place_of(use->handle, &at));
    use->is_covered = at.context == NULL || at.device >= 0;
    if (!use->is_covered) {
        return note_foreign(&at, use->handle, &use->tag);
    }
    /* By default its block has that stamp, or a later one, when it is freed. */
    use->tag = flags & NRM__OPS_RECORDED ? nrm__order_stamp(stream, at.device)
                                         : epoch_tag();
    return NRM_OK;
}

static nrm_status
record_use(const void *ptr, const struct place *place, nrm_stream *stream)
{
    struct nrm__use use = {.start = place->start, .handle = stream->handle};
    if (!nrm__stream_is_here(stream)) {
        return nrm__error(
            NRM_INVALID_VALUE,
            "the stream is the per-thread default stream of another thread");
    }
    if (!atomic_load_explicit(&nrm__known_uses_any, memory_order_relaxed)) {
        atomic_store(&nrm__known_uses_any, true);
    }
    nrm_status status = note_captured(ptr, stream, NRM_DEVICE_NONE, &use);
    if (status == NRM_NOT_FOUND) {
        status = nrm__stream_stays(stream) ? classify_own(stream, &use)
                                           : classify_bare(stream, place->flags, &use);
    }
    return status == NRM_OK ? note(&use) : status;
}

/* ---- the public calls ---- */

nrm_status
nrm_record_use(const void *ptr, nrm_stream *stream)
{
    struct place place;
    NRM_TRY(find_place(ptr, &place));
    nrm_status status = check_place(&place, ptr);
    if (status == NRM_OK) {
        status = record_use(ptr, &place, stream);
    }
    else if (status == NRM_NOT_FOUND) {
        status = NRM_OK;
    }
    leave_place(&place);
    return status;
}

nrm_status
nrm_record_use_on_handle(const void *ptr, uintptr_t handle)
{
    if (handle < NRM_STREAM_HANDLE_PER_THREAD) {
        return nrm_record_use(ptr, handle == NRM_STREAM_HANDLE_LEGACY
                                       ? nrm_stream_legacy()
                                       : nrm_stream_default());
    }
    if (handle == NRM_STREAM_HANDLE_PER_THREAD) { /* a tag names the object */
        nrm_stream *stream;
        NRM_TRY(nrm_stream_per_thread(&stream));
        nrm_status status = nrm_record_use(ptr, stream);
        nrm_stream_release(stream);
        return status;
    }
    nrm_stream stream = {.handle = handle};
    return nrm_record_use(ptr, &stream);
}

/* Copies the pending uses of a block, the oldest last in its chain; how many there are. */
static size_t
list_uses(uintptr_t start, struct nrm__use *out, size_t capacity)
{
    struct stripe *stripe = stripe_of(start);
    size_t n = 0;
    stripe_acquire(stripe);
    for (const struct nrm__use *use = *head_of(stripe, start); use != NULL;
         use = use->next) {
        if (use->start == start && !nrm__order_is_done(use->tag)) {
            if (n < capacity) {
                out[n] = *use;
            }
            n++;
        }
    }
    stripe_release(stripe);
    return n;
}

nrm_status
nrm_block_uses(const void *ptr, nrm_use *out, size_t capacity, size_t *out_n)
{
    struct nrm__use uses[64];
    struct place place;
    NRM_TRY(find_place(ptr, &place));
    leave_place(&place);
    *out_n = 0;
    if (!atomic_load(&nrm__known_uses_any)) {
        return NRM_OK;
    }
    size_t n = nrm__min(list_uses(place.start, uses, 64), (size_t)64);
    for (size_t i = 0; i < n; i++) {
        nrm__use_poll(uses[i].tag);
    }
    *out_n = list_uses(place.start, uses, 64);
    n = nrm__min(*out_n, (size_t)64);
    for (size_t i = 0; i < n && i < capacity; i++) {
        const struct nrm__use *use = &uses[n - 1 - i];
        out[i] = (nrm_use){.stream = use->handle,
                           .is_captured = nrm__order_is_captured(use->tag.stream)};
    }
    return NRM_OK;
}
