/*
 * The retired list: blocks that were given back for good and wait for their epoch.
 * Whoever allocates, trims or has nothing else to do (the background thread) gives back
 * what is done; never an array's deallocation, which only appends.
 *
 * That a block is done is not enough where the driver is called to free or unregister
 * it (NRM__OPS_WAITS): the call waits for everything that was submitted to the context,
 * whatever memory it uses, and holds the driver's lock meanwhile, so that beside a
 * kernel without end the whole process would stand still. Such blocks go back when
 * nothing is under way, which only the event of a new epoch can tell: in calls of the
 * program, not in the background thread, and not while a stream is captured.
 */
#include "base/bits.h"
#include "base/lock.h"
#include "core/background.h"
#include "core/block_map.h"
#include "core/capture.h"
#include "core/hooks.h"
#include "core/known_uses.h"
#include "core/left_out.h"
#include "core/nodes.h"
#include "core/uses.h"
#include "cuda/context.h"
#include "cuda/driver.h"
#include "cuda/foreign.h"
#include "nrm/options.h"
#include "os/fork.h"
#include "os/system.h"

enum {
    N_ASKED = 32,           /* uses that the driver is asked about at a time */
    PAUSE_FIRST_NS = 20000, /* between two looks; doubled up to ... */
    PAUSE_LAST_NS = 500000,
};

#define BUDGET_MAX_NS UINT64_C(1000000000)

static struct nrm__lock retired_lock = NRM__LOCK_INIT(NRM__RANK_RETIRED);
static struct nrm__link retired = {&retired, &retired};
static struct nrm__link all_ready = {&all_ready, &all_ready};
static atomic_size_t n_retired;
static atomic_size_t unasked_nbytes;      /* of them since the driver was asked */
static atomic_bool waited_in_vain;        /* for known uses, and none has ended since */
static atomic_uint_least64_t returned_ns; /* when such came back; 0: none is left */
static atomic_uint_least64_t pace_ns;     /* that the GPU has lately needed for a MiB */
static atomic_size_t n_used;              /* of them that wait for known uses */

/* What a thread has taken off the list, and gives back by and by. */
struct ready {
    struct nrm__link entries;
    struct nrm__link link; /* of all_ready, while there are any */
};

/* The entry of the block in the ordered table, or a new one for a block of a
   segment. */
static struct nrm__entry *
entry_for(const struct nrm__block *block)
{
    if (block->segment == NULL) {
        return block->record;
    }
    return nrm__node_allocate(sizeof(struct nrm__entry));
}

/* No memory for a list node: better lost than handed out too early. */
static void
lose(const struct nrm__block *block)
{
    nrm__lost_error_note(&(nrm_error){
        .status = NRM_OUT_OF_MEMORY,
        .message = "a freed block was lost: no memory to note that the GPU may use it",
        .requested_nbytes = block->nbytes,
    });
}

static void
retire(const struct nrm__block *block, uint64_t stamp, struct nrm__use *uses)
{
    struct nrm__entry *entry = entry_for(block);
    if (entry == NULL) {
        lose(block);
        return;
    }
    nrm_resource_retain(block->owner);
    entry->block = *block;
    entry->stamp = stamp;
    entry->uses = uses;
    if (uses != NULL) {
        atomic_fetch_add(&n_used, 1);
        atomic_fetch_add(&unasked_nbytes, block->capacity);
    }
    nrm__lock_acquire(&retired_lock);
    nrm__list_append(&retired, &entry->link);
    nrm__lock_release(&retired_lock);
    atomic_fetch_add(&n_retired, 1);
    nrm__background_wake();
}

/* Device memory may be in use in contexts of the program's own, which no epoch covers.
   False: no memory to say so. */
static bool
add_foreign_use(const struct nrm__block *block, struct nrm__use **uses)
{
    if (block->owner->kind != NRM_KIND_DEVICE || !nrm__cuda_has_foreign()) {
        return true;
    }
    struct nrm__use *use = nrm__node_allocate(sizeof *use);
    if (use != NULL) {
        *use = (struct nrm__use){
            .next = *uses,
            .start = (uintptr_t)block->ptr,
            .tag = nrm__order_stamp(NULL, NRM_DEVICE_NONE),
        };
        *uses = use;
    }
    return use != NULL;
}

void
nrm__retire(const struct nrm__block *block, uint64_t stamp)
{
    struct nrm__use *uses = nrm__known_uses_take(block);
    if (stamp == 0 || add_foreign_use(block, &uses)) {
        retire(block, stamp, uses);
    }
    else {
        lose(block);
    }
}

