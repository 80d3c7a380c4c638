/*
 * Resources: whatever can allocate and deallocate. A source gets memory from the OS or
 * the driver, a pool keeps memory of its upstream and hands it out again, an adaptor
 * forwards and adds something.
 *
 * Resources are reference-counted. A block keeps its resource alive, so a resource may
 * be released while blocks of it live. Every function here is thread-safe and may be
 * called with or without the Python GIL; those that allocate, trim or drain may block.
 */
#ifndef NRM_RESOURCE_H
#define NRM_RESOURCE_H

#include <stdbool.h>
#include <stdint.h>

#include "nrm/status.h"
#include "nrm/stream.h"

typedef struct nrm_resource nrm_resource;

typedef enum nrm_kind {
    NRM_KIND_HOST,    /* ordinary host memory */
    NRM_KIND_PINNED,  /* page-locked host memory */
    NRM_KIND_MANAGED, /* migrates between host and devices */
    NRM_KIND_DEVICE,  /* not accessible from the host */
} nrm_kind;

#define NRM_DEVICE_NONE (-1) /* host memory, or: no particular device */

/* RMM's six fields, in requested bytes, then ours. Exact once threads are quiet; but a
   peak that several threads make may be off by 1 MiB, 4096 blocks and a block more for
   each. */
typedef struct nrm_statistics {
    int64_t current_bytes;
    int64_t current_count;
    int64_t peak_bytes;
    int64_t peak_count;
    int64_t total_bytes;
    int64_t total_count;
    int64_t reserved_bytes; /* taken from the OS, the driver or the upstream */
    int64_t parked_bytes;   /* given back, but the GPU may still touch it */
    int64_t epochs;         /* closed for this resource */
    int64_t waits;          /* for an epoch */
    int64_t fallbacks;      /* requests served by the fallback of a route */
    int64_t errors;         /* frees of addresses that are not ours, lost blocks */
    int64_t segments_ahead; /* taken ahead of demand, in the background */
    int64_t failures_ahead; /* times that this failed: no error of the program */
} nrm_statistics;

/* "host", "pinned", "managed", "device". */
NRM_API const char *nrm_kind_name(nrm_kind kind);
NRM_API bool nrm_kind_is_host_accessible(nrm_kind kind);

/*
 * Allocates `nbytes` at `alignment` (a power of two; 0: 64 for host memory, 256 for
 * every other kind), ordered behind `stream` (borrowed; NULL: none). Zero bytes: NULL
 * and success. An alignment that cannot be honoured is an error.
 */
NRM_API NRM_NODISCARD nrm_status nrm_resource_allocate(nrm_resource *mr, size_t nbytes,
                                                       size_t alignment,
                                                       nrm_stream *stream, void **out);

/* The same, and the memory reads as zero. Not for device memory. */
NRM_API NRM_NODISCARD nrm_status nrm_resource_allocate_zeroed(
    nrm_resource *mr, size_t nbytes, size_t alignment, nrm_stream *stream, void **out);

/*
 * Gives a block back. `nbytes` is a hint and never trusted (0: unknown). NULL is no
 * error. NRM_NOT_OWNED: `ptr` is not the start of a live block that came through `mr`;
 * nothing changed. `stream` NULL: the host is done with it.
 */
NRM_API nrm_status nrm_resource_deallocate(nrm_resource *mr, void *ptr, size_t nbytes,
                                           nrm_stream *stream);

/*
 * Changes the size of a block: in place, or by moving its pages, or by a copy of
 * min(old, new) bytes. `ptr` NULL allocates. On failure the old block is as it was.
 * Host-accessible memory only.
 */
NRM_API NRM_NODISCARD nrm_status nrm_resource_reallocate(nrm_resource *mr, void *ptr,
                                                         size_t nbytes,
                                                         size_t alignment,
                                                         nrm_stream *stream,
                                                         void **out);

/*
 * Gives unused memory back, keeping about `keep_nbytes` in reserve; waits for the GPU
 * for a bounded time. The upstream is trimmed too. `out_nbytes` (may be NULL): the
 * bytes given back.
 */
NRM_API NRM_NODISCARD nrm_status nrm_resource_trim(nrm_resource *mr, size_t keep_nbytes,
                                                   size_t *out_nbytes);

NRM_API NRM_NODISCARD nrm_status nrm_resource_statistics(nrm_resource *mr,
                                                         nrm_statistics *out);

NRM_API nrm_kind nrm_resource_kind(const nrm_resource *mr);
/* The ordinal of the device, or NRM_DEVICE_NONE (also before the first use). */
NRM_API int nrm_resource_device(const nrm_resource *mr);
/* Borrowed; NULL for a source. */
NRM_API nrm_resource *nrm_resource_upstream(const nrm_resource *mr);
/* The class, e.g. "PoolMemoryResource". */
NRM_API const char *nrm_resource_class_name(const nrm_resource *mr);
/* The name in the registry under which it was made, or "". Copied into `out`. */
NRM_API void nrm_resource_name(const nrm_resource *mr, char *out, size_t size);
/* True when it, or an upstream, calls code that may need an interpreter. */
NRM_API bool nrm_resource_calls_user_code(const nrm_resource *mr);

NRM_API void nrm_resource_retain(nrm_resource *mr);
NRM_API void nrm_resource_release(nrm_resource *mr);

/* ---- blocks ---- */

typedef struct nrm_block_info {
    nrm_resource *resource; /* owner of the block: a new reference, or NULL */
    nrm_kind kind;
    int device;
    void *ptr;          /* first byte */
    size_t nbytes;      /* as requested */
    size_t capacity;    /* usable without moving */
    unsigned uses;      /* pending known uses */
    const char *reason; /* why it is not what the handler promises; static or NULL */
} nrm_block_info;

/*
 * The innermost live block that contains `ptr`, which may be interior. NRM_NOT_FOUND:
 * there is none (no error is recorded). CUDA is never initialised or called.
 */
NRM_API NRM_NODISCARD nrm_status nrm_block_find(const void *ptr, nrm_block_info *out);

/*
 * What the kernel says about the page at `ptr`: its size in bytes (0: unknown) and its
 * NUMA node (-1: unknown, or no page yet). Reads the process's maps: milliseconds.
 */
NRM_API void nrm_page_info(const void *ptr, size_t *out_page_nbytes,
                           int *out_numa_node);

#endif
