/*
 * See cache.h for what a thread keeps and how others get at it.
 *
 * One lock guards the list of caches, the list of shards, and every slot against all but
 * its owner, who takes it too when he changes a slot. It is never held while something is
 * given back to a pool: magazines are taken away whole and emptied afterwards. Magazines
 * are recycled and never unmapped.
 */
#include "core/cache_internal.h"

#include <sched.h>
#include <string.h>

#include "base/assert.h"
#include "base/lock.h"
#include "core/hooks.h"
#include "core/nodes.h"
#include "os/barrier.h"
#include "os/fork.h"
#include "os/memory.h"

/* Bytes of cells that a thread keeps of one class, and how many at least. */
#define CLASS_NBYTES ((size_t)128 * 1024)
#define CLASS_MIN_CELLS 16u

#define HASHED_BLOCKS 6u /* of a set that is shared by several sizes */

#define KEPT_SHIFT 6 /* of what a thread has live it keeps this fraction too */

struct nrm__cache_common nrm__cache_common = {.is_alone = true};

/* As nrm__slab_class_index, of the unit: 4 for each doubling from 8 on. */
#define CLASS_ABOVE(unit, log2) (4 + ((log2) - 3) * 4 + ((unit) >> ((log2) - 2)))
#define CLASS(unit)                                                                    \
    ((unit) < 8    ? (unit)                                                            \
     : (unit) < 16 ? CLASS_ABOVE(unit, 3)                                              \
     : (unit) < 32 ? CLASS_ABOVE(unit, 4)                                              \
     : (unit) < 64 ? CLASS_ABOVE(unit, 5)                                              \
                   : CLASS_ABOVE(unit, 6))
#define OFFSET(unit)                                                                   \
    (uint16_t)(offsetof(struct nrm__magazines, classes) +                              \
               CLASS(unit) * sizeof(struct nrm__magazine))
#define OFFSETS_4(unit)                                                                \
    OFFSET(unit), OFFSET((unit) + 1), OFFSET((unit) + 2), OFFSET((unit) + 3)
#define OFFSETS_16(unit)                                                               \
    OFFSETS_4(unit), OFFSETS_4((unit) + 4), OFFSETS_4((unit) + 8),                     \
        OFFSETS_4((unit) + 12)

_Static_assert(offsetof(struct nrm__magazines, sets) <= UINT16_MAX, "an offset fits");

const uint16_t nrm__magazine_offsets[NRM__SLAB_MAX / NRM__SLAB_ALIGNMENT] = {
    OFFSETS_16(0),  OFFSETS_16(16), OFFSETS_16(32), OFFSETS_16(48),
    OFFSETS_16(64), OFFSETS_16(80), OFFSETS_16(96), OFFSETS_16(112),
};

struct nrm__lock nrm__cache_lock = NRM__LOCK_INIT(NRM__RANK_CACHES);
static struct nrm__link caches = {&caches, &caches};
static struct nrm__magazines *free_magazines;

static struct nrm__cache *
cache_of(struct nrm__link *link)
{
    return NRM__CONTAINER(link, struct nrm__cache, link);
}

static struct nrm__cache *
own_cache(void)
{
    struct nrm__thread_state *state = nrm__thread_state_now();
    return state != NULL ? state->cache : NULL;
}

/* ---- others at a cache ---- */

static bool
is_inside(const struct nrm__cache *cache)
{
    return atomic_load_explicit(&cache->inside, memory_order_acquire);
}

static bool
is_alone_locked(void)
{
    struct nrm__cache *own = own_cache();
    return own != NULL && caches.next == &own->link && caches.previous == &own->link;
}

static void
barrier(void)
{
    if (nrm__cache_common.fences) {
        nrm__full_fence();
    }
    else {
        nrm__process_barrier();
    }
}

/* Keeps the owner out until `let_in`; waits until it is out. */
static void
shut_out_locked(struct nrm__cache *cache)
{
    atomic_fetch_or(&cache->gate, NRM__CACHE_STOPS);
    if (cache == own_cache()) {
        NRM_DEBUG_ASSERT(!is_inside(cache));
        return;
    }
    barrier();
    while (is_inside(cache)) {
        sched_yield();
    }
}

