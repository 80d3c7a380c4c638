/* Scopes of several threads: who frees a block does not matter, who allocated it
   does. */
#include "simulator.h"

#include "scopes.h"
#include "workers.h"

struct job {
    nrm_resource *mr;
    void *ptrs[3];
    uint64_t scope;
    nrm_counts counts;
};

static void
job_push(void *argument)
{
    struct job *job = argument;
    job->scope = push(NULL);
}

static void
job_pop(void *argument)
{
    struct job *job = argument;
    job->counts = pop(job->scope);
}

static void
job_allocate(void *argument)
{
    struct job *job = argument;
    allocate_three(job->mr, job->ptrs);
}

static void
job_deallocate(void *argument)
{
    struct job *job = argument;
    deallocate_three(job->mr, job->ptrs);
}

static void
job_resize(void *argument)
{
    struct job *job = argument;
    void **ptrs = job->ptrs;
    CHECK_OK(nrm_resource_reallocate(job->mr, ptrs[0], MEDIUM, 0, NULL, &ptrs[0]));
    CHECK_OK(nrm_resource_reallocate(job->mr, ptrs[1], MEDIUM - 1, 0, NULL, &ptrs[1]));
}

TEST_EACH(what_another_thread_frees_counts_where_it_was_allocated, resources)
{
    struct worker worker;
    struct job job = {.mr = row->make()};
    worker_start(&worker);
    uint64_t outer = push(NULL);
    allocate_three(job.mr, job.ptrs);
    uint64_t inner = push(NULL);
    worker_run(&worker, job_deallocate, &job);
    CHECK_COUNTS(pop(inner), 0, 0, 0, 0, 0, 0);
    CHECK_COUNTS(counts_of(outer), 0, 0, ALL, 3, ALL, 3);
    allocate_three(job.mr, job.ptrs);
    CHECK_COUNTS(counts_of(outer), ALL, 3, ALL, 3, 2 * ALL, 6);
    worker_run(&worker, job_push, &job); /* a scope of its own sees nothing of it */
    worker_run(&worker, job_deallocate, &job);
    worker_run(&worker, job_pop, &job);
    CHECK_COUNTS(job.counts, 0, 0, 0, 0, 0, 0);
    CHECK_COUNTS(pop(outer), 0, 0, ALL, 3, 2 * ALL, 6);
    worker_end(&worker);
    CHECK_EQ(live_nbytes(job.mr), 0);
    check_pool(job.mr);
    nrm_resource_release(job.mr);
}

TEST(what_another_thread_resizes_does_too)
{
    struct worker worker;
    struct job job = {.mr = host_pool()};
    worker_start(&worker);
    uint64_t scope = push(NULL);
    allocate_three(job.mr, job.ptrs);
    worker_run(&worker, job_resize, &job);
    /* The first one moved, and is nobody's since. */
    CHECK_EQ(counts_of(scope).current_bytes, MEDIUM - 1 + LARGE);
    CHECK_EQ(counts_of(scope).current_count, 2);
    deallocate(job.mr, job.ptrs[1]);
    deallocate(job.mr, job.ptrs[2]);
    CHECK_EQ(pop(scope).current_bytes, 0);
    deallocate(job.mr, job.ptrs[0]);
    worker_end(&worker);
    check_pool(job.mr);
    nrm_resource_release(job.mr);
}

TEST(blocks_of_a_scope_that_ended_count_in_those_around_it)
{
    struct worker worker;
    struct job job = {.mr = host_pool()};
    worker_start(&worker);
    uint64_t outer = push(NULL);
    uint64_t ended = push(NULL);
    allocate_three(job.mr, job.ptrs);
    CHECK_EQ(pop(ended).current_bytes, ALL);
    uint64_t later = push(NULL);
    worker_run(&worker, job_push, &job);
    worker_run(&worker, job_deallocate, &job);
    worker_run(&worker, job_pop, &job);
    CHECK_COUNTS(job.counts, 0, 0, 0, 0, 0, 0);
    CHECK_COUNTS(pop(later), 0, 0, 0, 0, 0, 0);
    CHECK_COUNTS(pop(outer), 0, 0, ALL, 3, ALL, 3);
    worker_end(&worker);
    nrm_resource_release(job.mr);
}

TEST(what_another_thread_allocates_is_not_this_ones)
{
    struct worker worker;
    nrm_counts counts;
    struct job job = {.mr = host_pool()};
    worker_start(&worker);
    uint64_t scope = push(NULL);
    worker_run(&worker, job_allocate, &job);
    CHECK_COUNTS(counts_of(scope), 0, 0, 0, 0, 0, 0);
    worker_run(&worker, job_push, &job);
    CHECK_STATUS(nrm__scope_pop(job.scope, &counts), NRM_NOT_FOUND);
    CHECK_STR_HAS(nrm_last_error()->message, "another thread");
    CHECK_COUNTS(pop(scope), 0, 0, 0, 0, 0, 0);
    worker_run(&worker, job_deallocate, &job);
    worker_end(&worker); /* with its scope open */
    nrm_resource_release(job.mr);
}

