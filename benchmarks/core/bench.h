/*
 * What the files of this program share: allocators behind function pointers,
 * parameters, samples, a clock.
 *
 * Every allocator is called through the same two pointers, ours included, so that no
 * one is inlined. The program's own tables come from mmap: a malloc that is measured
 * sees only what it is asked for by the workload.
 */
#ifndef BENCH_H
#define BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nrm/resource.h"

/* ---- allocators (allocators.c) ---- */

#define MAX_STREAMS 32

struct allocator {
    void *(*allocate)(struct allocator *self, size_t nbytes, size_t stream);
    void (*deallocate)(struct allocator *self, void *ptr, size_t nbytes, size_t stream);
    const char *name;
    nrm_resource *mr;   /* NULL: not one of ours */
    void *peer;         /* NULL: not one of RMM's */
    bool is_accessible; /* the host may touch its memory */
    size_t n_streams;   /* 0: no streams; requests name one of them by number */
    nrm_stream *streams[MAX_STREAMS];
    void *handles[MAX_STREAMS];
};

/* By name: "malloc", "cuMemAllocAsync", "addresses", "rmm:pool" and others of RMM's, or
   one of the registry. */
void allocator_open(struct allocator *self, const char *name);
/* The same with nothing in it, as it was after it was opened (ours: with new=1). */
void allocator_renew(struct allocator *self);
void allocator_close(struct allocator *self);
/* Gives back what is not in use. */
void allocator_trim(struct allocator *self);
/* Bytes taken from upstream and, of those, still in use by a GPU; 0 where not known. */
uint64_t allocator_reserved(struct allocator *self);

/* A log, which is thrown away, over statistics over a limit over a resource of ours; a
   reference. */
nrm_resource *allocator_stack(struct allocator *self);

/* One that cannot fail: the program ends with what went wrong. */
void *allocate(struct allocator *self, size_t nbytes, size_t stream);

/* Another size for a block, with what is in it where the host can see that. */
void *reallocate(struct allocator *self, void *ptr, size_t old_nbytes, size_t nbytes,
                 size_t stream);

/* Writes the first byte, where there is one to write. */
static inline void
touch(const struct allocator *self, void *ptr)
{
    if (self->is_accessible) {
        *(volatile char *)ptr = 1;
    }
}

/* RMM's resources, through the library that the environment names (rmm.c). */
void rmm_open(struct allocator *self, const char *name);
void rmm_close(struct allocator *self);
const char *rmm_error(void);

/* An upstream whose memory nobody may touch: addresses alone (addresses.c). */
nrm_status addresses_create(nrm_kind kind, nrm_resource **out);

/* ---- parameters, results (main.c) ---- */

/* "key=value" of the command line; sizes may have units. */
size_t parameter(const char *key, size_t otherwise);
const char *text_parameter(const char *key, const char *otherwise);

void fail(const char *format, ...) NRM_PRINTF(1, 2) __attribute__((noreturn));

/* Adds one measured value; what is printed at the end is their distribution. */
void sample(double value);
/* A figure that stands beside the samples. */
void extra(const char *name, double value);

/* ---- tools ---- */

uint64_t now_ns(void);
/* Zeroed memory for a table, present and never freed. */
void *table(size_t n_items, size_t item_nbytes);
uint64_t random_next(uint64_t *state);
/* At least `low`, at most `high`, uniform, or uniform in the logarithm. */
size_t random_between(uint64_t *state, size_t low, size_t high);
size_t random_log(uint64_t *state, size_t low, size_t high);

/* std::default_random_engine of libstdc++ with its first seed, and the numbers that its
   std::uniform_int_distribution makes of it: RMM's benchmark draws from these. */
struct standard_random {
    uint32_t state;
};
#define STANDARD_RANDOM ((struct standard_random){1})
uint64_t standard_uniform(struct standard_random *random, uint64_t low, uint64_t high);

struct block {
    void *ptr;
    size_t nbytes;
};

/* Ends the program unless the blocks are aligned and disjoint. Sorts them. */
void check_disjoint(struct block *blocks, size_t n_blocks, size_t alignment);

/* ---- workloads ---- */

void run_pair(struct allocator *a);
void run_live(struct allocator *a);
void run_churn(struct allocator *a);
void run_random(struct allocator *a);
void run_threads(struct allocator *a);
void run_handoff(struct allocator *a);
void run_grow(struct allocator *a);
void run_replay(struct allocator *a);
void run_usage(struct allocator *a);
void run_multi_stream(struct allocator *a);
void run_use(struct allocator *a);
void run_park(struct allocator *a);
void run_idle_pair(struct allocator *a);
void run_copy_loop(struct allocator *a);
void run_current(struct allocator *a);
void run_stack(struct allocator *a);
void write_trace(void);

#endif
