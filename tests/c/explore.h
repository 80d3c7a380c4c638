/* Every schedule of a small program, on the simulated driver that checks the order of
   things.

       static void first(void)
       {
           explore_step();             // the core is called: others may go first
           ptr = allocate(pool, N);
           explore_submit(stream);     // of this stream alone
           cuda.cuMemsetD8Async(…, stream);
       }
       static const struct explore_program program = {
           "name", start, {first, second}, finish, .n_devices = 1,
       };
       explore(&program, NRM_CUDASIM_CHECK_ON, &result);

   What can go one way or another is: which thread goes on where one calls the driver to
   submit, record, ask, wait or free, and at each step of the program; and what the
   driver answers where both can be, that work is done or that it is not. A program is
   run anew for each schedule, and threads go on one at a time. That a stream goes on
   commutes with all that does not ask for it, so it happens only where an answer needs
   it. Submissions to two streams that nothing orders commute, too: sleep sets leave out
   the second order. What is left over are states: points at which something was
   decided, and ends.

   What threads do between two such points is not interrupted; the tests with free
   threads, under ThreadSanitizer, see to that. */
#ifndef NRM_TESTS_EXPLORE_H
#define NRM_TESTS_EXPLORE_H

#include "core/uses.h"
#include "cuda/context.h"
#include "streams.h"

enum {
    EXPLORE_THREADS = 3,
    EXPLORE_DEPTH = 400,
    EXPLORE_SCHEDULES = 200000, /* of one program: more is a mistake */
};

/* What the next step of a thread touches: a stream, or ... */
#define EXPLORE_NOTHING ((uintptr_t)0)
#define EXPLORE_CORE ((uintptr_t)1) /* ... what all steps but those of nothing touch */

struct explore_program {
    const char *name;
    void (*start)(void);
    void (*threads[EXPLORE_THREADS])(void);
    void (*finish)(void);
    int n_devices; /* 0: one */
};

struct explore_result {
    uint64_t n_schedules, n_states, n_faulty;
    bool is_complete;
    char fault[NRM_CUDASIM_RACE_NBYTES]; /* of the first faulty schedule */
    char schedule[2048];
};

/* ---- the tree of schedules ---- */

struct explore__node {
    bool is_answer;
    unsigned enabled, done, sleep; /* sets of threads, or of answers */
    unsigned chosen;
    const char *labels[EXPLORE_THREADS];
};

static struct {
    pthread_mutex_t lock;
    pthread_cond_t turn;
    int n_threads, running; /* the thread that goes on; n_threads: none is left */
    unsigned alive;         /* set of threads that have not ended */
    const char *labels[EXPLORE_THREADS]; /* what each does next */
    uintptr_t objects[EXPLORE_THREADS];
    struct explore__node nodes[EXPLORE_DEPTH];
    unsigned n_nodes, depth;
    unsigned
        asleep;  /* set of threads whose next step was tried before, in this place */
    bool is_cut; /* this schedule is another one over again */
    bool is_unrepeated; /* the program did not do the same again */
    uint64_t n_states;
} explore__tree = {.lock = PTHREAD_MUTEX_INITIALIZER, .turn = PTHREAD_COND_INITIALIZER};

static bool explore_leaves_out = true; /* what commutes */
static _Thread_local int explore__self = -1;
static _Thread_local uintptr_t explore__object;

static inline bool
explore__commute(uintptr_t a, uintptr_t b)
{
    return a == EXPLORE_NOTHING || b == EXPLORE_NOTHING ||
           (a != b && a != EXPLORE_CORE && b != EXPLORE_CORE);
}

/* The thread goes on. Of those that were tried in its place before, or that slept
   already, the ones sleep whose next step commutes with its. */
static inline void
explore__fall_asleep(unsigned set, unsigned chosen)
{
    unsigned still = 0;
    for (unsigned i = 0; i < EXPLORE_THREADS && explore_leaves_out; i++) {
        bool commutes =
            explore__commute(explore__tree.objects[i], explore__tree.objects[chosen]);
        still |= i != chosen && (set & 1u << i) != 0 && commutes ? 1u << i : 0;
    }
    explore__tree.asleep = still;
}

static inline unsigned
explore__lowest(unsigned set)
{
    return (unsigned)__builtin_ctz(set);
}

/* One of the set that is as yet undecided; the others would be another schedule
   again. */
