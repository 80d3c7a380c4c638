/*
 * How slabs come and go: the set of a resource, its classes, and the chunks that it
 * asks its owner for.
 *
 * Chunks come and go while no lock is held, as the owner may have to take locks of its
 * own. A description outlives its chunk: it waits in its class to describe another one,
 * and memory for it is given back with the set only, since a look-up that began before
 * the chunk left may still read it and must find a generation that is not its own.
 */
#include <stdint.h>

#include "base/assert.h"
#include "base/bits.h"
#include "base/error.h"
#include "core/cache.h"
#include "core/nodes.h"
#include "core/slab_class.h"

#define UNIT NRM__SLAB_ALIGNMENT
#define LINEAR_CLASSES 8 /* of one to eight units */

/* ---- classes ---- */

size_t
nrm__slab_class_nbytes(size_t index)
{
    if (index < LINEAR_CLASSES) {
        return (index + 1) * UNIT;
    }
    index -= LINEAR_CLASSES;
    return (5 + index % 4) * UNIT << (1 + index / 4);
}

static size_t
slab_nbytes(const struct nrm__slab_class *class)
{
    return sizeof(struct nrm__slab) +
           (class->n_cells + 1) * sizeof(atomic_uint_least16_t);
}

static struct nrm__slab_class *
create_class(struct nrm__slabs *set, size_t index)
{
    struct nrm__slab_class *class = nrm__node_allocate(sizeof *class);
    if (class == NULL) {
        return NULL;
    }
    nrm__lock_init(&class->lock, NRM__RANK_SLAB);
    class->set = set;
    class->index = (uint32_t)index;
    class->cell_nbytes = nrm__slab_class_nbytes(index);
    class->n_cells = (uint32_t)(NRM__SLAB_CHUNK / class->cell_nbytes);
    class->reciprocal = (uint32_t)(((size_t)1 << NRM__SLAB_RECIPROCAL_BITS) /
                                       (class->cell_nbytes / UNIT) +
                                   1);
    nrm__list_init(&class->all);
    nrm__list_init(&class->available);
    nrm__slab_batches_init(class);
    return class;
}

static void
destroy_class(struct nrm__slab_class *class)
{
    if (class == NULL) {
        return;
    }
    NRM_ASSERT(nrm__list_is_empty(&class->all));
    while (class->spare != NULL) {
        struct nrm__slab *slab = class->spare;
        class->spare = slab->next_spare;
        nrm__node_deallocate(slab, slab_nbytes(class));
    }
    nrm__slab_batches_finish(class);
    nrm__lock_finish(&class->lock);
    nrm__node_deallocate(class, sizeof *class);
}

/* ---- slabs ---- */

static struct nrm__slab *
take_spare(struct nrm__slab_class *class)
{
    nrm__lock_acquire(&class->lock);
    struct nrm__slab *slab = class->spare;
    if (slab != NULL) {
        class->spare = slab->next_spare;
    }
    nrm__lock_release(&class->lock);
    if (slab == NULL) {
        slab = nrm__node_allocate(slab_nbytes(class));
        if (slab != NULL) {
            slab->class = class;
            slab->owner = class->set->owner;
            slab->cell_nbytes = (uint32_t)class->cell_nbytes;
            slab->n_cells = class->n_cells;
            slab->reciprocal = class->reciprocal;
            slab->class_index = class->index;
        }
    }
    return slab;
}

static void
put_spare(struct nrm__slab_class *class, struct nrm__slab *slab)
{
    nrm__lock_acquire(&class->lock);
    slab->next_spare = class->spare;
    class->spare = slab;
    nrm__lock_release(&class->lock);
}

