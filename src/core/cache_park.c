/*
 * What a thread has freed of a pool that waits for GPUs (core/uses.h).
 *
 * Such a block is stamped with the open epoch and stands aside, oldest first, where
 * nobody takes it from. When its epoch is done the oldest is handed out again, without
 * a lock, or comes into the sets where it is in the way of others. Closing epochs is
 * the pool's part, and whatever it does on the long way, from looking for memory to
 * waiting for the GPU, it first takes back what is parked here, so that it decides over
 * all of it. A block with known uses is never parked here.
 */
#include "core/cache.h"

/* One for which its set has no room hides the next ones: the pool takes them. */
bool
nrm__cache_ripen(struct nrm__magazines *magazines)
{
    uint32_t n = 0;
    size_t nbytes = 0;
    for (; n < magazines->n_parked; n++) {
        const struct nrm__parked *each = nrm__cache_parked_at(magazines, n);
        struct nrm__cache_set *set = nrm__cache_set_of(magazines, each->capacity, 0);
        if (!nrm__epoch_is_done(each->stamp) ||
            !nrm__cache_has_room(magazines, set, each->capacity, 0)) {
            break;
        }
        nrm__cache_put_block(magazines, set, each->capacity, 0, each->cell);
        nbytes += each->capacity;
    }
    nrm__cache_unpark_oldest(magazines, n, nbytes);
    return n != 0;
}

/* How many of those that were parked last no closed epoch covers, and their bytes. */
static uint32_t
count_unclosed(struct nrm__magazines *magazines, size_t *out_nbytes)
{
    uint64_t recorded = nrm__epoch_newest_recorded();
    uint32_t n = 0;
    size_t nbytes = 0;
    for (; n < magazines->n_parked; n++) {
        const struct nrm__parked *each =
            nrm__cache_parked_at(magazines, magazines->n_parked - 1 - n);
        if (each->stamp <= recorded) {
            break;
        }
        nbytes += each->capacity;
    }
    *out_nbytes = nbytes;
    return n;
}

size_t
nrm__cache_unpark(struct nrm__magazines *magazines, struct nrm__parked *out)
{
    uint32_t n = magazines->n_parked;
    size_t unclosed_nbytes;
    if (n != 0) {
        nrm__epoch_count(count_unclosed(magazines, &unclosed_nbytes));
    }
    for (uint32_t i = 0; i < n; i++) {
        out[i] = *nrm__cache_parked_at(magazines, i);
    }
    nrm__cache_unpark_oldest(magazines, n, magazines->parked_nbytes);
    return n;
}

/* The magazines of this thread, if it has parked or kept any; NULL: not so, and
   outside. */
static struct nrm__magazines *
enter(nrm_resource *pool, struct nrm__cache **out)
{
    struct nrm__slot *slot = nrm__cache_enter_slot(pool, out);
    if (slot == NULL) {
        return NULL;
    }
    if (slot->magazines == NULL || atomic_load(&pool->is_closed)) {
        nrm__cache_leave(*out);
        return NULL;
    }
    return slot->magazines;
}

static bool
take_oldest(struct nrm__magazines *magazines, size_t nbytes, struct nrm__cell *out)
{
    const struct nrm__parked *oldest = nrm__cache_parked_at(magazines, 0);
    if (!nrm__cache_is_ripe(magazines) || oldest->capacity != nbytes) {
        return false;
    }
    *out = oldest->cell;
    nrm__cache_unpark_oldest(magazines, 1, nbytes);
    return true;
}

static bool
take_kept(struct nrm__magazines *magazines, size_t nbytes, struct nrm__cell *out)
{
    struct nrm__cache_set *set = nrm__cache_set_of(magazines, nbytes, 0);
    if (set->n == 0 || !nrm__cache_set_is_for(set, nbytes, 0)) {
        return false;
    }
    *out = set->cells[--set->n];
    magazines->set_nbytes -= nbytes;
    return true;
}

bool
nrm__cache_take_ripe(nrm_resource *pool, size_t nbytes, struct nrm__cell *out)
{
    struct nrm__cache *cache;
    struct nrm__magazines *magazines = enter(pool, &cache);
    if (magazines == NULL) {
        return false;
    }
    bool found = take_oldest(magazines, nbytes, out) ||
                 take_kept(magazines, nbytes, out) ||
                 (nrm__cache_is_ripe(magazines) && nrm__cache_ripen(magazines) &&
                  take_kept(magazines, nbytes, out));
    nrm__cache_leave(cache);
    return found;
}

bool
nrm__cache_end_epoch(struct nrm__cache *cache, struct nrm__magazines *magazines,
                     size_t enough)
{
    nrm_resource *pool = magazines->pool;
    size_t nbytes;
    uint32_t n = count_unclosed(magazines, &nbytes);
    bool closes = nbytes >= enough;
    nrm__cache_leave(cache);
    uint64_t before = atomic_load(&nrm__epoch_newest_done);
    if (closes) {
        (void)pool->ops->close_epoch(pool, n);
    }
    else {
        (void)nrm__epoch_poll();
    }
    return atomic_load(&nrm__epoch_newest_done) != before;
}

bool
nrm__cache_end_epoch_of(nrm_resource *pool)
{
    struct nrm__cache *cache;
    struct nrm__magazines *magazines = enter(pool, &cache);
    if (magazines == NULL) {
        return false;
    }
    if (magazines->parked_nbytes < magazines->epoch_nbytes) {
        nrm__cache_leave(cache);
        return false;
    }
    return nrm__cache_end_epoch(cache, magazines, magazines->epoch_nbytes);
}

size_t
nrm__cache_give_up_parked(nrm_resource *pool, struct nrm__parked *out)
{
    struct nrm__cache *cache;
    struct nrm__magazines *magazines = enter(pool, &cache);
    if (magazines == NULL) {
        return 0;
    }
    size_t n = nrm__cache_unpark(magazines, out);
    nrm__cache_leave(cache);
    return n;
}
