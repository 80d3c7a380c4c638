/*
 * How a request is noted in the ring of its thread (core/log.h): a few stores.
 *
 * A free has the time before it, and is pending from then on until its record stands: a
 * record of a later time that another thread makes of the same memory waits for it.
 */
#ifndef NRM_CORE_LOG_NOTE_H
#define NRM_CORE_LOG_NOTE_H

#include "core/log.h"
#include "core/stream.h"

/* That of an adaptor that logs. */
static inline struct nrm__log *
nrm__log_of(nrm_resource *mr)
{
    return (struct nrm__log *)(void *)((char *)mr + mr->ops->log);
}

__attribute__((always_inline)) static inline void
nrm__log_write(struct nrm__log_record *record, const struct nrm__log *log,
               enum nrm__log_action action, uint64_t ticks, void *ptr, size_t nbytes,
               const nrm_stream *stream, bool counts)
{
    record->ticks = ticks;
    record->log = log;
    record->ptr = ptr;
    record->nbytes = nbytes;
    record->stream = stream != NULL ? stream->handle : 0;
    record->action = action;
    record->counts = counts;
}

/* Notes a request in any thread, from outside; ends what is pending since `ticks`.
   `may_detach`: not where an array dies, nor in the middle of a change of its size. */
void nrm__log_note(const struct nrm__log *log, enum nrm__log_action action,
                   uint64_t ticks, void *ptr, size_t nbytes, const nrm_stream *stream,
                   bool counts, bool may_detach);

static inline void
nrm__log_note_allocation(const struct nrm__log *log, void *ptr, size_t nbytes,
                         const nrm_stream *stream, bool counts, bool may_detach)
{
    nrm__log_note(log, ptr != NULL ? NRM__LOG_ALLOCATE : NRM__LOG_FAILURE, nrm__ticks(),
                  ptr, nbytes, stream, counts, may_detach);
}

/* A block is about to be given back: the time of that, for its record. */
uint64_t nrm__log_begin_free(void);

/* It was not. */
void nrm__log_cancel_free(uint64_t ticks);

#endif
