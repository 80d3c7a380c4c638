/*
 * See background.h. While something is retired the thread polls with a growing pause,
 * from which only what is watched anew wakes it, not what is retired besides; otherwise
 * it sleeps until what is watched is due, or until it is woken. A forked child has no
 * such thread; it starts one of its own when it has something to do. What the thread
 * was giving back at the moment of the fork stays mapped in the child. The resource
 * that it was looking at is let go of by whoever drains what is retired next.
 */
#include "core/background.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

#include "base/bits.h"
#include "base/lock.h"
#include "core/capture.h"
#include "core/hooks.h"
#include "core/uses.h"
#include "os/fork.h"
#include "os/system.h"

#define PAUSE_FIRST_NS UINT64_C(5000000)
#define SETTLE_PAUSE_NS UINT64_C(200000)
#define PAUSE_LAST_NS UINT64_C(500000000)
#define WATCH_PAUSE_NS UINT64_C(1000000) /* between two looks at least */
#define NEVER UINT64_MAX

enum state { ABSENT, STARTING, ASLEEP, POLLING, AWAKE };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards sleeping only */
static pthread_cond_t condition;                          /* of the monotonic clock */
static atomic_int state;
static atomic_bool working; /* it may be inside the driver */
static pthread_t self;      /* once it is no longer STARTING */
static atomic_uint_least64_t n_turns;

static struct nrm__lock watched_lock = NRM__LOCK_INIT(NRM__RANK_LEAF);
static struct nrm__link watched_list = {&watched_list, &watched_list};

/* Under watched_lock: the resource that the thread looks at, which it holds; and in a
   child the one that its parent's thread held. */
static nrm_resource *looked_at, *orphan;
static atomic_bool has_orphan;

static void wake(int lightest);

/* ---- what is watched ---- */

void
nrm__background_watched_init(struct nrm__watched *watched, nrm_resource *mr,
                             uint64_t (*look)(nrm_resource *, uint64_t, bool))
{
    nrm__list_init(&watched->link);
    watched->mr = mr;
    watched->look = look;
}

static void
insert(struct nrm__watched *watched, uint64_t due_ns)
{
    nrm__lock_acquire(&watched_lock);
    watched->due_ns = due_ns;
    nrm__list_append(&watched_list, &watched->link);
    nrm__lock_release(&watched_lock);
}

void
nrm__background_watch(struct nrm__watched *watched)
{
    insert(watched, 0);
    wake(POLLING);
}

void
nrm__background_forget(struct nrm__watched *watched)
{
    nrm__lock_acquire(&watched_lock);
    nrm__list_remove(&watched->link);
    nrm__lock_release(&watched_lock);
}

static uint64_t
first_due(void)
{
    uint64_t first = NEVER;
    nrm__lock_acquire(&watched_lock);
    for (struct nrm__link *link = watched_list.next; link != &watched_list;
         link = link->next) {
        first =
            nrm__min(first, NRM__CONTAINER(link, struct nrm__watched, link)->due_ns);
    }
    nrm__lock_release(&watched_lock);
    return first;
}

/* One that is due, out of the list, its resource retained; NULL: none is. One that is
   dying leaves the list for good. */
static struct nrm__watched *
take_due(uint64_t now_ns)
{
    struct nrm__watched *due = NULL;
    struct nrm__link *next;
    nrm__lock_acquire(&watched_lock);
    for (struct nrm__link *link = watched_list.next;
         link != &watched_list && due == NULL; link = next) {
        struct nrm__watched *watched = NRM__CONTAINER(link, struct nrm__watched, link);
        next = link->next;
        if (watched->due_ns <= now_ns) {
            nrm__list_remove(link);
            due = nrm__resource_try_retain(watched->mr) ? watched : NULL;
            looked_at = due != NULL ? due->mr : NULL;
        }
    }
    nrm__lock_release(&watched_lock);
    return due;
}

static void
look_at_watched(void)
{
    struct nrm__watched *watched;
    uint64_t now_ns = nrm__clock_ns();
    while ((watched = take_due(now_ns)) != NULL) {
        nrm_resource *mr = watched->mr;
        uint64_t due_ns = watched->look(mr, now_ns, watched->due_ns == 0);
        if (due_ns != 0) {
            insert(watched, nrm__max(due_ns, now_ns + WATCH_PAUSE_NS));
        }
        nrm__lock_acquire(&watched_lock);
        looked_at = NULL;
        nrm__lock_release(&watched_lock);
        nrm_resource_release(mr); /* which may be its end */
    }
}

