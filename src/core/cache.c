/*
 * See cache.h for what a thread keeps and how others get at it.
 *
 * One lock guards the list of caches, the list of shards, and every slot against all
 * but its owner, who takes it too when he changes a slot. It is never held while
 * something is given back to a pool: magazines are taken away whole and emptied
 * afterwards. Magazines are recycled and never unmapped.
 */
#include "core/cache_internal.h"

#include "base/assert.h"
#include "base/lock.h"
#include "core/hooks.h"
#include "core/nodes.h"
#include "core/scopes.h"
#include "os/barrier.h"
#include "os/memory.h"

/* Bytes of cells that a thread keeps of one class, and how many at least. */
#define CLASS_NBYTES ((size_t)128 * 1024)
#define CLASS_MIN_CELLS 16u

#define HASHED_BLOCKS 6u /* of a set that is shared by several sizes */

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
struct nrm__link nrm__caches = {&nrm__caches, &nrm__caches};
static struct nrm__magazines *free_magazines;

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
    magazines->epoch_nbytes = front->epoch_nbytes;
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

void
nrm__magazines_destroy(struct nrm__magazines *magazines)
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
    return (n_cells | magazines->n_parked) != 0 || magazines->set_nbytes != 0;
}

void
nrm__magazines_give_back(struct nrm__magazines *magazines)
{
    if (magazines != NULL && has_any(magazines)) {
        magazines->pool->ops->take_back(magazines->pool, magazines);
    }
    nrm__magazines_destroy(magazines);
}

/* ---- slots ---- */

/* A pool's own slot has the magazines that others of the thread share. */
static bool
is_own(const struct nrm__slot *slot)
{
    return slot->pool != NULL && nrm__slot_is_of(slot, slot->pool);
}

static const atomic_bool never;

/* How many sizes there are from the least one on. */
static uint32_t
n_sizes(uint32_t least, uint32_t limit)
{
    return limit >= least ? limit - least + 1 : 0;
}

void
nrm__slot_equip(struct nrm__slot *slot, struct nrm__magazines *magazines)
{
    slot->magazines = magazines;
    slot->cell_limit = slot->block_sizes = slot->stream_sizes = 0;
    slot->parks = false;
    if (magazines != NULL && slot->account == NULL && slot->least_alignment == 0) {
        slot->least_block = (uint32_t)magazines->cell_limit + 1;
        slot->parks = magazines->epoch_nbytes != 0;
        slot->block_sizes = slot->parks ? 0 : n_sizes(slot->least_block, slot->limit);
        slot->stream_sizes = n_sizes(slot->least_block, slot->stream_limit);
        if (slot->forbidden == &never) {
            slot->cell_limit = (uint16_t)nrm__min(slot->limit, magazines->cell_limit);
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

struct nrm__magazines *
nrm__cache_clear_slot_locked(struct nrm__cache *cache, struct nrm__slot *slot)
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
            (void)nrm__cache_clear_slot_locked(cache, other);
        }
    }
    nrm__shard_fold_locked(slot->front);
    atomic_store_explicit(&slot->mr, NULL, memory_order_relaxed);
    slot->pool = NULL;
    slot->front = NULL;
    slot->account = NULL;
    nrm__slot_equip(slot, NULL);
    return magazines;
}

