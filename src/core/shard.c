/*
 * Shards: each thread's share of the counters of a resource. A thread writes to its
 * shards alone and publishes at times; who asks for statistics adds up what is
 * published and what is not.
 */
#include "core/cache_internal.h"

#include <sched.h>

#include "core/nodes.h"

enum { COUNT_TRIES = 100 }; /* of statistics, while threads publish: then about right */

static struct nrm__link shards = {&shards, &shards};

static int64_t
larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* ---- for the thread, or while it is out ---- */

/* Around every change of `top` and `base`, and of what is published. A reader in
   another thread tries again until he has seen them and `left` of one moment. */
static void
begin_change(struct nrm__shard *shard)
{
    unsigned version = atomic_load_explicit(&shard->version, memory_order_relaxed);
    atomic_store_explicit(&shard->version, version + 1, memory_order_relaxed);
}

static void
end_change(struct nrm__shard *shard)
{
    unsigned version = atomic_load_explicit(&shard->version, memory_order_relaxed);
    atomic_store_explicit(&shard->version, version + 1, memory_order_release);
}

static void
set_most_left(struct nrm__shard *shard)
{
    nrm__owned_set(&shard->most_left, nrm__owned_get(&shard->top_bytes) -
                                          nrm__owned_get(&shard->base_bytes) +
                                          shard->slack_bytes);
}

static void
publish(atomic_int_least64_t *current, atomic_int_least64_t *peak,
        atomic_int_least64_t *left, atomic_int_least64_t *top,
        atomic_int_least64_t *base)
{
    int64_t published = nrm__owned_get(base);
    int64_t most = nrm__owned_get(top), now = most - nrm__owned_get(left);
    if (now == published && most <= published) {
        return;
    }
    int64_t before =
        atomic_fetch_add_explicit(current, now - published, memory_order_relaxed);
    nrm__raise_peak(peak, before + most - published);
    nrm__owned_set(base, now);
    nrm__owned_set(top, now);
    nrm__owned_set(left, 0);
}

static void
publish_all(atomic_int_least64_t *total, int64_t now, atomic_int_least64_t *all)
{
    int64_t more = now - nrm__owned_get(all);
    if (more != 0) {
        atomic_fetch_add_explicit(total, more, memory_order_relaxed);
        atomic_store_explicit(all, now, memory_order_relaxed);
    }
}

void
nrm__shard_publish(struct nrm__shard *shard)
{
    struct nrm__counters *c = &shard->mr->counters;
    begin_change(shard);
    publish(&c->current_bytes, &c->peak_bytes, &shard->left_bytes, &shard->top_bytes,
            &shard->base_bytes);
    publish(&c->current_count, &c->peak_count, &shard->left_count, &shard->top_count,
            &shard->base_count);
    shard->slack_bytes =
        larger(NRM__SHARD_BYTES,
               atomic_load_explicit(&c->current_bytes, memory_order_relaxed) >>
                   NRM__SHARD_SHIFT);
    set_most_left(shard);
    end_change(shard);
}

void
nrm__shard_publish_all(struct nrm__shard *shard)
{
    struct nrm__counters *c = &shard->mr->counters;
    nrm__shard_publish(shard);
    begin_change(shard);
    publish_all(&c->total_bytes, nrm__owned_get(&shard->in_bytes), &shard->all_bytes);
    publish_all(&c->total_count, nrm__owned_get(&shard->in_count), &shard->all_count);
    end_change(shard);
}

static void
raise_top(atomic_int_least64_t *left, atomic_int_least64_t *top)
{
    int64_t n = nrm__owned_get(left);
    if (n < 0) {
        nrm__owned_set(top, nrm__owned_get(top) - n);
        nrm__owned_set(left, 0);
    }
}

