/*
 * First touch by several threads: the kernel zeroes pages in the thread that touches
 * them, so one thread per core fills a new range several times faster than one.
 */
#ifndef NRM_OS_TOUCH_H
#define NRM_OS_TOUCH_H

#include <stddef.h>

/*
 * Makes every page of a private, writable range present, keeping what is in it. Uses up
 * to `n_threads` threads (0: one for each core this process may use, at most 16), fewer
 * for small ranges. 0, or ENOMEM/EFAULT... when the kernel refused.
 */
int nrm__touch(void *ptr, size_t nbytes, int n_threads);

#endif
