/*
 * What the core keeps for each thread: one pointer in initial-exec thread-local storage
 * leads to it (a larger block could fail to load in a process that runs already). The
 * memory comes from the system, is handed to a later thread when this one ends, and is
 * never given back.
 *
 * A thread that ends, and one for which the system has no memory, has the shared state,
 * known by its id 0. It lies in read-only memory: whoever writes to a state asks first.
 */
#ifndef NRM_BASE_THREAD_STATE_H
#define NRM_BASE_THREAD_STATE_H

#include <stdbool.h>
#include <stdint.h>

#include "nrm/status.h"

#define NRM__MAX_HELD 8
#define NRM__MAX_ENDS 2

struct nrm__cache;
struct nrm__log_ring;
struct nrm__scopes;
struct nrm_stream;

struct nrm__thread_state {
    nrm_error error;
    uint64_t id;                       /* of the thread; never used again; 0: shared */
    unsigned n_held;                   /* locks of ours that the thread holds */
    unsigned char held[NRM__MAX_HELD]; /* their ranks, ascending (debug builds) */
    unsigned n_ends;                   /* calls of the thread's destructors so far */
    struct nrm__cache *cache;          /* core/cache.h; NULL: none, or put away */
    struct nrm__log_ring *log;         /* core/log.h; NULL: none */
    struct nrm__cache *put_away;       /* core/scopes.h: that was put away */
    struct nrm__scopes *counting;      /* what this thread asks for next; or NULL */
    struct nrm__scopes *scopes;        /* that it has had; or NULL */
    struct nrm_stream *spare_stream; /* core/stream.c: memory for the next one; or NULL.
                                          Handed on with the state */
    struct nrm__thread_state *next_free; /* while no thread has it */
};

extern __thread struct nrm__thread_state *nrm__thread_state_current
    __attribute__((tls_model("initial-exec"), visibility("hidden")));

/* NULL: this thread has none yet. */
static inline struct nrm__thread_state *
nrm__thread_state_now(void)
{
    return nrm__thread_state_current;
}

/* Never NULL, and never fails. */
struct nrm__thread_state *nrm__thread_state(void);

/* Sets one more function that runs in each thread that ends, with its state; before any
   does, and NRM__MAX_ENDS of them at most. */
void nrm__thread_state_set_end(void (*end)(struct nrm__thread_state *state));

static inline bool
nrm__thread_state_is_shared(const struct nrm__thread_state *state)
{
    return state->id == 0;
}

/* A number for this thread that no other thread had or will have; 0: it has none. */
uint64_t nrm__thread_id(void);

#endif
