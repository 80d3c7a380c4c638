/*
 * Page-locking in place. nrm/pin.h says what a pin is.
 *
 * A range is what the driver has registered: the bytes of the first pin. Later pins
 * inside it are counted. Ranges stand in a tree under one lock, which is never held
 * while the driver works: a range that is being locked or unlocked is busy, and who
 * meets a busy one waits, detached.
 *
 * Who counts a range down to zero gives that moment a number, its turn. It waits until
 * the GPU has done all that was submitted (core/pin_wait.c). Then it unlocks the range,
 * if the turn is still the same: otherwise somebody has pinned the bytes again
 * meanwhile, and had work submitted that the wait did not cover. Where it must not wait
 * or cannot, the start and the turn go to the retired list, and the same is done when
 * the epoch is over. So a range that waits to be unlocked can be pinned again at any
 * time, without the driver.
 *
 * Every pin keeps its own bytes alive by its keepalive. That of the last pin of the
 * whole range stays with the range until it is unlocked.
 */
#include "core/pin.h"

#include <stdint.h>

#include "base/error.h"
#include "base/given.h"
#include "base/lock.h"
#include "base/tree.h"
#include "core/block_map.h"
#include "core/hooks.h"
#include "core/nodes.h"
#include "core/pin_check.h"
#include "core/pin_wait.h"
#include "core/uses.h"
#include "cuda/context.h"
#include "cuda/page_lock.h"
#include "os/fork.h"
#include "os/system.h"

#define PAUSE_NS UINT64_C(20000) /* between two looks at a busy range */

enum { MAX_FAILURES = 8 }; /* to unlock one range, before it is left as it is */

struct keepalive {
    void *object;
    void (*drop)(void *object);
};

struct range {
    struct nrm__tree_node node;
    struct nrm__page_lock lock;
    bool is_busy;   /* a thread locks or unlocks it: nobody else touches it */
    bool read_only; /* as the first pin asked for */
    bool is_shared; /* a forked child has the same pages */
    unsigned n_failures;
    size_t n_pins;         /* open ones */
    size_t n_whole;        /* of them, those of all the bytes */
    uint64_t turn;         /* when n_pins fell to 0 the last time */
    struct keepalive kept; /* of the last pin of all the bytes, when n_whole is 0 */
};

struct nrm_pin {
    uintptr_t start;
    size_t nbytes;
    struct range *range; /* NULL: nothing was to be locked */
    struct keepalive keepalive;
};

static struct nrm__lock pins_lock = NRM__LOCK_INIT(NRM__RANK_LEAF);
static struct nrm__tree ranges;
static atomic_size_t n_ranges, n_nbytes;
static uint64_t last_turn; /* under the lock */

static const struct nrm__fork_hook fork_hook = {.rank = NRM__RANK_LEAF,
                                                .lock = &pins_lock};

__attribute__((constructor)) static void
add_fork_hook(void)
{
    nrm__fork_hook_add(&fork_hook);
}

static struct range *
range_of(struct nrm__tree_node *node)
{
    return NRM__CONTAINER(node, struct range, node);
}

static void
drop(struct keepalive *keepalive)
{
    struct keepalive dropped = *keepalive;
    *keepalive = (struct keepalive){0};
    if (dropped.drop != NULL) {
        dropped.drop(dropped.object);
    }
}

static struct range *
find_locked(uintptr_t start)
{
    struct nrm__tree_node *node = nrm__tree_floor(&ranges, start);
    return node != NULL && node->start == start ? range_of(node) : NULL;
}

/* The first range that has a byte in common with these. */
static struct range *
find_overlap_locked(uintptr_t start, size_t nbytes)
{
    struct nrm__tree_node *node = nrm__tree_find(&ranges, start);
    if (node == NULL) {
        node = nrm__tree_above(&ranges, start);
    }
    return node != NULL && node->start < start + nbytes ? range_of(node) : NULL;
}

static void
remove_locked(struct range *range)
{
    nrm__tree_remove(&ranges, &range->node);
    atomic_fetch_sub(&n_ranges, 1);
}

/* ---- for look-ups ---- */

bool
nrm__pins_cover(const void *first, const void *last)
{
    if (atomic_load_explicit(&n_ranges, memory_order_acquire) == 0 ||
        nrm__cuda_is_forked()) {
        return false;
    }
    nrm__lock_acquire(&pins_lock);
    struct nrm__tree_node *node = nrm__tree_find(&ranges, (uintptr_t)first);
    bool covers = node != NULL && (uintptr_t)last - node->start < node->nbytes &&
                  !range_of(node)->is_busy &&
                  nrm__page_lock_lives(&range_of(node)->lock);
    nrm__lock_release(&pins_lock);
    return covers;
}

