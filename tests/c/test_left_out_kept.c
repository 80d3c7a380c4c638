/* What threads keep and park of page-locked pools at a fork: as idle as what is free,
   for the child, and untouched in the parent. See test_left_out.c for the rest. */
#include "core/cache.h"
#include "fork_scenes.h"
#include "nrm/uses.h"
#include "streams.h"
#include "workers.h"

/* ---- what the calling thread has ---- */

static size_t
n_parked(nrm_resource *mr)
{
    struct nrm__cache *cache;
    struct nrm__slot *slot = nrm__cache_enter_slot(mr, &cache);
    if (slot == NULL) {
        return 0;
    }
    size_t n = slot->magazines != NULL ? slot->magazines->n_parked : 0;
    nrm__cache_leave(cache);
    return n;
}

static size_t
n_had(nrm_resource *mr)
{
    return n_kept(mr) + n_parked(mr);
}

/* ---- a worker, and when it gives its blocks back ---- */

static struct worker worker;
static size_t n_of_worker;

static void
allocate_all(void *unused)
{
    (void)unused;
    for (size_t i = 0; i < N_BLOCKS; i++) {
        scene.ptrs[i] = allocate(scene.mr, BLOCK);
        write_pattern(scene.ptrs[i], BLOCK, (unsigned)i);
        watch(scene.ptrs[i], BLOCK);
    }
}

static void
free_odd(void *unused)
{
    (void)unused;
    for (size_t i = 1; i < N_BLOCKS; i += 2) {
        CHECK_OK(nrm_resource_deallocate(scene.mr, scene.ptrs[i], 0, NULL));
    }
    n_of_worker = n_had(scene.mr);
}

static void
count(void *unused)
{
    (void)unused;
    n_of_worker = n_had(scene.mr);
}

/* At the beginning of a fork, when no lock of caches or pools is held yet. */
static bool frees_at_fork;

static void
free_if_asked(void)
{
    if (frees_at_fork) {
        worker_run(&worker, free_odd, NULL);
    }
}

static const struct nrm__fork_hook freeing_hook = {.rank = NRM__RANK_RESOURCES,
                                                   .prepare = free_if_asked};

__attribute__((constructor)) static void
add_freeing_hook(void)
{
    nrm__fork_hook_add(&freeing_hook);
}

static const struct kind keeping[] = {
    {"parked", tracked_pool},
    {"kept", immediate_pool},
    {"kept_under_an_adaptor", counted_pool},
    {"parked_of_a_pool_of_a_pool", pool_of_a_pool},
};

static void
begin_with_worker(const struct kind *kind)
{
    simulator_start(NULL);
    scene.mr = kind->make();
    n_watched = 0;
    worker_start(&worker);
    worker_run(&worker, allocate_all, NULL);
}

static void
end_with_worker(void)
{
    frees_at_fork = false;
    worker_end(&worker);
    end();
}

/* ---- the child ---- */

static void
use_up(void)
{
    void *ptr = NULL;
    for (size_t i = 0; i < N_BLOCKS; i++) {
        if (is_idle(i)) {
            CHECK_EQ(n_readable(scene.ptrs[i], BLOCK), 0u);
        }
        else {
            CHECK(has_pattern(scene.ptrs[i], BLOCK, (unsigned)i, BLOCK));
        }
    }
    check_all();
    give_the_rest_back();
    CHECK_EQ(nrm_resource_allocate(scene.mr, BLOCK, 0, NULL, &ptr),
             NRM_CUDA_UNAVAILABLE);
    CHECK_OK(nrm_resource_trim(scene.mr, 0, NULL)); /* also what the worker had */
    check_all();
    nrm_resource_release(scene.mr);
    (void)nrm__retired_drain(0);
}

static void
forks_and_uses_up(void)
{
    CHECK_EQ(in_child(use_up), 0);
    use_up();
}

/* ---- what is left out ---- */

static void
check_left_out(void)
{
    for (size_t i = 0; i < N_BLOCKS; i++) {
        CHECK_GE(watched[i].seen.nbytes, is_idle(i) ? BLOCK - 2 * PAGE : 0);
        CHECK(is_idle(i) || watched[i].seen.nbytes == 0);
    }
}

TEST_EACH(what_another_thread_has_is_not_in_the_child, keeping)
{
    begin_with_worker(row);
    worker_run(&worker, free_odd, NULL);
    CHECK_GT(n_of_worker, 0u);
    CHECK_EQ(in_child(forks_and_uses_up), 0);
    check_left_out();
    check_parent();
    end_with_worker();
}

/* A fork cannot ask threads for what they have: they would have more the next
   moment. */
