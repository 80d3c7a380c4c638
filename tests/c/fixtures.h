/* What several test programs need: sources, one that counts among them, patterns, a
   reproducible stream of random numbers, and starting the core as the extension
   does. */
#ifndef NRM_TESTS_FIXTURES_H
#define NRM_TESTS_FIXTURES_H

#include <stdatomic.h>
#include <stdlib.h>

#include "builtin.h"
#include "check.h"
#include "nrm/adaptors.h"
#include "nrm/pools.h"
#include "nrm/registry.h"
#include "nrm/sources.h"

/* A C callback source over the C heap that counts what it gave, with an optional
   limit. */
struct counting {
    atomic_size_t n_live, n_allocated;
    atomic_size_t live_nbytes;
    size_t limit_nbytes; /* 0: none */
    size_t offset;       /* every address is this much past a multiple of 4096 */
    atomic_int n_destroyed;
};

static inline nrm_status
counting_allocate(void *context, size_t nbytes, size_t alignment, nrm_stream *stream,
                  void **out)
{
    struct counting *counting = context;
    (void)stream;
    if (nbytes > (size_t)1 << 40) {
        return NRM_OUT_OF_MEMORY; /* sanitizers end the program when asked for that */
    }
    if (counting->limit_nbytes != 0 &&
        atomic_load(&counting->live_nbytes) + nbytes > counting->limit_nbytes) {
        return NRM_OUT_OF_MEMORY;
    }
    char *memory =
        aligned_alloc(4096, (nbytes + counting->offset + 8191) / 4096 * 4096);
    if (memory == NULL || alignment > 4096) {
        free(memory);
        return NRM_OUT_OF_MEMORY;
    }
    atomic_fetch_add(&counting->n_live, 1);
    atomic_fetch_add(&counting->n_allocated, 1);
    atomic_fetch_add(&counting->live_nbytes, nbytes);
    *out = memory + counting->offset;
    return NRM_OK;
}

static inline nrm_status
counting_deallocate(void *context, void *ptr, size_t nbytes, nrm_stream *stream)
{
    struct counting *counting = context;
    (void)stream;
    atomic_fetch_sub(&counting->n_live, 1);
    atomic_fetch_sub(&counting->live_nbytes, nbytes);
    free((char *)ptr - counting->offset);
    return NRM_OK;
}

static inline void
counting_destroy(void *context)
{
    struct counting *counting = context;
    atomic_fetch_add(&counting->n_destroyed, 1);
}

static inline nrm_resource *
counting_source(struct counting *counting)
{
    nrm_callback_options options = NRM_OPTIONS(nrm_callback_options);
    nrm_resource *mr = NULL;
    options.kind = NRM_KIND_HOST;
    options.allocate = counting_allocate;
    options.deallocate = counting_deallocate;
    options.destroy = counting_destroy;
    options.context = counting;
    CHECK_OK(nrm_callback_create(&options, &mr));
    return mr;
}

/* A source of ordinary memory, by functions. */
static inline nrm_resource *
callback_source(nrm_status (*allocate)(void *context, size_t nbytes, size_t alignment,
                                       nrm_stream *stream, void **out),
                nrm_status (*deallocate)(void *context, void *ptr, size_t nbytes,
                                         nrm_stream *stream),
                void *context)
{
    nrm_callback_options options = NRM_OPTIONS(nrm_callback_options);
    nrm_resource *mr = NULL;
    options.kind = NRM_KIND_HOST;
    options.allocate = allocate;
    options.deallocate = deallocate;
    options.context = context;
    CHECK_OK(nrm_callback_create(&options, &mr));
    return mr;
}

static inline nrm_resource *
host_source(void)
{
    nrm_resource *mr = NULL;
    CHECK_OK(nrm_host_create(NULL, &mr));
    return mr;
}

static inline nrm_resource *
pinned_source(void)
{
    nrm_resource *mr = NULL;
    CHECK_OK(nrm_pinned_create(NULL, &mr));
    return mr;
}

static inline nrm_resource *
managed_source(void)
{
    nrm_resource *mr = NULL;
    CHECK_OK(nrm_managed_create(NULL, &mr));
    return mr;
}

static inline nrm_resource *
device_source(void)
{
    nrm_resource *mr = NULL;
    CHECK_OK(nrm_device_create(NULL, &mr));
    return mr;
}

/* A statistics adaptor over `upstream`, whose reference it takes. */
static inline nrm_resource *
statistics_over(nrm_resource *upstream)
{
    nrm_resource *mr = NULL;
    CHECK_OK(nrm_statistics_create(upstream, &mr));
    nrm_resource_release(upstream);
    return mr;
}

/* The same of a limiter, and of a pool; 0: no limit. */
static inline nrm_resource *
limiting_over(nrm_resource *upstream, size_t nbytes)
{
    nrm_limiting_options options = NRM_OPTIONS(nrm_limiting_options);
    nrm_resource *mr = NULL;
    options.allocation_limit = nbytes;
    CHECK_OK(nrm_limiting_create(upstream, &options, &mr));
    nrm_resource_release(upstream);
    return mr;
}

static inline nrm_resource *
pool_over(nrm_resource *upstream, size_t maximum_nbytes)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    nrm_resource *mr = NULL;
    options.maximum_nbytes = maximum_nbytes;
    CHECK_OK(nrm_pool_create(upstream, &options, &mr));
    nrm_resource_release(upstream);
    return mr;
}

static inline nrm_resource *
host_pool(void)
{
    return pool_over(host_source(), 0);
}

static inline void *
allocate(nrm_resource *mr, size_t nbytes)
{
    void *ptr = NULL;
    CHECK_OK(nrm_resource_allocate(mr, nbytes, 0, NULL, &ptr));
    return ptr;
}

static inline void
deallocate(nrm_resource *mr, void *ptr)
{
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
}

static inline nrm_statistics
statistics_of(nrm_resource *mr)
{
    nrm_statistics statistics = {0};
    CHECK_OK(nrm_resource_statistics(mr, &statistics));
    return statistics;
}

static inline int64_t
live_nbytes(nrm_resource *mr)
{
    return statistics_of(mr).current_bytes;
}

static inline int64_t
reserved_nbytes(nrm_resource *mr)
{
    return statistics_of(mr).reserved_bytes;
}

static inline int64_t
parked_nbytes(nrm_resource *mr)
{
    return statistics_of(mr).parked_bytes;
}

/* xorshift64: the same numbers on every machine. */
static inline uint64_t
next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* Writes a pattern that depends on `key` into the first, the last and every 61st
   byte. */
static inline void
write_pattern(void *ptr, size_t nbytes, unsigned key)
{
    unsigned char *bytes = ptr;
    for (size_t i = 0; i < nbytes; i += 61) {
        bytes[i] = (unsigned char)(key + i);
    }
    bytes[nbytes - 1] = (unsigned char)(key + nbytes - 1);
}

static inline bool
has_pattern(const void *ptr, size_t nbytes, unsigned key, size_t written_nbytes)
{
    const unsigned char *bytes = ptr;
    for (size_t i = 0; i < nbytes; i += 61) {
        if (bytes[i] != (unsigned char)(key + i)) {
            return false;
        }
    }
    return nbytes != written_nbytes ||
           bytes[nbytes - 1] == (unsigned char)(key + nbytes - 1);
}

/* Of the live block at an address; not to be released. */
static inline nrm_resource *
owner_of(const void *ptr)
{
    nrm_block_info info = {0};
    CHECK_OK(nrm_block_find(ptr, &info));
    nrm_resource_release(info.resource);
    return info.resource;
}

#endif
