/*
 * Memory in the order of streams, from a memory pool of the driver.
 *
 * A caller with a stream gets what the driver gives to that stream, and frees on it;
 * the driver knows when others may have the memory. A caller without one is the host,
 * or a pool that will hand pieces to any stream: its memory comes over a stream of ours
 * which is waited for, so that it is anybody's, and goes back when all work submitted
 * before is done (core/uses.h).
 *
 * The driver's pool is found at the first request, and again after a reset of the
 * context: what the old one held is gone, and it is never named again.
 */
#include "sources/in_order.h"

#include "base/error.h"
#include "core/block_map.h"
#include "core/hooks.h"
#include "core/nodes.h"
#include "core/stream.h"
#include "core/uses.h"
#include "cuda/foreign.h"
#include "nrm/options.h"
#include "os/system.h"
#include "sources/on_device.h"

#define HUGE_NBYTES ((size_t)1 << 40) /* from here on it is asked what there is */

/* A pool in one life of its device's context. */
struct nrm__in_order_place {
    struct nrm__in_order_place *older;
    nrm_CUmemoryPool pool;
    struct nrm__cuda_stream stream; /* for callers that have none */
    struct nrm__cuda_foreign home;  /* of that, where it is no primary context */
    uint64_t generation;
};

static struct nrm__in_order *
self_of(nrm_resource *mr)
{
    return (struct nrm__in_order *)mr;
}

nrm_status
nrm__in_order_check(const struct nrm__cuda_scope *scope)
{
    const struct nrm__driver *driver = scope->driver;
    if (driver->cuMemPoolCreate == NULL || driver->cuMemAllocFromPoolAsync == NULL ||
        driver->cuMemFreeAsync == NULL || driver->cuMemPoolDestroy == NULL ||
        driver->cuMemPoolSetAttribute == NULL ||
        driver->cuMemPoolGetAttribute == NULL || driver->cuMemPoolTrimTo == NULL) {
        return nrm__error(
            NRM_CUDA_UNAVAILABLE,
            "the CUDA driver (of CUDA %d.%d) has no memory pools: it lacks "
            "cuMemAllocFromPoolAsync or another call of theirs",
            driver->version / 1000, driver->version % 1000 / 10);
    }
    if (nrm__cuda_attribute(scope->device,
                            NRM_CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED) == 0) {
        return nrm__error(
            NRM_CUDA_UNAVAILABLE,
            "device %d has no memory pools (memoryPoolsSupported 0): use a "
            "PoolMemoryResource over a CudaMemoryResource",
            scope->device);
    }
    return NRM_OK;
}

/* A context of the program's own takes the stream along. */
static bool
has_lost_home(const struct nrm__in_order_place *place)
{
    return place->home.context != NULL && !nrm__cuda_foreign_lives(&place->home);
}

/* ---- the pool -------------------------------------------------------------------- */

static nrm_CUresult
prime(const struct nrm__cuda_scope *scope, const struct nrm__in_order_place *place,
      size_t nbytes)
{
    nrm_CUdeviceptr ptr;
    nrm_CUresult code = scope->driver->cuMemAllocFromPoolAsync(
        &ptr, nbytes, place->pool, place->stream.handle);
    if (code == NRM_CUDA_SUCCESS) {
        code = scope->driver->cuMemFreeAsync(ptr, place->stream.handle);
    }
    return code;
}

static void
place_destroy(const struct nrm__in_order *self, struct nrm__in_order_place *place)
{
    struct nrm__cuda_scope scope;
    int device = nrm_resource_device(&self->base);
    nrm_CUresult code = NRM_CUDA_SUCCESS;
    bool lives = nrm__cuda_driver() != NULL &&
                 nrm__cuda_generation(device) == place->generation;
    if (lives && place->home.context != NULL) {
        nrm__cuda_foreign_destroy_stream(&place->home, place->stream.handle);
    }
    else if (lives && place->stream.handle != NULL) {
        nrm__cuda_stream_destroy(&place->stream);
    }
    if (lives && self->owns_pool && place->pool != NULL &&
        nrm__cuda_enter_existing(device, &scope) == NRM_OK) {
        code = scope.driver->cuMemPoolDestroy(place->pool);
        nrm__cuda_leave(&scope);
    }
    if (code != NRM_CUDA_SUCCESS && !nrm__cuda_is_destroyed(code)) {
        (void)nrm__cuda_error(code, "cuMemPoolDestroy on device %d", device);
        nrm__lost_error_note(nrm_last_error());
    }
    nrm__node_deallocate(place, sizeof *place);
}

