/* Copies between strided arrays: what calls they become, and on the simulated driver
   that each byte arrives where it should, and no other byte changes. */
#include <string.h>

#include "core/transfer.h"
#include "fixtures.h"
#include "streams.h"

enum { SPACE = 4096, MAX_DIMS = 4 };

struct layout {
    const char *name;
    int n_dims;
    size_t itemsize;
    size_t shape[MAX_DIMS];
    ptrdiff_t dst[MAX_DIMS], src[MAX_DIMS];
    size_t dst_offset, src_offset;
    struct {
        size_t n_calls, n_planes, n_rows, width;
    } expected;
};

/* The last three of each: calls, planes and rows of a call, bytes of a row. */
static const struct layout layouts[] = {
    {"nothing", 1, 4, {0}, {4}, {4}, 0, 0, {0, 0, 0, 0}},
    {"a scalar", 0, 8, {0}, {0}, {0}, 0, 0, {1, 1, 1, 8}},
    {"a vector", 1, 4, {100}, {4}, {4}, 0, 0, {1, 1, 1, 400}},
    {"a C matrix", 2, 4, {8, 16}, {64, 4}, {64, 4}, 0, 0, {1, 1, 1, 512}},
    {"a Fortran matrix", 2, 4, {16, 8}, {4, 64}, {4, 64}, 0, 0, {1, 1, 1, 512}},
    {"ones", 4, 4, {1, 8, 1, 16}, {7, 64, 9, 4}, {1, 64, 3, 4}, 0, 0, {1, 1, 1, 512}},
    {"columns of a matrix", 2, 4, {8, 4}, {16, 4}, {64, 4}, 0, 12, {1, 1, 8, 16}},
    {"every other element", 1, 4, {50}, {4}, {8}, 0, 0, {1, 1, 50, 4}},
    {"both backwards", 1, 4, {50}, {-4}, {-4}, 196, 196, {1, 1, 1, 200}},
    {"a reversal", 1, 4, {10}, {4}, {-4}, 0, 36, {10, 1, 1, 4}},
    {"rows reversed", 2, 1, {6, 40}, {40, 1}, {-50, 1}, 0, 250, {6, 1, 1, 40}},
    {"a repeated row", 2, 4, {5, 8}, {32, 4}, {0, 4}, 0, 0, {5, 1, 1, 32}},
    {"onto itself", 2, 1, {5, 8}, {4, 1}, {8, 1}, 0, 0, {5, 1, 1, 8}},
    {"onto one place", 2, 1, {5, 8}, {0, 1}, {8, 1}, 0, 0, {5, 1, 8, 1}},
    {"a transposition", 2, 4, {6, 8}, {32, 4}, {4, 24}, 0, 0, {6, 1, 8, 4}},
    {"a box", 3, 4, {3, 5, 7}, {140, 28, 4}, {400, 40, 4}, 0, 8, {1, 3, 5, 28}},
    {"joined", 3, 2, {3, 4, 5}, {40, 10, 2}, {64, 16, 2}, 0, 0, {1, 1, 12, 10}},
    {"planes backwards",
     3,
     1,
     {3, 4, 5},
     {20, 5, 1},
     {-80, 8, 1},
     0,
     160,
     {3, 1, 4, 5}},
    {"planes of no rows", 3, 1, {3, 4, 5}, {20, 5, 1}, {33, 8, 1}, 0, 0, {3, 1, 4, 5}},
    {"planes too near", 3, 1, {3, 4, 5}, {24, 6, 1}, {16, 8, 1}, 0, 0, {3, 1, 4, 5}},
    {"planes that swap",
     3,
     4,
     {4, 6, 5},
     {120, 20, 4},
     {20, 80, 4},
     0,
     0,
     {4, 1, 6, 20}},
    {"the larger box",
     4,
     1,
     {2, 3, 4, 5},
     {60, 20, 5, 1},
     {1000, 200, 10, 1},
     0,
     0,
     {2, 3, 4, 5}},
    {"odd bytes", 2, 3, {5, 7}, {40, 3}, {22, 3}, 1, 5, {1, 1, 5, 21}},
};

static struct nrm__transfer
transfer_of(const struct layout *row, enum nrm__direction direction, char *dst,
            const char *src)
{
    struct nrm__transfer transfer = {.dst = dst + row->dst_offset,
                                     .src = src + row->src_offset,
                                     .direction = direction,
                                     .itemsize = row->itemsize,
                                     .n_dims = row->n_dims};
    for (int i = 0; i < row->n_dims; i++) {
        transfer.shape[i] = row->shape[i];
        transfer.dst_strides[i] = row->dst[i];
        transfer.src_strides[i] = row->src[i];
    }
    return transfer;
}

