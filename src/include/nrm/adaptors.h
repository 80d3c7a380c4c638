/*
 * Adaptors: resources that forward to an upstream, which they retain, and add something.
 * They work over any resource and in any order. Blocks belong to the source or pool at
 * the end of the chain: give a block back through the resource that it was asked of, or
 * those on the way do not hear of it.
 */
#ifndef NRM_ADAPTORS_H
#define NRM_ADAPTORS_H

#include "nrm/sources.h"

/* ---- statistics ---- */

/* RMM's six fields, in requested bytes. Within a scope `current` may be negative. */
typedef struct nrm_counts {
    int64_t current_bytes;
    int64_t current_count;
    int64_t peak_bytes;
    int64_t peak_count;
    int64_t total_bytes;
    int64_t total_count;
} nrm_counts;

/*
 * An adaptor whose counters nest: a scope begins with zeros at a push, and what it has
 * counted is part of the scope around it after the pop. Scopes are those of the resource,
 * not of a thread. The counts that other threads change at the moment of a push or pop may
 * be attributed to either side, the bytes of a block and its count apart.
 */
NRM_API NRM_NODISCARD nrm_status nrm_statistics_create(nrm_resource *upstream,
                                                       nrm_resource **out);

/* Of the innermost scope. NRM_INVALID_VALUE, here and below: `mr` is no such adaptor. */
NRM_API NRM_NODISCARD nrm_status nrm_statistics_counts(nrm_resource *mr,
                                                       nrm_counts *out);

/* Begins a scope; `out`: the counts of the one around it, up to now. */
NRM_API NRM_NODISCARD nrm_status nrm_statistics_push(nrm_resource *mr, nrm_counts *out);

/* Ends the innermost scope; `out`: its counts. NRM_NOT_FOUND: only the outermost is left,
   which cannot be ended. */
NRM_API NRM_NODISCARD nrm_status nrm_statistics_pop(nrm_resource *mr, nrm_counts *out);

/* ---- limiting ---- */

typedef struct nrm_limiting_options {
    size_t size;
    size_t allocation_limit; /* bytes; 0: nothing can be allocated */
    size_t alignment;        /* every block counts as a multiple of it; 0: 256 */
} nrm_limiting_options;

/* An adaptor that never lets more than the limit be in use through it. */
NRM_API NRM_NODISCARD nrm_status nrm_limiting_create(
    nrm_resource *upstream, const nrm_limiting_options *options, nrm_resource **out);

/* What counts against the limit now, with what is being asked of the upstream, and the
   limit. NRM_INVALID_VALUE: `mr` is no such adaptor. */
NRM_API NRM_NODISCARD nrm_status nrm_limiting_get(nrm_resource *mr,
                                                  size_t *out_allocated_nbytes,
                                                  size_t *out_limit_nbytes);

#endif
