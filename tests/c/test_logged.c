/* Requests past a log: on the short way of what is behind it, each noted and counted
   once. */
#include "base/bits.h"
#include "core/log.h"
#include "core/ops.h"
#include "cuda/context.h"
#include "log_rows.h"
#include "simulator.h"
#include "workers.h"

static char path[64];

static void
finish(nrm_resource *mr, struct rows *rows)
{
    nrm_resource_release(mr);
    free(rows->rows);
    unlink(path);
}

/* ---- stacked ---- */

static nrm_resource *
with_limit(nrm_resource *upstream)
{
    return limiting_over(upstream, NRM__MIB);
}

static nrm_resource *
with_log(nrm_resource *upstream)
{
    return log_over(upstream, path);
}

static const struct order_case {
    const char *name;
    nrm_resource *(*over[3])(nrm_resource *);
} orders[] = {
    {"log, limit, statistics", {with_log, with_limit, statistics_over}},
    {"limit, log, statistics", {with_limit, with_log, statistics_over}},
    {"statistics, limit, log", {statistics_over, with_limit, with_log}},
    {"limit, statistics, log", {with_limit, statistics_over, with_log}},
    {"log, log, limit", {with_log, with_log, with_limit}},
};

TEST_EACH(it_stands_anywhere_among_other_adaptors, orders)
{
    void *ptrs[100];
    size_t n_logs = 0;
    log_path(path, "stacked");
    nrm_resource *mr = pool_over(host_source(), 0);
    for (int i = 0; i < 3; i++) {
        mr = row->over[i](mr);
        n_logs += row->over[i] == with_log;
    }
    for (int i = 0; i < 100; i++) {
        ptrs[i] = allocate(mr, (size_t)i % 2 == 0 ? 100 : 10000);
    }
    for (nrm_resource *each = mr; each->upstream->upstream != NULL;
         each = each->upstream) {
        CHECK_EQ(live_nbytes(each), 505000);
    }
    void *ptr = NULL;
    CHECK_STATUS(nrm_resource_allocate(mr, NRM__MIB, 0, NULL, &ptr), NRM_OUT_OF_MEMORY);
    for (int i = 0; i < 100; i++) {
        deallocate(mr, ptrs[i]);
    }
    nrm__log_drain();
    struct rows rows = read_rows(path);
    CHECK_EQ(count_action(&rows, "allocate"), n_logs * 100);
    CHECK_EQ(count_action(&rows, "free"), n_logs * 100);
    for (nrm_resource *each = mr; each != NULL; each = each->upstream) {
        CHECK_EQ(live_nbytes(each), each->upstream != NULL ? 0 : live_nbytes(each));
    }
    finish(mr, &rows);
}

/* ---- what threads keep ---- */

static nrm_resource *
stack_over(nrm_resource *pool, size_t limit_nbytes)
{
    return log_over(limiting_over(statistics_over(pool), limit_nbytes),
                    log_path(path, "stack"));
}

static size_t
booked_nbytes(nrm_resource *log)
{
    size_t allocated = SIZE_MAX, limit;
    CHECK_OK(nrm_limiting_get(log->upstream, &allocated, &limit));
    return allocated;
}

enum { NO_STREAM, DEFAULT, OWN, OTHERS, PER_THREAD };

static nrm_stream *
make_stream(int kind)
{
    nrm_stream *stream = NULL;
    nrm_CUstream handle = NULL;
    struct nrm__cuda_scope scope;
    switch (kind) {
    case DEFAULT:
        return nrm_stream_default();
    case OWN:
        CHECK_OK(nrm_stream_create(0, NRM_STREAM_NON_BLOCKING, &stream));
        break;
    case OTHERS:
        CHECK_OK(nrm__cuda_enter(0, &scope));
        CHECK_EQ(cuda.cuStreamCreate(&handle, NRM_CU_STREAM_NON_BLOCKING), 0);
        nrm__cuda_leave(&scope);
        CHECK_OK(nrm_stream_wrap((uintptr_t)handle, NULL, NULL, &stream));
        break;
    case PER_THREAD:
        CHECK_OK(nrm_stream_per_thread(&stream));
        break;
    default:
        break;
    }
    return stream;
}

