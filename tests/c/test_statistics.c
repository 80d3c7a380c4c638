/* The statistics adaptor: scopes that nest, over every kind of upstream. */
#include "simulator.h"

#include <sched.h>
#include <time.h>

#include "base/bits.h"
#include "core/ops.h"
#include "counts.h"
#include "fixtures.h"
#include "nrm/adaptors.h"

static nrm_counts
counts_of(nrm_resource *mr)
{
    nrm_counts counts = {0};
    CHECK_OK(nrm_statistics_counts(mr, &counts));
    return counts;
}

static nrm_counts
push(nrm_resource *mr)
{
    nrm_counts counts = {0};
    CHECK_OK(nrm_statistics_push(mr, &counts));
    return counts;
}

static nrm_counts
pop(nrm_resource *mr)
{
    nrm_counts counts = {0};
    CHECK_OK(nrm_statistics_pop(mr, &counts));
    return counts;
}

/* ---- over any upstream ---- */

static struct counting counting;

static nrm_resource *
make_counting(void)
{
    counting = (struct counting){0};
    return counting_source(&counting);
}

static nrm_resource *
make_twice(void)
{
    return statistics_over(host_pool());
}

static const struct upstream {
    const char *name;
    nrm_resource *(*make)(void);
} upstreams[] = {
    {"host", host_source},
    {"callback", make_counting},
    {"pool", host_pool},
    {"another adaptor", make_twice},
};

TEST_EACH(it_counts_what_goes_through_it, upstreams)
{
    nrm_resource *mr = statistics_over(row->make());
    CHECK_COUNTS(counts_of(mr), 0, 0, 0, 0, 0, 0);
    void *a = allocate(mr, 1000), *b = allocate(mr, 3 * NRM__MIB);
    CHECK_COUNTS(counts_of(mr), 1000 + 3 * NRM__MIB, 2, 1000 + 3 * NRM__MIB, 2,
                 1000 + 3 * NRM__MIB, 2);
    deallocate(mr, b);
    b = allocate(mr, 500);
    CHECK_COUNTS(counts_of(mr), 1500, 2, 1000 + 3 * NRM__MIB, 2, 1500 + 3 * NRM__MIB,
                 3);
    CHECK_EQ(live_nbytes(mr->upstream), 1500);
    deallocate(mr, a);
    deallocate(mr, b);
    CHECK_STATUS(nrm_resource_deallocate(mr, b, 0, NULL), NRM_NOT_OWNED);
    CHECK_COUNTS(counts_of(mr), 0, 0, 1000 + 3 * NRM__MIB, 2, 1500 + 3 * NRM__MIB, 3);
    CHECK_EQ(live_nbytes(mr->upstream), 0);
    nrm_resource_release(mr);
}

TEST_EACH(a_block_that_changes_its_size_is_one_block, upstreams)
{
    nrm_resource *mr = statistics_over(row->make());
    void *ptr = allocate(mr, 100);
    write_pattern(ptr, 100, 3);
    REQUIRE_OK(nrm_resource_reallocate(mr, ptr, 5 * NRM__MIB, 0, NULL, &ptr));
    CHECK(has_pattern(ptr, 100, 3, 100));
    CHECK_EQ(counts_of(mr).current_bytes, 5 * NRM__MIB);
    CHECK_EQ(counts_of(mr).current_count, 1);
    REQUIRE_OK(nrm_resource_reallocate(mr, ptr, 10, 0, NULL, &ptr));
    CHECK_EQ(counts_of(mr).current_bytes, 10);
    CHECK_EQ(counts_of(mr).current_count, 1);
    CHECK_GE(counts_of(mr).peak_bytes, 5 * NRM__MIB);
    deallocate(mr, ptr);
    CHECK_EQ(counts_of(mr).current_bytes, 0);
    nrm_resource_release(mr);
}

TEST(a_request_that_fails_counts_nowhere)
{
    void *ptr = NULL;
    struct counting tiny = {.limit_nbytes = 100};
    nrm_resource *mr = statistics_over(counting_source(&tiny));
    CHECK_STATUS(nrm_resource_allocate(mr, 101, 0, NULL, &ptr), NRM_OUT_OF_MEMORY);
    CHECK_COUNTS(counts_of(mr), 0, 0, 0, 0, 0, 0);
    nrm_resource_release(mr);
}

