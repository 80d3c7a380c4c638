/*
 * See background.h. The thread polls with a growing pause while something is retired and
 * waits on a condition variable otherwise. A forked child has no such thread; it starts
 * one of its own when it retires something.
 */
#include "core/background.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>

#include "core/hooks.h"
#include "core/uses.h"
#include "os/fork.h"
#include "os/system.h"

#define PAUSE_FIRST_NS UINT64_C(5000000)
#define SETTLE_PAUSE_NS UINT64_C(200000)
#define PAUSE_LAST_NS UINT64_C(500000000)

enum state { ABSENT, STARTING, ASLEEP, AWAKE };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards sleeping only */
static pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
static atomic_int state;
static atomic_bool working; /* it may be inside the driver */

static void
sleep_until_woken(void)
{
    pthread_mutex_lock(&mutex);
    /* Said first and looked at then: who retires something does it the other way round. */
    atomic_store(&state, ASLEEP);
    if (!nrm__retired_is_empty()) {
        atomic_store(&state, AWAKE);
    }
    while (atomic_load(&state) == ASLEEP) {
        pthread_cond_wait(&condition, &mutex);
    }
    pthread_mutex_unlock(&mutex);
}

static void *
run(void *unused)
{
    (void)unused;
    atomic_store(&state, AWAKE);
    uint64_t pause = PAUSE_FIRST_NS;
    while (!nrm__is_exiting()) {
        if (nrm__retired_is_empty()) {
            pause = PAUSE_FIRST_NS;
            sleep_until_woken();
        }
        nrm__sleep_ns(pause);
        atomic_store(&working, true);
        size_t nbytes = nrm__is_exiting() ? 0 : nrm__retired_release_done();
        atomic_store(&working, false);
        if (nbytes == 0 && pause < PAUSE_LAST_NS) {
            pause *= 2;
        }
    }
    return NULL;
}

static void
start(void)
{
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all, before;
    int absent = ABSENT;
    if (!atomic_compare_exchange_strong(&state, &absent, STARTING)) {
        return;
    }
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all,
                    &before); /* signals are for the program's threads */
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    /* Without the thread, allocations and trim do its work. */
    if (pthread_create(&thread, &attributes, run, NULL) != 0) {
        atomic_store(&state, ABSENT);
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void
nrm__background_wake(void)
{
    if (nrm__is_exiting()) {
        return;
    }
    int now = atomic_load(&state);
    if (now == ABSENT) {
        start();
    }
    else if (now == ASLEEP) {
        pthread_mutex_lock(&mutex);
        if (atomic_load(&state) == ASLEEP) {
            atomic_store(&state, AWAKE);
            pthread_cond_signal(&condition);
        }
        pthread_mutex_unlock(&mutex);
    }
}

void
nrm__background_settle(uint64_t limit_ns)
{
    uint64_t start = nrm__clock_ns();
    while (atomic_load(&working) && nrm__clock_ns() - start < limit_ns) {
        nrm__sleep_ns(SETTLE_PAUSE_NS);
    }
}

bool
nrm__background_is_running(void)
{
    return atomic_load(&state) != ABSENT;
}

static void
fork_child(void)
{
    pthread_mutex_init(&mutex, NULL);
    pthread_cond_init(&condition, NULL);
    atomic_store(&state, ABSENT);
    atomic_store(&working, false);
}

static const struct nrm__fork_hook fork_hook = {
    .rank = NRM__RANK_LEAF,
    .child = fork_child,
};

__attribute__((constructor)) static void
add_fork_hook(void)
{
    nrm__fork_hook_add(&fork_hook);
}
