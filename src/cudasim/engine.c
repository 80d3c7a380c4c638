/* Who does the work: one thread that executes what is ready, and one for host
 * functions.
 *
 * Both are started by the first operation that needs them, never by loading the
 * library. An operation is ready when it is the oldest of its stream, the stream is not
 * held, what it waits for has come, and, between the legacy and the blocking streams,
 * nothing older is left on the other side. Of several that are ready the one submitted
 * first runs, or one at random when the configuration has a seed.
 *
 * In manual mode there is no engine thread: work runs in nrm_cudasim_step, and whoever
 * waits in a call of the driver does what it waits for himself; or besides that, chosen
 * by the seed, at the beginning of calls. Where schedules are explored nothing runs but
 * what must for an answer. */
#include "checker.h"

#include <errno.h>
#include <signal.h>
#include <time.h>

static const long POLL_NS = 50000; /* between looks at a word that a stream awaits */

static struct {
    bool engine_runs;
    bool host_thread_runs;
    uint64_t random;
    struct sim_op *host_op; /* waits for the host-function thread, or runs there */
    bool host_op_taken;
    pthread_cond_t host_work;
} engine = {.host_work = PTHREAD_COND_INITIALIZER};

/* ---- what is ready --------------------------------------------------------------- */

static bool
word_satisfies(const struct sim_op *op)
{
    uint32_t word = sim_word_read(&op->copy.src);
    switch (op->condition) {
    case NRM_CU_STREAM_WAIT_VALUE_EQ:
        return word == op->value;
    case NRM_CU_STREAM_WAIT_VALUE_AND:
        return (word & op->value) != 0;
    case NRM_CU_STREAM_WAIT_VALUE_NOR:
        return ~(word | op->value) != 0;
    default: /* GEQ, around the wrap */
        return (int32_t)(word - op->value) >= 0;
    }
}

/* Nothing older is left on the other side of the legacy barrier. */
static bool
is_in_legacy_order(const struct sim_queue *queue)
{
    uint64_t seq = queue->first->seq;
    for (struct sim_queue *other = queue->context->queues; other; other = other->next) {
        bool matters = (queue->legacy && other->blocking) ||
                       (queue->blocking && other->legacy);
        if (matters && other->first != NULL && other->first->seq < seq) {
            return false;
        }
    }
    return true;
}

static bool
is_ready(const struct sim_queue *queue)
{
    const struct sim_op *op = queue->first;
    if (op == NULL || op->running || queue->held || !queue->context->alive ||
        !is_in_legacy_order(queue)) {
        return false;
    }
    switch (op->kind) {
    case SIM_OP_WAIT_VALUE:
        return word_satisfies(op);
    case SIM_OP_WAIT_MARKER:
        return sim_marker_is_passed(op->marker);
    case SIM_OP_HOST_FUNCTION:
        return engine.host_op == NULL;
    default:
        return true;
    }
}

static uint64_t
next_random(void)
{
    engine.random ^= engine.random << 13;
    engine.random ^= engine.random >> 7;
    engine.random ^= engine.random << 17;
    return engine.random;
}

/* NULL: nothing is ready; `polls` says whether a stream awaits a word meanwhile. */
static struct sim_queue *
find_ready(bool *polls)
{
    struct sim_queue *found = NULL;
    uint64_t n_ready = 0;
    *polls = false;
    struct nrm_CUctx_st *context = NULL;
    while ((context = sim_context_next(context)) != NULL) {
        struct sim_queue *queue = context->queues;
        for (; queue != NULL; queue = queue->next) {
            if (!is_ready(queue)) {
                *polls |= queue->first != NULL &&
                          queue->first->kind == SIM_OP_WAIT_VALUE;
                continue;
            }
            n_ready++;
            bool better = sim.config.seed != 0
                              ? next_random() % n_ready == 0
                              : found == NULL || queue->first->seq < found->first->seq;
            found = better ? queue : found;
        }
    }
    return found;
}

/* ---- doing it -------------------------------------------------------------------- */

