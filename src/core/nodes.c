/*
 * Memory for descriptions, in a dozen size classes.
 *
 * A class cuts nodes off a chunk from the system and keeps what is given back on a free
 * list through the nodes' first words. Chunks are never given back: descriptions are
 * small beside what they describe, and a pointer that outlived its node then still
 * points to mapped memory. A chunk is mapped with no lock held; when two threads bring
 * one each, the rest of the older one goes to the free list.
 */
#include "core/nodes.h"

#include <stdint.h>
#include <string.h>

#include "base/assert.h"
#include "base/bits.h"
#include "base/lock.h"
#include "os/fork.h"
#include "os/memory.h"

#define CHUNK_NBYTES ((size_t)64 * 1024)
#define CACHE_LINE 64

struct node {
    struct node *next;
};

struct node_class {
    struct nrm__lock lock;
    size_t nbytes;     /* of a node; a multiple of the cache line */
    struct node *free; /* their memory is not zero */
    char *fresh, *end; /* of the newest chunk: zero, never used */
};

#define CLASS(nbytes) {NRM__LOCK_INIT(NRM__RANK_NODES), (nbytes), NULL, NULL, NULL}

static struct node_class classes[] = {
    CLASS(64),  CLASS(128),  CLASS(192),  CLASS(256),  CLASS(384),  CLASS(512),
    CLASS(768), CLASS(1024), CLASS(1536), CLASS(2048), CLASS(3072), CLASS(4096),
};

#define N_CLASSES (sizeof classes / sizeof *classes)

static struct node_class *
class_of(size_t nbytes)
{
    size_t i = 0;
    NRM_ASSERT(nbytes <= classes[N_CLASSES - 1].nbytes);
    while (classes[i].nbytes < nbytes) {
        i++;
    }
    return &classes[i];
}

/* A node, or NULL; *out_is_zero says whether its memory is fresh. */
static void *
take_locked(struct node_class *class, bool *out_is_zero)
{
    struct node *node = class->free;
    *out_is_zero = node == NULL;
    if (node != NULL) {
        class->free = node->next;
        return node;
    }
    if ((size_t)(class->end - class->fresh) < class->nbytes) {
        return NULL;
    }
    class->fresh += class->nbytes;
    return class->fresh - class->nbytes;
}

static void
put_locked(struct node_class *class, void *memory)
{
    struct node *node = memory;
    node->next = class->free;
    class->free = node;
}

static bool
add_chunk(struct node_class *class)
{
    void *chunk;
    if (nrm__map(CHUNK_NBYTES, nrm__page_size(), &chunk) != 0) {
        return false;
    }
    nrm__lock_acquire(&class->lock);
    for (; (size_t)(class->end - class->fresh) >= class->nbytes;
         class->fresh += class->nbytes) {
        put_locked(class, class->fresh);
    }
    class->fresh = chunk;
    class->end = class->fresh + CHUNK_NBYTES;
    nrm__lock_release(&class->lock);
    return true;
}

void *
nrm__node_allocate(size_t nbytes)
{
    struct node_class *class = class_of(nbytes);
    void *node;
    bool is_zero;
    do {
        nrm__lock_acquire(&class->lock);
        node = take_locked(class, &is_zero);
        nrm__lock_release(&class->lock);
    } while (node == NULL && add_chunk(class));
    if (node != NULL && !is_zero) {
        memset(node, 0, nbytes);
    }
    return node;
}

void
nrm__node_deallocate(void *node, size_t nbytes)
{
    if (node == NULL) {
        return;
    }
    struct node_class *class = class_of(nbytes);
    NRM_DEBUG_ASSERT(nrm__is_aligned(node, CACHE_LINE));
    nrm__lock_acquire(&class->lock);
    put_locked(class, node);
    nrm__lock_release(&class->lock);
}

/* ---- fork ---- */

static void
for_each_lock(void (*call)(struct nrm__lock *lock))
{
    for (size_t i = 0; i < N_CLASSES; i++) {
        call(&classes[i].lock);
    }
}

static void
fork_prepare(void)
{
    for_each_lock(nrm__lock_fork_prepare);
}

static void
fork_parent(void)
{
    for_each_lock(nrm__lock_fork_parent);
}

static void
fork_child(void)
{
    for_each_lock(nrm__lock_fork_child);
}

static const struct nrm__fork_hook hook = {
    .rank = NRM__RANK_NODES,
    .prepare = fork_prepare,
    .parent = fork_parent,
    .child = fork_child,
};

__attribute__((constructor)) static void
start(void)
{
    nrm__fork_hook_add(&hook);
}
