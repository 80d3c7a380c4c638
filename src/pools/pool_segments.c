/*
 * The segments of a pool: how memory of the upstream becomes one free block
 * (pool_growth.c says when and how much), how segments that are free as a whole go
 * back, and how the pages of one that is a single block move when that grows. The
 * pool's lock is not held here while the upstream works.
 */
#include "base/assert.h"
#include "base/error.h"
#include "core/hooks.h"
#include "core/uses.h"
#include "cuda/foreign.h"
#include "os/memory.h"
#include "pools/pool_internal.h"
#include "pools/pool_vmm.h"

#define FINISH_WAIT_NS UINT64_C(10000000000) /* for the GPU, before memory is lost */
#define COLOUR_STEP 1088u        /* 17 lines: the starts within a page go round */
#define LARGE_MAX_GRANULES 16384 /* of a segment for one large block */

/* ---- segments ---- */

size_t
nrm__starts_nbytes(size_t n)
{
    size_t bits = (n + 63) / 64 * sizeof(uint64_t);
    return nrm__align_up(sizeof(struct nrm__starts) + n * sizeof(struct nrm__live *) +
                             bits,
                         nrm__page_size());
}

/* A segment for one large block has granules of at least a page, and few of them; one
   that starts anywhere, as an upstream of other people's may give it, has small ones,
   so that every alignment can be had. */
static unsigned
shift_for(const struct nrm__pool *pool, const struct nrm__segment *segment,
          size_t nbytes)
{
    if (!nrm__is_aligned((void *)segment->start, pool->granule)) {
        return (unsigned)__builtin_ctzll(pool->alignment);
    }
    unsigned shift = (unsigned)__builtin_ctzll(pool->granule);
    if (nrm__pool_is_mapped(segment)) {
        return shift; /* a block may lie in several: all have the same */
    }
    if (nbytes > pool->segment_nbytes && (nbytes & (NRM__MAP_PAGE - 1)) == 0) {
        shift = NRM__MAP_PAGE_SHIFT;
        while (nbytes >> shift > LARGE_MAX_GRANULES &&
               (nbytes & (((size_t)2 << shift) - 1)) == 0) {
            shift++;
        }
    }
    return shift;
}

/* Of a segment of `nbytes`, with room to describe `room_nbytes`: only what is touched
   of it takes memory. */
static nrm_status
create_starts(struct nrm__pool *pool, const struct nrm__segment *segment, size_t nbytes,
              size_t room_nbytes, struct nrm__starts **out)
{
    unsigned shift = shift_for(pool, segment, nbytes);
    size_t n = room_nbytes >> shift;
    void *memory;
    if (nrm__map(nrm__starts_nbytes(n), nrm__page_size(), &memory) != 0) {
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe a segment");
    }
    struct nrm__starts *starts = memory;
    starts->shift = shift;
    starts->n = n;
    if (shift >= NRM__MAP_PAGE_SHIFT) {
        unsigned turn =
            atomic_fetch_add_explicit(&pool->colour, 1, memory_order_relaxed);
        starts->colour = turn * COLOUR_STEP % (4 * (unsigned)NRM__KIB);
    }
    *out = starts;
    return NRM_OK;
}

static void
destroy_starts(struct nrm__starts *starts)
{
    if (starts != NULL) {
        nrm__unmap(starts, nrm__starts_nbytes(starts->n));
    }
}

void
nrm__pool_destroy_segment(struct nrm__segment *segment)
{
    struct nrm__starts *starts = segment->extra;
    segment->extra = NULL;
    destroy_starts(starts);
    nrm__segment_destroy(segment);
}

/* One free block of all of the segment enters the pool. */
static nrm_status
add_whole_block(struct nrm__pool *pool, struct nrm__segment *segment, unsigned how)
{
    nrm__lock_acquire(&pool->lock);
    if ((how & NRM__GROW_AHEAD) && pool->ahead.n_shrinks != pool->ahead.n_begun) {
        nrm__lock_release(&pool->lock);
        return nrm__error(NRM_OUT_OF_MEMORY,
                          "the pool gave memory back while it grew ahead");
    }
    struct nrm__pool_block *block = nrm__pool_create_block_locked(pool);
    if (block != NULL) {
        block->start = segment->start;
        block->size = segment->nbytes;
        block->live.segment = segment;
        block->is_zero = (segment->upstream.flags & NRM__BLOCK_IS_ZERO) != 0;
        nrm__pool_set_start_locked(block);
        nrm__list_append(&pool->segments, &segment->link);
        pool->reserved_nbytes += segment->nbytes;
        nrm__pool_ahead_begin_locked(pool, segment->nbytes);
        if (nrm__pool_is_mapped(segment)) {
            nrm__pool_vmm_link_locked(pool, block);
        }
        nrm__pool_free_locked(pool, block, block->is_zero);
    }
    nrm__lock_release(&pool->lock);
    return block != NULL
               ? NRM_OK
               : nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe a block");
}

