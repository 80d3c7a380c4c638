/* The machine: clock, cores, memory; and the reader of the kernel's text files. */

#include "check.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/resource.h>

#include "base/bits.h"
#include "os/lines.h"
#include "os/memory.h"
#include "os/system.h"
#include "os/touch.h"

/* ---- clock ---- */

TEST(the_clock_goes_forward)
{
    uint64_t before = nrm__clock_ns();
    for (int i = 0; i < 10000; i++) {
        uint64_t now = nrm__clock_ns();
        CHECK_GE(now, before);
        before = now;
    }
}

TEST(sleep_takes_its_time)
{
    uint64_t before = nrm__clock_ns();
    nrm__sleep_ns(20 * 1000 * 1000);
    CHECK_GE(nrm__clock_ns() - before, 20u * 1000 * 1000);
}

/* ---- cores ---- */

static void
runs_on_one_core(void)
{
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    REQUIRE_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    CHECK_EQ(nrm__n_cores(), 1);
}

TEST(cores_are_those_that_this_process_may_use)
{
    cpu_set_t set;
    REQUIRE_EQ(sched_getaffinity(0, sizeof set, &set), 0);
    CHECK_GE(nrm__n_cores(), 1);
    CHECK_LE(nrm__n_cores(), CPU_COUNT(&set));
    CHECK_IN_CHILD(runs_on_one_core);
    NOTE("%d cores", nrm__n_cores());
}

/* ---- memory ---- */

static size_t
meminfo(const char *key)
{
    char line[256];
    size_t kib = 0;
    FILE *file = fopen("/proc/meminfo", "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (strncmp(line, key, strlen(key)) == 0) {
            kib = strtoull(line + strlen(key) + 1, NULL, 10);
        }
    }
    if (file != NULL) {
        fclose(file);
    }
    return kib * 1024;
}

TEST(memory_is_what_the_kernel_says)
{
    struct nrm__memory_state state;
    nrm__memory_state(&state);
    CHECK_EQ(state.total_nbytes, meminfo("MemTotal"));
    size_t available = meminfo("MemAvailable");
    size_t difference = available > state.available_nbytes
                            ? available - state.available_nbytes
                            : state.available_nbytes - available;
    CHECK_LT(difference, state.total_nbytes / 4); /* others work here too */
    CHECK_LE(state.available_nbytes, state.total_nbytes);
    CHECK_GT(state.available_nbytes, 0u);
    CHECK(state.cgroup_limit_nbytes == SIZE_MAX ||
          state.cgroup_available_nbytes <= state.cgroup_limit_nbytes);
    CHECK_LE(nrm__host_memory_nbytes(), state.total_nbytes);
    CHECK_LE(nrm__touchable_nbytes(), state.total_nbytes);
    NOTE("total %zu, available %zu, group limit %zu, group available %zu",
         state.total_nbytes, state.available_nbytes, state.cgroup_limit_nbytes,
         state.cgroup_available_nbytes);
}

static void
has_a_lower_memlock(void)
{
    struct nrm__memory_state state;
    struct rlimit limit;
    getrlimit(RLIMIT_MEMLOCK, &limit);
    limit.rlim_cur = 65536;
    REQUIRE_EQ(setrlimit(RLIMIT_MEMLOCK, &limit), 0);
    nrm__memory_state(&state);
    CHECK_EQ(state.memlock_limit_nbytes, 65536u);
}

TEST(the_memlock_limit_is_shown)
{
    CHECK_IN_CHILD(has_a_lower_memlock);
}

/* ---- control groups ---- */

static char group[512];

static bool
write_file(const char *folder, const char *name, const char *text)
{
    char path[600];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int fd = open(path, O_WRONLY);
    bool ok = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    if (fd >= 0) {
        close(fd);
    }
    return ok;
}

/* False where a process may not be moved. */
static bool
enter_group(void)
{
    char pid[32];
    snprintf(pid, sizeof pid, "%d", (int)getpid());
    bool entered = write_file(group, "cgroup.procs", pid);
    if (!entered) {
        NOTE("this process may not enter the group that it made");
    }
    return entered;
}

/* Makes a group with a limit, of version 1 or 2, where that is allowed. */
static bool
make_group(const char *v1_folder, const char *v1_file, const char *v1_value,
           const char *v2_file, const char *v2_value)
{
    for (int is_v2 = 0; is_v2 < 2; is_v2++) {
        snprintf(group, sizeof group, "/sys/fs/cgroup%s/nrm_test_%d",
                 is_v2 ? "" : v1_folder, (int)getpid());
        if (mkdir(group, 0755) != 0) {
            continue;
        }
        if (write_file(group, is_v2 ? v2_file : v1_file, is_v2 ? v2_value : v1_value)) {
            return true;
        }
        rmdir(group);
    }
    return false;
}

static void
sees_the_limit_of_its_group(void)
{
    struct nrm__memory_state state;
    void *memory = NULL;
    if (!enter_group()) {
        return;
    }
    nrm__memory_state(&state);
    CHECK_EQ(state.cgroup_limit_nbytes, 256u << 20);
    CHECK_LE(state.cgroup_available_nbytes, 256u << 20);
    CHECK_GT(state.cgroup_available_nbytes, 128u << 20);
    CHECK_EQ(nrm__host_memory_nbytes(), 256u << 20);
    size_t before = state.cgroup_available_nbytes;
    REQUIRE_EQ(nrm__map(64 << 20, nrm__page_size(), &memory), 0);
    REQUIRE_EQ(nrm__touch(memory, 64 << 20, 1), 0);
    nrm__memory_state(&state);
    CHECK_LT(state.cgroup_available_nbytes, before - (48u << 20));
    CHECK_EQ(nrm__touchable_nbytes(), state.cgroup_available_nbytes);
    nrm__unmap(memory, 64 << 20);
}

