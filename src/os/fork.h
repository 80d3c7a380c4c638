/*
 * Fork hooks. The prepare hooks run in ascending order of the ranks given, before the
 * fork; parent and child hooks in descending order after it.
 */
#ifndef NRM_OS_FORK_H
#define NRM_OS_FORK_H

#include <stdbool.h>

#include "base/lock.h"

struct nrm__fork_hook {
    int rank;               /* of the locks it takes */
    struct nrm__lock *lock; /* taken before `prepare` and over the fork, or NULL */
    void (*prepare)(void);  /* any of the three may be NULL */
    void (*parent)(void);   /* these two run before the lock is dropped */
    void (*child)(void);
};

/* Registers a hook for the life of the process; `hook` is borrowed for ever. */
void nrm__fork_hook_add(const struct nrm__fork_hook *hook);

/* Counts forks this process is away from the one that loaded us. */
unsigned nrm__fork_depth(void);

#endif
