/* The tree of ranges, against an array that is searched from end to end. */

#include "check.h"

#include "base/tree.h"

#define N_NODES 600
#define STRIDE 64

static struct nrm__tree_node nodes[N_NODES];
static bool present[N_NODES];

static void
set_range(size_t i, size_t nbytes)
{
    nodes[i].start = (i + 1) * STRIDE;
    nodes[i].nbytes = nbytes;
}

/* The depth below `node`; aborts the test's trust in order and heap when they fail. */
static unsigned
check_node(const struct nrm__tree_node *node, uintptr_t low, uintptr_t high)
{
    if (node == NULL) {
        return 0;
    }
    CHECK_GE(node->start, low);
    CHECK_LT(node->start, high);
    CHECK(node->left == NULL || node->left->priority <= node->priority);
    CHECK(node->right == NULL || node->right->priority <= node->priority);
    unsigned left = check_node(node->left, low, node->start);
    unsigned right = check_node(node->right, node->start + 1, high);
    return 1 + (left > right ? left : right);
}

static const struct nrm__tree_node *
slow_floor(uintptr_t address)
{
    for (size_t i = N_NODES; i-- > 0;) {
        if (present[i] && nodes[i].start <= address) {
            return &nodes[i];
        }
    }
    return NULL;
}

static const struct nrm__tree_node *
slow_above(uintptr_t address)
{
    for (size_t i = 0; i < N_NODES; i++) {
        if (present[i] && nodes[i].start > address) {
            return &nodes[i];
        }
    }
    return NULL;
}

static void
check_look_ups(const struct nrm__tree *tree, uintptr_t address)
{
    const struct nrm__tree_node *floor = slow_floor(address);
    bool inside = floor != NULL && address - floor->start < floor->nbytes;
    CHECK_EQ(nrm__tree_floor(tree, address), floor);
    CHECK_EQ(nrm__tree_find(tree, address), inside ? floor : NULL);
    CHECK_EQ(nrm__tree_above(tree, address), slow_above(address));
}

TEST(an_empty_tree_finds_nothing)
{
    struct nrm__tree tree = {NULL, 0};
    CHECK_EQ(nrm__tree_floor(&tree, UINTPTR_MAX), NULL);
    CHECK_EQ(nrm__tree_find(&tree, 0), NULL);
    CHECK_EQ(nrm__tree_above(&tree, 0), NULL);
}

TEST(a_range_ends_before_its_end)
{
    struct nrm__tree tree = {NULL, 0};
    struct nrm__tree_node node = {.start = 4096, .nbytes = 100};
    nrm__tree_insert(&tree, &node);
    CHECK_EQ(nrm__tree_find(&tree, 4095), NULL);
    CHECK_EQ(nrm__tree_find(&tree, 4096), &node);
    CHECK_EQ(nrm__tree_find(&tree, 4195), &node);
    CHECK_EQ(nrm__tree_find(&tree, 4196), NULL);
    node.nbytes = 101; /* may change in place */
    CHECK_EQ(nrm__tree_find(&tree, 4196), &node);
    nrm__tree_remove(&tree, &node);
    CHECK_EQ(tree.n_nodes, 0u);
}

TEST(ranges_at_both_ends_of_the_address_space_are_found)
{
    struct nrm__tree tree = {NULL, 0};
    struct nrm__tree_node low = {.start = 0, .nbytes = 1};
    struct nrm__tree_node high = {.start = UINTPTR_MAX, .nbytes = 1};
    nrm__tree_insert(&tree, &low);
    nrm__tree_insert(&tree, &high);
    CHECK_EQ(nrm__tree_find(&tree, 0), &low);
    CHECK_EQ(nrm__tree_find(&tree, UINTPTR_MAX), &high);
    CHECK_EQ(nrm__tree_find(&tree, UINTPTR_MAX - 1), NULL);
    CHECK_EQ(nrm__tree_above(&tree, 0), &high);
}

TEST(a_random_walk_agrees_with_the_array)
{
    struct nrm__tree tree = {NULL, 0};
    uint64_t seed = 1;
    size_t n_present = 0;
    memset(present, 0, sizeof present);
    for (int step = 0; step < 6000; step++) {
        size_t i = check_random(&seed) % N_NODES;
        if (present[i]) {
            nrm__tree_remove(&tree, &nodes[i]);
        }
        else {
            set_range(i, 1 + check_random(&seed) % STRIDE);
            nrm__tree_insert(&tree, &nodes[i]);
        }
        present[i] = !present[i];
        n_present += present[i] ? 1 : (size_t)-1;
        CHECK_EQ(tree.n_nodes, n_present);
        check_look_ups(&tree, check_random(&seed) % ((N_NODES + 2) * STRIDE));
        if (step % 100 == 0) {
            check_node(tree.root, 0, UINTPTR_MAX);
        }
    }
}

#define N_MANY 100000

TEST(neither_ascending_nor_descending_order_makes_it_deep)
{
    static struct nrm__tree_node many[N_MANY];
    struct nrm__tree tree = {NULL, 0};
    for (size_t i = 0; i < N_MANY; i++) {
        size_t at = i < N_MANY / 2 ? i : N_MANY + N_MANY / 2 - 1 - i;
        many[i].start = 0x7f0000000000 + at * 4096;
        many[i].nbytes = 4096;
        nrm__tree_insert(&tree, &many[i]);
    }
    unsigned depth = check_node(tree.root, 0, UINTPTR_MAX);
    CHECK_LT(depth, 60u); /* about 2.5 log2 of the number: 42 */
    size_t n = 0;
    uintptr_t address = 0;
    for (struct nrm__tree_node *node; (node = nrm__tree_above(&tree, address)); n++) {
        address = node->start;
    }
    CHECK_EQ(n, (size_t)N_MANY);
    for (size_t i = 0; i < N_MANY; i++) {
        nrm__tree_remove(&tree, &many[i]);
    }
    CHECK_EQ(tree.root, NULL);
}

CHECK_MAIN
