/* Memory from other people's functions: what is asked of them, and what is checked. */
#include "simulator.h"

#include "core/hooks.h"
#include "nrm/sources.h"

struct theirs {
    nrm_status answer;      /* of allocate */
    nrm_status answer_back; /* of deallocate */
    bool gives_null;
    size_t offset; /* added to every address */
    size_t nbytes, alignment;
    nrm_stream *stream;
    int n_allocated, n_given_back, n_destroyed;
    void *given_back;
    size_t given_back_nbytes;
    _Alignas(4096) char memory[8192];
};

static struct theirs theirs;

static nrm_status
their_allocate(void *context, size_t nbytes, size_t alignment, nrm_stream *stream,
               void **out)
{
    struct theirs *t = context;
    t->nbytes = nbytes;
    t->alignment = alignment;
    t->stream = stream;
    if (t->answer != NRM_OK) {
        return t->answer;
    }
    t->n_allocated++;
    *out = t->gives_null ? NULL : t->memory + t->offset;
    return NRM_OK;
}

static nrm_status
their_deallocate(void *context, void *ptr, size_t nbytes, nrm_stream *stream)
{
    struct theirs *t = context;
    t->stream = stream;
    t->n_given_back++;
    t->given_back = ptr;
    t->given_back_nbytes = nbytes;
    return t->answer_back;
}

static void
their_destroy(void *context)
{
    ((struct theirs *)context)->n_destroyed++;
}

static nrm_resource *
make(nrm_kind kind, bool calls_user_code)
{
    nrm_resource *mr = NULL;
    nrm_callback_options options = NRM_OPTIONS(nrm_callback_options);
    memset(&theirs, 0, sizeof theirs);
    options.kind = kind;
    options.allocate = their_allocate;
    options.deallocate = their_deallocate;
    options.destroy = their_destroy;
    options.context = &theirs;
    options.calls_user_code = calls_user_code;
    CHECK_OK(nrm_callback_create(&options, &mr));
    return mr;
}

TEST(requests_reach_the_functions_and_come_back)
{
    void *ptr;
    nrm_resource *mr = make(NRM_KIND_HOST, false);
    REQUIRE_OK(nrm_resource_allocate(mr, 1000, 0, nrm_stream_legacy(), &ptr));
    CHECK(ptr == theirs.memory);
    CHECK_EQ(theirs.nbytes, 1000u);
    CHECK_EQ(theirs.alignment, 64u);
    CHECK(theirs.stream == nrm_stream_legacy());
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 5, NULL));
    CHECK_EQ(theirs.n_given_back, 1);
    CHECK(theirs.given_back == ptr);
    CHECK_EQ(theirs.given_back_nbytes, 1000u);
    CHECK_STATUS(nrm_resource_deallocate(mr, ptr, 0, NULL), NRM_NOT_OWNED);
    nrm_resource_release(mr);
    CHECK_EQ(theirs.n_destroyed, 1);
}

TEST(a_block_keeps_the_functions_alive)
{
    void *ptr;
    nrm_block_info info;
    nrm_resource *mr = make(NRM_KIND_HOST, false);
    REQUIRE_OK(nrm_resource_allocate(mr, 100, 0, NULL, &ptr));
    nrm_resource_release(mr);
    CHECK_EQ(theirs.n_destroyed, 0);
    REQUIRE_OK(nrm_block_find(theirs.memory + 50, &info));
    CHECK(info.resource == mr);
    nrm_resource_release(info.resource);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    CHECK_EQ(theirs.n_destroyed, 1);
}

TEST(success_without_memory_is_out_of_memory)
{
    void *ptr;
    nrm_resource *mr = make(NRM_KIND_HOST, false);
    theirs.gives_null = true;
    CHECK_STATUS(nrm_resource_allocate(mr, 1000, 0, NULL, &ptr), NRM_OUT_OF_MEMORY);
    CHECK_STR_HAS(nrm_last_error()->message, "1000 B");
    CHECK_EQ(theirs.n_given_back, 0);
    nrm_resource_release(mr);
}

TEST(a_status_without_a_record_gets_one)
{
    void *ptr;
    nrm_resource *mr = make(NRM_KIND_HOST, false);
    theirs.answer = NRM_CALLBACK_FAILED;
    CHECK_STATUS(nrm_resource_allocate(mr, 1000, 0, NULL, &ptr), NRM_CALLBACK_FAILED);
    CHECK_STR_HAS(nrm_last_error()->message, "1000 B");
    CHECK_EQ(nrm_last_error()->requested_nbytes, 1000u);
    nrm_resource_release(mr);
}

TEST(an_address_that_is_not_aligned_goes_back)
{
    void *ptr;
    char address[32];
    nrm_resource *mr = make(NRM_KIND_HOST, false);
    theirs.offset = 64;
    CHECK_STATUS(nrm_resource_allocate(mr, 1000, 4096, NULL, &ptr), NRM_NOT_SUPPORTED);
    snprintf(address, sizeof address, "%p", (void *)(theirs.memory + 64));
    CHECK_STR_HAS(nrm_last_error()->message, address);
    CHECK_STR_HAS(nrm_last_error()->message, "4096");
    CHECK_EQ(theirs.n_given_back, 1);
    CHECK_EQ(theirs.given_back_nbytes, 1000u);
    REQUIRE_OK(nrm_resource_allocate(mr, 1000, 64, NULL, &ptr));
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    nrm_resource_release(mr);
}

