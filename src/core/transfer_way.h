/* By which way a copy goes where there are several devices: for core/transfer.c. */
#ifndef NRM_CORE_TRANSFER_WAY_H
#define NRM_CORE_TRANSFER_WAY_H

#include "core/transfer.h"
#include "cuda/context.h"

/* Submits a transfer by the way that its memory needs. As nrm__transfer_run. */
nrm_status nrm__transfer_go(const struct nrm__cuda_scope *scope,
                            const struct nrm__transfer *transfer, uintptr_t handle,
                            bool is_captured);

#endif
