/* Page-locked memory: how it is got, that it is never let go of too early, and what is
   left behind when something fails. */
#include <sys/mman.h>

#include "core/hooks.h"
#include "cuda/context.h"
#include "fixtures.h"
#include "nrm/options.h"
#include "simulator.h"
#include "sources/pinned.h"

#define KIB ((size_t)1024)
#define MIB (1024 * KIB)

static nrm_resource *
start(const struct nrm_cudasim_config *config)
{
    simulator_start(config);
    return pinned_source();
}

/* Everything went back: nothing registered, no faults, and the resource is gone. */
static void
stop(nrm_resource *mr)
{
    (void)nrm__retired_drain(UINT64_MAX);
    for (int i = 0; i < 200 && nrm__pinned_nbytes() != 0; i++) {
        usleep(1000); /* the background thread may hold the last one */
    }
    CHECK_EQ(nrm__pinned_nbytes(), 0u);
    CHECK_EQ(simulator_count(NRM_CUDASIM_REGISTRATIONS), 0u);
    CHECK_EQ(simulator_count(NRM_CUDASIM_HOST_ALLOCATIONS), 0u);
    CHECK_EQ(statistics_of(mr).current_count, 0);
    nrm_resource_release(mr);
    simulator_check_faults();
}

/* ---- getting ---- */

TEST(making_the_resource_initialises_nothing)
{
    char method[128];
    nrm_resource *mr = start(NULL);
    CHECK_EQ(sim.call_count("cuInit"), 0u);
    CHECK_EQ(nrm_resource_kind(mr), NRM_KIND_PINNED);
    CHECK_EQ(nrm_resource_device(mr), NRM_DEVICE_NONE);
    nrm__pinned_method(method, sizeof method);
    CHECK_STR_EQ(method, "");
    stop(mr);
}

/* The addresses that were asked to be registered, in turn. */
static unsigned
registered_addresses(uintptr_t *out, unsigned size)
{
    char text[200];
    uint64_t cursor = 0;
    unsigned n = 0;
    while (n < size && sim.log_read(&cursor, text, sizeof text) == 1) {
        n += sscanf(text, "cuMemHostRegister(0x%zx", (size_t *)&out[n]) == 1;
    }
    return n;
}

static const struct stale {
    const char *name;
    size_t nbytes;
    uint64_t n_refused;
    bool is_refused;
} stales[] = {
    {"a few pages, once", 20 * KIB, 1, false},
    {"huge pages, three times", 3 * MIB, 3, false},
    {"eight times", 20 * KIB, 8, true},
};

/* Kernels that do not know the flag, and Valgrind, map something else instead. */
static bool
is_taken(uintptr_t address, size_t nbytes)
{
    void *ptr = mmap((void *)address, nbytes, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    bool got_another = ptr != MAP_FAILED && munmap(ptr, nbytes) == 0;
    return !got_another || ptr != (void *)address;
}

/* Somebody unmapped memory that was registered, and the kernel gives us the
   addresses. */
TEST_EACH(addresses_that_others_left_registered_are_set_aside, stales)
{
    const struct stale *stale = row;
    uintptr_t addresses[16];
    void *ptr = NULL;
    nrm_resource *mr = start(NULL);
    sim.log_clear();
    sim.fail("cuMemHostRegister", 1, NRM_CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
             stale->n_refused);
    CHECK_STATUS(nrm_resource_allocate(mr, stale->nbytes, 0, NULL, &ptr),
                 stale->is_refused ? NRM_CUDA_ERROR : NRM_OK);
    unsigned n = registered_addresses(addresses, 16);
    CHECK_EQ(n, stale->n_refused + !stale->is_refused);
    for (unsigned i = 0; i < stale->n_refused; i++) {
        /* Reserved: the kernel maps nothing there by its own choice. */
        CHECK(is_taken(addresses[i], stale->nbytes));
        CHECK_EQ(munmap((void *)addresses[i], stale->nbytes), 0);
    }
    if (ptr != NULL) {
        memset(ptr, 1, stale->nbytes);
        CHECK(is_page_locked(ptr));
        CHECK_OK(nrm_resource_deallocate(mr, ptr, stale->nbytes, NULL));
    }
    stop(mr);
}

static const struct {
    const char *name;
    size_t nbytes;
    size_t alignment; /* 0: the kind's */
    size_t expected;
} shapes[] = {
    {"one_byte", 1, 0, 256},
    {"a_page_and_one", 4097, 0, 256},
    {"aligned_to_8", 100, 8, 8},
    {"huge_pages", 4 * MIB + 1, 0, 2 * MIB},
    {"aligned_to_1_MiB", 64 * KIB, MIB, MIB},
    {"aligned_to_64_MiB", 4 * KIB, 64 * MIB, 64 * MIB},
};

TEST_EACH(a_block_is_one_registration_at_its_alignment, shapes)
{
    char *ptr;
    nrm_resource *mr = start(NULL);
    REQUIRE_OK(
        nrm_resource_allocate(mr, row->nbytes, row->alignment, NULL, (void **)&ptr));
    CHECK_ALIGNED(ptr, row->expected);
    CHECK(is_page_locked(ptr));
    CHECK(is_page_locked(ptr + row->nbytes - 1));
    CHECK_EQ(simulator_count(NRM_CUDASIM_REGISTRATIONS), 1u);
    CHECK_EQ(sim.call_count("cuMemHostRegister"), 1u);
    CHECK_EQ(nrm__pinned_nbytes(), (row->nbytes + 4095) / 4096 * 4096);
    CHECK_EQ(ptr[0], 0);
    memset(ptr, 5, row->nbytes);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, row->nbytes, NULL));
    stop(mr);
}