size_t
nrm__pins_nbytes(void)
{
    return nrm__cuda_is_forked()
               ? 0
               : atomic_load_explicit(&n_nbytes, memory_order_relaxed);
}

size_t
nrm__pins_private_nbytes(void)
{
    size_t nbytes = 0;
    if (nrm__pins_nbytes() == 0) {
        return 0;
    }
    nrm__lock_acquire(&pins_lock);
    for (struct nrm__tree_node *node = nrm__tree_above(&ranges, 0); node != NULL;
         node = nrm__tree_above(&ranges, node->start)) {
        bool is_locked = range_of(node)->lock.driver != NULL;
        nbytes += is_locked && !range_of(node)->is_shared ? node->nbytes : 0;
    }
    nrm__lock_release(&pins_lock);
    return nbytes;
}

/* ---- locking ---- */

enum joined {
    JOINED,  /* counted in a range that is locked */
    MINE,    /* the range is the caller's to lock: busy */
    BUSY,    /* it is somebody else's at the moment */
    OVERLAP, /* only some of the bytes are in a range */
    READING, /* they are in one that is for reading only */
};

static nrm_status
join_error(const nrm_pin *pin, enum joined why, const struct nrm__tree_node *other)
{
    return why == READING
               ? nrm__error(
                     NRM_INVALID_VALUE,
                     "%zu B at 0x%zx are pinned for reading only: close that pin "
                     "first",
                     other->nbytes, (size_t)other->start)
               : nrm__error(NRM_INVALID_VALUE,
                            "%zu B at 0x%zx cannot be page-locked: %zu B at 0x%zx have "
                            "been, by another pin, and a copy must not cross two",
                            pin->nbytes, (size_t)pin->start, other->nbytes,
                            (size_t)other->start);
}

static void
count_locked(nrm_pin *pin, struct range *range)
{
    pin->range = range;
    range->n_failures = 0;
    range->n_pins++;
    range->n_whole += pin->nbytes == range->node.nbytes;
}

static enum joined
join_locked(nrm_pin *pin, struct range *range, bool read_only)
{
    if (range->is_busy) {
        return BUSY;
    }
    if (pin->start < range->node.start ||
        pin->start + pin->nbytes > range->node.start + range->node.nbytes) {
        return OVERLAP;
    }
    if (range->read_only && !read_only) {
        return READING;
    }
    if (nrm__page_lock_lives(&range->lock)) {
        count_locked(pin, range);
        return JOINED;
    }
    range->is_busy = true; /* its context was reset: to be locked again */
    pin->range = range;
    return MINE;
}

/* `fresh` goes into the tree if nobody has any of the bytes. */
static enum joined
join(nrm_pin *pin, struct range *fresh, struct nrm__tree_node *out_other)
{
    enum joined result = MINE;
    nrm__lock_acquire(&pins_lock);
    struct range *range = find_overlap_locked(pin->start, pin->nbytes);
    if (range != NULL) {
        result = join_locked(pin, range, fresh->read_only);
        *out_other = range->node;
    }
    else {
        pin->range = fresh;
        nrm__tree_insert(&ranges, &fresh->node);
        atomic_fetch_add(&n_ranges, 1);
    }
    nrm__lock_release(&pins_lock);
    return result;
}

/* The busy range is locked, or not. True: nobody needs it any more. */
static bool
settle(nrm_pin *pin, nrm_status status, const struct nrm__page_lock *page_lock)
{
    struct range *range = pin->range;
    nrm__lock_acquire(&pins_lock);
    range->is_busy = false;
    if (status == NRM_OK) {
        range->lock = *page_lock;
        count_locked(pin, range);
    }
    /* A stale one stays with its pins, or with who is to unlock it. */
    bool is_unused = status != NRM_OK && range->lock.driver == NULL;
    if (is_unused) {
        remove_locked(range);
    }
    nrm__lock_release(&pins_lock);
    return is_unused;
}

/* The bytes of a stale range that a pin is a part of are locked as a whole. */
static nrm_status
lock_range(nrm_pin *pin, bool read_only)
{
    struct nrm__page_lock page_lock;
    struct range *range = pin->range;
    bool is_again = range->lock.driver != NULL;
    nrm_status status =
        is_again ? NRM_OK
                 : nrm__pin_make_pages((void *)pin->start, pin->nbytes, read_only);
    if (status == NRM_OK) {
        status = nrm__page_lock((void *)range->node.start, range->node.nbytes,
                                read_only, &page_lock);
    }
    if (status == NRM_OK) {
        size_t gone = is_again ? range->node.nbytes : 0;
        nrm__page_locked_subtract(gone); /* by the reset */
        atomic_fetch_add_explicit(&n_nbytes, range->node.nbytes - gone,
                                  memory_order_relaxed);
    }
    if (settle(pin, status, &page_lock)) {
        nrm__node_deallocate(range, sizeof *range);
    }
    return status;
}

