/* HostMemoryResource: alignment, huge pages, what is given back, threads and forks. How
   its blocks are resized is in test_host_resize.c. */
#include "base/bits.h"
#include "check.h"
#include "core/ops.h"
#include "host_blocks.h"
#include "nrm/options.h"
#include "nrm/sources.h"
#include "os/lines.h"
#include "os/memory.h"
#include "os/numa.h"
#include "os/system.h"

static bool
is_zero(const char *ptr, size_t nbytes)
{
    return nbytes == 0 || (ptr[0] == 0 && memcmp(ptr, ptr + 1, nbytes - 1) == 0);
}

/* ---- what a block is like ---- */

static const struct {
    const char *name;
    size_t alignment;
} alignments[] = {
    {"default", 0},
    {"1", 1},
    {"64", 64},
    {"128", 128},
    {"4 KiB", 4096},
    {"64 KiB", 64 * NRM__KIB},
    {"2 MiB", 2 * NRM__MIB},
    {"1 GiB", NRM__GIB},
};

TEST_EACH(any_power_of_two_is_honoured, alignments)
{
    static const size_t sizes[] = {1,    63,    64,      1000,   8192,
                                   8193, 65536, 3000000, 5000000};
    nrm_resource *mr = create();
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        void *ptr = NULL;
        REQUIRE_OK(nrm_resource_allocate(mr, sizes[i], row->alignment, NULL, &ptr));
        CHECK_ALIGNED(ptr, nrm__max(64, row->alignment));
        memset(ptr, 0xab, sizes[i]);
        CHECK_GE(capacity_of(ptr), sizes[i]);
        deallocate(mr, ptr);
    }
    check_all(mr);
    nrm_resource_release(mr);
}

TEST(the_alignment_of_the_options_holds_for_every_block)
{
    nrm_host_options options = NRM_OPTIONS(nrm_host_options);
    nrm_resource *mr = NULL;
    options.alignment = 16384;
    REQUIRE_OK(nrm_host_create(&options, &mr));
    for (size_t nbytes = 1; nbytes < 10000000; nbytes = nbytes * 3 + 1) {
        char *ptr = allocate(mr, nbytes);
        CHECK_ALIGNED(ptr, 16384);
        ptr = reallocate(mr, ptr, nbytes * 2);
        CHECK_ALIGNED(ptr, 16384);
        deallocate(mr, ptr);
    }
    nrm_resource_release(mr);
}

TEST(zeroed_memory_is_zero_whatever_was_there)
{
    nrm_resource *mr = create();
    for (size_t nbytes = 1; nbytes < 20000000; nbytes = nbytes * 5 + 3) {
        for (int round = 0; round < 3; round++) {
            void *ptr = NULL;
            REQUIRE_OK(nrm_resource_allocate_zeroed(mr, nbytes, 0, NULL, &ptr));
            CHECK(is_zero(ptr, nbytes));
            memset(ptr, 0xff, nbytes);
            deallocate(mr, ptr);
        }
    }
    nrm_resource_release(mr);
}

TEST(a_big_zeroed_block_takes_no_memory_until_it_is_touched)
{
    nrm_resource *mr = create();
    void *ptr = NULL;
    REQUIRE_OK(nrm_resource_allocate_zeroed(mr, 64 * NRM__MIB, 0, NULL, &ptr));
    CHECK_EQ(count_present(ptr, 64 * NRM__MIB), 0u);
    deallocate(mr, ptr);
    nrm_resource_release(mr);
}

TEST(all_memory_is_accounted_for_and_goes_back)
{
    nrm_resource *mr = create();
    size_t trimmed = 0;
    CHECK_EQ(reserved_nbytes(mr), 0);
    char *big = allocate(mr, 10 * NRM__MIB);
    CHECK_EQ(reserved_nbytes(mr), (int64_t)(10 * NRM__MIB));
    char *odd = allocate(mr, 10001);
    CHECK_EQ(reserved_nbytes(mr), (int64_t)(10 * NRM__MIB + 12288));
    char *small = allocate(mr, 100);
    CHECK_EQ(reserved_nbytes(mr), (int64_t)(12 * NRM__MIB + 12288));
    deallocate(mr, big);
    deallocate(mr, odd);
    deallocate(mr, small);
    CHECK_EQ(reserved_nbytes(mr), (int64_t)(2 * NRM__MIB)); /* kept for small ones */
    CHECK_OK(nrm_resource_trim(mr, 0, &trimmed));
    CHECK_EQ(trimmed, 2 * NRM__MIB);
    CHECK_EQ(reserved_nbytes(mr), 0);
    check_all(mr);
    nrm_resource_release(mr);
}

