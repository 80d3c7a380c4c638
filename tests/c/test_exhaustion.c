/* What a pool does before it says that there is no memory, and what it says then. */
#include <string.h>

#include "base/bits.h"
#include "copies.h"
#include "core/uses.h"
#include "nrm/options.h"
#include "pools/pool.h"

/* ---- an upstream that fails at its n-th call ---- */

struct failing {
    struct counting memory;
    size_t n_calls;
    size_t fails_at; /* counted from 1; 0: never */
    bool for_good;
    size_t n_failed;
};

static nrm_status
failing_allocate(void *context, size_t nbytes, size_t alignment, nrm_stream *stream,
                 void **out)
{
    struct failing *failing = context;
    failing->n_calls++;
    if (failing->fails_at != 0 &&
        (failing->for_good ? failing->n_calls >= failing->fails_at
                           : failing->n_calls == failing->fails_at)) {
        failing->n_failed++;
        return NRM_OUT_OF_MEMORY;
    }
    return counting_allocate(&failing->memory, nbytes, alignment, stream, out);
}

static nrm_status
failing_deallocate(void *context, void *ptr, size_t nbytes, nrm_stream *stream)
{
    struct failing *failing = context;
    return counting_deallocate(&failing->memory, ptr, nbytes, stream);
}

static nrm_resource *
pool_over_failing(struct failing *failing, size_t maximum_nbytes)
{
    return pool_over(callback_source(failing_allocate, failing_deallocate, failing),
                     maximum_nbytes);
}

/* ---- every call of the upstream fails, each in a run of its own ---- */

#define N_SLOTS 24
#define N_STEPS 200

struct slot {
    void *ptr;
    size_t nbytes;
    unsigned key;
};

static size_t
random_nbytes(uint64_t *state)
{
    static const size_t bounds[] = {500, 200000, 3000000, 4000000, 5000000};
    return 1 + next_random(state) % bounds[next_random(state) % 5];
}

/* A request after which, when it failed, the pool is whole and the same request works
   as soon as the upstream does. */
static void
request(nrm_resource *mr, struct failing *failing, struct slot *slot, size_t nbytes)
{
    void *ptr = NULL;
    bool resizes = slot->ptr != NULL;
    size_t fails_at = failing->fails_at;
    nrm_status status =
        resizes ? nrm_resource_reallocate(mr, slot->ptr, nbytes, 0, NULL, &ptr)
                : nrm_resource_allocate(mr, nbytes, 0, NULL, &ptr);
    if (status != NRM_OK) {
        CHECK_EQ(status, NRM_OUT_OF_MEMORY);
        CHECK_GT(failing->n_failed, 0u);
        CHECK_STR_HAS(nrm_last_error()->message, "the callback that allocates memory");
        nrm__pool_check(mr);
        CHECK(!resizes ||
              has_pattern(slot->ptr, slot->nbytes, slot->key, slot->nbytes));
        failing->fails_at = 0;
        status = resizes ? nrm_resource_reallocate(mr, slot->ptr, nbytes, 0, NULL, &ptr)
                         : nrm_resource_allocate(mr, nbytes, 0, NULL, &ptr);
        failing->fails_at = failing->for_good ? fails_at : 0;
    }
    REQUIRE_OK(status);
    CHECK(!resizes ||
          has_pattern(ptr, nrm__min(nbytes, slot->nbytes), slot->key, slot->nbytes));
    *slot = (struct slot){.ptr = ptr, .nbytes = nbytes, .key = slot->key + 1};
    write_pattern(ptr, nbytes, slot->key);
}

static void
empty(nrm_resource *mr, struct slot *slot)
{
    CHECK(has_pattern(slot->ptr, slot->nbytes, slot->key, slot->nbytes));
    CHECK_OK(nrm_resource_deallocate(mr, slot->ptr, 0, NULL));
    slot->ptr = NULL;
}

