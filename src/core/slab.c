/*
 * Slabs: chunks of 64 KiB cut into equal cells.
 *
 * A cell is free, live, or neither: while a thread keeps it (core/cache.c), and between
 * the claim of the one thread that gives it back and its return to the free bits. Free
 * bits belong to the lock of the class. A cell is live while its requested size is not
 * zero, so a claim is one exchange. A description stays with its class until the set
 * dies and may then describe another chunk: whoever found a cell looks at the
 * generation before he claims it, while the block map keeps the segment from leaving.
 *
 * Where the owner asks for it (NRM__OPS_HOLDS), a slab holds a reference to it while
 * any cell is not free, in place of one for each live block.
 *
 * Two threads that work on cells of one slab pass the lines of its sizes to and fro.
 * Where the owner allows it (`spreads`), each thread has its cells from slabs that it
 * used last, else from empty ones, else from new ones, until there are so many slabs
 * with room that others are better shared.
 *
 * Cells are handed out from the lowest address up, so those above the high-water mark
 * have never been used and read as zero when the chunk did. Slabs with room stand in a
 * list, the empty ones at its end: cells are taken from slabs that are in use anyway,
 * and an empty one stays empty until it is needed. A few of these are kept, the others
 * go back at once.
 */
#include "core/slab_class.h"

#include <stdint.h>

#include "base/assert.h"
#include "base/bits.h"
#include "base/thread_state.h"
#include "core/cache.h"

#define KEPT_EMPTY 8     /* slabs of a class */
#define SPREAD_SLABS 16u /* with room, of others: so many before they are shared */

/* ---- cells ---- */

static bool
is_empty(const struct nrm__slab *slab)
{
    return slab->n_free == slab->class->n_cells;
}

static bool
has_free_bit(const struct nrm__slab *slab, uint32_t cell)
{
    return (slab->free[cell / 64] >> (cell % 64) & 1) != 0;
}

/* Aborts unless the slab agrees with itself; always true. */
static bool
check_slab_locked(struct nrm__slab *slab)
{
    const struct nrm__slab_class *class = slab->class;
    uint32_t n_free = 0;
    for (uint32_t cell = 0; cell < class->n_cells; cell++) {
        size_t nbytes = atomic_load(&slab->sizes[cell]) & ~NRM__SLAB_COUNTED;
        bool is_free = has_free_bit(slab, cell);
        NRM_ASSERT(!is_free || nbytes == 0);
        NRM_ASSERT(nbytes <= class->cell_nbytes);
        NRM_ASSERT(!is_free || cell / 64 >= slab->first_free);
        NRM_ASSERT(is_free || cell < slab->high_water);
        n_free += is_free;
    }
    NRM_ASSERT(n_free == slab->n_free);
    NRM_ASSERT((n_free == 0) == nrm__list_is_empty(&slab->available));
    NRM_ASSERT(slab->segment->start == slab->start);
    NRM_ASSERT(slab->start == (uintptr_t)slab->chunk.ptr);
    NRM_ASSERT(nrm__is_aligned(slab->chunk.ptr, NRM__SLAB_CHUNK));
    return true;
}

static bool
is_held(const struct nrm__slab *slab)
{
    return (slab->owner->ops->flags & NRM__OPS_HOLDS) != 0;
}

/* The lowest free cell: neither free nor live from now on. */
static uint32_t
take_cell_locked(struct nrm__slab *slab, bool *out_is_zero)
{
    struct nrm__slab_class *class = slab->class;
    uint32_t word = slab->first_free;
    while (slab->free[word] == 0) {
        word++;
    }
    uint32_t cell = word * 64 + (uint32_t)__builtin_ctzll(slab->free[word]);
    if (is_empty(slab)) {
        class->n_empty--;
        if (is_held(slab)) {
            nrm__resource_hold(slab->owner, 1);
        }
    }
    slab->free[word] &= slab->free[word] - 1;
    slab->first_free = word;
    if (--slab->n_free == 0) {
        nrm__list_remove(&slab->available);
    }
    *out_is_zero = slab->chunk_is_zero && cell >= slab->high_water;
    if (cell >= slab->high_water) {
        slab->high_water = cell + 1;
    }
    return cell;
}

/* Takes a cell back that is neither free nor live. True when it was the last one: the
   caller drops what the slab held of its owner. *out_leaving is set to the slab when it
   shall leave, unlinked. */
