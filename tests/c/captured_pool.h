/*
 * A pool of device memory and streams of every kind that are captured into graphs: the
 * base of test_pool_capture.c and test_pool_capture_held.c.
 */
#ifndef NRM_TESTS_CAPTURED_POOL_H
#define NRM_TESTS_CAPTURED_POOL_H

#include <string.h>

#include "core/capture.h"
#include "cuda/event.h"
#include "device_pool.h"

#define GLOBAL NRM_CU_STREAM_CAPTURE_MODE_GLOBAL
#define THREAD_LOCAL NRM_CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
#define RELAXED NRM_CU_STREAM_CAPTURE_MODE_RELAXED

enum { N_SEEN = 8, N_BLOCKS = 8, N_LAUNCHES = 100, VALUE = 7 };

/* ---- the machine ---- */

static inline nrm_resource *
pool_of(size_t nbytes)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    nrm_resource *source = NULL, *mr = NULL;
    options.initial_nbytes = options.maximum_nbytes = nbytes;
    options.on_exhausted = NRM_ON_EXHAUSTED_ERROR;
    options.wait_limit_ns = 5 * 1000 * 1000;
    CHECK_OK(nrm_device_create(NULL, &source));
    CHECK_OK(nrm_pool_create(source, &options, &mr));
    nrm_resource_release(source);
    return mr;
}

static inline void
start_machine(const struct nrm_cudasim_config *config, size_t nbytes)
{
    start_device(config, N_SEEN);
    nrm__cuda_capture_lift(-1);
    pool = pool_of(nbytes);
}

/* A pool that has `nbytes` and gets no more; 0: it grows. */
static inline void
start(size_t nbytes)
{
    start_machine(NULL, nbytes);
}

/* Everything went back, whatever graphs there were. */
static inline void
finish(void)
{
    empty_pool();
    CHECK_EQ(nrm__captures_n_alive(), 0u);
    CHECK_EQ(atomic_load(&nrm__captures_known), 0u);
    stop();
    CHECK_EQ(simulator_count(NRM_CUDASIM_GRAPHS), 0u);
}

static inline nrm_CUdeviceptr
address(const void *ptr)
{
    return (nrm_CUdeviceptr)(uintptr_t)ptr;
}

static inline void
copy_on(const nrm_stream *stream, void *to, const void *from)
{
    CHECK_EQ(cuda.cuMemcpyAsync(address(to), address(from), BLOCK, handle_of(stream)),
             NRM_CUDA_SUCCESS);
}

static inline bool
is_all(nrm_CUdeviceptr ptr, unsigned char value)
{
    unsigned char bytes[BLOCK];
    CHECK_EQ(cuda.cuMemcpyDtoH(bytes, ptr, BLOCK), NRM_CUDA_SUCCESS);
    return bytes[0] == value && memcmp(bytes, bytes + 1, BLOCK - 1) == 0;
}

/* What graphs have read; without a synchronisation, which a capture elsewhere would not
   survive. */
static inline bool
have_seen(int i, unsigned char value)
{
    return is_all(seen + (size_t)i * BLOCK, value);
}

static inline void
begin_capture(const nrm_stream *stream, int mode)
{
    CHECK_EQ(cuda.cuStreamBeginCapture(handle_of(stream),
                                       (nrm_CUstreamCaptureMode)mode),
             NRM_CUDA_SUCCESS);
}

static inline nrm_CUgraph
end_capture(const nrm_stream *stream)
{
    nrm_CUgraph graph = NULL;
    CHECK_EQ(cuda.cuStreamEndCapture(handle_of(stream), &graph), NRM_CUDA_SUCCESS);
    return graph;
}

