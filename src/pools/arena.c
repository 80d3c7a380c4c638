/*
 * ArenaMemoryResource: a pool that takes all its memory of the upstream when it is
 * made.
 *
 * RMM's arena is an allocator of its own, with a part for every thread; here the pool
 * serves all, so this is a pool whose first segment is the arena and whose limit is the
 * arena's size, and a report of what is in it when a request fails. It forwards to that
 * pool and owns no block itself.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/bits.h"
#include "base/error.h"
#include "core/block_map.h"
#include "core/enclosed.h"
#include "core/hooks.h"
#include "cuda/context.h"
#include "cuda/error.h"
#include "nrm/options.h"
#include "nrm/pools.h"
#include "base/given.h"
#include "os/system.h"
#include "pools/pool_internal.h"

/* States of blocks, for counting. A claimed one is on its way back, or kept by a
   thread. */
enum { FREE, LIVE, CLAIMED, PARKED, N_STATES };

#define N_SIZES 48    /* powers of two in the table of free blocks */
#define N_SEGMENTS 16 /* that a report lists one by one */
#define REPORT_SIZE 8192

struct arena {
    nrm_resource base;
    nrm_resource *pool;        /* its upstream is ours; retained */
    struct nrm__drawer drawer; /* of the pool */
    size_t nbytes;
    size_t alignment; /* that every block of its size can have */
    bool dumps;
};

static const struct nrm__ops arena_ops;

static struct arena *
arena_from(nrm_resource *mr)
{
    NRM_ASSERT(mr->ops == &arena_ops);
    return (struct arena *)mr;
}

/* ---- the report ---- */

struct sum {
    size_t n, nbytes;
};

/* What a pool looks like: gathered under its lock, printed after that. */
struct picture {
    struct sum states[N_STATES];
    struct sum sizes[N_SIZES]; /* of free blocks, by the power of two below */
    size_t largest_free_nbytes;
    size_t n_segments;
    struct {
        uintptr_t start;
        size_t nbytes;
        struct sum states[N_STATES];
    } segments[N_SEGMENTS];
};

static void
add_block(struct sum *sum, size_t nbytes)
{
    sum->n++;
    sum->nbytes += nbytes;
}

static unsigned
state_of(const struct nrm__pool_block *block)
{
    switch (nrm__pool_state_of(block)) {
    case NRM__POOL_FREE:
        return FREE;
    case NRM__POOL_LIVE:
        return LIVE;
    case NRM__POOL_PARKED:
        return PARKED;
    default:
        return CLAIMED;
    }
}

static void
look_at_segment_locked(const struct nrm__segment *segment, struct picture *picture)
{
    struct nrm__pool_block *block = nrm__pool_floor_locked(segment, segment->start);
    size_t index = picture->n_segments++;
    struct sum *own = index < N_SEGMENTS ? picture->segments[index].states : NULL;
    if (own != NULL) {
        picture->segments[index].start = segment->start;
        picture->segments[index].nbytes = segment->nbytes;
    }
    for (; block != NULL; block = block->next) {
        size_t nbytes = block->size;
        unsigned state = state_of(block);
        add_block(&picture->states[state], nbytes);
        if (own != NULL) {
            add_block(&own[state], nbytes);
        }
        if (state == FREE) {
            unsigned log = 63u - (unsigned)__builtin_clzll(nbytes);
            add_block(&picture->sizes[nrm__min(log, N_SIZES - 1)], nbytes);
            picture->largest_free_nbytes =
                nrm__max(picture->largest_free_nbytes, nbytes);
        }
    }
}

static void
take_picture(struct nrm__pool *pool, struct picture *out)
{
    *out = (struct picture){0};
    nrm__lock_acquire(&pool->lock);
    for (struct nrm__link *link = pool->segments.next; link != &pool->segments;
         link = link->next) {
        look_at_segment_locked(NRM__CONTAINER(link, struct nrm__segment, link), out);
    }
    nrm__lock_release(&pool->lock);
}

struct text {
    size_t length;
    char bytes[REPORT_SIZE];
};

/* What does not fit is cut off. */
static void NRM_PRINTF(2, 3) append(struct text *text, const char *format, ...)
{
    va_list args;
    size_t room = sizeof text->bytes - text->length;
    va_start(args, format);
    int n = vsnprintf(text->bytes + text->length, room, format, args);
    va_end(args);
    if (n > 0) {
        text->length += nrm__min((size_t)n, room - 1);
    }
}

static void
append_sum(struct text *text, const char *name, struct sum sum)
{
    char nbytes[32];
    nrm_format_nbytes(sum.nbytes, nbytes, sizeof nbytes);
    append(text, "%s %s in %zu", name, nbytes, sum.n);
}

static void
append_states(struct text *text, const struct sum *states)
{
    struct sum live = states[LIVE];
    live.n += states[CLAIMED].n;
    live.nbytes += states[CLAIMED].nbytes;
    append_sum(text, "in use", live);
    append_sum(text, " blocks, free", states[FREE]);
    append_sum(text, ", freed but not done on the GPU", states[PARKED]);
    append(text, "\n");
}

