/* HostMemoryResource: how blocks grow and shrink. */
#include <errno.h>
#include <sys/mman.h>

#include "base/bits.h"
#include "check.h"
#include "host_blocks.h"
#include "nrm/sources.h"
#include "os/memory.h"
#include "os/system.h"

static const struct {
    const char *name;
    size_t from, to;
} resizes[] = {
    {"cell, in place", 500, 510},
    {"cell, to half", 500, 260},
    {"cell to cell", 500, 5000},
    {"cell down", 5000, 50},
    {"cell to mapping", 5000, 50000},
    {"mapping to cell", 50000, 5000},
    {"mapping by a byte", 49152, 49153},
    {"mapping up", 50000, 3000000},
    {"into huge pages", 3000000, 30000000},
    {"huge up", 16000000, 64000000},
    {"huge down", 64000000, 16000000},
    {"huge to small pages", 64000000, 100000},
    {"huge to a cell", 64000000, 10},
    {"same", 100000, 100000},
};

TEST_EACH(a_resize_keeps_what_both_have, resizes)
{
    static const nrm_huge_pages modes[] = {NRM_HUGE_PAGES_AUTO, NRM_HUGE_PAGES_NEVER,
                                           NRM_HUGE_PAGES_ALWAYS};
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        nrm_resource *mr = create_with(modes[i]);
        size_t kept = nrm__min(row->from, row->to);
        char *ptr = allocate(mr, row->from);
        write_numbers(ptr, row->from);
        ptr = reallocate(mr, ptr, row->to);
        CHECK_ALIGNED(ptr, 64);
        CHECK(has_numbers(ptr, kept));
        CHECK_GE(capacity_of(ptr), row->to);
        write_numbers(ptr, row->to);
        CHECK(has_numbers(ptr, row->to));
        check_all(mr);
        deallocate(mr, ptr);
        CHECK_LE(reserved_nbytes(mr), (int64_t)(2 * NRM__MIB));
        nrm_resource_release(mr);
    }
}

TEST(shrinking_gives_whole_pages_back)
{
    nrm_resource *mr = create();
    char *ptr = allocate(mr, 64 * NRM__MIB);
    memset(ptr, 1, 64 * NRM__MIB);
    char *smaller = reallocate(mr, ptr, 16 * NRM__MIB);
    CHECK_EQ(smaller, ptr);
    CHECK_EQ(reserved_nbytes(mr), (int64_t)(16 * NRM__MIB));
    CHECK_EQ(count_present(ptr + 16 * NRM__MIB, nrm__page_size()),
             SIZE_MAX); /* unmapped */
    smaller = reallocate(mr, ptr, 10000);
    CHECK_EQ(smaller, ptr);
    CHECK_EQ(reserved_nbytes(mr), 12288);
    deallocate(mr, ptr);
    nrm_resource_release(mr);
}

TEST(big_blocks_grow_by_moving_pages_and_stay_huge)
{
    nrm_resource *mr = create();
    size_t nbytes = 32 * NRM__MIB;
    char *ptr = allocate(mr, nbytes);
    char *behind = allocate(mr, nbytes); /* keeps it from growing in place, perhaps */
    memset(ptr, 5, nbytes);
    ptr = reallocate(mr, ptr, 8 * nbytes);
    CHECK_EQ(count_present(ptr, nbytes), nbytes / nrm__page_size());
    /* a copy would have touched no more, but here nothing was copied and nothing
       split */
    CHECK_EQ(count_present(ptr + nbytes, 2 * nbytes), 0u);
    if (nrm__has_transparent_huge_pages()) {
        CHECK_ALIGNED(ptr, NRM__HUGE_PAGE);
        CHECK_EQ(nrm__mapping_page_size(ptr), NRM__HUGE_PAGE);
    }
    deallocate(mr, behind);
    deallocate(mr, ptr);
    nrm_resource_release(mr);
}

/* As NumPy's text reader grows its array: in steps, from nothing. */
TEST(growth_in_small_steps_is_not_quadratic)
{
    nrm_resource *mr = create();
    size_t step = 64 * NRM__KIB;
    size_t total = 256 * NRM__MIB;
    char *ptr = allocate(mr, 1000);
    uint64_t before = nrm__clock_ns();
    size_t n_moves = 0;
    for (size_t nbytes = step; nbytes <= total; nbytes += step) {
        char *grown = reallocate(mr, ptr, nbytes);
        n_moves += grown != ptr;
        ptr = grown;
        ptr[nbytes - step] = (char)(nbytes / step);
        ptr[nbytes - 1] = (char)(nbytes / step);
    }
    uint64_t took = nrm__clock_ns() - before;
    for (size_t nbytes = step; nbytes <= total; nbytes += step) {
        CHECK_EQ(ptr[nbytes - 1], (char)(nbytes / step));
    }
    CHECK_LT(n_moves, 100u);
    CHECK_LE(capacity_of(ptr), total + total / 8 + NRM__HUGE_PAGE);
    ptr = reallocate(mr, ptr, total - 1); /* the slack goes back in the end */
    CHECK_LE(capacity_of(ptr), total);
    NOTE("%zu steps to 256 MiB: %zu moves, %.1f ms", total / step, n_moves,
         (double)took / 1e6);
    deallocate(mr, ptr);
    nrm_resource_release(mr);
}

TEST(a_growth_that_is_refused_leaves_the_block)
{
    static const size_t sizes[] = {100, 100000, 10000000};
    nrm_resource *mr = create();
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        void *moved = NULL;
        char *ptr = allocate(mr, sizes[i]);
        write_numbers(ptr, sizes[i]);
        CHECK_STATUS(nrm_resource_reallocate(mr, ptr, (size_t)1 << 50, 0, NULL, &moved),
                     NRM_OUT_OF_MEMORY);
        CHECK_EQ(moved, NULL);
        CHECK(has_numbers(ptr, sizes[i]));
        deallocate(mr, ptr);
    }
    nrm_resource_release(mr);
}

/* Whether pages of two mappings do not move as the kernel says it; Valgrind says that
   there is no memory. */
static bool
is_split_told(void)
{
    size_t page = nrm__page_size();
    char *ptr = mmap(NULL, 4 * page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    bool is_split = mlock(ptr + page, page) == 0;
    void *moved = mremap(ptr, 2 * page, 2 * NRM__GIB, MREMAP_MAYMOVE);
    bool is_told = is_split && moved == MAP_FAILED && errno == EFAULT;
    munmap(ptr, 4 * page);
    return is_told;
}

/* Somebody else may lock or protect a part of a block: its pages then cannot move as
   one. */
TEST(a_block_whose_mapping_was_split_grows_by_a_copy)
{
    nrm_resource *mr = create();
    size_t nbytes = 8 * NRM__MIB;
    char *ptr = allocate(mr, nbytes);
    write_numbers(ptr, nbytes);
    if (!is_split_told() || mlock(ptr + NRM__MIB, nrm__page_size()) != 0) {
        deallocate(mr, ptr);
        nrm_resource_release(mr);
        SKIP("memory cannot be locked here, or moves all the same");
    }
    ptr = reallocate(mr, ptr, 64 * NRM__MIB);
    CHECK(has_numbers(ptr, nbytes));
    deallocate(mr, ptr);
    CHECK_EQ(reserved_nbytes(mr), 0);
    nrm_resource_release(mr);
}

CHECK_MAIN
