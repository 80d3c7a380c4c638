/* ArenaMemoryResource: all memory at once and no more later, and the report of a
   request that fails. */
#include "copies.h"
#include "model.h"

#include <fcntl.h>
#include <sys/stat.h>

static struct counting even, odd;

static nrm_resource *
even_callback(void)
{
    even = (struct counting){0};
    return counting_source(&even);
}

static nrm_resource *
odd_callback(void)
{
    odd = (struct counting){.offset = 192};
    return counting_source(&odd);
}

static nrm_resource *
arena_over(nrm_resource *upstream, size_t nbytes, bool dumps)
{
    nrm_arena_options options = NRM_OPTIONS(nrm_arena_options);
    nrm_resource *mr = NULL;
    options.nbytes = nbytes;
    options.dump_log_on_failure = dumps;
    CHECK_OK(nrm_arena_create(upstream, &options, &mr));
    nrm_resource_release(upstream);
    return mr;
}

static const struct over {
    const char *name;
    nrm_resource *(*create)(void);
} overs[] = {
    {"host", host_source},
    {"callback", even_callback},
    {"odd callback", odd_callback},
    {"pool", host_pool},
};

static void
finish(nrm_resource *mr)
{
    nrm_resource_release(mr);
    nrm__retired_drain(0);
    CHECK_EQ(atomic_load(&even.n_live), 0);
    CHECK_EQ(atomic_load(&odd.n_live), 0);
}

TEST_EACH(a_random_walk_in_a_tight_arena_agrees_with_the_model, overs)
{
    static struct model model;
    model = (struct model){.mr = arena_over(row->create(), 2 * NRM__MIB, false),
                           .largest_nbytes = 200000,
                           .may_be_full = true,
                           .state = 88172645463325252u};
    for (int i = 0; i < 4000; i += 500) {
        model_walk(&model, 500);
        CHECK_LE(reserved_nbytes(model.mr), 2 * (int64_t)NRM__MIB);
    }
    CHECK_GT(model.n_full, 0);
    finish(model.mr);
}

TEST_EACH(threads_free_each_others_blocks, overs)
{
    nrm_resource *mr = arena_over(row->create(), 32 * NRM__MIB, false);
    model_exchange_blocks(mr, 20000, 1200);
    finish(mr);
}

