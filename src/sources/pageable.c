/*
 * Ordinary memory for devices that share the page tables of the process, or follow them
 * (pageableMemoryAccess): pages migrate between host and devices as those of managed
 * memory do, which is the kind these sources have.
 *
 * A block is a mapping of its own, of whole pages, since it is pages that migrate. One
 * that is given back waits until all work submitted before is done: then it is
 * unmapped.
 */
#include "sources/pageable.h"

#include <errno.h>

#include "base/bits.h"
#include "base/error.h"
#include "core/hooks.h"
#include "core/uses.h"
#include "nrm/options.h"
#include "os/memory.h"
#include "sources/on_device.h"

/* Before cuInit nothing is known, and all is well. */
static nrm_status
check_device(int device)
{
    if (nrm__cuda_attribute(device, NRM_CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS) ==
        0) {
        return nrm__error(NRM_CUDA_UNAVAILABLE,
                          "device %d cannot read ordinary memory in place "
                          "(pageableMemoryAccess 0): use a ManagedMemoryResource",
                          device);
    }
    return NRM_OK;
}

nrm_status
nrm__pageable_create(const struct nrm__ops *ops, const nrm_device_options *options,
                     size_t struct_nbytes, nrm_resource **out)
{
    nrm_resource *mr;
    NRM_TRY(
        nrm__driver_source_create(ops, NRM_KIND_MANAGED, options, struct_nbytes, &mr));
    int device = nrm_resource_device(mr);
    nrm_status status = device != NRM_DEVICE_NONE ? check_device(device) : NRM_OK;
    if (status != NRM_OK) {
        nrm__resource_abandon(mr);
        return status;
    }
    *out = mr;
    return NRM_OK;
}

nrm_status
nrm__pageable_enter(nrm_resource *mr, struct nrm__cuda_scope *out)
{
    NRM_TRY(nrm__driver_source_enter(mr, out));
    nrm_status status = check_device(out->device);
    if (status != NRM_OK) {
        nrm__cuda_leave(out);
    }
    return status;
}

/* Looks at the device once. */
static nrm_status
check_first(nrm_resource *mr)
{
    struct nrm__cuda_scope scope;
    nrm_status status = NRM_OK;
    int device = nrm_resource_device(mr);
    if (device != NRM_DEVICE_NONE && nrm__cuda_driver() != NULL) {
        return check_device(device);
    }
    void *token = nrm__detach();
    status = nrm__pageable_enter(mr, &scope);
    if (status == NRM_OK) {
        nrm__cuda_leave(&scope);
    }
    nrm__attach(token);
    return status;
}

nrm_status
nrm__pageable_allocate(nrm_resource *mr, const struct nrm__request *request,
                       struct nrm__block *out)
{
    size_t nbytes = nrm__align_up(request->nbytes, nrm__page_size());
    bool is_large = nbytes >= NRM__HUGE_PAGE;
    size_t least = is_large ? NRM__HUGE_PAGE : nrm__page_size();
    char text[32];
    void *ptr;
    NRM_TRY(check_first(mr));
    (void)nrm__retired_drain(0); /* so that a loop of temporaries does not grow */
    int code = nrm__map(nbytes, nrm__max(request->alignment, least), &ptr);
    if (code != 0) {
        nrm_format_nbytes(request->nbytes, text, sizeof text);
        return nrm__error_errno(code == ENOMEM ? NRM_OUT_OF_MEMORY : NRM_OS_ERROR, code,
                                "mmap of %s", text);
    }
    if (is_large) {
        nrm__advise_huge_pages(ptr, nbytes, true);
    }
    out->ptr = ptr;
    out->capacity = nbytes;
    out->flags = NRM__BLOCK_IS_ZERO;
    return NRM_OK;
}

void
nrm__pageable_deallocate(nrm_resource *mr, const struct nrm__block *block,
                         nrm_stream *stream)
{
    if (block->record != NULL) {
        nrm__retire(block, nrm__epoch_stamp());
    }
    else { /* it was never handed out */
        mr->ops->release_block(mr, block);
    }
}

void
nrm__pageable_release(nrm_resource *mr, const struct nrm__block *block)
{
    if (!nrm__is_exiting()) {
        nrm__unmap(block->ptr, block->capacity);
    }
}
