/* The route between a handler and its resource: who serves a request, who gets it
   back. */
#include <string.h>

#include "base/bits.h"
#include "fixtures.h"
#include "nrm/adaptors.h"

#define THRESHOLD 65536

static struct counting large_count;

struct routed {
    nrm_resource *large, *small, *route;
};

/* A pool that can hold `limit_nbytes` (0: no limit) behind a route. */
static struct routed
make_route(size_t limit_nbytes, bool has_fallback)
{
    struct routed routed = {0};
    nrm_route_options options = NRM_OPTIONS(nrm_route_options);
    large_count = (struct counting){0};
    routed.large = pool_over(counting_source(&large_count), limit_nbytes);
    routed.small = pool_over(host_source(), 0);
    options.large = routed.large;
    options.small = options.rescue = routed.small;
    options.fallback = has_fallback ? routed.small : NULL;
    options.threshold = THRESHOLD;
    CHECK_OK(nrm_route_create(&options, &routed.route));
    return routed;
}

static void
drop_route(struct routed *routed)
{
    nrm_resource_release(routed->route);
    CHECK_EQ(live_nbytes(routed->large), 0);
    CHECK_EQ(live_nbytes(routed->small), 0);
    nrm_resource_release(routed->large);
    nrm_resource_release(routed->small);
    CHECK_EQ(atomic_load(&large_count.n_live), 0);
}

static const struct size_case {
    const char *name;
    size_t nbytes;
    bool is_large;
} size_cases[] = {
    {"one byte", 1, false},
    {"a byte under the threshold", THRESHOLD - 1, false},
    {"the threshold", THRESHOLD, true},
    {"a megabyte", NRM__MIB, true},
};

TEST_EACH(the_size_chooses_and_the_owner_gets_it_back, size_cases)
{
    struct routed routed = make_route(0, true);
    void *ptr = allocate(routed.route, row->nbytes);
    CHECK(owner_of(ptr) == (row->is_large ? routed.large : routed.small));
    CHECK_EQ(live_nbytes(routed.route), (int64_t)row->nbytes);
    CHECK_OK(nrm_resource_deallocate(routed.route, ptr, 3, NULL));
    CHECK_EQ(live_nbytes(routed.route), 0);
    drop_route(&routed);
}

static nrm_statistics
counts(nrm_resource *mr)
{
    nrm_statistics statistics;
    CHECK_OK(nrm_resource_statistics(mr, &statistics));
    return statistics;
}

/* Small and large ones by turns, which threads keep apart: the route counts both, and
   each of the two what is its own. */
TEST(both_sides_are_counted_once_there_and_once_here)
{
    enum { N = 500, SMALL = 1000, LARGE = 100000 };
    struct routed routed = make_route(0, true);
    for (int i = 0; i < N; i++) {
        void *small = allocate(routed.route, SMALL);
        void *large = allocate(routed.route, LARGE), *other = NULL;
        CHECK(owner_of(small) == routed.small);
        CHECK(owner_of(large) == routed.large);
        CHECK_EQ(live_nbytes(routed.route), SMALL + LARGE);
        CHECK_OK(nrm_resource_allocate_zeroed(routed.route, LARGE, 0, NULL, &other));
        CHECK_OK(nrm_resource_deallocate(routed.route, large, LARGE, NULL));
        CHECK_EQ(nrm_resource_deallocate(routed.route, large, LARGE, NULL),
                 NRM_NOT_OWNED);
        CHECK_EQ(live_nbytes(routed.large), LARGE);
        CHECK_OK(nrm_resource_deallocate(routed.route, other, LARGE, NULL));
        CHECK_OK(nrm_resource_deallocate(routed.route, small, SMALL, NULL));
    }
    CHECK_EQ(counts(routed.route).total_count, 3 * N);
    CHECK_EQ(counts(routed.route).total_bytes, N * (SMALL + 2 * LARGE));
    CHECK_EQ(counts(routed.route).peak_bytes, SMALL + 2 * LARGE);
    CHECK_EQ(counts(routed.route).peak_count, 3);
    CHECK_EQ(counts(routed.large).total_count, 2 * N);
    CHECK_EQ(counts(routed.large).peak_bytes, 2 * LARGE);
    CHECK_EQ(counts(routed.small).total_count, N);
    drop_route(&routed);
}

/* What stands in front of a route counts, and limits, what goes to either side. */
TEST(who_leads_to_a_route_has_no_way_past_it)
{
    enum { N = 100, SMALL = 1000, LARGE = 100000 };
    struct routed routed = make_route(0, true);
    nrm_limiting_options options = NRM_OPTIONS(nrm_limiting_options);
    nrm_resource *limited = NULL;
    options.allocation_limit = LARGE + SMALL;
    options.alignment = 8;
    CHECK_OK(nrm_limiting_create(routed.route, &options, &limited));
    for (int i = 0; i < N; i++) {
        void *small = allocate(limited, SMALL), *other = NULL;
        void *large = allocate(limited, LARGE);
        CHECK_EQ(nrm_resource_allocate(limited, LARGE, 0, NULL, &other),
                 NRM_OUT_OF_MEMORY);
        CHECK_EQ(live_nbytes(routed.route), SMALL + LARGE);
        CHECK_OK(nrm_resource_deallocate(limited, large, LARGE, NULL));
        CHECK_OK(nrm_resource_deallocate(limited, small, SMALL, NULL));
    }
    CHECK_EQ(counts(limited).total_count, 2 * N);
    CHECK_EQ(counts(routed.route).total_count, 2 * N);
    CHECK_EQ(counts(routed.large).total_count, N);
    nrm_resource_release(limited);
    drop_route(&routed);
}

