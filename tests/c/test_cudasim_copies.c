/* Batches and boxes on the simulated driver: what tests/gpu/rules/ cannot ask of a real
   one. */
#include "cudasim_machine.h"

enum { N = 4, NBYTES = 256 };

static nrm_CUstream stream;
static nrm_CUdeviceptr ptr;

static bool
begin(int check)
{
    struct nrm_cudasim_config config = machine();
    config.check = check;
    return start_with(&config) && CHECK_EQ(cu.cuStreamCreate(&stream, 1), 0) &&
           CHECK_EQ(cu.cuMemAlloc(&ptr, (size_t)2 * N * NBYTES), 0) &&
           CHECK_EQ(cu.cuMemsetD8(ptr, 9, (size_t)2 * N * NBYTES), 0) &&
           CHECK_EQ(cu.cuCtxSynchronize(), 0);
}

struct batch {
    nrm_CUdeviceptr dsts[N];
    nrm_CUdeviceptr srcs[N];
    size_t sizes[N];
    nrm_CUmemcpyAttributes attributes[N];
    size_t first_copies[N];
    size_t n_attributes;
    size_t failed;
};

/* Whole pieces from the host to the first half of the memory. */
static struct batch
batch_of(const unsigned char *host, unsigned int order)
{
    struct batch batch = {.n_attributes = 1, .failed = 4711};
    for (size_t i = 0; i < N; i++) {
        batch.dsts[i] = ptr + i * NBYTES;
        batch.srcs[i] = (uintptr_t)host + i * NBYTES;
        batch.sizes[i] = NBYTES;
        batch.attributes[i].srcAccessOrder = order;
    }
    return batch;
}

static nrm_CUresult
copy(struct batch *batch)
{
    return cu.cuMemcpyBatchAsync(batch->dsts, batch->srcs, batch->sizes, N,
                                 batch->attributes, batch->first_copies,
                                 batch->n_attributes, &batch->failed, stream);
}

static int
byte_at(size_t offset)
{
    unsigned char byte = 0;
    CHECK_EQ(cu.cuCtxSynchronize(), 0);
    return cu.cuMemcpyDtoH(&byte, ptr + offset, 1) == 0 ? byte : -1;
}