TEST_EACH(neither_is_what_it_frees_while_the_fork_begins, keeping)
{
    begin_with_worker(row);
    frees_at_fork = true;
    CHECK_EQ(in_child(use_up), 0);
    CHECK_GT(n_of_worker, 0u);
    check_left_out();
    check_parent();
    end_with_worker();
}

/* Kept, parked and free ones lie side by side here. */
TEST(neighbours_are_left_out_as_one_whoever_has_them)
{
    begin_with_worker(&keeping[0]);
    for (size_t i = 0; i < N_BLOCKS; i += 2) {
        CHECK_OK(nrm_resource_deallocate(scene.mr, scene.ptrs[i], 0, NULL));
    }
    worker_run(&worker, free_odd, NULL);
    CHECK_GT(n_of_worker, 0u);
    CHECK_GT(n_had(scene.mr), 0u);
    watched[0].nbytes = N_BLOCKS * BLOCK;
    n_watched = 1;
    CHECK_EQ(in_child(check_all), 0);
    CHECK_EQ(watched[0].seen.nbytes, N_BLOCKS * BLOCK);
    CHECK_EQ(watched[0].seen.n_ranges, 1u);
    for (size_t i = 0; i < N_BLOCKS; i += 2) {
        scene.ptrs[i] = allocate(scene.mr, BLOCK);
    }
    end_with_worker();
}

/* ---- the parent ---- */

TEST_EACH(the_parent_s_threads_still_have_what_they_had, keeping)
{
    begin_with_worker(row);
    void *ptrs[3];
    for (size_t i = 0; i < 3; i++) {
        ptrs[i] = allocate(scene.mr, BLOCK);
    }
    for (size_t i = 0; i < 3; i++) {
        CHECK_OK(nrm_resource_deallocate(scene.mr, ptrs[i], 0, NULL));
    }
    worker_run(&worker, free_odd, NULL);
    size_t n_own = n_had(scene.mr), n_others = n_of_worker;
    CHECK_GT(n_own, 0u);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(in_child(check_all), 0);
        check_all();
        CHECK_EQ(n_had(scene.mr), n_own);
        worker_run(&worker, count, NULL);
        CHECK_EQ(n_of_worker, n_others);
    }
    end_with_worker();
}

static void
does_nothing(void)
{
}

/* The driver may hold a lock for as long as it waits for a GPU. */
TEST_EACH(a_fork_does_not_call_the_driver, keeping)
{
    begin_with_worker(row);
    frees_at_fork = false;
    worker_run(&worker, free_odd, NULL);
    uint64_t before = sim.call_count(NULL);
    CHECK_EQ(in_child(does_nothing), 0);
    CHECK_EQ(sim.call_count(NULL), before);
    end_with_worker();
}

/* What a copy still reads is not handed out after a fork either. */
TEST(the_parent_waits_for_what_is_parked)
{
    enum { N = 40 };
    simulator_start(NULL);
    static char seen[BLOCK];
    void *ptrs[N];
    nrm_CUdeviceptr device = 0;
    scene.mr = tracked_pool();
    n_watched = 0;
    void *ptr = allocate(scene.mr, BLOCK);
    make_current(0);
    nrm_stream *stream = new_stream();
    write_pattern(ptr, BLOCK, 7);
    watch(ptr, BLOCK);
    hold(stream);
    CHECK_EQ(cuda.cuMemAlloc(&device, BLOCK), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemcpyHtoDAsync(device, ptr, BLOCK, handle_of(stream)),
             NRM_CUDA_SUCCESS);
    CHECK_OK(nrm_resource_deallocate(scene.mr, ptr, 0, NULL));
    CHECK_EQ(n_parked(scene.mr), 1u);
    CHECK_EQ(in_child(check_all), 0);
    CHECK_GE(watched[0].seen.nbytes, BLOCK - 2 * PAGE);
    CHECK_EQ(n_parked(scene.mr), 1u);
    for (int i = 0; i < N; i++) {
        ptrs[i] = allocate(scene.mr, BLOCK);
        CHECK(ptrs[i] != ptr);
        write_pattern(ptrs[i], BLOCK, 100);
    }
    let_go(stream);
    CHECK_EQ(cuda.cuStreamSynchronize(handle_of(stream)), NRM_CUDA_SUCCESS);
    for (int i = 0; i < N; i++) {
        CHECK_OK(nrm_resource_deallocate(scene.mr, ptrs[i], 0, NULL));
    }
    CHECK_EQ(cuda.cuMemcpyDtoH(seen, device, BLOCK), NRM_CUDA_SUCCESS);
    CHECK(has_pattern(seen, BLOCK, 7, BLOCK)); /* the copy read what it was given */
    CHECK_EQ(cuda.cuMemFree(device), NRM_CUDA_SUCCESS);
    nrm_stream_release(stream);
    nrm_resource_release(scene.mr);
    (void)nrm__retired_drain(UINT64_MAX);
    simulator_check_faults();
}