TEST(zeroed_memory_needs_no_second_pass)
{
    unsigned char *ptr;
    nrm_resource *mr = start(NULL);
    REQUIRE_OK(nrm_resource_allocate_zeroed(mr, MIB, 0, NULL, (void **)&ptr));
    for (size_t i = 0; i < MIB; i += 509) {
        REQUIRE_EQ(ptr[i], 0);
    }
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    stop(mr);
}

/* ---- the other way ---- */

TEST(without_registration_cumemhostalloc_serves_and_info_says_why)
{
    char method[128];
    void *ptr;
    nrm_resource *mr = start(NULL);
    sim.set_attribute(0, NRM_CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 0);
    REQUIRE_OK(nrm_resource_allocate(mr, MIB, 0, NULL, &ptr));
    CHECK_EQ(sim.call_count("cuMemHostRegister"), 0u);
    CHECK_EQ(simulator_count(NRM_CUDASIM_HOST_ALLOCATIONS), 1u);
    nrm__pinned_method(method, sizeof method);
    CHECK_STR_HAS(method, "HOST_REGISTER_SUPPORTED 0");
    memset(ptr, 1, MIB);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    stop(mr);
}

static const struct {
    const char *name;
    nrm_CUresult code;
    uint64_t n_registrations; /* that are tried for two blocks */
} refusals[] = {
    {"not_supported", NRM_CUDA_ERROR_NOT_SUPPORTED, 1},
    {"not_permitted", NRM_CUDA_ERROR_NOT_PERMITTED, 2},
};

TEST_EACH(a_driver_that_does_not_register_is_asked_no_more, refusals)
{
    char method[128];
    void *ptr[2];
    nrm_resource *mr = start(NULL);
    sim.fail("cuMemHostRegister", 1, row->code, 0);
    for (int i = 0; i < 2; i++) {
        REQUIRE_OK(nrm_resource_allocate(mr, MIB, MIB, NULL, &ptr[i]));
        CHECK_ALIGNED(ptr[i], MIB);
        memset(ptr[i], 1, MIB);
    }
    CHECK_EQ(sim.call_count("cuMemHostRegister"), row->n_registrations);
    nrm__pinned_method(method, sizeof method);
    CHECK_STR_HAS(method, "cuMemHostAlloc: cuMemHostRegister answered");
    for (int i = 0; i < 2; i++) {
        CHECK_OK(nrm_resource_deallocate(mr, ptr[i], 0, NULL));
    }
    sim.fail("cuMemHostRegister", 1, 0, 0);
    stop(mr);
}

/* ---- failures ---- */

/* Bytes mapped into the process, from the kernel. */
static size_t
mapped_pages(void)
{
    size_t pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file == NULL || fscanf(file, "%zu", &pages) != 1) {
        pages = 0;
    }
    if (file != NULL) {
        fclose(file);
    }
    return pages;
}

