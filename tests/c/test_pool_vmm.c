/* A pool of device memory that maps its segments side by side: that they are one
   memory, how it grows and shrinks, and who else reaches it. */
#include <pthread.h>

#include "addresses.h"
#include "base/bits.h"
#include "fixtures.h"
#include "mapped_pool.h"
#include "pools/pool.h"
#include "streams.h"

/* ---- one memory ---- */

TEST(a_block_lies_in_several_pieces)
{
    start(0);
    char *ptr = take(5 * NRM__MIB);
    CHECK_EQ(n_pieces(), 3u);
    CHECK_EQ(reserved_nbytes(pool), (int64_t)(3 * PIECE));
    CHECK(takes_a_copy(ptr, 5 * NRM__MIB));
    CHECK_EQ(simulator_count(NRM_CUDASIM_DEVICE_ALLOCATIONS), 0u);
    give(ptr);
    stop();
}

TEST(pieces_that_were_mapped_one_by_one_are_one_memory)
{
    char *ptrs[3];
    start(0);
    for (int i = 0; i < 3; i++) {
        ptrs[i] = take(PIECE);
        CHECK_EQ(n_pieces(), (uint64_t)i + 1);
        CHECK(ptrs[i] == ptrs[0] + (size_t)i * PIECE);
    }
    give(ptrs[1]);
    give(ptrs[0]);
    give(ptrs[2]);
    CHECK(take(3 * PIECE) == ptrs[0]);
    CHECK_EQ(n_pieces(), 3u);
    CHECK(takes_a_copy(ptrs[0], 3 * PIECE));
    give(ptrs[0]);
    stop();
}

TEST(a_growth_adds_only_what_is_missing_beside_free_memory)
{
    start(0);
    char *small = take(NRM__MIB);
    char *large = take(PIECE + 1000);
    CHECK(large == small + NRM__MIB);
    CHECK_EQ(n_pieces(), 2u);
    give(small);
    give(large);
    stop();
}

TEST(an_address_in_any_piece_leads_to_its_block)
{
    nrm_block_info info;
    start(0);
    char *before = take(NRM__MIB), *ptr = take(3 * PIECE);
    for (size_t at = 0; at < 3 * PIECE; at += 100001) {
        REQUIRE_OK(nrm_block_find(ptr + at, &info));
        CHECK(info.ptr == ptr);
        CHECK_EQ(info.nbytes, 3 * PIECE);
        nrm_resource_release(info.resource);
    }
    CHECK_STATUS(nrm_resource_deallocate(pool, ptr + 2 * PIECE, 0, NULL),
                 NRM_NOT_OWNED);
    give(ptr);
    CHECK_EQ(nrm_block_find(ptr + PIECE, &info), NRM_NOT_FOUND);
    give(before);
    stop();
}

TEST(every_alignment_is_honoured)
{
    start(0);
    char *first = take(1000);
    for (size_t alignment = 256; alignment <= 8 * NRM__MIB; alignment *= 2) {
        void *ptr = NULL;
        REQUIRE_OK(nrm_resource_allocate(pool, 1000, alignment, NULL, &ptr));
        CHECK_ALIGNED(ptr, alignment);
        give(ptr);
    }
    give(first);
    stop();
}

/* ---- shrinking ---- */

TEST(a_piece_goes_back_from_any_place_and_its_hole_is_filled_first)
{
    char *ptrs[5];
    start(0);
    for (int i = 0; i < 5; i++) {
        ptrs[i] = take(PIECE);
    }
    give(ptrs[1]);
    give(ptrs[3]);
    CHECK_EQ(trim(), 2 * PIECE);
    CHECK_EQ(n_pieces(), 3u);
    CHECK_EQ(reserved_nbytes(pool), (int64_t)(3 * PIECE));
    CHECK(take(PIECE) == ptrs[1]);
    char *two = take(2 * PIECE); /* the second hole is too small */
    CHECK(two == ptrs[0] + 5 * PIECE);
    CHECK(take(PIECE) == ptrs[3]);
    for (int i = 0; i < 5; i++) {
        give(ptrs[i]);
    }
    give(two);
    stop();
}

