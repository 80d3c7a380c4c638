/* Blocks, as an allocator hands them out and gets them back.
 *
 * It tells so by two entry points that no real driver has. What it hands out to the host,
 * which writes where nobody sees it, counts as written at that moment; what it hands out
 * to a stream must be in the order of that stream, and is compared with what went before.
 * What is given back says nothing of order: the GPU may go on with it. */
#include "checker.h"

#include <stdlib.h>
#include <string.h>

static struct {
    struct sim_block *items; /* in order of address; they never overlap */
    size_t n;
    size_t capacity;
} blocks;

/* The first that ends behind the address. */
static size_t
index_of(uintptr_t address)
{
    size_t low = 0;
    size_t high = blocks.n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (blocks.items[middle].end <= address) {
            low = middle + 1;
        }
        else {
            high = middle;
        }
    }
    return low;
}

static bool
insert(size_t index, struct sim_block block)
{
    if (blocks.n == blocks.capacity) {
        size_t capacity = blocks.capacity == 0 ? 64 : 2 * blocks.capacity;
        void *items = realloc(blocks.items, capacity * sizeof *blocks.items);
        if (items == NULL) {
            sim_fault("the checker has no memory: it does not see everything");
            return false;
        }
        blocks.items = items;
        blocks.capacity = capacity;
    }
    memmove(blocks.items + index + 1, blocks.items + index,
            (blocks.n - index) * sizeof *blocks.items);
    blocks.items[index] = block;
    blocks.n++;
    return true;
}

static void
cut(uintptr_t address)
{
    size_t index = index_of(address);
    if (index < blocks.n && blocks.items[index].start < address) {
        struct sim_block left = blocks.items[index];
        left.end = address;
        if (insert(index, left)) {
            blocks.items[index + 1].start = address;
        }
    }
}

void
sim_blocks_forget(uintptr_t start, size_t nbytes)
{
    cut(start);
    cut(start + nbytes);
    size_t first = index_of(start);
    size_t end = first;
    while (end < blocks.n && blocks.items[end].start < start + nbytes) {
        end++;
    }
    if (first != end) {
        memmove(blocks.items + first, blocks.items + end,
                (blocks.n - end) * sizeof *blocks.items);
        blocks.n -= end - first;
    }
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
    for (size_t i = index_of(start);
         i < blocks.n && blocks.items[i].start < start + nbytes; i++) {
        if (newest == NULL || blocks.items[i].taken > newest->taken) {
            newest = &blocks.items[i];
        }
    }
    return newest;
}

const struct sim_block *
sim_block_given(uintptr_t start, size_t nbytes)
{
    for (size_t i = index_of(start);
         i < blocks.n && blocks.items[i].start < start + nbytes; i++) {
        if (blocks.items[i].given != 0) {
            return &blocks.items[i];
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
    insert(index_of(ptr),
           (struct sim_block){.start = ptr, .end = ptr + nbytes, .taken = access->seq});
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
            insert(index_of(ptr), (struct sim_block){.start = ptr,
                                                     .end = ptr + nbytes,
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
        struct sim_block block = {.start = ptr,
                                  .end = ptr + nbytes,
                                  .taken = old != NULL ? old->taken : 0,
                                  .given = sim_checker_number(),
                                  .thread = sim_checker_thread()};
        sim_blocks_forget(ptr, nbytes);
        insert(index_of(ptr), block);
    }
    sim_unlock();
}
