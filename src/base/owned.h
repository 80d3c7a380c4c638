/*
 * Counts that one thread writes and any other may read: additions without an atomic
 * read-modify-write. On x86-64 each is one instruction, which compilers do not make of
 * an atomic load, an addition and an atomic store; ThreadSanitizer has to see these.
 */
#ifndef NRM_BASE_OWNED_H
#define NRM_BASE_OWNED_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/fence.h"

#if defined(__x86_64__) && !defined(NRM__UNDER_TSAN)
#define NRM__OWNED_IN_PLACE 1
#endif

/* Whoever gets what was set sees all that its owner had set before. */
static inline int64_t
nrm__owned_get(const atomic_int_least64_t *count)
{
    return atomic_load_explicit(count, memory_order_acquire);
}

static inline void
nrm__owned_set(atomic_int_least64_t *count, int64_t n)
{
    atomic_store_explicit(count, n, memory_order_release);
}

static inline void
nrm__owned_add(atomic_int_least64_t *count, int64_t n)
{
#ifdef NRM__OWNED_IN_PLACE
    __asm__("addq %1, %0" : "+m"(*(int64_t *)(void *)count) : "re"(n) : "cc");
#else
    n += atomic_load_explicit(count, memory_order_relaxed);
    atomic_store_explicit(count, n, memory_order_relaxed);
#endif
}

/* True: it is below 0 now. */
static inline bool
nrm__owned_subtract(atomic_int_least64_t *count, int64_t n)
{
#ifdef NRM__OWNED_IN_PLACE
    bool is_negative;
    __asm__("subq %2, %0"
            : "+m"(*(int64_t *)(void *)count), "=@ccs"(is_negative)
            : "re"(n)
            : "cc");
    return is_negative;
#else
    int64_t left = atomic_load_explicit(count, memory_order_relaxed) - n;
    atomic_store_explicit(count, left, memory_order_relaxed);
    return left < 0;
#endif
}

#endif
