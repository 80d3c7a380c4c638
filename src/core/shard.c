/*
 * Shards: each thread's share of the counters of a resource. A thread writes to its shards
 * alone and publishes at times; who asks for statistics adds up what is published and what
 * is not.
 */
#include "core/cache_internal.h"

#include "core/nodes.h"

static struct nrm__link shards = {&shards, &shards};

/* `top` and `base` are differences of `in` and `out`, which never go back. */
static void
publish(atomic_int_least64_t *current, atomic_int_least64_t *peak, int64_t now,
        atomic_int_least64_t *top, atomic_int_least64_t *base)
{
    int64_t published = nrm__shard_get(base);
    if (now == published && nrm__shard_get(top) <= published) {
        return;
    }
    int64_t before =
        atomic_fetch_add_explicit(current, now - published, memory_order_relaxed);
    nrm__raise_peak(peak, before + nrm__shard_get(top) - published);
    atomic_store_explicit(base, now, memory_order_relaxed);
    atomic_store_explicit(top, now, memory_order_relaxed);
}

static void
publish_all(atomic_int_least64_t *total, int64_t now, atomic_int_least64_t *all)
{
    int64_t more = now - nrm__shard_get(all);
    if (more != 0) {
        atomic_fetch_add_explicit(total, more, memory_order_relaxed);
        atomic_store_explicit(all, now, memory_order_relaxed);
    }
}

void
nrm__shard_publish(struct nrm__shard *shard)
{
    struct nrm__counters *c = &shard->mr->counters;
    publish(&c->current_bytes, &c->peak_bytes,
            nrm__shard_get(&shard->in_bytes) - nrm__shard_get(&shard->out_bytes),
            &shard->top_bytes, &shard->base_bytes);
    publish(&c->current_count, &c->peak_count,
            nrm__shard_get(&shard->in_count) - nrm__shard_get(&shard->out_count),
            &shard->top_count, &shard->base_count);
}

void
nrm__shard_publish_all(struct nrm__shard *shard)
{
    struct nrm__counters *c = &shard->mr->counters;
    nrm__shard_publish(shard);
    publish_all(&c->total_bytes, nrm__shard_get(&shard->in_bytes), &shard->all_bytes);
    publish_all(&c->total_count, nrm__shard_get(&shard->in_count), &shard->all_count);
}

void
nrm__shard_raise(struct nrm__shard *shard)
{
    int64_t bytes =
        nrm__shard_get(&shard->in_bytes) - nrm__shard_get(&shard->out_bytes);
    int64_t count =
        nrm__shard_get(&shard->in_count) - nrm__shard_get(&shard->out_count);
    if (bytes > nrm__shard_get(&shard->top_bytes)) {
        atomic_store_explicit(&shard->top_bytes, bytes, memory_order_relaxed);
    }
    if (count > nrm__shard_get(&shard->top_count)) {
        atomic_store_explicit(&shard->top_count, count, memory_order_relaxed);
    }
    bytes -= nrm__shard_get(&shard->base_bytes);
    count -= nrm__shard_get(&shard->base_count);
    if (bytes > NRM__SHARD_BYTES || bytes < -NRM__SHARD_BYTES ||
        count > NRM__SHARD_COUNT) {
        nrm__shard_publish(shard);
    }
}

struct nrm__shard *
nrm__shard_create_locked(nrm_resource *mr)
{
    struct nrm__shard *shard = nrm__node_allocate(sizeof *shard);
    if (shard != NULL) {
        shard->mr = mr;
        nrm__list_append(&shards, &shard->link);
    }
    return shard;
}

/* The resource counts on alone. */
void
nrm__shard_fold_locked(struct nrm__shard *shard)
{
    nrm__shard_publish_all(shard);
    nrm__list_remove(&shard->link);
    nrm__node_deallocate(shard, sizeof *shard);
}

struct sums {
    int64_t bytes, count, total_bytes, total_count;
};

/* What is not published. */
static struct sums
sums_of(const struct nrm__shard *shard)
{
    int64_t bytes = nrm__shard_get(&shard->in_bytes);
    int64_t count = nrm__shard_get(&shard->in_count);
    return (struct sums){
        .bytes = bytes - nrm__shard_get(&shard->out_bytes) -
                 nrm__shard_get(&shard->base_bytes),
        .count = count - nrm__shard_get(&shard->out_count) -
                 nrm__shard_get(&shard->base_count),
        .total_bytes = bytes - nrm__shard_get(&shard->all_bytes),
        .total_count = count - nrm__shard_get(&shard->all_count),
    };
}

static int64_t
larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

void
nrm__cache_add_statistics(nrm_resource *mr, nrm_statistics *out)
{
    struct sums all = {0};
    nrm__lock_acquire(&nrm__cache_lock);
    for (struct nrm__link *link = shards.next; link != &shards; link = link->next) {
        struct nrm__shard *shard = NRM__CONTAINER(link, struct nrm__shard, link);
        if (shard->mr == mr) {
            struct sums one = sums_of(shard);
            all.bytes += one.bytes;
            all.count += one.count;
            all.total_bytes += one.total_bytes;
            all.total_count += one.total_count;
        }
    }
    out->current_bytes += all.bytes;
    out->current_count += all.count;
    out->total_bytes += all.total_bytes;
    out->total_count += all.total_count;
    /* The most that one thread had while the others had what they have now. */
    for (struct nrm__link *link = shards.next; link != &shards; link = link->next) {
        struct nrm__shard *shard = NRM__CONTAINER(link, struct nrm__shard, link);
        if (shard->mr == mr) {
            struct sums one = sums_of(shard);
            int64_t bytes =
                nrm__shard_get(&shard->top_bytes) - nrm__shard_get(&shard->base_bytes);
            int64_t count =
                nrm__shard_get(&shard->top_count) - nrm__shard_get(&shard->base_count);
            out->peak_bytes =
                larger(out->peak_bytes, out->current_bytes - one.bytes + bytes);
            out->peak_count =
                larger(out->peak_count, out->current_count - one.count + count);
        }
    }
    nrm__lock_release(&nrm__cache_lock);
}
