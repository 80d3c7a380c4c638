/*
 * The workloads of one thread. Times are of batches, so that the clock is a small part
 * of them; a sample is the time of one operation in a batch. What is allocated is
 * touched where it can be, and looked through afterwards: an allocator that gave one
 * address twice ends the program.
 */
#include "bench.h"
#include "driver.h"
#include "nrm/adaptors.h"
#include "nrm/registry.h"

#define BATCH 1000

/* Allocates and deallocates blocks of one size. */
void
run_pair(struct allocator *a)
{
    size_t nbytes = parameter("size", 64), n_samples = parameter("samples", 50);
    size_t n_pairs = parameter("batch", BATCH);
    for (size_t i = 0; i < n_samples + 2; i++) {
        uint64_t start = now_ns();
        for (size_t j = 0; j < n_pairs; j++) {
            void *ptr = allocate(a, nbytes, 0);
            touch(a, ptr);
            a->deallocate(a, ptr, nbytes, 0);
        }
        if (i >= 2) { /* the first ones get the memory */
            sample((double)(now_ns() - start) / (double)n_pairs);
        }
    }
}

static size_t
sum(const struct block *blocks, size_t n_blocks)
{
    size_t nbytes = 0;
    for (size_t i = 0; i < n_blocks; i++) {
        nbytes += blocks[i].nbytes;
    }
    return nbytes;
}

static void
deallocate_all(struct allocator *a, struct block *blocks, size_t n_blocks)
{
    check_disjoint(blocks, n_blocks, 16);
    for (size_t i = 0; i < n_blocks; i++) {
        a->deallocate(a, blocks[i].ptr, blocks[i].nbytes, 0);
    }
}

/* Replaces one of `n` live blocks of 1 to `max` bytes, chosen at random. The random
   numbers are made before the clock runs. */
void
run_live(struct allocator *a)
{
    size_t n = parameter("n", 1000), max = parameter("max", 65536);
    size_t n_samples = parameter("samples", 50);
    uint64_t random = parameter("seed", 1) + 1;
    struct block *blocks = table(n, sizeof *blocks);
    struct {
        size_t index, nbytes;
    } *plan = table(BATCH, sizeof *plan);
    for (size_t i = 0; i < n; i++) {
        size_t nbytes = random_between(&random, 1, max);
        blocks[i] = (struct block){allocate(a, nbytes, 0), nbytes};
        touch(a, blocks[i].ptr);
    }
    for (size_t i = 0; i < n_samples + 5; i++) {
        for (size_t j = 0; j < BATCH; j++) {
            plan[j].index = random_between(&random, 0, n - 1);
            plan[j].nbytes = random_between(&random, 1, max);
        }
        uint64_t start = now_ns();
        for (size_t j = 0; j < BATCH; j++) {
            struct block *block = &blocks[plan[j].index];
            a->deallocate(a, block->ptr, block->nbytes, 0);
            block->nbytes = plan[j].nbytes;
            block->ptr = allocate(a, block->nbytes, 0);
            touch(a, block->ptr);
        }
        if (i >= 5) {
            sample((double)(now_ns() - start) / BATCH);
        }
    }
    extra("live_bytes", (double)sum(blocks, n));
    deallocate_all(a, blocks, n);
}

/* Makes a group of blocks of `min` to `max` bytes, uniform in the logarithm, and drops
   it: every second one in order, then the others backwards. */
void
run_churn(struct allocator *a)
{
    size_t n = parameter("n", 512), n_samples = parameter("samples", 50);
    size_t min = parameter("min", 16), max = parameter("max", 1 << 20);
    uint64_t random = parameter("seed", 1) + 1;
    struct block *blocks = table(n, sizeof *blocks);
    for (size_t i = 0; i < n_samples + 2; i++) {
        for (size_t j = 0; j < n; j++) {
            blocks[j].nbytes = random_log(&random, min, max);
        }
        uint64_t start = now_ns();
        for (size_t j = 0; j < n; j++) {
            blocks[j].ptr = allocate(a, blocks[j].nbytes, 0);
            touch(a, blocks[j].ptr);
        }
        for (size_t j = 0; j < n; j += 2) {
            a->deallocate(a, blocks[j].ptr, blocks[j].nbytes, 0);
        }
        for (size_t j = n / 2 * 2; j > 0; j -= 2) {
            a->deallocate(a, blocks[j - 1].ptr, blocks[j - 1].nbytes, 0);
        }
        if (i >= 2) {
            sample((double)(now_ns() - start) / (double)n);
        }
    }
}

