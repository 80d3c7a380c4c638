/* A program that copies between a GPU (simulated) and blocks of a resource, and a
   stream that can be held, so that its copies stay pending. */

#ifndef COPIES_H
#define COPIES_H

#include <string.h>

#include "core/ops.h"
#include "fixtures.h"
#include "os/system.h"
#include "simulator.h"

#define COPIES_NBYTES ((size_t)1 << 20)
#define COPIES_MOST (2 * COPIES_NBYTES) /* at once */

struct copies {
    nrm_resource *source; /* a reference */
    nrm_CUcontext context;
    nrm_CUstream stream;    /* non-blocking */
    nrm_CUdeviceptr device; /* a buffer of COPIES_MOST */
};

static const struct copies_kind {
    const char *name;
    nrm_resource *(*create)(void);
} copies_kinds[] = {
    {"pinned", pinned_source},
    {"managed", managed_source},
};

static inline void
copies_enter(struct copies *copies, int ordinal)
{
    nrm_CUdevice device;
    CHECK_EQ(cuda.cuInit(0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuDeviceGet(&device, ordinal), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuDevicePrimaryCtxRetain(&copies->context, device), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuCtxSetCurrent(copies->context), NRM_CUDA_SUCCESS);
}

/* The stream and the buffer, on a device. */
static inline void
copies_start_on(struct copies *copies, int ordinal)
{
    copies_enter(copies, ordinal);
    CHECK_EQ(cuda.cuStreamCreate(&copies->stream, 1), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemAlloc(&copies->device, COPIES_MOST), NRM_CUDA_SUCCESS);
}

/* On device 0 of a machine that starts; `config`: NULL for the usual one. */
static inline struct copies
copies_begin_with(const struct nrm_cudasim_config *config,
                  const struct copies_kind *kind)
{
    struct copies copies = {0};
    simulator_start(config);
    copies_start_on(&copies, 0);
    copies.source = kind->create();
    return copies;
}

static inline struct copies
copies_begin(const struct copies_kind *kind)
{
    return copies_begin_with(NULL, kind);
}

/* Releases `mr`, made over the source, and the source: nothing may be left. */
static inline void
copies_end(struct copies *copies, nrm_resource *mr)
{
    mr->ops->check(mr);
    nrm_resource_release(mr);
    nrm_resource_release(copies->source);
    /* The background thread may be giving the last of it back. */
    for (int i = 0; i < 200 && !nrm__retired_is_empty(); i++) {
        (void)nrm__retired_drain(20000000);
        nrm__sleep_ns(1000000);
    }
    CHECK(nrm__retired_is_empty());
    CHECK_EQ(simulator_count(NRM_CUDASIM_REGISTRATIONS), 0u);
    CHECK_EQ(simulator_count(NRM_CUDASIM_MANAGED_ALLOCATIONS), 0u);
    simulator_check_faults();
}

static inline void
copies_hold(struct copies *copies)
{
    CHECK_EQ(sim.hold_stream(copies->stream), 0);
}

static inline void
copies_let_go(struct copies *copies)
{
    CHECK_EQ(sim.release_stream(copies->stream), 0);
    CHECK_EQ(cuda.cuStreamSynchronize(copies->stream), NRM_CUDA_SUCCESS);
}

static inline void
copies_to_device(struct copies *copies, const void *ptr, size_t nbytes)
{
    CHECK_EQ(cuda.cuMemcpyHtoDAsync(copies->device, ptr, nbytes, copies->stream),
             NRM_CUDA_SUCCESS);
}

/* Whether the device's buffer starts with `nbytes` times `byte`. */
static inline bool
copies_arrived(struct copies *copies, unsigned char byte, size_t nbytes)
{
    static unsigned char copy[COPIES_MOST];
    CHECK_EQ(cuda.cuMemcpyDtoH(copy, copies->device, nbytes), NRM_CUDA_SUCCESS);
    return copy[0] == byte && memcmp(copy, copy + 1, nbytes - 1) == 0;
}

/* Whether the block is among the next `n`, which are overwritten and given back. */
static inline bool
is_among_next(nrm_resource *mr, const void *ptr, int n)
{
    void *others[64];
    bool again = false;
    for (int i = 0; i < n; i++) {
        others[i] = allocate(mr, COPIES_NBYTES);
        again = again || others[i] == ptr;
        memset(others[i], 2, COPIES_NBYTES);
    }
    for (int i = 0; i < n; i++) {
        deallocate(mr, others[i]);
    }
    return again;
}

/* A block of `mr` that dies under a pending copy: it does not come back before the copy
   is done, the copy sees its own bytes, and then it does come back. `n` blocks of
   `nbytes` are taken meanwhile, and at most `n_all` afterwards. */
static inline void
copies_check_held(struct copies *copies, nrm_resource *mr, size_t nbytes, int n,
                  int n_all)
{
    void *others[160];
    bool again = false;
    void *first = allocate(mr, nbytes);
    memset(first, 1, nbytes);
    copies_hold(copies);
    copies_to_device(copies, first, nbytes);
    CHECK_OK(nrm_resource_deallocate(mr, first, nbytes, NULL));
    for (int i = 0; i < n; i++) {
        others[i] = allocate(mr, nbytes);
        CHECK(others[i] != first);
        memset(others[i], 2, nbytes);
        mr->ops->check(mr);
    }
    copies_let_go(copies);
    CHECK(copies_arrived(copies, 1, nbytes));
    for (int i = 0; i < n; i++) {
        CHECK_OK(nrm_resource_deallocate(mr, others[i], nbytes, NULL));
        mr->ops->check(mr);
    }
    for (int i = 0; i < n_all; i++) {
        others[i] = allocate(mr, nbytes);
        again = again || others[i] == first;
    }
    CHECK(again);
    for (int i = 0; i < n_all; i++) {
        CHECK_OK(nrm_resource_deallocate(mr, others[i], nbytes, NULL));
    }
    mr->ops->check(mr);
}

#endif