TEST(what_lies_in_one_piece_keeps_no_other)
{
    start(0);
    char *ptr = take(4 * PIECE);
    give(ptr);
    char *small = take(1000);
    CHECK(small == ptr);
    CHECK_EQ(trim(), 3 * PIECE);
    CHECK_EQ(n_pieces(), 1u);
    CHECK(takes_a_copy(small, 1000));
    give(small);
    CHECK_EQ(trim(), PIECE);
    CHECK_EQ(n_pieces(), 0u);
    stop();
}

TEST(a_hole_is_filled_as_far_as_it_takes_with_both_neighbours)
{
    char *ptrs[3];
    start(0);
    for (int i = 0; i < 3; i++) {
        ptrs[i] = take(PIECE);
    }
    give(ptrs[1]);
    CHECK_EQ(trim(), PIECE);
    give(ptrs[0]);
    give(ptrs[2]);
    CHECK(take(3 * PIECE) == ptrs[0]);
    CHECK_EQ(n_pieces(), 3u);
    give(ptrs[0]);
    stop();
}

TEST(nothing_is_unmapped_before_its_last_use)
{
    start(0);
    nrm_stream *a = new_stream();
    void *ptr = NULL;
    REQUIRE_OK(nrm_resource_allocate(pool, 2 * PIECE, 0, a, &ptr));
    hold(a);
    CHECK_EQ(cuda.cuMemsetD8Async((nrm_CUdeviceptr)(uintptr_t)ptr, 1, 2 * PIECE,
                                  handle_of(a)),
             NRM_CUDA_SUCCESS);
    CHECK_OK(nrm_resource_deallocate(pool, ptr, 0, a));
    CHECK_EQ(trim(), 0u);
    CHECK_EQ(n_pieces(), 2u);
    let_go(a);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    CHECK_EQ(trim(), 2 * PIECE);
    CHECK_EQ(n_pieces(), 0u);
    nrm_stream_release(a);
    stop();
}

TEST(a_pool_that_ends_waits_for_the_gpu)
{
    pthread_t thread;
    start(0);
    nrm_stream *a = new_stream();
    void *ptr = NULL;
    REQUIRE_OK(nrm_resource_allocate(pool, PIECE, 0, a, &ptr));
    hold(a);
    CHECK_EQ(cuda.cuMemsetD8Async((nrm_CUdeviceptr)(uintptr_t)ptr, 1, PIECE,
                                  handle_of(a)),
             NRM_CUDA_SUCCESS);
    CHECK_OK(nrm_resource_deallocate(pool, ptr, 0, a));
    CHECK_EQ(pthread_create(&thread, NULL, let_go_soon, a), 0);
    nrm_resource_release(pool);
    pthread_join(thread, NULL);
    nrm_stream_release(a);
    check_nothing_is_left();
    cuda.cuCtxSetCurrent(NULL);
    simulator_check_faults();
}

/* ---- sizes ---- */

TEST(the_limit_counts_what_is_mapped)
{
    void *second = NULL;
    start(3 * PIECE);
    char *first = take(2 * PIECE);
    CHECK_STATUS(nrm_resource_allocate(pool, 2 * PIECE, 0, NULL, &second),
                 NRM_OUT_OF_MEMORY);
    CHECK_STR_HAS(nrm_last_error()->message, "limit 6 MiB");
    CHECK_OK(nrm_resource_allocate(pool, PIECE, 0, NULL, &second));
    CHECK_LE(reserved_nbytes(pool), (int64_t)(3 * PIECE));
    nrm__pool_check(pool);
    give(first);
    give(second);
    first = take(3 * PIECE);
    give(first);
    stop();
}

TEST(an_initial_size_is_mapped_at_once)
{
    nrm_pool_options options = options_of(5 * NRM__MIB, 0);
    start_machine();
    pool = pool_with(device_source(), &options);
    CHECK_EQ(reserved_nbytes(pool), (int64_t)(3 * PIECE));
    char *ptr = take(3 * PIECE);
    CHECK_EQ(n_pieces(), 3u);
    give(ptr);
    stop();
}

/* ---- what is free and does not fit ---- */

/* Takes blocks of a piece each, and gives every second one back. */
static void
make_holes(char **ptrs, int n)
{
    for (int i = 0; i < n; i++) {
        ptrs[i] = take(PIECE);
    }
    for (int i = 0; i < n; i += 2) {
        give(ptrs[i]);
    }
}

