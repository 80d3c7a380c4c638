/* What the driver keeps for each thread: its stack of contexts, its capture mode, its
 * per-thread streams. A key with a destructor holds it, so that a thread's streams are
 * closed when it ends, with their pending work still to be done. */
#include "sim.h"

#include <stdlib.h>

static pthread_key_t key;
static pthread_once_t key_once = PTHREAD_ONCE_INIT;
static bool key_works;

static void
close_queues(struct sim_thread *thread)
{
    for (int i = 0; i < SIM_MAX_CONTEXTS; i++) {
        if (thread->queues[i] != NULL) {
            sim_capture_leave(thread->queues[i]);
            sim_queue_close(thread->queues[i]);
            thread->queues[i] = NULL;
        }
    }
}

static void
thread_ended(void *arg)
{
    struct sim_thread *thread = arg;
    if (!atomic_load(&sim_is_forked)) {
        sim_lock();
        close_queues(thread);
        sim_unlock();
    }
    free(thread);
}

static void
make_key(void)
{
    key_works = pthread_key_create(&key, thread_ended) == 0;
}

/* After a reset of the simulator the thread starts anew. */
static void
start_epoch(struct sim_thread *thread)
{
    close_queues(thread);
    thread->depth = 0;
    thread->capture_mode = NRM_CU_STREAM_CAPTURE_MODE_GLOBAL;
    thread->epoch = sim.epoch;
}

struct sim_thread *
sim_thread_get(void)
{
    pthread_once(&key_once, make_key);
    if (!key_works) {
        return NULL;
    }
    struct sim_thread *thread = pthread_getspecific(key);
    if (thread == NULL) {
        thread = calloc(1, sizeof *thread);
        if (thread == NULL || pthread_setspecific(key, thread) != 0) {
            free(thread);
            return NULL;
        }
        thread->serial = ++sim.next_id;
        start_epoch(thread);
    }
    if (thread->epoch != sim.epoch) {
        start_epoch(thread);
    }
    return thread;
}
