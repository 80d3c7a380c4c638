/*
 * See log_note.h. What is pending is the first free of a thread that has begun and has
 * no record yet: one inside another one, as of a callback, is later than that.
 */
#include "core/log_note.h"

/* In a thread that has no ring yet, or cannot have one. */
__attribute__((noinline)) static void
note_first(const struct nrm__log_record *record, bool may_detach)
{
    struct nrm__log_ring *ring = nrm__log_make_ring();
    if (ring == NULL) {
        nrm__log_note_directly(record);
        return;
    }
    *nrm__log_next(ring) = *record;
    if (nrm__log_put(ring)) {
        nrm__log_pressed(ring, may_detach);
    }
}

static void
end_pending(struct nrm__log_ring *ring, uint64_t ticks)
{
    if (atomic_load_explicit(&ring->pending, memory_order_relaxed) == ticks) {
        atomic_store_explicit(&ring->pending, 0, memory_order_release);
    }
}

void
nrm__log_note(const struct nrm__log *log, enum nrm__log_action action, uint64_t ticks,
              void *ptr, size_t nbytes, const nrm_stream *stream, bool counts,
              bool may_detach)
{
    struct nrm__log_ring *ring = nrm__log_ring_now();
    struct nrm__log_record first;
    struct nrm__log_record *record = ring != NULL ? nrm__log_next(ring) : &first;
    nrm__log_write(record, log, action, ticks, ptr, nbytes, stream, counts);
    if (ring == NULL) {
        note_first(&first, may_detach);
        return;
    }
    bool is_pressed = nrm__log_put(ring);
    if (action == NRM__LOG_FREE) {
        end_pending(ring, ticks);
    }
    if (is_pressed) {
        nrm__log_pressed(ring, may_detach);
    }
}

uint64_t
nrm__log_begin_free(void)
{
    struct nrm__log_ring *ring = nrm__log_ring_now();
    uint64_t ticks = nrm__ticks();
    if (ring == NULL) {
        ring = nrm__log_make_ring();
    }
    if (ring != NULL &&
        atomic_load_explicit(&ring->pending, memory_order_relaxed) == 0) {
        atomic_store_explicit(&ring->pending, ticks, memory_order_relaxed);
    }
    return ticks;
}

void
nrm__log_cancel_free(uint64_t ticks)
{
    struct nrm__log_ring *ring = nrm__log_ring_now();
    if (ring != NULL) {
        end_pending(ring, ticks);
    }
}
