/*
 * Known uses of live blocks, by the address that a block starts at; see nrm/uses.h.
 *
 * A use is a tag of stream order (core/order.h): a value that stays true when its
 * stream ends, and that costs no call of the driver for streams that stay. A block that
 * is given back takes its uses with it (nrm__known_uses_take) to the retired list,
 * where it waits for them. Under the default policy only those are waited for that the
 * context epochs do not cover, as each block waits for its epoch as well: so the usual
 * free takes the usual way.
 */
#ifndef NRM_CORE_KNOWN_USES_H
#define NRM_CORE_KNOWN_USES_H

#include "core/ops.h"
#include "core/order.h"
#include "cuda/place.h"
#include "nrm/pools.h"
#include "nrm/uses.h"

struct nrm__order;

struct nrm__use {
    struct nrm__use *next;
    uintptr_t start; /* of the block */
    struct nrm__order_tag tag;
    uintptr_t handle; /* a name: the stream may be gone */
    bool is_covered;  /* by the context epochs */
    bool is_foreign;  /* in a context that is not primary */
};

/* False until the first use is noted. */
extern atomic_bool nrm__known_uses_any;

/* For constructors of pools: notes the policy, or the option's, and returns it. */
nrm_reuse nrm__reuse_set(nrm_resource *mr, nrm_reuse reuse);

/* Notes a use of a live block, in place of an earlier one of the same stream. */
NRM_NODISCARD nrm_status nrm__known_use_note(const struct nrm__use *use);

/* The same for a stream that is known to be in a primary context: stamps in this call
   with what its slot says. A block whose use by the stream was noted before is live and
   tracked, as a use goes with its block; of any other address `is_tracked` says whether
   such a block starts there. Waits for nobody. False: it cannot be done without memory
   or at once, or there are other uses. */
bool nrm__known_use_note_quickly(uintptr_t start, const struct nrm__order *order,
                                 struct nrm__order_tag tag, uintptr_t handle,
                                 bool (*is_tracked)(uintptr_t start));

/* nrm_record_use of a stream of our own, where nothing has to be asked or looked for;
   false: not so. Never blocks, so the stream may be borrowed. */
bool nrm__record_use_quickly(const void *ptr, const nrm_stream *stream);

/* Those of the block that starts there which are not known to be done, newest first, at
   most `capacity` of them; how many there are. */
size_t nrm__known_uses_list(uintptr_t start, struct nrm__use *out, size_t capacity);

/* Those of a claimed block that it has to wait for, in a list that the caller owns;
   NULL: none. The others are forgotten. Calls no driver, takes no lock that is held for
   long. */
struct nrm__use *nrm__known_uses_take(const struct nrm__block *block);

/* Whether a block would have to wait for some if it were given back now. */
bool nrm__known_uses_has(const struct nrm__block *block);

/* A few atomic loads for each. */
bool nrm__uses_are_done(const struct nrm__use *uses);

/* The first that is not done; NRM__ORDER_DONE: all are. */
struct nrm__order_tag nrm__uses_first_pending(const struct nrm__use *uses);

/* Asks the driver about a tag of a use. In the background thread it records nothing. */
void nrm__use_poll(struct nrm__order_tag tag);

/* NULL is fine. */
void nrm__uses_drop(struct nrm__use *uses);

/* How many are not known to be done, of the block that starts there. Asks nobody. */
unsigned nrm__known_uses_count(const void *start);

/* A tag of what was submitted to a stream in a context that is not primary. */
nrm_status nrm__foreign_use_note(const struct nrm__cuda_place *at, uintptr_t handle,
                                 struct nrm__order_tag *out);

/* Closes the uses in contexts that are not primary and whose work is done. Queries
   only. */
void nrm__foreign_uses_reap(void);

#endif
