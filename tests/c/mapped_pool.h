/*
 * A pool that maps its memory, on a simulated device: the base of test_pool_vmm.c and
 * test_pool_vmm_faults.c.
 */
#ifndef NRM_TESTS_MAPPED_POOL_H
#define NRM_TESTS_MAPPED_POOL_H

#include "base/bits.h"
#include "fixtures.h"
#include "nrm/options.h"
#include "pools/pool.h"
#include "streams.h"

#define PIECE ((size_t)2 * NRM__MIB)

static nrm_resource *pool;

static size_t machine_nbytes = 8 * NRM__GIB; /* of device memory */

/* A pool over the upstream, whose reference it takes, with pieces of two MiB. */
static inline nrm_resource *
pool_with(nrm_resource *upstream, const nrm_pool_options *options)
{
    nrm_resource *mr = NULL;
    CHECK_OK(nrm_option_set(NRM_OPT_SEGMENT_NBYTES, "2 MiB"));
    CHECK_OK(nrm_pool_create(upstream, options, &mr));
    CHECK_OK(nrm_option_set(NRM_OPT_SEGMENT_NBYTES, "64 MiB"));
    nrm_resource_release(upstream);
    return mr;
}

static inline nrm_pool_options
options_of(size_t initial_nbytes, size_t maximum_nbytes)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    options.initial_nbytes = initial_nbytes;
    options.maximum_nbytes = maximum_nbytes;
    options.wait_limit_ns = 1000 * 1000;
    return options;
}

static inline void
start_machine(void)
{
    struct nrm_cudasim_config config = simulator_config();
    config.memory_nbytes = machine_nbytes;
    simulator_start(&config);
    CHECK_OK(nrm__cuda_init(NULL));
    make_current(0);
}

static inline void
start(size_t maximum_nbytes)
{
    nrm_pool_options options = options_of(0, maximum_nbytes);
    start_machine();
    pool = pool_with(device_source(), &options);
}

static inline uint64_t
n_pieces(void)
{
    uint64_t n = simulator_count(NRM_CUDASIM_MAPPINGS);
    CHECK_EQ(simulator_count(NRM_CUDASIM_PHYSICAL), n);
    return n;
}

static inline void
check_nothing_is_left(void)
{
    CHECK_EQ(n_pieces(), 0u);
    CHECK_EQ(simulator_count(NRM_CUDASIM_RESERVATIONS), 0u);
    CHECK_EQ(simulator_count(NRM_CUDASIM_DEVICE_ALLOCATIONS), 0u);
}

static inline void
stop(void)
{
    CHECK_EQ(live_nbytes(pool), 0);
    nrm__pool_check(pool);
    nrm_resource_release(pool);
    check_nothing_is_left();
    cuda.cuCtxSetCurrent(NULL);
    simulator_check_faults();
}

static inline char *
take(size_t nbytes)
{
    char *ptr = allocate(pool, nbytes);
    nrm__pool_check(pool);
    return ptr;
}

static inline void
give(void *ptr)
{
    CHECK_OK(nrm_resource_deallocate(pool, ptr, 0, NULL));
    nrm__pool_check(pool);
}

static inline size_t
trim(void)
{
    size_t given = 0;
    CHECK_OK(nrm_resource_trim(pool, 0, &given));
    nrm__pool_check(pool);
    return given;
}

static inline bool
takes_a_copy(void *ptr, size_t nbytes)
{
    nrm_CUdeviceptr address = (nrm_CUdeviceptr)(uintptr_t)ptr;
    unsigned char last[2] = {0};
    return cuda.cuMemsetD8(address, 5, nbytes) == NRM_CUDA_SUCCESS &&
           cuda.cuMemcpyDtoH(last, address + nbytes - 2, 2) == NRM_CUDA_SUCCESS &&
           last[0] == 5 && last[1] == 5;
}

#endif
