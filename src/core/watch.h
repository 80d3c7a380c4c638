/*
 * Telling a checker which memory is handed out and given back.
 *
 * Only the simulated driver has one, and only when it is asked for; then every block of
 * memory that GPUs see goes the long way, where it is told. Else it costs a load and a
 * branch there, and nothing on the short way.
 */
#ifndef NRM_CORE_WATCH_H
#define NRM_CORE_WATCH_H

#include "core/ops.h"
#include "cuda/driver.h"

static inline bool
nrm__is_watched(void)
{
    return __builtin_expect(
        atomic_load_explicit(&nrm__cuda_watcher, memory_order_acquire) != NULL, 0);
}

/* Some bytes of a live block, from `offset` on, are the program's from now on, in the
   order of the stream (NULL: of the host) where only GPUs see them. */
void nrm__watch_taken(const struct nrm__block *block, size_t offset, size_t nbytes,
                      const nrm_stream *stream);

/* They are not any more, from now on. The caller has claimed them. */
void nrm__watch_given(const struct nrm__block *block, size_t offset, size_t nbytes);

#endif