TEST(a_pool_over_it_draws_segments_through_it)
{
    nrm_resource *mr = statistics_over(host_source());
    nrm_resource_retain(mr);
    nrm_resource *pool = pool_over(mr, 0);
    void *ptr = allocate(pool, 100000);
    CHECK_EQ(counts_of(mr).current_bytes, reserved_nbytes(pool));
    deallocate(pool, ptr);
    CHECK_OK(nrm_resource_trim(pool, 0, NULL));
    nrm_resource_release(pool);
    CHECK_EQ(counts_of(mr).current_bytes, 0);
    nrm_resource_release(mr);
}

TEST(segments_behind_it_are_locked_again_after_a_reset)
{
    nrm_resource *source = NULL;
    simulator_start(NULL);
    REQUIRE_OK(nrm_pinned_create(NULL, &source));
    nrm_resource *pool = pool_over(statistics_over(statistics_over(source)), 0);
    void *kept = allocate(pool, NRM__MIB);
    CHECK(is_page_locked(kept));
    CHECK_EQ(cuda.cuDevicePrimaryCtxReset(0), NRM_CUDA_SUCCESS);
    CHECK(!is_page_locked(kept));
    void *ptr = allocate(pool, NRM__MIB);
    CHECK(is_page_locked(ptr));
    deallocate(pool, ptr);
    deallocate(pool, kept);
    nrm_resource_release(pool);
    (void)nrm__retired_drain(UINT64_MAX);
    simulator_check_faults();
}

TEST(it_reports_and_trims_what_is_behind_it)
{
    size_t nbytes = 0;
    nrm_resource *mr = statistics_over(host_pool());
    deallocate(mr, allocate(mr, 8 * NRM__MIB));
    CHECK_GE(reserved_nbytes(mr), 8 * NRM__MIB);
    CHECK_OK(nrm_resource_trim(mr, 0, &nbytes));
    CHECK_GE(nbytes, 8 * NRM__MIB);
    CHECK_EQ(reserved_nbytes(mr), 0);
    nrm_resource_release(mr);
}

static nrm_status
never(void *context, size_t nbytes, size_t alignment, nrm_stream *stream, void **out)
{
    (void)context, (void)nbytes, (void)alignment, (void)stream, (void)out;
    return NRM_OUT_OF_MEMORY;
}

static nrm_resource *
user_code(nrm_kind kind)
{
    nrm_callback_options options = NRM_OPTIONS(nrm_callback_options);
    nrm_resource *mr = NULL;
    options.kind = kind;
    options.allocate = never;
    options.deallocate = counting_deallocate;
    options.calls_user_code = true;
    CHECK_OK(nrm_callback_create(&options, &mr));
    return mr;
}

TEST(kind_and_flags_are_those_of_the_upstream)
{
    nrm_resource *mr = statistics_over(user_code(NRM_KIND_MANAGED));
    CHECK_EQ(nrm_resource_kind(mr), NRM_KIND_MANAGED);
    CHECK(nrm_resource_calls_user_code(mr));
    nrm_resource *again = statistics_over(mr);
    CHECK_EQ(nrm_resource_kind(again), NRM_KIND_MANAGED);
    CHECK(nrm_resource_calls_user_code(again));
    nrm_resource_release(again);
    mr = statistics_over(host_source());
    CHECK(!nrm_resource_calls_user_code(mr));
    nrm_resource_release(mr);
}

TEST(what_is_no_such_adaptor_is_refused)
{
    nrm_counts counts;
    nrm_resource *mr = host_source(), *none = NULL;
    CHECK_STATUS(nrm_statistics_counts(mr, &counts), NRM_INVALID_VALUE);
    CHECK_STATUS(nrm_statistics_push(mr, &counts), NRM_INVALID_VALUE);
    CHECK_STATUS(nrm_statistics_pop(mr, &counts), NRM_INVALID_VALUE);
    CHECK_STR_HAS(nrm_last_error()->message, "HostMemoryResource");
    CHECK_STATUS(nrm_statistics_create(NULL, &none), NRM_INVALID_VALUE);
    CHECK(none == NULL);
    nrm_resource_release(mr);
}

/* ---- scopes ---- */