TEST(growing_over_the_threshold_moves_and_keeps_the_bytes)
{
    struct routed routed = make_route(0, true);
    void *ptr = allocate(routed.route, 1000);
    write_pattern(ptr, 1000, 5);
    REQUIRE_OK(nrm_resource_reallocate(routed.route, ptr, 200000, 0, NULL, &ptr));
    CHECK(owner_of(ptr) == routed.large);
    CHECK(has_pattern(ptr, 1000, 5, 1000));
    write_pattern(ptr, 200000, 6);
    /* More than half is used: it stays. */
    REQUIRE_OK(nrm_resource_reallocate(routed.route, ptr, 150000, 0, NULL, &ptr));
    CHECK(owner_of(ptr) == routed.large);
    REQUIRE_OK(nrm_resource_reallocate(routed.route, ptr, 5000, 0, NULL, &ptr));
    CHECK(owner_of(ptr) == routed.small);
    CHECK(has_pattern(ptr, 5000, 6, 200000));
    CHECK_OK(nrm_resource_deallocate(routed.route, ptr, 0, NULL));
    drop_route(&routed);
}

TEST(an_exhausted_resource_falls_back_and_says_so)
{
    struct routed routed = make_route(4 * NRM__MIB, true);
    nrm_statistics statistics;
    nrm_block_info info;
    char reason[256];
    void *ptr = allocate(routed.route, 8 * NRM__MIB);
    CHECK(owner_of(ptr) == routed.small);
    REQUIRE_OK(nrm_resource_statistics(routed.route, &statistics));
    CHECK_EQ(statistics.fallbacks, 1);
    REQUIRE_OK(nrm_block_find(ptr, &info));
    nrm_route_explain(routed.route, &info, reason, sizeof reason);
    nrm_resource_release(info.resource);
    CHECK_STR_HAS(reason, "fell back: ");
    CHECK_STR_HAS(reason, "limit 4 MiB");
    CHECK_OK(nrm_resource_deallocate(routed.route, ptr, 0, NULL));
    drop_route(&routed);
}

TEST(without_a_fallback_it_fails_but_small_requests_do_not)
{
    nrm_route_options options = NRM_OPTIONS(nrm_route_options);
    struct counting tiny = {.limit_nbytes = 1};
    nrm_resource *source = counting_source(&tiny), *small = pool_over(host_source(), 0);
    nrm_resource *route = NULL;
    void *ptr = NULL;
    options.large = source;
    options.rescue = small;
    REQUIRE_OK(nrm_route_create(&options, &route));
    CHECK_STATUS(nrm_resource_allocate(route, 4097, 0, NULL, &ptr), NRM_OUT_OF_MEMORY);
    CHECK_OK(nrm_resource_allocate(route, 4096, 0, NULL, &ptr));
    CHECK(owner_of(ptr) == small);
    CHECK_OK(nrm_resource_deallocate(route, ptr, 0, NULL));
    nrm_resource_release(route);
    nrm_resource_release(small);
    nrm_resource_release(source);
}

TEST(a_block_below_the_threshold_is_explained)
{
    struct routed routed = make_route(0, true);
    nrm_block_info info;
    char reason[256];
    void *ptr = allocate(routed.route, 100), *large = allocate(routed.route, THRESHOLD);
    REQUIRE_OK(nrm_block_find(ptr, &info));
    nrm_route_explain(routed.route, &info, reason, sizeof reason);
    nrm_resource_release(info.resource);
    CHECK_STR_EQ(reason, "below pinned_threshold (64 KiB)");
    REQUIRE_OK(nrm_block_find(large, &info));
    nrm_route_explain(routed.route, &info, reason, sizeof reason);
    nrm_resource_release(info.resource);
    CHECK_STR_EQ(reason, "");
    CHECK_OK(nrm_resource_deallocate(routed.route, ptr, 0, NULL));
    CHECK_OK(nrm_resource_deallocate(routed.route, large, 0, NULL));
    drop_route(&routed);
}

TEST(the_route_refuses_what_did_not_come_through_it)
{
    struct routed routed = make_route(0, true);
    nrm_resource *other = host_source();
    void *ptr = allocate(other, 100);
    CHECK_STATUS(nrm_resource_deallocate(routed.route, ptr, 0, NULL), NRM_NOT_OWNED);
    CHECK_OK(nrm_resource_deallocate(other, ptr, 0, NULL));
    nrm_resource_release(other);
    drop_route(&routed);
}

CHECK_MAIN