void
nrm__shard_raise(struct nrm__shard *shard)
{
    begin_change(shard);
    raise_top(&shard->left_bytes, &shard->top_bytes);
    raise_top(&shard->left_count, &shard->top_count);
    set_most_left(shard);
    end_change(shard);
    int64_t bytes = nrm__owned_get(&shard->top_bytes) -
                    nrm__owned_get(&shard->left_bytes) -
                    nrm__owned_get(&shard->base_bytes);
    int64_t count = nrm__owned_get(&shard->top_count) -
                    nrm__owned_get(&shard->left_count) -
                    nrm__owned_get(&shard->base_count);
    if (bytes > shard->slack_bytes || bytes < -shard->slack_bytes ||
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
        shard->slack_bytes = NRM__SHARD_BYTES;
        nrm__owned_set(&shard->most_left, NRM__SHARD_BYTES);
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

/* ---- for everybody ---- */

/* What is not published. */
struct sums {
    int64_t bytes, count, top_bytes, top_count, total_bytes, total_count;
};

static struct sums
read_sums(const struct nrm__shard *shard)
{
    int64_t base_bytes = nrm__owned_get(&shard->base_bytes);
    int64_t base_count = nrm__owned_get(&shard->base_count);
    int64_t top_bytes = nrm__owned_get(&shard->top_bytes) - base_bytes;
    int64_t top_count = nrm__owned_get(&shard->top_count) - base_count;
    return (struct sums){
        .bytes = top_bytes - nrm__owned_get(&shard->left_bytes),
        .count = top_count - nrm__owned_get(&shard->left_count),
        .top_bytes = top_bytes,
        .top_count = top_count,
        .total_bytes =
            nrm__owned_get(&shard->in_bytes) - nrm__owned_get(&shard->all_bytes),
        .total_count =
            nrm__owned_get(&shard->in_count) - nrm__owned_get(&shard->all_count),
    };
}

/* How often the shards of a resource were changed; odd while one is being changed. */
static unsigned
n_changes_locked(const nrm_resource *mr)
{
    unsigned n = 0, is_odd = 0;
    for (struct nrm__link *link = shards.next; link != &shards; link = link->next) {
        struct nrm__shard *shard = NRM__CONTAINER(link, struct nrm__shard, link);
        if (shard->mr == mr) {
            unsigned version =
                atomic_load_explicit(&shard->version, memory_order_acquire);
            n += version & ~1u;
            is_odd |= version & 1u;
        }
    }
    return n | is_odd;
}

void
nrm__counters_read(const struct nrm__counters *counters, nrm_statistics *out)
{
    out->current_bytes = atomic_load(&counters->current_bytes);
    out->current_count = atomic_load(&counters->current_count);
    out->peak_bytes = atomic_load(&counters->peak_bytes);
    out->peak_count = atomic_load(&counters->peak_count);
    out->total_bytes = atomic_load(&counters->total_bytes);
    out->total_count = atomic_load(&counters->total_count);
}

static void
count_locked(nrm_resource *mr, nrm_statistics *out)
{
    nrm__counters_read(&mr->counters, out);
    for (struct nrm__link *link = shards.next; link != &shards; link = link->next) {
        struct nrm__shard *shard = NRM__CONTAINER(link, struct nrm__shard, link);
        if (shard->mr == mr) {
            struct sums one = read_sums(shard);
            out->current_bytes += one.bytes;
            out->current_count += one.count;
            out->total_bytes += one.total_bytes;
            out->total_count += one.total_count;
        }
    }
    /* The most that one thread had while the others had what they have now. */
    for (struct nrm__link *link = shards.next; link != &shards; link = link->next) {
        struct nrm__shard *shard = NRM__CONTAINER(link, struct nrm__shard, link);
        if (shard->mr == mr) {
            struct sums one = read_sums(shard);
            out->peak_bytes =
                larger(out->peak_bytes, out->current_bytes - one.bytes + one.top_bytes);
            out->peak_count =
                larger(out->peak_count, out->current_count - one.count + one.top_count);
        }
    }
}

/* A thread that publishes meanwhile moves counts from its shard to the resource: then
   once more. One that ends does so under the lock. */
void
nrm__cache_count(nrm_resource *mr, nrm_statistics *out)
{
    unsigned before, after;
    nrm__lock_acquire(&nrm__cache_lock);
    for (int i = 0; i < COUNT_TRIES; i++) {
        before = n_changes_locked(mr);
        count_locked(mr, out);
        after = n_changes_locked(mr);
        if (before == after && (before & 1u) == 0) {
            break;
        }
        sched_yield();
    }
    nrm__lock_release(&nrm__cache_lock);
}
