/* Graphs: what was captured, made executable and launched, and the user objects that
 * live as long as they do.
 *
 * An executable has copies of its graph's operations, and a launch submits copies of
 * those to one stream, in the order of capture: an order that the graph allows. Memory
 * is looked up again at each launch, as it may have gone since the capture, which is a
 * fault.
 *
 * A user object's reference that a graph holds is shared by the executables made of it,
 * and by each launch of them until its work is done. When the last one goes, the
 * destructor is called: by the call that let go of it, or the thread that did the work,
 * as a host function is. The real driver calls it in a thread of its own, and later. */
#include "checker.h"

#include <stdlib.h>

struct sim_handles sim_graphs = {.object_nbytes = sizeof(struct nrm_CUgraph_st)};
struct sim_handles sim_execs = {.object_nbytes = sizeof(struct nrm_CUgraphExec_st)};
struct sim_handles sim_user_objects = {.object_nbytes =
                                           sizeof(struct nrm_CUuserObject_st)};

struct sim_objects {
    unsigned int refs;
    struct sim_clock *clock; /* checker: of the launches so far */
    size_t n;
    struct nrm_CUuserObject_st **items; /* one reference each; may repeat */
};

static struct nrm_CUuserObject_st *doomed;

/* ---- user objects ---------------------------------------------------------------- */

static void
object_release(struct nrm_CUuserObject_st *object, uint64_t count)
{
    object->refs -= count;
    if (object->refs == 0) {
        object->next = doomed;
        doomed = object;
    }
}

bool
sim_objects_are_due(void)
{
    return doomed != NULL;
}

void
sim_objects_run_destructors_locked(void)
{
    struct sim_thread *thread = doomed != NULL ? sim_thread_get() : NULL;
    while (thread != NULL && doomed != NULL) {
        struct nrm_CUuserObject_st gone = *doomed;
        sim_handle_destroy(&sim_user_objects, doomed);
        doomed = gone.next;
        bool outer = thread->in_host_function;
        sim_checker_host_follows(gone.clock);
        sim_clock_release(gone.clock);
        thread->in_host_function = true;
        sim_unlock();
        gone.destroy(gone.data);
        sim_lock();
        thread->in_host_function = outer;
    }
}

void
sim_objects_retain(struct sim_objects *objects)
{
    if (objects != NULL) {
        objects->refs++;
    }
}

void
sim_objects_release(struct sim_objects *objects)
{
    if (objects == NULL || --objects->refs > 0) {
        return;
    }
    for (size_t i = 0; i < objects->n; i++) {
        sim_clock_join(&objects->items[i]->clock, objects->clock);
        object_release(objects->items[i], 1);
    }
    sim_clock_release(objects->clock);
    free(objects->items);
    free(objects);
}

void
sim_objects_note(struct sim_objects *objects, struct sim_clock *clock)
{
    if (objects != NULL) {
        sim_clock_join(&objects->clock, clock);
    }
}

/* A copy that one graph holds alone, with room for `n_more`. NULL: out of memory. */
static struct sim_objects *
objects_copy(const struct sim_objects *from, size_t n_more)
{
    size_t n = from != NULL ? from->n : 0;
    struct sim_objects *copy = calloc(1, sizeof *copy);
    struct nrm_CUuserObject_st **items = calloc(n + n_more, sizeof *items);
    if (copy == NULL || items == NULL) {
        free(copy);
        free(items);
        return NULL;
    }
    *copy = (struct sim_objects){.refs = 1, .n = n, .items = items};
    for (size_t i = 0; i < n; i++) {
        items[i] = from->items[i];
        items[i]->refs++;
    }
    return copy;
}

