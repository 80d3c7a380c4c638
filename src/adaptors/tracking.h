/* For the layer above: stacks of the language, which the core cannot see. */
#ifndef NRM_ADAPTORS_TRACKING_H
#define NRM_ADAPTORS_TRACKING_H

#include "core/ops.h"

/* Bytes of such a text that are kept at most, with the 0 at its end. */
#define NRM__TRACKING_TEXT_NBYTES ((size_t)2048)

/*
 * Notes where the program asked for a live block of `mr`, in each
 * TrackingResourceAdaptor on its way that captures stacks. Nothing is done where
 * mr->flags has no NRM__OPS_STACKS.
 */
void nrm__tracking_annotate(nrm_resource *mr, const void *ptr, const char *text);

#endif
