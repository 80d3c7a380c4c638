/*
 * An upstream that hands out addresses of a reserved range and never any memory, so
 * that workloads of many gigabytes run anywhere and time nothing but the allocator
 * above it. First fit over a sorted list of free ranges: a pool asks for few and large
 * segments.
 */
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>

#include "bench.h"
#include "nrm/sources.h"

#define GRANULE ((size_t)2 << 20)
#define MAX_RANGES ((size_t)1 << 16)

struct range {
    uintptr_t start;
    size_t nbytes;
};

static struct {
    pthread_mutex_t lock;
    struct range *free; /* sorted, none touches the next */
    size_t n_free;
} space = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void
remove_range(size_t i)
{
    memmove(&space.free[i], &space.free[i + 1],
            (space.n_free - i - 1) * sizeof *space.free);
    space.n_free--;
}

static nrm_status
take(void *context, size_t nbytes, size_t alignment, nrm_stream *stream, void **out)
{
    nrm_status status = NRM_OUT_OF_MEMORY;
    (void)context;
    (void)stream;
    if (nbytes > SIZE_MAX / 2 || alignment > GRANULE) {
        return NRM_OUT_OF_MEMORY;
    }
    nbytes = (nbytes + GRANULE - 1) / GRANULE * GRANULE;
    pthread_mutex_lock(&space.lock);
    for (size_t i = 0; i < space.n_free; i++) {
        struct range *range = &space.free[i];
        if (range->nbytes >= nbytes) {
            *out = (void *)range->start; // NOLINT: an address is all it is
            range->start += nbytes;
            range->nbytes -= nbytes;
            if (range->nbytes == 0) {
                remove_range(i);
            }
            status = NRM_OK;
            break;
        }
    }
    pthread_mutex_unlock(&space.lock);
    return status;
}

static nrm_status
give_back(void *context, void *ptr, size_t nbytes, nrm_stream *stream)
{
    uintptr_t start = (uintptr_t)ptr;
    size_t i = 0;
    (void)context;
    (void)stream;
    nbytes = (nbytes + GRANULE - 1) / GRANULE * GRANULE;
    pthread_mutex_lock(&space.lock);
    while (i < space.n_free && space.free[i].start < start) {
        i++;
    }
    bool joins_previous = i > 0 &&
                          space.free[i - 1].start + space.free[i - 1].nbytes == start;
    if (joins_previous) {
        space.free[--i].nbytes += nbytes;
    }
    else {
        if (space.n_free == MAX_RANGES) {
            fail("more than %zu free ranges of addresses", MAX_RANGES);
        }
        memmove(&space.free[i + 1], &space.free[i],
                (space.n_free - i) * sizeof *space.free);
        space.free[i] = (struct range){start, nbytes};
        space.n_free++;
    }
    struct range *joined = &space.free[i];
    if (i + 1 < space.n_free &&
        joined->start + joined->nbytes == space.free[i + 1].start) {
        joined->nbytes += space.free[i + 1].nbytes;
        remove_range(i + 1);
    }
    pthread_mutex_unlock(&space.lock);
    return NRM_OK;
}

/* The largest range that the system lets us reserve. */
static struct range
reserve(void)
{
    for (size_t nbytes = (size_t)1 << 42; nbytes >= (size_t)1 << 34; nbytes /= 2) {
        void *ptr = mmap(NULL, nbytes, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (ptr != MAP_FAILED) {
            uintptr_t start = ((uintptr_t)ptr + GRANULE - 1) / GRANULE * GRANULE;
            return (struct range){start, nbytes - GRANULE};
        }
    }
    fail("no range of addresses can be reserved here");
}

nrm_status
addresses_create(nrm_kind kind, nrm_resource **out)
{
    nrm_callback_options options = NRM_OPTIONS(nrm_callback_options);
    space.free = table(MAX_RANGES, sizeof *space.free);
    space.free[0] = reserve();
    space.n_free = 1;
    options.kind = kind;
    options.allocate = take;
    options.deallocate = give_back;
    return nrm_callback_create(&options, out);
}
