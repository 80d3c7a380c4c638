/*
 * Context epochs. uses.h says what they are for.
 *
 * `nrm__epoch_open` is the number of the open epoch. Whoever closes it makes the next
 * number visible first and records then, so a block stamped with the old number was
 * given back before the record, and with it everything submitted before. A block
 * stamped with the new number may have been given back before the record too; it waits
 * for a later one. Blocks are governed by their stamps alone: lists are only where they
 * are kept.
 *
 * A slot holds a closed epoch until it is done. It becomes visible to queries after its
 * last record, and what a query finds is stored under the number it was made for, never
 * under the slot, which may be in use again by then.
 */
#include "core/uses.h"

#include <sched.h>
#include <string.h>

#include "base/assert.h"
#include "base/bits.h"
#include "base/error.h"
#include "base/lock.h"
#include "base/owned.h"
#include "base/planted.h"
#include "core/background.h"
#include "core/hooks.h"
#include "core/watch.h"
#include "cuda/capture.h"
#include "cuda/event.h"
#include "os/fork.h"
#include "os/system.h"

#define MAX_PENDING 8
/* Between two looks at an epoch that is waited for: at first no pause at all, then one
   that doubles. */
#define SPIN_NS UINT64_C(50000)
#define POLL_FIRST_NS UINT64_C(20000)
#define POLL_LAST_NS UINT64_C(500000)
#define BUDGET_MAX_NS UINT64_C(1000000000)

enum slot_state { SLOT_FREE, SLOT_CLOSING, SLOT_RECORDED, SLOT_QUERIED };

/* Belongs to whoever made it closing or queried; the lock is held where one of several
   is chosen to be asked about. */
struct slot {
    _Atomic(enum slot_state) state;
    atomic_uint_least64_t number;
    atomic_uint_least64_t n_blocks; /* given back while it was open */
    bool asks; /* about its events at once, as no other epoch is pending */
    int n_events;
    atomic_int_least64_t n_closed, n_records; /* that were made through it */
    struct nrm__cuda_event events[NRM__MAX_DEVICES];
    struct nrm__cuda_event spares[NRM__MAX_DEVICES]; /* for later, each of its device */
};

atomic_uint_least64_t nrm__epoch_open = 1;
static atomic_uint_least64_t recorded_number; /* or what is done, if that is more */
atomic_uint_least64_t nrm__epoch_newest_done;
static atomic_uint_least64_t lost_generations; /* + 1; 0: no device was lost */
atomic_bool nrm__epoch_forbids;
static atomic_uint_least64_t n_stamps;        /* that were counted */
static atomic_uint_least64_t n_stamps_closed; /* of them in closed epochs */
static atomic_uint_least64_t n_waits, n_polls;

static struct nrm__lock epochs_lock = NRM__LOCK_INIT(NRM__RANK_EPOCHS);
static struct slot slots[MAX_PENDING]; /* each records under a mark of its own */
_Static_assert(MAX_PENDING <= NRM__CUDA_MARKS, "one for each slot");
static int n_forbidders; /* under the lock */

/* How long allocations wait for the oldest epoch, all together: once, and longer where
   epochs before it have needed longer. A GPU that is slower than the program makes it
   wait for each epoch, and memory does not grow; one that has stopped is waited for
   once. */
static struct {
    uint64_t number;    /* the oldest epoch when somebody began to wait */
    uint64_t since_ns;  /* then */
    uint64_t waited_ns; /* since */
    uint64_t n_blocks;  /* of it */
    uint64_t pace_ns;   /* that the GPU has lately needed for one block */
} patience;

/* ---- stamps ---- */

uint64_t
nrm__epoch_stamp(void)
{
#ifdef NRM_PLANTED_FAULTS
    if (NRM_PLANTED(KNOWN_USE_SHORTENS) && nrm__planted_is_done) {
        return 0;
    }
#endif
    /* The program's submissions come before the read: where submitting and recording do
       not meet in a lock of the driver, only the order of these two says so. */
    atomic_fetch_add(&n_stamps, 1);
    return atomic_load(&nrm__epoch_open);
}

void
nrm__epoch_count(uint64_t n_blocks)
{
    atomic_fetch_add_explicit(&n_stamps, n_blocks, memory_order_relaxed);
}

uint64_t
nrm__epoch_newest_recorded(void)
{
    uint64_t done = atomic_load_explicit(&nrm__epoch_newest_done, memory_order_acquire);
    return nrm__max(atomic_load_explicit(&recorded_number, memory_order_acquire), done);
}

static void
raise_to(atomic_uint_least64_t *number, uint64_t value)
{
    uint64_t seen = atomic_load(number);
    while (seen < value && !atomic_compare_exchange_weak(number, &seen, value))
        ;
}

