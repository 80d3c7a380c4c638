/* The CUDA driver's binary interface, as far as this project uses it.
 *
 * The driver is opened at run time and its header is not needed to build, so what it
 * looks like is declared here: types, constants and one list of entry points. The
 * list is the single source of the driver table, of the simulator's symbol table and
 * of the test that compares all of it with the toolkit's cuda.h. To use another entry
 * point, add its row; to move one between the lists, move its row.
 *
 * Everything is prefixed, because that test includes this header beside cuda.h. The
 * handles are distinct incomplete types, so the compiler tells a stream from an event.
 */
#ifndef NRM_CUDA_ABI_H
#define NRM_CUDA_ABI_H

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

/* clang-format off */

/* The entry points: X(name, symbol, version, required, result, arguments)
 *
 *   name       what cuGetProcAddress is asked for
 *   symbol     what the library exports for the prototype that stands in the row
 *   version    the CUDA version of that prototype, to be passed to cuGetProcAddress: a
 *              larger one may yield a later prototype under the same name
 *   required   1: a driver without it is too old; 0: one feature is off without it
 *
 * The name must be used with # and ## only: cuda.h defines some of them as macros.
 *
 * CORE: what the resource core calls. */
#define NRM_CUDA_CORE_CALLS(X)                                                         \
    X(cuInit, cuInit, 2000, 1,                                                         \
      nrm_CUresult, (unsigned int flags))                                              \
    X(cuDriverGetVersion, cuDriverGetVersion, 2020, 1,                                 \
      nrm_CUresult, (int *version))                                                    \
    X(cuGetProcAddress, cuGetProcAddress_v2, 12000, 1,                                 \
      nrm_CUresult, (const char *symbol, void **function, int version,                 \
                     uint64_t flags, nrm_CUdriverProcAddressQueryResult *found))       \
    X(cuGetErrorName, cuGetErrorName, 6000, 1,                                         \
      nrm_CUresult, (nrm_CUresult error, const char **name))                           \
    X(cuGetErrorString, cuGetErrorString, 6000, 1,                                     \
      nrm_CUresult, (nrm_CUresult error, const char **text))                           \
    X(cuDeviceGet, cuDeviceGet, 2000, 1,                                               \
      nrm_CUresult, (nrm_CUdevice *device, int ordinal))                               \
    X(cuDeviceGetCount, cuDeviceGetCount, 2000, 1,                                     \
      nrm_CUresult, (int *count))                                                      \
    X(cuDeviceCanAccessPeer, cuDeviceCanAccessPeer, 4000, 0,                           \
      nrm_CUresult, (int *can, nrm_CUdevice device, nrm_CUdevice peer))                \
    X(cuDeviceGetName, cuDeviceGetName, 2000, 1,                                       \
      nrm_CUresult, (char *name, int size, nrm_CUdevice device))                       \
    X(cuDeviceGetAttribute, cuDeviceGetAttribute, 2000, 1,                             \
      nrm_CUresult, (int *value, nrm_CUdevice_attribute attribute,                     \
                     nrm_CUdevice device))                                             \
    X(cuDeviceTotalMem, cuDeviceTotalMem_v2, 3020, 1,                                  \
      nrm_CUresult, (size_t *nbytes, nrm_CUdevice device))                             \
    X(cuDeviceGetPCIBusId, cuDeviceGetPCIBusId, 4010, 1,                               \
      nrm_CUresult, (char *id, int size, nrm_CUdevice device))                         \
    X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000, 1,                     \
      nrm_CUresult, (nrm_CUcontext *context, nrm_CUdevice device))                     \
    X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, 11000, 1,               \
      nrm_CUresult, (nrm_CUdevice device))                                             \
    X(cuDevicePrimaryCtxGetState, cuDevicePrimaryCtxGetState, 7000, 1,                 \
      nrm_CUresult, (nrm_CUdevice device, unsigned int *flags, int *active))           \
    X(cuCtxGetCurrent, cuCtxGetCurrent, 4000, 1,                                       \
      nrm_CUresult, (nrm_CUcontext *context))                                          \
    X(cuCtxSetCurrent, cuCtxSetCurrent, 4000, 1,                                       \
      nrm_CUresult, (nrm_CUcontext context))                                           \
    X(cuCtxPushCurrent, cuCtxPushCurrent_v2, 4000, 1,                                  \
      nrm_CUresult, (nrm_CUcontext context))                                           \
    X(cuCtxPopCurrent, cuCtxPopCurrent_v2, 4000, 1,                                    \
      nrm_CUresult, (nrm_CUcontext *context))                                          \
    X(cuCtxGetDevice, cuCtxGetDevice, 2000, 1,                                         \
      nrm_CUresult, (nrm_CUdevice *device))                                            \
    X(cuCtxGetId, cuCtxGetId, 12000, 1,                                                \
      nrm_CUresult, (nrm_CUcontext context, unsigned long long *id))                   \
    X(cuCtxSynchronize, cuCtxSynchronize, 2000, 1,                                     \
      nrm_CUresult, (void))                                                            \
    X(cuCtxRecordEvent, cuCtxRecordEvent, 12050, 0,                                    \
      nrm_CUresult, (nrm_CUcontext context, nrm_CUevent event))                        \
    X(cuMemGetInfo, cuMemGetInfo_v2, 3020, 1,                                          \
      nrm_CUresult, (size_t *free_nbytes, size_t *total_nbytes))                       \
    X(cuMemAlloc, cuMemAlloc_v2, 3020, 1,                                              \
      nrm_CUresult, (nrm_CUdeviceptr *ptr, size_t nbytes))                             \
    X(cuMemFree, cuMemFree_v2, 3020, 1,                                                \
      nrm_CUresult, (nrm_CUdeviceptr ptr))                                             \
    X(cuMemAddressReserve, cuMemAddressReserve, 10020, 0,                              \
      nrm_CUresult, (nrm_CUdeviceptr *ptr, size_t nbytes, size_t alignment,            \
                     nrm_CUdeviceptr hint, unsigned long long flags))                  \
    X(cuMemAddressFree, cuMemAddressFree, 10020, 0,                                    \
      nrm_CUresult, (nrm_CUdeviceptr ptr, size_t nbytes))                              \
    X(cuMemCreate, cuMemCreate, 10020, 0,                                              \
      nrm_CUresult, (nrm_CUmemGenericAllocationHandle *handle, size_t nbytes,          \
                     const nrm_CUmemAllocationProp *prop, unsigned long long flags))   \
    X(cuMemRelease, cuMemRelease, 10020, 0,                                            \
      nrm_CUresult, (nrm_CUmemGenericAllocationHandle handle))                         \
    X(cuMemMap, cuMemMap, 10020, 0,                                                    \
      nrm_CUresult, (nrm_CUdeviceptr ptr, size_t nbytes, size_t offset,                \
                     nrm_CUmemGenericAllocationHandle handle,                          \
                     unsigned long long flags))                                        \
    X(cuMemUnmap, cuMemUnmap, 10020, 0,                                                \
      nrm_CUresult, (nrm_CUdeviceptr ptr, size_t nbytes))                              \
    X(cuMemSetAccess, cuMemSetAccess, 10020, 0,                                        \
      nrm_CUresult, (nrm_CUdeviceptr ptr, size_t nbytes,                               \
                     const nrm_CUmemAccessDesc *access, size_t n_access))              \
    X(cuMemGetAccess, cuMemGetAccess, 10020, 0,                                        \
      nrm_CUresult, (unsigned long long *flags, const nrm_CUmemLocation *location,     \
                     nrm_CUdeviceptr ptr))                                             \
    X(cuMemGetAllocationGranularity, cuMemGetAllocationGranularity, 10020, 0,          \
      nrm_CUresult, (size_t *granularity, const nrm_CUmemAllocationProp *prop,         \
                     nrm_CUmemAllocationGranularity_flags option))                     \
    X(cuMemPoolCreate, cuMemPoolCreate, 11020, 0,                                      \
      nrm_CUresult, (nrm_CUmemoryPool *pool, const nrm_CUmemPoolProps *props))         \
    X(cuMemPoolDestroy, cuMemPoolDestroy, 11020, 0,                                    \
      nrm_CUresult, (nrm_CUmemoryPool pool))                                           \
    X(cuMemPoolSetAttribute, cuMemPoolSetAttribute, 11020, 0,                          \
      nrm_CUresult, (nrm_CUmemoryPool pool, nrm_CUmemPool_attribute attribute,         \
                     void *value))                                                     \
    X(cuMemPoolGetAttribute, cuMemPoolGetAttribute, 11020, 0,                          \
      nrm_CUresult, (nrm_CUmemoryPool pool, nrm_CUmemPool_attribute attribute,         \
                     void *value))                                                     \
    X(cuMemPoolTrimTo, cuMemPoolTrimTo, 11020, 0,                                      \
      nrm_CUresult, (nrm_CUmemoryPool pool, size_t keep_nbytes))                       \
    X(cuMemGetDefaultMemPool, cuMemGetDefaultMemPool, 13000, 0,                        \
      nrm_CUresult, (nrm_CUmemoryPool *pool, nrm_CUmemLocation *location,              \
                     nrm_CUmemAllocationType type))                                    \
    X(cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync, 11020, 0,                      \
      nrm_CUresult, (nrm_CUdeviceptr *ptr, size_t nbytes, nrm_CUmemoryPool pool,       \
                     nrm_CUstream stream))                                             \
    X(cuMemFreeAsync, cuMemFreeAsync, 11020, 0,                                        \
      nrm_CUresult, (nrm_CUdeviceptr ptr, nrm_CUstream stream))                        \
    X(cuMemAdvise, cuMemAdvise_v2, 12020, 0,                                           \
      nrm_CUresult, (nrm_CUdeviceptr ptr, size_t nbytes, nrm_CUmem_advise advice,      \
                     nrm_CUmemLocation location))                                      \
    X(cuMemAllocManaged, cuMemAllocManaged, 6000, 1,                                   \
      nrm_CUresult, (nrm_CUdeviceptr *ptr, size_t nbytes, unsigned int flags))         \
    X(cuMemHostAlloc, cuMemHostAlloc, 2020, 1,                                         \
      nrm_CUresult, (void **ptr, size_t nbytes, unsigned int flags))                   \
    X(cuMemFreeHost, cuMemFreeHost, 2000, 1,                                           \
      nrm_CUresult, (void *ptr))                                                       \
    X(cuMemHostRegister, cuMemHostRegister_v2, 6050, 1,                                \
      nrm_CUresult, (void *ptr, size_t nbytes, unsigned int flags))                    \
    X(cuMemHostUnregister, cuMemHostUnregister, 4000, 1,                               \
      nrm_CUresult, (void *ptr))                                                       \
    X(cuMemHostGetDevicePointer, cuMemHostGetDevicePointer_v2, 3020, 1,                \
      nrm_CUresult, (nrm_CUdeviceptr *device_ptr, void *ptr, unsigned int flags))      \
    X(cuMemHostGetFlags, cuMemHostGetFlags, 2030, 1,                                   \
      nrm_CUresult, (unsigned int *flags, void *ptr))                                  \
    X(cuPointerGetAttribute, cuPointerGetAttribute, 4000, 1,                           \
      nrm_CUresult, (void *value, nrm_CUpointer_attribute attribute,                   \
                     nrm_CUdeviceptr ptr))                                             \
    X(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, 3020, 1,                                \
      nrm_CUresult, (nrm_CUdeviceptr dst, const void *src, size_t nbytes,              \
                     nrm_CUstream stream))                                             \
    X(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, 3020, 1,                                \
      nrm_CUresult, (void *dst, nrm_CUdeviceptr src, size_t nbytes,                    \
                     nrm_CUstream stream))                                             \
    X(cuMemcpyAsync, cuMemcpyAsync, 4000, 1,                                           \
      nrm_CUresult, (nrm_CUdeviceptr dst, nrm_CUdeviceptr src, size_t nbytes,          \
                     nrm_CUstream stream))                                             \
    X(cuMemcpy2DAsync, cuMemcpy2DAsync_v2, 3020, 1,                                    \
      nrm_CUresult, (const nrm_CUDA_MEMCPY2D *copy, nrm_CUstream stream))              \
    X(cuMemcpy3DAsync, cuMemcpy3DAsync_v2, 3020, 1,                                    \
      nrm_CUresult, (const nrm_CUDA_MEMCPY3D *copy, nrm_CUstream stream))              \
    X(cuMemcpyPeerAsync, cuMemcpyPeerAsync, 4000, 1,                                   \
      nrm_CUresult, (nrm_CUdeviceptr dst, nrm_CUcontext dst_context,                   \
                     nrm_CUdeviceptr src, nrm_CUcontext src_context, size_t nbytes,    \
                     nrm_CUstream stream))                                             \
    X(cuMemcpy3DPeerAsync, cuMemcpy3DPeerAsync, 4000, 1,                               \
      nrm_CUresult, (const nrm_CUDA_MEMCPY3D_PEER *copy, nrm_CUstream stream))         \
    X(cuMemcpyBatchAsync, cuMemcpyBatchAsync, 12080, 0,                                \
      nrm_CUresult, (nrm_CUdeviceptr *dsts, nrm_CUdeviceptr *srcs, size_t *sizes,      \
                     size_t n_copies, nrm_CUmemcpyAttributes *attributes,              \
                     size_t *first_copies, size_t n_attributes, size_t *failed,        \
                     nrm_CUstream stream))                                             \
    X(cuMemsetD8Async, cuMemsetD8Async, 3020, 1,                                       \
      nrm_CUresult, (nrm_CUdeviceptr dst, unsigned char value, size_t nbytes,          \
                     nrm_CUstream stream))                                             \
    X(cuMemPrefetchAsync, cuMemPrefetchAsync_v2, 12020, 0,                             \
      nrm_CUresult, (nrm_CUdeviceptr ptr, size_t nbytes, nrm_CUmemLocation location,   \
                     unsigned int flags, nrm_CUstream stream))                         \
    X(cuStreamCreate, cuStreamCreate, 2000, 1,                                         \
      nrm_CUresult, (nrm_CUstream *stream, unsigned int flags))                        \
    X(cuStreamDestroy, cuStreamDestroy_v2, 4000, 1,                                    \
      nrm_CUresult, (nrm_CUstream stream))                                             \
    X(cuStreamQuery, cuStreamQuery, 2000, 1,                                           \
      nrm_CUresult, (nrm_CUstream stream))                                             \
    X(cuStreamSynchronize, cuStreamSynchronize, 2000, 1,                               \
      nrm_CUresult, (nrm_CUstream stream))                                             \
    X(cuStreamWaitEvent, cuStreamWaitEvent, 3020, 1,                                   \
      nrm_CUresult, (nrm_CUstream stream, nrm_CUevent event, unsigned int flags))      \
    X(cuStreamGetCtx, cuStreamGetCtx, 9020, 1,                                         \
      nrm_CUresult, (nrm_CUstream stream, nrm_CUcontext *context))                     \
    X(cuStreamGetId, cuStreamGetId, 12000, 1,                                          \
      nrm_CUresult, (nrm_CUstream stream, unsigned long long *id))                     \
    X(cuStreamIsCapturing, cuStreamIsCapturing, 10000, 1,                              \
      nrm_CUresult, (nrm_CUstream stream, nrm_CUstreamCaptureStatus *status))          \
    X(cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_v3, 12030, 0,                     \
      nrm_CUresult, (nrm_CUstream stream, nrm_CUstreamCaptureStatus *status,           \
                     uint64_t *id, nrm_CUgraph *graph,                                 \
                     const nrm_CUgraphNode **dependencies,                             \
                     const nrm_CUgraphEdgeData **edges, size_t *n_dependencies))       \
    X(cuUserObjectCreate, cuUserObjectCreate, 11030, 0,                                \
      nrm_CUresult, (nrm_CUuserObject *object, void *data, nrm_CUhostFn destroy,       \
                     unsigned int n_references, unsigned int flags))                   \
    X(cuUserObjectRelease, cuUserObjectRelease, 11030, 0,                              \
      nrm_CUresult, (nrm_CUuserObject object, unsigned int count))                     \
    X(cuGraphRetainUserObject, cuGraphRetainUserObject, 11030, 0,                      \
      nrm_CUresult, (nrm_CUgraph graph, nrm_CUuserObject object, unsigned int count,   \
                     unsigned int flags))                                              \
    X(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, 10010, 1,  \
      nrm_CUresult, (nrm_CUstreamCaptureMode *mode))                                   \
    X(cuEventCreate, cuEventCreate, 2000, 1,                                           \
      nrm_CUresult, (nrm_CUevent *event, unsigned int flags))                          \
    X(cuEventDestroy, cuEventDestroy_v2, 4000, 1,                                      \
      nrm_CUresult, (nrm_CUevent event))                                               \
    X(cuEventQuery, cuEventQuery, 2000, 1,                                             \
      nrm_CUresult, (nrm_CUevent event))                                               \
    X(cuEventRecord, cuEventRecord, 2000, 1,                                           \
      nrm_CUresult, (nrm_CUevent event, nrm_CUstream stream))                          \
    X(cuEventSynchronize, cuEventSynchronize, 2000, 1,                                 \
      nrm_CUresult, (nrm_CUevent event))

