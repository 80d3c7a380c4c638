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
nrm_callback_create(const nrm_callback_options *options, nrm_resource **out);

#endif
