/*
 * NEP 49: the functions that NumPy calls for the data of its arrays.
 *
 * NumPy calls them with and without a thread state, with an exception pending, during
 * finalization and in forked children, and from the garbage collector. They run no
 * Python code, touch no object, leave the error indicator alone and read no module
 * state: they adapt the signatures of NEP 49 to those of the core, which gives the
 * interpreter up around what blocks (never in a free). Two of NumPy's habits shape
 * them: the size given to free is not always the size asked for, so it is a hint that
 * nothing depends on; and sort, partition and argsort free a NULL that was never
 * allocated.
 */
#include "python/handler.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/error.h"
#include "core/cells.h"
#include "core/hooks.h"
#include "nrm/options.h"
#include "nrm/pools.h"
#include "nrm/registry.h"
#include "python/errors.h"

/* ---- the four functions ---- */

/* Small blocks are ordinary memory, aligned like that; others as their kind is. */
static size_t
alignment_of(const struct handler *self, size_t nbytes)
{
    return nbytes < self->threshold ? 64 : 0;
}

static void *
failed(struct handler *self)
{
    atomic_fetch_add_explicit(&self->n_failures, 1, memory_order_relaxed);
    return NULL;
}

/* NumPy takes NULL for a failure, so nothing is asked for zero bytes. */
static size_t
at_least_one(size_t nbytes)
{
    return nbytes != 0 ? nbytes : 1;
}

__attribute__((noinline)) static void *
allocate_any(struct handler *self, size_t nbytes)
{
    size_t n = at_least_one(nbytes);
    void *ptr;
    nrm_status status =
        nrm_resource_allocate(self->route, n, alignment_of(self, n), NULL, &ptr);
    return status == NRM_OK ? ptr : failed(self);
}

/* Whatever the alignment of the kind is where small requests are cells. */
static void *
handler_malloc(void *context, size_t nbytes)
{
    struct handler *self = context;
    void *ptr = nrm__cells_allocate(self->route, nbytes);
    return ptr != NULL ? ptr : allocate_any(self, nbytes);
}

/* The same zeroed, on the usual way. */
__attribute__((noinline)) static void *
allocate_zeroed_any(struct handler *self, size_t nbytes)
{
    size_t n = at_least_one(nbytes);
    void *ptr;
    nrm_status status =
        nrm_resource_allocate_zeroed(self->route, n, alignment_of(self, n), NULL, &ptr);
    return status == NRM_OK ? ptr : failed(self);
}

static void *
handler_calloc(void *context, size_t n_items, size_t item_nbytes)
{
    struct handler *self = context;
    size_t n;
    if (__builtin_mul_overflow(n_items, item_nbytes, &n)) {
        (void)nrm__error(NRM_OUT_OF_MEMORY,
                         "%zu items of %zu B are more than an address space holds",
                         n_items, item_nbytes);
        return failed(self);
    }
    void *ptr = nrm__cells_allocate(self->route, n);
    if (ptr == NULL) {
        return allocate_zeroed_any(self, n);
    }
    nrm__short_zero(ptr, n);
    return ptr;
}

/* The core knows the old size, and keeps the old block whole when it fails. */
static void *
handler_realloc(void *context, void *ptr, size_t nbytes)
{
    struct handler *self = context;
    size_t n = at_least_one(nbytes);
    void *moved;
    nrm_status status = nrm_resource_reallocate(self->route, ptr, n,
                                                alignment_of(self, n), NULL, &moved);
    return status == NRM_OK ? moved : failed(self);
}

/* There is nobody to report to: the error is kept for last_error() and for `info`. */
__attribute__((noinline)) static void
note_wrong_free(const struct handler *self)
{
    const nrm_error *error = nrm_last_error();
    if (nrm__is_exiting()) {
        return;
    }
    nrm__lost_error_note(error);
    if (nrm_option_get(NRM_OPT_DEBUG)) {
        fprintf(stderr, "%s: wrong free: %s\n", self->numpy.name, error->message);
        abort();
    }
}

static void
handler_free(void *context, void *ptr, size_t nbytes)
{
    struct handler *self = context;
    (void)nbytes;
    if (nrm__cells_deallocate(self->route, ptr) != NRM_OK) {
        note_wrong_free(self);
    }
}

/* ---- capsules ---- */

/* Runs inside the deallocation of the last array: NumPy has freed its memory
   already. */
static void
destroy_capsule(PyObject *capsule)
{
    struct handler *self = PyCapsule_GetPointer(capsule, HANDLER_CAPSULE_NAME);
    nrm_resource_release(self->route);
    nrm_resource_release(self->fallback);
    nrm_resource_release(self->resource);
    PyMem_RawFree(self);
}

