/* Kernels, as far as memory is concerned: what they read and what they write.
 *
 * There is no code to run, so a kernel is an operation that takes its turn in a stream.
 * A free waits for it, a graph repeats it, and the checker compares what it touches
 * with what others do. */
#include "checker.h"

#include <stdlib.h>
#include <string.h>

bool
sim_op_set_areas(struct sim_op *op, const struct nrm_cudasim_area *areas,
                 size_t n_areas)
{
    op->areas = NULL;
    op->n_areas = n_areas;
    if (n_areas != 0) {
        op->areas = malloc(n_areas * sizeof *areas);
        if (op->areas == NULL) {
            return false;
        }
        memcpy(op->areas, areas, n_areas * sizeof *areas);
    }
    return true;
}

bool
sim_op_finds_areas(const struct sim_op *op)
{
    for (size_t i = 0; i < op->n_areas; i++) {
        const struct nrm_cudasim_area *area = &op->areas[i];
        const struct sim_range *range = sim_range_find(area->start);
        if (range == NULL && sim_memory_moves(area->start, area->nbytes)) {
            continue;
        }
        if (range == NULL ||
            area->nbytes > range->nbytes - (area->start - range->start) ||
            !sim_pool_holds(range, area->start, area->nbytes)) {
            return false;
        }
    }
    return true;
}

static nrm_CUresult
launch_locked(void *stream, const struct nrm_cudasim_area *areas, size_t n_areas)
{
    struct sim_queue *queue;
    nrm_CUresult result = sim_control_find_locked(stream, &queue);
    if (result != NRM_CUDA_SUCCESS) {
        return result;
    }
    struct sim_op *op = sim_op_create(SIM_OP_KERNEL, SIM_N_CALLS);
    if (op == NULL || !sim_op_set_areas(op, areas, n_areas)) {
        free(op);
        return NRM_CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (!sim_op_finds_areas(op)) {
        sim_op_destroy(op);
        return NRM_CUDA_ERROR_INVALID_VALUE;
    }
    return sim_submit(queue, op);
}

int
nrm_cudasim_launch(void *stream, const struct nrm_cudasim_area *areas, size_t n_areas)
{
    (void)sim_choose(NRM_CUDASIM_CALL_BEGINS, SIM_N_CALLS);
    pthread_mutex_lock(&sim.driver_lock);
    sim_lock();
    nrm_CUresult result = launch_locked(stream, areas, n_areas);
    sim_unlock();
    pthread_mutex_unlock(&sim.driver_lock);
    (void)sim_choose(NRM_CUDASIM_CALL_ENDS, SIM_N_CALLS);
    return (int)result;
}
