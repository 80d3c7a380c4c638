/*
 * The allocators that are compared: ours by the name of a resource, the process's malloc
 * (whichever the loader put there: a peer is preloaded, in a process of its own), and the
 * driver's own pool. The driver is found at run time, at the place where the core looks.
 */
#include <dlfcn.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "builtin.h"
#include "nrm/options.h"
#include "nrm/pools.h"
#include "nrm/registry.h"

/* ---- the driver, for streams and for its pool ---- */

#define NON_BLOCKING 1
#define RELEASE_THRESHOLD 4 /* CU_MEMPOOL_ATTR_RELEASE_THRESHOLD */

/* X(field, symbol, arguments) */
#define DRIVER_CALLS(X)                                                                \
    X(init, "cuInit", (unsigned flags))                                                \
    X(retain, "cuDevicePrimaryCtxRetain", (void **context, int device))                \
    X(set_current, "cuCtxSetCurrent", (void *context))                                 \
    X(create_stream, "cuStreamCreate", (void **stream, unsigned flags))                \
    X(synchronize, "cuCtxSynchronize", (void))
#define POOL_CALLS(X)                                                                  \
    X(default_pool, "cuDeviceGetDefaultMemPool", (void **pool, int device))            \
    X(pool_set, "cuMemPoolSetAttribute", (void *pool, int attribute, void *value))     \
    X(pool_trim, "cuMemPoolTrimTo", (void *pool, size_t keep))                         \
    X(allocate_async, "cuMemAllocAsync",                                               \
      (unsigned long long *ptr, size_t nbytes, void *stream))                          \
    X(free_async, "cuMemFreeAsync", (unsigned long long ptr, void *stream))

static struct {
    void *library;
    void *context;
    void *pool;
#define FIELD(field, symbol, arguments) int(*field) arguments;
    DRIVER_CALLS(FIELD) POOL_CALLS(FIELD)
#undef FIELD
} driver;

static void
expect_success(int result, const char *what)
{
    if (result != 0) {
        fail("%s answered %d", what, result);
    }
}

static void *
symbol_of(const char *name)
{
    void *symbol = dlsym(driver.library, name);
    if (symbol == NULL) {
        fail("this driver has no %s", name);
    }
    return symbol;
}

static void
driver_open(void)
{
    char path[256];
    if (driver.library != NULL) {
        return;
    }
    nrm_option_get_text(NRM_OPT_CUDA_LIBRARY, path, sizeof path);
    driver.library = dlopen(path[0] ? path : "libcuda.so.1", RTLD_NOW);
    if (driver.library == NULL) {
        fail("no CUDA driver: %s", dlerror());
    }
#define FIND(field, symbol, arguments) *(void **)&driver.field = symbol_of(symbol);
    DRIVER_CALLS(FIND)
    expect_success(driver.init(0), "cuInit");
    expect_success(driver.retain(&driver.context, 0), "cuDevicePrimaryCtxRetain");
    expect_success(driver.set_current(driver.context), "cuCtxSetCurrent");
}

static void
driver_open_pool(void)
{
    unsigned long long all = ~0ULL; /* or it gives everything back at each wait */
    driver_open();
    POOL_CALLS(FIND)
#undef FIND
    expect_success(driver.default_pool(&driver.pool, 0), "cuDeviceGetDefaultMemPool");
    expect_success(driver.pool_set(driver.pool, RELEASE_THRESHOLD, &all),
                   "cuMemPoolSetAttribute");
}

static void *
driver_allocate(struct allocator *self, size_t nbytes, size_t stream)
{
    unsigned long long ptr = 0;
    int result = driver.allocate_async(&ptr, nbytes, self->handles[stream]);
    return result == 0 ? (void *)(uintptr_t)ptr : NULL; // NOLINT: a device address
}

