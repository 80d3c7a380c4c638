/* BinningMemoryResource: who serves a request, who gets it back, and that bins may be
   added while others allocate. */
#include "copies.h"
#include "model.h"
#include "nrm/adaptors.h"

static struct counting even;

static nrm_resource *
even_callback(void)
{
    even = (struct counting){0};
    return counting_source(&even);
}

/* Takes the reference of the upstream. */
static nrm_resource *
binning_over(nrm_resource *upstream, unsigned min_exponent, unsigned max_exponent)
{
    nrm_binning_options options = NRM_OPTIONS(nrm_binning_options);
    nrm_resource *mr = NULL;
    options.make_bins = max_exponent != 0;
    options.min_exponent = min_exponent;
    options.max_exponent = max_exponent;
    CHECK_OK(nrm_binning_create(upstream, &options, &mr));
    nrm_resource_release(upstream);
    return mr;
}

static const struct over {
    const char *name;
    nrm_resource *(*create)(void);
} overs[] = {
    {"host", host_source},
    {"callback", even_callback},
    {"pool", host_pool},
};

TEST_EACH(a_random_walk_agrees_with_the_model, overs)
{
    static struct model model;
    static const uint64_t seeds[] = {88172645463325252u, 7};
    for (size_t i = 0; i < 2; i++) {
        model = (struct model){.mr = binning_over(row->create(), 5, 13),
                               .largest_nbytes = 40000,
                               .state = seeds[i]};
        model_walk(&model, 2000);
        CHECK_GT(model.n_moved, 0);
        CHECK_LT(model.n_moved, model.n_resized);
        CHECK_OK(nrm_resource_trim(model.mr, 0, NULL));
        CHECK_EQ(reserved_nbytes(model.mr), 0);
        nrm_resource_release(model.mr);
        nrm__retired_drain(0);
        CHECK_EQ(atomic_load(&even.n_live), 0);
    }
}

TEST_EACH(threads_free_each_others_blocks, overs)
{
    nrm_resource *mr = binning_over(row->create(), 6, 12);
    model_exchange_blocks(mr, 9000, 1200);
    nrm_resource_release(mr);
    nrm__retired_drain(0);
    CHECK_EQ(atomic_load(&even.n_live), 0);
}

/* ---- by size there, by owner back ---- */

static const struct {
    const char *name;
    size_t nbytes;
    int bin; /* -1: the upstream */
} routes[] = {
    {"one byte", 1, 0},           {"the smallest bin", 1024, 0},
    {"a byte more", 1025, 1},     {"the middle", 2048, 1},
    {"the largest bin", 4096, 2}, {"more than that", 4097, -1},
};

TEST_EACH(the_smallest_bin_that_fits_serves_and_gets_it_back, routes)
{
    nrm_resource *mr = binning_over(host_source(), 10, 12);
    nrm_bin bins[3];
    REQUIRE_EQ(nrm_binning_get_bins(mr, bins, 3), 3u);
    nrm_resource *expected = row->bin >= 0 ? bins[row->bin].resource
                                           : nrm_resource_upstream(mr);
    void *ptr = allocate(mr, row->nbytes);
    CHECK(owner_of(ptr) == expected);
    CHECK_EQ(live_nbytes(mr), (int64_t)row->nbytes);
    CHECK_EQ(live_nbytes(expected),
             (int64_t)row->nbytes + (row->bin < 0 ? reserved_nbytes(mr) : 0));
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 5000000, NULL)); /* a size of no bin */
    CHECK_EQ(live_nbytes(mr), 0);
    CHECK_EQ(live_nbytes(expected), row->bin < 0 ? reserved_nbytes(mr) : 0);
    nrm_resource_release(mr);
}

TEST(a_block_goes_back_to_its_owner_when_a_bin_was_added_meanwhile)
{
    nrm_resource *mr = binning_over(host_pool(), 12, 12);
    void *large = allocate(mr, 10000), *small = allocate(mr, 100);
    nrm_resource *large_owner = owner_of(large), *small_owner = owner_of(small);
    CHECK_OK(nrm_binning_add_bin(mr, 16384, NULL));
    CHECK_OK(nrm_binning_add_bin(mr, 256, NULL));
    void *second_large = allocate(mr, 10000), *second_small = allocate(mr, 100);
    CHECK(owner_of(second_large) != large_owner);
    CHECK(owner_of(second_small) != small_owner);
    CHECK_OK(nrm_resource_deallocate(mr, large, 0, NULL));
    CHECK_OK(nrm_resource_deallocate(mr, small, 0, NULL));
    CHECK_EQ(live_nbytes(small_owner), 0);
    CHECK_OK(nrm_resource_deallocate(mr, second_large, 0, NULL));
    CHECK_OK(nrm_resource_deallocate(mr, second_small, 0, NULL));
    CHECK_EQ(live_nbytes(mr), 0);
    mr->ops->check(mr);
    nrm_resource_release(mr);
}

