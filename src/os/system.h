/* The machine and the process: clock, cores, memory that is free, limits. */
#ifndef NRM_OS_SYSTEM_H
#define NRM_OS_SYSTEM_H

#include <stddef.h>
#include <stdint.h>

/* Monotonic, nanoseconds. */
uint64_t nrm__clock_ns(void);

void nrm__sleep_ns(uint64_t ns);

/* Cores this process may run on, by affinity and by the cgroup's CPU quota; >= 1. */
int nrm__n_cores(void);

struct nrm__memory_state {
    size_t total_nbytes;        /* RAM of the machine */
    size_t available_nbytes;    /* that the machine can give without swapping */
    size_t cgroup_limit_nbytes; /* of the tightest enclosing group; SIZE_MAX: none */
    size_t
        cgroup_available_nbytes; /* up to that limit, counting droppable file cache */
    size_t memlock_limit_nbytes; /* RLIMIT_MEMLOCK; SIZE_MAX: unlimited */
};

/* Read afresh from /proc and cgroup v2 or v1. Fields that cannot be read: SIZE_MAX. */
void nrm__memory_state(struct nrm__memory_state *out);

/* H: the smaller of RAM and cgroup limit. */
size_t nrm__host_memory_nbytes(void);

/* What can be touched now without the process being killed. */
size_t nrm__touchable_nbytes(void);

#endif