/* What the page cache holds is charged to the group but can be had back. */
static void
does_not_count_file_pages(void)
{
    struct nrm__memory_state state;
    static char block[1 << 20];
    char name[] = "/var/tmp/nrm_test_cache_XXXXXX";
    int fd = mkstemp(name);
    REQUIRE(fd >= 0);
    unlink(name);
    if (!enter_group()) {
        return;
    }
    nrm__memory_state(&state);
    size_t before = state.cgroup_available_nbytes;
    for (int i = 0; i < 64; i++) {
        CHECK_EQ(write(fd, block, sizeof block), (ssize_t)sizeof block);
    }
    fdatasync(fd);
    nrm__memory_state(&state);
    CHECK_GT(state.cgroup_available_nbytes, before - (32u << 20));
    close(fd);
}

TEST(the_memory_limit_of_a_control_group_counts)
{
    if (!make_group("/memory", "memory.limit_in_bytes", "268435456", "memory.max",
                    "268435456")) {
        SKIP("control groups cannot be made here");
    }
    CHECK_IN_CHILD(sees_the_limit_of_its_group);
    CHECK_IN_CHILD(does_not_count_file_pages);
    rmdir(group);
}

static void
has_half_a_core(void)
{
    if (enter_group()) {
        CHECK_EQ(nrm__n_cores(), 1);
    }
}

TEST(the_cpu_quota_of_a_control_group_counts)
{
    if (!make_group("/cpu", "cpu.cfs_quota_us", "50000", "cpu.max", "50000 100000")) {
        SKIP("control groups cannot be made here");
    }
    CHECK_IN_CHILD(has_half_a_core);
    rmdir(group);
}

/* ---- lines ---- */

static char path[64];

static void
write_temporary(const char *text, size_t nbytes)
{
    snprintf(path, sizeof path, "/tmp/nrm_test_lines_XXXXXX");
    int fd = mkstemp(path);
    CHECK(fd >= 0 && write(fd, text, nbytes) == (ssize_t)nbytes);
    close(fd);
}

TEST(lines_come_one_by_one)
{
    struct nrm__lines lines;
    static const char text[] = "first\n\nthird line\nlast";
    write_temporary(text, sizeof text - 1);
    REQUIRE(nrm__lines_open(&lines, path));
    CHECK_STR_EQ(nrm__lines_next(&lines), "first");
    CHECK_STR_EQ(nrm__lines_next(&lines), "");
    CHECK_STR_EQ(nrm__lines_next(&lines), "third line");
    CHECK_STR_EQ(nrm__lines_next(&lines), "last");
    CHECK_EQ(nrm__lines_next(&lines), NULL);
    CHECK_EQ(nrm__lines_next(&lines), NULL);
    nrm__lines_close(&lines);
    unlink(path);
}

TEST(a_line_longer_than_the_buffer_is_cut_and_the_next_is_whole)
{
    static char text[3 * 4096 + 100];
    struct nrm__lines lines;
    for (size_t long_nbytes = 4094; long_nbytes < 3 * 4096;
         long_nbytes += 1 + 4095 / 2) {
        memset(text, 'x', long_nbytes);
        strcpy(text + long_nbytes, "\nnext\n");
        write_temporary(text, long_nbytes + 6);
        REQUIRE(nrm__lines_open(&lines, path));
        const char *line = nrm__lines_next(&lines);
        REQUIRE(line != NULL);
        CHECK_EQ(strlen(line), nrm__min(long_nbytes, sizeof lines.buffer - 1));
        CHECK_STR_EQ(nrm__lines_next(&lines), "next");
        CHECK_EQ(nrm__lines_next(&lines), NULL);
        nrm__lines_close(&lines);
        unlink(path);
    }
}

TEST(numbers_are_read_and_words_are_not)
{
    uint64_t number = 5;
    write_temporary("1234\n", 5);
    CHECK(nrm__file_read_number(path, &number));
    CHECK_EQ(number, 1234u);
    unlink(path);
    CHECK(!nrm__file_read_number(path, &number));
    write_temporary("max\n", 4);
    CHECK(!nrm__file_read_number(path, &number));
    unlink(path);
    write_temporary("-1\n", 3);
    CHECK(!nrm__file_read_number(path, &number));
    unlink(path);
    CHECK_EQ(number, 1234u);
    CHECK(nrm__line_read_number("MemTotal:   24 kB", "MemTotal", &number));
    CHECK_EQ(number, 24u);
    CHECK(nrm__line_read_number("active_file 7", "active_file", &number));
    CHECK_EQ(number, 7u);
    CHECK(!nrm__line_read_number("inactive_file 7", "active_file", &number));
    CHECK(!nrm__line_read_number("active_file_more 7", "active_file", &number));
    CHECK(!nrm__line_read_number("active_file", "active_file", &number));
    CHECK(!nrm__line_read_number("active_file: none", "active_file", &number));
}

CHECK_MAIN
