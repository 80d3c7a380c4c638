/*
 * What stands between a handler and its resource.
 *
 * Requests under the threshold go to the small pool, as page-locking them gains
 * nothing; the others to the large resource, and when that is exhausted or cannot work
 * here, to the fallback. Requests of at most 4 KiB never fail while the heap has
 * memory: NumPy compares structured values in memory that it asks for, and takes a
 * failure for "equal". On the way back the owner of the block decides, never its size.
 */
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/bits.h"
#include "base/error.h"
#include "base/lock.h"
#include "core/hooks.h"
#include "core/uses.h"
#include "cuda/context.h"
#include "nrm/options.h"
#include "nrm/pools.h"

#define RESCUE_NBYTES ((size_t)4096)

struct route {
    nrm_resource base;      /* its upstream is the large resource */
    nrm_resource *small;    /* retained, or NULL */
    nrm_resource *fallback; /* retained, or NULL */
    nrm_resource *rescue;   /* retained, or NULL */
    size_t threshold;
    atomic_int_least64_t n_fallbacks;
    struct nrm__lock lock;
    char reason[288]; /* of the last fallback; guarded by the lock */
};

static const struct nrm__ops route_ops;

static struct route *
route_from(nrm_resource *mr)
{
    NRM_ASSERT(mr->ops == &route_ops);
    return (struct route *)mr;
}

/* ---- falling back ---- */

static void
note_fallback(struct route *route, const nrm_error *error)
{
    atomic_fetch_add_explicit(&route->n_fallbacks, 1, memory_order_relaxed);
    nrm__lock_acquire(&route->lock);
    snprintf(route->reason, sizeof route->reason, "%s", error->message);
    nrm__lock_release(&route->lock);
    nrm__warning_post(nrm__cuda_is_forked() ? NRM__WARN_FORKED : NRM__WARN_FALLBACK,
                      "arrays got ordinary host memory in place of %s memory: %s",
                      nrm_kind_name(route->base.kind), error->message);
}

/* Where a request goes that the large resource refused; NULL: nowhere. */
static nrm_resource *
second_choice(const struct route *route, size_t nbytes, nrm_status status)
{
    if (status == NRM_INVALID_VALUE) {
        return NULL;
    }
    if (route->fallback != NULL) {
        return route->fallback;
    }
    bool gone = status == NRM_DEVICE_LOST || nrm__cuda_is_forked();
    return gone || nbytes <= RESCUE_NBYTES ? route->rescue : NULL;
}

static nrm_status
route_allocate(nrm_resource *mr, const struct nrm__request *request,
               struct nrm__block *out)
{
    struct route *route = route_from(mr);
    bool is_small = route->small != NULL && request->nbytes < route->threshold;
    if (is_small && nrm__cuda_reads_pageable()) {
        (void)nrm__retired_drain(0);
    }
    nrm_status status =
        nrm__allocate(is_small ? route->small : mr->upstream, request, out);
    if (status == NRM_OK) {
        return NRM_OK;
    }
    nrm_resource *second = second_choice(route, request->nbytes, status);
    if (second == NULL || second == (is_small ? route->small : mr->upstream)) {
        return status;
    }
    nrm_error first = *nrm_last_error();
    if (nrm__allocate(second, request, out) != NRM_OK) {
        return nrm__error_native(status, first.native_code, first.native_name, "%s",
                                 first.message);
    }
    note_fallback(route, &first);
    out->flags |= NRM__BLOCK_FELL_BACK;
    return NRM_OK;
}

/* ---- the way back ---- */

static nrm_resource *
route_branch(nrm_resource *mr, const struct nrm__block *block)
{
    struct route *route = route_from(mr);
    nrm_resource *const branches[] = {mr->upstream, route->small, route->fallback,
                                      route->rescue};
    for (size_t i = 0; i < sizeof branches / sizeof *branches; i++) {
        if (branches[i] != NULL && nrm__leads_to(branches[i], block)) {
            return branches[i];
        }
    }
    return NULL;
}

static void
route_deallocate(nrm_resource *mr, const struct nrm__block *block, nrm_stream *stream)
{
    nrm_resource *branch = route_branch(mr, block);
    NRM_ASSERT(branch != NULL);
    /* Where devices read ordinary memory in place, a copy from it may be in flight. */
    bool gpu_may_read = block->owner->kind == NRM_KIND_HOST &&
                        mr->kind == NRM_KIND_PINNED && nrm__cuda_reads_pageable();
    if (gpu_may_read) {
        nrm__deallocate_later(branch, block);
    }
    else {
        nrm__deallocate(branch, block, stream);
    }
}

/* By the new size: a block that grows over the threshold moves to the large resource,
   one that shrinks stays where it is while at least half of it is used. */