/* ---- a lost device ---- */

bool
nrm__epoch_is_lost(void)
{
    uint64_t lost = atomic_load_explicit(&lost_generations, memory_order_acquire);
    return lost != 0 && lost - 1 == nrm__cuda_generations();
}

/* For each reason there is to forbid it, as another may last. */
static void
update_forbids(int n_more)
{
    nrm__lock_acquire(&epochs_lock);
    n_forbidders += n_more;
    bool forbids = n_forbidders != 0 || atomic_load(&lost_generations) != 0 ||
                   nrm__is_watched();
    atomic_store(&nrm__epoch_forbids, forbids);
    nrm__lock_release(&epochs_lock);
}

void
nrm__epoch_forbid(bool does)
{
    update_forbids(does ? 1 : -1);
}

static void
note_lost(void)
{
    atomic_store(&lost_generations, nrm__cuda_generations() + 1);
    update_forbids(0);
    nrm__warning_post(
        NRM__WARN_DEVICE_LOST,
        "the CUDA device reports an error that it cannot recover from (%s); "
        "page-locked memory that the GPU may still use is not reused, and "
        "handlers give out ordinary host memory until the context is reset",
        nrm_last_error()->native_name);
}

/* ---- closing ---- */

static struct slot *
take_slot(void)
{
    struct slot *taken = NULL;
    bool is_first = true;
    for (int i = 0; i < MAX_PENDING; i++) {
        enum slot_state none = SLOT_FREE;
        if (taken == NULL &&
            atomic_compare_exchange_strong(&slots[i].state, &none, SLOT_CLOSING)) {
            taken = &slots[i];
        }
        else if (atomic_load(&slots[i].state) != SLOT_FREE) {
            is_first = false;
        }
    }
    if (taken != NULL) {
        taken->asks = is_first;
        taken->n_events = 0;
    }
    return taken;
}

/* The last of its events is needed no more. */
static void
drop_event(struct slot *slot)
{
    struct nrm__cuda_event *last = &slot->events[--slot->n_events];
    struct nrm__cuda_event *spare = &slot->spares[last->device];
    if (spare->handle != NULL) {
        nrm__cuda_event_recycle(spare);
    }
    *spare = *last;
}

static void
drop_events(struct slot *slot)
{
    while (slot->n_events != 0) {
        drop_event(slot);
    }
}

static void
set_state(struct slot *slot, enum slot_state state)
{
    atomic_store_explicit(&slot->state, state, memory_order_release);
}

void
nrm__epoch_warn_capture(int device)
{
    nrm__warning_post(
        NRM__WARN_CAPTURE,
        "a CUDA stream capture on device %d was invalidated by an event that "
        "page-locked memory needed meanwhile; until a capture is announced no more "
        "events are recorded on that device, and freed page-locked memory is not "
        "reused. Capture inside \"with numpy_rmm.stream_capture():\"",
        device);
}

/* An event that is not done yet is one to be asked about. */
static enum nrm__record
record_one(struct slot *slot, int device)
{
    struct nrm__cuda_event *spare = &slot->spares[device];
    bool is_done = false;
    enum nrm__record result = nrm__cuda_record_with(device, spare, (int)(slot - slots),
                                                    slot->asks ? &is_done : NULL);
    if (result == NRM__RECORDED) {
        nrm__owned_add(&slot->n_records, 1);
    }
    if (result == NRM__RECORDED && spare->handle != NULL && !is_done) {
        slot->events[slot->n_events++] = *spare;
        spare->handle = NULL;
    }
    return result;
}

/* One record on each device whose primary context is active, asked after the number was
   published, and on an idle GPU a look at once. False when one of them could not be
   recorded. */
static bool
record_all(struct slot *slot)
{
    int n_devices = nrm__cuda_n_devices();
    for (int i = 0; i < n_devices; i++) {
        switch (record_one(slot, NRM_PLANTED(EVENT_OF_WRONG_DEVICE) ? 0 : i)) {
        case NRM__RECORDED:
            break;
        case NRM__RECORD_IDLE:
            break;
        case NRM__RECORD_INVALIDATED:
            nrm__epoch_warn_capture(i);
            return false;
        case NRM__RECORD_CAPTURE:
            return false;
        case NRM__RECORD_LOST:
            note_lost();
            return false;
        }
    }
    return true;
}

/* The next number becomes visible; what was stamped since the last one counts as the
   slot's, and what its closer says besides. Two closers may count the same: it is a
   pace. */
