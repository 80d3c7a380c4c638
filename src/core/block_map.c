/*
 * See block_map.h for what the map answers.
 *
 * The page table has two levels: 2^16 leaves of 2^16 pages of 64 KiB cover 48 bits of
 * address. A reader loads the segment of a page, counts itself in, and looks again: if
 * the entry still names that segment, the segment cannot be removed before the reader
 * counts itself out. Descriptions of segments are recycled (core/segment.c) but never
 * unmapped, so counting into one that has just been removed does no harm.
 *
 * The ordered tables are trees under a lock. Blocks of up to a page stand in one of 64
 * shards chosen by the page they start in, so one that contains an address is in the
 * shard of its page or of the page before. Longer ones share a tree. A third tree, the
 * overlay, holds ranges that may lie inside ranges of others, which nobody declared:
 * blocks of callbacks (whose functions may allocate from our own resources), and
 * segments that do not fill whole pages. It is nearly always empty and then costs one
 * load.
 */
#include "core/block_map.h"

#include <sched.h>
#include <stdatomic.h>

#include "base/assert.h"
#include "base/bits.h"
#include "base/error.h"
#include "base/lock.h"
#include "core/cache.h"
#include "core/left_out.h"
#include "core/nodes.h"
#include "core/overlay.h"
#include "os/fork.h"
#include "os/memory.h"

#define PAGE_SHIFT NRM__MAP_PAGE_SHIFT
#define LEAF_BITS NRM__MAP_LEAF_BITS
#define LEAF_PAGES NRM__MAP_LEAF_PAGES
#define N_LEAVES NRM__MAP_N_LEAVES
#define N_SHARDS 64


_Atomic(nrm__page_entry *) nrm__map_leaves[N_LEAVES];
struct nrm__map_overlay nrm__map_overlay;

struct table {
    struct nrm__lock lock;
    struct nrm__tree tree;
};

static struct table shards[N_SHARDS];
static struct table wide, overlay;

/* ---- the page table ---- */

static void
count_out(struct nrm__segment *segment)
{
    atomic_fetch_sub_explicit(&segment->readers, 1, memory_order_release);
}

/* NULL: outside the 48 bits, or no leaf yet. */
static nrm__page_entry *
page_of(uintptr_t address)
{
    size_t page = address >> PAGE_SHIFT;
    if (page >> LEAF_BITS >= N_LEAVES) {
        return NULL;
    }
    nrm__page_entry *leaf =
        atomic_load_explicit(&nrm__map_leaves[page >> LEAF_BITS], memory_order_acquire);
    return leaf != NULL ? &leaf[page & (LEAF_PAGES - 1)] : NULL;
}

static nrm_status
make_leaf(size_t index)
{
    void *memory;
    nrm__page_entry *none = NULL;
    if (atomic_load_explicit(&nrm__map_leaves[index], memory_order_acquire) != NULL) {
        return NRM_OK;
    }
    int code =
        nrm__map(LEAF_PAGES * sizeof(nrm__page_entry), nrm__page_size(), &memory);
    if (code != 0) {
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory for the block map");
    }
    if (!atomic_compare_exchange_strong(&nrm__map_leaves[index], &none,
                                        (nrm__page_entry *)memory)) {
        nrm__unmap(memory, LEAF_PAGES * sizeof(nrm__page_entry));
    }
    return NRM_OK;
}

static bool
fills_whole_pages(const struct nrm__segment *segment)
{
    uintptr_t last = segment->start + segment->nbytes - 1;
    return ((segment->start | segment->nbytes) & (NRM__MAP_PAGE - 1)) == 0 &&
           last >> (PAGE_SHIFT + LEAF_BITS) < N_LEAVES;
}

static nrm_status
add_pages(struct nrm__segment *segment)
{
    size_t first = segment->start >> PAGE_SHIFT;
    size_t end = first + (segment->nbytes >> PAGE_SHIFT);
    for (size_t leaf = first >> LEAF_BITS; leaf <= (end - 1) >> LEAF_BITS; leaf++) {
        NRM_TRY(make_leaf(leaf));
    }
    /* Segments nest: every page of this one lies in the same older one, or in none. */
    segment->shadows = atomic_load(page_of(segment->start));
    for (size_t page = first; page < end; page++) {
        atomic_store_explicit(page_of((uintptr_t)page << PAGE_SHIFT), segment,
                              memory_order_release);
    }
    return NRM_OK;
}

/* A page may name a newer segment: where a context was reset the driver hands the
   addresses of what is left of older pools out again. */