/* What it should do, element by element. */
static void
copy_slowly(const struct layout *row, unsigned char *dst, const unsigned char *src)
{
    size_t n_items = 1;
    for (int i = 0; i < row->n_dims; i++) {
        n_items *= row->shape[i];
    }
    for (size_t n = 0; n < n_items; n++) {
        size_t rest = n;
        ptrdiff_t to = (ptrdiff_t)row->dst_offset, from = (ptrdiff_t)row->src_offset;
        for (int i = row->n_dims - 1; i >= 0; i--) {
            ptrdiff_t index = (ptrdiff_t)(rest % row->shape[i]);
            rest /= row->shape[i];
            to += index * row->dst[i];
            from += index * row->src[i];
        }
        memcpy(dst + to, src + from, row->itemsize);
    }
}

TEST_EACH(a_layout_becomes_as_few_calls_as_its_strides_allow, layouts)
{
    static char space[SPACE];
    struct nrm__transfer transfer = transfer_of(row, NRM__WITHIN, space, space);
    struct nrm__transfer_plan plan;
    nrm__transfer_plan(&transfer, &plan);
    CHECK_EQ(plan.n_calls, row->expected.n_calls);
    CHECK_EQ(plan.n_planes, row->expected.n_planes);
    CHECK_EQ(plan.n_rows, row->expected.n_rows);
    CHECK_EQ(plan.width, row->expected.width);
}

static unsigned char source[SPACE], before[SPACE], expected[SPACE], seen[SPACE];

static void
fill_spaces(void)
{
    for (size_t i = 0; i < SPACE; i++) {
        source[i] = (unsigned char)(i * 31 % 251);
        before[i] = (unsigned char)(255 - i % 7);
    }
    memcpy(expected, before, SPACE);
}

static void
wait_for(struct nrm__cuda_lone_event event)
{
    REQUIRE(event.handle != NULL);
    CHECK_OK(nrm__transfer_query(&event, true));
    nrm__cuda_lone_drop(&event);
}

static void
check_direction(const struct layout *row, enum nrm__direction direction,
                uintptr_t stream)
{
    nrm_CUdeviceptr from = 0, to = 0;
    struct nrm__cuda_lone_event event = {0};
    bool is_captured = true;
    fill_spaces();
    copy_slowly(row, expected, source);
    memcpy(seen, before, SPACE);
    CHECK_EQ(cuda.cuMemAlloc(&from, SPACE), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemAlloc(&to, SPACE), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemcpyHtoD(from, source, SPACE), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemcpyHtoD(to, before, SPACE), NRM_CUDA_SUCCESS);
    char *dst = direction == NRM__TO_HOST ? (char *)seen : (char *)(uintptr_t)to;
    const char *src = direction == NRM__TO_DEVICE ? (const char *)source
                                                  : (const char *)(uintptr_t)from;
    struct nrm__transfer transfer = transfer_of(row, direction, dst, src);
    CHECK_OK(nrm__transfer_submit(-1, &transfer, stream, &event, &is_captured));
    CHECK(!is_captured);
    wait_for(event);
    if (direction != NRM__TO_HOST) {
        CHECK_EQ(cuda.cuMemcpyDtoH(seen, to, SPACE), NRM_CUDA_SUCCESS);
    }
    CHECK(memcmp(seen, expected, SPACE) == 0);
    CHECK_EQ(cuda.cuMemFree(from), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemFree(to), NRM_CUDA_SUCCESS);
}

static void
check_directions(const struct layout *row, uintptr_t stream)
{
    check_direction(row, NRM__TO_DEVICE, stream);
    check_direction(row, NRM__TO_HOST, stream);
    check_direction(row, NRM__WITHIN, stream);
}

/* With batches and without: on the legacy stream, and of an older driver. */
TEST_EACH(every_byte_arrives_and_no_other_changes, layouts)
{
    struct nrm_cudasim_config config = simulator_checked();
    for (int driver = 13000; driver >= 12040; driver -= 960) {
        config.driver = driver;
        simulator_start(&config);
        CHECK_OK(nrm__cuda_init(NULL));
        make_current(0);
        nrm_stream *stream = new_stream();
        check_directions(row, nrm_stream_handle(stream));
        check_directions(row, NRM_STREAM_HANDLE_DEFAULT);
        check_directions(row, NRM_STREAM_HANDLE_PER_THREAD);
        nrm_stream_release(stream);
        CHECK_EQ(simulator_count(NRM_CUDASIM_EVENTS), 0u);
        CHECK_EQ(simulator_tell_races(), 0u);
        simulator_check_faults();
    }
}

TEST_EACH(a_box_is_one_call, layouts)
{
    bool is_box = row->expected.n_planes > 1;
    simulator_start(NULL);
    CHECK_OK(nrm__cuda_init(NULL));
    make_current(0);
    check_directions(row, NRM_STREAM_HANDLE_DEFAULT);
    CHECK_EQ(sim.call_count("cuMemcpy3DAsync"),
             is_box ? 3 * row->expected.n_calls : 0u);
    CHECK_EQ(sim.call_count("cuMemcpy2DAsync"),
             !is_box && row->expected.n_rows > 1 ? 3 * row->expected.n_calls : 0u);
}

