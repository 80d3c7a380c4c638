/* The types and constants of the CUDA driver, as far as this project uses them: the
 * first half of abi.h, which is the file to include.
 *
 * Everything is prefixed, because a test compares it with the toolkit's cuda.h, which
 * it includes beside this. The handles are distinct incomplete types, so the compiler
 * tells a stream from an event.
 */
#ifndef NRM_CUDA_ABI_TYPES_H
#define NRM_CUDA_ABI_TYPES_H

#include <stddef.h>
#include <stdint.h>

typedef int nrm_CUdevice;                   /* an ordinal, not an address */
typedef unsigned long long nrm_CUdeviceptr; /* 64-bit hosts only, asserted below */
typedef struct nrm_CUctx_st *nrm_CUcontext;
typedef struct nrm_CUstream_st *nrm_CUstream;
typedef struct nrm_CUevent_st *nrm_CUevent;
typedef struct nrm_CUgraph_st *nrm_CUgraph;
typedef struct nrm_CUgraphExec_st *nrm_CUgraphExec; /* one that can be launched */
typedef struct nrm_CUgraphNode_st *nrm_CUgraphNode;
typedef struct nrm_CUuserObject_st *nrm_CUuserObject;
typedef struct nrm_CUmemPoolHandle_st *nrm_CUmemoryPool; /* of the driver's own */
typedef struct nrm_CUarray_st *nrm_CUarray;
typedef unsigned long long nrm_CUmemGenericAllocationHandle; /* physical memory */
typedef void (*nrm_CUhostFn)(void *user_data);

_Static_assert(sizeof(void *) == 8, "the CUDA driver exists on 64-bit hosts only");

/* The two streams that exist without being created. NULL names the legacy one too. */
#define NRM_CU_STREAM_LEGACY ((nrm_CUstream)(uintptr_t)0x1)
#define NRM_CU_STREAM_PER_THREAD ((nrm_CUstream)(uintptr_t)0x2)

/* clang-format off */