/* A later thread has the number of one that ended, and none of its blocks. */
TEST(a_thread_ends_with_its_scopes)
{
    struct worker worker;
    struct job job = {.mr = host_pool()};
    worker_start(&worker);
    worker_run(&worker, job_push, &job);
    worker_run(&worker, job_allocate, &job);
    worker_end(&worker);
    struct job later = {.mr = job.mr};
    worker_start(&worker);
    worker_run(&worker, job_push, &later);
    worker_run(&worker, job_deallocate, &job);
    worker_run(&worker, job_pop, &later);
    CHECK_COUNTS(later.counts, 0, 0, 0, 0, 0, 0);
    worker_end(&worker);
    CHECK_EQ(live_nbytes(job.mr), 0);
    check_pool(job.mr);
    nrm_resource_release(job.mr);
}

/* Each hands blocks to the next one, which frees them, while all push and pop. */
enum { N_THREADS = 4, N_BLOCKS = 64, N_ROUNDS = 20000 };

static struct ring {
    nrm_resource *mr;
    _Atomic(void *) places[N_THREADS][N_BLOCKS];
    atomic_uint n_started;
} ring;

static void *
swap(unsigned thread, unsigned place, void *ptr)
{
    return atomic_exchange(&ring.places[thread % N_THREADS][place], ptr);
}

static void
free_if(void *ptr)
{
    if (ptr != NULL) {
        deallocate(ring.mr, ptr);
    }
}

static void *
hand_on(void *argument)
{
    (void)argument;
    unsigned self = atomic_fetch_add(&ring.n_started, 1);
    uint64_t random = 88172645463325252u + self, whole = push(NULL), inner = 0;
    int64_t total = 0;
    for (int i = 0; i < N_ROUNDS / SLOW; i++) {
        unsigned place = next_random(&random) % N_BLOCKS;
        size_t nbytes = 1 + next_random(&random) % (i % 16 == 0 ? 100000 : 900);
        free_if(swap(self, place, allocate(ring.mr, nbytes)));
        free_if(swap(self + 1, place, NULL));
        total += (int64_t)nbytes;
        if (i % 7 == 0 && inner == 0) {
            inner = push(NULL);
        }
        else if (i % 5 == 0 && inner != 0) {
            CHECK_GE(pop(inner).total_count, 1);
            inner = 0;
        }
    }
    CHECK_EQ(counts_of(whole).total_bytes, total);
    CHECK_EQ(counts_of(whole).total_count, N_ROUNDS / SLOW);
    CHECK_GE(counts_of(whole).peak_bytes, counts_of(whole).current_bytes);
    return NULL;
}

TEST(threads_that_free_each_others_blocks_lose_none)
{
    pthread_t threads[N_THREADS];
    ring.mr = host_pool();
    for (int i = 0; i < N_THREADS; i++) {
        CHECK_EQ(pthread_create(&threads[i], NULL, hand_on, NULL), 0);
    }
    for (int i = 0; i < N_THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    for (unsigned i = 0; i < N_THREADS * N_BLOCKS; i++) {
        free_if(swap(i / N_BLOCKS, i % N_BLOCKS, NULL));
    }
    CHECK_EQ(live_nbytes(ring.mr), 0);
    check_pool(ring.mr);
    nrm_resource_release(ring.mr);
}

/* The same with one that only frees: in the end the scope has nothing left. */
static struct pipe {
    nrm_resource *mr;
    _Atomic(void *) next;
} pipe_;

static void *
free_all(void *argument)
{
    (void)argument;
    for (int i = 0; i < N_ROUNDS / SLOW;) {
        void *ptr = atomic_exchange(&pipe_.next, NULL);
        if (ptr != NULL) {
            deallocate(pipe_.mr, ptr);
            i++;
        }
    }
    return NULL;
}

TEST(a_scope_whose_blocks_another_thread_frees_ends_with_nothing)
{
    pthread_t thread;
    uint64_t random = 7;
    pipe_.mr = host_pool();
    CHECK_EQ(pthread_create(&thread, NULL, free_all, NULL), 0);
    uint64_t scope = push(NULL);
    for (int i = 0; i < N_ROUNDS / SLOW; i++) {
        void *none = NULL, *ptr = allocate(pipe_.mr, 1 + next_random(&random) % 20000);
        while (!atomic_compare_exchange_weak(&pipe_.next, &none, ptr)) {
            none = NULL;
        }
    }
    pthread_join(thread, NULL);
    nrm_counts counts = pop(scope);
    CHECK_EQ(counts.current_bytes, 0);
    CHECK_EQ(counts.current_count, 0);
    CHECK_EQ(counts.total_count, N_ROUNDS / SLOW);
    check_pool(pipe_.mr);
    nrm_resource_release(pipe_.mr);
}

/* ---- forks ---- */

static struct job forked;

static void
go_on(void)
{
    allocate_three(forked.mr, forked.ptrs);
    CHECK_COUNTS(counts_of(forked.scope), 2 * ALL, 6, 2 * ALL, 6, 2 * ALL, 6);
    deallocate_three(forked.mr, forked.ptrs);
    CHECK_EQ(pop(forked.scope).current_bytes, ALL);
}

TEST(a_child_goes_on_with_the_scopes_of_its_thread)
{
    struct worker worker;
    struct job job = {.mr = host_pool()};
    void *ptrs[3];
    worker_start(&worker);
    worker_run(&worker, job_push, &job);
    forked = (struct job){.mr = job.mr};
    job_push(&forked);
    allocate_three(job.mr, ptrs);
    CHECK_IN_CHILD(go_on);
    deallocate_three(job.mr, ptrs);
    CHECK_COUNTS(pop(forked.scope), 0, 0, ALL, 3, ALL, 3);
    worker_run(&worker, job_pop, &job);
    worker_end(&worker);
    nrm_resource_release(job.mr);
}

CHECK_MAIN
