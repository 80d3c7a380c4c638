/*
 * Ranges that lie apart or in one another, each of which knows what it lies in. The
 * caller holds the lock of the tree.
 */
#ifndef NRM_CORE_OVERLAY_H
#define NRM_CORE_OVERLAY_H

#include "core/block_map.h"

/* The innermost range around `address`, or NULL. */
struct nrm__entry *nrm__overlay_find(const struct nrm__tree *tree, uintptr_t address);

/* After `entry` entered the tree, where `floor` was the last one that starts at or
   before it: NULL, or in the tree still, or below `entry`. */
void nrm__overlay_enter(const struct nrm__tree *tree, struct nrm__entry *entry,
                        struct nrm__entry *floor);

/* After `entry` left the tree, or what is below another one. */
void nrm__overlay_leave(const struct nrm__tree *tree, const struct nrm__entry *entry);

#endif
