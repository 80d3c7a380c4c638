/* What tests of scopes share: resources of every kind, and blocks of three sizes. */
#ifndef NRM_TESTS_SCOPES_H
#define NRM_TESTS_SCOPES_H

#include "base/bits.h"
#include "core/scopes.h"
#include "counts.h"
#include "fixtures.h"

static inline uint64_t
push(nrm_resource *through)
{
    uint64_t scope = 0;
    CHECK_OK(nrm__scope_push(through, &scope));
    CHECK_NE(scope, 0);
    return scope;
}

static inline nrm_counts
counts_of(uint64_t scope)
{
    nrm_counts counts = {0};
    CHECK_OK(nrm__scope_counts(scope, &counts));
    return counts;
}

static inline nrm_counts
pop(uint64_t scope)
{
    nrm_counts counts = {0};
    CHECK_OK(nrm__scope_pop(scope, &counts));
    return counts;
}

static inline void
check_pool(nrm_resource *mr)
{
    if (mr->ops->check != NULL) {
        mr->ops->check(mr);
    }
}

/* ---- resources, of every way to describe a block ---- */

static struct counting counting;

static inline nrm_resource *
make_counting(void)
{
    counting = (struct counting){0};
    return counting_source(&counting);
}

static inline nrm_resource *
make_statistics(void)
{
    return statistics_over(host_pool());
}

static inline nrm_resource *
make_limiting(void)
{
    return limiting_over(host_pool(), NRM__GIB);
}

/* Looks on while its upstream serves. */
static inline nrm_resource *
make_logging(void)
{
    nrm_logging_options options = NRM_OPTIONS(nrm_logging_options);
    nrm_resource *statistics = make_statistics(), *mr = NULL;
    options.path = "/dev/null";
    CHECK_OK(nrm_logging_create(statistics, &options, &mr));
    nrm_resource_release(statistics);
    return mr;
}

static inline nrm_resource *
make_fixed(void)
{
    nrm_fixed_size_options options = NRM_OPTIONS(nrm_fixed_size_options);
    nrm_resource *host = host_source(), *mr = NULL;
    options.block_nbytes = 4 * NRM__MIB;
    CHECK_OK(nrm_fixed_size_create(host, &options, &mr));
    nrm_resource_release(host);
    return mr;
}

static inline nrm_resource *
make_route(void)
{
    nrm_route_options options = NRM_OPTIONS(nrm_route_options);
    nrm_resource *small = host_pool(), *large = host_pool(), *mr = NULL;
    options.small = small;
    options.large = large;
    options.threshold = 100000;
    CHECK_OK(nrm_route_create(&options, &mr));
    nrm_resource_release(small);
    nrm_resource_release(large);
    return mr;
}

/* Its segments are no whole pages, and lie inside others': every look-up takes a
   lock. */
static inline nrm_resource *
make_overlay(void)
{
    nrm_fixed_size_options options = NRM_OPTIONS(nrm_fixed_size_options);
    nrm_resource *pool = host_pool(), *mr = NULL;
    options.block_nbytes = 4 * NRM__MIB + 4096;
    CHECK_OK(nrm_fixed_size_create(pool, &options, &mr));
    nrm_resource_release(pool);
    return mr;
}

static const struct resource {
    const char *name;
    nrm_resource *(*make)(void);
} resources[] = {
    {"pool", host_pool},         {"host", host_source},
    {"callback", make_counting}, {"statistics", make_statistics},
    {"logging", make_logging},   {"limiting", make_limiting},
    {"fixed size", make_fixed},  {"route", make_route},
    {"overlay", make_overlay},
};

enum { SMALL = 100, MEDIUM = 40000, LARGE = 3 << 20, ALL = SMALL + MEDIUM + LARGE };

static inline void
allocate_three(nrm_resource *mr, void *out[3])
{
    out[0] = allocate(mr, SMALL);
    out[1] = allocate(mr, MEDIUM);
    out[2] = allocate(mr, LARGE);
}

static inline void
deallocate_three(nrm_resource *mr, void *ptrs[3])
{
    for (int i = 0; i < 3; i++) {
        deallocate(mr, ptrs[i]);
    }
}

#endif
