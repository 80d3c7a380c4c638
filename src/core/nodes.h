/*
 * Memory for descriptions (map entries, pool nodes, resources), from the system and
 * never from malloc. Fixed size classes up to 4 KiB; freed nodes are kept for the next
 * request.
 */
#ifndef NRM_CORE_NODES_H
#define NRM_CORE_NODES_H

#include <stddef.h>

/* Zeroed; NULL when the system has no memory left. `nbytes` at most 4096. */
void *nrm__node_allocate(size_t nbytes);

/* `nbytes` as allocated. NULL is no error. */
void nrm__node_deallocate(void *node, size_t nbytes);

#endif
