/*
 * The workloads of several threads. Each thread is bound to a core of its own, as far
 * as there are any, and all start behind a barrier; a sample is the time from there to
 * the end of the last one over what all did together.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#include "bench.h"
#include "driver.h"

#define RING 1024

/* One slot is empty when NULL: the producer fills it, the consumer takes it out. */
struct ring {
    _Atomic(void *) slots[RING];
};

struct worker {
    struct allocator *a;
    pthread_barrier_t *barrier;
    struct ring *ring;
    uint64_t end_ns;
    size_t number, n_operations;
    pthread_t thread;
};

/* What the process may use: read before any thread is bound, as threads inherit. */
static cpu_set_t allowed;

static void
look_at_cores(void)
{
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) {
        fail("the cores that may be used cannot be read");
    }
}

static void
bind_to_core(size_t number)
{
    cpu_set_t one;
    size_t place = number % (size_t)CPU_COUNT(&allowed);
    for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &allowed) && place-- == 0) {
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            if (pthread_setaffinity_np(pthread_self(), sizeof one, &one) != 0) {
                fail("a thread cannot be bound to core %zu", cpu);
            }
            return;
        }
    }
}

/* A core, and the context: a new thread has none. */
static void
enter(const struct worker *worker)
{
    bind_to_core(worker->number);
    driver_enter();
}

static size_t
stream_of(const struct allocator *a, size_t number)
{
    return a->n_streams != 0 ? number % a->n_streams : 0;
}

/* Runs the workers and returns the nanoseconds from the barrier to the last end. */
static uint64_t
run_workers(struct worker *workers, size_t n, struct allocator *a,
            void *(*function)(void *))
{
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, NULL, (unsigned)n + 1);
    for (size_t i = 0; i < n; i++) {
        workers[i].a = a;
        workers[i].number = i;
        workers[i].barrier = &barrier;
        if (pthread_create(&workers[i].thread, NULL, function, &workers[i]) != 0) {
            fail("no thread could be started");
        }
    }
    pthread_barrier_wait(&barrier); /* everybody is warm */
    uint64_t start = now_ns(), end = start;
    pthread_barrier_wait(&barrier); /* go */
    for (size_t i = 0; i < n; i++) {
        pthread_join(workers[i].thread, NULL);
        end = workers[i].end_ns > end ? workers[i].end_ns : end;
    }
    pthread_barrier_destroy(&barrier);
    return end - start;
}

/* ---- own blocks ---- */

#define SLOTS 64

static void
replace(struct worker *worker, struct block *blocks, size_t n_slots, uint64_t *random,
        size_t n_times)
{
    struct allocator *a = worker->a;
    size_t stream = stream_of(a, worker->number), fixed = parameter("size", 0);
    size_t max = parameter("max", 65536);
    for (size_t i = 0; i < n_times; i++) {
        struct block *block = &blocks[random_next(random) % n_slots];
        if (block->ptr != NULL) {
            a->deallocate(a, block->ptr, block->nbytes, stream);
        }
        block->nbytes = fixed != 0 ? fixed : random_log(random, 16, max);
        block->ptr = allocate(a, block->nbytes, stream);
        touch(a, block->ptr);
    }
}

static void *
own_blocks(void *argument)
{
    struct worker *worker = argument;
    struct block blocks[SLOTS] = {0};
    size_t n_slots = parameter("live", SLOTS);
    uint64_t random = (worker->number + 1) * 0x9E3779B97F4A7C15u;
    enter(worker);
    replace(worker, blocks, n_slots, &random, 20 * SLOTS);
    pthread_barrier_wait(worker->barrier);
    pthread_barrier_wait(worker->barrier);
    replace(worker, blocks, n_slots, &random, worker->n_operations);
    worker->end_ns = now_ns();
    for (size_t i = 0; i < n_slots; i++) {
        if (blocks[i].ptr != NULL) {
            worker->a->deallocate(worker->a, blocks[i].ptr, blocks[i].nbytes,
                                  stream_of(worker->a, worker->number));
        }
    }
    return NULL;
}

/* Nanoseconds a pair, of all threads together: each replaces blocks of its own. Twice
   the threads would halve it. */
void
run_threads(struct allocator *a)
{
    size_t n = parameter("n", 1), n_operations = parameter("operations", 100000);
    size_t n_samples = parameter("samples", 5);
    if (parameter("live", SLOTS) > SLOTS) {
        fail("at most %d live blocks a thread", SLOTS);
    }
    look_at_cores();
    struct worker *workers = table(n, sizeof *workers);
    for (size_t i = 0; i < n_samples; i++) {
        for (size_t j = 0; j < n; j++) {
            workers[j] = (struct worker){.n_operations = n_operations};
        }
        uint64_t ns = run_workers(workers, n, a, own_blocks);
        sample((double)ns / (double)(n * n_operations));
    }
}

/* ---- handed to another thread ---- */

static void
produce(struct worker *worker, size_t nbytes)
{
    struct allocator *a = worker->a;
    for (size_t i = 0; i < worker->n_operations; i++) {
        _Atomic(void *) *slot = &worker->ring->slots[i % RING];
        void *ptr = allocate(a, nbytes, stream_of(a, worker->number));
        touch(a, ptr);
        while (atomic_load_explicit(slot, memory_order_acquire) != NULL) {
            sched_yield();
        }
        atomic_store_explicit(slot, ptr, memory_order_release);
    }
}

