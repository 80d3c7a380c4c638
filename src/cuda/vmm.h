/*
 * Device memory by virtual memory management: a range of addresses, reserved once, in
 * which physical memory is mapped piece by piece. Neighbouring pieces are one memory
 * for every copy and kernel, so a pool grows without a seam and shrinks from any place.
 *
 * Everything here calls the driver and may block: detached, with no lock held. Nothing
 * waits for the GPU, and the driver does not either: unmap only what is known to be
 * done. Such memory has no legacy IPC handle.
 */
#ifndef NRM_CUDA_VMM_H
#define NRM_CUDA_VMM_H

#include "base/list.h"
#include "cuda/driver.h"

struct nrm__vmm_range {
    nrm_CUdeviceptr base;
    size_t nbytes;      /* reserved */
    size_t granularity; /* of every offset and size */
    int device;         /* that owns the memory */
    /* under the lock of vmm.c: */
    uint64_t open_to;        /* a bit a device that may touch the memory */
    struct nrm__link pieces; /* mapped, in no order */
};

/* Its memory is the caller's and stays where it is while it is mapped. */
struct nrm__vmm_piece {
    struct nrm__link link;
    size_t offset, nbytes;
    uint64_t open_to; /* that access was given to */
};

/* Why a device's memory cannot be mapped, as a text without an end; NULL: it can.
   Before cuInit nothing can. Never blocks. */
const char *nrm__vmm_reason(int device);

/* What sizes on the device must be multiples of. NRM_NOT_SUPPORTED with the reason. */
nrm_status nrm__vmm_granularity(int device, size_t *out);

/* Reserves at least `nbytes` of addresses; no memory. To be undone by
   nrm__vmm_finish. */
nrm_status nrm__vmm_init(struct nrm__vmm_range *range, int device, size_t nbytes);

/* NRM_INVALID_VALUE while a piece is mapped. On failure the addresses stay reserved. */
nrm_status nrm__vmm_finish(struct nrm__vmm_range *range);

/* Maps new memory at the offset, open to the owner and to every peer added so far.
   Nothing is left behind on failure. */
nrm_status nrm__vmm_map(struct nrm__vmm_range *range, size_t offset, size_t nbytes,
                        struct nrm__vmm_piece *piece);

/* Gives the memory of one piece back. On failure it stays mapped. */
nrm_status nrm__vmm_unmap(struct nrm__vmm_range *range, struct nrm__vmm_piece *piece);

/* Opens all that is and will be mapped to another device; beside map and unmap in other
   threads too. On failure later pieces are not opened to it. */
nrm_status nrm__vmm_add_peer(struct nrm__vmm_range *range, int device);

#endif