/* ---- random_allocations, as RMM's benchmark of that name defines it: its sizes, its
   probabilities, its random numbers in its order ---- */

struct random_run {
    struct block *blocks;
    size_t n_live, n_made, n_failed;
    uint64_t live_nbytes, peak_nbytes;
};

/* One of the 2 n steps: 73 % allocate while fewer than n were made and the bytes stay
   under the cap, else one of the live blocks, chosen at random, is freed. A request
   that fails becomes such a free. */
static void
random_step(struct allocator *a, struct random_run *run, struct standard_random *random,
            size_t n, size_t max, uint64_t cap)
{
    size_t nbytes = standard_uniform(random, 1, max);
    bool allocates = true;
    if (run->n_live > 0) {
        uint64_t chance = standard_uniform(random, 0, 99);
        allocates = chance < 73 && run->n_made < n && run->live_nbytes + nbytes < cap;
    }
    void *ptr = allocates ? a->allocate(a, nbytes, 0) : NULL;
    run->n_failed += allocates && ptr == NULL;
    if (ptr != NULL) {
        run->blocks[run->n_live++] = (struct block){ptr, nbytes};
        run->n_made++;
        run->live_nbytes += nbytes;
        if (run->live_nbytes > run->peak_nbytes) {
            run->peak_nbytes = run->live_nbytes;
        }
    }
    else if (run->n_live > 0) {
        size_t i = standard_uniform(random, 0, n - 1) % run->n_live;
        struct block block = run->blocks[i];
        run->blocks[i] = run->blocks[--run->n_live];
        a->deallocate(a, block.ptr, block.nbytes, 0);
        run->live_nbytes -= block.nbytes;
    }
}

void
run_random(struct allocator *a)
{
    size_t n = parameter("n", 1000), max = parameter("max", 4 << 20);
    size_t cap = parameter("cap", (size_t)16000 << 20);
    size_t n_samples = parameter("samples", 3);
    struct block *blocks = table(n, sizeof *blocks);
    for (size_t i = 0; i < n_samples; i++) {
        struct random_run run = {.blocks = blocks};
        struct standard_random random = STANDARD_RANDOM;
        uint64_t start = now_ns();
        for (size_t j = 0; j < 2 * n; j++) {
            random_step(a, &run, &random, n, max, cap);
        }
        sample((double)(now_ns() - start) / 1e6);
        extra("failed", (double)run.n_failed);
        extra("peak_live_bytes", (double)run.peak_nbytes);
        extra("reserved_bytes", (double)allocator_reserved(a));
        deallocate_all(a, blocks, run.n_live);
    }
}

/* ---- multi_stream_allocations, as RMM's benchmark of that name defines it ---- */

#define KERNEL_NBYTES 8 /* the block of each kernel: one number */

/* A block on every stream, all at a time. */
static void
prewarm(struct allocator *a)
{
    void *blocks[MAX_STREAMS];
    for (size_t i = 0; i < a->n_streams; i++) {
        blocks[i] = allocate(a, KERNEL_NBYTES, i);
    }
    for (size_t i = 0; i < a->n_streams; i++) {
        a->deallocate(a, blocks[i], KERNEL_NBYTES, i);
    }
}

/* Microseconds of kernels that each have a block for as long as the launch takes, on
   the streams in turn, and of the wait for all of them. */