static void
consume(struct worker *worker, size_t nbytes)
{
    struct allocator *a = worker->a;
    for (size_t i = 0; i < worker->n_operations; i++) {
        _Atomic(void *) *slot = &worker->ring->slots[i % RING];
        void *ptr;
        while ((ptr = atomic_load_explicit(slot, memory_order_acquire)) == NULL) {
            sched_yield();
        }
        atomic_store_explicit(slot, NULL, memory_order_release);
        a->deallocate(a, ptr, nbytes, stream_of(a, worker->number));
    }
}

/* Threads 0, 2, 4, ... allocate; each hands its blocks to the next one, which frees. */
static void *
hand_over(void *argument)
{
    struct worker *worker = argument;
    size_t nbytes = parameter("size", 1024);
    enter(worker);
    pthread_barrier_wait(worker->barrier);
    pthread_barrier_wait(worker->barrier);
    if (worker->number % 2 == 0) {
        produce(worker, nbytes);
    }
    else {
        consume(worker, nbytes);
    }
    worker->end_ns = now_ns();
    return NULL;
}

/* Nanoseconds a block that changes hands, of all threads together. */
void
run_handoff(struct allocator *a)
{
    size_t n = parameter("n", 2), n_operations = parameter("operations", 100000);
    size_t n_samples = parameter("samples", 5);
    if (n % 2 != 0) {
        fail("handoff needs an even number of threads, not %zu", n);
    }
    look_at_cores();
    struct worker *workers = table(n, sizeof *workers);
    struct ring *rings = table(n / 2, sizeof *rings);
    for (size_t i = 0; i < n_samples + 1; i++) {
        for (size_t j = 0; j < n; j++) {
            workers[j] =
                (struct worker){.n_operations = n_operations, .ring = &rings[j / 2]};
        }
        uint64_t ns = run_workers(workers, n, a, hand_over);
        if (i > 0) {
            sample((double)ns / (double)(n / 2 * n_operations));
        }
    }
}

/* ---- a pair while another thread makes the pool grow ---- */

struct grower {
    struct allocator *a;
    atomic_bool is_growing, is_done;
    atomic_size_t n_samples;
    size_t n_rounds, step, n_steps;
    uint64_t grown_ns;
};

/* Growing may be so quick that the other thread hardly sees it: then more often. */
#define ENOUGH_SAMPLES 1000
#define MAX_ROUNDS 10000

static void *
grow(void *argument)
{
    struct grower *grower = argument;
    struct block *blocks = table(grower->n_steps, sizeof *blocks);
    bind_to_core(1);
    driver_enter();
    size_t n_rounds = 0;
    while (
        n_rounds < grower->n_rounds ||
        (n_rounds < MAX_ROUNDS && atomic_load(&grower->n_samples) < ENOUGH_SAMPLES)) {
        uint64_t start = now_ns();
        n_rounds++;
        atomic_store(&grower->is_growing, true);
        for (size_t j = 0; j < grower->n_steps; j++) {
            blocks[j] =
                (struct block){allocate(grower->a, grower->step, 0), grower->step};
            touch(grower->a, blocks[j].ptr);
        }
        grower->grown_ns += now_ns() - start;
        atomic_store(&grower->is_growing, false);
        for (size_t j = 0; j < grower->n_steps; j++) {
            grower->a->deallocate(grower->a, blocks[j].ptr, grower->step, 0);
        }
        allocator_trim(grower->a);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    grower->n_rounds = n_rounds;
    atomic_store(&grower->is_done, true);
    return NULL;
}

/* Nanoseconds of single pairs during which the other thread was growing the pool to
   `steps` blocks of `step` bytes. The clock, about 25 ns, is in them. */
void
run_grow(struct allocator *a)
{
    size_t nbytes = parameter("size", 65536);
    struct grower grower = {.a = a,
                            .n_rounds = parameter("rounds", 10),
                            .step = parameter("step", 64 << 20),
                            .n_steps = parameter("steps", 16)};
    pthread_t thread;
    look_at_cores();
    bind_to_core(0);
    for (int i = 0; i < 1000; i++) {
        a->deallocate(a, allocate(a, nbytes, 0), nbytes, 0);
    }
    if (pthread_create(&thread, NULL, grow, &grower) != 0) {
        fail("no thread could be started");
    }
    while (!atomic_load(&grower.is_done)) {
        bool counts = atomic_load(&grower.is_growing);
        uint64_t start = now_ns();
        void *ptr = allocate(a, nbytes, 0);
        touch(a, ptr);
        a->deallocate(a, ptr, nbytes, 0);
        if (counts || atomic_load(&grower.is_growing)) {
            sample((double)(now_ns() - start));
            atomic_fetch_add(&grower.n_samples, 1);
        }
    }
    pthread_join(thread, NULL);
    extra("grow_ms", (double)grower.grown_ns / 1e6 / (double)grower.n_rounds);
}