TEST(a_scope_begins_with_zeros_and_is_part_of_the_one_around_it)
{
    nrm_resource *mr = statistics_over(host_pool());
    void *outer = allocate(mr, 100);
    CHECK_COUNTS(push(mr), 100, 1, 100, 1, 100, 1);
    CHECK_COUNTS(counts_of(mr), 0, 0, 0, 0, 0, 0);
    void *inner = allocate(mr, 30);
    deallocate(mr, inner);
    inner = allocate(mr, 7);
    CHECK_COUNTS(pop(mr), 7, 1, 30, 1, 37, 2);
    CHECK_COUNTS(counts_of(mr), 107, 2, 130, 2, 137, 3);
    deallocate(mr, outer);
    deallocate(mr, inner);
    nrm_resource_release(mr);
}

TEST(a_block_from_before_the_push_is_negative)
{
    nrm_resource *mr = statistics_over(host_pool());
    void *old = allocate(mr, 100);
    (void)push(mr);
    deallocate(mr, old);
    CHECK_COUNTS(counts_of(mr), -100, -1, 0, 0, 0, 0);
    void *ptr = allocate(mr, 40);
    CHECK_COUNTS(counts_of(mr), -60, 0, 0, 0, 40, 1);
    (void)push(mr);
    deallocate(mr, ptr);
    CHECK_COUNTS(pop(mr), -40, -1, 0, 0, 0, 0);
    CHECK_COUNTS(pop(mr), -100, -1, 0, 0, 40, 1);
    CHECK_COUNTS(counts_of(mr), 0, 0, 100, 1, 140, 2);
    nrm_resource_release(mr);
}

TEST(a_block_that_came_past_it_is_negative)
{
    nrm_resource *pool = host_pool();
    nrm_resource_retain(pool);
    nrm_resource *mr = statistics_over(pool);
    void *ptr = allocate(pool, 100);
    deallocate(mr, ptr);
    CHECK_COUNTS(counts_of(mr), -100, -1, 0, 0, 0, 0);
    CHECK_EQ(live_nbytes(pool), 0);
    nrm_resource_release(mr);
    nrm_resource_release(pool);
}

TEST(the_outermost_counters_stay)
{
    nrm_counts counts = {.total_count = 77};
    nrm_resource *mr = statistics_over(host_pool());
    void *ptr = allocate(mr, 100);
    CHECK_STATUS(nrm_statistics_pop(mr, &counts), NRM_NOT_FOUND);
    CHECK_STR_HAS(nrm_last_error()->message, "cannot pop the last counter pair");
    CHECK_EQ(counts.total_count, 77);
    (void)push(mr);
    (void)pop(mr);
    CHECK_STATUS(nrm_statistics_pop(mr, &counts), NRM_NOT_FOUND);
    CHECK_COUNTS(counts_of(mr), 100, 1, 100, 1, 100, 1);
    deallocate(mr, ptr);
    nrm_resource_release(mr);
}

TEST(the_peak_of_the_resource_is_that_of_its_life)
{
    nrm_statistics statistics;
    nrm_resource *mr = statistics_over(host_pool());
    deallocate(mr, allocate(mr, 1000));
    (void)push(mr);
    deallocate(mr, allocate(mr, 500));
    (void)push(mr);
    void *ptr = allocate(mr, 10);
    REQUIRE_OK(nrm_resource_statistics(mr, &statistics));
    CHECK_EQ(statistics.peak_bytes, 1000);
    CHECK_EQ(statistics.peak_count, 1);
    CHECK_EQ(statistics.current_bytes, 10);
    CHECK_EQ(statistics.total_bytes, 1510);
    deallocate(mr, ptr);
    nrm_resource_release(mr); /* with two scopes open */
}

/* ---- against a model ---- */

/* One value as a pair of counters in a stack would keep it. */
struct value {
    int64_t now, peak, total;
};

struct level {
    struct value bytes, count;
};

enum { MODEL_DEPTH = 12, MODEL_BLOCKS = 40 };

struct model {
    struct level levels[MODEL_DEPTH];
    int depth;
    void *ptrs[MODEL_BLOCKS];
    size_t sizes[MODEL_BLOCKS];
    int n;
};

static void
value_add(struct value *value, int64_t n)
{
    value->now += n;
    if (n > 0) {
        value->total += n;
        value->peak = value->now > value->peak ? value->now : value->peak;
    }
}

static void
value_join(struct value *outer, const struct value *inner)
{
    int64_t peak = outer->now + inner->peak;
    outer->peak = peak > outer->peak ? peak : outer->peak;
    outer->now += inner->now;
    outer->total += inner->total;
}