/* ---- handlers of others ---- */

static nrm_resource *used_by_handlers;
static size_t n_handled;

/* Registered later than ours, they find none of our locks held. */
static void
allocates_and_frees(nrm_status expected)
{
    void *ptr = NULL;
    if (used_by_handlers != NULL) {
        nrm_status status =
            nrm_resource_allocate(used_by_handlers, BLOCK, 0, NULL, &ptr);
        CHECK_EQ(status, expected);
        CHECK_OK(nrm_resource_deallocate(used_by_handlers, ptr, 0, NULL));
        n_handled++;
    }
}

static void
in_parent(void)
{
    allocates_and_frees(NRM_OK);
}

static void
in_its_child(void)
{
    allocates_and_frees(NRM_CUDA_UNAVAILABLE);
}

static void
were_handled(void)
{
    CHECK_EQ(n_handled, 2u); /* before, and in the child */
    check_all();
}

TEST_EACH(handlers_of_others_may_allocate, keeping)
{
    static bool are_registered; /* for ever */
    begin_with_worker(row);
    if (!are_registered) {
        CHECK_EQ(pthread_atfork(in_parent, in_parent, in_its_child), 0);
        are_registered = true;
    }
    used_by_handlers = scene.mr;
    n_handled = 0;
    CHECK_EQ(in_child(were_handled), 0);
    CHECK_EQ(n_handled, 2u);
    used_by_handlers = NULL;
    worker_run(&worker, free_odd, NULL);
    end_with_worker();
}

/* ---- while others work ---- */

static atomic_bool stop;
static nrm_resource *worked;
static bool compares;
static size_t kept_nbytes_seen;

static void
add_kept(nrm_resource *pool, const struct nrm__cell *cell)
{
    const struct nrm__live *block = cell->record;
    (void)pool;
    kept_nbytes_seen += atomic_load(&block->capacity) - 2 * PAGE;
}

/* With all locks held: whatever threads have now is left out, and other memory
   besides. */
static void
compare(void)
{
    if (compares) {
        size_t before = kept_nbytes_seen;
        nrm__cache_fork_each_kept(worked, add_kept);
        CHECK_GE(look(0, UINTPTR_MAX / 2).nbytes, kept_nbytes_seen - before);
    }
}

static const struct nrm__fork_hook comparing_hook = {.rank = 1000, .prepare = compare};

__attribute__((constructor)) static void
add_comparing_hook(void)
{
    nrm__fork_hook_add(&comparing_hook);
}

static void
works(uint64_t seed)
{
    void *ptrs[8] = {0};
    while (!atomic_load(&stop)) {
        size_t i = next_random(&seed) % 8;
        if (ptrs[i] != NULL) {
            CHECK_OK(nrm_resource_deallocate(worked, ptrs[i], 0, NULL));
        }
        ptrs[i] = allocate(worked, 80 * KIB + next_random(&seed) % (400 * KIB));
        *(char *)ptrs[i] = 1;
    }
    for (size_t i = 0; i < 8; i++) {
        CHECK_OK(nrm_resource_deallocate(worked, ptrs[i], 0, NULL));
    }
}

static void
forks_or_works(unsigned index, void *n_forks)
{
    if (index != 0) {
        works(index);
        return;
    }
    for (int i = 0; i < *(int *)n_forks; i++) {
        CHECK_EQ(in_child(check_all), 0);
        usleep(1000);
    }
    atomic_store(&stop, true);
}

static const struct kind busy[] = {
    {"parked", tracked_pool},
    {"kept", immediate_pool},
};

TEST_EACH(whatever_threads_have_just_then_is_left_out, busy)
{
    int n_forks = SLOW == 1 ? 40 : 8;
    simulator_start(NULL);
    worked = row->make();
    n_watched = 0;
    kept_nbytes_seen = 0;
    atomic_store(&stop, false);
    compares = true;
    check_threads(4, forks_or_works, &n_forks);
    compares = false;
    CHECK_GT(kept_nbytes_seen, 0u);
    CHECK_EQ(look(0, UINTPTR_MAX / 2).nbytes, 0u);
    check_all();
    nrm_resource_release(worked);
    (void)nrm__retired_drain(UINT64_MAX);
    simulator_check_faults();
}

CHECK_MAIN