nrm_status
nrm__pool_enter_segment(struct nrm__pool *pool, const struct nrm__block *upstream,
                        size_t nbytes, unsigned how)
{
    struct nrm__segment *segment = NULL;
    struct nrm__starts *starts = NULL;
    if (pool->order != NULL) {
        void *token = nrm__detach();
        nrm__cuda_foreign_note_current(); /* where the memory is going to be used */
        nrm__attach(token);
    }
    NRM_TRY(nrm__segment_create(&pool->base, upstream->ptr, nbytes, &segment));
    segment->upstream = *upstream;
    segment->generation = nrm__cuda_generations();
    segment->node = nrm__pool_node_here(pool);
    nrm_status status = create_starts(pool, segment, nbytes, nbytes, &starts);
    if (status != NRM_OK) {
        goto fail_starts;
    }
    segment->extra = starts;
    segment->blocks_of = &pool->base;
    status = nrm__block_map_add_segment(segment);
    if (status != NRM_OK) {
        goto fail_starts;
    }
    status = add_whole_block(pool, segment, how);
    if (status != NRM_OK) {
        goto fail_block;
    }
    return NRM_OK;

fail_block:
    nrm__block_map_remove_segment(segment);
fail_starts:
    nrm__pool_destroy_segment(segment);
    return status;
}

/* It is larger only where segments are mapped. */
struct nrm__pool_block *
nrm__pool_whole_locked(const struct nrm__pool *pool, const struct nrm__segment *segment)
{
    struct nrm__pool_block *block = nrm__pool_floor_locked(segment, segment->start);
    bool is_free = nrm__pool_state_of(block) == NRM__POOL_FREE &&
                   (pool->order == NULL || nrm__pool_ordered(block)->list == NULL);
    uintptr_t end = segment->start + segment->nbytes;
    return is_free && block->start + block->size >= end ? block : NULL;
}

bool
nrm__pool_detach_locked(struct nrm__pool *pool, struct nrm__segment *segment,
                        struct nrm__pool_block *block)
{
    if (nrm__pool_is_mapped(segment)) {
        block = nrm__pool_vmm_isolate_locked(pool, segment, block);
        if (block == NULL) {
            return false;
        }
    }
    else {
        nrm__pool_bin_remove_locked(pool, block);
    }
    nrm__pool_destroy_block_locked(pool, block);
    nrm__list_remove(&segment->link);
    pool->reserved_nbytes -= segment->nbytes;
    nrm__pool_ahead_lower_locked(pool);
    return true;
}

/* Takes one segment that is free as a whole, and of more than `min_nbytes`, out of the
   pool; NULL: there is none, or less than `keep_nbytes` would stay free. */
static struct nrm__segment *
detach_segment_locked(struct nrm__pool *pool, size_t min_nbytes, size_t keep_nbytes)
{
    for (struct nrm__link *link = pool->segments.previous; link != &pool->segments;
         link = link->previous) {
        struct nrm__segment *segment = NRM__CONTAINER(link, struct nrm__segment, link);
        struct nrm__pool_block *block = nrm__pool_whole_locked(pool, segment);
        if (block == NULL || segment->nbytes <= min_nbytes ||
            pool->free_nbytes - segment->nbytes < keep_nbytes) {
            continue;
        }
        return nrm__pool_detach_locked(pool, segment, block) ? segment : NULL;
    }
    return NULL;
}

size_t
nrm__pool_drop_segment(struct nrm__pool *pool, struct nrm__segment *segment, bool later)
{
    size_t nbytes = segment->nbytes;
    nrm__block_map_remove_segment(segment);
    if (nrm__pool_is_mapped(segment)) {
        nrm__pool_vmm_give_back(pool, segment);
    }
    else {
        nrm__give_back(pool->base.upstream, &segment->upstream, later);
    }
    nrm__pool_destroy_segment(segment);
    return nbytes;
}

static size_t
give_segments_back(struct nrm__pool *pool, size_t min_nbytes, size_t keep_nbytes,
                   bool is_trim)
{
    size_t nbytes = 0;
    for (;;) {
        nrm__lock_acquire(&pool->lock);
        struct nrm__segment *segment =
            is_trim && pool->n_hungry != 0
                ? NULL
                : detach_segment_locked(pool, min_nbytes, keep_nbytes);
        nrm__lock_release(&pool->lock);
        if (segment == NULL) {
            return nbytes;
        }
        nbytes += nrm__pool_drop_segment(pool, segment, false);
    }
}