bool
nrm__retire_used(const struct nrm__block *block)
{
    struct nrm__use *uses = nrm__known_uses_take(block);
    if (uses != NULL) {
        retire(block, 0, uses);
    }
    return uses != NULL;
}

size_t
nrm__retired_nbytes(const nrm_resource *owner)
{
    size_t nbytes = 0;
    nrm__lock_acquire(&retired_lock);
    for (struct nrm__link *link = retired.next; link != &retired; link = link->next) {
        struct nrm__entry *entry = NRM__CONTAINER(link, struct nrm__entry, link);
        if (owner == NULL || entry->block.owner == owner) {
            nbytes += entry->block.capacity;
        }
    }
    nrm__lock_release(&retired_lock);
    return nbytes;
}

/* Adds the first pending use of an entry, unless it is among the tags. */
static size_t
add_pending_locked(struct nrm__link *link, struct nrm__order_tag *tags, size_t n)
{
    const struct nrm__entry *entry = NRM__CONTAINER(link, struct nrm__entry, link);
    struct nrm__order_tag tag = nrm__uses_first_pending(entry->uses);
    bool is_new = tag.stream != NRM__ORDER_DONE.stream;
    for (size_t i = 0; i < n && is_new; i++) {
        is_new = tags[i].stream != tag.stream || tags[i].count != tag.count;
    }
    if (is_new) {
        tags[n++] = tag;
    }
    return n;
}

/* Asks the driver about known uses, the oldest and the newest, with no lock held. What
   is asked about for the first time is recorded: so each event covers what was freed
   since the last, and not all that there is. */
static void
ask_about_uses(void)
{
    struct nrm__order_tag tags[N_ASKED + 1];
    size_t n = 0;
    if (atomic_load(&n_used) == 0 || nrm__cuda_is_forked()) {
        return;
    }
    atomic_store(&unasked_nbytes, 0);
    nrm__lock_acquire(&retired_lock);
    for (struct nrm__link *link = retired.next; link != &retired && n < N_ASKED;
         link = link->next) {
        n = add_pending_locked(link, tags, n);
    }
    if (!nrm__list_is_empty(&retired)) {
        n = add_pending_locked(retired.previous, tags, n);
    }
    nrm__lock_release(&retired_lock);
    for (size_t i = 0; i < n; i++) {
        nrm__use_poll(tags[i]);
    }
}

/* ---- whether the driver may be called to give memory back ---- */

static bool
waits(const struct nrm__entry *entry)
{
    return (entry->block.owner->ops->flags & NRM__OPS_WAITS) != 0;
}

struct waiting {
    size_t n, nbytes, largest;
};

/* The blocks whose release waits. */
static struct waiting
count_waiting(void)
{
    struct waiting count = {0};
    nrm__lock_acquire(&retired_lock);
    for (struct nrm__link *link = retired.next; link != &retired; link = link->next) {
        const struct nrm__entry *entry = NRM__CONTAINER(link, struct nrm__entry, link);
        if (waits(entry)) {
            count.n++;
            count.nbytes += entry->block.capacity;
            count.largest = nrm__max(count.largest, entry->block.capacity);
        }
    }
    nrm__lock_release(&retired_lock);
    return count;
}

/* Nothing can be under way where there is no driver or no context. */
static bool
is_asleep(void)
{
    int devices[NRM__MAX_DEVICES];
    return nrm__cuda_driver() == NULL ||
           (!nrm__cuda_has_foreign() && nrm__cuda_active_devices(devices) == 0);
}

/* The same as a new epoch says of primary contexts, of those of the program's own that
   are known: an event of each is done at once. Detached. */
static bool
foreigners_are_idle(void)
{
    struct nrm__cuda_foreign foreign;
    unsigned place = 0;
    bool idle = !nrm__cuda_foreign_is_full();
    while (idle && nrm__cuda_foreign_next(-1, &place, &foreign)) {
        struct nrm__cuda_lone_event event = {0};
        enum nrm__record result =
            nrm__cuda_foreign_record(&foreign, NRM__CUDA_ALL_STREAMS, &event);
        idle = result == NRM__RECORD_IDLE ||
               (result == NRM__RECORDED &&
                nrm__cuda_foreign_query(foreign.driver, &event) == NRM_OK);
        nrm__cuda_foreign_drop(foreign.driver, &event);
    }
    return idle;
}

/* How long to wait for that. What is retired piles up beside a GPU that always has
   work, so more than may be parked is waited for as an allocation waits. */
static uint64_t
patience_ns(const struct waiting *waiting, uint64_t limit_ns)
{
    size_t parked_limit = (size_t)nrm_option_get(NRM_OPT_PARKED_LIMIT);
    bool is_much = waiting->nbytes > nrm__max(parked_limit, 4 * waiting->largest);
    return limit_ns == 0 && is_much ? (uint64_t)nrm_option_get(NRM_OPT_WAIT_LIMIT)
                                    : limit_ns;
}

