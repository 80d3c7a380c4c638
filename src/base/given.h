/*
 * How a constructor reads its options: a struct whose first field is the size that its
 * caller compiled with. What an older caller did not know yet keeps the value that
 * `given` has, and so does everything where `options` is NULL; what a newer one knows
 * beyond it is not looked at.
 */
#ifndef NRM_BASE_GIVEN_H
#define NRM_BASE_GIVEN_H

#include <string.h>

#include "base/bits.h"

#define NRM__COPY_GIVEN(given, options)                                                \
    nrm__copy_given(&(given), sizeof(given), options)

static inline void
nrm__copy_given(void *given, size_t nbytes, const void *options)
{
    size_t known;
    if (options != NULL) {
        memcpy(&known, options, sizeof known);
        memcpy(given, options, nrm__min(known, nbytes));
    }
}

#endif
