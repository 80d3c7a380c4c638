/* Batches of copies.
 *
 * All of a batch is submitted or nothing of it. Its copies come after what its stream
 * had before and before what it gets next, and have no order among themselves: here the
 * last of the list runs first, and the checker reports two that touch the same bytes.
 *
 * When a source is read is said for each copy: in the order of the stream, or during
 * the call, whatever the stream has still to do there. A batch is refused on the legacy
 * stream, and while its stream is captured, which leaves the capture as it is. */
#include "checker.h"

#include <stdlib.h>

struct batch {
    const nrm_CUdeviceptr *dsts;
    const nrm_CUdeviceptr *srcs;
    const size_t *sizes;
    size_t n;
    const nrm_CUmemcpyAttributes *attributes;
    const size_t *first_copies; /* of each of the attributes: that it is for */
    size_t n_attributes;
};

/* ---- what is accepted ------------------------------------------------------------ */

static bool
is_well_formed(const struct batch *batch)
{
    if (batch->dsts == NULL || batch->srcs == NULL || batch->sizes == NULL ||
        batch->attributes == NULL || batch->first_copies == NULL || batch->n == 0 ||
        batch->n_attributes == 0 || batch->n_attributes > batch->n ||
        batch->first_copies[0] != 0) {
        return false;
    }
    for (size_t i = 0; i < batch->n_attributes; i++) {
        unsigned int order = batch->attributes[i].srcAccessOrder;
        if (order == NRM_CU_MEMCPY_SRC_ACCESS_ORDER_INVALID ||
            order > NRM_CU_MEMCPY_SRC_ACCESS_ORDER_ANY ||
            batch->first_copies[i] >= batch->n ||
            (i > 0 && batch->first_copies[i] <= batch->first_copies[i - 1])) {
            return false;
        }
    }
    return true;
}

static nrm_CUresult
check(const struct batch *batch, const struct sim_queue *queue)
{
    if (queue->legacy || !is_well_formed(batch)) {
        return NRM_CUDA_ERROR_INVALID_VALUE;
    }
    return queue->capture != NULL ? NRM_CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
                                  : NRM_CUDA_SUCCESS;
}

/* ---- copies that depend on each other -------------------------------------------- */

static bool
overlap(nrm_CUdeviceptr a, size_t n_a, nrm_CUdeviceptr b, size_t n_b)
{
    return a < b + n_b && b < a + n_a;
}

static bool
depend(const struct batch *batch, size_t i, size_t j)
{
    size_t n_i = batch->sizes[i], n_j = batch->sizes[j];
    return overlap(batch->dsts[i], n_i, batch->dsts[j], n_j) ||
           overlap(batch->dsts[i], n_i, batch->srcs[j], n_j) ||
           overlap(batch->srcs[i], n_i, batch->dsts[j], n_j);
}

static void
report_dependent(const struct batch *batch)
{
    for (size_t j = 1; sim.config.check && j < batch->n; j++) {
        for (size_t i = 0; i < j; i++) {
            if (depend(batch, i, j)) {
                sim_race_tell("nothing orders the copies %zu and %zu of a batch, which "
                              "touch the same bytes: %zu B from 0x%zx to 0x%zx, and "
                              "%zu B from 0x%zx to 0x%zx",
                              i, j, batch->sizes[i], (size_t)batch->srcs[i],
                              (size_t)batch->dsts[i], batch->sizes[j],
                              (size_t)batch->srcs[j], (size_t)batch->dsts[j]);
                return;
            }
        }
    }
}

/* ---- submitting ------------------------------------------------------------------ */

static unsigned int
order_of(const struct batch *batch, size_t copy)
{
    size_t k = batch->n_attributes - 1;
    while (batch->first_copies[k] > copy) {
        k--;
    }
    return batch->attributes[k].srcAccessOrder;
}

static bool
is_host_memory(const struct sim_range *range)
{
    return range == NULL || range->kind == SIM_REGISTERED || range->kind == SIM_HOST ||
           range->kind == SIM_MANAGED;
}