/* Whether nothing is under way that was submitted before this call. */
static bool
find_idle(uint64_t limit_ns)
{
    struct waiting waiting = count_waiting();
    if (waiting.n == 0 || is_asleep()) {
        return waiting.n != 0;
    }
    limit_ns = patience_ns(&waiting, limit_ns);
    while (!nrm__epoch_close()) { /* too many are pending, or there must be none */
        if (limit_ns == 0 || !nrm__epoch_wait(limit_ns, false)) {
            return false;
        }
    }
    uint64_t number = nrm__epoch_newest_recorded();
    while (!nrm__epoch_is_done(number)) {
        if (limit_ns == 0 || !nrm__epoch_wait(limit_ns, false)) {
            return false;
        }
    }
    void *token = nrm__detach();
    bool idle = foreigners_are_idle();
    nrm__attach(token);
    return idle;
}

/* ---- giving back ---- */

/* Moves what is done to `ready`; the newest stamp of what is left and is not done, 0:
   nothing is. The GPU knows nothing of the pages of a forked child: there, everything
   is done. */
static uint64_t
take_ready(struct ready *ready, bool is_idle)
{
    bool forked = nrm__cuda_is_forked();
    uint64_t newest = 0;
    struct nrm__link *next;
    nrm__list_init(&ready->entries);
    nrm__lock_acquire(&retired_lock);
    for (struct nrm__link *link = retired.next; link != &retired; link = next) {
        struct nrm__entry *entry = NRM__CONTAINER(link, struct nrm__entry, link);
        next = link->next;
        bool is_done = nrm__epoch_is_done(entry->stamp);
        bool may_go = is_idle || !waits(entry);
        if (forked || (is_done && may_go && nrm__uses_are_done(entry->uses))) {
            nrm__list_remove(link);
            nrm__list_append(&ready->entries, link);
        }
        else if (!is_done && entry->stamp > newest) {
            newest = entry->stamp;
        }
    }
    if (!nrm__list_is_empty(&ready->entries)) {
        nrm__list_append(&all_ready, &ready->link);
    }
    nrm__lock_release(&retired_lock);
    return newest;
}

/* Its next entry, in no list any more; NULL: it has none. */
static struct nrm__entry *
pop(struct ready *ready)
{
    struct nrm__link *link = ready->entries.next;
    if (link == &ready->entries) {
        return NULL;
    }
    nrm__lock_acquire(&retired_lock);
    nrm__list_remove(link);
    if (nrm__list_is_empty(&ready->entries)) {
        nrm__list_remove(&ready->link);
    }
    nrm__lock_release(&retired_lock);
    return NRM__CONTAINER(link, struct nrm__entry, link);
}

static size_t
release_one(struct nrm__entry *entry)
{
    struct nrm__block block = entry->block;
    size_t nbytes = block.capacity;
    nrm_resource *owner = block.owner;
    if (entry->uses != NULL) {
        nrm__uses_drop(entry->uses);
        atomic_store(&waited_in_vain, false);
        atomic_fetch_sub(&n_used, 1);
    }
    if (owner->ops->release_block != NULL) {
        owner->ops->release_block(owner, &block);
    }
    else {
        owner->ops->deallocate(owner, &block, NULL);
    }
    nrm__entry_destroy(entry);
    nrm_resource_release(owner);
    atomic_fetch_sub_explicit(&n_retired, 1, memory_order_release);
    return nbytes;
}

static size_t
release_all(struct ready *ready)
{
    struct nrm__entry *entry = pop(ready);
    size_t nbytes = 0;
    if (entry == NULL) {
        return 0;
    }
    void *token = nrm__detach();
    for (; entry != NULL; entry = pop(ready)) {
        nbytes += release_one(entry);
    }
    nrm__attach(token);
    return nbytes;
}

/* What came back, and when, tells how fast the GPU is of late: the slowest counts, and
   is forgotten by and by. */
static void
note_pace(size_t nbytes)
{
    uint64_t now = nrm__clock_ns();
    uint64_t last = atomic_exchange(&returned_ns, atomic_load(&n_used) != 0 ? now : 0);
    uint64_t pace = atomic_load(&pace_ns);
    pace -= pace / 8;
    if (last != 0) {
        pace = nrm__max(pace, (now - last) * NRM__MIB / nrm__max(nbytes, NRM__MIB));
    }
    atomic_store(&pace_ns, pace);
}

