/*
 * Memory that lies free goes back to the system after a while: the background thread's
 * look at a pool of ordinary memory.
 *
 * A segment that is free as a whole goes as a whole. In one that is used in part the
 * free blocks stay, and lose their pages where they have a huge page or more that was
 * written to: whole huge pages are dropped, so that none is split, and what is left of
 * the block at either end is zeroed. Then all of it reads as zero, which an allocation
 * of zeros may use, and there is nothing to drop any more. Not where the upstream
 * promised that pages are present. What the pool has from the beginning stays as it is.
 *
 * The program pays nothing for the time: a block that becomes free loses the mark that
 * this thread sets when it first sees it so. So it goes after once to twice decay_ns.
 * After a look at a pool that is in use there is always another, so that a program
 * which takes and frees a segment again and again wakes nobody each time, and what its
 * threads keep at its end is found.
 *
 * While its pages are dropped a block is claimed, since no lock is held then. Who finds
 * no memory meanwhile waits for it, instead of making the pool grow, or failing.
 */
#include <string.h>

#include "os/memory.h"
#include "os/system.h"
#include "pools/pool_internal.h"

#define AWAIT_PAUSE_NS UINT64_C(20000)

/* Marks a free block that is seen for the first time; whether it was long enough ago.
   Else *out_due_ns, 0 or when something else is due, is when at the latest. */
static bool
is_due(const struct nrm__pool *pool, struct nrm__pool_block *block, uint64_t now_ns,
       uint64_t *out_due_ns)
{
    if (block->seen_ns == 0) {
        block->seen_ns = now_ns;
    }
    uint64_t due_ns = block->seen_ns + pool->decay_ns;
    if (due_ns <= now_ns) {
        return true;
    }
    *out_due_ns = *out_due_ns == 0 ? due_ns : nrm__min(*out_due_ns, due_ns);
    return false;
}

/* ---- segments ---- */

/* The last one of the pool's first size stays. */
static bool
may_decay_locked(const struct nrm__pool *pool, const struct nrm__segment *segment)
{
    return segment->nbytes > pool->kept_nbytes ||
           pool->reserved_nbytes - segment->nbytes >= pool->kept_nbytes;
}

/* Takes a segment out of the pool that is seen to be free for `decay_ns` by now; NULL:
   there is none, and *out_due_ns is when there will be, 0: never. */
static struct nrm__segment *
detach_decayed_locked(struct nrm__pool *pool, uint64_t now_ns, uint64_t *out_due_ns)
{
    *out_due_ns = 0;
    for (struct nrm__link *link = pool->segments.previous;
         link != &pool->segments && pool->n_whole != 0; link = link->previous) {
        struct nrm__segment *segment = NRM__CONTAINER(link, struct nrm__segment, link);
        struct nrm__pool_block *block = nrm__pool_whole_locked(pool, segment);
        if (block == NULL || !may_decay_locked(pool, segment)) {
            continue;
        }
        if (is_due(pool, block, now_ns, out_due_ns)) {
            nrm__pool_detach_locked(pool, segment, block);
            return segment;
        }
    }
    return NULL;
}

/* ---- pages ---- */

/* Of what the pool has from the beginning. */
static bool
is_kept_locked(const struct nrm__pool *pool, const struct nrm__segment *segment)
{
    size_t nbytes = 0;
    for (struct nrm__link *link = pool->segments.next; link != &pool->segments;
         link = link->next) {
        const struct nrm__segment *one =
            NRM__CONTAINER(link, struct nrm__segment, link);
        nbytes += one->nbytes;
        if (nbytes > pool->kept_nbytes || one == segment) {
            return nbytes <= pool->kept_nbytes;
        }
    }
    return false;
}

/* Whether the pages of a free block are to go: it is no whole segment, which would go
   itself, and a huge page lies in it. */