static void
let_in_locked(struct nrm__cache *cache)
{
    atomic_fetch_and_explicit(&cache->gate, ~(unsigned)NRM__CACHE_STOPS,
                              memory_order_release);
}

void
nrm__cache_synchronize(void)
{
    nrm__lock_acquire(&nrm__cache_lock);
    if (!nrm__list_is_empty(&caches) && !is_alone_locked()) {
        struct nrm__cache *own = own_cache();
        barrier();
        for (struct nrm__link *link = caches.next; link != &caches; link = link->next) {
            struct nrm__cache *cache = cache_of(link);
            while (cache != own && is_inside(cache)) {
                sched_yield(); /* it is in and out all the time */
            }
        }
    }
    nrm__lock_release(&nrm__cache_lock);
}

/* ---- magazines ---- */

static void
init_sets(struct nrm__magazines *magazines)
{
    for (size_t i = 0; i < NRM__CACHE_HASHED; i++) {
        magazines->sets[i].capacity = HASHED_BLOCKS;
    }
    magazines->sets[NRM__CACHE_LARGE].capacity = 1;
    for (size_t i = 0; i < NRM__CACHE_SIZES; i++) {
        struct nrm__cache_set *set = &magazines->sets[NRM__CACHE_HASHED + i];
        set->nbytes = (9 + i % 8) * (NRM__SLAB_MAX / 8) << i / 8;
        set->stream = 0;
        set->is_sized = true;
        set->capacity = NRM__CACHE_WAYS;
    }
}

static void
init_magazines(struct nrm__magazines *magazines, const struct nrm__front *front)
{
    nrm_kind kind = front->pool->kind;
    magazines->pool = front->pool;
    magazines->granule = front->granule;
    magazines->shift = front->shift;
    magazines->rounded_max = front->rounded_max;
    magazines->sized_limit =
        front->rounded_max != 0
            ? nrm__align_up(front->rounded_max, NRM__KIB) - NRM__SLAB_MAX
            : 0;
    magazines->sized_requests =
        front->rounded_max != 0 ? front->rounded_max - NRM__SLAB_MAX : 0;
    init_sets(magazines);
    magazines->recent = magazines->sets;
    magazines->alignment = nrm__kind_alignment(kind);
    magazines->cell_limit = front->cell_limit;
    magazines->is_ordered = front->is_ordered;
    magazines->sees_contexts = kind != NRM_KIND_HOST;
    magazines->device = nrm_resource_device(front->pool);
    magazines->set_limit = front->kept;
    for (size_t i = 0; i < NRM__SLAB_N_CLASSES; i++) {
        size_t n = CLASS_NBYTES / nrm__slab_class_nbytes(i);
        n = nrm__min(nrm__max(n, CLASS_MIN_CELLS), NRM__MAGAZINE_CELLS);
        magazines->classes[i].capacity = (uint32_t)n;
    }
}

/* Empty; NULL: no memory. */
static struct nrm__magazines *
create_magazines(const struct nrm__front *front)
{
    nrm__lock_acquire(&nrm__cache_lock);
    struct nrm__magazines *magazines = free_magazines;
    if (magazines != NULL) {
        free_magazines = magazines->next_free;
    }
    nrm__lock_release(&nrm__cache_lock);
    if (magazines == NULL) {
        void *memory;
        size_t nbytes = nrm__align_up(sizeof *magazines, nrm__page_size());
        if (nrm__map(nbytes, nrm__page_size(), &memory) != 0) {
            return NULL;
        }
        magazines = memory;
    }
    init_magazines(magazines, front);
    return magazines;
}

static void
destroy_magazines(struct nrm__magazines *magazines)
{
    if (magazines == NULL) {
        return;
    }
    nrm__lock_acquire(&nrm__cache_lock);
    magazines->next_free = free_magazines;
    free_magazines = magazines;
    nrm__lock_release(&nrm__cache_lock);
}

