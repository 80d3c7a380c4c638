/*
 * Memory of the driver comes and goes the same way: a call that returns an address
 * aligned to 256 bytes at least, and cuMemFree. Beyond that alignment more is asked
 * for. A block remembers the generation of its context, since after a reset its address
 * is not the driver's any more.
 */
#include "sources/on_device.h"


#include "base/bits.h"
#include "base/error.h"
#include "base/given.h"
#include "core/hooks.h"
#include "core/nodes.h"
#include "cuda/foreign.h"
#include "nrm/options.h"

#define DRIVER_ALIGNMENT ((size_t)256) /* of everything the driver allocates */

/* A block as the driver knows it; what block->tag points to. */
struct origin {
    nrm_CUdeviceptr base; /* at or before block->ptr */
    int device;
    uint64_t generation; /* of the device, in which it was made */
};

static struct origin *
origin_of(const struct nrm__block *block)
{
    return (struct origin *)(uintptr_t)block->tag;
}

nrm_status
nrm__driver_source_create(const struct nrm__ops *ops, nrm_kind kind,
                          const nrm_device_options *options, size_t struct_nbytes,
                          nrm_resource **out)
{
    nrm_device_options given = {0};
    NRM__COPY_GIVEN(given, options);
    if (given.set_device && (given.device < 0 || given.device >= NRM__MAX_DEVICES)) {
        return nrm__error(NRM_INVALID_VALUE, "device %d: ordinals are 0 to %d",
                          given.device, NRM__MAX_DEVICES - 1);
    }
    NRM_TRY(nrm__cuda_expect());
    NRM_TRY(nrm__resource_create(ops, kind, NULL, struct_nbytes, out));
    if (given.set_device) {
        atomic_store(&(*out)->device, given.device);
    }
    return NRM_OK;
}

/* ---- allocation ---- */

/* The caller is going to use the memory there. */
static nrm_status
note_context(void)
{
    if (nrm__cuda_is_exiting()) {
        return NRM_DEVICE_LOST;
    }
    NRM_TRY(nrm__cuda_init(NULL));
    nrm__cuda_foreign_note_current();
    return NRM_OK;
}

nrm_status
nrm__driver_source_enter(nrm_resource *mr, struct nrm__cuda_scope *out)
{
    int device = atomic_load_explicit(&mr->device, memory_order_relaxed);
    NRM_TRY(note_context());
    NRM_TRY(nrm__cuda_enter(device, out));
    if (device != NRM_DEVICE_NONE ||
        atomic_compare_exchange_strong(&mr->device, &device, out->device) ||
        device == out->device) {
        return NRM_OK;
    }
    nrm__cuda_leave(out); /* another thread's first request was faster */
    return nrm__cuda_enter(device, out);
}

static nrm_status
refused(const struct nrm__cuda_scope *scope, nrm_CUresult code, const char *call,
        size_t nbytes)
{
    char asked[32], free_text[32], total_text[32];
    size_t free_nbytes, total_nbytes;
    nrm_format_nbytes(nbytes, asked, sizeof asked);
    if (code != NRM_CUDA_ERROR_OUT_OF_MEMORY ||
        scope->driver->cuMemGetInfo(&free_nbytes, &total_nbytes) != NRM_CUDA_SUCCESS) {
        return nrm__cuda_error(code, "%s of %s on device %d", call, asked,
                               scope->device);
    }
    nrm_format_nbytes(free_nbytes, free_text, sizeof free_text);
    nrm_format_nbytes(total_nbytes, total_text, sizeof total_text);
    return nrm__cuda_error(code, "%s of %s on device %d (%s free of %s)", call, asked,
                           scope->device, free_text, total_text);
}

