/* How much a thread keeps: a share of what it has live, and one large block of ordinary
   memory. */
#include "pools/pool_internal.h"

#include "device_pool.h"
#include "nrm/options.h"
#include "workers.h"

#define SIZE (7 * NRM__MIB) /* one of those that have a set of their own */
#define KEPT (64 * NRM__MIB)
#define DEVICE_KEPT (32 * NRM__MIB)
#define LARGE (256 * NRM__MIB)
#define HUGE_LIVE (8 * NRM__GIB)

static size_t
n_kept_bytes(nrm_resource *mr)
{
    struct nrm__cache *cache;
    struct nrm__slot *slot = nrm__cache_enter_slot(mr, &cache);
    if (!CHECK(slot != NULL)) {
        return 0;
    }
    size_t n = slot->magazines != NULL ? slot->magazines->set_nbytes : 0;
    nrm__cache_leave(cache);
    return n;
}

/* ---- on a stream ---- */

static void
start(uint64_t device_nbytes)
{
    nrm_resource *source = NULL;
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    struct nrm_cudasim_config config = simulator_config();
    config.memory_nbytes = device_nbytes;
    start_device(&config, 1);
    CHECK_OK(nrm_device_create(NULL, &source));
    CHECK_OK(nrm_pool_create(source, &options, &pool));
    nrm_resource_release(source);
}

static const struct live {
    const char *name;
    size_t nbytes, most;
} lives[] = {{"little", 20 * SIZE, DEVICE_KEPT},
             {"much", HUGE_LIVE, HUGE_LIVE / 64},
             {"little again", 20 * SIZE, DEVICE_KEPT}};

TEST_EACH(a_thread_keeps_a_share_of_what_it_has_live, lives)
{
    enum { N_GIVEN = 20 };
    start(2 * HUGE_LIVE);
    nrm_stream *stream = new_stream();
    size_t n = row->nbytes / SIZE, n_long = 0, largest = 0;
    void **ptrs = calloc(n, sizeof *ptrs);
    for (size_t i = 0; i < n; i++) {
        CHECK_OK(nrm_resource_allocate(pool, SIZE, 0, stream, &ptrs[i]));
        CHECK_LE(n_kept_bytes(pool), row->most);
    }
    for (size_t i = 0; i < N_GIVEN; i++) {
        size_t before = n_kept_bytes(pool);
        give(ptrs[i], stream);
        n_long += n_kept_bytes(pool) != before + SIZE;
        CHECK_LE(n_kept_bytes(pool), row->most);
        largest = nrm__max(largest, n_kept_bytes(pool));
    }
    CHECK(n_long < N_GIVEN);
    CHECK(largest > row->most / 2);
    for (size_t i = N_GIVEN; i < n; i++) {
        CHECK_OK(nrm_resource_deallocate(pool, ptrs[i], 0, stream));
    }
    free(ptrs);
    nrm_stream_release(stream);
    stop();
}

/* ---- large blocks of ordinary memory ---- */

static void *
allocate_twice(nrm_resource *mr, size_t nbytes)
{
    CHECK_OK(nrm_resource_deallocate(mr, allocate(mr, nbytes), 0, NULL));
    return allocate(mr, nbytes);
}

TEST(one_large_block_is_kept)
{
    nrm_resource *mr = pool_over(host_source(), 0);
    void *ptr = allocate_twice(mr, LARGE);
    CHECK_EQ(n_kept(mr), 0u);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    CHECK_EQ(n_kept(mr), 1u);
    int64_t reserved = reserved_nbytes(mr);
    for (int i = 0; i < 4; i++) { /* for a request of about its size */
        size_t kept = n_kept_bytes(mr);
        CHECK_EQ(allocate(mr, LARGE - (size_t)i * NRM__MIB), ptr);
        CHECK_EQ(n_kept_bytes(mr), 0u);
        CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
        CHECK_EQ(n_kept_bytes(mr), kept);
    }
    nrm__pool_check(mr);
    /* It is there for every other request too, before the pool grows. */
    void *smaller = allocate(mr, LARGE / 2);
    CHECK_EQ(reserved_nbytes(mr), reserved);
    CHECK_OK(nrm_resource_deallocate(mr, smaller, 0, NULL));
    CHECK_OK(nrm_resource_trim(mr, 0, NULL));
    CHECK_EQ(reserved_nbytes(mr), 0);
    nrm_resource_release(mr);
}

/* Nothing looks for it on the short way only to have it brought back from the
   thread. */
TEST(a_pair_of_a_large_block_takes_no_lock)
{
    nrm_resource *mr = pool_over(host_source(), 0);
    CHECK_OK(nrm_resource_deallocate(mr, allocate_twice(mr, LARGE), 0, NULL));
    struct nrm__pool *engine = (struct nrm__pool *)mr;
    nrm__lock_acquire(&engine->lock);
    for (int i = 0; i < 4; i++) {
        CHECK_OK(nrm_resource_deallocate(mr, allocate(mr, LARGE), 0, NULL));
    }
    nrm__lock_release(&engine->lock);
    nrm_resource_release(mr);
}

/* Nor does it leave room for others that is not meant for them. */
TEST(a_block_too_large_to_be_kept_changes_nothing)
{
    enum { N = 6 };
    void *ptrs[2 * N];
    CHECK_OK(nrm_option_set(NRM_OPT_IDLE_LIMIT, "64 GiB"));
    nrm_resource *mr = pool_over(host_source(), 0);
    CHECK_OK(nrm_option_set(NRM_OPT_IDLE_LIMIT, "0"));
    void *ptr = allocate_twice(mr, 3 * NRM__GIB);
    for (int i = 0; i < 2 * N; i++) { /* of two sizes, in two sets */
        ptrs[i] = allocate(mr, 16 * NRM__MIB + (size_t)(i % 2) * NRM__MIB);
    }
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    CHECK_EQ(n_kept(mr), 0u);
    for (int i = 0; i < 2 * N; i++) {
        CHECK_OK(nrm_resource_deallocate(mr, ptrs[i], 0, NULL));
        CHECK_LE(n_kept_bytes(mr), KEPT);
    }
    nrm_resource_release(mr);
}

TEST(no_block_is_kept_that_is_much_of_what_may_lie_idle)
{
    CHECK_OK(nrm_option_set(NRM_OPT_IDLE_LIMIT, "768 MiB"));
    nrm_resource *mr = pool_over(host_source(), 0);
    CHECK_OK(nrm_option_set(NRM_OPT_IDLE_LIMIT, "0"));
    for (int i = 0; i < 4; i++) {
        void *ptr = allocate_twice(mr, LARGE);
        CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
        CHECK_EQ(n_kept(mr), 0u);
    }
    nrm_resource_release(mr);
}

TEST(an_array_that_grows_has_the_pages_of_the_block_that_was_kept)
{
    nrm_resource *mr = pool_over(host_source(), 0);
    void *kept = allocate_twice(mr, LARGE);
    CHECK_OK(nrm_resource_deallocate(mr, kept, 0, NULL));
    CHECK_EQ(n_kept(mr), 1u);
    int64_t reserved = reserved_nbytes(mr);
    void *ptr = allocate(mr, NRM__MIB);
    for (size_t nbytes = 2 * NRM__MIB; nbytes <= LARGE / 2; nbytes += 8 * NRM__MIB) {
        CHECK_OK(nrm_resource_reallocate(mr, ptr, nbytes, 0, NULL, &ptr));
    }
    CHECK_LE(reserved_nbytes(mr), reserved);
    nrm__pool_check(mr);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    nrm_resource_release(mr);
}

CHECK_MAIN
