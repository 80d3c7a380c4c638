/*
 * Tags: stamping, asking, waiting. order.h says what they mean.
 *
 * The order of steps is what makes it safe (each is a fault of the model when it is
 * left out): the count is taken by adding to it, then the driver is called, then `done`
 * is raised or the event is kept under the number that was taken. What is freed
 * meanwhile bears the next number, and the answer says nothing about it.
 *
 * The handle of a stream is used only while a reference to the stream is held, that of
 * a per-thread stream in its own thread only, and that of a stream of others only in a
 * call that is given it: everybody else takes an event of the whole context.
 */
#include "core/order.h"

#include "base/error.h"
#include "base/planted.h"
#include "core/hooks.h"
#include "core/order_record.h"
#include "core/stream.h"
#include "core/uses.h"
#include "cuda/stream.h"

enum {
    TAG_DONE = 0,
    TAG_EPOCH = 1,
    REAP = 2,              /* retired slots that are looked at when one is added */
    REAP_OTHERS_FROM = 64, /* in a free on a stream of others: only of so many */
};

static struct nrm__order_tag
epoch_tag(void)
{
    return (struct nrm__order_tag){.stream = TAG_EPOCH, .count = nrm__epoch_stamp()};
}

/* ---- calling the driver about a stream ---- */

/* Whether the stream itself can say that what was submitted to it is done: it lives as
   long as the primary context, and its handle means no other context's stream as
   well. */
static bool
speaks_for_itself(const nrm_stream *stream)
{
    if (!nrm__stream_is_special(stream)) {
        return nrm__stream_is_here(stream) && stream->home == NULL;
    }
    nrm__cuda_foreign_note_current();
    return nrm__stream_is_here(stream) && !nrm__cuda_has_foreign();
}

/* Looks whether the stream is idle, and records on it when it is not. Detached. */
static void
ask_stream(struct nrm__order *order, const nrm_stream *stream)
{
    struct nrm__order_event *event = NULL;
    bool is_asked = speaks_for_itself(stream);
    if (is_asked) {
        uint64_t number = atomic_fetch_add(&order->count, 1);
        if (nrm__cuda_stream_query(order->device, stream->handle) == NRM_OK) {
            nrm__order_raise(&order->done, number);
            return;
        }
    }
    (void)nrm__order_record(order, stream, &event);
    nrm__order_event_release(event);
    if (!is_asked) {
        nrm__order_records_query(order);
    }
}

/* ---- tags ---- */

/* Two threads may make one each for the same stream: both are right, the first found is
   used. */
static struct nrm__order *
get_order(nrm_stream *stream, int device)
{
    struct nrm__order *order = nrm__order_find(stream, device);
    if (order == NULL) {
        order = nrm__order_take(stream, device, nrm__stream_origin(stream));
        if (order != NULL) {
            atomic_store(&order->of_all, stream->home != NULL); /* where it is stale */
            order->next = atomic_load(&stream->orders);
            while (!atomic_compare_exchange_weak(&stream->orders, &order->next, order))
                ;
        }
    }
    return order;
}

static struct nrm__order_tag
tag_of(const struct nrm__order *order, uint64_t count)
{
    return (struct nrm__order_tag){order->index, atomic_load(&order->generation),
                                   count};
}

/* The slot of all that no stream of ours stands for, which an event of all contexts
   covers. Made once; NULL: no memory. */
static struct nrm__order *
get_order_of_all(void)
{
    static _Atomic(struct nrm__order *) of_all;
    struct nrm__order *order = atomic_load(&of_all), *none = NULL;
    if (order != NULL) {
        return order;
    }
    order = nrm__order_take(NULL, NRM_DEVICE_NONE, 0);
    if (order == NULL) {
        return NULL;
    }
    atomic_store(&order->of_all, true);
    if (!atomic_compare_exchange_strong(&of_all, &none, order)) {
        nrm__order_end(order); /* another thread was faster */
        return none;
    }
    return order;
}

/* Of what no stream of ours stands for. Epochs do not cover the program's own
   contexts. */
static struct nrm__order_tag
tag_of_any(void)
{
    if (!nrm__cuda_has_foreign()) {
        return epoch_tag();
    }
    const struct nrm__order *order = get_order_of_all();
    if (order == NULL) {
        return NRM__ORDER_NEVER;
    }
    atomic_thread_fence(memory_order_seq_cst); /* see nrm__order_stamp */
    return tag_of(order, atomic_load(&order->count));
}

/* The event is recorded now, while the handle is an argument. Without one the tag
   stands, and whoever needs it to be done takes an event of the context. */