static inline nrm_CUgraphExec
instantiate(nrm_CUgraph graph)
{
    nrm_CUgraphExec exec = NULL;
    CHECK_EQ(cuda.cuGraphInstantiateWithFlags(&exec, graph, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    return exec;
}

static inline void
launch(nrm_CUgraphExec exec, const nrm_stream *stream)
{
    CHECK_EQ(cuda.cuGraphLaunch(exec, handle_of(stream)), NRM_CUDA_SUCCESS);
}

/* ---- the streams ---- */

static inline nrm_stream *
others_stream(void)
{
    return bare_stream(new_handle());
}

static inline nrm_stream *
per_thread_stream(void)
{
    nrm_stream *stream = NULL;
    CHECK_OK(nrm_stream_per_thread(&stream));
    return stream;
}

static inline void
drop_stream(nrm_stream *stream)
{
    nrm_CUstream handle = handle_of(stream);
    bool is_bare = !nrm__stream_stays(stream);
    nrm_stream_release(stream);
    if (is_bare) {
        CHECK_EQ(cuda.cuStreamDestroy(handle), NRM_CUDA_SUCCESS);
    }
}

static const struct kind {
    const char *name;
    nrm_stream *(*create)(void);
    bool is_announced;
    int mode;
} kinds[] = {
    {"others_global", others_stream, false, GLOBAL},
    {"others_thread_local", others_stream, false, THREAD_LOCAL},
    {"others_relaxed", others_stream, false, RELAXED},
    {"others_announced", others_stream, true, GLOBAL},
    {"kept_global", new_stream, true, GLOBAL},
    {"kept_thread_local", new_stream, true, THREAD_LOCAL},
    {"kept_relaxed", new_stream, true, RELAXED},
    {"per_thread_global", per_thread_stream, true, GLOBAL},
    {"per_thread_thread_local", per_thread_stream, true, THREAD_LOCAL},
    {"per_thread_relaxed", per_thread_stream, true, RELAXED},
};

static inline void
begin(const struct kind *kind, const nrm_stream *stream)
{
    if (kind->is_announced) {
        nrm_capture_begin();
    }
    begin_capture(stream, kind->mode);
}

static inline nrm_CUgraph
end(const struct kind *kind, const nrm_stream *stream)
{
    nrm_CUgraph graph = end_capture(stream);
    if (kind->is_announced) {
        nrm_capture_end();
    }
    return graph;
}

/* ---- a graph that is launched when the owners of its memory have gone ---- */

/* A graph that fills a block, copies it to another one and that to a place of `seen`.
   The blocks are freed inside the capture, or after it. */
static inline nrm_CUgraphExec
capture_program(const struct kind *kind, nrm_stream *stream, bool frees_inside)
{
    begin(kind, stream);
    void *first = take(BLOCK, stream), *second = take(BLOCK, stream);
    write_on(stream, first, VALUE);
    copy_on(stream, second, first);
    read_on(stream, second, 0);
    if (frees_inside) {
        give(first, stream);
        give(second, stream);
    }
    nrm_CUgraphExec exec = instantiate(end(kind, stream));
    if (!frees_inside) {
        give(first, stream);
        give(second, stream);
    }
    return exec;
}

/* Launches it while others take whatever memory they get, write to it behind a hold,
   and find their own bytes there. Returns how often there were wrong ones. */
static inline int
launch_among_others(nrm_CUgraphExec exec, nrm_stream *stream, int n)
{
    int n_wrong = 0;
    nrm_stream *other = others_stream();
    for (int i = 0; i < n; i++) {
        unsigned char value = (unsigned char)(10 + i);
        void *blocks[N_BLOCKS] = {NULL};
        int n_blocks = 0;
        while (n_blocks < N_BLOCKS &&
               nrm_resource_allocate(pool, BLOCK, 0, other, &blocks[n_blocks]) ==
                   NRM_OK) {
            write_on(other, blocks[n_blocks++], value);
        }
        CHECK_EQ(cuda.cuStreamSynchronize(handle_of(other)), NRM_CUDA_SUCCESS);
        CHECK_EQ(cuda.cuMemsetD8(seen, 0, BLOCK), NRM_CUDA_SUCCESS);
        launch(exec, stream);
        CHECK_EQ(cuda.cuStreamSynchronize(handle_of(stream)), NRM_CUDA_SUCCESS);
        bool is_right = have_seen(0, VALUE);
        for (int k = 0; k < n_blocks; k++) {
            is_right = is_all(address(blocks[k]), value) && is_right;
            give(blocks[k], other);
        }
        n_wrong += !is_right;
    }
    drop_stream(other);
    return n_wrong;
}

#endif
