/*
 * Adaptors: resources that forward to an upstream, which they retain, and add
 * something. They work over any resource and in any order. Blocks belong to the source
 * or pool at the end of the chain: give a block back through the resource that it was
 * asked of, or those on the way do not hear of it.
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
 * counted is part of the scope around it after the pop. Scopes are those of the
 * resource, not of a thread. The counts that other threads change at the moment of a
 * push or pop may be attributed to either side, the bytes of a block and its count
 * apart.
 */
NRM_API NRM_NODISCARD nrm_status nrm_statistics_create(nrm_resource *upstream,
                                                       nrm_resource **out);

/* Of the innermost scope. NRM_INVALID_VALUE, here and below: `mr` is no such
   adaptor. */
NRM_API NRM_NODISCARD nrm_status nrm_statistics_counts(nrm_resource *mr,
                                                       nrm_counts *out);

/* Begins a scope; `out`: the counts of the one around it, up to now. */
NRM_API NRM_NODISCARD nrm_status nrm_statistics_push(nrm_resource *mr, nrm_counts *out);

/* Ends the innermost scope; `out`: its counts. NRM_NOT_FOUND: only the outermost is
   left, which cannot be ended. */
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

/* ---- aligned ---- */

typedef struct nrm_aligned_options {
    size_t size;
    size_t alignment;           /* of blocks, a power of two; 0: 256 */
    size_t alignment_threshold; /* requests of fewer bytes stay as they are */
} nrm_aligned_options;

/* An adaptor that asks for a greater alignment. NULL options: the defaults. */
NRM_API NRM_NODISCARD nrm_status nrm_aligned_create(nrm_resource *upstream,
                                                    const nrm_aligned_options *options,
                                                    nrm_resource **out);

/* ---- prefetch ---- */

/* An adaptor that moves new managed memory to the device that is current, in the order
   of the request's stream. Of all other memory it changes nothing. */
NRM_API NRM_NODISCARD nrm_status nrm_prefetch_create(nrm_resource *upstream,
                                                     nrm_resource **out);

/* ---- failure callback ---- */

typedef struct nrm_failure_callback_options {
    size_t size;
    /* Called with no lock held when there is no memory for `nbytes`. Sets *out_retry:
       the request is made once more. What it returns besides NRM_OK is what the request
       fails with. */
    nrm_status (*callback)(void *context, size_t nbytes, bool *out_retry);
    void (*destroy)(void *context); /* may be NULL */
    void *context;                  /* owned from success on: destroy drops it */
    bool calls_user_code;           /* needs an interpreter: refused for handlers */
} nrm_failure_callback_options;

/* An adaptor that asks what to do about a request that finds no memory. */
NRM_API NRM_NODISCARD nrm_status nrm_failure_callback_create(
    nrm_resource *upstream, const nrm_failure_callback_options *options,
    nrm_resource **out);

/* ---- tracking ---- */

typedef struct nrm_tracking_options {
    size_t size;
    bool capture_stacks; /* where each block was asked for */
} nrm_tracking_options;

/* An adaptor that knows all blocks that live through it. NULL options: the defaults. */
NRM_API NRM_NODISCARD nrm_status nrm_tracking_create(
    nrm_resource *upstream, const nrm_tracking_options *options, nrm_resource **out);

/* Bytes in them. NRM_INVALID_VALUE, here and below: `mr` is no such adaptor. */
NRM_API NRM_NODISCARD nrm_status nrm_tracking_get_allocated(nrm_resource *mr,
                                                            size_t *out_nbytes);

/*
 * A line of text for each, by address, with the stacks below it. As much as fits goes
 * into `out`, ended with a 0; `out_size` is how much there is, the 0 included.
 */
NRM_API NRM_NODISCARD nrm_status nrm_tracking_describe(nrm_resource *mr, char *out,
                                                       size_t size, size_t *out_size);

/* ---- logging ---- */

typedef struct nrm_logging_options {
    size_t size;
    const char *path; /* borrowed; NULL: the option `log_file` */
    bool name_device; /* ".dev0" goes before the extension, with `device` in it */
    int device;
} nrm_logging_options;

/*
 * An adaptor that writes a row of text for each allocation, failure and free into a
 * file, which it empties: `Thread,Time,Action,Pointer,Size,Stream`. Rows are written a
 * moment later, in an order in which the requests can have happened; at the latest when
 * the process ends. Adaptors of one process that name the same file share it.
 * NRM_INVALID_VALUE: no name. NRM_OS_ERROR.
 */
NRM_API NRM_NODISCARD nrm_status nrm_logging_create(nrm_resource *upstream,
                                                    const nrm_logging_options *options,
                                                    nrm_resource **out);

/* Writes what was noted before. NRM_OS_ERROR: rows were lost; `errors` of its
   statistics counts them too. NRM_INVALID_VALUE, here and below: `mr` is no such
   adaptor. */
NRM_API NRM_NODISCARD nrm_status nrm_logging_flush(nrm_resource *mr);

/* Copied into `out`. */
NRM_API NRM_NODISCARD nrm_status nrm_logging_get_path(nrm_resource *mr, char *out,
                                                      size_t size);

#endif
