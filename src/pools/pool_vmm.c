/*
 * Segments of a device pool that are mapped side by side (cuda/vmm.h) instead of taken
 * of the upstream: to the pool they are one memory, so that a block may lie in several
 * of them, and each may be given back by itself when what lies in it is done.
 *
 * The range of addresses is reserved once, twice as large as the memory that it can
 * ever hold, so that there are holes to choose from. A growth takes the lowest hole in
 * which the request fits, together with what is free on either side of it; it maps
 * pieces of the option's segment size, and larger ones when the pool has become large:
 * a piece costs the driver a call and the pool a description, whatever its size. Where
 * much is free that does not fit, pieces of it go back first: so large blocks of many
 * sizes do not take more memory than they need for long, and what moves is never what
 * anybody uses.
 *
 * What is mapped where stands in a table with an entry for each granule of the driver,
 * under the pool's lock. A hole that is being filled, or a piece that is being
 * unmapped, is marked there, since the driver is called with no lock held.
 *
 * The driver does not wait when a piece is unmapped. It is when all blocks in it stand
 * in the bins of what is done.
 */
#include "pools/pool_vmm.h"

#include "base/assert.h"
#include "base/error.h"
#include "core/hooks.h"
#include "core/nodes.h"
#include "cuda/context.h"
#include "cuda/device.h"
#include "os/memory.h"

#define LARGE_POOL_NBYTES (32 * NRM__GIB) /* from here on pieces are ... */
#define LARGE_FACTOR 4                    /* ... so many times larger */
#define SPARE_SHIFT                                                                    \
    4 /* free beside what is in use: this fraction of it moves nothing */

struct nrm__pool_vmm {
    struct nrm__vmm_range range;
    size_t n; /* entries of the table */
    /* Under the pool's lock: */
    struct nrm__segment **at; /* NULL: a hole */
};

/* Where something is being mapped or unmapped. */
static struct nrm__segment busy;

/* ---- the range ---- */

static size_t
table_nbytes(size_t n)
{
    return nrm__align_up(n * sizeof(struct nrm__segment *), nrm__page_size());
}

/* The device of the upstream; the first use decides which that is, as for its own
   memory. */
static nrm_status
decide_device(nrm_resource *upstream, int *out)
{
    struct nrm__cuda_scope scope;
    int device = atomic_load_explicit(&upstream->device, memory_order_relaxed);
    if (device == NRM_DEVICE_NONE) {
        NRM_TRY(nrm__cuda_enter(device, &scope));
        nrm__cuda_leave(&scope);
        if (atomic_compare_exchange_strong(&upstream->device, &device, scope.device)) {
            device = scope.device;
        }
    }
    *out = device;
    return NRM_OK;
}

static nrm_status
create_vmm(struct nrm__pool *pool, struct nrm__pool_vmm **out)
{
    int device;
    struct nrm__cuda_device_info info;
    struct nrm__pool_vmm *vmm = nrm__node_allocate(sizeof *vmm);
    if (vmm == NULL) {
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe a pool");
    }
    nrm_status status = decide_device(pool->base.upstream, &device);
    if (status == NRM_OK) {
        status = nrm__cuda_init(NULL);
    }
    if (status == NRM_OK) {
        status = nrm__cuda_device_info(device, &info);
    }
    if (status == NRM_OK) {
        size_t most = nrm__min(pool->maximum_nbytes, info.total_nbytes);
        status = nrm__vmm_init(&vmm->range, device,
                               2 * nrm__max(most, pool->segment_nbytes));
    }
    if (status != NRM_OK) {
        nrm__node_deallocate(vmm, sizeof *vmm);
        return status;
    }
    void *table;
    vmm->n = vmm->range.nbytes / vmm->range.granularity;
    if (nrm__map(table_nbytes(vmm->n), nrm__page_size(), &table) != 0) {
        (void)nrm__vmm_finish(&vmm->range);
        nrm__node_deallocate(vmm, sizeof *vmm);
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe a pool");
    }
    vmm->at = table;
    *out = vmm;
    return NRM_OK;
}