/* The source of a copy is read now: of a device's own memory only the checker knows
   it. */
static nrm_CUresult
read_now(struct sim_op *op)
{
    if (is_host_memory(op->copy.src.range)) {
        return sim_copy_stage(op);
    }
    sim_checker_stage(op);
    return NRM_CUDA_SUCCESS;
}

static nrm_CUresult
prepare(const struct batch *batch, size_t i, const struct sim_queue *queue,
        struct sim_op *op)
{
    bool during_call = order_of(batch, i) ==
                       NRM_CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
    op->copy = sim_copy_flat(batch->dsts[i], batch->srcs[i], batch->sizes[i]);
    if (batch->sizes[i] == 0 ||
        sim_copy_resolve(queue, &op->copy, SIM_ANY, SIM_ANY) != NRM_CUDA_SUCCESS) {
        return NRM_CUDA_ERROR_INVALID_VALUE;
    }
    bool is_staged = op->copy.src.range == NULL && !sim_copy_is_in_place(queue);
    return during_call || is_staged ? read_now(op) : NRM_CUDA_SUCCESS;
}

static void
destroy(struct sim_op *first)
{
    while (first != NULL) {
        struct sim_op *op = first;
        first = op->next;
        sim_op_destroy(op);
    }
}

/* All operations, the last of the list first. */
static nrm_CUresult
prepare_all(const struct batch *batch, const struct sim_queue *queue, size_t *failed,
            struct sim_op **out)
{
    struct sim_op *first = NULL;
    for (size_t i = 0; i < batch->n; i++) {
        struct sim_op *op = sim_op_create(SIM_OP_COPY, SIM_CALL_cuMemcpyBatchAsync);
        if (op == NULL) {
            destroy(first);
            return NRM_CUDA_ERROR_OUT_OF_MEMORY;
        }
        op->next = first;
        first = op;
        nrm_CUresult result = prepare(batch, i, queue, op);
        if (result != NRM_CUDA_SUCCESS) {
            *failed = i;
            destroy(first);
            return result;
        }
    }
    *out = first;
    return NRM_CUDA_SUCCESS;
}

static nrm_CUresult
submit(const struct batch *batch, struct sim_call *call, struct sim_queue *queue,
       size_t *failed)
{
    struct sim_op *first = NULL;
    bool waits = false;
    nrm_CUresult result = prepare_all(batch, queue, failed, &first);
    if (result == NRM_CUDA_SUCCESS) {
        report_dependent(batch);
    }
    while (result == NRM_CUDA_SUCCESS && first != NULL) {
        struct sim_op *op = first;
        first = op->next;
        op->next = NULL;
        waits = waits || (op->copy.dst.range == NULL && !sim_copy_is_in_place(queue));
        result = sim_submit(queue, op);
    }
    destroy(first);
    return result == NRM_CUDA_SUCCESS && waits ? sim_copy_wait(call, queue) : result;
}

nrm_CUresult
cuMemcpyBatchAsync(nrm_CUdeviceptr *dsts, nrm_CUdeviceptr *srcs, size_t *sizes,
                   size_t n_copies, nrm_CUmemcpyAttributes *attributes,
                   size_t *first_copies, size_t n_attributes, size_t *failed,
                   nrm_CUstream stream)
{
    SIM_BEGIN(call, cuMemcpyBatchAsync, SIM_PTR(dsts), SIM_PTR(srcs), n_copies,
              SIM_PTR(stream));
    const struct batch batch = {dsts,       srcs,         sizes,       n_copies,
                                attributes, first_copies, n_attributes};
    struct sim_queue *queue;
    size_t culprit = SIZE_MAX; /* none of them */
    nrm_CUresult result = sim_stream_find(&call, stream, &queue);
    if (result == NRM_CUDA_SUCCESS) {
        result = check(&batch, queue);
    }
    if (result == NRM_CUDA_SUCCESS) {
        result = submit(&batch, &call, queue, &culprit);
    }
    if (failed != NULL) {
        *failed = culprit;
    }
    return sim_call_end(&call, result);
}
