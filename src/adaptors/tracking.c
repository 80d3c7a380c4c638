/*
 * TrackingResourceAdaptor: which blocks live through it, and where they were asked for.
 *
 * Each block has an entry in a tree by address, with the return addresses of the C
 * stack and, of what Python asked for itself, the lines of its functions. A block
 * enters the tree after its allocation and leaves it before it is given back: another
 * thread may have the address the next moment. What is given back through here but did
 * not come through here is passed on.
 *
 * Return addresses are named when somebody asks, and never under the lock: naming them
 * takes the dynamic linker's, which a thread may hold that allocates while it loads a
 * library. So a report takes out one entry after the other.
 */
#include "adaptors/tracking.h"

#include <stdio.h>
#include <string.h>

#include "adaptors/forward.h"
#include "base/assert.h"
#include "base/error.h"
#include "base/lock.h"
#include "core/nodes.h"
#include "nrm/adaptors.h"
#include "base/given.h"
#include "os/stack.h"

#define MAX_FRAMES 64
#define N_OWN_FRAMES 3 /* of this file and the dispatcher */

struct entry {
    struct nrm__tree_node node; /* `nbytes`: as asked for */
    char *text;                 /* owned, NRM__TRACKING_TEXT_NBYTES; NULL: none */
    size_t n_frames;
    void *frames[];
};

struct tracking {
    nrm_resource base;
    bool captures;
    struct nrm__lock lock;
    struct nrm__tree tree; /* guarded by the lock, as `nbytes` */
    size_t nbytes;
};

static const struct nrm__ops tracking_ops;

static struct tracking *
tracking_from(nrm_resource *mr)
{
    NRM_ASSERT(mr->ops == &tracking_ops);
    return (struct tracking *)mr;
}

/* ---- entries ---- */

static size_t
entry_nbytes(size_t n_frames)
{
    return sizeof(struct entry) + n_frames * sizeof(void *);
}

static void
destroy_entry(struct entry *entry)
{
    if (entry != NULL) {
        nrm__node_deallocate(entry->text, NRM__TRACKING_TEXT_NBYTES);
        nrm__node_deallocate(entry, entry_nbytes(entry->n_frames));
    }
}

static nrm_status
make_entry(const struct tracking *self, struct entry **out)
{
    void *frames[MAX_FRAMES];
    size_t n = self->captures ? nrm__stack_get(frames, MAX_FRAMES) : 0;
    struct entry *entry = nrm__node_allocate(entry_nbytes(n));
    if (entry == NULL) {
        return nrm__error(NRM_OUT_OF_MEMORY, "no memory to track a block");
    }
    entry->n_frames = n;
    memcpy(entry->frames, frames, n * sizeof *frames);
    *out = entry;
    return NRM_OK;
}

static void
insert(struct tracking *self, struct entry *entry, void *ptr, size_t nbytes)
{
    entry->node.start = (uintptr_t)ptr;
    entry->node.nbytes = nbytes;
    nrm__lock_acquire(&self->lock);
    nrm__tree_insert(&self->tree, &entry->node);
    self->nbytes += nbytes;
    nrm__lock_release(&self->lock);
}

static struct entry *
find_locked(const struct tracking *self, const void *ptr)
{
    struct nrm__tree_node *node = nrm__tree_floor(&self->tree, (uintptr_t)ptr);
    return node != NULL && node->start == (uintptr_t)ptr
               ? NRM__CONTAINER(node, struct entry, node)
               : NULL;
}

/* NULL: the block did not come through here. */
static struct entry *
take(struct tracking *self, const void *ptr)
{
    nrm__lock_acquire(&self->lock);
    struct entry *entry = find_locked(self, ptr);
    if (entry != NULL) {
        nrm__tree_remove(&self->tree, &entry->node);
        self->nbytes -= entry->node.nbytes;
    }
    nrm__lock_release(&self->lock);
    return entry;
}

/* ---- blocks ---- */

