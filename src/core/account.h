/*
 * The account of a limit: bytes are booked before they are asked for, and booked out
 * when they are back or were not to be had. Booking compares and exchanges: a request
 * that does not fit never stands in the account, where a smaller one would meet it and
 * fail as well. While one thread has the only cache it books without an exchange inside
 * it, as nobody else books then: others announce themselves first, as before a claim.
 */
#ifndef NRM_CORE_ACCOUNT_H
#define NRM_CORE_ACCOUNT_H

#include "base/bits.h"
#include "core/cache.h"
#include "core/ops.h"

/* What a block counts as. No overflow: a request has at most SIZE_MAX / 2 bytes. */
static inline size_t
nrm__account_counted(const struct nrm__account *account, size_t nbytes)
{
    return nrm__align_up(nbytes, account->alignment);
}

static inline bool
nrm__account_is_alone(void)
{
    return atomic_load_explicit(&nrm__cache_common.is_alone, memory_order_acquire);
}

/* Inside a cache. False: it does not fit, and `out_allocated` says what was in the way.
   Pairs with book_out: who finds room finds the memory that made it in the upstream
   too. */
static inline bool
nrm__account_book_inside(struct nrm__account *account, size_t nbytes,
                         size_t *out_allocated)
{
    size_t allocated = atomic_load_explicit(&account->allocated, memory_order_relaxed);
    bool is_alone = nrm__account_is_alone();
    do {
        if (nbytes > account->limit - allocated) {
            *out_allocated = allocated;
            return false;
        }
        if (__builtin_expect(is_alone, 1)) {
            atomic_store_explicit(&account->allocated, allocated + nbytes,
                                  memory_order_relaxed);
            return true;
        }
    } while (!atomic_compare_exchange_weak_explicit(
        &account->allocated, &allocated, allocated + nbytes, memory_order_acquire,
        memory_order_relaxed));
    return true;
}

/* A block that did not come through here, but goes back through here, was never booked:
   the account ends at 0. */
static inline void
nrm__account_book_out_inside(struct nrm__account *account, size_t nbytes)
{
    size_t allocated = atomic_load_explicit(&account->allocated, memory_order_relaxed);
    if (__builtin_expect(nrm__account_is_alone(), 1)) {
        atomic_store_explicit(&account->allocated,
                              allocated - nrm__min(allocated, nbytes),
                              memory_order_relaxed);
        return;
    }
    while (!atomic_compare_exchange_weak_explicit(
        &account->allocated, &allocated, allocated - nrm__min(allocated, nbytes),
        memory_order_release, memory_order_relaxed))
        ;
}

/* The same from outside, no lock held. */
bool nrm__account_book(struct nrm__account *account, size_t nbytes,
                       size_t *out_allocated);
void nrm__account_book_out(struct nrm__account *account, size_t nbytes);

#endif
