/* What holds for every resource: a line for each row of resources.def, which is made
   here as its maker says, over every source if it has an upstream.
   tests/test_conformance.py does the same from Python, where no maker is needed. */
#include <stdatomic.h>

#include "core/uses.h"
#include "fixtures.h"
#include "nrm/adaptors.h"
#include "streams.h"

#define KIB ((size_t)1024)
#define MIB (1024 * KIB)
#define GIB (1024 * MIB)

/* ---- the makers ------------------------------------------------------------------ */

typedef nrm_status make_fn(nrm_resource *upstream, nrm_resource **out);

/* One that is not defined below is NULL, and its row is skipped. */
#define RESOURCE(c_name, python_name, kind, signature, doc)                            \
    __attribute__((weak)) make_fn make_##c_name;
#include "resources.def"
#undef RESOURCE

static struct counting counting;
static nrm_CUmemoryPool others;

nrm_status
make_host(nrm_resource *upstream, nrm_resource **out)
{
    return nrm_host_create(NULL, out);
}

nrm_status
make_pinned(nrm_resource *upstream, nrm_resource **out)
{
    return nrm_pinned_create(NULL, out);
}

nrm_status
make_managed(nrm_resource *upstream, nrm_resource **out)
{
    return nrm_managed_create(NULL, out);
}

nrm_status
make_device(nrm_resource *upstream, nrm_resource **out)
{
    return nrm_device_create(NULL, out);
}

nrm_status
make_cuda_async(nrm_resource *upstream, nrm_resource **out)
{
    return nrm_cuda_async_create(NULL, out);
}

nrm_status
make_cuda_async_view(nrm_resource *upstream, nrm_resource **out)
{
    nrm_cuda_async_view_options options = NRM_OPTIONS(nrm_cuda_async_view_options);
    options.pool_handle = (uintptr_t)others;
    return nrm_cuda_async_view_create(&options, out);
}

nrm_status
make_cuda_async_managed(nrm_resource *upstream, nrm_resource **out)
{
    return nrm_cuda_async_managed_create(NULL, out);
}

nrm_status
make_system(nrm_resource *upstream, nrm_resource **out)
{
    return nrm_system_create(NULL, out);
}

nrm_status
make_sam_headroom(nrm_resource *upstream, nrm_resource **out)
{
    nrm_sam_headroom_options options = NRM_OPTIONS(nrm_sam_headroom_options);
    options.headroom = GIB;
    return nrm_sam_headroom_create(&options, out);
}

nrm_status
make_callback(nrm_resource *upstream, nrm_resource **out)
{
    *out = counting_source(&counting);
    return NRM_OK;
}

nrm_status
make_pool(nrm_resource *upstream, nrm_resource **out)
{
    return nrm_pool_create(upstream, NULL, out);
}

nrm_status
make_fixed_size(nrm_resource *upstream, nrm_resource **out)
{
    nrm_fixed_size_options options = NRM_OPTIONS(nrm_fixed_size_options);
    options.block_nbytes = 2 * MIB;
    options.n_blocks = 2;
    return nrm_fixed_size_create(upstream, &options, out);
}

nrm_status
make_binning(nrm_resource *upstream, nrm_resource **out)
{
    nrm_binning_options options = NRM_OPTIONS(nrm_binning_options);
    options.make_bins = true;
    options.min_exponent = 10;
    options.max_exponent = 13;
    return nrm_binning_create(upstream, &options, out);
}

nrm_status
make_arena(nrm_resource *upstream, nrm_resource **out)
{
    nrm_arena_options options = NRM_OPTIONS(nrm_arena_options);
    options.nbytes = 64 * MIB;
    return nrm_arena_create(upstream, &options, out);
}

nrm_status
make_statistics(nrm_resource *upstream, nrm_resource **out)
{
    return nrm_statistics_create(upstream, out);
}

nrm_status
make_limiting(nrm_resource *upstream, nrm_resource **out)
{
    nrm_limiting_options options = NRM_OPTIONS(nrm_limiting_options);
    options.allocation_limit = 4 * GIB;
    return nrm_limiting_create(upstream, &options, out);
}

nrm_status
make_aligned(nrm_resource *upstream, nrm_resource **out)
{
    return nrm_aligned_create(upstream, NULL, out);
}

