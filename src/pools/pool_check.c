/*
 * The check of a pool. What the pool knows stands in several places, so that each
 * question has a quick answer: a block in its neighbours, in the starts of its segment,
 * in a bin or list by its state, and in the sums. Here everything is counted anew, from
 * segment to segment and block to block, and compared; the first thing that does not
 * agree aborts. Tests do it after each step, and builds with slow asserts in every
 * pool.
 */
#include "base/assert.h"
#include "pools/pool.h"
#include "pools/pool_ops.h"
#include "pools/pool_vmm.h"

struct sums {
    size_t free, live, parked, n_blocks, n_whole, n_used;
};

static void
check_block_locked(const struct nrm__pool *pool, const struct nrm__pool_block *block,
                   struct sums *sums)
{
    uintptr_t state = nrm__pool_state_of(block);
    struct nrm__segment *segment = block->live.segment;
    size_t granule = nrm__pool_granule_of(segment);
    uintptr_t last = block->start + block->size - 1;
    NRM_ASSERT(block->size != 0 && block->size % granule == 0);
    NRM_ASSERT(block->start - segment->start < segment->nbytes);
    NRM_ASSERT(nrm__pool_floor_locked(segment, block->start) == block);
    segment = nrm__pool_segment_of_locked(segment, last);
    NRM_ASSERT(nrm__pool_floor_locked(segment, last) == block);
    if (state == NRM__POOL_LIVE) {
        uintptr_t key = atomic_load(&block->live.key);
        uintptr_t address = key & ~NRM__STATE_MASK;
        NRM_ASSERT(address - block->start < granule);
        NRM_ASSERT(atomic_load(&block->live.capacity) ==
                   block->size - (address - block->start));
        NRM_ASSERT(atomic_load(&block->live.nbytes) <=
                   atomic_load(&block->live.capacity));
    }
    NRM_ASSERT(segment->node < pool->n_nodes);
    sums->free += state == NRM__POOL_FREE ? block->size : 0;
    sums->parked += state == NRM__POOL_PARKED ? block->size : 0;
    sums->live += state == NRM__POOL_LIVE || state == NRM__POOL_CLAIMED ? block->size
                                                                        : 0;
    sums->n_whole += state == NRM__POOL_FREE && nrm__pool_is_whole(block);
    sums->n_used += state == NRM__POOL_FREE && nrm__pool_is_used(block);
    sums->n_blocks++;
}

/* The blocks of segments side by side, of which this is the first. */
static void
check_run_locked(const struct nrm__pool *pool, const struct nrm__segment *segment,
                 struct sums *sums)
{
    uintptr_t at = segment->start;
    struct nrm__pool_block *previous = NULL;
    struct nrm__pool_block *block = nrm__pool_floor_locked(segment, at);
    for (; block != NULL; previous = block, block = block->next) {
        NRM_ASSERT(block->start == at && block->previous == previous);
        NRM_ASSERT(pool->fixed.block_nbytes == 0 ||
                   (at - segment->start) % pool->fixed.block_nbytes == 0);
        bool is_free = nrm__pool_state_of(block) == NRM__POOL_FREE;
        NRM_ASSERT(!is_free || !nrm__pool_merges_locked(pool, block, previous));
        check_block_locked(pool, block, sums);
        at += block->size;
    }
    const struct nrm__segment *last = segment;
    for (; segment != NULL; segment = nrm__pool_right_locked(segment)) {
        last = segment;
    }
    NRM_ASSERT(at == last->start + last->nbytes);
}

size_t
nrm__pool_check_bins_locked(const struct nrm__pool_bins *bins)
{
    size_t sum = 0;
    for (unsigned class = 0; class < NRM__POOL_N_CLASSES; class++) {
        bool bit = (bins->bits[class / 64] >> (class % 64)) & 1;
        NRM_ASSERT(bit == !nrm__list_is_empty(&bins->heads[class]));
        NRM_ASSERT(!bit || (bins->words >> (class / 64) & 1) != 0);
        for (struct nrm__link *link = bins->heads[class].next;
             link != &bins->heads[class]; link = link->next) {
            struct nrm__pool_block *block =
                NRM__CONTAINER(link, struct nrm__pool_block, link);
            NRM_ASSERT(nrm__pool_state_of(block) == NRM__POOL_FREE &&
                       nrm__pool_class_of(block->size) == class);
            sum += block->size;
        }
    }
    return sum;
}

void
nrm__pool_check_locked(struct nrm__pool *pool)
{
    struct sums sums = {0};
    size_t reserved = 0;
    for (struct nrm__link *link = pool->segments.next; link != &pool->segments;
         link = link->next) {
        struct nrm__segment *segment = NRM__CONTAINER(link, struct nrm__segment, link);
        if (nrm__pool_left_locked(segment) == NULL) {
            check_run_locked(pool, segment, &sums);
        }
        reserved += segment->nbytes;
    }
    NRM_ASSERT(sums.n_blocks == pool->n_blocks);
    NRM_ASSERT(sums.n_whole == pool->n_whole);
    NRM_ASSERT(sums.n_used == pool->n_used);
    NRM_ASSERT(reserved == pool->reserved_nbytes);
    NRM_ASSERT(reserved <= pool->maximum_nbytes);
    NRM_ASSERT(sums.free == pool->free_nbytes);
    NRM_ASSERT(sums.live == pool->live_nbytes);
    NRM_ASSERT(sums.parked == pool->parked_nbytes);
    size_t binned = 0;
    for (unsigned node = 0; node < pool->n_nodes; node++) {
        binned += nrm__pool_check_bins_locked(&pool->bins[node]);
    }
    NRM_ASSERT(binned == pool->free_nbytes - nrm__pool_pending_locked(pool));
    if (pool->order != NULL) {
        nrm__pool_check_order_locked(pool);
        nrm__pool_vmm_check_locked(pool);
    }
}

void
nrm__pool_check(nrm_resource *mr)
{
    struct nrm__pool *pool = nrm__pool_from(mr);
    nrm__lock_acquire(&pool->lock);
    nrm__pool_check_locked(pool);
    nrm__lock_release(&pool->lock);
    if (pool->has_slabs) {
        nrm__slabs_check(&pool->slabs);
    }
}