static nrm_status
fill_place(struct nrm__in_order *self, const struct nrm__cuda_scope *scope,
           struct nrm__in_order_place *place)
{
    char text[32];
    place->generation = scope->generation;
    NRM_TRY(self->find_pool(self, scope, &place->pool));
    NRM_TRY(nrm__cuda_stream_create(scope->device, NRM_STREAM_NON_BLOCKING,
                                    &place->stream));
    (void)nrm__cuda_foreign_find((uintptr_t)place->stream.handle, &place->home);
    if (self->initial_nbytes == 0) {
        return NRM_OK;
    }
    nrm_CUresult code = prime(scope, place, self->initial_nbytes);
    nrm_format_nbytes(self->initial_nbytes, text, sizeof text);
    return code == NRM_CUDA_SUCCESS
               ? NRM_OK
               : nrm__cuda_error(code, "initial pool size of %s on device %d", text,
                                 scope->device);
}

static nrm_status
make_place(struct nrm__in_order *self, const struct nrm__cuda_scope *scope,
           struct nrm__in_order_place *older)
{
    struct nrm__in_order_place *place = nrm__node_allocate(sizeof *place);
    if (place == NULL) {
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory to describe a pool");
    }
    nrm_status status = fill_place(self, scope, place);
    place->older = older;
    if (status != NRM_OK ||
        !atomic_compare_exchange_strong(&self->place, &older, place)) {
        place_destroy(self, place); /* or another thread was faster */
    }
    return status;
}

/* The place in this life of the context, which is made if there is none yet. */
static nrm_status
find_place(struct nrm__in_order *self, const struct nrm__cuda_scope *scope)
{
    struct nrm__in_order_place *place = atomic_load(&self->place);
    while (place == NULL || place->generation != scope->generation ||
           has_lost_home(place)) {
        NRM_TRY(make_place(self, scope, place));
        place = atomic_load(&self->place);
    }
    return NRM_OK;
}

nrm_status
nrm__in_order_prepare(struct nrm__in_order *self)
{
    struct nrm__cuda_scope scope;
    void *token = nrm__detach();
    nrm_status status = nrm__driver_source_enter(&self->base, &scope);
    if (status == NRM_OK) {
        status = find_place(self, &scope);
        nrm__cuda_leave(&scope);
    }
    nrm__attach(token);
    return status;
}

/* The newest place, if the driver still knows it. */
static struct nrm__in_order_place *
living_place(struct nrm__in_order *self)
{
    struct nrm__in_order_place *place = atomic_load(&self->place);
    int device = nrm_resource_device(&self->base);
    bool lives = place != NULL && nrm__cuda_driver() != NULL && !nrm__is_exiting() &&
                 nrm__cuda_generation(device) == place->generation &&
                 !has_lost_home(place);
    return lives ? place : NULL;
}

/* ---- allocation ------------------------------------------------------------------ */

static void
note_context(void)
{
    void *token = nrm__detach();
    nrm__cuda_foreign_note_current();
    nrm__attach(token);
}

/* What is asked of the pool, on a stream or, without one, for anybody. */
struct call {
    struct nrm__in_order *self;
    nrm_stream *stream;
};

/* Whether there can never be so much: no driver is asked for that, as nobody says what
   one does with managed memory beyond all that there is. */
static bool
is_absurd(const struct nrm__cuda_scope *scope, const nrm_resource *mr, size_t nbytes)
{
    size_t free_nbytes, total_nbytes;
    if (nbytes < HUGE_NBYTES ||
        scope->driver->cuMemGetInfo(&free_nbytes, &total_nbytes) != NRM_CUDA_SUCCESS) {
        return false;
    }
    size_t host = mr->kind == NRM_KIND_MANAGED ? nrm__host_memory_nbytes() : 0;
    return nbytes > total_nbytes + host;
}

