/* Memory for descriptions. */

#include "check.h"

#include "core/nodes.h"

static bool
is_zero(const void *node, size_t nbytes)
{
    const unsigned char *bytes = node;
    for (size_t i = 0; i < nbytes; i++) {
        if (bytes[i] != 0) {
            return false;
        }
    }
    return true;
}

TEST(a_node_of_any_size_is_zeroed_and_apart_from_others)
{
    void *nodes[64];
    for (size_t nbytes = 1; nbytes <= 4096; nbytes += nbytes < 300 ? 1 : 97) {
        for (unsigned i = 0; i < 64; i++) {
            nodes[i] = nrm__node_allocate(nbytes);
            REQUIRE(nodes[i] != NULL);
            CHECK_ALIGNED(nodes[i], 64);
            CHECK(is_zero(nodes[i], nbytes));
            memset(nodes[i], (int)i + 1, nbytes);
        }
        for (unsigned i = 0; i < 64; i++) {
            CHECK_EQ(*(unsigned char *)nodes[i], i + 1);
            CHECK_EQ(((unsigned char *)nodes[i])[nbytes - 1], i + 1);
            nrm__node_deallocate(nodes[i], nbytes);
        }
    }
}

TEST(a_node_that_was_given_back_comes_again_zeroed)
{
    void *first = nrm__node_allocate(200);
    memset(first, 0xff, 200);
    nrm__node_deallocate(first, 200);
    void *second = nrm__node_allocate(230); /* of the same class */
    CHECK_EQ(first, second);
    CHECK(is_zero(second, 230));
    nrm__node_deallocate(second, 230);
}

TEST(giving_back_nothing_is_no_error)
{
    nrm__node_deallocate(NULL, 100);
}

static void
asks_for_too_much(void)
{
    (void)nrm__node_allocate(4097);
}

TEST(a_node_of_more_than_4_kib_is_a_mistake)
{
    CHECK_DIES(asks_for_too_much, SIGABRT);
}

#define N_LIVE 200

static void
walks(unsigned index, void *arg)
{
    struct {
        unsigned char *node;
        size_t nbytes;
    } live[N_LIVE] = {{NULL, 0}};
    uint64_t seed = index + 7;
    int n_rounds = *(int *)arg;
    for (int i = 0; i < n_rounds; i++) {
        size_t slot = check_random(&seed) % N_LIVE;
        if (live[slot].node != NULL) {
            CHECK_EQ(live[slot].node[0], (unsigned char)(index + slot));
            CHECK_EQ(live[slot].node[live[slot].nbytes - 1],
                     (unsigned char)(index + slot));
            nrm__node_deallocate(live[slot].node, live[slot].nbytes);
            live[slot].node = NULL;
            continue;
        }
        live[slot].nbytes = 1 + check_random(&seed) % 600;
        live[slot].node = nrm__node_allocate(live[slot].nbytes);
        REQUIRE(live[slot].node != NULL);
        CHECK(is_zero(live[slot].node, live[slot].nbytes));
        memset(live[slot].node, (int)(index + slot), live[slot].nbytes);
    }
    for (size_t slot = 0; slot < N_LIVE; slot++) {
        nrm__node_deallocate(live[slot].node, live[slot].nbytes);
    }
}

TEST(threads_share_the_classes)
{
    int n_rounds = 20000;
    check_threads(4, walks, &n_rounds);
}

/* ---- fork ---- */

static atomic_bool stop;

static void *
never_rests(void *arg)
{
    int n_rounds = 100;
    (void)arg;
    while (!atomic_load(&stop)) {
        walks(1, &n_rounds);
    }
    return NULL;
}

static void
walks_in_the_child(void)
{
    int n_rounds = 1000;
    walks(2, &n_rounds);
}

TEST(a_child_can_use_them_whatever_the_parents_threads_did)
{
    pthread_t thread;
    atomic_store(&stop, false);
    REQUIRE_EQ(pthread_create(&thread, NULL, never_rests, NULL), 0);
    for (int i = 0; i < 50; i++) {
        CHECK_IN_CHILD(walks_in_the_child);
    }
    atomic_store(&stop, true);
    pthread_join(thread, NULL);
}

CHECK_MAIN
