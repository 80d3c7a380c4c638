/* What calls of the driver mean for the order of things. checker.h says how it
   works. */
#include "checker.h"

#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

static struct {
    struct sim_clock *host;
    uint64_t n_host; /* doings of the host */
    uint32_t n_actors;
} checker;

uint64_t
sim_checker_number(void)
{
    return ++sim.next_seq;
}

int
sim_checker_thread(void)
{
    return (int)syscall(SYS_gettid);
}

/* ---- queues ---------------------------------------------------------------------- */

void
sim_checker_begin_queue(struct sim_queue *queue)
{
    if (sim.config.check) {
        queue->actor = ++checker.n_actors;
    }
}

void
sim_checker_end_queue(struct sim_queue *queue)
{
    sim_clock_join(&queue->context->ended, queue->clock);
    if (queue->blocking) {
        sim_clock_join(&queue->context->ended_blocking, queue->clock);
    }
}

/* A blocking stream and the legacy one come after each other's earlier work. */
void
sim_checker_await_queue(struct sim_clock **clock, const struct sim_queue *queue)
{
    const struct nrm_CUctx_st *context = queue->context;
    if (!sim.config.check) {
        return;
    }
    sim_clock_join(clock, queue->clock);
    for (struct sim_queue *other = context->queues; other; other = other->next) {
        if ((queue->legacy && other->blocking) || (queue->blocking && other->legacy)) {
            sim_clock_join(clock, other->clock);
        }
    }
    if (queue->legacy) {
        sim_clock_join(clock, context->ended_blocking);
    }
}

void
sim_checker_await_context(struct sim_clock **clock, const struct nrm_CUctx_st *context)
{
    if (!sim.config.check) {
        return;
    }
    for (struct sim_queue *queue = context->queues; queue; queue = queue->next) {
        sim_clock_join(clock, queue->clock);
    }
    sim_clock_join(clock, context->ended);
}

/* Everything that has used it: what happens to be done is not waited for, and comes
 * before all the same. */
void
sim_checker_await_memory(struct sim_clock **clock, const struct sim_range *range)
{
    if (sim.config.check) {
        sim_shadow_await(clock, range->start, range->nbytes);
    }
}

void
sim_checker_host_follows(struct sim_clock *clock)
{
    sim_clock_join(&checker.host, clock);
}

void
sim_checker_queue_follows(struct sim_queue *queue, struct sim_clock *clock)
{
    sim_clock_join(&queue->clock, clock);
}

void
sim_checker_end_context(struct nrm_CUctx_st *context)
{
    sim_checker_await_context(&checker.host, context);
    sim_clock_release(context->ended);
    sim_clock_release(context->ended_blocking);
    context->ended = NULL;
    context->ended_blocking = NULL;
}

/* ---- accesses -------------------------------------------------------------------- */

static struct sim_access *
create(enum sim_access_kind kind, bool writes, uintptr_t start, size_t nbytes)
{
    struct sim_access *access = calloc(1, sizeof *access);
    if (access == NULL) {
        sim_fault("the checker has no memory: it does not see everything");
        return NULL;
    }
    *access = (struct sim_access){.refs = 1,
                                  .kind = kind,
                                  .writes = writes,
                                  .seq = sim_checker_number(),
                                  .thread = sim_checker_thread(),
                                  .device = -1,
                                  .start = start,
                                  .nbytes = nbytes};
    return access;
}

static void
name_queue(struct sim_access *access, const struct sim_queue *queue)
{
    access->actor = queue->actor;
    access->stream = queue->id;
    access->device = queue->context != NULL ? queue->context->ordinal : 0;
}

struct sim_access *
sim_checker_host_access(enum sim_access_kind kind, bool writes, uintptr_t start,
                        size_t nbytes)
{
    struct sim_access *access = create(kind, writes, start, nbytes);
    const struct sim_thread *thread = sim_thread_get();
    if (access == NULL) {
        return NULL;
    }
    if (thread != NULL && thread->running != NULL) {
        name_queue(access, thread->running->queue);
        access->in_host_function = true;
        access->count = thread->running->n_doing;
        access->clock = sim_clock_retain(thread->running->clock);
        return access;
    }
    access->count = ++checker.n_host;
    sim_clock_set(&checker.host, SIM_HOST_ACTOR, access->count);
    access->clock = sim_clock_retain(checker.host);
    return access;
}

