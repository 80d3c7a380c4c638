/*
 * LimitingResourceAdaptor: what is allocated through it never exceeds a number of
 * bytes.
 *
 * Blocks count with their size rounded up to an alignment, as what is behind uses that
 * much. The bytes are booked before the upstream is asked, and booked out when it fails
 * or has the block back; so the limit holds at every moment, and threads that ask at
 * the same time share what is left of it (core/account.h). Threads book on the short
 * way too.
 */
#include <stdio.h>

#include "adaptors/forward.h"
#include "base/assert.h"
#include "base/error.h"
#include "base/given.h"
#include "core/account.h"
#include "nrm/adaptors.h"
#include "nrm/options.h"

#define DEFAULT_ALIGNMENT 256

struct limiting {
    nrm_resource base;
    struct nrm__account account;
};

static const struct nrm__ops limiting_ops;

static struct limiting *
limiting_from(nrm_resource *mr)
{
    NRM_ASSERT(mr->ops == &limiting_ops);
    return (struct limiting *)mr;
}

static nrm_status
over_limit(const struct nrm__account *account, size_t nbytes, size_t allocated)
{
    char asked[32], counts[48] = "", in_use[32], limit[32];
    nrm_format_nbytes(nbytes, asked, sizeof asked);
    nrm_format_nbytes(allocated, in_use, sizeof in_use);
    nrm_format_nbytes(account->limit, limit, sizeof limit);
    if (nrm__account_counted(account, nbytes) != nbytes) {
        char aligned[32];
        nrm_format_nbytes(nrm__account_counted(account, nbytes), aligned,
                          sizeof aligned);
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
    struct nrm__account *account = &limiting_from(mr)->account;
    size_t nbytes = nrm__account_counted(account, request->nbytes), allocated;
    if (!nrm__account_book(account, nbytes, &allocated)) {
        return over_limit(account, request->nbytes, allocated);
    }
    nrm_status status = nrm__allocate(mr->upstream, request, out);
    if (status != NRM_OK) {
        nrm__account_book_out(account, nbytes);
    }
    return status;
}

static void
limiting_deallocate(nrm_resource *mr, const struct nrm__block *block,
                    nrm_stream *stream)
{
    struct nrm__account *account = &limiting_from(mr)->account;
    size_t nbytes = nrm__account_counted(account, block->nbytes);
    nrm__deallocate(mr->upstream, block, stream);
    nrm__account_book_out(account, nbytes);
}

/* It is free memory of its owner in a while, but nobody here can use it any more. */
static void
limiting_forget_block(nrm_resource *mr, const struct nrm__block *block)
{
    struct nrm__account *account = &limiting_from(mr)->account;
    nrm__account_book_out(account, nrm__account_counted(account, block->nbytes));
}

/* What a block grows by must fit before the upstream changes it. Where it does not, the
   dispatcher asks for a block of the new size, which fits even less: so that is refused
   as any request is, and a route can take its fallback. */
static nrm_status
limiting_reallocate(nrm_resource *mr, struct nrm__block *block,
                    const struct nrm__request *request)
{
    struct nrm__account *account = &limiting_from(mr)->account;
    size_t before = nrm__account_counted(account, block->nbytes), allocated;
    size_t after = nrm__account_counted(account, request->nbytes);
    if (after > before && !nrm__account_book(account, after - before, &allocated)) {
        return NRM_NOT_SUPPORTED;
    }
    nrm_status status = nrm__reallocate_in_place(mr->upstream, block, request);
    if (status != NRM_OK && after > before) {
        nrm__account_book_out(account, after - before);
    }
    if (status == NRM_OK && after < before) {
        nrm__account_book_out(account, before - after);
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
    const struct nrm__account *account = &limiting_from(mr)->account;
    *out_allocated_nbytes = atomic_load(&account->allocated);
    *out_limit_nbytes = account->limit;
    return NRM_OK;
}

static void
limiting_check(nrm_resource *mr)
{
    const struct nrm__account *account = &limiting_from(mr)->account;
    size_t allocated = atomic_load(&account->allocated);
    NRM_ASSERT(allocated <= account->limit);
    NRM_ASSERT(allocated % account->alignment == 0);
}

static bool
limiting_front(nrm_resource *mr, struct nrm__front *out)
{
    return nrm__forward_front(mr, &limiting_from(mr)->account, out);
}

/* ---- life ---- */

static const struct nrm__ops limiting_ops = {
    .class_name = "LimitingResourceAdaptor",
    .flags = NRM__OPS_ADAPTOR,
    .allocate = limiting_allocate,
    .deallocate = limiting_deallocate,
    .reallocate = limiting_reallocate,
    .forget_block = limiting_forget_block,
    .renew_block = nrm__forward_renew_block,
    .front = limiting_front,
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
    NRM__COPY_GIVEN(given, options);
    if (given.alignment == 0) {
        given.alignment = DEFAULT_ALIGNMENT;
    }
    NRM_TRY(nrm__alignment_check(given.alignment));
    NRM_TRY(nrm__forward_create(&limiting_ops, upstream, sizeof(struct limiting), &mr));
    struct nrm__account *account = &limiting_from(mr)->account;
    account->limit = given.allocation_limit;
    account->alignment = given.alignment;
    nrm__resource_publish(mr);
    *out = mr;
    return NRM_OK;
}