nrm_CUresult
cuUserObjectCreate(nrm_CUuserObject *object, void *data, nrm_CUhostFn destroy,
                   unsigned int n_references, unsigned int flags)
{
    SIM_BEGIN(call, cuUserObjectCreate, SIM_PTR(object), SIM_PTR(data),
              (uint64_t)(uintptr_t)destroy, n_references);
    if (object == NULL || destroy == NULL || n_references == 0 ||
        flags != NRM_CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    struct nrm_CUuserObject_st *created = sim_handle_create(&sim_user_objects);
    if (created == NULL) {
        return sim_call_end(&call, NRM_CUDA_ERROR_OUT_OF_MEMORY);
    }
    created->refs = n_references;
    created->destroy = destroy;
    created->data = data;
    *object = created;
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

nrm_CUresult
cuUserObjectRelease(nrm_CUuserObject object, unsigned int count)
{
    SIM_BEGIN(call, cuUserObjectRelease, SIM_PTR(object), count);
    if (!sim_handle_is_live(&sim_user_objects, object) || count == 0 ||
        count > object->refs) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    object_release(object, count);
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

nrm_CUresult
cuGraphRetainUserObject(nrm_CUgraph graph, nrm_CUuserObject object, unsigned int count,
                        unsigned int flags)
{
    SIM_BEGIN(call, cuGraphRetainUserObject, SIM_PTR(graph), SIM_PTR(object), count,
              flags);
    if (!sim_handle_is_live(&sim_graphs, graph) ||
        !sim_handle_is_live(&sim_user_objects, object) || count == 0 ||
        (flags & ~(unsigned int)NRM_CU_GRAPH_USER_OBJECT_MOVE) != 0) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    struct sim_objects *more = objects_copy(graph->objects, count);
    if (more == NULL) {
        return sim_call_end(&call, NRM_CUDA_ERROR_OUT_OF_MEMORY);
    }
    for (unsigned int i = 0; i < count; i++) {
        more->items[more->n++] = object;
    }
    object->refs += flags & NRM_CU_GRAPH_USER_OBJECT_MOVE ? 0 : count;
    sim_objects_release(graph->objects);
    graph->objects = more;
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

/* ---- operations ------------------------------------------------------------------ */

void
sim_ops_append(struct sim_ops *ops, struct sim_op *op)
{
    if (ops->last == NULL) {
        ops->first = op;
    }
    else {
        ops->last->next = op;
    }
    ops->last = op;
}

static void
ops_destroy(struct sim_ops *ops)
{
    while (ops->first != NULL) {
        struct sim_op *op = ops->first;
        ops->first = op->next;
        sim_op_destroy(op);
    }
    ops->last = NULL;
}

/* NULL: out of memory. */
static struct sim_op *
op_copy(const struct sim_op *op)
{
    size_t n_staged = op->staged != NULL ? op->copy.width * sim_copy_n_rows(&op->copy)
                                         : 0;
    struct sim_op *copy = sim_op_create(op->kind, op->call);
    unsigned char *staged = n_staged != 0 ? malloc(n_staged) : NULL;
    if (copy == NULL || (n_staged != 0 && staged == NULL)) {
        free(copy);
        free(staged);
        return NULL;
    }
    *copy = *op;
    copy->next = NULL;
    if (n_staged != 0) {
        for (size_t i = 0; i < n_staged; i++) {
            staged[i] = op->staged[i];
        }
        copy->staged = staged;
        copy->copy.src.address = (uintptr_t)staged;
    }
    if (copy->marker != NULL) {
        sim_marker_retain(copy->marker);
    }
    if (!sim_op_set_areas(copy, op->areas, op->n_areas)) {
        sim_op_destroy(copy);
        return NULL;
    }
    return copy;
}

static bool
ops_copy(const struct sim_ops *from, struct sim_ops *out)
{
    for (const struct sim_op *op = from->first; op != NULL; op = op->next) {
        struct sim_op *copy = op_copy(op);
        if (copy == NULL) {
            ops_destroy(out);
            return false;
        }
        sim_ops_append(out, copy);
    }
    return true;
}

/* Finds the memory of one side again; false: it is not there any more. */
static bool
renew(struct sim_span *span, size_t nbytes)
{
    if (span->range == NULL) {
        return true; /* pageable */
    }
    span->range = sim_range_find(span->address);
    return span->range != NULL &&
           span->address - span->range->start + nbytes <= span->range->nbytes;
}

static bool
renew_memory(struct sim_op *op)
{
    struct sim_copy *copy = &op->copy;
    if (op->kind == SIM_OP_WAIT_VALUE) {
        return renew(&copy->src, sizeof op->value);
    }
    if (copy->height == 0) {
        return sim_op_finds_areas(op);
    }
    return renew(&copy->dst, sim_copy_extent(copy, &copy->dst)) &&
           renew(&copy->src, sim_copy_extent(copy, &copy->src));
}

/* ---- graphs ---------------------------------------------------------------------- */

void
sim_graph_destroy(struct nrm_CUgraph_st *graph)
{
    ops_destroy(&graph->ops);
    sim_objects_release(graph->objects);
    sim_handle_destroy(&sim_graphs, graph);
}

void
sim_exec_destroy(struct nrm_CUgraphExec_st *exec)
{
    ops_destroy(&exec->ops);
    sim_objects_release(exec->objects);
    sim_handle_destroy(&sim_execs, exec);
}

nrm_CUresult
cuGraphDestroy(nrm_CUgraph graph)
{
    SIM_BEGIN(call, cuGraphDestroy, SIM_PTR(graph));
    if (!sim_handle_is_live(&sim_graphs, graph)) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    sim_graph_destroy(graph);
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

nrm_CUresult
cuGraphInstantiateWithFlags(nrm_CUgraphExec *exec, nrm_CUgraph graph,
                            unsigned long long flags)
{
    SIM_BEGIN(call, cuGraphInstantiateWithFlags, SIM_PTR(exec), SIM_PTR(graph), flags);
    if (exec == NULL || !sim_handle_is_live(&sim_graphs, graph) || flags != 0) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    struct nrm_CUgraphExec_st *created = sim_handle_create(&sim_execs);
    if (created == NULL || !ops_copy(&graph->ops, &created->ops)) {
        if (created != NULL) {
            sim_handle_destroy(&sim_execs, created);
        }
        return sim_call_end(&call, NRM_CUDA_ERROR_OUT_OF_MEMORY);
    }
    created->objects = graph->objects;
    sim_objects_retain(created->objects);
    *exec = created;
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}

/* The operations of one launch and what ends it, before any is submitted. */
static nrm_CUresult
prepare_launch(const struct nrm_CUgraphExec_st *exec, struct sim_ops *out)
{
    if (!ops_copy(&exec->ops, out)) {
        return NRM_CUDA_ERROR_OUT_OF_MEMORY;
    }
    for (struct sim_op *op = out->first; op != NULL; op = op->next) {
        if (!renew_memory(op)) {
            sim_fault("a graph was launched whose %s uses memory that is gone",
                      sim_call_name(op->call));
            ops_destroy(out);
            return NRM_CUDA_ERROR_INVALID_VALUE;
        }
    }
    struct sim_op *end = sim_op_create(SIM_OP_END_LAUNCH, SIM_CALL_cuGraphLaunch);
    if (end == NULL) {
        ops_destroy(out);
        return NRM_CUDA_ERROR_OUT_OF_MEMORY;
    }
    end->objects = exec->objects;
    sim_objects_retain(end->objects);
    sim_ops_append(out, end);
    return NRM_CUDA_SUCCESS;
}

nrm_CUresult
cuGraphLaunch(nrm_CUgraphExec exec, nrm_CUstream stream)
{
    SIM_BEGIN(call, cuGraphLaunch, SIM_PTR(exec), SIM_PTR(stream));
    struct sim_queue *queue;
    struct sim_ops ops = {0};
    nrm_CUresult result = sim_stream_find(&call, stream, &queue);
    if (result == NRM_CUDA_SUCCESS && !sim_handle_is_live(&sim_execs, exec)) {
        result = NRM_CUDA_ERROR_INVALID_VALUE;
    }
    if (result == NRM_CUDA_SUCCESS) {
        result = queue->capture != NULL
                     ? NRM_CUDA_ERROR_NOT_SUPPORTED /* a child graph */
                     : prepare_launch(exec, &ops);
    }
    while (result == NRM_CUDA_SUCCESS && ops.first != NULL) {
        struct sim_op *op = ops.first;
        ops.first = op->next;
        op->next = NULL;
        result = sim_submit(queue, op);
    }
    ops_destroy(&ops);
    return sim_call_end(&call, result);
}

nrm_CUresult
cuGraphExecDestroy(nrm_CUgraphExec exec)
{
    SIM_BEGIN(call, cuGraphExecDestroy, SIM_PTR(exec));
    if (!sim_handle_is_live(&sim_execs, exec)) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    sim_exec_destroy(exec);
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}
