/*
 * See left_out.h. Three hooks of each fork are here. The first runs before any lock is
 * taken: it decides what is left out. Then the pools, the retired list and the block
 * map offer what they have, each under its own lock, pools what threads keep, who are
 * kept out by then, and sources what they have in hand. The last hook tells the kernel
 * (MADV_DONTFORK), and is the first after the fork: in the parent, also when the fork
 * failed, it takes all of it back; in the child it keeps the addresses, as pools and
 * the block map still name them.
 *
 * A range costs four calls of the kernel, which split and join mappings: 40
 * microseconds in all where they were slow, as long as it takes to copy 16 pages. So
 * smaller ranges are left to the copy, and of more than MAX_RANGES the largest are
 * taken: they stand in a heap, the smallest on top. Each may add two mappings to those
 * of the process, which are limited.
 *
 * What pin() has locked is never left out: it belongs to an allocator of other people,
 * which may write to it in the child, where the program frees it.
 */
#include "core/left_out.h"

#include <stdio.h>

#include "base/bits.h"
#include "base/lock.h"
#include "core/block_map.h"
#include "core/hooks.h"
#include "core/pin.h"
#include "core/uses.h"
#include "nrm/options.h"
#include "os/fork.h"
#include "os/memory.h"

#define MIN_NBYTES (64 * NRM__KIB)
#define RANK_FIRST 0
#define RANK_LAST (NRM__RANK_LEAF + 1)

enum { MAX_RANGES = 2048 };

struct range {
    uintptr_t start;
    size_t nbytes;
};

static atomic_size_t registered_nbytes;

/* Of the fork in progress, of which there is one at a time: see os/fork.c. */
static struct {
    enum nrm__left_out scope;
    size_t n_ranges;
    struct range ranges[MAX_RANGES]; /* a heap, until they are left out */
    size_t lost_nbytes;              /* that could not be taken back */
} now;

/* ---- what is registered ---- */

void
nrm__registered_add(size_t nbytes)
{
    atomic_fetch_add_explicit(&registered_nbytes, nbytes, memory_order_relaxed);
}

void
nrm__registered_subtract(size_t nbytes)
{
    atomic_fetch_sub_explicit(&registered_nbytes, nbytes, memory_order_relaxed);
}

static struct nrm__lock in_hand_lock = NRM__LOCK_INIT(NRM__RANK_BLOCK_MAP);
static struct nrm__link all_in_hand = {&all_in_hand, &all_in_hand};

void
nrm__in_hand_begin(struct nrm__in_hand *in_hand, const void *ptr, size_t nbytes)
{
    in_hand->start = (uintptr_t)ptr;
    in_hand->nbytes = nbytes;
    nrm__lock_acquire(&in_hand_lock);
    nrm__list_append(&all_in_hand, &in_hand->link);
    nrm__lock_release(&in_hand_lock);
}

void
nrm__in_hand_end(struct nrm__in_hand *in_hand)
{
    nrm__lock_acquire(&in_hand_lock);
    nrm__list_remove(&in_hand->link);
    nrm__lock_release(&in_hand_lock);
}

bool
nrm__block_is_registered(const struct nrm__block *block)
{
    while (block->segment != NULL) {
        block = &block->segment->upstream;
    }
    return (block->flags & NRM__BLOCK_IS_REGISTERED) != 0;
}

/* Whether a resource draws on page-locked memory of ours. */
static bool
is_of_ours(const nrm_resource *mr)
{
    return mr->kind == NRM_KIND_PINNED && !nrm_resource_calls_user_code(mr);
}

/* ---- before ---- */

/* What a pool has and has not given out; what a source has back and not unlocked
   yet. */
static size_t
idle_nbytes(nrm_resource *mr)
{
    nrm_statistics statistics = {0};
    if (mr->upstream == NULL) {
        return nrm__retired_nbytes(mr);
    }
    if (nrm_resource_statistics(mr, &statistics) != NRM_OK ||
        statistics.current_bytes > statistics.reserved_bytes) {
        return 0;
    }
    return (size_t)(statistics.reserved_bytes - statistics.current_bytes);
}

static void
add_idle(nrm_resource *mr, void *context)
{
    if (is_of_ours(mr) && !(mr->ops->flags & NRM__OPS_ADAPTOR)) {
        *(size_t *)context += idle_nbytes(mr);
    }
}

static enum nrm__left_out
scope_now(void)
{
    if (atomic_load(&registered_nbytes) == 0) {
        return NRM__LEFT_OUT_NOTHING;
    }
    return nrm_option_get(NRM_OPT_FORK) == 0 ? NRM__LEFT_OUT_IDLE : NRM__LEFT_OUT_ALL;
}

