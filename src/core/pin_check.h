/* What is looked at before memory is page-locked in place (core/pin.c). */
#ifndef NRM_CORE_PIN_CHECK_H
#define NRM_CORE_PIN_CHECK_H

#include <stdbool.h>
#include <stddef.h>

#include "nrm/status.h"

/* NRM_OK: a block of ours that is page-locked. NRM_NOT_FOUND (not recorded): it is not.
   NRM_INVALID_VALUE: memory of ours that cannot be. */
nrm_status nrm__pin_check_block(const void *ptr, size_t nbytes);

/* NRM_INVALID_VALUE, with the reason: not all of it is mapped, or it is a writable
   mapping of a file. Sets *read_only where a part cannot be written to, *is_shared
   where forked children have the same pages. */
nrm_status nrm__pin_check_mapping(const void *ptr, size_t nbytes, bool *read_only,
                                  bool *is_shared);

/* Makes pages that are not there, and writes nothing. NRM_OUT_OF_MEMORY: the process
   would be killed for them. */
nrm_status nrm__pin_make_pages(void *ptr, size_t nbytes, bool read_only);

#endif