/* Gives segments that are free as a whole, and of more than `min_nbytes`, back to the
   upstream while more than `keep_nbytes` stay free. */
size_t
nrm__pool_give_segments_back(struct nrm__pool *pool, size_t min_nbytes,
                             size_t keep_nbytes)
{
    return give_segments_back(pool, min_nbytes, keep_nbytes, false);
}

size_t
nrm__pool_trim_segments(struct nrm__pool *pool, size_t keep_nbytes)
{
    return give_segments_back(pool, 0, keep_nbytes, true);
}

void
nrm__pool_give_idle_back(struct nrm__pool *pool)
{
    struct nrm__segment *segment;
    do {
        nrm__lock_acquire(&pool->lock);
        segment = pool->free_nbytes > pool->idle_nbytes
                      ? detach_segment_locked(pool, pool->segment_nbytes, 0)
                      : NULL;
        nrm__lock_release(&pool->lock);
        if (segment != NULL) {
            (void)nrm__pool_drop_segment(pool, segment, pool->tracked);
        }
    } while (segment != NULL);
    /* Of a tracked pool an allocation asks, and may call the driver. Plain memory is
       unmapped where an array dies, as NumPy's default does it. */
    if (pool->tracked) {
        (void)nrm__retired_drain(0);
    }
}

/* ---- the end ---- */

/* Whether segments go back to code of other people, who do not know that the GPU may
   still use them; cuMemFree waits, cuMemUnmap does not. */
static bool
leads_to_others(const nrm_resource *mr)
{
    while (mr != NULL && !(mr->ops->flags & NRM__OPS_OVERLAY)) {
        mr = mr->upstream;
    }
    return mr != NULL;
}

/* Lost rather than handed out under a kernel that does not end. */
static void
lose_segment(struct nrm__segment *segment)
{
    nrm__block_map_remove_segment(segment);
    if (!nrm__is_exiting() && !nrm__cuda_is_forked() &&
        nrm__error(NRM_CUDA_ERROR,
                   "%zu B of a pool that has ended are in use by the GPU and do not go "
                   "back",
                   segment->nbytes) != NRM_OK) {
        nrm__lost_error_note(nrm_last_error());
    }
    nrm__pool_destroy_segment(segment);
}

static struct nrm__segment *
pop_segment(struct nrm__link *head)
{
    struct nrm__segment *segment =
        NRM__CONTAINER(head->next, struct nrm__segment, link);
    nrm__list_remove(&segment->link);
    return segment;
}

/* Moves the segments in which something is not done into a list of their own. */
static void
set_used_aside(struct nrm__pool *pool, struct nrm__link *out)
{
    struct nrm__link *link = pool->segments.next;
    while (link != &pool->segments) {
        struct nrm__segment *segment = NRM__CONTAINER(link, struct nrm__segment, link);
        struct nrm__pool_block *block = nrm__pool_floor_locked(segment, segment->start);
        uintptr_t end = segment->start + segment->nbytes;
        bool is_used = false;
        for (; block != NULL && block->start < end; block = block->next) {
            is_used |= nrm__pool_ordered(block)->list != NULL;
        }
        link = link->next;
        if (is_used) {
            nrm__list_remove(&segment->link);
            nrm__list_append(out, &segment->link);
        }
    }
}

/* Those of all segments side by side, at the first one. */
static void
destroy_blocks(struct nrm__pool *pool, const struct nrm__link *segments)
{
    for (struct nrm__link *link = segments->next; link != segments; link = link->next) {
        struct nrm__segment *segment = NRM__CONTAINER(link, struct nrm__segment, link);
        struct nrm__pool_block *block =
            nrm__pool_left_locked(segment) == NULL
                ? nrm__pool_floor_locked(segment, segment->start)
                : NULL;
        while (block != NULL) {
            struct nrm__pool_block *next = block->next;
            nrm__pool_destroy_block_locked(pool, block);
            block = next;
        }
    }
}

void
nrm__pool_drop_all(struct nrm__pool *pool)
{
    struct nrm__link lost;
    nrm__list_init(&lost);
    if (pool->order != NULL && (leads_to_others(&pool->base) || pool->vmm != NULL)) {
        nrm__pool_settle(pool, FINISH_WAIT_NS);
        set_used_aside(pool, &lost);
    }
    destroy_blocks(pool, &pool->segments);
    destroy_blocks(pool, &lost);
    bool is_whole = nrm__list_is_empty(&lost);
    while (!nrm__list_is_empty(&lost)) {
        lose_segment(pop_segment(&lost));
    }
    while (!nrm__list_is_empty(&pool->segments)) {
        (void)nrm__pool_drop_segment(pool, pop_segment(&pool->segments), true);
    }
    if (is_whole) {
        nrm__pool_vmm_destroy(pool);
    }
}

