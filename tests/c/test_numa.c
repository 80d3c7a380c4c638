/* NUMA by system calls, for which one node is enough, and pools where there are
   several. */

#include "fixtures.h"

#include <errno.h>
#include <pthread.h>

#include "base/bits.h"
#include "core/block_map.h"
#include "core/cache.h"

#include "os/memory.h"
#include "os/numa.h"
#include "pools/pool.h"

TEST(there_is_at_least_one_node_with_memory)
{
    int n_with_memory = 0;
    REQUIRE(nrm__numa_n_nodes() >= 1);
    for (int node = 0; node < nrm__numa_n_nodes(); node++) {
        n_with_memory += nrm__numa_has_node(node);
    }
    CHECK_GE(n_with_memory, 1);
    NOTE("%d nodes", nrm__numa_n_nodes());
}

TEST(nodes_outside_do_not_exist)
{
    CHECK(!nrm__numa_has_node(-1));
    CHECK(!nrm__numa_has_node(nrm__numa_n_nodes()));
    CHECK(!nrm__numa_has_node(1 << 30));
}

TEST(pages_are_made_on_the_node_that_they_are_bound_to)
{
    size_t nbytes = 16 * nrm__page_size();
    for (int node = 0; node < nrm__numa_n_nodes(); node++) {
        char *ptr = NULL;
        if (!nrm__numa_has_node(node)) {
            continue;
        }
        REQUIRE_EQ(nrm__map(nbytes, nrm__page_size(), (void **)&ptr), 0);
        int code = nrm__numa_bind(ptr, nbytes, node);
        if (code == EPERM) {
            SKIP("binding is forbidden here");
        }
        CHECK_EQ(code, 0);
        CHECK_EQ(nrm__numa_node_of(ptr), -1); /* no page yet, and asking makes none */
        memset(ptr, 1, nbytes);
        CHECK_EQ(nrm__numa_node_of(ptr), node);
        CHECK_EQ(nrm__numa_node_of(ptr + nbytes - 1), node);
        nrm__unmap(ptr, nbytes);
    }
}

TEST(binding_to_a_node_that_is_not_there_is_an_error)
{
    size_t nbytes = nrm__page_size();
    void *ptr = NULL;
    REQUIRE_EQ(nrm__map(nbytes, nbytes, &ptr), 0);
    CHECK_EQ(nrm__numa_bind(ptr, nbytes, nrm__numa_n_nodes()), EINVAL);
    CHECK_EQ(nrm__numa_bind(ptr, nbytes, -1), EINVAL);
    nrm__unmap(ptr, nbytes);
}

/* In a thread of its own, as the preference stays. */
static void *
makes_a_page(void *arg)
{
    int node = *(int *)arg;
    char *ptr = NULL;
    nrm__numa_prefer(node);
    if (CHECK_EQ(nrm__map(nrm__page_size(), nrm__page_size(), (void **)&ptr), 0)) {
        ptr[0] = 1;
        CHECK_EQ(nrm__numa_node_of(ptr), node);
        CHECK_EQ(nrm__numa_local_node(), -1); /* now it has chosen */
        nrm__unmap(ptr, nrm__page_size());
    }
    return NULL;
}

TEST(a_thread_may_prefer_a_node)
{
    for (int node = 0; node < nrm__numa_n_nodes(); node++) {
        pthread_t thread;
        if (nrm__numa_has_node(node)) {
            REQUIRE_EQ(pthread_create(&thread, NULL, makes_a_page, &node), 0);
            pthread_join(thread, NULL);
        }
    }
    nrm__numa_prefer(-1);
    nrm__numa_prefer(nrm__numa_n_nodes());
}

TEST(the_local_node_is_one_that_exists)
{
    int node = nrm__numa_local_node();
    CHECK(node == -1 || nrm__numa_n_nodes() > 1);
    CHECK_LT(node, nrm__numa_n_nodes());
}

TEST(the_node_of_an_address_without_memory_is_unknown)
{
    CHECK_EQ(nrm__numa_node_of(NULL), -1);
}

TEST(the_core_of_a_thread_is_on_a_node)
{
    CHECK_GE(nrm__numa_here(), 0);
    CHECK_LT(nrm__numa_here(), nrm__numa_n_nodes());
}

/* ---- a pool on a machine of several nodes, which is a pretence ---- */

#define BLOCK ((size_t)3 * NRM__MIB)

static _Thread_local int node; /* that a thread says it is on */

static int
get_node(void)
{
    return node;
}

/* So large that no thread keeps it for itself. */
#define ALONE (33 * NRM__MIB)

static unsigned
segment_node(const void *ptr)
{
    return nrm__block_map_peek((uintptr_t)ptr)->node;
}

static nrm_resource *
pool_of_nodes(int n_nodes, const nrm_host_options *host_options, size_t maximum_nbytes)
{
    nrm_resource *host = NULL;
    node = 0;
    nrm__numa_pretend(n_nodes, get_node);
    CHECK_OK(nrm_host_create(host_options, &host));
    return pool_over(host, maximum_nbytes);
}

static void
end(nrm_resource *mr)
{
    nrm__pool_check(mr);
    CHECK_EQ(live_nbytes(mr), 0);
    nrm_resource_release(mr);
    nrm__numa_pretend(0, NULL);
}

static void
give(nrm_resource *mr, void *ptr)
{
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    nrm__cache_drain(mr);
}

