/*
 * Mappings. Alignment is got by reserving more address space than needed without
 * rights, cutting the ends off and only then giving rights to what is left: the
 * kernel's check whether memory can be had sees the size that was asked for, so an
 * impossible request fails here and not at the first touch.
 */
#include "os/memory.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef NRM_VALGRIND
#include <valgrind/memcheck.h>
#else
#define VALGRIND_MAKE_MEM_DEFINED(ptr, nbytes) 0
#endif

#include "base/assert.h"
#include "base/bits.h"
#include "os/lines.h"

#ifndef MAP_HUGE_SHIFT
#define MAP_HUGE_SHIFT 26
#endif
#define HUGETLB_2MIB (21 << MAP_HUGE_SHIFT)

#define RIGHTS (PROT_READ | PROT_WRITE)
#define PLAIN (MAP_PRIVATE | MAP_ANONYMOUS)

size_t
nrm__page_size(void)
{
    static atomic_size_t cached;
    size_t nbytes = atomic_load_explicit(&cached, memory_order_relaxed);
    if (nbytes == 0) {
        nbytes = (size_t)sysconf(_SC_PAGESIZE);
        atomic_store_explicit(&cached, nbytes, memory_order_relaxed);
    }
    return nbytes;
}

/* ---- mapping ---- */

/* Of a call that asked for whole pages, and some. If it was not valid there are not so
   many addresses: Linux says ENOMEM then, Valgrind does not. */
static int
map_error(void)
{
    return errno == EINVAL ? ENOMEM : errno;
}

/* Address space at `alignment`, without rights, so that no memory is accounted for
   it; not MAP_NORESERVE, which would keep it that way when it gets rights. */
static int
reserve(size_t nbytes, size_t alignment, char **out)
{
    size_t slack = alignment - nrm__page_size();
    if (nbytes > SIZE_MAX - slack) {
        return ENOMEM;
    }
    char *space = mmap(NULL, nbytes + slack, PROT_NONE, PLAIN, -1, 0);
    if (space == MAP_FAILED) {
        return map_error();
    }
    char *ptr = space + (-(uintptr_t)space & (alignment - 1));
    size_t head = (size_t)(ptr - space);
    if (head != 0) {
        (void)munmap(space, head);
    }
    if (slack != head) {
        (void)munmap(ptr + nbytes, slack - head);
    }
    *out = ptr;
    return 0;
}

static int
map_aligned(size_t nbytes, size_t alignment, void **out)
{
    char *ptr;
    int code = reserve(nbytes, alignment, &ptr);
    if (code != 0) {
        return code;
    }
    if (mprotect(ptr, nbytes, RIGHTS) != 0) {
        code = errno;
        nrm__unmap(ptr, nbytes);
        return code;
    }
    *out = ptr;
    return 0;
}

int
nrm__map(size_t nbytes, size_t alignment, void **out)
{
    NRM_DEBUG_ASSERT(nbytes != 0 && nbytes % nrm__page_size() == 0);
    NRM_DEBUG_ASSERT(nrm__is_power_of_two(alignment) && alignment >= nrm__page_size());
    /* Kernels since 6.7 align what is a multiple of 2 MiB to that by themselves. */
    bool may_be_aligned = alignment == nrm__page_size() ||
                          (alignment == NRM__HUGE_PAGE && nbytes % NRM__HUGE_PAGE == 0);
    if (may_be_aligned) {
        void *ptr = mmap(NULL, nbytes, RIGHTS, PLAIN, -1, 0);
        if (ptr == MAP_FAILED) {
            return map_error();
        }
        if (nrm__is_aligned(ptr, alignment)) {
            *out = ptr;
            return 0;
        }
        nrm__unmap(ptr, nbytes);
    }
    return map_aligned(nbytes, alignment, out);
}

