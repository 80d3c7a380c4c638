/*
 * Batches: cells on their way from a thread that has too many to one that has none.
 *
 * Cells that go back to their slabs take the lock of the class, and a bit of each slab;
 * who takes them next does the same. A program in which one thread allocates what
 * another frees would do so for every cell. So the cells that a thread gives up at once
 * stay together, and the next thread takes all of them: whoever has taken the bit of a
 * batch out of the class's `unused` ones may fill it, out of the `full` ones empty it,
 * and nobody waits for anybody.
 *
 * The cells of a batch are neither free nor live, so their slabs hold the owner for
 * them: who closes the owner breaks its batches, and none is made after that.
 */
#include <string.h>

#include "base/assert.h"
#include "core/cache.h"
#include "core/nodes.h"
#include "core/slab_class.h"

struct nrm__slab_batch {
    uint32_t n;
    struct nrm__cell cells[NRM__SLAB_BATCH];
};

#define ALL_BITS ((1u << NRM__SLAB_N_BATCHES) - 1)

void
nrm__slab_batches_init(struct nrm__slab_class *class)
{
    atomic_init(&class->unused_batches, ALL_BITS);
}

void
nrm__slab_batches_finish(struct nrm__slab_class *class)
{
    NRM_ASSERT(atomic_load(&class->full_batches) == 0);
    for (size_t i = 0; i < NRM__SLAB_N_BATCHES; i++) {
        nrm__node_deallocate(class->batches[i], sizeof *class->batches[i]);
    }
}

/* Another thread may have had some in hand: their cells are lost to the child, which is
   to have the batches. */
void
nrm__slab_batches_fork_child(struct nrm__slab_class *class)
{
    atomic_store(&class->unused_batches, ~atomic_load(&class->full_batches) & ALL_BITS);
}

/* Takes the lowest bit out, or one of those in `mask`; false: there is none. */
static bool
take_bit(atomic_uint *bits, unsigned mask, unsigned *out)
{
    unsigned seen = atomic_load_explicit(bits, memory_order_relaxed);
    do {
        if ((seen & mask) == 0) {
            return false;
        }
        *out = (unsigned)__builtin_ctz(seen & mask);
    } while (!atomic_compare_exchange_weak(bits, &seen, seen & ~(1u << *out)));
    return true;
}

static void
put_bit(atomic_uint *bits, unsigned bit)
{
    atomic_fetch_or(bits, 1u << bit);
}

/* Once the owner is closed there are none any more: either this one sees that it is, or
   who breaks them after he has closed it sees the batch. */
bool
nrm__slabs_put_batch(struct nrm__slabs *slabs, size_t class_index,
                     const struct nrm__cell *cells, size_t n)
{
    struct nrm__slab_class *class = slabs->classes[class_index];
    unsigned bit;
    NRM_DEBUG_ASSERT(n <= NRM__SLAB_BATCH);
    if (!slabs->spreads || n == 0 || atomic_load(&slabs->owner->is_closed) ||
        !take_bit(&class->unused_batches, ~0u, &bit)) {
        return false;
    }
    if (class->batches[bit] == NULL) {
        class->batches[bit] = nrm__node_allocate(sizeof *class->batches[bit]);
    }
    if (class->batches[bit] == NULL) {
        put_bit(&class->unused_batches, bit);
        return false;
    }
    class->batches[bit]->n = (uint32_t)n;
    memcpy(class->batches[bit]->cells, cells, n * sizeof *cells);
    put_bit(&class->full_batches, bit);
    if (atomic_load(&slabs->owner->is_closed) &&
        take_bit(&class->full_batches, 1u << bit, &bit)) {
        put_bit(&class->unused_batches, bit);
        return false;
    }
    return true;
}

size_t
nrm__slabs_take_batch(struct nrm__slabs *slabs, size_t class_index,
                      struct nrm__cell *out)
{
    struct nrm__slab_class *class = slabs->classes[class_index];
    unsigned bit;
    if (!slabs->spreads || !take_bit(&class->full_batches, ~0u, &bit)) {
        return 0;
    }
    const struct nrm__slab_batch *batch = class->batches[bit];
    size_t n = batch->n;
    memcpy(out, batch->cells, n * sizeof *out);
    put_bit(&class->unused_batches, bit);
    return n;
}

void
nrm__slabs_break_batches(struct nrm__slabs *slabs)
{
    struct nrm__cell cells[NRM__SLAB_BATCH];
    for (size_t i = 0; i < NRM__SLAB_N_CLASSES; i++) {
        size_t n;
        while ((n = nrm__slabs_take_batch(slabs, i, cells)) != 0) {
            nrm__slabs_put(slabs, cells, n);
        }
    }
}