static void
append_free_sizes(struct text *text, const struct picture *picture)
{
    char low[32], high[32], sum[32], largest[32];
    nrm_format_nbytes(picture->largest_free_nbytes, largest, sizeof largest);
    append(text, "  largest free block %s; free blocks by size:\n", largest);
    for (unsigned log = 0; log < N_SIZES; log++) {
        if (picture->sizes[log].n == 0) {
            continue;
        }
        nrm_format_nbytes((size_t)1 << log, low, sizeof low);
        nrm_format_nbytes((size_t)2 << log, high, sizeof high);
        nrm_format_nbytes(picture->sizes[log].nbytes, sum, sizeof sum);
        append(text, "    %10s to %10s: %zu, %s\n", low, high, picture->sizes[log].n,
               sum);
    }
}

static void
append_segments(struct text *text, const struct picture *picture)
{
    char nbytes[32];
    append(text, "  %zu segments:\n", picture->n_segments);
    for (size_t i = 0; i < nrm__min(picture->n_segments, N_SEGMENTS); i++) {
        nrm_format_nbytes(picture->segments[i].nbytes, nbytes, sizeof nbytes);
        append(text, "    %#zx, %s: ", (size_t)picture->segments[i].start, nbytes);
        append_states(text, picture->segments[i].states);
    }
    if (picture->n_segments > N_SEGMENTS) {
        append(text, "    and %zu more\n", picture->n_segments - N_SEGMENTS);
    }
}

static void
write_report(const struct arena *arena, const struct nrm__request *request,
             struct text *out)
{
    struct picture picture;
    struct timespec now;
    struct tm date;
    char when[32] = "", asked[32], size[32];
    clock_gettime(CLOCK_REALTIME, &now);
    if (gmtime_r(&now.tv_sec, &date) != NULL) {
        strftime(when, sizeof when, "%Y-%m-%d %H:%M:%S UTC", &date);
    }
    take_picture((struct nrm__pool *)arena->pool, &picture);
    nrm_format_nbytes(request->nbytes, asked, sizeof asked);
    nrm_format_nbytes(arena->nbytes, size, sizeof size);
    out->length = 0;
    append(out, "%s, process %ld: an arena of %s of %s memory failed to allocate %s\n",
           when, (long)getpid(), size, nrm_kind_name(arena->base.kind), asked);
    append(out, "  %s\n  ", nrm_last_error()->message);
    append_states(out, picture.states);
    append_free_sizes(out, &picture);
    append_segments(out, &picture);
}

/* One write: the reports of several threads and processes do not mix. errno, or 0. */
static int
append_to_file(const char *path, const struct text *text)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd < 0) {
        return errno;
    }
    ssize_t written = write(fd, text->bytes, text->length);
    int code = written == (ssize_t)text->length ? 0 : written < 0 ? errno : ENOSPC;
    if (close(fd) != 0 && code == 0) {
        code = errno;
    }
    return code;
}

/* Writes the report of a request that failed, and says in its error where it is. */
static void
dump(const struct arena *arena, const struct nrm__request *request, nrm_status status)
{
    struct text text;
    nrm_error first = *nrm_last_error();
    write_report(arena, request, &text);
    void *token = nrm__detach();
    int code = append_to_file(NRM_ARENA_LOG, &text);
    nrm__attach(token);
    const char *name = code != 0 ? nrm__errno_name(code) : "";
    (void)nrm__error_native(status, first.native_code, first.native_name,
                            "%s (%s%s" NRM_ARENA_LOG ")", first.message,
                            code != 0 ? name : "a report is in ",
                            code != 0 ? " kept a report out of " : "");
}

/* ---- there and back ---- */

/* What would not fit into an empty arena the pool is not asked for: it would give the
   arena back first, to make room for it. */
static nrm_status
allocate(const struct arena *arena, const struct nrm__request *request,
         struct nrm__block *out)
{
    char asked[32], size[32];
    size_t slack = request->alignment > arena->alignment ? request->alignment : 0;
    if (slack <= arena->nbytes && request->nbytes <= arena->nbytes - slack) {
        return nrm__allocate(arena->pool, request, out);
    }
    nrm_format_nbytes(request->nbytes, asked, sizeof asked);
    nrm_format_nbytes(arena->nbytes, size, sizeof size);
    return nrm__error(NRM_OUT_OF_MEMORY,
                      "%s aligned to %zu B asked of an arena of %s in all", asked,
                      request->alignment, size);
}

static nrm_status
arena_allocate(nrm_resource *mr, const struct nrm__request *request,
               struct nrm__block *out)
{
    struct arena *arena = arena_from(mr);
    nrm_status status = allocate(arena, request, out);
    if (status != NRM_OK && arena->dumps) {
        dump(arena, request, status);
    }
    return status;
}

static nrm_resource *
arena_branch(nrm_resource *mr, const struct nrm__block *block)
{
    nrm_resource *pool = arena_from(mr)->pool;
    return block->owner == pool ? pool : NULL;
}

