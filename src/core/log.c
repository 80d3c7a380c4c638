/*
 * See log.h. One thread drains at a time, and holds no lock while it writes: a fork
 * waits for no disk. Whoever needs a drain meanwhile waits for the one in progress.
 *
 * Rows stand in an order in which the requests can have happened: the free of an
 * address before the allocation that gets it next, in whichever threads. A thread that
 * gives a block back says so first (`pending`), with the time, and notes the record
 * afterwards. A drain looks at what is noted, and then at what is pending: of what it
 * saw before it looked, the records older than all that is pending or was noted
 * meanwhile can go. What somebody waits for goes in any case after a while: a thread
 * may be giving a block back for long, or wait for this one.
 *
 * A forked child has nothing of what its parent's threads had noted: the parent writes
 * it. What the child notes goes to the same file, which is opened for appending.
 */
#include "core/log.h"

#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/bits.h"
#include "base/error.h"
#include "base/lock.h"
#include "core/background.h"
#include "core/hooks.h"
#include "core/log_file.h"
#include "core/log_scale.h"
#include "os/fork.h"
#include "os/memory.h"

#define WAIT_NS UINT64_C(50000)          /* for the drain of another thread */
#define PATIENCE_NS UINT64_C(1000000000) /* for records of a pending operation */
#define DELAY_NS UINT64_C(200000000)     /* from a record to its row */
#define RUN_RECORDS 256u                 /* under one hold of the lock */
/* Of a ring, from which on whoever can give up the interpreter's lock makes room. */
#define EARLY_RECORDS (NRM__LOG_RECORDS * 3 / 4)

static struct nrm__lock lock = NRM__LOCK_INIT(NRM__RANK_LOG);

/* The background thread drains a moment after the first record, and soon when a ring is
   half full. It needs no log for that, and keeps none alive. */
static nrm_resource keeper = {.refcount = 1};
static struct nrm__watched watched;
static atomic_bool is_watched, is_urgent;

/* Under the lock. What is in the list stays there while a drain is in progress. */
static struct nrm__log_ring *rings, *free_rings;
static bool is_draining;

/* Read by whoever drains; changed under the lock besides, for forks. */
static struct nrm__link files = {&files, &files};

/* ---- rings ---- */

static struct nrm__log_ring *
take_ring_locked(void)
{
    struct nrm__log_ring *ring = free_rings;
    if (ring != NULL) {
        free_rings = ring->next;
    }
    return ring;
}

static size_t
ring_nbytes(void)
{
    return nrm__align_up(sizeof(struct nrm__log_ring), nrm__page_size());
}

struct nrm__log_ring *
nrm__log_make_ring(void)
{
    struct nrm__thread_state *state = nrm__thread_state();
    void *memory;
    if (nrm__thread_state_is_shared(state)) {
        return NULL;
    }
    nrm__lock_acquire(&lock);
    struct nrm__log_ring *ring = take_ring_locked();
    nrm__lock_release(&lock);
    if (ring == NULL) {
        if (nrm__map(ring_nbytes(), nrm__page_size(), &memory) != 0) {
            return NULL;
        }
        ring = memory;
    }
    ring->thread = (int)syscall(SYS_gettid);
    atomic_store(&ring->is_left, false);
    atomic_store(&ring->pending, 0);
    atomic_store(&ring->limit, 0);
    ring->seen = ring->wanted = atomic_load(&ring->tail);
    nrm__lock_acquire(&lock);
    ring->next = rings;
    rings = ring;
    nrm__lock_release(&lock);
    state->log = ring;
    return ring;
}

static void
on_thread_end(struct nrm__thread_state *state)
{
    if (state->log != NULL) {
        atomic_store(&state->log->pending, 0);
        atomic_store(&state->log->is_left, true);
        state->log = NULL;
    }
}

static bool
is_empty(const struct nrm__log_ring *ring)
{
    return atomic_load(&ring->head) == atomic_load(&ring->tail);
}

/* Of threads that have ended, once they are empty. */
static void
recycle_rings_locked(void)
{
    struct nrm__log_ring **at = &rings;
    while (*at != NULL) {
        struct nrm__log_ring *ring = *at;
        if (atomic_load(&ring->is_left) && is_empty(ring)) {
            *at = ring->next;
            ring->next = free_rings;
            free_rings = ring;
        }
        else {
            at = &ring->next;
        }
    }
}

/* ---- one drain ---- */

static bool
try_begin_drain(void)
{
    nrm__lock_acquire(&lock);
    bool begins = !is_draining;
    is_draining = true;
    nrm__lock_release(&lock);
    return begins;
}

static void
begin_drain(void)
{
    while (!try_begin_drain()) {
        nrm__sleep_ns(WAIT_NS);
    }
}

