/*
 * Pools and adaptors. See nrm/sources.h for how options work; the upstream is retained.
 */
#ifndef NRM_POOLS_H
#define NRM_POOLS_H

#include "nrm/sources.h"

typedef enum nrm_reuse {
    NRM_REUSE_DEFAULT,   /* the option's value */
    NRM_REUSE_CONTEXT,   /* after everything submitted before the free is done */
    NRM_REUSE_IMMEDIATE, /* at once: only for programs that synchronise themselves */
} nrm_reuse;

typedef enum nrm_on_exhausted {
    NRM_ON_EXHAUSTED_DEFAULT, /* the option's value, else ERROR */
    NRM_ON_EXHAUSTED_ERROR,   /* an error; a route then takes its fallback */
    NRM_ON_EXHAUSTED_WAIT,    /* wait for parked memory as long as it takes */
} nrm_on_exhausted;

#define NRM_SIZE_DEFAULT ((size_t)-1)

typedef struct nrm_pool_options {
    size_t size;
    size_t initial_nbytes; /* taken when the pool is made; 0: nothing */
    size_t maximum_nbytes; /* 0: no limit; for pinned memory half of the host's */
    nrm_reuse reuse;
    size_t parked_limit;    /* bytes; NRM_SIZE_DEFAULT or 0: the option's */
    uint64_t wait_limit_ns; /* 0: the option's */
    nrm_on_exhausted on_exhausted;
} nrm_pool_options;

NRM_API NRM_NODISCARD nrm_status nrm_pool_create(nrm_resource *upstream,
                                                 const nrm_pool_options *options,
                                                 nrm_resource **out);

/*
 * What stands between a handler and its resource: requests under `threshold` go to
 * `small`, others to `large`; when that is exhausted or cannot work here, to `fallback`.
 * `rescue` serves requests of at most 4 KiB that would fail otherwise (NumPy sorts
 * wrongly, without an error, when such a request fails), and everything in a forked child
 * or after the device was lost.
 */
typedef struct nrm_route_options {
    size_t size;
    nrm_resource *large;
    nrm_resource *small;    /* NULL: no threshold */
    nrm_resource *fallback; /* NULL: none */
    nrm_resource *rescue;   /* NULL: none */
    size_t threshold;       /* bytes */
} nrm_route_options;

NRM_API NRM_NODISCARD nrm_status nrm_route_create(const nrm_route_options *options,
                                                  nrm_resource **out);

/*
 * Why a live block that came through `route` is not of the large resource: "below
 * pinned_threshold (64 KiB)", "fell back: ...". Empty when it is, or when `route` is none.
 */
NRM_API void nrm_route_explain(nrm_resource *route, const nrm_block_info *block,
                               char *out, size_t size);

#endif
