/* Memory that is allocated and freed in the order of streams: the pieces of pools.
 *
 * A pool takes chunks of its device, or of managed memory, and hands out pieces of
 * them. A free is an operation of its stream. Until it is done the piece goes to that
 * stream only, or to one that is made to wait for it; afterwards to anybody. What is
 * free is given back to the device when something synchronises and the pool holds more
 * than its threshold, as whole chunks, and never while an operation uses the chunk.
 *
 * Memory that a captured stream allocates or frees belongs to the graph: it is there
 * from the capture on, and is not handed out again before the pool goes. */
#include "pools.h"

#include <stdlib.h>

enum { PIECE_GRANULE = 512 };

static const size_t CHUNK_NBYTES = (size_t)32 << 20;
static const size_t SMALL_CHUNK_NBYTES = (size_t)2 << 20;

enum piece_state { PIECE_FREE, PIECE_LIVE, PIECE_FREED, PIECE_OF_GRAPH };

/* The pieces of a chunk fill it. */
struct sim_piece {
    struct sim_piece *next; /* in order of address */
    uintptr_t start;
    size_t nbytes;
    size_t asked; /* of a live one: what the program may touch */
    enum piece_state state;
    struct sim_queue *queue;   /* FREED: where; retained */
    struct sim_marker *marker; /* FREED: passed when that is done; owned, NULL: it is */
    struct sim_clock *clock;   /* checker: of all frees of these bytes; owned */
};

static size_t
round_up(size_t nbytes, size_t granule)
{
    return (nbytes + granule - 1) / granule * granule;
}

/* ---- pieces ---------------------------------------------------------------------- */

static void
piece_forget_free(struct sim_piece *piece)
{
    if (piece->queue != NULL) {
        sim_queue_release(piece->queue);
    }
    sim_marker_release(piece->marker);
    piece->queue = NULL;
    piece->marker = NULL;
}

static void
pieces_destroy(struct sim_piece *piece)
{
    while (piece != NULL) {
        struct sim_piece *next = piece->next;
        piece_forget_free(piece);
        sim_clock_release(piece->clock);
        free(piece);
        piece = next;
    }
}

static struct sim_piece *
piece_find(const struct sim_range *chunk, uintptr_t address)
{
    struct sim_piece *piece = chunk->pieces;
    while (piece != NULL && piece->start + piece->nbytes <= address) {
        piece = piece->next;
    }
    return piece;
}

static bool
is_in_use(const struct sim_piece *piece)
{
    return piece->state == PIECE_LIVE || piece->state == PIECE_OF_GRAPH;
}

bool
sim_pool_holds(const struct sim_range *range, uintptr_t start, size_t nbytes)
{
    if (range->pool == NULL) {
        return true;
    }
    const struct sim_piece *piece = piece_find(range, start);
    return piece != NULL && is_in_use(piece) &&
           nbytes <= piece->asked - (start - piece->start) &&
           start - piece->start <= piece->asked;
}

bool
sim_pool_piece(const struct sim_range *range, uintptr_t address, uintptr_t *out_start,
               size_t *out_nbytes)
{
    const struct sim_piece *piece = piece_find(range, address);
    if (piece == NULL || !is_in_use(piece)) {
        return false;
    }
    *out_start = piece->start;
    *out_nbytes = piece->asked;
    return true;
}

/* Frees that are done are nobody's any more, and neighbours become one. */
static void
chunk_settle(struct sim_range *chunk)
{
    struct sim_piece *piece = chunk->pieces;
    while (piece != NULL) {
        if (piece->state == PIECE_FREED && sim_marker_is_passed(piece->marker)) {
            piece_forget_free(piece);
            piece->state = PIECE_FREE;
        }
        piece = piece->next;
    }
    for (piece = chunk->pieces; piece != NULL;) {
        struct sim_piece *next = piece->next;
        if (next != NULL && piece->state == PIECE_FREE && next->state == PIECE_FREE) {
            piece->nbytes += next->nbytes;
            piece->next = next->next;
            sim_clock_join(&piece->clock, next->clock);
            sim_clock_release(next->clock);
            free(next);
        }
        else {
            piece = next;
        }
    }
}

/* Cuts a piece to size; what is left over keeps its state. Without memory for that the
 * piece stays larger. */
