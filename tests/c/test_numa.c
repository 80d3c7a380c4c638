/* NUMA by system calls. One node is enough for these. */

#include "check.h"

#include <errno.h>

#include "os/memory.h"
#include "os/numa.h"

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

CHECK_MAIN
