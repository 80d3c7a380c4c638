/*
 * StatisticsResourceAdaptor: counters that nest, for the memory of a part of a program.
 *
 * Every resource counts already, so this one adds nothing to an allocation, and threads
 * take the short way past it. What they have counted meanwhile is published before the
 * counters are looked at. A scope is what the counters were when it began: its current
 * and total values are differences to that. The peak alone cannot be had by
 * subtraction. It begins again from the current value at a push, and the one that stood
 * there is kept with the scope; at a pop the higher of both stands. A block allocated
 * before the push and freed after it makes the scope's current value negative, and its
 * peak is never below 0.
 *
 * The lock guards the list of scopes against other pushes and pops. It is never taken
 * on the way of a block, so what another thread allocates during a push may be counted
 * on either side of it, and its peak on the other: a thread that has added to the
 * current value raises the peak a moment later. Nothing is lost over all scopes, a
 * block that is live when the push returns is in the peak of one whose current value it
 * is in, and without allocations at that moment all is exact.
 */
#include "adaptors/forward.h"
#include "base/assert.h"
#include "base/error.h"
#include "base/lock.h"
#include "core/cache.h"
#include "core/nodes.h"
#include "nrm/adaptors.h"

struct scope {
    struct scope *outer; /* NULL: the outermost, which has no struct */
    int64_t start_bytes, start_count;
    int64_t start_total_bytes, start_total_count;
    int64_t outer_peak_bytes, outer_peak_count; /* until this one began */
};

struct statistics {
    nrm_resource base;
    struct nrm__lock lock;
    struct scope *innermost; /* guarded by the lock, as all scopes */
};

static const struct nrm__ops statistics_ops;

static struct statistics *
statistics_from(nrm_resource *mr)
{
    NRM_ASSERT(mr->ops == &statistics_ops);
    return (struct statistics *)mr;
}

/* ---- the counters of the resource ---- */

static int64_t
load(const atomic_int_least64_t *counter)
{
    return atomic_load_explicit(counter, memory_order_relaxed);
}

static void
raise_to(atomic_int_least64_t *peak, int64_t value)
{
    int64_t seen = load(peak);
    while (value > seen && !atomic_compare_exchange_weak_explicit(peak, &seen, value,
                                                                  memory_order_relaxed,
                                                                  memory_order_relaxed))
        ;
}

/* Begins a peak anew from `start`; the one that stood there. What was allocated since
   `start` was read is in the current value. */
static int64_t
restart_peak(atomic_int_least64_t *peak, const atomic_int_least64_t *current,
             int64_t start)
{
    int64_t before = atomic_exchange_explicit(peak, start, memory_order_relaxed);
    raise_to(peak, load(current));
    return before;
}

static int64_t
higher(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* ---- scopes ---- */

static nrm_counts
counts_locked(struct statistics *self)
{
    static const struct scope outermost; /* begins with zeros */
    const struct nrm__counters *c = &self->base.counters;
    const struct scope *scope = self->innermost != NULL ? self->innermost : &outermost;
    int64_t bytes = load(&c->current_bytes), count = load(&c->current_count);
    return (nrm_counts){
        .current_bytes = bytes - scope->start_bytes,
        .current_count = count - scope->start_count,
        .peak_bytes = higher(load(&c->peak_bytes), bytes) - scope->start_bytes,
        .peak_count = higher(load(&c->peak_count), count) - scope->start_count,
        .total_bytes = load(&c->total_bytes) - scope->start_total_bytes,
        .total_count = load(&c->total_count) - scope->start_total_count,
    };
}

/* Where a scope begins that follows on `counts` of the innermost one. */
static void
begin_locked(struct statistics *self, struct scope *scope, const nrm_counts *counts)
{
    struct nrm__counters *c = &self->base.counters;
    *scope = self->innermost != NULL ? *self->innermost : (struct scope){0};
    scope->outer = self->innermost;
    scope->start_bytes += counts->current_bytes;
    scope->start_count += counts->current_count;
    scope->start_total_bytes += counts->total_bytes;
    scope->start_total_count += counts->total_count;
    scope->outer_peak_bytes =
        restart_peak(&c->peak_bytes, &c->current_bytes, scope->start_bytes);
    scope->outer_peak_count =
        restart_peak(&c->peak_count, &c->current_count, scope->start_count);
    self->innermost = scope;
}

/* The struct of an adaptor of this kind, or NULL with an error recorded. */
static struct statistics *
checked(nrm_resource *mr)
{
    if (mr->ops != &statistics_ops) {
        (void)nrm__error(NRM_INVALID_VALUE, "a %s has no scopes of counters",
                         mr->ops->class_name);
        return NULL;
    }
    return (struct statistics *)mr;
}

nrm_status
nrm_statistics_counts(nrm_resource *mr, nrm_counts *out)
{
    struct statistics *self = checked(mr);
    if (self == NULL) {
        return NRM_INVALID_VALUE;
    }
    nrm__cache_publish(mr);
    nrm__lock_acquire(&self->lock);
    *out = counts_locked(self);
    nrm__lock_release(&self->lock);
    return NRM_OK;
}

nrm_status
nrm_statistics_push(nrm_resource *mr, nrm_counts *out)
{
    struct statistics *self = checked(mr);
    if (self == NULL) {
        return NRM_INVALID_VALUE;
    }
    struct scope *scope = nrm__node_allocate(sizeof *scope);
    if (scope == NULL) {
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory for a scope of %zu B",
                          sizeof *scope);
    }
    nrm__cache_publish(mr);
    nrm__lock_acquire(&self->lock);
    nrm_counts counts = counts_locked(self);
    begin_locked(self, scope, &counts);
    nrm__lock_release(&self->lock);
    *out = counts;
    return NRM_OK;
}

