/*
 * What a thread has freed of a pool that waits for GPUs (core/uses.h).
 *
 * Such a block is stamped with the open epoch and stands aside, oldest first, where nobody
 * takes it from. When its epoch is done it comes into the sets, among what is handed out
 * without a lock. Closing epochs is the pool's part, and whatever it does on the long way,
 * from looking for memory to waiting for the GPU, it first takes back what is parked
 * here, so that it decides over all of it. A block with known uses is never parked here.
 */
#include <string.h>

#include "core/short.h"
#include "core/uses.h"

/* So many are parked whatever their size. */
#define ALWAYS 4u

static bool
has_room(struct nrm__magazines *magazines)
{
    return magazines->n_parked < ALWAYS ||
           (magazines->n_parked < NRM__CACHE_PARKED &&
            magazines->parked_nbytes < magazines->epoch_nbytes);
}

static bool
may_park(const struct nrm__slot *slot, const struct nrm__live *block, size_t capacity)
{
    return capacity <= slot->limit &&
           !atomic_load_explicit(&block->goes_long, memory_order_relaxed) &&
           (has_room(slot->magazines) ||
            (nrm__cache_ripen(slot->magazines) && has_room(slot->magazines)));
}

/* Claimed: the stamp is read after that. */
static void
park(struct nrm__magazines *magazines, struct nrm__live *block, void *ptr,
     size_t capacity)
{
    magazines->parked[magazines->n_parked++] = (struct nrm__parked){
        .cell = {ptr, block},
        .capacity = capacity,
        .stamp = nrm__epoch_stamp(),
    };
    magazines->parked_nbytes += capacity;
}

size_t
nrm__cache_park(struct nrm__slot *slot, struct nrm__live *block, void *ptr)
{
    size_t capacity = atomic_load_explicit(&block->capacity, memory_order_relaxed);
    if (!may_park(slot, block, capacity) ||
        !nrm__short_claim_live(block, ptr, capacity)) {
        return 0;
    }
    park(slot->magazines, block, ptr, capacity);
    return atomic_load_explicit(&block->nbytes, memory_order_relaxed);
}

bool
nrm__cache_park_claimed(struct nrm__slot *slot, struct nrm__live *block, void *ptr)
{
    size_t capacity = atomic_load_explicit(&block->capacity, memory_order_relaxed);
    bool parks = may_park(slot, block, capacity);
    if (parks) {
        park(slot->magazines, block, ptr, capacity);
    }
    return parks;
}

/* The oldest `n` are parked no more. */
static void
forget_oldest(struct nrm__magazines *magazines, uint32_t n)
{
    magazines->n_parked -= n;
    memmove(magazines->parked, &magazines->parked[n],
            magazines->n_parked * sizeof *magazines->parked);
}

/* One for which its set has no room hides the next ones: the pool takes them. */
bool
nrm__cache_ripen(struct nrm__magazines *magazines)
{
    uint32_t n = 0;
    for (; n < magazines->n_parked; n++) {
        const struct nrm__parked *each = &magazines->parked[n];
        struct nrm__cache_set *set = nrm__cache_set_of(magazines, each->capacity, 0);
        if (!nrm__epoch_is_done(each->stamp) ||
            !nrm__cache_has_room(magazines, set, each->capacity, 0)) {
            break;
        }
        nrm__cache_put_block(magazines, set, each->capacity, 0, each->cell);
        magazines->parked_nbytes -= each->capacity;
    }
    if (n != 0) {
        forget_oldest(magazines, n);
    }
    return n != 0;
}

/* The magazines of this thread, if it has parked or kept any; NULL: not so, and outside. */
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

static size_t
unclosed_nbytes(const struct nrm__magazines *magazines)
{
    uint64_t recorded = nrm__epoch_newest_recorded();
    size_t nbytes = 0;
    for (uint32_t n = magazines->n_parked; n != 0; n--) {
        if (magazines->parked[n - 1].stamp <= recorded) {
            break;
        }
        nbytes += magazines->parked[n - 1].capacity;
    }
    return nbytes;
}

static bool
take(struct nrm__magazines *magazines, size_t nbytes, struct nrm__cell *out)
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
nrm__cache_take_ripe(nrm_resource *pool, size_t nbytes, struct nrm__cell *out,
                     size_t *out_parked, size_t *out_unclosed)
{
    struct nrm__cache *cache;
    struct nrm__magazines *magazines = enter(pool, &cache);
    *out_parked = *out_unclosed = 0;
    if (magazines == NULL) {
        return false;
    }
    bool found = take(magazines, nbytes, out) ||
                 (nrm__cache_ripen(magazines) && take(magazines, nbytes, out));
    *out_parked = magazines->parked_nbytes;
    *out_unclosed = found ? 0 : unclosed_nbytes(magazines);
    nrm__cache_leave(cache);
    return found;
}

size_t
nrm__cache_give_up_parked(nrm_resource *pool, struct nrm__parked *out)
{
    struct nrm__cache *cache;
    struct nrm__magazines *magazines = enter(pool, &cache);
    if (magazines == NULL) {
        return 0;
    }
    size_t n = magazines->n_parked;
    memcpy(out, magazines->parked, n * sizeof *out);
    magazines->n_parked = 0;
    magazines->parked_nbytes = 0;
    nrm__cache_leave(cache);
    return n;
}
