/*
 * Constructors of the sources. Option structs start with their own size, so that fields
 * can be appended; NRM_OPTIONS(type) gives one with the defaults. NULL options: the
 * defaults. `out` is a new reference.
 */
#ifndef NRM_SOURCES_H
#define NRM_SOURCES_H

#include "nrm/resource.h"

#define NRM_OPTIONS(type) ((type){.size = sizeof(type)})

typedef enum nrm_huge_pages {
    NRM_HUGE_PAGES_AUTO, /* from 4 MiB up, as NumPy's default does */
    NRM_HUGE_PAGES_NEVER,
    NRM_HUGE_PAGES_ALWAYS, /* from 2 MiB up, pages present when returned; hugetlbfs
                              where it is configured */
} nrm_huge_pages;

typedef struct nrm_host_options {
    size_t size;
    nrm_huge_pages huge_pages;
    bool bind_numa;   /* use numa_node */
    int numa_node;    /* that the pages are bound to */
    size_t alignment; /* of every block; 0: 64 */
} nrm_host_options;

typedef struct nrm_device_options {
    size_t size;
    bool set_device; /* use device; otherwise the current one at the first request */
    int device;      /* ordinal */
    bool allow_nonconcurrent; /* managed: also where host and device may not touch it at
                                 the same time; the program then synchronises first */
} nrm_device_options;

/* Memory that the driver allocates and frees in the order of streams, of a pool of its
   own. */
typedef struct nrm_cuda_async_options {
    size_t size;
    bool set_device; /* as above */
    int device;
    size_t initial_nbytes;      /* allocated and freed once when it is made */
    bool set_release_threshold; /* use release_threshold; else nothing is released */
    uint64_t release_threshold; /* bytes that the pool may keep at a synchronisation */
    bool enable_ipc;            /* its memory can be exported as a file descriptor */
    bool enable_fabric;         /* or as a fabric handle */
} nrm_cuda_async_options;

/* The same of a pool of somebody else, who destroys it after the resource. */
typedef struct nrm_cuda_async_view_options {
    size_t size;
    bool set_device; /* as above; it must be that of the pool */
    int device;
    uintptr_t pool_handle; /* a CUmemoryPool */
} nrm_cuda_async_view_options;

/* Ordinary memory that the device reads and writes in place. */
typedef struct nrm_sam_headroom_options {
    size_t size;
    bool set_device; /* as above */
    int device;
    size_t headroom; /* bytes of the device that blocks are not advised to take */
} nrm_sam_headroom_options;

/* C functions that a callback resource calls. `stream` is a handle. */
typedef struct nrm_callback_options {
    size_t size;
    nrm_kind kind;
    nrm_status (*allocate)(void *context, size_t nbytes, size_t alignment,
                           nrm_stream *stream, void **out);
    nrm_status (*deallocate)(void *context, void *ptr, size_t nbytes,
                             nrm_stream *stream);
    void (*destroy)(void *context); /* may be NULL */
    void *context;                  /* owned from success on: destroy drops it */
    bool calls_user_code;           /* needs an interpreter: refused for handlers */
} nrm_callback_options;

NRM_API NRM_NODISCARD nrm_status nrm_host_create(const nrm_host_options *options,
                                                 nrm_resource **out);
NRM_API NRM_NODISCARD nrm_status nrm_pinned_create(const nrm_device_options *options,
                                                   nrm_resource **out);
NRM_API NRM_NODISCARD nrm_status nrm_managed_create(const nrm_device_options *options,
                                                    nrm_resource **out);
NRM_API NRM_NODISCARD nrm_status nrm_device_create(const nrm_device_options *options,
                                                   nrm_resource **out);
NRM_API NRM_NODISCARD nrm_status
nrm_cuda_async_create(const nrm_cuda_async_options *options, nrm_resource **out);
NRM_API NRM_NODISCARD nrm_status nrm_cuda_async_view_create(
    const nrm_cuda_async_view_options *options, nrm_resource **out);
NRM_API NRM_NODISCARD nrm_status
nrm_cuda_async_managed_create(const nrm_device_options *options, nrm_resource **out);
NRM_API NRM_NODISCARD nrm_status nrm_system_create(const nrm_device_options *options,
                                                   nrm_resource **out);
NRM_API NRM_NODISCARD nrm_status
nrm_sam_headroom_create(const nrm_sam_headroom_options *options, nrm_resource **out);

/* The CUmemoryPool that a resource of one of the three cuda_async kinds allocates from;
   it is made if it is not there yet. NRM_INVALID_VALUE: another resource. */
NRM_API NRM_NODISCARD nrm_status nrm_cuda_async_pool_handle(nrm_resource *mr,
                                                            uintptr_t *out);

NRM_API NRM_NODISCARD nrm_status
nrm_callback_create(const nrm_callback_options *options, nrm_resource **out);

#endif