TEST(the_copies_of_a_batch_are_made_last_to_first)
{
    unsigned char *host = pages(4096, 0);
    REQUIRE(begin(0));
    struct batch batch = batch_of(host, NRM_CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
    for (size_t i = 0; i < N; i++) {
        host[i * NBYTES] = (unsigned char)(i + 1);
        batch.dsts[i] = ptr;
    }
    CHECK_EQ(copy(&batch), 0);
    CHECK_EQ(byte_at(0), 1);
    CHECK_EQ(batch.failed, SIZE_MAX);
}

TEST(a_batch_with_a_wrong_copy_does_nothing)
{
    unsigned char *host = pages(4096, 1);
    REQUIRE(begin(0));
    struct batch batch = batch_of(host, NRM_CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
    batch.sizes[2] = MIB;
    CHECK_EQ(copy(&batch), NRM_CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(batch.failed, 2u);
    CHECK_EQ(outstanding(NRM_CUDASIM_OPERATIONS), 0u);
    CHECK_EQ(byte_at(0), 9);
}

/* Attributes go on to the next ones; each copy has its own order. */
TEST(each_copy_is_read_when_its_attributes_say)
{
    void *pinned;
    REQUIRE(begin(0));
    CHECK_EQ(cu.cuMemHostAlloc(&pinned, 4096, 0), 0);
    memset(pinned, 1, 4096);
    struct batch batch = batch_of(pinned, NRM_CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
    batch.n_attributes = 2;
    batch.first_copies[1] = 2;
    batch.attributes[1].srcAccessOrder = NRM_CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
    CHECK_EQ(sim.nrm_cudasim_hold_stream(stream), 0);
    CHECK_EQ(copy(&batch), 0);
    memset(pinned, 2, 4096);
    CHECK_EQ(sim.nrm_cudasim_release_stream(stream), 0);
    CHECK_EQ(byte_at(NBYTES), 2);
    CHECK_EQ(byte_at((size_t)2 * NBYTES), 1);
    CHECK_EQ(byte_at((size_t)3 * NBYTES), 1);
    CHECK_EQ(cu.cuMemFreeHost(pinned), 0);
}

TEST(pageable_memory_that_a_device_reads_is_read_when_the_order_says)
{
    unsigned char *host = pages(4096, 1);
    REQUIRE(begin(0));
    sim.nrm_cudasim_set_attribute(0, NRM_CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, 1);
    CHECK_EQ(sim.nrm_cudasim_hold_stream(stream), 0);
    struct batch batch = batch_of(host, NRM_CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
    CHECK_EQ(copy(&batch), 0);
    batch = batch_of(host, NRM_CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL);
    for (size_t i = 0; i < N; i++) {
        batch.dsts[i] += (size_t)N * NBYTES;
    }
    CHECK_EQ(copy(&batch), 0);
    memset(host, 2, 4096);
    CHECK_EQ(sim.nrm_cudasim_release_stream(stream), 0);
    CHECK_EQ(byte_at(0), 2);
    CHECK_EQ(byte_at((size_t)N * NBYTES), 1);
}

TEST(a_source_that_is_not_mapped_is_a_fault_and_an_error)
{
    unsigned char *host = pages(4096, 1);
    REQUIRE(begin(0));
    CHECK_EQ(munmap(host, 4096), 0);
    struct batch batch = batch_of(host, NRM_CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL);
    CHECK_EQ(copy(&batch), NRM_CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(batch.failed, 0u);
    CHECK_EQ(sim.nrm_cudasim_fault_count(), 1u);
    CHECK_EQ(outstanding(NRM_CUDASIM_OPERATIONS), 0u);
}

TEST(the_prototype_of_a_later_version_is_not_given_out)
{
    void *address = &address;
    nrm_CUdriverProcAddressQueryResult found = 0;
    REQUIRE(begin(0));
    CHECK_EQ(cu.cuGetProcAddress("cuMemcpyBatchAsync", &address, 12080, 0, &found), 0);
    CHECK_EQ(found, NRM_CU_GET_PROC_ADDRESS_SUCCESS);
    CHECK_EQ(cu.cuGetProcAddress("cuMemcpyBatchAsync", &address, 12060, 0, &found), 0);
    CHECK_EQ(found, NRM_CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
    CHECK_EQ(sim.nrm_cudasim_fault_count(), 0u);
    CHECK_EQ(cu.cuGetProcAddress("cuMemcpyBatchAsync", &address, 13000, 0, &found), 0);
    CHECK(address == NULL);
    CHECK_EQ(sim.nrm_cudasim_fault_count(), 1u); /* it takes other arguments */
}

TEST(a_driver_before_12_8_has_no_batches)
{
    struct nrm_cudasim_config config = machine();
    void *address = &address;
    nrm_CUdriverProcAddressQueryResult found = 0;
    REQUIRE(load());
    config.driver = 12060;
    REQUIRE(start_with(&config));
    CHECK_EQ(cu.cuGetProcAddress("cuMemcpyBatchAsync", &address, 12060, 0, &found), 0);
    CHECK(address == NULL);
    CHECK_EQ(found, NRM_CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
}

/* ---- boxes ---- */

TEST(a_box_from_pageable_memory_is_staged)
{
    unsigned char *host = pages(4096, 1);
    REQUIRE(begin(0));
    nrm_CUDA_MEMCPY3D box = {.srcMemoryType = NRM_CU_MEMORYTYPE_HOST,
                             .srcHost = host,
                             .srcPitch = 64,
                             .srcHeight = 4,
                             .dstMemoryType = NRM_CU_MEMORYTYPE_DEVICE,
                             .dstDevice = ptr,
                             .dstPitch = 32,
                             .dstHeight = 3,
                             .WidthInBytes = 16,
                             .Height = 2,
                             .Depth = 3};
    CHECK_EQ(sim.nrm_cudasim_hold_stream(stream), 0);
    CHECK_EQ(cu.cuMemcpy3DAsync(&box, stream), 0);
    memset(host, 2, 4096);
    CHECK_EQ(sim.nrm_cudasim_release_stream(stream), 0);
    CHECK_EQ(byte_at(0), 1);
    CHECK_EQ(byte_at((size_t)2 * 96 + 32 + 15), 1);
    CHECK_EQ(byte_at((size_t)2 * 96 + 32 + 16), 9);
    CHECK_EQ(byte_at((size_t)2 * 32), 9); /* between two planes */
}

static const struct {
    const char *name;
    size_t depth, height, lod;
    void *reserved;
} wrong_boxes[] = {
    {"planes of no height", 2, 0, 0, NULL},
    {"a level of detail", 1, 0, 1, NULL},
    {"something reserved", 1, 0, 0, &stream},
};

TEST_EACH(a_box_is_refused, wrong_boxes)
{
    REQUIRE(begin(0));
    nrm_CUDA_MEMCPY3D box = {.srcMemoryType = NRM_CU_MEMORYTYPE_DEVICE,
                             .srcDevice = ptr,
                             .srcHeight = row->height,
                             .srcLOD = row->lod,
                             .reserved0 = row->reserved,
                             .dstMemoryType = NRM_CU_MEMORYTYPE_DEVICE,
                             .dstDevice = ptr + (size_t)N * NBYTES,
                             .WidthInBytes = 16,
                             .Height = 2,
                             .Depth = row->depth};
    CHECK_EQ(cu.cuMemcpy3DAsync(&box, stream), NRM_CUDA_ERROR_INVALID_VALUE);
}

CHECK_MAIN
