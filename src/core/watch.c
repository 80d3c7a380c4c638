/*
 * What the checker of the simulated driver is told. watch.h says when.
 *
 * A thread that has kept blocks from before would hand them out without a word, so the
 * short way is closed for memory that GPUs see: threads get no slots for such pools
 * (core/dispatch.c), and those that they have are forbidden.
 */
#include "core/watch.h"

#include "core/stream.h"
#include "core/uses.h"

/* NULL: nobody listens, or the memory is no GPU's business. */
static const struct nrm__driver *
find_watcher(const struct nrm__block *block)
{
    return block->owner->kind != NRM_KIND_HOST ? atomic_load(&nrm__cuda_watcher) : NULL;
}

void
nrm__watch_taken(const struct nrm__block *block, size_t offset, size_t nbytes,
                 const nrm_stream *stream)
{
    const struct nrm__driver *driver = find_watcher(block);
    uintptr_t handle = NRM_CUDA_WATCH_NO_STREAM;
    if (driver == NULL || nbytes == 0) {
        return;
    }
    bool is_for_stream = !nrm_kind_is_host_accessible(block->owner->kind) ||
                         (block->owner->flags & NRM__OPS_IN_ORDER) != 0;
    if (stream != NULL && is_for_stream) {
        handle = stream->handle;
    }
    atomic_store(&nrm__epoch_forbids, true);
    driver->block_taken((uintptr_t)block->ptr + offset, nbytes,
                        nrm_resource_device(block->owner), handle);
}

void
nrm__watch_given(const struct nrm__block *block, size_t offset, size_t nbytes)
{
    const struct nrm__driver *driver = find_watcher(block);
    if (driver != NULL && nbytes != 0) {
        driver->block_given((uintptr_t)block->ptr + offset, nbytes);
    }
}