static void
remove_pages(struct nrm__segment *segment)
{
    size_t first = segment->start >> PAGE_SHIFT;
    size_t end = first + (segment->nbytes >> PAGE_SHIFT);
    for (size_t page = first; page < end; page++) {
        struct nrm__segment *named = segment;
        if (!atomic_compare_exchange_strong(page_of((uintptr_t)page << PAGE_SHIFT),
                                            &named, segment->shadows) &&
            named != NULL && named->shadows == segment) {
            named->shadows = segment->shadows;
        }
    }
}

/* A source has got this memory, so it is nobody else's any more: of what pages name
   there a context was reset. */
static void
forget_pages(const struct nrm__block *block)
{
    uintptr_t first = (uintptr_t)block->ptr >> PAGE_SHIFT;
    uintptr_t last = ((uintptr_t)block->ptr + block->capacity - 1) >> PAGE_SHIFT;
    for (uintptr_t page = first; page <= last; page++) {
        nrm__page_entry *entry = page_of(page << PAGE_SHIFT);
        if (entry != NULL &&
            atomic_load_explicit(entry, memory_order_relaxed) != NULL) {
            atomic_store(entry, NULL);
        }
    }
}

/* The segment of the page, counted into; NULL: none. */
static struct nrm__segment *
enter_page(uintptr_t address)
{
    nrm__page_entry *page = page_of(address);
    struct nrm__segment *segment;
    if (page == NULL) {
        return NULL;
    }
    while ((segment = atomic_load_explicit(page, memory_order_acquire)) != NULL) {
        atomic_fetch_add(&segment->readers, 1);
        if (atomic_load(page) == segment) {
            break;
        }
        count_out(segment);
    }
    return segment;
}

/* ---- the ordered tables ---- */

static struct nrm__entry *
entry_of(struct nrm__tree_node *node)
{
    return node != NULL ? NRM__CONTAINER(node, struct nrm__entry, node) : NULL;
}

static struct table *
shard_of(uintptr_t address)
{
    return &shards[(address >> PAGE_SHIFT) % N_SHARDS];
}

static struct table *
table_of(const struct nrm__block *block)
{
    if (block->owner->ops->flags & NRM__OPS_OVERLAY) {
        return &overlay;
    }
    return block->capacity <= NRM__MAP_PAGE ? shard_of((uintptr_t)block->ptr) : &wide;
}

nrm_status
nrm__entry_create(struct nrm__entry **out)
{
    struct nrm__entry *entry = nrm__node_allocate(sizeof *entry);
    if (entry == NULL) {
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe a block");
    }
    *out = entry;
    return NRM_OK;
}

void
nrm__entry_destroy(struct nrm__entry *entry)
{
    nrm__node_deallocate(entry, sizeof *entry);
}

/* A range may start where an older one does: in the overlay, and where managed memory
   was unmapped by a reset of its context that we have not seen. The newer one is on
   top. */
static void
insert_locked(struct table *table, struct nrm__entry *entry, uintptr_t start,
              size_t nbytes)
{
    struct nrm__entry *floor = entry_of(nrm__tree_floor(&table->tree, start));
    entry->node.start = start;
    entry->node.nbytes = nbytes;
    entry->below = NULL;
    if (floor != NULL && floor->node.start == start) {
        nrm__tree_remove(&table->tree, &floor->node);
        entry->below = floor;
    }
    nrm__tree_insert(&table->tree, &entry->node);
    if (table == &overlay) {
        nrm__overlay_enter(&table->tree, entry, floor);
        atomic_fetch_add_explicit(&nrm__map_overlay.n, 1, memory_order_release);
    }
}

/* Takes `entry` from below `top`; false: it is not there. */
static bool
remove_below(struct nrm__entry *top, const struct nrm__entry *entry)
{
    while (top->below != NULL && top->below != entry) {
        top = top->below;
    }
    bool is_there = top->below != NULL;
    if (is_there) {
        top->below = entry->below;
    }
    return is_there;
}

/* False when `entry` is not in the table (any more). */
static bool
remove_locked(struct table *table, struct nrm__entry *entry, uintptr_t start)
{
    struct nrm__entry *top = entry_of(nrm__tree_floor(&table->tree, start));
    if (top == NULL || top->node.start != start) {
        return false;
    }
    if (top != entry && !remove_below(top, entry)) {
        return false;
    }
    if (top == entry) {
        nrm__tree_remove(&table->tree, &entry->node);
        if (entry->below != NULL) {
            nrm__tree_insert(&table->tree, &entry->below->node);
        }
    }
    if (table == &overlay) {
        nrm__overlay_leave(&table->tree, entry);
        atomic_fetch_sub_explicit(&nrm__map_overlay.n, 1, memory_order_release);
    }
    return true;
}

