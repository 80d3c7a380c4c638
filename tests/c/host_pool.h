/* Pools of ordinary memory, and which of its pages are present: the base of test_pool.c
   and test_pool_zeros.c. */
#ifndef NRM_TESTS_HOST_POOL_H
#define NRM_TESTS_HOST_POOL_H

#include "base/bits.h"
#include "fixtures.h"
#include "os/memory.h"

/* Pages of 64 that lie from `from` to `to` of such a block and are present. */
static inline size_t
count_present(const char *ptr, size_t from, size_t to)
{
    size_t n = 0;
    for (size_t i = 0; i < 64; i++) {
        uintptr_t at = (uintptr_t)ptr + from + (to - from) / 64 * i;
        n += nrm__is_resident((void *)nrm__align_down(at, nrm__page_size()));
    }
    return n;
}

#endif