static void
end_drain(void)
{
    nrm__lock_acquire(&lock);
    recycle_rings_locked();
    is_draining = false;
    nrm__lock_release(&lock);
}

/* The rings that there are now: those to come stand before them in the list. */
static struct nrm__log_ring *
first_ring(void)
{
    nrm__lock_acquire(&lock);
    struct nrm__log_ring *first = rings;
    nrm__lock_release(&lock);
    return first;
}

static const struct nrm__log_record *
record_at(const struct nrm__log_ring *ring, uint64_t i)
{
    return &ring->records[i % NRM__LOG_RECORDS];
}

/* Notes what each ring has; returns the time that records must be older than. A thread
   whose ring is new may give back what one of them says it has now. */
static uint64_t
see_rings(struct nrm__log_ring *first)
{
    uint64_t cut = UINT64_MAX;
    for (struct nrm__log_ring *ring = first; ring != NULL; ring = ring->next) {
        ring->seen = atomic_load_explicit(&ring->head, memory_order_acquire);
    }
    for (struct nrm__log_ring *ring = first_ring(); ring != NULL; ring = ring->next) {
        uint64_t pending = atomic_load_explicit(&ring->pending, memory_order_acquire);
        uint64_t head = atomic_load_explicit(&ring->head, memory_order_acquire);
        if (pending != 0) {
            cut = nrm__min(cut, pending);
        }
        if (head != ring->seen) {
            cut = nrm__min(cut, record_at(ring, ring->seen)->ticks);
        }
    }
    return cut;
}

/* The ring with the oldest record that was seen; `out_next`: the time of the oldest one
   of all others, or the cut. NULL: none is older than the cut. */
static struct nrm__log_ring *
oldest_ring(struct nrm__log_ring *first, uint64_t cut, uint64_t *out_next)
{
    struct nrm__log_ring *oldest = NULL;
    uint64_t least = cut, next = cut;
    for (struct nrm__log_ring *ring = first; ring != NULL; ring = ring->next) {
        uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
        uint64_t ticks = tail != ring->seen ? record_at(ring, tail)->ticks : UINT64_MAX;
        if (ticks < least) {
            next = oldest != NULL ? least : next;
            least = ticks;
            oldest = ring;
        }
        else if (tail != ring->seen) {
            next = nrm__min(next, ticks);
        }
    }
    *out_next = next;
    return oldest;
}

static void
count(struct nrm__counters *c, int64_t nbytes, int64_t n)
{
    int64_t bytes =
        atomic_fetch_add_explicit(&c->current_bytes, nbytes, memory_order_relaxed);
    int64_t count =
        atomic_fetch_add_explicit(&c->current_count, n, memory_order_relaxed);
    if (n > 0) {
        nrm__raise_peak(&c->peak_bytes, bytes + nbytes);
        nrm__raise_peak(&c->peak_count, count + n);
        atomic_fetch_add_explicit(&c->total_bytes, nbytes, memory_order_relaxed);
        atomic_fetch_add_explicit(&c->total_count, n, memory_order_relaxed);
    }
}

static void
count_record(const struct nrm__log_record *record)
{
    int64_t nbytes = (int64_t)record->nbytes;
    if (record->counts && record->action == NRM__LOG_ALLOCATE) {
        count(record->log->counters, nbytes, 1);
    }
    else if (record->counts && record->action == NRM__LOG_FREE) {
        count(record->log->counters, -nbytes, -1);
    }
}

/* The file that has a row more, which may be full now. */
static struct nrm__log_file *
add_row_locked(const struct nrm__log_record *record, int thread,
               const struct nrm__log_scale *scale)
{
    struct nrm__log_file *file = record->log->file;
    nrm__log_file_add(file, record, thread, nrm__log_real_ns(scale, record->ticks));
    count_record(record);
    return file;
}

/* Makes rows of the records of a ring up to a time, of at least one; its owner may use
   their room. Under the lock, as a child counts what is left in the rings. */
static void
take_records(struct nrm__log_ring *ring, uint64_t next,
             const struct nrm__log_scale *scale)
{
    struct nrm__log_file *file = NULL;
    nrm__lock_acquire(&lock);
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    for (unsigned n = 0; n < RUN_RECORDS; n++) {
        file = add_row_locked(record_at(ring, tail++), ring->thread, scale);
        bool goes_on = tail != ring->seen && record_at(ring, tail)->ticks < next;
        if (!goes_on || nrm__log_file_is_full(file)) {
            break;
        }
    }
    atomic_store(&ring->tail, tail);
    atomic_store(&ring->limit, 0); /* its next record says that there is one */
    nrm__lock_release(&lock);
    if (nrm__log_file_is_full(file)) {
        nrm__log_file_write(file);
    }
}