struct handler *
handler_of_capsule(PyObject *capsule)
{
    if (!PyCapsule_IsValid(capsule, HANDLER_CAPSULE_NAME)) {
        return NULL;
    }
    PyDataMem_Handler *numpy = PyCapsule_GetPointer(capsule, HANDLER_CAPSULE_NAME);
    /* Anybody can take the name; the functions are ours alone. */
    bool is_ours =
        numpy->allocator.free == handler_free &&
        strncmp(numpy->name, HANDLER_NAME_PREFIX, sizeof HANDLER_NAME_PREFIX - 1) == 0;
    return is_ours ? (struct handler *)numpy : NULL;
}

static void
write_name(struct handler *self)
{
    static atomic_uint last_number;
    char name[65];
    nrm_resource_name(self->resource, name, sizeof name);
    snprintf(self->numpy.name, sizeof self->numpy.name, HANDLER_NAME_PREFIX "%s#%u",
             name[0] != '\0' ? name : nrm_resource_class_name(self->resource),
             atomic_fetch_add(&last_number, 1) + 1);
}

/* Whether arrays may live in memory of `mr`; otherwise an error that names it. */
static int
check_resource(nrm_resource *mr, const char *role, bool host_only)
{
    char name[65];
    nrm_resource_name(mr, name, sizeof name);
    const char *class_name = nrm_resource_class_name(mr);
    if (nrm_resource_calls_user_code(mr)) {
        PyErr_Format(
            PyExc_TypeError,
            "%s cannot be %s: it calls Python functions, and NumPy frees arrays "
            "where no Python code may run",
            class_name, role);
        return -1;
    }
    nrm_kind kind = nrm_resource_kind(mr);
    if (nrm_kind_is_host_accessible(kind) && (!host_only || kind == NRM_KIND_HOST)) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "%s%s%s%s cannot be %s: its memory is %s, and %s",
                 class_name, name[0] != '\0' ? " '" : "", name,
                 name[0] != '\0' ? "'" : "", role,
                 kind == NRM_KIND_DEVICE ? "device-only" : nrm_kind_name(kind),
                 host_only ? "host memory is needed"
                           : "arrays need memory that the host can access");
    return -1;
}

/* The registry's "host" pool: for small requests, and when all else fails. */
static nrm_resource *
get_host_pool(struct module_state *state)
{
    nrm_resource *host;
    nrm_status status = nrm_registry_get("host", &host);
    if (status != NRM_OK) {
        (void)errors_raise(state, status);
        return NULL;
    }
    if (check_resource(host, "the resource \"host\" behind a handler", true) < 0) {
        nrm_resource_release(host);
        return NULL;
    }
    return host;
}

static int
make_route(struct module_state *state, const struct handler_options *options,
           nrm_resource **out)
{
    nrm_resource *host = get_host_pool(state);
    if (host == NULL) {
        return -1;
    }
    nrm_route_options route = NRM_OPTIONS(nrm_route_options);
    route.large = options->resource;
    route.fallback = options->fallback;
    route.threshold = options->threshold;
    route.small = options->threshold > 0 ? host : NULL;
    route.rescue = options->resource != host ? host : NULL;
    nrm_status status = nrm_route_create(&route, out);
    nrm_resource_release(host);
    if (status != NRM_OK) {
        (void)errors_raise(state, status);
        return -1;
    }
    return 0;
}

/* NULL with an exception. */
static struct handler *
make_handler(struct module_state *state, const struct handler_options *options)
{
    struct handler *self = PyMem_RawCalloc(1, sizeof *self);
    if (self == NULL) {
        (void)PyErr_NoMemory();
        return NULL;
    }
    if (make_route(state, options, &self->route) < 0) {
        PyMem_RawFree(self);
        return NULL;
    }
    self->resource = options->resource;
    self->fallback = options->fallback;
    self->threshold = options->threshold;
    nrm_resource_retain(self->resource);
    if (self->fallback != NULL) {
        nrm_resource_retain(self->fallback);
    }
    self->numpy.version = 1;
    self->numpy.allocator = (PyDataMemAllocator){
        .ctx = self,
        .malloc = handler_malloc,
        .calloc = handler_calloc,
        .realloc = handler_realloc,
        .free = handler_free,
    };
    write_name(self);
    return self;
}

PyObject *
handler_create(struct module_state *state, const struct handler_options *options)
{
    if (check_resource(options->resource, "a handler", false) < 0 ||
        (options->fallback != NULL &&
         check_resource(options->fallback, "the fallback of a handler", true) < 0)) {
        return NULL;
    }
    struct handler *self = make_handler(state, options);
    if (self == NULL) {
        return NULL;
    }
    PyObject *capsule = PyCapsule_New(self, HANDLER_CAPSULE_NAME, destroy_capsule);
    if (capsule == NULL) {
        nrm_resource_release(self->route);
        nrm_resource_release(self->fallback);
        nrm_resource_release(self->resource);
        PyMem_RawFree(self);
        return NULL;
    }
    if (options->is_immortal) {
        compat_set_immortal(capsule);
    }
    return capsule;
}