/* On failure addresses stay reserved, or memory mapped: noted, and the process goes
   on. */
static void
destroy_vmm(struct nrm__pool_vmm *vmm)
{
    if (!nrm__is_exiting() && nrm__cuda_driver() != NULL &&
        nrm__vmm_finish(&vmm->range) != NRM_OK) {
        nrm__lost_error_note(nrm_last_error());
    }
    nrm__unmap(vmm->at, table_nbytes(vmm->n));
    nrm__node_deallocate(vmm, sizeof *vmm);
}

/* The range, made at the first growth. Where it cannot be made the pool does not ask
   again. */
static nrm_status
get_vmm(struct nrm__pool *pool, struct nrm__pool_vmm **out)
{
    struct nrm__pool_vmm *made = NULL, *none = NULL;
    *out = atomic_load_explicit(&pool->vmm, memory_order_acquire);
    if (*out != NULL) {
        return NRM_OK;
    }
    void *token = nrm__detach();
    nrm_status status = create_vmm(pool, &made);
    nrm__attach(token);
    if (status != NRM_OK) {
        if (status != NRM_DEVICE_LOST && status != NRM_CUDA_UNAVAILABLE) {
            atomic_store(&pool->maps, false);
        }
        return NRM_NOT_SUPPORTED; /* the upstream says what else is wrong */
    }
    if (atomic_compare_exchange_strong(&pool->vmm, &none, made)) {
        *out = made;
        return NRM_OK;
    }
    destroy_vmm(made); /* another thread was faster */
    *out = none;
    return NRM_OK;
}

nrm_status
nrm__pool_vmm_add_peer(struct nrm__pool *pool, int device)
{
    struct nrm__pool_vmm *vmm;
    if (!atomic_load_explicit(&pool->maps, memory_order_relaxed)) {
        return NRM_NOT_SUPPORTED;
    }
    NRM_TRY(get_vmm(pool, &vmm));
    void *token = nrm__detach();
    nrm_status status = nrm__vmm_add_peer(&vmm->range, device);
    nrm__attach(token);
    return status;
}

void
nrm__pool_vmm_destroy(struct nrm__pool *pool)
{
    if (pool->vmm != NULL) {
        destroy_vmm(pool->vmm);
        pool->vmm = NULL;
    }
}

/* ---- neighbours ---- */

static struct nrm__vmm_piece *
piece_of(const struct nrm__segment *segment)
{
    return segment->upstream.record;
}

bool
nrm__pool_is_mapped(const struct nrm__segment *segment)
{
    return segment->upstream.owner == NULL;
}

static size_t
index_of(const struct nrm__pool_vmm *vmm, uintptr_t address)
{
    return (address - (uintptr_t)vmm->range.base) / vmm->range.granularity;
}

/* The segment that an entry of the table lies in; NULL also past either end. */
static struct nrm__segment *
segment_at_locked(const struct nrm__pool_vmm *vmm, size_t i)
{
    return i < vmm->n && vmm->at[i] != &busy ? vmm->at[i] : NULL;
}

static void
mark_locked(struct nrm__pool_vmm *vmm, size_t i, size_t nbytes,
            struct nrm__segment *what)
{
    for (size_t n = nbytes / vmm->range.granularity; n > 0; n--) {
        vmm->at[i++] = what;
    }
}

struct nrm__segment *
nrm__pool_left_locked(const struct nrm__segment *segment)
{
    const struct nrm__pool *pool = (struct nrm__pool *)segment->owner;
    const struct nrm__pool_vmm *vmm = pool->vmm;
    return nrm__pool_is_mapped(segment)
               ? segment_at_locked(vmm, index_of(vmm, segment->start) - 1)
               : NULL;
}

struct nrm__segment *
nrm__pool_right_locked(const struct nrm__segment *segment)
{
    const struct nrm__pool *pool = (struct nrm__pool *)segment->owner;
    const struct nrm__pool_vmm *vmm = pool->vmm;
    return nrm__pool_is_mapped(segment)
               ? segment_at_locked(vmm, index_of(vmm, segment->start + segment->nbytes))
               : NULL;
}