TEST(a_block_goes_back_to_its_node_whoever_frees_it)
{
    nrm_resource *mr = pool_of_nodes(2, NULL, 0);
    void *a = allocate(mr, BLOCK);
    CHECK_EQ(segment_node(a), 0u);
    node = 1;
    give(mr, a); /* a thread of the other node does */
    void *b = allocate(mr, BLOCK);
    CHECK(b != a);
    CHECK_EQ(segment_node(b), 1u);
    nrm__pool_check(mr);
    node = 0;
    CHECK(allocate(mr, BLOCK) == a);
    give(mr, b);
    give(mr, a);
    node = 1;
    CHECK(allocate(mr, BLOCK) == b);
    give(mr, b);
    end(mr);
}

static const struct {
    const char *name;
    size_t nbytes;
} sizes[] = {
    {"chunk-sized", 65536},
    {"a few pages", 20000},
    {"huge", ALONE},
};

TEST_EACH(nodes_keep_apart_for_ever, sizes)
{
    enum { N = 12 };
    void *ptrs[2][N];
    nrm_resource *mr = pool_of_nodes(2, NULL, 0);
    for (int round = 0; round < 6; round++) {
        for (node = 0; node < 2; node++) {
            for (int i = 0; i < N; i++) {
                ptrs[node][i] = allocate(mr, row->nbytes);
                CHECK_EQ(segment_node(ptrs[node][i]), (unsigned)node);
            }
            nrm__cache_drain(mr); /* what it took besides, of this node */
        }
        nrm__pool_check(mr);
        for (node = 0; node < 2; node++) {
            for (int i = 0; i < N; i++) { /* those of the other */
                CHECK_OK(nrm_resource_deallocate(mr, ptrs[!node][i], 0, NULL));
            }
            nrm__cache_drain(mr);
        }
    }
    end(mr);
}

TEST(a_full_pool_gives_what_another_node_has)
{
    nrm_resource *mr = pool_of_nodes(2, NULL, 16 * NRM__MIB);
    void *ptrs[4];
    for (int i = 0; i < 4; i++) {
        ptrs[i] = allocate(mr, BLOCK); /* two in each segment of 8 MiB */
    }
    for (int i = 0; i < 4; i++) {
        give(mr, ptrs[i]);
    }
    node = 1;
    void *other = allocate(mr, BLOCK); /* growth is refused */
    CHECK_EQ(segment_node(other), 0u);
    CHECK_EQ(reserved_nbytes(mr), 16 * (int64_t)NRM__MIB);
    give(mr, other);
    end(mr);
}

TEST(memory_bound_to_a_node_is_anybodys)
{
    nrm_host_options options = NRM_OPTIONS(nrm_host_options);
    options.bind_numa = true;
    nrm__numa_pretend(0, NULL);
    nrm_resource *host = NULL;
    if (nrm_host_create(&options, &host) != NRM_OK) {
        SKIP("binding is forbidden here");
    }
    nrm__numa_pretend(2, get_node);
    node = 0;
    nrm_resource *mr = pool_over(host, 0);
    void *a = allocate(mr, BLOCK);
    give(mr, a);
    node = 1;
    CHECK(allocate(mr, BLOCK) == a);
    give(mr, a);
    end(mr);
}

TEST(one_node_has_all)
{
    nrm_resource *mr = pool_of_nodes(1, NULL, 0);
    void *a = allocate(mr, BLOCK);
    give(mr, a);
    node = 1;
    CHECK(allocate(mr, BLOCK) == a);
    give(mr, a);
    end(mr);
}

static int
change_node(void)
{
    return node++ % 3;
}

TEST(a_thread_that_changes_its_node_while_the_pool_grows_grows_it_once)
{
    nrm_resource *mr = pool_of_nodes(3, NULL, 0);
    nrm__numa_pretend(3, change_node);
    void *a = allocate(mr, BLOCK); /* wanted of node 0, tagged with node 1 */
    CHECK_EQ(reserved_nbytes(mr), 8 * (int64_t)NRM__MIB);
    give(mr, a);
    end(mr);
}

/* ---- threads ---- */

static nrm_resource *shared;

static void *
exchange(void *number)
{
    static _Atomic(void *) table[16];
    uint64_t state = (uintptr_t)number + 1;
    node = (int)((uintptr_t)number % 2);
    for (int i = 0; i < 4000; i++) {
        size_t place = next_random(&state) % 16;
        size_t nbytes = 9000 + next_random(&state) % NRM__MIB;
        char *mine = allocate(shared, nbytes);
        mine[0] = mine[nbytes - 1] = 1;
        void *other = atomic_exchange(&table[place], mine);
        if (other != NULL) {
            CHECK_OK(nrm_resource_deallocate(shared, other, 0, NULL));
        }
    }
    for (size_t i = 0; i < 16; i++) {
        void *left = atomic_exchange(&table[i], NULL);
        if (left != NULL) {
            CHECK_OK(nrm_resource_deallocate(shared, left, 0, NULL));
        }
    }
    return NULL;
}

TEST(threads_of_two_nodes_exchange_blocks)
{
    pthread_t threads[3];
    shared = pool_of_nodes(2, NULL, 128 * NRM__MIB);
    for (uintptr_t i = 0; i < 3; i++) {
        pthread_create(&threads[i], NULL, exchange, (void *)i);
    }
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK_OK(nrm_resource_trim(shared, 0, NULL));
    CHECK_EQ(reserved_nbytes(shared), 0);
    end(shared);
}

CHECK_MAIN