TEST(it_takes_nothing_back_that_did_not_come_through_it)
{
    nrm_resource *mr = binning_over(host_source(), 10, 12), *other = host_source();
    void *foreign = allocate(other, 100), *ptr = allocate(mr, 100);
    CHECK_STATUS(nrm_resource_deallocate(mr, foreign, 0, NULL), NRM_NOT_OWNED);
    CHECK_STATUS(nrm_resource_deallocate(other, ptr, 0, NULL), NRM_NOT_OWNED);
    CHECK_STATUS(nrm_resource_deallocate(mr, (char *)ptr + 1, 0, NULL), NRM_NOT_OWNED);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    CHECK_STATUS(nrm_resource_deallocate(mr, ptr, 0, NULL), NRM_NOT_OWNED);
    CHECK_OK(nrm_resource_deallocate(other, foreign, 0, NULL));
    nrm_resource_release(other);
    nrm_resource_release(mr);
}

TEST(a_block_that_outgrows_its_bin_moves_with_its_bytes)
{
    nrm_resource *mr = binning_over(host_source(), 10, 12);
    void *ptr = allocate(mr, 1000), *before = ptr;
    write_pattern(ptr, 1000, 9);
    nrm_resource *first = owner_of(ptr);
    REQUIRE_OK(nrm_resource_reallocate(mr, ptr, 3000, 0, NULL, &ptr));
    CHECK(ptr != before && owner_of(ptr) != first);
    CHECK(has_pattern(ptr, 1000, 9, 1000));
    before = ptr;
    REQUIRE_OK(nrm_resource_reallocate(mr, ptr, 2048, 0, NULL, &ptr)); /* half: stays */
    CHECK(ptr == before);
    REQUIRE_OK(nrm_resource_reallocate(mr, ptr, 500, 0, NULL, &ptr));
    CHECK(owner_of(ptr) == first);
    CHECK(has_pattern(ptr, 500, 9, 1000));
    REQUIRE_OK(nrm_resource_reallocate(mr, ptr, 100000, 0, NULL, &ptr));
    CHECK(owner_of(ptr) == nrm_resource_upstream(mr));
    CHECK(has_pattern(ptr, 500, 9, 1000));
    CHECK_EQ(live_nbytes(mr), 100000);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    nrm_resource_release(mr);
}

TEST(an_alignment_that_a_bin_cannot_give_comes_from_the_upstream)
{
    nrm_resource *mr = binning_over(host_source(), 10, 12);
    void *ptr = NULL;
    REQUIRE_OK(nrm_resource_allocate(mr, 100, 8192, NULL, &ptr));
    CHECK_ALIGNED(ptr, 8192);
    CHECK(owner_of(ptr) == nrm_resource_upstream(mr));
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    nrm_resource_release(mr);
}

/* ---- bins ---- */

TEST(bins_stand_in_order_and_one_of_a_size_is_enough)
{
    nrm_resource *mr = binning_over(host_source(), 0, 0), *mine = host_pool();
    static const size_t sizes[] = {5000, 100, 70000, 64, 5000, 128, 1};
    nrm_bin bins[8];
    CHECK_EQ(nrm_binning_get_bins(mr, NULL, 0), 0u);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        CHECK_OK(nrm_binning_add_bin(mr, sizes[i], i == 2 ? mine : NULL));
        mr->ops->check(mr);
    }
    REQUIRE_EQ(nrm_binning_get_bins(mr, bins, 8), 4u);
    CHECK_EQ(bins[0].nbytes, 64u);  /* of 64 and 1 */
    CHECK_EQ(bins[1].nbytes, 128u); /* of 100 and 128 */
    CHECK_EQ(bins[2].nbytes, 5056u);
    CHECK_EQ(bins[3].nbytes, 70016u);
    CHECK(bins[3].resource == mine);
    void *ptr = allocate(mr, 60000);
    CHECK(owner_of(ptr) == mine);
    nrm_resource_release(mine);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    nrm_resource_release(mr);
}

