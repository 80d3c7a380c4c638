/* One copy to the device, for the demo and the benchmarks. */
#ifndef NRM_CORE_COPY_H
#define NRM_CORE_COPY_H

#include <stddef.h>

#include "nrm/status.h"

/*
 * Copies `nbytes` from the host to the device of the calling thread (as every request
 * chooses it), waits, and says how long that took. The destination is made and freed
 * outside the time. Blocks, detached.
 */
nrm_status nrm__copy_to_device_seconds(const void *host, size_t nbytes,
                                       double *out_seconds);

#endif
