/* The failure callback: asked when there is no memory, as long as it says to try
   again. */
#include "base/bits.h"
#include "core/ops.h"
#include "fixtures.h"
#include "nrm/adaptors.h"

/* Frees up to `n_frees` blocks, one a call, the last ones first, and says whether there
   was one. */
struct helper {
    nrm_resource *pool;
    void *blocks[4];
    size_t n_frees, n_calls, n_live, asked_nbytes;
    nrm_status fails_with;
    int n_destroyed;
};

static nrm_status
help(void *context, size_t nbytes, bool *out_retry)
{
    struct helper *helper = context;
    helper->n_calls++;
    helper->asked_nbytes = nbytes;
    if (helper->fails_with != NRM_OK) {
        return helper->fails_with;
    }
    nrm_clear_last_error(); /* the error is that of the request all the same */
    *out_retry = helper->n_frees != 0;
    if (helper->n_frees != 0) {
        helper->n_frees--;
        void *ptr = helper->blocks[--helper->n_live];
        CHECK_OK(nrm_resource_deallocate(helper->pool, ptr, 0, NULL));
    }
    return NRM_OK;
}

static void
destroy(void *context)
{
    ((struct helper *)context)->n_destroyed++;
}

/* Over a pool of four MiB, full. */
static nrm_resource *
make_full(struct helper *helper)
{
    nrm_failure_callback_options options = NRM_OPTIONS(nrm_failure_callback_options);
    nrm_resource *mr = NULL;
    *helper = (struct helper){.pool = pool_over(host_source(), 4 * NRM__MIB)};
    while (helper->n_live < 4) {
        helper->blocks[helper->n_live++] = allocate(helper->pool, NRM__MIB);
    }
    options.callback = help;
    options.destroy = destroy;
    options.context = helper;
    CHECK_OK(nrm_failure_callback_create(helper->pool, &options, &mr));
    return mr;
}

static void
drop(nrm_resource *mr, struct helper *helper)
{
    while (helper->n_live > 0) {
        void *ptr = helper->blocks[--helper->n_live];
        CHECK_OK(nrm_resource_deallocate(helper->pool, ptr, 0, NULL));
    }
    nrm_resource_release(mr);
    CHECK_EQ(helper->n_destroyed, 1);
    CHECK_EQ(live_nbytes(helper->pool), 0);
    nrm_resource_release(helper->pool);
}

TEST(a_request_is_made_again_as_long_as_it_says_so)
{
    struct helper helper;
    nrm_resource *mr = make_full(&helper);
    helper.n_frees = 4;
    void *ptr = allocate(mr, 4 * NRM__MIB);
    CHECK_EQ(helper.n_calls, 4);
    CHECK_EQ(helper.asked_nbytes, 4 * NRM__MIB);
    CHECK_EQ(live_nbytes(mr), 4 * (int64_t)NRM__MIB);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    drop(mr, &helper);
}

TEST(when_it_gives_up_the_request_fails_with_its_own_error)
{
    struct helper helper;
    nrm_resource *mr = make_full(&helper);
    void *ptr = NULL;
    helper.n_frees = 1;
    CHECK_STATUS(nrm_resource_allocate(mr, 2 * NRM__MIB, 0, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK_EQ(helper.n_calls, 2);
    CHECK_STR_HAS(nrm_last_error()->message, "limit 4 MiB");
    CHECK_EQ(nrm_last_error()->requested_nbytes, 2 * NRM__MIB);
    CHECK_EQ(live_nbytes(mr), 0);
    drop(mr, &helper);
}

TEST(what_it_fails_with_the_request_fails_with)
{
    struct helper helper;
    nrm_resource *mr = make_full(&helper);
    void *ptr = NULL;
    helper.fails_with = NRM_CALLBACK_FAILED;
    CHECK_STATUS(nrm_resource_allocate(mr, NRM__MIB, 0, NULL, &ptr),
                 NRM_CALLBACK_FAILED);
    CHECK_EQ(helper.n_calls, 1);
    drop(mr, &helper);
}

TEST(it_is_asked_for_lack_of_memory_only)
{
    struct helper helper;
    nrm_resource *mr = make_full(&helper);
    void *ptr = NULL;
    CHECK_STATUS(nrm_resource_allocate(mr, 100, 3, NULL, &ptr), NRM_INVALID_VALUE);
    CHECK_STATUS(nrm_resource_deallocate(mr, &helper, 0, NULL), NRM_NOT_OWNED);
    CHECK_OK(nrm_resource_allocate(mr, 0, 0, NULL, &ptr));
    CHECK_EQ(helper.n_calls, 0);
    drop(mr, &helper);
}

TEST(it_takes_the_short_way_until_memory_is_short)
{
    struct helper helper;
    nrm_resource *mr = make_full(&helper);
    CHECK_OK(
        nrm_resource_deallocate(helper.pool, helper.blocks[--helper.n_live], 0, NULL));
    for (int i = 0; i < 1000; i++) {
        void *ptr = allocate(mr, 100 + (size_t)i);
        CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    }
    CHECK_EQ(helper.n_calls, 0);
    drop(mr, &helper);
}

TEST(those_over_it_know_that_it_decides)
{
    struct helper helper;
    nrm_resource *mr = make_full(&helper), *over = NULL, *none = NULL;
    nrm_failure_callback_options options = NRM_OPTIONS(nrm_failure_callback_options);
    REQUIRE_OK(nrm_statistics_create(mr, &over));
    CHECK((over->flags & NRM__OPS_ASKS) != 0);
    CHECK((over->flags & NRM__OPS_USER_CODE) == 0);
    nrm_resource_release(over);
    CHECK_STATUS(nrm_failure_callback_create(mr, &options, &none), NRM_INVALID_VALUE);
    options.callback = help;
    CHECK_STATUS(nrm_failure_callback_create(NULL, &options, &none), NRM_INVALID_VALUE);
    options.context = &helper;
    options.calls_user_code = true;
    REQUIRE_OK(nrm_failure_callback_create(mr, &options, &over));
    CHECK((over->flags & NRM__OPS_USER_CODE) != 0);
    nrm_resource_release(over);
    drop(mr, &helper);
}

CHECK_MAIN