/* X(name, value): NRM_CUDA_<name> is the driver's CUDA_<name>. */
#define NRM_CUDA_RESULTS(X)                                                            \
    X(SUCCESS, 0)                                                                      \
    X(ERROR_INVALID_VALUE, 1)                                                          \
    X(ERROR_OUT_OF_MEMORY, 2)                                                          \
    X(ERROR_NOT_INITIALIZED, 3)                                                        \
    X(ERROR_DEINITIALIZED, 4)                                                          \
    X(ERROR_STUB_LIBRARY, 34)                                                          \
    X(ERROR_CALL_REQUIRES_NEWER_DRIVER, 36)                                            \
    X(ERROR_DEVICE_UNAVAILABLE, 46)                                                    \
    X(ERROR_NO_DEVICE, 100)                                                            \
    X(ERROR_INVALID_DEVICE, 101)                                                       \
    X(ERROR_DEVICE_NOT_LICENSED, 102)                                                  \
    X(ERROR_INVALID_IMAGE, 200)                                                        \
    X(ERROR_INVALID_CONTEXT, 201)                                                      \
    X(ERROR_MAP_FAILED, 205)                                                           \
    X(ERROR_UNMAP_FAILED, 206)                                                         \
    X(ERROR_ALREADY_MAPPED, 208)                                                       \
    X(ERROR_NOT_MAPPED, 211)                                                           \
    X(ERROR_ECC_UNCORRECTABLE, 214)                                                    \
    X(ERROR_CONTEXT_ALREADY_IN_USE, 216)                                               \
    X(ERROR_PEER_ACCESS_UNSUPPORTED, 217)                                              \
    X(ERROR_NVLINK_UNCORRECTABLE, 220)                                                 \
    X(ERROR_CONTAINED, 226)                                                            \
    X(ERROR_OPERATING_SYSTEM, 304)                                                     \
    X(ERROR_INVALID_HANDLE, 400)                                                       \
    X(ERROR_ILLEGAL_STATE, 401)                                                        \
    X(ERROR_NOT_FOUND, 500)                                                            \
    X(ERROR_NOT_READY, 600)                                                            \
    X(ERROR_ILLEGAL_ADDRESS, 700)                                                      \
    X(ERROR_LAUNCH_OUT_OF_RESOURCES, 701)                                              \
    X(ERROR_LAUNCH_TIMEOUT, 702)                                                       \
    X(ERROR_PEER_ACCESS_ALREADY_ENABLED, 704)                                          \
    X(ERROR_PEER_ACCESS_NOT_ENABLED, 705)                                              \
    X(ERROR_PRIMARY_CONTEXT_ACTIVE, 708)                                               \
    X(ERROR_CONTEXT_IS_DESTROYED, 709)                                                 \
    X(ERROR_ASSERT, 710)                                                               \
    X(ERROR_HOST_MEMORY_ALREADY_REGISTERED, 712)                                       \
    X(ERROR_HOST_MEMORY_NOT_REGISTERED, 713)                                           \
    X(ERROR_HARDWARE_STACK_ERROR, 714)                                                 \
    X(ERROR_ILLEGAL_INSTRUCTION, 715)                                                  \
    X(ERROR_MISALIGNED_ADDRESS, 716)                                                   \
    X(ERROR_INVALID_ADDRESS_SPACE, 717)                                                \
    X(ERROR_INVALID_PC, 718)                                                           \
    X(ERROR_LAUNCH_FAILED, 719)                                                        \
    X(ERROR_NOT_PERMITTED, 800)                                                        \
    X(ERROR_NOT_SUPPORTED, 801)                                                        \
    X(ERROR_SYSTEM_NOT_READY, 802)                                                     \
    X(ERROR_SYSTEM_DRIVER_MISMATCH, 803)                                               \
    X(ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE, 804)                                       \
    X(ERROR_STREAM_CAPTURE_UNSUPPORTED, 900)                                           \
    X(ERROR_STREAM_CAPTURE_INVALIDATED, 901)                                           \
    X(ERROR_STREAM_CAPTURE_MERGE, 902)                                                 \
    X(ERROR_STREAM_CAPTURE_UNMATCHED, 903)                                             \
    X(ERROR_STREAM_CAPTURE_UNJOINED, 904)                                              \
    X(ERROR_STREAM_CAPTURE_ISOLATION, 905)                                             \
    X(ERROR_STREAM_CAPTURE_IMPLICIT, 906)                                              \
    X(ERROR_CAPTURED_EVENT, 907)                                                       \
    X(ERROR_STREAM_CAPTURE_WRONG_THREAD, 908)                                          \
    X(ERROR_TIMEOUT, 909)                                                              \
    X(ERROR_EXTERNAL_DEVICE, 911)                                                      \
    X(ERROR_UNKNOWN, 999)

/* X(name, value): NRM_CU_DEVICE_ATTRIBUTE_<name>. */
#define NRM_CU_DEVICE_ATTRIBUTES(X)                                                    \
    X(MULTIPROCESSOR_COUNT, 16)                                                        \
    X(INTEGRATED, 18)                                                                  \
    X(CAN_MAP_HOST_MEMORY, 19)                                                         \
    X(COMPUTE_MODE, 20)                                                                \
    X(PCI_BUS_ID, 33)                                                                  \
    X(PCI_DEVICE_ID, 34)                                                               \
    X(ASYNC_ENGINE_COUNT, 40)                                                          \
    X(UNIFIED_ADDRESSING, 41)                                                          \
    X(PCI_DOMAIN_ID, 50)                                                               \
    X(COMPUTE_CAPABILITY_MAJOR, 75)                                                    \
    X(COMPUTE_CAPABILITY_MINOR, 76)                                                    \
    X(MANAGED_MEMORY, 83)                                                              \
    X(PAGEABLE_MEMORY_ACCESS, 88)                                                      \
    X(CONCURRENT_MANAGED_ACCESS, 89)                                                   \
    X(CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 91)                                     \
    X(HOST_REGISTER_SUPPORTED, 99)                                                     \
    X(PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES, 100)                               \
    X(DIRECT_MANAGED_MEM_ACCESS_FROM_HOST, 101)                                        \
    X(VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 102)                                        \
    X(READ_ONLY_HOST_REGISTER_SUPPORTED, 113)                                          \
    X(MEMORY_POOLS_SUPPORTED, 115)                                                     \
    X(MEMPOOL_SUPPORTED_HANDLE_TYPES, 119)                                             \
    X(HOST_NUMA_ID, 134)

