/*
 * Fork hooks, run by one pthread_atfork registration made when we are loaded.
 *
 * Hooks are only ever appended, by an atomic counter: adding one takes no lock, so it
 * may happen under any lock. A fork takes a sorted snapshot of them, and uses the same
 * one before and after. The locks of base come last, as everything else may take them;
 * base knows no hooks, so they are called by name.
 */
#include "os/fork.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

#include "base/assert.h"
#include "base/fork.h"
#include "base/thread_state.h"

#define MAX_HOOKS 64

static _Atomic(const struct nrm__fork_hook *) hooks[MAX_HOOKS];
static atomic_size_t n_hooks;
static atomic_uint depth;

/* Of the fork in progress: one at a time. */
static struct {
    pthread_mutex_t lock;
    const struct nrm__fork_hook *hooks[MAX_HOOKS]; /* by rank */
    size_t n_hooks;
} fork_now = {.lock = PTHREAD_MUTEX_INITIALIZER};

void
nrm__fork_hook_add(const struct nrm__fork_hook *hook)
{
    size_t i = atomic_fetch_add(&n_hooks, 1);
    NRM_ASSERT(i < MAX_HOOKS);
    atomic_store_explicit(&hooks[i], hook, memory_order_release);
}

unsigned
nrm__fork_depth(void)
{
    return atomic_load_explicit(&depth, memory_order_relaxed);
}

/* Hooks of one rank stay in the order in which they were added. */
static void
insert_by_rank(const struct nrm__fork_hook *hook)
{
    size_t i = fork_now.n_hooks++;
    for (; i > 0 && fork_now.hooks[i - 1]->rank > hook->rank; i--) {
        fork_now.hooks[i] = fork_now.hooks[i - 1];
    }
    fork_now.hooks[i] = hook;
}

static void
take_snapshot(void)
{
    size_t n = atomic_load(&n_hooks);
    fork_now.n_hooks = 0;
    for (size_t i = 0; i < n; i++) {
        const struct nrm__fork_hook *hook =
            atomic_load_explicit(&hooks[i], memory_order_acquire);
        if (hook != NULL) { /* otherwise it is being added: nobody relies on it yet */
            insert_by_rank(hook);
        }
    }
}

static void
on_prepare(void)
{
    (void)nrm__thread_state(); /* made now, as its lock is about to be taken */
    pthread_mutex_lock(&fork_now.lock);
    take_snapshot();
    for (size_t i = 0; i < fork_now.n_hooks; i++) {
        const struct nrm__fork_hook *hook = fork_now.hooks[i];
        if (hook->lock != NULL) {
            nrm__lock_fork_prepare(hook->lock);
        }
        if (hook->prepare != NULL) {
            hook->prepare();
        }
    }
    nrm__options_fork_prepare();
    nrm__thread_states_fork_prepare();
}

static void
on_parent(void)
{
    nrm__thread_states_fork_parent();
    nrm__options_fork_parent();
    for (size_t i = fork_now.n_hooks; i-- > 0;) {
        const struct nrm__fork_hook *hook = fork_now.hooks[i];
        if (hook->parent != NULL) {
            hook->parent();
        }
        if (hook->lock != NULL) {
            nrm__lock_fork_parent(hook->lock);
        }
    }
    pthread_mutex_unlock(&fork_now.lock);
}

static void
on_child(void)
{
    nrm__thread_states_fork_child();
    nrm__options_fork_child();
    atomic_fetch_add_explicit(&depth, 1, memory_order_relaxed);
    for (size_t i = fork_now.n_hooks; i-- > 0;) {
        const struct nrm__fork_hook *hook = fork_now.hooks[i];
        if (hook->child != NULL) {
            hook->child();
        }
        if (hook->lock != NULL) {
            nrm__lock_fork_child(hook->lock);
        }
    }
    pthread_mutex_unlock(&fork_now.lock);
}

__attribute__((constructor)) static void
watch_forks(void)
{
    int code = pthread_atfork(on_prepare, on_parent, on_child);
    NRM_ASSERT(code == 0);
}
