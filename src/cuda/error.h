/* Errors of the driver. */
#ifndef NRM_CUDA_ERROR_H
#define NRM_CUDA_ERROR_H

#include <stdbool.h>

#include "cuda/abi.h"
#include "nrm/status.h"

/* Records a driver error: name and text are the driver's own. `what`: the call, and
   numbers with units. Maps OUT_OF_MEMORY, DEVICE_LOST and CUDA_ERROR. Nothing is
   recorded when the driver or the process is shutting down. */
nrm_status nrm__cuda_error(nrm_CUresult code, const char *what, ...) NRM_PRINTF(2, 3);

/* An error after which the context answers nothing else (illegal address, ...). */
bool nrm__cuda_is_sticky(nrm_CUresult code);

/* The context is gone, not broken: destroyed, reset, or the driver shuts down. */
bool nrm__cuda_is_destroyed(nrm_CUresult code);

/* "CUDA_ERROR_NOT_READY". Never NULL. */
const char *nrm__cuda_error_name(nrm_CUresult code);

/* "device not ready"; "" when no driver is loaded. */
const char *nrm__cuda_error_text(nrm_CUresult code);

#endif
