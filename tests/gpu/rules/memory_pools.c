/* Memory pools: memory that is allocated and freed in the order of streams. */
#include "rule.h"

static const size_t BIG = (size_t)1 << 50;

static nrm_CUstream a, b;
static unsigned char *page_locked;

static nrm_CUmemoryPool
create(uint64_t threshold)
{
    nrm_CUmemPoolProps props = {
        .allocType = NRM_CU_MEM_ALLOCATION_TYPE_PINNED,
        .location = {.type = NRM_CU_MEM_LOCATION_TYPE_DEVICE, .id = 0},
    };
    nrm_CUmemoryPool pool;
    MUST(cu.cuMemPoolCreate(&pool, &props));
    MUST(cu.cuMemPoolSetAttribute(pool, NRM_CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                                  &threshold));
    return pool;
}

static nrm_CUdeviceptr
allocate(nrm_CUmemoryPool pool, size_t nbytes, nrm_CUstream stream)
{
    nrm_CUdeviceptr ptr;
    MUST(cu.cuMemAllocFromPoolAsync(&ptr, nbytes, pool, stream));
    return ptr;
}

static uint64_t
number(nrm_CUmemoryPool pool, nrm_CUmemPool_attribute attribute)
{
    uint64_t value = UINT64_MAX;
    MUST(cu.cuMemPoolGetAttribute(pool, attribute, &value));
    return value;
}

static int
flag_of(nrm_CUmemoryPool pool, nrm_CUmemPool_attribute attribute)
{
    int value = -1;
    MUST(cu.cuMemPoolGetAttribute(pool, attribute, &value));
    return value;
}

static void
set_flag(nrm_CUmemoryPool pool, nrm_CUmemPool_attribute attribute, int value)
{
    MUST(cu.cuMemPoolSetAttribute(pool, attribute, &value));
}

/* ---- what there is --------------------------------------------------------------- */

