/*
 * What a fork leaves out of the child: page-locked memory that the child has no use
 * for.
 *
 * A fork copies the pages that a driver holds at once, instead of when they are written
 * to. So who knows of idle page-locked memory offers it, and the child is made without
 * it. The parent has it back before any lock of ours is dropped; in the child its
 * addresses can be neither read nor written, and nobody else gets them.
 */
#ifndef NRM_CORE_LEFT_OUT_H
#define NRM_CORE_LEFT_OUT_H

#include "base/list.h"
#include "core/ops.h"

/* What the fork in progress leaves out. */
enum nrm__left_out {
    NRM__LEFT_OUT_NOTHING, /* nothing is registered, or no fork is in progress */
    NRM__LEFT_OUT_IDLE,    /* what nobody uses */
    NRM__LEFT_OUT_ALL,     /* live blocks too: the option fork is "dontfork" */
};

/* ---- for hooks of a fork, of the ranks POOL to BLOCK_MAP ---- */

/* The same in all hooks of a fork, on both sides. */
enum nrm__left_out nrm__left_out_scope(void);

/* In a prepare hook: whole pages of the range are left out if they are many, and not
   too many others are larger. It is private and registered, a lock that stays held over
   the fork keeps it as it is, and no byte of it was offered before. */
void nrm__left_out_offer(uintptr_t start, size_t nbytes);

/* Whether a block, or the one that it was cut from, is memory that we mapped and the
   driver has registered. */
bool nrm__block_is_registered(const struct nrm__block *block);

/* ---- for the source of such memory ---- */

void nrm__registered_add(size_t nbytes);
void nrm__registered_subtract(size_t nbytes);

/* Memory that it is about to register or to unlock, which nobody else knows of just
   then. */
struct nrm__in_hand {
    struct nrm__link link;
    uintptr_t start;
    size_t nbytes;
};

/* Such memory is left out meanwhile. The driver is called in between; nothing is
   unmapped. */
void nrm__in_hand_begin(struct nrm__in_hand *in_hand, const void *ptr, size_t nbytes);
void nrm__in_hand_end(struct nrm__in_hand *in_hand);

/* ---- for who wants to know before ---- */

/* Bytes that a fork would copy now: registered ones that are not left out, about, and
   those that pins have locked. No lock of ours is held. */
size_t nrm__left_out_copied_nbytes(void);

#endif
