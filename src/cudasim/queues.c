/* Streams as queues of operations, and markers: points in queues.
 *
 * An event, a synchronisation and a free that waits are all the same question: has
 * every queue that matters come as far as it had been filled at that moment? A marker
 * is that question. Recording an event therefore submits nothing, and a record that
 * covers a whole context is a marker over all its queues, those of destroyed streams
 * included.
 *
 * Everything here is called with the state lock held. */
#include "checker.h"

#include <stdlib.h>

/* ---- queues ---------------------------------------------------------------------- */

struct sim_queue *
sim_queue_create(struct nrm_CUctx_st *context)
{
    struct sim_queue *queue = calloc(1, sizeof *queue);
    if (queue == NULL) {
        return NULL;
    }
    queue->context = context;
    queue->refs = 2; /* the context's and the caller's */
    queue->id = ++sim.next_id;
    sim_checker_begin_queue(queue);
    queue->next = context->queues;
    context->queues = queue;
    return queue;
}

void
sim_queue_retain(struct sim_queue *queue)
{
    queue->refs++;
}

void
sim_queue_release(struct sim_queue *queue)
{
    if (--queue->refs == 0) {
        sim_clock_release(queue->clock);
        free(queue);
    }
}

/* The context's reference passes to the caller. */
static void
leave_context(struct sim_queue *queue)
{
    struct sim_queue **link = &queue->context->queues;
    while (*link != queue) {
        link = &(*link)->next;
    }
    *link = queue->next;
    sim_checker_end_queue(queue);
    queue->context = NULL;
}

/* Its pending work goes on, without a handle. */
void
sim_queue_close(struct sim_queue *queue)
{
    queue->closed = true;
    if (queue->first == NULL && queue->context != NULL) {
        leave_context(queue);
        queue->refs--; /* the owner's is still there */
    }
    sim_queue_release(queue);
}

/* The oldest operation is done, or forgotten. */
static void
shift(struct sim_queue *queue)
{
    struct sim_op *op = queue->first;
    queue->first = op->next;
    if (queue->first == NULL) {
        queue->last = NULL;
    }
    queue->n_done++;
    sim_op_destroy(op);
}

void
sim_queue_shift(struct sim_queue *queue)
{
    shift(queue);
    if (queue->first == NULL && queue->closed && queue->context != NULL) {
        leave_context(queue);
        sim_queue_release(queue);
    }
}

void
sim_queue_drop(struct sim_queue *queue)
{
    while (queue->first != NULL) {
        shift(queue);
    }
}

size_t
sim_queue_pending(void)
{
    size_t n = 0;
    struct nrm_CUctx_st *context = NULL;
    while ((context = sim_context_next(context)) != NULL) {
        const struct sim_queue *queue = context->queues;
        for (; queue != NULL; queue = queue->next) {
            n += (size_t)(queue->n_submitted - queue->n_done);
        }
    }
    return n;
}

/* ---- operations ------------------------------------------------------------------ */

struct sim_op *
sim_op_create(enum sim_op_kind kind, enum sim_call_id call)
{
    struct sim_op *op = calloc(1, sizeof *op);
    if (op != NULL) {
        op->kind = kind;
        op->call = call;
    }
    return op;
}

void
sim_op_destroy(struct sim_op *op)
{
    sim_marker_release(op->marker);
    sim_objects_note(op->objects, op->clock);
    sim_objects_release(op->objects);
    sim_clock_release(op->clock);
    free(op->areas);
    free(op->staged);
    free(op);
}

nrm_CUresult
sim_submit(struct sim_queue *queue, struct sim_op *op)
{
    nrm_CUresult result = sim_capture_check_submit(queue);
    if (result != NRM_CUDA_SUCCESS) {
        sim_op_destroy(op);
        return result;
    }
    if (queue->capture != NULL) {
        sim_checker_capture(op);
        sim_capture_add(queue, op);
        return NRM_CUDA_SUCCESS;
    }
    op->queue = queue;
    op->seq = ++sim.next_seq;
    if (queue->last == NULL) {
        queue->first = op;
    }
    else {
        queue->last->next = op;
    }
    queue->last = op;
    queue->n_submitted++;
    sim_checker_submit(queue, op);
    sim_engine_wake();
    return NRM_CUDA_SUCCESS;
}

