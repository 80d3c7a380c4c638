/*
 * What the benchmarks ask of the CUDA driver themselves: streams, its own pool, a
 * kernel. The library is found at run time, at the place where the core looks.
 */
#ifndef BENCH_DRIVER_H
#define BENCH_DRIVER_H

#include <stddef.h>

/* X(field, symbol, arguments): of every driver, the simulated one too */
#define DRIVER_CALLS(X)                                                                \
    X(init, "cuInit", (unsigned flags))                                                \
    X(retain, "cuDevicePrimaryCtxRetain", (void **context, int device))                \
    X(set_current, "cuCtxSetCurrent", (void *context))                                 \
    X(synchronize, "cuCtxSynchronize", (void))                                         \
    X(fill_async, "cuMemsetD8Async",                                                   \
      (unsigned long long ptr, unsigned char value, size_t n, void *stream))
#define POOL_CALLS(X)                                                                  \
    X(default_pool, "cuDeviceGetDefaultMemPool", (void **pool, int device))            \
    X(pool_set, "cuMemPoolSetAttribute", (void *pool, int attribute, void *value))     \
    X(pool_trim, "cuMemPoolTrimTo", (void *pool, size_t keep))                         \
    X(allocate_async, "cuMemAllocAsync",                                               \
      (unsigned long long *ptr, size_t nbytes, void *stream))                          \
    X(free_async, "cuMemFreeAsync", (unsigned long long ptr, void *stream))
#define REUSE_CALLS(X)                                                                 \
    X(n_devices, "cuDeviceGetCount", (int *n))                                         \
    X(create_event, "cuEventCreate", (void **event, unsigned flags))                   \
    X(query_event, "cuEventQuery", (void *event))                                      \
    X(record_context, "cuCtxRecordEvent", (void *context, void *event))                \
    X(exchange_mode, "cuThreadExchangeStreamCaptureMode", (int *mode))                 \
    X(allocate, "cuMemAlloc_v2", (unsigned long long *ptr, size_t nbytes))             \
    X(deallocate, "cuMemFree_v2", (unsigned long long ptr))                            \
    X(copy_to_device, "cuMemcpyHtoDAsync_v2",                                          \
      (unsigned long long to, const void *from, size_t nbytes, void *stream))
#define KERNEL_CALLS(X)                                                                \
    X(load_module, "cuModuleLoadData", (void **module, const void *image))             \
    X(find_function, "cuModuleGetFunction",                                            \
      (void **function, void *module, const char *name))                               \
    X(launch, "cuLaunchKernel",                                                        \
      (void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,              \
       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_nbytes,   \
       void *stream, void **parameters, void **options))

struct driver {
    void *library; /* NULL: not opened */
    void *context; /* the primary one of device 0 */
    void *pool;    /* the driver's own; NULL: not asked for */
#define FIELD(field, symbol, arguments) int(*field) arguments;
    DRIVER_CALLS(FIELD) POOL_CALLS(FIELD) REUSE_CALLS(FIELD) KERNEL_CALLS(FIELD)
#undef FIELD
};
extern struct driver driver;

/* The library, and a context that is current on this thread. Once or more often. */
void driver_open(void);
/* Its pool too, told to keep what it has. */
void driver_open_pool(void);
/* Events and copies too. */
void driver_open_reuse(void);
size_t driver_device_count(void);
/* The context on another thread, where there is one. */
void driver_enter(void);
/* A kernel of one thread, and a launch of it: it runs for a million clocks, then writes
   to `ptr`. On the simulated driver, which runs no kernels, a fill. */
void driver_open_kernel(void);
void driver_launch(void *ptr, void *stream);

/* Ends the program unless `result` is success. */
void driver_expect(int result, const char *what);

#endif