void
nrm__cache_set_magazines_locked(struct nrm__cache *cache, nrm_resource *pool,
                                struct nrm__magazines *magazines)
{
    for (size_t i = 0; i < NRM__CACHE_SLOTS; i++) {
        if (cache->slots[i].pool == pool) {
            nrm__slot_equip(&cache->slots[i], magazines);
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
        nrm__cache_own() == NULL) {
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
    bool is_first = nrm__list_is_empty(&nrm__caches);
    nrm__list_append(&nrm__caches, &cache->link);
    nrm__lock_release(&nrm__cache_lock);
    if (!is_first) {
        end_solitude();
    }
    state->cache = cache;
    return cache;
}

/* Fills a slot that is empty, by its owner; `behind`: that of the next resource on the
   way to the pool, or NULL. False: no memory. */
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
    slot->large = front->large_for == mr ? front->large : NULL;
    slot->front = shard;
    shard->behind = behind != NULL ? behind->front : NULL;
    slot->least_alignment = nrm__kind_alignment(mr->kind) >
                            nrm__kind_alignment(front->pool->kind);
    nrm__slot_equip(slot, behind != NULL ? behind->magazines : NULL);
    atomic_store(&front->pool->is_cached, true);
    atomic_store(&mr->is_cached, true);
    atomic_store_explicit(&slot->mr, mr, memory_order_relaxed);
    return true;
}

/* Whether a way leads over the slot: it cannot be of two of its resources. */
static bool
leads_over(struct nrm__cache *cache, const struct nrm__slot *way,
           const struct nrm__slot *slot)
{
    const struct nrm__shard *shard = way->front;
    while (shard != NULL && nrm__cache_slot_of(cache, shard->mr) != slot) {
        shard = shard->behind;
    }
    return shard != NULL;
}

/* The slot of `mr`, made by the owner from outside, and before it those of the
   resources behind. NULL: it has no short way, or there is no memory. */
static struct nrm__slot *
make_slot(struct nrm__cache *cache, nrm_resource *mr, struct nrm__front *front)
{
    struct nrm__slot *slot = nrm__cache_slot_of(cache, mr), *behind = NULL;
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
    if (nrm__slot_is_of(slot, mr)) {
        return slot;
    }
    nrm__lock_acquire(&nrm__cache_lock);
    struct nrm__magazines *old = nrm__cache_clear_slot_locked(cache, slot);
    bool filled = fill_slot_locked(slot, mr, front, behind);
    nrm__lock_release(&nrm__cache_lock);
    nrm__magazines_give_back(old);
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
    struct nrm__slot *slot = nrm__cache_slot_of(cache, pool);
    bool wanted = is_own(slot) && slot->magazines == NULL &&
                  !atomic_load(&pool->is_closed);
    if (wanted) {
        nrm__cache_set_magazines_locked(cache, pool, magazines);
    }
    nrm__lock_release(&nrm__cache_lock);
    if (!wanted) {
        nrm__magazines_destroy(magazines);
    }
}

struct nrm__slot *
nrm__cache_make_slot(nrm_resource *mr, struct nrm__cache **out)
{
    struct nrm__front front;
    struct nrm__thread_state *state = nrm__thread_state();
    bool is_away = state->counting != NULL; /* not in a request: core/scopes.h */
    if (is_away || nrm__thread_state_is_shared(state) || !mr->ops->front(mr, &front)) {
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

/* ---- the end of a thread ---- */

static void
on_thread_end(struct nrm__thread_state *state)
{
    nrm__scopes_end_thread(state);
    struct nrm__cache *cache = state->cache;
    if (cache == NULL || nrm__is_exiting()) {
        return;
    }
    for (size_t i = 0; i < NRM__CACHE_SLOTS; i++) {
        nrm__lock_acquire(&nrm__cache_lock);
        struct nrm__magazines *magazines =
            nrm__cache_clear_slot_locked(cache, &cache->slots[i]);
        nrm__lock_release(&nrm__cache_lock);
        nrm__magazines_give_back(magazines);
    }
    state->cache = NULL;
    nrm__lock_acquire(&nrm__cache_lock);
    nrm__list_remove(&cache->link);
    nrm__lock_release(&nrm__cache_lock);
    nrm__node_deallocate(cache, sizeof *cache);
}

__attribute__((constructor)) static void
start(void)
{
    nrm__cache_common.fences = !nrm__process_barrier_is_known();
    nrm__thread_state_set_end(on_thread_end);
    nrm__fork_hook_add(&nrm__cache_fork_hook);
}
