/* Blocks of a HostMemoryResource: the base of test_host.c and test_host_resize.c. */
#ifndef NRM_TESTS_HOST_BLOCKS_H
#define NRM_TESTS_HOST_BLOCKS_H

#include <sys/mman.h>

#include "check.h"
#include "core/ops.h"
#include "nrm/sources.h"
#include "os/memory.h"

static inline nrm_resource *
create_with(nrm_huge_pages huge_pages)
{
    nrm_host_options options = NRM_OPTIONS(nrm_host_options);
    nrm_resource *mr = NULL;
    options.huge_pages = huge_pages;
    CHECK_OK(nrm_host_create(&options, &mr));
    return mr;
}

static inline nrm_resource *
create(void)
{
    nrm_resource *mr = NULL;
    CHECK_OK(nrm_host_create(NULL, &mr));
    return mr;
}

static inline void
check_all(nrm_resource *mr)
{
    mr->ops->check(mr);
}

static inline char *
allocate(nrm_resource *mr, size_t nbytes)
{
    void *ptr = NULL;
    CHECK_OK(nrm_resource_allocate(mr, nbytes, 0, NULL, &ptr));
    return ptr;
}

static inline char *
reallocate(nrm_resource *mr, char *ptr, size_t nbytes)
{
    void *moved = NULL;
    CHECK_OK(nrm_resource_reallocate(mr, ptr, nbytes, 0, NULL, &moved));
    return moved;
}

static inline void
deallocate(nrm_resource *mr, void *ptr)
{
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
}

static inline int64_t
reserved_nbytes(nrm_resource *mr)
{
    nrm_statistics statistics = {0};
    CHECK_OK(nrm_resource_statistics(mr, &statistics));
    return statistics.reserved_bytes;
}

static inline size_t
capacity_of(const void *ptr)
{
    nrm_block_info info;
    if (!CHECK_EQ(nrm_block_find(ptr, &info), NRM_OK)) {
        return 0;
    }
    nrm_resource_release(info.resource);
    return info.capacity;
}

/* The number of pages of a block that are present. */
static inline size_t
count_present(const void *ptr, size_t nbytes)
{
    static unsigned char present[32768];
    size_t n_pages = (nbytes + nrm__page_size() - 1) / nrm__page_size();
    size_t n = 0;
    if (n_pages > sizeof present ||
        mincore((void *)(uintptr_t)ptr, nbytes, present) != 0) {
        return SIZE_MAX;
    }
    for (size_t i = 0; i < n_pages; i++) {
        n += present[i] & 1;
    }
    return n;
}

static inline void
write_numbers(char *ptr, size_t nbytes)
{
    for (size_t i = 0; i + 8 <= nbytes; i += 512) {
        memcpy(ptr + i, &i, sizeof i);
    }
}

static inline bool
has_numbers(const char *ptr, size_t nbytes)
{
    for (size_t i = 0; i + 8 <= nbytes; i += 512) {
        if (memcmp(ptr + i, &i, sizeof i) != 0) {
            return false;
        }
    }
    return true;
}

#endif