static void
insert(struct nrm__entry *entry, const struct nrm__block *block)
{
    struct table *table = table_of(block);
    nrm__lock_acquire(&table->lock);
    entry->block = *block;
    insert_locked(table, entry, (uintptr_t)block->ptr, block->capacity);
    nrm__lock_release(&table->lock);
}

void
nrm__block_map_insert(struct nrm__entry *entry, struct nrm__block *block)
{
    block->record = entry;
    if (!(block->owner->ops->flags & NRM__OPS_OVERLAY)) {
        forget_pages(block);
    }
    insert(entry, block);
}

/* ---- look-ups ---- */

static bool
find_in_table(struct table *table, uintptr_t address, struct nrm__block *out)
{
    nrm__lock_acquire(&table->lock);
    struct nrm__entry *entry = entry_of(nrm__tree_find(&table->tree, address));
    bool found = entry != NULL && nrm__resource_try_retain(entry->block.owner);
    if (found) {
        *out = entry->block;
    }
    nrm__lock_release(&table->lock);
    return found;
}

/* Whether a range of the overlay lies in the segment of its page, which is counted
   into. It may be as long; then the segment, or one that it shadows, may be of that
   very block. */
static bool
lies_in(const struct nrm__entry *entry, const struct nrm__segment *page)
{
    size_t offset = entry->node.start - page->start;
    if (offset > page->nbytes || entry->node.nbytes > page->nbytes - offset) {
        return false;
    }
    while (page != NULL && page->upstream.record != entry) {
        page = page->shadows;
    }
    return page == NULL;
}

/* The innermost range of the overlay around `address`, given the segment of its page
   (which wins unless the range lies inside it). Fills `out` for a block; for a segment
   counts into it and returns it. */
static bool
find_in_overlay(uintptr_t address, const struct nrm__segment *page,
                struct nrm__segment **out_segment, struct nrm__block *out)
{
    bool found = false;
    *out_segment = NULL;
    nrm__lock_acquire(&overlay.lock);
    struct nrm__entry *entry = nrm__overlay_find(&overlay.tree, address);
    if (entry != NULL && (page == NULL || lies_in(entry, page))) {
        if (entry->segment != NULL) {
            *out_segment = entry->segment;
            atomic_fetch_add(&entry->segment->readers, 1);
            found = true;
        }
        else if (nrm__resource_try_retain(entry->block.owner)) {
            *out = entry->block;
            found = true;
        }
    }
    nrm__lock_release(&overlay.lock);
    return found;
}

/* In a segment that was counted into: counts out. */
static bool
find_in_segment(struct nrm__segment *segment, const void *ptr, struct nrm__block *out)
{
    nrm_resource *owner = segment->owner;
    bool found = nrm__resource_try_retain(owner);
    if (found) {
        *out = (struct nrm__block){.owner = owner, .segment = segment};
        found = owner->ops->find_block(owner, segment, ptr, out);
    }
    count_out(segment);
    if (!found && out->owner == owner) {
        nrm_resource_release(owner);
    }
    return found;
}

bool
nrm__block_map_find(const void *ptr, struct nrm__block *out)
{
    uintptr_t address = (uintptr_t)ptr;
    struct nrm__segment *segment = enter_page(address);
    out->owner = NULL;
    if (atomic_load_explicit(&nrm__map_overlay.n, memory_order_acquire) != 0) {
        struct nrm__segment *inner;
        if (find_in_overlay(address, segment, &inner, out)) {
            if (segment != NULL) {
                count_out(segment);
            }
            return inner == NULL || find_in_segment(inner, ptr, out);
        }
    }
    if (segment != NULL) {
        return find_in_segment(segment, ptr, out);
    }
    if (find_in_table(shard_of(address), address, out)) {
        return true;
    }
    if (address >= NRM__MAP_PAGE &&
        find_in_table(shard_of(address - NRM__MAP_PAGE), address, out)) {
        return true;
    }
    return find_in_table(&wide, address, out);
}

/* The block was found before; what it lies in may have left meanwhile. */
static bool
claim_in_segment(struct nrm__block *block)
{
    struct nrm__segment *segment = block->segment;
    if (segment->entry != NULL) { /* of the overlay: its owner looks under its lock */
        return block->owner->ops->claim_block(block->owner, block);
    }
    nrm__page_entry *page = page_of((uintptr_t)block->ptr);
    nrm__cache_announce();
    atomic_fetch_add(&segment->readers, 1);
    bool claimed = atomic_load(page) == segment &&
                   block->owner->ops->claim_block(block->owner, block);
    count_out(segment);
    return claimed;
}

