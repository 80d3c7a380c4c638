/*
 * SamHeadroomMemoryResource: ordinary memory for GPUs, of which so much is advised to
 * be in the memory of the device as leaves a headroom free there, for libraries that
 * allocate without us.
 *
 * A block is advised about when it is made, by what is free then: its first bytes to
 * the device, the rest to the host. The advice belongs to the pages and is taken back
 * before they go to somebody else.
 */

#include "base/bits.h"
#include "base/error.h"
#include "core/hooks.h"
#include "core/ops.h"
#include "nrm/sources.h"
#include "base/given.h"
#include "os/memory.h"
#include "sources/on_device.h"
#include "sources/pageable.h"

struct sam_headroom {
    nrm_resource base;
    size_t headroom;
};

static nrm_status
advise(const struct nrm__cuda_scope *scope, const char *ptr, size_t nbytes,
       nrm_CUmem_advise advice, nrm_CUmemLocationType type)
{
    nrm_CUmemLocation place = {.type = type, .id = scope->device};
    if (nbytes == 0) {
        return NRM_OK;
    }
    nrm_CUresult code = scope->driver->cuMemAdvise((nrm_CUdeviceptr)(uintptr_t)ptr,
                                                   nbytes, advice, place);
    return code == NRM_CUDA_SUCCESS
               ? NRM_OK
               : nrm__cuda_error(code, "cuMemAdvise of %zu B on device %d", nbytes,
                                 scope->device);
}

/* Whole pages, since a page is in one place. */
static nrm_status
place_entered(const struct sam_headroom *self, const struct nrm__cuda_scope *scope,
              const char *ptr, size_t nbytes)
{
    size_t free_nbytes, total_nbytes;
    if (scope->driver->cuMemAdvise == NULL) {
        return nrm__error(NRM_CUDA_UNAVAILABLE,
                          "the CUDA driver (of CUDA %d.%d) takes no advice about where "
                          "memory should be: CUDA 12.2 or newer is needed",
                          scope->driver->version / 1000,
                          scope->driver->version % 1000 / 10);
    }
    nrm_CUresult code = scope->driver->cuMemGetInfo(&free_nbytes, &total_nbytes);
    if (code != NRM_CUDA_SUCCESS) {
        return nrm__cuda_error(code, "cuMemGetInfo on device %d", scope->device);
    }
    size_t room = free_nbytes > self->headroom ? free_nbytes - self->headroom : 0;
    size_t on_device = room >= nbytes ? nbytes
                                      : nrm__align_down(room, nrm__page_size());
    NRM_TRY(advise(scope, ptr, on_device, NRM_CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
                   NRM_CU_MEM_LOCATION_TYPE_DEVICE));
    return advise(scope, ptr + on_device, nbytes - on_device,
                  NRM_CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
                  NRM_CU_MEM_LOCATION_TYPE_HOST);
}

static nrm_status
place_block(nrm_resource *mr, const struct nrm__block *block)
{
    struct nrm__cuda_scope scope;
    void *token = nrm__detach();
    nrm_status status = nrm__pageable_enter(mr, &scope);
    if (status == NRM_OK) {
        status = place_entered((struct sam_headroom *)mr, &scope, block->ptr,
                               block->capacity);
        nrm__cuda_leave(&scope);
    }
    nrm__attach(token);
    return status;
}

/* Of a context that has gone no advice is left. */
static void
take_back(nrm_resource *mr, const struct nrm__block *block)
{
    struct nrm__cuda_scope scope;
    if (nrm__is_exiting() || nrm__cuda_driver() == NULL ||
        nrm__cuda_enter_existing(nrm_resource_device(mr), &scope) != NRM_OK) {
        return;
    }
    if (scope.driver->cuMemAdvise != NULL &&
        advise(&scope, block->ptr, block->capacity,
               NRM_CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION,
               NRM_CU_MEM_LOCATION_TYPE_DEVICE) != NRM_OK) {
        nrm__lost_error_note(nrm_last_error());
    }
    nrm__cuda_leave(&scope);
}

static void
sam_headroom_release(nrm_resource *mr, const struct nrm__block *block)
{
    void *token = nrm__detach();
    take_back(mr, block);
    nrm__attach(token);
    nrm__pageable_release(mr, block);
}

static nrm_status
sam_headroom_allocate(nrm_resource *mr, const struct nrm__request *request,
                      struct nrm__block *out)
{
    NRM_TRY(nrm__pageable_allocate(mr, request, out));
    nrm_status status = place_block(mr, out);
    if (status != NRM_OK) {
        sam_headroom_release(mr, out);
    }
    return status;
}

static const struct nrm__ops sam_headroom_ops = {
    .class_name = "SamHeadroomMemoryResource",
    .flags = NRM__OPS_MAPPED,
    .allocate = sam_headroom_allocate,
    .deallocate = nrm__pageable_deallocate,
    .release_block = sam_headroom_release,
};

nrm_status
nrm_sam_headroom_create(const nrm_sam_headroom_options *options, nrm_resource **out)
{
    nrm_sam_headroom_options given = {0};
    nrm_resource *mr;
    NRM__COPY_GIVEN(given, options);
    nrm_device_options where = NRM_OPTIONS(nrm_device_options);
    where.set_device = given.set_device;
    where.device = given.device;
    NRM_TRY(nrm__pageable_create(&sam_headroom_ops, &where, sizeof(struct sam_headroom),
                                 &mr));
    ((struct sam_headroom *)mr)->headroom = given.headroom;
    nrm__resource_publish(mr);
    *out = mr;
    return NRM_OK;
}
