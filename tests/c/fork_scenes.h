/*
 * A fork, for test_left_out.c: what the kernel's own table says of a range, in this
 * process or at the moment of the fork, and scenes in which every other block was given
 * back to resources over page-locked memory.
 */
#ifndef NRM_TESTS_FORK_SCENES_H
#define NRM_TESTS_FORK_SCENES_H

#include <sys/resource.h>
#include <sys/uio.h>

#include "base/bits.h"
#include "core/left_out.h"
#include "fixtures.h"
#include "nrm/adaptors.h"
#include "nrm/options.h"
#include "nrm/sources.h"
#include "os/fork.h"
#include "os/lines.h"
#include "simulator.h"

#define KIB ((size_t)1024)
#define MIB (1024 * KIB)
#define PAGE ((size_t)4096)
#define BLOCK MIB
#define N_BLOCKS 8u

/* ---- the kernel's table ---- */

struct seen {
    size_t nbytes;   /* of a range, that a child would be made without */
    size_t n_ranges; /* with such bytes */
};

/* "7f00a0000000-7f00a0021000 rw-p ..." */
static inline bool
read_range(const char *line, uintptr_t *out_start, uintptr_t *out_end)
{
    uintptr_t start, end;
    char rights[8];
    int n = sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %7s", &start, &end, rights);
    bool is_range = n == 3 &&
                    strlen(rights) == 4; /* other lines may begin as numbers */
    *out_start = is_range ? start : *out_start;
    *out_end = is_range ? end : *out_end;
    return is_range;
}

static inline struct seen
look(uintptr_t start, size_t nbytes)
{
    struct seen seen = {0};
    struct nrm__lines smaps;
    uintptr_t low = 0, high = 0, end = start + nbytes;
    const char *line;
    if (!nrm__lines_open(&smaps, "/proc/self/smaps")) {
        CHECK_MSG(false, "there is no /proc/self/smaps");
        return seen;
    }
    while ((line = nrm__lines_next(&smaps)) != NULL) {
        if (read_range(line, &low, &high)) {
            continue;
        }
        if (strncmp(line, "VmFlags:", 8) == 0 && strstr(line, " dc") != NULL &&
            low < end && high > start) {
            seen.nbytes += nrm__min(high, end) - nrm__max(low, start);
            seen.n_ranges++;
        }
    }
    nrm__lines_close(&smaps);
    return seen;
}

static inline bool
is_readable(uintptr_t address)
{
    char byte;
    struct iovec own = {&byte, 1}, other = {(void *)address, 1};
    return process_vm_readv(getpid(), &own, 1, &other, 1, 0) == 1;
}

/* How many pages that lie in a range as a whole can be read. */
static inline size_t
n_readable(const void *ptr, size_t nbytes)
{
    uintptr_t at = nrm__align_up((uintptr_t)ptr, PAGE);
    uintptr_t end = nrm__align_down((uintptr_t)ptr + nbytes, PAGE);
    size_t n = 0;
    for (; at < end; at += PAGE) {
        n += is_readable(at);
    }
    return n;
}

/* ---- the moment of the fork ---- */

struct watched {
    uintptr_t start;
    size_t nbytes;
    struct seen seen;
};

static struct watched watched[N_BLOCKS];

static size_t n_watched;

static inline void
watch(const void *ptr, size_t nbytes)
{
    watched[n_watched++] = (struct watched){(uintptr_t)ptr, nbytes, {0}};
}

/* After every hook of ours has run. */
static inline void
look_at_watched(void)
{
    for (size_t i = 0; i < n_watched; i++) {
        watched[i].seen = look(watched[i].start, watched[i].nbytes);
    }
}

static const struct nrm__fork_hook looking_hook = {.rank = 1000,
                                                   .prepare = look_at_watched};

__attribute__((constructor)) static void
add_hook(void)
{
    nrm__fork_hook_add(&looking_hook);
}

/* ---- resources over page-locked memory ---- */

static inline nrm_resource *
pool_with(nrm_resource *upstream, nrm_reuse reuse)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    nrm_resource *mr = NULL;
    options.reuse = reuse;
    CHECK_OK(nrm_pool_create(upstream, &options, &mr));
    nrm_resource_release(upstream);
    return mr;
}

static inline nrm_resource *
tracked_pool(void)
{
    return pool_with(pinned_source(), NRM_REUSE_CONTEXT);
}

static inline nrm_resource *
immediate_pool(void)
{
    return pool_with(pinned_source(), NRM_REUSE_IMMEDIATE);
}

static inline nrm_resource *
recorded_pool(void)
{
    return pool_with(pinned_source(), NRM_REUSE_RECORDED);
}