static void
piece_cut(struct sim_piece *piece, size_t nbytes)
{
    if (piece->nbytes == nbytes) {
        return;
    }
    struct sim_piece *rest = malloc(sizeof *rest);
    if (rest == NULL) {
        return;
    }
    *rest = *piece;
    rest->start += nbytes;
    rest->nbytes -= nbytes;
    if (rest->queue != NULL) {
        sim_queue_retain(rest->queue);
    }
    if (rest->marker != NULL) {
        sim_marker_retain(rest->marker);
    }
    rest->clock = sim_clock_retain(piece->clock);
    piece->nbytes = nbytes;
    piece->next = rest;
}

/* ---- chunks ---------------------------------------------------------------------- */

void
sim_pool_drop_chunk(struct sim_range *range)
{
    struct nrm_CUmemPoolHandle_st *pool = range->pool;
    if (pool == NULL) {
        return;
    }
    for (struct sim_piece *piece = range->pieces; piece; piece = piece->next) {
        pool->used -= is_in_use(piece) ? piece->nbytes : 0;
    }
    pool->reserved -= range->nbytes;
    pieces_destroy(range->pieces);
    range->pieces = NULL;
    range->pool = NULL;
}

static bool
is_used_by_work(const struct sim_range *chunk)
{
    struct nrm_CUctx_st *context = NULL;
    while ((context = sim_context_next(context)) != NULL) {
        struct sim_queue *queue = context->queues;
        for (; queue != NULL; queue = queue->next) {
            for (struct sim_op *op = queue->first; op != NULL; op = op->next) {
                if (sim_op_uses(op, chunk)) {
                    return true;
                }
            }
        }
    }
    return false;
}

static bool
is_idle(const struct sim_range *chunk)
{
    return chunk->pieces->next == NULL && chunk->pieces->state == PIECE_FREE &&
           !is_used_by_work(chunk);
}

/* Gives idle chunks back while the pool keeps so many bytes, or with `most` until it
 * has no more than that. */
static void
give_back_idle(struct nrm_CUmemPoolHandle_st *pool, uint64_t keep, bool most)
{
    struct sim_range *range;
    for (size_t i = 0; (range = sim_range_at(i)) != NULL;) {
        if (range->pool != pool) {
            i++;
            continue;
        }
        chunk_settle(range);
        bool goes = most ? pool->reserved > keep
                         : pool->reserved - range->nbytes >= keep &&
                               pool->reserved >= range->nbytes;
        if (goes && is_idle(range)) {
            sim_device_memory_give(range);
        }
        else {
            i++;
        }
    }
}

/* A destroyed pool whose last piece is free goes. */
void
sim_pool_bury(struct nrm_CUmemPoolHandle_st *pool)
{
    if (!pool->is_doomed) {
        return;
    }
    give_back_idle(pool, 0, true);
    if (pool->reserved == 0) {
        sim_handle_destroy(&sim_pools, pool);
    }
}

static void
relax(void *handle, void *unused)
{
    struct nrm_CUmemPoolHandle_st *pool = handle;
    (void)unused;
    if (pool->is_doomed) {
        sim_pool_bury(pool);
    }
    else if (pool->reserved > pool->threshold) {
        give_back_idle(pool, pool->threshold, true);
    }
}

void
sim_pools_synchronized(void)
{
    sim_handles_each(&sim_pools, relax, NULL);
}

static nrm_CUresult
take_chunk(struct nrm_CUmemPoolHandle_st *pool, size_t nbytes, struct sim_range **out)
{
    struct sim_piece *piece = malloc(sizeof *piece);
    if (piece == NULL) {
        return NRM_CUDA_ERROR_OUT_OF_MEMORY;
    }
    nrm_CUresult result =
        pool->is_managed
            ? sim_managed_memory_take(pool->context, nbytes, out)
            : sim_device_memory_take(pool->context, SIM_DEVICE, nbytes, out);
    if (result != NRM_CUDA_SUCCESS) {
        free(piece);
        return result;
    }
    *piece = (struct sim_piece){.start = (*out)->start, .nbytes = nbytes};
    (*out)->pool = pool;
    (*out)->pieces = piece;
    pool->reserved += nbytes;
    pool->reserved_high = pool->reserved > pool->reserved_high ? pool->reserved
                                                               : pool->reserved_high;
    return NRM_CUDA_SUCCESS;
}

/* Of the usual size where that much is left. */
static struct sim_piece *
grow(struct nrm_CUmemPoolHandle_st *pool, size_t nbytes)
{
    static const size_t *const granules[] = {&CHUNK_NBYTES, &SMALL_CHUNK_NBYTES};
    struct sim_range *chunk;
    for (int i = 0; i < 2; i++) {
        size_t whole = round_up(nbytes, *granules[i]);
        if (whole >= nbytes && take_chunk(pool, whole, &chunk) == NRM_CUDA_SUCCESS) {
            return chunk->pieces;
        }
    }
    return take_chunk(pool, nbytes, &chunk) == NRM_CUDA_SUCCESS ? chunk->pieces : NULL;
}