TEST(a_refusal_for_want_of_memory_has_all_numbers_and_leaves_nothing)
{
    void *kept;
    void *ptr = (void *)1;
    struct nrm_cudasim_config config = simulator_config();
    config.page_locked_nbytes = 8 * MIB;
    nrm_resource *mr = start(&config);
    REQUIRE_OK(nrm_resource_allocate(mr, 4 * MIB, 0, NULL, &kept));
    CHECK_STATUS(nrm_resource_allocate(mr, 16 * MIB, 0, NULL, &ptr), NRM_OUT_OF_MEMORY);
    size_t before = mapped_pages();
    for (int i = 0; i < 20; i++) {
        CHECK_STATUS(nrm_resource_allocate(mr, 16 * MIB, 0, NULL, &ptr),
                     NRM_OUT_OF_MEMORY);
    }
    CHECK_LT(mapped_pages(), before + 16 * MIB / 4096);
    CHECK(ptr == (void *)1);
    const nrm_error *error = nrm_last_error();
    CHECK_STR_EQ(error->native_name, "CUDA_ERROR_OUT_OF_MEMORY");
    CHECK_STR_HAS(error->message, "16 MiB");
    CHECK_STR_HAS(error->message, "4 MiB page-locked by us");
    CHECK_STR_HAS(error->message, "RLIMIT_MEMLOCK");
    CHECK_EQ(error->requested_nbytes, 16 * MIB);
    CHECK_OK(nrm_resource_deallocate(mr, kept, 0, NULL));
    stop(mr);
}

TEST(more_than_can_be_touched_is_refused_before_it_is_touched)
{
    void *ptr;
    nrm_resource *mr = start(NULL);
    CHECK_STATUS(nrm_resource_allocate(mr, (size_t)1 << 50, 0, NULL, &ptr),
                 NRM_OUT_OF_MEMORY);
    CHECK_STR_HAS(nrm_last_error()->message, "1 PiB");
    CHECK_STR_HAS(nrm_last_error()->message, "without the process being killed");
    CHECK_EQ(sim.call_count("cuMemHostRegister"), 0u);
    CHECK_EQ(sim.call_count("cuMemHostAlloc"), 0u);
    stop(mr);
}

TEST(an_error_of_the_driver_is_told_with_its_name)
{
    void *ptr;
    nrm_resource *mr = start(NULL);
    sim.fail("cuMemHostRegister", 1, NRM_CUDA_ERROR_INVALID_VALUE, 1);
    CHECK_STATUS(nrm_resource_allocate(mr, MIB, 0, NULL, &ptr), NRM_CUDA_ERROR);
    CHECK_STR_EQ(nrm_last_error()->native_name, "CUDA_ERROR_INVALID_VALUE");
    CHECK_STR_HAS(nrm_last_error()->message, "cuMemHostRegister of 1 MiB");
    stop(mr);
}

static const struct {
    const char *name; /* of the call that fails */
} failing[] = {
    {"cuDevicePrimaryCtxGetState"},
    {"cuDevicePrimaryCtxRetain"},
    {"cuCtxGetId"},
    {"cuCtxGetCurrent"},
    {"cuCtxPushCurrent"},
    {"cuThreadExchangeStreamCaptureMode"},
    {"cuDeviceGetAttribute"},
    {"cuMemHostRegister"},
};

TEST_EACH(whatever_call_fails_nothing_is_left_behind, failing)
{
    for (uint64_t nth = 1; nth <= 4; nth++) {
        void *ptr = NULL;
        nrm_CUcontext current = (nrm_CUcontext)&ptr;
        nrm_resource *mr = start(NULL);
        CHECK_EQ(sim.fail(row->name, nth, NRM_CUDA_ERROR_OUT_OF_MEMORY, 1), 0);
        nrm_status status = nrm_resource_allocate(mr, MIB, 0, NULL, &ptr);
        CHECK(status == NRM_OK || status == NRM_OUT_OF_MEMORY);
        CHECK_EQ(sim.fail(row->name, 1, 0, 0), 0);
        if (status == NRM_OK) {
            CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
        }
        else {
            CHECK_STR_EQ(nrm_last_error()->native_name, "CUDA_ERROR_OUT_OF_MEMORY");
            CHECK_EQ(nrm__pinned_nbytes(), 0u);
            CHECK_EQ(simulator_count(NRM_CUDASIM_REGISTRATIONS), 0u);
        }
        REQUIRE_OK(nrm_resource_allocate(mr, MIB, 0, NULL, &ptr));
        CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
        CHECK_EQ(cuda.cuCtxGetCurrent(&current), NRM_CUDA_SUCCESS);
        CHECK(current == NULL);
        stop(mr);
    }
}