static inline nrm_resource *
pool_of_a_pool(void)
{
    return pool_with(tracked_pool(), NRM_REUSE_CONTEXT);
}

static inline nrm_resource *
counted_pool(void)
{
    return statistics_over(tracked_pool());
}

static inline nrm_resource *
fixed_size(void)
{
    nrm_fixed_size_options options = NRM_OPTIONS(nrm_fixed_size_options);
    nrm_resource *source = pinned_source(), *mr = NULL;
    options.block_nbytes = BLOCK;
    options.n_blocks = N_BLOCKS; /* none stays free */
    CHECK_OK(nrm_fixed_size_create(source, &options, &mr));
    nrm_resource_release(source);
    return mr;
}

static inline nrm_resource *
arena(void)
{
    nrm_arena_options options = NRM_OPTIONS(nrm_arena_options);
    nrm_resource *source = pinned_source(), *mr = NULL;
    options.nbytes = 32 * MIB;
    CHECK_OK(nrm_arena_create(source, &options, &mr));
    nrm_resource_release(source);
    return mr;
}

static inline nrm_resource *
bins(void)
{
    nrm_binning_options options = NRM_OPTIONS(nrm_binning_options);
    nrm_resource *pool = tracked_pool(), *mr = NULL;
    options.make_bins = true;
    options.min_exponent = options.max_exponent = 20;
    CHECK_OK(nrm_binning_create(pool, &options, &mr));
    nrm_resource_release(pool);
    return mr;
}

static const struct kind {
    const char *name;
    nrm_resource *(*make)(void);
} kinds[] = {
    {"a_pool", tracked_pool},
    {"a_pool_whose_blocks_threads_keep", immediate_pool},
    {"a_pool_with_known_uses", recorded_pool},
    {"a_pool_of_a_pool", pool_of_a_pool},
    {"a_pool_that_is_counted", counted_pool},
    {"blocks_of_one_size", fixed_size},
    {"an_arena", arena},
    {"bins", bins},
    {"a_source", pinned_source},
};

/* ---- a scene: blocks of which every other one was given back ---- */

static struct scene {
    nrm_resource *mr;
    void *ptrs[N_BLOCKS];
} scene;

static inline bool
is_idle(size_t i)
{
    return i % 2 == 1;
}

static inline void
set_fork(const char *text)
{
    CHECK_OK(nrm_option_set(NRM_OPT_FORK, text));
}

/* The GPU is not done with what is given back, so that it stays where it is. */
static inline void
begin(const struct kind *kind)
{
    simulator_start(NULL);
    scene.mr = kind->make();
    n_watched = 0;
    for (size_t i = 0; i < N_BLOCKS; i++) {
        scene.ptrs[i] = allocate(scene.mr, BLOCK);
        write_pattern(scene.ptrs[i], BLOCK, (unsigned)i);
        watch(scene.ptrs[i], BLOCK);
    }
    for (size_t i = 0; i < N_BLOCKS; i++) {
        if (is_idle(i)) {
            CHECK_OK(nrm_resource_deallocate(scene.mr, scene.ptrs[i], 0, NULL));
        }
    }
}

static inline void
give_the_rest_back(void)
{
    for (size_t i = 0; i < N_BLOCKS; i++) {
        if (!is_idle(i)) {
            CHECK_OK(nrm_resource_deallocate(scene.mr, scene.ptrs[i], 0, NULL));
        }
    }
}

static inline void
check_whole(nrm_resource *mr, void *context)
{
    (void)context;
    if (mr->ops->check != NULL) {
        mr->ops->check(mr);
    }
}

static inline void
check_all(void)
{
    nrm__resource_for_each(check_whole, NULL);
}

static inline void
end(void)
{
    give_the_rest_back();
    check_all();
    nrm_resource_release(scene.mr);
    for (int i = 0; i < 200 && simulator_count(NRM_CUDASIM_REGISTRATIONS) != 0; i++) {
        (void)nrm__retired_drain(UINT64_MAX);
        usleep(1000); /* the background thread may hold the last one */
    }
    CHECK_EQ(simulator_count(NRM_CUDASIM_REGISTRATIONS), 0u);
    CHECK_EQ(nrm__left_out_copied_nbytes(), 0u);
    simulator_check_faults();
    n_watched = 0;
}

static inline void
check_parent(void)
{
    for (size_t i = 0; i < N_BLOCKS; i++) {
        CHECK_EQ(look((uintptr_t)scene.ptrs[i], BLOCK).nbytes, 0u);
        CHECK(is_idle(i) || has_pattern(scene.ptrs[i], BLOCK, (unsigned)i, BLOCK));
    }
    CHECK_EQ(nrm__left_out_scope(), NRM__LEFT_OUT_NOTHING);
}

#endif
