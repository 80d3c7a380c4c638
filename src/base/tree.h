/*
 * An intrusive balanced tree of non-overlapping address ranges, ordered by their start:
 * insert, remove and "the range that contains this address" in O(log n). The caller
 * locks. Nodes are embedded in the caller's structures; nothing is allocated.
 */
#ifndef NRM_BASE_TREE_H
#define NRM_BASE_TREE_H

#include <stddef.h>
#include <stdint.h>

struct nrm__tree_node {
    struct nrm__tree_node *left, *right;
    uintptr_t start;   /* first address */
    size_t nbytes;     /* of the range; may change while it overlaps no other */
    uint32_t priority; /* for balance */
};

struct nrm__tree {
    struct nrm__tree_node *root;
    size_t n_nodes;
};

/* `node->start` and `node->nbytes` are set. The start is not in the tree yet. */
void nrm__tree_insert(struct nrm__tree *tree, struct nrm__tree_node *node);

/* `node` is in the tree. */
void nrm__tree_remove(struct nrm__tree *tree, struct nrm__tree_node *node);

/* The last node that starts at or before `address`, or NULL. */
struct nrm__tree_node *nrm__tree_floor(const struct nrm__tree *tree, uintptr_t address);

/* The node whose range contains `address`, or NULL. */
struct nrm__tree_node *nrm__tree_find(const struct nrm__tree *tree, uintptr_t address);

/* The first node that starts after `address`, or NULL: a walk in order. */
struct nrm__tree_node *nrm__tree_above(const struct nrm__tree *tree, uintptr_t address);

#endif
