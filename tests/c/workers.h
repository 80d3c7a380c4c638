/* Threads that do what they are told, one part after the other, and stay: what a thread
   keeps for itself can be looked at from outside while it is idle. */

#ifndef WORKERS_H
#define WORKERS_H

#include <semaphore.h>

#include "core/cache.h"
#include "fixtures.h"

/* Sanitizers and Valgrind make everything many times slower: divide the rounds by
   it. */
#if defined(__has_feature)
#define WORKERS__HAS(sanitizer) __has_feature(sanitizer)
#else
#define WORKERS__HAS(sanitizer) 0
#endif
#if defined(__SANITIZE_THREAD__) || WORKERS__HAS(thread_sanitizer)
#define IS_TSAN 1
#else
#define IS_TSAN 0
#endif
#if defined(__SANITIZE_ADDRESS__) || WORKERS__HAS(address_sanitizer) || IS_TSAN
#define IS_SANITIZED 1
#else
#define IS_SANITIZED 0
#endif
#if IS_SANITIZED || defined(NRM_VALGRIND)
#define SLOW 8
#else
#define SLOW 1
#endif
/* Threads that a forked child starts: neither sanitizer can do without locks of its
   own, which other threads of the parent may have held when it forked. ThreadSanitizer
   knows no threads in the child of a program that has several. */
#define CHILD_HAS_THREADS (!IS_SANITIZED)

struct worker {
    pthread_t thread;
    sem_t asked, answered;
    void (*part)(void *argument); /* NULL: end */
    void *argument;
};

static inline void *
worker__main(void *argument)
{
    struct worker *worker = argument;
    for (;;) {
        while (sem_wait(&worker->asked) != 0) {
        }
        if (worker->part == NULL) {
            return NULL;
        }
        worker->part(worker->argument);
        sem_post(&worker->answered);
    }
}

static inline void
worker_start(struct worker *worker)
{
    sem_init(&worker->asked, 0, 0);
    sem_init(&worker->answered, 0, 0);
    CHECK_EQ(pthread_create(&worker->thread, NULL, worker__main, worker), 0);
}

/* Begins a part; worker_wait returns when it is done. */
static inline void
worker_ask(struct worker *worker, void (*part)(void *), void *argument)
{
    worker->part = part;
    worker->argument = argument;
    sem_post(&worker->asked);
}

static inline void
worker_wait(struct worker *worker)
{
    while (sem_wait(&worker->answered) != 0) {
    }
}

static inline void
worker_run(struct worker *worker, void (*part)(void *), void *argument)
{
    worker_ask(worker, part, argument);
    worker_wait(worker);
}

static inline void
worker_end(struct worker *worker)
{
    worker_ask(worker, NULL, NULL);
    pthread_join(worker->thread, NULL);
    sem_destroy(&worker->asked);
    sem_destroy(&worker->answered);
}

/* How many cells and blocks of a pool the calling thread keeps. */
static inline size_t
n_kept(nrm_resource *mr)
{
    size_t n = 0;
    struct nrm__cache *cache;
    struct nrm__slot *slot = nrm__cache_enter_slot(mr, &cache);
    if (slot == NULL) {
        return 0;
    }
    if (slot->magazines != NULL) {
        for (size_t i = 0; i < NRM__SLAB_N_CLASSES; i++) {
            n += slot->magazines->classes[i].n;
        }
        for (size_t i = 0; i < NRM__CACHE_SETS; i++) {
            n += slot->magazines->sets[i].n;
        }
    }
    nrm__cache_leave(cache);
    return n;
}

/* Sizes of cells and of blocks that threads keep, and one that they do not keep. */
static const size_t kept_nbytes[] = {1,    64,    100,   1000,   8192,
                                     8193, 20000, 65536, 300000, 1000000};
#define N_KEPT_SIZES (sizeof kept_nbytes / sizeof *kept_nbytes)

/* Allocates and gives back a few blocks of every size, so that the thread keeps
   some. */
static inline void
fill_cache(void *mr)
{
    void *ptrs[N_KEPT_SIZES][4];
    for (size_t i = 0; i < N_KEPT_SIZES; i++) {
        for (size_t k = 0; k < 4; k++) {
            ptrs[i][k] = allocate(mr, kept_nbytes[i]);
        }
    }
    for (size_t i = 0; i < N_KEPT_SIZES; i++) {
        for (size_t k = 0; k < 4; k++) {
            CHECK_OK(nrm_resource_deallocate(mr, ptrs[i][k], 0, NULL));
        }
    }
    CHECK_GT(n_kept(mr), N_KEPT_SIZES);
}

#endif