int
nrm__map_hugetlb(size_t nbytes, void **out)
{
    NRM_DEBUG_ASSERT(nbytes != 0 && nbytes % NRM__HUGE_PAGE == 0);
    void *ptr = mmap(NULL, nbytes, RIGHTS, PLAIN | MAP_HUGETLB | HUGETLB_2MIB, -1, 0);
    if (ptr == MAP_FAILED) {
        return errno;
    }
    *out = ptr;
    return 0;
}

/* A mapping cannot be cut in two when the process has as many as it may have. Then the
   address space is lost, but at least not the memory. */
void
nrm__unmap(void *ptr, size_t nbytes)
{
    if (munmap(ptr, nbytes) == 0) {
        return;
    }
    NRM_DEBUG_ASSERT(errno == ENOMEM);
    (void)nrm__discard(ptr, nbytes);
}

/* The kernel refuses the whole range when any of it is mapped, so it is tried page by
   page then, in pieces that are halved: a few steps for the few mappings that there can
   be. */
void
nrm__reserve(void *ptr, size_t nbytes)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    void *got = mmap(ptr, nbytes, PROT_NONE, flags, -1, 0);
    if (got == ptr) {
        return;
    }
    if (got != MAP_FAILED) { /* a kernel that does not know the flag */
        (void)munmap(got, nbytes);
        return;
    }
    size_t half = nrm__align_down(nbytes / 2, nrm__page_size());
    if (errno == EEXIST && half != 0) {
        nrm__reserve(ptr, half);
        nrm__reserve((char *)ptr + half, nbytes - half);
    }
}

/* ---- resizing ---- */

/* Whether the kernel would account for so much more memory. A move that it refuses
   half way may have unmapped its target already, so the refusal must come before the
   move. */
static int
check_growth(size_t nbytes)
{
    void *ptr = mmap(NULL, nbytes, RIGHTS, PLAIN, -1, 0);
    if (ptr == MAP_FAILED) {
        return map_error();
    }
    nrm__unmap(ptr, nbytes);
    return 0;
}

static int
move(void *ptr, size_t old_nbytes, size_t new_nbytes, size_t alignment, void **out)
{
    char *target;
    int code = check_growth(new_nbytes - old_nbytes);
    if (code == 0) {
        code = reserve(new_nbytes, alignment, &target);
    }
    if (code != 0) {
        return code;
    }
    void *moved =
        mremap(ptr, old_nbytes, new_nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, target);
    if (moved == MAP_FAILED) {
        /* The target is left alone: where the kernel has unmapped it already, another
           thread may have mapped something there. */
        return errno;
    }
    /* Valgrind looks its rights up in a segment that is not there any more. */
    (void)VALGRIND_MAKE_MEM_DEFINED((char *)moved + old_nbytes,
                                    new_nbytes - old_nbytes);
    *out = moved;
    return 0;
}

int
nrm__remap(void *ptr, size_t old_nbytes, size_t new_nbytes, size_t alignment,
           void **out)
{
    NRM_DEBUG_ASSERT(new_nbytes != 0 &&
                     (old_nbytes | new_nbytes) % nrm__page_size() == 0);
    bool is_aligned = nrm__is_aligned(ptr, alignment);
    if (is_aligned && mremap(ptr, old_nbytes, new_nbytes, 0) == ptr) {
        *out = ptr;
        return 0;
    }
    if (new_nbytes <= old_nbytes) {
        return is_aligned ? errno : EINVAL;
    }
    return move(ptr, old_nbytes, new_nbytes, alignment, out);
}

/* ---- pages ---- */