static void
write_files(void)
{
    for (struct nrm__link *link = files.next; link != &files; link = link->next) {
        nrm__log_file_write(NRM__CONTAINER(link, struct nrm__log_file, link));
    }
}

static void
drain_seen(struct nrm__log_ring *first, uint64_t cut)
{
    uint64_t next;
    struct nrm__log_ring *ring;
    struct nrm__log_scale scale = nrm__log_scale_now();
    while ((ring = oldest_ring(first, cut, &next)) != NULL) {
        take_records(ring, next, &scale);
    }
}

/* Between begin_drain and end_drain, as the next. False: something has to wait for what
   is pending. */
static bool
drain_once(bool is_late)
{
    struct nrm__log_ring *first = first_ring();
    uint64_t cut = see_rings(first);
    drain_seen(first, is_late ? UINT64_MAX : cut);
    bool is_done = true;
    for (struct nrm__log_ring *ring = first; ring != NULL; ring = ring->next) {
        is_done &= (int64_t)(ring->wanted - atomic_load(&ring->tail)) <= 0;
    }
    return is_done;
}

static void
want_all(void)
{
    for (struct nrm__log_ring *ring = first_ring(); ring != NULL; ring = ring->next) {
        ring->wanted = atomic_load_explicit(&ring->head, memory_order_acquire);
    }
}

/* All that was noted before the call, in the order of time as long as nobody has to
   wait for it too long. */
static void
drain_all(void)
{
    uint64_t start_ns = nrm__clock_ns();
    want_all();
    while (!drain_once(nrm__clock_ns() - start_ns > PATIENCE_NS)) {
        nrm__sleep_ns(WAIT_NS);
    }
}

void
nrm__log_drain(void)
{
    begin_drain();
    drain_all();
    write_files();
    end_drain();
}

bool
nrm__log_is_used(void)
{
    return first_ring() != NULL;
}

/* ---- for those who note ---- */

void
nrm__log_note_directly(const struct nrm__log_record *record)
{
    begin_drain();
    drain_all();
    struct nrm__log_scale scale = nrm__log_scale_now();
    nrm__lock_acquire(&lock);
    (void)add_row_locked(record, (int)syscall(SYS_gettid), &scale);
    nrm__lock_release(&lock);
    write_files();
    end_drain();
}

/* Drains, or waits for room that the drain of another thread makes. */
static void
make_room(struct nrm__log_ring *ring, uint64_t head, unsigned n_records)
{
    while (head - atomic_load(&ring->tail) >= n_records) {
        if (try_begin_drain()) {
            drain_all();
            write_files();
            end_drain();
        }
        else {
            nrm__sleep_ns(WAIT_NS);
        }
    }
}

static uint64_t
look(nrm_resource *mr, uint64_t now_ns, bool is_first)
{
    (void)mr;
    if (is_first && !atomic_load(&is_urgent)) {
        return now_ns + DELAY_NS;
    }
    atomic_store(&is_urgent, false);
    atomic_store(&is_watched, false); /* what is noted from here on watches anew */
    begin_drain();
    want_all();
    bool is_done = drain_once(false);
    write_files();
    end_drain();
    bool goes_on = !is_done && !atomic_exchange(&is_watched, true);
    return goes_on ? now_ns + DELAY_NS : 0;
}

/* A thread that gives a block back may have to wait for the interpreter's lock before
   it notes that, so who holds the lock must not wait for it. */
static void
make_room_detached(struct nrm__log_ring *ring, uint64_t head)
{
    if (head - atomic_load(&ring->tail) >= EARLY_RECORDS) {
        void *token = nrm__detach();
        make_room(ring, head, EARLY_RECORDS);
        nrm__attach(token);
    }
}

void
nrm__log_pressed(struct nrm__log_ring *ring, bool may_detach)
{
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    if (may_detach) {
        make_room_detached(ring, head);
    }
    make_room(ring, head, NRM__LOG_RECORDS);
    uint64_t tail = atomic_load(&ring->tail);
    bool is_half = head - tail >= NRM__LOG_RECORDS / 2;
    atomic_store(&ring->limit, tail + (is_half ? EARLY_RECORDS : NRM__LOG_RECORDS / 2));
    if (atomic_load(&ring->tail) != tail) {
        atomic_store(&ring->limit, 0); /* drained meanwhile: ask again */
    }
    if (is_half) {
        atomic_store(&is_urgent, true);
    }
    if (head != tail && !atomic_exchange(&is_watched, true)) {
        nrm__background_watch(&watched);
    }
}

/* ---- files ---- */