static nrm_status
route_reallocate(nrm_resource *mr, struct nrm__block *block,
                 const struct nrm__request *request)
{
    struct route *route = route_from(mr);
    nrm_resource *branch = route_branch(mr, block);
    bool grows_over = branch == route->small && branch != mr->upstream &&
                      request->nbytes >= route->threshold;
    bool shrinks_under = branch == mr->upstream && route->small != NULL &&
                         request->nbytes < route->threshold &&
                         request->nbytes < block->capacity / 2;
    if (grows_over || shrinks_under) {
        return NRM_NOT_SUPPORTED;
    }
    return nrm__reallocate_in_place(branch, block, request);
}

/* ---- the short way ---- */

/* Straight to the pool that serves small requests, or to the large resource's own. */
static bool
route_front(nrm_resource *mr, struct nrm__front *out)
{
    struct route *route = route_from(mr);
    nrm_resource *first = route->small != NULL ? route->small : mr->upstream;
    bool is_pointless = route->small != NULL && route->threshold == 0;
    if (is_pointless || first->ops->front == NULL || !first->ops->front(first, out)) {
        return false;
    }
    out->behind = first;
    if (route->small != NULL) {
        out->large = route->threshold - 1 <= out->limit ? mr->upstream : NULL;
        out->large_for = mr;
        out->limit = nrm__min(out->limit, route->threshold - 1);
        out->stream_limit = nrm__min(out->stream_limit, route->threshold - 1);
        out->forbidden = &nrm__cuda_pageable_is_read;
    }
    return true;
}

/* ---- reports ---- */

static void
route_statistics(nrm_resource *mr, nrm_statistics *out)
{
    struct route *route = route_from(mr);
    nrm_statistics large;
    if (nrm_resource_statistics(mr->upstream, &large) == NRM_OK) {
        out->reserved_bytes += large.reserved_bytes;
        out->parked_bytes += large.parked_bytes;
        out->epochs += large.epochs;
        out->waits += large.waits;
    }
    out->fallbacks += atomic_load(&route->n_fallbacks);
}

void
nrm_route_explain(nrm_resource *mr, const nrm_block_info *info, char *out, size_t size)
{
    if (size != 0) {
        out[0] = '\0';
    }
    if (mr->ops != &route_ops || info->resource == NULL) {
        return;
    }
    struct route *route = route_from(mr);
    struct nrm__block block = {.owner = info->resource};
    nrm_resource *branch = route_branch(mr, &block);
    if (branch == NULL || branch == mr->upstream) {
        return;
    }
    if (branch == route->small && info->nbytes < route->threshold) {
        char threshold[32];
        nrm_format_nbytes(route->threshold, threshold, sizeof threshold);
        snprintf(out, size, "below pinned_threshold (%s)", threshold);
        return;
    }
    nrm__lock_acquire(&route->lock);
    snprintf(out, size, "fell back: %s", route->reason);
    nrm__lock_release(&route->lock);
}

/* ---- life ---- */

static nrm_status
route_trim(nrm_resource *mr, size_t keep_nbytes, size_t *out_nbytes)
{
    struct route *route = route_from(mr);
    size_t nbytes = 0;
    if (route->small != NULL) {
        NRM_TRY(nrm_resource_trim(route->small, keep_nbytes, &nbytes));
        *out_nbytes += nbytes;
    }
    return NRM_OK;
}

static void
route_finish(nrm_resource *mr)
{
    struct route *route = route_from(mr);
    nrm_resource_release(route->small);
    nrm_resource_release(route->fallback);
    nrm_resource_release(route->rescue);
    nrm__lock_finish(&route->lock);
}

static const struct nrm__ops route_ops = {
    .class_name = "route",
    .flags = NRM__OPS_ADAPTOR,
    .allocate = route_allocate,
    .deallocate = route_deallocate,
    .reallocate = route_reallocate,
    .branch = route_branch,
    .front = route_front,
    .trim = route_trim,
    .statistics = route_statistics,
    .lock_offset = offsetof(struct route, lock),
    .finish = route_finish,
};

static nrm_resource *
retained(nrm_resource *mr)
{
    if (mr != NULL) {
        nrm_resource_retain(mr);
    }
    return mr;
}

nrm_status
nrm_route_create(const nrm_route_options *options, nrm_resource **out)
{
    nrm_resource *mr;
    const nrm_resource *hosts[] = {options->small, options->fallback, options->rescue};
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++) {
        if (hosts[i] != NULL && !nrm_kind_is_host_accessible(hosts[i]->kind)) {
            return nrm__error(NRM_INVALID_VALUE,
                              "a fallback must be host-accessible: %s has %s memory",
                              hosts[i]->ops->class_name, nrm_kind_name(hosts[i]->kind));
        }
    }
    NRM_TRY(nrm__resource_create(&route_ops, options->large->kind, options->large,
                                 sizeof(struct route), &mr));
    struct route *route = route_from(mr);
    nrm__lock_init(&route->lock, NRM__RANK_LEAF);
    route->small = retained(options->small);
    route->fallback = retained(options->fallback);
    route->rescue = retained(options->rescue);
    route->threshold = options->threshold;
    nrm__resource_publish(mr);
    *out = mr;
    return NRM_OK;
}
