/* Mapping device memory piece by piece: what is open to whom, what every failing call
   leaves behind, and what the driver's absence says. */
#include "simulator.h"

#include "cuda/context.h"
#include "cuda/vmm.h"

enum { MIB = 1 << 20 };

#define PIECE ((size_t)4 * MIB)
#define RESERVED ((size_t)64 * MIB)

static struct nrm__vmm_range range;
static nrm_CUstream stream;
static unsigned char *host; /* page-locked, of two pieces */

static void
make_current(int device)
{
    nrm_CUcontext context;
    CHECK_EQ(cuda.cuDevicePrimaryCtxRetain(&context, device), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuCtxSetCurrent(context), NRM_CUDA_SUCCESS);
}

static void
start(int n_devices)
{
    struct nrm_cudasim_config config = simulator_config();
    void *ptr = NULL;
    config.devices = n_devices;
    simulator_start(&config);
    CHECK_OK(nrm__cuda_init(NULL));
    make_current(0);
    CHECK_EQ(cuda.cuStreamCreate(&stream, NRM_CU_STREAM_NON_BLOCKING),
             NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemHostAlloc(&ptr, 2 * PIECE, 0), NRM_CUDA_SUCCESS);
    host = ptr;
    CHECK_OK(nrm__vmm_init(&range, 0, RESERVED));
}

static void
check_outstanding(uint64_t reservations, uint64_t pieces)
{
    CHECK_EQ(simulator_count(NRM_CUDASIM_RESERVATIONS), reservations);
    CHECK_EQ(simulator_count(NRM_CUDASIM_MAPPINGS), pieces);
    CHECK_EQ(simulator_count(NRM_CUDASIM_PHYSICAL), pieces);
}

static void
stop(void)
{
    cuda.cuCtxSetCurrent(NULL);
    check_outstanding(0, 0);
    simulator_check_faults();
}

/* Copies `nbytes` of a value to the offset and back. */
static bool
takes_copies(size_t offset, size_t nbytes, unsigned char value)
{
    memset(host, value, nbytes);
    if (cuda.cuMemcpyHtoD(range.base + offset, host, nbytes) != NRM_CUDA_SUCCESS) {
        return false;
    }
    memset(host, 0, nbytes);
    if (cuda.cuMemcpyDtoH(host, range.base + offset, nbytes) != NRM_CUDA_SUCCESS) {
        return false;
    }
    for (size_t i = 0; i < nbytes; i += 4095) {
        if (host[i] != value) {
            return false;
        }
    }
    return host[nbytes - 1] == value;
}

TEST(addresses_are_reserved_without_memory)
{
    size_t free_before, free_after, total;
    start(1);
    CHECK_OK(nrm__vmm_finish(&range));
    CHECK_EQ(cuda.cuMemGetInfo(&free_before, &total), NRM_CUDA_SUCCESS);
    CHECK_OK(nrm__vmm_init(&range, 0, RESERVED - 1));
    CHECK_EQ(cuda.cuMemGetInfo(&free_after, &total), NRM_CUDA_SUCCESS);
    CHECK_EQ(free_after, free_before);
    CHECK_EQ(range.nbytes, RESERVED);
    CHECK_EQ(range.base % range.granularity, 0u);
    check_outstanding(1, 0);
    CHECK_OK(nrm__vmm_finish(&range));
    stop();
}

TEST(pieces_side_by_side_are_one_memory)
{
    struct nrm__vmm_piece pieces[2];
    start(1);
    CHECK_OK(nrm__vmm_map(&range, 0, PIECE, &pieces[0]));
    CHECK_OK(nrm__vmm_map(&range, PIECE, PIECE, &pieces[1]));
    check_outstanding(1, 2);
    CHECK(takes_copies(0, 2 * PIECE, 7));
    CHECK(takes_copies(PIECE - 100, 200, 8));
    CHECK_OK(nrm__vmm_unmap(&range, &pieces[0]));
    check_outstanding(1, 1);
    CHECK(takes_copies(PIECE, PIECE, 9));
    CHECK(!takes_copies(PIECE - 100, 200, 8));
    CHECK_OK(nrm__vmm_unmap(&range, &pieces[1]));
    CHECK_OK(nrm__vmm_finish(&range));
    stop();
}

