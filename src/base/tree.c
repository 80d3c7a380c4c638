/*
 * A treap: ordered by start, and a heap by a priority that is a hash of the start. Such
 * a tree has the shape of one built in random order, so its depth is logarithmic
 * whatever the order of insertion, and insertion and removal are one walk down without
 * recursion, parent pointers or rotations.
 */
#include "base/tree.h"

/* Two multiplications with odd constants spread addresses, which share their low and
   their high bits, over all 32 bits. */
static uint32_t
priority_of(uintptr_t start)
{
    uint64_t x = (uint64_t)start;
    x = (x ^ (x >> 32)) * UINT64_C(0xd6e8feb86659fd93);
    x = (x ^ (x >> 32)) * UINT64_C(0xd6e8feb86659fd93);
    return (uint32_t)(x >> 32);
}

/* Cuts a subtree in two: what starts below `start`, and the rest. */
static void
split(struct nrm__tree_node *tree, uintptr_t start, struct nrm__tree_node **below,
      struct nrm__tree_node **above)
{
    while (tree != NULL) {
        if (tree->start < start) {
            *below = tree;
            below = &tree->right;
            tree = tree->right;
        }
        else {
            *above = tree;
            above = &tree->left;
            tree = tree->left;
        }
    }
    *below = NULL;
    *above = NULL;
}

/* Joins two subtrees of which the first lies below the second, at `link`. */
static void
join(struct nrm__tree_node *below, struct nrm__tree_node *above,
     struct nrm__tree_node **link)
{
    while (below != NULL && above != NULL) {
        if (below->priority >= above->priority) {
            *link = below;
            link = &below->right;
            below = below->right;
        }
        else {
            *link = above;
            link = &above->left;
            above = above->left;
        }
    }
    *link = below != NULL ? below : above;
}

void
nrm__tree_insert(struct nrm__tree *tree, struct nrm__tree_node *node)
{
    struct nrm__tree_node **link = &tree->root;
    node->priority = priority_of(node->start);
    while (*link != NULL && (*link)->priority >= node->priority) {
        link = node->start < (*link)->start ? &(*link)->left : &(*link)->right;
    }
    split(*link, node->start, &node->left, &node->right);
    *link = node;
    tree->n_nodes++;
}

void
nrm__tree_remove(struct nrm__tree *tree, struct nrm__tree_node *node)
{
    struct nrm__tree_node **link = &tree->root;
    while (*link != node) {
        link = node->start < (*link)->start ? &(*link)->left : &(*link)->right;
    }
    join(node->left, node->right, link);
    node->left = node->right = NULL;
    tree->n_nodes--;
}

struct nrm__tree_node *
nrm__tree_floor(const struct nrm__tree *tree, uintptr_t address)
{
    struct nrm__tree_node *floor = NULL;
    for (struct nrm__tree_node *node = tree->root; node != NULL;) {
        if (node->start <= address) {
            floor = node;
            node = node->right;
        }
        else {
            node = node->left;
        }
    }
    return floor;
}

struct nrm__tree_node *
nrm__tree_find(const struct nrm__tree *tree, uintptr_t address)
{
    struct nrm__tree_node *floor = nrm__tree_floor(tree, address);
    return floor != NULL && address - floor->start < floor->nbytes ? floor : NULL;
}

struct nrm__tree_node *
nrm__tree_above(const struct nrm__tree *tree, uintptr_t address)
{
    struct nrm__tree_node *above = NULL;
    for (struct nrm__tree_node *node = tree->root; node != NULL;) {
        if (node->start > address) {
            above = node;
            node = node->left;
        }
        else {
            node = node->right;
        }
    }
    return above;
}
