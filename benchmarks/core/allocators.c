/*
 * The allocators that are compared: ours by the name of a resource, the process's
 * malloc (whichever the loader put there: a peer is preloaded, in a process of its
 * own), the driver's own pool, and RMM's resources through a library that rmm_peer.cpp
 * makes.
 */
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "builtin.h"
#include "driver.h"
#include "nrm/adaptors.h"
#include "nrm/options.h"
#include "nrm/pools.h"
#include "nrm/registry.h"

/* ---- the driver's pool ---- */

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
    driver_expect(driver.free_async((uintptr_t)ptr, self->handles[stream]),
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

/* A pool that is nobody else's, over the source that the named pool is over. */
static nrm_status
create_new_pool(const char *name, nrm_resource **out)
{
    char source[64];
    nrm_resource *upstream = NULL;
    snprintf(source, sizeof source, "%s_direct", name);
    nrm_status status = nrm_registry_get(source, &upstream);
    if (status == NRM_OK) {
        nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
        options.initial_nbytes = parameter("initial", 0);
        status = nrm_pool_create(upstream, &options, out);
        nrm_resource_release(upstream);
    }
    return status;
}

/* Puts a limit and then statistics on top of a resource. */
static nrm_status
add_adaptors(nrm_resource **mr)
{
    nrm_limiting_options options = NRM_OPTIONS(nrm_limiting_options);
    nrm_resource *limited = NULL, *counted = NULL;
    options.allocation_limit = (size_t)64 << 30;
    nrm_status status = nrm_limiting_create(*mr, &options, &limited);
    if (status == NRM_OK) {
        status = nrm_statistics_create(limited, &counted);
        nrm_resource_release(limited);
    }
    if (status == NRM_OK) {
        nrm_resource_release(*mr);
        *mr = counted;
    }
    return status;
}

nrm_resource *
allocator_stack(struct allocator *self)
{
    nrm_logging_options options = NRM_OPTIONS(nrm_logging_options);
    nrm_resource *counted = self->mr, *logged = NULL;
    options.path = "/dev/null";
    nrm_resource_retain(counted);
    nrm_status status = add_adaptors(&counted);
    if (status == NRM_OK) {
        status = nrm_logging_create(counted, &options, &logged);
    }
    if (status != NRM_OK) {
        fail("a log over statistics over a limit: %s", nrm_last_error()->message);
    }
    nrm_resource_release(counted);
    return logged;
}

static void
open_ours(struct allocator *self, const char *name)
{
    const char *reuse = text_parameter("reuse", "");
    const char *parked = text_parameter("parked_limit", "");
    nrm_status status = NRM_OK;
    if (reuse[0] != '\0') {
        status = nrm_option_set(NRM_OPT_REUSE, reuse);
    }
    if (status == NRM_OK && parked[0] != '\0') {
        status = nrm_option_set(NRM_OPT_PARKED_LIMIT, parked);
    }
    bool is_simulated = strcmp(name, "addresses") == 0;
    if (status == NRM_OK) {
        status = is_simulated               ? create_over_addresses(&self->mr)
                 : parameter("new", 0) != 0 ? create_new_pool(name, &self->mr)
                                            : nrm_registry_get(name, &self->mr);
    }
    if (status == NRM_OK && parameter("adaptors", 0) != 0) {
        status = add_adaptors(&self->mr);
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

/* Of their own, or with legacy=1 the default stream, on which RMM's random_allocations
   runs. */
static void
open_streams(struct allocator *self)
{
    bool is_legacy = parameter("legacy", 0) != 0;
    unsigned flags = parameter("blocking", 0) != 0 ? NRM_STREAM_BLOCKING
                                                   : NRM_STREAM_NON_BLOCKING;
    self->n_streams = is_legacy ? 1 : parameter("streams", 0);
    if (self->n_streams == 0) {
        return;
    }
    if (self->n_streams > MAX_STREAMS) {
        fail("at most %d streams", MAX_STREAMS);
    }
    driver_open();
    for (size_t i = 0; i < self->n_streams; i++) {
        nrm_status status = is_legacy
                                ? nrm_stream_wrap(0, NULL, NULL, &self->streams[i])
                                : nrm_stream_create(-1, flags, &self->streams[i]);
        if (status != NRM_OK) {
            fail("stream: %s", nrm_last_error()->message);
        }
        // NOLINTNEXTLINE: a handle of the driver
        self->handles[i] = (void *)nrm_stream_handle(self->streams[i]);
    }
}

/* What a name stands for; called again by allocator_renew. */
static void
open_resource(struct allocator *self, const char *name)
{
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
    else if (strncmp(name, "rmm:", 4) == 0) {
        driver_open();
        rmm_open(self, name + 4);
    }
    else {
        open_ours(self, name);
        if (nrm_resource_kind(self->mr) != NRM_KIND_HOST &&
            strcmp(name, "addresses") != 0) {
            driver_open(); /* a context, as a program that uses the GPU has one */
        }
        if (parameter("wrap", 0) != 0) {
            self->allocate = wrapping_allocate;
            self->deallocate = wrapping_deallocate;
        }
    }
}

static void
close_resource(struct allocator *self)
{
    if (self->mr != NULL) {
        nrm_resource_release(self->mr);
        self->mr = NULL;
    }
    if (self->peer != NULL) {
        rmm_close(self);
    }
}

void
allocator_open(struct allocator *self, const char *name)
{
    *self = (struct allocator){.name = name};
    if (nrm__builtin_init() != NRM_OK) {
        fail("the names: %s", nrm_last_error()->message);
    }
    open_resource(self, name);
    open_streams(self);
}

void
allocator_renew(struct allocator *self)
{
    if (driver.pool != NULL) { /* there is one, which cannot be made again */
        allocator_trim(self);
        return;
    }
    close_resource(self);
    open_resource(self, self->name);
}

void
allocator_close(struct allocator *self)
{
    for (size_t i = 0; i < self->n_streams; i++) {
        nrm_stream_release(self->streams[i]);
    }
    close_resource(self);
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
        driver_expect(driver.synchronize(), "cuCtxSynchronize");
        driver_expect(driver.pool_trim(driver.pool, 0), "cuMemPoolTrimTo");
    }
    else if (self->peer == NULL) { /* RMM's give nothing back while they live */
        malloc_trim(0); /* glibc's; a peer's memory decays by its own rules */
    }
}

uint64_t
allocator_reserved(struct allocator *self)
{
    nrm_statistics statistics = {0};
    if (self->mr != NULL && nrm_resource_statistics(self->mr, &statistics) != NRM_OK) {
        fail("statistics: %s", nrm_last_error()->message);
    }
    return (uint64_t)statistics.reserved_bytes;
}

void *
allocate(struct allocator *self, size_t nbytes, size_t stream)
{
    void *ptr = self->allocate(self, nbytes, stream);
    if (ptr == NULL) {
        fail("%zu bytes could not be had: %s", nbytes,
             self->mr != NULL     ? nrm_last_error()->message
             : self->peer != NULL ? rmm_error()
                                  : "the allocator says no");
    }
    return ptr;
}

void *
reallocate(struct allocator *self, void *ptr, size_t old_nbytes, size_t nbytes,
           size_t stream)
{
    void *moved = NULL;
    if (self->mr == NULL && self->peer == NULL && self->is_accessible) {
        moved = realloc(ptr, nbytes);
    }
    else if (self->mr != NULL && self->is_accessible) {
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
