/*
 * Requests that scopes count.
 *
 * A request is served as ever, and then its block is counted, tagged and marked: the
 * size of a cell has a bit more than any size has, and a pool's block goes the long
 * way. So a thread that has no scope of its own comes to the tag of a block that it
 * frees, and pays for nothing else. What the thread itself frees has tag and mark taken
 * off first and goes the short way; if that free then fails, they are put back, in case
 * the block is live.
 */
#include "core/scoped.h"

#include "core/request.h"
#include "core/scope_tags.h"
#include "core/short_give.h"

/* Where the mark of a block is, if it has one. */
struct place {
    atomic_uint_least16_t *size; /* of a cell */
    struct nrm__live *live;      /* a pool's block */
};

/* Inside a cache, or of a block that stays meanwhile. */
static struct place
place_in(const struct nrm__segment *segment, void *ptr)
{
    struct place place = {0};
    if (segment->cells_of == NULL) {
        place.live = nrm__short_start(segment, ptr);
        return place;
    }
    uintptr_t offset = (uintptr_t)ptr - segment->start;
    uint32_t unit = (uint32_t)offset / (uint32_t)NRM__SLAB_ALIGNMENT;
    uint32_t cell = unit * segment->reciprocal >> NRM__SLAB_RECIPROCAL_BITS;
    if ((uintptr_t)cell * segment->cell_nbytes == offset) {
        place.size = &segment->sizes[cell];
    }
    return place;
}

/* ---- marks ---- */

/* Another size for a live cell; false: it has not got this one any more, since a faulty
   program has freed it meanwhile. */
static bool
change_size(atomic_uint_least16_t *size, uint_least16_t from, size_t to)
{
    return atomic_compare_exchange_strong_explicit(
        size, &from, (uint_least16_t)to, memory_order_acq_rel, memory_order_relaxed);
}

static void
mark_at(const struct place *place)
{
    if (place->size != NULL) {
        uint_least16_t nbytes = atomic_load_explicit(place->size, memory_order_relaxed);
        if (nbytes != 0) {
            (void)change_size(place->size, nbytes, nbytes | NRM__SLAB_COUNTED);
        }
    }
    else if (place->live != NULL) {
        atomic_fetch_or_explicit(&place->live->goes_long, NRM__GOES_LONG_COUNTED,
                                 memory_order_relaxed);
    }
}

/* A live block of the caller's alone. Blocks of sources go the long way anyway. */
static void
mark(void *ptr)
{
    struct nrm__block block;
    const struct nrm__segment *segment = nrm__short_peek(ptr);
    if (segment == NULL &&
        atomic_load_explicit(&nrm__map_overlay.n, memory_order_acquire) != 0 &&
        nrm__block_map_find(ptr, &block)) {
        segment = block.segment;
        nrm_resource_release(block.owner); /* the block holds it too */
    }
    if (segment != NULL) {
        struct place place = place_in(segment, ptr);
        mark_at(&place);
    }
}

static void
unmark(struct nrm__live *live)
{
    if ((atomic_load_explicit(&live->goes_long, memory_order_relaxed) &
         NRM__GOES_LONG_COUNTED) != 0) {
        atomic_fetch_and_explicit(&live->goes_long,
                                  (uint_least8_t)~NRM__GOES_LONG_COUNTED,
                                  memory_order_relaxed);
    }
}

/* ---- blocks ---- */

void
nrm__scoped_take(struct nrm__scopes *scopes, const nrm_resource *mr, void *ptr,
                 size_t nbytes)
{
    nrm__scopes_count_in(scopes, mr, nbytes);
    if (nrm__scope_tag_set(ptr, nrm__scopes_tag(scopes))) {
        mark(ptr);
    }
}

/* The claim has taken the mark of a cell off. */
void
nrm__scoped_give(struct nrm__scopes *scopes, const nrm_resource *mr,
                 const struct nrm__block *block)
{
    if (scopes == NULL && !nrm__scopes_are_known()) {
        return;
    }
    const struct nrm__segment *segment = block->segment;
    if (segment != NULL && segment->cells_of == NULL) {
        struct nrm__live *live = nrm__short_start(segment, block->ptr);
        if (live != NULL) {
            unmark(live);
        }
    }
    nrm__scopes_count_out(scopes, mr, nrm__scope_tag_take(block->ptr), block->nbytes);
}

void
nrm__scoped_resize(struct nrm__scopes *scopes, const nrm_resource *mr,
                   const struct nrm__block *block, uint64_t tag, size_t old_nbytes)
{
    if (tag != 0 && nrm__scope_tag_set(block->ptr, tag)) {
        mark(block->ptr);
    }
    if (old_nbytes != block->nbytes) {
        nrm__scopes_count_resize(scopes, mr, tag, old_nbytes, block->nbytes);
    }
}

