/* The log: a row for each request, none lost, in an order that can have been. */
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "base/bits.h"
#include "core/log.h"
#include "core/ops.h"
#include "log_rows.h"
#include "nrm/options.h"
#include "os/system.h"
#include "simulator.h"
#include "workers.h"

static char path[64];

static nrm_resource *
make_log(const char *name)
{
    return log_over(pool_over(host_source(), 0), log_path(path, name));
}

static struct rows
flushed(nrm_resource *mr)
{
    CHECK_OK(nrm_logging_flush(mr));
    return read_rows(path);
}

static void
finish(nrm_resource *mr, struct rows *rows)
{
    nrm_resource_release(mr);
    free(rows->rows);
    unlink(path);
}

/* ---- rows ---- */

static const struct size_case {
    const char *name;
    size_t nbytes;
} sizes[] = {{"a cell", 100}, {"a block", 100000}, {"a large block", 64 * NRM__MIB}};

TEST_EACH(each_request_has_a_row, sizes)
{
    nrm_resource *mr = make_log("rows");
    void *ptr = allocate(mr, row->nbytes);
    deallocate(mr, ptr);
    void *zeroed;
    REQUIRE_OK(nrm_resource_allocate_zeroed(mr, row->nbytes, 0, NULL, &zeroed));
    CHECK_EQ(((char *)zeroed)[row->nbytes - 1], 0);
    deallocate(mr, zeroed);
    struct rows rows = flushed(mr);
    REQUIRE_EQ(rows.n, 4);
    for (size_t i = 0; i < rows.n; i++) {
        const struct row *one = &rows.rows[i];
        CHECK_STR_EQ(one->action, i % 2 == 0 ? "allocate" : "free");
        CHECK_EQ(one->ptr, (uintptr_t)(i < 2 ? ptr : zeroed));
        CHECK_EQ(one->nbytes, row->nbytes);
        CHECK_EQ(one->thread, (int)getpid());
        CHECK_STR_EQ(one->stream, "0");
        CHECK(one->hour < 24 && one->minute < 60 && one->second < 60);
    }
    finish(mr, &rows);
}

TEST(a_request_that_is_refused_has_a_row_and_its_own_error)
{
    void *ptr = NULL;
    nrm_resource *mr =
        log_over(pool_over(host_source(), 4 * NRM__MIB), log_path(path, "refused"));
    CHECK_STATUS(nrm_resource_allocate(mr, 8 * NRM__MIB, 0, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK_EQ(nrm_last_error()->requested_nbytes, 8 * NRM__MIB);
    CHECK_STR_HAS(nrm_last_error()->message, "limit 4 MiB");
    struct rows rows = flushed(mr);
    REQUIRE_EQ(rows.n, 1);
    CHECK_STR_EQ(rows.rows[0].action, "allocate failure");
    CHECK_EQ(rows.rows[0].ptr, 0);
    CHECK_EQ(rows.rows[0].nbytes, 8 * NRM__MIB);
    finish(mr, &rows);
}

TEST(what_is_no_block_has_no_row_and_changes_nothing)
{
    int other;
    nrm_statistics statistics;
    nrm_resource *mr = make_log("wrong");
    void *ptr = allocate(mr, 1000);
    CHECK_STATUS(nrm_resource_deallocate(mr, &other, 0, NULL), NRM_NOT_OWNED);
    CHECK_STATUS(nrm_resource_deallocate(mr, (char *)ptr + 64, 0, NULL), NRM_NOT_OWNED);
    deallocate(mr, ptr);
    CHECK_STATUS(nrm_resource_deallocate(mr, ptr, 0, NULL), NRM_NOT_OWNED);
    CHECK_OK(nrm_resource_deallocate(mr, NULL, 0, NULL));
    CHECK_OK(nrm_resource_allocate(mr, 0, 0, NULL, &ptr));
    REQUIRE_OK(nrm_resource_statistics(mr, &statistics));
    CHECK_EQ(statistics.errors, 3);
    CHECK_EQ(statistics.current_bytes, 0);
    CHECK_EQ(statistics.total_count, 1);
    struct rows rows = flushed(mr);
    CHECK_EQ(rows.n, 2);
    finish(mr, &rows);
}

TEST(a_block_that_changes_its_size_goes_and_comes)
{
    size_t live = 0;
    nrm_resource *mr = make_log("resized");
    void *ptr = allocate(mr, 100);
    for (size_t nbytes = 200; nbytes <= 400 * NRM__KIB; nbytes *= 3) {
        REQUIRE_OK(nrm_resource_reallocate(mr, ptr, nbytes, 0, NULL, &ptr));
    }
    CHECK_GT(live_nbytes(mr), 100);
    deallocate(mr, ptr);
    struct rows rows = flushed(mr);
    CHECK_GT(rows.n, 4);
    for (size_t i = 0; i < rows.n; i++) {
        bool comes = strcmp(rows.rows[i].action, "allocate") == 0;
        live = comes ? live + rows.rows[i].nbytes : live - rows.rows[i].nbytes;
    }
    CHECK_EQ(live, 0);
    finish(mr, &rows);
}

TEST(a_stream_stands_in_its_row)
{
    char handle[32];
    nrm_stream *stream = NULL, *mine = NULL;
    nrm_resource *device = NULL;
    void *ptr = NULL;
    simulator_start(NULL);
    REQUIRE_OK(nrm_device_create(NULL, &device));
    nrm_resource *mr = log_over(pool_over(device, 0), log_path(path, "stream"));
    REQUIRE_OK(nrm_stream_create(0, NRM_STREAM_NON_BLOCKING, &stream));
    REQUIRE_OK(nrm_stream_per_thread(&mine));
    REQUIRE_OK(nrm_resource_allocate(mr, 1000, 0, stream, &ptr));
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, mine));
    struct rows rows = flushed(mr);
    REQUIRE_EQ(rows.n, 2);
    sprintf(handle, "0x%zx", (size_t)nrm_stream_handle(stream));
    CHECK_STR_EQ(rows.rows[0].stream, handle);
    CHECK_STR_EQ(rows.rows[1].stream, "0x2");
    nrm_stream_release(stream);
    nrm_stream_release(mine);
    finish(mr, &rows);
    simulator_check_faults();
}