static inline unsigned
explore__decide(bool is_answer, unsigned enabled)
{
    struct explore__node *node = &explore__tree.nodes[explore__tree.depth];
    unsigned sleep = is_answer ? 0 : explore__tree.asleep;
    if ((enabled & ~sleep) == 0 || explore__tree.depth == EXPLORE_DEPTH) {
        explore__tree.is_cut = true;
        explore__tree.is_unrepeated = explore__tree.depth == EXPLORE_DEPTH;
        return explore__lowest(enabled);
    }
    *node = (struct explore__node){.is_answer = is_answer,
                                   .enabled = enabled,
                                   .sleep = sleep,
                                   .chosen = explore__lowest(enabled & ~sleep)};
    memcpy(node->labels, explore__tree.labels, sizeof node->labels);
    explore__tree.n_nodes = ++explore__tree.depth;
    explore__tree.n_states++;
    return node->chosen;
}

/* One of several: as before, or as nobody has chosen yet. */
static inline unsigned
explore__choose(bool is_answer, unsigned enabled)
{
    struct explore__node *node = &explore__tree.nodes[explore__tree.depth];
    if (explore__tree.is_cut || explore__tree.is_unrepeated) {
        return explore__lowest(enabled);
    }
    if (explore__tree.depth == explore__tree.n_nodes) {
        return explore__decide(is_answer, enabled);
    }
    if (node->is_answer != is_answer || node->enabled != enabled) {
        explore__tree.is_unrepeated = true;
        return explore__lowest(enabled);
    }
    explore__tree.depth++;
    return node->chosen;
}

static inline unsigned
explore__choose_thread(unsigned alive)
{
    unsigned tried = explore__tree.asleep, chosen = explore__lowest(alive);
    if ((alive & (alive - 1)) == 0) {
        explore__tree.is_cut = explore__tree.is_cut || (tried & alive) != 0;
    }
    else {
        const struct explore__node *node = &explore__tree.nodes[explore__tree.depth];
        chosen = explore__choose(false, alive);
        tried |= explore__tree.is_cut ? 0 : node->done;
    }
    explore__fall_asleep(tried, chosen);
    return chosen;
}

/* To the next schedule; false: this was the last. */
static inline bool
explore__advance(void)
{
    while (explore__tree.n_nodes > 0) {
        struct explore__node *node = &explore__tree.nodes[explore__tree.n_nodes - 1];
        node->done |= 1u << node->chosen;
        unsigned rest = node->enabled & ~node->done & ~node->sleep;
        if (rest != 0) {
            node->chosen = explore__lowest(rest);
            return true;
        }
        explore__tree.n_nodes--;
    }
    return false;
}

/* ---- threads that go on one at a time ---- */

static inline void
explore__pass_on_locked(void)
{
    explore__tree.running = explore__tree.alive == 0
                                ? explore__tree.n_threads
                                : (int)explore__choose_thread(explore__tree.alive);
    pthread_cond_broadcast(&explore__tree.turn);
}

static inline void
explore__await_locked(int who)
{
    while (explore__tree.running != who) {
        pthread_cond_wait(&explore__tree.turn, &explore__tree.lock);
    }
}

/* What this thread does next, it does when it is its turn. */
static inline void
explore__park(const char *label, uintptr_t object)
{
    pthread_mutex_lock(&explore__tree.lock);
    explore__tree.labels[explore__self] = label;
    explore__tree.objects[explore__self] = object;
    explore__pass_on_locked();
    explore__await_locked(explore__self);
    pthread_mutex_unlock(&explore__tree.lock);
}

/* A step that calls the core. */
static inline void
explore_step(void)
{
    explore__object = 0;
    if (explore__self >= 0) { /* else a program begins or ends */
        explore__park("step", EXPLORE_CORE);
    }
}

/* The next call is the program's own, about this stream, which the legacy stream does
   not order. */
static inline void
explore_submit(nrm_CUstream stream)
{
    explore__object = (uintptr_t)stream;
}

/* What has to do with the order of things. */
static inline bool
explore__matters(const char *call)
{
    static const char *const calls[] = {
        "cuCtxRecordEvent",   "cuEventRecord",       "cuEventQuery",
        "cuStreamQuery",      "cuStreamWaitEvent",   "cuMemFree",
        "cuMemFreeHost",      "cuMemHostUnregister", "cuStreamSynchronize",
        "cuEventSynchronize", "cuCtxSynchronize",    "cuStreamDestroy",
        "cuGraphLaunch",      "cuStreamEndCapture",  "cuStreamBeginCapture",
    };
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        if (strcmp(call, calls[i]) == 0) {
            return true;
        }
    }
    return false;
}

static inline int
explore__on_moment(void *arg, int moment, const char *call)
{
    (void)arg;
    if (explore__self < 0) {
        return 0;
    }
    if (moment == NRM_CUDASIM_ASKS) {
        /* The others are parked, so nobody else is at the tree. */
        return (int)explore__choose(true, 3);
    }
    if (explore__object != 0) {
        if (moment == NRM_CUDASIM_CALL_BEGINS) {
            explore__park(call, explore__object);
        }
        else {
            explore__object = 0;
        }
    }
    else if (explore__matters(call)) {
        explore__park(call, EXPLORE_CORE);
    }
    return 0;
}