static void
check_level(nrm_counts counts, const struct level *level)
{
    CHECK_COUNTS(counts, level->bytes.now, level->count.now, level->bytes.peak,
                 level->count.peak, level->bytes.total, level->count.total);
}

static void
model_allocate(struct model *model, nrm_resource *mr, size_t nbytes)
{
    struct level *top = &model->levels[model->depth];
    model->ptrs[model->n] = allocate(mr, nbytes);
    model->sizes[model->n++] = nbytes;
    value_add(&top->bytes, (int64_t)nbytes);
    value_add(&top->count, 1);
}

static void
model_deallocate(struct model *model, nrm_resource *mr, int i)
{
    struct level *top = &model->levels[model->depth];
    deallocate(mr, model->ptrs[i]);
    value_add(&top->bytes, -(int64_t)model->sizes[i]);
    value_add(&top->count, -1);
    model->ptrs[i] = model->ptrs[--model->n];
    model->sizes[i] = model->sizes[model->n];
}

static void
model_push(struct model *model, nrm_resource *mr)
{
    check_level(push(mr), &model->levels[model->depth]);
    model->levels[++model->depth] = (struct level){0};
}

static void
model_pop(struct model *model, nrm_resource *mr)
{
    const struct level *inner = &model->levels[model->depth--];
    check_level(pop(mr), inner);
    value_join(&model->levels[model->depth].bytes, &inner->bytes);
    value_join(&model->levels[model->depth].count, &inner->count);
}

static const struct seed {
    const char *name;
    uint64_t seed;
} seeds[] = {{"1", 1}, {"2", 2}, {"3", 3}, {"4", 4}, {"5", 5}};

TEST_EACH(it_counts_as_a_stack_of_counters, seeds)
{
    struct model model = {0};
    uint64_t state = row->seed * 0x9e3779b97f4a7c15u;
    nrm_resource *mr = statistics_over(host_pool());
    for (int i = 0; i < 4000; i++) {
        uint64_t choice = next_random(&state) % 10;
        if (choice == 0 && model.depth < MODEL_DEPTH - 1) {
            model_push(&model, mr);
        }
        else if (choice == 1 && model.depth > 0) {
            model_pop(&model, mr);
        }
        else if (choice % 2 == 0 && model.n < MODEL_BLOCKS) {
            model_allocate(&model, mr, 1 + next_random(&state) % 10000);
        }
        else if (model.n > 0) {
            model_deallocate(&model, mr,
                             (int)(next_random(&state) % (unsigned)model.n));
        }
        check_level(counts_of(mr), &model.levels[model.depth]);
    }
    while (model.n > 0) {
        model_deallocate(&model, mr, 0);
    }
    while (model.depth > 0) {
        model_pop(&model, mr);
    }
    check_level(counts_of(mr), &model.levels[0]);
    nrm_resource_release(mr);
}

/* ---- threads ---- */

enum { N_THREADS = 4, N_ROUNDS = 3000, N_HELD = 8, MAX_NBYTES = 4096 };

static atomic_int_least64_t asked_bytes, asked_count;
static atomic_bool done;

static void *
allocates_often(void *mr)
{
    void *held[N_HELD] = {0};
    uint64_t state = (uintptr_t)&held | 1;
    for (int i = 0; i < N_ROUNDS; i++) {
        size_t nbytes = 1 + next_random(&state) % MAX_NBYTES;
        void **slot = &held[i % N_HELD];
        deallocate(mr, *slot);
        *slot = allocate(mr, nbytes);
        atomic_fetch_add(&asked_bytes, (int64_t)nbytes);
        atomic_fetch_add(&asked_count, 1);
    }
    for (int i = 0; i < N_HELD; i++) {
        deallocate(mr, held[i]);
    }
    return NULL;
}

/* What holds of a scope whatever other threads do meanwhile. */
static void
check_scope(nrm_counts counts)
{
    int64_t most = N_THREADS * N_HELD;
    CHECK_GE(counts.peak_bytes, 0);
    CHECK_GE(counts.peak_count, 0);
    CHECK_GE(counts.peak_bytes, counts.current_bytes);
    CHECK_GE(counts.peak_count, counts.current_count);
    CHECK_GE(counts.total_bytes, 0);
    CHECK_GE(counts.total_count, 0);
    CHECK_LE(counts.peak_count, most);
    CHECK_LE(counts.peak_bytes, most * MAX_NBYTES);
    CHECK_GE(counts.current_count, -most);
}

