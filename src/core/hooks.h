/*
 * What the core asks of the language above it, as function pointers: it knows no
 * Python.
 */
#ifndef NRM_CORE_HOOKS_H
#define NRM_CORE_HOOKS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nrm/status.h"

struct nrm__hooks {
    /* Gives the interpreter's lock up; returns a token, NULL when it was not held. */
    void *(*detach)(void);
    /* Takes it back; NULL does nothing. May never return while the process ends. */
    void (*attach)(void *token);
    /* Finds garbage that may own blocks, and lets go of it. False: it could not. */
    bool (*collect)(void);
};

/* Once, before any resource is used. */
void nrm__hooks_set(const struct nrm__hooks *hooks);

/* Around every wait and every driver call that can block; no lock of ours is held. */
void *nrm__detach(void);
void nrm__attach(void *token);

/*
 * For a request that failed for lack of memory and came from the language itself, which
 * may run code of its own then: never for an array's handler. No lock of ours is held.
 * True: it is worth one more try.
 */
bool nrm__collect(void);

/*
 * The process has begun to end: nothing waits, no driver call is made, nothing is given
 * back, no error is reported from here on.
 */
void nrm__exit_begin(void);
bool nrm__is_exiting(void);

/* ---- warnings: each is posted at most once, and shown by the layer above ---- */

enum nrm__warning {
    NRM__WARN_FALLBACK,    /* a handler served ordinary memory */
    NRM__WARN_FORKED,      /* the same, in a forked child */
    NRM__WARN_DEVICE_LOST, /* a sticky device error */
    NRM__WARN_CAPTURE,     /* a capture was invalidated; no more records */
    NRM__WARN_LOG,         /* rows of a log could not be written */
    NRM__WARN_COUNT,
};

void nrm__warning_post(enum nrm__warning id, const char *format, ...) NRM_PRINTF(2, 3);

/* How many were posted and not shown yet; only to be read. */
extern atomic_int nrm__n_warnings;

/* Copies the next warning not shown yet; false: there is none (one atomic load). */
bool nrm__warning_take(char *out, size_t size);

/* Lets every warning be shown once more: for a new simulated driver. */
void nrm__warnings_rearm(void);

/* ---- errors of functions that cannot report ---- */

/* Notes an error of a free: counted, and the first one is kept for `info`. */
void nrm__lost_error_note(const nrm_error *error);
/* The first one; status NRM_OK: none. `out_count`: how many. */
void nrm__lost_error_get(nrm_error *out, uint64_t *out_count);

#endif
