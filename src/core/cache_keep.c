/*
 * What pools ask of the cache of the calling thread: how much it wants of a size, to
 * keep what they have for it, and to give up what is in its way. They come here from
 * outside, on the long way of a request; the short way (core/short.h) does the same
 * inside.
 */
#include <string.h>

#include "core/cache_internal.h"

#define KEPT_SHIFT 6 /* of what a thread has live it keeps this fraction too */

static struct nrm__magazine *
enter_magazine(nrm_resource *pool, size_t class_index, struct nrm__cache **out)
{
    struct nrm__slot *slot = nrm__cache_enter_slot(pool, out);
    if (slot == NULL) {
        return NULL;
    }
    if (slot->magazines == NULL || atomic_load(&pool->is_closed)) {
        nrm__cache_leave(*out);
        return NULL;
    }
    return &slot->magazines->classes[class_index];
}

size_t
nrm__cache_wanted(nrm_resource *pool, size_t class_index)
{
    struct nrm__cache *cache;
    struct nrm__magazine *magazine = enter_magazine(pool, class_index, &cache);
    if (magazine == NULL) {
        return 0;
    }
    size_t n = magazine->n == 0 ? magazine->capacity / 2 : 0;
    nrm__cache_leave(cache);
    return n;
}

size_t
nrm__cache_keep_cells(nrm_resource *pool, size_t class_index,
                      const struct nrm__cell *cells, size_t n)
{
    struct nrm__cache *cache;
    struct nrm__magazine *magazine = enter_magazine(pool, class_index, &cache);
    if (magazine == NULL) {
        return 0;
    }
    size_t n_kept = nrm__min(n, magazine->capacity - magazine->n);
    memcpy(&magazine->cells[magazine->n], &cells[n - n_kept], n_kept * sizeof *cells);
    magazine->n += (uint32_t)n_kept;
    nrm__cache_leave(cache);
    return n_kept;
}

size_t
nrm__cache_give_up_cells(nrm_resource *pool, size_t class_index, struct nrm__cell *out)
{
    struct nrm__cache *cache;
    struct nrm__magazine *magazine = enter_magazine(pool, class_index, &cache);
    if (magazine == NULL) {
        return 0;
    }
    struct nrm__cell *kept = magazine->cells;
    size_t n = magazine->n == magazine->capacity ? magazine->capacity / 2 : 0;
    memcpy(out, kept, n * sizeof *out);
    magazine->n -= (uint32_t)n;
    memmove(kept, &kept[n], magazine->n * sizeof *out);
    nrm__cache_leave(cache);
    return n;
}

/* The oldest `n` blocks of a set; false: there are none. */
static bool
take_oldest(struct nrm__magazines *magazines, struct nrm__cache_set *set, uint32_t n,
            struct nrm__cache_set *out)
{
    out->stream = set->stream;
    out->nbytes = set->nbytes;
    out->n = n;
    memcpy(out->cells, set->cells, n * sizeof *set->cells);
    magazines->set_nbytes -= n * set->nbytes;
    set->n -= n;
    memmove(set->cells, &set->cells[n], set->n * sizeof *set->cells);
    return n != 0;
}

/* False: it is empty. */
static bool
take_set(struct nrm__magazines *magazines, struct nrm__cache_set *set,
         struct nrm__cache_set *out)
{
    return take_oldest(magazines, set, set->n, out);
}

/* The next one that has any, in turn; NULL: none has. */
static struct nrm__cache_set *
next_set(struct nrm__magazines *magazines)
{
    for (size_t i = 0; i < NRM__CACHE_SETS; i++) {
        unsigned victim = magazines->next_victim++ % NRM__CACHE_SETS;
        if (magazines->sets[victim].n != 0) {
            return &magazines->sets[victim];
        }
    }
    return NULL;
}

bool
nrm__cache_give_up_set(nrm_resource *pool, struct nrm__cache_set *out)
{
    struct nrm__cache *cache;
    if (enter_magazine(pool, 0, &cache) == NULL) {
        return false;
    }
    struct nrm__magazines *magazines = nrm__cache_slot_of(cache, pool)->magazines;
    struct nrm__cache_set *set = magazines->set_nbytes != 0 ? next_set(magazines)
                                                            : NULL;
    bool found = set != NULL && take_set(magazines, set, out);
    nrm__cache_leave(cache);
    return found;
}

