/* What the addresses of a process allow, asked beforehand: Valgrind has fewer than
   Linux. */
#ifndef ADDRESSES_H
#define ADDRESSES_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/mman.h>

/* Whether so many can be reserved at once; under Valgrind less than 64 GiB. */
static inline bool
can_reserve(size_t nbytes)
{
    void *start = mmap(NULL, nbytes, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return start != MAP_FAILED && munmap(start, nbytes) == 0;
}

#endif
