/*
 * FailureCallbackResourceAdaptor: somebody is asked before a request fails for lack of
 * memory.
 *
 * As long as he answers that it is worth another try, one is made: how to free
 * something, and when to give up, he knows. So nobody else tries a second time behind
 * his back (NRM__OPS_ASKS). What can be had without the upstream's long way never
 * fails, and takes the short one.
 */

#include "adaptors/forward.h"
#include "base/assert.h"
#include "base/error.h"
#include "base/given.h"
#include "nrm/adaptors.h"

struct failure_callback {
    nrm_resource base;
    nrm_failure_callback_options given;
};

static const struct nrm__ops failure_callback_ops;

static struct failure_callback *
failure_callback_from(nrm_resource *mr)
{
    NRM_ASSERT(mr->ops == &failure_callback_ops);
    return (struct failure_callback *)mr;
}

static nrm_status
failure_callback_allocate(nrm_resource *mr, const struct nrm__request *request,
                          struct nrm__block *out)
{
    const nrm_failure_callback_options *given = &failure_callback_from(mr)->given;
    for (;;) {
        nrm_status status = nrm__allocate(mr->upstream, request, out);
        if (status != NRM_OUT_OF_MEMORY) {
            return status;
        }
        nrm_error refused = *nrm_last_error();
        bool retry = false;
        NRM_TRY(given->callback(given->context, request->nbytes, &retry));
        if (!retry) {
            return nrm__error_native(status, refused.native_code, refused.native_name,
                                     "%s", refused.message);
        }
    }
}

static bool
failure_callback_front(nrm_resource *mr, struct nrm__front *out)
{
    return nrm__forward_front(mr, NULL, out);
}

static void
failure_callback_finish(nrm_resource *mr)
{
    const nrm_failure_callback_options *given = &failure_callback_from(mr)->given;
    if (given->destroy != NULL) {
        given->destroy(given->context);
    }
}

static const struct nrm__ops failure_callback_ops = {
    .class_name = "FailureCallbackResourceAdaptor",
    .flags = NRM__OPS_ADAPTOR,
    .allocate = failure_callback_allocate,
    .deallocate = nrm__forward_deallocate,
    .renew_block = nrm__forward_renew_block,
    .front = failure_callback_front,
    .statistics = nrm__forward_statistics,
    .finish = failure_callback_finish,
};

nrm_status
nrm_failure_callback_create(nrm_resource *upstream,
                            const nrm_failure_callback_options *options,
                            nrm_resource **out)
{
    nrm_failure_callback_options given = {.size = sizeof given};
    nrm_resource *mr;
    NRM__COPY_GIVEN(given, options);
    if (given.callback == NULL) {
        return nrm__error(NRM_INVALID_VALUE, "there is no callback to ask");
    }
    NRM_TRY(nrm__forward_create(&failure_callback_ops, upstream,
                                sizeof(struct failure_callback), &mr));
    mr->flags |= NRM__OPS_ASKS;
    if (given.calls_user_code) {
        mr->flags |= NRM__OPS_USER_CODE;
    }
    failure_callback_from(mr)->given = given;
    nrm__resource_publish(mr);
    *out = mr;
    return NRM_OK;
}
