/*
 * Known uses: what a program says about GPU work that touches page-locked or managed
 * memory. Freed memory waits for the context epochs anyway; a use adds what they do not
 * see (contexts other than primary ones, graphs), and with NRM_REUSE_RECORDED uses are
 * all that it waits for.
 *
 * A use is noted for the block that an address lies in, and goes with it: whoever gives
 * the block back, and through whatever resource, it is not handed out, unmapped or
 * unregistered before its uses are done.
 */
#ifndef NRM_USES_H
#define NRM_USES_H

#include <stddef.h>
#include <stdint.h>

#include "nrm/status.h"
#include "nrm/stream.h"

/*
 * Notes that everything submitted to `stream` so far may use the live block that
 * contains `ptr`, which may be interior. Without effect on host memory of a resource,
 * under NRM_REUSE_IMMEDIATE and where CUDA was never initialised. A stream that is
 * being captured makes it a use of the graph: it ends when the graph, and all that was
 * instantiated of it, is destroyed.
 *
 * For a stream of nrm_stream_create and the default streams no event is recorded, and a
 * stream may end while it is in use. NRM_NOT_OWNED: the address lies in no block of
 * ours. NRM_NOT_SUPPORTED: in device memory, which is ordered by the stream that it is
 * freed on. NRM_INVALID_VALUE: the per-thread stream of another thread. NRM_CUDA_ERROR.
 */
NRM_API NRM_NODISCARD nrm_status nrm_record_use(const void *ptr, nrm_stream *stream);

/*
 * The same for a bare handle, which is used in this call only and never kept: it must
 * be that of a stream that lives, as for every call of the driver. The handles 0, 1 and
 * 2 mean streams of the current context.
 */
NRM_API NRM_NODISCARD nrm_status nrm_record_use_on_handle(const void *ptr,
                                                          uintptr_t handle);

typedef struct nrm_use {
    uintptr_t stream; /* its handle when the use was noted: a name, it may be gone */
    int is_captured;  /* 1: of a graph */
} nrm_use;

/*
 * The uses of the block that contains `ptr` that are pending, oldest first, at most
 * `capacity` of them; *out_n is how many there are. Asks the driver, and may block.
 */
NRM_API NRM_NODISCARD nrm_status nrm_block_uses(const void *ptr, nrm_use *out,
                                                size_t capacity, size_t *out_n);

#endif