/* What this thread has live of a resource. */
static size_t
live_nbytes(const struct nrm__shard *shard)
{
    int64_t nbytes =
        nrm__owned_get(&shard->top_bytes) - nrm__owned_get(&shard->left_bytes);
    return nbytes > 0 ? (size_t)nbytes
                      : 0; /* others' blocks, which it freed, count too */
}

void
nrm__cache_set_limit(nrm_resource *pool, size_t limit)
{
    struct nrm__cache *cache;
    if (enter_magazine(pool, 0, &cache) != NULL) {
        const struct nrm__slot *slot = nrm__cache_slot_of(cache, pool);
        slot->magazines->set_limit =
            nrm__max(limit, live_nbytes(slot->front) >> KEPT_SHIFT);
        nrm__cache_leave(cache);
    }
}

/* Half of the next set that has any. */
static bool
take_some(struct nrm__magazines *magazines, struct nrm__cache_set *out)
{
    struct nrm__cache_set *set = next_set(magazines);
    return set != NULL && take_oldest(magazines, set, (set->n + 1) / 2, out);
}

bool
nrm__cache_make_room(nrm_resource *pool, size_t nbytes, uint64_t stream,
                     struct nrm__cache_set *out)
{
    struct nrm__cache *cache;
    bool found = false;
    if (enter_magazine(pool, 0, &cache) == NULL) {
        return false;
    }
    const struct nrm__slot *slot = nrm__cache_slot_of(cache, pool);
    struct nrm__magazines *magazines = slot->magazines;
    struct nrm__cache_set *set = nrm__cache_set_of(magazines, nbytes, stream);
    bool fits = magazines->set_nbytes + nbytes <= magazines->set_limit;
    if (nbytes > slot->stream_limit) {
        found = false;
    }
    else if (set->n == 0 || nrm__cache_set_is_for(set, nbytes, stream)) {
        found = set->n == set->capacity ? take_oldest(magazines, set, set->n / 2, out)
                                        : !fits && take_some(magazines, out);
    }
    else {
        found = !set->is_sized && take_set(magazines, set, out);
    }
    nrm__cache_leave(cache);
    return found;
}

/* The set of a size of blocks that are anybody's, if it has one of its own; NULL: not
   so. */
static struct nrm__cache_set *
sized_set(const struct nrm__slot *slot, size_t nbytes)
{
    struct nrm__cache_set *set = nrm__cache_set_of(slot->magazines, nbytes, 0);
    bool keeps = set->is_sized && set->nbytes == nbytes && nbytes <= slot->limit;
    return keeps ? set : NULL;
}

size_t
nrm__cache_wanted_blocks(nrm_resource *pool, size_t nbytes)
{
    struct nrm__cache *cache;
    if (enter_magazine(pool, 0, &cache) == NULL) {
        return 0;
    }
    const struct nrm__slot *slot = nrm__cache_slot_of(cache, pool);
    const struct nrm__cache_set *set = sized_set(slot, nbytes);
    const struct nrm__magazines *magazines = slot->magazines;
    size_t n = set != NULL && set->n == 0 ? set->capacity / 2u : 0;
    size_t room = magazines->set_nbytes < magazines->set_limit
                      ? magazines->set_limit - magazines->set_nbytes
                      : 0;
    nrm__cache_leave(cache);
    return nrm__min(n, room / nbytes);
}

size_t
nrm__cache_keep_blocks(nrm_resource *pool, size_t nbytes, const struct nrm__cell *cells,
                       size_t n)
{
    struct nrm__cache *cache;
    size_t n_kept = 0;
    if (n == 0 || enter_magazine(pool, 0, &cache) == NULL) {
        return 0;
    }
    const struct nrm__slot *slot = nrm__cache_slot_of(cache, pool);
    struct nrm__cache_set *set = sized_set(slot, nbytes);
    while (set != NULL && n_kept < n &&
           nrm__cache_has_room(slot->magazines, set, nbytes, 0)) {
        n_kept++;
        nrm__cache_put_block(slot->magazines, set, nbytes, 0, cells[n - n_kept]);
    }
    nrm__cache_leave(cache);
    return n_kept;
}