/* While draining, as all of these. */
static struct nrm__log_file *
find_file(const struct nrm__log_file *same)
{
    for (struct nrm__link *link = files.next; link != &files; link = link->next) {
        struct nrm__log_file *file = NRM__CONTAINER(link, struct nrm__log_file, link);
        if (file->device == same->device && file->inode == same->inode) {
            return file;
        }
    }
    return NULL;
}

nrm_status
nrm__log_open(const char *path, struct nrm__log_file **out)
{
    struct nrm__log_file *file;
    NRM_TRY(nrm__log_file_create(path, &file));
    begin_drain();
    struct nrm__log_file *found = find_file(file);
    if (found != NULL) {
        found->n_users++;
    }
    nrm_status status = found == NULL ? nrm__log_file_begin(file) : NRM_OK;
    if (found == NULL && status == NRM_OK) {
        nrm__lock_acquire(&lock);
        nrm__list_append(&files, &file->link);
        nrm__lock_release(&lock);
    }
    nrm__log_scale_begin();
    end_drain();
    if (found != NULL || status != NRM_OK) {
        nrm__log_file_destroy(file);
    }
    *out = found != NULL ? found : file;
    return status;
}

void
nrm__log_close(struct nrm__log_file *file)
{
    if (file == NULL) {
        return;
    }
    begin_drain();
    drain_all();
    write_files();
    nrm__lock_acquire(&lock);
    bool is_last = --file->n_users == 0;
    if (is_last) {
        nrm__list_remove(&file->link);
    }
    nrm__lock_release(&lock);
    end_drain();
    if (is_last) {
        nrm__log_file_destroy(file);
    }
}

nrm_status
nrm__log_flush(struct nrm__log_file *file)
{
    begin_drain();
    drain_all();
    write_files();
    uint64_t n_lost = nrm__log_n_lost(file) - file->n_told;
    int code = file->error;
    file->n_told += n_lost;
    end_drain();
    if (n_lost != 0) {
        return nrm__error_errno(NRM_OS_ERROR, code,
                                "%llu rows of the log %s are lost: %s",
                                (unsigned long long)n_lost, file->path,
                                nrm__errno_name(code));
    }
    return NRM_OK;
}

uint64_t
nrm__log_n_lost(const struct nrm__log_file *file)
{
    return atomic_load_explicit(&file->n_lost, memory_order_relaxed);
}

/* ---- the end of the process, and forks ---- */

/* Nobody is left to whom it could be raised. */
static void
tell_lost(const struct nrm__log_file *file)
{
    uint64_t n_lost = nrm__log_n_lost(file) - file->n_told;
    if (n_lost != 0) {
        (void)dprintf(STDERR_FILENO,
                      "numpy_rmm: %llu rows of the log %s are lost: %s\n",
                      (unsigned long long)n_lost, file->path,
                      nrm__errno_name(file->error));
    }
}

__attribute__((destructor)) static void
at_exit(void)
{
    begin_drain();
    drain_all();
    write_files();
    for (struct nrm__link *link = files.next; link != &files; link = link->next) {
        tell_lost(NRM__CONTAINER(link, struct nrm__log_file, link));
    }
    end_drain();
}

/* What is in the rings is the parent's to write, and so is what is on its way into a
   file; the counters are of both. */
static void
forget_records(struct nrm__log_ring *ring)
{
    uint64_t head = atomic_load(&ring->head);
    for (uint64_t i = atomic_load(&ring->tail); i != head; i++) {
        count_record(record_at(ring, i));
    }
    atomic_store(&ring->tail, head);
    atomic_store(&ring->limit, 0);
}

static void
fork_child(void)
{
    const struct nrm__thread_state *state = nrm__thread_state_now();
    is_draining = false;
    atomic_store(&is_watched, false); /* in a child nothing is */
    for (struct nrm__log_ring *ring = rings; ring != NULL; ring = ring->next) {
        forget_records(ring);
        if (state != NULL && ring == state->log) {
            ring->thread = (int)syscall(SYS_gettid);
        }
        else {
            atomic_store(&ring->pending, 0);
            atomic_store(&ring->is_left, true);
        }
    }
    for (struct nrm__link *link = files.next; link != &files; link = link->next) {
        struct nrm__log_file *file = NRM__CONTAINER(link, struct nrm__log_file, link);
        file->n_text = file->n_rows = 0;
    }
}

static const struct nrm__fork_hook fork_hook = {
    .rank = NRM__RANK_LOG,
    .lock = &lock,
    .child = fork_child,
};

__attribute__((constructor)) static void
prepare(void)
{
    nrm__background_watched_init(&watched, &keeper, look);
    nrm__fork_hook_add(&fork_hook);
    nrm__thread_state_set_end(on_thread_end);
}