static void
work(nrm_resource *mr, struct failing *failing)
{
    struct slot slots[N_SLOTS] = {{0}};
    uint64_t state = 88172645463325252u;
    for (int step = 0; step < N_STEPS; step++) {
        struct slot *slot = &slots[next_random(&state) % N_SLOTS];
        if (slot->ptr != NULL && next_random(&state) % 3 != 0) {
            empty(mr, slot);
        }
        else {
            request(mr, failing, slot, random_nbytes(&state));
        }
        if (step % 20 == 19) {
            CHECK_OK(nrm_resource_trim(mr, 0, NULL));
        }
    }
    for (int i = 0; i < N_SLOTS; i++) {
        if (slots[i].ptr != NULL) {
            empty(mr, &slots[i]);
        }
    }
}

static const struct failure {
    const char *name;
    bool for_good;
    size_t maximum_nbytes;
} failures[] = {
    {"once", false, 0},
    {"for good, with a limit", true, 200 * NRM__MIB},
};

TEST_EACH(every_upstream_call_may_fail, failures)
{
    size_t n_failed = 1, n = 1;
    REQUIRE_OK(nrm_option_set(NRM_OPT_SEGMENT_NBYTES, "2 MiB")); /* many calls */
    for (; n_failed != 0; n++) {
        struct failing failing = {.fails_at = n, .for_good = row->for_good};
        nrm_resource *mr = pool_over_failing(&failing, row->maximum_nbytes);
        work(mr, &failing);
        nrm__pool_check(mr);
        CHECK_EQ(live_nbytes(mr), 0);
        nrm_resource_release(mr);
        CHECK_EQ(atomic_load(&failing.memory.n_live), 0u);
        n_failed = failing.n_failed;
    }
    REQUIRE_OK(nrm_option_set(NRM_OPT_SEGMENT_NBYTES, "64 MiB"));
    CHECK_GT(n, 20u);
    NOTE("%zu calls failed", n - 2);
}