static void
attributes(void)
{
    int supported = -1;
    nrm_CUmemoryPool pool = NULL, again = NULL;
    MUST(cu.cuDeviceGetAttribute(
        &supported, NRM_CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, device));
    expect_number("the device has memory pools", supported, 1);
    expect("a device has a default pool", cu.cuDeviceGetDefaultMemPool(&pool, device),
           NRM_CUDA_SUCCESS);
    MUST(cu.cuDeviceGetDefaultMemPool(&again, device));
    expect_yes("which is always the same", pool == again);
    pool = create(0);
    expect_number("a pool follows events",
                  flag_of(pool, NRM_CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES),
                  1);
    expect_number("and takes what is done",
                  flag_of(pool, NRM_CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC), 1);
    expect_number("and makes streams wait",
                  flag_of(pool, NRM_CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES),
                  1);
    expect_number("a new pool holds nothing",
                  (long long)number(pool, NRM_CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 0);
    uint64_t one = 1;
    expect("what is reserved cannot be set",
           cu.cuMemPoolSetAttribute(pool, NRM_CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
                                    &one),
           NRM_CUDA_ERROR_INVALID_VALUE);
    expect("a high mark begins anew with 0 only",
           cu.cuMemPoolSetAttribute(pool, NRM_CU_MEMPOOL_ATTR_USED_MEM_HIGH, &one),
           NRM_CUDA_ERROR_INVALID_VALUE);
    MUST(cu.cuMemPoolDestroy(pool));
}

static void
allocation(void)
{
    nrm_CUmemoryPool pool = create(UINT64_MAX);
    nrm_CUdeviceptr ptr, other;
    expect("0 bytes are no error", cu.cuMemAllocFromPoolAsync(&ptr, 0, pool, a),
           NRM_CUDA_SUCCESS);
    expect("nor are more than there are",
           cu.cuMemAllocFromPoolAsync(&ptr, BIG, pool, a),
           NRM_CUDA_ERROR_OUT_OF_MEMORY);
    expect("after which the pool is usable",
           cu.cuMemAllocFromPoolAsync(&ptr, 1000, pool, a), NRM_CUDA_SUCCESS);
    other = allocate(pool, MIB, a);
    expect_yes("memory is aligned to 256", ptr % 256 == 0 && other % 256 == 0);
    expect_yes("and does not overlap", other >= ptr + 1000 || ptr >= other + MIB);
    unsigned int type = 0;
    MUST(cu.cuPointerGetAttribute(&type, NRM_CU_POINTER_ATTRIBUTE_MEMORY_TYPE, ptr));
    expect_number("it is device memory", type, NRM_CU_MEMORYTYPE_DEVICE);
    uint64_t used = number(pool, NRM_CU_MEMPOOL_ATTR_USED_MEM_CURRENT);
    expect_yes("what is used is counted", used >= MIB + 1000);
    expect_yes("and is reserved",
               number(pool, NRM_CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) >= used);
    MUST(cu.cuMemsetD8Async(other, 7, MIB, a));
    MUST(cu.cuMemcpyDtoHAsync(page_locked, other, MIB, a));
    expect("it is freed in the order of a stream", cu.cuMemFreeAsync(other, a),
           NRM_CUDA_SUCCESS);
    MUST(cu.cuStreamSynchronize(a));
    expect_number("after the work on it", page_locked[MIB - 1], 7);
    expect("and only once", cu.cuMemFreeAsync(other, a), NRM_CUDA_ERROR_INVALID_VALUE);
    expect("a free in no order is a free too", cu.cuMemFree(ptr), NRM_CUDA_SUCCESS);
    /* Not 0 at once on a driver 580, though the call has waited for all work. */
    expect_yes("then no more is used than it had",
               number(pool, NRM_CU_MEMPOOL_ATTR_USED_MEM_CURRENT) <= 1000);
    expect_yes("what was used is remembered",
               number(pool, NRM_CU_MEMPOOL_ATTR_USED_MEM_HIGH) >= used);
    MUST(cu.cuMemPoolDestroy(pool));
}

/* ---- reuse ----------------------------------------------------------------------- */

static void
reuse(void)
{
    nrm_CUmemoryPool pool = create(UINT64_MAX);
    set_flag(pool, NRM_CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, 0);
    nrm_CUdeviceptr first = allocate(pool, 8 * (size_t)MIB, a);
    hold(a);
    MUST(cu.cuMemFreeAsync(first, a));
    nrm_CUdeviceptr second = allocate(pool, 8 * (size_t)MIB, b);
    expect_yes("memory of a free that is pending is not another stream's",
               second != first);
    nrm_CUdeviceptr third = allocate(pool, 8 * (size_t)MIB, a);
    expect_yes("but its own stream's at once", third == first);
    MUST(cu.cuMemFreeAsync(third, a));
    let_go();
    MUST(cu.cuStreamSynchronize(a));
    nrm_CUdeviceptr fourth = allocate(pool, 8 * (size_t)MIB, b);
    expect_yes("and anybody's when it is done", fourth == first);
    MUST(cu.cuMemFreeAsync(second, b));
    MUST(cu.cuMemFreeAsync(fourth, b));
    MUST(cu.cuStreamSynchronize(b));
    MUST(cu.cuMemPoolDestroy(pool));
}

/* ---- what goes back -------------------------------------------------------------- */

static void
thresholds(void)
{
    nrm_CUmemoryPool pool = create(0);
    MUST(cu.cuMemFreeAsync(allocate(pool, MIB, a), a));
    MUST(cu.cuStreamSynchronize(a));
    expect_number("without a threshold nothing is kept at a synchronisation",
                  (long long)number(pool, NRM_CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 0);
    MUST(cu.cuMemPoolDestroy(pool));
    pool = create(UINT64_MAX);
    MUST(cu.cuMemFreeAsync(allocate(pool, MIB, a), a));
    MUST(cu.cuStreamSynchronize(a));
    uint64_t kept = number(pool, NRM_CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
    expect_yes("under it all is", kept >= MIB);
    MUST(cu.cuMemPoolTrimTo(pool, kept));
    expect_yes("a trim leaves what is to be kept",
               number(pool, NRM_CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) == kept);
    MUST(cu.cuMemPoolTrimTo(pool, 0));
    expect_number("and gives the rest back",
                  (long long)number(pool, NRM_CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 0);
    uint64_t zero = 0;
    MUST(cu.cuMemPoolSetAttribute(pool, NRM_CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, &zero));
    expect_number("a high mark begins anew",
                  (long long)number(pool, NRM_CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH), 0);
    MUST(cu.cuMemPoolDestroy(pool));
}

static void
end(void)
{
    nrm_CUmemoryPool pool = create(UINT64_MAX);
    nrm_CUdeviceptr ptr = allocate(pool, MIB, a);
    expect("a pool is destroyed with memory in use", cu.cuMemPoolDestroy(pool),
           NRM_CUDA_SUCCESS);
    expect("which stays", cu.cuMemsetD8Async(ptr, 1, MIB, a), NRM_CUDA_SUCCESS);
    expect("until it is freed", cu.cuMemFreeAsync(ptr, a), NRM_CUDA_SUCCESS);
    MUST(cu.cuStreamSynchronize(a));
}

/* ---- capture --------------------------------------------------------------------- */

static void
captured(void)
{
    nrm_CUmemoryPool pool = create(UINT64_MAX);
    nrm_CUdeviceptr ptr = 0;
    nrm_CUgraph graph;
    nrm_CUgraphExec exec;
    page_locked[0] = 0;
    MUST(cu.cuStreamBeginCapture(a, NRM_CU_STREAM_CAPTURE_MODE_GLOBAL));
    expect("a captured stream allocates",
           cu.cuMemAllocFromPoolAsync(&ptr, MIB, pool, a), NRM_CUDA_SUCCESS);
    MUST(cu.cuMemsetD8Async(ptr, 9, MIB, a));
    MUST(cu.cuMemcpyDtoHAsync(page_locked, ptr, 16, a));
    expect("and frees", cu.cuMemFreeAsync(ptr, a), NRM_CUDA_SUCCESS);
    expect("which breaks no capture", cu.cuStreamEndCapture(a, &graph),
           NRM_CUDA_SUCCESS);
    MUST(cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    expect("the graph has its memory", cu.cuGraphLaunch(exec, b), NRM_CUDA_SUCCESS);
    MUST(cu.cuStreamSynchronize(b));
    expect_number("and works with it", page_locked[0], 9);
    MUST(cu.cuGraphExecDestroy(exec));
    MUST(cu.cuGraphDestroy(graph));
}

int
main(int argc, char **argv)
{
    void *ptr;
    start(argc, argv);
    MUST(cu.cuStreamCreate(&a, NRM_CU_STREAM_NON_BLOCKING));
    MUST(cu.cuStreamCreate(&b, NRM_CU_STREAM_NON_BLOCKING));
    MUST(cu.cuMemHostAlloc(&ptr, MIB, 0));
    page_locked = ptr;
    attributes();
    allocation();
    reuse();
    thresholds();
    end();
    captured();
    return finish();
}