void
nrm__advise_huge_pages(void *ptr, size_t nbytes, bool wanted)
{
    (void)madvise(ptr, nbytes, wanted ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
}

int
nrm__advise_fork(void *ptr, size_t nbytes, bool wanted)
{
    return madvise(ptr, nbytes, wanted ? MADV_DOFORK : MADV_DONTFORK) == 0 ? 0 : errno;
}

int
nrm__discard(void *ptr, size_t nbytes)
{
    return madvise(ptr, nbytes, MADV_DONTNEED) == 0 ? 0 : errno;
}

bool
nrm__is_resident(void *page)
{
    unsigned char in_memory = 0;
    return mincore(page, nrm__page_size(), &in_memory) == 0 && (in_memory & 1) != 0;
}

bool
nrm__is_mapped(uintptr_t address)
{
    unsigned char in_memory;
    size_t page = nrm__page_size();
    return mincore((void *)nrm__align_down(address, page), page, &in_memory) == 0;
}

size_t
nrm__absent_nbytes(const void *ptr, size_t nbytes)
{
    enum { WINDOW = 4096 }; /* pages asked about at a time */
    unsigned char in_memory[WINDOW];
    size_t page = nrm__page_size(), n_absent = 0;
    uintptr_t at = nrm__align_down((uintptr_t)ptr, page);
    uintptr_t end = nrm__align_up((uintptr_t)ptr + nbytes, page);
    for (; at < end; at += WINDOW * page) {
        size_t n = nrm__min((end - at) / page, (size_t)WINDOW);
        if (mincore((void *)at, n * page, in_memory) != 0) {
            break;
        }
        for (size_t i = 0; i < n; i++) {
            n_absent += (in_memory[i] & 1) == 0;
        }
    }
    return n_absent * page;
}

bool
nrm__has_transparent_huge_pages(void)
{
    static atomic_int cached; /* 0: not asked yet, 1: no, 2: yes */
    int known = atomic_load_explicit(&cached, memory_order_relaxed);
    if (known == 0) {
        char line[128];
        bool has = nrm__file_read_line("/sys/kernel/mm/transparent_hugepage/enabled",
                                       line, sizeof line) &&
                   strstr(line, "[never]") == NULL;
        known = has ? 2 : 1;
        atomic_store_explicit(&cached, known, memory_order_relaxed);
    }
    return known == 2;
}

/* "55d0a0000000-55d0a0021000 rw-p ...": the first line of a mapping in smaps. */
static bool
read_range(const char *line, uintptr_t *out_start, uintptr_t *out_end)
{
    char *at;
    unsigned long long start = strtoull(line, &at, 16);
    if (at == line || *at != '-') {
        return false;
    }
    const char *second = at + 1;
    unsigned long long end = strtoull(second, &at, 16);
    if (at == second || *at != ' ') {
        return false;
    }
    *out_start = (uintptr_t)start;
    *out_end = (uintptr_t)end;
    return true;
}

/* The kernel tells the page size of a whole mapping, and how much of what is
   resident is in transparent huge pages: they are what counts when they are the
   greater part. */
static size_t
read_page_size(struct nrm__lines *smaps)
{
    uint64_t kernel_page = 0;
    uint64_t resident = 0;
    uint64_t huge;
    uintptr_t start, end;
    const char *line;
    while ((line = nrm__lines_next(smaps)) != NULL && !read_range(line, &start, &end)) {
        if (nrm__line_read_number(line, "AnonHugePages", &huge)) {
            bool mostly_huge = huge > resident / 2;
            return mostly_huge ? NRM__HUGE_PAGE : (size_t)kernel_page * 1024;
        }
        (void)(nrm__line_read_number(line, "KernelPageSize", &kernel_page) ||
               nrm__line_read_number(line, "Rss", &resident));
    }
    return (size_t)kernel_page * 1024;
}

size_t
nrm__mapping_page_size(const void *ptr)
{
    struct nrm__lines smaps;
    uintptr_t start, end;
    size_t nbytes = 0;
    const char *line;
    if (!nrm__lines_open(&smaps, "/proc/self/smaps")) {
        return 0;
    }
    while (nbytes == 0 && (line = nrm__lines_next(&smaps)) != NULL) {
        if (read_range(line, &start, &end) && (uintptr_t)ptr >= start &&
            (uintptr_t)ptr < end) {
            nbytes = read_page_size(&smaps);
        }
    }
    nrm__lines_close(&smaps);
    return nbytes;
}