static bool
return_used(void)
{
    struct ready ready;
    ask_about_uses();
    (void)take_ready(&ready, count_waiting().n != 0 && is_asleep());
    size_t nbytes = release_all(&ready);
    if (nbytes != 0) {
        note_pace(nbytes);
    }
    return nbytes != 0;
}

/* An event may cover all that there is, so it can take as long as that. */
static uint64_t
allowed_ns(uint64_t limit_ns)
{
    size_t n_mib = nrm__retired_nbytes(NULL) / NRM__MIB + 1;
    uint64_t budget = nrm__min(2 * atomic_load(&pace_ns) * n_mib, BUDGET_MAX_NS);
    return nrm__max(limit_ns, budget);
}

bool
nrm__retired_return_used(uint64_t limit_ns, bool insists)
{
    if (nrm__is_exiting() || atomic_load(&n_used) == 0) {
        return false;
    }
    nrm__captures_reap();
    bool returned = return_used();
    if (returned || limit_ns == 0 || (!insists && atomic_load(&waited_in_vain))) {
        return returned;
    }
    uint64_t start = nrm__clock_ns(), pause = PAUSE_FIRST_NS;
    uint64_t most_ns = allowed_ns(limit_ns);
    void *token = nrm__detach();
    while (!returned && !nrm__is_exiting() && !nrm__epoch_is_lost() &&
           nrm__clock_ns() - start < most_ns) {
        nrm__sleep_ns(pause);
        pause = pause < PAUSE_LAST_NS ? 2 * pause : pause;
        returned = return_used();
    }
    nrm__attach(token);
    atomic_store(&waited_in_vain, !returned);
    return returned;
}

void
nrm__retired_ask_about(size_t nbytes)
{
    if (atomic_load_explicit(&unasked_nbytes, memory_order_relaxed) >= nbytes &&
        atomic_load(&n_used) != 0) {
        (void)return_used();
    }
}

size_t
nrm__retired_release_done(void)
{
    struct ready ready;
    if (nrm__is_exiting() || nrm__retired_is_empty()) {
        return 0;
    }
    (void)nrm__epoch_poll();
    ask_about_uses();
    (void)take_ready(&ready, count_waiting().n != 0 && is_asleep());
    return release_all(&ready);
}

size_t
nrm__retired_drain(uint64_t limit_ns)
{
    struct ready ready;
    nrm__background_drop_orphan();
    nrm__captures_reap();
    if (nrm__is_exiting() || nrm__retired_is_empty()) {
        return 0;
    }
    bool is_idle = find_idle(limit_ns);
    (void)nrm__epoch_poll();
    ask_about_uses();
    uint64_t newest = take_ready(&ready, is_idle);
    size_t nbytes = release_all(&ready);
    if (newest > nrm__epoch_newest_recorded()) {
        (void)nrm__epoch_close();
    }
    while (newest != 0) {
        newest = take_ready(&ready, is_idle);
        nbytes += release_all(&ready);
        if (newest == 0 || !nrm__epoch_wait(limit_ns, false)) {
            break;
        }
    }
    return nbytes;
}

bool
nrm__retired_is_empty(void)
{
    return atomic_load(&n_retired) == 0;
}

/* ---- fork ---- */

static void
offer_all(const struct nrm__link *entries, enum nrm__left_out scope)
{
    for (struct nrm__link *link = entries->next; link != entries; link = link->next) {
        const struct nrm__block *block =
            &NRM__CONTAINER(link, struct nrm__entry, link)->block;
        bool is_alone = block->segment == NULL || scope == NRM__LEFT_OUT_IDLE;
        if (is_alone && nrm__block_is_registered(block)) {
            nrm__left_out_offer((uintptr_t)block->ptr, block->capacity);
        }
    }
}

/* Nobody uses what is retired. Blocks of pools lie in segments, which may be left out
   as a whole. */
static void
fork_prepare(void)
{
    enum nrm__left_out scope = nrm__left_out_scope();
    if (scope == NRM__LEFT_OUT_NOTHING) {
        return;
    }
    offer_all(&retired, scope);
    for (struct nrm__link *link = all_ready.next; link != &all_ready;
         link = link->next) {
        offer_all(&NRM__CONTAINER(link, struct ready, link)->entries, scope);
    }
}

/* The threads that have them do not go on here. */
static void
fork_child(void)
{
    nrm__list_init(&all_ready);
}

static const struct nrm__fork_hook retired_hook = {
    .rank = NRM__RANK_RETIRED,
    .lock = &retired_lock,
    .prepare = fork_prepare,
    .child = fork_child,
};

__attribute__((constructor)) static void
add_fork_hook(void)
{
    nrm__fork_hook_add(&retired_hook);
}