static bool
has_any(const struct nrm__magazines *magazines)
{
    uint32_t n_cells = 0;
    for (size_t i = 0; i < NRM__SLAB_N_CLASSES; i++) {
        n_cells |= magazines->classes[i].n;
    }
    return n_cells != 0 || magazines->set_nbytes != 0;
}

/* Empties magazines that were taken away, and recycles them. The pool lives at least as
   long as they have something of it, and may be gone when they have nothing. */
static void
give_back(struct nrm__magazines *magazines)
{
    if (magazines != NULL && has_any(magazines)) {
        magazines->pool->ops->take_back(magazines->pool, magazines);
    }
    destroy_magazines(magazines);
}

/* ---- slots ---- */

static bool
is_of(const struct nrm__slot *slot, const nrm_resource *mr)
{
    return atomic_load_explicit(&slot->mr, memory_order_relaxed) == mr;
}

/* A pool's own slot has the magazines that others of the thread share. */
static bool
is_own(const struct nrm__slot *slot)
{
    return slot->pool != NULL && is_of(slot, slot->pool);
}

static const atomic_bool never;

/* How many sizes there are from the least one on. */
static uint32_t
n_sizes(uint32_t least, uint32_t limit)
{
    return limit >= least ? limit - least + 1 : 0;
}

static void
equip_slot(struct nrm__slot *slot, struct nrm__magazines *magazines)
{
    slot->magazines = magazines;
    slot->cell_limit = slot->block_sizes = slot->stream_sizes = 0;
    if (magazines != NULL && slot->account == NULL && slot->least_alignment == 0) {
        slot->least_block = (uint32_t)magazines->cell_limit + 1;
        slot->block_sizes = n_sizes(slot->least_block, slot->limit);
        slot->stream_sizes = n_sizes(slot->least_block, slot->stream_limit);
        if (slot->forbidden == &never) {
            slot->cell_limit = (uint32_t)nrm__min(slot->limit, magazines->cell_limit);
        }
    }
    slot->cells_of = slot->cell_limit != 0 ? (const void *)slot->pool : &never;
}

/* Whether requests of a slot are counted in a shard of another one. */
static bool
leads_to(const struct nrm__slot *slot, const struct nrm__shard *shard)
{
    const struct nrm__shard *each = slot->front;
    while (each != NULL && each != shard) {
        each = each->behind;
    }
    return each != NULL;
}

/* Forgets a slot, and those that lead to it; the owner is out. Returns magazines for
   give_back. */
static struct nrm__magazines *
clear_slot_locked(struct nrm__cache *cache, struct nrm__slot *slot)
{
    struct nrm__magazines *magazines = NULL;
    nrm_resource *mr = atomic_load_explicit(&slot->mr, memory_order_relaxed);
    if (mr == NULL) {
        return NULL;
    }
    if (is_own(slot)) {
        magazines = slot->magazines;
    }
    for (size_t i = 0; i < NRM__CACHE_SLOTS; i++) {
        struct nrm__slot *other = &cache->slots[i];
        if (other != slot && leads_to(other, slot->front)) {
            (void)clear_slot_locked(cache, other);
        }
    }
    nrm__shard_fold_locked(slot->front);
    atomic_store_explicit(&slot->mr, NULL, memory_order_relaxed);
    slot->pool = NULL;
    slot->front = NULL;
    slot->account = NULL;
    equip_slot(slot, NULL);
    return magazines;
}

static void
set_magazines_locked(struct nrm__cache *cache, nrm_resource *pool,
                     struct nrm__magazines *magazines)
{
    for (size_t i = 0; i < NRM__CACHE_SLOTS; i++) {
        if (cache->slots[i].pool == pool) {
            equip_slot(&cache->slots[i], magazines);
        }
    }
}

