/* A full fence; nothing under ThreadSanitizer, which does not know it and orders by the
   sequentially consistent operations beside it. */
#ifndef NRM_BASE_FENCE_H
#define NRM_BASE_FENCE_H

#include <stdatomic.h>

#if defined(__SANITIZE_THREAD__)
#define NRM__UNDER_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define NRM__UNDER_TSAN 1
#endif
#endif

static inline void
nrm__full_fence(void)
{
#ifndef NRM__UNDER_TSAN
    atomic_thread_fence(memory_order_seq_cst);
#endif
}

#endif