static void *
pushes_and_pops(void *mr)
{
    while (!atomic_load(&done)) {
        check_scope(push(mr));
        check_scope(counts_of(mr));
        check_scope(pop(mr));
    }
    return NULL;
}

TEST(scopes_of_threads_add_up)
{
    pthread_t threads[N_THREADS], pushers[2];
    nrm_resource *mr = statistics_over(host_pool());
    atomic_store(&asked_bytes, 0);
    atomic_store(&asked_count, 0);
    atomic_store(&done, false);
    for (int i = 0; i < 2; i++) {
        REQUIRE_EQ(pthread_create(&pushers[i], NULL, pushes_and_pops, mr), 0);
    }
    for (int i = 0; i < N_THREADS; i++) {
        REQUIRE_EQ(pthread_create(&threads[i], NULL, allocates_often, mr), 0);
    }
    for (int i = 0; i < N_THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    atomic_store(&done, true);
    for (int i = 0; i < 2; i++) {
        pthread_join(pushers[i], NULL);
    }
    nrm_counts counts = counts_of(mr);
    check_scope(counts);
    CHECK_EQ(counts.current_bytes, 0);
    CHECK_EQ(counts.current_count, 0);
    CHECK_EQ(counts.total_bytes, atomic_load(&asked_bytes));
    CHECK_EQ(counts.total_count, atomic_load(&asked_count));
    CHECK_GE(counts.peak_count, N_HELD);
    nrm_resource_release(mr);
}

static atomic_int n_pushes;

static void
wait_for_a_push(void)
{
    int seen = atomic_load(&n_pushes);
    while (atomic_load(&n_pushes) == seen && !atomic_load(&done)) {
        sched_yield();
    }
}

/* Its block comes at any time, is there when a push ends, and soon gone. */
static void *
holds_one_over_a_push(void *mr)
{
    uint64_t state = 77;
    while (!atomic_load(&done)) {
        for (uint64_t n = next_random(&state) % 4000; n > 0; n--) {
            (void)atomic_load(&n_pushes);
        }
        void *ptr = allocate(mr, 100);
        wait_for_a_push();
        deallocate(mr, ptr);
    }
    return NULL;
}

TEST(a_peak_is_not_lost_where_a_scope_begins)
{
    pthread_t thread;
    nrm_resource *mr = statistics_over(host_pool());
    int n_lost = 0, n_seen = 0;
    atomic_store(&done, false);
    REQUIRE_EQ(pthread_create(&thread, NULL, holds_one_over_a_push, mr), 0);
    time_t end = time(NULL) + 60; /* a second, but where each yield is to others */
    for (int i = 0; i < 10000 && time(NULL) < end; i++) {
        bool began_empty = push(mr).current_count == 0;
        atomic_fetch_add(&n_pushes, 1);
        for (int spin = 0; spin < 20; spin++) {
            sched_yield();
        }
        nrm_counts counts = pop(mr);
        if (began_empty && counts.total_count > 0) {
            n_seen++;
            n_lost += counts.peak_count < 1;
        }
    }
    atomic_store(&done, true);
    pthread_join(thread, NULL);
    CHECK_EQ(n_lost, 0);
    NOTE("%d scopes began without a block and met one", n_seen);
    nrm_resource_release(mr);
}

/* ---- forks ---- */

static nrm_resource *forked;

static void
counts_in_the_child(void)
{
    check_scope(push(forked));
    void *ptr = allocate(forked, 100);
    CHECK_EQ(counts_of(forked).current_bytes, 100);
    deallocate(forked, ptr);
    CHECK_COUNTS(pop(forked), 0, 0, 100, 1, 100, 1);
}

TEST(a_child_finds_the_scopes_unlocked)
{
    pthread_t thread;
    forked = statistics_over(host_pool());
    atomic_store(&done, false);
    REQUIRE_EQ(pthread_create(&thread, NULL, pushes_and_pops, forked), 0);
    for (int i = 0; i < 30; i++) {
        CHECK_IN_CHILD(counts_in_the_child);
    }
    atomic_store(&done, true);
    pthread_join(thread, NULL);
    nrm_resource_release(forked);
}

CHECK_MAIN