static void
driver_deallocate(struct allocator *self, void *ptr, size_t nbytes, size_t stream)
{
    (void)nbytes;
    expect_success(driver.free_async((uintptr_t)ptr, self->handles[stream]),
                   "cuMemFreeAsync");
}

/* ---- malloc ---- */

static void *
heap_allocate(struct allocator *self, size_t nbytes, size_t stream)
{
    (void)self;
    (void)stream;
    return malloc(nbytes);
}

static void
heap_deallocate(struct allocator *self, void *ptr, size_t nbytes, size_t stream)
{
    (void)self;
    (void)nbytes;
    (void)stream;
    free(ptr);
}

/* ---- ours ---- */

static void *
ours_allocate(struct allocator *self, size_t nbytes, size_t stream)
{
    void *ptr = NULL;
    nrm_status status =
        nrm_resource_allocate(self->mr, nbytes, 0, self->streams[stream], &ptr);
    return status == NRM_OK ? ptr : NULL;
}

static void
ours_deallocate(struct allocator *self, void *ptr, size_t nbytes, size_t stream)
{
    nrm_status status =
        nrm_resource_deallocate(self->mr, ptr, nbytes, self->streams[stream]);
    if (status != NRM_OK) {
        fail("deallocate: %s", nrm_last_error()->message);
    }
}

/* A stream object made for each call: what a caller pays who has a bare handle. */
static void *
wrapping_allocate(struct allocator *self, size_t nbytes, size_t stream)
{
    void *ptr = NULL;
    nrm_stream *wrapped;
    nrm_status status =
        nrm_stream_wrap((uintptr_t)self->handles[stream], NULL, NULL, &wrapped);
    if (status == NRM_OK) {
        status = nrm_resource_allocate(self->mr, nbytes, 0, wrapped, &ptr);
        nrm_stream_release(wrapped);
    }
    return status == NRM_OK ? ptr : NULL;
}

static void
wrapping_deallocate(struct allocator *self, void *ptr, size_t nbytes, size_t stream)
{
    nrm_stream *wrapped;
    nrm_status status =
        nrm_stream_wrap((uintptr_t)self->handles[stream], NULL, NULL, &wrapped);
    if (status == NRM_OK) {
        status = nrm_resource_deallocate(self->mr, ptr, nbytes, wrapped);
        nrm_stream_release(wrapped);
    }
    if (status != NRM_OK) {
        fail("deallocate: %s", nrm_last_error()->message);
    }
}

static nrm_status
create_over_addresses(nrm_resource **out)
{
    nrm_resource *upstream = NULL;
    bool is_host = strcmp(text_parameter("kind", "device"), "host") == 0;
    nrm_status status =
        addresses_create(is_host ? NRM_KIND_HOST : NRM_KIND_DEVICE, &upstream);
    if (status == NRM_OK) {
        status = nrm_pool_create(upstream, NULL, out);
        nrm_resource_release(upstream);
    }
    return status;
}

static void
open_ours(struct allocator *self, const char *name)
{
    const char *reuse = text_parameter("reuse", "");
    nrm_status status = NRM_OK;
    if (reuse[0] != '\0') {
        status = nrm_option_set(NRM_OPT_REUSE, reuse);
    }
    bool is_simulated = strcmp(name, "addresses") == 0;
    if (status == NRM_OK) {
        status = is_simulated ? create_over_addresses(&self->mr)
                              : nrm_registry_get(name, &self->mr);
    }
    if (status != NRM_OK) {
        fail("%s: %s", name, nrm_last_error()->message);
    }
    self->allocate = ours_allocate;
    self->deallocate = ours_deallocate;
    self->is_accessible = !is_simulated &&
                          nrm_kind_is_host_accessible(nrm_resource_kind(self->mr));
}

/* ---- any of them ---- */

