/*
 * How a pool is made: what its options and the kind of its memory mean for it. It has
 * no memory yet when it is published, but for an initial size and the first chunk of a
 * fixed-size resource. pool.c says what a pool is.
 */

#include "base/bits.h"
#include "base/error.h"
#include "core/hooks.h"
#include "core/known_uses.h"
#include "nrm/options.h"
#include "nrm/pools.h"
#include "base/given.h"
#include "os/memory.h"
#include "os/system.h"
#include "pools/pool.h"
#include "pools/pool_internal.h"

#define HOST_ROUNDED_MAX (NRM__SHIFTED_MIN - 1) /* more is shifted */
#define DEVICE_ROUNDED_MAX (8 * NRM__MIB)
#define IDLE_FRACTION 16 /* of the memory that may lie idle in a host pool */
#define HOST_GRANULE NRM__KIB
#define MAX_NODES 64u /* NUMA nodes that have bins of their own */

size_t
nrm__pool_bins_nbytes(const struct nrm__pool *pool)
{
    return nrm__align_up(pool->n_nodes * sizeof(struct nrm__pool_bins),
                         nrm__page_size());
}

static size_t
default_maximum(nrm_kind kind)
{
    return kind == NRM_KIND_PINNED
               ? nrm__align_down(nrm__host_memory_nbytes() / 2, NRM__HUGE_PAGE)
               : SIZE_MAX / 2;
}

/* Only a source's own memory: adaptors between would not know of what is mapped. */
static bool
is_mapping(const struct nrm__pool *pool, const nrm_pool_options *options)
{
    bool wanted = options->segments == NRM_SEGMENTS_DEFAULT
                      ? nrm_option_get(NRM_OPT_SEGMENTS) == 0
                      : options->segments == NRM_SEGMENTS_VMM;
    return wanted && (pool->base.upstream->ops->flags & NRM__OPS_MAPPABLE) != 0;
}

static void
set_policy(struct nrm__pool *pool, const nrm_pool_options *options)
{
    nrm_kind kind = pool->base.kind;
    bool gpu_visible = kind == NRM_KIND_PINNED || kind == NRM_KIND_MANAGED;
    pool->tracked = nrm__reuse_set(&pool->base, options->reuse) == NRM_REUSE_CONTEXT &&
                    gpu_visible;
    pool->block_nbytes = sizeof(struct nrm__pool_block);
    pool->alignment = nrm__kind_alignment(kind);
    pool->granule = kind == NRM_KIND_HOST ? HOST_GRANULE : nrm__kind_alignment(kind);
    pool->maximum_nbytes = options->maximum_nbytes != 0 ? options->maximum_nbytes
                                                        : default_maximum(kind);
    pool->segment_nbytes =
        nrm__max((size_t)nrm_option_get(NRM_OPT_SEGMENT_NBYTES), NRM__HUGE_PAGE);
    size_t idle_nbytes = (size_t)nrm_option_get(NRM_OPT_IDLE_LIMIT);
    bool keeps_all = kind == NRM_KIND_DEVICE ||
                     nrm_resource_calls_user_code(&pool->base);
    pool->idle_nbytes = keeps_all          ? SIZE_MAX
                        : idle_nbytes != 0 ? idle_nbytes
                                           : nrm__host_memory_nbytes() / IDLE_FRACTION;
    pool->epoch_nbytes = (size_t)nrm_option_get(NRM_OPT_EPOCH_NBYTES);
    pool->parked_limit = options->parked_limit != 0 &&
                                 options->parked_limit != NRM_SIZE_DEFAULT
                             ? options->parked_limit
                             : (size_t)nrm_option_get(NRM_OPT_PARKED_LIMIT);
    pool->wait_limit_ns = options->wait_limit_ns != 0
                              ? options->wait_limit_ns
                              : (uint64_t)nrm_option_get(NRM_OPT_WAIT_LIMIT);
    pool->waits_when_full = options->on_exhausted == NRM_ON_EXHAUSTED_WAIT ||
                            (options->on_exhausted == NRM_ON_EXHAUSTED_DEFAULT &&
                             nrm_option_get(NRM_OPT_ON_EXHAUSTED) == 3);
    pool->has_slabs = kind == NRM_KIND_HOST;
    /* A pool with a limit is to hold what exactly fits. */
    bool is_generous = options->maximum_nbytes == 0;
    pool->rounded_max = !is_generous              ? 0
                        : pool->has_slabs         ? HOST_ROUNDED_MAX
                        : kind == NRM_KIND_DEVICE ? DEVICE_ROUNDED_MAX
                                                  : 0;
    pool->shift = pool->has_slabs && is_generous ? pool->granule : 0;
    pool->is_plain = (pool->base.upstream->ops->flags & NRM__OPS_PLAIN) != 0;
    bool is_local = (pool->base.upstream->flags & NRM__OPS_LOCAL) != 0;
    pool->n_nodes = is_local ? nrm__min((unsigned)nrm__numa_n_nodes(), MAX_NODES) : 1;
    pool->decay_ns = pool->is_plain ? (uint64_t)nrm_option_get(NRM_OPT_DECAY) : 0;
    pool->kept_nbytes = options->initial_nbytes != 0
                            ? nrm__align_up(options->initial_nbytes, pool->granule)
                            : nrm__align_up(nrm__min(NRM__POOL_FIRST_SEGMENT_NBYTES,
                                                     pool->segment_nbytes),
                                            NRM__HUGE_PAGE);
}

/* A block is a granule, or a few. Every chunk has room for several: none is for one
   large block. */