static bool
may_drop_locked(const struct nrm__pool *pool, const struct nrm__pool_block *block)
{
    uintptr_t first = nrm__align_up(block->start, NRM__HUGE_PAGE);
    const struct nrm__segment *segment = block->live.segment;
    bool stays_present = (segment->upstream.flags & NRM__BLOCK_IS_PRESENT) != 0;
    return nrm__pool_is_used(block) && block->size < segment->nbytes &&
           !stays_present && first + NRM__HUGE_PAGE <= block->start + block->size &&
           !is_kept_locked(pool, segment);
}

/* Claims a free block that is due; NULL: there is none, and *out_due_ns is when there
   will be. */
static struct nrm__pool_block *
take_used_locked(struct nrm__pool *pool, const struct nrm__pool_bins *bins,
                 uint64_t now_ns, uint64_t *out_due_ns)
{
    unsigned class = nrm__pool_class_of(NRM__HUGE_PAGE);
    while (pool->n_used != 0 && pool->n_trimming == 0 &&
           !atomic_load(&pool->keeps_pages) &&
           (class = nrm__pool_next_class_locked(bins, class)) < NRM__POOL_N_CLASSES) {
        const struct nrm__link *head = &bins->heads[class];
        for (struct nrm__link *link = head->next; link != head; link = link->next) {
            struct nrm__pool_block *block =
                NRM__CONTAINER(link, struct nrm__pool_block, link);
            if (!may_drop_locked(pool, block)) {
                continue;
            }
            if (is_due(pool, block, now_ns, out_due_ns)) {
                nrm__pool_bin_remove_locked(pool, block);
                nrm__pool_set_state(block, NRM__POOL_CLAIMED);
                pool->live_nbytes += block->size;
                pool->dropping = block;
                return block;
            }
        }
        class++;
    }
    return NULL;
}

/* Writes zeros to what is present of less than a huge page, and drops the rest: writing
   there would make pages. What is in swap is dropped too, though it is not present. */
static bool
zero_edge(uintptr_t start, uintptr_t end)
{
    size_t page = nrm__page_size();
    for (uintptr_t next; start < end; start = next) {
        next = nrm__min(nrm__align_down(start, page) + page, end);
        bool is_page = next - start == page;
        if (!is_page || nrm__is_resident((void *)start)) {
            memset((void *)start, 0, next - start);
        }
        else if (nrm__discard((void *)start, page) != 0) {
            return false;
        }
    }
    return true;
}

/* Whether all of it reads as zero now. */
static bool
drop_pages(const struct nrm__pool_block *block)
{
    uintptr_t end = block->start + block->size;
    uintptr_t first = nrm__align_up(block->start, NRM__HUGE_PAGE);
    uintptr_t last = nrm__align_down(end, NRM__HUGE_PAGE);
    return nrm__discard((void *)first, last - first) == 0 &&
           zero_edge(block->start, first) && zero_edge(last, end);
}

/* Without pages it is the worst of its size, unless a neighbour has become free too. */
static void
return_locked(struct nrm__pool *pool, bool is_zero)
{
    struct nrm__pool_block *block = pool->dropping;
    size_t nbytes = block->size;
    pool->dropping = NULL;
    pool->live_nbytes -= nbytes;
    block = nrm__pool_free_locked(pool, block, is_zero);
    if (is_zero && block->size == nbytes) {
        nrm__pool_postpone_locked(pool, block);
    }
}

static void
give_pages_back(struct nrm__pool *pool, const struct nrm__pool_bins *bins,
                uint64_t now_ns, uint64_t *out_due_ns)
{
    for (;;) {
        nrm__lock_acquire(&pool->lock);
        struct nrm__pool_block *block =
            take_used_locked(pool, bins, now_ns, out_due_ns);
        nrm__lock_release(&pool->lock);
        if (block == NULL) {
            return;
        }
        bool is_zero = drop_pages(block);
        if (!is_zero) {
            atomic_store(&pool->keeps_pages,
                         true); /* they are locked, by somebody else */
        }
        nrm__lock_acquire(&pool->lock);
        return_locked(pool, is_zero);
        nrm__lock_release(&pool->lock);
    }
}

void
nrm__pool_await_decay(struct nrm__pool *pool)
{
    for (bool waits = true; waits;) {
        nrm__sleep_ns(AWAIT_PAUSE_NS);
        nrm__lock_acquire(&pool->lock);
        waits = nrm__pool_is_decaying_locked(pool);
        nrm__lock_release(&pool->lock);
    }
}