struct sim_access *
sim_checker_queue_access(struct sim_queue *queue, uintptr_t start, size_t nbytes)
{
    struct sim_access *access = create(SIM_ACCESS_HANDING_OUT, true, start, nbytes);
    if (access != NULL) {
        name_queue(access, queue);
        access->count = UINT64_MAX; /* nothing comes after it yet */
        sim_checker_await_queue(&access->clock, queue);
        sim_clock_join(&access->clock, checker.host);
    }
    return access;
}

void
sim_checker_touch(struct sim_access *access, uintptr_t start, size_t nbytes, bool stays)
{
    struct sim_range *range = sim_range_find(start);
    if (range == NULL || range->kind != SIM_VIRTUAL) {
        sim_shadow_touch(access, start, nbytes, stays);
        return;
    }
    while (nbytes > 0) {
        size_t n = nbytes;
        struct sim_span span = {.range = range, .address = start, .is_reserved = true};
        struct sim_physical *physical = sim_virtual_use(&span, &n);
        if (physical != NULL) {
            sim_shadow_touch(access, span.address, n, stays);
            sim_virtual_unuse(physical);
        }
        start += n;
        nbytes -= n;
    }
}

/* ---- work ------------------------------------------------------------------------ */

static void
touch_rows(struct sim_access *access, const struct sim_copy *copy,
           const struct sim_span *span)
{
    if (access->nbytes == sim_copy_n_rows(copy) * copy->width) {
        sim_checker_touch(access, span->address, access->nbytes, true);
        return;
    }
    for (size_t row = 0; row < sim_copy_n_rows(copy); row++) {
        sim_checker_touch(access, sim_copy_row(copy, span, row), copy->width, true);
    }
}

/* Memory that its user has given back, or that a graph has lost to somebody else. */
static void
check_block(const struct sim_access *access, const struct sim_op *op)
{
    const char *name = sim_call_name(op->call);
    const struct sim_block *block =
        op->is_captured ? sim_block_newest(access->start, access->nbytes)
                        : sim_block_given(access->start, access->nbytes);
    if (block != NULL && op->is_captured && block->taken > op->newest_taken) {
        sim_race_tell("#%llu: %s of a graph on stream %llu of device %d uses %zu B at "
                      "0x%zx, which were handed out again since its capture: #%llu",
                      (unsigned long long)access->seq, name, access->stream,
                      access->device, access->nbytes, (size_t)access->start,
                      (unsigned long long)block->taken);
    }
    else if (block != NULL && !op->is_captured) {
        sim_race_tell("#%llu: %s on stream %llu of device %d (thread %d) uses %zu B at "
                      "0x%zx, which were given back: #%llu (thread %d)",
                      (unsigned long long)access->seq, name, access->stream,
                      access->device, access->thread, access->nbytes,
                      (size_t)access->start, (unsigned long long)block->given,
                      block->thread);
    }
}

/* By an operation that has its place in the queue; NULL: no memory. */
static struct sim_access *
create_work(const struct sim_queue *queue, const struct sim_op *op, bool writes,
            uintptr_t start, size_t nbytes)
{
    struct sim_access *access = create(SIM_ACCESS_WORK, writes, start, nbytes);
    if (access == NULL) {
        return NULL;
    }
    name_queue(access, queue);
    access->count = op->n_doing;
    access->clock = sim_clock_retain(op->clock);
    access->call = op->call;
    access->of_graph = op->is_captured;
    access->seq = op->seq;
    check_block(access, op);
    return access;
}

static void
touch_side(const struct sim_queue *queue, const struct sim_op *op,
           const struct sim_span *span, bool writes)
{
    struct sim_access *access =
        create_work(queue, op, writes, span->address, sim_copy_extent(&op->copy, span));
    if (access != NULL) {
        touch_rows(access, &op->copy, span);
        sim_access_release(access);
    }
}