/* ---- nothing is lost, and the order can have been ---- */

/* Addresses on their way from one thread to the next; NULL: none. */
#define N_WORKERS 4
#define N_PLACES 64

static struct handing {
    nrm_resource *mr;
    _Atomic(void *) places[N_PLACES];
} handing;

static struct hand {
    uint64_t random;
    size_t n_rounds;
} hands[N_WORKERS];

static void
hand_over(void *argument)
{
    struct hand *hand = argument;
    for (size_t i = 0; i < hand->n_rounds; i++) {
        size_t nbytes = next_random(&hand->random) % 20 == 0 ? 30000 : 200;
        void *ptr = allocate(handing.mr, nbytes);
        size_t place = next_random(&hand->random) % N_PLACES;
        ptr = atomic_exchange(&handing.places[place], ptr);
        if (ptr != NULL) {
            deallocate(handing.mr, ptr);
        }
    }
}

TEST(rows_of_threads_that_hand_blocks_over_are_all_there_and_in_order)
{
    struct worker workers[N_WORKERS];
    size_t n_rounds = 20000 / SLOW;
    nrm_resource *mr = handing.mr = make_log("threads");
    for (size_t i = 0; i < N_WORKERS; i++) {
        hands[i] = (struct hand){.random = i + 1, .n_rounds = n_rounds};
        worker_start(&workers[i]);
        worker_ask(&workers[i], hand_over, &hands[i]);
    }
    for (size_t i = 0; i < N_WORKERS; i++) {
        worker_wait(&workers[i]);
        worker_end(&workers[i]);
    }
    for (size_t i = 0; i < N_PLACES; i++) {
        deallocate(mr, atomic_exchange(&handing.places[i], NULL));
    }
    CHECK_EQ(live_nbytes(mr), 0);
    struct rows rows = flushed(mr);
    CHECK_EQ(count_action(&rows, "allocate"), N_WORKERS * n_rounds);
    CHECK_EQ(count_action(&rows, "free"), N_WORKERS * n_rounds);
    check_turns(&rows);
    finish(mr, &rows);
}

TEST(one_thread_that_fills_its_ring_loses_nothing)
{
    size_t n = 5 * NRM__LOG_RECORDS + 3;
    nrm_resource *mr = make_log("full");
    for (size_t i = 0; i < n; i++) {
        deallocate(mr, allocate(mr, 64));
    }
    struct rows rows = flushed(mr);
    CHECK_EQ(rows.n, 2 * n);
    check_turns(&rows);
    double before = 0;
    for (size_t i = 0; i < rows.n; i++) {
        const struct row *one = &rows.rows[i];
        double now = one->hour * 3600 + one->minute * 60 + one->second;
        CHECK_MSG(now >= before || before > 86000, "%f after %f", now, before);
        before = now;
    }
    finish(mr, &rows);
}

