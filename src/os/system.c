/*
 * The machine and the process. Nothing is cached: limits of a control group, and what
 * is free, change while a program runs, and who asks is about to do something
 * expensive.
 */
#include "os/system.h"

#include <errno.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/bits.h"
#include "os/cgroup.h"
#include "os/lines.h"

/* ---- time ---- */

uint64_t
nrm__clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

void
nrm__sleep_ns(uint64_t ns)
{
    struct timespec left = {.tv_sec = (time_t)(ns / 1000000000),
                            .tv_nsec = (long)(ns % 1000000000)};
    while (clock_nanosleep(CLOCK_MONOTONIC, 0, &left, &left) == EINTR)
        ;
}

/* ---- cores ---- */

/* The C library's set holds 1024 cores; the system call takes any size. */
static int
count_affinity(void)
{
    unsigned long set[8192 / (8 * sizeof(unsigned long))];
    long n_bytes = syscall(SYS_sched_getaffinity, 0, sizeof set, set);
    int n = 0;
    if (n_bytes <= 0) {
        return (int)sysconf(_SC_NPROCESSORS_ONLN);
    }
    for (size_t i = 0; i < (size_t)n_bytes / sizeof *set; i++) {
        n += __builtin_popcountl(set[i]);
    }
    return n;
}

/* "max 100000", "150000 100000": CPU time per period. */
static bool
read_quota_v2(const char *folder, uint64_t *out_quota, uint64_t *out_period)
{
    char path[NRM__CGROUP_PATH_SIZE];
    char line[64];
    char *end;
    nrm__cgroup_file(folder, "cpu.max", path, sizeof path);
    if (!nrm__file_read_line(path, line, sizeof line)) {
        return false;
    }
    *out_quota = strtoull(line, &end, 10);
    if (end == line) {
        return false;
    }
    *out_period = strtoull(end, NULL, 10);
    return true;
}

static bool
read_quota_v1(const char *folder, uint64_t *out_quota, uint64_t *out_period)
{
    char path[NRM__CGROUP_PATH_SIZE];
    nrm__cgroup_file(folder, "cpu.cfs_quota_us", path, sizeof path);
    if (!nrm__file_read_number(path, out_quota)) { /* -1: none */
        return false;
    }
    nrm__cgroup_file(folder, "cpu.cfs_period_us", path, sizeof path);
    return nrm__file_read_number(path, out_period);
}

static void
apply_quota(const char *folder, bool is_v2, void *context)
{
    int *n_cores = context;
    uint64_t quota, period;
    bool has_quota = is_v2 ? read_quota_v2(folder, &quota, &period)
                           : read_quota_v1(folder, &quota, &period);
    if (!has_quota || period == 0) {
        return;
    }
    uint64_t n = quota / period + (quota % period != 0);
    if (n < (uint64_t)*n_cores) {
        *n_cores = (int)n;
    }
}

int
nrm__n_cores(void)
{
    int n = count_affinity();
    nrm__cgroup_visit("cpu", apply_quota, &n);
    return n > 0 ? n : 1;
}

/* ---- memory ---- */

struct group_files {
    const char *limit, *usage;
    const char *inactive, *active; /* keys of memory.stat: file cache */
};

static const struct group_files files_v1 = {"memory.limit_in_bytes",
                                            "memory.usage_in_bytes",
                                            "total_inactive_file", "total_active_file"};
static const struct group_files files_v2 = {"memory.max", "memory.current",
                                            "inactive_file", "active_file"};

/* File pages are charged to the group but dropped before anything is killed. */
static uint64_t
read_file_cache(const char *folder, const struct group_files *files)
{
    char path[NRM__CGROUP_PATH_SIZE];
    struct nrm__lines lines;
    uint64_t inactive = 0;
    uint64_t active = 0;
    const char *line;
    nrm__cgroup_file(folder, "memory.stat", path, sizeof path);
    if (!nrm__lines_open(&lines, path)) {
        return 0;
    }
    while ((line = nrm__lines_next(&lines)) != NULL) {
        (void)(nrm__line_read_number(line, files->inactive, &inactive) ||
               nrm__line_read_number(line, files->active, &active));
    }
    nrm__lines_close(&lines);
    return inactive + active;
}

static void
apply_limit(const char *folder, bool is_v2, void *context)
{
    struct nrm__memory_state *state = context;
    const struct group_files *files = is_v2 ? &files_v2 : &files_v1;
    char path[NRM__CGROUP_PATH_SIZE];
    uint64_t limit, usage;
    nrm__cgroup_file(folder, files->limit, path, sizeof path);
    if (!nrm__file_read_number(path, &limit) || limit >= INT64_MAX / 2) {
        return; /* version 1 writes "no limit" as a huge number */
    }
    state->cgroup_limit_nbytes = nrm__min(state->cgroup_limit_nbytes, limit);
    nrm__cgroup_file(folder, files->usage, path, sizeof path);
    if (!nrm__file_read_number(path, &usage)) {
        return;
    }
    usage -= nrm__min(usage, read_file_cache(folder, files));
    size_t available = limit > usage ? limit - usage : 0;
    state->cgroup_available_nbytes =
        nrm__min(state->cgroup_available_nbytes, available);
}

static void
read_meminfo(struct nrm__memory_state *state)
{
    struct nrm__lines lines;
    uint64_t kib;
    const char *line;
    if (!nrm__lines_open(&lines, "/proc/meminfo")) {
        return;
    }
    while ((line = nrm__lines_next(&lines)) != NULL) {
        if (nrm__line_read_number(line, "MemTotal", &kib)) {
            state->total_nbytes = kib * 1024;
        }
        else if (nrm__line_read_number(line, "MemAvailable", &kib)) {
            state->available_nbytes = kib * 1024;
        }
    }
    nrm__lines_close(&lines);
}

void
nrm__memory_state(struct nrm__memory_state *out)
{
    struct rlimit memlock;
    *out = (struct nrm__memory_state){SIZE_MAX, SIZE_MAX, SIZE_MAX, SIZE_MAX, SIZE_MAX};
    read_meminfo(out);
    nrm__cgroup_visit("memory", apply_limit, out);
    if (getrlimit(RLIMIT_MEMLOCK, &memlock) == 0 && memlock.rlim_cur != RLIM_INFINITY) {
        out->memlock_limit_nbytes = memlock.rlim_cur;
    }
}

size_t
nrm__host_memory_nbytes(void)
{
    struct nrm__memory_state state;
    nrm__memory_state(&state);
    return nrm__min(state.total_nbytes, state.cgroup_limit_nbytes);
}

size_t
nrm__touchable_nbytes(void)
{
    struct nrm__memory_state state;
    nrm__memory_state(&state);
    return nrm__min(state.available_nbytes, state.cgroup_available_nbytes);
}