bool
nrm__block_map_claim(struct nrm__block *block)
{
    if (block->segment != NULL) {
        return claim_in_segment(block);
    }
    struct table *table = table_of(block);
    nrm__lock_acquire(&table->lock);
    bool claimed = remove_locked(table, block->record, (uintptr_t)block->ptr);
    nrm__lock_release(&table->lock);
    return claimed;
}

void
nrm__block_map_unclaim(struct nrm__block *block)
{
    if (block->segment != NULL) {
        block->owner->ops->unclaim_block(block->owner, block);
    }
    else {
        insert(block->record, block);
    }
}

void
nrm__block_map_forget(const struct nrm__block *block)
{
    nrm__entry_destroy(block->record);
}

/* ---- adding and removing segments ---- */

static nrm_status
add_to_overlay(struct nrm__segment *segment)
{
    NRM_TRY(nrm__entry_create(&segment->entry));
    segment->entry->segment = segment;
    nrm__lock_acquire(&overlay.lock);
    insert_locked(&overlay, segment->entry, segment->start, segment->nbytes);
    nrm__lock_release(&overlay.lock);
    return NRM_OK;
}

nrm_status
nrm__block_map_add_segment(struct nrm__segment *segment)
{
    return fills_whole_pages(segment) ? add_pages(segment) : add_to_overlay(segment);
}

void
nrm__block_map_remove_segment(struct nrm__segment *segment)
{
    if (segment->entry == NULL) {
        remove_pages(segment);
    }
    else {
        nrm__lock_acquire(&overlay.lock);
        bool removed = remove_locked(&overlay, segment->entry, segment->start);
        nrm__lock_release(&overlay.lock);
        NRM_ASSERT(removed);
        nrm__entry_destroy(segment->entry);
        segment->entry = NULL;
    }
    /* In a forked child the readers that another thread had counted in never leave. */
    while (segment->fork_depth == nrm__fork_depth() &&
           atomic_load(&segment->readers) != 0) {
        sched_yield();
    }
    nrm__cache_synchronize();
}

/* ---- start and fork ---- */

static struct nrm__tree_node *
first_of(const struct nrm__tree *tree)
{
    struct nrm__tree_node *node = nrm__tree_floor(tree, 0);
    return node != NULL ? node : nrm__tree_above(tree, 0);
}

static void
for_each_table(void (*call)(struct nrm__lock *lock))
{
    for (size_t i = 0; i < N_SHARDS; i++) {
        call(&shards[i].lock);
    }
    call(&wide.lock);
    call(&overlay.lock);
}

/* Segments of pools are blocks of a source too. */
static void
offer_registered(const struct nrm__tree *tree)
{
    struct nrm__tree_node *node = first_of(tree);
    for (; node != NULL; node = nrm__tree_above(tree, node->start)) {
        const struct nrm__block *block = &entry_of(node)->block;
        if ((block->flags & NRM__BLOCK_IS_REGISTERED) != 0) {
            nrm__left_out_offer((uintptr_t)block->ptr, block->capacity);
        }
    }
}

static void
fork_prepare(void)
{
    for_each_table(nrm__lock_fork_prepare);
    if (nrm__left_out_scope() == NRM__LEFT_OUT_ALL) {
        for (size_t i = 0; i < N_SHARDS; i++) {
            offer_registered(&shards[i].tree);
        }
        offer_registered(&wide.tree);
    }
}

static void
fork_parent(void)
{
    for_each_table(nrm__lock_fork_parent);
}

/* Managed memory is not mapped in a child. Its addresses are kept from the kernel,
   which would give them to other blocks while arrays of the parent's still name
   them. */
static void
reserve_managed(const struct nrm__tree *tree)
{
    struct nrm__tree_node *node = first_of(tree);
    for (; node != NULL; node = nrm__tree_above(tree, node->start)) {
        const struct nrm__entry *entry = entry_of(node);
        if (entry->segment == NULL && entry->block.owner->kind == NRM_KIND_MANAGED) {
            nrm__reserve(entry->block.ptr, entry->block.capacity);
        }
    }
}

static void
fork_child(void)
{
    for (size_t i = 0; i < N_SHARDS; i++) {
        reserve_managed(&shards[i].tree);
    }
    reserve_managed(&wide.tree);
    for_each_table(nrm__lock_fork_child);
}

static const struct nrm__fork_hook tables_hook = {
    .rank = NRM__RANK_BLOCK_MAP,
    .prepare = fork_prepare,
    .parent = fork_parent,
    .child = fork_child,
};

static void
init_table_lock(struct nrm__lock *table_lock)
{
    nrm__lock_init(table_lock, NRM__RANK_BLOCK_MAP);
}

__attribute__((constructor)) static void
start(void)
{
    for_each_table(init_table_lock);
    nrm__fork_hook_add(&tables_hook);
}
