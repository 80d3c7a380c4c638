/*
 * A memory barrier in every thread of the process at the cost of the thread that asks
 * for it (membarrier): the others get by without fences.
 */
#ifndef NRM_OS_BARRIER_H
#define NRM_OS_BARRIER_H

#include <stdbool.h>

/* False: the kernel has none, or must not be asked (under ThreadSanitizer, which does
   not know it). */
bool nrm__process_barrier_is_known(void);

/* When it returns, each thread has passed a full barrier since the call. */
void nrm__process_barrier(void);

#endif