/* For good: an owner that was inside with the belief that it is alone has left then. */
static void
end_solitude(void)
{
    if (atomic_load(&nrm__cache_common.is_alone)) {
        atomic_store(&nrm__cache_common.is_alone, false);
        nrm__cache_synchronize();
    }
}

void
nrm__cache_announce(void)
{
    if (atomic_load_explicit(&nrm__cache_common.is_alone, memory_order_acquire) &&
        own_cache() == NULL) {
        end_solitude();
    }
}

static struct nrm__cache *
create_cache(struct nrm__thread_state *state)
{
    struct nrm__cache *cache = nrm__node_allocate(sizeof *cache);
    if (cache == NULL) {
        return NULL;
    }
    nrm__lock_acquire(&nrm__cache_lock);
    atomic_init(&cache->gate, nrm__cache_common.fences ? NRM__CACHE_FENCES : 0u);
    bool is_first = nrm__list_is_empty(&caches);
    nrm__list_append(&caches, &cache->link);
    nrm__lock_release(&nrm__cache_lock);
    if (!is_first) {
        end_solitude();
    }
    state->cache = cache;
    return cache;
}

/* Fills a slot that is empty, by its owner; `behind`: that of the next resource on the way
   to the pool, or NULL. False: no memory. */
static bool
fill_slot_locked(struct nrm__slot *slot, nrm_resource *mr,
                 const struct nrm__front *front, const struct nrm__slot *behind)
{
    struct nrm__shard *shard = nrm__shard_create_locked(mr);
    if (shard == NULL) {
        return false;
    }
    slot->pool = front->pool;
    NRM_DEBUG_ASSERT(nrm__max(front->limit, front->stream_limit) <= NRM__CACHED_MAX);
    slot->limit = (uint32_t)front->limit;
    slot->stream_limit = (uint32_t)front->stream_limit;
    slot->forbidden = front->forbidden != NULL ? front->forbidden : &never;
    slot->account = front->account;
    slot->front = shard;
    shard->behind = behind != NULL ? behind->front : NULL;
    slot->least_alignment = nrm__kind_alignment(mr->kind) >
                            nrm__kind_alignment(front->pool->kind);
    equip_slot(slot, behind != NULL ? behind->magazines : NULL);
    atomic_store(&front->pool->is_cached, true);
    atomic_store(&mr->is_cached, true);
    atomic_store_explicit(&slot->mr, mr, memory_order_relaxed);
    return true;
}

static struct nrm__slot *
slot_of(struct nrm__cache *cache, const nrm_resource *mr)
{
    return nrm__cache_slot_of(cache, mr);
}

/* Whether a way leads over the slot: it cannot be of two of its resources. */
static bool
leads_over(struct nrm__cache *cache, const struct nrm__slot *way,
           const struct nrm__slot *slot)
{
    const struct nrm__shard *shard = way->front;
    while (shard != NULL && slot_of(cache, shard->mr) != slot) {
        shard = shard->behind;
    }
    return shard != NULL;
}

/* The slot of `mr`, made by the owner from outside, and before it those of the resources
   behind. NULL: it has no short way, or there is no memory. */
static struct nrm__slot *
make_slot(struct nrm__cache *cache, nrm_resource *mr, struct nrm__front *front)
{
    struct nrm__slot *slot = slot_of(cache, mr), *behind = NULL;
    if (mr->ops->front == NULL || !mr->ops->front(mr, front)) {
        return NULL;
    }
    if (front->behind != NULL) {
        struct nrm__front next;
        behind = make_slot(cache, front->behind, &next);
        if (behind == NULL || leads_over(cache, behind, slot)) {
            return NULL;
        }
    }
    if (is_of(slot, mr)) {
        return slot;
    }
    nrm__lock_acquire(&nrm__cache_lock);
    struct nrm__magazines *old = clear_slot_locked(cache, slot);
    bool filled = fill_slot_locked(slot, mr, front, behind);
    nrm__lock_release(&nrm__cache_lock);
    give_back(old);
    return filled ? slot : NULL;
}

