/* Changing the CUDA driver of a running process: for the simulated one, in tests. */
#ifndef NRM_CORE_EXCHANGE_H
#define NRM_CORE_EXCHANGE_H

#include "nrm/status.h"

/*
 * Gives back what waits for the old driver, forgets the built-in resources made on it,
 * and loads `path` ("simulator", or NULL: the usual search) at the next use. Blocks
 * that live keep their memory; it is not page-locked for the new driver.
 */
nrm_status nrm__driver_exchange(const char *path);

#endif