/* ---- allocation ------------------------------------------------------------------ */

/* Whether a stream may have a piece without waiting for anybody. */
static bool
is_open_to(const struct sim_piece *piece, const struct sim_queue *queue)
{
    return piece->state == PIECE_FREE ||
           (piece->state == PIECE_FREED && piece->queue == queue);
}

/* The smallest piece that will do; with `waits` of those that another stream freed. */
static struct sim_piece *
find_piece(struct nrm_CUmemPoolHandle_st *pool, size_t nbytes,
           const struct sim_queue *queue, bool waits)
{
    struct sim_piece *found = NULL;
    struct sim_range *range;
    for (size_t i = 0; (range = sim_range_at(i)) != NULL; i++) {
        if (range->pool != pool) {
            continue;
        }
        chunk_settle(range);
        for (struct sim_piece *piece = range->pieces; piece; piece = piece->next) {
            bool fits = piece->nbytes >= nbytes && (waits ? piece->state == PIECE_FREED
                                                          : is_open_to(piece, queue));
            if (fits && (found == NULL || piece->nbytes < found->nbytes)) {
                found = piece;
            }
        }
    }
    return found;
}

/* The stream waits for the free of another one. */
static nrm_CUresult
await_free(struct sim_queue *queue, struct sim_piece *piece)
{
    struct sim_op *op =
        sim_op_create(SIM_OP_WAIT_MARKER, SIM_CALL_cuMemAllocFromPoolAsync);
    if (op == NULL) {
        return NRM_CUDA_ERROR_OUT_OF_MEMORY;
    }
    sim_marker_retain(piece->marker);
    op->marker = piece->marker;
    return sim_submit(queue, op);
}

static bool
allows(const struct nrm_CUmemPoolHandle_st *pool, nrm_CUmemPool_attribute attribute)
{
    return pool->reuse[attribute -
                       NRM_CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES] != 0;
}