/* Makes the description that of an empty slab, in no list. */
static void
describe(struct nrm__slab *slab, const struct nrm__block *chunk,
         struct nrm__segment *segment)
{
    const struct nrm__slab_class *class = slab->class;
    slab->segment = segment;
    slab->start = (uintptr_t)chunk->ptr;
    slab->chunk = *chunk;
    slab->chunk_is_zero = (chunk->flags & NRM__BLOCK_IS_ZERO) != 0;
    slab->generation++;
    slab->n_free = class->n_cells;
    slab->first_free = 0;
    slab->high_water = 0;
    nrm__list_init(&slab->all);
    nrm__list_init(&slab->available);
    for (uint32_t cell = 0; cell < class->n_cells; cell++) {
        slab->free[cell / 64] |= UINT64_C(1) << (cell % 64);
    }
    segment->upstream = *chunk;
    segment->extra = (char *)slab + 1; /* the mark of a slab's segment */
    segment->cells_of = slab->owner;
    segment->sizes = slab->sizes;
    segment->cell_nbytes = slab->cell_nbytes;
    segment->reciprocal = slab->reciprocal;
    segment->magazine = nrm__magazine_offset(slab->class_index);
}

nrm_status
nrm__slab_create(struct nrm__slab_class *class, struct nrm__slab **out)
{
    struct nrm__slabs *set = class->set;
    struct nrm__block chunk = {0};
    struct nrm__segment *segment;
    struct nrm__slab *slab = take_spare(class);
    nrm_status status;
    if (slab == NULL) {
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe a slab");
    }
    status = set->get_chunk(set->owner, &chunk);
    if (status != NRM_OK) {
        goto fail_chunk;
    }
    NRM_DEBUG_ASSERT(nrm__is_aligned(chunk.ptr, NRM__SLAB_CHUNK));
    status = nrm__segment_create(set->owner, chunk.ptr, NRM__SLAB_CHUNK, &segment);
    if (status != NRM_OK) {
        goto fail_segment;
    }
    describe(slab, &chunk, segment);
    status = nrm__block_map_add_segment(segment);
    if (status != NRM_OK) {
        goto fail_map;
    }
    atomic_fetch_add_explicit(&set->reserved_nbytes, NRM__SLAB_CHUNK,
                              memory_order_relaxed);
    *out = slab;
    return NRM_OK;

fail_map:
    nrm__segment_destroy(segment);
fail_segment:
    set->put_chunk(set->owner, &chunk);
fail_chunk:
    put_spare(class, slab);
    return status;
}

/* `slab` is empty and in no list. */
void
nrm__slab_destroy(struct nrm__slab *slab)
{
    struct nrm__slab_class *class = slab->class;
    struct nrm__slabs *set = class->set;
    struct nrm__block chunk = slab->chunk;
    chunk.flags &= ~(unsigned)NRM__BLOCK_IS_ZERO; /* cells of it were in use */
    nrm__block_map_remove_segment(slab->segment);
    nrm__segment_destroy(slab->segment);
    put_spare(class, slab);
    atomic_fetch_sub_explicit(&set->reserved_nbytes, NRM__SLAB_CHUNK,
                              memory_order_relaxed);
    set->put_chunk(set->owner, &chunk);
}

/* ---- the set ---- */

nrm_status
nrm__slabs_init(struct nrm__slabs *slabs, nrm_resource *owner,
                nrm_status (*get_chunk)(nrm_resource *, struct nrm__block *),
                void (*put_chunk)(nrm_resource *, const struct nrm__block *))
{
    slabs->owner = owner;
    slabs->get_chunk = get_chunk;
    slabs->put_chunk = put_chunk;
    atomic_init(&slabs->reserved_nbytes, 0);
    for (size_t i = 0; i < NRM__SLAB_N_CLASSES; i++) {
        slabs->classes[i] = create_class(slabs, i);
        if (slabs->classes[i] == NULL) {
            while (i-- > 0) {
                destroy_class(slabs->classes[i]);
            }
            return nrm__error(NRM_OUT_OF_MEMORY,
                              "no memory for the slabs of a resource");
        }
    }
    return NRM_OK;
}

void
nrm__slabs_finish(struct nrm__slabs *slabs)
{
    size_t nbytes = 0;
    nrm__slabs_trim(slabs, 0, &nbytes);
    for (size_t i = 0; i < NRM__SLAB_N_CLASSES; i++) {
        destroy_class(slabs->classes[i]);
    }
    NRM_ASSERT(atomic_load(&slabs->reserved_nbytes) == 0);
}
