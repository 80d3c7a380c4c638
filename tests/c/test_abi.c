/* The declared driver interface against the toolkit's cuda.h, where there is one.
 *
 * Everything is compared while this file compiles: if it builds, the interface is
 * right. The tests that run only say what was compared, or why nothing could be. */
#include "cuda/abi.h"

#include "check.h"

#ifdef NRM_HAVE_CUDA_H
#include <cuda.h>
#endif

#if defined(NRM_HAVE_CUDA_H) && CUDA_VERSION >= 13000 /* has all that is declared */

/* ---- constants ------------------------------------------------------------------- */

#define X(name, value)                                                                 \
    _Static_assert((int)CUDA_##name == (value) && (int)NRM_CUDA_##name == (value),     \
                   #name);
NRM_CUDA_RESULTS(X)
#undef X

#define X(name, value)                                                                 \
    _Static_assert((int)CU_DEVICE_ATTRIBUTE_##name == (value), #name);
NRM_CU_DEVICE_ATTRIBUTES(X)
#undef X

#define X(name, value)                                                                 \
    _Static_assert((int)CU_POINTER_ATTRIBUTE_##name == (value), #name);
NRM_CU_POINTER_ATTRIBUTES(X)
#undef X

#define X(name, value) _Static_assert((int)name == (value), #name);
NRM_CUDA_CONSTANTS(X)
#undef X

/* These two are macros that cast, so they are compared when the program runs. */
TEST(special_streams_have_the_same_values)
{
    CHECK_EQ((uintptr_t)NRM_CU_STREAM_LEGACY, (uintptr_t)CU_STREAM_LEGACY);
    CHECK_EQ((uintptr_t)NRM_CU_STREAM_PER_THREAD, (uintptr_t)CU_STREAM_PER_THREAD);
}

/* ---- types ----------------------------------------------------------------------- */

#define SAME_TYPE(a, b) _Static_assert(__builtin_types_compatible_p(a, b), #a " is " #b)
#define SAME_SIZE(a, b)                                                                \
    _Static_assert(sizeof(a) == sizeof(b) && _Alignof(a) == _Alignof(b), #a " is " #b)
#define SAME_ENUM(a, b)                                                                \
    SAME_SIZE(a, b);                                                                   \
    _Static_assert(((a) - 1 < (a)1) == ((b) - 1 < (b)1), #a " has the sign of " #b)
#define IS_POINTER(a) _Static_assert(sizeof(a) == sizeof(void *), #a " is a pointer")

SAME_TYPE(nrm_CUdevice, CUdevice);
SAME_TYPE(nrm_CUdeviceptr, CUdeviceptr);
SAME_TYPE(nrm_CUhostFn, CUhostFn);
SAME_ENUM(nrm_CUresult, CUresult);
SAME_ENUM(nrm_CUdevice_attribute, CUdevice_attribute);
SAME_ENUM(nrm_CUpointer_attribute, CUpointer_attribute);
SAME_ENUM(nrm_CUmemorytype, CUmemorytype);
SAME_ENUM(nrm_CUstreamCaptureStatus, CUstreamCaptureStatus);
SAME_ENUM(nrm_CUstreamCaptureMode, CUstreamCaptureMode);
SAME_ENUM(nrm_CUdriverProcAddressQueryResult, CUdriverProcAddressQueryResult);
SAME_TYPE(nrm_CUmemGenericAllocationHandle, CUmemGenericAllocationHandle);
SAME_ENUM(nrm_CUmemAllocationType, CUmemAllocationType);
SAME_ENUM(nrm_CUmemAllocationHandleType, CUmemAllocationHandleType);
SAME_ENUM(nrm_CUmemLocationType, CUmemLocationType);
SAME_ENUM(nrm_CUmemAccess_flags, CUmemAccess_flags);
SAME_ENUM(nrm_CUmemAllocationGranularity_flags, CUmemAllocationGranularity_flags);
SAME_ENUM(nrm_CUmemcpySrcAccessOrder, CUmemcpySrcAccessOrder);
SAME_ENUM(nrm_CUmemPool_attribute, CUmemPool_attribute);
SAME_ENUM(nrm_CUmem_advise, CUmem_advise);
SAME_ENUM(nrm_CUmem_range_attribute, CUmem_range_attribute);
IS_POINTER(CUcontext);
IS_POINTER(CUstream);
IS_POINTER(CUevent);
IS_POINTER(CUgraph);
IS_POINTER(CUgraphExec);
IS_POINTER(CUgraphNode);
IS_POINTER(CUuserObject);
IS_POINTER(CUmemoryPool);
IS_POINTER(CUarray);

/* ---- the structures -------------------------------------------------------------- */

#define SAME_FIELD_OF(type, field)                                                     \
    _Static_assert(offsetof(nrm_##type, field) == offsetof(type, field) &&             \
                       sizeof(((nrm_##type *)0)->field) == sizeof(((type *)0)->field), \
                   #type "." #field)
#define SAME_FIELD(field) SAME_FIELD_OF(CUDA_MEMCPY2D, field)

SAME_SIZE(nrm_CUDA_MEMCPY2D, CUDA_MEMCPY2D);
SAME_FIELD(srcXInBytes);
SAME_FIELD(srcY);
SAME_FIELD(srcMemoryType);
SAME_FIELD(srcHost);
SAME_FIELD(srcDevice);
SAME_FIELD(srcArray);
SAME_FIELD(srcPitch);
SAME_FIELD(dstXInBytes);
SAME_FIELD(dstY);
SAME_FIELD(dstMemoryType);
SAME_FIELD(dstHost);
SAME_FIELD(dstDevice);
SAME_FIELD(dstArray);
SAME_FIELD(dstPitch);
SAME_FIELD(WidthInBytes);
SAME_FIELD(Height);

SAME_SIZE(nrm_CUDA_MEMCPY3D, CUDA_MEMCPY3D);
SAME_FIELD_OF(CUDA_MEMCPY3D, srcXInBytes);
SAME_FIELD_OF(CUDA_MEMCPY3D, srcY);
SAME_FIELD_OF(CUDA_MEMCPY3D, srcZ);
SAME_FIELD_OF(CUDA_MEMCPY3D, srcLOD);
SAME_FIELD_OF(CUDA_MEMCPY3D, srcMemoryType);
SAME_FIELD_OF(CUDA_MEMCPY3D, srcHost);
SAME_FIELD_OF(CUDA_MEMCPY3D, srcDevice);
SAME_FIELD_OF(CUDA_MEMCPY3D, srcArray);
SAME_FIELD_OF(CUDA_MEMCPY3D, reserved0);
SAME_FIELD_OF(CUDA_MEMCPY3D, srcPitch);
SAME_FIELD_OF(CUDA_MEMCPY3D, srcHeight);
SAME_FIELD_OF(CUDA_MEMCPY3D, dstXInBytes);
SAME_FIELD_OF(CUDA_MEMCPY3D, dstY);
SAME_FIELD_OF(CUDA_MEMCPY3D, dstZ);
SAME_FIELD_OF(CUDA_MEMCPY3D, dstLOD);
SAME_FIELD_OF(CUDA_MEMCPY3D, dstMemoryType);
SAME_FIELD_OF(CUDA_MEMCPY3D, dstHost);
SAME_FIELD_OF(CUDA_MEMCPY3D, dstDevice);
SAME_FIELD_OF(CUDA_MEMCPY3D, dstArray);
SAME_FIELD_OF(CUDA_MEMCPY3D, reserved1);
SAME_FIELD_OF(CUDA_MEMCPY3D, dstPitch);
SAME_FIELD_OF(CUDA_MEMCPY3D, dstHeight);
SAME_FIELD_OF(CUDA_MEMCPY3D, WidthInBytes);
SAME_FIELD_OF(CUDA_MEMCPY3D, Height);
SAME_FIELD_OF(CUDA_MEMCPY3D, Depth);

SAME_SIZE(nrm_CUDA_MEMCPY3D_PEER, CUDA_MEMCPY3D_PEER);
SAME_FIELD_OF(CUDA_MEMCPY3D_PEER, srcXInBytes);
SAME_FIELD_OF(CUDA_MEMCPY3D_PEER, srcY);
SAME_FIELD_OF(CUDA_MEMCPY3D_PEER, srcZ);
SAME_FIELD_OF(CUDA_MEMCPY3D_PEER, srcLOD);
SAME_FIELD_OF(CUDA_MEMCPY3D_PEER, srcMemoryType);
SAME_FIELD_OF(CUDA_MEMCPY3D_PEER, srcHost);
SAME_FIELD_OF(CUDA_MEMCPY3D_PEER, srcDevice);
SAME_FIELD_OF(CUDA_MEMCPY3D_PEER, srcArray);
SAME_FIELD_OF(CUDA_MEMCPY3D_PEER, srcContext);
SAME_FIELD_OF(CUDA_MEMCPY3D_PEER, srcPitch);
SAME_FIELD_OF(CUDA_MEMCPY3D_PEER, srcHeight);
SAME_FIELD_OF(CUDA_MEMCPY3D_PEER, dstXInBytes);
SAME_FIELD_OF(CUDA_MEMCPY3D_PEER, dstY);
SAME_FIELD_OF(CUDA_MEMCPY3D_PEER, dstZ);
SAME_FIELD_OF(CUDA_MEMCPY3D_PEER, dstLOD);
SAME_FIELD_OF(CUDA_MEMCPY3D_PEER, dstMemoryType);
SAME_FIELD_OF(CUDA_MEMCPY3D_PEER, dstHost);
SAME_FIELD_OF(CUDA_MEMCPY3D_PEER, dstDevice);
SAME_FIELD_OF(CUDA_MEMCPY3D_PEER, dstArray);
SAME_FIELD_OF(CUDA_MEMCPY3D_PEER, dstContext);
SAME_FIELD_OF(CUDA_MEMCPY3D_PEER, dstPitch);
SAME_FIELD_OF(CUDA_MEMCPY3D_PEER, dstHeight);
SAME_FIELD_OF(CUDA_MEMCPY3D_PEER, WidthInBytes);
SAME_FIELD_OF(CUDA_MEMCPY3D_PEER, Height);
SAME_FIELD_OF(CUDA_MEMCPY3D_PEER, Depth);

SAME_SIZE(nrm_CUmemLocation, CUmemLocation);
SAME_FIELD_OF(CUmemLocation, type);
SAME_FIELD_OF(CUmemLocation, id);
SAME_SIZE(nrm_CUmemAllocationProp, CUmemAllocationProp);
SAME_FIELD_OF(CUmemAllocationProp, type);
SAME_FIELD_OF(CUmemAllocationProp, requestedHandleTypes);
SAME_FIELD_OF(CUmemAllocationProp, location);
SAME_FIELD_OF(CUmemAllocationProp, win32HandleMetaData);
SAME_FIELD_OF(CUmemAllocationProp, allocFlags);
SAME_FIELD_OF(CUmemAllocationProp, allocFlags.compressionType);
SAME_FIELD_OF(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable);
SAME_FIELD_OF(CUmemAllocationProp, allocFlags.usage);
SAME_SIZE(nrm_CUmemAccessDesc, CUmemAccessDesc);
SAME_FIELD_OF(CUmemAccessDesc, location);
SAME_FIELD_OF(CUmemAccessDesc, flags);
SAME_SIZE(nrm_CUmemcpyAttributes, CUmemcpyAttributes);
SAME_FIELD_OF(CUmemcpyAttributes, srcAccessOrder);
SAME_FIELD_OF(CUmemcpyAttributes, srcLocHint);
SAME_FIELD_OF(CUmemcpyAttributes, dstLocHint);
SAME_FIELD_OF(CUmemcpyAttributes, flags);
SAME_SIZE(nrm_CUmemPoolProps, CUmemPoolProps);
SAME_FIELD_OF(CUmemPoolProps, allocType);
SAME_FIELD_OF(CUmemPoolProps, handleTypes);
SAME_FIELD_OF(CUmemPoolProps, location);
SAME_FIELD_OF(CUmemPoolProps, win32SecurityAttributes);
SAME_FIELD_OF(CUmemPoolProps, maxSize);
SAME_FIELD_OF(CUmemPoolProps, usage);

/* ---- prototypes ------------------------------------------------------------------ */

/* The rows of the list are read again with cuda.h's names for the types that have a
 * name there; that those agree is asserted above. */
#define nrm_CUresult CUresult
#define nrm_CUcontext CUcontext
#define nrm_CUstream CUstream
#define nrm_CUevent CUevent
#define nrm_CUgraph CUgraph
#define nrm_CUgraphExec CUgraphExec
#define nrm_CUgraphNode CUgraphNode
#define nrm_CUgraphEdgeData CUgraphEdgeData
#define nrm_CUuserObject CUuserObject
#define nrm_CUdevice_attribute CUdevice_attribute
#define nrm_CUpointer_attribute CUpointer_attribute
#define nrm_CUstreamCaptureStatus CUstreamCaptureStatus
#define nrm_CUstreamCaptureMode CUstreamCaptureMode
#define nrm_CUdriverProcAddressQueryResult CUdriverProcAddressQueryResult
#define nrm_CUDA_MEMCPY2D CUDA_MEMCPY2D
#define nrm_CUDA_MEMCPY3D CUDA_MEMCPY3D
#define nrm_CUDA_MEMCPY3D_PEER CUDA_MEMCPY3D_PEER
#define nrm_CUmemcpyAttributes CUmemcpyAttributes
#define nrm_CUmemAllocationProp CUmemAllocationProp
#define nrm_CUmemAccessDesc CUmemAccessDesc
#define nrm_CUmemLocation CUmemLocation
#define nrm_CUmemAllocationGranularity_flags CUmemAllocationGranularity_flags
#define nrm_CUmemAllocationType CUmemAllocationType
#define nrm_CUmemoryPool CUmemoryPool
#define nrm_CUmemPoolProps CUmemPoolProps
#define nrm_CUmemPool_attribute CUmemPool_attribute
#define nrm_CUmem_advise CUmem_advise
#define nrm_CUmem_range_attribute CUmem_range_attribute

/* From 13.0 on cuda.h has other prototypes under these names. Every driver since the
 * first ones has those too. */
#if CUDA_VERSION >= 13000
#include <cudaTypedefs.h>
#undef cuMemcpyBatchAsync
extern __typeof__(*(PFN_cuMemcpyBatchAsync_v12080)NULL) cuMemcpyBatchAsync;
extern __typeof__(*(PFN_cuCtxCreate_v3020)NULL) cuCtxCreate_v2;
#endif

#define X(name, symbol, version, required, result, arguments)                          \
    typedef result in_cuda_h_##name arguments;                                         \
    _Static_assert(__builtin_types_compatible_p(__typeof__(symbol), in_cuda_h_##name), \
                   "the prototype of " #name);
NRM_CUDA_ALL_CALLS(X)
#undef X

/* The toolkit names each prototype by its version: the one that the row must ask
   for. */
#if __has_include(<cudaTypedefs.h>)
#include <cudaTypedefs.h>
#define X(name, symbol, version, required, result, arguments)                          \
    _Static_assert(__builtin_types_compatible_p(PFN_##name##_v##version,               \
                                                in_cuda_h_##name *),                   \
                   "the version of " #name);
NRM_CUDA_ALL_CALLS(X)
#undef X
#endif

/* cuda.h maps each name to the symbol of its current prototype. */
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

/* What later versions do in another way, and drivers of all versions also in this
   one. */
static bool
is_older(const char *name)
{
    return strcmp(name, "cuCtxCreate") == 0;
}

TEST(symbols_are_the_current_ones)
{
#define X(name, symbol, version, required, result, arguments)                          \
    CHECK_MSG(strcmp(TEXT(name), #symbol) == 0 || is_older(#name), "%s is %s, not %s", \
              #name, TEXT(name), #symbol);
    NRM_CUDA_ALL_CALLS(X)
#undef X
}

TEST(everything_agrees_with_cuda_h)
{
    int n = 0;
#define X(name, symbol, version, required, result, arguments) n++;
    NRM_CUDA_ALL_CALLS(X)
#undef X
    NOTE("%d prototypes agree with CUDA_VERSION %d", n, CUDA_VERSION);
}

#else

TEST(everything_agrees_with_cuda_h)
{
    SKIP("no cuda.h of CUDA 13.0 or later was found when this was compiled");
}

#endif

/* ---- what holds without a toolkit ------------------------------------------------ */

TEST(an_entry_point_is_listed_once)
{
    static const char *const names[] = {
#define X(name, symbol, version, required, result, arguments) #symbol,
        NRM_CUDA_ALL_CALLS(X)
#undef X
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        for (size_t j = 0; j < i; j++) {
            CHECK_MSG(strcmp(names[i], names[j]) != 0, "%s is listed twice", names[i]);
        }
    }
}

CHECK_MAIN
