/* The calls that a planned copy becomes: for core/transfer.c. */
#ifndef NRM_CORE_TRANSFER_RUN_H
#define NRM_CORE_TRANSFER_RUN_H

#include "core/transfer.h"
#include "cuda/driver.h"

/*
 * Submits all of a transfer whose axes are those that the plan left, in the context of the
 * stream, which is current. `takes_batches`: the stream does, of this memory. When it fails
 * part of it may have been submitted.
 */
nrm_status nrm__transfer_run(const struct nrm__driver *driver,
                             const struct nrm__transfer *transfer,
                             const struct nrm__transfer_plan *plan, nrm_CUstream stream,
                             bool takes_batches);

#endif