static nrm_CUresult
take(const struct nrm__cuda_scope *scope, void *more, size_t nbytes,
     nrm_CUdeviceptr *out)
{
    const struct call *call = more;
    if (is_absurd(scope, &call->self->base, nbytes)) {
        return NRM_CUDA_ERROR_OUT_OF_MEMORY;
    }
    const struct nrm__driver *driver = scope->driver;
    const struct nrm__in_order_place *place = atomic_load(&call->self->place);
    if (call->stream != NULL) {
        return driver->cuMemAllocFromPoolAsync(
            out, nbytes, place->pool, (nrm_CUstream)nrm_stream_handle(call->stream));
    }
    nrm_CUstream stream = place->stream.handle;
    nrm_CUdeviceptr ptr;
    nrm_CUresult code =
        driver->cuMemAllocFromPoolAsync(&ptr, nbytes, place->pool, stream);
    if (code != NRM_CUDA_SUCCESS) {
        return code;
    }
    code = driver->cuStreamSynchronize(stream);
    if (code != NRM_CUDA_SUCCESS) {
        (void)driver->cuMemFreeAsync(ptr, stream);
        return code;
    }
    *out = ptr;
    return NRM_CUDA_SUCCESS;
}

static nrm_status
check(nrm_resource *mr, const struct nrm__cuda_scope *scope)
{
    return find_place(self_of(mr), scope);
}

static const struct nrm__driver_way way = {
    .name = "cuMemAllocFromPoolAsync",
    .call = take,
    .check = check,
};

/* Whether memory came back that nobody had a stream for: it is free when ours is
   done. */
static bool
take_back(nrm_resource *mr)
{
    struct nrm__cuda_scope scope;
    const struct nrm__in_order_place *place = living_place(self_of(mr));
    if (place == NULL || nrm__retired_nbytes(mr) == 0 ||
        nrm__retired_drain((uint64_t)nrm_option_get(NRM_OPT_WAIT_LIMIT)) == 0) {
        return false;
    }
    void *token = nrm__detach();
    if (nrm__cuda_enter_existing(nrm_resource_device(mr), &scope) == NRM_OK) {
        (void)scope.driver->cuStreamSynchronize(place->stream.handle);
        nrm__cuda_leave(&scope);
    }
    nrm__attach(token);
    return true;
}

/* A default stream means another one in each context, and to the driver's pool that of
   a primary one. Where the program has others it gets what is anybody's. */
static bool
is_one_of_many(const nrm_stream *stream)
{
    return nrm__stream_is_special(stream) && nrm__cuda_has_foreign();
}

nrm_status
nrm__in_order_allocate(nrm_resource *mr, const struct nrm__request *request,
                       struct nrm__block *out)
{
    struct call call = {self_of(mr), request->stream};
    if (call.stream != NULL && nrm__stream_is_special(call.stream)) {
        note_context();
    }
    if (call.stream != NULL && is_one_of_many(call.stream)) {
        call.stream = NULL;
    }
    (void)nrm__retired_drain(0);
    nrm_status status = nrm__driver_block_allocate(mr, &way, &call, request, out);
    if (status == NRM_OUT_OF_MEMORY && take_back(mr)) {
        status = nrm__driver_block_allocate(mr, &way, &call, request, out);
    }
    return status;
}

/* ---- giving back ----------------------------------------------------------------- */

static nrm_CUresult
give(const struct nrm__cuda_scope *scope, void *more, nrm_CUdeviceptr ptr)
{
    const struct call *call = more;
    const struct nrm__in_order_place *place = atomic_load(&call->self->place);
    nrm_CUstream stream = call->stream != NULL
                              ? (nrm_CUstream)nrm_stream_handle(call->stream)
                              : place->stream.handle;
    return scope->driver->cuMemFreeAsync(ptr, stream);
}

/* A claimed block that all who could use it are done with, or that `stream` is. */
static void
give_now(nrm_resource *mr, const struct nrm__block *block, nrm_stream *stream)
{
    struct call call = {self_of(mr), stream};
    void *token = nrm__detach();
    nrm__driver_block_free_by(block, "cuMemFreeAsync", give, &call);
    nrm__attach(token);
}

/* Whether the driver knows the stream by its handle, here and now: that of a default
   stream means another one in each context or thread, and after a reset none. */