/* Gives the pool of a slot magazines, unless it is closed. */
static void
equip(struct nrm__cache *cache, const struct nrm__front *front)
{
    nrm_resource *pool = front->pool;
    struct nrm__magazines *magazines = create_magazines(front);
    if (magazines == NULL) {
        return;
    }
    nrm__lock_acquire(&nrm__cache_lock);
    struct nrm__slot *slot = slot_of(cache, pool);
    bool wanted = is_own(slot) && slot->magazines == NULL &&
                  !atomic_load(&pool->is_closed);
    if (wanted) {
        set_magazines_locked(cache, pool, magazines);
    }
    nrm__lock_release(&nrm__cache_lock);
    if (!wanted) {
        destroy_magazines(magazines);
    }
}

struct nrm__slot *
nrm__cache_make_slot(nrm_resource *mr, struct nrm__cache **out)
{
    struct nrm__front front;
    struct nrm__thread_state *state = nrm__thread_state();
    if (nrm__thread_state_is_shared(state) || !mr->ops->front(mr, &front)) {
        return NULL;
    }
    struct nrm__cache *cache = state->cache != NULL ? state->cache
                                                    : create_cache(state);
    if (cache == NULL || make_slot(cache, mr, &front) == NULL) {
        return NULL;
    }
    equip(cache, &front);
    return nrm__cache_enter_slot(mr, out);
}

/* ---- magazines, for pools ---- */

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
    struct nrm__magazines *magazines = slot_of(cache, pool)->magazines;
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
        const struct nrm__slot *slot = slot_of(cache, pool);
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
    const struct nrm__slot *slot = slot_of(cache, pool);
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

/* The set of a size of blocks that are anybody's, if it has one of its own; NULL: not so. */
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
    const struct nrm__slot *slot = slot_of(cache, pool);
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
    const struct nrm__slot *slot = slot_of(cache, pool);
    struct nrm__cache_set *set = sized_set(slot, nbytes);
    while (set != NULL && n_kept < n &&
           nrm__cache_has_room(slot->magazines, set, nbytes, 0)) {
        n_kept++;
        nrm__cache_put_block(slot->magazines, set, nbytes, 0, cells[n - n_kept]);
    }
    nrm__cache_leave(cache);
    return n_kept;
}

/* ---- draining ---- */

/* Takes the magazines of the pool away from every thread, and from each once: threads that
   go on using it have new ones at once. A list by `next_free`. */
static struct nrm__magazines *
steal(nrm_resource *pool)
{
    struct nrm__magazines *stolen = NULL;
    nrm__lock_acquire(&nrm__cache_lock);
    for (struct nrm__link *link = caches.next; link != &caches; link = link->next) {
        struct nrm__cache *cache = cache_of(link);
        struct nrm__slot *slot = slot_of(cache, pool);
        if (is_of(slot, pool) && slot->magazines != NULL) {
            shut_out_locked(cache);
            slot->magazines->next_free = stolen;
            stolen = slot->magazines;
            set_magazines_locked(cache, pool, NULL);
            let_in_locked(cache);
        }
    }
    nrm__lock_release(&nrm__cache_lock);
    return stolen;
}

void
nrm__cache_drain(nrm_resource *pool)
{
    if (!atomic_load(&pool->is_cached)) {
        return;
    }
    struct nrm__magazines *stolen = steal(pool);
    pool->ops->take_back(pool, NULL);
    while (stolen != NULL) {
        struct nrm__magazines *next = stolen->next_free;
        give_back(stolen);
        stolen = next;
    }
}

void
nrm__cache_publish(nrm_resource *mr)
{
    if (!atomic_load(&mr->is_cached)) {
        return;
    }
    nrm__lock_acquire(&nrm__cache_lock);
    for (struct nrm__link *link = caches.next; link != &caches; link = link->next) {
        struct nrm__cache *cache = cache_of(link);
        struct nrm__slot *slot = slot_of(cache, mr);
        if (is_of(slot, mr)) {
            shut_out_locked(cache);
            nrm__shard_publish_all(slot->front);
            let_in_locked(cache);
        }
    }
    nrm__lock_release(&nrm__cache_lock);
}

