/*
 * The background thread: gives memory back while the program does something else. What
 * is retired it gives back when it is done; it queries epochs and never records one:
 * only an allocation or a trim knows that no capture of its thread is in progress. What
 * lies idle in a pool that is watched it gives back after a while, and one that fills
 * up it grows.
 *
 * It starts when there is something to do for the first time, never at import, and
 * sleeps for good while there is nothing.
 */
#ifndef NRM_CORE_BACKGROUND_H
#define NRM_CORE_BACKGROUND_H

#include <stdbool.h>
#include <stdint.h>

#include "core/ops.h"

/* A resource that wants to be looked at from time to time; a part of its struct. */
struct nrm__watched {
    struct nrm__link link;
    nrm_resource *mr; /* that it is a part of */
    /* Called in the thread with no lock held, the resource retained. `is_first`: for
       the first time since nrm__background_watch. Returns when it is to be called
       again; 0: not until it is watched anew. */
    uint64_t (*look)(nrm_resource *mr, uint64_t now_ns, bool is_first);
    uint64_t due_ns; /* 0: at once */
};

void nrm__background_watched_init(struct nrm__watched *watched, nrm_resource *mr,
                                  uint64_t (*look)(nrm_resource *mr, uint64_t now_ns,
                                                   bool is_first));

/* From now on it is looked at: at once, and then when `look` says. It is not watched
   yet: never so far, or `look` has returned 0, or is about to. No lock is held. In a
   forked child nothing is watched. */
void nrm__background_watch(struct nrm__watched *watched);

/* The resource dies. */
void nrm__background_forget(struct nrm__watched *watched);

/* Lets go of the resource that the parent's thread was looking at when this process was
   forked. One load when there is none. No lock is held. */
void nrm__background_drop_orphan(void);

/* Something was retired. Cheap; called from an array's deallocation. */
void nrm__background_wake(void);

/* Whether this is the thread: it records nothing. */
bool nrm__background_is_here(void);

/* After nrm__exit_begin: returns when it is out of the driver, which is about to unload
   itself, or after `limit_ns`. */
void nrm__background_settle(uint64_t limit_ns);

bool nrm__background_is_running(void);

/* How often it found out what there is to do: does not change while it sleeps. */
uint64_t nrm__background_n_turns(void);

#endif