TEST(free_pieces_move_to_where_a_large_block_fits)
{
    char *ptrs[16];
    start(0);
    make_holes(ptrs, 16);
    char *large = take(8 * PIECE);
    CHECK_EQ(reserved_nbytes(pool), (int64_t)(16 * PIECE));
    CHECK_EQ(n_pieces(), 16u);
    CHECK(takes_a_copy(large, 8 * PIECE));
    for (int i = 1; i < 16; i += 2) {
        CHECK(takes_a_copy(ptrs[i], PIECE));
        give(ptrs[i]);
    }
    give(large);
    stop();
}

TEST(what_is_free_beside_a_growth_is_used_where_it_is)
{
    char *ptrs[5];
    start(0);
    for (int i = 0; i < 5; i++) {
        ptrs[i] = take(PIECE);
    }
    give(ptrs[0]);
    give(ptrs[4]);
    uint64_t before = sim.call_count("cuMemCreate");
    char *large = take(3 * PIECE);
    CHECK(large == ptrs[4]);
    CHECK_EQ(sim.call_count("cuMemCreate"), before + 2);
    CHECK_EQ(sim.call_count("cuMemUnmap"), 1u);
    CHECK_EQ(n_pieces(), 6u);
    for (int i = 1; i < 4; i++) {
        give(ptrs[i]);
    }
    give(large);
    stop();
}

TEST(little_that_is_free_stays_where_it_is)
{
    char *ptrs[34];
    start(0);
    for (int i = 0; i < 34; i++) {
        ptrs[i] = take(PIECE);
    }
    give(ptrs[0]);
    give(ptrs[2]);
    char *large = take(2 * PIECE); /* two of 32 */
    CHECK_EQ(sim.call_count("cuMemUnmap"), 0u);
    CHECK_EQ(n_pieces(), 36u);
    CHECK_EQ(trim(), 2 * PIECE);
    for (int i = 0; i < 34; i++) {
        if (i != 0 && i != 2) {
            give(ptrs[i]);
        }
    }
    give(large);
    stop();
}

TEST(no_piece_moves_that_the_gpu_may_use)
{
    char *ptrs[16];
    start(0);
    nrm_stream *a = new_stream();
    for (int i = 0; i < 16; i++) {
        ptrs[i] = take(PIECE);
    }
    hold(a);
    CHECK_EQ(cuda.cuMemsetD8Async((nrm_CUdeviceptr)(uintptr_t)ptrs[0], 1, PIECE,
                                  handle_of(a)),
             NRM_CUDA_SUCCESS);
    for (int i = 0; i < 16; i += 2) {
        CHECK_OK(nrm_resource_deallocate(pool, ptrs[i], 0, a));
    }
    char *large = take(8 * PIECE);
    CHECK_EQ(sim.call_count("cuMemUnmap"), 0u);
    CHECK_EQ(n_pieces(), 24u);
    let_go(a);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    for (int i = 1; i < 16; i += 2) {
        give(ptrs[i]);
    }
    give(large);
    nrm_stream_release(a);
    stop();
}

TEST(a_large_pool_grows_by_larger_pieces)
{
    nrm_resource *mr = NULL, *source = NULL;
    void *most = NULL, *more = NULL;
    if (!can_reserve(2 * 64 * NRM__GIB)) {
        SKIP("there are no addresses for a device of 64 GiB");
    }
    machine_nbytes = 64 * NRM__GIB;
    start_machine();
    machine_nbytes = 8 * NRM__GIB;
    source = device_source();
    REQUIRE_OK(nrm_pool_create(source, NULL, &mr));
    nrm_resource_release(source);
    pool = mr;
    REQUIRE_OK(nrm_resource_allocate(pool, 32 * NRM__GIB, 0, NULL, &most));
    CHECK_EQ(n_pieces(), 512u);
    REQUIRE_OK(nrm_resource_allocate(pool, 1000, 0, NULL, &more));
    CHECK_EQ(n_pieces(), 513u);
    CHECK_EQ(reserved_nbytes(pool), (int64_t)(32 * NRM__GIB + 256 * NRM__MIB));
    char *small = take(1000); /* blocks are as small there as elsewhere */
    CHECK(small == (char *)more + 1024);
    give(small);
    give(most);
    give(more);
    stop();
}