static struct nrm__order_tag
stamp_other(const nrm_stream *stream)
{
    struct nrm__order_event *event = NULL;
    struct nrm__order *order = nrm__order_make_other(stream);
    if (order == NULL) {
        void *token = nrm__detach();
        nrm__cuda_foreign_note_stream(stream->handle);
        nrm__attach(token);
        return tag_of_any();
    }
    atomic_thread_fence(memory_order_seq_cst); /* see nrm__order_stamp */
    struct nrm__order_tag tag = tag_of(order, atomic_load(&order->count));
    void *token = nrm__detach();
    (void)nrm__order_record(order, stream, &event);
    nrm__attach(token);
    nrm__order_event_release(event);
    nrm__order_drop(order);
    return tag;
}

void
nrm__order_note(const nrm_stream *stream)
{
    struct nrm__order_event *event = NULL;
    struct nrm__order *order =
        nrm__stream_stays(stream) ? NULL : nrm__order_hold_other(stream);
    if (order == NULL) {
        return;
    }
    void *token = nrm__detach();
    (void)nrm__order_record(order, stream, &event);
    nrm__attach(token);
    nrm__order_event_release(event);
    nrm__order_drop(order);
}

static bool
poll_epoch(uint64_t stamp)
{
    if (stamp == NRM__ORDER_NEVER.count) {
        return false;
    }
    if (stamp > nrm__epoch_newest_recorded()) {
        (void)nrm__epoch_close();
    }
    (void)nrm__epoch_poll();
    return nrm__epoch_is_done(stamp);
}

/* Looks at the longest retired slots, each once. */
static void
reap(uint64_t from)
{
    for (int i = 0; i < REAP; i++) {
        struct nrm__order *order = nrm__order_next_retired(from);
        if (order == NULL) {
            return;
        }
        uint64_t epoch = atomic_load(&order->epoch);
        if (epoch != 0) {
            (void)poll_epoch(epoch);
        }
        nrm__order_records_query(order);
        nrm__order_try_recycle(order);
    }
}

struct nrm__order_tag
nrm__order_stamp(nrm_stream *stream, int device)
{
    if (stream == NULL || !nrm__stream_is_here(stream)) {
        return tag_of_any();
    }
    if (!nrm__stream_stays(stream)) {
        struct nrm__order_tag tag = stamp_other(stream);
        reap(REAP_OTHERS_FROM);
        return tag;
    }
    struct nrm__order *order = get_order(stream, device);
    if (order == NULL || nrm__order_is_stale(order, stream)) {
        return tag_of_any();
    }
    /* The program's submissions come before the read: where submitting and recording do
       not meet in a lock of the driver, only this fence says so. */
    atomic_thread_fence(memory_order_seq_cst);
    uint64_t count = atomic_load(&order->count);
    if (NRM_PLANTED(MERGE_WITHOUT_RECORD) && order->n_records != 0) {
        count = order->records[0].number;
    }
    return tag_of(order, count);
}

struct nrm__order_tag
nrm__order_stamp_key(uint64_t key, uintptr_t *out_origin)
{
    struct nrm__order_tag tag = {.stream = (uint32_t)(key >> 32),
                                 .generation = (uint32_t)key};
    const struct nrm__order *order = nrm__order_at(tag.stream);
    atomic_thread_fence(memory_order_seq_cst); /* as above */
    bool lives = nrm__order_last_count(order, tag.generation, &tag.count, out_origin);
    return lives ? tag : NRM__ORDER_DONE;
}

bool
nrm__order_is_done(struct nrm__order_tag tag)
{
    if (tag.stream < NRM__ORDER_FIRST_SLOT) {
        return tag.stream == TAG_DONE || nrm__epoch_is_done(tag.count);
    }
    const struct nrm__order *order = nrm__order_at(tag.stream);
    if (atomic_load_explicit(&order->generation, memory_order_acquire) !=
            tag.generation ||
        atomic_load_explicit(&order->done, memory_order_acquire) >= tag.count) {
        return true;
    }
    uint64_t epoch = atomic_load_explicit(&order->epoch, memory_order_acquire);
    return epoch != 0 && nrm__epoch_is_done(epoch);
}

bool
nrm__order_slot_of(const nrm_stream *stream, int device, struct nrm__order_tag *out)
{
    if (stream == NULL || !nrm__stream_is_here(stream) ||
        (nrm__stream_is_special(stream) && !nrm__order_is_one(device))) {
        return false;
    }
    bool stays = nrm__stream_stays(stream);
    struct nrm__order *order = stays ? nrm__order_find(stream, device)
                                     : nrm__order_hold_other(stream);
    if (order == NULL) {
        return false;
    }
    *out = tag_of(order, 0);
    if (!stays) {
        nrm__order_drop(order);
    }
    return true;
}