#define N_LIVE 5
#define N_ROUNDS 30

/* Some are kept from the second round on. */
static void
do_rounds(nrm_resource *mr, size_t nbytes, nrm_stream *stream)
{
    void *ptrs[N_LIVE];
    for (int i = 0; i < N_ROUNDS; i++) {
        for (int j = 0; j < N_LIVE; j++) {
            REQUIRE_OK(nrm_resource_allocate(mr, nbytes, 0, stream, &ptrs[j]));
        }
        for (int j = 0; j < N_LIVE; j++) {
            CHECK_OK(nrm_resource_deallocate(mr, ptrs[j], 0, stream));
        }
    }
}

static const struct way_case {
    const char *name;
    nrm_resource *(*source)(void);
    int stream;
    size_t nbytes;
} ways[] = {
    {"cells", host_source, NO_STREAM, 100},
    {"blocks", host_source, NO_STREAM, 100000},
    {"large blocks", host_source, NO_STREAM, 40 * NRM__MIB},
    {"page-locked cells", pinned_source, NO_STREAM, 100},
    {"page-locked blocks", pinned_source, NO_STREAM, 100000},
    {"page-locked blocks on a stream", pinned_source, OWN, 100000},
    {"device blocks", device_source, DEFAULT, 100000},
    {"device blocks on a stream", device_source, OWN, 100000},
    {"device blocks on a stream of others", device_source, OTHERS, 100000},
    {"device blocks of the thread", device_source, PER_THREAD, 100000},
};

TEST_EACH(each_of_many_pairs_has_its_rows_and_counts_once, ways)
{
    char handle[32] = "0";
    simulator_start(NULL);
    nrm_resource *mr = stack_over(pool_over(row->source(), 0), NRM__GIB);
    nrm_stream *stream = make_stream(row->stream);
    do_rounds(mr, row->nbytes, stream);
    for (nrm_resource *each = mr; each->upstream != NULL; each = each->upstream) {
        nrm_statistics counts = statistics_of(each);
        CHECK_EQ(counts.total_count, N_LIVE * N_ROUNDS);
        CHECK_EQ(counts.total_bytes, N_LIVE * N_ROUNDS * row->nbytes);
        CHECK_EQ(counts.peak_count, N_LIVE);
        CHECK_EQ(counts.peak_bytes, N_LIVE * row->nbytes);
        CHECK_EQ(counts.current_count, 0);
        CHECK_EQ(counts.current_bytes, 0);
        CHECK_EQ(counts.errors, 0);
    }
    CHECK_EQ(booked_nbytes(mr), 0);
    CHECK_OK(nrm_logging_flush(mr));
    struct rows rows = read_rows(path);
    CHECK_EQ(rows.n, 2 * N_LIVE * N_ROUNDS);
    if (stream != NULL && nrm_stream_handle(stream) != 0) {
        sprintf(handle, "0x%zx", (size_t)nrm_stream_handle(stream));
    }
    for (size_t i = 0; i < rows.n; i++) {
        CHECK_EQ(rows.rows[i].nbytes, row->nbytes);
        CHECK_STR_EQ(rows.rows[i].stream, handle);
    }
    check_turns(&rows);
    nrm_stream_release(stream);
    finish(mr, &rows);
    simulator_check_faults();
}

TEST(a_second_free_of_what_the_thread_keeps_is_refused_and_has_no_row)
{
    nrm_resource *mr = stack_over(pool_over(host_source(), 0), NRM__GIB);
    for (int i = 0; i < 3; i++) {
        void *cell = allocate(mr, 100), *block = allocate(mr, 100000);
        deallocate(mr, cell);
        deallocate(mr, block);
        CHECK_STATUS(nrm_resource_deallocate(mr, cell, 0, NULL), NRM_NOT_OWNED);
        CHECK_STATUS(nrm_resource_deallocate(mr, block, 0, NULL), NRM_NOT_OWNED);
    }
    CHECK_EQ(statistics_of(mr).errors, 6);
    CHECK_EQ(booked_nbytes(mr), 0);
    CHECK_OK(nrm_logging_flush(mr));
    struct rows rows = read_rows(path);
    CHECK_EQ(rows.n, 12);
    finish(mr, &rows);
}