/* ---- moving pages ---- */

/* The granule with which a description of its size covers a segment of `nbytes`. */
static unsigned
shift_to_cover(const struct nrm__segment *segment, size_t nbytes)
{
    const struct nrm__starts *starts = segment->extra;
    unsigned shift = starts->shift;
    while (nrm__align_up(nbytes, (size_t)1 << shift) >> shift > starts->n) {
        shift++;
    }
    return shift;
}

/* The description of a segment that has become `nbytes` long, with room for the next
   ones; NULL: the one that it has does, or has to. */
static struct nrm__starts *
describe_anew(struct nrm__pool *pool, const struct nrm__segment *segment, size_t nbytes)
{
    struct nrm__starts *starts = NULL;
    if (shift_to_cover(segment, nbytes) > shift_for(pool, segment, nbytes)) {
        (void)create_starts(pool, segment, nbytes, 2 * nbytes, &starts);
    }
    return starts;
}

/* A segment of one block, out of the map, is somewhere else and `nbytes` long now. */
static void
set_resized(struct nrm__pool *pool, struct nrm__pool_block *block, size_t nbytes)
{
    struct nrm__segment *segment = block->live.segment;
    struct nrm__starts *before = segment->extra;
    struct nrm__starts *after = describe_anew(pool, segment, nbytes);
    nrm__lock_acquire(&pool->lock);
    segment->start = (uintptr_t)segment->upstream.ptr;
    pool->reserved_nbytes += nbytes - segment->nbytes;
    pool->live_nbytes += nbytes - segment->nbytes;
    block->start = segment->start;
    block->size = nbytes;
    if (after != NULL) {
        after->colour = before->colour;
        segment->extra = after;
        nrm__pool_set_start_locked(block);
    }
    else { /* one block, which starts in the first granule of any size */
        before->shift = shift_to_cover(segment, nbytes);
    }
    segment->nbytes = nbytes;
    nrm__lock_release(&pool->lock);
    if (after != NULL) {
        destroy_starts(before);
    }
}

/* Takes the segment of one block out of the map, resizes what it has of the upstream,
   and puts it back, wherever it is then. */
static nrm_status
resize_segment(struct nrm__pool *pool, struct nrm__pool_block *block, size_t nbytes)
{
    struct nrm__segment *segment = block->live.segment;
    nrm_resource *upstream = pool->base.upstream;
    struct nrm__request request = {.nbytes = nbytes, .alignment = NRM__HUGE_PAGE};
    nrm__block_map_remove_segment(segment);
    bool claimed = nrm__block_map_claim(&segment->upstream);
    NRM_ASSERT(claimed);
    nrm_status status =
        nrm__reallocate_in_place(upstream, &segment->upstream, &request);
    nrm__block_map_unclaim(&segment->upstream);
    if (status == NRM_OK) {
        set_resized(pool, block, nbytes);
    }
    nrm_status added = nrm__block_map_add_segment(segment);
    NRM_ASSERT(added == NRM_OK); /* its leaves of the page table are there, or can be */
    return status;
}

/* Whether a claimed block has a segment in pages of its own to itself; what lies free
   behind it, too small to grow into, becomes its own then. */
static bool
takes_segment(struct nrm__pool *pool, struct nrm__pool_block *block)
{
    const struct nrm__segment *segment = block->live.segment;
    if (!pool->is_plain || segment->entry != NULL || block->start != segment->start) {
        return false;
    }
    nrm__lock_acquire(&pool->lock);
    const struct nrm__pool_block *next = block->next;
    bool is_alone =
        next == NULL ||
        (next->next == NULL &&
         nrm__pool_extend_locked(pool, block, segment->nbytes, segment->nbytes));
    nrm__lock_release(&pool->lock);
    return is_alone;
}

nrm_status
nrm__pool_move_pages(struct nrm__pool *pool, struct nrm__pool_block *block,
                     size_t nbytes, size_t wanted)
{
    struct nrm__segment *segment = block->live.segment;
    size_t before = segment->nbytes;
    size_t after = nrm__max(nbytes, wanted);
    after = nrm__align_up(after, (size_t)1 << shift_to_cover(segment, after));
    after = nrm__align_up(after, NRM__MAP_PAGE);
    if (after <= before || !takes_segment(pool, block)) {
        return NRM_NOT_SUPPORTED;
    }
    if (!nrm__pool_book_growth(pool, after - before)) {
        return NRM_NOT_SUPPORTED; /* a copy would not fit either: it says so */
    }
    nrm_status status = resize_segment(pool, block, after);
    nrm__pool_unbook_growth(pool, after - before);
    return status == NRM_OK ? NRM_OK : NRM_NOT_SUPPORTED;
}