/* EXTRA: what only tests call, on the simulator and on a real driver. */
#define NRM_CUDA_EXTRA_CALLS(X)                                                        \
    X(cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2, 11000, 1,                   \
      nrm_CUresult, (nrm_CUdevice device))                                             \
    X(cuCtxCreate, cuCtxCreate_v2, 3020, 1,                                            \
      nrm_CUresult, (nrm_CUcontext *context, unsigned int flags, nrm_CUdevice device)) \
    X(cuCtxDestroy, cuCtxDestroy_v2, 4000, 1,                                          \
      nrm_CUresult, (nrm_CUcontext context))                                           \
    X(cuDeviceGetDefaultMemPool, cuDeviceGetDefaultMemPool, 11020, 0,                  \
      nrm_CUresult, (nrm_CUmemoryPool *pool, nrm_CUdevice device))                     \
    X(cuMemRangeGetAttribute, cuMemRangeGetAttribute, 8000, 1,                         \
      nrm_CUresult, (void *value, size_t value_nbytes,                                 \
                     nrm_CUmem_range_attribute attribute, nrm_CUdeviceptr ptr,         \
                     size_t nbytes))                                                   \
    X(cuMemcpyHtoD, cuMemcpyHtoD_v2, 3020, 1,                                          \
      nrm_CUresult, (nrm_CUdeviceptr dst, const void *src, size_t nbytes))             \
    X(cuMemcpyDtoH, cuMemcpyDtoH_v2, 3020, 1,                                          \
      nrm_CUresult, (void *dst, nrm_CUdeviceptr src, size_t nbytes))                   \
    X(cuMemcpyDtoD, cuMemcpyDtoD_v2, 3020, 1,                                          \
      nrm_CUresult, (nrm_CUdeviceptr dst, nrm_CUdeviceptr src, size_t nbytes))         \
    X(cuMemcpy, cuMemcpy, 4000, 1,                                                     \
      nrm_CUresult, (nrm_CUdeviceptr dst, nrm_CUdeviceptr src, size_t nbytes))         \
    X(cuMemsetD8, cuMemsetD8_v2, 3020, 1,                                              \
      nrm_CUresult, (nrm_CUdeviceptr dst, unsigned char value, size_t nbytes))         \
    X(cuStreamWaitValue32, cuStreamWaitValue32_v2, 11070, 1,                           \
      nrm_CUresult, (nrm_CUstream stream, nrm_CUdeviceptr address, uint32_t value,     \
                     unsigned int flags))                                              \
    X(cuStreamBeginCapture, cuStreamBeginCapture_v2, 10010, 1,                         \
      nrm_CUresult, (nrm_CUstream stream, nrm_CUstreamCaptureMode mode))               \
    X(cuStreamEndCapture, cuStreamEndCapture, 10000, 1,                                \
      nrm_CUresult, (nrm_CUstream stream, nrm_CUgraph *graph))                         \
    X(cuGraphDestroy, cuGraphDestroy, 10000, 1,                                        \
      nrm_CUresult, (nrm_CUgraph graph))                                               \
    X(cuGraphInstantiateWithFlags, cuGraphInstantiateWithFlags, 11040, 1,              \
      nrm_CUresult, (nrm_CUgraphExec *exec, nrm_CUgraph graph,                         \
                     unsigned long long flags))                                        \
    X(cuGraphLaunch, cuGraphLaunch, 10000, 1,                                          \
      nrm_CUresult, (nrm_CUgraphExec exec, nrm_CUstream stream))                       \
    X(cuGraphExecDestroy, cuGraphExecDestroy, 10000, 1,                                \
      nrm_CUresult, (nrm_CUgraphExec exec))                                            \
    X(cuLaunchHostFunc, cuLaunchHostFunc, 10000, 1,                                    \
      nrm_CUresult, (nrm_CUstream stream, nrm_CUhostFn function, void *user_data))

#define NRM_CUDA_ALL_CALLS(X) NRM_CUDA_CORE_CALLS(X) NRM_CUDA_EXTRA_CALLS(X)

/* clang-format on */

/* What no real driver has: the simulator's checker, when it is on, answers to these two
 * names in cuGetProcAddress and is then told which memory an allocator hands out and gets
 * back. `stream`: a handle on the device, or NO_STREAM: to the host, which may write it. */
#define NRM_CUDA_WATCH_NO_STREAM UINTPTR_MAX
#define NRM_CUDA_WATCH_VERSION 12000
typedef void nrm_cudasim_block_taken_fn(uintptr_t ptr, size_t nbytes, int device,
                                        uintptr_t stream);
typedef void nrm_cudasim_block_given_fn(uintptr_t ptr, size_t nbytes);

/* nrm_<name>_fn: the type of the function, for instance nrm_cuMemAlloc_fn. */
#define X(name, symbol, version, required, result, arguments)                          \
    typedef result nrm_##name##_fn arguments;
NRM_CUDA_ALL_CALLS(X)
#undef X

#endif
