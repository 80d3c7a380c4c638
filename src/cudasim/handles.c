/* Pools of objects whose addresses are handles.
 *
 * A handle that comes from outside is looked up, never followed: an invalid one must
 * give INVALID_HANDLE, not a crash. Chunks stay for ever, and the object destroyed
 * last is the first to be created again, so a stream may get the handle of one whose
 * work is still pending, as with the real driver. */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

enum { OBJECTS_PER_CHUNK = 128 };

struct sim_chunk {
    struct sim_chunk *next;
    _Alignas(max_align_t) char objects[];
};

static bool
grow(struct sim_handles *pool)
{
    struct sim_chunk *chunk =
        calloc(1, sizeof *chunk + OBJECTS_PER_CHUNK * pool->object_nbytes);
    if (chunk == NULL) {
        return false;
    }
    chunk->next = pool->chunks;
    pool->chunks = chunk;
    for (size_t i = OBJECTS_PER_CHUNK; i-- > 0;) {
        struct sim_handle *handle = (void *)(chunk->objects + i * pool->object_nbytes);
        handle->next_free = pool->free;
        pool->free = handle;
    }
    return true;
}

void *
sim_handle_create(struct sim_handles *pool)
{
    if (pool->free == NULL && !grow(pool)) {
        return NULL;
    }
    struct sim_handle *handle = pool->free;
    pool->free = handle->next_free;
    memset(handle, 0, pool->object_nbytes);
    handle->live = true;
    pool->n_live++;
    return handle;
}

bool
sim_handle_is_live(const struct sim_handles *pool, const void *handle)
{
    uintptr_t address = (uintptr_t)handle;
    size_t nbytes = OBJECTS_PER_CHUNK * pool->object_nbytes;
    for (const struct sim_chunk *chunk = pool->chunks; chunk; chunk = chunk->next) {
        uintptr_t offset = address - (uintptr_t)chunk->objects;
        if (offset < nbytes) {
            return offset % pool->object_nbytes == 0 &&
                   ((const struct sim_handle *)handle)->live;
        }
    }
    return false;
}

void
sim_handle_destroy(struct sim_handles *pool, void *object)
{
    struct sim_handle *handle = object;
    handle->live = false;
    handle->next_free = pool->free;
    pool->free = handle;
    pool->n_live--;
}

void
sim_handles_each(struct sim_handles *pool, void (*visit)(void *handle, void *arg),
                 void *arg)
{
    for (struct sim_chunk *chunk = pool->chunks; chunk; chunk = chunk->next) {
        for (size_t i = 0; i < OBJECTS_PER_CHUNK; i++) {
            struct sim_handle *handle =
                (void *)(chunk->objects + i * pool->object_nbytes);
            if (handle->live) {
                visit(handle, arg);
            }
        }
    }
}
