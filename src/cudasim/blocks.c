/* Blocks, as an allocator hands them out and gets them back.
 *
 * It tells so by two entry points that no real driver has. What it hands out to the
 * host, which writes where nobody sees it, counts as written at that moment; what it
 * hands out to a stream must be in the order of that stream, and is compared with what
 * went before. What is given back says nothing of order: the GPU may go on with it. */
#include "checker.h"

static struct sim_intervals blocks = {.item_nbytes = sizeof(struct sim_block)};

static struct sim_block *
block_at(size_t index)
{
    return sim_intervals_at(&blocks, index);
}

static void
insert(struct sim_block block)
{
    (void)sim_intervals_insert(&blocks, sim_intervals_find(&blocks, block.where.start),
                               &block);
}

static void
cut(uintptr_t address)
{
    size_t index = sim_intervals_find(&blocks, address);
    if (index < blocks.n && block_at(index)->where.start < address) {
        struct sim_block left = *block_at(index);
        left.where.end = address;
        if (sim_intervals_insert(&blocks, index, &left)) {
            block_at(index + 1)->where.start = address;
        }
    }
}

void
sim_blocks_forget(uintptr_t start, size_t nbytes)
{
    cut(start);
    cut(start + nbytes);
    size_t first = sim_intervals_find(&blocks, start);
    sim_intervals_remove(&blocks, first,
                         sim_intervals_limit(&blocks, first, start + nbytes));
}

void
sim_blocks_reset(void)
{
    blocks.n = 0;
}

const struct sim_block *
sim_block_newest(uintptr_t start, size_t nbytes)
{
    const struct sim_block *newest = NULL;
    size_t first = sim_intervals_find(&blocks, start);
    size_t end = sim_intervals_limit(&blocks, first, start + nbytes);
    for (size_t i = first; i < end; i++) {
        if (newest == NULL || block_at(i)->taken > newest->taken) {
            newest = block_at(i);
        }
    }
    return newest;
}

const struct sim_block *
sim_block_given(uintptr_t start, size_t nbytes)
{
    size_t first = sim_intervals_find(&blocks, start);
    size_t end = sim_intervals_limit(&blocks, first, start + nbytes);
    for (size_t i = first; i < end; i++) {
        if (block_at(i)->given != 0) {
            return block_at(i);
        }
    }
    return NULL;
}

/* ---- what allocators say --------------------------------------------------------- */

/* The queue of a stream of theirs; NULL: none, or one that is gone. */
static struct sim_queue *
find_queue(int device, uintptr_t stream)
{
    struct sim_call call = {.thread = sim_thread_get()};
    struct sim_queue *queue = NULL;
    nrm_CUstream handle = (nrm_CUstream)stream;
    if (stream == NRM_CUDA_WATCH_NO_STREAM || call.thread == NULL || device < 0 ||
        device >= sim.n_visible) {
        return NULL;
    }
    call.context = &sim.devices[sim.visible[device]].context;
    bool is_special = stream <= (uintptr_t)NRM_CU_STREAM_PER_THREAD;
    if (!call.context->alive ||
        (!is_special && !sim_handle_is_live(&sim_streams, handle)) ||
        sim_stream_find(&call, handle, &queue) != NRM_CUDA_SUCCESS) {
        return NULL;
    }
    return queue;
}

static void
hand_out(uintptr_t ptr, size_t nbytes, struct sim_queue *queue)
{
    struct sim_access *access =
        queue != NULL
            ? sim_checker_queue_access(queue, ptr, nbytes)
            : sim_checker_host_access(SIM_ACCESS_HANDING_OUT, true, ptr, nbytes);
    if (access == NULL) {
        return;
    }
    sim_checker_touch(access, ptr, nbytes, queue == NULL);
    sim_blocks_forget(ptr, nbytes);
    insert((struct sim_block){.where = {ptr, ptr + nbytes}, .taken = access->seq});
    sim_access_release(access);
}

/* Memory of a stream that is being captured is used when the graph runs, and compared
 * then. */
void
nrm_cudasim_block_taken(uintptr_t ptr, size_t nbytes, int device, uintptr_t stream)
{
    if (atomic_load(&sim_is_forked)) {
        return;
    }
    sim_lock();
    if (sim.config.check) {
        struct sim_queue *queue = find_queue(device, stream);
        if (queue == NULL || queue->capture == NULL) {
            hand_out(ptr, nbytes, queue);
        }
        else {
            sim_blocks_forget(ptr, nbytes);
            insert((struct sim_block){.where = {ptr, ptr + nbytes},
                                      .taken = sim_checker_number()});
        }
    }
    sim_unlock();
}

void
nrm_cudasim_block_given(uintptr_t ptr, size_t nbytes)
{
    if (atomic_load(&sim_is_forked)) {
        return;
    }
    sim_lock();
    if (sim.config.check) {
        const struct sim_block *old = sim_block_newest(ptr, nbytes);
        struct sim_block block = {.where = {ptr, ptr + nbytes},
                                  .taken = old != NULL ? old->taken : 0,
                                  .given = sim_checker_number(),
                                  .thread = sim_checker_thread()};
        sim_blocks_forget(ptr, nbytes);
        insert(block);
    }
    sim_unlock();
}
