/*
 * The table of known uses. known_uses.h says what they are for.
 *
 * They are kept beside the blocks, in a table by start address, so that a use costs
 * nothing where there is none, and so that it does not matter who owns the block and
 * how that describes it. The table is striped, and each stripe has a lock of its own
 * that is held for a few instructions, under which nobody waits: with the fence that a
 * stamp needs, it is most of what a use costs.
 */
#include "core/known_uses.h"

#include <sched.h>

#include "base/bits.h"
#include "base/error.h"
#include "base/fence.h"
#include "base/lock.h"
#include "base/planted.h"
#include "core/background.h"
#include "core/capture.h"
#include "core/capture_frees.h"
#include "core/nodes.h"
#include "core/order_slots.h"
#include "cuda/driver.h"
#include "nrm/options.h"
#include "os/fork.h"

enum {
    N_STRIPES = 256,
    N_HEADS = 16,
    POLL_FROM = 8, /* uses of one block: then one is asked about */
    N_SPINS = 200, /* looks at a lock before the thread lets others run */
};

struct stripe {
    _Alignas(64) atomic_bool is_locked;
    struct nrm__use *unused;
    struct nrm__use *heads[N_HEADS]; /* newest first */
};

atomic_bool nrm__known_uses_any;
static struct stripe stripes[N_STRIPES];

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

__attribute__((constructor)) static void
add_fork_hook(void)
{
    nrm__fork_hook_add(&stripes_hook);
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

/* ---- the table ---- */

/* Looks for the same stream's use of the block, and raises it; forgets what is done on
   the way. Counts what is left of the block. */
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

nrm_status
nrm__known_use_note(const struct nrm__use *use)
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

/* The exchange that took the lock is a fence there already. */
static inline void
fence_locked(void)
{
#if defined(__x86_64__)
    atomic_signal_fence(memory_order_seq_cst);
#else
    nrm__full_fence();
#endif
}

/* The use of the block in that life of the slot; NULL: none. */
static inline struct nrm__use *
find_locked(struct nrm__use *use, uintptr_t start, struct nrm__order_tag tag)
{
    while (use != NULL && (use->start != start || use->tag.stream != tag.stream ||
                           use->tag.generation != tag.generation)) {
        use = use->next;
    }
    return use;
}

/* The first use of a block; false: it has others, or there is no room. Releases the
   stripe. */
__attribute__((noinline)) static bool
note_first_locked(struct stripe *stripe, uintptr_t start, struct nrm__order_tag tag,
                  uintptr_t handle, bool (*is_tracked)(uintptr_t start))
{
    const struct nrm__use first = {NULL, start, tag, handle, true, false};
    const struct nrm__use *other = *head_of(stripe, start);
    while (other != NULL && other->start != start) {
        other = other->next;
    }
    struct nrm__use *node = stripe->unused;
    bool is_noted = other == NULL && node != NULL && is_tracked(start);
    if (is_noted) {
        stripe->unused = node->next;
        insert_locked(stripe, node, &first);
    }
    stripe_release(stripe);
    return is_noted;
}

bool
nrm__known_use_note_quickly(uintptr_t start, const struct nrm__order *order,
                            struct nrm__order_tag tag, uintptr_t handle,
                            bool (*is_tracked)(uintptr_t start))
{
    struct stripe *stripe = stripe_of(start);
    if (atomic_exchange_explicit(&stripe->is_locked, true, memory_order_acquire)) {
        return false;
    }
    fence_locked();
    tag.count = atomic_load_explicit(&order->count, memory_order_relaxed);
    struct nrm__use *use = find_locked(*head_of(stripe, start), start, tag);
    if (use == NULL) {
        return note_first_locked(stripe, start, tag, handle, is_tracked);
    }
    use->tag.count = nrm__max(use->tag.count, tag.count);
    stripe_release(stripe);
    return true;
}

/* Whether a block waits for it when it is given back. */
static bool
holds(const struct nrm__use *use, unsigned flags)
{
    return (!use->is_covered || (flags & NRM__OPS_RECORDED)) &&
           !nrm__order_is_done(use->tag);
}

#ifdef NRM_PLANTED_FAULTS

_Thread_local bool nrm__planted_is_done;

/* Whether the block has had known uses, and all of them are done. */
static bool
had_uses(uintptr_t start)
{
    struct nrm__use uses[8];
    struct stripe *stripe = stripe_of(start);
    unsigned n = 0;
    stripe_acquire(stripe);
    for (struct nrm__use *use = *head_of(stripe, start); use != NULL; use = use->next) {
        n += use->start == start;
    }
    stripe_release(stripe);
    for (size_t i = nrm__known_uses_list(start, uses, 8); i > 0; i--) {
        nrm__use_poll(uses[i - 1].tag);
    }
    return n != 0 && nrm__known_uses_count((const void *)start) == 0;
}

#endif

static struct nrm__use *
take_noted(const struct nrm__block *block, bool is_forked)
{
    uintptr_t start = (uintptr_t)block->ptr;
    struct nrm__use *taken = NULL;
    struct stripe *stripe = stripe_of(start);
    struct nrm__use **link = head_of(stripe, start);
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

struct nrm__use *
nrm__known_uses_take(const struct nrm__block *block)
{
#ifdef NRM_PLANTED_FAULTS
    nrm__planted_is_done = NRM_PLANTED(KNOWN_USE_SHORTENS) &&
                           had_uses((uintptr_t)block->ptr);
#endif
    struct nrm__use *taken = NULL;
    /* The GPU knows nothing of a child's pages. */
    bool is_forked = nrm__cuda_is_forked();
    if (atomic_load_explicit(&nrm__known_uses_any, memory_order_relaxed)) {
        taken = take_noted(block, is_forked);
    }
    if (nrm__capture_owns_frees() && !is_forked) {
        nrm__capture_add_uses(block, &taken);
    }
    return taken;
}

bool
nrm__known_uses_has(const struct nrm__block *block)
{
    uintptr_t start = (uintptr_t)block->ptr;
    if (nrm__capture_owns_frees() && nrm__capture_owns(block)) {
        return true;
    }
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

size_t
nrm__known_uses_list(uintptr_t start, struct nrm__use *out, size_t capacity)
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

/* The background thread must not record on a stream: its owner may begin to capture
   it. */
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