/* ---- requests ---- */

nrm_status
nrm__scoped_allocate(struct nrm__scopes *scopes, nrm_resource *mr, size_t nbytes,
                     size_t alignment, nrm_stream *stream, unsigned flags, void **out)
{
    void *ptr = NULL;
    nrm_status status =
        (flags & NRM__REQUEST_ZEROED) != 0
            ? nrm_resource_allocate_zeroed(mr, nbytes, alignment, stream, &ptr)
            : nrm_resource_allocate(mr, nbytes, alignment, stream, &ptr);
    if (status == NRM_OK) {
        if (ptr != NULL) {
            nrm__scoped_take(scopes, mr, ptr, nbytes);
        }
        *out = ptr;
    }
    nrm__scopes_leave(scopes);
    return status;
}

/* What was taken off a block that is about to be freed. */
struct lifted {
    size_t nbytes;
    uint64_t tag;
};

/* Inside, so that nobody else claims cells while this thread has the only cache. */
static bool
lift_cell(atomic_uint_least16_t *size, struct lifted *out)
{
    uint_least16_t marked = atomic_load_explicit(size, memory_order_acquire);
    out->nbytes = marked & ~NRM__SLAB_COUNTED;
    if (out->nbytes == marked || out->nbytes == 0) {
        return out->nbytes != 0;
    }
    if (nrm__account_is_alone()) {
        atomic_store_explicit(size, (uint_least16_t)out->nbytes, memory_order_relaxed);
        return true;
    }
    return change_size(size, marked, out->nbytes);
}

/* Inside; false: it is nothing that could go the short way, and nothing is taken
   off. */
static bool
lift_inside(void *ptr, struct lifted *out)
{
    const struct nrm__segment *segment = nrm__short_peek(ptr);
    struct place place = segment != NULL ? place_in(segment, ptr) : (struct place){0};
    if (place.size != NULL) {
        return lift_cell(place.size, out);
    }
    if (place.live == NULL ||
        atomic_load_explicit(&place.live->key, memory_order_acquire) !=
            ((uintptr_t)ptr | NRM__LIVE)) {
        return false;
    }
    out->nbytes = atomic_load_explicit(&place.live->nbytes, memory_order_relaxed);
    unmark(place.live);
    return true;
}

static bool
lift(void *ptr, struct lifted *out)
{
    struct nrm__cache *cache = nrm__thread_state_now()->cache;
    if (cache == NULL || !nrm__cache_enter(cache)) {
        return false;
    }
    bool lifted = lift_inside(ptr, out);
    nrm__cache_leave(cache);
    if (lifted) {
        out->tag = nrm__scope_tag_take(ptr);
    }
    return lifted;
}

/* The same with a look-up, for those who log. */
static bool
lift_found(void *ptr, struct lifted *out)
{
    struct nrm__block block;
    if (!nrm__block_map_find(ptr, &block)) {
        return false;
    }
    nrm_resource_release(block.owner);
    if (block.ptr != ptr) {
        return false;
    }
    *out = (struct lifted){.nbytes = block.nbytes, .tag = nrm__scope_tag_take(ptr)};
    return true;
}

/* It was not freed, and may be live. */
static void
put_back(void *ptr, const struct lifted *lifted)
{
    struct nrm__cache *cache = nrm__thread_state_now()->cache;
    if (lifted->tag != 0 && nrm__scope_tag_set(ptr, lifted->tag) && cache != NULL &&
        nrm__cache_enter(cache)) {
        const struct nrm__segment *segment = nrm__short_peek(ptr);
        if (segment != NULL) {
            struct place place = place_in(segment, ptr);
            mark_at(&place);
        }
        nrm__cache_leave(cache);
    }
}

nrm_status
nrm__scoped_deallocate(struct nrm__scopes *scopes, nrm_resource *mr, void *ptr,
                       nrm_stream *stream)
{
    struct lifted lifted;
    nrm_status status;
    if (lift(ptr, &lifted) || (mr->ops->log != 0 && lift_found(ptr, &lifted))) {
        status = nrm_resource_deallocate(mr, ptr, 0, stream);
        if (status == NRM_OK) {
            nrm__scopes_count_out(scopes, mr, lifted.tag, lifted.nbytes);
        }
        else {
            put_back(ptr, &lifted);
        }
    }
    else {
        status = nrm__deallocate_found(mr, ptr, stream, scopes);
    }
    nrm__scopes_leave(scopes);
    return status;
}
