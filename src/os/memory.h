/*
 * Memory from the kernel: mappings, huge pages, growth by moving pages.
 *
 * Sizes are multiples of nrm__page_size(). These functions report with errno codes
 * (0: success), as the caller knows best what the failure means.
 */
#ifndef NRM_OS_MEMORY_H
#define NRM_OS_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

size_t nrm__page_size(void);

/*
 * Maps `nbytes` of zeroed, private, unpopulated memory at `alignment` (a power of two,
 * at least a page).
 */
int nrm__map(size_t nbytes, size_t alignment, void **out);

/* The same from hugetlbfs, in multiples of 2 MiB: reserved, so that touching it cannot
   fail, but not populated. ENOMEM where too few pages are configured. */
int nrm__map_hugetlb(size_t nbytes, void **out);

void nrm__unmap(void *ptr, size_t nbytes);

/* Keeps what is not mapped of the range from being mapped by the kernel's choice:
   nothing can be read or written there. What is mapped stays as it is. */
void nrm__reserve(void *ptr, size_t nbytes);

/*
 * Resizes a mapping of nrm__map, in place or by moving its pages to an address of the
 * same `alignment`. Only for plain memory: registered and managed ranges never move.
 */
int nrm__remap(void *ptr, size_t old_nbytes, size_t new_nbytes, size_t alignment,
               void **out);

/* Asks for transparent huge pages in the range, or refuses them. Advice: no result. */
void nrm__advise_huge_pages(void *ptr, size_t nbytes, bool wanted);

/* Whether a child made by fork has the range, as by default, or not; errno, or 0. Not
   of mappings of devices, which would not be had back. */
int nrm__advise_fork(void *ptr, size_t nbytes, bool wanted);

/* Drops the pages of a plain range: it reads as zero afterwards. */
int nrm__discard(void *ptr, size_t nbytes);

/* Whether a page of a mapping is in memory: one that was never touched is not. */
bool nrm__is_resident(void *page);

/* Whether anything is mapped at an address. */
bool nrm__is_mapped(uintptr_t address);

/* Bytes of the pages of any range that are not in memory, as far as the kernel
   tells. */
size_t nrm__absent_nbytes(const void *ptr, size_t nbytes);

/* Whether the kernel can make transparent huge pages at all (asked once). */
bool nrm__has_transparent_huge_pages(void);

/* Size of the pages behind `ptr`, from the kernel's own tables; 0 when unknown. */
size_t nrm__mapping_page_size(const void *ptr);

#endif