static nrm_CUresult
choose(struct nrm_CUmemPoolHandle_st *pool, size_t nbytes, struct sim_queue *queue,
       struct sim_piece **out)
{
    bool is_captured = queue->capture != NULL;
    *out = find_piece(pool, nbytes, is_captured ? NULL : queue, false);
    if (*out == NULL) {
        *out = grow(pool, nbytes);
    }
    if (*out == NULL) { /* a real one maps what is free elsewhere anew */
        give_back_idle(pool, 0, true);
        *out = grow(pool, nbytes);
    }
    if (*out != NULL || is_captured ||
        !allows(pool, NRM_CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES)) {
        return *out != NULL ? NRM_CUDA_SUCCESS : NRM_CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = find_piece(pool, nbytes, queue, true);
    return *out != NULL ? await_free(queue, *out) : NRM_CUDA_ERROR_OUT_OF_MEMORY;
}

/* What comes next on the stream comes after the frees of these bytes, and so after all
 * that comes before them. */
static void
hand_out(struct sim_queue *queue, struct sim_piece *piece, size_t nbytes, size_t asked)
{
    struct nrm_CUmemPoolHandle_st *pool = sim_range_find(piece->start)->pool;
    piece_cut(piece, nbytes);
    sim_checker_queue_follows(queue, piece->clock);
    sim_clock_release(piece->clock);
    piece->clock = NULL;
    piece_forget_free(piece);
    piece->asked = asked;
    piece->state = queue->capture != NULL ? PIECE_OF_GRAPH : PIECE_LIVE;
    sim_blocks_forget(piece->start, piece->nbytes);
    pool->used += piece->nbytes;
    pool->used_high = pool->used > pool->used_high ? pool->used : pool->used_high;
}

nrm_CUresult
cuMemAllocFromPoolAsync(nrm_CUdeviceptr *ptr, size_t nbytes, nrm_CUmemoryPool pool,
                        nrm_CUstream stream)
{
    SIM_BEGIN(call, cuMemAllocFromPoolAsync, SIM_PTR(ptr), nbytes, SIM_PTR(pool),
              SIM_PTR(stream));
    struct sim_queue *queue;
    struct sim_piece *piece = NULL;
    if (ptr == NULL || !sim_is_pool(pool)) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    nrm_CUresult result = sim_stream_find(&call, stream, &queue);
    if (result == NRM_CUDA_SUCCESS) {
        result = sim_capture_check_submit(queue);
    }
    if (result == NRM_CUDA_SUCCESS && nbytes == 0) {
        *ptr = 0;
        return sim_call_end(&call, NRM_CUDA_SUCCESS);
    }
    size_t rounded = round_up(nbytes, PIECE_GRANULE);
    if (result == NRM_CUDA_SUCCESS) {
        result = rounded < nbytes || !pool->context->alive
                     ? NRM_CUDA_ERROR_OUT_OF_MEMORY
                     : choose(pool, rounded, queue, &piece);
    }
    if (result == NRM_CUDA_SUCCESS) {
        hand_out(queue, piece, rounded, nbytes);
        *ptr = piece->start;
    }
    return sim_call_end(&call, result);
}

/* ---- giving back ----------------------------------------------------------------- */

static struct sim_piece *
find_live(uintptr_t ptr, struct sim_range **out_range)
{
    struct sim_range *range = sim_range_find(ptr);
    struct sim_piece *piece =
        range != NULL && range->pool != NULL ? piece_find(range, ptr) : NULL;
    *out_range = range;
    return piece != NULL && piece->start == ptr && is_in_use(piece) ? piece : NULL;
}

nrm_CUresult
sim_pool_free_now(uintptr_t ptr)
{
    struct sim_range *range;
    struct sim_piece *piece = find_live(ptr, &range);
    if (piece == NULL) {
        return NRM_CUDA_ERROR_INVALID_VALUE;
    }
    range->pool->used -= piece->nbytes;
    piece->state = PIECE_FREE;
    sim_checker_forget(piece->start, piece->nbytes); /* the program vouches for it */
    sim_pool_bury(range->pool);
    return NRM_CUDA_SUCCESS;
}

static nrm_CUresult
free_in_order(struct sim_queue *queue, struct sim_range *range, struct sim_piece *piece)
{
    bool is_captured = queue->capture != NULL;
    struct sim_op *op = sim_op_create(SIM_OP_FREE, SIM_CALL_cuMemFreeAsync);
    nrm_CUresult result = op == NULL ? NRM_CUDA_ERROR_OUT_OF_MEMORY
                                     : sim_submit(queue, op);
    if (result != NRM_CUDA_SUCCESS || is_captured) {
        return result;
    }
    piece->marker = sim_marker_of_queue(queue);
    if (piece->marker == NULL) {
        return NRM_CUDA_ERROR_OUT_OF_MEMORY;
    }
    sim_clock_join(&piece->clock, piece->marker->clock);
    sim_queue_retain(queue);
    piece->queue = queue;
    piece->state = PIECE_FREED;
    range->pool->used -= piece->nbytes;
    return NRM_CUDA_SUCCESS;
}

nrm_CUresult
cuMemFreeAsync(nrm_CUdeviceptr ptr, nrm_CUstream stream)
{
    SIM_BEGIN(call, cuMemFreeAsync, ptr, SIM_PTR(stream));
    struct sim_queue *queue;
    struct sim_range *range;
    struct sim_piece *piece = find_live(ptr, &range);
    nrm_CUresult result = sim_stream_find(&call, stream, &queue);
    if (result == NRM_CUDA_SUCCESS) {
        result = piece == NULL ? NRM_CUDA_ERROR_INVALID_VALUE
                               : free_in_order(queue, range, piece);
    }
    return sim_call_end(&call, result);
}

nrm_CUresult
cuMemPoolTrimTo(nrm_CUmemoryPool pool, size_t keep_nbytes)
{
    SIM_BEGIN(call, cuMemPoolTrimTo, SIM_PTR(pool), keep_nbytes);
    if (!sim_is_pool(pool)) {
        return sim_call_end(&call, NRM_CUDA_ERROR_INVALID_VALUE);
    }
    give_back_idle(pool, keep_nbytes, false);
    return sim_call_end(&call, NRM_CUDA_SUCCESS);
}


/* ---- controls -------------------------------------------------------------------- */

void
sim_pools_count_pieces(uint64_t *count, uint64_t *nbytes)
{
    const struct sim_range *range;
    for (size_t i = 0; (range = sim_range_at(i)) != NULL; i++) {
        for (const struct sim_piece *piece = range->pieces; piece;
             piece = piece->next) {
            *count += is_in_use(piece);
            *nbytes += is_in_use(piece) ? piece->asked : 0;
        }
    }
}
