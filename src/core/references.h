/* References in bulk. */
#ifndef NRM_CORE_REFERENCES_H
#define NRM_CORE_REFERENCES_H

#include "nrm/resource.h"

/* `n` references at once; release is by somebody who has them all. */
void nrm__resource_retain_many(nrm_resource *mr, size_t n);
void nrm__resource_release_many(nrm_resource *mr, size_t n);

#endif