struct nrm__segment *
nrm__pool_segment_of_locked(struct nrm__segment *near, uintptr_t address)
{
    if (address - near->start < near->nbytes) {
        return near;
    }
    const struct nrm__pool_vmm *vmm = ((struct nrm__pool *)near->owner)->vmm;
    return segment_at_locked(vmm, index_of(vmm, address));
}

/* ---- where to grow ---- */

static size_t
done_nbytes(struct nrm__pool_block *block)
{
    bool is_done = nrm__pool_state_of(block) == NRM__POOL_FREE &&
                   nrm__pool_ordered(block)->list == NULL;
    return is_done ? block->size : 0;
}

/* What is free, and done, up to an entry, or from there on. */
static size_t
free_before_locked(const struct nrm__pool_vmm *vmm, size_t i)
{
    struct nrm__segment *segment = segment_at_locked(vmm, i - 1);
    return segment != NULL ? done_nbytes(nrm__pool_floor_locked(
                                 segment, segment->start + segment->nbytes - 1))
                           : 0;
}

static size_t
free_from_locked(const struct nrm__pool_vmm *vmm, size_t i)
{
    struct nrm__segment *segment = segment_at_locked(vmm, i);
    return segment != NULL
               ? done_nbytes(nrm__pool_floor_locked(segment, segment->start))
               : 0;
}

/* The lowest hole in which `needed` bytes fit with what is free beside it: where it is,
   and what has to be mapped there at least, and at most. */
static bool
find_hole_locked(const struct nrm__pool_vmm *vmm, size_t needed, size_t *out_i,
                 size_t *out_least, size_t *out_most)
{
    size_t granularity = vmm->range.granularity;
    for (size_t i = 0; i < vmm->n;) {
        size_t first = i;
        while (i < vmm->n && vmm->at[i] == NULL) {
            i++;
        }
        size_t hole = (i - first) * granularity;
        if (hole == 0) {
            struct nrm__segment *segment = segment_at_locked(vmm, i);
            i += segment != NULL ? segment->nbytes / granularity : 1;
            continue;
        }
        size_t left = free_before_locked(vmm, first);
        size_t missing = needed > left ? needed - left : granularity;
        missing = nrm__align_up(missing, granularity);
        if (missing > hole && left + hole + free_from_locked(vmm, i) >= needed) {
            missing = hole;
        }
        if (missing <= hole) {
            *out_i = first;
            *out_least = missing;
            *out_most = hole;
            return true;
        }
    }
    return false;
}

/* ---- growing ---- */

static size_t
piece_nbytes_locked(const struct nrm__pool *pool, const struct nrm__pool_vmm *vmm)
{
    size_t nbytes = nrm__align_up(pool->segment_nbytes, vmm->range.granularity);
    return pool->reserved_nbytes >= LARGE_POOL_NBYTES ? LARGE_FACTOR * nbytes : nbytes;
}

/* Chooses a hole, marks what of it will be mapped, and books it against the limit. */
static nrm_status
book_hole(struct nrm__pool *pool, struct nrm__pool_vmm *vmm, size_t needed,
          unsigned how, size_t *out_i, size_t *out_nbytes, size_t *out_piece)
{
    size_t least, most;
    nrm_status status = NRM_OUT_OF_MEMORY;
    nrm__lock_acquire(&pool->lock);
    size_t taken = pool->reserved_nbytes + pool->growing_nbytes;
    size_t left = pool->maximum_nbytes > taken ? pool->maximum_nbytes - taken : 0;
    *out_piece = piece_nbytes_locked(pool, vmm);
    if (find_hole_locked(vmm, needed, out_i, &least, &most) && least <= left) {
        size_t nbytes = (how & NRM__GROW_EXACT) ? least
                                                : nrm__align_up(least, *out_piece);
        nbytes = nrm__min(nbytes, most);
        *out_nbytes = nbytes <= left ? nbytes : least;
        mark_locked(vmm, *out_i, *out_nbytes, &busy);
        pool->growing_nbytes += *out_nbytes;
        status = NRM_OK;
    }
    nrm__lock_release(&pool->lock);
    return status;
}

