/*
 * Thread states: found by one thread-local pointer, recycled by the destructor of a
 * pthread key.
 *
 * Destructors of other keys run in an order that nobody knows and may free arrays, so
 * ours asks to be called again until the last round but one of those that POSIX
 * promises and gives the state up only then: the last round is when sanitizers end the
 * thread. A call that comes even later gets the shared state, which nobody has to give
 * up.
 *
 * The states lie in chunks straight from the system. The lock is a bare mutex, as a
 * struct nrm__lock asks for the state of the thread that takes it.
 */
#include "base/thread_state.h"

#include <limits.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/mman.h>

#include "base/assert.h"
#include "base/fork.h"

#define CHUNK_NBYTES ((size_t)64 * 1024)

#define LAST_END (PTHREAD_DESTRUCTOR_ITERATIONS - 1)

/* Apart from each other, as each is written by one thread. */
struct slot {
    _Alignas(128) struct nrm__thread_state state;
};

struct chunk {
    struct chunk *next;
    size_t n_used; /* slots that a thread has had */
    struct slot slots[];
};

#define SLOTS_PER_CHUNK ((CHUNK_NBYTES - sizeof(struct chunk)) / sizeof(struct slot))

static const struct nrm__thread_state shared_state = {
    .error = {.status = NRM_OUT_OF_MEMORY,
              .message =
                  "no record: the thread is ending, or there was no memory for one"},
};

__thread struct nrm__thread_state *nrm__thread_state_current
    __attribute__((tls_model("initial-exec"), visibility("hidden")));

static void (*at_end[NRM__MAX_ENDS])(struct nrm__thread_state *state);
static unsigned n_at_end;

static struct {
    pthread_mutex_t lock;
    struct chunk *chunks;           /* the newest first */
    struct nrm__thread_state *free; /* given up by threads that ended */
    uint64_t last_id;
} states = {.lock = PTHREAD_MUTEX_INITIALIZER};

static pthread_key_t key;
static bool has_key; /* without one (1024 are in use) states are not recycled */

static struct nrm__thread_state *
get_shared(void)
{
    return (struct nrm__thread_state *)(uintptr_t)&shared_state;
}

static void
on_thread_end(void *argument)
{
    struct nrm__thread_state *state = argument;
    if (++state->n_ends < LAST_END && pthread_setspecific(key, state) == 0) {
        return;
    }
    for (unsigned i = 0; i < n_at_end; i++) {
        at_end[i](state);
    }
    nrm__thread_state_current = get_shared();
    pthread_mutex_lock(&states.lock);
    state->next_free = states.free;
    states.free = state;
    pthread_mutex_unlock(&states.lock);
}

static void
make_key(void)
{
    has_key = pthread_key_create(&key, on_thread_end) == 0;
}

/* A state that no thread has had, or NULL. */
static struct nrm__thread_state *
new_state_locked(void)
{
    struct chunk *chunk = states.chunks;
    if (chunk == NULL || chunk->n_used == SLOTS_PER_CHUNK) {
        chunk = mmap(NULL, CHUNK_NBYTES, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (chunk == MAP_FAILED) {
            return NULL;
        }
        chunk->next = states.chunks;
        states.chunks = chunk;
    }
    return &chunk->slots[chunk->n_used++].state;
}

static struct nrm__thread_state *
take_state(void)
{
    pthread_mutex_lock(&states.lock);
    struct nrm__thread_state *state = states.free;
    if (state != NULL) {
        states.free = state->next_free;
    }
    else {
        state = new_state_locked();
    }
    uint64_t id = ++states.last_id;
    pthread_mutex_unlock(&states.lock);
    if (state != NULL) {
        *state =
            (struct nrm__thread_state){.id = id, .spare_stream = state->spare_stream};
    }
    return state;
}

static struct nrm__thread_state *
attach_state(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_key);
    struct nrm__thread_state *state = take_state();
    if (state == NULL) {
        return get_shared(); /* the next call tries again */
    }
    if (has_key) {
        (void)pthread_setspecific(key, state);
    }
    nrm__thread_state_current = state;
    return state;
}

struct nrm__thread_state *
nrm__thread_state(void)
{
    struct nrm__thread_state *state = nrm__thread_state_current;
    return state != NULL ? state : attach_state();
}

void
nrm__thread_state_set_end(void (*end)(struct nrm__thread_state *state))
{
    NRM_ASSERT(n_at_end < NRM__MAX_ENDS);
    at_end[n_at_end++] = end;
}

uint64_t
nrm__thread_id(void)
{
    return nrm__thread_state()->id;
}

/* ---- fork ---- */

void
nrm__thread_states_fork_prepare(void)
{
    pthread_mutex_lock(&states.lock);
}

void
nrm__thread_states_fork_parent(void)
{
    pthread_mutex_unlock(&states.lock);
}

/* The forking thread is the only one that lives on: every other state is free now. */
void
nrm__thread_states_fork_child(void)
{
    states.free = NULL;
    for (struct chunk *chunk = states.chunks; chunk != NULL; chunk = chunk->next) {
        for (size_t i = 0; i < chunk->n_used; i++) {
            struct nrm__thread_state *state = &chunk->slots[i].state;
            if (state == nrm__thread_state_current) {
                continue;
            }
            state->next_free = states.free;
            states.free = state;
        }
    }
    pthread_mutex_unlock(&states.lock);
}