/* X(name, value): NRM_CU_POINTER_ATTRIBUTE_<name>. */
#define NRM_CU_POINTER_ATTRIBUTES(X)                                                   \
    X(CONTEXT, 1)                                                                      \
    X(MEMORY_TYPE, 2)                                                                  \
    X(DEVICE_POINTER, 3)                                                               \
    X(HOST_POINTER, 4)                                                                 \
    X(IS_MANAGED, 8)                                                                   \
    X(DEVICE_ORDINAL, 9)                                                               \
    X(RANGE_START_ADDR, 11)                                                            \
    X(RANGE_SIZE, 12)

/* X(name, value): NRM_<name>; the remaining constants, each an int or an unsigned. */
#define NRM_CUDA_CONSTANTS(X)                                                          \
    X(CU_MEMORYTYPE_HOST, 1)                                                           \
    X(CU_MEMORYTYPE_DEVICE, 2)                                                         \
    X(CU_MEMORYTYPE_ARRAY, 3)                                                          \
    X(CU_MEMORYTYPE_UNIFIED, 4)                                                        \
    X(CU_STREAM_DEFAULT, 0)                                                            \
    X(CU_STREAM_NON_BLOCKING, 1)                                                       \
    X(CU_EVENT_DEFAULT, 0)                                                             \
    X(CU_EVENT_BLOCKING_SYNC, 1)                                                       \
    X(CU_EVENT_DISABLE_TIMING, 2)                                                      \
    X(CU_EVENT_INTERPROCESS, 4)                                                        \
    X(CU_EVENT_WAIT_DEFAULT, 0)                                                        \
    X(CU_MEMHOSTALLOC_PORTABLE, 1)                                                     \
    X(CU_MEMHOSTALLOC_DEVICEMAP, 2)                                                    \
    X(CU_MEMHOSTALLOC_WRITECOMBINED, 4)                                                \
    X(CU_MEMHOSTREGISTER_PORTABLE, 1)                                                  \
    X(CU_MEMHOSTREGISTER_DEVICEMAP, 2)                                                 \
    X(CU_MEMHOSTREGISTER_IOMEMORY, 4)                                                  \
    X(CU_MEMHOSTREGISTER_READ_ONLY, 8)                                                 \
    X(CU_MEM_ATTACH_GLOBAL, 1)                                                         \
    X(CU_MEM_ATTACH_HOST, 2)                                                           \
    X(CU_MEM_ALLOCATION_TYPE_PINNED, 1)                                                \
    X(CU_MEM_ALLOCATION_TYPE_MANAGED, 2)                                               \
    X(CU_MEM_HANDLE_TYPE_NONE, 0)                                                      \
    X(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 1)                                     \
    X(CU_MEM_HANDLE_TYPE_FABRIC, 8)                                                    \
    X(CU_MEM_LOCATION_TYPE_DEVICE, 1)                                                  \
    X(CU_MEM_LOCATION_TYPE_HOST, 2)                                                    \
    X(CU_MEM_ACCESS_FLAGS_PROT_NONE, 0)                                                \
    X(CU_MEM_ACCESS_FLAGS_PROT_READ, 1)                                                \
    X(CU_MEM_ACCESS_FLAGS_PROT_READWRITE, 3)                                           \
    X(CU_MEM_ALLOC_GRANULARITY_MINIMUM, 0)                                             \
    X(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED, 1)                                         \
    X(CU_MEMCPY_SRC_ACCESS_ORDER_INVALID, 0)                                           \
    X(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, 1)                                            \
    X(CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL, 2)                                   \
    X(CU_MEMCPY_SRC_ACCESS_ORDER_ANY, 3)                                               \
    X(CU_MEMCPY_FLAG_DEFAULT, 0)                                                       \
    X(CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE, 1)                                   \
    X(CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES, 1)                              \
    X(CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, 2)                                    \
    X(CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, 3)                            \
    X(CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, 4)                                            \
    X(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, 5)                                         \
    X(CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, 6)                                            \
    X(CU_MEMPOOL_ATTR_USED_MEM_CURRENT, 7)                                             \
    X(CU_MEMPOOL_ATTR_USED_MEM_HIGH, 8)                                                \
    X(CU_MEM_POOL_CREATE_USAGE_HW_DECOMPRESS, 2)                                       \
    X(CU_MEM_ADVISE_SET_READ_MOSTLY, 1)                                                \
    X(CU_MEM_ADVISE_UNSET_READ_MOSTLY, 2)                                              \
    X(CU_MEM_ADVISE_SET_PREFERRED_LOCATION, 3)                                         \
    X(CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, 4)                                       \
    X(CU_MEM_ADVISE_SET_ACCESSED_BY, 5)                                                \
    X(CU_MEM_ADVISE_UNSET_ACCESSED_BY, 6)                                              \
    X(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, 1)                                           \
    X(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, 2)                                    \
    X(CU_STREAM_WAIT_VALUE_GEQ, 0)                                                     \
    X(CU_STREAM_WAIT_VALUE_EQ, 1)                                                      \
    X(CU_STREAM_WAIT_VALUE_AND, 2)                                                     \
    X(CU_STREAM_WAIT_VALUE_NOR, 3)                                                     \
    X(CU_STREAM_CAPTURE_STATUS_NONE, 0)                                                \
    X(CU_STREAM_CAPTURE_STATUS_ACTIVE, 1)                                              \
    X(CU_STREAM_CAPTURE_STATUS_INVALIDATED, 2)                                         \
    X(CU_STREAM_CAPTURE_MODE_GLOBAL, 0)                                                \
    X(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, 1)                                          \
    X(CU_STREAM_CAPTURE_MODE_RELAXED, 2)                                               \
    X(CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, 1)                                            \
    X(CU_GRAPH_USER_OBJECT_MOVE, 1)                                                    \
    X(CU_GET_PROC_ADDRESS_DEFAULT, 0)                                                  \
    X(CU_GET_PROC_ADDRESS_LEGACY_STREAM, 1)                                            \
    X(CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, 2)                                \
    X(CU_GET_PROC_ADDRESS_SUCCESS, 0)                                                  \
    X(CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND, 1)                                         \
    X(CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT, 2)