static void *host_thread_main(void *arg);
static void *engine_main(void *arg);

/* No signal of the program is ever handled in a thread of ours. */
static bool
start_thread(void *(*function)(void *))
{
    sigset_t all;
    sigset_t before;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = pthread_create(&thread, NULL, function, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (started) {
        pthread_detach(thread);
    }
    else {
        sim_fault("a thread of the simulator could not be started");
    }
    return started;
}

static void
finish_locked(struct sim_queue *queue)
{
    sim_queue_retain(queue);
    sim_queue_shift(queue);
    sim_queue_release(queue);
    pthread_cond_broadcast(&sim.progress);
    pthread_cond_signal(&sim.work); /* something behind it may be ready now */
}

static void
execute(const struct sim_op *op)
{
    if (op->kind == SIM_OP_COPY) {
        sim_copy_execute(&op->copy, op->call);
    }
    else if (op->kind == SIM_OP_FILL) {
        sim_fill_execute(&op->copy, (unsigned char)op->value, op->call);
    }
}

/* Runs the oldest operation of a queue that is ready; lets the state lock go for it. */
static void
run_first_locked(struct sim_queue *queue)
{
    struct sim_op *op = queue->first;
    if (op->kind == SIM_OP_HOST_FUNCTION) {
        op->running = true;
        engine.host_op = op;
        engine.host_op_taken = false;
        if (!engine.host_thread_runs) {
            engine.host_thread_runs = start_thread(host_thread_main);
        }
        pthread_cond_signal(&engine.host_work);
        return;
    }
    if (op->kind == SIM_OP_COPY || op->kind == SIM_OP_FILL) {
        op->running = true;
        struct nrm_CUctx_st *context = queue->context;
        context->n_executing++;
        sim_unlock();
        execute(op);
        sim_lock();
        context->n_executing--;
    }
    finish_locked(queue);
}

static void *
host_thread_main(void *arg)
{
    (void)arg;
    sim_lock();
    struct sim_thread *thread = sim_thread_get();
    if (thread != NULL) {
        thread->in_host_function = true;
    }
    for (;;) {
        while (engine.host_op == NULL || engine.host_op_taken) {
            pthread_cond_wait(&engine.host_work, &sim.lock);
        }
        struct sim_op *op = engine.host_op;
        engine.host_op_taken = true;
        struct nrm_CUctx_st *context = op->queue->context;
        context->n_executing++;
        if (thread != NULL) {
            thread->running = op;
        }
        sim_unlock();
        op->function(op->user_data);
        sim_lock();
        if (thread != NULL) {
            thread->running = NULL;
        }
        context->n_executing--;
        engine.host_op = NULL;
        finish_locked(op->queue);
    }
    return NULL;
}

/* Until the next signal, or a moment when a stream polls a word. */
static void
wait_locked(pthread_cond_t *condition, bool polls)
{
    if (!polls) {
        pthread_cond_wait(condition, &sim.lock);
        return;
    }
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += POLL_NS;
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    pthread_cond_timedwait(condition, &sim.lock, &until);
}

static void *
engine_main(void *arg)
{
    (void)arg;
    sim_lock();
    for (;;) {
        bool polls;
        struct sim_queue *queue = sim.config.manual ? NULL : find_ready(&polls);
        if (queue != NULL) {
            run_first_locked(queue);
            sim_objects_run_destructors_locked();
        }
        else {
            wait_locked(&sim.work, !sim.config.manual && polls);
        }
    }
    return NULL;
}

void
sim_engine_wake(void)
{
    if (engine.random == 0) {
        sim_engine_reset(false);
    }
    if (!engine.engine_runs && !sim.config.manual) {
        engine.engine_runs = start_thread(engine_main);
    }
    pthread_cond_signal(&sim.work);
}

/* Also where a forked child, which has none of the threads, starts from. */
void
sim_engine_reset(bool forked)
{
    if (forked) {
        engine.engine_runs = false;
        engine.host_thread_runs = false;
        engine.host_op = NULL;
    }
    engine.random = sim.config.seed != 0 ? sim.config.seed : 1;
}

void
sim_engine_stop_work(struct nrm_CUctx_st *context)
{
    while (context->n_executing > 0) {
        pthread_cond_wait(&sim.progress, &sim.lock);
    }
    if (engine.host_op != NULL && engine.host_op->queue->context == context) {
        engine.host_op = NULL; /* handed over and not begun: it will be dropped */
    }
}

bool
sim_queue_step(struct sim_queue *queue)
{
    bool ready = is_ready(queue);
    if (ready) {
        run_first_locked(queue);
    }
    return ready;
}

void
sim_engine_run_some_locked(void)
{
    bool polls;
    struct sim_queue *queue;
    while (next_random() % 2 == 0 && (queue = find_ready(&polls)) != NULL) {
        run_first_locked(queue);
    }
}

/* ---- as much as is needed -------------------------------------------------------- */

static bool advance_locked(struct sim_queue *queue, uint64_t count);

/* What the oldest operation of a queue waits for; false: that cannot be done now. */
static bool
make_ready_locked(struct sim_queue *queue)
{
    const struct sim_op *op = queue->first;
    for (struct sim_queue *other = queue->context->queues; other; other = other->next) {
        bool matters = (queue->legacy && other->blocking) ||
                       (queue->blocking && other->legacy);
        while (matters && other->first != NULL && other->first->seq < op->seq) {
            if (!advance_locked(other, other->n_done + 1)) {
                return false;
            }
        }
    }
    for (size_t i = 0; op->marker != NULL && i < op->marker->n_points; i++) {
        if (!advance_locked(op->marker->points[i].queue, op->marker->points[i].count)) {
            return false;
        }
    }
    while (op->kind == SIM_OP_HOST_FUNCTION && engine.host_op != NULL) {
        pthread_cond_wait(&sim.progress, &sim.lock);
    }
    return is_ready(queue);
}

/* Until the queue has done so many operations. */
static bool
advance_locked(struct sim_queue *queue, uint64_t count)
{
    bool can = true;
    sim_queue_retain(queue);
    while (queue->n_done < count && (can = make_ready_locked(queue))) {
        uint64_t before = queue->n_done;
        run_first_locked(queue);
        while (queue->n_done == before) { /* a host function, in its thread */
            pthread_cond_wait(&sim.progress, &sim.lock);
        }
    }
    sim_queue_release(queue);
    return can;
}

static bool
pass_locked(const struct sim_marker *marker)
{
    for (size_t i = 0; i < marker->n_points; i++) {
        if (!advance_locked(marker->points[i].queue, marker->points[i].count)) {
            return false;
        }
    }
    return true;
}

/* ---- waiting and asking ---------------------------------------------------------- */

bool
sim_marker_ask(struct sim_marker *marker, enum sim_call_id call)
{
    if (marker == NULL) {
        return true;
    }
    sim_marker_retain(marker); /* an event may be recorded again meanwhile */
    bool passed = sim_marker_is_passed(marker);
    if (!passed && sim_is_explored() && sim_choose(NRM_CUDASIM_ASKS, call) != 0) {
        passed = pass_locked(marker);
    }
    if (passed) {
        sim_checker_host_follows(marker->clock);
    }
    sim_marker_release(marker);
    return passed;
}

nrm_CUresult
sim_marker_wait(struct sim_marker *marker)
{
    if (marker == NULL) {
        return NRM_CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (sim_is_explored()) {
        (void)pass_locked(marker);
    }
    while (!sim_marker_is_passed(marker)) {
        bool polls;
        struct sim_queue *queue = sim.config.manual ? find_ready(&polls) : NULL;
        if (queue != NULL) {
            run_first_locked(queue);
        }
        else {
            wait_locked(&sim.progress, sim.config.manual && polls);
        }
    }
    sim_checker_host_follows(marker->clock);
    sim_marker_release(marker);
    return NRM_CUDA_SUCCESS;
}