static bool
put_cell_locked(struct nrm__slab *slab, uint32_t cell, struct nrm__slab **out_leaving)
{
    struct nrm__slab_class *class = slab->class;
    NRM_ASSERT(!has_free_bit(slab, cell));
    slab->free[cell / 64] |= UINT64_C(1) << (cell % 64);
    if (cell / 64 < slab->first_free) {
        slab->first_free = cell / 64;
    }
    if (slab->n_free++ == 0) {
        nrm__list_insert_after(&class->available, &slab->available);
    }
    NRM_SLOW_ASSERT(check_slab_locked(slab));
    if (!is_empty(slab)) {
        return false;
    }
    nrm__list_remove(&slab->available);
    if (class->n_empty == KEPT_EMPTY) {
        nrm__list_remove(&slab->all);
        *out_leaving = slab;
    }
    else {
        nrm__list_append(&class->available, &slab->available);
        class->n_empty++;
    }
    return is_held(slab);
}

/* ---- whose slab ---- */

static struct nrm__slab *
first_available_locked(struct nrm__slab_class *class)
{
    if (nrm__list_is_empty(&class->available)) {
        return NULL;
    }
    return NRM__CONTAINER(class->available.next, struct nrm__slab, available);
}

/* The slab that this thread should have cells of: its own, an empty one, or when there
   are many, the first. NULL: a new one would be better. */
static struct nrm__slab *
own_available_locked(struct nrm__slab_class *class, uint64_t user)
{
    size_t n = 0;
    const struct nrm__link *head = &class->available;
    for (struct nrm__link *link = head->next; link != head; link = link->next) {
        struct nrm__slab *slab = NRM__CONTAINER(link, struct nrm__slab, available);
        if (slab->user == user || is_empty(slab)) {
            return slab;
        }
        if (++n == SPREAD_SLABS) {
            return first_available_locked(class);
        }
    }
    return NULL;
}

/* A slab with a free cell, from now on this thread's; NULL: there is none, or a new one
   would be better and `may_make` says that it can be had. */
static struct nrm__slab *
choose_locked(struct nrm__slab_class *class, bool may_make)
{
    struct nrm__slab *slab = first_available_locked(class);
    if (slab != NULL && class->set->spreads) {
        uint64_t user = nrm__thread_id();
        struct nrm__slab *own = slab->user == user ? slab
                                                   : own_available_locked(class, user);
        slab = own != NULL || may_make ? own : slab;
        if (slab != NULL) {
            slab->user = user;
            /* The first that it looks at next. */
            nrm__list_remove(&slab->available);
            nrm__list_insert_after(&class->available, &slab->available);
        }
    }
    return slab;
}

/* An empty slab, unlinked, or NULL: they are the last of those available. */
static struct nrm__slab *
take_empty_locked(struct nrm__slab_class *class)
{
    if (class->n_empty == 0) {
        return NULL;
    }
    struct nrm__slab *slab =
        NRM__CONTAINER(class->available.previous, struct nrm__slab, available);
    NRM_ASSERT(is_empty(slab));
    nrm__list_remove(&slab->available);
    nrm__list_remove(&slab->all);
    class->n_empty--;
    return slab;
}

/* ---- blocks ---- */

bool
nrm__slabs_takes(size_t nbytes, size_t alignment)
{
    return nbytes <= NRM__SLAB_MAX && alignment <= NRM__SLAB_ALIGNMENT;
}

static void
fill_block(struct nrm__slab *slab, uint32_t cell, size_t nbytes, unsigned flags,
           struct nrm__block *out)
{
    out->ptr = (void *)(slab->start + (size_t)cell * slab->cell_nbytes);
    out->nbytes = nbytes;
    out->capacity = slab->cell_nbytes;
    out->record = slab;
    out->tag = slab->generation;
    out->flags = flags | NRM__BLOCK_IN_SLAB;
}

/* A cell of a slab that there is, which it returns; see choose_locked. */
static struct nrm__slab *
take_any(struct nrm__slab_class *class, bool may_make, uint32_t *out_cell,
         bool *out_is_zero)
{
    nrm__lock_acquire(&class->lock);
    struct nrm__slab *slab = choose_locked(class, may_make);
    if (slab != NULL) {
        *out_cell = take_cell_locked(slab, out_is_zero);
    }
    nrm__lock_release(&class->lock);
    return slab;
}

/* A new slab becomes one of the class and of this thread, and gives its first cell. */
static void
enter_slab(struct nrm__slab_class *class, struct nrm__slab *slab, uint32_t *out_cell,
           bool *out_is_zero)
{
    nrm__lock_acquire(&class->lock);
    nrm__list_append(&class->all, &slab->all);
    nrm__list_insert_after(&class->available, &slab->available);
    slab->user = nrm__thread_id();
    class->n_empty++;
    *out_cell = take_cell_locked(slab, out_is_zero);
    nrm__lock_release(&class->lock);
}