static void
arena_deallocate(nrm_resource *mr, const struct nrm__block *block, nrm_stream *stream)
{
    nrm__deallocate(arena_from(mr)->pool, block, stream);
}

/* ---- trim, statistics, check, life ---- */

static nrm_status
arena_trim(nrm_resource *mr, size_t keep_nbytes, size_t *out_nbytes)
{
    nrm_resource *pool = arena_from(mr)->pool;
    return pool->ops->trim(pool, keep_nbytes, out_nbytes);
}

static void
arena_statistics(nrm_resource *mr, nrm_statistics *out)
{
    nrm_resource *pool = arena_from(mr)->pool;
    pool->ops->statistics(pool, out);
}

static void
arena_check(nrm_resource *mr)
{
    nrm_resource *pool = arena_from(mr)->pool;
    NRM_ASSERT(pool->upstream == mr->upstream && pool->kind == mr->kind);
    pool->ops->check(pool);
}

static void
arena_finish(nrm_resource *mr)
{
    struct arena *arena = arena_from(mr);
    if (arena->pool != NULL) {
        nrm__drawer_remove(&arena->drawer);
    }
    nrm_resource_release(arena->pool);
}

static const struct nrm__ops arena_ops = {
    .class_name = "ArenaMemoryResource",
    .flags = NRM__OPS_ADAPTOR,
    .allocate = arena_allocate,
    .deallocate = arena_deallocate,
    .branch = arena_branch,
    .trim = arena_trim,
    .statistics = arena_statistics,
    .check = arena_check,
    .finish = arena_finish,
};

/* ---- construction ---- */

/* Half of what there is; needs a context for the memory of a device. */
static nrm_status
default_nbytes(nrm_resource *upstream, size_t *out)
{
    if (upstream->kind == NRM_KIND_HOST || upstream->kind == NRM_KIND_PINNED) {
        *out = nrm__host_memory_nbytes() / 2;
        return NRM_OK;
    }
    struct nrm__cuda_scope scope;
    size_t free_nbytes = 0, total_nbytes = 0;
    void *token = nrm__detach();
    nrm_status status = nrm__cuda_enter(nrm_resource_device(upstream), &scope);
    if (status == NRM_OK) {
        nrm_CUresult code = scope.driver->cuMemGetInfo(&free_nbytes, &total_nbytes);
        if (code != NRM_CUDA_SUCCESS) {
            status = nrm__cuda_error(code, "cuMemGetInfo on device %d", scope.device);
        }
        nrm__cuda_leave(&scope);
    }
    nrm__attach(token);
    *out = free_nbytes / 2;
    return status;
}

/* Whole pages of the block map, where the upstream aligns to them, as the pool asks
   it. */
static nrm_status
set_size(struct arena *arena, size_t nbytes)
{
    if (nbytes == 0) {
        NRM_TRY(default_nbytes(arena->base.upstream, &nbytes));
        nbytes = nrm__align_down(nbytes, NRM__MAP_PAGE);
    }
    const nrm_resource *upstream = arena->base.upstream;
    size_t granule = nrm__kind_alignment(upstream->kind);
    bool aligns_less = (upstream->flags & (NRM__OPS_OVERLAY | NRM__OPS_OWN_SIZES)) != 0;
    bool maps = upstream->kind == NRM_KIND_HOST || upstream->kind == NRM_KIND_PINNED;
    size_t unit = aligns_less ? granule : NRM__MAP_PAGE;
    arena->alignment = maps && !aligns_less ? NRM__HUGE_PAGE : granule;
    arena->nbytes = nrm__align_up(nrm__min(nbytes, SIZE_MAX / 2), unit);
    return NRM_OK;
}

static nrm_status
make_pool(struct arena *arena)
{
    nrm_pool_options options = NRM_OPTIONS(nrm_pool_options);
    options.segments = NRM_SEGMENTS_ALLOC; /* one block of the upstream */
    options.initial_nbytes = options.maximum_nbytes = arena->nbytes;
    NRM_TRY(nrm_pool_create(arena->base.upstream, &options, &arena->pool));
    nrm__drawer_add(&arena->drawer, &arena->base, arena->pool);
    /* Nobody else knows the pool yet. It keeps its segment while nothing lives in
       it. */
    ((struct nrm__pool *)arena->pool)->idle_nbytes = SIZE_MAX;
    return NRM_OK;
}

nrm_status
nrm_arena_create(nrm_resource *upstream, const nrm_arena_options *options,
                 nrm_resource **out)
{
    nrm_arena_options given = {0};
    nrm_resource *mr;
    NRM__COPY_GIVEN(given, options);
    NRM_TRY(nrm__resource_create(&arena_ops, upstream->kind, upstream,
                                 sizeof(struct arena), &mr));
    struct arena *arena = arena_from(mr);
    arena->dumps = given.dump_log_on_failure;
    nrm_status status = set_size(arena, given.nbytes);
    if (status == NRM_OK) {
        status = make_pool(arena);
    }
    if (status != NRM_OK) {
        nrm__resource_abandon(mr);
        return status;
    }
    nrm__resource_publish(mr);
    *out = mr;
    return NRM_OK;
}