/* What grows ahead ends here too. */
void
nrm__pool_begin_trim(struct nrm__pool *pool)
{
    nrm__lock_acquire(&pool->lock);
    pool->ahead.n_shrinks++;
    pool->n_trimming++;
    bool waits = nrm__pool_is_decaying_locked(pool);
    nrm__lock_release(&pool->lock);
    if (waits) {
        nrm__pool_await_decay(pool);
    }
}

void
nrm__pool_end_trim(struct nrm__pool *pool)
{
    nrm__lock_acquire(&pool->lock);
    pool->n_trimming--;
    nrm__lock_release(&pool->lock);
}

void
nrm__pool_forget_pages_locked(struct nrm__pool *pool)
{
    pool->n_trimming = 0;
    pool->is_draining = false;
    if (pool->dropping != NULL) {
        return_locked(pool, false);
    }
}

/* ---- the look ---- */

/* Not beside a trim, which would miss what is on its way then. */
static bool
begin_drain(struct nrm__pool *pool)
{
    nrm__lock_acquire(&pool->lock);
    pool->is_draining = pool->n_trimming == 0;
    bool begins = pool->is_draining;
    nrm__lock_release(&pool->lock);
    return begins;
}

static void
end_drain(struct nrm__pool *pool)
{
    nrm__lock_acquire(&pool->lock);
    pool->is_draining = false;
    nrm__lock_release(&pool->lock);
}

/* What threads keep holds whole segments back; when nobody has asked the pool for
   anything since the last look, nobody will miss it. False: somebody has, so there must
   be another look: what they free goes to the threads, and has nobody watch the
   pool. */
static bool
drain_when_idle(struct nrm__pool *pool, bool is_first)
{
    nrm_statistics statistics = {0};
    nrm_status status = nrm_resource_statistics(&pool->base, &statistics);
    bool is_idle = !is_first && status == NRM_OK &&
                   statistics.total_count == pool->n_seen;
    pool->n_seen = statistics.total_count;
    if (is_idle && begin_drain(pool)) {
        size_t nbytes = 0;
        nrm__cache_drain(&pool->base);
        nrm__slabs_trim(&pool->slabs, 0, &nbytes);
        end_drain(pool);
    }
    return is_idle;
}

/* From now on whoever frees memory has the pool watched anew, unless this look finds
   that it has to be; and then, if nobody else did so meanwhile. */
static void
begin_look(struct nrm__pool *pool, bool is_first)
{
    nrm__lock_acquire(&pool->lock);
    pool->is_watched = is_first;
    nrm__lock_release(&pool->lock);
}

static uint64_t
end_look(struct nrm__pool *pool, uint64_t due_ns, bool is_first)
{
    nrm__lock_acquire(&pool->lock);
    bool goes_on = is_first || (due_ns != 0 && !pool->is_watched);
    pool->is_watched |= goes_on;
    nrm__lock_release(&pool->lock);
    return goes_on ? due_ns : 0;
}

uint64_t
nrm__pool_decay(nrm_resource *mr, uint64_t now_ns, bool is_first)
{
    struct nrm__pool *pool = (struct nrm__pool *)mr;
    struct nrm__segment *segment;
    uint64_t due_ns;
    bool is_idle = drain_when_idle(pool, is_first);
    begin_look(pool, is_first);
    do {
        nrm__lock_acquire(&pool->lock);
        segment = detach_decayed_locked(pool, now_ns, &due_ns);
        nrm__lock_release(&pool->lock);
        if (segment != NULL) {
            (void)nrm__pool_drop_segment(pool, segment, false);
        }
    } while (segment != NULL);
    for (unsigned node = 0; node < pool->n_nodes; node++) {
        give_pages_back(pool, &pool->bins[node], now_ns, &due_ns);
    }
    if (!is_idle && due_ns == 0) {
        due_ns = now_ns + pool->decay_ns;
    }
    return end_look(pool, due_ns, is_first);
}