size_t
nrm__left_out_copied_nbytes(void)
{
    size_t n_idle = 0, n_live = 0;
    if (scope_now() == NRM__LEFT_OUT_IDLE) {
        nrm__resource_for_each(add_idle, &n_idle);
        size_t registered = atomic_load(&registered_nbytes);
        n_live = registered - nrm__min(registered, n_idle);
    }
    return n_live + nrm__pins_private_nbytes();
}

/* ---- the ranges ---- */

enum nrm__left_out
nrm__left_out_scope(void)
{
    return now.scope;
}

static void
swap(size_t i, size_t k)
{
    struct range range = now.ranges[i];
    now.ranges[i] = now.ranges[k];
    now.ranges[k] = range;
}

static void
sift_up(size_t i)
{
    while (i != 0 && now.ranges[i].nbytes < now.ranges[(i - 1) / 2].nbytes) {
        swap(i, (i - 1) / 2);
        i = (i - 1) / 2;
    }
}

static void
sift_down(size_t i)
{
    for (size_t least = i;; i = least) {
        for (size_t k = 2 * i + 1; k <= 2 * i + 2 && k < now.n_ranges; k++) {
            if (now.ranges[k].nbytes < now.ranges[least].nbytes) {
                least = k;
            }
        }
        if (least == i) {
            return;
        }
        swap(i, least);
    }
}

void
nrm__left_out_offer(uintptr_t start, size_t nbytes)
{
    uintptr_t first = nrm__align_up(start, nrm__page_size());
    uintptr_t last = nrm__align_down(start + nbytes, nrm__page_size());
    if (last < first + MIN_NBYTES) {
        return;
    }
    struct range range = {first, last - first};
    if (now.n_ranges < MAX_RANGES) {
        now.ranges[now.n_ranges++] = range;
        sift_up(now.n_ranges - 1);
    }
    else if (range.nbytes > now.ranges[0].nbytes) {
        now.ranges[0] = range;
        sift_down(0);
    }
}

/* ---- the hooks ---- */

static void
begin(void)
{
    now.n_ranges = 0;
    now.lost_nbytes = 0;
    now.scope = scope_now();
}

/* What the kernel refuses is copied. */
static void
leave_out(void)
{
    size_t n = 0;
    for (size_t i = 0; i < now.n_ranges; i++) {
        struct range range = now.ranges[i];
        if (nrm__advise_fork((void *)range.start, range.nbytes, false) == 0) {
            now.ranges[n++] = range;
        }
    }
    now.n_ranges = n;
}

static void
take_back(void)
{
    for (size_t i = 0; i < now.n_ranges; i++) {
        struct range range = now.ranges[i];
        if (nrm__advise_fork((void *)range.start, range.nbytes, true) != 0) {
            now.lost_nbytes += range.nbytes;
        }
    }
}

static void
keep_addresses(void)
{
    for (size_t i = 0; i < now.n_ranges; i++) {
        nrm__reserve((void *)now.ranges[i].start, now.ranges[i].nbytes);
    }
    atomic_store(&registered_nbytes, 0); /* the pages here are ordinary ones */
}

/* No lock is held any more. */
static void
end_in_child(void)
{
    now.scope = NRM__LEFT_OUT_NOTHING;
}

static void
end_in_parent(void)
{
    now.scope = NRM__LEFT_OUT_NOTHING;
    nrm_error error = {.status = NRM_OS_ERROR, .requested_nbytes = now.lost_nbytes};
    if (now.lost_nbytes != 0) {
        snprintf(error.message, sizeof error.message,
                 "%zu B of page-locked memory stay out of forked children: the system "
                 "refused MADV_DOFORK",
                 now.lost_nbytes);
        nrm__lost_error_note(&error);
    }
}

static const struct nrm__fork_hook first_hook = {
    .rank = RANK_FIRST,
    .prepare = begin,
    .parent = end_in_parent,
    .child = end_in_child,
};

static void
offer_in_hand(void)
{
    for (struct nrm__link *link = all_in_hand.next; link != &all_in_hand;
         link = link->next) {
        const struct nrm__in_hand *in_hand =
            NRM__CONTAINER(link, struct nrm__in_hand, link);
        nrm__left_out_offer(in_hand->start, in_hand->nbytes);
    }
}

/* The threads that have them do not go on in the child. */
static void
forget_in_hand(void)
{
    nrm__list_init(&all_in_hand);
}

static const struct nrm__fork_hook in_hand_hook = {
    .rank = NRM__RANK_BLOCK_MAP,
    .lock = &in_hand_lock,
    .prepare = offer_in_hand,
    .child = forget_in_hand,
};

static const struct nrm__fork_hook last_hook = {
    .rank = RANK_LAST,
    .prepare = leave_out,
    .parent = take_back,
    .child = keep_addresses,
};

__attribute__((constructor)) static void
add_fork_hooks(void)
{
    nrm__fork_hook_add(&first_hook);
    nrm__fork_hook_add(&in_hand_hook);
    nrm__fork_hook_add(&last_hook);
}
