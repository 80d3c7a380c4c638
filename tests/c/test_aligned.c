/* Alignment by an adaptor: of large blocks, over any resource, or with a reason why
   not. */
#include "base/bits.h"
#include "fixtures.h"
#include "nrm/adaptors.h"
#include "workers.h"

static nrm_resource *
align(nrm_resource *upstream, size_t alignment, size_t threshold)
{
    nrm_aligned_options options = NRM_OPTIONS(nrm_aligned_options);
    nrm_resource *mr = NULL;
    options.alignment = alignment;
    options.alignment_threshold = threshold;
    CHECK_OK(nrm_aligned_create(upstream, &options, &mr));
    nrm_resource_release(upstream);
    return mr;
}

static nrm_resource *
make_arena(void)
{
    nrm_arena_options options = NRM_OPTIONS(nrm_arena_options);
    nrm_resource *source = host_source(), *mr = NULL;
    options.nbytes = 64 * NRM__MIB;
    CHECK_OK(nrm_arena_create(source, &options, &mr));
    nrm_resource_release(source);
    return mr;
}

static const struct upstream_case {
    const char *name;
    nrm_resource *(*make)(void);
} upstreams[] = {{"host", host_source}, {"pool", host_pool}, {"arena", make_arena}};

TEST_EACH(every_block_from_the_threshold_on_is_aligned, upstreams)
{
    static const size_t alignments[] = {0, 64, 256, 4096, 65536, 2 * NRM__MIB};
    for (size_t i = 0; i < sizeof alignments / sizeof *alignments; i++) {
        size_t expected = alignments[i] != 0 ? alignments[i] : 256;
        nrm_resource *mr = align(row->make(), alignments[i], 1000);
        for (size_t nbytes = 1; nbytes < 3 * NRM__MIB; nbytes = nbytes * 5 + 1) {
            void *ptr = allocate(mr, nbytes);
            CHECK_ALIGNED(ptr, nbytes >= 1000 ? expected : 64);
            write_pattern(ptr, nbytes, 7);
            CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
        }
        CHECK_EQ(live_nbytes(mr), 0);
        nrm_resource_release(mr);
    }
}

TEST(a_block_that_grows_over_the_threshold_is_aligned_then)
{
    nrm_resource *mr = align(host_pool(), 65536, 10000);
    void *ptr = allocate(mr, 500);
    write_pattern(ptr, 500, 3);
    for (size_t nbytes = 1000; nbytes < 10 * NRM__MIB; nbytes *= 3) {
        REQUIRE_OK(nrm_resource_reallocate(mr, ptr, nbytes, 0, NULL, &ptr));
        CHECK_ALIGNED(ptr, nbytes >= 10000 ? 65536 : 64);
        CHECK(has_pattern(ptr, 500, 3, 500));
    }
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    nrm_resource_release(mr);
}

TEST(a_greater_alignment_of_the_request_holds)
{
    void *ptr = NULL;
    nrm_resource *mr = align(host_pool(), 256, 0);
    REQUIRE_OK(nrm_resource_allocate(mr, 100, 8192, NULL, &ptr));
    CHECK_ALIGNED(ptr, 8192);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    nrm_resource_release(mr);
}

TEST(an_upstream_that_cannot_refuses_and_says_why)
{
    struct counting counting = {.offset = 1024};
    void *ptr = NULL;
    nrm_resource *mr = align(counting_source(&counting), 4096, 0);
    CHECK_STATUS(nrm_resource_allocate(mr, 100, 0, NULL, &ptr), NRM_NOT_SUPPORTED);
    CHECK_STR_HAS(nrm_last_error()->message, "4096");
    CHECK_EQ(atomic_load(&counting.n_live), 0);
    nrm_resource_release(mr);
}

TEST(a_default_that_is_enough_takes_the_short_way)
{
    nrm_resource *mr = align(host_pool(), 64, 0);
    void *ptr = allocate(mr, 100);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    CHECK_GT(n_kept(mr), 0);
    CHECK_EQ(live_nbytes(mr), 0);
    nrm_resource_release(mr);
}

TEST(wrong_alignments_are_refused)
{
    nrm_aligned_options options = NRM_OPTIONS(nrm_aligned_options);
    nrm_resource *source = host_source(), *mr = NULL;
    options.alignment = 100;
    CHECK_STATUS(nrm_aligned_create(source, &options, &mr), NRM_INVALID_VALUE);
    CHECK_STR_HAS(nrm_last_error()->message, "power of two, not 100 B");
    CHECK_STATUS(nrm_aligned_create(NULL, NULL, &mr), NRM_INVALID_VALUE);
    nrm_resource_release(source);
}

CHECK_MAIN