struct explore__start {
    int index;
    void (*run)(void);
};

static inline void *
explore__thread(void *arg)
{
    const struct explore__start *start = arg;
    explore__self = start->index;
    pthread_mutex_lock(&explore__tree.lock);
    explore__await_locked(explore__self);
    pthread_mutex_unlock(&explore__tree.lock);
    make_current(0);
    start->run();
    pthread_mutex_lock(&explore__tree.lock);
    explore__tree.alive &= ~(1u << explore__self);
    explore__pass_on_locked();
    pthread_mutex_unlock(&explore__tree.lock);
    return NULL;
}

/* ---- one schedule ---- */

/* The same machine again; the core's table of the driver stays. */
static inline void
explore__reset(const struct nrm_cudasim_config *config)
{
    CHECK_EQ(sim.reset(config), 0);
    CHECK_EQ(cuda.cuInit(0), NRM_CUDA_SUCCESS);
    nrm__cuda_contexts_forget();
    nrm__epoch_forget_contexts();
    nrm__order_forget_contexts();
}

static inline void
explore__run_threads(const struct explore_program *program)
{
    struct explore__start starts[EXPLORE_THREADS];
    pthread_t threads[EXPLORE_THREADS];
    int n = 0;
    while (n < EXPLORE_THREADS && program->threads[n] != NULL) {
        starts[n] = (struct explore__start){n, program->threads[n]};
        explore__tree.labels[n] = "begins";
        explore__tree.objects[n] = EXPLORE_NOTHING;
        n++;
    }
    explore__tree.n_threads = n;
    explore__tree.alive = (1u << n) - 1;
    explore__tree.running = -1;
    sim.set_chooser(explore__on_moment, NULL);
    for (int i = 0; i < n; i++) {
        pthread_create(&threads[i], NULL, explore__thread, &starts[i]);
    }
    pthread_mutex_lock(&explore__tree.lock);
    explore__pass_on_locked();
    explore__await_locked(n);
    pthread_mutex_unlock(&explore__tree.lock);
    for (int i = 0; i < n; i++) {
        pthread_join(threads[i], NULL);
    }
    sim.set_chooser(NULL, NULL);
}

/* Where each thread went on, and what was answered. */
static inline void
explore__tell(char *out, size_t size)
{
    size_t length = 0;
    out[0] = '\0';
    for (unsigned i = 0; i < explore__tree.n_nodes && length < size; i++) {
        const struct explore__node *node = &explore__tree.nodes[i];
        length += (size_t)(node->is_answer
                               ? snprintf(out + length, size - length, "%s; ",
                                          node->chosen != 0 ? "done" : "not done")
                               : snprintf(out + length, size - length, "T%u %s; ",
                                          node->chosen, node->labels[node->chosen]));
    }
}

static inline void
explore__run(const struct explore_program *program, struct explore_result *result)
{
    explore__tree.depth = 0;
    explore__tree.asleep = 0;
    explore__tree.is_cut = false;
    make_current(0);
    program->start();
    explore__run_threads(program);
    program->finish();
    uint64_t n_races = sim.race_count();
    if (explore__tree.is_cut) {
        return;
    }
    result->n_schedules++;
    if (n_races == 0 && sim.fault_count() == 0) {
        return;
    }
    if (result->n_faulty++ == 0) {
        if (n_races != 0) {
            sim.race_text(0, result->fault, sizeof result->fault);
        }
        else {
            sim.fault_text(0, result->fault, sizeof result->fault);
        }
        explore__tell(result->schedule, sizeof result->schedule);
    }
}

/* All schedules, or those up to the first faulty one. */
static inline void
explore(const struct explore_program *program, int check, bool stops,
        struct explore_result *result)
{
    struct nrm_cudasim_config config = simulator_config();
    config.check = check;
    config.manual = NRM_CUDASIM_IN_WAITS;
    config.devices = program->n_devices != 0 ? program->n_devices : 1;
    *result = (struct explore_result){0};
    simulator_start(&config);
    CHECK_OK(nrm__cuda_init(NULL));
    explore__tree.n_nodes = 0;
    explore__tree.n_states = 0;
    explore__tree.is_unrepeated = false;
    bool more = true;
    while (more && result->n_schedules < EXPLORE_SCHEDULES) {
        explore__reset(&config);
        explore__run(program, result);
        more = explore__advance() && !explore__tree.is_unrepeated &&
               !(stops && result->n_faulty != 0);
    }
    CHECK(!explore__tree.is_unrepeated);
    result->is_complete = !more && !explore__tree.is_unrepeated;
    result->n_states = explore__tree.n_states + result->n_schedules;
}

#endif