TEST(trim_drops_the_pages_of_chunks_that_nobody_uses)
{
    enum { N = 8 * 20 };
    nrm_resource *mr = create();
    char *blocks[N];
    size_t trimmed = 0;
    for (int i = 0; i < N; i++) {
        blocks[i] = allocate(mr, 8192);
        memset(blocks[i], 1, 8192);
    }
    for (int i = 1; i < N; i++) {
        deallocate(mr, blocks[i]);
    }
    CHECK_OK(nrm_resource_trim(mr, 0, &trimmed));
    CHECK_EQ(trimmed, 19 * 64 * NRM__KIB);
    CHECK_EQ(reserved_nbytes(mr), (int64_t)(2 * NRM__MIB));
    check_all(mr);
    CHECK_EQ(blocks[0][8191], 1);
    trimmed = 0;
    CHECK_OK(nrm_resource_trim(mr, 0, &trimmed));
    CHECK_EQ(trimmed, 0u); /* their pages are gone already */
    for (int i = 1; i < N; i++) {
        void *ptr = NULL;
        CHECK_OK(nrm_resource_allocate_zeroed(mr, 8192, 0, NULL, &ptr));
        CHECK(is_zero(ptr, 8192));
        blocks[i] = ptr;
    }
    for (int i = 0; i < N; i++) {
        deallocate(mr, blocks[i]);
    }
    check_all(mr);
    nrm_resource_release(mr);
}

/* ---- huge pages ---- */

static size_t
page_size_after_fill(nrm_resource *mr, size_t nbytes)
{
    char *ptr = allocate(mr, nbytes);
    memset(ptr, 1, nbytes);
    size_t page = nrm__mapping_page_size(ptr);
    deallocate(mr, ptr);
    return page;
}

TEST(big_blocks_ask_for_huge_pages)
{
    nrm_resource *mr = create();
    char *ptr = allocate(mr, 4 * NRM__MIB);
    if (!nrm__has_transparent_huge_pages()) {
        deallocate(mr, ptr);
        nrm_resource_release(mr);
        SKIP("this kernel makes no transparent huge pages");
    }
    CHECK_ALIGNED(ptr, NRM__HUGE_PAGE);
    deallocate(mr, ptr);
    CHECK_EQ(page_size_after_fill(mr, 4 * NRM__MIB), NRM__HUGE_PAGE);
    CHECK_EQ(page_size_after_fill(mr, 33 * NRM__MIB + 17), NRM__HUGE_PAGE);
    nrm_resource_release(mr);
}

TEST(a_resource_without_huge_pages_has_none)
{
    nrm_resource *mr = create_with(NRM_HUGE_PAGES_NEVER);
    CHECK_EQ(page_size_after_fill(mr, 4096), nrm__page_size());
    CHECK_EQ(page_size_after_fill(mr, 16 * NRM__MIB), nrm__page_size());
    nrm_resource_release(mr);
}

/* Whether mappings get huge pages that did not ask for them. */
static bool
has_huge_pages_unasked(void)
{
    char line[128];
    return nrm__file_read_line("/sys/kernel/mm/transparent_hugepage/enabled", line,
                               sizeof line) &&
           strstr(line, "[always]") != NULL;
}

static void
has_a_higher_threshold(void)
{
    nrm_resource *before = create();
    CHECK_OK(nrm_option_set(NRM_OPT_HUGE_PAGE_THRESHOLD, "64 MiB"));
    nrm_resource *after = create();
    if (!has_huge_pages_unasked()) {
        CHECK_EQ(page_size_after_fill(after, 16 * NRM__MIB), nrm__page_size());
    }
    if (nrm__has_transparent_huge_pages()) {
        CHECK_EQ(page_size_after_fill(before, 16 * NRM__MIB), NRM__HUGE_PAGE);
    }
    nrm_resource_release(before);
    nrm_resource_release(after);
}

TEST(the_threshold_is_an_option_of_later_resources)
{
    CHECK_IN_CHILD(has_a_higher_threshold);
}

TEST(always_means_present_when_returned)
{
    nrm_resource *mr = create_with(NRM_HUGE_PAGES_ALWAYS);
    static const size_t sizes[] = {2 * NRM__MIB, 5 * NRM__MIB + 1, 64 * NRM__MIB};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        char *ptr = allocate(mr, sizes[i]);
        CHECK_ALIGNED(ptr, NRM__HUGE_PAGE);
        CHECK_EQ(capacity_of(ptr) % NRM__HUGE_PAGE, 0u);
        CHECK_EQ(count_present(ptr, capacity_of(ptr)),
                 capacity_of(ptr) / nrm__page_size());
        if (nrm__has_transparent_huge_pages()) {
            CHECK_EQ(nrm__mapping_page_size(ptr), NRM__HUGE_PAGE);
        }
        CHECK(is_zero(ptr, sizes[i]));
        deallocate(mr, ptr);
    }
    char *ptr = allocate(mr, NRM__MIB);
    CHECK_EQ(count_present(ptr, NRM__MIB), 0u); /* only from 2 MiB up */
    deallocate(mr, ptr);
    nrm_resource_release(mr);
}