static void
touch_areas(const struct sim_queue *queue, const struct sim_op *op)
{
    for (size_t i = 0; i < op->n_areas; i++) {
        const struct nrm_cudasim_area *area = &op->areas[i];
        struct sim_access *access =
            create_work(queue, op, area->writes != 0, area->start, area->nbytes);
        if (access != NULL) {
            sim_checker_touch(access, area->start, area->nbytes, true);
            sim_access_release(access);
        }
    }
}

void
sim_checker_submit(struct sim_queue *queue, struct sim_op *op)
{
    if (!sim.config.check) {
        return;
    }
    sim_clock_join(&queue->clock, checker.host);
    sim_checker_await_queue(&queue->clock, queue);
    op->n_doing = ++queue->n_doings;
    sim_clock_set(&queue->clock, queue->actor, op->n_doing);
    op->clock = sim_clock_retain(queue->clock);
    if (op->kind == SIM_OP_COPY && op->staged == NULL) {
        touch_side(queue, op, &op->copy.src, false);
    }
    if (op->kind == SIM_OP_COPY || op->kind == SIM_OP_FILL) {
        touch_side(queue, op, &op->copy.dst, true);
    }
    touch_areas(queue, op);
}

static void
raise_newest(struct sim_op *op, uintptr_t start, size_t nbytes)
{
    const struct sim_block *block = sim_block_newest(start, nbytes);
    if (block != NULL && block->taken > op->newest_taken) {
        op->newest_taken = block->taken;
    }
}

/* What it uses may be given back before the graph runs, but not go to somebody else. */
void
sim_checker_capture(struct sim_op *op)
{
    const struct sim_copy *copy = &op->copy;
    op->is_captured = true;
    if (!sim.config.check) {
        return;
    }
    if (copy->height != 0) {
        raise_newest(op, copy->dst.address, sim_copy_extent(copy, &copy->dst));
        raise_newest(op, copy->src.address, sim_copy_extent(copy, &copy->src));
    }
    for (size_t i = 0; i < op->n_areas; i++) {
        raise_newest(op, op->areas[i].start, op->areas[i].nbytes);
    }
}

void
sim_checker_stage(const struct sim_op *op)
{
    const struct sim_span *src = &op->copy.src;
    if (!sim.config.check) {
        return;
    }
    struct sim_access *access = sim_checker_host_access(
        SIM_ACCESS_STAGING, false, src->address, sim_copy_extent(&op->copy, src));
    if (access != NULL) {
        access->call = op->call;
        touch_rows(access, &op->copy, src);
        sim_access_release(access);
    }
}

/* ---- the end --------------------------------------------------------------------- */

void
sim_checker_forget(uintptr_t start, size_t nbytes)
{
    if (sim.config.check) {
        sim_shadow_forget(start, nbytes);
        sim_blocks_forget(start, nbytes);
    }
}

void
sim_checker_reset(void)
{
    sim_shadow_reset();
    sim_blocks_reset();
    sim_races_reset();
    sim_clock_release(checker.host);
    checker.host = NULL;
    checker.n_host = 0;
    checker.n_actors = 0;
}

/* ---- controls -------------------------------------------------------------------- */

int
nrm_cudasim_checks(void)
{
    sim_lock();
    int checks = sim.config.check != NRM_CUDASIM_CHECK_OFF;
    sim_unlock();
    return checks;
}

int
nrm_cudasim_host_access(const void *ptr, size_t nbytes, int writes)
{
    int result = NRM_CUDA_ERROR_NOT_SUPPORTED;
    sim_lock();
    if (sim.config.check) {
        struct sim_access *access = sim_checker_host_access(
            SIM_ACCESS_MARKED, writes != 0, (uintptr_t)ptr, nbytes);
        result = NRM_CUDA_ERROR_OUT_OF_MEMORY;
        if (access != NULL) {
            sim_checker_touch(access, (uintptr_t)ptr, nbytes, true);
            sim_access_release(access);
            result = NRM_CUDA_SUCCESS;
        }
    }
    sim_unlock();
    return result;
}