TEST(bins_that_cannot_be_are_refused)
{
    nrm_resource *mr = binning_over(host_source(), 0, 0);
    nrm_resource *outer = binning_over(mr, 0, 0);
    struct counting counting = {0};
    nrm_callback_options options = NRM_OPTIONS(nrm_callback_options);
    nrm_resource *user = NULL, *pinned = NULL;
    nrm_resource_retain(mr);
    options.kind = NRM_KIND_HOST;
    options.allocate = counting_allocate;
    options.deallocate = counting_deallocate;
    options.context = &counting;
    options.calls_user_code = true;
    REQUIRE_OK(nrm_callback_create(&options, &user));
    options.kind = NRM_KIND_PINNED;
    options.calls_user_code = false;
    REQUIRE_OK(nrm_callback_create(&options, &pinned));
    CHECK_STATUS(nrm_binning_add_bin(mr, 0, NULL), NRM_INVALID_VALUE);
    CHECK_STATUS(nrm_binning_add_bin(mr, SIZE_MAX, NULL), NRM_INVALID_VALUE);
    CHECK_STATUS(nrm_binning_add_bin(mr, SIZE_MAX / 4, NULL), NRM_OUT_OF_MEMORY);
    CHECK_STATUS(nrm_binning_add_bin(mr, 100, pinned), NRM_INVALID_VALUE);
    CHECK_STR_HAS(nrm_last_error()->message, "pinned memory, not host");
    CHECK_STATUS(nrm_binning_add_bin(mr, 100, user), NRM_INVALID_VALUE);
    CHECK_STR_HAS(nrm_last_error()->message, "user code");
    CHECK_STATUS(nrm_binning_add_bin(mr, 100, mr), NRM_INVALID_VALUE);
    CHECK_STATUS(nrm_binning_add_bin(mr, 100, outer), NRM_INVALID_VALUE);
    CHECK_STR_HAS(nrm_last_error()->message, "lead back");
    CHECK_OK(nrm_binning_add_bin(outer, 100, mr)); /* its upstream may be its bin */
    CHECK_STATUS(nrm_binning_add_bin(user, 100, NULL), NRM_INVALID_VALUE);
    CHECK_EQ(nrm_binning_get_bins(mr, NULL, 0), 0u);
    CHECK_EQ(nrm_binning_get_bins(user, NULL, 0), 0u);
    nrm_resource_release(outer);
    nrm_resource_release(mr);
    nrm_resource_release(user);
    nrm_resource_release(pinned);
}

TEST(a_bin_that_leads_back_through_bins_is_refused)
{
    nrm_resource *one = binning_over(host_source(), 0, 0);
    nrm_resource *two = binning_over(host_source(), 0, 0);
    CHECK_OK(nrm_binning_add_bin(one, 100, two));
    nrm_resource_retain(one);
    nrm_resource *over = pool_over(one, 0);
    CHECK_STATUS(nrm_binning_add_bin(two, 100, over), NRM_INVALID_VALUE);
    nrm_resource_release(over);
    nrm_resource_release(one);
    nrm_resource_release(two);
}

TEST(exponents_that_cannot_be_are_refused)
{
    nrm_binning_options options = NRM_OPTIONS(nrm_binning_options);
    nrm_limiting_options limit = NRM_OPTIONS(nrm_limiting_options);
    nrm_resource *source = host_source(), *host = NULL, *mr = NULL;
    limit.allocation_limit = (size_t)1 << 40;
    CHECK_OK(nrm_limiting_create(source, &limit, &host));
    nrm_resource_release(source);
    options.make_bins = true;
    options.min_exponent = 12;
    options.max_exponent = 11;
    CHECK_STATUS(nrm_binning_create(host, &options, &mr), NRM_INVALID_VALUE);
    options.max_exponent = 63;
    CHECK_STATUS(nrm_binning_create(host, &options, &mr), NRM_INVALID_VALUE);
    options.max_exponent = 62; /* the first bins are made, and go again */
    CHECK_STATUS(nrm_binning_create(host, &options, &mr), NRM_OUT_OF_MEMORY);
    CHECK(mr == NULL);
    nrm__retired_drain(0);
    CHECK_EQ(live_nbytes(host), 0);
    nrm_resource_release(host);
}

TEST(as_many_bins_as_a_table_holds)
{
    nrm_resource *mr = binning_over(host_source(), 0, 0), *mine = host_pool();
    nrm_status status = NRM_OK;
    size_t n = 0;
    while (status == NRM_OK && n < 1000) {
        n++;
        status = nrm_binning_add_bin(mr, n * 64, mine);
    }
    CHECK_EQ(status, NRM_INVALID_VALUE);
    CHECK_STR_HAS(nrm_last_error()->message, "200 bins at most");
    CHECK_EQ(nrm_binning_get_bins(mr, NULL, 0), 200u);
    void *ptr = allocate(mr, 200 * 64);
    CHECK(owner_of(ptr) == mine);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    nrm_resource_release(mine);
    nrm_resource_release(mr);
}

