/*
 * Slots. order_slots.h says what they are for.
 *
 * Slots are never given back, so a tag can be looked up at any time without a lock. One
 * that is used again goes on counting where it was and has another generation, and it
 * is used again only when everything it counted is done. So nothing that is stored
 * late, under a number of an earlier life, can be wrong.
 *
 * A slot keeps several events, the oldest above all: where only the latest was kept, a
 * stream that is recorded on all the time would never be seen to be done. An event is
 * shared by those who wait for it and goes back to its pool, where it may be recorded
 * anew, when the last of them has let go.
 */
#include "core/order_slots.h"

#include "base/bits.h"
#include "base/lock.h"
#include "core/nodes.h"
#include "core/order.h"
#include "core/order_record.h"
#include "core/stream.h"
#include "core/uses.h"
#include "cuda/context.h"
#include "os/fork.h"

_Atomic(struct nrm__order *) nrm__order_chunks[NRM__ORDER_MAX_CHUNKS];

static struct nrm__lock lock = NRM__LOCK_INIT(NRM__RANK_ORDER);
static struct nrm__link unused = {&unused, &unused};
static struct nrm__link retired = {&retired, &retired};
static uint64_t n_slots, n_in_use, n_retired;

static const struct nrm__fork_hook fork_hook = {.rank = NRM__RANK_ORDER, .lock = &lock};

__attribute__((constructor)) static void
add_fork_hook(void)
{
    nrm__fork_hook_add(&fork_hook);
}

void
nrm__order_raise(atomic_uint_least64_t *number, uint64_t value)
{
    uint64_t seen = atomic_load(number);
    while (seen < value && !atomic_compare_exchange_weak(number, &seen, value))
        ;
}

/* ---- slots ---- */

static bool
grow_locked(void)
{
    uint64_t number = n_slots / NRM__ORDER_CHUNK;
    struct nrm__order *chunk = NULL;
    _Static_assert(NRM__ORDER_CHUNK * sizeof *chunk <= 4096, "a chunk is one node");
    if (number < NRM__ORDER_MAX_CHUNKS) {
        chunk = nrm__node_allocate(NRM__ORDER_CHUNK * sizeof *chunk);
    }
    if (chunk == NULL) {
        return false;
    }
    for (uint32_t i = 0; i < NRM__ORDER_CHUNK; i++) {
        chunk[i].index = NRM__ORDER_FIRST_SLOT + (uint32_t)n_slots + i;
        atomic_init(&chunk[i].count, 1);
        nrm__list_append(&unused, &chunk[i].link);
    }
    n_slots += NRM__ORDER_CHUNK;
    atomic_store_explicit(&nrm__order_chunks[number], chunk, memory_order_release);
    return true;
}

struct nrm__order *
nrm__order_take(nrm_stream *stream, int device, uintptr_t origin)
{
    struct nrm__order *order = NULL;
    nrm__lock_acquire(&lock);
    if (!nrm__list_is_empty(&unused) || grow_locked()) {
        order = NRM__CONTAINER(unused.next, struct nrm__order, link);
        nrm__list_remove(&order->link);
        order->stream = stream;
        order->device = device;
        atomic_store_explicit(&order->is_captured, false, memory_order_relaxed);
        atomic_store(&order->of_all, false);
        order->origin = origin;
        atomic_store_explicit(&order->resets, nrm__cuda_generations(),
                              memory_order_relaxed);
        order->next = NULL;
        n_in_use++;
    }
    nrm__lock_release(&lock);
    return order;
}

static bool
is_finished(const struct nrm__order *order)
{
    uint64_t epoch = atomic_load(&order->epoch);
    return atomic_load(&order->done) + 1 >= atomic_load(&order->count) ||
           (epoch != 0 && nrm__epoch_is_done(epoch));
}

void
nrm__order_end(struct nrm__order *order)
{
    nrm__lock_acquire(&lock);
    order->is_retired = true;
    nrm__list_append(&retired, &order->link);
    n_in_use--;
    n_retired++;
    nrm__lock_release(&lock);
}

void
nrm__order_try_recycle(struct nrm__order *order)
{
    struct nrm__order_record dropped[NRM__ORDER_MAX_RECORDS];
    unsigned n = 0;
    nrm__lock_acquire(&lock);
    if (order->is_retired && is_finished(order)) {
        for (; n < order->n_records; n++) {
            dropped[n] = order->records[n];
        }
        order->n_records = 0;
        order->is_retired = false;
        nrm__order_raise(&order->done, atomic_load(&order->count) - 1);
        atomic_fetch_add(&order->generation, 1); /* from here on its tags are done */
        atomic_store(&order->epoch, 0);
        nrm__list_remove(&order->link);
        nrm__list_append(&unused, &order->link);
        n_retired--;
    }
    nrm__lock_release(&lock);
    for (unsigned i = 0; i < n; i++) {
        nrm__order_event_release(dropped[i].event);
    }
}

/* ---- records ---- */