/* The tag of a slot that the stream has. */
static bool
is_of(struct nrm__order_tag tag, const nrm_stream *stream, int device)
{
    struct nrm__order_tag own;
    return tag.stream >= NRM__ORDER_FIRST_SLOT &&
           nrm__order_slot_of(stream, device, &own) && own.stream == tag.stream &&
           own.generation == tag.generation;
}

bool
nrm__order_is_free(struct nrm__order_tag tag, const nrm_stream *stream, int device)
{
    return is_of(tag, stream, device) || nrm__order_is_done(tag);
}

bool
nrm__order_merge(struct nrm__order_tag a, struct nrm__order_tag b,
                 struct nrm__order_tag *out)
{
    if (nrm__order_is_done(a)) {
        *out = nrm__order_is_done(b) ? NRM__ORDER_DONE : b;
        return true;
    }
    if (nrm__order_is_done(b)) {
        *out = a;
        return true;
    }
    if (a.stream != b.stream || a.generation != b.generation) {
        return false;
    }
    *out = a.count > b.count ? a : b;
    return true;
}

/* ---- asking and waiting ---- */

/* Of a stream of others, which nobody may name now, or one that is gone. */
static void
poll_without_stream(struct nrm__order *order, struct nrm__order_tag tag)
{
    struct nrm__order_event *event = NULL;
    bool is_held = nrm__order_hold_key(nrm__order_key(tag)) != NULL;
    if (is_held || atomic_load(&order->of_all)) {
        void *token = nrm__detach();
        (void)nrm__order_record(order, NULL, &event);
        nrm__attach(token);
        nrm__order_event_release(event);
        if (is_held) {
            nrm__order_drop(order);
        }
        nrm__order_records_query(order);
        return;
    }
    uint64_t epoch = nrm__order_set_epoch(order, tag.generation);
    if (epoch != 0) {
        (void)poll_epoch(epoch);
    }
}

static void
poll_slot(struct nrm__order *order, struct nrm__order_tag tag)
{
    struct nrm__order_record covering;
    nrm__order_records_query(order);
    if (nrm__order_is_done(tag)) {
        return;
    }
    if (nrm__order_records_find(order, tag.count, &covering)) {
        nrm__order_event_release(covering.event); /* recorded, and not done */
        return;
    }
    nrm_stream *stream = nrm__order_hold_stream(order, tag.generation);
    if (stream == NULL) {
        poll_without_stream(order, tag);
        return;
    }
    void *token = nrm__detach();
    ask_stream(order, stream);
    nrm__attach(token);
    nrm_stream_release(stream);
}

bool
nrm__order_poll(struct nrm__order_tag tag)
{
    if (nrm__order_is_done(tag) || nrm__is_exiting()) {
        return nrm__order_is_done(tag);
    }
    if (tag.stream == TAG_EPOCH) {
        return poll_epoch(tag.count);
    }
    struct nrm__order *order = nrm__order_at(tag.stream);
    if (nrm__order_is_captured(tag.stream)) {
        return false; /* nobody can ask: nrm__order_close tells */
    }
    poll_slot(order, tag);
    bool is_done = nrm__order_is_done(tag);
    nrm__order_try_recycle(order);
    return is_done;
}

/* An event that covers the tag, retained: one that is there, or a new one. NULL: it is
   done. NRM_NOT_SUPPORTED: there is none to be had. Detached. */
static nrm_status
get_event(struct nrm__order *order, struct nrm__order_tag tag,
          struct nrm__order_event **out)
{
    struct nrm__order_record found;
    *out = NULL;
    if (nrm__order_records_find(order, tag.count, &found)) {
        *out = found.event;
        return NRM_OK;
    }
    nrm_stream *stream = nrm__order_hold_stream(order, tag.generation);
    bool is_held = stream == NULL && nrm__order_hold_key(nrm__order_key(tag)) != NULL;
    if (stream == NULL && !is_held && !atomic_load(&order->of_all)) {
        return nrm__order_is_done(tag) ? NRM_OK : NRM_NOT_SUPPORTED;
    }
    nrm_status status = nrm__order_record(order, stream, out);
    if (is_held) {
        nrm__order_drop(order);
    }
    nrm_stream_release(stream);
    return status;
}

