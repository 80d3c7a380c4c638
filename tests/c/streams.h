/* Streams of the simulated driver, held and let go, for programs that compare bytes. */
#ifndef NRM_TESTS_STREAMS_H
#define NRM_TESTS_STREAMS_H

#include <time.h>

#include "nrm/stream.h"
#include "simulator.h"

static inline void
make_current(int device)
{
    nrm_CUcontext context;
    CHECK_EQ(cuda.cuDevicePrimaryCtxRetain(&context, device), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuCtxSetCurrent(context), NRM_CUDA_SUCCESS);
}

static inline nrm_CUstream
new_handle(void)
{
    nrm_CUstream handle = NULL;
    CHECK_EQ(cuda.cuStreamCreate(&handle, NRM_CU_STREAM_NON_BLOCKING),
             NRM_CUDA_SUCCESS);
    return handle;
}

/* A stream object that owns its stream, on the current device. */
static inline nrm_stream *
new_stream(void)
{
    nrm_stream *stream = NULL;
    CHECK_OK(nrm_stream_create(-1, NRM_STREAM_NON_BLOCKING, &stream));
    return stream;
}

/* One that somebody else may destroy. */
static inline nrm_stream *
bare_stream(nrm_CUstream handle)
{
    nrm_stream *stream = NULL;
    CHECK_OK(nrm_stream_wrap((uintptr_t)handle, NULL, NULL, &stream));
    return stream;
}

static inline nrm_CUstream
handle_of(const nrm_stream *stream)
{
    return (nrm_CUstream)nrm_stream_handle(stream);
}

static inline void
hold(const nrm_stream *stream)
{
    CHECK_EQ(sim.hold_stream(handle_of(stream)), 0);
}

static inline void
let_go(const nrm_stream *stream)
{
    CHECK_EQ(sim.release_stream(handle_of(stream)), 0);
}

/* What comes next on a stream waits for what is on another one by now. */
static inline void
let_wait_for(nrm_CUstream handle, nrm_CUstream other)
{
    nrm_CUevent event = NULL;
    CHECK_EQ(cuda.cuEventCreate(&event, NRM_CU_EVENT_DISABLE_TIMING), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuEventRecord(event, other), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamWaitEvent(handle, event, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuEventDestroy(event), NRM_CUDA_SUCCESS);
}

/* Whatever is ready runs: long enough for a stream that does not wait. */
static inline void
let_run(void)
{
    struct timespec time = {.tv_nsec = 20 * 1000 * 1000};
    nanosleep(&time, NULL);
}

/* Whether device memory has `value` in every byte. */
static inline bool
has_all(nrm_CUdeviceptr ptr, size_t nbytes, unsigned char value)
{
    unsigned char bytes[4096];
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    for (size_t i = 0; i < nbytes; i++) {
        size_t k = i % sizeof bytes, left = nbytes - i;
        if (k == 0) {
            CHECK_EQ(cuda.cuMemcpyDtoH(bytes, ptr + i,
                                       left < sizeof bytes ? left : sizeof bytes),
                     NRM_CUDA_SUCCESS);
        }
        if (bytes[k] != value) {
            NOTE("byte %zu is %d", i, bytes[k]);
            return false;
        }
    }
    return true;
}

/* For a thread: lets a stream go once somebody waits for it. */
static inline void *
let_go_soon(void *stream)
{
    make_current(0);
    let_run();
    let_go(stream);
    return NULL;
}

#endif