TEST(a_box_that_fails_is_told)
{
    simulator_start(NULL);
    CHECK_OK(nrm__cuda_init(NULL));
    make_current(0);
    nrm_CUdeviceptr from = 0;
    struct nrm__cuda_lone_event event = {0};
    bool is_captured;
    const struct layout *row = layouts;
    while (strcmp(row->name, "a box") != 0) {
        row++;
    }
    CHECK_EQ(cuda.cuMemAlloc(&from, SPACE), NRM_CUDA_SUCCESS);
    struct nrm__transfer transfer =
        transfer_of(row, NRM__TO_HOST, (char *)seen, (const char *)(uintptr_t)from);
    sim.fail("cuMemcpy3DAsync", 1, NRM_CUDA_ERROR_OPERATING_SYSTEM, 1);
    CHECK_STATUS(nrm__transfer_submit(-1, &transfer, 0, &event, &is_captured),
                 NRM_CUDA_ERROR);
    CHECK_STR_HAS(nrm_last_error()->message, "a copy of 420 B");
    CHECK(event.handle == NULL);
    CHECK_EQ(cuda.cuMemFree(from), NRM_CUDA_SUCCESS);
}

TEST(without_a_current_context_the_primary_one_is_used)
{
    simulator_start(NULL);
    CHECK_OK(nrm__cuda_init(NULL));
    make_current(0);
    CHECK_EQ(cuda.cuCtxSetCurrent(NULL), NRM_CUDA_SUCCESS);
    nrm_CUcontext context;
    make_current(0);
    nrm_CUdeviceptr to = 0;
    CHECK_EQ(cuda.cuMemAlloc(&to, SPACE), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuCtxSetCurrent(NULL), NRM_CUDA_SUCCESS);
    struct nrm__cuda_lone_event event = {0};
    bool is_captured;
    fill_spaces();
    struct nrm__transfer transfer =
        transfer_of(&layouts[2], NRM__TO_DEVICE, (char *)(uintptr_t)to, (char *)source);
    CHECK_OK(nrm__transfer_submit(-1, &transfer, 0, &event, &is_captured));
    wait_for(event);
    CHECK_EQ(cuda.cuCtxGetCurrent(&context), NRM_CUDA_SUCCESS);
    CHECK(context == NULL);
    make_current(0);
    CHECK_EQ(cuda.cuMemFree(to), NRM_CUDA_SUCCESS);
    simulator_check_faults();
}

TEST(a_producer_is_waited_for)
{
    simulator_start(NULL);
    CHECK_OK(nrm__cuda_init(NULL));
    make_current(0);
    nrm_stream *producer = new_stream(), *consumer = new_stream();
    nrm_CUdeviceptr from = 0;
    struct nrm__cuda_lone_event event = {0};
    bool is_captured;
    CHECK_EQ(cuda.cuMemAlloc(&from, SPACE), NRM_CUDA_SUCCESS);
    hold(producer);
    CHECK_EQ(cuda.cuMemsetD8Async(from, 5, SPACE, handle_of(producer)),
             NRM_CUDA_SUCCESS);
    CHECK_OK(nrm__transfer_wait_for(nrm_stream_handle(consumer),
                                    nrm_stream_handle(producer)));
    nrm_resource *pinned = NULL;
    CHECK_OK(nrm_pinned_create(NULL, &pinned));
    unsigned char *host = allocate(pinned, SPACE);
    memset(host, 0, SPACE);
    struct nrm__transfer transfer = transfer_of(&layouts[2], NRM__TO_HOST, (char *)host,
                                                (const char *)(uintptr_t)from);
    CHECK_OK(nrm__transfer_submit(-1, &transfer, nrm_stream_handle(consumer), &event,
                                  &is_captured));
    let_run();
    CHECK_STATUS(nrm__transfer_query(&event, false), NRM_NOT_FOUND);
    CHECK_EQ(host[0], 0);
    let_go(producer);
    wait_for(event);
    CHECK_EQ(host[0], 5);
    CHECK_EQ(host[399], 5);
    CHECK_EQ(host[400], 0);
    CHECK_OK(nrm_resource_deallocate(pinned, host, SPACE, NULL));
    CHECK_EQ(cuda.cuMemFree(from), NRM_CUDA_SUCCESS);
    nrm_stream_release(producer);
    nrm_stream_release(consumer);
    nrm_resource_release(pinned);
    simulator_check_faults();
}

TEST(a_failing_copy_is_told_and_leaves_nothing_behind)
{
    simulator_start(NULL);
    CHECK_OK(nrm__cuda_init(NULL));
    make_current(0);
    nrm_stream *stream = new_stream();
    struct nrm__cuda_lone_event event = {0};
    bool is_captured;
    struct nrm__transfer transfer = transfer_of(
        &layouts[2], NRM__TO_DEVICE, (char *)(uintptr_t)0x1000, (char *)source);
    CHECK_STATUS(nrm__transfer_submit(-1, &transfer, nrm_stream_handle(stream), &event,
                                      &is_captured),
                 NRM_CUDA_ERROR);
    CHECK_STR_HAS(nrm_last_error()->message, "400 B");
    CHECK_EQ(simulator_count(NRM_CUDASIM_EVENTS), 0u);
    nrm_stream_release(stream);
}

CHECK_MAIN