static nrm_status
tracking_allocate(nrm_resource *mr, const struct nrm__request *request,
                  struct nrm__block *out)
{
    struct tracking *self = tracking_from(mr);
    struct entry *entry;
    NRM_TRY(make_entry(self, &entry));
    nrm_status status = nrm__allocate(mr->upstream, request, out);
    if (status != NRM_OK) {
        destroy_entry(entry);
        return status;
    }
    insert(self, entry, out->ptr, request->nbytes);
    return NRM_OK;
}

static void
tracking_deallocate(nrm_resource *mr, const struct nrm__block *block,
                    nrm_stream *stream)
{
    destroy_entry(take(tracking_from(mr), block->ptr));
    nrm__deallocate(mr->upstream, block, stream);
}

static void
tracking_forget_block(nrm_resource *mr, const struct nrm__block *block)
{
    destroy_entry(take(tracking_from(mr), block->ptr));
}

/* A block that is resized in place keeps its stack: of where it was made. */
static nrm_status
tracking_reallocate(nrm_resource *mr, struct nrm__block *block,
                    const struct nrm__request *request)
{
    struct tracking *self = tracking_from(mr);
    size_t nbytes = block->nbytes;
    struct entry *entry = take(self, block->ptr);
    nrm_status status = nrm__reallocate_in_place(mr->upstream, block, request);
    if (entry != NULL) {
        insert(self, entry, block->ptr, status == NRM_OK ? request->nbytes : nbytes);
    }
    return status;
}

/* ---- stacks of the language ---- */

static void
annotate(struct tracking *self, const void *ptr, const char *text)
{
    char *copy = nrm__node_allocate(NRM__TRACKING_TEXT_NBYTES);
    if (copy == NULL) {
        return;
    }
    snprintf(copy, NRM__TRACKING_TEXT_NBYTES, "%s", text);
    nrm__lock_acquire(&self->lock);
    struct entry *entry = find_locked(self, ptr);
    if (entry != NULL && entry->text == NULL) {
        entry->text = copy;
        copy = NULL;
    }
    nrm__lock_release(&self->lock);
    nrm__node_deallocate(copy, NRM__TRACKING_TEXT_NBYTES);
}

void
nrm__tracking_annotate(nrm_resource *mr, const void *ptr, const char *text)
{
    for (; mr != NULL && (mr->flags & NRM__OPS_STACKS) != 0; mr = mr->upstream) {
        if (mr->ops == &tracking_ops && tracking_from(mr)->captures) {
            annotate(tracking_from(mr), ptr, text);
        }
    }
}

/* ---- reports ---- */

static struct tracking *
checked(nrm_resource *mr)
{
    if (mr->ops != &tracking_ops) {
        (void)nrm__error(NRM_INVALID_VALUE, "a %s tracks no blocks",
                         mr->ops->class_name);
        return NULL;
    }
    return tracking_from(mr);
}

nrm_status
nrm_tracking_get_allocated(nrm_resource *mr, size_t *out_nbytes)
{
    struct tracking *self = checked(mr);
    if (self == NULL) {
        return NRM_INVALID_VALUE;
    }
    nrm__lock_acquire(&self->lock);
    *out_nbytes = self->nbytes;
    nrm__lock_release(&self->lock);
    return NRM_OK;
}

/* One entry, by value. */
struct copy {
    uintptr_t address;
    size_t nbytes, n_frames;
    void *frames[MAX_FRAMES];
    char text[NRM__TRACKING_TEXT_NBYTES];
};

/* The first one above an address; false: none is. */
static bool
copy_above(struct tracking *self, uintptr_t address, struct copy *out)
{
    nrm__lock_acquire(&self->lock);
    struct nrm__tree_node *node = nrm__tree_above(&self->tree, address);
    if (node != NULL) {
        const struct entry *entry = NRM__CONTAINER(node, struct entry, node);
        out->address = node->start;
        out->nbytes = node->nbytes;
        out->n_frames = entry->n_frames;
        memcpy(out->frames, entry->frames, entry->n_frames * sizeof *out->frames);
        out->text[0] = '\0';
        if (entry->text != NULL) {
            memcpy(out->text, entry->text, sizeof out->text);
        }
    }
    nrm__lock_release(&self->lock);
    return node != NULL;
}

/* Text of which as much is kept as fits. */
struct writer {
    char *out;
    size_t size, n; /* n: all of it */
};