static const struct size_case {
    const char *name;
    size_t nbytes;
} sizes[] = {{"a cell", 100}, {"a block", 100000}};

TEST_EACH(what_the_thread_keeps_is_refused_over_the_limit, sizes)
{
    void *ptrs[4], *ptr = NULL;
    nrm_resource *mr =
        stack_over(pool_over(host_source(), 0), nrm__align_up(row->nbytes, 256) * 4);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 4; i++) {
            ptrs[i] = allocate(mr, row->nbytes);
        }
        CHECK_STATUS(nrm_resource_allocate(mr, row->nbytes, 0, NULL, &ptr),
                     NRM_OUT_OF_MEMORY);
        for (int i = 0; i < 4; i++) {
            deallocate(mr, ptrs[i]);
        }
    }
    CHECK_OK(nrm_logging_flush(mr));
    struct rows rows = read_rows(path);
    CHECK_EQ(count_action(&rows, "allocate failure"), 3);
    CHECK_EQ(rows.n, 27);
    finish(mr, &rows);
}

/* ---- in the order of rows ---- */

#define N_SHARING 4
#define SHARED_NBYTES 200
#define SHARED_LIMIT (4 * 256)

static struct sharing {
    nrm_resource *mr;
    size_t n_refused;
} sharing[N_SHARING];

static void
share_limit(void *argument)
{
    struct sharing *mine = argument;
    for (int i = 0; i < 20000 / SLOW; i++) {
        void *first = NULL, *second = NULL;
        mine->n_refused +=
            nrm_resource_allocate(mine->mr, SHARED_NBYTES, 0, NULL, &first) != NRM_OK;
        mine->n_refused +=
            nrm_resource_allocate(mine->mr, SHARED_NBYTES, 0, NULL, &second) != NRM_OK;
        deallocate(mine->mr, second);
        deallocate(mine->mr, first);
    }
}

static atomic_bool is_shared;

/* Rows are taken from the rings at any moment. */
static void
flush_meanwhile(void *log)
{
    while (atomic_load(&is_shared)) {
        CHECK_OK(nrm_logging_flush(log));
    }
}

/* Whoever gets what another thread has booked out comes behind it. */
TEST(rows_of_threads_never_have_more_than_the_limit_live)
{
    struct worker workers[N_SHARING], flusher;
    size_t n_refused = 0, live = 0, most = 0;
    nrm_resource *mr = stack_over(pool_over(host_source(), 0), SHARED_LIMIT);
    atomic_store(&is_shared, true);
    worker_start(&flusher);
    worker_ask(&flusher, flush_meanwhile, mr);
    for (size_t i = 0; i < N_SHARING; i++) {
        sharing[i] = (struct sharing){.mr = mr};
        worker_start(&workers[i]);
        worker_ask(&workers[i], share_limit, &sharing[i]);
    }
    for (size_t i = 0; i < N_SHARING; i++) {
        worker_wait(&workers[i]);
        worker_end(&workers[i]);
        n_refused += sharing[i].n_refused;
    }
    atomic_store(&is_shared, false);
    worker_wait(&flusher);
    worker_end(&flusher);
    CHECK_LE(statistics_of(mr).peak_count, SHARED_LIMIT / 256);
    CHECK_OK(nrm_logging_flush(mr));
    struct rows rows = read_rows(path);
    CHECK_EQ(count_action(&rows, "allocate failure"), n_refused);
    for (size_t i = 0; i < rows.n; i++) {
        live += strcmp(rows.rows[i].action, "allocate") == 0;
        live -= strcmp(rows.rows[i].action, "free") == 0;
        most = nrm__max(most, live);
    }
    CHECK_EQ(live, 0);
    CHECK_LE(most, SHARED_LIMIT / 256);
    finish(mr, &rows);
}

CHECK_MAIN