nrm_status
nrm_statistics_pop(nrm_resource *mr, nrm_counts *out)
{
    struct statistics *self = checked(mr);
    if (self == NULL) {
        return NRM_INVALID_VALUE;
    }
    nrm__cache_publish(mr);
    nrm__lock_acquire(&self->lock);
    struct scope *scope = self->innermost;
    if (scope != NULL) {
        *out = counts_locked(self);
        raise_to(&mr->counters.peak_bytes, scope->outer_peak_bytes);
        raise_to(&mr->counters.peak_count, scope->outer_peak_count);
        self->innermost = scope->outer;
    }
    nrm__lock_release(&self->lock);
    if (scope == NULL) {
        return nrm__error(NRM_NOT_FOUND,
                          "cannot pop the last counter pair: no push is left to undo");
    }
    nrm__node_deallocate(scope, sizeof *scope);
    return NRM_OK;
}

/* ---- reports ---- */

/* The peaks of the resource's whole life, whatever scope is open. */
static void
statistics_statistics(nrm_resource *mr, nrm_statistics *out)
{
    struct statistics *self = statistics_from(mr);
    nrm__forward_statistics(mr, out);
    nrm__lock_acquire(&self->lock);
    int64_t bytes = load(&mr->counters.peak_bytes);
    int64_t count = load(&mr->counters.peak_count);
    for (const struct scope *scope = self->innermost; scope != NULL;
         scope = scope->outer) {
        bytes = higher(bytes, scope->outer_peak_bytes);
        count = higher(count, scope->outer_peak_count);
    }
    nrm__lock_release(&self->lock);
    out->peak_bytes = higher(out->peak_bytes, bytes);
    out->peak_count = higher(out->peak_count, count);
}

static bool
statistics_front(nrm_resource *mr, struct nrm__front *out)
{
    return nrm__forward_front(mr, NULL, out);
}

/* ---- life ---- */

static void
statistics_finish(nrm_resource *mr)
{
    struct statistics *self = statistics_from(mr);
    while (self->innermost != NULL) {
        struct scope *scope = self->innermost;
        self->innermost = scope->outer;
        nrm__node_deallocate(scope, sizeof *scope);
    }
    nrm__lock_finish(&self->lock);
}

static const struct nrm__ops statistics_ops = {
    .class_name = "StatisticsResourceAdaptor",
    .flags = NRM__OPS_ADAPTOR,
    .allocate = nrm__forward_allocate,
    .deallocate = nrm__forward_deallocate,
    .renew_block = nrm__forward_renew_block,
    .front = statistics_front,
    .statistics = statistics_statistics,
    .lock_offset = offsetof(struct statistics, lock),
    .finish = statistics_finish,
};

nrm_status
nrm_statistics_create(nrm_resource *upstream, nrm_resource **out)
{
    nrm_resource *mr;
    NRM_TRY(
        nrm__forward_create(&statistics_ops, upstream, sizeof(struct statistics), &mr));
    nrm__lock_init(&statistics_from(mr)->lock, NRM__RANK_LEAF);
    nrm__resource_publish(mr);
    *out = mr;
    return NRM_OK;
}