TEST(what_is_free_serves_while_the_upstream_fails)
{
    struct failing failing = {0};
    nrm_resource *mr = pool_over_failing(&failing, NRM__GIB);
    void *ptrs[8], *ptr = NULL;
    for (int i = 0; i < 8; i++) {
        ptrs[i] = allocate(mr, NRM__MIB);
    }
    failing.for_good = true;
    failing.fails_at = 1;
    CHECK_STATUS(nrm_resource_allocate(mr, 2 * NRM__MIB, 0, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK_OK(nrm_resource_deallocate(mr, ptrs[3], 0, NULL));
    CHECK_OK(nrm_resource_deallocate(mr, ptrs[4], 0, NULL));
    CHECK_OK(nrm_resource_allocate(mr, 2 * NRM__MIB, 0, NULL, &ptr));
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    for (int i = 0; i < 8; i++) {
        if (i != 3 && i != 4) {
            CHECK_OK(nrm_resource_deallocate(mr, ptrs[i], 0, NULL));
        }
    }
    nrm__pool_check(mr);
    nrm_resource_release(mr);
}

/* ---- and every call of the driver ---- */

static const struct driver_failure {
    const char *name;
    const char *call;
    uint64_t times; /* 0: from then on always */
} driver_failures[] = {
    {"a registration", "cuMemHostRegister", 1},
    {"all registrations", "cuMemHostRegister", 0},
    {"a record", "cuCtxRecordEvent", 1},
    {"all records", "cuCtxRecordEvent", 0},
    {"an event", "cuEventCreate", 1},
    {"all events", "cuEventCreate", 0},
};

static void
plan(const struct driver_failure *failure, uint64_t nth)
{
    CHECK_EQ(sim.fail(failure->call, nth, NRM_CUDA_ERROR_OUT_OF_MEMORY, failure->times),
             0);
}

/* A request that, when it fails, leaves the pool whole and works as soon as the driver
   does, and the GPU is done. */
static void *
request_of_driver(nrm_resource *mr, struct copies *copies,
                  const struct driver_failure *failure, size_t nbytes)
{
    void *ptr = NULL;
    if (nrm_resource_allocate(mr, nbytes, 0, NULL, &ptr) == NRM_OK) {
        return ptr;
    }
    CHECK_NE(nrm_last_error()->status, NRM_OK);
    CHECK_NE(nrm_last_error()->message[0], '\0');
    nrm__pool_check(mr);
    CHECK_EQ(sim.fail(failure->call, 0, 0, 0), 0);
    CHECK_EQ(cuda.cuStreamSynchronize(copies->stream), NRM_CUDA_SUCCESS);
    CHECK_OK(nrm_resource_allocate(mr, nbytes, 0, NULL, &ptr));
    if (failure->times == 0) {
        plan(failure, 1);
    }
    return ptr;
}

/* Segments come and go, and blocks are parked that the GPU reads. */
static void
work_with_driver(nrm_resource *mr, struct copies *copies,
                 const struct driver_failure *failure)
{
    void *ptrs[4] = {0};
    uint64_t state = 88172645463325252u;
    for (int step = 0; step < 40; step++) {
        void **ptr = &ptrs[next_random(&state) % 4];
        if (*ptr == NULL) {
            size_t nbytes = COPIES_NBYTES + next_random(&state) % (8 * NRM__MIB);
            *ptr = request_of_driver(mr, copies, failure, nbytes);
            REQUIRE(*ptr != NULL);
            continue;
        }
        CHECK_EQ(cuda.cuMemcpyHtoDAsync(copies->device, *ptr, COPIES_NBYTES,
                                        copies->stream),
                 NRM_CUDA_SUCCESS);
        CHECK_OK(nrm_resource_deallocate(mr, *ptr, 0, NULL));
        *ptr = NULL;
    }
    for (int i = 0; i < 4; i++) {
        CHECK_OK(nrm_resource_deallocate(mr, ptrs[i], 0, NULL));
    }
}

TEST_EACH(every_driver_call_may_fail, driver_failures)
{
    uint64_t n_calls = 1, n = 1;
    for (; n_calls >= n && n < 40; n++) {
        nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
        struct copies copies = copies_begin(&copies_kinds[0]);
        nrm_resource *mr = NULL;
        options.maximum_nbytes = 64 * NRM__MIB;
        REQUIRE_OK(nrm_pool_create(copies.source, &options, &mr));
        uint64_t before = sim.call_count(row->call);
        plan(row, n);
        work_with_driver(mr, &copies, row);
        n_calls = sim.call_count(row->call) - before;
        CHECK_EQ(sim.fail(row->call, 0, 0, 0), 0);
        CHECK_EQ(cuda.cuStreamSynchronize(copies.stream), NRM_CUDA_SUCCESS);
        copies_end(&copies, mr);
    }
    CHECK_GT(n, 2u); /* at least one has failed: an event serves again */
    NOTE("%d calls failed", (int)n - 2);
}

static void *
let_registrations_go_later(void *copies)
{
    nrm__sleep_ns(600000000); /* longer than all attempts take */
    CHECK_EQ(sim.fail("cuMemHostRegister", 0, 0, 0), 0);
    CHECK_EQ(sim.fail("cuMemHostAlloc", 0, 0, 0), 0);
    copies_let_go(copies);
    return NULL;
}

static const struct awaited {
    const char *name;
    bool is_parked; /* else free: the pool gives it back, and it is retired */
} awaiteds[] = {{"parked", true}, {"retired", false}};

/* Nothing more can be locked until the GPU is done with what the pool itself has. */
TEST_EACH(a_pool_waits_for_what_it_can_give_back_then, awaiteds)
{
    struct copies copies = copies_begin(&copies_kinds[0]);
    nrm_resource *mr = NULL;
    pthread_t thread;
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    options.wait_limit_ns = UINT64_C(5000000000);
    REQUIRE_OK(nrm_pool_create(copies.source, &options, &mr));
    void *large = allocate(mr, 100 * NRM__MIB), *small = allocate(mr, 2 * NRM__MIB);
    void *other = NULL, *wanted = NULL;
    if (!row->is_parked) {
        CHECK_OK(nrm_resource_deallocate(mr, large, 0, NULL));
        CHECK_OK(nrm_resource_deallocate(mr, small, 0, NULL));
        other = allocate(mr, 63 * NRM__MIB + 1); /* promotes both */
    }
    copies_hold(&copies);
    CHECK_EQ(cuda.cuMemcpyHtoDAsync(copies.device, row->is_parked ? large : other,
                                    COPIES_NBYTES, copies.stream),
             NRM_CUDA_SUCCESS);
    if (row->is_parked) {
        CHECK_OK(nrm_resource_deallocate(mr, large, 0, NULL));
        CHECK_OK(nrm_resource_deallocate(mr, small, 0, NULL));
    }
    nrm_statistics statistics = {0};
    CHECK_OK(nrm_resource_statistics(mr, &statistics));
    CHECK_EQ(statistics.parked_bytes != 0, row->is_parked);
    CHECK_EQ(sim.fail("cuMemHostRegister", 1, NRM_CUDA_ERROR_OUT_OF_MEMORY, 0), 0);
    CHECK_EQ(sim.fail("cuMemHostAlloc", 1, NRM_CUDA_ERROR_OUT_OF_MEMORY, 0), 0);
    pthread_create(&thread, NULL, let_registrations_go_later, &copies);
    CHECK_OK(nrm_resource_allocate(mr, 200 * NRM__MIB, 0, NULL, &wanted));
    pthread_join(thread, NULL);
    CHECK_OK(nrm_resource_deallocate(mr, wanted, 0, NULL));
    CHECK_OK(nrm_resource_deallocate(mr, other, 0, NULL));
    copies_end(&copies, mr);
}

/* ---- what is tried before ---- */

#define LIMIT (16 * NRM__MIB)

static nrm_resource *pool;
static size_t kept_nbytes;
static pthread_barrier_t barrier;

/* Fills the pool with blocks of one size and frees them; this thread keeps some. */
static void
fill_and_free(size_t nbytes)
{
    static void *ptrs[LIMIT / 64];
    size_t n = 0;
    while (n < LIMIT / 64 &&
           nrm_resource_allocate(pool, nbytes, 0, NULL, &ptrs[n]) == NRM_OK) {
        n++;
    }
    CHECK_GT(n * nrm__max(nbytes, 64), LIMIT / 2);
    for (size_t i = 0; i < n; i++) {
        CHECK_OK(nrm_resource_deallocate(pool, ptrs[i], 0, NULL));
    }
}

static void *
fill_and_wait(void *unused)
{
    (void)unused;
    fill_and_free(kept_nbytes);
    pthread_barrier_wait(&barrier);
    pthread_barrier_wait(&barrier);
    return NULL;
}

static const struct kept {
    const char *name;
    size_t nbytes;
} kepts[] = {{"the smallest cells", 1},
             {"cells", 1000},
             {"the largest cells", 8192},
             {"small blocks", 20000},
             {"large blocks", 500000}};

TEST_EACH(a_full_pool_gets_back_what_this_thread_keeps, kepts)
{
    pool = pool_over(host_source(), LIMIT);
    fill_and_free(row->nbytes);
    void *ptr = NULL;
    CHECK_OK(nrm_resource_allocate(pool, LIMIT, 0, NULL, &ptr));
    CHECK_OK(nrm_resource_deallocate(pool, ptr, 0, NULL));
    nrm__pool_check(pool);
    nrm_resource_release(pool);
}

TEST_EACH(a_full_pool_gets_back_what_other_threads_keep, kepts)
{
    pthread_t thread;
    void *ptr = NULL;
    pool = pool_over(host_source(), LIMIT);
    kept_nbytes = row->nbytes;
    pthread_barrier_init(&barrier, NULL, 2);
    pthread_create(&thread, NULL, fill_and_wait, NULL);
    pthread_barrier_wait(&barrier);
    CHECK_OK(nrm_resource_allocate(pool, LIMIT, 0, NULL, &ptr));
    CHECK_OK(nrm_resource_deallocate(pool, ptr, 0, NULL));
    nrm__pool_check(pool);
    pthread_barrier_wait(&barrier);
    pthread_join(thread, NULL);
    pthread_barrier_destroy(&barrier);
    nrm_resource_release(pool);
}

/* The same for cells: the chunk that is missing comes from chunks of other classes. */
TEST(cells_of_one_class_make_room_for_those_of_another)
{
    pool = pool_over(host_source(), LIMIT);
    for (int round = 0; round < 3; round++) {
        fill_and_free(64);
        fill_and_free(8192);
        fill_and_free(700);
    }
    nrm__pool_check(pool);
    CHECK_EQ(live_nbytes(pool), 0);
    nrm_resource_release(pool);
}

TEST(a_block_that_grows_in_a_full_pool_uses_free_memory)
{
    REQUIRE_OK(nrm_option_set(NRM_OPT_SEGMENT_NBYTES, "2 MiB"));
    nrm_resource *mr = pool_over(host_source(), 15 * NRM__MIB);
    void *grown = allocate(mr, 4 * NRM__MIB), *other = allocate(mr, 10 * NRM__MIB);
    write_pattern(grown, 4 * NRM__MIB, 5);
    CHECK_OK(nrm_resource_deallocate(mr, other, 0, NULL));
    CHECK_OK(nrm_resource_reallocate(mr, grown, 8 * NRM__MIB, 0, NULL, &grown));
    CHECK(has_pattern(grown, 4 * NRM__MIB, 5, 4 * NRM__MIB));
    nrm__pool_check(mr);
    CHECK_OK(nrm_resource_deallocate(mr, grown, 0, NULL));
    nrm_resource_release(mr);
    REQUIRE_OK(nrm_option_set(NRM_OPT_SEGMENT_NBYTES, "64 MiB"));
}

static void *
let_go_later(void *copies)
{
    nrm__sleep_ns(40000000);
    copies_let_go(copies);
    return NULL;
}

/* After the wait the memory is there, but in two segments. */
TEST_EACH(two_parked_segments_make_room_for_one_of_both_sizes, copies_kinds)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    struct copies copies = copies_begin(row);
    nrm_resource *mr = NULL;
    pthread_t thread;
    options.maximum_nbytes = 4 * NRM__MIB;
    options.on_exhausted = NRM_ON_EXHAUSTED_WAIT;
    REQUIRE_OK(nrm_pool_create(copies.source, &options, &mr));
    void *first = allocate(mr, 2 * NRM__MIB), *second = allocate(mr, 2 * NRM__MIB);
    CHECK_EQ(reserved_nbytes(mr), 4 * (int64_t)NRM__MIB);
    copies_hold(&copies);
    CHECK_EQ(cuda.cuMemcpyHtoDAsync(copies.device, first, COPIES_NBYTES, copies.stream),
             NRM_CUDA_SUCCESS);
    CHECK_OK(nrm_resource_deallocate(mr, first, 0, NULL));
    CHECK_OK(nrm_resource_deallocate(mr, second, 0, NULL));
    pthread_create(&thread, NULL, let_go_later, &copies);
    void *both = NULL;
    CHECK_OK(nrm_resource_allocate(mr, 4 * NRM__MIB, 0, NULL, &both));
    pthread_join(thread, NULL);
    CHECK_OK(nrm_resource_deallocate(mr, both, 0, NULL));
    copies_end(&copies, mr);
}

/* ---- what is said then ---- */

TEST(the_error_of_a_full_pool_has_all_the_numbers)
{
    nrm_resource *mr = pool_over(host_source(), 16 * NRM__MIB);
    void *ptrs[16], *ptr = NULL;
    for (int i = 0; i < 16; i++) {
        ptrs[i] = allocate(mr, NRM__MIB);
    }
    for (int i = 0; i < 16; i += 2) { /* this thread keeps them first */
        CHECK_OK(nrm_resource_deallocate(mr, ptrs[i], 0, NULL));
    }
    CHECK_STATUS(nrm_resource_allocate(mr, 3 * NRM__MIB, 0, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK_STR_EQ(
        nrm_last_error()->message,
        "the pool is full: 3 MiB asked, limit 16 MiB, 16 MiB reserved, 8 MiB in "
        "use, largest free block 1 MiB, 0 B freed but not done on the GPU");
    CHECK_EQ(nrm_last_error()->requested_nbytes, 3 * NRM__MIB);
    for (int i = 1; i < 16; i += 2) {
        CHECK_OK(nrm_resource_deallocate(mr, ptrs[i], 0, NULL));
    }
    nrm_resource_release(mr);
}

TEST(the_upstreams_own_words_come_first)
{
    struct counting counting = {.limit_nbytes = 8 * NRM__MIB};
    nrm_resource *mr = pool_over(counting_source(&counting), NRM__GIB);
    void *first = allocate(mr, NRM__MIB), *second = NULL;
    CHECK_STATUS(nrm_resource_allocate(mr, 9 * NRM__MIB, 0, NULL, &second),
                 NRM_OUT_OF_MEMORY);
    CHECK_STR_EQ(
        nrm_last_error()->message,
        "the callback that allocates memory failed for 9 MiB: out of memory; the "
        "pool: 9 MiB asked, limit 1 GiB, 8 MiB reserved, 1 MiB in use, largest free "
        "block 7 MiB, 0 B freed but not done on the GPU");
    CHECK_OK(nrm_resource_deallocate(mr, first, 0, NULL));
    nrm_resource_release(mr);
}

TEST(the_systems_error_keeps_its_number)
{
    nrm_resource *mr = pool_over(host_source(), 0);
    void *ptr = NULL;
    CHECK_STATUS(nrm_resource_allocate(mr, (size_t)1 << 50, 0, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK_STR_HAS(nrm_last_error()->message, "the system refused to map 1 PiB");
    CHECK_STR_HAS(nrm_last_error()->message, "; the pool: 1 PiB asked, no limit, 0 B");
    CHECK_STR_EQ(nrm_last_error()->native_name, "ENOMEM");
    CHECK_NE(nrm_last_error()->native_code, 0);
    nrm_resource_release(mr);
}

TEST(an_initial_size_that_cannot_be_had_is_explained)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    nrm_resource *host = host_source(), *mr = NULL;
    options.initial_nbytes = (size_t)1 << 50;
    CHECK_STATUS(nrm_pool_create(host, &options, &mr), NRM_OUT_OF_MEMORY);
    CHECK_STR_HAS(nrm_last_error()->message, "the system refused to map 1 PiB");
    CHECK_STR_HAS(nrm_last_error()->message, "; the pool: 1 PiB asked");
    nrm_resource_release(host);
}

/* ---- many at once ---- */

#define N_THREADS 4
#define N_ROUNDS 400

static atomic_size_t n_refused;

static void *
struggle(void *seed)
{
    uint64_t state = (uintptr_t)seed;
    struct slot slots[4] = {{0}};
    for (int round = 0; round < N_ROUNDS; round++) {
        struct slot *slot = &slots[next_random(&state) % 4];
        if (slot->ptr != NULL) {
            empty(pool, slot);
            continue;
        }
        slot->nbytes =
            1 + next_random(&state) % (next_random(&state) % 2 ? LIMIT / 4 : 9000);
        nrm_status status =
            nrm_resource_allocate(pool, slot->nbytes, 0, NULL, &slot->ptr);
        if (status == NRM_OK) {
            slot->key = (unsigned)next_random(&state);
            write_pattern(slot->ptr, slot->nbytes, slot->key);
        }
        else {
            CHECK_EQ(status, NRM_OUT_OF_MEMORY);
            CHECK_STR_HAS(nrm_last_error()->message, "limit 16 MiB");
            atomic_fetch_add(&n_refused, 1);
            slot->ptr = NULL;
        }
    }
    for (int i = 0; i < 4; i++) {
        if (slots[i].ptr != NULL) {
            empty(pool, &slots[i]);
        }
    }
    return NULL;
}

TEST(threads_that_fight_for_a_full_pool_come_to_an_end)
{
    pthread_t threads[N_THREADS];
    pool = pool_over(host_source(), LIMIT);
    for (uintptr_t i = 0; i < N_THREADS; i++) {
        pthread_create(&threads[i], NULL, struggle, (void *)(i + 1));
    }
    for (int i = 0; i < N_THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK_GT(atomic_load(&n_refused), 0u);
    nrm__pool_check(pool);
    CHECK_EQ(live_nbytes(pool), 0);
    void *ptr = allocate(pool, LIMIT);
    CHECK_OK(nrm_resource_deallocate(pool, ptr, 0, NULL));
    nrm_resource_release(pool);
}

CHECK_MAIN
