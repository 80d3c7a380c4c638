/*
 * Copies between strided arrays, of which at least one is the driver's: as few calls of
 * the driver as the strides and the stream allow, and an event behind them.
 */
#ifndef NRM_CORE_TRANSFER_H
#define NRM_CORE_TRANSFER_H

#include <stdbool.h>
#include <stddef.h>

#include "cuda/place.h"
#include "nrm/status.h"
#include "nrm/stream.h"

#define NRM__TRANSFER_MAX_DIMS 64

enum nrm__direction {
    NRM__TO_DEVICE, /* the source is host memory, of any kind */
    NRM__TO_HOST,   /* the destination is */
    NRM__WITHIN,    /* neither: what devices can access */
};

/* Each axis has a length and, on each side, a stride in bytes, which may be negative or
   0. No byte of the one side is one of the other's. */
struct nrm__transfer {
    char *dst;
    const char *src;
    enum nrm__direction direction;
    bool is_waited_for; /* refused where it would become a part of a graph */
    size_t itemsize;
    int n_dims;
    size_t shape[NRM__TRANSFER_MAX_DIMS];
    ptrdiff_t dst_strides[NRM__TRANSFER_MAX_DIMS];
    ptrdiff_t src_strides[NRM__TRANSFER_MAX_DIMS];
};

/* How a transfer is cut: into `n_calls` boxes of `n_planes` planes of `n_rows` rows of
   `width` bytes. */
struct nrm__transfer_plan {
    size_t n_calls; /* 0: there is nothing to copy */
    size_t n_planes;
    size_t n_rows;
    size_t width;
    ptrdiff_t dst_pitch, src_pitch; /* bytes from row to row */
    size_t dst_height, src_height;  /* rows from plane to plane */
    bool has_order;                 /* the destination may overlap itself */
};

/* Brings the axes into the order in which they lie in memory, and merges those that are
   one: the same elements go to the same places. What is left besides the box stays in
   the axes. */
void nrm__transfer_plan(struct nrm__transfer *transfer, struct nrm__transfer_plan *out);

/*
 * Submits the copy to the stream of a handle, in its context. 0, 1 and 2 mean streams
 * of the primary context of `device`, whichever is current; with -1 those of the
 * current context, else of that which a request would choose. Pageable memory may make
 * it wait. *out_event lies behind it, for the caller to drop; none with *out_captured:
 * the stream is being captured. Detached, no lock held. When it fails part of it may
 * have been submitted, and was waited for. NRM_NOT_SUPPORTED: nothing was, as the
 * stream is captured and the copy is waited for, or has no way into a graph.
 */
nrm_status nrm__transfer_submit(int device, const struct nrm__transfer *transfer,
                                uintptr_t handle,
                                struct nrm__cuda_lone_event *out_event,
                                bool *out_captured);

/* How a stream would take many pieces of host memory. */
struct nrm__transfer_ways {
    bool is_captured;   /* as nodes of a graph, which reads and writes them later */
    bool takes_batches; /* many at a time, when it gets there: they are page-locked */
};

/* The same for handles and devices as in nrm__transfer_submit. Detached. */
nrm_status nrm__transfer_ways_of(int device, uintptr_t handle, const void *host,
                                 struct nrm__transfer_ways *out);

/* Work that is submitted to `handle` from now on comes behind what `producer` has been
   given; 0, 1 and 2 mean streams of the current context. Without effect as
   nrm__transfer_join. Detached. */
nrm_status nrm__transfer_wait_for(uintptr_t handle, uintptr_t producer);

/*
 * The same for streams that memory is used on: 0, 1 and 2 mean streams of the primary
 * context of `device` and of `producer_device` (-1: as a request would choose). A
 * per-thread one of another thread cannot be named here: the legacy stream, which such
 * streams wait for and which waits for them, stands for it. Without effect while one of
 * the two is being captured and the other is not: events do not order what a graph will
 * do.
 */
nrm_status nrm__transfer_join(int device, const nrm_stream *stream, int producer_device,
                              const nrm_stream *producer);

/* Where there are several devices: the one that memory is on. NRM_DEVICE_NONE: host or
   managed memory, which all of them reach, or what nobody knows; and where there are
   not several. Never blocks. */
int nrm__transfer_device_of(const void *ptr);

/* NRM_OK: it is done. NRM_NOT_FOUND (not recorded): not yet. Others: it failed, or its
   context has ended. With `waits`, detached, as long as it takes. */
nrm_status nrm__transfer_query(const struct nrm__cuda_lone_event *event, bool waits);

#endif
