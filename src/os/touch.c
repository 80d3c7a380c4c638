/*
 * First touch by several threads.
 *
 * The range is cut into slices that start at multiples of 4 MiB, so that no huge page
 * belongs to two threads, and every thread takes the next slice until none is left or
 * one failed. Threads are started for the one call and joined: they exist while pages
 * are made and never at a fork of the caller. Where there are several NUMA nodes they
 * make pages on the node of the caller, as if it had touched them itself: scattered
 * over all nodes, page-locked memory would be copied more slowly.
 */
#include "os/touch.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>

#include "base/bits.h"
#include "os/memory.h"
#include "os/numa.h"
#include "os/system.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_READ 22 /* Linux 5.14 */
#define MADV_POPULATE_WRITE 23
#endif

#define SLICE_NBYTES (4 * NRM__MIB)
#define DEFAULT_MAX_THREADS 16
#define MAX_THREADS 256
#define STACK_NBYTES NRM__MIB

enum manner {
    REWRITE,        /* by a write that changes nothing */
    POPULATE,       /* by the kernel, or by such a write where it cannot */
    PREFAULT_READ,  /* by the kernel or not at all */
    PREFAULT_WRITE, /* the same, as if written to */
};

struct job {
    uintptr_t start, end; /* whole pages */
    enum manner manner;
    int node;              /* whose pages the helpers prefer; -1: no matter */
    atomic_size_t n_taken; /* slices */
    atomic_int error;      /* of the first slice that failed */
};

/*
 * Writes to every page what stands there already: a zero where there is one, by a
 * comparison and exchange, as compilers turn an addition of zero into a load, and a
 * load would map the shared zero page first. A page that holds something else is
 * present. Four times faster than MADV_POPULATE_WRITE where pages are huge: that walks
 * the range again for every page.
 */
static void
rewrite(uintptr_t start, uintptr_t end)
{
    for (uintptr_t at = start; at < end; at += nrm__page_size()) {
        unsigned char zero = 0;
        (void)__atomic_compare_exchange_n((unsigned char *)at, &zero, 0, false,
                                          __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    }
}

/* By the kernel, which says when it has no page, where a write would end the
   process. */
static int
populate(uintptr_t start, uintptr_t end)
{
    while (madvise((void *)start, end - start, MADV_POPULATE_WRITE) != 0) {
        if (errno == EINVAL) { /* an older kernel */
            rewrite(start, end);
            return 0;
        }
        if (errno != EINTR) {
            return errno;
        }
    }
    return 0;
}

static int
prefault(uintptr_t start, uintptr_t end, int advice)
{
    while (madvise((void *)start, end - start, advice) != 0) {
        if (errno != EINTR) {
            return errno;
        }
    }
    return 0;
}

static int
touch_slice(const struct job *job, uintptr_t start, uintptr_t end)
{
    switch (job->manner) {
    case POPULATE:
        return populate(start, end);
    case PREFAULT_READ:
        return prefault(start, end, MADV_POPULATE_READ);
    case PREFAULT_WRITE:
        return prefault(start, end, MADV_POPULATE_WRITE);
    case REWRITE:
        break;
    }
    rewrite(start, end);
    return 0;
}

static void
work(struct job *job)
{
    uintptr_t first = nrm__align_down(job->start, SLICE_NBYTES);
    while (atomic_load_explicit(&job->error, memory_order_relaxed) == 0) {
        size_t i = atomic_fetch_add_explicit(&job->n_taken, 1, memory_order_relaxed);
        uintptr_t start = nrm__max(first + i * SLICE_NBYTES, job->start);
        if (start >= job->end) {
            return;
        }
        uintptr_t end = nrm__min(first + (i + 1) * SLICE_NBYTES, job->end);
        int none = 0;
        int error = touch_slice(job, start, end);
        if (error != 0) {
            (void)atomic_compare_exchange_strong(&job->error, &none, error);
        }
    }
}

static void *
help(void *argument)
{
    struct job *job = argument;
    nrm__numa_prefer(job->node);
    work(job);
    return NULL;
}

/* Starts up to `n` helpers, which take no signals; returns how many there are. */
static size_t
start_helpers(struct job *job, pthread_t *out, size_t n)
{
    pthread_attr_t attributes;
    sigset_t all, before;
    size_t n_started = 0;
    if (n == 0 || pthread_attr_init(&attributes) != 0) {
        return 0;
    }
    (void)pthread_attr_setstacksize(&attributes, STACK_NBYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (n_started < n &&
           pthread_create(&out[n_started], &attributes, help, job) == 0) {
        n_started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return n_started;
}

static size_t
count_threads(const struct job *job, int wanted)
{
    size_t n_slices = (nrm__align_up(job->end, SLICE_NBYTES) -
                       nrm__align_down(job->start, SLICE_NBYTES)) /
                      SLICE_NBYTES;
    size_t n = wanted > 0 ? nrm__min((size_t)wanted, MAX_THREADS)
                          : nrm__min((size_t)nrm__n_cores(), DEFAULT_MAX_THREADS);
    return nrm__min(n, n_slices);
}

static int
touch(void *ptr, size_t nbytes, int n_threads, enum manner manner)
{
    pthread_t helpers[MAX_THREADS];
    int cancel_state;
    if (nbytes == 0) {
        return 0;
    }
    struct job job = {
        .start = nrm__align_down((uintptr_t)ptr, nrm__page_size()),
        .end = nrm__align_up((uintptr_t)ptr + nbytes, nrm__page_size()),
        .manner = manner,
        .node = nrm__numa_local_node(),
    };
    size_t n = count_threads(&job, n_threads);
    /* The helpers work on this frame: a cancelled thread must not leave it. */
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state);
    size_t n_helpers = start_helpers(&job, helpers, n - 1);
    work(&job);
    for (size_t i = 0; i < n_helpers; i++) {
        pthread_join(helpers[i], NULL);
    }
    pthread_setcancelstate(cancel_state, NULL);
    return atomic_load(&job.error);
}

int
nrm__touch(void *ptr, size_t nbytes, int n_threads)
{
    return touch(ptr, nbytes, n_threads, REWRITE);
}

int
nrm__populate(void *ptr, size_t nbytes, int n_threads)
{
    return touch(ptr, nbytes, n_threads, POPULATE);
}

void
nrm__prefault(void *ptr, size_t nbytes, int n_threads, bool for_writing)
{
    (void)touch(ptr, nbytes, n_threads, for_writing ? PREFAULT_WRITE : PREFAULT_READ);
}