/* clang-format on */

typedef enum nrm_CUresult {
#define X(name, value) NRM_CUDA_##name = value,
    NRM_CUDA_RESULTS(X)
#undef X
} nrm_CUresult;

typedef enum nrm_CUdevice_attribute {
#define X(name, value) NRM_CU_DEVICE_ATTRIBUTE_##name = value,
    NRM_CU_DEVICE_ATTRIBUTES(X)
#undef X
} nrm_CUdevice_attribute;

typedef enum nrm_CUpointer_attribute {
#define X(name, value) NRM_CU_POINTER_ATTRIBUTE_##name = value,
    NRM_CU_POINTER_ATTRIBUTES(X)
#undef X
} nrm_CUpointer_attribute;

enum {
#define X(name, value) NRM_##name = value,
    NRM_CUDA_CONSTANTS(X)
#undef X
};

/* Enumerations of the driver whose values are among the constants above. As fields
 * and arguments they have the size and the sign that every supported compiler gives
 * to an enumeration without negative values. */
typedef unsigned int nrm_CUmemorytype;
typedef unsigned int nrm_CUstreamCaptureStatus;
typedef unsigned int nrm_CUstreamCaptureMode;
typedef unsigned int nrm_CUdriverProcAddressQueryResult;
typedef unsigned int nrm_CUmemAllocationType;
typedef unsigned int nrm_CUmemAllocationHandleType;
typedef unsigned int nrm_CUmemLocationType;
typedef unsigned int nrm_CUmemAccess_flags;
typedef unsigned int nrm_CUmemAllocationGranularity_flags;
typedef unsigned int nrm_CUmemcpySrcAccessOrder;
typedef unsigned int nrm_CUmemPool_attribute;
typedef unsigned int nrm_CUmem_advise;
typedef unsigned int nrm_CUmem_range_attribute;