static void
unbook(struct nrm__pool *pool, struct nrm__pool_vmm *vmm, size_t i, size_t nbytes,
       bool is_mapped)
{
    nrm__lock_acquire(&pool->lock);
    pool->growing_nbytes -= nbytes;
    if (!is_mapped) {
        mark_locked(vmm, i, nbytes, NULL);
    }
    nrm__lock_release(&pool->lock);
}

/* A segment that is free and done as a whole, away from the hole at an entry, out of
   the pool; NULL: there is none, or there is little to spare. */
static struct nrm__segment *
detach_elsewhere_locked(struct nrm__pool *pool, const struct nrm__pool_vmm *vmm,
                        size_t i, size_t hole_nbytes)
{
    size_t used = pool->reserved_nbytes - pool->free_nbytes;
    uintptr_t start = (uintptr_t)vmm->range.base + i * vmm->range.granularity;
    if (pool->free_nbytes - nrm__pool_pending_locked(pool) <= used >> SPARE_SHIFT) {
        return NULL;
    }
    for (struct nrm__link *link = pool->segments.previous; link != &pool->segments;
         link = link->previous) {
        struct nrm__segment *segment = NRM__CONTAINER(link, struct nrm__segment, link);
        struct nrm__pool_block *block =
            nrm__pool_is_mapped(segment) ? nrm__pool_whole_locked(pool, segment) : NULL;
        bool is_beside = block != NULL && (block->start + block->size == start ||
                                           block->start == start + hole_nbytes);
        if (block != NULL && !is_beside) {
            return nrm__pool_detach_locked(pool, segment, block) ? segment : NULL;
        }
    }
    return NULL;
}

/* Before `nbytes` are mapped in a hole as many go back that are free and of no use, if
   the pool holds much more than is in use. */
static void
give_back_elsewhere(struct nrm__pool *pool, const struct nrm__pool_vmm *vmm, size_t i,
                    size_t nbytes)
{
    for (size_t given = 0; given < nbytes;) {
        nrm__lock_acquire(&pool->lock);
        struct nrm__segment *segment = detach_elsewhere_locked(pool, vmm, i, nbytes);
        nrm__lock_release(&pool->lock);
        if (segment == NULL) {
            return;
        }
        given += nrm__pool_drop_segment(pool, segment, false);
    }
}

/* Gives a piece back that no segment names any more; false: it stays where it is. */
static bool
unmap_piece(struct nrm__pool_vmm *vmm, struct nrm__vmm_piece *piece)
{
    if (nrm__is_exiting() || nrm__cuda_driver() == NULL) {
        return false; /* in a forked child it is the parent's */
    }
    void *token = nrm__detach();
    nrm_status status = nrm__vmm_unmap(&vmm->range, piece);
    nrm__attach(token);
    if (status != NRM_OK) {
        nrm__lost_error_note(nrm_last_error());
        return false;
    }
    nrm__node_deallocate(piece, sizeof *piece);
    return true;
}

/* Maps one piece and makes it a segment. */
static nrm_status
map_piece(struct nrm__pool *pool, struct nrm__pool_vmm *vmm, size_t i, size_t nbytes,
          unsigned how)
{
    size_t offset = i * vmm->range.granularity;
    struct nrm__vmm_piece *piece = nrm__node_allocate(sizeof *piece);
    if (piece == NULL) {
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe a segment");
    }
    void *token = nrm__detach();
    nrm_status status = nrm__vmm_map(&vmm->range, offset, nbytes, piece);
    nrm__attach(token);
    if (status != NRM_OK) {
        nrm__node_deallocate(piece, sizeof *piece);
        return status;
    }
    struct nrm__block block = {
        .ptr = (void *)(uintptr_t)(vmm->range.base + offset),
        .nbytes = nbytes,
        .capacity = nbytes,
        .record = piece,
    };
    status = nrm__pool_enter_segment(pool, &block, nbytes, how);
    if (status != NRM_OK) {
        (void)unmap_piece(vmm, piece);
    }
    return status;
}