TEST(rows_come_by_themselves_after_a_while)
{
    struct rows rows = {NULL, 0};
    nrm_resource *mr = make_log("later");
    for (int round = 1; round <= 2; round++) {
        deallocate(mr, allocate(mr, 64));
        for (int i = 0; i < 1000 && rows.n < 2 * (size_t)round; i++) {
            free(rows.rows);
            nrm__sleep_ns(10000000);
            rows = read_rows(path);
        }
        CHECK_EQ(rows.n, 2 * (size_t)round);
    }
    finish(mr, &rows);
}

TEST(a_log_that_dies_has_written_all_and_others_go_on)
{
    char other[64];
    nrm_resource *kept = make_log("first");
    nrm_resource *mr = log_over(pool_over(host_source(), 0), log_path(other, "second"));
    deallocate(mr, allocate(mr, 64));
    deallocate(kept, allocate(kept, 64));
    nrm_resource_release(mr);
    struct rows rows = read_rows(other);
    CHECK_EQ(rows.n, 2);
    free(rows.rows);
    unlink(other);
    deallocate(kept, allocate(kept, 64));
    rows = flushed(kept);
    CHECK_EQ(rows.n, 4);
    finish(kept, &rows);
}

TEST(adaptors_that_name_the_same_file_share_it)
{
    nrm_resource *first = make_log("shared");
    deallocate(first, allocate(first, 64));
    nrm_resource *second = log_over(pool_over(host_source(), 0), path);
    deallocate(second, allocate(second, 64));
    nrm_resource_release(first);
    struct rows rows = flushed(second);
    CHECK_EQ(rows.n, 4);
    finish(second, &rows);
}

TEST(a_new_log_empties_its_file)
{
    struct rows rows = {NULL, 0};
    nrm_resource *mr = make_log("again");
    deallocate(mr, allocate(mr, 64));
    nrm_resource_release(mr);
    mr = make_log("again");
    rows = flushed(mr);
    CHECK_EQ(rows.n, 0);
    finish(mr, &rows);
}

/* ---- names ---- */

static const struct name_case {
    const char *name, *given, *becomes;
} names[] = {
    {"an extension", "/tmp/nrm-name.txt", "/tmp/nrm-name.dev3.txt"},
    {"none", "/tmp/nrm-name", "/tmp/nrm-name.dev3"},
    {"two", "/tmp/nrm-name.tar.gz", "/tmp/nrm-name.tar.dev3.gz"},
    {"hidden", "/tmp/.nrm-name", "/tmp/.nrm-name.dev3"},
    {"of the folder", "/tmp/../tmp/nrm-name", "/tmp/../tmp/nrm-name.dev3"},
};

TEST_EACH(the_device_stands_before_the_extension, names)
{
    char got[128];
    nrm_resource *source = host_source(), *mr = NULL;
    nrm_logging_options options = NRM_OPTIONS(nrm_logging_options);
    options.path = row->given;
    options.name_device = true;
    options.device = 3;
    REQUIRE_OK(nrm_logging_create(source, &options, &mr));
    CHECK_OK(nrm_logging_get_path(mr, got, sizeof got));
    CHECK_STR_EQ(got, row->becomes);
    CHECK_EQ(access(got, F_OK), 0);
    unlink(got);
    nrm_resource_release(mr);
    nrm_resource_release(source);
}

TEST(without_a_name_the_option_has_it)
{
    char got[128];
    nrm_resource *source = host_source(), *mr = NULL;
    CHECK_STATUS(nrm_logging_create(source, NULL, &mr), NRM_INVALID_VALUE);
    CHECK_STR_HAS(nrm_last_error()->message, "NUMPY_RMM_LOG_FILE");
    REQUIRE_OK(nrm_option_set(NRM_OPT_LOG_FILE, log_path(path, "option")));
    REQUIRE_OK(nrm_logging_create(source, NULL, &mr));
    CHECK_OK(nrm_logging_get_path(mr, got, sizeof got));
    CHECK_STR_EQ(got, path);
    unlink(path);
    nrm_resource_release(mr);
    nrm_resource_release(source);
}

TEST(a_file_that_cannot_be_written_is_said_at_once)
{
    char folder[64], text[2000];
    nrm_resource *source = host_source(), *mr = NULL;
    nrm_logging_options options = NRM_OPTIONS(nrm_logging_options);
    options.path = log_path(folder, "no/such/folder");
    CHECK_STATUS(nrm_logging_create(source, &options, &mr), NRM_OS_ERROR);
    CHECK_STR_HAS(nrm_last_error()->message, folder);
    CHECK_STR_EQ(nrm_last_error()->native_name, "ENOENT");
    options.path = "/dev/full";
    CHECK_STATUS(nrm_logging_create(source, &options, &mr), NRM_OS_ERROR);
    CHECK_STR_EQ(nrm_last_error()->native_name, "ENOSPC");
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    options.path = text;
    CHECK_STATUS(nrm_logging_create(source, &options, &mr), NRM_INVALID_VALUE);
    CHECK_STR_HAS(nrm_last_error()->message, "1999");
    CHECK_STATUS(nrm_logging_flush(source), NRM_INVALID_VALUE);
    CHECK_STATUS(nrm_logging_get_path(source, text, sizeof text), NRM_INVALID_VALUE);
    CHECK_EQ(atomic_load(&source->refcount), 1);
    nrm_resource_release(source);
}

