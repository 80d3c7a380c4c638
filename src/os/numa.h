/* NUMA by raw system calls: no libnuma. A machine without NUMA has node 0. */
#ifndef NRM_OS_NUMA_H
#define NRM_OS_NUMA_H

#include <stdbool.h>
#include <stddef.h>

/* Highest online node + 1; at least 1. */
int nrm__numa_n_nodes(void);
bool nrm__numa_has_node(int node);

/* Binds the pages of a range, touched from now on, to a node. 0 or an errno. */
int nrm__numa_bind(void *ptr, size_t nbytes, int node);

/* The node that new pages of this thread come from by the system's own choice, or
   -1: there is only one, or the program has chosen otherwise. */
int nrm__numa_local_node(void);

/* The node of the core that this thread runs on just now; 0 where there is one node, or
   nobody knows. Some nanoseconds, no system call. */
int nrm__numa_here(void);

/* For tests: there are so many nodes, and `here` says which one a thread is on. NULL:
   the machine's own again. Only while no resource lives that asks. */
void nrm__numa_pretend(int n_nodes, int (*here)(void));

/* From now on new pages of this thread come from `node` while it has some; -1: no
   change. */
void nrm__numa_prefer(int node);

/* The node of the page at `ptr`, or -1: not present, or unknown. */
int nrm__numa_node_of(const void *ptr);

#endif