TEST(functions_that_know_of_no_alignment_are_asked_for_more)
{
    void *ptr, *huge;
    nrm_resource *mr = make(NRM_KIND_HOST, true);
    theirs.offset = 64;
    REQUIRE_OK(nrm_resource_allocate(mr, 100, 4096, NULL, &ptr));
    CHECK(ptr == theirs.memory + 4096);
    CHECK_EQ(theirs.nbytes, 100u + 4096u - 64u);
    CHECK_STATUS(nrm_resource_deallocate(mr, theirs.memory + 64, 100, NULL),
                 NRM_NOT_OWNED);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 100, NULL));
    CHECK(theirs.given_back == theirs.memory + 64);
    CHECK_EQ(theirs.given_back_nbytes, 100u + 4096u - 64u);
    CHECK_STATUS(nrm_resource_allocate(mr, SIZE_MAX / 2, SIZE_MAX / 2 + 1, NULL, &huge),
                 NRM_OUT_OF_MEMORY);
    theirs.offset = 32;
    CHECK_STATUS(nrm_resource_allocate(mr, 100, 4096, NULL, &ptr), NRM_NOT_SUPPORTED);
    CHECK_EQ(theirs.n_allocated, theirs.n_given_back);
    nrm_resource_release(mr);
}

TEST(an_error_of_giving_back_is_noted)
{
    void *ptr;
    nrm_error error;
    uint64_t before;
    uint64_t after;
    nrm_resource *mr = make(NRM_KIND_HOST, false);
    REQUIRE_OK(nrm_resource_allocate(mr, 1000, 0, NULL, &ptr));
    nrm__lost_error_get(&error, &before);
    theirs.answer_back = NRM_CALLBACK_FAILED;
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    nrm__lost_error_get(&error, &after);
    CHECK_EQ(after, before + 1);
    nrm_resource_release(mr);
}

static const struct {
    const char *name;
    nrm_kind kind;
    bool user_code;
    bool in_place;
} kinds[] = {
    {"host", NRM_KIND_HOST, false, true},
    {"device", NRM_KIND_DEVICE, false, true},
    {"pinned", NRM_KIND_PINNED, false, false},
    {"managed", NRM_KIND_MANAGED, false, false},
    {"pinned_user_code", NRM_KIND_PINNED, true, true},
};

TEST_EACH(memory_that_a_gpu_may_use_goes_back_when_it_is_done, kinds)
{
    void *ptr;
    nrm_CUcontext context;
    simulator_start(NULL);
    CHECK_OK(nrm__cuda_init(NULL));
    CHECK_EQ(cuda.cuDevicePrimaryCtxRetain(&context, 0), NRM_CUDA_SUCCESS);
    cuda.cuCtxSetCurrent(context);
    CHECK_EQ(sim.hold_stream(NRM_CU_STREAM_LEGACY), 0);
    nrm_CUdeviceptr target;
    CHECK_EQ(cuda.cuMemAlloc(&target, 64), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemsetD8Async(target, 1, 64, NRM_CU_STREAM_LEGACY),
             NRM_CUDA_SUCCESS);
    nrm_resource *mr = make(row->kind, row->user_code);
    CHECK_EQ(nrm_resource_calls_user_code(mr), row->user_code);
    REQUIRE_OK(nrm_resource_allocate(mr, 1000, 0, NULL, &ptr));
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    (void)nrm__retired_drain(2000000);
    CHECK_EQ(theirs.n_given_back, row->in_place ? 1 : 0);
    nrm_resource_release(mr);
    CHECK_EQ(sim.release_stream(NRM_CU_STREAM_LEGACY), 0);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    (void)nrm__retired_drain(UINT64_MAX);
    for (int i = 0; i < 200 && nrm__retired_nbytes(NULL) != 0; i++) {
        usleep(1000);
    }
    usleep(5000); /* the background thread may hold the last one */
    CHECK_EQ(theirs.n_given_back, 1);
    CHECK_EQ(theirs.n_destroyed, 1);
    cuda.cuCtxSetCurrent(NULL);
}

TEST(missing_functions_are_refused)
{
    nrm_resource *mr = NULL;
    nrm_callback_options options = NRM_OPTIONS(nrm_callback_options);
    CHECK_STATUS(nrm_callback_create(NULL, &mr), NRM_INVALID_VALUE);
    options.allocate = their_allocate;
    CHECK_STATUS(nrm_callback_create(&options, &mr), NRM_INVALID_VALUE);
    options.deallocate = their_deallocate;
    options.kind = (nrm_kind)9;
    CHECK_STATUS(nrm_callback_create(&options, &mr), NRM_INVALID_VALUE);
    CHECK(mr == NULL);
}

CHECK_MAIN
