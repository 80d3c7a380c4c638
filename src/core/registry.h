/* For src/builtin.c: the names that exist from the start. See nrm/registry.h. */
#ifndef NRM_CORE_REGISTRY_H
#define NRM_CORE_REGISTRY_H

#include "nrm/resource.h"

struct nrm__builtin {
    const char *name;
    bool needs_cuda;
    nrm_status (*create)(nrm_resource **out); /* runs at the first look-up */
};

/* Borrows the rows for ever. `device_default` makes a device's default resource. */
nrm_status nrm__registry_add_builtins(const struct nrm__builtin *builtins,
                                      size_t n_builtins,
                                      nrm_status (*device_default)(int device,
                                                                   nrm_resource **out));

/* The resource that None restores for a device: a new reference. */
nrm_status nrm__registry_device_default(int device, nrm_resource **out);

/* The same as nrm_get_per_device_resource would give, without a lock or a reference: to
   be compared with, and nothing else. NULL: none was made yet. `device` is valid. */
nrm_resource *nrm__registry_peek_device(int device);

/* Another driver takes over: what factories made on the old one is made anew when its
   name is looked up next. Live blocks keep the old resources alive. */
void nrm__registry_forget_driver(void);

#endif