TEST_EACH(all_is_taken_at_once_and_no_more_later, overs)
{
    nrm_resource *mr = arena_over(row->create(), 4 * NRM__MIB, false);
    nrm_resource *upstream = nrm_resource_upstream(mr);
    void *ptr = NULL, *half = NULL;
    CHECK_EQ(reserved_nbytes(mr), 4 * (int64_t)NRM__MIB);
    CHECK_GE(live_nbytes(upstream), 4 * (int64_t)NRM__MIB);
    void *whole = allocate(mr, 4 * NRM__MIB);
    CHECK_STATUS(nrm_resource_allocate(mr, 1, 0, NULL, &ptr), NRM_OUT_OF_MEMORY);
    CHECK_OK(nrm_resource_deallocate(mr, whole, 0, NULL));
    /* More than there is at all: the arena is not given up for it. */
    CHECK_STATUS(nrm_resource_allocate(mr, 4 * NRM__MIB + 1, 0, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK_STR_HAS(nrm_last_error()->message, "an arena of 4 MiB in all");
    CHECK_STATUS(nrm_resource_allocate(mr, 4 * NRM__MIB, 64 * NRM__MIB, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK_EQ(reserved_nbytes(mr), 4 * (int64_t)NRM__MIB);
    CHECK_OK(nrm_resource_allocate(mr, 2 * NRM__MIB, 0, NULL, &half));
    CHECK_OK(nrm_resource_allocate(mr, 2 * NRM__MIB, 0, NULL, &ptr));
    CHECK_EQ(reserved_nbytes(mr), 4 * (int64_t)NRM__MIB);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    CHECK_OK(nrm_resource_deallocate(mr, half, 0, NULL));
    mr->ops->check(mr);
    finish(mr);
}

/* Larger than what a pool keeps when nothing lives in it. */
TEST(an_arena_in_which_nothing_lives_is_kept)
{
    nrm_resource *mr = NULL, *host = host_source();
    REQUIRE_OK(nrm_arena_create(host, NULL, &mr)); /* half of the host's memory */
    int64_t nbytes = reserved_nbytes(mr);
    CHECK_GE(nbytes, 64 * (int64_t)NRM__MIB);
    void *ptr = allocate(mr, (size_t)nbytes);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    CHECK_EQ(reserved_nbytes(mr), nbytes);
    CHECK(allocate(mr, (size_t)nbytes) == ptr);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    nrm_resource_release(host);
    finish(mr);
}

TEST(trim_gives_it_back_and_the_next_request_takes_what_it_needs)
{
    nrm_resource *mr = arena_over(host_source(), 32 * NRM__MIB, false);
    size_t given = 0;
    void *ptr = allocate(mr, 1000);
    CHECK_OK(nrm_resource_trim(mr, 0, &given));
    CHECK_EQ(given, 0u); /* something lives in it */
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    CHECK_OK(nrm_resource_trim(mr, 0, &given));
    CHECK_EQ(given, 32 * NRM__MIB);
    ptr = allocate(mr, 32 * NRM__MIB);
    CHECK_EQ(reserved_nbytes(mr), 32 * (int64_t)NRM__MIB);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    finish(mr);
}

TEST(an_arena_that_cannot_be_had_is_none)
{
    struct counting counting = {.limit_nbytes = NRM__MIB};
    nrm_arena_options options = NRM_OPTIONS(nrm_arena_options);
    nrm_resource *source = counting_source(&counting), *mr = NULL;
    options.nbytes = NRM__MIB + 1;
    CHECK_STATUS(nrm_arena_create(source, &options, &mr), NRM_OUT_OF_MEMORY);
    options.nbytes = SIZE_MAX;
    CHECK_STATUS(nrm_arena_create(source, &options, &mr), NRM_OUT_OF_MEMORY);
    CHECK(mr == NULL);
    options.nbytes = NRM__MIB;
    REQUIRE_OK(nrm_arena_create(source, &options, &mr));
    nrm_resource_release(mr);
    nrm_resource_release(source);
    CHECK_EQ(atomic_load(&counting.n_live), 0);
}

TEST(by_default_half_of_what_the_device_has_free)
{
    struct nrm_cudasim_config config = simulator_config();
    config.memory_nbytes = 512 * NRM__MIB;
    simulator_start(&config);
    nrm_resource *device = NULL, *mr = NULL;
    REQUIRE_OK(nrm_device_create(NULL, &device));
    void *ptr = allocate(device, 256 * NRM__MIB);
    REQUIRE_OK(nrm_arena_create(device, NULL, &mr));
    CHECK_GE(reserved_nbytes(mr), 120 * (int64_t)NRM__MIB);
    CHECK_LE(reserved_nbytes(mr), 128 * (int64_t)NRM__MIB);
    void *all = allocate(mr, 100 * NRM__MIB);
    CHECK_OK(nrm_resource_deallocate(mr, all, 0, NULL));
    CHECK_EQ(reserved_nbytes(mr), (reserved_nbytes(mr) >> 16) << 16);
    CHECK_OK(nrm_resource_deallocate(device, ptr, 0, NULL));
    nrm_resource_release(mr);
    nrm_resource_release(device);
}

TEST_EACH(a_block_with_a_copy_in_flight_is_not_handed_out, copies_kinds)
{
    struct copies copies = copies_begin(row);
    nrm_resource_retain(copies.source);
    nrm_resource *mr = arena_over(copies.source, 16 * NRM__MIB, false);
    copies_check_held(&copies, mr, NRM__MIB, 10, 16);
    copies_end(&copies, mr);
}

/* ---- the report ---- */

/* The report in the working directory, which is a new one; "" when there is none. */
static const char *
read_report(void)
{
    static char text[65536];
    ssize_t n = 0;
    int fd = open(NRM_ARENA_LOG, O_RDONLY);
    if (fd >= 0) {
        n = read(fd, text, sizeof text - 1);
        close(fd);
    }
    text[n > 0 ? n : 0] = '\0';
    return text;
}

static int
count_of(const char *text, const char *word)
{
    int n = 0;
    while ((text = strstr(text, word)) != NULL) {
        n++;
        text += strlen(word);
    }
    return n;
}

static bool
enter_new_directory(void)
{
    char path[] = "/tmp/numpy-rmm-arena-XXXXXX";
    return mkdtemp(path) != NULL && chdir(path) == 0;
}

static void
remove_directory(void)
{
    char path[256];
    unlink(NRM_ARENA_LOG);
    if (getcwd(path, sizeof path) != NULL && chdir("/") == 0) {
        rmdir(path);
    }
}

TEST(a_request_that_fails_leaves_a_report_when_asked_to)
{
    void *blocks[4], *ptr = NULL;
    REQUIRE(enter_new_directory());
    nrm_resource *quiet = arena_over(host_source(), 4 * NRM__MIB, false);
    CHECK_STATUS(nrm_resource_allocate(quiet, 5 * NRM__MIB, 0, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK_STR_EQ(read_report(), "");
    nrm_resource *mr = arena_over(host_source(), 4 * NRM__MIB, true);
    for (int i = 0; i < 4; i++) {
        blocks[i] = allocate(mr, NRM__MIB);
    }
    CHECK_OK(nrm_resource_deallocate(mr, blocks[0], 0, NULL));
    CHECK_OK(nrm_resource_deallocate(mr, blocks[2], 0, NULL));
    CHECK_STR_EQ(read_report(), ""); /* nothing has failed yet */
    CHECK_STATUS(nrm_resource_allocate(mr, 2 * NRM__MIB, 0, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK_STR_HAS(nrm_last_error()->message, "a report is in " NRM_ARENA_LOG);
    CHECK_EQ(nrm_last_error()->requested_nbytes, 2 * NRM__MIB);
    const char *text = read_report();
    CHECK_STR_HAS(text, "an arena of 4 MiB of host memory failed to allocate 2 MiB");
    CHECK_STR_HAS(text, "in use 2 MiB in 2 blocks, free 2 MiB in 2");
    CHECK_STR_HAS(text, "largest free block 1 MiB");
    CHECK_STR_HAS(text, "1 MiB to      2 MiB: 2, 2 MiB");
    CHECK_STR_HAS(text, "1 segments:");
    CHECK_STATUS(nrm_resource_allocate(mr, 5 * NRM__MIB, 0, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    text = read_report(); /* appended */
    CHECK_EQ(count_of(text, "failed to allocate"), 2);
    CHECK_STR_HAS(text, "failed to allocate 5 MiB");
    CHECK_OK(nrm_resource_deallocate(mr, blocks[1], 0, NULL));
    CHECK_OK(nrm_resource_deallocate(mr, blocks[3], 0, NULL));
    nrm_resource_release(quiet);
    finish(mr);
    remove_directory();
}

TEST(a_report_that_cannot_be_written_is_told_and_the_error_stays)
{
    void *ptr = NULL;
    REQUIRE(enter_new_directory());
    REQUIRE(mkdir(NRM_ARENA_LOG, 0700) == 0); /* no file can have this name now */
    nrm_resource *mr = arena_over(host_source(), NRM__MIB, true);
    CHECK_STATUS(nrm_resource_allocate(mr, 2 * NRM__MIB, 0, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK_STR_HAS(nrm_last_error()->message, "an arena of 1 MiB in all");
    CHECK_STR_HAS(nrm_last_error()->message, "kept a report out of " NRM_ARENA_LOG);
    rmdir(NRM_ARENA_LOG);
    finish(mr);
    remove_directory();
}

CHECK_MAIN
