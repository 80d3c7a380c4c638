/*
 * The log of requests: what adaptors/logging.c notes in a few stores, as rows of text
 * in a file a moment later.
 *
 * Each thread writes records into a ring of its own, without a lock. A drain takes what
 * all rings have, in the order of time, and writes rows: in the background thread, when
 * somebody flushes, when a ring is full, and at the end of the process. Nothing is
 * dropped: who finds his ring full drains it himself. Rows that the system does not
 * take are counted, and said.
 */
#ifndef NRM_CORE_LOG_H
#define NRM_CORE_LOG_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/thread_state.h"
#include "core/ops.h"
#include "os/ticks.h"

#define NRM__LOG_RECORDS 4096u     /* of a ring */
#define NRM__LOG_PATH_NBYTES 1024u /* with the 0 at its end */

enum nrm__log_action {
    NRM__LOG_ALLOCATE,
    NRM__LOG_FAILURE,
    NRM__LOG_FREE,
};

struct nrm__log_file;

/* Of an adaptor: where its rows go, and whose counters its records are counted in. */
struct nrm__log {
    struct nrm__log_file *file; /* a user of it */
    struct nrm__counters *counters;
};

struct nrm__log_record {
    uint64_t ticks;
    const struct nrm__log *log; /* lives until nrm__log_close */
    void *ptr;
    size_t nbytes;
    uintptr_t stream; /* a handle */
    enum nrm__log_action action;
    bool counts; /* whoever drains counts it: nobody else has */
};

/* Records from `tail` to `head`, which count on for ever, belong to whoever drains. */
struct nrm__log_ring {
    _Alignas(64) atomic_uint_least64_t head; /* written by the owner */
    /* Of an operation of the owner that is not in the ring yet: no record of a later
       time is taken before it. 0: none. */
    atomic_uint_least64_t pending;
    atomic_uint_least64_t
        limit;           /* the head at which the owner calls nrm__log_pressed */
    int thread;          /* the system's number of it */
    atomic_bool is_left; /* the owner has ended */
    _Alignas(64) atomic_uint_least64_t tail;
    uint64_t seen, wanted;      /* of whoever drains */
    struct nrm__log_ring *next; /* in the list of all, or of those that are free */
    struct nrm__log_record records[NRM__LOG_RECORDS];
};

/*
 * A file of rows, with its first line; emptied, unless this process writes to it
 * already: then both write to one. NRM_OS_ERROR. `path` is borrowed.
 */
nrm_status nrm__log_open(const char *path, struct nrm__log_file **out);

/* All that was noted is written and counted: what leads to the file may go. NULL is no
   error. */
void nrm__log_close(struct nrm__log_file *file);

/* Writes what was noted before the call. NRM_OS_ERROR: rows were lost since the last
   call that said so; the message says how many, and why. */
nrm_status nrm__log_flush(struct nrm__log_file *file);

/* Writes and counts what there is in all rings. */
void nrm__log_drain(void);

/* Whether any thread has noted something so far. */
bool nrm__log_is_used(void);

/* Rows lost so far. */
uint64_t nrm__log_n_lost(const struct nrm__log_file *file);

/* ---- for those who note ---- */

/* NULL: this thread cannot have one, as it ends, or as there is no memory. */
struct nrm__log_ring *nrm__log_make_ring(void);
/* For those. */
void nrm__log_note_directly(const struct nrm__log_record *record);

/* A ring has its first record, is half full, or nearly: sees to it that it is drained,
   after a moment or at once. No lock is held. `may_detach`: the interpreter's neither,
   if somebody has to wait. */
void nrm__log_pressed(struct nrm__log_ring *ring, bool may_detach);

/* The ring of this thread; NULL: it has none yet. */
static inline struct nrm__log_ring *
nrm__log_ring_now(void)
{
    struct nrm__thread_state *state = nrm__thread_state_now();
    return state != NULL ? state->log : NULL;
}

/* Where its owner writes the next record; nobody sees it before nrm__log_put. */
static inline struct nrm__log_record *
nrm__log_next(struct nrm__log_ring *ring)
{
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    return &ring->records[head % NRM__LOG_RECORDS];
}

/* True: nrm__log_pressed has to be called, with no lock held. */
static inline bool
nrm__log_put(struct nrm__log_ring *ring)
{
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed) + 1;
    atomic_store_explicit(&ring->head, head, memory_order_release);
    return head >= atomic_load_explicit(&ring->limit, memory_order_relaxed);
}

#endif