static void
open_streams(struct allocator *self)
{
    self->n_streams = parameter("streams", 0);
    if (self->n_streams == 0) {
        return;
    }
    if (self->n_streams > MAX_STREAMS) {
        fail("at most %d streams", MAX_STREAMS);
    }
    driver_open();
    for (size_t i = 0; i < self->n_streams; i++) {
        expect_success(driver.create_stream(&self->handles[i], NON_BLOCKING),
                       "cuStreamCreate");
        if (nrm_stream_wrap((uintptr_t)self->handles[i], NULL, NULL,
                            &self->streams[i]) != NRM_OK) {
            fail("stream: %s", nrm_last_error()->message);
        }
    }
    if (self->mr != NULL && parameter("wrap", 0) != 0) {
        self->allocate = wrapping_allocate;
        self->deallocate = wrapping_deallocate;
    }
}

void
allocator_open(struct allocator *self, const char *name)
{
    *self = (struct allocator){0};
    if (nrm__builtin_init() != NRM_OK) {
        fail("the names: %s", nrm_last_error()->message);
    }
    if (strcmp(name, "malloc") == 0) {
        self->allocate = heap_allocate;
        self->deallocate = heap_deallocate;
        self->is_accessible = true;
    }
    else if (strcmp(name, "cuMemAllocAsync") == 0) {
        driver_open_pool();
        self->allocate = driver_allocate;
        self->deallocate = driver_deallocate;
    }
    else {
        open_ours(self, name);
        if (self->mr != NULL && nrm_resource_kind(self->mr) != NRM_KIND_HOST &&
            strcmp(name, "addresses") != 0) {
            driver_open(); /* a context, as a program that uses the GPU has one */
        }
    }
    open_streams(self);
}

void
allocator_close(struct allocator *self)
{
    for (size_t i = 0; i < self->n_streams; i++) {
        nrm_stream_release(self->streams[i]);
    }
    if (self->mr != NULL) {
        nrm_resource_release(self->mr);
    }
}

void
allocator_trim(struct allocator *self)
{
    if (self->mr != NULL) {
        if (nrm_resource_trim(self->mr, 0, NULL) != NRM_OK) {
            fail("trim: %s", nrm_last_error()->message);
        }
    }
    else if (driver.pool != NULL) {
        expect_success(driver.synchronize(), "cuCtxSynchronize");
        expect_success(driver.pool_trim(driver.pool, 0), "cuMemPoolTrimTo");
    }
    else {
        malloc_trim(0); /* glibc's; a peer's memory decays by its own rules */
    }
}

void
allocator_usage(struct allocator *self, uint64_t *reserved, uint64_t *parked)
{
    nrm_statistics statistics = {0};
    if (self->mr != NULL && nrm_resource_statistics(self->mr, &statistics) != NRM_OK) {
        fail("statistics: %s", nrm_last_error()->message);
    }
    *reserved = (uint64_t)statistics.reserved_bytes;
    *parked = (uint64_t)statistics.parked_bytes;
}

void *
allocate(struct allocator *self, size_t nbytes, size_t stream)
{
    void *ptr = self->allocate(self, nbytes, stream);
    if (ptr == NULL) {
        fail("%zu bytes could not be had: %s", nbytes,
             self->mr != NULL ? nrm_last_error()->message : "the allocator says no");
    }
    return ptr;
}

void *
reallocate(struct allocator *self, void *ptr, size_t old_nbytes, size_t nbytes,
           size_t stream)
{
    void *moved = NULL;
    if (self->mr == NULL && self->is_accessible) {
        moved = realloc(ptr, nbytes);
    }
    else if (self->is_accessible) {
        if (nrm_resource_reallocate(self->mr, ptr, nbytes, 0, self->streams[stream],
                                    &moved) != NRM_OK) {
            moved = NULL;
        }
    }
    else { /* nobody can see what is in it */
        moved = allocate(self, nbytes, stream);
        self->deallocate(self, ptr, old_nbytes, stream);
    }
    if (moved == NULL) {
        fail("%zu bytes could not be made %zu", old_nbytes, nbytes);
    }
    return moved;
}