static double
kernels_in_turn(struct allocator *a, size_t n_kernels, void *kept)
{
    uint64_t start = now_ns();
    for (size_t i = 0; i < n_kernels; i++) {
        size_t stream = i % a->n_streams;
        void *ptr = kept != NULL ? kept : allocate(a, KERNEL_NBYTES, stream);
        driver_launch(ptr, a->handles[stream]);
        if (kept == NULL) {
            a->deallocate(a, ptr, KERNEL_NBYTES, stream);
        }
    }
    driver_expect(driver.synchronize(), "cuCtxSynchronize");
    return (double)(now_ns() - start) / 1e3;
}

/* `cold`: the first time with a new resource; else every time with one, after a block
   on every stream where `warm`. alone=1: the kernels, and one block for all of them. */
void
run_multi_stream(struct allocator *a)
{
    size_t n_samples = parameter("samples", 7), n_kernels = parameter("kernels", 4);
    bool is_cold = parameter("cold", 0) != 0, is_alone = parameter("alone", 0) != 0;
    if (a->n_streams == 0) {
        fail("multi_stream needs streams");
    }
    driver_open_kernel();
    void *kept = allocate(a, KERNEL_NBYTES, 0);
    kernels_in_turn(a, n_kernels, kept); /* the first launch loads the kernel */
    if (!is_alone) {
        a->deallocate(a, kept, KERNEL_NBYTES, 0);
        kept = NULL;
        allocator_renew(a);
    }
    if (parameter("warm", 0) != 0) {
        prewarm(a);
    }
    for (size_t i = 0; i < n_samples; i++) {
        if (is_cold && i > 0) {
            allocator_renew(a);
        }
        sample(kernels_in_turn(a, n_kernels, kept));
    }
    if (kept != NULL) {
        a->deallocate(a, kept, KERNEL_NBYTES, 0);
    }
}

/* Looks up the current resource of device 0, or with asked=1 that of the current
   device. The references go when the clock stands. */
void
run_current(struct allocator *a)
{
    size_t n_samples = parameter("samples", 50);
    bool is_asked = parameter("asked", 0) != 0;
    nrm_resource *mr = NULL;
    (void)a;
    for (size_t i = 0; i < n_samples + 2; i++) {
        nrm_status status = NRM_OK;
        uint64_t start = now_ns();
        for (size_t j = 0; j < BATCH && status == NRM_OK; j++) {
            status = is_asked ? nrm_get_current_device_resource(&mr)
                              : nrm_get_per_device_resource(0, &mr);
        }
        uint64_t end = now_ns();
        if (status != NRM_OK) {
            fail("no current resource: %s", nrm_last_error()->message);
        }
        for (size_t j = 0; j < BATCH; j++) {
            nrm_resource_release(mr);
        }
        if (i >= 2) {
            sample((double)(end - start) / BATCH);
        }
    }
}

static double
time_pairs(struct allocator *a, nrm_resource *mr, size_t nbytes, size_t n_pairs)
{
    a->mr = mr;
    uint64_t start = now_ns();
    for (size_t i = 0; i < n_pairs; i++) {
        void *ptr = allocate(a, nbytes, 0);
        touch(a, ptr);
        a->deallocate(a, ptr, nbytes, 0);
    }
    return (double)(now_ns() - start) / (double)n_pairs;
}

/* What a log over statistics over a limit adds to a pair: both are measured by turns.
   The rows of so few pairs have room where they are noted, and are written when the
   clock stands. */
void
run_stack(struct allocator *a)
{
    size_t nbytes = parameter("size", 64), n_samples = parameter("samples", 200);
    size_t n_pairs = parameter("batch", 500);
    nrm_resource *plain = a->mr, *stack = allocator_stack(a);
    for (size_t i = 0; i < n_samples + 10; i++) {
        double without = time_pairs(a, plain, nbytes, n_pairs);
        double with = time_pairs(a, stack, nbytes, n_pairs);
        if (nrm_logging_flush(stack) != NRM_OK) {
            fail("the log: %s", nrm_last_error()->message);
        }
        if (i >= 10) {
            sample(with - without);
            extra("pair_ns", without);
        }
    }
    a->mr = plain;
    nrm_resource_release(stack);
}
