/* The limiting adaptor: never over its limit, and no request fails that fits. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/ptrace.h>

#include "base/bits.h"
#include "core/ops.h"
#include "fixtures.h"
#include "nrm/adaptors.h"

/* A limiter over `upstream`, whose reference it takes; `alignment` 0: the default. */
static nrm_resource *
limit(nrm_resource *upstream, size_t limit_nbytes, size_t alignment)
{
    nrm_limiting_options options = NRM_OPTIONS(nrm_limiting_options);
    nrm_resource *mr = NULL;
    options.allocation_limit = limit_nbytes;
    options.alignment = alignment;
    CHECK_OK(nrm_limiting_create(upstream, &options, &mr));
    nrm_resource_release(upstream);
    return mr;
}

static size_t
booked(nrm_resource *mr)
{
    size_t allocated = 0, limit_nbytes;
    CHECK_OK(nrm_limiting_get(mr, &allocated, &limit_nbytes));
    mr->ops->check(mr);
    return allocated;
}

static nrm_status
try_allocate(nrm_resource *mr, size_t nbytes)
{
    void *ptr = NULL;
    nrm_status status = nrm_resource_allocate(mr, nbytes, 0, NULL, &ptr);
    if (status == NRM_OK) {
        deallocate(mr, ptr);
    }
    return status;
}

/* ---- what counts ---- */

static const struct rounding {
    const char *name;
    size_t alignment, nbytes, counts;
} roundings[] = {
    {"a byte at the default", 0, 1, 256},
    {"a whole multiple", 0, 512, 512},
    {"one more", 0, 513, 768},
    {"no rounding", 1, 513, 513},
    {"a page", 4096, 1, 4096},
};

TEST_EACH(a_block_counts_as_a_multiple_of_the_alignment, roundings)
{
    size_t allocated = 99, limit_nbytes = 0;
    nrm_resource *mr = limit(host_pool(), 10000, row->alignment);
    CHECK_OK(nrm_limiting_get(mr, &allocated, &limit_nbytes));
    CHECK_EQ(allocated, 0);
    CHECK_EQ(limit_nbytes, 10000);
    void *ptr = allocate(mr, row->nbytes);
    CHECK_EQ(booked(mr), row->counts);
    CHECK_EQ(live_nbytes(mr), (int64_t)row->nbytes);
    deallocate(mr, ptr);
    CHECK_EQ(booked(mr), 0);
    nrm_resource_release(mr);
}

