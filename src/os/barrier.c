/*
 * See barrier.h. The numbers are those of linux/membarrier.h. A process registers with
 * the first barrier and not when it loads us: in one with threads that takes
 * milliseconds.
 */
#include "os/barrier.h"

#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/fence.h"

enum {
    QUERY = 0,
    BARRIER = 1 << 3,  /* MEMBARRIER_CMD_PRIVATE_EXPEDITED */
    REGISTER = 1 << 4, /* MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED */
};

#ifdef NRM__UNDER_TSAN
#define HAS_BARRIER 0
#else
#define HAS_BARRIER 1
#endif

static long
membarrier(int command)
{
    return syscall(SYS_membarrier, command, 0, 0);
}

bool
nrm__process_barrier_is_known(void)
{
    long known = HAS_BARRIER ? membarrier(QUERY) : 0;
    return known > 0 && (known & BARRIER) != 0 && (known & REGISTER) != 0;
}

void
nrm__process_barrier(void)
{
    long code = membarrier(BARRIER);
    if (code != 0 && errno == EPERM) {
        code = membarrier(REGISTER);
        code = code == 0 ? membarrier(BARRIER) : code;
    }
    NRM_ASSERT(code == 0);
}