TEST(without_a_driver_there_is_no_resource)
{
    nrm_resource *mr = NULL;
    simulator_start(NULL);
    CHECK_OK(nrm__cuda_set_library("/nonexistent/libcuda.so.1"));
    CHECK_STATUS(nrm_pinned_create(NULL, &mr), NRM_CUDA_UNAVAILABLE);
    CHECK(mr == NULL);
}

TEST(a_device_that_cannot_be_is_refused)
{
    nrm_resource *mr = NULL;
    void *ptr;
    simulator_start(NULL);
    nrm_device_options options = NRM_OPTIONS(nrm_device_options);
    options.set_device = true;
    options.device = -2;
    CHECK_STATUS(nrm_pinned_create(&options, &mr), NRM_INVALID_VALUE);
    options.device = 5;
    REQUIRE_OK(nrm_pinned_create(&options, &mr));
    CHECK_STATUS(nrm_resource_allocate(mr, 1, 0, NULL, &ptr), NRM_INVALID_VALUE);
    stop(mr);
}

/* ---- giving back ---- */

TEST(giving_back_never_calls_the_driver)
{
    void *ptr;
    nrm_resource *mr = start(NULL);
    nrm_CUcontext context;
    REQUIRE_OK(nrm_resource_allocate(mr, MIB, 0, NULL, &ptr));
    CHECK_EQ(cuda.cuDevicePrimaryCtxRetain(&context, 0), NRM_CUDA_SUCCESS);
    cuda.cuCtxSetCurrent(context);
    CHECK_EQ(sim.hold_stream(NRM_CU_STREAM_LEGACY), 0);
    nrm_CUdeviceptr target;
    CHECK_EQ(cuda.cuMemAlloc(&target, MIB), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemcpyHtoDAsync(target, ptr, MIB, NRM_CU_STREAM_LEGACY),
             NRM_CUDA_SUCCESS);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    CHECK_STATUS(nrm_resource_deallocate(mr, ptr, 0, NULL), NRM_NOT_OWNED);
    CHECK_EQ(sim.call_count("cuMemHostUnregister"), 0u);
    (void)nrm__retired_drain(5000000);
    CHECK_EQ(sim.call_count("cuMemHostUnregister"), 0u);
    CHECK(is_page_locked(ptr));
    CHECK_EQ(sim.release_stream(NRM_CU_STREAM_LEGACY), 0);
    CHECK_EQ(cuda.cuCtxSynchronize(), NRM_CUDA_SUCCESS);
    stop(mr);
    CHECK_EQ(sim.call_count("cuMemHostUnregister"), 1u);
    cuda.cuCtxSetCurrent(NULL);
}

TEST(a_loop_of_temporaries_does_not_grow)
{
    nrm_resource *mr = start(NULL);
    for (int i = 0; i < 50; i++) {
        void *ptr;
        REQUIRE_OK(nrm_resource_allocate(mr, MIB, 0, NULL, &ptr));
        CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
        CHECK_LE(nrm__pinned_nbytes(), 3 * MIB);
    }
    stop(mr);
}

TEST(an_unregister_that_fails_is_noted_and_the_memory_stays)
{
    void *ptr;
    nrm_error error;
    uint64_t before;
    uint64_t after;
    nrm_resource *mr = start(NULL);
    REQUIRE_OK(nrm_resource_allocate(mr, 64 * KIB, 0, NULL, &ptr));
    nrm__lost_error_get(&error, &before);
    sim.fail("cuMemHostUnregister", 1, NRM_CUDA_ERROR_INVALID_VALUE, 1);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    (void)nrm__retired_drain(UINT64_MAX);
    for (int i = 0; i < 200 && nrm__pinned_nbytes() != 0; i++) {
        usleep(1000);
    }
    nrm__lost_error_get(&error, &after);
    CHECK_EQ(after, before + 1);
    CHECK_EQ(((volatile char *)ptr)[100], 0); /* still mapped */
    cuda.cuMemHostUnregister(ptr);
    munmap(ptr, 64 * KIB);
    stop(mr);
}

