/* Boxes of bytes from the memory of one device to that of another: for
   core/transfer_run.c. */
#ifndef NRM_CORE_TRANSFER_PEER_H
#define NRM_CORE_TRANSFER_PEER_H

#include "core/transfer.h"
#include "cuda/driver.h"

/* Of what a driver has refused once it is not asked again in the same transfer. */
enum nrm__transfer_step {
    NRM__TRANSFER_BOXES,
    NRM__TRANSFER_ROWS,
    NRM__TRANSFER_OVER_HOST,
};

/* The two ends of a transfer, and how its boxes go. */
struct nrm__transfer_peers {
    nrm_CUcontext dst, src; /* of the devices that the memory is on */
    enum nrm__transfer_step step;
    void *between; /* page-locked, owned; NULL: none yet */
};

/* Ready for the first box; finish it after the last, however that went. */
void nrm__transfer_peers_init(struct nrm__transfer_peers *peers, nrm_CUcontext dst,
                              nrm_CUcontext src);
void nrm__transfer_peers_finish(struct nrm__transfer_peers *peers,
                                const struct nrm__driver *driver);

/* Submits one box of a plan to a stream of the current context. */
nrm_CUresult nrm__transfer_peers_copy(struct nrm__transfer_peers *peers,
                                      const struct nrm__driver *driver,
                                      const struct nrm__transfer_plan *plan, char *dst,
                                      const char *src, nrm_CUstream stream);

#endif