/* A stream that is being captured makes no event, and nor can its context. Detached. */
static nrm_status
wait_for(struct nrm__order_tag tag, const nrm_stream *stream, int device)
{
    struct nrm__order_event *event = NULL;
    nrm_status status = NRM_NOT_SUPPORTED;
    if (nrm__order_is_captured(tag.stream) || tag.count == NRM__ORDER_NEVER.count ||
        nrm__cuda_stream_is_capturing(device, stream->handle)) {
        return NRM_NOT_FOUND;
    }
    if (tag.stream != TAG_EPOCH) {
        status = get_event(nrm__order_at(tag.stream), tag, &event);
    }
    if (status == NRM_NOT_SUPPORTED) {
        return nrm__order_wait_for_all(stream, device);
    }
    if (status == NRM_OK) {
        status = nrm__order_event_wait(event, stream, device);
    }
    nrm__order_event_release(event);
    return status;
}

/* A record before the wait says nothing. */
static void
count_wait(const nrm_stream *stream, int device)
{
    bool stays = nrm__stream_stays(stream);
    struct nrm__order *order = stays ? nrm__order_find(stream, device)
                                     : nrm__order_hold_other(stream);
    if (order != NULL) {
        atomic_fetch_add(&order->count, 1);
    }
    if (order != NULL && !stays) {
        nrm__order_drop(order);
    }
}

nrm_status
nrm__order_adopt(struct nrm__order_tag tag, nrm_stream *stream, int device)
{
    if (nrm__order_is_free(tag, stream, device)) {
        return NRM_OK;
    }
    if (stream == NULL || !nrm__stream_is_here(stream)) {
        return nrm__error(
            NRM_INVALID_VALUE,
            stream == NULL ? "the host cannot be made to wait for a stream"
                           : "the stream is the per-thread default stream of another "
                             "thread");
    }
    void *token = nrm__detach();
    nrm_status status = wait_for(tag, stream, device);
    nrm__attach(token);
    if (status == NRM_OK) {
        count_wait(stream, device);
    }
    return status;
}

/* ---- what graphs hold ---- */

bool
nrm__order_open(struct nrm__order_tag *out)
{
    struct nrm__order *order = nrm__order_take(NULL, 0, 0);
    if (order == NULL) {
        return false;
    }
    atomic_store(&order->is_captured, true);
    *out = tag_of(order, atomic_fetch_add(&order->count, 1));
    return true;
}

void
nrm__order_close(struct nrm__order_tag tag)
{
    struct nrm__order *order = nrm__order_at(tag.stream);
    nrm__order_raise(&order->done, tag.count);
    nrm__order_end(order);
    nrm__order_try_recycle(order);
}

bool
nrm__order_is_captured(uint32_t stream)
{
    return stream >= NRM__ORDER_FIRST_SLOT &&
           atomic_load_explicit(&nrm__order_at(stream)->is_captured,
                                memory_order_relaxed);
}

/* ---- the end of a stream ---- */

/* Whether its work may be in contexts of the program's own, which epochs do not
   cover. */
static bool
is_in_any_context(const nrm_stream *stream)
{
    return nrm__cuda_has_foreign() &&
           (nrm__stream_is_special(stream) || stream->home != NULL);
}

/* Who finds no stream in the slot any more finds what covers it. */
static void
retire(struct nrm__order *order, const nrm_stream *stream)
{
    struct nrm__order_event *event = NULL;
    bool of_all = is_in_any_context(stream);
    atomic_store(&order->of_all, of_all);
    nrm__order_forget_stream(order);
    if (NRM_PLANTED(DESTROYED_STREAM)) {
        nrm__order_raise(&order->done, atomic_fetch_add(&order->count, 1));
    }
    else if (!nrm__stream_is_here(stream) || nrm__order_is_stale(order, stream) ||
             nrm__order_record(order, stream, &event) != NRM_OK) {
        /* What bears the present count is not done when the one before is. */
        atomic_fetch_add(&order->count, 1);
        if (!of_all) {
            atomic_store(&order->epoch, nrm__epoch_stamp());
        }
    }
    nrm__order_event_release(event);
    nrm__order_end(order);
}

void
nrm__order_retire(nrm_stream *stream)
{
    struct nrm__order *order = atomic_load(&stream->orders);
    if (order == NULL) {
        return;
    }
    if (nrm__is_exiting()) {
        for (; order != NULL; order = order->next) {
            nrm__order_forget_stream(order);
        }
        return;
    }
    void *token = nrm__detach();
    while (order != NULL) {
        struct nrm__order *next = order->next; /* read before somebody may reuse it */
        retire(order, stream);
        order = next;
    }
    reap(0);
    nrm__attach(token);
}