void
nrm__cache_close(nrm_resource *pool)
{
    atomic_store(&pool->is_closed, true);
    nrm__cache_synchronize();
    nrm__cache_drain(pool);
}

void
nrm__cache_forget(nrm_resource *mr)
{
    struct nrm__magazines *empty;
    do {
        empty = NULL;
        nrm__lock_acquire(&nrm__cache_lock);
        for (struct nrm__link *link = caches.next; link != &caches && empty == NULL;
             link = link->next) {
            struct nrm__cache *cache = cache_of(link);
            struct nrm__slot *slot = slot_of(cache, mr);
            if (is_of(slot, mr)) {
                shut_out_locked(cache);
                empty = clear_slot_locked(cache, slot);
                let_in_locked(cache);
            }
        }
        nrm__lock_release(&nrm__cache_lock);
        destroy_magazines(empty);
    } while (empty != NULL);
}

/* ---- the end of a thread ---- */

static void
on_thread_end(struct nrm__thread_state *state)
{
    struct nrm__cache *cache = state->cache;
    if (cache == NULL || nrm__is_exiting()) {
        return;
    }
    for (size_t i = 0; i < NRM__CACHE_SLOTS; i++) {
        nrm__lock_acquire(&nrm__cache_lock);
        struct nrm__magazines *magazines = clear_slot_locked(cache, &cache->slots[i]);
        nrm__lock_release(&nrm__cache_lock);
        give_back(magazines);
    }
    state->cache = NULL;
    nrm__lock_acquire(&nrm__cache_lock);
    nrm__list_remove(&cache->link);
    nrm__lock_release(&nrm__cache_lock);
    nrm__node_deallocate(cache, sizeof *cache);
}

/* ---- fork ---- */

static void
fork_prepare(void)
{
    for (struct nrm__link *link = caches.next; link != &caches; link = link->next) {
        shut_out_locked(cache_of(link));
    }
}

static void
fork_parent(void)
{
    for (struct nrm__link *link = caches.next; link != &caches; link = link->next) {
        let_in_locked(cache_of(link));
    }
}

/* Nobody watches the pools of a child until a block goes the long way, as the next one does
   now. */
static void
keep_no_more(struct nrm__cache *cache)
{
    for (size_t i = 0; i < NRM__CACHE_SLOTS; i++) {
        if (cache->slots[i].magazines != NULL) {
            cache->slots[i].magazines->set_limit = 0;
        }
    }
}

/* Memory of the driver is of no use in a child: the long way says why. */
static void
forbid_driver_memory(struct nrm__cache *cache)
{
    for (size_t i = 0; i < NRM__CACHE_SLOTS; i++) {
        struct nrm__slot *slot = &cache->slots[i];
        if (slot->pool != NULL && slot->pool->kind != NRM_KIND_HOST) {
            slot->limit = slot->stream_limit = 0;
            equip_slot(slot, slot->magazines);
        }
    }
}

/* What other threads kept stays in their caches until the pool is drained. They may have
   looked in, and turned back, at the moment of the fork: they will not leave any more. */
static void
fork_child(void)
{
    struct nrm__cache *own = own_cache();
    for (struct nrm__link *link = caches.next; link != &caches; link = link->next) {
        if (cache_of(link) != own) {
            atomic_store(&cache_of(link)->inside, false);
        }
        forbid_driver_memory(cache_of(link));
        keep_no_more(cache_of(link));
        let_in_locked(cache_of(link));
    }
}

static const struct nrm__fork_hook fork_hook = {
    .rank = NRM__RANK_CACHES,
    .lock = &nrm__cache_lock,
    .prepare = fork_prepare,
    .parent = fork_parent,
    .child = fork_child,
};

__attribute__((constructor)) static void
start(void)
{
    nrm__cache_common.fences = !nrm__process_barrier_is_known();
    nrm__thread_state_set_end(on_thread_end);
    nrm__fork_hook_add(&fork_hook);
}
