/*
 * LimitingResourceAdaptor: what is allocated through it never exceeds a number of bytes.
 *
 * Blocks count with their size rounded up to an alignment, as what is behind uses that
 * much. The bytes are booked before the upstream is asked, and booked out when it fails or
 * has the block back; so the limit holds at every moment, and threads that ask at the same
 * time share what is left of it. Booking compares and exchanges: a request that does not
 * fit never stands in the account, where a smaller one would meet it and fail as well.
 */
#include <stdio.h>
#include <string.h>

#include "adaptors/forward.h"
#include "base/assert.h"
#include "base/bits.h"
#include "base/error.h"
#include "nrm/adaptors.h"
#include "nrm/options.h"

#define DEFAULT_ALIGNMENT 256

struct limiting {
    nrm_resource base;
    size_t limit;
    size_t alignment;
    atomic_size_t allocated; /* booked bytes, at most `limit` */
};

static const struct nrm__ops limiting_ops;

static struct limiting *
limiting_from(nrm_resource *mr)
{
    NRM_ASSERT(mr->ops == &limiting_ops);
    return (struct limiting *)mr;
}

/* ---- the account ---- */

/* No overflow: a request has at most SIZE_MAX / 2 bytes. */
static size_t
counted(const struct limiting *self, size_t nbytes)
{
    return nrm__align_up(nbytes, self->alignment);
}

/* False: it does not fit, and `out_allocated` says what was in the way. Pairs with
   book_out: who finds room finds the memory that made it in the upstream too. */
static bool
book(struct limiting *self, size_t nbytes, size_t *out_allocated)
{
    size_t allocated = atomic_load_explicit(&self->allocated, memory_order_relaxed);
    do {
        if (nbytes > self->limit - allocated) {
            *out_allocated = allocated;
            return false;
        }
    } while (!atomic_compare_exchange_weak_explicit(
        &self->allocated, &allocated, allocated + nbytes, memory_order_acquire,
        memory_order_relaxed));
    return true;
}

/* A block that did not come through here, but goes back through here, was never booked:
   the account ends at 0. */
static void
book_out(struct limiting *self, size_t nbytes)
{
    size_t allocated = atomic_load_explicit(&self->allocated, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(
        &self->allocated, &allocated, allocated - nrm__min(allocated, nbytes),
        memory_order_release, memory_order_relaxed))
        ;
}

static nrm_status
over_limit(const struct limiting *self, size_t nbytes, size_t allocated)
{
    char asked[32], counts[48] = "", in_use[32], limit[32];
    nrm_format_nbytes(nbytes, asked, sizeof asked);
    nrm_format_nbytes(allocated, in_use, sizeof in_use);
    nrm_format_nbytes(self->limit, limit, sizeof limit);
    if (counted(self, nbytes) != nbytes) {
        char aligned[32];
        nrm_format_nbytes(counted(self, nbytes), aligned, sizeof aligned);
        snprintf(counts, sizeof counts, " (counts as %s)", aligned);
    }
    return nrm__error(
        NRM_OUT_OF_MEMORY,
        "over the limit of the LimitingResourceAdaptor: %s asked%s, %s in "
        "use, limit %s",
        asked, counts, in_use, limit);
}

/* ---- blocks ---- */

static nrm_status
limiting_allocate(nrm_resource *mr, const struct nrm__request *request,
                  struct nrm__block *out)
{
    struct limiting *self = limiting_from(mr);
    size_t nbytes = counted(self, request->nbytes), allocated;
    if (!book(self, nbytes, &allocated)) {
        return over_limit(self, request->nbytes, allocated);
    }
    nrm_status status = nrm__allocate(mr->upstream, request, out);
    if (status != NRM_OK) {
        book_out(self, nbytes);
    }
    return status;
}

static void
limiting_deallocate(nrm_resource *mr, const struct nrm__block *block,
                    nrm_stream *stream)
{
    struct limiting *self = limiting_from(mr);
    size_t nbytes = counted(self, block->nbytes);
    nrm__deallocate(mr->upstream, block, stream);
    book_out(self, nbytes);
}

/* What a block grows by must fit before the upstream changes it. Where it does not, the
   dispatcher asks for a block of the new size, which fits even less: so that is refused
   as any request is, and a route can take its fallback. */
static nrm_status
limiting_reallocate(nrm_resource *mr, struct nrm__block *block,
                    const struct nrm__request *request)
{
    struct limiting *self = limiting_from(mr);
    size_t before = counted(self, block->nbytes), allocated;
    size_t after = counted(self, request->nbytes);
    if (after > before && !book(self, after - before, &allocated)) {
        return NRM_NOT_SUPPORTED;
    }
    nrm_status status = nrm__reallocate_in_place(mr->upstream, block, request);
    if (status != NRM_OK && after > before) {
        book_out(self, after - before);
    }
    if (status == NRM_OK && after < before) {
        book_out(self, before - after);
    }
    return status;
}

/* ---- reports ---- */

nrm_status
nrm_limiting_get(nrm_resource *mr, size_t *out_allocated_nbytes,
                 size_t *out_limit_nbytes)
{
    if (mr->ops != &limiting_ops) {
        return nrm__error(NRM_INVALID_VALUE, "a %s has no limit of its own",
                          mr->ops->class_name);
    }
    const struct limiting *self = limiting_from(mr);
    *out_allocated_nbytes = atomic_load(&self->allocated);
    *out_limit_nbytes = self->limit;
    return NRM_OK;
}

static void
limiting_check(nrm_resource *mr)
{
    const struct limiting *self = limiting_from(mr);
    size_t allocated = atomic_load(&self->allocated);
    NRM_ASSERT(allocated <= self->limit);
    NRM_ASSERT(allocated % self->alignment == 0);
}

/* ---- life ---- */

static const struct nrm__ops limiting_ops = {
    .class_name = "LimitingResourceAdaptor",
    .flags = NRM__OPS_ADAPTOR,
    .allocate = limiting_allocate,
    .deallocate = limiting_deallocate,
    .reallocate = limiting_reallocate,
    .renew_block = nrm__forward_renew_block,
    .statistics = nrm__forward_statistics,
    .check = limiting_check,
};

nrm_status
nrm_limiting_create(nrm_resource *upstream, const nrm_limiting_options *options,
                    nrm_resource **out)
{
    nrm_limiting_options given = {.size = sizeof given};
    nrm_resource *mr;
    if (options == NULL) {
        return nrm__error(NRM_INVALID_VALUE, "a limit needs its number of bytes");
    }
    memcpy(&given, options, nrm__min(options->size, sizeof given));
    if (given.alignment == 0) {
        given.alignment = DEFAULT_ALIGNMENT;
    }
    if (!nrm__is_power_of_two(given.alignment)) {
        return nrm__error(NRM_INVALID_VALUE,
                          "the alignment must be a power of two, not %zu B",
                          given.alignment);
    }
    NRM_TRY(nrm__forward_create(&limiting_ops, upstream, sizeof(struct limiting), &mr));
    struct limiting *self = limiting_from(mr);
    self->limit = given.allocation_limit;
    self->alignment = given.alignment;
    nrm__resource_publish(mr);
    *out = mr;
    return NRM_OK;
}