static _Thread_local int n_detached; /* how often, and how deep now */
static _Thread_local int depth;

static void *
count_detach(void)
{
    n_detached++;
    depth++;
    return &depth;
}

static void
count_attach(void *token)
{
    depth--;
    CHECK(token == &depth);
}

TEST(allocating_is_detached_and_giving_back_is_not)
{
    static const struct nrm__hooks hooks = {count_detach, count_attach, NULL};
    void *ptr;
    nrm_resource *mr = start(NULL);
    nrm__hooks_set(&hooks);
    n_detached = 0;
    REQUIRE_OK(nrm_resource_allocate(mr, MIB, 0, NULL, &ptr));
    CHECK_GE(n_detached, 1);
    CHECK_EQ(depth, 0);
    n_detached = 0;
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    CHECK_EQ(n_detached, 0);
    stop(mr);
    CHECK_EQ(depth, 0);
}

TEST(an_old_driver_serves_and_takes_back)
{
    struct nrm_cudasim_config config = simulator_config();
    config.driver = 12040;
    nrm_resource *mr = start(&config);
    for (int i = 0; i < 5; i++) {
        void *ptr;
        REQUIRE_OK(nrm_resource_allocate(mr, MIB, 0, NULL, &ptr));
        CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    }
    CHECK_EQ(sim.call_count("cuEventCreate"), 0u);
    stop(mr);
}

/* ---- resets and forks ---- */

TEST(a_block_outlives_a_reset_and_is_not_unregistered_twice)
{
    char *ptr;
    nrm_resource *mr = start(NULL);
    REQUIRE_OK(nrm_resource_allocate(mr, MIB, 0, NULL, (void **)&ptr));
    memset(ptr, 9, MIB);
    CHECK_EQ(cuda.cuDevicePrimaryCtxReset(0), NRM_CUDA_SUCCESS);
    CHECK_EQ(ptr[12345], 9);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    stop(mr);
    CHECK_EQ(sim.call_count("cuMemHostUnregister"), 0u);
}

TEST(a_new_block_after_a_reset_is_locked_again)
{
    void *ptr[2];
    nrm_resource *mr = start(NULL);
    REQUIRE_OK(nrm_resource_allocate(mr, MIB, 0, NULL, &ptr[0]));
    CHECK_EQ(cuda.cuDevicePrimaryCtxReset(0), NRM_CUDA_SUCCESS);
    REQUIRE_OK(nrm_resource_allocate(mr, MIB, 0, NULL, &ptr[1]));
    CHECK(!is_page_locked(ptr[0]));
    CHECK(is_page_locked(ptr[1]));
    CHECK_OK(nrm_resource_deallocate(mr, ptr[0], 0, NULL));
    CHECK_OK(nrm_resource_deallocate(mr, ptr[1], 0, NULL));
    stop(mr);
}