static void
put(struct writer *writer, const char *text, size_t n)
{
    if (writer->n + n < writer->size) {
        memcpy(writer->out + writer->n, text, n + 1);
    }
    else if (writer->n < writer->size) {
        size_t room = writer->size - writer->n - 1;
        memcpy(writer->out + writer->n, text, room);
        writer->out[writer->size - 1] = '\0';
    }
    writer->n += n;
}

static void
describe(struct writer *writer, const struct copy *block)
{
    char line[512];
    bool has_stack = block->n_frames != 0 || block->text[0] != '\0';
    int n = snprintf(line, sizeof line, "%p: %zu B%s\n", (void *)block->address,
                     block->nbytes, has_stack ? " : callstack:" : "");
    put(writer, line, (size_t)n);
    put(writer, block->text, strlen(block->text));
    for (size_t i = N_OWN_FRAMES; i < block->n_frames; i++) {
        int prefix = snprintf(line, sizeof line, "#%zu in ", i - N_OWN_FRAMES);
        (void)nrm__stack_describe(block->frames[i], line + prefix,
                                  sizeof line - (size_t)prefix - 1);
        size_t length = strlen(line);
        line[length] = '\n';
        line[length + 1] = '\0';
        put(writer, line, length + 1);
    }
}

nrm_status
nrm_tracking_describe(nrm_resource *mr, char *out, size_t size, size_t *out_size)
{
    struct copy block;
    struct writer writer = {.out = out, .size = size};
    struct tracking *self = checked(mr);
    if (self == NULL) {
        return NRM_INVALID_VALUE;
    }
    put(&writer, "", 0);
    for (uintptr_t above = 0; copy_above(self, above, &block); above = block.address) {
        describe(&writer, &block);
    }
    *out_size = writer.n + 1;
    return NRM_OK;
}

static void
tracking_check(nrm_resource *mr)
{
    struct tracking *self = tracking_from(mr);
    size_t nbytes = 0, n = 0;
    nrm__lock_acquire(&self->lock);
    for (struct nrm__tree_node *node = nrm__tree_above(&self->tree, 0); node != NULL;
         node = nrm__tree_above(&self->tree, node->start)) {
        nbytes += node->nbytes;
        n++;
    }
    NRM_ASSERT(nbytes == self->nbytes && n == self->tree.n_nodes);
    nrm__lock_release(&self->lock);
}

/* ---- life ---- */

/* Blocks of the upstream may outlive it. */
static void
tracking_finish(nrm_resource *mr)
{
    struct tracking *self = tracking_from(mr);
    struct nrm__tree_node *node;
    while ((node = self->tree.root) != NULL) {
        nrm__tree_remove(&self->tree, node);
        destroy_entry(NRM__CONTAINER(node, struct entry, node));
    }
    nrm__lock_finish(&self->lock);
}

static const struct nrm__ops tracking_ops = {
    .class_name = "TrackingResourceAdaptor",
    .flags = NRM__OPS_ADAPTOR,
    .allocate = tracking_allocate,
    .deallocate = tracking_deallocate,
    .reallocate = tracking_reallocate,
    .forget_block = tracking_forget_block,
    .renew_block = nrm__forward_renew_block,
    .statistics = nrm__forward_statistics,
    .check = tracking_check,
    .lock_offset = offsetof(struct tracking, lock),
    .finish = tracking_finish,
};

nrm_status
nrm_tracking_create(nrm_resource *upstream, const nrm_tracking_options *options,
                    nrm_resource **out)
{
    nrm_tracking_options given = {.size = sizeof given};
    nrm_resource *mr;
    NRM__COPY_GIVEN(given, options);
    NRM_TRY(nrm__forward_create(&tracking_ops, upstream, sizeof(struct tracking), &mr));
    struct tracking *self = tracking_from(mr);
    nrm__lock_init(&self->lock, NRM__RANK_LEAF);
    self->captures = given.capture_stacks;
    if (given.capture_stacks) {
        mr->flags |= NRM__OPS_STACKS;
        nrm__stack_prepare();
    }
    nrm__resource_publish(mr);
    *out = mr;
    return NRM_OK;
}
