/* See barrier.h. The numbers are those of linux/membarrier.h. */
#include "os/barrier.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/fence.h"

enum {
    BARRIER = 1 << 3, /* MEMBARRIER_CMD_PRIVATE_EXPEDITED */
    PREPARE = 1 << 4, /* MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED */
};

#ifdef NRM__UNDER_TSAN
#define HAS_BARRIER 0
#else
#define HAS_BARRIER 1
#endif

bool
nrm__process_barrier_prepare(void)
{
    return HAS_BARRIER && syscall(SYS_membarrier, PREPARE, 0, 0) == 0;
}

void
nrm__process_barrier(void)
{
    long code = syscall(SYS_membarrier, BARRIER, 0, 0);
    NRM_ASSERT(code == 0);
}
