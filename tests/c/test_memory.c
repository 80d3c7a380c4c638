/* Mappings: alignment, growth by moving pages, discarding, page sizes. */

#include "addresses.h"
#include "check.h"

#include <errno.h>
#include <sys/mman.h>

#include "base/bits.h"
#include "os/lines.h"
#include "os/memory.h"

/* How many pages of a range are resident. */
static size_t
count_present(const void *ptr, size_t nbytes)
{
    static unsigned char present[65536];
    size_t n_pages = nbytes / nrm__page_size();
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

static bool
is_mapped(const void *ptr)
{
    unsigned char present;
    return mincore((void *)(uintptr_t)ptr, nrm__page_size(), &present) == 0;
}

static void
write_numbers(void *ptr, size_t nbytes)
{
    size_t *numbers = ptr;
    for (size_t i = 0; i < nbytes / sizeof *numbers; i += 64) {
        numbers[i] = i ^ 0x5aa5;
    }
}

static bool
has_numbers(const void *ptr, size_t nbytes)
{
    const size_t *numbers = ptr;
    for (size_t i = 0; i < nbytes / sizeof *numbers; i += 64) {
        if (numbers[i] != (i ^ 0x5aa5)) {
            return false;
        }
    }
    return true;
}

static bool
is_zero(const void *ptr, size_t nbytes)
{
    const size_t *numbers = ptr;
    for (size_t i = 0; i < nbytes / sizeof *numbers; i++) {
        if (numbers[i] != 0) {
            return false;
        }
    }
    return true;
}

static const struct {
    const char *name;
    size_t n_pages;
    size_t alignment; /* 0: a page */
} shapes[] = {
    {"one page", 1, 0},
    {"pages", 37, 0},
    {"at 64 KiB", 3, 64 * NRM__KIB},
    {"small at 2 MiB", 1, 2 * NRM__MIB},
    {"2 MiB at 2 MiB", 512, 2 * NRM__MIB},
    {"odd at 2 MiB", 1537, 2 * NRM__MIB},
    {"at 1 GiB", 5, NRM__GIB},
    {"at 64 GiB", 5, 64 * NRM__GIB},
};

TEST_EACH(a_mapping_is_aligned_zeroed_and_not_populated, shapes)
{
    size_t nbytes = row->n_pages * nrm__page_size();
    size_t alignment = nrm__max(row->alignment, nrm__page_size());
    void *ptr = NULL;
    if (!can_reserve(nbytes + alignment)) {
        SKIP("there are not so many addresses");
    }
    REQUIRE_EQ(nrm__map(nbytes, alignment, &ptr), 0);
    CHECK_ALIGNED(ptr, alignment);
    CHECK_EQ(count_present(ptr, nbytes), 0u);
    CHECK(is_zero(ptr, nbytes));
    write_numbers(ptr, nbytes);
    CHECK(has_numbers(ptr, nbytes));
    nrm__unmap(ptr, nbytes);
    CHECK(!is_mapped(ptr));
}

TEST(the_ends_that_alignment_cost_are_given_back)
{
    void *ptr = NULL;
    size_t page = nrm__page_size();
    REQUIRE_EQ(nrm__map(page, 4 * NRM__GIB, &ptr), 0);
    CHECK(!is_mapped((char *)ptr - page));
    CHECK(!is_mapped((char *)ptr + page));
    nrm__unmap(ptr, page);
}

/* Whether the kernel refuses what is obviously more than there is. */
static bool
kernel_counts_memory(void)
{
    uint64_t mode = 0;
    return nrm__file_read_number("/proc/sys/vm/overcommit_memory", &mode) && mode != 1;
}

TEST(what_cannot_be_had_fails_at_once)
{
    void *ptr = NULL;
    CHECK_EQ(nrm__map((size_t)1 << 50, nrm__page_size(), &ptr), ENOMEM);
    CHECK_EQ(nrm__map((size_t)1 << 50, NRM__HUGE_PAGE, &ptr), ENOMEM);
    if (kernel_counts_memory()) {
        CHECK_EQ(nrm__map((size_t)1 << 45, nrm__page_size(), &ptr), ENOMEM);
        CHECK_EQ(nrm__map((size_t)1 << 45, NRM__GIB, &ptr), ENOMEM);
    }
    CHECK_EQ(nrm__map((size_t)1 << 62, (size_t)1 << 63, &ptr), ENOMEM);
    CHECK_EQ(ptr, NULL);
}

TEST(hugetlbfs_gives_huge_pages_or_a_clear_no)
{
    void *ptr = NULL;
    int code = nrm__map_hugetlb(4 * NRM__MIB, &ptr);
    if (code != 0) {
        CHECK_EQ(ptr, NULL);
        NOTE("no pages are set aside: errno %d", code);
        return;
    }
    CHECK_ALIGNED(ptr, NRM__HUGE_PAGE);
    write_numbers(ptr, 4 * NRM__MIB);
    CHECK_EQ(nrm__mapping_page_size(ptr), NRM__HUGE_PAGE);
    nrm__unmap(ptr, 4 * NRM__MIB);
}

/* ---- resizing ---- */

static const struct {
    const char *name;
    size_t old_nbytes, new_nbytes;
    size_t alignment; /* 0: a page */
} resizes[] = {
    {"grow by a page", 64 * NRM__KIB, 68 * NRM__KIB, 0},
    {"grow small", 64 * NRM__KIB, 8 * NRM__MIB, 0},
    {"grow big", 8 * NRM__MIB, 64 * NRM__MIB, NRM__HUGE_PAGE},
    {"grow odd", 8 * NRM__MIB + 4096, 8 * NRM__MIB + 12288, NRM__HUGE_PAGE},
    {"shrink", 64 * NRM__MIB, 8 * NRM__MIB, NRM__HUGE_PAGE},
    {"shrink to a page", 64 * NRM__MIB, 4 * NRM__KIB, NRM__HUGE_PAGE},
    {"stay", 8 * NRM__MIB, 8 * NRM__MIB, NRM__HUGE_PAGE},
    {"at 64 KiB", 64 * NRM__KIB, 128 * NRM__KIB, 64 * NRM__KIB},
};

TEST_EACH(a_resized_mapping_keeps_content_and_alignment, resizes)
{
    size_t kept = nrm__min(row->old_nbytes, row->new_nbytes);
    size_t alignment = nrm__max(row->alignment, nrm__page_size());
    void *ptr = NULL;
    if (nrm__page_size() != 4096) {
        SKIP("sizes are for pages of 4 KiB");
    }
    REQUIRE_EQ(nrm__map(row->old_nbytes, alignment, &ptr), 0);
    write_numbers(ptr, row->old_nbytes);
    REQUIRE_EQ(nrm__remap(ptr, row->old_nbytes, row->new_nbytes, alignment, &ptr), 0);
    CHECK_ALIGNED(ptr, alignment);
    CHECK(has_numbers(ptr, kept));
    CHECK(is_zero((char *)ptr + kept, row->new_nbytes - kept));
    write_numbers(ptr, row->new_nbytes);
    nrm__unmap(ptr, row->new_nbytes);
}

/* With something mapped behind it, a mapping has to move. */
TEST(a_mapping_that_cannot_grow_in_place_moves)
{
    size_t nbytes = 4 * NRM__MIB;
    char *space = NULL;
    void *moved = NULL;
    REQUIRE_EQ(nrm__map(2 * nbytes, NRM__HUGE_PAGE, (void **)&space), 0);
    REQUIRE_EQ(mprotect(space + nbytes, nbytes, PROT_READ), 0); /* a mapping apart */
    write_numbers(space, nbytes);
    REQUIRE_EQ(nrm__remap(space, nbytes, 2 * nbytes, NRM__HUGE_PAGE, &moved), 0);
    CHECK_NE(moved, (void *)space);
    CHECK_ALIGNED(moved, NRM__HUGE_PAGE);
    CHECK(has_numbers(moved, nbytes));
    CHECK(!is_mapped(space));
    CHECK(is_mapped(space + nbytes));
    nrm__unmap(moved, 2 * nbytes);
    nrm__unmap(space + nbytes, nbytes);
}

TEST(pages_move_to_an_alignment_that_they_did_not_have)
{
    size_t nbytes = 3 * NRM__MIB;
    char *space = NULL;
    void *moved = NULL;
    REQUIRE_EQ(nrm__map(8 * NRM__MIB, NRM__HUGE_PAGE, (void **)&space), 0);
    nrm__unmap(space, nrm__page_size());
    nrm__unmap(space + nrm__page_size() + nbytes,
               8 * NRM__MIB - nbytes - nrm__page_size());
    char *ptr = space + nrm__page_size();
    write_numbers(ptr, nbytes);
    REQUIRE_EQ(nrm__remap(ptr, nbytes, 2 * nbytes, NRM__HUGE_PAGE, &moved), 0);
    CHECK_ALIGNED(moved, NRM__HUGE_PAGE);
    CHECK(has_numbers(moved, nbytes));
    nrm__unmap(moved, 2 * nbytes);
}

TEST(a_growth_that_is_refused_changes_nothing)
{
    size_t nbytes = 4 * NRM__MIB;
    void *ptr = NULL;
    void *moved = NULL;
    REQUIRE_EQ(nrm__map(nbytes, NRM__HUGE_PAGE, &ptr), 0);
    write_numbers(ptr, nbytes);
    if (kernel_counts_memory()) {
        CHECK_EQ(nrm__remap(ptr, nbytes, (size_t)1 << 45, NRM__HUGE_PAGE, &moved),
                 ENOMEM);
    }
    CHECK_EQ(nrm__remap(ptr, nbytes, (size_t)1 << 50, NRM__HUGE_PAGE, &moved), ENOMEM);
    CHECK_EQ(moved, NULL);
    CHECK(has_numbers(ptr, nbytes));
    nrm__unmap(ptr, nbytes);
}

/* ---- pages ---- */

TEST(a_discarded_range_reads_as_zero_and_holds_no_pages)
{
    size_t nbytes = 64 * nrm__page_size();
    void *ptr = NULL;
    REQUIRE_EQ(nrm__map(nbytes, nrm__page_size(), &ptr), 0);
    write_numbers(ptr, nbytes);
    CHECK_EQ(count_present(ptr, nbytes), 64u);
    CHECK_EQ(nrm__discard(ptr, nbytes / 2), 0);
    CHECK_EQ(count_present(ptr, nbytes), 32u);
    CHECK(is_zero(ptr, nbytes / 2));
    CHECK_NE(((size_t *)ptr)[nbytes / 2 / sizeof(size_t)], 0u);
    nrm__unmap(ptr, nbytes);
    CHECK_NE(nrm__discard(ptr, nbytes), 0);
}

TEST(absent_bytes_are_those_of_pages_that_were_not_touched)
{
    size_t page = nrm__page_size(), nbytes = 5000 * page; /* more than one window */
    char *ptr = NULL;
    REQUIRE_EQ(nrm__map(nbytes, page, (void **)&ptr), 0);
    nrm__advise_huge_pages(ptr, nbytes, false);
    CHECK_EQ(nrm__absent_nbytes(ptr, nbytes), nbytes);
    ptr[0] = ptr[4500 * page + 5] = 1;
    CHECK_EQ(nrm__absent_nbytes(ptr, nbytes), nbytes - 2 * page);
    CHECK_EQ(nrm__absent_nbytes(ptr + 10, page), page); /* of the second page */
    CHECK_EQ(nrm__absent_nbytes(ptr + 4500 * page, 1), 0u);
    nrm__unmap(ptr, nbytes);
}

TEST(a_mapping_without_huge_pages_has_small_ones)
{
    size_t nbytes = 4 * NRM__MIB;
    void *ptr = NULL;
    REQUIRE_EQ(nrm__map(nbytes, NRM__HUGE_PAGE, &ptr), 0);
    nrm__advise_huge_pages(ptr, nbytes, false);
    write_numbers(ptr, nbytes);
    CHECK_EQ(nrm__mapping_page_size(ptr), nrm__page_size());
    CHECK_EQ(nrm__mapping_page_size((char *)ptr + nbytes - 1), nrm__page_size());
    nrm__unmap(ptr, nbytes);
    CHECK_EQ(nrm__mapping_page_size(ptr), 0u);
}

TEST(a_mapping_that_asks_for_huge_pages_gets_them)
{
    size_t nbytes = 8 * NRM__MIB;
    void *ptr = NULL;
    if (!nrm__has_transparent_huge_pages()) {
        SKIP("this kernel makes no transparent huge pages");
    }
    REQUIRE_EQ(nrm__map(nbytes, NRM__HUGE_PAGE, &ptr), 0);
    nrm__advise_huge_pages(ptr, nbytes, true);
    write_numbers(ptr, nbytes);
    CHECK_EQ(nrm__mapping_page_size(ptr), NRM__HUGE_PAGE);
    nrm__unmap(ptr, nbytes);
}

TEST(the_page_size_of_nothing_is_unknown)
{
    CHECK_EQ(nrm__mapping_page_size(NULL), 0u);
    CHECK_EQ(nrm__mapping_page_size(&errno), nrm__page_size());
}

/* ---- threads ---- */

static void
maps_and_moves(unsigned index, void *arg)
{
    uint64_t seed = index + 1;
    (void)arg;
    for (int i = 0; i < 200; i++) {
        size_t old_nbytes = (1 + check_random(&seed) % 64) * nrm__page_size();
        size_t new_nbytes = (1 + check_random(&seed) % 64) * nrm__page_size();
        void *ptr = NULL;
        REQUIRE_EQ(nrm__map(old_nbytes, 64 * NRM__KIB, &ptr), 0);
        write_numbers(ptr, old_nbytes);
        REQUIRE_EQ(nrm__remap(ptr, old_nbytes, new_nbytes, 64 * NRM__KIB, &ptr), 0);
        CHECK_ALIGNED(ptr, 64 * NRM__KIB);
        CHECK(has_numbers(ptr, nrm__min(old_nbytes, new_nbytes)));
        nrm__unmap(ptr, new_nbytes);
    }
}

TEST(threads_map_and_move_side_by_side)
{
    check_threads(4, maps_and_moves, NULL);
}

CHECK_MAIN
