/*
 * NUMA by raw system calls. Containers often forbid them; that is an error where
 * binding was asked for, and "unknown" where it was only a question.
 */
#include "os/numa.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/bits.h"
#include "os/lines.h"
#include "os/memory.h"

#define MAX_NODES 1024
#define MAX_CORES 4096
#define WORD_BITS (8 * (int)sizeof(unsigned long))

/* MPOL_... of linux/mempolicy.h, which needs kernel headers */
#define POLICY_DEFAULT 0
#define POLICY_PREFERRED 1
#define POLICY_BIND 2

struct node_set {
    unsigned long words[MAX_NODES / WORD_BITS];
};

struct core_set {
    unsigned long words[MAX_CORES / WORD_BITS];
};

static struct {
    pthread_once_t once;
    int n_nodes;
    struct node_set with_memory;
    uint16_t of_core[MAX_CORES];
} nodes = {.once = PTHREAD_ONCE_INIT};

static struct {
    atomic_int n_nodes; /* 0: nobody pretends anything */
    int (*_Atomic here)(void);
} pretended;

static void
set_add(unsigned long *words, int i)
{
    words[i / WORD_BITS] |= 1ul << (i % WORD_BITS);
}

/* Adds the numbers of "0-3,8" that are less than `n` and returns the highest, or -1. */
static int
parse_list(const char *text, unsigned long *out, int n)
{
    int highest = -1;
    char *end;
    for (;; text = end + 1) {
        long first = strtol(text, &end, 10);
        if (end == text) {
            return highest;
        }
        long last = *end == '-' ? strtol(end + 1, &end, 10) : first;
        for (long i = first; i >= 0 && i <= last && i < n; i++) {
            set_add(out, (int)i);
            highest = i > highest ? (int)i : highest;
        }
        if (*end != ',') {
            return highest;
        }
    }
}

/* The cores of each node. A core that came after us counts to node 0. */
static void
read_cores(void)
{
    char path[64], line[1024];
    _Static_assert(MAX_CORES % WORD_BITS == 0, "whole words");
    for (int node = 1; node < nodes.n_nodes; node++) {
        struct core_set cores = {{0}};
        snprintf(path, sizeof path, "/sys/devices/system/node/node%d/cpulist", node);
        if (!nrm__file_read_line(path, line, sizeof line)) {
            continue;
        }
        (void)parse_list(line, cores.words, MAX_CORES);
        for (int core = 0; core < MAX_CORES; core++) {
            if (cores.words[core / WORD_BITS] >> (core % WORD_BITS) & 1) {
                nodes.of_core[core] = (uint16_t)node;
            }
        }
    }
}

static void
read_nodes(void)
{
    char line[1024];
    struct node_set online = {{0}};
    int highest = -1;
    if (nrm__file_read_line("/sys/devices/system/node/online", line, sizeof line)) {
        highest = parse_list(line, online.words, MAX_NODES);
    }
    if (highest < 0) {
        set_add(online.words, highest = 0);
    }
    nodes.n_nodes = highest + 1;
    if (!nrm__file_read_line("/sys/devices/system/node/has_memory", line,
                             sizeof line) ||
        parse_list(line, nodes.with_memory.words, MAX_NODES) < 0) {
        nodes.with_memory = online;
    }
    read_cores();
}

void
nrm__numa_pretend(int n_nodes, int (*here)(void))
{
    atomic_store(&pretended.here, here);
    atomic_store(&pretended.n_nodes, here != NULL ? n_nodes : 0);
}

int
nrm__numa_here(void)
{
    int (*here)(void) = atomic_load_explicit(&pretended.here, memory_order_relaxed);
    if (here != NULL) {
        return here();
    }
    pthread_once(&nodes.once, read_nodes);
    int core = nodes.n_nodes > 1 ? sched_getcpu() : -1;
    return core >= 0 && core < MAX_CORES ? nodes.of_core[core] : 0;
}

int
nrm__numa_n_nodes(void)
{
    int n_nodes = atomic_load_explicit(&pretended.n_nodes, memory_order_relaxed);
    if (n_nodes != 0) {
        return n_nodes;
    }
    pthread_once(&nodes.once, read_nodes);
    return nodes.n_nodes;
}

bool
nrm__numa_has_node(int node)
{
    if (node < 0 || node >= nrm__numa_n_nodes()) {
        return false;
    }
    return (nodes.with_memory.words[node / WORD_BITS] >> (node % WORD_BITS) & 1) != 0;
}

int
nrm__numa_bind(void *ptr, size_t nbytes, int node)
{
    struct node_set set = {{0}};
    if (!nrm__numa_has_node(node)) {
        return EINVAL;
    }
    set_add(set.words, node);
    if (syscall(SYS_mbind, ptr, nbytes, POLICY_BIND, set.words, (long)MAX_NODES + 1,
                0) == 0) {
        return 0;
    }
    /* A kernel without NUMA has one node, and every page is on it. */
    return errno == ENOSYS && nrm__numa_n_nodes() == 1 ? 0 : errno;
}

int
nrm__numa_local_node(void)
{
    int policy = -1;
    unsigned core, node;
    if (nrm__numa_n_nodes() == 1 ||
        syscall(SYS_get_mempolicy, &policy, NULL, 0L, NULL, 0L) != 0 ||
        policy != POLICY_DEFAULT || syscall(SYS_getcpu, &core, &node, NULL) != 0) {
        return -1;
    }
    return (int)node;
}

void
nrm__numa_prefer(int node)
{
    struct node_set set = {{0}};
    if (!nrm__numa_has_node(node)) {
        return;
    }
    set_add(set.words, node);
    (void)syscall(SYS_set_mempolicy, POLICY_PREFERRED, set.words, (long)MAX_NODES + 1);
}

/* move_pages without targets only asks, and unlike get_mempolicy it makes no page. */
int
nrm__numa_node_of(const void *ptr)
{
    void *page = (void *)nrm__align_down((uintptr_t)ptr, nrm__page_size());
    int status = -1;
    if (syscall(SYS_move_pages, 0, 1ul, &page, NULL, &status, 0) == 0) {
        return status >= 0 ? status : -1;
    }
    unsigned char is_present;
    if (errno == ENOSYS && mincore(page, nrm__page_size(), &is_present) == 0) {
        return (is_present & 1) != 0 ? 0 : -1;
    }
    return -1;
}