nrm_status
nrm__slabs_allocate(struct nrm__slabs *slabs, size_t nbytes, struct nrm__block *out)
{
    struct nrm__slab_class *class = slabs->classes[nrm__slab_class_index(nbytes)];
    uint32_t cell = 0;
    bool is_zero = false;
    struct nrm__slab *slab = take_any(class, true, &cell, &is_zero);
    if (slab == NULL) {
        struct nrm__slab *made = NULL;
        nrm_status status = nrm__slab_create(class, &made);
        if (status == NRM_OK) {
            slab = made;
            enter_slab(class, slab, &cell, &is_zero);
        }
        else {
            slab = slabs->spreads ? take_any(class, false, &cell, &is_zero) : NULL;
        }
        if (slab == NULL) {
            return status;
        }
    }
    fill_block(slab, cell, nbytes, is_zero ? NRM__BLOCK_IS_ZERO : 0, out);
    out->segment = slab->segment;
    nrm__slab_set_live(slab, cell, nbytes);
    return NRM_OK;
}

void
nrm__slabs_deallocate(struct nrm__slabs *slabs, const struct nrm__block *block)
{
    struct nrm__cell cell = {block->ptr,
                             nrm__slab_record_of(block->record, block->ptr)};
    nrm__slabs_put(slabs, &cell, 1);
}

/* ---- what threads keep ---- */

/* Inner segments that fill pages do not fit into cells. */
struct nrm__slab *
nrm__slab_of_cell(const struct nrm__cell *cell)
{
    struct nrm__segment *segment = nrm__block_map_peek((uintptr_t)cell->ptr);
    NRM_DEBUG_ASSERT(segment != NULL && nrm__segment_is_slab(segment));
    return nrm__slab_of_segment(segment);
}

size_t
nrm__slabs_take(struct nrm__slabs *slabs, size_t class_index, struct nrm__cell *out,
                size_t n)
{
    struct nrm__slab_class *class = slabs->classes[class_index];
    size_t n_taken = 0;
    nrm__lock_acquire(&class->lock);
    while (n_taken < n) {
        struct nrm__slab *slab = choose_locked(class, true);
        if (slab == NULL) {
            break;
        }
        bool is_zero;
        uint32_t cell = take_cell_locked(slab, &is_zero);
        out[n_taken++] = (struct nrm__cell){
            .ptr = (void *)(slab->start + (size_t)cell * slab->cell_nbytes),
            .record = &slab->sizes[cell]};
    }
    nrm__lock_release(&class->lock);
    return n_taken;
}

/* Drops what a slab held, which may be the end of the set: the last thing to be
   done. */
static void
let_go(nrm_resource *owner, size_t n_holds)
{
    if (n_holds != 0) {
        nrm__resource_unhold(owner, n_holds);
    }
}

void
nrm__slabs_put(struct nrm__slabs *slabs, const struct nrm__cell *cells, size_t n)
{
    size_t n_holds = 0;
    nrm_resource *owner = slabs->owner;
    for (size_t i = 0; i < n; i++) {
        struct nrm__slab *slab = nrm__slab_of_cell(&cells[i]);
        struct nrm__slab_class *class = slab->class;
        struct nrm__slab *leaving = NULL;
        NRM_DEBUG_ASSERT(class->set == slabs);
        nrm__lock_acquire(&class->lock);
        /* Neighbours are mostly of one class: one lock for all of them. */
        for (;; i++) {
            uint32_t cell = nrm__slab_cell_of(slab, (uintptr_t)cells[i].ptr);
            n_holds += put_cell_locked(slab, cell, &leaving);
            if (leaving != NULL || i + 1 == n) {
                break;
            }
            slab = nrm__slab_of_cell(&cells[i + 1]);
            if (slab->class != class) {
                break;
            }
        }
        nrm__lock_release(&class->lock);
        if (leaving != NULL) {
            nrm__slab_destroy(leaving);
        }
    }
    let_go(owner, n_holds);
}

void
nrm__slabs_make_live(const struct nrm__cell *cell, size_t nbytes,
                     struct nrm__block *out)
{
    struct nrm__slab *slab = nrm__slab_of_cell(cell);
    uint32_t index = nrm__slab_cell_of(slab, (uintptr_t)cell->ptr);
    fill_block(slab, index, nbytes, 0, out);
    out->segment = slab->segment;
    nrm__slab_set_live(slab, index, nbytes);
}

/* ---- the ops of segments ---- */