static bool
can_be_named(const nrm_stream *stream)
{
    const struct nrm__cuda_stream *created = &stream->created;
    return nrm__stream_is_here(stream) && !is_one_of_many(stream) &&
           (created->handle == NULL ||
            nrm__cuda_generation(created->device) == created->generation);
}

void
nrm__in_order_deallocate(nrm_resource *mr, const struct nrm__block *block,
                         nrm_stream *stream)
{
    bool is_mapped = block->record != NULL; /* else it was never handed out */
    if (is_mapped && (stream == NULL || !can_be_named(stream))) {
        nrm__retire(block, nrm__epoch_stamp());
        return;
    }
    give_now(mr, block, stream);
    if (is_mapped) {
        nrm__block_map_forget(block);
    }
}

void
nrm__in_order_release(nrm_resource *mr, const struct nrm__block *block)
{
    give_now(mr, block, NULL);
}

/* ---- what the driver's pool holds ------------------------------------------------ */

static size_t
reserved_nbytes(const struct nrm__in_order_place *place)
{
    uint64_t nbytes = 0;
    const struct nrm__driver *driver = nrm__cuda_driver();
    bool known = driver != NULL &&
                 driver->cuMemPoolGetAttribute(place->pool,
                                               NRM_CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
                                               &nbytes) == NRM_CUDA_SUCCESS;
    return known ? (size_t)nbytes : 0;
}

void
nrm__in_order_statistics(nrm_resource *mr, nrm_statistics *out)
{
    void *token = nrm__detach();
    const struct nrm__in_order_place *place = living_place(self_of(mr));
    out->reserved_bytes += place != NULL ? (int64_t)reserved_nbytes(place) : 0;
    out->parked_bytes += (int64_t)nrm__retired_nbytes(mr);
    nrm__attach(token);
}

/* Frees that are over count as soon as somebody has waited for their stream. */
static nrm_status
trim_entered(const struct nrm__cuda_scope *scope,
             const struct nrm__in_order_place *place, size_t keep_nbytes)
{
    nrm_CUresult code = scope->driver->cuStreamSynchronize(place->stream.handle);
    if (code == NRM_CUDA_SUCCESS) {
        code = scope->driver->cuMemPoolTrimTo(place->pool, keep_nbytes);
    }
    return code == NRM_CUDA_SUCCESS
               ? NRM_OK
               : nrm__cuda_error(code, "cuMemPoolTrimTo on device %d", scope->device);
}

nrm_status
nrm__in_order_trim(nrm_resource *mr, size_t keep_nbytes, size_t *out_nbytes)
{
    struct nrm__cuda_scope scope;
    nrm_status status = NRM_OK;
    (void)nrm__retired_drain((uint64_t)nrm_option_get(NRM_OPT_WAIT_LIMIT));
    void *token = nrm__detach();
    const struct nrm__in_order_place *place = living_place(self_of(mr));
    if (place != NULL &&
        nrm__cuda_enter_existing(nrm_resource_device(mr), &scope) == NRM_OK) {
        size_t before = reserved_nbytes(place);
        status = trim_entered(&scope, place, keep_nbytes);
        size_t after = reserved_nbytes(place);
        *out_nbytes += before > after ? before - after : 0;
        nrm__cuda_leave(&scope);
    }
    nrm__attach(token);
    return status;
}

nrm_status
nrm_cuda_async_pool_handle(nrm_resource *mr, uintptr_t *out)
{
    if (mr->ops->release_block != nrm__in_order_release) {
        return nrm__error(NRM_INVALID_VALUE, "a %s has no memory pool of the driver",
                          nrm_resource_class_name(mr));
    }
    NRM_TRY(nrm__in_order_prepare(self_of(mr)));
    *out = (uintptr_t)atomic_load(&self_of(mr)->place)->pool;
    return NRM_OK;
}

/* ---- the end --------------------------------------------------------------------- */

/* The pool goes when its last pending free is done: the driver sees to that. */
void
nrm__in_order_finish(nrm_resource *mr)
{
    struct nrm__in_order_place *place = atomic_load(&self_of(mr)->place);
    if (nrm__is_exiting()) {
        return;
    }
    void *token = nrm__detach();
    while (place != NULL) {
        struct nrm__in_order_place *older = place->older;
        place_destroy(self_of(mr), place);
        place = older;
    }
    nrm__attach(token);
}
