/*
 * Stream order: when device memory that was freed on one stream may be used again, and
 * by whom.
 *
 * A freed block carries a tag {stream, count}. The stream itself may use the block
 * again at once, since its work runs in order. Everybody else may when the tag is done,
 * or on a stream that was made to wait behind it. Each stream keeps three numbers: the
 * count that a free is stamped with, the latest that is recorded in an event, and the
 * latest that is known to be done. Whoever asks the driver about a stream takes the
 * count first and leaves the next one behind, so that what is freed meanwhile is not
 * covered by the answer.
 *
 * A tag is a value. It holds no reference and stays true for ever: a stream that dies
 * leaves a last event, and its number is not used again before that is done.
 *
 * A stream of others is known by the driver's number of it, asked in each call that is
 * given its handle (core/order_others.c). An event is recorded on it in such calls
 * only; what is let go of at another time, and needed by somebody else, waits for its
 * whole context.
 *
 * Work that no stream of ours stands for is ordered by the context epochs
 * (core/uses.h): frees by the host, on the per-thread stream of another thread, and
 * wherever an event cannot be had. Where the program has contexts of its own, which
 * epochs do not see, a slot for everything takes their place (core/order_record.h).
 */
#ifndef NRM_CORE_ORDER_H
#define NRM_CORE_ORDER_H

#include <stdbool.h>
#include <stdint.h>

#include "nrm/status.h"
#include "nrm/stream.h"

struct nrm__order_tag {
    uint32_t stream;     /* 0: done; 1: `count` is an epoch's stamp; else a slot */
    uint32_t generation; /* of the slot: another one now means done */
    uint64_t count;
};

#define NRM__ORDER_DONE ((struct nrm__order_tag){0, 0, 0})
/* Never done: of memory that something unknown may use for ever. */
#define NRM__ORDER_NEVER ((struct nrm__order_tag){1, 0, UINT64_MAX})

/*
 * The tag of a block that is freed on `stream` now; NULL: by the host. `device` is that
 * of the memory: handles 0, 1 and 2 mean a stream of its context. Makes no driver call
 * for streams that are kept alive (nrm__stream_stays), and may be called under a pool's
 * lock then; the fence in it costs more than the rest, so stamp once for blocks that
 * are given back together. On a stream of others an event is recorded here, while the
 * caller still vouches for the handle (detached, no lock held): it covers whatever
 * bears a tag of the stream so far. Cannot fail.
 */
struct nrm__order_tag nrm__order_stamp(nrm_stream *stream, int device);

/*
 * The name of a slot in one life of it: of blocks that a thread keeps for the stream
 * that freed them (core/cache.h), which bear no tag yet. 0 names none.
 * nrm__order_key_of (core/order_slots.h) finds that of a stream.
 */
static inline uint64_t
nrm__order_key(struct nrm__order_tag tag)
{
    return (uint64_t)tag.stream << 32 | tag.generation;
}

/*
 * The tag of blocks that were freed on the stream of a key at some time before now, by
 * this thread or by one that has handed them over since. The stream may have ended
 * meanwhile: then its last event covers them. Calls no driver, so another thread's
 * per-thread stream may be named too. No lock of rank ORDER or above is held; stamp
 * once for many blocks. `out_origin`: see nrm__stream_origin.
 */
struct nrm__order_tag nrm__order_stamp_key(uint64_t key, uintptr_t *out_origin);

/* A few atomic loads. */
bool nrm__order_is_done(struct nrm__order_tag tag);

/* Whether the block may be handed to `stream` (NULL: the host) without a wait: it was
   freed on it, or is done. A few atomic loads. */
bool nrm__order_is_free(struct nrm__order_tag tag, const nrm_stream *stream,
                        int device);

/* Records an event on a stream of others, which the caller was given in this call, for
   what bears its tags and has none: blocks that a thread has let go of. Nothing is to
   be done for others. Detaches, no lock held. */
void nrm__order_note(const nrm_stream *stream);

/* The slot that tags of this stream name, with no count; false: it has none (yet), so
   that nothing free is its own. A few atomic loads; for a stream of others, two calls
   that do not block (nrm__cuda_stream_id), as in nrm__order_is_free and
   nrm__order_adopt. */
bool nrm__order_slot_of(const nrm_stream *stream, int device,
                        struct nrm__order_tag *out);

/* Asks the driver; true: done. What nobody has recorded yet is recorded, so that a
   stream which is never idle gives its blocks back too. Never waits. No lock held. */
bool nrm__order_poll(struct nrm__order_tag tag);

/*
 * Makes the work that is submitted to `stream` from now on come after the tag:
 * afterwards the block may be handed to it, and what is left of the block is stamped
 * anew with nrm__order_stamp. Records if needed. NRM_NOT_FOUND (not recorded): it
 * cannot be ordered now (a capture, too many events): take another block.
 * NRM_INVALID_VALUE: the host, which waits for nothing, or the per-thread stream of
 * another thread. No lock held.
 */
NRM_NODISCARD nrm_status nrm__order_adopt(struct nrm__order_tag tag, nrm_stream *stream,
                                          int device);

/* The tag of two neighbours as one block; false: they must stay two. */
bool nrm__order_merge(struct nrm__order_tag a, struct nrm__order_tag b,
                      struct nrm__order_tag *out);

/*
 * For core/capture.c: a tag of its own kind, of what a graph may use. It is done when
 * it is closed, by whoever learns that the graph is gone; no stream can wait for it,
 * and the driver is not asked about it. False: no memory for it.
 */
bool nrm__order_open(struct nrm__order_tag *out);
void nrm__order_close(struct nrm__order_tag tag);

/* Whether the slot of a tag (`tag.stream`) is of that kind. A few atomic loads. */
bool nrm__order_is_captured(uint32_t stream);

/* For core/stream.c: the stream's last reference is gone and its handle still good.
   Records, so a reference to a stream that blocks were freed on is dropped with no lock
   held. */
void nrm__order_retire(nrm_stream *stream);

/* Every context is over, and so is all work: every tag given so far is done. */
void nrm__order_forget_contexts(void);

struct nrm__order_counts {
    uint64_t slots;   /* made so far */
    uint64_t in_use;  /* by a stream that lives */
    uint64_t retired; /* whose last event is not known to be done */
    uint64_t events;  /* kept */
};
void nrm__order_counts(struct nrm__order_counts *out);

#endif