void
nrm__background_drop_orphan(void)
{
    if (atomic_load_explicit(&has_orphan, memory_order_relaxed) &&
        atomic_exchange(&has_orphan, false)) {
        nrm_resource_release(orphan);
    }
}

/* ---- the thread ---- */

/* Sleeps until it is woken, or until `due_ns`. */
static void
wait_until(uint64_t due_ns)
{
    struct timespec due = {.tv_sec = (time_t)(due_ns / 1000000000),
                           .tv_nsec = (long)(due_ns % 1000000000)};
    while (atomic_load(&state) != AWAKE) {
        if (due_ns == NEVER) {
            pthread_cond_wait(&condition, &mutex);
        }
        else if (pthread_cond_timedwait(&condition, &mutex, &due) == ETIMEDOUT) {
            atomic_store(&state, AWAKE);
        }
    }
}

/* `polling`: something is retired; until `limit_ns` at the latest. */
static void
sleep_until_due(bool polling, uint64_t limit_ns)
{
    pthread_mutex_lock(&mutex);
    /* Said first and looked at then: who has something to do for it does it the other
       way round. */
    atomic_store(&state, polling ? POLLING : ASLEEP);
    uint64_t due_ns = nrm__min(first_due(), limit_ns);
    if ((!polling && !nrm__retired_is_empty()) || due_ns <= nrm__clock_ns()) {
        atomic_store(&state, AWAKE);
    }
    wait_until(due_ns);
    pthread_mutex_unlock(&mutex);
}

static void *
run(void *unused)
{
    (void)unused;
    self = pthread_self();
    atomic_store(&state, AWAKE);
    uint64_t pause = PAUSE_FIRST_NS;
    while (!nrm__is_exiting()) {
        if (nrm__retired_is_empty()) {
            pause = PAUSE_FIRST_NS;
            sleep_until_due(false, NEVER);
        }
        uint64_t slept_ns = nrm__clock_ns();
        if (!nrm__retired_is_empty()) {
            sleep_until_due(true, slept_ns + pause);
        }
        slept_ns = nrm__clock_ns() - slept_ns;
        atomic_fetch_add(&n_turns, 1);
        atomic_store(&working, true);
        size_t nbytes = nrm__is_exiting() ? 0 : nrm__retired_release_done();
        if (!nrm__is_exiting()) {
            nrm__captures_reap();
            look_at_watched();
        }
        atomic_store(&working, false);
        if (nbytes == 0 && slept_ns >= pause && pause < PAUSE_LAST_NS) {
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

/* Starts it, or wakes it from this sleep or a deeper one. */
static void
wake(int lightest)
{
    if (nrm__is_exiting()) {
        return;
    }
    int now = atomic_load(&state);
    if (now == ABSENT) {
        start();
    }
    else if (now == ASLEEP || now == lightest) {
        pthread_mutex_lock(&mutex);
        now = atomic_load(&state);
        if (now == ASLEEP || now == lightest) {
            atomic_store(&state, AWAKE);
            pthread_cond_signal(&condition);
        }
        pthread_mutex_unlock(&mutex);
    }
}

void
nrm__background_wake(void)
{
    wake(ASLEEP);
}

bool
nrm__background_is_here(void)
{
    int now = atomic_load(&state);
    return now != ABSENT && now != STARTING && pthread_equal(self, pthread_self());
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

uint64_t
nrm__background_n_turns(void)
{
    return atomic_load(&n_turns);
}

/* ---- fork ---- */

static void
init_condition(void)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

static void
fork_child(void)
{
    pthread_mutex_init(&mutex, NULL);
    init_condition();
    atomic_store(&state, ABSENT);
    atomic_store(&working, false);
    while (!nrm__list_is_empty(&watched_list)) {
        nrm__list_remove(watched_list.next);
    }
    /* A child that forks again before it has dropped one keeps that. */
    if (looked_at != NULL) {
        orphan = looked_at;
        looked_at = NULL;
        atomic_store(&has_orphan, true);
    }
}

static const struct nrm__fork_hook fork_hook = {
    .rank = NRM__RANK_LEAF,
    .lock = &watched_lock,
    .child = fork_child,
};

__attribute__((constructor)) static void
prepare(void)
{
    init_condition();
    nrm__fork_hook_add(&fork_hook);
}
