/* For core/registry.c: the table behind nrm_get_per_device_resource. */
#ifndef NRM_CORE_CURRENT_H
#define NRM_CORE_CURRENT_H

#include "nrm/resource.h"

/* Once, before any device is asked for: what makes the default resource of one. */
void nrm__current_set_maker(nrm_status (*make)(int device, nrm_resource **out));

/* Another driver takes over: defaults are made anew when they are asked for next. */
void nrm__current_forget_driver(void);

/* The ordinal of the device of the caller's current context, else the option
   `device`'s. Never initialises CUDA. */
int nrm__current_device(void);

/* The same, and calls cuInit if nobody did: only an initialised driver can tell. Where
   there is none, the resource says so when it is asked for memory. */
int nrm__current_device_asked(void);

#endif
