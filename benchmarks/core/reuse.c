/*
 * What safe reuse costs: noting uses, giving back, closing an epoch, and a program that
 * copies from memory which it drops at once. The floors are measured here too, by the
 * same clock in the same program: the calls of the driver that no epoch can do without,
 * and a buffer that is never dropped.
 */
#include <stdlib.h>

#include "bench.h"
#include "driver.h"
#include "nrm/stream.h"
#include "nrm/uses.h"

#define BATCH 1000
#define DISABLE_TIMING 2 /* CU_EVENT_DISABLE_TIMING */
#define RELAXED 2        /* CU_STREAM_CAPTURE_MODE_RELAXED */

/* ---- noting ---- */

/* nrm_record_use of one block: with a stream of ours, or with bare=1 its handle. */
void
run_use(struct allocator *a)
{
    size_t nbytes = parameter("size", 1 << 20), n_samples = parameter("samples", 50);
    bool is_bare = parameter("bare", 0) != 0;
    nrm_stream *stream = a->streams[0];
    uintptr_t handle = nrm_stream_handle(stream);
    void *ptr = allocate(a, nbytes, 0);
    touch(a, ptr);
    for (size_t i = 0; i < n_samples + 2; i++) {
        nrm_status status = NRM_OK;
        uint64_t start = now_ns();
        for (size_t j = 0; j < BATCH && status == NRM_OK; j++) {
            status = is_bare ? nrm_record_use_on_handle(ptr, handle)
                             : nrm_record_use(ptr, stream);
        }
        if (status != NRM_OK) {
            fail("record_use: %s", nrm_last_error()->message);
        }
        if (i >= 2) {
            sample((double)(now_ns() - start) / BATCH);
        }
    }
    a->deallocate(a, ptr, nbytes, 0);
}

/* ---- giving back ---- */

/* Frees of several live blocks, which the rule of reuse parks. */
void
run_park(struct allocator *a)
{
    size_t nbytes = parameter("size", 1 << 20), n_samples = parameter("samples", 200);
    size_t n = parameter("n", 8);
    void **blocks = table(n, sizeof *blocks);
    for (size_t i = 0; i < n_samples + 5; i++) {
        for (size_t j = 0; j < n; j++) {
            blocks[j] = allocate(a, nbytes, 0);
            touch(a, blocks[j]);
        }
        uint64_t start = now_ns();
        for (size_t j = 0; j < n; j++) {
            a->deallocate(a, blocks[j], nbytes, 0);
        }
        if (i >= 5) {
            sample((double)(now_ns() - start) / (double)n);
        }
    }
}

/* ---- a pair beside an idle GPU ---- */

/* What an epoch costs at least: a record of the context, two exchanges of the capture
   mode and a query. */
static void
run_epoch_floor(size_t n_samples)
{
    void *event;
    double factor = (double)parameter("percent", 130) / 100;
    double others =
        60.0 * (double)driver_device_count(); /* each is asked for its state */
    driver_expect(driver.create_event(&event, DISABLE_TIMING), "cuEventCreate");
    for (size_t i = 0; i < n_samples + 2; i++) {
        int result = 0;
        uint64_t start = now_ns();
        for (size_t j = 0; j < BATCH; j++) {
            int mode = RELAXED;
            result |= driver.record_context(driver.context, event);
            result |= driver.exchange_mode(&mode);
            (void)driver.query_event(event); /* it need not be done */
            result |= driver.exchange_mode(&mode);
        }
        driver_expect(result, "a record, a query or an exchange");
        if (i >= 2) {
            double cost = (double)(now_ns() - start) / BATCH;
            sample(factor * cost + others);
            extra("bare_ns", cost);
        }
    }
}

void
run_idle_pair(struct allocator *a)
{
    if (parameter("floor", 0) == 0) {
        run_pair(a);
        return;
    }
    driver_open_reuse();
    run_epoch_floor(parameter("samples", 50));
}

/* ---- copies from what is dropped ---- */

static int
compare_pointers(const void *left, const void *right)
{
    uintptr_t x = (uintptr_t)*(void *const *)left;
    uintptr_t y = (uintptr_t)*(void *const *)right;
    return (x > y) - (x < y);
}

static size_t
count_distinct(void **blocks, size_t n)
{
    size_t n_distinct = 0;
    qsort(blocks, n, sizeof *blocks, compare_pointers);
    for (size_t i = 0; i < n; i++) {
        n_distinct += i == 0 || blocks[i] != blocks[i - 1];
    }
    return n_distinct;
}

/* Allocates, copies to the device asynchronously and drops, without ever waiting; with
   fixed=1 copies from one block instead. A sample is the time of a copy. */
void
run_copy_loop(struct allocator *a)
{
    size_t nbytes = parameter("size", 1 << 20), n = parameter("copies", 4000);
    size_t n_samples = parameter("samples", 5);
    bool is_fixed = parameter("fixed", 0) != 0;
    void **blocks = table(n, sizeof *blocks);
    unsigned long long target = 0;
    driver_open_reuse();
    driver_expect(driver.allocate(&target, nbytes), "cuMemAlloc");
    void *kept = is_fixed ? allocate(a, nbytes, 0) : NULL;
    void *stream = a->handles[0];
    for (size_t i = 0; i < n_samples + 1; i++) {
        int result = 0;
        uint64_t start = now_ns();
        for (size_t j = 0; j < n; j++) {
            blocks[j] = is_fixed ? kept : a->allocate(a, nbytes, 0);
            if (blocks[j] == NULL) {
                fail("no block: %s", nrm_last_error()->message);
            }
            result |= driver.copy_to_device(target, blocks[j], nbytes, stream);
            if (!is_fixed) {
                a->deallocate(a, blocks[j], nbytes, 0);
            }
        }
        driver_expect(result, "cuMemcpyHtoDAsync");
        driver_expect(driver.synchronize(), "cuCtxSynchronize");
        if (i >= 1) { /* the first one gets the memory */
            sample((double)(now_ns() - start) / (double)n);
            extra("blocks", (double)count_distinct(blocks, n));
        }
    }
    if (is_fixed) {
        a->deallocate(a, kept, nbytes, 0);
    }
    driver_expect(driver.deallocate(target), "cuMemFree");
}
