/* The built-in names: "host", "pinned", "managed", "device", ... */
#ifndef NRM_BUILTIN_H
#define NRM_BUILTIN_H

#include "nrm/status.h"

/* Puts the built-in names into the registry; once, before it is used. Makes nothing. */
nrm_status nrm__builtin_init(void);

#endif