TEST(an_upstream_that_fails_while_bins_are_made_leaves_nothing)
{
    for (unsigned nth = 1; nth <= 4; nth++) {
        struct model_failing failing = {.fail_at = nth};
        nrm_binning_options options = NRM_OPTIONS(nrm_binning_options);
        nrm_resource *source = model_failing_source(&failing), *mr = NULL;
        options.make_bins = true;
        options.min_exponent = 10;
        options.max_exponent = 13;
        CHECK_STATUS(nrm_binning_create(source, &options, &mr), NRM_OUT_OF_MEMORY);
        CHECK_EQ(atomic_load(&failing.counting.n_live), 0);
        REQUIRE_OK(nrm_binning_create(source, &options, &mr));
        failing.fail_at = atomic_load(&failing.n_calls) + 1;
        CHECK_STATUS(nrm_binning_add_bin(mr, 100000, NULL), NRM_OUT_OF_MEMORY);
        CHECK_EQ(nrm_binning_get_bins(mr, NULL, 0), 4u);
        nrm_resource_release(mr);
        nrm_resource_release(source);
        CHECK_EQ(atomic_load(&failing.counting.n_live), 0);
    }
}

/* ---- bins are added while others allocate ---- */

static void
add_or_allocate(unsigned index, void *arg)
{
    nrm_resource *mr = arg;
    uint64_t state = index + 1;
    if (index == 0) {
        for (size_t nbytes = 64 * 60; nbytes >= 64; nbytes -= 64) {
            CHECK_OK(nrm_binning_add_bin(mr, nbytes, NULL));
        }
        return;
    }
    for (int i = 0; i < 4000; i++) {
        size_t nbytes = 1 + next_random(&state) % 5000;
        unsigned char *ptr = allocate(mr, nbytes);
        memset(ptr, (int)index, nbytes);
        CHECK_EQ(ptr[nbytes - 1], index);
        CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    }
}

TEST(bins_are_added_while_others_allocate)
{
    nrm_resource *mr = binning_over(host_pool(), 0, 0);
    check_threads(4, add_or_allocate, mr);
    CHECK_EQ(nrm_binning_get_bins(mr, NULL, 0), 60u);
    CHECK_EQ(live_nbytes(mr), 0);
    mr->ops->check(mr);
    nrm_resource_release(mr);
}

static nrm_resource *shared;

static void
add_in_child(void)
{
    CHECK_OK(nrm_binning_add_bin(shared, 1 << 20, NULL));
    void *ptr = allocate(shared, 100000);
    CHECK_OK(nrm_resource_deallocate(shared, ptr, 0, NULL));
    shared->ops->check(shared);
}

TEST(a_forked_child_adds_bins_of_its_own)
{
    shared = binning_over(host_pool(), 10, 12);
    CHECK_IN_CHILD(add_in_child);
    CHECK_EQ(nrm_binning_get_bins(shared, NULL, 0), 3u);
    nrm_resource_release(shared);
}

/* As RMM has it: a bin of device memory over managed memory. */
TEST(managed_and_device_memory_together_are_device_memory)
{
    struct counting counting = {0};
    nrm_callback_options options = NRM_OPTIONS(nrm_callback_options);
    nrm_resource *upstream = NULL, *bin = NULL, *mr = NULL;
    options.allocate = counting_allocate;
    options.deallocate = counting_deallocate;
    options.context = &counting;
    options.kind = NRM_KIND_MANAGED;
    REQUIRE_OK(nrm_callback_create(&options, &upstream));
    options.kind = NRM_KIND_DEVICE;
    REQUIRE_OK(nrm_callback_create(&options, &bin));
    REQUIRE_OK(nrm_binning_create(upstream, NULL, &mr));
    nrm_resource_retain(mr); /* as a handler over it would */
    CHECK_STATUS(nrm_binning_add_bin(mr, 4096, bin), NRM_INVALID_VALUE);
    CHECK_STR_HAS(nrm_last_error()->message, "others use it as managed already");
    CHECK_EQ(nrm_resource_kind(mr), NRM_KIND_MANAGED);
    nrm_resource_release(mr);
    CHECK_OK(nrm_binning_add_bin(mr, 4096, bin));
    CHECK_EQ(nrm_resource_kind(mr), NRM_KIND_DEVICE);
    CHECK_OK(nrm_binning_add_bin(mr, 8192, upstream)); /* managed, and stays device */
    CHECK_EQ(nrm_resource_kind(mr), NRM_KIND_DEVICE);
    CHECK_OK(nrm_resource_deallocate(mr, allocate(mr, 100), 100, NULL));
    CHECK_EQ(counting.n_live, 0);
    nrm_resource_release(mr);
    nrm_resource_release(bin);
    nrm_resource_release(upstream);
}

TEST_EACH(a_block_with_a_copy_in_flight_is_not_handed_out, copies_kinds)
{
    struct copies copies = copies_begin(row);
    nrm_resource_retain(copies.source);
    nrm_resource *mr = binning_over(pool_over(copies.source, 0), 12, 16);
    copies_check_held(&copies, mr, 60000, 8, 140);
    copies_end(&copies, mr);
}

CHECK_MAIN