static uint64_t
publish(struct slot *slot, uint64_t n_more)
{
    uint64_t step = NRM_PLANTED(RECORD_BEFORE_PUBLISH) ? 0 : 1;
    uint64_t number = atomic_fetch_add(&nrm__epoch_open, step);
    uint64_t n_all = atomic_load_explicit(&n_stamps, memory_order_relaxed);
    uint64_t n_before = atomic_load_explicit(&n_stamps_closed, memory_order_relaxed);
    uint64_t n_blocks = n_more + (n_all > n_before ? n_all - n_before : 0);
    atomic_store_explicit(&n_stamps_closed, n_all, memory_order_relaxed);
    atomic_store_explicit(&slot->n_blocks, n_blocks, memory_order_relaxed);
    atomic_store_explicit(&slot->number, number, memory_order_relaxed);
    return number;
}

static void
note_recorded(struct slot *slot, uint64_t number)
{
    nrm__owned_add(&slot->n_closed, 1);
    raise_to(slot->n_events != 0 ? &recorded_number : &nrm__epoch_newest_done, number);
}

bool
nrm__epoch_close_of(uint64_t n_blocks)
{
    if (nrm__is_exiting() || nrm__cuda_is_forked() || nrm__epoch_is_lost() ||
        nrm__background_is_here()) {
        return false;
    }
    struct slot *slot = take_slot();
    if (slot == NULL) {
        return false;
    }
    void *token = nrm__detach();
    uint64_t number = publish(slot, n_blocks);
    /* Without a driver in this process nothing of the pools' can be in use. */
    bool recorded = nrm__cuda_driver() == NULL || record_all(slot);
    if (NRM_PLANTED(RECORD_BEFORE_PUBLISH)) {
        atomic_fetch_add(&nrm__epoch_open, 1);
    }
    if (recorded) {
        note_recorded(slot, number);
    }
    else {
        /* The number was published without a record: a later epoch covers its
           blocks. */
        drop_events(slot);
    }
    bool asked = slot->asks;
    set_state(slot, slot->n_events != 0 ? SLOT_RECORDED : SLOT_FREE);
    nrm__attach(token);
    if (recorded && !asked) {
        (void)nrm__epoch_poll();
    }
    return recorded;
}

bool
nrm__epoch_close(void)
{
    return nrm__epoch_close_of(0);
}

/* ---- asking ---- */

/* The oldest epoch in one of two states; NULL: there is none. */
static struct slot *
oldest_locked(enum slot_state one, enum slot_state other)
{
    struct slot *oldest = NULL;
    for (int i = 0; i < MAX_PENDING; i++) {
        enum slot_state state =
            atomic_load_explicit(&slots[i].state, memory_order_acquire);
        if ((state == one || state == other) &&
            (oldest == NULL || slots[i].number < oldest->number)) {
            oldest = &slots[i];
        }
    }
    return oldest;
}

/* The oldest recorded epoch that nobody is asking about, marked as asked about. */
static struct slot *
take_oldest(void)
{
    nrm__lock_acquire(&epochs_lock);
    struct slot *oldest = oldest_locked(SLOT_RECORDED, SLOT_RECORDED);
    if (oldest != NULL) {
        set_state(oldest, SLOT_QUERIED);
    }
    nrm__lock_release(&epochs_lock);
    return oldest;
}

/* Drops the events that are done; true when none is left. */
static bool
query(struct slot *slot)
{
    while (slot->n_events > 0) {
        nrm_status status = nrm__cuda_event_query(&slot->events[slot->n_events - 1]);
        if (status == NRM_DEVICE_LOST) {
            note_lost();
        }
        if (status != NRM_OK) {
            return false;
        }
        drop_event(slot);
    }
    return true;
}

bool
nrm__epoch_poll(void)
{
    bool more = false;
    struct slot *slot;
    if (nrm__is_exiting() || nrm__cuda_is_forked() || nrm__epoch_is_lost()) {
        return false;
    }
    atomic_fetch_add_explicit(&n_polls, 1, memory_order_relaxed);
    while ((slot = take_oldest()) != NULL) {
        bool covered = nrm__epoch_is_done(slot->number);
        if (covered) {
            drop_events(slot);
        }
        else if (!query(slot)) {
            set_state(slot, SLOT_RECORDED);
            break;
        }
        raise_to(&nrm__epoch_newest_done, slot->number);
        set_state(slot, SLOT_FREE);
        more = more || !covered;
    }
    return more;
}

/* Another epoch is the oldest: what the one before took from the first wait on, for
   each of its blocks, is the pace of the GPU: the slowest counts, and is forgotten by
   and by. */
static void
begin_patience_locked(const struct slot *oldest)
{
    uint64_t now = nrm__clock_ns();
    patience.pace_ns -= patience.pace_ns / 8;
    if (patience.waited_ns != 0 && patience.n_blocks != 0) {
        uint64_t pace = (now - patience.since_ns) / patience.n_blocks;
        patience.pace_ns = pace > patience.pace_ns ? pace : patience.pace_ns;
    }
    patience.number = oldest->number;
    patience.n_blocks = oldest->n_blocks;
    patience.since_ns = now;
    patience.waited_ns = 0;
}