TEST(a_device_with_less_than_a_piece_left_is_asked_for_what_is_missing)
{
    nrm_resource *source = NULL;
    machine_nbytes = 32 * NRM__MIB;
    start_machine();
    machine_nbytes = 8 * NRM__GIB;
    source = device_source();
    REQUIRE_OK(nrm_pool_create(source, NULL, &pool));
    nrm_resource_release(source);
    char *ptr = take(3 * NRM__MIB);
    CHECK_EQ(n_pieces(), 1u);
    CHECK_EQ(reserved_nbytes(pool), (int64_t)(4 * NRM__MIB));
    CHECK_EQ(simulator_count(NRM_CUDASIM_DEVICE_ALLOCATIONS), 0u);
    give(ptr);
    stop();
}

/* ---- peers ---- */

static nrm_CUresult
write_from(int device, void *ptr, size_t nbytes)
{
    make_current(device);
    nrm_CUstream stream = new_handle();
    nrm_CUresult code =
        cuda.cuMemsetD8Async((nrm_CUdeviceptr)(uintptr_t)ptr, 7, nbytes, stream);
    CHECK_EQ(cuda.cuStreamSynchronize(stream), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamDestroy(stream), NRM_CUDA_SUCCESS);
    make_current(0);
    return code;
}

static void
start_two(nrm_segments segments)
{
    struct nrm_cudasim_config config = simulator_config();
    nrm_pool_options options = options_of(0, 0);
    config.devices = 2;
    simulator_start(&config);
    CHECK_OK(nrm__cuda_init(NULL));
    make_current(0);
    options.segments = segments;
    pool = pool_with(device_source(), &options);
}

TEST(a_peer_reaches_what_a_pool_has_and_what_it_will_have)
{
    start_two(NRM_SEGMENTS_VMM);
    char *before = take(PIECE);
    CHECK_EQ(write_from(1, before, PIECE), NRM_CUDA_ERROR_INVALID_VALUE);
    CHECK_OK(nrm_pool_add_peer(pool, 1));
    CHECK_OK(nrm_pool_add_peer(pool, 1)); /* once more changes nothing */
    CHECK_OK(nrm_pool_add_peer(pool, 0)); /* its own */
    CHECK_EQ(write_from(1, before, PIECE), NRM_CUDA_SUCCESS);
    char *after = take(3 * PIECE);
    CHECK_EQ(write_from(1, after, 3 * PIECE), NRM_CUDA_SUCCESS);
    give(before);
    give(after);
    stop();
}

TEST(a_peer_may_be_added_before_anything_is_allocated)
{
    start_two(NRM_SEGMENTS_VMM);
    CHECK_OK(nrm_pool_add_peer(pool, 1));
    char *ptr = take(PIECE);
    CHECK_EQ(write_from(1, ptr, PIECE), NRM_CUDA_SUCCESS);
    give(ptr);
    stop();
}

TEST(where_no_peer_can_be_added)
{
    start_two(NRM_SEGMENTS_ALLOC);
    CHECK_EQ(nrm_pool_add_peer(pool, 1), NRM_NOT_SUPPORTED);
    CHECK_STR_HAS(nrm_last_error()->message, "does not map");
    nrm_resource *source = device_source();
    CHECK_EQ(nrm_pool_add_peer(source, 1), NRM_INVALID_VALUE);
    nrm_resource_release(source);
    stop();
    start_two(NRM_SEGMENTS_VMM);
    CHECK_EQ(nrm_pool_add_peer(pool, 2), NRM_INVALID_VALUE);
    char *ptr = take(PIECE);
    sim.fail("cuMemSetAccess", 1, NRM_CUDA_ERROR_INVALID_DEVICE, 1);
    CHECK_EQ(nrm_pool_add_peer(pool, 1), NRM_CUDA_ERROR);
    CHECK_NE(write_from(1, ptr, PIECE), NRM_CUDA_SUCCESS);
    CHECK_OK(nrm_pool_add_peer(pool, 1));
    CHECK_EQ(write_from(1, ptr, PIECE), NRM_CUDA_SUCCESS);
    give(ptr);
    stop();
}

CHECK_MAIN