TEST(what_is_over_the_limit_fails_with_its_numbers)
{
    void *ptr = NULL;
    nrm_resource *mr = limit(host_pool(), 10 * NRM__MIB, 0);
    void *a = allocate(mr, 4 * NRM__MIB), *b = allocate(mr, 4 * NRM__MIB);
    CHECK_STATUS(nrm_resource_allocate(mr, 3 * NRM__MIB, 0, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK(ptr == NULL);
    CHECK_STR_HAS(nrm_last_error()->message, "3 MiB asked, 8 MiB in use, limit 10 MiB");
    CHECK_EQ(nrm_last_error()->requested_nbytes, 3 * NRM__MIB);
    CHECK_STATUS(nrm_resource_allocate(mr, 2 * NRM__MIB + 1, 0, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK_STR_HAS(nrm_last_error()->message, "(counts as ");
    CHECK_EQ(booked(mr), 8 * NRM__MIB);
    CHECK_OK(try_allocate(mr, 2 * NRM__MIB));
    deallocate(mr, a);
    a = allocate(mr, 6 * NRM__MIB);
    CHECK_EQ(booked(mr), 10 * NRM__MIB);
    CHECK_STATUS(try_allocate(mr, 1), NRM_OUT_OF_MEMORY);
    deallocate(mr, a);
    deallocate(mr, b);
    CHECK_EQ(booked(mr), 0);
    nrm_resource_release(mr);
}

TEST(zeroed_memory_counts_too)
{
    void *ptr;
    nrm_resource *mr = limit(host_pool(), 1000, 0);
    CHECK_STATUS(nrm_resource_allocate_zeroed(mr, 1001, 0, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    REQUIRE_OK(nrm_resource_allocate_zeroed(mr, 700, 0, NULL, &ptr));
    CHECK_EQ(((char *)ptr)[699], 0);
    CHECK_EQ(booked(mr), 768);
    deallocate(mr, ptr);
    nrm_resource_release(mr);
}

static const struct extreme {
    const char *name;
    size_t limit_nbytes, alignment, nbytes;
    bool fits;
} extremes[] = {
    {"nothing fits into 0", 0, 0, 1, false},
    {"a limit below the alignment", 100, 0, 1, false},
    {"a limit that is no multiple", 1000, 0, 768, true},
    {"its last part is lost", 1000, 0, 769, false},
    {"no limit to speak of", SIZE_MAX, 0, 1000, true},
    {"the largest alignment", SIZE_MAX, SIZE_MAX / 2 + 1, 1, true},
    {"the largest request", SIZE_MAX / 2, 0, SIZE_MAX / 2 - 64, false},
};

TEST_EACH(extremes_do_not_overflow, extremes)
{
    nrm_resource *mr = limit(host_pool(), row->limit_nbytes, row->alignment);
    CHECK_STATUS(try_allocate(mr, row->nbytes), row->fits ? NRM_OK : NRM_OUT_OF_MEMORY);
    CHECK_OK(try_allocate(mr, 0));
    CHECK_EQ(booked(mr), 0);
    nrm_resource_release(mr);
}

TEST(a_block_that_came_past_it_does_not_make_room)
{
    nrm_resource *pool = host_pool();
    nrm_resource_retain(pool);
    nrm_resource *mr = limit(pool, 4096, 0);
    void *own = allocate(mr, 256), *foreign = allocate(pool, 1024);
    deallocate(mr, foreign);
    CHECK_EQ(booked(mr), 0);
    deallocate(mr, own);
    CHECK_EQ(booked(mr), 0);
    CHECK_STATUS(try_allocate(mr, 4097), NRM_OUT_OF_MEMORY);
    nrm_resource_release(mr);
    nrm_resource_release(pool);
}

TEST(wrong_options_are_refused)
{
    nrm_limiting_options options = NRM_OPTIONS(nrm_limiting_options);
    size_t a, b;
    nrm_resource *host = host_source(), *mr = NULL;
    CHECK_STATUS(nrm_limiting_create(host, NULL, &mr), NRM_INVALID_VALUE);
    CHECK_STATUS(nrm_limiting_create(NULL, &options, &mr), NRM_INVALID_VALUE);
    options.alignment = 48;
    CHECK_STATUS(nrm_limiting_create(host, &options, &mr), NRM_INVALID_VALUE);
    CHECK_STR_HAS(nrm_last_error()->message, "power of two, not 48 B");
    CHECK_STATUS(nrm_limiting_get(host, &a, &b), NRM_INVALID_VALUE);
    CHECK(mr == NULL);
    nrm_resource_release(host);
}

/* ---- the upstream fails ---- */

TEST(what_the_upstream_refuses_is_booked_out)
{
    struct counting tiny = {.limit_nbytes = 1000};
    nrm_resource *mr = limit(counting_source(&tiny), 10000, 0);
    void *ptr = allocate(mr, 600);
    for (int i = 0; i < 100; i++) {
        CHECK_STATUS(try_allocate(mr, 600), NRM_OUT_OF_MEMORY);
    }
    CHECK_EQ(booked(mr), 768);
    /* By a copy, as a callback cannot resize: both blocks would be in use. */
    CHECK_STATUS(nrm_resource_reallocate(mr, ptr, 900, 0, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK_EQ(booked(mr), 768);
    deallocate(mr, ptr);
    CHECK_EQ(booked(mr), 0);
    nrm_resource_release(mr);
}

TEST(the_lower_of_two_limits_holds)
{
    nrm_resource *inner = limit(host_pool(), 2 * NRM__MIB, 0);
    nrm_resource *outer = limit(inner, 5 * NRM__MIB, 0);
    CHECK_STATUS(try_allocate(outer, 4 * NRM__MIB), NRM_OUT_OF_MEMORY);
    CHECK_STR_HAS(nrm_last_error()->message, "limit 2 MiB");
    CHECK_EQ(booked(outer), 0);
    void *ptr = allocate(outer, NRM__MIB);
    CHECK_EQ(booked(outer), NRM__MIB);
    CHECK_EQ(booked(inner), NRM__MIB);
    deallocate(outer, ptr);
    CHECK_EQ(booked(inner), 0);
    nrm_resource_release(outer);
}

/* ---- other sizes ---- */

TEST(growing_is_booked_before_the_block_changes)
{
    nrm_resource *mr = limit(host_pool(), 8 * NRM__MIB, 0);
    void *ptr = allocate(mr, NRM__MIB);
    write_pattern(ptr, NRM__MIB, 9);
    REQUIRE_OK(nrm_resource_reallocate(mr, ptr, 2 * NRM__MIB, 0, NULL, &ptr));
    CHECK_EQ(booked(mr), 2 * NRM__MIB);
    void *other = ptr;
    CHECK_STATUS(nrm_resource_reallocate(mr, ptr, 8 * NRM__MIB + 1, 0, NULL, &other),
                 NRM_OUT_OF_MEMORY);
    CHECK_STR_HAS(nrm_last_error()->message, "2 MiB in use, limit 8 MiB");
    CHECK(other == ptr);
    CHECK_EQ(booked(mr), 2 * NRM__MIB);
    CHECK_EQ(live_nbytes(mr), 2 * (int64_t)NRM__MIB);
    CHECK(has_pattern(ptr, NRM__MIB, 9, NRM__MIB));
    REQUIRE_OK(nrm_resource_reallocate(mr, ptr, 1000, 0, NULL, &ptr));
    CHECK_EQ(booked(mr), 1024);
    CHECK(has_pattern(ptr, 1000, 9, NRM__MIB));
    deallocate(mr, ptr);
    CHECK_EQ(booked(mr), 0);
    nrm_resource_release(mr);
}

TEST(in_place_the_whole_limit_can_be_grown_into)
{
    nrm_resource *host = host_source(), *mr = limit(host, 8 * NRM__MIB, 0);
    void *ptr = allocate(mr, 5 * NRM__MIB);
    /* A copy would need 13 MiB at once; pages that move need 8. */
    REQUIRE_OK(nrm_resource_reallocate(mr, ptr, 8 * NRM__MIB, 0, NULL, &ptr));
    CHECK_EQ(booked(mr), 8 * NRM__MIB);
    CHECK_STATUS(try_allocate(mr, 1), NRM_OUT_OF_MEMORY);
    REQUIRE_OK(nrm_resource_reallocate(mr, ptr, 5 * NRM__MIB, 0, NULL, &ptr));
    CHECK_EQ(booked(mr), 5 * NRM__MIB);
    deallocate(mr, ptr);
    nrm_resource_release(mr);
}

TEST(a_block_that_may_not_grow_moves_to_the_fallback)
{
    nrm_route_options options = NRM_OPTIONS(nrm_route_options);
    nrm_resource *mr = limit(host_pool(), NRM__MIB, 0), *other = host_pool(), *route;
    options.large = mr;
    options.fallback = other;
    REQUIRE_OK(nrm_route_create(&options, &route));
    void *ptr = allocate(route, 100000);
    write_pattern(ptr, 100000, 4);
    CHECK_GT(booked(mr), 0);
    REQUIRE_OK(nrm_resource_reallocate(route, ptr, 2 * NRM__MIB, 0, NULL, &ptr));
    CHECK(has_pattern(ptr, 100000, 4, 100000));
    CHECK_EQ(booked(mr), 0);
    CHECK_EQ(live_nbytes(other), 2 * (int64_t)NRM__MIB);
    deallocate(route, ptr);
    nrm_resource_release(route);
    nrm_resource_release(mr);
    nrm_resource_release(other);
}

/* ---- against a model ---- */

enum { MODEL_BLOCKS = 30 };

struct model {
    void *ptrs[MODEL_BLOCKS];
    size_t sizes[MODEL_BLOCKS];
    size_t alignment, limit_nbytes, counts; /* the sum over all blocks */
    int n;
};

static size_t
rounded(const struct model *model, size_t nbytes)
{
    return (nbytes + model->alignment - 1) / model->alignment * model->alignment;
}

static void
model_allocate(struct model *model, nrm_resource *mr, size_t nbytes)
{
    bool fits = model->counts + rounded(model, nbytes) <= model->limit_nbytes;
    void *ptr = NULL;
    CHECK_STATUS(nrm_resource_allocate(mr, nbytes, 0, NULL, &ptr),
                 fits ? NRM_OK : NRM_OUT_OF_MEMORY);
    if (fits) {
        model->ptrs[model->n] = ptr;
        model->sizes[model->n++] = nbytes;
        model->counts += rounded(model, nbytes);
    }
}

static void
model_deallocate(struct model *model, nrm_resource *mr, int i)
{
    deallocate(mr, model->ptrs[i]);
    model->counts -= rounded(model, model->sizes[i]);
    model->ptrs[i] = model->ptrs[--model->n];
    model->sizes[i] = model->sizes[model->n];
}

/* It must succeed where even a copy fits, and fail where not even the growth does. */
static void
model_reallocate(struct model *model, nrm_resource *mr, int i, size_t nbytes)
{
    size_t before = rounded(model, model->sizes[i]), after = rounded(model, nbytes);
    bool must = model->counts + after <= model->limit_nbytes;
    bool can = model->counts - before + after <= model->limit_nbytes;
    nrm_status status =
        nrm_resource_reallocate(mr, model->ptrs[i], nbytes, 0, NULL, &model->ptrs[i]);
    CHECK(status == NRM_OK || status == NRM_OUT_OF_MEMORY);
    CHECK(status == NRM_OK || !must);
    CHECK(status != NRM_OK || can);
    if (status == NRM_OK) {
        model->sizes[i] = nbytes;
        model->counts += after - before;
    }
}

static const struct model_case {
    const char *name;
    nrm_resource *(*make)(void);
    size_t alignment;
    uint64_t seed;
} model_cases[] = {
    {"pool", host_pool, 256, 11},         {"pool, bytes", host_pool, 1, 12},
    {"host", host_source, 256, 13},       {"host, pages", host_source, 4096, 14},
    {"pool, pages", host_pool, 4096, 15},
};

TEST_EACH(the_account_is_the_sum_of_its_blocks, model_cases)
{
    struct model model = {.alignment = row->alignment, .limit_nbytes = 1000000};
    uint64_t state = row->seed * 0x9e3779b97f4a7c15u;
    nrm_resource *mr = limit(row->make(), model.limit_nbytes, row->alignment);
    for (int i = 0; i < 3000; i++) {
        uint64_t choice = next_random(&state) % 3;
        size_t nbytes = 1 + next_random(&state) % 150000;
        int at = model.n > 0 ? (int)(next_random(&state) % (unsigned)model.n) : 0;
        if (choice == 0 && model.n < MODEL_BLOCKS) {
            model_allocate(&model, mr, nbytes);
        }
        else if (choice == 1 && model.n > 0) {
            model_reallocate(&model, mr, at, nbytes);
        }
        else if (model.n > 0 && next_random(&state) % 2 == 0) {
            model_deallocate(&model, mr, at);
        }
        CHECK_EQ(booked(mr), model.counts);
    }
    while (model.n > 0) {
        model_deallocate(&model, mr, 0);
    }
    CHECK_EQ(booked(mr), 0);
    nrm_resource_release(mr);
}

/* ---- threads ---- */

enum { N_THREADS = 4, N_ROUNDS = 30000, N_HELD = 4, SHARE = 16384 };

static atomic_int n_at_work;

/* A source that adds up what is out, as the limiter counts, and keeps the highest
   sum. */
struct gauge {
    atomic_size_t out, highest;
};

static nrm_status
gauge_allocate(void *context, size_t nbytes, size_t alignment, nrm_stream *stream,
               void **out)
{
    struct gauge *gauge = context;
    (void)stream;
    size_t counts = nrm__align_up(nbytes, 256);
    size_t now = atomic_fetch_add(&gauge->out, counts) + counts;
    size_t highest = atomic_load(&gauge->highest);
    while (now > highest &&
           !atomic_compare_exchange_weak(&gauge->highest, &highest, now))
        ;
    *out = aligned_alloc(nrm__max(alignment, 256), counts);
    return *out != NULL ? NRM_OK : NRM_OUT_OF_MEMORY;
}

static nrm_status
gauge_deallocate(void *context, void *ptr, size_t nbytes, nrm_stream *stream)
{
    struct gauge *gauge = context;
    (void)stream;
    free(ptr);
    atomic_fetch_sub(&gauge->out, nrm__align_up(nbytes, 256));
    return NRM_OK;
}

/* Takes what it gets, fails where it must: much more is asked than there is. */
static void
is_greedy(unsigned index, void *mr)
{
    void *held[N_HELD] = {0};
    uint64_t state = (uintptr_t)&held | 1;
    (void)index;
    for (int i = 0; i < N_ROUNDS; i++) {
        void **slot = &held[i % N_HELD];
        deallocate(mr, *slot);
        *slot = NULL;
        (void)booked(mr); /* never over the limit */
        size_t nbytes = 1 + next_random(&state) % SHARE;
        nrm_status status = nrm_resource_allocate(mr, nbytes, 0, NULL, slot);
        CHECK(status == NRM_OK || status == NRM_OUT_OF_MEMORY);
        if (status == NRM_OK && next_random(&state) % 4 == 0) {
            nbytes = 1 + next_random(&state) % SHARE;
            status = nrm_resource_reallocate(mr, *slot, nbytes, 0, NULL, slot);
            CHECK(status == NRM_OK || status == NRM_OUT_OF_MEMORY);
        }
    }
    for (int i = 0; i < N_HELD; i++) {
        deallocate(mr, held[i]);
    }
}

TEST(threads_at_the_limit_never_pass_it)
{
    struct gauge gauge = {0};
    size_t limit_nbytes = 4 * SHARE;
    nrm_resource *mr = limit(callback_source(gauge_allocate, gauge_deallocate, &gauge),
                             limit_nbytes, 0);
    check_threads(N_THREADS, is_greedy, mr);
    CHECK_LE(atomic_load(&gauge.highest), limit_nbytes);
    CHECK_GT(atomic_load(&gauge.highest), limit_nbytes / 2); /* they met it */
    CHECK_EQ(booked(mr), 0);
    CHECK_OK(try_allocate(mr, limit_nbytes));
    nrm_resource_release(mr);
    CHECK_EQ(atomic_load(&gauge.out), 0);
}

/* Never holds more than its share, so it never fails. */
static void
keeps_to_its_share(nrm_resource *mr)
{
    void *held[N_HELD] = {0};
    for (int i = 0; i < 5 * N_ROUNDS; i++) {
        void **slot = &held[i % N_HELD];
        deallocate(mr, *slot);
        *slot = NULL;
        CHECK_OK(nrm_resource_allocate(mr, SHARE / N_HELD, 0, NULL, slot));
    }
    for (int i = 0; i < N_HELD; i++) {
        deallocate(mr, held[i]);
    }
    atomic_fetch_sub(&n_at_work, 1);
}

/* Asks for more than there will ever be. */
static void
asks_too_much(nrm_resource *mr)
{
    while (atomic_load(&n_at_work) != 0) {
        CHECK_STATUS(try_allocate(mr, N_THREADS * SHARE + 1), NRM_OUT_OF_MEMORY);
    }
}

static void
works_or_asks(unsigned index, void *mr)
{
    if (index < N_THREADS) {
        keeps_to_its_share(mr);
    }
    else {
        asks_too_much(mr);
    }
}

TEST(what_does_not_fit_is_in_nobodys_way)
{
    nrm_resource *mr = limit(host_pool(), N_THREADS * SHARE, 0);
    atomic_store(&n_at_work, N_THREADS);
    check_threads(N_THREADS + 2, works_or_asks, mr);
    CHECK_EQ(booked(mr), 0);
    nrm_resource_release(mr);
}

/* Elsewhere a step between a pair of exclusive instructions would undo the first; under
   Valgrind a step is one of Valgrind's. */
#if defined(__x86_64__) && !defined(CHECK__SANITIZER) && !defined(NRM_VALGRIND)
enum { CAN_STEP = true };
#else
enum { CAN_STEP = false };
#endif

/* The same without luck: a child asks, and is looked at after each of its
   instructions. */
static void
asks_too_much_and_exits(nrm_resource *mr)
{
    void *ptr = NULL;
    ptrace(PTRACE_TRACEME, 0, NULL, NULL);
    raise(SIGSTOP);
    nrm_status status = nrm_resource_allocate(mr, 100 * SHARE, 0, NULL, &ptr);
    _exit(status == NRM_OUT_OF_MEMORY ? 0 : 1);
}

/* Where the account of `mr` is: the one word behind the common part that says so. */
static const size_t *
find_account(nrm_resource *mr)
{
    const size_t *words = (const size_t *)(const void *)mr, *found = NULL;
    size_t first = (sizeof *mr + sizeof *words - 1) / sizeof *words;
    for (size_t i = first; i < mr->struct_nbytes / sizeof *words; i++) {
        if (words[i] == booked(mr)) {
            CHECK(found == NULL);
            found = &words[i];
        }
    }
    return found;
}

/* Steps through the child; the highest account seen, or 0: this cannot be done here. */
static size_t
step_through(pid_t child, const size_t *account, int *out_status)
{
    size_t highest = 0;
    while (waitpid(child, out_status, 0) == child && WIFSTOPPED(*out_status)) {
        errno = 0;
        long seen = ptrace(PTRACE_PEEKDATA, child, account, NULL);
        if (errno != 0 || ptrace(PTRACE_SINGLESTEP, child, NULL, NULL) != 0) {
            kill(child, SIGKILL);
            waitpid(child, out_status, 0);
            return 0;
        }
        highest = nrm__max(highest, (size_t)seen);
    }
    return highest;
}

TEST(what_does_not_fit_is_never_in_the_account)
{
    int status = 0;
    if (!CAN_STEP) {
        SKIP("steps through a program as it was compiled for x86-64");
    }
    nrm_resource *mr = limit(host_pool(), 50 * SHARE, 0);
    void *ptr = allocate(mr, 3 * SHARE + 7);
    const size_t *account = find_account(mr);
    REQUIRE(account != NULL);
    pid_t child = fork();
    if (child == 0) {
        asks_too_much_and_exits(mr);
    }
    size_t highest = step_through(child, account, &status);
    if (highest == 0) {
        SKIP("no other process can be stepped through here: %s", strerror(errno));
    }
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK_EQ(highest, booked(mr));
    deallocate(mr, ptr);
    nrm_resource_release(mr);
}

/* ---- in a stack ---- */

TEST(statistics_and_limits_stack_in_any_order)
{
    nrm_counts counts, above;
    void *ptr = NULL;
    nrm_resource *low = statistics_over(host_pool());
    nrm_resource *middle = limit(low, 12000, 0);
    nrm_resource *high = statistics_over(middle);
    nrm_resource *top = limit(high, 20000, 1);
    void *a = allocate(top, 3000), *b = allocate(top, 5000);
    CHECK_STATUS(nrm_resource_allocate(top, 5000, 0, NULL, &ptr), NRM_OUT_OF_MEMORY);
    REQUIRE_OK(nrm_resource_reallocate(top, a, 3100, 0, NULL, &a));
    CHECK_EQ(booked(top), 8100);
    CHECK_EQ(booked(middle), 3328 + 5120);
    for (nrm_resource *mr = top; mr != NULL; mr = mr->upstream) {
        if (mr->upstream != NULL) {
            CHECK_EQ(live_nbytes(mr), 8100);
        }
    }
    deallocate(top, a);
    deallocate(top, b);
    REQUIRE_OK(nrm_statistics_counts(low, &counts));
    CHECK_EQ(counts.current_count, 0);
    CHECK_GE(counts.peak_bytes, 8100);
    REQUIRE_OK(nrm_statistics_counts(high, &above));
    CHECK_MEM_EQ(&above, &counts, sizeof counts);
    CHECK_EQ(booked(top) + booked(middle), 0);
    nrm_resource_release(top);
}

CHECK_MAIN
