/*
 * CallbackMemoryResource: memory from functions that somebody else wrote.
 *
 * What they return is checked, since a handler promises alignment and NumPy relies on
 * it. Page-locked and managed blocks are retired like those of our own sources, so that
 * their functions, too, are called only when the GPU is done. Functions that need an
 * interpreter serve no array: they are called in place, in the thread that gives back.
 * They are not told of an alignment either: where it is more than their kind has, they
 * are asked for so much more that it lies in what they return.
 */
#include <stdio.h>

#include "base/bits.h"
#include "base/error.h"
#include "base/given.h"
#include "core/hooks.h"
#include "core/uses.h"
#include "nrm/options.h"
#include "nrm/sources.h"

struct callback {
    nrm_resource base;
    nrm_callback_options functions;
};

static const nrm_callback_options *
functions_of(const nrm_resource *self)
{
    return &((const struct callback *)self)->functions;
}

/* Makes sure that an error of theirs left a record of its own. */
static nrm_status
failed(nrm_status status, const char *function, size_t nbytes)
{
    char text[32];
    if (nrm_last_error()->status == status) {
        return status;
    }
    nrm_format_nbytes(nbytes, text, sizeof text);
    return nrm__error(status, "the callback that %s memory failed for %s: %s", function,
                      text, nrm_status_text(status));
}

static void
give_back(nrm_resource *self, void *ptr, size_t nbytes, nrm_stream *stream)
{
    const nrm_callback_options *functions = functions_of(self);
    nrm_clear_last_error();
    nrm_status status = functions->deallocate(functions->context, ptr, nbytes, stream);
    if (status == NRM_OK) {
        return;
    }
    (void)failed(status, "gives back", nbytes);
    nrm__lost_error_note(nrm_last_error());
}

/* ---- blocks that are aligned more than what the functions return ---- */

#define EXPONENT_BITS                                                                  \
    6 /* of a tag: of the alignment, below how far in the block begins */

static size_t
slack_of(const nrm_resource *self, size_t alignment)
{
    size_t natural = nrm__kind_alignment(self->kind);
    return functions_of(self)->calls_user_code && alignment > natural
               ? alignment - natural
               : 0;
}

static void
place(struct nrm__block *block, void *ptr, size_t alignment)
{
    size_t start = nrm__align_up((size_t)ptr, alignment);
    block->ptr = (void *)(uintptr_t)start;
    block->tag = (uint64_t)(start - (size_t)ptr) << EXPONENT_BITS |
                 (unsigned)__builtin_ctzll(alignment);
}

static void
give_block_back(nrm_resource *self, const struct nrm__block *block, nrm_stream *stream)
{
    size_t alignment = (size_t)1 << (block->tag & ((1u << EXPONENT_BITS) - 1));
    char *ptr = (char *)block->ptr - (block->tag >> EXPONENT_BITS);
    give_back(self, ptr, block->nbytes + slack_of(self, alignment), stream);
}

/* ---- the calls ---- */

static nrm_status
call_allocate(nrm_resource *self, const struct nrm__request *request, size_t nbytes,
              void **out)
{
    const nrm_callback_options *functions = functions_of(self);
    char asked[32];
    nrm_format_nbytes(request->nbytes, asked, sizeof asked);
    nrm_clear_last_error();
    if (nbytes < request->nbytes) {
        return nrm__error(NRM_OUT_OF_MEMORY,
                          "%s aligned to %zu B are more than there is", asked,
                          request->alignment);
    }
    nrm_status status = functions->allocate(functions->context, nbytes,
                                            request->alignment, request->stream, out);
    if (status != NRM_OK) {
        return failed(status, "allocates", nbytes);
    }
    if (*out == NULL) {
        return nrm__error(NRM_OUT_OF_MEMORY, "the callback has no memory for %s",
                          asked);
    }
    return NRM_OK;
}

static nrm_status
callback_allocate(nrm_resource *self, const struct nrm__request *request,
                  struct nrm__block *out)
{
    size_t slack = slack_of(self, request->alignment);
    size_t nbytes = request->nbytes + slack, needed = request->alignment - slack;
    char asked[32];
    void *ptr = NULL;
    NRM_TRY(call_allocate(self, request, nbytes, &ptr));
    if (!nrm__is_aligned(ptr, needed)) {
        give_back(self, ptr, nbytes, request->stream);
        nrm_format_nbytes(nbytes, asked, sizeof asked);
        return nrm__error(
            NRM_NOT_SUPPORTED,
            "the callback returned %p for %s, which is not aligned to the "
            "%zu bytes asked for",
            ptr, asked, needed);
    }
    place(out, ptr, request->alignment);
    out->capacity = request->nbytes;
    return NRM_OK;
}

static void
deallocate_now(nrm_resource *self, const struct nrm__block *block, nrm_stream *stream)
{
    give_block_back(self, block, stream);
}

static void
deallocate_later(nrm_resource *self, const struct nrm__block *block, nrm_stream *stream)
{
    nrm__retire(block, nrm__epoch_stamp());
}

static void
callback_release(nrm_resource *self, const struct nrm__block *block)
{
    if (!nrm__is_exiting()) {
        give_block_back(self, block, NULL);
    }
}

static nrm_status
allocate_draining(nrm_resource *self, const struct nrm__request *request,
                  struct nrm__block *out)
{
    (void)nrm__retired_drain(0); /* so that a loop of temporaries does not grow */
    return callback_allocate(self, request, out);
}

static void
callback_finish(nrm_resource *self)
{
    const nrm_callback_options *functions = functions_of(self);
    if (functions->destroy != NULL) {
        functions->destroy(functions->context);
    }
}

static const struct nrm__ops callback_ops = {
    .class_name = "CallbackMemoryResource",
    .flags = NRM__OPS_MAPPED | NRM__OPS_OVERLAY,
    .allocate = callback_allocate,
    .deallocate = deallocate_now,
    .finish = callback_finish,
};

static const struct nrm__ops retiring_ops = {
    .class_name = "CallbackMemoryResource",
    .flags = NRM__OPS_MAPPED | NRM__OPS_OVERLAY,
    .allocate = allocate_draining,
    .deallocate = deallocate_later,
    .release_block = callback_release,
    .finish = callback_finish,
};

nrm_status
nrm_callback_create(const nrm_callback_options *options, nrm_resource **out)
{
    nrm_callback_options given = {0};
    nrm_resource *mr;
    NRM__COPY_GIVEN(given, options);
    if (given.allocate == NULL || given.deallocate == NULL) {
        return nrm__error(NRM_INVALID_VALUE,
                          "a callback resource needs a function that allocates and one "
                          "that gives back");
    }
    if ((unsigned)given.kind > NRM_KIND_DEVICE) {
        return nrm__error(NRM_INVALID_VALUE, "%d is no kind of memory",
                          (int)given.kind);
    }
    bool is_shared = given.kind == NRM_KIND_PINNED || given.kind == NRM_KIND_MANAGED;
    NRM_TRY(nrm__resource_create(is_shared && !given.calls_user_code ? &retiring_ops
                                                                     : &callback_ops,
                                 given.kind, NULL, sizeof(struct callback), &mr));
    if (given.calls_user_code) {
        mr->flags |= NRM__OPS_USER_CODE;
    }
    ((struct callback *)mr)->functions = given;
    nrm__resource_publish(mr);
    *out = mr;
    return NRM_OK;
}