static void
set_fixed_policy(struct nrm__pool *pool)
{
    pool->granule = pool->fixed.natural;
    pool->rounded_max = 0;
    pool->alignment = pool->fixed.alignment;
    pool->segment_nbytes =
        nrm__max(pool->segment_nbytes, nrm__fixed_chunk_rounded(&pool->fixed));
}

static nrm_status
init(struct nrm__pool *pool, const nrm_pool_options *options)
{
    set_policy(pool, options);
    if (pool->fixed.block_nbytes != 0) {
        set_fixed_policy(pool);
    }
    if (options->initial_nbytes > pool->maximum_nbytes) {
        return nrm__error(
            NRM_INVALID_VALUE,
            "the initial pool size (%zu B) is larger than the maximum pool "
            "size (%zu B)",
            options->initial_nbytes, pool->maximum_nbytes);
    }
    if (options->grow_ahead && nrm_resource_calls_user_code(&pool->base)) {
        return nrm__error(
            NRM_INVALID_VALUE,
            "grow_ahead: memory that a program's functions provide cannot "
            "be taken in the background");
    }
    nrm__lock_init(&pool->lock, NRM__RANK_POOL);
    nrm__list_init(&pool->parked);
    nrm__list_init(&pool->segments);
    nrm__background_watched_init(&pool->watched, &pool->base, nrm__pool_decay);
    nrm__pool_ahead_init(pool, options->grow_ahead);
    void *bins;
    if (nrm__map(nrm__pool_bins_nbytes(pool), nrm__page_size(), &bins) != 0) {
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe a pool");
    }
    pool->bins = bins;
    for (unsigned i = 0; i < pool->n_nodes * NRM__POOL_N_CLASSES; i++) {
        struct nrm__pool_bins *of_node = &pool->bins[i / NRM__POOL_N_CLASSES];
        nrm__list_init(&of_node->heads[i % NRM__POOL_N_CLASSES]);
    }
    if (pool->base.kind == NRM_KIND_DEVICE &&
        !(pool->base.flags & NRM__OPS_IMMEDIATE)) {
        NRM_TRY(nrm__pool_order_create(pool));
        pool->maps = is_mapping(pool, options);
    }
    if (pool->has_slabs) {
        NRM_TRY(nrm__slabs_init(&pool->slabs, &pool->base, nrm__pool_get_chunk,
                                nrm__pool_put_chunk));
        pool->slabs.spreads = options->maximum_nbytes == 0;
    }
    return NRM_OK;
}

/* Without memory yet. `shape`: of a fixed-size resource, or NULL. */
static nrm_status
create(const struct nrm__ops *ops, nrm_resource *upstream,
       const nrm_pool_options *options, const struct nrm__fixed_shape *shape,
       nrm_resource **out)
{
    nrm_resource *mr;
    NRM_TRY(nrm__resource_create(ops, upstream->kind, upstream,
                                 sizeof(struct nrm__pool), &mr));
    struct nrm__pool *pool = (struct nrm__pool *)mr;
    if (shape != NULL) {
        pool->fixed = *shape;
    }
    nrm_status status = init(pool, options);
    if (status != NRM_OK) {
        if (pool->bins != NULL) {
            nrm__unmap(pool->bins, nrm__pool_bins_nbytes(pool));
        }
        nrm__pool_order_destroy(pool);
        nrm__resource_abandon(mr);
        return status;
    }
    nrm__resource_publish(mr);
    *out = mr;
    return NRM_OK;
}

nrm_status
nrm_pool_create(nrm_resource *upstream, const nrm_pool_options *options,
                nrm_resource **out)
{
    nrm_pool_options given = NRM_OPTIONS(nrm_pool_options);
    nrm_resource *mr;
    NRM__COPY_GIVEN(given, options);
    NRM_TRY(create(&nrm__pool_ops, upstream, &given, NULL, &mr));
    struct nrm__pool *pool = (struct nrm__pool *)mr;
    nrm_status status = NRM_OK;
    if (given.initial_nbytes != 0) {
        size_t nbytes = nrm__align_up(given.initial_nbytes, pool->granule);
        status = nrm__pool_grow_at_first(pool, nrm__min(nbytes, pool->maximum_nbytes));
        if (status == NRM_OUT_OF_MEMORY) {
            status = nrm__pool_explain(pool, nrm_last_error(), nbytes);
        }
    }
    if (status != NRM_OK) {
        nrm_resource_release(mr);
        return status;
    }
    *out = mr;
    return NRM_OK;
}

/* With its first chunk; an upstream that cannot align it shows it here. */
nrm_status
nrm__pool_create_fixed(nrm_resource *upstream, const struct nrm__fixed_shape *shape,
                       nrm_reuse reuse, nrm_resource **out)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    nrm_resource *mr;
    options.reuse = reuse;
    options.segments = NRM_SEGMENTS_ALLOC;
    NRM_TRY(create(&nrm__pool_fixed_ops, upstream, &options, shape, &mr));
    struct nrm__pool *pool = (struct nrm__pool *)mr;
    nrm_status status = nrm__pool_grow(pool, shape->block_nbytes, pool->alignment);
    if (status == NRM_NOT_SUPPORTED && nrm__fixed_shape_relax(&pool->fixed, upstream)) {
        set_fixed_policy(pool);
        status = nrm__pool_grow(pool, shape->block_nbytes, pool->alignment);
    }
    if (status != NRM_OK) {
        nrm_resource_release(mr);
        return status;
    }
    *out = mr;
    return NRM_OK;
}