nrm_status
nrm__pool_vmm_grow(struct nrm__pool *pool, size_t needed, unsigned how)
{
    struct nrm__pool_vmm *vmm;
    size_t i, nbytes, piece_nbytes;
    if (!atomic_load_explicit(&pool->maps, memory_order_relaxed)) {
        return NRM_NOT_SUPPORTED;
    }
    NRM_TRY(get_vmm(pool, &vmm));
    NRM_TRY(book_hole(pool, vmm, needed, how, &i, &nbytes, &piece_nbytes));
    if (!(how & NRM__GROW_AHEAD)) {
        give_back_elsewhere(pool, vmm, i, nbytes);
    }
    nrm_status status = NRM_OK;
    while (nbytes != 0) {
        size_t one = nrm__min(nbytes, piece_nbytes);
        status = status == NRM_OK ? map_piece(pool, vmm, i, one, how) : status;
        unbook(pool, vmm, i, one, status == NRM_OK);
        i += one / vmm->range.granularity;
        nbytes -= one;
    }
    return status;
}

/* ---- entering and leaving the pool ---- */

void
nrm__pool_vmm_link_locked(struct nrm__pool *pool, struct nrm__pool_block *block)
{
    struct nrm__segment *segment = block->live.segment;
    struct nrm__pool_vmm *vmm = pool->vmm;
    struct nrm__segment *left = nrm__pool_left_locked(segment);
    struct nrm__segment *right = nrm__pool_right_locked(segment);
    if (left != NULL) {
        block->previous = nrm__pool_floor_locked(left, segment->start - 1);
        block->previous->next = block;
    }
    if (right != NULL) {
        block->next = nrm__pool_floor_locked(right, right->start);
        block->next->previous = block;
    }
    mark_locked(vmm, index_of(vmm, segment->start), segment->nbytes, segment);
}

struct nrm__pool_block *
nrm__pool_vmm_isolate_locked(struct nrm__pool *pool, struct nrm__segment *segment,
                             struct nrm__pool_block *block)
{
    struct nrm__pool_vmm *vmm = pool->vmm;
    size_t before = segment->start - block->start;
    nrm__pool_bin_remove_locked(pool, block);
    if (before != 0) {
        struct nrm__pool_block *rest = nrm__pool_split_locked(pool, block, before);
        nrm__pool_bin_insert_locked(pool, block);
        if (rest == NULL) {
            return NULL;
        }
        block = rest;
    }
    if (block->size > segment->nbytes) {
        struct nrm__pool_block *rest =
            nrm__pool_split_locked(pool, block, segment->nbytes);
        if (rest == NULL) {
            nrm__pool_free_locked(pool, block, false);
            return NULL;
        }
        nrm__pool_bin_insert_locked(pool, rest);
    }
    if (block->previous != NULL) {
        block->previous->next = NULL;
    }
    if (block->next != NULL) {
        block->next->previous = NULL;
    }
    block->previous = block->next = NULL;
    mark_locked(vmm, index_of(vmm, segment->start), segment->nbytes, &busy);
    return block;
}

void
nrm__pool_vmm_give_back(struct nrm__pool *pool, const struct nrm__segment *segment)
{
    struct nrm__pool_vmm *vmm = pool->vmm;
    if (unmap_piece(vmm, piece_of(segment))) {
        nrm__lock_acquire(&pool->lock);
        mark_locked(vmm, index_of(vmm, segment->start), segment->nbytes, NULL);
        nrm__lock_release(&pool->lock);
    }
}

/* ---- the check ---- */

void
nrm__pool_vmm_check_locked(struct nrm__pool *pool)
{
    const struct nrm__pool_vmm *vmm = pool->vmm;
    for (size_t i = 0; vmm != NULL && i < vmm->n; i++) {
        struct nrm__segment *segment = segment_at_locked(vmm, i);
        if (segment != NULL) {
            NRM_ASSERT(segment->owner == &pool->base && nrm__pool_is_mapped(segment));
            NRM_ASSERT(i >= index_of(vmm, segment->start));
            NRM_ASSERT(i - index_of(vmm, segment->start) <
                       segment->nbytes / vmm->range.granularity);
        }
    }
}