TEST(a_hole_is_filled_again_with_other_memory)
{
    struct nrm__vmm_piece pieces[3];
    start(1);
    for (size_t i = 0; i < 3; i++) {
        CHECK_OK(nrm__vmm_map(&range, i * PIECE, PIECE, &pieces[i]));
    }
    CHECK(takes_copies(PIECE, PIECE, 3));
    CHECK_OK(nrm__vmm_unmap(&range, &pieces[1]));
    CHECK_OK(nrm__vmm_map(&range, PIECE, PIECE, &pieces[1]));
    CHECK(takes_copies(PIECE / 2, 2 * PIECE, 4));
    for (size_t i = 0; i < 3; i++) {
        CHECK_OK(nrm__vmm_unmap(&range, &pieces[i]));
    }
    CHECK_OK(nrm__vmm_finish(&range));
    stop();
}

TEST(what_cannot_be_mapped_is_refused)
{
    struct nrm__vmm_piece first, second;
    start(1);
    CHECK_EQ(nrm__vmm_map(&range, 4096, PIECE, &first), NRM_INVALID_VALUE);
    CHECK_EQ(nrm__vmm_map(&range, 0, 0, &first), NRM_INVALID_VALUE);
    CHECK_EQ(nrm__vmm_map(&range, 0, PIECE + 1, &first), NRM_INVALID_VALUE);
    CHECK_EQ(nrm__vmm_map(&range, RESERVED, PIECE, &first), NRM_INVALID_VALUE);
    CHECK_EQ(nrm__vmm_map(&range, RESERVED - PIECE, 2 * PIECE, &first),
             NRM_INVALID_VALUE);
    CHECK_EQ(sim.call_count("cuMemCreate"), 0u);
    CHECK_OK(nrm__vmm_map(&range, 0, PIECE, &first));
    CHECK_EQ(nrm__vmm_map(&range, 0, PIECE, &second), NRM_CUDA_ERROR);
    CHECK_STR_EQ(nrm_last_error()->native_name, "CUDA_ERROR_INVALID_VALUE");
    check_outstanding(1, 1);
    CHECK_EQ(nrm__vmm_finish(&range), NRM_INVALID_VALUE);
    CHECK_OK(nrm__vmm_unmap(&range, &first));
    CHECK_OK(nrm__vmm_finish(&range));
    stop();
}

TEST(more_than_the_device_has_is_out_of_memory)
{
    struct nrm__vmm_range large;
    struct nrm__vmm_piece piece;
    start(1);
    REQUIRE_OK(nrm__vmm_init(&large, 0, (size_t)16 << 30)); /* it has 8 GiB */
    CHECK_EQ(nrm__vmm_map(&large, 0, (size_t)16 << 30, &piece), NRM_OUT_OF_MEMORY);
    CHECK_STR_EQ(nrm_last_error()->native_name, "CUDA_ERROR_OUT_OF_MEMORY");
    CHECK_OK(nrm__vmm_finish(&large));
    CHECK_OK(nrm__vmm_finish(&range));
    stop();
}

/* ---- failing calls ---- */

static const struct {
    const char *name;
    bool on_init, on_map, on_unmap, on_finish; /* where it is called */
} calls[] = {
    {"cuMemGetAllocationGranularity", .on_init = true},
    {"cuMemAddressReserve", .on_init = true},
    {"cuMemCreate", .on_map = true},
    {"cuMemMap", .on_map = true},
    {"cuMemRelease", .on_map = true},
    {"cuMemSetAccess", .on_map = true},
    {"cuMemUnmap", .on_unmap = true},
    {"cuMemAddressFree", .on_finish = true},
};

static void
fail_next(int row)
{
    CHECK_EQ(sim.fail(calls[row].name, 1, NRM_CUDA_ERROR_OPERATING_SYSTEM, 1), 0);
}

static void
check_failed(nrm_status status, int row)
{
    CHECK_EQ(status, NRM_CUDA_ERROR);
    CHECK_STR_EQ(nrm_last_error()->native_name, "CUDA_ERROR_OPERATING_SYSTEM");
    CHECK_STR_HAS(nrm_last_error()->message, calls[row].name);
}

