/*
 * Where there are several devices: by which way a copy goes.
 *
 * A stream's device need not reach the memory. What a pool has mapped, or what is of a
 * memory pool of the driver, is open to one device, and to others only if somebody
 * opened it to them. So where one side is on another device and not known to be open to
 * the stream's, the copy is made by a peer call if the stream belongs to the device of
 * one of the sides. If it belongs to neither, or the other side is host memory, a
 * stream of the memory's device does it: it comes behind what the stream has been
 * given, and the stream waits for it. Neither can be captured.
 *
 * Whose memory it is our own block map knows, and of others' the driver. With one
 * device nothing of this is asked.
 */
#include "core/transfer_way.h"

#include "base/error.h"
#include "core/transfer_run.h"
#include "cuda/error.h"
#include "cuda/place.h"
#include "nrm/resource.h"

/* ---- whose memory it is ---- */

static int
ask_device(const struct nrm__driver *driver, const void *ptr)
{
    nrm_CUdeviceptr address = (nrm_CUdeviceptr)(uintptr_t)ptr;
    nrm_CUmemorytype type;
    unsigned int is_managed;
    int device;
    bool is_known =
        driver->cuPointerGetAttribute(&type, NRM_CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                      address) == NRM_CUDA_SUCCESS &&
        driver->cuPointerGetAttribute(&is_managed, NRM_CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                      address) == NRM_CUDA_SUCCESS &&
        driver->cuPointerGetAttribute(&device, NRM_CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                      address) == NRM_CUDA_SUCCESS;
    return is_known && type == NRM_CU_MEMORYTYPE_DEVICE && is_managed == 0
               ? device
               : NRM_DEVICE_NONE;
}

int
nrm__transfer_device_of(const void *ptr)
{
    nrm_block_info block;
    if (nrm__cuda_n_devices() < 2) {
        return NRM_DEVICE_NONE;
    }
    if (nrm_block_find(ptr, &block) == NRM_OK) {
        nrm_resource_release(block.resource);
        if (block.kind != NRM_KIND_DEVICE) {
            return NRM_DEVICE_NONE;
        }
        if (block.device >= 0) {
            return block.device;
        }
    }
    return ask_device(nrm__cuda_driver(), ptr);
}

enum access {
    IS_OPEN,
    IS_CLOSED,
    IS_UNKNOWN, /* it is not mapped: nobody knows before it is tried */
};

static enum access
access_of(const struct nrm__driver *driver, const void *ptr, int device, bool writes)
{
    nrm_CUmemLocation location = {.type = NRM_CU_MEM_LOCATION_TYPE_DEVICE,
                                  .id = device};
    unsigned long long needed = writes ? NRM_CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                                       : NRM_CU_MEM_ACCESS_FLAGS_PROT_READ;
    unsigned long long flags;
    if (driver->cuMemGetAccess == NULL ||
        driver->cuMemGetAccess(&flags, &location, (nrm_CUdeviceptr)(uintptr_t)ptr) !=
            NRM_CUDA_SUCCESS) {
        return IS_UNKNOWN;
    }
    return (flags & needed) == needed ? IS_OPEN : IS_CLOSED;
}

/* ---- the way ---- */

/* Of both sides, and of the stream. */
struct places {
    int here;               /* the stream's device */
    int dst, src;           /* NRM_DEVICE_NONE: all devices reach it */
    enum access dst_access; /* from here */
    enum access src_access;
};

static nrm_status
find_places(const struct nrm__cuda_scope *scope, const struct nrm__transfer *t,
            struct places *out)
{
    struct places at = {scope->device, NRM_DEVICE_NONE, NRM_DEVICE_NONE, IS_OPEN,
                        IS_OPEN};
    if (at.here < 0) { /* a context of somebody else */
        nrm_CUresult code = scope->driver->cuCtxGetDevice(&at.here);
        if (code != NRM_CUDA_SUCCESS) {
            return nrm__cuda_error(code, "cuCtxGetDevice");
        }
    }
    if (t->direction != NRM__TO_HOST) {
        at.dst = nrm__transfer_device_of(t->dst);
    }
    if (t->direction != NRM__TO_DEVICE) {
        at.src = nrm__transfer_device_of(t->src);
    }
    if (at.dst >= 0 && at.dst != at.here) {
        at.dst_access = access_of(scope->driver, t->dst, at.here, true);
    }
    if (at.src >= 0 && at.src != at.here) {
        at.src_access = access_of(scope->driver, t->src, at.here, false);
    }
    *out = at;
    return NRM_OK;
}

static nrm_status
find_context(const struct nrm__cuda_scope *scope, int device, nrm_CUcontext *out)
{
    struct nrm__cuda_scope other;
    if (device == scope->device) {
        *out = scope->context;
        return NRM_OK;
    }
    NRM_TRY(nrm__cuda_enter(device, &other));
    *out = other.context;
    nrm__cuda_leave(&other);
    return NRM_OK;
}