nrm_status
make_prefetch(nrm_resource *upstream, nrm_resource **out)
{
    return nrm_prefetch_create(upstream, out);
}

static nrm_status
give_up(void *context, size_t nbytes, bool *out_retry)
{
    *out_retry = false;
    return NRM_OK;
}

nrm_status
make_failure_callback(nrm_resource *upstream, nrm_resource **out)
{
    nrm_failure_callback_options options = NRM_OPTIONS(nrm_failure_callback_options);
    options.callback = give_up;
    return nrm_failure_callback_create(upstream, &options, out);
}

nrm_status
make_tracking(nrm_resource *upstream, nrm_resource **out)
{
    return nrm_tracking_create(upstream, NULL, out);
}

nrm_status
make_logging(nrm_resource *upstream, nrm_resource **out)
{
    nrm_logging_options options = NRM_OPTIONS(nrm_logging_options);
    options.path = "/dev/null";
    return nrm_logging_create(upstream, &options, out);
}

static const struct row {
    const char *name;
    make_fn *make;
    const char *kind;
} rows[] = {
#define RESOURCE(c_name, python_name, kind, signature, doc)                            \
    {#c_name, make_##c_name, kind},
#include "resources.def"
#undef RESOURCE
};

/* ---- the machine ----------------------------------------------------------------- */

/* Two devices which read ordinary memory; what the rows draw on is made anew. */
static void
start(bool checks)
{
    struct nrm_cudasim_config config = checks ? simulator_checked()
                                              : simulator_config();
    uint64_t all = UINT64_MAX;
    config.devices = 2;
    simulator_start(&config);
    for (int i = 0; i < 2; i++) {
        sim.set_attribute(i, NRM_CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, 1);
    }
    CHECK_OK(nrm__cuda_init(NULL));
    make_current(0);
    CHECK_EQ(cuda.cuDeviceGetDefaultMemPool(&others, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemPoolSetAttribute(others, NRM_CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                                        &all),
             NRM_CUDA_SUCCESS);
    counting = (struct counting){0};
}

static void
stop(void)
{
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    for (int i = 0; i < 2000 && !nrm__retired_is_empty(); i++) {
        (void)nrm__retired_drain(UINT64_MAX);
        usleep(1000); /* the background thread may hold the last one */
    }
    CHECK(nrm__retired_is_empty());
    CHECK_EQ(atomic_load(&counting.n_live), 0u);
    CHECK_EQ(simulator_count(NRM_CUDASIM_POOL_ALLOCATIONS), 0u);
    CHECK_EQ(simulator_count(NRM_CUDASIM_ADVICE), 0u);
    cuda.cuCtxSetCurrent(NULL);
    simulator_check_faults();
}

static void
check_is_empty(nrm_resource *mr, const char *over)
{
    nrm_statistics statistics;
    CHECK_OK(nrm_resource_statistics(mr, &statistics));
    CHECK_MSG(statistics.current_count == 0 && statistics.current_bytes == 0 &&
                  statistics.errors == 0,
              "over %s: %" PRId64 " blocks, %" PRId64 " B, %" PRId64 " errors", over,
              statistics.current_count, statistics.current_bytes, statistics.errors);
}

/* Calls `part` with the resource of a row: over each source, if it has an upstream. */
static void
with_each(const struct row *row, bool checks, void (*part)(nrm_resource *mr))
{
    bool is_source = strcmp(row->kind, "upstream") != 0;
    if (row->make == NULL) {
        SKIP("there is no maker here; tests/test_conformance.py has the row");
    }
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        nrm_resource *source = NULL, *mr = NULL;
        if (is_source ? &rows[i] != row : strcmp(rows[i].kind, "upstream") == 0) {
            continue;
        }
        start(checks);
        if (!is_source) {
            REQUIRE_OK(rows[i].make(NULL, &source));
        }
        if (CHECK_OK(row->make(source, &mr))) {
            part(mr);
            check_is_empty(mr, rows[i].name);
        }
        nrm_resource_release(mr);
        nrm_resource_release(source);
        stop();
    }
}

static nrm_CUdeviceptr
take(nrm_resource *mr, size_t nbytes, nrm_stream *stream)
{
    void *ptr = NULL;
    CHECK_OK(nrm_resource_allocate(mr, nbytes, 0, stream, &ptr));
    return (nrm_CUdeviceptr)(uintptr_t)ptr;
}

static void
give(nrm_resource *mr, nrm_CUdeviceptr ptr, nrm_stream *stream)
{
    CHECK_OK(nrm_resource_deallocate(mr, (void *)(uintptr_t)ptr, 0, stream));
}

/* ---- requests -------------------------------------------------------------------- */

static size_t
largest_of(nrm_resource *mr)
{
    const char *name = nrm_resource_class_name(mr);
    bool is_pinned = nrm_resource_kind(mr) ==
                     NRM_KIND_PINNED;         /* touched page by page */
    bool is_heap = counting.n_allocated != 0; /* of the C heap */
    return strcmp(name, "FixedSizeMemoryResource") == 0 ? MIB
           : strcmp(name, "ArenaMemoryResource") == 0   ? 32 * MIB
           : is_pinned || is_heap                       ? 64 * MIB
                                                        : GIB;
}

static void
check_sizes(nrm_resource *mr)
{
    static const size_t sizes[] = {4, KIB, MIB, 32 * MIB, GIB};
    nrm_CUdeviceptr ptr[5];
    void *nothing = &ptr;
    size_t alignment = nrm_resource_kind(mr) == NRM_KIND_HOST ? 64 : 256;
    CHECK_OK(nrm_resource_allocate(mr, 0, 0, NULL, &nothing));
    CHECK_EQ(nothing, NULL);
    CHECK_OK(nrm_resource_deallocate(mr, NULL, 0, NULL));
    int n = 0;
    ptr[n] = take(mr, sizes[n], NULL);
    for (n = 1; n < 5 && sizes[n] <= largest_of(mr); n++) {
        ptr[n] = take(mr, sizes[n], NULL);
    }
    for (int i = 0; i < n; i++) {
        CHECK_EQ(ptr[i] % alignment, 0u);
        for (int j = 0; j < i; j++) {
            CHECK(ptr[i] + sizes[i] <= ptr[j] || ptr[j] + sizes[j] <= ptr[i]);
        }
    }
    for (int i = 0; i < n; i++) {
        give(mr, ptr[i], NULL);
    }
}

TEST_EACH(sizes_from_nothing_to_a_gibibyte, rows)
{
    with_each(row, false, check_sizes);
}

static void
check_alignments(nrm_resource *mr)
{
    for (size_t alignment = 1; alignment <= 64 * KIB; alignment *= 4) {
        void *ptr = NULL;
        nrm_status status = nrm_resource_allocate(mr, 100, alignment, NULL, &ptr);
        if (status == NRM_OK) {
            CHECK_ALIGNED(ptr, alignment);
            CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
        }
        else { /* refused, and never ignored */
            CHECK(status == NRM_NOT_SUPPORTED || status == NRM_OUT_OF_MEMORY);
            CHECK_GT(alignment, 64u);
        }
    }
}

TEST_EACH(an_alignment_is_honoured_or_refused, rows)
{
    with_each(row, false, check_alignments);
}

static void
check_too_much(nrm_resource *mr)
{
    void *ptr = NULL;
    nrm_stream *streams[] = {NULL, nrm_stream_default()};
    for (int i = 0; i < 2; i++) {
        CHECK_STATUS(nrm_resource_allocate(mr, (size_t)1 << 50, 0, streams[i], &ptr),
                     NRM_OUT_OF_MEMORY);
        CHECK_EQ(ptr, NULL);
        give(mr, take(mr, MIB, streams[i]), streams[i]);
    }
}

TEST_EACH(more_than_there_is_leaves_it_usable, rows)
{
    with_each(row, false, check_too_much);
}

/* Each block bears its own number at both ends, while it lives. */
static void
check_random_mix(nrm_resource *mr)
{
    enum { N = 24 };
    nrm_CUdeviceptr ptr[N] = {0};
    size_t nbytes[N];
    bool on_host = nrm_kind_is_host_accessible(nrm_resource_kind(mr));
    size_t most = largest_of(mr) < 5 * MIB ? largest_of(mr) : 5 * MIB;
    uint64_t state = 7;
    for (int i = 0; i < 200; i++) {
        state = state * UINT64_C(6364136223846793005) + 1442695040888963407;
        int k = (int)(state >> 33) % N;
        if (ptr[k] == 0) {
            nbytes[k] = 1 + (size_t)(state >> 20) % (i % 8 == 0 ? most : 32 * KIB);
            ptr[k] = take(mr, nbytes[k], NULL);
            if (on_host) {
                *(char *)(uintptr_t)ptr[k] = (char)k;
                *(char *)(uintptr_t)(ptr[k] + nbytes[k] - 1) = (char)k;
            }
            continue;
        }
        for (int j = 0; j < N; j++) {
            CHECK(j == k || ptr[j] == 0 || ptr[j] + nbytes[j] <= ptr[k] ||
                  ptr[k] + nbytes[k] <= ptr[j]);
        }
        CHECK(!on_host || *(char *)(uintptr_t)(ptr[k] + nbytes[k] - 1) == (char)k);
        give(mr, ptr[k], NULL);
        ptr[k] = 0;
    }
    for (int k = 0; k < N; k++) {
        give(mr, ptr[k], NULL);
    }
}

TEST_EACH(live_blocks_never_overlap, rows)
{
    with_each(row, false, check_random_mix);
}

/* ---- threads --------------------------------------------------------------------- */

enum { N_THREADS = 4, N_ROUNDS = 40 };

static _Atomic(nrm_CUdeviceptr) handed[N_THREADS];

struct thread {
    pthread_t id;
    nrm_resource *mr;
    int index;
};

/* Takes a block, puts it where another thread finds it, and gives back what it
   finds. */
static void *
exchange_blocks(void *argument)
{
    const struct thread *self = argument;
    nrm_stream *mine = NULL;
    CHECK_OK(nrm_stream_per_thread(&mine));
    for (int i = 0; i < N_ROUNDS; i++) {
        nrm_stream *streams[] = {NULL, nrm_stream_default(), mine};
        size_t nbytes = 1 + (size_t)(i * 977 + self->index * 131) % (64 * KIB);
        nrm_CUdeviceptr ptr = take(self->mr, nbytes, streams[i % 3]);
        ptr = atomic_exchange(&handed[(self->index + i) % N_THREADS], ptr);
        give(self->mr, ptr, streams[(i + self->index) % 3]);
    }
    nrm_stream_release(mine);
    return NULL;
}

static void
check_exchange(nrm_resource *mr)
{
    struct thread threads[N_THREADS];
    for (int i = 0; i < N_THREADS; i++) {
        threads[i] = (struct thread){.mr = mr, .index = i};
        pthread_create(&threads[i].id, NULL, exchange_blocks, &threads[i]);
    }
    for (int i = 0; i < N_THREADS; i++) {
        pthread_join(threads[i].id, NULL);
    }
    for (int i = 0; i < N_THREADS; i++) {
        give(mr, atomic_exchange(&handed[i], 0), NULL);
    }
}

TEST_EACH(four_threads_give_back_what_others_took, rows)
{
    with_each(row, false, check_exchange);
}

/* ---- streams --------------------------------------------------------------------- */

/* Same, other, default and per-thread, and none at all: the host. The checker sees
   whoever touches memory too early, the host with what it is handed out included. */
static void
check_streams(nrm_resource *mr)
{
    bool is_host = nrm_resource_kind(mr) == NRM_KIND_HOST;
    nrm_stream *streams[5] = {NULL, nrm_stream_default(), new_stream(), new_stream()};
    CHECK_OK(nrm_stream_per_thread(&streams[4]));
    for (int i = 0; i < 50; i++) {
        nrm_stream *stream = streams[i % 2 == 0 ? i / 2 % 5 : i / 10];
        nrm_CUdeviceptr ptr = take(mr, 40 * KIB, stream);
        if (stream != NULL && !is_host) {
            CHECK_EQ(cuda.cuMemsetD8Async(ptr, 1, 40 * KIB, handle_of(stream)),
                     NRM_CUDA_SUCCESS);
        }
        give(mr, ptr, stream);
    }
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    CHECK_EQ(simulator_tell_races(), 0u);
    for (int i = 2; i < 5; i++) {
        nrm_stream_release(streams[i]);
    }
}

TEST_EACH(streams_and_the_host_follow_each_other, rows)
{
    with_each(row, true, check_streams);
}

CHECK_MAIN