/* How long a wait may last for the epoch that is the oldest now; 0: there is none, or
   it was waited for enough. */
static uint64_t
begin_wait(uint64_t limit_ns, bool insists)
{
    uint64_t allowed_ns = 0;
    nrm__lock_acquire(&epochs_lock);
    const struct slot *oldest = oldest_locked(SLOT_RECORDED, SLOT_QUERIED);
    if (oldest != NULL) {
        if (oldest->number != patience.number) {
            begin_patience_locked(oldest);
        }
        uint64_t budget = 2 * patience.pace_ns * patience.n_blocks;
        budget = budget < BUDGET_MAX_NS ? budget : BUDGET_MAX_NS;
        uint64_t left = budget > patience.waited_ns ? budget - patience.waited_ns : 0;
        if (insists || patience.waited_ns == 0 || left != 0) {
            allowed_ns = left > limit_ns ? left : limit_ns;
        }
    }
    nrm__lock_release(&epochs_lock);
    return allowed_ns;
}

/* Counts all waits, also those that brought something: what an epoch needed is what all
   of them lasted. */
static void
end_wait(uint64_t waited_ns)
{
    nrm__lock_acquire(&epochs_lock);
    patience.waited_ns += waited_ns;
    nrm__lock_release(&epochs_lock);
}

/* Looks again and again until more is done than `before`. The kernel wakes a thread
   that sleeps some fifty microseconds late: what takes less is looked at all the
   time. */
static bool
look_for(uint64_t allowed_ns, uint64_t before)
{
    uint64_t start = nrm__clock_ns(), waited = 0, pause = POLL_FIRST_NS;
    bool more = false;
    while (!more && !nrm__epoch_is_lost() && !nrm__is_exiting() &&
           waited < allowed_ns) {
        if (waited < SPIN_NS) {
            (void)sched_yield();
        }
        else {
            nrm__sleep_ns(pause);
            pause = pause < POLL_LAST_NS ? 2 * pause : pause;
        }
        more = nrm__epoch_poll() || atomic_load(&nrm__epoch_newest_done) != before;
        waited = nrm__clock_ns() - start;
    }
    end_wait(waited);
    return more;
}

bool
nrm__epoch_wait(uint64_t limit_ns, bool insists)
{
    uint64_t before = atomic_load(&nrm__epoch_newest_done);
    if (nrm__epoch_poll() || atomic_load(&nrm__epoch_newest_done) != before) {
        return true;
    }
    if (limit_ns == 0 || nrm__is_exiting() || nrm__cuda_is_forked()) {
        return false;
    }
    uint64_t allowed_ns = begin_wait(limit_ns, insists || limit_ns == UINT64_MAX);
    if (allowed_ns == 0) {
        return false;
    }
    atomic_fetch_add_explicit(&n_waits, 1, memory_order_relaxed);
    void *token = nrm__detach();
    bool more = look_for(allowed_ns, before);
    nrm__attach(token);
    return more;
}

void
nrm__epoch_forget_contexts(void)
{
    struct slot *slot;
    uint64_t number = atomic_fetch_add(&nrm__epoch_open, 1);
    while ((slot = take_oldest()) != NULL) {
        drop_events(slot);
        set_state(slot, SLOT_FREE);
    }
    raise_to(&recorded_number, number);
    raise_to(&nrm__epoch_newest_done, number);
    atomic_store(&lost_generations, 0);
    update_forbids(0);
    nrm__lock_acquire(&epochs_lock);
    memset(&patience, 0, sizeof patience);
    nrm__lock_release(&epochs_lock);
}

/* ---- counts and fork ---- */

void
nrm__epoch_counts(struct nrm__epoch_counts *out)
{
    *out = (struct nrm__epoch_counts){
        .open = atomic_load(&nrm__epoch_open),
        .done = atomic_load(&nrm__epoch_newest_done),
        .waits = atomic_load(&n_waits),
        .polls = atomic_load(&n_polls),
    };
    for (int i = 0; i < MAX_PENDING; i++) {
        out->pending += atomic_load(&slots[i].state) != SLOT_FREE;
        out->closed += (uint64_t)nrm__owned_get(&slots[i].n_closed);
        out->records += (uint64_t)nrm__owned_get(&slots[i].n_records);
    }
}

static const struct nrm__fork_hook epochs_hook = {
    .rank = NRM__RANK_EPOCHS,
    .lock = &epochs_lock,
};

__attribute__((constructor)) static void
add_fork_hook(void)
{
    nrm__fork_hook_add(&epochs_hook);
}
