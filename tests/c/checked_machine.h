/* A machine that looks for races, with what small programs need to make some: two
   streams that nothing orders but a program, and memory of each kind. */
#ifndef NRM_TESTS_CHECKED_MACHINE_H
#define NRM_TESTS_CHECKED_MACHINE_H

#include <string.h>

#include "streams.h"

#define N ((size_t)4096)

static struct {
    nrm_CUstream a, b, blocking;
    nrm_CUdeviceptr device, other;
    void *pinned;
    nrm_CUevent event;
} machine;

static inline void
start(int n_devices)
{
    struct nrm_cudasim_config config = simulator_checked();
    config.devices = n_devices;
    simulator_start(&config);
    CHECK_EQ(cuda.cuInit(0), NRM_CUDA_SUCCESS);
    make_current(0);
    machine.a = new_handle();
    machine.b = new_handle();
    CHECK_EQ(cuda.cuStreamCreate(&machine.blocking, NRM_CU_STREAM_DEFAULT), 0);
    CHECK_EQ(cuda.cuMemAlloc(&machine.device, N), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemAlloc(&machine.other, N), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuMemHostAlloc(&machine.pinned, N, 0), NRM_CUDA_SUCCESS);
    CHECK_EQ(cuda.cuEventCreate(&machine.event, NRM_CU_EVENT_DISABLE_TIMING), 0);
}

/* The bytes come out right or wrong, but no call of the driver fails. */
static inline void
to_device(nrm_CUstream stream, nrm_CUdeviceptr device)
{
    CHECK_EQ(cuda.cuMemcpyHtoDAsync(device, machine.pinned, N, stream), 0);
}

static inline void
to_host(nrm_CUstream stream, nrm_CUdeviceptr device)
{
    CHECK_EQ(cuda.cuMemcpyDtoHAsync(machine.pinned, device, N, stream), 0);
}

static inline void
fill(nrm_CUstream stream, nrm_CUdeviceptr device)
{
    CHECK_EQ(cuda.cuMemsetD8Async(device, 1, N, stream), NRM_CUDA_SUCCESS);
}

static inline void
record(nrm_CUstream stream)
{
    CHECK_EQ(cuda.cuEventRecord(machine.event, stream), NRM_CUDA_SUCCESS);
}

static inline void
wait_on(nrm_CUstream stream)
{
    CHECK_EQ(cuda.cuStreamWaitEvent(stream, machine.event, 0), NRM_CUDA_SUCCESS);
}

static inline void
host_writes(void)
{
    CHECK_EQ(sim.host_access(machine.pinned, N, 1), 0);
}

static inline void
host_reads(void)
{
    CHECK_EQ(sim.host_access(machine.pinned, N, 0), 0);
}

static inline void
take(nrm_CUdeviceptr ptr, nrm_CUstream stream)
{
    sim.block_taken((uintptr_t)ptr, N, 0, (uintptr_t)stream);
}

static inline void
take_for_host(void)
{
    sim.block_taken((uintptr_t)machine.pinned, N, -1, NRM_CUDA_WATCH_NO_STREAM);
}

static inline void
give(nrm_CUdeviceptr ptr)
{
    sim.block_given((uintptr_t)ptr, N);
}

/* ---- how a program is judged ---- */

struct checked_program {
    const char *name;
    void (*run)(void);
    uint64_t n_races;
};

#define RIGHT(name) {#name, name, 0}
#define WRONG(name) {#name, name, 1}

static inline void
judge(const struct checked_program *program)
{
    start(2);
    program->run();
    if (!CHECK_EQ(sim.race_count(), program->n_races)) {
        simulator_tell_races();
    }
    simulator_check_faults();
}

/* The order in which the GPU happens to work does not matter. */
static inline void
judge_when_the_gpu_is_fast(const struct checked_program *program)
{
    start(2);
    CHECK_EQ(cuda.cuMemcpyHtoD(machine.device, machine.pinned, N), NRM_CUDA_SUCCESS);
    program->run();
    let_run();
    CHECK_EQ(sim.race_count(), program->n_races);
}

#endif