static nrm_status
lock_bytes(nrm_pin *pin, const nrm_pin_options *options)
{
    bool read_only = options->read_only, is_shared = false;
    NRM_TRY(nrm__cuda_init(NULL));
    nrm_status status = nrm__pin_check_block((void *)pin->start, pin->nbytes);
    if (status != NRM_NOT_FOUND) {
        return status;
    }
    if (!options->is_private) {
        NRM_TRY(nrm__pin_check_mapping((void *)pin->start, pin->nbytes, &read_only,
                                       &is_shared));
    }
    struct range *fresh = nrm__node_allocate(sizeof *fresh);
    if (fresh == NULL) {
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe a pin");
    }
    fresh->node.start = pin->start;
    fresh->node.nbytes = pin->nbytes;
    fresh->read_only = options->read_only;
    fresh->is_shared = is_shared;
    fresh->is_busy = true;
    enum joined joined;
    struct nrm__tree_node other;
    while ((joined = join(pin, fresh, &other)) == BUSY) {
        nrm__sleep_ns(PAUSE_NS);
    }
    if (joined != MINE || pin->range != fresh) {
        nrm__node_deallocate(fresh, sizeof *fresh);
    }
    if (joined == MINE) {
        return lock_range(pin, read_only);
    }
    return joined == JOINED ? NRM_OK : join_error(pin, joined, &other);
}

nrm_status
nrm_pin_create(void *ptr, size_t nbytes, const nrm_pin_options *options, nrm_pin **out)
{
    nrm_pin_options given = {0};
    NRM__COPY_GIVEN(given, options);
    if (nbytes != 0 && (ptr == NULL || nbytes > UINTPTR_MAX - (uintptr_t)ptr)) {
        return nrm__error(NRM_INVALID_VALUE, "there are no %zu B at %p", nbytes, ptr);
    }
    nrm_pin *pin = nrm__node_allocate(sizeof *pin);
    if (pin == NULL) {
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe a pin");
    }
    pin->start = (uintptr_t)ptr;
    pin->nbytes = nbytes;
    if (nbytes != 0) {
        (void)nrm__retired_drain(0); /* what was closed and waits may be in the way */
        void *token = nrm__detach();
        nrm_status status = lock_bytes(pin, &given);
        nrm__attach(token);
        if (status != NRM_OK) {
            nrm__node_deallocate(pin, sizeof *pin);
            return status;
        }
    }
    pin->keepalive = (struct keepalive){given.keepalive, given.drop};
    *out = pin;
    return NRM_OK;
}

/* ---- unlocking ---- */

static void retire(uintptr_t start, uint64_t turn);

static void
forget_locked(struct range *range, struct keepalive *kept)
{
    *kept = range->kept;
    remove_locked(range);
    atomic_fetch_sub_explicit(&n_nbytes, range->node.nbytes, memory_order_relaxed);
}

/* Makes the range of this turn busy; NULL: it is somebody else's, or gone. Waits for
   who locks it again after a reset, which may fail. */
static struct range *
take(uintptr_t start, uint64_t turn)
{
    for (;;) {
        nrm__lock_acquire(&pins_lock);
        struct range *range = find_locked(start);
        if (range != NULL && (range->turn != turn || range->n_pins != 0)) {
            range = NULL;
        }
        bool is_busy = range != NULL && range->is_busy;
        if (range != NULL) {
            range->is_busy = true;
        }
        nrm__lock_release(&pins_lock);
        if (!is_busy) {
            return range;
        }
        nrm__sleep_ns(PAUSE_NS);
    }
}

/* Back into the tree as it was: true if it is to be tried again. */
static bool
give_up(struct range *range)
{
    nrm__lock_acquire(&pins_lock);
    range->is_busy = false;
    bool again = ++range->n_failures < MAX_FAILURES;
    nrm__lock_release(&pins_lock);
    if (!again) {
        nrm__lost_error_note(nrm_last_error()); /* it stays locked, and kept alive */
    }
    return again;
}

/* All work from before the turn is done. Detached. What kept the bytes alive goes to
   `kept`, to be dropped. False: later. */