bool
nrm__slabs_find(struct nrm__segment *segment, const void *ptr, struct nrm__block *out)
{
    struct nrm__slab *slab = nrm__slab_of_segment(segment);
    uint32_t cell = nrm__slab_cell_of(slab, (uintptr_t)ptr);
    if (cell >= slab->n_cells) {
        return false; /* behind the last cell */
    }
    size_t nbytes = atomic_load_explicit(&slab->sizes[cell], memory_order_acquire);
    if (nbytes == 0) {
        return false;
    }
    fill_block(slab, cell, nbytes & ~NRM__SLAB_COUNTED, 0, out);
    return true;
}

bool
nrm__slabs_claim(struct nrm__block *block)
{
    struct nrm__slab *slab = block->record;
    if (slab->generation != block->tag) {
        return false; /* the chunk has left since */
    }
    /* It may have been resized since it was found. */
    size_t nbytes =
        nrm__slab_claim_cell(slab, nrm__slab_cell_of(slab, (uintptr_t)block->ptr));
    if (nbytes == 0) {
        return false;
    }
    if ((nbytes & NRM__SLAB_COUNTED) != 0) {
        block->flags |= NRM__BLOCK_IS_COUNTED;
    }
    block->nbytes = nbytes & ~NRM__SLAB_COUNTED;
    return true;
}

void
nrm__slabs_unclaim(const struct nrm__block *block)
{
    struct nrm__slab *slab = block->record;
    NRM_DEBUG_ASSERT(block->nbytes <= slab->cell_nbytes);
    bool is_counted = (block->flags & NRM__BLOCK_IS_COUNTED) != 0;
    nrm__slab_set_live(slab, nrm__slab_cell_of(slab, (uintptr_t)block->ptr),
                       block->nbytes | (is_counted ? NRM__SLAB_COUNTED : 0));
}

/* ---- looking after the set ---- */

void
nrm__slabs_trim(struct nrm__slabs *slabs, size_t keep_nbytes, size_t *out_nbytes)
{
    size_t n_kept = keep_nbytes / NRM__SLAB_CHUNK;
    for (size_t i = 0; i < NRM__SLAB_N_CLASSES; i++) {
        struct nrm__slab_class *class = slabs->classes[i];
        for (;;) {
            struct nrm__slab *slab = NULL;
            nrm__lock_acquire(&class->lock);
            if (class->n_empty > n_kept) {
                slab = take_empty_locked(class);
            }
            else {
                n_kept -= class->n_empty;
            }
            nrm__lock_release(&class->lock);
            if (slab == NULL) {
                break;
            }
            nrm__slab_destroy(slab);
            *out_nbytes += NRM__SLAB_CHUNK;
        }
    }
}

static void
check_class_locked(struct nrm__slab_class *class)
{
    size_t n_available = 0;
    size_t n_empty = 0;
    for (struct nrm__link *link = class->all.next; link != &class->all;
         link = link->next) {
        struct nrm__slab *slab = NRM__CONTAINER(link, struct nrm__slab, all);
        NRM_ASSERT(slab->class == class);
        check_slab_locked(slab);
        n_available += slab->n_free != 0;
        n_empty += is_empty(slab);
    }
    NRM_ASSERT(n_empty == class->n_empty && n_empty <= KEPT_EMPTY);
    bool was_empty = false;
    for (struct nrm__link *link = class->available.next; link != &class->available;
         link = link->next) {
        struct nrm__slab *slab = NRM__CONTAINER(link, struct nrm__slab, available);
        NRM_ASSERT(is_empty(slab) || !was_empty);
        was_empty = is_empty(slab);
        n_available--;
    }
    NRM_ASSERT(n_available == 0);
}

void
nrm__slabs_check(struct nrm__slabs *slabs)
{
    for (size_t i = 0; i < NRM__SLAB_N_CLASSES; i++) {
        nrm__lock_acquire(&slabs->classes[i]->lock);
        check_class_locked(slabs->classes[i]);
        nrm__lock_release(&slabs->classes[i]->lock);
    }
}

/* ---- fork ---- */

void
nrm__slabs_fork_prepare(struct nrm__slabs *slabs)
{
    for (size_t i = 0; i < NRM__SLAB_N_CLASSES; i++) {
        nrm__lock_fork_prepare(&slabs->classes[i]->lock);
    }
}

void
nrm__slabs_fork_parent(struct nrm__slabs *slabs)
{
    for (size_t i = 0; i < NRM__SLAB_N_CLASSES; i++) {
        nrm__lock_fork_parent(&slabs->classes[i]->lock);
    }
}

void
nrm__slabs_fork_child(struct nrm__slabs *slabs)
{
    for (size_t i = 0; i < NRM__SLAB_N_CLASSES; i++) {
        nrm__lock_fork_child(&slabs->classes[i]->lock);
        nrm__slab_batches_fork_child(slabs->classes[i]);
    }
}