/* On a stream that belongs to the device of one of the sides. */
static nrm_status
go_between(const struct nrm__cuda_scope *scope, const struct nrm__transfer *t,
           const struct places *at, uintptr_t handle)
{
    struct nrm__transfer_peers peers;
    nrm_CUcontext dst, src;
    NRM_TRY(find_context(scope, at->dst, &dst));
    NRM_TRY(find_context(scope, at->src, &src));
    nrm__transfer_peers_init(&peers, dst, src);
    nrm_status status = nrm__transfer_run(scope, t, handle, false, &peers);
    nrm__transfer_peers_finish(&peers, scope->driver);
    return status;
}

/* ---- on a stream of the memory's device ---- */

static bool
is_between(const struct places *at)
{
    return at->dst >= 0 && at->src >= 0 && at->dst != at->src;
}

static nrm_status
run_aside(const struct nrm__cuda_scope *there, const struct nrm__transfer *t,
          const struct places *at, nrm_CUstream stream, nrm_CUevent before,
          struct nrm__cuda_lone_event *out_after)
{
    struct nrm__cuda_place place = {there->context, there->device};
    nrm_CUresult code =
        there->driver->cuStreamWaitEvent(stream, before, NRM_CU_EVENT_WAIT_DEFAULT);
    if (code != NRM_CUDA_SUCCESS) {
        return nrm__cuda_error(code, "cuStreamWaitEvent on device %d", there->device);
    }
    NRM_TRY(is_between(at)
                ? go_between(there, t, at, (uintptr_t)stream)
                : nrm__transfer_run(there, t, (uintptr_t)stream, false, NULL));
    return nrm__cuda_lone_record(&place, (uintptr_t)stream, out_after);
}

/* The stream ends by itself when what it was given is done. */
static nrm_status
run_there(const struct nrm__transfer *t, const struct places *at, nrm_CUevent before,
          struct nrm__cuda_lone_event *out_after)
{
    struct nrm__cuda_scope there;
    nrm_CUstream stream;
    NRM_TRY(nrm__cuda_enter(at->dst >= 0 ? at->dst : at->src, &there));
    nrm_CUresult code =
        there.driver->cuStreamCreate(&stream, NRM_CU_STREAM_NON_BLOCKING);
    nrm_status status =
        code == NRM_CUDA_SUCCESS
            ? run_aside(&there, t, at, stream, before, out_after)
            : nrm__cuda_error(code, "a stream on device %d", there.device);
    if (code == NRM_CUDA_SUCCESS) {
        if (status != NRM_OK) { /* nothing else knows of what was submitted */
            (void)there.driver->cuStreamSynchronize(stream);
        }
        (void)there.driver->cuStreamDestroy(stream);
    }
    nrm__cuda_leave(&there);
    return status;
}

static nrm_status
go_aside(const struct nrm__cuda_scope *scope, const struct nrm__transfer *t,
         const struct places *at, uintptr_t handle)
{
    struct nrm__cuda_place place = {scope->context, scope->device};
    struct nrm__cuda_lone_event before, after;
    NRM_TRY(nrm__cuda_lone_record(&place, handle, &before));
    nrm_status status = run_there(t, at, before.handle, &after);
    nrm__cuda_lone_drop(&before);
    if (status != NRM_OK) {
        return status;
    }
    nrm_CUresult code = scope->driver->cuStreamWaitEvent(
        (nrm_CUstream)handle, after.handle, NRM_CU_EVENT_WAIT_DEFAULT);
    if (code != NRM_CUDA_SUCCESS) {
        (void)scope->driver->cuEventSynchronize(
            after.handle); /* the first error is told */
    }
    nrm__cuda_lone_drop(&after);
    return code == NRM_CUDA_SUCCESS
               ? NRM_OK
               : nrm__cuda_error(code, "cuStreamWaitEvent of stream 0x%zx",
                                 (size_t)handle);
}

/* ---- all of them ---- */

static nrm_status
refuse_capture(const struct places *at)
{
    bool is_dst = at->dst >= 0 && at->dst != at->here && at->dst_access == IS_CLOSED;
    return nrm__error(NRM_NOT_SUPPORTED,
                      "a graph captured from a stream of device %d cannot copy memory "
                      "of device %d that is not open to it: open the pool by "
                      "add_peer(%d), or copy outside of the capture",
                      at->here, is_dst ? at->dst : at->src, at->here);
}

nrm_status
nrm__transfer_go(const struct nrm__cuda_scope *scope, const struct nrm__transfer *t,
                 uintptr_t handle, bool is_captured)
{
    struct places at;
    NRM_TRY(find_places(scope, t, &at));
    if (at.dst_access == IS_OPEN && at.src_access == IS_OPEN) {
        return nrm__transfer_run(scope, t, handle, is_captured, NULL);
    }
    if (is_captured) {
        return at.dst_access == IS_CLOSED || at.src_access == IS_CLOSED
                   ? refuse_capture(&at)
                   : nrm__transfer_run(scope, t, handle, true, NULL);
    }
    return is_between(&at) && (at.dst == at.here || at.src == at.here)
               ? go_between(scope, t, &at, handle)
               : go_aside(scope, t, &at, handle);
}
