/* Writing the last-error record of nrm/status.h. */
#ifndef NRM_BASE_ERROR_H
#define NRM_BASE_ERROR_H

#include "nrm/status.h"

/* Records an error of this thread and returns `status`: `return nrm__error(...)`. */
nrm_status nrm__error(nrm_status status, const char *format, ...) NRM_PRINTF(2, 3);

/* The same with the code and the name of the driver's or the system's own error. */
nrm_status nrm__error_native(nrm_status status, int code, const char *name,
                             const char *format, ...) NRM_PRINTF(4, 5);

/* The same for an errno code, whose name is found here. */
nrm_status nrm__error_errno(nrm_status status, int code, const char *format, ...)
    NRM_PRINTF(3, 4);

/* "ENOMEM"; "" for codes that nothing here meets. */
const char *nrm__errno_name(int code);

/* Adds to the record of this thread whom was asked for what. */
void nrm__error_request(size_t nbytes, const char *resource);

/* Returns from the calling function with the status of `expression` unless it is OK. */
#define NRM_TRY(expression)                                                            \
    do {                                                                               \
        nrm_status nrm__try = (expression);                                            \
        if (nrm__try != NRM_OK)                                                        \
            return nrm__try;                                                           \
    } while (0)

#endif
