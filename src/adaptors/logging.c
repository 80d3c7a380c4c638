/*
 * LoggingResourceAdaptor: a row of text for each request, in a file.
 *
 * It notes a record in the ring of the thread (core/log_note.h) after an allocation,
 * and for a free with the time before it. As it changes no request, requests go on to
 * the upstream on the short way (core/logged.c). Nor does it count then: whoever drains
 * the rings does, in the order of time, so that even a peak that several threads make
 * is exact.
 */
#include <stdio.h>
#include <string.h>

#include "adaptors/forward.h"
#include "base/assert.h"
#include "base/error.h"
#include "base/given.h"
#include "core/hooks.h"
#include "core/log_note.h"
#include "nrm/adaptors.h"
#include "nrm/options.h"

struct logging {
    nrm_resource base;
    struct nrm__log log;
    char path[NRM__LOG_PATH_NBYTES];
};

static const struct nrm__ops logging_ops;

static struct logging *
logging_from(nrm_resource *mr)
{
    NRM_ASSERT(mr->ops == &logging_ops);
    return (struct logging *)mr;
}

static const struct nrm__log *
log_of(nrm_resource *mr)
{
    return &logging_from(mr)->log;
}

/* ---- blocks that come through another adaptor, or a pool ---- */

static nrm_status
logging_allocate(nrm_resource *mr, const struct nrm__request *request,
                 struct nrm__block *out)
{
    nrm_status status = nrm__allocate(mr->upstream, request, out);
    nrm__log_note_allocation(log_of(mr), status == NRM_OK ? out->ptr : NULL,
                             request->nbytes, request->stream, false, true);
    return status;
}

static void
logging_deallocate(nrm_resource *mr, const struct nrm__block *block, nrm_stream *stream)
{
    void *ptr = block->ptr;
    size_t nbytes = block->nbytes;
    uint64_t ticks = nrm__log_begin_free();
    nrm__deallocate(mr->upstream, block, stream);
    nrm__log_note(log_of(mr), NRM__LOG_FREE, ticks, ptr, nbytes, stream, false,
                  stream != NULL);
}

static void
logging_forget_block(nrm_resource *mr, const struct nrm__block *block)
{
    nrm__log_note(log_of(mr), NRM__LOG_FREE, nrm__log_begin_free(), block->ptr,
                  block->nbytes, NULL, false, false);
}

/* One that changed its size in place went, and came back. */
static nrm_status
logging_reallocate(nrm_resource *mr, struct nrm__block *block,
                   const struct nrm__request *request)
{
    void *ptr = block->ptr;
    size_t nbytes = block->nbytes;
    uint64_t ticks = nrm__log_begin_free();
    nrm_status status = nrm__reallocate_in_place(mr->upstream, block, request);
    if (status != NRM_OK) {
        nrm__log_cancel_free(ticks);
    }
    else {
        nrm__log_note(log_of(mr), NRM__LOG_FREE, ticks, ptr, nbytes, request->stream,
                      false, false);
    }
    if (status != NRM_NOT_SUPPORTED) {
        nrm__log_note_allocation(log_of(mr), status == NRM_OK ? block->ptr : NULL,
                                 request->nbytes, request->stream, false, false);
    }
    return status;
}

/* ---- reports ---- */

static struct logging *
checked(nrm_resource *mr)
{
    if (mr->ops != &logging_ops) {
        (void)nrm__error(NRM_INVALID_VALUE, "a %s writes no log", mr->ops->class_name);
        return NULL;
    }
    return logging_from(mr);
}

nrm_status
nrm_logging_flush(nrm_resource *mr)
{
    struct logging *self = checked(mr);
    return self != NULL ? nrm__log_flush(self->log.file) : NRM_INVALID_VALUE;
}

nrm_status
nrm_logging_get_path(nrm_resource *mr, char *out, size_t size)
{
    struct logging *self = checked(mr);
    if (self == NULL) {
        return NRM_INVALID_VALUE;
    }
    snprintf(out, size, "%s", self->path);
    return NRM_OK;
}

/* What stands in the rings is counted first. */
static void
logging_statistics(nrm_resource *mr, nrm_statistics *out)
{
    nrm__forward_statistics(mr, out);
    void *token = nrm__detach();
    nrm__log_drain();
    nrm__attach(token);
    nrm__counters_read(&mr->counters, out);
    out->errors += (int64_t)nrm__log_n_lost(logging_from(mr)->log.file);
}

/* ---- life ---- */

static void
logging_finish(nrm_resource *mr)
{
    nrm__log_close(logging_from(mr)->log.file);
}

static const struct nrm__ops logging_ops = {
    .class_name = "LoggingResourceAdaptor",
    .flags = NRM__OPS_ADAPTOR,
    .allocate = logging_allocate,
    .deallocate = logging_deallocate,
    .reallocate = logging_reallocate,
    .forget_block = logging_forget_block,
    .renew_block = nrm__forward_renew_block,
    .log = offsetof(struct logging, log),
    .statistics = logging_statistics,
    .finish = logging_finish,
};

/* "a/log.txt" → "a/log.dev0.txt" */
static int
format_path(char *out, const nrm_logging_options *given, const char *path)
{
    if (!given->name_device) {
        return snprintf(out, NRM__LOG_PATH_NBYTES, "%s", path);
    }
    const char *slash = strrchr(path, '/');
    const char *name = slash != NULL ? slash + 1 : path;
    name += strspn(name, "."); /* those before a hidden name begin no extension */
    const char *dot = strrchr(name, '.');
    const char *extension = dot != NULL ? dot : name + strlen(name);
    return snprintf(out, NRM__LOG_PATH_NBYTES, "%.*s.dev%d%s", (int)(extension - path),
                    path, given->device, extension);
}

static nrm_status
make_path(const nrm_logging_options *given, char *out)
{
    char text[NRM__LOG_PATH_NBYTES] = "";
    const char *path = given->path;
    if (path == NULL) {
        nrm_option_get_text(NRM_OPT_LOG_FILE, text, sizeof text);
        path = text;
    }
    if (path[0] == '\0') {
        return nrm__error(NRM_INVALID_VALUE,
                          "a log needs the name of a file: as an argument, in the "
                          "option log_file or in NUMPY_RMM_LOG_FILE");
    }
    int n = strlen(path) < NRM__LOG_PATH_NBYTES ? format_path(out, given, path) : -1;
    if (n < 0 || (unsigned)n >= NRM__LOG_PATH_NBYTES) {
        return nrm__error(NRM_INVALID_VALUE,
                          "the name of a log has at most %u bytes, not %zu",
                          NRM__LOG_PATH_NBYTES - 1, strlen(path));
    }
    return NRM_OK;
}

nrm_status
nrm_logging_create(nrm_resource *upstream, const nrm_logging_options *options,
                   nrm_resource **out)
{
    nrm_logging_options given = {.size = sizeof given};
    nrm_resource *mr;
    NRM__COPY_GIVEN(given, options);
    NRM_TRY(nrm__forward_create(&logging_ops, upstream, sizeof(struct logging), &mr));
    struct logging *self = logging_from(mr);
    self->log.counters = &mr->counters;
    nrm_status status = make_path(&given, self->path);
    if (status == NRM_OK) {
        status = nrm__log_open(self->path, &self->log.file);
    }
    if (status != NRM_OK) {
        nrm__resource_abandon(mr);
        return status;
    }
    nrm__resource_publish(mr);
    *out = mr;
    return NRM_OK;
}
