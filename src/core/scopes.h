/*
 * Scopes: what a thread allocates between a push and a pop, of all resources or through
 * one.
 *
 * A scope belongs to the thread that pushed it, and counts what that thread asks for
 * and gives back while it is open, requests that a resource makes of its upstream
 * apart. What it gives back of what it had before makes the current value negative, and
 * the peak is never below 0. A block that was allocated under a scope of one thread and
 * is freed by another counts in the scopes of the first one that were open when it was
 * allocated and still are, and in none of the second.
 *
 * A thread without a scope pays nothing. One with a scope has put its cache away
 * (base/thread_state.h), so that its requests find no short way and come to
 * core/scoped.c, which takes the cache out for as long as it serves one. Blocks are
 * marked there: whoever frees one goes the long way and finds its tag.
 */
#ifndef NRM_CORE_SCOPES_H
#define NRM_CORE_SCOPES_H

#include "base/hidden.h"
#include "base/lock.h"
#include "base/thread_state.h"
#include "core/ops.h"
#include "nrm/adaptors.h"

struct nrm__scope {
    struct nrm__scope *outer;
    uint64_t start;        /* the time of its push, which names it */
    nrm_resource *through; /* retained: requests through this one count; NULL: all do */
    nrm_counts counts;     /* written and read by its thread */
    atomic_int_least64_t other_bytes, other_count; /* given back by other threads */
};

/* Those of one thread. Handed to a later thread when that ends, and never given
   back. */
struct nrm__scopes {
    struct nrm__lock lock;        /* other threads look at scopes under it */
    struct nrm__scope *innermost; /* read by its thread without it, as all links */
    uint64_t number;              /* in the table of all, in the highest bits of tags */
    uint64_t since;               /* the time that this thread has them from */
    bool is_inside;               /* a request that is counted */
    struct nrm__scopes *next_free;
};

/* The bits of a tag that are a time; a number stands above them. */
#define NRM__SCOPE_TIME_BITS 48

/* Pushes there have been in this process, and one more. */
extern atomic_uint_least64_t nrm__scope_time NRM__HIDDEN;

/* ---- for programs, in the calling thread ---- */

/* Begins a scope; `through` may be NULL. Never 0 is what names it. */
nrm_status nrm__scope_push(nrm_resource *through, uint64_t *out_scope);

/* Ends it, wherever it stands; what it counted. NRM_NOT_FOUND: this thread has none
   such. */
nrm_status nrm__scope_pop(uint64_t scope, nrm_counts *out);

/* What it has counted until now. */
nrm_status nrm__scope_counts(uint64_t scope, nrm_counts *out);

/* The innermost one of those that count what goes through a resource (NULL: those that
   count all); 0: there is none. */
uint64_t nrm__scope_innermost(const nrm_resource *through);

/* ---- for core/scoped.c ---- */

/* Once a scope was pushed there may be blocks with tags. */
static inline bool
nrm__scopes_are_known(void)
{
    return atomic_load_explicit(&nrm__scope_time, memory_order_relaxed) > 1;
}

/* What counts the request that this thread begins, and has its cache ready again; NULL:
   nothing does, or the request is part of another one. */
static inline struct nrm__scopes *
nrm__scopes_enter(void)
{
    struct nrm__thread_state *state = nrm__thread_state_now();
    struct nrm__scopes *scopes = state != NULL ? state->counting : NULL;
    if (__builtin_expect(scopes != NULL, 0)) {
        state->counting = NULL;
        state->cache = state->put_away;
        state->put_away = NULL;
        scopes->is_inside = true;
    }
    return scopes;
}

/* The request has ended. */
static inline void
nrm__scopes_leave(struct nrm__scopes *scopes)
{
    struct nrm__thread_state *state = nrm__thread_state_now();
    scopes->is_inside = false;
    if (scopes->innermost != NULL) {
        state->counting = scopes;
        state->put_away = state->cache;
        state->cache = NULL;
    }
}

/* The tag of a block that is allocated now. */
static inline uint64_t
nrm__scopes_tag(const struct nrm__scopes *scopes)
{
    return scopes->number << NRM__SCOPE_TIME_BITS |
           atomic_load_explicit(&nrm__scope_time, memory_order_relaxed);
}

/* Counts a block that this thread allocated through `mr`. */
void nrm__scopes_count_in(struct nrm__scopes *scopes, const nrm_resource *mr,
                          size_t nbytes);

/* Counts one that goes, where its tag says; `scopes` may be NULL. */
void nrm__scopes_count_out(struct nrm__scopes *scopes, const nrm_resource *mr,
                           uint64_t tag, size_t nbytes);

/* Counts one that changed its size in place: what it grew by counts as allocated. */
void nrm__scopes_count_resize(struct nrm__scopes *scopes, const nrm_resource *mr,
                              uint64_t tag, size_t old_nbytes, size_t nbytes);

/* ---- for core/cache.c ---- */

/* A thread ends: its scopes do, and its cache is where it belongs. */
void nrm__scopes_end_thread(struct nrm__thread_state *state);

#endif
