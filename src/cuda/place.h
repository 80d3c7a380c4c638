/*
 * Which context a stream is in, and events of contexts that are not primary: for uses
 * of memory that the context epochs do not see.
 */
#ifndef NRM_CUDA_PLACE_H
#define NRM_CUDA_PLACE_H

#include "cuda/context.h"

struct nrm__cuda_place {
    nrm_CUcontext context; /* NULL: none is current, so nothing was submitted there */
    int device;            /* whose primary context it is; -1: of none */
};

/* The device whose primary context this is; those that nobody has used yet are retained
   to be known. -1: none. */
int nrm__cuda_find_device(nrm_CUcontext context);

/* Where the stream of a handle is. Two calls that never block, unless the context is a
   primary one that we see for the first time: detached, no lock held. NRM_CUDA_ERROR:
   the handle is that of no stream, as far as the driver can tell. */
nrm_status nrm__cuda_stream_place(uintptr_t handle, struct nrm__cuda_place *out);

/* An event beside the pools. It lives as long as its context, which anybody may end. */
struct nrm__cuda_lone_event {
    nrm_CUevent handle; /* NULL: none */
    nrm_CUcontext context;
    unsigned long long id; /* of the context */
};

/* A new event behind everything submitted to the stream in its context. Detached. */
nrm_status nrm__cuda_lone_record(const struct nrm__cuda_place *place, uintptr_t handle,
                                 struct nrm__cuda_lone_event *out);

/* Whether the event can still be named: its context is the one that it was made in. One
   call, which never blocks. */
bool nrm__cuda_lone_lives(const struct nrm__driver *driver,
                          const struct nrm__cuda_lone_event *event);

/* Whether it is done, or its context gone; then it is destroyed. Never blocks. */
bool nrm__cuda_lone_end(const struct nrm__cuda_lone_event *event);

/* It is of no use any more, done or not. NULL in it is fine; never blocks. */
void nrm__cuda_lone_drop(const struct nrm__cuda_lone_event *event);

#endif
