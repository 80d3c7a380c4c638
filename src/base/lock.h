/*
 * Locks with ranks. A thread takes locks in ascending rank only; debug builds assert
 * it. No lock is held across a driver call, or an OS call that can take long.
 */
#ifndef NRM_BASE_LOCK_H
#define NRM_BASE_LOCK_H

#include <pthread.h>

/* In the order in which they may be taken. src/README.md says what each guards. */
enum nrm__rank {
    NRM__RANK_RESOURCES = 1, /* the list of live resources */
    NRM__RANK_REGISTRY,
    NRM__RANK_CUDA,     /* the driver table and the contexts */
    NRM__RANK_CACHES,   /* the list of the threads' caches, and their slots */
    NRM__RANK_POOL,     /* a pool; the pool of its upstream is never taken under it */
    NRM__RANK_CAPTURES, /* the graphs that hold device memory */
    NRM__RANK_ORDER,    /* the streams that device memory waits for */
    NRM__RANK_EPOCHS,
    NRM__RANK_RETIRED,
    NRM__RANK_SLAB,
    NRM__RANK_BLOCK_MAP,
    NRM__RANK_LOG,   /* the rings and files of the log */
    NRM__RANK_NODES, /* memory for descriptions */
    NRM__RANK_LEAF,  /* options, warnings, thread states: takes nothing */
};

struct nrm__lock {
    pthread_mutex_t mutex;
    unsigned char rank;
};

#define NRM__LOCK_INIT(rank) {PTHREAD_MUTEX_INITIALIZER, (rank)}

void nrm__lock_init(struct nrm__lock *lock, enum nrm__rank rank);
void nrm__lock_finish(struct nrm__lock *lock);
void nrm__lock_acquire(struct nrm__lock *lock);
void nrm__lock_release(struct nrm__lock *lock);

/* For fork hooks, which take all locks of all resources: neither ranks nor the
   number of locks held is checked. Prepare takes it, parent and child release it. */
void nrm__lock_fork_prepare(struct nrm__lock *lock);
void nrm__lock_fork_parent(struct nrm__lock *lock);
void nrm__lock_fork_child(struct nrm__lock *lock);

/* Asserts (debug) that this thread holds no lock of ours: said before a driver call. */
void nrm__assert_no_locks(void);

#endif
