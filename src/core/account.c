/*
 * Booking from outside of a cache. Once this thread has announced itself nobody is
 * alone, or it is this thread, which is not inside: either way it exchanges.
 */
#include "core/account.h"

bool
nrm__account_book(struct nrm__account *account, size_t nbytes, size_t *out_allocated)
{
    size_t allocated = atomic_load_explicit(&account->allocated, memory_order_relaxed);
    nrm__cache_announce();
    do {
        if (nbytes > account->limit - allocated) {
            *out_allocated = allocated;
            return false;
        }
    } while (!atomic_compare_exchange_weak_explicit(
        &account->allocated, &allocated, allocated + nbytes, memory_order_acquire,
        memory_order_relaxed));
    return true;
}

void
nrm__account_book_out(struct nrm__account *account, size_t nbytes)
{
    size_t allocated = atomic_load_explicit(&account->allocated, memory_order_relaxed);
    nrm__cache_announce();
    while (!atomic_compare_exchange_weak_explicit(
        &account->allocated, &allocated, allocated - nrm__min(allocated, nbytes),
        memory_order_release, memory_order_relaxed))
        ;
}