TEST_EACH(a_call_that_fails_once_leaves_nothing_behind, calls)
{
    int i = (int)((const __typeof__(calls[0]) *)row - calls);
    struct nrm__vmm_piece first, second;
    start(1);
    if (calls[i].on_init) {
        struct nrm__vmm_range other;
        fail_next(i);
        check_failed(nrm__vmm_init(&other, 0, RESERVED), i);
        check_outstanding(1, 0);
    }
    CHECK_OK(nrm__vmm_map(&range, 0, PIECE, &first));
    if (calls[i].on_map) {
        fail_next(i);
        check_failed(nrm__vmm_map(&range, PIECE, PIECE, &second), i);
        check_outstanding(1, 1);
    }
    CHECK_OK(nrm__vmm_map(&range, PIECE, PIECE, &second));
    if (calls[i].on_unmap) {
        fail_next(i);
        check_failed(nrm__vmm_unmap(&range, &second), i);
        check_outstanding(1, 2);
        CHECK(takes_copies(0, 2 * PIECE, 5));
        CHECK_OK(nrm__vmm_unmap(&range, &first));
        CHECK_EQ(nrm__vmm_finish(&range), NRM_INVALID_VALUE); /* the other is there */
        CHECK_OK(nrm__vmm_map(&range, 0, PIECE, &first));
    }
    CHECK_OK(nrm__vmm_unmap(&range, &second));
    CHECK_OK(nrm__vmm_unmap(&range, &first));
    if (calls[i].on_finish) {
        fail_next(i);
        check_failed(nrm__vmm_finish(&range), i);
        check_outstanding(1, 0);
    }
    CHECK_OK(nrm__vmm_finish(&range));
    stop();
}

TEST_EACH(a_call_that_fails_for_good_loses_no_memory_of_others, calls)
{
    int i = (int)((const __typeof__(calls[0]) *)row - calls);
    struct nrm__vmm_piece first, second;
    start(1);
    CHECK_OK(nrm__vmm_map(&range, 0, PIECE, &first));
    CHECK_EQ(sim.fail(calls[i].name, 1, NRM_CUDA_ERROR_OPERATING_SYSTEM, 0), 0);
    if (calls[i].on_map) {
        check_failed(nrm__vmm_map(&range, PIECE, PIECE, &second), i);
    }
    CHECK(takes_copies(0, PIECE, 6));
    CHECK_EQ(sim.fail(calls[i].name, 1, 0, 1), 0);
    CHECK_OK(nrm__vmm_unmap(&range, &first));
    CHECK_OK(nrm__vmm_finish(&range));
    cuda.cuCtxSetCurrent(NULL);
    CHECK_EQ(simulator_count(NRM_CUDASIM_MAPPINGS), 0u);
    simulator_check_faults();
}

/* ---- peers ---- */

static nrm_CUstream
stream_of(int device)
{
    nrm_CUstream made = NULL;
    make_current(device);
    CHECK_EQ(cuda.cuStreamCreate(&made, NRM_CU_STREAM_NON_BLOCKING), NRM_CUDA_SUCCESS);
    return made;
}

TEST(a_peer_reaches_what_is_mapped_and_what_will_be)
{
    struct nrm__vmm_piece first, second;
    start(2);
    CHECK_OK(nrm__vmm_map(&range, 0, PIECE, &first));
    nrm_CUstream peer = stream_of(1);
    CHECK_EQ(cuda.cuMemsetD8Async(range.base, 1, PIECE, peer),
             NRM_CUDA_ERROR_INVALID_VALUE);
    CHECK_OK(nrm__vmm_add_peer(&range, 1));
    CHECK_EQ(cuda.cuMemsetD8Async(range.base, 1, PIECE, peer), NRM_CUDA_SUCCESS);
    CHECK_OK(nrm__vmm_map(&range, PIECE, PIECE, &second));
    CHECK_EQ(cuda.cuMemsetD8Async(range.base, 1, 2 * PIECE, peer), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamSynchronize(peer), NRM_CUDA_SUCCESS);
    make_current(0);
    CHECK(takes_copies(0, 2 * PIECE, 2));
    CHECK_OK(nrm__vmm_unmap(&range, &first));
    CHECK_OK(nrm__vmm_unmap(&range, &second));
    CHECK_OK(nrm__vmm_finish(&range));
    stop();
}

