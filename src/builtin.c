/*
 * The built-in names and what they stand for. The obvious spelling is the fast one: the
 * plain names are pools, "..._direct" are the sources under them; "device_async" is the
 * driver's own pool.
 */
#include "builtin.h"

#include "base/error.h"
#include "core/registry.h"
#include "cuda/driver.h"
#include "nrm/options.h"
#include "nrm/pools.h"
#include "nrm/registry.h"

/* A pool over `upstream`, whose reference it takes. */
static nrm_status
pool_over(nrm_resource *upstream, nrm_resource **out)
{
    nrm_status status = nrm_pool_create(upstream, NULL, out);
    nrm_resource_release(upstream);
    return status;
}

/* A pool over the resource of another name. */
static nrm_status
pool_over_name(const char *name, nrm_resource **out)
{
    nrm_resource *upstream;
    NRM_TRY(nrm_registry_get(name, &upstream));
    return pool_over(upstream, out);
}

static nrm_status
create_host(nrm_resource **out)
{
    return pool_over_name("host_direct", out);
}

static nrm_status
create_host_direct(nrm_resource **out)
{
    return nrm_host_create(NULL, out);
}

static nrm_status
create_huge_pages(nrm_resource **out)
{
    nrm_host_options options = NRM_OPTIONS(nrm_host_options);
    nrm_resource *upstream;
    options.huge_pages = NRM_HUGE_PAGES_ALWAYS;
    NRM_TRY(nrm_host_create(&options, &upstream));
    return pool_over(upstream, out);
}

static nrm_status
create_pinned(nrm_resource **out)
{
    return pool_over_name("pinned_direct", out);
}

static nrm_status
create_pinned_direct(nrm_resource **out)
{
    NRM_TRY(nrm__cuda_expect());
    return nrm_pinned_create(NULL, out);
}

static nrm_status
create_managed(nrm_resource **out)
{
    return pool_over_name("managed_direct", out);
}

static nrm_status
create_managed_direct(nrm_resource **out)
{
    NRM_TRY(nrm__cuda_expect());
    return nrm_managed_create(NULL, out);
}

static nrm_status
create_device_default(int device, nrm_resource **out)
{
    nrm_device_options options = NRM_OPTIONS(nrm_device_options);
    nrm_resource *upstream;
    NRM_TRY(nrm__cuda_expect());
    options.set_device = true;
    options.device = device;
    NRM_TRY(nrm_device_create(&options, &upstream));
    return pool_over(upstream, out);
}

static nrm_status
create_device(nrm_resource **out)
{
    return nrm__registry_device_default((int)nrm_option_get(NRM_OPT_DEVICE), out);
}

static nrm_status
create_device_direct(nrm_resource **out)
{
    NRM_TRY(nrm__cuda_expect());
    return nrm_device_create(NULL, out);
}

static nrm_status
create_device_async(nrm_resource **out)
{
    NRM_TRY(nrm__cuda_expect());
    return nrm_cuda_async_create(NULL, out);
}

static const struct nrm__builtin builtins[] = {
    {"host", false, create_host},
    {"host_direct", false, create_host_direct},
    {"huge_pages", false, create_huge_pages},
    {"pinned", true, create_pinned},
    {"pinned_direct", true, create_pinned_direct},
    {"managed", true, create_managed},
    {"managed_direct", true, create_managed_direct},
    {"device", true, create_device},
    {"device_direct", true, create_device_direct},
    {"device_async", true, create_device_async},
};

nrm_status
nrm__builtin_init(void)
{
    return nrm__registry_add_builtins(builtins, sizeof builtins / sizeof *builtins,
                                      create_device_default);
}