TEST(a_reset_between_entering_and_registering_is_tried_again)
{
    void *ptr;
    nrm_resource *mr = start(NULL);
    nrm_CUcontext context;
    REQUIRE_OK(nrm_resource_allocate(mr, MIB, 0, NULL, &ptr));
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    CHECK_EQ(cuda.cuDevicePrimaryCtxReset(0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuDevicePrimaryCtxRetain(&context, 0), NRM_CUDA_SUCCESS);
    REQUIRE_OK(nrm_resource_allocate(mr, MIB, 0, NULL, &ptr));
    CHECK(is_page_locked(ptr));
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    stop(mr);
}

TEST(renewing_registers_again_without_touching)
{
    struct nrm__block block = {0};
    struct nrm__request request = {.nbytes = MIB, .alignment = 256};
    nrm_resource *mr = start(NULL);
    REQUIRE_OK(nrm__allocate(mr, &request, &block));
    memset(block.ptr, 3, MIB);
    CHECK_OK(mr->ops->renew_block(mr, &block));
    CHECK_EQ(sim.call_count("cuMemHostRegister"), 1u);
    CHECK_EQ(cuda.cuDevicePrimaryCtxReset(0), NRM_CUDA_SUCCESS);
    CHECK(!is_page_locked(block.ptr));
    CHECK_OK(mr->ops->renew_block(mr, &block));
    CHECK_OK(mr->ops->renew_block(mr, &block));
    CHECK(is_page_locked(block.ptr));
    CHECK_EQ(((char *)block.ptr)[777], 3);
    CHECK_EQ(sim.call_count("cuMemHostRegister"), 2u);
    CHECK_OK(nrm_resource_deallocate(mr, block.ptr, 0, NULL));
    stop(mr);
    CHECK_EQ(sim.call_count("cuMemHostUnregister"), 1u);
}

TEST(memory_of_cumemhostalloc_is_lost_with_its_context)
{
    struct nrm__block block = {0};
    struct nrm__request request = {.nbytes = MIB, .alignment = 256};
    nrm_resource *mr = start(NULL);
    sim.set_attribute(0, NRM_CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 0);
    REQUIRE_OK(nrm__allocate(mr, &request, &block));
    CHECK_EQ(cuda.cuDevicePrimaryCtxReset(0), NRM_CUDA_SUCCESS);
    CHECK_STATUS(mr->ops->renew_block(mr, &block), NRM_DEVICE_LOST);
    CHECK_OK(nrm_resource_deallocate(mr, block.ptr, 0, NULL));
    stop(mr);
    CHECK_EQ(sim.call_count("cuMemFreeHost"), 0u);
}

static nrm_resource *parents;
static char *parents_block;

static void
use_in_child(void)
{
    void *ptr;
    uint64_t calls = sim.call_count(NULL);
    CHECK_EQ(parents_block[5], 7);
    CHECK_STATUS(nrm_resource_allocate(parents, MIB, 0, NULL, &ptr),
                 NRM_CUDA_UNAVAILABLE);
    CHECK_STR_HAS(nrm_last_error()->message, "forked");
    CHECK_STR_HAS(nrm_last_error()->message, "spawn");
    CHECK_OK(nrm_resource_deallocate(parents, parents_block, 0, NULL));
    (void)nrm__retired_drain(0);
    CHECK_EQ(sim.call_count(NULL), calls);
}

TEST(a_forked_child_reads_frees_and_gets_a_clear_error)
{
    parents = start(NULL);
    REQUIRE_OK(nrm_resource_allocate(parents, MIB, 0, NULL, (void **)&parents_block));
    memset(parents_block, 7, MIB);
    CHECK_EQ(in_child(use_in_child), 0);
    CHECK(is_page_locked(parents_block));
    CHECK_EQ(parents_block[5], 7);
    CHECK_OK(nrm_resource_deallocate(parents, parents_block, 0, NULL));
    stop(parents);
}

/* ---- captures and threads ---- */

TEST(allocation_leaves_captures_intact)
{
    void *ptr;
    nrm_CUcontext context;
    nrm_CUstream stream;
    nrm_resource *mr = start(NULL);
    CHECK_OK(nrm__cuda_init(NULL));
    CHECK_EQ(cuda.cuDevicePrimaryCtxRetain(&context, 0), NRM_CUDA_SUCCESS);
    cuda.cuCtxSetCurrent(context);
    stream = simulator_begin_capture(NRM_CU_STREAM_NON_BLOCKING,
                                     NRM_CU_STREAM_CAPTURE_MODE_GLOBAL);
    REQUIRE_OK(nrm_resource_allocate(mr, MIB, 0, NULL, &ptr));
    CHECK_EQ(simulator_end_capture(stream), NRM_CUDA_SUCCESS);
    cuda.cuStreamDestroy(stream);
    CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
    cuda.cuCtxSetCurrent(NULL);
    stop(mr);
}

static void
allocate_often(unsigned index, void *mr)
{
    (void)index;
    for (int i = 0; i < 40; i++) {
        char *ptr;
        if (CHECK_OK(nrm_resource_allocate(mr, 64 * KIB, 0, NULL, (void **)&ptr))) {
            memset(ptr, i, 64 * KIB);
            CHECK_OK(nrm_resource_deallocate(mr, ptr, 0, NULL));
        }
    }
}

TEST(many_threads_share_it)
{
    nrm_resource *mr = start(NULL);
    check_threads(4, allocate_often, mr);
    stop(mr);
}

CHECK_MAIN
