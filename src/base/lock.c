/*
 * Locks with ranks. Debug builds keep the ranks that a thread holds in its state,
 * always ascending, and assert before a lock is taken, so that a wrong order is seen
 * the first time it happens and not the first time it deadlocks.
 */
#include "base/lock.h"

#include "base/assert.h"
#include "base/thread_state.h"

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define HAS_THREAD_SANITIZER 1
#endif
#endif
#if defined(__SANITIZE_THREAD__) || defined(HAS_THREAD_SANITIZER)

/* The ranks do what ThreadSanitizer's search for deadlocks would do, and that search
   ends the program when a thread holds more than 64 locks, as one that forks does. */
__attribute__((visibility("default"))) const char *__tsan_default_options(void);

const char *
__tsan_default_options(void)
{
    return "detect_deadlocks=0";
}

#endif

#ifdef NDEBUG

static void
check_order(const struct nrm__lock *lock)
{
}

static void
note_acquired(const struct nrm__lock *lock)
{
}

static void
note_released(const struct nrm__lock *lock)
{
}

#else

/* NULL: this thread's locks are not tracked. */
static struct nrm__thread_state *
tracking_state(void)
{
    struct nrm__thread_state *state = nrm__thread_state();
    return nrm__thread_state_is_shared(state) ? NULL : state;
}

static void
check_order(const struct nrm__lock *lock)
{
    const struct nrm__thread_state *state = tracking_state();
    if (state == NULL) {
        return;
    }
    NRM_ASSERT(state->n_held < NRM__MAX_HELD);
    NRM_ASSERT(state->n_held == 0 || state->held[state->n_held - 1] < lock->rank);
}

static void
note_acquired(const struct nrm__lock *lock)
{
    struct nrm__thread_state *state = tracking_state();
    if (state != NULL) {
        state->held[state->n_held++] = lock->rank;
    }
}

/* Locks may be released in any order. */
static void
note_released(const struct nrm__lock *lock)
{
    struct nrm__thread_state *state = tracking_state();
    if (state == NULL) {
        return;
    }
    unsigned i = 0;
    while (i < state->n_held && state->held[i] != lock->rank) {
        i++;
    }
    NRM_ASSERT(i < state->n_held);
    for (state->n_held--; i < state->n_held; i++) {
        state->held[i] = state->held[i + 1];
    }
}

#endif

void
nrm__lock_init(struct nrm__lock *lock, enum nrm__rank rank)
{
    int code = pthread_mutex_init(&lock->mutex, NULL);
    NRM_ASSERT(code == 0);
    lock->rank = (unsigned char)rank;
}

void
nrm__lock_finish(struct nrm__lock *lock)
{
    int code = pthread_mutex_destroy(&lock->mutex);
    NRM_DEBUG_ASSERT(code == 0);
    (void)code;
}

/* How often a lock that another thread has is looked at before this one sleeps: about
   the time that the longest of the usual critical sections takes, and less than a
   sleep. */
#define N_LOOKS 32
#define PAUSES_PER_LOOK 4

static void
pause_briefly(void)
{
    for (int i = 0; i < PAUSES_PER_LOOK; i++) {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("isb" ::: "memory");
#endif
    }
}

__attribute__((noinline)) static int
acquire_contended(struct nrm__lock *lock)
{
    for (int i = 0; i < N_LOOKS; i++) {
        pause_briefly();
        if (pthread_mutex_trylock(&lock->mutex) == 0) {
            return 0;
        }
    }
    return pthread_mutex_lock(&lock->mutex);
}

void
nrm__lock_acquire(struct nrm__lock *lock)
{
    check_order(lock);
    int code = pthread_mutex_trylock(&lock->mutex);
    if (__builtin_expect(code != 0, 0)) {
        code = acquire_contended(lock);
    }
    NRM_ASSERT(code == 0);
    note_acquired(lock);
}

void
nrm__lock_release(struct nrm__lock *lock)
{
    note_released(lock);
    int code = pthread_mutex_unlock(&lock->mutex);
    NRM_ASSERT(code == 0);
}

void
nrm__lock_fork_prepare(struct nrm__lock *lock)
{
    int code = pthread_mutex_lock(&lock->mutex);
    NRM_ASSERT(code == 0);
}

void
nrm__lock_fork_parent(struct nrm__lock *lock)
{
    int code = pthread_mutex_unlock(&lock->mutex);
    NRM_ASSERT(code == 0);
}

/* The thread that forked holds it in the child too, and there nobody waits for it. */
void
nrm__lock_fork_child(struct nrm__lock *lock)
{
    nrm__lock_fork_parent(lock);
}

void
nrm__assert_no_locks(void)
{
#ifndef NDEBUG
    NRM_ASSERT(nrm__thread_state()->n_held == 0);
#endif
}
