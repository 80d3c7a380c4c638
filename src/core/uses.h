/*
 * Safe reuse of host-accessible memory that the GPU may still touch.
 *
 * A block that is given back is stamped with the number of the open epoch. Closing an
 * epoch makes the next number visible and then records one event in each active
 * context: when these are done, so is everything that was submitted before the stamp
 * was read. A block may be handed out, unmapped or unregistered when the epoch of its
 * stamp, or a later one, is done. Giving back never calls the driver; an allocation
 * that needs memory closes epochs, detached from the interpreter.
 */
#ifndef NRM_CORE_USES_H
#define NRM_CORE_USES_H

#include "base/fence.h"
#include "core/ops.h"

/* The stamp of a block that is given back now. Never 0; 0 is the stamp of memory that
   no GPU has seen, always done. */
uint64_t nrm__epoch_stamp(void);

extern atomic_uint_least64_t nrm__epoch_open; /* the open epoch's number */

/* The same for a thread that counts what it has stamped, and says so later: in
   nrm__epoch_count or nrm__epoch_close_of. The driver takes a lock to submit, and the
   same one to record: that orders the submissions before the read on x86-64, whose
   loads do not overtake an exchange. Elsewhere it is not known to, and a fence does. */
static inline uint64_t
nrm__epoch_stamp_uncounted(void)
{
#if defined(NRM_PLANTED_FAULTS)
    return nrm__epoch_stamp();
#else
#if !defined(__x86_64__)
    nrm__full_fence();
#endif
    return atomic_load(&nrm__epoch_open);
#endif
}

/* So many blocks were stamped: how long a wait for them may last depends on it. */
void nrm__epoch_count(uint64_t n_blocks);

/* Everything up to this number is done. */
extern atomic_uint_least64_t nrm__epoch_newest_done;

static inline bool
nrm__epoch_is_done(uint64_t stamp)
{
    return stamp <= atomic_load_explicit(&nrm__epoch_newest_done, memory_order_acquire);
}

/* The newest number whose events are all recorded. A parked block with a later stamp
   waits for an epoch that nobody has closed yet. */
uint64_t nrm__epoch_newest_recorded(void);

/* Asks the driver about the pending epochs (cuEventQuery only: allowed while attached).
   True when more is done than before the call. */
bool nrm__epoch_poll(void);

/* Closes the open epoch, detached; polls once. True when an epoch was closed: false
   when too many are pending, a capture forbids a record, the device is lost, or this is
   the background thread. */
bool nrm__epoch_close(void);

/* The same, where so many blocks of the open epoch were stamped without being
   counted. */
bool nrm__epoch_close_of(uint64_t n_blocks);

/* Waits, detached and polling, until more epochs are done than before: at most
   `limit_ns` (UINT64_MAX: as long as it takes), or twice what the GPU needs at its pace
   of late, but not more than a second. For one oldest epoch no longer than that in all:
   beside an endless kernel nothing waits after the first time, beside a slow one memory
   does not grow. `insists`: it waits all the same. True when more is done. */
bool nrm__epoch_wait(uint64_t limit_ns, bool insists);

/* True when a sticky error was seen: parked memory is then never handed out. */
bool nrm__epoch_is_lost(void);

/* From then on: threads hand out nothing that they keep of memory which GPUs see. */
extern atomic_bool nrm__epoch_forbids;

/* Forbids that, or no longer; each caller does the one and then the other. */
void nrm__epoch_forbid(bool does);

/* Says, once, that a record has broken a capture: NRM__RECORD_INVALIDATED. */
void nrm__epoch_warn_capture(int device);

/* ---- memory that waits to be given back for good ---- */

/* Hands a claimed block to the retired list: owner->ops->release_block runs when its
   epoch is done, from a later allocation, trim or the background thread. */
void nrm__retire(const struct nrm__block *block, uint64_t stamp);

/* The same where the block has known uses (core/known_uses.h) that it must wait for,
   and then only for them: its owner gets it back then, and stamps it. False: it has
   none. */
bool nrm__retire_used(const struct nrm__block *block);

/* Gives back what known uses kept, as far as it is done; waits for more of it,
   detached: `limit_ns` long, or twice what the GPU needs at its pace of late, but not
   more than a second; and not again before something came back, unless it `insists`.
   True when something did. */
bool nrm__retired_return_used(uint64_t limit_ns, bool insists);

/* The same, without a wait, when so many bytes were given back since the driver was
   asked. */
void nrm__retired_ask_about(size_t nbytes);

/* Releases what is done, after closing an epoch if that is needed and nothing waits for
   it yet, and memory whose release waits inside the driver when nothing is under way.
   Called by allocations that touch the driver anyway, by trim and by the background
   thread. With `limit_ns` waits as nrm__epoch_wait does. Returns bytes. */
size_t nrm__retired_drain(uint64_t limit_ns);

/* Releases what is done; asks the driver, but closes no epoch, so that what waits
   inside the driver stays, unless no context is active. Returns bytes. */
size_t nrm__retired_release_done(void);

bool nrm__retired_is_empty(void);

/* Bytes on the retired list: of one owner, or of all (NULL). */
size_t nrm__retired_nbytes(const nrm_resource *owner);

/* Every context is gone (driver exchanged): all stamps so far are done, events
   dropped. */
void nrm__epoch_forget_contexts(void);

struct nrm__epoch_counts {
    uint64_t open, done, closed, records, waits, polls;
    unsigned pending;
};
void nrm__epoch_counts(struct nrm__epoch_counts *out);

#endif