/* Takes the place of the latest when there are too many, which it covers. */
void
nrm__order_records_add(struct nrm__order *order, uint64_t number,
                       struct nrm__order_event *event)
{
    struct nrm__order_event *dropped = NULL;
    nrm__lock_acquire(&lock);
    unsigned n = order->n_records;
    if (n == NRM__ORDER_MAX_RECORDS && order->records[n - 1].number < number) {
        dropped = order->records[--n].event;
    }
    if (n < NRM__ORDER_MAX_RECORDS) {
        unsigned i = n;
        for (; i > 0 && order->records[i - 1].number > number; i--) {
            order->records[i] = order->records[i - 1];
        }
        order->records[i] = (struct nrm__order_record){number, event};
        order->n_records = n + 1;
        atomic_fetch_add(&event->refs, 1);
    }
    nrm__lock_release(&lock);
    nrm__order_event_release(dropped);
}

bool
nrm__order_records_find(struct nrm__order *order, uint64_t number,
                        struct nrm__order_record *out)
{
    bool found = false;
    nrm__lock_acquire(&lock);
    for (unsigned i = 0; i < order->n_records && !found; i++) {
        found = order->records[i].number >= number;
        if (found) {
            *out = order->records[i];
            atomic_fetch_add(&out->event->refs, 1);
        }
    }
    nrm__lock_release(&lock);
    return found;
}

/* Drops the oldest events up to the number. */
static void
records_drop(struct nrm__order *order, uint64_t number)
{
    struct nrm__order_record dropped[NRM__ORDER_MAX_RECORDS];
    unsigned n = 0;
    nrm__lock_acquire(&lock);
    for (; n < order->n_records && order->records[n].number <= number; n++) {
        dropped[n] = order->records[n];
    }
    order->n_records -= n;
    for (unsigned i = 0; i < order->n_records; i++) {
        order->records[i] = order->records[i + n];
    }
    nrm__lock_release(&lock);
    for (unsigned i = 0; i < n; i++) {
        nrm__order_event_release(dropped[i].event);
    }
}

void
nrm__order_records_query(struct nrm__order *order)
{
    struct nrm__order_record oldest;
    while (nrm__order_records_find(order, 0, &oldest)) {
        bool is_done = nrm__order_event_is_done(oldest.event);
        nrm__order_event_release(oldest.event);
        if (!is_done) {
            return;
        }
        nrm__order_raise(&order->done, oldest.number);
        records_drop(order, oldest.number);
    }
}

void
nrm__order_forget_contexts(void)
{
    nrm__order_forget_others();
    nrm__cuda_foreign_forget_all();
    nrm__lock_acquire(&lock);
    uint64_t n = n_slots;
    nrm__lock_release(&lock);
    for (uint64_t i = 0; i < n; i++) {
        struct nrm__order *order = nrm__order_at(NRM__ORDER_FIRST_SLOT + (uint32_t)i);
        uint64_t number = atomic_fetch_add(&order->count, 1);
        /* What threads keep is stamped when they let go of it, which may be later. */
        atomic_fetch_add(&order->generation, 1);
        nrm__order_raise(&order->done, number);
        records_drop(order, number);
    }
}

/* ---- the stream of a slot ---- */

bool
nrm__order_is_stale(const struct nrm__order *order, const nrm_stream *stream)
{
    return !nrm__stream_is_special(stream) && !nrm__order_is_current(order);
}

nrm_stream *
nrm__order_hold_stream(struct nrm__order *order, uint32_t generation)
{
    nrm__lock_acquire(&lock);
    nrm_stream *stream = order->stream;
    bool is_held = stream != NULL && atomic_load(&order->generation) == generation &&
                   !nrm__order_is_stale(order, stream) &&
                   nrm__stream_try_retain(stream);
    nrm__lock_release(&lock);
    return is_held ? stream : NULL;
}

void
nrm__order_forget_stream(struct nrm__order *order)
{
    nrm__lock_acquire(&lock);
    order->stream = NULL;
    nrm__lock_release(&lock);
}

uint64_t
nrm__order_set_epoch(struct nrm__order *order, uint32_t generation)
{
    uint64_t epoch = 0;
    nrm__lock_acquire(&lock);
    if (atomic_load(&order->generation) == generation) {
        epoch = atomic_load(&order->epoch);
        if (epoch == 0) {
            epoch = nrm__epoch_stamp();
            atomic_store(&order->epoch, epoch);
        }
    }
    nrm__lock_release(&lock);
    return epoch;
}

/* Whoever ends a slot counts once more after the last stamp, and what it records has
   that number: so it is the last, and everything that was freed on the stream comes
   before. */
bool
nrm__order_last_count(const struct nrm__order *order, uint32_t generation,
                      uint64_t *out_count, uintptr_t *out_origin)
{
    nrm__lock_acquire(&lock);
    bool lives = atomic_load(&order->generation) == generation;
    *out_count = atomic_load(&order->count) - (order->is_retired ? 1 : 0);
    *out_origin = order->origin;
    nrm__lock_release(&lock);
    return lives;
}

struct nrm__order *
nrm__order_next_retired(uint64_t from)
{
    struct nrm__order *order = NULL;
    nrm__lock_acquire(&lock);
    if (n_retired > from) {
        order = NRM__CONTAINER(retired.next, struct nrm__order, link);
        nrm__list_remove(&order->link);
        nrm__list_append(&retired, &order->link);
    }
    nrm__lock_release(&lock);
    return order;
}

/* ---- counts ---- */

void
nrm__order_counts(struct nrm__order_counts *out)
{
    nrm__lock_acquire(&lock);
    *out = (struct nrm__order_counts){
        .slots = n_slots,
        .in_use = n_in_use,
        .retired = n_retired,
        .events = nrm__order_n_events(),
    };
    nrm__lock_release(&lock);
}