TEST(a_peer_that_cannot_be_added_changes_nothing)
{
    struct nrm__vmm_piece first, second;
    start(2);
    CHECK_OK(nrm__vmm_map(&range, 0, PIECE, &first));
    CHECK_EQ(sim.fail("cuMemSetAccess", 1, NRM_CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, 1),
             0);
    CHECK_EQ(nrm__vmm_add_peer(&range, 1), NRM_CUDA_ERROR);
    CHECK_STR_EQ(nrm_last_error()->native_name, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED");
    CHECK_EQ(nrm__vmm_add_peer(&range, 2), NRM_INVALID_VALUE);
    CHECK_OK(nrm__vmm_map(&range, PIECE, PIECE, &second));
    CHECK_EQ(cuda.cuMemsetD8Async(range.base + PIECE, 1, PIECE, stream_of(1)),
             NRM_CUDA_ERROR_INVALID_VALUE);
    make_current(0);
    CHECK_OK(nrm__vmm_unmap(&range, &first));
    CHECK_OK(nrm__vmm_unmap(&range, &second));
    CHECK_OK(nrm__vmm_finish(&range));
    stop();
}

/* What another thread does right before or right after the next cuMemSetAccess. */
static nrm_cuMemSetAccess_fn *real_set_access;
static void (*just_before)(void), (*just_after)(void);

static void
run_once(void (**what)(void))
{
    void (*once)(void) = *what;
    *what = NULL;
    if (once != NULL) {
        once();
    }
}

static nrm_CUresult
set_access_meanwhile(nrm_CUdeviceptr ptr, size_t nbytes,
                     const nrm_CUmemAccessDesc *access, size_t n_access)
{
    run_once(&just_before);
    nrm_CUresult code = real_set_access(ptr, nbytes, access, n_access);
    run_once(&just_after);
    return code;
}

/* The driver's table is filled once and read by everybody; here one entry is
   changed. */
static void
interleave(void (*before)(void), void (*after)(void))
{
    struct nrm__driver *driver = (struct nrm__driver *)nrm__cuda_driver();
    real_set_access = driver->cuMemSetAccess;
    driver->cuMemSetAccess = set_access_meanwhile;
    just_before = before;
    just_after = after;
}

static struct nrm__vmm_piece first_piece;

static void
add_the_peer(void)
{
    CHECK_OK(nrm__vmm_add_peer(&range, 1));
}

static void
unmap_the_first(void)
{
    CHECK_OK(nrm__vmm_unmap(&range, &first_piece));
}

TEST(a_peer_added_while_a_piece_is_opened_reaches_it)
{
    struct nrm__vmm_piece piece;
    start(2);
    interleave(NULL, add_the_peer);
    CHECK_OK(nrm__vmm_map(&range, 0, PIECE, &piece));
    CHECK(just_after == NULL);
    nrm_CUstream peer = stream_of(1);
    CHECK_EQ(cuda.cuMemsetD8Async(range.base, 1, PIECE, peer), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamSynchronize(peer), NRM_CUDA_SUCCESS);
    CHECK_OK(nrm__vmm_unmap(&range, &piece));
    CHECK_OK(nrm__vmm_finish(&range));
    stop();
}

TEST(a_piece_that_goes_while_a_peer_is_added_is_no_error)
{
    struct nrm__vmm_piece second;
    start(2);
    CHECK_OK(nrm__vmm_map(&range, 0, PIECE, &first_piece));
    CHECK_OK(nrm__vmm_map(&range, PIECE, PIECE, &second));
    interleave(unmap_the_first, NULL);
    CHECK_OK(nrm__vmm_add_peer(&range, 1));
    CHECK(just_before == NULL);
    nrm_CUstream peer = stream_of(1);
    CHECK_EQ(cuda.cuMemsetD8Async(range.base + PIECE, 1, PIECE, peer),
             NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuStreamSynchronize(peer), NRM_CUDA_SUCCESS);
    CHECK_OK(nrm__vmm_unmap(&range, &second));
    CHECK_OK(nrm__vmm_finish(&range));
    stop();
}

/* Maps and unmaps in its own part of the range while another thread adds the peer. */
static void
change(unsigned index, void *arg)
{
    struct nrm__vmm_piece *pieces = arg;
    if (index == 0) {
        CHECK_OK(nrm__vmm_add_peer(&range, 1));
        return;
    }
    for (int i = 0; i < 20; i++) {
        CHECK_OK(nrm__vmm_map(&range, index * PIECE, PIECE, &pieces[index]));
        if (i != 19) {
            CHECK_OK(nrm__vmm_unmap(&range, &pieces[index]));
        }
    }
}

TEST(a_peer_added_while_others_map_reaches_everything)
{
    struct nrm__vmm_piece pieces[4];
    for (int round = 0; round < 10; round++) {
        start(2);
        CHECK_OK(nrm__vmm_map(&range, 0, PIECE, &pieces[0]));
        check_threads(4, change, pieces);
        nrm_CUstream peer = stream_of(1);
        CHECK_EQ(cuda.cuMemsetD8Async(range.base, 1, 4 * PIECE, peer),
                 NRM_CUDA_SUCCESS);
        CHECK_EQ(cuda.cuStreamSynchronize(peer), NRM_CUDA_SUCCESS);
        for (int i = 0; i < 4; i++) {
            CHECK_OK(nrm__vmm_unmap(&range, &pieces[i]));
        }
        CHECK_OK(nrm__vmm_finish(&range));
        stop();
    }
}

/* ---- when the GPU still works ---- */

TEST(unmapping_does_not_wait_and_early_unmapping_is_a_fault)
{
    struct nrm__vmm_piece used, unused;
    start(1);
    CHECK_OK(nrm__vmm_map(&range, 0, PIECE, &used));
    CHECK_OK(nrm__vmm_map(&range, PIECE, PIECE, &unused));
    CHECK_EQ(sim.hold_stream(stream), 0);
    CHECK_EQ(cuda.cuMemsetD8Async(range.base, 1, PIECE, stream), NRM_CUDA_SUCCESS);
    CHECK_OK(nrm__vmm_unmap(&range, &unused));
    CHECK_OK(nrm__vmm_unmap(&range, &used)); /* what a pool must never do */
    CHECK_EQ(cuda.cuStreamQuery(stream), NRM_CUDA_ERROR_NOT_READY);
    CHECK_EQ(sim.fault_count(), 0u);
    CHECK_EQ(sim.release_stream(stream), 0);
    CHECK_EQ(cuda.cuStreamSynchronize(stream), NRM_CUDA_SUCCESS);
    CHECK_GE(sim.fault_count(), 1u);
    CHECK_OK(nrm__vmm_finish(&range));
    check_outstanding(0, 0);
    cuda.cuCtxSetCurrent(NULL);
}

TEST(memory_is_mapped_during_a_capture)
{
    struct nrm__vmm_piece piece;
    nrm_CUgraph graph = NULL;
    start(1);
    CHECK_EQ(cuda.cuStreamBeginCapture(stream, NRM_CU_STREAM_CAPTURE_MODE_GLOBAL),
             NRM_CUDA_SUCCESS);
    CHECK_OK(nrm__vmm_map(&range, 0, PIECE, &piece));
    CHECK_OK(nrm__vmm_unmap(&range, &piece));
    CHECK_EQ(cuda.cuStreamEndCapture(stream, &graph), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuGraphDestroy(graph), NRM_CUDA_SUCCESS);
    CHECK_OK(nrm__vmm_finish(&range));
    stop();
}

TEST(after_a_reset_everything_can_be_given_back)
{
    struct nrm__vmm_piece piece;
    start(1);
    CHECK_OK(nrm__vmm_map(&range, 0, PIECE, &piece));
    CHECK_EQ(cuda.cuDevicePrimaryCtxReset(0), NRM_CUDA_SUCCESS);
    CHECK_OK(nrm__vmm_unmap(&range, &piece));
    CHECK_OK(nrm__vmm_finish(&range));
    stop();
}

/* ---- where it cannot be done ---- */

TEST(a_device_without_it_says_so)
{
    size_t granularity;
    simulator_start(NULL);
    CHECK_STR_HAS(nrm__vmm_reason(0), "not initialised");
    CHECK_OK(nrm__cuda_init(NULL));
    CHECK(nrm__vmm_reason(0) == NULL);
    CHECK_STR_HAS(nrm__vmm_reason(1), "no such device");
    simulator_start(NULL);
    sim.set_attribute(0, NRM_CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                      0);
    CHECK_EQ(nrm__vmm_granularity(0, &granularity), NRM_NOT_SUPPORTED);
    CHECK_STR_HAS(nrm_last_error()->message, "device does not support virtual");
    CHECK_EQ(nrm__vmm_init(&range, 0, RESERVED), NRM_NOT_SUPPORTED);
}

/* Which call of cuGetProcAddress asks for the name. */
static unsigned
row_of(const char *name)
{
    static const char *const names[] = {
#define X(name, symbol, version, required, result, arguments) #name,
        NRM_CUDA_CORE_CALLS(X)
#undef X
    };
    unsigned i = 0;
    while (strcmp(names[i], name) != 0) {
        i++;
    }
    return i + 1;
}

TEST(a_driver_without_one_of_the_calls_says_so)
{
    size_t granularity;
    simulator_start(NULL);
    CHECK_EQ(sim.fail("cuGetProcAddress", row_of("cuMemUnmap"),
                      NRM_CUDA_ERROR_NOT_FOUND, 1),
             0);
    CHECK_EQ(nrm__vmm_granularity(0, &granularity), NRM_NOT_SUPPORTED);
    CHECK_STR_HAS(nrm_last_error()->message, "the driver lacks calls");
    CHECK_STR_EQ(nrm__cuda_missing_symbols(), "cuMemUnmap");
}

CHECK_MAIN
