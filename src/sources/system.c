/*
 * SystemMemoryResource: ordinary memory of the process, which GPUs with pageable memory
 * access (Grace Hopper, or Linux with heterogeneous memory management) use in place.
 */
#include "base/error.h"
#include "core/ops.h"
#include "nrm/sources.h"
#include "sources/pageable.h"

static const struct nrm__ops system_ops = {
    .class_name = "SystemMemoryResource",
    .flags = NRM__OPS_MAPPED,
    .allocate = nrm__pageable_allocate,
    .deallocate = nrm__pageable_deallocate,
    .release_block = nrm__pageable_release,
};

nrm_status
nrm_system_create(const nrm_device_options *options, nrm_resource **out)
{
    nrm_resource *mr;
    NRM_TRY(nrm__pageable_create(&system_ops, options, sizeof *mr, &mr));
    nrm__resource_publish(mr);
    *out = mr;
    return NRM_OK;
}