static nrm_status
allocate_entered(const struct nrm__cuda_scope *scope, const struct nrm__driver_way *way,
                 void *more, const struct nrm__request *request, struct origin *origin,
                 void **out)
{
    size_t slack = request->alignment > DRIVER_ALIGNMENT
                       ? request->alignment - DRIVER_ALIGNMENT
                       : 0;
    size_t nbytes = request->nbytes + slack;
    if (nbytes < slack) {
        return refused(scope, NRM_CUDA_ERROR_OUT_OF_MEMORY, way->name, SIZE_MAX);
    }
    nrm_CUresult code = way->call(scope, more, nbytes, &origin->base);
    if (code != NRM_CUDA_SUCCESS) {
        return refused(scope, code, way->name, nbytes);
    }
    origin->device = scope->device;
    /* Asked after the call: of a reset in between, the later number is the safe one. */
    origin->generation = nrm__cuda_generation(scope->device);
    *out = (void *)(uintptr_t)nrm__align_up((size_t)origin->base, request->alignment);
    return NRM_OK;
}

static nrm_status
allocate_detached(nrm_resource *mr, const struct nrm__driver_way *way, void *more,
                  const struct nrm__request *request, struct origin *origin, void **out)
{
    struct nrm__cuda_scope scope;
    nrm_status status = NRM_OK;
    NRM_TRY(nrm__driver_source_enter(mr, &scope));
    if (way->check != NULL) {
        status = way->check(mr, &scope);
    }
    if (status == NRM_OK) {
        status = allocate_entered(&scope, way, more, request, origin, out);
    }
    nrm__cuda_leave(&scope);
    return status;
}

nrm_status
nrm__driver_block_allocate(nrm_resource *mr, const struct nrm__driver_way *way,
                           void *more, const struct nrm__request *request,
                           struct nrm__block *out)
{
    struct origin *origin = nrm__node_allocate(sizeof *origin);
    if (origin == NULL) {
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe a block");
    }
    void *token = nrm__detach();
    nrm_status status = allocate_detached(mr, way, more, request, origin, &out->ptr);
    nrm__attach(token);
    if (status != NRM_OK) {
        nrm__node_deallocate(origin, sizeof *origin);
        return status;
    }
    out->capacity = request->nbytes;
    out->tag = (uint64_t)(uintptr_t)origin;
    return NRM_OK;
}

/* ---- after a reset ---- */

nrm_status
nrm__driver_block_renew(nrm_resource *mr, struct nrm__block *block)
{
    const struct origin *origin = origin_of(block);
    void *token = nrm__detach();
    uint64_t generation = nrm__cuda_generation(origin->device);
    nrm__attach(token);
    if (generation == origin->generation) {
        return NRM_OK;
    }
    return nrm__error(
        NRM_DEVICE_LOST,
        "the context of device %d was reset: %s memory from before is gone "
        "and must not be touched",
        origin->device, nrm_kind_name(mr->kind));
}

/* ---- giving back ---- */

typedef nrm_CUresult free_function(const struct nrm__cuda_scope *scope, void *more,
                                   nrm_CUdeviceptr ptr);

static nrm_status
free_entered(const struct origin *origin, const char *name, free_function *call,
             void *more)
{
    struct nrm__cuda_scope scope;
    nrm_CUresult code = NRM_CUDA_SUCCESS;
    NRM_TRY(nrm__cuda_enter_to_free(origin->device, &scope));
    if (scope.generation == origin->generation) {
        code = call(&scope, more, origin->base);
    }
    nrm__cuda_leave(&scope);
    if (code == NRM_CUDA_SUCCESS || nrm__cuda_is_destroyed(code)) {
        return NRM_OK;
    }
    return nrm__cuda_error(code, "%s on device %d", name, origin->device);
}

void
nrm__driver_block_free_by(const struct nrm__block *block, const char *name,
                          free_function *call, void *more)
{
    struct origin *origin = origin_of(block);
    if (nrm__is_exiting()) {
        return;
    }
    /* In a forked child there is no driver: the memory is the parent's. */
    if (nrm__cuda_driver() != NULL &&
        nrm__cuda_generation(origin->device) == origin->generation &&
        free_entered(origin, name, call, more) != NRM_OK) {
        nrm__lost_error_note(nrm_last_error());
    }
    nrm__node_deallocate(origin, sizeof *origin);
}

static nrm_CUresult
free_now(const struct nrm__cuda_scope *scope, void *more, nrm_CUdeviceptr ptr)
{
    return scope->driver->cuMemFree(ptr);
}

void
nrm__driver_block_free(const struct nrm__block *block)
{
    nrm__driver_block_free_by(block, "cuMemFree", free_now, NULL);
}