/* ---- a disk that is full ---- */

static void
limit_files(rlim_t nbytes)
{
    struct rlimit limit = {.rlim_cur = nbytes, .rlim_max = RLIM_INFINITY};
    signal(SIGXFSZ, SIG_IGN);
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

static void
fill_disk(void)
{
    nrm_statistics statistics;
    nrm_resource *mr = make_log("disk");
    limit_files(1000); /* in the middle of a row */
    for (int i = 0; i < 100; i++) {
        deallocate(mr, allocate(mr, 64));
    }
    CHECK_STATUS(nrm_logging_flush(mr), NRM_OS_ERROR);
    CHECK_STR_EQ(nrm_last_error()->native_name, "EFBIG");
    CHECK_STR_HAS(nrm_last_error()->message, path);
    REQUIRE_OK(nrm_resource_statistics(mr, &statistics));
    CHECK(statistics.errors > 150 && statistics.errors < 200);
    CHECK_OK(nrm_logging_flush(mr)); /* it was said */
    limit_files(RLIM_INFINITY);
    deallocate(mr, allocate(mr, 128));
    CHECK_OK(nrm_logging_flush(mr));
    char line[256];
    int64_t n_whole = 0, n_new = 0, n_cut = 0;
    struct row one;
    FILE *file = fopen(path, "r");
    REQUIRE(file != NULL);
    CHECK(fgets(line, sizeof line, file) != NULL);
    while (fgets(line, sizeof line, file) != NULL) {
        bool is_row = parse_row(line, &one);
        n_whole += is_row;
        n_new += is_row && one.nbytes == 128;
        n_cut += !is_row;
    }
    fclose(file);
    CHECK_EQ(n_new, 2);
    CHECK_LE(n_cut, 1);
    CHECK_EQ(n_whole - n_new + statistics.errors, 200);
    nrm_resource_release(mr);
    unlink(path);
}

TEST(rows_that_the_disk_does_not_take_are_counted_and_said)
{
    CHECK_EQ(in_child(fill_disk), 0);
}

/* ---- forks, and the end ---- */

static nrm_resource *forked;

static void
log_in_child(void)
{
    deallocate(forked, allocate(forked, 128));
    CHECK_OK(nrm_logging_flush(forked));
}

TEST(a_child_goes_on_with_the_file_and_repeats_nothing)
{
    nrm_resource *mr = forked = make_log("fork");
    deallocate(mr, allocate(mr, 64));
    CHECK_EQ(in_child(log_in_child), 0);
    deallocate(mr, allocate(mr, 64));
    struct rows rows = flushed(mr);
    size_t n_child = 0, n_other = 0;
    for (size_t i = 0; i < rows.n; i++) {
        n_child += rows.rows[i].nbytes == 128;
        n_other += (rows.rows[i].nbytes == 128) == (rows.rows[i].thread == getpid());
    }
    CHECK_EQ(n_child, 2);
    CHECK_EQ(n_other, 0);
    CHECK_EQ(rows.n, 6);
    finish(mr, &rows);
}

TEST(what_was_noted_is_written_when_the_process_ends)
{
    int status = -1;
    nrm_resource *mr = make_log("exit");
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        for (int i = 0; i < 10; i++) {
            deallocate(mr, allocate(mr, 64));
        }
        exit(0);
    }
    waitpid(child, &status, 0);
    CHECK_EQ(status, 0);
    struct rows rows = read_rows(path);
    CHECK_EQ(rows.n, 20);
    finish(mr, &rows);
}

static void
note_a_few(void *argument)
{
    for (int i = 0; i < 10; i++) {
        deallocate(argument, allocate(argument, 64));
    }
}

TEST(what_ended_threads_noted_is_there_and_their_rings_serve_others)
{
    nrm_resource *mr = make_log("ended");
    for (int i = 0; i < 20; i++) {
        struct worker worker;
        worker_start(&worker);
        worker_run(&worker, note_a_few, mr);
        worker_end(&worker);
        if (i % 5 == 4) {
            CHECK_OK(nrm_logging_flush(mr));
        }
    }
    struct rows rows = flushed(mr);
    CHECK_EQ(rows.n, 400);
    finish(mr, &rows);
}

CHECK_MAIN