static bool
finish(uintptr_t start, uint64_t turn, struct keepalive *kept)
{
    struct range *range = take(start, turn);
    if (range == NULL) {
        return true;
    }
    size_t nbytes = range->node.nbytes;
    enum nrm__unlocked unlocked = nrm__page_unlock((void *)start, nbytes, &range->lock);
    if (unlocked == NRM__UNLOCK_LATER) {
        return !give_up(range);
    }
    nrm__lock_acquire(&pins_lock);
    forget_locked(range, kept);
    nrm__lock_release(&pins_lock);
    nrm__node_deallocate(range, sizeof *range);
    if (unlocked == NRM__UNLOCK_NEVER) {
        *kept = (struct keepalive){0}; /* never: the driver would go to its pages */
    }
    return true;
}

/* ---- the retired list ---- */

/* The list waits for blocks of resources: this one has ranges that are to be
   unlocked. */
static void
release_block(nrm_resource *self, const struct nrm__block *block)
{
    struct keepalive kept = {0};
    uintptr_t start = (uintptr_t)block->ptr;
    if (nrm__cuda_is_forked()) {
        return; /* it is the parent's, and so is the reference */
    }
    if (!finish(start, block->tag, &kept)) {
        retire(start, block->tag);
    }
    drop(&kept);
}

static const struct nrm__ops waiting_ops = {
    .class_name = "pin",
    .flags = NRM__OPS_WAITS,
    .release_block = release_block,
};

static nrm_resource waiting = {
    .ops = &waiting_ops, .kind = NRM_KIND_HOST, .refcount = 1};

static void
retire(uintptr_t start, uint64_t turn)
{
    struct nrm__entry *entry;
    if (nrm__entry_create(&entry) != NRM_OK) {
        nrm__lost_error_note(nrm_last_error()); /* it stays locked, and kept alive */
        return;
    }
    struct nrm__block block = {
        .ptr = (void *)start, .owner = &waiting, .record = entry, .tag = turn};
    nrm__retire(&block, nrm__epoch_stamp());
}

/* ---- closing ---- */

/* Moves or copies out what kept the bytes of the pin alive. */
static void
keep_locked(nrm_pin *pin, struct range *range)
{
    range->n_pins--;
    if (pin->nbytes == range->node.nbytes && --range->n_whole == 0 &&
        range->kept.drop == NULL) {
        range->kept = pin->keepalive;
        pin->keepalive = (struct keepalive){0};
    }
}

/* 0: others still have the range pinned. */
static uint64_t
uncount(nrm_pin *pin)
{
    uint64_t turn = 0;
    nrm__lock_acquire(&pins_lock);
    struct range *range = pin->range;
    keep_locked(pin, range);
    if (range->n_pins == 0) {
        turn = range->turn = ++last_turn;
    }
    nrm__lock_release(&pins_lock);
    return turn;
}

static void
unlock_later_or_now(uintptr_t start, uint64_t turn, bool (*ask)(void))
{
    struct keepalive kept = {0};
    struct nrm__pin_wait wait;
    nrm__pin_wait_begin(&wait, ask);
    bool is_done = nrm__pin_wait_for_all(&wait) && finish(start, turn, &kept);
    nrm__pin_wait_end(&wait);
    if (!is_done && !nrm__is_exiting()) {
        retire(start, turn);
    }
    drop(&kept);
}

/* A child has its own references to what keeps the parent's pages alive, and no
   driver. */
static void
destroy_in_child(nrm_pin *pin)
{
    struct keepalive kept = {0};
    nrm__lock_acquire(&pins_lock);
    struct range *range = pin->range;
    keep_locked(pin, range);
    if (range->n_pins == 0) {
        kept = range->kept;
        range->kept = (struct keepalive){0};
    }
    nrm__lock_release(&pins_lock);
    drop(&kept);
}

void
nrm_pin_destroy(nrm_pin *pin)
{
    nrm__pin_destroy_while(pin, NULL);
}

void
nrm__pin_destroy_while(nrm_pin *pin, bool (*ask)(void))
{
    if (pin == NULL || nrm__is_exiting()) {
        return; /* the process ends with its memory as it is */
    }
    if (pin->range != NULL && nrm__cuda_is_forked()) {
        destroy_in_child(pin);
    }
    else if (pin->range != NULL) {
        uintptr_t start = pin->range->node.start;
        uint64_t turn = uncount(pin);
        if (turn != 0) {
            unlock_later_or_now(start, turn, ask);
        }
    }
    drop(&pin->keepalive);
    nrm__node_deallocate(pin, sizeof *pin);
}
