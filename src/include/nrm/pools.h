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
    NRM_REUSE_RECORDED,  /* after its known uses (nrm/uses.h), which decide alone */
} nrm_reuse;

typedef enum nrm_on_exhausted {
    NRM_ON_EXHAUSTED_DEFAULT, /* the option's value, else ERROR */
    NRM_ON_EXHAUSTED_ERROR,   /* an error; a route then takes its fallback */
    NRM_ON_EXHAUSTED_WAIT,    /* wait for parked memory as long as it takes */
} nrm_on_exhausted;

/* Of a pool whose upstream is a source of device memory; all others take segments of
   it. */
typedef enum nrm_segments {
    NRM_SEGMENTS_DEFAULT, /* the option's value */
    NRM_SEGMENTS_VMM,     /* mapped side by side, one memory; where that can be done */
    NRM_SEGMENTS_ALLOC,   /* of the upstream: memory that legacy IPC can share */
} nrm_segments;

#define NRM_SIZE_DEFAULT ((size_t)-1)

typedef struct nrm_pool_options {
    size_t size;
    size_t initial_nbytes; /* taken when the pool is made; 0: nothing */
    size_t maximum_nbytes; /* 0: no limit; for pinned memory half of the host's */
    nrm_reuse reuse;
    size_t parked_limit;    /* bytes; NRM_SIZE_DEFAULT or 0: the option's */
    uint64_t wait_limit_ns; /* 0: the option's */
    nrm_on_exhausted on_exhausted;
    nrm_segments segments;
    bool grow_ahead; /* in the background, while the pool fills up; not over resources
                        that call user code */
} nrm_pool_options;

NRM_API NRM_NODISCARD nrm_status nrm_pool_create(nrm_resource *upstream,
                                                 const nrm_pool_options *options,
                                                 nrm_resource **out);

/*
 * Opens the memory of a pool of device memory, all that it has and all that it will
 * have, to another device, its kernels and its own copies; for the life of the pool.
 * NRM_NOT_SUPPORTED where segments are not mapped (NRM_SEGMENTS_VMM): what the upstream
 * allocates is opened by enabling peer access between contexts. NRM_INVALID_VALUE: not
 * a pool, or no device.
 */
NRM_API NRM_NODISCARD nrm_status nrm_pool_add_peer(nrm_resource *mr, int device);

/*
 * Blocks of one size, `n_blocks` of them taken of the upstream when the resource is
 * made and whenever none is free. A larger request is out of memory; an alignment
 * beyond the blocks' own is not supported.
 */
typedef struct nrm_fixed_size_options {
    size_t size;
    size_t block_nbytes; /* rounded up to the alignment of the kind; 0: 1 MiB */
    size_t n_blocks;     /* taken at a time; 0: 128 */
    nrm_reuse reuse;
} nrm_fixed_size_options;

NRM_API NRM_NODISCARD nrm_status nrm_fixed_size_create(
    nrm_resource *upstream, const nrm_fixed_size_options *options, nrm_resource **out);

/*
 * Chooses by size: a request goes to the smallest bin that it fits in, or to the
 * upstream when it fits in none. On the way back the owner of the block decides.
 */
typedef struct nrm_binning_options {
    size_t size;
    bool make_bins;        /* for each power of two from 2^min to 2^max bytes */
    unsigned min_exponent; /* at most 62 */
    unsigned max_exponent;
} nrm_binning_options;

typedef struct nrm_bin {
    size_t nbytes;          /* of the largest request */
    nrm_resource *resource; /* borrowed: it lives as long as the binning resource */
} nrm_bin;

NRM_API NRM_NODISCARD nrm_status nrm_binning_create(nrm_resource *upstream,
                                                    const nrm_binning_options *options,
                                                    nrm_resource **out);

/*
 * Adds a bin for requests of at most `nbytes`, served by `resource` (retained), which
 * has memory of the same kind; NULL: by a fixed-size resource over the upstream. Where
 * there is a bin of this size already nothing changes. Others may allocate meanwhile.
 */
NRM_API NRM_NODISCARD nrm_status nrm_binning_add_bin(nrm_resource *mr, size_t nbytes,
                                                     nrm_resource *resource);

/* The bins, the smallest first: at most `n` of them into `out`. How many there are; 0
   of a resource that is none of binning. */
NRM_API size_t nrm_binning_get_bins(nrm_resource *mr, nrm_bin *out, size_t n);

/*
 * A pool that takes all of its memory of the upstream when it is made, and no more
 * later.
 */
typedef struct nrm_arena_options {
    size_t size;
    size_t nbytes; /* of the arena; 0: half of the free memory of the device, for host
                      and pinned memory half of the host's */
    bool dump_log_on_failure; /* a request that fails leaves a report in a file */
} nrm_arena_options;

/* Where the report goes, in the working directory; reports are appended. */
#define NRM_ARENA_LOG "rmm_arena_memory_dump.log"

NRM_API NRM_NODISCARD nrm_status nrm_arena_create(nrm_resource *upstream,
                                                  const nrm_arena_options *options,
                                                  nrm_resource **out);

/*
 * What stands between a handler and its resource: requests under `threshold` go to
 * `small`, others to `large`; when that is exhausted or cannot work here, to
 * `fallback`. `rescue` serves requests of at most 4 KiB that would fail otherwise
 * (NumPy sorts wrongly, without an error, when such a request fails), and everything in
 * a forked child or after the device was lost.
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
 * pinned_threshold (64 KiB)", "fell back: ...". Empty when it is, or when `route` is
 * none.
 */
NRM_API void nrm_route_explain(nrm_resource *route, const nrm_block_info *block,
                               char *out, size_t size);

#endif