TEST(what_grows_there_is_present_too)
{
    nrm_resource *mr = create_with(NRM_HUGE_PAGES_ALWAYS);
    char *ptr = allocate(mr, 4 * NRM__MIB);
    write_numbers(ptr, 4 * NRM__MIB);
    ptr = reallocate(mr, ptr, 32 * NRM__MIB);
    CHECK(has_numbers(ptr, 4 * NRM__MIB));
    CHECK_EQ(count_present(ptr, 32 * NRM__MIB), 32 * NRM__MIB / nrm__page_size());
    deallocate(mr, ptr);
    nrm_resource_release(mr);
}

TEST(more_than_can_be_touched_is_an_error_and_no_death)
{
    nrm_resource *mr = create_with(NRM_HUGE_PAGES_ALWAYS);
    size_t nbytes = nrm__align_up(nrm__touchable_nbytes() + NRM__GIB, NRM__GIB);
    void *ptr = NULL;
    char text[32];
    CHECK_STATUS(nrm_resource_allocate(mr, nbytes, 0, NULL, &ptr), NRM_OUT_OF_MEMORY);
    nrm_format_nbytes(nbytes, text, sizeof text);
    CHECK_STR_HAS(nrm_last_error()->message, text);
    CHECK_STR_HAS(nrm_last_error()->message,
                  "can be touched before the process is killed");
    char *small = allocate(mr, 4 * NRM__MIB);
    CHECK_STATUS(nrm_resource_reallocate(mr, small, nbytes, 0, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    memset(small, 1, 4 * NRM__MIB);
    deallocate(mr, small);
    CHECK_EQ(ptr, NULL);
    nrm_resource_release(mr);
}

/* ---- bad requests ---- */

TEST(the_impossible_fails_at_once_with_numbers)
{
    nrm_resource *mr = create();
    void *ptr = NULL;
    CHECK_STATUS(nrm_resource_allocate(mr, (size_t)1 << 50, 0, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK_STR_HAS(nrm_last_error()->message, "1 PiB");
    CHECK_STR_HAS(nrm_last_error()->message, "available");
    CHECK_EQ(nrm_last_error()->requested_nbytes, (size_t)1 << 50);
    CHECK_STR_EQ(nrm_last_error()->native_name, "ENOMEM");
    CHECK_STATUS(nrm_resource_allocate(mr, SIZE_MAX / 2, 0, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK_STATUS(nrm_resource_allocate(mr, SIZE_MAX / 2 - 1, 1, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK_STATUS(nrm_resource_allocate(mr, 1, (size_t)1 << 62, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK_EQ(ptr, NULL);
    CHECK_EQ(reserved_nbytes(mr), 0);
    deallocate(mr, allocate(mr, 100)); /* goes on */
    nrm_resource_release(mr);
}

TEST(an_address_is_given_back_once_and_by_its_start)
{
    static const size_t sizes[] = {100, 100000, 10000000};
    nrm_resource *mr = create();
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        char *ptr = allocate(mr, sizes[i]);
        CHECK_STATUS(nrm_resource_deallocate(mr, ptr + 64, 0, NULL), NRM_NOT_OWNED);
        deallocate(mr, ptr);
        CHECK_STATUS(nrm_resource_deallocate(mr, ptr, 0, NULL), NRM_NOT_OWNED);
    }
    check_all(mr);
    nrm_resource_release(mr);
}

TEST(wrong_options_are_refused)
{
    nrm_host_options options = NRM_OPTIONS(nrm_host_options);
    nrm_resource *mr = NULL;
    options.alignment = 48;
    CHECK_STATUS(nrm_host_create(&options, &mr), NRM_INVALID_VALUE);
    CHECK_STR_HAS(nrm_last_error()->message, "48");
    options.alignment = 0;
    options.huge_pages = (nrm_huge_pages)7;
    CHECK_STATUS(nrm_host_create(&options, &mr), NRM_INVALID_VALUE);
    CHECK_EQ(mr, NULL);
}

/* ---- NUMA ---- */

TEST(a_node_that_is_not_there_is_refused)
{
    nrm_host_options options = NRM_OPTIONS(nrm_host_options);
    nrm_resource *mr = NULL;
    options.bind_numa = true;
    options.numa_node = 1000;
    CHECK_STATUS(nrm_host_create(&options, &mr), NRM_INVALID_VALUE);
    CHECK_STR_HAS(nrm_last_error()->message, "1000");
    options.numa_node = -1;
    CHECK_STATUS(nrm_host_create(&options, &mr), NRM_INVALID_VALUE);
    CHECK_EQ(mr, NULL);
}

TEST(pages_lie_on_the_node_that_was_asked_for)
{
    static const size_t sizes[] = {100, 100000, 10000000};
    for (int node = 0; node < nrm__numa_n_nodes(); node++) {
        nrm_host_options options = NRM_OPTIONS(nrm_host_options);
        nrm_resource *mr = NULL;
        options.bind_numa = true;
        options.numa_node = node;
        if (!nrm__numa_has_node(node)) {
            continue;
        }
        REQUIRE_OK(nrm_host_create(&options, &mr));
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            char *ptr = allocate(mr, sizes[i]);
            memset(ptr, 1, sizes[i]);
            CHECK_EQ(nrm__numa_node_of(ptr + sizes[i] - 1), node);
            deallocate(mr, ptr);
        }
        nrm_resource_release(mr);
    }
}

/* ---- threads and forks ---- */

static size_t
random_nbytes(uint64_t *seed)
{
    return 1 + check_random(seed) % ((size_t)1 << (4 + check_random(seed) % 19));
}

static void
walks(unsigned index, void *arg)
{
    struct {
        char *ptr;
        size_t nbytes;
    } slots[16] = {{NULL, 0}};
    uint64_t seed = index + 1;
    for (int i = 0; i < 1500; i++) {
        size_t slot = check_random(&seed) % 16;
        size_t nbytes = random_nbytes(&seed);
        if (slots[slot].ptr == NULL) {
            slots[slot].ptr = allocate(arg, nbytes);
        }
        else if (i % 3 == 0) {
            CHECK(has_numbers(slots[slot].ptr, slots[slot].nbytes));
            deallocate(arg, slots[slot].ptr);
            slots[slot].ptr = NULL;
            continue;
        }
        else {
            slots[slot].ptr = reallocate(arg, slots[slot].ptr, nbytes);
            CHECK(has_numbers(slots[slot].ptr, nrm__min(nbytes, slots[slot].nbytes)));
        }
        slots[slot].nbytes = nbytes;
        write_numbers(slots[slot].ptr, nbytes);
        if (i % 300 == 0) {
            CHECK_OK(nrm_resource_trim(arg, 0, NULL));
            check_all(arg);
        }
    }
    for (size_t slot = 0; slot < 16; slot++) {
        deallocate(arg, slots[slot].ptr);
    }
}

static const struct {
    const char *name;
    nrm_huge_pages huge_pages;
} modes[] = {
    {"auto", NRM_HUGE_PAGES_AUTO},
    {"never", NRM_HUGE_PAGES_NEVER},
    {"always", NRM_HUGE_PAGES_ALWAYS},
};

TEST_EACH(threads_allocate_resize_and_trim, modes)
{
    nrm_resource *mr = create_with(row->huge_pages);
    check_threads(4, walks, mr);
    CHECK_OK(nrm_resource_trim(mr, 0, NULL));
    CHECK_EQ(reserved_nbytes(mr), 0);
    nrm_statistics statistics;
    CHECK_OK(nrm_resource_statistics(mr, &statistics));
    CHECK_EQ(statistics.current_bytes, 0);
    CHECK_EQ(statistics.current_count, 0);
    CHECK_EQ(statistics.errors, 0);
    nrm_resource_release(mr);
}

static atomic_bool stop;

static nrm_resource *forked;

static char *inherited;

static void *
never_rests(void *arg)
{
    uint64_t seed = 3;
    while (!atomic_load(&stop)) {
        deallocate(arg, allocate(arg, random_nbytes(&seed)));
    }
    return NULL;
}

static void
uses_the_resource(void)
{
    uint64_t seed = 4;
    check_all(forked);
    CHECK(has_numbers(inherited, 100000));
    inherited = reallocate(forked, inherited, 5000000);
    CHECK(has_numbers(inherited, 100000));
    deallocate(forked, inherited);
    for (int i = 0; i < 200; i++) {
        deallocate(forked, allocate(forked, random_nbytes(&seed)));
    }
    CHECK_OK(nrm_resource_trim(forked, 0, NULL));
    check_all(forked);
}

TEST(a_child_uses_it_whatever_the_parents_threads_did)
{
    pthread_t thread;
    forked = create();
    inherited = allocate(forked, 100000);
    write_numbers(inherited, 100000);
    atomic_store(&stop, false);
    REQUIRE_EQ(pthread_create(&thread, NULL, never_rests, forked), 0);
    for (int i = 0; i < 30; i++) {
        CHECK_IN_CHILD(uses_the_resource);
    }
    atomic_store(&stop, true);
    pthread_join(thread, NULL);
    CHECK(has_numbers(inherited, 100000));
    deallocate(forked, inherited);
    nrm_resource_release(forked);
}

CHECK_MAIN