typedef struct nrm_CUDA_MEMCPY2D {
    size_t srcXInBytes; /* column of the first byte */
    size_t srcY;        /* row of the first byte */
    nrm_CUmemorytype srcMemoryType;
    const void *srcHost;       /* when the type is HOST */
    nrm_CUdeviceptr srcDevice; /* when it is DEVICE or UNIFIED */
    nrm_CUarray srcArray;
    size_t srcPitch; /* bytes from row to row */
    size_t dstXInBytes;
    size_t dstY;
    nrm_CUmemorytype dstMemoryType;
    void *dstHost;
    nrm_CUdeviceptr dstDevice;
    nrm_CUarray dstArray;
    size_t dstPitch;
    size_t WidthInBytes;
    size_t Height; /* rows */
} nrm_CUDA_MEMCPY2D;

typedef struct nrm_CUDA_MEMCPY3D {
    size_t srcXInBytes;
    size_t srcY;
    size_t srcZ; /* plane of the first byte */
    size_t srcLOD;
    nrm_CUmemorytype srcMemoryType;
    const void *srcHost;
    nrm_CUdeviceptr srcDevice;
    nrm_CUarray srcArray;
    void *reserved0;
    size_t srcPitch;
    size_t srcHeight; /* rows from plane to plane */
    size_t dstXInBytes;
    size_t dstY;
    size_t dstZ;
    size_t dstLOD;
    nrm_CUmemorytype dstMemoryType;
    void *dstHost;
    nrm_CUdeviceptr dstDevice;
    nrm_CUarray dstArray;
    void *reserved1;
    size_t dstPitch;
    size_t dstHeight;
    size_t WidthInBytes;
    size_t Height;
    size_t Depth; /* planes */
} nrm_CUDA_MEMCPY3D;

/* The same, where each side names a context that reaches it. */
typedef struct nrm_CUDA_MEMCPY3D_PEER {
    size_t srcXInBytes;
    size_t srcY;
    size_t srcZ;
    size_t srcLOD;
    nrm_CUmemorytype srcMemoryType;
    const void *srcHost;
    nrm_CUdeviceptr srcDevice;
    nrm_CUarray srcArray;
    nrm_CUcontext srcContext;
    size_t srcPitch;
    size_t srcHeight;
    size_t dstXInBytes;
    size_t dstY;
    size_t dstZ;
    size_t dstLOD;
    nrm_CUmemorytype dstMemoryType;
    void *dstHost;
    nrm_CUdeviceptr dstDevice;
    nrm_CUarray dstArray;
    nrm_CUcontext dstContext;
    size_t dstPitch;
    size_t dstHeight;
    size_t WidthInBytes;
    size_t Height;
    size_t Depth;
} nrm_CUDA_MEMCPY3D_PEER;

typedef struct nrm_CUmemLocation {
    nrm_CUmemLocationType type;
    int id; /* an ordinal when the type is DEVICE */
} nrm_CUmemLocation;

/* Of copies in a batch. */
typedef struct nrm_CUmemcpyAttributes {
    nrm_CUmemcpySrcAccessOrder srcAccessOrder; /* when the source is read */
    nrm_CUmemLocation srcLocHint; /* of managed and of pageable memory only */
    nrm_CUmemLocation dstLocHint;
    unsigned int flags;
} nrm_CUmemcpyAttributes;

typedef struct nrm_CUmemAllocationProp {
    nrm_CUmemAllocationType type;
    nrm_CUmemAllocationHandleType requestedHandleTypes; /* for other processes */
    nrm_CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType;
        unsigned char gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} nrm_CUmemAllocationProp;

typedef struct nrm_CUmemAccessDesc {
    nrm_CUmemLocation location; /* that may touch the memory */
    nrm_CUmemAccess_flags flags;
} nrm_CUmemAccessDesc;

typedef struct nrm_CUmemPoolProps {
    nrm_CUmemAllocationType allocType;
    nrm_CUmemAllocationHandleType handleTypes; /* for other processes */
    nrm_CUmemLocation location;
    void *win32SecurityAttributes;
    size_t maxSize;       /* 0: as the system has it */
    unsigned short usage; /* before 12.8 reserved, and 0 */
    unsigned char reserved[54];
} nrm_CUmemPoolProps;
typedef struct nrm_CUgraphEdgeData nrm_CUgraphEdgeData; /* nobody here looks into it */

#endif
