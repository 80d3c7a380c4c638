/* The calls that a copy becomes, in one context: for core/transfer.c. */
#ifndef NRM_CORE_TRANSFER_RUN_H
#define NRM_CORE_TRANSFER_RUN_H

#include "core/transfer.h"
#include "core/transfer_peer.h"
#include "cuda/context.h"

/* Whether many pieces at a time can be given to the stream. */
bool nrm__transfer_takes_batches(const struct nrm__cuda_scope *scope, uintptr_t handle,
                                 enum nrm__direction direction);

/*
 * Submits all of a transfer to a stream of the scope's context, which is current. With
 * `peers` (borrows) from the memory of one device to that of another; NULL: the
 * stream's device reaches both sides. When it fails part of it may have been submitted.
 */
nrm_status nrm__transfer_run(const struct nrm__cuda_scope *scope,
                             const struct nrm__transfer *transfer, uintptr_t handle,
                             bool is_captured, struct nrm__transfer_peers *peers);

#endif
