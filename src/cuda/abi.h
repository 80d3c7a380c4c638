/* The CUDA driver's binary interface, as far as this project uses it.
 *
 * The driver is opened at run time and its header is not needed to build, so what it
 * looks like is declared here and in abi_types.h: types, constants and one list of
 * entry points. The list is the single source of the driver table, of the simulator's
 * symbol table and of the test that compares all of it with the toolkit's cuda.h. To
 * use another entry point, add its row; to move one between the lists, move its row.
 */
#ifndef NRM_CUDA_ABI_H
#define NRM_CUDA_ABI_H

#include "cuda/abi_types.h"

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
 * names in cuGetProcAddress and is then told which memory an allocator hands out and
 * gets back. `stream`: a handle on the device, or NO_STREAM: to the host, which may
 * write it. */
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