/* ---- markers --------------------------------------------------------------------- */

static struct sim_marker *
marker_create(const struct nrm_CUctx_st *context)
{
    size_t n = 0;
    for (struct sim_queue *queue = context->queues; queue; queue = queue->next) {
        n++;
    }
    struct sim_marker *marker =
        calloc(1, sizeof *marker + n * sizeof marker->points[0]);
    if (marker != NULL) {
        marker->refs = 1;
    }
    return marker;
}

static void
marker_add(struct sim_marker *marker, struct sim_queue *queue, uint64_t count)
{
    if (queue->n_done >= count) {
        return;
    }
    sim_queue_retain(queue);
    marker->points[marker->n_points].queue = queue;
    marker->points[marker->n_points].count = count;
    marker->n_points++;
}

/* A blocking stream and the legacy one await each other's earlier work. */
struct sim_marker *
sim_marker_of_queue(struct sim_queue *queue)
{
    struct nrm_CUctx_st *context = queue->context;
    struct sim_marker *marker = marker_create(context);
    if (marker == NULL) {
        return NULL;
    }
    for (struct sim_queue *other = context->queues; other; other = other->next) {
        if (other == queue || (queue->legacy && other->blocking) ||
            (queue->blocking && other->legacy)) {
            marker_add(marker, other, other->n_submitted);
        }
    }
    sim_checker_await_queue(&marker->clock, queue);
    return marker;
}

struct sim_marker *
sim_marker_of_context(struct nrm_CUctx_st *context)
{
    struct sim_marker *marker = marker_create(context);
    if (marker != NULL) {
        for (struct sim_queue *queue = context->queues; queue; queue = queue->next) {
            marker_add(marker, queue, queue->n_submitted);
        }
        sim_checker_await_context(&marker->clock, context);
    }
    return marker;
}

bool
sim_op_uses(const struct sim_op *op, const struct sim_range *range)
{
    for (size_t i = 0; i < op->n_areas; i++) {
        if (sim_range_find(op->areas[i].start) == range) {
            return true;
        }
    }
    return op->copy.dst.range == range || op->copy.src.range == range;
}

static uint64_t
last_use(const struct sim_queue *queue, const struct sim_range *range)
{
    uint64_t count = queue->n_done;
    uint64_t last = 0;
    for (struct sim_op *op = queue->first; op != NULL; op = op->next) {
        count++;
        last = sim_op_uses(op, range) ? count : last;
    }
    return last;
}

/* What giving a range back waits for: all work of its context, whatever memory that
 * uses, and in the queues of others up to the last operation that uses the range. So
 * the marker has room for all queues there are. */
struct sim_marker *
sim_marker_of_memory(const struct sim_range *range)
{
    size_t n = 0;
    struct nrm_CUctx_st *context = NULL;
    while ((context = sim_context_next(context)) != NULL) {
        struct sim_queue *queue = context->queues;
        for (; queue != NULL; queue = queue->next) {
            n++;
        }
    }
    struct sim_marker *marker =
        calloc(1, sizeof *marker + n * sizeof marker->points[0]);
    if (marker == NULL) {
        return NULL;
    }
    marker->refs = 1;
    while ((context = sim_context_next(context)) != NULL) {
        struct sim_queue *queue = context->queues;
        for (; queue != NULL; queue = queue->next) {
            bool is_its = context == range->context;
            marker_add(marker, queue,
                       is_its ? queue->n_submitted : last_use(queue, range));
        }
    }
    sim_checker_await_memory(&marker->clock, range);
    return marker;
}

void
sim_marker_retain(struct sim_marker *marker)
{
    marker->refs++;
}

void
sim_marker_release(struct sim_marker *marker)
{
    if (marker == NULL || --marker->refs > 0) {
        return;
    }
    for (size_t i = 0; i < marker->n_points; i++) {
        sim_queue_release(marker->points[i].queue);
    }
    sim_clock_release(marker->clock);
    free(marker);
}

bool
sim_marker_is_passed(const struct sim_marker *marker)
{
    if (marker == NULL) {
        return true;
    }
    for (size_t i = 0; i < marker->n_points; i++) {
        if (marker->points[i].queue->n_done < marker->points[i].count) {
            return false;
        }
    }
    return true;
}
