/* Zeros of a pool where memory was used before: by what the program did with those that
   it had, they are written, or are pages that nobody has touched. */
#include <string.h>

#include "base/bits.h"
#include "fixtures.h"
#include "host_pool.h"
#include "pools/pool.h"

TEST(zeroed_memory_is_zero_also_when_it_was_used_before)
{
    static const size_t sizes[] = {1, 100, 8000, 70000, 5 * NRM__MIB};
    nrm_resource *mr = host_pool();
    for (int round = 0; round < 3; round++) {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            void *ptr = NULL;
            REQUIRE_OK(nrm_resource_allocate_zeroed(mr, sizes[i], 0, NULL, &ptr));
            const char *bytes = ptr;
            bool zero = bytes[0] == 0 && memcmp(bytes, bytes + 1, sizes[i] - 1) == 0;
            CHECK_MSG(zero, "%zu B in round %d", sizes[i], round);
            memset(ptr, 0xff, sizes[i]);
            CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
        }
    }
    nrm_resource_release(mr);
}

TEST(a_large_zeroed_block_of_a_new_pool_touches_no_page)
{
    nrm_resource *mr = host_pool();
    void *ptr = NULL;
    /* More than could be zeroed in the time limit of a test, were it done by hand. */
    nrm_status status = nrm_resource_allocate_zeroed(mr, 8 * NRM__GIB, 0, NULL, &ptr);
    if (status == NRM_OUT_OF_MEMORY) {
        nrm_resource_release(mr);
        SKIP("this machine refuses 8 GiB of address space");
    }
    REQUIRE_OK(status);
    CHECK_EQ(((char *)ptr)[5 * NRM__GIB], 0);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    nrm_resource_release(mr);
}

/* ---- zeros where memory was used before ---- */

#define ZEROS ((size_t)80 * NRM__MIB)

static char *
allocate_zeros(nrm_resource *mr)
{
    void *ptr = NULL;
    CHECK_OK(nrm_resource_allocate_zeroed(mr, ZEROS, 0, NULL, &ptr));
    return ptr;
}

static bool
is_all_zero(const char *ptr)
{
    return ptr[0] == 0 && memcmp(ptr, ptr + 1, ZEROS - 1) == 0;
}

static void
fill_zeros_and_free(nrm_resource *mr)
{
    char *ptr = allocate_zeros(mr);
    CHECK(is_all_zero(ptr));
    memset(ptr, 0xff, ZEROS);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
}

TEST(zeros_that_are_filled_in_turn_are_written_where_pages_are)
{
    nrm_resource *mr = host_pool();
    fill_zeros_and_free(mr);
    for (int round = 0; round < 5; round++) {
        char *ptr = allocate_zeros(mr);
        CHECK_EQ(count_present(ptr, 0, ZEROS), 64u);
        memset(ptr, 0xff, ZEROS);
        CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    }
    nrm_resource_release(mr);
}

TEST(zeros_that_stay_untouched_in_turn_take_no_pages)
{
    nrm_resource *mr = host_pool();
    for (int round = 0; round < 6; round++) {
        fill_zeros_and_free(mr);
        char *ptr = allocate_zeros(mr);
        size_t n = count_present(ptr, 0, ZEROS);
        CHECK_MSG(round == 0 || n == 0, "%zu of 64 in round %d", n, round);
        CHECK_LE(reserved_nbytes(mr), (int64_t)(ZEROS + ZEROS / 10));
        CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
        nrm__pool_check(mr);
    }
    nrm_resource_release(mr);
}

TEST(zeros_of_every_pattern_are_zeros)
{
    nrm_resource *mr = host_pool();
    uint64_t state = 11;
    for (int round = 0; round < 40; round++) {
        char *ptr = allocate_zeros(mr);
        if (round % 8 != 0) { /* reading all of it would touch it */
            CHECK(is_all_zero(ptr));
        }
        uint64_t r = next_random(&state);
        size_t from = (size_t)(r >> 8) % ZEROS;
        size_t nbytes = r % 3 == 0 ? 1 : (size_t)(r >> 32) % (ZEROS - from);
        memset(ptr + from, 0xff, r % 3 == 1 ? 0 : nbytes);
        CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
        nrm__pool_check(mr);
    }
    nrm_resource_release(mr);
}

TEST(other_sizes_do_not_say_what_zeros_are_for)
{
    nrm_resource *mr = host_pool();
    void *small = NULL;
    for (int round = 0; round < 4; round++) {
        fill_zeros_and_free(mr);
        fill_zeros_and_free(mr);
        REQUIRE_OK(nrm_resource_allocate_zeroed(mr, 40 * NRM__MIB, 0, NULL, &small));
        CHECK_OK(nrm_resource_deallocate(mr, small, 0, NULL));
    }
    char *ptr = allocate_zeros(mr);
    CHECK_EQ(count_present(ptr, 0, ZEROS), 64u);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    nrm_resource_release(mr);
}

/* What is to be present stays so. */
TEST(zeros_of_a_source_whose_pages_are_present_keep_them)
{
    nrm_host_options options = NRM_OPTIONS(nrm_host_options);
    nrm_resource *host = NULL;
    void *used = NULL;
    options.huge_pages = NRM_HUGE_PAGES_ALWAYS;
    CHECK_OK(nrm_host_create(&options, &host));
    nrm_resource *mr = pool_over(host, 0);
    used = allocate(mr, ZEROS);
    memset(used, 1, ZEROS);
    CHECK_OK(nrm_resource_deallocate(mr, used, 0, NULL));
    char *ptr = allocate_zeros(mr);
    CHECK_EQ(count_present(ptr, 0, ZEROS), 64u);
    CHECK(is_all_zero(ptr));
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    nrm_resource_release(mr);
}

CHECK_MAIN
