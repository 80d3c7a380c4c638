/*
 * Growth ahead of demand, for a pool that was made to (grow_ahead).
 *
 * While what is in use rises above all that it was before, as much should lie free as
 * it rose between the last two looks, at least half a segment and at most MAX_STEPS
 * halves. An allocation that leaves less tells the background thread, which takes one
 * segment at a time until it is enough, each with a pause in which the driver lets
 * others in. A pool whose use goes up and down below its highest point grows no more.
 *
 * What goes back (trim, decay, an exchange of segments) lowers the highest point to
 * what is left, and nothing comes in its place before the program needs more than that.
 * It also ends the growth that is wanted, or in progress: what that has taken does not
 * enter the pool.
 *
 * The thread makes no record and no context: it works in a primary one, which an
 * allocation has just used, and where the program has only its own it does nothing;
 * calls that a stream capture does not allow are made relaxed, as everywhere
 * (cuda/context.h), and after a capture was seen it waits. A failure is counted, and
 * the next try waits twice as long as the one before: the program learns of it when it
 * asks for that memory itself.
 */
#include "core/hooks.h"
#include "cuda/event.h"
#include "os/system.h"
#include "pools/pool_internal.h"
#include "pools/upstream.h"

#define MAX_STEPS 4
#define PAUSE_FIRST_NS UINT64_C(50000000) /* after a failure */
#define PAUSE_LAST_NS UINT64_C(10000000000)

/* ---- while the pool's lock is held ---- */

static size_t
used_locked(const struct nrm__pool *pool)
{
    return pool->reserved_nbytes - pool->free_nbytes + nrm__pool_pending_locked(pool);
}

static size_t
room_locked(const struct nrm__pool *pool)
{
    size_t taken = pool->reserved_nbytes + pool->growing_nbytes;
    return taken < pool->maximum_nbytes ? pool->maximum_nbytes - taken : 0;
}

/* A block that gets a segment of its own says nothing about those that share one. */
void
nrm__pool_look_ahead_locked(struct nrm__pool *pool, size_t nbytes)
{
    struct nrm__pool_ahead *ahead = &pool->ahead;
    size_t used = used_locked(pool);
    if (used <= ahead->high) {
        return;
    }
    size_t rise = used - ahead->high;
    ahead->high = used;
    if (nbytes > pool->segment_nbytes) {
        return;
    }
    ahead->risen += rise;
    if (!ahead->is_watched && pool->reserved_nbytes - used < ahead->target &&
        room_locked(pool) >= NRM__HUGE_PAGE) {
        ahead->is_watched = true;
        ahead->n_begun = ahead->n_shrinks;
        atomic_store(&ahead->is_due, true);
    }
}

/* How large the next segment is to be; 0: enough is free, or there is no room. */
static size_t
missing_locked(struct nrm__pool *pool, size_t step, bool is_first)
{
    struct nrm__pool_ahead *ahead = &pool->ahead;
    size_t rise = nrm__min(ahead->risen, MAX_STEPS * step / 2);
    ahead->target = nrm__max(rise, is_first ? step / 2 : ahead->target);
    ahead->risen = 0;
    if (pool->reserved_nbytes - used_locked(pool) >= ahead->target) {
        return 0;
    }
    return nrm__align_down(nrm__min(step, room_locked(pool)), NRM__HUGE_PAGE);
}

void
nrm__pool_ahead_begin_locked(struct nrm__pool *pool, size_t first_nbytes)
{
    if (pool->ahead.target == 0) {
        pool->ahead.target = nrm__min(first_nbytes, pool->segment_nbytes) / 2;
    }
}

void
nrm__pool_ahead_forget_locked(struct nrm__pool *pool)
{
    atomic_store(&pool->ahead.is_wanted, false);
    atomic_store(&pool->ahead.is_due, false);
    pool->ahead.is_watched = false;
}

/* ---- in the background thread ---- */

/* Whether the memory can be had without a context that somebody would have to make: one
   that the program made for itself is current in its own threads. */
static bool
has_context(nrm_resource *mr)
{
    int device = nrm_resource_device(mr), n_devices = nrm__cuda_n_devices();
    bool has = mr->kind == NRM_KIND_HOST || nrm__cuda_may_be_active(device);
    for (int i = 0; i < n_devices && !has && device == NRM_DEVICE_NONE; i++) {
        has = nrm__cuda_may_be_active(i);
    }
    return has;
}

/* The last user has gone, or CUDA cannot be used here and now. */
static bool
may_grow(nrm_resource *mr)
{
    bool has_user = (uint32_t)atomic_load(&mr->refcount) > 1; /* besides this thread */
    return has_user && has_context(mr) && !nrm__is_exiting() &&
           !nrm__cuda_has_seen_capture() && nrm__pool_check_usable(mr) == NRM_OK;
}

static size_t
begin_growth(struct nrm__pool *pool, bool is_first)
{
    struct nrm__pool_ahead *ahead = &pool->ahead;
    size_t step = may_grow(&pool->base) ? nrm__pool_next_segment(pool, 0) : 0;
    nrm__lock_acquire(&pool->lock);
    bool is_wanted = step != 0 && ahead->n_shrinks == ahead->n_begun;
    size_t nbytes = is_wanted ? missing_locked(pool, step, is_first) : 0;
    ahead->is_watched = nbytes != 0;
    nrm__lock_release(&pool->lock);
    return nbytes;
}

/* Notes how it went; false: the pool is not to grow any more for now. */
static bool
end_growth(struct nrm__pool *pool, nrm_status status, bool *out_decays)
{
    struct nrm__pool_ahead *ahead = &pool->ahead;
    nrm__lock_acquire(&pool->lock);
    bool has_shrunk = ahead->n_shrinks != ahead->n_begun;
    ahead->n_segments += status == NRM_OK;
    ahead->n_failures += status != NRM_OK && !has_shrunk;
    ahead->is_watched = !has_shrunk;
    *out_decays = nrm__pool_begins_decay_locked(pool);
    nrm__lock_release(&pool->lock);
    return !has_shrunk;
}

static uint64_t
look_ahead(nrm_resource *mr, uint64_t now_ns, bool is_first)
{
    struct nrm__pool *pool = (struct nrm__pool *)mr;
    struct nrm__pool_ahead *ahead = &pool->ahead;
    bool decays;
    if (now_ns < ahead->retry_ns) {
        return ahead->retry_ns;
    }
    size_t nbytes = begin_growth(pool, is_first);
    if (nbytes == 0) {
        return 0;
    }
    nrm_status status = nrm__pool_grow_ahead(pool, nbytes);
    bool goes_on = end_growth(pool, status, &decays);
    if (decays) {
        nrm__background_watch(&pool->watched);
    }
    if (!goes_on || status == NRM_OK) {
        ahead->pause_ns = 0;
        return goes_on ? now_ns : 0;
    }
    ahead->pause_ns = ahead->pause_ns == 0
                          ? PAUSE_FIRST_NS
                          : nrm__min(2 * ahead->pause_ns, PAUSE_LAST_NS);
    ahead->retry_ns = nrm__clock_ns() + ahead->pause_ns;
    return ahead->retry_ns;
}

void
nrm__pool_ahead_init(struct nrm__pool *pool, bool is_wanted)
{
    atomic_init(&pool->ahead.is_wanted, is_wanted);
    nrm__background_watched_init(&pool->ahead.watched, &pool->base, look_ahead);
}
