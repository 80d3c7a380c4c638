/*
 * First touch by several threads: the kernel zeroes pages in the thread that touches
 * them, so one thread per core fills a new range several times faster than one.
 */
#ifndef NRM_OS_TOUCH_H
#define NRM_OS_TOUCH_H

#include <stdbool.h>
#include <stddef.h>

/*
 * Makes every page of a private, writable range present, keeping what is in it. Uses up
 * to `n_threads` threads (0: one for each core this process may use, at most 16), fewer
 * for small ranges. Look first what the machine can give (os/system.h): a page that it
 * does not have ends the process. 0.
 */
int nrm__touch(void *ptr, size_t nbytes, int n_threads);

/*
 * The same by the kernel, which answers ENOMEM or EFAULT where a write would end the
 * process: for ranges that may be incomplete or of hugetlbfs. Slower.
 */
int nrm__populate(void *ptr, size_t nbytes, int n_threads);

/*
 * For memory of others: the kernel makes the pages present, for reading only if not
 * `for_writing`, and nothing is ever written. It may do less, as on a kernel that
 * cannot (before 5.14): whoever needs the pages takes the rest.
 */
void nrm__prefault(void *ptr, size_t nbytes, int n_threads, bool for_writing);

#endif
