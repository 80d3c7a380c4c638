/*
 * The one table of named resources, and the current resource of each device.
 *
 * Names are 1-64 printable ASCII characters without ':' and '#'. Built-in names have a
 * factory, which runs at the first look-up of the name; binding a name replaces what it
 * stands for from now on, unbinding a built-in name brings its factory back. Everything
 * here is thread-safe.
 */
#ifndef NRM_REGISTRY_H
#define NRM_REGISTRY_H

#include "nrm/resource.h"

/* `out` is a new reference. NRM_NOT_FOUND lists the known names in the message. */
NRM_API NRM_NODISCARD nrm_status nrm_registry_get(const char *name, nrm_resource **out);

/* Retains `mr`. */
NRM_API NRM_NODISCARD nrm_status nrm_registry_set(const char *name, nrm_resource *mr);

NRM_API NRM_NODISCARD nrm_status nrm_registry_delete(const char *name);

NRM_API bool nrm_registry_contains(const char *name);

/* The i-th name in order of registration, copied; NRM_NOT_FOUND past the end. */
NRM_API NRM_NODISCARD nrm_status nrm_registry_name(size_t index, char *out,
                                                   size_t size);

/* Whether `name` needs CUDA. False for unknown names. */
NRM_API bool nrm_registry_needs_cuda(const char *name);

/* A resource that exists already under `name`, or NULL: never makes one. New
   reference. */
NRM_API nrm_resource *nrm_registry_peek(const char *name);

/* The current resource of a device (ordinal), a new reference; the default is the name
   "device". */
NRM_API NRM_NODISCARD nrm_status nrm_get_per_device_resource(int device,
                                                             nrm_resource **out);
/* NULL restores the default. NRM_INVALID_VALUE: host memory, or that of another device.
   Blocks go back to the resource that they came from, whatever is current by then. */
NRM_API NRM_NODISCARD nrm_status nrm_set_per_device_resource(int device,
                                                             nrm_resource *mr);

/* The same for the device of the caller's current context, or if it has none that of
   the option `device`. They call cuInit if nobody did. */
NRM_API NRM_NODISCARD nrm_status nrm_get_current_device_resource(nrm_resource **out);
NRM_API NRM_NODISCARD nrm_status nrm_set_current_device_resource(nrm_resource *mr);

#endif
